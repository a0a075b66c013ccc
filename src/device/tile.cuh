// Tiles in shared memory, and the register fragments that mma.sync takes from them.
#pragma once

#include "device/copy_async.cuh"
#include "device/mma.cuh"
#include "device/types.cuh"

namespace fretwork {

/// Rows of Bytes in 16-byte chunks. Chunks are permuted within 128 bytes, which a row fills or shares with others, so
/// that the same chunk of eight rows lies in different banks, and with rows of 128 bytes and more also two chunks of
/// four rows: ldmatrix and tf32 loads meet no conflict.
template <int Bytes>
struct shared_tile {
  static_assert(Bytes % 128 == 0 || Bytes == 64 || Bytes == 32);
  u32 base;

  static __device__ __forceinline__ u32 swizzle(u32 row) {
    if constexpr (Bytes < 128) {
      return row / (128 / Bytes) % (Bytes / 16);
    }
    return (row & 3) << 1 | (row >> 2 & 1);
  }
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

/// A fragment as mma.sync takes it. Of 16-bit types: as loaded.
template <typename T, int Products>
struct mma_operand {
  static constexpr bool kRounds = false, kRest = false;
  const u32* high;
  __device__ __forceinline__ void set(const u32 (&loaded)[4]) { high = loaded; }
};

/// In tf32: rounded. `Products` 3 keeps what rounding leaves out as well.
template <int Products>
struct mma_operand<float, Products> {
  static constexpr bool kRounds = true, kRest = Products == 3;
  u32 high[4], rest[4];
  __device__ __forceinline__ void set(const u32 (&loaded)[4]) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      high[e] = to_tf32(loaded[e]);
      rest[e] = kRest ? tf32_rest(loaded[e], high[e]) : 0;
    }
  }
};

/// sum += a·b, where b's eight columns are those of its words `first` and `first` + 1.
template <typename T, int Products>
__device__ __forceinline__ void multiply(float (&sum)[4], const mma_operand<T, Products>& a,
                                         const mma_operand<T, Products>& b, int first) {
  if constexpr (mma_operand<T, Products>::kRest) {
    mma_sync<T>(sum, a.rest, b.high[first], b.high[first + 1]);
    mma_sync<T>(sum, a.high, b.rest[first], b.rest[first + 1]);
  }
  mma_sync<T>(sum, a.high, b.high[first], b.high[first + 1]);
}

}  // namespace fretwork
