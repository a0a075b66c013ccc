// o = softmax(scale·q·kᵀ) · v over a component of a plan, and its log-sum-exp. One thread loads 128 rows of q for an
// item, then 128 or 64 rows of k and v for each step. Two warpgroups own 64 rows each. The scores of a step are in the
// tensor cores while the probabilities of the previous step are multiplied by v; probabilities never leave registers.
// With a head dim of 64, the exponentials of the previous step overlap as well.
#pragma once

#include "ops/attention/cuda/hopper.cuh"
#include "ops/attention/cuda/hopper_score.cuh"
#include "ops/attention/cuda/sinks.cuh"

namespace fretwork::attention_op::hopper {

template <int kDepth, int kValues, int kTileRows = kRows>
struct ForwardShared {
  static constexpr ForwardTiles kTiles = forward_tiles(kDepth, kValues, kTileRows);
  static constexpr int kCols = kTiles.cols, kItems = kTiles.items, kStages = kTiles.stages;
  static constexpr u32 kBiasTile = 64 * kCols * 2;                          ///< bytes of a warpgroup's
  static constexpr int kHalves = kDepth / 64, kValueHalves = kValues / 64;  ///< of 64 columns
  static constexpr u32 kRowHalf = kTileRows * 128,
                       kRowTile = kRowHalf * (kHalves > kValueHalves ? kHalves : kValueHalves);
  static constexpr u32 kColHalf = kCols * 128, kKeyTile = kHalves * kColHalf, kValueTile = kValueHalves * kColHalf;
  static constexpr bool kAhead = kDepth == 64 && kValues == 64;  ///< registers have room for two steps
  static constexpr bool kHeld = kTileRows < kRows && !kAhead;    ///< and for q
  RingBarriers<kItems> q;
  RingBarriers<kStages> k, v;
  int4 items[kItems], steps[kStages];
  int used[kStages], parts[kItems];
  static constexpr bool kTokens = false;
};
/// Of kernels with options. Registers have no room for two steps.
template <int kDepth, int kValues, unsigned kScore, int kTileRows = kRows>
struct ScoredForwardShared : ForwardShared<kDepth, kValues> {
  using Base = ForwardShared<kDepth, kValues>;
  static_assert(kTileRows == kRows);
  static constexpr bool kAhead = false, kTokens = ScoreKind<kScore>::kTokens;
  alignas(16) int tokens[Base::kStages][kTokens ? Base::kCols : 4];  ///< of the columns
  RingBarriers<1> bias[2];                                           ///< of each warpgroup's half of a tile
};
template <int kDepth, int kValues, int kTileRows>
struct ScoredForwardShared<kDepth, kValues, 0, kTileRows> : ForwardShared<kDepth, kValues, kTileRows> {};

/// Calls begin(item, its first run, tiles to skip there, part) for each item of this CTA, then step(item, run, column
/// tile) for its steps.
template <bool kGeneral, bool kSplit, typename Begin, typename Step>
__device__ __forceinline__ void walk_forward(const ForwardParams& p, Begin begin, Step step) {
  const Walk& walk = p.walk;
  const int end = __ldg(walk.share + blockIdx.x + 1);
#pragma unroll 1
  for (int i = __ldg(walk.share + blockIdx.x); i < end; ++i) {
    const int4 item = record(walk.items, i);
    int first = __ldg(walk.first + item.x), last = __ldg(walk.last + item.x), skip = 0, left = item.w, part = -1;
    if constexpr (kSplit) {
      const int4 piece = record(p.pieces, i);
      first = piece.x;
      skip = piece.y;
      part = piece.z;
    }
    begin(item, first, skip, part);
#pragma unroll 1
    for (int r = first; r < last && (!kSplit || left > 0); ++r) {
      int4 run = record(walk.runs, 2 * r);
      if constexpr (kSplit) {  // as much of it as is the item's
        run.x += skip;
        run.y = min(run.y - skip, left);
        skip = 0;
        left -= run.y;
      }
#pragma unroll 1
      for (int n = 0; n < run.y; ++n) {
        if (!kGeneral || sees_tile(p.seen, item.y, run.x + n)) {
          step(item, r, run.x + n);
        }
      }
    }
  }
}

/// One thread fetches queries, keys and values, in the order in which they are used.
template <bool kGeneral, bool kSplit, typename S>
__device__ __forceinline__ void forward_fetch(const ForwardParams& p, S& shared, u32 q, u32 k, u32 v) {
  constexpr int kHalves = S::kHalves;
  const Walk& walk = p.walk;
  Producer<S::kItems> items;
  Producer<S::kStages> at;
  const u32 row_bytes = kHalves * 128 * walk.row_places, key_bytes = kHalves * 128 * walk.col_places;
  const u32 value_bytes = S::kValueHalves * 128 * walk.col_places;
  int kv_head = 0;
  walk_forward<kGeneral, kSplit>(
      p,
      [&](const int4& item, int first, int skip, int part) {
        const u32 full = shared.q.acquire(items);
        shared.items[items.stage] = {item.w, item.y, item.z, item.x};
        if constexpr (kSplit) {
          shared.parts[items.stage] = part;
        }
        if constexpr (kGeneral) {
          shared.items[items.stage].x = seen_steps(walk, p.seen, item.y, first, skip, item.w);
        }
        mbarrier::arrive_expect(full, row_bytes);
        fetch<kHalves>(p.q, q + items.stage * S::kRowTile, S::kRowHalf, full, record(walk.row_tiles, item.x), item.y,
                       item.z);
        kv_head = (p.head0 + (kSplit ? item.z << p.pack : item.z)) / p.group;
        items.next();
      },
      [&](const int4& item, int run, int tile) {
        const int4 place = record(walk.col_tiles, tile);
        const u32 k_full = shared.k.acquire(at);
        shared.steps[at.stage] = mask_of(walk, run);
        shared.used[at.stage] = used_of<true>(walk, item.y, tile);
        mbarrier::arrive_expect(k_full, key_bytes + (S::kTokens ? S::kCols * 4 : 0));
        if constexpr (S::kTokens) {
          tma::load_bytes(shared_address(shared.tokens[at.stage]), walk.col_tokens + tile * S::kCols, S::kCols * 4,
                          k_full);
        }
        fetch<kHalves>(p.k, k + at.stage * S::kKeyTile, S::kColHalf, k_full, place, item.y, kv_head);
        const u32 v_full = shared.v.acquire(at);
        mbarrier::arrive_expect(v_full, value_bytes);
        fetch<S::kValueHalves>(p.v, v + at.stage * S::kValueTile, S::kColHalf, v_full, place, item.y, kv_head);
        at.next();
      });
  const u32 end_full = shared.q.acquire(items);
  shared.items[items.stage] = {-1, 0, 0, 0};
  mbarrier::arrive(end_full);
}

/// Another one for each warpgroup fetches its 64 rows of biases, which have room for one step.
template <bool kGeneral, bool kSplit, typename S>
__device__ __forceinline__ void fetch_bias(const ScoredForwardParams& p, S& shared, u32 to, int warpgroup) {
  Producer<1> at;
  int row = 0;
  walk_forward<kGeneral, kSplit>(
      p, [&](const int4& item, int, int, int) { row = word(p.walk.row_tokens, item.x * kRows) + warpgroup * 64; },
      [&](const int4& item, int, int tile) {
        const int col = word(p.walk.col_tokens, tile * S::kCols);
        const int head = (p.head0 + item.z) * p.bias.head, batch = item.y * p.bias.batch;
        const u32 full = shared.bias[warpgroup].acquire(at);
        mbarrier::arrive_expect(full, S::kBiasTile);
        tma::load(to, &p.bias.map, full, col, row, head, batch);
        tma::load(to + 8192, &p.bias.map, full, col + 64, row, head, batch);
        at.next();
      });
}

/// The softmax of a thread's two rows so far: largest score, and the sum of exponents relative to it.
struct RunningRows {
  float most[2], sum[2];

