// The plain kernel: any strides, sizes and element type, on FFMA (DFMA). A warp multiplies a 32 × 32 tile of one δ. A
// CTA has eight warps (four for fp64 before sm_80, which has less shared memory), on up to as many neighbouring δ, so
// that contiguous elements are read together.
#pragma once

#include "device/activation.cuh"
#include "device/types.cuh"
#include "ops/kronecker/cuda/params.h"

namespace fretwork::kronecker {

inline constexpr int kTile = 32, kDepth = 16, kLine = kTile + 4;

/// Where entry n of a block of Lines × Deltas × Entries stands, in the order that memory has.
template <int Lines, int Deltas, int Entries>
struct Place {
  int line, delta, entry;
  __device__ __forceinline__ Place(int n, int fast) {
    if (fast == 0) {
      delta = n % Deltas, entry = n / Deltas % Entries, line = n / (Deltas * Entries);
    } else if (fast == 1) {
      line = n % Lines, delta = n / Lines % Deltas, entry = n / (Lines * Deltas);
    } else {
      entry = n % Entries, delta = n / Entries % Deltas, line = n / (Entries * Deltas);
    }
  }
};

/// Deltas: 1, 2, 4 or 8 neighbouring δ of a CTA; it then has kWarps / Deltas tiles of rows.
template <typename T, typename Out, int Deltas, int kWarps>
__global__ void __launch_bounds__(kWarps * 32, 1) product_simple(const __grid_constant__ ProductParams p) {
  using Sum = accumulator_t<T>;
  constexpr int kRows = kTile * kWarps / Deltas;
  extern __shared__ __align__(16) u8 raw[];
  Sum(*const left)[kDepth][kLine] = reinterpret_cast<Sum(*)[kDepth][kLine]>(raw);  // by warp
  Sum(*const right)[kDepth][kLine] = left + kWarps;                                // by δ

  i64 index = blockIdx.x;
  const i64 col0 = index % p.col_tiles * kTile;
  index /= p.col_tiles;
  const i64 l0 = index % p.l_groups * Deltas;
  index /= p.l_groups;
  const i64 i = index % p.a;
  index /= p.a;
  const i64 row0 = index % p.row_tiles * kRows, piece = index / p.row_tiles;
  const i64 begin = piece * p.piece, end = min(p.depth, begin + p.piece);
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  const int r0 = lane % 8 * 4, c0 = lane / 8 * 8;

  const T* const left_from = static_cast<const T*>(p.left.data) + i * p.left.i + l0 * p.left.l + row0 * p.left.line;
  const T* const right_from =
      static_cast<const T*>(p.right.data) + i * p.right.i + l0 * p.right.l + col0 * p.right.line;
  const int deltas = static_cast<int>(min(static_cast<i64>(Deltas), p.d - l0));
  const int rows = static_cast<int>(min(static_cast<i64>(kRows), p.rows - row0));
  const int cols = static_cast<int>(min(static_cast<i64>(kTile), p.cols - col0));

  Sum sum[4][8] = {};
  for (i64 t0 = begin; t0 < end; t0 += kDepth) {
    const int depth = static_cast<int>(min(static_cast<i64>(kDepth), end - t0));
    __syncthreads();
#pragma unroll 4
    for (int n = thread; n < kRows * Deltas * kDepth; n += kWarps * 32) {
      const Place<kRows, Deltas, kDepth> at(n, p.left.fast);
      const bool there = at.line < rows && at.delta < deltas && at.entry < depth;
      const T* const from = left_from + at.delta * p.left.l + at.line * p.left.line + (t0 + at.entry) * p.left.entry;
      left[at.delta * (kWarps / Deltas) + at.line / kTile][at.entry][at.line % kTile] = there ? widen(*from) : Sum{0};
    }
#pragma unroll 4
    for (int n = thread; n < kTile * Deltas * kDepth; n += kWarps * 32) {
      const Place<kTile, Deltas, kDepth> at(n, p.right.fast);
      const bool there = at.line < cols && at.delta < deltas && at.entry < depth;
      const T* const from =
          right_from + at.delta * p.right.l + at.line * p.right.line + (t0 + at.entry) * p.right.entry;
      right[at.delta][at.entry][at.line] = there ? widen(*from) : Sum{0};
    }
    __syncthreads();
#pragma unroll 2
    for (int t = 0; t < kDepth; ++t) {
      Sum a[4], b[8];
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        a[r] = left[warp][t][r0 + r];
      }
#pragma unroll
      for (int c = 0; c < 8; ++c) {
        b[c] = right[warp / (kWarps / Deltas)][t][c0 + c];
      }
#pragma unroll
      for (int r = 0; r < 4; ++r) {
#pragma unroll
        for (int c = 0; c < 8; ++c) {
          sum[r][c] += a[r] * b[c];
        }
      }
    }
  }

