// small_n_registers: 2:4 products of 16-bit types with few columns and weights so small that a launch takes longer than
// reading them.
// There is no ring and no cluster, and only sums go through shared memory. A CTA has 16 rows and the whole depth, its
// warps split the depth, and every lane issues all its loads at once. The k of the slots of an mma are as in
// small_n_cp_async.cuh: lane t of a quad has run t of four, and of b every second word of runs t / 2 and t / 2 + 2.
#pragma once

#include "device/activation.cuh"
#include "device/barrier.cuh"
#include "device/load.cuh"
#include "device/mma.cuh"
#include "ops/two_four/cuda/elements.cuh"
#include "ops/two_four/cuda/params.h"

namespace fretwork::two_four::small_n_registers {

/// Not one that the compiler moves to where the words are needed. Through the first-level cache, where the CTAs of a
/// multiprocessor meet in b: past it 4096 × 1024 with 16 columns took 8.8 instead of 7.5 µs.
__device__ __forceinline__ word_group<4> load_16(const u8* from) {
  word_group<4> w;
  asm volatile("ld.global.L2::256B.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(w.words[0]), "=r"(w.words[1]), "=r"(w.words[2]), "=r"(w.words[3])
               : "l"(from));
  return w;
}

/// Where a lane's share of every block begins: two rows, 8 apart, and a column of each tile.
template <int kTiles>
struct Places {
  const u8 *values[2], *words[2], *b[kTiles];

  /// Rows and columns that are not there are read as the last one and not written.
  __device__ __forceinline__ Places(const Params& p, int row, int column, int t) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const i64 line = min(row + 8 * r, p.m - 1);
      values[r] = static_cast<const u8*>(p.values) + line * p.values_line + 16 * t;
      words[r] = static_cast<const u8*>(p.words) + line * p.words_line;
    }
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      b[tile] = static_cast<const u8*>(p.b) + min(8 * tile + column, p.n - 1) * p.b_col + 16 * t;
    }
  }
};

/// What a lane has of a block: two steps of two mma. Of each run of b that it needs it has the first half if t is even,
/// else the second.
template <int kTiles>
struct Block {
  word_group<4> values[2][2], words[2], b[2][kTiles][2];  ///< [step][row], [row], [step][tile][run]

  __device__ __forceinline__ void load(const Places<kTiles>& from, int block) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int step = 0; step < 2; ++step) {
        values[step][r] = load_16(from.values[r] + block * kDepth + step * 64);
      }
      words[r] = load_16(from.words[r] + block * (kDepth / 8));
    }
#pragma unroll
    for (int step = 0; step < 2; ++step) {
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          b[step][tile][r] = load_16(from.b[tile] + block * (2 * kDepth) + step * 128 + r * 64);
        }
      }
    }
  }

  template <typename T>
  __device__ __forceinline__ void multiply(float (&d)[kTiles][4], int t) const {
    const bool odd = t % 2 != 0;
#pragma unroll
    for (int step = 0; step < 2; ++step) {
      const auto& first = values[step][0].words;
      const auto& second = values[step][1].words;
      const u32 a[2][4] = {{first[0], second[0], first[1], second[1]}, {first[2], second[2], first[3], second[3]}};
      const u32 metadata = mma_metadata(words[0].words + 2 * step, words[1].words + 2 * step, t);
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        u32 right[8];  // of the two mma; lanes of a pair give each other the words that they do not need
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const auto& w = b[step][tile][r].words;
#pragma unroll
          for (int q = 0; q < 2; ++q) {
            const u32 mine = odd ? w[2 * q + 1] : w[2 * q];
            const u32 got = __shfl_xor_sync(~0u, odd ? w[2 * q] : w[2 * q + 1], 1);
            right[2 * q + r] = odd ? got : mine;
            right[4 + 2 * q + r] = odd ? mine : got;
          }
        }
        mma_sparse<T, 0>(d[tile], a[0], right, metadata);
        mma_sparse<T, 1>(d[tile], a[1], right + 4, metadata);
      }
    }
  }
};

/// Adds up what the warps have, always in the same order, and writes it.
template <typename T, int kTiles>
__device__ __forceinline__ void store(const Params& p, const float* sums, int row0, int warps) {
  constexpr int kEach = 8 * kTiles * kPitch;
#pragma unroll 1
  for (int o = static_cast<int>(threadIdx.x); o < 8 * kTiles * kRows; o += static_cast<int>(blockDim.x)) {
    const int column = o / kRows, row = row0 + o % kRows;
    if (column < p.n && row < p.m) {
      float v[1] = {0};
#pragma unroll 4
      for (int w = 0; w < warps; ++w) {
        v[0] += sums[w * kEach + column * kPitch + o % kRows];
      }
      if (p.bias != nullptr) {
        v[0] += widen(static_cast<const T*>(p.bias)[row * p.bias_stride]);
      }
      activate(v, p.activation);
      static_cast<T*>(p.c)[column * p.c_col + row * p.c_row] = narrow<T>(v[0]);
    }
  }
}

/// kTiles: of eight columns. kBlocks: that a warp has in flight.
template <typename T, int kTiles, int kBlocks>
__global__ void __launch_bounds__(32 * most_warps(kTiles, kBlocks)) product(const __grid_constant__ Params p) {
  extern __shared__ float sums[];
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32, t = lane % 4;
  const int warps = static_cast<int>(blockDim.x) / 32, row0 = static_cast<int>(blockIdx.x) * kRows;
  const Places<kTiles> places(p, row0 + lane / 4, lane / 4, t);
  float d[kTiles][4] = {};
  wait_for_earlier_kernel();
#pragma unroll 1
  for (int first = warp; first < p.blocks; first += warps * kBlocks) {
    Block<kTiles> block[kBlocks];
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
      block[i].load(places, min(first + i * warps, p.blocks - 1));
    }
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
      if (first + i * warps < p.blocks) {
        block[i].template multiply<T>(d, t);
      }
    }
  }
  let_next_kernel_start();
  float* const mine = sums + (warp * 8 * kTiles + 2 * t) * kPitch + lane / 4;
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      mine[(8 * tile + e % 2) * kPitch + e / 2 * 8] = d[tile][e];
    }
  }
  __syncthreads();
  store<T, kTiles>(p, sums, row0, warps);
}

}  // namespace fretwork::two_four::small_n_registers
