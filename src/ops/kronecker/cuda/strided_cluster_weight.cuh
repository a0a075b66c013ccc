// The gradient of strided_weight.cuh on Hopper, 16-bit types, d a multiple of 16: TMA fetches, and clusters of CTAs
// share d_y and x.
//
// TMA writes both operands as [j or k][n][16, 32 or 64 δ], whatever their order in memory; where d is 16 as 128-byte
// lines with all δ of four neighbouring columns, [4 columns][n]. A lane loads chunks of 8 δ at four n, which pair up
// into the fragments of eight products whose K is the batch. Which column a fragment's row stands for is free, and so
// is which n an entry of K stands for if both operands agree. The order is chosen so that eight lanes that load
// together hit different banks.
#pragma once

#include "device/pipeline.cuh"
#include "ops/kronecker/cuda/strided_cluster.cuh"
#include "ops/kronecker/cuda/strided_weight.cuh"

namespace fretwork {
namespace kronecker::strided {

/// kFlat: d = kDeltas = 16, in lines of four columns.
template <typename T, int kDeltas, bool kFlat>
struct ClusterGradient {
  static constexpr ClusterGradientTile kTile{kDeltas};
  static constexpr int kRows = kTile.rows(), kColumns = ClusterGradientTile::kColumns,
                       kDepth = ClusterGradientTile::kDepth;
  static constexpr int kRowWarps = kRows / 16;
  static constexpr u32 kPiece = 2 * kDeltas;  // bytes of a column at one n
  using Alone = Gradient<T, 8, 4>;            ///< sums and how they are stored
  using Barriers = RingBarriers<kTile.ring()>;

  /// What a CTA works on: first j, k and δ of factor i, and a piece of the batch.
  struct Part {
    int i, l, j, k, piece;
    int first, stages;
  };

  /// One thread: this CTA's share of its row's d_y and of its column's x, for all of them.
  static __device__ __forceinline__ void produce(const ClusterWeightParams& p, const ClusterSeat& seat,
                                                 const Part& part, u32 base, Barriers& barriers) {
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
                                                 const Part& part, u32 base, Barriers& barriers) {
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
          float sum = bias[u][e];  // of the four lanes of a row
          sum += __uint_as_float(__shfl_xor_sync(0xffffffffu, __float_as_uint(sum), 1));
          sum += __uint_as_float(__shfl_xor_sync(0xffffffffu, __float_as_uint(sum), 2));
          const int line = kFlat ? lane / 4 * 2 + u : lane / 4 + 8 * u;
          if (lane % 4 == 0 && row + line < w.b) {
            w.bias_partials[(static_cast<i64>(part.piece) * w.bias_shares + share) * w.features + feature +
                            static_cast<i64>(line) * w.d + e] = sum;
          }
        }
      }
    }
  }
};

/// What the CTAs of the kernel do.
template <typename Work>
struct ClusterGradientKernel {
  static constexpr Roles kRoles{.consumers = 2, .producer_registers = 40, .consumer_registers = 232, .cluster = true};
  const ClusterWeightParams& p;
  const ClusterSeat& seat;
  const typename Work::Part& part;
  u32 base;
  typename Work::Barriers& barriers;

  __device__ __forceinline__ void produce() const {
    if (threadIdx.x == 0) {
      Work::produce(p, seat, part, base, barriers);
    }
    __syncwarp();
  }
  __device__ __forceinline__ void consume() const { Work::consume(p, seat, part, base, barriers); }
};

}  // namespace kronecker::strided

/// Clusters: group (slabs of k fastest, then of j, then δ, then i) and piece of the batch.
template <typename T, int kDeltas, bool kFlat>
__global__ void __launch_bounds__(kronecker::strided::ClusterTile::kThreads, 1)
    strided_cluster_weight(const __grid_constant__ kronecker::strided::ClusterWeightParams p) {
  using Work = kronecker::strided::ClusterGradient<T, kDeltas, kFlat>;
  extern __shared__ __align__(128) u8 shared[];
  __shared__ __align__(16) typename Work::Barriers barriers;
  const u32 base = stages_in(shared);
  const kronecker::strided::WeightParams& w = p.weight;
  const kronecker::strided::ClusterSeat seat(p.cluster_rows, p.cluster_columns);
  const int cluster = static_cast<int>(blockIdx.x) / (p.cluster_rows * p.cluster_columns);
  const int group = cluster % w.groups, piece = cluster / w.groups;
  const int block = group / w.slabs_c / w.slabs_b, deltas = w.d / kDeltas;
  const i64 stages = (w.batch + Work::kDepth - 1) / Work::kDepth;
  const int first = static_cast<int>(stages * piece / w.pieces);
  const typename Work::Part part{block / deltas,
                                 block % deltas * kDeltas,
                                 (group / w.slabs_c % w.slabs_b * p.cluster_rows + seat.row) * Work::kRows,
                                 (group % w.slabs_c * p.cluster_columns + seat.column) * Work::kColumns,
                                 piece,
                                 first,
                                 static_cast<int>(stages * (piece + 1) / w.pieces) - first};
  init_barriers([&] { barriers.make(1, 8 * (p.cluster_rows + p.cluster_columns - 1)); });
  run_warp_specialized(kronecker::strided::ClusterGradientKernel<Work>{p, seat, part, base, barriers});
}

}  // namespace fretwork
