// The gradient of kernel_strided_weight.cuh on Hopper, 16-bit types, d a multiple of 16: clusters of CTAs share d_y and
// x.
//
// The copy engine lays both operands down as [j or k][n][16 δ], whatever their order in memory, which is how x lies for
// the product: the same loads give fragments whose K is the batch.
#pragma once

#include "ops/kronecker/kernel_strided_cluster.cuh"
#include "ops/kronecker/kernel_strided_weight.cuh"

namespace fretwork {
namespace kronecker::strided {

template <typename T>
struct ClusterGradient {
  using Product = ClusterWork<T, 8>;  ///< stages, barriers and the left operand's loads are the product's
  using Alone = Gradient<T, 8, 4>;    ///< sums and how they are stored
  static constexpr int kRows = 64, kColumns = 32, kDepth = 16;

  /// What a CTA works on: first j, k and δ of factor i, and a piece of the batch.
  struct Part {
    int i, l, j, k, piece;
    i64 first, last;  ///< stages
  };

  static __device__ __forceinline__ void produce(const ClusterWeightParams& p, const ClusterSeat& seat,
                                                 const Part& part, u32 base, typename Product::Barriers& barriers) {
    const int rows = kRows / seat.columns, columns = kColumns / seat.rows;
    typename Product::Slots slots(1);
#pragma unroll 1
    for (i64 stage = part.first; stage < part.last; ++stage, slots.next()) {
      const u32 at = base + slots.stage * Product::kStage, full = shared_address(&barriers.full[slots.stage]);
      const int n = static_cast<int>(stage) * kDepth;
      mbarrier::wait(shared_address(&barriers.empty[slots.stage]), slots.parity);
      mbarrier::arrive_expect(full, Product::kStage);
      load_shared_box(at + seat.column * rows * 512, &p.dy, full, part.l, n, part.j + seat.column * rows, part.i,
                      seat.row_mask);
      load_shared_box(at + Product::kTile.stage_x() + seat.row * columns * 512, &p.x, full, part.l, n,
                      part.k + seat.row * columns, part.i, seat.column_mask);
    }
  }

  /// Adds a stage's products and, with `bias`, its rows: a lane has 8 δ of 8 n of two j.
  static __device__ __forceinline__ void add_stage(typename Alone::Sums& sums, float (&bias)[2][8], bool with_bias,
                                                   u32 at, int group) {
    const u32 lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    quad raw[8];
    Product::load_chunks(raw, at, group, 0);
    u32 a[8][4];
    Product::pair_chunks(a, raw);
    if (with_bias) {
#pragma unroll
      for (int e = 0; e < 8; ++e) {
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          bias[r % 2][e] += widen(T{static_cast<u16>(a[e][r])}) + widen(T{static_cast<u16>(a[e][r] >> 16)});
        }
      }
    }
    const bool odd = g % 2 != 0;
    const u32 low = odd ? 0x1054 : 0x5410, high = odd ? 0x3276 : 0x7632;
    const u32 line =
        at + Product::kTile.stage_x() + g * 512 + (2 * t + (g & 1)) * 32 + ((static_cast<u32>(group) ^ t >> 1) << 4);
#pragma unroll
    for (int q = 0; q < kColumns / 8; ++q) {
      quad first[2], second[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        first[h] = load_quad(line + q * 4096 + h * 256);
        second[h] = load_quad((line + q * 4096 + h * 256) ^ 32);
      }
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        mma_sync<T>(sums[e][q], a[e], __byte_perm(first[0].word[e / 2], second[0].word[e / 2], e % 2 ? high : low),
                    __byte_perm(first[1].word[e / 2], second[1].word[e / 2], e % 2 ? high : low));
      }
    }
  }

  static __device__ __forceinline__ void consume(const ClusterWeightParams& p, const ClusterSeat& seat,
                                                 const Part& part, u32 base, typename Product::Barriers& barriers) {
    const WeightParams& w = p.weight;
    const int j = part.j, k = part.k;
    const int group = static_cast<int>(threadIdx.x) / 128 - 1, lane = static_cast<int>(threadIdx.x) % 32;
    const int row = j + static_cast<int>(threadIdx.x) / 32 % 4 * 16;
    const bool with_bias = w.bias_partials != nullptr && k == 0;
    typename Alone::Sums sums = {};
    float bias[2][8] = {};
    typename Product::Slots slots(0);
#pragma unroll 1
    for (i64 stage = part.first; stage < part.last; ++stage, slots.next()) {
      mbarrier::wait(shared_address(&barriers.full[slots.stage]), slots.parity);
      add_stage(sums, bias, with_bias, base + slots.stage * Product::kStage, group);
      seat.release(shared_address(&barriers.empty[slots.stage]));
    }
    const i64 feature = (static_cast<i64>(part.i) * w.b + row) * w.d + part.l + group * 8;
    const i64 at = ((static_cast<i64>(part.i) * w.b + row) * w.c + k) * w.d + part.l + group * 8;
    Alone::store(w, sums, w.partials + part.piece * w.weights + at, w.b - row, w.c - k);
    if (with_bias) {
#pragma unroll
      for (int u = 0; u < 2; ++u) {
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          float sum = bias[u][e];  // of the four lanes of a row
          sum += __uint_as_float(__shfl_xor_sync(0xffffffffu, __float_as_uint(sum), 1));
          sum += __uint_as_float(__shfl_xor_sync(0xffffffffu, __float_as_uint(sum), 2));
          const int line = lane / 4 + 8 * u;
          if (lane % 4 == 0 && row + line < w.b) {
            w.bias_partials[part.piece * w.features + feature + static_cast<i64>(line) * w.d + e] = sum;
          }
        }
      }
    }
  }
};

}  // namespace kronecker::strided

/// Clusters: group (slabs of k fastest, then of j, then δ, then i) and piece of the batch.
template <typename T>
__global__ void __launch_bounds__(kronecker::strided::ClusterTile::kThreads, 1)
    strided_cluster_weight(const __grid_constant__ kronecker::strided::ClusterWeightParams p) {
  using Work = kronecker::strided::ClusterGradient<T>;
  extern __shared__ __align__(128) u8 shared[];
  __shared__ __align__(16) typename Work::Product::Barriers barriers;
  const u32 base = (shared_address(shared) + 1023) & ~1023u;
  const kronecker::strided::WeightParams& w = p.weight;
  const kronecker::strided::ClusterSeat seat(p.cluster_rows, p.cluster_columns);
  const int cluster = static_cast<int>(blockIdx.x) / (p.cluster_rows * p.cluster_columns);
  const int group = cluster % w.groups, piece = cluster / w.groups;
  const int block = group / w.slabs_c / w.slabs_b, deltas = w.d / 16;
  const i64 stages = (w.batch + Work::kDepth - 1) / Work::kDepth;
  const typename Work::Part part{block / deltas,
                                 block % deltas * 16,
                                 (group / w.slabs_c % w.slabs_b * p.cluster_rows + seat.row) * Work::kRows,
                                 (group % w.slabs_c * p.cluster_columns + seat.column) * Work::kColumns,
                                 piece,
                                 stages * piece / w.pieces,
                                 stages * (piece + 1) / w.pieces};

  kronecker::strided::init_cluster(barriers, p.cluster_rows, p.cluster_columns);
  if (threadIdx.x < 128) {
    fewer_registers<40>();
    if (threadIdx.x == 0) {
      Work::produce(p, seat, part, base, barriers);
    }
    __syncwarp();
  } else {
    more_registers<232>();
    Work::consume(p, seat, part, base, barriers);
  }
  kronecker::strided::cluster_sync();
}

}  // namespace fretwork
