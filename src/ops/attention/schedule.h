// Work distribution: the row tiles of all (batch, head) pairs, dealt out to persistent CTAs.
#pragma once

#include <cstdint>
#include <vector>

namespace fretwork::attention_op {

/// Pairs of batch and head, and how many of them run through their tiles together because their operands fit the cache.
/// Launches go through them forwards and backwards in turn: the cache still has what the one before used last.
struct Pairs {
  int batch, heads, heads_in_l2;
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

/// Of CTAs, the longest first.
using LoadsOf = std::vector<std::int64_t>;

/// The tasks of each CTA in their order, none without any, and the tiles that were cut. CTAs with most to do come
/// first: one that starts where an earlier kernel has ended starts in this order.
struct Deal {
  std::vector<std::vector<Task>> lists;
  std::vector<Cut> cuts;
  LoadsOf loads;  ///< of each list, in steps

  int parts() const { return cuts.empty() ? 0 : cuts.back().first + cuts.back().count; }
};

/// How tiles are cut: into pieces of at most `longest` steps, or where that is 0 as it pays. A kernel may start where
/// the CTAs of the one before it have ended, so that one fills the time in which the other is waited for: `before` has
/// the loads of that one, `after` those of the next one in the ways in which it may be dealt.
struct Cutting {
  int longest = 0;
  LoadsOf before{};
  std::vector<LoadsOf> after{};
};

/// What an item costs beside its steps, in steps, and what it costs more where its results are to be joined.
inline constexpr std::int64_t kItemOverhead = 2, kPartOverhead = 2;

/// Each task goes to the CTA that has least to do so far, which is what a queue would do, without one. `steps` are
/// those of each tile; a step is done `repeat` times; `empty` says whether tiles without steps have work to do as well.
/// Tiles that all others would wait for are cut.
Deal deal_tasks(const std::vector<int>& steps, const Pairs& pairs, int repeat, bool empty, int ctas,
                const Cutting& cutting = {});

/// The loads of all tiles dealt whole, and of tiles cut where they are and joining them costs as much as it does.
std::vector<LoadsOf> ways_to_deal(const std::vector<int>& steps, const Pairs& pairs, int repeat, bool empty, int ctas);

}  // namespace fretwork::attention_op
