// Transposes rows of x, y or weights from [k][l] to [l][k] and back. A thread, or four threads, transpose eight
// features of L neighbouring δ in registers; both sides move 16 bytes at a time.
#pragma once

#include "device/barrier.cuh"
#include "device/load.cuh"
#include "device/mma.cuh"
#include "device/types.cuh"
#include "ops/kronecker/cuda/params_hopper.cuh"

namespace fretwork::kronecker::hopper {

/// Words in units of 16 bytes, which memory is aligned to.
template <int kWords>
__device__ __forceinline__ void load_units(u32* to, const void* from) {
#pragma unroll
  for (int q = 0; q < kWords / 4; ++q) {
    reinterpret_cast<word_group<4>*>(to)[q] = static_cast<const word_group<4>*>(from)[q];
  }
}
template <int kWords>
__device__ __forceinline__ void store_units(void* to, const u32* from) {
#pragma unroll
  for (int q = 0; q < kWords / 4; ++q) {
    store_words<4>(static_cast<u32*>(to) + 4 * q, from + 4 * q);
  }
}

template <int kRows, int kWords>
__device__ __forceinline__ void round_words(u32 (&rows)[kRows][kWords]) {
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      rows[r][w] = to_tf32(rows[r][w]);
    }
  }
}

/// `to`[column] = column of `from`, as arrays of Bits held in words.
template <typename Bits, int kRows, int kColumns>
__device__ __forceinline__ void turn(u32 (&to)[kColumns][kRows * sizeof(Bits) / 4],
                                     const u32 (&from)[kRows][kColumns * sizeof(Bits) / 4]) {
#pragma unroll
  for (int c = 0; c < kColumns; ++c) {
#pragma unroll
    for (int w = 0; w < static_cast<int>(kRows * sizeof(Bits) / 4); ++w) {
      if constexpr (sizeof(Bits) == 4) {
        to[c][w] = from[w][c];
      } else {
        to[c][w] = __byte_perm(from[2 * w][c / 2], from[2 * w + 1][c / 2], c % 2 != 0 ? 0x7632 : 0x5410);
      }
    }
  }
}

/// L: the δ of 16 bytes, or d where that is less. Strided features are `d` elements apart; grouped ones are neighbours.
template <typename Bits, int L, bool Back>
__global__ void __launch_bounds__(kRegroupThreads) regroup(const __grid_constant__ RegroupParams p) {
  constexpr int kRow = L * sizeof(Bits) / 4, kLine = 2 * sizeof(Bits);  // words
  let_next_kernel_start();
  const int index = static_cast<int>(blockIdx.x) * kRegroupThreads + static_cast<int>(threadIdx.x);
  if (index >= p.total) {
    return;
  }
  // δ fastest: what a warp reads and writes then lies together on both sides.
  const int rest = p.groups.quotient(index), l = (index - rest * static_cast<int>(p.groups.divisor)) * L;
  const int block = p.eights.quotient(rest), k = (rest - block * static_cast<int>(p.eights.divisor)) * 8;
  const int n = p.a.quotient(block), i = block - n * static_cast<int>(p.a.divisor);
  Bits* const strided =
      static_cast<Bits*>(p.strided) + n * p.strided_row + i * p.strided_block + static_cast<i64>(k) * p.d + l;
  Bits* const grouped =
      static_cast<Bits*>(p.grouped) + n * p.grouped_row + i * p.grouped_block + l * p.grouped_delta + k;
  alignas(16) u32 rows[8][kRow];    // of features
  alignas(16) u32 lines[L][kLine];  // of δ
  if constexpr (!Back) {
    if constexpr (kRow == 4) {
#pragma unroll
      for (int r = 0; r < 8; ++r) {
        load_units<kRow>(rows[r], strided + static_cast<i64>(r) * p.d);
      }
    } else {
      load_units<8 * kRow>(rows[0], strided);
    }
    if constexpr (sizeof(Bits) == 4) {
      if (p.tf32) {
        round_words(rows);
      }
    }
    turn<Bits, 8, L>(lines, rows);
#pragma unroll
    for (int e = 0; e < L; ++e) {
      store_units<kLine>(grouped + e * p.grouped_delta, lines[e]);
    }
  } else {
#pragma unroll
    for (int e = 0; e < L; ++e) {
      load_units<kLine>(lines[e], grouped + e * p.grouped_delta);
    }
    turn<Bits, L, 8>(rows, lines);
    if constexpr (kRow == 4) {
#pragma unroll
      for (int r = 0; r < 8; ++r) {
        store_units<kRow>(strided + static_cast<i64>(r) * p.d, rows[r]);
      }
    } else {
      store_units<8 * kRow>(strided, rows[0]);
    }
  }
}

/// Lane q of four gets element q of each of the four.
__device__ __forceinline__ void turn_four(u32 (&v)[4]) {
#pragma unroll
  for (int apart = 1; apart <= 2; apart *= 2) {
    const bool upper = (threadIdx.x & apart) != 0;
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      if ((n & apart) == 0) {
        const u32 other = __shfl_xor_sync(~0u, upper ? v[n] : v[n + apart], apart);
        v[n] = upper ? other : v[n];
        v[n + apart] = upper ? v[n + apart] : other;
      }
    }
  }
}

/// The same of fp32 with d = 4, where a feature is 16 bytes: a lane moves one, and four lanes turn four around, so that
/// neighbouring lanes have neighbours in memory on both sides.
template <bool Back>
__global__ void __launch_bounds__(kRegroupThreads) regroup_four(const __grid_constant__ RegroupParams p) {
  let_next_kernel_start();
  const i64 first = static_cast<i64>(blockIdx.x) * (kRegroupThreads * 8) + threadIdx.x;
  const int q = static_cast<int>(threadIdx.x % 4);
  u32 v[8][4];
  u32 *strided[8], *grouped[8];
#pragma unroll
  for (int r = 0; r < 8; ++r) {
    const i64 feature = first + r * kRegroupThreads;  // eight of an index
    const int index = static_cast<int>(feature / 8);
    const int block = p.eights.quotient(index),
              k = (index - block * static_cast<int>(p.eights.divisor)) * 8 + feature % 8;
    const int n = p.a.quotient(block), i = block - n * static_cast<int>(p.a.divisor);
    strided[r] =
        index < p.total ? static_cast<u32*>(p.strided) + n * p.strided_row + i * p.strided_block + 4 * k : nullptr;
    grouped[r] = static_cast<u32*>(p.grouped) + n * p.grouped_row + i * p.grouped_block + q * p.grouped_delta + (k - q);
    if (strided[r] != nullptr) {
      load_units<4>(v[r], Back ? grouped[r] : strided[r]);
    }
  }
#pragma unroll
  for (int r = 0; r < 8; ++r) {
    if (!Back && p.tf32) {
#pragma unroll
      for (u32& word : v[r]) {
        word = to_tf32(word);
      }
    }
    turn_four(v[r]);
    if (strided[r] != nullptr) {
      store_units<4>(Back ? strided[r] : grouped[r], v[r]);
    }
  }
}

}  // namespace fretwork::kronecker::hopper
