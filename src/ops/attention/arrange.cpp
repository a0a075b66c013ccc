// Chooses the tiles of a pattern: for each view, which axes a tile spans and where axes are cut, with the fewest tile
// pairs.
#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <map>
#include <numeric>
#include <tuple>
#include <utility>

#include "ops/attention/tiling.h"

namespace fretwork::attention_op {

double size_of(const AxisRange* part, int axes) {
  double product = 1;
  for (int k = 0; k < axes; ++k) {
    product *= static_cast<double>(rows_of(part[k])) * static_cast<double>(width_of(part[k]));
  }
  return product;
}

Reached reached(const AxisRange& part, std::int64_t first, std::int64_t last) {
  first = std::max(first, part.row_begin);
  last = std::min(last, part.row_end - 1);
  return {std::max(part.col_begin, first + part.low), std::min(part.col_end, last + part.high + 1)};
}

AxisRange hull(const Parts& parts, int axis) {
  AxisRange all = parts[0][axis];
  for (std::size_t p = 0; p < parts.size(); ++p) {
    const AxisRange& part = parts[p][axis];
    all.row_begin = std::min(all.row_begin, part.row_begin);
    all.row_end = std::max(all.row_end, part.row_end);
    all.col_begin = std::min(all.col_begin, part.col_begin);
    all.col_end = std::max(all.col_end, part.col_end);
  }
  return all;
}

AxisPairs axis_pairs(std::span<const AxisRange> parts, std::int64_t row_origin, std::int64_t col_origin, int row_extent,
                     int col_extent) {
  constexpr std::int64_t kSamples = 13;
  std::int64_t row_begin = parts[0].row_begin, row_end = parts[0].row_end;
  for (const AxisRange& part : parts) {
    row_begin = std::min(row_begin, part.row_begin);
    row_end = std::max(row_end, part.row_end);
  }
  const std::int64_t first = (row_begin - row_origin) / row_extent;
  const std::int64_t count = (row_end - 1 - row_origin) / row_extent - first + 1;
  const std::int64_t samples = std::min(count, kSamples);
  std::int64_t grid = 0, own = 0;
  std::vector<Reached> met;
  for (std::int64_t n = 0; n < samples; ++n) {
    const std::int64_t from = row_origin + (first + (2 * n + 1) * count / (2 * samples)) * row_extent;
    met.clear();
    for (const AxisRange& part : parts) {
      if (const Reached cols = reached(part, from, from + row_extent - 1); cols.begin < cols.end) {
        met.push_back({cols.begin - col_origin, cols.end - col_origin});
      }
    }
    std::sort(met.begin(), met.end(), [](const Reached& x, const Reached& y) { return x.begin < y.begin; });
    std::int64_t grid_done = 0, own_done = 0;
    for (const Reached& now : met) {
      const std::int64_t last = (now.end - 1) / col_extent + 1;
      grid += std::max<std::int64_t>(0, last - std::max(grid_done, now.begin / col_extent));
      grid_done = std::max(grid_done, last);
      const std::int64_t tiles = up(std::max<std::int64_t>(0, now.end - std::max(own_done, now.begin)), col_extent);
      own += tiles;
      own_done = std::max(own_done, std::max(own_done, now.begin) + tiles * col_extent);
    }
  }
  const double scale = static_cast<double>(count) / static_cast<double>(samples);
  return {static_cast<double>(grid) * scale, static_cast<double>(own) * scale};
}

AxisPairs axis_pairs(const AxisRange& part, const AxisRange& all, int row_extent, int col_extent) {
  const AxisPairs a = axis_pairs({&part, 1}, all.row_begin, all.col_begin, row_extent, col_extent);
  const AxisPairs b = axis_pairs({&part, 1}, part.row_begin, part.col_begin, row_extent, col_extent);
  return {std::min(a.grid, b.grid), std::min(a.own, b.own)};
}

namespace {

// A component of its own costs another pass over its rows and a merge: it must be worth that.
constexpr double kWorthSplitting = 1.25;
// An axis with more different ranges than this is not looked at as a whole.
constexpr std::size_t kMostRanges = 8;
// Column tiles of their own for each row interval are worth their memory only where there are few.
constexpr double kMostOwnTiles = 40;

/// Chooses extents for parts that share their tiles.
class Chooser {
 public:
  Chooser(int axes, const TileShape& shape, const Parts& parts) : axes_(axes), shape_(shape), sample_(axes) {
    for (int k = 0; k < axes_; ++k) {
      hulls_[k] = hull(parts, k);
    }
    sample(parts);
    find_ranges(parts);
    seen_.resize((sample_.size() + 1) * static_cast<std::size_t>(axes_));
  }

