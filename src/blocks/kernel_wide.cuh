// op(S)·dense for blocks of 64 and 128 on Hopper. The sparse side is M; a tile is 128 rows × 256 of the free dimension.
// One producer thread loads blocks and strips of the dense operand, 64 of K per stage, four stages; two warpgroups
// multiply.
#pragma once

#include "blocks/kernel.cuh"

namespace fretwork::blocks {

/// Adds the bias to the finished accumulators of a tile. Accumulators that do not start from constants would make ptxas
/// serialise the wgmmas.
template <typename T, int kSize, typename Params>
__device__ __forceinline__ void wide_add_bias(float (&d)[kSize], const Params& p, int row) {
  const int upper = row + static_cast<int>(threadIdx.x) / 32 % 4 * 16 + static_cast<int>(threadIdx.x) % 32 / 4;
  const T* const bias = static_cast<const T*>(p.bias);
  const float first = upper < p.rows ? widen(bias[upper * p.bias_stride]) : 0.0f;
  const float second = upper + 8 < p.rows ? widen(bias[(upper + 8) * p.bias_stride]) : 0.0f;
#pragma unroll
  for (int i = 0; i < kSize; ++i) {
    d[i] += i / 2 % 2 == 0 ? first : second;
  }
}

/// kWidth: columns of a tile, 256, or 128 if the free dimension has no more. kSparseK: K is the unit (contiguous) axis
/// of op(S)'s blocks; kDenseK: of the dense operand. kRows: rows are the unit axis of the result. kImage: the dense
/// operand is loaded from channels-last images by im2col, and the result is images.
template <typename T, int kWidth, bool kSparseK, bool kDenseK, bool kRows, bool kImage>
struct WideSpmm {
  static constexpr Roles kRoles{.consumers = 2, .producer_registers = 40, .consumer_registers = 232};
  const SpmmParams& p;
  Stages& stages;
  u32 base;

  /// Loads the stages of one tile. With blocks of 64, each warpgroup has its own block row, which may lack the column.
  __device__ __forceinline__ void fetch(const SpmmTile& t, Producer<kStages>& at) const {
    const bool small = p.block == 64;
    const Pixel pixel = kImage ? pixel_at(p.pixels, t.tile * kWidth) : Pixel{};
    for (int part = 0; part < p.batches.z_sum * p.batches.h_sum; ++part) {
      const int z = t.z + part / p.batches.h_sum, h = t.h + part % p.batches.h_sum;
      const int sz = z * p.sparse_z, dz = z * p.dense_z, dh = h * p.dense_h;
      for (int k = t.segment.first; k < t.segment.last; ++k) {
        const int* step = p.steps + static_cast<i64>(k) * p.stride;
        const int column = __ldg(step), upper = __ldg(step + 1), lower = small ? __ldg(step + 2) : upper;
        for (int inner = 0; inner < p.block; inner += 64, at.next()) {
          const u32 full = stages.ring.acquire(at);
          stages.flags[at.stage][0] = (upper >= 0 ? 1u : 0u) | (lower >= 0 ? 2u : 0u);
          mbarrier::arrive_expect(full, kWidth * 128 + (upper >= 0 ? 8192u : 0u) + (lower >= 0 ? 8192u : 0u));
          const u32 a = base + at.stage * kStageBytes, b = a + 16384;
          const int below = small ? 0 : 64, first = upper * p.sparse_block, second = lower * p.sparse_block;
          if (upper >= 0) {
            kSparseK ? tma::load(a, &p.sparse, full, inner, 0, first, sz)
                     : tma::load(a, &p.sparse, full, 0, inner, first, sz);
          }
          if (lower >= 0) {
            kSparseK ? tma::load(a + 8192, &p.sparse, full, inner, below, second, sz)
                     : tma::load(a + 8192, &p.sparse, full, below, inner, second, sz);
          }
          const int row = column * p.block + inner, free = t.tile * kWidth;
          if constexpr (kImage) {
            load_pixels(b, &p.dense, full, p.pixels, pixel, channel_block(column) * p.block + inner, column);
          } else if constexpr (kDenseK) {
            tma::load(b, &p.dense, full, row, free, dh, dz);
          } else {
            for (int c = 0; c < kWidth / 64; ++c) {
              tma::load(b + c * 8192, &p.dense, full, free + c * 64, row, dh, dz);
            }
          }
        }
      }
    }
  }

