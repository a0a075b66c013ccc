// The named patterns on grids: a rule for each axis, and their product. An axis may be counted in two digits, such as
// the tile and the place in it, or the rank in a residue class and the class.
#include <bit>

#include "fretwork/tensor.h"
#include "pattern/regular_text.h"

namespace fretwork::patterns {
namespace {

using parts::between;
using parts::differing;
using parts::kAnywhere;
using parts::kFar;
using parts::part;
using parts::tighten;
using text::Call;
using text::Family;

/// What meets on one axis of a grid: how a coordinate is counted, and disjoint parts in these digits.
struct GridAxis {
  std::int64_t length;
  std::vector<std::int64_t> units;  ///< none where there is one coordinate only
  std::vector<Part> parts;

  GridAxis(std::int64_t axis_length, std::vector<std::int64_t> digit_units)
      : length(axis_length), units(axis_length == 1 ? std::vector<std::int64_t>{} : std::move(digit_units)) {}

  /// Adds a part where something is left of it. An axis of one coordinate needs to know only whether it is there.
  void add(Part p) {
    if (length == 1) {
      parts.assign(1, Part{});
    } else if (tighten(p, static_cast<int>(units.size()))) {
      parts.push_back(p);
    }
  }
};

/// What meets on every axis.
RegularPtr product(const char* op, std::string text, std::vector<GridAxis> axes) {
  PartGroup group{{}, {Part{}}};
  std::int64_t size = 1;
  for (const GridAxis& axis : axes) {
    if (__builtin_mul_overflow(size, axis.length, &size)) {
      throw Error(op, "shape", "at most 2^48 positions", "more");
    }
  }
  check_sizes(op, size, size, "shape");
  if (std::all_of(axes.begin(), axes.end(), [](const GridAxis& axis) { return axis.units.empty(); })) {
    const bool there = std::all_of(axes.begin(), axes.end(), [](const GridAxis& axis) { return !axis.parts.empty(); });
    group.parts = {part({AxisRange{0, 1, 0, 1, 0, 0}})};
    group.parts.resize(there ? 1 : 0);
    return RegularMaker::make(std::move(text), size, size, {std::move(group)});
  }
  std::int64_t rest = size;
  int used = 0;
  for (GridAxis& axis : axes) {
    const int digits = static_cast<int>(axis.units.size());
    rest = axis.length > 0 ? rest / axis.length : 0;
    for (int k = 0; k < digits; ++k) {
      group.view.strides[static_cast<std::size_t>(used + k)] = axis.units[static_cast<std::size_t>(k)] * rest;
    }
    parts::merge(axis.parts, digits);
    parts::check_parts(op, parts::Wide(group.parts.size()) * axis.parts.size());
    std::vector<Part> next;
    parts::reserve(next, group.parts.size() * axis.parts.size());
    for (const Part& before : group.parts) {
      for (const Part& here : axis.parts) {
        next.push_back(before);
        std::copy_n(here.begin(), digits, next.back().begin() + used);
      }
    }
    group.parts = std::move(next);
    used += digits;
  }
  group.view.axes = used;
  return RegularMaker::make(std::move(text), size, size, {std::move(group)});
}

/// What the ranks 0 … length − 1 of a residue class see. Groups of `stride` ranks share a window: it moves with the
/// groups [begin, end), where it begins `first` ranks behind the group, and stands still at both ends.
struct Windows {
  std::int64_t begin, end, first;
  std::vector<AxisRange> still;  ///< as ranks × ranks
};

Windows windows(std::int64_t length, std::int64_t window, bool causal, std::int64_t stride) {
  const std::int64_t whole = length / stride;
  if (causal) {  // the last of a group leads
    const std::int64_t begin = (window - 1) / stride, head = begin * stride, tail = whole * stride;
    return {begin,
            whole,
            stride - window,
            {parts::meet(between(0, head, 0, head), differing(-kFar, 0)),
             parts::meet(between(tail, length, length - window, length), differing(-kFar, 0))}};
  }
  const std::int64_t first = stride / 2 - window / 2;  // the middle one leads
  const std::int64_t begin = (stride - 1 - first) / stride;
  const std::int64_t end = std::max(begin, std::min((length - window - first) / stride + 1, whole));
  return {begin,
          end,
          first,
          {between(0, begin * stride, 0, window), between(end * stride, length, length - window, length)}};
}

/// The moving windows in digits of groups and places in them.
std::vector<std::array<AxisRange, 2>> in_groups(const Windows& w, std::int64_t window, bool causal,
                                                std::int64_t stride) {
  std::vector<std::array<AxisRange, 2>> all;
  for (const auto& [group, place] : parts::split(between(0, 1, w.first, causal ? 0 : w.first + window), stride)) {
    all.push_back({parts::meet(between(w.begin, w.end, -kFar, kFar), differing(group.col_begin, group.col_end - 1)),
                   between(0, stride, place.col_begin, place.col_end)});
  }
  if (causal) {
    all.push_back({parts::meet(between(w.begin, w.end, -kFar, kFar), differing(0, 0)),
                   parts::meet(between(0, stride, 0, stride), differing(-kFar, 0))});
  }
  return all;
}

/// The moving windows in ranks: a band, or a box for each group.
std::vector<AxisRange> in_ranks(const Windows& w, std::int64_t window, bool causal, std::int64_t stride) {
  if (stride == 1) {
    return {parts::meet(between(w.begin, w.end, -kFar, kFar), differing(w.first, w.first + window - 1))};
  }
  std::vector<AxisRange> all;
  for (std::int64_t g = w.begin; g < w.end; ++g) {
    const std::int64_t at = g * stride, from = at + w.first;
    all.push_back(parts::meet(between(at, at + stride, from, from + window), differing(-kFar, causal ? 0 : kFar)));
  }
  return all;
}

struct Neighborhood {
  std::int64_t length, window, dilation, stride;
  bool causal;
  bool dilates() const { return dilation > 1 && dilation < length; }
  /// Several groups in a class: the digit of a single one would have the stride of the axis before.
  bool groups_up() const { return stride > 1 && stride <= (length - 1) / dilation; }
  std::int64_t groups() const { return length / stride / dilation + 1; }
  /// Windows are whole groups, and these whole parts of tiles.
  bool aligned() const {
    return std::has_single_bit(static_cast<std::uint64_t>(stride)) && window % stride == 0 &&
           (causal || (stride / 2 - window / 2) % stride == 0);
  }
};

/// `grouped`: groups have a digit of their own, so that a few parts say all; else there is a part for each group.
GridAxis neighborhood_axis(const Neighborhood& n, bool grouped) {
  const auto& [length, window, dilation, stride, causal] = n;
  const std::int64_t shortest = std::max<std::int64_t>(length / dilation, 1);
  if (stride > window) {
    throw Error("neighborhood", "stride", "at most window = " + std::to_string(window), std::to_string(stride));
  }
  if (length == 0) {  // no class is too short, and nothing meets
    return {0, {1}};
  }
  if (window > shortest) {
    throw Error("neighborhood", "window", "at most " + std::to_string(shortest) + ", the shortest residue class",
                std::to_string(window));
  }
  const std::int64_t step = n.dilates() ? dilation : 1;
  std::vector<std::int64_t> units{step};
  if (grouped) {
    units.insert(units.begin(), stride * step);
  }
  if (step > 1) {
    units.push_back(1);
  }
  GridAxis axis(length, units);
  if (dilation > 1 && step == 1) {  // each position is a class of its own
    axis.add(part({parts::meet(between(0, length, 0, length), differing(0, 0))}));
    return axis;
  }
  const auto classes = [&](std::int64_t begin, std::int64_t end, std::int64_t members) {
    const AxisRange same{begin, end, begin, end, 0, 0};
    const Windows w = windows(members, window, causal, stride);
    if (!grouped) {
      std::vector<AxisRange> all = in_ranks(w, window, causal, stride);
      parts::check_parts("neighborhood", static_cast<parts::Wide>(all.size()));
      all.insert(all.end(), w.still.begin(), w.still.end());
      for (const AxisRange& range : all) {
        axis.add(part({range, same}));
      }
      return;
    }
    for (const auto& [group, place] : in_groups(w, window, causal, stride)) {
      axis.add(part({group, place, same}));
    }
    for (AxisRange still : w.still) {
      if (tighten(still)) {
        for (const auto& [group, place] : parts::split(still, stride)) {
          axis.add(part({group, place, same}));
        }
      }
    }
  };
  const std::int64_t longer = length % step;
  if (longer > 0) {
    classes(0, longer, length / step + 1);
  }
  classes(longer, step, length / step);
  return axis;
}

/// Groups get a digit of their own where windows are whole groups, and on the axes with the most of them where a part
/// for each would be too many: else tiles fit the windows better without. A view has room for so many digits.
std::vector<GridAxis> neighborhood_axes(const std::vector<Neighborhood>& all) {
  constexpr double kManyParts = 1 << 15;
  std::vector<bool> grouped(all.size());
  std::vector<std::size_t> order;
  int digits = 0;
  double parts = 1;
  for (std::size_t k = 0; k < all.size(); ++k) {
    digits += all[k].dilates() ? 2 : 1;
    if (all[k].groups_up()) {
      order.push_back(k);
      parts *= static_cast<double>(all[k].groups());
    }
  }
  std::sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    return std::pair(!all[a].aligned(), -all[a].groups()) < std::pair(!all[b].aligned(), -all[b].groups());
  });
  for (const std::size_t k : order) {
    if (digits < kMaxAxes && (all[k].aligned() || parts > kManyParts)) {
      grouped[k] = true;
      ++digits;
      parts /= static_cast<double>(all[k].groups());
    }
  }
  std::vector<GridAxis> axes;
  for (std::size_t k = 0; k < all.size(); ++k) {
    axes.push_back(neighborhood_axis(all[k], grouped[k]));
  }
  return axes;
}

