// Exact fp32 products on FFMA for operands with a unit stride, along the depth or along rows and columns. A thread has
// 8 × 4·Quads sums, a warp 64 × 16·Quads; a ring of stages is filled ahead. sm_80 and later.
#pragma once

#include "device/load.cuh"
#include "ops/kronecker/cuda/ieee_tile.cuh"

namespace fretwork::kronecker::ieee {

inline constexpr int kStep = kLineStep, kStages = kLineStages;

/// One operand's share of a stage: Lines lines of rows (or columns) × kStep of depth. In shared memory as in global
/// memory, so that nothing is turned around: depth is the inner direction (DepthInner), or the lines are.
template <int Lines, int Threads, bool DepthInner>
struct Operand {
  static constexpr int kWords = line_words(Lines, DepthInner);
  static constexpr int kInner = DepthInner ? kStep : Lines, kOuter = DepthInner ? Lines : kStep;
  static constexpr int kPitch = kWords / kOuter;

  Copies<kOuter, kInner, kPitch, Threads, false> copies;
  int lines;  ///< that exist, of Lines
  bool wide;  ///< 16 bytes can be copied at once

  __device__ __forceinline__ Operand(const ProductOperand& o, i64 i, i64 l, i64 first, i64 count, i64 begin)
      : copies(static_cast<const float*>(o.data) + i * o.i + l * o.l + first * o.line + begin * o.entry,
               DepthInner ? o.line : o.entry, 4, 4, kStep * o.entry),
        lines(static_cast<int>(min(static_cast<i64>(Lines), count - first))),
        wide(o.unit == 16) {}

  /// The next `depth`, up to kStep; what does not exist is zero.
  __device__ __forceinline__ void fetch(u32 to, int depth) {
    const int outers = DepthInner ? lines : depth, inners = DepthInner ? depth : lines;
    wide ? copies.fetch(to, outers, inners) : copies.fetch_words(to, outers, inners);
  }
  static __device__ __forceinline__ const float* at(const float* stage, int line, int t) {
    return stage + (DepthInner ? line * kPitch + t : t * kPitch + line);
  }
};

/// The way out of a thread's sums, 8 × Cols at row(r), col(c) of a tile with `rows` × `cols` that exist. Runs of four
/// leave straight from registers where the host found that they can (p.vector): along columns where RowMajor, else
/// along rows. Everything else, activations too, takes a way through shared memory in a rolled loop, in two halves.
template <int TileRows, int TileCols, int Cols, bool RowMajor, typename Row, typename Col>
__device__ __forceinline__ void store(const ProductParams& p, float (&sum)[8][Cols], float* to, const float* bias,
                                      int rows, int cols, float* tile, Row row, Col col) {
  if (p.vector) {
#pragma unroll
    for (int c = 0; c < Cols; ++c) {
      const float b = bias != nullptr && col(c) < cols ? bias[col(c) * p.bias_col] : 0.0f;
#pragma unroll
      for (int r = 0; r < 8; ++r) {
        sum[r][c] += b;
      }
    }
#pragma unroll
    for (int m = 0; m < 8; m += RowMajor ? 1 : 4) {
#pragma unroll
      for (int n = 0; n < Cols; n += RowMajor ? 4 : 1) {
        if (row(m) < rows && col(n) < cols) {
          float four[4];
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            four[e] = RowMajor ? sum[m][n + e] : sum[m + e][n];
          }
          store_run<float, 4>(to + (RowMajor ? row(m) * p.out.line + col(n) : row(m) + col(n) * p.out.entry), four);
        }
      }
    }
    return;
  }
  constexpr int kLine = TileCols + 1;
#pragma unroll
  for (int half = 0; half < 2; ++half) {  // of every 64 rows
    __syncthreads();
#pragma unroll
    for (int r = 0; r < 4; ++r) {
#pragma unroll
      for (int c = 0; c < Cols; ++c) {
        const int at = row(4 * half + r);
        tile[(at / 64 * 32 + at % 32) * kLine + col(c)] = sum[4 * half + r][c];
      }
    }
    __syncthreads();
#pragma unroll 1
    for (int n = static_cast<int>(threadIdx.x); n < TileRows / 2 * TileCols; n += static_cast<int>(blockDim.x)) {
      const int s = p.out.fast == 1 ? n % (TileRows / 2) : n / TileCols;
      const int c = p.out.fast == 1 ? n / (TileRows / 2) : n % TileCols, r = s / 32 * 64 + half * 32 + s % 32;
      if (r < rows && c < cols) {
        const float v = tile[s * kLine + c] + (bias != nullptr ? bias[c * p.bias_col] : 0.0f);
        to[r * p.out.line + c * p.out.entry] = activate_exactly(v, p.activation);
      }
    }
  }
}

