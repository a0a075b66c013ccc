// Products on the sparse tensor cores of sm_80 and later (fp8 from sm_89), where values and metadata lie along k and b
// in lines of whole 16-byte chunks: behind a line's end, up to the chunk's, are zeros. A CTA makes 128 × 128 sums (64
// columns for tf32x3) with four warps; a ring of stages, each 128 bytes of k deep, is filled ahead.
#pragma once

#include "device/tile.cuh"
#include "ops/two_four/kernel_store.cuh"
#include "ops/two_four/params.h"

namespace fretwork::two_four {

inline constexpr int kRows = 128, kThreads = 128, kDepthBytes = 128, kValueBytes = 64;

/// What is kept of a stage's rows. Eight rows' chunks of one number lie in different banks.
struct value_tile {
  u32 base;
  __device__ __forceinline__ u32 chunk(u32 row, u32 chunk) const {
    return base + row * kValueBytes + ((chunk ^ (row >> 1 & 3)) << 4);
  }
};

template <typename T, int Products, bool BAlongK>
struct Stage {
  static constexpr int kSize = static_cast<int>(sizeof(T)), kDepth = kDepthBytes / kSize;
  static constexpr int kCols = Products == 3 ? 64 : 128;
  static constexpr int kMetadataBytes = kSize == 1 ? 16 : 8;  // of a row: two nibbles to a byte
  static constexpr int kBLine = BAlongK ? kDepthBytes : kCols * kSize;
  static constexpr int kValues = kRows * kValueBytes, kB = kCols * kDepthBytes;
  static constexpr int kBytes = kValues + kB + kRows * kMetadataBytes;
  value_tile values;
  shared_tile<kBLine> b;
  u32 metadata;
  __device__ __forceinline__ explicit Stage(u32 base)
      : values{base}, b{base + kValues}, metadata(base + kValues + kB) {}
};

/// Lines × Chunks chunks into a tile. `from` is line 0 of the stage; `lines` exist, with `chunks` chunks; the rest is
/// zero.
template <int Lines, int Chunks, typename Tile>
__device__ __forceinline__ void copy_lines(Tile tile, const u8* from, i64 pitch, int lines, int chunks) {
  constexpr int kStep = kThreads / Chunks, kEach = Lines / kStep;
  static_assert(kThreads % Chunks == 0 && kEach * kStep == Lines);
  const int line = static_cast<int>(threadIdx.x) / Chunks, chunk = static_cast<int>(threadIdx.x) % Chunks;
  const u8* at = from + line * pitch + chunk * 16;
#pragma unroll
  for (int n = 0; n < kEach; ++n) {
    copy_async_16(tile.chunk(line + n * kStep, chunk), at, line + n * kStep < lines && chunk < chunks);
    at += kStep * pitch;
  }
}

/// A CTA's operands in global memory, by bytes.
template <typename T, int Products, bool BAlongK>
struct Source {
  using Staged = Stage<T, Products, BAlongK>;
  const u8 *values, *b, *metadata;
  i64 values_pitch, b_pitch, k;
  int rows, cols;

