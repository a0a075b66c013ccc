// Parameters and sizes of the kernel for few columns and small weights; shared by host and device.
#pragma once

namespace fretwork::two_four::direct {

/// A CTA has 16 rows; its warps take blocks of the depth in turn, 128 elements each.
inline constexpr int kRows = 16, kDepth = 128;
/// Up to so many warps, of which each has `blocks` in flight; more would not find registers.
constexpr int most_warps(int tiles, int blocks) { return tiles * blocks > 2 ? 8 : 16; }
/// Words from one column's sums to the next; four more than rows, so that banks differ.
inline constexpr int kPitch = kRows + 4;
constexpr int shared_bytes(int tiles, int warps) { return 4 * warps * 8 * tiles * kPitch; }

/// Strides of the operands are in bytes, others in elements.
struct Params {
  const void *values, *words, *b, *bias;  ///< bias of the result's dtype, or null
  void* c;
  long long values_line, words_line, b_col;
  long long c_row, c_col, bias_stride;
  int m, n, blocks;
  int activation;  ///< as fretwork::Activation counts
};

}  // namespace fretwork::two_four::direct
