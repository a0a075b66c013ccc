// Attention's gradients on Hopper: all at once with five products, or keys and values apart from queries.
#include <cmath>
#include <initializer_list>
#include <iterator>
#include <utility>

#include "core/divide.h"
#include "ops/attention/cuda/hopper_launch.h"
#include "runtime/upload_arena.h"

namespace fretwork::attention_op::hopper {
namespace {

namespace driver = fretwork::cuda;
using driver::uploaded;

using BackwardLaunch = Launch<ScoredBackwardParams>;

/// Of a row's statistics: RowStats, or ScoreStats where there are options.
std::size_t stats_size(const Problem& p) { return score_of(p) != 0 ? sizeof(ScoreStats) : sizeof(RowStats); }
std::size_t stats_bytes(const Problem& p) {
  return static_cast<std::size_t>(p.batch * p.heads * p.rows) * stats_size(p);
}
/// What finds rows whose log-sum-exp has lost its smaller part to rounding: only a bias or ALiBi makes them so large.
std::size_t large_sums_bytes(const Problem& p) {
  const bool large = p.bias.data != nullptr || p.slopes.data != nullptr;
  return large ? sums_bytes(p) : 0;
}
KernelConfig statistics_config(const Problem& p) {
  return {score_of(p) != 0 ? Pass::scored_statistics : Pass::statistics, p.dtype};
}

/// Gradients from one component: of queries, of keys, of values, or of keys and values where registers hold both.
std::optional<BackwardLaunch> backward_launch(const BackwardProblem& b, const Heads& heads, const Prepared& prepared,
                                              std::size_t at, Pass pass, const void* stats, Seen& seen,
                                              Context& context) {
  const Problem& p = b.forward;
  const bool keys = pass != Pass::d_queries;
  const DeviceComponent& c = prepared.component(at);
  auto params = backward_operands(b, pass, heads, c.rows, c.cols);
  if (!params) {
    return std::nullopt;
  }
  if (score_of(p) != 0) {
    params->more = score_more(p, heads.first, c.rows.order, c.cols.order);
  }
  params->walk = walk_of(prepared, at);
  if (!keys) {
    params->seen = see(p, c, kBackwardShape.cols, params->walk, seen, context);
  }
  params->pieces = uploaded<PieceOf>(prepared.memory, prepared.schedules[at].pieces);
  params->stats = reinterpret_cast<const RowStats*>(static_cast<const char*>(stats) +
                                                    static_cast<std::size_t>(heads.first * p.rows) * stats_size(p));
  params->add = at > 0 || prepared.fill ? 1 : 0;
  const Columns columns = columns_of(p);
  ScoredJoinParams join = join_of(prepared, at);
  std::copy(std::begin(params->out), std::end(params->out), join.out);
  join.lines[0] = pass == Pass::d_values ? columns.values : columns.depth;
  join.depth[0] = pass == Pass::d_values ? params->value_depth : params->depth;
  join.lines[1] = pass == Pass::d_keys && !columns.head_dim_gt_128() ? columns.values : 0;
  join.depth[1] = params->value_depth;
  join.merge = params->add;
  return BackwardLaunch{config_of(pass, p, prepared, at, !keys && !seen.empty()), prepared.schedules[at].grid, *params,
                        join, prepared.schedules[at].parts};
}

bool all_countable(const Plans& plans) {
  return std::ranges::all_of(plans, [](const auto& plan) { return is_countable(*plan); });
}

/// A problem for the kernels that make all gradients at once. Rows of the plan are keys.
struct FiveProduct {
  std::shared_ptr<const DevicePlan> plan;
  bool all;                           ///< every query meets every key; else all up to its own
  std::int64_t row_tiles, col_tiles;  ///< of keys and queries of a head
  std::int64_t items, tiles;          ///< the same of all heads and batch elements
};

/// A bias of 16 bits is read eight keys at a time.
bool five_product_options(const Problem& p) {
  const bool narrow = p.bias.data != nullptr && p.bias.dtype != DType::f32;
  return !narrow || has_groups(p, 8);
}

std::optional<FiveProduct> five_product(const BackwardProblem& b, const BackwardPlans& plans, const Context& context) {
  const Problem& p = b.forward;
  const bool wants_keys = b.d_k.data != nullptr || b.d_v.data != nullptr;
  const auto ranges = ranges_of(plans.transposed, p.heads);
  if (!wants_keys || b.d_q.data == nullptr || ranges.size() != 1) {
    return std::nullopt;
  }
  auto plan = find_plan(ranges.front().plan, context.device.index);
  const Columns columns = columns_of(p);
  const std::int64_t row_tiles = p.cols / kRows, col_tiles = p.rows / kBackwardShape.cols;
  const std::int64_t items = p.batch * p.kv_heads * row_tiles, tiles = p.batch * p.heads * col_tiles;
  // A key tile that goes round comes to a query tile two steps after the one it waits for, or later.
  const bool all = plan->edge == kNoEdge;
  if (!plan->edge || columns.depth != columns.values || columns.head_dim_gt_128() ||
      (all && col_tiles < 2 * row_tiles) || 2 * tiles >= kMost || !five_product_options(p)) {
    return std::nullopt;
  }
  return FiveProduct{std::move(plan), all, row_tiles, col_tiles, items, tiles};
}

/// What the problem alone says.
ScoredFiveProductParams five_product_params(const BackwardProblem& b, const FiveProduct& five) {
  const Problem& p = b.forward;
  ScoredFiveProductParams params{};
  if (score_of(p) != 0) {
    const DeviceComponent& c = five.plan->components.front();
    params.more = score_more(p, 0, c.rows.order, c.cols.order);
    if (const auto bias = bias_source(p, c.cols, c.rows)) {
      params.bias = *bias;
      params.prefetch = 1;
    }
  }
  params.d_k = lines_of(b.d_k);
  params.d_v = lines_of(b.d_v);
  params.d_q = lines_of(b.d_q);
  params.items = static_cast<int>(five.items);
  params.row_tiles = static_cast<int>(five.row_tiles);
  params.col_tiles = static_cast<int>(five.col_tiles);
  params.pairs = static_cast<int>(p.batch * p.kv_heads);
  params.tiles = static_cast<int>(five.tiles);
  params.kv_heads = static_cast<int>(p.kv_heads);
  params.group = static_cast<int>(p.heads / p.kv_heads);
  params.depth = static_cast<int>(p.depth);
  params.value_depth = static_cast<int>(p.value_depth);
  params.scale = static_cast<float>(p.scale);
  params.scale_2 = static_cast<float>(p.scale * 1.4426950408889634);
  params.padding = padding_arg(p);
  return params;
}

/// Statistics, products, and their finish or the other side's products; µs beyond empty kernels. Fitted with the
/// forward's constants.
constexpr double kBackwardLaunches = 3, kBackwardExposed = 6.7;

/// Of a step of 128 keys and 64 queries in which all five products are made, finish and statistics included: 562
/// TFLOP/s of full attention on 132 SMs at a head dim of 128, 488 at 64.
double five_product_step_us(const Problem& p) {
  const Columns columns = columns_of(p);
  const double rate = columns.most() == 64 ? 3.70e6 : 4.26e6;  // flops of an SM in a µs
  return 2.0 * kRows * kBackwardShape.cols * (3 * columns.depth + 2 * columns.values) / rate;
}

/// Steps of key tiles, all heads together.
double key_steps(const Problem& p, const BackwardPlans& plans) {
  double steps = 0;
  for (const HeadRange& range : ranges_of(plans.transposed, p.heads)) {
    for (const Component& c : range.plan->components) {
      steps += static_cast<double>(p.batch * range.count * c.pairs);
    }
  }
  return steps;
}

/// What no kernel here makes: zeros for padding, and the gradient of the bias.
void finish_others(const BackwardProblem& b, Context& context) {
  clear_padding(b, context);
  if (b.d_bias.data != nullptr) {
    portable::bias_gradient(b, context);
  }
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
  return {static_cast<int>(p.batch), static_cast<int>(range.count) / group, std::max(1, heads_in_l2(p) / group),
          backwards};
}

/// What a backward pass launches, and what must live until it has.
struct BackwardLaunches {
  std::vector<BackwardLaunch> launches;
  std::vector<Zeros> zeros;
  std::vector<std::shared_ptr<const Prepared>> kept;
  Seen seen;
};

/// What one direction of one range of heads launches; false where it cannot.
bool add_launches(const BackwardProblem& b, const HeadRange& range, bool keys, int longest, const Beside& beside,
                  const void* stats, BackwardLaunches& made, Context& context) {
  auto& [launches, zeros, kept, seen] = made;
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
    for (const Pass pass : backward_passes(columns_of(p), keys)) {
      const auto launch = backward_launch(b, heads, *prepared, at, pass, stats, seen, context);
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
    const auto same = [&](const BackwardLaunch& other) { return other.config.pass == at->config.pass; };
    const bool first = std::none_of(launches.begin(), at, same);
    at->params.early = at != launches.begin() && first && std::prev(at)->grid > 0 ? 1 : 0;
  }
}

/// What all ranges of heads launch, keys first; false where one cannot.
bool add_all_launches(const BackwardProblem& b, const BackwardPlans& plans, int longest, const void* stats,
                      BackwardLaunches& made, Context& context) {
  const Problem& p = b.forward;
  const std::int64_t group = p.heads / p.kv_heads;
  const auto ranges = ranges_of(plans.rows, p.heads), kv_ranges = ranges_of(plans.transposed, p.heads);
  const bool wants_keys = b.d_k.data != nullptr || b.d_v.data != nullptr;
  const bool follow = queries_follow_keys(kv_ranges, ranges) && wants_keys && b.d_q.data != nullptr;
  Beside beside;
  if (follow) {
    beside = {ranges.front().plan, backward_pairs(p, ranges.front(), false, false), 1, nullptr};
  }
  for (const HeadRange& range : wants_keys ? kv_ranges : std::vector<HeadRange>{}) {
    if (!add_launches(b, range, true, longest, beside, stats, made, context)) {
      return false;
    }
  }
  if (follow) {
    beside = {kv_ranges.front().plan, backward_pairs(p, kv_ranges.front(), true, false), static_cast<int>(group),
              &made.kept.back()->schedules.back().loads};
  }
  for (const HeadRange& range : b.d_q.data != nullptr ? ranges : std::vector<HeadRange>{}) {
    if (!add_launches(b, range, false, longest, beside, stats, made, context)) {
      return false;
    }
  }
  return true;
}

}  // namespace

std::optional<ScoredBackwardParams> backward_operands(const BackwardProblem& b, Pass pass, const Heads& heads,
                                                      const Side& rows, const Side& cols) {
  const Problem& p = b.forward;
  const bool keys = pass != Pass::d_queries;
  const Side &queries_side = keys ? cols : rows, &keys_side = keys ? rows : cols;
  const std::array<std::int64_t, 3> sizes{p.batch, heads.count, p.rows}, kv_sizes{p.batch, heads.kv_count, p.cols};
  const auto q = make_source(from_head(p.q, heads.first, 2), sizes, p.depth, queries_side);
  const auto d_o = make_source(from_head(b.d_o, heads.first, 2), sizes, p.value_depth, queries_side);
  const auto k = make_source(from_head(p.k, heads.kv_first, 2), kv_sizes, p.depth, keys_side);
  const auto v = make_source(from_head(p.v, heads.kv_first, 2), kv_sizes, p.value_depth, keys_side);
  if (!q || !d_o || !k || !v) {
    return std::nullopt;
  }
  ScoredBackwardParams params{};
  params.rows[0] = keys ? *k : *q;
  params.rows[1] = keys ? *v : *d_o;
  params.cols[0] = keys ? *q : *k;
  params.cols[1] = keys ? *d_o : *v;
  const Lines d_v = keys ? lines_of(from_head(b.d_v, heads.kv_first, 2)) : Lines{};
  params.out[0] = pass == Pass::d_values
                      ? d_v
                      : lines_of(keys ? from_head(b.d_k, heads.kv_first, 2) : from_head(b.d_q, heads.first, 2));
  params.out[1] = d_v;
  params.stats_batch = static_cast<int>(p.heads * p.rows);
  params.stats_head = static_cast<int>(p.rows);
  params.group = static_cast<int>(p.heads / p.kv_heads);
  params.depth = static_cast<int>(p.depth);
  params.value_depth = static_cast<int>(p.value_depth);
  params.scale = static_cast<float>(p.scale);
  params.scale_2 = static_cast<float>(p.scale * 1.4426950408889634);
  return params;
}

void launch_statistics(const BackwardProblem& b, void* stats, bool in_tiles, Context& context) {
  const Problem& p = b.forward;
  const Workspace sums(context, large_sums_bytes(p));
  if (sums.data() != nullptr) {
    portable::find_large_sums(p, static_cast<RowSum*>(sums.data()), context);
  }
  StatsParams params = stats_params(b);
  params.stats = stats;
  params.sums = static_cast<const RowSum*>(sums.data());
  params.in_tiles = in_tiles;
  statistics_config(p)
      .kernel(context.device.index)
      .launch(ceil_div(params.all_rows, 16), 256, 0, &params, context.stream);
}

bool fits(const BackwardProblem& b, const Context& context) {
  const Problem& p = b.forward;
  const bool wants_keys = b.d_k.data != nullptr || b.d_v.data != nullptr;
  return fits(p, context) && movable(b.d_o) && p.lse.data != nullptr &&
         (!wants_keys || (movable(b.d_k) && movable(b.d_v))) && (b.d_q.data == nullptr || movable(b.d_q)) &&
         p.batch * p.heads * p.rows < kMost;
}

bool fits(const BackwardProblem& b, const BackwardPlans& plans, const Context& context) {
  const std::int64_t heads = b.forward.heads, group = heads / std::max<std::int64_t>(b.forward.kv_heads, 1);
  // Heads that share keys are added up by one CTA, so they must share a plan as well.
  const auto in_groups = [&](const Plans& of) {
    return std::ranges::all_of(ranges_of(of, heads),
                               [&](const HeadRange& r) { return r.first % group == 0 && r.count % group == 0; });
  };
  return fits(b, context) && all_countable(plans.rows) && all_countable(plans.transposed) && in_groups(plans.rows) &&
         in_groups(plans.transposed);
}

BackwardPlans backward_plans(const BackwardProblem& b) {
  BackwardPlans plans;
  for (const auto& pattern : b.forward.patterns) {
    plans.rows.push_back(plan(*pattern, kBackwardShape));
    plans.transposed.push_back(transposed_plan(*pattern, kBackwardShape));
  }
  return plans;
}

bool fits_five_product(const BackwardProblem& b, const BackwardPlans& plans, const Context& context) {
  // Measured from 1024 queries on, under a causal mask from 4096. With shared key heads a causal gradient is slower:
  // 0.53 ms instead of 0.42 with 32 heads on 8 and 4096 tokens.
  const auto five = five_product(b, plans, context);
  return five && (five->all ? five->col_tiles >= 16 : five->col_tiles >= 64 && b.forward.heads == b.forward.kv_heads);
}

cost::Work cost_five_product(const BackwardProblem& b, const BackwardPlans& plans, const Context& context) {
  // Key tiles are not split, so the last ones are waited for: whole waves of a full pattern. Those of a causal one
  // begin one after the other and wait for as much as a third of a tile. Measured: it pays from 3.5 tiles for each SM
  // on.
  constexpr double kCausalWait = 0.35;
  const auto five = five_product(b, plans, context);
  const double ctas = driver::device_info(context.device.index).multiprocessors;
  const double items = static_cast<double>(five->items);
  const double waves = five->all ? std::ceil(items / ctas) : items / ctas + kCausalWait;
  return {.launches = kBackwardLaunches,
          .memory = copies_us(operand_bytes(b), 0),
          .busiest = waves * key_steps(b.forward, plans) / items * five_product_step_us(b.forward),
          .serial = kBackwardExposed};
}

bool launch_five_product(const BackwardProblem& b, const BackwardPlans& plans, Context& context) {
  const Problem& p = b.forward;
  const auto five = fits(b, plans, context) ? five_product(b, plans, context) : std::nullopt;
  if (!five) {
    return false;
  }
  const int device = context.device.index, ctas = driver::device_info(device).multiprocessors;
  const Columns columns = columns_of(p);
  const DeviceComponent& c = five->plan->components.front();
  const auto q = make_source(p.q, {p.batch, p.heads, p.rows}, p.depth, c.cols);
  const auto d_o = make_source(b.d_o, {p.batch, p.heads, p.rows}, p.value_depth, c.cols);
  const auto k = make_source(p.k, {p.batch, p.kv_heads, p.cols}, p.depth, c.rows);
  const auto v = make_source(p.v, {p.batch, p.kv_heads, p.cols}, p.value_depth, c.rows);
  if (!q || !d_o || !k || !v) {
    return false;
  }
  const auto size = static_cast<std::size_t>((five->all ? 2 : 1) * five->tiles);
  const Workspace stats(context, stats_bytes(p));
  const Workspace sums(context, size * static_cast<std::size_t>(64 * columns.most()) * sizeof(float)),
      turns(context, (size + 1) * sizeof(int));
  ScoredFiveProductParams params = five_product_params(b, *five);
  params.k = *k;
  params.v = *v;
  params.q = *q;
  params.d_o = *d_o;
  params.stats = static_cast<RowStats*>(stats.data());
  params.sums = static_cast<float*>(sums.data());
  params.turns = static_cast<int*>(turns.data());
  params.taken = params.turns + size;
  params.low = static_cast<int>(*five->plan->edge);
  params.round = five->all ? 1 : 0;
  params.together = five->all ? 1 : std::min(params.pairs, static_cast<int>(ceil_div(ctas, 8)));
  const bool padded = p.padding.data != nullptr;
  const unsigned score = score_of(p);
  const KernelConfig multiply{Pass::five_product, p.dtype, columns, {!five->all || padded, padded, score}},
      finish{Pass::finish, p.dtype, columns};
  prepare_kernels(std::vector{statistics_config(p), multiply, finish}, device);
  driver::fill_zero(turns.data(), (size + 1) * sizeof(int), context.stream);
  launch_statistics(b, stats.data(), true, context);
  multiply.kernel(device).launch_behind(std::min<std::int64_t>(ctas, five->items),
                                        five_product_tiles(columns.most()).threads,
                                        five_product_shared(columns.most(), score != 0), &params, context.stream);
  finish.kernel(device).launch_behind(five->tiles, 128, 0, &params, context.stream);
  finish_others(b, context);
  return true;
}

cost::Work cost(const BackwardProblem& b, const BackwardPlans& plans, const Context& context) {
  // Seven products to five, or eight. Measured on full attention: 1.11 at a head dim of 64, 1.2 at 128.
  constexpr double kSevenProducts = 1.1, kEightProducts = 1.1 * 8 / 7;
  const double ctas = driver::device_info(context.device.index).multiprocessors;
  const bool eight = columns_of(b.forward).head_dim_gt_128();
  return {.launches = kBackwardLaunches,
          .memory = copies_us(operand_bytes(b), 0),
          .busiest = key_steps(b.forward, plans) / ctas * five_product_step_us(b.forward) *
                     (eight ? kEightProducts : kSevenProducts),
          .serial = kBackwardExposed};
}

bool launch(const BackwardProblem& b, const BackwardPlans& plans, Context& context, int longest) {
  if (!fits(b, plans, context)) {
    return false;
  }
  const Problem& p = b.forward;
  const Workspace stats(context, stats_bytes(p));
  void* const numbers = stats.data();
  BackwardLaunches made;
  if (!add_all_launches(b, plans, longest, numbers, made, context)) {
    return false;
  }
  let_start_early(made.launches);
  const Workspace parts(context, parts_bytes(made.launches));
  give_parts(made.launches, parts);
  std::vector<KernelConfig> others{statistics_config(p)};
  if (!made.zeros.empty()) {
    others.push_back({Pass::fill, p.dtype});
  }
  prepare_kernels(made.launches, std::move(others), context.device.index);
  launch_statistics(b, numbers, false, context);
  for (const Zeros& zero : made.zeros) {
    launch_fill(p.dtype, zero.x, {}, zero.sizes, zero.depth, {}, context);
  }
  launch_all(made.launches, context);
  finish_others(b, context);
  return true;
}

}  // namespace fretwork::attention_op::hopper
