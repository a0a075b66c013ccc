// Cuts axes into intervals and boxes of digits at the ends of a sequence, and lists the tiles of a side.
#include "ops/attention/tiling.h"

#include <algorithm>
#include <bit>
#include <limits>
#include <numeric>
#include <tuple>
#include <utility>

namespace fretwork::attention_op {

namespace {

std::int64_t floor_div(std::int64_t a, std::int64_t b) { return a / b - (a % b != 0 && a < 0 ? 1 : 0); }

}  // namespace

Ends::Ends(const Line& line) : axes_(line.axes), low_(bound(line, 0, line.first)) {
  high_.push_back(bound(line, 0, line.last));
  for (int k = 1; k < line.axes; ++k) {
    if (line.strides[k - 1] % line.strides[k] != 0) {
      high_.push_back(bound(line, k, line.strides[k - 1]));
    }
  }
}

Ends::Bound Ends::bound(const Line& line, int first, std::int64_t value) {
  Bound made{first, first, {}};
  for (int k = first; k < line.axes; ++k) {
    made.digits[k] = floor_div(value, line.strides[k]);
    value -= made.digits[k] * line.strides[k];
    made.last = made.digits[k] != 0 ? k : made.last;
  }
  return made;
}

/// −1, 0, 1: the box's digits on axes [from, to) are below, not decided, or above the bound's. They never straddle it.
int Ends::compare(const Bound& limit, int from, int to, std::span<const std::int64_t> begin,
                  std::span<const std::int64_t> end) {
  for (int k = from; k < to; ++k) {
    if (end[k] <= limit.digits[k]) {
      return -1;
    }
    if (begin[k] > limit.digits[k]) {
      return 1;
    }
  }
  return 0;
}

std::array<std::int64_t, kMaxAxes> Line::digits(std::int64_t position) const {
  std::array<std::int64_t, kMaxAxes> found{};
  for (int k = 0; k < axes; ++k) {
    found[k] = floor_div(position, strides[k]);
    position -= found[k] * strides[k];
  }
  return found;
}

std::pair<std::int64_t, std::int64_t> Line::range(int axis) const {
  const auto from = digits(first), to = digits(last - 1);
  if (std::equal(from.begin(), from.begin() + axis, to.begin())) {
    return {from[static_cast<std::size_t>(axis)], to[static_cast<std::size_t>(axis)] + 1};
  }
  return {0, (strides[axis - 1] + strides[axis] - 1) / strides[axis]};
}

std::vector<std::int64_t> Ends::forced_cuts(int axis) const {
  std::vector<std::int64_t> found;
  const auto add = [&](const Bound& limit) {
    if (axis >= limit.first && axis <= limit.last) {
      found.push_back(limit.digits[axis]);
      if (axis < limit.last) {
        found.push_back(limit.digits[axis] + 1);
      }
    }
  };
  std::for_each(high_.begin(), high_.end(), add);
  add(low_);
  std::sort(found.begin(), found.end());
  return found;
}

Cuts cut(std::int64_t begin, std::int64_t end, int extent, std::span<const std::int64_t> forced,
         std::span<const std::int64_t> wished) {
  const auto after = [](auto at, auto last, std::int64_t value) {  // the first above it, which is near
    while (at != last && *at <= value) {
      ++at;
    }
    return at;
  };
  Cuts made;
  made.begin.reserve(static_cast<std::size_t>(std::max<std::int64_t>(0, end - begin) / extent) + 1);
  made.end.reserve(made.begin.capacity());
  auto wall = forced.begin();
  auto wish = wished.begin();
  while (begin < end) {
    wall = after(wall, forced.end(), begin);
    std::int64_t stop = std::min(end, begin + extent);
    stop = wall == forced.end() ? stop : std::min(stop, *wall);
    if (extent > 1) {
      wish = after(wish, wished.end(), begin);
      const auto last = after(wish, wished.end(), stop);
      stop = last == wish ? stop : *(last - 1);
    }
    made.begin.push_back(begin);
    made.end.push_back(stop);
    begin = stop;
  }
  return made;
}

bool Ends::clip(int free_axis, std::span<const std::int64_t> begin, std::span<const std::int64_t> end,
                Inside& inside) const {
  for (int k = 0; k < axes_; ++k) {
    inside.begin[k] = 0;
    inside.end[k] = static_cast<int>(end[k] - begin[k]);
  }
  if (high_.size() == 1 && begin[0] > low_.digits[0] && end[0] <= high_[0].digits[0]) {
    return true;
  }
  const int f = free_axis;
  for (const Bound& limit : high_) {
    if (f < limit.first || f > limit.last) {
      if (compare(limit, limit.first, limit.last + 1, begin, end) >= 0) {
        return false;
      }
      continue;
    }
    const int before = compare(limit, limit.first, f, begin, end);
    if (before > 0) {
      return false;
    }
    if (before == 0) {
      const bool tail = f < limit.last && compare(limit, f + 1, limit.last + 1, begin, end) < 0;
      const std::int64_t stop = limit.digits[f] + (tail ? 1 : 0) - begin[f];
      inside.end[f] = static_cast<int>(std::clamp<std::int64_t>(stop, 0, inside.end[f]));
    }
  }
  const int before = compare(low_, 0, std::min(f, low_.last + 1), begin, end);
  if (before == 0 && f <= low_.last) {
    const bool tail = f == low_.last || compare(low_, f + 1, low_.last + 1, begin, end) >= 0;
    const std::int64_t start = low_.digits[f] + (tail ? 0 : 1) - begin[f];
    inside.begin[f] = static_cast<int>(std::clamp<std::int64_t>(start, 0, inside.end[f]));
  }
  return before >= 0 && inside.begin[f] < inside.end[f];
}

namespace {

// Tiles that end where parts end need fewer different masks, which matters where there are many parts.
constexpr double kTidy = 0.95;
constexpr std::size_t kManyParts = 16;

/// Column intervals for each row interval: as few as cover what its parts reach.
void cut_own(const Parts& parts, int axis, const Cuts& rows, int extent, std::span<const std::int64_t> forced,
             Cuts& cols, std::vector<int>& first) {
  const auto visit = [&](const auto& act) {
    for (std::size_t p = 0; p < parts.size(); ++p) {
      const AxisRange& part = parts[p][axis];
      auto at = static_cast<std::size_t>(std::upper_bound(rows.end.begin(), rows.end.end(), part.row_begin) -
                                         rows.end.begin());
      for (; at < rows.begin.size() && rows.begin[at] < part.row_end; ++at) {
        act(at, p);
      }
    }
  };
  std::vector<std::size_t> end(rows.begin.size() + 1);  // of a row interval's parts, once they are there
  visit([&](std::size_t at, std::size_t) { ++end[at + 1]; });
  std::partial_sum(end.begin(), end.end(), end.begin());
  std::vector<std::size_t> active(end.back());
  visit([&](std::size_t at, std::size_t p) { active[end[at]++] = p; });
  std::vector<Reached> ranges;
  first.assign(1, 0);
  for (std::size_t i = 0, next = 0; i < rows.begin.size(); ++i) {
    ranges.clear();
    for (; next < end[i]; ++next) {
      const Reached now = reached(parts[active[next]][axis], rows.begin[i], rows.end[i] - 1);
      if (now.begin < now.end) {
        ranges.push_back(now);
      }
    }
    std::sort(ranges.begin(), ranges.end(), [](const Reached& a, const Reached& b) { return a.begin < b.begin; });
    std::int64_t done = std::numeric_limits<std::int64_t>::min();
    for (std::size_t n = 0; n < ranges.size(); ++n) {
      std::int64_t begin = std::max(done, ranges[n].begin);
      while (begin < ranges[n].end) {
        std::int64_t need = begin;  // up to where something is reached
        for (std::size_t m = n; m < ranges.size() && ranges[m].begin < begin + extent; ++m) {
          need = std::max(need, std::min(ranges[m].end, begin + extent));
        }
        const auto wall = std::upper_bound(forced.begin(), forced.end(), begin);
        cols.begin.push_back(begin);
        begin = done = wall == forced.end() ? need : std::min(need, *wall);
        cols.end.push_back(done);
      }
    }
    first.push_back(cols.size());
  }
}

/// Cuts the axes of a cluster. Of the ways there are, the one with the fewest pairs on that axis.
class Cutter {
 public:
  Cutter(Arrangement& a, const TileConfig& config)
      : a_(a), own_(config.own), row_line_(a.view, a.row), col_line_(a.view, a.col) {
    a_.row.extent = config.row;
    a_.col.extent = config.col;
    for (int k = 0; k < a_.view.axes; ++k) {
      hulls_[k] = hull(a_.parts, k);
    }
    double most = 0;
    for (std::size_t p = 0; p < a_.parts.size(); ++p) {
      if (const double size = size_of(a_.parts[p], a_.view.axes); size > most) {
        most = size;
        largest_ = a_.parts[p];
      }
    }
    a_.row.free_axis = free_axis(config.row, true);
    a_.col.free_axis = free_axis(config.col, false);
  }

