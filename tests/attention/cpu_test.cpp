// Attention on the CPU against float64 from the mask alone: every feature and dtype, odd sizes, plans made here by
// looking at each element.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <random>
#include <vector>

#include "fretwork/executor_tbb.h"
#include "fretwork/fretwork.h"
#include "fretwork/patterns.h"
#include "ops/attention/cpu/strips.h"
#include "support/attention_reference.h"
#include "support/reference.h"
#include "support/tensor.h"

namespace fretwork::attention_op {
namespace {

using Index = std::int64_t;
constexpr double kInfinity = std::numeric_limits<double>::infinity();

/// 0: row-major; 1: columns apart and rows padded; 2: (batch, row, head, column).
MemoryLayout layout_of(int number) {
  return number == 1   ? MemoryLayout{.step = 2, .gap = 3}
         : number == 2 ? MemoryLayout{.order = {0, 2, 1, 3}}
                       : MemoryLayout{};
}
Operand operand_of(const Tensor& tensor) {
  const auto& strides = tensor.view.strides;
  return {tensor.view.data, strides[0], strides[1], strides[2], strides[3]};
}
/// Sizes of 1 are broadcast.
Bias bias_of(const Tensor& tensor) {
  const TensorView& view = tensor.view;
  return {view.data, view.dtype, view.stride(0), view.stride(1), view.stride(2), view.stride(3)};
}

struct Pattern2 {
  Index rows, cols;
  std::vector<std::uint8_t> there;
  bool operator()(Index i, Index j) const { return there[static_cast<std::size_t>(i * cols + j)] != 0; }
  template <class F>
  static Pattern2 of(Index rows, Index cols, F f) {
    Pattern2 p{rows, cols, {}};
    for (Index i = 0; i < rows; ++i) {
      for (Index j = 0; j < cols; ++j) {
        p.there.push_back(f(i, j) ? 1 : 0);
      }
    }
    return p;
  }
  Pattern2 transposed() const {
    return of(cols, rows, [&](Index i, Index j) { return (*this)(j, i); });
  }
};

/// How the tokens of a side are cut into tiles: plainly, in residue classes, or in patches of a grid.
struct Cut {
  enum Kind { plain, residues, patches } kind = plain;
  Index by = 1;  ///< modulus, or width of the grid
};

void cut_side(const Cut& cut, Index tokens, int side, Order& order, std::vector<Tile>& tiles) {
  if (cut.kind == Cut::patches) {
    const int width = side >= 64 ? 8 : 4, height = side / width;
    order = {{1, height, width}, {0, cut.by, 1}};
    for (Index y = 0; y * cut.by < tokens; y += height) {
      for (Index x = 0; x < cut.by; x += width) {
        const Index high = std::min<Index>(height, (tokens - y * cut.by) / cut.by);
        tiles.push_back(
            {y * cut.by + x, {1, static_cast<int>(high), static_cast<int>(std::min<Index>(width, cut.by - x))}, -1});
      }
    }
    return;
  }
  order = {{1, 1, side}, {0, 0, cut.by}};
  for (Index c = 0; c < cut.by; ++c) {
    for (Index first = c; first < tokens; first += side * cut.by) {
      const Index count = std::min<Index>(side, (tokens - first + cut.by - 1) / cut.by);
      tiles.push_back({first, {1, 1, static_cast<int>(count)}, -1});
    }
  }
}

std::vector<Index> tile_tokens(const Order& order, const Tile& tile, int side) {
  std::vector<Index> tokens(static_cast<std::size_t>(side), -1);
  for (int n = 0; n < order.extent[0] * order.extent[1] * order.extent[2]; ++n) {
    const int u2 = n % order.extent[2], u1 = n / order.extent[2] % order.extent[1],
              u0 = n / order.extent[2] / order.extent[1];
    if (u0 < tile.count[0] && u1 < tile.count[1] && u2 < tile.count[2]) {
      tokens[static_cast<std::size_t>(n)] =
          tile.base + u0 * order.stride[0] + u1 * order.stride[1] + u2 * order.stride[2];
    }
  }
  return tokens;
}

/// Looks at each element. Components take turns by (row + column) where there are several.
class Planner {
 public:
  Planner(const Pattern2& pattern, TileShape shape, const std::vector<Cut>& cuts, bool drop_empty_rows)
      : p_(pattern), cuts_(cuts), drop_(drop_empty_rows) {
    plan_.shape = shape;
    plan_.rows = pattern.rows;
    plan_.cols = pattern.cols;
    plan_.all_rows_used = plan_.all_cols_used = true;
    for (std::size_t c = 0; c < cuts.size(); ++c) {
      component(c);
    }
  }
  std::shared_ptr<const Plan> plan() const { return std::make_shared<Plan>(plan_); }

