// The parameters of the decoding kernels. Shared by host and device.
#pragma once

#include "ops/attention/cuda/params.h"

namespace fretwork::attention_op::decode {

inline constexpr int kRows = 16;  ///< of a tile: heads of a group × queries
inline constexpr int kKeys = 16;  ///< of a step, which one warp multiplies

/// What a row has from a part of its keys, beside the sum of values: the highest score, and the sum of
/// exp(unit·(score − highest)).
struct alignas(8) Share {
  float highest, sum;
};

/// Queries of all heads that share a key head, against a segment of the steps.
struct Params {
  InputArg q, k, v;
  OutputArg o, lse;  ///< lse: absent when its data is null
  ScoreArg score;
  float unit;         ///< what scores are worth when they are compared: the scale, or 1 where it is in them
  const int* tokens;  ///< kKeys of each step, −1 where there is none
  PaddingArg padding;
  const int* masks;            ///< of each step: −1 where every query has all of its keys, else which of `bits`
  const unsigned short* bits;  ///< of each mask and query: bit n says whether key n is there
  float* sums;                 ///< of each CTA: kRows lines of values; null where a CTA has all steps and writes o
  Share* shares;               ///< of each CTA and row
  int steps, segments, tiles;  ///< CTA = (pair·segments + segment)·tiles + tile
  int rows, heads, kv_heads, ratio, depth, value_depth;
  long long all_rows;  ///< of all heads and batches
};

/// Warps each with a ring of stages of their own. All rings together leave room for two CTAs on a multiprocessor of
/// Hopper and one elsewhere.
struct Shape {
  int warps, stages;
};
constexpr Shape shape_of(int depth) { return {depth <= 128 ? 4 : 2, depth <= 64 ? 6 : 3}; }
constexpr int stage_bytes(int depth) { return 2 * kKeys * line_bytes(depth); }
constexpr int shared_bytes(int depth) { return shape_of(depth).warps * shape_of(depth).stages * stage_bytes(depth); }
inline constexpr int kMergeWarps = 4;

}  // namespace fretwork::attention_op::decode
