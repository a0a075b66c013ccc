// What the portable, fp32 and decoding kernels share: which tile a CTA has, the steps of its walk, masks, and
// everything that is done to a score besides its product.
#pragma once

#include "device/copy_async.cuh"
#include "device/load.cuh"
#include "device/math.cuh"
#include "device/random.cuh"
#include "device/reduce.cuh"
#include "device/tile.cuh"
#include "device/types.cuh"
#include "ops/attention/cuda/params.h"
#include "ops/attention/cuda/sinks.cuh"

namespace fretwork {

using attention_op::BiasType;
using attention_op::ComponentArg;
using attention_op::HeadsArg;
using attention_op::InputArg;
using attention_op::kInside;
using attention_op::MaskArg;
using attention_op::OrderArg;
using attention_op::OutputArg;
using attention_op::PaddingArg;
using attention_op::RowStats;
using attention_op::RowSum;
using attention_op::RunArg;
using attention_op::ScoreArg;
using attention_op::ScoreStats;
using attention_op::TileArg;

/// x in a register of its own: what a shuffle gave is not computed again wherever it is used.
template <typename X>
__device__ __forceinline__ X kept(X x) {
  return __shfl_xor_sync(~0u, x, 0);
}

/// The lowest n bits, 0 ≤ n ≤ 32.
__device__ __forceinline__ u32 low_bits(int n) {
  u32 power;
  asm("shl.b32 %0, 1, %1;" : "=r"(power) : "r"(n));  // 0 for n = 32
  return power - 1;
}

/// A place of a tile: tokens from the tile's base, and coordinates packed as TileArg::inside wants them.
struct Place {
  int offset;
  u32 at;
};
__device__ __forceinline__ Place place_of(const OrderArg& order, int n) {
  const int line = n / order.extent[2], u2 = n - line * order.extent[2];
  const int u0 = line / order.extent[1], u1 = line - u0 * order.extent[1];
  if (u0 >= order.extent[0]) {
    return {0, 511u << 20};
  }
  return {u0 * order.stride[0] + u1 * order.stride[1] + u2 * order.stride[2],
          static_cast<u32>(u0) | static_cast<u32>(u1) << 10 | static_cast<u32>(u2) << 20};
}
__device__ __forceinline__ bool is_inside(u32 inside, u32 at) { return (inside - at & kInside) == kInside; }

/// The rows of a CTA: a tile of one (batch, head).
struct Item {
  int tile, batch;
  int head;                        ///< of the rows: a query head, or a key head
  int first_member, member_count;  ///< the key head's query heads
  int part = 0, slot = -1;         ///< of plans that split a tile's steps: which part, and where its sums are left
};
/// The row tile that the n-th CTA of a (batch, head) takes.
__device__ __forceinline__ int tile_at(const ComponentArg& plan, u32 n, bool /*rows_are_keys*/) {
  return plan.by_work[n];
}
/// Plans that split tiles find here which tile an item is. False: there is none.
__device__ __forceinline__ bool find_piece(const ComponentArg& /*plan*/, Item& /*item*/) { return true; }
/// Whether an item is one of several parts of a tile. Its gradients are then sums in float of their own.
__device__ __forceinline__ bool is_part(const ComponentArg& /*plan*/, const Item& /*item*/) { return false; }
__device__ __forceinline__ OutputArg part_of(const ComponentArg& /*plan*/, const Item& /*item*/, int /*which*/) {
  return {};
}
/// CTAs that run together share a head's keys where lengths allow.
template <typename Plan>
__device__ __forceinline__ Item item_of(const Plan& plan, const HeadsArg& heads, bool rows_are_keys) {
  const u32 sets = static_cast<u32>(heads.batch) * static_cast<u32>(heads.count);
  const u32 early = static_cast<u32>(plan.long_tiles) * sets;
  u32 set, tile;
  if (blockIdx.x < early) {
    tile = blockIdx.x / sets;
    set = blockIdx.x - tile * sets;
  } else {
    const u32 rest = blockIdx.x - early, tiles = static_cast<u32>(plan.row_tile_count - plan.long_tiles);
    set = rest / tiles;
    tile = static_cast<u32>(plan.long_tiles) + rest - set * tiles;
  }
  Item item;
  item.tile = tile_at(plan, tile, rows_are_keys);
  item.batch = static_cast<int>(set / static_cast<u32>(heads.count));
  const int n = static_cast<int>(set) - item.batch * heads.count;
  item.batch += heads.first_batch;
  if (rows_are_keys) {
    item.head = heads.groups != nullptr ? heads.groups[3 * n] : n;
    item.first_member = heads.groups != nullptr ? heads.groups[3 * n + 1] : n * heads.ratio;
    item.member_count = heads.groups != nullptr ? heads.groups[3 * n + 2] : heads.ratio;
  } else {
    item.head = heads.heads != nullptr ? heads.heads[n] : n;
    item.first_member = item.head;
    item.member_count = 1;
  }
  return item;
}

/// A column tile to meet: under which mask, and (where keys are the rows) of which query head.
struct Step {
  TileArg tile;
  int mask = -2;  ///< −1: whole; −2: there is no step
  int member = 0;
  const int2* rows = nullptr;  ///< of plans whose masks are intervals: that of the tile's first row
  u32 blocks = 0;              ///< of plans whose steps are several blocks: which, from the tile's base on
  int first = 0, last = 0;     ///< and within which columns
  __device__ __forceinline__ bool there() const { return mask > -2; }
  /// Waits for what was read, so that a loop need not ask in every turn whether its first step has come.
  __device__ __forceinline__ void settle() {
    tile.base = kept(tile.base);
    tile.inside = kept(tile.inside);
    tile.used = kept(tile.used);
  }
};

/// Gives the steps of an item's row tile, with Members once for each of them. A plan of another type has a walk of its
/// own, and its own tile_at, column_at, position_of, mask_of, mask_word and used_word.
template <bool Members, typename Plan = ComponentArg>
class Walk {
 public:
  __device__ __forceinline__ Walk(const Plan& plan, const Item& item)
      : plan_(plan),
        seen_(!Members && plan.seen != nullptr ? plan.seen + item.batch * plan.col_tile_count : nullptr),
        begin_(plan.first[item.tile]),
        end_(plan.first[item.tile + 1]),
        run_(begin_),
        members_(item.member_count) {}
  /// The step that was taken last, as the queries of another batch element and head see it.
  __device__ __forceinline__ void see_as(Step& step, int batch, int /*head*/) const {
    if (plan_.seen != nullptr) {
      step.tile.used = plan_.seen[batch * plan_.col_tile_count + tile_ - 1];
    }
  }

