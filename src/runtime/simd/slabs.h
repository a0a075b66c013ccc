// How the columns of a result are cut: into panels of a few vectors, and those into slabs that share a cache.
#pragma once

#include <algorithm>
#include <vector>

#include "core/divide.h"
#include "runtime/simd/tiles.h"

namespace fretwork::simd {

/// What the panels of a slab may take of a second-level cache, and how many there are at most.
inline constexpr std::int64_t kSlabBytes = 3200 << 10, kMaxPanels = 8;

/// How many panels of a depth a cache holds.
inline std::int64_t panels_that_fit(std::int64_t depth, const Tiles& tiles) {
  const std::int64_t bytes = depth * tiles.vectors * tiles.lanes * static_cast<std::int64_t>(tiles.element);
  return std::clamp(kSlabBytes / std::max<std::int64_t>(bytes, 1), std::int64_t{1}, kMaxPanels);
}

/// Columns of a result: panels of a few vectors, and slabs of `fit` panels at most.
class Slabs {
 public:
  /// There are `share` slabs or a multiple of it, if there are panels enough.
  Slabs(std::int64_t cols, std::int64_t fit, std::int64_t share, const Tiles& tiles)
      : cols_(cols), lanes_(tiles.lanes), vectors_(ceil_div(cols, lanes_)), panels_(ceil_div(vectors_, tiles.vectors)) {
    count_ = std::min(panels_, ceil_div(ceil_div(panels_, fit), share) * share);
  }
  std::int64_t count() const { return count_; }
  std::int64_t vectors() const { return vectors_; }
  std::int64_t first_panel(std::int64_t slab) const { return panels_ * slab / count_; }
  std::int64_t first_vector(std::int64_t panel) const { return vectors_ * panel / panels_; }

  struct Panel {
    std::int64_t first, last;     ///< columns of the result
    std::int64_t vectors, width;  ///< and width of all of these
  };
  Panel panel(std::int64_t n) const {
    const std::int64_t from = first_vector(n), to = first_vector(n + 1);
    return {from * lanes_, std::min(to * lanes_, cols_), to - from, (to - from) * lanes_};
  }

 private:
  std::int64_t cols_, lanes_, vectors_, panels_, count_;
};

struct Slab {
  std::vector<Slabs::Panel> panels;
  std::int64_t first = 0, width = 0;
  Slab(const Slabs& slabs, std::int64_t slab) {
    for (std::int64_t n = slabs.first_panel(slab); n < slabs.first_panel(slab + 1); ++n) {
      panels.push_back(slabs.panel(n));
      width += panels.back().width;
    }
    first = panels.front().first;
  }
  bool whole() const { return panels.back().last - first == width; }  ///< no panel is wider than its columns
};

}  // namespace fretwork::simd
