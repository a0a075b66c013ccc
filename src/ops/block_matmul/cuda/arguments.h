// A problem in the form in which the portable, generic and small-tile kernels take it.
#pragma once

#include "ops/block_matmul/cuda/params.h"
#include "ops/block_matmul/problem.h"

namespace fretwork::block_matmul {

/// Rows of op(S) in blocks, and the sizes of its blocks.
struct Shape {
  std::int64_t lines, block_rows, block_cols;
};
inline Shape shape_of(const Problem& problem) {
  const auto& s = problem.layout->sizes();
  return problem.transposed ? Shape{s.cols, s.block_cols, s.block_rows} : Shape{s.rows, s.block_rows, s.block_cols};
}

inline MatrixArg matrix_arg(const Matrix& m) { return {m.data, m.row_stride, m.col_stride, m.z_stride, m.h_stride}; }

inline BlocksArg blocks_arg(const Problem& problem) {
  const Values& v = problem.sparse;
  return problem.transposed ? BlocksArg{v.data, v.z_stride, v.block_stride, v.col_stride, v.row_stride}
                            : BlocksArg{v.data, v.z_stride, v.block_stride, v.row_stride, v.col_stride};
}

}  // namespace fretwork::block_matmul
