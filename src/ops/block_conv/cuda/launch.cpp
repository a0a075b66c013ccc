// The convolution on a GPU: runs the Hopper kernels if they suit the problem, else the generic ones.
#include <algorithm>
#include <limits>
#include <string>
#include <vector>

#include "blocks/hopper.h"
#include "fretwork/error.h"
#include "ops/block_conv/cuda/hopper.h"
#include "ops/block_conv/cuda/params.h"
#include "runtime/device_plan.h"

namespace fretwork::block_conv {
namespace {

namespace driver = fretwork::cuda;

constexpr const char* kFile = "ops/block_conv/cuda/generic.cuh";
constexpr std::int64_t kWidth = 64;

/// Rows of accumulators per thread. Blocks of up to 16 rows would leave most of a larger tile empty.
int rows_of(std::int64_t block_rows) { return block_rows <= 16 ? 1 : 4; }

KernelSpec instance(const std::string& kernel, DType dtype, int rows) {
  return {kFile, "fretwork::block_conv::" + kernel + "<" + device_type(dtype) + ", " + std::to_string(rows) + ">", 0};
}

std::vector<KernelSpec> list_kernels(const std::string&) {
  std::vector<KernelSpec> list;
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    for (const int rows : {1, 4}) {
      list.push_back(instance("product", dtype, rows));
      list.push_back(instance("weight", dtype, rows));
    }
    list.push_back(blocks::sum_pieces_instance(dtype));
  }
  return list;
}
const KernelList kKernels{"block_conv", list_kernels};

/// The plan of the generic kernels on the device; see make_plan.
struct DevicePlan {
  driver::DeviceBuffer lines, entries;
  std::size_t bytes() const { return lines.bytes() + entries.bytes(); }
};

/// For a product, `lines` has the offset of each block row's first entry, and entries are sorted by block row. For a
/// weight, `lines` has the block row of each block, and entries are in the order of packed blocks.
DevicePlan make_plan(const Problem& p, int device) {
  const bool weight = p.kind == Kind::weight;
  const auto taps_x = static_cast<int>(p.x.taps);
  std::vector<Entry> entries(static_cast<std::size_t>(p.layout->nnz()));
  std::vector<int> lines(weight ? entries.size() : static_cast<std::size_t>(p.lines()) + 1);
  std::size_t next = 0;
  for (std::int64_t line = 0; line < p.lines(); ++line) {
    for (int t = 0; t < static_cast<int>(p.taps()); ++t) {
      for (const auto& [other, block] : p.index().line(t * p.lines() + line)) {
        const std::size_t at = weight ? static_cast<std::size_t>(block) : next++;
        entries[at] = {t / taps_x, t % taps_x, static_cast<int>(other), static_cast<int>(block)};
        if (weight) {
          lines[at] = static_cast<int>(line);
        }
      }
    }
    if (!weight) {
      lines[static_cast<std::size_t>(line) + 1] = static_cast<int>(next);
    }
  }
  return {driver::DeviceBuffer(device, lines.data(), lines.size() * sizeof(int)),
          driver::DeviceBuffer(device, entries.data(), entries.size() * sizeof(Entry))};
}

std::shared_ptr<const DevicePlan> find_plan(const Problem& p, const Context& context) {
  const std::string key = std::to_string(static_cast<int>(p.kind)) + (p.transposed ? " t " : " n ") +
                          std::to_string(p.x.taps) + " " + p.layout->key();
  return find_device_plan<DevicePlan>(key, context, [&](int device) { return make_plan(p, device); });
}

AxisArg axis_arg(const Axis& a) {
  return {static_cast<int>(a.mul), static_cast<int>(a.div), static_cast<int>(a.first), static_cast<int>(a.step)};
}
ImageArg image_arg(const Image& i) {
  return {i.data,
          i.n_stride,
          i.c_stride,
          i.h_stride,
          i.w_stride,
          static_cast<int>(i.n),
          static_cast<int>(i.c),
          static_cast<int>(i.h),
          static_cast<int>(i.w)};
}

std::int64_t launchable(std::int64_t ctas) {
  if (ctas > std::numeric_limits<std::int32_t>::max()) {
    throw Error("block_conv2d", "x", "fewer than 2^31 tiles of work", std::to_string(ctas));
  }
  return ctas;
}

void run_product(const Problem& p, Context& context) {
  const auto plan = find_plan(p, context);
  const int rows = rows_of(p.block_rows());
  ProductParams params{};
  params.in = image_arg(p.in);
  params.out = image_arg(p.out);
  params.blocks = {p.values.data,
                   p.values.block_stride,
                   p.transposed ? p.values.col_stride : p.values.row_stride,
                   p.transposed ? p.values.row_stride : p.values.col_stride,
                   static_cast<int>(p.block_rows()),
                   static_cast<int>(p.block_cols())};
  params.y = axis_arg(p.y);
  params.x = axis_arg(p.x);
  params.lines = static_cast<const int*>(plan->lines.data());
  params.entries = static_cast<const Entry*>(plan->entries.data());
  params.bias = p.bias;
  params.bias_stride = p.bias_stride;
  params.line_count = static_cast<int>(p.lines());
  params.row_tiles = static_cast<int>(ceil_div(p.block_rows(), 16 * rows));
  const std::int64_t ctas = ceil_div(p.out.pixels(), kWidth) * p.lines() * params.row_tiles;
  get_kernel(instance("product", p.dtype, rows), context.device.index)
      .launch(launchable(ctas), 256, 0, &params, context.stream);
}

void run_weight(const Problem& p, Context& context) {
  const auto plan = find_plan(p, context);
  const int rows = rows_of(p.block_rows());
  WeightParams params{};
  params.in = image_arg(p.in);
  params.out = image_arg(p.out);
  params.y = axis_arg(p.y);
  params.x = axis_arg(p.x);
  params.entries = static_cast<const Entry*>(plan->entries.data());
  params.lines = static_cast<const int*>(plan->lines.data());
  params.blocks = static_cast<int>(p.layout->nnz());
  params.rows = static_cast<int>(p.block_rows());
  params.cols = static_cast<int>(p.block_cols());
  params.row_tiles = static_cast<int>(ceil_div(p.block_rows(), 16 * rows));
  params.col_tiles = static_cast<int>(ceil_div(p.block_cols(), kWidth));
  const std::int64_t tiles = p.layout->nnz() * params.row_tiles * params.col_tiles;
  // Split the pixels into pieces of at least 256, so that there are about 2048 tiles.
  const std::int64_t pixels = p.out.pixels(), wanted = ceil_div(std::int64_t{2048}, tiles);
  const std::int64_t pieces = std::clamp<std::int64_t>(wanted, 1, std::max<std::int64_t>(1, pixels / 256));
  params.span = ceil_div(ceil_div(std::max<std::int64_t>(pixels, 1), pieces), 16) * 16;
  const std::int64_t size = p.layout->nnz() * p.block_rows() * p.block_cols();
  const Workspace sums(context, static_cast<std::size_t>(pieces * size) * sizeof(float));
  params.sums = static_cast<float*>(sums.data());
  get_kernel(instance("weight", p.dtype, rows), context.device.index)
      .launch(launchable(tiles * pieces), 256, 0, &params, context.stream);
  const blocks::SumParams sum{params.sums,           p.values.data,       static_cast<int>(pieces),
                              params.blocks,         params.rows,         params.cols,
                              p.values.block_stride, p.values.row_stride, p.values.col_stride};
  get_kernel(blocks::sum_pieces_instance(p.dtype), context.device.index)
      .launch(std::min<std::int64_t>(ceil_div(size, 256), 1 << 14), 256, 0, &sum, context.stream);
}

}  // namespace

void cuda::run(const Problem& problem, Context& context) {
  if (problem.dtype == DType::f64) {
    throw Error("block_conv2d", "x", "float32, float16 or bfloat16 on a GPU", "float64");
  }
  constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max() / 2;
  for (const Image& image : {problem.in, problem.out}) {
    if (std::max({image.n, image.h, image.w, image.c}) > kMost || image.pixels() > kMost) {
      throw Error("block_conv2d", "x", "fewer than 2^30 pixels on a GPU", std::to_string(image.pixels()));
    }
  }
  const driver::DeviceScope scope(context.device.index);
  if (!hopper::run(problem, context)) {
    problem.kind == Kind::product ? run_product(problem, context) : run_weight(problem, context);
  }
}

}  // namespace fretwork::block_conv
