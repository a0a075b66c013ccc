// Gradients of weights on TMA and wgmma: which configs fit, their cost, tensor maps, launches.
#include <algorithm>
#include <bit>
#include <cmath>
#include <optional>
#include <string>
#include <vector>

#include "ops/kronecker/cuda/families.h"
#include "ops/kronecker/cuda/hopper.h"

namespace fretwork::kronecker::hopper {
namespace {

/// Tiles of `gradient`: kRows × width of `deltas` products at once.
struct GradientTile {
  int width, deltas = 1;
  int stage() const { return stage_bytes(width, deltas); }
  int shared() const { return gradient_shared_bytes(width, deltas); }
};

KernelSpec gradient_instance(DType dtype, const GradientTile& tile, bool last) {
  return kernel_spec("hopper_gradient", tile.shared(), "hopper::gradient", dtype, tile.width, last, tile.deltas);
}
KernelSpec unpack_instance(DType dtype) { return kernel_spec("pack", 0, "hopper::unpack", dtype); }

/// tf32, batch first with d = 2 or 4: all δ at once.
constexpr GradientTile interleaved_tile(std::int64_t d) { return {256 / narrowed(d), narrowed(d)}; }

std::vector<KernelSpec> list_kernels(const std::string& arch) {
  std::vector<KernelSpec> list;
  if (arch != "sm_90a") {
    return list;
  }
  list.push_back(gradient_instance(DType::f32, interleaved_tile(2), false));
  list.push_back(gradient_instance(DType::f32, interleaved_tile(4), false));
  for (const DType dtype : {DType::f16, DType::bf16, DType::f32}) {
    list.push_back(unpack_instance(dtype));
    for (const int width : kWidths) {
      list.push_back(gradient_instance(dtype, {width}, false));
      list.push_back(gradient_instance(dtype, {width}, true));
    }
  }
  return list;
}
const KernelList kKernels{"kronecker", list_kernels};

/// Gradients by type, layout and width (24), of interleaved rows (2), and unpacking by type (3).
constinit KernelTable<24 + 2 + 3> kernels;

const Kernel& gradient_kernel(DType dtype, const GradientTile& tile, bool last, int device) {
  const auto width = static_cast<std::size_t>(tile.width / 64 - 1);
  const std::size_t place = tile.deltas > 1 ? 24 + width % 2 : type_index(dtype) * 8 + (last ? 4 : 0) + width;
  return kernels.get(place, device, [&] { return gradient_instance(dtype, tile, last); });
}
const Kernel& unpack_kernel(DType dtype, int device) {
  return kernels.get(26 + type_index(dtype), device, [&] { return unpack_instance(dtype); });
}

bool suits_gradient(const WeightProblem& p, const Machine& machine) {
  const Sizes& s = p.sizes;
  return suits(s, p.batch, p.dtype, machine) && s.a * s.d <= kMost / 256 / (ceil_div(s.b, kRows) * ceil_div(s.c, 64));
}

/// How the batch of a gradient is cut.
struct Parts {
  std::int64_t count, steps;  ///< of them, and in each
};
/// As many as keep the machine busy; each costs filling a ring and moving its partial sums.
Parts gradient_parts(std::int64_t tiles, std::int64_t steps, std::int64_t sums, int stage, int multiprocessors) {
  Parts best{1, steps};
  std::int64_t least = std::numeric_limits<std::int64_t>::max();
  const std::int64_t most =
      std::min(steps, 1 + 4 * multiprocessors / std::min<std::int64_t>(tiles, 4 * multiprocessors));
  for (std::int64_t wanted = 1; wanted <= most; ++wanted) {
    const std::int64_t each = ceil_div(steps, wanted), count = ceil_div(steps, each);
    const std::int64_t turns = ceil_div(tiles * count, multiprocessors);
    const std::int64_t cost = turns * (each + 4) * stage + count * sums * 8 / multiprocessors;
    if (cost < least) {
      least = cost;
      best = {count, each};
    }
  }
  return best;
}

GradientTile gradient_tile(std::int64_t c) {
  return {*std::ranges::min_element(kWidths, {}, [&](int width) { return ceil_div(c, width) * (width + kRows); })};
}

/// Adds the parts at `sums` into d_w and d_bias; with no parts these become zeros. `dense`: of the products of a
/// block's features of all δ, those of one δ count.
void unpack(const WeightProblem& p, const Workspace& sums, std::int64_t line, std::int64_t parts, bool dense,
            const Context& context) {
  const Sizes& s = p.sizes;
  const std::int64_t cols = s.c + (p.d_bias.data != nullptr ? 1 : 0), deep = std::min<std::int64_t>(s.d, 32);
  const std::int64_t slices = std::clamp<std::int64_t>(std::bit_ceil(static_cast<std::uint64_t>(ceil_div(parts, 4))), 1,
                                                       kMostSlices);  // many parts are added by more threads
  const std::int64_t wide = kUnpackElements / slices / deep;
  UnpackParams params{};
  params.from = static_cast<const float*>(sums.data());
  params.to = p.d_w.data;
  params.bias = p.d_bias.data;
  params.from_i = s.d * s.b * line;
  params.from_l = dense ? line + 1 : s.b * line;
  params.from_j = dense ? s.d * line : line;
  params.from_k = dense ? s.d : 1;
  params.part = s.a * s.d * s.b * line;
  params.bias_back = dense ? 1 : 0;
  params.stride_i = p.d_w.a;
  params.stride_j = p.d_w.b;
  params.stride_k = p.d_w.c;
  params.stride_l = p.d_w.d;
  params.bias_stride = p.d_bias.stride;
  params.b = narrowed(s.b);
  params.c = narrowed(s.c);
  params.d = narrowed(s.d);
  params.parts = narrowed(parts);
  params.wide_tiles = narrowed(ceil_div(s.b * cols, wide));
  params.deep_tiles = narrowed(ceil_div(s.d, deep));
  params.slices = narrowed(slices);
  params.wide = Divisor(wide);
  params.deep = Divisor(deep);
  params.cols = Divisor(cols);
  unpack_kernel(p.dtype, context.device.index)
      .launch_behind(s.a * params.wide_tiles * params.deep_tiles, kPackThreads, 0, &params, context.stream);
}

/// How batches of up to `batch` rows are cut.
struct GradientCut {
  std::int64_t row_tiles, col_tiles, products, line;
  Parts parts;

