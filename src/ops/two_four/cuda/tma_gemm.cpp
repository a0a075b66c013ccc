// Host side of the wgmma.sp kernel, tma_gemm: which problems fit, its configurations and their cost, tensor maps,
// launch.
#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "core/divide.h"
#include "ops/two_four/choose.h"
#include "ops/two_four/cuda/operands.h"
#include "runtime/alignment.h"
#include "runtime/cuda_driver.h"
#include "runtime/kernels.h"
#include "runtime/tensor_map.h"

namespace fretwork::two_four {
namespace tma_gemm {
namespace {

constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max() / 2;
constexpr std::array kTypes = {DType::f16,     DType::bf16,    DType::i8, DType::u8,
                               DType::f8_e4m3, DType::f8_e5m2, DType::f32};
constexpr std::array kWidths = {256, 224, 192, 160, 128, 96, 64};
constexpr int kShare = 16;  // tiles of rows that go through the columns together
static_assert(std::ranges::all_of(kWidths, [](int width) { return shared_bytes(width) + 256 <= 227 << 10; }));

int narrowed(std::int64_t value) { return static_cast<int>(value); }
int bytes_of(DType dtype) { return static_cast<int>(size_of(dtype)); }
std::int64_t groups_of(const Problem& p) { return p.k / group(p.dtype); }

// ------------------------------------------------------------------------------------------------------ kernels

KernelSpec spec(DType dtype, bool b_along_k, int width, bool pair) {
  return {"ops/two_four/cuda/tma_gemm.cuh",
          std::string("fretwork::two_four::tma_gemm::product<") + device_type(dtype) + ", " + std::to_string(width) +
              (b_along_k ? ", true" : ", false") + (pair ? ", true>" : ", false>"),
          shared_bytes(width)};
}
/// Pairs gain in wide tiles, where many CTAs read the same columns of b.
bool can_pair(DType dtype, bool b_along_k, int width) {
  return size_of(dtype) == 2 && (width == 256 || (b_along_k && width == 224));
}
/// b along n, pairs, and widths for linear layers only of 16-bit types: wgmma reads others along k, and they gain
/// nothing from pairs.
std::vector<KernelSpec> list_kernels(const std::string& arch) {
  std::vector<KernelSpec> list;
  for (std::size_t n = 0; n < 2 * kTypes.size() && arch == "sm_90a"; ++n) {
    const DType dtype = kTypes[n / 2];
    const bool along_k = n % 2 == 0;
    if (along_k || size_of(dtype) == 2) {
      for (const int width : kWidths) {
        if (!for_linear(width) || (along_k && size_of(dtype) == 2)) {
          list.push_back(spec(dtype, along_k, width, false));
        }
      }
    }
    for (const int width : kWidths) {
      if (can_pair(dtype, along_k, width)) {
        list.push_back(spec(dtype, along_k, width, true));
      }
    }
  }
  return list;
}
const KernelList kKernels{"two_four", list_kernels};
constexpr std::size_t kSizes = 2 * kWidths.size();  // of tiles, and of pairs of them
constinit KernelTable<2 * kTypes.size() * kSizes> kernels;

const Kernel& kernel(DType dtype, bool b_along_k, const Config& config, int device) {
  const auto type = static_cast<std::size_t>(std::ranges::find(kTypes, dtype) - kTypes.begin());
  const auto width = static_cast<std::size_t>(std::ranges::find(kWidths, config.columns) - kWidths.begin());
  return kernels.get((type * kSizes + (config.pair > 1 ? kWidths.size() : 0) + width) * 2 + (b_along_k ? 1 : 0), device,
                     [&] { return spec(dtype, b_along_k, config.columns, config.pair > 1); });
}

// ------------------------------------------------------------------------------------------------------- views

LinesArg values_arg(const Problem& p) { return {p.values.data, p.values.line, p.values.along, 0}; }
LinesArg b_arg(const Problem& p) { return {p.b.data, p.b.col, p.b.row, p.b.batch}; }

std::int64_t batches_of_b(const Problem& p) { return p.b.batch != 0 ? p.batch : 1; }

std::optional<TiledView> values_view(const Problem& p, const LinesArg& values) {
  return make_tiled_view(values.data, {p.k / 2, p.m, 1, 1}, {values.along, values.line, 0, 0}, bytes_of(p.dtype));
}
std::optional<TiledView> words_view(const Problem& p) {
  const std::int64_t bytes = ceil_div(groups_of(p), 2), along = bytes <= p.word_bytes ? 1 : p.words.along;
  return make_tiled_view(p.words.data, {bytes, p.m, 1, 1}, {along, p.words.line * p.word_bytes, 0, 0}, 1);
}
std::optional<TiledView> along_k_view(const Problem& p, const LinesArg& b) {
  return make_tiled_view(b.data, {p.k, p.n, batches_of_b(p), 1}, {b.along, b.line, b.batch, 0}, bytes_of(p.dtype));
}
std::optional<TiledView> along_n_view(const Problem& p) {
  return make_tiled_view(p.b.data, {p.n, p.k, batches_of_b(p), 1}, {p.b.col, p.b.row, p.b.batch, 0}, bytes_of(p.dtype));
}

/// The result as the copy engine writes it, if it can.
std::optional<TiledView> result_view(const Problem& p, bool transposed) {
  const int bytes = bytes_of(p.out);
  const auto view = transposed
                        ? make_tiled_view(p.c.data, {p.m, p.n, p.batch, 1}, {p.c.row, p.c.col, p.c.batch, 0}, bytes)
                        : make_tiled_view(p.c.data, {p.n, p.m, p.batch, 1}, {p.c.col, p.c.row, p.c.batch, 0}, bytes);
  return view && view->can_be_written() ? view : std::nullopt;
}

/// Whether results of this type leave as others do, not converted by threads on their way.
bool leaves_as_is(const Problem& p) {
  const bool half = p.out == DType::f16 || p.out == DType::bf16;
  return p.out == DType::f32 || p.out == DType::i32 || (half && (size_of(p.dtype) == 1 || p.dtype == p.out));
}

/// Whether a thread can make the result of its sums.
bool can_finish(const Problem& p) {
  if (p.out == DType::i32) {
    return p.is_plain();
  }
  const bool exact = p.out == DType::f32;  // these activations are as good as narrower results need
  return !exact || (p.activation != Activation::gelu && p.activation != Activation::silu);
}

/// Steps of the depth, 128 bytes of b each.
std::int64_t steps_of(const Problem& p) { return ceil_div(p.k, 128 / bytes_of(p.dtype)); }
std::int64_t tiles_of(const Problem& p, int width) { return ceil_div(p.m, kRows) * ceil_div(p.n, width) * p.batch; }

/// wgmma takes other than 16-bit types along k only, and drops bits that tf32 does not have instead of rounding: such
/// operands are copied.
bool copies_values(const Problem& p) { return p.dtype == DType::f32; }
bool copies_b(const Problem& p) {
  return p.dtype == DType::f32 || (size_of(p.dtype) == 1 && !along_k_view(p, b_arg(p)));
}

/// Whether widths for linear layers do.
bool is_linear(const Problem& p) {
  return size_of(p.dtype) == 2 && p.out == p.dtype && p.c.row == 1 && p.c.col != 1 && along_k_view(p, b_arg(p)) &&
         result_view(p, true);
}

// --------------------------------------------------------------------------------------------------------- cost

/// Fitted to bench/results/h200/two_four_candidates.json and more such layers.
constexpr TileCost kCosts[] = {
    // rows, columns, start, step, tile, meet, each, memory, l2, wave, pair
    {128, 64, 2.62, 0.359, 0.65, 1.08, 0.62, 0.122, 0.0183, 0.10, 0.00},
    {128, 96, 2.48, 0.414, 0.56, 1.42, 0.85, 0.142, 0.0158, 0.00, 0.00},
    {128, 128, 2.37, 0.419, 0.98, 1.10, 0.98, 0.156, 0.0184, 0.02, 0.01},
    {128, 160, 2.07, 0.440, 1.36, 3.05, 1.00, 0.206, 0.0169, 0.01, 0.00},
    {128, 192, 2.37, 0.482, 1.10, 1.94, 1.11, 0.253, 0.0225, 0.00, 0.03},
    {128, 224, 2.16, 0.575, 1.52, 0.01, 5.12, 0.269, 0.0181, 0.01, 0.00},
    {128, 256, 6.00, 0.724, 1.13, 1.48, 0.71, 0.212, 0.0083, 0.00, 2.03},
};
/// Pairs were fitted where few columns of b are read by many CTAs. They gain up to 7% where CTAs have several tiles, of
/// two tiles of columns or with b along n, and mostly lose as much elsewhere: the gain is a tie-break, which does not
/// decide about the width.
double cost(const Problem& p, const Config& config, const Machine& machine) {
  constexpr double kPairGain = 0.999, kPairLoss = 1.06;
  constexpr std::int64_t kFewTiles = 3;
  const TileCost& tile = *std::ranges::find(kCosts, config.columns, &TileCost::columns);
  if (config.pair == 1) {
    return tile.microseconds(p, config, machine);
  }
  Config alone = config;
  alone.pair = 1;
  const bool along_k = p.b.row == 1 && p.batch == 1;
  const std::int64_t side = ceil_div(p.n, config.columns);
  const bool gains = (!along_k || side == 2) && tiles_of(p, config.columns) > machine.multiprocessors;
  const double cost = tile.microseconds(p, alone, machine) * (gains ? kPairGain : kPairLoss);
  return along_k && side <= kFewTiles ? std::min(cost, tile.microseconds(p, config, machine)) : cost;
}

/// µs of the copies before the product: each is a launch, and reads and writes an operand (fp32, 1024² with 64 columns
/// and 4096² with 512).
double copies_us(const Problem& p) {
  constexpr double kCopy = 9.0;
  const double size = bytes_of(p.dtype), k = static_cast<double>(p.k);
  const double values = static_cast<double>(p.m) * k / 2 * size;
  const double b = static_cast<double>(p.n * batches_of_b(p)) * k * size;
  return (copies_values(p) ? kCopy + 2 * values / cost::kMemory : 0) +
         (copies_b(p) ? kCopy + 2 * b / cost::kMemory : 0);
}

/// A cluster that splits the depth has one tile; every part of the depth has some chunks of metadata.
void list(const Problem& p, const Machine& machine, std::vector<Candidate>& list) {
  const bool linear = is_linear(p);
  const double copies = copies_us(p);
  for (const int width : kWidths) {
    for (int split = 1; split <= kMostSplit && (linear || !for_linear(width)); ++split) {
      const bool splits = steps_of(p) >= 8 * split && can_split(width, split);
      if (split == 1 || (splits && tiles_of(p, width) <= machine.clusters(split))) {
        const Config config{.family = &kTmaGemm, .columns = width, .split = split};
        list.push_back({config, cost(p, config, machine) + copies});
      }
    }
    if (can_pair(p.dtype, p.b.row == 1, width) && (linear || !for_linear(width))) {
      const Config config{.family = &kTmaGemm, .columns = width, .pair = 2};
      list.push_back({config, cost(p, config, machine) + copies});
    }
  }
}

// ------------------------------------------------------------------------------------------------------- launch

/// The operands as the copy engine reads them.
class Operands {
 public:
  /// Whether there is a way to read them.
  static bool suit(const Problem& p) {
    const bool b = copies_b(p) || along_k_view(p, b_arg(p)) || along_n_view(p);
    return b && words_view(p) && (p.dtype == DType::f32 || values_view(p, values_arg(p)));
  }
  Operands(const Problem& p, Context& context)
      : values_(copies_values(p) ? Copy::tf32 : Copy::none, values_arg(p), p.m, p.k / 2, 1, context),
        b_(!copies_b(p)            ? Copy::none
           : p.dtype == DType::f32 ? Copy::tf32
                                   : Copy::bytes,
           b_arg(p), p.n, p.k, p.batch, context),
        along_k_(along_k_view(p, b_.arg()).has_value()) {}