  __device__ __forceinline__ Source(const ProductParams& p, i64 row0, i64 col0, i64 z) {
    constexpr i64 kSize = Staged::kSize;
    values_pitch = p.values.line * kSize;
    values = static_cast<const u8*>(p.values.data) + row0 * values_pitch;
    b_pitch = (BAlongK ? p.b.line : p.b.along) * kSize;
    b = static_cast<const u8*>(p.b.data) + z * p.b.batch * kSize + col0 * (BAlongK ? b_pitch : kSize);
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
    copy_lines<kRows, kValueBytes / 16>(to.values, values + step * kKept, values_pitch, rows,
                                        (left * Staged::kSize + 31) / 32);
    if constexpr (BAlongK) {
      copy_lines<Staged::kCols, kDepthBytes / 16>(to.b, b + step * kDeep, b_pitch, cols,
                                                  (left * Staged::kSize + 15) / 16);
    } else {
      copy_lines<Staged::kDepth, Staged::kBLine / 16>(to.b, b + i64{step} * Staged::kDepth * b_pitch, b_pitch, left,
                                                      cols * Staged::kSize / 16);
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

/// The metadata of 16 rows from `row` for a stage, as mma_sparse wants it. Of 16-bit types and tf32 one word serves
/// both halves: lanes 0 and 1 of a quad have the first half's, 2 and 3 the second's.
template <typename T>
struct RowMetadata {
  static constexpr bool kBytes = sizeof(T) == 1;
  u32 words[kBytes ? 2 : 1];

  __device__ __forceinline__ void load(u32 metadata, u32 row) {
    const u32 lane = threadIdx.x % 32;
    if constexpr (kBytes) {
#pragma unroll
      for (u32 half = 0; half < 2; ++half) {
        words[half] = load_shared_32(metadata + (row + lane / 4 + lane % 2 * 8) * 16 + half * 8 + lane % 4 / 2 * 4);
      }
    } else {
      const u32 at = metadata + (row + lane / 4) * 8 + lane % 4 * 2;
      words[0] = load_shared_16(at) | load_shared_16(at + 64) << 16;
    }
  }
  template <int Half>
  __device__ __forceinline__ u32 half() const {
    return words[kBytes ? Half : 0];
  }
};

/// The fragment of b for eight columns from `n` and one sparse mma of K from `k`: four neighbouring registers.
template <typename T, bool AlongK, int Bytes>
__device__ __forceinline__ void load_columns(u32 (&b)[4], shared_tile<Bytes> tile, int n, int k) {
  const u32 lane = threadIdx.x % 32;
  if constexpr (AlongK) {
    ldmatrix(b, tile.chunk(n, lane % 8, k / chunk_of<T> + lane / 8));
  } else if constexpr (sizeof(T) == 2) {
    ldmatrix_trans(b, tile.chunk(k, lane, n / chunk_of<T>));
  } else {
#pragma unroll
    for (u32 e = 0; e < 4; ++e) {
      const u32 at = n + lane / 4;
      b[e] = load_shared_32(tile.chunk(k, lane % 4 + e * 4, at / 4) + at % 4 * 4);
    }
  }
}

/// sum += a·b of one half of a stage.
template <int Half, typename T, int Products, typename Sum>
__device__ __forceinline__ void multiply_sparse(Sum (&sum)[4], const mma_operand<T, Products>& a,
                                                const mma_operand<T, Products>& b, u32 metadata) {
  constexpr int kSelector = sizeof(T) == 1 ? 0 : Half;
  if constexpr (mma_operand<T, Products>::kRest) {
    mma_sparse<T, kSelector>(sum, a.rest, b.high, metadata);
    mma_sparse<T, kSelector>(sum, a.high, b.rest, metadata);
  }
  mma_sparse<T, kSelector>(sum, a.high, b.high, metadata);
}

/// A warp's share of a stage's half: 64 rows from m0, Eights × 8 columns from n0.
template <int Half, typename T, int Products, bool BAlongK, int Eights, typename Sum>
__device__ __forceinline__ void multiply_half(Sum (&sums)[4][Eights][4], const Stage<T, Products, BAlongK>& stage,
                                              const RowMetadata<T> (&metadata)[4], int m0, int n0) {
  const u32 lane = threadIdx.x % 32;
  u32 loaded[4][4];
  mma_operand<T, Products> a[4];
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    ldmatrix(loaded[r], stage.values.chunk(m0 + 16 * r + lane % 16, 2 * Half + lane / 16));
    a[r].set(loaded[r]);
  }
#pragma unroll
  for (int c = 0; c < Eights; ++c) {
    u32 columns[4];
    mma_operand<T, Products> b;
    load_columns<T, BAlongK>(columns, stage.b, n0 + 8 * c, Half * 2 * mma_depth<T>);
    b.set(columns);
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      multiply_sparse<Half>(sums[r][c], a[r], b, metadata[r].template half<Half>());
    }
  }
}

/// Products: 3 for tf32x3. BAlongK: b's columns are its lines, else its rows.
template <typename T, int Products, bool BAlongK, int Stages>
__global__ void __launch_bounds__(kThreads, 2) product_portable(const __grid_constant__ ProductParams p) {
  using Staged = Stage<T, Products, BAlongK>;
  using Sum = typename sum_of<T>::type;
  constexpr int kCols = Staged::kCols, kEights = kCols / 16;
  extern __shared__ __align__(128) u8 raw[];
  const u32 base = shared_address(raw);
  const TileOf tile(p);
  const i64 row0 = tile.row * kRows, col0 = tile.col * kCols;
  const Source<T, Products, BAlongK> source(p, row0, col0, tile.z);
  const int steps = static_cast<int>((p.k + Staged::kDepth - 1) / Staged::kDepth);
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int m0 = warp % 2 * 64, n0 = warp / 2 * (kCols / 2);

  const auto stage = [&](int step) { return Staged(base + static_cast<u32>(step % Stages) * Staged::kBytes); };
  const auto fetch = [&](int step) {
    if (step < steps) {
      source.fetch(stage(step), step);
    }
    copy_async_commit();
  };
  Sum sums[4][kEights][4] = {};
  for (int s = 0; s < Stages - 1; ++s) {
    fetch(s);
  }
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    copy_async_wait<Stages - 2>();
    __syncthreads();
    const Staged now = stage(step);
    RowMetadata<T> metadata[4];
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      metadata[r].load(now.metadata, m0 + 16 * r);
    }
    multiply_half<0, T, Products, BAlongK, kEights>(sums, now, metadata, m0, n0);
    fetch(step + Stages - 1);  // while the tensor cores are busy
    multiply_half<1, T, Products, BAlongK, kEights>(sums, now, metadata, m0, n0);
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

}  // namespace fretwork::two_four
