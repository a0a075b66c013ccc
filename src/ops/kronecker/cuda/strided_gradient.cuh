// The gradient of the weights, batch first, d > 1: d_w[i,j,k,l] = Σ_n d_y[n,(i,j,l)]·x[n,(i,k,l)], and d_bias = Σ_n
// d_y.
//
// Products over the batch for V neighbouring δ at once, rows j and columns k. Both operands come as [n][j or k][δ], and
// the halves of a lane's 16-byte loads at n and n + 1 pair up into fragments of either. A CTA takes a piece of the
// batch and writes its partial sums to a workspace; reduce (generic.cuh) adds the pieces in a fixed order.
#pragma once

#include "ops/kronecker/cuda/strided.cuh"

namespace fretwork::kronecker::strided {

/// Row n, chunk q of a stage: the eight lanes that load together (four n, two chunks) meet different 16-byte banks.
template <typename T, int V>
__device__ __forceinline__ u32 batch_swizzle(u32 n) {
  const u32 t = sizeof(T) == 2 ? n >> 1 & 3 : n & 3;
  return V > chunk_of<T> ? (t & 1) | (t >> 1) << 2 : t << 1;
}

/// Element `at` of the chunks of two neighbouring n, or of one chunk of fp32.
template <typename T>
__device__ __forceinline__ u32 element(const quad& first, const quad& second, int at) {
  return sizeof(T) == 2 ? pair_halves(first.word[at / 2], second.word[at / 2], at % 2) : first.word[at];
}

template <typename T, int V, int WM>
struct Gradient {
  static constexpr Tile kTile{static_cast<int>(sizeof(T)), V, WM};
  static constexpr int kChunk = chunk_of<T>, kBlocks = kTile.columns() / 8;
  static constexpr int kParts = V > kChunk ? V / kChunk : 1, kMany = V / kParts;
  static constexpr int kSub = V < kChunk ? kChunk / V : 1;  ///< columns of a chunk
  static constexpr int kRows = kTile.batch_rows();
  static constexpr int kLeftLine = kTile.rows() * V / kChunk, kRightLine = kTile.width() * V / kChunk;
  static constexpr int kLeftBytes = kRows * kLeftLine * 16;
  using Sums = float[V][kBlocks][4];

  /// `count` columns are there; `from` is (row 0, column 0, δ 0).
  template <int Line>
  static __device__ __forceinline__ void ask(u32 to, const T* from, i64 stride, int rows, int count, int d, bool flat) {
    constexpr int kStep = kThreads / Line;
    const int q = static_cast<int>(threadIdx.x) % Line, row = static_cast<int>(threadIdx.x) / Line;
    const int column = chunk_k<T, V>(q);
    const T* chunk = from + static_cast<i64>(column) * d + chunk_delta<T, V>(q);
#pragma unroll(V < 4 ? 1 : 2)
    for (int n = row; n < kRows; n += kStep) {
      const bool inside = n < rows && column < count;
      copy_chunk<T, V>(to + n * (Line * 16) + ((q ^ batch_swizzle<T, V>(n)) << 4), inside ? chunk + n * stride : from,
                       column, count, d, inside, flat);
    }
  }

  /// The lane's chunk at n = its own + `n` (a constant), `chunk` (its own bits and constants above them), `low` XORed.
  template <int Line>
  static __device__ __forceinline__ quad load(u32 tile, int n, u32 chunk, u32 low) {
    const u32 t = threadIdx.x % 4, own = sizeof(T) == 2 ? 2 * t : t;
    return load_quad(tile + (own + n) * (Line * 16) + ((chunk ^ batch_swizzle<T, V>(own) ^ low) << 4));
  }

