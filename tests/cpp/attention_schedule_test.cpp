// How attention's tiles are dealt out to CTAs: all of them, once, and to all CTAs alike.
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <numeric>
#include <set>
#include <utility>

#include "ops/attention/schedule.h"

namespace fretwork::attention_op {
namespace {

/// Steps of 128 keys against tiles of 64 queries.
std::vector<int> causal_steps(int tiles) {
  std::vector<int> steps(static_cast<std::size_t>(tiles));
  for (int t = 0; t < tiles; ++t) {
    steps[static_cast<std::size_t>(t)] = 2 * (t + 1);
  }
  return steps;
}

/// The longest load by the mean one.
double unevenness(const std::vector<int>& steps, const Pairs& pairs, int ctas) {
  std::int64_t most = 0, sum = 0, before = std::numeric_limits<std::int64_t>::max();
  const auto lists = deal_tasks(steps, pairs, 1, false, ctas);
  for (const auto& list : lists) {
    const std::int64_t load =
        std::accumulate(list.begin(), list.end(), std::int64_t{0}, [&](std::int64_t so_far, const Task& task) {
          return so_far + kItemOverhead + steps[static_cast<std::size_t>(task.tile)];
        });
    EXPECT_LE(load, before) << "those with most to do come first";
    before = load;
    most = std::max(most, load);
    sum += load;
  }
  return static_cast<double>(most) * ctas / static_cast<double>(sum);
}

TEST(AttentionSchedule, EveryTileOfEveryPairIsDealtOnce) {
  for (const bool empty : {false, true}) {
    for (const bool backwards : {false, true}) {
      for (const int together : {1, 3, 5, 10}) {
        std::vector<int> steps = causal_steps(9);
        steps[4] = 0;
        std::set<std::pair<int, std::int64_t>> seen;
        for (const auto& list : deal_tasks(steps, {2, 5, together, backwards}, 1, empty, 7)) {
          EXPECT_FALSE(list.empty());
          for (const Task& task : list) {
            EXPECT_TRUE(task.pair >= 0 && task.pair < 10);
            EXPECT_TRUE(seen.emplace(task.tile, task.pair).second);
          }
        }
        EXPECT_EQ(seen.size(), empty ? 90u : 80u);
      }
    }
  }
}

/// 132 CTAs, 16 heads of 16,384 and of 4096 tokens, of which 3 and 12 fit the cache: no short group may be left over.
TEST(AttentionSchedule, CausalTilesLeaveNoOneWaiting) {
  EXPECT_LT(unevenness(causal_steps(128), {1, 16, 3, false}, 132), 1.01);
  EXPECT_LT(unevenness(causal_steps(128), {1, 16, 3, true}, 132), 1.01);
  EXPECT_LT(unevenness(causal_steps(32), {1, 16, 12, false}, 132), 1.02);
  EXPECT_LT(unevenness(causal_steps(128), {1, 16, 6, false}, 132), 1.01);
  EXPECT_LT(unevenness(causal_steps(64), {1, 16, 3, false}, 132), 1.015);
  EXPECT_LT(unevenness(causal_steps(256), {1, 32, 1, false}, 132), 1.01);
}

}  // namespace
}  // namespace fretwork::attention_op
