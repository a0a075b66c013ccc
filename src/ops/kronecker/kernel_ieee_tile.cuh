// What the exact fp32 kernels share: a thread's operands out of shared memory, its multiplications, and activations.
#pragma once

#include "device/copy_async.cuh"
#include "device/types.cuh"
#include "ops/kronecker/kernel_simple.cuh"
#include "ops/kronecker/params_ieee.cuh"

namespace fretwork::kronecker::ieee {

template <int N>
struct alignas(4 * N) float_run {
  float at[N];
};

/// Groups of four neighbours, `Apart` from each other.
template <int N, int Apart>
__device__ __forceinline__ void load_along(float (&to)[N], const float* from) {
#pragma unroll
  for (int g = 0; g < N / 4; ++g) {
    const auto four = *reinterpret_cast<const float_run<4>*>(from + g * Apart);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      to[4 * g + e] = four.at[e];
    }
  }
}

/// Neighbours in memory become number n of Deep operands.
template <int Deep, int N>
__device__ __forceinline__ void load_across(float (&to)[Deep][N], int n, const float* from) {
  const auto run = *reinterpret_cast<const float_run<Deep>*>(from);
#pragma unroll
  for (int e = 0; e < Deep; ++e) {
    to[e][n] = run.at[e];
  }
}

template <int M, int N>
__device__ __forceinline__ void multiply_add(float (&sum)[M][N], const float (&a)[M], const float (&b)[N]) {
#pragma unroll
  for (int m = 0; m < M; ++m) {
#pragma unroll
    for (int n = 0; n < N; ++n) {
      sum[m][n] = fmaf(a[m], b[n], sum[m][n]);
    }
  }
}

}  // namespace fretwork::kronecker::ieee
