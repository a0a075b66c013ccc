// Attention on the CPU: how the tiles are shaped, and which plans the patterns have for it.
#include "ops/attention/cpu.h"

#include <vector>

namespace fretwork::attention_op::cpu {
namespace {

/// Empty rows of a tile pair cost nothing here, nor do columns that no row of a strip meets, so that one shape serves.
constexpr TileShape kShape{64, 64};

using Planner = std::shared_ptr<const Plan> (*)(const RegularPattern& pattern, const TileShape& shape);

std::vector<std::shared_ptr<const Plan>> plans_of(const Problem& problem, Planner planner) {
  std::vector<std::shared_ptr<const Plan>> plans;
  for (const auto& pattern : problem.patterns) {
    plans.push_back(planner(*pattern, kShape));
  }
  return plans;
}

}  // namespace

void forward(const Problem& problem, Context& context) { forward(problem, plans_of(problem, &plan), context); }

void backward(const BackwardProblem& problem, Context& context) {
  backward(problem, plans_of(problem.forward, &plan), plans_of(problem.forward, &transposed_plan), context);
}

}  // namespace fretwork::attention_op::cpu
