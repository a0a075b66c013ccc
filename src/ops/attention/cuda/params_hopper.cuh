// The parameters of the Hopper kernels. Shared by host and device: plain types only.
#pragma once

#include "device/tensor_map.cuh"
#include "ops/attention/cuda/params.h"

namespace fretwork::attention_op::hopper {

/// A CTA owns 128 rows at a time, 64 for each of the two warpgroups that multiply; a third one fetches.
inline constexpr int kRows = 128, kThreads = 384;

/// Of forward kernels for so many columns of q and k, and of v, both multiples of 64: rows of k and v in a step, how
/// many q lie in shared memory (an item's rows leave through its q) and how many steps. All must fit 227 KB.
struct ForwardTiles {
  int cols, items, stages;
};
constexpr ForwardTiles forward_tiles(int depth, int values) {
  const int most = depth > values ? depth : values;
  const int cols = values <= 128 && most <= 192 ? 128 : 64;
  return {cols, most > 192 || (cols == 128 && most > 128) ? 1 : 2, most == 64 ? 4 : 2};
}

/// Of kernels for gradients of more than 128 columns, `most` of q, k and v: tiles of 64 rows that the two operands
/// which stream have room for. One operand of the rows is not needed for values' gradients; its place takes two more.
struct DeepStages {
  int first, second;
};
constexpr DeepStages deep_stages(int most, bool values) {
  const int first = most > 192 ? 2 : 3;
  return {first, first - 1 + (values ? 2 : 0)};
}

/// An operand as the copy engine sees it: (column, last axis of a tile, middle axis[, first axis], place). The axes of
/// a tile are as long as the tile, and what is not inside the sequence is cut off by starting that much later on them.
/// The place counts units of memory: batch·batch + head·head + row·row of them.
struct Source {
  Map map;
  int batch, head, row;
  int axes;  ///< 2 or 3 axes of a tile
};

/// A tile's place for the copy engine: at a token, `skip` on each axis.
struct Place {
  int at, skip[3];
};

/// A run and its mask. kind: kWhole, kBand, or where the bits begin.
inline constexpr int kWhole = -1, kBand = -2;
struct RunOf {
  int first, count, unused[2];
  int kind, low, high, limit;
};

/// One thing to do for a CTA: a row tile of one head of one batch, `steps` pairs of tiles.
struct Item {
  int tile, batch, head, steps;
};

/// Where an item begins that may be a piece of its tile: `skip` tiles into run `run`, and where rows are keys with
/// query head `turn` of those that share them. `part` is where results go that are to be joined with those of other
/// items, −1 where the item is a whole tile.
struct PieceOf {
  int run, skip, part, turn;
};

/// A row tile whose results lie in parts [first, first + count).
struct Split {
  int tile, batch, head, first, count;
};

/// What a row has from a part of its columns, beside its sums: the highest score in units of log 2, and the sum of
/// exp2(score − highest).
struct Share {
  float highest, sum;
};

/// A plan's component and who does what. CTA c does items [share[c], share[c + 1]).
struct Walk {
  const Place *row_tiles, *col_tiles;
  const int* first;  ///< of the runs of each row tile
  const RunOf* runs;
  const int *row_tokens, *col_tokens;  ///< of each place of each tile, −1 where there is none
  const int* col_used;                 ///< as in Tile; of each batch element, where keys are padded
  int col_used_batch;                  ///< tiles of an element there, else 0
  const unsigned *bits, *used;
  const Item* items;
  const int* share;
  int row_places, col_places;  ///< of a tile
};

/// Column tiles of which a batch element sees some key, a bit for each: the others are no steps. words null: all.
struct SeenTiles {
  const unsigned* words;
  int batch;  ///< words of an element
};

/// Rows in plain memory; strides in elements.
struct Lines {
  void* data;
  long long batch, head, row;
};

/// What follows `scale` is for kernels whose items may be pieces. There a tile's rows may also be those of 2^pack heads
/// that share keys, one head after the other, and item.head counts such heads.
struct ForwardParams {
  Source q, k, v;
  Walk walk;
  Lines o, lse;
  int group;        ///< query heads that share a key head
  int head0;        ///< the first head of o and lse, and where q begins
  int merge;        ///< 1: o and lse hold what earlier components gave
  int value_depth;  ///< columns of o; q, k and v have zeros beyond theirs
  float scale;      ///< times log2(e)
  int pack;
  const PieceOf* pieces;  ///< of each item
  float* sums;            ///< of parts: kRows lines each
  Share* shares;          ///< of each of those lines
  SeenTiles seen;         ///< for kernels that know of columns which nothing uses
};

/// Gradients of keys and values (rows are keys, columns queries) or of queries (the other way round).
struct BackwardParams {
  Source rows[2];  ///< k and v, or q and d_o
  Source cols[2];  ///< q and d_o, or k and v
  Walk walk;
  Lines out[2];  ///< d_k and d_v, or d_q
  const RowStats* stats;
  int stats_batch, stats_head;
  int group;  ///< query heads that share a key head
  int add;    ///< 1: to what is there
  int early;  ///< 1: the kernel before waited for all that came before it, and its own results are not needed here
  int depth, value_depth;
  float scale, scale_2;   ///< the latter times log2(e)
  const PieceOf* pieces;  ///< of each item, for kernels whose items may be pieces
  float* sums[2];         ///< of parts: kRows lines each
  SeenTiles seen;         ///< where columns are keys, for kernels that know of columns which nothing uses
};

/// Of kernels that make all gradients at once, for so many columns: threads, and what shared memory has places for:
/// key tiles of items, tiles of q and of d_o, dSᵀ of a step; dq of a step has two.
struct WholeTiles {
  int threads, items, queries, outputs, scores;
};
constexpr WholeTiles whole_tiles(int columns) {
  return columns == 64 ? WholeTiles{512, 2, 4, 4, 2} : WholeTiles{384, 1, 3, 2, 1};
}
constexpr int whole_shared(int columns) {
  const WholeTiles tiles = whole_tiles(columns);
  return 1024 + 2 * columns * (2 * kRows * tiles.items + 64 * (tiles.queries + tiles.outputs)) +
         2 * 64 * kRows * tiles.scores + 2 * 4 * 64 * columns;
}

/// All gradients of a pattern in which query i meets the keys up to i − low, in whole tiles; the first key tile meets
/// all query tiles.
struct WholeParams {
  Source k, v, q, d_o;
  Lines d_k, d_v, d_q;
  const RowStats* stats;     ///< of each (batch, head, query), in tiles
  float* sums;               ///< a tile for each (batch, head, query tile); as many again where `round` is 1
  int* turns;                ///< how many key tiles each of them has met, zeros before
  int* taken;                ///< how many items, a zero before
  int items;                 ///< key tiles of all key heads and batches
  int row_tiles, col_tiles;  ///< of keys, of queries
  int low;
  int round;            ///< 1: all meet all
  int pairs, together;  ///< of key heads and batches; so many run through their tiles together
  int tiles;            ///< query tiles of all heads and batches
  int kv_heads, group;
  int depth, value_depth;
  float scale, scale_2;  ///< the latter times log2(e)
  PaddingArg padding;
};

inline constexpr int kJoinWarps = 4;

/// Joins the parts of rows and puts them where they belong: with `shares` by the log-sum-exp, else by adding up.
struct JoinParams {
  const Split* splits;
  int tiles;  ///< how many
  const int* row_tokens;
  const float* sums[2];  ///< of one or two results
  const Share* shares;
  Lines out[2], lse;
  int lines[2];  ///< columns that a line of sums has
  int depth[2];  ///< and those of the results
  int head0;     ///< the first head of results
  int pack;      ///< log2 of the heads in a tile
  int merge;     ///< 1: results hold what earlier components gave
};

/// Rows that no element reaches.
struct FillParams {
  Lines o, lse;    ///< lse may be null
  long long rows;  ///< of all heads and batches
  int per_head, heads, depth;
};

}  // namespace fretwork::attention_op::hopper
