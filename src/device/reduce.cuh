// Reductions over the lanes of a warp and the threads of a block. Every one gives the same result on every run.
#pragma once

#include "device/types.cuh"

namespace fretwork {

struct take_sum {
  template <typename A>
  __device__ __forceinline__ A operator()(A a, A b) const {
    return a + b;
  }
};
/// NaN loses to a number.
struct take_max {
  __device__ __forceinline__ float operator()(float a, float b) const { return fmaxf(a, b); }
  __device__ __forceinline__ double operator()(double a, double b) const { return fmax(a, b); }
};

/// Over the lanes whose numbers differ in no other bits than BITS; every lane gets its group's result.
template <int BITS, typename A, typename Op>
__device__ __forceinline__ A reduce_bits(A x, Op op) {
#pragma unroll
  for (int bit = 16; bit > 0; bit /= 2) {
    if (BITS & bit) {
      x = op(x, __shfl_xor_sync(0xffffffffu, x, bit));
    }
  }
  return x;
}
/// Over groups of LANES neighbouring lanes (a power of two).
template <int LANES, typename A, typename Op>
__device__ __forceinline__ A reduce_lanes(A x, Op op) {
  return reduce_bits<LANES - 1>(x, op);
}

/// Over a block of 32·WARPS threads; every thread gets the result. All threads call it.
template <int WARPS, typename A, typename Op>
__device__ __forceinline__ A reduce_block(A x, Op op) {
  x = reduce_lanes<32>(x, op);
  if constexpr (WARPS > 1) {
    __shared__ A parts[WARPS];
    __syncthreads();  // an earlier reduction may still be read
    if (threadIdx.x % 32 == 0) {
      parts[threadIdx.x / 32] = x;
    }
    __syncthreads();
    x = parts[0];
#pragma unroll
    for (int w = 1; w < WARPS; ++w) {
      x = op(x, parts[w]);
    }
  }
  return x;
}

}  // namespace fretwork
