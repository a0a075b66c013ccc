// What sdd, dsd and dds accept, the one form they are brought to, and which backend runs it.
#include <algorithm>
#include <string>

#include "fretwork/error.h"
#include "fretwork/ops.h"
#include "ops/block_matmul/problem.h"
#include "pattern/checks.h"

namespace fretwork {
namespace block_matmul {
namespace {

std::string text(std::int64_t n) { return std::to_string(n); }

/// An argument with the name its caller knows it by.
struct Argument {
  const char* name;
  const ConstTensorView& view;
};

/// The checks of one call; each throws an Error that names the op and the argument.
class Check {
 public:
  Check(const char* op, const BlockLayoutPtr& layout, const MatmulOptions& options)
      : op_(op), layout_(check_pattern(op, "layout", layout)), options_(options) {}

  void pair(const Argument& first, const Argument& second) const {
    check_floating(op_, first.name, first.view);
    check_floating(op_, second.name, second.view);
    if (second.view.dtype != first.view.dtype) {
      fail(second.name, std::string(name_of(first.view.dtype)) + " like " + first.name, name_of(second.view.dtype));
    }
    if (second.view.device != first.view.device) {
      fail(second.name, name_of(first.view.device) + " like " + first.name, name_of(second.view.device));
    }
  }

  void values(const ConstTensorView& v) const { check_packed(op_, "values", v, layout_); }

  /// A dense operand whose last two sizes, as stored, are given; −1 leaves one open.
  void dense(const Argument& a, std::int64_t rows, std::int64_t cols) const {
    const ConstTensorView& v = a.view;
    if (v.rank < 2 || v.rank > 4) {
      fail(a.name, "2 to 4 dimensions, (Z, H, rows, columns)", shape_text(v.shape()));
    }
    if ((rows >= 0 && v.size(-2) != rows) || (cols >= 0 && v.size(-1) != cols)) {
      const auto open = [](std::int64_t n, const char* name) { return n < 0 ? name : text(n); };
      fail(a.name, "(…, " + open(rows, "any") + ", " + open(cols, "any") + ")", shape_text(v.shape()));
    }
  }

  /// Heads of a dense operand against the layout's; a one-head layout serves any number unless the result is packed.
  void heads(const Argument& a, bool packed_result) const {
    const std::int64_t heads = a.view.size(-3), own = layout_.heads();
    if (heads != 1 && heads != own && (own != 1 || packed_result)) {
      fail(a.name, own == 1 ? "1 head" : "1 or " + text(own) + " heads", shape_text(a.view.shape()));
    }
  }

  std::int64_t broadcast(const Argument& a, const Argument& b, int dimension, const char* what) const {
    const std::int64_t m = a.view.size(dimension), n = b.view.size(dimension);
    if (m != n && m != 1 && n != 1) {
      fail(b.name, text(m) + " or 1 " + what + ", as " + a.name + " has " + text(m), shape_text(b.view.shape()));
    }
    return m == 1 ? n : m;
  }

  void out(const ConstTensorView& view, std::span<const std::int64_t> shape, const ConstTensorView& like) const {
    if (!std::equal(shape.begin(), shape.end(), view.shape().begin(), view.shape().end())) {
      fail("out", shape_text(shape), shape_text(view.shape()));
    }
    if (view.dtype != like.dtype) {
      fail("out", name_of(like.dtype), name_of(view.dtype));
    }
    if (view.device != like.device) {
      fail("out", name_of(like.device), name_of(view.device));
    }
  }

  /// What running needs beyond shapes.
  void ready(const Context& c, const Argument& a, const Argument& b, const ConstTensorView& out) const {
    if (c.device != a.view.device) {
      fail("context", name_of(a.view.device) + " like the operands", name_of(c.device));
    }
    check_context(op_, c);
    check_data(op_, a.name, a.view);
    check_data(op_, b.name, b.view);
    check_data(op_, "out", out);
  }

  [[noreturn]] void fail(const char* argument, const std::string& expected, const std::string& got) const {
    throw Error(op_, argument, expected, got);
  }

