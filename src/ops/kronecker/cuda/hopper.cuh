// What the Hopper kernels share: a ring of stages, each 128 bytes of the depth of both operands, filled by one thread,
// and the loop of wgmma over it.
#pragma once

#include "device/pipeline.cuh"
#include "device/tf32.cuh"
#include "device/tma.cuh"
#include "device/wgmma.cuh"
#include "ops/kronecker/cuda/params.h"

namespace fretwork::kronecker::hopper {

inline constexpr u32 kLeftBytes = kRows * 128, kTurningWarps = 3;

/// Elements of T in the 128 bytes of a line: the depth of a stage.
template <typename T>
inline constexpr int kLine = 128 / static_cast<int>(sizeof(T));

/// The stages of a CTA whose tiles are kWidth wide.
template <int kWidth>
struct Stages : RingBarriers<stages(kWidth)> {
  static constexpr u32 kCount = stages(kWidth), kBytes = stage_bytes(kWidth);
  using Ring = fretwork::Ring<kCount>;
};

/// A tile: rows from `row`, columns from `col`, depth in steps of 128 bytes from `first` to `last`.
struct Tile {
  int row, col, l, i, first, last;
};

/// kLines rows of an operand × a step of its depth. With K as the unit axis it is one box, else boxes of as many rows.
template <typename T, bool kK, int kLines>
__device__ __forceinline__ void fetch_operand(u32 to, const Map* map, u32 full, int row, int depth, const Tile& t) {
  if constexpr (kK) {
    tma::load(to, map, full, depth, row, t.l, t.i);
  } else {
#pragma unroll
    for (int at = 0; at < kLines; at += kLine<T>) {
      tma::load(to + at * 128, map, full, row + at, depth, t.l, t.i);
    }
  }
}

/// One thread fetches the stages of a tile, whose rows lie where `from` says.
template <typename T, int kWidth, bool kLeftK, bool kRightK>
__device__ __forceinline__ void fetch(const Map* left, const Map* right, const Tile& t, const Tile& from,
                                      Stages<kWidth>& stages, u32 base, typename Stages<kWidth>::Ring& ring) {
  using S = Stages<kWidth>;
  for (int step = t.first; step < t.last; ++step, ring.next()) {
    const u32 full = stages.acquire(ring), to = base + ring.stage * S::kBytes;
    mbarrier::arrive_expect(full, S::kBytes);
    fetch_operand<T, kLeftK, kRows>(to, left, full, from.row, step * kLine<T>, from);
    fetch_operand<T, kRightK, kWidth>(to + kLeftBytes, right, full, t.col, step * kLine<T>, t);
  }
}

/// The row of a warpgroup's 64 that a lane's sums lie in, and the one of its other half.
template <typename T, bool kLeftK>
__device__ __forceinline__ int row_of(u32 half) {
  if constexpr (is_same<T, float>) {
    return static_cast<int>(tf32::row_of<kLeftK>(half));
  } else {
    return static_cast<int>(threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4 + 8 * half);
  }
}

/// A warpgroup multiplies the stages of a tile, 64 rows × kWidth, of 16-bit types. kSums: `sums` gets the rows' sums of
/// the left operand, multiplied by the 8 × 64 ones at `ones`.
template <typename T, int kWidth, bool kLeftK, bool kRightK, bool kSums>
__device__ __forceinline__ void multiply_16(float (&d)[kWidth / 2], float (&sums)[4], int steps, Stages<kWidth>& stages,
                                            u32 base, typename Stages<kWidth>::Ring& ring, u32 ones) {
  using wgmma::Major;
  constexpr Major kA = kLeftK ? Major::k : Major::mn, kB = kRightK ? Major::k : Major::mn;
  const u32 warpgroup = threadIdx.x / 128 - 1;
  const u64 one = wgmma::descriptor<128>(ones);
  multiply_stages(stages, ring, steps, [&](u32 stage) {
    const u32 at = base + stage * Stages<kWidth>::kBytes;
    const u64 a = wgmma::descriptor<128>(at + warpgroup * 8192, 8192);
    const u64 b = wgmma::descriptor<128>(at + kLeftBytes, 8192);
    wgmma::fence();
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      wgmma::multiply<T, kWidth, kA, kB>(d, a + q * wgmma::kNextK<128, kA>, b + q * wgmma::kNextK<128, kB>);
      if constexpr (kSums) {
        wgmma::multiply<T, 8, kA, Major::k>(sums, a + q * wgmma::kNextK<128, kA>, one);
      }
    }
    return true;
  });
}

