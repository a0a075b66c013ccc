// torch.ops.fretwork's attention over regular patterns and its gradient, and SPLAT's operators.
#include "attention.h"

namespace {

using namespace fretwork_torch;  // NOLINT: what every op here is made of

void attention(StableIValue* stack, std::uint64_t, std::uint64_t) {
  constexpr const char* kOp = "attention";
  Arguments arguments(stack);
  const Tensor q = arguments.tensor(), k = arguments.tensor(), v = arguments.tensor();
  const Text names = arguments.text();
  const AttentionArguments features(arguments);
  const std::optional<Tensor> padding = arguments.optional_tensor(), sinks = arguments.optional_tensor();

  const std::vector<fretwork::PatternPtr> patterns = fretwork::parse_patterns(names.view());
  const fretwork::AttentionOptions options = features.options(kOp, q, padding, sinks);
  const fretwork::ConstTensorView queries = view(kOp, "q", q), keys = view(kOp, "k", k), values = view(kOp, "v", v);
  // Operands of another rank give some shape; the core refuses them before it looks at the result.
  const std::int64_t sizes[] = {queries.size(0), queries.size(1), queries.size(2), values.size(3)};
  const Tensor out = empty_like(sizes, q);
  const bool wide = queries.dtype == fretwork::DType::f64;
  const Tensor lse =
      empty(std::span(sizes).first(3), wide ? aoti_torch_dtype_float64() : aoti_torch_dtype_float32(), q);
  Call call(q);
  call.context().precision = precision_named(kOp, features.precision.view());
  fretwork::attention(queries, keys, values, patterns, out_view(kOp, "out", out), out_view(kOp, "lse", lse),
                      call.context(), options);
  stack[0] = torch::stable::detail::from(out);
  stack[1] = torch::stable::detail::from(lse);
}

/// The result alone, without options, for calls in which each argument counts.
void attention_output(StableIValue* stack, std::uint64_t, std::uint64_t) {
  constexpr const char* kOp = "attention";
  Arguments arguments(stack);
  const Tensor q = arguments.tensor(), k = arguments.tensor(), v = arguments.tensor();
  const Text keys = arguments.text(), precision = arguments.text();

  const std::vector<fretwork::PatternPtr> patterns = fretwork::parse_patterns(keys.view());
  const fretwork::ConstTensorView queries = view(kOp, "q", q), values = view(kOp, "v", v);
  const std::int64_t sizes[] = {queries.size(0), queries.size(1), queries.size(2), values.size(3)};
  const Tensor out = empty_like(sizes, q);
  Call call(q);
  call.context().precision = precision_named(kOp, precision.view());
  fretwork::attention(queries, view(kOp, "k", k), values, patterns, out_view(kOp, "out", out), std::nullopt,
                      call.context());
  stack[0] = torch::stable::detail::from(out);
}

void attention_backward(StableIValue* stack, std::uint64_t, std::uint64_t) {
  constexpr const char* kOp = "attention_backward";
  Arguments arguments(stack);
  const Tensor q = arguments.tensor(), k = arguments.tensor(), v = arguments.tensor(), out = arguments.tensor(),
               lse = arguments.tensor(), d_out = arguments.tensor();
  const std::optional<Tensor> d_lse = arguments.optional_tensor();
  const Text names = arguments.text();
  const AttentionArguments features(arguments);
  const bool needs_q = arguments.flag(), needs_k = arguments.flag(), needs_v = arguments.flag(),
             needs_bias = arguments.flag() && features.bias.has_value();
  const std::optional<Tensor> padding = arguments.optional_tensor(), sinks = arguments.optional_tensor();
  const bool needs_sinks = arguments.flag() && sinks.has_value();

  const std::vector<fretwork::PatternPtr> patterns = fretwork::parse_patterns(names.view());
  const fretwork::AttentionOptions options = features.options(kOp, q, padding, sinks);
  const Gradient d_q("d_q", q, needs_q), d_k("d_k", k, needs_k), d_v("d_v", v, needs_v),
      d_bias("d_bias", features.bias.value_or(q), needs_bias), d_sinks("d_sinks", sinks.value_or(q), needs_sinks);
  Call call(q);
  call.context().precision = precision_named(kOp, features.precision.view());
  fretwork::attention_backward(
      view(kOp, "q", q), view(kOp, "k", k), view(kOp, "v", v), patterns, view(kOp, "out", out), view(kOp, "lse", lse),
      view(kOp, "d_out", d_out), view(kOp, "d_lse", d_lse),
      {.q = d_q.place, .k = d_k.place, .v = d_v.place, .bias = d_bias.place, .sinks = d_sinks.place}, call.context(),
      options);
  const Tensor results[] = {d_q.tensor, d_k.tensor, d_v.tensor, d_bias.tensor, d_sinks.tensor};
  for (std::size_t n = 0; n < std::size(results); ++n) {
    stack[n] = torch::stable::detail::from(results[n]);
  }
}

/// The gradients of q, k and v without options, for the same reason. Bits of `needs` ask for them.
void attention_output_backward(StableIValue* stack, std::uint64_t, std::uint64_t) {
  constexpr const char* kOp = "attention_backward";
  Arguments arguments(stack);
  const Tensor q = arguments.tensor(), k = arguments.tensor(), v = arguments.tensor(), out = arguments.tensor(),
               lse = arguments.tensor(), d_out = arguments.tensor();
  const Text keys = arguments.text();
  const std::int64_t needs = arguments.integer();

  const std::vector<fretwork::PatternPtr> patterns = fretwork::parse_patterns(keys.view());
  const Gradient d_q("d_q", q, (needs & 1) != 0), d_k("d_k", k, (needs & 2) != 0), d_v("d_v", v, (needs & 4) != 0);
  Call call(q);
  fretwork::attention_backward(view(kOp, "q", q), view(kOp, "k", k), view(kOp, "v", v), patterns, view(kOp, "out", out),
                               view(kOp, "lse", lse), view(kOp, "d_out", d_out), std::nullopt,
                               {.q = d_q.place, .k = d_k.place, .v = d_v.place}, call.context());
  stack[0] = torch::stable::detail::from(d_q.tensor);
  stack[1] = torch::stable::detail::from(d_k.tensor);
  stack[2] = torch::stable::detail::from(d_v.tensor);
}

/// One of SPLAT's three products: its name, what its operands are called, and the core's function.
struct Product {
  const char *op, *first, *second;
  decltype(&fretwork::r_spmm) run;
};

/// `sizes` are the result's, of the two operands; operands of another rank give some, which the core refuses.
template <typename Sizes>
void product(StableIValue* stack, const Product& p, const Sizes& sizes) {
  Arguments arguments(stack);
  const Tensor a = arguments.tensor(), b = arguments.tensor();
  const Text key = arguments.text();
  const fretwork::PatternPtr pattern = fretwork::parse_pattern(key.view());
  const fretwork::ConstTensorView first = view(p.op, p.first, a), second = view(p.op, p.second, b);
  const Tensor out = empty_like(sizes(first, second, pattern, arguments), a);
  Call call(a);
  p.run(first, second, pattern, out_view(p.op, "out", out), call.context());
  stack[0] = torch::stable::detail::from(out);
}

using Sizes4 = std::array<std::int64_t, 4>;
using fretwork::ConstTensorView, fretwork::PatternPtr;

void r_sddmm(StableIValue* stack, std::uint64_t, std::uint64_t) {
  product(stack, {"r_sddmm", "q", "k", &fretwork::r_sddmm},
          [](const ConstTensorView& q, const ConstTensorView&, const PatternPtr& pattern, Arguments&) {
            return Sizes4{q.size(0), q.size(1), q.size(2), fretwork::r_width(pattern, "r_sddmm")};
          });
}

void r_spmm(StableIValue* stack, std::uint64_t, std::uint64_t) {
  product(stack, {"r_spmm", "x", "v", &fretwork::r_spmm},
          [](const ConstTensorView& x, const ConstTensorView& v, const PatternPtr&, Arguments&) {
            return Sizes4{x.size(0), x.size(1), x.size(2), v.size(3)};
          });
}

/// The number of heads of the result is told.
void r_spmm_transposed(StableIValue* stack, std::uint64_t, std::uint64_t) {
  product(stack, {"r_spmm_transposed", "x", "y", &fretwork::r_spmm_transposed},
          [](const ConstTensorView& x, const ConstTensorView& y, const PatternPtr& pattern, Arguments& arguments) {
            return Sizes4{x.size(0), arguments.integer(), pattern->shape().back(), y.size(3)};
          });
}

void r_softmax(StableIValue* stack, std::uint64_t, std::uint64_t) {
  constexpr const char* kOp = "r_softmax";
  Arguments arguments(stack);
  const Tensor x = arguments.tensor();
  const Text key = arguments.text();
  const double scale = arguments.number();
  const ConstTensorView scores = view(kOp, "x", x);
  const Tensor out = empty_like(scores.shape(), x);
  Call call(x);
  fretwork::r_softmax(scores, fretwork::parse_pattern(key.view()), scale, out_view(kOp, "out", out), call.context());
  stack[0] = torch::stable::detail::from(out);
}

void r_softmax_backward(StableIValue* stack, std::uint64_t, std::uint64_t) {
  constexpr const char* kOp = "r_softmax_backward";
  Arguments arguments(stack);
  const Tensor out = arguments.tensor(), d_out = arguments.tensor();
  const Text key = arguments.text();
  const double scale = arguments.number();
  const ConstTensorView weights = view(kOp, "out", out);
  const Tensor d_x = empty_like(weights.shape(), out);
  Call call(out);
  fretwork::r_softmax_backward(weights, view(kOp, "d_out", d_out), fretwork::parse_pattern(key.view()), scale,
                               out_view(kOp, "d_x", d_x), call.context());
  stack[0] = torch::stable::detail::from(d_x);
}

void implement(torch::stable::detail::StableLibrary& m) {
  implement_twins(m, "attention", &attention);
  m.impl("_attention_output", &attention_output);
  implement_twins(m, "attention_backward", &attention_backward);
  m.impl("_attention_output_backward", &attention_output_backward);
  implement_twins(m, "r_sddmm", &r_sddmm);
  implement_twins(m, "r_softmax", &r_softmax);
  implement_twins(m, "r_softmax_backward", &r_softmax_backward);
  implement_twins(m, "r_spmm", &r_spmm);
  implement_twins(m, "r_spmm_transposed", &r_spmm_transposed);
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(fretwork, m) {
  define_twins(
      m,
      "attention(Tensor q, Tensor k, Tensor v, str patterns, float? scale, Tensor? bias, Tensor? slopes, float "
      "softcap, float dropout_p, Tensor? seed, str precision, Tensor? key_padding_mask=None, Tensor? sinks=None) -> "
      "(Tensor out, Tensor lse)");
  m.def("_attention_output(Tensor q, Tensor k, Tensor v, str patterns, str precision) -> Tensor");
  define_twins(
      m,
      "attention_backward(Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor d_out, Tensor? d_lse, str "
      "patterns, float? scale, Tensor? bias, Tensor? slopes, float softcap, float dropout_p, Tensor? seed, str "
      "precision, bool needs_q, bool needs_k, bool needs_v, bool needs_bias, Tensor? key_padding_mask=None, Tensor? "
      "sinks=None, bool needs_sinks=False) -> (Tensor d_q, Tensor d_k, Tensor d_v, Tensor d_bias, Tensor d_sinks)");
  m.def(
      "_attention_output_backward(Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor d_out, str patterns, "
      "int "
      "needs) -> (Tensor d_q, Tensor d_k, Tensor d_v)");
  define_twins(m, "r_sddmm(Tensor q, Tensor k, str pattern) -> Tensor");
  define_twins(m, "r_softmax(Tensor x, str pattern, float scale) -> Tensor");
  define_twins(m, "r_softmax_backward(Tensor out, Tensor d_out, str pattern, float scale) -> Tensor");
  define_twins(m, "r_spmm(Tensor x, Tensor v, str pattern) -> Tensor");
  define_twins(m, "r_spmm_transposed(Tensor x, Tensor y, str pattern, SymInt heads) -> Tensor");
}
STABLE_TORCH_LIBRARY_IMPL(fretwork, CPU, m) { implement(m); }
STABLE_TORCH_LIBRARY_IMPL(fretwork, CUDA, m) { implement(m); }
