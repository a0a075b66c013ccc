// Products over images on Hopper that fetch every pixel once for all kernel positions. A CTA has a tile of 8 × 32
// pixels × 128 rows. It fetches what the tile reads of 64 channels, edges included, as one box; a kernel position reads
// the same box some rows further, as a descriptor may begin at any row of a swizzled tile. Pixels are N: groups of
// eight neighbours lie one image row apart, which is what a descriptor's stride says. Each of two warpgroups has 64
// rows of op(S) and walks its own blocks, which fill 64 rows side by side, with zeros where one is absent.
#pragma once

#include "blocks/kernel_wide.cuh"
#include "ops/block_conv/params_patch.cuh"

namespace fretwork::block_conv {

struct PatchBarriers {
  u64 full[2][kBlockStages], empty[2][kBlockStages];
  u64 patch_full[kMostPatches], patch_empty[kMostPatches];
  u32 words[2][kBlockStages][4];
};

/// A stage holds 64 of K of 64 rows: kSteps steps of a block's depth, each of kBlocks blocks.
template <int kBlock>
struct Patch {
  static constexpr int kSteps = 64 / kBlock, kBlocks = 64 / kBlock, kStride = 1 + kBlocks;
  static constexpr int kLine = 2 * kBlock;  ///< bytes of a swizzled row
  static constexpr u32 kStepBytes = 64 * kLine, kBlockBytes = kBlock * kLine;
};

/// Where the ring of patches stands; its length is the launch's.
struct PatchRing {
  u32 parity, stage = 0;
  __device__ __forceinline__ void next(const PatchParams& p) {
    if (++stage == static_cast<u32>(p.patch_count)) {
      stage = 0;
      parity ^= 1;
    }
  }
};

struct PatchTile {
  int n, y, x;
};
__device__ __forceinline__ PatchTile patch_tile(const PatchParams& p, int index) {
  const int tile = index / p.segment_count, row = tile / p.tiles_w;
  return {row / p.tiles_h, row % p.tiles_h * kTileHeight, tile % p.tiles_w * kTileWidth};
}

/// One thread fetches the patches of a tile.
__device__ __forceinline__ void fetch_patches(const PatchParams& p, int index, PatchBarriers& barriers, u32 base,
                                              PatchRing& ring) {
  const PatchSegment& s = p.segments[index % p.segment_count];
  const PatchTile t = patch_tile(p, index);
  for (int i = 0; i < s.patch_count; ++i, ring.next(p)) {
    const int channel = __ldg(p.channels + s.patches + i) * kPatchChannels;
    const u32 full = shared_address(&barriers.patch_full[ring.stage]);
    mbarrier::wait(shared_address(&barriers.patch_empty[ring.stage]), ring.parity);
    mbarrier::arrive_expect(full, p.patch_bytes);
    tma::load(base + ring.stage * p.patch_stride, &p.image, full, channel, t.x + p.first_w, t.y * p.mul_h + p.first_h,
              t.n);
  }
}

/// A warp fetches the blocks of one warpgroup for a tile, a lane for each block of a stage. Where one is absent the box
/// lies outside the tensor, which gives zeros.
template <int kBlock>
__device__ __forceinline__ void fetch_blocks(const PatchParams& p, int index, PatchBarriers& barriers, u32 blocks,
                                             Ring<kBlockStages>& ring, int warpgroup) {
  using P = Patch<kBlock>;
  const PatchSegment& s = p.segments[index % p.segment_count];
  const int first = warpgroup == 0 ? s.first[0] : s.first[1], last = warpgroup == 0 ? s.last[0] : s.last[1];
  const int lane = static_cast<int>(threadIdx.x) % 32, step = lane / P::kBlocks, row = lane % P::kBlocks;
  for (int k = first; k < last; k += P::kSteps, ring.next()) {
    const bool mine = lane < P::kSteps * P::kBlocks && k + step < last;
    const int* const from = p.steps + static_cast<i64>(k + step) * P::kStride;
    const int block = mine ? __ldg(from + 1 + row) : -1;
    const u32 where = mine ? static_cast<u32>(__ldg(from)) : ~0u;
    const u32 full = shared_address(&barriers.full[warpgroup][ring.stage]);
    mbarrier::wait(shared_address(&barriers.empty[warpgroup][ring.stage]), ring.parity);
    if (row == 0 && lane < P::kSteps * P::kBlocks) {
      barriers.words[warpgroup][ring.stage][step] = where;
    }
    __syncwarp();
    if (lane == 0) {
      mbarrier::arrive_expect(full, min(P::kSteps, last - k) * P::kStepBytes);
    }
    __syncwarp();
    if (mine) {
      const u32 to = blocks + ring.stage * kBlockStageBytes + step * P::kStepBytes + row * P::kBlockBytes;
      const int number = block >= 0 ? block * p.sparse_block : p.block_count;
      tma::load(to, &p.sparse, full, 0, 0, number, 0);
    }
  }
}

/// The patches of a segment as one warpgroup goes through them. It waits for each, also for those it does not need: a
/// release must not count for an earlier use of the same place.
struct PatchWalk {
  int at = 0;
  bool here = false;  ///< patch `at` has arrived

