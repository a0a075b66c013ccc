// How an sdd's blocks are made into tiles on Hopper: each block once, within what a CTA holds, and to all CTAs alike.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <vector>

#include "blocks/plan_sdd.h"
#include "support/reference.h"

namespace fretwork::blocks {
namespace {

std::shared_ptr<const BlockLayout> random_layout(std::int64_t heads, std::int64_t rows, std::int64_t cols,
                                                 std::int64_t block, double density, unsigned seed) {
  std::vector<std::uint8_t> mask = random_mask(heads * rows * cols, density, seed);
  mask.back() = 1;
  return BlockLayout::make({heads, rows, cols, block, block}, mask);
}

int slots_of(const Strip& s) { return s.counts[0] + s.counts[1] - s.shared; }
int moved(const Strip& s, int slot) { return (s.lines[0] == s.lines[1] ? 64 : 128) + slot * slots_of(s); }

/// What holds for every plan.
void expect_sound(const SddPlan& plan, const BlockLayout& layout, int slot) {
  const auto block = static_cast<int>(layout.sizes().block_rows);
  const std::size_t cells = plan.blocks.size() / plan.columns.size();
  std::map<int, int> seen;
  std::set<std::pair<int, int>> places;
  for (const Strip& s : plan.strips) {
    EXPECT_EQ(s.lines[0] / plan.lines, s.lines[1] / plan.lines) << "a tile has one head";
    for (int w = 0, at = s.first; w < 2; at += s.counts[w++]) {
      EXPECT_LE(s.counts[w] * slot, 256);
      for (int e = at; e < at + s.counts[w]; ++e) {
        const auto entry = static_cast<std::size_t>(e);
        EXPECT_TRUE(places.emplace(s.lines[w], plan.columns[entry]).second);
        for (std::size_t c = entry * cells; c < (entry + 1) * cells; ++c) {
          ++seen[plan.blocks[c]];
        }
      }
    }
    for (int n = 0; n < s.shared; ++n) {
      const auto second = static_cast<std::size_t>(s.first + s.counts[0] + n);
      EXPECT_EQ(plan.columns[second - static_cast<std::size_t>(s.shared)], plan.columns[second]);
    }
    EXPECT_LE(128 * moved(s, slot), plan.stage_bytes);
    EXPECT_LE(slots_of(s), 32);
  }
  seen.erase(-1);
  EXPECT_EQ(seen.size(), static_cast<std::size_t>(layout.nnz()));
  const int each = std::max(block / 64, 1) * std::max(block / slot, 1);
  EXPECT_TRUE(std::all_of(seen.begin(), seen.end(), [&](const auto& b) { return b.second == each; }));
  EXPECT_LE(3 * plan.stage_bytes + std::max(0, plan.reach_bytes - plan.stage_bytes), 225 * 1024) << "three stages";
}

TEST(BlockSddPlan, EveryBlockIsInOneTile) {
  std::mt19937 random(1);
  const auto below = [&](unsigned n) { return static_cast<int>(random() % n); };
  for (int n = 0; n < 200; ++n) {
    const int block = 16 << below(4), slot = std::clamp(block, 16 << below(2), 64);
    const auto layout = random_layout(1 + below(3), 1 + below(40), 1 + below(40), block, 0.01 * (1 + below(99)),
                                      static_cast<unsigned>(n));
    expect_sound(make_sdd_plan(*layout, below(2) == 1, slot, 1 << below(3), 1 + below(20)), *layout, slot);
  }
}

/// 128 lines with six or seven blocks each: full tiles and what is left would be more tiles than CTAs.
TEST(BlockSddPlan, EndsOfLinesAreJoined) {
  for (const unsigned seed : {1u, 2u, 3u}) {
    const auto layout = random_layout(1, 128, 128, 64, 0.05, seed);
    const SddPlan plan = make_sdd_plan(*layout, false, 64, 1, 132);
    expect_sound(plan, *layout, 64);
    EXPECT_LE(plan.strips.size(), 132u);
    EXPECT_LE(moved(plan.strips.front(), 64), 9 * 64);
    EXPECT_TRUE(std::any_of(plan.strips.begin(), plan.strips.end(),
                            [](const Strip& s) { return s.lines[0] != s.lines[1] && s.shared == 0; }));
  }
}

TEST(BlockSddPlan, LinesThatNeedTheSameColumnsShareThem) {
  const auto layout = random_layout(1, 6, 7, 64, 1.0, 1);
  const SddPlan plan = make_sdd_plan(*layout, false, 64, 1, 132);
  expect_sound(plan, *layout, 64);
  EXPECT_EQ(plan.strips.size(), 6u);
  EXPECT_TRUE(std::all_of(plan.strips.begin(), plan.strips.end(), [](const Strip& s) { return s.shared > 0; }));
}

}  // namespace
}  // namespace fretwork::blocks
