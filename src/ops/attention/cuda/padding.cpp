// The launches of padding.h.
#include "ops/attention/cuda/padding.h"

#include <string>
#include <vector>

#include "core/divide.h"
#include "runtime/kernels.h"

namespace fretwork::attention_op {
namespace {

constexpr const char* kSource = "ops/attention/cuda/rows.cuh";

KernelSpec seen_spec() { return {kSource, "fretwork::attention_seen"}; }
KernelSpec clear_spec(DType dtype) {
  return {kSource, std::string("fretwork::attention_clear<") + device_type(dtype) + ">"};
}

std::vector<KernelSpec> list_kernels(const std::string& /*arch*/) {
  return {seen_spec(), clear_spec(DType::f32), clear_spec(DType::f16), clear_spec(DType::bf16)};
}
const KernelList kKernels{"attention", list_kernels};

}  // namespace

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
  const auto output = [](const Operand& x) { return OutputArg{x.data, x.batch, x.head, x.row, x.col, false}; };
  ClearParams params{};
  params.out[0] = output(problem.d_k);
  params.out[1] = output(problem.d_v);
  params.padding = padding_arg(p);
  params.all = all;
  params.heads = static_cast<int>(p.kv_heads);
  params.keys = static_cast<int>(p.cols);
  params.depth[0] = static_cast<int>(p.depth);
  params.depth[1] = static_cast<int>(p.value_depth);
  get_kernel(clear_spec(p.dtype), context.device.index).launch(ceil_div(all, 256), 256, 0, &params, context.stream);
}

}  // namespace fretwork::attention_op
