// The portable and the generic products: make or find the plan, bring operands to a readable form, launch.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <utility>

#include "blocks/plan.h"
#include "fretwork/error.h"
#include "ops/block_matmul/cuda/arguments.h"
#include "ops/block_matmul/cuda/families.h"
#include "runtime/alignment.h"
#include "runtime/cuda_driver.h"
#include "runtime/device_plan.h"
#include "runtime/kernels.h"

namespace fretwork::block_matmul {
namespace {

namespace driver = fretwork::cuda;

constexpr const char* kSimple = "ops/block_matmul/cuda/simple.cuh";
constexpr const char* kPortable = "ops/block_matmul/cuda/portable.cuh";
constexpr std::int64_t kTileRows = 128;  // rows of a tensor-core tile
constexpr int kStageBytes = 128;         // bytes of K in a stage of the pipeline
constexpr int kMetaBytes = 2048;         // room the kernels keep for steps, beside the ring
// Shared memory of a CTA by architecture, for listing kernels where there is no device to ask.
constexpr int kSharedSm80 = 163 * 1024, kSharedSm90 = 227 * 1024, kSharedOther = 99 * 1024;

/// Which kernel, and the sizes its plan and launch depend on.
struct Config {
  bool tensor_cores = false;
  int products = 1;    ///< tf32 products per product: 1, or 3 for tf32x3
  int group_rows = 1;  ///< block-rows of a group
  int tile = 128;      ///< columns of an output tile
  int stages = 0;      ///< of the pipeline
  int rows = 1;        ///< simple kernels: rows of a thread
  int threads = 128;
  int shared_bytes = 0;
};

Config simple_config(std::int64_t block_rows) {
  Config config;
  config.rows = block_rows > 32 ? 8 : block_rows > 16 ? 4 : block_rows > 8 ? 2 : 1;
  return config;
}

/// A ring as deep as shared memory allows, up to four stages of A (128 rows) and B (`tile` columns).
Config tensor_core_config(int block, int tile, int products, int shared_limit) {
  Config config;
  config.tensor_cores = true;
  config.products = products;
  config.group_rows = static_cast<int>(kTileRows) / block;
  config.tile = tile;
  const int stage = kStageBytes * (static_cast<int>(kTileRows) + tile);
  config.stages = std::clamp((shared_limit - kMetaBytes) / stage, 2, 4);
  config.threads = 256;
  config.shared_bytes = config.stages * stage;
  return config;
}

bool fits_tensor_cores(const Problem& problem, Precision precision, int arch) {
  const auto& s = problem.layout->sizes();
  const bool type = problem.dtype == DType::f16 || problem.dtype == DType::bf16 ||
                    (problem.dtype == DType::f32 && precision != Precision::ieee);
  const bool block =
      s.block_rows == s.block_cols && s.block_rows >= 16 && std::has_single_bit(std::uint64_t(s.block_rows));
  return arch >= 80 && type && block;
}

/// How operands and the result lie in memory: what runs along their lines.
struct Lines {
  bool left_k, right_k;
  bool out_rows;  ///< spmm only
};

/// Names an instantiation.
KernelSpec instance(Kind kind, DType dtype, int block, const Config& c, const Lines& lines) {
  const std::string op = kind == Kind::spmm ? "spmm" : "sdd";
  const auto n = [](int v) { return ", " + std::to_string(v); };
  if (!c.tensor_cores) {
    return {kSimple, "fretwork::simple_" + op + "<" + device_type(dtype) + n(c.rows) + ">"};
  }
  return {kPortable,
          "fretwork::" + op + "<" + device_type(dtype) + n(c.products) + n(block) + n(c.tile) + n(c.stages) +
              n(lines.left_k) + n(lines.right_k) + (kind == Kind::spmm ? n(lines.out_rows) : "") + ">",
          c.shared_bytes};
}

std::vector<KernelSpec> list_kernels(const std::string& arch) {
  std::vector<KernelSpec> list;
  for (const Kind kind : {Kind::spmm, Kind::sdd}) {
    for (const DType dtype : {DType::f64, DType::f32, DType::f16, DType::bf16}) {
      for (const std::int64_t block_rows : {8, 16, 32, 64}) {
        list.push_back(instance(kind, dtype, 0, simple_config(block_rows), {}));
      }
    }
  }
  for (const char* bits : {"fretwork::u16", "float"}) {
    list.push_back({kSimple, std::string("fretwork::copy_aligned<") + bits + ">"});
  }
  if (driver::arch_number(arch) < 80) {
    return list;
  }
  const int limit = arch.starts_with("sm_9") || arch.starts_with("sm_10") ? kSharedSm90
                    : arch == "sm_80" || arch == "sm_87"                  ? kSharedSm80
                                                                          : kSharedOther;
  struct Listed {
    DType dtype;
    int products, tile;
  };
  for (const auto& [dtype, products, tile] :
       {Listed{DType::f16, 1, 128}, Listed{DType::f16, 1, 256}, Listed{DType::bf16, 1, 128},
        Listed{DType::bf16, 1, 256}, Listed{DType::f32, 1, 128}, Listed{DType::f32, 3, 128}}) {
    for (const int block : {16, 32, 64, 128}) {
      const Config config = tensor_core_config(block, tile, products, limit);
      for (int order = 0; order < 8; ++order) {
        const Lines lines{(order & 1) != 0, (order & 2) != 0, (order & 4) != 0};
        list.push_back(instance(Kind::spmm, dtype, block, config, lines));
        if (!lines.out_rows) {
          list.push_back(instance(Kind::sdd, dtype, block, config, lines));
        }
      }
    }
  }
  return list;
}
const KernelList kKernels{"block_matmul", list_kernels, kLeastArch};

// ---------------------------------------------------------------------------------------------------- the plan

/// The work on the device, and the kernel that does it.
struct DevicePlan {
  driver::DeviceBuffer segments, steps, splits;
  int segment_count = 0, split_count = 0, partial_count = 0, groups_per_head = 1;
  const Kernel* kernel = nullptr;
  std::size_t bytes() const { return segments.bytes() + steps.bytes() + splits.bytes(); }
};

/// Steps as the kernels read them, per group of the result.
struct Steps {
  std::vector<int> items;       ///< stride 2 + group_rows
  std::vector<Segment> groups;  ///< one segment per group
};

/// Heads summed into the result follow each other in a group's steps.
Steps device_steps(const blocks::SpmmPlan& plan, std::int64_t h_sum) {
  const std::size_t from_stride = 1 + static_cast<std::size_t>(plan.group_rows), stride = from_stride + 1;
  std::vector<std::pair<std::int32_t, std::int32_t>> ranges(static_cast<std::size_t>(plan.heads) *
                                                            static_cast<std::size_t>(plan.groups_per_head));
  for (const auto& segment : plan.segments) {
    ranges[static_cast<std::size_t>(segment.group)] = {segment.first, segment.last};
  }
  Steps steps;
  const int groups = h_sum == 1 ? plan.heads * plan.groups_per_head : plan.groups_per_head;
  for (int group = 0; group < groups; ++group) {
    const std::size_t first = steps.items.size() / stride;
    for (std::int64_t h = 0; h < h_sum; ++h) {
      const std::int64_t source = plan.heads == 1 || h_sum == 1 ? group : h * plan.groups_per_head + group;
      const auto [begin, end] = ranges[static_cast<std::size_t>(source)];
      for (auto s = static_cast<std::size_t>(begin); s < static_cast<std::size_t>(end); ++s) {
        const std::int32_t* step = plan.steps.data() + s * from_stride;
        steps.items.push_back(step[0] + 1);
        steps.items.push_back(static_cast<int>(h));
        for (std::size_t r = 1; r < from_stride; ++r) {
          steps.items.push_back(step[r] + 1);
        }
      }
    }
    const std::size_t last = steps.items.size() / stride;
    if (last > std::numeric_limits<int>::max() / stride) {
      throw Error("block_matmul", "layout", "fewer than 2^31 steps of work", std::to_string(last) + " steps");
    }
    steps.groups.push_back({group, static_cast<int>(first), static_cast<int>(last), -1});
  }
  return steps;
}

/// Cuts groups longer than `longest` into equal pieces; `partials` numbers them (spmm) or leaves them results (sdd).
void cut(Steps& steps, int longest, bool partials, std::vector<Segment>& segments, std::vector<Split>& splits) {
  int next = 0;
  for (const Segment& group : steps.groups) {
    const int count = group.last - group.first;
    const int pieces = longest > 0 ? std::max(1, static_cast<int>(ceil_div(count, longest))) : 1;
    if (pieces > 1 && partials) {
      splits.push_back({group.group, next, pieces});
    }
    for (int piece = 0; piece < pieces; ++piece) {
      const auto place = [&](int n) {
        return group.first + static_cast<int>(static_cast<std::int64_t>(count) * n / pieces);
      };
      segments.push_back({group.group, place(piece), place(piece + 1), pieces > 1 && partials ? next++ : -1});
    }
  }
}

/// What a plan depends on, hashed together with the layout's key.
struct PlanKey {
  Kind kind;
  DType dtype;
  Lines lines;
  bool transposed, tensor_cores;
  std::uint8_t products, stages;
  int tile, rows, parallel;
  std::int64_t h_sum;
};

/// Steps a segment may have: a fair share of a machine that would otherwise idle, but enough to fill the pipeline.
int longest_segment(const Steps& steps, const Shape& shape, const Config& config, int parallel, int multiprocessors) {
  if (!config.tensor_cores) {
    return 0;
  }
  constexpr std::int64_t kLeastDepth = 1024;  // of K
  const std::int64_t all = steps.groups.empty() ? 0 : steps.groups.back().last;
  return static_cast<int>(std::min<std::int64_t>(
      std::numeric_limits<int>::max(),
      std::max(ceil_div(kLeastDepth, shape.block_cols), ceil_div(all * parallel, multiprocessors))));
}

DevicePlan make_plan(const Problem& problem, const Config& config, const PlanKey& key, int device) {
  const Shape shape = shape_of(problem);
  const blocks::SpmmPlan plan = blocks::make_spmm_plan(*problem.layout, problem.transposed, config.group_rows, 0);
  std::vector<Segment> segments;
  std::vector<Split> splits;
  Steps steps = device_steps(plan, problem.kind == Kind::spmm ? problem.h_sum : 1);
  if (problem.kind == Kind::spmm) {
    cut(steps, longest_segment(steps, shape, config, key.parallel, driver::device_info(device).multiprocessors), true,
        segments, splits);
    std::stable_sort(segments.begin(), segments.end(),
                     [](const Segment& a, const Segment& b) { return a.last - a.first > b.last - b.first; });
  } else {
    cut(steps, config.tile / static_cast<int>(shape.block_cols), false, segments, splits);
    std::erase_if(segments, [](const Segment& s) { return s.first == s.last; });
  }
  const auto upload = [&](const auto& items) {
    return driver::DeviceBuffer(device, items.data(), items.size() * sizeof(items[0]));
  };
  DevicePlan made;
  made.segments = upload(segments);
  made.steps = upload(steps.items);
  made.splits = upload(splits);
  made.segment_count = static_cast<int>(segments.size());
  made.split_count = static_cast<int>(splits.size());
  made.partial_count = splits.empty() ? 0 : splits.back().first + splits.back().count;
  made.groups_per_head = std::max(1, plan.groups_per_head);
  made.kernel =
      &get_kernel(instance(problem.kind, problem.dtype, static_cast<int>(shape.block_rows), config, key.lines), device);
  return made;
}

std::shared_ptr<const DevicePlan> find_plan(const Problem& problem, const Config& config, const Context& context,
                                            const Lines& lines, std::int64_t parallel) {
  PlanKey key;
  std::memset(static_cast<void*>(&key), 0, sizeof key);  // padding is hashed too
  key.kind = problem.kind;
  key.dtype = problem.dtype;
  key.transposed = problem.transposed;
  key.lines = config.tensor_cores ? lines : Lines{};
  key.tensor_cores = config.tensor_cores;
  key.products = static_cast<std::uint8_t>(config.products);
  key.stages = static_cast<std::uint8_t>(config.stages);
  key.tile = config.tile;
  key.rows = config.rows;
  // Only whether the machine is full matters: a bucket, so that batch sizes share a plan.
  key.parallel =
      config.tensor_cores
          ? static_cast<int>(std::bit_ceil(static_cast<std::uint64_t>(std::clamp<std::int64_t>(parallel, 1, 1024))))
          : 0;
  key.h_sum = problem.kind == Kind::spmm ? problem.h_sum : 1;
  std::string bytes(sizeof key, '\0');
  std::memcpy(bytes.data(), &key, sizeof key);
  return find_device_plan<DevicePlan>(bytes + problem.layout->key(), context,
                                      [&](int device) { return make_plan(problem, config, key, device); });
}

Grid grid_of(const DevicePlan& plan, const Problem& problem, std::int64_t tiles) {
  constexpr std::int64_t kWidestBand = 12;
  if (tiles > std::numeric_limits<int>::max()) {
    throw Error("block_matmul", "out", "fewer than 2^31 tiles", std::to_string(tiles));
  }
  const std::int64_t bands = ceil_div(tiles, kWidestBand);
  return {static_cast<const Segment*>(plan.segments.data()),
          static_cast<const int*>(plan.steps.data()),
          static_cast<const Split*>(plan.splits.data()),
          plan.segment_count,
          plan.split_count,
          static_cast<int>(tiles),
          static_cast<int>(ceil_div(tiles, bands)),
          static_cast<int>(grid_heads(problem)),
          plan.groups_per_head};
}

// ------------------------------------------------------------------------------------------------ operands

/// True when `data` and the strides allow 16 bytes at a time. Inside a matrix kernels count bytes in 32 bits: `within`.
bool aligned(const void* data, int chunk, std::initializer_list<std::int64_t> within,
             std::initializer_list<std::int64_t> batch) {
  constexpr std::int64_t kFarthest = std::numeric_limits<std::int32_t>::max() / 16;
  const auto whole = [&](std::int64_t s) { return s % chunk == 0; };
  const auto near = [&](std::int64_t s) { return whole(s) && std::abs(s / chunk) <= kFarthest; };
  return is_aligned(data, 16) && std::all_of(within.begin(), within.end(), near) &&
         std::all_of(batch.begin(), batch.end(), whole);
}

/// Lines of the innermost dimension: `col` true when a row's entries are neighbours, and whether 16 bytes can be moved.
struct Order {
  bool col = true, chunks = false;
};
Order order_of(const MatrixArg& m, std::int64_t rows, std::int64_t cols, int chunk) {
  if (m.col == 1 && aligned(m.data, chunk, {rows == 1 ? 0 : m.row}, {m.z, m.h})) {
    return {true, true};
  }
  if (m.row == 1 && aligned(m.data, chunk, {cols == 1 ? 0 : m.col}, {m.z, m.h})) {
    return {false, true};
  }
  return {m.col == 1 || m.row != 1, false};
}

/// An aligned copy for operands that the tensor-core kernels cannot read as they are. Keeps the inner direction.
class AlignedCopy {
 public:
  /// [outer, middle, rows, cols] of an operand with a stride of 0 where it is broadcast.
  AlignedCopy(bool needed, Context& context, DType dtype, const void* from, const std::int64_t (&sizes)[4],
              const std::int64_t (&strides)[4])
      : col_inner_(std::abs(strides[3]) <= std::abs(strides[2])),
        params_(make(sizes, strides, size_of(dtype))),
        space_(context, needed ? static_cast<std::size_t>(params_.sizes[0] * params_.sizes[1] * params_.sizes[2] *
                                                          params_.line) *
                                     size_of(dtype)
                               : 0) {
    if (space_.data() == nullptr) {
      return;
    }
    params_.from = from;
    params_.to = space_.data();
    const std::int64_t count = params_.sizes[0] * params_.sizes[1] * params_.sizes[2] * params_.sizes[3];
    const KernelSpec spec{
        kSimple, size_of(dtype) == 2 ? "fretwork::copy_aligned<fretwork::u16>" : "fretwork::copy_aligned<float>"};
    get_kernel(spec, context.device.index)
        .launch(std::min<std::int64_t>(ceil_div(count, 256), 1 << 16), 256, 0, &params_, context.stream);
  }

