// The end of a product on the CPU: bias and activation, on sums in rows.
#pragma once

#include <cstdint>

#include "fretwork/ops.h"
#include "fretwork/tensor.h"

namespace fretwork::simd {

/// sums = activation(sums + bias): a bias for each row, or for each column, or none.
struct Finish {
  void* sums;
  std::int64_t stride, rows, cols;  ///< columns are whole vectors
  const void* row_bias = nullptr;   ///< of the type of the sums
  const void* col_bias = nullptr;
  Activation activation = Activation::none;
};
/// Sums are f64 for f64 and f32 for the rest.
void finish(const Finish& what, DType dtype);

}  // namespace fretwork::simd
