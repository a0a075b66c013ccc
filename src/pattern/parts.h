// The arithmetic of parts: counting, meeting, taking away, and counting the same part in another view. Exact, on ends
// alone: nothing here looks at elements one by one except for_each_row.
#pragma once

#include <algorithm>
#include <initializer_list>
#include <optional>
#include <span>
#include <vector>

#include "pattern/regular.h"

namespace fretwork::parts {

/// Farther than any digit or difference that a check lets in.
inline constexpr std::int64_t kFar = std::int64_t{1} << 52;

using Wide = __int128;

/// A short text must not ask for unbounded memory: more parts than this, some gigabyte, are refused.
inline constexpr std::int64_t kMostParts = std::int64_t{1} << 22;
void check_parts(const char* op, Wide parts);

/// No constraint at all.
inline constexpr AxisRange kAnywhere{-kFar, kFar, -kFar, kFar, -2 * kFar, 2 * kFar};
/// Digits whose difference, column − row, is in [low, high].
constexpr AxisRange differing(std::int64_t low, std::int64_t high) { return {-kFar, kFar, -kFar, kFar, low, high}; }
/// Row digits in [row_begin, row_end) beside column digits in [col_begin, col_end).
constexpr AxisRange between(std::int64_t row_begin, std::int64_t row_end, std::int64_t col_begin,
                            std::int64_t col_end) {
  return {row_begin, row_end, col_begin, col_end, -2 * kFar, 2 * kFar};
}
AxisRange meet(const AxisRange& a, const AxisRange& b);

std::int64_t floor_div(std::int64_t a, std::int64_t b);
/// Never negative for b > 0.
std::int64_t floor_mod(std::int64_t a, std::int64_t b);

/// Plain order, and the classes modulo `stride` (plain order too where that is 1).
View flat_view(std::int64_t row_shift = 0, std::int64_t col_shift = 0);
View residue_view(std::int64_t stride, std::int64_t row_shift = 0, std::int64_t col_shift = 0);
/// A part from what its axes say.
Part part(std::initializer_list<AxisRange> axes);

/// Room for many parts. They are large, and so are the pages that are asked for.
void reserve(std::vector<Part>& parts, std::size_t count);

/// Makes the ends tight; false where nothing is left.
bool tighten(AxisRange& range);
bool tighten(Part& part, int axes);
/// Elements, of tight ranges.
Wide count(const AxisRange& range);
Wide count(const Part& part, int axes);
Wide count(const PartGroup& group);

/// The union of two disjoint ranges, where that is a range.
std::optional<AxisRange> join(const AxisRange& a, const AxisRange& b);
/// Two parts of one view: what they share; and what the first has alone, in disjoint parts put behind `out`.
std::optional<Part> meet(const Part& a, const Part& b, int axes);
void subtract(const Part& a, const Part& b, int axes, std::vector<Part>& out);
/// Finds parts that may meet another, by their rows on the first axis.
class RowIndex {
 public:
  explicit RowIndex(std::vector<Part> parts);
  /// The parts from the first to the last whose rows may touch those of `range`; a few in between may not.
  std::span<const Part> near(const AxisRange& range) const;
  const std::vector<Part>& parts() const { return parts_; }