  __device__ __forceinline__ Step take() {
    Step step;
    if (tile_ == last_) {
      if (Members && run_ == end_ && begin_ != end_ && member_ + 1 < members_) {
        run_ = begin_;
        ++member_;
      }
      if (run_ == end_) {
        return step;
      }
      const RunArg run = plan_.runs[run_++];
      tile_ = run.first;
      last_ = run.first + run.count;
      mask_ = run.mask;
    }
    step.tile = plan_.col_tiles[tile_];
    if (!Members && seen_ != nullptr) {
      step.tile.used = seen_[tile_];
    }
    ++tile_;
    step.mask = mask_;
    step.member = Members ? member_ : 0;
    return step;
  }

 private:
  const Plan& plan_;
  const int* seen_;  ///< of the batch element's column tiles
  int begin_, end_, run_, members_, member_ = 0, tile_ = 0, last_ = 0, mask_ = -1;
};

/// Whether all of a step's elements are there, as far as a tile goes.
__device__ __forceinline__ bool is_whole(const Step& step) { return step.mask < 0 && step.tile.used == -1; }

/// The token of a step's n-th column, or −1 where it is outside.
__device__ __forceinline__ int column_at(const ComponentArg& /*plan*/, const Step& step, const Place& place,
                                         int /*n*/) {
  return is_inside(step.tile.inside, place.at) ? step.tile.base + place.offset : -1;
}
/// The same of a column that is known to be inside.
__device__ __forceinline__ int position_of(const ComponentArg& /*plan*/, const Step& step, const Place& place,
                                           int /*n*/) {
  return step.tile.base + place.offset;
}
/// Of plans whose steps are not ranges of columns.
template <typename Plan>
inline constexpr bool kGathers = false;

__device__ __forceinline__ bool is_padding(const PaddingArg& padding, int batch, int key) {
  return padding.data != nullptr && padding.data[batch * padding.batch + key * padding.col] != 0;
}

/// The mask of a step; one without has all.
template <int Cols>
__device__ __forceinline__ MaskArg mask_of(const ComponentArg& plan, const Step& step) {
  return step.mask >= 0 ? plan.masks[step.mask] : MaskArg{-4096, 4096, Cols, -1};
}

/// The columns of a step that are used and seen: word w of them.
__device__ __forceinline__ u32 used_word(const ComponentArg& plan, const Step& step, int w) {
  return step.tile.used >= 0 ? plan.used[step.tile.used + w] : ~0u;
}

/// Word w of row m of a mask: bit n stands for column 32·w + n.
template <int Cols>
__device__ __forceinline__ u32 mask_word(const MaskArg& mask, const u32* bits, int m, int w) {
  if (mask.bits >= 0) {
    return bits[mask.bits + m * (Cols / 32) + w];
  }
  const int low = mask.low + m - 32 * w, high = min(mask.high + m + 1, mask.limit) - 32 * w;
  return low_bits(min(max(high, 0), 32)) & ~low_bits(min(max(low, 0), 32));
}

/// Everything about an element of the scores beside its product. `Extras` false: scale only. Exponents of 2 are counted
/// from a level: a row's highest score, or near it.
template <bool Extras>
struct Score {
  float factor;  ///< of the product, so that exponents are of 2

