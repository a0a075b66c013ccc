// Attention's Hopper kernels on walks that the device wrote: blocks of 64 and 128, and documents.
#pragma once

#include "ops/dynamic_attention/problem.h"

namespace fretwork::dynamic_attention_op::hopper {

/// Both return false, having done nothing, where the kernels do not suit the problem. The device is current.
bool forward(const Problem& problem, Context& context);
bool backward(const BackwardProblem& problem, Context& context);

}  // namespace fretwork::dynamic_attention_op::hopper
