// Batch first with d > 1 on the tensor cores, the product: how many δ stay together, what stays on chip, the launches.
#include "ops/kronecker/cuda/strided.h"

#include <cmath>
#include <optional>

namespace fretwork::kronecker::strided {
namespace {

/// The tiles there are kernels for, those of whole 32-byte sectors first. Rows are 16·wm.
std::vector<Tile> product_tiles(int size, int products) {
  if (size == 2) {
    return {{2, 16, 2}, {2, 16, 4}, {2, 8, 4}, {2, 8, 8}, {2, 4, 4}, {2, 4, 8}, {2, 2, 8}};
  }
  if (products == 3) {  // the halves of tf32x3 need the registers that a taller tile of 8 would
    return {{4, 8, 4}, {4, 4, 4}, {4, 4, 8}, {4, 2, 8}};
  }
  return {{4, 8, 4}, {4, 8, 8}, {4, 4, 4}, {4, 4, 8}, {4, 2, 8}};
}

KernelSpec pack_kernel(DType dtype, int deltas) { return kernel_spec("pack", 0, "strided::pack", dtype, deltas); }

KernelSpec product_kernel(DType dtype, int products, const Tile& tile) {
  return kernel_spec("strided", KernelSpec::kBySize, "strided::product", dtype, products, tile.v, tile.wm);
}
/// `flat`: d is 16.
KernelSpec cluster_kernel(DType dtype, const ClusterTile& tile, bool flat) {
  return kernel_spec("strided_cluster", tile.shared(), "strided::cluster_product", dtype, tile.v, tile.columns, flat);
}

std::vector<KernelSpec> list_kernels(const std::string& arch) {
  std::vector<KernelSpec> list;
  for (const DType dtype : {DType::f16, DType::bf16, DType::f32}) {
    const int size = static_cast<int>(size_of(dtype));
    for (const int products : dtype == DType::f32 ? std::vector{1, 3} : std::vector{1}) {
      for (const Tile& tile : product_tiles(size, products)) {
        list.push_back(product_kernel(dtype, products, tile));
      }
    }
    for (int v = 32 / size; v >= 2; v /= 2) {
      list.push_back(pack_kernel(dtype, v));
    }
    if (arch == "sm_90a" && size == 2) {
      for (const int v : {8, 4, 2}) {
        for (const int most : {256, 192}) {
          list.push_back(cluster_kernel(dtype, {v, most / v}, false));
        }
      }
      for (const int columns : {32, 24}) {
        list.push_back(cluster_kernel(dtype, {8, columns}, true));
      }
    }
  }
  return list;
}
const KernelList kKernels{"kronecker", list_kernels};

struct Plan {
  Tile tile{};
  int columns = 0, slab = 0, slabs = 0, stages = 0, ring = 0;
  bool resident = false;
  double l2 = 0;  ///< bytes through L2 per row of the batch and δ
  std::int64_t w_bytes() const { return static_cast<std::int64_t>(stages) * w_stage(); }
  std::int64_t w_stage() const { return static_cast<std::int64_t>(tile.steps()) * tile.v * slab * 32; }
  std::int64_t shared() const { return resident ? w_bytes() + ring * tile.stage() : ring * (tile.stage() + w_stage()); }
};

std::optional<Plan> plan_for(const Tile& tile, const Sizes& s, std::int64_t shared_limit) {
  Plan plan;
  plan.tile = tile;
  const std::int64_t slabs = ceil_div(s.b, tile.width());
  plan.columns = static_cast<int>(ceil_div(ceil_div(ceil_div(s.b, slabs), tile.wn()), tile.unit())) * tile.unit();
  plan.slab = plan.columns * tile.wn();
  plan.slabs = static_cast<int>(ceil_div(s.b, plan.slab));
  plan.stages = static_cast<int>(ceil_div(s.c, tile.steps() * tile.depth()));
  const auto find_ring = [&](bool resident) {
    constexpr int kInFlight = 32 * 1024;  // bytes that hide memory's latency
    plan.resident = resident;
    for (plan.ring = 4; plan.ring >= 2 && (!resident || (plan.ring - 1) * tile.stage() >= kInFlight); --plan.ring) {
      if (plan.shared() <= shared_limit) {
        return true;
      }
    }
    return false;
  };
  if (!find_ring(true) && !find_ring(false)) {
    return std::nullopt;
  }
  const double again = plan.resident ? 0 : double(plan.slabs) * plan.slab / tile.rows();
  plan.l2 = tile.size * (double(plan.slabs * s.c + s.b) * sectors(tile, s.d) + again * double(s.c));
  return plan;
}

/// Packs the weights in the order of PackParams, in groups of `deltas` δ.
void pack(const Problem& problem, int deltas, int slab, int slabs, int steps, bool turned, void* to, Context& context) {
  const Sizes& s = problem.sizes;
  PackParams params{};
  params.from = problem.w.data;
  params.to = to;
  params.stride_a = problem.w.a;
  params.stride_b = problem.w.b;
  params.stride_c = problem.w.c;
  params.stride_d = problem.w.d;
  params.rows = s.a * (s.d / deltas) * slabs * steps * slab;
  params.b = static_cast<int>(s.b);
  params.c = static_cast<int>(s.c);
  params.d = static_cast<int>(s.d);
  params.slab = slab;
  params.slabs = slabs;
  params.steps = steps;
  params.turned = turned;
  const int size = static_cast<int>(size_of(problem.dtype)), bytes = std::min(16, deltas * size);
  const Weights& w = problem.w;
  params.vector = w.d == 1 && is_aligned(w.data, {w.a, w.b, w.c}, size, bytes);
  get_kernel(pack_kernel(problem.dtype, deltas), context.device.index)
      .launch(ceil_div(2 * params.rows, kThreads), kThreads, 0, &params, context.stream);
}

/// The parameters that both product kernels share.
ProductParams product_params(const Problem& problem, const void* packed) {
  const Sizes& s = problem.sizes;
  ProductParams params{};
  params.x = problem.x.data;
  params.y = problem.y.data;
  params.w = packed;
  params.bias = problem.bias.data;
  params.batch = problem.batch;
  params.x_stride = problem.x.batch;
  params.y_stride = problem.y.batch;
  params.bias_stride = static_cast<int>(problem.bias.stride);
  params.b = static_cast<int>(s.b);
  params.c = static_cast<int>(s.c);
  params.d = static_cast<int>(s.d);
  params.activation = static_cast<int>(problem.activation);
  params.bias_vector = problem.bias.data != nullptr && problem.bias.stride == 1 && is_aligned(problem.bias.data, 16);
  return params;
}

struct ClusterPlan {
  ClusterTile tile{};
  int rows = 1, columns = 1;  ///< of CTAs
  int across = 1;             ///< clusters along b
};

/// By times on an H200. Where d is all of a CTA's δ (`flat`), the copy engine fetches whole lines, and CTAs need not
/// share more than two can; elsewhere each piece of 32 bytes should serve as many as possible.
ClusterPlan plan_cluster(const Sizes& s, int v, bool flat) {
  const auto padded = [&](int columns) { return ceil_div(s.b, columns) * columns; };
  ClusterPlan plan;
  if (flat) {
    const bool narrow = 5 * padded(192 / v) < 4 * padded(256 / v);
    plan.tile = {v, (narrow ? 192 : 256) / v};
    const std::int64_t slabs = ceil_div(s.b, plan.tile.columns);
    plan.columns = slabs == 2 || (slabs % 2 == 0 && (s.c >= 512 || (v == 8 && slabs >= 8))) ? 2 : 1;
  } else {
    plan.tile = {v, s.b <= 96 ? 24 : 32};
    plan.rows = 2;
    plan.columns = 4;
  }
  plan.across = static_cast<int>(ceil_div(s.b, plan.columns * plan.tile.columns));
  return plan;
}

/// The V with which clusters can take the product, else 0.
int cluster_v(const Problem& problem, const Machine& machine) {
  const Sizes& s = problem.sizes;
  if (!clusters_fit(problem.dtype, problem.batch, problem.x, problem.y, machine)) {
    return 0;
  }
  const bool flat = s.a == 1 || s.c * s.d % 8 == 0;
  return s.d % 16 == 0 ? 8 : (s.d == 4 || s.d == 2) && flat ? static_cast<int>(s.d) : 0;
}

void run_clusters(const Problem& problem, const ClusterPlan& plan, Context& context) {
  const Sizes& s = problem.sizes;
  const ClusterTile& tile = plan.tile;
  const auto u64 = [](std::int64_t n) { return static_cast<std::uint64_t>(n); };
  const auto u32 = [](int n) { return static_cast<std::uint32_t>(n); };
  const int slabs = plan.across * plan.columns;
  const int stages = static_cast<int>(ceil_div(s.c, 16 * tile.steps()));
  const std::int64_t blocks = s.a * (s.d / tile.deltas());
  const std::int64_t group_bytes = std::int64_t{stages} * tile.stage_w();
  const bool flat = s.d == tile.deltas();  // all δ of a k lie together
  const Workspace packed(context, static_cast<std::size_t>(blocks * slabs * group_bytes));
  pack(problem, tile.deltas(), tile.columns, slabs, stages * tile.steps(), flat && tile.v == 8, packed.data(), context);

  ClusterParams params{};
  params.product = product_params(problem, packed.data());
  params.product.columns = tile.columns;
  params.product.slab = tile.columns;
  params.product.slabs = slabs;
  params.product.stages = stages;
  params.cluster_rows = plan.rows;
  params.cluster_columns = plan.columns;
  const std::uint32_t rows = u32(tile.rows() / plan.columns);
  if (flat) {
    const int line = tile.v == 2 ? 32 : 64;  // elements
    params.x = make_map(problem.x, problem.batch, {u64(s.c * s.d), u64(s.a)}, {u32(line), 1, rows},
                        line == 64 ? driver::Swizzle::b128 : driver::Swizzle::b64);
  } else {
    params.x =
        make_map(problem.x, problem.batch, {u64(s.d), u64(s.c), u64(s.a)}, {16, 16, 1, rows}, driver::Swizzle::b32);
  }
  if (tile.v == 8 && flat) {
    params.y = make_map(problem.y, problem.batch, {u64(s.b * s.d), u64(s.a)}, {64, 1, u32(tile.rows())},
                        driver::Swizzle::b128);
  } else if (tile.v == 8) {
    params.y = make_map(problem.y, problem.batch, {u64(s.d), u64(s.b), u64(s.a)}, {16, 8, 1, u32(tile.rows())},
                        driver::Swizzle::b32);
  } else if (s.b * s.d % 8 == 0) {  // lines end with whole units of 16 bytes
    params.staged = true;
    params.y = make_map(problem.y, problem.batch, {u64(s.b * s.d), u64(s.a)}, {64, 1, 64}, driver::Swizzle::b128);
  }
  params.product.y_flat = s.a == 1 || s.b % 2 == 0;
  const int size = plan.rows * plan.columns;
  const std::int64_t groups = blocks * plan.across;
  const Kernel& kernel = get_kernel(cluster_kernel(problem.dtype, tile, flat && tile.v == 8), context.device.index);
  params.product.groups = static_cast<int>(groups);
  params.items = groups * ceil_div(problem.batch, std::int64_t{plan.rows} * tile.rows());
  const std::int64_t clusters =
      std::min<std::int64_t>(params.items, kernel.resident_clusters(size, ClusterTile::kThreads, tile.shared()));
  kernel.launch_clusters(clusters * size, size, ClusterTile::kThreads, tile.shared(), &params, context.stream, true);
}

void run_alone(const Problem& problem, const Plan& plan, Context& context) {
  const Sizes& s = problem.sizes;
  const Tile& tile = plan.tile;
  const std::int64_t groups = s.a * (s.d / tile.v) * plan.slabs;
  const std::int64_t tiles = ceil_div(problem.batch, tile.rows());
  const Workspace packed(context, static_cast<std::size_t>(groups * plan.w_bytes()));
  pack(problem, tile.v, plan.slab, plan.slabs, plan.stages * tile.steps(), false, packed.data(), context);
  ProductParams params = product_params(problem, packed.data());
  params.columns = plan.columns;
  params.slab = plan.slab;
  params.slabs = plan.slabs;
  params.stages = plan.stages;
  params.groups = static_cast<int>(groups);
  params.pieces = static_cast<int>(pieces_of(groups, tiles, driver::device_info(context.device.index).multiprocessors,
                                             plan.l2 * tile.rows() * tile.v / plan.slabs,
                                             64 * 1024.0 + (plan.resident ? double(plan.w_bytes()) : 0.0)));
  params.ring = plan.ring;
  params.resident = plan.resident;
  params.x_flat = flat(tile, s, s.c, problem.batch, problem.x, 16);
  params.y_flat = flat(tile, s, s.b, problem.batch, problem.y, 2 * tile.v * tile.size);
  const int products = products_of(problem.dtype, context.precision);
  get_kernel(product_kernel(problem.dtype, products, tile), context.device.index)
      .launch(groups * params.pieces, kThreads, static_cast<int>(plan.shared()), &params, context.stream);
}

/// The tile of a config, planned for the problem.
std::optional<Plan> plan_of(const Problem& p, const Config& config, std::int64_t shared_limit) {
  return plan_for({static_cast<int>(size_of(p.dtype)), config.first, config.second}, p.sizes, shared_limit);
}

double alone_cost(const Problem& p, const Plan& plan, int products, double multiprocessors) {
  // What the kernel reaches with `mma`; tf32x3 multiplies three times.
  constexpr cost::Rates k16 = {0.0, 5.0e6, 1.0e6, 0.88}, kTf32 = {0.0, 3.8e6, 0.42e6, 0.98};
  constexpr double kPack = 6.0, kPackTf32 = 4.1, kPackRate = 2.2e6;  // µs, and bytes per µs
  const Sizes& s = p.sizes;
  const Tile& tile = plan.tile;
  const double wasted = sectors(tile, s.d);
  cost::Rates rates = tile.size == 2 ? k16 : kTf32;
  rates.ops /= products;
  const cost::Tiles tiles{.count = double(ceil_div(p.batch, tile.rows()) * s.a * (s.d / tile.v) * plan.slabs),
                          .at_once = multiprocessors,
                          .steps = double(plan.stages),
                          .bytes = double(tile.stage()) * wasted + (plan.resident ? 0.0 : double(plan.w_stage())),
                          .ops = 2.0 * tile.rows() * plan.slab * tile.v * tile.steps() * tile.depth(),
                          .out = double(tile.rows()) * plan.slab * tile.v * tile.size * wasted};
  const double weights = weight_bytes(s, p.dtype);
  const double far_apart = 1 + 0.15 * std::max(0.0, std::log2(double(s.d) / 16));  // lines of one δ in memory
  return cost::microseconds(tiles, rates, moved_bytes(p), multiprocessors) * far_apart +
         cost::pass(tile.size == 2 ? kPack : kPackTf32, 2 * weights, kPackRate, multiprocessors);
}

double clusters_cost(const Problem& p, const ClusterPlan& plan, double multiprocessors) {
  // Whole lines, or pieces of 32 bytes that eight CTAs share: then arithmetic waits for the copies.
  constexpr cost::Rates kLines = {0.0, 8.8e6, 6.8e6, 0.0, 4.0e6}, kSectors = {1.4, 2e7, 0.89e6};
  constexpr double kPack = 4.6, kPackRate = 1.76e6;
  const Sizes& s = p.sizes;
  const ClusterTile& tile = plan.tile;
  const int size = plan.rows * plan.columns;
  const double count = double(s.a * (s.d / tile.deltas()) * plan.across) *
                       double(ceil_div(p.batch, std::int64_t{plan.rows} * tile.rows()));
  const cost::Tiles tiles{.count = count,
                          .at_once = std::floor(multiprocessors / size * (size == 8 ? 0.92 : 1.0)),  // of whole GPCs
                          .steps = double(ceil_div(s.c, std::int64_t{16} * tile.steps())),
                          .bytes = double(tile.stage_x()) / plan.columns + double(tile.stage_w()) / plan.rows,
                          .ops = 2.0 * tile.rows() * tile.columns * tile.deltas() * tile.steps() * 16,
                          .out = 2.0 * tile.rows() * tile.columns * tile.deltas(),
                          .ctas = double(size)};
  const double weights = weight_bytes(s, p.dtype);
  return cost::microseconds(tiles, s.d == tile.deltas() ? kLines : kSectors, moved_bytes(p), multiprocessors) +
         cost::pass(kPack, 2 * weights, kPackRate, multiprocessors);
}

}  // namespace

std::vector<Config> configs(DType dtype, Precision precision) {
  std::vector<Config> list{{Family::cluster}};
  if (const int products = products_of(dtype, precision); products > 0) {
    for (const Tile& tile : product_tiles(static_cast<int>(size_of(dtype)), products)) {
      list.push_back({Family::strided, tile.v, tile.wm});
    }
  }
  return list;
}

bool fits(const Problem& p, const Config& config, const Machine& machine) {
  const Sizes& s = p.sizes;
  if (!suits(s, p.dtype, machine) ||
      std::abs(p.bias.stride) * s.a * s.b * s.d > std::numeric_limits<std::int32_t>::max()) {
    return false;
  }
  if (config.family == Family::cluster) {
    return cluster_v(p, machine) != 0;
  }
  const std::vector<Config> known = configs(p.dtype, machine.precision);
  const Tile tile{static_cast<int>(size_of(p.dtype)), config.first, config.second};
  return std::ranges::find(known, config) != known.end() && tile_fits(tile, s.d, p.batch, p.x, p.y) &&
         plan_of(p, config, machine.shared).has_value();
}

double cost(const Problem& p, const Config& config, const Machine& machine) {
  if (config.family == Family::cluster) {
    const int v = cluster_v(p, machine);
    return clusters_cost(p, plan_cluster(p.sizes, v, p.sizes.d == ClusterTile{v, 0}.deltas()), machine.multiprocessors);
  }
  return alone_cost(p, *plan_of(p, config, machine.shared), products_of(p.dtype, machine.precision),
                    machine.multiprocessors);
}

void launch(const Problem& p, const Config& config, Context& context) {
  if (config.family == Family::cluster) {
    const int v = cluster_v(p, machine_of(context));
    return run_clusters(p, plan_cluster(p.sizes, v, p.sizes.d == ClusterTile{v, 0}.deltas()), context);
  }
  run_alone(p, *plan_of(p, config, driver::device_info(context.device.index).shared_per_block), context);
}

}  // namespace fretwork::kronecker::strided
