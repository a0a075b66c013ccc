// On a GPU: has the walks written, then runs attention's kernels on them. In a selection the rows of a tile are the
// query heads of one query, since they share its blocks; gradients of its keys and values gather the queries of a
// block.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <deque>
#include <limits>
#include <optional>
#include <string>
#include <type_traits>
#include <variant>

#include "core/divide.h"
#include "fretwork/error.h"
#include "fretwork/patterns.h"
#include "ops/attention/cuda/families.h"
#include "ops/attention/cuda/hopper_launch.h"
#include "ops/attention/cuda/operands.h"
#include "ops/dynamic_attention/cuda/config.h"
#include "ops/dynamic_attention/cuda/hopper.h"
#include "ops/dynamic_attention/cuda/walks.h"
#include "runtime/cuda_driver.h"
#include "runtime/kernels.h"

namespace fretwork::dynamic_attention_op {
namespace {

namespace driver = fretwork::cuda;
using namespace attention_op::portable;  // NOLINT: score_arg, fill_zeros
using attention_op::begin_sums;
using attention_op::Input;
using attention_op::InputArg;
using attention_op::KernelShape;
using attention_op::Operand;
using attention_op::RowStats;
using attention_op::RowSum;
using attention_op::scored;
using attention_op::ScoreStats;
using attention_op::Sizes;
using attention_op::sums_bytes;

// ---------------------------------------------------------------------------------------------------- walks

/// A walk of plain tiles, of which the kernel's shape is known.
template <typename Walk>
Walk plain_walk(const KernelShape& shape) {
  Walk walk{};
  walk.row_order = {{1, 1, shape.rows}, {0, 0, 1}};
  walk.col_order = {{1, 1, shape.cols}, {0, 0, 1}};
  walk.interval_row = 1;
  walk.list_ratio = walk.row_block = 1;
  walk.col_block = 64;
  return walk;
}

void set_tiles(WalkArg& walk, const DeviceTiles& tiles) {
  walk.row_tiles = tiles.tiles;
  walk.row_tile_count = tiles.count;
  walk.reach = tiles.reach;
  walk.intervals = tiles.intervals;
}

attention_op::HeadsArg heads_arg(const attention_op::Problem& p, bool keys) {
  return {nullptr,
          nullptr,
          static_cast<int>(keys ? p.kv_heads : p.heads),
          0,
          static_cast<int>(p.batch),
          static_cast<int>(p.heads / p.kv_heads),
          static_cast<int>(p.heads)};
}

using AnyWalk = std::variant<WalkArg, ScatterArg, GatherArg>;

/// `Base`: attention's parameters, whose plan the walk takes the place of.
template <typename Base>
void launch(Config config, const Base& base, const AnyWalk& any, Context& context) {
  config.walk = static_cast<WalkType>(any.index());
  const KernelShape shape = config.shape();
  std::visit(
      [&](const auto& walk) {
        const With<Base, std::decay_t<decltype(walk)>> params{base, walk};
        const std::int64_t grid = static_cast<std::int64_t>(walk.row_tile_count) * base.heads.batch * base.heads.count;
        if (grid > 0) {
          config.kernel(context.device.index)
              .launch(grid, 32 * shape.warps, shape.shared_bytes, &params, context.stream);
        }
      },
      any);
}

/// What the kernels read of a problem: a walk for either side. Holds the memory for the length of a call.
class Walks {
 public:
  Walks(const Problem& problem, bool transposed, Context& context) : p_(problem), context_(context) {
    if (p_.keys.form != Form::documents) {
      bits_.emplace(p_.keys, transposed, context);
    }
  }
  const BlockBits& bits() const { return *bits_; }
  /// Rows that a tile may have: it does not leave its block. Longer documents than their bound have more tiles.
  std::int64_t most_rows(bool keys) const {
    if (p_.keys.form == Form::documents) {
      return std::clamp<std::int64_t>(keys ? p_.keys.max_k : p_.keys.max_q, 1, 128);
    }
    return keys ? p_.keys.block_cols : p_.keys.block_rows;
  }