  __device__ __forceinline__ float level(float score) const { return score * factor; }
  __device__ __forceinline__ float exponent(float score, float level) const { return score * factor - level; }
  static constexpr float kLevelLog2 = 1.0f, kLevel = kLn2;  ///< what a level is worth, in units of log 2 and of 1
  using Stats = RowStats;
};
/// Scores may be as large as numbers are: differences are taken before anything is multiplied, since products would be
/// rounded or overflow.
template <>
struct Score<true> {
  static constexpr float kLevelLog2 = kLog2e, kLevel = 1.0f;
  using Stats = ScoreStats;
  const ScoreArg& arg;
  i64 bias_at;
  float slope;
  i64 batch_head;
  i64 seed;

  __device__ __forceinline__ Score(const ScoreArg& score, int batch, int head, int heads)
      : arg(score),
        bias_at(batch * score.bias_batch + head * score.bias_head),
        slope(score.slopes != nullptr ? score.slopes[head * score.slope_stride] : 0.0f),
        batch_head(static_cast<i64>(score.first_batch + batch) * heads + head),
        seed(score.threshold != 0 ? *score.seed : 0) {}

  __device__ __forceinline__ float bias(int row, int col) const {
    const i64 at = bias_at + row * arg.bias_row + col * arg.bias_col;
    return arg.bias_type == BiasType::f32   ? static_cast<const float*>(arg.bias)[at]
           : arg.bias_type == BiasType::f16 ? widen(static_cast<const f16*>(arg.bias)[at])
                                            : widen(static_cast<const bf16*>(arg.bias)[at]);
  }
  __device__ __forceinline__ float level(float score) const { return score; }
  __device__ __forceinline__ float exponent(float score, float level) const { return (score - level) * kLog2e; }
  /// The share of a score in its row.
  __device__ __forceinline__ float share(float score, const ScoreStats& of) const {
    return exp2_fast(exponent(score, of.lse) - of.rest);
  }
  /// The score from the product; `slope_of_cap` is softcap's derivative there.
  __device__ __forceinline__ float prepare(float product, int row, int col, float& slope_of_cap) const {
    float x = product * arg.scale;
    slope_of_cap = 1.0f;
    if (arg.softcap > 0.0f) {
      const float t = tanhf(x / arg.softcap);
      slope_of_cap = 1.0f - t * t;
      x = arg.softcap * t;
    }
    if (arg.bias != nullptr) {
      x += bias(row, col);
    }
    return x - slope * static_cast<float>(abs(row + arg.distance - col));
  }
  __device__ __forceinline__ bool keeps(int row, int col) const {
    return arg.threshold == 0 || random_bits(random_row(seed, batch_head, row), col) >= arg.threshold;
  }
};

template <bool Extras>
__device__ __forceinline__ Score<Extras> score_of(const ScoreArg& arg, int batch, int head, int heads) {
  if constexpr (Extras) {
    return Score<true>(arg, batch, head, heads);
  } else {
    return Score<false>{arg.scale * kLog2e};
  }
}

/// Tables that a CTA makes once: its rows' tokens (−1 where there is none) and the places of a column tile.
template <int Rows, int Cols>
struct Tables {
  int token[Rows];
  Place place[Cols];