 private:
  bool mine(std::size_t c, Index i, Index j) const {
    return i >= 0 && j >= 0 && p_(i, j) && static_cast<std::size_t>((i / 5 + j) % std::ssize(cuts_)) == c;
  }
  void component(std::size_t c) {
    Component out;
    cut_side(cuts_[c], p_.rows, plan_.shape.rows, out.row_order, out.row_tiles);
    cut_side(cuts_[c], p_.cols, plan_.shape.cols, out.col_order, out.col_tiles);
    mark(out.row_order, out.row_tiles, plan_.shape.rows, true);
    mark(out.col_order, out.col_tiles, plan_.shape.cols, false);
    out.first.push_back(0);
    std::vector<Tile> kept;
    for (const Tile& row_tile : out.row_tiles) {
      std::vector<Run> masked, whole;
      for (std::size_t t = 0; t < out.col_tiles.size(); ++t) {
        pair(c, out, row_tile, static_cast<int>(t), masked, whole);
      }
      if (drop_ && masked.empty() && whole.empty()) {
        continue;
      }
      kept.push_back(row_tile);
      for (const auto& runs : {masked, whole}) {
        for (const Run& run : runs) {
          out.runs.push_back(run);
          out.pairs += run.count;
        }
      }
      out.first.push_back(std::ssize(out.runs));
    }
    out.covers_rows = kept.size() == out.row_tiles.size();
    out.row_tiles = kept;
    plan_.components.push_back(out);
  }
  void mark(const Order& order, std::vector<Tile>& tiles, int side, bool rows) {
    const int words = std::max(plan_.shape.rows, plan_.shape.cols) / 32;
    for (Tile& tile : tiles) {
      std::vector<std::uint32_t> bits(static_cast<std::size_t>(words));
      bool all = true;
      const auto tokens = tile_tokens(order, tile, side);
      for (std::size_t n = 0; n < tokens.size(); ++n) {
        if (tokens[n] >= 0) {
          bool used = false;
          for (Index other = 0; other < (rows ? p_.cols : p_.rows); ++other) {
            used = used || (rows ? p_(tokens[n], other) : p_(other, tokens[n]));
          }
          all = all && used;
          bits[n / 32] |= static_cast<std::uint32_t>(used) << n % 32;
        }
      }
      if (!all) {
        tile.used = static_cast<int>(std::ssize(plan_.used));
        plan_.used.insert(plan_.used.end(), bits.begin(), bits.end());
        (rows ? plan_.all_rows_used : plan_.all_cols_used) = false;
      }
    }
  }
  static void push(std::vector<Run>& runs, int tile, int mask) {
    if (!runs.empty() && runs.back().first + runs.back().count == tile && runs.back().mask == mask) {
      ++runs.back().count;
    } else {
      runs.push_back({tile, 1, mask});
    }
  }
  void pair(std::size_t c, const Component& out, const Tile& row_tile, int t, std::vector<Run>& masked,
            std::vector<Run>& whole) {
    const auto rows = tile_tokens(out.row_order, row_tile, plan_.shape.rows);
    const auto cols = tile_tokens(out.col_order, out.col_tiles[static_cast<std::size_t>(t)], plan_.shape.cols);
    const int height = plan_.shape.rows, width = plan_.shape.cols;
    std::vector<std::uint32_t> bits(static_cast<std::size_t>(height * width / 32));
    Mask band{height + width, -height - width, 0};
    bool none = true, all = true;
    for (int m = 0; m < height; ++m) {
      for (int n = 0; n < width; ++n) {
        const bool there = mine(c, rows[static_cast<std::size_t>(m)], cols[static_cast<std::size_t>(n)]);
        none = none && !there;
        all = all && (there || rows[static_cast<std::size_t>(m)] < 0);
        if (there) {
          bits[static_cast<std::size_t>((m * width + n) / 32)] |= 1u << n % 32;
          band = {std::min(band.low, n - m), std::max(band.high, n - m), std::max(band.limit, n + 1)};
        }
      }
    }
    if (none) {
      return;
    }
    if (all) {
      push(whole, t, -1);
      return;
    }
    bool banded = true, intervals = true;
    std::vector<Interval> each(static_cast<std::size_t>(height));
    for (int m = 0; m < height; ++m) {
      Interval& row = each[static_cast<std::size_t>(m)];
      for (int n = 0; n < width; ++n) {
        const bool in_band = band.low <= n - m && n - m <= band.high && n < band.limit;
        const bool there = (bits[static_cast<std::size_t>((m * width + n) / 32)] >> n % 32 & 1u) != 0;
        banded = banded && (there == in_band || rows[static_cast<std::size_t>(m)] < 0);
        if (there) {
          intervals = intervals && (row.end == 0 || row.end == n);
          row = {row.end == 0 ? static_cast<std::uint8_t>(n) : row.begin, static_cast<std::uint8_t>(n + 1)};
        }
      }
    }
    if (!banded && intervals) {
      band = {0, 0, 0, -1, static_cast<int>(plan_.intervals.size())};
      plan_.intervals.insert(plan_.intervals.end(), each.begin(), each.end());
    } else if (!banded) {
      auto& number = known_[bits];
      if (number == 0) {
        number = static_cast<int>(plan_.bits.size()) + 1;
        plan_.bits.insert(plan_.bits.end(), bits.begin(), bits.end());
      }
      band = {0, 0, 0, number - 1};
    }
    plan_.masks.push_back(band);
    push(masked, t, static_cast<int>(plan_.masks.size()) - 1);
  }

