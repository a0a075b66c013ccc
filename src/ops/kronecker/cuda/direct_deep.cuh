// Deep blocks with d = 4, batch first, on Hopper: direct.cuh, with two more branches for grids that fill the machine
// once. Where c is 512, a CTA has the whole depth and issues all its loads together. Else a pair of CTAs shares the
// depth: weights go from memory straight to the registers that wgmma reads as its left operand, and each CTA transposes
// its part of x to [l][k] in shared memory.
#pragma once

#include "device/barrier.cuh"
#include "device/cluster.cuh"
#include "device/mma.cuh"
#include "device/tma.cuh"
#include "device/wgmma.cuh"
#include "ops/kronecker/cuda/direct.cuh"

namespace fretwork::kronecker::direct {

/// 16 bytes, two k of all four δ: both k of δ l.
using Pair = u32[4];
__device__ __forceinline__ u32 both_of(const Pair& pair, int l) { return pair_of(pair[l / 2], pair[2 + l / 2], l % 2); }

template <typename T>
struct Deep {
  static constexpr int kRows = kDeepRows, kTogether = 2;  // steps of 16 k whose loads go together
  using Loads = Pair[kTogether][2][2];                    // [step][half of k][row, row + 8]
  using Fragments = u32[kTogether * 4][4];
  using Sums = float[4][kRows / 2];

  static constexpr u32 kStep = kRows * 128;  // bytes of 16 k of all δ of x

  /// A warpgroup: steps of x, rows of 128 bytes that the copy engine swizzled, from [k][l] to [l][k] where they lie.
  static __device__ __forceinline__ void turn(u32 at) {
#pragma unroll 1
    for (u32 unit = threadIdx.x % 128; unit < kRows * 2 * kTogether; unit += 128) {
      const u32 row = at + unit * 128, key = unit % 8 << 4;
      Pair pairs[8];
#pragma unroll
      for (u32 n = 0; n < 8; ++n) {
        load_shared_128(pairs[n], row + (n << 4 ^ key));
      }
#pragma unroll
      for (u32 n = 0; n < 8; ++n) {
        const int l = n / 2, k = n % 2 * 4;
        const u32 turned[4] = {both_of(pairs[k], l), both_of(pairs[k + 1], l), both_of(pairs[k + 2], l),
                               both_of(pairs[k + 3], l)};
        store_shared_128(row + (n << 4 ^ key), turned);
      }
    }
  }

  /// `from` is of the lane's row and k.
  static __device__ __forceinline__ void load_weights(Loads& loads, const u16* from, i64 eight_rows) {
#pragma unroll
    for (int s = 0; s < kTogether; ++s) {
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        load_if(true, from + n % 2 * eight_rows + s * 64 + n / 2 * 32, loads[s][n / 2][n % 2]);
      }
    }
  }
  static __device__ __forceinline__ void arrange(const Loads& loads, Fragments& fragments) {
#pragma unroll
    for (int s = 0; s < kTogether; ++s) {
#pragma unroll
      for (int l = 0; l < 4; ++l) {
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          fragments[4 * s + l][n] = both_of(loads[s][n / 2][n % 2], l);
        }
      }
    }
  }
  static __device__ __forceinline__ void multiply(Sums& sums, const Fragments& fragments, u64 columns) {
    wgmma::fence();
#pragma unroll
    for (int s = 0; s < kTogether; ++s) {
#pragma unroll
      for (int l = 0; l < 4; ++l) {
        wgmma::multiply<T, kRows, wgmma::Major::k>(sums[l], fragments[4 * s + l],
                                                   columns + l * (32 >> 4) + s * (kStep >> 4));
      }
    }
    wgmma::commit();
  }

  /// Where the sums of a row and an output lie, 16 bytes of all δ, in an order that meets all banks.
  static __device__ __forceinline__ u32 place(u32 row, u32 j) { return (row * 64 + (j ^ row / 2 % 4 * 2)) * 16; }
};

/// Four neighbouring features of a row.
template <typename T>
__device__ __forceinline__ void finish_deep(const Params& p, float (&sums)[4], int row, int feature) {
  if (p.bias != nullptr) {
#pragma unroll
    for (int l = 0; l < 4; ++l) {
      sums[l] += widen(static_cast<const T*>(p.bias)[(feature + l) * p.bias_stride]);
    }
  }
  activate(sums, p.activation);
  *reinterpret_cast<uint2*>(static_cast<T*>(p.y) + static_cast<i64>(row) * p.y_batch + feature) = {
      narrow_pair<T>(sums[0], sums[1]), narrow_pair<T>(sums[2], sums[3])};
}

