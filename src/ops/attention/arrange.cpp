// Which tiles a pattern's parts are cut into: the extents that need the fewest tile pairs.
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "ops/attention/tiling.h"

namespace fretwork::attention_op {

namespace {

using Extents = std::array<int, kMaxAxes>;

/// Tile pairs on one axis: for each row interval, the column intervals that the part meets. Long axes are sampled.
double pairs(const AxisRange& part, std::int64_t row_origin, int row_extent, std::int64_t col_origin, int col_extent) {
  constexpr std::int64_t kSamples = 24;
  const std::int64_t first = (part.row_begin - row_origin) / row_extent;
  const std::int64_t last = (part.row_end - 1 - row_origin) / row_extent;
  const std::int64_t count = last - first + 1, samples = std::min(count, kSamples);
  std::int64_t sum = 0;
  for (std::int64_t n = 0; n < samples; ++n) {
    const std::int64_t i = first + (samples < 2 ? 0 : n * (count - 1) / (samples - 1));
    const std::int64_t from = std::max(part.row_begin, row_origin + i * row_extent);
    const std::int64_t to = std::min(part.row_end, row_origin + (i + 1) * row_extent) - 1;
    const std::int64_t begin = std::max(part.col_begin, from + part.low) - col_origin;
    const std::int64_t end = std::min(part.col_end - 1, to + part.high) - col_origin;
    sum += begin > end ? 0 : end / col_extent - begin / col_extent + 1;
  }
  return static_cast<double>(sum) * static_cast<double>(count) / static_cast<double>(samples);
}

/// What an axis spans, all parts together.
AxisRange hull(std::span<const Part> parts, std::size_t axis) {
  AxisRange all = parts[0][axis];
  for (const Part& part : parts) {
    all.row_begin = std::min(all.row_begin, part[axis].row_begin);
    all.row_end = std::max(all.row_end, part[axis].row_end);
    all.col_begin = std::min(all.col_begin, part[axis].col_begin);
    all.col_end = std::max(all.col_end, part[axis].col_end);
  }
  return all;
}

/// Extents worth trying on axes of these lengths: at most three longer than one, no more places than a tile's side.
void list_extents(std::span<const std::vector<int>> choices, int side, Extents now, std::size_t axis, int longer,
                  std::vector<Extents>& out) {
  if (axis == choices.size()) {
    out.push_back(now);
    return;
  }
  for (const int extent : choices[axis]) {
    if (extent <= side && (extent == 1 || longer < kTileAxes)) {
      now[axis] = extent;
      list_extents(choices, side / extent, now, axis + 1, longer + (extent > 1 ? 1 : 0), out);
    }
  }
}

class Chooser {
 public:
  Chooser(const View& view, std::span<const Part> parts, const TileShape& shape)
      : axes_(static_cast<std::size_t>(view.axes)), shape_(shape), parts_(parts) {
    for (std::size_t k = 0; k < axes_; ++k) {
      hulls_[k] = hull(parts, k);
    }
    for (std::size_t p = 0; p < parts.size(); p += std::max<std::size_t>(1, parts.size() / 16)) {
      sample_.push_back(p);
    }
  }

  void choose(Extents& row, Extents& col) const {
    std::vector<Extents> rows = list(true), cols = list(false);
    double best = std::numeric_limits<double>::max();
    for (const Extents& start : rows) {
      Extents other = start;
      for (std::size_t k = 0; k < axes_; ++k) {
        other[k] = static_cast<int>(std::min<std::int64_t>(start[k], hulls_[k].col_end - hulls_[k].col_begin));
      }
      if (places(other) <= shape_.cols) {
        improve(start, other, best, row, col);
      }
    }
    improve_side(cols, false, best, row, col);
    improve_side(rows, true, best, row, col);
    improve_side(cols, false, best, row, col);
  }

 private:
  std::vector<Extents> list(bool row) const {
    const int side = row ? shape_.rows : shape_.cols;
    std::vector<std::vector<int>> choices(axes_);
    for (std::size_t k = 0; k < axes_; ++k) {
      const std::int64_t length =
          row ? hulls_[k].row_end - hulls_[k].row_begin : hulls_[k].col_end - hulls_[k].col_begin;
      for (int e = 1; e <= side && e < length; e *= 2) {
        choices[k].push_back(e);
      }
      choices[k].push_back(static_cast<int>(std::min<std::int64_t>(length, side)));
      std::sort(choices[k].begin(), choices[k].end());
      choices[k].erase(std::unique(choices[k].begin(), choices[k].end()), choices[k].end());
    }
    std::vector<Extents> found;
    list_extents(choices, side, Extents{1, 1, 1, 1, 1, 1}, 0, 0, found);
    return found;
  }

  static int places(const Extents& extent) {
    return std::accumulate(extent.begin(), extent.end(), 1, std::multiplies<>());
  }

