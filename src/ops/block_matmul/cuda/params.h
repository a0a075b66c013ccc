// What the host hands to the kernels of block_matmul. Shared by host and device: plain types, device pointers only.
#pragma once

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

/// Copies an array of four dimensions into lines of `line` elements, aligned for the kernels above.
struct CopyParams {
  const void* from;
  void* to;
  long long sizes[4], strides[4];
  long long line;
};

}  // namespace fretwork::block_matmul
