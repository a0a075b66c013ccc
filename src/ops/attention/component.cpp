// Builds the runs of a component from the end points of its parts. On each axis a part meets an interval of column
// intervals, most of them in the same way. A tile pair is a product of such meetings; each distinct product is drawn as
// a mask once.
#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
#include <numeric>
#include <string_view>

#include "ops/attention/tiling.h"

namespace fretwork::attention_op {

namespace {

std::uint64_t pair_of(int a, int b) {
  return static_cast<std::uint64_t>(static_cast<std::uint32_t>(a)) << 32 | static_cast<std::uint32_t>(b);
}

// How a part meets one pair of intervals on one axis, counted from their begins: rows [row_begin, row_end), columns
// [col_begin, col_end), column − row in [low, high]. Ends and bounds that do not matter are the largest there are, so
// that alike meetings are equal.
struct Meeting {
  static constexpr int kEnd = 1023, kLow = -1024, kHigh = 1023;
  int row_begin = 0, row_end = kEnd, col_begin = 0, col_end = kEnd, low = kLow, high = kHigh;

  std::uint64_t pack() const {
    std::uint64_t packed = 0;
    for (const int x : {row_begin, row_end, col_begin, col_end}) {
      packed = packed << 10 | static_cast<std::uint64_t>(x);
    }
    return (packed << 12 | static_cast<std::uint64_t>(low + 1024)) << 12 | static_cast<std::uint64_t>(high + 1024);
  }
  static Meeting unpack(std::uint64_t packed) {
    const auto field = [&](int shift, int bits) { return static_cast<int>(packed >> shift & ((1u << bits) - 1)); };
    return {field(54, 10), field(44, 10), field(34, 10), field(24, 10), field(12, 12) - 1024, field(0, 12) - 1024};
  }
};

/// Column intervals [first, last) that are met in the same way.
struct Reach {
  std::int32_t first, last, meeting;
};

/// Which column intervals the parts meet from each of their row intervals, on one axis.
class Reaches {
 public:
  Reaches(const Cuts& rows, const Cuts& cols, const std::vector<int>& own, Numbers& meetings)
      : rows_(rows), cols_(cols), own_(own), meetings_(meetings) {}
  void reserve(std::size_t parts) {
    parts_.reserve(parts);
    first_.reserve(2 * parts);
    found_.reserve(parts);
  }
  void add(const AxisRange& part) {
    if (!parts_.empty() && part == part_) {  // as of the part before, which is common on a grid
      parts_.push_back(parts_.back());
      return;
    }
    part_ = part;
    const int start = start_ = above(rows_.end, part.row_begin, start_);
    const int stop = above(rows_.begin, part.row_end - 1, start);
    if (start < stop && own_.empty()) {  // the first interval that rows from here on can meet
      first_col_ = above(cols_.end, std::max(part.col_begin, part.row_begin + part.low), first_col_);
    }
    met_ = stop_ = whole_ = broken_ = first_col_;
    // Row intervals inside a box meet the same columns in the same way: one of them stands for all.
    const bool box = own_.empty() && part.low <= part.col_begin - (part.row_end - 1) &&
                     part.high >= part.col_end - 1 - part.row_begin;
    const bool shared = box && stop - start > 3;
    parts_.push_back({start, std::max(start, stop), shared, first_.size()});
    first_.push_back(found_.size());
    for (int i = start; i < stop; i = shared && i == start + 1 ? stop - 1 : i + 1) {
      add(i);
      first_.push_back(found_.size());
    }
  }
  int first_row(int part) const { return parts_[static_cast<std::size_t>(part)].first_row; }
  int last_row(int part) const { return parts_[static_cast<std::size_t>(part)].last_row; }
  std::span<const Reach> of(int part, int row) const {
    const Rows& rows = parts_[static_cast<std::size_t>(part)];
    const int n = !rows.shared ? row - rows.first_row : row == rows.first_row ? 0 : row == rows.last_row - 1 ? 2 : 1;
    const std::size_t at = rows.at + static_cast<std::size_t>(n);
    return std::span(found_).subspan(first_[at], first_[at + 1] - first_[at]);
  }

