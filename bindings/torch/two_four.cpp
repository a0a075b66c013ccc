// torch.ops.fretwork's 2:4 operators: what makes, checks and undoes the plain form, and its products.
#include <algorithm>
#include <limits>

#include "call.h"

namespace {

using namespace fretwork_torch;  // NOLINT: what every op here is made of
using fretwork::ConstTensorView, fretwork::ConstTwoFour, fretwork::DType, fretwork::TensorView, fretwork::TwoFour;

constexpr Kinds kElements{"float64, float32, float16, bfloat16, float8_e4m3fn, float8_e5m2, int8 or uint8", true};
constexpr Kinds kWords{"int8, int16, int32, uint8, uint16 or uint32", true};
constexpr Kinds kResult{"int32, float64, float32, float16, bfloat16, float8_e4m3fn, float8_e5m2 or int8", true};

/// A dtype as torch counts them, which is how it comes into an op.
DType dtype_numbered(const char* op, const char* argument, std::int64_t code, const Kinds& kinds) {
  for (const DTypeCode& known : dtype_codes()) {
    if (known.code == code) {
      return known.dtype;
    }
  }
  throw fretwork::Error(op, argument, kinds.words, foreign_dtype_name(static_cast<std::int32_t>(code)));
}

/// What is no axis stays none.
int axis(std::int64_t dim) {
  using Limits = std::numeric_limits<int>;
  return static_cast<int>(std::clamp<std::int64_t>(dim, Limits::min(), Limits::max()));
}

ConstTwoFour sparse(const char* op, const Tensor& values, const Tensor& metadata, std::int64_t dim) {
  return {view(op, "values", values, kElements), view(op, "metadata", metadata, kWords), axis(dim)};
}

/// Lines × positions in memory, shown as the (positions × lines) that a matrix compressed along dim 0 has. What is no
/// matrix gives some sizes; the core refuses it before it looks at the result.
Tensor empty_lines(std::int64_t lines, std::int64_t along, std::int64_t dim, std::int32_t dtype, const Tensor& like) {
  const std::array<std::int64_t, 2> rows{lines, along}, cols{along, lines}, shown{1, std::max<std::int64_t>(along, 1)};
  return dim == 0 ? empty_strided(cols, shown.data(), dtype, like) : empty(rows, dtype, like);
}

/// What a compression is written to.
struct Made {
  Made(const char* op, const ConstTensorView& dense, std::int64_t dim, std::int64_t word, const Tensor& like) {
    const DType words = dtype_numbered(op, "metadata_dtype", word, kWords);
    const std::int64_t lines = dense.size(dim == 0 ? 1 : 0), k = dense.size(dim == 0 ? 0 : 1);
    values = empty_lines(lines, k / 2, dim, dtype_code(like), like);
    metadata = empty_lines(lines, fretwork::two_four::words(k, dense.dtype, words), dim,
                           static_cast<std::int32_t>(word), like);
    matrix = {out_view(op, "values", values, kElements), out_view(op, "metadata", metadata, kWords), axis(dim)};
  }
  Tensor values, metadata;
  TwoFour matrix;
};

std::int64_t* place_of(const Tensor& bad) { return static_cast<std::int64_t*>(bad.mutable_data_ptr()); }

/// Waits for the answer, where it is asked for: nothing leaves this op that is not 2:4.
void refuse_bad_group(const char* op, const Tensor& bad, const ConstTensorView& dense) {
  std::int64_t place = -1;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_item_int64(bad.get(), &place));
  if (place < 0) {
    return;
  }
  const bool pairs = fretwork::two_four::group(dense.dtype) == 2;
  const std::int64_t at[] = {place / dense.size(1), place % dense.size(1)};
  throw fretwork::Error(op, "A",
                        pairs ? "at most 1 non-zero in every 2, as float32 has it (bfloat16 and others: 2 in 4)"
                              : "at most 2 non-zeros in every 4",
                        "more in the group at " + fretwork::shape_text(at));
}

