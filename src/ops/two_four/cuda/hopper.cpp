// Host side of the wgmma.sp kernel: which problems fit, its configuration, tensor maps, launch.
#include "ops/two_four/cuda/hopper.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "core/divide.h"
#include "ops/two_four/cuda/lines.h"
#include "ops/two_four/cuda/params_hopper.cuh"
#include "runtime/alignment.h"
#include "runtime/cuda_driver.h"
#include "runtime/kernels.h"
#include "runtime/tensor_map.h"

namespace fretwork::two_four::hopper {
namespace {

namespace driver = fretwork::cuda;

constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max() / 2;
constexpr std::array kTypes = {DType::f16,     DType::bf16,    DType::i8, DType::u8,
                               DType::f8_e4m3, DType::f8_e5m2, DType::f32};
constexpr std::array kWidths = {256, 128, 64};
constexpr std::array kSplits = {1, 2, 3, 4};
static_assert(kSplits.back() == kMostSplit);
constexpr int kShare = 16;  // tiles of rows that go through the columns together
static_assert(std::ranges::all_of(kWidths, [](int width) { return shared_bytes(width) + 256 <= 227 << 10; }));

int narrowed(std::int64_t value) { return static_cast<int>(value); }
int bytes_of(DType dtype) { return static_cast<int>(size_of(dtype)); }
std::int64_t groups_of(const Problem& p) { return p.k / (p.dtype == DType::f32 ? 2 : 4); }

// ------------------------------------------------------------------------------------------------ which kernel

std::vector<KernelSpec> list_kernels(const std::string& arch) {
  std::vector<KernelSpec> list;
  if (arch != "sm_90a") {
    return list;
  }
  for (const DType dtype : kTypes) {
    for (const int width : kWidths) {
      list.push_back(instance(dtype, true, width));
      if (size_of(dtype) == 2) {
        list.push_back(instance(dtype, false, width));
      }
    }
    if (size_of(dtype) == 2) {  // others have no gain from pairs
      list.push_back(instance(dtype, true, 256, 2));
      list.push_back(instance(dtype, false, 256, 2));
    }
  }
  return list;
}
const KernelList kKernels{"two_four", list_kernels};

constexpr std::size_t kSizes = kWidths.size() + 1;  // of tiles, and the widest in pairs
constinit KernelTable<2 * kTypes.size() * kSizes> kernels;

const Kernel& kernel(DType dtype, bool b_along_k, int width, int pair, int device) {
  const auto type = static_cast<std::size_t>(std::ranges::find(kTypes, dtype) - kTypes.begin());
  const auto which = static_cast<std::size_t>(std::ranges::find(kWidths, width) - kWidths.begin());
  return kernels.get((type * kSizes + (pair > 1 ? kWidths.size() : which)) * 2 + (b_along_k ? 1 : 0), device,
                     [&] { return instance(dtype, b_along_k, width, pair); });
}

// ------------------------------------------------------------------------------------------------------- views

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

/// Every part of the depth has some chunks of metadata, and there is room for the sums of all.
bool can_split(const Problem& p, int width, int split) {
  return split == 1 || (steps_of(p) >= 8 * split && (split == 2 || width < 256));
}

bool suits(const Problem& p, const Choice& choice, const Context& context) {
  const bool choosable = std::ranges::find(kWidths, choice.width) != kWidths.end() &&
                         can_split(p, choice.width, choice.split) &&
                         (choice.pair == 1 || (choice.pair == 2 && choice.width == 256 && choice.split == 1));
  const bool sizes = p.k > 0 && p.m < kMost && p.n < kMost && p.k < kMost && p.batch < kMost &&
                     ceil_div(p.m, kRows) * ceil_div(p.n, kWidths.back()) < kMost / p.batch;
  const bool type = std::ranges::find(kTypes, p.dtype) != kTypes.end() &&
                    (p.dtype != DType::f32 || context.precision == Precision::tf32);
  return choosable && sizes && type && driver::kernel_arch(context.device.index) == "sm_90a";
}

}  // namespace

KernelSpec instance(DType dtype, bool b_along_k, int width, int pair) {
  return {"ops/two_four/cuda/hopper.cuh",
          std::string("fretwork::two_four::hopper::product<") + device_type(dtype) + ", " + std::to_string(width) +
              (b_along_k ? ", true" : ", false") + (pair > 1 ? ", true>" : ", false>"),
          shared_bytes(width)};
}

std::string Choice::text() const {
  return std::to_string(width) + " wide, split " + std::to_string(split) + ", pair " + std::to_string(pair);
}

/// The unit of time is a step of 256 columns, 0.43 μs. The other numbers were read off products of 1024³ to 8192³; a
/// step of 64 columns and what four parts cost are reckoned.
Choice choose(const Problem& p, int multiprocessors, const std::function<int(int width, int size)>& clusters) {
  struct Candidate {
    double cost;
    Choice choice;
  };
  std::array<Candidate, kWidths.size() * kSplits.size()> all;
  std::size_t count = 0;
  for (const int width : kWidths) {
    for (const int split : kSplits) {
      const std::int64_t units = tiles_of(p, width) * split;
      if (!can_split(p, width, split) || (split > 1 && units > multiprocessors)) {
        continue;
      }
      const double step = width == 256 ? 1.0 : width == 128 ? 0.7 : 0.45;
      const double around = width / 51.2 + (split > 1 ? 2.5 * split : 0.0);
      const double each = double(ceil_div(steps_of(p), split)) * step + around;
      all[count++] = {double(ceil_div(units, multiprocessors)) * each, {.width = width, .split = split}};
    }
  }
  // A cluster has one tile, and all must run at once; only the kernels of the best are asked whether they do.
  const auto cheaper = [](const Candidate& x, const Candidate& y) { return x.cost < y.cost; };
  const auto end = all.begin() + count;
  auto found = std::min_element(all.begin(), end, cheaper);
  while (found->choice.split > 1 &&
         tiles_of(p, found->choice.width) > clusters(found->choice.width, found->choice.split)) {
    found->cost = std::numeric_limits<double>::max();
    found = std::min_element(all.begin(), end, cheaper);
  }
  Choice best = found->choice;
  // Pairs gain up to 6% where CTAs have several tiles and b is contiguous along n, or has but two tiles of columns;
  // mostly they lose as much elsewhere.
  const bool gains = size_of(p.dtype) == 2 && (p.b.row != 1 || (p.batch == 1 && ceil_div(p.n, 256) == 2));
  if (gains && best.width == 256 && best.split == 1 && tiles_of(p, 256) > multiprocessors) {
    best.pair = 2;
  }
  return best;
}

Choice choose(const Problem& p, int device) {
  return choose(p, driver::device_info(device).multiprocessors, [&](int width, int size) {
    const bool along_k = size_of(p.dtype) != 2 || p.b.row == 1;
    return kernel(p.dtype, along_k, width, 1, device).resident_clusters(size, kThreads, shared_bytes(width));
  });
}

namespace {

LinesArg values_arg(const Problem& p) { return {p.values.data, p.values.line, p.values.along, 0}; }
LinesArg b_arg(const Problem& p) { return {p.b.data, p.b.col, p.b.row, p.b.batch}; }

/// The operands as the copy engine reads them. wgmma takes other than 16-bit types along k only, and drops bits that
/// tf32 does not have instead of rounding: such operands are copied.
class Operands {
 public:
  /// Whether there is a way to read them.
  static bool suit(const Problem& p) {
    const bool b = turns(p) || along_k_view(p, b_arg(p)) || along_n_view(p);
    return b && words_view(p) && (p.dtype == DType::f32 || values_view(p, values_arg(p)));
  }
  Operands(const Problem& p, Context& context)
      : values_(p.dtype == DType::f32 ? Copy::tf32 : Copy::none, values_arg(p), p.m, p.k / 2, 1, context),
        b_(!turns(p)               ? Copy::none
           : p.dtype == DType::f32 ? Copy::tf32
                                   : Copy::bytes,
           b_arg(p), p.n, p.k, p.batch, context),
        along_k_(along_k_view(p, b_.arg()).has_value()) {}