  GradientCut(const WeightProblem& p, std::int64_t batch, const GradientTile& tile, int multiprocessors)
      : row_tiles(ceil_div(p.sizes.b, kRows)),
        col_tiles(ceil_div(p.sizes.c, tile.width)),
        products(p.sizes.a * p.sizes.d / tile.deltas),
        line(ceil_div(p.sizes.c + 1, 4) * 4),
        parts(gradient_parts(tiles(), ceil_div(batch, line_of(p.dtype)), floats(p.sizes), tile.stage(),
                             multiprocessors)) {}
  std::int64_t tiles() const { return row_tiles * col_tiles * products; }
  std::int64_t floats(const Sizes& s) const { return s.a * s.d * s.b * line; }
};

/// The same, with room for the sums of the parts.
struct GradientSums : GradientCut {
  Workspace space;
  GradientSums(const WeightProblem& p, std::int64_t batch, const GradientTile& tile, Context& context)
      : GradientCut(p, batch, tile, driver::device_info(context.device.index).multiprocessors),
        space(context, static_cast<std::size_t>(parts.count * floats(p.sizes)) * sizeof(float)) {}
};

/// The sums of p's batch, or with `add` added to those there are.
void launch_gradient(const WeightProblem& p, bool last, const Map& d_y, const Map& x, const GradientTile& tile,
                     const GradientSums& sums, bool add, const Context& context) {
  const int multiprocessors = driver::device_info(context.device.index).multiprocessors;
  const std::int64_t steps = ceil_div(p.batch, line_of(p.dtype));
  GradientParams params{};
  params.d_y = d_y;
  params.x = x;
  params.partials = static_cast<float*>(sums.space.data());
  params.b = narrowed(p.sizes.b);
  params.c = narrowed(p.sizes.c);
  params.d = narrowed(p.sizes.d / tile.deltas);
  params.line = narrowed(sums.line);
  params.row_tiles = narrowed(sums.row_tiles);
  params.col_tiles = narrowed(sums.col_tiles);
  params.steps = narrowed(steps);
  params.total = narrowed(sums.tiles() * ceil_div(steps, sums.parts.steps));
  params.products = narrowed(sums.products);
  params.steps_per_part = narrowed(sums.parts.steps);
  params.with_sums = p.d_bias.data != nullptr ? 1 : 0;
  params.add = add ? 1 : 0;
  gradient_kernel(p.dtype, tile, last, context.device.index)
      .launch(std::min(params.total, multiprocessors), kThreads, tile.shared(), &params, context.stream);
}

/// Of operands as they lie.
void launch_gradient(const WeightProblem& p, const Layout& layout, const GradientTile& tile, const GradientSums& sums,
                     bool add, const Context& context) {
  launch_gradient(p, layout.last, operand_map(layout.y, layout.last, kRows),
                  operand_map(layout.x, layout.last, tile.width), tile, sums, add, context);
}

void run_gradient(const WeightProblem& p, const Layout& layout, Context& context) {
  const GradientTile tile = gradient_tile(p.sizes.c);
  const GradientSums sums(p, p.batch, tile, context);
  launch_gradient(p, layout, tile, sums, false, context);
  unpack(p, sums.space, sums.line, sums.parts.count, false, context);
}

/// Rows of the batch that are regrouped at a time, which bounds the workspace: so many that their sums are a small part
/// of what they move.
std::int64_t regrouped_rows(const WeightProblem& p) {
  constexpr std::int64_t kLeast = std::int64_t{1} << 30, kMostBytes = std::int64_t{4} << 30, kStep = 64;
  const Sizes& s = p.sizes;
  const std::int64_t row = s.a * s.d * (s.b + s.c) * bytes_of(p.dtype), sums = s.a * s.d * s.b * s.c * 4;
  const std::int64_t most = std::max<std::int64_t>(std::clamp(8 * sums, kLeast, kMostBytes) / row / kStep, 1) * kStep;
  return std::min(p.batch, ceil_div(ceil_div(p.batch, ceil_div(p.batch, most)), kStep) * kStep);  // of equal size
}

/// What a pass of its own would regroup.
bool can_regroup(const WeightProblem& p) {
  const Sizes& s = p.sizes;
  const std::int64_t rows = regrouped_rows(p);
  const int size = bytes_of(p.dtype);
  return regroups(p.x, s.c, rows, s, size) && regroups(p.d_y, s.b, rows, s, size);
}

void run_interleaved(const WeightProblem& p, Context& context) {
  const Layout rows = *interleaved_layout(p.x, p.d_y, p.batch, p.sizes, p.dtype);
  const GradientTile tile = interleaved_tile(p.sizes.d);
  const GradientSums sums(p, p.batch, tile, context);
  launch_gradient(p, false, operand_map(rows.y, false, kRows), operand_map(rows.x, false, tile.width), tile, sums,
                  false, context);
  unpack(p, sums.space, sums.line, sums.parts.count, false, context);
}

/// `most` rows of the batch at a time, a multiple of a step, added to the sums of those before.
void run_regrouped(const WeightProblem& p, std::int64_t most, Context& context) {
  const Sizes& s = p.sizes;
  const int bytes = bytes_of(p.dtype);
  const Workspace x(context, static_cast<std::size_t>(most * s.a * s.d * s.c * bytes));
  const Workspace d_y(context, static_cast<std::size_t>(most * s.a * s.d * s.b * bytes));
  const GradientTile tile = gradient_tile(s.c);
  const GradientSums sums(p, most, tile, context);
  for (std::int64_t first = 0; first < p.batch; first += most) {
    WeightProblem part = p;
    part.batch = std::min(most, p.batch - first);
    part.x.data = static_cast<std::byte*>(p.x.data) + first * p.x.batch * bytes;
    part.d_y.data = static_cast<std::byte*>(p.d_y.data) + first * p.d_y.batch * bytes;
    regroup(part.x, x.data(), s.c, part.batch, s, bytes, false, context);
    regroup(part.d_y, d_y.data(), s.b, part.batch, s, bytes, false, context);
    const Layout layout{false, *grouped_view(x.data(), s.c, part.batch, s, bytes),
                        *grouped_view(d_y.data(), s.b, part.batch, s, bytes)};
    launch_gradient(part, layout, tile, sums, first > 0, context);
  }
  unpack(p, sums.space, sums.line, sums.parts.count, false, context);
}

/// Batch first: the d products of a block as one, of which only sums of one δ are kept. d times the arithmetic, and
/// nothing leaks from one δ to another: the batch is the depth.
WeightProblem as_dense(const WeightProblem& p) {
  WeightProblem one = p;
  one.sizes = dense_sizes(p.sizes);
  return one;
}
void run_dense(const WeightProblem& p, Context& context) {
  const WeightProblem one = as_dense(p);
  const Layout layout = *dense_layout(p.x, p.d_y, p.batch, p.sizes, p.dtype);
  const GradientTile tile = gradient_tile(one.sizes.c);
  const GradientSums sums(one, p.batch, tile, context);
  launch_gradient(one, layout, tile, sums, false, context);
  unpack(p, sums.space, sums.line, sums.parts.count, true, context);
}

// ---------------------------------------------------------------------------------------------- costs

/// A launch over the whole batch, and the one that adds up its parts.
double gradient_cost(const WeightProblem& p, const GradientTile& tile, const cost::Rates& rates,
                     double multiprocessors) {
  constexpr double kReduce = 4.6, kReduceRate = 1.24e6;  // µs, and bytes of partial sums per µs
  const Sizes& s = p.sizes;
  const GradientCut cut(p, p.batch, tile, narrowed(static_cast<std::int64_t>(multiprocessors)));
  const cost::Tiles tiles{.count = double(cut.tiles() * cut.parts.count),
                          .at_once = multiprocessors,
                          .steps = double(cut.parts.steps),
                          .bytes = double(tile.stage()),
                          .ops = 2.0 * kRows * tile.width * tile.deltas * double(line_of(p.dtype)),
                          .out = 4.0 * kRows * double(std::min<std::int64_t>(tile.width, s.c)) * tile.deltas};
  return cost::microseconds(tiles, rates, batch_bytes(s, p.batch, p.dtype), multiprocessors) +
         cost::pass(kReduce, 4.0 * double(cut.parts.count * cut.floats(s)), kReduceRate, multiprocessors);
}

const cost::Rates& rates_of(DType dtype) {
  static constexpr cost::Rates k16 = {0.04, 8.7e6, 5.8e6}, kTf32 = {0.0, 6.3e6, 1.86e6};
  return dtype == DType::f32 ? kTf32 : k16;
}

bool fits(const WeightProblem& p, const Config& config, const Machine& machine) {
  const Sizes& s = p.sizes;
  if (!suits_gradient(p, machine)) {
    return false;
  }
  switch (config.family) {
    case Family::hopper:
      return p.batch == 0 || shared_layout(p.x, p.d_y, p.batch, s, p.dtype).has_value();
    case Family::interleaved:
      return p.batch > 0 && interleaved_layout(p.x, p.d_y, p.batch, s, p.dtype).has_value();
    case Family::dense:
      return p.batch > 0 && dense_layout(p.x, p.d_y, p.batch, s, p.dtype) && suits_gradient(as_dense(p), machine);
    case Family::regroup:  // `first`: rows of the batch at a time, or 0 for as many as suit the workspace
      return p.batch > 0 && s.d > 1 && config.first % 64 == 0 && can_regroup(p);
    default:
      return false;
  }
}

double cost(const WeightProblem& p, const Config& config, const Machine& machine) {
  const Sizes& s = p.sizes;
  const double multiprocessors = machine.multiprocessors;
  const cost::Rates& rates = rates_of(p.dtype);
  switch (config.family) {
    case Family::interleaved: {
      constexpr cost::Rates kRates = {2.2, 5.1e6, 1.5e7};
      return gradient_cost(p, interleaved_tile(s.d), kRates, multiprocessors);
    }
    case Family::dense:
      return gradient_cost(as_dense(p), gradient_tile(s.c * s.d), rates, multiprocessors);
    case Family::regroup:
      return gradient_cost(p, gradient_tile(s.c), rates, multiprocessors) +
             regroup_cost(s, p.batch, p.dtype, multiprocessors);
    default:
      return gradient_cost(p, gradient_tile(s.c), rates, multiprocessors);
  }
}

void launch(const WeightProblem& p, const Config& config, Context& context) {
  if (p.batch == 0) {
    return unpack(p, Workspace(context, 0), 0, 0, false, context);
  }
  switch (config.family) {
    case Family::interleaved:
      return run_interleaved(p, context);
    case Family::dense:
      return run_dense(p, context);
    case Family::regroup:
      return run_regrouped(p, config.first > 0 ? std::min<std::int64_t>(config.first, p.batch) : regrouped_rows(p),
                           context);
    default:
      return run_gradient(p, *shared_layout(p.x, p.d_y, p.batch, p.sizes, p.dtype), context);
  }
}

}  // namespace

constinit const Functions<WeightProblem> kGradient{fits, cost, launch};

}  // namespace fretwork::kronecker::hopper
