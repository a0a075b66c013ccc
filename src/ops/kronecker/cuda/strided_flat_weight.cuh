// The gradient of the weights on Hopper where d is 2 or 4 and 16-bit rows are read as they lie: dw[i,j,k,l] = Σ_n
// dy[n,(i,j,l)]·x[n,(i,k,l)].
//
// TMA brings lines of 128 bytes, all δ of 64/V neighbouring columns, one below the other along the batch, which is K of
// the products. A lane's chunk of 16 bytes holds 8/V columns of one n: chunks of four n pair up with byte permutes into
// the fragments of V products and several rows (or columns) at once. Which column a fragment's row stands for is free,
// so a lane takes the columns of its chunk.
#pragma once

#include "device/mma.cuh"
#include "device/pipeline.cuh"
#include "device/tma.cuh"
#include "ops/kronecker/cuda/strided.cuh"

namespace fretwork {
namespace kronecker::strided {

template <typename T, int V, bool kBroad>
struct FlatGradient {
  static constexpr FlatTile kTile{V, kBroad};
  static constexpr int kPer = 8 / V;                                              // columns of a chunk
  static constexpr int kLeft = kTile.left_lines(), kRight = kTile.right_lines();  // lines of a warp
  static constexpr int kSteps = FlatTile::kDepth / 16;                            // of K in a stage
  static constexpr int kHigh = kPer / 2, kWide = kPer;  // blocks of 16 rows, of 8 columns, of a line
  using Barriers = RingBarriers<kTile.ring()>;
  using Sums = float[V][kLeft * kHigh][kRight * kWide][4];

  /// What a CTA works on: factor i, its first j and k, and a piece of the batch.
  struct Part {
    int i, j, k, piece;
    int first, stages;
  };

  /// One thread: lines of d_y, then of x, FlatTile::kDepth rows each.
  static __device__ __forceinline__ void produce(const FlatWeightParams& p, const Part& part, u32 base,
                                                 Barriers& barriers) {
    Producer<kTile.ring()> slots;
#pragma unroll 1
    for (int stage = 0; stage < part.stages; ++stage, slots.next()) {
      const u32 at = base + slots.stage * kTile.stage(), full = barriers.acquire(slots);
      const int n = (part.first + stage) * FlatTile::kDepth;
      mbarrier::arrive_expect(full, kTile.stage());
#pragma unroll 1
      for (int line = 0; line < kTile.all_left(); ++line) {
        tma::load(at + line * FlatTile::kLine, &p.dy, full, part.j * V + 64 * line, part.i, n);
      }
#pragma unroll 1
      for (int line = 0; line < kTile.all_right(); ++line) {
        tma::load(at + (kTile.all_left() + line) * FlatTile::kLine, &p.x, full, part.k * V + 64 * line, part.i, n);
      }
    }
  }

  /// A lane's chunk of a line at n = 2t, 2t + 1, 2t + 8 and 2t + 9 of a step; eight lanes meet eight banks.
  static __device__ __forceinline__ void load_chunks(quad (&raw)[4], u32 line) {
    const u32 g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (u32 o = 0; o < 2; ++o) {
      const u32 at = line + (2 * t + o) * 128 + ((g ^ (2 * t + o)) << 4);
      raw[o] = load_quad(at);
      raw[2 + o] = load_quad(at + 1024);
    }
  }
  /// (n, n + 1) of column `column` of the chunk and product e; `half` is 1 for n + 8.
  static __device__ __forceinline__ u32 pair(const quad (&raw)[4], int half, int column, int e) {
    const int word = (column * V + e) / 2;
    return pair_halves(raw[2 * half].word[word], raw[2 * half + 1].word[word], e % 2);
  }

