// What the backends receive, after all checks: a Kronecker product, its weight gradient, a copy to or from a dense
// matrix.
#pragma once

#include <cstdint>

#include "core/divide.h"
#include "fretwork/context.h"
#include "fretwork/ops.h"

namespace fretwork::kronecker {

using Sizes = KroneckerPattern::Sizes;

/// The pattern that weights have; throws Error where they have none.
Sizes check_weights(const char* op, const char* argument, const ConstTensorView& w);

/// Batch × features; strides in elements. Batch first has feature == 1, batch last has batch == 1.
struct Matrix {
  void* data = nullptr;
  std::int64_t batch = 0, feature = 0;
};

/// Weights (a,b,c,d); strides in elements.
struct Weights {
  void* data = nullptr;
  std::int64_t a = 0, b = 0, c = 0, d = 0;
};

/// One number per out feature.
struct Vector {
  void* data = nullptr;  ///< or null
  std::int64_t stride = 0;
};

/// y[n,(i,j,l)] = activation(Σ_k w[i,j,k,l]·x[n,(i,k,l)] + bias[(i,j,l)]); nothing is empty.
struct Problem {
  Sizes sizes{};
  std::int64_t batch = 0;
  DType dtype = DType::f32;
  Matrix x, y;
  Weights w;
  Vector bias;
  Activation activation = Activation::none;
  bool last = false;  ///< the batch is the unit axis of x, or would be if there were more than one row
};

/// d_w[i,j,k,l] = Σ_n d_y[n,(i,j,l)]·x[n,(i,k,l)], d_bias = Σ_n d_y[n]; the batch may be empty.
struct WeightProblem {
  Sizes sizes{};
  std::int64_t batch = 0;
  DType dtype = DType::f32;
  Matrix x, d_y;
  Weights d_w;
  Vector d_bias;
};

/// A copy between the weights of a factor and its dense matrix. Elements are bits; strides count elements.
struct ConvertProblem {
  Sizes sizes{};
  int element_bytes = 0;
  bool to_dense = false;
  Weights w;
  struct {
    void* data;
    std::int64_t row, col;
  } dense{};
  std::int64_t* outside = nullptr;  ///< for from_dense: the first non-zero outside the pattern, or −1
};

namespace cpu {
void run(const Problem& problem, Context& context);
void run(const WeightProblem& problem, Context& context);
}  // namespace cpu
namespace cuda {
void run(const Problem& problem, Context& context);
void run(const WeightProblem& problem, Context& context);
void convert(const ConvertProblem& problem, Context& context);
}  // namespace cuda

}  // namespace fretwork::kronecker
