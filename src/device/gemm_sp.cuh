// Products of tiles on the sparse tensor cores, where the left operand is 2:4 (1:2 for tf32): a warp's sums += a·b over
// a stage of K, 128 bytes deep, with operands in shared memory or registers and metadata through a layout of the
// caller's.
#pragma once

#include "device/tile.cuh"

namespace fretwork {

/// A stage: bytes of K, and those of them that a keeps of a row; K in entries of T.
inline constexpr int kDepthBytes = 128, kValueBytes = 64;
template <typename T>
inline constexpr int sparse_depth = kDepthBytes / static_cast<int>(sizeof(T));

/// What a keeps of a stage, in shared memory: rows of four 16-byte chunks, so permuted that eight rows' chunks of one
/// number lie in different banks.
struct value_tile {
  u32 base;
  __device__ __forceinline__ u32 chunk(u32 row, u32 chunk) const {
    return base + row * kValueBytes + ((chunk ^ (row >> 1 & 3)) << 4);
  }
};

/// Lines × Chunks chunks of 16 bytes into a tile, by all Threads of a CTA, with cp.async. `from` is line 0, in bytes
/// like `pitch`; `lines` exist, with `chunks` chunks; the rest is zero.
template <int Lines, int Chunks, int Threads, typename Tile>
__device__ __forceinline__ void copy_lines(Tile tile, const u8* from, i64 pitch, int lines, int chunks) {
  constexpr int kStep = Threads / Chunks, kEach = Lines / kStep;
  static_assert(Threads % Chunks == 0 && kEach * kStep == Lines);
  const int line = static_cast<int>(threadIdx.x) / Chunks, chunk = static_cast<int>(threadIdx.x) % Chunks;
  const u8* at = from + line * pitch + chunk * 16;
#pragma unroll
  for (int n = 0; n < kEach; ++n) {
    copy_async_16(tile.chunk(line + n * kStep, chunk), at, line + n * kStep < lines && chunk < chunks);
    at += kStep * pitch;
  }
}

/// What a keeps in registers: fragments of Rows × 16 rows, one for each half of the stage.
template <int Rows>
struct register_values {
  u32 at[Rows][2][4];
};
/// b in registers: fragments of Eights × 8 columns.
template <int Eights>
struct register_columns {
  u32 at[Eights][2][4];
};

/// Groups in a word of metadata as a lane gives it to an instruction: four in 16 bits, of 8-bit types eight in 32. A
/// stage has four words of every row. A layout is any
///   u32 operator()(u32 row, u32 word) const
/// that gives a word of a row of the tile, its first group's nibble lowest.
template <typename T>
inline constexpr int sparse_word = sizeof(T) == 1 ? 8 : 4;

/// The plain form in shared memory, at `base`: a row's four words in one piece, rows one after another.
template <typename T>
struct plain_words {
  u32 base;
};

/// The metadata of 16 rows from `row` for a stage, as mma_sparse and wgmma's sparse product want it. Of 16-bit types
/// and tf32 one register serves both halves: lanes 0 and 1 of a quad have the first half's, 2 and 3 the second's.
template <typename T>
struct sparse_metadata {
  static constexpr bool kBytes = sizeof(T) == 1;
  u32 words[kBytes ? 2 : 1];

  template <typename Layout>
  __device__ __forceinline__ void load(const Layout& layout, u32 row) {
    const u32 lane = threadIdx.x % 32;
    if constexpr (kBytes) {
#pragma unroll
      for (u32 half = 0; half < 2; ++half) {
        words[half] = layout(row + lane / 4 + lane % 2 * 8, half * 2 + lane % 4 / 2);
      }
    } else {
      words[0] = layout(row + lane / 4, lane % 4) | layout(row + lane / 4 + 8, lane % 4) << 16;
    }
  }
  /// Addresses written out: the compiler would not find all that they share.
  __device__ __forceinline__ void load(const plain_words<T>& plain, u32 row) {
    const u32 lane = threadIdx.x % 32;
    if constexpr (kBytes) {
#pragma unroll
      for (u32 half = 0; half < 2; ++half) {
        words[half] = load_shared_32(plain.base + (row + lane / 4 + lane % 2 * 8) * 16 + half * 8 + lane % 4 / 2 * 4);
      }
    } else {
      const u32 at = plain.base + (row + lane / 4) * 8 + lane % 4 * 2;
      words[0] = load_shared_16(at) | load_shared_16(at + 64) << 16;
    }
  }
  template <int Half>
  __device__ __forceinline__ u32 half() const {
    return words[kBytes ? Half : 0];
  }
};

/// The fragment of a for 16 rows from `row` and one half of a stage.
template <int Half>
__device__ __forceinline__ void load_values(u32 (&a)[4], const value_tile& tile, int row) {
  const u32 lane = threadIdx.x % 32;
  ldmatrix(a, tile.chunk(row + lane % 16, 2 * Half + lane / 16));
}
template <int Half, int Rows>
__device__ __forceinline__ void load_values(u32 (&a)[4], const register_values<Rows>& held, int row) {
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    a[e] = held.at[row / 16][Half][e];
  }
}