  static __device__ __forceinline__ void load_left(u32 (&a)[kMany][4], u32 tile, int row, int n, int part) {
    constexpr int kNext = sizeof(T) == 2 ? 1 : 0;
    const u32 g = threadIdx.x % 32 / 4;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int at = n + h * kTile.depth() / 2;
      if constexpr (V >= kChunk) {
#pragma unroll
        for (int u = 0; u < 2; ++u) {
          const u32 chunk = (row + 8 * u + g) * kParts;
          const quad first = load<kLeftLine>(tile, at, chunk, part),
                     second = load<kLeftLine>(tile, at + kNext, chunk, part);
#pragma unroll
          for (int e = 0; e < kMany; ++e) {
            a[e][2 * h + u] = element<T>(first, second, e);
          }
        }
      } else if constexpr (kSub == 2) {
        const u32 chunk = row / 2 + g;
        const quad first = load<kLeftLine>(tile, at, chunk, 0), second = load<kLeftLine>(tile, at + kNext, chunk, 0);
#pragma unroll
        for (int e = 0; e < kMany; ++e) {
          a[e][2 * h] = element<T>(first, second, e);
          a[e][2 * h + 1] = element<T>(first, second, V + e);
        }
      } else {  // four columns in a chunk, of which a row of lanes uses two
        const u32 chunk = row / 4 + g / 2;
        const quad first = load<kLeftLine>(tile, at, chunk, 0), second = load<kLeftLine>(tile, at + kNext, chunk, 0);
        const bool high = g % 2 != 0;
#pragma unroll
        for (int e = 0; e < kMany; ++e) {
#pragma unroll
          for (int u = 0; u < 2; ++u) {
            a[e][2 * h + u] =
                pair_halves(high ? first.word[2 + u] : first.word[u], high ? second.word[2 + u] : second.word[u], e);
          }
        }
      }
    }
  }

  template <int Products>
  static __device__ __forceinline__ void multiply_stage(Sums& sums, u32 left, u32 right, int row, int column,
                                                        int columns) {
    constexpr int kNext = sizeof(T) == 2 ? 1 : 0;
    const u32 g = threadIdx.x % 32 / 4;
#pragma unroll 1
    for (int n = 0; n < kRows; n += kTile.depth()) {
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        u32 a[kMany][4];
        load_left(a, left, row, n, part);
        mma_operand<T, Products> rows[kMany];
#pragma unroll
        for (int e = 0; e < kMany; ++e) {
          rows[e].set(a[e]);
        }
#pragma unroll
        for (int q = 0; q < kBlocks; q += kSub) {
          if (8 * q < columns) {
            const u32 chunk = ((column + 8 * q) / kSub + g) * kParts;
            quad raw[2][2];
#pragma unroll
            for (int h = 0; h < 2; ++h) {
              raw[h][0] = load<kRightLine>(right, n + h * kTile.depth() / 2, chunk, part);
              raw[h][1] = kNext ? load<kRightLine>(right, n + h * kTile.depth() / 2 + kNext, chunk, part) : raw[h][0];
            }
#pragma unroll
            for (int sub = 0; sub < kSub; ++sub) {
#pragma unroll
              for (int e = 0; e < kMany; ++e) {
                const u32 b[4] = {element<T>(raw[0][0], raw[0][1], sub * V + e),
                                  element<T>(raw[1][0], raw[1][1], sub * V + e), 0, 0};
                mma_operand<T, Products> eight;
                eight.set(b);
                multiply(sums[part * kMany + e][q + sub], rows[e], eight, 0);
              }
            }
          }
        }
      }
    }
  }

  /// Words of d_y's stage that a thread adds up for d_bias.
  static constexpr int kWords = (kLeftLine * 4 + kThreads - 1) / kThreads;
  using BiasSums = float[kWords][2];
  static __device__ __forceinline__ void add_bias(BiasSums& sums, u32 left) {
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      const u32 word = threadIdx.x + w * kThreads;
      if (word < kLeftLine * 4) {
#pragma unroll 2
        for (int n = 0; n < kRows; ++n) {
          const u32 two =
              load_shared_32(left + n * (kLeftLine * 16) + ((word / 4 ^ batch_swizzle<T, V>(n)) << 4) + word % 4 * 4);
          if constexpr (sizeof(T) == 2) {
            sums[w][0] += widen(T{static_cast<u16>(two)});
            sums[w][1] += widen(T{static_cast<u16>(two >> 16)});
          } else {
            sums[w][0] += __uint_as_float(two);
          }
        }
      }
    }
  }
  /// `to` is (i, j 0 of the CTA, δ 0); `rows` j are there.
  static __device__ __forceinline__ void store_bias(const BiasSums& sums, float* to, int rows, int d) {
    constexpr int kEach = sizeof(T) == 2 ? 2 : 1;
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
#pragma unroll
      for (int e = 0; e < kEach; ++e) {
        const int at = (static_cast<int>(threadIdx.x) + w * kThreads) * kEach + e, j = at / V;
        if (j < min(rows, kTile.rows())) {
          to[static_cast<i64>(j) * d + at % V] = sums[w][e];
        }
      }
    }
  }

  /// `to` is (i, j 0 and k 0 of the warp, δ 0). Sub: columns that lane rows have of a chunk, or of two.
  template <int Sub = kSub>
  static __device__ __forceinline__ void store(const WeightParams& p, const Sums& sums, float* to, int rows,
                                               int columns) {
    const int lane = static_cast<int>(threadIdx.x) % 32, g = lane / 4, t = lane % 4;
    constexpr int kWide = V < 4 ? V : 4;
#pragma unroll
    for (int u = 0; u < 2; ++u) {
      const int j = Sub == 1 ? g + 8 * u : 2 * g + u;
      float* line = to + static_cast<i64>(j) * p.c * p.d;
#pragma unroll
      for (int q = 0; q < kBlocks; ++q) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int k = 8 * (q / Sub * Sub) + (2 * t + e) * Sub + q % Sub;
          if (j < rows && k < columns) {
            float* place = line + k * p.d;
#pragma unroll
            for (int l = 0; l < V; l += kWide) {
              u32 words[kWide];
#pragma unroll
              for (int w = 0; w < kWide; ++w) {
                words[w] = __float_as_uint(sums[l + w][q][2 * u + e]);
              }
              store_words<kWide>(place + l, words);
            }
          }
        }
      }
    }
  }
};

