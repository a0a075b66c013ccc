// The ways a GPU runs a Kronecker product. Each way says whether it took the problem; cuda.cpp asks them in turn.
#pragma once

#include "ops/kronecker/problem.h"

namespace fretwork::kronecker {

/// TMA and wgmma on sm_90a, 16-bit types: batch last, and batch first with d = 1.
namespace hopper {
bool run(const Problem& problem, Context& context);
bool run(const WeightProblem& problem, Context& context);
}  // namespace hopper

/// Tensor cores on sm_80 and later, batch first with d > 1: neighbouring δ stay together from memory to fragments.
namespace strided {
bool run(const Problem& problem, Context& context);
bool run(const WeightProblem& problem, Context& context);
}  // namespace strided

/// Tensor cores on sm_80 and later where a row of features (d = 1) or of the batch (batch last) is contiguous.
namespace portable {
bool run(const Problem& problem, Context& context);
bool run(const WeightProblem& problem, Context& context);
}  // namespace portable

}  // namespace fretwork::kronecker
