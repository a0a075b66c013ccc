// Kernels for any strides: on FFMA (DFMA), and on the tensor cores for operands with a unit stride; and the sums of
// partial sums that all gradients but the Hopper family's need.
#pragma once

#include "device/activation.cuh"
#include "device/barrier.cuh"
#include "device/load.cuh"
#include "device/tile.cuh"
#include "device/types.cuh"
#include "ops/kronecker/cuda/params.h"

// ----------------------------------------------------------------------------------------------------
// The plain kernel: any strides, sizes and element type, on FFMA (DFMA). A warp multiplies a 32 × 32 tile of one δ. A
// CTA has eight warps (four for fp64 before sm_80, which has less shared memory), on up to as many neighbouring δ, so
// that contiguous elements are read together.

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

}  // namespace fretwork::kronecker

// ----------------------------------------------------------------------------------------------------
// Products on the tensor cores for operands with a unit stride, along the depth or along rows and columns. A CTA has
// 128 × Cols sums; a ring of stages is filled ahead, 16 bytes at a time where the alignment allows.

namespace fretwork::kronecker {

inline constexpr int kRows = 128, kThreads = 256, kStageDepth = 128;  // the last in bytes

/// 16 bytes to shared memory, of which the first `bytes` are read and the rest are zero, as two halves.
__device__ __forceinline__ void copy_halves(u32 to, const void* from, int bytes) {
  const u8* const at = static_cast<const u8*>(from);
  copy_async_small<8>(to, at, min(8, bytes));
  copy_async_small<8>(to + 8, bytes > 8 ? at + 8 : at, max(0, bytes - 8));
}

/// The same in copies of `unit`: 4, or single 16-bit elements, which pass through registers.
__device__ __forceinline__ void copy_in_units(u32 to, const void* from, int bytes, int unit) {
  const u8* const at = static_cast<const u8*>(from);
  const auto left = [&](int first, int most) { return min(most, max(0, bytes - first)); };
  if (unit == 4) {
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
    store_shared_128(to, words);
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
    if (unit == 16) {
      fetch_chunks<true>(to, t, end, copy_async_part);
    } else if (unit == 8) {
      fetch_chunks<true>(to, t, end, copy_halves);
    } else {
      fetch_chunks<false>(to, t, end,
                          [&](u32 chunk, const T* at, int bytes) { copy_in_units(chunk, at, bytes, unit); });
    }
  }

 private:
  /// A thread copies the same chunk of several lines.
  template <bool kUnroll, typename Copy>
  __device__ __forceinline__ void fetch_chunks(u32 to, i64 t, i64 end, const Copy& copy) const {
    constexpr int kChunks = kLineBytes / 16, kElements = chunk_of<T>, kBetween = kThreads / kChunks;
    constexpr int kCopies = kBytes / 16 / kThreads;
    static_assert(kThreads % kChunks == 0 && kCopies * kThreads * 16 == kBytes);
    const Tile tile{to};
    const int depth = static_cast<int>(min(static_cast<i64>(kDepth), end - t));
    const int outer = DepthInner ? lines : depth, inner = DepthInner ? depth : lines;
    const int line = static_cast<int>(threadIdx.x) / kChunks, chunk = static_cast<int>(threadIdx.x) % kChunks;
    const int bytes = min(kElements, inner - chunk * kElements) * static_cast<int>(sizeof(T));
    const T* const first = from + (DepthInner ? t : t * stride) + line * stride + chunk * kElements;
#pragma unroll(kUnroll ? kCopies : 1)
    for (int n = 0; n < kCopies; ++n) {
      const bool there = line + n * kBetween < outer && bytes > 0;
      copy(tile.chunk(line + n * kBetween, chunk), there ? first + n * kBetween * stride : from, there ? bytes : 0);
    }
  }
};

/// A tile of sums in shared memory becomes the result: bias, activation, one rounding. Threads follow the innermost
/// axis of the result, with kRun neighbours each: columns of a row (kByRow), or rows of a column. The tile lies so that
/// neither its writers nor these readers meet in a bank.
template <typename T, typename Out, int Cols, bool kByRow>
struct SumTile {
  static constexpr int kLine = kByRow ? Cols + 1 : kRows + 4;  // floats
  float* at;

