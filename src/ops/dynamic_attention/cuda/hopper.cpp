// Attention's Hopper kernels on walks that the device wrote.
#include "ops/dynamic_attention/cuda/hopper.h"

#include <algorithm>
#include <deque>
#include <optional>
#include <vector>

#include "ops/attention/cuda/hopper_launch.h"
#include "ops/dynamic_attention/cuda/hopper_walk.h"
#include "ops/dynamic_attention/cuda/walks.h"

namespace fretwork::dynamic_attention_op::hopper {
namespace {

namespace kernels = attention_op::hopper;
using kernels::kHalfRows;
using kernels::kRows;
using kernels::Pass;

constexpr std::int64_t kMostRuns = 1 << 22;  // of 32 bytes each; gradients may need twice as many

bool is_tile(std::int64_t block) { return block == kHalfRows || block == kRows; }

/// Rows of a tile, of queries or of keys: tiles do not leave their block, nor their document. Short documents would
/// leave most of a large tile empty.
int tile_rows(const Problem& problem, bool keys) {
  const Keys& k = problem.keys;
  if (k.form == Form::documents) {
    constexpr std::int64_t kShort = 96;  // on average
    const std::int64_t bound = keys ? k.max_k : k.max_q;
    const std::int64_t tokens = keys ? problem.attention.cols : problem.attention.rows;
    const bool is_short = bound <= kHalfRows || tokens <= kShort * k.documents;
    return is_short && std::max(problem.attention.depth, problem.attention.value_depth) <= 128 ? kHalfRows : kRows;
  }
  return static_cast<int>(std::min(k.block_rows, k.block_cols));
}

bool suits_form(const Problem& problem) {
  const Keys& keys = problem.keys;
  const attention_op::Problem& p = problem.attention;
  switch (keys.form) {
    case Form::mask:
    case Form::lists: {
      const int rows = tile_rows(problem, false);
      return is_tile(keys.block_rows) && is_tile(keys.block_cols) && p.patterns.size() == 1 &&
             (rows == kRows || std::max(p.depth, p.value_depth) <= 128) && p.heads % keys.heads == 0 &&
             most_runs(keys, rows, rows) <= kMostRuns &&
             p.batch * p.heads * (std::max(p.rows, p.cols) / kHalfRows + 1) <= kMostRuns;
    }
    case Form::documents:  // starts that do not ascend may make each document as long as all tokens: tiles are counted
                           // in int
      return std::max(p.rows, p.cols) <= kMostTokens &&
             (keys.documents + 2) * (std::max(p.rows, p.cols) / kHalfRows + 1) < kernels::kMost &&
             p.heads * (std::max(p.rows, p.cols) / kHalfRows + keys.documents + 2) <= kMostRuns;
    case Form::selected:
      break;
  }
  return false;
}

bool suits(const Problem& problem, const Context& context) {
  const attention_op::Problem& p = problem.attention;
  return suits_form(problem) && p.padding.data == nullptr && kernels::score_of(p) == 0 && kernels::fits(p, context);
}

Axis axis_of(const Problem& problem, bool keys, int side) {
  const std::int64_t tokens = keys ? problem.attention.cols : problem.attention.rows;
  return problem.keys.form == Form::documents ? Axis::of_documents(tokens, side) : Axis::of_blocks(tokens, side);
}

/// Columns of a step of the forward kernel.
int forward_cols(const Problem& problem, int rows) {
  const kernels::Columns columns = kernels::columns_of(problem.attention);
  return kernels::forward_tiles(columns.depth, columns.values, rows).cols;
}

std::optional<BlockBits> find_bits(const Problem& problem, bool transposed, Context& context) {
  return needs_bits(problem.keys, transposed)
             ? std::optional<BlockBits>(std::in_place, problem.keys, transposed, context)
             : std::nullopt;
}

}  // namespace

bool forward(const Problem& problem, Context& context) {
  const attention_op::Problem& p = problem.attention;
  if (!suits(problem, context)) {
    return false;
  }
  const int side = tile_rows(problem, false);
  const Axis rows = axis_of(problem, false, side), cols = axis_of(problem, true, forward_cols(problem, side));
  auto params = kernels::forward_operands(p, 0, p.heads, rows.on_device(), cols.on_device());
  if (!params) {
    return false;
  }
  const std::optional<BlockBits> bits = find_bits(problem, false, context);
  const DeviceWalk walk(problem, bits ? &*bits : nullptr, rows, cols, false, context);
  params->walk = walk.walk();
  const kernels::KernelConfig config{Pass::forward, p.dtype, kernels::columns_of(p), {walk.general(), false, 0, side}};
  config.kernel(context.device.index)
      .launch(walk.grid(), kernels::threads_of(side), config.shared_bytes(), &*params, context.stream);
  return true;
}

bool backward(const BackwardProblem& problem, Context& context) {
  const attention_op::BackwardProblem& b = problem.attention;
  const attention_op::Problem& p = b.forward;
  const Problem walked{p, problem.keys};
  // Key tiles meet the queries of all heads in their group by one list.
  if (!suits(walked, context) || !kernels::fits(b, context) || p.kv_heads % problem.keys.heads != 0) {
    return false;
  }
  const Workspace stats(context, static_cast<std::size_t>(p.batch * p.heads * p.rows) * sizeof(attention_op::RowStats));
  struct Launch {
    Pass pass;
    Axis rows, cols;
    kernels::ScoredBackwardParams params;
  };
  std::vector<Launch> launches;
  for (const bool keys : {true, false}) {
    if (keys ? b.d_k.data == nullptr && b.d_v.data == nullptr : b.d_q.data == nullptr) {
      continue;
    }
    const Axis rows = axis_of(walked, keys, tile_rows(walked, keys));
    const Axis cols = axis_of(walked, !keys, kernels::kBackwardShape.cols);
    for (const Pass pass : kernels::backward_passes(kernels::columns_of(p), keys)) {
      auto params =
          kernels::backward_operands(b, pass, {0, p.heads, 0, p.kv_heads}, rows.on_device(), cols.on_device());
      if (!params) {
        return false;
      }
      params->stats = static_cast<const attention_op::RowStats*>(stats.data());
      launches.push_back({pass, rows, cols, *params});
    }
  }
  const bool any_keys = b.d_k.data != nullptr || b.d_v.data != nullptr;
  const std::optional<BlockBits> bits = find_bits(walked, any_keys, context);
  std::deque<DeviceWalk> walks;  // until all is launched
  kernels::launch_statistics(b, stats.data(), false, context);
  for (Launch& launch : launches) {
    if (launch.pass != Pass::d_values) {  // which takes the walk of d_keys
      walks.emplace_back(walked, bits ? &*bits : nullptr, launch.rows, launch.cols, launch.pass == Pass::d_keys,
                         context);
    }
    const DeviceWalk& walk = walks.back();
    launch.params.walk = walk.walk();
    const kernels::KernelConfig config{
        launch.pass, p.dtype, kernels::columns_of(p), {walk.general(), false, 0, launch.rows.side}};
    config.kernel(context.device.index)
        .launch(walk.grid(), kernels::threads_of(launch.rows.side), config.shared_bytes(), &launch.params,
                context.stream);
  }
  return true;
}

}  // namespace fretwork::dynamic_attention_op::hopper