  explicit operator bool() const { return space_.data() != nullptr; }
  void* data() const { return space_.data(); }
  std::int64_t row() const { return col_inner_ ? params_.line : 1; }
  std::int64_t col() const { return col_inner_ ? 1 : params_.line; }
  std::int64_t middle() const { return params_.sizes[1] == 1 ? 0 : params_.sizes[2] * params_.line; }
  std::int64_t outer() const { return params_.sizes[0] == 1 ? 0 : params_.sizes[1] * params_.sizes[2] * params_.line; }

 private:
  CopyParams make(const std::int64_t (&sizes)[4], const std::int64_t (&strides)[4], std::size_t bytes) const {
    const int y = col_inner_ ? 2 : 3, x = col_inner_ ? 3 : 2;
    const std::int64_t chunk = 16 / static_cast<std::int64_t>(bytes);
    return {nullptr,
            nullptr,
            {strides[0] == 0 ? 1 : sizes[0], strides[1] == 0 ? 1 : sizes[1], sizes[y], sizes[x]},
            {strides[0], strides[1], strides[y], strides[x]},
            ceil_div(sizes[x], chunk) * chunk};
  }

  bool col_inner_;
  CopyParams params_;
  Workspace space_;
};

/// A dense operand in a form the kernel reads, for the length of a call.
class DenseInput {
 public:
  DenseInput(const Problem& problem, const Matrix& m, const Config& config, Context& context)
      : arg_(matrix_arg(m)),
        order_(order_of(arg_, m.rows, m.cols, 16 / static_cast<int>(size_of(problem.dtype)))),
        copy_(config.tensor_cores && !order_.chunks, context, problem.dtype, m.data,
              {problem.z_out * problem.z_sum, problem.h_out * problem.h_sum, m.rows, m.cols},
              {m.z_stride, m.h_stride, m.row_stride, m.col_stride}) {
    if (copy_) {
      arg_ = {copy_.data(), copy_.row(), copy_.col(), copy_.outer(), copy_.middle()};
      order_ = {copy_.col() == 1, true};
    }
  }
  const MatrixArg& arg() const { return arg_; }
  bool col_inner() const { return order_.col; }

