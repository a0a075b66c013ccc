// How tiles are cut: each axis of a view into intervals of digits. A tile is a product of intervals.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "ops/attention/plan.h"
#include "pattern/regular.h"

namespace fretwork::attention_op {

/// Disjoint half-open intervals of digits, rising.
struct Cuts {
  std::vector<std::int64_t> begin, end;
  int size() const { return static_cast<int>(begin.size()); }
};

/// One side of the tile pairs. An axis whose extent is 1 is not in the tile: each digit is a class of its own.
struct Side {
  std::array<int, kMaxAxes> extent{};
  std::array<Cuts, kMaxAxes> cuts;
  /// Columns only, where not empty: row interval i has the intervals [own[i], own[i + 1]) to itself; they rise within
  /// those, and different rows' may overlap.
  std::array<std::vector<int>, kMaxAxes> own;
  int free_axis = 0;                 ///< the one where tiles may be cut short by the sequence's ends
  std::int64_t first = 0, last = 0;  ///< positions [first, last) that tiles may have
};

/// The parts of a view by as many ranges as it has axes: there may be many of them, and planning looks at them often.
class Parts {
 public:
  explicit Parts(int axes = 1) : axes_(static_cast<std::size_t>(axes)) {}
  std::size_t size() const { return ranges_.size() / axes_; }
  const AxisRange* operator[](std::size_t part) const { return ranges_.data() + part * axes_; }
  void add(const AxisRange* part) { ranges_.insert(ranges_.end(), part, part + axes_); }
  void reserve(std::size_t parts) { ranges_.reserve(parts * axes_); }

 private:
  std::size_t axes_;
  std::vector<AxisRange> ranges_;
};

/// Parts of one view that share their tiles.
struct Arrangement {
  View view;
  Parts parts;
  Side row, col;
  int run_axis = 0;  ///< tiles that follow each other along it have consecutive numbers
};

/// Positions as a side's digits see them: those of [first, last) that the view can count.
struct Line {
  int axes;
  std::array<std::int64_t, kMaxAxes> strides;
  std::int64_t first, last;

  Line(const View& view, const Side& side)
      : axes(view.axes), strides(view.strides), first(side.first), last(side.last) {}
  std::array<std::int64_t, kMaxAxes> digits(std::int64_t position) const;
  /// Which digits of an axis there are.
  std::pair<std::int64_t, std::int64_t> range(int axis) const;
};

/// [begin, end) in intervals of at most `extent`, none of which goes past a forced cut, nor past the last of the wished
/// ones that it could reach.
Cuts cut(std::int64_t begin, std::int64_t end, int extent, std::span<const std::int64_t> forced,
         std::span<const std::int64_t> wished);

/// What of a box of digits is inside, as offsets from the box's begin.
struct Inside {
  std::array<int, kMaxAxes> begin, end;
};

/// Where the positions that a view counts end.
class Ends {
 public:
  explicit Ends(const Line& line);
  /// The inside of a box: again a box, given the cuts above. False if nothing is inside.
  bool clip(int free_axis, std::span<const std::int64_t> begin, std::span<const std::int64_t> end,
            Inside& inside) const;
  /// Every tile is a box of positions: digits that must stand alone on an axis so that what lies outside the sequence
  /// is cut off by the free axis only.
  std::vector<std::int64_t> forced_cuts(int axis) const;

 private:
  /// A number by its digits from axis `first` on; those after `last` are zero.
  struct Bound {
    int first, last;
    std::array<std::int64_t, kMaxAxes> digits;
  };
  static Bound bound(const Line& line, int first, std::int64_t value);
  static int compare(const Bound& limit, int from, int to, std::span<const std::int64_t> begin,
                     std::span<const std::int64_t> end);
  int axes_;
  Bound low_;
  std::vector<Bound> high_;  ///< the sequence's end, and of each axis whose stride is no multiple of the next one's
};

/// Parts that are counted in the same way, tightened.
struct Counted {
  View view;
  Parts parts;
};

/// How the parts of a pattern, each view once, are arranged in tiles.
std::vector<Arrangement> arrange(std::int64_t rows, std::int64_t cols, std::vector<Counted> views,
                                 const TileShape& shape);

/// The plan of disjoint parts of rows × cols elements; or that of the transposed elements, whose rows are these
/// columns.
Plan plan_parts(std::int64_t rows, std::int64_t cols, std::span<const PartGroup> groups, const TileShape& shape,
                bool transpose = false);

}  // namespace fretwork::attention_op
