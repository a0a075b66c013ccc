// What the kernel for few columns is launched with; shared by host and device.
#pragma once

namespace fretwork::two_four::few {

inline constexpr int kWarps = 8, kThreads = 32 * kWarps;
inline constexpr int kRows = 32;  ///< of the sparse operand that a warp multiplies
/// A run is the k of 16 bytes of values: 32 bytes of a column of b. A warp multiplies a block of 16 runs in one step.
inline constexpr int kRunBytes = 32, kBlockRuns = 16;
inline constexpr int kMostColumns = 64;

/// Warps of a CTA stand along the rows (fastest) and along k, in powers of two: those along k take neighbouring blocks.
constexpr int parts_of(int log_rows) { return kWarps >> log_rows; }
/// Words from one column's sums to the next where warps add theirs up; four more than rows, so that banks differ.
constexpr int pitch_of(int log_rows) { return (kRows << log_rows) + 4; }
/// Of shared memory: two stages of b, and after them the sums of all warps.
constexpr int shared_bytes(int columns, int log_rows) {
  const int stages = 2 * parts_of(log_rows) * kBlockRuns * kRunBytes * columns;
  const int sums = parts_of(log_rows) * columns * pitch_of(log_rows) * 4;
  return stages > sums ? stages : sums;
}

/// What the result is made of.
enum Out { kOutF32, kOutF16, kOutBf16, kOutI32 };

/// Strides of the operands are in bytes, others in elements. A column is j of n of a batch: columns = batch·n.
struct Params {
  const void *values, *words, *b, *bias;
  const float *scale_s, *scale_b;
  void* c;
  long long values_line, words_line;
  long long b_row, b_col, b_batch;
  long long c_row, c_col, c_batch, bias_stride, scale_s_stride, scale_b_stride;
  int m, n, columns;
  int runs;      ///< in k
  int log_rows;  ///< of the number of warps along the rows
  int split;     ///< CTAs of a cluster, which share the k of their rows
  int activation;
  Out out;
  bool words_wide;  ///< the metadata of four runs can be read at once
  bool b_wide;      ///< so can four bytes of b along k
  bool c_rows;      ///< neighbouring threads write neighbouring rows of c, not columns
  bool c_wide;      ///< and a thread four of them at once
};

}  // namespace fretwork::two_four::few