void compress(StableIValue* stack, std::uint64_t, std::uint64_t) {
  constexpr const char* kOp = "compress";
  Arguments arguments(stack);
  const Tensor dense = arguments.tensor();
  const std::int64_t dim = arguments.integer(), word = arguments.integer();
  const bool validate = arguments.flag();

  const ConstTensorView input = view(kOp, "A", dense, kElements);
  const Made made(kOp, input, dim, word, dense);
  Call call(dense);
  if (validate) {
    const Tensor bad = empty({}, aoti_torch_dtype_int64(), dense);
    fretwork::two_four::compress(input, made.matrix, place_of(bad), call.context());
    refuse_bad_group(kOp, bad, input);
  } else {
    fretwork::two_four::compress(input, made.matrix, nullptr, call.context());
  }
  stack[0] = torch::stable::detail::from(made.values);
  stack[1] = torch::stable::detail::from(made.metadata);
}

void check(StableIValue* stack, std::uint64_t, std::uint64_t) {
  constexpr const char* kOp = "check";
  Arguments arguments(stack);
  const Tensor dense = arguments.tensor();
  const std::int64_t dim = arguments.integer();

  const ConstTensorView input = view(kOp, "A", dense, kElements);
  const Tensor bad = empty({}, aoti_torch_dtype_int64(), dense);
  Call call(dense);
  fretwork::two_four::check(input, axis(dim), place_of(bad), call.context());
  stack[0] = torch::stable::detail::from(bad);
}

void canonical(StableIValue* stack, std::uint64_t, std::uint64_t) {
  constexpr const char* kOp = "TwoFour";
  Arguments arguments(stack);
  const Tensor values = arguments.tensor(), metadata = arguments.tensor();
  const std::int64_t dim = arguments.integer();
  const bool keep_valid = arguments.flag();

  const ConstTwoFour matrix = sparse(kOp, values, metadata, dim);
  const bool down = dim == 0;
  const Tensor words = empty_lines(matrix.metadata.size(down ? 1 : 0), matrix.metadata.size(down ? 0 : 1), dim,
                                   dtype_code(metadata), metadata);
  const Tensor bad = empty({}, aoti_torch_dtype_int64(), values);
  Call call(values);
  fretwork::two_four::canonical(matrix, out_view(kOp, "metadata", words, kWords), keep_valid, place_of(bad),
                                call.context());
  stack[0] = torch::stable::detail::from(words);
  stack[1] = torch::stable::detail::from(bad);
}

Tensor expanded(const Tensor& values, const Tensor& metadata, std::int64_t dim) {
  constexpr const char* kOp = "to_dense";
  const ConstTwoFour matrix = sparse(kOp, values, metadata, dim);
  Tensor dense = empty_like(matrix.shape(), values);
  Call call(values);
  fretwork::two_four::to_dense(matrix, out_view(kOp, "dense", dense, kElements), call.context());
  return dense;
}

void to_dense(StableIValue* stack, std::uint64_t, std::uint64_t) {
  Arguments arguments(stack);
  const Tensor values = arguments.tensor(), metadata = arguments.tensor();
  stack[0] = torch::stable::detail::from(expanded(values, metadata, arguments.integer()));
}

Tensor gathered(const Tensor& dense, const Tensor& metadata, std::int64_t dim) {
  constexpr const char* kOp = "gather";
  const ConstTensorView input = view(kOp, "dense", dense, kElements);
  const bool down = dim == 0;
  Tensor values = empty_lines(input.size(down ? 1 : 0), input.size(down ? 0 : 1) / 2, dim, dtype_code(dense), dense);
  Call call(dense);
  fretwork::two_four::gather(input, view(kOp, "metadata", metadata, kWords), axis(dim),
                             out_view(kOp, "values", values, kElements), call.context());
  return values;
}

void gather(StableIValue* stack, std::uint64_t, std::uint64_t) {
  Arguments arguments(stack);
  const Tensor dense = arguments.tensor(), metadata = arguments.tensor();
  stack[0] = torch::stable::detail::from(gathered(dense, metadata, arguments.integer()));
}

