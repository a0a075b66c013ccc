// Products on the tensor cores of sm_80 and later, where both operands lie in lines: along the depth, or along rows and
// columns. A CTA makes 128 × Cols sums; a ring of stages is filled ahead, 16 bytes at a time where lines allow.
#pragma once

#include "device/load.cuh"
#include "device/tile.cuh"
#include "ops/kronecker/kernel_simple.cuh"
#include "ops/kronecker/params.h"

namespace fretwork::kronecker {

inline constexpr int kRows = 128, kThreads = 256, kStageDepth = 128;  // the last in bytes

/// 16 bytes to shared memory, of which the first `bytes` are read and the rest are zero, in copies of `unit`: 8, 4, or
/// single 16-bit elements, which pass through registers.
__device__ __forceinline__ void copy_in_units(u32 to, const void* from, int bytes, int unit) {
  const u8* const at = static_cast<const u8*>(from);
  const auto left = [&](int first, int most) { return min(most, max(0, bytes - first)); };
  if (unit == 8) {
    copy_async_small<8>(to, at, left(0, 8));
    copy_async_small<8>(to + 8, bytes > 8 ? at + 8 : at, left(8, 8));
  } else if (unit == 4) {
#pragma unroll
    for (int n = 0; n < 16; n += 4) {
      copy_async_small<4>(to + n, bytes > n ? at + n : at, left(n, 4));
    }
  } else {
    u32 words[4] = {};
#pragma unroll
    for (int n = 0; n < 16; n += 2) {
      if (n < bytes) {
        words[n / 4] |= static_cast<u32>(*reinterpret_cast<const u16*>(at + n)) << (n % 4 * 8);
      }
    }
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(words[0]), "r"(words[1]), "r"(words[2]),
                 "r"(words[3])
                 : "memory");
  }
}

/// One operand's share of a stage, Lines lines of rows (or columns) × kStageDepth bytes of depth. Depth is the inner
/// direction in memory (DepthInner), or the lines are.
template <typename T, int Lines, bool DepthInner>
struct StageOperand {
  static constexpr int kDepth = kStageDepth / static_cast<int>(sizeof(T));
  static constexpr int kBytes = Lines * kStageDepth;
  static constexpr int kLineBytes = DepthInner ? kStageDepth : Lines * static_cast<int>(sizeof(T));
  using Tile = shared_tile<kLineBytes>;

  const T* from;  ///< line 0, depth 0
  i64 stride;     ///< from one copied line to the next, in elements
  int lines;      ///< that exist, of Lines
  int unit;       ///< bytes of one copy

  __device__ __forceinline__ StageOperand(const ProductOperand& o, i64 i, i64 l, i64 first, i64 count)
      : from(static_cast<const T*>(o.data) + i * o.i + l * o.l + first * o.line),
        stride(DepthInner ? o.line : o.entry),
        lines(static_cast<int>(min(static_cast<i64>(Lines), count - first))),
        unit(o.unit) {}

  /// Depth [t, end) of up to kDepth; what does not exist is zero.
  __device__ __forceinline__ void fetch(u32 to, i64 t, i64 end) const {
    constexpr int kChunks = kLineBytes / 16, kElements = chunk_of<T>;
    const Tile tile{to};
    const int depth = static_cast<int>(min(static_cast<i64>(kDepth), end - t));
    const int outer = DepthInner ? lines : depth, inner = DepthInner ? depth : lines;
    const T* const first = from + (DepthInner ? t : t * stride);
    const auto copy = [&](int n, const auto& chunk_of_line) {
      const int line = n / kChunks, chunk = n % kChunks;
      const int left = min(kElements, inner - chunk * kElements) * static_cast<int>(sizeof(T));
      const bool there = line < outer && left > 0;
      chunk_of_line(tile.chunk(line, chunk), there ? first + line * stride + chunk * kElements : from,
                    there ? left : 0);
    };
    if (unit == 16) {
#pragma unroll
      for (int n = static_cast<int>(threadIdx.x); n < kBytes / 16; n += kThreads) {
        copy(n, copy_async_part);
      }
    } else {
#pragma unroll 1
      for (int n = static_cast<int>(threadIdx.x); n < kBytes / 16; n += kThreads) {
        copy(n, [&](u32 to, const T* at, int bytes) { copy_in_units(to, at, bytes, unit); });
      }
    }
  }
};