  /// Without those that are padding of a batch element.
  __device__ __forceinline__ void fill(const ComponentArg& plan, int row_tile, const PaddingArg& padding = {},
                                       int batch = 0) {
    const TileArg tile = plan.row_tiles[row_tile];
    for (int n = static_cast<int>(threadIdx.x); n < Rows; n += static_cast<int>(blockDim.x)) {
      const Place at = place_of(plan.row_order, n);
      const int is = tile.base + at.offset;
      token[n] = is_inside(tile.inside, at.at) && !is_padding(padding, batch, is) ? is : -1;
    }
    for (int n = static_cast<int>(threadIdx.x); n < Cols; n += static_cast<int>(blockDim.x)) {
      place[n] = place_of(plan.col_order, n);
    }
  }
};

/// The first row of a (batch, head), for rows that are counted in bytes.
template <typename T>
__device__ __forceinline__ const u8* head_of(const InputArg& input, int batch, int head) {
  return reinterpret_cast<const u8*>(static_cast<const T*>(input.data) + batch * input.batch + head * input.head);
}

/// Copies Rows lines of `depth` entries, each Depth entries long in the tile and zero from `depth` on.
/// `row_of(n)` gives line n's token, or −1 for a line of zeros. Unroll 1 where it has much to ask.
template <typename T, int Depth, int Rows, int Threads, int Unroll, typename Tile, typename RowOf>
__device__ __forceinline__ void copy_lines(const Tile& tile, const u8* from, int row_bytes, int depth,
                                           const RowOf& row_of) {
  constexpr int kChunks = Depth / chunk_of<T>;
  constexpr int kLanes = kChunks <= 4 ? 4 : kChunks <= 8 ? 8 : kChunks <= 16 ? 16 : 32;
  constexpr int kStep = Threads / kLanes < Rows ? Threads / kLanes : Rows;  // lines at once
  static_assert(Rows % kStep == 0);
  const int first = static_cast<int>(threadIdx.x) / kLanes, chunk = static_cast<int>(threadIdx.x) % kLanes;
  if ((kStep * kLanes < Threads && first >= kStep) || (kChunks < kLanes && chunk >= kChunks)) {
    return;
  }
  const int whole = min(max((depth - chunk * chunk_of<T>)*static_cast<int>(sizeof(T)), 0), 16);
  from += whole > 0 ? chunk * 16 : 0;
#pragma unroll(Unroll)
  for (int i = 0; i < Rows / kStep; ++i) {
    const int token = row_of(first + i * kStep), bytes = token < 0 ? 0 : whole;
    const u32 to = kStep % 8 == 0 ? tile.chunk(i * kStep, first, chunk) : tile.chunk(first + i * kStep, chunk);
    copy_async_part(to, from + static_cast<i64>(max(token, 0)) * row_bytes, bytes);
  }
}

/// What a thread copies of every column tile: the same 16 bytes of every kStep-th line. Kept in registers, so that a
/// tile that is whole costs a product and a copy for each line.
template <typename T, int Depth, int Cols, int Threads, int Bytes>
class ColumnCopies {
  static constexpr int kChunks = Depth / chunk_of<T>;
  static constexpr int kLanes = kChunks <= 4 ? 4 : kChunks <= 8 ? 8 : kChunks <= 16 ? 16 : 32;
  static constexpr int kStep = Threads / kLanes < Cols ? Threads / kLanes : Cols;  // lines at once
  static constexpr int kCount = Cols / kStep;
  static_assert(Cols % kStep == 0 && kStep % 4 == 0);

