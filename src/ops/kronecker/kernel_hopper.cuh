// What the Hopper kernels of the Kronecker products have in common: a ring of stages that one thread fills with 64 of
// the depth of both operands, and the loop of products over it.
#pragma once

#include "device/barrier.cuh"
#include "device/tma.cuh"
#include "device/wgmma.cuh"
#include "ops/kronecker/params_hopper.cuh"

namespace fretwork::kronecker::hopper {

inline constexpr u32 kLeftBytes = kRows * 128;

/// The stages of a CTA whose tiles are kWidth wide.
template <int kWidth>
struct Stages {
  static constexpr u32 kCount = stages(kWidth), kBytes = stage_bytes(kWidth);
  using Ring = fretwork::Ring<kCount>;
  u64 full[kCount], empty[kCount];
};

/// A tile: rows from `row`, columns from `col`, depth in steps of 64 from `first` to `last`.
struct Tile {
  int row, col, l, i, first, last;
};

/// kLines rows of an operand × 64 of its depth. With K as the unit axis it is one box, else boxes of 64 rows.
template <bool kK, int kLines>
__device__ __forceinline__ void fetch_operand(u32 to, const Map* map, u32 full, int row, int depth, const Tile& t) {
  if constexpr (kK) {
    tma::load(to, map, full, depth, row, t.l, t.i);
  } else {
#pragma unroll
    for (int at = 0; at < kLines; at += 64) {
      tma::load(to + at * 128, map, full, row + at, depth, t.l, t.i);
    }
  }
}

/// One thread fetches the stages of a tile.
template <int kWidth, bool kLeftK, bool kRightK>
__device__ __forceinline__ void fetch(const Map* left, const Map* right, const Tile& t, Stages<kWidth>& stages,
                                      u32 base, typename Stages<kWidth>::Ring& ring) {
  using S = Stages<kWidth>;
  for (int step = t.first; step < t.last; ++step, ring.next()) {
    mbarrier::wait(shared_address(&stages.empty[ring.stage]), ring.parity);
    const u32 full = shared_address(&stages.full[ring.stage]), to = base + ring.stage * S::kBytes;
    mbarrier::arrive_expect(full, S::kBytes);
    fetch_operand<kLeftK, kRows>(to, left, full, t.row, step * 64, t);
    fetch_operand<kRightK, kWidth>(to + kLeftBytes, right, full, t.col, step * 64, t);
  }
}

/// A warpgroup multiplies the stages of a tile, 64 rows × kWidth. kSums: `sums` gets the rows' sums of the left
/// operand, multiplied by the 8 × 64 ones at `ones`.
template <typename T, int kWidth, bool kLeftK, bool kRightK, bool kSums>
__device__ __forceinline__ void multiply(float (&d)[kWidth / 2], float (&sums)[4], int steps, Stages<kWidth>& stages,
                                         u32 base, typename Stages<kWidth>::Ring& ring, u32 ones) {
  using wgmma::Major;
  constexpr Major kA = kLeftK ? Major::k : Major::mn, kB = kRightK ? Major::k : Major::mn;
  const u32 empty = shared_address(stages.empty), warpgroup = threadIdx.x / 128 - 1;
  const u64 one = wgmma::descriptor<128>(ones);
  int pending = -1;  // the stage that products in flight still read
#pragma unroll 1
  for (int n = 0; n < steps; ++n, ring.next()) {
    mbarrier::wait(shared_address(&stages.full[ring.stage]), ring.parity);
    const u32 at = base + ring.stage * Stages<kWidth>::kBytes;
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
    wgmma::commit();
    wgmma::wait<1>();
    release(empty, pending);
    pending = static_cast<int>(ring.stage);
  }
  wgmma::wait<0>();
  release(empty, pending);
}

}  // namespace fretwork::kronecker::hopper