  /// Finds the new largest and gives what exponents are to be taken of, which may be the scores' own place, and what
  /// older ones must be multiplied by. kLarge: the scale is in the scores, which may be so large that differences must
  /// come before products.
  template <bool kLarge, int kSize>
  __device__ __forceinline__ void shift(const float (&s)[kSize], float (&x)[kSize], float scale,
                                        float (&correction)[2]) {
    float now[2][2] = {{most[0], s[1]}, {most[1], s[3]}}, offset[2];  // two chains a row: one waits for itself
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      now[i / 2 % 2][i % 2] = fmaxf(now[i / 2 % 2][i % 2], s[i]);
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float all = fmaxf(now[h][0], now[h][1]);
      all = fmaxf(all, __shfl_xor_sync(0xffffffffu, all, 1));
      all = fmaxf(all, __shfl_xor_sync(0xffffffffu, all, 2));
      offset[h] = all == -infinity() ? 0.0f : kLarge ? all : all * scale;
      correction[h] = most[h] == all ? 1.0f
                      : kLarge       ? exp2_fast((most[h] - offset[h]) * kLog2e)
                                     : exp2_fast(most[h] * scale - offset[h]);
      most[h] = all;
      sum[h] *= correction[h];
    }
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      x[i] = kLarge ? (s[i] - offset[i / 2 % 2]) * kLog2e : s[i] * scale - offset[i / 2 % 2];
    }
  }
  /// The exponents that exp2_of then made of it.
  template <int kSize>
  __device__ __forceinline__ void add_up(const float (&x)[kSize]) {
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      sum[i / 2 % 2] += x[i];
    }
  }
};

