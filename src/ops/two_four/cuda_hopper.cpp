// 2:4 products on Hopper's sparse tensor cores: does the problem suit them, its tensor maps, the launch.
#include "ops/two_four/cuda_hopper.h"

#include <algorithm>
#include <array>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "core/divide.h"
#include "ops/two_four/params_hopper.cuh"
#include "runtime/cuda_driver.h"
#include "runtime/kernels.h"
#include "runtime/tensor_map.h"

namespace fretwork::two_four::hopper {
namespace {

namespace driver = fretwork::cuda;

constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max() / 2;
constexpr std::array kTypes = {DType::f16, DType::bf16, DType::i8, DType::f8_e4m3, DType::f8_e5m2};
constexpr std::int64_t kGroup = 4;  // of all of these
constexpr std::array kWidths = {256, 128};
static_assert(std::ranges::all_of(kWidths, [](int width) {  // with barriers
  return std::max(shared_bytes(width, 1), shared_bytes(width, 2)) + 256 <= 227 << 10;
}));

int narrowed(std::int64_t value) { return static_cast<int>(value); }

// ------------------------------------------------------------------------------------------------ which kernel

KernelSpec instance(DType dtype, bool b_along_k, const Choice& choice) {
  return {"ops/two_four/kernel_hopper.cuh",
          std::string("fretwork::two_four::hopper::product<") + device_type(dtype) + ", " +
              std::to_string(choice.width) + (b_along_k ? ", true, " : ", false, ") + std::to_string(choice.parts) +
              ", fretwork::two_four::hopper::Flow(" + std::to_string(choice.flow) + ")>"};
}

std::vector<KernelSpec> list_kernels(const std::string& arch) {
  std::vector<KernelSpec> list;
  if (arch != "sm_90a") {
    return list;
  }
  for (const DType dtype : kTypes) {
    for (const int width : kWidths) {
      list.push_back(instance(dtype, true, {.width = width}));
      if (size_of(dtype) == 2) {
        list.push_back(instance(dtype, false, {.width = width}));
      }
    }
  }
  return list;
}
const KernelList kKernels{"two_four", list_kernels};

constinit KernelTable<4 * kTypes.size()> kernels;

const Kernel& kernel(DType dtype, bool b_along_k, const Choice& choice, int device) {
  const Choice usual;
  if (choice.parts != usual.parts || choice.flow != usual.flow) {
    return get_kernel(instance(dtype, b_along_k, choice), device);
  }
  const auto type = static_cast<std::size_t>(std::ranges::find(kTypes, dtype) - kTypes.begin());
  return kernels.get(4 * type + (b_along_k ? 2 : 0) + (choice.width == 256 ? 1 : 0), device,
                     [&] { return instance(dtype, b_along_k, choice); });
}

// ------------------------------------------------------------------------------------------------------- views

/// What the copy engine moves, each with its unit axis first.
struct Views {
  TiledView values, words, b;
  bool b_along_k;
};

int bytes_of(DType dtype) { return narrowed(static_cast<std::int64_t>(size_of(dtype))); }

std::optional<Views> views_of(const Problem& p) {
  const int bytes = bytes_of(p.dtype);
  const std::int64_t kept = p.k / 2, word_bytes = ceil_div(p.k / kGroup, 2);
  const std::int64_t batches = p.b.batch != 0 ? p.batch : 1;
  const auto values = make_tiled_view(p.values.data, {kept, p.m, 1, 1}, {p.values.along, p.values.line, 0, 0}, bytes);
  const auto words =
      make_tiled_view(p.words.data, {word_bytes, p.m, 1, 1},
                      {word_bytes <= p.word_bytes ? 1 : p.words.along, p.words.line * p.word_bytes, 0, 0}, 1);
  const auto along_k = make_tiled_view(p.b.data, {p.k, p.n, batches, 1}, {p.b.row, p.b.col, p.b.batch, 0}, bytes);
  const auto along_n = bytes == 2
                           ? make_tiled_view(p.b.data, {p.n, p.k, batches, 1}, {p.b.col, p.b.row, p.b.batch, 0}, bytes)
                           : std::nullopt;
  if (!values || !words || (!along_k && !along_n)) {
    return std::nullopt;
  }
  return Views{*values, *words, along_k ? *along_k : *along_n, along_k.has_value()};
}

/// The result as the copy engine writes it, if it can.
std::optional<TiledView> result_view(const Problem& p, bool transposed) {
  const int bytes = bytes_of(p.out);
  const auto view = transposed
                        ? make_tiled_view(p.c.data, {p.m, p.n, p.batch, 1}, {p.c.row, p.c.col, p.c.batch, 0}, bytes)
                        : make_tiled_view(p.c.data, {p.n, p.m, p.batch, 1}, {p.c.col, p.c.row, p.c.batch, 0}, bytes);
  return view && view->can_be_written() ? view : std::nullopt;
}

std::optional<Out> kind_of(const Problem& p) {
  const bool plain = p.bias.data == nullptr && p.scale_s.data == nullptr && p.scale_b.data == nullptr &&
                     p.activation == Activation::none;
  const bool bytes = size_of(p.dtype) == 1;
  switch (p.out) {
    case DType::f16:
      return bytes || p.dtype == DType::f16 ? std::optional(Out::f16) : std::nullopt;
    case DType::bf16:
      return bytes || p.dtype == DType::bf16 ? std::optional(Out::bf16) : std::nullopt;
    case DType::f32:  // these activations are as good as 16-bit results need
      return p.activation == Activation::gelu || p.activation == Activation::silu ? std::nullopt
                                                                                  : std::optional(Out::f32);
    case DType::i32:
      return p.dtype == DType::i8 && plain ? std::optional(Out::i32) : std::nullopt;
    default:
      return std::nullopt;
  }
}

/// Steps of the depth.
std::int64_t steps_of(const Problem& p, int parts) { return ceil_div(p.k, parts * 128 / bytes_of(p.dtype)); }
std::int64_t tiles_of(const Problem& p, int width) { return ceil_div(p.m, kRows) * ceil_div(p.n, width) * p.batch; }

bool suits(const Problem& p, const Choice& choice, const Context& context) {
  const bool choosable = std::ranges::find(kWidths, choice.width) != kWidths.end() &&
                         (choice.split == 1 || (choice.split == 2 && steps_of(p, choice.parts) >= 16));
  const bool sizes = p.k > 0 && p.m < kMost && p.n < kMost && p.k < kMost && p.batch < kMost &&
                     ceil_div(p.m, kRows) * ceil_div(p.n, kWidths.back()) < kMost / p.batch;
  return choosable && sizes && std::ranges::find(kTypes, p.dtype) != kTypes.end() &&
         driver::kernel_arch(context.device.index) == "sm_90a";
}

}  // namespace

std::string Choice::text() const {
  return std::to_string(width) + " wide, split " + std::to_string(split) + ", share " + std::to_string(share) +
         ", parts " + std::to_string(parts) + ", flow " + std::to_string(flow);
}

/// Steps of 256 columns are the unit of time; a tile costs some for filling the ring and storing its sums.
Choice choose(const Problem& p, int multiprocessors) {
  Choice best;
  double least = std::numeric_limits<double>::max();
  for (const int width : kWidths) {
    for (const int split : {1, 2}) {
      const std::int64_t steps = steps_of(p, best.parts), units = tiles_of(p, width) * split;
      if (split == 2 && (units > multiprocessors || steps < 16)) {
        continue;
      }
      const double step = width == 256 ? 1.0 : 0.62, around = (width == 256 ? 3.0 : 2.0) + (split == 2 ? 3.0 : 0.0);
      const double cost = double(ceil_div(units, multiprocessors)) * (double(ceil_div(steps, split)) * step + around);
      if (cost < least) {
        least = cost;
        best.width = width;
        best.split = split;
      }
    }
  }
  return best;
}

bool run(const Problem& p, Context& context, const Choice& choice) {
  const auto kind = kind_of(p);
  const auto views = kind && suits(p, choice, context) ? views_of(p) : std::nullopt;
  if (!views) {
    return false;
  }
  const int bytes = bytes_of(p.dtype);
  const auto line = static_cast<std::uint32_t>(128 / bytes), width = static_cast<std::uint32_t>(choice.width);
  const auto depth = static_cast<std::uint32_t>(choice.parts) * line;
  const bool transposed = p.c.row == 1 && p.c.col != 1;
  const auto result = result_view(p, transposed);
  const auto unit = static_cast<std::uint32_t>(128 / bytes_of(p.out));
  Params params{};
  params.values = views->values.map(depth / 2, kRows);
  params.words = views->words.map(kChunkRow, kRows);
  params.b = views->b_along_k ? views->b.map(line, width) : views->b.map(line, depth);
  if (result) {
    params.c = result->map(unit, transposed ? unit : 64);
  }
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
  params.kind = *kind;
  params.activation = static_cast<int>(p.activation);
  params.m = narrowed(p.m);
  params.n = narrowed(p.n);
  params.groups = narrowed(p.k / kGroup);
  params.steps = narrowed(steps_of(p, choice.parts));
  params.row_tiles = narrowed(ceil_div(p.m, kRows));
  params.col_tiles = narrowed(ceil_div(p.n, choice.width));
  params.total = narrowed(tiles_of(p, choice.width));
  params.share = choice.share;
  params.b_batch = p.b.batch != 0 ? 1 : 0;
  params.split = choice.split;
  params.transposed = transposed ? 1 : 0;
  params.direct = result ? 0 : 1;
  const int device = context.device.index, shared = shared_bytes(choice.width, choice.parts);
  const Kernel& product = kernel(p.dtype, views->b_along_k, choice, device);
  if (choice.split == 2) {
    product.launch_clusters(2 * params.total, 2, kThreads, shared, &params, context.stream);
  } else {
    product.launch(std::min(params.total, driver::device_info(device).multiprocessors), kThreads, shared, &params,
                   context.stream);
  }
  return true;
}

}  // namespace fretwork::two_four::hopper

namespace fretwork::two_four::cuda {

bool run_hopper(const Problem& problem, Context& context) {
  if (fretwork::cuda::kernel_arch(context.device.index) != "sm_90a") {
    return false;
  }
  return hopper::run(problem, context,
                     hopper::choose(problem, fretwork::cuda::device_info(context.device.index).multiprocessors));
}

}  // namespace fretwork::two_four::cuda
