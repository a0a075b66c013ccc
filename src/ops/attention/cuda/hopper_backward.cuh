// Gradients of attention over a component of a plan: two kernels, seven products, no atomics on shared results. A CTA
// owns 128 rows (two operands) and streams tiles of 64 columns (two operands). In backward_keys the rows are keys, so
// Pᵀ and dSᵀ leave the tensor cores as the left operands of the next products; in backward_queries the rows are
// queries. P is recomputed from the log-sum-exp.
#pragma once

#include "ops/attention/cuda/hopper_backward_common.cuh"

namespace fretwork::attention_op::hopper {

/// kGeneral: there are masks of bits, or queries that nothing uses. kSplit: items may be pieces of tiles. kScore:
/// options.
template <typename T, int kDepth, int kValues, bool kGeneral, bool kSplit, unsigned kScore = 0, int kTileRows = kRows>
struct BackwardKeys {
  static_assert(kTileRows == kRows || (!kSplit && kScore == 0));
  using S = ScoredBackwardShared<kDepth, kValues, true, kScore, kTileRows>;
  using K = ScoreKind<kScore>;
  static constexpr Roles kRoles{.consumers = kTileRows / 64,
                                .producer_registers = S::kFetchRegisters,
                                .consumer_registers = S::kRegisters,
                                .ctas = kRows / kTileRows};
  const BackwardParamsOf<kScore>& p;
  S& shared;
  u32 rows, cols;  ///< tiles

  __device__ __forceinline__ void produce() const { fetch_all<true, false, kSplit>(p, shared, rows, cols); }

