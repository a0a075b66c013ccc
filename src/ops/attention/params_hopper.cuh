// What the Hopper kernels of attention are launched with. Host and device share it, so it holds plain data.
#pragma once

#include "device/divide.cuh"
#include "device/tensor_map.cuh"

namespace fretwork::attention_op::hopper {

/// A CTA owns 128 rows at a time, 64 for each of the two warpgroups that multiply; a third one fetches.
inline constexpr int kRows = 128, kThreads = 384;

/// An operand as the copy engine sees it: (column, last axis of a tile, middle axis[, first axis], place). The axes of
/// a tile are as long as the tile, and what is not inside the sequence is cut off by starting that much later on them.
/// The place counts units of memory: batch·batch + head·head + row·row of them.
struct Source {
  Map map;
  int batch, head, row;
  int axes;  ///< 2 or 3 axes of a tile
};

/// A tile's place for the copy engine (at tokens, skip on each axis), and for everyone else (base, `used` as in Tile).
struct Place {
  int at, skip[3];
  int base, used, unused[2];
};

/// A run and its mask. kind: kWhole, kBand, or where the bits begin.
inline constexpr int kWhole = -1, kBand = -2;
struct RunOf {
  int first, count, kind, low;
  int high, limit, unused[2];
};

/// One thing to do for a CTA: a row tile of one head of one batch, `steps` pairs of tiles.
struct Item {
  int tile, batch, head, steps;
};

/// How the places of a tile lie, for those who store rows.
struct Layout {
  Divisor middle, last;  ///< extents of those axes
  int extent[3], stride[3];
};

/// A plan's component and who does what. CTA c does items [share[c], share[c + 1]).
struct Walk {
  const Place *row_tiles, *col_tiles;
  const int* first;  ///< of the runs of each row tile
  const RunOf* runs;
  const unsigned *bits, *used;
  const Item* items;
  const int* share;
  Layout rows;
  int row_places, col_places;  ///< of a tile
};

/// Rows in plain memory; strides in elements.
struct Lines {
  void* data;
  long long batch, head, row;
};

struct ForwardParams {
  Source q, k, v;
  Walk walk;
  Lines o, lse;
  int group;    ///< query heads that share a key head
  int head0;    ///< the first head of o and lse, and where q begins
  int merge;    ///< 1: o and lse hold what earlier components gave
  float scale;  ///< times log2(e)
};

/// Rows that no element reaches.
struct FillParams {
  Lines o, lse;
  long long rows;  ///< of all heads and batches
  int per_head, heads, depth;
};

}  // namespace fretwork::attention_op::hopper
