// The selection of key blocks: argument checks, the problem that backends receive, and the choice of backend.
#include <algorithm>
#include <string>
#include <vector>

#include "fretwork/error.h"
#include "fretwork/ops.h"
#include "ops/select_blocks/problem.h"
#include "pattern/checks.h"

namespace fretwork {
namespace {

using select_blocks_op::Problem;

constexpr const char* kOp = "select_blocks";
constexpr std::int64_t kMostDepth = 1024;  // of a GPU's kernels

void check_operands(const ConstTensorView& q, const ConstTensorView& k, const Context& context) {
  if (q.rank != 4) {
    throw Error(kOp, "q", "4 dimensions (B, Hq, Sq, D)", shape_text(q.shape()));
  }
  check_floating(kOp, "q", q);
  const bool cuda = context.device.type == DeviceType::cuda;
  if (cuda && q.dtype == DType::f64) {
    throw Error(kOp, "q", "float32, float16 or bfloat16 on a GPU", name_of(q.dtype));
  }
  if (q.size(3) < 1 || (cuda && q.size(3) > kMostDepth)) {
    throw Error(kOp, "q", cuda ? "a last dimension of 1 to 1024" : "a last dimension of at least 1",
                shape_text(q.shape()));
  }
  if (k.dtype != q.dtype) {
    throw Error(kOp, "k", std::string(name_of(q.dtype)) + " like q", name_of(k.dtype));
  }
  if (k.rank != 4 || k.size(0) != q.size(0) || k.size(3) != q.size(3)) {
    throw Error(kOp, "k", "(" + std::to_string(q.size(0)) + ", Hk, Sk, " + std::to_string(q.size(3)) + ")",
                shape_text(k.shape()));
  }
  if (k.size(1) == 0 || q.size(1) == 0 ? q.size(1) != k.size(1) : q.size(1) % k.size(1) != 0) {
    throw Error(kOp, "k", "a number of heads that divides the " + std::to_string(q.size(1)) + " of q",
                shape_text(k.shape()));
  }
  check_device(kOp, "q", q, context);
  check_device(kOp, "k", k, context);
}

void check_options(std::int64_t top_k, const SelectOptions& options) {
  for (const std::int64_t block : {options.block_q, options.block_k}) {
    if (block != 16 && block != 32 && block != 64 && block != 128) {
      throw Error(kOp, "block", "16, 32, 64 or 128", std::to_string(block));
    }
  }
  if (options.first < 0) {
    throw Error(kOp, "first", "0 or more", std::to_string(options.first));
  }
  if (options.last < 0) {
    throw Error(kOp, "last", "0 or more", std::to_string(options.last));
  }
  // Each compared by itself: their sum may have no room.
  if (top_k < 1 || options.first > top_k || options.last > top_k - options.first) {
    const bool none = options.first == 0 && options.last == 0;
    throw Error(kOp, "top_k",
                none ? "at least 1"
                     : "at least first + last, " + std::to_string(options.first) + " + " + std::to_string(options.last),
                std::to_string(top_k));
  }
}

select_blocks_op::Result check_result(const char* argument, const TensorView& t, const std::vector<std::int64_t>& shape,
                                      const Context& context) {
  if (t.dtype != DType::i32) {
    throw Error(kOp, argument, "int32", name_of(t.dtype));
  }
  if (!std::ranges::equal(t.shape(), shape)) {
    throw Error(kOp, argument, "shape " + shape_text(shape), shape_text(t.shape()));
  }
  check_device(kOp, argument, t, context);
  return {static_cast<std::int32_t*>(t.data), t.stride(0), t.stride(1), t.stride(2), t.rank > 3 ? t.stride(3) : 0};
}

}  // namespace

void select_blocks(const ConstTensorView& q, const ConstTensorView& k, std::int64_t top_k, const TensorView& counts,
                   const TensorView& indices, Context& context, const SelectOptions& options) {
  check_operands(q, k, context);
  check_options(top_k, options);
  Problem p;
  p.dtype = q.dtype;
  p.batch = q.size(0);
  p.heads = q.size(1);
  p.kv_heads = k.size(1);
  p.rows = q.size(2);
  p.cols = k.size(2);
  p.depth = q.size(3);
  p.block_rows = options.block_q;
  p.block_cols = options.block_k;
  p.top_k = top_k;
  p.first = options.first;
  p.last = options.last;
  p.causal = options.causal;
  p.q = {q.data, q.stride(0), q.stride(1), q.stride(2), q.stride(3)};
  p.k = {k.data, k.stride(0), k.stride(1), k.stride(2), k.stride(3)};
  p.counts = check_result("counts", counts, {p.batch, p.kv_heads, p.row_blocks()}, context);
  p.indices = check_result("indices", indices, {p.batch, p.kv_heads, p.row_blocks(), top_k}, context);
  if (p.batch * p.kv_heads * p.row_blocks() == 0) {
    return;
  }
  context.device.type == DeviceType::cuda ? select_blocks_op::cuda::run(p, context)
                                          : select_blocks_op::cpu::run(p, context);
}

}  // namespace fretwork
