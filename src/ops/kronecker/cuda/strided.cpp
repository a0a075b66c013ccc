// Batch first with d > 1 on the tensor cores: how many δ stay together, what stays on chip, pieces of the batch, costs
// and launches of products and of gradients.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "ops/kronecker/cuda/families.h"
#include "ops/kronecker/cuda/params.h"
#include "runtime/alignment.h"
#include "runtime/cost.h"
#include "runtime/cuda_driver.h"
#include "runtime/kernels.h"

namespace fretwork::kronecker::strided {
namespace {

namespace driver = fretwork::cuda;

/// 3 for tf32x3, 1 for the other types with tensor cores here, else 0.
int products_of(DType dtype, Precision precision) {
  if (dtype == DType::f32) {
    return precision == Precision::tf32 ? 1 : precision == Precision::tf32x3 ? 3 : 0;
  }
  return dtype == DType::f16 || dtype == DType::bf16 ? 1 : 0;
}

bool small_enough(const Sizes& s) {
  constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max() / 64;
  return s.b * s.d <= kMost && s.c * s.d <= kMost && s.a * s.d * std::max(s.b, s.c) <= kMost * 16;
}

/// Whether rows and features lie so that `bytes` can be moved at once from every multiple of `bytes`.
bool moves(const Matrix& m, std::int64_t batch, int size, int bytes) {
  return m.feature == 1 && is_aligned(m.data, bytes) && (batch == 1 || m.batch * size % bytes == 0);
}

/// Whether the δ groups of `tile` can be moved: d holds whole groups, and they are aligned.
bool tile_fits(const Tile& tile, std::int64_t d, std::int64_t batch, const Matrix& one, const Matrix& other) {
  const int bytes = std::min(16, tile.v * tile.size);
  return d % tile.v == 0 && moves(one, batch, tile.size, bytes) && moves(other, batch, tile.size, bytes);
}

/// With fewer δ than a chunk holds: whether neighbouring columns of m can be moved together.
bool flat(const Tile& tile, const Sizes& s, std::int64_t columns, std::int64_t batch, const Matrix& m, int bytes) {
  return s.d == tile.v && moves(m, batch, tile.size, bytes) && (s.a == 1 || columns * s.d * tile.size % bytes == 0);
}

/// L2 moves sectors of 32 bytes: how many times more than is asked for.
double sectors(const Tile& tile, std::int64_t d) {
  return d == tile.v ? 1.0 : std::max(1.0, 32.0 / (tile.v * tile.size));
}

/// Pieces of the batch: enough CTAs for the machine, whole waves where it matters. `before` is what a CTA moves before
/// its first tile.
std::int64_t pieces_of(std::int64_t groups, std::int64_t tiles, std::int64_t multiprocessors, double tile_bytes,
                       double before) {
  const std::int64_t most = std::min(tiles, std::max<std::int64_t>(1, 8 * multiprocessors / groups));
  std::int64_t best = 1;
  double least = std::numeric_limits<double>::max();
  for (std::int64_t pieces = 1; pieces <= most; ++pieces) {
    const double waves = double(ceil_div(groups * pieces, multiprocessors));
    const double cost = waves * (double(ceil_div(tiles, pieces)) * tile_bytes + before);
    if (cost < least) {
      least = cost;
      best = pieces;
    }
  }
  return best;
}

/// Whether the copy engine can fetch rows of both operands for clusters.
bool clusters_fit(DType dtype, std::int64_t batch, const Matrix& one, const Matrix& other, const Machine& machine) {
  return size_of(dtype) == 2 && machine.arch == "sm_90a" && batch > 0 &&
         batch <= std::numeric_limits<std::int32_t>::max() / 2 && one.batch > 0 && other.batch > 0 &&
         moves(one, batch, 2, 16) && moves(other, batch, 2, 16);
}

/// Sizes and boxes from the innermost axis; `strides`, in bytes, of all but that.
Map encoded(const Matrix& m, std::span<const std::int64_t> sizes, std::span<const std::int64_t> strides,
            std::initializer_list<int> box, driver::Swizzle swizzle) {
  const std::vector<std::uint64_t> of_axes(sizes.begin(), sizes.end()), apart(strides.begin(), strides.end());
  const std::vector<std::uint32_t> of_box(box.begin(), box.end());
  return std::bit_cast<Map>(driver::make_tensor_map(m.data, 2, of_axes, apart, of_box, swizzle));
}

/// `inner` and then the batch.
Map make_map(const Matrix& m, std::int64_t batch, std::initializer_list<std::int64_t> inner,
             std::initializer_list<int> box, driver::Swizzle swizzle) {
  std::vector<std::int64_t> sizes(inner), strides;
  std::int64_t bytes = 2;
  for (const std::int64_t size : inner) {
    bytes *= size;
    strides.push_back((bytes + 15) / 16 * 16);  // only a dimension of one factor is rounded
  }
  sizes.push_back(batch);
  strides.back() = batch == 1 ? strides.back() : m.batch * 2;
  return encoded(m, sizes, strides, box, swizzle);
}

/// What every kernel here needs.
bool suits(const Sizes& s, DType dtype, const Machine& machine) {
  return machine.number >= 80 && products_of(dtype, machine.precision) > 0 && s.d > 1 && small_enough(s);
}

// ---------------------------------------------------------------------------------------------- kernels

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

KernelSpec product_kernel(DType dtype, int products, const Tile& tile) {
  return kernel_spec("strided", KernelSpec::kBySize, "strided::product", dtype, products, tile.v, tile.wm);
}
/// `flat`: d is 16.
KernelSpec cluster_kernel(DType dtype, const ClusterTile& tile, bool flat) {
  return kernel_spec("strided_cluster", tile.shared(), "strided::cluster_product", dtype, tile.v, tile.columns, flat);
}

/// The same of gradients.
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
    const int size = bytes_of(dtype);
    for (const int products : dtype == DType::f32 ? std::vector{1, 3} : std::vector{1}) {
      for (const Tile& tile : product_tiles(size, products)) {
        list.push_back(product_kernel(dtype, products, tile));
      }
      for (const Tile& tile : weight_tiles(size)) {
        list.push_back(weight_kernel(dtype, products, tile));
      }
    }
    if (arch != "sm_90a" || size != 2) {
      continue;
    }
    for (const int most : {256, 192}) {
      for (const int v : {8, 4, 2}) {
        list.push_back(cluster_kernel(dtype, {v, most / v}, false));
      }
      list.push_back(cluster_kernel(dtype, {8, most / 8}, true));
    }
    for (const int deltas : {2, 4, 16, 32, 64}) {
      list.push_back(cluster_weight_kernel(dtype, deltas, false));
    }
    list.push_back(cluster_weight_kernel(dtype, 4, true));
    list.push_back(cluster_weight_kernel(dtype, 16, true));
  }
  return list;
}
const KernelList kKernels{"kronecker", list_kernels};

