// Joins the partial results of row tiles that were split: one warp per row and result, pieces in their order.
#pragma once

#include "device/barrier.cuh"
#include "device/load.cuh"
#include "device/math.cuh"
#include "device/reduce.cuh"
#include "ops/attention/cuda/params.h"
#include "ops/attention/cuda/sinks.cuh"

namespace fretwork::attention_op::hopper {

/// What a part's sums count for beside the highest score of all; a part that has none, or only NaN, keeps its sums'
/// NaN. kScored: scores are in units of 1, not of log 2, and may be large.
template <bool kScored>
__device__ __forceinline__ float share_of(float highest_here, float highest) {
  const float difference = highest_here - (highest == -infinity() ? 0.0f : highest);
  return exp2_fast(kScored ? difference * kLog2e : difference);
}

/// How the parts of a row are weighed: against the highest score of all, and what is there already as one more.
template <bool kScored>
struct RowShares {
  float highest = 0.0f, sum = 1.0f, before = 1.0f;

  /// What is there has this highest score and sum; or its log-sum-exp and 1.
  __device__ __forceinline__ void add_up(const Share* shares, int count, float old, float old_sum) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    highest = old;
    for (int s = lane; s < count; s += 32) {
      highest = fmaxf(highest, shares[s * kRows].highest);
    }
    highest = reduce_lanes<32>(highest, take_max{});
    sum = 0.0f;
    for (int s = lane; s < count; s += 32) {
      sum += shares[s * kRows].sum * share_of<kScored>(shares[s * kRows].highest, highest);
    }
    before = share_of<kScored>(old, highest);
    if constexpr (kScored) {
      before *= old_sum;
    }
    sum = reduce_lanes<32>(sum, take_sum{}) + before;
  }
};

template <typename T, typename Params>
__device__ __forceinline__ void join_rows(const Params& p) {
  constexpr bool kScored = !is_same<Params, JoinParams>;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int at = static_cast<int>(blockIdx.x * kJoinWarps + threadIdx.x / 32), which = at / (p.tiles * kRows);
  const int index = at - which * p.tiles * kRows, row = index % kRows;
  wait_for_earlier_kernel();
  const Split split = p.splits[index / kRows];
  const int rows = kRows >> p.pack, token = p.row_tokens[split.tile * rows + (row & (rows - 1))];
  const int head = p.head0 + (split.head << p.pack) + row / rows;
  if (token < 0) {
    return;
  }
  const i64 first = static_cast<i64>(split.first) * kRows + row;
  const bool weighed = p.shares != nullptr;
  float* const lse =
      static_cast<float*>(p.lse.data) + split.batch * p.lse.batch + head * p.lse.head + token * p.lse.row;
  RowShares<kScored> shares;
  RowSum* top = nullptr;
  if constexpr (kScored) {
    top = p.tops != nullptr ? p.tops + (static_cast<i64>(split.batch) * p.heads + head) * p.queries + token : nullptr;
    const RowSum old = p.merge != 0 ? *top : p.sinks.data != nullptr ? sink_sum(sink_of(p.sinks, head)) : RowSum{};
    shares.add_up(p.shares + first, split.count, old.sum != 0.0f ? old.top : -infinity(), old.sum);
    __syncwarp();
  } else if (weighed) {
    const float old = p.merge != 0 ? *lse : p.sinks.data != nullptr ? sink_of(p.sinks, head) : -infinity();
    shares.add_up(p.shares + first, split.count, old * kLog2e, 1.0f);
  }
  const Lines& out = p.out[which];
  T* const to = static_cast<T*>(out.data) + split.batch * out.batch + head * out.head + token * out.row;
  const float factor = shares.sum == 0.0f ? 0.0f : 1.0f / shares.sum;
  for (int col = 4 * lane; col < p.depth[which]; col += 128) {
    const float* from = p.sums[which] + first * p.lines[which] + col;
    float x[4] = {};
    if (p.merge != 0) {
      const run<T, 4> old = load_run<T, 4>(to + col);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        x[e] = shares.before * widen(old.at(e));
      }
    }
#pragma unroll 8
    for (int s = 0; s < split.count; ++s) {
      const float4 part = *reinterpret_cast<const float4*>(from + static_cast<i64>(s) * kRows * p.lines[which]);
      const float share = weighed ? share_of<kScored>(p.shares[first + s * kRows].highest, shares.highest) : 1.0f;
      x[0] += share * part.x;
      x[1] += share * part.y;
      x[2] += share * part.z;
      x[3] += share * part.w;
    }
    const u32 words[2] = {narrow_pair<T>(x[0] * factor, x[1] * factor), narrow_pair<T>(x[2] * factor, x[3] * factor)};
    store_words<2>(to + col, words);
  }
  if (kScored && lane == 0) {
    *lse = shares.sum == 0.0f ? -infinity() : shares.highest + log2f(shares.sum) * kLn2;
    if (top != nullptr) {
      *top = {shares.highest, shares.sum};
    }
  } else if (weighed && lane == 0) {
    *lse = shares.sum == 0.0f ? -infinity() : (shares.highest + log2f(shares.sum)) * kLn2;
  }
}

template <typename T>
__global__ void __launch_bounds__(32 * kJoinWarps) join(const __grid_constant__ JoinParams p) {
  join_rows<T>(p);
}
/// Of a forward kernel with options.
template <typename T>
__global__ void __launch_bounds__(32 * kJoinWarps) scored_join(const __grid_constant__ ScoredJoinParams p) {
  join_rows<T>(p);
}

}  // namespace fretwork::attention_op::hopper
