// What the Hopper block kernels share: the order of tiles, the ring, partial sums, and loads and stores of images.
#pragma once

#include "blocks/params.cuh"
#include "device/epilogue.cuh"
#include "device/mma.cuh"
#include "device/pipeline.cuh"
#include "device/tma.cuh"
#include "device/wgmma.cuh"

namespace fretwork::blocks {

inline constexpr u32 kStages = 4, kStageBytes = 49152;

/// The tile of a CTA in wave number `turn` of the persistent loop. Odd waves run backwards, so that no CTA always gets
/// the longest tile.
__device__ __forceinline__ int turn_tile(int turn) {
  const int place = (turn & 1) != 0 ? static_cast<int>(gridDim.x - 1 - blockIdx.x) : static_cast<int>(blockIdx.x);
  return turn * static_cast<int>(gridDim.x) + place;
}

/// Calls body(index, turn) for the tiles of this CTA.
template <typename Body>
__device__ __forceinline__ void each_tile(int total, Body body) {
  for (int turn = 0; turn * static_cast<int>(gridDim.x) < total; ++turn) {
    if (const int index = turn_tile(turn); index < total) {
      body(index, turn);
    }
  }
}

/// The ring of a CTA, and for each stage which blocks are in it.
struct Stages {
  RingBarriers<kStages> ring;
  u32 flags[kStages][4];
};

struct SpmmTile {
  Segment segment;
  int place, tile, h, z, partial;
};

/// The order of tiles, outermost first: batches, sets of `share` segments, the free dimension, the segments of a set.
/// CTAs that run at the same time share strips of the dense operand in L2.
__device__ __forceinline__ SpmmTile spmm_tile(const SpmmParams& p, int index) {
  const int per_batch = p.segment_count * p.tiles;
  const int batch = index / per_batch, rest = index % per_batch;
  const int set = rest / (p.share * p.tiles), in_set = rest % (p.share * p.tiles);
  const int wide = min(p.share, p.segment_count - set * p.share);
  const int4 s = __ldg(reinterpret_cast<const int4*>(p.segments) + set * p.share + in_set % wide);
  SpmmTile t{{s.x, s.y, s.z, s.w}, s.x % p.groups_per_head, in_set / wide, 0, 0, 0};
  t.h = s.x / p.groups_per_head + batch % p.batches.heads;
  t.z = batch / p.batches.heads;
  t.partial = (batch * p.tiles + t.tile) * p.partial_count + s.w;
  return t;
}

/// Stores the accumulators of a segment that is part of a split group, in the order in which threads hold them.
template <int kConsumers, int kSize>
__device__ __forceinline__ void store_partial(const float (&d)[kSize], float* partials, int index) {
  float* to = partials + static_cast<i64>(index) * (kSize * kConsumers) + (threadIdx.x - 128);
#pragma unroll
  for (int i = 0; i < kSize; ++i) {
    to[i * kConsumers] = d[i];
  }
}

/// A pixel of a result.
struct Pixel {
  int n, u, v;
};
__device__ __forceinline__ Pixel pixel_at(const Pixels& p, int index) {
  const int n = index / p.per_image, rest = index - n * p.per_image, u = rest / p.per_row;
  return {n, u, rest - u * p.per_row};
}

/// Loads the channels from `channel` on of the pixels from `at` on, shifted by the offset in a step's column.
__device__ __forceinline__ void load_pixels(u32 to, const Map* map, u32 full, const Pixels& p, const Pixel& at,
                                            int channel, int column) {
  const u16 right = static_cast<u16>(column >> kChannelBits & ((1 << kOffsetBits) - 1));
  const u16 down = static_cast<u16>(column >> (kChannelBits + kOffsetBits));
  tma::load_pixels(to, map, full, channel, at.v * p.mul_w + p.first_w, at.u * p.mul_h + p.first_h, at.n, right, down);
}
__device__ __forceinline__ int channel_block(int column) { return column & (kMostChannelBlocks - 1); }

/// Stores a piece of 64 rows × 64 pixels from shared memory; the threads of a warpgroup. A line of the piece is a pixel
/// of 64 channels (kRows), or a channel of 64 pixels.
template <typename T, bool kRows>
__device__ __forceinline__ void store_image(const SpmmParams& p, u32 piece, int row, int free) {
  const ImageOut& out = p.image;
  T* const data = static_cast<T*>(out.data);
#pragma unroll 1
  for (int id = static_cast<int>(threadIdx.x) % 128; id < 512; id += 128) {
    const int line = id / 8, unit = id % 8 * 8;
    const int channel = row + (kRows ? unit : line), pixel = free + (kRows ? line : unit);
    if (channel >= p.rows || pixel >= p.free) {
      continue;
    }
    u32 words[4];
    load_shared_128(words, piece + tma::swizzled<128>(line * 128 + unit * 2));
    const Pixel first = pixel_at(p.pixels, pixel);
    T* const to = data + first.n * out.n + first.u * out.h + first.v * out.w + channel * out.c;
    if (out.vector != 0) {
      *reinterpret_cast<uint4*>(to) = make_uint4(words[0], words[1], words[2], words[3]);
      continue;
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const T value = __builtin_bit_cast(T, static_cast<u16>(words[i / 2] >> 16 * (i % 2)));
      if constexpr (kRows) {
        if (channel + i < p.rows) {
          to[i * out.c] = value;
        }
      } else if (pixel + i < p.free) {
        const Pixel at = pixel_at(p.pixels, pixel + i);
        data[at.n * out.n + at.u * out.h + at.v * out.w + channel * out.c] = value;
      }
    }
  }
}

/// Stores the accumulators of a warpgroup to NCHW images, in pieces of 64 rows × 64 pixels. TMA stores a piece if it
/// can; threads do otherwise, and if a piece belongs to two images. where(piece) is its first row and pixel.
template <typename T, bool kTransposed, int kBuffers, int kPiece = 0, int kSize, typename Where>
__device__ __forceinline__ void store_nchw(const float (&d)[kSize], const SpmmParams& p, u32 buffers, u32 barrier,
                                           Where where) {
  if constexpr (kPiece < pieces_of<T, kSize>) {
    const int2 at = where(kPiece);
    const int n = at.y / p.pixels.per_image, pixel = at.y - n * p.pixels.per_image;
    const bool box = p.image.lines != 0 && pixel + 64 <= p.pixels.per_image;
    store_in_turn<kBuffers>(
        kPiece, buffers, barrier, [&](u32 buffer) { write_piece<T, kTransposed, kPiece>(d, buffer); },
        [&](u32 buffer) {
          if (box && at.y < p.free) {
            tma::store(&p.out, buffer, pixel, at.x, n, 0);
          }
        });
    if (!box) {
      store_image<T, false>(p, buffers + kPiece % kBuffers * kPieceBytes, at.x, at.y);
    }
    store_nchw<T, kTransposed, kBuffers, kPiece + 1>(d, p, buffers, barrier, where);
  }
}

}  // namespace fretwork::blocks
