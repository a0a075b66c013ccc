// One arrangement as the runs of its row tiles, and the masks that all components of a plan share.
#pragma once

#include <cstdint>
#include <string_view>
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

/// The masks of a plan, each once.
class Masks {
 public:
  explicit Masks(Plan& plan) : plan_(plan) {}
  /// The index of the mask with these bits, or −1 where the tile pair is whole. A band is preferred; rows that are not
  /// inside may be anything in it. The first `prefix` columns are inside.
  int add(std::span<const std::uint32_t> bits, const std::vector<bool>& inside, int prefix);

  struct Interval {
    int begin, end;
  };

 private:
  /// The index of the mask with this content, which is put behind the others if it is new.
  int number(std::string_view content, const Mask& mask);
  Plan& plan_;
  std::unordered_map<Hash128, int> known_;
  std::vector<Interval> rows_;  ///< of the mask that is looked at
};

/// Row tiles that no part meets are kept if there are few of them (then covers_rows) and `cover` is set.
Component make_component(const Arrangement& arrangement, Plan& plan, Masks& masks, bool cover);

}  // namespace fretwork::attention_op