  template <typename Walk>
  Walk make(const KernelShape& shape, bool keys) {
    Walk walk = plain_walk<Walk>(shape);
    const Keys& k = p_.keys;
    if (k.form == Form::documents) {
      documents_.emplace_back(p_, shape.rows, keys, context_);
      documents_.back().set(walk);
      return walk;
    }
    const int block = static_cast<int>(keys ? k.block_cols : k.block_rows), side = std::min(block, shape.rows);
    tiles_.push_back(device_tiles(*p_.attention.patterns[0], side, keys, context_));
    set_tiles(walk, *tiles_.back());
    walk.row_block = block;
    walk.col_block = static_cast<int>(keys ? k.block_rows : k.block_cols);
    if (k.form == Form::selected) {
      return walk;
    }
    walk.words = keys ? bits_->transposed() : bits_->words();
    walk.words_row = keys ? bits_->transposed_row() : bits_->words_row();
    walk.words_head = (keys ? k.cols : k.rows) * walk.words_row;
    walk.words_batch = k.batch == 1 ? 0 : k.heads * walk.words_head;
    walk.list_ratio = static_cast<int>(p_.attention.heads / k.heads);
    return walk;
  }

  /// The walk of a kernel over blocks or documents, or over the lists of a selection's keys.
  AnyWalk any(const Config& config, bool keys) {
    if (p_.keys.form == Form::selected) {
      return gather(config.shape());
    }
    return scattered(make<WalkArg>(config.shape(), keys), config);
  }

  /// Of a selection: the queries of each key block.
  GatherArg gather(const KernelShape& shape) {
    GatherArg walk = make<GatherArg>(shape, true);
    if (!lists_) {
      lists_.emplace(p_, *bits_, static_cast<int>(std::min<std::int64_t>(walk.row_block, shape.rows)), context_);
    }
    lists_->set(walk);
    walk.row_blocks = static_cast<int>(p_.keys.cols);
    return walk;
  }
  /// After the kernels of the gradients of keys and values.
  void finish_keys(const attention_op::BackwardProblem& b) const {
    if (lists_) {
      lists_->join(b, context_);
    }
  }

  /// Of a selection: the query heads of one query are the rows, queries the batch. Of batch element b.
  AnyWalk one_query(const Config& config, std::int64_t b) {
    const KernelShape shape = config.shape();
    const Keys& k = p_.keys;
    const std::int64_t group = p_.attention.heads / p_.attention.kv_heads;
    const auto intervals = device_tiles(*p_.attention.patterns[0], 1, false, context_);
    const auto heads = patterns::full(patterns::Seq(group, 1));
    tiles_.push_back(intervals);
    tiles_.push_back(device_tiles(*heads, shape.rows, false, context_));
    WalkArg walk = plain_walk<WalkArg>(shape);
    set_tiles(walk, *tiles_.back());
    walk.reach = nullptr;
    walk.intervals = intervals->intervals;
    walk.interval_batch = 1;
    walk.interval_row = 0;
    walk.row_block = static_cast<int>(group);
    walk.col_block = static_cast<int>(k.block_cols);
    walk.words = bits_->words() + b * k.heads * k.rows * bits_->words_row();
    walk.words_row = 0;
    walk.words_batch = bits_->words_row();
    walk.words_head = k.rows * walk.words_batch;
    return scattered(walk, config);
  }

 private:
  /// Several blocks in a step, where they are narrower than it. Kernels in tf32 have no registers for that.
  static AnyWalk scattered(const WalkArg& walk, const Config& config) {
    if (walk.words == nullptr || walk.col_block >= config.shape().cols || config.tf32) {
      return walk;
    }
    return ScatterArg{walk, std::countr_zero(static_cast<unsigned>(walk.col_block))};
  }