  const Pattern2& p_;
  const std::vector<Cut>& cuts_;
  bool drop_;
  Plan plan_;
  std::map<std::vector<std::uint32_t>, int> known_;
};

struct Case {
  DType dtype = DType::f32;
  Index batch = 1, heads = 2, kv_heads = 1, rows = 70, cols = 90, depth = 24, value_depth = 20;
  std::vector<Pattern2> patterns;  ///< one, or one for each head
  TileShape shape{64, 64}, transposed_shape{32, 64};
  std::vector<Cut> cuts{Cut{}};
  bool drop_empty_rows = false;
  double scale = 0.3, softcap = 0, dropout = 0, size = 1;
  std::array<Index, 4> bias{0, 0, 0, 0};  ///< none
  double far_bias = 0;  ///< if not zero, what all of the bias is for the second half of the keys; else 0
  DType bias_dtype = DType::f32;
  bool slopes = false, d_lse = false;
  Index padding =
      0;  ///< if not 0, key j of batch element b is not seen where (j + b) % padding is 0, nor the last third
  int layout = 0;
  std::vector<RegularPtr> named;  ///< if any, the planner's own plans of these, whose masks `patterns` are
  bool poison = false;            ///< NaN in keys and queries that are not used
};

struct Tensors {
  Tensor q, k, v, d_o, d_lse, bias, slopes;
  Tensor o, lse, d_q, d_k, d_v, d_bias;
  Index seed = 0x123456789abcdef;
  std::vector<std::uint8_t> padding{};  ///< two bytes for each (batch, key), of which the second counts
  bool hidden(Index b, Index j, Index cols) const {
    return !padding.empty() && padding[static_cast<std::size_t>(2 * (b * cols + j) + 1)] != 0;
  }
};

DType statistics(DType dtype) { return dtype == DType::f64 ? DType::f64 : DType::f32; }

Tensors make(const Case& c, std::mt19937& random) {
  const auto bias = c.bias[0] == 0 ? std::array<Index, 4>{1, 1, 1, 1} : c.bias;
  const auto t = [&](Index h, Index n, Index d) { return Tensor(c.dtype, {c.batch, h, n, d}, layout_of(c.layout)); };
  const auto s = [&] { return Tensor(statistics(c.dtype), {c.batch, c.heads, c.rows, 1}, layout_of(c.layout)); };
  Tensors x{t(c.heads, c.rows, c.depth),
            t(c.kv_heads, c.cols, c.depth),
            t(c.kv_heads, c.cols, c.value_depth),
            t(c.heads, c.rows, c.value_depth),
            s(),
            Tensor(c.bias_dtype, bias, layout_of(c.layout)),
            Tensor(statistics(c.dtype), {1, c.heads, 1, 1}),
            t(c.heads, c.rows, c.value_depth),
            s(),
            t(c.heads, c.rows, c.depth),
            t(c.kv_heads, c.cols, c.depth),
            t(c.kv_heads, c.cols, c.value_depth),
            Tensor(c.bias_dtype, bias, layout_of(c.layout))};
  x.q.randomise(random, std::normal_distribution(0.0, c.size));
  x.k.randomise(random);
  x.v.randomise(random);
  x.d_o.randomise(random);
  x.d_lse.randomise(random);
  x.bias.randomise(random);
  if (c.far_bias != 0) {
    x.bias.each([&](const auto& at) { x.bias.set(at, at[3] < c.cols / 2 ? 0 : c.far_bias); });
  }
  x.slopes.randomise(random, std::normal_distribution(0.0, 0.1));
  for (Index n = 0; n < c.batch * c.cols && c.padding != 0; ++n) {
    const Index b = n / c.cols, j = n % c.cols;
    const bool hidden = (j + b) % c.padding == 0 || 3 * j >= 2 * c.cols;
    x.padding.insert(x.padding.end(), {std::uint8_t{1}, static_cast<std::uint8_t>(hidden ? 1 : 0)});
    for (Index h = 0; h < c.kv_heads && hidden; ++h) {  // what is not seen may be anything
      for (Index d = 0; d < c.depth; ++d) {
        x.k.set({b, h, j, d}, std::numeric_limits<double>::quiet_NaN());
      }
      for (Index d = 0; d < c.value_depth; ++d) {
        x.v.set({b, h, j, d}, kInfinity);
      }
    }
  }
  return x;
}

BackwardProblem problem_of(const Case& c, Tensors& x) {
  BackwardProblem b;
  Problem& p = b.forward;
  p.dtype = c.dtype;
  p.batch = c.batch;
  p.heads = c.heads;
  p.kv_heads = c.kv_heads;
  p.rows = c.rows;
  p.cols = c.cols;
  p.depth = c.depth;
  p.value_depth = c.value_depth;
  p.scale = c.scale;
  p.softcap = c.softcap;
  p.q = operand_of(x.q);
  p.k = operand_of(x.k);
  p.v = operand_of(x.v);
  p.o = operand_of(x.o);
  p.lse = operand_of(x.lse);
  if (c.bias[0] != 0) {
    p.bias = bias_of(x.bias);
    b.d_bias = bias_of(x.d_bias);
    std::ranges::copy(c.bias, b.bias_sizes);
  }
  if (c.slopes) {
    p.slopes = operand_of(x.slopes);
  }
  p.dropout = {c.dropout, &x.seed};
  if (c.padding != 0) {
    p.padding = {x.padding.data() + 1, 2 * c.cols, 2};
  }
  b.d_o = operand_of(x.d_o);
  if (c.d_lse) {
    b.d_lse = operand_of(x.d_lse);
  }
  b.d_q = operand_of(x.d_q);
  b.d_k = operand_of(x.d_k);
  b.d_v = operand_of(x.d_v);
  return b;
}

AttentionReference reference(const Case& c, const Tensors& x) {
  AttentionInputs in{c.batch, c.heads, c.kv_heads, c.rows, c.cols, c.depth, c.value_depth, {}, c.scale};
  in.there = [&](Index b, Index h, Index i, Index j) {
    const std::size_t count = c.patterns.size(), own = static_cast<std::size_t>(b * c.heads + h);
    return c.patterns[own % count](i, j) && !x.hidden(b, j, c.cols);
  };
  in.softcap = c.softcap, in.dropout = c.dropout, in.seed = x.seed;
  in.q = x.q.values(), in.k = x.k.values(), in.v = x.v.values(), in.d_o = x.d_o.values();
  if (c.d_lse) {
    in.d_lse = x.d_lse.values();
  }
  if (c.bias[0] != 0) {
    in.bias = x.bias.values(), in.bias_sizes = c.bias;
  }
  if (c.slopes) {
    in.slopes = x.slopes.values();
  }
  return AttentionReference(in);
}

/// Two products and a softmax: f32 and f64, in which these are accumulated too, lose more than the last rounding.
double tolerance(DType dtype) {
  return (dtype == DType::f64 || dtype == DType::f32 ? 5 : 2) * relative_tolerance(dtype);
}

/// Errors are measured against the largest magnitude, or 1 if that is more.
void expect_close(const Tensor& got, const std::vector<double>& expected, double allowed, const char* what) {
  fretwork::expect_close(got.values(), expected, allowed, what, 1.0);
  EXPECT_TRUE(got.intact_around()) << what << ": bytes beside the elements were written";
}

struct Planned {
  std::vector<std::shared_ptr<const Plan>> forward, transposed;
};

Planned plans_of(const Case& c) {
  Planned plans;
  for (const Pattern2& pattern : c.patterns) {
    const Pattern2 turned = pattern.transposed();
    plans.forward.push_back(Planner(pattern, c.shape, c.cuts, c.drop_empty_rows).plan());
    plans.transposed.push_back(Planner(turned, c.transposed_shape, c.cuts, c.drop_empty_rows).plan());
  }
  return plans;
}

/// Gradients from one call, which may compute them from the same scores, or from two, each with scores of its own.
enum class Gradients { together, apart };

void run(const Case& c, Tensors& x, Executor& executor, Gradients gradients = Gradients::together) {
  Context context = Context::cpu(executor);
  BackwardProblem b = problem_of(c, x);
  const Planned plans = plans_of(c);
  if (c.named.empty()) {
    cpu::forward(b.forward, plans.forward, context);
  } else {
    b.forward.patterns = c.named;
    cpu::forward(b.forward, context);
  }
  const auto backward = [&](const BackwardProblem& wanted) {
    c.named.empty() ? cpu::backward(wanted, plans.forward, plans.transposed, context) : cpu::backward(wanted, context);
  };
  if (gradients == Gradients::together) {
    backward(b);
    return;
  }
  BackwardProblem queries = b, keys = b;
  queries.d_k = queries.d_v = {};
  keys.d_q = {}, keys.d_bias = {};
  backward(queries);
  backward(keys);
}

/// NaN in the keys, values, queries and gradients that no element of any head uses.
void poison(const Case& c, Tensors& x) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const auto pattern = [&](Index h) -> const Pattern2& {
    return c.patterns[c.patterns.size() == 1 ? 0 : static_cast<std::size_t>(h)];
  };
  x.q.each([&](const auto& at) {
    const Index b = at[0], h = at[1], i = at[2], d = at[3];
    bool used = false;
    for (Index j = 0; j < c.cols; ++j) {
      used = used || pattern(h)(i, j);
    }
    if (!used) {
      x.q.set({b, h, i, d}, nan);
      x.d_o.set({b, h, i, d % c.value_depth}, d % 2 == 0 ? nan : kInfinity);
    }
  });
  x.k.each([&](const auto& at) {
    const Index b = at[0], kv = at[1], j = at[2], d = at[3];
    bool used = false;
    for (Index h = 0; h < c.heads; ++h) {
      for (Index i = 0; i < c.rows && h / (c.heads / c.kv_heads) == kv; ++i) {
        used = used || pattern(h)(i, j);
      }
    }
    if (!used) {
      x.k.set({b, kv, j, d}, nan);
      x.v.set({b, kv, j, d % c.value_depth}, d % 2 == 0 ? nan : kInfinity);
    }
  });
}

void check(const Case& c, unsigned seed = 1) {
  std::mt19937 random(seed);
  Tensors x = make(c, random);
  if (c.poison) {
    poison(c, x);
  }
  const AttentionReference expected = reference(c, x);
  for (const Gradients gradients : {Gradients::together, Gradients::apart}) {
    SCOPED_TRACE(gradients == Gradients::together ? "together" : "apart");
    run(c, x, serial_executor(), gradients);
    const double allowed = tolerance(c.dtype);
    expect_close(x.o, expected.o, allowed, "o");
    expect_close(x.lse, expected.lse, std::min(allowed, 1e-5), "lse");
    expect_close(x.d_q, expected.d_q, 2 * allowed, "d_q");
    expect_close(x.d_k, expected.d_k, 2 * allowed, "d_k");
    expect_close(x.d_v, expected.d_v, 2 * allowed, "d_v");
    if (c.bias[0] != 0) {
      expect_close(x.d_bias, expected.d_bias, 2 * std::max(allowed, tolerance(c.bias_dtype)), "d_bias");
    }
  }
}

Pattern2 window(Index rows, Index cols, Index left, Index right) {
  return Pattern2::of(rows, cols, [=](Index i, Index j) {
    const Index d = j - (i + cols - rows);
    return -left <= d && d <= right;
  });
}
Pattern2 full(Index rows, Index cols) {
  return Pattern2::of(rows, cols, [](Index, Index) { return true; });
}
Pattern2 dilated(Index rows, Index cols, Index left, Index by) {
  return Pattern2::of(rows, cols, [=](Index i, Index j) { return std::abs(i - j) <= left * by && (i - j) % by == 0; });
}
/// Random elements; some rows and columns have none.
Pattern2 random_pattern(Index rows, Index cols, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<bool> row(static_cast<std::size_t>(rows)), col(static_cast<std::size_t>(cols));
  for (auto&& x : row) {
    x = random() % 5 != 0;
  }
  for (auto&& x : col) {
    x = random() % 5 != 0;
  }
  return Pattern2::of(rows, cols, [&](Index i, Index j) {
    return row[static_cast<std::size_t>(i)] && col[static_cast<std::size_t>(j)] && random() % 3 == 0;
  });
}

Case with(Pattern2 pattern) {
  Case c;
  c.rows = pattern.rows;
  c.cols = pattern.cols;
  c.patterns = {std::move(pattern)};
  return c;
}

TEST(AttentionCpu, Dtypes) {
  for (const DType dtype : {DType::f64, DType::f32, DType::f16, DType::bf16}) {
    for (int layout = 0; layout < 3; ++layout) {
      SCOPED_TRACE(std::string(name_of(dtype)) + " layout " + std::to_string(layout));
      Case c = with(window(100, 131, 20, 9));
      c.dtype = dtype;
      c.layout = layout;
      check(c);
    }
  }
}

TEST(AttentionCpu, Depths) {
  for (const auto& [depth, value_depth] : {std::pair<Index, Index>{1, 1}, {7, 65}, {64, 3}, {80, 96}, {128, 256}}) {
    for (const DType dtype : {DType::f64, DType::f32}) {
      SCOPED_TRACE(std::to_string(depth) + ", " + std::to_string(value_depth));
      Case c = with(window(67, 67, 12, 0));
      c.dtype = dtype;
      c.depth = depth;
      c.value_depth = value_depth;
      check(c);
    }
  }
}

TEST(AttentionCpu, Sizes) {
  for (const auto& [rows, cols] : {std::pair<Index, Index>{1, 1}, {1, 200}, {200, 1}, {5, 33}, {64, 128}, {129, 63}}) {
    for (const TileShape shape : {TileShape{64, 64}, TileShape{32, 32}, TileShape{128, 64}}) {
      SCOPED_TRACE(std::to_string(rows) + " × " + std::to_string(cols));
      Case c = with(full(rows, cols));
      c.shape = c.transposed_shape = shape;
      check(c);
      c.patterns = {random_pattern(rows, cols, 3)};
      c.poison = true;
      check(c);
    }
  }
}

TEST(AttentionCpu, LongRows) {  // more columns than scores are held at a time, larger ones coming later
  Case c = with(full(9, 1500));
  c.kv_heads = 2;
  c.size = 5;
  check(c);
  c = with(full(1500, 9));
  check(c);
}

TEST(AttentionCpu, Heads) {
  Case c = with(random_pattern(60, 75, 5));
  c.batch = 2;
  c.heads = 6;
  for (const Index kv_heads : {1, 2, 3, 6}) {
    c.kv_heads = kv_heads;
    c.patterns.resize(1);
    check(c);
    c.patterns.clear();
    for (unsigned h = 0; h < 6; ++h) {
      c.patterns.push_back(h % 2 == 0 ? random_pattern(60, 75, h) : window(60, 75, h, h));
    }
    c.poison = true;
    check(c);
  }
}

TEST(AttentionCpu, Orders) {
  for (const bool drop : {false, true}) {
    for (const TileShape shape : {TileShape{64, 64}, TileShape{32, 32}}) {
      Case c = with(dilated(150, 150, 6, 4));
      c.shape = c.transposed_shape = shape;
      c.drop_empty_rows = drop;
      c.cuts = {{Cut::residues, 4}};
      check(c);
      c.cuts = {{Cut::plain, 1}, {Cut::residues, 4}};
      check(c);
      c = with(Pattern2::of(150, 150, [](Index i, Index j) {  // a grid of 15 × 10
        return std::abs(i / 10 - j / 10) <= 2 && std::abs(i % 10 - j % 10) <= 1;
      }));
      c.shape = c.transposed_shape = shape;
      c.drop_empty_rows = drop;
      c.cuts = {{Cut::patches, 10}};
      check(c);
      c = with(random_pattern(150, 100, 9));
      c.drop_empty_rows = drop;
      c.cuts = {{Cut::patches, 10}, {Cut::residues, 3}, {Cut::plain, 1}};
      c.poison = true;
      check(c);
    }
  }
}

TEST(AttentionCpu, EmptyRows) {
  for (const bool drop : {false, true}) {
    Case c = with(Pattern2::of(90, 80, [](Index i, Index j) { return i % 7 != 3 && i < 64 && j < i; }));
    c.drop_empty_rows = drop;
    c.poison = true;
    c.d_lse = true;
    check(c);
    c.patterns = {Pattern2::of(90, 80, [](Index, Index) { return false; })};
    check(c);
  }
  Case c = with(full(40, 0));
  check(c);
}

TEST(AttentionCpu, UsedElsewhere) {  // an empty row stays zeros beside a row whose values are not finite
  Case c = with(Pattern2::of(8, 8, [](Index i, Index) { return i == 3; }));
  c.heads = 1;
  std::mt19937 random(2);
  Tensors x = make(c, random);
  x.v.set({0, 0, 5, 0}, kInfinity);
  run(c, x, serial_executor());
  x.o.each([&](const auto& at) {
    if (at[2] != 3) {
      EXPECT_EQ(x.o.get(at), 0);
    }
  });
  EXPECT_EQ(x.o.get({0, 0, 3, 0}), kInfinity);
}

TEST(AttentionCpu, NotANumber) {  // and a NaN that is used is seen
  Case c = with(window(40, 40, 3, 3));
  c.heads = 1;
  std::mt19937 random(2);
  Tensors x = make(c, random);
  x.k.set({0, 0, 20, 0}, std::numeric_limits<double>::quiet_NaN());
  run(c, x, serial_executor());
  for (Index i = 0; i < 40; ++i) {
    EXPECT_EQ(std::isnan(x.o.get({0, 0, i, 0})), std::abs(i - 20) <= 3) << i;
    EXPECT_EQ(std::isnan(x.lse.get({0, 0, i, 0})), std::abs(i - 20) <= 3) << i;
  }
}

TEST(AttentionCpu, Features) {
  for (const DType dtype : {DType::f64, DType::f32, DType::bf16}) {
    for (int features = 0; features < 16; ++features) {
      SCOPED_TRACE(std::string(name_of(dtype)) + " features " + std::to_string(features));
      Case c = with(random_pattern(70, 90, 4));
      c.dtype = dtype;
      c.cuts = {{Cut::plain, 1}, {Cut::residues, 2}};
      c.poison = true;
      c.softcap = (features & 1) != 0 ? 1.5 : 0;
      c.slopes = (features & 2) != 0;
      c.dropout = (features & 4) != 0 ? 0.3 : 0;
      c.d_lse = (features & 8) != 0;
      check(c);
    }
  }
}

TEST(AttentionCpu, Bias) {
  for (const DType dtype : {DType::f64, DType::f32, DType::f16}) {
    for (int sizes = 0; sizes < 16; ++sizes) {
      for (int heads = 0; heads < 2; ++heads) {
        SCOPED_TRACE(std::string(name_of(dtype)) + " sizes " + std::to_string(sizes));
        Case c = with(random_pattern(41, 70, 4));
        c.dtype = c.bias_dtype = dtype;
        c.batch = 2;
        c.layout = sizes % 3;
        c.softcap = 2;
        c.dropout = 0.2;
        c.bias = {(sizes & 1) != 0 ? 2 : 1, (sizes & 2) != 0 ? 2 : 1, (sizes & 4) != 0 ? 41 : 1,
                  (sizes & 8) != 0 ? 70 : 1};
        if (heads != 0) {
          c.patterns.push_back(window(41, 70, 5, 6));
          c.cuts = {{Cut::plain, 1}, {Cut::residues, 5}};
        }
        check(c);
      }
    }
  }
}

Case with(const std::vector<RegularPtr>& named) {
  Case c;
  c.rows = named[0]->rows();
  c.cols = named[0]->cols();
  c.named = named;
  for (const RegularPtr& pattern : named) {
    Pattern2 mask{c.rows, c.cols, std::vector<std::uint8_t>(static_cast<std::size_t>(c.rows * c.cols))};
    pattern->mask(mask.there);
    c.patterns.push_back(std::move(mask));
  }
  return c;
}

TEST(AttentionCpu, NamedPatterns) {
  for (const RegularPtr& pattern :
       {patterns::sliding_window(150, 20, 3), patterns::causal({70, 150}), patterns::strided(200, 16),
        patterns::dilated(180, 5, 4), patterns::strided(130, 40), patterns::dilated(20, 2, 3),
        // A key in several tiles of columns.
        patterns::neighborhood(std::array<Index, 2>{10, 13}, std::array<Index, 2>{5, 5}, std::array<Index, 1>{1},
                               std::array<Index, 1>{0})}) {
    SCOPED_TRACE(pattern->text());
    Case c = with(std::vector{pattern});
    check(c);
    c.bias = {1, 2, c.rows, c.cols};
    c.slopes = true;
    c.dropout = 0.1;
    c.poison = true;
    check(c);
  }
  const RegularPtr shared = patterns::strided(140, 12);
  Case c = with({shared, patterns::sliding_window(140, 9, 9), shared, patterns::dilated(140, 3, 7)});
  c.heads = 4;
  c.kv_heads = 2;
  check(c);
}

/// Bytes are those of one thread.
void check_threads(const Case& c) {
  std::mt19937 random(3);
  Tensors one = make(c, random);
  run(c, one, serial_executor());
  for (const int threads : {2, 3}) {
    std::mt19937 again(3);
    Tensors more = make(c, again);
    TbbExecutor executor(threads);
    run(c, more, executor);
    EXPECT_TRUE(one.o.same_bytes(more.o) && one.lse.same_bytes(more.lse));
    EXPECT_TRUE(one.d_q.same_bytes(more.d_q) && one.d_k.same_bytes(more.d_k) && one.d_v.same_bytes(more.d_v));
    EXPECT_TRUE(one.d_bias.same_bytes(more.d_bias));
  }
}

TEST(AttentionCpu, Threads) {  // that share each head, and that take whole ones
  Case c = with(dilated(300, 300, 20, 3));
  c.batch = 2;
  c.heads = 4;
  c.kv_heads = 2;
  c.dropout = 0.1;
  for (const bool components : {false, true}) {
    if (components) {
      c.cuts = {{Cut::residues, 3}, {Cut::plain, 1}};
    }
    for (const Index bias : {0, 1}) {
      c.bias = {bias, bias, 300 * bias, 300 * bias};
      check_threads(c);
    }
  }
}

TEST(AttentionCpu, OnePassOrTwo) {  // few heads with much work each, many heads, and those that share keys
  for (const auto& [heads, kv_heads] : {std::pair<Index, Index>{1, 1}, {17, 17}, {4, 2}}) {
    Case c = with(window(600, 700, 650, 0));
    c.heads = heads;
    c.kv_heads = kv_heads;
    c.depth = heads == 1 ? 60 : 8;
    c.value_depth = heads == 1 ? 33 : 5;
    check(c);
    check_threads(c);
  }
}

TEST(AttentionCpu, LargeScores) {
  Case c = with(window(70, 70, 20, 20));
  c.size = 1e4;
  std::mt19937 random(3);
  Tensors x = make(c, random);
  run(c, x, serial_executor());
  const AttentionReference expected = reference(c, x);
  expect_close(x.o, expected.o, 5e-3, "o");
}

TEST(AttentionCpu, Padding) {  // alone, and with all that there is
  for (const DType dtype : {DType::f64, DType::f32, DType::bf16}) {
    for (const Pattern2& pattern : {full(70, 150), window(150, 150, 40, 3), dilated(130, 130, 5, 7)}) {
      Case c = with(pattern);
      c.dtype = dtype;
      c.heads = 4;
      c.kv_heads = 2;
      c.padding = 5;
      check(c);
      c.cuts = {{Cut::residues, 7}, {Cut::plain, 1}};
      c.bias = {1, 1, 1, c.cols};
      c.slopes = c.d_lse = true;
      c.dropout = 0.2;
      c.softcap = 3;
      check(c);
      c.bias = {1, 4, c.rows, c.cols};
      c.padding = 1;  // nothing is left
      check(c);
    }
  }
}

TEST(AttentionCpu, PatternsOfBatchElements) {
  Case c = with(full(90, 90));
  c.batch = 3;
  c.heads = 2;
  c.kv_heads = 1;
  c.patterns = {window(90, 90, 4, 4),      full(90, 90), dilated(90, 90, 3, 5),
                random_pattern(90, 90, 7), full(90, 90), window(90, 90, 4, 4)};
  check(c);
  c.bias = {1, 1, 1, 90};
  c.dropout = 0.1;
  c.padding = 4;
  check(c);
}

TEST(AttentionCpu, LargeBias) {  // a number, however large: rows that see no other keys average them
  for (const double size : {1e5, 1e9, 1e11, 1e13, 1e20, 1e30, 2e38, 3.4e38}) {
    for (const double bias : {-size, size}) {
      SCOPED_TRACE(std::to_string(bias));
      Case c = with(window(40, 40, 3, 3));
      c.size = 0;  // scores are the bias alone, which has no room for more
      c.bias = {1, 1, 1, 40};
      c.far_bias = bias;
      c.d_lse = true;
      check(c);
      c.bias = {1, 2, 40, 40};
      c.dtype = DType::f64;
      check(c);
    }
  }
}

}  // namespace
}  // namespace fretwork::attention_op
