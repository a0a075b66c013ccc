// The host side of the patch kernel: does a class suit it, its plan, the launch.
#include <algorithm>
#include <map>
#include <string>

#include "ops/block_conv/cuda_operands.h"
#include "ops/block_conv/params_patch.cuh"
#include "runtime/plan_cache.h"

namespace fretwork::block_conv::hopper {
namespace {

namespace driver = fretwork::cuda;
using namespace blocks;  // NOLINT: the host side that it shares with the block products

/// Where this kernel pays. Blocks of 64 and more run as fast with im2col columns, and those of 16 faster.
constexpr int kBlock = 32;
/// A tile at the edge computes pixels that are not there; above this many times the image's pixels columns are faster.
constexpr double kMostWaste = 1.2;

KernelSpec instance(DType dtype, int block, bool sparse_k, bool rows) {
  const auto flag = [](bool value) { return value ? ", true" : ", false"; };
  return {"ops/block_conv/kernel_patch.cuh",
          "fretwork::block_conv::patch<" + std::string(device_type(dtype)) + ", " + std::to_string(block) +
              flag(sparse_k) + flag(rows) + ">",
          KernelSpec::kBySize};
}

std::vector<KernelSpec> list_kernels(const std::string& arch) {
  std::vector<KernelSpec> list;
  if (arch != "sm_90a") {
    return list;
  }
  for (const DType dtype : {DType::f16, DType::bf16}) {
    for (int order = 0; order < 4; ++order) {
      list.push_back(instance(dtype, kBlock, (order & 1) != 0, (order & 2) != 0));
    }
  }
  return list;
}
const KernelList kKernels{"block_conv", list_kernels};

/// What a tile reads, in rows of pixels.
struct PatchShape {
  int w, h;

  PatchShape(const AxisClass& y, const AxisClass& x)
      : w(kTileWidth + reach(x)), h(static_cast<int>((kTileHeight - 1) * y.mul) + 1 + reach(y)) {}
  int bytes() const { return w * h * kPatchChannels * 2; }
  int stride() const { return static_cast<int>(ceil_div(bytes(), 1024)) * 1024; }
  int count() const { return std::min(kMostPatches, (kPatchShared - kPatchRest) / stride()); }

