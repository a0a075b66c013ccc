// small_n_tma: 2:4 products of 16-bit types on Hopper, b along k and the result along m, in tiles of whole rows and up
// to 192 columns. Latency dominates: the first loads are issued early, and sums go straight from registers to the CTA
// that stores them.
#pragma once

#include "device/activation.cuh"
#include "device/cluster.cuh"
#include "device/epilogue.cuh"
#include "device/pipeline.cuh"
#include "device/tma.cuh"
#include "device/wgmma.cuh"
#include "ops/two_four/cuda/params.h"

namespace fretwork::two_four::small_n_tma {

/// What a CTA has, and its barriers.
template <int kColumns, int kGroups>
struct Shape {
  static constexpr u32 kBytes = stage_bytes(kColumns, kGroups);
  static constexpr u32 kWarps = 4 * kGroups, kUnits = units(kColumns, kGroups), kThreads = threads(kGroups);
  static constexpr u32 kLeftBytes = rows(kGroups) * 128, kChunkBytes = chunk_bytes(kGroups);
  static constexpr bool kSumsOverStages = sums_over_stages(kColumns, kGroups);
  static constexpr u32 kSums = kChunks * kChunkBytes, kRing = bytes_before_stages(kColumns, kGroups);
  RingBarriers<kMostStages> ring;
  RingBarriers<kChunks> chunks;  ///< of metadata
  u64 sums;
};

/// One thread makes the barriers; `received` bytes of sums will come from the other CTAs.
template <typename S>
__device__ __forceinline__ void make_barriers(S& s, u32 stages, u32 received) {
#pragma unroll 1  // in a short kernel, fetching instructions takes time
  for (u32 n = 0; n < stages; ++n) {
    mbarrier::init(shared_address(&s.ring.full[n]), 1);
    mbarrier::init(shared_address(&s.ring.empty[n]), S::kWarps);
  }
#pragma unroll 1
  for (u32 n = 0; n < kChunks; ++n) {
    mbarrier::init(shared_address(&s.chunks.full[n]), 1);
    mbarrier::init(shared_address(&s.chunks.empty[n]), 32 * S::kWarps);
  }
  mbarrier::init(shared_address(&s.sums), 1);
  mbarrier::init_done();
  mbarrier::arrive_expect(shared_address(&s.sums), received);
}

/// One thread fetches `count` steps from `first` on.
template <int kColumns, typename S>
__device__ __forceinline__ void fetch(const Params& p, S& s, u32 base, int row, int col, int first, int count) {
  Producer<0> at;
  Producer<kChunks> chunk;
  const u32 bytes = S::kLeftBytes + 2 * p.columns * 128;
#pragma unroll 1
  for (int step = 0; step < count; ++step, at.next(p.stages)) {
    if (step % kPerChunk == 0) {
      const u32 full = s.chunks.acquire(chunk);
      mbarrier::arrive_expect(full, S::kChunkBytes);
      tma::load(base + chunk.stage * S::kChunkBytes, &p.words, full, (first + step) * (kDepth / 8), row, 0, 0);
      chunk.next();
    }
    const u32 full = s.ring.acquire(at), to = base + S::kRing + at.stage * S::kBytes;
    mbarrier::arrive_expect(full, bytes);
    tma::load(to, &p.values, full, (first + step) * (kDepth / 2), row, 0, 0);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      tma::load(to + S::kLeftBytes + h * (kColumns * 128), &p.b, full, (first + step) * kDepth + h * 64, col, 0, 0);
    }
  }
}

/// A lane's metadata of step after step, from chunks whose rows of 64 bytes the copy engine has swizzled.
template <typename S>
struct Words {
  u32 at, turned;  ///< where a lane's first row begins; what switches units of 16 bytes
  Consumer<kChunks> chunk;

  __device__ __forceinline__ explicit Words(u32 base) {
    const u32 lane = threadIdx.x % 32;
    at = base + (threadIdx.x / 32 * 16 + lane / 4) * 64 + lane % 4 * 2;
    turned = (lane / 8 % 4) << 4;
  }
  __device__ __forceinline__ void read(u32 (&e)[2], S& s, int step) {
    const u32 in_chunk = static_cast<u32>(step) % kPerChunk;
    if (in_chunk == 0) {
      s.chunks.wait(chunk);
    }
#pragma unroll
    for (u32 h = 0; h < 2; ++h) {
      const u32 from = at + chunk.stage * S::kChunkBytes + (in_chunk * 16 ^ turned) + h * 8;
      u16 low, high;
      asm volatile("ld.shared.b16 %0, [%1];" : "=h"(low) : "r"(from));
      asm volatile("ld.shared.b16 %0, [%1];" : "=h"(high) : "r"(from + 8 * 64));
      e[h] = static_cast<u32>(high) << 16 | low;
    }
    if (in_chunk == kPerChunk - 1) {
      s.chunks.release_lane(chunk.stage);
      chunk.next();
    }
  }
};

