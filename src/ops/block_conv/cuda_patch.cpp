// The host side of the patch kernel: the shape of its tiles, its plan, the launch.
#include <algorithm>
#include <bit>
#include <string>

#include "ops/block_conv/cuda_operands.h"
#include "ops/block_conv/params_patch.cuh"
#include "runtime/plan_cache.h"

namespace fretwork::block_conv::hopper {
namespace {

namespace driver = fretwork::cuda;
using namespace blocks;  // NOLINT: the host side that it shares with the block products

constexpr int kChannels = 64;  ///< of a patch

KernelSpec instance(DType dtype, int block, bool sparse_k, bool rows) {
  const auto flag = [](bool value) { return value ? ", true" : ", false"; };
  return {"ops/block_conv/kernel_patch.cuh",
          "fretwork::block_conv::patch<" + std::string(device_type(dtype)) + ", " + std::to_string(block) +
              flag(sparse_k) + flag(rows) + ">",
          kPatchShared};
}

std::vector<KernelSpec> list_kernels(const std::string& arch) {
  std::vector<KernelSpec> list;
  for (const DType dtype : {DType::f16, DType::bf16}) {
    for (int order = 0; arch == "sm_90a" && order < 8; ++order) {
      list.push_back(instance(dtype, (order & 4) != 0 ? 16 : 32, (order & 1) != 0, (order & 2) != 0));
    }
  }
  return list;
}
const KernelList kKernels{"block_conv", list_kernels};

/// A rectangle of the result, and what it reads.
struct Rectangle {
  int w = 0, h = 0, patch_w = 0, patch_h = 0;
  std::int64_t tiles_w = 0, tiles_h = 0;

