// Two Kronecker factors of 64 products of 64 × 64 in one pass on Hopper, as chain.cuh, but on wgmma. Weights are its
// left operand and stay in the registers of a cluster of eight CTAs; 16 rows of the batch are its columns. So a thread
// gets the same element of all eight products of its CTA, and these eight are neighbours in memory.
#pragma once

#include "device/activation.cuh"
#include "device/cluster.cuh"
#include "device/mma.cuh"
#include "device/pipeline.cuh"
#include "device/tma.cuh"
#include "device/wgmma.cuh"
#include "ops/kronecker/cuda/params.h"

namespace fretwork::kronecker::chain {

/// 16 bytes: the same place of eight products.
struct Chunk {
  u32 w[4];
};
/// The work of a CTA. One warpgroup has its eight i of the first factor, another its eight l of the second; of a third,
/// warps fetch, store, and put together what two CTAs made.
template <typename T>
struct WideWork {
  static constexpr int kX = Wide::kXSlots, kMiddle = Wide::kMiddleSlots, kY = Wide::kYSlots;
  static constexpr int kReceived = Wide::kReceivedSlots, kRanks = Wide::kRanks, kRows = Wide::kRows;
  static constexpr u32 kLine = Wide::kLine, kPiece = Wide::kPiece, kHalf = Wide::kSlot / 2;

  struct Barriers {
    u64 x_full[kX], x_empty[kX];
    u64 middle_full[kMiddle], middle_empty[kMiddle];
    u64 y_full[kY], y_empty[kY];
    u64 received_full[kReceived], received_empty[kReceived];
  };

  u32 x, middle, send, y, received, bias;
  u32 rank;
  int first_tile, tile_step, tiles;
  Barriers& barriers;

  __device__ __forceinline__ WideWork(const WideParams& p, u32 base, Barriers& b) : barriers(b) {
    x = base;
    y = x + kX * Wide::kSlot;
    middle = y + kY * Wide::kSlot;
    send = middle + kMiddle * Wide::kMiddleBytes;
    received = send + kMiddle * Wide::kMiddleBytes;
    bias = received + kReceived * kHalf;
    rank = cluster_rank();
    first_tile = static_cast<int>(blockIdx.x / kRanks);
    tile_step = static_cast<int>(gridDim.x / kRanks);
    tiles = static_cast<int>((p.batch + kRows - 1) / kRows);
  }

  __device__ __forceinline__ void init() {
    if (threadIdx.x == 0) {
      for (int n = 0; n < kX; ++n) {
        mbarrier::init(shared_address(&barriers.x_full[n]), 1);
        mbarrier::init(shared_address(&barriers.x_empty[n]), 4);
      }
      for (int n = 0; n < kMiddle; ++n) {
        mbarrier::init(shared_address(&barriers.middle_full[n]), 1 + 32);
        mbarrier::init(shared_address(&barriers.middle_empty[n]), 4 * kRanks);
      }
      for (int n = 0; n < kY; ++n) {
        mbarrier::init(shared_address(&barriers.y_full[n]), 128 + 64);
        mbarrier::init(shared_address(&barriers.y_empty[n]), 1);
      }
      for (int n = 0; n < kReceived; ++n) {
        mbarrier::init(shared_address(&barriers.received_full[n]), 1);
        mbarrier::init(shared_address(&barriers.received_empty[n]), 2);
      }
      mbarrier::init_done();
    }
    __syncthreads();
    cluster_sync();
  }

  /// One thread: x of this CTA's blocks.
  __device__ __forceinline__ void fetch(const WideParams& p) const {
    tma::prefetch(&p.x);
    Ring<kX> to(1);
#pragma unroll 1
    for (int tile = first_tile; tile < tiles; tile += tile_step, to.next()) {
      const u32 full = shared_address(&barriers.x_full[to.stage]);
      mbarrier::wait(shared_address(&barriers.x_empty[to.stage]), to.parity);
      mbarrier::arrive_expect(full, Wide::kSlot);
      tma::load(x + to.stage * Wide::kSlot, &p.x, full, 0, tile * kRows, static_cast<int>(rank) * 8);
    }
  }

