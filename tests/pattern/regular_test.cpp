// Regular patterns: every named one against its rule, algebra against masks, parts that are disjoint and tight.
#include "pattern/regular.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <random>

#include "fretwork/error.h"
#include "fretwork/patterns.h"
#include "pattern/parts.h"
#include "support/error_text.h"

namespace fretwork {
namespace {

using patterns::Seq;
using Mask = std::vector<std::uint8_t>;
using Rule = std::function<bool(std::int64_t p, std::int64_t j)>;
using parts::floor_div;
using parts::floor_mod;

Mask mask_of(const Pattern& pattern) {
  Mask mask(static_cast<std::size_t>(pattern.shape()[0] * pattern.shape()[1]));
  pattern.mask(mask);
  return mask;
}

RegularPtr parsed(const std::string& text) {
  auto pattern = std::dynamic_pointer_cast<const RegularPattern>(parse_pattern(text));
  EXPECT_NE(pattern, nullptr) << text;
  return pattern;
}

/// Each element of the parts once, each range tight, nothing outside.
void check_parts(const RegularPattern& pattern, const Mask& mask) {
  Mask seen(mask.size());
  std::int64_t count = 0;
  for (const PartGroup& group : pattern.groups()) {
    ASSERT_FALSE(group.parts.empty());
    for (int k = 1; k < group.view.axes; ++k) {
      ASSERT_GT(group.view.strides[static_cast<std::size_t>(k - 1)], group.view.strides[static_cast<std::size_t>(k)]);
    }
    ASSERT_EQ(group.view.strides[static_cast<std::size_t>(group.view.axes - 1)], 1);
    for (const Part& part : group.parts) {
      for (int k = 0; k < group.view.axes; ++k) {
        AxisRange range = part[static_cast<std::size_t>(k)];
        ASSERT_TRUE(parts::tighten(range));
        ASSERT_EQ(range, part[static_cast<std::size_t>(k)]);
      }
      parts::for_each_row(group.view, part, [&](std::int64_t row, const parts::Columns& columns) {
        ASSERT_TRUE(row >= 0 && row < pattern.rows());
        const auto down = [&](const auto& self, std::size_t axis, std::int64_t col) -> void {
          if (axis < kMaxAxes) {
            ASSERT_GT(columns.extent[axis], 0);
            for (std::int64_t n = 0; n < columns.extent[axis]; ++n) {
              self(self, axis + 1, col + n * columns.stride[axis]);
            }
            return;
          }
          ASSERT_TRUE(col >= 0 && col < pattern.cols());
          ASSERT_EQ(seen[static_cast<std::size_t>(row * pattern.cols() + col)]++, 0) << "twice: " << row << ", " << col;
          ++count;
        };
        down(down, 0, columns.first);
      });
    }
  }
  ASSERT_EQ(seen, mask);
  ASSERT_EQ(count, pattern.nnz());
}

/// The columns of a row if they are one progression, else nothing.
bool is_progression(const std::vector<std::int64_t>& columns) {
  for (std::size_t n = 2; n < columns.size(); ++n) {
    if (columns[n] - columns[n - 1] != columns[1] - columns[0]) {
      return false;
    }
  }
  return true;
}

void check_acsr(const RegularPattern& pattern, const Mask& mask) {
  std::vector<std::vector<std::int64_t>> all(static_cast<std::size_t>(pattern.rows()));
  for (std::int64_t i = 0; i < pattern.rows(); ++i) {
    for (std::int64_t j = 0; j < pattern.cols(); ++j) {
      if (mask[static_cast<std::size_t>(i * pattern.cols() + j)] != 0) {
        all[static_cast<std::size_t>(i)].push_back(j);
      }
    }
  }
  const auto bad = std::find_if_not(all.begin(), all.end(), is_progression);
  if (bad != all.end()) {
    const std::string row = "row " + std::to_string(bad - all.begin()) + ",";
    EXPECT_NE(error_of([&] { pattern.acsr(); }).find(row), std::string::npos) << pattern.text();
    return;
  }
  const auto rows = pattern.acsr();
  ASSERT_EQ(rows.size(), all.size());
  for (std::size_t i = 0; i < rows.size(); ++i) {
    ASSERT_EQ(rows[i].count, std::ssize(all[i]));
    ASSERT_GE(rows[i].stride, 1);
    for (std::int64_t t = 0; t < rows[i].count; ++t) {
      ASSERT_EQ(rows[i].start + t * rows[i].stride, all[i][static_cast<std::size_t>(t)]);
    }
  }
}

Mask turned(const Mask& mask, std::int64_t rows, std::int64_t cols) {
  Mask other(mask.size());
  for (std::int64_t i = 0; i < rows; ++i) {
    for (std::int64_t j = 0; j < cols; ++j) {
      other[static_cast<std::size_t>(j * rows + i)] = mask[static_cast<std::size_t>(i * cols + j)];
    }
  }
  return other;
}

/// Everything a pattern says of itself follows from its mask.
void check(const RegularPtr& pattern, const Mask& mask) {
  SCOPED_TRACE(pattern->text());
  const std::int64_t rows = pattern->rows(), cols = pattern->cols();
  ASSERT_EQ(std::ssize(mask), rows * cols);
  ASSERT_EQ(mask_of(*pattern), mask);
  ASSERT_EQ(pattern->nnz(), std::count(mask.begin(), mask.end(), 1));
  for (std::int64_t i = 0; i < rows; ++i) {
    for (std::int64_t j = 0; j < cols; ++j) {
      ASSERT_EQ(pattern->contains(i, j), mask[static_cast<std::size_t>(i * cols + j)] != 0) << i << ", " << j;
    }
  }
  const auto lengths = pattern->row_lengths();
  for (std::int64_t i = 0; i < rows; ++i) {
    std::vector<std::uint8_t> line(static_cast<std::size_t>(cols));
    std::int64_t last = -1, length = 0;
    for (const auto& [begin, end] : pattern->row(i)) {
      ASSERT_TRUE(last < begin && begin < end && end <= cols);
      std::fill(line.begin() + begin, line.begin() + end, std::uint8_t{1});
      last = end;
      length += end - begin;
    }
    ASSERT_TRUE(std::equal(line.begin(), line.end(), mask.begin() + i * cols)) << i;
    ASSERT_EQ(lengths[static_cast<std::size_t>(i)], length) << i;
  }
  EXPECT_FALSE(pattern->contains(-1, 0) || pattern->contains(rows, 0) || pattern->contains(0, cols));
  check_parts(*pattern, mask);
  check_acsr(*pattern, mask);
  const RegularPtr again = parsed(pattern->text());
  EXPECT_EQ(again->text(), pattern->text());
  EXPECT_EQ(mask_of(*again), mask);
  const PatternPtr other = pattern->transpose();
  EXPECT_EQ(mask_of(*other), turned(mask, rows, cols));
  EXPECT_EQ(other->transpose()->text(), pattern->text());
  EXPECT_EQ(parse_pattern(other->text())->text(), other->text());
  EXPECT_NE(pattern->describe(), "");
}

Mask by_rule(const Seq& seq, const Rule& rule) {
  const std::int64_t offset = seq.offset.value_or(seq.cols - seq.rows);
  Mask mask(static_cast<std::size_t>(seq.rows * seq.cols));
  for (std::int64_t i = 0; i < seq.rows; ++i) {
    for (std::int64_t j = 0; j < seq.cols; ++j) {
      mask[static_cast<std::size_t>(i * seq.cols + j)] = rule(i + offset, j);
    }
  }
  return mask;
}

const std::vector<Seq>& sequences() {
  static const std::vector<Seq> all{1,
                                    7,
                                    Seq(0, 5),
                                    Seq(5, 0),
                                    31,
                                    Seq(13, 20),
                                    Seq(20, 13),
                                    Seq(13, 20, 0),
                                    Seq(13, 20, 3),
                                    Seq(17, 17, -5),
                                    Seq(9, 30, 40),
                                    Seq(11, 12, -30)};
  return all;
}

/// The named patterns on sequences, each with some arguments, and what API they follow.
struct Named {
  std::function<RegularPtr(const Seq&)> make;
  Rule rule;
};

bool among(std::int64_t x, const std::vector<std::int64_t>& values) {
  return std::find(values.begin(), values.end(), x) != values.end();
}

std::vector<Named> simple_patterns() {
  std::vector<Named> all;
  const auto add = [&](auto make, Rule rule) { all.push_back({make, std::move(rule)}); };
  add([](const Seq& s) { return patterns::full(s); }, [](auto, auto) { return true; });
  add([](const Seq& s) { return patterns::causal(s); }, [](auto p, auto j) { return j <= p; });
  for (const patterns::Optional left : {patterns::Optional{}, patterns::Optional{0}, patterns::Optional{4}}) {
    for (const patterns::Optional right : {patterns::Optional{}, patterns::Optional{0}, patterns::Optional{9}}) {
      add([=](const Seq& s) { return patterns::sliding_window(s, left, right); },
          [=](auto p, auto j) { return p - j <= left.value_or(1000) && j - p <= right.value_or(1000); });
    }
  }
  for (const std::int64_t step : {1, 2, 3, 5, 8, 40}) {
    for (const bool causal : {false, true}) {
      add([=](const Seq& s) { return patterns::dilated(s, 2, step, causal); },
          [=](auto p, auto j) { return std::abs(p - j) <= 2 * step && (p - j) % step == 0 && (!causal || j <= p); });
    }
    add([=](const Seq& s) { return patterns::strided(s, step); },
        [=](auto p, auto j) { return j <= p && (p - j < step || (p - j) % step == 0); });
    for (const std::int64_t summary : {std::int64_t{0}, std::int64_t{1}, step / 2, step}) {
      add([=](const Seq& s) { return patterns::fixed(s, step, summary); },
          [=](auto p, auto j) {
            return j <= p && (floor_div(p, step) == floor_div(j, step) || j % step >= step - summary);
          });
    }
    for (const std::int64_t previous : {0, 1, 3}) {
      add([=](const Seq& s) { return patterns::block_local(s, step, previous); },
          [=](auto p, auto j) {
            const auto back = floor_div(p, step) - floor_div(j, step);
            return back >= 0 && back <= previous;
          });
    }
    for (const std::int64_t start : {-11, -6, 0, 1, 7}) {
      add([=](const Seq& s) { return patterns::band(s, start, step, 4); },
          [=](auto p, auto j) {
            const auto d = j - p - start;
            return d >= 0 && d % step == 0 && d / step < 4;
          });
    }
    for (const std::int64_t window : {0, 1}) {
      add([=](const Seq& s) { return patterns::bigbird(s, step, window, 2, 0); },
          [=](auto p, auto j) {
            const auto P = floor_div(p, step), J = floor_div(j, step);
            return std::abs(P - J) <= window || P < 2 || J < 2;
          });
    }
  }
  return all;
}

std::vector<Named> listed_patterns(const Seq& seq) {
  std::vector<Named> all;
  const auto add = [&](auto make, Rule rule) { all.push_back({make, std::move(rule)}); };
  std::vector<std::vector<std::int64_t>> sets{{}};
  if (seq.cols > 0) {
    sets.push_back({0});
    sets.push_back({seq.cols - 1, seq.cols / 2, seq.cols / 3, 0});
  }
  for (const auto& set : sets) {
    for (const std::int64_t window : {0, 3}) {
      add([=](const Seq& s) { return patterns::longformer(s, window, set); },
          [=](auto p, auto j) { return std::abs(p - j) <= window || among(p, set) || among(j, set); });
    }
    const std::vector<std::int64_t> slash{0, 1, 5, 6, 12};
    add([=](const Seq& s) { return patterns::vertical_slash(s, set, slash); },
        [=](auto p, auto j) { return j <= p && (among(j, set) || among(p - j, slash)); });
    add([=](const Seq& s) { return patterns::vertical_slash(s, set, {}); },
        [=](auto p, auto j) { return j <= p && among(j, set); });
  }
  for (const std::int64_t n : {0, 1, 6, 50}) {
    add([=](const Seq& s) { return patterns::prefix_lm(s, n); }, [=](auto p, auto j) { return j < n || j <= p; });
    add([=](const Seq& s) { return patterns::sinks(s, n, 4); },
        [=](auto p, auto j) { return j <= p && (j < n || p - j < 4); });
    add([=](const Seq& s) { return patterns::sinks(s, 2, n); },
        [=](auto p, auto j) { return j <= p && (j < 2 || p - j < n); });
  }
  const std::vector<std::vector<std::int64_t>> segments{{4, 8}, {6, 9}, {8, 8, 30}, {7}},
      rates{{1, 2}, {2, 3}, {4, 2, 6}, {5}};
  for (std::size_t n = 0; n < segments.size(); ++n) {
    for (const std::int64_t head : {0, 3}) {
      add([=](const Seq& s) { return patterns::longnet(s, segments[n], rates[n], head); },
          [=](auto p, auto j) {
            for (std::size_t k = 0; k < segments[n].size(); ++k) {
              const auto w = segments[n][k], r = rates[n][k];
              if (floor_div(p, w) == floor_div(j, w) && floor_mod(p, r) == head % r && j % r == head % r) {
                return true;
              }
            }
            return false;
          });
    }
  }
  return all;
}

TEST(RegularPattern, EveryNamedPatternOnSequencesFollowsItsRule) {
  for (const Seq& seq : sequences()) {
    auto all = simple_patterns(), more = listed_patterns(seq);
    all.insert(all.end(), more.begin(), more.end());
    for (const Named& named : all) {
      check(named.make(seq), by_rule(seq, named.rule));
      if (testing::Test::HasFatalFailure()) {
        return;
      }
    }
  }
}

TEST(RegularPattern, Documents) {
  for (const std::vector<std::int64_t>& lengths :
       {std::vector<std::int64_t>{}, {3}, {0, 4, 0, 1, 7}, {1, 1, 1}, {5, 2, 9}}) {
    std::vector<std::int64_t> of;
    for (std::size_t d = 0; d < lengths.size(); ++d) {
      of.insert(of.end(), static_cast<std::size_t>(lengths[d]), static_cast<std::int64_t>(d));
    }
    for (const bool causal : {false, true}) {
      check(patterns::document(lengths, causal), by_rule(std::ssize(of), [&](auto p, auto j) {
              return of[static_cast<std::size_t>(p)] == of[static_cast<std::size_t>(j)] && (!causal || j <= p);
            }));
    }
  }
}

/// A rule for two coordinates of one axis.
using AxisRule = std::function<bool(std::int64_t, std::int64_t)>;

Mask product(const std::vector<std::int64_t>& shape, const std::vector<AxisRule>& rules) {
  std::int64_t size = 1;
  for (const std::int64_t n : shape) {
    size *= n;
  }
  return by_rule(size, [&](std::int64_t p, std::int64_t j) {
    for (std::size_t k = shape.size(); k-- > 0; p /= shape[k], j /= shape[k]) {
      if (!rules[k](p % shape[k], j % shape[k])) {
        return false;
      }
    }
    return true;
  });
}

AxisRule near(std::int64_t length, std::int64_t window, std::int64_t dilation, bool causal) {
  return [=](std::int64_t p, std::int64_t j) {
    if (p % dilation != j % dilation) {
      return false;
    }
    const std::int64_t rank = p / dilation, other = j / dilation;
    const std::int64_t members = (length - 1 - p % dilation) / dilation + 1;
    if (causal) {
      return other <= rank && rank - other < window;
    }
    const std::int64_t start = std::min(std::max<std::int64_t>(rank - window / 2, 0), members - window);
    return other >= start && other < start + window;
  };
}

TEST(RegularPattern, Neighborhoods) {
  const std::vector<std::int64_t> one{1}, no{0};
  for (const std::vector<std::int64_t>& shape :
       {std::vector<std::int64_t>{13}, {7, 9}, {1, 8}, {8, 1}, {3, 1, 5}, {4, 5, 6}, {1, 1}}) {
    for (const std::int64_t window : {1, 2, 3, 4}) {
      for (const std::int64_t dilation : {1, 2, 3, 20}) {
        for (const bool causal : {false, true}) {
          std::vector<std::int64_t> windows, dilations, flags;
          std::vector<AxisRule> rules;
          for (const std::int64_t n : shape) {
            windows.push_back(std::min(window, std::max<std::int64_t>(n / dilation, 1)));
            dilations.push_back(dilation);
            flags.push_back(causal && rules.empty());
            rules.push_back(near(n, windows.back(), dilation, flags.back() != 0));
          }
          check(patterns::neighborhood(shape, windows, dilations, flags), product(shape, rules));
        }
      }
    }
  }
}

TEST(RegularPattern, TilesAndWindowsOfGrids) {
  for (const std::vector<std::int64_t>& shape : {std::vector<std::int64_t>{13}, {7, 9}, {1, 8}, {8, 1}, {4, 5, 6}}) {
    for (const std::int64_t tile : {1, 2, 3, 20}) {
      for (const std::int64_t window : {1, 2, 3}) {
        std::vector<std::int64_t> windows;
        std::vector<AxisRule> rules;
        for (const std::int64_t n : shape) {
          const std::int64_t tiles = (n + tile - 1) / tile;
          windows.push_back(std::min(window, tiles));
          rules.push_back([rule = near(tiles, windows.back(), 1, false), tile](std::int64_t p, std::int64_t j) {
            return rule(p / tile, j / tile);
          });
        }
        check(patterns::sliding_tile(shape, std::vector{tile}, windows), product(shape, rules));
      }
    }
  }
  for (const std::int64_t window : {1, 2, 4, 5, 30}) {
    for (const std::int64_t shift : {0, 1, 3, 12}) {
      if (shift >= window) {
        continue;
      }
      const std::vector<std::int64_t> shape{7, 12};
      std::vector<AxisRule> rules;
      for (const std::int64_t n : shape) {
        rules.push_back([=](std::int64_t p, std::int64_t j) {
          return floor_mod(p - shift, n) / window == floor_mod(j - shift, n) / window && (p < shift) == (j < shift);
        });
      }
      check(patterns::swin(7, 12, std::vector{window}, std::vector{shift}), product(shape, rules));
    }
  }
  for (const auto& [h, w] : {std::pair{5, 7}, {1, 6}, {6, 1}, {1, 1}, {0, 4}}) {
    const std::int64_t width = w;
    check(patterns::axial(h, w),
          by_rule(h * w, [=](auto p, auto j) { return p / width == j / width || p % width == j % width; }));
  }
}

TEST(RegularPattern, BigbirdDrawsWithoutReplacement) {
  const auto base = patterns::bigbird(100, 8, 1, 1, 0);
  for (const std::uint64_t seed : {0U, 1U, 99U}) {
    const auto pattern = patterns::bigbird(100, 8, 1, 1, 3, seed);
    const Mask mask = mask_of(*pattern), fixed = mask_of(*base);
    check(pattern, mask);
    for (std::int64_t P = 0; P < 13; ++P) {
      std::int64_t drawn = 0, free = 0;
      for (std::int64_t J = 0; J < 13; ++J) {
        const auto at = static_cast<std::size_t>(P * 8 * 100 + J * 8);
        EXPECT_GE(mask[at], fixed[at]);
        drawn += mask[at] - fixed[at];
        free += 1 - fixed[at];
      }
      EXPECT_EQ(drawn, std::min<std::int64_t>(3, free)) << P;
    }
  }
  EXPECT_NE(patterns::bigbird(100, 8, 1, 1, 3, 1)->text(), patterns::bigbird(100, 8, 1, 1, 3, 2)->text());
  EXPECT_EQ(patterns::bigbird(100, 8, 0, 0, 50)->nnz(), 100 * 100);
  check(patterns::bigbird(Seq(37, 60, -9), 7, 1, 1, 2), mask_of(*patterns::bigbird(Seq(37, 60, -9), 7, 1, 1, 2)));
}

TEST(RegularPattern, MasksLayoutsAndProgressions) {
  std::mt19937_64 random(7);
  for (const int share : {0, 30, 80, 100}) {
    for (const auto& [rows, cols] : {std::pair<std::int64_t, std::int64_t>{1, 1}, {9, 14}, {40, 33}}) {
      Mask mask(static_cast<std::size_t>(rows * cols));
      for (auto& m : mask) {
        m = random() % 100 < static_cast<unsigned>(share);
      }
      check(patterns::from_mask(rows, cols, mask), mask);
    }
  }
  for (const auto& [r, c] : {std::pair<std::int64_t, std::int64_t>{8, 8}, {8, 16}}) {
    Mask blocks(2 * 4 * 5);
    for (auto& b : blocks) {
      b = random() % 2;
    }
    const auto layout = BlockLayout::make({2, 4, 5, r, c}, blocks);
    for (std::int64_t head = 0; head < 2; ++head) {
      const std::int64_t high = r, wide = c;
      check(patterns::from_layout(layout, head), by_rule(Seq(4 * r, 5 * c, 0), [&](auto p, auto j) {
              return blocks[static_cast<std::size_t>((head * 4 + p / high) * 5 + j / wide)] != 0;
            }));
    }
  }
  for (const KroneckerPattern::Sizes& s : {KroneckerPattern::Sizes{2, 3, 4, 5}, {3, 4, 2, 1}, {1, 2, 2, 7}}) {
    const auto kronecker = KroneckerPattern::make(s);
    check(patterns::from_kronecker(kronecker), mask_of(*kronecker));
  }
  std::vector<std::int64_t> start, stride, count;
  Mask mask(30 * 50);
  for (std::int64_t i = 0; i < 30; ++i) {
    stride.push_back(1 + static_cast<std::int64_t>(random() % 4));
    start.push_back(static_cast<std::int64_t>(random() % 20));
    count.push_back(static_cast<std::int64_t>(random() % 8));
    for (std::int64_t t = 0; t < count.back(); ++t) {
      mask[static_cast<std::size_t>(i * 50 + start.back() + t * stride.back())] = 1;
    }
  }
  check(patterns::acsr(start, stride, count, 50), mask);
}

TEST(RegularPattern, MasksOfNamedPatternsAreRecognised) {
  // The parts that a mask is taken apart into are few, as those of the pattern that made it.
  for (const char* const text :
       {"full(64)", "causal(100)", "sliding_window(100,7,3)", "document((30,1,60),causal=True)", "dilated(256,8,4)",
        "strided(256,16)", "neighborhood((16,16),5)", "longformer(200,5,(0,77))", "fixed(128,8,2)",
        "block_local(128,16)", "dilated((100,256),8,5)"}) {
    const RegularPtr named = parsed(text);
    const Mask mask = mask_of(*named);
    const RegularPtr found = patterns::from_mask(named->rows(), named->cols(), mask);
    check(found, mask);
    std::size_t parts = 0, wanted = 0;
    for (const PartGroup& group : found->groups()) {
      parts += group.parts.size();
    }
    for (const PartGroup& group : named->groups()) {
      wanted += group.parts.size();
    }
    EXPECT_LE(parts, 3 * wanted + 4) << text << "\n" << found->describe();
  }
}

/// A matrix of bytes as large as it is needed, with another in it.
Mask with_inside(std::int64_t rows, std::int64_t cols, const Mask& inner, std::int64_t inner_rows,
                 std::int64_t inner_cols, std::int64_t row, std::int64_t col, Mask into = {}) {
  into.resize(static_cast<std::size_t>(rows * cols));
  for (std::int64_t i = 0; i < inner_rows; ++i) {
    std::copy_n(inner.begin() + i * inner_cols, inner_cols, into.begin() + (i + row) * cols + col);
  }
  return into;
}

/// A random expression over patterns of one shape, and its mask by brute force.
struct Random {
  explicit Random(std::uint64_t seed) : engine(seed) {}
  std::int64_t below(std::int64_t n) { return static_cast<std::int64_t>(engine() % static_cast<std::uint64_t>(n)); }

