// Walks that the device made, for attention's kernels: bits of the blocks that a row tile meets, an interval for each
// row, or lists of tokens.
#pragma once

#include "ops/attention/cuda/walk.cuh"
#include "ops/dynamic_attention/cuda/params.h"

namespace fretwork::dynamic_attention_op {

/// Later rows are longer where a pattern is causal, and earlier keys.
__device__ __forceinline__ int tile_at(const WalkArg& plan, u32 n, bool rows_are_keys) {
  return rows_are_keys ? static_cast<int>(n) : plan.row_tile_count - 1 - static_cast<int>(n);
}

/// TileArg::inside of a range of neighbours.
__device__ __forceinline__ u32 inside_of(int count) { return 512u | 512u << 10 | static_cast<u32>(count + 511) << 20; }
__device__ __forceinline__ int count_of(const Step& step) { return static_cast<int>(step.tile.inside >> 20) - 511; }

/// What a row of a step has: an interval of its columns.
struct IntervalMask {
  const int2* rows;
  int apart, base, limit;
};
template <int Cols>
__device__ __forceinline__ IntervalMask mask_of(const WalkArg& plan, const Step& step) {
  return {step.rows, plan.interval_row, step.tile.base, count_of(step)};
}
__device__ __forceinline__ u32 bits_between(int begin, int end) {
  return low_bits(min(max(end, 0), 32)) & ~low_bits(min(max(begin, 0), 32));
}
template <int Cols>
__device__ __forceinline__ u32 mask_word(const IntervalMask& mask, const u32*, int m, int w) {
  const int2 row = mask.rows[m * mask.apart];
  return bits_between(row.x - mask.base - 32 * w, min(row.y - mask.base, mask.limit) - 32 * w);
}

/// The same where columns are tokens of a list.
struct GatherMask {
  const int2* rows;
  const int* tokens;
  int limit;
};
template <int Cols>
__device__ __forceinline__ GatherMask mask_of(const GatherArg& plan, const Step& step) {
  return {step.rows, plan.tokens + step.tile.base, count_of(step)};
}
/// How many of `count` ascending tokens are less than `token`.
__device__ __forceinline__ int count_below(const int* tokens, int count, int token) {
  int begin = 0;
  while (count > 0) {
    const int half = count / 2;
    if (tokens[begin + half] < token) {
      begin += half + 1;
      count -= half + 1;
    } else {
      count = half;
    }
  }
  return begin;
}
template <int Cols>
__device__ __forceinline__ u32 mask_word(const GatherMask& mask, const u32*, int m, int w) {
  const int2 row = mask.rows[m];
  return bits_between(count_below(mask.tokens, mask.limit, row.x) - 32 * w,
                      count_below(mask.tokens, mask.limit, row.y) - 32 * w);
}

/// The same where columns are blocks of a word of bits.
struct ScatterMask {
  const int2* rows;
  int apart, base, shift;
  u32 blocks;
};
template <int Cols>
__device__ __forceinline__ ScatterMask mask_of(const ScatterArg& plan, const Step& step) {
  return {step.rows, plan.interval_row, step.tile.base, plan.col_shift, step.blocks};
}
/// The n-th bit that is set, or −1.
__device__ __forceinline__ int bit_at(u32 bits, int n) {
#pragma unroll
  for (int k = 0; k < 3; ++k) {  // a step has four blocks at most
    bits = k < n ? bits & (bits - 1) : bits;
  }
  return __ffs(static_cast<int>(bits)) - 1;
}
template <int Cols>
__device__ __forceinline__ u32 mask_word(const ScatterMask& mask, const u32*, int m, int w) {
  const int2 row = mask.rows[m * mask.apart];
  const int each = 32 >> mask.shift, side = 1 << mask.shift;
  u32 word = 0;
  for (int n = 0; n < each; ++n) {
    const int bit = bit_at(mask.blocks, w * each + n), base = mask.base + (bit << mask.shift);
    const u32 part = bits_between(row.x - base, min(row.y - base, side));
    word |= bit < 0 ? 0u : part << (n << mask.shift);
  }
  return word;
}
__device__ __forceinline__ int position_of(const ScatterArg& plan, const Step& step, const Place&, int n) {
  const int bit = bit_at(step.blocks, n >> plan.col_shift);
  return step.tile.base + (bit << plan.col_shift) + (n & (1 << plan.col_shift) - 1);
}
__device__ __forceinline__ int column_at(const ScatterArg& plan, const Step& step, const Place& place, int n) {
  const int token = position_of(plan, step, place, n);
  return bit_at(step.blocks, n >> plan.col_shift) >= 0 && token >= step.first && token < step.last ? token : -1;
}

/// A step is marked so for a batch element and head that do not have its block.
inline constexpr int kAbsent = -2;
__device__ __forceinline__ u32 used_word(const WalkArg&, const Step& step, int) {
  return step.tile.used == kAbsent ? 0u : ~0u;
}

__device__ __forceinline__ int tile_at(const GatherArg& /*plan*/, u32 n, bool /*rows_are_keys*/) {
  return static_cast<int>(n);  // an item: find_piece says which tile
}
__device__ __forceinline__ bool find_piece(const GatherArg& plan, Item& item) {
  const PieceArg piece =
      plan.pieces[static_cast<i64>(item.batch * plan.list_heads + item.head) * plan.row_tile_count + item.tile];
  item.tile = piece.tile;
  item.part = piece.part;
  item.slot = piece.slot;
  return piece.tile >= 0;
}
__device__ __forceinline__ bool is_part(const GatherArg& /*plan*/, const Item& item) { return item.slot >= 0; }
__device__ __forceinline__ OutputArg part_of(const GatherArg& plan, const Item& item, int which) {
  float* const sums = plan.sums[which];
  if (sums == nullptr) {
    return {};
  }
  const int line = plan.sum_line[which];
  const i64 row = static_cast<i64>(item.slot) * plan.side - static_cast<i64>(item.tile) * plan.side;
  return {sums + row * line, 0, 0, line, 1, true};
}

__device__ __forceinline__ int column_at(const GatherArg& plan, const Step& step, const Place&, int n) {
  return n < count_of(step) ? plan.tokens[step.tile.base + n] : -1;
}
__device__ __forceinline__ int position_of(const GatherArg& plan, const Step& step, const Place& place, int n) {
  return column_at(plan, step, place, n);
}

/// The bits of the blocks that a row block of a query head meets.
__device__ __forceinline__ const u32* line_of(const WalkArg& plan, int batch, int head, int row_block) {
  return plan.words + batch * plan.words_batch + head / plan.list_ratio * plan.words_head +
         static_cast<i64>(row_block) * plan.words_row;
}

__device__ __forceinline__ const int2* first_row(const WalkArg& plan, const Item& item, int base) {
  return reinterpret_cast<const int2*>(plan.intervals) + item.batch * plan.interval_batch + base * plan.interval_row;
}
__device__ __forceinline__ Reach reach_of(const WalkArg& plan, int tile, const int2* rows) {
  if (plan.reach != nullptr) {
    return plan.reach[tile];
  }
  return {rows->x, rows->y, rows->x, rows->y};
}

}  // namespace fretwork::dynamic_attention_op