// ---------------------------------------------------------------------------------------------- products

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
  plan.columns = narrowed(ceil_div(ceil_div(ceil_div(s.b, slabs), tile.wn()), tile.unit())) * tile.unit();
  plan.slab = plan.columns * tile.wn();
  plan.slabs = narrowed(ceil_div(s.b, plan.slab));
  plan.stages = narrowed(ceil_div(s.c, tile.steps() * tile.depth()));
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
  params.bias_stride = narrowed(problem.bias.stride);
  params.b = narrowed(s.b);
  params.c = narrowed(s.c);
  params.d = narrowed(s.d);
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
  plan.across = narrowed(ceil_div(s.b, plan.columns * plan.tile.columns));
  return plan;
}

/// The V with which clusters can take the product, else 0.
int cluster_v(const Problem& problem, const Machine& machine) {
  const Sizes& s = problem.sizes;
  if (!clusters_fit(problem.dtype, problem.batch, problem.x, problem.y, machine)) {
    return 0;
  }
  const bool flat = s.a == 1 || s.c * s.d % 8 == 0;
  return s.d % 16 == 0 ? 8 : (s.d == 4 || s.d == 2) && flat ? narrowed(s.d) : 0;
}

void run_clusters(const Problem& problem, const ClusterPlan& plan, Context& context) {
  const Sizes& s = problem.sizes;
  const ClusterTile& tile = plan.tile;
  const int slabs = plan.across * plan.columns;
  const int stages = narrowed(ceil_div(s.c, 16 * tile.steps()));
  const std::int64_t blocks = s.a * (s.d / tile.deltas());
  const std::int64_t group_bytes = std::int64_t{stages} * tile.stage_w();
  const bool flat = s.d == tile.deltas();  // all δ of a k lie together
  const Workspace packed(context, static_cast<std::size_t>(blocks * slabs * group_bytes));
  pack_strided(problem, tile.deltas(), tile.columns, slabs, stages * tile.steps(), flat && tile.v == 8, packed.data(),
               context);

  ClusterParams params{};
  params.product = product_params(problem, packed.data());
  params.product.columns = tile.columns;
  params.product.slab = tile.columns;
  params.product.slabs = slabs;
  params.product.stages = stages;
  params.cluster_rows = plan.rows;
  params.cluster_columns = plan.columns;
  using enum driver::Swizzle;
  const int rows = tile.rows() / plan.columns, line = tile.v == 2 ? 32 : 64;  // the latter in elements
  params.x = flat ? make_map(problem.x, problem.batch, {s.c * s.d, s.a}, {line, 1, rows}, line == 64 ? b128 : b64)
                  : make_map(problem.x, problem.batch, {s.d, s.c, s.a}, {16, 16, 1, rows}, b32);
  params.staged = tile.v < 8 && s.b * s.d % 8 == 0;  // lines end with whole units of 16 bytes
  if (params.staged || (tile.v == 8 && flat)) {
    params.y = make_map(problem.y, problem.batch, {s.b * s.d, s.a}, {64, 1, 64}, b128);
  } else if (tile.v == 8) {
    params.y = make_map(problem.y, problem.batch, {s.d, s.b, s.a}, {16, 8, 1, tile.rows()}, b32);
  }
  params.product.y_flat = s.a == 1 || s.b % 2 == 0;
  const int size = plan.rows * plan.columns;
  const std::int64_t groups = blocks * plan.across;
  const Kernel& kernel = get_kernel(cluster_kernel(problem.dtype, tile, flat && tile.v == 8), context.device.index);
  params.product.groups = narrowed(groups);
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
  pack_strided(problem, tile.v, plan.slab, plan.slabs, plan.stages * tile.steps(), false, packed.data(), context);
  ProductParams params = product_params(problem, packed.data());
  params.columns = plan.columns;
  params.slab = plan.slab;
  params.slabs = plan.slabs;
  params.stages = plan.stages;
  params.groups = narrowed(groups);
  params.pieces = narrowed(pieces_of(groups, tiles, driver::device_info(context.device.index).multiprocessors,
                                     plan.l2 * tile.rows() * tile.v / plan.slabs,
                                     64 * 1024.0 + (plan.resident ? double(plan.w_bytes()) : 0.0)));
  params.ring = plan.ring;
  params.resident = plan.resident;
  params.x_flat = flat(tile, s, s.c, problem.batch, problem.x, 16);
  params.y_flat = flat(tile, s, s.b, problem.batch, problem.y, 2 * tile.v * tile.size);
  const int products = products_of(problem.dtype, context.precision);
  get_kernel(product_kernel(problem.dtype, products, tile), context.device.index)
      .launch(groups * params.pieces, kThreads, narrowed(plan.shared()), &params, context.stream);
}

