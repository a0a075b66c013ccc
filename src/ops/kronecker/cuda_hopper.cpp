// The host side of the Hopper kernels: does the problem suit them, its tensor maps, the launches.
#include <algorithm>
#include <cstdlib>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "ops/kronecker/cuda.h"
#include "ops/kronecker/params_hopper.cuh"
#include "runtime/cuda_driver.h"
#include "runtime/kernels.h"
#include "runtime/tensor_map.h"

namespace fretwork::kronecker::hopper {
namespace {

namespace driver = fretwork::cuda;

constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max() / 2;
constexpr int kWidths[] = {64, 128, 192, 256};
constexpr std::size_t kMostRegrouped = std::size_t{4} << 30;           // bytes of workspace
constexpr std::int64_t kStep = 64;                                     // of the depth
static_assert(shared_bytes(256) + 2 * 256 * 2 + 4 * 16 <= 227 << 10);  // with the bias and barriers of the product

int narrowed(std::int64_t value) { return static_cast<int>(value); }
Divisor divisor(std::int64_t by) { return Divisor(static_cast<unsigned>(by)); }

// ---------------------------------------------------------------------------------------------- which kernel

KernelSpec instance(const std::string& file, const std::string& kernel, const std::string& arguments) {
  return {"ops/kronecker/kernel_" + file + ".cuh", "fretwork::kronecker::hopper::" + kernel + "<" + arguments + ">"};
}
std::string sized(DType dtype, int width, bool last) {
  return std::string(device_type(dtype)) + ", " + std::to_string(width) + (last ? ", true" : ", false");
}
KernelSpec product_instance(DType dtype, int width, bool last, bool weights_k) {
  return instance("hopper_product", "product", sized(dtype, width, last) + (weights_k ? ", true" : ", false"));
}
KernelSpec gradient_instance(DType dtype, int width, bool last) {
  return instance("hopper_gradient", "gradient", sized(dtype, width, last));
}
KernelSpec pack_instance() { return instance("pack", "pack", "fretwork::u16"); }
KernelSpec regroup_instance(int deltas, bool back) {
  return instance("regroup", "regroup", std::to_string(deltas) + (back ? ", true" : ", false"));
}
KernelSpec unpack_instance(DType dtype) { return instance("pack", "unpack", device_type(dtype)); }

std::vector<KernelSpec> list_kernels(const std::string& arch) {
  std::vector<KernelSpec> list;
  if (arch != "sm_90a") {
    return list;
  }
  list.push_back(pack_instance());
  for (const int deltas : {2, 4, 8}) {
    list.push_back(regroup_instance(deltas, false));
    list.push_back(regroup_instance(deltas, true));
  }
  for (const DType dtype : {DType::f16, DType::bf16}) {
    list.push_back(unpack_instance(dtype));
    for (const int width : kWidths) {
      for (const bool last : {false, true}) {
        list.push_back(gradient_instance(dtype, width, last));
        list.push_back(product_instance(dtype, width, last, false));
        list.push_back(product_instance(dtype, width, last, true));
      }
    }
  }
  return list;
}
const KernelList kKernels{"kronecker", list_kernels};

constinit KernelTable<73> kernels;

std::size_t place(DType dtype, int width, bool last) {
  return (dtype == DType::f16 ? 0u : 1u) | (last ? 2u : 0u) | static_cast<std::size_t>(width / 64 - 1) << 2;
}
const Kernel& product_kernel(DType dtype, int width, bool last, bool weights_k, int device) {
  return kernels.get(place(dtype, width, last) + (weights_k ? 16 : 0), device,
                     [&] { return product_instance(dtype, width, last, weights_k); });
}
const Kernel& gradient_kernel(DType dtype, int width, bool last, int device) {
  return kernels.get(32 + place(dtype, width, last), device, [&] { return gradient_instance(dtype, width, last); });
}
const Kernel& pack_kernel(int device) { return kernels.get(64, device, pack_instance); }
const Kernel& unpack_kernel(DType dtype, int device) {
  return kernels.get(dtype == DType::f16 ? 65 : 66, device, [&] { return unpack_instance(dtype); });
}

// ----------------------------------------------------------------------------------------------------- views

/// The batch and `features` of each (i, l), with the batch or the features as the unit axis.
std::optional<TiledView> matrix_view(const Matrix& m, bool last, std::int64_t batch, std::int64_t features,
                                     const Sizes& s) {
  const std::int64_t next = s.d * m.feature, block = features * next;
  return last ? make_tiled_view(m.data, {batch, features, s.d, s.a}, {m.batch, next, m.feature, block})
              : make_tiled_view(m.data, {features, batch, s.d, s.a}, {next, m.batch, m.feature, block});
}

/// With boxes that make `rows` lines of an operand: one box where the unit axis is the depth.
Map operand_map(const TiledView& view, bool unit_is_depth, int rows) {
  return view.map(64, unit_is_depth ? static_cast<std::uint32_t>(rows) : 64);
}

/// x and y (or d_y), if they are in the same layout and it is one of ours.
struct Layout {
  bool last;
  TiledView x, y;
};
std::optional<Layout> layout_of(const Matrix& x, const Matrix& y, std::int64_t batch, const Sizes& s) {
  for (const bool last : {false, true}) {
    const auto from = matrix_view(x, last, batch, s.c, s), to = matrix_view(y, last, batch, s.b, s);
    if (from && to) {
      return Layout{last, *from, *to};
    }
  }
  return std::nullopt;
}

/// What both problems need. A tile of tiny blocks moves too little to be worth its barriers.
bool suits(const Sizes& s, std::int64_t batch, DType dtype, const Context& context) {
  const bool type = dtype == DType::f16 || dtype == DType::bf16;
  const bool sizes = s.b + s.c >= 32 && s.b < kMost / s.c && batch < kMost && s.a < kMost / s.d;
  return type && sizes && driver::kernel_arch(context.device.index) == "sm_90a";
}

// --------------------------------------------------------------------------------------------------- weights

/// How far a CTA reaches along l and along a matrix when it moves `elements`.
struct Reach {
  int wide, deep, wide_tiles, deep_tiles;
  Reach(std::int64_t matrix, std::int64_t d, int elements)
      : wide(0), deep(narrowed(std::min<std::int64_t>(d, 32))), wide_tiles(0), deep_tiles(narrowed(ceil_div(d, deep))) {
    wide = elements / deep;
    wide_tiles = narrowed(ceil_div(matrix, wide));
  }
  std::int64_t grid(std::int64_t a) const { return a * wide_tiles * deep_tiles; }
};

/// Weights as a·d matrices: as they are where the copy engine can read them, else packed into `space`.
class Matrices {
 public:
  Matrices(const Weights& w, const Sizes& s)
      : w_(w),
        s_(s),
        k_(s.c == 1 || s.b == 1 || std::llabs(w.c) <= std::llabs(w.b)),
        lines_(k_ ? s.b : s.c),
        line_(k_ ? s.c : s.b),
        pitch_(ceil_div(line_, kMapUnit) * kMapUnit) {
    if (s.d == 1) {
      direct_ = make_tiled_view(w.data, {line_, lines_, 1, s.a}, {k_ ? w.c : w.b, k_ ? w.b : w.c, 0, w.a});
    }
  }
  /// k is the unit axis.
  bool unit_is_k() const { return k_; }
  std::size_t bytes() const {
    return direct_ ? 0 : static_cast<std::size_t>(s_.a * s_.d * lines_ * pitch_) * sizeof(std::uint16_t);
  }
  TiledView view(const Workspace& space, const Context& context) const {
    if (direct_) {
      return *direct_;
    }
    const Reach reach(lines_ * line_, s_.d, kPackElements);
    const PackParams params{
        w_.data,          space.data(),    w_.a,           k_ ? w_.b : w_.c, k_ ? w_.c : w_.b, w_.d,
        narrowed(lines_), narrowed(line_), narrowed(s_.d), narrowed(pitch_), reach.wide,       reach.deep,
        reach.wide_tiles, reach.deep_tiles};
    pack_kernel(context.device.index).launch(reach.grid(s_.a), kPackThreads, 0, &params, context.stream);
    const std::int64_t matrix = lines_ * pitch_;
    return *make_tiled_view(space.data(), {line_, lines_, s_.d, s_.a}, {1, pitch_, matrix, matrix * s_.d});
  }