  const Problem& p_;
  Context& context_;
  std::optional<BlockBits> bits_;
  std::optional<QueryLists> lists_;
  std::deque<DocumentTiles> documents_;
  std::vector<std::shared_ptr<const DeviceTiles>> tiles_;
};

// ----------------------------------------------------------------------------------------------------- operands

/// q, k, v and, for gradients, d_o, as kernels read them.
struct Operands {
  Input q, k, v;
  Operands(const attention_op::Problem& p, Context& context)
      : q(p.q, {p.batch, p.heads, p.rows, p.depth}, p.dtype, context),
        k(p.k, {p.batch, p.kv_heads, p.cols, p.depth}, p.dtype, context),
        v(p.v, {p.batch, p.kv_heads, p.cols, p.value_depth}, p.dtype, context) {}
};

Operand moved(const Operand& x, std::int64_t b, DType dtype) {
  Operand at = x;
  if (at.data != nullptr) {
    at.data = static_cast<std::byte*>(at.data) + b * x.batch * static_cast<std::int64_t>(size_of(dtype));
  }
  return at;
}

/// Batch element b with its queries as the batch and the query heads of a key head as rows. Keys are the same for all.
attention_op::Problem heads_as_rows(const attention_op::Problem& p, std::int64_t b) {
  const std::int64_t group = p.heads / p.kv_heads;
  attention_op::Problem turned = p;
  turned.batch = p.rows;
  turned.heads = p.kv_heads;
  turned.rows = group;
  const auto turn = [&](const Operand& x, DType dtype) {
    const Operand at = moved(x, b, dtype);
    return Operand{at.data, x.row, x.head * group, x.head, x.col};
  };
  turned.q = turn(p.q, p.dtype);
  turned.o = turn(p.o, p.dtype);
  turned.lse = turn(p.lse, DType::f32);
  turned.k = moved(p.k, b, p.dtype);
  turned.v = moved(p.v, b, p.dtype);
  turned.k.batch = turned.v.batch = 0;
  turned.sinks.row = p.sinks.head;
  turned.sinks.head = p.sinks.head * group;
  return turned;
}
attention_op::BackwardProblem heads_as_rows(const attention_op::BackwardProblem& problem, std::int64_t b) {
  const std::int64_t group = problem.forward.heads / problem.forward.kv_heads;
  attention_op::BackwardProblem turned = problem;
  turned.forward = heads_as_rows(problem.forward, b);
  const auto turn = [&](const Operand& x, DType dtype) {
    const Operand at = moved(x, b, dtype);
    return Operand{at.data, x.row, x.head * group, x.head, x.col};
  };
  turned.d_o = turn(problem.d_o, problem.forward.dtype);
  turned.d_q = turn(problem.d_q, problem.forward.dtype);
  turned.d_lse = turn(problem.d_lse, DType::f32);
  turned.sink_terms = {};  // made of the problem as it was
  return turned;
}

/// Keys or values of one batch element that all queries share: no copy for each.
struct SharedInput {
  Input input;
  SharedInput(const Operand& x, const attention_op::Problem& p, std::int64_t depth, Context& context)
      : input(x, {1, p.kv_heads, p.cols, depth}, p.dtype, context) {}
  InputArg arg() const {
    InputArg arg = input.arg();
    arg.batch = 0;
    return arg;
  }
};

// ------------------------------------------------------------------------------------------------------ forward

attention_op::ForwardParams forward_params(const attention_op::Problem& p, const InputArg& q, const InputArg& k,
                                           const InputArg& v) {
  attention_op::ForwardParams params{};
  params.heads = heads_arg(p, false);
  params.score = score_arg(p);
  params.q = q;
  params.k = k;
  params.v = v;
  params.lse = attention_op::output_arg(p.lse, DType::f32);
  params.sinks = attention_op::sinks_arg(p);
  params.queries = static_cast<int>(p.rows);
  params.depth = static_cast<int>(p.depth);
  params.value_depth = static_cast<int>(p.value_depth);
  return params;
}

void run_forward(const Problem& problem, Context& context) {
  const attention_op::Problem& p = problem.attention;
  if (hopper::fits_selected(problem, context)) {
    hopper::selected_forward(problem, context);
    return;
  }
  Walks walks(problem, false, context);
  if (problem.keys.form != Form::selected) {
    const Config config = config_for(Pass::forward, p, walks.most_rows(false), context);
    const Operands given(p, context);
    attention_op::ForwardParams params = forward_params(p, given.q.arg(), given.k.arg(), given.v.arg());
    params.o = attention_op::output_arg(p.o, p.dtype);
    launch(config, params, walks.any(config, false), context);
    return;
  }
  const Config config = config_for(Pass::forward, p, p.heads / p.kv_heads, context);
  for (std::int64_t b = 0; b < p.batch; ++b) {
    const attention_op::Problem turned = heads_as_rows(p, b);
    const Input q(turned.q, {turned.batch, turned.heads, turned.rows, p.depth}, p.dtype, context);
    const SharedInput k(turned.k, p, p.depth, context), v(turned.v, p, p.value_depth, context);
    attention_op::ForwardParams params = forward_params(turned, q.arg(), k.arg(), v.arg());
    params.o = attention_op::output_arg(turned.o, p.dtype);
    launch(config, params, walks.one_query(config, b), context);
  }
}

// ---------------------------------------------------------------------------------------------------- gradients

/// Statistics of the rows. `wide`: of operands that attention's Hopper kernels read.
class Stats {
 public:
  Stats(const attention_op::BackwardProblem& b, const RowSum* sums, bool wide, Context& context)
      : memory_(context, static_cast<std::size_t>(b.forward.batch * b.forward.heads * b.forward.rows) *
                             (scored(b.forward) ? sizeof(ScoreStats) : sizeof(RowStats))) {
    wide ? attention_op::hopper::launch_statistics(b, memory_.data(), false, context)
         : attention_op::launch_statistics(b, scored(b.forward), memory_.data(), sums, context);
  }
  const void* data() const { return memory_.data(); }