 private:
  /// A part's row intervals, and where their reaches begin in first_; all but the first and the last may share theirs.
  struct Rows {
    int first_row, last_row;
    bool shared;
    std::size_t at;
  };
  /// The first of x above a value, looked for from a place on: most often parts follow one another.
  static int above(const std::vector<std::int64_t>& x, std::int64_t value, int near) {
    constexpr std::ptrdiff_t kSteps = 4;
    auto at = x.begin() + (near > 0 && x[static_cast<std::size_t>(near - 1)] > value ? 0 : near);
    for (const auto stop = at + std::min(kSteps, x.end() - at); at != stop; ++at) {
      if (*at > value) {
        return static_cast<int>(at - x.begin());
      }
    }
    return static_cast<int>(std::upper_bound(at, x.end(), value) - x.begin());
  }
  void add(int i) {
    const std::int64_t from = rows_.begin[static_cast<std::size_t>(i)], to = rows_.end[static_cast<std::size_t>(i)];
    const std::int64_t first = std::max(from, part_.row_begin), last = std::min(to, part_.row_end) - 1;
    const std::int64_t begin = std::max(part_.col_begin, first + part_.low);
    const std::int64_t end = std::min(part_.col_end, last + part_.high + 1);
    if (first > last || begin >= end) {
      return;
    }
    const int from_col = own_.empty() ? 0 : own_[static_cast<std::size_t>(i)];
    const int to_col = own_.empty() ? cols_.size() : own_[static_cast<std::size_t>(i) + 1];
    const auto after = [&](int& at, const std::vector<std::int64_t>& x, std::int64_t value) {  // the first x > value
      at = std::max(at, from_col);  // it never falls from one row to the next
      while (at < to_col && x[static_cast<std::size_t>(at)] <= value) {
        ++at;
      }
      return at;
    };
    const int met = after(met_, cols_.end, begin), stop = after(stop_, cols_.begin, end - 1);
    // Those that every row of the interval meets wholly.
    const int whole = after(whole_, cols_.begin, std::max(part_.col_begin, last + part_.low) - 1);
    const int broken = after(broken_, cols_.end, std::min(part_.col_end, first + part_.high + 1));
    Meeting rows;
    rows.row_begin = static_cast<int>(first - from);
    rows.row_end = last + 1 == to ? Meeting::kEnd : static_cast<int>(last + 1 - from);
    for (int j = met; j < stop; ++j) {
      if (j >= whole && j < broken) {
        const int until = std::min(stop, broken);
        push(j, until, rows);
        j = until - 1;
      } else {
        push(j, j + 1, meet(rows, first, last, from, j));
      }
    }
  }
  Meeting meet(Meeting made, std::int64_t first, std::int64_t last, std::int64_t from, int j) const {
    const std::int64_t begin = cols_.begin[static_cast<std::size_t>(j)], end = cols_.end[static_cast<std::size_t>(j)];
    const std::int64_t left = std::max(begin, part_.col_begin), right = std::min(end, part_.col_end) - 1;
    made.col_begin = static_cast<int>(left - begin);
    made.col_end = right + 1 == end ? Meeting::kEnd : static_cast<int>(right + 1 - begin);
    if (part_.low > left - last) {
      made.low = static_cast<int>(part_.low + from - begin);
    }
    if (part_.high < right - first) {
      made.high = static_cast<int>(part_.high + from - begin);
    }
    return made;
  }
  void push(int first, int last, const Meeting& meeting) {
    const int number = meetings_.of(meeting.pack());
    if (found_.size() > first_.back() && found_.back().meeting == number && found_.back().last == first) {
      found_.back().last = last;
    } else {
      found_.push_back({first, last, number});
    }
  }