/// CTA: group (slab of k fastest, then of j, then δ, then i) and piece of the batch.
template <typename T, int Products, int V, int WM>
__global__ void __launch_bounds__(kThreads, 1) gradient(const __grid_constant__ WeightParams p) {
  using Work = Gradient<T, V, WM>;
  constexpr Tile kTile = Work::kTile;
  extern __shared__ __align__(128) u8 shared[];
  const int group = static_cast<int>(blockIdx.x) % p.groups, piece = static_cast<int>(blockIdx.x) / p.groups;
  const int slab_c = group % p.slabs_c, slab_b = group / p.slabs_c % p.slabs_b, block = group / p.slabs_c / p.slabs_b;
  const int deltas = p.d / V, i = block / deltas, l = block % deltas * V;
  const i64 stages = (p.batch + Work::kRows - 1) / Work::kRows;
  const i64 first = stages * piece / p.pieces, last = stages * (piece + 1) / p.pieces;

  const int j0 = slab_b * kTile.rows(), k0 = slab_c * kTile.width();
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int row = warp / kTile.wn() * 16, column = warp % kTile.wn() * kTile.columns();
  const int rows = p.b - j0 - row, columns = p.c - k0 - column;  // from the warp's first on; may be negative
  const T* dy = static_cast<const T*>(p.dy) + (static_cast<i64>(i) * p.b + j0) * p.d + l;
  const T* x = static_cast<const T*>(p.x) + (static_cast<i64>(i) * p.c + k0) * p.d + l;
  const u32 ring = shared_address(shared);

  i64 ask_stage = first;
  int ask_slot = 0;
  const auto ask = [&] {
    if (ask_stage < last) {
      const u32 to = ring + ask_slot * kTile.batch_stage();
      const i64 n = ask_stage * Work::kRows;
      const int inside = static_cast<int>(min(static_cast<i64>(Work::kRows), p.batch - n));
      Work::template ask<Work::kLeftLine>(to, dy + n * p.dy_stride, p.dy_stride, inside, p.b - j0, p.d, p.dy_flat);
      Work::template ask<Work::kRightLine>(to + Work::kLeftBytes, x + n * p.x_stride, p.x_stride, inside, p.c - k0, p.d,
                                           p.x_flat);
      ++ask_stage;
      ask_slot = ask_slot + 1 == p.ring ? 0 : ask_slot + 1;
    }
    copy_async_commit();
  };
  for (int n = 1; n < p.ring; ++n) {
    ask();
  }

  typename Work::Sums sums = {};
  typename Work::BiasSums bias = {};
  const bool with_bias = p.bias_partials != nullptr && slab_c == 0;
  int slot = 0;
#pragma unroll 1
  for (i64 stage = first; stage < last; ++stage) {
    wait_ring(p.ring);
    __syncthreads();
    ask();
    const u32 left = ring + slot * kTile.batch_stage();
    if (rows > 0 && columns > 0) {
      Work::template multiply_stage<Products>(sums, left, left + Work::kLeftBytes, row, column, columns);
    }
    if (with_bias) {
      Work::add_bias(bias, left);
    }
    slot = slot + 1 == p.ring ? 0 : slot + 1;
  }

  const i64 at = ((static_cast<i64>(i) * p.b + j0 + row) * p.c + k0 + column) * p.d + l;
  Work::store(p, sums, p.partials + piece * p.weights + at, rows, columns);
  if (with_bias) {
    const i64 feature = (static_cast<i64>(i) * p.b + j0) * p.d + l;
    Work::store_bias(bias, p.bias_partials + piece * p.features + feature, p.b - j0, p.d);
  }
}

}  // namespace fretwork::kronecker::strided
