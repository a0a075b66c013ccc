// Parameters of the Hopper block kernels. Shared by host and device: plain data.
#pragma once

#include "device/tensor_map.cuh"

namespace fretwork::blocks {

/// The same as in SpmmPlan.
struct Segment {
  int group, first, last, partial;
};
struct Split {
  int group, first, count;
};

/// Tiles: 128 rows × 256 (or 128) of the free dimension; for small blocks 192 of the free dimension × 192 rows. The
/// free dimension is the one of the dense operand that is not summed over. The first 128 threads of a CTA are the
/// producer warpgroup, the others are consumers.
inline constexpr int kTileM = 128, kTileN = 256, kNarrow = 192;
inline constexpr int kThreads = 384, kNarrowThreads = 512;

/// z counts batches of results. z_sum batches of operands are summed into each result; either there is one z or z_sum
/// is 1. h and h_sum likewise. An operand that is broadcast along z or h has a multiplier of 0 there, others 1.
struct Batches {
  int heads;  ///< results along h that share one segment (1 if the layout has a head for each)
  int z_sum, h_sum;
};

/// Image operands: the dense operand is loaded from images by TMA's im2col mode. Its free dimension is the pixels of
/// the result, row by row and image by image. Pixel (n, u, v) reads (n, u·mul_h + first_h, v·mul_w + first_w), shifted
/// by the offset of a step.
struct Pixels {
  int count, per_image, per_row;  ///< of the result
  int first_h, first_w, mul_h, mul_w;
};

/// Image operands: a step's column encodes the block of channels in the lower two bytes and the offset (w, then h) of
/// its kernel position in the upper two.
inline constexpr int kChannelBits = 16, kOffsetBits = 8;
inline constexpr int kMostChannelBlocks = 1 << kChannelBits, kMostOffset = 127;

/// A result that TMA cannot store, or not all of it: images with any strides, in elements.
struct ImageOut {
  void* data;  ///< null: TMA stores the whole result
  long long n, c, h, w;
  int vector;  ///< channels, or pixels, can be stored 16 bytes at a time
  int lines;   ///< TMA stores (pixel, channel, image, 1) if 64 pixels belong to one image
};

struct SpmmParams {
  Map sparse;  ///< (unit axis, other axis of a block, packed block, z)
  Map dense;   ///< (unit axis, other axis, h, z)
  Map pair;    ///< the same, with the strips of block columns 2n and 2n + 1 in one box; small blocks only
  Map out;     ///< (unit axis, other axis, h, z)
  const int* steps;
  const Segment* segments;
  float* partials;
  int block, stride, groups_per_head;
  int segment_count, share;  ///< `share` segments run side by side over the tiles of the free dimension
  int tiles, free, total, partial_count;
  Batches batches;
  int sparse_block, sparse_z, dense_z, dense_h;
  // Images only.
  Pixels pixels{};
  ImageOut image{};
  int rows = 0;                ///< channels of the result
  const void* bias = nullptr;  ///< one element per row; may be null
  long long bias_stride = 0;
};

inline constexpr int kReduceSums = 8;  ///< that a thread of spmm_reduce adds up

struct ReduceParams {
  void* out;
  const float* partials;
  const Split* splits;
  int groups_per_head, tiles, heads, partial_count, split_count;
  int rows_first;  ///< 1: a tile is rows × free; 0: free × rows
  int width;       ///< columns of a tile
  long long rows, free, row_stride, free_stride, h_stride, z_stride;
  // Images only: `free` counts pixels, and the strides are in `image`.
  Pixels pixels{};
  ImageOut image{};
  const void* bias = nullptr;
  long long bias_stride = 0;
};

/// One tile of an sdd. Warpgroup w multiplies a line of 64 rows of the left operand (`lines[w]`, head · lines + line)
/// by `counts[w]` slots, groups of columns of the right operand. Entries from `first` on give the columns and the
/// blocks of the slots, those of the second warpgroup after those of the first. The last `shared` slots of the first
/// warpgroup are also the first ones of the second.
struct Strip {
  int lines[2], first, counts[2], shared;
};

struct SddParams {
  Map left, right;  ///< (unit axis, other axis, h, z)
  void* out;
  long long out_z, out_block;  ///< strides in elements; rows of a block are contiguous, out_row apart
  const Strip* strips;
  const int* columns;  ///< of the right operand, in slots
  const int* blocks;   ///< per entry: blocks along the slot × blocks along the line, −1 for none
  int strip_count, lines, total, out_row, depth;
  int block, slot;            ///< a slot is `slot` columns of the right operand
  int block_bits, slot_bits;  ///< their logarithms
  int stages, stage_bytes;    ///< of the ring
  Batches batches;
  int left_z, left_h, right_z, right_h;
  // Images only: K is the pixels, split into pieces of `span`; partial sums of a piece go to `out` as floats.
  Pixels pixels{};
  int span = 0;
  int image_stages = 0, last_steps = 0;  ///< NCHW left operand: stages per image, products in the last of them
};

/// Adds the partial sums of all pieces, in order.
struct SumParams {
  const float* from;  ///< (pieces, blocks, rows, cols)
  void* to;
  int pieces, blocks, rows, cols;
  long long block_stride, row_stride, col_stride;  ///< of `to`
};

}  // namespace fretwork::blocks
