// Two Kronecker factors in one pass on Hopper: y[n,(j,l)] = activation(Σ_i w2[j,i,l]·Σ_k w1[i,l,k]·x[n,(i,k)] + bias).
// A cluster holds all weights in registers for the whole launch. One group of a CTA's warps multiplies its blocks i of
// the first factor, 16 rows at a time, and sends the intermediate to the CTAs that own its l. The other group
// multiplies the second factor.
#pragma once

#include "device/activation.cuh"
#include "device/cluster.cuh"
#include "device/mma.cuh"
#include "device/pipeline.cuh"
#include "device/tma.cuh"
#include "ops/kronecker/cuda/params.h"

namespace fretwork::kronecker::chain {

struct Words4 {
  u32 w[4];
  __device__ __forceinline__ void swap(int a, int b, bool when) {
    const u32 first = w[a], second = w[b];
    w[a] = when ? second : first;
    w[b] = when ? first : second;
  }
  /// Word n goes to place n ^ key % 4.
  __device__ __forceinline__ void unswizzle(u32 key) {
    swap(0, 1, key % 2 != 0);
    swap(2, 3, key % 2 != 0);
    swap(0, 2, key / 2 % 2 != 0);
    swap(1, 3, key / 2 % 2 != 0);
  }
};
__device__ __forceinline__ Words4 load_words(u32 address) {
  Words4 v;
  load_shared_128(v.w, address);
  return v;
}
__device__ __forceinline__ void store_global(void* to, const Words4& v) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(v.w[0]), "r"(v.w[1]), "r"(v.w[2]), "r"(v.w[3])
               : "memory");
}

/// The products of one factor that a warp has: pairs (of i, or of l) × columns, with their weights.
template <typename T, int kDepth, int kPairs, int kColumns, int kMost>
struct Products {
  static constexpr Monarch::Share kShare{kPairs, kColumns, 1, kMost};
  static constexpr int kTiles = kShare.tiles(), kGroups = kShare.groups(), kSteps = kDepth / 16;
  static constexpr int kWords = kShare.words(kDepth);
  using Sums = float[2][kTiles][4];
  u32 weights[kWords];

  __device__ __forceinline__ void load(const u32* packed) {
    const uint4* from = reinterpret_cast<const uint4*>(packed) + threadIdx.x % 32;
#pragma unroll
    for (int n = 0; n < kWords / 4; ++n) {
      const uint4 v = from[32 * n];
      weights[4 * n] = v.x;
      weights[4 * n + 1] = v.y;
      weights[4 * n + 2] = v.z;
      weights[4 * n + 3] = v.w;
    }
  }
  /// `fragment(a, e, step)` loads 16 rows × 16 of K of product e of the pair.
  template <typename Fragment>
  __device__ __forceinline__ void multiply(Sums& sums, int pair, int group, Fragment fragment) const {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
        for (float& sum : sums[e][tile]) {
          sum = 0.0f;
        }
      }
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        u32 a[4];
        fragment(a, e, step);
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
          const int at = ((((pair * kGroups + group) * 2 + e) * kSteps + step) * kTiles + tile) * 2;
          mma_sync<T>(sums[e][tile], a, weights[at], weights[at + 1]);
        }
      }
    }
  }
};