/// Adds what `tiles` says of tile coordinates, where the last tile of an axis may be cut.
void add_tiles(GridAxis& axis, std::int64_t tile, const AxisRange& tiles) {
  const std::int64_t whole = axis.length / tile, left = axis.length % tile;
  const std::int64_t starts[] = {0, whole}, ends[] = {whole, whole + 1}, inside[] = {tile, left};
  for (int r = 0; r < 2; ++r) {
    for (int c = 0; c < 2; ++c) {
      axis.add(part(
          {parts::meet(tiles, between(starts[r], ends[r], starts[c], ends[c])), between(0, inside[r], 0, inside[c])}));
    }
  }
}

/// The windows of single ranks.
std::vector<AxisRange> moving_and_still(std::int64_t length, std::int64_t window) {
  const Windows w = windows(length, window, false, 1);
  std::vector<AxisRange> all = in_ranks(w, window, false, 1);
  all.insert(all.end(), w.still.begin(), w.still.end());
  return all;
}

GridAxis tile_axis(std::int64_t length, std::int64_t tile, std::int64_t window) {
  const std::int64_t tiles = length / tile + (length % tile != 0);
  if (length == 0) {
    return {0, {1}};
  }
  if (window > tiles) {
    throw Error("sliding_tile", "window", "at most " + std::to_string(tiles) + " tiles", std::to_string(window));
  }
  if (tile >= length) {
    GridAxis axis(length, {1});
    axis.add(part({between(0, length, 0, length)}));
    return axis;
  }
  GridAxis axis(length, tile == 1 ? std::vector<std::int64_t>{1} : std::vector<std::int64_t>{tile, 1});
  for (const AxisRange& range : moving_and_still(tiles, window)) {
    if (tile == 1) {
      axis.add(part({range}));
    } else {
      add_tiles(axis, tile, range);
    }
  }
  return axis;
}

