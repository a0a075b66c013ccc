// Attention on any GPU: gets the plan, makes operands readable, launches once per component.
#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/divide.h"
#include "fretwork/error.h"
#include "ops/attention/cuda/families.h"
#include "ops/attention/cuda/operands.h"
#include "runtime/cuda_driver.h"
#include "runtime/kernels.h"

namespace fretwork::attention_op {
namespace {

using portable::score_arg;

namespace driver = fretwork::cuda;

constexpr const char* kForwardSource = "ops/attention/cuda/portable.cuh";
constexpr const char* kBackwardSource = "ops/attention/cuda/portable_backward.cuh";
constexpr const char* kSimpleSource = "ops/attention/cuda/simple.cuh";
constexpr int kDepths[] = {32, 64, 96, 128, 192, 256, 384, 512};  // of 16-bit kernels
constexpr int kSimpleDepths[] = {64, 128, 256, 512};
constexpr int kMostBiasDepth = 256;  // of attention_bias_gradient
constexpr int kTables = 4096;        // more than a kernel's static shared memory

// -------------------------------------------------------------------------------------------------- kernels

/// What a kernel makes; d_keys and d_values apart where a head dim is above 128.
enum class Pass { forward, d_queries, d_keys_values, d_keys, d_values };

/// Which kernel, and its sizes.
struct KernelConfig {
  Pass pass;
  DType dtype;
  int depth;
  bool extras;
  bool tf32 = false;  ///< float products on the tensor cores

  bool simple() const { return dtype == DType::f32; }
  KernelShape shape() const {
    return simple()                ? simple_shape(depth, pass == Pass::forward ? 3 : 4, tf32)
           : pass == Pass::forward ? forward_shape(depth, extras)
                                   : backward_shape(depth, extras);
  }
  TileShape tile() const { return {shape().rows, shape().cols}; }
  std::size_t number() const {
    std::size_t n = 0;
    while (kDepths[n] != depth) {
      ++n;
    }
    n = n * 5 + static_cast<std::size_t>(pass);
    return (n * 2 + (simple() ? tf32 : extras)) * 3 + (dtype == DType::f32 ? 0 : dtype == DType::f16 ? 1 : 2);
  }
  KernelSpec spec() const {
    const std::string size = std::to_string(depth);
    if (simple()) {
      const std::string begin = pass == Pass::forward     ? "fretwork::simple_forward<" + size
                                : pass == Pass::d_queries ? "fretwork::simple_backward<" + size + ", false"
                                                          : "fretwork::simple_backward<" + size + ", true";
      return {kSimpleSource, begin + (tf32 ? ", true>" : ", false>"), shape().shared_bytes};
    }
    const std::string begin = std::string(device_type(dtype)) + ", " + size, end = extras ? ", true>" : ", false>";
    const char* const which = pass == Pass::d_queries       ? ", false, true, false"
                              : pass == Pass::d_keys_values ? ", true, true, true"
                              : pass == Pass::d_keys        ? ", true, true, false"
                                                            : ", true, false, true";
    const bool forward = pass == Pass::forward;
    return {forward ? kForwardSource : kBackwardSource,
            (forward ? "fretwork::attention_forward<" + begin : "fretwork::attention_backward<" + begin + which) + end,
            shape().shared_bytes};
  }
  const Kernel& kernel(int device) const {
    if (const int there = driver::device_info(device).shared_per_block; shape().shared_bytes > there) {
      throw Error("attention", "q",
                  "a head size whose tiles fit the " + std::to_string(there) + " bytes of shared memory on this GPU",
                  std::to_string(depth) + ", which needs " + std::to_string(shape().shared_bytes));
    }
    return table.get(number(), device, [&] { return spec(); });
  }
  static inline KernelTable<std::size(kDepths) * 5 * 2 * 3> table;
};

/// The smallest depth that a kernel is made for.
template <std::size_t N>
int depth_for(const int (&depths)[N], std::int64_t depth) {
  const int* const found = std::lower_bound(std::begin(depths), std::end(depths), depth);
  if (found == std::end(depths)) {
    throw Error("attention", "q", "head sizes up to " + std::to_string(depths[N - 1]), std::to_string(depth));
  }
  return *found;
}

KernelConfig config_for(Pass pass, const Problem& p, const Context& context) {
  const std::int64_t deepest = std::max(p.depth, p.value_depth);
  const bool simple = p.dtype == DType::f32;
  KernelConfig config{pass, p.dtype, simple ? depth_for(kSimpleDepths, deepest) : depth_for(kDepths, deepest),
                      scored(p), simple && context.precision == Precision::tf32};
  if (config.shape().shared_bytes > driver::device_info(context.device.index).shared_per_block - kTables) {
    config.tf32 = false;  // exact, which needs less
  }
  return config;
}

/// The kernel that makes the gradient of a bias: on the tensor cores, or exact on FFMA for fp32 and where shared memory
/// has no room for two stages. `keys`: the plan's rows are keys; `row_sums`: its columns are summed.
struct BiasKernel {
  DType dtype;
  int depth;
  bool simple, keys, row_sums, extras;  ///< extras: more than a bias is done to scores

