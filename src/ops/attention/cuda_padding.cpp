// The launches of cuda_padding.h.
#include "ops/attention/cuda_padding.h"

#include <string>
#include <vector>

#include "core/divide.h"
#include "runtime/kernels.h"

namespace fretwork::attention_op {
namespace {

constexpr const char* kSource = "ops/attention/kernel_rows.cuh";

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

void clear_padding(const Problem& problem, const Operand& gradient, std::int64_t depth, Context& context) {
  const std::int64_t all = problem.batch * problem.kv_heads * (ceil_div(problem.cols, 32) * 32);
  if (problem.padding.data == nullptr || gradient.data == nullptr || all == 0) {
    return;
  }
  ClearParams params{};
  params.out = {gradient.data, gradient.batch, gradient.head, gradient.row, gradient.col, false};
  params.padding = padding_arg(problem);
  params.all = all;
  params.heads = static_cast<int>(problem.kv_heads);
  params.keys = static_cast<int>(problem.cols);
  params.depth = static_cast<int>(depth);
  get_kernel(clear_spec(problem.dtype), context.device.index)
      .launch(ceil_div(all, 256), 256, 0, &params, context.stream);
}

}  // namespace fretwork::attention_op
