// Attention with few queries on mma.sync and cp.async (sm_80 and later), 16-bit types. It is bound by reading keys and
// values. The rows of a tile are the queries of all heads that share a key head, so each key is read once per tile. The
// keys are cut into segments, one CTA each. The warps of a CTA take steps of 16 keys in turn, each through its own
// ring, and combine their results at the end.
#pragma once

#include "device/barrier.cuh"
#include "ops/attention/cuda/products.cuh"
#include "ops/attention/cuda/sinks.cuh"
#include "ops/attention/cuda/walk.cuh"

namespace fretwork {

using attention_op::decode::kKeys;
using attention_op::decode::Share;
using DecodeParams = attention_op::decode::Params;

/// A row of a tile, counted over all tiles of a group.
struct DecodeRow {
  bool there;
  int head, query;
  __device__ __forceinline__ DecodeRow(const DecodeParams& p, int kv_head, int at) : there(at < p.ratio * p.rows) {
    const int group = there ? at / p.rows : 0;
    head = kv_head * p.ratio + group;
    query = there ? at - group * p.rows : 0;
  }
};

/// What a part's sums count for beside the highest score of all; a part that has none, or only NaN, keeps its sums'
/// NaN.
__device__ __forceinline__ float share_of(const DecodeParams& p, float highest_here, float highest) {
  return exp2_fast((highest_here - (highest == -infinity() ? 0.0f : highest)) * (p.unit * kLog2e));
}

/// A head's sink as a score of its own, or −∞.
__device__ __forceinline__ float sink_score(const DecodeParams& p, int head) {
  return p.sinks.data != nullptr ? sink_of(p.sinks, head) / p.unit : -infinity();
}

/// Writes a row's log-sum-exp.
__device__ __forceinline__ void store_lse(const DecodeParams& p, int batch, const DecodeRow& row, float top,
                                          float sum) {
  if (p.lse.data != nullptr) {
    static_cast<float*>(p.lse.data)[batch * p.lse.batch + row.head * p.lse.head + row.query * p.lse.row] =
        sum == 0.0f ? -infinity() : top * p.unit + log2f(sum) * kLn2;
  }
}
template <typename T>
__device__ __forceinline__ T* result_row(const DecodeParams& p, int batch, const DecodeRow& row) {
  return static_cast<T*>(p.o.data) + batch * p.o.batch + row.head * p.o.head + row.query * p.o.row;
}

template <typename T, int Depth, bool Extras>
__global__ void __launch_bounds__(32 * attention_op::decode::shape_of(Depth).warps)
    attention_decode(const __grid_constant__ DecodeParams p) {
  constexpr int kWarps = attention_op::decode::shape_of(Depth).warps;
  constexpr int kStages = attention_op::decode::shape_of(Depth).stages;
  constexpr int kRows = attention_op::decode::kRows, kLine = attention_op::line_bytes(Depth);
  constexpr int kStage = attention_op::decode::stage_bytes(Depth);
  constexpr int kLanes = Depth / 8, kTogether = 32 / kLanes;  // lanes that copy a line, lines copied at once
  extern __shared__ __align__(128) u8 memory[];
  __shared__ Share shares[kWarps][kRows];
  __shared__ u32 seen[kWarps][kStages];  // which keys of a stage
  let_next_kernel_start();

  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0);
  const int tile = static_cast<int>(blockIdx.x) % p.tiles, line = static_cast<int>(blockIdx.x) / p.tiles;
  const int segment = line % p.segments, pair = line / p.segments;
  const int batch = pair / p.kv_heads, kv_head = pair - batch * p.kv_heads;
  const int first = static_cast<int>(static_cast<i64>(p.steps) * segment / p.segments) + warp;
  const int last = static_cast<int>(static_cast<i64>(p.steps) * (segment + 1) / p.segments);

  const int chunk = lane % kLanes;
  const auto bytes_of = [&](int depth) { return min(max((depth - 8 * chunk) * 2, 0), 16); };
  const int k_bytes = bytes_of(p.depth), v_bytes = bytes_of(p.value_depth);
  const u8* const keys = head_of<T>(p.k, batch, kv_head) + (k_bytes > 0 ? 16 * chunk : 0);
  const u8* const values = head_of<T>(p.v, batch, kv_head) + (v_bytes > 0 ? 16 * chunk : 0);
  const u32 ring = shared_address(memory) + warp * (kStages * kStage);
  const shared_tile<kLine> k{ring}, v{ring + kKeys * kLine};

