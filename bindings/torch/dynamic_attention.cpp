// torch.ops.fretwork's attention on what only the device knows, and its gradient.
#include "attention.h"

namespace {

using namespace fretwork_torch;  // NOLINT: what every op here is made of

/// The arguments that forward and backward share, in the order of their schemas.
struct Features {
  explicit Features(Arguments& arguments)
      : pattern(arguments.text()),
        mask(arguments.optional_tensor()),
        counts(arguments.optional_tensor()),
        indices(arguments.optional_tensor()),
        selected(arguments.optional_tensor()),
        cu_q(arguments.optional_tensor()),
        cu_k(arguments.optional_tensor()),
        sizes(arguments.integers()),
        more(arguments),
        padding(arguments.optional_tensor()),
        sinks(arguments.optional_tensor()) {}
  Text pattern;
  std::optional<Tensor> mask, counts, indices, selected, cu_q, cu_k;
  std::vector<std::int64_t> sizes;  ///< block rows, block columns, causal, left, right, max_q, max_k; −1: none
  AttentionArguments more;
  std::optional<Tensor> padding, sinks;
};

/// The same as the core has them.
struct Options {
  Options(const char* op, const Features& f, const Tensor& q)
      : pattern(f.pattern.view().empty() ? nullptr : fretwork::parse_pattern(f.pattern.view())) {
    if (f.sizes.size() != 7) {
      throw fretwork::Error(op, "sizes", "7 numbers", std::to_string(f.sizes.size()));
    }
    constexpr Kinds kWhole{"int32", true};
    keys.mask = view(op, "blocks", f.mask, {"bool"});
    keys.counts = view(op, "counts", f.counts, kWhole);
    keys.indices = view(op, "indices", f.indices, kWhole);
    keys.selected = view(op, "indices", f.selected, kWhole);
    keys.cu_q = view(op, "cu_q", f.cu_q, kWhole);
    keys.cu_k = view(op, "cu_k", f.cu_k, kWhole);
    const auto bound = [&](std::size_t n) { return f.sizes[n] < 0 ? std::nullopt : std::optional(f.sizes[n]); };
    keys.block_rows = f.sizes[0];
    keys.block_cols = f.sizes[1];
    keys.causal = f.sizes[2] > 0;
    keys.left = bound(3);
    keys.right = bound(4);
    keys.max_q = bound(5);
    keys.max_k = bound(6);
    options = f.more.options(op, q, f.padding, f.sinks);
  }
  fretwork::PatternPtr pattern;
  fretwork::DeviceKeys keys;
  fretwork::AttentionOptions options;
};

/// Documents are packed, (T, H, D): the core takes four dimensions.
void check_packed(const Tensor& q, const Tensor& k, const Tensor& v) {
  const std::tuple<const char*, const Tensor&, const char*> all[] = {{"q", q, "3 dimensions (Tq, Hq, D)"},
                                                                     {"k", k, "3 dimensions (Tk, Hk, D)"},
                                                                     {"v", v, "3 dimensions (Tk, Hk, Dv)"}};
  for (const auto& [argument, x, sizes] : all) {
    if (x.dim() != 3) {
      throw fretwork::Error("varlen_attention", argument, sizes, std::to_string(x.dim()));
    }
  }
}

/// The same, and statistics (H, T), as one batch element.
template <typename View>
View in_batch(View x, bool packed) {
  if (!packed) {
    return x;
  }
  const auto &n = x.sizes, &s = x.strides;
  switch (x.rank) {
    case 2:
      return View(x.data, x.dtype, std::array<std::int64_t, 3>{1, n[0], n[1]},
                  std::array<std::int64_t, 3>{0, s[0], s[1]}, x.device);
    case 3:
      return View(x.data, x.dtype, std::array<std::int64_t, 4>{1, n[1], n[0], n[2]},
                  std::array<std::int64_t, 4>{0, s[1], s[0], s[2]}, x.device);
    default:
      return x;  // which the core refuses
  }
}
template <typename View>
std::optional<View> in_batch(const std::optional<View>& x, bool packed) {
  return x.has_value() ? std::optional(in_batch(*x, packed)) : std::nullopt;
}

void dynamic_attention(StableIValue* stack, std::uint64_t, std::uint64_t) {
  constexpr const char* kOp = "attention";
  Arguments arguments(stack);
  const Tensor q = arguments.tensor(), k = arguments.tensor(), v = arguments.tensor();
  const Features features(arguments);

  const Options options(kOp, features, q);
  const bool packed = features.cu_q.has_value();
  if (packed) {
    check_packed(q, k, v);
  }
  const fretwork::ConstTensorView queries = in_batch(view(kOp, "q", q), packed),
                                  keys = in_batch(view(kOp, "k", k), packed),
                                  values = in_batch(view(kOp, "v", v), packed);
  const std::int64_t sizes[] = {queries.size(0), queries.size(1), queries.size(2), values.size(3)};
  const std::int64_t rows_first[] = {sizes[2], sizes[1], sizes[3]};
  const Tensor out = packed ? empty_like(rows_first, q) : empty_like(sizes, q);
  const bool wide = queries.dtype == fretwork::DType::f64;
  const Tensor lse = empty(packed ? std::span(sizes).subspan(1, 2) : std::span(sizes).first(3),
                           wide ? aoti_torch_dtype_float64() : aoti_torch_dtype_float32(), q);
  Call call(q);
  call.context().precision = precision_named(kOp, features.more.precision.view());
  fretwork::dynamic_attention(queries, keys, values, options.pattern, options.keys,
                              in_batch(out_view(kOp, "out", out), packed), in_batch(out_view(kOp, "lse", lse), packed),
                              call.context(), options.options);
  stack[0] = torch::stable::detail::from(out);
  stack[1] = torch::stable::detail::from(lse);
}

void dynamic_attention_backward(StableIValue* stack, std::uint64_t, std::uint64_t) {
  constexpr const char* kOp = "attention_backward";
  Arguments arguments(stack);
  const Tensor q = arguments.tensor(), k = arguments.tensor(), v = arguments.tensor(), out = arguments.tensor(),
               lse = arguments.tensor(), d_out = arguments.tensor();
  const std::optional<Tensor> d_lse = arguments.optional_tensor();
  const Features features(arguments);
  const bool needs_q = arguments.flag(), needs_k = arguments.flag(), needs_v = arguments.flag(),
             needs_bias = arguments.flag() && features.more.bias.has_value(),
             needs_sinks = arguments.flag() && features.sinks.has_value();

  const Options options(kOp, features, q);
  const Gradient d_q("d_q", q, needs_q), d_k("d_k", k, needs_k), d_v("d_v", v, needs_v),
      d_bias("d_bias", features.more.bias.value_or(q), needs_bias),
      d_sinks("d_sinks", features.sinks.value_or(q), needs_sinks);
  Call call(q);
  call.context().precision = precision_named(kOp, features.more.precision.view());
  const bool packed = features.cu_q.has_value();
  if (packed) {
    check_packed(q, k, v);
  }
  const auto seen = [&](const char* argument, const auto& tensor) {
    return in_batch(view(kOp, argument, tensor), packed);
  };
  fretwork::dynamic_attention_backward(seen("q", q), seen("k", k), seen("v", v), options.pattern, options.keys,
                                       seen("out", out), seen("lse", lse), seen("d_out", d_out), seen("d_lse", d_lse),
                                       {.q = in_batch(d_q.place, packed),
                                        .k = in_batch(d_k.place, packed),
                                        .v = in_batch(d_v.place, packed),
                                        .bias = d_bias.place,
                                        .sinks = d_sinks.place},
                                       call.context(), options.options);
  const Tensor results[] = {d_q.tensor, d_k.tensor, d_v.tensor, d_bias.tensor, d_sinks.tensor};
  for (std::size_t n = 0; n < std::size(results); ++n) {
    stack[n] = torch::stable::detail::from(results[n]);
  }
}

void implement(torch::stable::detail::StableLibrary& m) {
  implement_twins(m, "dynamic_attention", &dynamic_attention);
  implement_twins(m, "dynamic_attention_backward", &dynamic_attention_backward);
}

const std::string kFeatures =
    "str pattern, Tensor? mask, Tensor? counts, Tensor? indices, Tensor? selected, Tensor? cu_q, Tensor? cu_k, "
    "int[] sizes, float? scale, Tensor? bias, Tensor? slopes, float softcap, float dropout_p, Tensor? seed, str "
    "precision, Tensor? key_padding_mask, Tensor? sinks";

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(fretwork, m) {
  define_twins(m, "dynamic_attention(Tensor q, Tensor k, Tensor v, " + kFeatures + ") -> (Tensor out, Tensor lse)");
  define_twins(m,
               "dynamic_attention_backward(Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor d_out, Tensor? "
               "d_lse, " +
                   kFeatures +
                   ", bool needs_q, bool needs_k, bool needs_v, bool needs_bias, bool needs_sinks) -> (Tensor d_q, "
                   "Tensor d_k, Tensor d_v, Tensor d_bias, Tensor d_sinks)");
}
STABLE_TORCH_LIBRARY_IMPL(fretwork, CPU, m) { implement(m); }
STABLE_TORCH_LIBRARY_IMPL(fretwork, CUDA, m) { implement(m); }
