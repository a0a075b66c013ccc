// Copies and fills operands, uploads plans (one allocation and one copy each) and prepares key padding.
#include "ops/attention/cuda/operands.h"

#include <algorithm>
#include <numeric>
#include <string>
#include <type_traits>
#include <utility>

#include "core/divide.h"
#include "fretwork/error.h"
#include "runtime/device_plan.h"
#include "runtime/kernels.h"
#include "runtime/upload_arena.h"

namespace fretwork::attention_op {
namespace {

// -------------------------------------------------------------------------------------------------- kernels

constexpr const char* kSource = "ops/attention/cuda/rows.cuh";

KernelSpec copy_spec(DType from, DType to) {
  return {kSource, std::string("fretwork::attention_copy<") + device_type(from) + ", " + device_type(to) + ">"};
}
KernelSpec sum_spec(DType to, int warps) {
  return {kSource, std::string("fretwork::attention_sum<") + device_type(to) + ", " + std::to_string(warps) + ">"};
}
KernelSpec stats_spec(DType dtype, bool score) {
  return {kSource,
          std::string("fretwork::attention_stats<") + device_type(dtype) + ", 1, " + (score ? "true>" : "false>")};
}
KernelSpec sinks_spec() { return {kSource, "fretwork::attention_sinks"}; }
KernelSpec seen_spec() { return {kSource, "fretwork::attention_seen"}; }
KernelSpec clear_spec(DType dtype) {
  return {kSource, std::string("fretwork::attention_clear<") + device_type(dtype) + ">"};
}

std::vector<KernelSpec> list_kernels(const std::string& /*arch*/) {
  std::vector<KernelSpec> list{seen_spec(), sinks_spec()};
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    list.push_back(clear_spec(dtype));
    list.push_back(copy_spec(dtype, dtype));
    list.push_back(sum_spec(dtype, kSumWarps));
    list.push_back(sum_spec(dtype, kLongSumWarps));
    list.push_back(stats_spec(dtype, true));
    if (dtype != DType::f32) {
      list.push_back(stats_spec(dtype, false));
      list.push_back(copy_spec(DType::f32, dtype));
    }
  }
  return list;
}
const KernelList kKernels{"attention", list_kernels};

}  // namespace

// ------------------------------------------------------------------------------------------------- operands

void run_copy(const CopyParams& params, DType from, DType to, Context& context) {
  const std::int64_t count = params.sizes[0] * params.sizes[1] * params.sizes[2] * params.sizes[3];
  if (count > 0) {
    get_kernel(copy_spec(from, to), context.device.index)
        .launch(std::min<std::int64_t>(ceil_div(count, 256), 1 << 16), 256, 0, &params, context.stream);
  }
}

CopyParams copy_params(const void* from, const Operand& at, void* to, const Operand& to_at, const Sizes& s) {
  return {from,
          to,
          {s.batch, s.heads, s.rows, s.cols},
          {at.batch, at.head, at.row, at.col},
          {to_at.batch, to_at.head, to_at.row, to_at.col},
          0.0f};
}

void fill(const Operand& out, const Sizes& sizes, DType dtype, float value, Context& context) {
  CopyParams params = copy_params(nullptr, {}, out.data, out, sizes);
  params.value = value;
  run_copy(params, dtype, dtype, context);
}

Operand contiguous(void* data, const Sizes& s, std::int64_t line) {
  return {data, s.heads * s.rows * line, s.rows * line, line, 1};
}

OutputArg output_arg(const Operand& out, DType dtype) {
  const bool vector = out.col == 1 && is_aligned(out.data, {out.row, out.head, out.batch}, size_of(dtype), 16);
  return {out.data, out.batch, out.head, out.row, out.col, vector};
}

bool readable(const Operand& x, std::int64_t cols, DType dtype) {
  const auto bytes = static_cast<std::int64_t>(size_of(dtype));
  return (x.col == 1 || cols == 1) && is_aligned(x.data, {x.row, x.head, x.batch}, size_of(dtype), 16) &&
         std::abs(x.row) <= std::numeric_limits<int>::max() / bytes;
}

double operand_bytes(const Problem& p) {
  const std::int64_t queries = p.batch * p.heads * p.rows, keys = p.batch * p.kv_heads * p.cols;
  return static_cast<double>((queries + keys) * (p.depth + p.value_depth)) * static_cast<double>(size_of(p.dtype));
}
double operand_bytes(const BackwardProblem& b) { return 2 * operand_bytes(b.forward); }
double reread_bytes(const Problem& p, double keys) {
  const double again = std::max(0.0, keys - static_cast<double>(p.batch * p.kv_heads * p.cols));
  return again * static_cast<double>(p.depth + p.value_depth) * static_cast<double>(size_of(p.dtype));
}

