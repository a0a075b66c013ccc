// Block softmax after all checks: what both backends receive.
#pragma once

#include <cstdint>
#include <string>

#include "fretwork/context.h"
#include "fretwork/ops.h"
#include "fretwork/pattern.h"

namespace fretwork::block_softmax_op {

/// Packed blocks: entry (y, x) of block n of batch z. Strides in elements.
struct Packed {
  void* data = nullptr;
  std::int64_t z = 0, block = 0, row = 0, col = 0;
};

/// Something of the dense shape (Z,H,M,N); a stride is 0 where it is broadcast. Absent when data is null.
struct Dense {
  void* data = nullptr;
  DType dtype = DType::f32;
  std::int64_t z = 0, h = 0, row = 0, col = 0;
  MaskMode mode = MaskMode::add;
};

struct Problem {
  DType dtype = DType::f32;
  const BlockLayout* layout = nullptr;
  std::int64_t batch = 0;
  double scale = 1.0;
  Packed values, out;
  Dense rpe, key_padding, attn;
};

/// The sizes of rpe's gradient; each is 1 or the full one.
struct RpeSizes {
  std::int64_t z = 1, h = 1, rows = 1, cols = 1;
};

struct BackwardProblem {
  DType dtype = DType::f32;
  const BlockLayout* layout = nullptr;
  std::int64_t batch = 0;
  double scale = 1.0;
  Packed out, d_out, d_values;
  Dense d_rpe;
  RpeSizes rpe_sizes;
};

namespace cpu {
void forward(const Problem& problem, Context& context);
void backward(const BackwardProblem& problem, Context& context);
}  // namespace cpu
namespace cuda {
void forward(const Problem& problem, Context& context);
void backward(const BackwardProblem& problem, Context& context);
/// The kernel that a problem takes where rows are `length` blocks long.
std::string kernel_name(const Problem& problem, int length);
std::string kernel_name(const BackwardProblem& problem, int length);
}  // namespace cuda

}  // namespace fretwork::block_softmax_op
