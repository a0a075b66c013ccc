// Which of attention's kernels runs on a walk: its shape, its instance and what is listed.
#pragma once

#include <cstdint>

#include "ops/attention/cuda/params.h"
#include "ops/attention/problem.h"
#include "runtime/kernels.h"

namespace fretwork::dynamic_attention_op {

/// What a kernel makes; d_keys and d_values apart where a head dim is above 128.
enum class Pass { forward, d_queries, d_keys_values, d_keys, d_values };

/// The type of its walk (params.h).
enum class WalkType { plain, scatter, gather };

struct Config {
  Pass pass;
  DType dtype;
  int depth, rows;  ///< rows: of 16-bit kernels' tiles
  bool extras;      ///< more than a positive scale is done to scores
  bool tf32 = false;
  WalkType walk = WalkType::plain;

  bool simple() const { return dtype == DType::f32; }
  attention_op::KernelShape shape() const;
  KernelSpec spec() const;
  const Kernel& kernel(int device) const;
};

/// The kernel for tiles of `rows` rows or more. Throws Error where there is none.
Config config_for(Pass pass, const attention_op::Problem& problem, std::int64_t rows, const Context& context);

/// The kernel for the gradient of a bias, exact on FFMA.
struct BiasKernel {
  DType dtype;
  int depth;
  bool keys, row_sums;  ///< keys: rows are keys; row_sums: columns are summed

  attention_op::KernelShape shape() const;
  KernelSpec spec() const;
};
/// The depth of a kernel in float.
int simple_depth(std::int64_t depth);

}  // namespace fretwork::dynamic_attention_op
