// Packs weights of any strides in the order in which strided.cuh reads them.
#pragma once

#include "device/barrier.cuh"
#include "device/load.cuh"
#include "device/tile.cuh"
#include "device/types.cuh"
#include "ops/kronecker/cuda/params_strided.cuh"

namespace fretwork {

/// Which k of a step the fragments' place `slot` means: with few δ a lane's chunk holds several k, and they all serve
/// the lane that loaded them.
template <typename T, int V>
__device__ __forceinline__ int strided_slot_k(int slot, bool turned) {
  if (turned) {
    const int t = slot % 8 / 2;
    return 4 * t + ((slot / 8 * 2 + slot % 2) ^ t);
  }
  if constexpr (sizeof(T) == 2 && V < chunk_of<T>) {
    return slot % 8 / 2 * 4 + slot / 8 * 2 + slot % 2;  // slots 2t, 2t+1, 2t+8, 2t+9 are 4t … 4t+3
  } else if constexpr (sizeof(T) == 4 && 2 * V == chunk_of<T>) {
    return slot % 4 * 2 + slot / 4;  // tf32: slots t, t+4 are 2t, 2t+1
  } else {
    return slot;
  }
}

/// Which column of eight stands at place `f` of a fragment: with whole chunks of δ the four lanes of a row store
/// neighbours.
template <typename T, int V>
__device__ __forceinline__ int strided_column(int f) {
  return V >= chunk_of<T> ? f % 2 * 4 + f / 2 : f;
}

/// A thread writes one chunk (half the K of a step, one column) for each of V δ. Chunks are fastest, then columns.
template <typename T, int V>
__global__ void __launch_bounds__(256) strided_pack(const __grid_constant__ kronecker::strided::PackParams p) {
  constexpr int kChunk = chunk_of<T>;
  let_next_kernel_start();
  const i64 item = static_cast<i64>(blockIdx.x) * 256 + threadIdx.x;
  if (item >= 2 * p.rows) {
    return;
  }
  const int half = static_cast<int>(item % 2);
  const i64 row = item / 2;
  const int place = static_cast<int>(row % p.slab);
  const i64 above = row / p.slab;
  const int step = static_cast<int>(above % p.steps);
  const i64 group = above / p.steps;
  const int slab = static_cast<int>(group % p.slabs);
  const i64 block = group / p.slabs;  // i · δ groups
  const int deltas = p.d / V;
  const int l = static_cast<int>(block % deltas) * V;
  const i64 i = block / deltas;
  const int j = slab * p.slab + place / 8 * 8 + strided_column<T, V>(place % 8);
  const T* from = static_cast<const T*>(p.from) + i * p.stride_a + j * p.stride_b + l * p.stride_d;

  T values[V][kChunk];
#pragma unroll
  for (int s = 0; s < kChunk; ++s) {
    const int k = step * 2 * kChunk + strided_slot_k<T, V>(half * kChunk + s, p.turned);
    const bool inside = j < p.b && k < p.c;
    const T* here = from + k * p.stride_c;
    constexpr int kMany = V < kChunk ? V : kChunk;
#pragma unroll
    for (int e = 0; e < V; e += kMany) {
      if (inside && p.vector) {
        const auto many = load_run<T, kMany>(here + e);
#pragma unroll
        for (int m = 0; m < kMany; ++m) {
          values[e + m][s] = many.at(m);
        }
      } else {
#pragma unroll
        for (int m = 0; m < kMany; ++m) {
          values[e + m][s] = inside ? here[(e + m) * p.stride_d] : T{};
        }
      }
    }
  }
  u8* to = static_cast<u8*>(p.to) + ((above * V) * p.slab + place) * 32 + (half ^ (place >> 2 & 1)) * 16;
#pragma unroll
  for (int e = 0; e < V; ++e) {
    u32 words[4];
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      if constexpr (sizeof(T) == 2) {
        words[w] = values[e][2 * w].bits | static_cast<u32>(values[e][2 * w + 1].bits) << 16;
      } else {
        words[w] = __float_as_uint(values[e][w]);
      }
    }
    store_words<4>(to + static_cast<i64>(e) * p.slab * 32, words);
  }
}

}  // namespace fretwork
