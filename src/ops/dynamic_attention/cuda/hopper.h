// Dynamic attention on Hopper: attention's kernels on walks that the device wrote, for blocks of 64 and 128 and
// documents (hopper.cpp), and a kernel of its own for selected key blocks (selected.cpp).
#pragma once

#include "ops/attention/cuda/operands.h"
#include "ops/dynamic_attention/cuda/walks.h"

namespace fretwork::dynamic_attention_op::hopper {

/// Both return false, having done nothing, where the kernels do not suit the problem. The device is current.
bool forward(const Problem& problem, Context& context);
bool backward(const BackwardProblem& problem, Context& context);

/// Whether the kernels suit a selection: what attention's Hopper kernels need, head dims up to 128, up to 128 query
/// heads for a key head, no options, and keys and values that the copy engine finds (no stride of 0 between heads).
bool fits_selected(const Problem& problem, const Context& context);

void selected_forward(const Problem& problem, Context& context);
/// `q` and `d_o` as kernels read them, `stats` of all rows.
void selected_query_gradient(const attention_op::BackwardProblem& problem, const Keys& keys, const BlockBits& bits,
                             const attention_op::InputArg& q, const attention_op::InputArg& d_o,
                             const attention_op::RowStats* stats, Context& context);

}  // namespace fretwork::dynamic_attention_op::hopper
