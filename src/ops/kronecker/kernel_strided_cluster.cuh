// The product of kernel_strided.cuh on Hopper, for factors that L2 would hold back: clusters of CTAs share x and
// weights.
//
// The sums of V·b·c products fill the registers quickly, so a CTA's tile of one δ is small (64 × 32 with 16 δ) and
// reads much for what it computes: 21 FLOP per byte of L2, which gives 24 bytes per clock and SM. In a cluster of 2 × 4
// the copy engine brings each piece of x to four CTAs and each piece of the weights to two: 64 FLOP per byte. The A
// fragments that byte permutes build are what wgmma takes from registers; B are packed weights in shared memory, read
// once per 64 rows.
#pragma once

#include "device/barrier.cuh"
#include "device/cluster.cuh"
#include "device/tma.cuh"
#include "device/wgmma.cuh"
#include "ops/kronecker/kernel_strided.cuh"

namespace fretwork {
namespace kronecker::strided {

/// Boxes and bytes to the same place in every CTA of `mask`, counted by the barrier at the same place.
__device__ __forceinline__ void load_shared_box(u32 to, const void* map, u32 barrier, int x, int y, int z, u16 mask) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, "
      "{%3, %4, %5}], [%2], %6;" ::"r"(to),
      "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z), "h"(mask)
      : "memory");
}
__device__ __forceinline__ void load_shared_box(u32 to, const void* map, u32 barrier, int x, int y, int z, int w,
                                                u16 mask) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, "
      "{%3, %4, %5, %6}], [%2], %7;" ::"r"(to),
      "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(w), "h"(mask)
      : "memory");
}
__device__ __forceinline__ void load_shared_bytes(u32 to, const void* from, int bytes, u32 barrier, u16 mask) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], %2, [%3], "
      "%4;" ::"r"(to),
      "l"(from), "r"(bytes), "r"(barrier), "h"(mask)
      : "memory");
}
__device__ __forceinline__ void store_quad(u32 address, const u32 (&words)[4]) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(words[0]), "r"(words[1]), "r"(words[2]),
               "r"(words[3])
               : "memory");
}

/// Where a CTA stands and what it works on.
struct ClusterPlace {
  int row, column;  ///< in the cluster
  int i, l, slab;   ///< factor, first δ, slab of columns
  i64 first, last;  ///< tiles of the cluster
  u16 row_mask, column_mask;

  __device__ __forceinline__ ClusterPlace(const ClusterParams& p, ClusterTile tile) {
    const int rank = static_cast<int>(cluster_rank()), rows = p.cluster_rows, columns = p.cluster_columns;
    row = rank / columns;
    column = rank % columns;
    const int cluster = static_cast<int>(blockIdx.x) / (rows * columns);
    const int group = cluster % p.product.groups, piece = cluster / p.product.groups;
    const int across = p.product.slabs / columns, block = group / across, deltas = p.product.d / tile.deltas();
    slab = group % across * columns + column;
    i = block / deltas;
    l = block % deltas * tile.deltas();
    const i64 height = static_cast<i64>(rows) * tile.rows(), tiles = (p.product.batch + height - 1) / height;
    first = tiles * piece / p.product.pieces;
    last = tiles * (piece + 1) / p.product.pieces;
    set_masks(rows, columns);
  }
  __device__ __forceinline__ ClusterPlace() {}
  __device__ __forceinline__ void set_masks(int rows, int columns) {
    row_mask = static_cast<u16>(((1 << columns) - 1) << (row * columns));
    u32 mask = 0;
    for (int r = 0; r < rows; ++r) {
      mask |= 1u << (r * columns + column);
    }
    column_mask = static_cast<u16>(mask);
  }
  /// A warp tells those whose copies arrive here, this CTA among them, that a stage is free.
  __device__ __forceinline__ void release(u32 empty, int rows, int columns) const {
    const int lane = static_cast<int>(threadIdx.x) % 32, other = lane - columns;
    __syncwarp();
    if (lane < rows + columns - 1) {
      arrive_at(empty,
                static_cast<u32>(lane < columns ? row * columns + lane : (other + (other >= row)) * columns + column));
    }
  }
};

template <typename T, int V>
struct ClusterWork {
  static constexpr ClusterTile kTile{V};
  using Work = Product<T, V, 4>;
  static constexpr int kColumns = kTile.columns();
  static constexpr int kStage = ClusterTile::kStageX + ClusterTile::kStageW;
  struct Barriers {
    u64 full[ClusterTile::kRing], empty[ClusterTile::kRing];
  };
  using Slots = Ring<ClusterTile::kRing>;