  /// Multiplies the stages of one tile, except those without a block of this warpgroup.
  __device__ __forceinline__ void multiply(float (&d)[kWidth / 2], const SpmmTile& t, Consumer<kStages>& at,
                                           int warpgroup) const {
    using wgmma::Major;
    constexpr Major kA = kSparseK ? Major::k : Major::mn, kB = kDenseK ? Major::k : Major::mn;
    const int steps = (t.segment.last - t.segment.first) * p.batches.z_sum * p.batches.h_sum;
    multiply_stages(stages.ring, at, steps * (p.block / 64), [&](u32 stage) {
      // Read by lane 0, which also releases the stage.
      const u32 flags = __shfl_sync(0xffffffffu, threadIdx.x % 32 == 0 ? stages.flags[stage][0] : 0u, 0);
      if ((flags >> warpgroup & 1) == 0) {
        return false;
      }
      const u32 from = base + stage * kStageBytes;
      const u64 a = wgmma::descriptor<128>(from + warpgroup * 8192, 8192);
      const u64 b = wgmma::descriptor<128>(from + 16384, 8192);
      wgmma::fence();
#pragma unroll
      for (int q = 0; q < 4; ++q) {
        wgmma::multiply<T, kWidth, kA, kB>(d, a + q * wgmma::kNextK<128, kA>, b + q * wgmma::kNextK<128, kB>);
      }
      return true;
    });
  }

  __device__ __forceinline__ void store(float (&d)[kWidth / 2], const SpmmTile& t, int warpgroup) const {
    const u32 buffers = base + kStages * kStageBytes + warpgroup * 2 * kPieceBytes;
    const int row = t.place * kTileM + warpgroup * 64;
    if (t.segment.partial >= 0) {
      store_partial<kThreads - 128>(d, p.partials, t.partial);
      return;
    }
    if (kImage && p.bias != nullptr) {
      wide_add_bias<T>(d, p, row);
    }
    if constexpr (kImage && !kRows) {
      store_nchw<T, false, 2>(d, p, buffers, 1 + warpgroup,
                              [&](int piece) { return make_int2(row, t.tile * kWidth + piece * 64); });
    } else if (kImage && p.image.data != nullptr) {
      store_tile_by_threads<T, kRows>(d, buffers, 1 + warpgroup, [&](int piece, u32 buffer) {
        store_image<T, kRows>(p, buffer, row, t.tile * kWidth + piece * 64);
      });
    } else {
      store_tile<T, kRows, 2>(d, buffers, 1 + warpgroup, [&](int piece, u32 buffer) {
        const int free = t.tile * kWidth + piece * 64;
        if (free < p.free) {
          kRows ? tma::store(&p.out, buffer, row, free, t.h, t.z) : tma::store(&p.out, buffer, free, row, t.h, t.z);
        }
      });
    }
  }

  __device__ __forceinline__ void produce() const {
    if (threadIdx.x == 0) {
      tma::prefetch(&p.sparse);
      tma::prefetch(&p.dense);
      tma::prefetch(&p.out);
      Producer<kStages> at;
      each_tile(p.total, [&](int index, int) { fetch(spmm_tile(p, index), at); });
    }
  }
  __device__ __forceinline__ void consume() const {
    const int warpgroup = uniform(threadIdx.x / 128) - 1;
    Consumer<kStages> at;
    each_tile(p.total, [&](int index, int) {
      const SpmmTile t = spmm_tile(p, index);
      float d[kWidth / 2];
      clear(d);
      multiply(d, t, at, warpgroup);
      store(d, t, warpgroup);
    });
    finish_stores();
  }
};

template <typename T, int kWidth, bool kSparseK, bool kDenseK, bool kRows, bool kImage>
__global__ void __launch_bounds__(kThreads, 1) spmm_wide(const __grid_constant__ SpmmParams p) {
  extern __shared__ u8 raw[];
  __shared__ Stages stages;
  init_barriers([&] { stages.ring.make(1, 8); });
  run_warp_specialized(WideSpmm<T, kWidth, kSparseK, kDenseK, kRows, kImage>{p, stages, stages_in(raw)});
}

}  // namespace fretwork::blocks
