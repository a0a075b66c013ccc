// portable: products on the sparse tensor cores of sm_80 and later (fp8: sm_89, sm_12x). Values and metadata lie along
// k and b in lines of whole 16-byte chunks, zero-padded to the end of a chunk. A CTA with four warps has 128 × 128 sums
// (64 columns for tf32x3); a ring of stages, each 128 bytes of k deep, is filled ahead.
#pragma once

#include "device/gemm_sp.cuh"
#include "ops/two_four/cuda/params.h"
#include "ops/two_four/cuda/store.cuh"

namespace fretwork::two_four::portable {

inline constexpr int kRows = 128, kThreads = 128;

template <typename T, int kProducts, bool kBAlongK>
struct Stage {
  static constexpr int kSize = static_cast<int>(sizeof(T)), kDepth = sparse_depth<T>;
  static constexpr int kCols = kProducts == 3 ? 64 : 128;
  static constexpr int kMetadataBytes = kSize == 1 ? 16 : 8;  // of a row: two nibbles to a byte
  static constexpr int kBLine = kBAlongK ? kDepthBytes : kCols * kSize;
  static constexpr int kValues = kRows * kValueBytes, kB = kCols * kDepthBytes;
  static constexpr int kBytes = kValues + kB + kRows * kMetadataBytes;
  value_tile values;
  shared_tile<kBLine> b;
  u32 metadata;
  __device__ __forceinline__ explicit Stage(u32 base)
      : values{base}, b{base + kValues}, metadata(base + kValues + kB) {}
};

/// A CTA's operands in global memory, by bytes.
template <typename T, int kProducts, bool kBAlongK>
struct Source {
  using Staged = Stage<T, kProducts, kBAlongK>;
  const u8 *values, *b, *metadata;
  i64 values_pitch, b_pitch, k;
  int rows, cols;

  __device__ __forceinline__ Source(const ProductParams& p, i64 row0, i64 col0, i64 z) {
    constexpr i64 kSize = Staged::kSize;
    values_pitch = p.values.line * kSize;
    values = static_cast<const u8*>(p.values.data) + row0 * values_pitch;
    b_pitch = (kBAlongK ? p.b.line : p.b.along) * kSize;
    b = static_cast<const u8*>(p.b.data) + z * p.b.batch * kSize + col0 * (kBAlongK ? b_pitch : kSize);
    k = p.k;
    rows = static_cast<int>(min(static_cast<i64>(kRows), p.m - row0));
    cols = static_cast<int>(min(static_cast<i64>(Staged::kCols), p.n - col0));
    // Rows that do not exist have the nibbles of one that does: any valid ones.
    const i64 row = row0 + min(static_cast<int>(threadIdx.x), rows - 1);
    metadata = static_cast<const u8*>(p.words.data) + row * p.words.line;
  }

  __device__ __forceinline__ void fetch(const Staged& to, int step) const {
    constexpr i64 kDeep = kDepthBytes, kKept = kValueBytes;
    const int left = static_cast<int>(min(i64{Staged::kDepth}, k - i64{step} * Staged::kDepth));  // of k
    copy_lines<kRows, kValueBytes / 16, kThreads>(to.values, values + step * kKept, values_pitch, rows,
                                                  (left * Staged::kSize + 31) / 32);
    if constexpr (kBAlongK) {
      copy_lines<Staged::kCols, kDepthBytes / 16, kThreads>(to.b, b + step * kDeep, b_pitch, cols,
                                                            (left * Staged::kSize + 15) / 16);
    } else {
      copy_lines<Staged::kDepth, Staged::kBLine / 16, kThreads>(to.b, b + i64{step} * Staged::kDepth * b_pitch, b_pitch,
                                                                left, cols * Staged::kSize / 16);
    }
    copy_metadata(to.metadata + threadIdx.x * Staged::kMetadataBytes, metadata + i64{step} * Staged::kMetadataBytes);
  }

 private:
  static __device__ __forceinline__ void copy_metadata(u32 to, const u8* from) {
    if constexpr (Staged::kMetadataBytes == 16) {
      copy_async_16(to, from, true);
    } else {
      copy_async_small<8>(to, from, 8);
    }
  }
};

/// kProducts: 3 for tf32x3. kBAlongK: b's columns are its lines, else its rows.
template <typename T, int kProducts, bool kBAlongK, int kStages>
__global__ void __launch_bounds__(kThreads, 2) product(const __grid_constant__ ProductParams p) {
  using Staged = Stage<T, kProducts, kBAlongK>;
  using Sum = accumulator_t<T>;
  constexpr int kCols = Staged::kCols, kEights = kCols / 16;
  extern __shared__ __align__(128) u8 raw[];
  const u32 base = shared_address(raw);
  const TileOf tile(p);
  const i64 row0 = tile.row * kRows, col0 = tile.col * kCols;
  const Source<T, kProducts, kBAlongK> source(p, row0, col0, tile.z);
  const int steps = static_cast<int>((p.k + Staged::kDepth - 1) / Staged::kDepth);
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int m0 = warp % 2 * 64, n0 = warp / 2 * (kCols / 2);

  const auto stage = [&](int step) { return Staged(base + static_cast<u32>(step % kStages) * Staged::kBytes); };
  const auto fetch = [&](int step) {
    if (step < steps) {
      source.fetch(stage(step), step);
    }
    copy_async_commit();
  };
  Sum sums[4][kEights][4] = {};
  for (int s = 0; s < kStages - 1; ++s) {
    fetch(s);
  }
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    copy_async_wait<kStages - 2>();
    __syncthreads();
    const Staged now = stage(step);
    sparse_metadata<T> metadata[4];
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      metadata[r].load(plain_words<T>{now.metadata}, m0 + 16 * r);
    }
    gemm_sp_half<0, T, kBAlongK, kProducts>(sums, now.values, now.b, metadata, m0, n0);
    fetch(step + kStages - 1);  // while the tensor cores are busy
    gemm_sp_half<1, T, kBAlongK, kProducts>(sums, now.values, now.b, metadata, m0, n0);
  }
  copy_async_wait<0>();
  __syncthreads();

  const SumTile<Sum, kRows, kCols, kThreads> out(raw, row0, col0, tile.z);
#pragma unroll
  for (int r = 0; r < 4; ++r) {
#pragma unroll
    for (int c = 0; c < kEights; ++c) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        out.set(p, m0 + 16 * r + lane / 4 + e / 2 * 8, n0 + 8 * c + lane % 4 * 2 + e % 2, sums[r][c][e]);
      }
    }
  }
  __syncthreads();
  out.store(p);
}

}  // namespace fretwork::two_four::portable