  // Through shared memory, so that threads write in the order of memory as well.
  Sum(*const tile)[kTile][kTile + 1] = reinterpret_cast<Sum(*)[kTile][kTile + 1]>(raw);
  __syncthreads();
#pragma unroll
  for (int r = 0; r < 4; ++r) {
#pragma unroll
    for (int c = 0; c < 8; ++c) {
      tile[warp][r0 + r][c0 + c] = sum[r][c];
    }
  }
  __syncthreads();
  Out* const to = static_cast<Out*>(p.out.data) + piece * p.out_piece + i * p.out.i + l0 * p.out.l + row0 * p.out.line +
                  col0 * p.out.entry;
  for (int n = thread; n < kRows * Deltas * kTile; n += kWarps * 32) {
    const Place<kRows, Deltas, kTile> at(n, p.out.fast);
    if (at.line < rows && at.delta < deltas && at.entry < cols) {
      Sum v = tile[at.delta * (kWarps / Deltas) + at.line / kTile][at.line % kTile][at.entry];
      if (p.bias != nullptr) {
        v += widen(
            static_cast<const T*>(p.bias)[i * p.bias_i + (l0 + at.delta) * p.bias_l + (col0 + at.entry) * p.bias_col]);
      }
      to[at.delta * p.out.l + at.line * p.out.line + at.entry * p.out.entry] =
          narrow<Out>(activate_exactly(v, p.activation));
    }
  }
}

/// 32 features of a piece of the batch. Lanes follow what is contiguous.
template <typename T>
__global__ void __launch_bounds__(256) sum_batch(const __grid_constant__ BatchSumParams p) {
  using Sum = accumulator_t<T>;
  __shared__ Sum parts[32][33];
  const i64 groups = (p.features + 31) / 32, feature0 = blockIdx.x % groups * 32, piece = blockIdx.x / groups;
  const i64 begin = piece * p.piece, end = min(p.batch, begin + p.piece);
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const bool features_inner = p.feature_stride == 1;
#pragma unroll
  for (int part = warp; part < 32; part += 8) {
    // A warp reads 32 neighbours at once: features of every 32nd row, or rows of one feature.
    const i64 feature = feature0 + (features_inner ? lane : part);
    Sum sum = 0;
    for (i64 n = begin + (features_inner ? part : lane); feature < p.features && n < end; n += 32) {
      sum += widen(static_cast<const T*>(p.from)[n * p.batch_stride + feature * p.feature_stride]);
    }
    (features_inner ? parts[part][lane] : parts[lane][part]) = sum;
  }
  __syncthreads();
  if (threadIdx.x < 32 && feature0 + lane < p.features) {
    Sum sum = 0;
    for (int part = 0; part < 32; ++part) {
      sum += parts[part][lane];
    }
    static_cast<Sum*>(p.to)[piece * p.features + feature0 + lane] = sum;
  }
}

template <typename T>
__global__ void __launch_bounds__(256) sum_pieces(const __grid_constant__ PieceSumParams p) {
  using Sum = accumulator_t<T>;
  for (i64 n = static_cast<i64>(blockIdx.x) * 256 + threadIdx.x; n < p.count; n += static_cast<i64>(gridDim.x) * 256) {
    Sum sum = 0;
    for (i64 piece = 0; piece < p.pieces; ++piece) {
      sum += static_cast<const Sum*>(p.from)[piece * p.count + n];
    }
    i64 rest = n, at = 0;
    for (int axis = 3; axis >= 0; --axis) {
      at += rest % p.sizes[axis] * p.strides[axis];
      rest /= p.sizes[axis];
    }
    static_cast<T*>(p.to)[at] = narrow<T>(sum);
  }
}

}  // namespace fretwork::kronecker
