// A copy between the weights of a Kronecker factor and its dense matrix, after all checks.
#pragma once

#include <cstdint>

#include "ops/kronecker/problem.h"

namespace fretwork::kronecker {

/// Elements are bits; strides count elements.
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

namespace cuda {
void convert(const ConvertProblem& problem, Context& context);
}  // namespace cuda

}  // namespace fretwork::kronecker
