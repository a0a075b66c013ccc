// Chains of Kronecker factors: which neighbouring factors are fused, and the fused kernel.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <vector>

#include "ops/kronecker/cuda/params.h"
#include "ops/kronecker/problem.h"

namespace fretwork::kronecker::chain {

/// How the fused kernel divides two factors, with the fewest CTAs in a cluster; nothing where it cannot take them.
std::optional<Monarch> fuse(const Sizes& first, const Sizes& second);

/// What a chain runs on, as far as its plan depends on it.
struct Target {
  std::string arch;  ///< "sm_90a", "sm_80", …, or "cpu"
  DType dtype = DType::f16;
  bool last = false;       ///< the batch is the unit axis of x and y
  std::int64_t batch = 0;  ///< 0 for more than a few hundred rows
};

/// Neighbours that run as one: a factor by itself, or two that are fused.
struct Step {
  std::size_t first, count;
};
/// With operands as contiguous and aligned as they can be.
std::vector<Step> plan(std::span<const Sizes> factors, const Target& target);

namespace cuda {
/// Whether `first` and then `second`, which reads what `first` writes, can be one kernel: the middle never exists.
bool fuses(const Problem& first, const Problem& second, const Context& context);
/// Of the fused kernel's work, as a Monarch has it; 0 takes what was the fastest, and all of them 0 the faster kernel
/// of two.
struct Arrangement {
  int exchange = 0, first_warps = 0, second_warps = 0;
};
/// Runs two that can.
void run(const Problem& first, const Problem& second, Context& context, const Arrangement& arrangement = {});
}  // namespace cuda

}  // namespace fretwork::kronecker::chain
