// Products on TMA and wgmma: which configs fit, their cost, tensor maps, launches.
#include "ops/kronecker/cuda/hopper.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <optional>
#include <string>
#include <vector>

#include "ops/kronecker/cuda/families.h"

namespace fretwork::kronecker::hopper {
namespace {

constexpr bool has_room(int width, int columns) {  // with the bias and barriers of a product
  return shared_bytes(width) + 2 * columns * 4 + stages(width) * 16 <= 227 << 10;
}
static_assert(has_room(64, 4 * 64) && has_room(128, 2 * 128) && has_room(192, 192) && has_room(256, 256));

// ---------------------------------------------------------------------------------------------- kernels

/// Template arguments of `product`.
struct Instance {
  DType dtype;
  int width;
  bool last = false, weights_k = true, dense = false;
  int deltas = 1;

  KernelSpec spec() const {
    return kernel_spec("hopper_product", shared(), "hopper::product", dtype, width, last, weights_k, dense, deltas);
  }
  int shared() const { return deltas > 1 ? shared_bytes(width) : product_shared_bytes(width); }
  /// In the table, by type, layout, axis of the weights and width.
  std::size_t place() const {
    const std::size_t layout = deltas > 1 ? static_cast<std::size_t>(2 + deltas / 2) : dense ? 2 : last ? 1 : 0;
    return ((type_index(dtype) * 5 + layout) * 2 + (weights_k ? 1 : 0)) * 4 + static_cast<std::size_t>(width / 64 - 1);
  }
};

std::vector<KernelSpec> list_kernels(const std::string& arch) {
  std::vector<KernelSpec> list;
  if (arch != "sm_90a") {
    return list;
  }
  for (const auto& [deltas, width] : {std::pair{2, 64}, {2, 128}, {4, 64}}) {
    list.push_back(Instance{DType::f32, width, false, true, false, deltas}.spec());
  }
  for (const DType dtype : {DType::f16, DType::bf16, DType::f32}) {
    for (const int width : kWidths) {
      for (const bool along_k : {true, false}) {
        if (along_k || dtype != DType::f32) {
          list.push_back(Instance{dtype, width, false, along_k, true}.spec());
          list.push_back(Instance{dtype, width, false, along_k}.spec());
          list.push_back(Instance{dtype, width, true, along_k}.spec());
        }
      }
    }
  }
  return list;
}
const KernelList kKernels{"kronecker", list_kernels};

constinit KernelTable<3 * 5 * 2 * 4> kernels;

// ---------------------------------------------------------------------------------------------- operands

/// x, batch last with lines that begin anywhere, if it has a view in which features k·d to k·d + d - 1 of a block are
/// one line, which begins where the copy engine can go, and y could have one: lines of one δ then begin at the same
/// place of a unit of 16 bytes in both. Tiles begin with the unit, and their rows outside the batch are not stored.
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

/// The same of a product. Batch 1 uses the same kernel.
std::optional<Layout> layout_of(const Problem& p) {
  const Sizes& s = p.sizes;
  const auto layout = shared_layout(p.x, p.y, p.batch, s, p.dtype);
  const bool alone = p.batch == 1 && s.a * s.d * (s.b | s.c) * bytes_of(p.dtype) % 16 != 0;
  if (layout && layout->y.can_be_written() && (layout->last || !alone)) {
    return layout;
  }
  if (p.x.batch != 1 || p.y.batch != 1) {
    return std::nullopt;
  }
  return Layout{true, neighbour_view(p).value_or(TiledView{}), {}, true};
}

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

// ---------------------------------------------------------------------------------------------- launches

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
void launch(const Instance& wanted, ProductParams params, bool behind, const Context& context) {
  const int multiprocessors = driver::device_info(context.device.index).multiprocessors;
  const Kernel& kernel = kernels.get(wanted.place(), context.device.index, [&] { return wanted.spec(); });
  params.behind = behind;
  const auto how = behind ? &Kernel::launch_behind : &Kernel::launch;
  (kernel.*how)(std::min(params.total, multiprocessors), kThreads, wanted.shared(), &params, context.stream);
}

void launch_product(const Problem& p, const Layout& layout, const Map& weights, bool weights_k, int width, bool behind,
                    Context& context) {
  const bool once = layout.last && p.sizes.b <= width;  // one tile has all columns: x is not read again
  ProductParams params = product_params(p, p.sizes, layout.row_tiles(p.batch), width, once ? kMost : 16);
  set_operands(params, p, layout);
  params.weights = weights;
  // Clearing the counter takes some µs, which pays for launches of a hundred µs or more.
  const bool fetched = params.mapped || params.neighbours;  // by the copy engine
  const bool in_turns = !fetched || params.total < 96 * driver::device_info(context.device.index).multiprocessors;
  const Workspace taken(context, in_turns ? 0 : sizeof(int));
  params.taken = static_cast<int*>(taken.data());
  if (!in_turns) {
    params.together = once ? 512 / (kRows * bytes_of(p.dtype)) : 1;  // so many bytes of a line in memory
    driver::fill_zero(taken.data(), sizeof(int), context.stream);
  }
  launch({p.dtype, width, layout.last, weights_k}, params, behind && in_turns, context);
}

void run_as_it_lies(const Problem& p, int width, Context& context) {
  const Matrices matrices(p.w, p.sizes, p.dtype);
  const Workspace space(context, matrices.bytes());
  const Map weights = operand_map(matrices.view(space, context), matrices.unit_is_k(), width);
  launch_product(p, *layout_of(p), weights, matrices.unit_is_k(), width, matrices.bytes() > 0, context);
}

/// The δ of a block stay together.
std::optional<Layout> interleaved(const Problem& p) {
  const auto layout = interleaved_layout(p.x, p.y, p.batch, p.sizes, p.dtype);
  return layout && layout->y.can_be_written() ? layout : std::nullopt;
}
void run_interleaved(const Problem& p, int width, Context& context) {
  const Layout rows = *interleaved(p);
  const Sizes& s = p.sizes;
  const int deltas = narrowed(s.d);
  const Matrices matrices(p.w, s, p.dtype);
  const Workspace space(context, matrices.bytes());
  ProductParams params = product_params(p, dense_sizes(s), ceil_div(p.batch, kRows), width * deltas, 16);
  params.x = operand_map(rows.x, true, kRows);
  params.weights = matrices.view(space, context)
                       .map(static_cast<std::uint32_t>(32 / deltas), static_cast<std::uint32_t>(width),
                            static_cast<std::uint32_t>(deltas));
  params.y = operand_map(rows.y, true, 64);
  launch({p.dtype, width, false, true, false, deltas}, params, true, context);
}

/// Batch first, the d products of each block as one dense matrix: y, x and the weights of pattern (a, b·d, c·d, 1).
struct Dense {
  Problem problem;
  Layout layout;
  Lines lines;
  std::size_t bytes;
};
std::optional<Dense> dense(const Problem& p) {
  const Sizes& s = p.sizes;
  Problem one = p;
  one.sizes = dense_sizes(s);
  const auto layout = dense_layout(p.x, p.y, p.batch, s, p.dtype);
  if (!layout || !layout->y.can_be_written() || s.a * s.b * s.d >= kMost / (s.c * s.d + 8) ||
      ceil_div(p.batch, kRows) >= kMost / (s.a * ceil_div(s.b * s.d, kWidths[0]))) {
    return std::nullopt;
  }
  const bool along_k = p.dtype == DType::f32 || std::llabs(p.w.c) <= std::llabs(p.w.b);
  const std::int64_t line = ceil_div((along_k ? s.c : s.b) * s.d, kMapUnit) * kMapUnit;
  const auto bytes = static_cast<std::size_t>(s.a * s.d * (along_k ? s.b : s.c) * line) * size_of(p.dtype);
  return Dense{one, *layout, {along_k, line, p.dtype == DType::f32}, bytes};
}

void run_dense(const Problem& p, int width, Context& context) {
  const Dense one = *dense(p);
  const Sizes &s = p.sizes, &whole = one.problem.sizes;
  const auto& [along_k, line, tf32] = one.lines;
  const Workspace space(context, one.bytes);
  pack_dense(p.w, s, p.dtype, one.lines, space.data(), context);
  const std::int64_t entries = along_k ? whole.c : whole.b, lines = along_k ? whole.b : whole.c;
  const auto weights =
      *make_tiled_view(space.data(), {entries, lines, 1, s.a}, {1, line, 0, lines * line}, bytes_of(p.dtype));
  ProductParams params = product_params(one.problem, whole, ceil_div(p.batch, kRows), width, 16);
  set_operands(params, p, one.layout);
  params.weights = operand_map(weights, along_k, width);
  launch({p.dtype, width, false, along_k, true}, params, true, context);
}

/// A part of the batch at a time, which bounds the workspace.
void run_regrouped(const Problem& p, int width, Context& context) {
  constexpr std::int64_t kBytes = std::int64_t{256} << 20;
  const Sizes& s = p.sizes;
  const int bytes = bytes_of(p.dtype);
  const std::int64_t row = s.a * s.d * (s.b + s.c) * bytes;
  const std::int64_t most = std::min(p.batch, std::max<std::int64_t>(kBytes / row / kRows, 1) * kRows);
  const Matrices matrices(p.w, s, p.dtype);
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

// ---------------------------------------------------------------------------------------------- costs

/// a·d products of b × c in tiles of `width` columns, as `product` computes them.
cost::Tiles tiles_of(const Sizes& s, std::int64_t row_tiles, int width, DType dtype, double multiprocessors) {
  const double line = double(line_of(dtype));
  return {.count = double(row_tiles * ceil_div(s.b, width) * s.a * s.d),
          .at_once = multiprocessors,
          .steps = std::ceil(double(s.c) / line),
          .bytes = double(stage_bytes(width)),
          .ops = 2.0 * kRows * width * line,
          .out = kRows * double(std::min<std::int64_t>(width, s.b)) * bytes_of(dtype)};
}

const cost::Rates& rates_of(DType dtype) { return dtype == DType::f32 ? kRatesTf32 : kRates16; }

/// Packing, `copies` of each weight written. The product is launched behind it and waits little.
double pack_cost(const Problem& p, std::int64_t copies, double multiprocessors) {
  constexpr double kLaunchBehind = 1.5;
  const double bytes = double(p.sizes.a * p.sizes.b * p.sizes.c * p.sizes.d * (1 + copies)) * bytes_of(p.dtype);
  return cost::pass(kLaunchBehind, bytes, p.dtype == DType::f32 ? 3.1e6 : 3.9e6, multiprocessors);
}

/// Weights of d = 1 are read where they lie if the copy engine can.
double weights_cost(const Problem& p, double multiprocessors) {
  return Matrices(p.w, p.sizes, p.dtype).bytes() > 0 ? pack_cost(p, 1, multiprocessors) : 0.0;
}

double direct_cost(const Problem& p, int width, double multiprocessors) {
  // Threads that copy unaligned lines need so many µs for a step of 128 rows, whatever else happens, and for 64 columns
  // of results.
  constexpr double kByThreads16 = 1.1, kByThreadsTf32 = 1.3, kStored16 = 1.7;
  const auto layout = layout_of(p);
  cost::Rates rates = rates_of(p.dtype);
  if (layout->by_threads && !layout->neighbours()) {
    rates.step = p.dtype == DType::f32 ? kByThreadsTf32 : kByThreads16;
    rates.start += p.dtype == DType::f32 ? 0 : kStored16 * width / 64;
  }
  return cost::microseconds(tiles_of(p.sizes, layout->row_tiles(p.batch), width, p.dtype, multiprocessors), rates,
                            moved_bytes(p), multiprocessors) +
         weights_cost(p, multiprocessors);
}

double regrouped_cost(const Problem& p, int width, double multiprocessors) {
  return cost::microseconds(tiles_of(p.sizes, ceil_div(p.batch, kRows), width, p.dtype, multiprocessors),
                            rates_of(p.dtype), moved_bytes(p), multiprocessors) +
         pack_cost(p, 1, multiprocessors) + regroup_cost(p.sizes, p.batch, p.dtype, multiprocessors);
}

double dense_cost(const Problem& p, int width, double multiprocessors) {
  return cost::microseconds(tiles_of(dense_sizes(p.sizes), ceil_div(p.batch, kRows), width, p.dtype, multiprocessors),
                            rates_of(p.dtype), moved_bytes(p), multiprocessors) +
         1.2 * pack_cost(p, p.sizes.d, multiprocessors);  // zeros are written too
}

double interleaved_cost(const Problem& p, int width, double multiprocessors) {
  constexpr cost::Rates kRates = {0.8, 7.0e6, 2.7e6};
  cost::Tiles tiles = tiles_of({p.sizes.a, p.sizes.b, p.sizes.c * p.sizes.d, 1}, ceil_div(p.batch, kRows), width,
                               p.dtype, multiprocessors);
  tiles.out *= double(p.sizes.d);
  return cost::microseconds(tiles, kRates, moved_bytes(p), multiprocessors) + 1.2 + pack_cost(p, 1, multiprocessors);
}

/// Tiles are counted in 31 bits.
bool few_tiles(const Problem& p, int width) {
  const Sizes& s = p.sizes;
  return ceil_div(p.batch, kRows) < kMost / (ceil_div(s.b, std::int64_t{width}) * s.a * s.d);
}

bool fits(const Problem& p, const Config& config, const Machine& machine) {
  const Sizes& s = p.sizes;
  const int width = config.first;
  if (std::ranges::find(kWidths, width) == std::end(kWidths) || !suits(s, p.batch, p.dtype, machine) ||
      !few_tiles(p, width)) {
    return false;
  }
  switch (config.family) {
    case Family::hopper:
      return layout_of(p).has_value();
    case Family::regroup:
      return s.d > 1 && regroups(p.x, s.c, p.batch, s, bytes_of(p.dtype)) &&
             regroups(p.y, s.b, p.batch, s, bytes_of(p.dtype));
    case Family::dense:
      return dense(p).has_value();
    case Family::interleaved:  // the sums of all δ must fit into registers
      return width * s.d <= 256 && interleaved(p).has_value();
    default:
      return false;
  }
}

double cost(const Problem& p, const Config& config, const Machine& machine) {
  const int width = config.first;
  const double multiprocessors = machine.multiprocessors;
  switch (config.family) {
    case Family::regroup:
      return regrouped_cost(p, width, multiprocessors);
    case Family::dense:
      return dense_cost(p, width, multiprocessors);
    case Family::interleaved:
      return interleaved_cost(p, width, multiprocessors);
    default:
      return direct_cost(p, width, multiprocessors);
  }
}

void launch(const Problem& p, const Config& config, Context& context) {
  const int width = config.first;
  switch (config.family) {
    case Family::regroup:
      return run_regrouped(p, width, context);
    case Family::dense:
      return run_dense(p, width, context);
    case Family::interleaved:
      return run_interleaved(p, width, context);
    default:
      return run_as_it_lies(p, width, context);
  }
}

}  // namespace

std::span<const int> widths() { return kWidths; }

constinit const Functions<Problem> kProduct{fits, cost, launch};

}  // namespace fretwork::kronecker::hopper
