// Makes plans from patterns, marks the rows and columns that some element uses, and caches the result.
#include "ops/attention/plan.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstdio>
#include <cstring>
#include <string>
#include <utility>

#include "fretwork/ops.h"
#include "ops/attention/tiling.h"
#include "pattern/checks.h"
#include "runtime/plan_cache.h"

namespace fretwork::attention_op {

namespace {

/// One bit for each position of a side: whether some element has it.
class Used {
 public:
  Used(std::int64_t length, std::span<const Counted> views, bool row)
      : length_(length), row_(row), all_(length == 0), words_(static_cast<std::size_t>((length + 63) / 64)) {
    std::int64_t most = 0;
    for (const Counted& some : views) {
      for (std::size_t p = 0; p < some.parts.size() && !all_; ++p) {
        most += set(some.view, some.parts[p]);
        if (most >= length_) {  // no use in counting before there can be enough
          most = count();
          all_ = most == length_;
        }
      }
    }
    flush();
  }
  bool all() const { return all_; }
  bool operator[](std::int64_t at) const { return (words_[static_cast<std::size_t>(at / 64)] >> (at & 63) & 1) != 0; }

 private:
  std::int64_t count() {
    flush();
    std::int64_t sum = 0;
    for (const std::uint64_t word : words_) {
      sum += std::popcount(word);
    }
    return sum;
  }

  std::int64_t set(const View& view, const AxisRange* part) {
    std::array<std::int64_t, kMaxAxes> at{};
    std::int64_t lines = 1, base = row_ ? -view.row_shift : -view.col_shift;
    const auto begin = [&](std::size_t k) { return row_ ? part[k].row_begin : part[k].col_begin; };
    const auto size = [&](std::size_t k) { return (row_ ? part[k].row_end : part[k].col_end) - begin(k); };
    const auto last = static_cast<std::size_t>(view.axes - 1), inner = view.axes > 2 ? last - 1 : last;
    for (std::size_t k = 0; k <= last; ++k) {
      base += begin(k) * view.strides[k];
      lines *= k < inner ? size(k) : 1;
    }
    if (inner < last) {
      draw_line(size(inner), size(last), view.strides[inner]);
    }
    for (std::int64_t line = 0; line < lines; ++line) {
      std::int64_t from = base;
      for (std::size_t k = 0; k < inner; ++k) {
        from += at[k] * view.strides[k];
      }
      if (inner < last) {
        set_line(from);
      } else {
        set(from, from + size(last));
      }
      for (std::size_t k = inner; k-- > 0;) {
        at[k] = at[k] + 1 == size(k) ? 0 : at[k] + 1;
        if (at[k] != 0) {
          break;
        }
      }
    }
    return lines * size(last) * (inner < last ? size(inner) : 1);
  }

  /// What a part has on its two innermost axes, which is the same wherever it is: `count` runs of `width`, `step`
  /// apart.
  void draw_line(std::int64_t count, std::int64_t width, std::int64_t step) {
    line_.assign(static_cast<std::size_t>(((count - 1) * step + width + 63) / 64), 0);
    for (std::int64_t n = 0; n < count; ++n) {
      set_bits(line_, n * step, n * step + width);
    }
  }

  void set_line(std::int64_t from) {
    std::uint64_t* word = words_.data() + from / 64;
    const int shift = static_cast<int>(from & 63);
    for (const std::uint64_t bits : line_) {
      *word++ |= bits << shift;
      if (const std::uint64_t rest = shift == 0 ? 0 : bits >> (64 - shift); rest != 0) {
        *word |= rest;
      }
    }
  }

  /// What follows on what came before, as documents do, is set with it.
  void set(std::int64_t begin, std::int64_t end) {
    if (begin != end_) {
      flush();
      begin_ = begin;
    }
    end_ = end;
  }

  void flush() {
    set_bits(words_, begin_, end_);
    begin_ = end_;
  }

  static void set_bits(std::vector<std::uint64_t>& words, std::int64_t begin, std::int64_t end) {
    while (begin < end) {
      const std::int64_t stop = std::min(end, (begin | 63) + 1);
      const std::uint64_t bits = stop - begin == 64 ? ~std::uint64_t{0} : (std::uint64_t{1} << (stop - begin)) - 1;
      words[static_cast<std::size_t>(begin / 64)] |= bits << (begin & 63);
      begin = stop;
    }
  }

