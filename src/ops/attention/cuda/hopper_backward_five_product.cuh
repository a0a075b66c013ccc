// All gradients of attention where every query meets every key, or all keys up to its own: five products, where
// separate kernels for keys and queries take seven. A CTA owns 128 keys and streams 64 queries at a time, as
// backward_keys does. dSᵀ also goes to shared memory, where it is multiplied by kᵀ. TMA adds the result to the sum of
// the query tile in memory. Key tiles add in a fixed order: each waits until the one before it has added, which a
// counter per query tile tells. CTAs take key tiles in this order from a counter, so the predecessor of a running key
// tile is running or done, and there is no deadlock whatever else runs on the device.
//
// If every query meets every key, key tile j begins 2j steps before the end of the queries and wraps around. So CTAs
// that run at the same time are at different queries, and each reaches a query tile two steps after the one it waits
// for. What is added before the wrap has a second sum.
#pragma once

#include "ops/attention/cuda/hopper_backward_common.cuh"

namespace fretwork::attention_op::hopper {

template <int kColumns>
struct FiveProductShared {
  static constexpr FiveProductTiles kTiles = five_product_tiles(kColumns);
  static constexpr bool kThird = kColumns == 64;                    ///< a warpgroup of its own makes dq
  static constexpr bool kApart = kTiles.outputs != kTiles.queries;  ///< d_o does not come and go with q
  static constexpr int kHalves = kColumns / 64;
  static constexpr u32 kRowHalf = kRows * 128, kRowTile = kHalves * kRowHalf;  ///< bytes of one operand
  static constexpr u32 kColHalf = kStream * 128, kColTile = kHalves * kColHalf;
  static constexpr u32 kScores = kRows * kStream * 2, kSums = kStream * kColumns * 4;  ///< of dSᵀ, of dq
  static constexpr u32 kQueries = kTiles.items * 2 * kRowTile, kOutputs = kQueries + kTiles.queries * kColTile,
                       kScoresAt = kOutputs + kTiles.outputs * kColTile, kSumsAt = kScoresAt + kTiles.scores * kScores;
  static constexpr u32 kFetchRegisters = kThird ? 32 : 24, kRegisters = kThird ? 208 : 240, kQueryRegisters = 64;
  RingBarriers<kTiles.items> rows;
  RingBarriers<kTiles.queries> queries;
  RingBarriers<kTiles.outputs> outputs;
  RingBarriers<kTiles.scores> scores;
  RingBarriers<2> sums;
  int items[kTiles.items];
  alignas(16) float stats[kTiles.queries][2][kStream];
  static constexpr int kStatsBytes = kStream * sizeof(RowStats), kStatsStep = kStatsBytes;  ///< of a tile, to the next
  static constexpr bool kScored = false;
};
/// Of kernels with options.
template <int kColumns, unsigned kOptions>
struct alignas(512) ScoredFiveProductShared {
  using Base = FiveProductShared<kColumns>;
  static constexpr FiveProductTiles kTiles = Base::kTiles;
  static constexpr bool kThird = Base::kThird, kApart = Base::kApart, kScored = true;
  static constexpr unsigned kScore = kOptions;
  static constexpr int kHalves = Base::kHalves;
  static constexpr u32 kRowHalf = Base::kRowHalf, kRowTile = Base::kRowTile, kColHalf = Base::kColHalf,
                       kColTile = Base::kColTile, kScores = Base::kScores, kSums = Base::kSums,
                       kQueries = Base::kQueries, kOutputs = Base::kOutputs, kScoresAt = Base::kScoresAt,
                       kSumsAt = Base::kSumsAt;
  static constexpr u32 kFetchRegisters = Base::kFetchRegisters, kRegisters = Base::kRegisters,
                       kQueryRegisters = Base::kQueryRegisters;
  static constexpr int kStatsBytes = kStream * 12, kStatsStep = kStream * sizeof(ScoreStats);
  RingBarriers<kTiles.items> rows;
  RingBarriers<kTiles.queries> queries;
  RingBarriers<kTiles.outputs> outputs;
  RingBarriers<kTiles.scores> scores;
  RingBarriers<2> sums;
  int items[kTiles.items];
  ScoreHead heads[kTiles.queries];  ///< of tiles
  int firsts[kTiles.queries];       ///< their first queries
  alignas(16) float stats[kTiles.queries][3][kStream];
};
template <int kColumns>
struct ScoredFiveProductShared<kColumns, 0> : FiveProductShared<kColumns> {};

/// A key tile of one key head. Heads that run together take turns, so that a head's next key tile comes some items
/// later.
struct FiveProductItem {
  int tile, head, batch, first;  ///< `first`: of the query tiles it meets; it meets all from there on