/// A thread's two rows as they leave: what to multiply their sums by, and their log-sum-exps in units of log 2.
struct DoneRows {
  int token[2];
  float share[2], lse[2];
};

// Where kernels for whole tiles of one head differ from those for pieces, they are left as they would be without them.

/// A thread's first row among those of its head.
template <bool kSplit>
__device__ __forceinline__ int head_row(const ForwardParams& p, int warpgroup) {
  const int row = tile_row(warpgroup);
  return kSplit ? row & ((kRows >> p.pack) - 1) : row;
}
/// The head of a warp's rows.
template <bool kSplit>
__device__ __forceinline__ int head_of(const ForwardParams& p, const int4& item, int warpgroup) {
  if constexpr (!kSplit) {
    return p.head0 + item.z;
  }
  const int within =
      __shfl_sync(0xffffffffu, (tile_row(warpgroup) << p.pack) / kRows, 0);  // one for the warp: registers
  return p.head0 + (item.z << p.pack) + within;
}
/// The token that a lane answers for, as own_token.
template <bool kSplit, int kTileRows>
__device__ __forceinline__ int token_of(const ForwardParams& p, const int4& item, int warpgroup) {
  if constexpr (!kSplit) {
    return own_token<kTileRows>(p.walk, item.w, warpgroup);
  }
  const int row = warpgroup * 64 + static_cast<int>(threadIdx.x) / 32 % 4 * 16 + static_cast<int>(threadIdx.x) % 16;
  const int rows = kRows >> p.pack;
  return __ldg(p.walk.row_tokens + item.w * rows + (row & (rows - 1)));
}

/// Brings near what a lane's row is to be joined with. Two lanes have each row.
template <typename T, int kValues>
__device__ __forceinline__ void prefetch_row(const ForwardParams& p, int batch, int head, int token) {
  const T* const out = static_cast<const T*>(p.o.data) + batch * p.o.batch + head * p.o.head;
#pragma unroll
  for (int col = static_cast<int>(threadIdx.x) % 32 / 16 * 64; col < kValues; col += 128) {
    if (token >= 0 && col < p.value_depth) {
      asm volatile("prefetch.global.L2 [%0];" ::"l"(out + token * p.o.row + col));
    }
  }
}

