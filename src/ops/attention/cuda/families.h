// The families of GPU kernels, as choose.cpp sees them: whether one fits a problem, what it would cost, its launch.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "ops/attention/cuda/params.h"
#include "ops/attention/plan.h"
#include "ops/attention/problem.h"
#include "runtime/cost.h"

namespace fretwork::attention_op {

using Plans = std::vector<std::shared_ptr<const Plan>>;  ///< one for all heads, or one for each

// Costs are runtime/cost.h's, with constants fitted to an H200 (docs/lab/attention.md): decoding 1, 2, 4 and 8 tiles of
// queries against 32,768 keys (55, 73, 120, 217 µs) and 8 against 4096 (38), and the Hopper kernel with several heads
// in a tile on the same (55 and 22 µs). They are within 12 % of these, and of full and causal attention of 16,384
// tokens in both directions.

/// µs of operands and results, which come from memory once, and of what is read again through L2; `busy` is the share
/// of the SMs that copy. The two add up: a key is in L2 only when memory has delivered it.
inline double copies_us(double bytes, double again, double busy = 1) {
  constexpr double kMemory = 3.2e6;  // bytes per µs: rows that a plan gathers come slower than cost::kMemory
  constexpr double kAlone = 4;       // an SM alone copies so many times its share, 64 bytes a clock
  return (bytes / kMemory + again / cost::kL2) / std::min(1.0, kAlone * busy);
}

/// What all heads walk: row tiles of 128 rows, and the keys that they meet. A row tile costs a few steps beside its
/// keys (schedule.h).
struct Amount {
  double tiles = 0, keys = 0;
  double longest = 0;  ///< keys of a row tile, the mean of the component where it is largest
  std::size_t components = 1;
};
Amount amount_of(const Problem& problem, const Plans& plans);
/// Without a plan: a row tile for each 128 queries of a head, with the keys of a query. Right for few queries.
Amount amount_of(const Problem& problem);

}  // namespace fretwork::attention_op

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

/// At most 16 queries, one pattern, a 16-bit type, head dims up to 256, operands whose rows can be read 16 bytes at a
/// time.
bool fits(const Problem& problem);
cost::Work cost(const Problem& problem, const Context& context);
/// The device is current. `segments` are what the keys are cut into, or 0 for as many as keep the device busy.
void launch(const Problem& problem, Context& context, int segments = 0);

}  // namespace fretwork::attention_op::decode

// ------------------------------------------------------------ Hopper: TMA and wgmma, for problems that support it

namespace fretwork::attention_op::hopper {

/// What both directions need: an sm_90a kernel architecture, a 16-bit type, head dims that are multiples of 8, the
/// larger one at most 256, a positive scale, and operands that the copy engine can read (columns next to
/// each other, the other strides multiples of 16 bytes, 16-byte aligned). With a bias, softcap, ALiBi or dropout: head
/// dims up to 128, fewer than 2^22 queries and keys, rows of the bias shorter than 2 GiB, a softcap of 2^-10 to 2^10.
bool fits(const Problem& problem, const Context& context);
/// Also of the gradients.
bool fits(const BackwardProblem& problem, const Context& context);

// Launches are over given plans of these shapes, one for each of the problem's patterns, which are not looked at. They
// return false, having done nothing, where 32 bits or a tensor map have no room for the problem. The device is current.
// Row tiles of more than `longest` steps are split, or those that would be waited for where it is 0.

/// Heads that may share a tile, because they share keys and have few queries each: 1, 2, 4 or 8.
int heads_in_tile(const Problem& problem);
/// Forward plans may have a half, a quarter or an eighth of the rows: then as many heads share a tile.
TileShape forward_shape(const Problem& problem);
Plans forward_plans(const Problem& problem);
/// The plan by which heads share tiles; null where it takes no fewer steps than one head in each tile.
std::shared_ptr<const Plan> packed_plan(const Problem& problem);
cost::Work cost(const Problem& problem, const Amount& amount, const Context& context);
bool launch(const Problem& problem, const Plans& plans, Context& context, int longest = 0);

/// Plans of the patterns, and of the transposed patterns, whose rows are keys.
struct BackwardPlans {
  Plans rows, transposed;
};
inline constexpr TileShape kBackwardShape{128, 64};
BackwardPlans backward_plans(const BackwardProblem& problem);
/// Any pattern, seven products; eight where a head dim is above 128.
bool fits(const BackwardProblem& problem, const BackwardPlans& plans, const Context& context);
cost::Work cost(const BackwardProblem& problem, const BackwardPlans& plans, const Context& context);
bool launch(const BackwardProblem& problem, const BackwardPlans& plans, Context& context, int longest = 0);
/// All gradients at once with five products, where every query meets every key or all up to its own; of problems as
/// long as those it was measured on. Launching does not ask for the latter.
bool fits_five_product(const BackwardProblem& problem, const BackwardPlans& plans, const Context& context);
cost::Work cost_five_product(const BackwardProblem& problem, const BackwardPlans& plans, const Context& context);
bool launch_five_product(const BackwardProblem& problem, const BackwardPlans& plans, Context& context);

}  // namespace fretwork::attention_op::hopper

// ---------------- portable: any GPU from sm_75 on, mma.sync for 16-bit types, FFMA or tf32 for fp32, every option

namespace fretwork::attention_op::portable {

/// How scores are made of products, as kernels read it.
ScoreArg score_arg(const Problem& problem);

/// Fits every problem; head dims above 512 throw. Backward: the amount of a transposed plan, whose rows are keys.
cost::Work cost(const Problem& problem, const Amount& amount, const Context& context);
cost::Work cost(const BackwardProblem& problem, const Amount& amount, const Context& context);
/// The device is current, and all batch elements have the same patterns.
void launch(const Problem& problem, Context& context);
void launch(const BackwardProblem& problem, Context& context);

/// (top, sum) of the rows whose log-sum-exp is large, zeros elsewhere: of all (batch, head, query), in plain order. The
/// forward again, of the tiles that have such rows.
void find_large_sums(const Problem& problem, RowSum* sums, Context& context);
/// The gradient of the bias alone; batch elements may have patterns of their own.
void bias_gradient(const BackwardProblem& problem, Context& context);
/// What rows add to the gradient of their sinks, alone.
void sink_terms(const BackwardProblem& problem, Context& context);
/// All gradients but those of sinks, where there is no score.
void fill_zeros(const BackwardProblem& problem, Context& context);

}  // namespace fretwork::attention_op::portable