/// WarpRows × WarpCols warps. LeftDepth, RightDepth: depth is the operand's inner direction.
template <int Quads, int WarpRows, int WarpCols, bool LeftDepth, bool RightDepth>
__global__ void __launch_bounds__(32 * WarpRows * WarpCols, 8 / (WarpRows * WarpCols))
    product_ieee(const __grid_constant__ ProductParams p) {
  constexpr int kThreads = 32 * WarpRows * WarpCols, kCols = 4 * Quads;  // the latter of a thread
  using Left = Operand<64 * WarpRows, kThreads, LeftDepth>;
  using Right = Operand<16 * Quads * WarpCols, kThreads, RightDepth>;
  constexpr int kStageWords = Left::kWords + Right::kWords;
  // Where depth is inner, a load brings that many of it.
  constexpr int kDeep = RightDepth ? 2 : 4;
  extern __shared__ __align__(128) float stages[];

  i64 index = blockIdx.x;
  const i64 col0 = index % p.col_tiles * (16 * Quads * WarpCols);
  index /= p.col_tiles;
  const i64 l = index % p.d;
  index /= p.d;
  const i64 i = index % p.a;
  index /= p.a;
  const i64 row0 = index % p.row_tiles * (64 * WarpRows), piece = index / p.row_tiles;
  const i64 begin = piece * p.piece, end = min(p.depth, begin + p.piece);
  const int steps = end > begin ? static_cast<int>((end - begin + kStep - 1) / kStep) : 0;
  Left left(p.left, i, l, row0, p.rows, begin);
  Right right(p.right, i, l, col0, p.cols, begin);
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int m0 = warp % WarpRows * 64, n0 = warp / WarpRows * 16 * Quads;
  // A lane's rows and columns, so that lanes read neighbours.
  const auto row = [&](int r) { return m0 + (LeftDepth ? lane % 8 + 8 * r : lane % 8 * 4 + r / 4 * 32 + r % 4); };
  const auto col = [&](int c) { return n0 + (RightDepth ? lane / 8 + 4 * c : lane / 8 * 4 + c / 4 * 16 + c % 4); };

  Ring<kStages, kStageWords> ring(stages, end - begin, kStep);
  const auto fetch = [&] {
    if (const int depth = ring.next_depth(); depth > 0) {
      left.fetch(ring.fill, depth);
      right.fetch(ring.fill + 4 * Left::kWords, depth);
    }
    ring.filled();
  };
  float sum[8][kCols] = {};
  for (int s = 0; s < kStages - 1; ++s) {
    fetch();
  }
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    copy_async_wait<kStages - 2>();
    __syncthreads();
    fetch();
    const float* const left_stage = ring.use;
    const float* const right_stage = left_stage + Left::kWords;
#pragma unroll 2
    for (int t0 = 0; t0 < kStep; t0 += kDeep) {
      float a[LeftDepth ? kDeep : 1][8], b[RightDepth ? kDeep : 1][kCols];
      if constexpr (LeftDepth) {
#pragma unroll
        for (int r = 0; r < 8; ++r) {
          load_across<kDeep>(a, r, Left::at(left_stage, row(r), t0));
        }
      }
      if constexpr (RightDepth) {
#pragma unroll
        for (int c = 0; c < kCols; ++c) {
          load_across<kDeep>(b, c, Right::at(right_stage, col(c), t0));
        }
      }
#pragma unroll
      for (int t = 0; t < kDeep; ++t) {
        if constexpr (!LeftDepth) {
          load_along<8, 32>(a[0], Left::at(left_stage, row(0), t0 + t));
        }
        if constexpr (!RightDepth) {
          load_along<kCols, 16>(b[0], Right::at(right_stage, col(0), t0 + t));
        }
        multiply_add(sum, a[LeftDepth ? t : 0], b[RightDepth ? t : 0]);
      }
    }
    ring.used();
  }
  copy_async_wait<0>();
  __syncthreads();

  float* const to = static_cast<float*>(p.out.data) + piece * p.out_piece + i * p.out.i + l * p.out.l +
                    row0 * p.out.line + col0 * p.out.entry;
  const float* const bias =
      p.bias == nullptr ? nullptr : static_cast<const float*>(p.bias) + i * p.bias_i + l * p.bias_l + col0 * p.bias_col;
  const auto most = [](i64 left, int tile) { return static_cast<int>(min(left, static_cast<i64>(tile))); };
  store<64 * WarpRows, 16 * Quads * WarpCols, kCols, LeftDepth>(p, sum, to, bias, most(p.rows - row0, 64 * WarpRows),
                                                                most(p.cols - col0, 16 * Quads * WarpCols), stages, row,
                                                                col);
}

/// Threads follow what is written.
__global__ void __launch_bounds__(256) order_weights(const __grid_constant__ OrderParams p) {
  for (u32 n = blockIdx.x * 256 + threadIdx.x; n < p.count; n += gridDim.x * 256) {
    const u32 last = n % p.line, outer = n / p.line, second = outer / p.sizes[2], first = second / p.sizes[1];
    if (last < p.sizes[3]) {
      p.to[n] = p.from[first * p.strides[0] + second % p.sizes[1] * p.strides[1] + outer % p.sizes[2] * p.strides[2] +
                       last * p.strides[3]];
    }
  }
}

}  // namespace fretwork::kronecker::ieee
