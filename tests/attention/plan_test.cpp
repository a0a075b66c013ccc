// Plans against the masks they stand for: every element once, whole runs whole, used places exactly those that are.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <ctime>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "ops/attention/tiling.h"

namespace fretwork::attention_op {
namespace {

using std::int64_t;

struct Range {
  int64_t begin, end;
};
using Box = std::array<Range, kMaxAxes>;

/// The positions [lo, hi) as boxes of digits, from axis k on.
std::vector<Box> boxes(const View& view, int k, int64_t lo, int64_t hi) {
  const auto floor_div = [](int64_t a, int64_t b) { return a >= 0 ? a / b : -((-a + b - 1) / b); };
  std::vector<Box> found;
  const auto add = [&](int64_t first, int64_t last, int64_t from, int64_t to) {
    if (first >= last || from >= to) {
      return;
    }
    std::vector<Box> inner = k + 1 < view.axes ? boxes(view, k + 1, from, to) : std::vector<Box>(1);
    for (Box& box : inner) {
      box[k] = {first, last};
      found.push_back(box);
    }
  };
  const int64_t s = view.strides[k];
  if (lo >= hi) {
    return found;
  }
  const int64_t first = floor_div(lo, s), last = floor_div(hi, s);
  if (first == last) {
    add(first, first + 1, lo - first * s, hi - first * s);
  } else {
    const bool head = lo != first * s;
    add(first, first + (head ? 1 : 0), lo - first * s, s);
    add(first + (head ? 1 : 0), last, 0, s);
    add(last, last + 1, 0, hi - last * s);
  }
  return found;
}

/// Cuts ranges to the digits that have a partner; false if none has.
bool tighten(AxisRange& a) {
  a.row_begin = std::max(a.row_begin, a.col_begin - a.high);
  a.row_end = std::min(a.row_end, a.col_end - a.low);
  a.col_begin = std::max(a.col_begin, a.row_begin + a.low);
  a.col_end = std::min(a.col_end, a.row_end + a.high);
  return a.row_begin < a.row_end && a.col_begin < a.col_end && a.low <= a.high;
}

/// The elements that meet on every axis of a view, as parts that stay inside.
PartGroup inside(const View& view, int64_t rows, int64_t cols, const Part& wanted) {
  PartGroup group{view, {}};
  for (const Box& row : boxes(view, 0, view.row_shift, view.row_shift + rows)) {
    for (const Box& col : boxes(view, 0, view.col_shift, view.col_shift + cols)) {
      Part part = wanted;
      bool some = true;
      for (int k = 0; k < view.axes && some; ++k) {
        AxisRange& a = part[k];
        a = {std::max(a.row_begin, row[k].begin),
             std::min(a.row_end, row[k].end),
             std::max(a.col_begin, col[k].begin),
             std::min(a.col_end, col[k].end),
             a.low,
             a.high};
        some = tighten(a);
      }
      if (some) {
        group.parts.push_back(part);
      }
    }
  }
  return group;
}

constexpr int64_t kFar = int64_t{1} << 40;
const AxisRange kAny{-kFar, kFar, -kFar, kFar, -kFar, kFar};
AxisRange band(int64_t low, int64_t high) { return {-kFar, kFar, -kFar, kFar, low, high}; }
View view_of(std::vector<int64_t> strides, int64_t row_shift = 0, int64_t col_shift = 0) {
  View view;
  view.axes = static_cast<int>(strides.size());
  std::copy(strides.begin(), strides.end(), view.strides.begin());
  view.row_shift = row_shift;
  view.col_shift = col_shift;
  return view;
}
Part part_of(std::vector<AxisRange> axes) {
  Part part{};
  std::copy(axes.begin(), axes.end(), part.begin());
  return part;
}

struct Case {
  std::string name;
  int64_t rows, cols;
  std::vector<PartGroup> groups;
};

/// Adds a part's elements; false, and nothing is added, if one is there already.
bool paint(const View& view, const std::vector<Part>& parts, int64_t cols, std::vector<std::uint8_t>& mask) {
  std::vector<int64_t> found;
  for (const Part& part : parts) {
    std::vector<std::pair<int64_t, int64_t>> now{{-view.row_shift, -view.col_shift}}, next;
    for (int k = 0; k < view.axes; ++k) {
      next.clear();
      const AxisRange& a = part[k];
      for (const auto& [i, j] : now) {
        for (int64_t r = a.row_begin; r < a.row_end; ++r) {
          for (int64_t c = std::max(a.col_begin, r + a.low); c < std::min(a.col_end, r + a.high + 1); ++c) {
            next.emplace_back(i + r * view.strides[k], j + c * view.strides[k]);
          }
        }
      }
      now.swap(next);
    }
    for (const auto& [i, j] : now) {
      found.push_back(i * cols + j);
    }
  }
  for (const int64_t at : found) {
    if (mask[at] != 0) {
      return false;
    }
  }
  for (const int64_t at : found) {
    mask[at] = 1;
  }
  return true;
}

std::vector<std::uint8_t> mask_of(const Case& c) {
  std::vector<std::uint8_t> mask(c.rows * c.cols);
  for (const PartGroup& group : c.groups) {
    for (const Part& part : group.parts) {
      EXPECT_TRUE(paint(group.view, {part}, c.cols, mask)) << c.name << ": the test's parts are not disjoint";
    }
  }
  return mask;
}

/// The token of each place, −1 where the place is not inside.
std::vector<int64_t> tokens(const Order& order, const Tile& tile, int side) {
  std::vector<int64_t> found(side, -1);
  for (int a = 0; a < tile.count[0]; ++a) {
    for (int b = 0; b < tile.count[1]; ++b) {
      for (int c = 0; c < tile.count[2]; ++c) {
        found[(a * order.extent[1] + b) * order.extent[2] + c] =
            tile.base + a * order.stride[0] + b * order.stride[1] + c * order.stride[2];
      }
    }
  }
  return found;
}

class Checker {
 public:
  Checker(const std::vector<std::uint8_t>& mask, const Plan& plan, std::string name)
      : mask_(mask), plan_(plan), all_bits_(plan.all_bits()), name_(std::move(name)), count_(mask.size()) {
    row_used_.resize(plan.rows);
    col_used_.resize(plan.cols);
    for (int64_t i = 0; i < plan.rows; ++i) {
      for (int64_t j = 0; j < plan.cols; ++j) {
        row_used_[i] = row_used_[i] || mask[i * plan.cols + j] != 0;
        col_used_[j] = col_used_[j] || mask[i * plan.cols + j] != 0;
      }
    }
  }