  int patch() const { return patch_w * patch_h; }
  std::int64_t tiles() const { return tiles_w * tiles_h; }
};

/// The one that needs the fewest tiles, and of these the smallest patch; none (w = 0) where no patch fits.
Rectangle best_rectangle(const AxisClass& y, const AxisClass& x) {
  const auto reach = [](const AxisClass& axis, int size) {
    const int last = axis.offsets.empty() ? 0 : *std::max_element(axis.offsets.begin(), axis.offsets.end());
    return static_cast<int>((size - 1) * axis.mul) + last + 1;
  };
  Rectangle best;
  for (int w = 1; w <= std::min<std::int64_t>(kPatchPixels, x.count); ++w) {
    Rectangle r{w, static_cast<int>(std::min<std::int64_t>(kPatchPixels / w, y.count))};
    while (r.h > 0 && reach(x, w) * reach(y, r.h) > kPatchRows) {
      --r.h;
    }
    if (r.h == 0) {
      continue;
    }
    r.patch_w = reach(x, w);
    r.patch_h = reach(y, r.h);
    r.tiles_w = ceil_div(x.count, w);
    r.tiles_h = ceil_div(y.count, r.h);
    if (best.w == 0 || r.tiles() < best.tiles() || (r.tiles() == best.tiles() && r.patch() < best.patch())) {
      best = r;
    }
  }
  return best;
}

/// Steps in the order of patches: (64 channels, kernel position, block of channels).
struct PatchPlan {
  DevicePlan plan;
  std::int64_t steps;    ///< of all groups
  std::int64_t patches;  ///< that all groups fetch
  std::size_t bytes() const { return plan.bytes(); }
};

PatchPlan make_plan(const Problem& p, const AxisClass& y, const AxisClass& x, int patch_w, int device) {
  const auto block = static_cast<int>(p.block_rows());
  const std::int64_t per_patch = kChannels / block, groups = ceil_div(p.others(), per_patch);
  const auto taps = static_cast<std::int64_t>(y.taps.size() * x.taps.size());
  const std::int64_t cols = groups * taps * per_patch;
  std::vector<int> grid(static_cast<std::size_t>(p.lines() * cols), -1);
  std::vector<int> shifts;
  for (std::size_t r = 0; r < y.taps.size(); ++r) {
    for (std::size_t s = 0; s < x.taps.size(); ++s) {
      const std::int64_t tap = y.taps[r] * p.x.taps + x.taps[s], at = std::ssize(shifts);
      shifts.push_back(y.offsets[r] * patch_w + x.offsets[s]);
      for (std::int64_t line = 0; line < p.lines(); ++line) {
        for (const auto& [other, number] : p.index().line(tap * p.lines() + line)) {
          const std::int64_t column = (other / per_patch * taps + at) * per_patch + other % per_patch;
          grid[static_cast<std::size_t>(line * cols + column)] = static_cast<int>(number);
        }
      }
    }
  }
  std::vector<std::uint8_t> mask(grid.size());
  std::vector<int> numbers;
  for (std::size_t i = 0; i < grid.size(); ++i) {
    mask[i] = grid[i] >= 0 ? 1 : 0;
    if (grid[i] >= 0) {
      numbers.push_back(grid[i]);
    }
  }
  const auto layout = BlockLayout::make({1, p.lines(), cols, block, block}, mask);
  SpmmPlan plan = make_spmm_plan(*layout, false, kNarrow / block, 0);
  const auto width = static_cast<std::size_t>(1 + plan.group_rows);
  std::int64_t patches = 0;
  for (const SpmmPlan::Segment& segment : plan.segments) {
    std::int64_t before = -1;
    for (std::int32_t k = segment.first; k < segment.last; ++k) {
      int* const step = plan.steps.data() + static_cast<std::size_t>(k) * width;
      const std::int64_t within = step[0] % per_patch, tap = step[0] / per_patch % taps,
                         group = step[0] / per_patch / taps;
      patches += group != before ? 1 : 0;
      before = group;
      step[0] = static_cast<int>((group << kColumnBits | within) << kShiftBits) | shifts[static_cast<std::size_t>(tap)];
      for (std::size_t r = 1; r < width; ++r) {
        step[r] = step[r] < 0 ? step[r] : numbers[static_cast<std::size_t>(step[r])];
      }
    }
  }
  const auto steps = std::ssize(plan.steps) / static_cast<std::int64_t>(width);
  return {DevicePlan(device, plan), steps, patches};
}

std::shared_ptr<const PatchPlan> find_plan(const Problem& p, const AxisClass& y, const AxisClass& x, int patch_w,
                                           const Context& context) {
  static PlanCache<PatchPlan>& cache = *std::make_unique<PlanCache<PatchPlan>>().release();
  std::string key = "patch";
  const auto add = [&](std::int64_t number) { key += " " + std::to_string(number); };
  for (const AxisClass* axis : {&y, &x}) {
    for (std::size_t n = 0; n < axis->taps.size(); ++n) {
      add(axis->taps[n]);
      add(axis->offsets[n]);
    }
    key += ",";
  }
  add(p.transposed ? 1 : 0);
  add(p.x.taps);
  add(patch_w);
  add(context.device.index);
  key += " " + p.layout->key();
  auto plan = cache.get(hash128(key), [&] { return make_plan(p, y, x, patch_w, context.device.index); });
  if (driver::is_capturing(context.stream)) {
    cache.pin(plan);
  }
  return plan;
}

}  // namespace

bool run_patches(const Problem& p, const Blocks& blocks, const Image& in, const AxisClass& y, const AxisClass& x,
                 Context& context) {
  const auto block = static_cast<int>(p.block_rows());
  const int device = context.device.index, multiprocessors = driver::device_info(device).multiprocessors;
  if (is_wide(block) || y.taps.size() * x.taps.size() < 2 || ceil_div(p.others(), kChannels / block) >= 1 << 16) {
    return false;
  }
  const Rectangle r = best_rectangle(y, x);
  if (r.w == 0 || r.patch() >= 1 << kShiftBits) {
    return false;
  }
  const auto plan = find_plan(p, y, x, r.patch_w, context);
  const std::int64_t tiles = in.n * r.tiles(), total = tiles * plan->plan.segment_count;
  // The other kernel cuts long sums where tiles are few. Of the two, the one that fetches fewer bytes of the images.
  const std::int64_t here = plan->patches * tiles * r.patch() * kChannels;
  const std::int64_t there = plan->steps * ceil_div(in.n * y.count * x.count, std::int64_t{kNarrow}) * kNarrow * block;
  if (total < multiprocessors || total > 1 << 30 || here >= there) {
    return false;
  }
  const auto view = make_tiled_view(in.data, {in.c, in.w, in.h, in.n}, {1, in.w_stride, in.h_stride, in.n_stride});
  if (!view) {
    return false;
  }
  const Image out = class_of(p, y, x);
  const bool rows = out.c_stride == 1;
  PatchParams params{};
  const auto unit = static_cast<std::uint32_t>(block);
  params.sparse = blocks.view().map(unit, unit);
  params.image = view->map(kChannels, static_cast<std::uint32_t>(r.patch_w), static_cast<std::uint32_t>(r.patch_h));
  params.steps = static_cast<const int*>(plan->plan.steps.data());
  params.segments = static_cast<const Segment*>(plan->plan.segments.data());
  params.stride = plan->plan.stride;
  params.segment_count = plan->plan.segment_count;
  params.total = static_cast<int>(total);
  params.sparse_block = blocks.view().moves(2);
  params.tile_w = r.w;
  params.tile_h = r.h;
  params.tiles_w = static_cast<int>(r.tiles_w);
  params.tiles_h = static_cast<int>(r.tiles_h);
  params.patch_w = r.patch_w;
  params.patch_bytes = r.patch() * kChannels * 2;
  params.mul_w = static_cast<int>(x.mul);
  params.mul_h = static_cast<int>(y.mul);
  params.first_w = static_cast<int>(x.first);
  params.first_h = static_cast<int>(y.first);
  params.width = static_cast<int>(x.count);
  params.height = static_cast<int>(y.count);
  params.out = image_out(out, rows);
  params.rows = static_cast<int>(out.c);
  params.bias = p.bias;
  params.bias_stride = p.bias_stride;
  get_kernel(instance(p.dtype, block, blocks.view().last, rows), device)
      .launch(std::min<std::int64_t>(total, multiprocessors), kNarrowThreads, kPatchShared, &params, context.stream);
  return true;
}

}  // namespace fretwork::block_conv::hopper
