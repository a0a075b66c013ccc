// The two ways of multiplying neighbouring δ, for those who compare them.
#pragma once

#include <vector>

#include "ops/kronecker/cuda.h"

namespace fretwork::kronecker::strided {

/// CTAs on their own (sm_80 and later), clusters of them (sm_90a, 16-bit types), or the one that should be faster.
enum class Way { best, alone, clusters };

/// Alone: neighbouring δ, and warps along the batch. Clusters: rows and columns of CTAs. Zeros: what should be fastest.
struct Shape {
  int first = 0, second = 0;
};
/// Those there are of a way.
std::vector<Shape> shapes(Way way, DType dtype, Precision precision);

/// False when the problem, or this way of it, is not for here.
bool run(const Problem& problem, Context& context, Way way, Shape shape = {});
bool run(const WeightProblem& problem, Context& context, Way way);

}  // namespace fretwork::kronecker::strided