  /// Whether b is read along k, not n.
  bool along_k() const { return along_k_; }
  void map(const Problem& p, const Config& config, Params& params) const {
    const auto line = static_cast<std::uint32_t>(128 / bytes_of(p.dtype));
    params.values = values_view(p, values_.arg())->map(line / 2, kRows);
    params.words = words_view(p)->map(kChunkRow, kRows);
    params.b = along_k_ ? along_k_view(p, b_.arg())->map(line, static_cast<std::uint32_t>(config.columns / config.pair))
                        : along_n_view(p)->map(line, line);
  }

 private:
  Lines values_, b_;
  bool along_k_;
};

/// Whether four neighbours in c, from a multiple of four on, can be written at once.
bool can_store_four(const Problem& p, bool transposed) {
  const std::int64_t near = transposed ? p.c.row : p.c.col, far = transposed ? p.c.col : p.c.row;
  return near == 1 && far % 4 == 0 && (p.batch == 1 || p.c.batch % 4 == 0) && is_aligned(p.c.data, 4 * size_of(p.out));
}

/// Where results go and what is done to them.
void set_result(const Problem& p, const Config& config, Params& params) {
  const bool transposed = p.c.row == 1 && p.c.col != 1;
  const auto unit = static_cast<std::uint32_t>(128 / bytes_of(p.out));
  const auto result = leaves_as_is(p) ? result_view(p, transposed) : std::nullopt;
  if (result) {
    params.c = result->map(unit, !transposed ? 64 : for_linear(config.columns) ? box_columns(config.columns) : unit);
  }
  params.direct = result ? 0 : 1;
  params.transposed = transposed ? 1 : 0;
  params.out = p.c.data;
  params.c_row = p.c.row;
  params.c_col = p.c.col;
  params.c_batch = p.c.batch;
  params.bias = p.bias.data;
  params.bias_stride = p.bias.stride;
  params.scale_s = static_cast<const float*>(p.scale_s.data);
  params.scale_s_stride = p.scale_s.stride;
  params.scale_b = static_cast<const float*>(p.scale_b.data);
  params.scale_b_stride = p.scale_b.stride;
  params.scale_out = p.scale_out;
  params.out_type = out_type(p.out);
  params.bias_type = out_type(p.bias_dtype());
  params.convert = leaves_as_is(p) ? 0 : 1;
  params.wide = can_store_four(p, transposed) ? 1 : 0;
  params.activation = static_cast<int>(p.activation);
  params.plain = p.is_plain() ? 1 : 0;
}

/// How many tiles there are, and in which order CTAs take them.
void set_tiles(const Problem& p, const Config& config, Params& params) {
  const std::int64_t row_tiles = ceil_div(p.m, kRows * config.pair), col_tiles = ceil_div(p.n, config.columns);
  const std::int64_t share = std::min<std::int64_t>(kShare / config.pair, row_tiles), tail = row_tiles % share;
  params.m = narrowed(p.m);
  params.n = narrowed(p.n);
  params.groups = narrowed(groups_of(p));
  params.total = narrowed(row_tiles * p.batch * col_tiles);
  params.tiles = Divisor(row_tiles * col_tiles);
  params.set = Divisor(share * col_tiles);
  params.share = Divisor(share);
  params.tail = Divisor(tail != 0 ? tail : share);
  params.b_batch = p.b.batch != 0 ? 1 : 0;
  params.split = config.split;
  const std::int64_t steps = steps_of(p), chunk = steps_of_chunk(bytes_of(p.dtype));
  for (int part = 0; part <= config.split; ++part) {
    params.first_step[part] = narrowed(std::min(part * ceil_div(steps, chunk) / config.split * chunk, steps));
  }
}

bool fits(const Problem& p, const Machine& machine) {
  const bool sizes = p.k > 0 && p.m < kMost && p.n < kMost && p.k < kMost && p.batch < kMost &&
                     ceil_div(p.m, kRows) * ceil_div(p.n, kWidths.back()) < kMost / p.batch;
  const bool type = std::ranges::find(kTypes, p.dtype) != kTypes.end() &&
                    (p.dtype != DType::f32 || machine.precision == Precision::tf32);
  return machine.hopper && sizes && type && can_finish(p) && Operands::suit(p);
}

void launch(const Problem& p, const Config& config, const Machine& machine, Context& context) {
  const Operands operands(p, context);
  Params params{};
  operands.map(p, config, params);
  set_result(p, config, params);
  set_tiles(p, config, params);
  const int cluster = config.split * config.pair, rooms = machine.multiprocessors / cluster;
  const int clusters = config.split > 1 ? params.total : std::min(params.total, rooms);
  kernel(p.dtype, operands.along_k(), config, context.device.index)
      .launch_clusters(clusters * cluster, cluster, kThreads, shared_bytes(config.columns), &params, context.stream);
}

}  // namespace
}  // namespace tma_gemm

const KernelFamily kTmaGemm{"tma_gemm", tma_gemm::fits, tma_gemm::list, tma_gemm::launch};

}  // namespace fretwork::two_four
