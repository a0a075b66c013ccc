// Packing and unpacking: argument checks, the problem that backends receive, and the choice of backend.
#include <bit>
#include <cmath>
#include <limits>
#include <string>

#include "core/half.h"
#include "fretwork/error.h"
#include "fretwork/ops.h"
#include "ops/block_pack/problem.h"
#include "pattern/checks.h"
#include "pattern/text.h"

namespace fretwork {
namespace {

using block_pack_op::Problem;

void check_dense_shape(const char* op, const ConstTensorView& dense, const BlockLayout& layout) {
  const auto& s = layout.sizes();
  const std::int64_t rows = s.rows * s.block_rows, cols = s.cols * s.block_cols;
  const bool matrix = dense.rank == 2 && s.heads == 1;
  const bool right = (matrix || dense.rank == 3 || dense.rank == 4) && dense.size(-1) == cols &&
                     dense.size(-2) == rows && (matrix || dense.size(-3) == s.heads);
  if (!right) {
    const std::string all = shape_text(std::vector{s.heads, rows, cols});
    const std::string one = s.heads == 1 ? shape_text(std::vector{rows, cols}) + ", " : "";
    throw Error(op, "dense", "shape " + one + all + " or (Z, " + all.substr(1), shape_text(dense.shape()));
  }
}

/// The largest finite number of a type. A larger fill would silently become infinite.
double largest(DType dtype) {
  switch (dtype) {
    case DType::f64:
      return std::numeric_limits<double>::max();
    case DType::f32:
      return std::numeric_limits<float>::max();
    case DType::f16:
      return 65504;
    default:
      return 0x1.fep127;
  }
}

std::uint64_t bits_of(double fill, DType dtype) {
  if (std::isfinite(fill) && std::abs(fill) > largest(dtype)) {
    throw Error("unpack", "fill", std::string("a number that ") + name_of(dtype) + " holds, or an infinity",
                text::shortest(fill));
  }
  switch (dtype) {
    case DType::f64:
      return std::bit_cast<std::uint64_t>(fill);
    case DType::f32:
      return std::bit_cast<std::uint32_t>(static_cast<float>(fill));
    case DType::f16:
      return f16_from_float(static_cast<float>(fill));
    default:
      return bf16_from_float(static_cast<float>(fill));
  }
}

/// `from` and `to` are "dense" and "values" in either order; the first is the input.
Problem check(const char* op, const ConstTensorView& dense, const ConstTensorView& values, const BlockLayout& layout,
              bool unpack, const Context& context) {
  const ConstTensorView& from = unpack ? values : dense;
  const ConstTensorView& to = unpack ? dense : values;
  const char* const from_name = unpack ? "values" : "dense";
  const char* const to_name = unpack ? "dense" : "values";
  unpack ? void(check_packed(op, "values", values, layout)) : check_dense_shape(op, dense, layout);
  check_floating(op, from_name, from);
  check_device(op, from_name, from, context);
  unpack ? check_dense_shape(op, dense, layout) : void(check_packed(op, "values", values, layout));
  if (to.dtype != from.dtype) {
    throw Error(op, to_name, name_of(from.dtype), name_of(to.dtype));
  }
  if (to.size(-4) != from.size(-4)) {
    throw Error(op, to_name, "a batch of " + std::to_string(from.size(-4)), shape_text(to.shape()));
  }
  check_device(op, to_name, to, context);
  Problem problem;
  problem.layout = &layout;
  problem.batch = from.size(-4);
  problem.element_bytes = static_cast<int>(size_of(from.dtype));
  problem.unpack = unpack;
  problem.dense = {operand_data(dense), dense.stride(-4), dense.stride(-3), dense.stride(-2), dense.stride(-1)};
  problem.values = {operand_data(values), values.stride(-4), values.stride(-3), values.stride(-2), values.stride(-1)};
  return problem;
}

void run(const Problem& problem, Context& context) {
  context.device.type == DeviceType::cuda ? block_pack_op::cuda::run(problem, context)
                                          : block_pack_op::cpu::run(problem, context);
}

}  // namespace

void block_pack(const ConstTensorView& dense, const BlockLayoutPtr& layout, const TensorView& values,
                Context& context) {
  run(check("pack", dense, values, check_pattern("pack", "layout", layout), false, context), context);
}

void block_unpack(const ConstTensorView& values, const BlockLayoutPtr& layout, double fill, const TensorView& dense,
                  Context& context) {
  Problem problem = check("unpack", dense, values, check_pattern("unpack", "layout", layout), true, context);
  problem.fill = bits_of(fill, values.dtype);
  run(problem, context);
}

}  // namespace fretwork
