// Exact fp32 products, with the shape of their CTAs open to those who compare them.
#pragma once

#include "ops/kronecker/problem.h"

namespace fretwork::kronecker::ieee {

/// A thread of the strided kernel has kDeltasOfThread neighbouring δ and 8 × kDeltaColumns sums of each.
inline constexpr int kDeltasOfThread = 1, kDeltaColumns = 16;

/// False when the problem is not for here. `warps`: of a CTA of the strided kernel, 4 or 8.
bool run(const Problem& problem, Context& context, int warps = 4);
/// Leaves the gradient of the bias to the caller.
bool run(const WeightProblem& problem, Context& context);

}  // namespace fretwork::kronecker::ieee
