// Packs the weights of two factors in the order in which the threads of chain.cuh hold them.
#pragma once

#include "device/barrier.cuh"
#include "ops/kronecker/cuda/params_chain.cuh"

namespace fretwork::kronecker::chain {

/// What a register of a fragment holds: columns 2t, 2t + 1 (+ 8) of K, line g of a product.
struct Entry {
  int product, line, k;
};

/// `at` counts words of one factor: [rank][warp][words / 4][lane][4].
__device__ __forceinline__ Entry entry_of(Monarch::Share share, int warps, int depth, int products, int at) {
  const int words = share.words(depth), lane = at / 4 % 32, word = at / 128 % (words / 4) * 4 + at % 4;
  const int warp = at / (32 * words) % warps, rank = at / (32 * words * warps);
  const int half = word % 2, tile = word / 2 % share.tiles(), step = word / 2 / share.tiles() % (depth / 16);
  const int rest = word / 2 / share.tiles() / (depth / 16), group = rest / 2 % share.groups();
  const int pair = share.first_pair(warp) + rest / 2 / share.groups();
  const int line = share.first_column(warp) + (group * share.tiles() + tile) * 8 + lane / 4;
  return {rank * products + 2 * pair + rest % 2, line, 16 * step + 8 * half + 2 * (lane % 4)};
}

/// One word each thread.
template <int kQ, int kR, int kS, int kP, int kRanks, int kFirstWarps, int kSecondWarps>
__global__ void __launch_bounds__(kPackThreads) pack(const __grid_constant__ PackParams p) {
  constexpr Monarch kMonarch{kQ, kR, kS, kP, kRanks, 1, kFirstWarps, kSecondWarps};
  constexpr int kFirst = 32 * kFirstWarps * kRanks * kMonarch.first_words();
  let_next_kernel_start();
  const int at = static_cast<int>(blockIdx.x * kPackThreads + threadIdx.x);
  if (at >= kMonarch.words()) {
    return;
  }
  const u16* from;
  i64 next;
  if (at < kFirst) {
    const Entry e = entry_of(kMonarch.first(), kFirstWarps, kR, kMonarch.blocks(), at);
    next = p.first_c;
    from = static_cast<const u16*>(p.first) + e.product * p.first_a + e.line * p.first_b + e.k * next;
  } else {
    // Pairs of i stand in an order that depends on l, which keeps the stores of the middle apart.
    const Entry e = entry_of(kMonarch.second(), kSecondWarps, kQ, kMonarch.deltas(), at - kFirst);
    next = p.second_c;
    from = static_cast<const u16*>(p.second) + e.product * p.second_d + e.line * p.second_b +
           (e.k ^ (e.product / 2 % 4 * 2)) * next;
  }
  static_cast<u32*>(p.to)[at] = from[0] | static_cast<u32>(from[next]) << 16;
}

}  // namespace fretwork::kronecker::chain