  std::string leaf(std::int64_t rows, std::int64_t cols) {
    const auto n = [&](std::int64_t least, std::int64_t end) { return std::to_string(least + below(end - least)); };
    const std::string seq = "(" + std::to_string(rows) + "," + std::to_string(cols) + ")";
    const std::string end = below(3) == 0 ? ",offset=" + n(-6, 7) + ")" : ")";
    switch (below(12)) {
      case 0:
        return "causal(" + seq + end;
      case 1:
        return "sliding_window(" + seq + "," + n(0, 9) + "," + n(0, 9) + end;
      case 2:
        return "dilated(" + seq + "," + n(0, 5) + "," + n(1, 7) + end;
      case 3:
        return "strided(" + seq + "," + n(1, 9) + end;
      case 4:
        return "fixed(" + seq + ",6," + n(0, 7) + end;
      case 5:
        return "longformer(" + seq + "," + n(0, 4) + ",(0," + n(0, cols) + ")" + end;
      case 6:
        return "block_local(" + seq + "," + n(1, 9) + "," + n(0, 3) + end;
      case 7:
        return "band(" + seq + "," + n(-12, 5) + "," + n(1, 6) + "," + n(0, 6) + end;
      case 8:
        return "longnet(" + seq + ",(6,12),(2,4)," + n(0, 4) + end;
      case 9:
        return "sinks(" + seq + "," + n(0, 5) + "," + n(0, 9) + end;
      case 10:
        return "bigbird(" + seq + "," + n(2, 7) + ",0,1,1," + n(0, 99) + end;
      default:
        return "vertical_slash(" + seq + ",(" + n(0, cols) + "," + n(0, cols) + "),(0," + n(0, 20) + ")" + end;
    }
  }

