// The gradient of strided_gradient.cuh on Hopper, 16-bit types, where TMA fetches: clusters of CTAs share d_y and x if
// d is a multiple of 16, and CTAs work alone on whole lines if d is 2 or 4.
#pragma once

#include "device/mma.cuh"
#include "device/pipeline.cuh"
#include "device/tma.cuh"
#include "ops/kronecker/cuda/strided_cluster.cuh"
#include "ops/kronecker/cuda/strided_gradient.cuh"

namespace fretwork::kronecker::strided {

/// What a CTA works on: first δ, j and k of factor i, and a piece of the batch, from stage `first` on.
struct GradientPart {
  int i, l, j, k, piece;
  int first, stages;
};

/// A CTA without a cluster, as a ClusterSeat.
struct SingleSeat {
  static constexpr int rows = 1, columns = 1, row = 0, column = 0;
  __device__ __forceinline__ SingleSeat(int /*rows*/, int /*columns*/) {}
};

/// Of the four lanes of a row.
__device__ __forceinline__ float add_lanes(float sum) {
  sum += __uint_as_float(__shfl_xor_sync(0xffffffffu, __float_as_uint(sum), 1));
  return sum + __uint_as_float(__shfl_xor_sync(0xffffffffu, __float_as_uint(sum), 2));
}
/// Where a piece's sums for the bias begin, those of one share.
__device__ __forceinline__ i64 bias_sums(const WeightParams& w, int piece, int share) {
  return (static_cast<i64>(piece) * w.bias_shares + share) * w.features;
}

/// d a multiple of 16. TMA writes both operands as [j or k][n][16, 32 or 64 δ], whatever their order in memory; where d
/// is 16 as 128-byte lines with all δ of four neighbouring columns, [4 columns][n]. A lane loads chunks of 8 δ at four
/// n, which pair up into the fragments of eight products whose K is the batch. Which column a fragment's row stands for
/// is free, and so is which n an entry of K stands for if both operands agree. The order is chosen so that eight lanes
/// that load together hit different banks.
///
/// kFlat: d = kDeltas = 16, in lines of four columns.
template <typename T, int kOfDeltas, bool kFlat>
struct ClusterGradient {
  static constexpr int kDeltas = kOfDeltas;
  static constexpr ClusterGradientTile kTile{kDeltas};
  static constexpr int kRows = kTile.rows(), kColumns = ClusterGradientTile::kColumns,
                       kDepth = ClusterGradientTile::kDepth;
  static constexpr int kRowWarps = kRows / 16;
  static constexpr u32 kPiece = 2 * kDeltas;  // bytes of a column at one n
  using Alone = Gradient<T, 8, 4>;            ///< sums and how they are stored
  using Barriers = RingBarriers<kTile.ring()>;
  using Seat = ClusterSeat;
  static constexpr Roles kRoles{.consumers = 2, .producer_registers = 40, .consumer_registers = 232, .cluster = true};

  /// One thread: this CTA's share of its row's d_y and of its column's x, for all of them.
  static __device__ __forceinline__ void produce(const ClusterWeightParams& p, const ClusterSeat& seat,
                                                 const GradientPart& part, u32 base, Barriers& barriers) {
    constexpr int kPer = kFlat ? 4 : 1;  // columns of a line
    const int rows = kRows / seat.columns, columns = kColumns / seat.rows;
    const int j = (part.j + seat.column * rows) / kPer, k = (part.k + seat.row * columns) / kPer;
    const u32 left = seat.column * rows * kDepth * kPiece, right = kTile.left() + seat.row * columns * kDepth * kPiece;
    Producer<kTile.ring()> slots;
#pragma unroll 1
    for (int stage = 0; stage < part.stages; ++stage, slots.next()) {
      const u32 at = base + slots.stage * kTile.stage(), full = barriers.acquire(slots);
      const int n = (part.first + stage) * kDepth;
      mbarrier::arrive_expect(full, kTile.stage());
      load_shared_box(at + left, &p.dy, full, part.l, n, j, part.i, seat.row_mask);
      load_shared_box(at + right, &p.x, full, part.l, n, k, part.i, seat.column_mask);
    }
  }

  /// The lane's chunks of one column at its four n: of the 16 columns of a block, lane row g has 2g + u, or g + 8u
  /// where columns lie apart. There, lanes of odd g load n + 1 before n.
  static __device__ __forceinline__ void load_column(quad (&raw)[4], u32 operand, u32 block, u32 u, u32 group) {
    const u32 lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, odd = g & 1;
    constexpr u32 kNext = kFlat ? 576 : kPiece == 128 ? 144 : kPiece, kHalf = kFlat ? 1024 : 8 * kPiece;
    u32 at = operand;
    if constexpr (kFlat) {
      at += (4 * block + g / 2) * (kDepth * 128) + t * 128 + (((4 * odd + 2 * u + group) ^ t) << 4);
    } else {
      const u32 turn = kPiece == 128 ? 2 * t + odd : kPiece == 64 ? t : t >> 1;
      at += ((16 * block + 8 * u + g) * kDepth + 2 * t + odd) * kPiece + ((group ^ turn) << 4);
    }
    raw[0] = load_quad(at);
    raw[1] = load_quad(at ^ kNext);
    raw[2] = load_quad(at ^ kHalf);
    raw[3] = load_quad(at ^ kHalf ^ kNext);
  }

