// The two ways of multiplying neighbouring δ, for those who compare them.
#pragma once

#include <vector>

#include "ops/kronecker/cuda.h"

namespace fretwork::kronecker::strided {

/// CTAs on their own (sm_80 and later), clusters of them (sm_90a, 16-bit types), or the one that should be faster.
enum class Way { best, alone, clusters };

/// Of CTAs on their own: neighbouring δ, and warps along the batch. Zeros for those that should be fastest.
struct Shape {
  int v = 0, wm = 0;
};
/// Those there are.
std::vector<Shape> shapes(DType dtype, Precision precision);

/// False when the problem, or this way of it, is not for here.
bool run(const Problem& problem, Context& context, Way way, Shape shape = {});
bool run(const WeightProblem& problem, Context& context, Way way);

}  // namespace fretwork::kronecker::strided
