// Exact fp32 on a GPU: which problems fit, tiles, costs, launches.
#include <algorithm>
#include <limits>
#include <optional>
#include <span>
#include <string>

#include "ops/kronecker/cuda/families.h"
#include "ops/kronecker/cuda/params.h"
#include "runtime/alignment.h"
#include "runtime/cost.h"
#include "runtime/cuda_driver.h"
#include "runtime/kernels.h"

namespace fretwork::kronecker::ieee {
namespace {

namespace driver = fretwork::cuda;

constexpr LineTile kProductLines[] = {{4, 2, 2}, {3, 2, 2}, {4, 4, 1}, {3, 4, 1}};
constexpr LineTile kWeightLines[] = {{4, 2, 2}, {3, 2, 2}, {4, 1, 1}, {3, 1, 1}};

int line_bytes(const LineTile& t, bool left_depth, bool right_depth) {
  const int ring = kLineStages * (line_words(t.rows(), left_depth) + line_words(t.cols(), right_depth));
  const int half = t.rows() / 2 * (t.cols() + 1);  // of the tile, on its way out
  return 4 * std::max(ring, half);
}
int delta_bytes(const DeltaTile& t, bool depth_inner) {
  return 4 * kDeltaStages * (delta_words(t.rows(), t.v, depth_inner) + delta_words(t.cols(), t.v, depth_inner));
}
KernelSpec line_kernel(const LineTile& t, bool left_depth, bool right_depth) {
  return kernel_spec("ieee", line_bytes(t, left_depth, right_depth), "ieee::product_ieee", t.quads, t.warp_rows,
                     t.warp_cols, left_depth, right_depth);
}
KernelSpec delta_kernel(const DeltaTile& t, bool depth_inner) {
  return kernel_spec("ieee", delta_bytes(t, depth_inner), "ieee::deltas_ieee", t.v, t.e, t.c, t.warps, depth_inner);
}

constexpr int kNeighbours = 2;  // δ of a thread

std::vector<KernelSpec> list_kernels(const std::string& /*arch*/) {
  std::vector<KernelSpec> list;
  for (const LineTile& t : kProductLines) {
    list.push_back(line_kernel(t, false, false));
    list.push_back(line_kernel(t, true, false));
  }
  for (const LineTile& t : kWeightLines) {
    list.push_back(line_kernel(t, true, true));
    if (t.warp_rows == 1) {
      list.push_back(line_kernel(t, false, false));
    }
  }
  for (const int v : {8, 4, 2}) {
    for (const int c : {16, 12}) {
      list.push_back(delta_kernel({v, kNeighbours, c / kNeighbours, v == 8 ? 8 : 4}, true));
      list.push_back(delta_kernel({v, kNeighbours, c / kNeighbours, 4}, false));
    }
  }
  return list;
}
const KernelList kKernels{"kronecker", list_kernels};

bool here(DType dtype, const Sizes& s, const Machine& machine) {
  constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();  // weights are packed in 32 bits
  return dtype == DType::f32 && s.a * s.c * s.d * (s.b + 3) < kMost && machine.precision == Precision::ieee &&
         machine.number >= 80;
}

/// Every line of an operand whose inner stride is 1 begins at 16 bytes.
bool wide(const ProductOperand& o) {
  const std::int64_t across = o.entry == 1 ? o.line : o.entry;
  return (across | o.i | o.l) % 4 == 0 && is_aligned(o.data, 16);
}

/// Lines are batch rows, or features where the batch is the depth. Strides of size-1 dimensions are set to 0.
ProductOperand operand(const Matrix& m, const Sizes& s, std::int64_t width, bool batch_is_entry) {
  const std::int64_t across = s.d * m.feature;
  return {m.data,
          s.a > 1 ? width * across : 0,
          s.d > 1 ? m.feature : 0,
          batch_is_entry ? across : m.batch,
          batch_is_entry ? m.batch : across,
          (m.batch == 1) != batch_is_entry ? 1 : 2,
          0};
}

ProductParams params_of(const Problem& problem) {
  ProductParams p = product_params(problem);
  p.left = operand(problem.x, problem.sizes, problem.sizes.c, false);
  p.out = operand(problem.y, problem.sizes, problem.sizes.b, false);
  p.l_groups = problem.sizes.d;
  return p;
}

/// The tile with the least to do; the narrow ones read more for each product.
const LineTile& choose(std::span<const LineTile> tiles, std::int64_t rows, std::int64_t cols) {
  const auto cost = [&](const LineTile& t) {
    const double area = double(ceil_div(rows, t.rows()) * t.rows()) * double(ceil_div(cols, t.cols()) * t.cols());
    return area * (1 + 4.0 / t.rows() + 4.0 / t.cols());
  };
  return *std::ranges::min_element(tiles, {}, cost);
}

void launch(ProductParams& p, const LineTile& t, bool left_depth, bool right_depth, Context& context) {
  p.row_tiles = ceil_div(p.rows, t.rows());
  p.col_tiles = ceil_div(p.cols, t.cols());
  p.left.unit = wide(p.left) ? 16 : 4;
  p.right.unit = wide(p.right) ? 16 : 4;
  get_kernel(line_kernel(t, left_depth, right_depth), context.device.index)
      .launch(p.pieces * p.row_tiles * p.a * p.d * p.col_tiles, t.threads(), line_bytes(t, left_depth, right_depth), &p,
              context.stream);
}

void launch(ProductParams& p, const DeltaTile& t, bool depth_inner, Context& context) {
  p.l_groups = p.d / t.v;
  p.row_tiles = ceil_div(p.rows, t.rows());
  p.col_tiles = ceil_div(p.cols, t.cols());
  get_kernel(delta_kernel(t, depth_inner), context.device.index)
      .launch(p.pieces * p.row_tiles * p.a * p.l_groups * p.col_tiles, t.threads(), delta_bytes(t, depth_inner), &p,
              context.stream);
}

/// Neighbouring δ that a CTA takes, or 0: what lies between them must be copied in 16 bytes.
int deltas_of(std::int64_t d, std::int64_t b, std::int64_t c) {
  return d % 8 == 0 ? 8 : d % 4 == 0 ? 4 : d == 2 && b % 2 == 0 && c % 2 == 0 ? 2 : 0;
}
bool along_deltas(const Matrix& m, std::int64_t batch) {
  return m.feature == 1 && (batch == 1 || m.batch % 4 == 0) && is_aligned(m.data, 16);
}

DeltaTile delta_tile(int v, std::int64_t cols, int warps) {
  const bool narrow = ceil_div(cols, 48) * 48 < ceil_div(cols, 64) * 64;
  return {v, kNeighbours, (narrow ? 12 : 16) / kNeighbours, warps};
}

void run_deltas(const Problem& problem, int v, Context& context) {
  const auto& [a, b, c, d] = problem.sizes;
  const Weights& w = problem.w;
  ProductParams p = params_of(problem);
  // Runs of δ are read where they lie. Where they are short, 16 bytes hold those of two neighbouring k.
  const bool runs = w.d == 1 && (w.c == d || (v >= 4 && w.c % 4 == 0));
  const bool plain = runs && w.b % 4 == 0 && (a == 1 || w.a % 4 == 0) && is_aligned(w.data, 16);
  const Workspace packed(context, plain ? 0 : static_cast<std::size_t>(a * b * c * d) * 4);
  p.right = {w.data, w.a, 1, w.b, w.c, 0, 0};
  if (!plain) {  // as b matrices of c × d
    pack({w.data, w.a, w.c, w.d, w.b}, {a, c, d, b}, DType::f32, {true, d}, packed.data(), context);
    p.right = {packed.data(), b * c * d, 1, c * d, d, 0, 0};
  }
  p.vector =
      p.activation == 0 && p.out.l == 1 && p.out.line % 2 == 0 && p.out.entry % 2 == 0 && is_aligned(p.out.data, 8);
  launch(p, delta_tile(v, b, v == 8 ? 8 : 4), true, context);  // warps as measured on an H200
}

/// Weights in lines along the outputs, which lanes read: as they are, or packed.
struct LineWeights {
  Workspace packed;
  ProductOperand operand;