  /// One thread: this CTA's share of its row's x and of its column's weights, for all of them.
  static __device__ __forceinline__ void produce(const ClusterParams& p, const ClusterPlace& place, u32 base,
                                                 Barriers& barriers) {
    const int rows = kTile.rows() / p.cluster_columns, w_bytes = ClusterTile::kStageW / p.cluster_rows;
    const int deltas = p.product.d / kTile.deltas();
    const i64 group = (static_cast<i64>(place.i) * deltas + place.l / kTile.deltas()) * p.product.slabs + place.slab;
    const u8* w =
        static_cast<const u8*>(p.product.w) + group * p.product.stages * ClusterTile::kStageW + place.row * w_bytes;
    Slots slots(1);
#pragma unroll 1
    for (i64 tile = place.first; tile < place.last; ++tile) {
      const int n = static_cast<int>((tile * p.cluster_rows + place.row) * kTile.rows()) + place.column * rows;
#pragma unroll 1
      for (int stage = 0; stage < p.product.stages; ++stage, slots.next()) {
        const u32 at = base + slots.stage * kStage, full = shared_address(&barriers.full[slots.stage]);
        wait_cluster(shared_address(&barriers.empty[slots.stage]), slots.parity);
        mbarrier::arrive_expect(full, kStage);
        if constexpr (V == 8) {
          load_shared_box(at + place.column * rows * 512, &p.x, full, place.l, stage * 16, place.i, n, place.row_mask);
        } else {
#pragma unroll
          for (int step = 0; step < 2; ++step) {
            load_shared_box(at + step * 16384 + place.column * rows * 128, &p.x, full, (stage * 32 + step * 16) * 4,
                            place.i, n, place.row_mask);
          }
        }
        load_shared_bytes(at + ClusterTile::kStageX + place.row * w_bytes,
                          w + static_cast<i64>(stage) * ClusterTile::kStageW, w_bytes, full, place.column_mask);
      }
    }
  }

  /// The chunks of a warp's 16 rows and 16 of K: x lies as the copy engine swizzles it, in rows of 32 bytes (one k, 16
  /// δ) or 128 (16 k, 4 δ). With V = 8, lanes of odd rows load k + 1 before k, so that eight lanes meet eight banks.
  static __device__ __forceinline__ void load_chunks(quad (&raw)[V], u32 x, int group, int step) {
    const u32 lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, warp = threadIdx.x / 32 % 4;
#pragma unroll
    for (int u = 0; u < 2; ++u) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        if constexpr (V == 8) {
          const u32 at = x + (16 * warp + g + 8 * u) * 512 + (2 * t + (g & 1)) * 32 + h * 256 +
                         ((static_cast<u32>(group) ^ t >> 1) << 4);
          raw[4 * u + 2 * h] = load_quad(at);
          raw[4 * u + 2 * h + 1] = load_quad(at ^ 32);
        } else {
          raw[2 * u + h] =
              load_quad(x + step * 16384 + (64 * group + 16 * warp + g + 8 * u) * 128 + (((2 * t + h) ^ g) << 4));
        }
      }
    }
  }
  static __device__ __forceinline__ void pair_chunks(u32 (&a)[V][4], const quad (&raw)[V]) {
    const bool odd = threadIdx.x % 8 >= 4;  // the lane's row
    const u32 low = V == 8 && odd ? 0x1054 : 0x5410, high = V == 8 && odd ? 0x3276 : 0x7632;
#pragma unroll
    for (int e = 0; e < V; ++e) {
#pragma unroll
      for (int u = 0; u < 2; ++u) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const u32 first = V == 8 ? raw[(4 * u + 2 * h) % V].word[e / 2] : raw[2 * u + h].word[e / 2];
          const u32 second = V == 8 ? raw[(4 * u + 2 * h + 1) % V].word[e / 2] : raw[2 * u + h].word[(2 + e / 2) % 4];
          a[e][2 * h + u] = __byte_perm(first, second, e % 2 ? high : low);
        }
      }
    }
  }

  /// One tile's sums. A stage is free once the products that read it are done, which is when the next begin.
  static __device__ __forceinline__ void multiply_tile(const ClusterParams& p, const ClusterPlace& place,
                                                       typename Work::Sums& sums, u32 base, Barriers& barriers,
                                                       Slots& slots, int group) {
    const auto release = [&](u32 slot) {
      place.release(shared_address(&barriers.empty[slot]), p.cluster_rows, p.cluster_columns);
    };
    u32 held = 0;
#pragma unroll 1
    for (int stage = 0; stage < p.product.stages; ++stage, slots.next()) {
      const u32 at = base + slots.stage * kStage;
      mbarrier::wait(shared_address(&barriers.full[slots.stage]), slots.parity);
#pragma unroll
      for (int step = 0; step < kTile.steps(); ++step) {
        quad raw[V];
        load_chunks(raw, at, group, step);
        wgmma::wait<0>();
        if (step == 0 && stage > 0) {
          release(held);
        }
        u32 a[V][4];
        pair_chunks(a, raw);
        const u32 w = at + ClusterTile::kStageX + (V == 8 ? group * 8 : step * 4) * (kColumns * 32);
        wgmma::fence();
#pragma unroll
        for (int e = 0; e < V; ++e) {
          wgmma::multiply<T, kColumns, wgmma::Major::k>(reinterpret_cast<float(&)[kColumns / 2]>(sums[e]), a[e],
                                                        wgmma::descriptor<32>(w + e * (kColumns * 32)));
        }
        wgmma::commit();
      }
      held = slots.stage;
    }
    wgmma::wait<0>();
    release(held);
  }

  /// V = 8: the two halves of 16 δ meet in shared memory, eight columns at a time, and leave in rows of 32 bytes.
  static __device__ __forceinline__ void store_halves(const ClusterParams& p, const ClusterPlace& place,
                                                      const typename Work::Sums& sums, u32 staging, int n, int columns,
                                                      int group) {
    const u32 lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, warp = threadIdx.x / 32 % 4;
    const bool one = threadIdx.x == 128;
#pragma unroll
    for (int q = 0; q < kColumns / 8; ++q) {
      if (8 * q >= columns) {
        break;
      }
      const u32 buffer = staging + q % 2 * ClusterTile::kStaging;
      if (one) {
        tma::store_wait_read<1>();
      }
      named_barrier(1, 256);
#pragma unroll
      for (u32 u = 0; u < 2; ++u) {
#pragma unroll
        for (u32 e = 0; e < 2; ++e) {
          u32 words[4];
          pack_words<T>(words, sums, 0, 4, q, 2 * u + e);
          store_quad(buffer + ((16 * warp + g + 8 * u) * 8 + 4 * e + t) * 32 + ((static_cast<u32>(group) ^ e) << 4),
                     words);
        }
      }
      fence_async_proxy();
      named_barrier(1, 256);
      if (one) {
        tma::store(&p.y, buffer, place.l, place.slab * kColumns + 8 * q, place.i, n);
        tma::store_commit();
      }
    }
  }

  static __device__ __forceinline__ void consume(const ClusterParams& p, const ClusterPlace& place, u32 base,
                                                 Barriers& barriers) {
    const int group = static_cast<int>(threadIdx.x) / 128 - 1, warp = static_cast<int>(threadIdx.x) / 32 % 4;
    const int column = place.slab * kColumns, columns = min(kColumns, p.product.b - column);  // may be negative
    const i64 out = (static_cast<i64>(place.i) * p.product.b + column) * p.product.d + place.l;
    Slots slots(0);
#pragma unroll 1
    for (i64 tile = place.first; tile < place.last; ++tile) {
      typename Work::Sums sums = {};
      multiply_tile(p, place, sums, base, barriers, slots, group);
      if (columns <= 0) {
        continue;
      }
      if (p.product.finish) {
        const T* bias = static_cast<const T*>(p.product.bias);
        Work::finish(p.product, sums,
                     bias == nullptr ? nullptr : bias + (out + (V == 8 ? group * 8 : 0)) * p.product.bias_stride,
                     columns);
      }
      const i64 n = (tile * p.cluster_rows + place.row) * kTile.rows();
      if constexpr (V == 8) {
        store_halves(p, place, sums, base + ClusterTile::kRing * kStage, static_cast<int>(n), columns, group);
      } else {
        const i64 row = n + 64 * group + 16 * warp;
        Work::store(p.product, sums, static_cast<T*>(p.product.y) + row * p.product.y_stride + out,
                    p.product.batch - row, columns);
      }
    }
    if (V == 8 && threadIdx.x == 128) {
      tma::store_wait();
    }
  }
};

