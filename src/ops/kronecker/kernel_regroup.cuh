// Rows of x or y with neighbouring δ, [k][l], to rows with neighbouring features of one δ, [l][k], and back. A thread
// turns eight features of L neighbouring δ around in registers; both sides move 16 bytes at a time.
#pragma once

#include "device/types.cuh"
#include "ops/kronecker/params_hopper.cuh"

namespace fretwork::kronecker::hopper {

struct alignas(16) Chunk {
  u32 word[4];
};

/// Element e (0 or 1) of two words, as a word.
__device__ __forceinline__ u32 pair_of(u32 first, u32 second, int e) {
  return __byte_perm(first, second, e != 0 ? 0x7632 : 0x5410);
}

/// L: 8, or d where that is 2 or 4. Strided rows are features, `d` elements apart; grouped rows are δ, `pitch` apart.
template <int L, bool Back>
__global__ void __launch_bounds__(kRegroupThreads) regroup(const __grid_constant__ RegroupParams p) {
  constexpr int kWords = L / 2;  // of a strided row
  const int index = static_cast<int>(blockIdx.x) * kRegroupThreads + static_cast<int>(threadIdx.x);
  if (index >= p.total) {
    return;
  }
  // δ fastest: what a warp reads and writes then lies together on both sides.
  const int rest = p.groups.quotient(index), l = (index - rest * static_cast<int>(p.groups.divisor)) * L;
  const int block = p.eights.quotient(rest), k = (rest - block * static_cast<int>(p.eights.divisor)) * 8;
  const int n = p.a.quotient(block), i = block - n * static_cast<int>(p.a.divisor);
  u16* const strided = static_cast<u16*>(p.strided) + n * p.strided_row + (static_cast<i64>(i) * p.width + k) * p.d + l;
  u16* const grouped = static_cast<u16*>(p.grouped) + ((static_cast<i64>(n) * p.a.divisor + i) * p.d + l) * p.pitch + k;
  u32 rows[8][kWords];  // of features
  u32 lines[L][4];      // of δ
  if constexpr (!Back) {
    if constexpr (L == 8) {
#pragma unroll
      for (int r = 0; r < 8; ++r) {
        *reinterpret_cast<Chunk*>(rows[r]) = *reinterpret_cast<const Chunk*>(strided + static_cast<i64>(r) * p.d);
      }
    } else {
#pragma unroll
      for (int q = 0; q < L; ++q) {
        reinterpret_cast<Chunk*>(rows)[q] = reinterpret_cast<const Chunk*>(strided)[q];
      }
    }
#pragma unroll
    for (int e = 0; e < L; ++e) {
#pragma unroll
      for (int q = 0; q < 4; ++q) {
        lines[e][q] = pair_of(rows[2 * q][e / 2], rows[2 * q + 1][e / 2], e % 2);
      }
      *reinterpret_cast<Chunk*>(grouped + static_cast<i64>(e) * p.pitch) = *reinterpret_cast<const Chunk*>(lines[e]);
    }
  } else {
#pragma unroll
    for (int e = 0; e < L; ++e) {
      *reinterpret_cast<Chunk*>(lines[e]) = *reinterpret_cast<const Chunk*>(grouped + static_cast<i64>(e) * p.pitch);
    }
#pragma unroll
    for (int r = 0; r < 8; ++r) {
#pragma unroll
      for (int w = 0; w < kWords; ++w) {
        rows[r][w] = pair_of(lines[2 * w][r / 2], lines[2 * w + 1][r / 2], r % 2);
      }
    }
    if constexpr (L == 8) {
#pragma unroll
      for (int r = 0; r < 8; ++r) {
        *reinterpret_cast<Chunk*>(strided + static_cast<i64>(r) * p.d) = *reinterpret_cast<const Chunk*>(rows[r]);
      }
    } else {
#pragma unroll
      for (int q = 0; q < L; ++q) {
        reinterpret_cast<Chunk*>(strided)[q] = reinterpret_cast<const Chunk*>(rows)[q];
      }
    }
  }
}

}  // namespace fretwork::kronecker::hopper
