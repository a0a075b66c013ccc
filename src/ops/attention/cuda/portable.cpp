// Attention on any GPU: gets the plan, makes operands readable, launches once per component.
#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <limits>
#include <memory>
#include <optional>
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
constexpr const char* kRowsSource = "ops/attention/cuda/rows.cuh";
constexpr int kDepths[] = {32, 64, 96, 128, 192, 256};  // of 16-bit kernels
constexpr int kSimpleDepths[] = {64, 128, 256};
constexpr int kTables = 4096;  // more than a kernel's static shared memory

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

/// Whether more than a positive scale is done to scores.
bool has_extras(const Problem& p) {
  return p.softcap > 0 || p.bias.data != nullptr || p.slopes.data != nullptr || p.dropout.rate > 0 || !(p.scale > 0);
}

/// Whether the kernels' statistics are ScoreStats: in float they all do more than a scale.
bool scored(const Problem& p) { return p.dtype == DType::f32 || has_extras(p); }

KernelConfig config_for(Pass pass, const Problem& p, const Context& context) {
  const std::int64_t deepest = std::max(p.depth, p.value_depth);
  const bool simple = p.dtype == DType::f32;
  KernelConfig config{pass, p.dtype, simple ? depth_for(kSimpleDepths, deepest) : depth_for(kDepths, deepest),
                      simple || has_extras(p), simple && context.precision == Precision::tf32};
  if (config.shape().shared_bytes > driver::device_info(context.device.index).shared_per_block - kTables) {
    config.tf32 = false;  // exact, which needs less
  }
  return config;
}

KernelSpec bias_spec(DType dtype, int depth, bool keys, bool row_sums) {
  return {kSimpleSource,
          std::string("fretwork::bias_gradient<") + device_type(dtype) + ", " + std::to_string(depth) +
              (keys ? ", true" : ", false") + (row_sums ? ", true>" : ", false>"),
          simple_shape(depth, 4).shared_bytes};
}
KernelSpec stats_spec(DType dtype, bool score) {
  return {kRowsSource,
          std::string("fretwork::attention_stats<") + device_type(dtype) + ", 1, " + (score ? "true>" : "false>")};
}
KernelSpec sum_spec(DType to) { return {kRowsSource, std::string("fretwork::attention_sum<") + device_type(to) + ">"}; }

std::vector<KernelSpec> list_kernels(const std::string& /*arch*/) {
  std::vector<KernelSpec> list;
  for (const int depth : kSimpleDepths) {
    for (const Pass pass : {Pass::forward, Pass::d_queries, Pass::d_keys_values}) {
      list.push_back(KernelConfig{pass, DType::f32, depth, true, false}.spec());
      list.push_back(KernelConfig{pass, DType::f32, depth, true, true}.spec());
    }
    for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
      list.push_back(bias_spec(dtype, depth, false, false));
      list.push_back(bias_spec(dtype, depth, false, true));
      list.push_back(bias_spec(dtype, depth, true, true));
    }
  }
  for (const DType dtype : {DType::f16, DType::bf16}) {
    for (const int depth : kDepths) {
      for (const bool extras : {false, true}) {
        const auto add = [&](Pass pass) { list.push_back(KernelConfig{pass, dtype, depth, extras}.spec()); };
        add(Pass::forward);
        add(Pass::d_queries);
        if (depth <= 128) {
          add(Pass::d_keys_values);
        } else {
          add(Pass::d_keys);
          add(Pass::d_values);
        }
      }
    }
  }
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    list.push_back(stats_spec(dtype, true));
    if (dtype != DType::f32) {
      list.push_back(stats_spec(dtype, false));
    }
    list.push_back(sum_spec(dtype));
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