/// Makes a CTA's barriers, and lets the cluster see them.
template <typename Barriers>
__device__ __forceinline__ void init_cluster(Barriers& barriers, int rows, int columns) {
  if (threadIdx.x == 0) {
    for (int n = 0; n < ClusterTile::kRing; ++n) {
      mbarrier::init(shared_address(&barriers.full[n]), 1);
      mbarrier::init(shared_address(&barriers.empty[n]), 8 * (rows + columns - 1));
    }
    mbarrier::init_done();
  }
  __syncthreads();
  cluster_sync();
}

}  // namespace kronecker::strided

/// Clusters: group (slabs of columns fastest, then δ, then i) and piece of the batch.
template <typename T, int V>
__global__ void __launch_bounds__(kronecker::strided::ClusterTile::kThreads, 1)
    strided_cluster(const __grid_constant__ kronecker::strided::ClusterParams p) {
  using Work = kronecker::strided::ClusterWork<T, V>;
  extern __shared__ __align__(128) u8 shared[];
  __shared__ __align__(16) typename Work::Barriers barriers;
  const u32 base = (shared_address(shared) + 1023) & ~1023u;
  const kronecker::strided::ClusterPlace place(p, Work::kTile);
  kronecker::strided::init_cluster(barriers, p.cluster_rows, p.cluster_columns);
  if (threadIdx.x < 128) {
    fewer_registers<40>();
    if (threadIdx.x == 0) {
      tma::prefetch(&p.x);
      Work::produce(p, place, base, barriers);
    }
    __syncwarp();
  } else {
    more_registers<232>();
    Work::consume(p, place, base, barriers);
  }
  cluster_sync();  // others may still copy into this CTA, or tell it of free stages
}

}  // namespace fretwork
