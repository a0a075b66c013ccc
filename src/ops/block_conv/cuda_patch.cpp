// The host side of the patch kernel: does a class suit it, its plan, the launch.
#include <algorithm>
#include <functional>
#include <limits>
#include <map>
#include <numeric>
#include <string>

#include "ops/block_conv/cuda_operands.h"
#include "ops/block_conv/params_patch.cuh"
#include "runtime/plan_cache.h"

namespace fretwork::block_conv::hopper {
namespace {

namespace driver = fretwork::cuda;
using namespace blocks;  // NOLINT: the host side that it shares with the block products

/// Places for each pixel of the result up to which this kernel pays. Elsewhere columns of pixels are fetched for every
/// kernel position, from images whose channels are neighbours: of those that are `turned` here, that takes a copy.
double most_places(int block, bool turned) {
  if (turned) {
    return block == 16 ? 1.05 : 1.3;
  }
  return block == 32 ? 1.05 : 0.0;  // others are as fast with columns, or faster
}

KernelSpec instance(DType dtype, int block, bool sparse_k, bool turned, bool rows) {
  const auto flag = [](bool value) { return value ? ", true" : ", false"; };
  return {"ops/block_conv/kernel_patch.cuh",
          "fretwork::block_conv::patch<" + std::string(device_type(dtype)) + ", " + std::to_string(block) +
              flag(sparse_k) + flag(turned) + flag(rows) + ">",
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
        const bool turned = (order & 2) != 0;
        if (most_places(block, turned) > 0) {
          list.push_back(instance(dtype, block, (order & 1) != 0, turned, (order & 4) != 0));
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

/// One axis of the line of places. What it leaves out of the positions that a row reads lies in the margin before the
/// next row: zeros in both.
std::int64_t places_of(const AxisClass& axis, std::int64_t size) {
  const std::int64_t span = axis.count + reach_of(axis), margin = std::max<std::int64_t>(0, -axis.first);
  return std::min(span, std::max({axis.count, size - axis.first, span - margin}));
}

/// How a class of pixels lies in one line of places, and what a tile of them reads.
struct PatchShape {
  std::int64_t row, rows, images;
  int columns = 1, column = kTilePlaces;  ///< a patch is this many columns of so many places

  PatchShape(const Image& in, const AxisClass& y, const AxisClass& x)
      : row(places_of(x, in.w)), rows(places_of(y, in.h)), images(in.n) {
    constexpr int kMostOfColumn = 256, kEight = 8;  // of the copy engine; of swizzled rows
    const std::int64_t reach = reach_of(y) * row + reach_of(x);
    columns = static_cast<int>(ceil_div(kTilePlaces + reach, std::int64_t{kMostOfColumn}));
    column =
        static_cast<int>(ceil_div(ceil_div(kTilePlaces + reach, std::int64_t{columns}), std::int64_t{kEight})) * kEight;
  }
  int places() const { return columns * column; }
  std::int64_t line() const { return images * rows * row; }
  std::int64_t tiles() const { return ceil_div(line(), std::int64_t{kTilePlaces}); }
  int stride() const { return static_cast<int>(ceil_div(places() * 128, 1024)) * 1024; }
  /// Of patches that have room beside the rest.
  int count(bool turned, bool rows) const {
    return std::min(kMostPatches, (kPatchShared - patch_static(turned) - patch_rest(turned, rows)) / stride());
  }
};

struct PatchPlan {
  driver::DeviceBuffer segments, channels, steps;
  int segment_count = 0;
  std::size_t bytes() const { return segments.bytes() + channels.bytes() + steps.bytes(); }
};

/// The blocks of 64 rows, by (64 channels, kernel position, block of channels in them).
using Lines = std::map<std::array<int, 3>, std::array<int, 4>>;

/// `row` is the first of the 64. Blocks of 128 count as four of 64.
Lines lines_of(const Problem& p, const AxisClass& y, const AxisClass& x, std::int64_t row) {
  const auto block = static_cast<int>(p.block_rows());
  const int unit = std::min(block, 64), along = 64 / unit, split = block / unit;
  const auto half = static_cast<int>(row / 64 % split);
  Lines found;
  for (std::size_t r = 0; r < y.taps.size(); ++r) {
    for (std::size_t s = 0; s < x.taps.size(); ++s) {
      const std::int64_t tap = y.taps[r] * p.x.taps + x.taps[s];
      for (int i = 0; i < along && row / block + i < p.lines(); ++i) {
        for (const auto& [other, number] : p.index().line(tap * p.lines() + row / block + i)) {
          for (int part = 0; part < split; ++part) {
            const int column = static_cast<int>(other) * split + part;
            const std::array key{column / along, static_cast<int>(r * x.taps.size() + s), column % along};
            auto [at, fresh] = found.try_emplace(key, std::array{-1, -1, -1, -1});
            at->second[static_cast<std::size_t>(i)] = (static_cast<int>(number) * split + half) * split + part;
          }
        }
      }
    }
  }
  return found;
}

/// Sets of 64 rows that a tile computes together: those of about as many steps, so that no warpgroup waits for another.
std::vector<std::array<std::int64_t, 2>> pairs_of(const std::vector<Lines>& lines) {
  std::vector<std::int64_t> order(lines.size());
  std::iota(order.begin(), order.end(), std::int64_t{0});
  std::ranges::stable_sort(order, std::greater<>(),
                           [&](std::int64_t n) { return lines[static_cast<std::size_t>(n)].size(); });
  if (order.size() % 2 != 0) {
    order.push_back(static_cast<std::int64_t>(lines.size()));  // rows that the result does not have
  }
  std::vector<std::array<std::int64_t, 2>> pairs;
  for (std::size_t n = 0; n < order.size(); n += 2) {
    pairs.push_back({order[n], order[n + 1]});
  }
  return pairs;
}

PatchPlan make_plan(const Problem& p, const AxisClass& y, const AxisClass& x, int line_row, int device) {
  const auto block = static_cast<int>(p.block_rows());
  const auto blocks = static_cast<std::size_t>(64 / std::min(block, 64));
  std::vector<Lines> lines;
  for (std::int64_t row = 0; row < p.lines() * block; row += 64) {
    lines.push_back(lines_of(p, y, x, row));
  }
  std::vector<PatchSegment> segments;
  std::vector<int> channels, steps;
  for (const auto& pair : pairs_of(lines)) {
    PatchSegment segment{};
    segment.patches = static_cast<int>(channels.size());
    std::map<int, int> patches;  // of 64 channels: their patch
    const auto lines_at = [&](std::size_t half) -> const Lines& {
      static const Lines kNone;
      const auto at = static_cast<std::size_t>(pair[half]);
      return at < lines.size() ? lines[at] : kNone;
    };
    for (const std::size_t half : {0, 1}) {
      for (const auto& [key, numbers] : lines_at(half)) {
        patches[key[0]] = 0;
      }
    }
    for (auto& [group, patch] : patches) {
      patch = segment.patch_count++;
      channels.push_back(group);
    }
    for (const std::size_t half : {0, 1}) {
      segment.rows[half] = static_cast<int>(pair[half]) * 64;
      segment.first[half] = static_cast<int>(steps.size() / (1 + blocks));
      for (const auto& [key, numbers] : lines_at(half)) {
        const auto [group, tap, column] = key;
        const auto taps_x = static_cast<int>(x.taps.size());
        const int shift = y.offsets[static_cast<std::size_t>(tap / taps_x)] * line_row +
                          x.offsets[static_cast<std::size_t>(tap % taps_x)];
        steps.push_back((patches[group] << kColumnBits | column) << kShiftBits | shift);
        steps.insert(steps.end(), numbers.begin(), numbers.begin() + static_cast<std::ptrdiff_t>(blocks));
      }
      segment.last[half] = static_cast<int>(steps.size() / (1 + blocks));
    }
    segments.push_back(segment);
  }
  return {driver::DeviceBuffer(device, segments.data(), segments.size() * sizeof(PatchSegment)),
          driver::DeviceBuffer(device, channels.data(), channels.size() * sizeof(int)),
          driver::DeviceBuffer(device, steps.data(), steps.size() * sizeof(int)), static_cast<int>(segments.size())};
}

std::shared_ptr<const PatchPlan> find_plan(const Problem& p, const AxisClass& y, const AxisClass& x, int line_row,
                                           const Context& context) {
  static PlanCache<PatchPlan>& cache = *std::make_unique<PlanCache<PatchPlan>>().release();
  std::string key = "patch " + class_key(p, y, x) + " " + std::to_string(line_row) + " " +
                    std::to_string(context.device.index) + " " + p.layout->key();
  auto plan = cache.get(hash128(key), [&] { return make_plan(p, y, x, line_row, context.device.index); });
  if (driver::is_capturing(context.stream)) {
    cache.pin(plan);
  }
  return plan;
}

bool suits(const PatchShape& shape, const AxisClass& y, const AxisClass& x, double most) {
  const auto pixels = static_cast<double>(shape.images * y.count * x.count);
  const bool fits = shape.places() < 1 << kShiftBits && shape.row >= 8 && shape.row * shape.rows >= kHalfPlaces &&
                    shape.line() < 1 << 30;
  return fits && x.mul == 1 && y.mul == 1 && y.taps.size() * x.taps.size() > 1 &&
         static_cast<double>(shape.line()) <= most * pixels;
}

/// A column of places of a patch, or pixels that have yet to be turned.
std::optional<Map> image_map(const Image& in, const PatchShape& shape, const AxisClass& y, const AxisClass& x,
                             bool turned) {
  if (turned) {
    const auto view = make_tiled_view(in.data, {in.h * in.w, in.c, in.n, 1}, {1, in.c_stride, in.n_stride, 0});
    return view ? std::optional(view->map(64, kPatchChannels)) : std::nullopt;
  }
  const driver::PixelMap map = pixel_map(in, {x.first, y.first}, {1, 1}, {shape.row, shape.rows});
  return driver::can_map_pixels(map) ? std::optional(pixels_of(map, kPatchChannels, shape.column)) : std::nullopt;
}

}  // namespace

bool run_patches(const Problem& p, const Blocks& blocks, const Image& in, const AxisClass& y, const AxisClass& x,
                 Context& context) {
  const Image out = class_of(p, y, x);
  const bool turned = !channels_last(in), rows = channels_last(out);
  const bool counted = out.n * out.n_stride / kMapUnit < std::numeric_limits<int>::max();  // as the kernel does
  if ((turned && !pixels_last(in)) || (!rows && !pixels_last(out)) || !counted) {
    return false;
  }
  const PatchShape shape(in, y, x);
  if (turned && in.w > shape.row) {
    return false;  // rows of pixels that no place stands for
  }
  const int patches = shape.count(turned, rows);
  const auto block = static_cast<int>(p.block_rows());
  if (patches < 2 || !suits(shape, y, x, most_places(std::min(block, 64), turned))) {
    return false;
  }
  const auto image = image_map(in, shape, y, x, turned);
  const int device = context.device.index, multiprocessors = driver::device_info(device).multiprocessors;
  const std::int64_t sets = ceil_div(p.lines() * block, std::int64_t{64});  // of 64 rows; two make a segment
  const std::int64_t total = shape.tiles() * ceil_div(sets, std::int64_t{2});
  if (!image || total < multiprocessors || total > 1 << 30) {
    return false;
  }
  const auto plan = find_plan(p, y, x, static_cast<int>(shape.row), context);
  const auto unit = static_cast<std::uint32_t>(std::min(block, 64));
  PatchParams params{};
  params.sparse = blocks.view().map(unit, unit);
  params.image = *image;
  params.out = out.data;
  params.unit_n = static_cast<int>(out.n_stride / kMapUnit);
  params.unit_h = static_cast<int>(out.h_stride / kMapUnit);
  params.unit_w = static_cast<int>(out.w_stride / kMapUnit);
  params.out_n = out.n_stride;
  params.out_c = out.c_stride;
  params.segments = static_cast<const PatchSegment*>(plan->segments.data());
  params.channels = static_cast<const int*>(plan->channels.data());
  params.steps = static_cast<const int*>(plan->steps.data());
  params.segment_count = plan->segment_count;
  params.total = static_cast<int>(total);
  params.sparse_block = blocks.view().moves(2);
  params.block_count = static_cast<int>(p.layout->nnz());
  params.split_bits = block == 128 ? 1 : 0;
  params.line = {static_cast<int>(shape.row),
                 static_cast<int>(shape.rows * shape.row),
                 static_cast<int>(y.first),
                 static_cast<int>(x.first),
                 static_cast<int>(in.n),
                 Divisor(static_cast<unsigned>(shape.row)),
                 Divisor(static_cast<unsigned>(shape.rows * shape.row))};
  params.patch_count = patches;
  params.patch_stride = shape.stride();
  params.patch_columns = shape.columns;
  params.column_places = shape.column;
  params.in_height = static_cast<int>(in.h);
  params.in_width = static_cast<int>(in.w);
  params.by_width = Divisor(static_cast<unsigned>(in.w));
  params.width = static_cast<int>(out.w);
  params.height = static_cast<int>(out.h);
  params.rows = static_cast<int>(out.c);
  params.bias = p.bias;
  params.bias_stride = p.bias_stride;
  get_kernel(instance(p.dtype, static_cast<int>(unit), blocks.view().last, turned, rows), device)
      .launch(std::min<std::int64_t>(total, multiprocessors), kThreads,
              patches * params.patch_stride + patch_rest(turned, rows), &params, context.stream);
  return true;
}

}  // namespace fretwork::block_conv::hopper