/// Joins a thread's sums with what is there.
template <typename T, int kValues>
__device__ __forceinline__ void merge_rows(const ForwardParams& p, const T* out, const float* out_lse,
                                           float (&o)[kValues / 2], DoneRows& rows) {
  float old_lse[2] = {-infinity(), -infinity()};
  u32 old[2][kValues / 8];  // asked for all at once
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const u32* const from = reinterpret_cast<const u32*>(out + rows.token[h] * p.o.row) + threadIdx.x % 4;
    if (rows.token[h] >= 0) {
      old_lse[h] = out_lse[rows.token[h] * p.lse.row] * kLog2e;
    }
#pragma unroll
    for (int j = 0; j < kValues / 8; ++j) {
      old[h][j] = rows.token[h] >= 0 && 8 * j < p.value_depth ? from[4 * j] : 0;
    }
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float most = fmaxf(old_lse[h], rows.lse[h]);
    const bool any = most != -infinity();
    const float a = any ? exp2_fast(old_lse[h] - most) : 0.0f, b = any ? exp2_fast(rows.lse[h] - most) : 0.0f;
    const float all = any ? reciprocal(a + b) : 1.0f, keep = a * all, add = rows.share[h] * b * all;
    rows.lse[h] = any ? most + log2_fast(a + b) : most;
    rows.share[h] = 1.0f;
#pragma unroll
    for (int j = 0; j < kValues / 8; ++j) {
      float& x = o[4 * j + 2 * h];
      float& y = o[4 * j + 2 * h + 1];
      x = x * add + keep * widen(T{static_cast<u16>(old[h][j])});
      y = y * add + keep * widen(T{static_cast<u16>(old[h][j] >> 16)});
    }
  }
  __syncwarp();  // the quad has read the old lse
}

/// The sink of a thread's rows joins their sums.
__device__ __forceinline__ void join_sink(const ForwardParams& p, int head, DoneRows& rows) {
  const float sink = sink_of(p.sinks, head) * kLog2e;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float most = fmaxf(sink, rows.lse[h]);
    if (sink != -infinity() || rows.lse[h] != -infinity()) {  // else there is no score
      const float a = exp2_fast(rows.lse[h] - most), sum = a + exp2_fast(sink - most);
      rows.lse[h] = most + log2_fast(sum);
      rows.share[h] *= a * reciprocal(sum);
    }
  }
}

/// The same of scores with options, whose log-sum-exps may have no room for a sum: (top, sum) is handed on instead.
/// done.lse are natural logarithms.
template <typename T, int kValues>
__device__ __forceinline__ void merge_scored_rows(const ScoredForwardParams& p, int head, const T* out, RowSum* tops,
                                                  float (&o)[kValues / 2], const RunningRows& rows, DoneRows& done) {
  const bool sinks = p.merge == 0 && p.sinks.data != nullptr;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const bool there = done.token[h] >= 0;
    RowSum all{rows.most[h], rows.sum[h]};
    float keep = 0.0f, add = all.sum == 0.0f ? 0.0f : 1.0f / all.sum;
    if ((p.merge != 0 || sinks) && there) {
      const RowSum old = sinks ? sink_sum(sink_of(p.sinks, head)) : tops[done.token[h]];
      if (old.sum != 0.0f) {
        all.top = fmaxf(old.top, rows.sum[h] == 0.0f ? old.top : rows.most[h]);
        const float a = old.sum * exp2_fast((old.top - all.top) * kLog2e);
        const float b = rows.sum[h] == 0.0f ? 0.0f : exp2_fast((rows.most[h] - all.top) * kLog2e);
        all.sum = a + rows.sum[h] * b;
        keep = a / all.sum;
        add = b / all.sum;
      }
    }
    done.share[h] = add * p.more.score.kept;
    done.lse[h] = all.sum == 0.0f ? -infinity() : all.top + log2f(all.sum) * kLn2;
    __syncwarp();  // the quad has read the old sum
    if (threadIdx.x % 4 == 0 && there && tops != nullptr) {
      tops[done.token[h]] = all;
    }
    if (keep != 0.0f && p.merge != 0) {
      const u32* const from = reinterpret_cast<const u32*>(out + done.token[h] * p.o.row) + threadIdx.x % 4;
#pragma unroll
      for (int j = 0; j < kValues / 8; ++j) {
        const u32 old = 8 * j < p.value_depth ? from[4 * j] : 0;
        o[4 * j + 2 * h] = o[4 * j + 2 * h] * done.share[h] + keep * widen(T{static_cast<u16>(old)});
        o[4 * j + 2 * h + 1] = o[4 * j + 2 * h + 1] * done.share[h] + keep * widen(T{static_cast<u16>(old >> 16)});
      }
      done.share[h] = 1.0f;
    }
  }
}