  TileConfig choose() {
    const std::size_t most = axes_ > 3 ? 3 : 1;  // where there are many axes the search may end in a poor place
    const std::vector<Extents> rows = list(true, nullptr);
    std::vector<TileConfig> starts;
    for (const Extents& row : rows) {
      Extents col = row;
      for (int k = 0; k < axes_; ++k) {  // a whole axis meets a whole axis
        const std::int64_t reach = row[k] > 1 && row[k] == rows_of(hulls_[k]) ? shape_.cols : row[k];
        col[k] = static_cast<int>(std::min(reach, cols_of(hulls_[k])));
      }
      while (places(col) > shape_.cols) {
        int& longest = *std::max_element(col.begin(), col.end());
        longest = (longest + 1) / 2;
      }
      starts.push_back(rate(row, col));
    }
    std::stable_sort(starts.begin(), starts.end(),
                     [](const TileConfig& a, const TileConfig& b) { return a.cost < b.cost; });
    TileConfig best;
    for (std::size_t n = 0; n < std::min(most, starts.size()); ++n) {
      TileConfig now = starts[n];
      for (double before = 2 * now.cost; now.cost < before * 0.98;) {
        before = now.cost;
        for (const Extents& col : list(false, &now.row)) {
          improve(now.row, col, now);
        }
        for (const Extents& row : rows) {
          improve(row, now.col, now);
        }
      }
      best = now.cost < best.cost * 0.999 ? now : best;
    }
    return best;
  }

  /// Tile pairs, and as much for each row tile; column tiles with places to spare are never whole.
  TileConfig rate(const Extents& row, const Extents& col) {
    TileConfig made{row, col, {}, 0};
    std::array<double, kMaxAxes> grid{}, own{};
    std::array<std::array<AxisPairs, kMaxAxes>, kLargest + kOthers> found;
    for (std::size_t p = 0; p < sample_.size(); ++p) {
      for (int k = 0; k < axes_; ++k) {
        found[p][k] = pairs(p, k, row[k], col[k]);
        grid[k] += weight_[p] * found[p][k].grid;
        own[k] += weight_[p] * found[p][k].own;
      }
    }
    double tiles = 1, sum = 0;
    for (int k = 0; k < axes_; ++k) {
      const double intervals = static_cast<double>(up(rows_of(hulls_[k]), row[k]));
      made.own[k] = own[k] < 0.95 * grid[k] && own[k] <= kMostOwnTiles * intervals;
      tiles *= intervals;
    }
    for (std::size_t p = 0; p < sample_.size(); ++p) {
      double product = weight_[p];
      for (int k = 0; k < axes_; ++k) {
        product *= made.own[k] ? found[p][k].own : found[p][k].grid;
      }
      sum += product;
    }
    if (product_) {  // two bounds: parts that share tiles are counted twice by one, what is in no part by the other
      double product = 1;
      for (int k = 0; k < axes_; ++k) {
        const AxisPairs now = pairs(sample_.size(), k, row[k], col[k]);
        product *= made.own[k] ? now.own : now.grid;
      }
      sum = std::min(sum, product);
    }
    made.cost = sum * (places(col) < shape_.cols ? 1.03 : 1) + tiles;
    for (int k = 0; k + 1 < axes_; ++k) {  // of equals the one whose places follow each other most
      made.cost *= 1 + 0.0005 * (std::log2(row[k]) + std::log2(col[k]));
    }
    return made;
  }

