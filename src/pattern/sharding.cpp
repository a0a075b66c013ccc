// Cutting patterns over ranks: rows by their elements, and the columns of a range of rows, from parts alone.
#include "fretwork/sharding.h"

#include <algorithm>
#include <string>

#include "fretwork/error.h"
#include "fretwork/tensor.h"
#include "pattern/parts.h"

namespace fretwork {
namespace {

using parts::Wide;
using patterns::Span;

/// A part, the rows that it does not leave, and its elements.
struct Piece {
  const PartGroup* group;
  const Part* part;
  std::int64_t row_begin, row_end;
  Wide count;
};

/// Elements of a piece in rows before one.
Wide before(const Piece& piece, std::int64_t row, std::int64_t cols) {
  if (piece.row_end <= row || piece.row_begin >= row) {
    return piece.row_end <= row ? piece.count : 0;
  }
  Wide all = 0;
  for (const Part& part : parts::clipped(piece.group->view, {*piece.part}, row, cols)) {
    all += parts::count(part, piece.group->view.axes);
  }
  return all;
}

std::vector<Piece> pieces_of(const RegularPattern& pattern) {
  std::vector<Piece> all;
  for (const PartGroup& group : pattern.groups()) {
    for (const Part& part : group.parts) {
      const AxisRange ends = parts::hull(group.view, part);
      all.push_back({&group, &part, ends.row_begin, ends.row_end, parts::count(part, group.view.axes)});
    }
  }
  return all;
}

/// Finds the ends of ranks. Each search looks at the parts that are near it only.
class Cutter {
 public:
  Cutter(const RegularPattern& pattern, std::int64_t world_size, std::int64_t align)
      : rows_(pattern.rows()), cols_(pattern.cols()), align_(align), total_(pattern.nnz()) {
    ends_.assign(static_cast<std::size_t>(world_size), rows_);
    cut(pieces_of(pattern), 0, {0, rows_ / align + (rows_ % align > 0)}, {1, world_size});
  }
  const std::vector<std::int64_t>& ends() const { return ends_; }

 private:
  std::int64_t row(std::int64_t tile) const { return tile > rows_ / align_ ? rows_ : tile * align_; }

  /// Sets the ends of ranks [ranks.begin − 1, ranks.end − 1), which lie within `tiles`. `base` elements stand in rows
  /// before all of `pieces`.
  void cut(const std::vector<Piece>& pieces, Wide base, Span tiles, Span ranks) {
    if (ranks.length() == 0) {
      return;
    }
    const std::int64_t rank = ranks.begin + ranks.length() / 2, end = nearest(pieces, base, tiles, rank), at = row(end);
    ends_[static_cast<std::size_t>(rank - 1)] = at;
    std::vector<Piece> above, below;
    Wide passed = base;
    for (const Piece& piece : pieces) {
      if (piece.row_begin < at) {
        above.push_back(piece);
      }
      if (piece.row_end > at) {
        below.push_back(piece);
      } else {
        passed += piece.count;
      }
    }
    cut(above, base, {tiles.begin, end}, {ranks.begin, rank});
    cut(below, passed, {end, tiles.end}, {rank + 1, ranks.end});
  }

  /// The tile of `tiles` before which the share of `rank` ranks is met best.
  std::int64_t nearest(const std::vector<Piece>& pieces, Wide base, Span tiles, std::int64_t rank) const {
    const auto world = static_cast<std::int64_t>(ends_.size());
    // Times the number of ranks, so that nothing is rounded. Where there are no elements, rows are shared.
    const auto lacking = [&](std::int64_t tile) {
      Wide all = base;
      for (const Piece& piece : pieces) {
        all += before(piece, row(tile), cols_);
      }
      return total_ > 0 ? Wide{total_} * rank - all * world : Wide{rows_} * rank - Wide{row(tile)} * world;
    };
    std::int64_t low = tiles.begin, high = tiles.end;  // the first that lacks nothing
    while (low < high) {
      const std::int64_t middle = low + (high - low) / 2;
      lacking(middle) > 0 ? low = middle + 1 : high = middle;
    }
    return low > tiles.begin && lacking(low - 1) < -lacking(low) ? low - 1 : low;
  }

  std::int64_t rows_, cols_, align_, total_;
  std::vector<std::int64_t> ends_;
};

/// Calls visit(begin, end) for the runs of columns that the rows of a part have together.
template <typename Visit>
void for_each_columns(const View& view, const Part& part, const Visit& visit) {
  // An axis that has every digit makes runs of the one above it whole.
  auto last = static_cast<std::size_t>(view.axes) - 1;
  while (last > 0 && view.strides[last - 1] % view.strides[last] == 0 && part[last].col_begin == 0 &&
         part[last].col_end == view.strides[last - 1] / view.strides[last]) {
    --last;
  }
  const auto down = [&](const auto& self, std::size_t axis, std::int64_t first) -> void {
    const std::int64_t begin = part[axis].col_begin, end = part[axis].col_end, stride = view.strides[axis];
    if (axis == last) {
      visit(first + begin * stride, first + end * stride);
      return;
    }
    for (std::int64_t d = begin; d < end; ++d) {
      self(self, axis + 1, first + d * stride);
    }
  };
  down(down, 0, -view.col_shift);
}

/// Ranges in order, each as long as can be.
std::vector<Span> joined(std::vector<Span> ranges) {
  std::sort(ranges.begin(), ranges.end(), [](const Span& a, const Span& b) { return a.begin < b.begin; });
  std::vector<Span> all;
  for (const Span& range : ranges) {
    if (all.empty() || all.back().end < range.begin) {
      all.push_back(range);
    } else {
      all.back().end = std::max(all.back().end, range.end);
    }
  }
  return all;
}

/// Collects ranges of columns. Many parts may have the same, so what has come is joined now and then.
class Columns {
 public:
  void add(std::int64_t begin, std::int64_t end) {
    if (!ranges_.empty() && ranges_.back().begin <= begin && begin <= ranges_.back().end) {
      ranges_.back().end = std::max(ranges_.back().end, end);
      return;
    }
    if (ranges_.size() >= room_) {
      ranges_ = joined(std::move(ranges_));
      room_ = std::max(room_, 2 * ranges_.size());
    }
    ranges_.push_back({begin, end});
  }
  std::vector<Span> take() { return joined(std::move(ranges_)); }

