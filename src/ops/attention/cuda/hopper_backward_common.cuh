// What the Hopper kernels of attention's gradients share: shared memory and barriers, the walk over a component's
// steps, fetching rows, columns and statistics, scores that become probabilities and gradients, and storing gradients.
#pragma once

#include "device/load.cuh"
#include "ops/attention/cuda/hopper.cuh"
#include "ops/attention/cuda/hopper_score.cuh"

namespace fretwork::attention_op::hopper {

inline constexpr int kStream = 64;

/// For kDepth columns of q and k and kValues of v and d_o. All tiles have room for the larger.
template <int kDepth, int kValues, int kRowsOf = kRows>
struct BackwardShared {
  static constexpr int kTileRows = kRowsOf, kMost = kDepth > kValues ? kDepth : kValues;
  static constexpr int kItems = backward_tiles(kMost, kTileRows).items,
                       kStages = backward_tiles(kMost, kTileRows).stages;
  static constexpr int kHalves = kDepth / 64, kValueHalves = kValues / 64, kMostHalves = kMost / 64;
  static constexpr bool kAhead = kMost == 64;  ///< registers have room for two steps
  /// Where rows are keys: dP is asked for when P is packed, as registers have no room for both and the scores.
  static constexpr bool kPackedShares = kTileRows < kRows && kDepth + kValues > 192;
  static constexpr u32 kFetchRegisters = kTileRows == kRows && kMost == 64 ? 40 : 24;
  static constexpr u32 kRegisters = kTileRows < kRows || kMost == 64 ? 232 : 240;
  static constexpr u32 kRowHalf = kTileRows * 128, kRowTile = kMostHalves * kRowHalf;  ///< bytes of one operand
  static constexpr u32 kColHalf = kStream * 128, kColTile = kMostHalves * kColHalf;
  RingBarriers<kItems> rows;
  RingBarriers<kStages> cols;
  int4 items[kItems], steps[kStages];
  alignas(16) float stats[kStages][2][kStream];  ///< of keys' and values' columns
  int used[kStages], parts[kItems];
  static constexpr bool kTokens = false, kScored = false, kRowBits = false;
};
/// Of kernels with options. Registers have no room for two steps.
template <int kDepth, int kValues, bool kKeys, unsigned kOptions, int kRowsOf = kRows>
struct alignas(512) ScoredBackwardShared : BackwardShared<kDepth, kValues> {
  static_assert(kRowsOf == kRows);
  using Base = BackwardShared<kDepth, kValues>;
  static constexpr bool kAhead = false, kScored = true, kTokens = !kKeys && ScoreKind<kOptions>::kTokens;
  static constexpr unsigned kScore = kOptions;
  static constexpr bool kRowBits = ScoreKind<kOptions>::kRowBits;
  union {
    alignas(16) float rest[Base::kStages][kStream];  ///< keys: of the columns, as in ScoreStats; or random_row's bits
    int tokens[Base::kStages][kStream];              ///< queries: of the columns
  };
  ScoreHead heads[Base::kStages];  ///< keys: of the columns
  int tiles[Base::kStages];        ///< keys: which they are
};
template <int kDepth, int kValues, bool kKeys, int kRowsOf>
struct ScoredBackwardShared<kDepth, kValues, kKeys, 0, kRowsOf> : BackwardShared<kDepth, kValues, kRowsOf> {};

/// Calls step(batch, head, run, column tile) for all steps of an item that begins and ends anywhere in its tile's.
template <bool kKeys, typename Step>
__device__ __forceinline__ void walk_piece(const BackwardParams& p, int i, const int4& item, Step& step) {
  const Walk& walk = p.walk;
  const int4 piece = record(p.pieces, i);
  int head = kKeys ? item.z * p.group + piece.w : item.z / p.group, r = piece.x;
  int tile = item.w > 0 ? record(walk.runs, 2 * r).x + piece.y : 0;
#pragma unroll 1
  for (int left = item.w; left > 0; --left) {
    step(item.y, head, r, tile);
    const int4 run = record(walk.runs, 2 * r);
    if (++tile == run.x + run.y && left > 1) {
      if (++r == word(walk.last, item.x) && kKeys) {
        r = word(walk.first, item.x);
        ++head;
      }
      tile = record(walk.runs, 2 * r).x;
    }
  }
}

/// Calls step(batch, head, run, column tile) for all that this CTA does. Keys meet the queries of all heads that share
/// them.
template <bool kKeys, bool kSplit, typename Step>
__device__ __forceinline__ void walk_steps(const BackwardParams& p, Step step) {
  const Walk& walk = p.walk;
#pragma unroll 1
  for (int i = word(walk.share, blockIdx.x); i < word(walk.share, blockIdx.x + 1); ++i) {
    const int4 item = record(walk.items, i);
    if constexpr (kSplit) {
      walk_piece<kKeys>(p, i, item, step);
      continue;
    }
    int head = kKeys ? item.z * p.group : item.z / p.group;
    do {
#pragma unroll 1
      for (int r = word(walk.first, item.x); r < word(walk.last, item.x); ++r) {
        const int4 run = record(walk.runs, 2 * r);
        int tile = run.x;
#pragma unroll 1
        for (int n = run.y; n > 0; --n, ++tile) {
          step(item.y, head, r, tile);
        }
      }
    } while (kKeys && ++head % p.group != 0);
  }
}

/// Brings near what those who multiply ask for at the ends of an item: the tokens of its rows, and for queries their
/// statistics. A lane has four rows.
template <bool kKeys, int kTileRows>
__device__ __forceinline__ void prefetch_rows(const BackwardParams& p, const int4& item) {
  if (threadIdx.x % 32 >= kTileRows / 4) {
    return;
  }
  const int4 tokens = record(p.walk.row_tokens + item.x * kTileRows, threadIdx.x % 32);
  if constexpr (!kKeys) {
    const RowStats* const stats = p.stats + item.y * p.stats_batch + item.z * p.stats_head;
    const auto prefetch = [&](int token) {
      if (token >= 0) {
        asm volatile("prefetch.global.L1 [%0];" ::"l"(stats + token));
      }
    };
    prefetch(tokens.x);
    prefetch(tokens.y);
    prefetch(tokens.z);
    prefetch(tokens.w);
  }
}

/// The steps of item i: where columns are keys, those with some that are seen.
template <bool kSeen, bool kSplit>
__device__ __forceinline__ int steps_of(const BackwardParams& p, int i, const int4& item) {
  if constexpr (!kSeen) {
    return item.w;
  }
  const int4 piece = kSplit ? record(p.pieces, i) : int4{word(p.walk.first, item.x), 0, 0, 0};
  return seen_steps(p.walk, p.seen, item.y, piece.x, piece.y, item.w);
}

/// One warp fetches the rows of each item. kSeen: columns are keys that may be padding.
template <bool kKeys, bool kSeen, bool kSplit, typename S>
__device__ __forceinline__ void fetch_rows(const BackwardParams& p, S& shared, u32 rows) {
  const Walk& walk = p.walk;
  Producer<S::kItems> at;
#pragma unroll 1
  for (int i = word(walk.share, blockIdx.x); i < word(walk.share, blockIdx.x + 1); ++i, at.next()) {
    const int4 item = record(walk.items, i);
    const u32 full = shared.rows.acquire(at);
    if (threadIdx.x == 0) {
      const int4 place = record(walk.row_tiles, item.x);
      const u32 to = rows + at.stage * 2 * S::kRowTile;
      shared.items[at.stage] = {steps_of<kSeen, kSplit>(p, i, item), item.y, item.z, item.x};
      if constexpr (kSplit) {
        shared.parts[at.stage] = record(p.pieces, i).z;
      }
      mbarrier::arrive_expect(full, (S::kHalves + S::kValueHalves) * 128 * walk.row_places);
      fetch<S::kHalves>(p.rows[0], to, S::kRowHalf, full, place, item.y, item.z);
      fetch<S::kValueHalves>(p.rows[1], to + S::kRowTile, S::kRowHalf, full, place, item.y, item.z);
    }
    __syncwarp();
    prefetch_rows<kKeys, S::kTileRows>(p, item);
  }
  if (threadIdx.x == 0) {
    const u32 full = shared.rows.acquire(at);
    shared.items[at.stage] = {-1, 0, 0, 0};
    mbarrier::arrive(full);
  }
}

/// A thread of another warp the columns of each step.
template <bool kKeys, bool kSeen, bool kSplit, typename Params, typename S>
__device__ __forceinline__ void fetch_cols(const Params& p, S& shared, u32 cols) {
  const Walk& walk = p.walk;
  Producer<S::kStages> at;
  walk_steps<kKeys, kSplit>(p, [&](int batch, int head, int r, int tile) {
    if (kSeen && !sees_tile(p.seen, batch, tile)) {
      return;
    }
    const u32 full = shared.cols.acquire(at), to = cols + at.stage * 2 * S::kColTile;
    shared.steps[at.stage] = mask_of(walk, r);
    shared.used[at.stage] = used_of<!kKeys>(walk, batch, tile);
    if constexpr (S::kScored) {
      if constexpr (kKeys) {
        shared.heads[at.stage] = score_head<S::kScore>(p.more, batch, head);
        shared.tiles[at.stage] = tile;
      }
    }
    mbarrier::arrive_expect(full,
                            (S::kHalves + S::kValueHalves) * 128 * walk.col_places + (S::kTokens ? kStream * 4 : 0));
    if constexpr (S::kTokens) {
      tma::load_bytes(shared_address(shared.tokens[at.stage]), walk.col_tokens + tile * kStream, kStream * 4, full);
    }
    const int4 place = record(walk.col_tiles, tile);
    fetch<S::kHalves>(p.cols[0], to, S::kColHalf, full, place, batch, head);
    fetch<S::kValueHalves>(p.cols[1], to + S::kColTile, S::kColHalf, full, place, batch, head);
    at.next();
  });
}

/// A plain load: the kernel before, which this one may have been launched behind, wrote them.
__device__ __forceinline__ float2 stats_of(const BackwardParams& p, int batch, int head, int token) {
  const int at = batch * p.stats_batch + head * p.stats_head + token;
  return token >= 0 ? reinterpret_cast<const float2*>(p.stats)[at] : float2{0.0f, 0.0f};
}

/// The same where there are options.
__device__ __forceinline__ float4 scored_stats_of(const BackwardParams& p, int batch, int head, int token) {
  const int at = batch * p.stats_batch + head * p.stats_head + token;
  return token >= 0 ? reinterpret_cast<const float4*>(p.stats)[at] : float4{infinity(), 0.0f, 0.0f, 0.0f};
}

/// One warp gathers the statistics of the queries in a stage's columns; every lane says that its own are there.
template <bool kSplit, typename Params, typename S>
__device__ __forceinline__ void gather_stats(const Params& p, S& shared) {
  Producer<S::kStages> at;
  const u32 lane = threadIdx.x % 32;
  walk_steps<true, kSplit>(p, [&](int batch, int head, int, int tile) {
    float2 pair[kStream / 32];
    float rest[kStream / 32];
    u32 drop = 0;
    if constexpr (S::kRowBits) {
      drop = score_head<S::kScore>(p.more, batch, head).drop;
    }
#pragma unroll
    for (int n = 0; n < kStream / 32; ++n) {
      const int token = word(p.walk.col_tokens, tile * kStream + n * 32 + lane);
      if constexpr (S::kScored) {
        const float4 all = scored_stats_of(p, batch, head, token);
        pair[n] = {all.x, all.y};
        rest[n] = S::kRowBits ? __uint_as_float(random_row(drop, max(0, token))) : all.z;
      } else {
        pair[n] = stats_of(p, batch, head, token);
      }
    }
    const u32 full = shared.cols.acquire(at);
#pragma unroll
    for (int n = 0; n < kStream / 32; ++n) {
      shared.stats[at.stage][0][n * 32 + lane] = pair[n].x;
      shared.stats[at.stage][1][n * 32 + lane] = pair[n].y;
      if constexpr (S::kScored) {
        shared.rest[at.stage][n * 32 + lane] = rest[n];
      }
    }
    mbarrier::arrive(full);
    at.next();
  });
}

/// Every lane releases a stage, if it is one: each has read statistics or tokens there with loads of its own.
__device__ __forceinline__ void release_lane(u32 empty, int stage) {
  if (stage >= 0) {
    mbarrier::arrive(empty + 8 * stage);
  }
}

/// P = exp2(s · scale − lse) of columns' statistics: `lse(j)` has those of a lane's two columns of eight.
template <typename Lse>
__device__ __forceinline__ void to_probabilities(float (&s)[kStream / 2], float scale, Lse lse) {
#pragma unroll
  for (int j = 0; j < kStream / 8; ++j) {
    const float2 both = lse(j);
    s[4 * j] = exp2_fast(s[4 * j] * scale - both.x);
    s[4 * j + 1] = exp2_fast(s[4 * j + 1] * scale - both.y);
    s[4 * j + 2] = exp2_fast(s[4 * j + 2] * scale - both.x);
    s[4 * j + 3] = exp2_fast(s[4 * j + 3] * scale - both.y);
  }
}

/// dS = P∘(dP − delta), where what is not in the pattern stays 0 whatever dP is. `delta(i)` belongs to element i.
template <typename Delta>
__device__ __forceinline__ void to_score_gradients(float (&s)[kStream / 2], const float (&dp)[kStream / 2], bool masked,
                                                   Delta delta) {
  if (masked) {
#pragma unroll
    for (int i = 0; i < kStream / 2; ++i) {
      s[i] = s[i] == 0.0f ? 0.0f : s[i] * (dp[i] - delta(i));
    }
  } else {
#pragma unroll
    for (int i = 0; i < kStream / 2; ++i) {
      s[i] *= dp[i] - delta(i);
    }
  }
}

/// Adds eight numbers to those in memory, which takes no answer. No two threads of a launch add to the same place, so
/// that results do not depend on their order.
template <typename T>
__device__ __forceinline__ void add_words(T* to, const u32 (&words)[4]) {
  if constexpr (is_same<T, f16>) {
    asm volatile("red.relaxed.gpu.global.add.noftz.v4.f16x2 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(words[0]),
                 "r"(words[1]), "r"(words[2]), "r"(words[3])
                 : "memory");
  } else {
    asm volatile("red.relaxed.gpu.global.add.noftz.v4.bf16x2 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(words[0]),
                 "r"(words[1]), "r"(words[2]), "r"(words[3])
                 : "memory");
  }
}

/// Rounds a warp's rows times `factor` and stores their `depth` columns through its share of `buffer`, or adds them to
/// what is there. A lane answers for row `own`.
template <typename T, int kDepth, int kTileRows = kRows>
__device__ __forceinline__ void store_lines(const Lines& out, int depth, int add, const int4& item, int own,
                                            float (&d)[kDepth / 2], float factor, u32 buffer) {
  constexpr u32 kHalf = kTileRows * 128;
#pragma unroll
  for (float& sum : d) {
    sum *= factor;
  }
  put_rows<T, kDepth>(d, buffer, kHalf);
  T* const to = static_cast<T*>(out.data) + item.y * out.batch + item.z * out.head;
#pragma unroll
  for (int n = 0; n < kDepth / 16; ++n) {
    const Unit unit(n);
    u32 words[4];
    unit.take(words, buffer, kHalf);
    const int token = __shfl_sync(0xffffffffu, own, unit.row);
    if (token >= 0 && unit.col < depth) {
      T* const at = to + token * out.row + unit.col;
      if (add != 0) {
        add_words<T>(at, words);
      } else {
        store_words<4>(at, words);
      }
    }
  }
}

/// The same, except that a part goes to its place as it is.
template <typename T, int kDepth, int kTileRows = kRows>
__device__ __forceinline__ void store_gradient(const BackwardParams& p, int which, int depth, const int4& item,
                                               int part, int own, float (&d)[kDepth / 2], float factor, u32 buffer) {
  if (part >= 0) {
    put_part<kDepth>(p.sums[which], part, tile_row(static_cast<int>(threadIdx.x) / 128 - 1), d, factor);
  } else {
    store_lines<T, kDepth, kTileRows>(p.out[which], depth, p.add, item, own, d, factor, buffer);
  }
}

/// What a kernel does before it reads anything that another may have written. One that is early does not wait for the
/// kernel before until it ends itself.
__device__ __forceinline__ void begin_backward(const BackwardParams& p) {
  if (p.early == 0) {
    wait_for_earlier_kernel();
  } else {
    __threadfence();  // statistics that this multiprocessor's own cache has may be an earlier call's
  }
  let_next_kernel_start();
}

/// What backward_keys and backward_queries begin with.
template <bool kKeys, typename S>
__device__ __forceinline__ void make_barriers(const BackwardParams& p, S& shared, u32 cols) {
  clear_unplaced(cols, 2 * S::kStages * S::kMostHalves, kStream, p.walk.col_places);
  init_barriers([&] {
    shared.rows.make(1, S::kTileRows / 16);
    shared.cols.make(kKeys ? 33 : 1, kKeys || S::kTokens ? 2 * S::kTileRows : S::kTileRows / 16);
  });
  begin_backward(p);
}
/// The roles of the warpgroup that fetches, a warp for each.
template <bool kKeys, bool kSeen, bool kSplit, typename Params, typename S>
__device__ __forceinline__ void fetch_all(const Params& p, S& shared, u32 rows, u32 cols) {
  if (threadIdx.x < 32) {
    fetch_rows<kKeys, kSeen, kSplit>(p, shared, rows);
  } else if (threadIdx.x == 32) {
    fetch_cols<kKeys, kSeen, kSplit>(p, shared, cols);
  } else if (kKeys && threadIdx.x / 32 == 2) {
    gather_stats<kSplit>(p, shared);
  }
}

/// What kept probabilities are multiplied by.
__device__ __forceinline__ float kept_factor(const BackwardParams&) { return 1.0f; }
__device__ __forceinline__ float kept_factor(const FiveProductParams&) { return 1.0f; }
__device__ __forceinline__ float kept_factor(const ScoredBackwardParams& p) { return p.more.score.kept; }
__device__ __forceinline__ float kept_factor(const ScoredFiveProductParams& p) { return p.more.score.kept; }

/// With options: what a step's products become where rows are keys. s: P, without what is dropped. If dS cannot wait
/// until P is on its way (kBoth), it takes dP's place. `query`, `key` and `memory` as ScoresByKey's.
template <unsigned kScore, bool kForQueries, typename Query, typename Key>
__device__ __forceinline__ void score_keys(const ScoreMore& more, ScoresByKey<kScore, kForQueries>& scores,
                                           const ScoreHead& head, float (&s)[kStream / 2], float (&dp)[kStream / 2],
                                           Query query, Key key, const float (*stats)[kStream],
                                           const float (&rest)[kStream], u32 memory = 0) {
  using K = ScoreKind<kScore>;
  const int shift = static_cast<int>(threadIdx.x) % 4 * 2;
  u32 pair[2] = {0, 0};
  scores.apply(more, head, s, query, key, memory, [&](int i, float score, float slope) {
    const int col = i / 4 * 8 + i % 2 + shift;
    const float share = exp2_fast(exponent_of(score, stats[0][col], K::kRest ? rest[col] : 0.0f));
    s[i] = share;
    if constexpr (K::kBoth) {
      float gradient = dp[i];
      if constexpr (K::kDrops) {
        const int row = static_cast<int>(threadIdx.x) % 32 / 4 + i / 2 % 2 * 8;
        u32 bits = K::kRowBits && !kForQueries ? __float_as_uint(rest[col]) : random_row(head.drop, query(col));
        if constexpr (kForQueries) {  // a warp's keys begin at a multiple of 16: a thread has both of a random_pair
          pair[i % 2] = i % 4 < 2 ? random_pair(bits, key(row)) : pair[i % 2];
          bits = i % 4 < 2 ? swap_halves(pair[i % 2]) : pair[i % 2];
        } else {
          bits = random_bits(bits, key(row));
        }
        const bool stays = bits >= more.score.threshold;
        gradient = stays ? gradient * more.score.kept : 0.0f;
        s[i] = stays ? share : 0.0f;
      }
      dp[i] = share * (gradient - stats[1][col]) * slope;
    }
  });
}

}  // namespace fretwork::attention_op::hopper