  static std::string pair(std::int64_t a, std::int64_t b) {
    return "(" + std::to_string(a) + "," + std::to_string(b) + ")";
  }

  std::pair<std::string, Mask> sliced(std::int64_t rows, std::int64_t cols, int depth) {
    const std::int64_t row = below(9), col = below(9), whole_cols = cols + col + below(9);
    const auto [text, whole] = expression(rows + row + below(9), whole_cols, depth - 1);
    Mask mask;
    for (std::int64_t i = row; i < row + rows; ++i) {
      mask.insert(mask.end(), whole.begin() + i * whole_cols + col, whole.begin() + i * whole_cols + col + cols);
    }
    const auto ends = [](std::int64_t at, std::int64_t length) {
      return std::to_string(at) + ":" + std::to_string(at + length);
    };
    return {"(" + text + ")[" + ends(row, rows) + "," + ends(col, cols) + "]", mask};
  }

  std::pair<std::string, Mask> expression(std::int64_t rows, std::int64_t cols, int depth) {
    const std::int64_t kind = depth == 0 ? 0 : below(7);
    if (kind == 4) {
      return sliced(rows, cols, depth);
    }
    if (kind == 5) {
      const std::int64_t r = below(rows) + 1, c = below(cols) + 1, row = below(rows - r + 1), col = below(cols - c + 1);
      const auto [text, mask] = expression(r, c, depth - 1);
      return {"place(" + text + "," + pair(rows, cols) + ",at=" + pair(row, col) + ")",
              with_inside(rows, cols, mask, r, c, row, col)};
    }
    if (kind == 6 && rows > 1 && cols > 1) {
      const std::int64_t r = below(rows - 1) + 1, c = below(cols - 1) + 1;
      const auto [a, first] = expression(r, c, depth - 1);
      const auto [b, second] = expression(rows - r, cols - c, depth - 1);
      return {"diag([" + a + "," + b + "])",
              with_inside(rows, cols, second, rows - r, cols - c, r, c, with_inside(rows, cols, first, r, c, 0, 0))};
    }
    if (kind == 0 || kind == 6) {
      const std::string text = leaf(rows, cols);
      return {text, mask_of(*parse_pattern(text))};
    }
    if (kind == 1) {
      auto [text, mask] = expression(cols, rows, depth - 1);
      return {"(" + text + ").T", turned(mask, cols, rows)};
    }
    auto [a, left] = expression(rows, cols, depth - 1);
    const auto [b, right] = expression(rows, cols, depth - 1);
    for (std::size_t n = 0; n < left.size(); ++n) {
      left[n] = kind == 2 ? left[n] | right[n] : left[n] & right[n];
    }
    return {"(" + a + ")" + (kind == 2 ? "|" : "&") + "(" + b + ")", left};
  }