 private:
  static int reach(const AxisClass& axis) {
    return axis.offsets.empty() ? 0 : *std::max_element(axis.offsets.begin(), axis.offsets.end());
  }
};

struct PatchPlan {
  driver::DeviceBuffer segments, channels, steps;
  int segment_count = 0;
  std::size_t bytes() const { return segments.bytes() + channels.bytes() + steps.bytes(); }
};

/// The blocks of 64 rows, by (64 channels, kernel position, block of channels in them).
using Lines = std::map<std::array<int, 3>, std::array<int, 4>>;

Lines lines_of(const Problem& p, const AxisClass& y, const AxisClass& x, std::int64_t row) {
  const auto block = static_cast<int>(p.block_rows());
  const int along = 64 / block;
  Lines found;
  for (std::size_t r = 0; r < y.taps.size(); ++r) {
    for (std::size_t s = 0; s < x.taps.size(); ++s) {
      const std::int64_t tap = y.taps[r] * p.x.taps + x.taps[s];
      for (int i = 0; i < along && row / block + i < p.lines(); ++i) {
        for (const auto& [other, number] : p.index().line(tap * p.lines() + row / block + i)) {
          const auto column = static_cast<int>(other);
          const std::array key{column / along, static_cast<int>(r * x.taps.size() + s), column % along};
          auto [at, fresh] = found.try_emplace(key, std::array{-1, -1, -1, -1});
          at->second[static_cast<std::size_t>(i)] = static_cast<int>(number);
        }
      }
    }
  }
  return found;
}

PatchPlan make_plan(const Problem& p, const AxisClass& y, const AxisClass& x, int patch_w, int device) {
  const auto block = static_cast<int>(p.block_rows());
  const auto blocks = static_cast<std::size_t>(64 / block);
  std::vector<PatchSegment> segments;
  std::vector<int> channels, steps;
  for (std::int64_t row = 0; row < p.lines() * block; row += kTileRows) {
    const Lines halves[2] = {lines_of(p, y, x, row), lines_of(p, y, x, row + 64)};
    PatchSegment segment{};
    segment.place = static_cast<int>(row / kTileRows);
    segment.patches = static_cast<int>(channels.size());
    std::map<int, int> patches;  // of 64 channels: their patch
    for (const Lines& half : halves) {
      for (const auto& [key, numbers] : half) {
        patches[key[0]] = 0;
      }
    }
    for (auto& [group, patch] : patches) {
      patch = segment.patch_count++;
      channels.push_back(group);
    }
    for (int half = 0; half < 2; ++half) {
      segment.first[half] = static_cast<int>(steps.size() / (1 + blocks));
      for (const auto& [key, numbers] : halves[half]) {
        const auto [group, tap, column] = key;
        const auto taps_x = static_cast<int>(x.taps.size());
        const int shift = y.offsets[static_cast<std::size_t>(tap / taps_x)] * patch_w +
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

std::shared_ptr<const PatchPlan> find_plan(const Problem& p, const AxisClass& y, const AxisClass& x, int patch_w,
                                           const Context& context) {
  static PlanCache<PatchPlan>& cache = *std::make_unique<PlanCache<PatchPlan>>().release();
  std::string key = "patch " + class_key(p, y, x) + " " + std::to_string(patch_w) + " " +
                    std::to_string(context.device.index) + " " + p.layout->key();
  auto plan = cache.get(hash128(key), [&] { return make_plan(p, y, x, patch_w, context.device.index); });
  if (driver::is_capturing(context.stream)) {
    cache.pin(plan);
  }
  return plan;
}

bool suits(const Image& in, const AxisClass& y, const AxisClass& x, const PatchShape& shape, std::int64_t tiles) {
  const bool fits = shape.count() >= 2 && shape.w * shape.h < 1 << kShiftBits && shape.h <= 256 && shape.w <= 256;
  const auto covered = static_cast<double>(tiles * kTileWidth * kTileHeight);
  return fits && x.mul == 1 && y.taps.size() * x.taps.size() > 1 &&
         covered <= kMostWaste * static_cast<double>(in.n * y.count * x.count);
}

}  // namespace

bool run_patches(const Problem& p, const Blocks& blocks, const Image& in, const AxisClass& y, const AxisClass& x,
                 Context& context) {
  const PatchShape shape(y, x);
  const std::int64_t tiles_w = ceil_div(x.count, std::int64_t{kTileWidth});
  const std::int64_t tiles_h = ceil_div(y.count, std::int64_t{kTileHeight}), tiles = in.n * tiles_w * tiles_h;
  if (p.block_rows() != kBlock || !suits(in, y, x, shape, tiles)) {
    return false;
  }
  const auto tiled = [](const Image& i) {
    return make_tiled_view(i.data, {i.c, i.w, i.h, i.n}, {1, i.w_stride, i.h_stride, i.n_stride});
  };
  const auto view = tiled(in);
  const auto block = static_cast<int>(p.block_rows());
  const int device = context.device.index, multiprocessors = driver::device_info(device).multiprocessors;
  const auto plan = find_plan(p, y, x, shape.w, context);
  const std::int64_t total = tiles * plan->segment_count;
  if (!view || total < multiprocessors || total > 1 << 30) {
    return false;
  }
  const Image out = class_of(p, y, x);
  const bool rows = out.c_stride == 1;
  const auto written = rows && channels_last(out) ? tiled(out) : std::nullopt;
  PatchParams params{};
  const auto unit = static_cast<std::uint32_t>(block);
  params.sparse = blocks.view().map(unit, unit);
  params.image = view->map(kPatchChannels, static_cast<std::uint32_t>(shape.w), static_cast<std::uint32_t>(shape.h));
  if (written) {
    params.out = written->map(kPatchChannels, kTileWidth, 8);
  } else {
    params.direct = image_out(out, rows);
    // Eight pixels of a row are neighbours; rows need not follow one another.
    params.direct.vector = rows ? params.direct.vector
                                : out.w_stride == 1 && out.h_stride % 8 == 0 && out.c_stride % 8 == 0 &&
                                      out.n_stride % 8 == 0 && reinterpret_cast<std::uintptr_t>(out.data) % 16 == 0;
  }
  params.segments = static_cast<const PatchSegment*>(plan->segments.data());
  params.channels = static_cast<const int*>(plan->channels.data());
  params.steps = static_cast<const int*>(plan->steps.data());
  params.segment_count = plan->segment_count;
  params.total = static_cast<int>(total);
  params.sparse_block = blocks.view().moves(2);
  params.block_count = static_cast<int>(p.layout->nnz());
  params.tiles_w = static_cast<int>(tiles_w);
  params.tiles_h = static_cast<int>(tiles_h);
  params.patch_count = shape.count();
  params.patch_stride = shape.stride();
  params.patch_bytes = shape.bytes();
  params.pitch = shape.w * static_cast<int>(y.mul);
  params.mul_h = static_cast<int>(y.mul);
  params.first_w = static_cast<int>(x.first);
  params.first_h = static_cast<int>(y.first);
  params.width = static_cast<int>(x.count);
  params.height = static_cast<int>(y.count);
  params.rows = static_cast<int>(out.c);
  params.bias = p.bias;
  params.bias_stride = p.bias_stride;
  get_kernel(instance(p.dtype, block, blocks.view().last, rows), device)
      .launch(std::min<std::int64_t>(total, multiprocessors), kThreads,
              params.patch_count * params.patch_stride + kPatchRest, &params, context.stream);
  return true;
}

}  // namespace fretwork::block_conv::hopper