 private:
  const Weights& w_;
  const Sizes& s_;
  bool k_;
  std::int64_t lines_, line_, pitch_;
  std::optional<TiledView> direct_;
};

// -------------------------------------------------------------------------------------------------- regrouping

/// Batch first with d > 1: rows can be brought into a form with the features of one δ together, where the products of
/// d = 1 take them, and back. Three passes over memory instead of one, which pays for large blocks.
bool regroups(const Matrix& m, std::int64_t width, std::int64_t batch, const Sizes& s) {
  const bool groups = s.d % 8 == 0 || s.d == 4 || s.d == 2;
  return groups && m.feature == 1 && width % 8 == 0 && m.batch % kMapUnit == 0 &&
         reinterpret_cast<std::uintptr_t>(m.data) % 16 == 0 && s.a * width * s.d * batch / 16 < kMost;
}

/// Seconds per row of the batch and δ, from times on an H200: a pass over x and y, and what each way reaches. Kernels
/// that keep neighbouring δ together are bound by shared memory and L2.
struct Estimate {
  double pass, flops;
  Estimate(const Sizes& s) : pass(2.0 * double(s.b + s.c) / 4.3e12), flops(2.0 * double(s.b) * double(s.c)) {}
  bool product_regroups(std::int64_t d, std::int64_t count) const {
    const double strided = std::max(1.5 * pass, flops / (d <= 4 ? 360e12 : d == 16 ? 235e12 : 115e12));
    return 2.35 * pass + std::max(1.25 * pass, flops / 640e12) + 6e-6 / double(count) < strided;
  }
  bool gradient_regroups(std::int64_t d, std::int64_t count) const {
    const double strided = std::max((d < 8 ? 3.6 : 2.35) * pass, flops / (d < 8 ? 80e12 : 60e12));
    return 2.35 * pass + std::max(1.3 * pass, flops / 550e12) + 6e-6 / double(count) < strided;
  }
};

/// Regrouped rows: `width` features of each (i, l), contiguous.
std::optional<TiledView> grouped_view(void* data, std::int64_t width, std::int64_t batch, const Sizes& s) {
  return make_tiled_view(data, {width, batch, s.d, s.a}, {1, s.a * s.d * width, width, s.d * width});
}

void regroup(const Matrix& m, void* grouped, std::int64_t width, std::int64_t batch, const Sizes& s, bool back,
             const Context& context) {
  const int deltas = narrowed(std::min<std::int64_t>(s.d, 8)), device = context.device.index;
  RegroupParams params{};
  params.strided = m.data;
  params.grouped = grouped;
  params.strided_row = m.batch;
  params.width = narrowed(width);
  params.d = narrowed(s.d);
  params.pitch = narrowed(width);
  params.total = narrowed(batch * s.a * (s.d / deltas) * (width / 8));
  params.groups = divisor(s.d / deltas);
  params.eights = divisor(width / 8);
  params.a = divisor(s.a);
  kernels
      .get(67 + static_cast<std::size_t>(deltas / 4) * 2 + (back ? 1 : 0), device,
           [&] { return regroup_instance(deltas, back); })
      .launch(ceil_div(params.total, kRegroupThreads), kRegroupThreads, 0, &params, context.stream);
}

// -------------------------------------------------------------------------------------------------- launches

/// The width whose tiles take the least time: a tile costs its columns and, to fetch the batch again, 64 more.
int product_width(const Problem& p, int multiprocessors) {
  const std::int64_t others = ceil_div(p.batch, kRows) * p.sizes.a * p.sizes.d;
  const auto cost = [&](int width) {
    return ceil_div(others * ceil_div(p.sizes.b, width), multiprocessors) * (width + 64);
  };
  return *std::min_element(std::begin(kWidths), std::end(kWidths), [&](int a, int b) { return cost(a) < cost(b); });
}

/// How the batch of a gradient is cut.
struct Parts {
  std::int64_t count, steps;  ///< of them, and in each
};
/// As many as keep the machine busy; each costs filling a ring and moving its partial sums.
Parts gradient_parts(std::int64_t tiles, std::int64_t steps, std::int64_t sums, int width, int multiprocessors) {
  Parts best{1, steps};
  std::int64_t least = std::numeric_limits<std::int64_t>::max();
  const std::int64_t most =
      std::min(steps, 1 + 4 * multiprocessors / std::min<std::int64_t>(tiles, 4 * multiprocessors));
  for (std::int64_t wanted = 1; wanted <= most; ++wanted) {
    const std::int64_t each = ceil_div(steps, wanted), count = ceil_div(steps, each);
    const std::int64_t turns = ceil_div(tiles * count, multiprocessors);
    const std::int64_t cost = turns * (each + 4) * stage_bytes(width) + count * sums * 8 / multiprocessors;
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

/// Adds the parts at `sums` into d_w and d_bias; with no parts these become zeros.
void unpack(const WeightProblem& p, const Workspace& sums, int line, std::int64_t parts, const Context& context) {
  const Sizes& s = p.sizes;
  const Reach reach(s.b * (s.c + (p.d_bias.data != nullptr ? 1 : 0)), s.d, kUnpackElements);
  const UnpackParams params{static_cast<const float*>(sums.data()),
                            p.d_w.data,
                            p.d_bias.data,
                            p.d_w.a,
                            p.d_w.b,
                            p.d_w.c,
                            p.d_w.d,
                            p.d_bias.stride,
                            narrowed(s.b),
                            narrowed(s.c),
                            narrowed(s.d),
                            line,
                            narrowed(parts),
                            narrowed(s.a * s.d),
                            reach.wide,
                            reach.deep,
                            reach.wide_tiles,
                            reach.deep_tiles};
  unpack_kernel(p.dtype, context.device.index).launch(reach.grid(s.a), kPackThreads, 0, &params, context.stream);
}

/// `behind`: the weights are being packed by the kernel before.
void launch_product(const Problem& p, const Layout& layout, const Map& weights, bool weights_k, int width, bool behind,
                    Context& context) {
  const Sizes& s = p.sizes;
  const int device = context.device.index, multiprocessors = driver::device_info(device).multiprocessors;
  const std::int64_t row_tiles = ceil_div(p.batch, kRows), col_tiles = ceil_div(s.b, width), products = s.a * s.d;
  ProductParams params{};
  params.x = operand_map(layout.x, !layout.last, kRows);
  params.weights = weights;
  params.y = layout.y.map(64, 64);
  params.bias = p.bias.data;
  params.bias_stride = p.bias.stride;
  params.activation = static_cast<int>(p.activation);
  params.batch = narrowed(p.batch);
  params.b = narrowed(s.b);
  params.steps = narrowed(ceil_div(s.c, kStep));
  params.total = narrowed(row_tiles * col_tiles * products);
  params.d = divisor(s.d);
  params.col_tiles = divisor(col_tiles);
  const std::int64_t share = std::min<std::int64_t>(row_tiles, layout.last && col_tiles == 1 ? 64 : 16);
  params.share = divisor(share);
  params.tail = divisor(std::max<std::int64_t>(row_tiles % share, 1));
  params.group = divisor(share * col_tiles * products);
  const Kernel& kernel = product_kernel(p.dtype, width, layout.last, weights_k, device);
  const auto launch = behind ? &Kernel::launch_behind : &Kernel::launch;
  (kernel.*launch)(std::min(params.total, multiprocessors), kThreads, shared_bytes(width), &params, context.stream);
}

/// A part of the batch at a time, which bounds the workspace.
void run_regrouped(const Problem& p, const Matrices& matrices, int width, Context& context) {
  constexpr std::int64_t kBytes = std::int64_t{256} << 20;
  const Sizes& s = p.sizes;
  const std::int64_t row = s.a * s.d * (s.b + s.c) * 2;
  const std::int64_t most = std::min(p.batch, std::max<std::int64_t>(kBytes / row / kRows, 1) * kRows);
  const Workspace space(context, matrices.bytes());
  const Workspace rows(context, static_cast<std::size_t>(most * row));
  const Map weights = operand_map(matrices.view(space, context), matrices.unit_is_k(), width);
  for (std::int64_t first = 0; first < p.batch; first += most) {
    Problem part = p;
    part.batch = std::min(most, p.batch - first);
    part.x.data = static_cast<std::uint16_t*>(p.x.data) + first * p.x.batch;
    part.y.data = static_cast<std::uint16_t*>(p.y.data) + first * p.y.batch;
    void* const x = rows.data();
    void* const y = static_cast<std::byte*>(rows.data()) + part.batch * s.a * s.d * s.c * 2;
    regroup(part.x, x, s.c, part.batch, s, false, context);
    const Layout layout{false, *grouped_view(x, s.c, part.batch, s), *grouped_view(y, s.b, part.batch, s)};
    launch_product(part, layout, weights, matrices.unit_is_k(), width, false, context);
    regroup(part.y, y, s.b, part.batch, s, true, context);
  }
}

}  // namespace

bool run(const Problem& p, Context& context) {
  const Sizes& s = p.sizes;
  if (!suits(s, p.batch, p.dtype, context)) {
    return false;
  }
  const int width = product_width(p, driver::device_info(context.device.index).multiprocessors);
  if (ceil_div(p.batch, kRows) > kMost / (ceil_div(s.b, width) * s.a * s.d)) {
    return false;
  }
  const Matrices matrices(p.w, s);
  if (const auto layout = layout_of(p.x, p.y, p.batch, s); layout && layout->y.can_be_written()) {
    const Workspace space(context, matrices.bytes());
    const Map weights = operand_map(matrices.view(space, context), matrices.unit_is_k(), width);
    launch_product(p, *layout, weights, matrices.unit_is_k(), width, matrices.bytes() > 0, context);
    return true;
  }
  const bool possible = s.d > 1 && regroups(p.x, s.c, p.batch, s) && regroups(p.y, s.b, p.batch, s);
  return possible && Estimate(s).product_regroups(s.d, p.batch * s.a * s.d) &&
         (run_regrouped(p, matrices, width, context), true);
}

bool run(const WeightProblem& p, Context& context) {
  const Sizes& s = p.sizes;
  if (!suits(s, p.batch, p.dtype, context)) {
    return false;
  }
  if (p.batch == 0) {
    unpack(p, Workspace(context, 0), 0, 0, context);
    return true;
  }
  const auto bytes = [&](std::int64_t features) {
    return static_cast<std::size_t>(p.batch * s.a * s.d * features) * sizeof(std::uint16_t);
  };
  auto layout = layout_of(p.x, p.d_y, p.batch, s);
  const bool regrouped = !layout && s.d > 1 && regroups(p.x, s.c, p.batch, s) && regroups(p.d_y, s.b, p.batch, s) &&
                         bytes(s.b + s.c) <= kMostRegrouped && Estimate(s).gradient_regroups(s.d, p.batch * s.a * s.d);
  const Workspace x(context, regrouped ? bytes(s.c) : 0), d_y(context, regrouped ? bytes(s.b) : 0);
  if (regrouped) {
    regroup(p.x, x.data(), s.c, p.batch, s, false, context);
    regroup(p.d_y, d_y.data(), s.b, p.batch, s, false, context);
    layout = Layout{false, *grouped_view(x.data(), s.c, p.batch, s), *grouped_view(d_y.data(), s.b, p.batch, s)};
  }
  const int device = context.device.index, multiprocessors = driver::device_info(device).multiprocessors;
  const int width = gradient_width(s.c);
  const std::int64_t row_tiles = ceil_div(s.b, kRows), col_tiles = ceil_div(s.c, width), products = s.a * s.d;
  const std::int64_t tiles = row_tiles * col_tiles * products, line = ceil_div(s.c + 1, 4) * 4;
  if (!layout || tiles > kMost / 256) {
    return false;
  }
  const std::int64_t sums = products * s.b * line;
  const Parts parts = gradient_parts(tiles, ceil_div(p.batch, kStep), sums, width, multiprocessors);
  const Workspace space(context, static_cast<std::size_t>(parts.count * sums) * sizeof(float));
  GradientParams params{};
  params.d_y = operand_map(layout->y, layout->last, kRows);
  params.x = operand_map(layout->x, layout->last, width);
  params.partials = static_cast<float*>(space.data());
  params.b = narrowed(s.b);
  params.c = narrowed(s.c);
  params.d = narrowed(s.d);
  params.line = narrowed(line);
  params.row_tiles = narrowed(row_tiles);
  params.col_tiles = narrowed(col_tiles);
  params.steps = narrowed(ceil_div(p.batch, kStep));
  params.total = narrowed(tiles * parts.count);
  params.products = narrowed(products);
  params.steps_per_part = narrowed(parts.steps);
  params.with_sums = p.d_bias.data != nullptr ? 1 : 0;
  gradient_kernel(p.dtype, width, layout->last, device)
      .launch(std::min(params.total, multiprocessors), kThreads, shared_bytes(width), &params, context.stream);
  unpack(p, space, params.line, parts.count, context);
  return true;
}

}  // namespace fretwork::kronecker::hopper
