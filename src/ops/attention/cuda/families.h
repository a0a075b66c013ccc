// The families of GPU kernels, as choose.cpp sees them.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "ops/attention/cuda/params.h"
#include "ops/attention/plan.h"
#include "ops/attention/problem.h"

// ------------------------------------------------------------------ decode: few queries, split over the keys

namespace fretwork::attention_op::decode {

inline constexpr std::int64_t kMostQueries = 16;

/// The keys that a pattern of few queries uses, in steps of 16 as the kernels read them (cuda/params.h).
struct Steps {
  std::vector<std::int32_t> tokens, masks;
  std::vector<std::uint16_t> bits;
  int count() const { return static_cast<int>(masks.size()); }
};
Steps steps_of(const Plan& plan);

/// Runs it and returns true, or returns false, having done nothing, where it does not apply: more than 16 queries,
/// several patterns, not a 16-bit type, or operands whose rows cannot be read 16 bytes at a time. The device is
/// current. `segments` are what the keys are cut into, or 0 for as many as keep the device busy.
bool forward(const Problem& problem, const ScoreArg& score, Context& context, int segments = 0);

}  // namespace fretwork::attention_op::decode

// ------------------------------------------------------------ Hopper: TMA and wgmma, for problems that support it

namespace fretwork::attention_op::hopper {

/// What both directions need; everything else is a matter of strides and plans.
bool fits(const Problem& problem, const Context& context);
/// Also whether the kernels can read and write the gradients.
bool fits(const BackwardProblem& problem, const Context& context);

/// Runs it and returns true, or returns false, having done nothing, where it does not apply: not an sm_90a kernel
/// architecture, not a 16-bit type, depths that are no multiples of 8, both below 33 or one above 256, a bias, softcap,
/// ALiBi or dropout, a scale that is not positive, or operands that the copy engine cannot read (columns next to each
/// other, the other strides multiples of 16 bytes, 16-byte aligned). The device is current.
bool forward(const Problem& problem, Context& context);
bool backward(const BackwardProblem& problem, Context& context);
/// The same for at most 16 queries, where heads that share keys fill a tile with them well enough that it beats
/// decoding by tiles of 16.
bool forward_of_few(const Problem& problem, Context& context);

/// Which kernels make gradients: those for any pattern; those that make all at once, for patterns where every
/// query meets every key or all up to its own, else none (then false); or whichever pays.
enum class FiveProduct { never, always, if_it_pays };

/// The same over given plans of these shapes, one for each of the problem's patterns, which are not looked at. Forward
/// plans may have a half, a quarter or an eighth of the rows where as many heads share keys and have the same plan:
/// they share tiles. Row tiles of more than `longest` steps are cut, or those that would be waited for where it is 0.
TileShape forward_shape(const Problem& problem);
inline constexpr TileShape kBackwardShape{128, 64};
using Plans = std::vector<std::shared_ptr<const Plan>>;
bool forward(const Problem& problem, const Plans& plans, Context& context, int longest = 0);
bool backward(const BackwardProblem& problem, const Plans& plans, const Plans& transposed, Context& context,
              int longest = 0, FiveProduct wanted = FiveProduct::if_it_pays);

}  // namespace fretwork::attention_op::hopper

// ---------------- portable: any GPU from sm_75 on, mma.sync for 16-bit types, FFMA or tf32 for fp32, every option

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
