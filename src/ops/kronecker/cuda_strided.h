// The two ways of multiplying neighbouring δ, for those who compare them.
#pragma once

#include "ops/kronecker/cuda.h"

namespace fretwork::kronecker::strided {

/// CTAs on their own (sm_80 and later), clusters of them (sm_90a, 16-bit types), or the one that should be faster.
enum class Way { best, alone, clusters };

/// False when the problem, or this way of it, is not for here.
bool run(const Problem& problem, Context& context, Way way);
bool run(const WeightProblem& problem, Context& context, Way way);

}  // namespace fretwork::kronecker::strided
