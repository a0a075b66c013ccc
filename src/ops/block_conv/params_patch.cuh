// What the patch kernel is launched with. Host and device share it, so it holds plain data.
#pragma once

#include "blocks/params.cuh"

namespace fretwork::block_conv {

/// A tile is 8 × 32 pixels of the result × 128 rows. A patch is what it reads of 64 channels, edges included: rows of
/// pixels, 128 bytes each.
inline constexpr int kTileWidth = 8, kTileHeight = 32, kTileRows = 128, kPatchChannels = 64;
inline constexpr int kMostPatches = 4;
/// Of the blocks of one warpgroup.
inline constexpr int kBlockStages = 3, kBlockStageBytes = 8192;
/// Shared memory behind the patches: the blocks of both warpgroups, their pieces of the result, and alignment.
inline constexpr int kPatchRest = 2 * kBlockStages * kBlockStageBytes + 4 * 8192 + 1024;
inline constexpr int kPatchShared = 227 * 1024;

/// What one warpgroup multiplies at once: the blocks of 64 rows, and the patch (counted in its segment), the block of
/// channels in it, and the row of it where the kernel position begins.
inline constexpr int kShiftBits = 12, kColumnBits = 2;

/// The work of 128 rows on a tile: patches [patches, patches + patch_count) of 64 channels each, and steps of the upper
/// and lower warpgroup.
struct PatchSegment {
  int place, patches, patch_count, first[2], last[2], unused;
};

struct PatchParams {
  Map sparse;  ///< (unit axis, other axis of a block, packed block, 1)
  Map image;   ///< (c, w, h, n)
  Map out;     ///< the same of the result, where the copy engine writes it
  const PatchSegment* segments;
  const int* channels;  ///< of patches, in units of 64
  const int* steps;     ///< (where it lies, then blocks from the top, −1 where there is none), a fixed number of each
  int segment_count, total, sparse_block, block_count;
  int tiles_w, tiles_h;  ///< of an image
  int patch_count, patch_stride, patch_bytes,
      pitch;                    ///< the ring of patches; rows of a patch from pixel to pixel below
  int mul_h, first_w, first_h;  ///< the first pixel that a result's first reads
  int width, height, rows;      ///< of the result
  blocks::ImageOut direct;      ///< where threads write it
  const void* bias;
  long long bias_stride;
};

}  // namespace fretwork::block_conv
