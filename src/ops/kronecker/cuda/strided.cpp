// Batch first with d > 1 on the tensor cores: how many δ stay together, what stays on chip, and the launches.
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

#include "ops/kronecker/cuda/launch.h"
#include "ops/kronecker/cuda/params_strided.cuh"
#include "runtime/alignment.h"
#include "runtime/cost.h"
#include "runtime/cuda_driver.h"
#include "runtime/kernels.h"

namespace fretwork::kronecker::strided {
namespace {

namespace driver = fretwork::cuda;

constexpr const char* kProduct = "ops/kronecker/cuda/strided.cuh";
constexpr const char* kCluster = "ops/kronecker/cuda/strided_cluster.cuh";
constexpr const char* kClusterWeight = "ops/kronecker/cuda/strided_cluster_weight.cuh";
constexpr const char* kPack = "ops/kronecker/cuda/strided_pack.cuh";
constexpr const char* kWeight = "ops/kronecker/cuda/strided_weight.cuh";
constexpr const char* kFlatWeight = "ops/kronecker/cuda/strided_flat_weight.cuh";

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

std::vector<Tile> weight_tiles(int size) {
  if (size == 2) {
    return {{2, 16, 2}, {2, 8, 4}, {2, 4, 4}, {2, 2, 8}};
  }
  return {{4, 8, 4}, {4, 4, 4}, {4, 2, 8}};
}

KernelSpec pack_kernel(DType dtype, int deltas) {
  return {kPack, std::string("fretwork::strided_pack<") + device_type(dtype) + ", " + std::to_string(deltas) + ">"};
}

std::string arguments(DType dtype, int products, const Tile& tile) {
  return std::string("<") + device_type(dtype) + ", " + std::to_string(products) + ", " + std::to_string(tile.v) +
         ", " + std::to_string(tile.wm) + ">";
}
KernelSpec product_kernel(DType dtype, int products, const Tile& tile) {
  return {kProduct, "fretwork::strided_product" + arguments(dtype, products, tile), KernelSpec::kBySize};
}
/// `flat`: d is 16.
KernelSpec cluster_kernel(DType dtype, const ClusterTile& tile, bool flat) {
  return {kCluster,
          std::string("fretwork::strided_cluster<") + device_type(dtype) + ", " + std::to_string(tile.v) + ", " +
              std::to_string(tile.columns) + (flat ? ", true>" : ", false>"),
          tile.shared()};
}
KernelSpec weight_kernel(DType dtype, int products, const Tile& tile) {
  return {kWeight, "fretwork::strided_weight" + arguments(dtype, products, tile), KernelSpec::kBySize};
}
KernelSpec cluster_weight_kernel(DType dtype, int deltas, bool flat) {
  return {kClusterWeight,
          std::string("fretwork::strided_cluster_weight<") + device_type(dtype) + ", " + std::to_string(deltas) +
              (flat ? ", true>" : ", false>"),
          KernelSpec::kBySize};
}
KernelSpec flat_weight_kernel(DType dtype, const FlatTile& tile) {
  return {kFlatWeight,
          std::string("fretwork::strided_flat_weight<") + device_type(dtype) + ", " + std::to_string(tile.v) +
              (tile.broad ? ", true>" : ", false>"),
          tile.shared()};
}
KernelSpec reduce_kernel(DType dtype, int wide) {
  return {kWeight, std::string("fretwork::strided_reduce<") + device_type(dtype) + ", " + std::to_string(wide) + ">"};
}

std::vector<KernelSpec> list_kernels(const std::string& arch) {
  std::vector<KernelSpec> list;
  for (const DType dtype : {DType::f16, DType::bf16, DType::f32}) {
    const int size = static_cast<int>(size_of(dtype));
    for (const int products : dtype == DType::f32 ? std::vector{1, 3} : std::vector{1}) {
      for (const Tile& tile : product_tiles(size, products)) {
        list.push_back(product_kernel(dtype, products, tile));
      }
      for (const Tile& tile : weight_tiles(size)) {
        list.push_back(weight_kernel(dtype, products, tile));
      }
    }
    for (const Tile& tile : weight_tiles(size)) {  // one of each V
      list.push_back(pack_kernel(dtype, tile.v));
    }
    list.push_back(reduce_kernel(dtype, 1));
    list.push_back(reduce_kernel(dtype, 4));
    if (arch == "sm_90a" && size == 2) {
      for (const int v : {8, 4, 2}) {
        for (const int most : {256, 192}) {
          list.push_back(cluster_kernel(dtype, {v, most / v}, false));
        }
      }
      for (const int columns : {32, 24}) {
        list.push_back(cluster_kernel(dtype, {8, columns}, true));
      }
      list.push_back(cluster_weight_kernel(dtype, 16, true));
      for (const int deltas : {16, 32, 64}) {
        list.push_back(cluster_weight_kernel(dtype, deltas, false));
      }
      for (const FlatTile& tile : {FlatTile{4}, FlatTile{4, true}, FlatTile{2}}) {
        list.push_back(flat_weight_kernel(dtype, tile));
      }
    }
  }
  return list;
}
const KernelList kKernels{"kronecker", list_kernels};

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
bool fits(const Tile& tile, std::int64_t d, std::int64_t batch, const Matrix& one, const Matrix& other) {
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

/// Brings the weights into the order of PackParams, in groups of `deltas` δ.
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

/// What both kinds of product kernel are told of the problem.
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

/// Whether the copy engine can fetch rows of both operands for clusters.
bool clusters_fit(DType dtype, std::int64_t batch, const Matrix& one, const Matrix& other, const Machine& machine) {
  return size_of(dtype) == 2 && machine.arch == "sm_90a" && batch > 0 &&
         batch <= std::numeric_limits<std::int32_t>::max() / 2 && one.batch > 0 && other.batch > 0 &&
         moves(one, batch, 2, 16) && moves(other, batch, 2, 16);
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

Map encoded(const Matrix& m, std::span<const std::uint64_t> sizes, std::span<const std::uint64_t> strides,
            std::initializer_list<std::uint32_t> box, driver::Swizzle swizzle) {
  return std::bit_cast<Map>(driver::make_tensor_map(m.data, 2, sizes, strides, {box.begin(), box.size()}, swizzle));
}

/// `inner` and then the batch.
Map make_map(const Matrix& m, std::int64_t batch, std::initializer_list<std::uint64_t> inner,
             std::initializer_list<std::uint32_t> box, driver::Swizzle swizzle) {
  std::vector<std::uint64_t> sizes(inner), strides;
  std::uint64_t bytes = 2;
  for (const std::uint64_t size : inner) {
    bytes *= size;
    strides.push_back((bytes + 15) / 16 * 16);  // only a dimension of one factor is rounded
  }
  sizes.push_back(static_cast<std::uint64_t>(batch));
  strides.back() = batch == 1 ? strides.back() : static_cast<std::uint64_t>(m.batch) * 2;
  return encoded(m, sizes, strides, box, swizzle);
}

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

/// Columns that L2 carries per row of the batch and δ, sectors counted whole.
double weight_columns(const Tile& tile, const Sizes& s) {
  return double(ceil_div(s.b, tile.rows()) * s.c + ceil_div(s.c, tile.width()) * s.b) * sectors(tile, s.d);
}

std::optional<Tile> plan_weight(const WeightProblem& problem, int shared_limit) {
  const Sizes& s = problem.sizes;
  std::optional<Tile> best;
  for (const Tile& tile : weight_tiles(static_cast<int>(size_of(problem.dtype)))) {
    if (fits(tile, s.d, problem.batch, problem.x, problem.d_y) && 2 * tile.batch_stage() <= shared_limit &&
        (!best || weight_columns(tile, s) < weight_columns(*best, s))) {
      best = tile;
    }
  }
  return best;
}

/// Clusters of a gradient: δ of a CTA, whether rows are read in lines, and CTAs.
struct WeightClusters {
  ClusterGradientTile tile;
  bool flat;
  int rows, columns;
};

/// By times on an H200. Lines of 128 bytes, 64 δ or four columns of 16, need the fewest copies; large blocks read them
/// more often, and 32 δ make squarer tiles. Clusters pay only where they waste nothing.
WeightClusters plan_weight_cluster(const Sizes& s) {
  constexpr std::int64_t kLarge = 1 << 15, kMany = 64, kSome = 16;  // weights of a product; CTAs, and of a factor
  const bool flat = s.d == 16 && s.b % 4 == 0 && s.c % 4 == 0;
  const int deltas = s.d % 64 == 0 && (s.b * s.c < kLarge || s.b < s.c) ? 64 : s.d % 32 == 0 ? 32 : 16;
  WeightClusters plan{{deltas}, flat, 1, 1};
  const auto dividing = [](std::int64_t slabs, int most) {
    while (slabs % most != 0) {
      most /= 2;
    }
    return most;
  };
  const std::int64_t high = ceil_div(s.b, plan.tile.rows()), wide = ceil_div(s.c, ClusterGradientTile::kColumns);
  if (plan.flat) {
    plan.columns = wide == 2 ? 2 : 1;
  } else if (plan.tile.deltas < 64 || (high * wide >= kSome && s.a * (s.d / 64) * high * wide >= kMany)) {
    plan.rows = dividing(high, 4);
    plan.columns = dividing(wide, plan.tile.deltas == 64 ? 2 : 4 / plan.rows);
  }
  return plan;
}

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

/// Adds the pieces of d_w and, where wanted, of d_bias.
void reduce(const WeightProblem& problem, const WeightParams& params, Context& context) {
  // Many pieces are added by more threads.
  const auto slices_of = [](int pieces, int most) {
    return std::min(static_cast<int>(std::bit_ceil(static_cast<unsigned>(ceil_div(pieces, 4)))), most);
  };
  const Weights& w = problem.d_w;
  ReduceParams sum{};
  sum.partials = params.partials;
  sum.bias_partials = params.bias_partials;
  sum.to = w.data;
  sum.bias = problem.d_bias.data;
  sum.weights = params.weights;
  sum.features = params.features;
  sum.stride_a = w.a;
  sum.stride_b = w.b;
  sum.stride_c = w.c;
  sum.stride_d = w.d;
  sum.bias_stride = problem.d_bias.stride;
  sum.pieces = params.pieces;
  sum.slices = slices_of(sum.pieces, 8);
  sum.bias_pieces = params.pieces * params.bias_shares;
  sum.bias_slices = slices_of(sum.bias_pieces, 32);
  sum.b = params.b;
  sum.c = params.c;
  sum.d = params.d;
  const std::int64_t line = std::int64_t{params.c} * params.d;
  sum.contiguous = w.d == 1 && w.c == params.d && w.b == line && w.a == line * params.b && is_aligned(w.data, 16);
  const int wide = sum.weights % 4 == 0 ? 4 : 1;
  const std::int64_t ctas = ceil_div(sum.weights * sum.slices, std::int64_t{kThreads} * wide);
  const std::int64_t bias_ctas = sum.bias_partials != nullptr ? ceil_div(sum.features * sum.bias_slices, kThreads) : 0;
  sum.weight_ctas = static_cast<unsigned>(ctas);
  const bool behind = driver::device_info(context.device.index).arch >= 90;
  const auto how = behind ? &Kernel::launch_behind : &Kernel::launch;
  (get_kernel(reduce_kernel(problem.dtype, wide), context.device.index).*how)(ctas + bias_ctas, kThreads, 0, &sum,
                                                                              context.stream);
}

/// Whether rows of both operands can be read as they lie, all δ of a column together.
bool flat_fits(const WeightProblem& problem, const Machine& machine) {
  const Sizes& s = problem.sizes;
  return (s.d == 2 || s.d == 4) && (s.a == 1 || (s.b * s.d % 8 == 0 && s.c * s.d % 8 == 0)) &&
         clusters_fit(problem.dtype, problem.batch, problem.x, problem.d_y, machine);
}

/// The tile that has less of it outside the matrix.
FlatTile flat_tile(const Sizes& s) {
  const FlatTile high{static_cast<int>(s.d)}, broad{high.v, true};
  const auto tiles = [&](const FlatTile& t) { return ceil_div(s.b, t.rows()) * ceil_div(s.c, t.columns()); };
  return s.d == 4 && tiles(broad) < tiles(high) ? broad : high;
}

void run_flat(const WeightProblem& problem, Context& context) {
  const Sizes& s = problem.sizes;
  const FlatTile tile = flat_tile(s);
  const auto map = [&](const Matrix& m, std::int64_t columns) {
    return make_map(m, problem.batch, {static_cast<std::uint64_t>(columns * s.d), static_cast<std::uint64_t>(s.a)},
                    {64, 1, FlatTile::kDepth}, driver::Swizzle::b128);
  };
  // Where memory is the limit, CTAs that read the same lines should not drift apart.
  const bool skip = s.b * s.c > 84 * (s.b + s.c);
  FlatWeightParams params{map(problem.x, s.c), map(problem.d_y, s.b), weight_params(problem), skip};
  WeightParams& weight = params.weight;
  weight.slabs_b = static_cast<int>(ceil_div(s.b, tile.rows()));
  weight.slabs_c = static_cast<int>(ceil_div(s.c, tile.columns()));
  weight.groups = static_cast<int>(s.a * weight.slabs_b * weight.slabs_c);
  weight.pieces = static_cast<int>(pieces_of(weight.groups, ceil_div(problem.batch, FlatTile::kDepth),
                                             driver::device_info(context.device.index).multiprocessors, tile.stage(),
                                             64 * 1024.0 + kPartial));
  weight.bias_shares = static_cast<int>(std::min(kMostShares, ceil_div(s.c, tile.warp_columns())));
  const Partials partials(problem, weight, context);
  get_kernel(flat_weight_kernel(problem.dtype, tile), context.device.index)
      .launch(std::int64_t{weight.groups} * weight.pieces, FlatTile::kThreads, tile.shared(), &params, context.stream);
  reduce(problem, weight, context);
}

void run_clusters(const WeightProblem& problem, Context& context) {
  const Sizes& s = problem.sizes;
  const auto [tile, flat, rows, columns] = plan_weight_cluster(s);
  const int size = rows * columns;
  const Kernel& kernel = get_kernel(cluster_weight_kernel(problem.dtype, tile.deltas, flat), context.device.index);
  ClusterWeightParams params{
      make_batch_map(problem.x, problem.batch, s, s.c, ClusterGradientTile::kColumns / rows, tile.deltas, flat),
      make_batch_map(problem.d_y, problem.batch, s, s.b, tile.rows() / columns, tile.deltas, flat),
      weight_params(problem), rows, columns};
  WeightParams& weight = params.weight;
  weight.slabs_b = static_cast<int>(ceil_div(s.b, tile.rows() * rows));
  weight.slabs_c = static_cast<int>(ceil_div(s.c, ClusterGradientTile::kColumns * columns));
  weight.groups = static_cast<int>(s.a * (s.d / tile.deltas) * weight.slabs_b * weight.slabs_c);
  weight.bias_shares = static_cast<int>(std::min(kMostShares, ceil_div(s.c, ClusterGradientTile::kColumns)));
  weight.pieces = static_cast<int>(pieces_of(weight.groups, ceil_div(problem.batch, ClusterGradientTile::kDepth),
                                             kernel.resident_clusters(size, ClusterTile::kThreads, tile.shared()),
                                             tile.stage(), 64 * 1024.0 + kPartial));
  const Partials partials(problem, weight, context);
  kernel.launch_clusters(std::int64_t{weight.groups} * weight.pieces * size, size, ClusterTile::kThreads, tile.shared(),
                         &params, context.stream);
  reduce(problem, weight, context);
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

// ---------------------------------------------------------------------------------------------- costs

/// Bytes of x and y (or d_y).
double memory_of(const Sizes& s, std::int64_t batch, int size) {
  return double(batch * s.a * s.d * (s.b + s.c)) * size;
}
double weight_bytes(const Sizes& s, int size) { return double(s.a * s.b * s.c * s.d) * size; }

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
  const double weights = weight_bytes(s, tile.size);
  const double far_apart = 1 + 0.15 * std::max(0.0, std::log2(double(s.d) / 16));  // lines of one δ in memory
  return cost::microseconds(tiles, rates, memory_of(s, p.batch, tile.size) + weights, multiprocessors) * far_apart +
         cost::pass(tile.size == 2 ? kPack : kPackTf32, 2 * weights, kPackRate, multiprocessors);
}

double clusters_cost(const Problem& p, const ClusterPlan& plan, double multiprocessors) {
  // Whole lines, or pieces of 32 bytes that eight CTAs share: then arithmetic waits for the copies.
  constexpr cost::Rates kLines = {0.0, 8.8e6, 6.8e6, 0.0, 3.8e6}, kSectors = {1.4, 2e7, 0.89e6};
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
  const double weights = weight_bytes(s, 2);
  return cost::microseconds(tiles, s.d == tile.deltas() ? kLines : kSectors, memory_of(s, p.batch, 2) + weights,
                            multiprocessors) +
         cost::pass(kPack, 2 * weights, kPackRate, multiprocessors);
}

/// The sums of `pieces`, written by one kernel and added up by another.
double reduce_cost(const Sizes& s, std::int64_t pieces, double multiprocessors) {
  constexpr double kRate = 0.7e6;
  return cost::pass(0.0, double(pieces) * weight_bytes(s, 4), kRate, multiprocessors);
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
  return cost::microseconds(tiles, tile.size == 2 ? k16 : kTf32, memory_of(p.sizes, p.batch, tile.size),
                            multiprocessors) +
         reduce_cost(p.sizes, cut.pieces, multiprocessors) + (tile.v == 2 ? kShortRuns : 0.0);
}

double clusters_cost(const WeightProblem& p, double multiprocessors) {
  constexpr cost::Rates kFlat = {3.2, 15.6e6, 2.67e6}, kClusters = {3.2, 9.3e6, 2e7};
  constexpr double kReduce = 2.1;
  const Sizes& s = p.sizes;
  const bool whole = s.d == 2 || s.d == 4;
  const FlatTile lines = flat_tile(s);
  const WeightClusters plan = plan_weight_cluster(s);
  const int size = whole ? 1 : plan.rows * plan.columns;
  const std::int64_t depth = whole ? FlatTile::kDepth : ClusterGradientTile::kDepth;
  const std::int64_t deltas = whole ? s.d : plan.tile.deltas;
  const std::int64_t rows = whole ? lines.rows() : plan.tile.rows();
  const std::int64_t columns = whole ? lines.columns() : ClusterGradientTile::kColumns;
  const std::int64_t groups = s.a * (s.d / deltas) * ceil_div(s.b, rows * (whole ? 1 : plan.rows)) *
                              ceil_div(s.c, columns * (whole ? 1 : plan.columns));
  const std::int64_t tiles = ceil_div(p.batch, depth);
  const auto at_once = static_cast<std::int64_t>(multiprocessors) / size;
  const double stage = whole ? lines.stage() : plan.tile.stage();
  const std::int64_t pieces = pieces_of(groups, tiles, at_once, stage, 64 * 1024.0 + kPartial);
  const double bytes =
      whole ? stage : 2.0 * double(depth * deltas) * (double(rows) / plan.columns + double(columns) / plan.rows);
  const cost::Tiles work{.count = double(groups * pieces),
                         .at_once = double(at_once),
                         .steps = double(ceil_div(tiles, pieces)),
                         .bytes = bytes,
                         .ops = 2.0 * double(rows * columns * deltas * depth),
                         .out = 4.0 * double(rows * columns * deltas),
                         .ctas = double(size)};
  return cost::microseconds(work, whole ? kFlat : kClusters, memory_of(s, p.batch, 2), multiprocessors) + kReduce +
         reduce_cost(s, pieces, multiprocessors);
}

/// What every kernel here needs.
bool suits(const Sizes& s, DType dtype, const Machine& machine) {
  return machine.number >= 80 && products_of(dtype, machine.precision) > 0 && s.d > 1 && small_enough(s);
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
  return std::ranges::find(known, config) != known.end() && fits(tile, s.d, p.batch, p.x, p.y) &&
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
  const bool rows = p.sizes.d % 16 == 0 && clusters_fit(p.dtype, p.batch, p.x, p.d_y, machine);
  return config.family == Family::cluster ? rows || flat_fits(p, machine) : plan_weight(p, machine.shared).has_value();
}

double cost(const WeightProblem& p, const Config& config, const Machine& machine) {
  return config.family == Family::cluster ? clusters_cost(p, machine.multiprocessors)
                                          : alone_cost(p, *plan_weight(p, machine.shared), machine.multiprocessors);
}

void launch(const WeightProblem& p, const Config& config, Context& context) {
  if (config.family != Family::cluster) {
    return run_alone(p, *plan_weight(p, driver::device_info(context.device.index).shared_per_block), context);
  }
  flat_fits(p, machine_of(context)) ? run_flat(p, context) : run_clusters(p, context);
}

}  // namespace fretwork::kronecker::strided