OutputArg output_arg(const Operand& out) { return {out.data, out.batch, out.head, out.row, out.col, false}; }

BiasType number_type(DType dtype) {
  return dtype == DType::f16 ? BiasType::f16 : dtype == DType::bf16 ? BiasType::bf16 : BiasType::f32;
}

bool scored(const Problem& p) {
  return p.dtype == DType::f32 || p.softcap > 0 || p.bias.data != nullptr || p.slopes.data != nullptr ||
         p.dropout.rate > 0 || !(p.scale > 0);
}

StatsParams stats_params(const BackwardProblem& b) {
  const Problem& p = b.forward;
  StatsParams params{};
  params.o = output_arg(p.o);
  params.d_o = output_arg(b.d_o);
  params.lse = output_arg(p.lse);
  params.d_lse = output_arg(b.d_lse);
  params.rows = p.rows;
  params.all_rows = p.batch * p.heads * p.rows;
  params.heads = static_cast<int>(p.heads);
  params.value_depth = static_cast<int>(p.value_depth);
  params.sinks = sinks_arg(p);
  params.sink_terms = output_arg(b.sink_terms);
  return params;
}

void launch_statistics(const BackwardProblem& b, bool scored, void* stats, const RowSum* sums, Context& context) {
  StatsParams params = stats_params(b);
  params.stats = stats;
  params.sums = sums;
  if (params.all_rows > 0) {
    get_kernel(stats_spec(b.forward.dtype, scored), context.device.index)
        .launch(ceil_div(params.all_rows, 8), 256, 0, &params, context.stream);
  }
}

// ---------------------------------------------------------------------------------------------------- sinks

SinksArg sinks_arg(const Problem& p) { return {p.sinks.data, p.sinks.head, p.sinks.row, number_type(p.sinks.dtype)}; }

void begin_with_sinks(const Problem& p, RowSum* sums, const Operand& lse, float unit, Context& context) {
  const SinkParams params{
      sinks_arg(p), sums, output_arg(lse), unit, p.rows, p.batch * p.heads * p.rows, static_cast<int>(p.heads)};
  get_kernel(sinks_spec(), context.device.index)
      .launch(ceil_div(params.all_rows, 256), 256, 0, &params, context.stream);
}

std::size_t sums_bytes(const Problem& p) {
  return static_cast<std::size_t>(p.batch * p.heads * p.rows) * sizeof(RowSum);
}

void begin_sums(const Problem& p, RowSum* sums, const Operand& lse, Context& context) {
  if (p.sinks.data != nullptr) {
    begin_with_sinks(p, sums, lse, scored(p) ? 1.0f : 1.4426950408889634f, context);
  } else {
    fretwork::cuda::fill_zero(sums, sums_bytes(p), context.stream);
  }
}

void add_up(const CopyParams& sum, DType to, int warps, Context& context) {
  const std::int64_t sums = sum.sizes[0] * sum.sizes[1] * sum.sizes[3];
  get_kernel(sum_spec(to, warps), context.device.index)
      .launch(sum.sizes[2] <= kShortSum ? ceil_div(sums, 32 * warps) : sums, 32 * warps, 0, &sum, context.stream);
}

void add_up_sinks(const BackwardProblem& b, Context& context) {
  const Problem& p = b.forward;
  const std::int64_t rows = p.batch * p.rows;
  const CopyParams sum{
      b.sink_terms.data, b.d_sinks.data, {1, p.heads, rows, 1}, {0, rows, 1, 0}, {0, b.d_sinks.head, 0, 0}, 0.0f};
  add_up(sum, b.d_sinks.dtype, kLongSumWarps, context);
}

// ------------------------------------------------------------------------------------------ plans and heads

