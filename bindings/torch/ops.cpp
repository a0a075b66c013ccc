// torch.ops.fretwork: tensors become views, torch's stream, memory and threads become a context, and the core is
// called. Shapes and errors are the core's business; gradients and shape functions for tracing are Python's.
#include "call.h"

namespace {

using namespace fretwork_torch;  // NOLINT: what every op here is made of

/// One of the three products: its name, what its operands are called, and the core's functions.
struct Product {
  const char *op, *first, *second;
  decltype(&fretwork::sdd_shape) shape;
  decltype(&fretwork::sdd) run;
};

void product(StableIValue* stack, const Product& p) {
  Arguments arguments(stack);
  const Tensor a = arguments.tensor(), b = arguments.tensor();
  const Text key = arguments.text();
  fretwork::MatmulOptions options;
  options.trans_a = arguments.flag();
  options.trans_b = arguments.flag();
  const Text precision = arguments.text();
  options.sum_z = arguments.flag();
  options.sum_h = arguments.flag();

  const auto layout = block_layout(p.op, key);
  const fretwork::ConstTensorView first = view(p.op, p.first, a), second = view(p.op, p.second, b);
  const Tensor out = empty_like(p.shape(first, second, layout, options), a);
  Call call(a);
  call.context().precision = precision_named(p.op, precision.view());
  p.run(first, second, layout, out_view(p.op, "out", out), call.context(), options);
  stack[0] = torch::stable::detail::from(out);
}

void sdd(StableIValue* stack, std::uint64_t, std::uint64_t) {
  product(stack, {"sdd", "a", "b", &fretwork::sdd_shape, &fretwork::sdd});
}
void dsd(StableIValue* stack, std::uint64_t, std::uint64_t) {
  product(stack, {"dsd", "values", "b", &fretwork::dsd_shape, &fretwork::dsd});
}
void dds(StableIValue* stack, std::uint64_t, std::uint64_t) {
  product(stack, {"dds", "a", "values", &fretwork::dds_shape, &fretwork::dds});
}

/// Batch × features as the core sees it: batch last is a transposed view.
template <typename View>
View batch_view(const char* op, const char* argument, View v, bool last) {
  if (v.rank != 2) {
    throw fretwork::Error(op, argument, "2 dimensions, batch and features", fretwork::shape_text(v.shape()));
  }
  if (last) {
    std::swap(v.sizes[0], v.sizes[1]);
    std::swap(v.strides[0], v.strides[1]);
  }
  return v;
}
fretwork::ConstTensorView batch_in(const char* op, const char* argument, const Tensor& tensor, bool last) {
  return batch_view(op, argument, view(op, argument, tensor), last);
}
fretwork::TensorView batch_out(const char* op, const char* argument, const Tensor& tensor, bool last) {
  return batch_view(op, argument, out_view(op, argument, tensor), last);
}

/// Sizes of a batch of features.
std::array<std::int64_t, 2> batch_sizes(std::int64_t batch, std::int64_t features, bool last) {
  return last ? std::array{features, batch} : std::array{batch, features};
}

/// What a Kronecker product does to its sums.
fretwork::KsmmOptions finish(const char* op, const std::optional<Tensor>& bias, std::string_view activation) {
  return {.bias = view(op, "bias", bias), .activation = activation_named(op, activation)};
}

void ksmm(StableIValue* stack, std::uint64_t, std::uint64_t) {
  constexpr const char* kOp = "ksmm";
  Arguments arguments(stack);
  const Tensor x = arguments.tensor(), w = arguments.tensor();
  const std::optional<Tensor> bias = arguments.optional_tensor();
  const Text activation = arguments.text();
  const bool last = arguments.flag();
  const Text precision = arguments.text();

  const fretwork::ConstTensorView input = batch_in(kOp, "x", x, last), weight = view(kOp, "w", w);
  const fretwork::KsmmOptions options = finish(kOp, bias, activation.view());
  // A weight of another rank gives some shape; the core refuses it before it looks at the result.
  const std::int64_t batch = input.size(0), features = weight.size(0) * weight.size(1) * weight.size(3);
  const Tensor out = empty_like(batch_sizes(batch, features, last), x);
  Call call(x);
  call.context().precision = precision_named(kOp, precision.view());
  fretwork::ksmm(input, weight, batch_out(kOp, "out", out, last), call.context(), options);
  stack[0] = torch::stable::detail::from(out);
}

void ksmm_chain(StableIValue* stack, std::uint64_t, std::uint64_t) {
  constexpr const char* kOp = "ksmm_chain";
  Arguments arguments(stack);
  const Tensor x = arguments.tensor();
  const std::vector<Tensor> weights = arguments.tensors();
  const std::optional<Tensor> bias = arguments.optional_tensor();
  const Text activation = arguments.text();
  const bool last = arguments.flag();
  const Text precision = arguments.text();

  const fretwork::ConstTensorView input = batch_in(kOp, "x", x, last);
  std::vector<fretwork::ConstTensorView> factors;
  for (const Tensor& w : weights) {
    factors.push_back(view(kOp, ("weights[" + std::to_string(factors.size()) + "]").c_str(), w));
  }
  const fretwork::KsmmOptions options = finish(kOp, bias, activation.view());
  // As for ksmm: bad weights give some shape, and are refused before it matters.
  const fretwork::ConstTensorView end = factors.empty() ? fretwork::ConstTensorView{} : factors.back();
  const std::int64_t batch = input.size(0), features = end.size(0) * end.size(1) * end.size(3);
  const Tensor out = empty_like(batch_sizes(batch, features, last), x);
  Call call(x);
  call.context().precision = precision_named(kOp, precision.view());
  fretwork::ksmm_chain(input, factors, batch_out(kOp, "out", out, last), call.context(), options);
  stack[0] = torch::stable::detail::from(out);
}

/// b and c follow from a, d and the features. Without `bias` its gradient is empty.
void ksmm_backward_weight(StableIValue* stack, std::uint64_t, std::uint64_t) {
  constexpr const char* kOp = "ksmm_backward_weight";
  Arguments arguments(stack);
  const Tensor x = arguments.tensor(), d_out = arguments.tensor();
  const std::int64_t a = arguments.integer(), d = arguments.integer();
  const bool last = arguments.flag();
  const Text precision = arguments.text();
  const bool bias = arguments.flag();

  const fretwork::ConstTensorView input = batch_in(kOp, "x", x, last), upstream = batch_in(kOp, "d_out", d_out, last);
  if (a < 1 || d < 1) {
    throw fretwork::Error(kOp, "a and d", "at least 1", std::to_string(a) + " and " + std::to_string(d));
  }
  const std::int64_t features = upstream.size(1);
  const Tensor d_w = empty_like(std::array{a, features / a / d, input.size(1) / a / d, d}, x);
  const Tensor d_bias = empty_like(std::array{bias ? features : 0}, x);
  const auto d_bias_view = bias ? std::optional(out_view(kOp, "d_bias", d_bias)) : std::nullopt;
  Call call(x);
  call.context().precision = precision_named(kOp, precision.view());
  fretwork::ksmm_backward_weight(input, upstream, out_view(kOp, "d_w", d_w), d_bias_view, call.context());
  stack[0] = torch::stable::detail::from(d_w);
  stack[1] = torch::stable::detail::from(d_bias);
}

/// The gradients of a chain without activation in one op: of x, of the bias, and of each weight; those not wanted are
/// empty. Bit n of `needs_weights` asks for weight n's. The bias's comes with the last weight's. Nothing between the
/// factors was saved, so it is computed again as far as it is needed.
void ksmm_chain_backward(StableIValue* stack, std::uint64_t, std::uint64_t) {
  constexpr const char* kOp = "ksmm_chain_backward";
  Arguments arguments(stack);
  const Tensor x = arguments.tensor();
  const std::vector<Tensor> weights = arguments.tensors();
  const Tensor d_out = arguments.tensor();
  const bool last = arguments.flag();
  const Text precision = arguments.text();
  const bool needs_x = arguments.flag();
  const auto needs_weights = static_cast<std::uint64_t>(arguments.integer());
  const bool needs_bias = arguments.flag();

  const fretwork::ConstTensorView input = batch_in(kOp, "x", x, last);
  std::vector<fretwork::ConstTensorView> factors;
  for (const Tensor& w : weights) {
    factors.push_back(view(kOp, "weights", w));
  }
  Call call(x);
  call.context().precision = precision_named(kOp, precision.view());
  const auto product = [&](const fretwork::ConstTensorView& from, const fretwork::ConstTensorView& w) {
    Tensor out = empty_like(batch_sizes(input.size(0), w.size(0) * w.size(1) * w.size(3), last), x);
    fretwork::ksmm(from, w, batch_out(kOp, "out", out, last), call.context(), {});
    return out;
  };

  std::vector<Tensor> made;  // keeps what the views below refer to
  std::vector<fretwork::ConstTensorView> before{input};
  for (std::size_t n = 0; n + 1 < factors.size() && needs_weights >> (n + 1) != 0; ++n) {
    made.push_back(product(before[n], factors[n]));
    before.push_back(batch_in(kOp, "x", made.back(), last));
  }
  const Tensor none = empty_like(std::array<std::int64_t, 1>{0}, x);
  std::vector<Tensor> results(2 + factors.size(), none);
  Tensor d = d_out;
  for (std::size_t n = factors.size(); n-- > 0;) {
    const fretwork::ConstTensorView upstream = batch_in(kOp, "d_out", d, last);
    if ((needs_weights >> n & 1) != 0) {
      std::optional<fretwork::TensorView> d_bias;
      if (needs_bias && n + 1 == factors.size()) {
        results[1] = empty_like(std::array{upstream.size(1)}, x);
        d_bias = out_view(kOp, "d_bias", results[1]);
      }
      results[2 + n] = empty_like(factors[n].shape(), x);
      fretwork::ksmm_backward_weight(before[n], upstream, out_view(kOp, "d_w", results[2 + n]), d_bias, call.context());
    }
    if (!needs_x && (needs_weights & ((std::uint64_t{1} << n) - 1)) == 0) {
      break;
    }
    fretwork::ConstTensorView transposed = factors[n];
    std::swap(transposed.sizes[1], transposed.sizes[2]);
    std::swap(transposed.strides[1], transposed.strides[2]);
    d = product(upstream, transposed);
  }
  results[0] = needs_x ? d : none;
  stack[0] = torch::stable::detail::from(results);
}

fretwork::MaskMode mask_mode(const char* argument, std::string_view name) {
  if (name != "add" && name != "mul") {
    throw fretwork::Error("block_softmax", argument, "\"add\" or \"mul\"", "\"" + std::string(name) + "\"");
  }
  return name == "add" ? fretwork::MaskMode::add : fretwork::MaskMode::mul;
}

void block_softmax(StableIValue* stack, std::uint64_t, std::uint64_t) {
  constexpr const char* kOp = "block_softmax";
  Arguments arguments(stack);
  const Tensor values = arguments.tensor();
  const Text key = arguments.text();
  fretwork::SoftmaxOptions options;
  options.scale = arguments.number();
  const std::optional<Tensor> rpe = arguments.optional_tensor(), key_padding_mask = arguments.optional_tensor(),
                              attn_mask = arguments.optional_tensor();
  const Text key_padding_mode = arguments.text(), attn_mode = arguments.text();

  const auto layout = block_layout(kOp, key);
  options.key_padding_mask_mode = mask_mode("key_padding_mask_mode", key_padding_mode.view());
  options.attn_mask_mode = mask_mode("attn_mask_mode", attn_mode.view());
  options.rpe = view(kOp, "rpe", rpe);
  options.key_padding_mask = view(kOp, "key_padding_mask", key_padding_mask, kFloatingOrBool);
  options.attn_mask = view(kOp, "attn_mask", attn_mask, kFloatingOrBool);
  const fretwork::ConstTensorView input = view(kOp, "values", values);
  const Tensor out = empty_like(input.shape(), values);
  Call call(values);
  fretwork::block_softmax(input, layout, out_view(kOp, "out", out), call.context(), options);
  stack[0] = torch::stable::detail::from(out);
}

/// `rpe` says what shape its gradient has: "none", or a letter for each of its dimensions, 1 where it is broadcast and
/// z, h, m or n where it is full; "11mn", "n" and so on. Sizes themselves would tie a traced graph to one batch.
std::vector<std::int64_t> rpe_shape(std::string_view rpe, const fretwork::ConstTensorView& values,
                                    const fretwork::BlockLayout& layout) {
  std::vector<std::int64_t> sizes;
  for (const char letter : rpe) {
    const auto all = layout.shape();
    sizes.push_back(letter == 'z'   ? values.size(-4)
                    : letter == 'h' ? all[0]
                    : letter == 'm' ? all[1]
                    : letter == 'n' ? all[2]
                                    : 1);
  }
  return sizes;
}

void block_softmax_backward(StableIValue* stack, std::uint64_t, std::uint64_t) {
  constexpr const char* kOp = "block_softmax_backward";
  Arguments arguments(stack);
  const Tensor out = arguments.tensor(), d_out = arguments.tensor();
  const Text key = arguments.text();
  const double scale = arguments.number();
  const Text rpe = arguments.text();
  const auto rpe_dtype = static_cast<std::int32_t>(arguments.integer());

  const auto layout = block_layout(kOp, key);
  const fretwork::ConstTensorView result = view(kOp, "out", out), upstream = view(kOp, "d_out", d_out);
  const bool with_rpe = rpe.view() != "none";
  const Tensor d_values = empty_like(result.shape(), out);
  const Tensor d_rpe =
      empty(with_rpe ? rpe_shape(rpe.view(), result, *layout) : std::vector<std::int64_t>{0}, rpe_dtype, out);
  const auto d_rpe_view = with_rpe ? std::optional(out_view(kOp, "d_rpe", d_rpe)) : std::nullopt;
  Call call(out);
  fretwork::block_softmax_backward(result, upstream, layout, scale, out_view(kOp, "d_values", d_values), d_rpe_view,
                                   call.context());
  stack[0] = torch::stable::detail::from(d_values);
  stack[1] = torch::stable::detail::from(d_rpe);
}

/// Z where the tensor has four dimensions, then the given sizes.
std::vector<std::int64_t> with_batch(const fretwork::ConstTensorView& like, std::initializer_list<std::int64_t> sizes) {
  std::vector<std::int64_t> all;
  if (like.rank == 4) {
    all.push_back(like.size(0));
  }
  all.insert(all.end(), sizes);
  return all;
}

void block_pack(StableIValue* stack, std::uint64_t, std::uint64_t) {
  constexpr const char* kOp = "pack";
  Arguments arguments(stack);
  const Tensor dense = arguments.tensor();
  const Text key = arguments.text();

  const auto layout = block_layout(kOp, key);
  const fretwork::ConstTensorView input = view(kOp, "dense", dense);
  const auto& s = layout->sizes();
  const Tensor values = empty_like(with_batch(input, {layout->nnz(), s.block_rows, s.block_cols}), dense);
  Call call(dense);
  fretwork::block_pack(input, layout, out_view(kOp, "values", values), call.context());
  stack[0] = torch::stable::detail::from(values);
}

void block_unpack(StableIValue* stack, std::uint64_t, std::uint64_t) {
  constexpr const char* kOp = "unpack";
  Arguments arguments(stack);
  const Tensor values = arguments.tensor();
  const Text key = arguments.text();
  const double fill = arguments.number();

  const auto layout = block_layout(kOp, key);
  const fretwork::ConstTensorView input = view(kOp, "values", values);
  const auto all = layout->shape();
  const Tensor dense = empty_like(with_batch(input, {all[0], all[1], all[2]}), values);
  Call call(values);
  fretwork::block_unpack(input, layout, fill, out_view(kOp, "dense", dense), call.context());
  stack[0] = torch::stable::detail::from(dense);
}

void kronecker_to_dense(StableIValue* stack, std::uint64_t, std::uint64_t) {
  constexpr const char* kOp = "to_dense";
  const Tensor w = Arguments(stack).tensor();
  const fretwork::ConstTensorView input = view(kOp, "w", w);
  const Tensor dense = empty_like(fretwork::kronecker::to_dense_shape(input), w);
  Call call(w);
  fretwork::kronecker::to_dense(input, out_view(kOp, "dense", dense), call.context());
  stack[0] = torch::stable::detail::from(dense);
}

void kronecker_from_dense(StableIValue* stack, std::uint64_t, std::uint64_t) {
  constexpr const char* kOp = "from_dense";
  Arguments arguments(stack);
  const Tensor dense = arguments.tensor();
  const std::int64_t a = arguments.integer(), b = arguments.integer(), c = arguments.integer(), d = arguments.integer();

  const fretwork::ConstTensorView input = view(kOp, "dense", dense);
  const auto pattern = fretwork::KroneckerPattern::make({a, b, c, d});
  const Tensor w = empty_like(fretwork::kronecker::from_dense_shape(input, pattern), dense);
  const Tensor outside = empty({}, aoti_torch_dtype_int64(), dense);
  Call call(dense);
  fretwork::kronecker::from_dense(input, out_view(kOp, "w", w), static_cast<std::int64_t*>(outside.mutable_data_ptr()),
                                  call.context());
  stack[0] = torch::stable::detail::from(w);
  stack[1] = torch::stable::detail::from(outside);
}

/// Allocates a result and does nothing: what a call costs before an op does any work.
void nothing(StableIValue* stack, std::uint64_t, std::uint64_t) {
  const Tensor x = Arguments(stack).tensor();
  const auto sizes = x.sizes();
  const Tensor out = empty_like(std::span(sizes.data(), sizes.size()), x);
  stack[0] = torch::stable::detail::from(out);
}

void implement(torch::stable::detail::StableLibrary& m) {
  implement_twins(m, "sdd", &sdd);
  implement_twins(m, "dsd", &dsd);
  implement_twins(m, "dds", &dds);
  implement_twins(m, "ksmm", &ksmm);
  implement_twins(m, "ksmm_chain", &ksmm_chain);
  implement_twins(m, "ksmm_backward_weight", &ksmm_backward_weight);
  m.impl("_ksmm_chain_backward", &ksmm_chain_backward);
  implement_twins(m, "block_softmax", &block_softmax);
  implement_twins(m, "block_softmax_backward", &block_softmax_backward);
  implement_twins(m, "block_pack", &block_pack);
  implement_twins(m, "block_unpack", &block_unpack);
  implement_twins(m, "kronecker_to_dense", &kronecker_to_dense);
  implement_twins(m, "kronecker_from_dense", &kronecker_from_dense);
  m.impl("_nothing", &nothing);
}

}  // namespace

