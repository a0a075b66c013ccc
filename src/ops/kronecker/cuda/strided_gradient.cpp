// Batch first with d > 1 on the tensor cores, the gradient of the weights: tiles, pieces of the batch, the launches.
#include <cmath>
#include <optional>
#include <utility>

#include "ops/kronecker/cuda/strided.h"

namespace fretwork::kronecker::strided {
namespace {

/// The tiles there are kernels for.
std::vector<Tile> weight_tiles(int size) {
  if (size == 2) {
    return {{2, 16, 2}, {2, 8, 4}, {2, 4, 4}, {2, 2, 8}};
  }
  return {{4, 8, 4}, {4, 4, 4}, {4, 2, 8}};
}

KernelSpec weight_kernel(DType dtype, int products, const Tile& tile) {
  return kernel_spec("strided_gradient", KernelSpec::kBySize, "strided::gradient", dtype, products, tile.v, tile.wm);
}
/// On Hopper: of whole lines where d is 2 or 4 (`broad`: a FlatTile's), else by clusters (`flat`: lines of four
/// columns).
KernelSpec cluster_weight_kernel(DType dtype, int deltas, bool flat_or_broad) {
  const char* const work = deltas < 16 ? "strided::FlatGradient" : "strided::ClusterGradient";
  return kernel_spec("strided_cluster_gradient", KernelSpec::kBySize, "strided::cluster_gradient",
                     instance(work, dtype, deltas, flat_or_broad));
}

std::vector<KernelSpec> list_kernels(const std::string& arch) {
  std::vector<KernelSpec> list;
  for (const DType dtype : {DType::f16, DType::bf16, DType::f32}) {
    const int size = static_cast<int>(size_of(dtype));
    for (const int products : dtype == DType::f32 ? std::vector{1, 3} : std::vector{1}) {
      for (const Tile& tile : weight_tiles(size)) {
        list.push_back(weight_kernel(dtype, products, tile));
      }
    }
    if (arch == "sm_90a" && size == 2) {
      for (const int deltas : {2, 4, 16, 32, 64}) {
        list.push_back(cluster_weight_kernel(dtype, deltas, false));
      }
      list.push_back(cluster_weight_kernel(dtype, 4, true));
      list.push_back(cluster_weight_kernel(dtype, 16, true));
    }
  }
  return list;
}
const KernelList kKernels{"kronecker", list_kernels};

/// (δ, n, column, i), in boxes of `deltas` × 16 n × `columns`; `flat`: lines of four columns, of which d is 16.
Map make_batch_map(const Matrix& m, std::int64_t batch, const Sizes& s, std::int64_t count, int columns, int deltas,
                   bool flat) {
  const auto u64 = [](std::int64_t n) { return static_cast<std::uint64_t>(n); };
  const std::int64_t per = flat ? 4 : 1;
  const std::uint64_t sizes[] = {u64(s.d * per), u64(batch), u64(count / per), u64(s.a)};
  const std::uint64_t strides[] = {batch == 1 ? 32 : u64(m.batch) * 2, u64(s.d * per) * 2, u64(count * s.d) * 2};
  const driver::Swizzle swizzle = flat || deltas == 64 ? driver::Swizzle::b128
                                  : deltas == 32       ? driver::Swizzle::b64
                                                       : driver::Swizzle::b32;
  return encoded(m, sizes, strides,
                 {static_cast<std::uint32_t>(flat ? 64 : deltas), ClusterGradientTile::kDepth,
                  static_cast<std::uint32_t>(columns / per), 1},
                 swizzle);
}

/// Columns that L2 carries per row of the batch and δ, sectors counted whole.
double weight_columns(const Tile& tile, const Sizes& s) {
  return double(ceil_div(s.b, tile.rows()) * s.c + ceil_div(s.c, tile.width()) * s.b) * sectors(tile, s.d);
}

std::optional<Tile> plan_weight(const WeightProblem& problem, int shared_limit) {
  const Sizes& s = problem.sizes;
  std::optional<Tile> best;
  for (const Tile& tile : weight_tiles(static_cast<int>(size_of(problem.dtype)))) {
    if (tile_fits(tile, s.d, problem.batch, problem.x, problem.d_y) && 2 * tile.batch_stage() <= shared_limit &&
        (!best || weight_columns(tile, s) < weight_columns(*best, s))) {
      best = tile;
    }
  }
  return best;
}

/// How Hopper's kernel divides a gradient: columns j and k, δ, batch rows and bytes of a CTA's stage, and CTAs of a
/// cluster.
struct ClusterPlan {
  bool lines;  ///< d is 2 or 4: FlatGradient
  bool flat_or_broad;
  int high, wide, deltas, depth, stage, shared;
  int warp_columns;  ///< k that take turns in adding up the bias
  int rows = 1, columns = 1;
};

/// The FlatTile that has less of it outside the matrix.
ClusterPlan plan_lines(const Sizes& s) {
  const FlatTile high{static_cast<int>(s.d)}, broad{high.v, true};
  const auto tiles = [&](const FlatTile& t) { return ceil_div(s.b, t.rows()) * ceil_div(s.c, t.columns()); };
  const FlatTile& t = s.d == 4 && tiles(broad) < tiles(high) ? broad : high;
  return {true, t.broad, t.rows(), t.columns(), t.v, FlatTile::kDepth, t.stage(), t.shared(), t.warp_columns()};
}

/// By times on an H200. Lines of 128 bytes, 64 δ or four columns of 16, need the fewest copies; large blocks read them
/// more often, and 32 δ make squarer tiles. Clusters pay only where they waste nothing.
ClusterPlan plan_clusters(const Sizes& s) {
  constexpr std::int64_t kLarge = 1 << 15, kMany = 64, kSome = 16;  // weights of a product; CTAs, and of a factor
  constexpr int kColumns = ClusterGradientTile::kColumns;
  const bool flat = s.d == 16 && s.b % 4 == 0 && s.c % 4 == 0;
  const ClusterGradientTile t{s.d % 64 == 0 && (s.b * s.c < kLarge || s.b < s.c) ? 64 : s.d % 32 == 0 ? 32 : 16};
  ClusterPlan plan{false,     flat,       t.rows(), kColumns, t.deltas, ClusterGradientTile::kDepth,
                   t.stage(), t.shared(), kColumns};
  const auto dividing = [](std::int64_t slabs, int most) {
    while (slabs % most != 0) {
      most /= 2;
    }
    return most;
  };
  const std::int64_t high = ceil_div(s.b, t.rows()), wide = ceil_div(s.c, kColumns);
  if (flat) {
    plan.columns = wide == 2 ? 2 : 1;
  } else if (t.deltas < 64 || (high * wide >= kSome && s.a * (s.d / 64) * high * wide >= kMany)) {
    plan.rows = dividing(high, 4);
    plan.columns = dividing(wide, t.deltas == 64 ? 2 : 4 / plan.rows);
  }
  return plan;
}
ClusterPlan plan_cluster(const Sizes& s) { return s.d == 2 || s.d == 4 ? plan_lines(s) : plan_clusters(s); }

WeightParams weight_params(const WeightProblem& problem) {
  const Sizes& s = problem.sizes;
  WeightParams params{};
  params.x = problem.x.data;
  params.dy = problem.d_y.data;
  params.batch = problem.batch;
  params.x_stride = problem.x.batch;
  params.dy_stride = problem.d_y.batch;
  params.weights = s.a * s.b * s.c * s.d;
  params.features = s.a * s.b * s.d;
  params.b = static_cast<int>(s.b);
  params.c = static_cast<int>(s.c);
  params.d = static_cast<int>(s.d);
  params.bias_shares = 1;
  return params;
}

/// Room for the pieces of d_w and, where wanted, of d_bias.
struct Partials {
  Workspace weights, bias;
  Partials(const WeightProblem& problem, WeightParams& params, Context& context)
      : weights(context, static_cast<std::size_t>(params.pieces * params.weights) * sizeof(float)),
        bias(context,
             problem.d_bias.data != nullptr
                 ? static_cast<std::size_t>(params.pieces * params.bias_shares * params.features) * sizeof(float)
                 : 0) {
    params.partials = static_cast<float*>(weights.data());
    params.bias_partials = static_cast<float*>(bias.data());
  }
};
constexpr std::int64_t kMostShares = 4;                   // in adding up a bias
constexpr double kPartial = 2.0 * sizeof(float) * 32768;  // sums of a CTA, written and read again

int ring_of(const Tile& tile, int shared_limit) { return std::clamp(shared_limit / tile.batch_stage(), 2, 4); }

void reduce(const WeightProblem& problem, const WeightParams& params, Context& context) {
  kronecker::reduce(
      problem,
      {params.partials, params.pieces, false, params.bias_partials, std::int64_t{params.pieces} * params.bias_shares},
      context);
}

/// Both operands for one of Hopper's kernels.
Map cluster_map(const Matrix& m, const WeightProblem& problem, const ClusterPlan& plan, std::int64_t count, int box) {
  const Sizes& s = problem.sizes;
  if (!plan.lines) {
    return make_batch_map(m, problem.batch, s, count, box, plan.deltas, plan.flat_or_broad);
  }
  return make_map(m, problem.batch, {static_cast<std::uint64_t>(count * s.d), static_cast<std::uint64_t>(s.a)},
                  {64, 1, FlatTile::kDepth}, driver::Swizzle::b128);
}

/// Groups of tiles, each a cluster's, and the pieces of the batch, of which `at_once` clusters run.
struct ClusterCut {
  std::int64_t slabs_b, slabs_c, groups, stages, pieces;
  ClusterCut(const WeightProblem& p, const ClusterPlan& plan, std::int64_t at_once)
      : slabs_b(ceil_div(p.sizes.b, plan.high * plan.rows)),
        slabs_c(ceil_div(p.sizes.c, plan.wide * plan.columns)),
        groups(p.sizes.a * (p.sizes.d / plan.deltas) * slabs_b * slabs_c),
        stages(ceil_div(p.batch, plan.depth)),
        pieces(pieces_of(groups, stages, at_once, plan.stage, 64 * 1024.0 + kPartial)) {}
};

void run_clusters(const WeightProblem& problem, Context& context) {
  const Sizes& s = problem.sizes;
  const ClusterPlan plan = plan_cluster(s);
  const int size = plan.rows * plan.columns, device = context.device.index;
  const Kernel& kernel = get_kernel(cluster_weight_kernel(problem.dtype, plan.deltas, plan.flat_or_broad), device);
  const ClusterCut cut(problem, plan,
                       plan.lines ? driver::device_info(device).multiprocessors
                                  : kernel.resident_clusters(size, ClusterTile::kThreads, plan.shared));
  ClusterWeightParams params{cluster_map(problem.x, problem, plan, s.c, plan.wide / plan.rows),
                             cluster_map(problem.d_y, problem, plan, s.b, plan.high / plan.columns),
                             weight_params(problem), plan.rows, plan.columns,
                             // Where memory is the limit, CTAs that read the same lines should not drift apart.
                             s.b * s.c > 84 * (s.b + s.c)};
  WeightParams& weight = params.weight;
  weight.slabs_b = static_cast<int>(cut.slabs_b);
  weight.slabs_c = static_cast<int>(cut.slabs_c);
  weight.groups = static_cast<int>(cut.groups);
  weight.pieces = static_cast<int>(cut.pieces);
  weight.bias_shares = static_cast<int>(std::min(kMostShares, ceil_div(s.c, plan.warp_columns)));
  const Partials partials(problem, weight, context);
  const std::int64_t ctas = cut.groups * cut.pieces * size;
  if (plan.lines) {
    kernel.launch(ctas, FlatTile::kThreads, plan.shared, &params, context.stream);
  } else {
    kernel.launch_clusters(ctas, size, ClusterTile::kThreads, plan.shared, &params, context.stream);
  }
  reduce(problem, weight, context);
}

/// Tiles of a weight gradient by CTAs on their own, and the pieces that the batch is cut into.
struct WeightCut {
  std::int64_t slabs_b, slabs_c, groups, tiles, pieces;
  WeightCut(const WeightProblem& p, const Tile& tile, std::int64_t multiprocessors)
      : slabs_b(ceil_div(p.sizes.b, tile.rows())),
        slabs_c(ceil_div(p.sizes.c, tile.width())),
        groups(p.sizes.a * (p.sizes.d / tile.v) * slabs_b * slabs_c),
        tiles(std::max<std::int64_t>(1, ceil_div(p.batch, tile.batch_rows()))),
        pieces(pieces_of(groups, tiles, multiprocessors, tile.batch_stage(), 64 * 1024.0 + kPartial)) {}
};

void run_alone(const WeightProblem& problem, const Tile& tile, Context& context) {
  const Sizes& s = problem.sizes;
  const driver::DeviceInfo& device = driver::device_info(context.device.index);
  const WeightCut cut(problem, tile, device.multiprocessors);
  WeightParams params = weight_params(problem);
  params.slabs_b = static_cast<int>(cut.slabs_b);
  params.slabs_c = static_cast<int>(cut.slabs_c);
  params.groups = static_cast<int>(cut.groups);
  params.ring = ring_of(tile, device.shared_per_block);
  params.pieces = static_cast<int>(cut.pieces);
  params.x_flat = flat(tile, s, s.c, problem.batch, problem.x, 16);
  params.dy_flat = flat(tile, s, s.b, problem.batch, problem.d_y, 16);
  const Partials partials(problem, params, context);
  const int products = products_of(problem.dtype, context.precision);
  get_kernel(weight_kernel(problem.dtype, products, tile), context.device.index)
      .launch(std::int64_t{params.groups} * params.pieces, kThreads, params.ring * tile.batch_stage(), &params,
              context.stream);
  reduce(problem, params, context);
}

/// The sums of `pieces`, written by one kernel and added up by another.
double reduce_cost(const Sizes& s, std::int64_t pieces, double multiprocessors) {
  constexpr double kRate = 0.7e6;
  return cost::pass(0.0, double(pieces) * weight_bytes(s, DType::f32), kRate, multiprocessors);
}

double alone_cost(const WeightProblem& p, const Tile& tile, double multiprocessors) {
  constexpr cost::Rates k16 = {3.9, 4.2e6, 1.13e6}, kTf32 = {3.8, 2.9e6, 0.41e6};
  constexpr double kShortRuns = 6.5;  // µs more where sums of two δ leave 8 bytes at a time
  const WeightCut cut(p, tile, static_cast<std::int64_t>(multiprocessors));
  const cost::Tiles tiles{.count = double(cut.groups * cut.pieces),
                          .at_once = multiprocessors,
                          .steps = double(ceil_div(cut.tiles, cut.pieces)),
                          .bytes = double(tile.batch_stage()) * sectors(tile, p.sizes.d),
                          .ops = 2.0 * tile.rows() * tile.width() * tile.v * tile.batch_rows(),
                          .out = 0};
  return cost::microseconds(tiles, tile.size == 2 ? k16 : kTf32, batch_bytes(p.sizes, p.batch, p.dtype),
                            multiprocessors) +
         reduce_cost(p.sizes, cut.pieces, multiprocessors) + (tile.v == 2 ? kShortRuns : 0.0);
}

double clusters_cost(const WeightProblem& p, double multiprocessors) {
  constexpr cost::Rates kLines = {3.2, 15.6e6, 2.67e6}, kClusters = {3.2, 9.3e6, 2e7};
  constexpr double kReduce = 2.1;
  const ClusterPlan plan = plan_cluster(p.sizes);
  const int size = plan.rows * plan.columns;
  const auto at_once = static_cast<std::int64_t>(multiprocessors) / size;
  const ClusterCut cut(p, plan, at_once);
  const cost::Tiles work{
      .count = double(cut.groups * cut.pieces),
      .at_once = double(at_once),
      .steps = double(ceil_div(cut.stages, cut.pieces)),
      .bytes = 2.0 * plan.depth * plan.deltas * (double(plan.high) / plan.columns + double(plan.wide) / plan.rows),
      .ops = 2.0 * plan.high * plan.wide * plan.deltas * plan.depth,
      .out = 4.0 * plan.high * plan.wide * plan.deltas,
      .ctas = double(size)};
  return cost::microseconds(work, plan.lines ? kLines : kClusters, batch_bytes(p.sizes, p.batch, p.dtype),
                            multiprocessors) +
         kReduce + reduce_cost(p.sizes, cut.pieces, multiprocessors);
}

}  // namespace

bool fits(const WeightProblem& p, const Config& config, const Machine& machine) {
  if (!suits(p.sizes, p.dtype, machine)) {
    return false;
  }
  if (config.family != Family::cluster) {
    return plan_weight(p, machine.shared).has_value();
  }
  const auto& [a, b, c, d] = p.sizes;
  const bool lines = (d == 2 || d == 4) && (a == 1 || (b * d % 8 == 0 && c * d % 8 == 0));
  return (lines || d % 16 == 0) && clusters_fit(p.dtype, p.batch, p.x, p.d_y, machine);
}

double cost(const WeightProblem& p, const Config& config, const Machine& machine) {
  return config.family == Family::cluster ? clusters_cost(p, machine.multiprocessors)
                                          : alone_cost(p, *plan_weight(p, machine.shared), machine.multiprocessors);
}

void launch(const WeightProblem& p, const Config& config, Context& context) {
  if (config.family != Family::cluster) {
    return run_alone(p, *plan_weight(p, driver::device_info(context.device.index).shared_per_block), context);
  }
  run_clusters(p, context);
}

}  // namespace fretwork::kronecker::strided
