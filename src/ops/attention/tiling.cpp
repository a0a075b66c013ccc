// Cutting axes into intervals and boxes of digits at the ends of a sequence.
#include "ops/attention/tiling.h"

#include <algorithm>

namespace fretwork::attention_op {

namespace {

std::int64_t floor_div(std::int64_t a, std::int64_t b) { return a / b - (a % b != 0 && a < 0 ? 1 : 0); }

/// Digits from `first` on are below (or not below) these, read as a number; digits after `last` are zero.
struct Bound {
  int first, last;
  std::array<std::int64_t, kMaxAxes> digits;
};

Bound bound(const Line& line, int first, std::int64_t value) {
  Bound made{first, first, {}};
  for (int k = first; k < line.axes; ++k) {
    made.digits[k] = floor_div(value, line.strides[k]);
    value -= made.digits[k] * line.strides[k];
    made.last = made.digits[k] != 0 ? k : made.last;
  }
  return made;
}

/// The sequence's end, and the end of each axis whose stride is no multiple of the next one's.
template <typename Visit>
void upper_bounds(const Line& line, const Visit& visit) {
  visit(bound(line, 0, line.last));
  for (int k = 1; k < line.axes; ++k) {
    if (line.strides[k - 1] % line.strides[k] != 0) {
      visit(bound(line, k, line.strides[k - 1]));
    }
  }
}

/// −1, 0, 1: the box's digits on axes [from, to) are below, not decided, or above the bound's. They never straddle it.
int compare(const Bound& limit, int from, int to, std::span<const std::int64_t> begin,
            std::span<const std::int64_t> end) {
  for (int k = from; k < to; ++k) {
    if (end[k] <= limit.digits[k]) {
      return -1;
    }
    if (begin[k] > limit.digits[k]) {
      return 1;
    }
  }
  return 0;
}

}  // namespace

std::array<std::int64_t, kMaxAxes> Line::digits(std::int64_t position) const {
  std::array<std::int64_t, kMaxAxes> found{};
  for (int k = 0; k < axes; ++k) {
    found[k] = floor_div(position, strides[k]);
    position -= found[k] * strides[k];
  }
  return found;
}

std::pair<std::int64_t, std::int64_t> Line::range(int axis) const {
  const auto from = digits(first), to = digits(last - 1);
  if (std::equal(from.begin(), from.begin() + axis, to.begin())) {
    return {from[static_cast<std::size_t>(axis)], to[static_cast<std::size_t>(axis)] + 1};
  }
  return {0, (strides[axis - 1] + strides[axis] - 1) / strides[axis]};
}

std::vector<std::int64_t> forced_cuts(const Line& line, int axis) {
  std::vector<std::int64_t> found;
  const auto add = [&](const Bound& limit) {
    if (axis >= limit.first && axis <= limit.last) {
      found.push_back(limit.digits[axis]);
      if (axis < limit.last) {
        found.push_back(limit.digits[axis] + 1);
      }
    }
  };
  upper_bounds(line, add);
  add(bound(line, 0, line.first));
  std::sort(found.begin(), found.end());
  return found;
}

Cuts cut(std::int64_t begin, std::int64_t end, int extent, std::span<const std::int64_t> forced,
         std::span<const std::int64_t> wished) {
  Cuts made;
  auto wall = forced.begin();
  auto wish = wished.begin();
  while (begin < end) {
    wall = std::upper_bound(wall, forced.end(), begin);
    std::int64_t stop = std::min(end, begin + extent);
    stop = wall == forced.end() ? stop : std::min(stop, *wall);
    if (extent > 1) {
      wish = std::upper_bound(wish, wished.end(), begin);
      const auto after = std::upper_bound(wish, wished.end(), stop);
      stop = after == wish ? stop : *(after - 1);
    }
    made.begin.push_back(begin);
    made.end.push_back(stop);
    begin = stop;
  }
  return made;
}

bool clip(const Line& line, int free_axis, std::span<const std::int64_t> begin, std::span<const std::int64_t> end,
          Inside& inside) {
  for (int k = 0; k < line.axes; ++k) {
    inside.begin[k] = 0;
    inside.end[k] = static_cast<int>(end[k] - begin[k]);
  }
  const int f = free_axis;
  bool some = true;
  upper_bounds(line, [&](const Bound& limit) {
    if (f < limit.first || f > limit.last) {
      some = some && compare(limit, limit.first, limit.last + 1, begin, end) < 0;
      return;
    }
    const int before = compare(limit, limit.first, f, begin, end);
    if (before == 0) {
      const bool tail = f < limit.last && compare(limit, f + 1, limit.last + 1, begin, end) < 0;
      const std::int64_t stop = limit.digits[f] + (tail ? 1 : 0) - begin[f];
      inside.end[f] = static_cast<int>(std::clamp<std::int64_t>(stop, 0, inside.end[f]));
    }
    some = some && before <= 0;
  });
  const Bound low = bound(line, 0, line.first);
  if (f > low.last) {
    some = some && compare(low, 0, low.last + 1, begin, end) >= 0;
  } else {
    const int before = compare(low, 0, f, begin, end);
    if (before == 0) {
      const bool tail = f == low.last || compare(low, f + 1, low.last + 1, begin, end) >= 0;
      const std::int64_t start = low.digits[f] + (tail ? 0 : 1) - begin[f];
      inside.begin[f] = static_cast<int>(std::clamp<std::int64_t>(start, 0, inside.end[f]));
    }
    some = some && before >= 0;
  }
  return some && inside.begin[f] < inside.end[f];
}

}  // namespace fretwork::attention_op
