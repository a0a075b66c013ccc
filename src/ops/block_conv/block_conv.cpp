// The block-sparse convolution and its gradients: argument checks, the problem that backends receive, and the choice of
// backend.
#include <string>

#include "fretwork/error.h"
#include "fretwork/ops.h"
#include "ops/block_conv/problem.h"
#include "pattern/checks.h"

namespace fretwork {
namespace block_conv {
namespace {

using Pair = std::array<std::int64_t, 2>;

std::string text(const Pair& p) { return "(" + std::to_string(p[0]) + ", " + std::to_string(p[1]) + ")"; }

/// An argument with the name its caller knows it by.
struct Argument {
  const char* name;
  const ConstTensorView& view;
};

/// The checks of one call; each throws an Error that names the op and the argument.
class Check {
 public:
  Check(const char* op, const BlockLayoutPtr& layout, const ConvOptions& options)
      : op_(op), layout_(check_pattern(op, "layout", layout)), options_(options) {
    at_least("kernel_size", options.kernel, 1);
    at_least("stride", options.stride, 1);
    at_least("padding", options.padding, 0);
    at_least("padding", options.padding_end, 0);
    at_least("dilation", options.dilation, 1);
    if (layout_.heads() != options.kernel[0] * options.kernel[1]) {
      fail("kernel_size", "as many positions as the layout has heads, " + std::to_string(layout_.heads()),
           text(options.kernel));
    }
  }

  std::int64_t out_channels() const { return layout_.sizes().rows * layout_.sizes().block_rows; }
  std::int64_t in_channels() const { return layout_.sizes().cols * layout_.sizes().block_cols; }

  /// A batch of images with this many channels.
  void image(const char* argument, const ConstTensorView& x, std::int64_t channels) const {
    check_floating(op_, argument, x);
    if (x.rank != 4 || x.size(1) != channels) {
      fail(argument, "(N, " + std::to_string(channels) + ", H, W)", shape_text(x.shape()));
    }
  }
  void values(const ConstTensorView& v) const {
    check_floating(op_, "values", v);
    shape("values", v, std::array{layout_.nnz(), layout_.sizes().block_rows, layout_.sizes().block_cols});
  }
  void bias(const ConstTensorView& b) const { shape("bias", b, std::array{out_channels()}); }
  void like(const char* argument, const ConstTensorView& tensor, const char* other,
            const ConstTensorView& wanted) const {
    if (tensor.dtype != wanted.dtype) {
      fail(argument, std::string(name_of(wanted.dtype)) + " like " + other, name_of(tensor.dtype));
    }
    if (tensor.device != wanted.device) {
      fail(argument, name_of(wanted.device) + " like " + other, name_of(tensor.device));
    }
  }
  void shape(const char* argument, const ConstTensorView& tensor, std::span<const std::int64_t> wanted) const {
    if (!std::equal(wanted.begin(), wanted.end(), tensor.shape().begin(), tensor.shape().end())) {
      fail(argument, shape_text(wanted), shape_text(tensor.shape()));
    }
  }
  /// The result's height (0) or width (1) for an input of this size.
  std::int64_t out_size(int axis, const ConstTensorView& x) const {
    const auto d = static_cast<std::size_t>(axis);
    const std::int64_t size = x.size(2 + axis), padded = size + options_.padding[d] + options_.padding_end[d];
    const std::int64_t reach = (options_.kernel[d] - 1) * options_.dilation[d] + 1;
    if (padded < reach) {
      fail("x", std::string("a padded ") + (axis == 0 ? "height" : "width") + " of at least " + std::to_string(reach),
           shape_text(x.shape()));
    }
    return (padded - reach) / options_.stride[d] + 1;
  }
  std::array<std::int64_t, 4> out_shape(const ConstTensorView& x) const {
    return {x.size(0), out_channels(), out_size(0, x), out_size(1, x)};
  }
  void ready(const Context& context, std::initializer_list<Argument> tensors) const {
    check_context(op_, context);
    for (const auto& [name, view] : tensors) {
      check_device(op_, name, view, context);
    }
  }

  /// The problem of the forward pass, without operands; the gradients change it.
  Problem problem(DType dtype) const {
    Problem p;
    p.dtype = dtype;
    p.layout = &layout_;
    p.y = axis(0);
    p.x = axis(1);
    return p;
  }

 private:
  Axis axis(std::size_t d) const {
    return {options_.kernel[d], options_.stride[d], 1, -options_.padding[d], options_.dilation[d]};
  }
  void at_least(const char* argument, const Pair& given, std::int64_t least) const {
    if (given[0] < least || given[1] < least) {
      fail(argument, "at least " + std::to_string(least) + " along both axes", text(given));
    }
  }
  [[noreturn]] void fail(const char* argument, const std::string& expected, const std::string& got) const {
    throw Error(op_, argument, expected, got);
  }

