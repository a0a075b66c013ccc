// What the loops of the CPU products share: their operands, and how they run on threads. And the loops that stream one
// operand by, where the other one is small.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "ops/kronecker/cpu/run.h"

namespace fretwork::kronecker::cpu {

/// Pieces of work per thread, if there are as many.
constexpr std::int64_t kPieces = 4;

/// What the loops know of their problem.
class Work {
 public:
  Work(const Problem& problem, const Tiles& tiles, Context& context)
      : p_(problem),
        s_(problem.sizes),
        tiles_(tiles),
        packing_(problem.dtype, tiles),
        sums_packing_(problem.dtype, simd::widened_tiles(problem.dtype)),
        depth_(packing_.padded(s_.c)),
        threads_(std::max(context.executor->concurrency(), 1)),
        wanted_(kPieces * threads_),
        size_(static_cast<std::int64_t>(size_of(problem.dtype))),
        finishes_(problem.bias.data != nullptr || problem.activation != Activation::none),
        far_(problem.batch * s_.a * s_.c * s_.d * size_ > kStreamedBytes),
        stream_(problem.batch * s_.a * s_.b * s_.d * size_ > kStreamedBytes) {}

 protected:
  /// x of diagonal block i by (n, k, l), y by (n, j, l), w by (k, j, l).
  Operand x(std::int64_t i) const { return packing_.block(p_.x, i, s_.c, s_); }
  Operand y(std::int64_t i) const { return packing_.block(p_.y, i, s_.b, s_); }
  Operand w(std::int64_t i) const { return {packing_.at(p_.w.data, i * p_.w.a), p_.w.c, p_.w.b, p_.w.d}; }

  /// The bias on the lanes of a panel, of the type of sums.
  void pack_bias(std::int64_t i, const Chunk& chunk, const Columns::Panel& panel, std::byte* out) const {
    const std::int64_t first = (i * s_.b + panel.first) * s_.d + chunk.first, step = p_.bias.stride;
    sums_packing_.right({packing_.at(p_.bias.data, first * step), 0, s_.d * step, step}, 1, chunk, panel, out);
  }
  std::byte* sum_at(std::byte* sums, std::int64_t n) const { return sums + n * static_cast<std::int64_t>(tiles_.sum); }

  const Problem& p_;
  const Sizes& s_;
  const Tiles& tiles_;
  Packing packing_, sums_packing_;
  std::int64_t depth_;             ///< of packed weights
  std::int64_t threads_, wanted_;  ///< and pieces of work for them
  std::int64_t size_;              ///< bytes of an element
  bool finishes_, far_, stream_;   ///< there is a bias or activation; x does not fit caches; nor does y
};

/// Packs weights, then multiplies; each in jobs that threads share.
template <typename Loop, typename... Most>
void run_as(const Problem& problem, Context& context, Most... most) {
  const Sizes& s = problem.sizes;
  const Loop work(problem, context, most...);
  const Workspace workspace(context, work.weight_bytes());
  std::byte* const packed = static_cast<std::byte*>(workspace.data());
  if (const std::int64_t jobs = work.weight_jobs(); jobs > 0) {
    for_jobs(jobs, kCopy * weights_of(s), context, [&](std::int64_t job) { work.pack_weights(job, packed); });
  }
  context.executor->parallel_for(work.jobs(), grain(work.jobs(), operations_of(s, problem.batch)),
                                 [&](std::int64_t begin, std::int64_t end) {
                                   for (std::int64_t job = begin; job < end; ++job) {
                                     work.multiply(job, packed);
                                   }
                                   simd::finish_streams();
                                 });
}

/// A few batch rows (`few.cpp`).
bool few_rows_fit(const Problem& p);
/// Whether there are weights enough for what comes on top of them: to add up lanes of the same δ, which takes longer
/// the less these fill a vector, or to repeat x.
bool few_rows_pay(const Problem& p);
/// Whether runs of δ do not fill vectors.
bool runs_are_odd(const Problem& p);
void run_few_rows(const Problem& problem, Context& context);

/// A few outputs of a block, with d = 1 (`few.cpp`).
bool few_outputs_fit(const Problem& p);
void run_few_outputs(const Problem& problem, Context& context);

}  // namespace fretwork::kronecker::cpu