  const auto token_of = [&](int step) { return step < last ? p.tokens[step * kKeys + lane % kKeys] : -1; };
  // Whether a key is padding is asked for a step after its token is known, so that nothing waits for either.
  const auto hides = [&](int token) -> u32 {
    return p.padding.data != nullptr && token >= 0 ? p.padding.data[batch * p.padding.batch + token * p.padding.col]
                                                   : 0u;
  };
  const auto ask = [&](int stage, int of, u32 hidden) {
    const int token = hidden != 0 ? -1 : of;
    if (p.padding.data != nullptr) {
      const u32 there = __ballot_sync(~0u, token >= 0);
      if (lane == 0) {
        seen[warp][stage] = there;
      }
    }
#pragma unroll
    for (int i = 0; i < kKeys / kTogether; ++i) {
      const int n = lane / kLanes + i * kTogether, at = __shfl_sync(~0u, token, n);
      copy_async_part(k.chunk(n, chunk) + stage * kStage, keys + static_cast<i64>(max(at, 0)) * p.k.row,
                      at < 0 ? 0 : k_bytes);
      copy_async_part(v.chunk(n, chunk) + stage * kStage, values + static_cast<i64>(max(at, 0)) * p.v.row,
                      at < 0 ? 0 : v_bytes);
    }
  };
  int tokens[kStages];  // of the steps that are asked for first, and of the one after them
  u32 hidden[kStages];
#pragma unroll
  for (int s = 0; s < kStages; ++s) {
    tokens[s] = token_of(first + s * kWarps);
  }
#pragma unroll
  for (int s = 0; s < kStages; ++s) {
    hidden[s] = hides(tokens[s]);
  }
  // The queries come first, through the stage that is asked for last.
  const shared_tile<kLine> q_tile{ring + (kStages - 1) * kStage};
  const DecodeRow mine(p, kv_head, tile * kRows + lane % kRows);
  const u8* const queries = head_of<T>(p.q, batch, kv_head * p.ratio) + (k_bytes > 0 ? 16 * chunk : 0);
  const i64 offset =
      (mine.head - kv_head * p.ratio) * p.q.head * static_cast<i64>(sizeof(T)) + static_cast<i64>(mine.query) * p.q.row;
#pragma unroll
  for (int i = 0; i < kRows / kTogether; ++i) {
    const int n = lane / kLanes + i * kTogether;
    const bool there = tile * kRows + n < p.ratio * p.rows;
    copy_async_part(q_tile.chunk(n, chunk), queries + __shfl_sync(~0u, offset, n), there ? k_bytes : 0);
  }
  copy_async_commit();
#pragma unroll
  for (int s = 0; s < kStages - 1; ++s) {
    if (first + s * kWarps < last) {
      ask(s, tokens[s], hidden[s]);
    }
    copy_async_commit();
  }
  int asked = first + (kStages - 1) * kWarps, token = tokens[kStages - 1], later = token_of(asked + kWarps);
  u32 hidden_now = hidden[kStages - 1];
  copy_async_wait<kStages - 1>();
  __syncwarp();
  u32 q[Depth / 16][4];
  const auto q_at = fragments_across(q_tile, 0);
#pragma unroll
  for (int n = 0; n < Depth / 16; ++n) {
    ldmatrix(q[n], q_at(0, 16 * n));
  }