 public:
  __device__ __forceinline__ ColumnCopies(shared_tile<Bytes> tile, int depth) {
    const int first = static_cast<int>(threadIdx.x) / kLanes, chunk = static_cast<int>(threadIdx.x) % kLanes;
    to_ = kept(tile.chunk(static_cast<u32>(first), static_cast<u32>(chunk)));
    bytes_ = kept(first < kStep && chunk < kChunks ? min(max(depth - chunk * chunk_of<T>, 0), chunk_of<T>) * 2 : -1);
  }
  /// Fills what lies behind the depth with zeros, which stay; of the tile `ahead` bytes further on.
  __device__ __forceinline__ void clear(const u8* from, u32 ahead = 0) const {
    if (bytes_ == 0) {
#pragma unroll 1
      for (int i = 0; i < kCount; ++i) {
        copy_async_part(to(i) + ahead, from, 0);
      }
    }
  }
  template <typename Plan>
  __device__ __forceinline__ void ask(const Step& step, const u8* from, int row_bytes, const Place (&places)[Cols],
                                      const Plan& plan, u32 ahead = 0) const {
    const int first = static_cast<int>(threadIdx.x) / kLanes;
    from += static_cast<int>(threadIdx.x) % kLanes * 16;
    if (!kGathers<Plan> && is_whole(step) && bytes_ == 16) {
      const u8* const base = row_at(from, step.tile.base, row_bytes);
      int offset[kCount];  // all at once: shared memory is waited for once
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        offset[i] = places[first + i * kStep].offset;
      }
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        copy_async_16(to(i) + ahead, row_at(base, offset[i], row_bytes), true);
      }
    } else if (bytes_ > 0) {
      constexpr int kTogether = kCount < 4 ? kCount : 4;
#pragma unroll 1
      for (int i = 0; i < kCount; i += kTogether) {
        int token[kTogether];
#pragma unroll
        for (int e = 0; e < kTogether; ++e) {
          const int n = first + (i + e) * kStep;
          token[e] = column_at(plan, step, places[n], n);
        }
        if (step.tile.used != -1) {
#pragma unroll
          for (int e = 0; e < kTogether; ++e) {
            const int n = first + (i + e) * kStep;
            token[e] = (used_word(plan, step, n / 32) >> (n & 31) & 1) != 0 ? token[e] : -1;
          }
        }
#pragma unroll
        for (int e = 0; e < kTogether; ++e) {
          copy_async_part(to(i + e) + ahead, row_at(from, max(token[e], 0), row_bytes), token[e] < 0 ? 0 : bytes_);
        }
      }
    }
  }

 private:
  /// The i-th line's place. Lines permute their chunks in turns of eight, and four lines further on one bit differs.
  __device__ __forceinline__ u32 to(int i) const {
    return (kStep % 8 != 0 && i % 2 != 0 ? to_ ^ 16 : to_) + static_cast<u32>(i * kStep * Bytes);
  }
  /// Row n of what begins at `from`: one instruction, where 64-bit products take five.
  static __device__ __forceinline__ const u8* row_at(const u8* from, int n, int row_bytes) {
    const u8* row;
    asm("mad.wide.s32 %0, %1, %2, %3;" : "=l"(row) : "r"(n), "r"(row_bytes), "l"(from));
    return row;
  }
  u32 to_;
  int bytes_;  ///< of 16, those that are read; −1: this thread copies nothing
};