  static __device__ __forceinline__ int place(int row, int col) {
    return kByRow ? row * kLine + col : col * kLine + row;
  }

  /// Neighbours along the innermost axis; `from` is a multiple of kRun.
  template <int kRun>
  __device__ __forceinline__ void load(float (&to)[kRun], int from) const {
    constexpr int kWords = !kByRow && kRun % 4 == 0 ? 4 : 1;
#pragma unroll
    for (int e = 0; e < kRun; e += kWords) {
      const auto group = *reinterpret_cast<const word_group<kWords>*>(at + from + e);
#pragma unroll
      for (int w = 0; w < kWords; ++w) {
        to[e + w] = __uint_as_float(group.words[w]);
      }
    }
  }

  template <int kRun>
  __device__ __forceinline__ void store(const ProductParams& p, i64 i, i64 l, i64 row0, i64 col0, i64 piece) const {
    constexpr int kRuns = (kByRow ? Cols : kRows) / kRun;  // along the innermost axis
    const int rows = static_cast<int>(min(static_cast<i64>(kRows), p.rows - row0));
    const int cols = static_cast<int>(min(static_cast<i64>(Cols), p.cols - col0));
    Out* const to = static_cast<Out*>(p.out.data) + piece * p.out_piece + i * p.out.i + l * p.out.l +
                    row0 * p.out.line + col0 * p.out.entry;
    const T* const bias =
        static_cast<const T*>(p.bias) + (p.bias == nullptr ? 0 : i * p.bias_i + l * p.bias_l + col0 * p.bias_col);
#pragma unroll 1
    for (int n = static_cast<int>(threadIdx.x); n < kRows * Cols / kRun; n += kThreads) {
      const int outer = n / kRuns, inner = n % kRuns * kRun;
      const int row = kByRow ? outer : inner, col = kByRow ? inner : outer;
      const int count = min(kRun, kByRow ? cols - col : rows - row);
      if (row >= rows || col >= cols) {
        continue;
      }
      float v[kRun], add = p.bias != nullptr ? widen(bias[col * p.bias_col]) : 0.0f;
      load(v, place(row, col));
      constexpr bool kTogether = kRun <= 4 && sizeof(Out) == 2;  // more would not fit into registers
#pragma unroll
      for (int e = 0; e < kRun; ++e) {
        if (kByRow && e > 0 && e < count && p.bias != nullptr) {
          add = widen(bias[(col + e) * p.bias_col]);
        }
        v[e] = kTogether ? v[e] + add : activate_exactly(v[e] + add, p.activation);
      }
      if constexpr (kTogether) {
        activate(v, p.activation);
      }
      Out* const here = to + row * p.out.line + col * p.out.entry;
      if (kRun > 1 && count == kRun) {
        store_run<Out, kRun>(here, v);
      } else {
#pragma unroll
        for (int e = 0; e < kRun; ++e) {
          if (e < count) {
            here[e * (kByRow ? p.out.entry : p.out.line)] = narrow<Out>(v[e]);
          }
        }
      }
    }
  }
};

/// The sums of all warps, through shared memory, so that threads write in the order of memory.
template <typename T, typename Out, int Cols, bool kByRow>
__device__ __forceinline__ void store_sums(const ProductParams& p, const register_sums<2, Cols / 16>& sums, float* raw,
                                           i64 i, i64 l, i64 row0, i64 col0, i64 piece) {
  using Tile = SumTile<T, Out, Cols, kByRow>;
  const Tile tile{raw};
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int m0 = warp % 4 * 32, n0 = warp / 4 * (Cols / 2);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
#pragma unroll
    for (int c = 0; c < Cols / 16; ++c) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int row = m0 + 16 * r + lane / 4 + e / 2 * 8, col = n0 + 8 * c + lane % 4 * 2 + e % 2;
        raw[Tile::place(row, col)] = sums.at[r][c][e];
      }
    }
  }
  __syncthreads();
  constexpr int kChunk = chunk_of<Out>;
  if (p.out.unit == 16) {
    tile.template store<kChunk>(p, i, l, row0, col0, piece);
  } else if (!kByRow && p.out.unit == 8) {
    tile.template store<kChunk / 2>(p, i, l, row0, col0, piece);
  } else {
    tile.template store<1>(p, i, l, row0, col0, piece);
  }
}

