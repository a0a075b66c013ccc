// The host side of the patch kernel: whether it suits a residue class, its plan, and its launch.
#include <algorithm>
#include <bit>
#include <functional>
#include <limits>
#include <map>
#include <numeric>
#include <span>
#include <string>

#include "ops/block_conv/cuda/operands.h"
#include "ops/block_conv/cuda/params_patch.cuh"
#include "runtime/device_plan.h"

namespace fretwork::block_conv::hopper {
namespace {

namespace driver = fretwork::cuda;
using namespace blocks;  // NOLINT: the host side that it shares with the block products

/// The largest ratio of places (padded positions) to pixels of the result for which this kernel is faster; 0 for never.
/// The alternative loads columns of pixels for every kernel position, and copies NCHW images (`turned` here) first.
/// Here every two sets of 64 output channels transpose NCHW images again, which costs large blocks more than it saves.
double most_places(int block, bool turned, std::int64_t sets) {
  constexpr std::int64_t kMostSets = 4;
  if (turned) {
    return block == 16 ? 1.05 : block == 32 || (block == 64 && sets <= kMostSets) ? 1.3 : 0.0;
  }
  return block == 32 ? 1.1 : 0.0;
}

/// Places of a tile. With channels-last images, the number with which the waves of tiles take the shortest time.
constexpr int kTileWidths[] = {kTilePlaces, kTilePlaces - 8, kTilePlaces - 16};
std::span<const int> tile_widths(bool turned, bool rows) {
  return std::span(kTileWidths).first(turned || !rows ? 1 : std::size(kTileWidths));
}

KernelSpec instance(DType dtype, int block, int places, bool sparse_k, bool turned, bool rows) {
  const auto flag = [](bool value) { return value ? ", true" : ", false"; };
  return {"ops/block_conv/cuda/patch.cuh",
          "fretwork::block_conv::patch<" + std::string(device_type(dtype)) + ", " + std::to_string(block) + ", " +
              std::to_string(places) + flag(sparse_k) + flag(turned) + flag(rows) + ">",
          KernelSpec::kBySize};
}

std::vector<KernelSpec> list_kernels(const std::string& arch) {
  std::vector<KernelSpec> list;
  if (arch != "sm_90a") {
    return list;
  }
  for (const DType dtype : {DType::f16, DType::bf16}) {
    for (const int block : {16, 32, 64}) {
      for (int order = 0; order < 8; ++order) {
        const bool turned = (order & 2) != 0, rows = (order & 4) != 0;
        for (const int places : tile_widths(turned, rows)) {
          if (most_places(block, turned, 1) > 0) {
            list.push_back(instance(dtype, block, places, (order & 1) != 0, turned, rows));
          }
        }
      }
    }
  }
  return list;
}
const KernelList kKernels{"block_conv", list_kernels};

int reach_of(const AxisClass& axis) {
  return axis.offsets.empty() ? 0 : *std::max_element(axis.offsets.begin(), axis.offsets.end());
}

/// Places along one axis of the line. Positions that a row reads beyond these fall into the padding before the next
/// row, which is zero as well.
std::int64_t places_of(const AxisClass& axis, std::int64_t size) {
  const std::int64_t span = axis.count + reach_of(axis), margin = std::max<std::int64_t>(0, -axis.first);
  return std::min(span, std::max({axis.count, size - axis.first, span - margin}));
}

/// The line of places of a residue class, and the patch that a tile of it reads.
struct PatchShape {
  std::int64_t row, rows, images;
  int columns = 1, column = kTilePlaces;  ///< a patch is `columns` loads of `column` places

