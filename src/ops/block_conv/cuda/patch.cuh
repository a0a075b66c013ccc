// Convolution products on Hopper that load every pixel once for all kernel positions. All images form one line of
// places (padded positions: pixels and the zeros of the padding, see `Line`). A tile is 256 consecutive places (N) × 2
// · 64 output channels (M). Its patch is the input of the tile in 64 channels. A kernel position reads the same patch
// at another row offset, since a wgmma descriptor may begin at any row of a swizzled tile. Each of two consumer
// warpgroups has 64 rows of op(S) and walks its own columns, with zeros for absent blocks. Results at padding places
// are not stored. NCHW input is transposed in shared memory (`Turner`).
#pragma once

#include "blocks/kernel_wide.cuh"
#include "device/load.cuh"
#include "ops/block_conv/cuda/params_patch.cuh"

namespace fretwork::block_conv {

struct PatchShared {
  RingBarriers<kMostBlockStages> blocks[2];  ///< of each consumer warpgroup
  RingBarriers<kMostPatches> patches;
  RingBarriers<kTurnStages> pieces;
  u64 listed[2];                      ///< tables of a tile
  u32 words[2][kMostBlockStages][4];  ///< where the steps of a stage of blocks read
};

/// How NCHW pieces are transposed into the patch of a tile; the same for all channels. Column c of 16 bytes of a patch
/// row lies at (entry ^ c) · 16 bytes, which is the 128-byte swizzle.
struct alignas(16) TurnTable {
  u16 rows[kMostPieces][64];  ///< entry of pixel 32 · a + 8 · b + c of a piece, at 32 · a + 4 · c + b
  u32 margin[kMostPieces];    ///< a bit for each place of the padding
  int count;                  ///< of pieces

  static __device__ __forceinline__ u32 entry(int row) { return static_cast<u32>(row * 8 | row % 8); }
};

/// A stage of blocks is 64 rows × 64 of K: kSteps steps of kBlocks blocks each.
template <int kBlock>
struct Patch {
  static constexpr int kSteps = 64 / kBlock, kBlocks = 64 / kBlock, kStride = 1 + kBlocks;
  static constexpr int kLine = 2 * kBlock;  ///< bytes of a swizzled row
  static constexpr u32 kStepBytes = 64 * kLine, kBlockBytes = kBlock * kLine;
};

/// Place (u, v) of image n; a pixel of the result if u and v are inside it.
struct Place {
  int n, u, v;
};
__device__ __forceinline__ Place place_at(const Line& line, int place) {
  const int n = line.by_image.quotient(place), rest = place - n * line.image, u = line.by_row.quotient(rest);
  return {n, u, rest - u * line.row};
}
__device__ __forceinline__ int patch_places(const PatchParams& p) { return p.patch_columns * p.column_places; }

/// NCHW results: a tile begins with a pixel at a multiple of 16 bytes, the first at or behind `place`. Its index counts
/// the pixels of all images.
__device__ __forceinline__ int first_pixel(const PatchParams& p, int place) {
  Place at = place_at(p.line, place);
  if (at.v >= p.width) {
    at = {at.n, at.u + 1, 0};
  }
  const int pixels = p.width * p.height, pixel = (at.u * p.width + at.v + 7) & ~7;
  return min(at.n, p.line.images) * pixels + (at.n < p.line.images ? min(pixel, pixels) : 0);
}
/// The first place of a tile.
template <bool kRows>
__device__ __forceinline__ int first_place(const PatchParams& p, int index) {
  const int place = index / p.segment_count * p.tile_places;
  if constexpr (kRows) {
    return place;
  }
  const int pixel = first_pixel(p, place), n = p.by_pixels.quotient(pixel), rest = pixel - n * p.width * p.height;
  const int u = p.by_out_width.quotient(rest);
  return n * p.line.image + u * p.line.row + rest - u * p.width;
}

/// Loads the patches of a tile; one thread. The length of their ring is a launch parameter.
__device__ __forceinline__ void fetch_patches(const PatchParams& p, int index, int first, PatchShared& shared, u32 base,
                                              Producer<0>& at) {
  const PatchSegment& s = p.segments[index % p.segment_count];
  for (int i = 0; i < s.patch_count; ++i, at.next(p.patch_count)) {
    const int channel = __ldg(p.channels + s.patches + i) * kPatchChannels;
    const u32 full = shared.patches.acquire(at);
    mbarrier::arrive_expect(full, patch_places(p) * 128);
    for (int column = 0; column < p.patch_columns; ++column) {
      const Place place = place_at(p.line, first + column * p.column_places);
      tma::load_pixels(base + at.stage * p.patch_stride + column * p.column_places * 128, &p.image, full, channel,
                       place.v + p.line.first_w, place.u + p.line.first_h, place.n, 0, 0);
    }
  }
}

/// The first pixel of x at or behind a place of an image.
__device__ __forceinline__ int pixel_from(const PatchParams& p, int place) {
  const Line& line = p.line;
  const int row = line.by_row.quotient(place), h = row + line.first_h, w = place - row * line.row + line.first_w;
  return h < 0 ? 0 : min(h, p.in_height) * p.in_width + (h < p.in_height ? min(max(w, 0), p.in_width) : 0);
}

/// The pieces of a patch that begins at place `first`: 64 consecutive pixels of an image each, image by image. Those of
/// the first image begin at pixel `start`, those of others at pixel 0.
struct Pieces {
  int n, start, first_count, per_image;
  int last, to;  ///< the last image, and the end of its pixels

