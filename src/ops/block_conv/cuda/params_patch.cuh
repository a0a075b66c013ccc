// What the patch kernel is launched with. Host and device share it, so it holds plain data.
#pragma once

#include "blocks/params.cuh"
#include "device/divide.cuh"

namespace fretwork::block_conv {

/// A tile is 256 neighbouring places × twice 64 rows. A patch is what it reads of 64 channels, 128 bytes for each
/// place.
inline constexpr int kTilePlaces = 256, kPatchChannels = 64;
inline constexpr int kMostPatches = 4;
/// Of the blocks of one warpgroup: as many as there is room for, as products wait for blocks more than for anything
/// else.
inline constexpr int kMostBlockStages = 6, kBlockStageBytes = 8192;
constexpr int block_stages(bool turned, bool rows) { return rows ? (turned ? 3 : 5) : 4; }
/// Images whose pixels are neighbours come in pieces of 64 pixels × 64 channels, to be turned. A patch is made of at
/// most kMostPieces, and has rows behind it for pixels that it does not have.
inline constexpr int kTurnStages = 3, kTurnBytes = 8192, kMostPieces = 16, kSpareRows = 16;
/// Where channels are neighbours, results leave 128 places at a time. Where pixels are, a warp's buffer has lines of a
/// tile's pixels, and slots for places that are none; lines lie so that eight of them meet all banks.
inline constexpr int kHalfPlaces = 128, kLineBytes = (kTilePlaces + 8) * 2;
/// Shared memory of an SM; of it, what kernels have as static variables (at most), and of the rest what is not patches:
/// the blocks of both warpgroups, pieces to be turned, both parts of the result, and alignment.
inline constexpr int kPatchShared = 227 * 1024;
constexpr int patch_static(bool turned, bool rows) { return (turned ? 5120 : 1024) + (rows ? 4096 : 1024); }
constexpr int patch_rest(bool turned, bool rows) {
  return 2 * block_stages(turned, rows) * kBlockStageBytes + (turned ? kTurnStages * kTurnBytes : 0) +
         (rows ? 4 * 8192 : 8 * 8 * kLineBytes) + 1024;
}

/// What one warpgroup multiplies at once: the blocks of 64 rows, and the patch (counted in its segment), the block of
/// channels in it, and the place in it where the kernel position begins.
inline constexpr int kShiftBits = 12, kColumnBits = 2;

/// The work of twice 64 rows on a tile: the channels with which their block rows begin, kNoChannel where there is none;
/// patches [patches, patches + patch_count) of 64 channels each; and the steps of both warpgroups.
inline constexpr int kNoChannel = 1 << 30;
struct PatchSegment {
  int rows[2][4], patches, patch_count, first[2], last[2];
};

/// All images as one line of places. An image is `rows` rows of `row` places, of which the first is pixel
/// (first_h, first_w): a margin of zeros where that is negative. The margin behind a row is the one before the next.
struct Line {
  int row, image;  ///< places
  int first_h, first_w;
  int images;
  Divisor by_row, by_image;
};

struct PatchParams {
  Map sparse;  ///< (unit axis, other axis of a block, packed block, 1)
  Map image;   ///< a column of places; or, to be turned, (pixel, channel, image, 1)
  const PatchSegment* segments;
  const int* channels;  ///< of patches, in units of 64
  const int* steps;     ///< (where it lies, then blocks from the top, −1 where there is none), a fixed number of each
  int segment_count, total, sparse_block, block_count;
  int tile_places;  ///< from a tile to the next
  Line line;
  int patch_count, patch_stride;     ///< the ring of patches
  int patch_columns, column_places;  ///< of a patch
  int in_height, in_width;
  Divisor by_width, by_pieces;  ///< of an image, where it is turned
  int width, height, rows;      ///< of the result
  Divisor by_out_width, by_pixels;
  void* out;
  int unit_n, unit_h, unit_w;  ///< its strides in units of 16 bytes, where channels are neighbours
  long long out_n, out_c;      ///< where pixels are
  const void* bias;
  long long bias_stride;
};

}  // namespace fretwork::block_conv