  __device__ __forceinline__ FiveProductItem(const FiveProductParams& p, int index) {
    const int group = index / (p.together * p.row_tiles), rest = index - group * p.together * p.row_tiles;
    const int count = min(p.together, p.pairs - group * p.together), pair = group * p.together + rest % count;
    tile = rest / count;
    batch = pair / p.kv_heads;
    head = pair - batch * p.kv_heads;
    first = max(0, (tile * kRows + p.low) / kStream);
  }
  __device__ __forceinline__ int steps(const FiveProductParams& p) const { return p.col_tiles - first; }
};

/// A key tile's step with a query head: which query tile, which of all sums, and how many key tiles add to it earlier.
/// Where all meet all, key tiles are two steps apart and go round; else they go from the last query tile to their
/// first.
struct FiveProductTurn {
  int head, col, before, tile, sum;  ///< `tile`: of all query tiles

  __device__ __forceinline__ FiveProductTurn(const FiveProductParams& p, const FiveProductItem& item, int n, int step)
      : head(item.head * p.group + n), col(p.col_tiles - 1 - step), before(item.tile) {
    bool early = false;
    if (p.round != 0) {
      early = step < 2 * item.tile;
      col = step - 2 * item.tile + (early ? p.col_tiles : 0);
      before = early ? step / 2 : item.tile;
    }
    tile = (item.batch * p.kv_heads * p.group + head) * p.col_tiles + col;
    sum = early ? p.tiles + tile : tile;
  }
};

/// Calls each(index of the item, its place) for all that this CTA does, as the one who fetches says.
template <typename S, typename Each>
__device__ __forceinline__ void five_product_items(S& shared, Each each) {
  for (Consumer<S::kTiles.items> ring;; ring.next()) {
    shared.rows.wait(ring);
    const int index = *const_cast<volatile int*>(&shared.items[ring.stage]);
    if (index < 0) {
      return;
    }
    each(index, static_cast<int>(ring.stage));
  }
}
/// Calls step(turn) for all steps of an item.
template <typename Step>
__device__ __forceinline__ void five_product_steps(const FiveProductParams& p, const FiveProductItem& item, Step step) {
  for (int n = 0; n < p.group; ++n) {
#pragma unroll 1
    for (int t = 0; t < item.steps(p); ++t) {
      step(FiveProductTurn(p, item, n, t));
    }
  }
}

/// One thread takes items in their order and fetches their rows, queries and statistics.
template <typename Params, typename S>
__device__ __forceinline__ void fetch_five_product(const Params& p, S& shared, u32 rows) {
  Producer<S::kTiles.queries> ring;
  fence_async_proxy_global();  // statistics were written by ordinary stores
  for (Producer<S::kTiles.items> items;; items.next()) {
    const int index = atomicAdd(p.taken, 1);
    const u32 full = shared.rows.acquire(items), k = rows + items.stage * 2 * S::kRowTile;
    if (index >= p.items) {
      shared.items[items.stage] = -1;
      mbarrier::arrive(full);
      return;
    }
    shared.items[items.stage] = index;
    const FiveProductItem item(p, index);
    const int4 place{item.tile * kRows, 0, 0, 0};
    mbarrier::arrive_expect(full, 2 * S::kRowTile);
    fetch<S::kHalves>(p.k, k, S::kRowHalf, full, place, item.batch, item.head);
    fetch<S::kHalves>(p.v, k + S::kRowTile, S::kRowHalf, full, place, item.batch, item.head);
    five_product_steps(p, item, [&](const FiveProductTurn& turn) {
      const u32 filled = shared.queries.acquire(ring);
      if constexpr (S::kScored) {
        shared.heads[ring.stage] = score_head<S::kScore>(p.more, item.batch, turn.head);
        shared.firsts[ring.stage] = turn.col * kStream;
        if (ScoreKind<S::kScore>::kBias && p.prefetch != 0) {
          const int at = (p.more.head0 + turn.head) * p.bias.head, batch = item.batch * p.bias.batch;
          tma::prefetch_tile(&p.bias.map, item.tile * kRows, turn.col * kStream, at, batch);
          tma::prefetch_tile(&p.bias.map, item.tile * kRows + 64, turn.col * kStream, at, batch);
        }
      }
      mbarrier::arrive_expect(filled, (S::kApart ? 1 : 2) * S::kColTile + S::kStatsBytes);
      fetch<S::kHalves>(p.q, rows + S::kQueries + ring.stage * S::kColTile, S::kColHalf, filled,
                        {turn.col * kStream, 0, 0, 0}, item.batch, turn.head);
      if constexpr (!S::kApart) {
        fetch<S::kHalves>(p.d_o, rows + S::kOutputs + ring.stage * S::kColTile, S::kColHalf, filled,
                          {turn.col * kStream, 0, 0, 0}, item.batch, turn.head);
      }
      tma::load_bytes(shared_address(shared.stats[ring.stage]),
                      reinterpret_cast<const u8*>(p.stats) + static_cast<i64>(turn.tile) * S::kStatsStep,
                      S::kStatsBytes, filled);
      ring.next();
    });
  }
}

/// Another one fetches d_o, where shared memory has room for fewer of its tiles than of q's.
template <typename S>
__device__ __forceinline__ void fetch_outputs(const FiveProductParams& p, S& shared, u32 rows) {
  Producer<S::kTiles.outputs> ring;
  five_product_items(shared, [&](int index, int place) {
    const FiveProductItem item(p, index);
    shared.rows.release_lane(place);
    five_product_steps(p, item, [&](const FiveProductTurn& turn) {
      const u32 full = shared.outputs.acquire(ring);
      mbarrier::arrive_expect(full, S::kColTile);
      fetch<S::kHalves>(p.d_o, rows + S::kOutputs + ring.stage * S::kColTile, S::kColHalf, full,
                        {turn.col * kStream, 0, 0, 0}, item.batch, turn.head);
      ring.next();
    });
  });
}

/// And one for each of the two places of dq adds what is there to its sum, when it is its turn.
template <typename S>
__device__ __forceinline__ void add_in_turn(const FiveProductParams& p, S& shared, u32 rows, u32 which) {
  Consumer<2> ring;
  five_product_items(shared, [&](int index, int place) {
    const FiveProductItem item(p, index);
    shared.rows.release_lane(place);
    five_product_steps(p, item, [&](const FiveProductTurn& turn) {
      if (ring.stage == which) {
        const u32 from = rows + S::kSumsAt + which * S::kSums;
        float* const to = p.sums + static_cast<i64>(turn.sum) * (S::kSums / 4);
        shared.sums.wait(ring);
        if (turn.before > 0) {
          while (load_acquire(p.turns + turn.sum) != turn.before) {
          }
          fence_async_proxy_global();
          tma::add_floats(to, from, S::kSums);
        } else {
          tma::store_bytes(to, from, S::kSums);
        }
        tma::store_commit();
        tma::store_wait_read<0>();
        shared.sums.release_lane(which);
        tma::store_wait();
        fence_async_proxy_global();
        store_release(p.turns + turn.sum, turn.before + 1);
      }
      ring.next();
    });
  });
}

/// A warpgroup's dq of 64 columns, as it falls: rows are columns of q, columns queries. finish_five_product knows the
/// order.
template <typename S>
__device__ __forceinline__ void put_sums(S& shared, u32 place, u32 to, const float (&dq)[kStream / 2]) {
#pragma unroll
  for (int j = 0; j < kStream / 8; ++j) {
    store_shared_128(to + j * 2048 + threadIdx.x % 128 * 16,
                     {__float_as_uint(dq[4 * j]), __float_as_uint(dq[4 * j + 1]), __float_as_uint(dq[4 * j + 2]),
                      __float_as_uint(dq[4 * j + 3])});
  }
  fence_async_proxy();
  mbarrier::arrive(shared_address(&shared.sums.full[place]));
}

/// dq of 64 columns: kᵀ, from `keys` on, times dSᵀ of a step.
template <typename T>
__device__ __forceinline__ void multiply_gradients(float (&dq)[kStream / 2], u32 keys, u32 scores) {
  using wgmma::Major;
  const u64 a = wgmma::descriptor<128>(keys), b = wgmma::descriptor<128>(scores);
  wgmma::multiply<T, kStream, Major::mn, Major::mn, 0, false>(dq, a, b);
#pragma unroll
  for (int i = 1; i < kRows / 16; ++i) {
    const u64 next = i * wgmma::kNextK<128, Major::mn>;
    wgmma::multiply<T, kStream, Major::mn, Major::mn>(dq, a + next, b + next);
  }
}

/// With 64 columns a warpgroup does nothing else.
template <typename T, typename S>
__device__ __forceinline__ void multiply_queries(const FiveProductParams& p, S& shared, u32 rows) {
  Consumer<S::kTiles.scores> ring;
  Producer<2> places;
  five_product_items(shared, [&](int index, int place) {
#pragma unroll 1
    for (int n = p.group * FiveProductItem(p, index).steps(p); n > 0; --n) {
      float dq[kStream / 2];
      shared.scores.wait(ring);
      wgmma::fence();
      multiply_gradients<T>(dq, rows + place * 2 * S::kRowTile, rows + S::kScoresAt + ring.stage * S::kScores);
      wgmma::commit();
      shared.sums.acquire(places);
      wgmma::wait<0>();
      shared.scores.release(static_cast<int>(ring.stage));
      put_sums(shared, places.stage, rows + S::kSumsAt + places.stage * S::kSums, dq);
      ring.next();
      places.next();
    }
    shared.rows.release(place);
  });
}

/// Which of a warp's 16 keys are padding, a bit for each; rows of k that are become zeros, because dq is a sum over
/// them. All threads of a warpgroup call it, for the keys from `first` on that its half of k has.
template <typename S>
__device__ __forceinline__ u32 hide_keys(const FiveProductParams& p, int batch, int first, u32 k) {
  const auto is_padding = [&](int key) { return p.padding.data[batch * p.padding.batch + key * p.padding.col] != 0; };
  const u32 row = threadIdx.x % 64, part = threadIdx.x / 64 % 2;
  if (is_padding(first + static_cast<int>(row))) {
#pragma unroll
    for (int n = 0; n < S::kHalves * 4; ++n) {
      const u32 to = k + n / 4 * S::kRowHalf + row * 128 + (part * 4 + n % 4) * 16;
      asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(to), "r"(0) : "memory");
    }
  }
  const int own = static_cast<int>(threadIdx.x / 32 % 4 * 16 + threadIdx.x % 16);
  return __ballot_sync(0xffffffffu, is_padding(first + own)) & 0xffffu;
}
/// Replaces the scores of those keys.
__device__ __forceinline__ void cut_keys(float (&s)[kStream / 2], u32 hidden) {
  const u32 own = hidden >> threadIdx.x % 32 / 4;
#pragma unroll
  for (int i = 0; i < kStream / 2; ++i) {
    s[i] = (own & (i / 2 % 2 == 0 ? 1u : 256u)) != 0 ? 0.0f : s[i];
  }
}