  /// Tile pairs, and as much for each row tile; column tiles with places to spare are never whole.
  double cost(const Extents& row, const Extents& col) const {
    double sum = 0;
    for (const std::size_t p : sample_) {
      double product = 1;
      for (std::size_t k = 0; k < axes_; ++k) {
        product *= pairs(parts_[p][k], hulls_[k].row_begin, row[k], hulls_[k].col_begin, col[k]);
      }
      sum += product;
    }
    sum *= static_cast<double>(parts_.size()) / static_cast<double>(sample_.size());
    double tiles = 1;
    for (std::size_t k = 0; k < axes_; ++k) {
      tiles *= std::ceil(static_cast<double>(hulls_[k].row_end - hulls_[k].row_begin) / row[k]);
    }
    return sum * (places(col) < shape_.cols ? 1.02 : 1) + tiles;
  }

  void improve(const Extents& row, const Extents& col, double& best, Extents& best_row, Extents& best_col) const {
    if (const double now = cost(row, col); now < best * 0.999) {
      best = now;
      best_row = row;
      best_col = col;
    }
  }
  void improve_side(const std::vector<Extents>& list, bool row, double& best, Extents& best_row,
                    Extents& best_col) const {
    const Extents keep_row = best_row, keep_col = best_col;
    for (const Extents& extent : list) {
      improve(row ? extent : keep_row, row ? keep_col : extent, best, best_row, best_col);
    }
  }

  std::size_t axes_;
  TileShape shape_;
  std::span<const Part> parts_;
  std::vector<std::size_t> sample_;
  std::array<AxisRange, kMaxAxes> hulls_{};
};

void cut_side(const Line& line, std::span<const Part> parts, bool row, const Extents& extent, Side& side) {
  side.extent = extent;
  std::array<std::pair<std::int64_t, std::int64_t>, kMaxAxes> hulls;
  double fewest = std::numeric_limits<double>::max();
  side.free_axis = line.axes - 1;
  for (int k = 0; k < line.axes; ++k) {
    const auto u = static_cast<std::size_t>(k);
    const AxisRange all = hull(parts, u);
    hulls[u] = row ? std::pair(all.row_begin, all.row_end) : std::pair(all.col_begin, all.col_end);
    const double intervals = static_cast<double>(hulls[u].second - hulls[u].first) / extent[u];
    if (extent[u] > 1 && intervals < fewest) {
      fewest = intervals;
      side.free_axis = k;
    }
  }
  for (int k = 0; k < line.axes; ++k) {
    const auto u = static_cast<std::size_t>(k);
    std::vector<std::int64_t> forced;
    if (extent[u] > 1 && k != side.free_axis) {
      forced = forced_cuts(line, k);
    }
    auto [begin, end] = hulls[u];
    if (row) {  // every row, so that a component may cover them
      forced.insert(forced.end(), {begin, end});
      std::sort(forced.begin(), forced.end());
      std::tie(begin, end) = line.range(k);
    }
    side.cuts[u] = cut(begin, end, extent[u], forced, {});
  }
}

/// The axis along which row tiles meet the longest intervals of column tiles.
int run_axis(const Arrangement& a) {
  int best = 0;
  double longest = -1;
  for (int k = 0; k < a.view.axes; ++k) {
    const auto u = static_cast<std::size_t>(k);
    const AxisRange all = hull(a.parts, u);
    double sum = 0;
    for (std::size_t p = 0; p < a.parts.size(); p += std::max<std::size_t>(1, a.parts.size() / 16)) {
      const AxisRange& part = a.parts[p][u];
      sum += pairs(part, all.row_begin, a.row.extent[u], all.col_begin, a.col.extent[u]) /
             std::ceil(static_cast<double>(part.row_end - part.row_begin) / a.row.extent[u]);
    }
    if (sum > longest) {
      longest = sum;
      best = k;
    }
  }
  return best;
}

}  // namespace

Part tightened(Part part, int axes) {
  for (int k = 0; k < axes; ++k) {
    AxisRange& axis = part[static_cast<std::size_t>(k)];
    axis.low = std::max(axis.low, axis.col_begin - (axis.row_end - 1));
    axis.high = std::min(axis.high, axis.col_end - 1 - axis.row_begin);
  }
  return part;
}

std::vector<Arrangement> arrange(std::int64_t rows, std::int64_t cols, std::span<const PartGroup> groups,
                                 const TileShape& shape) {
  std::vector<Arrangement> made;
  for (const PartGroup& group : groups) {
    if (group.parts.empty()) {
      continue;
    }
    auto at = std::find_if(made.begin(), made.end(), [&](const Arrangement& a) { return a.view == group.view; });
    if (at == made.end()) {
      at = made.insert(at, {group.view, {}, {}, {}, 0});
    }
    for (const Part& part : group.parts) {
      at->parts.push_back(tightened(part, group.view.axes));
    }
  }
  for (Arrangement& a : made) {
    Extents row{}, col{};
    Chooser(a.view, a.parts, shape).choose(row, col);
    cut_side(Line(a.view, a.view.row_shift, rows), a.parts, true, row, a.row);
    cut_side(Line(a.view, a.view.col_shift, cols), a.parts, false, col, a.col);
    a.run_axis = run_axis(a);
  }
  return made;
}

}  // namespace fretwork::attention_op
