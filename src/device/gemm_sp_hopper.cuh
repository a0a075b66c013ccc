// Products of tiles on Hopper's sparse tensor cores: a warpgroup's d += a·b over a stage of K, operands in shared
// memory, metadata through a layout of the caller's.
#pragma once

#include "device/barrier.cuh"
#include "device/gemm_sp.cuh"
#include "device/wgmma.cuh"

namespace fretwork {

/// Columns of b as wgmma reads them, and as the copy engine writes boxes of 128 bytes: a line of K each, its 16-byte
/// chunks permuted. `base` is a multiple of 1024. A value_tile is what the engine makes of boxes of 64 bytes.
struct swizzled_tile {
  u32 base;
  __device__ __forceinline__ u32 chunk(u32 row, u32 chunk) const {
    return base + row * kDepthBytes + ((chunk ^ (row & 7)) << 4);
  }
};

/// Between writes to tiles by threads, cp.async included, and gemm_sp: every writer calls it before the barrier that
/// the readers pass. What the copy engine brings does not need it.
__device__ __forceinline__ void tiles_written() { fence_async_proxy(); }

/// A warpgroup's sums += a·b of a stage: 64 rows from m0, kN (128 or 256) columns from n0, multiples of 8. Sums 4j … 4j
/// + 3 of a thread: row m0 + 16 · warp + lane / 4 (the last two: 8 further down), columns n0 + 8j + lane % 4 · 2 and
/// the next one. T: f16, bf16, float (tf32, of which the hardware cuts the lower bits), f8_e4m3, f8_e5m2, or i8 or u8
/// (sums are int). `values` begin at a multiple of 512. All four warps call it together; it is done when this returns.
template <typename T, int kN, typename Sum, typename Layout>
__device__ __forceinline__ void gemm_sp(Sum (&d)[kN / 2], const value_tile& values, const swizzled_tile& columns,
                                        const Layout& layout, int m0, int n0) {
  using wgmma::Major;
  sparse_metadata<T> metadata;
  metadata.load(layout, m0 + threadIdx.x / 32 % 4 * 16);
  const u64 left = wgmma::descriptor<kValueBytes>(values.base + m0 * kValueBytes);
  const u64 right = wgmma::descriptor<kDepthBytes>(columns.base + n0 * kDepthBytes);
  wgmma::fence();
  wgmma::multiply_sparse<T, kN, Major::k, 0>(d, left, right, metadata.template half<0>());
  wgmma::multiply_sparse<T, kN, Major::k, sizeof(T) == 1 ? 0 : 1>(d, left + 2, right + 4, metadata.template half<1>());
  wgmma::commit();
  wgmma::wait<0>();
  wgmma::metadata_read(metadata.words);
}

}  // namespace fretwork