  void cut_all() {
    for (int k = 0; k < a_.view.axes; ++k) {
      cut_axis(k);
    }
  }

 private:
  /// The longer of the tile's axes in proportion: there the sequence's ends would cost most if they were cuts.
  int free_axis(const Extents& extent, bool row) const {
    int best = a_.view.axes - 1;
    double fewest = std::numeric_limits<double>::max();
    for (int k = 0; k < a_.view.axes; ++k) {
      const AxisRange& all = hulls_[k];
      const double intervals = static_cast<double>(row ? rows_of(all) : cols_of(all)) / extent[k];
      if (extent[k] > 1 && intervals < fewest) {
        fewest = intervals;
        best = k;
      }
    }
    return best;
  }

  void cut_axis(int k) {
    const AxisRange& all = hulls_[k];
    const int row_extent = a_.row.extent[k], col_extent = a_.col.extent[k];
    const auto forced = [&](const Line& line, const Side& side) {
      return side.extent[k] > 1 && k != side.free_axis ? Ends(line).forced_cuts(k) : std::vector<std::int64_t>();
    };
    const std::vector<std::int64_t> row_walls = forced(row_line_, a_.row), col_walls = forced(col_line_, a_.col);
    const auto [row_begin, row_end] = row_line_.range(k);
    best_ = std::numeric_limits<double>::max();
    reach_elsewhere_ = reach_elsewhere(k);
    order_ranges(k);
    const auto rows_from = [&](std::int64_t origin, std::span<const std::int64_t> wished) {
      return with_origin(row_begin, row_end, origin, row_extent, row_walls, wished);
    };
    std::vector<Cuts> rows{rows_from(row_begin, {})};
    if (row_extent > 1 && (all.row_begin - row_begin) % row_extent != 0) {
      rows.push_back(rows_from(all.row_begin, {}));
    }
    const std::vector<std::int64_t> row_edges = edges(k, true), col_edges = edges(k, false);
    const bool wishes = row_extent > 1 && (row_edges.size() > 2 || col_edges.size() > 2);
    if (wishes) {
      rows.push_back(rows_from(all.row_begin, row_edges));
    }
    const Cuts tidy_cols = wishes && col_extent > 1 ? with_origin(all.col_begin, all.col_end, all.col_begin, col_extent,
                                                                  col_walls, col_edges)
                                                    : Cuts();
    for (const Cuts& row : rows) {
      take_samples(row);
      const bool tidy = wishes && &row == &rows.back();
      for (const std::int64_t origin : col_origins(k, all, row)) {
        consider(k, row, with_origin(all.col_begin, all.col_end, origin, col_extent, col_walls, {}), {});
      }
      if (wishes && col_extent > 1) {
        consider(k, row, tidy_cols, {}, tidy && a_.parts.size() > kManyParts ? kTidy : 1);
      }
      if (own_[k]) {
        Cuts cols;
        std::vector<int> first;
        cut_own(a_.parts, k, row, col_extent, col_walls, cols, first);
        consider(k, row, cols, first);
      }
    }
  }