 private:
  Workspace memory_;
};

attention_op::BackwardParams backward_params(const attention_op::Problem& p, const Stats& stats, bool keys) {
  attention_op::BackwardParams params{};
  params.heads = heads_arg(p, keys);
  params.score = score_arg(p);
  params.stats = stats.data();
  params.queries = static_cast<int>(p.rows);
  params.depth = static_cast<int>(p.depth);
  params.value_depth = static_cast<int>(p.value_depth);
  return params;
}

/// One kernel for keys and values, or one for each that is wanted where a row is deep.
std::vector<Config> key_configs(const attention_op::BackwardProblem& b, std::int64_t rows, const Context& context) {
  const Config both = config_for(Pass::d_keys_values, b.forward, rows, context);
  if (both.simple() || both.depth <= 128) {
    return {both};
  }
  std::vector<Config> apart;
  for (const auto& [pass, wanted] : {std::pair{Pass::d_keys, b.d_k.data}, std::pair{Pass::d_values, b.d_v.data}}) {
    if (wanted != nullptr) {
      apart.push_back(config_for(pass, b.forward, rows, context));
    }
  }
  return apart;
}

void selected_query_gradient(const attention_op::BackwardProblem& problem, Walks& walks, Context& context) {
  const attention_op::Problem& p = problem.forward;
  const Config config = config_for(Pass::d_queries, p, p.heads / p.kv_heads, context);
  for (std::int64_t b = 0; b < p.batch; ++b) {
    const attention_op::BackwardProblem turned = heads_as_rows(problem, b);
    const attention_op::Problem& f = turned.forward;
    const Stats stats(turned, nullptr, false, context);
    const Input q(f.q, {f.batch, f.heads, f.rows, p.depth}, p.dtype, context);
    const Input d_o(turned.d_o, {f.batch, f.heads, f.rows, p.value_depth}, p.dtype, context);
    const SharedInput k(f.k, p, p.depth, context), v(f.v, p, p.value_depth, context);
    auto params = backward_params(f, stats, false);
    params.first = q.arg();
    params.second = d_o.arg();
    params.other_first = k.arg();
    params.other_second = v.arg();
    params.d_first = attention_op::output_arg(turned.d_q, p.dtype);
    launch(config, params, walks.one_query(config, b), context);
  }
}

/// What the gradients of a call read.
struct Given {
  const Problem forward;
  const attention_op::BackwardProblem& problem;
  Walks& walks;
  Operands in;
  Input d_o;
  Workspace sums;
  Stats stats;

  Given(const BackwardProblem& b, const Problem& f, Walks& all, bool wide, Context& context)
      : forward(f),
        problem(b.attention),
        walks(all),
        in(f.attention, context),
        d_o(problem.d_o, {f.attention.batch, f.attention.heads, f.attention.rows, f.attention.value_depth},
            f.attention.dtype, context),
        sums(context, may_be_large(f.attention) ? sums_bytes(f.attention) : 0),
        stats(problem, find_sums(context), wide, context) {}

