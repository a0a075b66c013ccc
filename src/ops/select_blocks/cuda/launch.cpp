// The selection on a GPU: means of all blocks, then the best ones. No result of it is known to the host.
#include <algorithm>
#include <limits>
#include <string>
#include <vector>

#include "core/divide.h"
#include "fretwork/error.h"
#include "ops/select_blocks/cuda/params.h"
#include "ops/select_blocks/problem.h"
#include "runtime/alignment.h"
#include "runtime/cuda_driver.h"
#include "runtime/kernels.h"

namespace fretwork::select_blocks_op::cuda {
namespace {

namespace driver = fretwork::cuda;

constexpr const char* kSource = "ops/select_blocks/cuda/kernel.cuh";
constexpr int kStaticShared = 1024;  // more than the kernel's own

KernelSpec pool_spec(DType dtype, int run) {
  return {kSource,
          std::string("fretwork::select_blocks_op::pool<") + device_type(dtype) + ", " + std::to_string(run) + ">"};
}
KernelSpec select_spec() { return {kSource, "fretwork::select_blocks_op::select", KernelSpec::kBySize}; }

int widest_run(DType dtype) { return 16 / static_cast<int>(size_of(dtype)); }

std::vector<KernelSpec> list_kernels(const std::string& /*arch*/) {
  std::vector<KernelSpec> list{select_spec()};
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    list.push_back(pool_spec(dtype, 1));
    list.push_back(pool_spec(dtype, widest_run(dtype)));
  }
  return list;
}
const KernelList kKernels{"select_blocks", list_kernels};

void check_sizes(const Problem& p) {
  constexpr std::int64_t kMost = std::numeric_limits<int>::max() / 2;
  const std::int64_t blocks = p.batch * p.kv_heads * (p.row_blocks() + p.col_blocks());
  if (const std::int64_t most = std::max({p.rows, p.cols, p.top_k, blocks}); most > kMost) {
    throw Error("select_blocks", "q", "sizes below 2^30", std::to_string(most));
  }
}

/// Elements that are read at once: 16 bytes, or one.
int run_of(const Problem& p) {
  const int run = widest_run(p.dtype);
  const auto wide = [&](const Operand& x) {
    return x.col == 1 && is_aligned(x.data, {x.batch, x.head, x.row}, size_of(p.dtype), 16);
  };
  return p.depth % run == 0 && wide(p.q) && wide(p.k) ? run : 1;
}

PoolSide side_of(const Operand& x) {
  PoolSide side{};
  side.data = x.data;
  side.batch = x.batch;
  side.head = x.head;
  side.row = x.row;
  side.col = x.col;
  return side;
}

/// Means of queries as rows, of keys as columns: a thread of the selection has a key block.
void launch_pool(const Problem& p, float* queries, float* keys, Context& context) {
  const int run = run_of(p);
  PoolParams params{};
  params.side[0] = side_of(p.q);
  params.side[0].heads = static_cast<int>(p.group());
  params.side[0].length = static_cast<int>(p.rows);
  params.side[0].block = static_cast<int>(p.block_rows);
  params.side[0].blocks = static_cast<int>(p.row_blocks());
  params.side[0].means = queries;
  params.side[0].step_block = p.depth;
  params.side[0].step_col = 1;
  params.side[0].step_pair = p.row_blocks() * p.depth;
  params.side[1] = side_of(p.k);
  params.side[1].heads = 1;
  params.side[1].length = static_cast<int>(p.cols);
  params.side[1].block = static_cast<int>(p.block_cols);
  params.side[1].blocks = static_cast<int>(p.col_blocks());
  params.side[1].means = keys;
  params.side[1].step_block = 1;
  params.side[1].step_col = p.col_blocks();
  params.side[1].step_pair = p.col_blocks() * p.depth;
  const std::int64_t pairs = p.batch * p.kv_heads;
  params.first_of_keys = pairs * p.row_blocks();
  params.kv_heads = static_cast<int>(p.kv_heads);
  params.depth = static_cast<int>(p.depth);
  for (params.lanes = 1; params.lanes < kThreads && params.lanes * run < p.depth;) {
    params.lanes *= 2;
  }
  get_kernel(pool_spec(p.dtype, run), context.device.index)
      .launch(pairs * (p.row_blocks() + p.col_blocks()), kThreads, 0, &params, context.stream);
}

OutArg out_arg(const Result& x) { return {x.data, x.batch, x.head, x.row, x.col}; }

void launch_select(const Problem& p, const float* queries, const float* keys, Context& context) {
  const driver::DeviceInfo& info = driver::device_info(context.device.index);
  SelectParams params{};
  params.queries = queries;
  params.keys = keys;
  params.counts = out_arg(p.counts);
  params.indices = out_arg(p.indices);
  params.pairs = static_cast<int>(p.batch * p.kv_heads);
  params.items = params.pairs * static_cast<int>(ceil_div(p.row_blocks(), kRows));
  params.kv_heads = static_cast<int>(p.kv_heads);
  params.row_blocks = static_cast<int>(p.row_blocks());
  params.col_blocks = static_cast<int>(p.col_blocks());
  params.depth = static_cast<int>(p.depth);
  params.rows = static_cast<int>(p.rows);
  params.cols = static_cast<int>(p.cols);
  params.block_rows = static_cast<int>(p.block_rows);
  params.block_cols = static_cast<int>(p.block_cols);
  params.top_k = static_cast<int>(p.top_k);
  params.first = static_cast<int>(p.first);
  params.last = static_cast<int>(p.last);
  params.causal = p.causal;
  const std::int64_t line_bytes = std::int64_t{kRows} * p.col_blocks() * 4;
  const int fixed = select_bytes(params.depth);
  const bool in_shared = fixed + line_bytes <= info.shared_per_block - kStaticShared;
  const int shared = in_shared ? fixed + static_cast<int>(line_bytes) : fixed;
  const Kernel& kernel = get_kernel(select_spec(), context.device.index);
  const std::int64_t ctas = std::int64_t{info.multiprocessors} * (in_shared ? kernel.occupancy(kThreads, shared) : 1);
  const std::int64_t grid = std::clamp<std::int64_t>(ctas, 1, params.items);
  const Workspace lines(context, in_shared ? 0 : static_cast<std::size_t>(grid * line_bytes));
  params.keys_of_rows = static_cast<unsigned*>(lines.data());
  kernel.launch(grid, kThreads, shared, &params, context.stream);
}

}  // namespace

void run(const Problem& p, Context& context) {
  check_sizes(p);
  const driver::DeviceScope scope(context.device.index);
  const std::int64_t pairs = p.batch * p.kv_heads * p.depth, queries = pairs * p.row_blocks();
  const Workspace means(context, static_cast<std::size_t>(queries + pairs * p.col_blocks()) * sizeof(float));
  float* const data = static_cast<float*>(means.data());
  launch_pool(p, data, data + queries, context);
  launch_select(p, data, data + queries, context);
}

}  // namespace fretwork::select_blocks_op::cuda
