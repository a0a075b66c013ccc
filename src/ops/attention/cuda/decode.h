// Attention with few queries against many keys on a GPU, split over the keys.
#pragma once

#include <cstdint>
#include <vector>

#include "ops/attention/cuda/params.h"
#include "ops/attention/plan.h"
#include "ops/attention/problem.h"

namespace fretwork::attention_op::decode {

inline constexpr std::int64_t kMostQueries = 16;

/// The keys that a pattern of few queries uses, in steps of 16 as the kernels read them (cuda/params_decode.cuh).
struct Steps {
  std::vector<std::int32_t> tokens, masks;
  std::vector<std::uint16_t> bits;
  int count() const { return static_cast<int>(masks.size()); }
};
Steps steps_of(const Plan& plan);

/// Runs it and returns true, or returns false, having done nothing, where it does not apply: more than 16 queries,
/// several patterns, not a 16-bit type, or operands whose rows cannot be read 16 bytes at a time. The device is
/// current. `segments` are what the keys are cut into, or 0 for as many as keep the device busy.
bool forward(const Problem& problem, const ScoreArg& score, Context& context, int segments = 0);

}  // namespace fretwork::attention_op::decode
