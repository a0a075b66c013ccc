// Attention on mma.sync and cp.async (sm_80 and later), 16-bit types. A CTA owns 128 queries (32 above a head dim of
// 256). There is one tile for keys and one for values: while one is multiplied, the other is loaded.
#pragma once

#include "ops/attention/cuda/products.cuh"
#include "ops/attention/cuda/walk.cuh"

namespace fretwork {

/// A row's exponents are taken from some score on, and it takes a larger one only where that leads by this power of
/// two: few tiles rescale what is summed, and no probability exceeds 2⁸.
template <typename Score>
inline constexpr float kSlack = 8.0f / Score::kLevelLog2;

/// Params have the plan's type; tiles have up to Rows queries.
template <typename T, int Depth, bool Extras, typename Params = attention_op::ForwardParams, int Rows = 128>
__global__ void __launch_bounds__(32 * attention_op::forward_shape(Depth, Extras, Rows).warps,
                                  Extras ? (Depth <= 96 ? 2 : 1) : 1)
    attention_forward(const __grid_constant__ Params p) {
  constexpr auto kShape = attention_op::forward_shape(Depth, Extras, Rows);
  constexpr int kRows = kShape.rows, kCols = kShape.cols, kThreads = 32 * kShape.warps;
  constexpr int kParts = attention_op::parts_of(Depth), kPart = Depth / kParts, kRowWarps = kShape.warps / kParts;
  constexpr int kFrags = kRows / 16 / kRowWarps, kLine = attention_op::line_bytes(kPart);
  extern __shared__ __align__(1024) u8 memory[];
  __shared__ Tables<kRows, kCols> tables;
  __shared__ Item whose;           // for the end: no register is kept for it
  __shared__ float before[kRows];  // a row's share of what is there, or −1: it is not written

  const Item item = item_of(p.plan, p.heads, false);
  if (threadIdx.x == 0) {
    whose = item;
  }
  const int key_head = item.head / p.heads.ratio;
  const shared_tile<kLine> q{shared_address(memory)}, k{q.base + kParts * kRows * kLine},
      v{k.base + kParts * kCols * kLine};
  tables.fill(p.plan, item.tile);
  __syncthreads();
  if constexpr (Extras) {
    if (is_done(p, item, tables.token)) {
      return;
    }
  }

  const u8* const keys = head_of<T>(p.k, item.batch, key_head);
  const u8* const values = head_of<T>(p.v, item.batch, key_head);
  const PartCopies<T, Depth, kCols, kThreads, kLine> key_copies(k, p.depth), value_copies(v, p.value_depth);
  key_copies.clear(keys);
  value_copies.clear(values);
  copy_parts<T, Depth, kRows, kThreads>(q, head_of<T>(p.q, item.batch, item.head), p.q.row, p.depth,
                                        [&](int n) { return tables.token[n]; });
  Walk<false, decltype(p.plan)> walk(p.plan, item);
  Step now = walk.take();
  if (now.there()) {
    key_copies.ask(now, keys, p.k.row, tables.place, p.plan);
  }
  copy_async_commit();
  now.settle();

  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32, part = kParts > 1 ? warp / kRowWarps : 0;
  const int warp_row = (kParts > 1 ? warp % kRowWarps : warp) * (16 * kFrags);
  const auto row_of = [&](int i, int half) { return warp_row + 16 * i + 8 * half + lane / 4; };
  const auto q_at = kept(fragments_across(q, warp_row));
  const auto v_at = kept(fragments_across(v, 0) + static_cast<u32>(part * kCols * kLine));
  const auto k_at = kept(fragments_along(k));
  const Score<Extras> score = score_of<Extras>(p.score, item.batch, item.head, p.heads.all);
  register_sums<kFrags, kPart / 8> out = {};
  float from[kFrags][2], total[kFrags][2];  // the lowest: no key yet
#pragma unroll
  for (int i = 0; i < kFrags; ++i) {
    from[i][0] = from[i][1] = -kLargest;
    total[i][0] = total[i][1] = 0.0f;
  }

#pragma unroll 1
  while (now.there()) {
    copy_async_wait<0>();
    __syncthreads();  // the keys are here, and the values before are done with
    value_copies.ask(now, values, p.v.row, tables.place, p.plan);
    copy_async_commit();
    const Step next = walk.take();
    register_sums<kFrags, kCols / 8> s = {};
#pragma unroll
    for (int n = 0; n < kParts; ++n) {
      multiply_lines<T, kPart, kFrags, kCols>(s, q_at + n * kRows * kLine, k_at + n * kCols * kLine);
    }
    copy_async_wait<0>();
    __syncthreads();  // the values are here, and the keys are done with
    if (next.there()) {
      key_copies.ask(next, keys, p.k.row, tables.place, p.plan);
    }
    copy_async_commit();

    if constexpr (Extras) {
      const MaskWords<kFrags, kCols, true> there(p.plan, now, warp_row);
      each_score(s, [&](int i, int half, int j, int e, float& x) {
        const int token = tables.token[row_of(i, half)];
        const int n = 8 * j + lane % 4 * 2 + e, col = position_of(p.plan, now, tables.place[n], n);
        float slope;
        x = token >= 0 && there(i, half, j, e) ? score.prepare(x, token, col, slope) : -infinity();
      });
    } else if (!is_whole(now)) {
      apply_mask<kFrags, kCols>(s, p.plan, now, warp_row);
    }
    float high[kFrags][2];
    bool grows = false;
#pragma unroll
    for (int i = 0; i < kFrags; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float most = fmaxf(s.at[i][0][2 * half], s.at[i][0][2 * half + 1]);
#pragma unroll
        for (int j = 1; j < kCols / 8; ++j) {
          most = fmaxf(most, fmaxf(s.at[i][j][2 * half], s.at[i][j][2 * half + 1]));
        }
        high[i][half] = score.level(reduce_lanes<4>(most, take_max{}));
        grows = grows || high[i][half] > from[i][half] + kSlack<Score<Extras>>;
      }
    }
    if (__any_sync(~0u, grows)) {
#pragma unroll
      for (int i = 0; i < kFrags; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float to = high[i][half] > from[i][half] + kSlack<Score<Extras>> ? high[i][half] : from[i][half];
          const float shrink = exp2_fast((from[i][half] - to) * Score<Extras>::kLevelLog2);
          from[i][half] = to;
          total[i][half] *= shrink;
#pragma unroll
          for (int j = 0; j < kPart / 8; ++j) {
            out.at[i][j][2 * half] *= shrink;
            out.at[i][j][2 * half + 1] *= shrink;
          }
        }
      }
    }
    // Probabilities, two neighbours at a time, and their sums before anything is dropped or rounded.
    float sum[kFrags][2] = {};
    u32 shares[kCols / 16][kFrags][4];
#pragma unroll
    for (int n = 0; n < kCols / 4 * kFrags; ++n) {
      const int block = n / 4 / kFrags, i = n / 4 % kFrags, e = n % 4, half = e % 2;
      float* const x = s.at[i][2 * block + e / 2] + 2 * half;
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        x[c] = exp2_fast(score.exponent(x[c], from[i][half]));
      }
      sum[i][half] += x[0] + x[1];
      if constexpr (Extras) {
        if (p.score.threshold != 0) {
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            const int n = 16 * block + e / 2 * 8 + lane % 4 * 2 + c;
            const int col = position_of(p.plan, now, tables.place[n], n);
            x[c] = score.keeps(tables.token[row_of(i, half)], col) ? x[c] : 0.0f;
          }
        }
      }
      shares[block][i][e] = narrow_pair<T>(x[0], x[1]);
    }
    multiply_across<T, kPart, kFrags, kCols>(out, shares, v_at);
