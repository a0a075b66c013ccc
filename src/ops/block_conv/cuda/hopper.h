// The convolution on Hopper.
#pragma once

#include "ops/block_conv/problem.h"

namespace fretwork::block_conv::hopper {

/// Runs the problem if the Hopper kernels suit it; false if the caller must run the generic ones.
bool run(const Problem& problem, Context& context);

}  // namespace fretwork::block_conv::hopper
