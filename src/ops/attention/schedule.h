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

/// A tile of one pair of batch and head, or a piece of it: steps [begin, begin + steps) of those the tile has, which
/// are counted on where they are repeated.
struct Task {
  int tile;
  std::int64_t pair;
  int begin, steps;
  int part;  ///< its number among all pieces, −1 where it is a whole tile
};

/// A tile of one pair whose pieces are the parts [first, first + count), to be joined in this order.
struct Cut {
  int tile;
  std::int64_t pair;
  int first, count;
};

/// The tasks of each CTA in their order, none without any, and the tiles that were cut. CTAs with most to do come
/// first: one that starts where an earlier kernel has ended starts in this order.
struct Deal {
  std::vector<std::vector<Task>> lists;
  std::vector<Cut> cuts;

  int parts() const { return cuts.empty() ? 0 : cuts.back().first + cuts.back().count; }
};

/// What an item costs beside its steps, in steps, and what it costs more where its results are to be joined.
inline constexpr std::int64_t kItemOverhead = 2, kPartOverhead = 2;

/// Each task goes to the CTA that has least to do so far, which is what a queue would do, without one. `steps` are
/// those of each tile; a step is done `repeat` times; `empty` says whether tiles without steps have work to do as well.
/// Tiles that all others would wait for are cut, into pieces of at most `longest` steps where that is not 0.
Deal deal_tasks(const std::vector<int>& steps, const Pairs& pairs, int repeat, bool empty, int ctas, int longest = 0);

}  // namespace fretwork::attention_op