  __device__ __forceinline__ void consume() const {
    const int warpgroup = own_warpgroup<kTileRows>(), lane = static_cast<int>(threadIdx.x) % 32;
    const int warp_row = warpgroup * 64 + static_cast<int>(threadIdx.x) / 32 % 4 * 16;
    const u32 empty = shared_address(shared.cols.empty);
    Consumer<S::kItems> items;
    Consumer<S::kStages> at;
    for (;; items.next()) {
      shared.rows.wait(items);
      const int steps = read_note(shared.items[items.stage]).x;  // the rest is read again: registers are short
      if (steps < 0) {
        break;
      }
      const u32 k = rows + items.stage * 2 * S::kRowTile + warpgroup * 8192, v = k + S::kRowTile;
      float dk[kDepth / 2], dv[kValues / 2], s[kStream / 2], dp[kStream / 2];
      u32 left[kStream / 16][4];
#pragma unroll
      for (float& sum : dk) {
        sum = 0.0f;
      }
#pragma unroll
      for (float& sum : dv) {
        sum = 0.0f;
      }
      if constexpr (S::kAhead) {
        float x[kStream / 2];
        u32 left_too[kStream / 16][4], held[kValues / 16][4];  // of k and v there is room for one
        hold_rows<kValues>(held, v, S::kRowHalf);
        Consumer<S::kStages> next = at;
        int before = 0;
        const auto tile = [&](int stage) { return cols + stage * 2 * S::kColTile; };
        const auto ask = [&] {
          shared.cols.wait(next);
          if constexpr (kGeneral) {
            const int used = __shfl_sync(0xffffffffu, lane == 0 ? shared.used[next.stage] : 0, 0);
            if (used >= 0) {
              clear_unused<S::kHalves, kStream>(tile(next.stage), p.walk.used + used);
              clear_unused<S::kValueHalves, kStream>(tile(next.stage) + S::kColTile, p.walk.used + used);
              join_cleared(1 + warpgroup);
            }
          }
          wgmma::fence();
          multiply_scores<T, kDepth, kStream>(s, k, S::kRowHalf, tile(next.stage), S::kColHalf);
          next.next();
        };
        const auto add = [&](int stage) {
          wgmma::fence();
          multiply_values<T, kValues, kStream>(dv, left, tile(stage) + S::kColTile, S::kColHalf);
          multiply_values<T, kDepth, kStream>(dk, left_too, tile(stage), S::kColHalf);
        };
        const auto step = [&]<bool kFirst, bool kLast>() {
          const int stage = static_cast<int>(at.stage);
          const int kind = read_note(shared.steps[stage]).x;
          const auto stat = [&](int which, int j) {
            return *reinterpret_cast<const float2*>(&shared.stats[stage][which][8 * j + lane % 4 * 2]);
          };
#pragma unroll
          for (int j = 0; j < kStream / 8; ++j) {
            const float2 lse = stat(0, j);
            x[4 * j] = s[4 * j] * p.scale_2 - lse.x;
            x[4 * j + 1] = s[4 * j + 1] * p.scale_2 - lse.y;
            x[4 * j + 2] = s[4 * j + 2] * p.scale_2 - lse.x;
            x[4 * j + 3] = s[4 * j + 3] * p.scale_2 - lse.y;
          }
          wgmma::fence();
          multiply_scores<T, kValues, kStream>(dp, held, tile(stage) + S::kColTile, S::kColHalf);
          wgmma::commit();
          if constexpr (!kFirst) {
            add(before);
          }
          if constexpr (!kLast) {
            ask();
          }
          wgmma::commit();
          exp2_of<0, kStream / 2>(x);
          cut_masked<kGeneral>(x, kind, shared.steps[stage], p.walk.bits, warp_row + lane / 4, 0.0f);
          wgmma::wait<1>();
          const auto to_gradients = [&]<bool kMasked>() {  // as to_score_gradients, but P stays and delta comes in turn
#pragma unroll
            for (int j = 0; j < kStream / 8; ++j) {
              const float2 delta = stat(1, j);
#pragma unroll
              for (int i = 4 * j; i < 4 * j + 4; ++i) {
                const bool none = kMasked && x[i] == 0.0f;
                dp[i] = none ? 0.0f : x[i] * (dp[i] - (i % 2 == 0 ? delta.x : delta.y));
              }
            }
          };
          if (kind != kWhole) {
            to_gradients.template operator()<true>();
          } else {
            to_gradients.template operator()<false>();
          }
          wgmma::wait<0>();
          if constexpr (!kFirst) {
            release_lane(empty, before);
          }
          pack<T>(left, x);
          pack<T>(left_too, dp);
          before = stage;
          at.next();
        };
        if (steps > 0) {
          ask();
          wgmma::commit();
          wgmma::wait<0>();
          each_step(steps, step);
          add(before);
          wgmma::commit();
          wgmma::wait<0>();
          release_lane(empty, before);
        }
      } else {
        int pending = -1;  // the stage that products in flight still read
        ScoresByKey<kScore, false> scores;
        const int* keys = nullptr;  // of the warp's rows
        bool pairs = false;
        if constexpr (kScore != 0) {
          keys = p.walk.row_tokens + read_note(shared.items[items.stage]).w * kRows + warp_row;
          pairs = p.more.bias_pairs != 0 && p.more.row_line != 0 && __ldg(keys) % 2 == 0 && __ldg(keys + 15) >= 0;
        }
        const auto key = [&](int n) { return max(0, __ldg(keys + n)); };
#pragma unroll 1
        for (int n = 0; n < steps; ++n, at.next()) {
          const u32 q = cols + at.stage * 2 * S::kColTile, d_o = q + S::kColTile;
          shared.cols.wait(at);
          const int kind = read_note(shared.steps[at.stage]).x;
          if constexpr (kGeneral) {
            const int used = __shfl_sync(0xffffffffu, lane == 0 ? shared.used[at.stage] : 0, 0);
            if (used >= 0) {
              clear_unused<S::kHalves, kStream>(q, p.walk.used + used);
              clear_unused<S::kValueHalves, kStream>(d_o, p.walk.used + used);
              join_cleared(1 + warpgroup);
            }
            if (kind >= 0) {
              prefetch_bits<kStream / 32>(p.walk.bits + kind, warp_row + lane / 4);
            }
          }
          const auto query = [&](int col) {  // near: the warp that gathers statistics has read it
            if constexpr (kScore != 0) {
              return max(0, __ldg(p.walk.col_tokens + shared.tiles[at.stage] * kStream + col));
            }
            return 0;
          };
          if constexpr (kScore != 0) {
            scores.ask(p.more, shared.heads[at.stage], query, key, pairs);
          }
          const auto ask_dp = [&] {
            multiply_scores<T, kValues, kStream>(dp, v, S::kRowHalf, d_o, S::kColHalf);
            wgmma::commit();
          };
          wgmma::fence();
          multiply_scores<T, kDepth, kStream>(s, k, S::kRowHalf, q, S::kColHalf);
          wgmma::commit();
          if constexpr (S::kPackedShares) {
            wgmma::wait<0>();
          } else {
            ask_dp();
            wgmma::wait<1>();
          }
          release_lane(empty, pending);
          pending = static_cast<int>(at.stage);
          const auto stat = [&](int which, int j) {
            return *reinterpret_cast<const float2*>(&shared.stats[at.stage][which][8 * j + lane % 4 * 2]);
          };
          const auto cut = [&](float(&x)[kStream / 2]) {
            cut_masked<kGeneral>(x, kind, shared.steps[at.stage], p.walk.bits, warp_row + lane / 4, 0.0f);
          };
          if constexpr (K::kCaps) {
            cut(s);
          }
          if constexpr (K::kBoth) {
            wgmma::wait<0>();
          }
          if constexpr (kScore != 0) {
            score_keys(p.more, scores, shared.heads[at.stage], s, dp, query, key, shared.stats[at.stage],
                       shared.rest[at.stage]);
          } else {
            to_probabilities(s, p.scale_2, [&](int j) { return stat(0, j); });
          }
          cut(s);
          if constexpr (K::kBoth) {
            cut(dp);
          }
          pack<T>(left, s);
          wgmma::fence();
          if constexpr (S::kPackedShares) {
            ask_dp();
          }
          multiply_values<T, kValues, kStream>(dv, left, d_o, S::kColHalf);
          wgmma::commit();
          wgmma::wait<0>();
          if constexpr (K::kBoth) {
            pack<T>(left, dp);
          } else {
            float2 delta[kStream / 8];
#pragma unroll
            for (int j = 0; j < kStream / 8; ++j) {
              delta[j] = stat(1, j);
            }
            if constexpr (S::kPackedShares) {
              unpack<T>(s, left);
            }
            to_score_gradients(s, dp, kind != kWhole,
                               [&](int i) { return i % 2 == 0 ? delta[i / 4].x : delta[i / 4].y; });
            pack<T>(left, s);
          }
          wgmma::fence();
          multiply_values<T, kDepth, kStream>(dk, left, q, S::kColHalf);
          wgmma::commit();
        }
        wgmma::wait<0>();
        release_lane(empty, pending);
      }
      const int4 note = read_note(shared.items[items.stage]);
      const int own = own_token<kTileRows>(p.walk, note.w, warpgroup);
      named_barrier(1 + warpgroup, 128);  // no one reads this half of the rows any more
      const int part = kSplit ? read_part(shared.parts[items.stage]) : -1;
      store_gradient<T, kDepth, kTileRows>(p, 0, p.depth, note, part, own, dk, p.scale, k);
      store_gradient<T, kValues, kTileRows>(p, 1, p.value_depth, note, part, own, dv, kept_factor(p), v);
      fence_async_proxy();  // the next rows come by the copy engine
      shared.rows.release(static_cast<int>(items.stage));
    }
  }
};

template <typename T, int kDepth, int kValues, bool kGeneral, bool kSplit, int kTileRows = kRows>
__global__ void __launch_bounds__(threads_of(kTileRows), kRows / kTileRows)
    backward_keys(const __grid_constant__ BackwardParams p) {
  using S = ScoredBackwardShared<kDepth, kValues, true, 0, kTileRows>;
  extern __shared__ u8 raw[];
  __shared__ S shared;
  const u32 rows = stages_in(raw), cols = rows + 2 * S::kItems * S::kRowTile;
  make_barriers<true>(p, shared, cols);
  run_warp_specialized(BackwardKeys<T, kDepth, kValues, kGeneral, kSplit, 0, kTileRows>{p, shared, rows, cols});
}
template <typename T, int kDepth, int kValues, bool kGeneral, bool kSplit, unsigned kScore>
__global__ void __launch_bounds__(threads_of(kRows), 1)
    scored_backward_keys(const __grid_constant__ ScoredBackwardParams p) {
  using S = ScoredBackwardShared<kDepth, kValues, true, kScore>;
  extern __shared__ u8 raw[];
  __shared__ S shared;
  static_assert(S::kMost < 128 || sizeof(S) == kScoredStatic);
  const u32 rows = stages_in(raw), cols = rows + 4 * S::kRowTile;
  make_barriers<true>(p, shared, cols);
  run_warp_specialized(BackwardKeys<T, kDepth, kValues, kGeneral, kSplit, kScore>{p, shared, rows, cols});
}

/// kGeneral: there are masks of bits, or keys that nothing uses. kSplit: items may be pieces of tiles. kScore: options.
template <typename T, int kDepth, int kValues, bool kGeneral, bool kSplit, unsigned kScore = 0, int kTileRows = kRows>
struct BackwardQueries {
  static_assert(kTileRows == kRows || (!kSplit && kScore == 0));
  using S = ScoredBackwardShared<kDepth, kValues, false, kScore, kTileRows>;
  using K = ScoreKind<kScore>;
  static constexpr Roles kRoles{.consumers = kTileRows / 64,
                                .producer_registers = S::kFetchRegisters,
                                .consumer_registers = S::kRegisters,
                                .ctas = kRows / kTileRows};
  const BackwardParamsOf<kScore>& p;
  S& shared;
  u32 rows, cols;  ///< tiles