#pragma unroll
    for (int i = 0; i < kFrags; ++i) {
      total[i][0] += sum[i][0];
      total[i][1] += sum[i][1];
    }
    now = next;
  }

  copy_async_wait<0>();
  __syncthreads();  // the tiles are done with
  const float kept = Extras ? p.score.kept : 1.0f;
  const Staging<Depth> staging{reinterpret_cast<float*>(memory)};
  staging.put(out, warp_row, part * kPart, [&](int i, int half) {
    const float sum = reduce_lanes<4>(total[i][half], take_sum{});
    const Merge merge(score, p, whose, tables.token[row_of(i, half)], {from[i][half], sum});
    if constexpr (kParts > 1) {
      __syncthreads();
    } else {
      __syncwarp();
    }
    if (lane % 4 == 0 && part == 0) {
      merge.store();
      before[row_of(i, half)] = merge.writes && p.o.data != nullptr ? merge.before : -1.0f;
    }
    return kept * merge.here;
  });
  __syncthreads();
  staging.template each<kRows, kThreads>(p.value_depth, [&](int row, int col, float(&x)[8]) {
    if (!(before[row] < 0.0f)) {  // a NaN is written
      merge_some<T>(p, whose, tables.token[row], col, before[row], x);
    }
  });
}

}  // namespace fretwork
