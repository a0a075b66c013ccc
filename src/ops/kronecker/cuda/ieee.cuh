// Exact fp32 products on FFMA (sm_80 and later): for operands with a unit stride, and for neighbouring δ.
#pragma once

#include "device/activation.cuh"
#include "device/copy_async.cuh"
#include "device/load.cuh"
#include "device/types.cuh"
#include "ops/kronecker/cuda/params.h"

// ----------------------------------------------------------------------------------------------------
// What the exact fp32 kernels share: copies to shared memory, a thread's operands, its multiplications, and
// activations.

namespace fretwork::kronecker::ieee {

/// Copies of one operand's share of a stage into shared memory, as it lies in global memory: Outer lines, Pitch words
/// apart, of Inner words. A thread's copies lie a fixed distance apart, so that a fetch costs few instructions.
/// Whole: no 16 bytes exist in part.
template <int Outer, int Inner, int Pitch, int Threads, bool Whole>
struct Copies {
  static constexpr int kChunks = Inner / 4;  // of 16 bytes
  static constexpr int kAcross =
      (kChunks & -kChunks) < Threads ? kChunks & -kChunks : Threads;  // by neighbouring threads
  static constexpr int kPass = Threads / kAcross, kPasses = (Outer + kPass - 1) / kPass, kBlocks = kChunks / kAcross;

  const float* source;  ///< of this thread's first copy
  i64 outer_stride, block_stride, advance;
  int outer, chunk;  ///< where this thread's first copy is

  /// `inner_stride` elements between runs of Run neighbours; `advance`: from one stage to the next.
  __device__ __forceinline__ Copies(const float* from, i64 outer_apart, i64 inner_apart, int run, i64 stage_apart)
      : outer_stride(outer_apart),
        block_stride(kAcross * 4 / run * inner_apart),
        advance(stage_apart),
        outer(static_cast<int>(threadIdx.x) / kAcross),
        chunk(static_cast<int>(threadIdx.x) % kAcross) {
    source = from + outer * outer_apart + chunk * 4 / run * inner_apart + chunk * 4 % run;
  }

  /// Of `outers` lines that exist with `inners` words each; the rest is not read and becomes zero. The next call is for
  /// the next stage.
  __device__ __forceinline__ void fetch(u32 to, int outers, int inners) {
    const u32 place = to + 4 * (outer * Pitch + chunk * 4);
    if (kPass <= Outer || outer < Outer) {
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
        const int bytes = 4 * min(4, max(0, inners - 4 * (chunk + block * kAcross)));
        const float* from = source + block * block_stride;
#pragma unroll
        for (int pass = 0; pass < kPasses; ++pass) {
          if (Outer % kPass == 0 || kPass > Outer || outer + pass * kPass < Outer) {
            const u32 there = place + 4 * (pass * kPass * Pitch + block * kAcross * 4);
            const bool exists = outer + pass * kPass < outers;
            if constexpr (Whole) {
              copy_async_16(there, from, exists && bytes > 0);
            } else {
              copy_async_part(there, from, exists ? bytes : 0);
            }
          }
          from += kPass * outer_stride;
        }
      }
    }
    source += advance;
  }

  /// The same where lines may begin anywhere, a word at a time.
  __device__ __forceinline__ void fetch_words(u32 to, int outers, int inners) {
    const float* const from = source - outer * outer_stride - chunk * 4;
#pragma unroll 1
    for (int n = static_cast<int>(threadIdx.x); n < Outer * Inner; n += Threads) {
      const int line = n / Inner, at = n % Inner;
      const bool there = line < outers && at < inners;
      copy_async_4(to + 4 * (line * Pitch + at), there ? from + line * outer_stride + at : source, there ? 4 : 0);
    }
    source += advance;
  }
};

/// Stages of shared memory in turn: one is used while the following are filled.
template <int Stages, int Words>
struct Ring {
  const float *first, *use;
  u32 fill_first, fill;
  i64 left;  ///< of the depth, not yet fetched
  int step;

  __device__ __forceinline__ Ring(const float* stages, i64 depth, int depth_of_stage)
      : first(stages),
        use(stages),
        fill_first(shared_address(stages)),
        fill(fill_first),
        left(depth),
        step(depth_of_stage) {}
  /// Of the stage to fill; not above 0 when nothing is left.
  __device__ __forceinline__ int next_depth() const { return static_cast<int>(max(i64{0}, min(left, i64{step}))); }
  __device__ __forceinline__ void filled() {
    copy_async_commit();
    left -= step;
    fill = fill == fill_first + 4 * (Stages - 1) * Words ? fill_first : fill + 4 * Words;
  }
  __device__ __forceinline__ void used() { use = use == first + (Stages - 1) * Words ? first : use + Words; }
};

template <int N>
struct alignas(4 * N) float_run {
  float at[N];
};

/// Groups of four neighbours, `Apart` from each other.
template <int N, int Apart>
__device__ __forceinline__ void load_along(float (&to)[N], const float* from) {
#pragma unroll
  for (int g = 0; g < N / 4; ++g) {
    const auto four = *reinterpret_cast<const float_run<4>*>(from + g * Apart);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      to[4 * g + e] = four.at[e];
    }
  }
}

/// Neighbours in memory become number n of Deep operands.
template <int Deep, int N>
__device__ __forceinline__ void load_across(float (&to)[Deep][N], int n, const float* from) {
  const auto run = *reinterpret_cast<const float_run<Deep>*>(from);
#pragma unroll
  for (int e = 0; e < Deep; ++e) {
    to[e][n] = run.at[e];
  }
}

template <int M, int N>
__device__ __forceinline__ void multiply_add(float (&sum)[M][N], const float (&a)[M], const float (&b)[N]) {
#pragma unroll
  for (int m = 0; m < M; ++m) {
#pragma unroll
    for (int n = 0; n < N; ++n) {
      sum[m][n] = fmaf(a[m], b[n], sum[m][n]);
    }
  }
}

}  // namespace fretwork::kronecker::ieee

// ----------------------------------------------------------------------------------------------------
// Exact fp32 products on FFMA for operands with a unit stride, along the depth or along rows and columns. A thread has
// 8 × 4·Quads sums, a warp 64 × 16·Quads; a ring of stages is filled ahead. sm_80 and later.

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

}  // namespace fretwork::kronecker::ieee

// ----------------------------------------------------------------------------------------------------
// Exact fp32 products on FFMA for neighbouring δ, batch first: y[n,j,δ] += w[j,k,δ]·x[n,k,δ]. Lanes run along δ, so
// global memory, shared memory and lanes have the same order and nothing is transposed. sm_80 and later.

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