/// A warpgroup has 64 of b, all of d and up to kDeepRows batch rows.
template <typename T>
__device__ __forceinline__ void multiply_deep(const DeepParams& deep, Four* parts) {
  using Work = Deep<T>;
  constexpr int kRows = kDeepRows, kNext = Work::kTogether * 64, kTurn = 2 * Work::kTogether;  // steps turned together
  const Params& p = deep.direct;
  const int warp = uniform(threadIdx.x / 32), group = warp / 4;
  const u32 lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const u32 ctas = static_cast<u32>(deep.ctas), rank = ctas > 1 ? cluster_rank() : 0;
  const int tile = static_cast<int>(blockIdx.x / ctas), rest = p.groups.quotient(tile), i = p.j_tiles.quotient(rest);
  const int n0 = (tile - rest * static_cast<int>(p.groups.divisor)) * deep.rows;
  const int j0 = (rest - i * static_cast<int>(p.j_tiles.divisor)) * 64;
  const int rows = min(deep.rows, p.batch - n0), turns = deep.depth / (16 * kTurn);
  const int k0 = (static_cast<int>(rank) * 2 + group) * deep.depth, region_bytes = deep_region(deep.depth);
  const u32 regions = shared_address(parts), region = regions + group * region_bytes;
  const u32 full = regions + 2 * region_bytes + group * 64;
  if (threadIdx.x % 128 == 0) {
    for (int n = 0; n < turns; ++n) {
      mbarrier::init(full + 8 * n, 1);
    }
    mbarrier::init_done();
    for (int n = 0; n < turns; ++n) {
      mbarrier::arrive_expect(full + 8 * n, kTurn * Work::kStep);
      tma::load(region + n * (kTurn * Work::kStep), &deep.x, full + 8 * n, 0, n0, (i * p.c + k0) / 16 + n * kTurn);
    }
  }

  const int j = j0 + warp % 4 * 16 + static_cast<int>(g);
  const u16* weights = static_cast<const u16*>(p.w) + i * p.w_block + static_cast<i64>(j) * p.w_b + k0 * 4 + t * 8;
  const i64 eight_rows = 8 * static_cast<i64>(p.w_b);
  typename Work::Loads even, odd;
  Work::load_weights(even, weights, eight_rows);
  Work::load_weights(odd, weights + kNext, eight_rows);
  named_barrier(1 + group, 128);  // the copies' barriers are there

  typename Work::Sums sums = {};
  typename Work::Fragments fragments;
#pragma unroll 1
  for (int turn = 0; turn < turns; ++turn) {
    const u32 steps = region + turn * (kTurn * Work::kStep);
    mbarrier::wait(full + 8 * turn, 0);
    Work::turn(steps);
    fence_async_proxy();
    named_barrier(1 + group, 128);
    const u64 columns = wgmma::descriptor<128>(steps);
    weights += 2 * kNext;
    Work::arrange(even, fragments);
    Work::multiply(sums, fragments, columns);
    if (turn + 1 < turns) {
      Work::load_weights(even, weights, eight_rows);
    }
    wgmma::wait<0>();
    Work::arrange(odd, fragments);
    Work::multiply(sums, fragments, columns + (Work::kTogether * Work::kStep >> 4));
    if (turn + 1 < turns) {
      Work::load_weights(odd, weights + kNext, eight_rows);
    }
    wgmma::wait<0>();
  }
  named_barrier(1 + group, 128);  // x has been read, and its place is free

#pragma unroll
  for (int n = 0; n < kRows / 2; ++n) {
    const u32 row = n / 4 * 8 + 2 * t + n % 2, line = warp % 4 * 16 + g + n / 2 % 2 * 8;
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(region + Work::place(row, line)), "f"(sums[0][n]),
                 "f"(sums[1][n]), "f"(sums[2][n]), "f"(sums[3][n])
                 : "memory");
  }
  meet(deep.ctas);
  constexpr u32 kBatch = 4;  // loads of one CTA's sums that go together
  const u32 units = static_cast<u32>(rows) * 64, next = ctas * kDeepThreads;
#pragma unroll 1
  for (u32 unit = rank * kDeepThreads + threadIdx.x; unit < units; unit += kBatch * next) {
    float totals[kBatch][4] = {};
    for (u32 from = 0; from < 2 * ctas; ++from) {
      u32 words[kBatch][4];
#pragma unroll
      for (u32 n = 0; n < kBatch; ++n) {
        const u32 at = min(unit + n * next, units - 1);
        load_from_rank(words[n], regions + from % 2 * region_bytes + Work::place(at / 64, at % 64), from / 2);
      }
#pragma unroll
      for (u32 n = 0; n < kBatch * 4; ++n) {
        totals[n / 4][n % 4] += __uint_as_float(words[n / 4][n % 4]);
      }
    }
#pragma unroll
    for (u32 n = 0; n < kBatch; ++n) {
      const u32 at = unit + n * next;
      if (at < units) {
        finish_deep<T>(p, totals[n], n0 + static_cast<int>(at / 64), (i * p.b + j0 + static_cast<int>(at % 64)) * 4);
      }
    }
  }
  if (ctas > 1) {
    cluster_sync();  // others may still read these sums
  }
}

