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
constexpr std::array kTypes = {DType::f16, DType::bf16, DType::i8, DType::f8_e4m3, DType::f8_e5m2, DType::f32};
constexpr std::array kWidths = {256, 128};
static_assert(std::ranges::all_of(kWidths, [](int width) {  // with barriers
  return std::max(shared_bytes(width, 1), shared_bytes(width, 2)) + 256 <= 227 << 10;
}));

int narrowed(std::int64_t value) { return static_cast<int>(value); }
int bytes_of(DType dtype) { return static_cast<int>(size_of(dtype)); }
std::int64_t groups_of(const Problem& p) { return p.k / (p.dtype == DType::f32 ? 2 : 4); }

// ------------------------------------------------------------------------------------------------ which kernel

KernelSpec pack_instance(bool bytes) {
  return {"ops/two_four/kernel_hopper_pack.cuh",
          std::string("fretwork::two_four::hopper::") + (bytes ? "pack_bytes" : "pack_tf32")};
}

std::vector<KernelSpec> list_kernels(const std::string& arch) {
  std::vector<KernelSpec> list;
  if (arch != "sm_90a") {
    return list;
  }
  list.push_back(pack_instance(true));
  list.push_back(pack_instance(false));
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

constinit KernelTable<4 * kTypes.size() + 2> kernels;

const Kernel& kernel(DType dtype, bool b_along_k, const Choice& choice, int device) {
  const Choice usual;
  if (choice.parts != usual.parts || choice.flow != usual.flow || choice.pair != usual.pair) {
    return get_kernel(instance(dtype, b_along_k, choice), device);
  }
  const auto type = static_cast<std::size_t>(std::ranges::find(kTypes, dtype) - kTypes.begin());
  return kernels.get(4 * type + (b_along_k ? 2 : 0) + (choice.width == 256 ? 1 : 0), device,
                     [&] { return instance(dtype, b_along_k, choice); });
}

const Kernel& pack_kernel(bool bytes, int device) {
  return kernels.get(4 * kTypes.size() + (bytes ? 1 : 0), device, [&] { return pack_instance(bytes); });
}

// -------------------------------------------------------------------------------------------------- workspace

/// The lines of an operand as they are, or made in workspace.
struct Lines {
  void* data;
  std::int64_t line, along, batch;  ///< strides in elements
};

/// `lines` lines of `length` in workspace, along k, fp32 rounded to tf32.
class Packed {
 public:
  Packed(bool wanted, std::int64_t lines, std::int64_t length, std::int64_t batches, DType dtype, Context& context)
      : wanted_(wanted),
        lines_(lines),
        length_(length),
        batches_(batches),
        pitch_(ceil_div(length * bytes_of(dtype), 16) * 16 / bytes_of(dtype)),
        bytes_(size_of(dtype) == 1),
        space_(context, wanted ? static_cast<std::size_t>(batches * lines * pitch_) * size_of(dtype) : 0) {}

  Lines fill(const Lines& from, const Context& context) const {
    if (!wanted_) {
      return from;
    }
    const std::int64_t side = bytes_ ? 64 : 32, line_tiles = ceil_div(lines_, side), along = ceil_div(length_, side);
    const PackParams params{from.data,      space_.data(),   from.line,        from.along,        from.batch,
                            pitch_,         lines_ * pitch_, narrowed(lines_), narrowed(length_), narrowed(line_tiles),
                            narrowed(along)};
    pack_kernel(bytes_, context.device.index)
        .launch(line_tiles * along * batches_, kPackThreads, 0, &params, context.stream);
    return {space_.data(), pitch_, 1, lines_ * pitch_};
  }

 private:
  bool wanted_;
  std::int64_t lines_, length_, batches_, pitch_;
  bool bytes_;
  Workspace space_;
};

// ------------------------------------------------------------------------------------------------------- views

std::int64_t batches_of_b(const Problem& p) { return p.b.batch != 0 ? p.batch : 1; }

std::optional<TiledView> values_view(const Problem& p, const Lines& values) {
  return make_tiled_view(values.data, {p.k / 2, p.m, 1, 1}, {values.along, values.line, 0, 0}, bytes_of(p.dtype));
}
std::optional<TiledView> words_view(const Problem& p) {
  const std::int64_t bytes = ceil_div(groups_of(p), 2), along = bytes <= p.word_bytes ? 1 : p.words.along;
  return make_tiled_view(p.words.data, {bytes, p.m, 1, 1}, {along, p.words.line * p.word_bytes, 0, 0}, 1);
}
std::optional<TiledView> along_k_view(const Problem& p, const Lines& b) {
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
  const bool choosable =
      std::ranges::find(kWidths, choice.width) != kWidths.end() &&
      (choice.split == 1 || (choice.split == 2 && choice.pair == 1 && steps_of(p, choice.parts) >= 16));
  const bool sizes = p.k > 0 && p.m < kMost && p.n < kMost && p.k < kMost && p.batch < kMost &&
                     ceil_div(p.m, kRows) * ceil_div(p.n, kWidths.back()) < kMost / p.batch;
  const bool type = std::ranges::find(kTypes, p.dtype) != kTypes.end() &&
                    (p.dtype != DType::f32 || context.precision == Precision::tf32);
  return choosable && sizes && type && driver::kernel_arch(context.device.index) == "sm_90a";
}

}  // namespace