/// Two warpgroups of 64 keys each. While exponents are taken or dS is made, products are under way. With 128 columns
/// each also makes dq of 64 columns, where dP was, and finds dSᵀ for dk in shared memory: registers are all taken.
template <typename T, int kColumns, bool kMasked, bool kPadded, unsigned kScore, typename S>
__device__ __forceinline__ void multiply_keys(const FiveProductParamsOf<kScore>& p, S& shared, u32 rows) {
  using wgmma::Major;
  using K = ScoreKind<kScore>;
  const int warpgroup = static_cast<int>(threadIdx.x) / 128 - 1, lane = static_cast<int>(threadIdx.x) % 32;
  const int warp_row = static_cast<int>(threadIdx.x) / 32 % 4 * 16;
  Consumer<S::kTiles.queries> ring;
  Consumer<S::kTiles.outputs> outputs;
  Consumer<S::kTiles.scores> places;  // both fills and reads them
  Producer<2> sums;
  five_product_items(shared, [&](int index, int place) {
    const u32 k = rows + place * 2 * S::kRowTile + warpgroup * 8192, v = k + S::kRowTile;
    float dk[kColumns / 2], dv[kColumns / 2], s[kStream / 2], dp[kStream / 2];
    u32 left[kStream / 16][4];
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) {
      dk[i] = dv[i] = 0.0f;
    }
    const auto at = [&](u32 stage) { return rows + S::kQueries + stage * S::kColTile; };
    const auto ask = [&](u32 q) {
      wgmma::fence();
      multiply_scores<T, kColumns, kStream>(s, k, S::kRowHalf, q, S::kColHalf);
      wgmma::commit();
    };
    u32 hidden = 0;
    if constexpr (kPadded) {
      const FiveProductItem of(p, index);
      hidden = hide_keys<S>(p, of.batch, of.tile * kRows + warpgroup * 64, k);
      join_cleared(1 + warpgroup);
    }
    ScoresByKey<kScore, true> scores;
    int key0 = 0;
    if constexpr (K::kTokens) {
      key0 = FiveProductItem(p, index).tile * kRows + warpgroup * 64 + warp_row;
    }
    const auto key = [&](int n) { return key0 + n; };
    const auto ask_bias = [&](u32 stage) {
      if constexpr (K::kTokens) {
        const int first = shared.firsts[stage];
        scores.ask(
            p.more, shared.heads[stage], [&](int n) { return first + n; }, key, true);
      }
    };
    shared.queries.wait(ring);
    ask_bias(ring.stage);
    ask(at(ring.stage));
    wgmma::wait<0>();
    const FiveProductItem item(p, index);
    const int steps = item.steps(p);
    int before = -1;
    int low = p.low + item.tile * kRows - (p.col_tiles - 1) * kStream;  // of the band as this step's tiles see it
#pragma unroll 1
    for (int n = p.group * steps; n > 0; --n) {
      const int stage = static_cast<int>(ring.stage), output = static_cast<int>(S::kApart ? outputs.stage : ring.stage);
      const u32 q = at(stage), d_o = rows + S::kOutputs + output * S::kColTile;
      const auto stat = [&](int which, int j) {
        return *reinterpret_cast<const float2*>(&shared.stats[stage][which][8 * j + lane % 4 * 2]);
      };
      if constexpr (S::kApart) {
        shared.outputs.wait(outputs);
      }
      wgmma::fence();
      multiply_scores<T, kColumns, kStream>(dp, v, S::kRowHalf, d_o, S::kColHalf);
      wgmma::commit();
      const bool cut = kMasked && low > 1 - kRows;
      const auto cut_all = [&](float(&x)[kStream / 2]) {
        if (cut) {
          cut_band(x, {kBand, low, kStream, kStream}, warpgroup * 64 + warp_row + lane / 4, 0.0f);
        }
        if (kPadded && hidden != 0) {
          cut_keys(x, hidden);
        }
      };
      if constexpr (K::kCaps) {
        cut_all(s);
      }
      if constexpr (K::kBoth) {
        wgmma::wait<0>();  // for dP
      }
      const u32 scores_at = rows + S::kScoresAt + places.stage * S::kScores, own = scores_at + warpgroup * 8192;
      if constexpr (kScore != 0) {
        const int first = shared.firsts[stage];
        if constexpr (scores.kStaged) {
          shared.scores.acquire({places.stage, places.parity ^ 1});  // dSᵀ of the step before is done with
          scores.stage(own);
          named_barrier(1 + warpgroup, 128);
        }
        score_keys(
            p.more, scores, shared.heads[stage], s, dp, [&](int n) { return first + n; }, key, shared.stats[stage],
            shared.stats[stage][2], own);
      } else {
        to_probabilities(s, p.scale_2, [&](int j) { return stat(0, j); });
      }
      cut_all(s);
      if constexpr (K::kBoth) {
        cut_all(dp);
      }
      if constexpr (kMasked) {
        low += (n - 1) % steps == 0 ? (1 - steps) * kStream : kStream;
      }
      pack<T>(left, s);
      wgmma::fence();
      multiply_values<T, kColumns, kStream>(dv, left, d_o, S::kColHalf);
      wgmma::commit();
      if constexpr (!K::kBoth) {
        wgmma::wait<1>();  // for dP, and dk of the step before
      }
      if constexpr (S::kThird) {
        shared.queries.release(before);
        before = stage;
      }
      const auto to_gradients = [&]<bool kCut>() {  // what is not in the pattern stays 0 whatever dP is
#pragma unroll
        for (int j = 0; j < kStream / 8; ++j) {
          const float2 delta = stat(1, j);
#pragma unroll
          for (int i = 4 * j; i < 4 * j + 4; ++i) {
            s[i] = kCut && s[i] == 0.0f ? 0.0f : s[i] * (dp[i] - (i % 2 == 0 ? delta.x : delta.y));
          }
        }
      };
      if constexpr (K::kBoth) {
#pragma unroll
        for (int i = 0; i < kStream / 2; ++i) {
          s[i] = dp[i];
        }
      } else if (cut || (kPadded && hidden != 0)) {
        to_gradients.template operator()<true>();
      } else {
        to_gradients.template operator()<false>();
      }
      if constexpr (scores.kStaged) {
        named_barrier(1 + warpgroup, 128);  // all have read their biases
      } else {
        shared.scores.acquire({places.stage, places.parity ^ 1});
      }
      u32 left_too[kStream / 16][4];
      if constexpr (S::kThird) {
        pack<T>(left_too, s);
#pragma unroll
        for (int i = 0; i < kStream / 16; ++i) {
          const u32 row = warp_row + lane % 16, unit = 2 * i + lane / 16;
          wgmma::store_pieces(own + tma::swizzled<128>(row * 128 + unit * 16), left_too[i][0], left_too[i][1],
                              left_too[i][2], left_too[i][3]);
        }
      } else {
        store_piece<T, false, 0>(s, own);
      }
      fence_async_proxy();
      mbarrier::arrive(shared_address(&shared.scores.full[places.stage]));
      ring.next();
      const auto ask_next = [&] {
        if (n > 1) {
          shared.queries.wait(ring);
        }
        ask(n > 1 ? at(ring.stage) : q);  // the last is for nothing: the compiler must know what is under way
        if constexpr (K::kTokens) {
          ask_bias(n > 1 ? ring.stage : static_cast<u32>(stage));
        }
      };
      if constexpr (S::kThird) {
        ask_next();
        wgmma::fence();
        multiply_values<T, kColumns, kStream>(dk, left_too, q, S::kColHalf);
        wgmma::commit();
        wgmma::wait<1>();  // for the scores
      } else {
        named_barrier(1 + warpgroup, 128);  // its own rows of dSᵀ are there
        wgmma::fence();
#pragma unroll
        for (int i = 0; i < kStream / 16; ++i) {
          wgmma::multiply<T, kColumns, Major::k, Major::mn>(
              dk, wgmma::descriptor<128>(own) + i * wgmma::kNextK<128, Major::k>,
              wgmma::descriptor<128>(q, S::kColHalf) + i * wgmma::kNextK<128, Major::mn>);
        }
        wgmma::commit();
        ask_next();
        shared.scores.wait(places);
        wgmma::fence();
        static_assert(S::kTiles.items == 1);  // so that k lies at `rows`
        multiply_gradients<T>(dp, rows + warpgroup * S::kRowHalf, scores_at);
        wgmma::commit();
        shared.sums.acquire(sums);
        wgmma::wait<0>();
        shared.queries.release(stage);
        shared.outputs.release(output);
        shared.scores.release(static_cast<int>(places.stage));
        put_sums(shared, sums.stage, rows + S::kSumsAt + sums.stage * S::kSums + warpgroup * (S::kSums / 2), dp);
        outputs.next();
        sums.next();
      }
      places.next();
    }
    wgmma::wait<0>();
    shared.queries.release(before);
    const int own = item.tile * kRows + warpgroup * 64 + warp_row + lane % 16;
    const int4 note{0, item.batch, item.head, item.tile};
    named_barrier(1 + warpgroup, 128);  // no one reads this half of v any more
    store_lines<T, kColumns>(p.d_v, p.value_depth, 0, note, own, dv, kept_factor(p), v);
    __syncwarp();
    store_lines<T, kColumns>(p.d_k, p.depth, 0, note, own, dk, p.scale, v);
    fence_async_proxy();  // the next rows come by the copy engine
    shared.rows.release(place);
  });
}

