// Host side of the low-latency kernels. small_n_registers: few columns and small weights on Hopper. small_n_tma: up to
// 4096 columns on Hopper. small_n_cp_async: few columns, from sm_80 on.
#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <iterator>
#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/divide.h"
#include "ops/two_four/choose.h"
#include "ops/two_four/cuda/operands.h"
#include "runtime/alignment.h"
#include "runtime/kernels.h"
#include "runtime/tensor_map.h"

namespace fretwork::two_four {
namespace {

constexpr std::array kHalfTypes = {DType::f16, DType::bf16};
/// Sizes that kernels may multiply by 64 in 32 bits.
constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max() / 64;

template <typename List, typename Value>
std::size_t place_in(const List& list, const Value& value) {
  return static_cast<std::size_t>(std::ranges::find(list, value) - std::begin(list));
}
template <typename List, typename Value>
bool is_in(const List& list, const Value& value) {
  return std::ranges::find(list, value) != std::end(list);
}

/// "fretwork::two_four::small_n_tma::product<fretwork::f16, 16, 1>" and the like.
KernelSpec instance(const char* family, DType dtype, std::initializer_list<int> sizes, int shared) {
  std::string name = std::string("fretwork::two_four::") + family + "::product<" + device_type(dtype);
  for (const int size : sizes) {
    name += ", " + std::to_string(size);
  }
  return {std::string("ops/two_four/cuda/") + family + ".cuh", name + ">", shared};
}

/// What the two kernels for Hopper take, as a linear layer calls them: 16-bit operands along k in whole steps of 128,
/// and a result of their type without scales.
bool is_half_linear(const Problem& p, const Machine& machine, std::int64_t most_columns) {
  static_assert(small_n_registers::kDepth == 128 && small_n_tma::kDepth == 128);
  return machine.hopper && is_in(kHalfTypes, p.dtype) && p.out == p.dtype && p.batch == 1 && p.n <= most_columns &&
         p.m < kMost && p.k > 0 && p.k % 128 == 0 && p.k < kMost && p.words.along == 1 && p.scale_s.data == nullptr &&
         p.scale_b.data == nullptr && p.scale_out == nullptr;
}

}  // namespace

// ------------------------------------------------------------------------------------------- small_n_registers

namespace small_n_registers {
namespace {

constexpr std::array kTiles = {1, 2}, kBlocks = {1, 2};
constexpr std::array kWarps = {4, 8, 16};

int tiles_of(const Problem& p) { return static_cast<int>(ceil_div(p.n, 8)); }

KernelSpec spec(DType dtype, int tiles, int blocks) {
  return instance("small_n_registers", dtype, {tiles, blocks}, KernelSpec::kBySize);
}
std::vector<KernelSpec> list_kernels(const std::string& arch) {
  std::vector<KernelSpec> list;
  for (std::size_t n = 0; n < 8 && arch == "sm_90a"; ++n) {
    list.push_back(spec(kHalfTypes[n / 4], kTiles[n / 2 % 2], kBlocks[n % 2]));
  }
  return list;
}
const KernelList kKernels{"two_four", list_kernels};
constinit KernelTable<8> kernels;

/// Whether lines of `count` that are `bytes` apart begin with whole units of 16 bytes.
bool in_units(const void* data, std::int64_t count, std::int64_t bytes) {
  return is_aligned(data, 16) && (count == 1 || bytes % 16 == 0);
}

/// With up to 8 columns it won on all weights that were measured, up to 8192². With more, b, which every CTA reads,
/// takes as long as small weights: it won up to 2048².
bool fits(const Problem& p, const Machine& machine) {
  return is_half_linear(p, machine, 8 * kTiles.back()) && p.values.along == 1 &&
         in_units(p.values.data, p.m, 2 * p.values.line) && in_units(p.words.data, p.m, p.words.line * p.word_bytes) &&
         p.b.row == 1 && in_units(p.b.data, p.n, 2 * p.b.col) && p.m * p.k <= (tiles_of(p) == 1 ? 1 << 26 : 1 << 22);
}

/// As many warps as find room when all CTAs run at once, and no more than there are blocks of the depth.
Config preferred(const Problem& p, const Machine& machine) {
  const std::int64_t blocks = p.k / kDepth, each = ceil_div(ceil_div(p.m, kRows), machine.multiprocessors);
  const int most = tiles_of(p) == 1 ? 16 : 8, room = each == 1 ? most : each == 2 ? 8 : 4;
  const int warps = blocks <= 4 ? 4 : blocks <= 8 ? std::min(room, 8) : room;
  return {.family = &kSmallNRegisters, .warps = warps, .stages = blocks > warps * (tiles_of(p) == 1 ? 4 : 1) ? 2 : 1};
}

/// Fitted to 512² to 14336 × 4096 with 1 to 16 columns, bf16: 4.5 to 31 µs. The first megabytes take longer. How warps
/// share the depth changes less than the model sees, so that `preferred` decides and the others come behind it.
void list(const Problem& p, const Machine& machine, std::vector<Candidate>& list) {
  constexpr double kRate = 3.28e6, kFirstBytes = 0.6, kRampBytes = 3.5e6, kNotPreferred = 0.1;
  const Config best = preferred(p, machine);
  const double ramp = tiles_of(p) == 1 ? 0.25e-6 : 0.30e-6, each = tiles_of(p) == 1 ? 0.028 : 0.0625;  // of a block
  const cost::Work work{
      .memory = sparse_bytes(p) / kRate,
      .serial = kFirstBytes + ramp * std::min(sparse_bytes(p), kRampBytes) + each * static_cast<double>(p.k / kDepth)};
  for (const int warps : kWarps) {
    for (const int blocks : kBlocks) {
      const Config config{.family = &kSmallNRegisters, .warps = warps, .stages = blocks};
      if (warps <= most_warps(tiles_of(p), blocks)) {
        list.push_back({config, work.microseconds() + (config == best ? 0.0 : kNotPreferred)});
      }
    }
  }
}

void launch(const Problem& p, const Config& config, const Machine& /*machine*/, Context& context) {
  Params params{};
  params.values = p.values.data;
  params.words = p.words.data;
  params.b = p.b.data;
  params.bias = p.bias.data;
  params.c = p.c.data;
  params.values_line = 2 * p.values.line;
  params.words_line = p.words.line * p.word_bytes;
  params.b_col = 2 * p.b.col;
  params.c_row = p.c.row;
  params.c_col = p.c.col;
  params.bias_stride = p.bias.stride;
  params.m = static_cast<int>(p.m);
  params.n = static_cast<int>(p.n);
  params.blocks = static_cast<int>(p.k / kDepth);
  params.activation = static_cast<int>(p.activation);
  const int tiles = tiles_of(p);
  const std::size_t number = (place_in(kHalfTypes, p.dtype) * 2 + place_in(kTiles, tiles)) * 2;
  kernels
      .get(number + place_in(kBlocks, config.stages), context.device.index,
           [&] { return spec(p.dtype, tiles, config.stages); })
      .launch_behind(ceil_div(p.m, kRows), 32 * config.warps, shared_bytes(tiles, config.warps), &params,
                     context.stream);
}

}  // namespace
}  // namespace small_n_registers

const KernelFamily kSmallNRegisters{"small_n_registers", small_n_registers::fits, small_n_registers::list,
                                    small_n_registers::launch};

// ------------------------------------------------------------------------------------------------- small_n_tma

namespace small_n_tma {
namespace {

constexpr std::array kColumns = {16, 32, 64, 96, 128, 192};
constexpr std::array kGroups = {1, 2};
static_assert(stages(16, 1, 1) <= kMostStages && stages(128, 2, 1) > 3);
static_assert(sums_bytes(192, 2) <= stages(192, 2, 1) * stage_bytes(192, 2));
/// Wide tiles of few rows would fetch b too often.
constexpr bool has_kernel(int columns, int groups) { return groups == 2 || columns <= 128; }

KernelSpec spec(DType dtype, int columns, int groups) {
  return instance("small_n_tma", dtype, {columns, groups}, shared_bytes(columns, groups, stages(columns, groups, 1)));
}
std::vector<KernelSpec> list_kernels(const std::string& arch) {
  std::vector<KernelSpec> list;
  for (const DType dtype : kHalfTypes) {
    for (std::size_t n = 0; n < 2 * kColumns.size() && arch == "sm_90a"; ++n) {
      if (has_kernel(kColumns[n / 2], kGroups[n % 2])) {
        list.push_back(spec(dtype, kColumns[n / 2], kGroups[n % 2]));
      }
    }
  }
  return list;
}
const KernelList kKernels{"two_four", list_kernels};
constinit KernelTable<4 * kColumns.size()> kernels;

/// Warpgroups of a CTA, with 64 rows each.
int groups_of(const Config& config) { return config.rows / rows(1); }

const Kernel& kernel(const Problem& p, const Config& config, int device) {
  const std::size_t number = place_in(kHalfTypes, p.dtype) * kColumns.size() + place_in(kColumns, config.columns);
  return kernels.get(2 * number + place_in(kGroups, groups_of(config)), device,
                     [&] { return spec(p.dtype, config.columns, groups_of(config)); });
}

struct Views {
  std::optional<TiledView> values, words, b, c;
  explicit Views(const Problem& p)
      : values(make_tiled_view(p.values.data, {p.k / 2, p.m, 1, 1}, {p.values.along, p.values.line, 0, 0})),
        words(make_tiled_view(p.words.data, {p.k / 8, p.m, 1, 1}, {1, p.words.line * p.word_bytes, 0, 0}, 1)),
        b(make_tiled_view(p.b.data, {p.k, p.n, 1, 1}, {p.b.row, p.b.col, 0, 0})),
        c(make_tiled_view(p.c.data, {p.m, p.n, 1, 1}, {p.c.row, p.c.col, 0, 0})) {}
  bool all() const { return values && words && b && c; }
};

bool fits(const Problem& p, const Machine& machine) {
  constexpr std::int64_t kMostColumns = 4096;
  return is_half_linear(p, machine, kMostColumns) && p.m % rows(1) == 0 && Views(p).all();
}

std::int64_t tiles_of(const Problem& p, const Config& config) {
  return p.m / config.rows * ceil_div(p.n, config.columns);
}
/// Tiles share the columns evenly.
std::int64_t columns_of(const Problem& p, const Config& config) {
  return ceil_div(ceil_div(p.n, ceil_div(p.n, config.columns)), 8) * 8;
}
int ctas_of(const Config& config) { return config.stages == stages(config.columns, groups_of(config), 1) ? 1 : 2; }

/// Fitted to bench/results/h200/two_four_candidates.json and more such layers.
constexpr TileCost kCosts[] = {
    // rows, columns, start, step, tile, meet, each, memory, l2, wave, pair
    {64, 16, 0.02, 0.103, 1.76, 1.18, 0.00, 0.164, 0.0286, 1.61, 0.00},
    {64, 32, 0.09, 0.169, 1.59, 0.86, 0.00, 0.162, 0.0045, 0.63, 0.00},
    {64, 64, 0.00, 0.138, 2.13, 0.92, 0.02, 0.123, 0.0373, 0.00, 0.00},
    {64, 96, 0.00, 0.194, 2.26, 1.68, 0.00, 0.044, 0.0325, 0.13, 0.00},
    {64, 128, 0.55, 0.281, 1.72, 1.77, 0.00, 0.122, 0.0175, 0.53, 0.00},
    {128, 16, 0.00, 0.122, 2.08, 0.00, 0.10, 0.288, 0.0000, 0.05, 0.00},
    {128, 32, 0.37, 0.203, 2.03, 0.50, 0.06, 0.201, 0.0027, 0.00, 0.00},
    {128, 64, 0.38, 0.247, 2.43, 1.17, 0.08, 0.133, 0.0155, 0.60, 0.00},
    {128, 96, 0.04, 0.286, 2.64, 2.70, 0.12, 0.000, 0.0353, 0.15, 0.00},
    {128, 128, 0.27, 0.323, 2.77, 1.55, 0.41, 0.124, 0.0258, 0.45, 0.00},
    {128, 192, 0.03, 0.439, 3.42, 4.58, 0.12, 0.055, 0.0356, 0.43, 0.00},
};
double cost(const Problem& p, const Config& config, const Machine& machine) {
  const auto* const found = std::ranges::find_if(
      kCosts, [&](const TileCost& c) { return c.rows == config.rows && c.columns == config.columns; });
  return found->microseconds(p, config, machine, ctas_of(config));
}

/// All tiles whose depth is shared run at once. Two CTAs share an SM where each has a tile and there are more of these
/// than SMs; with fewer, the two of one SM would leave others idle.
void list_tiles(const Problem& p, const Machine& machine, int columns, int groups, std::vector<Candidate>& list) {
  constexpr std::int64_t kMostWaves = 4;
  Config config{.family = &kSmallNTma, .rows = rows(groups), .columns = columns, .stages = stages(columns, groups, 1)};
  const std::int64_t tiles = tiles_of(p, config);
  if (p.m % config.rows != 0 || tiles > kMostWaves * machine.multiprocessors) {
    return;
  }
  for (int split = 1; split <= kMostSplit; ++split) {
    config.split = split;
    if (split == 1 || (p.k / kDepth >= split && tiles <= machine.clusters(split))) {
      list.push_back({config, cost(p, config, machine)});
    }
  }
  config.split = 1;
  config.stages = stages(columns, groups, 2);
  if (groups == 1 && config.stages > 1 && tiles > machine.multiprocessors) {
    list.push_back({config, cost(p, config, machine)});
  }
}

void list(const Problem& p, const Machine& machine, std::vector<Candidate>& list) {
  std::int64_t last = 0;  // tiles side by side of the width before: one that has as many gains nothing
  for (const int columns : kColumns) {
    const std::int64_t side = ceil_div(p.n, columns);
    if (std::exchange(last, side) == side || (columns < 64 && side > 2)) {
      continue;
    }
    for (const int groups : kGroups) {
      if (has_kernel(columns, groups)) {
        list_tiles(p, machine, columns, groups, list);
      }
    }
  }
}

void share(Params& params, int steps, int units, int split) {
  params.split = split;
  params.slots = (units + split - 1) / split;
  for (int rank = 0; rank <= split; ++rank) {
    params.first_step[rank] = static_cast<int>(std::int64_t{rank} * steps / split);
    params.first_unit[rank] = rank * units / split;
  }
}

void launch(const Problem& p, const Config& config, const Machine& /*machine*/, Context& context) {
  const Views views(p);
  const int groups = groups_of(config);
  const auto tile = static_cast<std::uint32_t>(config.rows);
  const std::int64_t columns = columns_of(p, config);
  Params params{};
  params.values = views.values->map(kDepth / 2, tile);
  params.words = views.words->map(64, tile);
  params.b = views.b->map(64, static_cast<std::uint32_t>(columns));
  if (config.split == 1) {  // else threads write
    params.c = views.c->map(64, static_cast<std::uint32_t>(columns));
  }
  params.out = p.c.data;
  params.c_col = p.c.col;
  params.bias = p.bias.data;
  params.bias_stride = p.bias.stride;
  params.activation = static_cast<int>(p.activation);
  params.n = static_cast<int>(p.n);
  params.columns = static_cast<int>(columns);
  params.col_tiles = Divisor(ceil_div(p.n, config.columns));
  params.stages = config.stages;
  share(params, static_cast<int>(p.k / kDepth), units(config.columns, groups), config.split);
  kernel(p, config, context.device.index)
      .launch_clusters(tiles_of(p, config) * config.split, config.split, threads(groups),
                       shared_bytes(config.columns, groups, config.stages), &params, context.stream, true);
}

}  // namespace
}  // namespace small_n_tma

const KernelFamily kSmallNTma{"small_n_tma", small_n_tma::fits, small_n_tma::list, small_n_tma::launch};

// -------------------------------------------------------------------------------------------- small_n_cp_async

namespace small_n_cp_async {
namespace {

/// A type, the numbers of columns that it has a kernel for (as bits: a power of two each), and its size.
struct Operand {
  DType dtype;
  int columns;
  int bytes;
  /// Metadata of a run.
  int run_words() const { return bytes == 1 ? 4 : 2; }
};
constexpr Operand kOperands[] = {{DType::f16, 8 | 16 | 32 | 64, 2},
                                 {DType::bf16, 8 | 16 | 32 | 64, 2},
                                 {DType::i8, 16 | 64, 1},
                                 {DType::u8, 16 | 64, 1}};
constexpr int kLeastColumns = 8, kSizes = 4;  // 8, 16, 32, 64
constexpr int kMostSplit = 8;

KernelSpec spec(DType dtype, int columns) {
  return instance("small_n_cp_async", dtype, {columns}, KernelSpec::kBySize);
}
std::vector<KernelSpec> list_kernels(const std::string& /*arch*/) {
  std::vector<KernelSpec> list;
  for (const Operand& operand : kOperands) {
    for (int columns = kLeastColumns; columns <= kMostColumns; columns *= 2) {
      if ((operand.columns & columns) != 0) {
        list.push_back(spec(operand.dtype, columns));
      }
    }
  }
  return list;
}
const KernelList kKernels{"two_four", list_kernels};
constinit KernelTable<std::size(kOperands) * kSizes> kernels;

/// What a problem's kernel is made for, and blocks of its depth.
struct Tiling {
  const Operand& operand;
  int columns = kLeastColumns;
  std::int64_t blocks;