void prune(StableIValue* stack, std::uint64_t, std::uint64_t) {
  constexpr const char* kOp = "prune";
  Arguments arguments(stack);
  const Tensor dense = arguments.tensor();
  const std::int64_t dim = arguments.integer();
  const bool transposable = arguments.flag();

  const ConstTensorView input = view(kOp, "A", dense, kElements);
  const Tensor out = empty_like(input.shape(), dense);
  Call call(dense);
  fretwork::two_four::prune(input, axis(dim), transposable, out_view(kOp, "out", out, kElements), call.context());
  stack[0] = torch::stable::detail::from(out);
}

void prune_both(StableIValue* stack, std::uint64_t, std::uint64_t) {
  constexpr const char* kOp = "prune_both";
  Arguments arguments(stack);
  const Tensor dense = arguments.tensor();
  const std::int64_t word = arguments.integer();

  const ConstTensorView input = view(kOp, "A", dense, kElements);
  const Made rows(kOp, input, 1, word, dense), cols(kOp, input, 0, word, dense);
  Call call(dense);
  fretwork::two_four::prune_both(input, rows.matrix, cols.matrix, call.context());
  const Tensor results[] = {rows.values, rows.metadata, cols.values, cols.metadata};
  for (std::size_t n = 0; n < std::size(results); ++n) {
    stack[n] = torch::stable::detail::from(results[n]);
  }
}

/// The dtype of a product where none is asked for.
std::int32_t result_code(const Tensor& dense) {
  const std::int32_t code = dtype_code(dense);
  const bool small = code == aoti_torch_dtype_float8_e4m3fn() || code == aoti_torch_dtype_float8_e5m2();
  const bool integer = code == aoti_torch_dtype_int8() || code == aoti_torch_dtype_uint8();
  return integer ? aoti_torch_dtype_int32() : small ? aoti_torch_dtype_bfloat16() : code;
}

/// product: "left" is s·dense, "right" dense·s, and "linear" dense·sᵀ, whose dense may have one dimension.
void matmul(StableIValue* stack, std::uint64_t, std::uint64_t) {
  Arguments arguments(stack);
  const Tensor values = arguments.tensor(), metadata = arguments.tensor(), dense = arguments.tensor();
  const std::optional<Tensor> bias = arguments.optional_tensor();
  const Text activation = arguments.text();
  const std::optional<std::int64_t> out_dtype = arguments.optional_integer();
  const std::optional<Tensor> scale_a = arguments.optional_tensor(), scale_b = arguments.optional_tensor();
  const Text product = arguments.text(), precision = arguments.text();
  const std::optional<Tensor> scale_out = arguments.optional_tensor();

  const bool left = product.view() == "left", linear = product.view() == "linear";
  const char* const op = linear ? "linear" : "matmul";
  const ConstTwoFour s = sparse(op, values, metadata, left || linear ? 1 : 0);
  const ConstTensorView input = view(op, linear ? "x" : left ? "b" : "a", dense, kElements);
  const std::int32_t code = static_cast<std::int32_t>(out_dtype.value_or(result_code(dense)));
  dtype_numbered(op, "out_dtype", code, kResult);  // refuses others before there is a result

  const fretwork::two_four::Options options{.bias = view(op, "bias", bias, kResult),
                                            .activation = activation_named(op, activation.view()),
                                            .scale_a = view(op, "scale_a", scale_a, kResult),
                                            .scale_b = view(op, "scale_b", scale_b, kResult),
                                            .scale_out = view(op, "scale_out", scale_out, kResult)};
  if (linear && input.rank < 1) {
    throw fretwork::Error(op, "x", "(…, " + std::to_string(s.shape()[1]) + ")", fretwork::shape_text(input.shape()));
  }
  if (!linear && input.rank < 2) {
    throw fretwork::Error(op, left ? "b" : "a", "a matrix or a batch of them", fretwork::shape_text(input.shape()));
  }

  std::array<std::int64_t, fretwork::kMaxRank> sizes = input.sizes;
  sizes[static_cast<std::size_t>(input.rank - (left ? 2 : 1))] = left || linear ? s.shape()[0] : s.shape()[1];
  const Tensor out = empty(std::span(sizes).first(static_cast<std::size_t>(input.rank)), code, dense);
  const TensorView output = out_view(op, "out_dtype", out, kResult);
  Call call(dense);
  call.context().precision = precision_named(op, precision.view());
  if (linear) {
    fretwork::two_four::linear(input, s, output, call.context(), options);
  } else if (left) {
    fretwork::two_four::matmul(s, input, output, call.context(), options);
  } else {
    fretwork::two_four::matmul(input, s, output, call.context(), options);
  }
  stack[0] = torch::stable::detail::from(out);
}

