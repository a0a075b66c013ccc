// Host side of the Hopper kernels: which problems fit, tensor maps, launches.
#include <algorithm>
#include <bit>
#include <cstdlib>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "ops/kronecker/cuda/launch.h"
#include "ops/kronecker/cuda/pack.h"
#include "ops/kronecker/cuda/params_hopper.cuh"
#include "runtime/cuda_driver.h"
#include "runtime/kernels.h"
#include "runtime/tensor_map.h"

namespace fretwork::kronecker::hopper {
namespace {

namespace driver = fretwork::cuda;

constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max() / 2;
constexpr std::int64_t kSomeRows = 512, kH200 = 132;  // multiprocessors
constexpr int kWidths[] = {64, 128, 192, 256};
constexpr int kResidentWidths[] = {64, 128, 192};
constexpr bool fits(int width, int columns) {  // with the bias and barriers of a product
  return shared_bytes(width) + 2 * columns * 4 + stages(width) * 16 <= 227 << 10;
}
static_assert(resident_shared_bytes(kMostKept) + 2 * 192 * 2 + stages(0) * 16 <= 227 << 10);
static_assert(fits(64, 4 * 64) && fits(128, 2 * 128) && fits(192, 192) && fits(256, 256));

int narrowed(std::int64_t value) { return static_cast<int>(value); }

// ---------------------------------------------------------------------------------------------- which kernel

KernelSpec instance(const std::string& file, const std::string& kernel, const std::string& arguments, int shared) {
  return {"ops/kronecker/cuda/" + file + ".cuh", "fretwork::kronecker::hopper::" + kernel + "<" + arguments + ">",
          shared};
}
std::string sized(DType dtype, int width, bool last) {
  return std::string(device_type(dtype)) + ", " + std::to_string(width) + (last ? ", true" : ", false");
}
KernelSpec product_instance(DType dtype, int width, bool last, bool weights_k) {
  return instance("hopper_product", "product", sized(dtype, width, last) + (weights_k ? ", true" : ", false"),
                  product_shared_bytes(width));
}
KernelSpec dense_instance(DType dtype, int width, bool weights_k) {
  return instance("hopper_product", "product",
                  sized(dtype, width, false) + (weights_k ? ", true" : ", false") + ", true",
                  product_shared_bytes(width));
}
KernelSpec resident_instance(DType dtype, int width) {
  return instance("hopper_resident", "product_resident", std::string(device_type(dtype)) + ", " + std::to_string(width),
                  KernelSpec::kBySize);
}
KernelSpec gradient_instance(DType dtype, int width, bool last) {
  return instance("hopper_gradient", "gradient", sized(dtype, width, last), shared_bytes(width));
}
KernelSpec interleaved_instance(int deltas, int width) {
  return instance("hopper_interleaved", "product_interleaved", std::to_string(deltas) + ", " + std::to_string(width),
                  shared_bytes(width));
}
KernelSpec interleaved_gradient_instance(int deltas) {
  return instance("hopper_interleaved_gradient", "gradient_interleaved", std::to_string(deltas),
                  interleaved_shared_bytes(deltas));
}
KernelSpec unpack_instance(DType dtype) { return instance("pack", "unpack", device_type(dtype), 0); }

std::vector<KernelSpec> list_kernels(const std::string& arch) {
  std::vector<KernelSpec> list;
  if (arch != "sm_90a") {
    return list;
  }
  list.push_back(interleaved_instance(2, 64));
  list.push_back(interleaved_instance(2, 128));
  list.push_back(interleaved_instance(4, 64));
  list.push_back(interleaved_gradient_instance(2));
  list.push_back(interleaved_gradient_instance(4));
  for (const DType dtype : {DType::f16, DType::bf16}) {
    for (const int width : kResidentWidths) {
      list.push_back(resident_instance(dtype, width));
    }
  }
  for (const DType dtype : {DType::f16, DType::bf16, DType::f32}) {
    list.push_back(unpack_instance(dtype));
    for (const int width : kWidths) {
      list.push_back(dense_instance(dtype, width, true));
      if (dtype != DType::f32) {
        list.push_back(dense_instance(dtype, width, false));
      }
      for (const bool last : {false, true}) {
        list.push_back(product_instance(dtype, width, last, true));
        list.push_back(gradient_instance(dtype, width, last));
        if (dtype != DType::f32) {
          list.push_back(product_instance(dtype, width, last, false));
        }
      }
    }
  }
  return list;
}
const KernelList kKernels{"kronecker", list_kernels};

constinit KernelTable<120> kernels;

std::size_t place(DType dtype) { return dtype == DType::f16 ? 0 : dtype == DType::bf16 ? 1 : 2; }
std::size_t place(DType dtype, int width, bool last) {
  return place(dtype) * 8 + (last ? 4 : 0) + static_cast<std::size_t>(width / 64 - 1);
}
const Kernel& product_kernel(DType dtype, int width, bool last, bool weights_k, int device) {
  return kernels.get(place(dtype, width, last) + (weights_k ? 24 : 0), device,
                     [&] { return product_instance(dtype, width, last, weights_k); });
}
const Kernel& dense_kernel(DType dtype, int width, bool weights_k, int device) {
  return kernels.get(80 + place(dtype, width, weights_k), device,
                     [&] { return dense_instance(dtype, width, weights_k); });
}
const Kernel& resident_kernel(DType dtype, int width, int device) {
  return kernels.get(104 + place(dtype, width, true), device, [&] { return resident_instance(dtype, width); });
}
const Kernel& gradient_kernel(DType dtype, int width, bool last, int device) {
  return kernels.get(48 + place(dtype, width, last), device, [&] { return gradient_instance(dtype, width, last); });
}
const Kernel& interleaved_kernel(int deltas, int width, int device) {
  return kernels.get(deltas == 4    ? 77
                     : width == 128 ? 76
                                    : 75,
                     device, [&] { return interleaved_instance(deltas, width); });
}
const Kernel& interleaved_gradient_kernel(int deltas, int device) {
  return kernels.get(deltas == 4 ? 79 : 78, device, [&] { return interleaved_gradient_instance(deltas); });
}
const Kernel& unpack_kernel(DType dtype, int device) {
  return kernels.get(72 + place(dtype), device, [&] { return unpack_instance(dtype); });
}

// ----------------------------------------------------------------------------------------------------- views

int bytes_of(DType dtype) { return static_cast<int>(size_of(dtype)); }
/// Elements in the 128 bytes of a line of shared memory: the depth of a step.
std::int64_t line_of(DType dtype) { return 128 / bytes_of(dtype); }

/// The batch and `features` of each (i, l), with the batch or the features as the unit axis.
std::optional<TiledView> matrix_view(const Matrix& m, bool last, std::int64_t batch, std::int64_t features,
                                     const Sizes& s, int bytes) {
  const std::int64_t next = s.d * m.feature, block = features * next;
  return last ? make_tiled_view(m.data, {batch, features, s.d, s.a}, {m.batch, next, m.feature, block}, bytes)
              : make_tiled_view(m.data, {features, batch, s.d, s.a}, {next, m.batch, m.feature, block}, bytes);
}

/// With boxes that make `rows` lines of an operand: one box where the unit axis is the depth.
Map operand_map(const TiledView& view, bool unit_is_depth, int rows) {
  const int line = 128 / view.element_bytes;
  return view.map(static_cast<std::uint32_t>(line), static_cast<std::uint32_t>(unit_is_depth ? rows : line));
}

/// Batch first: rows of a block's neighbours (feature, l), as they lie in memory.
std::optional<TiledView> row_view(const Matrix& m, std::int64_t batch, std::int64_t features, const Sizes& s) {
  const std::int64_t width = features * s.d;
  return make_tiled_view(m.data, {width, batch, 1, s.a}, {m.feature, m.batch, 0, width}, bytes_of(DType::f32));
}

/// x and y (or d_y), if they are in the same layout and it is one of ours.
struct Layout {
  bool last;
  TiledView x, y;
  bool by_threads = false;  ///< batch last, and y is nothing that the copy engine can store; x has a view of
                            ///< neighbours, or is nothing that it can fetch