  /// Adds a stage's products with the first 8 · `kBlocks` columns and, with `with_bias`, its rows: a lane has 8 δ of 8
  /// n of two j.
  template <int kBlocks>
  static __device__ __forceinline__ void add_stage(typename Alone::Sums& sums, float (&bias)[2][8], bool with_bias,
                                                   u32 at, u32 block, u32 group) {
    const bool turned = !kFlat && threadIdx.x % 8 >= 4;  // odd rows
    const u32 low = turned ? 0x1054 : 0x5410, high = turned ? 0x3276 : 0x7632;
    const auto pair = [&](const quad& one, const quad& other, int e) {
      return __byte_perm(one.word[e / 2], other.word[e / 2], e % 2 ? high : low);
    };
    quad rows[2][4], columns[2][4];
    load_column(rows[0], at, block, 0, group);
    load_column(rows[1], at, block, 1, group);
    load_column(columns[0], at + kTile.left(), 0, 0, group);
    u32 a[8][4];
#pragma unroll
    for (int e = 0; e < 8; ++e) {
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        a[e][r] = pair(rows[r % 2][r / 2 * 2], rows[r % 2][r / 2 * 2 + 1], e);
      }
    }
    if (with_bias) {
#pragma unroll
      for (int e = 0; e < 8; ++e) {
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          bias[r % 2][e] += widen(T{static_cast<u16>(a[e][r])}) + widen(T{static_cast<u16>(a[e][r] >> 16)});
        }
      }
    }
#pragma unroll
    for (int q = 0; q < kBlocks; ++q) {
      const quad(&now)[4] = columns[q % 2];
      if (q + 1 < kBlocks) {
        load_column(columns[(q + 1) % 2], at + kTile.left(), (q + 1) / 2, (q + 1) % 2, group);
      }
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        mma_sync<T>(sums[e][q], a[e], pair(now[0], now[1], e), pair(now[2], now[3], e));
      }
    }
  }

  static __device__ __forceinline__ void consume(const ClusterWeightParams& p, const ClusterSeat& seat,
                                                 const GradientPart& part, u32 base, Barriers& barriers) {
    const WeightParams& w = p.weight;
    const int warp = uniform(threadIdx.x / 32) - 4, lane = static_cast<int>(threadIdx.x) % 32;
    const int group = warp / kRowWarps, block = warp % kRowWarps;
    const int row = part.j + block * 16, k = part.k;
    const int share = k / kColumns;
    const bool bias_wanted = w.bias_partials != nullptr && share < w.bias_shares;
    typename Alone::Sums sums = {};
    float bias[2][8] = {};
    Consumer<kTile.ring()> slots;
#pragma unroll 1
    for (int stage = 0; stage < part.stages; ++stage, slots.next()) {
      const bool with_bias = bias_wanted && stage % w.bias_shares == share;
      barriers.wait(slots);
      if (row < w.b && k + 16 < w.c) {
        add_stage<kColumns / 8>(sums, bias, with_bias, base + slots.stage * kTile.stage(), block, group);
      } else if (row < w.b && k < w.c) {
        add_stage<2>(sums, bias, with_bias, base + slots.stage * kTile.stage(), block, group);
      }
      seat.release(barriers, slots.stage);
    }
    const i64 feature = (static_cast<i64>(part.i) * w.b + row) * w.d + part.l + group * 8;
    const i64 at = ((static_cast<i64>(part.i) * w.b + row) * w.c + k) * w.d + part.l + group * 8;
    Alone::template store<kFlat ? 2 : 1>(w, sums, w.partials + part.piece * w.weights + at, w.b - row, w.c - k);
    if (bias_wanted) {
#pragma unroll
      for (int u = 0; u < 2; ++u) {
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          const int line = kFlat ? lane / 4 * 2 + u : lane / 4 + 8 * u;
          const float sum = add_lanes(bias[u][e]);
          if (lane % 4 == 0 && row + line < w.b) {
            w.bias_partials[bias_sums(w, part.piece, share) + feature + static_cast<i64>(line) * w.d + e] = sum;
          }
        }
      }
    }
  }
};

