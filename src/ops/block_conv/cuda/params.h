// Parameters of the generic kernels. Shared by host and device: plain types, device pointers only.
#pragma once

#include "device/divide.cuh"

namespace fretwork::block_conv {

/// A batch of images; n, c, h and w are strides in elements.
struct ImageArg {
  void* data;
  long long n, c, h, w;
  int count, channels, height, width;
};

/// The same as Axis in problem.h.
struct AxisArg {
  int mul, div, first, step;
};

/// One block: its kernel position, its block column of op(S), and its packed index.
struct Entry {
  int r, s, other, block;
};

/// The blocks of op(S). `block`, `row` and `col` are strides in elements; `rows` × `cols` is the size of a block.
struct BlocksArg {
  void* data;
  long long block, row, col;
  int rows, cols;
};

struct ProductParams {
  ImageArg in, out;
  BlocksArg blocks;
  AxisArg y, x;
  const int* lines;  ///< entries [lines[i], lines[i + 1]) belong to block row i
  const Entry* entries;
  const void* bias;
  long long bias_stride;
  int line_count, row_tiles;  ///< block rows; tiles per block row
};

struct WeightParams {
  ImageArg in, out;
  AxisArg y, x;
  const Entry* entries;  ///< in the order of packed blocks; `lines` has their block rows
  const int* lines;
  float* sums;  ///< (pieces, blocks, rows, cols)
  int blocks, rows, cols, row_tiles, col_tiles;
  long long span;  ///< pixels per piece
};

/// Copies images of any strides to contiguous channels-last ones, kTurnSide channels × kTurnSide pixels at a time.
inline constexpr int kTurnSide = 64;
struct TurnParams {
  ImageArg from;
  void* to;
  int vector;                          ///< the pixels of a channel are contiguous and can be loaded 16 bytes at a time
  Divisor by_groups, by_runs, by_row;  ///< groups of channels, runs of pixels per image, pixels per row
};

/// Copies blocks of any strides to contiguous ones.
struct PackParams {
  BlocksArg from;
  void* to;
  int count;
};

}  // namespace fretwork::block_conv
