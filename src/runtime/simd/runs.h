// Rows that are put together from pieces of other rows: what a panel needs whose columns do not lie side by side.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace fretwork::simd {

/// Bytes that join_runs may read before and behind a run, and write behind the last row.
inline constexpr std::int64_t kRunSlack = 64;

struct Run {
  const std::byte* from;  ///< in the first row
  std::int64_t stride;    ///< bytes to the same place of the next row; 0 repeats the row
  std::int64_t bytes;     ///< at least 1
};

/// Row k of `to` is row k of each run, one after the other; the rows of `to` follow one another without a gap.
void join_runs(std::span<const Run> runs, std::int64_t rows, std::byte* to);

}  // namespace fretwork::simd
