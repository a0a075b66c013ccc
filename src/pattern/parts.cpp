// The arithmetic of parts.
#include "pattern/parts.h"

#include <compare>
#include <functional>
#include <numeric>
#include <tuple>
#include <utility>

#include "core/large_pages.h"
#include "fretwork/error.h"

namespace fretwork::parts {
namespace {

/// Σ max(0, r + k) over 0 ≤ r < rows.
Wide ramp(Wide rows, Wide k) {
  if (k >= 0) {
    return rows * k + rows * (rows - 1) / 2;
  }
  const Wide reached = rows + k;
  return reached > 0 ? reached * (reached - 1) / 2 : 0;
}

/// Pairs of the ranges' digits whose difference is at most `high`.
Wide pairs_up_to(const AxisRange& range, std::int64_t high) {
  const Wide k = Wide{high} + range.row_begin - range.col_begin + 1;
  const Wide rows = Wide{range.row_end} - range.row_begin, cols = Wide{range.col_end} - range.col_begin;
  return ramp(rows, k) - ramp(rows, k - cols);
}

/// A digit and the one below it, both as ranges.
struct Piece {
  std::int64_t high_begin, high_end, low_begin, low_end;
};

/// The numbers x = q·radix + m of [begin, end): by q (head, body, tail), or by m (classes of two lengths).
std::vector<Piece> cut(std::int64_t begin, std::int64_t end, std::int64_t radix, bool by_low) {
  std::vector<Piece> pieces;
  const auto add = [&](std::int64_t hb, std::int64_t he, std::int64_t lb, std::int64_t le) {
    if (hb < he && lb < le) {
      pieces.push_back({hb, he, lb, le});
    }
  };
  const std::int64_t first = floor_div(begin, radix), at = begin - first * radix;
  const std::int64_t last = floor_div(end, radix), to = end - last * radix;
  if (by_low) {
    // Class m holds q from first + (m < at) up to last + (m < to).
    const std::int64_t near = std::min(at, to), far = std::max(at, to);
    add(first + 1, last + 1, 0, near);
    add(first + (far == at), last + (far == to && far != at), near, far);
    add(first, last, far, radix);
  } else if (first == last) {
    add(first, first + 1, at, to);
  } else {
    const std::int64_t body = first + (at > 0);
    add(first, body, at, radix);
    add(body, last, 0, radix);
    add(last, last + 1, 0, to);
  }
  return pieces;
}

/// The differences d = radix·dq + dm of [low, high], |dm| < radix, as (dq, dm) ranges; their ends belong to them.
std::vector<Piece> cut_differences(std::int64_t low, std::int64_t high, std::int64_t radix) {
  const std::int64_t a = floor_div(low, radix), b = low - a * radix;
  const std::int64_t c = floor_div(high, radix), d = high - c * radix;
  // dq = a has dm ≥ b, dq = a + 1 has dm ≥ b − radix, more have any; dq = c + 1 has dm ≤ d − radix, dq = c dm ≤ d.
  const auto least = [&](std::int64_t q) { return q == a ? b : q == a + 1 ? b - radix : -radix; };
  const auto most = [&](std::int64_t q) { return q == c + 1 ? d - radix : q == c ? d : radix; };
  std::vector<Piece> pieces;
  const auto add = [&](std::int64_t from, std::int64_t to) {
    if (from <= to && least(from) <= most(from)) {
      pieces.push_back({from, to, least(from), most(from)});
    }
  };
  if (c + 1 - a < 5) {
    for (std::int64_t q = a; q <= c + 1; ++q) {
      add(q, q);
    }
  } else {
    // Where the end is the multiple itself its neighbour has every dm too.
    const std::int64_t from = a + (b == 0 ? 1 : 2), to = c - (d == radix - 1 ? 0 : 1);
    for (std::int64_t q = a; q < from; ++q) {
      add(q, q);
    }
    pieces.push_back({from, to, -radix, radix});
    for (std::int64_t q = to + 1; q <= c + 1; ++q) {
      add(q, q);
    }
  }
  return pieces;
}

/// Classes that are counted one by one where two moduli have no other common view.
constexpr std::int64_t kFewClasses = 4096;

/// One side of a part: [begin, end) on each axis.
using Side = std::array<std::array<std::int64_t, 2>, kMaxAxes>;

/// Which axes are cut by class: those whose next one has a single difference, so that each class keeps its run whole.
/// Others are cut into head, body and tail. One bit for each axis.
unsigned by_class(const Part& wanted, int axes) {
  unsigned bits = 0;
  for (int k = 0; k + 1 < axes; ++k) {
    const AxisRange &here = wanted[static_cast<std::size_t>(k)], &next = wanted[static_cast<std::size_t>(k + 1)];
    bits |= static_cast<unsigned>(next.low == next.high && here.low != here.high) << k;
  }
  return bits;
}

/// The positions [begin, end) as boxes of digits.
void cut_sides(const View& view, unsigned classes, int axis, std::int64_t begin, std::int64_t end, Side side,
               std::vector<Side>& out) {
  const auto at = static_cast<std::size_t>(axis);
  if (axis + 1 == view.axes) {
    if (begin < end) {
      side[at] = {begin, end};
      out.push_back(side);
    }
    return;
  }
  for (const Piece& piece : cut(begin, end, view.strides[at], (classes >> axis & 1) != 0)) {
    side[at] = {piece.high_begin, piece.high_end};
    cut_sides(view, classes, axis + 1, piece.low_begin, piece.low_end, side, out);
  }
}

/// All pairs of such boxes of a matrix.
std::vector<Part> boxes(const View& view, unsigned classes, std::int64_t rows, std::int64_t cols) {
  std::vector<Side> row_sides, col_sides;
  cut_sides(view, classes, 0, view.row_shift, view.row_shift + rows, {}, row_sides);
  cut_sides(view, classes, 0, view.col_shift, view.col_shift + cols, {}, col_sides);
  std::vector<Part> all;
  for (const Side& r : row_sides) {
    for (const Side& c : col_sides) {
      Part box{};
      for (std::size_t k = 0; k < static_cast<std::size_t>(view.axes); ++k) {
        box[k] = between(r[k][0], r[k][1], c[k][0], c[k][1]);
      }
      all.push_back(box);
    }
  }
  return all;
}

auto key(const AxisRange& a) { return std::tie(a.row_begin, a.col_begin, a.row_end, a.col_end, a.low, a.high); }

/// A part's place in the order that brings together those that may merge along one axis.
struct Slot {
  std::uint64_t others;  ///< equal for parts that are equal on the other axes
  std::int64_t row, col;
  std::size_t part;
  auto operator<=>(const Slot&) const = default;
};

std::uint64_t mixed(std::uint64_t seed, const AxisRange& a) {
  for (const std::int64_t x : {a.row_begin, a.row_end, a.col_begin, a.col_end, a.low, a.high}) {
    seed = (seed ^ static_cast<std::uint64_t>(x)) * 0x9fb21c651e98df25;
    seed ^= seed >> 29;
  }
  return seed;
}

/// Merges along one axis parts that are equal on the others and neighbours in order.
void merge_along(std::vector<Part>& parts, std::size_t axis, std::size_t axes) {
  const auto changes = [](const Part& a, const Part& b) {
    return std::tie(b[0].row_begin, b[0].col_begin) < std::tie(a[0].row_begin, a[0].col_begin) ||
           join(a[0], b[0]).has_value();
  };
  if (axes == 1 && std::adjacent_find(parts.begin(), parts.end(), changes) == parts.end()) {
    return;  // as with documents
  }
  std::vector<Slot> slots(parts.size());
  for (std::size_t n = 0; n < parts.size(); ++n) {
    slots[n] = {0, parts[n][axis].row_begin, parts[n][axis].col_begin, n};
    for (std::size_t k = 0; k < axes; ++k) {
      slots[n].others = k == axis ? slots[n].others : mixed(slots[n].others + k, parts[n][k]);
    }
  }
  if (!std::is_sorted(slots.begin(), slots.end())) {
    std::sort(slots.begin(), slots.end());
  }
  const auto equal_others = [&](const Part& a, const Part& b) {
    bool equal = true;
    for (std::size_t k = 0; k < axes; ++k) {
      equal = equal && (k == axis || a[k] == b[k]);
    }
    return equal;
  };
  const auto joins = [&](const Slot& a, const Slot& b) {
    return a.others == b.others && equal_others(parts[a.part], parts[b.part]) &&
           join(parts[a.part][axis], parts[b.part][axis]).has_value();
  };
  if (std::adjacent_find(slots.begin(), slots.end(), joins) == slots.end()) {
    return;  // as most often: parts are large, and many of them take long to copy
  }
  std::vector<Part> merged;
  reserve(merged, parts.size());
  for (const Slot& slot : slots) {
    const Part& next = parts[slot.part];
    if (!merged.empty() && equal_others(merged.back(), next)) {
      if (const auto both = join(merged.back()[axis], next[axis])) {
        merged.back()[axis] = *both;
        continue;
      }
    }
    merged.push_back(next);
  }
  parts.swap(merged);
}

/// The group's parts counted from other shifts; strides[0] divides the changes.
std::vector<Part> shifted(const PartGroup& group, std::int64_t row_shift, std::int64_t col_shift) {
  const std::int64_t unit = group.view.strides[0];
  const std::int64_t row = (row_shift - group.view.row_shift) / unit, col = (col_shift - group.view.col_shift) / unit;
  std::vector<Part> moved = group.parts;
  for (Part& p : moved) {
    AxisRange& a = p[0];
    a = {a.row_begin + row, a.row_end + row, a.col_begin + col, a.col_end + col, a.low + col - row, a.high + col - row};
  }
  return moved;
}

}  // namespace

void check_parts(const char* op, Wide parts) {
  if (parts > kMostParts) {
    throw Error(op, "pattern", "at most 2^22 parts", "more");
  }
}

std::int64_t floor_div(std::int64_t a, std::int64_t b) { return a / b - (a % b < 0 ? 1 : 0); }
std::int64_t floor_mod(std::int64_t a, std::int64_t b) { return a - floor_div(a, b) * b; }

AxisRange meet(const AxisRange& a, const AxisRange& b) {
  return {std::max(a.row_begin, b.row_begin), std::min(a.row_end, b.row_end), std::max(a.col_begin, b.col_begin),
          std::min(a.col_end, b.col_end),     std::max(a.low, b.low),         std::min(a.high, b.high)};
}

View flat_view(std::int64_t row_shift, std::int64_t col_shift) {
  View view;
  view.row_shift = row_shift;
  view.col_shift = col_shift;
  return view;
}

View residue_view(std::int64_t stride, std::int64_t row_shift, std::int64_t col_shift) {
  View view = flat_view(row_shift, col_shift);
  if (stride > 1) {
    view.axes = 2;
    view.strides = {stride, 1};
  }
  return view;
}

Part part(std::initializer_list<AxisRange> axes) {
  Part p{};
  std::copy(axes.begin(), axes.end(), p.begin());
  return p;
}

void reserve(std::vector<Part>& parts, std::size_t count) {
  parts.reserve(count);
  ask_for_large_pages(parts.data(), count * sizeof(Part));
}

bool tighten(AxisRange& a) {
  a.low = std::max(a.low, a.col_begin - (a.row_end - 1));
  a.high = std::min(a.high, a.col_end - 1 - a.row_begin);
  a.row_begin = std::max(a.row_begin, a.col_begin - a.high);
  a.row_end = std::min(a.row_end, a.col_end - a.low);
  a.col_begin = std::max(a.col_begin, a.row_begin + a.low);
  a.col_end = std::min(a.col_end, a.row_end + a.high);
  return a.row_begin < a.row_end && a.col_begin < a.col_end && a.low <= a.high;
}

bool tighten(Part& part, int axes) {
  for (int k = 0; k < axes; ++k) {
    if (!tighten(part[static_cast<std::size_t>(k)])) {
      return false;
    }
  }
  return true;
}

Wide count(const AxisRange& range) { return pairs_up_to(range, range.high) - pairs_up_to(range, range.low - 1); }

Wide count(const Part& part, int axes) {
  Wide all = 1;
  for (int k = 0; k < axes; ++k) {
    all *= count(part[static_cast<std::size_t>(k)]);
  }
  return all;
}

Wide count(const PartGroup& group) {
  Wide all = 0;
  for (const Part& p : group.parts) {
    all += count(p, group.view.axes);
  }
  return all;
}

std::optional<AxisRange> join(const AxisRange& a, const AxisRange& b) {
  AxisRange both{std::min(a.row_begin, b.row_begin), std::max(a.row_end, b.row_end), std::min(a.col_begin, b.col_begin),
                 std::max(a.col_end, b.col_end),     std::min(a.low, b.low),         std::max(a.high, b.high)};
  // A row that only one of them has must be the same in both: most that do not join are told by their nearest rows.
  const auto differs = [&](const AxisRange& x, std::int64_t row) {
    return std::max(both.col_begin, row + both.low) != std::max(x.col_begin, row + x.low) ||
           std::min(both.col_end, row + both.high + 1) != std::min(x.col_end, row + x.high + 1);
  };
  if (a.row_end <= b.row_begin && (differs(a, a.row_end - 1) || differs(b, b.row_begin))) {
    return std::nullopt;
  }
  if (count(both) != count(a) + count(b)) {
    return std::nullopt;
  }
  return both;
}

std::optional<Part> meet(const Part& a, const Part& b, int axes) {
  Part both{};
  for (int k = 0; k < axes; ++k) {
    const auto at = static_cast<std::size_t>(k);
    both[at] = meet(a[at], b[at]);
    if (!tighten(both[at])) {
      return std::nullopt;
    }
  }
  return both;
}

void subtract(const Part& a, const Part& b, int axes, std::vector<Part>& out) {
  if (!meet(a, b, axes)) {
    out.push_back(a);
    return;
  }
  // One of b's conditions after the other: what fails it goes out, what holds goes on.
  Part rest = a;
  for (int k = 0; k < axes; ++k) {
    const auto at = static_cast<std::size_t>(k);
    const auto fails = [&](AxisRange other) {
      if (Part piece = rest; tighten(other)) {
        piece[at] = other;
        out.push_back(piece);
      }
    };
    AxisRange& r = rest[at];
    const AxisRange& c = b[at];
    const auto each = [&](auto member, std::int64_t end, auto opposite, std::int64_t outside, bool cuts) {
      if (cuts) {
        AxisRange other = r;
        other.*opposite = outside;
        fails(other);
        r.*member = end;
        tighten(r);
      }
    };
    each(&AxisRange::low, c.low, &AxisRange::high, c.low - 1, c.low > r.low);
    each(&AxisRange::high, c.high, &AxisRange::low, c.high + 1, c.high < r.high);
    each(&AxisRange::row_begin, c.row_begin, &AxisRange::row_end, c.row_begin, c.row_begin > r.row_begin);
    each(&AxisRange::row_end, c.row_end, &AxisRange::row_begin, c.row_end, c.row_end < r.row_end);
    each(&AxisRange::col_begin, c.col_begin, &AxisRange::col_end, c.col_begin, c.col_begin > r.col_begin);
    each(&AxisRange::col_end, c.col_end, &AxisRange::col_begin, c.col_end, c.col_end < r.col_end);
  }
}

RowIndex::RowIndex(std::vector<Part> parts) : parts_(std::move(parts)) {
  std::sort(parts_.begin(), parts_.end(), [](const Part& a, const Part& b) { return a[0].row_begin < b[0].row_begin; });
  std::int64_t reached = -kFar;
  for (const Part& p : parts_) {
    reached_.push_back(reached = std::max(reached, p[0].row_end));
  }
}

std::span<const Part> RowIndex::near(const AxisRange& range) const {
  const auto first = std::upper_bound(reached_.begin(), reached_.end(), range.row_begin) - reached_.begin();
  const auto last = std::lower_bound(parts_.begin(), parts_.end(), range.row_end,
                                     [](const Part& p, std::int64_t row) { return p[0].row_begin < row; }) -
                    parts_.begin();
  return std::span(parts_).subspan(static_cast<std::size_t>(std::min(first, last)),
                                   static_cast<std::size_t>(std::max<std::ptrdiff_t>(last - first, 0)));
}

std::vector<Part> subtract(const std::vector<Part>& from, const RowIndex& others, int axes) {
  std::vector<Part> all, left, next;
  for (const Part& part : from) {
    left.assign(1, part);
    for (const Part& other : others.near(part[0])) {
      next.clear();
      for (const Part& p : left) {
        // The others come in the order of their rows: what ends before this one meets none that follows.
        p[0].row_end > other[0].row_begin ? subtract(p, other, axes, next) : all.push_back(p);
      }
      left.swap(next);
    }
    all.insert(all.end(), left.begin(), left.end());
  }
  return all;
}

namespace {

/// A stable sort that moves each part once: they are large.
template <typename Before>
void sort_in_place(std::vector<Part>& parts, const Before& before) {
  std::vector<std::size_t> from(parts.size());  // where the part of each place is now
  std::iota(from.begin(), from.end(), std::size_t{0});
  std::stable_sort(from.begin(), from.end(), [&](std::size_t a, std::size_t b) { return before(parts[a], parts[b]); });
  for (std::size_t first = 0; first < from.size(); ++first) {
    if (from[first] == first) {
      continue;
    }
    const Part held = parts[first];
    std::size_t at = first;
    while (from[at] != first) {  // round the circle of those that follow one another
      parts[at] = parts[from[at]];
      at = std::exchange(from[at], at);
    }
    parts[at] = held;
    from[at] = at;
  }
}

}  // namespace

void merge(std::vector<Part>& parts, int axes) {
  const auto in_order = [](const Part& a, const Part& b) { return key(a[0]) < key(b[0]); };
  // Each axis once more after the last that gained something.
  for (int k = axes - 1, idle = 0; idle < axes && parts.size() > 1; k = (k + axes - 1) % axes) {
    const std::size_t before = parts.size();
    merge_along(parts, static_cast<std::size_t>(k), static_cast<std::size_t>(axes));
    idle = parts.size() < before ? 0 : idle + 1;
  }
  if (!std::is_sorted(parts.begin(), parts.end(), in_order)) {
    sort_in_place(parts, in_order);
  }
}

std::vector<Part> clipped(const View& view, const std::vector<Part>& wanted, std::int64_t rows, std::int64_t cols) {
  std::vector<Part> all, inside;
  reserve(all, wanted.size());
  unsigned classes = ~0U;
  for (const Part& part : wanted) {
    if (const unsigned now = by_class(part, view.axes); now != classes) {
      classes = now;
      inside = boxes(view, classes, rows, cols);
    }
    for (const Part& box : inside) {
      if (const auto both = meet(box, part, view.axes)) {
        all.push_back(*both);
      }
    }
  }
  return all;
}

std::vector<PartGroup> moved(const std::vector<PartGroup>& groups, std::int64_t rows, std::int64_t cols) {
  std::vector<PartGroup> all = groups;
  for (PartGroup& group : all) {
    group.view.row_shift += rows;
    group.view.col_shift += cols;
  }
  return all;
}

PartGroup inside(const PartGroup& group, std::int64_t rows, std::int64_t cols) {
  PartGroup all{group.view, {}};
  std::vector<Part> across;
  for (const Part& p : group.parts) {
    const AxisRange ends = hull(group.view, p);
    const bool whole = ends.row_begin >= 0 && ends.row_end <= rows && ends.col_begin >= 0 && ends.col_end <= cols;
    const bool meets = ends.row_begin < rows && ends.row_end > 0 && ends.col_begin < cols && ends.col_end > 0;
    if (meets) {
      (whole ? all.parts : across).push_back(p);
    }
  }
  const std::vector<Part> cut = clipped(group.view, across, rows, cols);
  all.parts.insert(all.parts.end(), cut.begin(), cut.end());
  fold(all, rows, cols);
  return all;
}

std::vector<std::array<AxisRange, 2>> split(const AxisRange& x, std::int64_t radix) {
  std::vector<std::array<AxisRange, 2>> pairs;
  const auto differences = cut_differences(x.low, x.high, radix);
  const auto cols = cut(x.col_begin, x.col_end, radix, false);
  for (const Piece& r : cut(x.row_begin, x.row_end, radix, false)) {
    for (const Piece& c : cols) {
      for (const Piece& d : differences) {
        std::array pair{AxisRange{r.high_begin, r.high_end, c.high_begin, c.high_end, d.high_begin, d.high_end},
                        AxisRange{r.low_begin, r.low_end, c.low_begin, c.low_end, d.low_begin, d.low_end}};
        if (tighten(pair[0]) && tighten(pair[1])) {
          pairs.push_back(pair);
        }
      }
    }
  }
  return pairs;
}

bool alike(const View& a, const View& b) {
  return a.axes == b.axes && std::equal(a.strides.begin(), a.strides.begin() + a.axes, b.strides.begin()) &&
         (a.row_shift - b.row_shift) % a.strides[0] == 0 && (a.col_shift - b.col_shift) % a.strides[0] == 0;
}

std::optional<View> common_view(const View& a, const View& b) {
  const auto fits = [](const View& from, const View& to) {
    return (from.row_shift - to.row_shift) % from.strides[0] == 0 &&
           (from.col_shift - to.col_shift) % from.strides[0] == 0;
  };
  if (a == b) {
    return a;
  }
  if (!fits(a, b) && !fits(b, a)) {
    return std::nullopt;
  }
  View view = flat_view();
  const View& shifts = fits(a, b) ? b : a;
  view.row_shift = shifts.row_shift;
  view.col_shift = shifts.col_shift;
  std::vector<std::int64_t> strides(a.strides.begin(), a.strides.begin() + a.axes);
  strides.insert(strides.end(), b.strides.begin(), b.strides.begin() + b.axes);
  std::sort(strides.begin(), strides.end(), std::greater<>());
  strides.erase(std::unique(strides.begin(), strides.end()), strides.end());
  const auto chained = [&] {
    for (std::size_t k = 1; k < strides.size(); ++k) {
      if (strides[k - 1] % strides[k] != 0) {
        return false;
      }
    }
    return strides.size() <= kMaxAxes;
  };
  if (a.axes == 2 && b.axes == 2 && !chained() && a.row_shift == b.row_shift && a.col_shift == b.col_shift) {
    // Classes of two moduli are classes of their common multiple, while those are few.
    const std::int64_t period = std::lcm(std::min(a.strides[0], kFewClasses), std::min(b.strides[0], kFewClasses));
    strides = {period, 1};
    if (std::max(a.strides[0], b.strides[0]) >= kFewClasses || period > kFewClasses) {
      return std::nullopt;
    }
  }
  if (!chained()) {
    return std::nullopt;
  }
  view.axes = static_cast<int>(strides.size());
  std::copy(strides.begin(), strides.end(), view.strides.begin());
  return view;
}

namespace {

/// Parts of a group whose strides are all among those of the finer view.
std::vector<Part> split_along(const PartGroup& group, const View& finer) {
  std::vector<Part> now = shifted(group, finer.row_shift, finer.col_shift), next;
  // The axis that ends with a stride of the group is cut again at each of the finer strides above it.
  int old = 0;
  for (int k = 0; k < finer.axes; ++k) {
    const auto at = static_cast<std::size_t>(k);
    const std::int64_t unit = group.view.strides[static_cast<std::size_t>(old)];
    if (finer.strides[at] == unit) {
      ++old;
      continue;
    }
    next.clear();
    for (const Part& p : now) {
      for (const auto& [high, low] : split(p[at], finer.strides[at] / unit)) {
        Part cut{};
        std::copy(p.begin(), p.begin() + k, cut.begin());
        std::copy(p.begin() + k + 1, p.end() - 1, cut.begin() + k + 2);
        cut[at] = high;
        cut[at + 1] = low;
        next.push_back(cut);
      }
    }
    now.swap(next);
  }
  return now;
}

/// The two last digits of a part on strides (period, unit, 1) as one, counted 0 to period.
void fuse(const Part& p, std::int64_t period, std::int64_t unit, std::vector<Part>& out) {
  const auto& [whole, u, m] = std::tie(p[0], p[1], p[2]);
  const std::int64_t turns = period / unit;
  const auto add = [&](AxisRange v) {
    if (tighten(v)) {
      out.push_back(part({whole, v}));
    }
  };
  if (m == AxisRange{0, unit, 0, unit, 0, 0} && u.row_begin == 0 && u.row_end == turns && u.col_begin == 0 &&
      u.col_end == turns) {
    for (std::int64_t d = u.low; d <= u.high; ++d) {  // whole classes: a difference of classes is one of digits
      add({0, period, 0, period, d * unit, d * unit});
    }
    return;
  }
  for (std::int64_t r = u.row_begin; r < u.row_end; ++r) {
    for (std::int64_t c = std::max(u.col_begin, r + u.low); c < std::min(u.col_end, r + u.high + 1); ++c) {
      add({r * unit + m.row_begin, r * unit + m.row_end, c * unit + m.col_begin, c * unit + m.col_end,
           (c - r) * unit + m.low, (c - r) * unit + m.high});
    }
  }
}

}  // namespace

std::vector<Part> refined(const PartGroup& group, const View& finer) {
  const auto end = finer.strides.begin() + finer.axes;
  if (std::find(finer.strides.begin(), end, group.view.strides[0]) != end) {
    return split_along(group, finer);
  }
  // Classes of a divisor: through both moduli, then without the smaller.
  View both = finer;
  both.axes = 3;
  both.strides = {finer.strides[0], group.view.strides[0], 1};
  std::vector<Part> all;
  for (const Part& p : split_along(group, both)) {
    fuse(p, both.strides[0], both.strides[1], all);
    check_parts("union", static_cast<Wide>(all.size()));
  }
  merge(all, finer.axes);
  return all;
}

void fold(PartGroup& group, std::int64_t rows, std::int64_t cols) {
  View& view = group.view;
  while (view.axes > 1 && view.strides[0] >= std::max(rows, cols) && view.strides[0] % view.strides[1] == 0) {
    const std::int64_t turns = view.strides[0] / view.strides[1];
    for (Part& part : group.parts) {
      const std::int64_t row = part[0].row_begin * turns, col = part[0].col_begin * turns;
      AxisRange next = part[1];
      next = {next.row_begin + row, next.row_end + row,   next.col_begin + col,
              next.col_end + col,   next.low + col - row, next.high + col - row};
      std::copy(part.begin() + 2, part.end(), part.begin() + 1);
      part[0] = next;
    }
    std::copy(view.strides.begin() + 1, view.strides.end(), view.strides.begin());
    --view.axes;
  }
}

AxisRange hull(const View& view, const Part& part) {
  const std::int64_t apart = view.row_shift - view.col_shift;
  AxisRange all{-view.row_shift, 1 - view.row_shift, -view.col_shift, 1 - view.col_shift, apart, apart};
  for (std::size_t k = 0; k < static_cast<std::size_t>(view.axes); ++k) {
    const AxisRange& a = part[k];
    const std::int64_t stride = view.strides[k];
    all.row_begin += a.row_begin * stride;
    all.row_end += (a.row_end - 1) * stride;
    all.col_begin += a.col_begin * stride;
    all.col_end += (a.col_end - 1) * stride;
    all.low += a.low * stride;
    all.high += a.high * stride;
  }
  return all;
}

PartGroup transposed(const PartGroup& group) {
  PartGroup turned = group;
  std::swap(turned.view.row_shift, turned.view.col_shift);
  for (Part& p : turned.parts) {
    for (int k = 0; k < group.view.axes; ++k) {
      AxisRange& a = p[static_cast<std::size_t>(k)];
      a = {a.col_begin, a.col_end, a.row_begin, a.row_end, -a.high, -a.low};
    }
  }
  return turned;
}

std::array<std::int64_t, kMaxAxes> digits(const View& view, std::int64_t position) {
  std::array<std::int64_t, kMaxAxes> all{};
  for (std::size_t k = 0; k < static_cast<std::size_t>(view.axes); ++k) {
    all[k] = floor_div(position, view.strides[k]);
    position -= all[k] * view.strides[k];
  }
  return all;
}

bool contains(const PartGroup& group, std::int64_t row, std::int64_t col) {
  const View& view = group.view;
  const auto r = digits(view, row + view.row_shift), c = digits(view, col + view.col_shift);
  return std::any_of(group.parts.begin(), group.parts.end(), [&](const Part& p) {
    for (std::size_t k = 0; k < static_cast<std::size_t>(view.axes); ++k) {
      const AxisRange& a = p[k];
      if (r[k] < a.row_begin || r[k] >= a.row_end || c[k] < a.col_begin || c[k] >= a.col_end || c[k] - r[k] < a.low ||
          c[k] - r[k] > a.high) {
        return false;
      }
    }
    return true;
  });
}

}  // namespace fretwork::parts
