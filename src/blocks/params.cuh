// What the Hopper kernels of blocks are launched with. Host and device share it, so it holds plain data.
#pragma once

#include "device/tensor_map.cuh"

namespace fretwork::blocks {

/// As in SpmmPlan.
struct Segment {
  int group, first, last, partial;
};
struct Split {
  int group, first, count;
};

/// A CTA computes 128 rows × 256 (or 128) of the free dimension at a time, or for small blocks 192 of the free
/// dimension × 192 rows. Its first 128 threads fetch, the others multiply.
inline constexpr int kTileM = 128, kTileN = 256, kNarrow = 192;
inline constexpr int kThreads = 384, kNarrowThreads = 512;

/// Batches: z counts results, and z_sum batches are added into each; one of them is 1. A dense or sparse operand that
/// is broadcast along z or h has a 0 where others have a 1.
struct Batches {
  int heads;  ///< results along h that one segment stands for (1 when the layout has a head for each)
  int z_sum, h_sum;
};

/// Where the dense operand is gathered from images, its free dimension is the pixels of the result, row by row and
/// image by image: pixel (n, u, v) reads (n, u·mul_h + first_h, v·mul_w + first_w), moved by a step's offset.
struct Pixels {
  int count, per_image, per_row;  ///< of the result
  int first_h, first_w, mul_h, mul_w;
};

/// A step's column then is the block of channels, and the offset of its kernel position in the upper two bytes.
inline constexpr int kChannelBits = 16, kOffsetBits = 8;
inline constexpr int kMostChannelBlocks = 1 << kChannelBits, kMostOffset = 127;

/// A result that the copy engine cannot write, or not all of: images with any strides, in elements.
struct ImageOut {
  void* data;  ///< null: the copy engine writes
  long long n, c, h, w;
  int vector;  ///< 16 bytes of channels, or of pixels, are neighbours in memory
  int lines;   ///< the copy engine writes (pixel, channel, image, 1) where 64 pixels are of one image
};

struct SpmmParams {
  Map sparse;  ///< (unit axis, other axis of a block, packed block, z)
  Map dense;   ///< (unit axis, other axis, h, z)
  Map pair;    ///< the same with the strips of two neighbouring block columns in a box; small blocks only
  Map out;     ///< (unit axis, other axis, h, z)
  const int* steps;
  const Segment* segments;
  float* partials;
  int block, stride, groups_per_head;
  int segment_count, share;  ///< `share` segments walk the tiles of the free dimension together
  int tiles, free, total, partial_count;
  Batches batches;
  int sparse_block, sparse_z, dense_z, dense_h;
  // Images only.
  Pixels pixels{};
  ImageOut image{};
  int rows = 0;                ///< channels of the result
  const void* bias = nullptr;  ///< of each row; null is none
  long long bias_stride = 0;
};

struct ReduceParams {
  void* out;
  const float* partials;
  const Split* splits;
  int groups_per_head, tiles, heads, partial_count, split_count;
  int rows_first;  ///< 1: a tile is rows × free; 0: free × rows
  int width;       ///< columns of a tile
  long long rows, free, row_stride, free_stride, h_stride, z_stride;
  // Images only: `free` counts pixels, and strides are those of `image`.
  Pixels pixels{};
  ImageOut image{};
  const void* bias = nullptr;
  long long bias_stride = 0;
};

/// One tile of an sdd. Warpgroup w multiplies a line of 64 rows of the left operand (`lines[w]`, of head · lines +
/// line) by `counts[w]` slots of the right one. Entries from `first` on say where the slots come from and which blocks
/// they make, those of the second warpgroup after those of the first. The last `shared` slots of the first are the
/// first ones of the second.
struct Strip {
  int lines[2], first, counts[2], shared;
};

struct SddParams {
  Map left, right;  ///< (unit axis, other axis, h, z)
  void* out;
  long long out_z, out_block;  ///< strides in elements; rows of a block are out_row apart and contiguous
  const Strip* strips;
  const int* columns;  ///< of the right operand, in slots
  const int* blocks;   ///< for each entry: blocks along the slot × blocks along the line, −1 where there is none
  int strip_count, lines, total, out_row, depth;
  int block, slot;            ///< a slot is `slot` columns of the right operand
  int block_bits, slot_bits;  ///< their logarithms
  int stages, stage_bytes;    ///< of the ring
  Batches batches;
  int left_z, left_h, right_z, right_h;
  // Images only: K is the pixels, cut into pieces of `span`; sums of a piece go to `out` as floats.
  Pixels pixels{};
  int span = 0;
};

/// Adds up what pieces made of blocks, in order.
struct SumParams {
  const float* from;  ///< (pieces, blocks, rows, cols)
  void* to;
  int pieces, blocks, rows, cols;
  long long block_stride, row_stride, col_stride;  ///< of `to`
};

}  // namespace fretwork::blocks