template <typename T, int kQ, int kR, int kS, int kP, int kRanks, int kFirstWarps, int kSecondWarps, int kExchange>
struct Fused {
  static constexpr Monarch kMonarch{kQ, kR, kS, kP, kRanks, kExchange, kFirstWarps, kSecondWarps};
  static_assert(kMonarch.valid());
  static constexpr int kRows = Monarch::kRows, kBlocks = kMonarch.blocks(), kDeltas = kMonarch.deltas();
  static constexpr int kX = kMonarch.x_slots(), kMiddle = kMonarch.middle_slots();
  static constexpr int kOctet = kRows * kDeltas * 16;  // bytes of the middle of 8 blocks
  static constexpr int kPiece = kBlocks / 8 * kOctet;  // bytes that one CTA sends another
  static constexpr int kRow = kP * kDeltas * 2;        // bytes of a row of the result in a slot
  static constexpr int kKeep = kRows / kExchange;      // rows of the result that a CTA stores
  static constexpr Monarch::Share kFirst = kMonarch.first(), kSecond = kMonarch.second();
  static constexpr int kPart = kKeep * kRow;  // bytes of the result that one CTA sends another
  static constexpr u32 kFirstThreads = 32 * kFirstWarps, kSecondThreads = 32 * kSecondWarps;
  static constexpr u32 kFetcher = kFirstThreads - 32;
  static constexpr u32 kFirstBarrier = 1, kSecondBarrier = 2;  // named barriers of the two halves

  struct Barriers {
    u64 x_full[kX];
    u64 middle_full[kMiddle], middle_empty[kMiddle];
    u64 y_full[2], y_empty[2];
  };

  // Where things lie in shared memory, and what this CTA works on.
  u32 x, send, middle, y, y_received, bias;
  u32 rank;
  int first_tile, tile_step, tiles;
  Barriers& barriers;

  __device__ __forceinline__ Fused(const FusedParams& p, u32 base, Barriers& b) : barriers(b) {
    x = base;
    middle = x + kX * kMonarch.x_bytes();
    send = kRanks > 1 ? middle + kMiddle * kMonarch.middle_bytes() : middle;
    y = middle + kMiddle * kMonarch.middle_slot();
    y_received = kExchange > 1 ? y + 2 * kMonarch.y_bytes() : y;
    bias = y + kMonarch.y_slots_bytes();
    rank = kRanks > 1 ? cluster_rank() : 0;
    first_tile = static_cast<int>(blockIdx.x / kRanks);
    tile_step = static_cast<int>(gridDim.x / kRanks);
    tiles = static_cast<int>((p.batch + kRows - 1) / kRows);
  }

  __device__ __forceinline__ void init() {
    if (threadIdx.x == 0) {
      for (int n = 0; n < kX; ++n) {
        mbarrier::init(shared_address(&barriers.x_full[n]), 1);
      }
      for (int n = 0; n < kMiddle; ++n) {
        mbarrier::init(shared_address(&barriers.middle_full[n]), kFirstThreads + (kRanks > 1 ? 1 : 0));
        mbarrier::init(shared_address(&barriers.middle_empty[n]), kSecondThreads + kSecondWarps * (kRanks - 1));
      }
      for (int n = 0; n < 2; ++n) {
        mbarrier::init(shared_address(&barriers.y_full[n]), 1);
        mbarrier::init(shared_address(&barriers.y_empty[n]), kSecondWarps * (kExchange > 1 ? kExchange - 1 : 1));
      }
      mbarrier::init_done();
    }
    __syncthreads();
    if constexpr (kRanks > 1) {
      cluster_sync();
    }
  }

  /// One thread: x of this CTA's blocks to a free slot.
  __device__ __forceinline__ void fetch(const FusedParams& p, int tile, u32 stage) const {
    if (tile < tiles) {
      const u32 full = shared_address(&barriers.x_full[stage]);
      mbarrier::arrive_expect(full, kMonarch.x_bytes());
      tma::load(x + stage * kMonarch.x_bytes(), &p.x, full, 0, tile * kRows,
                static_cast<int>(rank) * (kMonarch.features() / 64));
    }
  }