STABLE_TORCH_LIBRARY(fretwork, m) {
  define_twins(
      m,
      "sdd(Tensor a, Tensor b, str layout, bool trans_a, bool trans_b, str precision, bool sum_z, bool sum_h) -> "
      "Tensor");
  define_twins(
      m,
      "dsd(Tensor values, Tensor b, str layout, bool trans_a, bool trans_b, str precision, bool sum_z, bool sum_h) -> "
      "Tensor");
  define_twins(
      m,
      "dds(Tensor a, Tensor values, str layout, bool trans_a, bool trans_b, str precision, bool sum_z, bool sum_h) -> "
      "Tensor");
  define_twins(m, "ksmm(Tensor x, Tensor w, Tensor? bias, str activation, bool bs_last, str precision) -> Tensor");
  define_twins(
      m, "ksmm_chain(Tensor x, Tensor[] weights, Tensor? bias, str activation, bool bs_last, str precision) -> Tensor");
  define_twins(
      m,
      "ksmm_backward_weight(Tensor x, Tensor d_out, SymInt a, SymInt d, bool bs_last, str precision, bool bias) -> "
      "(Tensor, Tensor)");
  m.def(
      "_ksmm_chain_backward(Tensor x, Tensor[] weights, Tensor d_out, bool bs_last, str precision, bool needs_x, int "
      "needs_weights, bool needs_bias) -> Tensor[]");
  define_twins(
      m,
      "block_softmax(Tensor values, str layout, float scale, Tensor? rpe, Tensor? key_padding_mask, Tensor? attn_mask, "
      "str key_padding_mask_mode, str attn_mask_mode) -> Tensor");
  define_twins(
      m,
      "block_softmax_backward(Tensor out, Tensor d_out, str layout, float scale, str rpe, ScalarType rpe_dtype) -> "
      "(Tensor, Tensor)");
  define_twins(m, "block_pack(Tensor dense, str layout) -> Tensor");
  define_twins(m, "block_unpack(Tensor values, str layout, float fill) -> Tensor");
  define_twins(m, "kronecker_to_dense(Tensor w) -> Tensor");
  define_twins(m, "kronecker_from_dense(Tensor dense, int a, int b, int c, int d) -> (Tensor w, Tensor outside)");
  m.def("_nothing(Tensor x) -> Tensor");
}
STABLE_TORCH_LIBRARY_IMPL(fretwork, CPU, m) { implement(m); }
STABLE_TORCH_LIBRARY_IMPL(fretwork, CUDA, m) { implement(m); }
