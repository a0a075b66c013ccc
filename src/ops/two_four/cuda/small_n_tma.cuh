// small_n_tma: 2:4 products of 16-bit types on Hopper, b along k and the result along m, in whole tiles of rows and up
// to 128 columns. Latency dominates: the first loads are issued early, and sums go straight from registers to the CTA
// that stores them.
#pragma once

#include "device/activation.cuh"
#include "device/cluster.cuh"
#include "device/load.cuh"
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
  static constexpr u32 kLine = line_bytes(kGroups);
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

/// Bias and activation of rows `row` and `row` + 8 of two columns.
template <typename T>
__device__ __forceinline__ void finish(float (&v)[4], const Params& p, int row) {
  if (p.bias != nullptr) {
    const T* const bias = static_cast<const T*>(p.bias);
    const float first = widen(bias[row * p.bias_stride]), second = widen(bias[(row + 8) * p.bias_stride]);
    v[0] += first;
    v[1] += first;
    v[2] += second;
    v[3] += second;
  }
  if (p.activation != 0) {
    activate(v, p.activation);
  }
}

/// Results of a unit to where they wait for the way out: columns of the tile one after another.
template <typename T, typename S>
__device__ __forceinline__ void put(const float* v, u32 to, u32 unit) {
  const u32 lane = threadIdx.x % 32;
  const u32 at = to + (unit / S::kWarps * 8 + lane / 4) * S::kLine + unit % S::kWarps * 32 + lane % 4 * 4;
  const u32 top = wgmma::transposed_piece(narrow_pair<T>(v[0], v[1]));
  const u32 low = wgmma::transposed_piece(narrow_pair<T>(v[2], v[3]));
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(at), "r"(top) : "memory");
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(at + 16), "r"(low) : "memory");
}

/// Adds up what arrived, always in the same order, some units of a warp at a time.
template <typename T, typename S>
__device__ __forceinline__ void add_up(const Params& p, u32 base, u32 to, int row0, u32 first, u32 last) {
  constexpr u32 kEach = 4;
  const u32 lane = threadIdx.x % 32;
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
      if (const u32 one = unit + n * S::kWarps; one < last) {
        if (p.bias != nullptr || p.activation != 0) [[unlikely]] {
          finish<T>(v[n], p, row0 + static_cast<int>(one % S::kWarps * 16 + lane / 4));
        }
        put<T, S>(v[n], to, one);
      }
    }
  }
}

/// Units `first` to `last` to the result, 16 bytes of a column at a time.
template <typename T, int kGroups, typename S>
__device__ __forceinline__ void store(const Params& p, u32 from, int row, int col0, u32 first, u32 last) {
  constexpr u32 kParts = rows(kGroups) / 8;  // of a column
  const u32 begin = first / S::kWarps * 8 * kParts, end = (last + S::kWarps - 1) / S::kWarps * 8 * kParts;
#pragma unroll 4
  for (u32 n = begin + threadIdx.x; n < end; n += 128 * kGroups) {
    const u32 col = n / kParts, part = n % kParts, unit = col / 8 * S::kWarps + part / 2;
    if (unit >= first && unit < last && col < p.columns && col0 + col < p.n) {
      u32 words[4];
      asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                   : "r"(from + col * S::kLine + part * 16)
                   : "memory");
      store_words<4>(static_cast<T*>(p.out) + (col0 + col) * p.c_col + row + part * 8, words);
    }
  }
}

/// Sums become results. Where one CTA has all of them and nothing is added, they stay in registers.
template <typename T, int kGroups, typename S, int kSize>
__device__ __forceinline__ void finish_tile(const float (&d)[kSize], const Params& p, S& s, u32 base, int row, int col,
                                            u32 rank) {
  constexpr u32 kMet = 2;  // a named barrier
  const u32 first = p.first_unit[rank], last = p.first_unit[rank + 1];
  u32 results = base + S::kSums;
  if (p.split == 1 && p.bias == nullptr && p.activation == 0) {
#pragma unroll
    for (u32 j = 0; j < kSize / 4; ++j) {
      put<T, S>(d + 4 * j, results, j * S::kWarps + threadIdx.x / 32);
    }
  } else {
    send(d, p, s, base, rank);
    named_barrier(kMet, 128 * kGroups);  // what this CTA keeps; and its stages are free
    mbarrier::wait(shared_address(&s.sums), 0);
    results = base + S::kRing + (S::kSumsOverStages ? sums_bytes(2 * kSize, kGroups) : 0);
    add_up<T, S>(p, base, results, row, first, last);
  }
  named_barrier(kMet, 128 * kGroups);
  wait_for_earlier_kernel();
  store<T, kGroups, S>(p, results, row, col, first, last);
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
#pragma unroll
    for (float& sum : d) {
      sum = 0;
    }
    multiply<T, kColumns>(d, s, base, p.stages, count);
    let_next_kernel_start();
    if constexpr (S::kSumsOverStages) {
      asm volatile("barrier.cluster.arrive;" ::: "memory");
    }
    asm volatile("barrier.cluster.wait;" ::: "memory");
    finish_tile<T, kGroups>(d, p, s, base, row, col, rank);
  }
}

}  // namespace fretwork::two_four::small_n_tma
