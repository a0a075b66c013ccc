// What the kernels of SPLAT's operators are launched with; shared by host and device. Strides count elements.
#pragma once

namespace fretwork {

/// start + t·stride, 0 ≤ t < count.
struct RegularLine {
  int start, stride, count;
};

struct RegularOperand {
  void* data;
  long long batch, head, row, col;
};

struct RegularParams {
  const RegularLine* rows;     ///< the columns of each row
  const RegularLine* columns;  ///< the rows of each column, or places in the list of them
  const int* list;             ///< null where columns are progressions
  RegularOperand values, by_row, by_col;
  unsigned tasks;    ///< lines, each as often as it has chunks
  int heads, group;  ///< of x; of them, how many share a head of by_col
  int row_count, col_count;
  int width, depth;
  int chunks;  ///< pieces of `depth`, a warp's share each
};

/// Up to 64 lines whose partners lie at base + s·step, 0 ≤ s < slots; each of those is a partner of one of them at
/// least.
struct RegularTile {
  int first, lines;  ///< where they stand in `order`
  int base, step, slots;
};

struct RegularTileParams {
  const RegularLine* rows;   ///< the columns of each row
  const int* order;          ///< rows, or columns where the result is by_col
  const RegularTile* tiles;  ///< each as often as there are batches and heads of the result
  RegularOperand values, by_row, by_col;
  int tile_count;
  int heads, group;  ///< as above
  int width, depth;
};

struct RegularSoftmaxParams {
  const RegularLine* rows;
  RegularOperand in, d_out, out;
  float scale;
  unsigned tasks;  ///< rows
  int heads, row_count, width;
};

}  // namespace fretwork