GridAxis swin_axis(std::int64_t length, std::int64_t window, std::int64_t shift) {
  if (shift == 0 && window > 1 && window < length) {  // windows have digits of their own
    GridAxis axis(length, {window, 1});
    add_tiles(axis, window, differing(0, 0));
    return axis;
  }
  GridAxis axis(length, {1});
  const auto add = [&](std::int64_t begin, std::int64_t end) { axis.add(part({between(begin, end, begin, end)})); };
  if (window >= length) {
    add(0, std::min(shift, length));
    add(std::min(shift, length), length);
    return axis;
  }
  parts::check_parts("swin", length / window);
  // Windows start at the shift; what lies before it belongs to the end of the axis, and its windows start there.
  for (std::int64_t at = 0; at < length;) {
    const std::int64_t turned = at < shift ? at - shift + length : at - shift;
    const std::int64_t end = std::min(at + window - turned % window, at < shift ? shift : length);
    add(at, end);
    at = end;
  }
  return axis;
}

/// One number for each axis, from one for all or from as many.
std::vector<std::int64_t> per_axis(const char* op, const char* argument, Axes values, std::size_t axes,
                                   std::int64_t least) {
  if (values.size() != 1 && values.size() != axes) {
    throw Error(op, argument, "one number or " + std::to_string(axes), std::to_string(values.size()));
  }
  std::vector<std::int64_t> all(axes);
  for (std::size_t k = 0; k < axes; ++k) {
    all[k] = values[values.size() == 1 ? 0 : k];
    check_least(op, argument, all[k], least);
  }
  return all;
}

