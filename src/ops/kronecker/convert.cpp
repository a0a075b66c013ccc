// Copies between weights and dense matrices: argument checks, the CPU loops, and the choice of backend.
#include <algorithm>
#include <atomic>
#include <string>

#include "fretwork/error.h"
#include "fretwork/ops.h"
#include "ops/kronecker/problem.h"
#include "pattern/checks.h"

namespace fretwork::kronecker {
namespace {

/// Whether an element is not zero: −0 is, while NaN, infinities and subnormals are not.
template <typename T>
bool is_nonzero(T bits) {
  return static_cast<T>(bits << 1) != 0;
}

template <typename T>
void row_to_dense(const ConvertProblem& p, std::int64_t row) {
  const auto& [a, b, c, d] = p.sizes;
  const std::int64_t i = row / (b * d), j = row / d % b, l = row % d;
  T* const dense = static_cast<T*>(p.dense.data) + row * p.dense.row;
  const T* const w = static_cast<const T*>(p.w.data) + i * p.w.a + j * p.w.b + l * p.w.d;
  for (std::int64_t col = 0; col < a * c * d; ++col) {
    dense[col * p.dense.col] = T{0};
  }
  for (std::int64_t k = 0; k < c; ++k) {
    dense[((i * c + k) * d + l) * p.dense.col] = w[k * p.w.c];
  }
}

/// Gives the first column of a non-zero that the pattern does not hold, or −1.
template <typename T>
std::int64_t row_from_dense(const ConvertProblem& p, std::int64_t row) {
  const auto& [a, b, c, d] = p.sizes;
  const std::int64_t i = row / (b * d), j = row / d % b, l = row % d;
  const T* const dense = static_cast<const T*>(p.dense.data) + row * p.dense.row;
  T* const w = static_cast<T*>(p.w.data) + i * p.w.a + j * p.w.b + l * p.w.d;
  for (std::int64_t k = 0; k < c; ++k) {
    w[k * p.w.c] = dense[((i * c + k) * d + l) * p.dense.col];
  }
  const std::int64_t first = i * c * d, last = first + c * d;
  for (std::int64_t col = 0; col < a * c * d; ++col) {
    if (is_nonzero(dense[col * p.dense.col]) && (col < first || col >= last || col % d != l)) {
      return col;
    }
  }
  return -1;
}

template <typename T>
void run_as(const ConvertProblem& p, Context& context) {
  const std::int64_t rows = p.sizes.a * p.sizes.b * p.sizes.d, cols = p.sizes.a * p.sizes.c * p.sizes.d;
  const std::int64_t grain = std::max<std::int64_t>(1, 4096 / cols);
  if (p.to_dense) {
    context.executor->parallel_for(rows, grain, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t row = begin; row < end; ++row) {
        row_to_dense<T>(p, row);
      }
    });
    return;
  }
  std::atomic<std::int64_t> least = rows * cols;
  context.executor->parallel_for(rows, grain, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t row = begin; row < end; ++row) {
      if (const std::int64_t col = row_from_dense<T>(p, row); col >= 0) {
        const std::int64_t at = row * cols + col;
        for (std::int64_t now = least; at < now && !least.compare_exchange_weak(now, at);) {
        }
      }
    }
  });
  *p.outside = least < rows * cols ? least.load() : -1;
}

void run(const ConvertProblem& p, Context& context) {
  if (context.device.type == DeviceType::cuda) {
    return cuda::convert(p, context);
  }
  switch (p.element_bytes) {
    case 2:
      return run_as<std::uint16_t>(p, context);
    case 4:
      return run_as<std::uint32_t>(p, context);
    default:
      return run_as<std::uint64_t>(p, context);
  }
}

void check_dense(const char* op, const ConstTensorView& dense, const KroneckerPattern& pattern) {
  if (!std::ranges::equal(dense.shape(), pattern.shape())) {
    throw Error(op, "dense", shape_text(pattern.shape()) + " for " + pattern.text(), shape_text(dense.shape()));
  }
}

/// The tensor that is written has the type of the one that is read.
void check_result(const char* op, const char* name, const ConstTensorView& to, const ConstTensorView& from) {
  if (to.dtype != from.dtype) {
    throw Error(op, name, name_of(from.dtype), name_of(to.dtype));
  }
}

ConvertProblem make_problem(const char* op, const ConstTensorView& w, const ConstTensorView& dense,
                            const Context& context) {
  check_device(op, "w", w, context);
  check_device(op, "dense", dense, context);
  ConvertProblem problem;
  problem.sizes = {w.size(0), w.size(1), w.size(2), w.size(3)};
  problem.element_bytes = static_cast<int>(size_of(w.dtype));
  problem.w = {operand_data(w), w.stride(0), w.stride(1), w.stride(2), w.stride(3)};
  problem.dense = {operand_data(dense), dense.stride(0), dense.stride(1)};
  return problem;
}

}  // namespace

std::vector<std::int64_t> to_dense_shape(const ConstTensorView& w) {
  check_floating("to_dense", "w", w);
  const auto pattern = KroneckerPattern::make(check_weights("to_dense", "w", w));
  return {pattern->rows(), pattern->cols()};
}

std::vector<std::int64_t> from_dense_shape(const ConstTensorView& dense, const KroneckerPtr& pattern) {
  check_floating("from_dense", "dense", dense);
  check_dense("from_dense", dense, check_pattern("from_dense", "pattern", pattern));
  const auto& [a, b, c, d] = pattern->sizes();
  return {a, b, c, d};
}

void to_dense(const ConstTensorView& w, const TensorView& dense, Context& context) {
  constexpr const char* kOp = "to_dense";
  check_floating(kOp, "w", w);
  check_dense(kOp, dense, *KroneckerPattern::make(check_weights(kOp, "w", w)));
  check_result(kOp, "dense", dense, w);
  ConvertProblem problem = make_problem(kOp, w, dense, context);
  problem.to_dense = true;
  run(problem, context);
}

void from_dense(const ConstTensorView& dense, const TensorView& w, std::int64_t* outside, Context& context) {
  constexpr const char* kOp = "from_dense";
  check_floating(kOp, "dense", dense);
  check_dense(kOp, dense, *KroneckerPattern::make(check_weights(kOp, "w", w)));
  check_result(kOp, "w", w, dense);
  if (outside == nullptr) {
    throw Error(kOp, "outside", "an address", "null");
  }
  ConvertProblem problem = make_problem(kOp, w, dense, context);
  problem.outside = outside;
  run(problem, context);
}

}  // namespace fretwork::kronecker
