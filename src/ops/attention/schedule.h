// Who does what: the row tiles of all pairs of batch and head, dealt out to CTAs that stay until all is done.
#pragma once

#include <cstdint>
#include <vector>

namespace fretwork::attention_op {

/// Pairs of batch and head, and how many of them run through their tiles together because their operands fit the cache.
/// Launches go through them forwards and backwards in turn: the cache still has what the one before used last.
struct Pairs {
  int batch, heads, together;
  bool backwards;
};

/// A tile of one pair of batch and head.
struct Task {
  int tile;
  std::int64_t pair;
};

/// What an item costs beside its steps, in steps.
inline constexpr std::int64_t kItemOverhead = 2;

/// The tasks of each CTA in their order: each goes to the one that has least to do so far, which is what a queue would
/// do, without one. `steps` are those of each tile; a step is done `repeat` times; `empty` says whether tiles without
/// steps have work to do as well. At most `ctas` lists, none of them empty, and those with most to do first: a CTA that
/// starts where an earlier kernel has ended starts in this order.
std::vector<std::vector<Task>> deal_tasks(const std::vector<int>& steps, const Pairs& pairs, int repeat, bool empty,
                                          int ctas);

}  // namespace fretwork::attention_op
