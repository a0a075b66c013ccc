// Attention on Hopper's TMA and wgmma, for the problems that support it.
#pragma once

#include <memory>
#include <vector>

#include "ops/attention/plan.h"
#include "ops/attention/problem.h"

namespace fretwork::attention_op::hopper {

/// Runs it and returns true, or returns false, having done nothing, where it does not apply: not an sm_90a kernel
/// architecture, not a 16-bit type, depths that are no multiples of 8, both below 33 or one above 256, a bias, softcap,
/// ALiBi or dropout, a scale that is not positive, or operands that the copy engine cannot read (columns next to each
/// other, the other strides multiples of 16 bytes, 16-byte aligned). The device is current.
bool forward(const Problem& problem, Context& context);
bool backward(const BackwardProblem& problem, Context& context);
/// The same for at most 16 queries, where heads that share keys fill a tile with them well enough that it beats
/// decoding by tiles of 16.
bool forward_of_few(const Problem& problem, Context& context);

/// Which kernels make gradients: those for any pattern; those that make all at once, for patterns where every query
/// meets every key or all up to its own, else none (then false); or whichever pays.
enum class Whole { never, always, if_it_pays };

/// The same over given plans of these shapes, one for each of the problem's patterns, which are not looked at. Forward
/// plans may have a half, a quarter or an eighth of the rows where as many heads share keys and have the same plan:
/// they share tiles. Row tiles of more than `longest` steps are cut, or those that would be waited for where it is 0.
TileShape forward_shape(const Problem& problem);
inline constexpr TileShape kBackwardShape{128, 64};
using Plans = std::vector<std::shared_ptr<const Plan>>;
bool forward(const Problem& problem, const Plans& plans, Context& context, int longest = 0);
bool backward(const BackwardProblem& problem, const Plans& plans, const Plans& transposed, Context& context,
              int longest = 0, Whole wanted = Whole::if_it_pays);

}  // namespace fretwork::attention_op::hopper