  static BiasKernel of(const Problem& p, bool keys, bool row_sums, const Context& context) {
    const std::int64_t deepest = std::max(p.depth, p.value_depth);
    if (p.dtype != DType::f32 && deepest <= kMostBiasDepth) {
      const bool extras = p.softcap > 0 || p.slopes.data != nullptr || p.dropout.rate > 0;
      const BiasKernel made{p.dtype, depth_for(kDepths, deepest), false, keys, row_sums, extras};
      if (made.shape().shared_bytes <= driver::device_info(context.device.index).shared_per_block - 2 * kTables) {
        return made;
      }
    }
    return {p.dtype, depth_for(kSimpleDepths, deepest), true, keys, row_sums, true};
  }
  KernelShape shape() const { return simple ? simple_shape(depth, 4) : bias_shape(depth); }
  KernelSpec spec() const {
    const auto flag = [](bool value) { return value ? ", true" : ", false"; };
    const std::string begin = simple ? "fretwork::bias_gradient<" : "fretwork::attention_bias_gradient<";
    return {simple ? kSimpleSource : kBackwardSource,
            begin + device_type(dtype) + ", " + std::to_string(depth) + flag(keys) + flag(row_sums) +
                (simple ? "" : flag(extras)) + ">",
            shape().shared_bytes};
  }
};

constexpr std::pair<bool, bool> kBiasKernels[] = {{false, false}, {false, true}, {true, true}};  // keys, row_sums

std::vector<KernelSpec> list_kernels(const std::string& /*arch*/) {
  std::vector<KernelSpec> list;
  for (const int depth : kSimpleDepths) {
    for (const Pass pass : {Pass::forward, Pass::d_queries, Pass::d_keys_values}) {
      list.push_back(KernelConfig{pass, DType::f32, depth, true, false}.spec());
      list.push_back(KernelConfig{pass, DType::f32, depth, true, true}.spec());
    }
    for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
      for (const auto& [keys, row_sums] : kBiasKernels) {
        list.push_back(BiasKernel{dtype, depth, true, keys, row_sums, true}.spec());
      }
    }
  }
  for (const DType dtype : {DType::f16, DType::bf16}) {
    for (const int depth : kDepths) {
      for (const bool extras : {false, true}) {
        const auto add = [&](Pass pass) { list.push_back(KernelConfig{pass, dtype, depth, extras}.spec()); };
        for (const Pass pass : {Pass::forward, Pass::d_queries, depth <= 128 ? Pass::d_keys_values : Pass::d_keys}) {
          add(pass);
        }
        if (depth > 128) {
          add(Pass::d_values);
        }
        for (const auto& [keys, row_sums] : kBiasKernels) {
          if (depth <= kMostBiasDepth) {
            list.push_back(BiasKernel{dtype, depth, false, keys, row_sums, extras}.spec());
          }
        }
      }
    }
  }
  return list;
}
const KernelList kKernels{"attention", list_kernels};

// ---------------------------------------------------------------------------------------------------- heads

/// A set with its plan and heads, ready to launch.
struct Prepared {
  std::shared_ptr<const DevicePlan> plan;
  DeviceHeads heads;
  std::vector<ComponentArg> components;            ///< the plan's, with the columns that are seen
  std::vector<std::unique_ptr<SeenColumns>> seen;  ///< where they are

