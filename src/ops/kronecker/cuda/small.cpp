// Host side of the small tiles for any δ: how operands are read, which tiles fit, costs, launches.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <iterator>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "ops/kronecker/cuda/families.h"
#include "ops/kronecker/cuda/params.h"
#include "runtime/alignment.h"
#include "runtime/cost.h"
#include "runtime/cuda_driver.h"
#include "runtime/kernels.h"

namespace fretwork::kronecker::small {
namespace {

namespace driver = fretwork::cuda;

constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max() / 16;
constexpr int kElement = 2;  // bytes

/// How the kernel reads an operand, and the bytes that it copies at a time: 16, 4 or 2.
struct Reading {
  Way way = kRuns;
  int access = 16;
};
Reading reading(Way way, const void* data, std::initializer_list<std::int64_t> strides) {
  const auto aligned = [&](int bytes) { return is_aligned(data, strides, kElement, bytes); };
  return {way, aligned(16) ? 16 : aligned(4) ? 4 : 2};
}
/// A stride that is used.
std::int64_t used(std::int64_t count, std::int64_t stride) { return count > 1 ? stride : 0; }

/// δ of a tile, or 0 where the kernel has none for d of them.
int deltas_of(std::int64_t d) {
  return d % 8 == 0 ? 8 : std::ranges::find(kDeltaCounts, d) != std::end(kDeltaCounts) ? static_cast<int>(d) : 0;
}

/// How weights of so many δ lie that are transposed.
Way turned_way(int deltas) { return deltas == 1 ? kColumns : deltas == 8 ? kRuns : kTurned; }

std::optional<Reading> weights_reading(const Problem& p) {
  const auto& [a, b, c, d] = p.sizes;
  const Weights& w = p.w;
  const std::int64_t of_a = used(a, w.a), of_b = used(b, w.b), of_c = used(c, w.c);
  if (d > 1 && w.d != 1) {
    return std::nullopt;
  }
  if (deltas_of(d) == 8) {
    return reading(kRuns, w.data, {of_a, of_b, of_c});
  }
  if (c == 1 || w.c == d) {
    return reading(kRuns, w.data, {of_a, of_b});
  }
  if (b == 1 || w.b == d) {
    return reading(turned_way(deltas_of(d)), w.data, {of_a, of_c});
  }
  return std::nullopt;
}
std::optional<Reading> x_reading(const Problem& p) {
  const auto& [a, b, c, d] = p.sizes;
  if (p.x.feature == 1) {
    return reading(kRuns, p.x.data, {used(p.batch, p.x.batch), used(a, c * d)});
  }
  if (p.x.batch == 1 || p.batch == 1) {
    return reading(kColumns, p.x.data, {p.x.feature});
  }
  return std::nullopt;
}

/// What an instance depends on.
struct Instance {
  DType dtype;
  std::size_t tile;  ///< of kTiles
  int deltas;
  Way weights, x;
};

KernelSpec spec_of(const Instance& n) {
  constexpr const char* kWays[] = {"kRuns", "kTurned", "kColumns"};
  const auto way = [&](Way w) { return std::string("fretwork::kronecker::small::") + kWays[w]; };
  const auto& [rows, cols] = kTiles[n.tile];
  return kernel_spec("small", Tile{rows, cols, n.deltas}.shared_bytes(), "small::product", n.dtype, rows, cols,
                     n.deltas, way(n.weights), way(n.x));
}

/// Whether there is a kernel of this tile: a warp has the sums of all δ.
bool has_tile(std::size_t tile, int deltas) {
  return deltas > 0 && (deltas <= 4 || kTiles[tile].rows * kTiles[tile].cols <= 1024);
}

std::vector<KernelSpec> list_kernels(const std::string& arch) {
  std::vector<KernelSpec> list;
  if (driver::arch_number(arch) < 80) {
    return list;
  }
  const auto add = [&](DType dtype, std::size_t tile, int deltas, Way weights) {
    list.push_back(spec_of({dtype, tile, deltas, weights, kRuns}));
    list.push_back(spec_of({dtype, tile, deltas, weights, kColumns}));
  };
  for (const DType dtype : {DType::f16, DType::bf16}) {
    for (const int deltas : kDeltaCounts) {
      for (std::size_t tile = 0; tile < std::size(kTiles); ++tile) {
        if (has_tile(tile, deltas)) {
          add(dtype, tile, deltas, kRuns);
          if (turned_way(deltas) != kRuns) {
            add(dtype, tile, deltas, turned_way(deltas));
          }
        }
      }
    }
  }
  return list;
}
const KernelList kKernels{"kronecker", list_kernels};

constexpr std::size_t kMostDeltas = 12;
constinit KernelTable<std::size(kTiles) * (kMostDeltas + 1) * 8> kernels;

const Kernel& kernel_of(const Instance& n, int device) {
  const std::size_t ways = (n.weights == kRuns ? 0u : 2u) + (n.x == kRuns ? 0u : 1u);
  const std::size_t shape = n.tile * (kMostDeltas + 1) + static_cast<std::size_t>(n.deltas);
  return kernels.get(shape * 8 + (n.dtype == DType::f16 ? 0u : 4u) + ways, device, [&] { return spec_of(n); });
}

/// The tile of a config: its place in kTiles, or their number.
std::size_t tile_of(const Config& config) {
  return static_cast<std::size_t>(
      std::ranges::find_if(kTiles,
                           [&](const TileSize& t) { return t.rows == config.first && t.cols == config.second; }) -
      std::begin(kTiles));
}

std::int64_t ctas_of(const Problem& p, const Tile& tile) {
  return p.sizes.a * ceil_div(p.sizes.b, std::int64_t{tile.rows}) * ceil_div(p.batch, std::int64_t{tile.cols}) *
         (p.sizes.d / tile.deltas);
}

bool fits(const Problem& p, const Config& config, const Machine& machine) {
  const auto& [a, b, c, d] = p.sizes;
  const std::size_t number = tile_of(config);
  if ((p.dtype != DType::f16 && p.dtype != DType::bf16) || machine.number < 80 || number == std::size(kTiles) ||
      !has_tile(number, deltas_of(d)) || !weights_reading(p) || !x_reading(p)) {
    return false;
  }
  const Tile tile{kTiles[number].rows, kTiles[number].cols, deltas_of(d)};
  return b < kMost && c < kMost && p.batch < kMost && d < kMost && ctas_of(p, tile) < kMost &&
         tile.shared_bytes() <= machine.shared;
}

/// Fitted to some 6,000 random products on every tile (bench/results/h200/kronecker_candidates.json has a sample).
/// Bytes of operands that an SM moves in a µs; µs at the end of a CTA, and of each turn of its ring.
struct Rates {
  double bytes, end, turn;
};
constexpr Rates kRates[] = {{69e3, 0.80, 0},    {74e3, 0.37, 0.30}, {82e3, 0.34, 0.35},
                            {69e3, 0.29, 0.29}, {64e3, 0.36, 0.40}, {51e3, 0.27, 0.43}};
static_assert(std::size(kRates) == std::size(kTiles));

/// How much slower operands of so many δ are moved than those of one, and how much longer a turn takes.
struct Slower {
  double bytes, turn;
};
Slower slower_with(int deltas) {
  switch (deltas) {
    case 1:
      return {1, 1};
    case 2:
      return {0.85, 1.05};
    case 4:
      return {1.14, 0.87};
    case 8:
    case 12:
      return {1.69, 1.54};
    default:
      return {1.38, 1.22};
  }
}

/// µs.
double cost(const Problem& p, const Config& config, const Machine& machine) {
  constexpr double kAlone = 159e3, kL2 = 6.9e6, kSums = 2.85e4, kMemory = 2.86e6;   // bytes per µs
  constexpr double kRamp = 2.8, kRampBytes = 2e6, kOverlap = 0.42, kEarlier = 0.8;  // than other kernels
  const std::size_t number = tile_of(config);
  const auto& [rate, end_of_cta, turn] = kRates[number];
  const Tile tile{kTiles[number].rows, kTiles[number].cols, deltas_of(p.sizes.d)};
  const Reading weights = *weights_reading(p), x = *x_reading(p);
  const int access = std::min(weights.access, x.access);
  const auto [slower_bytes, slower_turn] = slower_with(tile.deltas);
  const double slower = (access == 16  ? 1
                         : access == 4 ? 2.0
                                       : 3.4) *
                        (weights.way == kTurned ? 1.2 : 1) * (x.way == kColumns ? 1.06 : 1);
  // Of eight δ out of more, half of each sector is another CTA's.
  const double sectors = p.sizes.d > tile.deltas && p.x.feature == 1 ? 2.7 : 1;
  const double lines = tile.deltas == 8 && x.way == kColumns ? 1.46 : 1;
  const auto rows = double(std::min<std::int64_t>(tile.rows, p.sizes.b));
  const auto cols = double(std::min<std::int64_t>(tile.cols, p.batch));
  const double ctas = double(ctas_of(p, tile)), sms = machine.multiprocessors, scale = cost::kMultiprocessors / sms;
  const double turns = std::ceil(std::ceil(double(p.sizes.c) / depth_of(tile.deltas)) / tile.teams());
  const double bytes = double(p.sizes.c) * (rows + cols) * tile.deltas * kElement * sectors;  // of a CTA
  const double end = end_of_cta + 4.0 * tile.rows * tile.cols * tile.deltas * tile.teams() / kSums;
  const double busy = ctas / sms * bytes / rate * slower * slower_bytes * lines + std::ceil(ctas / sms) * end;
  const double alone = end + turns * turn * slower * slower_turn + bytes / kAlone * slower * slower_bytes;
  const double moved = moved_bytes(p);
  const cost::Work work{.memory = moved / kMemory * scale + kRamp * (1 - std::exp(-moved / kRampBytes)),
                        .l2 = ctas * bytes / kL2 * scale,
                        .busiest = std::max(busy, alone),
                        .serial = kOverlap * std::min(busy, alone) - kEarlier};
  return work.without_launches();
}

void launch(const Problem& p, const Config& config, Context& context) {
  const auto& [a, b, c, d] = p.sizes;
  const std::size_t number = tile_of(config);
  const Tile tile{kTiles[number].rows, kTiles[number].cols, deltas_of(d)};
  const Reading weights = *weights_reading(p), x = *x_reading(p);
  Params params{};
  fill_operands(p, params);
  params.slices = Divisor(d / tile.deltas);
  params.n_tiles = Divisor(ceil_div(p.batch, std::int64_t{tile.cols}));
  params.j_tiles = Divisor(ceil_div(b, std::int64_t{tile.rows}));
  params.w_access = weights.access;
  params.x_access = x.access;
  params.last = p.y.feature != 1 && p.y.batch == 1;
  params.vector =
      params.last ? is_aligned(p.y.data, {p.y.feature}, kElement, 16)
                  : p.y.feature == 1 && is_aligned(p.y.data, {used(p.batch, p.y.batch), used(a, b * d)}, kElement, 16);
  const Instance instance{p.dtype, number, tile.deltas, weights.way, x.way};
  kernel_of(instance, context.device.index)
      .launch(ctas_of(p, tile), 32 * tile.warps(), tile.shared_bytes(), &params, context.stream);
}

}  // namespace

std::vector<Config> configs() {
  std::vector<Config> list;
  for (const auto& [rows, cols] : kTiles) {
    list.push_back({Family::small, rows, cols});
  }
  return list;
}

constinit const Functions<Problem> kProduct{fits, cost, launch};

}  // namespace fretwork::kronecker::small