  /// Where parts begin and end on an axis. Documents come in order; else each different range is looked at once.
  std::vector<std::int64_t> edges(int axis, bool row) const {
    std::vector<std::int64_t> found;
    bool sorted = true;
    const auto add = [&](const AxisRange& range) {
      const std::int64_t begin = row ? range.row_begin : range.col_begin, end = row ? range.row_end : range.col_end;
      const std::size_t size = found.size();
      if (size == 0 || found[size - 2] != begin || found[size - 1] != end) {
        sorted = sorted && (size == 0 || found[size - 1] <= begin);
        found.push_back(begin);
        found.push_back(end);
      }
    };
    for (std::size_t p = 0; p < a_.parts.size() && sorted; ++p) {
      add(a_.parts[p][axis]);
    }
    if (!sorted) {
      found.clear();
      for (const std::vector<Ordered>& some : order_) {
        for (const Ordered& one : some) {
          add(*one.range);
        }
      }
      std::sort(found.begin(), found.end());
    }
    found.erase(std::unique(found.begin(), found.end()), found.end());
    return found;
  }

  /// A grid may begin with the columns or end with what the first rows of the largest part reach.
  std::vector<std::int64_t> col_origins(int k, const AxisRange& all, const Cuts& row) const {
    const int extent = a_.col.extent[k];
    std::vector<std::int64_t> found{all.col_begin};
    if (extent > 1) {
      const AxisRange& part = largest_[k];
      const std::int64_t at = row.begin.size() > 1 ? row.begin[1] : row.begin[0];
      for (const std::int64_t edge : {at + part.high, at + part.low}) {
        const std::int64_t off = ((edge - all.col_begin) % extent + extent) % extent;
        if (off != 0) {
          found.push_back(all.col_begin + off);
        }
      }
    }
    return found;
  }

