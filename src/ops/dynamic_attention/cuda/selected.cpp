// Selected key blocks on Hopper: which kernel, its parameters, its launch.
#include <algorithm>
#include <bit>
#include <limits>
#include <string>
#include <vector>

#include "core/divide.h"
#include "ops/attention/cuda/hopper_launch.h"
#include "ops/dynamic_attention/cuda/hopper.h"
#include "ops/dynamic_attention/cuda/params_hopper.cuh"
#include "runtime/kernels.h"
#include "runtime/tensor_map.h"

namespace fretwork::dynamic_attention_op::hopper {
namespace {

namespace driver = fretwork::cuda;
constexpr double kLog2e = 1.4426950408889634;
constexpr std::int64_t kMostHeads = 16 * kSelectedWarps;  // of a group: a tile has one query at least

struct Config {
  DType dtype;
  int depth, keys;
  bool gradient;

  KernelSpec spec() const {
    return {"ops/dynamic_attention/cuda/selected.cuh",
            std::string("fretwork::dynamic_attention_op::hopper::selected<") + device_type(dtype) + ", " +
                std::to_string(depth) + ", " + std::to_string(keys) + (gradient ? ", true>" : ", false>"),
            selected_shared(depth, gradient)};
  }
};

std::vector<KernelSpec> list_kernels(const std::string& arch) {
  std::vector<KernelSpec> list;
  for (const DType dtype : {DType::f16, DType::bf16}) {
    for (const int depth : {64, 128}) {
      for (const int keys : {16, 32, 64}) {
        for (const bool gradient : {false, true}) {
          if (arch == "sm_90a") {
            list.push_back(Config{dtype, depth, keys, gradient}.spec());
          }
        }
      }
    }
  }
  return list;
}
const KernelList kList{"dynamic_attention", list_kernels};

std::optional<TiledView> view_of(const attention_op::Operand& x, const attention_op::Problem& p, std::int64_t depth) {
  return make_tiled_view(x.data, {depth, p.cols, p.kv_heads, p.batch}, {x.col, x.row, x.head, x.batch});
}

void launch(const attention_op::Problem& p, const Keys& keys, const BlockBits& bits, bool gradient,
            SelectedParams& params, Context& context) {
  const int depth = std::max(p.depth, p.value_depth) <= 64 ? 64 : 128;
  const Config config{p.dtype, depth, static_cast<int>(std::min<std::int64_t>(keys.block_cols, kSelectedKeys)),
                      gradient};
  const auto box = static_cast<std::uint32_t>(config.keys);
  const auto intervals = device_tiles(*p.patterns[0], 1, false, context);
  params.k = view_of(p.k, p, p.depth)->map(64, box);
  params.v = view_of(p.v, p, p.value_depth)->map(64, box);
  params.words = bits.words();
  params.words_row = bits.words_row();
  params.block = static_cast<int>(keys.block_cols);
  params.intervals = intervals->intervals;
  params.queries = static_cast<int>(p.rows);
  params.batch = static_cast<int>(p.batch);
  params.key_heads = static_cast<int>(p.kv_heads);
  params.group = static_cast<int>(p.heads / p.kv_heads);
  params.warps_each = static_cast<int>(std::bit_ceil(static_cast<unsigned>(ceil_div(params.group, 16))));
  params.tiles = static_cast<int>(ceil_div(p.rows, kSelectedWarps / params.warps_each));
  params.depth = static_cast<int>(p.depth);
  params.value_depth = static_cast<int>(p.value_depth);
  params.scale = static_cast<float>(p.scale);
  params.scale_2 = static_cast<float>(p.scale * kLog2e);
  const std::int64_t tiles = p.batch * p.kv_heads * params.tiles;
  const std::int64_t grid = std::min<std::int64_t>(tiles, driver::device_info(context.device.index).multiprocessors);
  get_kernel(config.spec(), context.device.index)
      .launch(grid, kSelectedThreads, selected_shared(depth, gradient), &params, context.stream);
}

}  // namespace

bool fits_selected(const Problem& problem, const Context& context) {
  const attention_op::Problem& p = problem.attention;
  return problem.keys.form == Form::selected && attention_op::hopper::score_of(p) == 0 && p.padding.data == nullptr &&
         std::max(p.depth, p.value_depth) <= 128 && p.heads / p.kv_heads <= kMostHeads &&
         p.batch * p.kv_heads * p.rows <= std::numeric_limits<int>::max() && attention_op::hopper::fits(p, context) &&
         view_of(p.k, p, p.depth) && view_of(p.v, p, p.value_depth);
}

void selected_forward(const Problem& problem, Context& context) {
  const attention_op::Problem& p = problem.attention;
  const BlockBits bits(problem.keys, false, context);
  const attention_op::Input q(p.q, {p.batch, p.heads, p.rows, p.depth}, p.dtype, context);
  SelectedParams params{};
  params.q = q.arg();
  params.out = attention_op::output_arg(p.o, p.dtype);
  params.lse = attention_op::output_arg(p.lse, DType::f32);
  params.sinks = attention_op::sinks_arg(p);
  launch(p, problem.keys, bits, false, params, context);
}

void selected_query_gradient(const attention_op::BackwardProblem& b, const Keys& keys, const BlockBits& bits,
                             const attention_op::InputArg& q, const attention_op::InputArg& d_o,
                             const attention_op::RowStats* stats, Context& context) {
  SelectedParams params{};
  params.q = q;
  params.d_o = d_o;
  params.out = attention_op::output_arg(b.d_q, b.forward.dtype);
  params.stats = stats;
  launch(b.forward, keys, bits, true, params, context);
}

}  // namespace fretwork::dynamic_attention_op::hopper
