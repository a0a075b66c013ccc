// What a product applies to its sums: exactly, or to the precision of 16-bit results. NaN stays NaN. Kinds are numbered
// as fretwork::Activation counts.
#pragma once

#include "device/types.cuh"

namespace fretwork {

template <typename Sum>
__device__ __forceinline__ Sum activate_exactly(Sum v, int kind) {
  switch (kind) {
    case 1:
      return v > 0 || v != v ? v : Sum{0};
    case 2:
      return Sum{0.5} * v * erfc(v * Sum{-0.70710678118654752440});  // 1 + erf would cancel below 0
    case 3:
      return v / (Sum{1} + exp(-v));
    default:
      return v;
  }
}

/// v·Φ(v) for 16-bit results. With a = |v| and t = 1/(1 + 0.27·a), Φ(−a) = t·2^(P(t) − a²·log₂(e)/2). P is a minimax
/// fit: the relative error is below 1e-5, in the far tail too, where 1 + erf(·) would have cancelled.
__device__ __forceinline__ float gelu(float v) {
  const float a = fabsf(v);
  float t, power;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(t) : "f"(fmaf(0.27f, a, 1.0f)));
  float exponent = fmaf(0.39558767f, t, -1.35952016f);
  exponent = fmaf(exponent, t, 1.34792582f);
  exponent = fmaf(exponent, t, -0.39016306f);
  exponent = fmaf(exponent, t, 0.80458754f);
  exponent = fmaf(exponent, t, 1.41459651f);
  exponent = fmaf(exponent, t, -3.21301268f);
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(fmaf(a * -0.72134752f, a, exponent)));
  const float below = t * power;
  return v * (v > 0.0f ? 1.0f - below : below);
}

/// All of d, for 16-bit results.
template <int kSize>
__device__ __forceinline__ void activate(float (&d)[kSize], int kind) {
  if (kind == 1) {
#pragma unroll
    for (float& v : d) {
      v = v < 0.0f ? 0.0f : v;
    }
  } else if (kind == 2) {
#pragma unroll
    for (float& v : d) {
      v = gelu(v);
    }
  } else if (kind == 3) {
#pragma unroll
    for (float& v : d) {
      v = __fdividef(v, 1.0f + __expf(-v));
    }
  }
}

}  // namespace fretwork