  __device__ __forceinline__ Pieces(const PatchParams& p, int first)
      : n(p.line.by_image.quotient(first)), per_image((p.in_width * p.in_height + 63) / 64) {
    const int end = first + patch_places(p), image = p.line.image;
    start = pixel_from(p, first - n * image) & ~7;
    first_count = (p.in_width * p.in_height - start + 63) / 64;
    last = min(p.line.by_image.quotient(end - 1), p.line.images - 1);
    to = pixel_from(p, min(end - last * image, image));
  }
  /// 64 · piece + index within the piece, of a pixel of an image.
  __device__ __forceinline__ int at(int image, int pixel) const {
    return image == n ? pixel - start : (first_count + (image - n - 1) * per_image) * 64 + pixel;
  }
  __device__ __forceinline__ int count() const { return last < n ? 0 : (at(last, to) + 63) / 64; }
};

/// Loads the NCHW pieces of a tile; one thread.
__device__ __forceinline__ void fetch_pieces(const PatchParams& p, int index, int first, PatchShared& shared,
                                             u32 pieces, Producer<kTurnStages>& at) {
  const PatchSegment& s = p.segments[index % p.segment_count];
  const Pieces all(p, first);
  for (int i = 0; i < s.patch_count; ++i) {
    const int channel = __ldg(p.channels + s.patches + i) * kPatchChannels;
    for (int n = all.n; n <= all.last; ++n) {
      const int to = n == all.last ? all.to : p.in_width * p.in_height;
      for (int pixel = n == all.n ? all.start : 0; pixel < to; pixel += 64, at.next()) {
        const u32 full = shared.pieces.acquire(at);
        mbarrier::arrive_expect(full, kTurnBytes);
        tma::load(pieces + at.stage * kTurnBytes, &p.image, full, pixel, channel, n, 0);
      }
    }
  }
}

/// Computes the table of a tile; all threads of the consumer warpgroups. Pixels outside the patch are sent to spare
/// rows behind it.
__device__ __forceinline__ void list_turns(const PatchParams& p, int first, TurnTable& table) {
  const Line& line = p.line;
  const Pieces pieces(p, first);
  const int thread = static_cast<int>(threadIdx.x) - 128, end = patch_places(p), count = pieces.count();
  const int origin = -line.first_h * line.row - line.first_w - first;  // the place of pixel (0, 0) of image 0
#pragma unroll 1
  for (int from = 0; from < count * 64; from += 256) {
    const int at = from + thread, behind = at / 64 - pieces.first_count, of = p.by_pieces.quotient(max(behind, 0));
    const int n = behind < 0 ? pieces.n : pieces.n + 1 + of;
    const int pixel = behind < 0 ? pieces.start + at : (behind - of * pieces.per_image) * 64 + at % 64;
    const int h = p.by_width.quotient(pixel), row = origin + n * line.image + pixel + h * (line.row - p.in_width);
    const bool inside = h < p.in_height && row >= 0 && row < end;
    if (at < count * 64) {
      table.rows[at / 64][at % 64 / 32 * 32 + at % 8 * 4 + at / 8 % 4] =
          static_cast<u16>(TurnTable::entry(inside ? row : end + at / 32 % 2 * 8 + at % 8));
    }
  }
#pragma unroll 1
  for (int from = 0; from < end; from += 256) {
    const int place = from + thread;
    const Place at = place_at(line, first + place);
    const int h = at.u + line.first_h, w = at.v + line.first_w;
    const bool pixel = at.n < line.images && h >= 0 && h < p.in_height && w >= 0 && w < p.in_width;
    const u32 margin = __ballot_sync(~0u, place < end && !pixel);
    if (thread % 32 == 0) {
      table.margin[place / 32] = margin;
    }
  }
  if (thread == 0) {
    table.count = count;
  }
}

/// Transposes pieces into the patches of a tile; two warps, each 32 of the 64 pixels of a piece.
struct Turner {
  u32 base, pieces, half;
  const TurnTable* tables;
  Producer<0> patches;
  Consumer<kTurnStages> turns;
  Consumer<2> lists;