  AxisRange part_{};
  const Cuts& rows_;
  const Cuts& cols_;
  const std::vector<int>& own_;
  Numbers& meetings_;
  int start_ = 0, first_col_ = 0;  ///< of the part before
  int met_ = 0, stop_ = 0, whole_ = 0, broken_ = 0;
  std::vector<Rows> parts_;
  std::vector<std::size_t> first_;
  std::vector<Reach> found_;
};

class Maker {
 public:
  Maker(const Arrangement& arrangement, Plan& plan, Masks& masks)
      : in_(arrangement),
        plan_(plan),
        masks_(masks),
        rows_(make_grid(in_.view, in_.row, in_.run_axis, in_.view.row_shift)),
        cols_(make_grid(in_.view, in_.col, in_.run_axis, in_.view.col_shift)) {
    for (std::size_t k = 0; k < static_cast<std::size_t>(in_.view.axes); ++k) {
      Reaches& axis = reaches_.emplace_back(in_.row.cuts[k], in_.col.cuts[k], in_.col.own[k], meetings_);
      axis.reserve(in_.parts.size());
      for (std::size_t p = 0; p < in_.parts.size(); ++p) {
        axis.add(in_.parts[p][k]);
      }
    }
    same_shape_until();
  }

  Component make(bool cover) {
    Component made;
    made.row_order = rows_.order;
    made.col_order = cols_.order;
    sort_parts();
    std::array<int, kMaxAxes> at{};
    std::vector<bool> met;
    std::vector<std::int64_t> first{0};
    for (std::size_t place = 0; place < rows_.number.size(); ++place) {
      if (const int tile = rows_.number[place]; tile >= 0) {
        collect(place, at);
        met.push_back(!found_.empty());
        emit(rows_.shape[static_cast<std::size_t>(tile)], before(at), made);
        first.push_back(static_cast<std::int64_t>(made.runs.size()));
      }
      advance(at);
    }
    keep_rows(met, first, cover, made);
    keep_cols(made);
    return made;
  }

 private:
  /// Column tiles [first, last) and the pieces of parts that lie on them.
  struct Found {
    std::int32_t first, last, piece;
  };

  /// A row tile done before: what it is like, where its runs are, and what was found for it.
  struct Before {
    int row_shape = -1;
    std::size_t begin = 0, end = 0;
    std::vector<Found> found;
  };
  /// The one at the same place of the line before; on long lines the one before.
  Before& before(const std::array<int, kMaxAxes>& at) {
    const auto run = static_cast<std::size_t>(in_.run_axis);
    const std::size_t place =
        in_.row.cuts[run].size() <= static_cast<int>(kLine) ? static_cast<std::size_t>(at[run]) : 0;
    return before_[place];
  }

  void same_shape_until() {
    const auto n = static_cast<int>(cols_.tiles.size());
    until_.resize(static_cast<std::size_t>(n));
    for (int t = n - 1; t >= 0; --t) {
      const auto u = static_cast<std::size_t>(t);
      until_[u] = t + 1 < n && cols_.shape[u] == cols_.shape[u + 1] ? until_[u + 1] : t + 1;
    }
  }

  /// By the row tiles that they meet.
  void sort_parts() {
    part_end_.resize(rows_.number.size() + 1);
    const auto visit = [&](const auto& act) {
      for (int p = 0; p < static_cast<int>(in_.parts.size()); ++p) {
        each_place(p, 0, 0, act);
      }
    };
    visit([&](std::size_t place, int) { ++part_end_[place + 1]; });
    std::partial_sum(part_end_.begin(), part_end_.end(), part_end_.begin());
    by_place_.resize(part_end_.back());
    visit([&](std::size_t place, int p) { by_place_[part_end_[place]++] = p; });
  }
  /// The places, in the product of the row intervals, of a part.
  template <typename Act>
  void each_place(int part, std::size_t axis, std::int64_t place, const Act& act) const {
    if (axis == reaches_.size()) {
      act(static_cast<std::size_t>(place), part);
      return;
    }
    for (int i = reaches_[axis].first_row(part); i < reaches_[axis].last_row(part); ++i) {
      each_place(part, axis + 1, place + i * rows_.step[axis], act);
    }
  }

  void advance(std::array<int, kMaxAxes>& at) const {
    const auto bump = [&](int k) {
      const auto u = static_cast<std::size_t>(k);
      at[u] = at[u] + 1 == in_.row.cuts[u].size() ? 0 : at[u] + 1;
      return at[u] != 0;
    };
    if (bump(in_.run_axis)) {
      return;
    }
    for (int k = in_.view.axes - 1; k >= 0; --k) {
      if (k != in_.run_axis && bump(k)) {
        return;
      }
    }
  }

