// Products with a few rows of x, for which matrices are not worth packing: each is read once, as it lies in memory.
#pragma once

#include <cstdint>
#include <span>

#include "fretwork/tensor.h"

namespace fretwork::simd {

/// Rows of x that are few. More are a matter for tiles.
inline constexpr std::int64_t kFewRows = 8;

struct DotsTerm {
  const void* matrix;  ///< its first element
  std::int64_t at;     ///< where its part of each row of x begins
};

/// sums[n][j·period + l] = Σ over terms and k of matrix[j][k·period + l] · x[n][at + k·period + l].
struct Dots {
  std::span<const DotsTerm> terms;
  std::int64_t rows = 0, depth = 0, period = 1;  ///< of j, k and l
  /// From one row of a matrix, j, to the next; if `across`, from one k to the next, and (j, l) are neighbours. Of
  /// several terms only if the period is 1.
  std::int64_t stride = 0;
  bool across = false;
  const void* x = nullptr;  ///< of the type of sums
  std::int64_t x_stride = 0, batch = 0;
  void* sums = nullptr;
  std::int64_t sum_stride = 0;
  bool add = false;  ///< to what `sums` holds; only if `across`
};

/// For matrices of f64, f32, f16 and bf16. Sums are f64 for f64 and f32 for the rest.
void dots(const Dots& what, DType dtype);

}  // namespace fretwork::simd
