// Runs the kernel for up to 64 columns on Hopper in a given configuration, for tests and benchmarks; run_narrow chooses
// one.
#pragma once

#include "ops/two_four/problem.h"

namespace fretwork::two_four::narrow {

/// How CTAs share a product.
struct Form {
  int groups = 2;  ///< warpgroups of a CTA, 1 or 2, with 64 rows each
  int split = 1;   ///< up to 8: clusters of as many CTAs share the depth of a tile
};

/// False where the kernel does not take the problem, or not in this form.
bool run(const Problem& problem, Context& context, const Form& form);

}  // namespace fretwork::two_four::narrow