  /// One thread: results to memory.
  __device__ __forceinline__ void store(const WideParams& p) const {
    tma::prefetch(&p.y);
    const int own = static_cast<int>(rank % 2);
    Ring<kY> from(0);
#pragma unroll 1
    for (int tile = first_tile; tile < tiles; tile += tile_step, from.next()) {
      mbarrier::wait(shared_address(&barriers.y_full[from.stage]), from.parity);
      tma::store(&p.y, y + from.stage * Wide::kSlot, static_cast<int>(rank / 2 * 16), tile * kRows + own * 8, 0);
      tma::store_commit();
      tma::store_wait_read<0>();
      mbarrier::arrive(shared_address(&barriers.y_empty[from.stage]));
    }
    tma::store_wait();
  }

  /// Where a lane's results lie in a slot of y, [j][row][16 l] as the copy engine swizzles it; `part` is of the CTA
  /// that made them.
  __device__ __forceinline__ static u32 place_of_y(u32 warp, u32 lane, u32 h, u32 e, u32 part) {
    const u32 row = 2 * (lane % 4) + e, j = 16 * warp + lane / 4 + 8 * h;
    return tma::swizzled<32>(j * 256 + row * 32 + part * 16);
  }

  /// Two warps: what the other CTA of the pair made of this one's rows, to its place between this one's.
  __device__ __forceinline__ void join(u32 warp) const {
    const u32 lane = threadIdx.x % 32, part = 1 - rank % 2;
    Ring<kReceived> from(0);
    Ring<kY> to(1);
#pragma unroll 1
    for (int tile = first_tile; tile < tiles; tile += tile_step, from.next(), to.next()) {
      const u32 full = shared_address(&barriers.received_full[from.stage]);
      const u32 slot = received + from.stage * kHalf, result = y + to.stage * Wide::kSlot;
      if (warp == 0 && lane == 0) {
        mbarrier::arrive_expect(full, kHalf);
      }
      mbarrier::wait(shared_address(&barriers.y_empty[to.stage]), to.parity);
      mbarrier::wait(full, from.parity);
#pragma unroll
      for (u32 w = 0; w < 2; ++w) {
        Chunk chunks[4];
#pragma unroll
        for (u32 n = 0; n < 4; ++n) {
          load_shared_128(chunks[n].w, slot + ((2 * warp + w) * 4 + n) * 512 + lane * 16);
        }
#pragma unroll
        for (u32 n = 0; n < 4; ++n) {
          store_shared_128(result + place_of_y(2 * warp + w, lane, n / 2, n % 2, part), chunks[n].w);
        }
      }
      __syncwarp();
      if (lane == 0) {
        arrive_at(shared_address(&barriers.received_empty[from.stage]), rank ^ 1);
      }
      fence_async_proxy();
      mbarrier::arrive(shared_address(&barriers.y_full[to.stage]));
    }
  }

  using Weights = u32[32][4];
  __device__ __forceinline__ static void load(const WideParams& p, Weights& weights, u32 part) {
    const uint4* from = static_cast<const uint4*>(p.weights) + part * (32 * 32) + threadIdx.x % 32;
#pragma unroll
    for (int n = 0; n < 32; ++n) {
      const uint4 v = from[32 * n];
      weights[n][0] = v.x;
      weights[n][1] = v.y;
      weights[n][2] = v.z;
      weights[n][3] = v.w;
    }
  }

  /// Product after product in each step, so that none waits for its own sums.
  template <int kAt = 0>
  __device__ __forceinline__ static void multiply(float (&sums)[64], const Weights& weights, u64 columns,
                                                  u64 next_product, u64 next_step) {
    constexpr int kProduct = kAt % 8, kStep = kAt / 8;
    wgmma::multiply<T, 16, wgmma::Major::k, 8 * kProduct, (kStep > 0)>(
        sums, weights[4 * kProduct + kStep], columns + kProduct * next_product + kStep * next_step);
    if constexpr (kAt < 31) {
      multiply<kAt + 1>(sums, weights, columns, next_product, next_step);
    }
  }

