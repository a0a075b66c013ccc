// Exact fp32 products on FFMA for neighbouring δ, batch first: y[n,j,δ] += w[j,k,δ]·x[n,k,δ]. Lanes run along δ, so
// global memory, shared memory and lanes have the same order and nothing is transposed. sm_80 and later.
#pragma once

#include "ops/kronecker/cuda/ieee_tile.cuh"

namespace fretwork::kronecker::ieee {

/// One operand's share of a stage, Lines lines (rows or columns) × depth × V δ, in shared memory as in global memory:
/// depth inside lines (DepthInner), or lines inside depth.
template <int Lines, int V, int Threads, bool DepthInner>
struct DeltaOperand {
  static constexpr int kWords = delta_words(Lines, V, DepthInner);
  static constexpr int kInner = DepthInner ? kDeltaStep : Lines, kOuter = DepthInner ? Lines : kDeltaStep;
  static constexpr int kPitch = kWords / kOuter;

  Copies<kOuter, kInner * V, kPitch, Threads, V >= 4> copies;
  int lines;  ///< that exist, of Lines

  __device__ __forceinline__ DeltaOperand(const ProductOperand& o, i64 i, i64 l, i64 first, i64 count, i64 begin)
      : copies(static_cast<const float*>(o.data) + i * o.i + l * o.l + first * o.line + begin * o.entry,
               DepthInner ? o.line : o.entry, (DepthInner ? o.entry : o.line) * kRun / V, kRun, kDeltaStep * o.entry),
        lines(static_cast<int>(min(static_cast<i64>(Lines), count - first))) {}

  /// The next `depth`, up to kDeltaStep; what does not exist is zero.
  __device__ __forceinline__ void fetch(u32 to, int depth) {
    copies.fetch(to, DepthInner ? lines : depth, (DepthInner ? depth : lines) * V);
  }
  static __device__ __forceinline__ const float* at(const float* stage, int line, int t) {
    return stage + (DepthInner ? line * kPitch + t * V : t * kPitch + line * V);
  }

 private:
  static constexpr int kRun = V < 4 ? 4 : V;  // where V is less, a copy takes several neighbours, which lie together
};

/// V neighbouring δ to a CTA, E of them to a thread, which has 8 × C sums for each. Tiles are 64·Warps/V rows × 4·C·E
/// columns. DepthInner: the product; else the gradient of the weights, whose depth is the batch.
template <int V, int E, int C, int Warps, bool DepthInner>
__global__ void __launch_bounds__(32 * Warps, 8 / Warps) deltas_ieee(const __grid_constant__ ProductParams p) {
  constexpr int kDeltaLanes = V / E, kOthers = 32 / kDeltaLanes;
  constexpr int kLaneRows = kOthers == 32 ? 8 : kOthers == 4 ? 2 : 4, kLaneCols = kOthers / kLaneRows;
  constexpr int kRows = 64 * Warps / V, kCols = 4 * C * E, kWarpCols = kCols / (C * kLaneCols);
  using Left = DeltaOperand<kRows, V, 32 * Warps, DepthInner>;
  using Right = DeltaOperand<kCols, V, 32 * Warps, DepthInner>;
  static_assert(Warps / kWarpCols * 8 * kLaneRows == kRows);
  constexpr int kStageWords = Left::kWords + Right::kWords;
  extern __shared__ __align__(128) float stages[];

  i64 index = blockIdx.x;
  const i64 col0 = index % p.col_tiles * kCols;
  index /= p.col_tiles;
  const i64 l = index % p.l_groups * V;
  index /= p.l_groups;
  const i64 i = index % p.a;
  index /= p.a;
  const i64 row0 = index % p.row_tiles * kRows, piece = index / p.row_tiles;
  const i64 begin = piece * p.piece, end = min(p.depth, begin + p.piece);
  const int steps = end > begin ? static_cast<int>((end - begin + kDeltaStep - 1) / kDeltaStep) : 0;
  Left left(p.left, i, l, row0, p.rows, begin);
  Right right(p.right, i, l, col0, p.cols, begin);
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int delta = lane % kDeltaLanes * E,
            first_col = warp % kWarpCols * C * kLaneCols + lane / kDeltaLanes % kLaneCols;
  const int first_row = warp / kWarpCols * 8 * kLaneRows + lane / (kDeltaLanes * kLaneCols);

  Ring<kDeltaStages, kStageWords> ring(stages, end - begin, kDeltaStep);
  const auto fetch = [&] {
    if (const int depth = ring.next_depth(); depth > 0) {
      left.fetch(ring.fill, depth);
      right.fetch(ring.fill + 4 * Left::kWords, depth);
    }
    ring.filled();
  };
  float sum[E][8][C] = {};
  for (int s = 0; s < kDeltaStages - 1; ++s) {
    fetch();
  }
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    copy_async_wait<kDeltaStages - 2>();
    __syncthreads();
    fetch();
    const float* const left_stage = ring.use + delta;
    const float* const right_stage = left_stage + Left::kWords;
#pragma unroll 4
    for (int t = 0; t < kDeltaStep; ++t) {
      float a[E][8], b[E][C];
#pragma unroll
      for (int r = 0; r < 8; ++r) {
        load_across<E>(a, r, Left::at(left_stage, first_row + r * kLaneRows, t));
      }
#pragma unroll
      for (int c = 0; c < C; ++c) {
        load_across<E>(b, c, Right::at(right_stage, first_col + c * kLaneCols, t));
      }
#pragma unroll
      for (int e = 0; e < E; ++e) {
        multiply_add(sum[e], a[e], b[e]);
      }
    }
    ring.used();
  }
  copy_async_wait<0>();
  __syncthreads();