  LineWeights(const Problem& problem, Context& context)
      : packed(context, plain(problem) ? 0 : static_cast<std::size_t>(count(problem.sizes)) * 4),
        operand(as_is(problem)) {
    if (packed.data() != nullptr) {
      const auto& [a, b, c, d] = problem.sizes;
      const std::int64_t line = ceil_div(b, 4) * 4;
      pack(problem.w, problem.sizes, DType::f32, {false, line}, packed.data(), context);
      operand = {packed.data(), d * c * line, c * line, 1, line, 1, 0};
    }
  }
  static std::int64_t count(const Sizes& s) { return s.a * s.d * s.c * ceil_div(s.b, 4) * 4; }
  static ProductOperand as_is(const Problem& problem) {
    const Weights& w = problem.w;
    return {w.data, problem.sizes.a > 1 ? w.a : 0, problem.sizes.d > 1 ? w.d : 0, w.b, w.c, 1, 0};
  }
  static bool plain(const Problem& problem) { return problem.w.b == 1 && wide(as_is(problem)); }
};

void launch_lines(ProductParams& p, const LineWeights& weights, bool depth_inner, Context& context) {
  p.right = weights.operand;
  // Runs of four never cross the end of what exists.
  p.vector = p.activation == 0 && wide(p.out) &&
             (depth_inner ? p.out.entry == 1 && p.cols % 4 == 0 : p.out.line == 1 && p.rows % 4 == 0);
  launch(p, choose(kProductLines, p.rows, p.cols), depth_inner, false, context);
}

void run_lines(const Problem& problem, bool depth_inner, Context& context) {
  ProductParams p = params_of(problem);
  launch_lines(p, LineWeights(problem, context), depth_inner, context);
}

/// A part of the batch at a time, which bounds the workspace.
void run_regrouped(const Problem& problem, Context& context) {
  constexpr std::int64_t kBytes = std::int64_t{512} << 20, kRows = 128;
  const Sizes& s = problem.sizes;
  const std::int64_t wide_x = s.a * s.d * s.c, wide_y = s.a * s.d * s.b;
  const std::int64_t parts = ceil_div(problem.batch * (wide_x + wide_y) * 4, kBytes);
  const std::int64_t most = std::min(problem.batch, ceil_div(ceil_div(problem.batch, parts), kRows) * kRows);
  const LineWeights weights(problem, context);
  const Workspace x(context, static_cast<std::size_t>(most * wide_x) * 4),
      y(context, static_cast<std::size_t>(most * wide_y) * 4);
  for (std::int64_t first = 0; first < problem.batch; first += most) {
    Problem part = problem;
    part.batch = std::min(most, problem.batch - first);
    part.x.data = static_cast<float*>(problem.x.data) + first * problem.x.batch;
    part.y.data = static_cast<float*>(problem.y.data) + first * problem.y.batch;
    regroup(part.x, x.data(), s.c, part.batch, s, 4, false, context);
    ProductParams p = params_of(part);
    p.left = {x.data(), s.d * s.c, s.c, wide_x, 1, 2, 0};
    p.out = {y.data(), s.d * s.b, s.b, wide_y, 1, 2, 0};
    launch_lines(p, weights, true, context);
    regroup(part.y, y.data(), s.b, part.batch, s, 4, true, context);
  }
}

/// Pieces of the batch, in whole waves of what the machine holds at once.
std::int64_t pieces_of(std::int64_t batch, std::int64_t tiles, std::int64_t slots) {
  std::int64_t best = 1;
  double least = std::numeric_limits<double>::max();
  for (std::int64_t pieces = 1; pieces <= std::clamp<std::int64_t>(batch / 256, 1, 256); ++pieces) {
    const double cost = double(ceil_div(tiles * pieces, slots)) / double(pieces) * (1 + 0.005 * double(pieces));
    if (cost < least) {
      least = cost;
      best = pieces;
    }
  }
  return best;
}

/// How a weight gradient is read: along δ, else in lines whose depth, the batch, is inner where `first` is not.
struct GradientOrder {
  int v;
  bool deltas, first;
  explicit GradientOrder(const WeightProblem& p)
      : v(deltas_of(p.sizes.d, p.sizes.b, p.sizes.c)),
        deltas(v > 0 && along_deltas(p.x, p.batch) && along_deltas(p.d_y, p.batch)),
        first(p.sizes.d == 1 && p.x.feature == 1 && p.d_y.feature == 1) {}
  bool any(const WeightProblem& p) const { return deltas || first || (p.x.batch == 1 && p.d_y.batch == 1); }
};

// ---------------------------------------------------------------------------------------------- costs

/// FFMA operations per µs of one SM, in lines, and along eight neighbouring δ; along four they are as fast.
constexpr double kLineOps = 3.3e5, kDeltaOps = 2.4e5, kStart = 2.5, kL2 = 6e6, kPack = 3.5;

/// `rows` × `cols` tiles of `threads`, of which an SM has 256 at once.
double tile_cost(const Problem& p, std::int64_t rows, std::int64_t cols, std::int64_t v, int threads, double ops,
                 double multiprocessors) {
  const Sizes& s = p.sizes;
  const double together = 256.0 / threads;
  const cost::Tiles tiles{.count = double(ceil_div(p.batch, rows) * ceil_div(s.b, cols) * s.a * ceil_div(s.d, v)),
                          .at_once = multiprocessors * together,
                          .steps = double(s.c),
                          .bytes = 4.0 * double((rows + cols) * v),
                          .ops = 2.0 * double(rows * cols * v),
                          .out = 4.0 * double(rows * cols * v)};
  return cost::microseconds(tiles, {kStart, kL2, ops / together}, moved_bytes(p), multiprocessors);
}

double line_cost(const Problem& p, double multiprocessors) {
  const LineTile& t = choose(kProductLines, p.batch, p.sizes.b);
  return tile_cost(p, t.rows(), t.cols(), 1, t.threads(), kLineOps, multiprocessors) +
         (LineWeights::plain(p) ? 0.0 : kPack);
}

bool reads_deltas(const Problem& p) {
  return deltas_of(p.sizes.d, p.sizes.b, p.sizes.c) > 0 && along_deltas(p.x, p.batch);
}

bool fits(const Problem& p, const Config& config, const Machine& machine) {
  const Sizes& s = p.sizes;
  if (!here(p.dtype, s, machine)) {
    return false;
  }
  if (config.family == Family::ieee_regroup) {
    return s.d > 1 && reads_deltas(p) && regroups(p.x, s.c, p.batch, s, 4) && regroups(p.y, s.b, p.batch, s, 4);
  }
  return reads_deltas(p) || (s.d == 1 && p.x.feature == 1) || p.x.batch == 1;
}

double cost(const Problem& p, const Config& config, const Machine& machine) {
  const Sizes& s = p.sizes;
  const double multiprocessors = machine.multiprocessors;
  if (config.family == Family::ieee_regroup) {
    return line_cost(p, multiprocessors) + regroup_cost(s, p.batch, p.dtype, multiprocessors);
  }
  if (!reads_deltas(p)) {
    return line_cost(p, multiprocessors);
  }
  const int v = deltas_of(s.d, s.b, s.c);
  const DeltaTile t = delta_tile(v, s.b, v == 8 ? 8 : 4);
  return tile_cost(p, t.rows(), t.cols(), v, t.threads(), v == 8 ? kDeltaOps : kLineOps, multiprocessors);
}

void launch(const Problem& p, const Config& config, Context& context) {
  if (config.family == Family::ieee_regroup) {
    run_regrouped(p, context);
  } else if (reads_deltas(p)) {
    run_deltas(p, deltas_of(p.sizes.d, p.sizes.b, p.sizes.c), context);
  } else {
    run_lines(p, p.sizes.d == 1 && p.x.feature == 1, context);
  }
}

bool fits(const WeightProblem& p, const Config& /*config*/, const Machine& machine) {
  return here(p.dtype, p.sizes, machine) && GradientOrder(p).any(p);
}

double cost(const WeightProblem& p, const Config& /*config*/, const Machine& machine) {
  const Sizes& s = p.sizes;  // the only other family is slower on every problem
  return kStart + 2.0 * double(p.batch * s.a * s.b) * double(s.c * s.d) / (kDeltaOps * machine.multiprocessors);
}

void launch(const WeightProblem& problem, const Config& /*config*/, Context& context) {
  const auto& [a, b, c, d] = problem.sizes;
  const auto [v, deltas, first] = GradientOrder(problem);
  ProductParams p{};
  p.left = operand(problem.d_y, problem.sizes, b, true);
  p.right = operand(problem.x, problem.sizes, c, true);
  p.rows = b;
  p.cols = c;
  p.depth = problem.batch;
  p.a = a;
  p.d = d;
  p.out_piece = a * b * c * d;
  const LineTile& lines = choose(kWeightLines, b, c);
  const DeltaTile neighbours = delta_tile(v, c, 4);
  const std::int64_t tiles = deltas ? a * (d / v) * ceil_div(b, neighbours.rows()) * ceil_div(c, neighbours.cols())
                                    : a * d * ceil_div(b, lines.rows()) * ceil_div(c, lines.cols());
  const std::int64_t slots = driver::device_info(context.device.index).multiprocessors * std::int64_t{256} /
                             (deltas ? neighbours.threads() : lines.threads());
  p.pieces = pieces_of(problem.batch, tiles, slots);
  p.piece = ceil_div(std::max<std::int64_t>(problem.batch, 1), p.pieces * kLineStep) * kLineStep;
  const Workspace sums(context, static_cast<std::size_t>(p.pieces * p.out_piece) * 4);
  if (deltas) {
    p.out = {sums.data(), b * c * d, 1, c * d, d, 0, 0};
    p.vector = true;
    launch(p, neighbours, false, context);
  } else {
    p.out = {sums.data(), d * b * c, b * c, c, 1, 2, 0};
    launch(p, lines, !first, !first, context);
  }
  const BatchSums bias(problem, context);
  reduce(problem, {sums.data(), p.pieces, !deltas, bias.space.data(), bias.pieces}, context);
}

}  // namespace

constinit const Functions<Problem> kProduct{fits, cost, launch};
constinit const Functions<WeightProblem> kGradient{fits, cost, launch};

}  // namespace fretwork::kronecker::ieee