  const DecodeRow rows[2] = {DecodeRow(p, kv_head, tile * kRows + lane / 4),
                             DecodeRow(p, kv_head, tile * kRows + lane / 4 + 8)};
  const Score<Extras> scores[2] = {score_of<Extras>(p.score, batch, rows[0].head, p.heads),
                                   score_of<Extras>(p.score, batch, rows[1].head, p.heads)};
  const float factor = p.unit * kLog2e;
  const auto k_at = fragments_along(k);
  const auto v_at = fragments_across(v, 0);
  register_sums<1, Depth / 8> out = {};
  float top[2] = {-infinity(), -infinity()}, total[2] = {};
  int stage = 0;

#pragma unroll 1
  for (int step = first; step < last; step += kWarps) {
    const int mask = p.masks[step];
    copy_async_wait<kStages - 2>();
    __syncwarp();  // the oldest stage is here, and the one before it is done with
    if (asked < last) {
      ask(stage == 0 ? kStages - 1 : stage - 1, token, hidden_now);
    }
    copy_async_commit();
    asked += kWarps;
    token = later;
    hidden_now = hides(token);
    later = token_of(asked + kWarps);

    // Four fragments at a time, and sums that do not wait for each other: there are few warps to wait in turn.
    register_sums<1, 4> parts = {};
    const auto k_now = k_at + stage * kStage;
#pragma unroll
    for (int n = 0; n < Depth / 16; n += 4) {
      u32 b[4][4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        ldmatrix(b[i], k_now(0, 16 * (n + i)));
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        mma_sync<T>(parts.at[0][i % 2 * 2], q[n + i], b[i][0], b[i][1]);
        mma_sync<T>(parts.at[0][i % 2 * 2 + 1], q[n + i], b[i][2], b[i][3]);
      }
    }
    register_sums<1, 2> s;
    each_score(s, [&](int, int half, int j, int e, float& x) {
      x = parts.at[0][j][2 * half + e] + parts.at[0][j + 2][2 * half + e];
    });
    u32 there[2] = {~0u, ~0u};
    if (mask >= 0) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        there[half] = static_cast<u32>(p.bits[mask * p.rows + rows[half].query]) >> (lane % 4 * 2);
      }
    }
    if (p.padding.data != nullptr) {
      const u32 is = seen[warp][stage] >> (lane % 4 * 2);
      there[0] &= is;
      there[1] &= is;
    }
    const auto col_of = [&](int j, int e) { return p.tokens[step * kKeys + 8 * j + lane % 4 * 2 + e]; };
    each_score(s, [&](int, int half, int j, int e, float& x) {
      if constexpr (Extras) {
        float slope;
        x = (there[half] >> (8 * j + e) & 1) != 0 ? scores[half].prepare(x, rows[half].query, col_of(j, e), slope)
                                                  : -infinity();
      } else {
        x = (there[half] >> (8 * j + e) & 1) != 0 ? x : -infinity();
      }
    });

    float high[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      high[half] = fmaxf(fmaxf(s.at[0][0][2 * half], s.at[0][0][2 * half + 1]),
                         fmaxf(s.at[0][1][2 * half], s.at[0][1][2 * half + 1]));
      high[half] = fmaxf(top[half], reduce_lanes<4>(high[half], take_max{}));
    }
    if (__any_sync(~0u, high[0] != top[0] || high[1] != top[1])) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float shrink = high[half] == top[half] ? 1.0f : exp2_fast((top[half] - high[half]) * factor);
        total[half] *= shrink;
        top[half] = high[half];
#pragma unroll
        for (int j = 0; j < Depth / 8; ++j) {
          out.at[0][j][2 * half] *= shrink;
          out.at[0][j][2 * half + 1] *= shrink;
        }
      }
    }
    each_score(s, [&](int, int half, int, int, float& x) {
      x = exp2_fast((x - (top[half] == -infinity() ? 0.0f : top[half])) * factor);
      total[half] += x;
    });
    if constexpr (Extras) {
      if (p.score.threshold != 0) {
        each_score(s, [&](int, int half, int j, int e, float& x) {
          x = scores[half].keeps(rows[half].query, col_of(j, e)) ? x : 0.0f;
        });
      }
    }
    const auto v_now = v_at + stage * kStage;
    u32 weights[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      weights[e] = narrow_pair<T>(s.at[0][e / 2][e % 2 * 2], s.at[0][e / 2][e % 2 * 2 + 1]);
    }
#pragma unroll
    for (int n = 0; n < Depth; n += 64) {
      u32 b[4][4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        ldmatrix_trans(b[i], v_now(0, n + 16 * i));
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        mma_sync<T>(out.at[0][n / 8 + 2 * i], weights, b[i][0], b[i][1]);
        mma_sync<T>(out.at[0][n / 8 + 2 * i + 1], weights, b[i][2], b[i][3]);
      }
    }
    stage = stage == kStages - 1 ? 0 : stage + 1;
  }

  // The warps' sums, one after the other in the rings' memory.
  constexpr int kSumLine = Depth + 8;
  float* const sums = reinterpret_cast<float*>(memory);
  copy_async_wait<0>();
  __syncthreads();
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = lane / 4 + 8 * half;
    total[half] = reduce_lanes<4>(total[half], take_sum{});
    if (lane % 4 == 0) {
      shares[warp][row] = Share{top[half], total[half]};
    }
