// Products and gradients of any strides: on the portable kernel where both operands have a unit stride, and on the
// simple kernel everywhere else. Which fit, their cost, launches.
#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <string>

#include "ops/kronecker/cuda/families.h"
#include "ops/kronecker/cuda/params.h"
#include "runtime/alignment.h"
#include "runtime/cost.h"
#include "runtime/cuda_driver.h"
#include "runtime/kernels.h"

namespace fretwork::kronecker {
namespace {

namespace driver = fretwork::cuda;

constexpr std::int64_t kRows = 128, kStageDepth = 128;       // as the portable kernel has them
constexpr std::int64_t kTile = 32, kDepth = 16, kLine = 36;  // as the simple kernel has them

constexpr std::int64_t kMostPacked = std::numeric_limits<std::int32_t>::max() / 2;

/// `sums`: partial sums of a gradient.
DType out_type(DType dtype, bool sums) { return sums && dtype != DType::f64 ? DType::f32 : dtype; }
std::size_t sum_bytes(DType dtype) { return dtype == DType::f64 ? 8 : 4; }

/// Before sm_80 a CTA has 64 KB of shared memory.
int simple_warps(DType dtype, int arch) { return dtype == DType::f64 && arch < 80 ? 4 : 8; }
int portable_stages(int arch) { return arch < 80 ? 2 : 3; }
bool has_portable(DType dtype, int arch) { return has_mma(dtype, arch) || (dtype == DType::f32 && arch >= 80); }

std::int64_t simple_bytes(DType dtype, std::int64_t warps) {
  return std::max(2 * warps * kDepth * kLine, warps * kTile * (kTile + 1)) * static_cast<int>(sum_bytes(dtype));
}
std::int64_t portable_bytes(int cols, std::int64_t stages) {
  return std::max(stages * kStageDepth * (kRows + cols), 4 * (kRows + 4) * (cols + 1));
}
KernelSpec simple_spec(DType dtype, bool sums, int deltas, int warps) {
  return kernel_spec("generic", narrowed(simple_bytes(dtype, warps)), "product_simple", dtype, out_type(dtype, sums),
                     deltas, warps);
}
/// `products` is 3 for tf32x3; `left`, `right`: depth is the operand's inner direction.
KernelSpec portable_spec(DType dtype, bool sums, int products, int cols, int stages, bool left, bool right) {
  return kernel_spec("generic", narrowed(portable_bytes(cols, stages)), "product_portable", dtype,
                     out_type(dtype, sums), products, cols, stages, left, right);
}
KernelSpec batch_spec(DType dtype) { return kernel_spec("generic", 0, "sum_batch", dtype); }
KernelSpec reduce_spec(DType dtype, int wide) { return kernel_spec("generic", 0, "reduce", dtype, wide); }

/// An operand of a·d products. `fast` is the axis with the least distance between neighbours.
ProductOperand operand(void* data, std::int64_t i, std::int64_t l, std::int64_t line, std::int64_t entry, bool has_l) {
  const auto near = [](std::int64_t stride) {
    return stride == 0 ? std::numeric_limits<std::int64_t>::max() : std::abs(stride);
  };
  const bool l_first = has_l && near(l) < near(line) && near(l) < near(entry);
  return {data, i, l, line, entry, l_first ? 0 : near(line) <= near(entry) ? 1 : 2, 0};
}

/// x or y as an operand whose lines are batch rows and whose entries are the features of one δ. Strides
/// of size-1 dimensions are set to 0, which fits every alignment.
ProductOperand matrix_operand(const Matrix& m, const Sizes& s, std::int64_t width, bool batch_is_entry) {
  const std::int64_t across = s.d * m.feature;
  return operand(m.data, s.a > 1 ? width * across : 0, s.d > 1 ? m.feature : 0, batch_is_entry ? across : m.batch,
                 batch_is_entry ? m.batch : across, s.d > 1);
}

/// Bytes, up to 16, that can be copied at once along the operand's lines: each begins at a multiple of them. 0 where it
/// has no inner direction.
int unit_of(const ProductOperand& o, DType dtype) {
  const auto size = static_cast<std::int64_t>(size_of(dtype));
  if (o.entry != 1 && o.line != 1) {
    return 0;
  }
  const std::int64_t across = o.entry == 1 ? o.line : o.entry;
  const auto bytes = static_cast<std::uint64_t>((across | o.i | o.l) * size) | reinterpret_cast<std::uintptr_t>(o.data);
  return 1 << std::min(std::countr_zero(bytes), 4);
}

/// `product`: not a gradient, whose left operand is x. Small copies are only worth it where tiles are well filled, or
/// where the batch decides how small they are.
bool tensor_cores(const ProductParams& p, DType dtype, bool product, const Machine& machine) {
  const bool type =
      dtype == DType::f16 || dtype == DType::bf16 || (dtype == DType::f32 && machine.precision != Precision::ieee);
  const int unit = std::min(unit_of(p.left, dtype), unit_of(p.right, dtype));
  const bool last = product && p.left.line == 1;
  return type && has_portable(dtype, machine.number) &&
         (unit == 16 || (unit > 0 && (last || std::min({p.rows, p.cols, p.depth}) >= 16)));
}

/// The width of tiles whose turns, two CTAs to an SM, take the least time with so many rows: a tile costs its columns
/// and, to fetch the rows again, 64 more.
int portable_cols(const ProductParams& p, int multiprocessors) {
  const std::int64_t others = p.pieces * ceil_div(p.rows, kRows) * p.a * p.d;
  const auto cost = [&](int cols) {
    return ceil_div(others * ceil_div(p.cols, cols), std::int64_t{2} * multiprocessors) * (cols + 64);
  };
  return cost(64) < cost(128) ? 64 : 128;
}

void launch_portable(ProductParams& p, DType dtype, bool sums, Context& context) {
  const int products = dtype == DType::f32 && context.precision == Precision::tf32x3 ? 3 : 1;
  const int multiprocessors = driver::device_info(context.device.index).multiprocessors;
  const int stages = portable_stages(driver::arch_number(context.device.index));
  const bool wide = p.cols > 64 && products == 1 && stages == 3;
  const int cols = wide ? portable_cols(p, multiprocessors) : 64;
  p.row_tiles = ceil_div(p.rows, kRows);
  p.col_tiles = ceil_div(p.cols, cols);
  p.left.unit = unit_of(p.left, dtype);
  p.right.unit = unit_of(p.right, dtype);
  p.out.unit = unit_of(p.out, sums ? DType::f32 : dtype);
  const KernelSpec wanted = portable_spec(dtype, sums, products, cols, stages, p.left.entry == 1, p.right.entry == 1);
  get_kernel(wanted, context.device.index)
      .launch(p.pieces * p.row_tiles * p.a * p.d * p.col_tiles, 256, wanted.dynamic_shared, &p, context.stream);
}

void launch_simple(ProductParams& p, DType dtype, bool sums, Context& context) {
  // One δ at a time where memory runs along something else anyway.
  const bool along_l = p.left.fast == 0 || p.out.fast == 0;
  const int warps = simple_warps(dtype, driver::arch_number(context.device.index));
  const auto deltas = along_l ? std::bit_ceil(static_cast<std::uint64_t>(std::min<std::int64_t>(p.d, warps))) : 1;
  p.l_groups = ceil_div(p.d, static_cast<std::int64_t>(deltas));
  p.row_tiles = ceil_div(p.rows, kTile * warps / static_cast<std::int64_t>(deltas));
  p.col_tiles = ceil_div(p.cols, kTile);
  const KernelSpec wanted = simple_spec(dtype, sums, static_cast<int>(deltas), warps);
  get_kernel(wanted, context.device.index)
      .launch(p.pieces * p.row_tiles * p.a * p.l_groups * p.col_tiles, warps * 32, wanted.dynamic_shared, &p,
              context.stream);
}

void launch(ProductParams& p, DType dtype, bool sums, Context& context) {
  tensor_cores(p, dtype, !sums, machine_of(context)) ? launch_portable(p, dtype, sums, context)
                                                     : launch_simple(p, dtype, sums, context);
}

/// The weights as an operand whose lines are outputs and whose entries are inputs.
ProductOperand weight_operand(const Problem& problem) {
  const Weights& w = problem.w;
  const Sizes& s = problem.sizes;
  return operand(w.data, s.a > 1 ? w.a : 0, s.d > 1 ? w.d : 0, w.b, w.c, s.d > 1);
}

ProductParams params_of(const Problem& problem) {
  ProductParams p = product_params(problem);
  p.left = matrix_operand(problem.x, problem.sizes, problem.sizes.c, false);
  p.right = weight_operand(problem);
  p.out = matrix_operand(problem.y, problem.sizes, problem.sizes.b, false);
  return p;
}

/// Weights that lie otherwise are brought into lines, of the nearer neighbours, when x already lies so.
struct PackedWeights {
  bool needed, along_k;
  std::int64_t pitch, matrix;  ///< elements of a line and of a matrix
  ProductParams lined;         ///< with the packed weights, but for their address