  /// Transposes half a piece. `rows` has the table entries of pixels lane % 8 + 8 · i.
  __device__ __forceinline__ void turn(u32 piece, u32 patch, uint2 rows) const {
    const u32 lane = threadIdx.x % 32, from = piece + lane * 128, column = half * 4 ^ lane % 8;
    u32 r[8][4], to[4];
#pragma unroll
    for (u32 n = 0; n < 8; ++n) {  // 8 pixels × 32 channels
      wgmma::load_pieces_transposed(r[n], from + (column ^ n / 2) * 16 + n % 2 * 4096);
    }
#pragma unroll
    for (u32 i = 0; i < 4; ++i) {
      to[i] = patch + (((i < 2 ? rows.x : rows.y) >> i % 2 * 16 & 0xffff) ^ lane / 8) * 16;
    }
#pragma unroll
    for (u32 n = 0; n < 8; ++n) {
      wgmma::store_pieces(to[n / 2] ^ n % 2 * 64, r[n][0], r[n][1], r[n][2], r[n][3]);
    }
  }
  __device__ __forceinline__ void run(const PatchParams& p, int index, PatchShared& shared) {
    const int patch_count = p.segments[index % p.segment_count].patch_count;
    if (patch_count == 0) {
      return;
    }
    const u32 lane = threadIdx.x % 32;
    mbarrier::wait(shared_address(&shared.listed[lists.stage]), lists.parity);
    const TurnTable& table = tables[lists.stage];
    const u16* const rows = table.rows[0] + half * 32 + lane % 8 * 4;
    const int count = table.count;
    u32 margin = 0;  // the padding among the lane's places
    for (u32 i = 0, place = half * 32; place < static_cast<u32>(patch_places(p)); ++i, place += 64) {
      margin |= (table.margin[place / 32] >> lane & 1) << i;
    }
    for (int i = 0; i < patch_count; ++i, patches.next(p.patch_count)) {
      const u32 patch = base + patches.stage * p.patch_stride, full = shared.patches.acquire(patches);
      for (u32 left = margin; left != 0; left &= left - 1) {
        const u32 place = (__ffs(static_cast<int>(left)) - 1) * 64 + half * 32 + lane;
        for (u32 unit = 0; unit < 8; ++unit) {
          store_shared_128(patch + place * 128 + unit * 16, {0, 0, 0, 0});
        }
      }
      uint2 next = *reinterpret_cast<const uint2*>(rows);
      for (int piece = 0; piece < count; ++piece, turns.next()) {
        const uint2 now = next;
        next = *reinterpret_cast<const uint2*>(rows + min(piece + 1, count - 1) * 64);
        shared.pieces.wait(turns);
        turn(pieces + turns.stage * kTurnBytes, patch, now);
        shared.pieces.release(static_cast<int>(turns.stage));
      }
      fence_async_proxy();
      __syncwarp();
      if (lane == 0) {
        mbarrier::arrive(full);
      }
    }
    lists.next();
  }
};

/// The position of one warpgroup in its steps.
struct StepWalk {
  int turn = -1, at = 0, last = 0;