  std::int64_t grid(const ComponentArg& component) const {
    return static_cast<std::int64_t>(component.row_tile_count) * heads.arg.batch * heads.arg.count;
  }
};

/// Has a component's columns be those that are seen.
std::unique_ptr<SeenColumns> see(const Problem& p, ComponentArg& component, int side, Context& context) {
  SeenParams params{};
  params.order = component.col_order;
  params.tiles = component.col_tiles;
  params.used = component.used;
  params.side = side;
  params.tile_count = component.col_tile_count;
  auto made = std::make_unique<SeenColumns>(p, params, context);
  component.seen = made->first();
  component.used = made->words();
  return made;
}

std::vector<Prepared> prepare(const Problem& p, const TileShape& tile, bool keys, Context& context) {
  std::vector<Prepared> all;
  for (const PatternHeads& set : heads_of(p)) {
    all.push_back({device_plan(*set.thing, tile, keys, context), DeviceHeads(p, set, keys, context), {}, {}});
    Prepared& made = all.back();
    made.components = made.plan->components;
    for (ComponentArg& component : made.components) {
      if (p.padding.data != nullptr && !keys) {
        made.seen.push_back(see(p, component, tile.cols, context));
      }
    }
  }
  return all;
}

bool all_cover(const std::vector<Prepared>& sets) {
  return std::all_of(sets.begin(), sets.end(), [](const Prepared& s) { return s.plan->covers_rows; });
}
bool one_component_each(const std::vector<Prepared>& sets) {
  return std::all_of(sets.begin(), sets.end(), [](const Prepared& s) { return s.plan->components.size() <= 1; });
}

// ------------------------------------------------------------------------------------------------------ forward

/// All but where results go, and what they are merged with.
ForwardParams forward_params(const Problem& p, const Input& q, const Input& k, const Input& v) {
  ForwardParams params{};
  params.score = score_arg(p);
  params.q = q.arg();
  params.k = k.arg();
  params.v = v.arg();
  params.queries = static_cast<int>(p.rows);
  params.depth = static_cast<int>(p.depth);
  params.value_depth = static_cast<int>(p.value_depth);
  return params;
}

/// `merge`: results hold something before the first component.
void launch_forward(const KernelConfig& config, const std::vector<Prepared>& sets, ForwardParams& params, bool merge,
                    Context& context) {
  const Kernel& kernel = config.kernel(context.device.index);
  const KernelShape shape = config.shape();
  for (const Prepared& set : sets) {
    params.heads = set.heads.arg;
    params.merge = merge;
    for (const ComponentArg& component : set.components) {
      params.plan = component;
      if (const std::int64_t grid = set.grid(component); grid > 0) {
        kernel.launch(grid, 32 * shape.warps, shape.shared_bytes, &params, context.stream);
      }
      params.merge = true;
    }
  }
}

// ------------------------------------------------------------------------------------------------- gradients

/// A large log-sum-exp has lost its smaller part to rounding: the forward again, for tiles that have such rows.
void find_sums(const Problem& p, const Input& q, const Input& k, const Input& v, RowSum* sums, Context& context) {
  const KernelConfig config = config_for(Pass::forward, p, context);
  begin_sums(p, sums, {}, context);
  ForwardParams params = forward_params(p, q, k, v);
  params.lse = output_arg(p.lse, DType::f32);
  params.sums = sums;
  params.again = true;
  launch_forward(config, prepare(p, config.tile(), false, context), params, true, context);
}

std::size_t stats_bytes(const Problem& p) {
  return static_cast<std::size_t>(p.batch * p.heads * p.rows) * (scored(p) ? sizeof(ScoreStats) : sizeof(RowStats));
}

/// What the gradients of a call read.
struct Given {
  const BackwardProblem& problem;
  Input q, k, v, d_o;
  Workspace stats;
  const Workspace sums;  ///< of rows with a large log-sum-exp

