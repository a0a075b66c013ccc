// Tiles in shared memory, and the register fragments that mma.sync takes from them.
#pragma once

#include "device/copy_async.cuh"
#include "device/mma.cuh"
#include "device/types.cuh"

namespace fretwork {

/// Rows of Bytes (a multiple of 128) in 16-byte chunks. A row's chunks are permuted within 128 bytes, so that the same
/// chunk of eight rows, and two chunks of four rows, lie in different banks: ldmatrix and tf32 loads meet no conflict.
template <int Bytes>
struct shared_tile {
  static_assert(Bytes % 128 == 0);
  u32 base;

  static __device__ __forceinline__ u32 swizzle(u32 row) { return (row & 3) << 1 | (row >> 2 & 1); }
  __device__ __forceinline__ u32 chunk(u32 row, u32 chunk) const {
    return base + row * Bytes + ((chunk ^ swizzle(row)) << 4);
  }
  /// Row `row0` + `row`, where row0 is a multiple of 8: the permutation depends on `row` only, which a loop keeps.
  __device__ __forceinline__ u32 chunk(u32 row0, u32 row, u32 chunk) const {
    return base + row0 * Bytes + (row * Bytes + ((chunk ^ swizzle(row)) << 4));
  }
};

/// Entries of T in 16 bytes, and in the K of one mma.
template <typename T>
inline constexpr int chunk_of = 16 / static_cast<int>(sizeof(T));
template <typename T>
inline constexpr int mma_depth = 32 / static_cast<int>(sizeof(T));

/// The left operand's fragment: 16 rows from `m`, one mma of K from `k`. Lines of the tile are rows of the operand
/// (KInner) or run along K.
template <typename T, bool KInner, int Bytes>
__device__ __forceinline__ void load_left(u32 (&a)[4], shared_tile<Bytes> tile, int m, int k) {
  const u32 lane = threadIdx.x % 32;
  if constexpr (KInner) {
    ldmatrix(a, tile.chunk(m, lane % 16, k / chunk_of<T> + lane / 16));
  } else if constexpr (sizeof(T) == 2) {
    ldmatrix_trans(a, tile.chunk(k, lane % 8 + lane / 16 * 8, m / chunk_of<T> + lane / 8 % 2));
  } else {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const u32 at = m + lane / 4 + e % 2 * 8;
      a[e] = load_shared_32(tile.chunk(k, lane % 4 + e / 2 * 4, at / 4) + at % 4 * 4);
    }
  }
}

/// The right operand's fragments for 16 columns from `n`: {b[0], b[1]} for the first eight, {b[2], b[3]} for the rest.
/// Lines of the tile are columns of the operand (KInner) or run along K's other side.
template <typename T, bool KInner, int Bytes>
__device__ __forceinline__ void load_right(u32 (&b)[4], shared_tile<Bytes> tile, int n, int k) {
  const u32 lane = threadIdx.x % 32;
  if constexpr (KInner) {
    ldmatrix(b, tile.chunk(n, lane % 8 + lane / 16 * 8, k / chunk_of<T> + lane / 8 % 2));
  } else if constexpr (sizeof(T) == 2) {
    ldmatrix_trans(b, tile.chunk(k, lane % 16, n / chunk_of<T> + lane / 16));
  } else {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const u32 at = n + lane / 4 + e / 2 * 8;
      b[e] = load_shared_32(tile.chunk(k, lane % 4 + e % 2 * 4, at / 4) + at % 4 * 4);
    }
  }
}

/// A warp's operands for one mma of K: Rows × 16 rows and Cols × 16 columns.
template <int Rows, int Cols>
struct register_operands {
  u32 left[Rows][4], right[Cols][4];
};

/// A warp's sums: Rows × 16 rows, Cols × 8 columns. Entry e of a fragment: row lane / 4 + e / 2 · 8, column
/// lane % 4 · 2 + e % 2.
template <int Rows, int Cols>
struct register_sums {
  float at[Rows][Cols][4];
};

/// sums(i, j) += left(i)·right(j), j counting eights. `Products` 3 adds what tf32 rounding leaves out (lo·hi + hi·lo).
template <typename T, int Products>
__device__ __forceinline__ void multiply(float (&sum)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  if constexpr (sizeof(T) == 2) {
    mma_sync<T>(sum, a, b0, b1);
  } else {
    u32 high[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      high[e] = to_tf32(a[e]);
    }
    const u32 b0_high = to_tf32(b0), b1_high = to_tf32(b1);
    if constexpr (Products == 3) {
      u32 low[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        low[e] = tf32_rest(a[e], high[e]);
      }
      mma_sync<T>(sum, low, b0_high, b1_high);
      mma_sync<T>(sum, high, tf32_rest(b0, b0_high), tf32_rest(b1, b1_high));
    }
    mma_sync<T>(sum, high, b0_high, b1_high);
  }
}

}  // namespace fretwork
