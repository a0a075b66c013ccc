// A head's sink as kernels read it: one more score of each row, whose value is zero.
#pragma once

#include "device/math.cuh"
#include "device/types.cuh"
#include "ops/attention/cuda/params.h"

namespace fretwork::attention_op {

__device__ __forceinline__ float sink_of(const SinksArg& sinks, int head, int row = 0) {
  const i64 at = head * sinks.head + row * sinks.row;
  return sinks.type == BiasType::f32   ? static_cast<const float*>(sinks.data)[at]
         : sinks.type == BiasType::f16 ? widen(static_cast<const f16*>(sinks.data)[at])
                                       : widen(static_cast<const bf16*>(sinks.data)[at]);
}

/// What a row with its sink alone has. −∞ is no score.
__device__ __forceinline__ RowSum sink_sum(float sink) {
  return sink == -infinity() ? RowSum{0.0f, 0.0f} : RowSum{sink, 1.0f};
}

}  // namespace fretwork::attention_op