  void check() {
    int64_t before = std::numeric_limits<int64_t>::max();
    for (const Component& c : plan_.components) {
      EXPECT_LE(c.pairs, before) << name_;
      before = c.pairs;
      check_component(c);
    }
    EXPECT_EQ(count_, mask_) << name_;
    for (std::size_t m = 0; m < plan_.masks.size(); ++m) {
      for (std::size_t n = 0; n < m; ++n) {
        const Mask &a = plan_.masks[m], &b = plan_.masks[n];
        EXPECT_FALSE(a.low == b.low && a.high == b.high && a.limit == b.limit && a.bits == b.bits && a.rows == b.rows)
            << name_;
      }
    }
    EXPECT_EQ(all_rows_, plan_.all_rows_used) << name_;
    EXPECT_EQ(all_cols_, plan_.all_cols_used) << name_;
  }

 private:
  void check_component(const Component& c) {
    for (const auto& [order, side] :
         {std::pair(c.row_order, plan_.shape.rows), std::pair(c.col_order, plan_.shape.cols)}) {
      ASSERT_LE(order.extent[0] * order.extent[1] * order.extent[2], side) << name_;
    }
    ASSERT_EQ(c.first.size(), c.row_tiles.size() + 1);
    ASSERT_EQ(c.first.back(), static_cast<int64_t>(c.runs.size()));
    std::vector<int> covered(plan_.rows);
    std::vector<std::vector<int64_t>> cols;
    for (const Tile& tile : c.col_tiles) {
      cols.push_back(tokens(c.col_order, tile, plan_.shape.cols));
      check_used(tile, cols.back(), col_used_, all_cols_);
    }
    int64_t pairs = 0;
    for (std::size_t t = 0; t < c.row_tiles.size(); ++t) {
      const std::vector<int64_t> rows = tokens(c.row_order, c.row_tiles[t], plan_.shape.rows);
      check_used(c.row_tiles[t], rows, row_used_, all_rows_);
      for (const int64_t row : rows) {
        if (row >= 0) {
          ASSERT_LT(row, plan_.rows) << name_;
          EXPECT_EQ(covered[row]++, 0) << name_ << ": row " << row << " is in two tiles";
        }
      }
      bool whole = false;
      for (int64_t r = c.first[t]; r < c.first[t + 1]; ++r) {
        const Run& run = c.runs[r];
        EXPECT_TRUE(!whole || run.mask < 0) << name_ << ": a masked run after a whole one";
        whole = run.mask < 0;
        ASSERT_GT(run.count, 0);
        ASSERT_GE(run.first, 0);
        ASSERT_LE(static_cast<std::size_t>(run.first + run.count), c.col_tiles.size()) << name_;
        for (int n = 0; n < run.count; ++n, ++pairs) {
          check_pair(rows, cols[run.first + n], run.mask);
        }
      }
    }
    EXPECT_EQ(pairs, c.pairs) << name_;
    if (c.covers_rows) {
      EXPECT_EQ(std::count(covered.begin(), covered.end(), 1), plan_.rows) << name_;
    }
  }