/// Two CTAs share an SM, so that one stores while the other multiplies; large tiles of tf32 would not leave them enough
/// registers.
template <typename T, int Cols>
inline constexpr int kResident = sizeof(T) == 2 || Cols == 64 ? 2 : 1;

/// LeftDepth, RightDepth: depth is the operand's inner direction. Products: 3 for tf32x3.
template <typename T, typename Out, int Products, int Cols, int Stages, bool LeftDepth, bool RightDepth>
__global__ void __launch_bounds__(kThreads, kResident<T, Cols>)
    product_portable(const __grid_constant__ ProductParams p) {
  using Left = StageOperand<T, kRows, LeftDepth>;
  using Right = StageOperand<T, Cols, RightDepth>;
  constexpr int kStageBytes = Left::kBytes + Right::kBytes, kStep = Left::kDepth, kWarpCols = Cols / 2;
  extern __shared__ __align__(128) u8 raw[];
  const u32 base = shared_address(raw);

  u32 index = blockIdx.x;
  const auto split_off =
      [&](i64 by) {  // in 32 bits, as a grid is their product: long division would take a tile's time
        const u32 whole = index / static_cast<u32>(by), rest = index - whole * static_cast<u32>(by);
        index = whole;
        return static_cast<i64>(rest);
      };
  const i64 col0 = split_off(p.col_tiles) * Cols, l = split_off(p.d), i = split_off(p.a);
  const i64 row0 = split_off(p.row_tiles) * kRows, piece = index;
  const i64 begin = piece * p.piece, end = min(p.depth, begin + p.piece);
  const int steps = end > begin ? static_cast<int>((end - begin + kStep - 1) / kStep) : 0;
  const Left left(p.left, i, l, row0, p.rows);
  const Right right(p.right, i, l, col0, p.cols);
  const int warp = static_cast<int>(threadIdx.x) / 32, m0 = warp % 4 * 32, n0 = warp / 4 * kWarpCols;

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

  float* const tile = reinterpret_cast<float*>(raw);
  if (p.out.entry == 1) {
    store_sums<T, Out, Cols, true>(p, sums, tile, i, l, row0, col0, piece);
  } else {  // a column's rows are neighbours, or nothing is
    store_sums<T, Out, Cols, false>(p, sums, tile, i, l, row0, col0, piece);
  }
}

}  // namespace fretwork::kronecker

// ----------------------------------------------------------------------------------------------------
// Sums: of d_y over the batch, and of the pieces of a gradient.

