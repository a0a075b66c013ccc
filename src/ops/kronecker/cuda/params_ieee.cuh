// Parameters of the exact fp32 kernels; shared by host and device.
#pragma once

#include "ops/kronecker/cuda/params.h"

namespace fretwork::kronecker::ieee {

/// Weights in the order that a kernel reads: the four axes from the outermost, lines of the last `line` elements apart.
struct OrderParams {
  const float* from;
  float* to;
  long long strides[4];
  unsigned sizes[4], line, count;
};

/// Tiles of product_ieee: 64·warp_rows × 16·quads·warp_cols.
struct LineTile {
  int quads, warp_rows, warp_cols;
  constexpr int rows() const { return 64 * warp_rows; }
  constexpr int cols() const { return 16 * quads * warp_cols; }
  constexpr int threads() const { return 32 * warp_rows * warp_cols; }
};
inline constexpr int kLineStep = 16, kLineStages = 3;

/// Words of one operand in a stage: depth inner with a gap, so that 8 lines of 16 bytes fall into different banks.
constexpr int line_words(int lines, bool depth_inner) { return lines * (depth_inner ? kLineStep + 4 : kLineStep); }

/// Tiles of deltas_ieee: v neighbouring δ, e of them to a thread; 64·warps/v rows × 4·c·e columns.
struct DeltaTile {
  int v, e, c, warps;
  constexpr int rows() const { return 64 * warps / v; }
  constexpr int cols() const { return 4 * c * e; }
  constexpr int threads() const { return 32 * warps; }
};
inline constexpr int kDeltaStep = 8, kDeltaStages = 3;

/// Words of one operand in a stage: depth inner with a gap, so that neighbouring lines fall into different banks.
constexpr int delta_words(int lines, int v, bool depth_inner) {
  return lines * (kDeltaStep * v + (!depth_inner ? 0 : v == 8 ? 8 : 4));
}

}  // namespace fretwork::kronecker::ieee