void check_shape(const char* op, Axes shape) {
  if (shape.empty() || shape.size() > 3) {
    throw Error(op, "shape", "one to three axes", std::to_string(shape.size()));
  }
  for (const std::int64_t n : shape) {
    if (n < 0 || n > kLargest) {
      throw Error(op, "shape", "lengths from 0 to 2^48", std::to_string(n));
    }
  }
}

/// One number stands for equal ones.
void add_per_axis(Writer& writer, const std::vector<std::int64_t>& values) {
  const bool same = std::all_of(values.begin(), values.end(), [&](std::int64_t v) { return v == values.front(); });
  same ? writer.add(values.front()) : writer.add(values);
}

}  // namespace

RegularPtr swin(std::int64_t height, std::int64_t width, Axes window, Axes shift) {
  const std::array<std::int64_t, 2> shape{height, width};
  check_shape("swin", shape);
  const auto sides = per_axis("swin", "window", window, 2, 1), shifts = per_axis("swin", "shift", shift, 2, 0);
  std::vector<GridAxis> axes;
  for (std::size_t k = 0; k < 2; ++k) {
    if (shifts[k] >= sides[k]) {
      throw Error("swin", "shift", "less than window = " + std::to_string(sides[k]), std::to_string(shifts[k]));
    }
    axes.push_back(swin_axis(shape[k], sides[k], shifts[k]));
  }
  Writer text("swin");
  text.add(height).add(width);
  add_per_axis(text, sides);
  return product("swin", text.keyword("shift", shifts, 0).done(), std::move(axes));
}

RegularPtr axial(std::int64_t height, std::int64_t width) {
  const std::array<std::int64_t, 2> shape{height, width};
  check_shape("axial", shape);
  std::string text = Writer("axial").add(height).add(width).done();
  std::int64_t size = 0;
  if (__builtin_mul_overflow(height, width, &size)) {
    throw Error("axial", "shape", "at most 2^48 positions", shape_text(shape));
  }
  check_sizes("axial", size, size, "shape");
  if (height <= 1 || width <= 1) {
    return make(std::move(text), size, {{parts::flat_view(), {part({kAnywhere})}}});
  }
  return make(std::move(text), size,
              {{parts::residue_view(width),
                {part({differing(0, 0), kAnywhere}), part({differing(-kFar, -1), differing(0, 0)}),
                 part({differing(1, kFar), differing(0, 0)})}}});
}

