// Runs the kernel for few columns and small weights in a given configuration, for tests and benchmarks; run_direct
// chooses one.
#pragma once

#include "ops/two_four/problem.h"

namespace fretwork::two_four::direct {

/// How the warps of a CTA share a product.
struct Form {
  int warps = 8;   ///< 4, 8 or 16, which share the depth
  int blocks = 1;  ///< of the depth that each has in flight: 1 or 2
};

/// False where the kernel does not take the problem, or not in this form.
bool run(const Problem& problem, Context& context, const Form& form);

}  // namespace fretwork::two_four::direct