/// "linear" without options, for calls in which each argument counts.
void linear(StableIValue* stack, std::uint64_t, std::uint64_t) {
  constexpr const char* kOp = "linear";
  Arguments arguments(stack);
  const Tensor values = arguments.tensor(), metadata = arguments.tensor(), x = arguments.tensor();
  const std::optional<Tensor> bias = arguments.optional_tensor();
  const Text precision = arguments.text();

  const ConstTwoFour s = sparse(kOp, values, metadata, 1);
  const ConstTensorView input = view(kOp, "x", x, kElements);
  if (input.rank < 1) {
    throw fretwork::Error(kOp, "x", "(…, " + std::to_string(s.shape()[1]) + ")", fretwork::shape_text(input.shape()));
  }
  std::array<std::int64_t, fretwork::kMaxRank> sizes = input.sizes;
  sizes[static_cast<std::size_t>(input.rank - 1)] = s.shape()[0];
  const Tensor out = empty(std::span(sizes).first(static_cast<std::size_t>(input.rank)), result_code(x), x);
  Call call(x);
  call.context().precision = precision_named(kOp, precision.view());
  fretwork::two_four::linear(input, s, out_view(kOp, "out_dtype", out, kResult), call.context(),
                             {.bias = view(kOp, "bias", bias, kResult)});
  stack[0] = torch::stable::detail::from(out);
}

Tensor sum_of_rows(const Tensor& matrix) {
  const std::int64_t rows[] = {0};
  return torch::stable::sum(matrix, torch::headeronly::IntHeaderOnlyArrayRef(rows, 1));
}

/// `rows` is d_out as a matrix.
Tensor input_gradient(const Tensor& d_out, const Tensor& rows, const Tensor& values, const Tensor& metadata) {
  if (d_out.is_cuda()) {
    return torch::stable::matmul(d_out, expanded(values, metadata, 1));
  }
  constexpr const char* kOp = "linear_backward_input";
  const ConstTwoFour weight = sparse(kOp, values, metadata, 1);
  const auto leading = d_out.sizes();
  std::vector<std::int64_t> sizes(leading.begin(), leading.end());
  sizes.back() = weight.shape()[1];
  Tensor d_x = empty_like(sizes, d_out);
  const std::array<std::int64_t, 2> shape{rows.size(0), sizes.back()}, strides{sizes.back(), 1};
  const fretwork::ConstTensorView upstream = view(kOp, "d_out", rows);
  Call call(d_out);
  fretwork::two_four::linear_backward_input(
      upstream, weight, {d_x.mutable_data_ptr(), upstream.dtype, shape, strides, upstream.device}, call.context());
  return d_x;
}

Tensor value_gradient(const Tensor& x, const Tensor& rows, const Tensor& metadata) {
  if (rows.is_cuda()) {
    return gathered(torch::stable::matmul(torch::stable::transpose(rows, 0, 1), x), metadata, 1);
  }
  constexpr const char* kOp = "linear_backward_values";
  Tensor d_values = empty_like(std::array{rows.size(1), x.size(1) / 2}, x);
  Call call(rows);
  fretwork::two_four::linear_backward_values(view(kOp, "x", x), view(kOp, "d_out", rows),
                                             view(kOp, "metadata", metadata, kWords),
                                             out_view(kOp, "d_values", d_values), call.context());
  return d_values;
}