  /// Moves to the next tile at the end of this one. Returns whether there is a step.
  __device__ __forceinline__ bool find(const PatchParams& p, int warpgroup) {
    while (at >= last) {
      if (++turn * static_cast<int>(gridDim.x) >= p.total) {
        return false;
      }
      if (const int index = blocks::turn_tile(turn); index < p.total) {
        const PatchSegment& s = p.segments[index % p.segment_count];
        at = warpgroup == 0 ? s.first[0] : s.first[1];
        last = warpgroup == 0 ? s.last[0] : s.last[1];
      }
    }
    return true;
  }
};

/// Loads the blocks of all tiles; one warp. Each half-warp serves one consumer warpgroup, with one lane per block of a
/// stage, and the halves advance independently. An absent block is a box outside the tensor, which TMA fills with
/// zeros.
template <int kBlock, int kStages>
__device__ __forceinline__ void fetch_blocks(const PatchParams& p, PatchShared& shared, u32 blocks) {
  using P = Patch<kBlock>;
  const int warpgroup = static_cast<int>(threadIdx.x) % 32 / 16, lane = static_cast<int>(threadIdx.x) % 16;
  const int step = lane / P::kBlocks, row = lane % P::kBlocks;
  const bool used = lane < P::kSteps * P::kBlocks;
  RingBarriers<kMostBlockStages>& ring = shared.blocks[warpgroup];
  Producer<kStages> at;
  StepWalk walk;
  bool more = walk.find(p, warpgroup);
  while (__any_sync(~0u, more)) {
    const bool mine = more && used && walk.at + step < walk.last;
    const int* const from = p.steps + static_cast<i64>(walk.at + step) * P::kStride;
    const int block = mine ? __ldg(from + 1 + row) : -1;
    const u32 where = mine ? static_cast<u32>(__ldg(from)) : ~0u;
    bool ready;
    do {
      ready = more && ring.is_free(at);
      ready = __shfl_sync(~0u, static_cast<int>(ready), warpgroup * 16) != 0;
    } while (!__any_sync(~0u, ready));
    if (ready) {
      const u32 full = shared_address(&ring.full[at.stage]), half = 0xffffu << 16 * warpgroup;
#pragma unroll
      for (int i = 0; i < P::kSteps; ++i) {  // by the lane that waited for the stage
        const u32 word = __shfl_sync(half, where, warpgroup * 16 + i * P::kBlocks);
        if (lane == 0) {
          shared.words[warpgroup][at.stage][i] = word;
        }
      }
      __syncwarp(half);
      if (lane == 0) {
        mbarrier::arrive_expect(full, min(P::kSteps, walk.last - walk.at) * P::kStepBytes);
      }
      __syncwarp(half);
      if (mine) {
        const u32 to =
            blocks + (warpgroup * kStages + at.stage) * kBlockStageBytes + step * P::kStepBytes + row * P::kBlockBytes;
        tma::load(to, &p.sparse, full, 0, 0, block >= 0 ? block * p.sparse_block : p.block_count, 0);
      }
      walk.at += P::kSteps;
      at.next();
      more = walk.find(p, warpgroup);
    }
    __syncwarp();
  }
}

/// The position of one warpgroup in the patches of a segment. It waits for every patch before it releases it, even for
/// those it does not need. Otherwise the release would count for the previous use of that buffer.
struct PatchWalk {
  Consumer<0>& patches;
  int at = 0;
  bool here = false;  ///< patch `at` has arrived