/// The same in tf32: `Reader` reads fragments of the left operand, which are rounded in registers; `sums` adds them up
/// unrounded. Those of the next stage are read while products run, into other registers, as theirs must not change. A
/// stage holds the depth of kDeltas products at once, d[l] of each. kTurned: barriers at `turned` say when the right
/// operand of a stage has been turned around.
template <typename Reader, int kDeltas, int kWidth, bool kTurned, bool kSums>
__device__ __forceinline__ void multiply_tf32(float (&d)[kDeltas][kWidth / 2], float (&sums)[4], int steps,
                                              Stages<kWidth>& stages, u32 base, typename Stages<kWidth>::Ring& ring,
                                              u32 turned) {
  constexpr int kRow = 128 / kDeltas;  // bytes of a line of the right operand
  const u32 warpgroup = threadIdx.x / 128 - 1;
  const Reader reader;
  u32 a[2][4][4];
  int pending = -1;  // the stage that products in flight still read
#pragma unroll 1
  for (int n = 0; n < steps; n += 2) {
#pragma unroll
    for (int turn = 0; turn < 2; ++turn) {
      if (n + turn < steps) {
        stages.wait(ring);
        const u32 at = base + ring.stage * Stages<kWidth>::kBytes;
        reader.load(a[turn], at + warpgroup * 8192);
#pragma unroll
        for (u32 q = 0; q < 4; ++q) {
#pragma unroll
          for (u32 e = 0; e < 4; ++e) {
            if constexpr (kSums) {
              sums[e % 2 * 2] += __uint_as_float(a[turn][q][e]);
            }
            a[turn][q][e] = to_tf32(a[turn][q][e]);
          }
        }
        if constexpr (kTurned) {
          mbarrier::wait(turned + 8 * ring.stage, ring.parity);
        }
        wgmma::fence();
#pragma unroll
        for (u32 q = 0; q < 4; ++q) {
          const u64 b = wgmma::descriptor<kRow>(at + kLeftBytes + q % kDeltas * (kWidth * kRow));
          wgmma::multiply_tf32<kWidth>(d[q % kDeltas], a[turn][q],
                                       b + q / kDeltas * wgmma::kNextK<kRow, wgmma::Major::k>);
        }
        wgmma::commit();
        wgmma::wait<1>();
        stages.release(pending);
        pending = static_cast<int>(ring.stage);
        ring.next();
      }
    }
  }
  wgmma::wait<0>();
  stages.release(pending);
  if constexpr (kSums) {
#pragma unroll
    for (int e = 0; e < 4; e += 2) {
      sums[e] += __shfl_xor_sync(~0u, sums[e], 1);
      sums[e] += __shfl_xor_sync(~0u, sums[e], 2);
    }
  }
}

/// Warps 1 to 3 turn the right operand of `steps` stages around, from lines along columns to lines along the depth.
template <int kWidth>
__device__ __forceinline__ void turn_right(int steps, Stages<kWidth>& stages, u32 base, u32 turned) {
  typename Stages<kWidth>::Ring ring(0);
#pragma unroll 1
  for (int n = 0; n < steps; ++n, ring.next()) {
    stages.wait(ring);
    const u32 right = base + ring.stage * Stages<kWidth>::kBytes + kLeftBytes;
#pragma unroll 1
    for (u32 box = threadIdx.x / 32 - 1; box < kWidth / 32; box += kTurningWarps) {
      tf32::turn_box<1>(right + box * 4096);
    }
    fence_async_proxy();  // wgmma reads what was written here
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
      mbarrier::arrive(turned + 8 * ring.stage);
    }
  }
}

/// As the type has it; `extra` is `ones` or `turned`.
template <typename T, int kWidth, bool kLeftK, bool kRightK, bool kSums>
__device__ __forceinline__ void multiply(float (&d)[kWidth / 2], float (&sums)[4], int steps, Stages<kWidth>& stages,
                                         u32 base, typename Stages<kWidth>::Ring& ring, u32 extra) {
  if constexpr (is_same<T, float>) {
    multiply_tf32<tf32::LeftReader<kLeftK>, 1, kWidth, !kRightK, kSums>(reinterpret_cast<float(&)[1][kWidth / 2]>(d),
                                                                        sums, steps, stages, base, ring, extra);
  } else {
    multiply_16<T, kWidth, kLeftK, kRightK, kSums>(d, sums, steps, stages, base, ring, extra);
  }
}

}  // namespace fretwork::kronecker::hopper
