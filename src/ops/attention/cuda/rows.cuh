// Kernels that run before and after the products: row statistics, padding bits, copies, fills and sums.
#pragma once

#include "device/barrier.cuh"
#include "device/load.cuh"
#include "device/reduce.cuh"
#include "ops/attention/cuda/params.h"
#include "ops/attention/cuda/sinks.cuh"
#include "ops/attention/cuda/walk.cuh"

namespace fretwork {

/// A warp for each query; or, where rows of o and d_o can be read kRun = 8 neighbours at a time, 16 lanes. kScore:
/// ScoreStats are made.
template <typename T, int kRun = 1, bool kScore = false>
__global__ void __launch_bounds__(256) attention_stats(const __grid_constant__ attention_op::StatsParams p) {
  constexpr int kLanes = kRun > 1 ? 16 : 32;
  let_next_kernel_start();
  const i64 index = (static_cast<i64>(blockIdx.x) * 256 + threadIdx.x) / kLanes;
  const i64 at = index < p.all_rows ? index : p.all_rows - 1;  // all lanes take part in the sum
  const bool small = p.all_rows <= 0xffffffffll;               // then divisions are quick
  const i64 set = small ? static_cast<u32>(at) / static_cast<u32>(p.rows) : at / p.rows;
  const i64 batch = static_cast<u32>(set) / static_cast<u32>(p.heads);  // heads and batches never take 32 bits
  const i64 row = at - set * p.rows, head = set - batch * p.heads;
  const auto place = [&](const OutputArg& of) { return batch * of.batch + head * of.head + row * of.row; };
  const float lse = static_cast<const float*>(p.lse.data)[place(p.lse)];
  const float given = p.d_lse.data != nullptr ? static_cast<const float*>(p.d_lse.data)[place(p.d_lse)] : 0.0f;
  const T* const o = static_cast<const T*>(p.o.data) + place(p.o);
  const T* const d_o = static_cast<const T*>(p.d_o.data) + place(p.d_o);
  float sum = 0.0f;
  for (int col = static_cast<int>(threadIdx.x) % kLanes * kRun; col < p.value_depth; col += kLanes * kRun) {
    const run<T, kRun> x = load_run<T, kRun>(o + col * p.o.col), y = load_run<T, kRun>(d_o + col * p.d_o.col);
#pragma unroll
    for (int n = 0; n < kRun; ++n) {
      sum += widen(x.at(n)) * widen(y.at(n));
    }
  }
  sum = reduce_lanes<kLanes>(sum, take_sum{});
  if (threadIdx.x % kLanes == 0 && index < p.all_rows) {
    if constexpr (kScore) {
      const RowSum all =
          p.sums != nullptr && is_large(lse) ? p.sums[at] : RowSum{lse == -infinity() ? infinity() : lse, 1.0f};
      const ScoreStats made{all.top, sum - given, log2f(all.sum), 0.0f};
      if (p.sink_terms.data != nullptr) {
        const float below = (sink_of(p.sinks, static_cast<int>(head)) - made.lse) * kLog2e - made.rest;
        static_cast<float*>(p.sink_terms.data)[place(p.sink_terms)] = -exp2_fast(below) * made.delta;
      }
      if (p.in_tiles) {
        float* const to = reinterpret_cast<float*>(static_cast<ScoreStats*>(p.stats) + at / 64 * 64) + at % 64;
        to[0] = made.lse;
        to[64] = made.delta;
        to[128] = made.rest;
      } else {
        static_cast<ScoreStats*>(p.stats)[at] = made;
      }
      return;
    }
    auto* const stats = static_cast<RowStats*>(p.stats);
    const float lse_2 = lse == -infinity() ? infinity() : lse * kLog2e;
    if (p.sink_terms.data != nullptr) {
      const float below = (sink_of(p.sinks, static_cast<int>(head)) - lse) * kLog2e;
      static_cast<float*>(p.sink_terms.data)[place(p.sink_terms)] =
          lse == -infinity() ? 0.0f : -exp2_fast(below) * (sum - given);
    }
    if (p.in_tiles) {
      float* const to = reinterpret_cast<float*>(stats + at / 64 * 64) + at % 64;
      to[0] = lse_2;
      to[64] = sum - given;
    } else {
      stats[at] = {lse_2, sum - given};
    }
  }
}

/// What rows with sinks have before their first component, a thread for each.
__global__ void __launch_bounds__(256) attention_sinks(const __grid_constant__ attention_op::SinkParams p) {
  const i64 at = static_cast<i64>(blockIdx.x) * 256 + threadIdx.x;
  if (at >= p.all_rows) {
    return;
  }
  const i64 set = at / p.rows, batch = set / p.heads, head = set - batch * p.heads;
  const float sink = sink_of(p.sinks, static_cast<int>(head));
  p.sums[at] = attention_op::sink_sum(sink * p.unit);
  if (p.lse.data != nullptr) {
    static_cast<float*>(p.lse.data)[batch * p.lse.batch + head * p.lse.head + (at - set * p.rows) * p.lse.row] = sink;
  }
}

/// A warp for each column tile of each batch element. The masks of a tile are asked for all at once.
__global__ void __launch_bounds__(32 * attention_op::kSeenTiles)
    attention_seen(const __grid_constant__ attention_op::SeenParams p) {
  constexpr int kWords = 4;  // the most that a tile has
  __shared__ u32 any;
  const int groups = (p.tile_count + 31) / 32, batch = static_cast<int>(blockIdx.x) / groups;
  const int group = static_cast<int>(blockIdx.x) - batch * groups, words = p.side / 32;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int tile = group * 32 + warp, at = batch * p.tile_count + tile;
  let_next_kernel_start();
  if (threadIdx.x == 0) {
    any = 0;
  }
  __syncthreads();
  if (tile < p.tile_count) {
    const int used = p.tokens != nullptr ? p.tile_used[tile] : p.tiles[tile].used;
    int token[kWords];
    bool hidden[kWords];
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      token[w] = -1;
      if (w < words && p.tokens != nullptr) {
        token[w] = p.tokens[tile * p.side + 32 * w + lane];
      } else if (w < words) {
        const Place place = place_of(p.order, 32 * w + lane);
        token[w] = is_inside(p.tiles[tile].inside, place.at) ? p.tiles[tile].base + place.offset : -1;
      }
    }
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      hidden[w] = token[w] >= 0 && is_padding(p.padding, batch, token[w]);
    }
    u32 hides = 0, sees = 0;
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      hides |= __ballot_sync(~0u, hidden[w]);
      const u32 seen = __ballot_sync(~0u, token[w] >= 0 && !hidden[w]);
      if (w < words) {
        const u32 word = seen & (used >= 0 ? p.used[used + w] : ~0u);
        sees |= word;
        if (lane == 0) {
          p.words[at * words + w] = word;
        }
      }
    }
    if (lane == 0) {
      p.first[at] = hides != 0 || used >= 0 ? at * words : -1;
      atomicOr(&any, (sees != 0 ? 1u : 0u) << warp);
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    p.tile_words[blockIdx.x] = any;
  }
}