  /// Adds the products of 16 rows of the batch. `left` and `right` are the warp's first lines there. Chunks are loaded
  /// while the products before them run.
  static __device__ __forceinline__ void add_step(Sums& sums, float (&bias)[kLeft][8], bool with_bias, u32 left,
                                                  u32 right) {
    quad rows[kLeft][4], columns[2][4];
#pragma unroll
    for (int line = 0; line < kLeft; ++line) {
      load_chunks(rows[line], left + line * FlatTile::kLine);
    }
    load_chunks(columns[0], right);
    u32 a[V][kLeft * kHigh][4];
#pragma unroll
    for (int line = 0; line < kLeft; ++line) {
#pragma unroll
      for (int e = 0; e < V; ++e) {
#pragma unroll
        for (int m = 0; m < kHigh; ++m) {
#pragma unroll
          for (int r = 0; r < 4; ++r) {
            a[e][line * kHigh + m][r] = pair(rows[line], r / 2, 2 * m + r % 2, e);
          }
        }
      }
    }
    if (with_bias) {
#pragma unroll
      for (int line = 0; line < kLeft; ++line) {
#pragma unroll
        for (int n = 0; n < 8; ++n) {
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            const u32 two = a[n % V][line * kHigh + n / V / 2][2 * h + n / V % 2];
            bias[line][n] += widen(T{static_cast<u16>(two)}) + widen(T{static_cast<u16>(two >> 16)});
          }
        }
      }
    }
#pragma unroll
    for (int line = 0; line < kRight; ++line) {
      if (line + 1 < kRight) {
        load_chunks(columns[(line + 1) % 2], right + (line + 1) * FlatTile::kLine);
      }
#pragma unroll
      for (int e = 0; e < V; ++e) {
#pragma unroll
        for (int column = 0; column < kWide; ++column) {
          const u32 low = pair(columns[line % 2], 0, column, e), high = pair(columns[line % 2], 1, column, e);
#pragma unroll
          for (int m = 0; m < kLeft * kHigh; ++m) {
            mma_sync<T>(sums[e][m][line * kWide + column], a[e][m], low, high);
          }
        }
      }
    }
  }

  /// Row g (+ 8) of block m of line `line` is column 8/V·g + 2m (+ 1) of its 64/V; column 2t (+ 1) of block w is
  /// 8/V·(2t (+ 1)) + w: a lane has neighbouring k, whose δ leave together.
  static __device__ __forceinline__ void store(const WeightParams& w, const Sums& sums, float* to, int rows,
                                               int columns) {
    const int g = static_cast<int>(threadIdx.x) % 32 / 4, t = static_cast<int>(threadIdx.x) % 4;
#pragma unroll
    for (int m = 0; m < kLeft * kHigh; ++m) {
#pragma unroll
      for (int u = 0; u < 2; ++u) {
        const int j = m / kHigh * (64 / V) + kPer * g + m % kHigh * 2 + u;
#pragma unroll
        for (int block = 0; block < kRight * kWide; ++block) {
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            const int k = block / kWide * (64 / V) + kPer * (2 * t + h) + block % kWide;
            if (j < rows && k < columns) {
              u32 words[V];
#pragma unroll
              for (int e = 0; e < V; ++e) {
                words[e] = __float_as_uint(sums[e][m][block][2 * u + h]);
              }
              store_words<V>(to + (static_cast<i64>(j) * w.c + k) * V, words);
            }
          }
        }
      }
    }
  }

