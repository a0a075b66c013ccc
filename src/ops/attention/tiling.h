// The planner, between its files. arrange.cpp chooses how long tiles are, tiling.cpp cuts each axis of a view into
// intervals of digits (a tile is a product of intervals), component.cpp finds the runs of row tiles and masks.cpp the
// masks that they share.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/hash.h"
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

// What arrange.cpp, which chooses how long tiles are, and tiling.cpp, which cuts the axes, both use.

using Extents = std::array<int, kMaxAxes>;

inline std::int64_t rows_of(const AxisRange& a) { return a.row_end - a.row_begin; }
inline std::int64_t cols_of(const AxisRange& a) { return a.col_end - a.col_begin; }
inline std::int64_t width_of(const AxisRange& a) { return std::min(cols_of(a), a.high - a.low + 1); }
inline std::int64_t up(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }
/// At least as many as a part's elements, and of that order.
double size_of(const AxisRange* part, int axes);

/// The columns that rows [first, last] of a part reach; empty if begin ≥ end.
struct Reached {
  std::int64_t begin, end;
};
Reached reached(const AxisRange& part, std::int64_t first, std::int64_t last);

/// What an axis spans, all parts together.
AxisRange hull(const Parts& parts, int axis);

/// Tile pairs on one axis: in a grid of columns, and where each row interval has columns of its own.
struct AxisPairs {
  double grid, own;
};

/// Those that some of these parts meet, from a sample of the rows.
AxisPairs axis_pairs(std::span<const AxisRange> parts, std::int64_t row_origin, std::int64_t col_origin, int row_extent,
                     int col_extent);
/// One part, with cuts that begin where the hull does or where the part does.
AxisPairs axis_pairs(const AxisRange& part, const AxisRange& all, int row_extent, int col_extent);

/// How long tiles are, and what they cost: tile pairs, and as much for each row tile.
struct TileConfig {
  Extents row{}, col{};
  std::array<bool, kMaxAxes> own{};  ///< row intervals have column intervals of their own
  double cost = std::numeric_limits<double>::max();
};

/// Cuts the axes of an arrangement that has its view, parts and positions.
void cut_axes(Arrangement& arrangement, const TileConfig& config);

/// Gives different 64-bit values the numbers 0, 1, 2, …
class Numbers {
 public:
  int of(std::uint64_t value);
  std::uint64_t value(int number) const { return values_[static_cast<std::size_t>(number)]; }
  int size() const { return static_cast<int>(values_.size()); }
  std::int64_t steps() const { return steps_; }  ///< slots looked at so far

 private:
  void grow();
  std::int64_t steps_ = 0;
  std::vector<std::uint64_t> values_;
  std::vector<std::int32_t> slots_;
};

/// One side's tiles. Numbers rise with the digits, the run axis's fastest.
struct Grid {
  std::vector<Tile> tiles;
  std::vector<int> shape;                   ///< of each tile: a number that stands for what of it is inside
  std::vector<std::int32_t> number;         ///< by place in the product of the intervals; −1: not in the sequence
  std::array<std::int64_t, kMaxAxes> step;  ///< of an axis in that product
  std::vector<Inside> shapes;
  Order order;
};

Grid make_grid(const View& view, const Side& side, int run_axis, std::int64_t shift);

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

/// Sets bits [begin, end), which are some.
inline void set_range(std::uint32_t* words, int begin, int end) {
  const int last = (end - 1) >> 5;
  std::uint32_t bits = ~0u << (begin & 31);
  for (int word = begin >> 5; word < last; ++word, bits = ~0u) {
    words[word] |= bits;
  }
  words[last] |= bits & ~0u >> (-end & 31);
}

/// A mask that is being drawn: intervals while there is one to a row, then bits.
class Canvas {
 public:
  /// With bits from the beginning where rows of more than one interval are likely.
  void clear(const TileShape& shape, bool as_bits);
  /// Adds columns [begin, end), which are some and new, to a row.
  void add(int row, int begin, int end) {
    if (!bits_.empty()) {
      set_range(bits_.data() + static_cast<std::size_t>(row) * words_, begin, end);
      return;
    }
    Interval& interval = rows_[static_cast<std::size_t>(row)];
    if (interval.end == 0) {
      interval = {static_cast<std::uint8_t>(begin), static_cast<std::uint8_t>(end)};
    } else if (interval.end == begin) {
      interval.end = static_cast<std::uint8_t>(end);
    } else if (interval.begin == end) {
      interval.begin = static_cast<std::uint8_t>(begin);
    } else {
      go_on_with_bits();
      add(row, begin, end);
    }
  }
  /// Adds columns [max(begin, low + n), min(end, high + n)), where these are some, to rows `row` + n, n < count.
  void add(int row, int count, int begin, int end, int low, int high) {
    int n = 0;
    for (Interval* const rows = rows_.data() + row; n < count && bits_.empty(); ++n) {
      const int first = std::max(begin, low + n), last = std::min(end, high + n);
      if (first < last && rows[n].end == 0) {  // as most often
        rows[n] = {static_cast<std::uint8_t>(first), static_cast<std::uint8_t>(last)};
      } else if (first < last) {
        add(row + n, first, last);
      }
    }
    std::uint32_t* words = bits_.data() + static_cast<std::size_t>(row + n) * words_;
    for (; n < count; ++n, words += words_) {
      if (const int first = std::max(begin, low + n), last = std::min(end, high + n); first < last) {
        set_range(words, first, last);
      }
    }
  }
  /// The intervals, where each row is one; else the bits.
  bool is_intervals();
  std::span<const Interval> rows() const { return rows_; }
  std::span<const std::uint32_t> bits() const { return bits_; }

 private:
  void go_on_with_bits();
  std::size_t words_ = 0;  ///< of a row
  std::vector<Interval> rows_;
  std::vector<std::uint32_t> bits_;
};

/// The masks of a plan, each once.
class Masks {
 public:
  explicit Masks(Plan& plan) : plan_(plan) {}
  /// The index of the mask that was drawn, or −1 where the tile pair is whole. A band is preferred, then intervals;
  /// rows that are not inside may be anything in a band, and have nothing drawn. The first `prefix` columns are inside.
  int add(Canvas& drawn, const std::vector<bool>& inside, int prefix);

 private:
  using Known = std::unordered_map<Hash128, int>;
  /// The index of the mask with this content, which is put behind the others if it is new.
  template <typename T>
  int number(Known& known, std::span<const T> content, const Mask& mask);
  /// The same for a mask whose content is kept behind that of others, from *at on.
  template <typename T>
  int number(Known& known, std::span<const T> content, std::int32_t Mask::*at, std::vector<T>& all);
  Plan& plan_;
  Known bands_, intervals_, bits_;
};

/// Row tiles that no part meets are kept if there are few of them (then covers_rows) and `cover` is set.
Component make_component(const Arrangement& arrangement, Plan& plan, Masks& masks, bool cover);

}  // namespace fretwork::attention_op
