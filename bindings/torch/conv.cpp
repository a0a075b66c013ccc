// torch.ops.fretwork's block-sparse convolution and its two gradients.
#include "call.h"

namespace {

using namespace fretwork_torch;  // NOLINT: what every op here is made of

/// What all three take behind their tensors: the layout, kernel size, stride, padding (top, left, bottom, right),
/// dilation and precision.
class Geometry {
 public:
  explicit Geometry(Arguments& arguments)
      : key_(arguments.text()),
        kernel_(arguments.integers()),
        stride_(arguments.integers()),
        padding_(arguments.integers()),
        dilation_(arguments.integers()),
        precision_(arguments.text()) {}

  fretwork::ConvOptions options(const char* op) const {
    fretwork::ConvOptions options;
    options.kernel = two(op, "kernel_size", kernel_);
    options.stride = two(op, "stride", stride_);
    options.dilation = two(op, "dilation", dilation_);
    if (padding_.size() != 4) {
      throw fretwork::Error(op, "padding", "4 numbers", std::to_string(padding_.size()));
    }
    options.padding = {padding_[0], padding_[1]};
    options.padding_end = {padding_[2], padding_[3]};
    return options;
  }
  fretwork::BlockLayoutPtr layout(const char* op) const { return block_layout(op, key_); }
  fretwork::Precision precision(const char* op) const { return precision_named(op, precision_.view()); }

 private:
  static std::array<std::int64_t, 2> two(const char* op, const char* argument, const std::vector<std::int64_t>& given) {
    if (given.size() != 2) {
      throw fretwork::Error(op, argument, "2 numbers", std::to_string(given.size()));
    }
    return {given[0], given[1]};
  }
  Text key_;
  std::vector<std::int64_t> kernel_, stride_, padding_, dilation_;
  Text precision_;
};

/// Images (N, C, H, W), in memory so or with the channels last.
Tensor empty_images(std::span<const std::int64_t> sizes, bool channels_last, const Tensor& like) {
  if (!channels_last) {
    return empty_like(sizes, like);
  }
  const auto at_least_1 = [&](std::size_t d) { return std::max<std::int64_t>(sizes[d], 1); };
  const std::int64_t c = at_least_1(1), wc = at_least_1(3) * c, hwc = at_least_1(2) * wc;
  return empty_strided(sizes, std::array<std::int64_t, 4>{hwc, 1, wc, c}.data(), dtype_code(like), like);
}

void block_conv2d(StableIValue* stack, std::uint64_t, std::uint64_t) {
  constexpr const char* kOp = "block_conv2d";
  Arguments arguments(stack);
  const Tensor x = arguments.tensor(), values = arguments.tensor();
  const std::optional<Tensor> bias = arguments.optional_tensor();
  const Geometry geometry(arguments);
  const bool channels_last = arguments.flag();

  const auto layout = geometry.layout(kOp);
  fretwork::ConvOptions options = geometry.options(kOp);
  const fretwork::ConstTensorView input = view(kOp, "x", x), packed = view(kOp, "values", values);
  options.bias = view(kOp, "bias", bias);
  const Tensor out = empty_images(fretwork::block_conv2d_shape(input, packed, layout, options), channels_last, x);
  Call call(x);
  call.context().precision = geometry.precision(kOp);
  fretwork::block_conv2d(input, packed, layout, out_view(kOp, "out", out), call.context(), options);
  stack[0] = torch::stable::detail::from(out);
}

/// `height` and `width` are those of x, which the result's do not tell.
void block_conv2d_backward_x(StableIValue* stack, std::uint64_t, std::uint64_t) {
  constexpr const char* kOp = "block_conv2d_backward_x";
  Arguments arguments(stack);
  const Tensor d_out = arguments.tensor(), values = arguments.tensor();
  const Geometry geometry(arguments);
  const std::int64_t height = arguments.integer(), width = arguments.integer();
  const bool channels_last = arguments.flag();

  const auto layout = geometry.layout(kOp);
  const fretwork::ConstTensorView upstream = view(kOp, "d_out", d_out), packed = view(kOp, "values", values);
  if (height < 0 || width < 0) {
    throw fretwork::Error(kOp, "height and width", "at least 0",
                          std::to_string(height) + " and " + std::to_string(width));
  }
  // What is no batch of images gives some shape, and is refused before it matters.
  const std::int64_t batch = upstream.rank > 0 ? upstream.size(0) : 0;
  const std::array<std::int64_t, 4> shape{batch, layout->shape()[2], height, width};
  const Tensor d_x = empty_images(shape, channels_last, d_out);
  Call call(d_out);
  call.context().precision = geometry.precision(kOp);
  fretwork::block_conv2d_backward_x(upstream, packed, layout, out_view(kOp, "d_x", d_x), call.context(),
                                    geometry.options(kOp));
  stack[0] = torch::stable::detail::from(d_x);
}

void block_conv2d_backward_values(StableIValue* stack, std::uint64_t, std::uint64_t) {
  constexpr const char* kOp = "block_conv2d_backward_values";
  Arguments arguments(stack);
  const Tensor x = arguments.tensor(), d_out = arguments.tensor();
  const Geometry geometry(arguments);

  const auto layout = geometry.layout(kOp);
  const auto& s = layout->sizes();
  const Tensor d_values = empty_like(std::array{layout->nnz(), s.block_rows, s.block_cols}, x);
  Call call(x);
  call.context().precision = geometry.precision(kOp);
  fretwork::block_conv2d_backward_values(view(kOp, "x", x), view(kOp, "d_out", d_out), layout,
                                         out_view(kOp, "d_values", d_values), call.context(), geometry.options(kOp));
  stack[0] = torch::stable::detail::from(d_values);
}

void implement(torch::stable::detail::StableLibrary& m) {
  implement_twins(m, "block_conv2d", &block_conv2d);
  implement_twins(m, "block_conv2d_backward_x", &block_conv2d_backward_x);
  implement_twins(m, "block_conv2d_backward_values", &block_conv2d_backward_values);
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(fretwork, m) {
  define_twins(
      m,
      "block_conv2d(Tensor x, Tensor values, Tensor? bias, str layout, int[] kernel_size, int[] stride, int[] padding, "
      "int[] dilation, str precision, bool channels_last) -> Tensor");
  define_twins(
      m,
      "block_conv2d_backward_x(Tensor d_out, Tensor values, str layout, int[] kernel_size, int[] stride, int[] "
      "padding, int[] dilation, str precision, SymInt height, SymInt width, bool channels_last) -> Tensor");
  define_twins(
      m,
      "block_conv2d_backward_values(Tensor x, Tensor d_out, str layout, int[] kernel_size, int[] stride, int[] "
      "padding, int[] dilation, str precision) -> Tensor");
}
STABLE_TORCH_LIBRARY_IMPL(fretwork, CPU, m) { implement(m); }
STABLE_TORCH_LIBRARY_IMPL(fretwork, CUDA, m) { implement(m); }