  /// Row lane / 4 + 8·h, column 2·(lane % 4) + e of the tile, of all products.
  __device__ __forceinline__ static Chunk chunk(const float (&sums)[64], int tile, int h, int e) {
    const int at = 4 * tile + 2 * h + e;
    Chunk c;
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      c.w[n] = narrow_pair<T>(sums[16 * n + at], sums[16 * n + 8 + at]);
    }
    return c;
  }

  /// A warpgroup: the first factor.
  __device__ __forceinline__ void run_first(const WideParams& p, int warp) {
    const u32 lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    Weights weights;
    float sums[64];
    wait_for_earlier_kernel();  // which packs the weights
    load(p, weights, rank * 8 + warp);
    Ring<kX> from(0);
    Ring<kMiddle> to(1);
    const u32 place = g * kLine + 32 * t;
#pragma unroll 1
    for (int tile = first_tile; tile < tiles; tile += tile_step, from.next(), to.next()) {
      mbarrier::wait(shared_address(&barriers.x_full[from.stage]), from.parity);
      wgmma::fence();
      multiply(sums, weights, wgmma::descriptor<128>(x + from.stage * Wide::kSlot), 2048 >> 4, 32 >> 4);
      wgmma::commit();
      wgmma::wait<0>();
      if (lane == 0) {
        mbarrier::arrive(shared_address(&barriers.x_empty[from.stage]));
      }
      mbarrier::wait(shared_address(&barriers.middle_empty[to.stage]), to.parity);
      const u32 slot = to.stage * Wide::kMiddleBytes, full = shared_address(&barriers.middle_full[to.stage]);
      // A warp has all that goes to two CTAs. What this one keeps goes where it would arrive.
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const u32 other = 2 * static_cast<u32>(warp) + h;
        const bool own = other == rank;
        const u32 piece = slot + place + other * kPiece + (own ? middle : send);
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          store_shared_128(piece + 128 * (n / 2) + 16 * (n % 2), chunk(sums, n / 2, h, n % 2).w);
        }
        if (own) {
          fence_async_proxy();
          mbarrier::arrive(full);
        }
      }
      fence_async_proxy();
      __syncwarp();
      if (const u32 other = 2 * static_cast<u32>(warp) + lane; lane < 2 && other != rank) {
        copy_to_rank(middle + slot + rank * kPiece, send + slot + other * kPiece, kPiece, full, other);
      }
    }
  }

  /// A warpgroup: the second factor.
  __device__ __forceinline__ void run_second(const WideParams& p, int warp) {
    const u32 lane = threadIdx.x % 32, own = rank % 2;
    Weights weights;
    float sums[64];
    wait_for_earlier_kernel();
    load(p, weights, rank * 8 + 4 + warp);
    Ring<kMiddle> from(0);
    Ring<kY> to(1);
    Ring<kReceived> other(1);
#pragma unroll 1
    for (int tile = first_tile; tile < tiles; tile += tile_step, from.next(), to.next(), other.next()) {
      const u32 full = shared_address(&barriers.middle_full[from.stage]);
      if (warp == 0 && lane == 0) {
        mbarrier::arrive_expect(full, (kRanks - 1) * kPiece);
      }
      mbarrier::wait(full, from.parity);
      wgmma::fence();
      multiply(sums, weights, wgmma::descriptor(middle + from.stage * Wide::kMiddleBytes, kPiece, 128), kLine >> 4,
               2 * kPiece >> 4);
      wgmma::commit();
      wgmma::wait<0>();
      if (const u32 empty = shared_address(&barriers.middle_empty[from.stage]); lane == rank) {
        mbarrier::arrive(empty);
      } else if (lane < kRanks) {
        arrive_at(empty, lane);
      }
      finish(p, sums, warp);
      mbarrier::wait(shared_address(&barriers.received_empty[other.stage]), other.parity);
      const u32 received_full = shared_address(&barriers.received_full[other.stage]);
      const u32 there = received + other.stage * kHalf + warp * 2048 + lane * 16;
      // Rows of the upper tile are the odd CTA's to store.
      Chunk kept[4];
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        Chunk sent;
        const Chunk low = chunk(sums, 0, n / 2, n % 2), high = chunk(sums, 1, n / 2, n % 2);
#pragma unroll
        for (int w = 0; w < 4; ++w) {
          kept[n].w[w] = own == 0 ? low.w[w] : high.w[w];
          sent.w[w] = own == 0 ? high.w[w] : low.w[w];
        }
        store_to_rank(there + n * 512, sent.w, received_full, rank ^ 1);
      }
      mbarrier::wait(shared_address(&barriers.y_empty[to.stage]), to.parity);
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        store_shared_128(y + to.stage * Wide::kSlot + place_of_y(warp, lane, n / 2, n % 2, own), kept[n].w);
      }
      fence_async_proxy();
      mbarrier::arrive(shared_address(&barriers.y_full[to.stage]));
    }
  }

  __device__ __forceinline__ void finish(const WideParams& p, float (&sums)[64], int warp) const {
    if (p.bias != nullptr) {
      const u32 j = 16 * static_cast<u32>(warp) + threadIdx.x % 32 / 4;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
#pragma unroll
        for (int n = 0; n < 8; ++n) {
          float add;
          asm volatile("ld.shared.f32 %0, [%1];" : "=f"(add) : "r"(bias + ((j + 8 * h) * 8 + n) * 4));
#pragma unroll
          for (int c = 0; c < 4; ++c) {
            sums[8 * n + 4 * (c / 2) + 2 * h + c % 2] += add;
          }
        }
      }
    }
    if (p.activation != 0) {
      activate(sums, p.activation);
    }
  }

  /// All threads: the bias of this CTA's results, [j][l].
  __device__ __forceinline__ void load_bias(const WideParams& p) const {
    if (p.bias != nullptr) {
      for (u32 n = threadIdx.x; n < 64 * 8; n += Wide::kThreads) {
        const i64 feature = n / 8 * 64 + rank * 8 + n % 8;
        const float value = widen(static_cast<const T*>(p.bias)[feature * p.bias_stride]);
        asm volatile("st.shared.f32 [%0], %1;" ::"r"(bias + 4 * n), "f"(value) : "memory");
      }
    }
  }
};