/// A tile of sums in shared memory, Line floats to a row, becomes the result: bias, activation, one rounding. Threads
/// follow the innermost axis of the result, with kRun neighbours each.
template <typename T, typename Out, int Cols, int Line, int kRun>
__device__ __forceinline__ void store_product(const ProductParams& p, const float* tile, i64 i, i64 l, i64 row0,
                                              i64 col0, i64 piece) {
  const bool by_row = p.out.entry == 1;  // else a column's rows are neighbours, or nothing is
  const int rows = static_cast<int>(min(static_cast<i64>(kRows), p.rows - row0));
  const int cols = static_cast<int>(min(static_cast<i64>(Cols), p.cols - col0));
  Out* const to = static_cast<Out*>(p.out.data) + piece * p.out_piece + i * p.out.i + l * p.out.l + row0 * p.out.line +
                  col0 * p.out.entry;
  const T* const bias =
      static_cast<const T*>(p.bias) + (p.bias == nullptr ? 0 : i * p.bias_i + l * p.bias_l + col0 * p.bias_col);
#pragma unroll 1
  for (int n = static_cast<int>(threadIdx.x); n < kRows * Cols / kRun; n += kThreads) {
    const int row = by_row ? n / (Cols / kRun) : n % (kRows / kRun) * kRun;
    const int col = by_row ? n % (Cols / kRun) * kRun : n / (kRows / kRun);
    const int count = min(kRun, by_row ? cols - col : rows - row);
    if (row >= rows || col >= cols) {
      continue;
    }
    float v[kRun];
#pragma unroll
    for (int e = 0; e < kRun; ++e) {
      const int r = row + (by_row ? 0 : e), c = col + (by_row ? e : 0);
      v[e] = tile[r * Line + c] + (p.bias != nullptr && e < count ? widen(bias[c * p.bias_col]) : 0.0f);
      v[e] = activate_exactly(v[e], p.activation);
    }
    Out* const at = to + row * p.out.line + col * p.out.entry;
    if (kRun > 1 && count == kRun) {
      store_run<Out, kRun>(at, v);
    } else {
#pragma unroll
      for (int e = 0; e < kRun; ++e) {
        if (e < count) {
          at[e * (by_row ? p.out.entry : p.out.line)] = narrow<Out>(v[e]);
        }
      }
    }
  }
}

/// LeftDepth, RightDepth: depth is the operand's inner direction. Products: 3 for tf32x3.
template <typename T, typename Out, int Products, int Cols, int Stages, bool LeftDepth, bool RightDepth>
__global__ void __launch_bounds__(kThreads, 1) product_portable(const __grid_constant__ ProductParams p) {
  using Left = StageOperand<T, kRows, LeftDepth>;
  using Right = StageOperand<T, Cols, RightDepth>;
  constexpr int kStageBytes = Left::kBytes + Right::kBytes, kStep = Left::kDepth, kWarpCols = Cols / 2;
  extern __shared__ __align__(128) u8 raw[];
  const u32 base = shared_address(raw);

  i64 index = blockIdx.x;
  const i64 col0 = index % p.col_tiles * Cols;
  index /= p.col_tiles;
  const i64 l = index % p.d;
  index /= p.d;
  const i64 i = index % p.a;
  index /= p.a;
  const i64 row0 = index % p.row_tiles * kRows, piece = index / p.row_tiles;
  const i64 begin = piece * p.piece, end = min(p.depth, begin + p.piece);
  const int steps = end > begin ? static_cast<int>((end - begin + kStep - 1) / kStep) : 0;
  const Left left(p.left, i, l, row0, p.rows);
  const Right right(p.right, i, l, col0, p.cols);
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int m0 = warp % 4 * 32, n0 = warp / 4 * kWarpCols;

  const auto fetch = [&](int step) {
    if (step < steps) {
      const u32 at = base + static_cast<u32>(step % Stages) * kStageBytes;
      left.fetch(at, begin + static_cast<i64>(step) * kStep, end);
      right.fetch(at + Left::kBytes, begin + static_cast<i64>(step) * kStep, end);
    }
    copy_async_commit();
  };
  register_sums<2, kWarpCols / 8> sums{};
  for (int s = 0; s < Stages - 1; ++s) {
    fetch(s);
  }
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    copy_async_wait<Stages - 2>();
    __syncthreads();
    fetch(step + Stages - 1);
    const u32 at = base + static_cast<u32>(step % Stages) * kStageBytes;
    const typename Left::Tile left_tile{at};
    const typename Right::Tile right_tile{at + Left::kBytes};
#pragma unroll
    for (int k = 0; k < kStep; k += mma_depth<T>) {
      u32 loaded[2][4];
      mma_operand<T, Products> a[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        load_left<T, LeftDepth>(loaded[r], left_tile, m0 + 16 * r, k);
        a[r].set(loaded[r]);
      }
#pragma unroll
      for (int c = 0; c < kWarpCols / 16; ++c) {
        u32 pair[4];
        mma_operand<T, Products> b;
        load_right<T, RightDepth>(pair, right_tile, n0 + 16 * c, k);
        b.set(pair);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          multiply(sums.at[r][2 * c], a[r], b, 0);
          multiply(sums.at[r][2 * c + 1], a[r], b, 2);
        }
      }
    }
  }
  copy_async_wait<0>();
  __syncthreads();

  // Through shared memory, so that threads write in the order of memory.
  constexpr int kLine = Cols + 1;
  float* const tile = reinterpret_cast<float*>(raw);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
#pragma unroll
    for (int c = 0; c < kWarpCols / 8; ++c) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int row = m0 + 16 * r + lane / 4 + e / 2 * 8, col = n0 + 8 * c + lane % 4 * 2 + e % 2;
        tile[row * kLine + col] = sums.at[r][c][e];
      }
    }
  }
  __syncthreads();
  if (p.vector) {
    store_product<T, Out, Cols, kLine, chunk_of<Out>>(p, tile, i, l, row0, col0, piece);
  } else {
    store_product<T, Out, Cols, kLine, 1>(p, tile, i, l, row0, col0, piece);
  }
}

}  // namespace fretwork::kronecker