/// kMasked: query tiles may be under a band. kPadded: keys may be padding.
template <typename T, int kColumns, bool kMasked, bool kPadded, unsigned kScore, typename S>
__device__ __forceinline__ void run_five_product(const FiveProductParamsOf<kScore>& p, S& shared, const u8* raw) {
  const u32 rows = stages_in(raw);
  init_barriers([&] {
    shared.rows.make(1, 8 + (S::kThird ? 4 : 0) + (S::kApart ? 3 : 2));
    shared.queries.make(1, 8);
    shared.outputs.make(1, 8);
    shared.scores.make(256, S::kThird ? 4 : 8);
    shared.sums.make(S::kThird ? 128 : 256, 1);
  });
  wait_for_earlier_kernel();
  const u32 warpgroup = threadIdx.x / 128, warp = threadIdx.x / 32;  // three roles: not run_warp_specialized
  if (warpgroup == 0) {
    fewer_registers<S::kFetchRegisters>();
    if (threadIdx.x == 0) {
      fetch_five_product(p, shared, rows);
    } else if (S::kApart && threadIdx.x == 32) {
      fetch_outputs(p, shared, rows);
    } else if (threadIdx.x == 64 || threadIdx.x == 96) {
      add_in_turn(p, shared, rows, warp - 2);
    }
  } else if (S::kThird && warpgroup == 3) {
    if constexpr (S::kThird) {
      fewer_registers<S::kQueryRegisters>();
      multiply_queries<T>(p, shared, rows);
    }
  } else {
    more_registers<S::kRegisters>();
    multiply_keys<T, kColumns, kMasked, kPadded, kScore>(p, shared, rows);
  }
}