  /// `even`: round the length of a row up to an even number.
  PatchShape(const Image& in, const AxisClass& y, const AxisClass& x, bool even)
      : row(places_of(x, in.w)), rows(places_of(y, in.h)), images(in.n) {
    row += even ? row % 2 : 0;
  }
  /// Sets the patch of a tile of `width` places. `turned`: it is not loaded in columns.
  void set_patch(const AxisClass& y, const AxisClass& x, bool turned, int width) {
    constexpr int kMostOfColumn = 256, kEight = 8;  // pixels per im2col load; rows of a swizzle atom
    const std::int64_t reach = reach_of(y) * row + reach_of(x);
    columns = turned ? 1 : static_cast<int>(ceil_div(width + reach, std::int64_t{kMostOfColumn}));
    column = static_cast<int>(ceil_div(ceil_div(width + reach, std::int64_t{columns}), std::int64_t{kEight})) * kEight;
  }
  int places() const { return columns * column; }
  /// Whether every pixel has a place.
  bool has_all(const Image& in, const AxisClass& y, const AxisClass& x) const {
    return x.first <= 0 && y.first <= 0 && in.w - x.first <= row && in.h - y.first <= rows;
  }
  std::int64_t line() const { return images * rows * row; }
  int stride(bool turned) const {
    return static_cast<int>(ceil_div((places() + (turned ? kSpareRows : 0)) * 128, 1024)) * 1024;
  }
  /// The number of patches that fit into shared memory.
  int count(bool turned, bool rows) const {
    return std::min(kMostPatches,
                    (kPatchShared - patch_static(turned, rows) - patch_rest(turned, rows)) / stride(turned));
  }
};

struct PatchPlan {
  driver::DeviceBuffer segments, channels, steps;
  int segment_count = 0;
  std::size_t bytes() const { return segments.bytes() + channels.bytes() + steps.bytes(); }
};

/// The blocks of a block row: packed index by (block column · kernel positions + kernel position).
using Row = std::map<std::int64_t, int>;

std::vector<Row> rows_of(const Problem& p, const AxisClass& y, const AxisClass& x) {
  const auto taps = static_cast<std::int64_t>(y.taps.size() * x.taps.size());
  std::vector<Row> rows(static_cast<std::size_t>(p.lines()));
  for (std::int64_t at = 0; at < taps; ++at) {
    const auto r = static_cast<std::size_t>(at) / x.taps.size(), s = static_cast<std::size_t>(at) % x.taps.size();
    const std::int64_t tap = y.taps[r] * p.x.taps + x.taps[s];
    for (std::int64_t n = 0; n < p.lines(); ++n) {
      for (const auto& [other, number] : p.index().line(tap * p.lines() + n)) {
        rows[static_cast<std::size_t>(n)][other * taps + at] = static_cast<int>(number);
      }
    }
  }
  return rows;
}

/// Block rows that fill 64 rows of an MMA, and the union of their columns: the packed index of each row's block, −1 for
/// none. Every column of the union is multiplied for all rows.
struct Set {
  std::array<int, 4> rows{-1, -1, -1, -1};
  std::map<std::int64_t, std::array<int, 4>> columns;

