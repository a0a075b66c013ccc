// Host side of the small-batch kernel that loads straight into mma fragments: which problems fit, costs, launches.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "ops/kronecker/cuda/families.h"
#include "ops/kronecker/cuda/params.h"
#include "runtime/alignment.h"
#include "runtime/cost.h"
#include "runtime/cuda_driver.h"
#include "runtime/kernels.h"

namespace fretwork::kronecker::direct {
namespace {

namespace driver = fretwork::cuda;

constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();

/// A warp's share: steps whose loads go together, and tiles of 16 outputs and of eight batch rows.
struct Share {
  int steps, m, n;
};
/// Template arguments of a kernel: neighbouring l of a lane (d itself, or 8 that divides it), and its shares of a few
/// rows and of more.
struct KernelConfig {
  int v;
  Share few, more;
};
constexpr KernelConfig kConfigs[] = {{1, {1, 1, 2}, {1, 1, 2}}, {2, {2, 1, 2}, {2, 1, 2}}, {2, {4, 1, 2}, {4, 1, 2}},
                                     {4, {2, 1, 2}, {2, 1, 2}}, {4, {4, 1, 2}, {1, 2, 4}}, {4, {2, 1, 2}, {1, 2, 4}},
                                     {8, {1, 1, 2}, {1, 1, 2}}};
constexpr DType kTypes[] = {DType::f16, DType::bf16};

/// `first` is for layers whose batch is first.
KernelSpec spec_of(DType dtype, const KernelConfig& config, bool first) {
  const auto& [v, few, more] = config;
  return kernel_spec("direct", KernelSpec::kBySize, "direct::product", dtype, v, few.steps, few.m, few.n, more.steps,
                     more.m, more.n, first);
}
std::vector<KernelSpec> list_kernels(const std::string& arch) {
  std::vector<KernelSpec> list;
  for (const DType dtype : kTypes) {
    if (!has_mma(dtype, driver::arch_number(arch))) {
      continue;
    }
    for (const KernelConfig& config : kConfigs) {
      list.push_back(spec_of(dtype, config, false));
      list.push_back(spec_of(dtype, config, true));
    }
  }
  return list;
}
const KernelList kKernels{"kronecker", list_kernels, kLeastArch};
constinit KernelTable<2 * std::size(kTypes) * std::size(kConfigs)> kernels;

/// The index in kConfigs; their number where none fits. Deep blocks with more than a few rows would be read too
/// often by small shares.
std::size_t index_of(const Sizes& s) {
  return s.d == 1       ? 0
         : s.d == 2     ? (s.c < 128 ? 1 : 2)
         : s.d == 4     ? (s.c < 512    ? 3
                           : s.c == 512 ? 4
                                        : 5)
         : s.d % 8 == 0 ? 6
                        : std::size(kConfigs);
}
const Share& share_of(const KernelConfig& config, std::int64_t batch) {
  return batch <= kFewRows ? config.few : config.more;
}

/// Warps of a CTA: at most, and those of them that have l, or outputs, of their own.
struct Warps {
  int most, own;
};
/// Two tiles of eight l together make whole sectors of memory, which pays where CTAs are more than the machine has room
/// for at once; where they still are, smaller ones. There two large shares read x together too.
Warps warps_of(const KernelConfig& config, const Share& share, std::int64_t d, std::int64_t ctas, int multiprocessors) {
  if (config.v < 8) {
    return {config.v == 1 ? 16 : config.v == 2 ? 12 : 8, share.m > 1 && ctas > multiprocessors ? 2 : 1};
  }
  if (d % 16 != 0 || ctas <= multiprocessors) {
    return {8, 1};
  }
  return {ctas / 2 <= multiprocessors ? 8 : 4, 2};
}

/// Weights as they are made, [j][k][l], whose lanes' shares are whole and begin at multiples of 16 bytes.
bool suits(const Weights& w, const Sizes& s, const KernelConfig& config) {
  return (s.d == 1 || w.d == 1) && w.c == s.d && s.c % (depth_of(config.v) / 4) == 0 && (s.b == 1 || w.b % 8 == 0) &&
         (s.a == 1 || w.a % 8 == 0) && is_aligned(w.data, 16);
}

/// Offsets within a block, a tile more than there is, and features of the result fit into 31 bits.
bool small(const Problem& p) {
  constexpr std::int64_t kTile = 64;
  const auto& [a, b, c, d] = p.sizes;
  const auto fits = [](std::int64_t count, std::int64_t stride) {
    return stride >= 0 && count < kMost / std::max<std::int64_t>(stride, 1);
  };
  return b < kMost / 2 / d && c < kMost / 2 / d && fits((c + kTile) * d, p.x.feature) &&
         fits(p.batch + kTile, p.x.batch) && fits(b + kTile, p.w.b) && a < kMost / ((b + kTile) * d) &&
         fits(a * (b + kTile) * d, p.y.feature) && fits(a * (b + kTile) * d, p.bias.stride) && fits(1, p.y.batch) &&
         a * b * d < kMost / (p.batch + kTile);
}

/// Batch last with d = 1, small blocks and lines that the copy engine cannot follow, each block of x in one piece.
bool can_be_pieces(const Problem& p) {
  const auto& [a, b, c, d] = p.sizes;
  return d == 1 && b % 16 == 0 && c % 16 == 0 && c <= kPieceDepth && p.x.batch == 1 && p.x.feature == p.batch &&
         p.y.batch == 1 && p.y.feature == p.batch && p.batch > kFewRows && p.batch % 2 == 0 && p.batch % 8 != 0 &&
         is_aligned(p.x.data, 16) && is_aligned(p.y.data, 16);
}

/// d = 2, batch first, where tiles run all at once, one on each SM, and read so much less than `ctas` of single shares
/// that copies through shared memory pay: warps with outputs of their own, as a power of two, rows (else none), parts
/// of the depth and bytes of shared memory.
struct Tile {
  int log_own = 0;
  std::int64_t rows = 0, parts = 0, bytes = 0;
};
Tile tile_of(const Problem& p, std::int64_t ctas, const driver::DeviceInfo& device, int shared_limit) {
  const auto& [a, b, c, d] = p.sizes;
  constexpr std::int64_t kGain = 40 << 10;  // bytes of an SM
  const std::int64_t row = c * d * 2, parts = ceil_div(c, std::int64_t{kTileSteps} * depth_of(2));
  std::int64_t least = ceil_div(ctas, std::int64_t{device.multiprocessors}) * (32 * row) - kGain;
  Tile best;
  for (int log_own = 0; log_own <= 2; ++log_own) {
    const std::int64_t own = 1 << log_own, groups = device.multiprocessors / (a * ceil_div(b, 16 * own));
    if (groups == 0 || parts > kTileParts || parts * own > kTileWarps) {
      continue;
    }
    const std::int64_t rows = ceil_div(p.batch, groups), whole = rows > kTileFewer ? kTileRows : kTileFewer;
    const std::int64_t bytes = tile_bytes(parts, own, whole), read = (16 * own + whole) * row;
    if (rows <= kTileRows && read < least && bytes <= shared_limit) {
      best = {log_own, rows, parts, bytes};
      least = read;
    }
  }
  return best;
}

Params fill(const Problem& p) {
  Params params{};
  params.x = p.x.data;
  params.w = p.w.data;
  params.bias = p.bias.data;
  params.y = p.y.data;
  params.x_block = p.sizes.c * p.sizes.d * p.x.feature;
  params.w_block = p.w.a;
  params.x_batch = static_cast<int>(p.batch == 1 ? 0 : p.x.batch);
  params.x_feature = static_cast<int>(p.x.feature);
  params.y_batch = static_cast<int>(p.batch == 1 ? 0 : p.y.batch);
  params.y_feature = static_cast<int>(p.y.feature);
  params.w_b = static_cast<int>(p.sizes.b == 1 ? 0 : p.w.b);
  params.bias_stride = static_cast<int>(p.bias.stride);
  params.batch = static_cast<int>(p.batch);
  params.b = static_cast<int>(p.sizes.b);
  params.c = static_cast<int>(p.sizes.c);
  params.d = static_cast<int>(p.sizes.d);
  params.activation = static_cast<int>(p.activation);
  params.plain = p.bias.data == nullptr && p.activation == Activation::none;
  params.first = p.x.feature == 1 && p.y.feature == 1 && is_aligned(p.x.data, 16) && is_aligned(p.y.data, 4) &&
                 (p.batch == 1 || (p.x.batch % 8 == 0 && p.y.batch % 2 == 0));
  params.last = !params.first && p.x.batch == 1 && p.y.batch == 1 && (p.batch | p.x.feature | p.y.feature) % 2 == 0 &&
                is_aligned(p.x.data, 4) && is_aligned(p.y.data, 4);
  return params;
}

void run_tiles(const Kernel& kernel, const Problem& p, Params& params, const Tile& tile, Context& context) {
  const std::int64_t own = 1 << tile.log_own, groups = ceil_div(p.batch, tile.rows);
  const std::int64_t j_tiles = ceil_div(p.sizes.b, 16 * own);
  params.groups = Divisor(groups);
  params.j_tiles = Divisor(j_tiles);
  params.log_own = tile.log_own;
  params.along_k = static_cast<int>(tile.parts);
  params.rows = static_cast<int>(tile.rows);
  params.apart = false;
  kernel.launch(p.sizes.a * groups * j_tiles, static_cast<int>(32 * tile.parts * own), static_cast<int>(tile.bytes),
                &params, context.stream);
}

void run_pieces(const Kernel& kernel, const Problem& p, Context& context) {
  Params params = fill(p);
  const std::int64_t tiles = ceil_div(p.sizes.b, std::int64_t{kPieceOutputs});
  params.j_tiles = Divisor(tiles);
  params.piece = true;
  kernel.launch(p.sizes.a * tiles, kPieceThreads, piece_bytes(params.c, params.batch), &params, context.stream);
}

/// How the problem is divided among warps and CTAs.
struct Cut {
  const KernelConfig& config;
  const Share& share;
  std::int64_t groups, j_tiles, l_tiles, turns;
  int own, along_k;