  __device__ __forceinline__ void produce() const { fetch_all<false, kGeneral, kSplit>(p, shared, rows, cols); }

  __device__ __forceinline__ void consume() const {
    const int warpgroup = own_warpgroup<kTileRows>(), lane = static_cast<int>(threadIdx.x) % 32;
    const int warp_row = warpgroup * 64 + static_cast<int>(threadIdx.x) / 32 % 4 * 16;
    // Not release(empty, ): with it, ptxas moves descriptors to uniform registers in every step.
    const u32 empty = shared_address(shared.cols.empty);
    Consumer<S::kItems> items;
    Consumer<S::kStages> at;
    for (;; items.next()) {
      shared.rows.wait(items);
      const int4 note = read_note(shared.items[items.stage]);
      if (note.x < 0) {
        break;
      }
      const u32 q = rows + items.stage * 2 * S::kRowTile + warpgroup * 8192, d_o = q + S::kRowTile;
      const int own = own_token<kTileRows>(p.walk, note.w, warpgroup);
      float2 stats[2];
      float rest[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int token = __shfl_sync(0xffffffffu, own, lane / 4 + 8 * h);
        if constexpr (kScore != 0) {
          const float4 all = scored_stats_of(p, note.y, note.z, token);
          stats[h] = {all.x, all.y};
          rest[h] = all.z;
        } else {
          stats[h] = stats_of(p, note.y, note.z, token);
        }
      }
      ScoresByQuery<kScore, kStream> scores;
      if constexpr (kScore != 0) {
        scores.begin(p.more, note.y, note.z, own);
      }
      float dq[kDepth / 2], s[kStream / 2], dp[kStream / 2];
      u32 left[kStream / 16][4];
#pragma unroll
      for (float& sum : dq) {
        sum = 0.0f;
      }
      if constexpr (S::kAhead) {
        float x[kStream / 2];
        u32 held[kDepth / 16][4], held_too[kValues / 16][4];
        hold_rows<kDepth>(held, q, S::kRowHalf);
        hold_rows<kValues>(held_too, d_o, S::kRowHalf);
        Consumer<S::kStages> next = at;
        int before = 0;
        const auto tile = [&](int stage) { return cols + stage * 2 * S::kColTile; };
        const auto ask = [&] {
          shared.cols.wait(next);
          if constexpr (kGeneral) {
            const int used = __shfl_sync(0xffffffffu, lane == 0 ? shared.used[next.stage] : 0, 0);
            if (used >= 0) {
              clear_unused<S::kHalves, kStream>(tile(next.stage), p.walk.used + used);
              join_cleared(1 + warpgroup);
            }
          }
          wgmma::fence();
          multiply_scores<T, kDepth, kStream>(s, held, tile(next.stage), S::kColHalf);
          next.next();
        };
        const auto add = [&](int stage) {
          wgmma::fence();
          multiply_values<T, kDepth, kStream>(dq, left, tile(stage), S::kColHalf);
        };
        const auto step = [&]<bool kFirst, bool kLast>() {
          const int stage = static_cast<int>(at.stage);
          const int kind = read_note(shared.steps[stage]).x;
#pragma unroll
          for (int i = 0; i < kStream / 2; ++i) {
            x[i] = s[i] * p.scale_2 - stats[i / 2 % 2].x;
          }
          wgmma::fence();
          multiply_scores<T, kValues, kStream>(dp, held_too, tile(stage) + S::kColTile, S::kColHalf);
          wgmma::commit();
          if constexpr (!kLast) {
            ask();
          }
          if constexpr (!kFirst) {
            add(before);
          }
          wgmma::commit();
          exp2_of<0, kStream / 2>(x);
          cut_masked<kGeneral>(x, kind, shared.steps[stage], p.walk.bits, warp_row + lane / 4, 0.0f);
          bool masked = kind != kWhole;
          if constexpr (kGeneral) {
            const int used = __shfl_sync(0xffffffffu, lane == 0 ? shared.used[stage] : 0, 0);
            if (used >= 0) {
              cut_columns(x, p.walk.used + used, 0.0f);
              masked = true;
            }
          }
          wgmma::wait<1>();
          to_score_gradients(x, dp, masked, [&](int i) { return stats[i / 2 % 2].y; });
          wgmma::wait<0>();
          if constexpr (!kFirst) {
            release(empty, before);
          }
          pack<T>(left, x);
          before = stage;
          at.next();
        };
        if (note.x > 0) {
          ask();
          wgmma::commit();
          wgmma::wait<0>();
          each_step(note.x, step);
          add(before);
          wgmma::commit();
          wgmma::wait<0>();
          release(empty, before);
        }
      } else {
        int pending = -1;  // the stage that products in flight still read
        const auto let_go = [&](int stage) {
          if constexpr (S::kTokens) {
            release_lane(empty, stage);
          } else {
            release(empty, stage);
          }
        };
#pragma unroll 1
        for (int n = 0; n < note.x; ++n, at.next()) {
          const u32 k = cols + at.stage * 2 * S::kColTile, v = k + S::kColTile;
          shared.cols.wait(at);
          const int4 mask = read_note(shared.steps[at.stage]);
          RowBits<kStream / 32> bits;
          int used = -1;
          if constexpr (kGeneral) {
            used = __shfl_sync(0xffffffffu, lane == 0 ? shared.used[at.stage] : 0, 0);
            if (used >= 0) {
              clear_unused<S::kHalves, kStream>(k, p.walk.used + used);
              join_cleared(1 + warpgroup);
            }
            if (mask.x >= 0) {
              bits.load(p.walk.bits + mask.x, warp_row + lane / 4);
            }
          }
          const int* tokens = nullptr;
          if constexpr (S::kTokens) {
            tokens = shared.tokens[at.stage];
            scores.ask(p.more, tokens);
          }
          wgmma::fence();
          multiply_scores<T, kDepth, kStream>(s, q, S::kRowHalf, k, S::kColHalf);
          wgmma::commit();
          multiply_scores<T, kValues, kStream>(dp, d_o, S::kRowHalf, v, S::kColHalf);
          wgmma::commit();
          u32 dropped[1] = {};
          if constexpr (K::kDrops) {
            scores.drop_some(p.more, tokens, dropped);  // while the tensor cores multiply
          }
          wgmma::wait<1>();
          let_go(pending);
          pending = static_cast<int>(at.stage);
          if constexpr (kScore != 0) {
            if constexpr (K::kCaps) {
              cut_read<kGeneral>(s, mask, bits, p.walk.used, used, warp_row + lane / 4, 0.0f);
            }
            scores.apply(p.more, s, tokens, [&](int i, float slope) {
              s[i] = exp2_fast(exponent_of(s[i], stats[i / 2 % 2].x, K::kRest ? rest[i / 2 % 2] : 0.0f)) * slope;
            });
          } else {
#pragma unroll
            for (int i = 0; i < kStream / 2; ++i) {
              s[i] = exp2_fast(s[i] * p.scale_2 - stats[i / 2 % 2].x);
            }
          }
          cut_read<kGeneral>(s, mask, bits, p.walk.used, used, warp_row + lane / 4, 0.0f);
          wgmma::wait<0>();
          if constexpr (K::kDrops) {
#pragma unroll
            for (int i = 0; i < kStream / 2; ++i) {
              dp[i] = (dropped[0] >> i & 1) != 0 ? 0.0f : dp[i] * p.more.score.kept;
            }
          }
          to_score_gradients(s, dp, mask.x != kWhole || (kGeneral && used >= 0),
                             [&](int i) { return stats[i / 2 % 2].y; });
          pack<T>(left, s);
          wgmma::fence();
          multiply_values<T, kDepth, kStream>(dq, left, k, S::kColHalf);
          wgmma::commit();
        }
        wgmma::wait<0>();
        let_go(pending);
      }
      named_barrier(1 + warpgroup, 128);  // no one reads this half of the rows any more
      const int part = kSplit ? read_part(shared.parts[items.stage]) : -1;
      store_gradient<T, kDepth, kTileRows>(p, 0, p.depth, note, part, own, dq, p.scale, q);
      fence_async_proxy();  // the next rows come by the copy engine
      shared.rows.release(static_cast<int>(items.stage));
    }
    wait_for_earlier_kernel();  // so that kernels behind this one wait for that one too
  }
};

template <typename T, int kDepth, int kValues, bool kGeneral, bool kSplit, int kTileRows = kRows>
__global__ void __launch_bounds__(threads_of(kTileRows), kRows / kTileRows)
    backward_queries(const __grid_constant__ BackwardParams p) {
  using S = ScoredBackwardShared<kDepth, kValues, false, 0, kTileRows>;
  extern __shared__ u8 raw[];
  __shared__ S shared;
  const u32 rows = stages_in(raw), cols = rows + 2 * S::kItems * S::kRowTile;
  make_barriers<false>(p, shared, cols);
  run_warp_specialized(BackwardQueries<T, kDepth, kValues, kGeneral, kSplit, 0, kTileRows>{p, shared, rows, cols});
}
template <typename T, int kDepth, int kValues, bool kGeneral, bool kSplit, unsigned kScore>
__global__ void __launch_bounds__(threads_of(kRows), 1)
    scored_backward_queries(const __grid_constant__ ScoredBackwardParams p) {
  using S = ScoredBackwardShared<kDepth, kValues, false, kScore>;
  extern __shared__ u8 raw[];
  __shared__ S shared;
  static_assert(S::kMost < 128 || sizeof(S) == kScoredStatic);
  const u32 rows = stages_in(raw), cols = rows + 4 * S::kRowTile;
  make_barriers<false>(p, shared, cols);
  run_warp_specialized(BackwardQueries<T, kDepth, kValues, kGeneral, kSplit, kScore>{p, shared, rows, cols});
}

}  // namespace fretwork::attention_op::hopper
