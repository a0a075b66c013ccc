// What a product applies to its sums.
#pragma once

#include "device/types.cuh"

namespace fretwork {

/// Applies activation number `kind` (as fretwork::Activation counts) to all of d. NaN stays NaN.
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
      v = 0.5f * v * (1.0f + erff(v * 0.70710678118654752440f));
    }
  } else if (kind == 3) {
#pragma unroll
    for (float& v : d) {
      v = __fdividef(v, 1.0f + __expf(-v));
    }
  }
}

}  // namespace fretwork