  void collect(std::size_t place, const std::array<int, kMaxAxes>& at) {
    found_.clear();
    for (std::size_t n = place > 0 ? part_end_[place - 1] : 0; n < part_end_[place]; ++n) {
      expand(by_place_[n], at, 0, 0, 0);
    }
  }

  /// The products of a part's meetings on the axes from k on; the run axis comes last.
  void expand(int part, const std::array<int, kMaxAxes>& at, int k, std::int64_t place, int piece) {
    if (k == in_.view.axes) {
      for (const Reach& reach : of(part, at, in_.run_axis)) {
        const std::int32_t first = cols_.number[static_cast<std::size_t>(place + reach.first)];
        found_.push_back({first, first + reach.last - reach.first, piece_of(piece, reach.meeting)});
      }
      return;
    }
    if (k == in_.run_axis) {
      expand(part, at, k + 1, place, piece);
      return;
    }
    for (const Reach& reach : of(part, at, k)) {
      const int longer = 1 + piece_of(piece, reach.meeting);
      for (int j = reach.first; j < reach.last; ++j) {
        expand(part, at, k + 1, place + j * cols_.step[static_cast<std::size_t>(k)], longer);
      }
    }
  }
  /// The number of a piece, one meeting longer than another; on a single axis the meeting's own.
  int piece_of(int before, int meeting) { return in_.view.axes == 1 ? meeting : pieces_.of(pair_of(before, meeting)); }
  std::span<const Reach> of(int part, const std::array<int, kMaxAxes>& at, int k) const {
    return reaches_[static_cast<std::size_t>(k)].of(part, at[static_cast<std::size_t>(k)]);
  }

  /// Turns what was found for a row tile into runs: pieces that lie on the same column tiles share their mask.
  void emit(int row_shape, Before& before, Component& made) {
    const auto begin = static_cast<std::ptrdiff_t>(made.runs.size());
    if (repeat(row_shape, before, made)) {
      return;
    }
    before.row_shape = row_shape;
    before.found = found_;
    same_row_ = false;
    const auto earlier = [](const Found& a, const Found& b) { return a.first < b.first; };
    if (!std::is_sorted(found_.begin(), found_.end(), earlier)) {
      std::sort(found_.begin(), found_.end(), earlier);
    }
    std::vector<Found>& live = live_;
    live.clear();
    std::size_t next = 0;
    std::int32_t now = 0;
    while (next < found_.size() || !live.empty()) {
      if (live.empty()) {
        now = found_[next].first;
      }
      while (next < found_.size() && found_[next].first == now) {
        live.push_back(found_[next++]);
      }
      std::int32_t stop = next < found_.size() ? found_[next].first : std::numeric_limits<std::int32_t>::max();
      for (const Found& piece : live) {
        stop = std::min(stop, piece.last);
      }
      add_runs(now, stop, list_of(live), row_shape, made.runs);
      std::erase_if(live, [&](const Found& piece) { return piece.last == stop; });
      now = stop;
    }
    for (auto run = made.runs.begin() + begin; run != made.runs.end(); ++run) {
      made.pairs += run->count;
    }
    std::stable_partition(made.runs.begin() + begin, made.runs.end(), [](const Run& run) { return run.mask >= 0; });
    before.begin = static_cast<std::size_t>(begin);
    before.end = made.runs.size();
  }

