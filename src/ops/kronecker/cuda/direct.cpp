// Host side of the small-batch kernels that load straight into mma fragments: which problems fit, when they pay,
// launch.
#include <algorithm>
#include <bit>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "ops/kronecker/cuda/launch.h"
#include "ops/kronecker/cuda/params_direct.cuh"
#include "runtime/alignment.h"
#include "runtime/cuda_driver.h"
#include "runtime/kernels.h"

namespace fretwork::kronecker::direct {
namespace {

namespace driver = fretwork::cuda;

constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();

/// A warp's share: steps whose loads go together, and tiles of 16 outputs and of eight batch rows.
struct Shape {
  int steps, m, n;
};
/// A kernel: neighbouring l of a lane (d itself, or 8 that divides it), and its shares of a few rows and of more.
struct Kind {
  int v;
  Shape few, more;
};
constexpr Kind kKinds[] = {{1, {1, 1, 2}, {1, 1, 2}}, {2, {2, 1, 2}, {2, 1, 2}}, {2, {4, 1, 2}, {4, 1, 2}},
                           {4, {2, 1, 2}, {2, 1, 2}}, {4, {4, 1, 2}, {1, 2, 4}}, {4, {2, 1, 2}, {1, 2, 4}},
                           {8, {1, 1, 2}, {1, 1, 2}}};
constexpr DType kTypes[] = {DType::f16, DType::bf16};

std::string shares(const Kind& kind) {
  std::string text;
  for (const int number : {kind.few.steps, kind.few.m, kind.few.n, kind.more.steps, kind.more.m, kind.more.n}) {
    text += ", " + std::to_string(number);
  }
  return text;
}
/// `first` is for layers whose batch is first.
KernelSpec instance(DType dtype, const Kind& kind, bool first) {
  return {"ops/kronecker/cuda/direct.cuh",
          std::string("fretwork::kronecker::direct::product<") + device_type(dtype) + ", " + std::to_string(kind.v) +
              shares(kind) + (first ? ", true>" : ", false>"),
          KernelSpec::kBySize};
}
KernelSpec deep_instance(DType dtype, const Kind& kind) {
  return {"ops/kronecker/cuda/direct_deep.cuh",
          std::string("fretwork::kronecker::direct::deep<") + device_type(dtype) + shares(kind) + ">",
          KernelSpec::kBySize};
}

constexpr std::size_t kDeepKinds[] = {4, 5};

std::vector<KernelSpec> list_kernels(const std::string& arch) {
  std::vector<KernelSpec> list;
  for (const DType dtype : kTypes) {
    if (!has_mma(dtype, driver::arch_number(arch))) {
      continue;
    }
    if (arch == "sm_90a") {
      for (const std::size_t kind : kDeepKinds) {
        list.push_back(deep_instance(dtype, kKinds[kind]));
      }
    }
    for (const Kind& kind : kKinds) {
      list.push_back(instance(dtype, kind, false));
      list.push_back(instance(dtype, kind, true));
    }
  }
  return list;
}
const KernelList kKernels{"kronecker", list_kernels, kLeastArch};
constexpr std::size_t kDeep = 2 * std::size(kTypes) * std::size(kKinds);  // the first of deep blocks
constinit KernelTable<kDeep + std::size(kTypes) * std::size(kDeepKinds)> kernels;

/// Its place among kKinds; their number where there is none. Deep blocks with more than a few rows would be read too
/// often by small shares.
std::size_t kind_of(const Sizes& s) {
  return s.d == 1       ? 0
         : s.d == 2     ? (s.c < 128 ? 1 : 2)
         : s.d == 4     ? (s.c < 512    ? 3
                           : s.c == 512 ? 4
                                        : 5)
         : s.d % 8 == 0 ? 6
                        : std::size(kKinds);
}
const Shape& shape_of(const Kind& kind, std::int64_t batch) { return batch <= few::kMostRows ? kind.few : kind.more; }

/// Warps of a CTA: at most, and those of them that have l, or outputs, of their own.
struct Warps {
  int most, own;
};
/// Two tiles of eight l together make whole sectors of memory, which pays where CTAs are more than the machine has room
/// for at once; where they still are, smaller ones. There two large shares read x together too.
Warps warps_of(const Kind& kind, const Shape& shape, std::int64_t d, std::int64_t ctas, int multiprocessors) {
  if (kind.v < 8) {
    return {kind.v == 1 ? 16 : kind.v == 2 ? 12 : 8, shape.m > 1 && ctas > multiprocessors ? 2 : 1};
  }
  if (d % 16 != 0 || ctas <= multiprocessors) {
    return {8, 1};
  }
  return {ctas / 2 <= multiprocessors ? 8 : 4, 2};
}

/// Weights as they are made, [j][k][l], whose lanes' shares are whole and begin at multiples of 16 bytes.
bool suits(const Weights& w, const Sizes& s, const Kind& kind) {
  return (s.d == 1 || w.d == 1) && w.c == s.d && s.c % (depth_of(kind.v) / 4) == 0 && (s.b == 1 || w.b % 8 == 0) &&
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

/// Whether more than a few rows should be faster here than where weights are packed.
bool cheap(const Problem& p) {
  // Microseconds on an H200, fitted to times of 40 patterns with 196 rows. Here every 16 or 32 rows read the weights
  // again and as many outputs x, in short lines where the batch is last; δ apart take most registers and run least at
  // once.
  const auto& [a, b, c, d] = p.sizes;
  const bool last = p.x.feature != 1, far = d >= 8;
  const double weights = 2e-6 * double(a * b * c * d), x = 2e-6 * double(p.batch * a * c * d);
  const Kind& kind = kKinds[std::min(kind_of(p.sizes), std::size(kKinds) - 1)];
  const Shape& shape = shape_of(kind, p.batch);
  const double read = weights * double(ceil_div(p.batch, std::int64_t{8} * shape.n)) +
                      x * double(ceil_div(b, std::int64_t{16} * shape.m));
  const double rate = kind.v == 1   ? 3.2
                      : far         ? (d >= 32 ? 2.0
                                       : last  ? 2.7
                                               : 3.3)
                      : shape.m > 1 ? (last ? 3.3 : 4.5)
                      : last        ? 3.5
                                    : 6.3;
  const double here = (d == 1 ? 0.4 : 0.7) + read / rate;
  // Elsewhere weights are packed first, but for d = 1.
  const double moved = weights + x + 2e-6 * double(p.batch * a * b * d);
  const double there = d == 1 ? 1.2 + moved / 2 : 6.3 + 1.3 * weights + 0.01 * double(c) + (far && !last ? 4.5 : 0.0);
  return here < there;
}

/// Batch last with d = 1, small blocks and lines that the copy engine cannot follow, each block of x in one piece.
bool in_pieces(const Problem& p) {
  const auto& [a, b, c, d] = p.sizes;
  return d == 1 && b % 16 == 0 && c % 16 == 0 && c <= kPieceDepth && p.x.batch == 1 && p.x.feature == p.batch &&
         p.y.batch == 1 && p.y.feature == p.batch && p.batch > few::kMostRows && p.batch % 2 == 0 && p.batch % 8 != 0 &&
         is_aligned(p.x.data, 16) && is_aligned(p.y.data, 16) && !cheap(p);
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

/// Deep blocks with d = 4 on Hopper, whose batch is first, are for its own kernel.
bool deep(const Problem& p, std::size_t kind, const Context& context) {
  return std::ranges::find(kDeepKinds, kind) != std::end(kDeepKinds) && p.sizes.b % 64 == 0 && p.sizes.c % 256 == 0 &&
         p.sizes.c <= 1024 && (p.batch == 1 || p.y.batch % 4 == 0) && is_aligned(p.y.data, 8) &&
         driver::kernel_arch(context.device.index) == "sm_90a";
}
/// CTAs that have the whole depth, each with 32 outputs and some rows, where the machine has room for them all; else 0.
std::int64_t whole_ctas(const Problem& p, int multiprocessors) {
  const std::int64_t ctas = p.sizes.a * (p.sizes.b / kWholeOutputs) * ceil_div(p.batch, std::int64_t{kWholeRows});
  return p.sizes.c == kWholeDepth && p.batch > few::kMostRows && p.x.batch > 0 && ctas <= multiprocessors ? ctas : 0;
}
/// Pairs of CTAs, each with 64 outputs and some rows, where they fill the machine, and once; else 0.
std::int64_t deep_pairs(const Problem& p, int multiprocessors) {
  const std::int64_t pairs = p.sizes.a * (p.sizes.b / 64) * ceil_div(p.batch, std::int64_t{kDeepRows});
  return p.batch > few::kMostRows && p.x.batch > 0 && 16 * pairs >= 7 * multiprocessors && 2 * pairs <= multiprocessors
             ? pairs
             : 0;
}

/// In boxes of `rows` rows × so many lines of 128 bytes.
Map deep_map(const Problem& p, int rows, int lines) {
  const auto u64 = [](std::int64_t n) { return static_cast<std::uint64_t>(n); };
  const std::uint64_t sizes[] = {64, u64(p.batch), u64(p.sizes.a * p.sizes.c * p.sizes.d / 64)};
  const std::uint64_t strides[] = {u64(p.x.batch) * 2, 128};
  const std::uint32_t box[] = {64, static_cast<std::uint32_t>(rows), static_cast<std::uint32_t>(lines)};
  return std::bit_cast<Map>(driver::make_tensor_map(p.x.data, 2, sizes, strides, box, driver::Swizzle::b128));
}

void run_deep(const Kernel& kernel, const Problem& p, DeepParams& params, std::int64_t pairs, Context& context) {
  const std::int64_t groups = ceil_div(p.batch, std::int64_t{kDeepRows});
  params.x = deep_map(p, kDeepRows, 4);
  params.direct.groups = Divisor(groups);
  params.direct.j_tiles = Divisor(p.sizes.b / 64);
  params.rows = static_cast<int>(ceil_div(p.batch, groups));
  params.ctas = 2;
  params.depth = static_cast<int>(p.sizes.c / 4);
  kernel.launch_clusters(2 * pairs, 2, kDeepThreads, 2 * deep_region(params.depth) + kDeepBarriers, &params,
                         context.stream);
}

void run_whole(const Kernel& kernel, const Problem& p, DeepParams& params, std::int64_t ctas, Context& context) {
  const std::int64_t groups = ceil_div(p.batch, std::int64_t{kWholeRows});
  params.direct.groups = Divisor(groups);
  params.direct.j_tiles = Divisor(p.sizes.b / kWholeOutputs);
  params.rows = static_cast<int>(ceil_div(p.batch, groups));
  params.x = deep_map(p, params.rows, 1);
  params.ctas = 1;
  kernel.launch(ctas, kDeepThreads, kWholeBytes, &params, context.stream);
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

}  // namespace

bool pays(const Problem& p) {
  return p.batch <= few::kMostRows || (p.batch <= kMostRows && (cheap(p) || in_pieces(p)));
}

bool run(const Problem& p, Context& context) {
  const auto& [a, b, c, d] = p.sizes;
  const std::size_t which = kind_of(p.sizes);
  const auto type = static_cast<std::size_t>(std::ranges::find(kTypes, p.dtype) - std::begin(kTypes));
  if (type == std::size(kTypes) || which == std::size(kKinds) || p.batch > kMostRows || !small(p) ||
      !suits(p.w, p.sizes, kKinds[which]) || !has_mma(p.dtype, driver::arch_number(context.device.index))) {
    return false;
  }
  const Kind& kind = kKinds[which];
  const int v = kind.v;
  const Shape& shape = shape_of(kind, p.batch);
  const auto& [steps, m, n] = shape;
  const std::int64_t groups = ceil_div(p.batch, std::int64_t{8} * n), shares = ceil_div(b, std::int64_t{16} * m);
  const driver::DeviceInfo& device = driver::device_info(context.device.index);
  const int multiprocessors = device.multiprocessors;
  const Warps most = warps_of(kind, shape, d, a * groups * shares * (d / v), multiprocessors);
  const std::int64_t j_tiles = v == 8 ? shares : ceil_div(shares, std::int64_t{most.own});
  const std::int64_t l_tiles = v == 8 ? d / v / most.own : 1;
  const std::int64_t chunks = ceil_div(c, std::int64_t{depth_of(v)} * steps);
  const std::int64_t turns = ceil_div(chunks, std::int64_t{most.most / most.own});
  DeepParams all{};
  Params& params = all.direct;
  params = fill(p);
  params.groups = Divisor(groups);
  params.j_tiles = Divisor(j_tiles);
  params.l_tiles = Divisor(l_tiles);
  params.log_own = std::countr_zero(static_cast<unsigned>(most.own));
  params.along_k = static_cast<int>(ceil_div(chunks, turns));
  params.more = p.batch > few::kMostRows;
  params.apart = true;
  const int warps = params.along_k * most.own;
  const bool first = params.first && !p.last;
  const std::int64_t ctas = a * groups * j_tiles * l_tiles;
  const int bytes = warps * sums_bytes(v, m, n);
  const bool tiles = first && params.more && v == 2 && steps == kTileSteps;
  const int shared_limit = driver::shared_limit(context.device.index);
  if ((in_pieces(p) ? piece_bytes(params.c, params.batch) : bytes) > shared_limit) {
    return false;  // before sm_80
  }
  if (first && deep(p, which, context)) {
    const Kernel& kernel = kernels.get(kDeep + std::size(kDeepKinds) * type + which - kDeepKinds[0],
                                       context.device.index, [&] { return deep_instance(p.dtype, kind); });
    if (const std::int64_t whole = whole_ctas(p, multiprocessors); whole > 0) {
      run_whole(kernel, p, all, whole, context);
    } else if (const std::int64_t pairs = deep_pairs(p, multiprocessors); pairs > 0) {
      run_deep(kernel, p, all, pairs, context);
    } else {
      kernel.launch(ctas, 32 * warps, bytes, &all, context.stream);
    }
    return true;
  }
  const Kernel& kernel = kernels.get(2 * (type * std::size(kKinds) + which) + (first ? 1 : 0), context.device.index,
                                     [&] { return instance(p.dtype, kind, first); });
  if (in_pieces(p)) {
    run_pieces(kernel, p, context);
  } else if (const Tile tile = tiles ? tile_of(p, ctas, device, shared_limit) : Tile{}; tile.rows > 0) {
    run_tiles(kernel, p, params, tile, context);
  } else {
    kernel.launch(ctas, 32 * warps, bytes, &params, context.stream);
  }
  return true;
}

}  // namespace fretwork::kronecker::direct
