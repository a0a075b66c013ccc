// The kernels of the CPU's 2:4 products: some lines of the sparse operand times a packed piece of the dense one.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

#include "ops/two_four/problem.h"

namespace fretwork::two_four::cpu {

/// Lines that a kernel takes at a time, at most.
inline constexpr int kMaxLines = 4;

/// Some lines of the sparse operand from a piece's first group on: what is kept, as the kernel wants it, and bytes of
/// two nibbles each.
struct Lines {
  int count = 0;
  std::array<const void*, kMaxLines> values{};
  std::array<const std::uint8_t*, kMaxLines> nibbles{};
  std::int64_t groups = 0;
  void* sums = nullptr;  ///< of the first line
  bool add = false;      ///< to what these hold
  std::int64_t sum_stride = 0;

  /// The first lines are done.
  template <typename Sum>
  void drop(int lines) {
    std::copy(values.begin() + lines, values.end(), values.begin());
    std::copy(nibbles.begin() + lines, nibbles.end(), nibbles.begin());
    sums = static_cast<Sum*>(sums) + lines * sum_stride;
    count -= lines;
  }
};

/// The type of sums and of widened values that a kernel is made for, in groups of 4, or of f32 in groups of 2; or
/// 16-bit values in pairs.
enum class KernelType : std::uint8_t { f64, f32, i32, f32_of_two, bf16_pairs, i16_pairs };

/// Columns on lanes: sums[i][j] (+)= value · panel[row][j] for each kept value and the row that its nibble picks. The
/// panel has whole vectors in each row.
struct RowsKernel {
  std::int64_t lanes, vectors;  ///< columns in a vector, and vectors in a panel at most
  std::int64_t group_bytes;     ///< of one column in a panel, for each group
  /// If set, makes the panel from rows of pairs of neighbours.
  void (*expand)(const void* pairs, std::int64_t groups, std::int64_t width, void* panel);
  void (*add)(const Lines& lines, const void* panel, int vectors);
};

/// Groups on lanes, for few columns: sums[i][j] (+)= Σ value · the place of column j that its nibble picks. A panel
/// holds for each `lanes` groups, a step, and each column what the kernel's `pack` makes of it, as many elements.
struct DotsKernel {
  std::int64_t lanes;  ///< groups in a step
  /// Packs a column, padded with zeros to whole steps. Its elements of a step lie `stride` behind those of the step
  /// before.
  void (*pack)(const void* column, std::int64_t steps, std::int64_t stride, void* panel);
  void (*add)(const Lines& lines, const void* panel, std::int64_t cols, std::int64_t stride);
};

/// For the best instruction set of this machine. There are no dots of i32.
const RowsKernel& rows_kernel(KernelType type);
const DotsKernel& dots_kernel(KernelType type);

/// The same in pairs, where the CPU has them; rows_kernel and dots_kernel ask.
bool has_pairs();
const RowsKernel& pairs_rows_kernel(KernelType type);
const DotsKernel& pairs_dots_kernel(KernelType type);
/// From neighbours of f8_e4m3 or f8_e5m2 to bf16.
void widen_pairs(const std::uint8_t* from, std::int64_t count, DType dtype, std::uint16_t* out);

/// What run does where the CPU has no pairs, or the dtype none.
void run_widened(const Problem& problem, Context& context);

}  // namespace fretwork::two_four::cpu