  bool neighbours() const { return by_threads && x.data != nullptr; }
  /// Tiles that hold so many rows, though the first may begin up to a unit of 16 bytes early.
  std::int64_t row_tiles(std::int64_t batch) const {
    return ceil_div(batch + (neighbours() ? 16 / x.element_bytes - 1 : 0), kRows);
  }
};
std::optional<Layout> layout_of(const Matrix& x, const Matrix& y, std::int64_t batch, const Sizes& s, DType dtype) {
  for (const bool last : {false, true}) {
    const int bytes = bytes_of(dtype);
    const auto from = matrix_view(x, last, batch, s.c, s, bytes), to = matrix_view(y, last, batch, s.b, s, bytes);
    if (from && to) {
      return Layout{last, *from, *to};
    }
  }
  return std::nullopt;
}

/// x, batch last with lines that begin anywhere, if it has a view in which features k·d to k·d + d - 1 of a block are
/// one line, which begins where the copy engine can go, and y could have one: lines of one δ then begin at the same
/// place of a unit of 16 bytes in both. Tiles begin with the unit, and have rows beside the batch's that nobody stores.
std::optional<TiledView> neighbour_view(const Problem& p) {
  const Sizes& s = p.sizes;
  const int bytes = bytes_of(p.dtype);
  const auto view = [&](const Matrix& m, std::int64_t features) {
    const std::int64_t next = s.d * m.feature;
    return m.feature < p.batch ? std::nullopt
                               : make_tiled_view(m.data, {next - m.feature + p.batch, features, 1, s.a},
                                                 {1, next, 0, features * next}, bytes);
  };
  const auto x = view(p.x, s.c), y = view(p.y, s.b);
  return y && (p.x.feature - p.y.feature) * bytes % 16 == 0 ? x : std::nullopt;
}

/// The same of a product. A row alone goes the way that it would with others.
std::optional<Layout> layout_of(const Problem& p) {
  const Sizes& s = p.sizes;
  const auto layout = layout_of(p.x, p.y, p.batch, s, p.dtype);
  const bool alone = p.batch == 1 && s.a * s.d * (s.b | s.c) * bytes_of(p.dtype) % 16 != 0;
  if (layout && layout->y.can_be_written() && (layout->last || !alone)) {
    return layout;
  }
  if (p.x.batch != 1 || p.y.batch != 1) {
    return std::nullopt;
  }
  return Layout{true, neighbour_view(p).value_or(TiledView{}), {}, true};
}

/// What both problems need. A tile of tiny blocks moves too little to be worth its barriers.
bool suits(const Sizes& s, std::int64_t batch, DType dtype, const Context& context) {
  const bool type =
      dtype == DType::f16 || dtype == DType::bf16 || (dtype == DType::f32 && context.precision == Precision::tf32);
  const bool sizes = s.b + s.c >= 32 && s.b < kMost / s.c && batch < kMost && s.a < kMost / s.d;
  return type && sizes && driver::kernel_arch(context.device.index) == "sm_90a";
}

bool suits_gradient(const WeightProblem& p, const Context& context) {
  const Sizes& s = p.sizes;
  return suits(s, p.batch, p.dtype, context) && s.a * s.d <= kMost / 256 / (ceil_div(s.b, kRows) * ceil_div(s.c, 64));
}

// --------------------------------------------------------------------------------------------------- weights

/// Weights as a·d matrices: as they are where the copy engine can read them, else packed into `space`. tf32 needs k as
/// the unit axis; packing rounds to it.
class Matrices {
 public:
  Matrices(const Weights& w, const Sizes& s, DType dtype)
      : w_(w),
        s_(s),
        dtype_(dtype),
        k_(s.c == 1 || s.b == 1 || std::llabs(w.c) <= std::llabs(w.b) || dtype == DType::f32),
        lines_(k_ ? s.b : s.c),
        line_(k_ ? s.c : s.b),
        pitch_(ceil_div(line_, kMapUnit) * kMapUnit) {
    if (s.d == 1) {
      direct_ =
          make_tiled_view(w.data, {line_, lines_, 1, s.a}, {k_ ? w.c : w.b, k_ ? w.b : w.c, 0, w.a}, bytes_of(dtype));
    }
  }
  /// k is the unit axis.
  bool unit_is_k() const { return k_; }
  std::size_t bytes() const {
    return direct_ ? 0 : static_cast<std::size_t>(s_.a * s_.d * lines_ * pitch_) * size_of(dtype_);
  }
  TiledView view(const Workspace& space, const Context& context) const {
    if (direct_) {
      return *direct_;
    }
    pack(w_, s_, dtype_, {k_, pitch_, dtype_ == DType::f32}, space.data(), context);
    const std::int64_t matrix = lines_ * pitch_;
    return *make_tiled_view(space.data(), {line_, lines_, s_.d, s_.a}, {1, pitch_, matrix, matrix * s_.d},
                            bytes_of(dtype_));
  }