  explicit Tiling(const Problem& p)
      : operand(*std::ranges::find(kOperands, p.dtype, &Operand::dtype)),
        blocks(ceil_div(p.k * operand.bytes, std::int64_t{kBlockRuns} * kRunBytes)) {
    while (columns < p.n * p.batch || (operand.columns & columns) == 0) {
      columns *= 2;
    }
  }
  int stage_bytes(int log) const { return small_n_cp_async::stage_bytes(columns, log, operand.run_words()); }
  int sums_bytes(int log) const { return small_n_cp_async::sums_bytes(columns, log); }
  /// Stages that find room, 0 if too few do.
  int stages(int log, const Machine& machine) const {
    const int room = machine.shared_bytes / stage_bytes(log);
    return room < 2 || sums_bytes(log) > machine.shared_bytes ? 0 : std::min(room, kMostStages);
  }
};
int log_rows(const Config& config) { return std::countr_zero(static_cast<unsigned>(config.rows / kRows)); }

const Kernel& kernel(const Tiling& tiling, int device) {
  const auto size = static_cast<std::size_t>(std::countr_zero(static_cast<unsigned>(tiling.columns / kLeastColumns)));
  const auto operand = static_cast<std::size_t>(&tiling.operand - kOperands);
  return kernels.get(operand * kSizes + size, device, [&] { return spec(tiling.operand.dtype, tiling.columns); });
}

/// Steps of `stride` keep what `count` of them start from a multiple of.
bool keeps(std::int64_t count, std::int64_t stride, std::int64_t multiple) {
  return count == 1 || stride % multiple == 0;
}

bool has_result(const Problem& p) {
  if (!is_integer(p.dtype)) {
    return (p.out == p.dtype || p.out == DType::f32) && p.scale_out == nullptr;
  }
  return p.out == DType::i32 ? p.is_plain() : p.out != DType::f32 || p.scale_out == nullptr;
}

/// Values in 16 bytes, the metadata of these at once, and types and numbers that the kernel knows.
bool fits(const Problem& p, const Machine& machine) {
  if (machine.arch < 80 || std::ranges::find(kOperands, p.dtype, &Operand::dtype) == std::end(kOperands)) {
    return false;
  }
  const int bytes = static_cast<int>(size_of(p.dtype)), run = kRunBytes / bytes;
  const bool sizes = p.n <= kMostColumns && p.batch <= kMostColumns && p.n * p.batch <= kMostColumns && p.m <= kMost &&
                     p.k <= kMost && p.k > 0 && p.k % run == 0;
  return has_result(p) && sizes && Tiling(p).stages(kLogWarps, machine) > 0 && p.values.along == 1 &&
         is_aligned(p.values.data, 16) && keeps(p.m, p.values.line * bytes, 16) &&
         (p.words.along == 1 || p.k <= 8 * p.word_bytes) && is_aligned(p.words.data, run / 8) &&
         keeps(p.m, p.words.line * p.word_bytes, run / 8);
}

/// Memory gives the sparse operand, L2 that and b, to all CTAs that run at once; a multiprocessor has its own ports to
/// both and to its shared memory, and its tensor cores. The proportions of the rates took the best of all
/// configurations of 4096² with 1 to 32 columns, or one within 2%; their scale is that of 512² to 8192² with 1 to 16. A
/// wave is as long as a full one.
double cost(const Problem& p, const Tiling& tiling, const Config& config, const Machine& machine) {
  constexpr double kMemory = 2.76e6, kL2 = 3.84e6, kPort = 28.8e3, kShared = 153.6e3, kRemote = 38.4e3;
  constexpr double kColumn = 22.0 / 1200, kStage = 1.0 / 3, kStart = 5.0 / 3, kMeet = 0.5, kMeetEach = 0.125;
  constexpr double kManyColumns = 1.25, kGather = 2.0;
  const int columns = tiling.columns, log = log_rows(config), parts = parts_of(log);
  const std::int64_t resident = std::int64_t{config.split} * machine.clusters(config.split);
  const std::int64_t ctas = ceil_div(p.m, config.rows) * config.split;
  const std::int64_t waves = ceil_div(ctas, resident);
  const auto stages = static_cast<double>(ceil_div(ceil_div(tiling.blocks, parts), config.split));  // of a CTA
  const double fetched = stages * static_cast<double>(waves * std::min(ctas, resident));
  const double sparse = kWarps * (kValueBytes + kRows * kBlockRuns * tiling.operand.run_words());
  const double b = double(parts) * kBlockRuns * kRunBytes * double(p.n * p.batch);
  const double shared = 2 * sparse + b + double(kWarps) * kBlockRuns * kRunBytes * columns;
  const double sums = tiling.sums_bytes(log);
  const double meet = config.split > 1 ? kMeet + kMeetEach * config.split + sums / kRemote : sums / kShared;
  const double slower = p.b.row != 1 ? kGather : p.n * p.batch > 32 ? kManyColumns : 1.0;
  const double stage = std::max((sparse + b) / kPort, std::max(shared / kShared, kColumn * columns) + kStage);
  const cost::Work work{.memory = slower * fetched * sparse / kMemory,
                        .l2 = slower * fetched * (sparse + b) / kL2,
                        .busiest = slower * static_cast<double>(waves) * stages * stage,
                        .serial = slower * (static_cast<double>(waves) * kStart + meet)};
  return work.microseconds();
}

void list(const Problem& p, const Machine& machine, std::vector<Candidate>& list) {
  const Tiling tiling(p);
  std::array<int, kLogWarps + 1> stages{};
  for (int log = 0; log <= kLogWarps; ++log) {
    stages[static_cast<std::size_t>(log)] = tiling.stages(log, machine);
  }
  for (int split = 1; split <= (machine.arch >= 90 ? kMostSplit : 1); ++split) {
    for (int log = 0; log <= kLogWarps; ++log) {
      const Config config{.family = &kSmallNCpAsync,
                          .rows = kRows << log,
                          .split = split,
                          .stages = stages[static_cast<std::size_t>(log)]};
      if (config.stages > 0 && (split == 1 || ceil_div(tiling.blocks, parts_of(log)) >= split)) {
        list.push_back({config, cost(p, tiling, config, machine)});
      }
    }
  }
}

/// Bytes from column to column of b, over all batches, if it lies along k in words of four bytes; else 0.
std::int64_t wide_step(const Problem& p, int bytes) {
  const std::int64_t step = (p.n == 1 ? p.b.batch : p.b.col) * bytes;
  const bool one = p.n * p.batch == 1, even = p.n == 1 || p.batch == 1 || p.b.batch == p.n * p.b.col;
  const bool wide = p.b.row == 1 && is_aligned(p.b.data, 4) && even && (one || (step % 4 == 0 && step != 0));
  return !wide ? 0 : one ? 4 : step;
}

Params fill(const Problem& p, const Config& config) {
  const int bytes = static_cast<int>(size_of(p.dtype));
  Params params{};
  params.values = p.values.data;
  params.words = p.words.data;
  params.b = p.b.data;
  params.bias = p.bias.data;
  params.scale_s = static_cast<const float*>(p.scale_s.data);
  params.scale_b = static_cast<const float*>(p.scale_b.data);
  params.c = p.c.data;
  params.values_line = p.values.line * bytes;
  params.words_line = p.words.line * p.word_bytes;
  params.b_row = p.b.row * bytes;
  params.b_col = p.b.col * bytes;
  params.b_batch = p.b.batch * bytes;
  params.c_row = p.c.row;
  params.c_col = p.c.col;
  params.c_batch = p.c.batch;
  params.bias_stride = p.bias.stride;
  params.scale_s_stride = p.scale_s.stride;
  params.scale_b_stride = p.scale_b.stride;
  params.m = static_cast<int>(p.m);
  params.n = static_cast<int>(p.n);
  params.columns = static_cast<int>(p.n * p.batch);
  params.runs = static_cast<int>(p.k * bytes / kRunBytes);
  params.log_rows = log_rows(config);
  params.split = config.split;
  params.stages = config.stages;
  params.activation = static_cast<int>(p.activation);
  for (params.words_step = 16; params.words_step > 2; params.words_step /= 4) {
    if (is_aligned(p.words.data, params.words_step) && keeps(p.m, params.words_line, params.words_step)) {
      break;
    }
  }
  params.b_wide = wide_step(p, bytes);
  params.c_rows = p.n == 1 || std::llabs(p.c.row) <= std::llabs(p.c.col);
  params.c_wide = p.c.row == 1 && is_aligned(p.c.data, 4 * size_of(p.out)) && keeps(p.n, p.c.col, 4) &&
                  keeps(p.batch, p.c.batch, 4);
  params.scale_out = p.scale_out;
  params.out = out_type(p.out);
  params.bias_type = out_type(p.bias_dtype());
  return params;
}

void launch(const Problem& p, const Config& config, const Machine& machine, Context& context) {
  const Tiling tiling(p);
  const int log = log_rows(config), shared = std::max(config.stages * tiling.stage_bytes(log), tiling.sums_bytes(log));
  const Params params = fill(p, config);
  kernel(tiling, context.device.index)
      .launch_clusters(ceil_div(p.m, config.rows) * config.split, config.split, kThreads, shared, &params,
                       context.stream, machine.arch >= 90);
}

}  // namespace
}  // namespace small_n_cp_async

const KernelFamily kSmallNCpAsync{"small_n_cp_async", small_n_cp_async::fits, small_n_cp_async::list,
                                  small_n_cp_async::launch};

}  // namespace fretwork::two_four