/// A CTA has 32 of b, all of c (512) and d, and up to 32 batch rows: all its loads leave at once, those of x by the
/// copy engine and those of the weights straight to fragments. A warp has 16 outputs and a quarter of the depth.
template <typename T>
__device__ __forceinline__ void multiply_whole(const DeepParams& deep, Four* parts) {
  constexpr int kSteps = kWholeDepth / 64, kTiles = kWholeRows / 8;
  constexpr u32 kLines = kWholeRows * 128;  // 16 k of all δ of x
  const Params& p = deep.direct;
  const int warp = uniform(threadIdx.x / 32), quarter = warp / 2, own = warp % 2 * 16;
  const u32 lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int tile = static_cast<int>(blockIdx.x), rest = p.groups.quotient(tile), i = p.j_tiles.quotient(rest);
  const int n0 = (tile - rest * static_cast<int>(p.groups.divisor)) * deep.rows;
  const int j0 = (rest - i * static_cast<int>(p.j_tiles.divisor)) * kWholeOutputs;
  const u32 all = shared_address(parts), x = all + quarter * (kSteps * kLines);
  const u32 sums_at = all + kWholeX, full = sums_at + 4 * kWholeSums + 8 * quarter;
  if (threadIdx.x % 64 == 0) {
    mbarrier::init(full, 1);
    mbarrier::init_done();
    mbarrier::arrive_expect(full, kSteps * static_cast<u32>(deep.rows) * 128);
#pragma unroll 1
    for (int s = 0; s < kSteps; ++s) {
      tma::load(x + s * kLines, &deep.x, full, 0, n0, (i * 4 + quarter) * kSteps + s);
    }
  }
  __syncwarp();
  const u16* const weights = static_cast<const u16*>(p.w) + i * p.w_block +
                             static_cast<i64>(j0 + own + static_cast<int>(g)) * p.w_b + quarter * (kSteps * 64) + t * 8;
  Pair loads[kSteps][4];  // [half of k][row, row + 8]
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      load_if(true, weights + n % 2 * 8 * static_cast<i64>(p.w_b) + s * 64 + n / 2 * 32, loads[s][n]);
    }
  }
  named_barrier(1 + quarter, 64);  // the copies' barrier is there
  mbarrier::wait(full, 0);

  // Column g of a product is row g / 2 + g % 2 · 4 of eight, so that eight lanes meet eight banks.
  const u32 row = g / 2 + g % 2 * 4;
  float sums[4][kTiles][4] = {};
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
    u32 a[4][4];
#pragma unroll
    for (int l = 0; l < 4; ++l) {
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        a[l][n] = both_of(loads[s][n], l);
      }
    }
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      Pair low, high;
      const u32 line = x + s * kLines + (n * 8 + row) * 128;
      load_shared_128(low, line + ((t ^ row) << 4));
      load_shared_128(high, line + ((t ^ row ^ 4) << 4));
#pragma unroll
      for (int l = 0; l < 4; ++l) {
        mma_sync<T>(sums[l][n], a[l], both_of(low, l), both_of(high, l));
      }
    }
  }

  const auto place = [](u32 column, u32 j) { return (column * kWholeOutputs + (j ^ column / 2 % 4 * 2)) * 16; };
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
#pragma unroll
    for (u32 e = 0; e < 4; ++e) {
      const u32 words[4] = {__float_as_uint(sums[0][n][e]), __float_as_uint(sums[1][n][e]),
                            __float_as_uint(sums[2][n][e]), __float_as_uint(sums[3][n][e])};
      store_shared_128(sums_at + quarter * kWholeSums + place(n * 8 + 2 * t + e % 2, own + g + e / 2 * 8), words);
    }
  }
  __syncthreads();
  const int rows = min(deep.rows, p.batch - n0);
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
    const int column = n * 8 + warp, in = n * 8 + warp / 2 + warp % 2 * 4;
    if (in < rows) {
      float totals[4] = {};
#pragma unroll
      for (u32 from = 0; from < 4; ++from) {
        Pair words;
        load_shared_128(words, sums_at + from * kWholeSums + place(static_cast<u32>(column), lane));
#pragma unroll
        for (int l = 0; l < 4; ++l) {
          totals[l] += __uint_as_float(words[l]);
        }
      }
      finish_deep<T>(p, totals, n0 + in, (i * p.b + j0 + static_cast<int>(lane)) * 4);
    }
  }
}

/// One kernel for all batches up to 256 rows; of these, p.ctas picks those that go as above.
template <typename T, int kSteps, int kM, int kN, int kMoreSteps, int kMoreM, int kMoreN>
__global__ void __launch_bounds__(kDeepThreads, 1) deep(const __grid_constant__ DeepParams p) {
  extern __shared__ __align__(1024) Four sums_or_x[];
  if (p.ctas > 1) {
    multiply_deep<T>(p, sums_or_x);
  } else if (p.ctas == 1) {
    multiply_whole<T>(p, sums_or_x);
  } else {
    multiply_some<T, 4, kSteps, kM, kN, kMoreSteps, kMoreM, kMoreN, true>(p.direct, sums_or_x);
  }
}

}  // namespace fretwork::kronecker::direct