/// Rounds the rows of a warp and stores them through its share of `buffer`, and their log-sum-exps. With `merge` they
/// join what is there.
template <typename T, int kValues, typename Params>
__device__ __forceinline__ void store_rows(const Params& p, int batch, int head, int own, float (&o)[kValues / 2],
                                           RunningRows& rows, u32 buffer, u32 half) {
  constexpr bool kScored = !is_same<Params, ForwardParams>;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  T* const out = static_cast<T*>(p.o.data) + batch * p.o.batch + head * p.o.head;
  float* const out_lse = static_cast<float*>(p.lse.data) + batch * p.lse.batch + head * p.lse.head;
  DoneRows done;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float sum = rows.sum[h] + __shfl_xor_sync(0xffffffffu, rows.sum[h], 1);
    sum += __shfl_xor_sync(0xffffffffu, sum, 2);
    if constexpr (kScored) {
      rows.sum[h] = sum;
    } else {
      done.share[h] = sum == 0.0f ? 0.0f : reciprocal(sum);
      done.lse[h] = sum == 0.0f ? -infinity() : rows.most[h] * p.scale + log2_fast(sum);
    }
    done.token[h] = __shfl_sync(0xffffffffu, own, lane / 4 + 8 * h);
  }
  if constexpr (kScored) {
    const i64 first = (static_cast<i64>(batch) * p.more.heads + head) * p.more.queries;
    merge_scored_rows<T, kValues>(p, head, out, p.more.tops != nullptr ? p.more.tops + first : nullptr, o, rows, done);
  } else if (p.merge != 0) {
    merge_rows<T, kValues>(p, out, out_lse, o, done);
  } else if (p.sinks.data != nullptr) {
    join_sink(p, head, done);
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    if (lane % 4 == 0 && done.token[h] >= 0) {
      out_lse[done.token[h] * p.lse.row] = kScored ? done.lse[h] : done.lse[h] * kLn2;
    }
  }
#pragma unroll
  for (int i = 0; i < kValues / 2; ++i) {
    o[i] *= done.share[i / 2 % 2];
  }
  put_rows<T, kValues>(o, buffer, half);
#pragma unroll
  for (int n = 0; n < kValues / 16; ++n) {
    const Unit unit(n);
    u32 words[4];
    unit.take(words, buffer, half);
    const int token = __shfl_sync(0xffffffffu, own, unit.row);
    if (token >= 0 && unit.col < p.value_depth) {
      store_words<4>(out + token * p.o.row + unit.col, words);
    }
  }
}

/// A thread's sums as they stand, for those who join them.
template <int kValues, typename Params>
__device__ __forceinline__ void store_part(const Params& p, int part, int row, const float (&o)[kValues / 2],
                                           const RunningRows& rows) {
  constexpr bool kScored = !is_same<Params, ForwardParams>;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float sum = rows.sum[h] + __shfl_xor_sync(0xffffffffu, rows.sum[h], 1);
    sum += __shfl_xor_sync(0xffffffffu, sum, 2);
    if (threadIdx.x % 4 == 0) {
      p.shares[part * kRows + row + 8 * h] = {kScored ? rows.most[h] : rows.most[h] * p.scale, sum};
    }
  }
  if constexpr (kScored) {
    put_part<kValues>(p.sums, part, row, o, p.more.score.kept);
  } else {
    put_part<kValues>(p.sums, part, row, o, 1.0f);
  }
}

/// kGeneral: there are masks of bits, or keys that nothing uses. kSplit: items may be pieces of tiles, and heads may
/// share tiles.
template <typename T, int kDepth, int kValues, bool kGeneral, bool kSplit, unsigned kScore = 0, int kTileRows = kRows>
struct Forward {
  static_assert(kTileRows == kRows || (!kSplit && kScore == 0));
  using S = ScoredForwardShared<kDepth, kValues, kScore, kTileRows>;
  using K = ScoreKind<kScore>;
  static constexpr bool kLarge = K::kRest;  ///< scores may be as large as numbers are
  static constexpr Roles kRoles{.consumers = kTileRows / 64,
                                .producer_registers = 24,
                                .consumer_registers = kTileRows == kRows ? 240 : 232,
                                .ctas = kRows / kTileRows};
  const ForwardParamsOf<kScore>& p;
  S& shared;
  u32 q, k, v, bias;  ///< tiles

