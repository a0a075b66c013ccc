// SPLAT's operators: what they accept, which backend runs them, and where entries stand.
#include <algorithm>
#include <cmath>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "fretwork/error.h"
#include "fretwork/ops.h"
#include "ops/regular/problem.h"
#include "pattern/checks.h"
#include "pattern/text.h"
#include "runtime/plan_cache.h"

namespace fretwork {
namespace regular_op {
namespace {

Rows make_rows(const RegularPattern& pattern) {
  auto entries = pattern.entries();
  return {std::move(entries.first), std::move(entries.columns)};
}

Columns make_columns(const RegularPattern& pattern) {
  const auto rows = rows_of(pattern);
  Columns columns{std::vector<std::int64_t>(static_cast<std::size_t>(pattern.cols()) + 1), {}};
  for (const std::int32_t j : rows->columns) {
    ++columns.first[static_cast<std::size_t>(j) + 1];
  }
  std::partial_sum(columns.first.begin(), columns.first.end(), columns.first.begin());
  std::vector<std::int64_t> next(columns.first.begin(), columns.first.end() - 1);
  columns.entries.resize(rows->columns.size());
  for (std::int64_t i = 0; i < pattern.rows(); ++i) {
    std::int32_t place = 0;
    for (const std::int32_t j : rows->row(i)) {
      columns.entries[static_cast<std::size_t>(next[static_cast<std::size_t>(j)]++)] = {static_cast<std::int32_t>(i),
                                                                                        place++};
    }
  }
  return columns;
}

/// What the cache of widths holds.
struct Width {
  std::int64_t entries;
};

}  // namespace

/// Entries of the longest row, which are not listed for it.
static std::int64_t width_of(const RegularPattern& pattern) {
  static PlanCache<Width>& cache = *std::make_unique<PlanCache<Width>>().release();
  return cache
      .get(hash128(pattern.key()),
           [&] {
             const auto lengths = pattern.row_lengths();
             return Width{lengths.empty() ? 0 : *std::ranges::max_element(lengths)};
           })
      ->entries;
}

std::shared_ptr<const Rows> rows_of(const RegularPattern& pattern) {
  static PlanCache<Rows>& cache = *std::make_unique<PlanCache<Rows>>().release();
  return cache.get(hash128(pattern.key()), [&] { return make_rows(pattern); });
}

std::shared_ptr<const Columns> columns_of(const RegularPattern& pattern) {
  static PlanCache<Columns>& cache = *std::make_unique<PlanCache<Columns>>().release();
  return cache.get(hash128(pattern.key()), [&] { return make_columns(pattern); });
}

}  // namespace regular_op

namespace {

using regular_op::Operand;
using regular_op::Product;
using regular_op::Result;
using regular_op::Softmax;

Operand check_tensor(const char* op, const char* argument, const ConstTensorView& t, const ConstTensorView& like,
                     std::initializer_list<std::int64_t> shape, const Context& context) {
  check_floating(op, argument, t);
  if (t.dtype != like.dtype) {
    throw Error(op, argument, name_of(like.dtype), name_of(t.dtype));
  }
  if (context.device.type == DeviceType::cuda && t.dtype == DType::f64) {
    throw Error(op, argument, "float32, float16 or bfloat16 on a GPU", name_of(t.dtype));
  }
  if (!std::ranges::equal(t.shape(), shape)) {
    throw Error(op, argument, "shape " + shape_text(std::span(shape.begin(), shape.size())), shape_text(t.shape()));
  }
  check_device(op, argument, t, context);
  return {operand_data(t), t.stride(0), t.stride(1), t.stride(2), t.stride(3)};
}

void check_rank(const char* op, const char* argument, const ConstTensorView& t, const char* expected) {
  if (t.rank != 4) {
    throw Error(op, argument, expected, shape_text(t.shape()));
  }
}

/// A tensor and what its callers call it.
struct Named {
  const char* name;
  const ConstTensorView& tensor;
};

/// `kv_heads` is what by_col has, which may be the result.
void product(const char* op, Result result, const Named& values, const Named& by_row, const Named& by_col,
             const PatternPtr& pattern, Context& context) {
  check_rank(op, by_row.name, by_row.tensor, "4 dimensions (B, Hq, Sq, D)");
  check_rank(op, by_col.name, by_col.tensor, "4 dimensions (B, Hk, Sk, D)");
  const RegularPtr regular = check_regular(op, pattern);
  Product p;
  p.result = result;
  p.pattern = regular.get();
  p.dtype = (result == Result::values ? by_row : values).tensor.dtype;
  // Sizes come from what is given, so that an error names what differs from it.
  const ConstTensorView& given = (result == Result::values ? by_row : values).tensor;
  const ConstTensorView& deep = (result == Result::by_row ? by_col : by_row).tensor;
  p.batch = given.size(0);
  p.heads = given.size(1);
  p.kv_heads = by_col.tensor.size(1);
  p.rows = regular->rows();
  p.cols = regular->cols();
  p.depth = deep.size(3);
  p.width = regular_op::width_of(*regular);
  if (p.kv_heads == 0 || p.heads == 0 ? p.heads != p.kv_heads : p.heads % p.kv_heads != 0) {
    throw Error(op, by_col.name, "a number of heads that divides " + std::to_string(p.heads),
                shape_text(by_col.tensor.shape()));
  }
  if (result == Result::values) {  // the queries before the result, which has their rows
    check_tensor(op, by_row.name, by_row.tensor, given, {p.batch, p.heads, p.rows, p.depth}, context);
  }
  p.values = check_tensor(op, values.name, values.tensor, given, {p.batch, p.heads, p.rows, p.width}, context);
  p.by_row = check_tensor(op, by_row.name, by_row.tensor, given, {p.batch, p.heads, p.rows, p.depth}, context);
  p.by_col = check_tensor(op, by_col.name, by_col.tensor, given, {p.batch, p.kv_heads, p.cols, p.depth}, context);
  context.device.type == DeviceType::cuda ? regular_op::cuda::run(p, context) : regular_op::cpu::run(p, context);
}

void softmax(const char* op, const Named& in, const Named* d_out, const Named& out, const PatternPtr& pattern,
             double scale, Context& context) {
  check_rank(op, in.name, in.tensor, "4 dimensions (B, H, Sq, W)");
  const RegularPtr regular = check_regular(op, pattern);
  if (!std::isfinite(scale)) {
    throw Error(op, "scale", "a finite number", text::shortest(scale));
  }
  Softmax s;
  s.dtype = in.tensor.dtype;
  s.pattern = regular.get();
  s.batch = in.tensor.size(0);
  s.heads = in.tensor.size(1);
  s.rows = regular->rows();
  s.width = regular_op::width_of(*regular);
  s.scale = scale;
  const std::initializer_list<std::int64_t> shape = {s.batch, s.heads, s.rows, s.width};
  s.in = check_tensor(op, in.name, in.tensor, in.tensor, shape, context);
  if (d_out != nullptr) {
    s.d_out = check_tensor(op, d_out->name, d_out->tensor, in.tensor, shape, context);
  }
  s.out = check_tensor(op, out.name, out.tensor, in.tensor, shape, context);
  context.device.type == DeviceType::cuda ? regular_op::cuda::run(s, context) : regular_op::cpu::run(s, context);
}

}  // namespace

std::int64_t r_width(const PatternPtr& pattern, const char* op) {
  return regular_op::width_of(*check_regular(op, pattern));
}

void r_sddmm(const ConstTensorView& q, const ConstTensorView& k, const PatternPtr& pattern, const TensorView& out,
             Context& context) {
  product("r_sddmm", Result::values, {"out", out}, {"q", q}, {"k", k}, pattern, context);
}

void r_spmm(const ConstTensorView& x, const ConstTensorView& v, const PatternPtr& pattern, const TensorView& out,
            Context& context) {
  product("r_spmm", Result::by_row, {"x", x}, {"out", out}, {"v", v}, pattern, context);
}

void r_spmm_transposed(const ConstTensorView& x, const ConstTensorView& y, const PatternPtr& pattern,
                       const TensorView& out, Context& context) {
  product("r_spmm_transposed", Result::by_col, {"x", x}, {"y", y}, {"out", out}, pattern, context);
}

void r_softmax(const ConstTensorView& x, const PatternPtr& pattern, double scale, const TensorView& out,
               Context& context) {
  softmax("r_softmax", {"x", x}, nullptr, {"out", out}, pattern, scale, context);
}

void r_softmax_backward(const ConstTensorView& out, const ConstTensorView& d_out, const PatternPtr& pattern,
                        double scale, const TensorView& d_x, Context& context) {
  const Named upstream{"d_out", d_out};
  softmax("r_softmax_backward", {"out", out}, &upstream, {"d_x", d_x}, pattern, scale, context);
}

}  // namespace fretwork
