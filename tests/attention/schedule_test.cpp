// How attention's tiles are dealt out to CTAs: all of them, once, and to all CTAs alike.
#include "ops/attention/schedule.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <numeric>
#include <set>
#include <utility>

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
  const Deal deal = deal_tasks(steps, pairs, 1, false, ctas);
  for (const auto& list : deal.lists) {
    const std::int64_t load =
        std::accumulate(list.begin(), list.end(), std::int64_t{0}, [&](std::int64_t so_far, const Task& task) {
          return so_far + kItemOverhead + (task.part < 0 ? 0 : kPartOverhead) + task.steps;
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
        const Deal deal = deal_tasks(steps, {2, 5, together, backwards}, 1, empty, 7);
        EXPECT_EQ(deal.parts(), 0);
        for (const auto& list : deal.lists) {
          EXPECT_FALSE(list.empty());
          for (const Task& task : list) {
            EXPECT_EQ(task.begin, 0);
            EXPECT_EQ(task.steps, steps[static_cast<std::size_t>(task.tile)]);
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

/// Parts of a tile are numbered on in the order of its steps, and together they are all of them.
TEST(AttentionSchedule, PiecesOfATileFollowOneAnother) {
  std::vector<int> steps = causal_steps(9);
  steps[4] = 0;
  for (const int longest : {1, 5, 16, 60}) {
    for (const int repeat : {1, 3}) {
      const Deal deal = deal_tasks(steps, {2, 5, 3, false}, repeat, true, 7, {longest});
      std::vector<const Task*> parts(static_cast<std::size_t>(deal.parts()));
      std::set<std::pair<int, std::int64_t>> whole;
      for (const auto& list : deal.lists) {
        for (const Task& task : list) {
          EXPECT_LE(task.steps, longest);
          if (task.part < 0) {
            EXPECT_EQ(task.steps, steps[static_cast<std::size_t>(task.tile)] * repeat);
            EXPECT_TRUE(whole.emplace(task.tile, task.pair).second);
          } else {
            const Task*& place = parts.at(static_cast<std::size_t>(task.part));
            EXPECT_EQ(place, nullptr);
            place = &task;
          }
        }
      }
      EXPECT_EQ(whole.size() + deal.cuts.size(), 90u);
      int next = 0;
      for (const Cut& cut : deal.cuts) {
        EXPECT_EQ(cut.first, next);
        next += cut.count;
        int begin = 0;
        for (int n = cut.first; n < next; ++n) {
          const Task* const task = parts[static_cast<std::size_t>(n)];
          ASSERT_NE(task, nullptr);
          EXPECT_TRUE(task->tile == cut.tile && task->pair == cut.pair && task->begin == begin);
          begin += task->steps;
        }
        EXPECT_EQ(begin, steps[static_cast<std::size_t>(cut.tile)] * repeat);
      }
    }
  }
}

/// Rows that see all keys beside a window, one head of causal tiles, few rows against many keys.
TEST(AttentionSchedule, LongTilesAreCutWhereTheyWouldBeWaitedFor) {
  std::vector<int> globals(128, 9);
  globals[0] = 128;
  EXPECT_LT(unevenness(globals, {1, 1, 1, false}, 132), 1.9);
  EXPECT_LT(unevenness(globals, {1, 4, 3, false}, 132), 1.2);
  EXPECT_LT(unevenness(causal_steps(128), {1, 1, 1, false}, 132), 1.1);
  EXPECT_LT(unevenness({256}, {1, 8, 8, false}, 132), 1.05);
  EXPECT_EQ(deal_tasks(globals, {1, 16, 3, false}, 1, true, 132).parts(), 0) << "other tiles fill the time";
  EXPECT_EQ(deal_tasks({7}, {1, 1, 1, false}, 1, true, 132).parts(), 0) << "too short";
}

/// Keys first, then queries, which start where keys have ended.
TEST(AttentionSchedule, OneKernelFillsTheTimeOfAnother) {
  const auto parts = [](const std::vector<int>& steps, const Pairs& keys, int repeat, const Pairs& queries) {
    const auto ways = ways_to_deal(steps, queries, 1, true, 132);
    const Deal first = deal_tasks(steps, keys, repeat, true, 132, {0, {}, ways});
    return std::pair(first.parts(), deal_tasks(steps, queries, 1, true, 132, {0, first.loads, {}}).parts());
  };
  const Pairs one{1, 1, 1, false}, four{1, 4, 4, false}, many{1, 16, 3, false};
  EXPECT_EQ(parts(causal_steps(128), one, 1, one), std::pair(0, 0)) << "long tiles follow short ones";
  EXPECT_EQ(parts(causal_steps(32), four, 1, four), std::pair(0, 0));
  std::vector<int> globals(128, 18);
  globals[0] = 256;
  const auto both = parts(globals, one, 1, one);
  EXPECT_TRUE(both.first > 0 && both.second > 0);
  const auto shared = parts(causal_steps(128), one, 16, many);
  EXPECT_TRUE(shared.first > 0 && shared.second == 0) << "queries of many heads are even";
}

}  // namespace
}  // namespace fretwork::attention_op
