// Attention's checks, for ops that are built on it: from here on a problem is right.
#pragma once

#include <optional>
#include <span>

#include "fretwork/ops.h"
#include "ops/attention/problem.h"

namespace fretwork::attention_op {

/// Forward: `op` names the call in errors. Without lse, p.lse is absent.
Problem check_call(const char* op, const ConstTensorView& q, const ConstTensorView& k, const ConstTensorView& v,
                   std::span<const PatternPtr> patterns, const ConstTensorView& out,
                   const std::optional<ConstTensorView>& lse, const Context& context, const AttentionOptions& options);
/// The gradients of a problem with lse.
BackwardProblem check_gradients(const Problem& problem, const ConstTensorView& d_out,
                                const std::optional<ConstTensorView>& d_lse, const AttentionGradients& gradients,
                                const Context& context, const AttentionOptions& options);

}  // namespace fretwork::attention_op
