// The parameters of the kernels that write a walk for attention's Hopper kernels. Shared by host and device.
#pragma once

#include "ops/dynamic_attention/cuda/params.h"

namespace fretwork::dynamic_attention_op::hopper {

using attention_op::hopper::Item;
using attention_op::hopper::Place;
using attention_op::hopper::RunOf;

/// What the pattern says of a row tile: it has elements in column tiles [first, last), and all of those in [whole,
/// whole_last). The others have a Part each, from `part` on.
struct Band {
  int first, whole, whole_last, last, part;
};

/// A column tile that a row tile has in part: where it is, and its mask (as RunOf's).
struct Part {
  int tile, kind, low, high, limit;
};

/// What is written of each row tile.
struct RowTiles {
  int side;           ///< rows of a tile
  int shift;          ///< as attention's Side: how far before the operand the copy engine counts from
  int *first, *last;  ///< its runs
  int* steps;
  RunOf* runs;
  Place* places;
  int* tokens;
};

inline constexpr int kOrderBits = 10, kOrderThreads = 1 << kOrderBits;

/// Items for CTAs. Pairs (batch, head) come in groups whose operands fit L2, one CTA orders each; in a group the
/// longest tiles come first. Items are dealt out like cards, forwards and backwards in turn.
struct OrderParams {
  const int* steps;
  const int* tile_count;       ///< row tiles of a list, if the device knows
  int tiles;                   ///< or how many they may be
  int batch, heads;            ///< of the rows
  int list_batch, list_heads;  ///< lists that differ: 1 or `batch`; 1 or a divisor of `heads`
  int repeat;                  ///< query heads that a key head's tiles meet, one after the other
  int together;                ///< pairs of a group
  int coarse;                  ///< so many bits of a number of steps do not count for the order
  int ctas;
  Item* items;
  int* share;
};

/// From blocks. Row tiles are those of all lists: number list · tiles + t.
struct BlockWalkParams : RowTiles {
  BitsParams bits;        ///< where blocks are named, for lines of up to kMostWords words whose rows are queries
  const unsigned* words;  ///< or bits of list l, row block r: words_row from (l · row_blocks + r) · words_row on
  int words_row, row_blocks;
  int tiles;           ///< row tiles of a list
  int numbers;         ///< row tiles of all lists
  int row_tiles_each;  ///< row tiles of a block
  int col_tiles_each;  ///< column tiles of a block
  int rows;            ///< of the problem
  const Band* bands;
  const Part* parts;
  int most;           ///< runs that a row tile has room for
  int* taken;         ///< or how many runs have a place, a zero before
  OrderParams order;  ///< for those without order_items: items null otherwise
};
inline constexpr int kMostWords = 128;

/// Column tiles of documents, for all row tiles; then two for each row tile, which it may begin and end with, so that
/// no row meets a column of which none of its tile is to see anything.
struct ColTiles {
  int side, shift, capacity;
  int* first;  ///< the first one of each document, and the end of the last
  Place* places;
  int *tokens, *used;
};

/// From documents: a row tile has at most kDocumentRuns runs. Up to kFewDocuments each CTA finds the first tiles
/// itself.
inline constexpr int kDocumentRuns = 8, kFewDocuments = 510;
struct DocumentWalkParams : RowTiles {
  Documents documents;
  int capacity;       ///< of row tiles
  int* first_tile;    ///< of each document and of the rows before and behind them, and the end of the last; of few
                      ///< documents the last entry alone is written
  ColTiles cols;      ///< likewise
  OrderParams order;  ///< as BlockWalkParams has it
};

/// Selected key blocks. A CTA has a warp for 16 query heads of a key head and a query, so `queries` = 8 / warps_each
/// neighbouring queries are in a tile; another warpgroup fetches the blocks that any of them has.
struct SelectedParams {
  Map k, v;  ///< (column, key, key head, batch), boxes of 64 columns and as many keys as a kernel multiplies at once
  attention_op::InputArg q, d_o;
  attention_op::OutputArg out, lse;      ///< out: the result, or the gradient of q
  attention_op::SinksArg sinks;          ///< of the forward pass
  const attention_op::RowStats* stats;   ///< of gradients: of each (batch, query head, query)
  const unsigned* words;                 ///< bits of (batch, key head, query): words_row each
  const IntervalArg* intervals;          ///< keys that a query may see at all
  int words_row, block;                  ///< keys of a block
  int queries, batch, key_heads, group;  ///< group: query heads of a key head
  int warps_each, tiles;                 ///< warps of a query; tiles of a key head
  int depth, value_depth;
  float scale, scale_2;  ///< scale_2: so that exponents are of 2
};
inline constexpr int kSelectedWarps = 8, kSelectedThreads = 32 * (kSelectedWarps + 4);
inline constexpr int kSelectedKeys = 64;  ///< of a stage
/// Bytes of a tile's queries, or of their gradients' too, and of a stage's keys and values.
constexpr int selected_own(int depth, bool gradient) { return kSelectedWarps * 16 * 2 * depth * (gradient ? 2 : 1); }
constexpr int selected_stage(int depth) { return 2 * kSelectedKeys * 2 * depth; }
constexpr int selected_stages(int depth, bool gradient) {
  constexpr int kMost = 8, kRoom = 224 * 1024;
  const int there = (kRoom - selected_own(depth, gradient)) / selected_stage(depth);
  return there < kMost ? there : kMost;
}
constexpr int selected_shared(int depth, bool gradient) {
  return 1024 + selected_own(depth, gradient) + selected_stages(depth, gradient) * selected_stage(depth);
}

}  // namespace fretwork::dynamic_attention_op::hopper