/// A warp for 32 keys.
template <typename T>
__global__ void __launch_bounds__(256) attention_clear(const __grid_constant__ attention_op::ClearParams p) {
  const i64 index = static_cast<i64>(blockIdx.x) * 256 + threadIdx.x;
  const i64 line = (p.keys + 31) / 32 * 32, set = min(index, p.all - 1) / line, batch = set / p.heads;
  const int key = static_cast<int>(min(index, p.all - 1) - set * line), lane = static_cast<int>(threadIdx.x) % 32;
  const bool hidden = index < p.all && key < p.keys && is_padding(p.padding, static_cast<int>(batch), key);
  const u32 rows = __ballot_sync(~0u, hidden);
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    const OutputArg& out = p.out[n];
    T* const head = static_cast<T*>(out.data) + batch * out.batch + (set - batch * p.heads) * out.head;
    for (u32 left = out.data != nullptr ? rows : 0; left != 0; left &= left - 1) {
      T* const row = head + (key - lane + __ffs(static_cast<int>(left)) - 1) * out.row;
      for (int col = lane; col < p.depth[n]; col += 32) {
        row[col * out.col] = narrow<T>(0.0f);
      }
    }
  }
}

/// Moves elements between places of any strides, rounding to To.
template <typename From, typename To>
__global__ void __launch_bounds__(256) attention_copy(const __grid_constant__ attention_op::CopyParams p) {
  const i64 count = p.sizes[0] * p.sizes[1] * p.sizes[2] * p.sizes[3];
  for (i64 n = static_cast<i64>(blockIdx.x) * 256 + threadIdx.x; n < count; n += static_cast<i64>(gridDim.x) * 256) {
    i64 left = n, from = 0, to = 0;
#pragma unroll
    for (int d = 3; d >= 0; --d) {
      const i64 line = left / p.sizes[d], at = left - line * p.sizes[d];
      from += at * p.from_strides[d];
      to += at * p.to_strides[d];
      left = line;
    }
    static_cast<To*>(p.to)[to] =
        narrow<To>(p.from != nullptr ? widen(static_cast<const From*>(p.from)[from]) : p.value);
  }
}

/// Sums over the third dimension: a CTA for each line, or a thread if they are short. The result's stride there is not
/// looked at.
template <typename To, int kWarps>
__global__ void __launch_bounds__(32 * kWarps) attention_sum(const __grid_constant__ attention_op::CopyParams p) {
  const bool brief = p.sizes[2] <= attention_op::kShortSum;
  i64 left = brief ? static_cast<i64>(blockIdx.x) * (32 * kWarps) + threadIdx.x : blockIdx.x, from = 0, to = 0;
  if (left >= p.sizes[0] * p.sizes[1] * p.sizes[3]) {
    return;
  }
  for (const int d : {3, 1, 0}) {
    const i64 at = left % p.sizes[d];
    left /= p.sizes[d];
    from += at * p.from_strides[d];
    to += at * p.to_strides[d];
  }
  float sum = 0.0f;
#pragma unroll 8
  for (i64 n = brief ? 0 : threadIdx.x; n < p.sizes[2]; n += brief ? 1 : 32 * kWarps) {
    sum += static_cast<const float*>(p.from)[from + n * p.from_strides[2]];
  }
  if (!brief) {
    sum = reduce_block<kWarps>(sum, take_sum{});
  }
  if (brief || threadIdx.x == 0) {
    static_cast<To*>(p.to)[to] = narrow<To>(sum);
  }
}

}  // namespace fretwork