  Given(const BackwardProblem& b, Context& context)
      : problem(b),
        q(b.forward.q, {b.forward.batch, b.forward.heads, b.forward.rows, b.forward.depth}, b.forward.dtype, context),
        k(b.forward.k, {b.forward.batch, b.forward.kv_heads, b.forward.cols, b.forward.depth}, b.forward.dtype,
          context),
        v(b.forward.v, {b.forward.batch, b.forward.kv_heads, b.forward.cols, b.forward.value_depth}, b.forward.dtype,
          context),
        d_o(b.d_o, {b.forward.batch, b.forward.heads, b.forward.rows, b.forward.value_depth}, b.forward.dtype, context),
        stats(context, stats_bytes(b.forward)),
        sums(context, may_be_large(b.forward) ? sums_bytes(b.forward) : 0) {
    const Problem& p = b.forward;
    if (sums.data() != nullptr) {
      find_sums(p, q, k, v, static_cast<RowSum*>(sums.data()), context);
    }
    launch_statistics(b, scored(p), stats.data(), static_cast<const RowSum*>(sums.data()), context);
  }

 private:
  /// Where a log-sum-exp may be much larger than a product with the scale is.
  static bool may_be_large(const Problem& p) { return p.bias.data != nullptr || p.slopes.data != nullptr; }
};

BackwardParams backward_params(const Given& given) {
  const Problem& p = given.problem.forward;
  BackwardParams params{};
  params.score = score_arg(p);
  params.stats = given.stats.data();
  params.queries = static_cast<int>(p.rows);
  params.depth = static_cast<int>(p.depth);
  params.value_depth = static_cast<int>(p.value_depth);
  return params;
}

void launch_all(const KernelConfig& config, const std::vector<Prepared>& sets, BackwardParams& params,
                Context& context) {
  const Kernel& kernel = config.kernel(context.device.index);
  const KernelShape shape = config.shape();
  for (const Prepared& set : sets) {
    params.heads = set.heads.arg;
    for (const ComponentArg& component : set.components) {
      params.plan = component;
      if (const std::int64_t grid = set.grid(component); grid > 0) {
        kernel.launch(grid, 32 * shape.warps, shape.shared_bytes, &params, context.stream);
      }
    }
  }
}

void query_gradient(const Given& given, Context& context) {
  const Problem& p = given.problem.forward;
  const KernelConfig config = config_for(Pass::d_queries, p, context);
  const std::vector<Prepared> sets = prepare(p, config.tile(), false, context);
  BackwardParams params = backward_params(given);
  params.first = given.q.arg();
  params.second = given.d_o.arg();
  params.other_first = given.k.arg();
  params.other_second = given.v.arg();
  params.add = !one_component_each(sets);
  Target d_q(given.problem.d_q, {p.batch, p.heads, p.rows, p.depth}, p.dtype, params.add, !all_cover(sets), context);
  params.d_first = d_q.arg();
  launch_all(config, sets, params, context);
  d_q.finish();
}

/// Of keys and values: one kernel, or one for each that is wanted where a row is deep.
std::vector<KernelConfig> key_configs(const BackwardProblem& b, const Context& context) {
  const KernelConfig both = config_for(Pass::d_keys_values, b.forward, context);
  if (both.simple() || both.depth <= 128) {
    return {both};
  }
  std::vector<KernelConfig> apart;
  for (const auto& [pass, wanted] : {std::pair{Pass::d_keys, b.d_k.data}, std::pair{Pass::d_values, b.d_v.data}}) {
    if (wanted != nullptr) {
      apart.push_back(config_for(pass, b.forward, context));
    }
  }
  return apart;
}

void key_gradients(const Given& given, Context& context) {
  const BackwardProblem& b = given.problem;
  const Problem& p = b.forward;
  const std::vector<KernelConfig> configs = key_configs(b, context);
  const std::vector<Prepared> sets = prepare(p, configs.front().tile(), true, context);
  BackwardParams params = backward_params(given);
  params.first = given.k.arg();
  params.second = given.v.arg();
  params.other_first = given.q.arg();
  params.other_second = given.d_o.arg();
  params.add = !one_component_each(sets) || (sets.size() > 1 && p.heads != p.kv_heads);
  const bool zero_first = !all_cover(sets);
  Target d_k(b.d_k, {p.batch, p.kv_heads, p.cols, p.depth}, p.dtype, params.add, zero_first, context);
  Target d_v(b.d_v, {p.batch, p.kv_heads, p.cols, p.value_depth}, p.dtype, params.add, zero_first, context);
  params.d_first = d_k.arg();
  params.d_second = d_v.arg();
  params.padding = padding_arg(p);
  for (const KernelConfig& config : configs) {
    launch_all(config, sets, params, context);
  }
  d_k.finish();
  d_v.finish();
  clear_padding(b, context);
}

bool is_contiguous(const Operand& x, const Sizes& s) {
  const Operand packed = contiguous(x.data, s, s.cols);
  return (x.batch == packed.batch || s.batch == 1) && (x.head == packed.head || s.heads == 1) &&
         (x.row == packed.row || s.rows == 1) && (x.col == 1 || s.cols == 1);
}

/// Sums go to `at`. `keys`: the plan's rows are keys.
BiasGradientParams bias_params(const Given& given, bool keys, const Operand& at) {
  const Problem& p = given.problem.forward;
  BiasGradientParams params{};
  params.score = score_arg(p);
  params.first = keys ? given.k.arg() : given.q.arg();
  params.second = keys ? given.v.arg() : given.d_o.arg();
  params.other_first = keys ? given.q.arg() : given.k.arg();
  params.other_second = keys ? given.d_o.arg() : given.v.arg();
  params.stats = static_cast<const ScoreStats*>(given.stats.data());
  params.out = at.data;
  params.add = true;
  params.out_batch = at.batch;
  params.out_head = at.head;
  params.out_row = at.row;
  params.out_col = at.col;
  params.padding = keys ? padding_arg(p) : PaddingArg{};
  params.all = static_cast<int>(p.heads);
  params.ratio = static_cast<int>(p.heads / p.kv_heads);
  params.queries = static_cast<int>(p.rows);
  params.keys = static_cast<int>(p.cols);
  params.depth = static_cast<int>(p.depth);
  params.value_depth = static_cast<int>(p.value_depth);
  params.bias_pairs = p.bias.dtype != DType::f32 && p.bias.col == 1 && p.cols % 2 == 0 &&
                      is_aligned(p.bias.data, {p.bias.row, p.bias.head, p.bias.batch}, 2, 4);
  return params;
}

/// What the gradient of a bias is made by: element by element, or as sums over the columns of a plan whose rows are
/// queries or keys.
struct BiasPlan {
  Sizes sizes;  ///< of the bias
  bool one_row, one_col, keys, row_sums, sum_batch, sum_heads;
  BiasKernel kernel;
  int splits;  ///< CTAs for each row tile: about eight in all for each SM