template <typename T, int kColumns, bool kMasked, bool kPadded>
__global__ void __launch_bounds__(five_product_tiles(kColumns).threads, 1)
    backward_five_product(const __grid_constant__ FiveProductParams p) {
  extern __shared__ u8 raw[];
  __shared__ ScoredFiveProductShared<kColumns, 0> shared;
  run_five_product<T, kColumns, kMasked, kPadded, 0>(p, shared, raw);
}
/// kScore: options.
template <typename T, int kColumns, bool kMasked, bool kPadded, unsigned kScore>
__global__ void __launch_bounds__(five_product_tiles(kColumns).threads, 1)
    scored_backward_five_product(const __grid_constant__ ScoredFiveProductParams p) {
  extern __shared__ u8 raw[];
  __shared__ ScoredFiveProductShared<kColumns, kScore> shared;
  static_assert(kColumns < 128 || sizeof(shared) == kScoredStatic);
  run_five_product<T, kColumns, kMasked, kPadded, kScore>(p, shared, raw);
}

/// Queries' gradients from their sums: a CTA for each tile.
template <typename T, int kColumns>
__global__ void __launch_bounds__(128) finish_five_product(const __grid_constant__ FiveProductParams p) {
  constexpr int kSums = kStream * kColumns;
  __shared__ alignas(16) T tile[kStream][kColumns + 8];
  wait_for_earlier_kernel();
  const int col = static_cast<int>(blockIdx.x) % p.col_tiles, set = static_cast<int>(blockIdx.x) / p.col_tiles;
  const int heads = p.kv_heads * p.group, thread = static_cast<int>(threadIdx.x);
  const auto* const from = reinterpret_cast<const float4*>(p.sums + static_cast<i64>(blockIdx.x) * kSums) + thread;
  const i64 second = static_cast<i64>(gridDim.x) * (kSums / 4);
  const bool two = p.round != 0 && 2 * (p.row_tiles - 1) + col >= p.col_tiles;
#pragma unroll
  for (int n = 0; n < kSums / 512; ++n) {
    float4 x = from[n * 128];
    if (two) {
      const float4 y = from[n * 128 + second];
      x = {x.x + y.x, x.y + y.y, x.z + y.z, x.w + y.w};
    }
    const int row = n % 8 * 8 + thread % 4 * 2, at = n / 8 * 64 + thread / 32 * 16 + thread % 32 / 4;
    tile[row][at] = narrow<T>(x.x * p.scale);
    tile[row + 1][at] = narrow<T>(x.y * p.scale);
    tile[row][at + 8] = narrow<T>(x.z * p.scale);
    tile[row + 1][at + 8] = narrow<T>(x.w * p.scale);
  }
  __syncthreads();
  T* const to = static_cast<T*>(p.d_q.data) + set / heads * p.d_q.batch + set % heads * p.d_q.head;
#pragma unroll
  for (int n = 0; n < kSums / 1024; ++n) {
    const int unit = n * 128 + thread, row = unit / (kColumns / 8), at = unit % (kColumns / 8) * 8;
    if (at < p.depth) {
      store_words<4>(to + (col * kStream + row) * p.d_q.row + at, reinterpret_cast<const u32*>(&tile[row][at]));
    }
  }
}

}  // namespace fretwork::attention_op::hopper
