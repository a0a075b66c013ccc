// Exact fp32 products, with the shape of their CTAs open to those who compare them.
#pragma once

#include "ops/kronecker/problem.h"

namespace fretwork::kronecker::ieee {

/// CTAs of the strided kernel: 4 or 8 warps, 1 or 2 neighbouring δ to a thread.
struct Shape {
  int warps = 4, deltas = 2;
};

/// False when the problem is not for here.
bool run(const Problem& problem, Context& context, const Shape& shape = {});
/// Leaves the gradient of the bias to the caller.
bool run(const WeightProblem& problem, Context& context);

}  // namespace fretwork::kronecker::ieee