  /// Releases patches up to `wanted`. No product that reads them may be in flight.
  __device__ __forceinline__ void release_to(int wanted, const PatchParams& p, PatchShared& shared) {
    for (; at < wanted; ++at, patches.next(p.patch_count)) {
      wait(shared);
      shared.patches.release(static_cast<int>(patches.stage));
      here = false;
    }
  }
  __device__ __forceinline__ void wait(PatchShared& shared) {
    if (!here) {
      shared.patches.wait(patches);
      here = true;
    }
  }
};

/// Multiplies the steps of one warpgroup. A patch is released when all products that read it are done.
template <typename T, int kBlock, int kPlaces, bool kSparseK, int kStages>
__device__ __forceinline__ void patch_multiply(float (&d)[128], const PatchParams& p, const PatchSegment& s,
                                               PatchShared& shared, u32 base, u32 blocks, Consumer<kStages>& at,
                                               Consumer<0>& patches, int warpgroup) {
  using P = Patch<kBlock>;
  using wgmma::Major;
  constexpr Major kA = kSparseK ? Major::k : Major::mn;
  const int steps = warpgroup == 0 ? s.last[0] - s.first[0] : s.last[1] - s.first[1];
  PatchWalk walk{patches};
  multiply_stages(shared.blocks[warpgroup], at, (steps + P::kSteps - 1) / P::kSteps, [&](u32 stage) {
#pragma unroll
    for (int i = 0; i < P::kSteps; ++i) {
      // Read by lane 0, which also releases the stage.
      const u32 where = __shfl_sync(~0u, threadIdx.x % 32 == 0 ? shared.words[warpgroup][stage][i] : 0u, 0);
      if (where == ~0u) {
        continue;
      }
      const int wanted = static_cast<int>(where >> (kShiftBits + kColumnBits));
      if (walk.at != wanted) {
        wgmma::commit();
        wgmma::wait<0>();
        walk.release_to(wanted, p, shared);
      }
      walk.wait(shared);
      const u32 row = where & ((1u << kShiftBits) - 1);
      const u32 column = where >> kShiftBits & ((1u << kColumnBits) - 1);
      const u64 a = wgmma::descriptor<P::kLine>(blocks + stage * kBlockStageBytes + i * P::kStepBytes, P::kBlockBytes);
      const u64 b = wgmma::descriptor<128>(base + patches.stage * p.patch_stride + row * 128 + column * P::kLine);
      wgmma::fence();
#pragma unroll
      for (int q = 0; q < kBlock / 16; ++q) {
        wgmma::multiply<T, kPlaces, kA, Major::k>(d, a + q * wgmma::kNextK<P::kLine, kA>, b + q * 2);
      }
    }
    return true;
  });
  walk.release_to(s.patch_count, p, shared);
}

/// The output channel of one of a warpgroup's 64 rows; `rows` has the first channel of each block row. Values from
/// kNoChannel on mean none.
template <int kBlock>
__device__ __forceinline__ int channel_of(const int* rows, int row) {
  return __ldg(rows + row / kBlock) + row % kBlock;
}

/// Computes the offsets of a tile's places in a channels-last result, in units of 16 bytes; −1 for padding.
template <int kPlaces>
__device__ __forceinline__ void list_places(const PatchParams& p, int* table, int first) {
#pragma unroll
  for (int from = 0; from < kTilePlaces; from += 128) {
    const int place = from + static_cast<int>(threadIdx.x) % 128;
    const Place at = place_at(p.line, first + place);
    const bool pixel = place < kPlaces && at.n < p.line.images && at.u < p.height && at.v < p.width;
    table[place] = pixel ? at.n * p.unit_n + at.u * p.unit_h + at.v * p.unit_w : -1;
  }
}

/// Stores a warpgroup's accumulators to a channels-last result, 128 places at a time, 16 bytes per thread. TMA cannot
/// do this: a box must not begin before a row of the image.
template <typename T, int kBlock, int kHalf = 0>
__device__ __forceinline__ void store_rows(const float (&d)[128], const PatchParams& p, u32 buffer, const int* table,
                                           u32 barrier, const int* rows) {
  const int thread = static_cast<int>(threadIdx.x) % 128;
  named_barrier(barrier, 128);
  write_piece<T, true, 2 * kHalf>(d, buffer);
  write_piece<T, true, 2 * kHalf + 1>(d, buffer + kPieceBytes);
  named_barrier(barrier, 128);
  const int unit = thread % 8, channel = channel_of<kBlock>(rows, unit * 8);
  constexpr int kTimes = kHalfPlaces / 16;
  int to[kTimes];
  u32 words[kTimes][4];
#pragma unroll
  for (int i = 0; i < kTimes; ++i) {
    const int place = thread / 8 + 16 * i;
    to[i] = table[kHalf * kHalfPlaces + place];
    load_shared_128(words[i], buffer + place / 64 * kPieceBytes + tma::swizzled<128>(place % 64 * 128 + unit * 16));
  }
#pragma unroll
  for (int i = 0; i < kTimes; ++i) {
    if (to[i] >= 0 && channel < p.rows) {
      store_words<4>(static_cast<T*>(p.out) + (static_cast<i64>(to[i]) * 8 + channel), words[i]);
    }
  }
  if constexpr (kHalf == 0) {
    store_rows<T, kBlock, 1>(d, p, buffer, table, barrier, rows);
  }
}

/// Computes the byte offset of each pair of accumulators in a line of pixels, which begins at the tile's first pixel:
/// places 8 · j + 2 · i and the next are in table[32 · i + j]. Rows have an even number of places and of pixels, so
/// both are pixels or both are padding. Padding, and pixels of the next tile, go to spare slots.
__device__ __forceinline__ void list_slots(const PatchParams& p, u16* table, int first, int2 pixels) {
  const int pair = static_cast<int>(threadIdx.x) % 128, i = pair % 4;
  const Place at = place_at(p.line, first + 2 * pair);
  const int slot = (at.n * p.height + at.u) * p.width + at.v - pixels.x;
  const bool pixel = at.u < p.height && at.v < p.width && slot < pixels.y - pixels.x;
  table[32 * i + pair / 4] = static_cast<u16>(2 * (pixel ? slot : kTilePlaces + 2 * i));
}

/// Stores a warpgroup's accumulators to an NCHW result. Each warp has a buffer for eight of its 16 channels: first rows
/// 0 to 7, then rows 8 to 15 (kHalf). Each lane stores 16 bytes of every channel.
template <typename T, int kBlock, int kHalf = 0>
__device__ __forceinline__ void store_lines(const float (&d)[128], const PatchParams& p, u8* lines, const u16* table,
                                            const int* rows, int2 pixels) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  u8* const line = lines + lane / 4 * kLineBytes;
  u32 slots[16];  // read at once: the compiler cannot know that stores do not change the table
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint4 four = *reinterpret_cast<const uint4*>(table + lane % 4 * 32 + i * 8);
    slots[4 * i] = four.x;
    slots[4 * i + 1] = four.y;
    slots[4 * i + 2] = four.z;
    slots[4 * i + 3] = four.w;
  }