#pragma unroll
    for (int j = 0; j < Depth / 8; ++j) {
      *reinterpret_cast<float2*>(sums + (warp * kRows + row) * kSumLine + 8 * j + lane % 4 * 2) =
          float2{out.at[0][j][2 * half], out.at[0][j][2 * half + 1]};
    }
  }
  __syncthreads();
#pragma unroll 1
  for (int n = static_cast<int>(threadIdx.x); n < kRows * (Depth / 4); n += 32 * kWarps) {
    const int line_of = n / (Depth / 4), col = n % (Depth / 4) * 4;
    const DecodeRow row(p, kv_head, tile * kRows + line_of);
    if (!row.there || col >= p.value_depth) {
      continue;
    }
    const float sink = p.sums == nullptr ? sink_score(p, row.head) : -infinity();
    float highest = sink;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      highest = fmaxf(highest, shares[w][line_of].highest);
    }
    float sum = share_of(p, sink, highest), x[4] = {};
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      const Share part = shares[w][line_of];
      const float share = share_of(p, part.highest, highest);
      const float4 from = *reinterpret_cast<const float4*>(sums + (w * kRows + line_of) * kSumLine + col);
      sum += share * part.sum;
      x[0] += share * from.x;
      x[1] += share * from.y;
      x[2] += share * from.z;
      x[3] += share * from.w;
    }
    if (p.sums != nullptr) {
      const i64 at = static_cast<i64>(blockIdx.x) * kRows + line_of;
      *reinterpret_cast<float4*>(p.sums + at * Depth + col) = float4{x[0], x[1], x[2], x[3]};
      if (col == 0) {
        p.shares[at] = Share{highest, sum};
      }
      continue;
    }
    const float kept = sum == 0.0f ? 0.0f : p.score.kept / sum;
    T* const to = result_row<T>(p, batch, row);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if (col + e < p.value_depth) {
        to[(col + e) * p.o.col] = narrow<T>(x[e] * kept);
      }
    }
    if (col == 0) {
      store_lse(p, batch, row, highest, sum);
    }
  }
}

/// Joins the segments of a row in their order; a warp for each (batch, head, query).
template <typename T, int Depth>
__global__ void __launch_bounds__(32 * attention_op::decode::kMergeWarps)
    attention_decode_merge(const __grid_constant__ DecodeParams p) {
  constexpr int kRows = attention_op::decode::kRows, kWords = Depth / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const i64 at = static_cast<i64>(blockIdx.x) * attention_op::decode::kMergeWarps + threadIdx.x / 32;
  if (at >= p.all_rows) {
    return;
  }
  const i64 line = at / p.rows, batch = line / p.heads;
  const int head = static_cast<int>(line - batch * p.heads), query = static_cast<int>(at - line * p.rows);
  const int kv_head = head / p.ratio, in_group = (head - kv_head * p.ratio) * p.rows + query;
  const DecodeRow row(p, kv_head, in_group);
  const i64 first = (batch * p.kv_heads + kv_head) * p.segments * p.tiles + in_group / kRows;
  const auto place = [&](int segment) {
    return (first + static_cast<i64>(segment) * p.tiles) * kRows + in_group % kRows;
  };
#if __CUDA_ARCH__ >= 900
  wait_for_earlier_kernel();
#endif

  const float sink = sink_score(p, head);
  float highest = sink;
  for (int s = lane; s < p.segments; s += 32) {
    highest = fmaxf(highest, p.shares[place(s)].highest);
  }
  highest = reduce_lanes<32>(highest, take_max{});
  float sum = share_of(p, sink, highest), x[kWords] = {};
#pragma unroll(Depth > 128 ? 2 : 4)
  for (int s = 0; s < p.segments; ++s) {
    const Share part = p.shares[place(s)];
    const float share = share_of(p, part.highest, highest);
    const float* const from = p.sums + place(s) * Depth + lane;
    sum += share * part.sum;
#pragma unroll
    for (int n = 0; n < kWords; ++n) {
      x[n] += share * (32 * n + lane < p.value_depth ? from[32 * n] : 0.0f);
    }
  }
  const float kept = sum == 0.0f ? 0.0f : p.score.kept / sum;
  T* const to = result_row<T>(p, static_cast<int>(batch), row);
#pragma unroll
  for (int n = 0; n < kWords; ++n) {
    if (32 * n + lane < p.value_depth) {
      to[(32 * n + lane) * p.o.col] = narrow<T>(x[n] * kept);
    }
  }
  if (lane == 0) {
    store_lse(p, static_cast<int>(batch), row, highest, sum);
  }
}

}  // namespace fretwork