namespace fretwork {

/// Goes through the blocks whose bits are set, in ascending order; neighbours make one run of columns.
template <bool Members>
class Walk<Members, dynamic_attention_op::WalkArg> {
  using Plan = dynamic_attention_op::WalkArg;

 public:
  __device__ __forceinline__ Walk(const Plan& plan, const Item& item) : plan_(plan), item_(item) {
    const int base = plan.row_tiles[item.tile].base;
    rows_ = first_row(plan, item, base);
    reach_ = reach_of(plan, item.tile, rows_);
    block_row_ = base / plan.row_block;
    begin();
  }

  /// The step of a plan of every block, as a batch element and head see it.
  __device__ __forceinline__ void see_as(Step& step, int batch, int head) const {
    const int block = step.tile.base / plan_.col_block;
    const bool there = (line_of(plan_, batch, head, block_row_)[block / 32] >> (block % 32) & 1) != 0;
    step.tile.used = there ? -1 : dynamic_attention_op::kAbsent;
  }

  __device__ __forceinline__ Step take() {
    Step step;
    while (col_ >= end_ && !find_run()) {
      if (!Members || ++member_ >= item_.member_count) {
        member_ = item_.member_count;
        return step;
      }
      begin();
    }
    const int side = plan_.col_order.extent[2], count = min(side, end_ - col_);
    step.tile = {col_, dynamic_attention_op::inside_of(count), -1, 0};
    step.mask = count == side && col_ >= reach_.whole_first && col_ + side <= reach_.whole_last ? -1 : 0;
    step.member = Members ? member_ : 0;
    step.rows = rows_;
    col_ += count;
    return step;
  }

 private:
  __device__ __forceinline__ void begin() {
    line_ = plan_.words != nullptr && !plan_.every_block
                ? line_of(plan_, item_.batch, Members ? item_.first_member + member_ : item_.head, block_row_)
                : nullptr;
    col_ = end_ = max(reach_.first, 0);
    block_ = col_ / plan_.col_block;
  }
  /// The next columns that are there, from col_ to end_.
  __device__ __forceinline__ bool find_run() {
    while (block_ * plan_.col_block < reach_.last) {
      int first = block_, count = 1;
      if (line_ != nullptr) {
        const u32 word = line_[block_ / 32] >> (block_ % 32);
        if (word == 0) {
          block_ = (block_ | 31) + 1;
          continue;
        }
        first = block_ + __ffs(static_cast<int>(word)) - 1;
        const u32 rest = ~(word >> (first - block_));
        count = rest == 0 ? 32 : __ffs(static_cast<int>(rest)) - 1;
      } else if (!plan_.every_block) {
        count = (reach_.last + plan_.col_block - 1) / plan_.col_block - block_;
      }
      block_ = first + count;
      col_ = max(first * plan_.col_block, reach_.first);
      end_ = min(block_ * plan_.col_block, reach_.last);
      if (col_ < end_) {
        return true;
      }
    }
    return false;
  }

