// What a regular pattern was recognised as, in words.
#include <array>
#include <cstdio>
#include <map>

#include "pattern/parts.h"

namespace fretwork {
namespace {

/// Whether every row digit meets every column digit.
bool is_free(const AxisRange& a) {
  return a.low <= a.col_begin - (a.row_end - 1) && a.high >= a.col_end - 1 - a.row_begin;
}

std::string kind_of(const AxisRange& a) {
  return is_free(a)                                      ? "rectangle"
         : a.low == a.high                               ? "diagonal"
         : a.high - a.low >= a.col_end - a.col_begin - 1 ? "triangle"
                                                         : "band";
}

/// How positions are counted, and what the parts are then.
struct Reading {
  std::string order, kind;
};

Reading read(const View& view, const Part& part) {
  const std::string first = std::to_string(view.strides[0]);
  if (view.axes == 1) {
    return {"plain order", kind_of(part[0])};
  }
  const AxisRange& last = part[1];
  if (view.axes == 2 && last.low == last.high) {
    return {"classes modulo " + first, kind_of(part[0])};
  }
  if (view.axes == 2 &&
      last == AxisRange{0, view.strides[0], 0, view.strides[0], 1 - view.strides[0], view.strides[0] - 1}) {
    return {"blocks of " + first, kind_of(part[0])};
  }
  std::string strides = first;
  for (int k = 1; k < view.axes; ++k) {
    strides += ", " + std::to_string(view.strides[static_cast<std::size_t>(k)]);
  }
  return {"grid of strides " + strides, "box"};
}

std::string plural(std::int64_t count, const std::string& noun) {
  return std::to_string(count) + " " + noun + (count == 1 ? "" : noun == "box" ? "es" : "s");
}

std::string percent(double share) {
  std::array<char, 32> text;
  const int length = std::snprintf(text.data(), text.size(), "%.3g %%", 100 * share);
  return {text.data(), static_cast<std::size_t>(length)};
}

}  // namespace

std::string RegularPattern::describe() const {
  constexpr std::size_t kLongest = 120;
  std::string lines = (text().size() > kLongest ? key() : text()) + ": " + std::to_string(rows()) + "×" +
                      std::to_string(cols()) + ", " + plural(nnz_, "element") + ", " + percent(density()) + "\n";
  for (const PartGroup& group : groups_) {
    std::map<std::string, std::map<std::string, std::int64_t>> orders;
    std::map<std::string, parts::Wide> elements;
    for (const Part& part : group.parts) {
      const Reading reading = read(group.view, part);
      ++orders[reading.order][reading.kind];
      elements[reading.order] += parts::count(part, group.view.axes);
    }
    for (const auto& [order, kinds] : orders) {
      lines += "  " + order + ": ";
      for (const auto& [kind, count] : kinds) {
        lines += (&kind == &kinds.begin()->first ? "" : ", ") + plural(count, kind);
      }
      const auto part = static_cast<std::int64_t>(elements[order]);
      lines += "; " + percent(static_cast<double>(part) / static_cast<double>(nnz_)) + " of the elements\n";
    }
  }
  return lines;
}

}  // namespace fretwork
