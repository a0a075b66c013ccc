// The product of strided.cuh on Hopper: TMA fetches x and the packed weights. The A fragments that byte permutes build
// are the register operand of wgmma; B are weights in shared memory, read once per 64 rows.
//
// Where d is 2, 4 or 16, x comes in lines of 64 or 128 bytes that hold all δ of neighbouring k, and a CTA works alone
// or shares x with one other. Other d are fetched in pieces of 32 bytes (16 δ of one k), which L2 serves at half its
// rate: a cluster of 2 × 4 CTAs multicasts each piece of x to four of them and each piece of the weights to two.
#pragma once

#include "device/cluster.cuh"
#include "device/epilogue.cuh"
#include "device/mma.cuh"
#include "device/pipeline.cuh"
#include "device/tma.cuh"
#include "device/wgmma.cuh"
#include "ops/kronecker/cuda/strided.cuh"

namespace fretwork::kronecker::strided {

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

/// Where a CTA stands in its cluster, and whom its copies reach.
struct ClusterSeat {
  int rows, columns;  ///< of the cluster
  int row, column;
  u16 row_mask, column_mask;

  __device__ __forceinline__ ClusterSeat(int of_rows, int of_columns) : rows(of_rows), columns(of_columns) {
    const int rank = static_cast<int>(cluster_rank());
    row = rank / columns;
    column = rank % columns;
    row_mask = static_cast<u16>(((1 << columns) - 1) << (row * columns));
    u32 mask = 0;
    for (int r = 0; r < rows; ++r) {
      mask |= 1u << (r * columns + column);
    }
    column_mask = static_cast<u16>(mask);
  }
  /// A warp tells those whose copies arrive here, this CTA among them, that a stage is free.
  template <int kStages>
  __device__ __forceinline__ void release(RingBarriers<kStages>& ring, u32 stage) const {
    ring.release_to(stage, rows + columns - 1, [this](u32 n) {
      const int lane = static_cast<int>(n), other = lane - columns;
      return static_cast<u32>(lane < columns ? row * columns + lane : (other + (other >= row)) * columns + column);
    });
  }
};

/// What a CTA works on: factor, first δ, slab of columns, and its first row. Clusters that run together take the same
/// rows, whose lines of memory several δ share.
struct ClusterItem {
  int i, l, slab;
  i64 n;

  __device__ __forceinline__ ClusterItem(const ClusterParams& p, const ClusterSeat& seat, ClusterTile tile, i64 index) {
    const int group = static_cast<int>(index % p.product.groups), across = p.product.slabs / seat.columns;
    const int block = group / across, deltas = p.product.d / tile.deltas();
    slab = group % across * seat.columns + seat.column;
    i = block / deltas;
    l = block % deltas * tile.deltas();
    n = (index / p.product.groups * seat.rows + seat.row) * tile.rows();
  }
};

/// kFlat: d is 16, so that four k of all δ are 128 neighbouring bytes.
template <typename T, int V, int Columns = 256 / V, bool kFlat = false>
struct ClusterWork {
  static constexpr ClusterTile kTile{V, Columns};
  using Work = Product<T, V, 4, Columns>;
  static constexpr int kColumns = Columns, kStage = kTile.stage_x() + kTile.stage_w();
  /// Bytes of a row of x that lie together in shared memory, and boxes of them in a stage.
  static constexpr int kLine = V == 8 ? (kFlat ? 128 : 32) : 32 * V, kBoxes = kTile.stage_x() / (kTile.rows() * kLine);
  using Barriers = RingBarriers<kTile.ring()>;

  /// One thread: this CTA's share of its row's x and of its column's weights, for all of them.
  static __device__ __forceinline__ void produce(const ClusterParams& p, const ClusterSeat& seat, i64 first, i64 by,
                                                 u32 base, Barriers& barriers) {
    const int rows = kTile.rows() / seat.columns, w_bytes = kTile.stage_w() / seat.rows;
    const int deltas = p.product.d / kTile.deltas();
    Producer<kTile.ring()> slots;
#pragma unroll 1
    for (i64 index = first; index < p.items; index += by) {
      const ClusterItem item(p, seat, kTile, index);
      const int n = static_cast<int>(item.n) + seat.column * rows;
      const i64 group = (static_cast<i64>(item.i) * deltas + item.l / kTile.deltas()) * p.product.slabs + item.slab;
      const u8* w =
          static_cast<const u8*>(p.product.w) + group * p.product.stages * kTile.stage_w() + seat.row * w_bytes;
#pragma unroll 1
      for (int stage = 0; stage < p.product.stages; ++stage, slots.next()) {
        const u32 at = base + slots.stage * kStage, full = barriers.acquire(slots);
        mbarrier::arrive_expect(full, kStage);
        if constexpr (V == 8 && !kFlat) {
          load_shared_box(at + seat.column * rows * 512, &p.x, full, item.l, stage * 16, item.i, n, seat.row_mask);
        } else {
#pragma unroll
          for (int box = 0; box < kBoxes; ++box) {
            load_shared_box(at + (box * kTile.rows() + seat.column * rows) * kLine, &p.x, full,
                            (stage * kBoxes + box) * (kLine / 2), item.i, n, seat.row_mask);
          }
        }
        load_shared_bytes(at + kTile.stage_x() + seat.row * w_bytes, w + static_cast<i64>(stage) * kTile.stage_w(),
                          w_bytes, full, seat.column_mask);
      }
    }
  }

