// Attention on a GPU: which kernels run a problem. The only place where that is chosen: each family that fits is a
// candidate with its cost in µs (runtime/cost.h), and the cheapest one runs.
#include "runtime/choose.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "fretwork/error.h"
#include "ops/attention/cuda/families.h"
#include "ops/attention/cuda/operands.h"
#include "ops/attention/problem.h"
#include "runtime/cost.h"
#include "runtime/cuda_driver.h"

namespace fretwork::attention_op {
namespace {

void check(const Problem& p) {
  if (p.dtype == DType::f64) {
    throw Error("attention", "q", "float32, float16 or bfloat16 on a GPU", name_of(p.dtype));
  }
  if (p.bias.data != nullptr && p.bias.dtype == DType::f64) {
    throw Error("attention", "bias", "float32, float16 or bfloat16 on a GPU", name_of(p.bias.dtype));
  }
  constexpr std::int64_t kMost = std::numeric_limits<int>::max();
  if (p.rows > kMost || p.cols > kMost || p.batch * p.heads > kMost) {
    throw Error("attention", "q", "sizes below 2^31", std::to_string(std::max({p.rows, p.cols, p.batch * p.heads})));
  }
}

/// The batch elements [first, first + count) of something with a stride for them.
template <typename T>
T from_batch(T x, std::int64_t first, DType dtype) {
  if (x.data != nullptr) {
    x.data = static_cast<char*>(x.data) + first * x.batch * static_cast<std::int64_t>(size_of(dtype));
  }
  return x;
}
Problem part_of(Problem p, const PatternRange& range) {
  const std::int64_t first = range.first;
  p.patterns.assign(range.things.begin(), range.things.end());
  p.batch = range.count;
  p.first_batch += first;
  for (Operand* const x : {&p.q, &p.k, &p.v, &p.o}) {
    *x = from_batch(*x, first, p.dtype);
  }
  p.lse = from_batch(p.lse, first, DType::f32);
  p.bias = from_batch(p.bias, first, p.bias.dtype);
  p.padding.data = p.padding.data != nullptr ? p.padding.data + first * p.padding.batch : nullptr;
  return p;
}
/// Without the bias's gradient, which may be a sum over all elements.
BackwardProblem part_of(const BackwardProblem& b, const PatternRange& range) {
  BackwardProblem part = b;
  part.forward = part_of(b.forward, range);
  for (Operand* const x : {&part.d_o, &part.d_q, &part.d_k, &part.d_v}) {
    *x = from_batch(*x, range.first, b.forward.dtype);
  }
  part.d_lse = from_batch(part.d_lse, range.first, DType::f32);
  part.sink_terms = from_batch(part.sink_terms, range.first, DType::f32);
  part.d_bias = {};
  return part;
}

enum class Family { hopper_heads_in_tile, decode, hopper, hopper_five_product, portable };

/// A family, with the plans that its cost was found with, if any.
struct Config {
  Family family = Family::portable;
  Plans plans{};
  hopper::BackwardPlans backward_plans{};
};

using Candidates = std::vector<Candidate<Config>>;

Candidates candidates_for(const Problem& p, const Context& context) {
  // With fewer rows in a tile decode takes as long (docs/lab/attention.md). With as many, Hopper is ahead from 4096
  // keys on. With fewer keys the model has decode ahead, but that was not measured: decode does not run there either.
  constexpr std::int64_t kRowsInTile = 32;
  Candidates list;
  list.reserve(4);
  const auto add = [&](Config config, const cost::Work& work) {
    list.push_back({std::move(config), work.microseconds()});
  };
  const bool hopper_fits = hopper::fits(p, context);
  const bool options = p.softcap > 0 || p.bias.data != nullptr || p.slopes.data != nullptr || p.dropout.rate > 0;
  const bool decodes = options && decode::fits(p);  // what options cost beside reading keys was not measured
  if (hopper_fits && !decodes && hopper::heads_in_tile(p) * p.rows >= kRowsInTile) {
    if (const auto plan = hopper::packed_plan(p)) {
      add({Family::hopper_heads_in_tile, {plan}}, hopper::cost(p, amount_of(p, {plan}), context));
    }
  }
  const bool few = decode::fits(p) && list.empty();
  if (few) {
    add({Family::decode}, decode::cost(p, context));
  }
  const Plans plans = hopper_fits && !few ? hopper::forward_plans(p) : Plans{};
  const Amount amount = plans.empty() ? amount_of(p) : amount_of(p, plans);
  if (hopper_fits) {
    add({Family::hopper, plans}, hopper::cost(p, amount, context));
  }
  add({Family::portable}, portable::cost(p, amount, context));
  return list;
}

Candidates candidates_for(const BackwardProblem& b, const Context& context) {
  Candidates list;
  list.reserve(4);
  const auto add = [&](Config config, const cost::Work& work) {
    list.push_back({std::move(config), work.microseconds()});
  };
  Amount amount = amount_of(b.forward);
  if (hopper::fits(b, context)) {
    const hopper::BackwardPlans plans = hopper::backward_plans(b);
    if (hopper::fits(b, plans, context)) {
      amount = amount_of(b.forward, plans.transposed);
      if (hopper::fits_five_product(b, plans, context)) {
        add({Family::hopper_five_product, {}, plans}, hopper::cost_five_product(b, plans, context));
      }
      add({Family::hopper, {}, plans}, hopper::cost(b, plans, context));
    }
  }
  add({Family::portable}, portable::cost(b, amount, context));
  return list;
}

/// False where 32 bits or a tensor map have no room for the problem. The portable kernels always run.
bool run(const Config& config, const Problem& p, Context& context) {
  if (config.family == Family::hopper_heads_in_tile || config.family == Family::hopper) {
    return hopper::launch(p, config.plans.empty() ? hopper::forward_plans(p) : config.plans, context);
  }
  config.family == Family::decode ? decode::launch(p, context) : portable::launch(p, context);
  return true;
}
bool run(const Config& config, const BackwardProblem& b, Context& context) {
  if (config.family == Family::portable) {
    portable::launch(b, context);
    return true;
  }
  return config.family == Family::hopper_five_product ? hopper::launch_five_product(b, config.backward_plans, context)
                                                      : hopper::launch(b, config.backward_plans, context);
}

std::string text_of(const Config& config) {
  switch (config.family) {
    case Family::hopper_heads_in_tile:
      return "hopper, several heads in a tile";
    case Family::decode:
      return "decode";
    case Family::hopper:
      return "hopper";
    case Family::hopper_five_product:
      return "hopper, five products";
    case Family::portable:
      break;
  }
  return "portable";
}

std::string text_of(const Problem& p, const char* op = "attention") {
  const auto number = [](std::int64_t n) { return std::to_string(n); };
  double scores = 0;
  for (const auto& pattern : p.patterns) {
    scores += pattern->density() / static_cast<double>(p.patterns.size());
  }
  char percent[32];
  std::snprintf(percent, sizeof(percent), "%.3g", 100 * scores);
  return std::string(op) + ", batch " + number(p.batch) + ", " + number(p.heads) + " heads (" + number(p.kv_heads) +
         " of keys), " + number(p.rows) + " queries × " + number(p.cols) + " keys, " + percent +
         "% of scores, head dim " + number(p.depth) +
         (p.value_depth != p.depth ? " (values " + number(p.value_depth) + ")" : "") + ", " + name_of(p.dtype);
}
std::string text_of(const BackwardProblem& b) { return text_of(b.forward, "attention_backward"); }

bool writes_over_operands(const Problem& p) {
  return writes_over({p.o.data, p.lse.data}, {p.q.data, p.k.data, p.v.data, p.bias.data});
}
bool writes_over_operands(const BackwardProblem& b) {
  const Problem& p = b.forward;
  return writes_over({b.d_q.data, b.d_k.data, b.d_v.data, b.d_bias.data},
                     {p.q.data, p.k.data, p.v.data, p.o.data, p.lse.data, p.bias.data, b.d_o.data, b.d_lse.data});
}

/// Runs the cheapest candidate that can run.
template <typename AnyProblem>
void run_cheapest(const AnyProblem& problem, Context& context) {
  Candidates candidates = candidates_for(problem, context);
  const auto run_one = [&](const Config& config) { return run(config, problem, context); };
  if (explains()) [[unlikely]] {
    return explain_cheapest(context, text_of(problem), candidates, run_one, writes_over_operands(problem));
  }
  fretwork::run_cheapest(std::move(candidates), run_one);
}

}  // namespace

Amount amount_of(const Problem& p, const Plans& plans) {
  constexpr double kRows = 128;
  Amount all;
  for (const auto& plan : plans) {
    const auto& shape = plan->shape;
    const double heads =
        static_cast<double>(p.batch * p.heads) / static_cast<double>(plans.size()) * (shape.rows / kRows);
    for (const Component& c : plan->components) {
      const auto tiles = static_cast<double>(c.row_tiles.size()), keys = static_cast<double>(c.pairs * shape.cols);
      all.tiles += heads * tiles;
      all.keys += heads * keys;
      all.longest = std::max(all.longest, tiles > 0 ? keys / tiles : 0.0);
    }
    all.components = std::max(all.components, plan->components.size());
  }
  return all;
}

Amount amount_of(const Problem& p) {
  Amount all;
  for (const auto& pattern : p.patterns) {
    const double heads = static_cast<double>(p.batch * p.heads) / static_cast<double>(p.patterns.size());
    const double tiles = std::ceil(static_cast<double>(p.rows) / 128);
    const double keys = static_cast<double>(pattern->nnz()) / static_cast<double>(p.rows);
    all.tiles += heads * tiles;
    all.keys += heads * tiles * keys;
    all.longest = std::max(all.longest, keys);
  }
  return all;
}

namespace cuda {

void forward(const Problem& problem, Context& context) {
  check(problem);
  if (problem.batch * problem.heads * problem.rows == 0) {
    return;
  }
  const fretwork::cuda::DeviceScope scope(context.device.index);
  if (const auto ranges = ranges_of(problem); ranges.size() > 1) {
    for (const PatternRange& range : ranges) {
      forward(part_of(problem, range), context);
    }
    return;
  }
  run_cheapest(problem, context);
}

namespace {

/// All gradients but those of sinks, for which statistics leave terms.
void other_gradients(const BackwardProblem& problem, Context& context) {
  const Problem& p = problem.forward;
  const bool scores = p.batch * p.heads * p.rows * p.cols > 0;
  const bool others = problem.d_q.data != nullptr || problem.d_k.data != nullptr || problem.d_v.data != nullptr ||
                      problem.d_bias.data != nullptr;
  if (!scores) {
    portable::fill_zeros(problem, context);
  }
  if (!scores || !others) {
    if (problem.sink_terms.data != nullptr) {
      portable::sink_terms(problem, context);
    }
    return;
  }
  if (const auto ranges = ranges_of(p); ranges.size() > 1) {
    for (const PatternRange& range : ranges) {
      other_gradients(part_of(problem, range), context);
    }
    if (problem.d_bias.data != nullptr) {
      portable::bias_gradient(problem, context);
    }
    return;
  }
  run_cheapest(problem, context);
}

}  // namespace

void backward(const BackwardProblem& problem, Context& context) {
  check(problem.forward);
  const fretwork::cuda::DeviceScope scope(context.device.index);
  const Problem& p = problem.forward;
  if (problem.d_sinks.data == nullptr) {
    other_gradients(problem, context);
    return;
  }
  const Workspace terms(context, static_cast<std::size_t>(p.batch * p.heads * p.rows) * sizeof(float));
  BackwardProblem all = problem;
  all.sink_terms = {terms.data(), p.rows, p.batch * p.rows, 1, 0};
  other_gradients(all, context);
  add_up_sinks(all, context);
}

}  // namespace cuda
}  // namespace fretwork::attention_op
