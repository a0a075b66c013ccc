// Turns one arrangement into a component: the runs of its row tiles, and masks that all components of a plan share.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/hash.h"
#include "ops/attention/tiling.h"

namespace fretwork::attention_op {

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