  std::int64_t length_;
  std::int64_t begin_ = 0, end_ = 0;  ///< not yet set
  bool row_, all_;
  std::vector<std::uint64_t> words_, line_;
};

void mark(const Used& used, const Order& order, Plan& plan, Tile& tile, bool& all) {
  std::vector<std::uint32_t> bits(static_cast<std::size_t>(std::max(plan.shape.rows, plan.shape.cols) / 32));
  bool whole = true;
  for (int a = 0; a < tile.count[0]; ++a) {
    for (int b = 0; b < tile.count[1]; ++b) {
      for (int c = 0; c < tile.count[2]; ++c) {
        const bool is = used[tile.base + a * order.stride[0] + b * order.stride[1] + c * order.stride[2]];
        const int n = (a * order.extent[1] + b) * order.extent[2] + c;
        bits[static_cast<std::size_t>(n / 32)] |= static_cast<std::uint32_t>(is) << (n & 31);
        whole = whole && is;
      }
    }
  }
  if (!whole) {
    all = false;
    tile.used = static_cast<int>(plan.used.size());
    plan.used.insert(plan.used.end(), bits.begin(), bits.end());
  }
}

/// The same range, with bounds of its band that no pair of digits reaches moved to where they matter.
AxisRange tightened(AxisRange range) {
  range.low = std::max(range.low, range.col_begin - (range.row_end - 1));
  range.high = std::min(range.high, range.col_end - 1 - range.row_begin);
  return range;
}

AxisRange transposed(const AxisRange& a) { return {a.col_begin, a.col_end, a.row_begin, a.row_end, -a.high, -a.low}; }

/// The parts of each view, or those of the transposed pattern.
std::vector<Counted> counted(std::span<const PartGroup> groups, bool transpose) {
  std::vector<Counted> views;
  for (const PartGroup& group : groups) {
    View view = group.view;
    if (transpose) {
      std::swap(view.row_shift, view.col_shift);
    }
    auto at = std::find_if(views.begin(), views.end(), [&](const Counted& some) { return some.view == view; });
    if (at == views.end()) {
      at = views.insert(at, {view, Parts(view.axes)});
    }
    at->parts.reserve(at->parts.size() + group.parts.size());
    Part tight;
    for (const Part& part : group.parts) {
      std::transform(part.begin(), part.begin() + view.axes, tight.begin(), [&](const AxisRange& range) {
        return transpose ? transposed(tightened(range)) : tightened(range);
      });
      at->parts.add(tight.data());
    }
  }
  return views;
}

/// Plain order, no runs: what is left of a plan where nothing is there.
Component empty_component(const Plan& plan) {
  Component made;
  made.row_order = {{1, 1, plan.shape.rows}, {0, 0, 1}};
  made.col_order = {{1, 1, plan.shape.cols}, {0, 0, 1}};
  made.first = {0};
  for (std::int64_t at = 0; at < plan.rows; at += plan.shape.rows) {
    made.row_tiles.push_back(
        {at, {1, 1, static_cast<int>(std::min<std::int64_t>(plan.shape.rows, plan.rows - at))}, -1});
    made.first.push_back(0);
  }
  made.covers_rows = true;
  return made;
}

std::shared_ptr<const Plan> find_plan(const RegularPattern& pattern, const TileShape& shape, bool transpose) {
  static PlanCache<Plan>& cache = *std::make_unique<PlanCache<Plan>>().release();
  const std::string key =
      std::to_string(shape.rows) + (transpose ? "t" : "x") + std::to_string(shape.cols) + " " + pattern.key();
  return cache.get(hash128(key),
                   [&] { return plan_parts(pattern.rows(), pattern.cols(), pattern.groups(), shape, transpose); });
}

template <typename T>
std::size_t size_of(const std::vector<T>& x) {
  return x.capacity() * sizeof(T);
}

std::string order_text(const Order& order) {
  const auto& [extent, stride] = order;
  if (extent[0] * extent[1] == 1) {
    return stride[2] <= 1 ? "in plain order" : "of tokens " + std::to_string(stride[2]) + " apart";  // 0: of one token
  }
  std::string sides;
  for (const int side : extent) {
    sides += side == 1 ? "" : (sides.empty() ? "" : "×") + std::to_string(side);
  }
  return "of patches of " + sides;
}

}  // namespace

std::size_t Plan::bytes() const {
  std::size_t sum = sizeof(Plan) + size_of(masks) + intervals.size() * sizeof(intervals[0]) +
                    bits.size() * sizeof(bits[0]) + size_of(used) + size_of(components);
  for (const Component& c : components) {
    sum += size_of(c.row_tiles) + size_of(c.col_tiles) + size_of(c.first) + size_of(c.runs);
  }
  return sum;
}

std::int32_t Plan::bits_of(const Mask& mask) const {
  return mask.rows < 0 ? mask.bits : static_cast<std::int32_t>(bits.size()) + mask.rows * (shape.cols / 32);
}

std::vector<std::uint32_t> Plan::all_bits() const {
  const auto words = static_cast<std::size_t>(shape.cols / 32);
  std::vector<std::uint32_t> all(bits.size() + intervals.size() * words);
  std::copy(bits.begin(), bits.end(), all.begin());
  std::uint32_t* row = all.data() + bits.size();
  for (const Interval& interval : intervals) {
    if (interval.begin < interval.end) {
      set_range(row, interval.begin, interval.end);
    }
    row += words;
  }
  return all;
}

Plan plan_parts(std::int64_t rows, std::int64_t cols, std::span<const PartGroup> groups, const TileShape& shape,
                bool transpose) {
  Plan made;
  made.shape = shape;
  made.rows = transpose ? cols : rows;
  made.cols = transpose ? rows : cols;
  std::vector<Counted> views = counted(groups, transpose);
  const Used used_rows(made.rows, views, true), used_cols(made.cols, views, false);
  Masks masks(made);
  if (rows > 0 && cols > 0) {
    for (const Arrangement& arrangement : arrange(made.rows, made.cols, std::move(views), shape)) {
      made.components.push_back(make_component(arrangement, made, masks, true));
    }
  }
  if (made.components.empty() && made.rows > 0) {
    made.components.push_back(empty_component(made));
  }
  std::stable_sort(made.components.begin(), made.components.end(),
                   [](const Component& a, const Component& b) { return a.pairs > b.pairs; });
  made.all_rows_used = made.all_cols_used = true;
  for (Component& c : made.components) {
    for (std::size_t t = 0; t < c.row_tiles.size() && !used_rows.all(); ++t) {
      mark(used_rows, c.row_order, made, c.row_tiles[t], made.all_rows_used);
    }
    for (std::size_t t = 0; t < c.col_tiles.size() && !used_cols.all(); ++t) {
      mark(used_cols, c.col_order, made, c.col_tiles[t], made.all_cols_used);
    }
  }
  return made;
}

std::shared_ptr<const Plan> plan(const RegularPattern& pattern, const TileShape& shape) {
  return find_plan(pattern, shape, false);
}

std::shared_ptr<const Plan> transposed_plan(const RegularPattern& pattern, const TileShape& shape) {
  return find_plan(pattern, shape, true);
}

}  // namespace fretwork::attention_op

namespace fretwork {

std::string attention_cost(const PatternPtr& given) {
  const RegularPtr regular = check_regular("attention_cost", given);
  const RegularPattern& pattern = *regular;
  constexpr std::int64_t kLongest = std::int64_t{1} << 22;  // beyond it a plan takes long
  if (pattern.nnz() == 0 || std::max(pattern.rows(), pattern.cols()) > kLongest) {
    return {};
  }
  const auto plan = attention_op::plan(pattern, {});
  const auto& [rows, cols] = plan->shape;
  std::string lines;
  double pairs = 0;
  for (const attention_op::Component& component : plan->components) {
    pairs += static_cast<double>(component.pairs);
    lines += "  " + std::to_string(component.pairs) + (component.pairs == 1 ? " tile" : " tiles") + " of " +
             std::to_string(rows) + "×" + std::to_string(cols) + " " + attention_op::order_text(component.row_order) +
             "\n";
  }
  std::array<char, 96> share;
  const int length =
      std::snprintf(share.data(), share.size(), "  on a GPU attention multiplies %.3g times the elements\n",
                    pairs * rows * cols / static_cast<double>(pattern.nnz()));
  return lines.append(share.data(), static_cast<std::size_t>(length));
}

}  // namespace fretwork
