// Attention forward on Hopper: one launch for each range of heads with the same plan and each component of it.
#include <bit>
#include <cmath>

#include "ops/attention/cuda/hopper_launch.h"
#include "runtime/upload_arena.h"

namespace fretwork::attention_op::hopper {
namespace {

namespace driver = fretwork::cuda;
using driver::uploaded;

using ForwardLaunch = Launch<ScoredForwardParams>;

std::optional<ForwardLaunch> forward_launch(const Problem& p, const HeadRange& range, const Prepared& prepared,
                                            std::size_t at, RowSum* tops, Seen& seen, Context& context) {
  const DeviceComponent& c = prepared.component(at);
  const int rows = range.plan->shape.rows, pack = kRows / rows;
  const auto made = forward_operands(p, range.first, range.count, c.rows, c.cols, pack, pack > 1 ? rows : 0);
  if (!made) {
    return std::nullopt;
  }
  ScoredForwardParams params = *made;
  params.walk = walk_of(prepared, at);
  params.walk.row_places = pack > 1 ? kRows : params.walk.row_places;
  params.seen = see(p, c, range.plan->shape.cols, params.walk, seen, context);
  params.pieces = uploaded<PieceOf>(prepared.memory, prepared.schedules[at].pieces);
  params.merge = at > 0 || prepared.fill ? 1 : 0;
  if (score_of(p) != 0) {
    params.more = score_more(p, range.first, c.rows.order, c.cols.order);
    params.more.tops = tops;
  }
  KernelConfig config = config_of(Pass::forward, p, prepared, at, !seen.empty());
  if (const auto bias = pack == 1 ? bias_source(p, c.rows, c.cols) : std::nullopt) {
    params.bias = *bias;
    config.extras.score |= kBiasTiles;
  }
  ScoredJoinParams join = join_of(prepared, at);
  join.tops = tops;
  join.heads = static_cast<int>(p.heads);
  join.queries = static_cast<int>(p.rows);
  join.out[0] = params.o;
  join.lse = params.lse;
  join.lines[0] = columns_of(p).values;
  join.depth[0] = params.value_depth;
  join.head0 = params.head0;
  join.pack = params.pack;
  join.merge = params.merge;
  join.sinks = params.sinks;
  return ForwardLaunch{config, prepared.schedules[at].grid, params, join, prepared.schedules[at].parts};
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

}  // namespace

std::optional<ScoredForwardParams> forward_operands(const Problem& p, std::int64_t first, std::int64_t count,
                                                    const Side& rows, const Side& cols, int pack, int room) {
  const auto q = make_source(from_head(p.q, first, 2), {p.batch, count / pack, p.rows}, p.depth, rows, pack, room);
  const auto k = make_source(p.k, {p.batch, p.kv_heads, p.cols}, p.depth, cols);
  const auto v = make_source(p.v, {p.batch, p.kv_heads, p.cols}, p.value_depth, cols);
  if (!q || !k || !v) {
    return std::nullopt;
  }
  ScoredForwardParams params{};
  params.q = *q;
  params.k = *k;
  params.v = *v;
  params.pack = std::countr_zero(static_cast<unsigned>(pack));
  params.o = lines_of(p.o);
  params.lse = lines_of(p.lse);
  params.group = static_cast<int>(p.heads / p.kv_heads);
  params.head0 = static_cast<int>(first);
  params.scale = static_cast<float>(p.scale * 1.4426950408889634);
  params.value_depth = static_cast<int>(p.value_depth);
  params.sinks = sinks_arg(p);
  return params;
}

int heads_in_tile(const Problem& p) {
  const std::int64_t group = p.heads / p.kv_heads;
  const auto same = [&](const auto& pattern) { return pattern == p.patterns.front(); };
  int pack = 1;
  while (pack < 8 && group % (2 * pack) == 0 && 2 * pack * p.rows <= kRows) {
    pack *= 2;
  }
  return p.q.head > 0 && std::all_of(p.patterns.begin(), p.patterns.end(), same) ? pack : 1;
}

TileShape forward_shape(const Problem& problem) {
  const Columns columns = columns_of(problem);
  return {kRows, forward_tiles(columns.depth, columns.values).cols};
}

Plans forward_plans(const Problem& problem) {
  Plans plans;
  for (const auto& pattern : problem.patterns) {
    plans.push_back(plan(*pattern, forward_shape(problem)));
  }
  return plans;
}

std::shared_ptr<const Plan> packed_plan(const Problem& p) {
  const int pack = heads_in_tile(p);
  if (pack == 1) {
    return nullptr;
  }
  const TileShape shape = forward_shape(p);
  auto made = plan(*p.patterns.front(), {shape.rows / pack, shape.cols});
  return packs(*made) && steps_of(*made) < pack * steps_of(*plan(*p.patterns.front(), shape)) ? made : nullptr;
}

cost::Work cost(const Problem& p, const Amount& all, const Context& context) {
  // From the schedule to the first tile, and from the last product to memory, beside kItemOverhead steps and beyond an
  // empty kernel. Fitted.
  constexpr double kExposed = 4.7;
  // TFLOP/s of full attention on 132 SMs, as flops of an SM in a µs: 683 at a head dim of 128, 498 at 64.
  const double rate = columns_of(p).most() == 64 ? 3.78e6 : 5.18e6;
  const double ctas = driver::device_info(context.device.index).multiprocessors, cols = forward_shape(p).cols;
  const double step_us = 2 * kRows * cols * (columns_of(p).depth + columns_of(p).values) / rate;
  const double even = (all.keys / cols + kItemOverhead * std::max(0.0, all.tiles - ctas)) / ctas;
  const cost::Work whole{.launches = static_cast<double>(all.components),
                         .memory = copies_us(operand_bytes(p), reread_bytes(p, all.keys)),
                         .busiest = std::max(all.longest / cols, even) * step_us,
                         .serial = kExposed + kItemOverhead * step_us};
  // Row tiles that would be waited for are split, which costs a join and some steps for each part.
  cost::Work split = whole;
  split.launches += 1;
  split.serial += kPartOverhead * step_us;
  split.busiest = even * step_us;
  return split.microseconds() < whole.microseconds() ? split : whole;
}

bool launch(const Problem& problem, const Plans& plans, Context& context, int longest) {
  if (!fits(problem, context) ||
      !std::all_of(plans.begin(), plans.end(), [](const auto& plan) { return is_countable(*plan) && packs(*plan); })) {
    return false;
  }
  Problem p = problem;
  const Workspace lse(context, p.lse.data == nullptr ? static_cast<std::size_t>(p.batch * p.heads * p.rows) * 4 : 0);
  if (lse.data() != nullptr) {
    p.lse = {lse.data(), p.heads * p.rows, p.rows, 1, 1};
  }
  std::vector<std::shared_ptr<const Prepared>> kept;  // until all is launched
  std::vector<ForwardLaunch> launches;
  std::vector<HeadRange> fills;
  Seen seen;
  const bool joins = score_of(p) != 0 && std::any_of(plans.begin(), plans.end(), [](const auto& plan) {
                       return plan->components.size() != 1 || !plan->components.front().covers_rows;
                     });
  const std::size_t tops_bytes = joins ? static_cast<std::size_t>(p.batch * p.heads * p.rows) * sizeof(RowSum) : 0;
  const Workspace tops(context, tops_bytes);  // what components with options hand on
  for (const HeadRange& range : ranges_of(plans, p.heads)) {
    const int pack = kRows / range.plan->shape.rows;
    const Pairs pairs{static_cast<int>(p.batch), static_cast<int>(range.count) / pack,
                      std::max(1, heads_in_l2(p) / pack), false};
    const auto prepared = kept.emplace_back(prepare(range.plan, pairs, 1, longest, {}, context));
    if (prepared->fill) {
      fills.push_back(range);
    }
    for (std::size_t at = 0; at < prepared->schedules.size(); ++at) {
      const auto made = forward_launch(p, range, *prepared, at, static_cast<RowSum*>(tops.data()), seen, context);
      if (!made) {
        return false;
      }
      launches.push_back(*made);
    }
  }
  const Workspace parts(context, parts_bytes(launches));
  give_parts(launches, parts);
  prepare_kernels(launches, std::vector<KernelConfig>(fills.empty() ? 0 : 1, {Pass::fill, p.dtype}),
                  context.device.index);
  if (joins && !fills.empty() && p.sinks.data != nullptr) {
    begin_with_sinks(p, static_cast<RowSum*>(tops.data()), {}, 1.0f, context);
  } else if (joins && !fills.empty()) {
    driver::fill_zero(tops.data(), tops_bytes, context.stream);
  }
  for (const HeadRange& range : fills) {
    launch_fill(p.dtype, from_head(p.o, range.first, 2), from_head(p.lse, range.first, 4),
                {p.batch, range.count, p.rows}, p.value_depth, from_head(sinks_arg(p), range.first), context);
  }
  launch_all(launches, context);
  return true;
}

}  // namespace fretwork::attention_op::hopper
