// The convolution on the Hopper kernels of src/blocks. The kernel positions of a weight are the columns of one wide
// block matrix, side by side. TMA in im2col mode loads the dense operand from the images: a column of pixels at a time,
// shifted by the offset of a kernel position, with zeros outside the image.
//
// The gradient of the input of a strided convolution is one such product for each residue class of output positions
// modulo the stride. Only some kernel positions belong to a class; they read integer input positions.
#include "ops/block_conv/cuda/hopper.h"

#include <algorithm>
#include <bit>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "ops/block_conv/cuda/operands.h"
#include "runtime/device_plan.h"

namespace fretwork::block_conv::hopper {
namespace {

namespace driver = fretwork::cuda;
using namespace blocks;  // NOLINT: the host side that it shares with the block products

// ---------------------------------------------------------------------------------------------- which kernel

std::vector<KernelSpec> list_kernels(const std::string& arch) {
  std::vector<KernelSpec> list;
  if (arch != "sm_90a") {
    return list;
  }
  list.push_back(turn_instance());
  list.push_back(pack_instance());
  for (const DType dtype : {DType::f16, DType::bf16}) {
    for (const int size : {256, 128, 32, 16}) {
      for (int order = 0; order < 4; ++order) {
        list.push_back(spmm_instance(dtype, size, (order & 1) != 0, true, (order & 2) != 0, true));
      }
    }
    list.push_back(sdd_instance(dtype, false, false, true));
    list.push_back(sdd_instance(dtype, true, false, true));
  }
  return list;
}
const KernelList kKernels{"block_conv", list_kernels};

// ---------------------------------------------------------------------------------------------------- classes

driver::PixelMap pixel_map(const Image& in, const AxisClass& y, const AxisClass& x) {
  return hopper::pixel_map(in, {x.first, y.first}, {x.mul, y.mul}, {x.count, y.count});
}

/// Whether TMA can read such images in im2col mode after ChannelsLast has brought them to channels-last order.
bool can_gather(const Image& in, const AxisClass& y, const AxisClass& x) {
  Image copy = in;
  copy.data = reinterpret_cast<void*>(16);
  copy.w_stride = in.c;
  copy.h_stride = in.w * in.c;
  copy.n_stride = in.h * in.w * in.c;
  return y.fits() && x.fits() && driver::can_map_pixels(pixel_map(copy, y, x));
}

Pixels pixels_arg(const Image& in, const AxisClass& y, const AxisClass& x) {
  return {static_cast<int>(in.n * y.count * x.count),
          static_cast<int>(y.count * x.count),
          static_cast<int>(x.count),
          static_cast<int>(y.first),
          static_cast<int>(x.first),
          static_cast<int>(y.mul),
          static_cast<int>(x.mul)};
}

// ------------------------------------------------------------------------------------------------------ plans

/// The blocks of some kernel positions side by side, in column (position · stride + block column). `stride` is even, so
/// columns 2n and 2n + 1 always belong to the same position.
struct SideBySide {
  std::shared_ptr<const BlockLayout> layout;
  std::vector<int> numbers;  ///< packed index of each block of `layout`
  std::vector<int> offsets;  ///< of each position, encoded as in a step's column
  int stride;

