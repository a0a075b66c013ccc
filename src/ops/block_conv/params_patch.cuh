// What the patch kernel is launched with. Host and device share it, so it holds plain data.
#pragma once

#include "blocks/params.cuh"

namespace fretwork::block_conv {

/// A patch is what a tile of the result reads of 64 channels: rows of pixels, 128 bytes each.
inline constexpr int kPatchRows = 272, kPatches = 3, kPatchBytes = kPatchRows * 128;
inline constexpr int kPatchPixels = blocks::kNarrow;  ///< of a tile
inline constexpr int kBlockStages = 4, kBlockStageBytes = 24576;
inline constexpr int kPatchShared = kPatches * kPatchBytes + kBlockStages * kBlockStageBytes + 3 * 8192 + 1024;

/// A step's first number: how many rows of the patch its kernel position lies from the first, the block of channels
/// within the patch, and which 64 channels the patch has.
inline constexpr int kShiftBits = 9, kColumnBits = 2;

struct PatchParams {
  Map sparse;  ///< (unit axis, other axis of a block, packed block, 1)
  Map image;   ///< (c, w, h, n)
  const int* steps;
  const blocks::Segment* segments;
  int stride, segment_count, total, sparse_block;
  int tile_w, tile_h, tiles_w, tiles_h;  ///< pixels of a tile, and tiles of an image
  int patch_w, patch_bytes;
  int mul_w, mul_h, first_w, first_h;  ///< the first pixel that a result's first reads
  int width, height;                   ///< of the result
  blocks::ImageOut out;
  int rows;
  const void* bias;
  long long bias_stride;
};

}  // namespace fretwork::block_conv