 private:
  static int places(const Extents& extent) {
    int product = 1;
    for (const int e : extent) {
      product *= std::max(1, e);
    }
    return product;
  }

  /// The largest parts, and some of the others in their stead.
  void sample(const Parts& parts) {
    std::vector<std::pair<double, std::size_t>> sizes(parts.size());
    for (std::size_t p = 0; p < parts.size(); ++p) {
      sizes[p] = {-size_of(parts[p], axes_), p};
    }
    const std::size_t largest = std::min(parts.size(), kLargest);
    std::partial_sort(sizes.begin(), sizes.begin() + static_cast<std::ptrdiff_t>(largest), sizes.end());
    const std::size_t others = std::min(parts.size() - largest, kOthers);
    for (std::size_t n = 0; n < largest + others; ++n) {
      const std::size_t at = n < largest ? n : largest + (n - largest) * (parts.size() - largest) / others;
      sample_.add(parts[sizes[at].second]);
      weight_.push_back(n < largest ? 1 : static_cast<double>(parts.size() - largest) / static_cast<double>(others));
    }
  }

  /// Lengths worth trying on an axis: powers of two, the whole axis, and where rows are known, what they reach in
  /// equal pieces.
  std::vector<int> lengths(int axis, bool row, const Extents* rows) const {
    const std::int64_t whole = row ? rows_of(hulls_[axis]) : cols_of(hulls_[axis]);
    const int side = row ? shape_.rows : shape_.cols;
    std::vector<int> found;
    const auto add = [&](std::int64_t length) {
      if (length >= 1 && length <= side && length <= whole) {
        found.push_back(static_cast<int>(length));
      }
    };
    for (int e = 1; e <= side; e *= 2) {
      add(e);
    }
    add(whole);
    if (axes_ <= 3) {
      add(up(whole, 2));
      add(up(whole, 3));
    }
    const std::int64_t width = width_of(sample_[0][axis]);
    for (int pieces = 1; pieces <= (axes_ <= 3 ? 6 : 3) && rows != nullptr && width > 1; ++pieces) {
      add(up((*rows)[axis] + width - 1, pieces));
    }
    std::sort(found.begin(), found.end());
    found.erase(std::unique(found.begin(), found.end()), found.end());
    return found;
  }

  // Inlined, GCC 12 warns of array bounds: it does not know that axes_ keeps to them.
  [[gnu::noinline]] std::vector<Extents> list(bool row, const Extents* rows) const {
    std::vector<std::vector<int>> choices;
    for (int k = 0; k < axes_; ++k) {
      choices.push_back(lengths(k, row, rows));
    }
    std::vector<Extents> found;
    extend(choices, row ? shape_.rows : shape_.cols, {}, 0, 0, found);
    return found;
  }

  /// At most three axes longer than one, no more places than a tile's side, and none that could be longer for nothing.
  void extend(std::span<const std::vector<int>> choices, int left, Extents now, int axis, int longer,
              std::vector<Extents>& out) const {
    if (axis == axes_) {
      bool small = false;
      for (int k = 0; k < axes_; ++k) {
        const auto next = std::upper_bound(choices[k].begin(), choices[k].end(), now[k]);
        small = small || (next != choices[k].end() && *next <= left * now[k] && (now[k] > 1 || longer < kTileAxes));
      }
      if (!small) {
        out.push_back(now);
      }
      return;
    }
    for (const int extent : choices[axis]) {
      if (extent <= left && (extent == 1 || longer < kTileAxes)) {
        now[axis] = extent;
        extend(choices, left / extent, now, axis + 1, longer + (extent > 1 ? 1 : 0), out);
      }
    }
  }

  /// The different ranges of each axis: a grid's parts are products of a few of them.
  void find_ranges(const Parts& parts) {
    for (int k = 0; k < axes_ && product_; ++k) {
      for (std::size_t p = 0; p < parts.size(); ++p) {
        if (std::find(ranges_[k].begin(), ranges_[k].end(), parts[p][k]) == ranges_[k].end()) {
          ranges_[k].push_back(parts[p][k]);
          if (ranges_[k].size() > kMostRanges) {
            product_ = false;
            return;
          }
        }
      }
    }
  }

