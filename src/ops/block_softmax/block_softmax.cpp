// Softmax over the stored entries of each row: what it accepts, and which backend runs it.
#include <optional>
#include <string>
#include <vector>

#include "fretwork/error.h"
#include "ops/block_softmax/problem.h"
#include "pattern/checks.h"

namespace fretwork {
namespace {

using block_softmax_op::BackwardProblem;
using block_softmax_op::Dense;
using block_softmax_op::Packed;
using block_softmax_op::Problem;

constexpr const char* kForward = "block_softmax";
constexpr const char* kBackward = "block_softmax_backward";

Packed packed(const ConstTensorView& t) {
  return {operand_data(t), t.stride(-4), t.stride(-3), t.stride(-2), t.stride(-1)};
}

std::vector<std::int64_t> dense_shape(const BlockLayout& layout, std::int64_t batch) {
  const auto& s = layout.sizes();
  return {batch, s.heads, s.rows * s.block_rows, s.cols * s.block_cols};
}

/// rpe or its gradient: at most four dimensions, each 1 or the full one.
Dense check_rpe(const char* op, const char* argument, const ConstTensorView& t, const BlockLayout& layout,
                std::int64_t batch, const Context& context) {
  check_floating(op, argument, t);
  const auto full = dense_shape(layout, batch);
  bool right = t.rank <= 4;
  for (int d = 1; right && d <= t.rank; ++d) {
    right = t.size(-d) == 1 || t.size(-d) == full[static_cast<std::size_t>(4 - d)];
  }
  if (!right) {
    throw Error(op, argument, "a shape that broadcasts to " + shape_text(full), shape_text(t.shape()));
  }
  check_device(op, argument, t, context);
  return {operand_data(t), t.dtype, t.stride(-4), t.stride(-3), t.stride(-2), t.stride(-1), MaskMode::add};
}

void check_mask(const char* argument, const ConstTensorView& t, MaskMode mode, const Context& context) {
  if (t.dtype == DType::boolean && mode == MaskMode::add) {
    throw Error(kForward, argument, "numbers to add, or mode \"mul\" for a mask of what stays", "bool");
  }
  if (!is_floating(t.dtype) && t.dtype != DType::boolean) {
    throw Error(kForward, argument, "bool, float64, float32, float16 or bfloat16", name_of(t.dtype));
  }
  check_device(kForward, argument, t, context);
}

Dense check_key_padding(const ConstTensorView& t, const BlockLayout& layout, std::int64_t batch, MaskMode mode,
                        const Context& context) {
  const auto full = dense_shape(layout, batch);
  if (t.rank != 2 || t.size(0) != batch || t.size(1) != full[3]) {
    throw Error(kForward, "key_padding_mask", "shape " + shape_text(std::vector{batch, full[3]}),
                shape_text(t.shape()));
  }
  check_mask("key_padding_mask", t, mode, context);
  return {operand_data(t), t.dtype, t.stride(0), 0, 0, t.stride(1), mode};
}

Dense check_attn_mask(const ConstTensorView& t, const BlockLayout& layout, MaskMode mode, const Context& context) {
  const auto full = dense_shape(layout, 1);
  if ((t.rank != 2 && t.rank != 3) || t.size(-1) != full[3] || t.size(-2) != full[2] ||
      (t.rank == 3 && t.size(0) != full[1])) {
    throw Error(kForward, "attn_mask",
                "shape " + shape_text(std::vector{full[2], full[3]}) + " or " +
                    shape_text(std::vector{full[1], full[2], full[3]}),
                shape_text(t.shape()));
  }
  check_mask("attn_mask", t, mode, context);
  return {operand_data(t), t.dtype, 0, t.stride(-3), t.stride(-2), t.stride(-1), mode};
}

Problem check_forward(const ConstTensorView& values, const BlockLayout& layout, const ConstTensorView& out,
                      const Context& context, const SoftmaxOptions& options) {
  Problem problem;
  problem.batch = check_packed(kForward, "values", values, layout);
  check_floating(kForward, "values", values);
  check_device(kForward, "values", values, context);
  check_same(kForward, "out", out, values, context);
  problem.dtype = values.dtype;
  problem.layout = &layout;
  problem.scale = options.scale;
  problem.values = packed(values);
  problem.out = packed(out);
  if (options.rpe.has_value()) {
    problem.rpe = check_rpe(kForward, "rpe", *options.rpe, layout, problem.batch, context);
  }
  if (options.key_padding_mask.has_value()) {
    problem.key_padding =
        check_key_padding(*options.key_padding_mask, layout, problem.batch, options.key_padding_mask_mode, context);
  }
  if (options.attn_mask.has_value()) {
    problem.attn = check_attn_mask(*options.attn_mask, layout, options.attn_mask_mode, context);
  }
  return problem;
}

BackwardProblem check_backward(const ConstTensorView& out, const ConstTensorView& d_out, const BlockLayout& layout,
                               double scale, const ConstTensorView& d_values, const std::optional<TensorView>& d_rpe,
                               const Context& context) {
  BackwardProblem problem;
  problem.batch = check_packed(kBackward, "out", out, layout);
  check_floating(kBackward, "out", out);
  check_device(kBackward, "out", out, context);
  check_same(kBackward, "d_out", d_out, out, context);
  check_same(kBackward, "d_values", d_values, out, context);
  problem.dtype = out.dtype;
  problem.layout = &layout;
  problem.scale = scale;
  problem.out = packed(out);
  problem.d_out = packed(d_out);
  problem.d_values = packed(d_values);
  if (d_rpe.has_value()) {
    problem.d_rpe = check_rpe(kBackward, "d_rpe", *d_rpe, layout, problem.batch, context);
    problem.rpe_sizes = {d_rpe->size(-4), d_rpe->size(-3), d_rpe->size(-2), d_rpe->size(-1)};
  }
  return problem;
}

}  // namespace

void block_softmax(const ConstTensorView& values, const BlockLayoutPtr& layout, const TensorView& out, Context& context,
                   const SoftmaxOptions& options) {
  const Problem problem = check_forward(values, check_pattern(kForward, "layout", layout), out, context, options);
  if (problem.batch * layout->nnz() == 0) {
    return;
  }
  context.device.type == DeviceType::cuda ? block_softmax_op::cuda::forward(problem, context)
                                          : block_softmax_op::cpu::forward(problem, context);
}

void block_softmax_backward(const ConstTensorView& out, const ConstTensorView& d_out, const BlockLayoutPtr& layout,
                            double scale, const TensorView& d_values, const std::optional<TensorView>& d_rpe,
                            Context& context) {
  const BackwardProblem problem =
      check_backward(out, d_out, check_pattern(kBackward, "layout", layout), scale, d_values, d_rpe, context);
  context.device.type == DeviceType::cuda ? block_softmax_op::cuda::backward(problem, context)
                                          : block_softmax_op::cpu::backward(problem, context);
}

}  // namespace fretwork