  const char* op_;
  const BlockLayout& layout_;
  const ConvOptions& options_;
};

Image image(const ConstTensorView& v) {
  return {operand_data(v), v.size(0),   v.size(1),   v.size(2),  v.size(3),
          v.stride(0),     v.stride(1), v.stride(2), v.stride(3)};
}
Values packed(const ConstTensorView& v) { return {operand_data(v), v.stride(0), v.stride(1), v.stride(2)}; }

/// The axis of the gradient of the input: it reads at the positions that the forward pass writes.
Axis turned(const Axis& a) { return {a.taps, 1, a.mul, -a.first, -a.step}; }

void run(const Problem& problem, Context& context) {
  const std::int64_t results =
      problem.kind == Kind::product ? problem.out.pixels() * problem.out.c : problem.layout->nnz();
  if (results > 0) {
    context.device.type == DeviceType::cuda ? cuda::run(problem, context) : cpu::run(problem, context);
  }
}

}  // namespace
}  // namespace block_conv

using block_conv::Check;

std::vector<std::int64_t> block_conv2d_shape(const ConstTensorView& x, const ConstTensorView& values,
                                             const BlockLayoutPtr& layout, const ConvOptions& options) {
  const Check check("block_conv2d", layout, options);
  check.image("x", x, check.in_channels());
  check.values(values);
  check.like("values", values, "x", x);
  if (options.bias.has_value()) {
    check.bias(*options.bias);
    check.like("bias", *options.bias, "x", x);
  }
  const auto shape = check.out_shape(x);
  return {shape.begin(), shape.end()};
}

void block_conv2d(const ConstTensorView& x, const ConstTensorView& values, const BlockLayoutPtr& layout,
                  const TensorView& out, Context& context, const ConvOptions& options) {
  const auto shape = block_conv2d_shape(x, values, layout, options);
  const Check check("block_conv2d", layout, options);
  check.shape("out", out, shape);
  check.like("out", out, "x", x);
  check.ready(context, {{"x", x}, {"values", values}, {"out", out}});
  block_conv::Problem problem = check.problem(x.dtype);
  problem.values = block_conv::packed(values);
  problem.in = block_conv::image(x);
  problem.out = block_conv::image(out);
  if (options.bias.has_value()) {
    check.ready(context, {{"bias", *options.bias}});
    problem.bias = options.bias->data;
    problem.bias_stride = options.bias->stride(0);
  }
  block_conv::run(problem, context);
}

void block_conv2d_backward_x(const ConstTensorView& d_out, const ConstTensorView& values, const BlockLayoutPtr& layout,
                             const TensorView& d_x, Context& context, const ConvOptions& options) {
  const Check check("block_conv2d_backward_x", layout, options);
  check.image("d_x", d_x, check.in_channels());
  check.image("d_out", d_out, check.out_channels());
  check.shape("d_out", d_out, check.out_shape(d_x));
  check.values(values);
  check.like("values", values, "d_out", d_out);
  check.like("d_x", d_x, "d_out", d_out);
  check.ready(context, {{"d_out", d_out}, {"values", values}, {"d_x", d_x}});
  block_conv::Problem problem = check.problem(d_x.dtype);
  problem.transposed = true;
  problem.y = block_conv::turned(problem.y);
  problem.x = block_conv::turned(problem.x);
  problem.values = block_conv::packed(values);
  problem.in = block_conv::image(d_out);
  problem.out = block_conv::image(d_x);
  block_conv::run(problem, context);
}

void block_conv2d_backward_values(const ConstTensorView& x, const ConstTensorView& d_out, const BlockLayoutPtr& layout,
                                  const TensorView& d_values, Context& context, const ConvOptions& options) {
  const Check check("block_conv2d_backward_values", layout, options);
  check.image("x", x, check.in_channels());
  check.image("d_out", d_out, check.out_channels());
  check.shape("d_out", d_out, check.out_shape(x));
  check.values(d_values);
  check.like("d_out", d_out, "x", x);
  check.like("d_values", d_values, "x", x);
  check.ready(context, {{"x", x}, {"d_out", d_out}, {"d_values", d_values}});
  block_conv::Problem problem = check.problem(x.dtype);
  problem.kind = block_conv::Kind::weight;
  problem.values = block_conv::packed(d_values);
  problem.in = block_conv::image(x);
  problem.out = block_conv::image(d_out);
  block_conv::run(problem, context);
}

}  // namespace fretwork
