// The products on Hopper's own instructions, for the problems that suit them.
#pragma once

#include "ops/block_matmul/problem.h"

namespace fretwork::block_matmul::hopper {

/// Runs the product and returns true, or returns false, having done nothing, where it does not apply: not an sm_90a
/// kernel architecture, not a 16-bit type, not square blocks of 16, 32, 64 or 128, or operands that the
/// copy engine cannot read (one unit stride, the others multiples of 16 bytes, 16-byte aligned). The device is current.
bool run(const Problem& problem, Context& context);

}  // namespace fretwork::block_matmul::hopper
