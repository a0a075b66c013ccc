// The convolution on the Hopper kernels of blocks.
#pragma once

#include "ops/block_conv/problem.h"

namespace fretwork::block_conv::hopper {

/// Runs the problem if these kernels can; false leaves it to the generic ones.
bool run(const Problem& problem, Context& context);

}  // namespace fretwork::block_conv::hopper