  const Plan& plan_;
  const Item item_;
  const int2* rows_;
  const u32* line_ = nullptr;
  dynamic_attention_op::Reach reach_;
  int block_row_, block_ = 0, col_ = 0, end_ = 0, member_ = 0;
};

template <>
inline constexpr bool kGathers<dynamic_attention_op::GatherArg> = true;
template <>
inline constexpr bool kGathers<dynamic_attention_op::ScatterArg> = true;

/// The same blocks, as many in a step as it has room for, if they are in one word of bits.
template <bool Members>
class Walk<Members, dynamic_attention_op::ScatterArg> {
  using Plan = dynamic_attention_op::ScatterArg;

 public:
  __device__ __forceinline__ Walk(const Plan& plan, const Item& item) : plan_(plan), item_(item) {
    const int base = plan.row_tiles[item.tile].base;
    rows_ = first_row(plan, item, base);
    reach_ = reach_of(plan, item.tile, rows_);
    block_row_ = base / plan.row_block;
    begin();
  }

  __device__ __forceinline__ Step take() {
    Step step;
    while (bits_ == 0) {
      if (++word_ * 32 >= last_block_) {
        if (!Members || ++member_ >= item_.member_count) {
          member_ = item_.member_count;
          word_ = last_block_;  // far enough behind the end
          return step;
        }
        begin();
      } else {
        bits_ = line_[word_] & low_bits(min(last_block_ - word_ * 32, 32));
      }
    }
    const int most = plan_.col_order.extent[2] >> plan_.col_shift;
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const u32 lowest = n < most ? bits_ & (0u - bits_) : 0u;
      step.blocks |= lowest;
      bits_ ^= lowest;
    }
    const int base = word_ * 32 << plan_.col_shift;
    const int begin = base + (__ffs(static_cast<int>(step.blocks)) - 1 << plan_.col_shift);
    const int end = base + (32 - __clz(static_cast<int>(step.blocks)) << plan_.col_shift);
    const bool whole = __popc(step.blocks) == most && begin >= reach_.whole_first && end <= reach_.whole_last;
    step.tile = {base, 0, -1, 0};
    step.mask = whole ? -1 : 0;
    step.member = Members ? member_ : 0;
    step.rows = rows_;
    step.first = reach_.first;
    step.last = reach_.last;
    return step;
  }

 private:
  __device__ __forceinline__ void begin() {
    line_ = line_of(plan_, item_.batch, Members ? item_.first_member + member_ : item_.head, block_row_);
    const int block = reach_.first >> plan_.col_shift;
    last_block_ = reach_.first < reach_.last ? (reach_.last - 1 >> plan_.col_shift) + 1 : 0;
    word_ = block / 32;
    bits_ =
        block < last_block_ ? line_[word_] & ~low_bits(block % 32) & low_bits(min(last_block_ - word_ * 32, 32)) : 0u;
  }

  const Plan& plan_;
  const Item item_;
  const int2* rows_;
  const u32* line_;
  dynamic_attention_op::Reach reach_;
  u32 bits_ = 0;
  int block_row_, last_block_ = 0, word_ = 0, member_ = 0;
};

/// Goes through a list of tokens, for each member the same.
template <bool Members>
class Walk<Members, dynamic_attention_op::GatherArg> {
  using Plan = dynamic_attention_op::GatherArg;

 public:
  __device__ __forceinline__ Walk(const Plan& plan, const Item& item) : plan_(plan), members_(item.member_count) {
    const int base = plan.row_tiles[item.tile].base;
    rows_ = first_row(plan, item, base);
    reach_ = reach_of(plan, item.tile, rows_);
    const int* const first = plan.list_first +
                             static_cast<i64>(item.batch * plan.list_heads + item.head) * (plan.row_blocks + 1) +
                             base / plan.row_block;
    const int from = first[0], count = first[1] - first[0];
    const int part = item.part * plan.piece_tokens, part_end = item.slot < 0 ? count : part + plan.piece_tokens;
    begin_ = from + max(dynamic_attention_op::count_below(plan.tokens + from, count, reach_.first), part);
    end_ = from + min(dynamic_attention_op::count_below(plan.tokens + from, count, reach_.last), part_end);
    at_ = begin_;
  }

  __device__ __forceinline__ Step take() {
    Step step;
    if (at_ >= end_) {
      if (begin_ >= end_ || member_ + 1 >= members_) {
        return step;
      }
      ++member_;
      at_ = begin_;
    }
    const int side = plan_.col_order.extent[2], count = min(side, end_ - at_);
    step.tile = {at_, dynamic_attention_op::inside_of(count), -1, 0};
    const bool whole =
        count == side && plan_.tokens[at_] >= reach_.whole_first && plan_.tokens[at_ + side - 1] < reach_.whole_last;
    step.mask = whole ? -1 : 0;
    step.member = member_;
    step.rows = rows_;
    at_ += count;
    return step;
  }

 private:
  const Plan& plan_;
  const int2* rows_;
  dynamic_attention_op::Reach reach_;
  int begin_, end_, at_, members_, member_ = 0;
};

}  // namespace fretwork