/// The fragment of b for eight columns from `n` and one half of a stage. Lines of the tile are columns (AlongK) or rows
/// of b.
template <int Half, typename T, bool AlongK, int Bytes>
__device__ __forceinline__ void load_columns(u32 (&b)[4], shared_tile<Bytes> tile, int n) {
  constexpr int k = Half * 2 * mma_depth<T>;
  const u32 lane = threadIdx.x % 32;
  if constexpr (AlongK) {
    ldmatrix(b, tile.chunk(n, lane % 8, k / chunk_of<T> + lane / 8));
  } else if constexpr (sizeof(T) == 2) {
    ldmatrix_trans(b, tile.chunk(k, lane, n / chunk_of<T>));
  } else {
    static_assert(sizeof(T) == 4, "8-bit columns lie along k");
#pragma unroll
    for (u32 e = 0; e < 4; ++e) {
      const u32 at = n + lane / 4;
      b[e] = load_shared_32(tile.chunk(k, lane % 4 + e * 4, at / 4) + at % 4 * 4);
    }
  }
}
template <int Half, typename T, bool AlongK, int Eights>
__device__ __forceinline__ void load_columns(u32 (&b)[4], const register_columns<Eights>& held, int n) {
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    b[e] = held.at[n / 8][Half][e];
  }
}

/// sum += a·b of one half of a stage: 16 rows, eight columns.
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

/// One half of gemm_sp below, for loops that have something to do between the halves.
template <int Half, typename T, bool BAlongK, int Products, int Rows, int Eights, typename Sum, typename A, typename B>
__device__ __forceinline__ void gemm_sp_half(Sum (&sums)[Rows][Eights][4], const A& values, const B& columns,
                                             const sparse_metadata<T> (&metadata)[Rows], int m0, int n0) {
  u32 loaded[Rows][4];
  mma_operand<T, Products> a[Rows];
#pragma unroll
  for (int r = 0; r < Rows; ++r) {
    load_values<Half>(loaded[r], values, m0 + 16 * r);
    a[r].set(loaded[r]);
  }
#pragma unroll
  for (int c = 0; c < Eights; ++c) {
    u32 eight[4];
    mma_operand<T, Products> b;
    load_columns<Half, T, BAlongK>(eight, columns, n0 + 8 * c);
    b.set(eight);
#pragma unroll
    for (int r = 0; r < Rows; ++r) {
      multiply_sparse<Half>(sums[r][c], a[r], b, metadata[r].template half<Half>());
    }
  }
}

/// A warp's sums += a·b of a stage: Rows × 16 rows from m0, Eights × 8 columns from n0; m0 and n0 count from the
/// beginning of the operands and are multiples of 16 and 8. Entry e of sums[r][c]: row m0 + 16r + lane / 4 + e / 2 · 8,
/// column n0 + 8c + lane % 4 · 2 + e % 2. T: f16, bf16, float (as tf32; Products 3: nearly fp32), i8 or u8 (sums are
/// int), or from sm_89 on f8_e4m3 or f8_e5m2, for which sm_89 and sm_12x have an instruction of their own.
/// values: value_tile or register_values. columns: shared_tile or register_columns; a tile's lines are columns
/// (BAlongK) or rows of b. All lanes call it together.
template <typename T, bool BAlongK, int Products = 1, int Rows, int Eights, typename Sum, typename A, typename B>
__device__ __forceinline__ void gemm_sp(Sum (&sums)[Rows][Eights][4], const A& values, const B& columns,
                                        const sparse_metadata<T> (&metadata)[Rows], int m0, int n0) {
  gemm_sp_half<0, T, BAlongK, Products>(sums, values, columns, metadata, m0, n0);
  gemm_sp_half<1, T, BAlongK, Products>(sums, values, columns, metadata, m0, n0);
}

/// The same with metadata from a layout, which is asked for rows m0 … m0 + 16 · Rows − 1.
template <typename T, bool BAlongK, int Products = 1, int Rows, int Eights, typename Sum, typename A, typename B,
          typename Layout>
__device__ __forceinline__ void gemm_sp(Sum (&sums)[Rows][Eights][4], const A& values, const B& columns,
                                        const Layout& layout, int m0, int n0) {
  sparse_metadata<T> metadata[Rows];
#pragma unroll
  for (int r = 0; r < Rows; ++r) {
    metadata[r].load(layout, m0 + 16 * r);
  }
  gemm_sp<T, BAlongK, Products>(sums, values, columns, metadata, m0, n0);
}

}  // namespace fretwork
