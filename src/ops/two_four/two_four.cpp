// The 2:4 operators: argument checks, the problem that backends receive, and the choice of backend.
#include "fretwork/two_four.h"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "fretwork/error.h"
#include "ops/two_four/problem.h"
#include "pattern/checks.h"
#include "runtime/cuda_driver.h"

namespace fretwork {
namespace two_four {
namespace {

bool on_gpu(const Context& context) { return context.device.type == DeviceType::cuda; }

std::string text(std::int64_t n) { return std::to_string(n); }

int axis_of(int dim) { return dim < 0 ? dim + 2 : dim; }

int check_axis(const char* op, int dim) {
  if (dim < -2 || dim > 1) {
    throw Error(op, "dim", "-1, 0 or 1", text(dim));
  }
  return axis_of(dim);
}

void check_dtype(const char* op, const char* argument, const ConstTensorView& t, const Context& context) {
  if (!is_integer(t.dtype) && !is_fp8(t.dtype) &&
      (!is_floating(t.dtype) || (on_gpu(context) && t.dtype == DType::f64))) {
    throw Error(op, argument,
                std::string(on_gpu(context) ? "" : "float64, ") +
                    "float32, float16, bfloat16, int8, uint8, float8_e4m3fn or float8_e5m2",
                name_of(t.dtype));
  }
}

void check_word(const char* op, const char* argument, DType word) {
  constexpr std::array kWords{DType::i8, DType::i16, DType::i32, DType::u8, DType::u16, DType::u32};
  if (std::ranges::find(kWords, word) == kWords.end()) {
    throw Error(op, argument, "int8, int16, int32 or the unsigned types of these sizes", name_of(word));
  }
}

void check_like(const char* op, const char* argument, const ConstTensorView& t, DType dtype, const Context& context) {
  if (t.dtype != dtype) {
    throw Error(op, argument, name_of(dtype), name_of(t.dtype));
  }
  check_device(op, argument, t, context);
}

/// A size of 1 has any stride; it gets one that suits: neighbours along a line, lines at a round distance.
Matrix matrix(const ConstTensorView& t, int axis) {
  const std::int64_t along = t.size(axis) == 1 ? 1 : t.stride(axis);
  const std::int64_t round = (t.size(axis) * std::abs(along) + 63) / 64 * 64;
  return {operand_data(t), t.size(1 - axis) == 1 ? round : t.stride(1 - axis), along};
}

/// A dense matrix whose `dim` has whole groups.
Format check_dense(const char* op, const char* argument, const ConstTensorView& t, int dim, const Context& context) {
  check_dtype(op, argument, t, context);
  if (t.rank != 2) {
    throw Error(op, argument, "a matrix", shape_text(t.shape()));
  }
  const int axis = check_axis(op, dim);
  check_device(op, argument, t, context);
  Format f;
  f.lines = t.size(1 - axis);
  f.k = t.size(axis);
  f.dtype = t.dtype;
  if (f.k % f.group() != 0) {
    throw Error(op, argument, "a multiple of " + text(f.group()) + " along dim " + text(axis), shape_text(t.shape()));
  }
  f.dense = matrix(t, axis);
  f.transposed = axis == 0;
  return f;
}

/// Values and words that fit each other; what the words hold is not looked at.
Format check_plain(const ConstTwoFour& m, const Context& context) {
  constexpr const char* kOp = "TwoFour";
  const ConstTensorView &values = m.values, &words = m.metadata;
  check_dtype(kOp, "values", values, context);
  check_word(kOp, "metadata", words.dtype);
  if (values.rank != 2) {
    throw Error(kOp, "values", "a matrix", shape_text(values.shape()));
  }
  const int axis = check_axis(kOp, m.dim);
  Format f;
  f.lines = values.size(1 - axis);
  f.k = 2 * values.size(axis);
  f.dtype = values.dtype;
  if (f.k % f.group() != 0) {
    throw Error(kOp, "values", "whole groups: a multiple of " + text(f.group() / 2) + " along dim " + text(axis),
                shape_text(values.shape()));
  }
  const std::int64_t count = two_four::words(f.k, f.dtype, words.dtype);
  if (words.rank != 2 || words.size(axis) != count || words.size(1 - axis) != f.lines) {
    const std::int64_t shape[] = {axis == 0 ? count : f.lines, axis == 0 ? f.lines : count};
    throw Error(kOp, "metadata",
                shape_text(shape) + " of " + name_of(words.dtype) + " for values " + shape_text(values.shape()),
                shape_text(words.shape()));
  }
  check_device(kOp, "values", values, context);
  check_device(kOp, "metadata", words, context);
  f.values = matrix(values, axis);
  f.words = matrix(words, axis);
  f.word_bytes = static_cast<int>(size_of(words.dtype));
  f.transposed = axis == 0;
  return f;
}

/// A plain form and the dense matrix that it stands for.
Format check_pair(const char* op, const char* argument, const ConstTensorView& dense, const ConstTwoFour& m,
                  const Context& context) {
  Format f = check_plain(m, context);
  if (!std::ranges::equal(dense.shape(), m.shape())) {
    throw Error(op, argument, shape_text(m.shape()), shape_text(dense.shape()));
  }
  check_like(op, argument, dense, f.dtype, context);
  f.dense = matrix(dense, axis_of(m.dim));
  return f;
}

/// Whether there is nothing to do; then nothing is bad either.
bool is_empty(const Format& f, std::int64_t* bad, const Context& context) {
  if (f.lines > 0 && f.k > 0) {
    return false;
  }
  static constexpr std::int64_t kNone = -1;
  if (bad != nullptr && on_gpu(context)) {
    const fretwork::cuda::DeviceScope scope(context.device.index);
    fretwork::cuda::copy_to_device(bad, &kNone, sizeof kNone, context.stream);
  } else if (bad != nullptr) {
    *bad = kNone;
  }
  return true;
}

template <typename Void>
BasicTensorView<Void> turned(BasicTensorView<Void> t) {
  std::swap(t.sizes[0], t.sizes[1]);
  std::swap(t.strides[0], t.strides[1]);
  return t;
}

template <typename Void>
BasicTensorView<Void> part(BasicTensorView<Void> t, int axis, std::int64_t begin, std::int64_t end) {
  using Byte = std::conditional_t<std::is_const_v<Void>, const std::byte, std::byte>;
  t.data = static_cast<Byte*>(t.data) + begin * t.stride(axis) * static_cast<std::int64_t>(size_of(t.dtype));
  t.sizes[static_cast<std::size_t>(axis)] = end - begin;
  return t;
}

namespace gpu = two_four::cuda;

}  // namespace

std::int64_t group(DType dtype) { return dtype == DType::f32 ? 2 : 4; }

std::int64_t words(std::int64_t k, DType dtype, DType word) {
  const std::int64_t groups = k / group(dtype), each = 2 * static_cast<std::int64_t>(size_of(word));
  return (groups + each - 1) / each;
}

void compress(const ConstTensorView& dense, const TwoFour& out, std::int64_t* bad, Context& context) {
  check_dense("compress", "A", dense, out.dim, context);
  check_word("compress", "metadata_dtype", out.metadata.dtype);
  const Format f = check_pair("compress", "A", dense, out, context);
  if (!is_empty(f, bad, context)) {
    on_gpu(context) ? gpu::compress(f, bad, context) : cpu::compress(f, bad, context);
  }
}

void check(const ConstTensorView& dense, int dim, std::int64_t* bad, Context& context) {
  const Format f = check_dense("check", "A", dense, dim, context);
  if (bad != nullptr && !is_empty(f, bad, context)) {
    on_gpu(context) ? gpu::check(f, bad, context) : cpu::check(f, bad, context);
  }
}

namespace {

void look_at_words(const Format& f, const Matrix& to, bool keep_valid, std::int64_t* bad, Context& context) {
  if (!is_empty(f, bad, context)) {
    on_gpu(context) ? gpu::check_metadata(f, to, keep_valid, bad, context)
                    : cpu::check_metadata(f, to, keep_valid, bad, context);
  }
}

}  // namespace

void check_metadata(const ConstTwoFour& m, std::int64_t* bad, Context& context) {
  const Format f = check_plain(m, context);
  if (bad != nullptr) {
    look_at_words(f, {}, true, bad, context);
  }
}

void canonical(const ConstTwoFour& m, const TensorView& words, bool keep_valid, std::int64_t* bad, Context& context) {
  const Format f = check_plain(m, context);
  if (!std::ranges::equal(words.shape(), m.metadata.shape())) {
    throw Error("TwoFour", "words", shape_text(m.metadata.shape()), shape_text(words.shape()));
  }
  check_like("TwoFour", "words", words, m.metadata.dtype, context);
  look_at_words(f, matrix(words, axis_of(m.dim)), keep_valid, bad, context);
}

void to_dense(const ConstTwoFour& m, const TensorView& dense, Context& context) {
  const Format f = check_pair("to_dense", "out", dense, m, context);
  if (!is_empty(f, nullptr, context)) {
    on_gpu(context) ? gpu::to_dense(f, context) : cpu::to_dense(f, context);
  }
}

void gather(const ConstTensorView& dense, const ConstTensorView& metadata, int dim, const TensorView& values,
            Context& context) {
  const Format f = check_pair("gather", "A", dense, {values, metadata, dim}, context);
  if (!is_empty(f, nullptr, context)) {
    on_gpu(context) ? gpu::gather(f, context) : cpu::gather(f, context);
  }
}

namespace {

void check_squares(const ConstTensorView& dense, std::int64_t group) {
  if (dense.size(0) % group != 0 || dense.size(1) % group != 0) {
    throw Error("prune", "A", "multiples of " + text(group) + " in both dimensions to be transposable",
                shape_text(dense.shape()));
  }
}

}  // namespace

void prune(const ConstTensorView& dense, int dim, bool transposable, const TensorView& out, Context& context) {
  Format f = check_dense("prune", "A", dense, dim, context);
  if (!std::ranges::equal(dense.shape(), out.shape())) {
    throw Error("prune", "out", shape_text(dense.shape()), shape_text(out.shape()));
  }
  check_like("prune", "out", out, f.dtype, context);
  if (transposable) {  // one answer, whichever way it was asked for
    check_squares(dense, f.group());
    f = check_dense("prune", "A", dense, 1, context);
  }
  if (!is_empty(f, nullptr, context)) {
    const Matrix to = matrix(out, f.transposed ? 0 : 1);
    on_gpu(context) ? gpu::prune(f, to, transposable, context) : cpu::prune(f, to, transposable, context);
  }
}

void prune_both(const ConstTensorView& dense, const TwoFour& rows, const TwoFour& cols, Context& context) {
  const Format f = check_dense("prune", "A", dense, 1, context);
  check_squares(dense, f.group());
  for (const auto& [m, axis] : {std::pair{&rows, 1}, std::pair{&cols, 0}}) {
    if (check_axis("prune", m->dim) != axis) {
      throw Error("prune", "dim", text(axis), text(m->dim));
    }
  }
  const Format by_row = check_pair("prune", "A", dense, rows, context);
  const Format by_col = check_pair("prune", "A", dense, cols, context);
  if (!is_empty(f, nullptr, context)) {
    on_gpu(context) ? gpu::prune_both(by_row, by_col, context) : cpu::prune_both(by_row, by_col, context);
  }
}

namespace {

/// A product as its caller sees it: what it and its operands are called.
struct Sides {
  const char *op, *sparse, *dense;
  bool left;  ///< the sparse operand is
};

void check_out_dtype(const char* op, DType dtype, DType out, const Context& context) {
  const bool integers = is_integer(dtype), wide = !integers && !on_gpu(context);
  const bool right = out == DType::f64   ? wide
                     : out == DType::i32 ? integers
                                         : is_floating(out) || is_fp8(out) || out == DType::i8;
  if (!right) {
    throw Error(op, "out_dtype",
                std::string(integers ? "int32, "
                            : wide   ? "float64, "
                                     : "") +
                    "float32, float16, bfloat16, int8, float8_e4m3fn or float8_e5m2 for " + name_of(dtype),
                name_of(out));
  }
}

Vector check_vector(const char* op, const char* argument, const std::optional<ConstTensorView>& t, std::int64_t count,
                    DType dtype, bool or_one, const Context& context) {
  if (!t.has_value()) {
    return {};
  }
  if (!(or_one && t->rank == 0) && (t->rank != 1 || t->size(0) != count)) {
    const std::int64_t shape[] = {count};
    throw Error(op, argument, std::string(or_one ? "() or " : "") + shape_text(shape), shape_text(t->shape()));
  }
  check_like(op, argument, *t, dtype, context);
  return {operand_data(*t), t->stride(0)};
}

const float* check_scalar(const char* op, const char* argument, const std::optional<ConstTensorView>& t,
                          const Context& context) {
  if (!t.has_value()) {
    return nullptr;
  }
  if (t->rank != 0) {
    throw Error(op, argument, "one number ()", shape_text(t->shape()));
  }
  check_like(op, argument, *t, DType::f32, context);
  return static_cast<const float*>(t->data);
}

/// What both dense tensors step through together.
struct Loop {
  std::int64_t count, b, c;
};

/// The columns, then the leading dimensions outwards, neighbours that are one loop in memory joined. Columns stay alone
/// where each has a scale.
std::vector<Loop> loops(const Loop& columns, const ConstTensorView& b, const ConstTensorView& c, bool join_columns) {
  std::vector<Loop> all{columns};
  for (int d = -3; d >= -b.rank; --d) {
    const Loop next{b.size(d), b.stride(d), c.stride(d)};
    Loop& last = all.back();
    if (next.count == 1) {
      continue;
    }
    if (all.size() == 1 && !join_columns) {
      all.push_back(next);
    } else if (last.count == 1) {
      last = next;
    } else if (next.b == last.count * last.b && next.c == last.count * last.c) {
      last.count *= next.count;
    } else {
      all.push_back(next);
    }
  }
  return all;
}

/// Strides of a matrix, with one that suits where a size of 1 has any.
Dense dense(const ConstTensorView& t, std::int64_t rows, std::int64_t cols, std::int64_t row, std::int64_t col) {
  row = rows != 1 ? row : col == 1 ? cols : 1;
  col = cols != 1 ? col : row == 1 ? (rows + 63) / 64 * 64 : 1;
  return {operand_data(t), row, col, 0};
}

/// Runs the last loop but one as the batch, and those outside it one by one.
void run_all(Problem problem, std::span<const Loop> outer, Context& context) {
  if (outer.size() > 1) {
    for (std::int64_t n = 0; n < outer.back().count; ++n) {
      Problem one = problem;
      const auto moved = [n](void* data, std::int64_t stride, DType dtype) {
        return static_cast<std::byte*>(data) + n * stride * static_cast<std::int64_t>(size_of(dtype));
      };
      one.b.data = moved(problem.b.data, outer.back().b, problem.dtype);
      one.c.data = moved(problem.c.data, outer.back().c, problem.out);
      run_all(one, outer.first(outer.size() - 1), context);
    }
    return;
  }
  if (!outer.empty()) {
    problem.batch = outer[0].count;
    problem.b.batch = outer[0].b;
    problem.c.batch = outer[0].c;
  }
  on_gpu(context) ? gpu::run(problem, context) : cpu::run(problem, context);
}

void check_shapes(const Sides& sides, const Format& s, const ConstTensorView& b, const ConstTensorView& out) {
  const int contracted = sides.left ? -2 : -1, free = sides.left ? -1 : -2;
  if (b.rank < 2 || b.size(contracted) != s.k) {
    const std::string k = text(s.k);
    throw Error(sides.op, sides.dense, sides.left ? "(…, " + k + ", N)" : "(…, M, " + k + ")", shape_text(b.shape()));
  }
  std::vector<std::int64_t> shape(b.shape().begin(), b.shape().end());
  shape.end()[contracted] = s.lines;
  shape.end()[free] = b.size(free);
  if (!std::ranges::equal(out.shape(), shape)) {
    throw Error(sides.op, "out", shape_text(shape), shape_text(out.shape()));
  }
}

void multiply(const Sides& sides, const ConstTwoFour& sparse, const ConstTensorView& b, const ConstTensorView& out,
              const Options& options, Context& context) {
  const Format s = check_plain(sparse, context);
  if (s.transposed == sides.left) {
    throw Error(sides.op, sides.sparse,
                std::string("a matrix compressed along the contracted axis, dim ") + (sides.left ? "1" : "0"),
                "dim " + text(axis_of(sparse.dim)));
  }
  check_like(sides.op, sides.dense, b, s.dtype, context);
  check_shapes(sides, s, b, out);
  check_out_dtype(sides.op, s.dtype, out.dtype, context);
  check_device(sides.op, "out", out, context);
  const int row = sides.left ? -2 : -1, col = sides.left ? -1 : -2;  // of b and c as the problem sees them
  Problem p;
  p.m = s.lines;
  p.n = b.size(col);
  p.k = s.k;
  p.dtype = s.dtype;
  p.out = out.dtype;
  p.values = s.values;
  p.words = s.words;
  p.word_bytes = s.word_bytes;
  p.activation = options.activation;
  const std::int64_t a_rows = sides.left ? p.m : p.n, b_cols = sides.left ? p.n : p.m;
  p.bias_f32 = options.bias.has_value() && options.bias->dtype == DType::f32 && size_of(p.out) == 1;
  p.bias = check_vector(sides.op, "bias", options.bias, p.m, p.bias_dtype(), false, context);
  p.scale_out = check_scalar(sides.op, "scale_out", options.scale_out, context);
  p.scale_s = check_vector(sides.op, "scale_a", options.scale_a, a_rows, DType::f32, true, context);
  p.scale_b = check_vector(sides.op, "scale_b", options.scale_b, b_cols, DType::f32, true, context);
  if (!sides.left) {
    std::swap(p.scale_s, p.scale_b);
  }
  if (out.elements() == 0) {
    return;
  }
  const bool one_scale = p.scale_b.data == nullptr || p.scale_b.stride == 0;
  const std::vector<Loop> all = loops({p.n, b.stride(col), out.stride(col)}, b, out, one_scale);
  p.n = all[0].count;
  p.b = dense(b, p.k, p.n, b.stride(row), all[0].b);
  p.c = dense(out, p.m, p.n, out.stride(row), all[0].c);
  run_all(p, std::span(all).subspan(1), context);
}

/// What linear says before its operands are turned to those of a matmul.
void check_linear(const char* op, const ConstTensorView& x, const ConstTwoFour& weight, const Context& context) {
  check_plain(weight, context);
  if (check_axis(op, weight.dim) != 1) {
    throw Error(op, "s", "(out, in) compressed along in, dim 1", "dim " + text(weight.dim));
  }
  if (const std::int64_t k = weight.shape()[1]; x.rank < 1 || x.size(-1) != k) {
    throw Error(op, "x", "(…, " + text(k) + ")", shape_text(x.shape()));
  }
}

/// A vector as a matrix of one row; anything else as it is.
ConstTensorView in_rows(const ConstTensorView& t) {
  if (t.rank != 1) {
    return t;
  }
  const std::array sizes{std::int64_t{1}, t.size(0)}, strides{t.size(0), t.stride(0)};
  return {t.data, t.dtype, sizes, strides, t.device};
}

}  // namespace

void matmul(const ConstTwoFour& a, const ConstTensorView& b, const TensorView& out, Context& context,
            const Options& options) {
  multiply({"matmul", "a", "b", true}, a, b, out, options, context);
}

void matmul(const ConstTensorView& a, const ConstTwoFour& b, const TensorView& out, Context& context,
            const Options& options) {
  multiply({"matmul", "b", "a", false}, b, a, out, options, context);
}

void linear(const ConstTensorView& x, const ConstTwoFour& weight, const TensorView& out, Context& context,
            const Options& options) {
  constexpr Sides kSides{"linear", "s", "x", false};
  check_linear(kSides.op, x, weight, context);
  multiply(kSides, weight.transpose(), in_rows(x), in_rows(out), options, context);
}

namespace {

/// `weight` is what the gradient reads or writes; x is what is like the layer's input.
GradientProblem check_gradient(const char* op, const ConstTwoFour& weight, const char* x_name, const ConstTensorView& x,
                               const ConstTensorView& d_out, const Context& context) {
  if (on_gpu(context)) {
    throw Error(op, "device", "cpu", "cuda");
  }
  GradientProblem p;
  p.s = check_plain(weight, context);
  if (!is_floating(p.s.dtype)) {
    throw Error(op, "values", "float64, float32, float16 or bfloat16", name_of(p.s.dtype));
  }
  if (d_out.rank != 2 || d_out.size(1) != p.s.lines) {
    throw Error(op, "d_out", "(rows, " + text(p.s.lines) + ")", shape_text(d_out.shape()));
  }
  p.n = d_out.size(0);
  if (const std::array shape{p.n, p.s.k}; !std::ranges::equal(x.shape(), shape)) {
    throw Error(op, x_name, shape_text(shape), shape_text(x.shape()));
  }
  check_like(op, "d_out", d_out, p.s.dtype, context);
  check_like(op, x_name, x, p.s.dtype, context);
  p.d_y = {operand_data(d_out), d_out.stride(0), d_out.stride(1)};
  p.x = {operand_data(x), x.stride(0), x.stride(1)};
  return p;
}

}  // namespace

void linear_backward_input(const ConstTensorView& d_out, const ConstTwoFour& weight, const TensorView& d_x,
                           Context& context) {
  constexpr const char* kOp = "linear_backward_input";
  if (check_axis(kOp, weight.dim) != 1) {
    throw Error(kOp, "weight", "(out, in) compressed along in, dim 1", "dim " + text(weight.dim));
  }
  if (const GradientProblem p = check_gradient(kOp, weight, "d_x", d_x, d_out, context); p.n * p.s.k > 0) {
    cpu::input_gradient(p, context);
  }
}

void linear_backward_values(const ConstTensorView& x, const ConstTensorView& d_out, const ConstTensorView& metadata,
                            const TensorView& d_values, Context& context) {
  const ConstTwoFour weight{d_values, metadata, 1};
  const GradientProblem p = check_gradient("linear_backward_values", weight, "x", x, d_out, context);
  if (p.s.lines * p.s.k > 0) {
    cpu::value_gradient(p, context);
  }
}

}  // namespace two_four

template <typename Void>
std::array<std::int64_t, 2> BasicTwoFour<Void>::shape() const {
  const int axis = two_four::check_axis("TwoFour", dim);
  const std::int64_t k = 2 * values.size(axis), lines = values.size(1 - axis);
  return axis == 0 ? std::array{k, lines} : std::array{lines, k};
}

template <typename Void>
BasicTwoFour<Void> BasicTwoFour<Void>::transpose() const {
  return {two_four::turned(values), two_four::turned(metadata), 1 - two_four::check_axis("TwoFour", dim)};
}

template <typename Void>
BasicTwoFour<Void> BasicTwoFour<Void>::lines(std::int64_t begin, std::int64_t end) const {
  const int axis = 1 - two_four::check_axis("TwoFour", dim);
  if (begin < 0 || begin > end || end > values.size(axis)) {
    throw Error("TwoFour", "lines", "a range within [0, " + two_four::text(values.size(axis)) + ")",
                "[" + two_four::text(begin) + ", " + two_four::text(end) + ")");
  }
  return {two_four::part(values, axis, begin, end), two_four::part(metadata, axis, begin, end), dim};
}

template struct BasicTwoFour<void>;
template struct BasicTwoFour<const void>;

}  // namespace fretwork
