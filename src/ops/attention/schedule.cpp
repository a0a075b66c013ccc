// Deals row tiles out to CTAs, and splits those that the others would wait for.
#include "ops/attention/schedule.h"

#include <algorithm>
#include <functional>
#include <limits>
#include <numeric>
#include <queue>
#include <utility>

#include "core/divide.h"

namespace fretwork::attention_op {
namespace {

/// A tile, or a piece of it: `part` counts the pieces of a pair.
struct Piece {
  int tile, begin, steps, part;

  std::int64_t load() const { return kItemOverhead + (part < 0 ? 0 : kPartOverhead) + steps; }
};

/// The pieces of a pair, of at most `longest` steps and those of a tile as even as can be; the longest ones first.
std::vector<Piece> cut_tiles(const std::vector<int>& steps, int repeat, bool empty, int longest) {
  std::vector<Piece> pieces;
  pieces.reserve(steps.size());
  int parts = 0;
  for (int tile = 0; tile < static_cast<int>(steps.size()); ++tile) {
    const std::int64_t all = std::int64_t{steps[static_cast<std::size_t>(tile)]} * repeat;
    const std::int64_t count = std::max<std::int64_t>(1, ceil_div(all, std::int64_t{longest}));
    for (std::int64_t n = 0; n < count && (all > 0 || empty); ++n) {
      const auto begin = static_cast<int>(all * n / count), end = static_cast<int>(all * (n + 1) / count);
      pieces.push_back({tile, begin, end - begin, count > 1 ? parts++ : -1});
    }
  }
  std::stable_sort(pieces.begin(), pieces.end(), [](const Piece& a, const Piece& b) { return a.steps > b.steps; });
  return pieces;
}

/// Pairs go through their pieces together, the longest first. One that takes longer than a CTA's share of such a group
/// would be waited for at the end: those go before all others. Groups are as even as can be: the short tiles of the
/// last one must fill the gaps that its long ones leave, and a single head of 128 causal tiles on 132 CTAs has none to
/// spare. A sixteenth of the steps, in pieces that are short beside the longest, fills what gaps are left at the end of
/// all. Calls add(piece, pair) for each.
template <typename Add>
void each_in_order(const std::vector<Piece>& pieces, const Pairs& pairs, int ctas, Add add) {
  const std::int64_t all = static_cast<std::int64_t>(pairs.batch) * pairs.heads;
  std::int64_t sum = 0;
  for (const Piece& piece : pieces) {
    sum += piece.steps;
  }
  const std::int64_t share = sum * pairs.heads_in_l2 / ctas;
  const auto rest = std::find_if(pieces.begin(), pieces.end(), [&](const Piece& p) { return p.steps <= share; });
  auto last = pieces.end();
  for (std::int64_t left = sum / 16; last != rest && 4 * last[-1].steps < rest->steps; --last) {
    left -= last[-1].steps;
    if (left < 0) {
      break;
    }
  }
  const auto add_all = [&](auto piece, auto stop, std::int64_t begin, std::int64_t end) {
    for (; piece != stop; ++piece) {
      for (std::int64_t n = begin; n < end; ++n) {
        add(*piece, pairs.backwards ? all - 1 - n : n);
      }
    }
  };
  add_all(pieces.begin(), rest, 0, all);
  const std::int64_t groups = ceil_div(all, std::int64_t{pairs.heads_in_l2});
  for (std::int64_t g = 0; g < groups; ++g) {
    add_all(rest, last, all * g / groups, all * (g + 1) / groups);
  }
  add_all(last, pieces.end(), 0, all);
}

/// CTAs by what they have to do so far.
class Loads {
 public:
  explicit Loads(int ctas) {
    for (int c = 0; c < ctas; ++c) {
      least_.emplace(0, c);
    }
  }
  /// The CTA that has least to do and gets this as well.
  int take(std::int64_t load) {
    const auto [before, c] = least_.top();
    least_.pop();
    least_.emplace(before + load, c);
    return c;
  }
  /// All of them and their loads, those with most to do first.
  std::pair<std::vector<int>, LoadsOf> order() && {
    std::pair<std::vector<int>, LoadsOf> made;
    for (; !least_.empty(); least_.pop()) {
      made.first.push_back(least_.top().second);
      made.second.push_back(least_.top().first);
    }
    std::reverse(made.first.begin(), made.first.end());
    std::reverse(made.second.begin(), made.second.end());
    return made;
  }

