// generic: every type, stride and size, in fp32 (int32 for i8 and u8) without tensor cores. A CTA has 128 × 64
// sums, a thread 8 × 8. A group's elements of b lie in registers, and each row picks what it keeps there; nothing else
// is multiplied.
#pragma once

#include "ops/two_four/cuda/elements.cuh"
#include "ops/two_four/cuda/params.h"
#include "ops/two_four/cuda/store.cuh"

namespace fretwork::two_four::generic {

inline constexpr int kRows = 128, kCols = 64, kThreads = 128, kStageGroups = 16;

__device__ __forceinline__ int widen_sum(i8 x) { return x; }
__device__ __forceinline__ int widen_sum(u8 x) { return x; }
template <typename T>
__device__ __forceinline__ float widen_sum(T x) {
  return widen(x);
}

/// 16 groups of a tile's rows and columns.
template <typename Sum, int kGroup>
struct Stage {
  static constexpr int kKept = kGroup / 2, kDepth = kStageGroups * kGroup;
  Sum b[kDepth][kCols + 4];
  Sum values[kStageGroups * kKept][kRows + 4];
  u8 nibbles[kStageGroups][kRows];
};

/// kLines × kAlong numbers into shared memory, read in the order that memory has. `get` finds one, `set` puts it.
template <int kLines, int kAlong, typename Get, typename Set>
__device__ __forceinline__ void fill(const LinesArg& from, const Get& get, const Set& set) {
  const bool along = (from.along < 0 ? -from.along : from.along) <= (from.line < 0 ? -from.line : from.line);
#pragma unroll 8
  for (int n = static_cast<int>(threadIdx.x); n < kLines * kAlong; n += kThreads) {
    const int line = along ? n / kAlong : n % kLines, at = along ? n % kAlong : n / kLines;
    set(line, at, get(line, at));
  }
}

/// Adds one group's products: rows from r0, columns c0 … and c0 + 32 ….
template <typename Sum, int kGroup>
__device__ __forceinline__ void multiply_group(Sum (&sums)[8][8], const Stage<Sum, kGroup>& stage, int group, int r0,
                                               int c0) {
  Sum b[kGroup][8], values[kGroup / 2][8];
#pragma unroll
  for (int e = 0; e < kGroup; ++e) {
    load_eight<32>(b[e], &stage.b[group * kGroup + e][c0]);
  }
#pragma unroll
  for (int e = 0; e < kGroup / 2; ++e) {
    load_eight<4>(values[e], &stage.values[group * (kGroup / 2) + e][r0]);
  }
  const u32* const packed = reinterpret_cast<const u32*>(&stage.nibbles[group][r0]);
  const u32 nibbles[2] = {packed[0], packed[1]};
#pragma unroll
  for (int r = 0; r < 8; ++r) {
    const u32 nibble = nibbles[r / 4] >> (r % 4 * 8);
    const u32 first = nibble & 3, second = nibble >> 2 & 3;
#pragma unroll
    for (int c = 0; c < 8; ++c) {
      if constexpr (kGroup == 2) {
        sums[r][c] += values[0][r] * (first == 2 ? b[1][c] : b[0][c]);  // 4, or 0xE
      } else {
        sums[r][c] += values[0][r] * (first == 0 ? b[0][c] : first == 1 ? b[1][c] : b[2][c]);
        sums[r][c] += values[1][r] * (second == 3 ? b[3][c] : second == 2 ? b[2][c] : b[1][c]);
      }
    }
  }
}

template <typename T>
__global__ void __launch_bounds__(kThreads, sizeof(T) == 4 ? 3 : 2) product(const __grid_constant__ ProductParams p) {
  using Sum = accumulator_t<T>;
  constexpr int kGroup = sizeof(T) == 4 ? 2 : 4;
  using Staged = Stage<Sum, kGroup>;
  constexpr int kKept = Staged::kKept;
  extern __shared__ __align__(16) u8 raw[];
  Staged& stage = *reinterpret_cast<Staged*>(raw);
  const TileOf tile(p);
  const i64 row0 = tile.row * kRows, col0 = tile.col * kCols, groups = p.k / kGroup;
  const int thread = static_cast<int>(threadIdx.x), r0 = thread / 8 * 8, c0 = thread % 8 * 4;
  const T* const values = static_cast<const T*>(p.values.data) + row0 * p.values.line;
  const T* const b = static_cast<const T*>(p.b.data) + tile.z * p.b.batch + col0 * p.b.line;

  Sum sums[8][8] = {};
#pragma unroll 1
  for (i64 group0 = 0; group0 < groups; group0 += kStageGroups) {
    const i64 left = groups - group0;  // those behind are zeros
    fill<kRows, kStageGroups * kKept>(
        p.values,
        [&](int line, int at) {
          return row0 + line < p.m && at < left * kKept
                     ? widen_sum(values[line * p.values.line + (group0 * kKept + at) * p.values.along])
                     : Sum{0};
        },
        [&](int line, int at, Sum x) { stage.values[at][line] = x; });
    fill<kCols, Staged::kDepth>(
        p.b,
        [&](int line, int at) {
          return col0 + line < p.n && at < left * kGroup
                     ? widen_sum(b[line * p.b.line + (group0 * kGroup + at) * p.b.along])
                     : Sum{0};
        },
        [&](int line, int at, Sum x) { stage.b[at][line] = x; });
    for (int n = thread; n < kRows * (kStageGroups / 2); n += kThreads) {
      const int line = n / (kStageGroups / 2), byte = n % (kStageGroups / 2);
      const u32 pair = row0 + line < p.m ? metadata_byte(p.words, row0 + line, group0 / 2 + byte, groups) : 0x44u;
      stage.nibbles[2 * byte][line] = static_cast<u8>(pair & 0xfu);
      stage.nibbles[2 * byte + 1][line] = static_cast<u8>(pair >> 4);
    }
    __syncthreads();
#pragma unroll 1
    for (int group = 0; group < kStageGroups; ++group) {
      multiply_group<Sum, kGroup>(sums, stage, group, r0, c0);
    }
    __syncthreads();
  }

  const SumTile<Sum, kRows, kCols, kThreads> out(raw, row0, col0, tile.z);
#pragma unroll
  for (int r = 0; r < 8; ++r) {
#pragma unroll
    for (int c = 0; c < 8; ++c) {
      out.set(p, r0 + r, c0 + c % 4 + c / 4 * 32, sums[r][c]);
    }
  }
  __syncthreads();
  out.store(p);
}

}  // namespace fretwork::two_four::generic
