// Parameters of the patch kernel. Shared by host and device: plain data. README.md explains the terms.
#pragma once

#include "blocks/params.cuh"
#include "device/divide.cuh"

namespace fretwork::block_conv {

/// A place is a padded position: a pixel, or a zero of the padding. A tile is 256 consecutive places × 2 · 64 output
/// channels. A patch is the input of a tile in 64 channels, 128 bytes per place.
inline constexpr int kTilePlaces = 256, kPatchChannels = 64;
inline constexpr int kMostPatches = 4;
/// Stages of blocks for each warpgroup: as many as fit into shared memory, since products wait mostly for blocks.
/// `turned`: x is NCHW and transposed in shared memory. `rows`: the channels of the result are contiguous.
inline constexpr int kMostBlockStages = 6, kBlockStageBytes = 8192;
constexpr int block_stages(bool turned, bool rows) { return rows ? (turned ? 3 : 5) : 4; }
/// NCHW images are loaded in pieces of 64 pixels × 64 channels and transposed into the patch. A patch is made of at
/// most kMostPieces. Pixels of a piece that do not belong to the patch are written to kSpareRows rows behind it.
inline constexpr int kTurnStages = 3, kTurnBytes = 8192, kMostPieces = 16, kSpareRows = 16;
/// Channels-last results are stored 128 places at a time. For NCHW results a warp's buffer has one line of pixels per
/// channel, with spare slots for padding; the line length avoids bank conflicts between eight lines.
inline constexpr int kHalfPlaces = 128, kLineBytes = (kTilePlaces + 8) * 2;
/// Shared memory of a CTA, an upper bound of the kernel's static shared memory, and the dynamic part that is not
/// patches: stages of blocks, pieces, buffers for results, and alignment.
inline constexpr int kPatchShared = 227 * 1024;
constexpr int patch_static(bool turned, bool rows) { return (turned ? 5120 : 1024) + (rows ? 4096 : 1024); }
constexpr int patch_rest(bool turned, bool rows) {
  return 2 * block_stages(turned, rows) * kBlockStageBytes + (turned ? kTurnStages * kTurnBytes : 0) +
         (rows ? 4 * 8192 : 8 * 8 * kLineBytes) + 1024;
}

/// A step is what one warpgroup multiplies at once: the blocks of one column in its 64 rows. Its first word encodes the
/// patch (counted within the segment), the block of channels in it (kColumnBits) and the offset of the kernel position
/// in places (kShiftBits).
inline constexpr int kShiftBits = 12, kColumnBits = 2;

/// The work of 2 · 64 output channels on a tile: the first channel of each block row, kNoChannel for none; patches
/// [patches, patches + patch_count) of 64 channels each; and the range of steps of each warpgroup.
inline constexpr int kNoChannel = 1 << 30;
struct PatchSegment {
  int rows[2][4], patches, patch_count, first[2], last[2];
};

/// All images as one line of places. An image is `image` places in rows of `row`. Its first place is pixel
/// (first_h, first_w), which lies in the padding if negative. The padding behind a row is the one before the next row.
struct Line {
  int row, image;  ///< places per row and per image
  int first_h, first_w;
  int images;
  Divisor by_row, by_image;
};

struct PatchParams {
  Map sparse;  ///< (unit axis, other axis of a block, packed block, 1)
  Map image;   ///< im2col over places; for NCHW input (pixel, channel, image, 1)
  const PatchSegment* segments;
  const int* channels;  ///< first channel of each patch, in units of 64
  const int* steps;     ///< (encoded position, then the block of each block row or −1), 1 + 64 / block words each
  int segment_count, total, sparse_block, block_count;
  int tile_places;  ///< distance between the first places of two tiles
  Line line;
  int patch_count, patch_stride;     ///< the ring of patches
  int patch_columns, column_places;  ///< loads per patch, places per load
  int in_height, in_width;
  Divisor by_width, by_pieces;  ///< width and pieces of an image; NCHW input
  int width, height, rows;      ///< of the result
  Divisor by_out_width, by_pixels;
  void* out;
  int unit_n, unit_h, unit_w;  ///< strides in units of 16 bytes; channels-last results
  long long out_n, out_c;      ///< strides in elements; NCHW results
  const void* bias;
  long long bias_stride;
};

}  // namespace fretwork::block_conv