  BiasPlan(const BackwardProblem& b, const Context& context)
      : sizes{b.bias_sizes[0], b.bias_sizes[1], b.bias_sizes[2], b.bias_sizes[3]},
        one_row(sizes.rows != b.forward.rows),
        one_col(sizes.cols != b.forward.cols),
        keys(one_row && !one_col),
        row_sums(one_row || one_col),
        sum_batch(sizes.batch != b.forward.batch),
        sum_heads(sizes.heads != b.forward.heads),
        kernel(BiasKernel::of(b.forward, keys, row_sums, context)) {
    const KernelShape shape = kernel.shape();
    const std::int64_t rows = keys ? b.forward.cols : b.forward.rows, cols = keys ? b.forward.rows : b.forward.cols;
    const std::int64_t tiles = std::max<std::int64_t>(1, ceil_div(rows, shape.rows) * sizes.batch * sizes.heads);
    const std::int64_t wanted = 8 * driver::device_info(context.device.index).multiprocessors;
    splits = kernel.simple ? 1
                           : static_cast<int>(std::clamp<std::int64_t>(
                                 ceil_div(wanted, tiles), 1, std::max<std::int64_t>(1, ceil_div(cols, shape.cols))));
  }
};

/// Adds up what each set of heads gives, where `params` says.
void launch_bias(const BackwardProblem& b, const BiasPlan& of, std::span<const PatternHeads> sets,
                 BiasGradientParams params, Context& context) {
  const Problem& p = b.forward;
  const KernelShape shape = of.kernel.shape();
  const Kernel& kernel = get_kernel(of.kernel.spec(), context.device.index);
  params.sum_batch = of.sum_batch;
  params.sum_heads = of.sum_heads;
  params.splits = of.splits;
  for (const PatternHeads& set : sets) {
    const auto plan = device_plan(*set.thing, {shape.rows, shape.cols}, of.keys, context);
    const DeviceHeads heads(p, set, false, context);
    params.heads = heads.arg.heads;
    params.head_count = heads.arg.count;
    params.first_batch = heads.arg.first_batch;
    params.batch = heads.arg.batch;
    for (ComponentArg component : plan->components) {
      const auto seen = p.padding.data != nullptr && !of.keys ? see(p, component, shape.cols, context) : nullptr;
      params.plan = component;
      params.follow = component.col_order.extent[2] % 2 == 0 && component.col_order.stride[2] == 1;
      const std::int64_t grid = static_cast<std::int64_t>(component.row_tile_count) * of.splits *
                                (of.sum_batch ? 1 : params.batch) * (of.sum_heads ? 1 : params.head_count);
      if (grid > 0) {
        kernel.launch(grid, 32 * shape.warps, shape.shared_bytes, &params, context.stream);
      }
    }
  }
}

/// Sums over columns: of each split, then of all in their order.
void add_up_rows(const Given& given, const BiasPlan& of, std::span<const PatternHeads> sets, Context& context) {
  const BackwardProblem& b = given.problem;
  const std::int64_t line = of.keys ? b.forward.cols : b.forward.rows, head = of.splits * line,
                     batch = of.sizes.heads * head;
  const std::size_t bytes = static_cast<std::size_t>(of.sizes.batch * batch) * 4;
  const Workspace space(context, bytes);
  driver::fill_zero(space.data(), bytes, context.stream);
  BiasGradientParams params = bias_params(given, of.keys, {space.data(), batch, head, 1, 1});
  params.out_split = line;
  launch_bias(b, of, sets, params, context);
  const bool both = of.one_row && of.one_col;
  const std::int64_t count = both ? of.splits * line : of.splits, out = of.keys ? b.d_bias.col : b.d_bias.row;
  const CopyParams sum{space.data(),
                       b.d_bias.data,
                       {of.sizes.batch, of.sizes.heads, count, both ? 1 : line},
                       {batch, head, both ? 1 : line, 1},
                       {b.d_bias.batch, b.d_bias.head, 0, both ? 0 : out},
                       0.0f};
  add_up(sum, b.d_bias.dtype, kSumWarps, context);
}

/// Each element's sum: straight to where it belongs if all heads have the same pattern, since then it is made once.
void add_up_elements(const Given& given, const BiasPlan& of, std::span<const PatternHeads> sets, Context& context) {
  const BackwardProblem& b = given.problem;
  const Operand out{b.d_bias.data, b.d_bias.batch, b.d_bias.head, b.d_bias.row, b.d_bias.col};
  const std::size_t count = static_cast<std::size_t>(of.sizes.batch * of.sizes.heads * of.sizes.rows * of.sizes.cols);
  if (!of.kernel.simple && sets.size() == 1) {
    if (is_contiguous(out, of.sizes)) {
      driver::fill_zero(out.data, count * size_of(b.d_bias.dtype), context.stream);
    } else {
      fill(out, of.sizes, b.d_bias.dtype, 0.0f, context);
    }
    BiasGradientParams params = bias_params(given, false, out);
    params.add = false;
    params.out_type = number_type(b.d_bias.dtype);
    params.pairs = out.col == 1 && is_aligned(out.data, 2 * size_of(b.d_bias.dtype));
    launch_bias(b, of, sets, params, context);
    return;
  }
  const Workspace space(context, count * 4);
  driver::fill_zero(space.data(), count * 4, context.stream);
  const Operand at = contiguous(space.data(), of.sizes, of.sizes.cols);
  launch_bias(b, of, sets, bias_params(given, false, at), context);
  run_copy(copy_params(space.data(), at, out.data, out, of.sizes), DType::f32, b.d_bias.dtype, context);
}

void add_up_bias(const Given& given, Context& context) {
  const BiasPlan of(given.problem, context);
  const std::vector<PatternHeads> sets = heads_of(given.problem.forward);
  if (of.sizes.batch * of.sizes.heads * of.sizes.rows * of.sizes.cols == 0) {
    return;
  }
  of.row_sums ? add_up_rows(given, of, sets, context) : add_up_elements(given, of, sets, context);
}

// ------------------------------------------------------------------------------------------------------ cost

/// Of so many products with a head dim. Row tiles are not split: where there are fewer than SMs, one is waited for.
/// Rates are flops in a µs of full attention on an H200, at a head dim of 128 and at 64 (docs/lab/attention.md), half
/// as many at 32. In fp32 no other kernels fit, and nothing was measured.
cost::Work cost(const KernelConfig& config, const Amount& all, int products, double at_128, double at_64,
                const Context& context) {
  // From the plan to the first tile, and from the last product to memory. Taken from the Hopper kernels: steps of 128
  // keys beside those of a row tile, and µs beyond an empty kernel.
  constexpr double kTileSteps = 2, kExposed = 4.7, kStep = 128;
  const double rate = config.simple()      ? (config.tf32 ? 100e6 : 25e6)
                      : config.depth <= 32 ? at_64 / 2
                      : config.depth <= 64 ? at_64
                                           : at_128;
  const double ctas = driver::device_info(context.device.index).multiprocessors;
  const double key_us = 2.0 * 128 * products * config.depth / rate * cost::kMultiprocessors;
  const double even = (all.keys + kTileSteps * kStep * std::max(0.0, all.tiles - ctas)) / ctas;
  return {.launches = static_cast<double>(all.components),
          .busiest = std::max(all.longest, even) * key_us,
          .serial = kExposed + kTileSteps * kStep * key_us};
}

}  // namespace