/// A warpgroup multiplies 64 rows. The next step's metadata is read while products run: a register of metadata must
/// stay untouched until its products have completed.
template <typename T, int kColumns, typename S>
__device__ __forceinline__ void multiply(float (&d)[kColumns / 2], S& s, u32 base, u32 stages, int count) {
  Consumer<0> ring;
  Words<S> words(base);
  u32 e[2][2];
  words.read(e[0], s, 0);
#pragma unroll 1
  for (int pair = 0; pair < count; pair += 2) {
#pragma unroll
    for (int turn = 0; turn < 2; ++turn) {
      const int step = pair + turn;
      if (step < count) {
        s.ring.wait(ring);
        const u32 at = base + S::kRing + ring.stage * S::kBytes;
        const u64 left = wgmma::descriptor<128>(at + threadIdx.x / 128 * (64 * 128));
        const u64 right = wgmma::descriptor<128>(at + S::kLeftBytes);
        wgmma::fence();
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const u64 a = left + h * 4, b = right + h * (kColumns * 128 >> 4);
          wgmma::multiply_sparse<T, kColumns, wgmma::Major::k, 0>(d, a, b, e[turn][h]);
          wgmma::multiply_sparse<T, kColumns, wgmma::Major::k, 1>(d, a + 2, b + 4, e[turn][h]);
        }
        wgmma::commit();
        if (step + 1 < count) {
          words.read(e[1 - turn], s, step + 1);
        }
        wgmma::wait<0>();
        wgmma::metadata_read(e[turn]);
        s.ring.release(static_cast<int>(ring.stage));
        ring.next(stages);
      }
    }
  }
}

/// Sends a warp's sums, unit by unit, to the CTAs that finish them. There they lie by sender.
template <typename S, int kSize>
__device__ __forceinline__ void send(const float (&d)[kSize], const Params& p, S& s, u32 base, u32 rank) {
  const u32 mine = base + S::kSums + rank * p.slots * kUnitBytes + threadIdx.x % 32 * 16;
#pragma unroll
  for (u32 j = 0; j < kSize / 4; ++j) {
    const u32 unit = j * S::kWarps + threadIdx.x / 32, owner = ((unit + 1) * p.split - 1) / S::kUnits;
    const u32 to = mine + (unit - p.first_unit[owner]) * kUnitBytes;
    const u32 sums[4] = {__float_as_uint(d[4 * j]), __float_as_uint(d[4 * j + 1]), __float_as_uint(d[4 * j + 2]),
                         __float_as_uint(d[4 * j + 3])};
    if (owner == rank) {
      asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(sums[0]), "r"(sums[1]), "r"(sums[2]),
                   "r"(sums[3])
                   : "memory");
    } else {
      store_to_rank(to, sums, shared_address(&s.sums), owner);
    }
  }
}

/// Bias and activation of rows `row` and `row` + 8 of some columns, two at a time.
template <typename T, int kSize>
__device__ __forceinline__ void finish(float (&v)[kSize], const Params& p, int row) {
  if (p.bias != nullptr) {
    const T* const bias = static_cast<const T*>(p.bias);
    const float both[2] = {widen(bias[row * p.bias_stride]), widen(bias[(row + 8) * p.bias_stride])};
#pragma unroll
    for (int n = 0; n < kSize; ++n) {
      v[n] += both[n / 2 % 2];
    }
  }
  if (p.activation != 0) {
    activate(v, p.activation);
  }
}

/// Adds up what arrived, always in the same order, some units of a warp at a time, and writes it.
template <typename T, typename S>
__device__ __forceinline__ void add_up(const Params& p, u32 base, int row0, int col0, u32 rank) {
  constexpr u32 kEach = 4;
  const u32 lane = threadIdx.x % 32, first = p.first_unit[rank], last = p.first_unit[rank + 1];
#pragma unroll 1
  for (u32 unit = first + threadIdx.x / 32; unit < last; unit += kEach * S::kWarps) {
    u32 from = base + S::kSums + (unit - first) * kUnitBytes + lane * 16;
    float v[kEach][4] = {};
#pragma unroll 1
    for (int q = 0; q < p.split; ++q, from += p.slots * kUnitBytes) {
      float more[kEach][4] = {};
#pragma unroll
      for (u32 n = 0; n < kEach; ++n) {
        if (unit + n * S::kWarps < last) {
          asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                       : "=f"(more[n][0]), "=f"(more[n][1]), "=f"(more[n][2]), "=f"(more[n][3])
                       : "r"(from + n * S::kWarps * kUnitBytes)
                       : "memory");
        }
      }
#pragma unroll
      for (u32 n = 0; n < 4 * kEach; ++n) {
        v[n / 4][n % 4] += more[n / 4][n % 4];
      }
    }
#pragma unroll
    for (u32 n = 0; n < kEach; ++n) {
      const u32 one = unit + n * S::kWarps;
      if (one >= last) {
        break;
      }
      const int row = row0 + static_cast<int>(one % S::kWarps * 16);
      if (p.bias != nullptr || p.activation != 0) [[unlikely]] {
        finish<T>(v[n], p, row + static_cast<int>(lane / 4));
      }
      // A lane has two columns of two rows, and writes two rows of a column.
      const u32 top = wgmma::transposed_piece(narrow_pair<T>(v[n][0], v[n][1]));
      const u32 low = wgmma::transposed_piece(narrow_pair<T>(v[n][2], v[n][3]));
      const int col = static_cast<int>(one / S::kWarps * 8 + lane / 4);
      if (col < p.columns && col0 + col < p.n) {
        u32* const to = reinterpret_cast<u32*>(static_cast<T*>(p.out) + (col0 + col) * p.c_col + row) + lane % 4;
        to[0] = top;
        to[4] = low;
      }
    }
  }
}