  /// Most row tiles meet what one before them meets, further on: then its runs are theirs.
  bool repeat(int row_shape, Before& before, Component& made) {
    if (found_.empty() || row_shape != before.row_shape || found_.size() != before.found.size()) {
      return false;
    }
    const std::int32_t shift = found_[0].first - before.found[0].first;
    const auto moved = [&](const Found& a, const Found& b) {
      return a.first == b.first + shift && a.last == b.last + shift && a.piece == b.piece;
    };
    if (!std::equal(found_.begin(), found_.end(), before.found.begin(), moved)) {
      return false;
    }
    const std::size_t begin = made.runs.size();
    for (std::size_t n = before.begin; n < before.end; ++n) {
      const Run run = made.runs[n];
      const auto was = static_cast<std::size_t>(run.first), is = static_cast<std::size_t>(run.first + shift);
      if (cols_.shape[was] != cols_.shape[is] || until_[was] < run.first + run.count ||
          until_[is] < run.first + shift + run.count) {
        made.runs.resize(begin);
        return false;
      }
      made.runs.push_back({run.first + shift, run.count, run.mask});
    }
    for (std::size_t n = begin; n < made.runs.size(); ++n) {
      made.pairs += made.runs[n].count;
    }
    before.begin = begin;
    before.end = made.runs.size();
    std::swap(before.found, found_);
    return true;
  }

  int list_of(std::vector<Found>& live) {
    std::sort(live.begin(), live.end(), [](const Found& a, const Found& b) { return a.piece < b.piece; });
    int list = 0;
    for (const Found& piece : live) {
      list = 1 + lists_.of(pair_of(list, piece.piece));
    }
    return list;
  }

  void add_runs(std::int32_t first, std::int32_t last, int list, int row_shape, std::vector<Run>& runs) {
    while (first < last) {
      const std::int32_t stop = std::min(last, until_[static_cast<std::size_t>(first)]);
      const int mask = mask_of(list, row_shape, cols_.shape[static_cast<std::size_t>(first)]);
      if (!runs.empty() && same_row_ && runs.back().mask == mask && runs.back().first + runs.back().count == first) {
        runs.back().count += stop - first;
      } else {
        runs.push_back({first, stop - first, mask});
      }
      same_row_ = true;
      first = stop;
    }
  }

  int mask_of(int list, int row_shape, int col_shape) {
    const int shapes = row_shape * static_cast<int>(cols_.shapes.size()) + col_shape;
    const int known = mask_keys_.of(pair_of(list, shapes));
    if (known == static_cast<int>(mask_index_.size())) {
      mask_index_.push_back(draw(list, row_shape, cols_.shapes[static_cast<std::size_t>(col_shape)]));
    }
    return mask_index_[static_cast<std::size_t>(known)];
  }

  /// The axes of a tile, outermost first, padded with axes of length one.
  std::array<int, kTileAxes> tile_axes(const Side& side) const {
    std::array<int, kTileAxes> axes{-1, -1, -1};
    int at = kTileAxes;
    for (int k = in_.view.axes - 1; k >= 0; --k) {
      if (side.extent[static_cast<std::size_t>(k)] > 1) {
        axes[static_cast<std::size_t>(--at)] = k;
      }
    }
    return axes;
  }

  // Inlined, it would take the registers of the loops that call it now and then.
  [[gnu::noinline]] int draw(int list, int row_shape, const Inside& col) {
    const Inside& row = rows_.shapes[static_cast<std::size_t>(row_shape)];
    canvas_.clear(plan_.shape, cols_.order.extent[1] > 1);
    for (; list != 0; list = static_cast<int>(lists_.value(list - 1) >> 32)) {
      std::array<Meeting, kMaxAxes> met;
      int piece = static_cast<int>(lists_.value(list - 1) & 0xFFFFFFFFu) + 1;
      const auto take = [&](int k) {
        const std::uint64_t pair =
            in_.view.axes == 1 ? static_cast<std::uint64_t>(piece - 1) : pieces_.value(piece - 1);
        met[static_cast<std::size_t>(k)] = Meeting::unpack(meetings_.value(static_cast<int>(pair & 0xFFFFFFFFu)));
        piece = static_cast<int>(pair >> 32);
      };
      take(in_.run_axis);
      for (int k = in_.view.axes - 1; k >= 0; --k) {
        if (k != in_.run_axis) {
          take(k);
        }
      }
      draw_piece(met, row, col);
    }
    int prefix = 1;  // columns that are inside without a gap: counted from the innermost axis on, while it is whole
    bool whole = true;
    for (int k = in_.view.axes - 1; k >= 0 && whole; --k) {
      const auto u = static_cast<std::size_t>(k);
      if (in_.col.extent[u] > 1) {
        prefix *= col.end[u] - col.begin[u];
        whole = col.end[u] - col.begin[u] == in_.col.extent[u];
      }
    }
    return masks_.add(canvas_, inside_rows(row_shape), prefix);
  }

