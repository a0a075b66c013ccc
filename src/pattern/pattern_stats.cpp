// Counts over block indices and masks.
#include "pattern/pattern_stats.h"

#include <algorithm>
#include <numeric>
#include <string>

#include "fretwork/error.h"
#include "pattern/parts.h"

namespace fretwork {
namespace {

constexpr std::int64_t kMaxMask = std::int64_t{1} << 30;
/// Regular and Kronecker patterns of more elements are long: of each square so many rows are read.
constexpr double kLong = 1 << 24;
constexpr std::int64_t kSamples = 8;
constexpr std::int64_t kMaxRows = std::int64_t{1} << 28;

/// Adds the elements [y0, y1)×[x0, x1) to the squares they lie in.
void add_area(Occupancy& grid, std::int64_t y0, std::int64_t y1, std::int64_t x0, std::int64_t x1) {
  const std::int64_t cell = grid.cell;
  for (std::int64_t y = y0 / cell; y * cell < y1; ++y) {
    const std::int64_t height = std::min(y1, (y + 1) * cell) - std::max(y0, y * cell);
    for (std::int64_t x = x0 / cell; x * cell < x1; ++x) {
      const std::int64_t width = std::min(x1, (x + 1) * cell) - std::max(x0, x * cell);
      grid.share[static_cast<std::size_t>(y * grid.cols + x)] += static_cast<double>(height * width);
    }
  }
}

/// Adds begin, begin + step, … below `end`, columns of a row of squares, `weight` for each.
void add_run(Occupancy& grid, std::int64_t y, std::int64_t begin, std::int64_t end, std::int64_t step, double weight) {
  const auto before = [&](std::int64_t column) { return (column - begin + step - 1) / step; };
  for (std::int64_t x = begin / grid.cell; x * grid.cell < end; ++x) {
    const std::int64_t first = std::max(begin, x * grid.cell), last = std::min(end, (x + 1) * grid.cell);
    grid.share[static_cast<std::size_t>(y * grid.cols + x)] +=
        weight * static_cast<double>(before(last) - before(first));
  }
}

/// The least size from `cell` on that a block's side is a multiple of, or that is one of the side, if it is near.
std::int64_t aligned_cell(std::int64_t cell, std::int64_t side) {
  for (std::int64_t near = cell; near < 2 * cell; ++near) {
    if (side % near == 0 || near % side == 0) {
      return near;
    }
  }
  return cell;
}

}  // namespace

PatternStats::PatternStats(const Pattern& pattern)
    : blocks_(dynamic_cast<const BlockLayout*>(&pattern)), kronecker_(dynamic_cast<const KroneckerPattern*>(&pattern)) {
  const auto shape = pattern.shape();
  if (shape.size() < 2) {
    throw Error("show", "pattern", "a matrix", std::to_string(shape.size()) + " dimensions");
  }
  rows_ = shape[shape.size() - 2];
  cols_ = shape[shape.size() - 1];
  heads_ = std::accumulate(shape.begin(), shape.end() - 2, std::int64_t{1}, std::multiplies<>{});
  const double elements = static_cast<double>(heads_) * static_cast<double>(rows_) * static_cast<double>(cols_);
  long_ = elements > kLong;
  if (long_) {
    regular_ = dynamic_cast<const RegularPattern*>(&pattern);
  }
  if (regular_ != nullptr && rows_ > kMaxRows) {
    throw Error("show", "pattern", "at most 2^28 rows", std::to_string(rows_));
  }
  if (blocks_ == nullptr && regular_ == nullptr && kronecker_ == nullptr) {
    if (elements > double{kMaxMask}) {
      throw Error("show", "pattern", "at most 2^30 elements", std::to_string(rows_) + " x " + std::to_string(cols_));
    }
    mask_.resize(static_cast<std::size_t>(heads_ * rows_ * cols_));
    pattern.mask(mask_);
  }
}

void PatternStats::check_head(std::int64_t head) const {
  if (head < 0 || head >= std::max<std::int64_t>(heads_, 1)) {
    throw Error("show", "head", heads_ > 1 ? "0 to " + std::to_string(heads_ - 1) : "0", std::to_string(head));
  }
}

HeadFacts PatternStats::facts(std::int64_t head) const {
  const std::int64_t lines = blocks_ != nullptr ? blocks_->sizes().rows : rows_;
  HeadFacts facts;
  if (regular_ != nullptr) {
    const std::vector<std::int64_t> lengths = regular_->row_lengths();
    const auto [least, most] = std::minmax_element(lengths.begin(), lengths.end());
    return {regular_->nnz(), *least, *most, std::count(lengths.begin(), lengths.end(), 0)};
  }
  if (kronecker_ != nullptr) {
    return {kronecker_->nnz(), kronecker_->sizes().c, kronecker_->sizes().c, 0};
  }
  for (std::int64_t l = head * lines; l < (head + 1) * lines; ++l) {
    const auto row = mask_.begin() + l * cols_;
    const std::int64_t length = blocks_ != nullptr ? static_cast<std::int64_t>(blocks_->by_row().line(l).size())
                                                   : std::count(row, row + cols_, 1);
    facts.nnz += length;
    facts.longest_row = std::max(facts.longest_row, length);
    facts.shortest_row = l == head * lines ? length : std::min(facts.shortest_row, length);
    facts.empty_rows += length == 0;
  }
  return facts;
}

void PatternStats::add_rows(Occupancy& grid) const {
  struct Sample {
    std::int64_t row, y;
    double weight;
  };
  std::vector<Sample> samples;
  for (std::int64_t y = 0; y < grid.rows; ++y) {
    const std::int64_t height = std::min(grid.cell, rows_ - y * grid.cell);
    const std::int64_t count = long_ ? std::min(height, kSamples) : height;
    for (std::int64_t n = 0; n < count; ++n) {
      samples.push_back(
          {y * grid.cell + n * height / count, y, static_cast<double>(height) / static_cast<double>(count)});
    }
  }
  if (kronecker_ != nullptr) {
    const auto& [a, b, c, d] = kronecker_->sizes();
    for (const auto& [row, y, weight] : samples) {
      const std::int64_t begin = row / (b * d) * c * d + row % d;
      add_run(grid, y, begin, begin + (c - 1) * d + 1, d, weight);
    }
    return;
  }
  for (const PartGroup& group : regular_->groups()) {
    for (const Part& part : group.parts) {
      const AxisRange hull = parts::hull(group.view, part);
      auto at = std::ranges::lower_bound(samples, hull.row_begin, {}, &Sample::row);
      for (; at != samples.end() && at->row < hull.row_end; ++at) {
        parts::for_each_run(group.view, part, at->row, [&](std::int64_t begin, std::int64_t end) {
          add_run(grid, at->y, begin, end, 1, at->weight);
        });
      }
    }
  }
}

Occupancy PatternStats::occupancy(std::int64_t head, std::int64_t max_rows, std::int64_t max_cols) const {
  const auto divided = [](std::int64_t n, std::int64_t by) { return (n + by - 1) / by; };
  Occupancy grid;
  grid.cell = std::max({std::int64_t{1}, divided(rows_, max_rows), divided(cols_, max_cols)});
  if (blocks_ != nullptr) {
    const std::int64_t unit = std::gcd(blocks_->sizes().block_rows, blocks_->sizes().block_cols);
    grid.cell = divided(grid.cell, unit) * unit;
  }
  if (kronecker_ != nullptr) {
    const auto& s = kronecker_->sizes();
    grid.cell = aligned_cell(grid.cell, std::gcd(s.b, s.c) * s.d);
  }
  grid.rows = divided(rows_, grid.cell);
  grid.cols = divided(cols_, grid.cell);
  grid.share.assign(static_cast<std::size_t>(grid.rows * grid.cols), 0.0);
  if (blocks_ != nullptr) {
    const auto& [heads, lines, cols, r, c] = blocks_->sizes();
    for (std::int64_t i = 0; i < lines; ++i) {
      for (const auto& entry : blocks_->by_row().line(head * lines + i)) {
        add_area(grid, i * r, (i + 1) * r, entry.other * c, (entry.other + 1) * c);
      }
    }
  } else if (regular_ != nullptr || kronecker_ != nullptr) {
    add_rows(grid);
  } else {
    for (std::int64_t y = 0; y < rows_; ++y) {
      const auto row = mask_.begin() + (head * rows_ + y) * cols_;
      for (std::int64_t x = 0; x < cols_; ++x) {
        grid.share[static_cast<std::size_t>(y / grid.cell * grid.cols + x / grid.cell)] += row[x];
      }
    }
  }
  for (std::int64_t y = 0; y < grid.rows; ++y) {
    const std::int64_t height = std::min(grid.cell, rows_ - y * grid.cell);
    for (std::int64_t x = 0; x < grid.cols; ++x) {
      const std::int64_t width = std::min(grid.cell, cols_ - x * grid.cell);
      grid.share[static_cast<std::size_t>(y * grid.cols + x)] /= static_cast<double>(height * width);
    }
  }
  return grid;
}

}  // namespace fretwork
