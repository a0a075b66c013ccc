// Pieces of patterns: slices, and patterns put into larger ones. Parts move with the places they are counted from.
#include "fretwork/tensor.h"
#include "pattern/regular_text.h"

namespace fretwork::patterns {
namespace {

using parts::between;
using parts::part;
using text::Call;
using text::Family;
using Groups = std::vector<PartGroup>;

Span read_span(const Call& call, std::size_t position, const char* argument, std::int64_t length) {
  const auto end = [&](std::size_t at, std::int64_t otherwise) {
    const std::int64_t given = read_or(call, at, argument, otherwise);
    return std::clamp<std::int64_t>(given < 0 ? given + length : given, 0, length);  // as Python counts
  };
  const std::int64_t begin = end(position, 0);
  return {begin, std::max(begin, end(position + 1, length))};
}

void check_span(const char* argument, const Span& span, std::int64_t length) {
  if (span.begin < 0 || span.begin > span.end || span.end > length) {
    throw Error("slice", argument, "[begin, end) within 0 to " + std::to_string(length),
                "[" + std::to_string(span.begin) + ", " + std::to_string(span.end) + ")");
  }
}

std::string colon(const Span& span) { return std::to_string(span.begin) + ":" + std::to_string(span.end); }

}  // namespace

RegularPtr slice(const PatternPtr& pattern, Span rows, Span cols) {
  const RegularPtr whole = as_regular("slice", pattern);
  check_span("rows", rows, whole->rows());
  check_span("cols", cols, whole->cols());
  if (rows.length() == whole->rows() && cols.length() == whole->cols()) {
    return whole;
  }
  if (const auto before = text::sliced_from(whole->text())) {  // a slice of a slice is one
    const RegularPtr first = as_regular("slice", parse_pattern(before->pattern));
    const auto& [r, c] = before->at;
    return slice(first, {rows.begin + r, rows.end + r}, {cols.begin + c, cols.end + c});
  }
  Groups all = parts::moved(whole->groups(), rows.begin, cols.begin);
  for (PartGroup& group : all) {
    group = parts::inside(group, rows.length(), cols.length());
  }
  return RegularMaker::make(text::bracketed(whole->text()) + "[" + colon(rows) + "," + colon(cols) + "]", rows.length(),
                            cols.length(), std::move(all));
}

RegularPtr place(const PatternPtr& pattern, std::int64_t rows, std::int64_t cols, std::int64_t row, std::int64_t col) {
  const RegularPtr piece = as_regular("place", pattern);
  const std::array<std::int64_t, 2> shape{rows, cols}, at{row, col};
  check_sizes("place", rows, cols, "shape");
  if (row < 0 || col < 0) {
    throw Error("place", "at", "numbers from 0 on", shape_text(at));
  }
  if (row > rows - piece->rows() || col > cols - piece->cols()) {
    throw Error("place", "shape", "room for " + shape_text(piece->shape()) + " at " + shape_text(at),
                shape_text(shape));
  }
  if (rows == piece->rows() && cols == piece->cols()) {
    return piece;
  }
  return RegularMaker::make(Writer("place").add(piece->text()).add(shape).keyword("at", at, 0).done(), rows, cols,
                            parts::moved(piece->groups(), -row, -col));
}

RegularPtr diag(std::span<const PatternPtr> patterns) {
  if (patterns.empty()) {
    throw Error("diag", "patterns", "at least one", "none");
  }
  if (patterns.size() == 1) {
    return as_regular("diag", patterns.front());
  }
  std::string text;
  std::int64_t rows = 0, cols = 0;
  Groups all;
  for (const PatternPtr& pattern : patterns) {
    const RegularPtr piece = as_regular("diag", pattern);
    for (PartGroup& group : parts::moved(piece->groups(), -rows, -cols)) {
      all.push_back(std::move(group));
    }
    rows += piece->rows();
    cols += piece->cols();
    check_sizes("diag", rows, cols, "patterns");
    text += (text.empty() ? "" : ",") + piece->text();
  }
  return RegularMaker::make(Writer("diag").add("[" + text + "]").done(), rows, cols, std::move(all));
}

RegularPtr with_prefix(const PatternPtr& pattern, std::int64_t n) {
  const RegularPtr piece = as_regular("with_prefix", pattern);
  check_least("with_prefix", "n", n, 0);
  if (piece->rows() != piece->cols()) {
    throw Error("with_prefix", "pattern", "a square one", shape_text(piece->shape()));
  }
  if (n == 0) {
    return piece;
  }
  const std::int64_t length = piece->rows() + std::min(n, kLargest + 1);
  check_sizes("with_prefix", length, length, "n");
  Groups all = parts::moved(piece->groups(), -n, -n);
  PartGroup& prefix = all.emplace_back(PartGroup{parts::flat_view(), {}});
  for (AxisRange box : {between(0, n, 0, length), between(n, length, 0, n)}) {
    if (parts::tighten(box)) {
      prefix.parts.push_back(part({box}));
    }
  }
  return RegularMaker::make(Writer("with_prefix").add(piece->text()).add(n).done(), length, length, std::move(all));
}

namespace {

PatternPtr made(const Call& call, const text::Value& value, const char* argument, const char* expected) {
  const auto* inner = std::get_if<Call>(&value.is);
  if (inner == nullptr) {
    throw Error(call.name, argument, expected, "something else");
  }
  return text::make(*inner);
}

std::array<std::int64_t, 2> read_pair(const Call& call, std::size_t position, const char* argument) {
  const auto numbers = read_list(call, position, argument);
  if (numbers.size() != 2) {
    throw Error(call.name, argument, "two numbers", std::to_string(numbers.size()));
  }
  return {numbers[0], numbers[1]};
}

const Family kSlice{"slice", [](const Call& call) -> PatternPtr {
                      text::expect_arguments(call, 5, "a pattern and the ends of its rows and columns");
                      const RegularPtr whole = as_regular("slice", made(call, call.arguments[0], "pattern", "one"));
                      return slice(whole, read_span(call, 1, "rows", whole->rows()),
                                   read_span(call, 3, "cols", whole->cols()));
                    }};
const Family kPlace{"place", [](const Call& given) -> PatternPtr {
                      const Call call = ordered(given, {"pattern", "shape"}, {"at"});
                      const auto [rows, cols] = read_pair(call, 1, "shape");
                      const auto [row, col] =
                          text::is_none(call, 2) ? std::array<std::int64_t, 2>{} : read_pair(call, 2, "at");
                      return place(made(call, call.arguments[0], "pattern", "a pattern"), rows, cols, row, col);
                    }};
const Family kDiag{"diag", [](const Call& given) -> PatternPtr {
                     const Call call = ordered(given, {"patterns"});
                     const auto* all = std::get_if<text::Tuple>(&call.arguments[0].is);
                     if (all == nullptr) {
                       throw Error("diag", "patterns", "a list of patterns", "something else");
                     }
                     std::vector<PatternPtr> patterns;
                     for (const text::Value& value : *all) {
                       patterns.push_back(made(call, value, "patterns", "patterns only"));
                     }
                     return diag(patterns);
                   }};
const Family kWithPrefix{"with_prefix", [](const Call& given) -> PatternPtr {
                           const Call call = ordered(given, {"pattern", "n"});
                           return with_prefix(made(call, call.arguments[0], "pattern", "a pattern"),
                                              integer(call, 1, "n"));
                         }};

}  // namespace
}  // namespace fretwork::patterns