  void check_pair(const std::vector<int64_t>& rows, const std::vector<int64_t>& cols, int mask) {
    bool some = false;
    for (int m = 0; m < plan_.shape.rows; ++m) {
      for (int n = 0; n < plan_.shape.cols; ++n) {
        bool there = true;
        bool bits = false;
        if (mask >= 0) {
          const Mask& k = plan_.masks[mask];
          bits = k.bits >= 0 || k.rows >= 0;
          there = k.rows >= 0 ? plan_.intervals[k.rows + m].begin <= n && n < plan_.intervals[k.rows + m].end
                  : bits      ? (plan_.bits[k.bits + (m * plan_.shape.cols + n) / 32] >> (n % 32) & 1) != 0
                              : k.low <= n - m && n - m <= k.high && n < k.limit;
          const int at = plan_.bits_of(k);
          ASSERT_EQ(at >= 0, bits) << name_;
          ASSERT_TRUE(!bits || there == ((all_bits_[at + (m * plan_.shape.cols + n) / 32] >> (n % 32) & 1) != 0))
              << name_ << ": intervals that are drawn";
        }
        if (!there) {
          continue;
        }
        ASSERT_GE(cols[n], 0) << name_ << ": a column that is not inside";
        ASSERT_TRUE(!bits || rows[m] >= 0) << name_ << ": the bit of a row that is not inside";
        if (rows[m] >= 0) {
          ++count_[rows[m] * plan_.cols + cols[n]];
          some = true;
        }
      }
    }
    EXPECT_TRUE(some) << name_ << ": an empty tile pair";
  }

  void check_used(const Tile& tile, const std::vector<int64_t>& at, const std::vector<bool>& used, bool& all) {
    bool whole = true;
    for (std::size_t n = 0; n < at.size(); ++n) {
      const bool is = at[n] >= 0 && used[at[n]];
      whole = whole && (at[n] < 0 || is);
      if (tile.used >= 0) {
        ASSERT_EQ((plan_.used[tile.used + n / 32] >> (n % 32) & 1) != 0, is) << name_;
      }
    }
    EXPECT_EQ(whole, tile.used < 0) << name_;
    all = all && whole;
  }