 private:
  using Load = std::pair<std::int64_t, int>;
  std::priority_queue<Load, std::vector<Load>, std::greater<>> least_;
};

LoadsOf loads_of(const std::vector<Piece>& pieces, const Pairs& pairs, int ctas) {
  Loads loads(ctas);
  each_in_order(pieces, pairs, ctas, [&](const Piece& piece, std::int64_t) { loads.take(piece.load()); });
  return std::move(loads).order().second;
}

std::int64_t mean_of(const LoadsOf& loads, int ctas) {
  return std::accumulate(loads.begin(), loads.end(), std::int64_t{0}) / ctas;
}

/// When all is done: the CTAs of the second kernel start where those of the first have ended, the longest first.
std::int64_t end_of(const LoadsOf& first, const LoadsOf& second, int ctas) {
  std::int64_t end = 0;
  for (std::size_t n = 0; n < static_cast<std::size_t>(ctas); ++n) {
    const std::size_t from_last = static_cast<std::size_t>(ctas) - 1 - n;
    const std::int64_t starts = from_last < first.size() ? first[from_last] : 0;
    end = std::max(end, starts + (n < second.size() ? second[n] : 0));
  }
  return end;
}
std::int64_t end_of(const Cutting& cutting, const LoadsOf& loads, int ctas) {
  std::int64_t end = end_of(cutting.before, loads, ctas);
  for (std::size_t n = 0; n < cutting.after.size(); ++n) {
    const std::int64_t so = end_of(loads, cutting.after[n], ctas);
    end = n == 0 ? so : std::min(end, so);
  }
  return end;
}

int parts_of(const std::vector<Piece>& pieces) {
  int parts = 0;
  for (const Piece& piece : pieces) {
    parts = std::max(parts, piece.part + 1);
  }
  return parts;
}

/// What joining parts takes, in steps: a launch, what their bytes take, and that a row's parts follow one another.
std::int64_t joining(std::int64_t parts, std::int64_t of_longest, int ctas) {
  return 3 + 2 * ceil_div(parts, std::int64_t{ctas}) + of_longest / 16;
}

/// Whole tiles, unless some are waited for for so long that it pays to cut them. Pieces are tried as fractions of the
/// longest tile.
std::vector<Piece> choose_pieces(const std::vector<int>& steps, const Pairs& pairs, int repeat, bool empty, int ctas,
                                 const Cutting& cutting) {
  constexpr int kShortest = 4;  // piece worth starting
  const int most = 4 * ctas;    // parts that there is memory for
  std::vector<Piece> best = cut_tiles(steps, repeat, empty, std::numeric_limits<int>::max());
  if (best.empty()) {
    return best;
  }
  const std::int64_t all = static_cast<std::int64_t>(pairs.batch) * pairs.heads;
  const LoadsOf whole = loads_of(best, pairs, ctas);
  const std::int64_t mean = mean_of(whole, ctas);
  const std::int64_t beside = mean_of(cutting.after.empty() ? cutting.before : cutting.after.front(), ctas);
  std::int64_t least = end_of(cutting, whole, ctas);
  if (least - mean - beside <= std::max<std::int64_t>(8, mean / 16)) {
    return best;
  }
  const int longest = best.front().steps;
  for (int count = 2; longest / count >= std::max<std::int64_t>(kShortest, mean / 6); count += 1 + count / 8) {
    std::vector<Piece> pieces = cut_tiles(steps, repeat, empty, (longest + count - 1) / count);
    const std::int64_t parts = parts_of(pieces) * all;
    if (parts > most) {
      break;
    }
    const std::int64_t load = end_of(cutting, loads_of(pieces, pairs, ctas), ctas) + joining(parts, count, ctas);
    if (load < least) {
      least = load;
      best = std::move(pieces);
    }
  }
  return best;
}

/// Tiles of all pairs that are cut. Parts are numbered pair by pair.
std::vector<Cut> cuts_of(const std::vector<Piece>& pieces, const Pairs& pairs, std::size_t tiles) {
  std::vector<Cut> of_tile(tiles, Cut{0, 0, std::numeric_limits<int>::max(), 0});
  for (const Piece& piece : pieces) {
    if (piece.part >= 0) {
      Cut& cut = of_tile[static_cast<std::size_t>(piece.tile)];
      cut = {piece.tile, 0, std::min(cut.first, piece.part), cut.count + 1};
    }
  }
  std::erase_if(of_tile, [](const Cut& cut) { return cut.count == 0; });
  const int parts = parts_of(pieces);
  std::vector<Cut> cuts;
  for (std::int64_t pair = 0; pair < static_cast<std::int64_t>(pairs.batch) * pairs.heads; ++pair) {
    for (const Cut& cut : of_tile) {
      cuts.push_back({cut.tile, pair, static_cast<int>(pair * parts) + cut.first, cut.count});
    }
  }
  return cuts;
}

}  // namespace

Deal deal_tasks(const std::vector<int>& steps, const Pairs& pairs, int repeat, bool empty, int ctas,
                const Cutting& cutting) {
  const std::vector<Piece> pieces = cutting.longest > 0 ? cut_tiles(steps, repeat, empty, cutting.longest)
                                                        : choose_pieces(steps, pairs, repeat, empty, ctas, cutting);
  const std::int64_t tasks = std::ssize(pieces) * pairs.batch * pairs.heads;
  const auto count = static_cast<int>(std::min<std::int64_t>(ctas, tasks));
  const int parts = parts_of(pieces);
  std::vector<std::vector<Task>> lists(static_cast<std::size_t>(count));
  Loads loads(count);
  each_in_order(pieces, pairs, ctas, [&](const Piece& piece, std::int64_t pair) {
    const int part = piece.part < 0 ? -1 : static_cast<int>(pair * parts) + piece.part;
    lists[static_cast<std::size_t>(loads.take(piece.load()))].push_back(
        {piece.tile, pair, piece.begin, piece.steps, part});
  });
  auto [order, longest_first] = std::move(loads).order();
  Deal deal{{}, cuts_of(pieces, pairs, steps.size()), std::move(longest_first)};
  deal.lists.reserve(lists.size());
  for (const int c : order) {
    deal.lists.push_back(std::move(lists[static_cast<std::size_t>(c)]));
  }
  return deal;
}

std::vector<LoadsOf> ways_to_deal(const std::vector<int>& steps, const Pairs& pairs, int repeat, bool empty, int ctas) {
  std::vector<LoadsOf> ways{loads_of(cut_tiles(steps, repeat, empty, std::numeric_limits<int>::max()), pairs, ctas)};
  const std::vector<Piece> pieces = choose_pieces(steps, pairs, repeat, empty, ctas, {});
  if (const std::int64_t parts = std::int64_t{parts_of(pieces)} * pairs.batch * pairs.heads; parts > 0) {
    for (std::int64_t& load : ways.emplace_back(loads_of(pieces, pairs, ctas))) {
      load += joining(parts, 0, ctas);
    }
  }
  return ways;
}

}  // namespace fretwork::attention_op