  /// Cuts that pass through an origin.
  static Cuts with_origin(std::int64_t begin, std::int64_t end, std::int64_t origin, int extent,
                          std::span<const std::int64_t> walls, std::span<const std::int64_t> wished) {
    std::vector<std::int64_t> forced(walls.begin(), walls.end());
    if (origin > begin && origin < end) {
      const std::int64_t before = (origin - begin) / extent * extent;  // whole intervals before it
      forced.push_back(origin - before);
      std::sort(forced.begin(), forced.end());
    }
    return cut(begin, end, extent, forced, wished);
  }

  /// `preference` below 1 takes these cuts even where they need a little more.
  void consider(int k, const Cuts& rows, const Cuts& cols, const std::vector<int>& own, double preference = 1) {
    if (const double now = preference * cost(rows, cols, own); now < best_ * 0.99) {
      best_ = now;
      a_.row.cuts[k] = rows;
      a_.col.cuts[k] = cols;
      a_.col.own[k] = own;
    }
  }

  /// A row interval of the sample, what parts have of it in row tiles on the other axes, and where what they reach
  /// ends.
  struct Sample {
    std::size_t row;
    double share;
    std::size_t end;
  };
  void take_samples(const Cuts& rows) {
    const std::int64_t count = std::min<std::int64_t>(rows.size(), 256);
    samples_.clear();
    reached_.clear();
    for (std::int64_t n = 0; n < count; ++n) {
      const auto i = static_cast<std::size_t>((2 * n + 1) * rows.size() / (2 * count));
      double share = 0;
      each_range(rows.begin[i], rows.end[i], [&](const AxisRange& range, double of_row_tiles) {
        const Reached now = reached(range, rows.begin[i], rows.end[i] - 1);
        if (range.row_end > rows.begin[i] && now.begin < now.end) {
          share += of_row_tiles;
          reached_.push_back(now);
        }
      });
      samples_.push_back({i, share, reached_.size()});
    }
  }

  /// Pairs of intervals that some part meets and row intervals, from the sample of the rows; each as often as the parts
  /// have tiles on the other axes.
  double cost(const Cuts& rows, const Cuts& cols, const std::vector<int>& own) {
    double sum = 0;
    std::size_t at = 0;
    for (const auto& [i, share, end] : samples_) {
      const auto from = own.empty() ? 0 : own[i], to = own.empty() ? cols.size() : own[i + 1];
      met_.clear();
      for (; at < end; ++at) {
        met_.emplace_back(
            std::upper_bound(cols.end.begin() + from, cols.end.begin() + to, reached_[at].begin) - cols.end.begin(),
            std::lower_bound(cols.begin.begin() + from, cols.begin.begin() + to, reached_[at].end) -
                cols.begin.begin());
      }
      sum += std::min(1.0, share) * (1 + reach_elsewhere_ * static_cast<double>(covered()));
    }
    return sum * rows.size() / static_cast<double>(samples_.size());
  }