KernelSpec instance(DType dtype, bool b_along_k, const Choice& choice) {
  return {"ops/two_four/kernel_hopper.cuh", std::string("fretwork::two_four::hopper::product<") + device_type(dtype) +
                                                ", " + std::to_string(choice.width) +
                                                (b_along_k ? ", true, " : ", false, ") + std::to_string(choice.parts) +
                                                ", fretwork::two_four::hopper::Flow(" + std::to_string(choice.flow) +
                                                "), " + std::to_string(choice.pair) + ">"};
}

std::string Choice::text() const {
  return std::to_string(width) + " wide, split " + std::to_string(split) + ", share " + std::to_string(share) +
         ", parts " + std::to_string(parts) + ", flow " + std::to_string(flow) + ", pair " + std::to_string(pair);
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
  if (!kind || !suits(p, choice, context)) {
    return false;
  }
  // wgmma takes other than 16-bit types along k only, and drops bits that tf32 does not have instead of rounding.
  const bool tf32 = p.dtype == DType::f32;
  const Lines own_values{p.values.data, p.values.line, p.values.along, 0};
  const Lines own_b{p.b.data, p.b.col, p.b.row, p.b.batch};
  const bool turns = tf32 || (size_of(p.dtype) == 1 && !along_k_view(p, own_b));
  const auto words = words_view(p);
  if (!words || (!tf32 && !values_view(p, own_values)) || (!turns && !along_k_view(p, own_b) && !along_n_view(p))) {
    return false;
  }
  const Packed values_space(tf32, p.m, p.k / 2, 1, p.dtype, context);
  const Packed b_space(turns, p.n, p.k, batches_of_b(p), p.dtype, context);
  const auto values = values_view(p, values_space.fill(own_values, context));
  const auto along_k = along_k_view(p, b_space.fill(own_b, context));
  const auto b = along_k ? along_k : along_n_view(p);
  if (!values || !b) {
    return false;
  }
  const int bytes = bytes_of(p.dtype);
  const auto line = static_cast<std::uint32_t>(128 / bytes), width = static_cast<std::uint32_t>(choice.width);
  const auto depth = static_cast<std::uint32_t>(choice.parts) * line;
  const bool transposed = p.c.row == 1 && p.c.col != 1;
  const auto result = result_view(p, transposed);
  const auto unit = static_cast<std::uint32_t>(128 / bytes_of(p.out));
  Params params{};
  params.values = values->map(depth / 2, kRows);
  params.words = words->map(kChunkRow, kRows);
  params.b = along_k ? b->map(line, width / static_cast<std::uint32_t>(choice.pair)) : b->map(line, depth);
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
  params.groups = narrowed(groups_of(p));
  params.steps = narrowed(steps_of(p, choice.parts));
  params.row_tiles = narrowed(ceil_div(p.m, kRows * choice.pair));
  params.col_tiles = narrowed(ceil_div(p.n, choice.width));
  params.total = narrowed(params.row_tiles * p.batch * params.col_tiles);
  params.share = choice.share;
  params.b_batch = p.b.batch != 0 ? 1 : 0;
  params.split = choice.split;
  params.transposed = transposed ? 1 : 0;
  params.direct = result ? 0 : 1;
  const int device = context.device.index, shared = shared_bytes(choice.width, choice.parts);
  const Kernel& product = kernel(p.dtype, along_k.has_value(), choice, device);
  const int multiprocessors = driver::device_info(device).multiprocessors;
  if (choice.split * choice.pair > 1) {
    const int clusters = choice.split == 2 ? params.total : std::min(params.total, multiprocessors / 2);
    product.launch_clusters(2 * clusters, 2, kThreads, shared, &params, context.stream);
  } else {
    product.launch(std::min(params.total, multiprocessors), kThreads, shared, &params, context.stream);
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
