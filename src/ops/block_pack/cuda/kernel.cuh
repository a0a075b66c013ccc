// The packing kernels. Consecutive threads write consecutive units, so that stores are coalesced.
#pragma once

#include "device/load.cuh"
#include "device/types.cuh"
#include "ops/block_pack/cuda/params.h"

namespace fretwork::block_pack_op {

/// Index: u32 if the total fits, because 64-bit divisions would cost more than the copy.
template <typename Unit, typename Index>
__global__ void __launch_bounds__(kThreads) pack(const __grid_constant__ Params p) {
  const i64 first = static_cast<i64>(blockIdx.x) * kThreads * kUnits + threadIdx.x;
#pragma unroll
  for (int u = 0; u < kUnits; ++u) {
    const i64 n = first + u * kThreads;
    if (n < p.total) {
      Index rest = static_cast<Index>(n);
      const Index x = rest % static_cast<Index>(p.block_cols);
      rest /= static_cast<Index>(p.block_cols);
      const Index y = rest % static_cast<Index>(p.block_rows);
      rest /= static_cast<Index>(p.block_rows);
      const Index block = rest % static_cast<Index>(p.blocks_packed);
      const i64 z = rest / static_cast<Index>(p.blocks_packed);
      const Block at = p.blocks[block];
      const i64 row = static_cast<i64>(at.row) * p.block_rows + y, col = static_cast<i64>(at.column) * p.block_cols + x;
      static_cast<Unit*>(p.values)[z * p.values_z + block * p.values_block + y * p.values_row + x * p.values_col] =
          static_cast<const Unit*>(
              p.dense)[z * p.dense_z + at.head * p.dense_h + row * p.dense_row + col * p.dense_col];
    }
  }
}

template <typename Unit>
__device__ __forceinline__ Unit repeated(u64 fill) {
  if constexpr (sizeof(Unit) == 16) {
    const u32 low = static_cast<u32>(fill), high = static_cast<u32>(fill >> 32);
    return Unit{{low, high, low, high}};
  } else {
    return static_cast<Unit>(fill);
  }
}

template <typename Unit, typename Index>
__global__ void __launch_bounds__(kThreads) unpack(const __grid_constant__ Params p) {
  const i64 first = static_cast<i64>(blockIdx.x) * kThreads * kUnits + threadIdx.x;
  const auto cut = [](Index& rest, int size) {
    const Index part = rest % static_cast<Index>(size);
    rest /= static_cast<Index>(size);
    return part;
  };
#pragma unroll
  for (int u = 0; u < kUnits; ++u) {
    const i64 n = first + u * kThreads;
    if (n < p.total) {
      Index rest = static_cast<Index>(n);
      const i64 x = cut(rest, p.block_cols), j = cut(rest, p.cols);
      const i64 y = cut(rest, p.block_rows), i = cut(rest, p.rows);
      const i64 h = cut(rest, p.heads), z = rest;
      const i64 block = p.block_at[(h * p.rows + i) * p.cols + j];
      Unit unit = repeated<Unit>(p.fill);
      if (block >= 0) {
        unit = static_cast<const Unit*>(
            p.values)[z * p.values_z + block * p.values_block + y * p.values_row + x * p.values_col];
      }
      static_cast<Unit*>(p.dense)[z * p.dense_z + h * p.dense_h + (i * p.block_rows + y) * p.dense_row +
                                  (j * p.block_cols + x) * p.dense_col] = unit;
    }
  }
}

}  // namespace fretwork::block_pack_op