  __device__ __forceinline__ void produce() const {
    if (threadIdx.x == 0) {
      tma::prefetch(&p.q.map);
      tma::prefetch(&p.k.map);
      tma::prefetch(&p.v.map);
      forward_fetch<kGeneral, kSplit>(p, shared, q, k, v);
    }
    if constexpr (K::kTiles) {
      if (threadIdx.x == 32 || threadIdx.x == 64) {
        const int warpgroup = static_cast<int>(threadIdx.x) / 32 - 1;
        fetch_bias<kGeneral, kSplit>(p, shared, bias + warpgroup * S::kBiasTile, warpgroup);
      }
    }
  }

  /// The largest scores as those who store them want them: with the scale, which dropout alone leaves out.
  __device__ __forceinline__ void to_natural(RunningRows& rows) const {
    if constexpr (K::kDrops && !K::kCaps && !kLarge) {
      rows.most[0] *= p.more.score.scale;
      rows.most[1] *= p.more.score.scale;
    }
  }

  __device__ __forceinline__ void consume() const {
    const int warpgroup = own_warpgroup<kTileRows>();
    constexpr int kCols = S::kCols;
    const int row = head_row<kSplit>(p, warpgroup);
    Consumer<S::kItems> items;
    Consumer<S::kStages> at, behind;  // `behind` is the step whose values are to be added
    Consumer<1> biases;
    for (;; items.next()) {
      shared.q.wait(items);
      const int4 note = read_note(shared.items[items.stage]);
      if (note.x < 0) {
        break;
      }
      const u32 own = q + items.stage * S::kRowTile + warpgroup * 8192;
      const int token = token_of<kSplit, kTileRows>(p, note, warpgroup);
      if (p.merge != 0) {
        prefetch_row<T, kValues>(p, note.y, head_of<kSplit>(p, note, warpgroup), token);
      }
      float o[kValues / 2], s[kCols / 2];
      u32 probabilities[kCols / 16][4];
      RunningRows rows{{-infinity(), -infinity()}, {0.0f, 0.0f}};
      ScoresByQuery<kScore, kCols> scores;
      if constexpr (kScore != 0) {
        scores.begin(p.more, note.y, head_of<kSplit>(p, note, warpgroup) - p.head0, token);
      }
#pragma unroll
      for (float& sum : o) {
        sum = 0.0f;
      }
      // Where no products are under way: a branch between them makes the compiler put exponents there, too, so that the
      // tensor cores wait.
      int used = -1;
      const auto clear_values = [&] {
        if constexpr (kGeneral) {
          if (used >= 0) {
            shared.v.wait(behind);
            clear_unused<S::kValueHalves, kCols>(v + behind.stage * S::kValueTile, p.walk.used + used);
            join_cleared(1 + warpgroup);
          }
        }
      };
      const auto add_values = [&] {
        shared.v.wait(behind);
        wgmma::fence();
        multiply_values<T, kValues, kCols>(o, probabilities, v + behind.stage * S::kValueTile, S::kColHalf);
        wgmma::commit();
      };
      const auto values_added = [&](const float(&correction)[2]) {
        shared.v.release(static_cast<int>(behind.stage));
        behind.next();
        if (__any_sync(0xffffffffu, correction[0] != 1.0f || correction[1] != 1.0f)) {
#pragma unroll
          for (int i = 0; i < kValues / 2; ++i) {
            o[i] *= correction[i / 2 % 2];
          }
        }
      };
      if constexpr (S::kAhead) {
        float x[kCols / 2];
        const u32 left = uniform(own);
        const auto ask = [&] {
          shared.k.wait(at);
          wgmma::fence();
          multiply_scores<T, kDepth, kCols>(s, left, S::kRowHalf, k + at.stage * S::kKeyTile, S::kColHalf);
          wgmma::commit();
        };
        const auto step = [&]<bool kFirst, bool kLast>() {
          const int kind = __shfl_sync(0xffffffffu, threadIdx.x % 32 == 0 ? shared.steps[at.stage].x : 0, 0);
          int used_now = -1;
          if constexpr (kGeneral) {
            used_now = __shfl_sync(0xffffffffu, threadIdx.x % 32 == 0 ? shared.used[at.stage] : 0, 0);
          }
          if constexpr (!kFirst) {
            clear_values();
          }
          cut_masked<kGeneral>(s, kind, shared.steps[at.stage], p.walk.bits, row, -infinity());
          if (kGeneral && used_now >= 0) {
            cut_columns(s, p.walk.used + used_now, -infinity());
          }
          shared.k.release(static_cast<int>(at.stage));
          at.next();
          float correction[2];
          rows.template shift<false>(s, x, p.scale, correction);
          if constexpr (!kLast) {
            ask();
          }
          exp2_of<0, kCols / 4>(x);
          if constexpr (!kFirst) {
            add_values();
          }
          exp2_of<kCols / 4, kCols / 2>(x);
          rows.add_up(x);
          wgmma::wait<0>();
          if constexpr (!kFirst) {
            values_added(correction);
          }
          pack<T>(probabilities, x);
          used = used_now;
        };
        if (note.x > 0) {
          ask();
          wgmma::wait<0>();
          each_step(note.x, step);
        }
      } else {
        u32 held[S::kHeld ? kDepth / 16 : 1][4];
        if constexpr (S::kHeld) {
          hold_rows<kDepth>(held, own, S::kRowHalf);
        }
#pragma unroll 1
        for (int n = 0; n < note.x; ++n, at.next()) {
          clear_values();
          shared.k.wait(at);
          const int4 mask = read_note(shared.steps[at.stage]);
          const int* tokens = nullptr;
          if constexpr (S::kTokens) {
            tokens = shared.tokens[at.stage];
            scores.ask(p.more, tokens);
          }
          wgmma::fence();
          if constexpr (S::kHeld) {
            multiply_scores<T, kDepth, kCols>(s, held, k + at.stage * S::kKeyTile, S::kColHalf);
          } else {
            multiply_scores<T, kDepth, kCols>(s, own, S::kRowHalf, k + at.stage * S::kKeyTile, S::kColHalf);
          }
          wgmma::commit();
          RowBits<kCols / 32> bits;
          int used_now = -1;
          if constexpr (kGeneral) {
            used_now = __shfl_sync(0xffffffffu, threadIdx.x % 32 == 0 ? shared.used[at.stage] : 0, 0);
            if (mask.x >= 0) {
              bits.load(p.walk.bits + mask.x, row);
            }
          }
          u32 dropped[kCols / 64] = {};
          const auto issued = [&] {  // while the tensor cores multiply
            if constexpr (K::kDrops) {
              scores.drop_some(p.more, tokens, dropped);
            }
          };
          if (n > 0) {
            add_values();
            issued();
            wgmma::wait<1>();
          } else {
            issued();
            wgmma::wait<0>();
          }
          if constexpr (K::kTiles) {
            shared.bias[warpgroup].wait(biases);
            scores.take(bias + warpgroup * S::kBiasTile);
            fence_async_proxy();  // ldmatrix may be under way when the barrier is signalled; this waits for it
            shared.bias[warpgroup].release(0);
            biases.next();
          }
          if constexpr (K::kCaps) {
            cut_read<kGeneral>(s, mask, bits, p.walk.used, used_now, row, 0.0f);
            cap_rows(p.more, s);
          }
          if constexpr (kLarge) {
            scores.template apply<K::kCaps>(p.more, s, tokens, [](int, float) {});
          }
          if constexpr (S::kTokens) {
            shared.k.release_lane(at.stage);
          } else {
            shared.k.release(static_cast<int>(at.stage));
          }
          cut_read<kGeneral>(s, mask, bits, p.walk.used, used_now, row, -infinity());
          float correction[2];
          rows.template shift<kLarge>(s, s, K::kCaps ? kLog2e : p.scale, correction);
          exp2_of<0, kCols / 2>(s);
          rows.add_up(s);
          if constexpr (K::kDrops) {
#pragma unroll
            for (int i = 0; i < kCols / 2; ++i) {
              s[i] = (dropped[i / 32] >> i % 32 & 1) != 0 ? 0.0f : s[i];
            }
          }
          if (n > 0) {
            wgmma::wait<0>();
            values_added(correction);
          }
          pack<T>(probabilities, s);
          used = used_now;
        }
      }
      if (note.x > 0) {
        clear_values();
        add_values();
        wgmma::wait<0>();
        shared.v.release(static_cast<int>(behind.stage));
        behind.next();
      }
      to_natural(rows);
      named_barrier(1 + warpgroup, 128);  // no one reads this half of q any more
      if (const int part = kSplit ? read_part(shared.parts[items.stage]) : -1; part >= 0) {
        store_part<kValues>(p, part, tile_row(warpgroup), o, rows);
      } else {
        store_rows<T, kValues>(p, note.y, head_of<kSplit>(p, note, warpgroup), token, o, rows, own, S::kRowHalf);
      }
      fence_async_proxy();  // the next q comes by the copy engine
      shared.q.release(static_cast<int>(items.stage));
    }
  }
};