namespace portable {

ScoreArg score_arg(const Problem& p) {
  ScoreArg arg{};
  arg.scale = static_cast<float>(p.scale);
  arg.softcap = static_cast<float>(p.softcap);
  arg.bias = p.bias.data;
  arg.bias_batch = p.bias.batch;
  arg.bias_head = p.bias.head;
  arg.bias_row = p.bias.row;
  arg.bias_col = p.bias.col;
  arg.bias_type = number_type(p.bias.dtype);
  arg.slopes = static_cast<const float*>(p.slopes.data);
  arg.slope_stride = p.slopes.head;
  arg.distance = static_cast<int>(p.cols - p.rows);
  arg.first_batch = static_cast<int>(p.first_batch);
  arg.seed = reinterpret_cast<const long long*>(p.dropout.seed);
  arg.threshold = static_cast<unsigned>(std::min(std::floor(p.dropout.rate * 0x1p32), 0x1p32 - 1));
  arg.kept = p.dropout.rate > 0 ? static_cast<float>(1 / (1 - p.dropout.rate)) : 1.0f;
  return arg;
}

cost::Work cost(const Problem& p, const Amount& all, const Context& context) {
  cost::Work made = cost(config_for(Pass::forward, p, context), all, 2, 390e6, 320e6, context);
  made.memory = copies_us(operand_bytes(p), reread_bytes(p, all.keys));
  return made;
}

cost::Work cost(const BackwardProblem& b, const Amount& all, const Context& context) {
  cost::Work made = cost(config_for(Pass::d_keys_values, b.forward, context), all, 5, 221e6, 181e6, context);
  made.launches = 3;  // statistics, queries, keys
  made.memory = copies_us(operand_bytes(b), 0);
  return made;
}

void launch(const Problem& p, Context& context) {
  const KernelConfig config = config_for(Pass::forward, p, context);
  const std::vector<Prepared> sets = prepare(p, config.tile(), false, context);
  const Input q(p.q, {p.batch, p.heads, p.rows, p.depth}, p.dtype, context);
  const Input k(p.k, {p.batch, p.kv_heads, p.cols, p.depth}, p.dtype, context);
  const Input v(p.v, {p.batch, p.kv_heads, p.cols, p.value_depth}, p.dtype, context);
  const bool sinks = p.sinks.data != nullptr, fills = sinks || !all_cover(sets),
             merges = fills || !one_component_each(sets);
  const Workspace sums(context, merges ? sums_bytes(p) : 0);
  if (fills) {
    fill(p.o, {p.batch, p.heads, p.rows, p.value_depth}, p.dtype, 0.0f, context);
    if (p.lse.data != nullptr && !sinks) {
      fill(p.lse, {p.batch, p.heads, p.rows, 1}, DType::f32, -std::numeric_limits<float>::infinity(), context);
    }
    begin_sums(p, static_cast<RowSum*>(sums.data()), p.lse, context);
  }
  ForwardParams params = forward_params(p, q, k, v);
  params.o = output_arg(p.o, p.dtype);
  params.lse = output_arg(p.lse, DType::f32);
  params.sums = static_cast<RowSum*>(sums.data());
  launch_forward(config, sets, params, fills, context);
}

void launch(const BackwardProblem& problem, Context& context) {
  const bool queries = problem.d_q.data != nullptr, keys = problem.d_k.data != nullptr || problem.d_v.data != nullptr;
  if (queries && keys) {
    std::vector<KernelConfig> wanted = key_configs(problem, context);
    wanted.push_back(config_for(Pass::d_queries, problem.forward, context));
    KernelConfig::table.prepare(std::span<const KernelConfig>(wanted), context.device.index);
  }
  const Given given(problem, context);
  if (queries) {
    query_gradient(given, context);
  }
  if (keys) {
    key_gradients(given, context);
  }
  if (problem.d_bias.data != nullptr) {
    add_up_bias(given, context);
  }
}

void find_large_sums(const Problem& p, RowSum* sums, Context& context) {
  const Input q(p.q, {p.batch, p.heads, p.rows, p.depth}, p.dtype, context);
  const Input k(p.k, {p.batch, p.kv_heads, p.cols, p.depth}, p.dtype, context);
  const Input v(p.v, {p.batch, p.kv_heads, p.cols, p.value_depth}, p.dtype, context);
  find_sums(p, q, k, v, sums, context);
}

void bias_gradient(const BackwardProblem& problem, Context& context) { add_up_bias(Given(problem, context), context); }

void sink_terms(const BackwardProblem& problem, Context& context) {
  const Workspace stats(context, stats_bytes(problem.forward));
  launch_statistics(problem, scored(problem.forward), stats.data(), nullptr, context);
}

/// All gradients where there is not a score.
void fill_zeros(const BackwardProblem& b, Context& context) {
  const Problem& p = b.forward;
  const auto zero = [&](const Operand& out, const Sizes& sizes, DType dtype) {
    if (out.data != nullptr) {
      fill(out, sizes, dtype, 0.0f, context);
    }
  };
  zero(b.d_q, {p.batch, p.heads, p.rows, p.depth}, p.dtype);
  zero(b.d_k, {p.batch, p.kv_heads, p.cols, p.depth}, p.dtype);
  zero(b.d_v, {p.batch, p.kv_heads, p.cols, p.value_depth}, p.dtype);
  zero({b.d_bias.data, b.d_bias.batch, b.d_bias.head, b.d_bias.row, b.d_bias.col},
       {b.bias_sizes[0], b.bias_sizes[1], b.bias_sizes[2], b.bias_sizes[3]}, b.d_bias.dtype);
}

}  // namespace portable
}  // namespace fretwork::attention_op