  const i64 row_first = row0 + first_row, col_first = col0 + first_col;
  float* const to = static_cast<float*>(p.out.data) + piece * p.out_piece + i * p.out.i + (l + delta) * p.out.l +
                    row_first * p.out.line + col_first * p.out.entry;
  const float* const bias = static_cast<const float*>(p.bias) +
                            (p.bias == nullptr ? 0 : i * p.bias_i + (l + delta) * p.bias_l + col_first * p.bias_col);
  const i64 rows = p.rows - row_first, cols = p.cols - col_first;
  const auto there = [&](int r, int c) { return r * kLaneRows < rows && c * kLaneCols < cols; };
  const auto at = [&](int r, int c) { return to + r * kLaneRows * p.out.line + c * kLaneCols * p.out.entry; };
  if (p.vector) {
#pragma unroll
    for (int c = 0; c < C; ++c) {
      float_run<E> add{};
#pragma unroll
      for (int e = 0; e < E; ++e) {
        add.at[e] = p.bias != nullptr && there(0, c) ? bias[c * kLaneCols * p.bias_col + e * p.bias_l] : 0.0f;
      }
#pragma unroll
      for (int r = 0; r < 8; ++r) {
        if (there(r, c)) {
          float_run<E> run;
#pragma unroll
          for (int e = 0; e < E; ++e) {
            run.at[e] = sum[e][r][c] + add.at[e];
          }
          *reinterpret_cast<float_run<E>*>(at(r, c)) = run;
        }
      }
    }
    return;
  }
  // Through a thread's own slots of shared memory, so that what is rare stands in a rolled loop.
  float* const slots = stages + threadIdx.x;
#pragma unroll
  for (int r = 0; r < 8; ++r) {
#pragma unroll
    for (int n = 0; n < C * E; ++n) {
      slots[n * 32 * Warps] = sum[n % E][r][n / E];
    }
#pragma unroll 1
    for (int n = 0; n < C * E; ++n) {
      const int c = n / E, e = n % E;
      if (there(r, c)) {
        const float v =
            slots[n * 32 * Warps] + (p.bias == nullptr ? 0.0f : bias[c * kLaneCols * p.bias_col + e * p.bias_l]);
        at(r, c)[e * p.out.l] = activate_exactly(v, p.activation);
      }
    }
  }
}

}  // namespace fretwork::kronecker::ieee
