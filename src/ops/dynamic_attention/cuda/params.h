// The parameters of the kernels that write walks, and of attention's kernels that read them. Shared by host and device.
#pragma once

#include "ops/attention/cuda/params.h"

namespace fretwork::dynamic_attention_op {

/// Columns [begin, end) of a row.
struct IntervalArg {
  int begin, end;
};

/// Of a row tile: columns [first, last) are those that some row has, [whole_first, whole_last) those that all have.
struct Reach {
  int first, last, whole_first, whole_last;
};

/// A walk that the device made. Tiles are ranges of neighbours; of ComponentArg, the orders, row_tiles and
/// row_tile_count are set.
struct WalkArg : attention_op::ComponentArg {
  const IntervalArg* intervals;      ///< of row r of batch element b: intervals[b·interval_batch + r·interval_row]
  int interval_batch, interval_row;  ///< rows beyond the last are readable
  const Reach* reach;                ///< of each row tile; or null: the interval of the batch element
  /// A bit for each column block that a row block meets, or null: all. Those of (batch b, query head h, row block r)
  /// begin at b·words_batch + h / list_ratio·words_head + r·words_row.
  const unsigned* words;
  long long words_batch, words_head;
  int words_row, list_ratio, row_block, col_block;
  bool every_block;  ///< steps do not ask for bits, and end with their block: who sees them asks (see_as)
};

/// Blocks are narrower than a step: it has several of them, which need not follow each other.
struct ScatterArg : WalkArg {
  int col_shift;  ///< the logarithm of col_block
};

/// An item of a list's lines: a row tile, or a part of its tokens, whose sums in float are left in a slot. tile −1: no
/// item. slot −1: the tile is whole.
struct PieceArg {
  int tile, part, slot;
};

/// Columns come from lists of tokens, ascending: those of (batch b, head h, row block r) are tokens [first[n], first[n
/// + 1]) with n = (b·list_heads + h)·(row_blocks + 1) + r. Long ones are split: items of a list are `pieces`,
/// row_tile_count of them.
struct GatherArg : WalkArg {
  const int *tokens, *list_first;
  int list_heads, row_blocks;
  const PieceArg* pieces;
  int piece_tokens;       ///< that a part has at most
  float* sums[2];         ///< of slots: of gradients, or null where one is not wanted
  int side, sum_line[2];  ///< rows of a tile, floats of a row
};

/// Attention's parameters, with another plan in the place of theirs.
template <typename Params, typename Plan>
struct With : Params {
  Plan plan;
};
using ForwardParams = With<attention_op::ForwardParams, WalkArg>;
using BackwardParams = With<attention_op::BackwardParams, WalkArg>;
using ScatterForwardParams = With<attention_op::ForwardParams, ScatterArg>;
using ScatterBackwardParams = With<attention_op::BackwardParams, ScatterArg>;
using GatherParams = With<attention_op::BackwardParams, GatherArg>;
using BiasGradientParams = With<attention_op::BiasGradientParams, WalkArg>;

/// Flags or numbers by (batch, head, row, column).
struct TableArg {
  const void* data;
  long long batch, head, row, col;
};

/// Bits from a mask, or from lists of numbers: a warp for each line.
struct BitsParams {
  TableArg mask, counts, indices;  ///< absent when data is null; without counts all entries of a line count
  unsigned* words;                 ///< of each (batch, head, row): words_row of them
  int heads, rows, cols, entries, words_row;
  long long lines;
  int* zero;  ///< a number that becomes 0
};

/// The bits the other way round: a warp for each 32 × 32.
struct TransposeParams {
  const unsigned* from;
  unsigned* to;
  int rows, cols, from_row, to_row;  ///< words of a line
  long long tiles;                   ///< of all lists
  int row_tiles, col_tiles;
};

/// Lists of the bits that are set. count: first[n + 1] = how many; scan: first[n] = how many before, and the pieces of
/// lines; fill: tokens.
struct ListParams {
  const unsigned* words;
  int *first, *tokens;
  int lines, words_row;   ///< of a list
  long long lists, room;  ///< room: tokens of a list
  int* first_piece;       ///< of each row tile
  PieceArg* pieces;       ///< of each list `capacity`
  int tiles, tiles_each;  ///< row tiles of a list, of a line
  int capacity, piece_tokens;
};

/// Adds up the pieces of each row tile that has several.
struct JoinParams {
  const int* first_piece;
  int tiles, ctas_each, capacity, list_heads, side, rows;
  const float* sums[2];
  int sum_line[2], depth[2];
  attention_op::OutputArg out[2];  ///< absent when data is null
};

/// Documents side by side: where each begins among all rows and columns, and at last where the last one ends.
struct Documents {
  const int *cu_rows, *cu_cols;
  long long cu_rows_stride, cu_cols_stride;
  int documents, rows, cols;
  int left, right;  ///< −1: no bound
};

/// Rows outside of all documents have no sink: their lse is −∞.
struct OutsideParams : Documents {
  attention_op::OutputArg lse;
  int heads;
};

/// Documents as row tiles: where those of each begin, then tiles and intervals.
struct DocumentParams : Documents {
  int side, capacity;
  int* first;  ///< of each document and of the rows before and behind them: documents + 3
  attention_op::TileArg* tiles;
  Reach* reach;
  IntervalArg* intervals;
};

inline constexpr int kThreads = 256, kScanThreads = 1024;

}  // namespace fretwork::dynamic_attention_op