template <typename T>
__global__ void __launch_bounds__(Wide::kThreads, 1) fused_wide(const __grid_constant__ WideParams p) {
  using Work = WideWork<T>;
  extern __shared__ __align__(1024) u8 shared[];  // as swizzled rows need it
  if (shared_address(shared) % 1024 != 0) {
    __trap();
  }
  constexpr int kRings = Wide::kShared - Wide::kBarriers;
  static_assert(sizeof(typename Work::Barriers) <= Wide::kBarriers && kRings % 8 == 0);
  Work work(p, shared_address(shared), *reinterpret_cast<typename Work::Barriers*>(shared + kRings));
  work.load_bias(p);
  work.init();
  const int warp = uniform(threadIdx.x / 32);
  if (warp >= 8) {
    fewer_registers<40>();
    if (warp == 8 && threadIdx.x % 32 == 0) {
      work.fetch(p);
    } else if (warp == 9 && threadIdx.x % 32 == 0) {
      work.store(p);
    } else if (warp >= 10) {
      work.join(static_cast<u32>(warp - 10));
    }
  } else {
    more_registers<232>();
    if (warp < 4) {
      work.run_first(p, warp);
    } else {
      work.run_second(p, warp - 4);
    }
  }
  __syncwarp();
  cluster_sync();  // others may still write into this CTA, or tell it of free slots
}

}  // namespace fretwork::kronecker::chain