template <typename T, int kDepth, int kValues, bool kGeneral, bool kSplit, unsigned kScore, int kTileRows, typename S>
__device__ __forceinline__ void run_forward(const ForwardParamsOf<kScore>& p, S& shared, const u8* raw) {
  const u32 q = stages_in(raw), k = q + S::kItems * S::kRowTile, v = k + S::kStages * S::kKeyTile;
  const u32 bias = v + S::kStages * S::kValueTile;
  clear_unplaced(k, S::kStages * (S::kHalves + S::kValueHalves), S::kCols, p.walk.col_places);
  init_barriers([&] {
    shared.q.make(1, kTileRows / 16);
    shared.k.make(1, S::kTokens ? 256 : kTileRows / 16);  // each lane reads tokens
    shared.v.make(1, kTileRows / 16);
    if constexpr (ScoreKind<kScore>::kTiles) {
      shared.bias[0].make(1, 4);
      shared.bias[1].make(1, 4);
    }
  });
  begin_after_earlier_kernel();
  run_warp_specialized(Forward<T, kDepth, kValues, kGeneral, kSplit, kScore, kTileRows>{p, shared, q, k, v, bias});
}

template <typename T, int kDepth, int kValues, bool kGeneral, bool kSplit, int kTileRows = kRows>
__global__ void __launch_bounds__(threads_of(kTileRows), kRows / kTileRows)
    forward(const __grid_constant__ ForwardParams p) {
  extern __shared__ u8 raw[];
  __shared__ ScoredForwardShared<kDepth, kValues, 0, kTileRows> shared;
  run_forward<T, kDepth, kValues, kGeneral, kSplit, 0, kTileRows>(p, shared, raw);
}
template <typename T, int kDepth, int kValues, bool kGeneral, bool kSplit, unsigned kScore>
__global__ void __launch_bounds__(threads_of(kRows), 1) scored_forward(const __grid_constant__ ScoredForwardParams p) {
  extern __shared__ u8 raw[];
  __shared__ ScoredForwardShared<kDepth, kValues, kScore> shared;
  run_forward<T, kDepth, kValues, kGeneral, kSplit, kScore, kRows>(p, shared, raw);
}

/// o = 0 and lse = −∞ or the sink, one warp for each row.
template <typename T>
__global__ void __launch_bounds__(256) fill(const __grid_constant__ FillParams p) {
  const i64 index = static_cast<i64>(blockIdx.x) * 8 + threadIdx.x / 32;
  if (index >= p.rows) {
    return;
  }
  const i64 pair = index / p.per_head, row = index % p.per_head, batch = pair / p.heads, head = pair % p.heads;
  T* const out = static_cast<T*>(p.o.data) + batch * p.o.batch + head * p.o.head + row * p.o.row;
  for (u32 n = threadIdx.x % 32; n < p.depth / 8; n += 32) {
    const u32 zeros[4] = {0, 0, 0, 0};
    store_words<4>(out + 8 * n, zeros);
  }
  if (threadIdx.x % 32 == 0 && p.lse.data != nullptr) {
    static_cast<float*>(p.lse.data)[batch * p.lse.batch + head * p.lse.head + row * p.lse.row] =
        p.sinks.data != nullptr ? sink_of(p.sinks, static_cast<int>(head)) : -infinity();
  }
}

}  // namespace fretwork::attention_op::hopper
