// Which kernel runs a Kronecker product, or a gradient of its weights, on a GPU: every config that fits has a cost in
// microseconds, and the cheapest is launched.
#include "runtime/choose.h"

#include <array>
#include <string>
#include <vector>

#include "ops/kronecker/config.h"
#include "ops/kronecker/cuda/families.h"
#include "runtime/cost.h"
#include "runtime/cuda_driver.h"

namespace fretwork::kronecker {
namespace {

namespace driver = fretwork::cuda;  // kronecker::cuda hides it

const Functions<Problem>& functions_of(Family family, const Problem& /*problem*/) {
  switch (family) {
    case Family::hopper:
    case Family::regroup:
    case Family::dense:
    case Family::interleaved:
      return hopper::kProduct;
    case Family::strided:
    case Family::cluster:
      return strided::kProduct;
    case Family::ieee:
    case Family::ieee_regroup:
      return ieee::kProduct;
    case Family::direct:
      return direct::kProduct;
    case Family::few:
      return few::kProduct;
    case Family::small:
      return small::kProduct;
    case Family::cublas:
      return cublas::kProduct;
    default:
      return generic::kProduct;
  }
}
const Functions<WeightProblem>& functions_of(Family family, const WeightProblem& /*problem*/) {
  switch (family) {
    case Family::hopper:
    case Family::regroup:
    case Family::dense:
    case Family::interleaved:
      return hopper::kGradient;
    case Family::strided:
    case Family::cluster:
      return strided::kGradient;
    case Family::ieee:
    case Family::ieee_regroup:
      return ieee::kGradient;
    default:
      return generic::kGradient;
  }
}

/// Every config that there is a kernel for. `cluster` is among those of `strided`.
std::vector<Config> all_configs(const Problem& problem, const Machine& machine) {
  std::vector<Config> list{{Family::direct}, {Family::few}, {Family::cublas}, {Family::ieee}, {Family::ieee_regroup}};
  for (const Family family : {Family::hopper, Family::dense, Family::interleaved, Family::regroup}) {
    for (const int width : hopper::widths()) {
      list.push_back({family, width});
    }
  }
  const std::vector<Config> strided = strided::configs(problem.dtype, machine.precision);
  list.insert(list.end(), strided.begin(), strided.end());
  const std::vector<Config> small = small::configs();
  list.insert(list.end(), small.begin(), small.end());
  list.insert(list.end(), {{Family::portable}, {Family::simple}});
  return list;
}
std::vector<Config> all_configs(const WeightProblem& /*problem*/, const Machine& /*machine*/) {
  return {{Family::hopper},  {Family::dense},   {Family::interleaved}, {Family::regroup},
          {Family::cluster}, {Family::strided}, {Family::ieee},        {Family::portable}};
}

/// Those that fit, with their costs.
template <typename Any>
std::vector<Candidate<Config>> candidates_of(const Any& problem, const Machine& machine) {
  std::vector<Candidate<Config>> list;
  for (const Config& config : all_configs(problem, machine)) {
    const Functions<Any>& family = functions_of(config.family, problem);
    if (family.fits(problem, config, machine)) {
      list.push_back({config, cost::kLaunch + family.cost(problem, config, machine)});
    }
  }
  return list;
}

/// The key of a choice: everything that fits() and cost() look at. Pointers count by their place in 16 bytes.
using Numbers = std::array<std::int64_t, 18>;
Numbers numbers_of(const Sizes& s, std::int64_t batch, const Matrix& x, const Matrix& y, const Weights& w,
                   const Vector& bias, Activation activation, bool last, std::int64_t settings) {
  const std::int64_t pointers = address_bits({x.data, y.data, w.data, bias.data});
  const std::int64_t end = std::int64_t{bias.data != nullptr} | static_cast<std::int64_t>(activation) << 1;
  return {s.a, s.b, s.c, s.d, batch,       x.batch, x.feature, y.batch,  y.feature,
          w.a, w.b, w.c, w.d, bias.stride, end,     last,      pointers, settings};
}
Numbers numbers_of(const Problem& p, const Context& context) {
  return numbers_of(p.sizes, p.batch, p.x, p.y, p.w, p.bias, p.activation, p.last, settings_of(p.dtype, context));
}
Numbers numbers_of(const WeightProblem& p, const Context& context) {
  return numbers_of(p.sizes, p.batch, p.x, p.d_y, {}, {}, Activation::none, false, settings_of(p.dtype, context));
}

template <typename Any>
const Config& chosen_lately(const Any& problem, const Context& context) {
  thread_local Lately<std::tuple_size_v<Numbers>, Config> lately;
  return lately.get(numbers_of(problem, context), [&] {
    const auto list = candidates_of(problem, machine_of(context));
    return cheapest<Config>(list).config;
  });
}

std::string name_of(const Problem& p) { return p.last ? "ksmm, batch last" : "ksmm, batch first"; }
std::string name_of(const WeightProblem& /*problem*/) { return "ksmm_backward_weight"; }

template <typename Any>
void explain_launch(const Any& problem, const Config& config, Context& context) {
  const auto& [a, b, c, d] = problem.sizes;
  std::vector<Explained> list;
  for (const auto& [one, microseconds] : candidates_of(problem, machine_of(context))) {
    list.push_back({text_of(one), microseconds});
  }
  std::string text = name_of(problem) + ", (";
  for (const std::int64_t n : {a, b, c, d}) {
    text += std::to_string(n) + ",";
  }
  text.back() = ')';
  text += std::string(" ") + fretwork::name_of(problem.dtype) + ", " + std::to_string(problem.batch) + " rows";
  explain(context, text, std::move(list), text_of(config),
          [&] { functions_of(config.family, problem).launch(problem, config, context); });
}

template <typename Any>
void launch(const Any& problem, const Config& config, Context& context) {
  if (explains()) [[unlikely]] {
    return explain_launch(problem, config, context);
  }
  functions_of(config.family, problem).launch(problem, config, context);
}

template <typename Any>
void run_cheapest_kernel(const Any& problem, Context& context) {
  const driver::DeviceScope scope(context.device.index);
  launch(problem, chosen_lately(problem, context), context);
}

template <typename Any>
bool run_config(const Any& problem, Context& context, const Config& config) {
  const driver::DeviceScope scope(context.device.index);
  if (!functions_of(config.family, problem).fits(problem, config, machine_of(context))) {
    return false;
  }
  launch(problem, config, context);
  return true;
}

}  // namespace

void cuda::run(const Problem& problem, Context& context) { run_cheapest_kernel(problem, context); }
void cuda::run(const WeightProblem& problem, Context& context) { run_cheapest_kernel(problem, context); }

bool cuda::run(const Problem& problem, Context& context, const Config& config) {
  return run_config(problem, context, config);
}
bool cuda::run(const WeightProblem& problem, Context& context, const Config& config) {
  return run_config(problem, context, config);
}

std::vector<Candidate<Config>> cuda::candidates(const Problem& problem, const Machine& machine) {
  return candidates_of(problem, machine);
}
std::vector<Candidate<Config>> cuda::candidates(const WeightProblem& problem, const Machine& machine) {
  return candidates_of(problem, machine);
}

}  // namespace fretwork::kronecker
