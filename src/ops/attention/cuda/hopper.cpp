// The host side of the Hopper kernels: whether they support a problem, tensor maps, launches.
#include "ops/attention/cuda/hopper.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <initializer_list>
#include <iterator>
#include <limits>
#include <memory>
#include <numeric>
#include <optional>
#include <span>
#include <string>
#include <utility>

#include "core/divide.h"
#include "ops/attention/cuda/hopper_kernels.h"
#include "ops/attention/cuda/hopper_plan.h"
#include "ops/attention/cuda/padding.h"
#include "ops/attention/cuda/params_hopper.cuh"
#include "ops/attention/heads.h"
#include "ops/attention/pieces.h"
#include "runtime/alignment.h"
#include "runtime/cuda_driver.h"
#include "runtime/kernels.h"

namespace fretwork::attention_op::hopper {
namespace {

namespace driver = fretwork::cuda;

// ----------------------------------------------------------------------------------------------- the operands

/// True when rows can be moved 16 bytes at a time.
bool movable(const Operand& x) {
  return x.data != nullptr && x.col == 1 && x.row > 0 && x.head >= 0 && x.batch >= 0 &&
         is_aligned(x.data, {x.row, x.head, x.batch}, 2, 16);
}

Operand from_head(Operand x, std::int64_t head, std::int64_t bytes) {
  x.data = static_cast<char*>(x.data) + head * x.head * bytes;
  return x;
}

/// `sizes`: batch, heads, tokens. With `pack` heads in a tile, of `room` rows each, sizes counts such heads.
std::optional<Source> make_source(Operand x, const std::array<std::int64_t, 3>& sizes, std::int64_t depth,
                                  const Side& side, int pack = 1, int room = 0) {
  const std::int64_t next_head = x.head;
  x.head *= pack;
  const std::int64_t unit =
      std::gcd(x.row, std::gcd(sizes[1] > 1 ? x.head : 0, sizes[0] > 1 ? x.batch : 0));  // in elements
  const std::int64_t batch = sizes[0] > 1 ? x.batch / unit : 0, head = sizes[1] > 1 ? x.head / unit : 0;
  const std::int64_t row = x.row / unit;
  const std::int64_t places = (sizes[0] - 1) * batch + (sizes[1] - 1) * head + (sizes[2] + side.shift - 1) * row + 1;
  if (places > kMost || x.row >= (1LL << 38) / 256) {
    return std::nullopt;
  }
  std::vector<std::uint64_t> lengths{static_cast<std::uint64_t>(depth)}, steps;
  std::vector<std::uint32_t> box{64};
  const bool three = side.order.extent[0] > 1 || pack > 1;
  for (std::size_t k = kTileAxes; k-- > (three ? 0u : 1u);) {
    const bool heads = k == 0 && pack > 1;
    const int extent = heads ? pack : side.order.extent[k];
    const std::int64_t stride = heads        ? next_head
                                : extent > 1 ? side.order.stride[k] * x.row
                                             : unit;  // of one place it does not matter
    if (stride <= 0 || stride >= 1LL << 38) {
      return std::nullopt;
    }
    lengths.push_back(static_cast<std::uint64_t>(extent));
    const bool fills = k + 1 == kTileAxes && side.order.extent[1] == 1;  // the room of a head, with zeros
    box.push_back(static_cast<std::uint32_t>(fills ? std::max(extent, room) : extent));
    steps.push_back(static_cast<std::uint64_t>(2 * stride));
  }
  lengths.push_back(static_cast<std::uint64_t>(places));
  box.push_back(1);
  steps.push_back(static_cast<std::uint64_t>(2 * unit));
  const auto begin = reinterpret_cast<std::uintptr_t>(x.data) - static_cast<std::uintptr_t>(2 * side.shift * x.row);
  Source source{};
  source.map = std::bit_cast<Map>(
      driver::make_tensor_map(reinterpret_cast<const void*>(begin), 2, lengths, steps, box, driver::Swizzle::b128));
  source.batch = static_cast<int>(batch);
  source.head = static_cast<int>(head);
  source.row = static_cast<int>(row);
  source.axes = three ? 3 : 2;
  return source;
}

Lines lines_of(const Operand& x) { return {x.data, x.batch, x.head, x.row}; }

Walk walk_of(const Prepared& prepared, std::size_t at) {
  const DevicePlan& plan = *prepared.plan;
  const DeviceComponent& c = prepared.component(at);
  Walk walk{};
  walk.row_tiles = piece<Place>(plan.memory, c.rows.tiles);
  walk.col_tiles = piece<Place>(plan.memory, c.cols.tiles);
  walk.first = piece<int>(plan.memory, c.first);
  walk.runs = piece<RunOf>(plan.memory, c.runs);
  walk.row_tokens = piece<int>(plan.memory, c.rows.tokens);
  walk.col_tokens = piece<int>(plan.memory, c.cols.tokens);
  walk.col_used = piece<int>(plan.memory, c.cols.used);
  walk.bits = piece<unsigned>(plan.memory, plan.bits);
  walk.used = piece<unsigned>(plan.memory, plan.used);
  walk.items = piece<Item>(prepared.memory, prepared.schedules[at].items);
  walk.share = piece<int>(prepared.memory, prepared.schedules[at].share);
  walk.row_places = c.rows.places();
  walk.col_places = c.cols.places();
  return walk;
}

/// Heads [first, first + count) have the same plan.
struct HeadRange {
  std::int64_t first, count;
  std::shared_ptr<const Plan> plan;
};

std::vector<HeadRange> ranges_of(const Plans& plans, std::int64_t heads) {
  std::vector<HeadRange> ranges;
  for (const auto& set : head_sets(std::span<const std::shared_ptr<const Plan>>(plans), heads)) {
    for (const int head : set.heads) {
      if (ranges.empty() || ranges.back().plan.get() != set.thing ||
          ranges.back().first + ranges.back().count != head) {
        ranges.push_back({head, 0, plans[plans.size() == 1 ? 0 : static_cast<std::size_t>(head)]});
      }
      ++ranges.back().count;
    }
  }
  return ranges;
}

/// What both directions need; everything else is a matter of strides and plans.
bool suits(const Problem& p, const Context& context) {
  const bool type = p.dtype == DType::f16 || p.dtype == DType::bf16;
  const std::int64_t most =
      std::max(p.depth, p.value_depth);  // up to 32, half of what a kernel does would be for zeros
  const bool size = most > 32 && most <= kMostColumns && p.depth > 0 && p.value_depth > 0 && p.depth % 8 == 0 &&
                    p.value_depth % 8 == 0 && p.batch > 0 && p.heads > 0 && p.kv_heads > 0 && p.rows > 0 &&
                    p.cols > 0 && p.batch * p.heads < kMost;
  const bool plain = p.softcap == 0 && p.bias.data == nullptr && p.slopes.data == nullptr && p.dropout.rate == 0;
  return type && size && plain && static_cast<float>(p.scale) > 0 && std::isfinite(static_cast<float>(p.scale)) &&
         movable(p.q) && movable(p.k) && movable(p.v) && movable(p.o) &&
         driver::kernel_arch(context.device.index) == "sm_90a";
}

/// Heads whose keys and values fit the cache together, in whole groups of those that share them.
int together(const Problem& p) {
  constexpr std::int64_t kCache = 24 << 20;
  const std::int64_t bytes = 2 * p.cols * (p.depth + p.value_depth);
  return static_cast<int>(
      std::min(p.batch * p.heads, std::max<std::int64_t>(1, kCache / bytes) * (p.heads / p.kv_heads)));
}

// ------------------------------------------------------------------------------------------------- launches

template <typename Params>
struct Launch {
  Which which;
  int grid;
  Params params;
  JoinParams join{};  ///< of the parts, where there are any
  int parts = 0;