  /// Of a part of the sample, or (part = how many there are) of all ranges together.
  const AxisPairs& pairs(std::size_t part, int axis, int row, int col) {
    const auto number = [](std::vector<int>& known, int extent) {
      const auto at = std::find(known.begin(), known.end(), extent);
      if (at == known.end()) {
        known.push_back(extent);
        return known.size() - 1;
      }
      return static_cast<std::size_t>(at - known.begin());
    };
    const std::size_t i = number(known_rows_[axis], row), j = number(known_cols_[axis], col);
    auto& seen = seen_[part * static_cast<std::size_t>(axes_) + static_cast<std::size_t>(axis)];
    if (seen.size() <= i) {
      seen.resize(i + 1);
    }
    if (seen[i].size() <= j) {
      seen[i].resize(j + 8, {-1, -1});
    }
    AxisPairs& now = seen[i][j];
    if (now.grid < 0) {
      const AxisRange& all = hulls_[axis];
      now = part < sample_.size() ? axis_pairs(sample_[part][axis], all, row, col)
                                  : axis_pairs(ranges_[axis], all.row_begin, all.col_begin, row, col);
    }
    return now;
  }

  void improve(const Extents& row, const Extents& col, TileConfig& best) {
    if (const TileConfig now = rate(row, col); now.cost < best.cost * 0.999) {
      best = now;
    }
  }

