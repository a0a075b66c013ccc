// What the Hopper kernels of the block products have in common: the order of tiles and the way out of registers.
#pragma once

#include "device/barrier.cuh"
#include "device/tma.cuh"
#include "device/wgmma.cuh"
#include "ops/block_matmul/params_hopper.cuh"

namespace fretwork::block_matmul::hopper {

inline constexpr u32 kStages = 4, kStageBytes = 49152, kPieceBytes = 8192;

/// Which tile a CTA does in its n-th turn; odd turns run backwards, so that no CTA always gets the longest.
__device__ __forceinline__ int turn_tile(int turn) {
  const int place = (turn & 1) != 0 ? static_cast<int>(gridDim.x - 1 - blockIdx.x) : static_cast<int>(blockIdx.x);
  return turn * static_cast<int>(gridDim.x) + place;
}

struct SpmmTile {
  Segment segment;
  int place, tile, h, z, partial;
};

/// Tiles run through batches, then sets of `share` segments, then the free dimension, then the set: CTAs that run at
/// the same time share strips of the dense operand in the cache.
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

/// Sums of a warpgroup (kAt … kAt + 31 of a thread: 64 × 64) to 8 KB of shared memory as the copy engine swizzles rows
/// of 128 bytes: rows first, or columns first.
template <typename T, bool kTransposed, int kAt, int kSize>
__device__ __forceinline__ void store_piece(const float (&d)[kSize], u32 to) {
  const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
#pragma unroll
  for (int j = 0; j < 8; j += 2) {
    const int at = kAt + 4 * j;
    const u32 a = narrow_pair<T>(d[at], d[at + 1]), b = narrow_pair<T>(d[at + 2], d[at + 3]);
    const u32 c = narrow_pair<T>(d[at + 4], d[at + 5]), e = narrow_pair<T>(d[at + 6], d[at + 7]);
    if constexpr (kTransposed) {
      const u32 row = 8 * (j + lane / 16) + lane % 8, unit = 2 * warp + lane / 8 % 2;
      wgmma::store_pieces_transposed(to + tma::swizzled<128>(row * 128 + unit * 16), a, b, c, e);
    } else {
      const u32 row = 16 * warp + lane / 8 % 2 * 8 + lane % 8, unit = j + lane / 16;
      wgmma::store_pieces(to + tma::swizzled<128>(row * 128 + unit * 16), a, b, c, e);
    }
  }
}

/// The sums of a warpgroup leave in pieces of 64 columns through kBuffers buffers. `store(piece, buffer)` is called by
/// one thread. The last stores are still on their way when this returns.
template <typename T, bool kTransposed, int kBuffers, int kPiece = 0, int kSize, typename Store>
__device__ __forceinline__ void store_tile(const float (&d)[kSize], u32 buffers, u32 barrier, Store store) {
  if constexpr (kPiece < kSize / 32) {
    const bool leader = threadIdx.x % 128 == 0;
    const u32 buffer = buffers + kPiece % kBuffers * kPieceBytes;
    if (leader) {
      tma::store_wait_read<kBuffers - 1>();
    }
    named_barrier(barrier, 128);
    store_piece<T, kTransposed, 32 * kPiece>(d, buffer);
    fence_async_proxy();
    named_barrier(barrier, 128);
    if (leader) {
      store(kPiece, buffer);
      tma::store_commit();
    }
    store_tile<T, kTransposed, kBuffers, kPiece + 1>(d, buffers, barrier, store);
  }
}

/// Sums of a segment that is only a part of its group, in the order threads hold them.
template <int kConsumers, int kSize>
__device__ __forceinline__ void store_partial(const float (&d)[kSize], float* partials, int index) {
  float* to = partials + static_cast<i64>(index) * (kSize * kConsumers) + (threadIdx.x - 128);
#pragma unroll
  for (int i = 0; i < kSize; ++i) {
    to[i * kConsumers] = d[i];
  }
}

/// Every warp says for itself that it is done with a stage: a warpgroup's warps may be apart when they skip one.
__device__ __forceinline__ void release(u32 empty, int stage) {
  __syncwarp();  // one lane speaks for all, so all must be done
  if (threadIdx.x % 32 == 0 && stage >= 0) {
    mbarrier::arrive(empty + 8 * stage);
  }
}

struct Barriers {
  u64 full[kStages], empty[kStages];
  u32 flags[kStages][4];
};

/// `fetchers` warps fill a stage, `consumers` warps empty it.
__device__ __forceinline__ void init_barriers(Barriers& barriers, u32 stages, u32 fetchers, u32 consumers) {
  if (threadIdx.x == 0) {
    for (u32 s = 0; s < stages; ++s) {
      mbarrier::init(shared_address(&barriers.full[s]), fetchers);
      mbarrier::init(shared_address(&barriers.empty[s]), consumers);
    }
    mbarrier::init_done();
  }
  __syncthreads();
}

}  // namespace fretwork::block_matmul::hopper