namespace {

using fretwork::cuda::DeviceBuffer;
using fretwork::cuda::UploadArena;

int narrow(std::int64_t n) {
  if (n < std::numeric_limits<int>::min() || n > std::numeric_limits<int>::max()) {
    throw Error("attention", "pattern", "tiles that 32-bit numbers can count", std::to_string(n));
  }
  return static_cast<int>(n);
}

OrderArg order_arg(const Order& order) {
  OrderArg arg{};
  for (std::size_t a = 0; a < kTileAxes; ++a) {
    arg.extent[a] = order.extent[a];
    arg.stride[a] = order.extent[a] > 1 ? narrow(order.stride[a]) : 0;
  }
  return arg;
}

std::vector<TileArg> tile_args(const std::vector<Tile>& tiles) {
  std::vector<TileArg> args;
  args.reserve(tiles.size());
  for (const Tile& tile : tiles) {
    TileArg arg{narrow(tile.base), 0, tile.used, 0};
    for (unsigned a = 0; a < kTileAxes; ++a) {
      arg.inside |= static_cast<unsigned>(tile.count[a] + 511) << (10 * a);
    }
    args.push_back(arg);
  }
  return args;
}

/// Row tiles with the most pairs first, equal ones in their own order; and how many of them are so long that they
/// would end after all others if they did not begin before them.
std::vector<int> by_work(const Component& component, int& long_tiles) {
  std::vector<std::int64_t> work(component.row_tiles.size());
  std::int64_t all = 0;
  for (std::size_t t = 0; t < work.size(); ++t) {
    for (auto r = static_cast<std::size_t>(component.first[t]); r < static_cast<std::size_t>(component.first[t + 1]);
         ++r) {
      work[t] += component.runs[r].count;
    }
    all += work[t];
  }
  std::vector<int> order(work.size());
  std::iota(order.begin(), order.end(), 0);
  const auto of = [&](int t) { return work[static_cast<std::size_t>(t)]; };
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return of(a) > of(b); });
  const std::int64_t mean = work.empty() ? 0 : all / static_cast<std::int64_t>(work.size());
  long_tiles =
      static_cast<int>(std::count_if(work.begin(), work.end(), [&](std::int64_t w) { return w > 4 * mean + 16; }));
  return order;
}

/// Where a component's arrays begin.
struct Places {
  std::size_t row_tiles, col_tiles, first, runs, by_work;
};

DevicePlan upload(const Plan& plan, int device) {
  UploadArena arena;
  std::vector<MaskArg> masks;
  masks.reserve(plan.masks.size());
  for (const Mask& mask : plan.masks) {
    const int reach = 4 * std::max(plan.shape.rows, plan.shape.cols);  // kernels add to it
    masks.push_back({std::clamp(mask.low, -reach, reach), std::clamp(mask.high, -reach, reach),
                     std::min(mask.limit, plan.shape.cols), plan.bits_of(mask)});
  }
  const std::size_t masks_at = arena.add(masks), bits_at = arena.add(plan.all_bits()), used_at = arena.add(plan.used);
  DevicePlan made;
  std::vector<Places> places;
  for (const Component& component : plan.components) {
    std::vector<int> first;
    for (const std::int64_t n : component.first) {
      first.push_back(narrow(n));
    }
    std::vector<RunArg> runs;
    runs.reserve(component.runs.size());
    for (const Run& run : component.runs) {
      runs.push_back({run.first, run.count, run.mask});
    }
    ComponentArg& arg = made.components.emplace_back();
    arg.row_order = order_arg(component.row_order);
    arg.col_order = order_arg(component.col_order);
    arg.row_tile_count = narrow(static_cast<std::int64_t>(component.row_tiles.size()));
    arg.col_tile_count = narrow(static_cast<std::int64_t>(component.col_tiles.size()));
    const std::vector<int> order = by_work(component, arg.long_tiles);
    places.push_back({arena.add(tile_args(component.row_tiles)), arena.add(tile_args(component.col_tiles)),
                      arena.add(first), arena.add(runs), arena.add(order)});
  }
  made.memory = arena.upload(device);
  const auto set = [&](auto*& pointer, std::size_t at) {
    pointer =
        fretwork::cuda::uploaded<std::remove_pointer_t<std::remove_reference_t<decltype(pointer)>>>(made.memory, at);
  };
  for (std::size_t c = 0; c < places.size(); ++c) {
    ComponentArg& arg = made.components[c];
    set(arg.row_tiles, places[c].row_tiles);
    set(arg.col_tiles, places[c].col_tiles);
    set(arg.first, places[c].first);
    set(arg.runs, places[c].runs);
    set(arg.masks, masks_at);
    set(arg.bits, bits_at);
    set(arg.used, used_at);
    set(arg.by_work, places[c].by_work);
  }
  made.covers_rows = !plan.components.empty() && plan.components.front().covers_rows;
  return made;
}

}  // namespace

