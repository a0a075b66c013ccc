// Regular patterns: what they say of themselves, and how they unite, meet and turn.
#include <algorithm>
#include <iterator>
#include <limits>
#include <map>
#include <numeric>

#include "fretwork/error.h"
#include "fretwork/tensor.h"
#include "pattern/regular_maker.h"
#include "pattern/text.h"

namespace fretwork {
namespace {

using parts::count;
using parts::meet;
using parts::Run;
using parts::Wide;
using Groups = std::vector<PartGroup>;

/// Where views do not agree, at most so many elements are listed.
constexpr Wide kMostListed = Wide{1} << 28;

/// The elements of a group for which keep(row, col) holds, as flat parts.
template <typename Keep>
PartGroup listed(const char* op, const PartGroup& group, const Keep& keep) {
  if (count(group) > kMostListed) {
    throw Error(
        op, "patterns",
        "views whose strides divide each other (they are then compared by their ends), or at most 2^28 elements "
        "to compare one by one",
        std::to_string(static_cast<std::int64_t>(count(group))) + " elements");
  }
  std::vector<Run> runs;
  for (const Part& part : group.parts) {
    parts::for_each_row(group.view, part, [&](std::int64_t row, const parts::Columns& columns) {
      const auto down = [&](const auto& self, std::size_t axis, std::int64_t first) -> void {
        if (axis < kMaxAxes) {
          for (std::int64_t n = 0; n < columns.extent[axis]; ++n) {
            self(self, axis + 1, first + n * columns.stride[axis]);
          }
        } else if (keep(row, first)) {
          if (!runs.empty() && runs.back().row == row && runs.back().end == first) {
            ++runs.back().end;
          } else {
            runs.push_back({row, first, first + 1});
          }
        }
      };
      down(down, 0, columns.first);
    });
    if (runs.size() > parts::kMostRuns) {
      throw Error(op, "patterns", "views whose strides divide each other, or at most 2^25 runs of elements", "more");
    }
  }
  std::sort(runs.begin(), runs.end(),
            [](const Run& a, const Run& b) { return std::tie(a.row, a.begin) < std::tie(b.row, b.begin); });
  return {parts::flat_view(), parts::from_runs(runs)};
}

/// The parts of a group that come near one of `other`, by their outer ends.
PartGroup near(const PartGroup& group, const PartGroup& other) {
  const auto hulls = [](const PartGroup& of) {
    std::vector<Part> all;
    for (const Part& p : of.parts) {
      all.push_back(parts::part({parts::hull(of.view, p)}));
    }
    return all;
  };
  PartGroup some{group.view, {}};
  const parts::RowIndex index(hulls(other));
  for (const Part& p : group.parts) {
    const Part mine = parts::part({parts::hull(group.view, p)});
    const auto around = index.near(mine[0]);
    if (std::any_of(around.begin(), around.end(), [&](const Part& q) { return meet(mine, q, 1).has_value(); })) {
      some.parts.push_back(p);
    }
  }
  return some;
}

/// What `group` has and `others` have not.
PartGroup difference(PartGroup group, const Groups& others) {
  for (const PartGroup& all : others) {
    const PartGroup other = near(all, group);
    if (other.parts.empty()) {
      continue;
    }
    if (const auto view = parts::common_view(group.view, other.view)) {
      std::vector<Part> gone = parts::refined(other, *view);
      parts::merge(gone, view->axes);  // of many windows, cut alike, a few: each would cut all that is left once more
      const parts::RowIndex away(std::move(gone));
      const std::vector<Part> refined = parts::refined(group, *view);
      // Where nothing is shared the coarser form stays.
      const bool touched = std::any_of(refined.begin(), refined.end(), [&](const Part& a) {
        const auto near = away.near(a[0]);
        return std::any_of(near.begin(), near.end(), [&](const Part& b) { return meet(a, b, view->axes).has_value(); });
      });
      if (touched) {
        group = {*view, parts::subtract(refined, away, view->axes)};
        parts::merge(group.parts, view->axes);
        parts::check_parts("union", static_cast<Wide>(group.parts.size()));
      }
    } else {
      group = listed("union", group, [&](std::int64_t i, std::int64_t j) { return !parts::contains(other, i, j); });
    }
  }
  return group;
}

/// What two groups share.
PartGroup shared(const PartGroup& left, const PartGroup& right) {
  const PartGroup a = near(left, right), b = near(right, a);
  const auto view = parts::common_view(a.view, b.view);
  if (!view) {
    const bool first = count(a) <= count(b);
    return listed("intersection", first ? a : b,
                  [&](std::int64_t i, std::int64_t j) { return parts::contains(first ? b : a, i, j); });
  }
  PartGroup both{*view, {}};
  const parts::RowIndex others(parts::refined(b, *view));
  for (const Part& p : parts::refined(a, *view)) {
    for (const Part& q : others.near(p[0])) {
      if (const auto common = meet(p, q, view->axes)) {
        both.parts.push_back(*common);
      }
    }
    parts::check_parts("intersection", static_cast<Wide>(both.parts.size()));
  }
  return both;
}

/// What `symbol` joins in a text, as it stands in a canonical one. An intersection's operands that are unions stand in
/// brackets already; a whole union needs them.
std::vector<std::string> joined_by(const std::string& text, char symbol) {
  return symbol == '&' && text::operands(text, '|').size() > 1 ? std::vector{"(" + text + ")"}
                                                               : text::operands(text, symbol);
}

/// The operands of the canonical text of a|b or a&b: each once, in the order of their texts.
std::vector<std::string> in_order(std::vector<std::string> all, const std::vector<std::string>& more) {
  all.insert(all.end(), more.begin(), more.end());
  std::sort(all.begin(), all.end());
  all.erase(std::unique(all.begin(), all.end()), all.end());
  return all;
}

/// What a turned pattern was turned from; empty for others.
std::string turned_from(const std::string& text) {
  if (text::is_compound(text) || !text.ends_with(".T")) {
    return {};
  }
  const std::string inner = text.substr(0, text.size() - 2);
  return inner.front() == '(' && inner.back() == ')' ? inner.substr(1, inner.size() - 2) : inner;
}

/// Equal patterns have equal parts: operands are combined in the order of the text, whatever they came in.
template <typename Combine>
RegularPtr combined(const char* op, const PatternPtr& left, const PatternPtr& right, char symbol,
                    const Combine& combine) {
  const RegularPtr a = as_regular(op, left), b = as_regular(op, right);
  if (a->rows() != b->rows() || a->cols() != b->cols()) {
    throw Error(op, "patterns", "equal shapes", shape_text(a->shape()) + " and " + shape_text(b->shape()));
  }
  const auto of_a = joined_by(a->text(), symbol), of_b = joined_by(b->text(), symbol), all = in_order(of_a, of_b);
  if (all == of_a || all == of_b) {
    return all == of_a ? a : b;
  }
  const auto begins_with = [&](const std::vector<std::string>& some) {
    return some.size() + 1 == all.size() && std::equal(some.begin(), some.end(), all.begin());
  };
  const auto operand = [&](std::size_t n) {
    return all[n] == of_a.front() && of_a.size() == 1   ? a
           : all[n] == of_b.front() && of_b.size() == 1 ? b
                                                        : as_regular(op, parse_pattern(all[n]));
  };
  const bool from_a = begins_with(of_a), from_b = begins_with(of_b);
  RegularPtr made = from_a ? a : from_b ? b : operand(0);
  std::string text = all[0];
  for (std::size_t n = 1; n < all.size(); ++n) {
    text += symbol + all[n];
    if (n + 1 == all.size() || !(from_a || from_b)) {
      made = RegularMaker::make(text, a->rows(), a->cols(), combine(made->groups(), operand(n)->groups()));
    }
  }
  return made;
}

/// A chain of | or &, folded from the left.
template <typename Combine>
PatternPtr folded(const text::Call& call, const Combine& combine) {
  PatternPtr all;
  for (const text::Value& value : call.arguments) {
    const auto* one = std::get_if<text::Call>(&value.is);
    if (one == nullptr || !call.keywords.empty()) {
      throw Error(call.name, "arguments", "patterns", "something else");
    }
    const PatternPtr next = text::make(*one);
    all = all ? PatternPtr(combine(all, next)) : next;
  }
  if (!all) {
    throw Error(call.name, "arguments", "at least one pattern", "none");
  }
  return all;
}

const text::Family kUnion{"union", [](const text::Call& call) { return folded(call, patterns::unite); }};
const text::Family kIntersection{"intersection",
                                 [](const text::Call& call) { return folded(call, patterns::intersect); }};
const text::Family kTranspose{"transpose", [](const text::Call& call) {
                                text::expect_arguments(call, 1, "a pattern");
                                return folded(call, patterns::unite)->transpose();
                              }};

}  // namespace

RegularPattern::RegularPattern() = default;
RegularPattern::~RegularPattern() = default;

RegularPtr RegularMaker::make(std::string text, std::int64_t rows, std::int64_t cols, Groups groups) {
  const std::shared_ptr<RegularPattern> made(new RegularPattern);
  made->shape_ = {rows, cols};
  Groups& all = made->groups_;
  for (PartGroup& group : groups) {
    // Views whose shifts are whole turns apart are one, plain order wherever it is counted from.
    const auto same =
        std::find_if(all.begin(), all.end(), [&](const PartGroup& g) { return parts::alike(g.view, group.view); });
    if (same != all.end()) {
      group = {same->view, parts::refined(group, same->view)};
      same->parts.insert(same->parts.end(), group.parts.begin(), group.parts.end());
    } else if (!group.parts.empty()) {
      all.push_back(std::move(group));
    }
  }
  Wide nnz = 0;
  for (PartGroup& group : all) {
    parts::merge(group.parts, group.view.axes);
    nnz += count(group);
  }
  made->nnz_ = static_cast<std::int64_t>(nnz);
  made->name(std::move(text));
  return made;
}

double RegularPattern::density() const {
  const double all = static_cast<double>(rows()) * static_cast<double>(cols());
  return all > 0 ? static_cast<double>(nnz_) / all : 0.0;
}

PatternPtr RegularPattern::transpose() const {
  if (const std::string before = turned_from(text()); !before.empty()) {
    return parse_pattern(before);
  }
  if (const auto before = text::sliced_from(text())) {  // a slice stays the outermost
    const auto& [row, col] = before->at;
    return patterns::slice(parse_pattern(before->pattern)->transpose(), {col, col + cols()}, {row, row + rows()});
  }
  Groups turned;
  for (const PartGroup& group : groups_) {
    turned.push_back(parts::transposed(group));
  }
  return RegularMaker::make(text::bracketed(text()) + ".T", cols(), rows(), std::move(turned));
}

bool RegularPattern::contains(std::int64_t row, std::int64_t col) const {
  return std::any_of(groups_.begin(), groups_.end(),
                     [&](const PartGroup& group) { return parts::contains(group, row, col); });
}

namespace {

/// Calls visit(row, column) for every element of a group.
template <typename Visit>
void for_each_element(const PartGroup& group, const Visit& visit) {
  for (const Part& part : group.parts) {
    parts::for_each_row(group.view, part, [&](std::int64_t row, const parts::Columns& columns) {
      const auto down = [&](const auto& self, std::size_t axis, std::int64_t at) -> void {
        if (axis == kMaxAxes) {
          visit(row, at);
          return;
        }
        for (std::int64_t n = 0; n < columns.extent[axis]; ++n) {
          self(self, axis + 1, at + n * columns.stride[axis]);
        }
      };
      down(down, 0, columns.first);
    });
  }
}

}  // namespace

void RegularPattern::mask(std::span<std::uint8_t> out) const {
  clear(out);
  for (const PartGroup& group : groups_) {
    for_each_element(
        group, [&](std::int64_t row, std::int64_t col) { out[static_cast<std::size_t>(row * cols() + col)] = 1; });
  }
}

RegularPattern::Entries RegularPattern::entries() const {
  if (cols() > std::numeric_limits<std::int32_t>::max()) {
    throw Error("entries", "pattern", "fewer than 2^31 columns", std::to_string(cols()));
  }
  Entries all{{0}, std::vector<std::int32_t>(static_cast<std::size_t>(nnz()))};
  const std::vector<std::int64_t> lengths = row_lengths();
  std::partial_sum(lengths.begin(), lengths.end(), std::back_inserter(all.first));
  std::vector<std::int64_t> next(all.first.begin(), all.first.end() - 1);
  for (const PartGroup& group : groups_) {
    for_each_element(group, [&](std::int64_t row, std::int64_t col) {
      all.columns[static_cast<std::size_t>(next[static_cast<std::size_t>(row)]++)] = static_cast<std::int32_t>(col);
    });
  }
  for (std::size_t i = 0; i < lengths.size(); ++i) {
    const auto begin = all.columns.begin() + all.first[i], end = all.columns.begin() + all.first[i + 1];
    if (!std::is_sorted(begin, end)) {
      std::sort(begin, end);
    }
  }
  return all;
}

std::vector<RegularPattern::Progression> RegularPattern::acsr() const {
  // A set of n columns is one progression iff its span is (n − 1) times the common divisor of all differences.
  struct Row {
    std::int64_t first = 0, last = 0, count = 0, divisor = 0;
  };
  std::vector<Row> all(static_cast<std::size_t>(rows()));
  for (const PartGroup& group : groups_) {
    for (const Part& part : group.parts) {
      parts::for_each_row(group.view, part, [&](std::int64_t i, const parts::Columns& columns) {
        std::int64_t count = 1, last = columns.first, divisor = 0;
        for (std::size_t k = 0; k < kMaxAxes; ++k) {
          count *= columns.extent[k];
          last += (columns.extent[k] - 1) * columns.stride[k];
          divisor = columns.extent[k] > 1 ? std::gcd(divisor, columns.stride[k]) : divisor;
        }
        Row& row = all[static_cast<std::size_t>(i)];
        if (row.count == 0) {
          row = {columns.first, last, count, divisor};
          return;
        }
        row.divisor = std::gcd(std::gcd(row.divisor, divisor), columns.first - row.first);
        row = {std::min(row.first, columns.first), std::max(row.last, last), row.count + count, row.divisor};
      });
    }
  }
  std::vector<Progression> progressions;
  progressions.reserve(all.size());
  for (const Row& row : all) {
    const std::int64_t stride = std::max<std::int64_t>(row.divisor, 1);
    if (row.count > 0 && row.last - row.first != (row.count - 1) * stride) {
      throw Error("acsr", "pattern", "rows that are one progression each",
                  "row " + std::to_string(progressions.size()) + ", whose " + std::to_string(row.count) +
                      " columns are not one");
    }
    progressions.push_back({row.first, stride, row.count});
  }
  return progressions;
}

std::vector<std::int64_t> RegularPattern::row_lengths() const {
  std::vector<std::int64_t> lengths(static_cast<std::size_t>(rows()));
  for (const PartGroup& group : groups_) {
    for (const Part& part : group.parts) {
      parts::for_each_row(group.view, part, [&](std::int64_t row, const parts::Columns& columns) {
        lengths[static_cast<std::size_t>(row)] +=
            std::accumulate(columns.extent.begin(), columns.extent.end(), std::int64_t{1}, std::multiplies<>{});
      });
    }
  }
  return lengths;
}

std::vector<std::array<std::int64_t, 2>> RegularPattern::row(std::int64_t row) const {
  std::vector<std::array<std::int64_t, 2>> all, joined;
  const PartGroup one{parts::flat_view(), {parts::part({{row, row + 1, 0, cols(), -parts::kFar, parts::kFar}})}};
  for (const PartGroup& group : groups_) {
    const PartGroup some = near(group, one);
    for (const Part& part : some.parts) {
      parts::for_each_run(some.view, part, row, [&](std::int64_t begin, std::int64_t end) {
        all.push_back({begin, end});
      });
    }
  }
  std::sort(all.begin(), all.end());
  for (const auto& run : all) {
    if (!joined.empty() && joined.back()[1] == run[0]) {
      joined.back()[1] = run[1];
    } else {
      joined.push_back(run);
    }
  }
  return joined;
}

RegularPtr patterns::unite(const PatternPtr& a, const PatternPtr& b) {
  return combined("union", a, b, '|', parts::unite);
}

RegularPtr patterns::intersect(const PatternPtr& a, const PatternPtr& b) {
  return combined("intersection", a, b, '&', parts::intersect);
}

RegularPtr as_regular(const char* op, const PatternPtr& pattern) {
  if (auto regular = std::dynamic_pointer_cast<const RegularPattern>(pattern)) {
    return regular;
  }
  if (const auto layout = std::dynamic_pointer_cast<const BlockLayout>(pattern)) {
    if (layout->heads() != 1) {
      throw Error(op, "pattern", "a layout of one head", std::to_string(layout->heads()));
    }
    return patterns::from_layout(layout);
  }
  if (const auto kronecker = std::dynamic_pointer_cast<const KroneckerPattern>(pattern)) {
    return patterns::from_kronecker(kronecker);
  }
  throw Error(op, "pattern", "a regular pattern, a block layout or a Kronecker pattern",
              pattern ? pattern->text() : "nothing");
}

/// Dense things stay whole and strided ones give way: fewer axes first, then smaller strides, then more elements.
Groups parts::unite(const Groups& a, const Groups& b) {
  struct Source {
    PartGroup group;
    bool second;
  };
  std::vector<Source> sources;
  for (const PartGroup& group : a) {
    sources.push_back({group, false});
  }
  for (const PartGroup& group : b) {
    sources.push_back({group, true});
  }
  std::stable_sort(sources.begin(), sources.end(), [](const Source& x, const Source& y) {
    const View &v = x.group.view, &w = y.group.view;
    return v.axes != w.axes               ? v.axes < w.axes
           : v.strides[0] != w.strides[0] ? v.strides[0] < w.strides[0]
                                          : count(x.group) > count(y.group);
  });
  Groups taken[2], all;
  for (Source& source : sources) {
    PartGroup left = difference(std::move(source.group), taken[source.second ? 0 : 1]);
    taken[source.second ? 1 : 0].push_back(left);
    all.push_back(std::move(left));
  }
  return all;
}

Groups parts::intersect(const Groups& a, const Groups& b) {
  Groups all;
  for (const PartGroup& x : a) {
    for (const PartGroup& y : b) {
      all.push_back(shared(x, y));
    }
  }
  return all;
}

std::vector<Part> parts::from_runs(const std::vector<Run>& runs) {
  std::vector<Part> all;
  std::vector<std::size_t> open, now;  // parts that the row before, and this one, touched, by column
  std::int64_t last_row = -1;
  std::size_t next = 0;
  for (const Run& run : runs) {
    if (run.row != last_row) {
      open = run.row == last_row + 1 ? std::move(now) : std::vector<std::size_t>{};
      now.clear();
      next = 0;
      last_row = run.row;
    }
    AxisRange row{run.row, run.row + 1, run.begin, run.end, run.begin - run.row, run.end - 1 - run.row};
    // The first part of the row before that this run continues; what ended left of it can serve no later run.
    bool grown = false;
    for (std::size_t n = next; n < open.size() && !grown; ++n) {
      AxisRange& part = all[open[n]][0];
      const std::int64_t begin = std::max(part.col_begin, run.row - 1 + part.low);
      const std::int64_t end = std::min(part.col_end, run.row + part.high);
      if (begin > run.end) {
        break;
      }
      if (end < run.begin - 1) {
        continue;
      }
      if (const auto both = join(part, row)) {
        part = *both;
        now.push_back(open[n]);
        next = n + 1;
        grown = true;
      }
    }
    if (!grown) {
      now.push_back(all.size());
      all.push_back(parts::part({row}));
    }
  }
  return all;
}

}  // namespace fretwork