  /// The places of a row tile that are inside.
  const std::vector<bool>& inside_rows(int row_shape) {
    inside_.resize(rows_.shapes.size());
    std::vector<bool>& inside = inside_[static_cast<std::size_t>(row_shape)];
    if (inside.empty()) {
      inside.resize(static_cast<std::size_t>(plan_.shape.rows));
      each_line(rows_.shapes[static_cast<std::size_t>(row_shape)],
                [&](int m, int count, const std::array<int, kMaxAxes>&) {
                  std::fill(inside.begin() + m, inside.begin() + m + count, true);
                });
    }
    return inside;
  }

  void draw_piece(const std::array<Meeting, kMaxAxes>& met, const Inside& row, const Inside& col) {
    each_line(row,
              [&](int m, int count, const std::array<int, kMaxAxes>& digit) { draw_line(met, digit, m, count, col); });
  }

  /// The lines of a row tile's places that are inside: neighbours on its innermost axis, and the first one's digits.
  template <typename Act>
  void each_line(const Inside& row, const Act& act) const {
    const std::array<int, kTileAxes> axes = tile_axes(in_.row);
    std::array<int, kTileAxes> end{1, 1, 1};
    std::array<int, kMaxAxes> digit{};
    for (std::size_t n = 0; n < kTileAxes; ++n) {
      if (axes[n] >= 0) {
        const auto k = static_cast<std::size_t>(axes[n]);
        digit[k] = row.begin[k];
        end[n] = row.end[k] - row.begin[k];
      }
    }
    std::array<int, 2> at{};
    for (at[0] = 0; at[0] < end[0]; ++at[0]) {
      for (at[1] = 0; at[1] < end[1]; ++at[1]) {
        for (std::size_t n = 0; n < 2; ++n) {
          if (axes[n] >= 0) {
            const auto k = static_cast<std::size_t>(axes[n]);
            digit[k] = row.begin[k] + at[n];
          }
        }
        act((at[0] * rows_.order.extent[1] + at[1]) * rows_.order.extent[2], end[2], digit);
      }
    }
  }

  /// The columns of an axis that a row meets, of those of [from, to) and counted from there on.
  struct Met {
    int begin, end, low, high;
    Met(const Meeting& m, int from, int to)
        : begin(std::max(m.col_begin - from, 0)),
          end(std::min(m.col_end, to) - from),
          low(m.low == Meeting::kLow ? -(1 << 20) : m.low - from),
          high(m.high == Meeting::kHigh ? 1 << 20 : m.high - from) {}
    int first(int digit) const { return std::max(begin, digit + low); }
    int last(int digit) const { return std::min(end, digit + high + 1); }
  };

  /// `count` rows along the tile's innermost axis, from these digits and row m on.
  void draw_line(const std::array<Meeting, kMaxAxes>& met, const std::array<int, kMaxAxes>& digit, int m, int count,
                 const Inside& col) {
    const int own = tile_axes(in_.row)[kTileAxes - 1];
    std::array<int, kTileAxes + 1> begin{}, end{1, 1, 1, 1};  // of a row's columns; the last for axes not in the tile
    std::size_t along = kTileAxes, at = kTileAxes;            // the place of the own axis among those
    for (int k = in_.view.axes - 1; k >= 0; --k) {
      const auto u = static_cast<std::size_t>(k);
      const std::size_t here = in_.col.extent[u] > 1 ? --at : kTileAxes;
      const Met now(met[u], col.begin[u], col.end[u]);
      begin[here] = k == own ? 0 : now.first(digit[u]);
      end[here] = k == own ? in_.col.extent[u] : now.last(digit[u]);
      along = k == own ? here : along;
      const bool meets = digit[u] >= met[u].row_begin && digit[u] < met[u].row_end && begin[here] < end[here];
      if (k != own && !meets) {
        return;
      }
    }
    const auto u = static_cast<std::size_t>(std::max(own, 0));
    const Meeting line = own >= 0 ? met[u] : Meeting{};
    const Met now(line, own >= 0 ? col.begin[u] : 0, own >= 0 ? col.end[u] : 1);
    const int from = std::max(0, line.row_begin - digit[u]), to = std::min(count, line.row_end - digit[u]);
    for (int a = begin[0]; a < end[0]; ++a) {
      for (int b = begin[1]; b < end[1]; ++b) {
        const int place = (a * cols_.order.extent[1] + b) * cols_.order.extent[2];
        if (along == kTileAxes - 1) {
          const int first = place + digit[u] + from;
          canvas_.add(m + from, to - from, place + now.begin, place + now.end, first + now.low, first + now.high + 1);
          continue;
        }
        const int on_own = along == 0 ? a : along == 1 ? b : 0;
        for (int n = from; n < to; ++n) {
          if (now.first(digit[u] + n) <= on_own && on_own < now.last(digit[u] + n)) {
            canvas_.add(m + n, place + begin[2], place + end[2]);
          }
        }
      }
    }
  }