  /// The first factor. x lies in pieces of 64 features, rows of 128 bytes that the copy engine swizzled.
  __device__ __forceinline__ void run_first(const FusedParams& p, int warp) {
    const u32 lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    Products<T, kR, kFirst.pairs, kFirst.columns, kFirst.most> products;
    const bool fetches = threadIdx.x == kFetcher;
    if (fetches) {
      tma::prefetch(&p.x);
      for (int n = 0; n < kX; ++n) {
        fetch(p, first_tile + n * tile_step, n);
      }
    }
    wait_for_earlier_kernel();  // which packs the weights
    products.load(static_cast<const u32*>(p.weights) + (rank * kFirstWarps + warp) * (32 * products.kWords));
    const int pair = kFirst.first_pair(warp), column = kFirst.first_column(warp);
    const u32 row = lane % 16, key = (lane / 16 ^ row % 8) << 4, feature = 2 * pair * kR;
    Ring<kX> from(0);
    Ring<kMiddle> to(1);
#pragma unroll 1
    for (int tile = first_tile; tile < tiles; tile += tile_step, from.next(), to.next()) {
      const u32 rows = x + from.stage * kMonarch.x_bytes() + row * 128;
      const u32 sent = send + to.stage * kMonarch.middle_bytes(), kept = middle + to.stage * kMonarch.middle_bytes();
      mbarrier::wait(shared_address(&barriers.x_full[from.stage]), from.parity);
#pragma unroll
      for (int n = 0; n < kFirst.pairs; ++n) {
#pragma unroll
        for (int group = 0; group < kFirst.groups(); ++group) {
          typename decltype(products)::Sums sums;
          products.multiply(sums, n, group, [&](u32(&a)[4], int e, int step) {
            const u32 f = feature + (2 * n + e) * kR + 16 * step;
            ldmatrix(a, rows + f / 64 * (kRows * 128) + (f % 64 * 2 ^ key));
          });
          if (n == 0 && group == 0) {
            mbarrier::wait(shared_address(&barriers.middle_empty[to.stage]), to.parity);
          }
          store_middle(sums, sent, kept, pair + n, column / 8 + group * kFirst.tiles(), g, t);
        }
      }
      mbarrier::arrive(shared_address(&barriers.middle_full[to.stage]));  // every lane for what it kept
      if constexpr (kRanks > 1) {
        fence_async_proxy();
      }
      named_barrier(kFirstBarrier, kFirstThreads);  // x has been read, and the middle written
      if (fetches) {
        fetch(p, tile + kX * tile_step, from.stage);
      }
      if (lane == 0) {
#pragma unroll
        for (int n = 0; n < kRanks; n += kFirstWarps) {
          if (0 < n + warp && n + warp < kRanks) {
            send_middle(sent, to.stage, (rank + n + warp) % kRanks);
          }
        }
      }
    }
  }

  /// [rank][8 blocks][row][l][8 i]: pairs of i are words. Chunks of 16 bytes are swizzled by the row, words by l. What
  /// this CTA keeps goes where it would arrive: a CTA may not copy to itself.
  __device__ __forceinline__ void store_middle(const float (&sums)[2][kFirst.tiles()][4], u32 sent, u32 kept, int pair,
                                               int tile, u32 g, u32 t) const {
    const u32 lane = pair / 4 * kOctet + g * (kDeltas * 16) + ((pair % 4 ^ t) << 2);
#pragma unroll
    for (int n = 0; n < kFirst.tiles(); ++n) {
      const u32 other = (tile + n) / (kDeltas / 8);
      const u32 place = (other == rank ? kept : sent) + lane + other * kPiece + (tile + n) % (kDeltas / 8) * 128;
#pragma unroll
      for (u32 e = 0; e < 2; ++e) {
        const u32 chunk = place + ((2 * t + e ^ g) << 4);
        store_shared_32(chunk, narrow_pair<T>(sums[0][n][e], sums[1][n][e]));
        store_shared_32(chunk + 8 * (kDeltas * 16), narrow_pair<T>(sums[0][n][2 + e], sums[1][n][2 + e]));
      }
    }
  }

  /// One thread: the part of a slot that another CTA multiplies.
  __device__ __forceinline__ void send_middle(u32 sent, u32 stage, u32 other) const {
    copy_to_rank(middle + stage * kMonarch.middle_bytes() + rank * kPiece, sent + other * kPiece, kPiece,
                 shared_address(&barriers.middle_full[stage]), other);
  }

