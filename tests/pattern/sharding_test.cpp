// Patterns cut over ranks: rows, work and needed keys against masks.
#include "fretwork/sharding.h"

#include <gtest/gtest.h>

#include <random>

#include "fretwork/error.h"
#include "support/error_text.h"

namespace fretwork {
namespace {

using patterns::Span;
using Mask = std::vector<std::uint8_t>;

constexpr const char* kZoo[] = {
    "full(96)",
    "full((64,96))",
    "causal(97)",
    "causal((40,96))",
    "causal((96,40),offset=3)",
    "sliding_window(96,10,3)",
    "sliding_window(96,None,0)",
    "dilated(96,5,7)",
    "dilated(90,3,4,causal=True)",
    "strided(96,8)",
    "strided(101,7)",
    "strided((30,101),7)",
    "fixed(96,16,3)",
    "longformer(96,4,(0,50,51))",
    "bigbird(96,8,1,1,2,5)",
    "block_local(96,12,1)",
    "block_causal(96,20)",
    "swin(12,8,4,2)",
    "axial(12,9)",
    "neighborhood((12,9),5)",
    "neighborhood((12,9),(3,4),dilation=2)",
    "neighborhood((4,5,6),3,causal=True)",
    "sliding_tile((12,10),(3,4),(3,1))",
    "longnet(96,(16,48),(1,4),1)",
    "document((50,1,30,15))",
    "document((50,1,30,15),causal=True)",
    "prefix_lm(96,30)",
    "sinks(96,4,10)",
    "vertical_slash(96,(3,40),(0,9,33))",
    "band(96,-30,3,9)",
    "tree((-1,0,1,0,3,3,2,-1,7))",
    "with_prefix(strided(90,8),3)",
    "strided(200,16)[40:130,20:110]",
    "diag([causal(30),full((10,20)),dilated(40,2,3)])",
    "place(causal(30),(80,90),at=(20,7))",
    "strided(96,8)|longformer(96,2,(60))",
    "causal(96)&dilated(96,20,5)",
    "full(0)",
    "full((0,5))",
    "full((5,0))",
    "place(full(0),(40,40))",
    "random_blocks((1,6,8),16,0.3,7)",
};

Mask mask_of(const Pattern& pattern) {
  Mask mask(static_cast<std::size_t>(pattern.shape()[0] * pattern.shape()[1]));
  pattern.mask(mask);
  return mask;
}

/// What the mask says of rows: their elements, and the keys of others.
void check_rank(const Shards& shards, const Mask& mask, std::int64_t rank) {
  const std::int64_t cols = shards.pattern->cols();
  const Span rows = shards.rows[static_cast<std::size_t>(rank)];
  std::int64_t nnz = 0;
  std::vector<bool> wanted(static_cast<std::size_t>(cols)), given(wanted.size());
  for (std::int64_t i = rows.begin; i < rows.end; ++i) {
    for (std::int64_t j = 0; j < cols; ++j) {
      nnz += mask[static_cast<std::size_t>(i * cols + j)];
      wanted[static_cast<std::size_t>(j)] =
          wanted[static_cast<std::size_t>(j)] || mask[static_cast<std::size_t>(i * cols + j)] != 0;
    }
  }
  const Span own = shards.keys[static_cast<std::size_t>(rank)];
  std::fill(wanted.begin() + own.begin, wanted.begin() + own.end, false);
  EXPECT_EQ(shards.nnz(rank), nnz);
  KeyRange last{-1, 0, 0};
  for (const KeyRange& need : shards.needs(rank)) {
    const Span owner = shards.keys[static_cast<std::size_t>(need.rank)];
    EXPECT_TRUE(need.rank != rank && owner.begin <= need.begin && need.begin < need.end && need.end <= owner.end);
    EXPECT_TRUE(need.begin > last.end || (need.begin == last.end && need.rank != last.rank) || last.rank < 0);
    std::fill(given.begin() + need.begin, given.begin() + need.end, true);
    last = need;
  }
  EXPECT_EQ(wanted, given);
}

void check(const PatternPtr& pattern, std::int64_t world, std::int64_t align) {
  const Shards shards = shard(pattern, world, align);
  const Mask mask = mask_of(*shards.pattern);
  ASSERT_EQ(std::ssize(shards.rows), world);
  ASSERT_EQ(std::ssize(shards.keys), world);
  std::int64_t row = 0, key = 0, heaviest = 0, total = 0;
  const std::int64_t rows = shards.pattern->rows();
  for (std::int64_t begin = 0; begin < rows; begin += align) {
    heaviest = std::max(heaviest, nnz_of_rows(pattern, {begin, std::min(begin + align, rows)}));
  }
  for (std::int64_t rank = 0; rank < world; ++rank) {
    const Span at = shards.rows[static_cast<std::size_t>(rank)], keys = shards.keys[static_cast<std::size_t>(rank)];
    EXPECT_TRUE(at.begin == row && at.begin <= at.end && (at.begin % align == 0 || at.begin == rows));
    EXPECT_TRUE(keys.begin == key && keys.begin <= keys.end);
    row = at.end;
    key = keys.end;
    check_rank(shards, mask, rank);
    EXPECT_LE(shards.nnz(rank), shards.pattern->nnz() / world + heaviest + 1);
    total += shards.nnz(rank);
  }
  EXPECT_EQ(row, rows);
  EXPECT_EQ(key, shards.pattern->cols());
  EXPECT_EQ(total, shards.pattern->nnz());
}

TEST(Sharding, AgreesWithMasks) {
  for (const char* text : kZoo) {
    SCOPED_TRACE(text);
    for (const std::int64_t world : {1, 2, 3, 8}) {
      for (const std::int64_t align : {1, 5, 16, 128}) {
        check(parse_pattern(text), world, align);
      }
    }
  }
}

TEST(Sharding, AgreesWithRandomMasks) {
  std::mt19937 random(std::random_device{}());
  for (int n = 0; n < 20; ++n) {
    const auto rows = static_cast<std::int64_t>(random() % 40), cols = static_cast<std::int64_t>(random() % 40);
    Mask mask(static_cast<std::size_t>(rows * cols));
    for (std::uint8_t& bit : mask) {
      bit = random() % 4 == 0;
    }
    check(patterns::from_mask(rows, cols, mask), 1 + static_cast<std::int64_t>(random() % 5), 1 + random() % 9);
  }
}

/// From parts alone: a mask would have 2⁴⁰ elements.
TEST(Sharding, OfAMillionTokens) {
  for (const char* text : {"causal(1048576)", "strided(1048576,128)", "longformer(1048576,256,(0,1,2,3,4,5,6,7))",
                           "sliding_window(1048576,4095,0)", "sinks(1048576,4,4096)", "fixed(1048576,128,16)"}) {
    SCOPED_TRACE(text);
    const PatternPtr pattern = parse_pattern(text);
    const Shards shards = shard(pattern, 8);
    std::int64_t most = 0;
    for (std::int64_t rank = 0; rank < 8; ++rank) {
      most = std::max(most, shards.nnz(rank));
    }
    EXPECT_LE(static_cast<double>(most), 1.02 * static_cast<double>(shards.pattern->nnz()) / 8);
    EXPECT_FALSE(shards.needs(7).empty());
  }
}

TEST(Sharding, RefusesWhatItCannotCut) {
  const PatternPtr pattern = parse_pattern("causal(64)");
  EXPECT_EQ(error_of([&] { shard(pattern, 0); }), "shard: world_size: expected 1 to 2^24, got 0");
  EXPECT_EQ(error_of([&] { shard(pattern, 2, 0); }), "shard: align: expected at least 1, got 0");
  EXPECT_EQ(error_of([&] {
              nnz_of_rows(pattern, {3, 65});
            }),
            "shard: rows: expected [begin, end) within 0 to 64, got [3, 65)");
  EXPECT_EQ(error_of([&] { shard(parse_pattern("random_blocks((2,4,4),16,0.5,1)"), 2); }),
            "shard: pattern: expected a layout of one head, got 2");
}

}  // namespace
}  // namespace fretwork