  static __device__ __forceinline__ void consume(const FlatWeightParams& p, const Part& part, u32 base,
                                                 Barriers& barriers) {
    const WeightParams& w = p.weight;
    const int warp = uniform(threadIdx.x / 32) - 4, high = warp / kTile.across(), wide = warp % kTile.across();
    const int j = part.j + high * kLeft * (64 / V), k = part.k + wide * kTile.warp_columns();
    const bool inside = !p.skip || (j < w.b && k < w.c);
    const int share = k / kTile.warp_columns();
    const bool bias_wanted = w.bias_partials != nullptr && share < w.bias_shares;
    const u32 left = high * kLeft * FlatTile::kLine;
    const u32 right = (kTile.all_left() + wide * kRight) * FlatTile::kLine;
    Sums sums = {};
    float bias[kLeft][8] = {};
    Consumer<kTile.ring()> slots;
#pragma unroll 1
    for (int stage = 0; stage < part.stages; ++stage, slots.next()) {
      const u32 at = base + slots.stage * kTile.stage();
      barriers.wait(slots);
      if (inside) {
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
          const bool with_bias = bias_wanted && (kSteps * stage + step) % w.bias_shares == share;
          add_step(sums, bias, with_bias, left + at + step * 2048, right + at + step * 2048);
        }
      }
      barriers.release(static_cast<int>(slots.stage));
    }
    const i64 row = static_cast<i64>(part.i) * w.b + j;
    store(w, sums, w.partials + part.piece * w.weights + (row * w.c + k) * V, w.b - j, w.c - k);
    if (bias_wanted) {
      const int g = static_cast<int>(threadIdx.x) % 32 / 4;
#pragma unroll
      for (int line = 0; line < kLeft; ++line) {
#pragma unroll
        for (int n = 0; n < 8; ++n) {
          float sum = bias[line][n];  // of the four lanes that share a column
          sum += __uint_as_float(__shfl_xor_sync(0xffffffffu, __float_as_uint(sum), 1));
          sum += __uint_as_float(__shfl_xor_sync(0xffffffffu, __float_as_uint(sum), 2));
          const int column = line * (64 / V) + kPer * g + n / V;
          if (threadIdx.x % 4 == 0 && j + column < w.b) {
            w.bias_partials[(static_cast<i64>(part.piece) * w.bias_shares + share) * w.features + (row + column) * V +
                            n % V] = sum;
          }
        }
      }
    }
  }
};

/// What the CTAs of the kernel do.
template <typename Work>
struct FlatKernel {
  static constexpr Roles kRoles{.consumers = 2, .producer_registers = 24, .consumer_registers = 240};
  const FlatWeightParams& p;
  const typename Work::Part& part;
  u32 base;
  typename Work::Barriers& barriers;

  __device__ __forceinline__ void produce() const {
    if (threadIdx.x == 0) {
      tma::prefetch(&p.x);
      tma::prefetch(&p.dy);
      Work::produce(p, part, base, barriers);
    }
  }
  __device__ __forceinline__ void consume() const { Work::consume(p, part, base, barriers); }
};

}  // namespace kronecker::strided

/// CTA: group (slabs of k fastest, then of j, then i) and piece of the batch.
template <typename T, int V, bool kBroad>
__global__ void __launch_bounds__(kronecker::strided::FlatTile::kThreads, 1)
    strided_flat_weight(const __grid_constant__ kronecker::strided::FlatWeightParams p) {
  using Work = kronecker::strided::FlatGradient<T, V, kBroad>;
  extern __shared__ __align__(128) u8 shared[];
  __shared__ __align__(16) typename Work::Barriers barriers;
  const u32 base = stages_in(shared);
  const kronecker::strided::WeightParams& w = p.weight;
  const int group = static_cast<int>(blockIdx.x) % w.groups, piece = static_cast<int>(blockIdx.x) / w.groups;
  const i64 stages = (w.batch + kronecker::strided::FlatTile::kDepth - 1) / kronecker::strided::FlatTile::kDepth;
  const int first = static_cast<int>(stages * piece / w.pieces);
  const typename Work::Part part{group / w.slabs_c / w.slabs_b,
                                 group / w.slabs_c % w.slabs_b * Work::kTile.rows(),
                                 group % w.slabs_c * Work::kTile.columns(),
                                 piece,
                                 first,
                                 static_cast<int>(stages * (piece + 1) / w.pieces) - first};
  init_barriers([&] { barriers.make(1, 8); });
  run_warp_specialized(kronecker::strided::FlatKernel<Work>{p, part, base, barriers});
}

}  // namespace fretwork
