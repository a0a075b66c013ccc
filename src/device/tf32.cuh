// tf32 between swizzled tiles and registers on Hopper, where wgmma takes 32-bit operands from shared memory K-major
// only: the left operand goes through registers, which also rounds it, and sums go back to staged tiles.
#pragma once

#include "device/mma.cuh"
#include "device/tma.cuh"
#include "device/types.cuh"

namespace fretwork::tf32 {

/// Which of a warpgroup's 64 rows a lane's fragments and sums lie in: rows lane / 4 and lane / 4 + 8 of a warp's 16 are
/// these two. Any order is right as long as both keep to it; this one meets no bank conflict where lines of the tiles
/// run along K and along columns (kLeftK), or along the rows.
template <bool kLeftK>
__device__ __forceinline__ u32 row_of(u32 half) {
  const u32 g = threadIdx.x % 32 / 4, warp = threadIdx.x / 32 % 4;
  if constexpr (kLeftK) {
    return 16 * warp + 8 * half + g % 4 * 2 + g / 4;
  } else {
    return warp / 2 * 32 + g / 4 * 16 + warp % 2 * 8 + 4 * half + g % 4;
  }
}

/// Reads fragments of 64 rows × 32 of K: one box of 64 lines, 32 of K each, or two of 32 lines, 32 rows each.
template <bool kLeftK>
struct LeftReader {
  u32 offset[kLeftK ? 1 : 4];

  __device__ __forceinline__ LeftReader() {
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    if constexpr (kLeftK) {
      const u32 line = lane % 4 * 2 + lane / 4 % 2;  // as row_of has it
      offset[0] = tma::swizzled<128>((16 * warp + lane / 8 % 2 * 8 + line) * 128 + lane / 16 * 16);
    } else {
#pragma unroll
      for (u32 e = 0; e < 4; ++e) {
        const u32 row = row_of<false>(e % 2), k = lane % 4 + e / 2 * 4;
        offset[e] = row / 32 * 4096 + tma::swizzled<128>(k * 128 + row % 32 * 4);
      }
    }
  }
  /// Fragment q is that of eight of K from 8·q, as they lie in memory.
  __device__ __forceinline__ void load(u32 (&a)[4][4], u32 tile) const {
#pragma unroll
    for (u32 q = 0; q < 4; ++q) {
      if constexpr (kLeftK) {
        ldmatrix(a[q], tile + (offset[0] ^ q << 5));
      } else {
#pragma unroll
        for (u32 e = 0; e < 4; ++e) {
          a[q][e] = load_shared_32(tile + offset[e] + q * 1024);
        }
      }
    }
  }
};

/// The same for rows whose 32 numbers are those of kDeltas (2 or 4) products by turns: one load of a lane serves the
/// fragments of all.
template <int kDeltas>
struct InterleavedReader {
  u32 offset[2];  ///< of a lane's two rows

  static __device__ __forceinline__ u32 row_of(u32 half) {
    const u32 g = threadIdx.x % 32 / 4, warp = threadIdx.x / 32 % 4;
    return 16 * warp + 8 * half + (kDeltas == 4 ? g % 2 * 4 + g / 2 : g % 4 * 2 + g / 4);
  }
  __device__ __forceinline__ InterleavedReader() {
#pragma unroll
    for (u32 half = 0; half < 2; ++half) {
      offset[half] = tma::swizzled<128>(row_of(half) * 128 + threadIdx.x % 4 * (4 * kDeltas));
    }
  }
  /// Fragment n is that of product n % kDeltas and eight of K from n / kDeltas · 8.
  __device__ __forceinline__ void load(u32 (&a)[4][4], u32 tile) const {
#pragma unroll
    for (u32 e = 0; e < 4; ++e) {
      const u32 at = tile + offset[e % 2];  // the tile is aligned, so that bits can be switched
      if constexpr (kDeltas == 4) {
        asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(a[0][e]), "=r"(a[1][e]), "=r"(a[2][e]), "=r"(a[3][e])
                     : "r"(at ^ e / 2 << 6));
      } else {
#pragma unroll
        for (u32 q = 0; q < 2; ++q) {
          asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];"
                       : "=r"(a[2 * q][e]), "=r"(a[2 * q + 1][e])
                       : "r"(at ^ e / 2 << 5 ^ q << 6));
        }
      }
    }
  }
};

/// The same where lines run along the rows, which are interleaved: 16 or 8 of them in boxes of 32 lines.
template <int kDeltas>
struct InterleavedRowReader {
  u32 offset;