/// A warpgroup's sums, 64 rows, as the copy engine swizzles columns of 128 bytes.
template <typename T, int kPiece = 0, int kSize>
__device__ __forceinline__ void put(const float (&d)[kSize], u32 to) {
  if constexpr (kPiece * 32 < kSize) {
    store_piece<T, true, kPiece * 32>(d, to + kPiece * kPieceBytes);
    put<T, kPiece + 1>(d, to);
  }
}

/// Sums that one CTA has all of leave by the copy engine.
template <typename T, typename S, int kSize>
__device__ __forceinline__ void store(float (&d)[kSize], const Params& p, u32 base, int row, int col) {
  const u32 group = threadIdx.x / 128, results = base + S::kSums + group * (2 * kSize * 128);
  row += static_cast<int>(group * 64);
  if (p.bias != nullptr || p.activation != 0) [[unlikely]] {
    const int mine = row + static_cast<int>(threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4);
    in_turns(d, [&](auto& some, int) { finish<T>(some, p, mine); });
  }
  put<T>(d, results);
  wait_for_earlier_kernel();
  fence_async_proxy();
  named_barrier(2 + group, 128);
  if (threadIdx.x % 128 == 0) {
    tma::store(&p.c, results, row, col, 0, 0);
    tma::store_commit();
    tma::store_wait_read<0>();
  }
}

/// The last warp initialises the barriers and fetches at once; the other warps wait for the barriers, it waits for none
/// of them. The cluster barrier holds back sums until every CTA of the cluster has started, or has no more use for its
/// stages if that is where they go. A CTA ends only after it has received all of its sums.
template <typename T, int kColumns, int kGroups>
__global__ void __launch_bounds__(threads(kGroups), 1) product(const __grid_constant__ Params p) {
  using S = Shape<kColumns, kGroups>;
  constexpr u32 kMeet = 1;  // a named barrier
  extern __shared__ u8 raw[];
  __shared__ S s;
  const u32 base = (shared_address(raw) + 1023) & ~1023u, rank = cluster_rank();
  const int tile = static_cast<int>(cluster_index()), row_tile = p.col_tiles.quotient(tile);
  const int row = row_tile * rows(kGroups);
  const int col = (tile - row_tile * static_cast<int>(p.col_tiles.divisor)) * p.columns;
  const int first = p.first_step[rank], count = p.first_step[rank + 1] - first;
  if (threadIdx.x >= 128 * kGroups) {
    const bool fetches = threadIdx.x == 128 * kGroups;
    if (fetches) {
      make_barriers(s, p.stages, (p.first_unit[rank + 1] - p.first_unit[rank]) * (p.split - 1) * kUnitBytes);
    }
    __syncwarp();
    asm volatile("bar.arrive %0, %1;" ::"n"(kMeet), "n"(S::kThreads) : "memory");
    asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
    if (fetches) {
      wait_for_earlier_kernel();
      fetch<kColumns>(p, s, base, row, col, first, count);
    }
    __syncwarp();
    let_next_kernel_start();
    asm volatile("barrier.cluster.wait;" ::: "memory");
  } else {
    named_barrier(kMeet, S::kThreads);
    if constexpr (!S::kSumsOverStages) {
      asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
    }
    float d[kColumns / 2];
    clear(d);
    multiply<T, kColumns>(d, s, base, p.stages, count);
    let_next_kernel_start();
    if constexpr (S::kSumsOverStages) {
      asm volatile("barrier.cluster.arrive;" ::: "memory");
    }
    asm volatile("barrier.cluster.wait;" ::: "memory");
    if (p.split == 1) {
      store<T, S>(d, p, base, row, col);
    } else {
      send(d, p, s, base, rank);
      named_barrier(2, 128 * kGroups);  // what this CTA keeps
      mbarrier::wait(shared_address(&s.sums), 0);
      wait_for_earlier_kernel();
      add_up<T, S>(p, base, row, col, rank);
    }
  }
}

}  // namespace fretwork::two_four::small_n_tma