  void add(std::size_t at, int n, const Row& row) {
    rows[at] = n;
    for (const auto& [column, number] : row) {
      columns.try_emplace(column, std::array{-1, -1, -1, -1}).first->second[at] = number;
    }
  }
};

/// A bit for each column.
using Bits = std::vector<std::uint64_t>;

Bits bits_of(const Row& row, std::int64_t columns) {
  Bits bits(static_cast<std::size_t>(ceil_div(columns, std::int64_t{64})));
  for (const auto& [column, number] : row) {
    bits[static_cast<std::size_t>(column / 64)] |= std::uint64_t{1} << (column % 64);
  }
  return bits;
}
int common(const Bits& a, const Bits& b) {
  return std::transform_reduce(a.begin(), a.end(), b.begin(), 0, std::plus<>(),
                               [](std::uint64_t x, std::uint64_t y) { return std::popcount(x & y); });
}

/// The block rows of a set.
using Group = std::vector<std::size_t>;

/// Groups rows with common columns: the longest remaining row, then those that have most columns in common with the
/// group so far.
std::vector<Group> group_rows(const std::vector<Row>& rows, const std::vector<Bits>& bits, std::size_t along) {
  Group left(rows.size());
  std::iota(left.begin(), left.end(), std::size_t{0});
  std::ranges::stable_sort(left, std::greater<>(), [&](std::size_t n) { return rows[n].size(); });
  std::vector<Group> groups;
  while (!left.empty()) {
    Bits all(bits.front().size());
    groups.emplace_back();
    while (groups.back().size() < along && !left.empty()) {
      const auto best = groups.back().empty()
                            ? left.begin()
                            : std::ranges::max_element(left, {}, [&](auto n) { return common(bits[n], all); });
      std::ranges::transform(all, bits[*best], all.begin(), std::bit_or<>());
      groups.back().push_back(*best);
      left.erase(best);
    }
  }
  return groups;
}

/// Exchanges rows between groups while that reduces the number of columns to multiply.
void exchange_rows(std::vector<Group>& groups, const std::vector<Bits>& bits) {
  constexpr std::size_t kMostGroups = 64;  // bounds the time of the search
  const auto columns = [&](const Group& group) {
    Bits all(bits.front().size());
    for (const std::size_t n : group) {
      std::ranges::transform(all, bits[n], all.begin(), std::bit_or<>());
    }
    return common(all, all);
  };
  const auto improve = [&](Group& a, Group& b) {
    const int before = columns(a) + columns(b);
    for (std::size_t& x : a) {
      for (std::size_t& y : b) {
        std::swap(x, y);
        if (columns(a) + columns(b) < before) {
          return true;
        }
        std::swap(x, y);
      }
    }
    return false;
  };
  bool again = groups.size() <= kMostGroups;
  while (again) {
    again = false;
    for (std::size_t i = 0; i < groups.size(); ++i) {
      for (std::size_t j = i + 1; j < groups.size(); ++j) {
        again = improve(groups[i], groups[j]) || again;
      }
    }
  }
}

/// The sets of 64 rows, sorted by number of columns. Two consecutive sets share a tile, so its warpgroups have about
/// equal work.
std::vector<Set> sets_of(const std::vector<Row>& rows, std::size_t along, std::int64_t columns) {
  std::vector<Bits> bits(rows.size());
  std::ranges::transform(rows, bits.begin(), [&](const Row& row) { return bits_of(row, columns); });
  std::vector<Group> groups = group_rows(rows, bits, along);
  exchange_rows(groups, bits);
  std::vector<Set> sets(groups.size());
  for (std::size_t n = 0; n < groups.size(); ++n) {
    for (std::size_t at = 0; at < groups[n].size(); ++at) {
      sets[n].add(at, static_cast<int>(groups[n][at]), rows[groups[n][at]]);
    }
  }
  std::ranges::stable_sort(sets, std::greater<>(), [](const Set& set) { return set.columns.size(); });
  sets.resize((sets.size() + 1) / 2 * 2);
  return sets;
}

PatchPlan make_plan(const Problem& p, const AxisClass& y, const AxisClass& x, int line_row, int device) {
  const auto block = static_cast<int>(p.block_rows());
  const auto taps = static_cast<std::int64_t>(y.taps.size() * x.taps.size());
  const int along = 64 / block;
  const std::size_t step_size = static_cast<std::size_t>(1 + along);
  std::vector<PatchSegment> segments;
  std::vector<int> channels, steps;
  const std::vector<Set> sets = sets_of(rows_of(p, y, x), static_cast<std::size_t>(along), p.others() * taps);
  for (std::size_t n = 0; n < sets.size(); n += 2) {
    PatchSegment segment{};
    segment.patches = static_cast<int>(channels.size());
    std::map<std::int64_t, int> patches;  // index of the patch by group of 64 channels
    for (std::size_t half = 0; half < 2; ++half) {
      for (const auto& [column, numbers] : sets[n + half].columns) {
        patches[column / taps / along] = 0;
      }
    }
    for (auto& [group, patch] : patches) {
      patch = segment.patch_count++;
      channels.push_back(static_cast<int>(group));
    }
    for (std::size_t half = 0; half < 2; ++half) {
      const Set& set = sets[n + half];
      for (std::size_t i = 0; i < set.rows.size(); ++i) {
        segment.rows[half][i] = set.rows[i] < 0 ? kNoChannel : set.rows[i] * block;
      }
      segment.first[half] = static_cast<int>(steps.size() / step_size);
      for (const auto& [key, numbers] : set.columns) {
        const auto column = static_cast<int>(key / taps), tap = static_cast<int>(key % taps);
        const auto taps_x = static_cast<int>(x.taps.size());
        const int shift = y.offsets[static_cast<std::size_t>(tap / taps_x)] * line_row +
                          x.offsets[static_cast<std::size_t>(tap % taps_x)];
        steps.push_back((patches[column / along] << kColumnBits | column % along) << kShiftBits | shift);
        steps.insert(steps.end(), numbers.begin(), numbers.begin() + along);
      }
      segment.last[half] = static_cast<int>(steps.size() / step_size);
    }
    segments.push_back(segment);
  }
  return {driver::DeviceBuffer(device, segments.data(), segments.size() * sizeof(PatchSegment)),
          driver::DeviceBuffer(device, channels.data(), channels.size() * sizeof(int)),
          driver::DeviceBuffer(device, steps.data(), steps.size() * sizeof(int)), static_cast<int>(segments.size())};
}

std::shared_ptr<const PatchPlan> find_plan(const Problem& p, const AxisClass& y, const AxisClass& x, int line_row,
                                           const Context& context) {
  const std::string key = class_key(p, y, x) + " " + std::to_string(line_row) + " " + p.layout->key();
  return find_device_plan<PatchPlan>(key, context, [&](int device) { return make_plan(p, y, x, line_row, device); });
}

bool suits(const PatchShape& shape, const AxisClass& y, const AxisClass& x, double most) {
  const auto pixels = static_cast<double>(shape.images * y.count * x.count);
  const bool fits = shape.places() < 1 << kShiftBits && shape.row >= 8 && shape.row * shape.rows >= kHalfPlaces &&
                    shape.line() < 1 << 30;
  return fits && x.mul == 1 && y.mul == 1 && y.taps.size() * x.taps.size() > 1 &&
         static_cast<double>(shape.line()) <= most * pixels;
}

/// Whether NCHW results can be stored two pixels at a time, with a multiple of 16 bytes per image.
bool has_whole_lines(const Image& out) {
  return pixels_last(out) && out.h * out.w % kMapUnit == 0 && out.w % 2 == 0 && out.w >= kMapUnit;
}

/// The distance between tiles if each begins with a pixel at a multiple of 16 bytes. That pixel lies up to seven
/// pixels, and possibly the padding between two rows, behind the nominal first place.
std::int64_t pixel_places(std::int64_t row, std::int64_t width) { return kTilePlaces - 7 - (row - width); }

/// The TMA map of the input: im2col over places, or NCHW pieces.
std::optional<Map> image_map(const Image& in, const PatchShape& shape, const AxisClass& y, const AxisClass& x,
                             bool turned) {
  if (turned) {
    const auto view = lines_of(in);
    return view ? std::optional(view->map(64, kPatchChannels)) : std::nullopt;
  }
  const driver::PixelMap map = pixel_map(in, {x.first, y.first}, {1, 1}, {shape.row, shape.rows});
  return driver::can_map_pixels(map) ? std::optional(pixels_of(map, kPatchChannels, shape.column)) : std::nullopt;
}

int whole(std::int64_t size) { return static_cast<int>(size); }

/// One launch: its operands and its tiles.
struct PatchLaunch {
  const Problem& p;
  const AxisClass &y, &x;
  Image in, out;
  bool turned, rows;  ///< x is NCHW; the result is channels-last
  PatchShape shape;
  std::int64_t sets, tile_places, total;
  int width;  ///< places of a tile, some of which may belong to the next one