  static __device__ __forceinline__ u32 row_of(u32 half) {
    const u32 g = threadIdx.x % 32 / 4, warp = threadIdx.x / 32 % 4;
    return 16 * warp + (kDeltas == 4 ? 8 * half + g % 2 * 4 + g / 2 : g / 2 % 2 * 8 + 4 * half + g / 4 * 2 + g % 2);
  }
  __device__ __forceinline__ InterleavedRowReader() {
    const u32 at = row_of(0) * (4 * kDeltas);
    offset = at / 128 * 4096 + tma::swizzled<128>(threadIdx.x % 4 * 128 + at % 128);
  }
  /// Fragments of all products, eight of K from 8·q.
  __device__ __forceinline__ void load(u32 (&a)[kDeltas][4], u32 tile, u32 q) const {
#pragma unroll
    for (u32 e = 0; e < 4; ++e) {
      const u32 k = tile + q * 1024 + (offset ^ e / 2 << 6) + e / 2 * 512;  // four lines on, other units are switched
      if constexpr (kDeltas == 4) {
        asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(a[0][e]), "=r"(a[1][e]), "=r"(a[2][e]), "=r"(a[3][e])
                     : "r"(k + e % 2 * 4096));
      } else {
        asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(a[0][e]), "=r"(a[1][e]) : "r"(k ^ e % 2 << 5));
      }
    }
  }
};

/// A warp turns a box of 32 lines of 32 around in place, so that columns become lines, and rounds it. Where columns are
/// those of kDeltas products by turns, eight lines of one follow eight of the one before.
template <int kDeltas>
__device__ __forceinline__ void turn_box(u32 box) {
  const u32 lane = threadIdx.x % 32, to = box + tma::swizzled<128>(lane * 128);
  const u32 column = (lane / 8 / kDeltas * 8 + lane % 8) * kDeltas + lane / 8 % kDeltas;
  u32 line[32];
#pragma unroll
  for (u32 r = 0; r < 8; ++r) {
    const u32 from = box + r * 128 + (column * 4 ^ r << 4);
#pragma unroll
    for (u32 n = r; n < 32; n += 8) {
      line[n] = load_shared_32(from + (n - r) * 128);
    }
  }
  __syncwarp();  // all of it is in registers
#pragma unroll
  for (u32 n = 0; n < 32; n += 4) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to ^ n << 2), "r"(to_tf32(line[n])),
                 "r"(to_tf32(line[n + 1])), "r"(to_tf32(line[n + 2])), "r"(to_tf32(line[n + 3]))
                 : "memory");
  }
}

__device__ __forceinline__ void store_shared(u32 to, float value) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(to), "f"(value) : "memory");
}
__device__ __forceinline__ void store_shared(u32 to, float first, float second) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(to), "f"(first), "f"(second) : "memory");
}

__device__ __forceinline__ void store_shared(u32 to, float first, float second, float third, float fourth) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to), "f"(first), "f"(second), "f"(third), "f"(fourth)
               : "memory");
}

/// Sums of a warpgroup (kAt … kAt + 15 of a thread: 64 × 32) to 8 KB of shared memory as the copy engine swizzles rows
/// of 128 bytes: 64 rows of 32 columns, or (kTransposed) two boxes of 32 columns, 32 rows each.
template <bool kTransposed, int kAt, int kSize>
__device__ __forceinline__ void store_piece(const float (&d)[kSize], u32 to) {
  const u32 t = threadIdx.x % 4;
  if constexpr (kTransposed) {
    const bool swap = t >= 2;  // lanes that would meet in a bank store the other half first
    const u32 row = row_of<false>(0), other = swap ? 16 : 0;
    const u32 line = to + row / 32 * 4096 + 2 * t * 128, unit = row % 32 * 4;
#pragma unroll
    for (u32 j = 0; j < 4; ++j) {
#pragma unroll
      for (u32 e = 0; e < 2; ++e) {
        const float low = d[kAt + 4 * j + e], high = d[kAt + 4 * j + 2 + e];
        const u32 at = line + (8 * j + e) * 128 + (unit ^ (2 * t + e) << 4);
        store_shared(at ^ other, swap ? high : low);
        store_shared(at ^ other ^ 16, swap ? low : high);
      }
    }
  } else {
#pragma unroll
    for (u32 half = 0; half < 2; ++half) {
      const u32 row = row_of<true>(half);
#pragma unroll
      for (u32 j = 0; j < 4; ++j) {
        store_shared(to + tma::swizzled<128>(row * 128 + 32 * j + 8 * t), d[kAt + 4 * j + 2 * half],
                     d[kAt + 4 * j + 2 * half + 1]);
      }
    }
  }
}

}  // namespace fretwork::tf32