 private:
  const Weights& w_;
  const Sizes& s_;
  DType dtype_;
  bool k_;
  std::int64_t lines_, line_, pitch_;
  std::optional<TiledView> direct_;
};

// -------------------------------------------------------------------------------------------------- regrouping

/// Seconds per row of the batch and δ, from times on an H200: a pass over x and y, and what each way reaches. Kernels
/// that keep neighbouring δ together are bound by shared memory and L2.
struct Estimate {
  Sizes s;
  std::int64_t batch;
  bool tf32;
  double pass, flops, start;
  Estimate(const Sizes& sizes, DType dtype, std::int64_t rows)
      : s(sizes),
        batch(rows),
        tf32(dtype == DType::f32),
        pass(bytes_of(dtype) * double(s.b + s.c) / 4.3e12),
        flops(2.0 * double(s.b) * double(s.c)),
        start(6e-6 / double(batch * s.a * s.d)) {}

  double strided_product() const {
    // Clusters of eight on 16 δ of 128 columns; where those of some rows do not all run at once, they read lines anew.
    const bool anew = s.a * ceil_div(s.d, 16) * ceil_div(s.b, 128) * 8 > kH200;
    const double reached = s.d <= 4 ? 450e12 : s.d == 16 ? 235e12 : anew ? 82e12 : 115e12;
    return tf32 ? std::max(1.7 * pass, flops / (s.d < 8 ? 48e12 : 33e12)) : std::max(1.5 * pass, flops / reached);
  }
  /// Columns of `width` read x and, for each 128 rows, the weights again, from L2.
  double interleaved_product(int width) const {
    const double columns = double(ceil_div(s.b, width)) * double(s.c) * (1.0 + width / 128.0);
    return std::max({1.35 * pass, 4.0 * (columns + double(s.b)) / 5e12, flops / 300e12});
  }
  double regrouped_product() const {
    return 2.35 * pass + std::max(1.25 * pass, flops / (tf32 ? 320e12 : 640e12)) + start;
  }
  /// With a block's d products as one: d times the work, and columns of `width` read x and the weights again, from L2.
  double dense_product(int width) const {
    const double depth = double(s.c) * double(ceil_div(s.b * s.d, width)) + double(s.b * s.c * s.d) / kRows;
    const double work = double(s.d) * flops / (tf32 ? 320e12 : 600e12);
    return std::max({1.25 * pass, work, size() * depth / 8e12}) + packing(2 * s.d + 1) + 1.1 * start;
  }
  /// Moving the weights so many times.
  double packing(std::int64_t times) const { return size() * double(times) * flops / 2 / 3e12 / double(batch); }
  double size() const { return tf32 ? 4.0 : 2.0; }
  double strided_gradient() const {
    if (tf32) {
      return std::max((s.d < 8 ? 6.5 : 2.9) * pass, flops / 25e12);
    }
    if (s.d % 16 == 0) {
      return pass + flops / (s.d == 16 ? 215e12 : 165e12);
    }
    const bool flat = s.d == 2 || s.d == 4;
    return std::max((flat ? 1.8 : 2.35) * pass, flops / (flat ? 200e12 : 60e12));
  }
  /// Tiles of 128 × `width` read both operands again for each other's, from L2.
  double interleaved_gradient(std::int64_t width) const {
    const double read = double(s.b * ceil_div(s.c, width) + s.c * ceil_div(s.b, kRows));
    return std::max({1.6 * pass, 4.0 * read / 5e12, flops / 240e12});
  }
  /// With a block's d products as one, in tiles of 128 × `width`.
  double dense_gradient(int width) const {
    const double tiles = double(ceil_div(s.b * s.d, kRows) * kRows) * double(ceil_div(s.c * s.d, width) * width);
    return std::max(1.3 * pass, 2.0 * tiles / double(s.d) / 550e12);
  }
  double regrouped_gradient() const {
    return 2.35 * pass + std::max(1.3 * pass, flops / (tf32 ? 280e12 : 550e12)) + start;
  }
};

/// Regrouped rows: `width` features of each (i, l), contiguous.
std::optional<TiledView> grouped_view(void* data, std::int64_t width, std::int64_t batch, const Sizes& s, int bytes) {
  return make_tiled_view(data, {width, batch, s.d, s.a}, {1, s.a * s.d * width, width, s.d * width}, bytes);
}

// -------------------------------------------------------------------------------------------------- launches

/// A width for every batch. A tile costs its columns and, to fetch the batch again, 64 more; of the widths that take
/// nearly the least time with many rows, the one that is best with some hundred.
int product_width(const Sizes& s, std::int64_t products, std::span<const int> widths, int multiprocessors) {
  const auto cost = [&](int width, std::int64_t rows) {
    return ceil_div(ceil_div(rows, kRows) * products * ceil_div(s.b, width), multiprocessors) * (width + 64);
  };
  const auto with_many = [&](int width) { return cost(width, kManyRows); };
  const std::int64_t least = with_many(*std::ranges::min_element(widths, {}, with_many));
  const auto with_some = [&](int width) {
    return 100 * with_many(width) <= 104 * least ? cost(width, kSomeRows) : std::numeric_limits<std::int64_t>::max();
  };
  return *std::ranges::min_element(widths, {}, with_some);
}

/// How the batch of a gradient is cut.
struct Parts {
  std::int64_t count, steps;  ///< of them, and in each
};
/// As many as keep the machine busy; each costs filling a ring and moving its partial sums.
Parts gradient_parts(std::int64_t tiles, std::int64_t steps, std::int64_t sums, int stage, int multiprocessors) {
  Parts best{1, steps};
  std::int64_t least = std::numeric_limits<std::int64_t>::max();
  const std::int64_t most =
      std::min(steps, 1 + 4 * multiprocessors / std::min<std::int64_t>(tiles, 4 * multiprocessors));
  for (std::int64_t wanted = 1; wanted <= most; ++wanted) {
    const std::int64_t each = ceil_div(steps, wanted), count = ceil_div(steps, each);
    const std::int64_t turns = ceil_div(tiles * count, multiprocessors);
    const std::int64_t cost = turns * (each + 4) * stage + count * sums * 8 / multiprocessors;
    if (cost < least) {
      least = cost;
      best = {count, each};
    }
  }
  return best;
}

int gradient_width(std::int64_t c) {
  const auto cost = [&](int width) { return ceil_div(c, width) * (width + kRows); };
  return *std::min_element(std::begin(kWidths), std::end(kWidths), [&](int a, int b) { return cost(a) < cost(b); });
}

/// Adds the parts at `sums` into d_w and d_bias; with no parts these become zeros. `dense`: of the products of a
/// block's features of all δ, those of one δ count.
void unpack(const WeightProblem& p, const Workspace& sums, std::int64_t line, std::int64_t parts, bool dense,
            const Context& context) {
  const Sizes& s = p.sizes;
  const std::int64_t cols = s.c + (p.d_bias.data != nullptr ? 1 : 0), deep = std::min<std::int64_t>(s.d, 32);
  const std::int64_t slices = std::clamp<std::int64_t>(std::bit_ceil(static_cast<std::uint64_t>(ceil_div(parts, 4))), 1,
                                                       kMostSlices);  // many parts are added by more threads
  const std::int64_t wide = kUnpackElements / slices / deep;
  UnpackParams params{};
  params.from = static_cast<const float*>(sums.data());
  params.to = p.d_w.data;
  params.bias = p.d_bias.data;
  params.from_i = s.d * s.b * line;
  params.from_l = dense ? line + 1 : s.b * line;
  params.from_j = dense ? s.d * line : line;
  params.from_k = dense ? s.d : 1;
  params.part = s.a * s.d * s.b * line;
  params.bias_back = dense ? 1 : 0;
  params.stride_i = p.d_w.a;
  params.stride_j = p.d_w.b;
  params.stride_k = p.d_w.c;
  params.stride_l = p.d_w.d;
  params.bias_stride = p.d_bias.stride;
  params.b = narrowed(s.b);
  params.c = narrowed(s.c);
  params.d = narrowed(s.d);
  params.parts = narrowed(parts);
  params.wide_tiles = narrowed(ceil_div(s.b * cols, wide));
  params.deep_tiles = narrowed(ceil_div(s.d, deep));
  params.slices = narrowed(slices);
  params.wide = Divisor(wide);
  params.deep = Divisor(deep);
  params.cols = Divisor(cols);
  unpack_kernel(p.dtype, context.device.index)
      .launch_behind(s.a * params.wide_tiles * params.deep_tiles, kPackThreads, 0, &params, context.stream);
}

/// All but the maps, for a·d products of b × c. At most `share` tiles of the batch go through all weights together.
ProductParams product_params(const Problem& p, const Sizes& s, std::int64_t row_tiles, int width, std::int64_t share) {
  const std::int64_t col_tiles = ceil_div(s.b, width), products = s.a * s.d;
  share = std::min(share, row_tiles);
  ProductParams params{};
  params.bias = p.bias.data;
  params.bias_stride = p.bias.stride;
  params.activation = static_cast<int>(p.activation);
  params.batch = narrowed(p.batch);
  params.b = narrowed(s.b);
  params.steps = narrowed(ceil_div(s.c, line_of(p.dtype)));
  params.total = narrowed(row_tiles * col_tiles * products);
  params.d = Divisor(s.d);
  params.col_tiles = Divisor(col_tiles);
  params.share = Divisor(share);
  params.tail = Divisor(std::max<std::int64_t>(row_tiles % share, 1));
  params.group = Divisor(share * col_tiles * products);
  params.together = 1;
  return params;
}

Strands strands(const Problem& p, bool last) {
  return {p.x.data,
          p.w.data,
          p.y.data,
          last ? p.x.feature : p.x.batch,
          last ? p.y.feature : p.y.batch,
          p.w.a,
          p.w.b,
          p.w.c,
          p.w.d,
          narrowed(p.sizes.c),
          Divisor(p.sizes.d)};
}

/// Where x and y lie.
void set_operands(ProductParams& params, const Problem& p, const Layout& layout) {
  params.strands = strands(p, layout.last);
  params.mapped = !layout.by_threads;
  params.neighbours = layout.neighbours();
  if (params.mapped || params.neighbours) {
    params.x = operand_map(layout.x, !layout.last, kRows);
  }
  if (params.mapped) {
    params.y = operand_map(layout.y, !layout.last, 64);
  }
}

/// `behind`: the weights are being packed by the kernel before.
void launch(const Kernel& kernel, ProductParams params, int shared, bool behind, const Context& context) {
  const int multiprocessors = driver::device_info(context.device.index).multiprocessors;
  params.behind = behind;
  const auto how = behind ? &Kernel::launch_behind : &Kernel::launch;
  (kernel.*how)(std::min(params.total, multiprocessors), kThreads, shared, &params, context.stream);
}

void launch_product(const Problem& p, const Layout& layout, const Map& weights, bool weights_k, int width, bool behind,
                    Context& context) {
  const bool once = layout.last && p.sizes.b <= width;  // one tile has all columns: x is not read again
  ProductParams params = product_params(p, p.sizes, layout.row_tiles(p.batch), width, once ? kMost : 16);
  set_operands(params, p, layout);
  params.weights = weights;
  // Some microseconds to clear a number, for launches of a hundred or more.
  const bool fetched = params.mapped || params.neighbours;  // by the copy engine
  const bool in_turns = !fetched || params.total < 96 * driver::device_info(context.device.index).multiprocessors;
  const Workspace taken(context, in_turns ? 0 : sizeof(int));
  params.taken = static_cast<int*>(taken.data());
  if (!in_turns) {
    params.together = once ? 512 / (kRows * bytes_of(p.dtype)) : 1;  // so many bytes of a line in memory
    driver::fill_zero(taken.data(), sizeof(int), context.stream);
  }
  launch(product_kernel(p.dtype, width, layout.last, weights_k, context.device.index), params,
         product_shared_bytes(width), behind && in_turns, context);
}

/// tf32, batch first with d = 2 or 4: the δ of a block stay together. Nothing where rows do not lie so.
struct Interleaved {
  TiledView x, y;
  int deltas, width;
};
std::optional<Interleaved> interleaved(const Problem& p, int multiprocessors) {
  constexpr int kTwo[] = {64, 128}, kFour[] = {64};  // columns: the sums of all δ must fit into registers
  const Sizes& s = p.sizes;
  const auto x = row_view(p.x, p.batch, s.c, s), y = row_view(p.y, p.batch, s.b, s);
  if (p.dtype != DType::f32 || (s.d != 2 && s.d != 4) || !x || !y || !y->can_be_written()) {
    return std::nullopt;
  }
  const int width = product_width(s, s.a, s.d == 2 ? std::span<const int>(kTwo) : kFour, multiprocessors);
  return Interleaved{*x, *y, narrowed(s.d), width};
}
void run_interleaved(const Problem& p, const Interleaved& rows, const Matrices& matrices, Context& context) {
  const auto& [x, y, deltas, width] = rows;
  const Sizes& s = p.sizes;
  const Workspace space(context, matrices.bytes());
  ProductParams params =
      product_params(p, {s.a, s.b * s.d, s.c * s.d, 1}, ceil_div(p.batch, kRows), width * deltas, 16);
  params.x = operand_map(x, true, kRows);
  params.weights = matrices.view(space, context)
                       .map(static_cast<std::uint32_t>(32 / deltas), static_cast<std::uint32_t>(width),
                            static_cast<std::uint32_t>(deltas));
  params.y = operand_map(y, true, 64);
  launch(interleaved_kernel(deltas, width, context.device.index), params, shared_bytes(width), true, context);
}

/// Batch first, the d products of each block as one dense matrix: y, x and the weights of pattern (a, b·d, c·d, 1).
struct Dense {
  Problem problem;
  Layout layout;
  int width;
  Lines lines;
  std::size_t bytes;
};
/// For any batch, as a layer should not need a kernel for each; a tile costs its columns and 64 more.
int dense_width(std::int64_t columns) {
  const auto cost = [&](int width) { return ceil_div(columns, width) * (width + 64); };
  return *std::ranges::min_element(kWidths, {}, cost);
}
std::optional<Dense> dense(const Problem& p, int wanted) {
  constexpr std::int64_t kMostDeltas = 8;
  const Sizes& s = p.sizes;
  if (s.d == 1 || s.d > kMostDeltas || s.a * s.b * s.d >= kMost / (s.c * s.d + 8) ||
      ceil_div(p.batch, kRows) >= kMost / (s.a * ceil_div(s.b * s.d, kWidths[0]))) {
    return std::nullopt;
  }
  Problem one = p;
  one.sizes = {s.a, s.b * s.d, s.c * s.d, 1};
  const auto layout = layout_of(p.x, p.y, p.batch, one.sizes, p.dtype);
  if (!layout || layout->last || !layout->y.can_be_written()) {
    return std::nullopt;
  }
  const int width = wanted > 0 ? wanted : dense_width(one.sizes.b);
  const bool along_k = p.dtype == DType::f32 || std::llabs(p.w.c) <= std::llabs(p.w.b);
  const std::int64_t line = ceil_div((along_k ? s.c : s.b) * s.d, kMapUnit) * kMapUnit;
  const auto bytes = static_cast<std::size_t>(s.a * s.d * (along_k ? s.b : s.c) * line) * size_of(p.dtype);
  return Dense{one, *layout, width, {along_k, line, p.dtype == DType::f32}, bytes};
}

/// Whether that should be clearly faster than the ways that keep neighbouring δ together, of d = 2 or 4. Odd d have no
/// other way on the tensor cores.
bool dense_pays(const Problem& p) {
  const Sizes& s = p.sizes;
  if (s.d % 2 != 0) {
    return true;
  }
  const Estimate times(s, p.dtype, kManyRows);
  const double strided = std::max(1.15 * times.pass, times.flops / (s.d == 2 ? 410e12 : 430e12));
  const double rows = std::max(1.2 * times.pass, 0.72 * times.interleaved_product(s.d == 2 ? 128 : 64));
  const double other = times.tf32 ? rows : strided;  // by times on an H200
  return (s.d == 2 || s.d == 4) &&
         times.dense_product(dense_width(s.b * s.d)) < 0.95 * (other + times.packing(3) + 1.6 * times.start);
}

void run_dense(const Problem& p, const Dense& one, Context& context) {
  const Sizes &s = p.sizes, &whole = one.problem.sizes;
  const auto& [along_k, line, tf32] = one.lines;
  const Workspace space(context, one.bytes);
  pack_dense(p.w, s, p.dtype, one.lines, space.data(), context);
  const std::int64_t entries = along_k ? whole.c : whole.b, lines = along_k ? whole.b : whole.c;
  const auto weights =
      *make_tiled_view(space.data(), {entries, lines, 1, s.a}, {1, line, 0, lines * line}, bytes_of(p.dtype));
  ProductParams params = product_params(one.problem, whole, ceil_div(p.batch, kRows), one.width, 16);
  set_operands(params, p, one.layout);
  params.weights = operand_map(weights, along_k, one.width);
  launch(dense_kernel(p.dtype, one.width, along_k, context.device.index), params, product_shared_bytes(one.width), true,
         context);
}

/// Weights that CTAs keep in shared memory, each those of one seat: `width` columns of one product.
struct Resident {
  int width, seats;
};
/// For products of 16-bit types, batch last, where it takes no more turns than CTAs that change their columns, and so
/// few that packing would be felt. Reckoned for many rows, so that it does not depend on the batch; with `any`,
/// wherever it is possible.
std::optional<Resident> resident(const Sizes& s, int multiprocessors, bool any) {
  constexpr std::int64_t kRowTiles = kManyRows / kRows;
  const bool shallow = s.c <= 64;  // a turn is one step
  const auto seats = [&](int width) { return s.a * s.d * ceil_div(s.b, width); };
  const auto fits = [&](int width) {
    return ceil_div(s.c, 64) * width <= kMostKept && seats(width) <= multiprocessors;
  };
  const auto turns = [&](int width) {
    return fits(width) ? ceil_div(kRowTiles, multiprocessors / seats(width)) * (width + 64) : kMost;
  };
  const auto others = [&](int width) { return ceil_div(kRowTiles * seats(width), multiprocessors) * (width + 64); };
  const int width = *std::ranges::min_element(kResidentWidths, {}, turns);
  const int other = *std::ranges::min_element(kWidths, {}, others);
  const bool pays =
      turns(width) <= (shallow ? 49 : 8) * (width + 64) && 100 * turns(width) <= (shallow ? 105 : 103) * others(other);
  if (!fits(width) || (!any && !pays)) {
    return std::nullopt;
  }
  return Resident{width, narrowed(seats(width))};
}

void run_resident(const Problem& p, const Layout& layout, const Resident& kept, const Context& context) {
  const int multiprocessors = driver::device_info(context.device.index).multiprocessors;
  ProductParams params = product_params(p, p.sizes, layout.row_tiles(p.batch), kept.width, 1);
  set_operands(params, p, layout);
  params.share = Divisor(kept.seats);
  params.total = narrowed(layout.row_tiles(p.batch));
  const int each = std::min(params.total, multiprocessors / kept.seats);
  resident_kernel(p.dtype, kept.width, context.device.index)
      .launch(std::int64_t{each} * kept.seats, kThreads, resident_shared_bytes(params.steps * kept.width), &params,
              context.stream);
}

/// A part of the batch at a time, which bounds the workspace.
void run_regrouped(const Problem& p, const Matrices& matrices, int width, Context& context) {
  constexpr std::int64_t kBytes = std::int64_t{256} << 20;
  const Sizes& s = p.sizes;
  const int bytes = bytes_of(p.dtype);
  const std::int64_t row = s.a * s.d * (s.b + s.c) * bytes;
  const std::int64_t most = std::min(p.batch, std::max<std::int64_t>(kBytes / row / kRows, 1) * kRows);
  const Workspace space(context, matrices.bytes());
  const Workspace rows(context, static_cast<std::size_t>(most * row));
  const Map weights = operand_map(matrices.view(space, context), matrices.unit_is_k(), width);
  for (std::int64_t first = 0; first < p.batch; first += most) {
    Problem part = p;
    part.batch = std::min(most, p.batch - first);
    part.x.data = static_cast<std::byte*>(p.x.data) + first * p.x.batch * bytes;
    part.y.data = static_cast<std::byte*>(p.y.data) + first * p.y.batch * bytes;
    void* const x = rows.data();
    void* const y = static_cast<std::byte*>(rows.data()) + part.batch * s.a * s.d * s.c * bytes;
    regroup(part.x, x, s.c, part.batch, s, bytes, false, context);
    const Layout layout{false, *grouped_view(x, s.c, part.batch, s, bytes),
                        *grouped_view(y, s.b, part.batch, s, bytes)};
    launch_product(part, layout, weights, matrices.unit_is_k(), width, false, context);
    regroup(part.y, y, s.b, part.batch, s, bytes, true, context);
  }
}

/// A gradient kernel: tiles of kRows × width of `deltas` products at once.
struct GradientTile {
  int width, deltas, stage_bytes, shared_bytes;
};
GradientTile gradient_tile(std::int64_t c) {
  const int width = gradient_width(c);
  return {width, 1, stage_bytes(width), shared_bytes(width)};
}

/// How batches of up to `batch` rows are cut, and room for the sums of their parts.
struct GradientSums {
  std::int64_t row_tiles, col_tiles, products, line;
  Parts parts;
  Workspace space;

