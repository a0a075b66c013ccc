// What the host hands to the kernels of block_matmul. Shared by host and device: plain types, device pointers only.
#pragma once

#include "device/divide.cuh"

namespace fretwork::block_matmul {

/// A batch of matrices; strides in elements.
struct MatrixArg {
  void* data;
  long long row, col, z, h;
};

/// Packed blocks; strides of entry (row, col) of a block as the product sees it, so a transpose is strides only.
struct BlocksArg {
  void* data;
  long long z, block, row, col;
};

/// Steps [first, last) of a group, for one tile. Partial −1 writes the result.
struct Segment {
  int group, first, last, partial;
};

/// Partial tiles [first, first + count) add up to a group's result.
struct Split {
  int group, first, count;
};

/// The index of CTAs: batch · segments · tiles. Tiles come in bands, so that CTAs at work together share operands in
/// L2.
struct Grid {
  const Segment* segments;
  /// A step: block column + 1, head to add, then packed block + 1 for each block-row of the group. 0 is "absent".
  const int* steps;
  const Split* splits;
  int segment_count, split_count, tiles, band;
  int heads;            ///< heads in the batch: those of the result for a one-head layout, else 1
  int groups_per_head;  ///< groups of the layout's first head
};

struct SpmmParams {
  Grid grid;
  BlocksArg blocks;
  MatrixArg dense, out;
  float* partials;
  long long free;
  int rows;            ///< of the result, in elements
  unsigned int items;  ///< tiles that the tensor-core kernel's CTAs share
  int z_sum, partial_count;
  int block_rows, block_cols;  ///< of op(S)
  bool dense_free_inner, blocks_col_inner;
  bool vector;  ///< the result is stored 16 bytes at a time
  bool reduce;  ///< add up partial tiles instead of multiplying
};

struct SddParams {
  Grid grid;
  BlocksArg blocks;
  MatrixArg left, right;
  float* partials;
  long long depth;  ///< K
  int rows;
  int z_sum, h_sum, pieces;  ///< K is cut into `pieces`
  int block_rows, block_cols;
  bool left_k_inner, right_k_inner;
  bool vector, reduce;
};

/// A small tile, and how the warps of a CTA share it: a warp has `warp_rows` × `warp_cols` of it. The warps that cover
/// the tile are a team, teams share K, and each has a ring of `stages` stages, 64 of K deep. Stages are few, so that an
/// SM has room for several CTAs: a block row may be shorter than the ring, and then only other CTAs hide its latency.
struct SmallTile {
  int rows, cols, warp_rows, warp_cols, warps, stages;

  constexpr int team_warps() const { return rows / warp_rows * (cols / warp_cols); }
  constexpr int teams() const { return warps / team_warps(); }
  constexpr int stage_bytes() const { return 128 * (rows + cols); }
  constexpr int ring_bytes() const { return teams() * stages * stage_bytes(); }
  /// CTAs on an SM with 227 KB of shared memory.
  constexpr int ctas() const { return 227 * 1024 / (ring_bytes() + 2 * 1024); }
};
inline constexpr SmallTile kSmallTiles[] = {{16, 16, 16, 16, 8, 3}, {16, 64, 16, 32, 4, 3},  {16, 128, 16, 32, 4, 3},
                                            {32, 64, 16, 32, 4, 4}, {32, 128, 32, 32, 4, 3}, {64, 64, 32, 32, 4, 3}};
constexpr SmallTile small_tile(int rows, int cols) {
  for (const SmallTile& tile : kSmallTiles) {
    if (tile.rows == rows && tile.cols == cols) {
      return tile;
    }
  }
  return {};
}
/// CTAs on an SM that a kernel's registers are limited for. What is shifted on its way needs more of them.
constexpr int small_ctas(int rows, int cols, int piece) {
  const int ctas = small_tile(rows, cols).ctas();
  return piece > 2 || ctas < 3 ? ctas : 3;
}

struct SmallParams {
  BlocksArg blocks;
  MatrixArg dense, out;
  /// `stride` pairs for each block row, longest first: its group and number of blocks, then each block's column and
  /// place in `blocks`.
  const int* rows;
  Divisor per_block;                     ///< 16s of K in a block
  int row_count, pieces, tiles, stride;  ///< tiles of a block row: `pieces` along its rows, `tiles` along the columns
  int heads, groups_per_head;            ///< as in Grid
  int block_rows, block_cols, free;
  bool turned;  ///< the result is stored along rows' axis, its unit one
  int run;      ///< elements of it that are stored at a time: 8, 4, 2 or 1
};

/// Copies an array of four dimensions into lines of `line` elements, aligned for the kernels above.
struct CopyParams {
  const void* from;
  void* to;
  long long sizes[4], strides[4];
  long long line;
};

}  // namespace fretwork::block_matmul
