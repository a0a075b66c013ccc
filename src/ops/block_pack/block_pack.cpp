// Dense to packed blocks and back: what the copies accept, and which backend runs them.
#include <bit>
#include <string>

#include "core/half.h"
#include "fretwork/error.h"
#include "fretwork/ops.h"
#include "ops/block_pack/problem.h"

namespace fretwork {
namespace {

using block_pack_op::Problem;

void check_floating(const char* op, const char* argument, const TensorView& tensor) {
  if (!is_floating(tensor.dtype)) {
    throw Error(op, argument, "float64, float32, float16 or bfloat16", name_of(tensor.dtype));
  }
}

void check_device(const char* op, const char* argument, const TensorView& tensor, const Context& context) {
  if (tensor.device != context.device) {
    throw Error(op, argument, "a tensor on " + name_of(context.device), "one on " + name_of(tensor.device));
  }
}

std::string sizes_text(std::initializer_list<std::int64_t> sizes) {
  std::string text;
  for (const std::int64_t n : sizes) {
    text += (text.empty() ? "" : ", ") + std::to_string(n);
  }
  return text;
}

void check_dense_shape(const char* op, const TensorView& dense, const BlockLayout& layout) {
  const auto& s = layout.sizes();
  const std::int64_t rows = s.rows * s.block_rows, cols = s.cols * s.block_cols;
  const bool matrix = dense.rank == 2 && s.heads == 1;
  const bool right = (matrix || dense.rank == 3 || dense.rank == 4) && dense.size(-1) == cols &&
                     dense.size(-2) == rows && (matrix || dense.size(-3) == s.heads);
  if (!right) {
    const std::string all = sizes_text({s.heads, rows, cols}) + ")";
    throw Error(op, "dense",
                "shape (Z, " + all + " or (" + all + (s.heads == 1 ? " or (" + sizes_text({rows, cols}) + ")" : ""),
                shape_text(dense.shape()));
  }
}

void check_values_shape(const char* op, const TensorView& values, const BlockLayout& layout) {
  const auto& s = layout.sizes();
  const bool right = (values.rank == 3 || values.rank == 4) && values.size(-3) == layout.nnz() &&
                     values.size(-2) == s.block_rows && values.size(-1) == s.block_cols;
  if (!right) {
    const std::string blocks = sizes_text({layout.nnz(), s.block_rows, s.block_cols}) + ")";
    throw Error(op, "values", "shape (Z, " + blocks + " or (" + blocks, shape_text(values.shape()));
  }
}

std::uint64_t bits_of(double fill, DType dtype) {
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
Problem check(const char* op, const TensorView& dense, const TensorView& values, const BlockLayout& layout, bool unpack,
              const Context& context) {
  const TensorView& from = unpack ? values : dense;
  const TensorView& to = unpack ? dense : values;
  const char* const from_name = unpack ? "values" : "dense";
  const char* const to_name = unpack ? "dense" : "values";
  unpack ? check_values_shape(op, values, layout) : check_dense_shape(op, dense, layout);
  check_floating(op, from_name, from);
  check_device(op, from_name, from, context);
  unpack ? check_dense_shape(op, dense, layout) : check_values_shape(op, values, layout);
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
  problem.dense = {dense.data, dense.stride(-4), dense.stride(-3), dense.stride(-2), dense.stride(-1)};
  problem.values = {values.data, values.stride(-4), values.stride(-3), values.stride(-2), values.stride(-1)};
  return problem;
}

void run(const Problem& problem, Context& context) {
  context.device.type == DeviceType::cuda ? block_pack_op::cuda::run(problem, context)
                                          : block_pack_op::cpu::run(problem, context);
}

}  // namespace

void block_pack(const TensorView& dense, const BlockLayout& layout, const TensorView& values, Context& context) {
  run(check("pack", dense, values, layout, false, context), context);
}

void block_unpack(const TensorView& values, const BlockLayout& layout, double fill, const TensorView& dense,
                  Context& context) {
  Problem problem = check("unpack", dense, values, layout, true, context);
  problem.fill = bits_of(fill, values.dtype);
  run(problem, context);
}

}  // namespace fretwork