  /// The second factor.
  __device__ __forceinline__ void run_second(const FusedParams& p, int warp) {
    const u32 lane = threadIdx.x % 32;
    Products<T, kQ, kSecond.pairs, kSecond.columns, kSecond.most> products;
    wait_for_earlier_kernel();
    products.load(static_cast<const u32*>(p.weights) + 32 * kFirstWarps * kRanks * kMonarch.first_words() +
                  (rank * kSecondWarps + warp) * (32 * products.kWords));
    const int pair = kSecond.first_pair(warp), column = kSecond.first_column(warp);
    const u32 row = lane % 16, place = lane / 16 * kOctet + row * (kDeltas * 16);
    Ring<kMiddle> from(0);
    Ring<2> to(1);
    int earlier = -1;
#pragma unroll 1
    for (int tile = first_tile; tile < tiles; tile += tile_step, from.next(), to.next()) {
      const u32 full = shared_address(&barriers.middle_full[from.stage]);
      const u32 rows = middle + from.stage * kMonarch.middle_bytes() + place;
      const u32 written = y + to.stage * kMonarch.y_bytes(), kept = y_received + to.stage * kMonarch.y_bytes();
      if (kRanks > 1 && warp == 0 && lane == 0) {
        mbarrier::arrive_expect(full, kMonarch.middle_bytes() - kPiece);
      }
      mbarrier::wait(full, from.parity);
#pragma unroll
      for (int n = 0; n < kSecond.pairs; ++n) {
#pragma unroll
        for (int group = 0; group < kSecond.groups(); ++group) {
          typename decltype(products)::Sums sums;
          products.multiply(sums, n, group, [&](u32(&a)[4], int e, int step) {
            const u32 l = 2 * (pair + n) + e;
            ldmatrix(a, rows + 2 * step * kOctet + ((l ^ row % 8) << 4));
          });
          if (n == kSecond.pairs - 1 && group == kSecond.groups() - 1) {
            const u32 empty = shared_address(&barriers.middle_empty[from.stage]);
            mbarrier::arrive(empty);  // every lane for itself
            release_at_others<kRanks>(empty, 0);
          }
          if (kExchange > 1 && n == 0 && group == 0) {
            mbarrier::wait(shared_address(&barriers.y_empty[to.stage]), to.parity);
          }
          finish(p, sums, pair + n, column / 8 + group * kSecond.tiles());
          store_y(sums, written, kept, pair + n, column / 8 + group * kSecond.tiles());
        }
      }
      if constexpr (kExchange > 1) {
        fence_async_proxy();
        if (earlier >= 0) {
          store_received(p, earlier, to.stage ^ 1, to.parity ^ to.stage);
        }
        named_barrier(kSecondBarrier,
                      kSecondThreads);  // the earlier tile's rows have been read, and this one's written
        if (lane == 0) {
          swap_y(written, to.stage, warp);
        }
        earlier = tile;
      } else {
        named_barrier(kSecondBarrier, kSecondThreads);
        store_rows(p, tile, written);
      }
    }
    if (kExchange > 1 && earlier >= 0) {
      store_received(p, earlier, to.stage ^ 1, to.parity ^ to.stage);
    }
  }

  /// A warp is done with a slot, and says so to the other CTAs among the kCount from `first` on.
  template <int kCount>
  __device__ __forceinline__ void release_at_others(u32 barrier, u32 first) const {
    if constexpr (kCount > 1) {
      __syncwarp();
      if (const u32 lane = threadIdx.x % 32; lane < kCount && first + lane != rank) {
        arrive_at(barrier, first + lane);
      }
    }
  }

