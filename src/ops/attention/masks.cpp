// The masks of a plan: a band if possible, else an interval per row, else bits. Each distinct mask is stored once.
#include <algorithm>
#include <bit>
#include <optional>
#include <string_view>
#include <utility>

#include "ops/attention/tiling.h"

namespace fretwork::attention_op {

int Numbers::of(std::uint64_t value) {
  if (values_.size() * 2 >= slots_.size()) {
    grow();
  }
  const std::size_t mask = slots_.size() - 1;
  const std::uint64_t mixed = value * 0x9E3779B97F4A7C15u;
  for (std::size_t at = (mixed ^ mixed >> 32) & mask;; at = (at + 1) & mask) {  // the upper half of a pair counts too
    ++steps_;
    if (slots_[at] < 0) {
      slots_[at] = static_cast<std::int32_t>(values_.size());
      values_.push_back(value);
      return slots_[at];
    }
    if (values_[static_cast<std::size_t>(slots_[at])] == value) {
      return slots_[at];
    }
  }
}

void Numbers::grow() {
  const std::vector<std::uint64_t> old = std::exchange(values_, {});
  slots_.assign(std::max<std::size_t>(64, slots_.size() * 4), -1);
  for (const std::uint64_t value : old) {
    of(value);
  }
}

namespace {

constexpr int kNone = 1 << 20;  // a bound that no tile reaches

/// The set bits of a row, if they follow each other.
std::optional<Interval> interval(std::span<const std::uint32_t> words) {
  Interval found{};
  for (std::size_t w = 0; w < words.size(); ++w) {
    if (words[w] != 0) {
      const int at = static_cast<int>(w) * 32, begin = std::countr_zero(words[w]);
      const std::uint32_t ones = words[w] >> begin;
      if ((ones & (ones + 1)) != 0 || (found.end != 0 && (begin != 0 || found.end != at))) {
        return std::nullopt;
      }
      found.begin = found.end == 0 ? static_cast<std::uint8_t>(at + begin) : found.begin;
      found.end = static_cast<std::uint8_t>(at + 32 - std::countl_zero(words[w]));
    }
  }
  return found;
}

/// The band with this limit that has these rows, if there is one.
std::optional<Mask> band(std::span<const Interval> rows, const std::vector<bool>& inside, int limit) {
  Mask mask{-kNone, kNone, limit};
  for (int m = 0; m < static_cast<int>(rows.size()); ++m) {
    const Interval& row = rows[static_cast<std::size_t>(m)];
    if (row.begin < row.end) {
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

void Canvas::clear(const TileShape& shape, bool as_bits) {
  words_ = static_cast<std::size_t>(shape.cols / 32);
  rows_.assign(static_cast<std::size_t>(shape.rows), {});
  bits_.assign(as_bits ? rows_.size() * words_ : 0, 0);
}

void Canvas::go_on_with_bits() {
  bits_.resize(rows_.size() * words_);
  for (std::size_t m = 0; m < rows_.size(); ++m) {
    if (rows_[m].end != 0) {
      set_range(bits_.data() + m * words_, rows_[m].begin, rows_[m].end);
    }
  }
}

bool Canvas::is_intervals() {
  for (std::size_t m = 0; m < rows_.size() && !bits_.empty(); ++m) {
    const auto row = interval(bits().subspan(m * words_, words_));
    if (!row) {
      return false;
    }
    rows_[m] = *row;
  }
  bits_.clear();
  return true;
}

int Masks::add(Canvas& drawn, const std::vector<bool>& inside, int prefix) {
  if (drawn.is_intervals()) {
    int longest = 0;
    for (const Interval& row : drawn.rows()) {
      longest = std::max<int>(longest, row.end);
    }
    for (const int limit : {prefix, std::min(prefix, longest)}) {
      if (const auto mask = band(drawn.rows(), inside, limit)) {
        const bool whole = mask->low == -kNone && mask->high == kNone && limit == plan_.shape.cols;
        const std::int32_t fields[] = {mask->low, mask->high, mask->limit};
        return whole ? -1 : number(bands_, std::span<const std::int32_t>(fields), *mask);
      }
    }
    return number(intervals_, drawn.rows(), &Mask::rows, plan_.intervals);
  }
  return number(bits_, drawn.bits(), &Mask::bits, plan_.bits);
}

template <typename T>
int Masks::number(Known& known, std::span<const T> content, const Mask& mask) {
  const std::string_view bytes(reinterpret_cast<const char*>(content.data()), content.size_bytes());
  const auto [found, added] = known.try_emplace(hash128(bytes), static_cast<int>(plan_.masks.size()));
  if (added) {
    plan_.masks.push_back(mask);
  }
  return found->second;
}

template <typename T>
int Masks::number(Known& known, std::span<const T> content, std::int32_t Mask::*at, std::vector<T>& all) {
  const std::size_t size = all.size(), count = plan_.masks.size();
  Mask mask{-kNone, kNone, plan_.shape.cols};
  mask.*at = static_cast<std::int32_t>(size);
  const int found = number(known, content, mask);
  if (plan_.masks.size() > count) {  // it is new
    if (size + content.size() > all.capacity()) {
      all.reserve(8 * size + content.size());  // room costs no memory before it is used, copies do
    }
    all.insert(all.end(), content.begin(), content.end());
  }
  return found;
}

}  // namespace fretwork::attention_op