  /// The chunks of a warp's 16 rows and 16 of K, as the copy engine swizzles them. Eight lanes that load together meet
  /// eight banks: with V = 8, lanes of odd rows load k + 1 before k; flat, lane t loads its four k in the order o ^ t,
  /// which the weights follow.
  static __device__ __forceinline__ void load_chunks(quad (&raw)[V], u32 x, int group, int step) {
    const u32 lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, warp = threadIdx.x / 32 % 4;
#pragma unroll
    for (u32 u = 0; u < 2; ++u) {
      const u32 row = 16 * warp + g + 8 * u;
      if constexpr (V == 8 && kFlat) {
#pragma unroll
        for (u32 o = 0; o < 4; ++o) {
          raw[4 * u + o] = load_quad(x + t * 8192 + row * 128 + (((2 * (o ^ t) + static_cast<u32>(group)) ^ g) << 4));
        }
      } else if constexpr (V == 8) {
#pragma unroll
        for (u32 h = 0; h < 2; ++h) {
          const u32 at = x + row * 512 + (2 * t + (g & 1)) * 32 + h * 256 + ((static_cast<u32>(group) ^ t >> 1) << 4);
          raw[4 * u + 2 * h] = load_quad(at);
          raw[4 * u + 2 * h + 1] = load_quad(at ^ 32);
        }
      } else {
        const u32 line = x + (step * kTile.rows() + 64 * group + row) * kLine;
        if constexpr (V == 4) {
          raw[2 * u] = load_quad(line + (((2 * t) ^ g) << 4));
          raw[2 * u + 1] = load_quad(line + (((2 * t + 1) ^ g) << 4));
        } else {
          raw[u] = load_quad(line + ((t ^ g >> 1) << 4));
        }
      }
    }
  }
  static __device__ __forceinline__ void pair_chunks(u32 (&a)[V][4], const quad (&raw)[V]) {
    const bool turned = V == 8 && !kFlat && threadIdx.x % 8 >= 4;  // odd rows
    const u32 low = turned ? 0x1054 : 0x5410, high = turned ? 0x3276 : 0x7632;
#pragma unroll
    for (int e = 0; e < V; ++e) {
#pragma unroll
      for (int u = 0; u < 2; ++u) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          // V = 8: a chunk is one k; V = 4: two; V = 2: four, of which h takes a half.
          const quad& one = raw[V == 8 ? (4 * u + 2 * h) % V : V == 4 ? (2 * u + h) % V : u];
          const quad& other = V == 8 ? raw[(4 * u + 2 * h + 1) % V] : one;
          const u32 first = one.word[(V == 2 ? 2 * h : e / 2) % 4];
          const u32 second = other.word[(V == 8 ? e / 2 : V == 4 ? 2 + e / 2 : 2 * h + 1) % 4];
          a[e][2 * h + u] = __byte_perm(first, second, e % 2 ? high : low);
        }
      }
    }
  }

  /// One tile's sums. Chunks are loaded, and in a stage paired, while the products before them run. All have come to
  /// their end where the loop begins anew, or the compiler lets each wait for the one before.
  static __device__ __forceinline__ void multiply_tile(const ClusterParams& p, const ClusterSeat& seat,
                                                       typename Work::Sums& sums, u32 base, Barriers& barriers,
                                                       Consumer<kTile.ring()>& slots, int group) {
    constexpr int kSteps = kTile.steps();
    quad raw[V];
    barriers.wait(slots);
    load_chunks(raw, base + slots.stage * kStage, group, 0);
#pragma unroll 1
    for (int stage = 0; stage < p.product.stages; ++stage) {
      const u32 at = base + slots.stage * kStage, held = slots.stage;
      u32 a[kSteps][V][4];
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        pair_chunks(a[step], raw);
        const u32 w = at + kTile.stage_x() + (V == 8 ? group * 8 : step * V) * (kColumns * 32);
        wgmma::fence();
#pragma unroll
        for (int e = 0; e < V; ++e) {
          wgmma::multiply<T, kColumns, wgmma::Major::k>(reinterpret_cast<float(&)[kColumns / 2]>(sums[e]), a[step][e],
                                                        wgmma::descriptor<32>(w + e * (kColumns * 32)));
        }
        wgmma::commit();
        if (step + 1 < kSteps) {
          load_chunks(raw, at, group, step + 1);
        }
      }
      slots.next();
      if (stage + 1 < p.product.stages) {
        barriers.wait(slots);
        load_chunks(raw, base + slots.stage * kStage, group, 0);
      }
      wgmma::wait<0>();
      seat.release(barriers, held);
    }
  }

  /// V = 8: the two halves of 16 δ meet in shared memory, eight columns at a time, and leave in rows of 32 bytes, or
  /// flat in lines of four columns. `turn` counts the pieces stored so far, earlier tiles' too: an odd number of them
  /// may be one tile's.
  static __device__ __forceinline__ void store_halves(const ClusterParams& p, const ClusterItem& item,
                                                      const typename Work::Sums& sums, u32 staging, int columns,
                                                      int group, u32& turn) {
    const u32 lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, warp = threadIdx.x / 32 % 4;
    constexpr u32 kHalf = ClusterTile::kStaging / 2;
    const bool one = threadIdx.x == 128;
#pragma unroll
    for (int q = 0; q < kColumns / 8; ++q) {
      if (8 * q >= columns) {
        break;
      }
      const u32 buffer = staging + turn++ % 2 * ClusterTile::kStaging;
      if (one) {
        tma::store_wait_read<1>();
      }
      named_barrier(1, 256);
#pragma unroll
      for (u32 u = 0; u < 2; ++u) {
        u32 words[2][4];
        pack_words<T>(words[0], sums, 0, 4, q, 2 * u);
        pack_words<T>(words[1], sums, 0, 4, q, 2 * u + 1);
        if constexpr (kFlat) {
          const u32 line = buffer + (16 * warp + g + 8 * u) * 128 + (((2 * t + static_cast<u32>(group)) ^ g) << 4);
          store_shared_128(line, words[0]);
          store_shared_128(line + kHalf, words[1]);
          continue;
        }
#pragma unroll
        for (u32 part = 0; part < 2; ++part) {
          const u32 e =
              part ^ (g & 1);  // lanes of odd rows take the second four columns first: eight lanes, eight banks
          u32 some[4];
#pragma unroll
          for (int w = 0; w < 4; ++w) {
            some[w] = e != 0 ? words[1][w] : words[0][w];
          }
          store_shared_128(
              buffer + ((16 * warp + g + 8 * u) * 8 + 4 * e + t) * 32 + ((static_cast<u32>(group) ^ e) << 4), some);
        }
      }
      fence_async_proxy();
      named_barrier(1, 256);
      if (one) {
        const int column = item.slab * kColumns + 8 * q, n = static_cast<int>(item.n);
        if constexpr (kFlat) {
          tma::store(&p.y, buffer, column * 16, item.i, n);
          if (8 * q + 4 < columns) {
            tma::store(&p.y, buffer + kHalf, column * 16 + 64, item.i, n);
          }
        } else {
          tma::store(&p.y, buffer, item.l, column, item.i, n);
        }
        tma::store_commit();
      }
    }
  }

  /// V = 2 and 4: a warpgroup's sums of 64 neighbours of its rows, from `piece` · 64, as the copy engine swizzles lines
  /// of 128 bytes. Lanes of odd rows take another block of eight columns first: lanes that store together meet all
  /// banks.
  static __device__ __forceinline__ void write_rows(const typename Work::Sums& sums, int piece, u32 to) {
    constexpr int kBlocks = 8 / V, kWords = V / 2;  // of eight columns in a piece; of a column
    const u32 lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, warp = threadIdx.x / 32 % 4;
#pragma unroll
    for (u32 u = 0; u < 2; ++u) {
      u32 words[kBlocks][2 * kWords];
#pragma unroll
      for (int q = 0; q < kBlocks; ++q) {
        pack_words<T>(words[q], sums, 0, kWords, piece * kBlocks + q, 2 * u);
        pack_words<T>(words[q] + kWords, sums, 0, kWords, piece * kBlocks + q, 2 * u + 1);
      }
      const u32 line = to + (16 * warp + g + 8 * u) * 128;
#pragma unroll
      for (u32 turn = 0; turn < kBlocks; ++turn) {
        const u32 q = turn ^ (g % 2 * (kBlocks / 2));
        u32 some[2 * kWords];
#pragma unroll
        for (int w = 0; w < 2 * kWords; ++w) {
          some[w] = g % 2 != 0 ? words[turn ^ (kBlocks / 2)][w] : words[turn][w];
        }
        if constexpr (V == 4) {
          store_shared_128(line + (((4 * q + t) ^ g) << 4), some);
        } else {
          asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(line + (((2 * q + t / 2) ^ g) << 4) + t % 2 * 8),
                       "r"(some[0]), "r"(some[1])
                       : "memory");
        }
      }
    }
  }
  /// Through two buffers of each warpgroup; `turn` counts the pieces stored so far.
  static __device__ __forceinline__ void store_rows(const ClusterParams& p, const ClusterItem& item,
                                                    const typename Work::Sums& sums, u32 buffers, int group,
                                                    u32& turn) {
    const int row = static_cast<int>(item.n) + 64 * group;
#pragma unroll
    for (int piece = 0; piece < V * kColumns / 64; ++piece, ++turn) {
      const int neighbour = item.slab * (V * kColumns) + piece * 64;
      store_in_turn<2>(
          turn, buffers, static_cast<u32>(1 + group), [&](u32 buffer) { write_rows(sums, piece, buffer); },
          [&](u32 buffer) {
            if (neighbour < p.product.b * V && row < p.product.batch) {
              tma::store(&p.y, buffer, neighbour, item.i, row);
            }
          });
    }
  }

  static __device__ __forceinline__ void consume(const ClusterParams& p, const ClusterSeat& seat, i64 first, i64 by,
                                                 u32 base, Barriers& barriers) {
    const int group = static_cast<int>(threadIdx.x) / 128 - 1, warp = static_cast<int>(threadIdx.x) / 32 % 4;
    Consumer<kTile.ring()> slots;
    u32 turn = 0;
#pragma unroll 1
    for (i64 index = first; index < p.items; index += by) {
      const ClusterItem item(p, seat, kTile, index);
      const int column = item.slab * kColumns, columns = min(kColumns, p.product.b - column);  // may be negative
      const i64 out = (static_cast<i64>(item.i) * p.product.b + column) * p.product.d + item.l;
      const i64 own = V == 8 ? group * 8 : 0;
      const T* bias = static_cast<const T*>(p.product.bias);
      typename Work::Sums sums;
      Work::start(p.product, sums, bias == nullptr ? nullptr : bias + (out + own) * p.product.bias_stride, columns);
      multiply_tile(p, seat, sums, base, barriers, slots, group);
      if (columns <= 0) {
        continue;
      }
      if (p.product.activation != 0) {
        Work::finish(sums, p.product.activation);
      }
      if constexpr (V == 8) {
        store_halves(p, item, sums, base + kTile.ring() * kStage, columns, group, turn);
      } else if (p.staged) {
        store_rows(p, item, sums, base + kTile.ring() * kStage + group * 2 * kPieceBytes, group, turn);
      } else {
        const i64 row = item.n + 64 * group + 16 * warp;
        Work::store(p.product, sums, static_cast<T*>(p.product.y) + row * p.product.y_stride + out,
                    p.product.batch - row, columns);
      }
    }
    if (V == 8 || p.staged) {
      finish_stores();
    }
  }
};