  PatchLaunch(const Problem& problem, const Image& image, const AxisClass& down, const AxisClass& right,
              int multiprocessors)
      : p(problem),
        y(down),
        x(right),
        in(image),
        out(class_of(p, y, x)),
        turned(!channels_last(in)),
        rows(channels_last(out)),
        shape(in, y, x, !rows),
        sets(ceil_div(p.lines() * p.block_rows(), std::int64_t{64})) {  // of 64 output channels; two make a segment
    const auto tiles = [&](std::int64_t places) {
      return places > 0 ? ceil_div(shape.line(), places) * ceil_div(sets, std::int64_t{2}) : 0;
    };
    width = *std::ranges::min_element(tile_widths(turned, rows), {}, [&](int places) {
      return ceil_div(tiles(places), std::int64_t{multiprocessors}) * places;
    });
    tile_places = rows ? width : pixel_places(shape.row, out.w);
    total = tiles(tile_places);
    shape.set_patch(y, x, turned, width);
  }

  int block() const { return whole(p.block_rows()); }
  int patches() const { return shape.count(turned, rows); }
  bool fits(int multiprocessors) const {
    const bool counted = out.n * out.n_stride / kMapUnit < std::numeric_limits<int>::max();  // the kernel uses int
    const bool reads = !turned || (pixels_last(in) && shape.has_all(in, y, x));
    const bool writes = rows || (has_whole_lines(out) && tile_places >= kTilePlaces * 7 / 8);
    return reads && writes && counted && patches() >= 2 && suits(shape, y, x, most_places(block(), turned, sets)) &&
           total >= multiprocessors && total <= 1 << 30;
  }
  PatchParams params(const PatchPlan& plan, const Blocks& blocks, const Map& image) const;
};

PatchParams PatchLaunch::params(const PatchPlan& plan, const Blocks& blocks, const Map& image) const {
  PatchParams params{};
  params.sparse = blocks.view().map(static_cast<std::uint32_t>(block()), static_cast<std::uint32_t>(block()));
  params.image = image;
  params.segments = static_cast<const PatchSegment*>(plan.segments.data());
  params.channels = static_cast<const int*>(plan.channels.data());
  params.steps = static_cast<const int*>(plan.steps.data());
  params.segment_count = plan.segment_count;
  params.total = whole(total);
  params.tile_places = whole(tile_places);
  params.sparse_block = blocks.view().moves(2);
  params.block_count = whole(p.layout->nnz());
  const std::int64_t image_places = shape.rows * shape.row;
  params.line = {whole(shape.row), whole(image_places), whole(y.first),       whole(x.first),
                 whole(in.n),      Divisor(shape.row),  Divisor(image_places)};
  params.patch_count = patches();
  params.patch_stride = shape.stride(turned);
  params.patch_columns = shape.columns;
  params.column_places = shape.column;
  params.in_height = whole(in.h);
  params.in_width = whole(in.w);
  params.by_width = Divisor(in.w);
  params.by_pieces = Divisor(ceil_div(in.h * in.w, std::int64_t{64}));
  params.width = whole(out.w);
  params.height = whole(out.h);
  params.rows = whole(out.c);
  params.by_out_width = Divisor(out.w);
  params.by_pixels = Divisor(out.h * out.w);
  params.out = out.data;
  params.unit_n = whole(out.n_stride / kMapUnit);
  params.unit_h = whole(out.h_stride / kMapUnit);
  params.unit_w = whole(out.w_stride / kMapUnit);
  params.out_n = out.n_stride;
  params.out_c = out.c_stride;
  params.bias = p.bias;
  params.bias_stride = p.bias_stride;
  return params;
}

}  // namespace

bool run_patches(const Problem& p, const Blocks& blocks, const Image& in, const AxisClass& y, const AxisClass& x,
                 Context& context) {
  const int device = context.device.index, multiprocessors = driver::device_info(device).multiprocessors;
  const PatchLaunch launch(p, in, y, x, multiprocessors);
  const auto image = launch.fits(multiprocessors) ? image_map(in, launch.shape, y, x, launch.turned) : std::nullopt;
  if (!image) {
    return false;
  }
  const auto plan = find_plan(p, y, x, whole(launch.shape.row), context);
  const PatchParams params = launch.params(*plan, blocks, *image);
  get_kernel(instance(p.dtype, launch.block(), launch.width, blocks.view().last, launch.turned, launch.rows), device)
      .launch(std::min<std::int64_t>(launch.total, multiprocessors), kThreads,
              params.patch_count * params.patch_stride + patch_rest(launch.turned, launch.rows), &params,
              context.stream);
  return true;
}

}  // namespace fretwork::block_conv::hopper