  /// Releases patches up to `wanted`; no product that reads them may be under way.
  __device__ __forceinline__ void release_to(int wanted, const PatchParams& p, PatchBarriers& barriers,
                                             PatchRing& ring) {
    for (; at < wanted; ++at, ring.next(p)) {
      wait(barriers, ring);
      release(shared_address(barriers.patch_empty), static_cast<int>(ring.stage));
      here = false;
    }
  }
  __device__ __forceinline__ void wait(PatchBarriers& barriers, const PatchRing& ring) {
    if (!here) {
      mbarrier::wait(shared_address(&barriers.patch_full[ring.stage]), ring.parity);
      here = true;
    }
  }
};

/// Multiplies the steps of one warpgroup. A patch is released when all products that read it are done.
template <typename T, int kBlock, bool kSparseK>
__device__ __forceinline__ void patch_multiply(float (&d)[128], const PatchParams& p, const PatchSegment& s,
                                               PatchBarriers& barriers, u32 base, u32 blocks, Ring<kBlockStages>& ring,
                                               PatchRing& patches, int warpgroup) {
  using P = Patch<kBlock>;
  using wgmma::Major;
  constexpr Major kA = kSparseK ? Major::k : Major::mn;
  const int steps = warpgroup == 0 ? s.last[0] - s.first[0] : s.last[1] - s.first[1];
  const u32 empty = shared_address(barriers.empty[warpgroup]);
  int pending = -1;
  PatchWalk walk;
#pragma unroll 1
  for (int n = 0; n < steps; n += P::kSteps, ring.next()) {
    mbarrier::wait(shared_address(&barriers.full[warpgroup][ring.stage]), ring.parity);
    const u32 stage = ring.stage;
#pragma unroll
    for (int i = 0; i < P::kSteps; ++i) {
      const u32 where = __shfl_sync(~0u, barriers.words[warpgroup][stage][i], 0);
      if (where == ~0u) {
        continue;
      }
      const int wanted = static_cast<int>(where >> (kShiftBits + kColumnBits));
      if (walk.at != wanted) {
        wgmma::commit();
        wgmma::wait<0>();
        walk.release_to(wanted, p, barriers, patches);
      }
      walk.wait(barriers, patches);
      const u32 row = where & ((1u << kShiftBits) - 1);
      const u32 column = where >> kShiftBits & ((1u << kColumnBits) - 1);
      const u64 a = wgmma::descriptor<P::kLine>(blocks + stage * kBlockStageBytes + i * P::kStepBytes, P::kBlockBytes);
      const u64 b = wgmma::descriptor<128>(base + patches.stage * p.patch_stride + row * 128 + column * P::kLine, 16,
                                           p.pitch * 128);
      wgmma::fence();
#pragma unroll
      for (int q = 0; q < kBlock / 16; ++q) {
        wgmma::multiply<T, 256, kA, Major::k>(d, a + q * wgmma::kNextK<P::kLine, kA>, b + q * 2);
      }
    }
    wgmma::commit();
    wgmma::wait<1>();
    release(empty, pending);
    pending = static_cast<int>(stage);
  }
  wgmma::wait<0>();
  release(empty, pending);
  walk.release_to(s.patch_count, p, barriers, patches);
}

/// Threads write a piece of 64 rows × 8 × 8 pixels that lies in shared memory: lines of pixels, each 64 channels
/// (kRows), or lines of channels.
template <typename T, bool kRows>
__device__ __forceinline__ void store_rectangle(const PatchParams& p, const PatchTile& t, u32 piece, int row, int y) {
  const blocks::ImageOut& out = p.direct;
#pragma unroll 1
  for (int id = static_cast<int>(threadIdx.x) % 128; id < 512; id += 128) {
    const int line = id / 8, unit = id % 8;
    const int channel = row + (kRows ? unit * 8 : line), v = t.x + (kRows ? line % 8 : 0),
              u = y + (kRows ? line / 8 : unit);
    if (channel >= p.rows || u >= p.height || v >= p.width) {
      continue;
    }
    u32 words[4];
    load_shared_128(words, piece + tma::swizzled<128>(line * 128 + unit * 16));
    T* const to = static_cast<T*>(out.data) + t.n * out.n + channel * out.c + u * out.h + v * out.w;
    if (out.vector != 0 && (kRows || v + 8 <= p.width)) {
      *reinterpret_cast<uint4*>(to) = make_uint4(words[0], words[1], words[2], words[3]);
      continue;
    }
    const int count = kRows ? 8 : min(8, p.width - v);
    for (int i = 0; i < count; ++i) {
      to[i * (kRows ? out.c : out.w)] = __builtin_bit_cast(T, static_cast<u16>(words[i / 2] >> 16 * (i % 2)));
    }
  }
}

/// kSparseK: K is the unit axis of op(S)'s blocks. kRows: channels are the result's unit axis.
template <typename T, int kBlock, bool kSparseK, bool kRows>
__global__ void __launch_bounds__(blocks::kThreads, 1) patch(const __grid_constant__ PatchParams p) {
  extern __shared__ u8 raw[];
  __shared__ __align__(16) PatchBarriers barriers;
  const u32 base = (shared_address(raw) + 1023) & ~1023u;
  const u32 blocks_at = base + p.patch_count * p.patch_stride;
  if (threadIdx.x == 0) {
    for (int i = 0; i < kMostPatches; ++i) {
      mbarrier::init(shared_address(&barriers.patch_full[i]), 1);
      mbarrier::init(shared_address(&barriers.patch_empty[i]), 8);
    }
  }
  init_ring(&barriers.full[0][0], &barriers.empty[0][0], 2 * kBlockStages, 1, 4);
  const auto for_tiles = [&](auto body) {
    for (int turn = 0; turn * static_cast<int>(gridDim.x) < p.total; ++turn) {
      if (const int index = blocks::turn_tile(turn); index < p.total) {
        body(index);
      }
    }
  };
  if (threadIdx.x < 128) {
    fewer_registers<40>();
    const int warp = uniform(threadIdx.x / 32);
    if (threadIdx.x == 0) {
      PatchRing ring{1};
      for_tiles([&](int index) { fetch_patches(p, index, barriers, base, ring); });
    } else if (warp == 1 || warp == 2) {
      Ring<kBlockStages> ring(1);
      const u32 own = blocks_at + (warp - 1) * kBlockStages * kBlockStageBytes;
      for_tiles([&](int index) { fetch_blocks<kBlock>(p, index, barriers, own, ring, warp - 1); });
    }
  } else {
    more_registers<232>();
    const int warpgroup = uniform(threadIdx.x / 128) - 1;
    const u32 own = blocks_at + warpgroup * kBlockStages * kBlockStageBytes;
    const u32 buffer = blocks_at + 2 * kBlockStages * kBlockStageBytes + warpgroup * 2 * kPieceBytes;
    Ring<kBlockStages> ring(0);
    PatchRing patches{0};
    for_tiles([&](int index) {
      const PatchSegment& s = p.segments[index % p.segment_count];
      const int row = s.place * kTileRows + warpgroup * 64;
      float d[128];
#pragma unroll
      for (float& sum : d) {
        sum = 0.0f;
      }
      patch_multiply<T, kBlock, kSparseK>(d, p, s, barriers, base, own, ring, patches, warpgroup);
      if (p.bias != nullptr) {
        blocks::wide_add_bias<T>(d, p, row);
      }
      const PatchTile t = patch_tile(p, index);
      if (p.direct.data != nullptr) {
        store_tile_by_threads<T, kRows>(d, buffer, 1 + warpgroup, [&](int piece, u32 from) {
          store_rectangle<T, kRows>(p, t, from, row, t.y + 8 * piece);
        });
      } else {
        store_tile<T, kRows, 2>(d, buffer, 1 + warpgroup, [&](int piece, u32 from) {
          if (row < p.rows && t.y + 8 * piece < p.height) {
            tma::store(&p.out, from, row, t.x, t.y + 8 * piece, t.n);
          }
        });
      }
    });
    if (threadIdx.x % 128 == 0) {
      tma::store_wait();
    }
  }
}

}  // namespace fretwork::block_conv