/// What the CTAs of the kernel do.
template <typename Work>
struct ClusterKernel {
  static constexpr Roles kRoles{.consumers = 2, .producer_registers = 40, .consumer_registers = 232, .cluster = true};
  const ClusterParams& p;
  const ClusterSeat& seat;
  u32 base;
  typename Work::Barriers& barriers;
  i64 first, by;

  __device__ __forceinline__ void produce() const {
    if (threadIdx.x == 0) {
      tma::prefetch(&p.x);
      wait_for_earlier_kernel();  // which packs the weights
      Work::produce(p, seat, first, by, base, barriers);
    }
    __syncwarp();
  }
  __device__ __forceinline__ void consume() const { Work::consume(p, seat, first, by, base, barriers); }
};

/// Clusters take the items in turn: slabs of columns fastest, then δ, then i, then rows.
template <typename T, int V, int Columns, bool kFlat>
__global__ void __launch_bounds__(ClusterTile::kThreads, 1) cluster_product(const __grid_constant__ ClusterParams p) {
  using Work = ClusterWork<T, V, Columns, kFlat>;
  extern __shared__ __align__(128) u8 shared[];
  __shared__ __align__(16) typename Work::Barriers barriers;
  const u32 base = stages_in(shared);
  const ClusterSeat seat(p.cluster_rows, p.cluster_columns);
  const u32 size = static_cast<u32>(seat.rows * seat.columns);
  const i64 first = blockIdx.x / size, by = gridDim.x / size;
  init_barriers([&] { barriers.make(1, 8 * (seat.rows + seat.columns - 1)); });
  run_warp_specialized(ClusterKernel<Work>{p, seat, base, barriers, first, by});
}

}  // namespace fretwork::kronecker::strided
