// Cuts axes into intervals, and boxes of digits at the ends of a sequence.
#include "ops/attention/tiling.h"

#include <algorithm>

namespace fretwork::attention_op {

namespace {

std::int64_t floor_div(std::int64_t a, std::int64_t b) { return a / b - (a % b != 0 && a < 0 ? 1 : 0); }

}  // namespace

Ends::Ends(const Line& line) : axes_(line.axes), low_(bound(line, 0, line.first)) {
  high_.push_back(bound(line, 0, line.last));
  for (int k = 1; k < line.axes; ++k) {
    if (line.strides[k - 1] % line.strides[k] != 0) {
      high_.push_back(bound(line, k, line.strides[k - 1]));
    }
  }
}

Ends::Bound Ends::bound(const Line& line, int first, std::int64_t value) {
  Bound made{first, first, {}};
  for (int k = first; k < line.axes; ++k) {
    made.digits[k] = floor_div(value, line.strides[k]);
    value -= made.digits[k] * line.strides[k];
    made.last = made.digits[k] != 0 ? k : made.last;
  }
  return made;
}

/// −1, 0, 1: the box's digits on axes [from, to) are below, not decided, or above the bound's. They never straddle it.
int Ends::compare(const Bound& limit, int from, int to, std::span<const std::int64_t> begin,
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

std::vector<std::int64_t> Ends::forced_cuts(int axis) const {
  std::vector<std::int64_t> found;
  const auto add = [&](const Bound& limit) {
    if (axis >= limit.first && axis <= limit.last) {
      found.push_back(limit.digits[axis]);
      if (axis < limit.last) {
        found.push_back(limit.digits[axis] + 1);
      }
    }
  };
  std::for_each(high_.begin(), high_.end(), add);
  add(low_);
  std::sort(found.begin(), found.end());
  return found;
}

Cuts cut(std::int64_t begin, std::int64_t end, int extent, std::span<const std::int64_t> forced,
         std::span<const std::int64_t> wished) {
  const auto after = [](auto at, auto last, std::int64_t value) {  // the first above it, which is near
    while (at != last && *at <= value) {
      ++at;
    }
    return at;
  };
  Cuts made;
  made.begin.reserve(static_cast<std::size_t>(std::max<std::int64_t>(0, end - begin) / extent) + 1);
  made.end.reserve(made.begin.capacity());
  auto wall = forced.begin();
  auto wish = wished.begin();
  while (begin < end) {
    wall = after(wall, forced.end(), begin);
    std::int64_t stop = std::min(end, begin + extent);
    stop = wall == forced.end() ? stop : std::min(stop, *wall);
    if (extent > 1) {
      wish = after(wish, wished.end(), begin);
      const auto last = after(wish, wished.end(), stop);
      stop = last == wish ? stop : *(last - 1);
    }
    made.begin.push_back(begin);
    made.end.push_back(stop);
    begin = stop;
  }
  return made;
}

bool Ends::clip(int free_axis, std::span<const std::int64_t> begin, std::span<const std::int64_t> end,
                Inside& inside) const {
  for (int k = 0; k < axes_; ++k) {
    inside.begin[k] = 0;
    inside.end[k] = static_cast<int>(end[k] - begin[k]);
  }
  if (high_.size() == 1 && begin[0] > low_.digits[0] && end[0] <= high_[0].digits[0]) {
    return true;
  }
  const int f = free_axis;
  for (const Bound& limit : high_) {
    if (f < limit.first || f > limit.last) {
      if (compare(limit, limit.first, limit.last + 1, begin, end) >= 0) {
        return false;
      }
      continue;
    }
    const int before = compare(limit, limit.first, f, begin, end);
    if (before > 0) {
      return false;
    }
    if (before == 0) {
      const bool tail = f < limit.last && compare(limit, f + 1, limit.last + 1, begin, end) < 0;
      const std::int64_t stop = limit.digits[f] + (tail ? 1 : 0) - begin[f];
      inside.end[f] = static_cast<int>(std::clamp<std::int64_t>(stop, 0, inside.end[f]));
    }
  }
  const int before = compare(low_, 0, std::min(f, low_.last + 1), begin, end);
  if (before == 0 && f <= low_.last) {
    const bool tail = f == low_.last || compare(low_, f + 1, low_.last + 1, begin, end) >= 0;
    const std::int64_t start = low_.digits[f] + (tail ? 0 : 1) - begin[f];
    inside.begin[f] = static_cast<int>(std::clamp<std::int64_t>(start, 0, inside.end[f]));
  }
  return before >= 0 && inside.begin[f] < inside.end[f];
}

}  // namespace fretwork::attention_op