/// The tile of a config, planned for the problem.
std::optional<Plan> plan_of(const Problem& p, const Config& config, std::int64_t shared_limit) {
  return plan_for({bytes_of(p.dtype), config.first, config.second}, p.sizes, shared_limit);
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
  constexpr double kPack = 4.0, kPackRate = 2.1e6;
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

// ---------------------------------------------------------------------------------------------- gradients

/// (δ, n, column, i), in boxes of `deltas` × 16 n × `columns`; `flat`: lines of four columns, of which d is 16.
Map make_batch_map(const Matrix& m, std::int64_t batch, const Sizes& s, std::int64_t count, int columns, int deltas,
                   bool flat) {
  using enum driver::Swizzle;
  const int per = flat ? 4 : 1;
  const std::int64_t sizes[] = {s.d * per, batch, count / per, s.a};
  const std::int64_t strides[] = {batch == 1 ? 32 : m.batch * 2, s.d * per * 2, count * s.d * 2};
  return encoded(m, sizes, strides, {flat ? 64 : deltas, ClusterGradientTile::kDepth, columns / per, 1},
                 flat || deltas == 64 ? b128
                 : deltas == 32       ? b64
                                      : b32);
}

/// Columns that L2 carries per row of the batch and δ, sectors counted whole.
double weight_columns(const Tile& tile, const Sizes& s) {
  return double(ceil_div(s.b, tile.rows()) * s.c + ceil_div(s.c, tile.width()) * s.b) * sectors(tile, s.d);
}

std::optional<Tile> plan_weight(const WeightProblem& problem, int shared_limit) {
  const Sizes& s = problem.sizes;
  std::optional<Tile> best;
  for (const Tile& tile : weight_tiles(bytes_of(problem.dtype))) {
    if (tile_fits(tile, s.d, problem.batch, problem.x, problem.d_y) && 2 * tile.batch_stage() <= shared_limit &&
        (!best || weight_columns(tile, s) < weight_columns(*best, s))) {
      best = tile;
    }
  }
  return best;
}

/// How Hopper's kernel divides a gradient: columns j and k, δ, batch rows and bytes of a CTA's stage, and CTAs of a
/// cluster.
struct GradientPlan {
  bool lines;  ///< d is 2 or 4: FlatGradient
  bool flat_or_broad;
  int high, wide, deltas, depth, stage, shared;
  int warp_columns;  ///< k that take turns in adding up the bias
  int rows = 1, columns = 1;
};

/// The FlatTile that has less of it outside the matrix.
GradientPlan plan_lines(const Sizes& s) {
  const FlatTile high{narrowed(s.d)}, broad{high.v, true};
  const auto tiles = [&](const FlatTile& t) { return ceil_div(s.b, t.rows()) * ceil_div(s.c, t.columns()); };
  const FlatTile& t = s.d == 4 && tiles(broad) < tiles(high) ? broad : high;
  return {true, t.broad, t.rows(), t.columns(), t.v, FlatTile::kDepth, t.stage(), t.shared(), t.warp_columns()};
}

/// By times on an H200. Lines of 128 bytes, 64 δ or four columns of 16, need the fewest copies; large blocks read them
/// more often, and 32 δ make squarer tiles. Clusters pay only where they waste nothing.
GradientPlan plan_sharing(const Sizes& s) {
  constexpr std::int64_t kLarge = 1 << 15, kMany = 64, kSome = 16;  // weights of a product; CTAs, and of a factor
  constexpr int kColumns = ClusterGradientTile::kColumns;
  const bool flat = s.d == 16 && s.b % 4 == 0 && s.c % 4 == 0;
  const ClusterGradientTile t{s.d % 64 == 0 && (s.b * s.c < kLarge || s.b < s.c) ? 64 : s.d % 32 == 0 ? 32 : 16};
  GradientPlan plan{false,     flat,       t.rows(), kColumns, t.deltas, ClusterGradientTile::kDepth,
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
GradientPlan plan_gradient(const Sizes& s) { return s.d == 2 || s.d == 4 ? plan_lines(s) : plan_sharing(s); }

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
  params.b = narrowed(s.b);
  params.c = narrowed(s.c);
  params.d = narrowed(s.d);
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

void reduce(const WeightProblem& problem, const WeightParams& params, Context& context) {
  kronecker::reduce(
      problem,
      {params.partials, params.pieces, false, params.bias_partials, std::int64_t{params.pieces} * params.bias_shares},
      context);
}

/// Both operands for one of Hopper's kernels.
Map cluster_map(const Matrix& m, const WeightProblem& problem, const GradientPlan& plan, std::int64_t count, int box) {
  const Sizes& s = problem.sizes;
  if (!plan.lines) {
    return make_batch_map(m, problem.batch, s, count, box, plan.deltas, plan.flat_or_broad);
  }
  return make_map(m, problem.batch, {count * s.d, s.a}, {64, 1, FlatTile::kDepth}, driver::Swizzle::b128);
}

/// Groups of tiles, `rows` × `columns` × `deltas` each, and pieces of the batch, of which `at_once` run. A stage has
/// `depth` rows of the batch.
struct GradientCut {
  std::int64_t slabs_b, slabs_c, groups, stages, pieces;
  GradientCut(const WeightProblem& p, int rows, int columns, int deltas, int depth, double stage_bytes,
              std::int64_t at_once)
      : slabs_b(ceil_div(p.sizes.b, rows)),
        slabs_c(ceil_div(p.sizes.c, columns)),
        groups(p.sizes.a * (p.sizes.d / deltas) * slabs_b * slabs_c),
        stages(std::max<std::int64_t>(1, ceil_div(p.batch, depth))),
        pieces(pieces_of(groups, stages, at_once, stage_bytes, 64 * 1024.0 + kPartial)) {}
  void fill(WeightParams& params) const {
    params.slabs_b = narrowed(slabs_b);
    params.slabs_c = narrowed(slabs_c);
    params.groups = narrowed(groups);
    params.pieces = narrowed(pieces);
  }
};
GradientCut cut_of(const WeightProblem& p, const GradientPlan& plan, std::int64_t at_once) {
  return {p, plan.high * plan.rows, plan.wide * plan.columns, plan.deltas, plan.depth, double(plan.stage), at_once};
}
GradientCut cut_of(const WeightProblem& p, const Tile& tile, std::int64_t at_once) {
  return {p, tile.rows(), tile.width(), tile.v, tile.batch_rows(), double(tile.batch_stage()), at_once};
}

void run_clusters(const WeightProblem& problem, Context& context) {
  const Sizes& s = problem.sizes;
  const GradientPlan plan = plan_gradient(s);
  const int size = plan.rows * plan.columns, device = context.device.index;
  const Kernel& kernel = get_kernel(cluster_weight_kernel(problem.dtype, plan.deltas, plan.flat_or_broad), device);
  const GradientCut cut = cut_of(problem, plan,
                                 plan.lines ? driver::device_info(device).multiprocessors
                                            : kernel.resident_clusters(size, ClusterTile::kThreads, plan.shared));
  ClusterWeightParams params{cluster_map(problem.x, problem, plan, s.c, plan.wide / plan.rows),
                             cluster_map(problem.d_y, problem, plan, s.b, plan.high / plan.columns),
                             weight_params(problem), plan.rows, plan.columns,
                             // Where memory is the limit, CTAs that read the same lines should not drift apart.
                             s.b * s.c > 84 * (s.b + s.c)};
  WeightParams& weight = params.weight;
  cut.fill(weight);
  weight.bias_shares = narrowed(std::min(kMostShares, ceil_div(s.c, plan.warp_columns)));
  const Partials partials(problem, weight, context);
  const std::int64_t ctas = cut.groups * cut.pieces * size;
  if (plan.lines) {
    kernel.launch(ctas, FlatTile::kThreads, plan.shared, &params, context.stream);
  } else {
    kernel.launch_clusters(ctas, size, ClusterTile::kThreads, plan.shared, &params, context.stream);
  }
  reduce(problem, weight, context);
}

void run_alone(const WeightProblem& problem, const Tile& tile, Context& context) {
  const Sizes& s = problem.sizes;
  const driver::DeviceInfo& device = driver::device_info(context.device.index);
  WeightParams params = weight_params(problem);
  cut_of(problem, tile, device.multiprocessors).fill(params);
  params.ring = std::clamp(device.shared_per_block / tile.batch_stage(), 2, 4);
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
  const GradientCut cut = cut_of(p, tile, static_cast<std::int64_t>(multiprocessors));
  const cost::Tiles tiles{.count = double(cut.groups * cut.pieces),
                          .at_once = multiprocessors,
                          .steps = double(ceil_div(cut.stages, cut.pieces)),
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
  const GradientPlan plan = plan_gradient(p.sizes);
  const int size = plan.rows * plan.columns;
  const auto at_once = static_cast<std::int64_t>(multiprocessors) / size;
  const GradientCut cut = cut_of(p, plan, at_once);
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

std::vector<Config> configs(DType dtype, Precision precision) {
  std::vector<Config> list{{Family::cluster}};
  if (const int products = products_of(dtype, precision); products > 0) {
    for (const Tile& tile : product_tiles(bytes_of(dtype), products)) {
      list.push_back({Family::strided, tile.v, tile.wm});
    }
  }
  return list;
}

namespace {

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
  const Tile tile{bytes_of(p.dtype), config.first, config.second};
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

}  // namespace

constinit const Functions<Problem> kProduct{fits, cost, launch};
constinit const Functions<WeightProblem> kGradient{fits, cost, launch};

}  // namespace fretwork::kronecker::strided