  __device__ __forceinline__ void finish(const FusedParams& p, float (&sums)[2][kSecond.tiles()][4], int pair,
                                         int tile) const {
    if (p.bias != nullptr) {
      const u32 from = bias + (tile * 8 + threadIdx.x % 4 * 2) * (kDeltas * 2) + pair * 4;
#pragma unroll
      for (int n = 0; n < kSecond.tiles(); ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const u32 word = load_shared_32(from + (8 * n + e) * (kDeltas * 2));
          const float low = widen(T{static_cast<u16>(word)}), high = widen(T{static_cast<u16>(word >> 16)});
          sums[0][n][e] += low;
          sums[0][n][2 + e] += low;
          sums[1][n][e] += high;
          sums[1][n][2 + e] += high;
        }
      }
    }
    if (p.activation != 0) {
      activate(reinterpret_cast<float(&)[8 * kSecond.tiles()]>(sums), p.activation);
    }
  }

  /// Rows that lie in the parts of several CTAs are read together, so their chunks must differ by the CTA as well.
  static __device__ __forceinline__ u32 key(u32 row, u32 part) {
    constexpr int kWide = kDeltas / 8, kSpread = kWide >= 8 ? 0 : kExchange * kWide <= 8 ? 8 / kExchange : kWide;
    return (row ^ part * kSpread) % 8;
  }

  /// [row][j][l]: pairs of l are words. Chunks of 16 bytes are swizzled by the row, words by j. Rows that this CTA
  /// keeps go where they would arrive.
  __device__ __forceinline__ void store_y(const float (&sums)[2][kSecond.tiles()][4], u32 sent, u32 kept, int pair,
                                          int tile) const {
    const u32 g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, own = rank % kExchange;
    const u32 lane = g * kRow + ((pair % 4 ^ t) << 2), swizzle = key(g, own);
    const u32 upper = (g / kKeep == own ? kept : sent) + lane;
    const u32 lower = ((g + 8) / kKeep == own ? kept : sent) + lane + 8 * kRow;
#pragma unroll
    for (int n = 0; n < kSecond.tiles(); ++n) {
#pragma unroll
      for (u32 e = 0; e < 2; ++e) {
        const u32 chunk = (8 * (tile + n) + 2 * t + e) * (kDeltas / 8) + pair / 4;
        const u32 at = (chunk ^ swizzle) << 4;
        store_shared_32(upper + at, narrow_pair<T>(sums[0][n][e], sums[1][n][e]));
        store_shared_32(lower + at, narrow_pair<T>(sums[0][n][2 + e], sums[1][n][2 + e]));
      }
    }
  }

  /// One thread of each warp: rows to the CTAs that store them. Each of a group keeps its share of the rows, and gets
  /// them from all.
  __device__ __forceinline__ void swap_y(u32 sent, u32 stage, int warp) const {
    const u32 own = rank % kExchange, full = shared_address(&barriers.y_full[stage]);
    if (warp == 0) {
      mbarrier::arrive_expect(full, kMonarch.y_bytes() - kPart);
    }
#pragma unroll
    for (int n = 0; n < kExchange; n += kSecondWarps) {
      if (0 < n + warp && n + warp < kExchange) {
        const u32 other = (own + n + warp) % kExchange;
        copy_to_rank(y_received + stage * kMonarch.y_bytes() + own * kPart, sent + other * kPart, kPart, full,
                     rank - own + other);
      }
    }
  }
  __device__ __forceinline__ void store_received(const FusedParams& p, int tile, u32 stage, u32 parity) {
    mbarrier::wait(shared_address(&barriers.y_full[stage]), parity);
    store_rows(p, tile, y_received + stage * kMonarch.y_bytes());
    release_at_others<kExchange>(shared_address(&barriers.y_empty[stage]), rank / kExchange * kExchange);
  }

  /// The rows that this CTA keeps, from [CTA of the group][row][j][l] to memory: 16 bytes of every CTA side by side.
  /// Several loads are under way before the first store.
  __device__ __forceinline__ void store_rows(const FusedParams& p, int tile, u32 from) const {
    constexpr int kWide = kDeltas / 8, kChunks = kP * kWide, kAll = kRows * kChunks, kStep = kSecondThreads;
    constexpr int kTurns = (kAll + kStep - 1) / kStep, kTogether = kTurns % 4 == 0 ? 4 : kTurns % 2 == 0 ? 2 : 1;
    const u32 own = rank % kExchange, thread = threadIdx.x - kFirstThreads;
#pragma unroll
    for (int first = 0; first < kTurns; first += kTogether) {
      Words4 words[kTogether];
#pragma unroll
      for (int n = 0; n < kTogether; ++n) {
        const u32 at = min((first + n) * kSecondThreads + thread, static_cast<u32>(kAll - 1));
        const u32 part = at / kWide % kExchange, j = at / (kWide * kExchange) % kP, r = at / (kChunks * kExchange);
        const u32 chunk = j * kWide + at % kWide ^ key(own * kKeep + r, part);
        words[n] = load_words(from + (part * kKeep + r) * kRow + (chunk << 4));
      }
#pragma unroll
      for (int n = 0; n < kTogether; ++n) {
        const u32 at = (first + n) * kSecondThreads + thread;
        const u32 part = at / kWide % kExchange, j = at / (kWide * kExchange) % kP, r = at / (kChunks * kExchange);
        const i64 line = tile * kRows + static_cast<int>(own * kKeep + r);
        if (at < kAll && line < p.batch) {
          const u32 l = (rank - own + part) * kDeltas + at % kWide * 8;
          words[n].unswizzle(j / 2);
          store_global(static_cast<T*>(p.y) + line * p.y_stride + (j * kS + l), words[n]);
        }
      }
    }
  }

  /// All threads: the bias of this CTA's results, [j][l].
  __device__ __forceinline__ void load_bias(const FusedParams& p) const {
    if (p.bias != nullptr) {
      for (u32 n = threadIdx.x; n < kP * kDeltas / 2; n += kMonarch.threads()) {
        const u32 j = 2 * n / kDeltas, l = rank * kDeltas + 2 * n % kDeltas;
        const T* from = static_cast<const T*>(p.bias) + static_cast<i64>(j * kS + l) * p.bias_stride;
        store_shared_32(bias + 4 * n, from[0].bits | static_cast<u32>(from[p.bias_stride].bits) << 16);
      }
    }
  }
};

