// Attention on the CPU: chooses the tile shape and gets the plans of the patterns.
#include <optional>
#include <string>
#include <vector>

#include "ops/attention/cpu/strips.h"
#include "ops/attention/tiling.h"
#include "pattern/parts.h"
#include "runtime/plan_cache.h"

namespace fretwork::attention_op::cpu {
namespace {

/// Rows of a pair that are not there cost nothing here, nor do columns that no row of a strip meets, so that most
/// patterns do not mind. Small tiles suit residue classes and patches that do not fill a large one.
constexpr TileShape kLarge{64, 64}, kSmall{32, 32};
/// How much less work makes the small ones worth their number.
constexpr double kLess = 0.95;
/// How much more work one tile may be that keeps tokens in their order.
constexpr double kOrdered = 3;

struct KnownPlan {
  std::shared_ptr<const Plan> plan;  ///< or none, where it would not pay
  std::size_t bytes() const { return plan ? plan->bytes() : 0; }
};

using Planner = std::shared_ptr<const Plan> (*)(const RegularPattern& pattern, const TileShape& shape);

/// A pattern as its rows' runs of columns, in their own order.
std::shared_ptr<const Plan> flat_plan(const RegularPattern& pattern, const TileShape& shape) {
  std::vector<PartGroup> groups{{parts::flat_view(), {}}};
  for (std::int64_t row = 0; row < pattern.rows(); ++row) {
    for (const auto& [begin, end] : pattern.row(row)) {
      AxisRange box = parts::between(row, row + 1, begin, end);
      parts::tighten(box);
      groups[0].parts.push_back(parts::part({box}));
    }
  }
  return std::make_shared<const Plan>(plan_parts(pattern.rows(), pattern.cols(), groups, shape));
}

std::shared_ptr<const Plan> choose(const RegularPattern& pattern, Planner planner) {
  const auto fits = [&](const TileShape& shape) {
    return planner == &plan && pattern.rows() <= shape.rows && pattern.cols() <= shape.cols;
  };
  if (fits(kSmall)) {  // one tile holds it all: to bring tokens into another order would take longer
    return flat_plan(pattern, kSmall);
  }
  auto large = planner(pattern, kLarge), small = planner(pattern, kSmall);
  auto best = columns_met(*small) < kLess * columns_met(*large) ? small : large;
  if (fits(kLarge) && best->components.size() > 1) {  // each has an order of its own, and merges its rows
    auto flat = flat_plan(pattern, kLarge);
    return columns_met(*flat) < kOrdered * columns_met(*best) ? flat : best;
  }
  return best;
}

/// The plans, remembered by the patterns' keys.
std::vector<std::shared_ptr<const Plan>> plans_of(const Problem& problem, bool transposed) {
  static PlanCache<KnownPlan>& cache = *std::make_unique<PlanCache<KnownPlan>>().release();
  std::vector<std::shared_ptr<const Plan>> plans;
  for (const auto& pattern : problem.patterns) {
    const auto key = hash128((transposed ? "t " : "x ") + pattern->key());
    const auto known =
        cache.get(key, [&] { return KnownPlan{choose(*pattern, transposed ? &transposed_plan : &plan)}; });
    plans.push_back(known->plan);
  }
  return plans;
}

/// Where each head has one query, and all the same pattern, heads that share keys are rows of one tile: a row alone
/// would leave most of a strip of rows empty. No more rows than a strip, so that there is work for many threads.
std::optional<Problem> heads_as_rows(const Problem& problem) {
  const std::int64_t group = problem.heads / problem.kv_heads;
  std::int64_t rows = 8;
  while (group % rows != 0) {
    --rows;
  }
  if (problem.rows != 1 || rows == 1 || problem.patterns.size() != 1 || problem.slopes.data != nullptr ||
      problem.dropout.rate > 0) {
    return std::nullopt;
  }
  Problem turned = problem;
  turned.heads = problem.heads / rows;
  turned.rows = rows;
  const auto turn = [&](auto& operand) {
    operand.row = operand.head;
    operand.head *= rows;
  };
  turn(turned.q);
  turn(turned.o);
  turn(turned.lse);
  turn(turned.bias);
  turn(turned.sinks);
  return turned;
}

/// The plan of a pattern's one row, `times` times. None where its keys do not lie together: those have orders of their
/// own, which that row's plan knows.
std::shared_ptr<const Plan> repeated_plan(const RegularPattern& pattern, std::int64_t times) {
  static PlanCache<KnownPlan>& cache = *std::make_unique<PlanCache<KnownPlan>>().release();
  return cache
      .get(hash128(std::to_string(times) + " " + pattern.key()),
           [&] {
             constexpr std::int64_t kTogether = 16;
             const auto runs = pattern.row(0);
             if (std::ssize(runs) * kTogether > pattern.nnz()) {
               return KnownPlan{};
             }
             std::vector<PartGroup> groups{{parts::flat_view(), {}}};
             for (const auto& [begin, end] : runs) {
               AxisRange box = parts::between(0, times, begin, end);
               parts::tighten(box);
               groups[0].parts.push_back(parts::part({box}));
             }
             return KnownPlan{std::make_shared<const Plan>(plan_parts(times, pattern.cols(), groups, kLarge))};
           })
      ->plan;
}

}  // namespace

void forward(const Problem& problem, Context& context) {
  if (const auto turned = heads_as_rows(problem)) {
    if (const auto plan = repeated_plan(*problem.patterns[0], turned->rows)) {
      forward(*turned, std::span(&plan, 1), context);
      return;
    }
  }
  forward(problem, plans_of(problem, false), context);
}

void backward(const BackwardProblem& problem, Context& context) {
  backward(problem, plans_of(problem.forward, false), plans_of(problem.forward, true), context);
}

}  // namespace fretwork::attention_op::cpu
