// torch.ops.fretwork's selection of key blocks.
#include "call.h"

namespace {

using namespace fretwork_torch;  // NOLINT: what every op here is made of

void select_blocks(StableIValue* stack, std::uint64_t, std::uint64_t) {
  constexpr const char* kOp = "select_blocks";
  constexpr Kinds kIndices{"int32", true};
  Arguments arguments(stack);
  const Tensor q = arguments.tensor(), k = arguments.tensor();
  const std::int64_t top_k = arguments.integer();
  fretwork::SelectOptions options;
  options.block_q = arguments.integer();
  options.block_k = arguments.integer();
  options.causal = arguments.flag();
  options.first = arguments.integer();
  options.last = arguments.integer();

  const fretwork::ConstTensorView queries = view(kOp, "q", q), keys = view(kOp, "k", k);
  // Numbers that the core refuses give some shape.
  const std::int64_t side = std::max<std::int64_t>(options.block_q, 1);
  const std::int64_t sizes[] = {queries.size(0), keys.size(1), (queries.size(2) + side - 1) / side,
                                std::max<std::int64_t>(top_k, 0)};
  const Tensor counts = empty(std::span(sizes).first(3), aoti_torch_dtype_int32(), q);
  const Tensor indices = empty(sizes, aoti_torch_dtype_int32(), q);
  Call call(q);
  fretwork::select_blocks(queries, keys, top_k, out_view(kOp, "counts", counts, kIndices),
                          out_view(kOp, "indices", indices, kIndices), call.context(), options);
  stack[0] = torch::stable::detail::from(counts);
  stack[1] = torch::stable::detail::from(indices);
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(fretwork, m) {
  m.def(
      "select_blocks(Tensor q, Tensor k, int top_k, int block_q, int block_k, bool causal, int first, int last) -> "
      "(Tensor counts, Tensor indices)");
}
STABLE_TORCH_LIBRARY_IMPL(fretwork, CPU, m) { m.impl("select_blocks", &select_blocks); }
STABLE_TORCH_LIBRARY_IMPL(fretwork, CUDA, m) { m.impl("select_blocks", &select_blocks); }
