// The query heads that share a pattern or a plan.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

namespace fretwork::attention_op {

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

}  // namespace fretwork::attention_op
