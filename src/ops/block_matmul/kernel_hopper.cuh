// What the Hopper kernels of the block products have in common: the order of tiles, their partial sums and their
// barriers.
#pragma once

#include "device/barrier.cuh"
#include "device/epilogue.cuh"
#include "device/tma.cuh"
#include "device/wgmma.cuh"
#include "ops/block_matmul/params_hopper.cuh"

namespace fretwork::block_matmul::hopper {

inline constexpr u32 kStages = 4, kStageBytes = 49152;

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

/// Sums of a segment that is only a part of its group, in the order threads hold them.
template <int kConsumers, int kSize>
__device__ __forceinline__ void store_partial(const float (&d)[kSize], float* partials, int index) {
  float* to = partials + static_cast<i64>(index) * (kSize * kConsumers) + (threadIdx.x - 128);
#pragma unroll
  for (int i = 0; i < kSize; ++i) {
    to[i * kConsumers] = d[i];
  }
}

struct Barriers {
  u64 full[kStages], empty[kStages];
  u32 flags[kStages][4];
};

/// `fetchers` warps fill a stage, `consumers` warps empty it.
__device__ __forceinline__ void init_barriers(Barriers& barriers, u32 stages, u32 fetchers, u32 consumers) {
  init_ring(barriers.full, barriers.empty, stages, fetchers, consumers);
}

}  // namespace fretwork::block_matmul::hopper