  SideBySide(const Problem& p, const AxisClass& y, const AxisClass& x)
      : stride(static_cast<int>((p.others() + 1) / 2 * 2)) {
    const auto cols = std::max<std::size_t>(1, y.taps.size() * x.taps.size()) * static_cast<std::size_t>(stride);
    std::vector<int> grid(static_cast<std::size_t>(p.lines()) * cols, -1);
    for (std::size_t r = 0; r < y.taps.size(); ++r) {
      for (std::size_t s = 0; s < x.taps.size(); ++s) {
        const std::int64_t tap = y.taps[r] * p.x.taps + x.taps[s];
        const std::size_t column = offsets.size() * static_cast<std::size_t>(stride);
        offsets.push_back(x.offsets[s] << kChannelBits | y.offsets[r] << (kChannelBits + kOffsetBits));
        for (std::int64_t line = 0; line < p.lines(); ++line) {
          for (const auto& [other, block] : p.index().line(tap * p.lines() + line)) {
            grid[static_cast<std::size_t>(line) * cols + column + static_cast<std::size_t>(other)] =
                static_cast<int>(block);
          }
        }
      }
    }
    std::vector<std::uint8_t> mask(grid.size());
    for (std::size_t i = 0; i < grid.size(); ++i) {
      mask[i] = grid[i] >= 0 ? 1 : 0;
      if (grid[i] >= 0) {
        numbers.push_back(grid[i]);
      }
    }
    const std::int64_t block = p.block_rows();
    layout = BlockLayout::make({1, p.lines(), static_cast<std::int64_t>(cols), block, block}, mask);
  }
  /// Encodes a column, counted in units of `unit` channels, for the kernels.
  int column(int at, int unit) const {
    const int per_tap = stride * static_cast<int>(layout->sizes().block_rows) / unit;
    return offsets[static_cast<std::size_t>(at / per_tap)] | at % per_tap;
  }
  int number(int block) const { return block < 0 ? block : numbers[static_cast<std::size_t>(block)]; }
};

DevicePlan spmm_plan(const SideBySide& side, int parallel, int device) {
  SpmmPlan plan = balanced_plan(*side.layout, false, parallel, device);
  const auto width = static_cast<std::size_t>(1 + plan.group_rows);
  for (std::size_t at = 0; at < plan.steps.size(); at += width) {
    plan.steps[at] = side.column(plan.steps[at], static_cast<int>(side.layout->sizes().block_rows));
    for (std::size_t r = 1; r < width; ++r) {
      plan.steps[at + r] = side.number(plan.steps[at + r]);
    }
  }
  return DevicePlan(device, plan);
}

DevicePlan sdd_plan(const SideBySide& side, int slot, int device) {
  constexpr int kTimes = 16;  // K is split, so each tile runs many times
  SddPlan plan = make_sdd_plan(*side.layout, false, slot, kTimes, driver::device_info(device).multiprocessors);
  for (int& column : plan.columns) {
    column = side.column(column, slot);
  }
  for (int& block : plan.blocks) {
    block = side.number(block);
  }
  return DevicePlan(device, plan);
}

std::shared_ptr<const DevicePlan> find_plan(const Problem& p, const AxisClass& y, const AxisClass& x, int parallel,
                                            int slot, const Context& context) {
  const std::string key = "conv " + class_key(p, y, x) + " " + std::to_string(parallel) + " " + std::to_string(slot) +
                          " " + p.layout->key();
  return find_device_plan<DevicePlan>(key, context, [&](int device) {
    const SideBySide side(p, y, x);
    return slot == 0 ? spmm_plan(side, parallel, device) : sdd_plan(side, slot, device);
  });
}

// --------------------------------------------------------------------------------------------------- launches

/// Sets how the result is stored: by TMA as channels-last pixels of one stride, or as NCHW pixels. Threads store other
/// results through `params.image`.
void set_out(SpmmParams& params, const Image& out, bool rows) {
  const auto line = rows && channels_last(out) && one_line(out)
                        ? make_tiled_view(out.data, {out.c, out.pixels(), 1, 1}, {1, out.w_stride, 0, 0})
                        : std::nullopt;
  if (line) {
    params.out = line->map(64, 64);
    return;
  }
  const auto lines = rows ? std::nullopt : lines_of(out);
  params.image = image_out(out, rows);
  params.image.lines = lines && lines->can_be_written() ? 1 : 0;
  params.out = params.image.lines != 0 ? lines->map(64, 64) : params.dense;  // kernels prefetch the map
}

void run_class(const Problem& p, const Blocks& blocks, const Image& in, const AxisClass& y, const AxisClass& x,
               Context& context) {
  const Image out = class_of(p, y, x);
  const auto block = static_cast<int>(p.block_rows());
  const bool rows = out.c_stride == 1;
  const int device = context.device.index;
  const SpmmShape shape(block, out.pixels(), 1);
  const auto plan = find_plan(p, y, x, shape.bucket(), 0, context);
  const Workspace partials(context, shape.partial_bytes(*plan));
  const int unit = shape.wide ? 64 : block;
  const driver::PixelMap map = pixel_map(in, y, x);
  SpmmParams params = spmm_params(*plan, shape, *p.layout, partials.data());
  params.sparse = blocks.view().map(static_cast<std::uint32_t>(unit), static_cast<std::uint32_t>(unit));
  params.dense = pixels_of(map, unit, shape.width);
  if (!shape.wide) {
    params.pair = pixels_of(map, 2 * unit, shape.width);
  }
  set_out(params, out, rows);
  params.free = static_cast<int>(out.pixels());
  params.batches = {1, 1, 1};
  params.sparse_block = blocks.view().moves(2);
  params.pixels = pixels_arg(in, y, x);
  params.rows = static_cast<int>(out.c);
  params.bias = p.bias;
  params.bias_stride = p.bias_stride;
  get_kernel(spmm_instance(p.dtype, shape.wide ? shape.width : block, blocks.view().last, true, rows, true), device)
      .launch(std::min<std::int64_t>(params.total, driver::device_info(device).multiprocessors),
              shape.consumers() + 128, shape.shared(), &params, context.stream);
  if (plan->split_count > 0) {
    ReduceParams reduce = reduce_params(*plan, shape, partials.data(), 1);
    reduce.out = out.data;
    reduce.rows = out.c;
    reduce.free = out.pixels();
    reduce.pixels = params.pixels;
    reduce.image = image_out(out, rows);
    reduce.bias = p.bias;
    reduce.bias_stride = p.bias_stride;
    get_kernel(reduce_instance(p.dtype), device)
        .launch(shape.reduce_ctas(*plan), shape.consumers(), 0, &reduce, context.stream);
  }
}

bool run_product(const Problem& p, Context& context) {
  std::vector<AxisClass> ys, xs;
  for (std::int64_t a = 0; a < p.y.div; ++a) {
    ys.emplace_back(p.y, a, p.out.h);
  }
  for (std::int64_t b = 0; b < p.x.div; ++b) {
    xs.emplace_back(p.x, b, p.out.w);
  }
  std::erase_if(ys, [](const AxisClass& c) { return c.count == 0; });
  std::erase_if(xs, [](const AxisClass& c) { return c.count == 0; });
  for (const AxisClass& y : ys) {
    for (const AxisClass& x : xs) {
      if (!can_gather(p.in, y, x)) {
        return false;
      }
    }
  }
  const Blocks blocks(p, context);
  std::optional<ChannelsLast> copied;
  for (const AxisClass& y : ys) {
    for (const AxisClass& x : xs) {
      if (run_patches(p, blocks, p.in, y, x, context)) {
        continue;
      }
      if (!copied) {
        copied.emplace(p.in, false, context);
      }
      if (copied->image().data == p.in.data || !run_patches(p, blocks, copied->image(), y, x, context)) {
        run_class(p, blocks, copied->image(), y, x, context);
      }
    }
  }
  return true;
}

/// Into how many pieces K is split: the number with the least estimated time.
int pieces_of(int tiles, std::int64_t pixels, int multiprocessors) {
  constexpr int kMostPieces = 64;
  constexpr std::int64_t kLeastSpan = 512;
  int best = 1;
  double least = 1e30;
  for (int pieces = 1; pieces <= kMostPieces && (pieces == 1 || pixels / pieces >= kLeastSpan); ++pieces) {
    const double turns = static_cast<double>(ceil_div(tiles * pieces, multiprocessors));
    // Filling and draining the pipeline costs each wave about four stages of 64 pixels.
    const double time = turns * (static_cast<double>(pixels) / pieces + 256.0);
    if (time < least) {
      least = time;
      best = pieces;
    }
  }
  return best;
}

/// Parameters of dS that follow from the plan.
SddParams weight_params(const DevicePlan& plan, int block, int slot) {
  SddParams params{};
  params.out_block = static_cast<long long>(block) * block;
  params.strips = static_cast<const Strip*>(plan.segments.data());
  params.columns = static_cast<const int*>(plan.steps.data());
  params.blocks = static_cast<const int*>(plan.blocks.data());
  params.strip_count = plan.segment_count;
  params.lines = plan.groups_per_head;
  params.out_row = block;
  params.block = block;
  params.slot = slot;
  params.block_bits = std::countr_zero(static_cast<unsigned>(block));
  params.slot_bits = std::countr_zero(static_cast<unsigned>(slot));
  params.stages = plan.sdd_stages();
  params.stage_bytes = plan.stage_bytes;
  params.batches = {1, 1, 1};
  return params;
}

/// dy as the left operand of dS: NCHW images as they are, or all pixels in channels-last order, copied if necessary.
/// Every NCHW image begins with a stage of its own. Its last stage has fewer products of 16 pixels each.
class WeightLeft {
 public:
  WeightLeft(const Image& image, Context& context)
      : pixels_(image.h * image.w),
        stages_(ceil_div(pixels_, std::int64_t{64})),
        lines_(reads_lines(image) ? lines_of(image) : std::nullopt) {
    if (!lines_) {
      copied_.emplace(image, true, context);
      const Image& last = copied_->image();
      channels_ = make_tiled_view(last.data, {last.c, last.pixels(), 1, 1}, {1, last.w_stride, 0, 0});
    }
    depth_ = image.n * (lines_ ? stages_ * 64 : pixels_);
  }
  bool valid() const { return lines_ || channels_; }
  bool nchw() const { return lines_.has_value(); }
  std::int64_t depth() const { return depth_; }  ///< of dS: pixels, those of NCHW images rounded up to whole stages
  void set(SddParams& params) const {
    params.left = (lines_ ? *lines_ : *channels_).map(64, 64);
    params.depth = static_cast<int>(depth_);
    params.image_stages = static_cast<int>(stages_);
    params.last_steps = static_cast<int>(pixels_ - (stages_ - 1) * 64) / 16;
  }

