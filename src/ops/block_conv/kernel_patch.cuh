// Blocks of 16 and 32 over images, on Hopper: a CTA computes a rectangle of up to 192 pixels × 192 rows. It fetches
// what the rectangle reads of 64 channels once, edges included, and every kernel position reads it there, some rows
// further: nine times fewer bytes than a column of pixels for each position of a 3 × 3 kernel. The pixels are M, as in
// spmm_narrow, and go to registers by ldmatrix, which can begin at any row.
#pragma once

#include "blocks/kernel_narrow.cuh"
#include "ops/block_conv/params_patch.cuh"

namespace fretwork::block_conv {

using blocks::kNarrow;
using blocks::Narrow;

struct PatchBarriers {
  u64 full[kBlockStages], empty[kBlockStages];
  u64 patch_full[kPatches], patch_empty[kPatches];
  u32 flags[kBlockStages][4];
};

/// What consumers read of a step: its blocks as bits, and above them where it lies.
inline constexpr u32 kMaskBits = 12, kNewPatch = 1u << 31;

struct PatchTile {
  int place, first, last, n, y, x;
};

__device__ __forceinline__ PatchTile patch_tile(const PatchParams& p, int index) {
  const int4 s = __ldg(reinterpret_cast<const int4*>(p.segments) + index % p.segment_count);
  const int tile = index / p.segment_count, row = tile / p.tiles_w;
  return {s.x, s.y, s.z, row / p.tiles_h, row % p.tiles_h * p.tile_h, tile % p.tiles_w * p.tile_w};
}

/// Fetches blocks as narrow_fetch does. The first warp fetches patches too, after it has said what its stage holds:
/// consumers may have to get there to free one.
template <int kBlock>
__device__ __forceinline__ void patch_fetch(const PatchParams& p, const PatchTile& t, PatchBarriers& barriers, u32 base,
                                            Ring<kBlockStages>& ring, Ring<kPatches>& patches) {
  using N = Narrow<kBlock>;
  constexpr int kPerColumn = 4 / N::kColumns;
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = uniform(threadIdx.x / 32);
  const int column = warp / kPerColumn, part = warp % kPerColumn;
  constexpr u32 kAll = (1u << N::kRows) - 1, kFirst = (1u << N::kRows / kPerColumn) - 1;
  const u32 mine = kFirst << part * (N::kRows / kPerColumn);
  // Lane r < kRows reads the block of row r; the lanes behind read numbers of steps: of this warp's column, of the one
  // before it, and of all columns of the stage.
  constexpr int kOwn = N::kRows, kBefore = kOwn + 1, kStage = kOwn + 2;
  const int place = lane == kBefore ? column - 1 : lane >= kStage ? lane - kStage : column;
  const auto entry = [&](int first) {
    const int k = first + place;
    const bool inside = k >= t.first && k < t.last && lane < kStage + N::kColumns;
    return inside ? __ldg(p.steps + static_cast<i64>(k) * p.stride + (lane < kOwn ? lane + 1 : 0)) : -1;
  };
  constexpr int kBelow = kShiftBits + kColumnBits;
  int ahead = entry(t.first), later = entry(t.first + N::kColumns), before = -1;
  for (int k = t.first; k < t.last; k += N::kColumns, ring.next()) {
    const int now = ahead;
    ahead = later;
    later = entry(k + 2 * N::kColumns);
    const u32 mask = __ballot_sync(~0u, now >= 0) & kAll;
    const int own = __shfl_sync(~0u, now, kOwn), previous = __shfl_sync(~0u, now, kBefore);
    const u32 full = shared_address(&barriers.full[ring.stage]);
    const u32 at = base + kPatches * kPatchBytes + ring.stage * kBlockStageBytes;
    mbarrier::wait(shared_address(&barriers.empty[ring.stage]), ring.parity);
    if (lane == 0) {
      if (part == 0) {
        const u32 fresh = own >> kBelow != previous >> kBelow ? kNewPatch : 0;
        const u32 lies = (static_cast<u32>(own) & ((1u << kBelow) - 1)) << kMaskBits;
        barriers.flags[ring.stage][column] = mask == 0 ? 0 : mask | lies | fresh;
      }
      mbarrier::arrive_expect(full, __popc(mask & mine) * N::kBlockBytes);
    }
    __syncwarp();
    if (now >= 0 && (mine >> lane & 1) != 0) {
      tma::load(at + (column * N::kRows + lane) * N::kBlockBytes, &p.sparse, full, 0, 0, now * p.sparse_block, 0);
    }
    if (warp == 0) {
#pragma unroll
      for (int c = 0; c < N::kColumns; ++c) {
        const int step = __shfl_sync(~0u, now, kStage + c), channels = step >> kBelow;
        if (step >= 0 && channels != before) {
          before = channels;
          if (lane == 0) {
            const u32 arrived = shared_address(&barriers.patch_full[patches.stage]);
            mbarrier::wait(shared_address(&barriers.patch_empty[patches.stage]), patches.parity);
            mbarrier::arrive_expect(arrived, p.patch_bytes);
            tma::load(base + patches.stage * kPatchBytes, &p.image, arrived, channels * 64, t.x * p.mul_w + p.first_w,
                      t.y * p.mul_h + p.first_h, t.n);
          }
          patches.next();
        }
      }
      __syncwarp();
    }
  }
}

/// Multiplies the stages of one tile. `row`: the row of a patch that this lane's pixel reads at the first position.
template <typename T, int kBlock, bool kSparseK>
__device__ __forceinline__ void patch_multiply(float (&d)[kNarrow / 2], int stages, PatchBarriers& barriers, u32 base,
                                               Ring<kBlockStages>& ring, Ring<kPatches>& patches, u32 row) {
  using N = Narrow<kBlock>;
  const u32 half = threadIdx.x % 32 / 16;
  int held = -1;  // the patch being read
  for (int n = 0; n < stages; ++n, ring.next()) {
    mbarrier::wait(shared_address(&barriers.full[ring.stage]), ring.parity);
    const uint4 flags = *reinterpret_cast<const uint4*>(barriers.flags[ring.stage]);
    const u32 words[4] = {flags.x, flags.y, flags.z, flags.w};
    const u32 at = base + kPatches * kPatchBytes + ring.stage * kBlockStageBytes;
    u32 a[N::kColumns][kBlock / 16][4];
#pragma unroll
    for (int c = 0; c < N::kColumns; ++c) {
      if ((words[c] & kNewPatch) != 0) {
        release(shared_address(barriers.patch_empty), held);
        mbarrier::wait(shared_address(&barriers.patch_full[patches.stage]), patches.parity);
        held = static_cast<int>(patches.stage);
        patches.next();
      }
      const u32 line = row + (words[c] >> kMaskBits & ((1u << kShiftBits) - 1));
      const u32 first = (words[c] >> (kMaskBits + kShiftBits) & ((1u << kColumnBits) - 1)) * (kBlock / 8) + half;
#pragma unroll
      for (int q = 0; q < kBlock / 16; ++q) {
        const u32 patch = base + static_cast<u32>(held) * kPatchBytes;
        wgmma::load_pieces(a[c][q], patch + line * 128 + ((first + 2 * q) ^ (line & 7)) * 16);
      }
    }
    wgmma::fence();
#pragma unroll
    for (int c = 0; c < N::kColumns; ++c) {
      const u64 blocks = wgmma::descriptor<N::kLine>(at + c * N::kRows * N::kBlockBytes);
      blocks::narrow_blocks<T, kBlock, kSparseK>(d, a[c], words[c] & ((1u << kMaskBits) - 1), blocks);
    }
    wgmma::commit();
    wgmma::wait<0>();
    mbarrier::arrive(shared_address(&barriers.empty[ring.stage]));  // every lane for itself: each has read the flags
  }
  release(shared_address(barriers.patch_empty), held);
}

/// Threads of a warpgroup write a piece of 64 pixels, from `pixel` of the tile on, × 64 rows: lines of pixels, each 64
/// channels (kRows), or lines of channels.
template <typename T, bool kRows>
__device__ __forceinline__ void patch_store(const PatchParams& p, const PatchTile& t, u32 piece, int row, int pixel) {
  const auto place = [&](int m) -> i64 {  // of a pixel of the tile; −1 outside
    const int y = t.y + m / p.tile_w, x = t.x + m % p.tile_w;
    const bool inside = m < p.tile_w * p.tile_h && y < p.height && x < p.width;
    return inside ? t.n * p.out.n + y * p.out.h + x * p.out.w : -1;
  };
  T* const out = static_cast<T*>(p.out.data);
#pragma unroll 1
  for (int id = static_cast<int>(threadIdx.x) % 128; id < 512; id += 128) {
    const int line = id / 8, unit = id % 8 * 8;
    const int channel = row + (kRows ? unit : line);
    if (channel >= p.rows) {
      continue;
    }
    u32 words[4];
    load_shared_128(words, piece + tma::swizzled<128>(line * 128 + unit * 2));
    if constexpr (kRows) {
      const i64 to = place(pixel + line);
      if (to >= 0 && p.out.vector != 0) {
        *reinterpret_cast<uint4*>(out + to + channel) = make_uint4(words[0], words[1], words[2], words[3]);
      } else if (to >= 0) {
        for (int i = 0; i < 8; ++i) {
          out[to + channel + i] = __builtin_bit_cast(T, static_cast<u16>(words[i / 2] >> 16 * (i % 2)));
        }
      }
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const i64 to = place(pixel + unit + i);
        if (to >= 0) {
          out[to + channel * p.out.c] = __builtin_bit_cast(T, static_cast<u16>(words[i / 2] >> 16 * (i % 2)));
        }
      }
    }
  }
}