/// d = 2 or 4. TMA brings lines of 128 bytes, all δ of 64/V neighbouring columns, one below the other along the batch,
/// which is K of the products. A lane's chunk of 16 bytes holds 8/V columns of one n: chunks of four n pair up with
/// byte permutes into the fragments of V products and several rows (or columns) at once. Which column a fragment's row
/// stands for is free, so a lane takes the columns of its chunk.
template <typename T, int V, bool kBroad>
struct FlatGradient {
  static constexpr FlatTile kTile{V, kBroad};
  static constexpr int kRows = kTile.rows(), kColumns = kTile.columns(), kDepth = FlatTile::kDepth, kDeltas = V;
  static constexpr int kPer = 8 / V;                                              // columns of a chunk
  static constexpr int kLeft = kTile.left_lines(), kRight = kTile.right_lines();  // lines of a warp
  static constexpr int kSteps = kDepth / 16;                                      // of K in a stage
  static constexpr int kHigh = kPer / 2, kWide = kPer;  // blocks of 16 rows, of 8 columns, of a line
  using Barriers = RingBarriers<kTile.ring()>;
  using Sums = float[V][kLeft * kHigh][kRight * kWide][4];

  using Seat = SingleSeat;
  static constexpr Roles kRoles{.consumers = 2, .producer_registers = 24, .consumer_registers = 240};

  /// One thread: lines of d_y, then of x, kDepth rows each.
  static __device__ __forceinline__ void produce(const ClusterWeightParams& p, const Seat& /*seat*/,
                                                 const GradientPart& part, u32 base, Barriers& barriers) {
    tma::prefetch(&p.x);
    tma::prefetch(&p.dy);
    Producer<kTile.ring()> slots;
#pragma unroll 1
    for (int stage = 0; stage < part.stages; ++stage, slots.next()) {
      const u32 at = base + slots.stage * kTile.stage(), full = barriers.acquire(slots);
      const int n = (part.first + stage) * kDepth;
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

  static __device__ __forceinline__ void consume(const ClusterWeightParams& p, const Seat& /*seat*/,
                                                 const GradientPart& part, u32 base, Barriers& barriers) {
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
          const int column = line * (64 / V) + kPer * g + n / V;
          const float sum = add_lanes(bias[line][n]);
          if (threadIdx.x % 4 == 0 && j + column < w.b) {
            w.bias_partials[bias_sums(w, part.piece, share) + (row + column) * V + n % V] = sum;
          }
        }
      }
    }
  }
};

/// What the CTAs of the kernel do.
template <typename Work>
struct ClusterGradientKernel {
  static constexpr Roles kRoles = Work::kRoles;
  const ClusterWeightParams& p;
  const typename Work::Seat& seat;
  const GradientPart& part;
  u32 base;
  typename Work::Barriers& barriers;

  __device__ __forceinline__ void produce() const {
    if (threadIdx.x == 0) {
      Work::produce(p, seat, part, base, barriers);
    }
    if constexpr (kRoles.cluster) {
      __syncwarp();
    }
  }
  __device__ __forceinline__ void consume() const { Work::consume(p, seat, part, base, barriers); }
};

/// Clusters, of one CTA for FlatGradient: group (slabs of k fastest, then of j, then δ, then i) and piece of the batch.
template <typename Work>
__global__ void __launch_bounds__(ClusterTile::kThreads, 1)
    cluster_gradient(const __grid_constant__ ClusterWeightParams p) {
  constexpr bool kShared = Work::kRoles.cluster;  // else a CTA has all δ
  extern __shared__ __align__(128) u8 shared[];
  __shared__ __align__(16) typename Work::Barriers barriers;
  const u32 base = stages_in(shared);
  const WeightParams& w = p.weight;
  const typename Work::Seat seat(p.cluster_rows, p.cluster_columns);
  const int cluster = static_cast<int>(blockIdx.x) / (seat.rows * seat.columns);
  const int group = cluster % w.groups, piece = cluster / w.groups;
  const int block = kShared ? group / w.slabs_c / w.slabs_b : 0, deltas = kShared ? w.d / Work::kDeltas : 1;
  const i64 stages = (w.batch + Work::kDepth - 1) / Work::kDepth;
  const int first = static_cast<int>(stages * piece / w.pieces);
  const GradientPart part{kShared ? block / deltas : group / w.slabs_c / w.slabs_b,
                          block % deltas * Work::kDeltas,
                          (group / w.slabs_c % w.slabs_b * seat.rows + seat.row) * Work::kRows,
                          (group % w.slabs_c * seat.columns + seat.column) * Work::kColumns,
                          piece,
                          first,
                          static_cast<int>(stages * (piece + 1) / w.pieces) - first};
  init_barriers([&] { barriers.make(1, 8 * (seat.rows + seat.columns - 1)); });
  run_warp_specialized(ClusterGradientKernel<Work>{p, seat, part, base, barriers});
}

}  // namespace fretwork::kronecker::strided