  /// Whether b is read along k, not n.
  bool along_k() const { return along_k_; }
  void map(const Problem& p, const Choice& choice, Params& params) const {
    const auto line = static_cast<std::uint32_t>(128 / bytes_of(p.dtype));
    params.values = values_view(p, values_.arg())->map(line / 2, kRows);
    params.words = words_view(p)->map(kChunkRow, kRows);
    params.b = along_k_ ? along_k_view(p, b_.arg())->map(line, static_cast<std::uint32_t>(choice.width / choice.pair))
                        : along_n_view(p)->map(line, line);
  }

 private:
  static bool turns(const Problem& p) {
    return p.dtype == DType::f32 || (size_of(p.dtype) == 1 && !along_k_view(p, b_arg(p)));
  }
  Lines values_, b_;
  bool along_k_;
};

/// Whether four neighbours in c, from a multiple of four on, can be written at once.
bool can_store_four(const Problem& p, bool transposed) {
  const std::int64_t near = transposed ? p.c.row : p.c.col, far = transposed ? p.c.col : p.c.row;
  return near == 1 && far % 4 == 0 && (p.batch == 1 || p.c.batch % 4 == 0) && is_aligned(p.c.data, 4 * size_of(p.out));
}

/// Where results go and what is done to them.
void set_result(const Problem& p, Params& params) {
  const bool transposed = p.c.row == 1 && p.c.col != 1;
  const auto unit = static_cast<std::uint32_t>(128 / bytes_of(p.out));
  const auto result = leaves_as_is(p) ? result_view(p, transposed) : std::nullopt;
  if (result) {
    params.c = result->map(unit, transposed ? unit : 64);
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

/// How many tiles there are, and who has which.
void set_tiles(const Problem& p, const Choice& choice, Params& params) {
  const std::int64_t row_tiles = ceil_div(p.m, kRows * choice.pair), col_tiles = ceil_div(p.n, choice.width);
  const std::int64_t share = std::min<std::int64_t>(kShare / choice.pair, row_tiles), tail = row_tiles % share;
  params.m = narrowed(p.m);
  params.n = narrowed(p.n);
  params.groups = narrowed(groups_of(p));
  params.total = narrowed(row_tiles * p.batch * col_tiles);
  params.tiles = Divisor(row_tiles * col_tiles);
  params.set = Divisor(share * col_tiles);
  params.share = Divisor(share);
  params.tail = Divisor(tail != 0 ? tail : share);
  params.b_batch = p.b.batch != 0 ? 1 : 0;
  params.split = choice.split;
  const std::int64_t steps = steps_of(p), chunk = steps_of_chunk(bytes_of(p.dtype));
  for (int part = 0; part <= choice.split; ++part) {
    params.first_step[part] = narrowed(std::min(part * ceil_div(steps, chunk) / choice.split * chunk, steps));
  }
}

}  // namespace

bool run(const Problem& p, Context& context, const Choice& choice) {
  if (!suits(p, choice, context) || !can_finish(p) || !Operands::suit(p)) {
    return false;
  }
  const Operands operands(p, context);
  Params params{};
  operands.map(p, choice, params);
  set_result(p, params);
  set_tiles(p, choice, params);
  const int device = context.device.index, cluster = choice.split * choice.pair;
  const int rooms = driver::device_info(device).multiprocessors / cluster;
  const int clusters = choice.split > 1 ? params.total : std::min(params.total, rooms);
  kernel(p.dtype, operands.along_k(), choice.width, choice.pair, device)
      .launch_clusters(clusters * cluster, cluster, kThreads, shared_bytes(choice.width), &params, context.stream);
  return true;
}

}  // namespace fretwork::two_four::hopper

namespace fretwork::two_four::cuda {

bool run_hopper(const Problem& problem, Context& context) {
  return fretwork::cuda::kernel_arch(context.device.index) == "sm_90a" &&
         hopper::run(problem, context, hopper::choose(problem, context.device.index));
}

}  // namespace fretwork::two_four::cuda
