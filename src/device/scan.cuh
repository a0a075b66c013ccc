// Sums over the threads of a CTA.
#pragma once

#include "device/types.cuh"

namespace fretwork {

/// The sum up to a thread, its own number included, and over all threads.
struct ScanSums {
  int here, all;
};

/// Of one number of each thread of a CTA of kThreads, all of which call it.
template <int kThreads>
__device__ __forceinline__ ScanSums scan_cta(int own) {
  static_assert(kThreads % 32 == 0 && kThreads <= 1024);
  __shared__ int sums[kThreads / 32];
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  int sum = own;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(~0u, sum, step);
    sum += lane >= step ? other : 0;
  }
  if (lane == 31) {
    sums[warp] = sum;
  }
  __syncthreads();
  const int part = lane < kThreads / 32 ? sums[lane] : 0;
  int before = lane < warp ? part : 0, all = part;
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    before += __shfl_xor_sync(~0u, before, step);
    all += __shfl_xor_sync(~0u, all, step);
  }
  __syncthreads();  // before sums are written again
  return {before + sum, all};
}

/// first[n + 1] = before + count(0) + … + count(n), and first[0] = before. All threads of the CTA call it.
template <int kThreads, typename Count>
__device__ __forceinline__ void scan_counts(int* first, int size, int before, Count count) {
  if (threadIdx.x == 0) {
    first[0] = before;
  }
  for (int base = 0; base < size; base += kThreads) {
    const int n = base + static_cast<int>(threadIdx.x);
    const ScanSums sums = scan_cta<kThreads>(n < size ? count(n) : 0);
    if (n < size) {
      first[n + 1] = before + sums.here;
    }
    before += sums.all;
  }
}

}  // namespace fretwork