  /// Of memory for the parts.
  std::size_t sums_bytes(int n) const { return static_cast<std::size_t>(parts) * kRows * 4 * join.lines[n]; }
  std::size_t bytes() const {
    const bool weighed = which.make == Make::forward;
    return sums_bytes(0) + sums_bytes(1) + (weighed ? static_cast<std::size_t>(parts) * kRows * sizeof(Share) : 0);
  }
};

/// `seen`: some keys may be padding.
Which which_of(Make make, const Problem& p, const Prepared& prepared, std::size_t at, bool seen) {
  return {make, p.dtype, columns_of(p), {prepared.component(at).general || seen, prepared.schedules[at].in_pieces}};
}

/// What says which columns of the launches' tiles are seen, until all is launched.
using Seen = std::vector<std::unique_ptr<SeenColumns>>;

/// Has a walk's columns be those keys that are seen, if some are padding.
SeenTiles see(const Problem& p, const DeviceComponent& component, int side, Walk& walk, Seen& seen, Context& context) {
  if (p.padding.data == nullptr) {
    return {};
  }
  SeenParams params{};
  params.tokens = walk.col_tokens;
  params.tile_used = walk.col_used;
  params.used = walk.used;
  params.side = side;
  params.tile_count = component.col_count;
  const auto& made = *seen.emplace_back(std::make_unique<SeenColumns>(p, params, context));
  walk.col_used = made.first();
  walk.col_used_batch = params.tile_count;
  walk.used = made.words();
  return {made.tile_words(), made.group_count()};
}

/// What joins the parts of a launch; where they lie is told later.
JoinParams join_of(const Prepared& prepared, std::size_t at) {
  JoinParams join{};
  join.splits = piece<Split>(prepared.memory, prepared.schedules[at].splits);
  join.tiles = prepared.schedules[at].split_count;
  join.row_tokens = piece<int>(prepared.plan->memory, prepared.component(at).rows.tokens);
  return join;
}

void give_memory(Launch<ForwardParams>& launch, char* memory) {
  launch.join.sums[0] = launch.params.sums = reinterpret_cast<float*>(memory);
  launch.join.shares = launch.params.shares = reinterpret_cast<Share*>(memory + launch.sums_bytes(0));
}
void give_memory(Launch<BackwardParams>& launch, char* memory) {
  launch.join.sums[0] = launch.params.sums[0] = reinterpret_cast<float*>(memory);
  launch.join.sums[1] = launch.params.sums[1] = reinterpret_cast<float*>(memory + launch.sums_bytes(0));
}

/// Memory for the parts of all launches. Each has its own: a kernel may start before the one before it has ended.
template <typename Params>
std::size_t parts_bytes(const std::vector<Launch<Params>>& launches) {
  return std::accumulate(launches.begin(), launches.end(), std::size_t{0},
                         [](std::size_t sum, const Launch<Params>& launch) { return sum + launch.bytes(); });
}
template <typename Params>
void give_parts(std::vector<Launch<Params>>& launches, const Workspace& memory) {
  auto* at = static_cast<char*>(memory.data());
  for (Launch<Params>& launch : launches) {
    if (launch.parts > 0) {
      give_memory(launch, at);
      at += launch.bytes();
    }
  }
}

/// Has the kernels of all launches and of `others` ready; those that are new are compiled at once.
template <typename Params>
void prepare_kernels(const std::vector<Launch<Params>>& launches, std::vector<Which> others, int device) {
  for (const Launch<Params>& launch : launches) {
    others.push_back(launch.which);
    if (launch.parts > 0) {
      others.push_back({Make::join, launch.which.dtype});
    }
  }
  prepare_kernels(others, device);
}

template <typename Params>
void launch_join(const Launch<Params>& launch, const Context& context) {
  const std::int64_t rows = std::int64_t{launch.join.tiles} * kRows * (launch.join.lines[1] > 0 ? 2 : 1);
  Which{Make::join, launch.which.dtype}
      .kernel(context.device.index)
      .launch_behind(rows / kJoinWarps, 32 * kJoinWarps, 0, &launch.join, context.stream);
}

bool starts_early(const ForwardParams&) { return false; }
bool starts_early(const BackwardParams& params) { return params.early != 0; }

/// Parts are joined before a kernel that waits for them; one that starts early does not.
template <typename Params>
void launch_all(const std::vector<Launch<Params>>& launches, int shared_bytes, const Context& context) {
  auto joined = launches.begin();
  const auto join_until = [&](auto end) {
    for (; joined != end; ++joined) {
      if (joined->parts > 0) {
        launch_join(*joined, context);
      }
    }
  };
  for (auto launch = launches.begin(); launch != launches.end(); ++launch) {
    if (!starts_early(launch->params)) {
      join_until(launch);
    }
    launch->which.kernel(context.device.index)
        .launch_behind(launch->grid, kThreads, shared_bytes, &launch->params, context.stream);
  }
  join_until(launches.end());
}

// ------------------------------------------------------------------------------------------------- forward

std::optional<Launch<ForwardParams>> forward_launch(const Problem& p, const HeadRange& range, const Prepared& prepared,
                                                    std::size_t at, Seen& seen, Context& context) {
  const DeviceComponent& c = prepared.component(at);
  const int rows = range.plan->shape.rows, pack = kRows / rows;
  const auto q = make_source(from_head(p.q, range.first, 2), {p.batch, range.count / pack, p.rows}, p.depth, c.rows,
                             pack, pack > 1 ? rows : 0);
  const auto k = make_source(p.k, {p.batch, p.kv_heads, p.cols}, p.depth, c.cols);
  const auto v = make_source(p.v, {p.batch, p.kv_heads, p.cols}, p.value_depth, c.cols);
  if (!q || !k || !v) {
    return std::nullopt;
  }
  ForwardParams params{};
  params.q = *q;
  params.k = *k;
  params.v = *v;
  params.walk = walk_of(prepared, at);
  params.walk.row_places = pack > 1 ? kRows : params.walk.row_places;
  params.seen = see(p, c, range.plan->shape.cols, params.walk, seen, context);
  params.pieces = piece<PieceOf>(prepared.memory, prepared.schedules[at].pieces);
  params.pack = std::countr_zero(static_cast<unsigned>(pack));
  params.o = lines_of(p.o);
  params.lse = lines_of(p.lse);
  params.group = static_cast<int>(p.heads / p.kv_heads);
  params.head0 = static_cast<int>(range.first);
  params.merge = at > 0 || prepared.fill ? 1 : 0;
  params.scale = static_cast<float>(p.scale * 1.4426950408889634);
  params.value_depth = static_cast<int>(p.value_depth);
  JoinParams join = join_of(prepared, at);
  join.out[0] = params.o;
  join.lse = params.lse;
  join.lines[0] = columns_of(p).values;
  join.depth[0] = params.value_depth;
  join.head0 = params.head0;
  join.pack = params.pack;
  join.merge = params.merge;
  return Launch<ForwardParams>{which_of(Make::forward, p, prepared, at, !seen.empty()), prepared.schedules[at].grid,
                               params, join, prepared.schedules[at].parts};
}

std::int64_t steps_of(const Plan& plan) {
  return std::accumulate(plan.components.begin(), plan.components.end(), std::int64_t{0},
                         [](std::int64_t sum, const Component& c) { return sum + c.pairs; });
}

/// Can the copy engine bring the rows of all heads that share a tile, each head's in its room?
bool packs(const Plan& plan) {
  return plan.shape.rows == kRows ||
         std::all_of(plan.components.begin(), plan.components.end(), [&](const Component& c) {
           const auto& extent = c.row_order.extent;
           return extent[0] == 1 && (extent[1] == 1 || extent[1] * extent[2] == plan.shape.rows);
         });
}

/// Heads that may share a tile because they share keys and have few rows each.
int heads_in_tile(const Problem& p) {
  const std::int64_t group = p.heads / p.kv_heads;
  const auto same = [&](const auto& pattern) { return pattern == p.patterns.front(); };
  int pack = 1;
  while (pack < 8 && group % (2 * pack) == 0 && 2 * pack * p.rows <= kRows) {
    pack *= 2;
  }
  return p.q.head > 0 && std::all_of(p.patterns.begin(), p.patterns.end(), same) ? pack : 1;
}

/// A plan by which they do; null where there is none that takes fewer steps than one head in each tile.
std::shared_ptr<const Plan> packed_plan(const Problem& p) {
  const int pack = heads_in_tile(p);
  if (pack == 1) {
    return nullptr;
  }
  const TileShape shape = forward_shape(p);
  auto made = plan(*p.patterns.front(), {shape.rows / pack, shape.cols});
  return packs(*made) && steps_of(*made) < pack * steps_of(*plan(*p.patterns.front(), shape)) ? made : nullptr;
}

/// Zeros in all rows of x, and −∞ in lse where there is one.
void launch_fill(DType dtype, const Operand& x, const Operand& lse, const std::array<std::int64_t, 3>& sizes,
                 std::int64_t depth, Context& context) {
  FillParams params{};
  params.o = lines_of(x);
  params.lse = lines_of(lse);
  params.rows = sizes[0] * sizes[1] * sizes[2];
  params.per_head = static_cast<int>(sizes[2]);
  params.heads = static_cast<int>(sizes[1]);
  params.depth = static_cast<int>(depth);
  Which{Make::fill, dtype}
      .kernel(context.device.index)
      .launch(ceil_div(params.rows, 8), 256, 0, &params, context.stream);
}

// ------------------------------------------------------------------------------------------------- backward

using BackwardLaunch = Launch<BackwardParams>;

/// Heads [first, first + count) of queries, and the key heads they use.
struct Heads {
  std::int64_t first, count, kv_first, kv_count;
};

OutputArg output_arg(const Operand& x) { return {x.data, x.batch, x.head, x.row, x.col, false}; }

void launch_statistics(const BackwardProblem& b, RowStats* stats, bool in_tiles, Context& context) {
  const Problem& p = b.forward;
  StatsParams params{};
  params.o = output_arg(p.o);
  params.d_o = output_arg(b.d_o);
  params.lse = output_arg(p.lse);
  params.d_lse = output_arg(b.d_lse);
  params.stats = stats;
  params.in_tiles = in_tiles;
  params.rows = p.rows;
  params.all_rows = p.batch * p.heads * p.rows;
  params.heads = static_cast<int>(p.heads);
  params.value_depth = static_cast<int>(p.value_depth);
  Which{Make::statistics, p.dtype}
      .kernel(context.device.index)
      .launch(ceil_div(params.all_rows, 16), 256, 0, &params, context.stream);
}

/// Gradients from one component: of queries, of keys, of values, or of keys and values where registers hold both.
std::optional<BackwardLaunch> backward_launch(const BackwardProblem& b, const Heads& heads, const Prepared& prepared,
                                              std::size_t at, Make make, const RowStats* stats, Seen& seen,
                                              Context& context) {
  const Problem& p = b.forward;
  const bool keys = make != Make::queries;
  const DeviceComponent& c = prepared.component(at);
  const Side &queries_side = keys ? c.cols : c.rows, &keys_side = keys ? c.rows : c.cols;
  const std::array<std::int64_t, 3> sizes{p.batch, heads.count, p.rows}, kv_sizes{p.batch, heads.kv_count, p.cols};
  const auto q = make_source(from_head(p.q, heads.first, 2), sizes, p.depth, queries_side);
  const auto d_o = make_source(from_head(b.d_o, heads.first, 2), sizes, p.value_depth, queries_side);
  const auto k = make_source(from_head(p.k, heads.kv_first, 2), kv_sizes, p.depth, keys_side);
  const auto v = make_source(from_head(p.v, heads.kv_first, 2), kv_sizes, p.value_depth, keys_side);
  if (!q || !d_o || !k || !v) {
    return std::nullopt;
  }
  BackwardParams params{};
  params.rows[0] = keys ? *k : *q;
  params.rows[1] = keys ? *v : *d_o;
  params.cols[0] = keys ? *q : *k;
  params.cols[1] = keys ? *d_o : *v;
  params.walk = walk_of(prepared, at);
  if (!keys) {
    params.seen = see(p, c, kBackwardShape.cols, params.walk, seen, context);
  }
  params.pieces = piece<PieceOf>(prepared.memory, prepared.schedules[at].pieces);
  const Lines d_v = keys ? lines_of(from_head(b.d_v, heads.kv_first, 2)) : Lines{};
  params.out[0] = make == Make::values
                      ? d_v
                      : lines_of(keys ? from_head(b.d_k, heads.kv_first, 2) : from_head(b.d_q, heads.first, 2));
  params.out[1] = d_v;
  params.stats = stats + heads.first * p.rows;
  params.stats_batch = static_cast<int>(p.heads * p.rows);
  params.stats_head = static_cast<int>(p.rows);
  params.group = static_cast<int>(p.heads / p.kv_heads);
  params.add = at > 0 || prepared.fill ? 1 : 0;
  params.depth = static_cast<int>(p.depth);
  params.value_depth = static_cast<int>(p.value_depth);
  params.scale = static_cast<float>(p.scale);
  params.scale_2 = static_cast<float>(p.scale * 1.4426950408889634);
  const Columns columns = columns_of(p);
  JoinParams join = join_of(prepared, at);
  std::copy(std::begin(params.out), std::end(params.out), join.out);
  join.lines[0] = make == Make::values ? columns.values : columns.depth;
  join.depth[0] = make == Make::values ? params.value_depth : params.depth;
  join.lines[1] = make == Make::keys && !columns.deep() ? columns.values : 0;
  join.depth[1] = params.value_depth;
  join.merge = params.add;
  return BackwardLaunch{which_of(make, p, prepared, at, !keys && !seen.empty()), prepared.schedules[at].grid, params,
                        join, prepared.schedules[at].parts};
}

/// Whether the operands of a backward pass are ones that kernels can read and write.
bool suits(const BackwardProblem& b, const Context& context) {
  const Problem& p = b.forward;
  const bool wants_keys = b.d_k.data != nullptr || b.d_v.data != nullptr;
  return suits(p, context) && movable(b.d_o) && p.lse.data != nullptr && b.d_bias.data == nullptr &&
         (!wants_keys || (movable(b.d_k) && movable(b.d_v))) && (b.d_q.data == nullptr || movable(b.d_q)) &&
         p.batch * p.heads * p.rows < kMost;
}
bool all_fit(const Plans& plans) {
  return std::ranges::all_of(plans, [](const auto& plan) { return fits(*plan); });
}

/// What the problem alone says.
WholeParams whole_params(const BackwardProblem& b, std::int64_t row_tiles, std::int64_t col_tiles) {
  const Problem& p = b.forward;
  WholeParams params{};
  params.d_k = lines_of(b.d_k);
  params.d_v = lines_of(b.d_v);
  params.d_q = lines_of(b.d_q);
  params.items = static_cast<int>(p.batch * p.kv_heads * row_tiles);
  params.row_tiles = static_cast<int>(row_tiles);
  params.col_tiles = static_cast<int>(col_tiles);
  params.pairs = static_cast<int>(p.batch * p.kv_heads);
  params.tiles = static_cast<int>(p.batch * p.heads * col_tiles);
  params.kv_heads = static_cast<int>(p.kv_heads);
  params.group = static_cast<int>(p.heads / p.kv_heads);
  params.depth = static_cast<int>(p.depth);
  params.value_depth = static_cast<int>(p.value_depth);
  params.scale = static_cast<float>(p.scale);
  params.scale_2 = static_cast<float>(p.scale * 1.4426950408889634);
  params.padding = padding_arg(p);
  return params;
}

/// All gradients at once where every query meets every key, or all up to its own; false, having done nothing, where
/// that does not suit or pay. The rows of `plan` are keys.
bool backward_whole(const BackwardProblem& b, const std::shared_ptr<const Plan>& plan, Whole wanted, Context& context) {
  const Problem& p = b.forward;
  const int device = context.device.index, ctas = driver::device_info(device).multiprocessors;
  const auto known = find_plan(plan, device);
  const Columns columns = columns_of(p);
  const std::int64_t row_tiles = p.cols / kRows, col_tiles = p.rows / kBackwardShape.cols;
  const std::int64_t items = p.batch * p.kv_heads * row_tiles, tiles = p.batch * p.heads * col_tiles;
  // A key tile that goes round comes to a query tile two steps after the one it waits for, or later.
  const bool all = known->edge == kNoEdge;
  if (!known->edge || columns.depth != columns.values || columns.deep() || (all && col_tiles < 2 * row_tiles) ||
      2 * tiles >= kMost) {
    return false;
  }
  const DeviceComponent& c = known->components.front();
  // Tiles are not cut into pieces, and the last are waited for; those that do not go round begin one after the other.
  // Measured, see README.md.
  const bool pays = all ? col_tiles >= 16 && 10 * ceil_div(items, ctas) * ctas <= 11 * items
                        : col_tiles >= 64 && 2 * items >= 7 * ctas && p.heads == p.kv_heads;
  if (wanted == Whole::if_it_pays && !pays) {
    return false;
  }
  const auto q = make_source(p.q, {p.batch, p.heads, p.rows}, p.depth, c.cols);
  const auto d_o = make_source(b.d_o, {p.batch, p.heads, p.rows}, p.value_depth, c.cols);
  const auto k = make_source(p.k, {p.batch, p.kv_heads, p.cols}, p.depth, c.rows);
  const auto v = make_source(p.v, {p.batch, p.kv_heads, p.cols}, p.value_depth, c.rows);
  if (!q || !d_o || !k || !v) {
    return false;
  }
  const auto size = static_cast<std::size_t>((all ? 2 : 1) * tiles);
  const Workspace stats(context, static_cast<std::size_t>(p.batch * p.heads * p.rows) * sizeof(RowStats));
  const Workspace sums(context, size * static_cast<std::size_t>(64 * columns.most()) * sizeof(float)),
      turns(context, (size + 1) * sizeof(int));
  WholeParams params = whole_params(b, row_tiles, col_tiles);
  params.k = *k;
  params.v = *v;
  params.q = *q;
  params.d_o = *d_o;
  params.stats = static_cast<RowStats*>(stats.data());
  params.sums = static_cast<float*>(sums.data());
  params.turns = static_cast<int*>(turns.data());
  params.taken = params.turns + size;
  params.low = static_cast<int>(*known->edge);
  params.round = all ? 1 : 0;
  params.together = all ? 1 : std::min(params.pairs, static_cast<int>(ceil_div(ctas, 8)));
  const bool padded = p.padding.data != nullptr;
  const Which multiply{Make::whole, p.dtype, columns, {!all || padded, padded}}, finish{Make::finish, p.dtype, columns};
  prepare_kernels(std::vector{Which{Make::statistics, p.dtype}, multiply, finish}, device);
  driver::fill_zero(turns.data(), (size + 1) * sizeof(int), context.stream);
  launch_statistics(b, static_cast<RowStats*>(stats.data()), true, context);
  multiply.kernel(device).launch_behind(std::min<std::int64_t>(ctas, items), whole_tiles(columns.most()).threads,
                                        whole_shared(columns.most()), &params, context.stream);
  finish.kernel(device).launch_behind(tiles, 128, 0, &params, context.stream);
  clear_padding(b, context);
  return true;
}

/// A gradient that is to be zero before anything is added to it.
struct Zeros {
  Operand x;
  std::array<std::int64_t, 3> sizes;
  std::int64_t depth;
};

/// Pairs whose gradients of keys and values, or of queries, one launch makes.
Pairs backward_pairs(const Problem& p, const HeadRange& range, bool keys, bool backwards) {
  const auto group = keys ? static_cast<int>(p.heads / p.kv_heads) : 1;
  return {static_cast<int>(p.batch), static_cast<int>(range.count) / group, std::max(1, together(p) / group),
          backwards};
}

/// What one direction of one range of heads launches; false where it cannot.
bool add_launches(const BackwardProblem& b, const HeadRange& range, bool keys, int longest, const Beside& beside,
                  const RowStats* stats, std::vector<std::shared_ptr<const Prepared>>& kept,
                  std::vector<BackwardLaunch>& launches, std::vector<Zeros>& zeros, Seen& seen, Context& context) {
  const Problem& p = b.forward;
  const std::int64_t group = p.heads / p.kv_heads;
  const Heads heads{range.first, range.count, range.first / group, range.count / group};
  const Pairs pairs = backward_pairs(p, range, keys, launches.size() % 2 == 1);
  const auto prepared =
      kept.emplace_back(prepare(range.plan, pairs, keys ? static_cast<int>(group) : 1, longest, beside, context));
  if (prepared->fill && keys) {
    zeros.push_back({from_head(b.d_k, heads.kv_first, 2), {p.batch, heads.kv_count, p.cols}, p.depth});
    zeros.push_back({from_head(b.d_v, heads.kv_first, 2), {p.batch, heads.kv_count, p.cols}, p.value_depth});
  } else if (prepared->fill) {
    zeros.push_back({from_head(b.d_q, heads.first, 2), {p.batch, heads.count, p.rows}, p.depth});
  }
  for (std::size_t at = 0; at < prepared->schedules.size(); ++at) {
    for (const Make make : backward_makes(columns_of(p), keys)) {
      const auto launch = backward_launch(b, heads, *prepared, at, make, stats, seen, context);
      if (!launch) {
        return false;
      }
      launches.push_back(*launch);
    }
  }
  return true;
}

/// The gradient of queries is one launch that starts where the one launch before it has ended: what one leaves to wait
/// for, the other fills.
bool queries_follow_keys(const std::vector<HeadRange>& keys, const std::vector<HeadRange>& queries) {
  const auto one = [](const std::vector<HeadRange>& ranges) {
    return ranges.size() == 1 && ranges.front().plan->components.size() == 1;
  };
  return one(keys) && one(queries);
}

/// The first launch of a gradient takes nothing from those of others, and they have waited for the statistics, unless
/// there was no CTA to do so. Later ones add to what was there.
void let_start_early(std::vector<BackwardLaunch>& launches) {
  for (auto at = launches.begin(); at != launches.end(); ++at) {
    const auto same = [&](const BackwardLaunch& other) { return other.which.make == at->which.make; };
    const bool first = std::none_of(launches.begin(), at, same);
    at->params.early = at != launches.begin() && first && std::prev(at)->grid > 0 ? 1 : 0;
  }
}

}  // namespace

bool forward(const Problem& problem, const Plans& plans, Context& context, int longest) {
  if (!suits(problem, context) ||
      !std::all_of(plans.begin(), plans.end(), [](const auto& plan) { return fits(*plan) && packs(*plan); })) {
    return false;
  }
  Problem p = problem;
  const Workspace lse(context, p.lse.data == nullptr ? static_cast<std::size_t>(p.batch * p.heads * p.rows) * 4 : 0);
  if (lse.data() != nullptr) {
    p.lse = {lse.data(), p.heads * p.rows, p.rows, 1, 1};
  }
  std::vector<std::shared_ptr<const Prepared>> kept;  // until all is launched
  std::vector<Launch<ForwardParams>> launches;
  std::vector<HeadRange> fills;
  Seen seen;
  for (const HeadRange& range : ranges_of(plans, p.heads)) {
    const int pack = kRows / range.plan->shape.rows;
    const Pairs pairs{static_cast<int>(p.batch), static_cast<int>(range.count) / pack, std::max(1, together(p) / pack),
                      false};
    const auto prepared = kept.emplace_back(prepare(range.plan, pairs, 1, longest, {}, context));
    if (prepared->fill) {
      fills.push_back(range);
    }
    for (std::size_t at = 0; at < prepared->schedules.size(); ++at) {
      const auto launch = forward_launch(p, range, *prepared, at, seen, context);
      if (!launch) {
        return false;
      }
      launches.push_back(*launch);
    }
  }
  const Workspace parts(context, parts_bytes(launches));
  give_parts(launches, parts);
  prepare_kernels(launches, std::vector<Which>(fills.empty() ? 0 : 1, {Make::fill, p.dtype}), context.device.index);
  for (const HeadRange& range : fills) {
    launch_fill(p.dtype, from_head(p.o, range.first, 2), from_head(p.lse, range.first, 4),
                {p.batch, range.count, p.rows}, p.value_depth, context);
  }
  launch_all(launches, forward_shared(columns_of(p)), context);
  return true;
}

TileShape forward_shape(const Problem& problem) {
  const Columns columns = columns_of(problem);
  return {kRows, forward_tiles(columns.depth, columns.values).cols};
}

bool forward(const Problem& problem, Context& context) {
  if (!suits(problem, context)) {
    return false;
  }
  if (const auto packed = packed_plan(problem)) {
    return forward(problem, {packed}, context);
  }
  Plans plans;
  for (const auto& pattern : problem.patterns) {
    plans.push_back(plan(*pattern, forward_shape(problem)));
  }
  return forward(problem, plans, context);
}

bool forward_of_few(const Problem& problem, Context& context) {
  if (problem.rows < 4 || problem.rows > 16 || !suits(problem, context) || heads_in_tile(problem) * problem.rows < 32) {
    return false;
  }
  const auto packed = packed_plan(problem);
  return packed != nullptr && forward(problem, {packed}, context);
}

bool backward(const BackwardProblem& problem, const Plans& plans, const Plans& transposed, Context& context,
              int longest, Whole wanted) {
  const Problem& p = problem.forward;
  const std::int64_t group = p.heads / std::max<std::int64_t>(p.kv_heads, 1);
  const auto ranges = ranges_of(plans, p.heads), kv_ranges = ranges_of(transposed, p.heads);
  // Heads that share keys are added up by one CTA, so they must share a plan as well.
  const auto whole = [&](const HeadRange& r) { return r.first % group == 0 && r.count % group == 0; };
  const bool wants_keys = problem.d_k.data != nullptr || problem.d_v.data != nullptr;
  if (!suits(problem, context) || !all_fit(plans) || !all_fit(transposed) || !std::ranges::all_of(ranges, whole) ||
      !std::ranges::all_of(kv_ranges, whole)) {
    return false;
  }
  const bool all = wants_keys && problem.d_q.data != nullptr && kv_ranges.size() == 1;
  if (wanted != Whole::never && longest == 0 && all &&
      backward_whole(problem, kv_ranges.front().plan, wanted, context)) {
    return true;
  }
  if (wanted == Whole::always) {
    return false;
  }
  const Workspace stats(context, static_cast<std::size_t>(p.batch * p.heads * p.rows) * sizeof(RowStats));
  auto* const numbers = static_cast<RowStats*>(stats.data());
  std::vector<std::shared_ptr<const Prepared>> kept;  // until all is launched
  std::vector<BackwardLaunch> launches;
  std::vector<Zeros> zeros;
  Seen seen;
  const bool follow = queries_follow_keys(kv_ranges, ranges) && wants_keys && problem.d_q.data != nullptr;
  Beside beside;
  if (follow) {
    beside = {ranges.front().plan, backward_pairs(p, ranges.front(), false, false), 1, nullptr};
  }
  for (const HeadRange& range : wants_keys ? kv_ranges : std::vector<HeadRange>{}) {
    if (!add_launches(problem, range, true, longest, beside, numbers, kept, launches, zeros, seen, context)) {
      return false;
    }
  }
  if (follow) {
    beside = {kv_ranges.front().plan, backward_pairs(p, kv_ranges.front(), true, false), static_cast<int>(group),
              &kept.back()->schedules.back().loads};
  }
  for (const HeadRange& range : problem.d_q.data != nullptr ? ranges : std::vector<HeadRange>{}) {
    if (!add_launches(problem, range, false, longest, beside, numbers, kept, launches, zeros, seen, context)) {
      return false;
    }
  }
  let_start_early(launches);
  const Workspace parts(context, parts_bytes(launches));
  give_parts(launches, parts);
  std::vector<Which> others{{Make::statistics, p.dtype}};
  if (!zeros.empty()) {
    others.push_back({Make::fill, p.dtype});
  }
  prepare_kernels(launches, std::move(others), context.device.index);
  launch_statistics(problem, numbers, false, context);
  for (const Zeros& zero : zeros) {
    launch_fill(p.dtype, zero.x, {}, zero.sizes, zero.depth, context);
  }
  launch_all(launches, backward_shared(columns_of(p)), context);
  clear_padding(problem, context);
  return true;
}

bool backward(const BackwardProblem& problem, Context& context) {
  if (!suits(problem.forward, context)) {
    return false;
  }
  Plans plans, transposed;
  for (const auto& pattern : problem.forward.patterns) {
    plans.push_back(plan(*pattern, kBackwardShape));
    transposed.push_back(transposed_plan(*pattern, kBackwardShape));
  }
  return backward(problem, plans, transposed, context);
}

}  // namespace fretwork::attention_op::hopper
