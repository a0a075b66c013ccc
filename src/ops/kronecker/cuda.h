// The faster ways a GPU runs a Kronecker product. Each says whether it took the problem; cuda.cpp asks them in turn and
// runs what none takes. A way that takes a gradient gives that of the bias as well.
#pragma once

#include "ops/kronecker/problem.h"

namespace fretwork::kronecker {

/// TMA and wgmma on sm_90a, 16-bit types and tf32: batch last, and batch first with d = 1 or where another way to bring
/// the features of one δ together pays.
namespace hopper {
bool run(const Problem& problem, Context& context);
bool run(const WeightProblem& problem, Context& context);
}  // namespace hopper

/// Tensor cores on sm_80 and later, batch first with d > 1: neighbouring δ stay together from memory to fragments.
namespace strided {
bool run(const Problem& problem, Context& context);
bool run(const WeightProblem& problem, Context& context);
}  // namespace strided

/// Up to 32 batch rows, any strides: one pass over the weights as they lie. Products only.
namespace few {
inline constexpr std::int64_t kMostRows = 32;
/// Whether this is the fastest way, not merely one.
bool pays(const Problem& problem, const Context& context);
bool run(const Problem& problem, Context& context);
}  // namespace few

}  // namespace fretwork::kronecker