template <typename T, int kQ, int kR, int kS, int kP, int kRanks, int kFirstWarps, int kSecondWarps, int kExchange>
__global__ void __launch_bounds__(32 * (kFirstWarps + kSecondWarps), 1) fused(const __grid_constant__ FusedParams p) {
  using Work = Fused<T, kQ, kR, kS, kP, kRanks, kFirstWarps, kSecondWarps, kExchange>;
  extern __shared__ __align__(1024) u8 shared[];  // as swizzled rows need it
  if (shared_address(shared) % 1024 != 0) {
    __trap();
  }
  constexpr int kRings = Work::kMonarch.shared() - Monarch::kBarriers;
  static_assert(sizeof(typename Work::Barriers) <= Monarch::kBarriers && kRings % 8 == 0);
  Work work(p, shared_address(shared), *reinterpret_cast<typename Work::Barriers*>(shared + kRings));
  work.load_bias(p);
  work.init();
  const int warp = static_cast<int>(threadIdx.x) / 32;
  // Unequal halves: a thread of the smaller one holds twice the weights, and gets registers of the other's.
  constexpr u32 kMore = 232, kFewer = 136;
  if (warp < kFirstWarps) {
    if constexpr (kFirstWarps != kSecondWarps) {
      kFirstWarps < kSecondWarps ? more_registers<kMore>() : fewer_registers<kFewer>();
    }
    work.run_first(p, warp);
  } else {
    if constexpr (kFirstWarps != kSecondWarps) {
      kFirstWarps < kSecondWarps ? fewer_registers<kFewer>() : more_registers<kMore>();
    }
    work.run_second(p, warp - kFirstWarps);
  }
  if constexpr (kRanks > 1) {
    cluster_sync();  // others may still copy into this CTA, or tell it of free slots
  }
}

}  // namespace fretwork::kronecker::chain
