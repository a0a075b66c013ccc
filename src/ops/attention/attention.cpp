// Attention over regular patterns: what it accepts, and which backend runs it.
#include <algorithm>
#include <cmath>
#include <optional>
#include <string>
#include <vector>

#include "fretwork/error.h"
#include "fretwork/ops.h"
#include "ops/attention/checks.h"
#include "ops/attention/problem.h"
#include "pattern/checks.h"
#include "pattern/text.h"

namespace fretwork {
namespace {

using attention_op::BackwardProblem;
using attention_op::Bias;
using attention_op::Operand;
using attention_op::Problem;
using attention_op::Sinks;

constexpr const char* kForward = "attention";
constexpr const char* kBackward = "attention_backward";
constexpr std::int64_t kMostDepth = 512;  // of a GPU's kernels

Operand operand(const ConstTensorView& t) {
  return {operand_data(t), t.stride(0), t.stride(1), t.stride(2), t.stride(3)};
}

void check_dtype(const char* op, const char* argument, const ConstTensorView& tensor, DType dtype,
                 const char* like = "") {
  if (tensor.dtype != dtype) {
    throw Error(op, argument, std::string(name_of(dtype)) + like, name_of(tensor.dtype));
  }
}

void check_like_q_or_float(const char* op, const char* argument, const ConstTensorView& t, DType dtype) {
  if (t.dtype != dtype && t.dtype != DType::f32) {
    throw Error(op, argument,
                dtype == DType::f32 ? "float32 like q" : std::string(name_of(dtype)) + " like q or float32",
                name_of(t.dtype));
  }
}

void check_shape(const char* op, const char* argument, const ConstTensorView& tensor,
                 std::initializer_list<std::int64_t> shape) {
  if (!std::ranges::equal(tensor.shape(), shape)) {
    throw Error(op, argument, "shape " + shape_text(std::span(shape.begin(), shape.size())),
                shape_text(tensor.shape()));
  }
}

/// What attention computes in: the type of lse.
DType statistics_type(DType dtype) { return dtype == DType::f64 ? DType::f64 : DType::f32; }

/// As few as there can be: one for all heads where they are equal, one for each where all batch elements have the same.
void shorten(std::vector<RegularPtr>& patterns, std::int64_t heads) {
  const auto repeats = [&](std::int64_t period) {
    const auto from = patterns.begin() + std::min(period, std::ssize(patterns));
    return std::equal(from, patterns.end(), patterns.begin());
  };
  for (const std::int64_t period : {std::int64_t{1}, std::max<std::int64_t>(heads, 1)}) {
    if (repeats(period) && std::ssize(patterns) > period) {
      patterns.resize(static_cast<std::size_t>(period));
    }
  }
}

std::vector<RegularPtr> check_patterns(const char* op, std::span<const PatternPtr> patterns, const Problem& p) {
  const auto count = static_cast<std::int64_t>(patterns.size());
  if (count != 1 && count != p.heads && count != p.batch * p.heads) {
    throw Error(op, "pattern",
                "1, " + std::to_string(p.heads) + ", one for each query head, or " + std::to_string(p.batch * p.heads) +
                    ", for each element of the batch too",
                std::to_string(count));
  }
  std::vector<RegularPtr> found;
  for (const PatternPtr& pattern : patterns) {
    RegularPtr regular = check_regular(op, pattern);
    if (regular->rows() != p.rows || regular->cols() != p.cols) {
      throw Error(op, "pattern",
                  "shape " + shape_text(std::vector{p.rows, p.cols}) + ", queries and keys of (B, H, S, D)",
                  shape_text(regular->shape()));
    }
    const auto same =
        std::ranges::find_if(found, [&](const auto& f) { return f == regular || f->text() == regular->text(); });
    found.push_back(same == found.end() ? std::move(regular) : *same);
  }
  shorten(found, p.heads);
  return found;
}

void check_depth(const char* op, const char* argument, const ConstTensorView& t, const Context& context) {
  const bool cuda = context.device.type == DeviceType::cuda;
  if (t.size(3) < 1 || (cuda && t.size(3) > kMostDepth)) {
    throw Error(op, argument, cuda ? "a last dimension of 1 to 512" : "a last dimension of at least 1",
                shape_text(t.shape()));
  }
}

/// q, k and v; sets the sizes.
void check_operands(const char* op, const ConstTensorView& q, const ConstTensorView& k, const ConstTensorView& v,
                    const Context& context, Problem& p) {
  if (q.rank != 4) {
    throw Error(op, "q", "4 dimensions (B, Hq, Sq, D)", shape_text(q.shape()));
  }
  check_floating(op, "q", q);
  if (context.device.type == DeviceType::cuda && q.dtype == DType::f64) {
    throw Error(op, "q", "float32, float16 or bfloat16 on a GPU", name_of(q.dtype));
  }
  check_dtype(op, "k", k, q.dtype, " like q");
  check_dtype(op, "v", v, q.dtype, " like q");
  const std::int64_t batch = q.size(0), heads = q.size(1), depth = q.size(3);
  if (k.rank != 4 || k.size(0) != batch || k.size(3) != depth) {
    throw Error(op, "k", "(" + std::to_string(batch) + ", Hk, Sk, " + std::to_string(depth) + ")",
                shape_text(k.shape()));
  }
  const std::int64_t kv_heads = k.size(1), cols = k.size(2);
  if (kv_heads == 0 || heads == 0 ? heads != kv_heads : heads % kv_heads != 0) {
    throw Error(op, "k", "a number of heads that divides the " + std::to_string(heads) + " of q",
                shape_text(k.shape()));
  }
  if (v.rank != 4 || v.size(0) != batch || v.size(1) != kv_heads || v.size(2) != cols) {
    throw Error(op, "v",
                "(" + std::to_string(batch) + ", " + std::to_string(kv_heads) + ", " + std::to_string(cols) + ", Dv)",
                shape_text(v.shape()));
  }
  check_depth(op, "q", q, context);
  check_depth(op, "v", v, context);
  const std::pair<const char*, const ConstTensorView*> all[] = {{"q", &q}, {"k", &k}, {"v", &v}};
  for (const auto& [name, tensor] : all) {
    check_device(op, name, *tensor, context);
  }
  p.dtype = q.dtype;
  p.batch = batch;
  p.heads = heads;
  p.kv_heads = kv_heads;
  p.rows = q.size(2);
  p.cols = cols;
  p.depth = depth;
  p.value_depth = v.size(3);
  p.q = operand(q);
  p.k = operand(k);
  p.v = operand(v);
}

/// bias or its gradient: at most four dimensions, each 1 or the full one.
Bias check_bias(const char* op, const char* argument, const ConstTensorView& t, const Problem& p,
                const Context& context) {
  check_like_q_or_float(op, argument, t, p.dtype);
  const std::int64_t full[] = {p.batch, p.heads, p.rows, p.cols};
  bool right = t.rank <= 4;
  for (int d = 1; right && d <= t.rank; ++d) {
    right = t.size(-d) == 1 || t.size(-d) == full[4 - d];
  }
  if (!right) {
    throw Error(op, argument, "a shape that broadcasts to " + shape_text(full), shape_text(t.shape()));
  }
  check_device(op, argument, t, context);
  return {operand_data(t), t.dtype, t.stride(-4), t.stride(-3), t.stride(-2), t.stride(-1)};
}

/// sinks or their gradient.
Sinks check_sinks(const char* op, const char* argument, const ConstTensorView& t, const Problem& p,
                  const Context& context) {
  check_like_q_or_float(op, argument, t, p.dtype);
  check_shape(op, argument, t, {p.heads});
  check_device(op, argument, t, context);
  return {operand_data(t), t.dtype, t.stride(0), 0};
}

void check_options(const char* op, const AttentionOptions& options, const Context& context, Problem& p) {
  p.scale = options.scale.value_or(1 / std::sqrt(static_cast<double>(p.depth)));
  p.softcap = options.softcap;
  if (!std::isfinite(p.scale)) {
    throw Error(op, "scale", "a finite number", text::shortest(p.scale));
  }
  if (!std::isfinite(p.softcap) || p.softcap < 0) {
    throw Error(op, "softcap", "0 (none) or a positive number", text::shortest(p.softcap));
  }
  if (options.bias.has_value()) {
    p.bias = check_bias(op, "bias", *options.bias, p, context);
  }
  if (options.slopes.has_value()) {
    check_dtype(op, "slopes", *options.slopes, statistics_type(p.dtype));
    check_shape(op, "slopes", *options.slopes, {p.heads});
    check_device(op, "slopes", *options.slopes, context);
    p.slopes = {operand_data(*options.slopes), 0, options.slopes->stride(0), 0, 0};
  }
  if (!(options.dropout >= 0 && options.dropout < 1)) {
    throw Error(op, "dropout", "0 or more and less than 1", text::shortest(options.dropout));
  }
  if (options.dropout > 0 && options.dropout_seed == nullptr) {
    throw Error(op, "dropout_seed", "a seed where there is dropout", "none");
  }
  p.dropout = {options.dropout, options.dropout > 0 ? options.dropout_seed : nullptr};
  if (const auto& padding = options.key_padding; padding.has_value()) {
    check_dtype(op, "key_padding_mask", *padding, DType::boolean, ", True where a key is padding");
    check_shape(op, "key_padding_mask", *padding, {p.batch, p.cols});
    check_device(op, "key_padding_mask", *padding, context);
    p.padding = {static_cast<const std::uint8_t*>(padding->data), padding->stride(0), padding->stride(1)};
  }
  if (options.sinks.has_value()) {
    p.sinks = check_sinks(op, "sinks", *options.sinks, p, context);
  }
}

/// lse or its gradient.
Operand check_lse(const char* op, const char* argument, const ConstTensorView& t, const Problem& p,
                  const Context& context) {
  check_dtype(op, argument, t, statistics_type(p.dtype));
  check_shape(op, argument, t, {p.batch, p.heads, p.rows});
  check_device(op, argument, t, context);
  return {operand_data(t), t.stride(0), t.stride(1), t.stride(2), 0};
}

/// out and its gradient, and those of q, k and v.
Operand check_result(const char* op, const char* argument, const ConstTensorView& t, const Problem& p,
                     std::initializer_list<std::int64_t> shape, const Context& context) {
  check_dtype(op, argument, t, p.dtype, " like q");
  check_shape(op, argument, t, shape);
  check_device(op, argument, t, context);
  return operand(t);
}

Problem check_inputs(const char* op, const ConstTensorView& q, const ConstTensorView& k, const ConstTensorView& v,
                     std::span<const PatternPtr> patterns, const ConstTensorView& out, const Context& context,
                     const AttentionOptions& options) {
  Problem p;
  check_operands(op, q, k, v, context, p);
  p.patterns = check_patterns(op, patterns, p);
  check_options(op, options, context, p);
  p.o = check_result(op, "out", out, p, {p.batch, p.heads, p.rows, p.value_depth}, context);
  return p;
}

BackwardProblem check_backward(const Problem& p, const ConstTensorView& d_out,
                               const std::optional<ConstTensorView>& d_lse, const AttentionGradients& gradients,
                               const Context& context, const AttentionOptions& options) {
  BackwardProblem b;
  b.d_o = check_result(kBackward, "d_out", d_out, p, {p.batch, p.heads, p.rows, p.value_depth}, context);
  if (d_lse.has_value()) {
    b.d_lse = check_lse(kBackward, "d_lse", *d_lse, p, context);
  }
  if (gradients.q.has_value()) {
    b.d_q = check_result(kBackward, "d_q", *gradients.q, p, {p.batch, p.heads, p.rows, p.depth}, context);
  }
  if (gradients.k.has_value()) {
    b.d_k = check_result(kBackward, "d_k", *gradients.k, p, {p.batch, p.kv_heads, p.cols, p.depth}, context);
  }
  if (gradients.v.has_value()) {
    b.d_v = check_result(kBackward, "d_v", *gradients.v, p, {p.batch, p.kv_heads, p.cols, p.value_depth}, context);
  }
  if (const auto& bias = gradients.bias; bias.has_value()) {
    if (!options.bias.has_value() || !std::ranges::equal(bias->shape(), options.bias->shape()) ||
        bias->dtype != options.bias->dtype) {
      throw Error(kBackward, "d_bias", "the shape and dtype of a given bias", shape_text(bias->shape()));
    }
    b.d_bias = check_bias(kBackward, "d_bias", *bias, p, context);
    if (bias->elements() == 0) {
      b.d_bias = {};
    }
    std::ranges::copy(std::initializer_list{bias->size(-4), bias->size(-3), bias->size(-2), bias->size(-1)},
                      b.bias_sizes);
  }
  if (const auto& sinks = gradients.sinks; sinks.has_value()) {
    if (!options.sinks.has_value() || sinks->dtype != options.sinks->dtype) {
      throw Error(kBackward, "d_sinks", "the dtype of given sinks", name_of(sinks->dtype));
    }
    b.d_sinks = check_sinks(kBackward, "d_sinks", *sinks, p, context);
  }
  b.forward = p;
  return b;
}

}  // namespace

void attention(const ConstTensorView& q, const ConstTensorView& k, const ConstTensorView& v,
               std::span<const PatternPtr> patterns, const TensorView& out, const std::optional<TensorView>& lse,
               Context& context, const AttentionOptions& options) {
  Problem p = check_inputs(kForward, q, k, v, patterns, out, context, options);
  if (lse.has_value()) {
    p.lse = check_lse(kForward, "lse", *lse, p, context);
  }
  const std::int64_t statistics = p.batch * p.heads * p.rows;
  if (statistics == 0) {
    return;
  }
  const Workspace unseen(
      context, !lse.has_value() ? static_cast<std::size_t>(statistics) * size_of(statistics_type(p.dtype)) : 0);
  if (!lse.has_value()) {
    p.lse = {unseen.data(), p.heads * p.rows, p.rows, 1, 0};
  }
  context.device.type == DeviceType::cuda ? attention_op::cuda::forward(p, context)
                                          : attention_op::cpu::forward(p, context);
}

void attention_backward(const ConstTensorView& q, const ConstTensorView& k, const ConstTensorView& v,
                        std::span<const PatternPtr> patterns, const ConstTensorView& out, const ConstTensorView& lse,
                        const ConstTensorView& d_out, const std::optional<ConstTensorView>& d_lse,
                        const AttentionGradients& gradients, Context& context, const AttentionOptions& options) {
  Problem p = check_inputs(kBackward, q, k, v, patterns, out, context, options);
  p.lse = check_lse(kBackward, "lse", lse, p, context);
  BackwardProblem b = check_backward(p, d_out, d_lse, gradients, context, options);
  if (p.heads == 0) {  // then there is no batch either: backends divide by the number of heads
    b.forward.batch = 0;
    b.forward.heads = b.forward.kv_heads = 1;
    b.forward.sinks = b.d_sinks = {};
  }
  context.device.type == DeviceType::cuda ? attention_op::cuda::backward(b, context)
                                          : attention_op::cpu::backward(b, context);
}

namespace attention_op {

Problem check_call(const char* op, const ConstTensorView& q, const ConstTensorView& k, const ConstTensorView& v,
                   std::span<const PatternPtr> patterns, const ConstTensorView& out,
                   const std::optional<ConstTensorView>& lse, const Context& context, const AttentionOptions& options) {
  Problem p = check_inputs(op, q, k, v, patterns, out, context, options);
  if (lse.has_value()) {
    p.lse = check_lse(op, "lse", *lse, p, context);
  }
  return p;
}

BackwardProblem check_gradients(const Problem& problem, const ConstTensorView& d_out,
                                const std::optional<ConstTensorView>& d_lse, const AttentionGradients& gradients,
                                const Context& context, const AttentionOptions& options) {
  return check_backward(problem, d_out, d_lse, gradients, context, options);
}

}  // namespace attention_op
}  // namespace fretwork
