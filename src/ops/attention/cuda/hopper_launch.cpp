// The Hopper kernels by name, and what every launch of one needs: tensor maps, walks, padding, joins.
#include "ops/attention/cuda/hopper_launch.h"

#include <bit>
#include <cmath>
#include <utility>

#include "core/divide.h"
#include "runtime/alignment.h"
#include "runtime/upload_arena.h"

namespace fretwork::attention_op::hopper {
namespace {

namespace driver = fretwork::cuda;
using driver::uploaded;

KernelSpec instance(const std::string& file, const std::string& kernel, DType dtype, const std::string& rest) {
  return {"ops/attention/cuda/hopper_" + file + ".cuh",
          "fretwork::attention_op::hopper::" + kernel + "<" + device_type(dtype) + rest + ">"};
}
std::string flag(bool value) { return value ? ", true" : ", false"; }

/// Kernels with options have names of their own.
std::string scored(const Extras& extras, const char* kernel) {
  return std::string(extras.score != 0 ? "scored_" : "") + kernel;
}

KernelSpec forward_instance(DType dtype, const Columns& columns, const Extras& extras) {
  return instance("forward", scored(extras, "forward"), dtype, columns.text() + extras.text());
}
KernelSpec backward_instance(DType dtype, const Columns& columns, Pass pass, const Extras& extras) {
  if (pass == Pass::d_values) {
    return instance("backward_head_dim_gt_128", "backward_head_dim_gt_128_values", dtype,
                    columns.text() + extras.text());
  }
  if (columns.head_dim_gt_128()) {
    return instance("backward_head_dim_gt_128", "backward_head_dim_gt_128", dtype,
                    columns.text() + flag(pass == Pass::d_keys) + extras.text());
  }
  return instance("backward", scored(extras, pass == Pass::d_keys ? "backward_keys" : "backward_queries"), dtype,
                  columns.text() + extras.text());
}
KernelSpec fill_instance(DType dtype) { return instance("forward", "fill", dtype, ""); }
KernelSpec statistics_instance(DType dtype, bool score) {
  return {"ops/attention/cuda/rows.cuh",
          std::string("fretwork::attention_stats<") + device_type(dtype) + (score ? ", 8, true>" : ", 8>")};
}
KernelSpec join_instance(DType dtype, bool score) {
  return instance("join", score ? "scored_join" : "join", dtype, "");
}
/// Of kernels that make all gradients at once, for as many columns of q and k as of v.
KernelSpec five_product_instance(DType dtype, const Columns& columns, Pass pass, const Extras& extras) {
  return pass == Pass::five_product
             ? instance("backward_five_product", scored(extras, "backward_five_product"), dtype,
                        ", " + std::to_string(columns.most()) + extras.text())
             : instance("backward_five_product", "finish_five_product", dtype, ", " + std::to_string(columns.most()));
}

/// Options that the list has: a bias of the operands' type, ALiBi, softcap, dropout. All others are compiled as they
/// are asked for.
std::vector<unsigned> listed_scores(DType dtype) { return {dtype == DType::f16 ? 2u : 3u, kAlibi, kSoftcap, kDropout}; }

std::vector<KernelSpec> list_kernels(const std::string& arch) {
  std::vector<KernelSpec> list;
  const auto add = [&](KernelSpec kernel, int shared) {
    kernel.dynamic_shared = shared;
    list.push_back(std::move(kernel));
  };
  if (arch != "sm_90a") {
    return list;
  }
  for (const DType dtype : {DType::f16, DType::bf16}) {
    list.push_back(fill_instance(dtype));
    for (const bool score : {false, true}) {
      list.push_back(statistics_instance(dtype, score));
      list.push_back(join_instance(dtype, score));
    }
    for (const Columns& columns : {Columns{64, 64}, {128, 128}}) {
      for (const Extras& extras : {Extras{false, false}, {true, false}, {true, true}}) {
        add(five_product_instance(dtype, columns, Pass::five_product, extras), five_product_shared(columns.most()));
      }
      list.push_back(five_product_instance(dtype, columns, Pass::finish, {}));
      for (const unsigned score : listed_scores(dtype)) {
        add(five_product_instance(dtype, columns, Pass::five_product, {true, false, score}),
            five_product_shared(columns.most(), true));
        for (const bool general : {false, true}) {
          const Extras extras{general, false, score};
          add(forward_instance(dtype, columns, extras), forward_shared(columns));
          if ((score & kBiasBits) != 0) {
            const Extras tiles{general, false, score | kBiasTiles};
            add(forward_instance(dtype, columns, tiles), forward_shared(columns, tiles.score));
          }
          add(backward_instance(dtype, columns, Pass::d_keys, extras), backward_shared(columns, true));
          add(backward_instance(dtype, columns, Pass::d_queries, extras), backward_shared(columns, true));
        }
      }
    }
    for (const Columns& columns : {Columns{64, 64}, {64, 128}, {128, 128}, {192, 128}, {192, 192}, {256, 256}}) {
      std::vector<Extras> all{{false, false}, {false, true}, {true, false}, {true, true}};
      if (!columns.head_dim_gt_128()) {
        all.insert(all.end(), {{false, false, 0, kHalfRows}, {true, false, 0, kHalfRows}});
      }
      for (const Extras& extras : all) {
        add(forward_instance(dtype, columns, extras), forward_shared(columns, 0, extras.rows));
        for (const bool keys : {false, true}) {
          for (const Pass pass : backward_passes(columns, keys)) {
            add(backward_instance(dtype, columns, pass, extras), backward_shared(columns, false, extras.rows));
          }
        }
      }
    }
  }
  return list;
}
const KernelList kKernels{"attention", list_kernels};

constexpr unsigned kPlainKernels = 778, kHalfRowKernels = kPlainKernels + 4 * kScoreCount * 32;
constinit KernelTable<kHalfRowKernels + 3 * 128> kernels;

/// Whether a tile's tokens follow each other.
bool is_line(const Order& of) { return of.extent[0] == 1 && of.extent[1] == 1 && of.stride[2] == 1; }

/// The polynomial of the capped score: tanh(u) / u for |u| ≤ 3/4, of u². Powers of the factor must be numbers.
void fill_cap(const Problem& p, ScoreMore& more) {
  constexpr double kTerms[] = {0.999999435, -0.333282515, 0.13258983, -0.0500562956, 0.0129296262}, kBound = 0.75;
  if (p.softcap <= 0) {
    return;
  }
  const double factor = p.scale / p.softcap;
  more.cap = static_cast<float>(2 * 1.4426950408889634 * factor);
  more.cap_bound =
      factor > 0x1p-12 && factor < 0x1p6 && p.scale > 0x1p-20 ? static_cast<float>(kBound / factor) : -1.0f;
  for (int n = 0; n < 5; ++n) {
    more.cap_terms[n] = static_cast<float>(p.scale * kTerms[n] * std::pow(factor, 2 * n));
  }
}

/// Whether the kernels can do what is asked for besides the scale: offsets in a row of the bias have 32 bits, tokens
/// are floats, and tanh is as precise as its bound.
bool options_fit(const Problem& p) {
  constexpr std::int64_t kTokens = 1 << 22;
  const auto size = static_cast<std::int64_t>(size_of(p.bias.dtype));
  const bool bias = p.bias.data == nullptr || (p.bias.row >= 0 && p.bias.col >= 0 && p.bias.row * size < kMost &&
                                               p.cols * p.bias.col * size < kMost);
  return std::max(p.depth, p.value_depth) <= 128 && bias && p.rows < kTokens && p.cols < kTokens &&
         (p.softcap == 0 || (p.softcap >= 0x1p-10 && p.softcap <= 0x1p10));
}

}  // namespace

std::string Columns::text() const { return ", " + std::to_string(depth) + ", " + std::to_string(values); }
std::string Extras::text() const {
  return flag(general) + flag(split) +
         (score != 0      ? ", " + std::to_string(score)
          : rows != kRows ? ", " + std::to_string(rows)
                          : "");
}
bool has_groups(const Problem& p, std::size_t count) {
  const Bias& b = p.bias;
  return b.data != nullptr && b.col == 1 &&
         is_aligned(b.data, {b.row, p.heads > 1 ? b.head : 0, p.batch > 1 ? b.batch : 0}, size_of(b.dtype),
                    count * size_of(b.dtype));
}
unsigned score_of(const Problem& p) {
  const unsigned bias = p.bias.data == nullptr       ? 0
                        : p.bias.dtype == DType::f32 ? 1
                        : p.bias.dtype == DType::f16 ? 2
                                                     : 3;
  return bias | (p.slopes.data != nullptr ? kAlibi : 0) | (p.softcap > 0 ? kSoftcap : 0) |
         (p.dropout.rate > 0 ? kDropout : 0);
}

std::optional<BiasSource> bias_source(const Problem& p, const Side& queries, const Side& keys) {
  const Bias& b = p.bias;
  const std::int64_t head = p.heads > 1 ? b.head : 0, batch = p.batch > 1 ? b.batch : 0;
  if (b.data == nullptr || b.dtype == DType::f32 || b.col != 1 || b.row <= 0 || head < 0 || batch < 0 ||
      !is_line(queries.order) || !is_line(keys.order) || queries.unit == 0 || keys.unit < 8 || !has_groups(p, 8)) {
    return std::nullopt;
  }
  const auto size = [](std::int64_t stride, std::int64_t count) {
    return static_cast<std::uint64_t>(stride > 0 ? count : 1);
  };
  const auto bytes = [&](std::int64_t stride) { return static_cast<std::uint64_t>(2 * (stride > 0 ? stride : b.row)); };
  if (std::max({b.row, head, batch}) >= 1LL << 38) {
    return std::nullopt;
  }
  BiasSource source{};
  source.map = std::bit_cast<Map>(
      driver::make_tensor_map(b.data, 2,
                              std::array{static_cast<std::uint64_t>(p.cols), static_cast<std::uint64_t>(p.rows),
                                         size(head, p.heads), size(batch, p.batch)},
                              std::array{bytes(b.row), bytes(head), bytes(batch)},
                              std::array<std::uint32_t, 4>{64, 64, 1, 1}, driver::Swizzle::b128));
  source.head = head > 0 ? 1 : 0;
  source.batch = batch > 0 ? 1 : 0;
  return source;
}
ScoreMore score_more(const Problem& p, std::int64_t first, const Order& rows, const Order& cols) {
  const auto size = static_cast<std::int64_t>(size_of(p.bias.dtype));
  ScoreMore more{};
  more.score = portable::score_arg(p);
  fill_cap(p, more);
  more.head0 = static_cast<int>(first);
  more.heads = static_cast<int>(p.heads);
  more.queries = static_cast<int>(p.rows);
  more.bias_row = static_cast<int>(p.bias.row * size);
  more.bias_col = static_cast<int>(p.bias.col * size);
  more.bias_pairs = has_groups(p, 2) ? 1 : 0;
  more.row_line = is_line(rows) ? 1 : 0;
  more.col_line = is_line(cols) ? 1 : 0;
  return more;
}
Columns columns_of(const Problem& p) {
  return {static_cast<int>(64 * ceil_div(p.depth, 64)), static_cast<int>(64 * ceil_div(p.value_depth, 64))};
}
std::vector<Pass> backward_passes(const Columns& columns, bool keys) {
  return !keys                       ? std::vector{Pass::d_queries}
         : columns.head_dim_gt_128() ? std::vector{Pass::d_keys, Pass::d_values}
                                     : std::vector{Pass::d_keys};
}

std::size_t KernelConfig::number() const {
  const unsigned kind = (dtype == DType::f16 ? 0u : 1u) | unsigned{extras.general} << 1 | unsigned{extras.split} << 2;
  const unsigned depth = static_cast<unsigned>(columns.depth / 64 - 1);
  const unsigned values = static_cast<unsigned>(columns.values / 64 - 1);
  if (extras.score != 0) {
    const unsigned of = pass == Pass::five_product ? 3 : static_cast<unsigned>(pass);
    return kPlainKernels + (of * kScoreCount + extras.score) * 32 + (kind | depth << 3 | values << 4);
  }
  const unsigned within = kind | depth << 3 | values << 5;
  constexpr unsigned kFill = 128 * static_cast<unsigned>(Pass::fill);
  const auto at = static_cast<unsigned>(pass);
  if (extras.rows != kRows) {
    return kHalfRowKernels + 128 * at + within;
  }
  return (pass < Pass::fill ? 128 * at : kFill + 2 * (at - static_cast<unsigned>(Pass::fill))) + within;
}
KernelSpec KernelConfig::spec() const {
  switch (pass) {
    case Pass::forward:
      return forward_instance(dtype, columns, extras);
    case Pass::d_keys:
    case Pass::d_queries:
    case Pass::d_values:
      return backward_instance(dtype, columns, pass, extras);
    case Pass::fill:
      return fill_instance(dtype);
    case Pass::five_product:
    case Pass::finish:
      return five_product_instance(dtype, columns, pass, extras);
    case Pass::join:
    case Pass::scored_join:
      return join_instance(dtype, pass == Pass::scored_join);
    case Pass::statistics:
    case Pass::scored_statistics:
      break;
  }
  return statistics_instance(dtype, pass == Pass::scored_statistics);
}
const Kernel& KernelConfig::kernel(int device) const {
  return kernels.get(number(), device, [this] { return spec(); });
}
int KernelConfig::shared_bytes() const {
  return pass == Pass::forward ? forward_shared(columns, extras.score, extras.rows)
                               : backward_shared(columns, extras.score != 0, extras.rows);
}
void prepare_kernels(std::span<const KernelConfig> wanted, int device) { kernels.prepare(wanted, device); }

int forward_shared(const Columns& columns, unsigned score, int rows) {
  const auto [cols, items, stages] = forward_tiles(columns.depth, columns.values, rows);
  const int bias = (score & kBiasTiles) != 0 ? kRows * cols : 0;
  return 1024 + 2 * (items * rows * columns.most() + stages * cols * (columns.depth + columns.values) + bias);
}
int backward_shared(const Columns& columns, bool scored, int rows) {
  if (scored && columns.most() == 128) {
    return kAllShared - kScoredStatic;
  }
  if (columns.head_dim_gt_128()) {
    const auto [first, second] = head_dim_gt_128_stages(columns.most(), false);
    return 1024 + 2 * columns.most() * (2 * kRows + (first + second) * kBackwardShape.cols);
  }
  const auto [items, stages] = backward_tiles(columns.most(), rows);
  return 1024 + 2 * columns.most() * 2 * (items * rows + stages * kBackwardShape.cols);
}

// ------------------------------------------------------------------------------------------------- operands

bool movable(const Operand& x) {
  return x.data != nullptr && x.col == 1 && x.row > 0 && x.head >= 0 && x.batch >= 0 &&
         is_aligned(x.data, {x.row, x.head, x.batch}, 2, 16);
}

bool fits(const Problem& p, const Context& context) {
  const bool type = p.dtype == DType::f16 || p.dtype == DType::bf16;
  const std::int64_t most = std::max(p.depth, p.value_depth);
  const bool size = most <= kMostColumns && p.depth > 0 && p.value_depth > 0 && p.depth % 8 == 0 &&
                    p.value_depth % 8 == 0 && p.batch > 0 && p.heads > 0 && p.kv_heads > 0 && p.rows > 0 &&
                    p.cols > 0 && p.batch * p.heads < kMost;
  return type && size && (score_of(p) == 0 || options_fit(p)) && static_cast<float>(p.scale) > 0 &&
         std::isfinite(static_cast<float>(p.scale)) && movable(p.q) && movable(p.k) && movable(p.v) && movable(p.o) &&
         driver::kernel_arch(context.device.index) == "sm_90a";
}

Operand from_head(Operand x, std::int64_t head, std::int64_t bytes) {
  x.data = static_cast<char*>(x.data) + head * x.head * bytes;
  return x;
}

SinksArg from_head(SinksArg sinks, std::int64_t head) {
  if (sinks.data != nullptr) {
    sinks.data = static_cast<const char*>(sinks.data) + head * sinks.head * (sinks.type == BiasType::f32 ? 4 : 2);
  }
  return sinks;
}

std::optional<Source> make_source(Operand x, const std::array<std::int64_t, 3>& sizes, std::int64_t depth,
                                  const Side& side, int pack, int room) {
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
  walk.row_tiles = uploaded<Place>(plan.memory, c.rows.tiles);
  walk.col_tiles = uploaded<Place>(plan.memory, c.cols.tiles);
  walk.first = uploaded<int>(plan.memory, c.first);
  walk.last = walk.first + 1;
  walk.runs = uploaded<RunOf>(plan.memory, c.runs);
  walk.row_tokens = uploaded<int>(plan.memory, c.rows.tokens);
  walk.col_tokens = uploaded<int>(plan.memory, c.cols.tokens);
  walk.col_used = uploaded<int>(plan.memory, c.cols.used);
  walk.bits = uploaded<unsigned>(plan.memory, plan.bits);
  walk.used = uploaded<unsigned>(plan.memory, plan.used);
  walk.items = uploaded<Item>(prepared.memory, prepared.schedules[at].items);
  walk.share = uploaded<int>(prepared.memory, prepared.schedules[at].share);
  walk.row_places = c.rows.places();
  walk.col_places = c.cols.places();
  return walk;
}

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

int heads_in_l2(const Problem& p) {
  constexpr std::int64_t kCache = 24 << 20;
  const std::int64_t bytes = 2 * p.cols * (p.depth + p.value_depth);
  return static_cast<int>(
      std::min(p.batch * p.heads, std::max<std::int64_t>(1, kCache / bytes) * (p.heads / p.kv_heads)));
}

// ------------------------------------------------------------------------------------------------- launches

KernelConfig config_of(Pass pass, const Problem& p, const Prepared& prepared, std::size_t at, bool seen) {
  return {pass,
          p.dtype,
          columns_of(p),
          {prepared.component(at).general || seen, prepared.schedules[at].split, score_of(p)}};
}

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

ScoredJoinParams join_of(const Prepared& prepared, std::size_t at) {
  ScoredJoinParams join{};
  join.splits = uploaded<Split>(prepared.memory, prepared.schedules[at].splits);
  join.tiles = prepared.schedules[at].split_count;
  join.row_tokens = uploaded<int>(prepared.plan->memory, prepared.component(at).rows.tokens);
  return join;
}

void launch_fill(DType dtype, const Operand& x, const Operand& lse, const std::array<std::int64_t, 3>& sizes,
                 std::int64_t depth, const SinksArg& sinks, Context& context) {
  FillParams params{};
  params.sinks = sinks;
  params.o = lines_of(x);
  params.lse = lines_of(lse);
  params.rows = sizes[0] * sizes[1] * sizes[2];
  params.per_head = static_cast<int>(sizes[2]);
  params.heads = static_cast<int>(sizes[1]);
  params.depth = static_cast<int>(depth);
  KernelConfig{Pass::fill, dtype}
      .kernel(context.device.index)
      .launch(ceil_div(params.rows, 8), 256, 0, &params, context.stream);
}

void give_memory(Launch<ScoredForwardParams>& launch, char* memory) {
  launch.join.sums[0] = launch.params.sums = reinterpret_cast<float*>(memory);
  launch.join.shares = launch.params.shares = reinterpret_cast<Share*>(memory + launch.sums_bytes(0));
}
void give_memory(Launch<ScoredBackwardParams>& launch, char* memory) {
  launch.join.sums[0] = launch.params.sums[0] = reinterpret_cast<float*>(memory);
  launch.join.sums[1] = launch.params.sums[1] = reinterpret_cast<float*>(memory + launch.sums_bytes(0));
}

void launch_join(const KernelConfig& config, const ScoredJoinParams& join, const Context& context) {
  const std::int64_t rows = std::int64_t{join.tiles} * kRows * (join.lines[1] > 0 ? 2 : 1);
  config.kernel(context.device.index).launch_behind(rows / kJoinWarps, 32 * kJoinWarps, 0, &join, context.stream);
}

}  // namespace fretwork::attention_op::hopper