 private:
  MatrixArg arg_;
  Order order_;
  AlignedCopy copy_;
};

/// The packed blocks likewise.
class BlocksInput {
 public:
  BlocksInput(const Problem& problem, const Config& config, Context& context)
      : arg_(blocks_arg(problem)),
        copy_(config.tensor_cores && !readable(arg_, problem.dtype), context, problem.dtype, arg_.data,
              {problem.z_out * problem.z_sum, problem.layout->nnz(), problem.layout->sizes().block_rows,
               problem.layout->sizes().block_cols},
              {arg_.z, arg_.block, arg_.row, arg_.col}) {
    if (copy_) {
      arg_ = {copy_.data(), copy_.outer(), copy_.middle(), copy_.row(), copy_.col()};
    }
  }
  const BlocksArg& arg() const { return arg_; }
  bool col_inner() const { return arg_.col == 1; }

 private:
  static bool readable(const BlocksArg& b, DType dtype) {
    const int chunk = 16 / static_cast<int>(size_of(dtype));
    return (b.col == 1 && aligned(b.data, chunk, {b.block, b.row}, {b.z})) ||
           (b.row == 1 && aligned(b.data, chunk, {b.block, b.col}, {b.z}));
  }
  BlocksArg arg_;
  AlignedCopy copy_;
};

// -------------------------------------------------------------------------------------------------- launches

void run_spmm(const Problem& problem, const Config& config, Context& context) {
  const Shape shape = shape_of(problem);
  const int chunk = 16 / static_cast<int>(size_of(problem.dtype));
  const BlocksInput blocks(problem, config, context);
  const DenseInput dense(problem, problem.right, config, context);
  const std::int64_t batches = problem.z_out * grid_heads(problem);
  const std::int64_t pieces = config.tensor_cores ? 1 : ceil_div(shape.block_rows, 8 * config.rows);
  const std::int64_t tiles = ceil_div(problem.out.cols, config.tile) * pieces;
  const MatrixArg out = matrix_arg(problem.out);
  const Order order = order_of(out, problem.out.rows, problem.out.cols, chunk);
  const auto plan =
      find_plan(problem, config, context, {blocks.col_inner(), !dense.col_inner(), !order.col}, batches * tiles);

  SpmmParams params{};
  params.grid = grid_of(*plan, problem, tiles);
  params.blocks = blocks.arg();
  params.dense = dense.arg();
  params.out = out;
  params.free = problem.out.cols;
  params.rows = static_cast<int>(problem.out.rows);
  params.z_sum = static_cast<int>(problem.z_sum);
  params.partial_count = plan->partial_count;
  params.block_rows = static_cast<int>(shape.block_rows);
  params.block_cols = static_cast<int>(shape.block_cols);
  params.dense_free_inner = dense.col_inner();
  params.blocks_col_inner = blocks.col_inner();
  params.vector = order.chunks && (config.tensor_cores || order.col);

  const std::int64_t tile_floats = kTileRows * config.tile;
  const Workspace partials(
      context, static_cast<std::size_t>(batches * plan->partial_count * tiles * tile_floats) * sizeof(float));
  params.partials = static_cast<float*>(partials.data());
  const auto launch = [&](std::int64_t segments) {
    const std::int64_t items = batches * segments * tiles;
    if (items > std::numeric_limits<int>::max()) {
      throw Error("block_matmul", "out", "fewer than 2^31 tiles", std::to_string(items));
    }
    const std::int64_t ctas =
        config.tensor_cores ? std::min<std::int64_t>(items, driver::device_info(context.device.index).multiprocessors)
                            : items;
    params.items = static_cast<unsigned>(items);
    plan->kernel->launch(ctas, config.threads, config.shared_bytes, &params, context.stream);
  };
  launch(plan->segment_count);
  if (plan->split_count > 0) {
    params.reduce = true;
    launch(plan->split_count);
  }
}

/// K is cut where few tiles would leave most of the machine idle, but never below eight stages.
std::int64_t sdd_pieces(const Problem& problem, const Config& config, std::int64_t tiles, int multiprocessors) {
  if (!config.tensor_cores || tiles == 0 || 2 * tiles > multiprocessors) {
    return 1;
  }
  const std::int64_t depth = kStageBytes / static_cast<std::int64_t>(size_of(problem.dtype));
  const std::int64_t stages = problem.z_sum * problem.h_sum * ceil_div(problem.left.cols, depth);
  return std::clamp<std::int64_t>(std::min(multiprocessors / tiles, stages / 8), 1, 64);
}

void run_sdd(const Problem& problem, const Config& config, Context& context) {
  const Shape shape = shape_of(problem);
  const int chunk = 16 / static_cast<int>(size_of(problem.dtype));
  const DenseInput left(problem, problem.left, config, context);
  const DenseInput right(problem, problem.right, config, context);
  const auto plan = find_plan(problem, config, context, {left.col_inner(), !right.col_inner(), false}, 1);
  const std::int64_t batches = problem.z_out * grid_heads(problem);
  const std::int64_t row_pieces = config.tensor_cores ? 1 : ceil_div(shape.block_rows, 8 * config.rows);
  const std::int64_t pieces = sdd_pieces(problem, config, batches * plan->segment_count,
                                         driver::device_info(context.device.index).multiprocessors);

  SddParams params{};
  params.grid = grid_of(*plan, problem, row_pieces * pieces);
  params.blocks = blocks_arg(problem);
  params.left = left.arg();
  params.right = right.arg();
  params.depth = problem.left.cols;
  params.rows = static_cast<int>(problem.left.rows);
  params.z_sum = static_cast<int>(problem.z_sum);
  params.h_sum = static_cast<int>(problem.h_sum);
  params.pieces = static_cast<int>(pieces);
  params.block_rows = static_cast<int>(shape.block_rows);
  params.block_cols = static_cast<int>(shape.block_cols);
  params.left_k_inner = left.col_inner();
  params.right_k_inner = !right.col_inner();
  params.vector = params.blocks.col == 1 && shape.block_cols % chunk == 0 && shape.block_cols % 4 == 0 &&
                  aligned(params.blocks.data, chunk, {}, {params.blocks.z, params.blocks.block, params.blocks.row});

  const std::int64_t tile_floats = pieces > 1 ? kTileRows * config.tile : 0;
  const Workspace partials(
      context, static_cast<std::size_t>(batches * plan->segment_count * pieces * tile_floats) * sizeof(float));
  params.partials = static_cast<float*>(partials.data());
  plan->kernel->launch(batches * plan->segment_count * row_pieces * pieces, config.threads, config.shared_bytes,
                       &params, context.stream);
  if (pieces > 1) {
    params.reduce = true;
    params.grid.tiles = params.grid.band = 1;
    plan->kernel->launch(batches * plan->segment_count, config.threads, config.shared_bytes, &params, context.stream);
  }
}

void launch(const Problem& problem, const Config& config, Context& context) {
  problem.kind == Kind::spmm ? run_spmm(problem, config, context) : run_sdd(problem, config, context);
}

/// Rates are flops in a µs on all SMs of an H200.
double products_us(const Problem& problem, double rate, const Context& context) {
  return flops_of(problem) / rate * cost::kMultiprocessors / driver::device_info(context.device.index).multiprocessors;
}

/// K of a tile of `rows` rows of op(S): what its block rows have between them, if blocks lie at random.
double depth_of(const Problem& problem, double rows) {
  const auto& s = problem.layout->sizes();
  const Shape shape = shape_of(problem);
  const double density = static_cast<double>(problem.layout->nnz()) / static_cast<double>(s.heads * s.rows * s.cols);
  const double whole = static_cast<double>(s.rows * s.cols / shape.lines * shape.block_cols);
  return whole * (1 - std::pow(1 - density, std::max(1.0, rows / static_cast<double>(shape.block_rows))));
}

/// Bytes of dense operands that are copied before the portable kernels can read them.
double copied_bytes(const Problem& problem) {
  const int chunk = 16 / static_cast<int>(size_of(problem.dtype));
  double bytes = 0;
  for (const Matrix* m : {&problem.left, &problem.right}) {
    if (m->data != nullptr && !order_of(matrix_arg(*m), m->rows, m->cols, chunk).chunks) {
      const std::int64_t batches = (m->z_stride == 0 ? 1 : problem.z_out * problem.z_sum) *
                                   (m->h_stride == 0 ? 1 : problem.h_out * problem.h_sum);
      bytes += static_cast<double>(m->rows * m->cols * batches) * static_cast<double>(size_of(problem.dtype));
    }
  }
  return bytes;
}

/// Tiles of an spmm that a CTA has, at most.
double turns_of(const Problem& problem, const Context& context, int tile) {
  const Shape shape = shape_of(problem);
  const std::int64_t groups = ceil_div(shape.lines * shape.block_rows, kTileRows) * problem.layout->heads();
  const std::int64_t tiles = groups * ceil_div(problem.out.cols, tile) * problem.z_out * grid_heads(problem);
  return static_cast<double>(ceil_div(tiles, driver::device_info(context.device.index).multiprocessors));
}

/// Elements of a result that is not stored 16 bytes at a time.
double stored_singly(const Problem& problem) {
  const Matrix& m = problem.out;
  const int chunk = 16 / static_cast<int>(size_of(problem.dtype));
  if (m.data == nullptr || order_of(matrix_arg(m), m.rows, m.cols, chunk).chunks) {
    return 0;
  }
  return static_cast<double>(m.rows * m.cols * problem.z_out * problem.h_out);
}

}  // namespace

bool portable::fits(const Problem& problem, const Context& context, int tile) {
  const int device = context.device.index;
  if (!fits_tensor_cores(problem, context.precision, driver::arch_number(device)) ||
      (tile != 128 && problem.dtype == DType::f32)) {
    return false;
  }
  // Wide tiles read the blocks (or A) half as often, but only where they still fill the machine.
  const Shape shape = shape_of(problem);
  const std::int64_t groups = ceil_div(shape.lines * shape.block_rows, kTileRows) * problem.layout->heads();
  const std::int64_t tiles =
      problem.kind == Kind::spmm
          ? groups * ceil_div(problem.out.cols, tile) * problem.z_out * grid_heads(problem)
          : problem.layout->nnz() * shape.block_rows * shape.block_rows / (kTileRows * tile) * problem.z_out;
  return tile == 128 || ((problem.kind == Kind::sdd || problem.out.cols > 128) &&
                         tiles >= driver::device_info(device).multiprocessors);
}

cost::Work portable::cost(const Problem& problem, const Context& context, int tile) {
  // 16-bit types: dsd at a density of 0.1 with FRETWORK_ARCH=sm_80 (bench/results/h200/block.json). tf32 has half the
  // rate, and takes three products where it is to be exact.
  const std::int64_t block = shape_of(problem).block_rows;
  const double rate = block == 16 ? 93e6 : block == 32 ? 127e6 : block == 64 ? 188e6 : 367e6;
  const double slower = problem.dtype != DType::f32 ? 1 : context.precision == Precision::tf32x3 ? 6 : 2;
  const double l2 =
      flops_of(problem) / 2 * static_cast<double>(size_of(problem.dtype)) * (1.0 / kTileRows + 1.0 / tile);
  // A CTA alone: µs, fitted to random products with few columns (bench/results/h200/block_candidates.json).
  constexpr double kCopy = 3e5, kSingles = 4.5e5;  // bytes, elements per µs
  const double copies = copied_bytes(problem);
  const double singles = stored_singly(problem) / kSingles * cost::kMultiprocessors /
                         driver::device_info(context.device.index).multiprocessors;
  const double stages = depth_of(problem, kTileRows) / 64;
  const double alone = problem.kind == Kind::spmm ? 6.2 + stages * 1.08 * slower : 0;
  // Where CTAs have several tiles, those of the busiest.
  const auto [stage, rest] = tile == 128 ? std::pair{0.79, 2.0} : std::pair{1.0, 3.5};
  const double turns =
      problem.kind == Kind::spmm ? 6 + turns_of(problem, context, tile) * (stages * stage * slower + rest) : 0;
  return {.memory = operand_bytes(problem) / cost::kMemory,
          .l2 = l2 / cost::kL2,
          .busiest = std::max({alone, turns, products_us(problem, rate / slower, context)}),
          .serial = singles + (copies > 0 ? cost::kNextLaunch + copies / kCopy : 0)};
}

void portable::launch(const Problem& problem, Context& context, int tile) {
  const int products = context.precision == Precision::tf32x3 && problem.dtype == DType::f32 ? 3 : 1;
  block_matmul::launch(problem,
                       tensor_core_config(static_cast<int>(shape_of(problem).block_rows), tile, products,
                                          driver::device_info(context.device.index).shared_per_block),
                       context);
}

cost::Work generic::cost(const Problem& problem, const Context& context) {
  // Not measured; hardly any other kernels fit where this one runs. A thread holds up to 8 rows, a CTA 128 columns; a
  // step has 16 of K. µs: a CTA's start, a step.
  constexpr double kRows = 8, kCols = 128, kStart = 4, kStep = 0.5, kCtas = 3;
  const Shape shape = shape_of(problem);
  const double l2 = flops_of(problem) / 2 * static_cast<double>(size_of(problem.dtype)) * (1 / kRows + 1 / kCols);
  const double multiprocessors = driver::device_info(context.device.index).multiprocessors;
  const std::int64_t free = problem.kind == Kind::spmm ? problem.out.cols : problem.right.cols;
  const double tiles = static_cast<double>(shape.lines * problem.layout->heads() * problem.z_out * grid_heads(problem) *
                                           ceil_div(free, 128) * ceil_div(shape.block_rows, 64));
  const double waves = std::max(1.0, tiles / (kCtas * multiprocessors));
  const double alone = kStart + depth_of(problem, 1) / 16 * kStep;
  return {.memory = operand_bytes(problem) / cost::kMemory,
          .l2 = l2 / cost::kL2,
          .busiest = std::max(waves * alone, products_us(problem, problem.dtype == DType::f64 ? 5e6 : 10e6, context))};
}

void generic::launch(const Problem& problem, Context& context) {
  block_matmul::launch(problem, simple_config(shape_of(problem).block_rows), context);
}

}  // namespace fretwork::block_matmul