std::shared_ptr<const DevicePlan> device_plan(const RegularPattern& pattern, const TileShape& shape, bool transposed,
                                              const Context& context) {
  const int numbers[] = {shape.rows, shape.cols, transposed};
  const std::string key(reinterpret_cast<const char*>(numbers), sizeof numbers);
  return find_device_plan<DevicePlan>(key + pattern.key(), context, [&](int device) {
    return upload(transposed ? *attention_op::transposed_plan(pattern, shape) : *plan(pattern, shape), device);
  });
}

std::shared_ptr<const DeviceNumbers> device_numbers(std::span<const int> numbers, const Context& context) {
  const std::string key(reinterpret_cast<const char*>(numbers.data()), numbers.size_bytes());
  return find_device_plan<DeviceNumbers>(key, context, [&](int device) {
    return DeviceNumbers{DeviceBuffer(device, numbers.data(), numbers.size_bytes())};
  });
}

std::vector<PatternHeads> heads_of(const Problem& p) {
  std::vector<PatternHeads> sets;
  for (const PatternRange& range : ranges_of(p)) {
    for (auto& set : head_sets(range.things, p.heads)) {
      sets.push_back({std::move(set), range.first, range.count});
    }
  }
  return sets;
}

DeviceHeads::DeviceHeads(const Problem& p, const PatternHeads& set, bool by_key_head, Context& context) {
  const int ratio = static_cast<int>(p.heads / p.kv_heads);
  arg = {nullptr,
         nullptr,
         static_cast<int>(by_key_head ? p.kv_heads : p.heads),
         static_cast<int>(set.first_batch),
         static_cast<int>(set.batch),
         ratio,
         static_cast<int>(p.heads)};
  if (std::ssize(set.heads) == p.heads) {
    return;
  }
  heads = device_numbers(set.heads, context);
  arg.heads = heads->data();
  arg.count = static_cast<int>(set.heads.size());
  if (by_key_head) {
    std::vector<int> list;
    for (std::size_t n = 0; n < set.heads.size(); ++n) {
      const int key_head = set.heads[n] / ratio;
      if (list.empty() || list[list.size() - 3] != key_head) {
        list.insert(list.end(), {key_head, static_cast<int>(n), 0});
      }
      ++list.back();
    }
    groups = device_numbers(list, context);
    arg.groups = groups->data();
    arg.count = static_cast<int>(list.size() / 3);
  }
}

// ---------------------------------------------------------------------------------------------- key padding

PaddingArg padding_arg(const Problem& problem) {
  return {problem.padding.data, problem.padding.batch, problem.padding.col};
}

SeenColumns::SeenColumns(const Problem& problem, SeenParams tiles, Context& context)
    : count_(problem.batch * tiles.tile_count),
      side_words_(tiles.side / 32),
      groups_(ceil_div(tiles.tile_count, kSeenTiles)),
      memory_(context, static_cast<std::size_t>(count_ * (1 + side_words_) + problem.batch * groups_) * sizeof(int)) {
  tiles.padding = padding_arg(problem);
  tiles.first = static_cast<int*>(memory_.data());
  tiles.words = reinterpret_cast<unsigned*>(tiles.first + count_);
  tiles.tile_words = tiles.words + count_ * side_words_;
  if (count_ > 0) {
    get_kernel(seen_spec(), context.device.index)
        .launch(problem.batch * groups_, 32 * kSeenTiles, 0, &tiles, context.stream);
  }
}

void clear_padding(const BackwardProblem& problem, Context& context) {
  const Problem& p = problem.forward;
  const std::int64_t all = p.batch * p.kv_heads * (ceil_div(p.cols, 32) * 32);
  if (p.padding.data == nullptr || (problem.d_k.data == nullptr && problem.d_v.data == nullptr) || all == 0) {
    return;
  }
  ClearParams params{};
  params.out[0] = output_arg(problem.d_k);
  params.out[1] = output_arg(problem.d_v);
  params.padding = padding_arg(p);
  params.all = all;
  params.heads = static_cast<int>(p.kv_heads);
  params.keys = static_cast<int>(p.cols);
  params.depth[0] = static_cast<int>(p.depth);
  params.depth[1] = static_cast<int>(p.value_depth);
  get_kernel(clear_spec(p.dtype), context.device.index).launch(ceil_div(all, 256), 256, 0, &params, context.stream);
}

}  // namespace fretwork::attention_op
