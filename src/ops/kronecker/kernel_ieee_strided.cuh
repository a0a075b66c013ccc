// Exact fp32 products on FFMA for neighbouring δ, batch first. Lanes run along δ, so that memory, shared memory and
// lanes have the same order and nothing is turned around: y[n,j,δ] += w[j,k,δ]·x[n,k,δ]. sm_80 and later.
#pragma once

#include "ops/kronecker/kernel_ieee_tile.cuh"

namespace fretwork::kronecker::ieee {

/// One operand's share of a stage, Lines lines (rows or columns) × depth × V δ, in shared memory as in global memory:
/// depth inside lines (DepthInner), or lines inside depth.
template <int Lines, int V, int Threads, bool DepthInner>
struct DeltaOperand {
  static constexpr int kStep = delta_step(V), kInner = DepthInner ? kStep : Lines, kOuter = DepthInner ? Lines : kStep;
  static constexpr int kWords = delta_words(Lines, V, DepthInner), kPitch = kWords / kOuter;

  const float* from;  ///< line 0, depth 0, first δ
  i64 outer, inner;   ///< strides
  int lines;          ///< that exist, of Lines

  __device__ __forceinline__ DeltaOperand(const ProductOperand& o, i64 i, i64 l, i64 first, i64 count)
      : from(static_cast<const float*>(o.data) + i * o.i + l * o.l + first * o.line),
        outer(DepthInner ? o.line : o.entry),
        inner(DepthInner ? o.entry : o.line),
        lines(static_cast<int>(min(static_cast<i64>(Lines), count - first))) {}

  /// Depth [t, end) of up to kStep; what does not exist is zero.
  __device__ __forceinline__ void fetch(u32 to, i64 t, i64 end) const {
    constexpr int kChunks = kInner * V / 4, kCopies = (kOuter * kChunks + Threads - 1) / Threads;
    const int depth = static_cast<int>(min(static_cast<i64>(kStep), end - t));
    const int outers = DepthInner ? lines : depth, inners = DepthInner ? depth : lines;
    const float* const first = from + t * (DepthInner ? inner : outer);
#pragma unroll
    for (int s = 0; s < kCopies; ++s) {
      const int n = s * Threads + static_cast<int>(threadIdx.x);
      if (kOuter * kChunks % Threads != 0 && n >= kOuter * kChunks) {
        break;
      }
      const int o = n / kChunks, at = n % kChunks * 4;
      const int bytes = V < 4 ? min(16, (inners - at / V) * V * 4) : at / V < inners ? 16 : 0;
      const bool there = o < outers && bytes > 0;
      copy_async_part(to + 4 * (o * kPitch + at), there ? first + o * outer + at / V * inner + at % V : from,
                      there ? bytes : 0);
    }
  }
  static __device__ __forceinline__ const float* at(const float* stage, int line, int t) {
    return stage + (DepthInner ? line * kPitch + t * V : t * kPitch + line * V);
  }
};

/// V neighbouring δ to a CTA, E of them to a thread, which has 8 × C sums for each. Tiles are 64·Warps/V rows × 4·C·E
/// columns. DepthInner: the product; else the gradient of the weights, whose depth is the batch.
template <int V, int E, int C, int Warps, bool DepthInner>
__global__ void __launch_bounds__(32 * Warps, 8 / Warps) deltas_ieee(const __grid_constant__ Params p) {
  constexpr int kDeltaLanes = V / E, kOthers = 32 / kDeltaLanes;
  constexpr int kLaneRows = kOthers == 32 ? 8 : kOthers == 4 ? 2 : 4, kLaneCols = kOthers / kLaneRows;
  constexpr int kRows = 64 * Warps / V, kCols = 4 * C * E, kWarpCols = kCols / (C * kLaneCols);
  using Left = DeltaOperand<kRows, V, 32 * Warps, DepthInner>;
  using Right = DeltaOperand<kCols, V, 32 * Warps, DepthInner>;
  static_assert(Warps / kWarpCols * 8 * kLaneRows == kRows);
  constexpr int kStageWords = Left::kWords + Right::kWords, kStep = Left::kStep;
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
  const int steps = end > begin ? static_cast<int>((end - begin + kStep - 1) / kStep) : 0;
  const Left left(p.left, i, l, row0, p.rows);
  const Right right(p.right, i, l, col0, p.cols);
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int delta = lane % kDeltaLanes * E,
            first_col = warp % kWarpCols * C * kLaneCols + lane / kDeltaLanes % kLaneCols;
  const int first_row = warp / kWarpCols * 8 * kLaneRows + lane / (kDeltaLanes * kLaneCols);

  const u32 base = shared_address(stages);
  const auto fetch = [&](int step) {
    if (step < steps) {
      const u32 at = base + static_cast<u32>(step % kDeltaStages) * (4 * kStageWords);
      left.fetch(at, begin + static_cast<i64>(step) * kStep, end);
      right.fetch(at + 4 * Left::kWords, begin + static_cast<i64>(step) * kStep, end);
    }
    copy_async_commit();
  };
  float sum[E][8][C] = {};
  for (int s = 0; s < kDeltaStages - 1; ++s) {
    fetch(s);
  }
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    copy_async_wait<kDeltaStages - 2>();
    __syncthreads();
    fetch(step + kDeltaStages - 1);
    const float* const left_stage = stages + step % kDeltaStages * kStageWords + delta;
    const float* const right_stage = left_stage + Left::kWords;
#pragma unroll 4
    for (int t = 0; t < kStep; ++t) {
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
        at(r, c)[e * p.out.l] = activate(v, p.activation);
      }
    }
  }
}

}  // namespace fretwork::kronecker::ieee