  static std::int64_t places(const std::vector<Tile>& tiles) {
    return std::accumulate(tiles.begin(), tiles.end(), std::int64_t{0}, [](std::int64_t sum, const Tile& tile) {
      return sum + std::int64_t{tile.count[0]} * tile.count[1] * tile.count[2];
    });
  }

  void keep_rows(const std::vector<bool>& met, std::vector<std::int64_t>& first, bool cover, Component& made) {
    const auto used = static_cast<std::size_t>(std::count(met.begin(), met.end(), true));
    const bool all = used == met.size() || (cover && met.size() - used <= 4 + used / 4);
    made.covers_rows = all && places(rows_.tiles) == plan_.rows;
    if (all) {
      made.row_tiles = std::move(rows_.tiles);
      made.first = std::move(first);
      return;
    }
    made.first = {0};
    for (std::size_t t = 0; t < met.size(); ++t) {
      if (met[t]) {
        made.row_tiles.push_back(rows_.tiles[t]);
        made.first.push_back(first[t + 1]);
      }
    }
  }

  /// Leaves out column tiles that no run has.
  void keep_cols(Component& made) {
    std::vector<std::int32_t> change(cols_.tiles.size() + 1);
    for (const Run& run : made.runs) {
      ++change[static_cast<std::size_t>(run.first)];
      --change[static_cast<std::size_t>(run.first + run.count)];
    }
    std::int32_t open = 0, kept = 0;
    for (std::size_t t = 0; t < cols_.tiles.size(); ++t) {
      open += change[t];
      change[t] = kept;
      if (open > 0) {
        cols_.tiles[static_cast<std::size_t>(kept++)] = cols_.tiles[t];
      }
    }
    cols_.tiles.resize(static_cast<std::size_t>(kept));
    made.col_tiles = std::move(cols_.tiles);
    if (made.col_tiles.size() * 2 < made.col_tiles.capacity()) {
      made.col_tiles.shrink_to_fit();
    }
    for (Run& run : made.runs) {
      run.first = change[static_cast<std::size_t>(run.first)];
    }
  }

  const Arrangement& in_;
  Plan& plan_;
  Masks& masks_;
  Grid rows_, cols_;
  Numbers meetings_, pieces_, lists_, mask_keys_;
  std::vector<int> mask_index_;
  std::vector<Reaches> reaches_;       ///< by axis
  std::vector<std::int32_t> until_;    ///< the first tile after this one that has another shape
  std::vector<std::size_t> part_end_;  ///< parts that meet a row tile: those of by_place_ up to here
  std::vector<int> by_place_;
  bool same_row_ = false;
  std::vector<Found> found_, live_;
  static constexpr std::size_t kLine = 256;
  std::array<Before, kLine> before_;  ///< by place on a line of row tiles
  Canvas canvas_;
  std::vector<std::vector<bool>> inside_;  ///< by shape of rows
};

}  // namespace

Component make_component(const Arrangement& arrangement, Plan& plan, Masks& masks, bool cover) {
  return Maker(arrangement, plan, masks).make(cover);
}

}  // namespace fretwork::attention_op