  /// How many intervals those of met_ cover.
  std::ptrdiff_t covered() {
    std::sort(met_.begin(), met_.end());
    std::ptrdiff_t done = 0, sum = 0;
    for (const auto& [first, last] : met_) {
      sum += std::max<std::ptrdiff_t>(0, last - std::max(done, first));
      done = std::max(done, last);
    }
    return sum;
  }

  /// The different ranges of an axis, by the magnitude of how many rows they have, then by where these begin: of each
  /// magnitude those that meet some rows stand together, however long others are.
  struct Ordered {
    const AxisRange* range;
    double share;  ///< of the row tiles on the other axes, what the parts with this range have
    auto key() const {
      return std::tie(range->row_begin, range->row_end, range->col_begin, range->col_end, range->low, range->high);
    }
  };
  void order_ranges(int axis) {
    const auto before = [](const Ordered& a, const Ordered& b) { return a.key() < b.key(); };
    order_.assign(1, {});
    for (std::size_t p = 0; p < a_.parts.size(); ++p) {
      const AxisRange& range = a_.parts[p][axis];
      const auto magnitude = static_cast<std::size_t>(std::bit_width(static_cast<std::uint64_t>(rows_of(range))));
      order_.resize(std::max(order_.size(), magnitude + 1));
      add_range(order_[magnitude], {&range, share(p, axis)});
    }
    for (std::vector<Ordered>& some : order_) {
      if (!std::is_sorted(some.begin(), some.end(), before)) {
        std::sort(some.begin(), some.end(), before);
        const std::vector<Ordered> all = std::exchange(some, {});
        for (const Ordered& one : all) {
          add_range(some, one);
        }
      }
    }
  }
  static void add_range(std::vector<Ordered>& some, const Ordered& one) {
    if (!some.empty() && *some.back().range == *one.range) {
      some.back().share += one.share;
    } else {
      some.push_back(one);
    }
  }
  /// Those that may have rows of [begin, end).
  template <typename Act>
  void each_range(std::int64_t begin, std::int64_t end, const Act& act) const {
    for (std::size_t magnitude = 0; magnitude < order_.size(); ++magnitude) {
      const std::vector<Ordered>& some = order_[magnitude];
      const std::int64_t before = begin - (std::int64_t{1} << magnitude);
      auto at = std::partition_point(some.begin(), some.end(),
                                     [&](const Ordered& one) { return one.range->row_begin <= before; });
      for (; at != some.end() && at->range->row_begin < end; ++at) {
        act(*at->range, at->share);
      }
    }
  }

  /// Of the row tiles on the other axes, the share that a part has.
  double share(std::size_t part, int axis) const {
    double product = 1;
    for (int k = 0; k < a_.view.axes; ++k) {
      if (k != axis) {
        const double all = static_cast<double>(up(rows_of(hulls_[k]), a_.row.extent[k]));
        product *= static_cast<double>(up(rows_of(a_.parts[part][k]), a_.row.extent[k])) / all;
      }
    }
    return product;
  }

  /// How many columns' intervals a row tile meets on the other axes.
  double reach_elsewhere(int axis) const {
    double product = 1;
    for (int k = 0; k < a_.view.axes; ++k) {
      if (k != axis) {
        const AxisPairs now = axis_pairs(largest_[k], hulls_[k], a_.row.extent[k], a_.col.extent[k]);
        product *= (own_[k] ? now.own : now.grid) / static_cast<double>(up(rows_of(largest_[k]), a_.row.extent[k]));
      }
    }
    return product;
  }