/// kSparseK: K is the unit axis of op(S)'s blocks. kRows: channels are the result's unit axis.
template <typename T, int kBlock, bool kSparseK, bool kRows>
__global__ void __launch_bounds__(blocks::kNarrowThreads, 1) patch(const __grid_constant__ PatchParams p) {
  using N = Narrow<kBlock>;
  extern __shared__ u8 raw[];
  __shared__ __align__(16) PatchBarriers barriers;
  const u32 base = (shared_address(raw) + 1023) & ~1023u;
  if (threadIdx.x == 0) {
    for (int s = 0; s < kPatches; ++s) {
      mbarrier::init(shared_address(&barriers.patch_full[s]), 1);
      mbarrier::init(shared_address(&barriers.patch_empty[s]), 12);
    }
  }
  init_ring(barriers.full, barriers.empty, kBlockStages, 4, 12 * 32);
  if (threadIdx.x < 128) {
    fewer_registers<56>();  // 128 · 56 + 384 · 152 is what the CTA has
    Ring<kBlockStages> ring(1);
    Ring<kPatches> patches(1);
    for (int turn = 0; turn * static_cast<int>(gridDim.x) < p.total; ++turn) {
      if (const int index = blocks::turn_tile(turn); index < p.total) {
        patch_fetch<kBlock>(p, patch_tile(p, index), barriers, base, ring, patches);
      }
    }
  } else {
    more_registers<152>();
    const int warpgroup = uniform(threadIdx.x / 128) - 1, lane = static_cast<int>(threadIdx.x) % 32;
    const u32 buffer = base + kPatches * kPatchBytes + kBlockStages * kBlockStageBytes + warpgroup * kPieceBytes;
    const int m = 64 * warpgroup + static_cast<int>(threadIdx.x) / 32 % 4 * 16 + lane % 16;
    const int inside = m < p.tile_w * p.tile_h ? m : 0;
    const u32 row = static_cast<u32>(inside / p.tile_w * p.mul_h * p.patch_w + inside % p.tile_w * p.mul_w);
    Ring<kBlockStages> ring(0);
    Ring<kPatches> patches(0);
    for (int turn = 0; turn * static_cast<int>(gridDim.x) < p.total; ++turn) {
      const int index = blocks::turn_tile(turn);
      if (index >= p.total) {
        continue;
      }
      const PatchTile t = patch_tile(p, index);
      float d[kNarrow / 2];
      blocks::narrow_start<T>(d, p, t.place * kNarrow, p.bias != nullptr);
      const int stages = (t.last - t.first + N::kColumns - 1) / N::kColumns;
      patch_multiply<T, kBlock, kSparseK>(d, stages, barriers, base, ring, patches, row);
      store_tile_by_threads<T, !kRows>(d, buffer, 1 + warpgroup, [&](int piece, u32 from) {
        patch_store<T, kRows>(p, t, from, t.place * kNarrow + piece * 64, 64 * warpgroup);
      });
    }
  }
}

}  // namespace fretwork::block_conv
