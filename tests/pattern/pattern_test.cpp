// Block layouts, Kronecker patterns and the text form of patterns.
#include "fretwork/pattern.h"

#include <gtest/gtest.h>

#include <random>

#include "fretwork/c.h"
#include "fretwork/error.h"
#include "pattern/text.h"
#include "support/error_text.h"
#include "support/reference.h"

namespace fretwork {
namespace {

using Mask = std::vector<std::uint8_t>;

const BlockLayout& as_layout(const PatternPtr& pattern) { return dynamic_cast<const BlockLayout&>(*pattern); }

std::string parse_error(const std::string& text) {
  return error_of([&] { parse_pattern(text); });
}

TEST(BlockLayout, TextRoundTrips) {
  for (const auto& sizes : {BlockLayout::Sizes{1, 1, 1, 8, 8}, {3, 5, 7, 16, 32}, {2, 6, 6, 128, 128}}) {
    for (const double density : {0.0, 0.3, 1.0}) {
      const auto count = static_cast<std::size_t>(sizes.heads * sizes.rows * sizes.cols);
      const auto layout = BlockLayout::make(sizes, random_mask(count, density, 7));
      const PatternPtr again = parse_pattern(layout->text());
      EXPECT_EQ(again->text(), layout->text());
      EXPECT_EQ(again->nnz(), layout->nnz());
      EXPECT_EQ(as_layout(again).sizes(), sizes);
      EXPECT_EQ(parse_pattern(layout->key())->text(), layout->text());
    }
  }
}

TEST(BlockLayout, TextIsCanonical) {
  const auto layout = BlockLayout::make({1, 2, 3, 16, 16}, Mask{1, 0, 1, 0, 1, 1});
  EXPECT_EQ(layout->text(), "block((1,2,3),(16,16),~1)");
  EXPECT_EQ(parse_pattern(" block( (1, 2,3,), 16 , ~1 ) ")->text(), layout->text());
  EXPECT_EQ(parse_pattern("(block((1,2,3),(16,),~1))")->text(), layout->text());
  EXPECT_NE(BlockLayout::make({1, 3, 2, 16, 16}, Mask{1, 0, 1, 0, 1, 1})->text(), layout->text());
  EXPECT_NE(BlockLayout::make({1, 2, 3, 16, 16}, Mask{1, 0, 1, 0, 1, 0})->text(), layout->text());
}

TEST(BlockLayout, LongTextsHaveDigestKeys) {
  const auto layout = BlockLayout::make({1, 64, 64, 16, 16}, random_mask(64 * 64, 0.5, 1));
  EXPECT_LT(layout->key().size(), 48u);
  EXPECT_TRUE(layout->key().starts_with("block@"));
  EXPECT_EQ(parse_pattern(layout->key())->text(), layout->text());
  EXPECT_EQ(parse_error("block@00000000000000000000000000000000"),
            "Pattern.parse: text: expected the text of a pattern, or the digest of one made in this process, got "
            "'block@00000000000000000000000000000000', which is unknown here");
}

/// A causal window under a name of its own, some MB long.
struct LongName final : Pattern {
  explicit LongName(int number) {
    name("sliding_window(64," + std::to_string(number) + ",0" + std::string(std::size_t{16} << 20, ' ') + ")");
  }
  double density() const override { return 1; }
  PatternPtr transpose() const override { return nullptr; }
  void mask(std::span<std::uint8_t> /*out*/) const override {}
};

TEST(LongTexts, AreForgottenWhenThereAreTooMany) {
  const std::string used = LongName(0).key(), unused = LongName(1).key();
  for (int n = 2; n < 24; ++n) {
    const LongName more(n);
    EXPECT_EQ(parse_pattern(used)->text(), "sliding_window(64,0,0)") << "after " << n;
  }
  EXPECT_NE(parse_error(unused).find("which is unknown here"), std::string::npos);
}

TEST(BlockLayout, IndexesAgreeWithTheMask) {
  const BlockLayout::Sizes sizes{3, 5, 4, 8, 16};
  const Mask mask = random_mask(60, 0.4, 3);
  const auto layout = BlockLayout::make(sizes, mask);
  std::int64_t block = 0;
  std::vector<std::vector<std::pair<std::int64_t, std::int64_t>>> rows(15), cols(12);
  for (std::int64_t h = 0; h < 3; ++h) {
    EXPECT_EQ(layout->head_first(h), block);
    for (std::int64_t i = 0; i < 5; ++i) {
      for (std::int64_t j = 0; j < 4; ++j) {
        if (mask[static_cast<std::size_t>((h * 5 + i) * 4 + j)] != 0) {
          rows[static_cast<std::size_t>(h * 5 + i)].emplace_back(j, block);
          cols[static_cast<std::size_t>(h * 4 + j)].emplace_back(i, block++);
        }
      }
    }
  }
  EXPECT_EQ(layout->head_first(3), layout->nnz());
  EXPECT_EQ(block, layout->nnz());
  const auto check = [](const BlockIndex& index, const auto& expected) {
    ASSERT_EQ(index.first.size(), expected.size() + 1);
    for (std::size_t l = 0; l < expected.size(); ++l) {
      const auto line = index.line(static_cast<std::int64_t>(l));
      ASSERT_EQ(line.size(), expected[l].size());
      for (std::size_t n = 0; n < line.size(); ++n) {
        EXPECT_EQ(line[n].other, expected[l][n].first);
        EXPECT_EQ(line[n].block, expected[l][n].second);
      }
    }
  };
  check(layout->by_row(), rows);
  check(layout->by_col(), cols);
}

TEST(BlockLayout, MaskAndTranspose) {
  const auto layout = BlockLayout::make({2, 3, 4, 8, 16}, random_mask(24, 0.5, 5));
  EXPECT_EQ(std::vector(layout->shape().begin(), layout->shape().end()), (std::vector<std::int64_t>{2, 24, 64}));
  Mask all(2 * 24 * 64, 7), turned(2 * 64 * 24, 7);
  layout->mask(all);
  const PatternPtr transposed = layout->transpose();
  transposed->mask(turned);
  std::int64_t ones = 0;
  for (std::size_t h = 0; h < 2; ++h) {
    for (std::size_t y = 0; y < 24; ++y) {
      for (std::size_t x = 0; x < 64; ++x) {
        const std::uint8_t here = all[(h * 24 + y) * 64 + x];
        ones += here;
        EXPECT_EQ(here, turned[(h * 64 + x) * 24 + y]);
      }
    }
  }
  EXPECT_EQ(ones, layout->nnz() * 8 * 16);
  EXPECT_DOUBLE_EQ(layout->density(), static_cast<double>(ones) / (2 * 24 * 64));
  EXPECT_EQ(as_layout(transposed).sizes(), (BlockLayout::Sizes{2, 4, 3, 16, 8}));
  EXPECT_EQ(transposed->transpose()->text(), layout->text());
}

TEST(BlockLayout, EmptySizes) {
  for (const auto& sizes : {BlockLayout::Sizes{0, 3, 3, 8, 8}, {1, 0, 3, 8, 8}, {2, 3, 0, 8, 8}}) {
    const auto layout = BlockLayout::make(sizes, {});
    EXPECT_EQ(layout->nnz(), 0);
    EXPECT_EQ(layout->density(), 0.0);
    EXPECT_EQ(parse_pattern(layout->text())->text(), layout->text());
    EXPECT_EQ(layout->transpose()->transpose()->text(), layout->text());
  }
}

TEST(BlockLayout, RefusesBadArguments) {
  const auto make = [](const BlockLayout::Sizes& sizes, const Mask& mask) {
    return error_of([&] { BlockLayout::make(sizes, mask); });
  };
  EXPECT_EQ(make({1, 1, 1, 4, 8}, {1}), "BlockLayout: block: expected 8 to 128, got 4");
  EXPECT_EQ(make({1, 1, 1, 8, 129}, {1}), "BlockLayout: block: expected 8 to 128, got 129");
  EXPECT_EQ(make({1, -1, 1, 8, 8}, {}), "BlockLayout: mask: expected at least 0 rows, got -1");
  EXPECT_EQ(make({1, 2, 2, 8, 8}, {1, 0, 1}), "BlockLayout: mask: expected 4 entries, got 3");
  EXPECT_EQ(make({1, 1, 2, 8, 8}, {1, 2}), "BlockLayout: mask: expected 0 or 1 everywhere, got 2");
  constexpr std::int64_t kHuge = std::int64_t{1} << 62;
  for (const auto& sizes : {BlockLayout::Sizes{kHuge, kHuge, kHuge, 8, 8}, {1, 0, kHuge, 8, 8}, {0, kHuge, 0, 8, 8}}) {
    EXPECT_TRUE(make(sizes, {}).starts_with("BlockLayout: mask: expected at most 2^26 block rows")) << make(sizes, {});
  }
}

using Sizes = KroneckerPattern::Sizes;

/// The definition, index by index.
Mask kronecker_mask(const Sizes& s) {
  const std::int64_t cols = s.a * s.c * s.d;
  Mask mask(static_cast<std::size_t>(s.a * s.b * s.d * cols));
  for (std::int64_t n = 0; n < s.a * s.b * s.c * s.d; ++n) {
    const std::int64_t l = n % s.d, k = n / s.d % s.c, j = n / s.d / s.c % s.b, i = n / s.d / s.c / s.b;
    mask[static_cast<std::size_t>((i * s.b * s.d + j * s.d + l) * cols + i * s.c * s.d + k * s.d + l)] = 1;
  }
  return mask;
}

Mask mask_of(const Pattern& pattern) {
  std::int64_t count = 1;
  for (const std::int64_t n : pattern.shape()) {
    count *= n;
  }
  Mask mask(static_cast<std::size_t>(count));
  pattern.mask(mask);
  return mask;
}

/// Every pattern whose sizes are at most `most`.
std::vector<Sizes> all_kroneckers(std::int64_t most) {
  std::vector<Sizes> all;
  for (std::int64_t n = 0; n < most * most * most * most; ++n) {
    all.push_back({1 + n % most, 1 + n / most % most, 1 + n / most / most % most, 1 + n / most / most / most});
  }
  return all;
}

TEST(Kronecker, IsAValueWithTheDefinitionsMask) {
  for (const Sizes& s : all_kroneckers(4)) {
    const auto p = KroneckerPattern::make(s);
    const Mask mask = mask_of(*p);
    EXPECT_EQ(mask, kronecker_mask(s)) << p->text();
    EXPECT_EQ(p->nnz(), std::count(mask.begin(), mask.end(), 1));
    EXPECT_DOUBLE_EQ(p->density(), static_cast<double>(p->nnz()) / static_cast<double>(mask.size()));
    const PatternPtr again = parse_pattern(p->text()), turned = p->transpose();
    EXPECT_EQ(dynamic_cast<const KroneckerPattern&>(*again).sizes(), s);
    EXPECT_EQ(turned->text(), KroneckerPattern::make({s.a, s.c, s.b, s.d})->text());
    const Mask other = mask_of(*turned);
    for (std::int64_t n = 0; n < std::ssize(mask); ++n) {
      ASSERT_EQ(mask[static_cast<std::size_t>(n)],
                other[static_cast<std::size_t>(n % p->cols() * p->rows() + n / p->cols())]);
    }
  }
  EXPECT_EQ(parse_pattern(" kronecker( 2,3, 4,5)")->text(), "kronecker(2,3,4,5)");
}

TEST(Kronecker, RefusesBadSizes) {
  const std::int64_t large = std::int64_t{1} << 31;
  const auto error = [](const Sizes& s) { return error_of([&] { KroneckerPattern::make(s); }); };
  EXPECT_EQ(error({0, 1, 1, 1}), "KroneckerPattern: a: expected at least 1, got 0");
  EXPECT_EQ(error({1, 1, -3, 1}), "KroneckerPattern: c: expected at least 1, got -3");
  EXPECT_NE(error({large, large, large, large}).find("fewer than 2^63 elements"), std::string::npos);
  EXPECT_NE(error({2, large, large, 1}).find("fewer than 2^63 elements"), std::string::npos);
  EXPECT_EQ(error({1, large, large / 2, 1}), "no error");
  EXPECT_EQ(parse_error("kronecker(1,2,3)"), "kronecker: arguments: expected a, b, c, d, got 3 of them");
  EXPECT_EQ(parse_error("kronecker(1,2,3,0)"), "KroneckerPattern: d: expected at least 1, got 0");
  EXPECT_TRUE(parse_error("kronecker(1,2,3,(4,5))").starts_with("kronecker: d: expected "));
  EXPECT_NE(parse_error("kronecker(99999999999999999999,1,1,1)"), "no error");
}

/// The number of terms of each entry of the product of two masks.
std::vector<int> terms(const Sizes& left, const Sizes& right) {
  const Mask x = kronecker_mask(left), y = kronecker_mask(right);
  const std::int64_t rows = left.a * left.b * left.d, inner = left.a * left.c * left.d,
                     cols = right.a * right.c * right.d;
  std::vector<int> sums(static_cast<std::size_t>(rows * cols));
  for (std::int64_t n = 0; n < rows * inner; ++n) {
    for (std::int64_t col = 0; x[static_cast<std::size_t>(n)] != 0 && col < cols; ++col) {
      sums[static_cast<std::size_t>(n / inner * cols + col)] += y[static_cast<std::size_t>(n % inner * cols + col)];
    }
  }
  return sums;
}

TEST(Kronecker, ChainRulesAgreeWithMasks) {
  const auto all = all_kroneckers(4);
  int chains = 0;
  for (const Sizes& left : all) {
    for (const Sizes& right : all) {
      const KroneckerPtr one = KroneckerPattern::make(left), other = KroneckerPattern::make(right);
      if (!kronecker::chainable(one, other)) {
        EXPECT_NE(error_of([&] { kronecker::product(one, other); }).find("product: patterns: expected chainable ones"),
                  std::string::npos);
        continue;
      }
      ++chains;
      // Every entry of the product is a sum of r terms, and they stand where the product's pattern says.
      const Mask mask = kronecker_mask(kronecker::product(one, other)->sizes());
      const std::vector<int> sums = terms(left, right);
      const auto rank = static_cast<int>(left.a * left.c / right.a);
      ASSERT_EQ(mask.size(), sums.size());
      for (std::size_t n = 0; n < mask.size(); ++n) {
        ASSERT_EQ(sums[n], mask[n] * rank) << n;
      }
    }
  }
  EXPECT_GT(chains, 500);
}

TEST(Kronecker, WhatDoesNotChainIsNoBlockwiseProduct) {
  // Equal inner sizes alone are not enough: each of these breaks one rule.
  for (const auto& [left, right] : std::vector<std::pair<Sizes, Sizes>>{{{2, 1, 2, 3}, {3, 2, 1, 2}},     // a
                                                                        {{1, 1, 3, 2}, {1, 2, 1, 3}},     // d
                                                                        {{1, 2, 3, 2}, {2, 3, 2, 1}}}) {  // the rank
    ASSERT_EQ(left.a * left.c * left.d, right.a * right.b * right.d);
    EXPECT_FALSE(kronecker::chainable(KroneckerPattern::make(left), KroneckerPattern::make(right)));
  }
  const KroneckerPtr left = KroneckerPattern::make({1, 2, 3, 1});
  EXPECT_FALSE(kronecker::chainable(left, KroneckerPattern::make({1, 2, 2, 1})));
  EXPECT_EQ(error_of([&] { kronecker::chainable(left, nullptr); }), "chainable: right: expected a pattern, got none");
}

TEST(Kronecker, OneMatrixOfBlocksIsABlockLayout) {
  for (const Sizes& s : {Sizes{3, 8, 16, 1}, {1, 128, 128, 1}, {2, 136, 192, 1}, {2, 256, 11, 1}, {5, 9, 300, 1}}) {
    const auto p = KroneckerPattern::make(s);
    const auto layout = kronecker::to_block_layout(p);
    EXPECT_EQ(layout->heads(), 1);
    EXPECT_EQ(mask_of(*layout), mask_of(*p)) << p->text() << " as " << layout->text();
  }
  EXPECT_EQ(kronecker::to_block_layout(KroneckerPattern::make({2, 136, 192, 1}))->sizes(),
            (BlockLayout::Sizes{1, 4, 4, 68, 96}));
  for (const Sizes& s : {Sizes{1, 8, 8, 2}, {1, 7, 8, 1}, {1, 8, 131, 1}, {std::int64_t{1} << 20, 8, 8, 1}}) {
    EXPECT_TRUE(error_of([&] {
                  kronecker::to_block_layout(KroneckerPattern::make(s));
                }).starts_with("to_block_layout: pattern: "));
  }
}

TEST(Kronecker, WellKnownChainsAreFullMatrices) {
  std::vector<std::vector<KroneckerPtr>> chains = {kronecker::monarch(12, 20, 3, 5), kronecker::monarch(12, 20, 12, 1),
                                                   kronecker::monarch(7, 5, 1, 5)};
  for (const std::int64_t n : {2, 4, 32}) {
    chains.push_back(kronecker::butterfly(n));
  }
  for (const auto& chain : chains) {
    KroneckerPtr whole = chain[0];
    for (std::size_t n = 1; n < chain.size(); ++n) {
      EXPECT_EQ(chain[n]->sizes().a * chain[n]->sizes().c / whole->sizes().a, 1);
      whole = kronecker::product(chain[n], whole);
    }
    EXPECT_EQ(whole->sizes().a, 1);
    EXPECT_EQ(whole->sizes().d, 1);
  }
  const auto sizes = [](const std::vector<KroneckerPtr>& chain) {
    std::vector<Sizes> all;
    std::ranges::transform(chain, std::back_inserter(all), [](const KroneckerPtr& p) { return p->sizes(); });
    return all;
  };
  EXPECT_EQ(sizes(chains[0]), (std::vector<Sizes>{{5, 4, 4, 1}, {1, 3, 5, 4}}));
  EXPECT_EQ(sizes(kronecker::butterfly(8)), (std::vector<Sizes>{{4, 2, 2, 1}, {2, 2, 2, 2}, {1, 2, 2, 4}}));
  EXPECT_EQ(kronecker::butterfly(std::int64_t{1} << 31).size(), 31u);
  EXPECT_EQ(error_of([] { kronecker::monarch(12, 20, 5, 5); }),
            "monarch: p: expected a divisor of out_features = 12, got 5");
  for (const std::int64_t n : {std::int64_t{0}, std::int64_t{1}, std::int64_t{12}, std::int64_t{-8}}) {
    EXPECT_TRUE(error_of([&] { kronecker::butterfly(n); }).starts_with("butterfly: n: expected a power of two")) << n;
  }
}

TEST(Text, RefusesBadTexts) {
  EXPECT_EQ(parse_error("block((1,2,3),(16,16),~A1)"), "block: bits: expected 1 of them, got 2");
  EXPECT_EQ(parse_error("block((1,1,3),16,~I)"), "block: bits: expected zeros after the last, got 'I'");
  EXPECT_EQ(parse_error("block((1,2),16,~A)"), "block: grid: expected (heads, rows, columns), got 2 numbers");
  EXPECT_EQ(parse_error("block((1,1,1),(8,8,8),~A)"), "block: block: expected one or two numbers, got 3");
  EXPECT_EQ(parse_error("block((1,1,1),16)"),
            "block: arguments: expected (heads,rows,cols), (r,c), ~bits, got 2 of them");
  const std::string unknown = parse_error("nothing(1)");
  EXPECT_TRUE(unknown.starts_with("Pattern.parse: text: expected one of acsr, axial, ")) << unknown;
  EXPECT_TRUE(unknown.ends_with(", got 'nothing'")) << unknown;
  const std::pair<const char*, const char*> near[] = {
      {"stride", "strided"}, {"Causal", "causal"}, {"neighbourhood", "neighborhood"}, {"vertical", "vertical_slash"}};
  for (const auto& [given, meant] : near) {
    const std::string error = parse_error(std::string(given) + "(8)");
    EXPECT_TRUE(error.ends_with("got '" + std::string(given) + "'; did you mean " + meant + "?")) << error;
  }
  for (const char* text :
       {"", "block", "block(", "block((1,1,1),16,~A", "block((1,1,1),16,~A) x", "block((1,1,1) 16,~A)", "1", "()",
        "block((1,1,99999999999999999999),16,~A)", "block((1,1,1),16,~A) |", "block(1..5)", "block(-)", "\xff\xfe",
        "block((1,1,1),16,~\xff)"}) {
    const std::string error = parse_error(text);
    EXPECT_TRUE(error.starts_with("Pattern.parse: ")) << text << " → " << error;
    EXPECT_NE(error.find(": expected "), error.npos) << error;
    EXPECT_NE(error.find(", got "), error.npos) << error;
  }
}

TEST(Text, NestingIsBounded) {
  const auto nested = [](int levels) {
    return std::string(static_cast<std::size_t>(levels), '(') + "block((1,1,1),16,~A)" +
           std::string(static_cast<std::size_t>(levels), ')');
  };
  EXPECT_EQ(parse_pattern(nested(20))->text(), "block((1,1,1),(16,16),~A)");
  EXPECT_NE(parse_error(nested(100)).find("at most 64 levels of nesting"), std::string::npos);
  EXPECT_NE(parse_error(nested(1000000)).find("at most 64 levels of nesting"), std::string::npos);
  EXPECT_NE(parse_error("block" + std::string(1000000, '(')).find("at most 64 levels"), std::string::npos);
}

TEST(RandomBlocks, IsReproducibleAndBounded) {
  const auto a = random_blocks({2, 50, 60, 16, 16}, 0.25, 1);
  EXPECT_EQ(a->text(), random_blocks({2, 50, 60, 16, 16}, 0.25, 1)->text());
  EXPECT_NE(a->text(), random_blocks({2, 50, 60, 16, 16}, 0.25, 2)->text());
  EXPECT_NEAR(a->density(), 0.25, 0.03);
  EXPECT_EQ(random_blocks({1, 9, 9, 8, 8}, 0.0, 1)->nnz(), 0);
  EXPECT_EQ(random_blocks({1, 9, 9, 8, 8}, 1.0, 1)->nnz(), 81);
  // The same on every machine, so this text may not change.
  EXPECT_EQ(parse_pattern("random_blocks((1,2,6),8,0.5,42)")->text(), "block((1,2,6),(8,8),~e1)");
  EXPECT_EQ(parse_error("random_blocks((1,1,1),8,1.5,1)"), "random_blocks: density: expected 0 to 1, got 1.5");
  EXPECT_EQ(parse_error("random_blocks((1,32768,32769),8,0.0,1)"),
            "random_blocks: grid: expected at most 2^30 blocks, got 1073774592");
}

/// Small random changes to a text that was good, or bytes from nowhere.
std::string mutate(const std::vector<std::string>& good, std::mt19937& random) {
  const auto below = [&](std::size_t n) { return std::uniform_int_distribution<std::size_t>(0, n - 1)(random); };
  constexpr std::string_view kLikely = "(),~|&-.e+0123456789_abcABC @\n";
  const auto character = [&] { return below(4) == 0 ? static_cast<char>(below(256)) : kLikely[below(kLikely.size())]; };
  std::string text = below(8) == 0 ? std::string(below(64), ' ') : good[below(good.size())];
  if (text.find_first_not_of(' ') == text.npos) {
    std::generate(text.begin(), text.end(), character);
  }
  for (std::size_t change = below(6); change-- > 0 && !text.empty();) {
    const std::size_t at = below(text.size());
    switch (below(5)) {
      case 0:
        text[at] = character();
        break;
      case 1:
        text.insert(at, 1, character());
        break;
      case 2:
        text.erase(at, 1 + below(4));
        break;
      case 3:
        text.insert(at, text.substr(below(text.size()), below(20)));
        break;
      default:
        text.resize(at);
    }
  }
  return text;
}

/// True when a random layout would have more than some thousand blocks: valid, but slow.
bool is_large_random(const std::string& text) {
  int digits = 0;
  for (const char c : text) {
    digits = c >= '0' && c <= '9' ? digits + 1 : 0;
    if (digits > 2) {
      return text.find("random") != text.npos;
    }
  }
  return false;
}

TEST(Pattern, AMaskNeedsItsRoom) {
  for (const char* text : {"block((1,1,2),(8,8),~C)", "kronecker(1,8,16,1)", "full((8,16))"}) {
    std::vector<std::uint8_t> room(128, 7);
    EXPECT_EQ(error_of([&] { parse_pattern(text)->mask(std::span(room).first(127)); }),
              "mask: out: expected 128, got 127");
    EXPECT_EQ(room[0], 7) << text;
    parse_pattern(text)->mask(room);
    EXPECT_LE(room[127], 1) << text;
  }
}

TEST(Text, FuzzParsesOrThrowsError) {
  const std::vector<std::string> good = {"block((1,2,3),(16,16),~1)",
                                         "block((2,3,3),(8,128),~Aa-)",
                                         "random_blocks((1,4,4),16,0.5,1)",
                                         "block((1,1,1),8,~A) | block((1,1,1),8,~B) & random_blocks((1,1,1),8,.1,2)",
                                         "(block((0,1,1),8,~))",
                                         "kronecker(2,16,16,4)",
                                         "sliding_window(64,8,4)|strided(64,7)",
                                         "neighborhood((8,8),3,2)",
                                         "document((3,0,9,4),causal=True)&causal(16)",
                                         "acsr((3,0,9,1,2),(2,1,1,4,3),(3,0,1,3,2),10)",
                                         "place(strided(9,2)[1:8,2:],(9,9),at=(1,2))|diag([causal(4),full(5)])",
                                         "from_runs((9,9),[(0,9,0,9,-8,0),(1,3,5,6,2,4)]).T",
                                         "block((1,1,1),8,~" + std::string(100, 'A') + ")",
                                         "block@99aa06d3014798d86001c324468d497f"};
  std::mt19937 random(20240229);
  int parsed = 0, refused = 0;
  for (int n = 0; n < 100000; ++n) {
    const std::string text = mutate(good, random);
    if (is_large_random(text)) {
      continue;
    }
    try {
      const PatternPtr pattern = parse_pattern(text);
      EXPECT_EQ(parse_pattern(pattern->text())->text(), pattern->text()) << text;
      ++parsed;
    } catch (const Error& error) {
      EXPECT_NE(std::string_view(error.what()).find(": expected "), std::string_view::npos) << error.what();
      ++refused;
    }
  }
  EXPECT_GT(parsed, 10);
  EXPECT_GT(refused, 10);
}

/// A handle's pattern is found by its text and key, not made again: equal addresses of texts say that it is the same.
TEST(CInterface, RemembersWhatItMakes) {
  std::mt19937 random(7);
  std::vector<std::uint8_t> mask(40 * 50);
  std::generate(mask.begin(), mask.end(), [&] { return static_cast<std::uint8_t>(random() % 2); });
  const std::int64_t start[] = {0, 5, 1}, stride[] = {1, 2, 3}, count[] = {4, 4, 2};
  const std::int64_t sizes[] = {1, 40, 50, 8, 8};
  std::vector<fretwork_pattern*> made{fretwork_pattern_from_mask(40, 50, mask.data()),
                                      fretwork_pattern_from_acsr(start, stride, count, 3, 20),
                                      fretwork_block_layout(sizes, mask.data())};
  made.push_back(fretwork_pattern_transpose(made[0]));
  made.push_back(fretwork_pattern_transpose(made[1]));
  for (fretwork_pattern* const pattern : made) {
    for (const std::string word : {fretwork_pattern_text(pattern), fretwork_pattern_key(pattern)}) {
      fretwork_pattern* const again = fretwork_pattern_parse(word.data(), word.size());
      EXPECT_EQ(static_cast<const void*>(fretwork_pattern_text(again)), fretwork_pattern_text(pattern)) << word;
      fretwork_pattern_free(again);
    }
  }
  std::for_each(made.begin(), made.end(), fretwork_pattern_free);
}

}  // namespace
}  // namespace fretwork