 private:
  /// Whether whole products divide an image, and its last stage is little waste. A copy costs about as much as reading
  /// a quarter of the stages in vain.
  bool reads_lines(const Image& image) const {
    return pixels_ % 16 == 0 && stages_ * 64 <= pixels_ + pixels_ / 4 && !(channels_last(image) && one_line(image));
  }
  std::int64_t pixels_, stages_, depth_ = 0;
  std::optional<TiledView> lines_, channels_;
  std::optional<ChannelsLast> copied_;
};

bool run_weight(const Problem& p, Context& context) {
  const AxisClass y(p.y, 0, p.out.h), x(p.x, 0, p.out.w);
  if (!can_gather(p.in, y, x)) {
    return false;
  }
  const ChannelsLast in(p.in, false, context);
  const WeightLeft left(p.out, context);
  const auto block = static_cast<int>(p.block_rows());
  const int slot = std::clamp(block, 32, 64), device = context.device.index;
  const auto plan = find_plan(p, y, x, 0, slot, context);
  const int multiprocessors = driver::device_info(device).multiprocessors;
  const std::int64_t size = p.layout->nnz() * block * block;
  const int pieces = pieces_of(plan->segment_count, left.depth(), multiprocessors);
  const Workspace sums(context, static_cast<std::size_t>(size * pieces) * sizeof(float));
  if (!left.valid()) {
    return false;
  }
  SddParams params = weight_params(*plan, block, slot);
  left.set(params);
  params.right = pixels_of(pixel_map(in.image(), y, x), slot, 64);
  params.out = sums.data();
  params.out_z = size;
  params.total = plan->segment_count * pieces;
  params.pixels = pixels_arg(in.image(), y, x);
  params.span = static_cast<int>(ceil_div(ceil_div(left.depth(), pieces), std::int64_t{64}) * 64);
  get_kernel(sdd_instance(p.dtype, left.nchw(), false, true), device)
      .launch(std::min(params.total, multiprocessors), kThreads, plan->sdd_shared(), &params, context.stream);
  const SumParams sum{static_cast<const float*>(sums.data()),
                      p.values.data,
                      pieces,
                      static_cast<int>(p.layout->nnz()),
                      block,
                      block,
                      p.values.block_stride,
                      p.values.row_stride,
                      p.values.col_stride};
  get_kernel(sum_pieces_instance(p.dtype), device)
      .launch(std::min<std::int64_t>(ceil_div(size, 256), 1 << 14), 256, 0, &sum, context.stream);
  return true;
}

bool suits(const Problem& p, const Context& context) {
  const bool type = p.dtype == DType::f16 || p.dtype == DType::bf16;
  const bool work = p.layout->nnz() > 0 && p.in.pixels() > 0 && p.out.pixels() > 0;
  return type && work && has_kernels(p.layout->sizes()) && p.others() + 1 < kMostChannelBlocks &&
         driver::kernel_arch(context.device.index) == "sm_90a";
}

}  // namespace

bool run(const Problem& problem, Context& context) {
  if (!suits(problem, context)) {
    return false;
  }
  return problem.kind == Kind::product ? run_product(problem, context) : run_weight(problem, context);
}

}  // namespace fretwork::block_conv::hopper
