// What results are compared with: float64 sums with a bound of their rounding, masks of layouts and patterns, and how
// far a result of each type may be off.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "fretwork/fretwork.h"

namespace fretwork {

/// By how much rounding once to a type changes a number, relative to it.
inline double unit_roundoff(DType dtype) {
  switch (dtype) {
    case DType::f64:
      return 0x1p-53;
    case DType::f32:
      return 0x1p-24;
    case DType::f16:
      return 0x1p-11;
    default:
      return 0x1p-8;
  }
}

/// A sum, and the sum of its magnitudes, which bounds the rounding.
struct ReferenceSum {
  double value = 0, magnitude = 0;
  void add(double product) {
    value += product;
    magnitude += std::abs(product);
  }
  /// How far a result may be off that is accumulated in f32 (f64 in f64) and rounded once.
  double tolerance(DType dtype) const {
    const double accumulated = dtype == DType::f64 ? 0x1p-45 : 0x1p-18;
    return unit_roundoff(dtype) * std::abs(value) + accumulated * magnitude + 1e-7;
  }
  /// Infinite products may also meet in another order and give NaN.
  bool accepts(double got, DType dtype) const {
    return std::isfinite(value) ? std::abs(got - value) <= tolerance(dtype) : !std::isfinite(got);
  }
};

/// How far results of a type may be off, in units of the reference's largest magnitude.
inline double relative_tolerance(DType dtype) {
  return dtype == DType::f64 ? 1e-12 : dtype == DType::f32 ? 2e-6 : dtype == DType::f16 ? 2e-3 : 1.5e-2;
}

/// The largest finite magnitude, and at least 1e-3.
inline double largest_magnitude(std::span<const double> values) {
  double largest = 1e-3;
  for (const double value : values) {
    largest = std::isfinite(value) ? std::max(largest, std::abs(value)) : largest;
  }
  return largest;
}

/// Every element within `allowed` times the reference's largest magnitude, or `at_least` if that is more; NaN and
/// infinity where the reference has them, and nowhere else.
inline void expect_close(std::span<const double> got, std::span<const double> want, double allowed,
                         const std::string& what, double at_least = 0.0) {
  ASSERT_EQ(got.size(), want.size()) << what;
  const double scale = std::max(largest_magnitude(want), at_least);
  for (std::size_t k = 0; k < got.size(); ++k) {
    const bool right = std::isnan(want[k])   ? std::isnan(got[k])
                       : std::isinf(want[k]) ? got[k] == want[k]
                                             : std::abs(got[k] - want[k]) <= allowed * scale;
    ASSERT_TRUE(right) << what << " at " << k << ": got " << got[k] << ", expected " << want[k] << " within "
                       << allowed * scale;
  }
}

/// Elements that are there with a probability.
inline std::vector<std::uint8_t> random_mask(std::int64_t count, double density, unsigned seed) {
  std::mt19937 random(seed);
  std::bernoulli_distribution there(density);
  std::vector<std::uint8_t> mask(static_cast<std::size_t>(count));
  std::ranges::generate(mask, [&] { return static_cast<std::uint8_t>(there(random)); });
  return mask;
}

/// The dense mask, (heads, rows, columns).
inline std::vector<std::uint8_t> mask_of(const BlockLayout& layout) {
  const auto& s = layout.sizes();
  std::vector<std::uint8_t> mask(static_cast<std::size_t>(s.heads * s.rows * s.block_rows * s.cols * s.block_cols));
  layout.mask(mask);
  return mask;
}

/// The same of a pattern, (rows, columns).
inline std::vector<std::uint8_t> mask_of(const RegularPattern& pattern) {
  std::vector<std::uint8_t> mask(static_cast<std::size_t>(pattern.rows() * pattern.cols()));
  pattern.mask(mask);
  return mask;
}

/// For the block at (head, block row, block column), in row-major order: its place among the packed ones, or −1.
/// Counted from the mask.
inline std::vector<std::int64_t> packed_blocks(const BlockLayout& layout) {
  const auto& s = layout.sizes();
  const std::vector<std::uint8_t> mask = mask_of(layout);
  std::vector<std::int64_t> places;
  std::int64_t count = 0;
  for (std::int64_t line = 0; line < s.heads * s.rows; ++line) {
    for (std::int64_t col = 0; col < s.cols; ++col) {
      const std::int64_t at = (line * s.block_rows * s.cols + col) * s.block_cols;
      places.push_back(mask[static_cast<std::size_t>(at)] != 0 ? count++ : -1);
    }
  }
  EXPECT_EQ(count, layout.nnz());
  return places;
}

/// For each packed element, in (block, y, x) order: its place in the dense (heads, rows, columns).
inline std::vector<std::size_t> dense_places(const BlockLayout& layout) {
  const auto& s = layout.sizes();
  const std::vector<std::int64_t> blocks = packed_blocks(layout);
  std::vector<std::size_t> places;
  for (std::int64_t n = 0; n < std::ssize(blocks); ++n) {
    for (std::int64_t k = 0; blocks[static_cast<std::size_t>(n)] >= 0 && k < s.block_rows * s.block_cols; ++k) {
      const std::int64_t row = n / s.cols * s.block_rows + k / s.block_cols;
      places.push_back(static_cast<std::size_t>((row * s.cols + n % s.cols) * s.block_cols + k % s.block_cols));
    }
  }
  return places;
}

}  // namespace fretwork
