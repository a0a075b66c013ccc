// Attention on the CPU: how the tiles are shaped, and which plans the patterns have for it.
#include "ops/attention/cpu.h"

#include <string>
#include <vector>

#include "ops/attention/cpu_strips.h"
#include "runtime/plan_cache.h"

namespace fretwork::attention_op::cpu {
namespace {

/// Rows of a pair that are not there cost nothing here, nor do columns that no row of a strip meets, so that most
/// patterns do not mind. Small tiles suit residue classes and patches that do not fill a large one.
constexpr TileShape kLarge{64, 64}, kSmall{32, 32};
/// How much less work makes the small ones worth their number.
constexpr double kLess = 0.95;

struct Choice {
  std::shared_ptr<const Plan> plan;
  std::size_t bytes() const { return plan->bytes(); }
};

using Planner = std::shared_ptr<const Plan> (*)(const RegularPattern& pattern, const TileShape& shape);

std::shared_ptr<const Plan> choose(const RegularPattern& pattern, Planner planner) {
  auto large = planner(pattern, kLarge), small = planner(pattern, kSmall);
  return columns_met(*small) < kLess * columns_met(*large) ? small : large;
}

/// The plans, remembered by the patterns' keys.
std::vector<std::shared_ptr<const Plan>> plans_of(const Problem& problem, bool transposed) {
  static PlanCache<Choice>& cache = *std::make_unique<PlanCache<Choice>>().release();
  std::vector<std::shared_ptr<const Plan>> plans;
  for (const auto& pattern : problem.patterns) {
    const auto key = hash128((transposed ? "t " : "x ") + pattern->key());
    const auto choice = cache.get(key, [&] { return Choice{choose(*pattern, transposed ? &transposed_plan : &plan)}; });
    plans.push_back(choice->plan);
  }
  return plans;
}

}  // namespace

void forward(const Problem& problem, Context& context) { forward(problem, plans_of(problem, false), context); }

void backward(const BackwardProblem& problem, Context& context) {
  backward(problem, plans_of(problem.forward, false), plans_of(problem.forward, true), context);
}

}  // namespace fretwork::attention_op::cpu
