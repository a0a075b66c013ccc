// The kernel families of the Kronecker products on a GPU. Each run() returns whether it took the problem; launch.cpp
// asks them in turn. A family that takes a weight gradient computes the bias gradient too, unless its comment says
// otherwise.
#pragma once

#include <span>
#include <vector>

#include "ops/kronecker/problem.h"

namespace fretwork::kronecker {

/// More than a few rows are one kind of problem: a way and its tiles are chosen as if there were this many, so that a
/// layer keeps to one kernel for them all.
inline constexpr std::int64_t kManyRows = 25088;

/// Whether the tensor cores of an architecture multiply a 16-bit type.
inline bool has_mma(DType dtype, int arch) {
  return dtype == DType::f16 ? arch >= 75 : dtype == DType::bf16 && arch >= 80;
}

/// TMA and wgmma on sm_90a, 16-bit types and tf32: batch last, and batch first with d = 1 or where another way to bring
/// the features of one δ together pays.
namespace hopper {
bool run(const Problem& problem, Context& context);
/// As the operands lie, regrouped, with the d products of a block as one dense matrix, with weights that CTAs keep, or
/// the one of them that should be fastest, if another way should not be.
enum class Form { best, direct, regrouped, dense, resident };
/// In tiles of `width` columns, one of widths(), or 0 for what should be fastest.
bool run(const Problem& problem, Context& context, Form form, int width = 0);
std::span<const int> widths();
bool run(const WeightProblem& problem, Context& context);
/// Regrouped, so many rows of the batch at a time (a multiple of 64) whose sums are added up in turn.
bool run(const WeightProblem& problem, Context& context, std::int64_t rows);
}  // namespace hopper

/// Tensor cores on sm_80 and later, batch first with d > 1: neighbouring δ stay together from memory to fragments.
namespace strided {
bool run(const Problem& problem, Context& context);
bool run(const WeightProblem& problem, Context& context);
/// CTAs on their own (sm_80 and later), clusters of them (sm_90a, 16-bit types), or the one that should be faster.
enum class Way { best, alone, clusters };
/// Of CTAs on their own: neighbouring δ, and warps along the batch. Zeros for those that should be fastest.
struct Shape {
  int v = 0, wm = 0;
};
/// Those there are.
std::vector<Shape> shapes(DType dtype, Precision precision);
/// False when the problem, or this way of it, is not for here.
bool run(const Problem& problem, Context& context, Way way, Shape shape = {});
bool run(const WeightProblem& problem, Context& context, Way way);
}  // namespace strided

/// Up to 32 batch rows, any strides: one pass over the weights as they lie; 16-bit types with d even up to 256, reading
/// them again for every 16. Products only.
namespace few {
inline constexpr std::int64_t kMostRows = 32, kMostTileRows = 256;
/// Whether this is the fastest way, not merely one.
bool pays(const Problem& problem, const Context& context);
bool run(const Problem& problem, Context& context);
}  // namespace few

/// Up to 256 batch rows of 16-bit types with d = 1, 2, 4 or a multiple of 8, weights as they lie: loads go straight to
/// the fragments of an mma. Products only.
namespace direct {
inline constexpr std::int64_t kMostRows = 256;
/// Whether this should be the fastest way, where it is one.
bool pays(const Problem& problem);
bool run(const Problem& problem, Context& context);
}  // namespace direct

/// Exact fp32 in large tiles on FFMA (sm_80 and later). Leaves the gradient of the bias to the caller.
namespace ieee {
bool run(const Problem& problem, Context& context);
bool run(const WeightProblem& problem, Context& context);
}  // namespace ieee

/// Adds `pieces` of fp32 (or fp64) sums of `sizes`, which follow each other at `from`, into the strided `to`.
void sum_pieces(const void* from, std::int64_t pieces, DType dtype, void* to, const std::int64_t (&sizes)[4],
                const std::int64_t (&strides)[4], Context& context);

}  // namespace fretwork::kronecker
