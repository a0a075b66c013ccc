// Tiles of V neighbouring δ: copying [row][k][δ] to shared memory, and 16-byte loads that each serve the fragments of
// several products.
#pragma once

#include "device/copy_async.cuh"
#include "device/load.cuh"
#include "device/mma.cuh"
#include "device/tile.cuh"
#include "device/types.cuh"
#include "ops/kronecker/cuda/params_strided.cuh"

namespace fretwork::kronecker::strided {

struct alignas(16) quad {
  u32 word[4];
};

__device__ __forceinline__ quad load_quad(u32 address) {
  quad v;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.word[0]), "=r"(v.word[1]), "=r"(v.word[2]), "=r"(v.word[3])
               : "r"(address));
  return v;
}

__device__ __forceinline__ void copy_async_8(u32 shared, const void* global, int bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(shared), "l"(global), "r"(bytes) : "memory");
}

/// Waits for all but the newest `ring` − 2 groups.
__device__ __forceinline__ void wait_ring(int ring) {
  if (ring == 4) {
    copy_async_wait<2>();
  } else if (ring == 3) {
    copy_async_wait<1>();
  } else {
    copy_async_wait<0>();
  }
}

/// Halves `odd` of two words: (low's, high's).
__device__ __forceinline__ u32 pair_halves(u32 low, u32 high, int odd) {
  return __byte_perm(low, high, odd ? 0x7632 : 0x5410);
}

/// One chunk of a row: elements (k, δ) from k = `k` on, of `limit` in all; `from` points to (k, δ 0). A chunk holds
/// part of the V of one k, or with V < chunk all of several k, neighbours in memory when `flat`.
template <typename T, int V>
__device__ __forceinline__ void copy_chunk(u32 to, const T* from, int k, int limit, int d, bool row_inside, bool flat) {
  constexpr int kChunk = chunk_of<T>;
  constexpr int kSize = static_cast<int>(sizeof(T));
  if constexpr (V >= kChunk) {
    copy_async_part(to, from, row_inside && k < limit ? 16 : 0);
  } else {
    constexpr int kMany = kChunk / V;
    const int left = row_inside ? limit - k : 0;
    if (flat) {
      copy_async_part(to, from, left >= kMany ? 16 : left > 0 ? left * V * kSize : 0);
    } else {
#pragma unroll
      for (int m = 0; m < kMany; ++m) {
        const T* element = m < left ? from + static_cast<i64>(m) * d : from;
        if constexpr (V * kSize == 8) {
          copy_async_8(to + 8 * m, element, m < left ? 8 : 0);
        } else {
          copy_async_4(to + 4 * m, element, m < left ? 4 : 0);
        }
      }
    }
  }
}

/// The part of chunk `q` that is its k, and its first δ.
template <typename T, int V>
__device__ __forceinline__ int chunk_k(int q) {
  return V >= chunk_of<T> ? q / (V >= chunk_of<T> ? V / chunk_of<T> : 1) : q * (chunk_of<T> / V);
}
template <typename T, int V>
__device__ __forceinline__ int chunk_delta(int q) {
  return V > chunk_of<T> ? q % (V / chunk_of<T>)*chunk_of<T> : 0;
}

}  // namespace fretwork::kronecker::strided