 private:
  std::vector<Span> ranges_;
  std::size_t room_ = std::size_t{1} << 16;
};

/// The parts of some rows, counted from the first of them.
std::vector<PartGroup> of_rows(const RegularPattern& pattern, Span rows) {
  if (rows.begin < 0 || rows.begin > rows.end || rows.end > pattern.rows()) {
    throw Error("shard", "rows", "[begin, end) within 0 to " + std::to_string(pattern.rows()),
                "[" + std::to_string(rows.begin) + ", " + std::to_string(rows.end) + ")");
  }
  std::vector<PartGroup> all = parts::moved(pattern.groups(), rows.begin, 0);
  for (PartGroup& group : all) {
    group = parts::inside(group, rows.length(), pattern.cols());
  }
  return all;
}

std::vector<Span> spans(std::span<const std::int64_t> ends) {
  std::vector<Span> all;
  for (const std::int64_t end : ends) {
    all.push_back({all.empty() ? 0 : all.back().end, end});
  }
  return all;
}

Span rows_of(const Shards& shards, std::int64_t rank) {
  const std::int64_t ranks = std::ssize(shards.rows);
  if (rank < 0 || rank >= ranks) {
    throw Error("shards", "rank", "0 to " + std::to_string(ranks - 1), std::to_string(rank));
  }
  return shards.rows[static_cast<std::size_t>(rank)];
}

/// Equal parts, at multiples of `align`.
std::vector<Span> equal_parts(std::int64_t length, std::int64_t count, std::int64_t align) {
  std::vector<std::int64_t> ends;
  for (std::int64_t n = 1; n <= count; ++n) {
    const Wide share = Wide{length} * n / count, up = Wide{align} * ((share + align / 2) / align);
    ends.push_back(n == count ? length : static_cast<std::int64_t>(std::min<Wide>(up, length)));
  }
  return spans(ends);
}

}  // namespace

Shards shard(const PatternPtr& pattern, std::int64_t world_size, std::int64_t align) {
  constexpr std::int64_t kMostRanks = std::int64_t{1} << 24;
  if (world_size < 1 || world_size > kMostRanks) {
    throw Error("shard", "world_size", "1 to 2^24", std::to_string(world_size));
  }
  if (align < 1) {
    throw Error("shard", "align", "at least 1", std::to_string(align));
  }
  const RegularPtr regular = as_regular("shard", pattern);
  const std::vector<Span> rows = spans(Cutter(*regular, world_size, align).ends());
  return {regular, rows, regular->rows() == regular->cols() ? rows : equal_parts(regular->cols(), world_size, align)};
}

std::int64_t nnz_of_rows(const PatternPtr& pattern, Span rows) {
  Wide all = 0;
  for (const PartGroup& group : of_rows(*as_regular("shard", pattern), rows)) {
    all += parts::count(group);
  }
  return static_cast<std::int64_t>(all);
}

std::vector<KeyRange> keys_of_rows(const PatternPtr& pattern, Span rows, std::span<const std::int64_t> key_ends) {
  if (!std::ranges::is_sorted(key_ends)) {
    throw Error("shard", "key_ends", "ends that ascend", shape_text(key_ends));
  }
  Columns columns;
  for (const PartGroup& group : of_rows(*as_regular("shard", pattern), rows)) {
    for (const Part& part : group.parts) {
      for_each_columns(group.view, part, [&](std::int64_t begin, std::int64_t end) { columns.add(begin, end); });
    }
  }
  std::vector<KeyRange> all;
  std::size_t rank = 0;
  for (Span left : columns.take()) {
    while (rank < key_ends.size() && left.length() > 0) {
      const std::int64_t end = std::min(left.end, key_ends[rank]);
      if (end > left.begin) {
        all.push_back({static_cast<std::int64_t>(rank), left.begin, end});
        left.begin = end;
      }
      rank += end == key_ends[rank];
    }
  }
  return all;
}

std::int64_t Shards::nnz(std::int64_t rank) const { return nnz_of_rows(pattern, rows_of(*this, rank)); }

std::vector<KeyRange> Shards::needs(std::int64_t rank) const {
  std::vector<std::int64_t> ends;
  std::transform(keys.begin(), keys.end(), std::back_inserter(ends), [](const Span& span) { return span.end; });
  std::vector<KeyRange> all = keys_of_rows(pattern, rows_of(*this, rank), ends);
  std::erase_if(all, [&](const KeyRange& range) { return range.rank == rank; });
  return all;
}

}  // namespace fretwork
