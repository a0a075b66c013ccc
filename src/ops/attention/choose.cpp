// Attention on a GPU: which family of kernels runs a problem. The only place where that is chosen.
#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "fretwork/error.h"
#include "ops/attention/cuda/families.h"
#include "ops/attention/problem.h"
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
  part.d_bias = {};
  return part;
}

}  // namespace

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
  if (!hopper::forward_of_few(problem, context) && !decode::forward(problem, portable::score_arg(problem), context) &&
      !hopper::forward(problem, context)) {
    portable::forward(problem, context);
  }
}

void backward(const BackwardProblem& problem, Context& context) {
  check(problem.forward);
  const fretwork::cuda::DeviceScope scope(context.device.index);
  const Problem& p = problem.forward;
  if (p.batch * p.heads * p.rows * p.cols == 0) {
    portable::fill_zeros(problem, context);
    return;
  }
  if (const auto ranges = ranges_of(p); ranges.size() > 1) {
    for (const PatternRange& range : ranges) {
      backward(part_of(problem, range), context);
    }
    if (problem.d_bias.data != nullptr) {
      portable::bias_gradient(problem, context);
    }
    return;
  }
  if (!hopper::backward(problem, context)) {
    portable::backward(problem, context);
  }
}

}  // namespace cuda
}  // namespace fretwork::attention_op