  std::mt19937_64 engine;
};

TEST(RegularPattern, RandomExpressionsAreTheirMasks) {
  Random random(5);
  for (int n = 0; n < 600; ++n) {
    const auto [text, mask] = random.expression(20 + random.below(8), 20 + random.below(12), 3);
    SCOPED_TRACE(text);
    check(parsed(text), mask);
    if (testing::Test::HasFatalFailure()) {
      return;
    }
  }
}

TEST(RegularPattern, TextsAreCanonical) {
  const auto text = [](const char* given) { return parse_pattern(given)->text(); };
  EXPECT_EQ(text("full((33, 33))"), "full(33)");
  EXPECT_EQ(text("causal((3,5),offset=2)"), "causal((3,5))");
  EXPECT_EQ(text("dilated(seq=8, dilation=2, window=3, causal=False)"), "dilated(8,3,2)");
  EXPECT_EQ(text("longformer(9, 1, [5, 3, 3])"), "longformer(9,1,(3,5))");
  EXPECT_EQ(text("strided(8,2)|causal(8)"), "causal(8)|strided(8,2)");
  EXPECT_EQ(text("(causal(8)|strided(8,2))|causal(8)"), "causal(8)|strided(8,2)");
  EXPECT_EQ(text("(full(8)|causal(8))&strided(8,2)"), "(causal(8)|full(8))&strided(8,2)");
  EXPECT_EQ(text("(full(8)&causal(8))|strided(8,2)"), "causal(8)&full(8)|strided(8,2)");
  EXPECT_EQ(text("causal(8).T.T"), "causal(8)");
  std::string many = "causal(8)";
  for (int n = 0; n < 100001; ++n) {
    many += ".T";
  }
  EXPECT_EQ(text(many.c_str()), "causal(8).T");
  EXPECT_EQ(text("((causal(8)|strided(8,2)).T).T"), "causal(8)|strided(8,2)");
  EXPECT_EQ(text("neighborhood((8,8),(3,3),causal=(True,False))"), "neighborhood((8,8),3,causal=(True,False))");
  EXPECT_EQ(text("swin(8,8,4,shift=(2,2))"), "swin(8,8,4,shift=(2,2))");
  EXPECT_EQ(text("block((1,2,2),(8,8),~J).T"), text("block((1,2,2),(8,8),~J)"));
  EXPECT_EQ(text("causal(8)[:][2:,:5][1:4]"), "causal(8)[3:6,0:5]");
  EXPECT_EQ(text("causal(8)[-3:, :-1].T"), "causal(8).T[0:7,5:8]");
  EXPECT_EQ(text("(causal(8)|full(8))[1:].T.T"), "(causal(8)|full(8))[1:8,0:8]");
  EXPECT_EQ(text("place(causal(8),(8,8))[0:8]"), "causal(8)");
  EXPECT_EQ(text("diag([causal(8),(full(2)|causal(2))&full(2),])"), "diag([causal(8),(causal(2)|full(2))&full(2)])");
  EXPECT_EQ(text("with_prefix(place((causal(2)),(3,3),at=[1,0]),1)"), "with_prefix(place(causal(2),(3,3),at=(1,0)),1)");
  EXPECT_EQ(text("neighborhood((8,8),4,stride=(1,1))"), "neighborhood((8,8),4)");
  EXPECT_EQ(text("from_runs((3,4),[(0,1,0,2,0,1),(1,2,0,2,-1,0),(0,1,2,3,2,2)])"),
            "from_runs((3,4),[(0,1,0,3,0,2),(1,2,0,2,-1,0)])");
  EXPECT_EQ(text("block((1,2,2),(8,8),~J)|causal(16)"), "causal(16)|from_layout(block((1,2,2),(8,8),~J))");
}

TEST(RegularPattern, EqualPatternsHaveEqualParts) {
  const auto same = [](const PatternPtr& left, const PatternPtr& right) {
    const auto &a = dynamic_cast<const RegularPattern&>(*left), &b = dynamic_cast<const RegularPattern&>(*right);
    ASSERT_EQ(a.text(), b.text());
    EXPECT_TRUE(
        std::equal(a.groups().begin(), a.groups().end(), b.groups().begin(), b.groups().end(),
                   [](const PartGroup& x, const PartGroup& y) { return x.view == y.view && x.parts == y.parts; }))
        << a.describe() << b.describe();
  };
  std::vector<PatternPtr> all{parsed("neighborhood((32,48),(5,7),(2,3))"), parsed("axial(32,48)"),
                              parsed("longformer(1536,0,(0,1,2,3))"), parsed("dilated(1536,3,5)&causal(1536)")};
  const auto first = patterns::unite(patterns::unite(all[0], all[1]), patterns::unite(all[2], all[3]));
  same(first, first->transpose()->transpose());
  std::sort(all.begin(), all.end());
  do {
    const auto now = patterns::unite(patterns::unite(patterns::unite(all[0], all[1]), all[2]), all[3]);
    same(first, now);
    same(patterns::intersect(first, patterns::intersect(all[1], all[2])),
         patterns::intersect(all[2], patterns::intersect(now, all[1])));
  } while (std::next_permutation(all.begin(), all.end()));
}

TEST(RegularPattern, RefusesWhatItCannotBe) {
  const auto refused = [](const std::string& text, const std::string& why) {
    const std::string got = error_of([&] { parse_pattern(text); });
    EXPECT_NE(got.find(why), std::string::npos) << text << " gave: " << got;
  };
  refused("full(-1)", "full: seq: expected sizes from 0");
  refused("full((4000000000,4000000000))", "full: seq: expected fewer than 2^63 elements");
  refused("strided(16, 0)", "strided: stride: expected at least 1, got 0");
  refused("strided(16)", "strided: stride: expected a value, got nothing");
  refused("sliding_window(16, 4)", "sliding_window: right: expected a value, got nothing");
  refused("strided(16, 2, 3)", "strided: arguments: expected at most 2 without names, got 3");
  refused("strided(16, 2, step=3)", "strided: keyword: expected one of seq, stride, offset, got step");
  refused("strided(16, 2, stride=3)", "strided: stride: expected one value, got two");
  refused("strided(seq=16, 2)", "expected a keyword");
  refused("dilated(16, 2, 2, causal=1)", "dilated: causal: expected True or False");
  refused("longformer(16, 1, [16])", "longformer: globals: expected positions from 0 to 15, got 16");
  refused("neighborhood((8,), 5, 2)", "neighborhood: window: expected at most 4");
  refused("causal(8)|causal(9)", "union: patterns: expected equal shapes, got (8, 8) and (9, 9)");
  refused("block((2,1,1),(8,8),~D)|causal(8)", "union: pattern: expected a layout of one head, got 2");
  refused("acsr((0,2),(1,1),(1,3),4)", "acsr: start: expected columns from 0 to 3");
  refused("swin(1099511627776,8,2,shift=1)", "2^22 parts");
  refused("bigbird(1073741824,1,0,0,1)", "2^22 parts");
  refused("causal(8).S", "expected 'T'");
  refused("from_mask((2,2),~Z)", "from_mask: bits:");
  refused("causal(8)[1:2:3]", "expected ']'");
  refused("causal(8)[2]", "expected ':'");
  refused("place(causal(8),(9,9),at=(2,0))", "place: shape: expected room for (8, 8) at (2, 0), got (9, 9)");
  refused("place(causal(8),(9,9),at=(-1,0))", "place: at: expected numbers from 0 on, got (-1, 0)");
  refused("diag([])", "diag: patterns: expected at least one, got none");
  refused("with_prefix(full((3,5)),1)", "with_prefix: pattern: expected a square one, got (3, 5)");
  refused("with_prefix(full(3),9223372036854775807)", "with_prefix: n: expected sizes from 0");
  refused("tree((-1,1))", "tree: parents: expected -1 to 0 for node 1, got 1");
  refused("neighborhood((8,8),3,stride=(1,4))", "neighborhood: stride: expected at most window = 3, got 4");
  refused("from_runs((4,4),[(0,5,0,4,-9,9)])", "from_runs: bands: expected bands inside (4, 4)");
  EXPECT_NE(error_of([] {
              patterns::slice(patterns::causal(8), {2, 9}, {0, 8});
            }).find("slice: rows: expected"),
            std::string::npos);
}

/// All of them together take some milliseconds; what looks at each pair would not end.
TEST(RegularPattern, MillionsOfTokensCostNothing) {
  constexpr std::int64_t kLong = 1 << 20;
  std::vector<std::int64_t> lengths(4096, kLong / 4096);
  EXPECT_EQ(patterns::strided(kLong, 1024)->groups().size(), 2U);
  EXPECT_EQ(patterns::causal(kLong)->nnz(), kLong * (kLong + 1) / 2);
  EXPECT_EQ(patterns::dilated(kLong, 512, 4)->groups()[0].parts.size(), 1U);
  EXPECT_EQ(patterns::document(lengths)->nnz(), 4096 * 256 * 256);
  const std::vector<std::int64_t> shape{1024, 1024}, window{13}, one{1}, no{0};
  EXPECT_EQ(patterns::neighborhood(shape, window, one, no)->nnz(), kLong * 13 * 13);
  const auto grid = patterns::neighborhood(shape, window, one, no, std::vector<std::int64_t>{8});
  EXPECT_EQ(patterns::with_prefix(grid, 3)->nnz(), kLong * 13 * 13 + 3 * (2 * kLong + 3));
  EXPECT_EQ(patterns::slice(patterns::strided(kLong, 1024), {4096, kLong}, {0, kLong / 2})->groups().size(), 2U);
  EXPECT_EQ(patterns::diag(std::vector<PatternPtr>(100, grid))->rows(), 100 * kLong);
  EXPECT_EQ(patterns::place(grid, kLong + 7, 3 * kLong, 3, kLong)->nnz(), grid->nnz());
  EXPECT_EQ(patterns::block_causal(kLong, 2)->nnz(), kLong * (kLong + 2) / 2);
  EXPECT_EQ(parsed("longnet(1048576,(2048,8192,32768),(1,4,16))")->rows(), kLong);
  EXPECT_EQ(parsed("sliding_window(1048576,1023,0)|strided(1048576,1024)")->text().size(), 52U);
  EXPECT_EQ(patterns::intersect(patterns::document(lengths), patterns::causal(kLong))->nnz(), 4096 * 256 * 257 / 2);
}

TEST(RegularPattern, ParserSurvivesNoise) {
  const std::vector<std::string> seeds{"strided(64,8)",
                                       "(causal(8)|full(8)).T&strided(8,2)",
                                       "neighborhood((8,8),(3,3),causal=(True,False))",
                                       "longformer(16,1,[3,5],offset=2)",
                                       "acsr((0,1),(1,1),(1,2),4)",
                                       "from_mask((2,3),~J)",
                                       "document([3,4],causal=True)",
                                       "from_layout(block((1,2,2),(8,8),~J),head=0)",
                                       "sliding_window(9,None,0)",
                                       "swin(8,8,4,shift=2)",
                                       "place(causal(8)[2:,:5],(9,9),at=(1,2))",
                                       "diag([causal(4),(full(3)|causal(3)).T[1:2]])",
                                       "with_prefix(axial(2,3),2)&full(8)",
                                       "from_runs((9,9),[(0,9,0,9,-8,0),(1,3,5,6,2,4)])",
                                       "tree((-1,0,0,2,-1))"};
  constexpr std::string_view kLetters = "()[],:=.|&~T0123456789-abcdefNone \t_@\0é";
  Random random(11);
  for (int n = 0; n < 20000; ++n) {
    std::string text = seeds[static_cast<std::size_t>(random.below(std::ssize(seeds)))];
    for (std::int64_t edits = 1 + random.below(4); edits > 0 && !text.empty(); --edits) {
      const auto at = static_cast<std::size_t>(random.below(std::ssize(text)));
      const char letter = kLetters[static_cast<std::size_t>(random.below(std::ssize(kLetters)))];
      switch (random.below(4)) {
        case 0:
          text.erase(at, 1 + static_cast<std::size_t>(random.below(3)));
          break;
        case 1:
          text.insert(at, 1, letter);
          break;
        case 2:
          text[at] = letter;
          break;
        default:
          text.insert(at, seeds[static_cast<std::size_t>(random.below(std::ssize(seeds)))].substr(0, 9));
      }
    }
    try {
      const PatternPtr pattern = parse_pattern(text);
      ASSERT_EQ(parse_pattern(pattern->text())->text(), pattern->text()) << text;
    } catch (const Error&) {  // anything else ends the test
    }
  }
}

}  // namespace
}  // namespace fretwork
