// Parameters and sizes of the mma.sp kernel for up to 64 columns; shared by host and device.
#pragma once

#include "ops/two_four/cuda/out_type.cuh"

namespace fretwork::two_four::few {

inline constexpr int kLogWarps = 3, kWarps = 1 << kLogWarps, kThreads = 32 * kWarps;
inline constexpr int kRows = 32;  ///< of the sparse operand that a warp multiplies
/// A run is the k of 16 bytes of values: 32 bytes of a column of b. A warp multiplies a block of 8 runs in a stage.
inline constexpr int kRunBytes = 32, kBlockRuns = 8, kValueBytes = kRows * kBlockRuns * 16;
inline constexpr int kMostColumns = 64;
inline constexpr int kMostStages = 5;

/// Warps of a CTA stand along the rows (fastest) and along k, in powers of two: those along k take neighbouring blocks.
constexpr int parts_of(int log_rows) { return kWarps >> log_rows; }
/// Words from one column's sums to the next where warps add theirs up; four more than rows, so that banks differ.
constexpr int pitch_of(int log_rows) { return (kRows << log_rows) + 4; }
/// Of shared memory: a stage's values, metadata (`run_words` bytes of a run) and b.
constexpr int stage_bytes(int columns, int log_rows, int run_words) {
  return kWarps * (kValueBytes + kRows * kBlockRuns * run_words) +
         parts_of(log_rows) * kBlockRuns * kRunBytes * columns;
}
/// Of the sums of all warps, which take the place of the stages.
constexpr int sums_bytes(int columns, int log_rows) { return parts_of(log_rows) * columns * pitch_of(log_rows) * 4; }

/// Strides of the operands are in bytes, others in elements. A column is j of n of a batch: columns = batch·n.
struct Params {
  const void *values, *words, *b, *bias;
  const float *scale_s, *scale_b, *scale_out;
  void* c;
  long long values_line, words_line;
  long long b_row, b_col, b_batch;
  long long c_row, c_col, c_batch, bias_stride, scale_s_stride, scale_b_stride;
  int m, n, columns;
  int runs;      ///< in k
  int log_rows;  ///< of the number of warps along the rows
  int split;     ///< CTAs of a cluster, which share the k of their rows
  int stages;    ///< of the ring in shared memory, 2 to kMostStages
  int activation;
  OutType out, bias_type;
  int words_step;    ///< bytes of metadata that can be read at once: 16, 4 or less
  long long b_wide;  ///< from column to column of b in bytes, if four of them can be read at once; else 0
  bool c_rows;       ///< neighbouring threads write neighbouring rows of c, not columns
  bool c_wide;       ///< and a thread four of them at once
};

}  // namespace fretwork::two_four::few
