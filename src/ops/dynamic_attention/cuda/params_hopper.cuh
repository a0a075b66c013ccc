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

/// From documents: a row tile has at most kDocumentRuns runs.
inline constexpr int kDocumentRuns = 8;
struct DocumentWalkParams : RowTiles {
  Documents documents;
  int capacity;     ///< of row tiles
  int* first_tile;  ///< of each document and of the rows before and behind them, and the end of the last
  ColTiles cols;
  OrderParams order;  ///< as BlockWalkParams has it
};

}  // namespace fretwork::dynamic_attention_op::hopper