namespace fretwork::kronecker {

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

/// `count` sums at `at` of each piece, added in a fixed order: a CTA's slices take every so many pieces, and each
/// thread adds what they have, in shared memory.
template <typename Sum, int kWide>
__device__ __forceinline__ void add_pieces(Sum (&sum)[kWide], const Sum* from, i64 count, i64 at, int pieces,
                                           int slices, Sum* shared) {
  constexpr int kAhead = 4;
  const int each = kThreads / slices, own = static_cast<int>(threadIdx.x) % each;
#pragma unroll
  for (Sum& one : sum) {
    one = 0;
  }
  for (int piece = static_cast<int>(threadIdx.x) / each; piece < pieces && at < count; piece += kAhead * slices) {
    Sum loaded[kAhead][kWide];
#pragma unroll
    for (int n = 0; n < kAhead; ++n) {  // without branches, so that all are under way at once
      const Sum* place = from + static_cast<i64>(min(piece + n * slices, pieces - 1)) * count + at;
      if constexpr (kWide == 4) {
        const float4 four = *reinterpret_cast<const float4*>(place);
        loaded[n][0] = four.x, loaded[n][1] = four.y, loaded[n][2] = four.z, loaded[n][3] = four.w;
      } else {
        loaded[n][0] = *place;
      }
    }
#pragma unroll
    for (int n = 0; n < kAhead; ++n) {
#pragma unroll
      for (int e = 0; e < kWide; ++e) {
        sum[e] += piece + n * slices < pieces ? loaded[n][e] : Sum{0};
      }
    }
  }
  if (slices > 1) {
#pragma unroll
    for (int e = 0; e < kWide; ++e) {
      shared[e * kThreads + threadIdx.x] = sum[e];
    }
    __syncthreads();
#pragma unroll
    for (int e = 0; e < kWide; ++e) {
      sum[e] = 0;
      for (int slice = 0; slice < slices; ++slice) {
        sum[e] += shared[e * kThreads + slice * each + own];
      }
    }
  }
}

/// Neighbours in aligned memory.
template <typename T, int kWide>
__device__ __forceinline__ void store_four(T* to, const float (&sum)[kWide]) {
  u32 words[sizeof(T)];
#pragma unroll
  for (int n = 0; n < static_cast<int>(sizeof(T)); ++n) {
    if constexpr (sizeof(T) == 2) {
      words[n] = narrow<T>(sum[2 * n % kWide]).bits | static_cast<u32>(narrow<T>(sum[(2 * n + 1) % kWide]).bits) << 16;
    } else {
      words[n] = __float_as_uint(sum[n % kWide]);
    }
  }
  store_words<static_cast<int>(sizeof(T))>(to, words);
}

/// Adds the pieces of d_w, kWide neighbours to a thread, and in the CTAs after those the pieces of d_bias; rounds once,
/// and stores with the results' own strides.
template <typename T, int kWide>
__global__ void __launch_bounds__(kThreads) reduce(const __grid_constant__ ReduceParams p) {
  using Sum = accumulator_t<T>;
  __shared__ Sum shared[kThreads * kWide];
  wait_for_earlier_kernel();
  const bool weights = blockIdx.x < p.weight_ctas;
  const int each = kThreads / (weights ? p.slices : p.bias_slices), own = static_cast<int>(threadIdx.x) % each;
  const bool first = static_cast<int>(threadIdx.x) < each;
  if (weights) {
    const i64 at = (static_cast<i64>(blockIdx.x) * each + own) * kWide;
    Sum sum[kWide];
    add_pieces(sum, static_cast<const Sum*>(p.partials), p.weights, at, p.pieces, p.slices, shared);
    if (!first || at >= p.weights) {
      return;
    }
    if constexpr (kWide == 4) {
      if (p.contiguous) {
        store_four(static_cast<T*>(p.to) + at, sum);
        return;
      }
    }
#pragma unroll
    for (int e = 0; e < kWide; ++e) {
      i64 rest = at + e, to = 0;
#pragma unroll
      for (int axis = 3; axis > 0; --axis) {
        to += rest % p.sizes[axis] * p.strides[axis];
        rest /= p.sizes[axis];
      }
      static_cast<T*>(p.to)[rest * p.strides[0] + to] = narrow<T>(sum[e]);
    }
  } else {
    const i64 at = static_cast<i64>(blockIdx.x - p.weight_ctas) * each + own;
    Sum sum[1];
    add_pieces(sum, static_cast<const Sum*>(p.bias_partials), p.features, at, p.bias_pieces, p.bias_slices, shared);
    if (first && at < p.features) {
      static_cast<T*>(p.bias)[at * p.bias_stride] = narrow<T>(sum[0]);
    }
  }
}

}  // namespace fretwork::kronecker