  Cut(const Problem& p, int multiprocessors) : config(kConfigs[index_of(p.sizes)]), share(share_of(config, p.batch)) {
    const auto& [a, b, c, d] = p.sizes;
    groups = ceil_div(p.batch, std::int64_t{8} * share.n);
    const std::int64_t shares = ceil_div(b, std::int64_t{16} * share.m);
    const Warps most = warps_of(config, share, d, a * groups * shares * (d / config.v), multiprocessors);
    j_tiles = config.v == 8 ? shares : ceil_div(shares, std::int64_t{most.own});
    l_tiles = config.v == 8 ? d / config.v / most.own : 1;
    const std::int64_t chunks = ceil_div(c, std::int64_t{depth_of(config.v)} * share.steps);
    turns = ceil_div(chunks, std::int64_t{most.most / most.own});
    own = most.own;
    along_k = static_cast<int>(ceil_div(chunks, turns));
  }
  std::int64_t ctas(const Sizes& s) const { return s.a * groups * j_tiles * l_tiles; }
  int warps() const { return along_k * own; }
  int bytes() const { return warps() * sums_bytes(config.v, share.m, share.n); }
};

/// A kernel of layers whose batch is first.
bool is_first(const Params& params, const Problem& p) { return params.first && !p.last; }

/// The tile, where d = 2, the batch is first and there are more than a few rows; else one of no rows.
Tile tile_of(const Problem& p, const Params& params, const Cut& cut, const Context& context) {
  const bool tiles = is_first(params, p) && p.batch > kFewRows && cut.config.v == 2 && cut.share.steps == kTileSteps;
  return tiles ? tile_of(p, cut.ctas(p.sizes), driver::device_info(context.device.index),
                         driver::shared_limit(context.device.index))
               : Tile{};
}

// ---------------------------------------------------------------------------------------------- costs

/// Each turn of a CTA is a trip to L2, and longer the more registers a lane's loads fill; memory is read meanwhile.
/// Batch last, a load of x uses a part of a sector. Results of eight δ out of more leave in parts of sectors, too.
double plain_cost(const Problem& p, int multiprocessors) {
  constexpr double kMemory = 4.1e6, kL2 = 6.7e6, kL2Four = 7.4e6, kEight = 0.5;                 // bytes per µs, µs
  constexpr double kShortLines = 3.0, kShortLinesEight = 1.8, kFarApart = 3.0, kFarLast = 1.8;  // times the bytes
  constexpr double kWrittenParts = 0.45e6, kWrittenEight = 1.5e6, kWrittenLast = 1.2e6;         // bytes per µs
  const auto& [a, b, c, d] = p.sizes;
  const Cut cut(p, multiprocessors);
  const auto& [v, few, more] = cut.config;
  const bool eight = v == 8;
  const double trip = eight ? 0.95 : v == 4 ? 0.74 : 0.12;  // µs
  const double again = p.x.feature == 1 || p.batch == 1 ? 1.0 : eight ? kShortLinesEight : kShortLines;
  const double shares = double(ceil_div(b, std::int64_t{16} * cut.share.m));
  const double read = 2.0 * double(a * c * d) * (double(b * cut.groups) + double(p.batch) * shares * again);
  const int registers = std::max(64, registers_of(v, cut.share.steps, cut.share.m, cut.share.n));
  const double at_once = multiprocessors * std::max(1.0, std::floor(65536.0 / (registers * 32 * cut.warps())));
  const double scale = multiprocessors / cost::kMultiprocessors;
  const double far = d < 32 ? 1.0 : p.x.feature == 1 ? kFarApart : kFarLast;
  const double waves = std::ceil(double(cut.ctas(p.sizes)) / at_once);
  const double rate = p.y.feature != 1 ? kWrittenLast : d > 8 ? kWrittenParts : kWrittenEight;
  const double written = eight || p.y.feature != 1 ? 2.0 * double(a * b * d * p.batch) / (rate * scale) : 0.0;
  return (eight ? kEight : 0.0) +
         std::max({trip * double(cut.turns) * waves, moved_bytes(p) / (kMemory * scale), written}) +
         read * far / ((v == 4 ? kL2Four : kL2) * scale);
}

/// A CTA copies a block of x and multiplies it once: three trips to memory one after the other.
double piece_cost(const Problem& p, int multiprocessors) {
  constexpr cost::Rates kRates = {4.0, 9.6e6, 4e6};
  const auto& [a, b, c, d] = p.sizes;
  return cost::microseconds({.count = double(a * ceil_div(b, std::int64_t{kPieceOutputs})),
                             .at_once = 4.0 * multiprocessors,
                             .steps = 1,
                             .bytes = 2.0 * double(c * (p.batch + kPieceOutputs)),
                             .ops = 2.0 * kPieceOutputs * double(c * p.batch),
                             .out = 2.0 * kPieceOutputs * double(p.batch)},
                            kRates, moved_bytes(p), multiprocessors);
}

bool in_pieces(const Problem& p, int multiprocessors) {
  return can_be_pieces(p) && piece_cost(p, multiprocessors) < plain_cost(p, multiprocessors);
}

bool fits(const Problem& p, const Config& /*config*/, const Machine& machine) {
  const std::size_t index = index_of(p.sizes);
  if (std::ranges::find(kTypes, p.dtype) == std::end(kTypes) || index == std::size(kConfigs) || p.batch > kMostRows ||
      !small(p) || !suits(p.w, p.sizes, kConfigs[index]) || !has_mma(p.dtype, machine.number)) {
    return false;
  }
  const int multiprocessors = machine.multiprocessors;
  const Cut cut(p, multiprocessors);
  const int bytes =
      in_pieces(p, multiprocessors) ? piece_bytes(static_cast<int>(p.sizes.c), static_cast<int>(p.batch)) : cut.bytes();
  return bytes <= machine.shared;  // which is small before sm_80
}

double cost(const Problem& p, const Config& /*config*/, const Machine& machine) {
  const int multiprocessors = machine.multiprocessors;
  const double plain = plain_cost(p, multiprocessors);
  return can_be_pieces(p) ? std::min(plain, piece_cost(p, multiprocessors)) : plain;
}

void launch(const Problem& p, const Config& /*config*/, Context& context) {
  const std::size_t index = index_of(p.sizes);
  const auto type = static_cast<std::size_t>(std::ranges::find(kTypes, p.dtype) - std::begin(kTypes));
  const int multiprocessors = driver::device_info(context.device.index).multiprocessors;
  const Cut cut(p, multiprocessors);
  Params params = fill(p);
  params.groups = Divisor(cut.groups);
  params.j_tiles = Divisor(cut.j_tiles);
  params.l_tiles = Divisor(cut.l_tiles);
  params.log_own = std::countr_zero(static_cast<unsigned>(cut.own));
  params.along_k = cut.along_k;
  params.more = p.batch > kFewRows;
  params.apart = true;
  const bool first = is_first(params, p);
  const Kernel& kernel = kernels.get(2 * (type * std::size(kConfigs) + index) + (first ? 1 : 0), context.device.index,
                                     [&] { return spec_of(p.dtype, cut.config, first); });
  if (in_pieces(p, multiprocessors)) {
    run_pieces(kernel, p, context);
  } else if (const Tile tile = tile_of(p, params, cut, context); tile.rows > 0) {
    run_tiles(kernel, p, params, tile, context);
  } else {
    kernel.launch(cut.ctas(p.sizes), 32 * cut.warps(), cut.bytes(), &params, context.stream);
  }
}

}  // namespace

constinit const Functions<Problem> kProduct{fits, cost, launch};

}  // namespace fretwork::kronecker::direct
