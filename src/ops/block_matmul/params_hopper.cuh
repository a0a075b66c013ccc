// What the Hopper kernels of the block products are launched with. Host and device share it, so it holds plain data.
#pragma once

#include "device/tensor_map.cuh"

namespace fretwork::block_matmul::hopper {

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
  int sparse_z, dense_z, dense_h;
};

struct ReduceParams {
  void* out;
  const float* partials;
  const Split* splits;
  int groups_per_head, tiles, heads, partial_count, split_count;
  int rows_first;  ///< 1: a tile is rows × free; 0: free × rows
  int width;       ///< columns of a tile
  long long rows, free, row_stride, free_stride, h_stride, z_stride;
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
};

}  // namespace fretwork::block_matmul::hopper