/// The same of tiles in parts (attention_op::parts_of), one behind the other.
template <typename T, int Depth, int Rows, int Threads, int Bytes, typename RowOf>
__device__ __forceinline__ void copy_parts(const shared_tile<Bytes>& tile, const u8* from, int row_bytes, int depth,
                                           const RowOf& row_of) {
  constexpr int kParts = attention_op::parts_of(Depth), kPart = Depth / kParts;
#pragma unroll
  for (int n = 0; n < kParts; ++n) {
    copy_lines<T, kPart, Rows, Threads, 4>(shared_tile<Bytes>{tile.base + n * Rows * Bytes},
                                           from + n * kPart * static_cast<int>(sizeof(T)), row_bytes, depth - n * kPart,
                                           row_of);
  }
}
template <typename T, int Depth, int Cols, int Threads, int Bytes, int kParts = attention_op::parts_of(Depth)>
class PartCopies : public ColumnCopies<T, Depth, Cols, Threads, Bytes> {
  using ColumnCopies<T, Depth, Cols, Threads, Bytes>::ColumnCopies;
};
template <typename T, int Depth, int Cols, int Threads, int Bytes>
class PartCopies<T, Depth, Cols, Threads, Bytes, 2> {
 public:
  __device__ __forceinline__ PartCopies(shared_tile<Bytes> tile, int depth)
      : first_(tile, depth), second_(tile, depth - Depth / 2) {}
  __device__ __forceinline__ void clear(const u8* from, u32 ahead = 0) const {
    first_.clear(from, ahead);
    second_.clear(from, ahead + Cols * Bytes);
  }
  template <typename Plan>
  __device__ __forceinline__ void ask(const Step& step, const u8* from, int row_bytes, const Place (&places)[Cols],
                                      const Plan& plan, u32 ahead = 0) const {
    first_.ask(step, from, row_bytes, places, plan, ahead);
    second_.ask(step, from + Depth / 2 * sizeof(T), row_bytes, places, plan, ahead + Cols * Bytes);
  }

 private:
  ColumnCopies<T, Depth / 2, Cols, Threads, Bytes> first_, second_;
};

/// N neighbours of a row from `col` on, as far as they are inside.
template <typename T, int N>
__device__ __forceinline__ void store_some(T* row, const OutputArg& out, int col, int depth, const float (&x)[N]) {
  if (out.vector && col + N <= depth) {
    store_run<T, N>(row + col, x);
    return;
  }
#pragma unroll
  for (int e = 0; e < N; ++e) {
    if (col + e < depth) {
      row[(col + e) * out.col] = narrow<T>(x[e]);
    }
  }
}
template <typename T, int N>
__device__ __forceinline__ void load_some(const T* row, const OutputArg& out, int col, int depth, float (&x)[N]) {
  if (out.vector && col + N <= depth) {
    const auto loaded = load_run<T, N>(row + col);
#pragma unroll
    for (int e = 0; e < N; ++e) {
      x[e] = widen(loaded.at(e));
    }
    return;
  }
#pragma unroll
  for (int e = 0; e < N; ++e) {
    x[e] = col + e < depth ? widen(row[(col + e) * out.col]) : 0.0f;
  }
}

/// Whether what rounding left out of a log-sum-exp counts.
__device__ __forceinline__ bool is_large(float lse) {
  return fabsf(lse) > attention_op::kLargeLse && fabsf(lse) < infinity();
}
__device__ __forceinline__ float* lse_of(const attention_op::ForwardParams& p, const Item& item, int token) {
  return static_cast<float*>(p.lse.data) + item.batch * p.lse.batch + item.head * p.lse.head + token * p.lse.row;
}
/// Whether a CTA has nothing to do because it runs again for rows of a large log-sum-exp. All threads call it.
template <int Rows>
__device__ __forceinline__ bool is_done(const attention_op::ForwardParams& p, const Item& item,
                                        const int (&token)[Rows]) {
  if (!p.again) {
    return false;
  }
  bool any = false;
  for (int n = static_cast<int>(threadIdx.x); n < Rows; n += static_cast<int>(blockDim.x)) {
    any = any || (token[n] >= 0 && is_large(*lse_of(p, item, token[n])));
  }
  return __syncthreads_or(any ? 1 : 0) == 0;
}