 private:
  /// Where a log-sum-exp may be much larger than a product with the scale is.
  static bool may_be_large(const attention_op::Problem& p) {
    return p.bias.data != nullptr || p.slopes.data != nullptr;
  }
  /// A large log-sum-exp has lost its smaller part to rounding: the forward again, for tiles that have such rows.
  const RowSum* find_sums(Context& context) const {
    if (sums.data() == nullptr) {
      return nullptr;
    }
    const attention_op::Problem& p = forward.attention;
    begin_sums(p, static_cast<RowSum*>(sums.data()), {}, context);
    const Config config = config_for(Pass::forward, p, walks.most_rows(false), context);
    attention_op::ForwardParams params = forward_params(p, in.q.arg(), in.k.arg(), in.v.arg());
    params.sums = static_cast<RowSum*>(sums.data());
    params.again = params.merge = true;
    launch(config, params, walks.any(config, false), context);
    return params.sums;
  }
};

void query_gradient(const Given& given, Context& context) {
  const attention_op::Problem& p = given.problem.forward;
  const Config config = config_for(Pass::d_queries, p, given.walks.most_rows(false), context);
  auto params = backward_params(p, given.stats, false);
  params.first = given.in.q.arg();
  params.second = given.d_o.arg();
  params.other_first = given.in.k.arg();
  params.other_second = given.in.v.arg();
  params.d_first = attention_op::output_arg(given.problem.d_q, p.dtype);
  launch(config, params, given.walks.any(config, false), context);
}

void key_gradients(const Given& given, Context& context) {
  const attention_op::Problem& p = given.problem.forward;
  auto params = backward_params(p, given.stats, true);
  params.first = given.in.k.arg();
  params.second = given.in.v.arg();
  params.other_first = given.in.q.arg();
  params.other_second = given.d_o.arg();
  params.d_first = attention_op::output_arg(given.problem.d_k, p.dtype);
  params.d_second = attention_op::output_arg(given.problem.d_v, p.dtype);
  for (const Config& config : key_configs(given.problem, given.walks.most_rows(true), context)) {
    launch(config, params, given.walks.any(config, true), context);
  }
  given.walks.finish_keys(given.problem);
}

/// Sums in float: element by element, or over the columns of tiles whose rows are queries or keys.
void bias_gradient(const Given& given, Context& context) {
  const attention_op::BackwardProblem& b = given.problem;
  const attention_op::Problem& p = b.forward;
  const Sizes sizes{b.bias_sizes[0], b.bias_sizes[1], b.bias_sizes[2], b.bias_sizes[3]};
  const bool one_row = sizes.rows != p.rows, one_col = sizes.cols != p.cols, keys = one_row && !one_col;
  const bool row_sums = one_row || one_col;
  const std::int64_t line = keys ? p.cols : p.rows;
  const std::int64_t count = sizes.batch * sizes.heads * (row_sums ? line : sizes.rows * sizes.cols);
  const Workspace space(context, static_cast<std::size_t>(count) * 4);
  driver::fill_zero(space.data(), static_cast<std::size_t>(count) * 4, context.stream);
  const Operand at = row_sums ? Operand{space.data(), sizes.heads * line, line, 1, 1}
                              : attention_op::contiguous(space.data(), sizes, sizes.cols);
  const BiasKernel kernel{p.dtype, simple_depth(std::max(p.depth, p.value_depth)), keys, row_sums};
  const KernelShape shape = kernel.shape();
  BiasGradientParams params{};
  params.plan = given.walks.make<WalkArg>(shape, keys);
  params.plan.every_block = true;
  params.score = score_arg(p);
  params.first = keys ? given.in.k.arg() : given.in.q.arg();
  params.second = keys ? given.in.v.arg() : given.d_o.arg();
  params.other_first = keys ? given.in.q.arg() : given.in.k.arg();
  params.other_second = keys ? given.d_o.arg() : given.in.v.arg();
  params.stats = static_cast<const ScoreStats*>(given.stats.data());
  params.out = at.data;
  params.out_batch = at.batch;
  params.out_head = at.head;
  params.out_row = at.row;
  params.out_col = at.col;
  params.head_count = params.all = static_cast<int>(p.heads);
  params.batch = static_cast<int>(p.batch);
  params.ratio = static_cast<int>(p.heads / p.kv_heads);
  params.queries = static_cast<int>(p.rows);
  params.keys = static_cast<int>(p.cols);
  params.depth = static_cast<int>(p.depth);
  params.value_depth = static_cast<int>(p.value_depth);
  params.sum_batch = sizes.batch != p.batch;
  params.sum_heads = sizes.heads != p.heads;
  const std::int64_t grid =
      params.plan.row_tile_count * (params.sum_batch ? 1 : p.batch) * (params.sum_heads ? 1 : p.heads);
  get_kernel(kernel.spec(), context.device.index)
      .launch(grid, 32 * shape.warps, shape.shared_bytes, &params, context.stream);
  const Operand out{b.d_bias.data, b.d_bias.batch, b.d_bias.head, b.d_bias.row, b.d_bias.col};
  if (!row_sums) {
    run_copy(copy_params(space.data(), at, out.data, out, sizes), DType::f32, b.d_bias.dtype, context);
    return;
  }
  const bool both = one_row && one_col;
  const attention_op::CopyParams sum{space.data(),
                                     out.data,
                                     {sizes.batch, sizes.heads, both ? line : 1, both ? 1 : line},
                                     {at.batch, at.head, 1, 1},
                                     {out.batch, out.head, 0,
                                      both   ? 0
                                      : keys ? out.col
                                             : out.row},
                                     0.0f};
  attention_op::add_up(sum, b.d_bias.dtype, attention_op::kSumWarps, context);
}

void run_backward(const BackwardProblem& problem, Context& context) {
  const attention_op::BackwardProblem& b = problem.attention;
  const Problem forward{b.forward, problem.keys};
  const bool selected = problem.keys.form == Form::selected;
  const bool keys = b.d_k.data != nullptr || b.d_v.data != nullptr;
  Walks walks(forward, keys || b.d_bias.data != nullptr, context);
  const bool apart = selected && !hopper::fits_selected(forward, context);  // queries are the batch
  if (apart && b.d_q.data != nullptr) {
    selected_query_gradient(b, walks, context);
  }
  if (apart && !keys && b.sink_terms.data == nullptr) {
    return;
  }
  const Given given(problem, forward, walks, selected && !apart && attention_op::hopper::fits(b, context), context);
  if (!apart && b.d_q.data != nullptr) {
    selected ? hopper::selected_query_gradient(b, problem.keys, walks.bits(), given.in.q.arg(), given.d_o.arg(),
                                               static_cast<const RowStats*>(given.stats.data()), context)
             : query_gradient(given, context);
  }
  if (keys) {
    key_gradients(given, context);
  }
  if (b.d_bias.data != nullptr) {
    bias_gradient(given, context);
  }
}

/// Without keys: −∞, or the sinks.
void fill_statistics(const attention_op::Problem& p, Context& context) {
  if (p.sinks.data != nullptr) {
    const Workspace sums(context, sums_bytes(p));
    begin_sums(p, static_cast<RowSum*>(sums.data()), p.lse, context);
    return;
  }
  attention_op::fill(p.lse, {p.batch, p.heads, p.rows, 1}, DType::f32, -std::numeric_limits<float>::infinity(),
                     context);
}

void check(const Problem& problem) {
  const attention_op::Problem& p = problem.attention;
  if (p.padding.data != nullptr) {
    throw Error("attention", "key_padding_mask", "none with blocks on a GPU", "one");
  }
  constexpr std::int64_t kMost = std::int64_t{1} << 30;
  if (std::max({p.rows, p.cols, p.batch * p.heads}) > kMost) {
    throw Error("attention", "q", "at most 2^30 queries, keys and heads", std::to_string(std::max(p.rows, p.cols)));
  }
}

}  // namespace

namespace cuda {

void forward(const Problem& problem, Context& context) {
  check(problem);
  const fretwork::cuda::DeviceScope scope(context.device.index);
  const attention_op::Problem& p = problem.attention;
  if (p.cols == 0) {
    attention_op::fill(p.o, {p.batch, p.heads, p.rows, p.value_depth}, p.dtype, 0.0f, context);
    fill_statistics(p, context);
  } else if (!hopper::forward(problem, context)) {
    run_forward(problem, context);
  }
  if (p.sinks.data != nullptr && problem.keys.form == Form::documents) {
    clear_outside(problem, context);
  }
}

void backward(const BackwardProblem& problem, Context& context) {
  check({problem.attention.forward, problem.keys});
  const fretwork::cuda::DeviceScope scope(context.device.index);
  const attention_op::Problem& p = problem.attention.forward;
  const bool sinks = problem.attention.d_sinks.data != nullptr;
  const Workspace terms(context, sinks ? static_cast<std::size_t>(p.batch * p.heads * p.rows) * sizeof(float) : 0);
  BackwardProblem all = problem;
  if (sinks) {
    all.attention.sink_terms = {terms.data(), p.rows, p.batch * p.rows, 1, 0};
  }
  if (p.batch * p.heads * p.rows * p.cols == 0) {
    fill_zeros(problem.attention, context);
    if (sinks) {
      sink_terms(all.attention, context);
    }
  } else if (!hopper::backward(all, context)) {
    run_backward(all, context);
  }
  if (sinks) {
    attention_op::add_up_sinks(all.attention, context);
  }
}

}  // namespace cuda
}  // namespace fretwork::dynamic_attention_op
