// Attention on the CPU over given plans, so that tests can bring their own.
#pragma once

#include <memory>
#include <span>

#include "ops/attention/plan.h"
#include "ops/attention/problem.h"

namespace fretwork::attention_op::cpu {

/// One for all heads, one for each query head, or one for each (batch element, query head); equal ones are the same
/// object.
using Plans = std::span<const std::shared_ptr<const Plan>>;

void forward(const Problem& problem, Plans plans, Context& context);
/// `transposed` are the plans of the transposed patterns.
void backward(const BackwardProblem& problem, Plans plans, Plans transposed, Context& context);

}  // namespace fretwork::attention_op::cpu
