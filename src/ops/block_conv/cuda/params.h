// What the host hands to the kernels of block_conv. Shared by host and device: plain types, device pointers only.
#pragma once

namespace fretwork::block_conv {

/// Images; strides in elements.
struct ImageArg {
  void* data;
  long long n, c, h, w;
  int count, channels, height, width;
};

/// As Axis in problem.h.
struct AxisArg {
  int mul, div, first, step;
};

/// A block of a line: the kernel position, the block column of op(S), and where it is packed.
struct Entry {
  int r, s, other, block;
};

/// The blocks of op(S): entry (row, col) of one.
struct BlocksArg {
  void* data;
  long long block, row, col;
  int rows, cols;
};

struct ProductParams {
  ImageArg in, out;
  BlocksArg blocks;
  AxisArg y, x;
  const int* lines;  ///< entries [lines[i], lines[i + 1]) are those of line i
  const Entry* entries;
  const void* bias;
  long long bias_stride;
  int line_count, row_tiles;  ///< tiles of rows in a line
};

struct WeightParams {
  ImageArg in, out;
  AxisArg y, x;
  const Entry* entries;  ///< in the order of packed blocks, `other` being the block column; `lines` the block rows
  const int* lines;
  float* sums;  ///< (pieces, blocks, rows, cols)
  int blocks, rows, cols, row_tiles, col_tiles;
  long long span;  ///< pixels of a piece
};

/// Images of any strides to contiguous channels-last ones.
struct TurnParams {
  ImageArg from;
  void* to;
  int vector;  ///< pixels are neighbours, in units of 16 bytes
};

/// Blocks of any strides to contiguous ones.
struct PackParams {
  BlocksArg from;
  void* to;
  int count;
};

}  // namespace fretwork::block_conv