#pragma unroll
  for (int j = 0; j < 32; ++j) {
    const u32 slot = slots[j / 2] >> j % 2 * 16 & 0xffff;
    *reinterpret_cast<u32*>(line + slot) = narrow_pair<T>(d[4 * j + 2 * kHalf], d[4 * j + 2 * kHalf + 1]);
  }
  __syncwarp();
  u32 words[8][4];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    load_shared_128(words[i], shared_address(lines) + i * kLineBytes + lane * 16);
  }
  const int channel = channel_of<kBlock>(rows, static_cast<int>(threadIdx.x) % 128 / 32 * 16) + kHalf * 8;
  const int pixel = pixels.x + lane * 8, n = p.by_pixels.quotient(pixel);
  if (pixel < pixels.y && channel < p.rows) {  // p.rows is a multiple of 16
    T* to = static_cast<T*>(p.out) + n * p.out_n + channel * p.out_c + pixel - n * p.width * p.height;
#pragma unroll
    for (int i = 0; i < 8; ++i, to += p.out_c) {
      store_words<4>(to, words[i]);
    }
  }
  __syncwarp();
  if constexpr (kHalf == 0) {
    store_lines<T, kBlock, 1>(d, p, lines, table, rows, pixels);
  }
}

/// kPlaces: of a tile. kSparseK: K is the contiguous axis of op(S)'s blocks. kTurned: x is NCHW and transposed in
/// shared memory. kRows: the result is channels-last.
template <typename T, int kBlock, int kPlaces, bool kSparseK, bool kTurned, bool kRows>
struct PatchConv {
  static constexpr int kStages = block_stages(kTurned, kRows);
  static constexpr Roles kRoles{.consumers = 2, .producer_registers = 72, .consumer_registers = 216};
  using Slots = u16[2][2][kRows ? 8 : kTilePlaces / 2];  ///< tables of this tile and the previous one
  using Places = int[2][2][kRows ? kTilePlaces : 1];
  using Turns = TurnTable[kTurned ? 2 : 1];
  const PatchParams& p;
  PatchShared& shared;
  Slots& slots;
  Places& places;
  Turns& turns;
  u8* raw;
  u32 base, blocks_at, pieces;

  __device__ __forceinline__ void produce() const {
    const int warp = uniform(threadIdx.x / 32);
    if (threadIdx.x == 0) {
      Producer<0> patches;
      Producer<kTurnStages> turned;
      blocks::each_tile(p.total, [&](int index, int) {
        const int first = first_place<kRows>(p, index);
        kTurned ? fetch_pieces(p, index, first, shared, pieces, turned)
                : fetch_patches(p, index, first, shared, base, patches);
      });
    } else if (warp == 1) {
      fetch_blocks<kBlock, kStages>(p, shared, blocks_at);
    } else if (kTurned && warp >= 2) {
      Turner turner{base, pieces, static_cast<u32>(warp) - 2, turns};
      blocks::each_tile(p.total, [&](int index, int) { turner.run(p, index, shared); });
    }
  }

