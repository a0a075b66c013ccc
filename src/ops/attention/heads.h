// The batch elements and query heads that share a pattern or a plan.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "ops/attention/problem.h"

namespace fretwork::attention_op {

/// Neighbouring batch elements whose heads have the same things.
template <typename Thing>
struct BatchRange {
  std::int64_t first, count;
  std::span<const std::shared_ptr<const Thing>> things;  ///< one, or one for each head
};

/// `things`: one for all heads, one for each, or one for each (batch element, head); equal ones are the same object.
template <typename Thing>
std::vector<BatchRange<Thing>> batch_ranges(std::span<const std::shared_ptr<const Thing>> things, std::int64_t batch,
                                            std::int64_t heads) {
  if (batch == 1 || std::ssize(things) != batch * heads) {
    return {{0, batch, things}};
  }
  std::vector<BatchRange<Thing>> ranges;
  for (std::int64_t b = 0; b < batch; ++b) {
    const auto own = things.subspan(static_cast<std::size_t>(b * heads), static_cast<std::size_t>(heads));
    if (!ranges.empty() && std::ranges::equal(ranges.back().things, own)) {
      ++ranges.back().count;
    } else {
      ranges.push_back({b, 1, own});
    }
  }
  return ranges;
}

/// Heads with the same Thing, ascending.
template <typename Thing>
struct HeadSet {
  const Thing* thing;
  std::vector<int> heads;
};

/// `things`: one for all heads, or one for each; equal ones are the same object. Sets come in the order of their first
/// heads.
template <typename Thing>
std::vector<HeadSet<Thing>> head_sets(std::span<const std::shared_ptr<const Thing>> things, std::int64_t heads) {
  std::vector<HeadSet<Thing>> sets;
  for (int h = 0; h < heads; ++h) {
    const Thing* const thing = things[things.size() == 1 ? 0 : static_cast<std::size_t>(h)].get();
    auto set = std::find_if(sets.begin(), sets.end(), [&](const HeadSet<Thing>& s) { return s.thing == thing; });
    if (set == sets.end()) {
      set = sets.insert(set, {thing, {}});
      set->heads.reserve(static_cast<std::size_t>(heads - h));
    }
    set->heads.push_back(h);
  }
  return sets;
}

/// Neighbouring batch elements with the same patterns.
using PatternRange = BatchRange<RegularPattern>;
inline std::vector<PatternRange> ranges_of(const Problem& p) {
  return batch_ranges(std::span<const std::shared_ptr<const RegularPattern>>(p.patterns), p.batch, p.heads);
}

}  // namespace fretwork::attention_op