inline constexpr float kLargest = 3.4028235e38f;

/// How a row's result joins what the components before gave it, or a sink.
struct Merge {
  bool writes;                       ///< false: the row has nothing new, or is not there
  float before = 0.0f, here = 0.0f;  ///< share of the old result, and what the new sum of values is multiplied by
  float lse = -infinity();
  RowSum all;
  RowSum* sum_at;
  float* lse_at;

  /// `top` is a level of a Score.
  template <typename Score>
  __device__ __forceinline__ Merge(const Score&, const attention_op::ForwardParams& p, const Item& item, int token,
                                   const RowSum& mine)
      : writes(token >= 0),
        all(mine),
        sum_at(p.sums != nullptr ? p.sums + (static_cast<i64>(item.batch) * p.heads.all + item.head) * p.queries + token
                                 : nullptr),
        lse_at(p.lse.data != nullptr ? lse_of(p, item, token) : nullptr) {
    if (writes && p.again) {
      writes = is_large(*lse_at);
      lse_at = nullptr;
    }
    RowSum old{0.0f, 0.0f};
    if (writes && p.merge) {
      old = *sum_at;
      writes = mine.sum != 0.0f;
    } else if (writes && p.sinks.data != nullptr) {
      old = attention_op::sink_sum(attention_op::sink_of(p.sinks, item.head, token));
      old.top /= Score::kLevel;
      old.top = old.top < -kLargest ? -kLargest : old.top;  // a NaN stays
    }
    if (writes && old.sum != 0.0f) {
      all.top = fmaxf(old.top, mine.top);
      before = old.sum * exp2_fast((old.top - all.top) * Score::kLevelLog2);
      here = exp2_fast((mine.top - all.top) * Score::kLevelLog2);
      all.sum = before + mine.sum * here;
      before = p.merge ? before / all.sum : 0.0f;  // a sink has no value
      here /= all.sum;
    } else if (mine.sum != 0.0f) {  // the only one
      here = 1.0f / mine.sum;
    }
    if (all.sum != 0.0f) {
      lse = all.top * Score::kLevel + log2f(all.sum) * kLn2;
    }
  }
  /// By one thread, after all that share the row have made theirs.
  __device__ __forceinline__ void store() const {
    if (writes && sum_at != nullptr) {
      *sum_at = all;
    }
    if (writes && lse_at != nullptr) {
      *lse_at = lse;
    }
  }
};

/// Writes N neighbours of a row's result, `before` the share of what is there.
template <typename T, int N>
__device__ __forceinline__ void merge_some(const attention_op::ForwardParams& p, const Item& item, int token, int col,
                                           float before, float (&x)[N]) {
  T* const row = static_cast<T*>(p.o.data) + item.batch * p.o.batch + item.head * p.o.head + token * p.o.row;
  if (before > 0.0f) {
    float old[N];
    load_some<T, N>(row, p.o, col, p.value_depth, old);
#pragma unroll
    for (int e = 0; e < N; ++e) {
      x[e] += old[e] * before;
    }
  }
  store_some<T, N>(row, p.o, col, p.value_depth, x);
}

/// Writes N neighbours of a gradient, or adds them to what is there in float.
template <typename T, int N>
__device__ __forceinline__ void add_some(const OutputArg& out, const Item& item, int token, int col, int depth,
                                         bool add, float (&x)[N]) {
  const i64 at = item.batch * out.batch + item.head * out.head + token * out.row;
  if (!add) {
    store_some<T, N>(static_cast<T*>(out.data) + at, out, col, depth, x);
    return;
  }
  float* const row = static_cast<float*>(out.data) + at;
  float old[N];
  load_some<float, N>(row, out, col, depth, old);
#pragma unroll
  for (int e = 0; e < N; ++e) {
    x[e] += old[e];
  }
  store_some<float, N>(row, out, col, depth, x);
}

}  // namespace fretwork