  GradientSums(const WeightProblem& p, std::int64_t batch, const GradientTile& tile, Context& context)
      : row_tiles(ceil_div(p.sizes.b, kRows)),
        col_tiles(ceil_div(p.sizes.c, tile.width)),
        products(p.sizes.a * p.sizes.d / tile.deltas),
        line(ceil_div(p.sizes.c + 1, 4) * 4),
        parts(gradient_parts(tiles(), ceil_div(batch, line_of(p.dtype)), floats(p.sizes), tile.stage_bytes,
                             driver::device_info(context.device.index).multiprocessors)),
        space(context, static_cast<std::size_t>(parts.count * floats(p.sizes)) * sizeof(float)) {}
  std::int64_t tiles() const { return row_tiles * col_tiles * products; }
  std::int64_t floats(const Sizes& s) const { return s.a * s.d * s.b * line; }
};

/// The sums of p's batch, or with `add` added to those there are.
void launch_gradient(const WeightProblem& p, const Kernel& kernel, const Map& d_y, const Map& x,
                     const GradientTile& tile, const GradientSums& sums, bool add, const Context& context) {
  const int multiprocessors = driver::device_info(context.device.index).multiprocessors;
  const std::int64_t steps = ceil_div(p.batch, line_of(p.dtype));
  GradientParams params{};
  params.d_y = d_y;
  params.x = x;
  params.partials = static_cast<float*>(sums.space.data());
  params.b = narrowed(p.sizes.b);
  params.c = narrowed(p.sizes.c);
  params.d = narrowed(p.sizes.d / tile.deltas);
  params.line = narrowed(sums.line);
  params.row_tiles = narrowed(sums.row_tiles);
  params.col_tiles = narrowed(sums.col_tiles);
  params.steps = narrowed(steps);
  params.total = narrowed(sums.tiles() * ceil_div(steps, sums.parts.steps));
  params.products = narrowed(sums.products);
  params.steps_per_part = narrowed(sums.parts.steps);
  params.with_sums = p.d_bias.data != nullptr ? 1 : 0;
  params.add = add ? 1 : 0;
  kernel.launch(std::min(params.total, multiprocessors), kThreads, tile.shared_bytes, &params, context.stream);
}

/// Of operands as they lie.
void launch_gradient(const WeightProblem& p, const Layout& layout, const GradientTile& tile, const GradientSums& sums,
                     bool add, const Context& context) {
  launch_gradient(p, gradient_kernel(p.dtype, tile.width, layout.last, context.device.index),
                  operand_map(layout.y, layout.last, kRows), operand_map(layout.x, layout.last, tile.width), tile, sums,
                  add, context);
}

void run_gradient(const WeightProblem& p, const Layout& layout, Context& context) {
  const GradientTile tile = gradient_tile(p.sizes.c);
  const GradientSums sums(p, p.batch, tile, context);
  launch_gradient(p, layout, tile, sums, false, context);
  unpack(p, sums.space, sums.line, sums.parts.count, false, context);
}

/// Rows of the batch that are regrouped at a time, which bounds the workspace: so many that their sums are a small part
/// of what they move.
std::int64_t regrouped_rows(const WeightProblem& p) {
  constexpr std::int64_t kLeast = std::int64_t{1} << 30, kMostBytes = std::int64_t{4} << 30, kStep = 64;
  const Sizes& s = p.sizes;
  const std::int64_t row = s.a * s.d * (s.b + s.c) * bytes_of(p.dtype), sums = s.a * s.d * s.b * s.c * 4;
  const std::int64_t most = std::max<std::int64_t>(std::clamp(8 * sums, kLeast, kMostBytes) / row / kStep, 1) * kStep;
  return std::min(p.batch, ceil_div(ceil_div(p.batch, ceil_div(p.batch, most)), kStep) * kStep);  // of equal size
}

/// What a pass of its own would regroup.
bool can_regroup(const WeightProblem& p) {
  const Sizes& s = p.sizes;
  const std::int64_t rows = regrouped_rows(p);
  const int size = bytes_of(p.dtype);
  return regroups(p.x, s.c, rows, s, size) && regroups(p.d_y, s.b, rows, s, size);
}

/// False where rows do not lie so, or another way is faster.
bool run_interleaved(const WeightProblem& p, Context& context) {
  const Sizes& s = p.sizes;
  const auto x = row_view(p.x, p.batch, s.c, s), d_y = row_view(p.d_y, p.batch, s.b, s);
  if (p.dtype != DType::f32 || (s.d != 2 && s.d != 4) || !x || !d_y) {
    return false;
  }
  const int deltas = narrowed(s.d), width = 256 / deltas;
  const Estimate times(s, p.dtype, p.batch);
  const double other = can_regroup(p) ? times.regrouped_gradient() : times.strided_gradient();
  if (times.interleaved_gradient(width) > std::min(other, times.strided_gradient())) {
    return false;
  }
  const GradientTile tile{width, deltas, interleaved_stage_bytes(deltas), interleaved_shared_bytes(deltas)};
  const GradientSums sums(p, p.batch, tile, context);
  launch_gradient(p, interleaved_gradient_kernel(deltas, context.device.index), operand_map(*d_y, false, kRows),
                  operand_map(*x, false, width), tile, sums, false, context);
  unpack(p, sums.space, sums.line, sums.parts.count, false, context);
  return true;
}

/// `most` rows of the batch at a time, a multiple of a step, added to the sums of those before.
void run_regrouped(const WeightProblem& p, std::int64_t most, Context& context) {
  const Sizes& s = p.sizes;
  const int bytes = bytes_of(p.dtype);
  const Workspace x(context, static_cast<std::size_t>(most * s.a * s.d * s.c * bytes));
  const Workspace d_y(context, static_cast<std::size_t>(most * s.a * s.d * s.b * bytes));
  const GradientTile tile = gradient_tile(s.c);
  const GradientSums sums(p, most, tile, context);
  for (std::int64_t first = 0; first < p.batch; first += most) {
    WeightProblem part = p;
    part.batch = std::min(most, p.batch - first);
    part.x.data = static_cast<std::byte*>(p.x.data) + first * p.x.batch * bytes;
    part.d_y.data = static_cast<std::byte*>(p.d_y.data) + first * p.d_y.batch * bytes;
    regroup(part.x, x.data(), s.c, part.batch, s, bytes, false, context);
    regroup(part.d_y, d_y.data(), s.b, part.batch, s, bytes, false, context);
    const Layout layout{false, *grouped_view(x.data(), s.c, part.batch, s, bytes),
                        *grouped_view(d_y.data(), s.b, part.batch, s, bytes)};
    launch_gradient(part, layout, tile, sums, first > 0, context);
  }
  unpack(p, sums.space, sums.line, sums.parts.count, false, context);
}

/// Batch first, 16-bit types: the d products of a block as one, of which only sums of one δ are kept. d times the
/// arithmetic, and nothing leaks from one δ to another: the batch is the depth. False where it does not pay.
bool run_dense(const WeightProblem& p, Context& context) {
  const Sizes& s = p.sizes;
  const Estimate times(s, p.dtype, p.batch);
  WeightProblem one = p;
  one.sizes = {s.a, s.b * s.d, s.c * s.d, 1};
  if (times.tf32 || s.d == 4 || s.d > 7 || !suits_gradient(one, context)) {
    return false;
  }
  const GradientTile tile = gradient_tile(one.sizes.c);
  const auto layout = layout_of(p.x, p.d_y, p.batch, one.sizes, p.dtype);
  const double other = can_regroup(p) ? times.regrouped_gradient() : times.strided_gradient();
  const bool slow = s.d % 2 != 0;  // the others are not for the tensor cores
  if (!layout || layout->last ||
      (!slow && times.dense_gradient(tile.width) > std::min(other, times.strided_gradient()))) {
    return false;
  }
  const GradientSums sums(one, p.batch, tile, context);
  launch_gradient(one, *layout, tile, sums, false, context);
  unpack(p, sums.space, sums.line, sums.parts.count, true, context);
  return true;
}

/// False where rows cannot be regrouped, or it does not pay.
bool run_regrouped(const WeightProblem& p, Context& context) {
  const Estimate times(p.sizes, p.dtype, p.batch);
  if (!can_regroup(p) || times.regrouped_gradient() >= times.strided_gradient()) {
    return false;
  }
  run_regrouped(p, regrouped_rows(p), context);
  return true;
}

}  // namespace

std::span<const int> widths() { return kWidths; }

bool run(const Problem& p, Context& context) { return run(p, context, Form::best); }

bool run(const Problem& p, Context& context, Form form, int wanted) {
  const Sizes& s = p.sizes;
  const bool known = wanted == 0 || std::ranges::find(kWidths, wanted) != std::end(kWidths);
  if (!known || !suits(s, p.batch, p.dtype, context)) {
    return false;
  }
  const int multiprocessors = driver::device_info(context.device.index).multiprocessors;
  const int width = wanted > 0 ? wanted : product_width(s, s.a * s.d, kWidths, multiprocessors);
  if (ceil_div(p.batch, kRows) > kMost / (ceil_div(s.b, width) * s.a * s.d)) {
    return false;
  }
  if (form == Form::dense) {
    const auto one = dense(p, wanted);
    if (one) {
      run_dense(p, *one, context);
    }
    return one.has_value();
  }
  const Matrices matrices(p.w, s, p.dtype);
  const auto layout = form != Form::regrouped ? layout_of(p) : std::nullopt;
  if (layout) {
    const bool may_keep = p.dtype != DType::f32 && s.d > 1 && wanted == 0 && layout->last &&
                          (form == Form::best || form == Form::resident);
    if (const auto kept = may_keep ? resident(s, multiprocessors, form == Form::resident) : std::nullopt) {
      run_resident(p, *layout, *kept, context);
      return true;
    }
    if (form == Form::resident) {
      return false;
    }
    const Workspace space(context, matrices.bytes());
    const Map weights = operand_map(matrices.view(space, context), matrices.unit_is_k(), width);
    launch_product(p, *layout, weights, matrices.unit_is_k(), width, matrices.bytes() > 0, context);
    return true;
  }
  if (s.d == 1 || form == Form::resident) {
    return false;
  }
  const int bytes = bytes_of(p.dtype);
  const Estimate times(s, p.dtype, kManyRows);
  const auto rows = interleaved(p, multiprocessors);
  if (const auto one = form == Form::best ? dense(p, 0) : std::nullopt; one && dense_pays(p)) {
    run_dense(p, *one, context);
    return true;
  }
  const double other = rows ? times.interleaved_product(rows->width) : times.strided_product();
  if (form != Form::direct && regroups(p.x, s.c, p.batch, s, bytes) && regroups(p.y, s.b, p.batch, s, bytes) &&
      (form == Form::regrouped || times.regrouped_product() < other)) {
    run_regrouped(p, matrices, width, context);
    return true;
  }
  if (!rows || form == Form::regrouped || wanted > 0) {  // which has widths of its own
    return false;
  }
  run_interleaved(p, *rows, matrices, context);
  return true;
}

bool run(const WeightProblem& p, Context& context, std::int64_t regrouped) {
  if (!suits_gradient(p, context) || p.sizes.d == 1 || p.batch == 0 || regrouped % 64 != 0 || !can_regroup(p)) {
    return false;
  }
  run_regrouped(p, std::min(regrouped, p.batch), context);
  return true;
}

bool run(const WeightProblem& p, Context& context) {
  const Sizes& s = p.sizes;
  if (!suits_gradient(p, context)) {
    return false;
  }
  if (p.batch == 0) {
    unpack(p, Workspace(context, 0), 0, 0, false, context);
    return true;
  }
  if (const auto layout = layout_of(p.x, p.d_y, p.batch, s, p.dtype)) {
    run_gradient(p, *layout, context);
    return true;
  }
  return s.d > 1 && (run_interleaved(p, context) || run_dense(p, context) || run_regrouped(p, context));
}

}  // namespace fretwork::kronecker::hopper