  Arrangement& a_;
  std::array<bool, kMaxAxes> own_;
  Line row_line_, col_line_;
  const AxisRange* largest_ = nullptr;
  std::array<AxisRange, kMaxAxes> hulls_{};
  double best_ = 0, reach_elsewhere_ = 1;
  std::vector<std::vector<Ordered>> order_;  ///< by magnitude
  std::vector<Sample> samples_;              ///< of the row intervals that are looked at
  std::vector<Reached> reached_;
  std::vector<std::pair<std::ptrdiff_t, std::ptrdiff_t>> met_;
};

}  // namespace

void cut_axes(Arrangement& arrangement, const TileConfig& config) { Cutter(arrangement, config).cut_all(); }

namespace {

std::uint64_t pack(const Inside& inside, const Side& side, int axes) {
  std::uint64_t packed = 0;  // at most three axes are longer than one
  for (int k = 0; k < axes; ++k) {
    if (side.extent[k] > 1) {
      packed = packed << 20 | static_cast<std::uint64_t>(inside.begin[k] << 10 | inside.end[k]);
    }
  }
  return packed;
}

Order order_of(const View& view, const Side& side) {
  Order order;
  int at = kTileAxes;
  for (int k = view.axes - 1; k >= 0; --k) {
    if (side.extent[k] > 1) {
      --at;
      order.extent[static_cast<std::size_t>(at)] = side.extent[k];
      order.stride[static_cast<std::size_t>(at)] = view.strides[k];
    }
  }
  return order;
}

Tile tile_of(const View& view, const Side& side, std::int64_t shift, std::span<const std::int64_t> begin,
             const Inside& inside) {
  Tile tile{-shift, {1, 1, 1}, -1};
  int at = kTileAxes;
  for (int k = view.axes - 1; k >= 0; --k) {
    tile.base += (begin[k] + inside.begin[k]) * view.strides[k];
    if (side.extent[k] > 1) {
      tile.count[static_cast<std::size_t>(--at)] = inside.end[k] - inside.begin[k];
    }
  }
  return tile;
}

}  // namespace

Grid make_grid(const View& view, const Side& side, int run_axis, std::int64_t shift) {
  const Ends ends(Line(view, side));
  Grid grid;
  grid.order = order_of(view, side);
  std::array<int, kMaxAxes> axes{};
  for (int k = 0, n = 0; k < view.axes; ++k) {
    if (k != run_axis) {
      axes[n++] = k;
    }
  }
  axes[view.axes - 1] = run_axis;
  std::int64_t total = 1;
  for (int n = view.axes - 1; n >= 0; --n) {
    grid.step[axes[n]] = total;
    total *= side.cuts[axes[n]].size();
  }
  grid.number.assign(static_cast<std::size_t>(total), -1);
  grid.tiles.reserve(static_cast<std::size_t>(total));
  grid.shape.reserve(static_cast<std::size_t>(total));
  Numbers shapes;
  std::array<int, kMaxAxes> at{};
  std::array<std::int64_t, kMaxAxes> begin{}, end{};
  for (int k = 0; k < view.axes && total > 0; ++k) {
    begin[k] = side.cuts[k].begin[0];
    end[k] = side.cuts[k].end[0];
  }
  for (std::int64_t place = 0; place < total; ++place) {
    Inside inside;
    if (ends.clip(side.free_axis, begin, end, inside)) {
      const int shape = shapes.of(pack(inside, side, view.axes));
      if (shape == static_cast<int>(grid.shapes.size())) {
        grid.shapes.push_back(inside);
      }
      grid.number[static_cast<std::size_t>(place)] = static_cast<std::int32_t>(grid.tiles.size());
      grid.tiles.push_back(tile_of(view, side, shift, begin, inside));
      grid.shape.push_back(shape);
    }
    for (int n = view.axes - 1; n >= 0; --n) {
      const int k = axes[n];
      at[k] = at[k] + 1 == side.cuts[k].size() ? 0 : at[k] + 1;
      begin[k] = side.cuts[k].begin[static_cast<std::size_t>(at[k])];
      end[k] = side.cuts[k].end[static_cast<std::size_t>(at[k])];
      if (at[k] != 0) {
        break;
      }
    }
  }
  return grid;
}

}  // namespace fretwork::attention_op