  static constexpr std::size_t kLargest = 4, kOthers = 4;
  int axes_;
  TileShape shape_;
  std::array<AxisRange, kMaxAxes> hulls_{};
  Parts sample_;
  std::vector<double> weight_;
  std::array<std::vector<AxisRange>, kMaxAxes> ranges_;
  bool product_ = true;
  std::array<std::vector<int>, kMaxAxes> known_rows_, known_cols_;  ///< extents asked for so far
  std::vector<std::vector<std::vector<AxisPairs>>> seen_;           ///< by part and axis, row extent, column extent
};

struct Cluster {
  Parts parts;
  TileConfig config;
};

/// Parts by the magnitudes of their ranges: what suits one of a kind suits the others.
std::vector<Parts> kinds(int axes, const Parts& parts) {
  std::map<std::array<std::uint8_t, 3 * kMaxAxes>, Parts> found;
  for (std::size_t p = 0; p < parts.size(); ++p) {
    const AxisRange* const part = parts[p];
    std::array<std::uint8_t, 3 * kMaxAxes> key{};
    std::size_t at = 0;
    for (int k = 0; k < axes; ++k) {
      for (const std::int64_t length : {rows_of(part[k]), cols_of(part[k]), part[k].high - part[k].low + 1}) {
        key[at++] = static_cast<std::uint8_t>(std::bit_width(static_cast<std::uint64_t>(length)));
      }
    }
    found.try_emplace(key, axes).first->second.add(part);
  }
  std::vector<Parts> made;
  for (auto& [key, members] : found) {
    made.push_back(std::move(members));
  }
  return made;
}

std::vector<Cluster> one_cluster(Parts parts, const TileConfig& config) {
  std::vector<Cluster> made(1);
  made[0].parts = std::move(parts);
  made[0].config = config;
  return made;
}

/// Splits off the kind that loses most by sharing its tiles, with those that its tiles suit, while that pays.
std::vector<Cluster> split(int axes, const TileShape& shape, Parts parts) {
  constexpr std::size_t kMostKinds = 12;
  TileConfig shared = Chooser(axes, shape, parts).choose();
  const std::vector<Parts> members = axes > 1 && parts.size() > 1 ? kinds(axes, parts) : std::vector<Parts>();
  std::vector<TileConfig> alone;
  std::size_t worst = 0;
  double most = 0.1 * shared.cost;
  for (std::size_t n = 0; n < members.size() && members.size() > 1 && members.size() <= kMostKinds; ++n) {
    Chooser chooser(axes, shape, members[n]);
    const double now = chooser.rate(shared.row, shared.col).cost;
    alone.push_back(now > most ? chooser.choose() : TileConfig{{}, {}, {}, now});
    if (now - alone.back().cost > most) {
      most = now - alone.back().cost;
      worst = n + 1;
    }
  }
  if (worst == 0) {
    return one_cluster(std::move(parts), shared);
  }
  Parts off(axes), rest(axes);
  for (std::size_t n = 0; n < members.size(); ++n) {
    const TileConfig& config = alone[worst - 1];
    const bool suits =
        n + 1 == worst || Chooser(axes, shape, members[n]).rate(config.row, config.col).cost <= 1.1 * alone[n].cost;
    for (std::size_t p = 0; p < members[n].size(); ++p) {
      (suits ? off : rest).add(members[n][p]);
    }
  }
  if (rest.size() == 0) {
    return one_cluster(std::move(parts), shared);
  }
  std::vector<Cluster> made = split(axes, shape, std::move(rest));
  made.push_back({off, Chooser(axes, shape, off).choose()});
  double sum = 0;
  for (const Cluster& cluster : made) {
    sum += cluster.config.cost;
  }
  return sum * kWorthSplitting < shared.cost ? std::move(made) : one_cluster(std::move(parts), shared);
}

/// Tiles lie inside the sequence. In orders of several axes they also keep to the turns of the outermost digit that the
/// parts touch: where a grid stands inside a longer sequence, its tiles need not be cut where that one ends.
void find_positions(Arrangement& a, std::int64_t rows, std::int64_t cols) {
  const auto floor_to = [](std::int64_t x, std::int64_t unit) { return x - ((x % unit) + unit) % unit; };
  for (const bool row : {true, false}) {
    Side& side = row ? a.row : a.col;
    side.first = row ? a.view.row_shift : a.view.col_shift;
    side.last = side.first + (row ? rows : cols);
    std::int64_t first = side.last, last = side.first;
    for (std::size_t p = 0; p < a.parts.size() && a.view.axes > 1; ++p) {
      std::int64_t begin = 0, end = 1;
      for (int k = 0; k < a.view.axes; ++k) {
        const AxisRange& part = a.parts[p][k];
        begin += (row ? part.row_begin : part.col_begin) * a.view.strides[k];
        end += ((row ? part.row_end : part.col_end) - 1) * a.view.strides[k];
      }
      first = std::min(first, begin);
      last = std::max(last, end);
    }
    if (a.view.axes > 1) {
      const std::int64_t turn = a.view.strides[0];
      side.first = std::max(side.first, floor_to(first, turn));
      side.last = std::min(side.last, floor_to(last - 1, turn) + turn);
    }
  }
}

/// The axis along which row tiles meet the longest intervals of column tiles.
int run_axis(const Arrangement& a) {
  int best = 0;
  double longest = -1;
  for (int k = 0; k < a.view.axes; ++k) {
    const AxisRange all = hull(a.parts, k);
    double sum = 0;
    for (std::size_t p = 0; p < a.parts.size(); p += std::max<std::size_t>(1, a.parts.size() / 16)) {
      const AxisRange& part = a.parts[p][k];
      sum += axis_pairs(part, all, a.row.extent[k], a.col.extent[k]).grid /
             std::ceil(static_cast<double>(rows_of(part)) / a.row.extent[k]);
    }
    if (sum > longest) {
      longest = sum;
      best = k;
    }
  }
  return best;
}

}  // namespace

std::vector<Arrangement> arrange(std::int64_t rows, std::int64_t cols, std::vector<Counted> views,
                                 const TileShape& shape) {
  std::vector<Arrangement> made;
  for (auto& [view, parts] : views) {
    if (parts.size() == 0) {
      continue;
    }
    for (Cluster& cluster : split(view.axes, shape, std::move(parts))) {
      Arrangement& a = made.emplace_back();
      a.view = view;
      a.parts = std::move(cluster.parts);
      find_positions(a, rows, cols);
      cut_axes(a, cluster.config);
      a.run_axis = run_axis(a);
    }
  }
  return made;
}

}  // namespace fretwork::attention_op