  const std::vector<std::uint8_t>& mask_;
  const Plan& plan_;
  const std::vector<std::uint32_t> all_bits_;
  std::string name_;
  std::vector<std::uint8_t> count_;
  std::vector<bool> row_used_, col_used_;
  bool all_rows_ = true, all_cols_ = true;
};

const TileShape kShapes[] = {{128, 128}, {128, 64}, {64, 32}, {32, 32}};

void check(const Case& c, const TileShape& shape) {
  const std::vector<std::uint8_t> mask = mask_of(c);
  const std::string name = c.name + " " + std::to_string(c.rows) + "x" + std::to_string(c.cols) + " in " +
                           std::to_string(shape.rows) + "x" + std::to_string(shape.cols);
  Checker(mask, plan_parts(c.rows, c.cols, c.groups, shape), name).check();
  std::vector<std::uint8_t> turned(mask.size());
  for (int64_t i = 0; i < c.rows; ++i) {
    for (int64_t j = 0; j < c.cols; ++j) {
      turned[j * c.rows + i] = mask[i * c.cols + j];
    }
  }
  Checker(turned, plan_parts(c.rows, c.cols, c.groups, shape, /*transpose=*/true), name + " transposed").check();
}

using Random = std::mt19937_64;
int64_t pick(Random& random, int64_t low, int64_t high) {
  return std::uniform_int_distribution<int64_t>(low, high)(random);
}

/// Strides that fall to 1, each a multiple of the next or not.
View random_view(Random& random, int64_t most) {
  std::vector<int64_t> strides{1};
  for (int64_t axes = pick(random, 0, 3); axes > 0 && strides.back() * 2 < most; --axes) {
    const int64_t low = strides.back() + 1;
    strides.push_back(pick(random, 0, 2) == 0 ? pick(random, low, std::max(low, most / 2))
                                              : strides.back() * pick(random, 2, 17));
  }
  std::reverse(strides.begin(), strides.end());
  const int64_t shift = pick(random, 0, 1) * pick(random, -40, 40);
  return view_of(strides, pick(random, 0, 1) * pick(random, -70, 70) + shift, shift);
}

AxisRange random_axis(Random& random, int64_t length) {
  AxisRange a = kAny;
  const auto range = [&](int64_t& begin, int64_t& end) {
    if (pick(random, 0, 3) == 0) {
      begin = pick(random, -2, length);
      end = begin + pick(random, 1, length + 1);
    }
  };
  range(a.row_begin, a.row_end);
  range(a.col_begin, a.col_end);
  switch (pick(random, 0, 4)) {
    case 0:
      break;
    case 1:
      a.low = a.high = pick(random, -2, 2);
      break;
    case 2:
      a.low = pick(random, -length, length);
      break;
    case 3:
      a.high = pick(random, -length, length);
      break;
    default:
      a.low = pick(random, -length, length);
      a.high = a.low + pick(random, 0, length);
  }
  return a;
}

Case random_case(Random& random) {
  Case c{"random", pick(random, 1, 260), pick(random, 1, 260), {}};
  if (pick(random, 0, 1) == 0) {
    c.cols = c.rows;
  }
  std::vector<std::uint8_t> mask(c.rows * c.cols);
  for (int64_t group = pick(random, 1, 3); group > 0; --group) {
    const View view = random_view(random, std::max(c.rows, c.cols));
    PartGroup made{view, {}};
    for (int64_t tries = pick(random, 1, 6); tries > 0; --tries) {
      Part wanted{};
      for (int k = 0; k < view.axes; ++k) {
        const int64_t above = k == 0 ? std::max(c.rows, c.cols) : view.strides[k - 1];
        wanted[k] = random_axis(random, above / view.strides[k] + 1);
      }
      for (const Part& part : inside(view, c.rows, c.cols, wanted).parts) {
        if (paint(view, {part}, c.cols, mask)) {
          made.parts.push_back(part);
        }
      }
    }
    c.groups.push_back(std::move(made));
  }
  return c;
}

// The named patterns, made by hand.
Case window(int64_t rows, int64_t cols, int64_t low, int64_t high) {
  const View flat = view_of({1}, cols - rows, 0);
  return {"window", rows, cols, {inside(flat, rows, cols, part_of({band(low, high)}))}};
}
Case dilated(int64_t rows, int64_t cols, int64_t low, int64_t high, int64_t dilation) {
  const View view = view_of({dilation, 1}, cols - rows, 0);
  return {"dilated", rows, cols, {inside(view, rows, cols, part_of({band(low, high), band(0, 0)}))}};
}
Case strided(int64_t rows, int64_t cols, int64_t stride) {
  Case c = window(rows, cols, 1 - stride, 0);
  c.name = "strided";
  c.groups.push_back(dilated(rows, cols, -kFar, -1, stride).groups[0]);
  return c;
}
Case fixed(int64_t n, int64_t stride, int64_t summary) {
  const View view = view_of({stride, 1});
  AxisRange last = kAny;
  last.col_begin = stride - summary;
  Case c{"fixed", n, n, {inside(view, n, n, part_of({band(0, 0), band(-kFar, 0)}))}};
  const PartGroup more = inside(view, n, n, part_of({band(-kFar, -1), last}));
  c.groups[0].parts.insert(c.groups[0].parts.end(), more.parts.begin(), more.parts.end());
  return c;
}
Case block_local(int64_t rows, int64_t cols, int64_t block, int64_t previous) {
  const View view = view_of({block, 1}, cols - rows, 0);
  return {"block_local", rows, cols, {inside(view, rows, cols, part_of({band(-previous, 0), kAny}))}};
}
Case documents(const std::vector<int64_t>& lengths, bool causal) {
  Case c{"documents", 0, 0, {{View{}, {}}}};
  for (const int64_t length : lengths) {
    const int64_t end = c.rows + length;
    AxisRange a{c.rows, end, c.rows, end, -kFar, causal ? 0 : kFar};
    c.groups[0].parts.push_back(part_of({a}));
    c.rows = c.cols = end;
  }
  return c;
}
Case neighborhood(int64_t height, int64_t width, int64_t window_side) {
  Case c{"neighborhood", height * width, height * width, {{view_of({width, 1}), {}}}};
  const auto axis = [&](int64_t length) {
    const int64_t left = window_side / 2, right = window_side - 1 - left;
    std::vector<AxisRange> found{{0, left, 0, window_side, -kFar, kFar},
                                 {left, length - right, 0, length, -left, right},
                                 {length - right, length, length - window_side, length, -kFar, kFar}};
    std::erase_if(found, [](AxisRange& a) { return !tighten(a); });
    return found;
  };
  for (const AxisRange& y : axis(height)) {
    for (const AxisRange& x : axis(width)) {
      c.groups[0].parts.push_back(part_of({y, x}));
    }
  }
  return c;
}
Case longnet(int64_t n, int64_t segment, int64_t rate, int64_t head) {
  AxisRange same = kAny;
  same.row_begin = same.col_begin = head;
  same.row_end = same.col_end = head + 1;
  return {"longnet", n, n, {inside(view_of({segment, rate, 1}), n, n, part_of({band(0, 0), kAny, same}))}};
}

Case bigbird(Random& random, int64_t n, int64_t block, int64_t many) {
  Case c{"bigbird", n, n, {{View{}, {}}}};
  std::vector<Part>& parts = c.groups[0].parts;
  const int64_t blocks = n / block;
  for (int64_t i = 0; i < blocks; ++i) {
    std::vector<int64_t> cols{0};
    for (int64_t j = std::max<int64_t>(0, i - 1); j <= std::min(blocks - 1, i + 1); ++j) {
      cols.push_back(j);
    }
    for (int64_t r = 0; r < many; ++r) {
      cols.push_back(pick(random, 0, blocks - 1));
    }
    std::sort(cols.begin(), cols.end());
    cols.erase(std::unique(cols.begin(), cols.end()), cols.end());
    for (const int64_t j : cols) {
      parts.push_back(part_of({{i * block, (i + 1) * block, j * block, (j + 1) * block, -kFar, kFar}}));
    }
  }
  return c;
}
/// Columns that all later rows see, and diagonals; those of the columns are cut where the diagonals are.
Case vertical_slash(Random& random, int64_t n, int64_t verticals, int64_t slashes, int64_t window_length) {
  Case c{"vertical_slash", n, n, {{View{}, {}}}};
  std::vector<int64_t> back{-1};  // distances of the slashes, a window first
  c.groups[0].parts.push_back(part_of({{0, n, 0, n, 1 - window_length, 0}}));
  for (int64_t s = 0; s < slashes; ++s) {
    const int64_t far = pick(random, window_length, n - 1);
    if (std::find(back.begin(), back.end(), far) == back.end()) {
      back.push_back(far);
      c.groups[0].parts.push_back(part_of({{far, n, 0, n - far, -far, -far}}));
    }
  }
  std::sort(back.begin(), back.end());
  std::vector<int64_t> cols(verticals);
  std::generate(cols.begin(), cols.end(), [&] { return pick(random, 0, n - window_length - 1); });
  std::sort(cols.begin(), cols.end());
  cols.erase(std::unique(cols.begin(), cols.end()), cols.end());
  for (const int64_t j : cols) {
    int64_t from = j + window_length;
    for (std::size_t s = 1; s <= back.size(); ++s) {
      const int64_t to = s < back.size() ? std::min(n, j + back[s]) : n;
      if (from < to) {
        c.groups[0].parts.push_back(part_of({{from, to, j, j + 1, -kFar, kFar}}));
      }
      from = to + 1;
    }
  }
  return c;
}

TEST(Plan, OfNothing) {
  for (const TileShape& shape : kShapes) {
    check({"nothing", 300, 70, {}}, shape);
    check({"nothing", 1, 1, {{view_of({3, 1}), {}}}}, shape);
  }
  EXPECT_TRUE(plan_parts(0, 5, {}, {}).components.empty());
  EXPECT_EQ(plan_parts(5, 0, {}, {}).components.size(), 1u);
}

TEST(Plan, OfNamedPatterns) {
  Random random(1);
  for (int n = 0; n < 60; ++n) {
    const TileShape shape = kShapes[n % 4];
    const int64_t rows = pick(random, 1, 400), cols = pick(random, 0, 1) == 0 ? rows : pick(random, 1, 400);
    check(window(rows, cols, -kFar, 0), shape);
    check(window(rows, cols, -pick(random, 0, 200), pick(random, 0, 200)), shape);
    check(dilated(rows, cols, -pick(random, 0, 20), pick(random, 0, 20), pick(random, 1, 40)), shape);
    check(strided(rows, cols, pick(random, 1, 150)), shape);
    const int64_t stride = pick(random, 1, 150);
    check(fixed(rows, stride, pick(random, 1, stride)), shape);
    check(block_local(rows, cols, pick(random, 1, 150), pick(random, 0, 2)), shape);
    const int64_t window_side = pick(random, 1, 7);
    check(neighborhood(pick(random, window_side, 20), pick(random, window_side, 20), window_side), shape);
    std::vector<int64_t> lengths(pick(random, 1, 12));
    std::generate(lengths.begin(), lengths.end(), [&] { return pick(random, 1, 100); });
    check(documents(lengths, n % 2 == 0), shape);
    check(bigbird(random, 12 * 24, 24, 2), shape);
    check(vertical_slash(random, rows + 20, 5, 3, 10), shape);
    const int64_t rate = pick(random, 1, 9);
    check(longnet(rows, rate * pick(random, 1, 30), rate, pick(random, 0, rate - 1)), shape);
    if (HasFailure()) {
      return;
    }
  }
}

TEST(Plan, OfRandomParts) {
  Random random(2);
  for (int n = 0; n < 2000 && !HasFailure(); ++n) {
    Case c = random_case(random);
    c.name += " " + std::to_string(n);
    check(c, kShapes[n % 4]);
  }
}

RegularPtr regular(const std::string& text) { return as_regular("plan", parse_pattern(text)); }

TEST(Plan, OfTexts) {
  int n = 0;
  for (const std::string text : {"full(333)",
                                 "full((7,270))",
                                 "causal(329)",
                                 "causal((5,170))",
                                 "causal((170,40))",
                                 "causal((140,270),offset=3)",
                                 "sliding_window(300,7,3)",
                                 "sliding_window((140,290),None,0)",
                                 "dilated(270,30,4)",
                                 "dilated((133,265),20,5,causal=True)",
                                 "strided(300,8)",
                                 "strided((130,297),7)",
                                 "strided(264,16,offset=-5)",
                                 "fixed(300,8,2)",
                                 "fixed((130,271),10,3)",
                                 "longformer(330,6,(0,1,77))",
                                 "longformer((140,290),5,(0,160,289))",
                                 "bigbird(328,16,1,1,2)",
                                 "bigbird((150,300),16,0,2,1)",
                                 "block_local(300,16)",
                                 "block_local((140,275),8,2)",
                                 "swin(16,20,4)",
                                 "swin(16,20,4,2)",
                                 "swin(16,22,(3,4),(1,3))",
                                 "axial(17,19)",
                                 "neighborhood((340,),7)",
                                 "neighborhood((331,),5,3)",
                                 "neighborhood((19,22),5)",
                                 "neighborhood((21,18),(3,5),(3,2),(False,True))",
                                 "neighborhood((5,8,9),3)",
                                 "neighborhood((6,8,7),(3,3,3),2)",
                                 "sliding_tile((18,22),4,3)",
                                 "sliding_tile((337,),8,3)",
                                 "sliding_tile((6,7,9),2,(1,3,1))",
                                 "longnet(296,(8,32),(1,4))",
                                 "longnet((160,296),(16,48),(2,3),head=5)",
                                 "document((5,1,140,20,133))",
                                 "document((133,134),causal=True)",
                                 "prefix_lm(270,120)",
                                 "sinks(300,4,16)",
                                 "sinks((120,290),2,9)",
                                 "vertical_slash(280,(0,3,150),(0,1,117))",
                                 "band(260,-16,3,5)",
                                 "sliding_window(290,9,2) | strided(290,6)",
                                 "sliding_window(290,9,2) & strided(290,6)",
                                 "(sliding_window(290,30,2) | strided(290,6)) & document((140,150))",
                                 "strided(290,6) & longformer(290,3,(0,50))",
                                 "neighborhood((19,22),(7,9),stride=(3,4))",
                                 "neighborhood((24,20),12,stride=4)",
                                 "neighborhood((6,8,7),(3,2,3),2,(True,False,False),stride=2)",
                                 "block_causal((140,280),24)",
                                 "tree((-1,0,1,2,3,3,3,4,4,5,6,7,7,8,12))",
                                 "place(neighborhood((16,20),5),(400,410),at=(33,7))",
                                 "place(sliding_tile((16,16),4,3),(280,300),at=(5,41))",
                                 "with_prefix(neighborhood((5,8,9),3),1)",
                                 "with_prefix(swin(16,20,4,2),130)",
                                 "diag([strided(150,8),axial(9,10),strided(100,8),causal((9,30))])",
                                 "(strided(290,6)|longformer(290,3,(0,50)))[37:260,11:]",
                                 "neighborhood((19,22),5)[100:,:303]",
                                 "neighborhood((6,8,7),(3,3,3),2)[50:200,10:300]"}) {
    const auto pattern = regular(text);
    ASSERT_NE(pattern, nullptr) << text;
    for (const TileShape& shape : {kShapes[n % 4], kShapes[(n + 1) % 4]}) {
      const std::string name = text + " in " + std::to_string(shape.rows) + "x" + std::to_string(shape.cols);
      std::vector<std::uint8_t> mask(pattern->rows() * pattern->cols()), turned(mask.size());
      pattern->mask(mask);
      pattern->transpose()->mask(turned);
      const auto made = plan(*pattern, shape);
      EXPECT_EQ(made, plan(*regular(text), shape)) << "remembered";
      Checker(mask, *made, name).check();
      Checker(turned, *transposed_plan(*pattern, shape), name + " transposed").check();
    }
    ++n;
  }
}

/// Prints what a plan came to; times are not asserted, machines differ.
void report(const Case& c, const TileShape& shape, bool turned = false) {
  double best = 1e9;
  Plan plan;
  for (int n = 0; n < 3; ++n) {
    const std::clock_t begin = std::clock();
    plan = plan_parts(c.rows, c.cols, c.groups, shape, turned);
    best = std::min(best, static_cast<double>(std::clock() - begin) * 1e3 / CLOCKS_PER_SEC);
  }
  double elements = 0;
  for (const PartGroup& group : c.groups) {
    for (const Part& part : group.parts) {
      double product = 1;
      for (int k = 0; k < group.view.axes; ++k) {
        const AxisRange& a = part[k];
        double sum = 0;
        for (int64_t r = a.row_begin; r < a.row_end; ++r) {
          sum += static_cast<double>(std::min(a.col_end - 1, r + a.high) - std::max(a.col_begin, r + a.low) + 1);
        }
        product *= sum;
      }
      elements += product;
    }
  }
  std::printf("%s%s %ldx%ld in %dx%d: %.2f ms, %zu KB, %zu masks, %zu intervals, %zu bits, ideal %.0f pairs\n",
              c.name.c_str(), turned ? ".T" : "", static_cast<long>(plan.rows), static_cast<long>(plan.cols),
              shape.rows, shape.cols, best, plan.bytes() / 1024, plan.masks.size(), plan.intervals.size() / shape.rows,
              plan.bits.size() * 32 / shape.rows / shape.cols, elements / shape.rows / shape.cols);
  for (const Component& k : plan.components) {
    const auto text = [](const Order& o) {
      std::string made;
      for (int n = 0; n < kTileAxes; ++n) {
        made += o.extent[n] == 1 ? "" : " " + std::to_string(o.extent[n]) + "*" + std::to_string(o.stride[n]);
      }
      return made;
    };
    std::int64_t full = 0;
    for (const Run& run : k.runs) {
      full += run.mask < 0 ? run.count : 0;
    }
    std::printf("   rows%s | cols%s | %zu row tiles, %zu col tiles, %zu runs, %ld pairs (%ld whole)%s\n",
                text(k.row_order).c_str(), text(k.col_order).c_str(), k.row_tiles.size(), k.col_tiles.size(),
                k.runs.size(), static_cast<long>(k.pairs), static_cast<long>(full), k.covers_rows ? ", covers" : "");
  }
}

TEST(Plan, OfLongTexts) {
  for (const std::string text : {"full(16384)",
                                 "causal(16384)",
                                 "sliding_window(16384,512,512)",
                                 "sliding_window(16384,60,60)",
                                 "block_local(16384,1024)",
                                 "longformer(16384,512,(0,1,2,3,4,5,6,7))",
                                 "dilated(16384,128,4)",
                                 "strided(16384,128)",
                                 "strided(16384,8)",
                                 "neighborhood((128,128),13)",
                                 "neighborhood((128,128),7,4)",
                                 "neighborhood((16,32,32),(5,7,7))",
                                 "neighborhood((16,32,32),(3,5,5),2)",
                                 "sliding_tile((16,32,32),(4,8,8),3)",
                                 "sliding_tile((48,80,80),(6,8,8),3)",
                                 "swin(128,128,8,4)",
                                 "swin(56,56,7,3)",
                                 "axial(128,128)",
                                 "fixed(16384,128,8)",
                                 "bigbird(16384,64,1,2,3)",
                                 "longnet(16384,(2048,4096,8192),(1,2,4))",
                                 "prefix_lm(16384,1000)",
                                 "sinks(16384,4,1024)",
                                 "sinks((1,65536),4,4096)",
                                 "sinks((16,65536),4,4096)",
                                 "vertical_slash(16384,(0,1,2,3,500,900,1777,4000),(0,1,2,3,64,1000))",
                                 "strided(1048576,1024)",
                                 "sliding_window(1048576,512,512)",
                                 "neighborhood((1024,1024),13)",
                                 "dilated(1048576,512,4)",
                                 "sinks(1048576,4,4096)"}) {
    const auto pattern = regular(text);
    Case c{text, pattern->rows(), pattern->cols(), pattern->groups()};
    std::size_t parts = 0;
    for (const PartGroup& group : c.groups) {
      parts += group.parts.size();
    }
    c.name += " (" + std::to_string(c.groups.size()) + " groups, " + std::to_string(parts) + " parts)";
    report(c, kShapes[0]);
    report(c, kShapes[1], true);
  }
}

TEST(Plan, OfLongPatterns) {
  Random random(3);
  for (const int64_t n : {int64_t{1} << 14, int64_t{1} << 20}) {
    const int64_t side = n == 1 << 14 ? 128 : 1024, stride = side;
    std::vector<int64_t> lengths;
    for (int64_t left = n; left > 0; left -= lengths.back()) {
      lengths.push_back(std::min(left, pick(random, 200, 2000)));
    }
    for (const Case& c : {window(n, n, -kFar, 0), window(n, n, -512, 512), window(n - 1000, n, -1023, 0),
                          dilated(n, n, -128, 128, 4), dilated(n - 77, n - 5, -512, 512, 6), strided(n, n, stride),
                          strided(n - 3, n, stride - 1), fixed(n, stride, 8), block_local(n, n, 1000, 1),
                          documents(lengths, true), neighborhood(side, side, 13), longnet(n, 2048, 4, 1)}) {
      report(c, kShapes[0]);
      report(c, kShapes[1], true);
    }
  }
  report(bigbird(random, 1 << 14, 64, 3), kShapes[0]);
  report(vertical_slash(random, 1 << 14, 50, 5, 128), kShapes[0]);
}

/// What a million tokens need: memory and tile pairs, which also say how long a plan takes.
TEST(Plan, OfLongSequencesIsSmall) {
  Random random(5);
  std::vector<int64_t> lengths;
  for (int64_t left = 1 << 20; left > 0; left -= lengths.back()) {
    lengths.push_back(std::min(left, pick(random, 10, 100)));
  }
  const auto bounded = [](const Case& c, std::size_t megabytes, int64_t pairs) {
    for (const bool turned : {false, true}) {
      const Plan plan = plan_parts(c.rows, c.cols, c.groups, kShapes[0], turned);
      int64_t sum = 0;
      for (const Component& component : plan.components) {
        sum += component.pairs;
      }
      EXPECT_LE(plan.bytes(), megabytes << 20) << c.name << (turned ? ".T" : "");
      EXPECT_LE(sum, pairs) << c.name << (turned ? ".T" : "");
    }
  };
  const auto named = [](const char* text) {
    const auto pattern = regular(text);
    return Case{text, pattern->rows(), pattern->cols(), pattern->groups()};
  };
  bounded(documents(lengths, true), 3, 13000);
  bounded(named("neighborhood((64,128,128),7)"), 6, 140000);
  bounded(named("neighborhood((1024,1024),13)"), 4, 50000);
  bounded(named("bigbird(1048576,64,1,2,3)"), 6, 100000);
  bounded(named("strided(1048576,1024)"), 4, 130000);
}

/// Pairs of small numbers, as plans have them by the hundred thousand, are found in a step or two.
TEST(Numbers, FindsPairsInFewSteps) {
  for (const std::uint64_t high : {std::uint64_t{1}, std::uint64_t{40}, std::uint64_t{3000}}) {
    Numbers numbers;
    int64_t asked = 0;
    for (int round = 0; round < 2; ++round) {
      for (std::uint64_t a = 0; a < high; ++a) {
        for (std::uint64_t b = 0; b < 12000 / high; ++b) {
          EXPECT_EQ(numbers.of(a << 32 | b), static_cast<int>(asked++ % static_cast<int64_t>(high * (12000 / high))));
        }
      }
    }
    EXPECT_LE(numbers.steps(), 4 * asked) << high;
  }
}

}  // namespace
}  // namespace fretwork::attention_op