RegularPtr neighborhood(Axes shape, Axes window, Axes dilation, Axes causal, Axes stride) {
  constexpr const char* kOp = "neighborhood";
  check_shape(kOp, shape);
  const auto windows = per_axis(kOp, "window", window, shape.size(), 1);
  const auto dilations = per_axis(kOp, "dilation", dilation, shape.size(), 1);
  const auto flags = per_axis(kOp, "causal", causal, shape.size(), 0);
  const auto strides = per_axis(kOp, "stride", stride, shape.size(), 1);
  std::vector<Neighborhood> all;
  for (std::size_t k = 0; k < shape.size(); ++k) {
    all.push_back({shape[k], windows[k], dilations[k], strides[k], flags[k] != 0});
  }
  Writer text(kOp);
  text.add(shape);
  add_per_axis(text, windows);
  text.keyword("dilation", dilations, 1);
  if (std::any_of(flags.begin(), flags.end(), [](std::int64_t f) { return f != 0; })) {
    std::string words;
    for (const std::int64_t f : flags) {
      words += (words.empty() ? "(" : ",") + std::string(f != 0 ? "True" : "False");
    }
    text.keyword("causal", words + (flags.size() == 1 ? ",)" : ")"));
  }
  text.keyword("stride", strides, 1);
  return product(kOp, text.done(), neighborhood_axes(all));
}

RegularPtr sliding_tile(Axes shape, Axes tile, Axes window) {
  constexpr const char* kOp = "sliding_tile";
  check_shape(kOp, shape);
  const auto tiles = per_axis(kOp, "tile", tile, shape.size(), 1);
  const auto windows = per_axis(kOp, "window", window, shape.size(), 1);
  std::vector<GridAxis> axes;
  for (std::size_t k = 0; k < shape.size(); ++k) {
    axes.push_back(tile_axis(shape[k], tiles[k], windows[k]));
  }
  Writer text(kOp);
  text.add(shape);
  add_per_axis(text, tiles);
  add_per_axis(text, windows);
  return product(kOp, text.done(), std::move(axes));
}

namespace {

std::vector<std::int64_t> list_or(const Call& call, std::size_t position, const char* argument,
                                  std::int64_t otherwise) {
  return text::is_none(call, position) ? std::vector{otherwise} : read_list(call, position, argument);
}

const Family kSwin{"swin", [](const Call& given) -> PatternPtr {
                     const Call call = ordered(given, {"height", "width", "window"}, {"shift"});
                     return swin(integer(call, 0, "height"), integer(call, 1, "width"), read_list(call, 2, "window"),
                                 list_or(call, 3, "shift", 0));
                   }};
const Family kAxial{"axial", [](const Call& given) -> PatternPtr {
                      const Call call = ordered(given, {"height", "width"});
                      return axial(integer(call, 0, "height"), integer(call, 1, "width"));
                    }};
const Family kNeighborhood{"neighborhood", [](const Call& given) -> PatternPtr {
                             const Call call = ordered(given, {"shape", "window"}, {"dilation", "causal", "stride"});
                             return neighborhood(read_list(call, 0, "shape"), read_list(call, 1, "window"),
                                                 list_or(call, 2, "dilation", 1), read_flags(call, 3, "causal"),
                                                 list_or(call, 4, "stride", 1));
                           }};
const Family kSlidingTile{"sliding_tile", [](const Call& given) -> PatternPtr {
                            const Call call = ordered(given, {"shape", "tile", "window"});
                            return sliding_tile(read_list(call, 0, "shape"), read_list(call, 1, "tile"),
                                                read_list(call, 2, "window"));
                          }};

}  // namespace
}  // namespace fretwork::patterns
