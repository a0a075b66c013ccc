// The masks of a plan: bands where they are enough, else bits, each kept once.
#include <algorithm>
#include <bit>
#include <limits>
#include <optional>
#include <string_view>

#include "ops/attention/component.h"

namespace fretwork::attention_op {

namespace {

constexpr int kNone = 1 << 20;  // a bound that no tile reaches

using Interval = Masks::Interval;

/// The set bits of a row, if they follow each other.
std::optional<Interval> interval(std::span<const std::uint32_t> words) {
  Interval found{0, 0};
  for (std::size_t w = 0; w < words.size(); ++w) {
    if (words[w] != 0) {
      const int at = static_cast<int>(w) * 32, begin = std::countr_zero(words[w]);
      const std::uint32_t ones = words[w] >> begin;
      if ((ones & (ones + 1)) != 0 || (found.end != 0 && (begin != 0 || found.end != at))) {
        return std::nullopt;
      }
      found.begin = found.end == 0 ? at + begin : found.begin;
      found.end = at + 32 - std::countl_zero(words[w]);
    }
  }
  return found;
}

/// The band with this limit that has these rows, if there is one.
std::optional<Mask> band(const std::vector<Interval>& rows, const std::vector<bool>& inside, int limit) {
  Mask mask{-kNone, kNone, limit};
  for (int m = 0; m < static_cast<int>(rows.size()); ++m) {
    const Interval& row = rows[static_cast<std::size_t>(m)];
    if (inside[static_cast<std::size_t>(m)] && row.begin < row.end) {
      const int low = row.begin > 0 ? row.begin - m : mask.low;
      const int high = row.end < limit ? row.end - 1 - m : mask.high;
      if ((mask.low != -kNone && low != mask.low) || (mask.high != kNone && high != mask.high)) {
        return std::nullopt;
      }
      mask.low = low;
      mask.high = high;
    }
  }
  for (int m = 0; m < static_cast<int>(rows.size()); ++m) {
    const Interval& row = rows[static_cast<std::size_t>(m)];
    const int begin = std::max(0, m + mask.low), end = std::min(limit, m + mask.high + 1);
    const bool same = begin < end ? row.begin == begin && row.end == end : row.begin == row.end;
    if (inside[static_cast<std::size_t>(m)] && !same) {
      return std::nullopt;
    }
  }
  return mask;
}

}  // namespace

int Masks::add(std::span<const std::uint32_t> bits, const std::vector<bool>& inside, int prefix) {
  const auto words = static_cast<std::size_t>(plan_.shape.cols / 32);
  std::vector<Interval>& rows = rows_;
  rows.resize(inside.size());
  bool intervals = true;
  int longest = 0;
  std::optional<int> low;  // a band has one, whatever its limit: the last rows tell most masks that are none
  for (int m = static_cast<int>(rows.size()) - 1; m >= 0 && intervals; --m) {
    const auto at = static_cast<std::size_t>(m);
    const auto row = inside[at] ? interval(bits.subspan(at * words, words)) : Interval{0, 0};
    intervals = row.has_value();
    rows[at] = row.value_or(Interval{0, 0});
    longest = std::max(longest, rows[at].end);
    if (rows[at].begin > 0) {
      intervals = intervals && low.value_or(rows[at].begin - m) == rows[at].begin - m;
      low = rows[at].begin - m;
    }
  }
  for (const int limit : {prefix, std::min(prefix, longest)}) {
    if (const auto mask = intervals ? band(rows, inside, limit) : std::nullopt) {
      const bool whole = mask->low == -kNone && mask->high == kNone && limit == plan_.shape.cols;
      const std::int32_t fields[] = {mask->low, mask->high, mask->limit};
      return whole ? -1 : number({reinterpret_cast<const char*>(fields), sizeof fields}, *mask);
    }
  }
  const std::size_t size = plan_.bits.size();
  const int found = number({reinterpret_cast<const char*>(bits.data()), bits.size_bytes()},
                           {-kNone, kNone, plan_.shape.cols, static_cast<std::int32_t>(size)});
  if (plan_.masks[static_cast<std::size_t>(found)].bits == static_cast<std::int32_t>(size)) {  // it is new
    if (size + bits.size() > plan_.bits.capacity()) {
      plan_.bits.reserve(8 * size + bits.size());  // room costs no memory before it is used, copies do
    }
    plan_.bits.insert(plan_.bits.end(), bits.begin(), bits.end());
  }
  return found;
}

int Masks::number(std::string_view content, const Mask& mask) {
  const auto [known, added] = known_.try_emplace(hash128(content), static_cast<int>(plan_.masks.size()));
  if (added) {
    plan_.masks.push_back(mask);
  }
  return known->second;
}

}  // namespace fretwork::attention_op