/// The gradients of a layer's product x Wᵀ + bias, x (…, in), in one op: of x if there are values, of the values if
/// there is an x, and of the bias. Those not wanted are empty. On a GPU the dense products are torch's own.
void linear_backward(StableIValue* stack, std::uint64_t, std::uint64_t) {
  Arguments arguments(stack);
  const Tensor d_out = arguments.tensor();
  const std::optional<Tensor> x = arguments.optional_tensor(), values = arguments.optional_tensor();
  const Tensor metadata = arguments.tensor();
  const bool needs_bias = arguments.flag();

  const auto rows_of = [](const Tensor& t) { return t.dim() == 2 ? t : torch::stable::flatten(t, 0, -2); };
  const Tensor rows = rows_of(d_out), none = empty_like(std::array<std::int64_t, 1>{0}, d_out);
  const Tensor d_x = values ? input_gradient(d_out, rows, *values, metadata) : none;
  const Tensor d_values = x ? value_gradient(rows_of(*x), rows, metadata) : none;
  stack[0] = torch::stable::detail::from(d_x);
  stack[1] = torch::stable::detail::from(d_values);
  stack[2] = torch::stable::detail::from(needs_bias ? sum_of_rows(rows) : none);
}

void implement(torch::stable::detail::StableLibrary& m) {
  implement_twins(m, "two_four_compress", &compress);
  m.impl("two_four_check", &check);
  m.impl("two_four_canonical", &canonical);
  implement_twins(m, "two_four_to_dense", &to_dense);
  implement_twins(m, "two_four_gather", &gather);
  implement_twins(m, "two_four_prune", &prune);
  implement_twins(m, "two_four_prune_both", &prune_both);
  implement_twins(m, "two_four_matmul", &matmul);
  m.impl("_two_four_linear", &linear);
  m.impl("_two_four_linear_backward", &linear_backward);
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(fretwork, m) {
  define_twins(
      m,
      "two_four_compress(Tensor dense, int dim, ScalarType metadata_dtype, bool validate) -> (Tensor values, Tensor "
      "metadata)");
  m.def("two_four_check(Tensor dense, int dim) -> Tensor");
  m.def(
      "two_four_canonical(Tensor values, Tensor metadata, int dim, bool keep_valid) -> (Tensor metadata, Tensor bad)");
  define_twins(m, "two_four_to_dense(Tensor values, Tensor metadata, int dim) -> Tensor");
  define_twins(m, "two_four_gather(Tensor dense, Tensor metadata, int dim) -> Tensor");
  define_twins(m, "two_four_prune(Tensor dense, int dim, bool transposable) -> Tensor");
  define_twins(
      m,
      "two_four_prune_both(Tensor dense, ScalarType metadata_dtype) -> (Tensor row_values, Tensor row_metadata, Tensor "
      "col_values, Tensor col_metadata)");
  define_twins(
      m,
      "two_four_matmul(Tensor values, Tensor metadata, Tensor dense, Tensor? bias, str activation, ScalarType? "
      "out_dtype, Tensor? scale_a, Tensor? scale_b, str product, str precision, Tensor? scale_out=None) -> "
      "Tensor");
  m.def("_two_four_linear(Tensor values, Tensor metadata, Tensor x, Tensor? bias, str precision) -> Tensor");
  m.def(
      "_two_four_linear_backward(Tensor d_out, Tensor? x, Tensor? values, Tensor metadata, bool needs_bias) -> (Tensor "
      "d_x, Tensor d_values, Tensor d_bias)");
}
STABLE_TORCH_LIBRARY_IMPL(fretwork, CPU, m) { implement(m); }
STABLE_TORCH_LIBRARY_IMPL(fretwork, CUDA, m) { implement(m); }