  /// Computes the transposition table of tile number `turn`, if there is one and it has patches.
  __device__ __forceinline__ void list(int turn, Ring<2>& lists) const {
    const int index = blocks::turn_tile(turn);
    if (kTurned && turn * static_cast<int>(gridDim.x) < p.total && index < p.total &&
        p.segments[index % p.segment_count].patch_count > 0) {
      list_turns(p, first_place<kRows>(p, index), turns[kTurned ? lists.stage : 0]);
      mbarrier::arrive(shared_address(&shared.listed[lists.stage]));
      lists.next();
    }
  }

  __device__ __forceinline__ void consume() const {
    const int warpgroup = uniform(threadIdx.x / 128) - 1;
    const u32 own = blocks_at + warpgroup * kStages * kBlockStageBytes;
    const u32 results = pieces + (kTurned ? kTurnStages * kTurnBytes : 0);
    const u32 buffer = results + (kRows ? warpgroup * 2 * kPieceBytes : (threadIdx.x / 32 - 4) * 8 * kLineBytes);
    Consumer<kStages> at;
    Consumer<0> patches;
    Ring<2> lists(0);
    list(0, lists);
    blocks::each_tile(p.total, [&](int index, int turn) {
      const PatchSegment& s = p.segments[index % p.segment_count];
      const int first = first_place<kRows>(p, index), parity = turn % 2;
      list(turn + 1, lists);  // overwrites the table of the previous tile, whose patches have all been used
      int2 pixels{};
      if constexpr (kRows) {
        list_places<kPlaces>(p, places[warpgroup][parity], first);
      } else {
        const int place = index / p.segment_count * p.tile_places;
        pixels = {first_pixel(p, place), first_pixel(p, place + p.tile_places)};
        list_slots(p, slots[warpgroup][parity], first, pixels);
      }
      float d[128];
      clear(d);
      patch_multiply<T, kBlock, kPlaces, kSparseK>(d, p, s, shared, base, own, at, patches, warpgroup);
      if (p.bias != nullptr) {
        const int warp_row = static_cast<int>(threadIdx.x) / 32 % 4 * 16;
        blocks::wide_add_bias<T>(d, p, channel_of<kBlock>(s.rows[warpgroup], warp_row) - warp_row);
      }
      if constexpr (kRows) {
        store_rows<T, kBlock>(d, p, buffer, places[warpgroup][parity], 1 + warpgroup, s.rows[warpgroup]);
      } else {
        named_barrier(1 + warpgroup, 128);  // the table is complete, and no thread reads the other one
        store_lines<T, kBlock>(d, p, raw + (buffer - shared_address(raw)), slots[warpgroup][parity], s.rows[warpgroup],
                               pixels);
      }
    });
  }
};

template <typename T, int kBlock, int kPlaces, bool kSparseK, bool kTurned, bool kRows>
__global__ void __launch_bounds__(blocks::kThreads, 1) patch(const __grid_constant__ PatchParams p) {
  using Kernel = PatchConv<T, kBlock, kPlaces, kSparseK, kTurned, kRows>;
  extern __shared__ u8 raw[];
  __shared__ __align__(16) PatchShared shared;
  __shared__ __align__(16) typename Kernel::Slots slots;
  __shared__ typename Kernel::Places places;
  __shared__ __align__(16) typename Kernel::Turns turns;
  init_barriers([&] {
    for (auto& ring : shared.blocks) {
      ring.make(1, 4);
    }
    shared.patches.make(kTurned ? 2 : 1, 8);
    shared.pieces.make(1, 2);
    for (u64& listed : shared.listed) {
      mbarrier::init(shared_address(&listed), 256);
    }
  });
  const u32 base = stages_in(raw), blocks_at = base + p.patch_count * p.patch_stride;
  const u32 pieces = blocks_at + 2 * Kernel::kStages * kBlockStageBytes;
  run_warp_specialized(Kernel{p, shared, slots, places, turns, raw, base, blocks_at, pieces});
}

}  // namespace fretwork::block_conv