  PackedWeights(const Problem& problem, const ProductParams& p, const Machine& machine) : lined(p) {
    const auto& [a, b, c, d] = problem.sizes;
    const std::int64_t chunk = 16 / static_cast<std::int64_t>(size_of(problem.dtype));
    along_k = std::abs(problem.w.c) <= std::abs(problem.w.b);
    pitch = ceil_div(along_k ? c : b, chunk) * chunk;
    matrix = (along_k ? b : c) * pitch;
    lined.right = {nullptr, d * matrix, matrix, along_k ? pitch : 1, along_k ? 1 : pitch, along_k ? 2 : 1, 0};
    needed = unit_of(p.right, problem.dtype) < 4 && matrix < kMostPacked && a * d < kMostPacked &&
             tensor_cores(lined, problem.dtype, true, machine);
  }
};

void run_portable(const Problem& problem, Context& context) {
  ProductParams p = params_of(problem);
  const PackedWeights weights(problem, p, machine_of(context));
  const std::int64_t elements = problem.sizes.a * problem.sizes.d * weights.matrix;
  const Workspace packed(context, weights.needed ? static_cast<std::size_t>(elements) * size_of(problem.dtype) : 0);
  if (weights.needed) {
    pack(problem.w, problem.sizes, problem.dtype, {weights.along_k, weights.pitch}, packed.data(), context);
    p = weights.lined;
    p.right.data = packed.data();
  }
  launch_portable(p, problem.dtype, false, context);
}

std::int64_t features_of(const WeightProblem& p) { return p.sizes.a * p.sizes.b * p.sizes.d; }

/// Pieces of the batch that fill the machine `tiles` at a time, none shorter than 256.
std::int64_t pieces_of(std::int64_t batch, std::int64_t tiles, int multiprocessors) {
  return std::clamp<std::int64_t>(std::min(ceil_div(2 * multiprocessors, tiles), batch / 256), 1, 256);
}

void run_gradient(const WeightProblem& problem, Context& context) {
  const auto& [a, b, c, d] = problem.sizes;
  const std::int64_t count = a * b * c * d;
  const int multiprocessors = driver::device_info(context.device.index).multiprocessors;
  ProductParams p{};
  p.left = matrix_operand(problem.d_y, problem.sizes, b, true);
  p.right = matrix_operand(problem.x, problem.sizes, c, true);
  p.rows = b;
  p.cols = c;
  p.depth = problem.batch;
  p.a = a;
  p.d = d;
  const bool matrices = tensor_cores(p, problem.dtype, false, machine_of(context));
  const std::int64_t tiles =
      a * d * (matrices ? ceil_div(b, kRows) * ceil_div(c, 128) : ceil_div(b, kTile) * ceil_div(c, kTile));
  p.pieces = pieces_of(problem.batch, tiles, multiprocessors);
  p.piece = ceil_div(std::max<std::int64_t>(problem.batch, 1), p.pieces * kDepth) * kDepth;
  p.out_piece = count;
  const Workspace sums(context, static_cast<std::size_t>(p.pieces * count) * sum_bytes(problem.dtype));
  const bool apart = matrices || d == 1;  // the δ of a gradient
  p.out =
      apart ? operand(sums.data(), d * b * c, b * c, c, 1, false) : operand(sums.data(), b * c * d, 1, c * d, d, true);
  launch(p, problem.dtype, true, context);
  const BatchSums bias(problem, context);
  reduce(problem, {sums.data(), p.pieces, apart, bias.space.data(), bias.pieces}, context);
}

std::vector<KernelSpec> list_kernels(const std::string& arch_name) {
  const int arch = driver::arch_number(arch_name), stages = portable_stages(arch);
  std::vector<KernelSpec> list;
  for (const DType dtype : {DType::f64, DType::f32, DType::f16, DType::bf16}) {
    const int warps = simple_warps(dtype, arch);
    for (int deltas = 1; deltas <= warps; deltas *= 2) {
      list.push_back(simple_spec(dtype, false, deltas, warps));
      if (dtype == DType::f16 || dtype == DType::bf16) {
        list.push_back(simple_spec(dtype, true, deltas, warps));
      }
    }
    list.push_back(batch_spec(dtype));
    list.push_back(reduce_spec(dtype, 1));
    if (dtype != DType::f64) {
      list.push_back(reduce_spec(dtype, 4));
    }
  }
  for (const auto& [dtype, products] : {std::pair{DType::f16, 1}, {DType::bf16, 1}, {DType::f32, 1}, {DType::f32, 3}}) {
    for (const int cols : {64, 128}) {
      const bool here = has_portable(dtype, arch) && (cols == 64 || (products == 1 && stages == 3));
      for (int order = 0; order < 4 && here; ++order) {
        const bool left = (order & 1) != 0, right = (order & 2) != 0;
        list.push_back(portable_spec(dtype, false, products, cols, stages, left, right));
        if (dtype != DType::f32) {  // gradients
          list.push_back(portable_spec(dtype, true, products, cols, stages, left, right));
        }
      }
    }
  }
  return list;
}
const KernelList kKernels{"kronecker", list_kernels, kLeastArch};

// ---------------------------------------------------------------------------------------------- costs

/// `mma` with operands that threads copy; `unit` bytes at a time.
double portable_cost(const Problem& problem, const Machine& machine) {
  constexpr cost::Rates k16 = {2.9, 4.5e6, 1.75e6}, kTf32 = {2.6, 3.1e6, 0.75e6};
  constexpr double kSmallCopies = 2.4, kPack = 3.0, kPackRate = 2.6e6;  // µs of a step, µs, bytes per µs
  const Sizes& s = problem.sizes;
  const ProductParams p = params_of(problem);
  const double multiprocessors = machine.multiprocessors;
  const double line = 128.0 / double(size_of(problem.dtype));
  const int cols = s.b > 64 ? portable_cols(p, static_cast<int>(multiprocessors)) : 64;
  cost::Rates rates = problem.dtype == DType::f32 ? kTf32 : k16;
  rates.ops /= machine.precision == Precision::tf32x3 && problem.dtype == DType::f32 ? 3 : 1;
  rates.step = unit_of(p.left, problem.dtype) < 16 ? kSmallCopies : 0;
  const cost::Tiles tiles{.count = double(ceil_div(problem.batch, kRows) * ceil_div(s.b, cols) * s.a * s.d),
                          .at_once = 2 * multiprocessors,
                          .steps = std::ceil(double(s.c) / line),
                          .bytes = 128.0 * double(kRows + cols),
                          .ops = 2.0 * double(kRows * cols) * line,
                          .out = double(kRows * std::min<std::int64_t>(cols, s.b)) * double(size_of(problem.dtype))};
  const bool packs = PackedWeights(problem, p, machine).needed;
  return cost::microseconds(tiles, rates, moved_bytes(problem), multiprocessors) +
         (packs ? cost::pass(kPack, 2 * weight_bytes(s, problem.dtype), kPackRate, multiprocessors) : 0.0);
}

/// FFMA on one element at a time: a step of 16 k takes as long as its loads.
double simple_cost(const Problem& problem, const Machine& machine) {
  constexpr double kStart = 6.0;
  constexpr cost::Rates k16 = {0.0, 1e9, 1e9, 6.3}, kOthers = {0.0, 1e9, 1e9, 4.6};
  const Sizes& s = problem.sizes;
  const ProductParams p = params_of(problem);
  const double multiprocessors = machine.multiprocessors;
  const bool along_l = p.left.fast == 0 || p.out.fast == 0;
  const double deltas = along_l ? std::min(8.0, double(std::bit_ceil(static_cast<std::uint64_t>(s.d)))) : 1.0;
  const cost::Tiles tiles{.count = std::ceil(double(problem.batch) * deltas / (8.0 * kTile)) *
                                   double(ceil_div(s.b, kTile) * s.a) * std::ceil(double(s.d) / deltas),
                          .at_once = multiprocessors,
                          .steps = double(ceil_div(s.c, kDepth)),
                          .bytes = 0,
                          .ops = 0,
                          .out = 0};
  return kStart +
         cost::microseconds(tiles, size_of(problem.dtype) == 2 ? k16 : kOthers, moved_bytes(problem), multiprocessors);
}

}  // namespace

ProductParams product_params(const Problem& problem) {
  const auto& [a, b, c, d] = problem.sizes;
  ProductParams p{};
  p.bias = problem.bias.data;
  p.bias_i = b * d * problem.bias.stride;
  p.bias_l = problem.bias.stride;
  p.bias_col = d * problem.bias.stride;
  p.rows = problem.batch;
  p.cols = b;
  p.depth = p.piece = c;
  p.a = a;
  p.d = d;
  p.pieces = 1;
  p.activation = static_cast<int>(problem.activation);
  return p;
}

void reduce(const WeightProblem& problem, const PartialSums& sums, Context& context) {
  constexpr int kThreads = 256;
  const auto& [a, b, c, d] = problem.sizes;
  const Weights& w = problem.d_w;
  // Many pieces are added by more threads.
  const auto slices_of = [](std::int64_t pieces, int most) {
    return std::min(static_cast<int>(std::bit_ceil(static_cast<std::uint64_t>(ceil_div(pieces, 4)))), most);
  };
  const std::int64_t sizes[2][4] = {{a, b, c, d}, {a, d, b, c}};
  const std::int64_t strides[2][4] = {{w.a, w.b, w.c, w.d}, {w.a, w.d, w.b, w.c}};
  ReduceParams p{};
  std::ranges::copy(sizes[sums.matrices ? 1 : 0], p.sizes);
  std::ranges::copy(strides[sums.matrices ? 1 : 0], p.strides);
  p.partials = sums.weights;
  p.bias_partials = sums.bias;
  p.to = w.data;
  p.bias = problem.d_bias.data;
  p.weights = a * b * c * d;
  p.features = a * b * d;
  p.bias_stride = problem.d_bias.stride;
  p.pieces = static_cast<int>(sums.pieces);
  p.slices = slices_of(sums.pieces, 8);
  p.bias_pieces = static_cast<int>(sums.bias_pieces);
  p.bias_slices = slices_of(sums.bias_pieces, 32);
  p.contiguous = is_aligned(w.data, 16);
  for (std::int64_t axis = 3, next = 1; axis >= 0; next *= p.sizes[axis--]) {
    p.contiguous = p.contiguous && (p.sizes[axis] == 1 || p.strides[axis] == next);
  }
  const int wide = p.weights % 4 == 0 && problem.dtype != DType::f64 ? 4 : 1;
  const std::int64_t ctas = ceil_div(p.weights * p.slices, std::int64_t{kThreads} * wide);
  const std::int64_t bias_ctas = p.bias_partials != nullptr ? ceil_div(p.features * p.bias_slices, kThreads) : 0;
  p.weight_ctas = static_cast<unsigned>(ctas);
  const auto how = driver::device_info(context.device.index).arch >= 90 ? &Kernel::launch_behind : &Kernel::launch;
  (get_kernel(reduce_spec(problem.dtype, wide), context.device.index).*how)(ctas + bias_ctas, kThreads, 0, &p,
                                                                            context.stream);
}

BatchSums::BatchSums(const WeightProblem& problem, Context& context)
    : pieces(problem.d_bias.data == nullptr ? 0
                                            : pieces_of(problem.batch, ceil_div(features_of(problem), 32),
                                                        driver::device_info(context.device.index).multiprocessors)),
      space(context, static_cast<std::size_t>(pieces * features_of(problem)) * sum_bytes(problem.dtype)) {
  if (pieces == 0) {
    return;
  }
  const BatchSumParams p{problem.d_y.data,     problem.d_y.batch,
                         problem.d_y.feature,  problem.batch,
                         features_of(problem), ceil_div(std::max<std::int64_t>(problem.batch, 1), pieces),
                         space.data()};
  get_kernel(batch_spec(problem.dtype), context.device.index)
      .launch(ceil_div(p.features, 32) * pieces, 256, 0, &p, context.stream);
}

namespace generic {
namespace {

bool fits(const Problem& problem, const Config& config, const Machine& machine) {
  const ProductParams p = params_of(problem);
  return config.family == Family::simple || tensor_cores(p, problem.dtype, true, machine) ||
         PackedWeights(problem, p, machine).needed;
}

double cost(const Problem& problem, const Config& config, const Machine& machine) {
  return config.family == Family::simple ? simple_cost(problem, machine) : portable_cost(problem, machine);
}

void launch(const Problem& problem, const Config& config, Context& context) {
  if (config.family == Family::simple) {
    ProductParams p = params_of(problem);
    launch_simple(p, problem.dtype, false, context);
  } else {
    run_portable(problem, context);
  }
}

bool fits(const WeightProblem& /*problem*/, const Config& /*config*/, const Machine& /*machine*/) { return true; }

double cost(const WeightProblem& problem, const Config& /*config*/, const Machine& machine) {
  constexpr double kOps = 1e5;  // of one SM: the other families are faster wherever they fit
  const Sizes& s = problem.sizes;
  return 2.0 * double(problem.batch * s.a * s.b) * double(s.c * s.d) / (kOps * machine.multiprocessors) + 30.0;
}

void launch(const WeightProblem& problem, const Config& /*config*/, Context& context) {
  run_gradient(problem, context);
}

}  // namespace

constinit const Functions<Problem> kProduct{fits, cost, launch};
constinit const Functions<WeightProblem> kGradient{fits, cost, launch};

}  // namespace generic
}  // namespace fretwork::kronecker
