// One form for the three products, reached after all checks. Transposes are strides here, and
//   dsd  C = op(S)·op(B)                              is an spmm,
//   dds  C = op(A)·op(S), so Cᵀ = op(S)ᵀ·op(A)ᵀ,      is an spmm on transposed views,
//   sdd  S = op(A)·op(B) at the blocks of the layout  is its own kind.
#pragma once

#include <cstdint>

#include "core/divide.h"
#include "fretwork/context.h"
#include "fretwork/pattern.h"

namespace fretwork::block_matmul {

/// A batch of matrices; strides in elements, 0 where a dimension is broadcast.
struct Matrix {
  void* data = nullptr;
  std::int64_t rows = 0, cols = 0;
  std::int64_t row_stride = 0, col_stride = 0, z_stride = 0, h_stride = 0;
};

/// Packed blocks as stored: entry (y, x) of block n of batch z.
struct Values {
  void* data = nullptr;
  std::int64_t z_stride = 0, block_stride = 0, row_stride = 0, col_stride = 0;
};

enum class Kind : std::uint8_t { spmm, sdd };

struct Problem {
  const char* op = "dsd";  ///< as the caller knows it
  Kind kind = Kind::spmm;
  DType dtype = DType::f32;
  const BlockLayout* layout = nullptr;
  /// spmm only: the product uses Sᵀ (rows of the product are block columns of the layout).
  bool transposed = false;
  /// Result batches, and batches summed into each. A dimension is one or the other, so z = z_out index + z_sum index.
  /// Head h uses head h of the layout, or head 0 of a one-head layout.
  std::int64_t z_out = 1, h_out = 1, z_sum = 1, h_sum = 1;
  Values sparse;       ///< spmm: input; sdd: output
  Matrix left, right;  ///< sdd: A (rows×K) and B (K×cols). spmm: right is the dense operand (K×free), left is unused
  Matrix out;          ///< spmm: (rows×free); sdd: unused
};

namespace cpu {
void run(const Problem& problem, Context& context);
}
namespace cuda {
void run(const Problem& problem, Context& context);
}

}  // namespace fretwork::block_matmul
