// Attention on any GPU from sm_75 on: mma.sync kernels for 16-bit types, FFMA or tf32 for fp32. Every option.
#pragma once

#include "ops/attention/cuda/params.h"
#include "ops/attention/problem.h"

namespace fretwork::attention_op::portable {

/// How scores are made of products, as kernels read it.
ScoreArg score_arg(const Problem& problem);

/// The device is current, and all batch elements have the same patterns.
void forward(const Problem& problem, Context& context);
void backward(const BackwardProblem& problem, Context& context);

/// The gradient of the bias alone; batch elements may have patterns of their own.
void bias_gradient(const BackwardProblem& problem, Context& context);
/// All gradients, where there is no score.
void fill_zeros(const BackwardProblem& problem, Context& context);

}  // namespace fretwork::attention_op::portable