std::size_t sums_bytes(const Problem& p) {
  return static_cast<std::size_t>(p.batch * p.heads * p.rows) * sizeof(RowSum);
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
  driver::fill_zero(sums, sums_bytes(p), context.stream);
  ForwardParams params = forward_params(p, q, k, v);
  params.lse = output_arg(p.lse, DType::f32);
  params.sums = sums;
  params.again = true;
  launch_forward(config, prepare(p, config.tile(), false, context), params, true, context);
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
        stats(context, static_cast<std::size_t>(b.forward.batch * b.forward.heads * b.forward.rows) *
                           (scored(b.forward) ? sizeof(ScoreStats) : sizeof(RowStats))),
        sums(context, may_be_large(b.forward) ? sums_bytes(b.forward) : 0) {
    const Problem& p = b.forward;
    if (sums.data() != nullptr) {
      find_sums(p, q, k, v, static_cast<RowSum*>(sums.data()), context);
    }
    StatsParams params{};
    params.sums = static_cast<const RowSum*>(sums.data());
    params.o = output_arg(p.o, p.dtype);
    params.d_o = output_arg(b.d_o, p.dtype);
    params.lse = output_arg(p.lse, DType::f32);
    params.d_lse = output_arg(b.d_lse, DType::f32);
    params.stats = stats.data();
    params.rows = p.rows;
    params.all_rows = p.batch * p.heads * p.rows;
    params.heads = static_cast<int>(p.heads);
    params.value_depth = static_cast<int>(p.value_depth);
    if (params.all_rows > 0) {
      get_kernel(stats_spec(p.dtype, scored(p)), context.device.index)
          .launch(ceil_div(params.all_rows, 8), 256, 0, &params, context.stream);
    }
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
  params.out = static_cast<float*>(at.data);
  params.out_batch = at.batch;
  params.out_head = at.head;
  params.out_row = at.row;
  params.out_col = at.col;
  params.padding = keys ? padding_arg(p) : PaddingArg{};
  params.all = static_cast<int>(p.heads);
  params.ratio = static_cast<int>(p.heads / p.kv_heads);
  params.queries = static_cast<int>(p.rows);
  params.depth = static_cast<int>(p.depth);
  params.value_depth = static_cast<int>(p.value_depth);
  return params;
}

/// A bias that is not broadcast along rows or columns gets each element's sum; else the plan whose rows remain is
/// walked and its columns are summed, and what remains of a bias broadcast along both is one more sum.
void add_up_bias(const Given& given, Context& context) {
  const BackwardProblem& b = given.problem;
  const Problem& p = b.forward;
  const Sizes sizes{b.bias_sizes[0], b.bias_sizes[1], b.bias_sizes[2], b.bias_sizes[3]};
  const bool one_row = sizes.rows != p.rows, one_col = sizes.cols != p.cols;
  const bool keys = one_row && !one_col, row_sums = one_row || one_col, both = one_row && one_col;
  const int depth = depth_for(kSimpleDepths, std::max(p.depth, p.value_depth));
  const KernelShape shape = simple_shape(depth, 4);

  const Sizes made{sizes.batch, sizes.heads, both ? p.rows : sizes.rows, sizes.cols};
  const std::size_t bytes = static_cast<std::size_t>(made.batch * made.heads * made.rows * made.cols) * 4;
  if (bytes == 0) {
    return;
  }
  const Workspace space(context, bytes);
  driver::fill_zero(space.data(), bytes, context.stream);
  const Operand at = contiguous(space.data(), made, made.cols);
  const Operand out{b.d_bias.data, b.d_bias.batch, b.d_bias.head, b.d_bias.row, b.d_bias.col};

  BiasGradientParams params = bias_params(given, keys, at);
  params.sum_batch = sizes.batch != p.batch;
  params.sum_heads = sizes.heads != p.heads;
  const Kernel& kernel = get_kernel(bias_spec(p.dtype, depth, keys, row_sums), context.device.index);
  for (const PatternHeads& set : heads_of(p)) {
    const auto plan = device_plan(*set.thing, {shape.rows, shape.cols}, keys, context);
    const DeviceHeads heads(p, set, false, context);
    params.heads = heads.arg.heads;
    params.head_count = heads.arg.count;
    params.first_batch = heads.arg.first_batch;
    params.batch = heads.arg.batch;
    for (ComponentArg component : plan->components) {
      const auto seen = p.padding.data != nullptr && !keys ? see(p, component, shape.cols, context) : nullptr;
      params.plan = component;
      const std::int64_t grid = static_cast<std::int64_t>(component.row_tile_count) *
                                (params.sum_batch ? 1 : params.batch) * (params.sum_heads ? 1 : params.head_count);
      if (grid > 0) {
        kernel.launch(grid, 32 * shape.warps, shape.shared_bytes, &params, context.stream);
      }
    }
  }
  const CopyParams copy = copy_params(space.data(), at, out.data, out, made);
  if (!both) {
    run_copy(copy, DType::f32, b.d_bias.dtype, context);
  } else {
    get_kernel(sum_spec(b.d_bias.dtype), context.device.index)
        .launch(made.batch * made.heads * made.cols, 256, 0, &copy, context.stream);
  }
}

// ------------------------------------------------------------------------------------------------------ cost

/// Of so many products with a head dim. Row tiles are not split: where there are fewer than SMs, one is waited for.
/// Rates are flops in a µs of full attention on an H200, at a head dim of 128 and at 64 (docs/lab/attention.md). In
/// fp32 no other kernels fit, and nothing was measured.
cost::Work cost(const KernelConfig& config, const Amount& all, int products, double at_128, double at_64,
                const Context& context) {
  // From the plan to the first tile, and from the last product to memory. Taken from the Hopper kernels: steps of 128
  // keys beside those of a row tile, and µs beyond an empty kernel.
  constexpr double kTileSteps = 2, kExposed = 4.7, kStep = 128;
  const double rate = config.simple() ? (config.tf32 ? 100e6 : 25e6) : config.depth <= 64 ? at_64 : at_128;
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
  arg.bias_type = p.bias.dtype == DType::f16    ? BiasType::f16
                  : p.bias.dtype == DType::bf16 ? BiasType::bf16
                                                : BiasType::f32;
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
  const bool fills = !all_cover(sets), merges = fills || !one_component_each(sets);
  const Workspace sums(context, merges ? sums_bytes(p) : 0);
  if (fills) {
    fill(p.o, {p.batch, p.heads, p.rows, p.value_depth}, p.dtype, 0.0f, context);
    if (p.lse.data != nullptr) {
      fill(p.lse, {p.batch, p.heads, p.rows, 1}, DType::f32, -std::numeric_limits<float>::infinity(), context);
    }
    driver::fill_zero(sums.data(), sums_bytes(p), context.stream);
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
