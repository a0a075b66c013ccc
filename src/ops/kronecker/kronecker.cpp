// Kronecker products and chains of them: argument checks, the problem that backends receive, the choice of backend, and
// the plan of a chain in words.
#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "fretwork/error.h"
#include "ops/kronecker/config.h"
#include "ops/kronecker/cuda/families.h"
#include "ops/kronecker/problem.h"
#include "pattern/checks.h"
#include "runtime/cost.h"
#include "runtime/cuda_driver.h"
#include "runtime/kernels.h"

namespace fretwork {
namespace kronecker {
namespace {

/// An argument and its name in error messages.
struct Argument {
  const char* name;
  const ConstTensorView& view;
};

void check_like(const char* op, const Argument& given, const Argument& like) {
  if (given.view.dtype != like.view.dtype) {
    throw Error(op, given.name, std::string(name_of(like.view.dtype)) + " like " + like.name,
                name_of(given.view.dtype));
  }
}

/// Arguments have data, on the context's device.
void check_given(const char* op, std::initializer_list<Argument> given, const Context& context) {
  for (const auto& [name, view] : given) {
    check_device(op, name, view, context);
  }
}

void check_bias_given(const char* op, const KsmmOptions& options, const Context& context) {
  if (options.bias.has_value()) {
    check_device(op, "bias", *options.bias, context);
  }
}

void check_shape(const char* op, const Argument& a, std::initializer_list<std::int64_t> shape) {
  if (!std::equal(shape.begin(), shape.end(), a.view.shape().begin(), a.view.shape().end())) {
    throw Error(op, a.name, shape_text({shape.begin(), shape.size()}), shape_text(a.view.shape()));
  }
}

/// Strides of size-1 dimensions are arbitrary: features get stride 1, the batch a multiple of 64.
Matrix matrix(const ConstTensorView& v) {
  const std::int64_t feature = v.size(1) == 1 ? 1 : v.stride(1);
  const std::int64_t round = (v.size(1) * std::abs(feature) + 63) / 64 * 64;
  return {operand_data(v), v.size(0) == 1 ? round : v.stride(0), feature};
}

Weights weights(const ConstTensorView& w) {
  return {operand_data(w), w.stride(0), w.stride(1), w.stride(2), w.stride(3)};
}

Problem check(const char* op, const Argument& x, const Argument& w, const ConstTensorView& out,
              const KsmmOptions& options) {
  check_floating(op, x.name, x.view);
  check_like(op, w, x);
  const Sizes s = check_weights(op, w.name, w.view);
  if (x.view.rank != 2 || x.view.size(1) != s.a * s.c * s.d) {
    throw Error(op, x.name, "(batch, a·c·d = " + std::to_string(s.a * s.c * s.d) + ")", shape_text(x.view.shape()));
  }
  const std::int64_t features = s.a * s.b * s.d;
  check_shape(op, {"out", out}, {x.view.size(0), features});
  check_like(op, {"out", out}, x);
  Problem problem{s,           x.view.size(0),  x.view.dtype, matrix(x.view),
                  matrix(out), weights(w.view), {},           options.activation};
  problem.last = x.view.size(1) > 1 && x.view.strides[0] == 1;
  if (options.bias.has_value()) {
    check_shape(op, {"bias", *options.bias}, {features});
    check_like(op, {"bias", *options.bias}, x);
    problem.bias = {operand_data(*options.bias), options.bias->stride(0)};
  }
  return problem;
}

/// The config that a tuned table names. Where there is none, or it does not fit these strides, the backend chooses.
void run(const Problem& problem, Context& context) {
  if (problem.batch > 0 && !run(problem, context, chosen(problem, context).choice)) {
    run(problem, context, Config{});
  }
}

}  // namespace

Sizes check_weights(const char* op, const char* argument, const ConstTensorView& w) {
  if (w.rank != 4 || std::ranges::any_of(w.shape(), [](std::int64_t n) { return n < 1; })) {
    throw Error(op, argument, "(a, b, c, d), each at least 1", shape_text(w.shape()));
  }
  const Sizes s{w.size(0), w.size(1), w.size(2), w.size(3)};
  KroneckerPattern::make(s);  // refuses more elements than 64 bits count
  return s;
}

Problem make_problem(const ConstTensorView& x, const ConstTensorView& w, const ConstTensorView& out,
                     const KsmmOptions& options) {
  return check("ksmm", {"x", x}, {"w", w}, out, options);
}

}  // namespace kronecker

using namespace kronecker;

void ksmm(const ConstTensorView& x, const ConstTensorView& w, const TensorView& out, Context& context,
          const KsmmOptions& options) {
  const Problem problem = make_problem(x, w, out, options);
  check_given("ksmm", {{"x", x}, {"w", w}, {"out", out}}, context);
  check_bias_given("ksmm", options, context);
  run(problem, context);
}

void ksmm_backward_weight(const ConstTensorView& x, const ConstTensorView& d_out, const TensorView& d_w,
                          const std::optional<TensorView>& d_bias, Context& context) {
  constexpr const char* kOp = "ksmm_backward_weight";
  check_floating(kOp, "x", x);
  check_like(kOp, {"d_out", d_out}, {"x", x});
  check_like(kOp, {"d_w", d_w}, {"x", x});
  const Sizes s = check_weights(kOp, "d_w", d_w);
  check_shape(kOp, {"x", x}, {x.size(0), s.a * s.c * s.d});
  check_shape(kOp, {"d_out", d_out}, {x.size(0), s.a * s.b * s.d});
  check_given(kOp, {{"x", x}, {"d_out", d_out}, {"d_w", d_w}}, context);
  WeightProblem problem{s, x.size(0), x.dtype, matrix(x), matrix(d_out), weights(d_w), {}};
  if (d_bias.has_value()) {
    check_given(kOp, {{"d_bias", *d_bias}}, context);
    check_shape(kOp, {"d_bias", *d_bias}, {s.a * s.b * s.d});
    check_like(kOp, {"d_bias", *d_bias}, {"x", x});
    problem.d_bias = {d_bias->data, d_bias->stride(0)};
  }
  context.device.type == DeviceType::cuda ? kronecker::cuda::run(problem, context) : cpu::run(problem, context);
}

namespace {

/// One problem for each factor. What lies between two of them has no memory yet.
std::vector<Problem> check_chain(const ConstTensorView& x, std::span<const ConstTensorView> weights,
                                 const ConstTensorView& out, const KsmmOptions& options, const Context& context) {
  constexpr const char* kOp = "ksmm_chain";
  if (weights.empty()) {
    throw Error(kOp, "weights", "at least one", "none");
  }
  // Features stand before the batch in memory exactly when they do in x.
  const bool last = x.stride(0) == 1 && x.stride(1) != 1;
  std::vector<Problem> problems;
  ConstTensorView from = x;
  for (std::size_t n = 0; n < weights.size(); ++n) {
    const std::string name = "weights[" + std::to_string(n) + "]";
    check_like(kOp, {name.c_str(), weights[n]}, {"x", x});
    const Sizes s = check_weights(kOp, name.c_str(), weights[n]);
    if (n > 0 && s.a * s.c * s.d != from.size(-1)) {  // of the first, x is to blame
      throw Error(kOp, name, std::to_string(from.size(-1)) + " in features (a·c·d), as come before it",
                  std::to_string(s.a * s.c * s.d) + " of " + shape_text(weights[n].shape()));
    }
    const std::int64_t sizes[] = {x.size(0), s.a * s.b * s.d}, strides[] = {last ? 1 : sizes[1], last ? sizes[0] : 1};
    const bool end = n + 1 == weights.size();
    const ConstTensorView to = end ? out : ConstTensorView(nullptr, x.dtype, sizes, strides, x.device);
    problems.push_back(check(kOp, {"x", from}, {name.c_str(), weights[n]}, to, end ? options : KsmmOptions{}));
    check_given(kOp, {{name.c_str(), weights[n]}}, context);
    from = to;
  }
  check_given(kOp, {{"x", x}, {"out", out}}, context);
  check_bias_given(kOp, options, context);
  return problems;
}

/// Steps of a chain, each up to which factor: one by itself, or on a GPU two that fit one kernel. With a few rows every
/// factor reads its weights once, as they lie, where the fused kernel packs them first.
std::vector<std::size_t> steps(std::span<const Problem> factors, const std::optional<Machine>& machine) {
  std::vector<std::size_t> ends;
  for (std::size_t n = 0; n < factors.size(); n = ends.back()) {
    const bool two = machine && n + 1 < factors.size() && factors[n].batch > kFewRows &&
                     chain::fits(factors[n], factors[n + 1], *machine);
    ends.push_back(n + (two ? 2 : 1));
  }
  return ends;
}

}  // namespace

void ksmm_chain(const ConstTensorView& x, std::span<const ConstTensorView> weights, const TensorView& out,
                Context& context, const KsmmOptions& options) {
  std::vector<Problem> problems = check_chain(x, weights, out, options, context);
  if (x.size(0) == 0) {
    return;
  }
  const bool on_cuda = context.device.type == DeviceType::cuda && problems.size() > 1;
  const std::vector<std::size_t> ends = steps(problems, on_cuda ? std::optional(machine_of(context)) : std::nullopt);
  std::int64_t widest = 0;  // two buffers of so many features take turns between steps
  for (std::size_t n = 0; n + 1 < ends.size(); ++n) {
    const Sizes& s = problems[ends[n] - 1].sizes;
    widest = std::max(widest, s.a * s.b * s.d);
  }
  const std::size_t bytes = static_cast<std::size_t>(x.size(0) * widest) * size_of(x.dtype);
  const Workspace one(context, bytes), two(context, ends.size() > 2 ? bytes : 0);
  for (std::size_t n = 0, begin = 0; n < ends.size(); begin = ends[n++]) {
    if (n + 1 < ends.size()) {
      problems[ends[n] - 1].y.data = problems[ends[n]].x.data = (n % 2 == 0 ? one : two).data();
    }
    if (ends[n] - begin == 2) {
      chain::launch(problems[begin], problems[begin + 1], context);
    } else {
      run(problems[begin], context);
    }
  }
}

namespace kronecker {
namespace {

/// The number from `from` on, which a letter may follow; −1 where there is none.
int number_at(const std::string& text, std::size_t from) {
  int number = -1;
  const char* const end = text.data() + text.size();
  const auto [rest, error] = std::from_chars(text.data() + std::min(from, text.size()), end, number);
  const bool whole = rest == end || (rest + 1 == end && *rest >= 'a' && *rest <= 'z');
  return error == std::errc() && whole ? number : -1;
}

/// "cuda:1" as the architecture that this GPU's kernels are chosen by.
std::string named_arch(const char* op, const std::string& arch) {
  if (arch.starts_with("cuda:") && number_at(arch, 5) >= 0) {
    return fretwork::cuda::kernel_arch(number_at(arch, 5));
  }
  if (arch.starts_with("sm_") && number_at(arch, 3) >= 0 && number_at(arch, 3) < kLeastArch) {
    throw Error(op, "arch", "sm_75 or later, as NVRTC 13 compiles for no older GPU", arch);
  }
  if (arch != "cpu" && !(arch.starts_with("sm_") && number_at(arch, 3) >= 0)) {
    throw Error(op, "arch", "cpu, a GPU such as cuda:0, or an architecture such as sm_90a", arch);
  }
  return arch;
}

/// A factor with contiguous operands, as aligned as they can be.
Problem contiguous(const Sizes& s, std::int64_t batch, DType dtype, bool last) {
  alignas(256) static std::byte nothing[1];  // is only looked at for its alignment
  Problem problem;
  problem.sizes = s;
  problem.batch = batch;
  problem.dtype = dtype;
  problem.last = last;
  problem.x = {nothing, last ? 1 : s.a * s.c * s.d, last ? batch : 1};
  problem.y = {nothing, last ? 1 : s.a * s.b * s.d, last ? batch : 1};
  problem.w = {nothing, s.b * s.c * s.d, s.c * s.d, s.d, 1};
  return problem;
}

/// The kernel that one factor runs on, by its name in configs.
std::string kernel_of(const Problem& problem, const std::optional<Machine>& machine) {
  if (!machine) {
    return "cpu";
  }
  if (problem.dtype == DType::f32) {
    return "fp32";  // by the precision: on FFMA, or on the tensor cores
  }
  const auto candidates = cuda::candidates(problem, *machine);
  return std::string(columns_of(cheapest<Config>(candidates).config).kernel);
}

/// Factors of a chain with contiguous operands.
std::vector<Problem> contiguous(std::span<const KroneckerPtr> patterns, std::int64_t batch, DType dtype, bool last) {
  std::vector<Problem> factors;
  for (const KroneckerPtr& pattern : patterns) {
    factors.push_back(contiguous(pattern->sizes(), batch, dtype, last));
  }
  return factors;
}

void check_chain(const char* op, std::span<const KroneckerPtr> patterns) {
  for (std::size_t n = 0; n < patterns.size(); ++n) {
    const std::string name = "patterns[" + std::to_string(n) + "]";
    const std::int64_t cols = check_pattern(op, name.c_str(), patterns[n]).cols();
    if (n > 0 && patterns[n - 1]->rows() != cols) {
      throw Error(op, name, std::to_string(patterns[n - 1]->rows()) + " in features (a·c·d), as come before it",
                  std::to_string(cols));
    }
  }
}

}  // namespace

std::vector<std::string> plan(std::span<const KroneckerPtr> patterns, const std::string& arch, DType dtype, bool last,
                              std::int64_t batch) {
  constexpr std::int64_t kMany = 4096;
  check_chain("plan", patterns);
  if (!is_floating(dtype)) {
    throw Error("plan", "dtype", "float64, float32, float16 or bfloat16", name_of(dtype));
  }
  if (batch < 0) {
    throw Error("plan", "batch", "at least 0", std::to_string(batch));
  }
  const std::string named = named_arch("plan", arch);
  const auto machine = named == "cpu" ? std::nullopt : std::optional(typical_machine(named));
  const std::vector<Problem> factors = contiguous(patterns, batch > 0 ? batch : kMany, dtype, last);
  std::vector<std::string> lines;
  std::size_t first = 0;
  for (const std::size_t end : steps(factors, machine)) {
    if (end - first == 1) {
      lines.push_back(std::to_string(first) + ": " + kernel_of(factors[first], machine));
    } else {
      const chain::Monarch m = *chain::fuse(factors[first].sizes, factors[first + 1].sizes);
      const std::string cluster = m.ranks > 1 ? ", clusters of " + std::to_string(m.ranks) : "";
      lines.push_back(std::to_string(first) + "+" + std::to_string(first + 1) + ": fused" + cluster + ", " +
                      std::to_string(chain::Monarch::kRows) + " rows");
    }
    first = end;
  }
  return lines;
}

bool dense_wins(std::span<const KroneckerPtr> patterns, const std::string& arch, DType dtype, bool last,
                std::int64_t batch) {
  // Costs are off by a tenth or so, and a dense matrix takes memory: it has to be clearly faster.
  constexpr double kMargin = 1.1;
  // A fused pair of factors is bound by memory: 4096 features took 1.25 times a copy of x.
  constexpr double kFused = 1.25;
  check_chain("dense_wins", patterns);
  const std::string named = named_arch("dense_wins", arch);
  if (named == "cpu" || size_of(dtype) != 2 || batch <= 0 || patterns.empty()) {
    return false;  // nothing is known there
  }
  const Machine machine = typical_machine(named);
  const std::vector<Problem> factors = contiguous(patterns, batch, dtype, last);
  double sparse = cost::kLaunch - cost::kNextLaunch;
  std::size_t first = 0;
  for (const std::size_t end : steps(factors, machine)) {
    const auto moved = static_cast<double>(2 * batch * (patterns[first]->cols() + patterns[end - 1]->rows()));
    sparse += cost::kNextLaunch;
    sparse += end - first > 1
                  ? cost::kRamp + kFused * moved / cost::kMemory
                  : cheapest<Config>(cuda::candidates(factors[first], machine)).microseconds - cost::kLaunch;
    first = end;
  }
  const auto out = static_cast<double>(patterns.back()->rows()), in = static_cast<double>(patterns.front()->cols());
  return sparse > kMargin * cost::dense_product(out, static_cast<double>(batch), in, machine.multiprocessors);
}

}  // namespace kronecker
}  // namespace fretwork