  const BlockLayout& layout() const { return layout_; }
  const char* op() const { return op_; }
  const MatmulOptions& options() const { return options_; }

 private:
  const char* op_;
  const BlockLayout& layout_;
  const MatmulOptions& options_;
};

/// Sizes of a call's result, and the batches behind it.
struct Result {
  std::vector<std::int64_t> shape;
  std::int64_t z = 1, h = 1;
};

Result check_sdd(const Check& check, const ConstTensorView& a, const ConstTensorView& b) {
  const auto& [trans_a, trans_b, sum_z, sum_h] = check.options();
  const auto& s = check.layout().sizes();
  const std::int64_t m = s.rows * s.block_rows, n = s.cols * s.block_cols;
  check.pair({"a", a}, {"b", b});
  check.dense({"a", a}, trans_a ? -1 : m, trans_a ? m : -1);
  const std::int64_t k = a.size(trans_a ? -2 : -1);
  check.dense({"b", b}, trans_b ? n : k, trans_b ? k : n);
  if (sum_h && check.layout().heads() != 1) {
    check.fail("sum_h", "a layout of one head, whose blocks all heads share", text(check.layout().heads()) + " heads");
  }
  const bool packed = !sum_h;
  check.heads({"a", a}, packed);
  check.heads({"b", b}, packed);
  Result result;
  result.z = check.broadcast({"a", a}, {"b", b}, -4, "batches");
  const std::int64_t heads = check.broadcast({"a", a}, {"b", b}, -3, "heads");
  result.h = check.layout().heads() == 1 ? heads : check.layout().heads();
  if (a.rank == 4 || b.rank == 4) {
    result.shape.push_back(sum_z ? 1 : result.z);
  }
  result.shape.insert(result.shape.end(), {check.layout().nnz(), s.block_rows, s.block_cols});
  return result;
}

/// dsd and dds: the sparse operand, the dense one, its contracted size as stored, and where the free size stands.
Result check_spmm(const Check& check, const ConstTensorView& values, const Argument& dense, bool sparse_first) {
  const auto& [trans_a, trans_b, sum_z, sum_h] = check.options();
  const auto& s = check.layout().sizes();
  const bool trans_sparse = sparse_first ? trans_a : trans_b, trans_dense = sparse_first ? trans_b : trans_a;
  const std::int64_t height = s.rows * s.block_rows, width = s.cols * s.block_cols;
  // op(S) contracts its columns when it stands first, its rows when second.
  const std::int64_t contracted = trans_sparse == sparse_first ? height : width;
  const std::int64_t kept = trans_sparse == sparse_first ? width : height;
  if (sparse_first) {
    check.pair({"values", values}, dense);
  } else {
    check.pair(dense, {"values", values});
  }
  check.values(values);
  const bool contracted_is_last = trans_dense == sparse_first;
  check.dense(dense, contracted_is_last ? -1 : contracted, contracted_is_last ? contracted : -1);
  check.heads(dense, false);
  const ConstTensorView& view = dense.view;
  const std::int64_t free = view.size(contracted_is_last ? -2 : -1);
  Result result;
  // Values carry Z as their first of four dimensions, where a dense operand has it too.
  result.z = check.broadcast(sparse_first ? Argument{"values", values} : dense,
                             sparse_first ? dense : Argument{"values", values}, -4, "batches");
  result.h = check.layout().heads() == 1 ? view.size(-3) : check.layout().heads();
  const bool has_z = values.rank == 4 || view.rank == 4;
  if (has_z) {
    result.shape.push_back(sum_z ? 1 : result.z);
  }
  if (has_z || view.rank > 2 || check.layout().heads() != 1) {
    result.shape.push_back(sum_h ? 1 : result.h);
  }
  result.shape.insert(result.shape.end(), {sparse_first ? kept : free, sparse_first ? free : kept});
  return result;
}

/// A dense operand as the problem sees it; a size of 1 has stride 1, which is as good as any.
Matrix matrix(const ConstTensorView& v, bool transposed) {
  const auto stride = [&](int d) { return v.size(d) == 1 ? std::int64_t{1} : v.stride(d); };
  Matrix m{operand_data(v), v.size(-2), v.size(-1), stride(-2), stride(-1), v.stride(-4), v.stride(-3)};
  if (transposed) {
    std::swap(m.rows, m.cols);
    std::swap(m.row_stride, m.col_stride);
  }
  return m;
}

Values packed(const ConstTensorView& v) {
  return {operand_data(v), v.stride(-4), v.stride(-3), v.stride(-2), v.stride(-1)};
}

Problem problem_for(const Check& check, const Result& result, DType dtype) {
  const MatmulOptions& options = check.options();
  Problem problem;
  problem.op = check.op();
  problem.dtype = dtype;
  problem.layout = &check.layout();
  (options.sum_z ? problem.z_sum : problem.z_out) = result.z;
  (options.sum_h ? problem.h_sum : problem.h_out) = result.h;
  return problem;
}

void run(const Problem& problem, Context& context) {
  const bool spmm = problem.kind == Kind::spmm;
  const std::int64_t results = spmm ? problem.out.rows * problem.out.cols * problem.h_out : problem.layout->nnz();
  if (results * problem.z_out == 0) {
    return;
  }
  context.device.type == DeviceType::cuda ? cuda::run(problem, context) : cpu::run(problem, context);
}

void run_spmm(const Check& check, const ConstTensorView& values, const Argument& dense, bool sparse_first,
              const ConstTensorView& out, Context& context) {
  const Result result = check_spmm(check, values, dense, sparse_first);
  check.out(out, result.shape, values);
  check.ready(context, {"values", values}, dense, out);
  Problem problem = problem_for(check, result, values.dtype);
  problem.transposed = sparse_first ? check.options().trans_a : !check.options().trans_b;
  problem.sparse = packed(values);
  problem.right = matrix(dense.view, sparse_first ? check.options().trans_b : !check.options().trans_a);
  problem.out = matrix(out, !sparse_first);
  run(problem, context);
}

}  // namespace
}  // namespace block_matmul

using namespace block_matmul;

std::vector<std::int64_t> sdd_shape(const ConstTensorView& a, const ConstTensorView& b, const BlockLayoutPtr& layout,
                                    const MatmulOptions& options) {
  return check_sdd({"sdd", layout, options}, a, b).shape;
}

std::vector<std::int64_t> dsd_shape(const ConstTensorView& values, const ConstTensorView& b,
                                    const BlockLayoutPtr& layout, const MatmulOptions& options) {
  return check_spmm({"dsd", layout, options}, values, {"b", b}, true).shape;
}

std::vector<std::int64_t> dds_shape(const ConstTensorView& a, const ConstTensorView& values,
                                    const BlockLayoutPtr& layout, const MatmulOptions& options) {
  return check_spmm({"dds", layout, options}, values, {"a", a}, false).shape;
}

void sdd(const ConstTensorView& a, const ConstTensorView& b, const BlockLayoutPtr& layout, const TensorView& out,
         Context& context, const MatmulOptions& options) {
  const Check check("sdd", layout, options);
  const Result result = check_sdd(check, a, b);
  check.out(out, result.shape, a);
  check.ready(context, {"a", a}, {"b", b}, out);
  Problem problem = problem_for(check, result, a.dtype);
  problem.kind = Kind::sdd;
  problem.sparse = packed(out);
  problem.left = matrix(a, options.trans_a);
  problem.right = matrix(b, options.trans_b);
  run(problem, context);
}

void dsd(const ConstTensorView& values, const ConstTensorView& b, const BlockLayoutPtr& layout, const TensorView& out,
         Context& context, const MatmulOptions& options) {
  run_spmm({"dsd", layout, options}, values, {"b", b}, true, out, context);
}

void dds(const ConstTensorView& a, const ConstTensorView& values, const BlockLayoutPtr& layout, const TensorView& out,
         Context& context, const MatmulOptions& options) {
  run_spmm({"dds", layout, options}, values, {"a", a}, false, out, context);
}

}  // namespace fretwork