 private:
  std::vector<Part> parts_;            ///< by row_begin
  std::vector<std::int64_t> reached_;  ///< the largest row_end so far
};
/// What `from` has and none of `others` (of the same view) has.
std::vector<Part> subtract(const std::vector<Part>& from, const RowIndex& others, int axes);
/// Puts neighbours together where their union is a part again. Parts must be disjoint.
void merge(std::vector<Part>& parts, int axes);

/// The elements of rows × cols that satisfy one of `wanted`, as tight parts.
std::vector<Part> clipped(const View& view, const std::vector<Part>& wanted, std::int64_t rows, std::int64_t cols);

/// The same parts of a matrix that begins `rows` and `cols` later; before it where these are negative. And what rows ×
/// cols hold of parts that may reach beyond: those that do are cut.
std::vector<PartGroup> moved(const std::vector<PartGroup>& groups, std::int64_t rows, std::int64_t cols);
PartGroup inside(const PartGroup& group, std::int64_t rows, std::int64_t cols);

/// An axis counted x = q·radix + m, as tight pairs of ranges for q and m.
std::vector<std::array<AxisRange, 2>> split(const AxisRange& x, std::int64_t radix);

/// Whether two views count alike but for whole turns of the outermost digit.
bool alike(const View& a, const View& b);
/// A view in which parts of both can be counted, if there is one; and the parts of a group in such a view.
std::optional<View> common_view(const View& a, const View& b);
std::vector<Part> refined(const PartGroup& group, const View& finer);

/// Counts an outermost axis on which no two rows and no two columns of rows × cols differ with the next one: there may
/// be far more digits than positions, and who plans looks at each.
void fold(PartGroup& group, std::int64_t rows, std::int64_t cols);

/// The rows, columns and differences, in the matrix's own numbers, that a part does not leave.
AxisRange hull(const View& view, const Part& part);
PartGroup transposed(const PartGroup& group);
bool contains(const PartGroup& group, std::int64_t row, std::int64_t col);

/// The columns that a row has in one part: first + Σ u_k·stride[k], 0 ≤ u_k < extent[k] (extent 1 on unused axes).
struct Columns {
  std::int64_t first;
  std::array<std::int64_t, kMaxAxes> extent, stride;
};

/// Calls visit(row, columns) for each row of a part.
template <typename Visit>
void for_each_row(const View& view, const Part& part, const Visit& visit);

/// The digits of a position.
std::array<std::int64_t, kMaxAxes> digits(const View& view, std::int64_t position);

/// Calls visit(begin, end) for each run of columns of a part's row, if the row is one of its.
template <typename Visit>
void for_each_run(const View& view, const Part& part, std::int64_t row, const Visit& visit);

}  // namespace fretwork::parts

template <typename Visit>
void fretwork::parts::for_each_run(const View& view, const Part& part, std::int64_t row, const Visit& visit) {
  const auto at = digits(view, row + view.row_shift);
  const auto down = [&](const auto& self, std::size_t axis, std::int64_t column) -> void {
    const AxisRange& r = part[axis];
    if (at[axis] < r.row_begin || at[axis] >= r.row_end) {
      return;
    }
    const std::int64_t begin = std::max(r.col_begin, at[axis] + r.low),
                       end = std::min(r.col_end, at[axis] + r.high + 1);
    if (axis + 1 == static_cast<std::size_t>(view.axes) || axis + 1 == kMaxAxes) {
      visit(column + begin, column + end);
      return;
    }
    for (std::int64_t c = begin; c < end; ++c) {
      self(self, axis + 1, column + c * view.strides[axis]);
    }
  };
  down(down, 0, -view.col_shift);
}

// For each digit of the row on each axis in turn: the columns are then intervals of digits.
template <typename Visit>
void fretwork::parts::for_each_row(const View& view, const Part& part, const Visit& visit) {
  Columns columns;
  columns.extent.fill(1);
  columns.stride.fill(0);
  const auto down = [&](const auto& self, int axis, std::int64_t row, std::int64_t first) -> void {
    if (axis == view.axes || axis == kMaxAxes) {  // the second for the compiler, which unrolls this
      columns.first = first - view.col_shift;
      visit(row - view.row_shift, static_cast<const Columns&>(columns));
      return;
    }
    const AxisRange& r = part[static_cast<std::size_t>(axis)];
    const std::int64_t stride = view.strides[static_cast<std::size_t>(axis)];
    for (std::int64_t d = r.row_begin; d < r.row_end; ++d) {
      const std::int64_t begin = std::max(r.col_begin, d + r.low), end = std::min(r.col_end, d + r.high + 1);
      columns.extent[static_cast<std::size_t>(axis)] = end - begin;
      columns.stride[static_cast<std::size_t>(axis)] = stride;
      self(self, axis + 1, row + d * stride, first + begin * stride);
    }
  };
  down(down, 0, 0, 0);
}
