// Host side of the small-batch kernels for any strides: the axis along which weights are read, the tiles of threads and
// warps, costs, launches.
#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "ops/kronecker/cuda/families.h"
#include "ops/kronecker/cuda/params.h"
#include "runtime/alignment.h"
#include "runtime/cost.h"
#include "runtime/cuda_driver.h"
#include "runtime/kernels.h"

namespace fretwork::kronecker::few {
namespace {

namespace driver = fretwork::cuda;

/// The axis of a thread's neighbouring weights, and their number.
struct KernelConfig {
  Axis axis;
  int v;
};
constexpr KernelConfig kConfigs[] = {{kAlongL, 4}, {kAlongL, 2}, {kAlongL, 1}, {kAlongK, 4}, {kAlongJ, 4}};
constexpr DType kTypes[] = {DType::f16, DType::bf16, DType::f32};
constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max() / 64;

/// Neighbouring l of a lane on the tensor cores.
constexpr int kDeltas[] = {8, 4, 2};
/// Before sm_80 the sums of more would not fit into shared memory.
int most_deltas(int arch) { return arch < 80 ? 4 : 8; }

KernelSpec tile_instance(DType dtype, int v) {
  return kernel_spec("few", KernelSpec::kBySize, "few::product_tiles", dtype, v);
}
KernelSpec spec_of(DType dtype, const KernelConfig& config) {
  constexpr const char* kNames[] = {"kAlongL", "kAlongK", "kAlongJ"};
  const std::string axis = std::string("fretwork::kronecker::few::") + kNames[config.axis];
  return kernel_spec("few", KernelSpec::kBySize, "few::product", dtype, axis, config.v);
}

std::vector<KernelSpec> list_kernels(const std::string& arch) {
  const int number = driver::arch_number(arch);
  std::vector<KernelSpec> list;
  for (const DType dtype : kTypes) {
    for (const KernelConfig& config : kConfigs) {
      list.push_back(spec_of(dtype, config));
    }
    for (const int v : kDeltas) {
      if (dtype != DType::f32 && has_mma(dtype, number) && v <= most_deltas(number)) {
        list.push_back(tile_instance(dtype, v));
      }
    }
  }
  return list;
}
const KernelList kKernels{"kronecker", list_kernels, kLeastArch};

/// By type (its index in kTypes): kConfigs, then the tiles of each number of l.
constexpr std::size_t kOfType = std::size(kConfigs) + std::size(kDeltas);
constinit KernelTable<std::size(kTypes) * kOfType> kernels;

/// A vector of `v` begins at a multiple of its size wherever i, l, j and k (but for `axis`) stand.
bool whole(const Weights& w, const Sizes& s, Axis axis, int v, std::size_t size) {
  const auto fits = [&](std::int64_t count, std::int64_t stride) { return count == 1 || stride % v == 0; };
  return is_aligned(w.data, static_cast<std::size_t>(v) * size) && fits(s.a, w.a) &&
         (axis == kAlongJ || fits(s.b, w.b)) && (axis == kAlongK || fits(s.c, w.c)) &&
         (axis == kAlongL || fits(s.d, w.d));
}

/// The config that reads most at once: its index in kConfigs.
std::size_t choose_config(const Weights& w, const Sizes& s, std::size_t size) {
  const auto suits = [&](const KernelConfig& config) {
    const std::int64_t count = config.axis == kAlongL ? s.d : config.axis == kAlongK ? s.c : s.b;
    const std::int64_t stride = config.axis == kAlongL ? w.d : config.axis == kAlongK ? w.c : w.b;
    return stride == 1 && count % config.v == 0 && count > 1 && whole(w, s, config.axis, config.v, size);
  };
  for (const std::size_t n : {0u, 3u, 4u, 1u}) {
    if (suits(kConfigs[n])) {
      return n;
    }
  }
  return 2;
}

/// Threads along each axis, as powers of two, and the tile that they compute.
struct ThreadTile {
  int log_l = 0, log_k = 0, log_j = 0;
  std::int64_t tile_l = 0, tile_j = 0, step = 0;
  ThreadTile() = default;
  ThreadTile(const KernelConfig& config, int l, int k)
      : log_l(l),
        log_k(k),
        log_j(std::countr_zero(static_cast<unsigned>(kThreads)) - l - k),
        tile_l(std::int64_t{config.axis == kAlongL ? config.v : 1} << l),
        tile_j((std::int64_t{vectors_of(config.axis, config.v)} * (config.axis == kAlongJ ? config.v : 1)) << log_j),
        step(std::int64_t{config.axis == kAlongK ? config.v : 1} << k) {}
};

/// Clocks that a tile takes at best: the SM with most CTAs moves their weights, x and sums, and no CTA is faster than
/// its loads, each of which waits for the one before.
double cost(const Problem& p, const KernelConfig& config, const ThreadTile& tile, bool k_next, int multiprocessors) {
  constexpr double kMemory = 18, kL2 = 26, kX = 24, kLatency = 700, kResident = 2;
  const Sizes& s = p.sizes;
  const auto size = static_cast<double>(size_of(p.dtype));
  const std::int64_t groups = ceil_div(p.batch, kRows);
  const std::int64_t ctas = s.a * ceil_div(s.d, tile.tile_l) * ceil_div(s.b, tile.tile_j) * groups;
  const auto steps = static_cast<double>(ceil_div(s.c, tile.step)), rows = double(std::min<std::int64_t>(p.batch, 8));
  const int sums = sums_of(config.axis, config.v);
  // Contiguous bytes that a step reads; the rest of a 32-byte sector is wasted.
  const double run = size * double(config.axis == kAlongL   ? tile.tile_l
                                   : config.axis == kAlongK ? tile.step
                                                            : std::int64_t{config.v} << tile.log_j);
  const bool joined = config.axis == kAlongL && tile.tile_l >= s.d;
  const double together = joined ? run * double(1 << (k_next ? tile.log_k : tile.log_j)) : run;
  const double bytes =
      steps * kThreads * vectors_of(config.axis, config.v) * config.v * size * std::max(1.0, 32 / together);
  const double ffma = steps * kThreads * vectors_of(config.axis, config.v) * config.v * (rows + 2) / 110;
  const double x = rows * double(s.c * tile.tile_l) * 4 / kX, ends = rows * sums * 8;
  const double rate = groups == 1 ? kMemory : kL2;  // only the first group of rows waits for memory
  const double busy = double(ceil_div(ctas, multiprocessors)) * (std::max(bytes / rate, ffma) + x + ends);
  const double turns = double(ceil_div(ctas, static_cast<std::int64_t>(kResident) * multiprocessors));
  return std::max(busy, turns * (steps / 2 + 3) * kLatency);
}

ThreadTile choose_tile(const Problem& p, const KernelConfig& config, bool k_next, int multiprocessors) {
  constexpr int kLog = std::countr_zero(static_cast<unsigned>(kThreads));
  const auto log_up = [](std::int64_t n) {
    return static_cast<int>(std::bit_width(static_cast<std::uint64_t>(n - 1)));
  };
  const int most_l = config.axis == kAlongL ? std::min(5, log_up(ceil_div(p.sizes.d, config.v))) : 0;
  const int most_k = std::min(kLog, log_up(ceil_div(p.sizes.c, config.axis == kAlongK ? config.v : 1)));
  ThreadTile best;
  double least = std::numeric_limits<double>::max();
  for (int l = 0; l <= most_l; ++l) {
    for (int k = 0; k <= std::min(most_k, kLog - l); ++k) {
      const ThreadTile tile(config, l, k);
      if (const double clocks = cost(p, config, tile, k_next, multiprocessors); clocks < least) {
        least = clocks;
        best = tile;
      }
    }
  }
  return best;
}

/// The same on the tensor cores, by warps and, along the depth, CTAs of a cluster.
struct WarpTile {
  static constexpr std::int64_t kRoom = 80 * 1024;
  int v = 0, log_l = 0, log_k = 0, log_j = 0, split = 1;
  std::int64_t tile_l = 0, tile_j = 0, step = 0, part = 0;
  WarpTile() = default;
  WarpTile(int deltas, int l, int k, std::int64_t c, int ctas)
      : v(deltas),
        log_l(l),
        log_k(k),
        log_j(std::countr_zero(static_cast<unsigned>(kWarps)) - l - k),
        tile_l(std::int64_t{v} << l),
        tile_j(std::int64_t{kTileSide} << log_j),
        step(std::int64_t{16} << k) {
    const std::int64_t steps = ceil_div(c, step), each = ceil_div(steps, std::int64_t{ctas});
    part = each * step;
    split = static_cast<int>(ceil_div(steps, each));  // every CTA has a part
  }
  /// Steps that x is fetched for at once, in up to so many bytes.
  std::int64_t steps(std::int64_t rows, std::int64_t room = kRoom) const {
    const std::int64_t bytes = (step / 16) * rows * 4 * tile_pitch(static_cast<int>(tile_l)) * 2;
    return std::min(part / step, std::max<std::int64_t>(room / bytes, 1));
  }
  int log_cells() const { return std::countr_zero(static_cast<std::uint64_t>(tile_l * tile_j)); }
  std::int64_t places(const Sizes& s, std::int64_t batch) const {
    return s.a * ceil_div(s.d, tile_l) * ceil_div(s.b, tile_j) * ceil_div(batch, std::int64_t{kTileRows});
  }
};

/// Batch rows that a CTA on the tensor cores has room for, and those that it fetches.
std::int64_t room_of(std::int64_t batch) { return batch <= 8 ? 8 : kTileRows; }
std::int64_t fetched(std::int64_t batch) {
  return static_cast<std::int64_t>(std::bit_ceil(static_cast<std::uint64_t>(std::min<std::int64_t>(batch, kTileRows))));
}

/// As `cost`, for warps on the tensor cores. From times on an H200, a step takes a whole trip to memory: the loads of
/// the next one are under way while this one is multiplied, but that is soon done. So do trips for x.
double tile_cost(const Problem& p, const WarpTile& tile, int multiprocessors) {
  constexpr double kMemory = 18, kL2 = 26, kX = 24, kTrip = 1400, kStart = 800, kMeeting = 1200;
  const Sizes& s = p.sizes;
  const std::int64_t rows = fetched(p.batch), ctas = tile.places(s, p.batch) * tile.split;
  const auto steps = double(tile.part) / double(tile.step);
  const double run = tile.tile_l >= s.d ? 32 : 2.0 * double(tile.tile_l);
  const double bytes = steps * kTileThreads * 8 * tile.v * 2 * std::max(1.0, 32 / run);
  const auto x = double(rows * tile.part * tile.tile_l);
  const int sums = tile.split << tile.log_k;
  const double ends =
      std::ceil(double(rows << tile.log_cells()) / (4.0 * kTileThreads * tile.split)) * (150 + 12.0 * sums);
  const double rate = p.batch <= kTileRows ? kMemory : kL2;  // only the first rows wait for memory
  const double busy = double(ceil_div(ctas, multiprocessors)) * (bytes / rate + 2 * x / kX + ends);
  const double chunks = std::ceil(steps / double(tile.steps(room_of(p.batch))));
  const double trips = steps + std::ceil(x / chunks / 8192) * chunks - 1;  // the first of both go together
  const double turns = double(ceil_div(ctas, (tile.v == 8 ? 1 : 2) * multiprocessors));
  return std::max(busy, turns * (kStart + trips * kTrip + ends + (tile.split > 1 ? kMeeting : 0)));
}

/// The best for `v` neighbouring l, and its cost.
struct PlannedTile {
  WarpTile tile;
  double clocks = std::numeric_limits<double>::max();
};
PlannedTile choose_tiles(const Problem& p, int v, bool clusters, int multiprocessors) {
  constexpr int kLog = std::countr_zero(static_cast<unsigned>(kWarps));
  const Sizes& s = p.sizes;
  PlannedTile best;
  for (int l = 0; l <= kLog && (l == 0 || v << (l - 1) < s.d); ++l) {
    for (int k = 0; k <= kLog - l && (k == 0 || 16 << (k - 1) < s.c); ++k) {
      // Twice as many CTAs as fit at once are enough.
      const std::int64_t places = WarpTile(v, l, k, s.c, 1).places(s, p.batch);
      const int most = clusters && places < 2 * multiprocessors ? kMostSplit : 1;
      for (int wanted = 1, last = 0; wanted <= most; ++wanted) {
        const WarpTile tile(v, l, k, s.c, wanted);
        if (tile.split == last) {
          continue;
        }
        last = tile.split;
        if (const double clocks = tile_cost(p, tile, multiprocessors); clocks < best.clocks) {
          best = {tile, clocks};
        }
      }
    }
  }
  return best;
}

/// Four neighbours of x can be read at once: l of one k, or with all l of several k.
bool x_vectors(const Problem& p, std::int64_t tile_l, std::int64_t step, bool several_k) {
  const Sizes& s = p.sizes;
  const std::size_t bytes = 4 * size_of(p.dtype);
  const bool within = tile_l % 4 == 0 && s.d % 4 == 0;
  const bool across = several_k && tile_l == s.d && s.c * s.d % 4 == 0 && step * s.d % 4 == 0;
  return p.x.feature == 1 && (within || across) && is_aligned(p.x.data, bytes) && (p.batch == 1 || p.x.batch % 4 == 0);
}

/// Two neighbouring l of x can be read at once.
bool x_pairs(const Problem& p) {
  return p.x.feature == 1 && (p.batch == 1 || p.x.batch % 2 == 0) && is_aligned(p.x.data, 4);
}

/// Four rows of x can be read at once: batch last, and none of them is missing.
bool x_rows(const Problem& p) {
  return p.x.batch == 1 && p.batch % 4 == 0 && p.x.feature % 4 == 0 && is_aligned(p.x.data, 4 * size_of(p.dtype));
}

/// The parameters that both kernels share, for tiles of `rows` batch rows.
template <typename AnyTile>
Params fill(const Problem& p, const AnyTile& tile, std::int64_t rows) {
  const Sizes& s = p.sizes;
  Params params{};
  fill_operands(p, params);
  params.w_d = p.w.d;
  params.log_l = tile.log_l;
  params.log_k = tile.log_k;
  params.log_j = tile.log_j;
  params.split = 1;
  params.groups = Divisor(ceil_div(p.batch, rows));
  params.j_tiles = Divisor(ceil_div(s.b, tile.tile_j));
  params.l_tiles = Divisor(ceil_div(s.d, tile.tile_l));
  return params;
}

/// Lanes can read `v` neighbouring l at once, for the tensor cores.
bool tiles_fit(const Problem& p, int v, const Machine& machine) {
  const bool type = p.dtype == DType::f16 || p.dtype == DType::bf16;
  return type && p.w.d == 1 && p.sizes.d % v == 0 && whole(p.w, p.sizes, kAlongL, v, 2) &&
         has_mma(p.dtype, machine.number) && v <= most_deltas(machine.number);
}

/// The number of l that suits best, of those whose bits are set: the same for every batch, as each is another kernel. 0
/// for none.
int choose_deltas(Problem p, unsigned fitting, bool clusters, int multiprocessors) {
  p.batch = kTileRows;
  int best = 0;
  double least = std::numeric_limits<double>::max();
  for (const int v : kDeltas) {
    if ((fitting & static_cast<unsigned>(v)) != 0) {
      // Shorter loads must pay: they make more tiles, but also more requests.
      if (const double clocks = choose_tiles(p, v, clusters, multiprocessors).clocks; clocks < 0.85 * least) {
        least = clocks;
        best = v;
      }
    }
  }
  return best;
}

/// The tile on the tensor cores; its clocks are infinite where none fits. Choosing takes longer than a launch, so
/// recent choices are cached.
PlannedTile choose_tiles(const Problem& p, const Machine& machine) {
  thread_local Lately<8, PlannedTile> lately;
  const Sizes& s = p.sizes;
  const bool clusters = machine.arch == "sm_90a";
  unsigned fitting = 0;
  for (const int v : kDeltas) {
    fitting |= tiles_fit(p, v, machine) ? static_cast<unsigned>(v) : 0u;
  }
  return lately.get({s.a, s.b, s.c, s.d, p.batch, fitting, machine.multiprocessors, clusters}, [&] {
    const int v = choose_deltas(p, fitting, clusters, machine.multiprocessors);
    return v == 0 ? PlannedTile{} : choose_tiles(p, v, clusters, machine.multiprocessors);
  });
}

void launch(const Params& params, const Problem& p, std::size_t index, std::int64_t shared, Context& context) {
  const auto type = static_cast<std::size_t>(std::ranges::find(kTypes, p.dtype) - std::begin(kTypes));
  const std::int64_t grid = p.sizes.a * params.l_tiles.divisor * params.j_tiles.divisor * params.groups.divisor;
  const bool tiles = index >= std::size(kConfigs);
  kernels
      .get(type * kOfType + index, context.device.index,
           [&] {
             return tiles ? tile_instance(p.dtype, kDeltas[index - std::size(kConfigs)])
                          : spec_of(p.dtype, kConfigs[index]);
           })
      .launch_clusters(grid * params.split, params.split, tiles ? kTileThreads : kThreads, static_cast<int>(shared),
                       &params, context.stream);
}

void run_tiles(const Problem& p, const WarpTile& tile, Context& context) {
  const std::int64_t room = room_of(p.batch);
  Params params = fill(p, tile, kTileRows);
  params.split = tile.split;
  params.by_split = Divisor(tile.split);
  params.part = static_cast<int>(tile.part);
  const std::int64_t x_room = std::min<std::int64_t>(WarpTile::kRoom, driver::shared_limit(context.device.index));
  params.chunk = static_cast<int>(tile.steps(room, x_room) * tile.step);
  params.pitch = tile_pitch(static_cast<int>(tile.tile_l));
  params.x_vector = x_vectors(p, tile.tile_l, tile.step, false);
  params.x_pairs = x_pairs(p);
  params.x_rows = x_rows(p);
  params.log_rows = std::countr_zero(static_cast<std::uint64_t>(fetched(p.batch)));
  const std::int64_t x = params.chunk / 16 * room * 4 * params.pitch * 2;
  const std::int64_t sums = (room << tile.log_k) * sums_pitch(tile.log_cells()) * std::int64_t{sizeof(float)};
  const auto index = static_cast<std::size_t>(std::ranges::find(kDeltas, tile.v) - std::begin(kDeltas));
  launch(params, p, std::size(kConfigs) + index, std::max(x, sums), context);
}

void run_threads(const Problem& p, Context& context) {
  const Sizes& s = p.sizes;
  const std::size_t index = choose_config(p.w, s, size_of(p.dtype));
  const KernelConfig& config = kConfigs[index];
  const bool k_next = std::llabs(p.w.c) <= std::llabs(p.w.b) && config.axis != kAlongJ;
  const int multiprocessors = driver::device_info(context.device.index).multiprocessors;
  const ThreadTile tile = choose_tile(p, config, k_next, multiprocessors);
  Params params = fill(p, tile, kRows);
  params.k_next = k_next;
  params.x_vector = x_vectors(p, tile.tile_l, tile.step, true);
  // x in shared memory: all k where they fit, else whole steps of them.
  constexpr std::int64_t kPositions = 1536;
  const std::int64_t steps =
      std::min(ceil_div(s.c, tile.step), std::max<std::int64_t>(kPositions / (tile.step * tile.tile_l), 1));
  params.chunk = static_cast<int>(steps * tile.step);
  params.pitch = static_cast<int>(ceil_div(steps * tile.step * tile.tile_l, 32) * 32 + 4);
  const std::int64_t rows = p.batch == 1 ? 1 : p.batch <= 4 ? 4 : kRows;
  const std::int64_t floats = rows * std::max(params.pitch, sums_of(config.axis, config.v) * kPitch);
  launch(params, p, index, floats * static_cast<std::int64_t>(sizeof(float)), context);
}

/// The costs above are clocks at best. Measured times are about twice as long.
constexpr double kClocks = 850;  // of them in a µs

/// `cost` of the tile that is taken. Where x cannot be read four elements at a time, threads wait for single loads.
double thread_clocks(const Problem& p, int multiprocessors) {
  constexpr double kSingle = 200;
  const KernelConfig& config = kConfigs[choose_config(p.w, p.sizes, size_of(p.dtype))];
  const bool k_next = std::llabs(p.w.c) <= std::llabs(p.w.b) && config.axis != kAlongJ;
  const ThreadTile tile = choose_tile(p, config, k_next, multiprocessors);
  const bool single = !x_vectors(p, tile.tile_l, tile.step, true);
  const double rows = double(std::min<std::int64_t>(p.batch, kRows));
  return cost(p, config, tile, k_next, multiprocessors) +
         (single ? rows * double(p.sizes.c * tile.tile_l) / kThreads * kSingle : 0.0);
}

bool fits(const Problem& p, const Config& /*config*/, const Machine& machine) {
  const Sizes& s = p.sizes;
  const bool type = std::ranges::find(kTypes, p.dtype) != std::end(kTypes);
  // There is at most one CTA for each (i, j, l).
  const bool sizes = s.b < kMost && s.c < kMost && s.d < kMost && s.a < kMost && s.a * s.b < kMost * 8 / s.d;
  return type && sizes && (p.batch <= kMostRows || (p.batch <= kMostTileRows && choose_tiles(p, machine).tile.v > 0));
}

double cost(const Problem& p, const Config& /*config*/, const Machine& machine) {
  // Large weights: bytes per µs from memory, and from L2 for the rows after the first.
  constexpr double kStart = 3.0, kMemory = 0.8e6, kAgain = 1.8e6;
  const int multiprocessors = machine.multiprocessors;
  const PlannedTile planned = choose_tiles(p, machine);
  const double clocks = planned.tile.v > 0 ? planned.clocks : thread_clocks(p, multiprocessors);
  const auto groups = double(ceil_div(p.batch, std::int64_t{planned.tile.v > 0 ? kTileRows : kRows}));
  const double weights = weight_bytes(p.sizes, p.dtype) * cost::kMultiprocessors / multiprocessors;
  return std::max(clocks / kClocks, kStart + weights * (1 / kMemory + (groups - 1) / kAgain));
}

void launch(const Problem& p, const Config& /*config*/, Context& context) {
  if (const PlannedTile planned = choose_tiles(p, machine_of(context)); planned.tile.v > 0) {
    run_tiles(p, planned.tile, context);
  } else {
    run_threads(p, context);
  }
}

}  // namespace

constinit const Functions<Problem> kProduct{fits, cost, launch};

}  // namespace fretwork::kronecker::few
