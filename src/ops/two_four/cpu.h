// The kernels behind the CPU's 2:4 products: some lines of the sparse operand against a packed piece of the dense one.
#pragma once

#include <array>
#include <cstdint>

#include "fretwork/tensor.h"

namespace fretwork::two_four::cpu {

/// Lines that a kernel takes at a time, at most.
inline constexpr int kMaxLines = 4;

/// Some lines of the sparse operand from a piece's first group on: what is kept, widened to the type of the sums or as
/// the kernel wants it, and bytes of two nibbles each.
struct Lines {
  int count = 0;
  std::array<const void*, kMaxLines> values{};
  std::array<const std::uint8_t*, kMaxLines> nibbles{};
  std::int64_t groups = 0;
  void* sums = nullptr;  ///< of the first line; added to
  std::int64_t sum_stride = 0;
};

/// The type of sums and widened values that a kernel is made for, in groups of 4, or of f32 in groups of 2.
enum class Kind : std::uint8_t { f64, f32, i32, f32_of_two };

/// Columns on lanes: sums[i][j] += value · panel[row][j] for each kept value and the row that its nibble picks. The
/// panel has whole vectors, at most kMaxVectors, in each row.
inline constexpr int kMaxVectors = 4;
struct RowsKernel {
  std::int64_t lanes;
  void (*add)(const Lines& lines, const void* panel, int vectors);
};
const RowsKernel& rows_kernel(Kind kind);

/// Groups on lanes, for few columns: sums[i][j] += Σ value · the place of column j that its nibble picks. A panel
/// holds, for each `lanes` groups and each column, a vector of the first places of the groups, then of the second, and
/// so on.
struct DotsKernel {
  std::int64_t lanes;  ///< groups in a step
  /// Turns a column, padded with zeros to whole steps, to its vectors: those of a step lie `stride` elements behind
  /// those of the step before.
  void (*pack)(const void* column, std::int64_t steps, std::int64_t stride, void* panel);
  void (*add)(const Lines& lines, const void* panel, std::int64_t cols, std::int64_t stride);
};
const DotsKernel& dots_kernel(Kind kind);

}  // namespace fretwork::two_four::cpu
