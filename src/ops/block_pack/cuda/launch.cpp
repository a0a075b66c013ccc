// Packing on a GPU: chooses the unit, fills the parameters, gets the kernel and launches it.
#include <algorithm>
#include <limits>
#include <string>
#include <vector>

#include "fretwork/error.h"
#include "ops/block_pack/cuda/params.h"
#include "ops/block_pack/problem.h"
#include "pattern/checks.h"
#include "runtime/alignment.h"
#include "runtime/device_plan.h"
#include "runtime/kernels.h"

namespace fretwork::block_pack_op::cuda {
namespace {

using fretwork::cuda::DeviceBuffer;

constexpr int kVector = 16;  // bytes of a wide unit

/// The layout on the device, in both directions.
struct Plan {
  DeviceBuffer blocks, block_at;
  std::size_t bytes() const { return blocks.bytes() + block_at.bytes(); }
};

Plan make_plan(const BlockLayout& layout, int device) {
  const auto& s = layout.sizes();
  if (layout.nnz() > std::numeric_limits<int>::max()) {
    throw Error("pack", "layout", "fewer than 2^31 blocks", std::to_string(layout.nnz()));
  }
  std::vector<Block> blocks;
  for (std::int64_t l = 0; l < s.heads * s.rows; ++l) {
    for (const auto& entry : layout.by_row().line(l)) {
      blocks.push_back({static_cast<int>(l / s.rows), static_cast<int>(l % s.rows), static_cast<int>(entry.other)});
    }
  }
  Plan plan;
  if (!blocks.empty()) {
    plan.blocks = DeviceBuffer(device, blocks.data(), blocks.size() * sizeof(Block));
  }
  const std::vector<int> block_at = block_grid(layout);
  plan.block_at = DeviceBuffer(device, block_at.data(), block_at.size() * sizeof(int));
  return plan;
}

std::shared_ptr<const Plan> plan_for(const BlockLayout& layout, Context& context) {
  return find_device_plan<Plan>(layout.key(), context, [&](int device) { return make_plan(layout, device); });
}

/// Elements per access: 16 bytes of them if both sides allow it, else one.
int elements_per_unit(const Problem& p) {
  const auto& dense = p.dense;
  const auto& values = p.values;
  const std::int64_t block_cols = p.layout->sizes().block_cols;
  const bool wide = dense.col == 1 && values.col == 1 &&
                    is_aligned(dense.data, {dense.z, dense.h, dense.row, block_cols}, p.element_bytes, kVector) &&
                    is_aligned(values.data, {values.z, values.block, values.row}, p.element_bytes, kVector);
  return wide ? kVector / p.element_bytes : 1;
}

std::uint64_t repeat(std::uint64_t bits, int bytes) {
  for (int filled = bytes; filled < 8; filled *= 2) {
    bits |= bits << (8 * filled);
  }
  return bits;
}

Params params(const Problem& p, const Plan& plan, std::int64_t wide) {
  const auto& s = p.layout->sizes();
  Params q{};
  q.dense = p.dense.data;
  q.dense_z = p.dense.z / wide;
  q.dense_h = p.dense.h / wide;
  q.dense_row = p.dense.row / wide;
  q.dense_col = p.dense.col;  // 1 where units are wide
  q.values = p.values.data;
  q.values_z = p.values.z / wide;
  q.values_block = p.values.block / wide;
  q.values_row = p.values.row / wide;
  q.values_col = p.values.col;
  q.blocks = static_cast<const Block*>(plan.blocks.data());
  q.block_at = static_cast<const int*>(plan.block_at.data());
  q.fill = repeat(p.fill, p.element_bytes);
  q.heads = static_cast<int>(s.heads);
  q.rows = static_cast<int>(s.rows);
  q.cols = static_cast<int>(s.cols);
  q.block_rows = static_cast<int>(s.block_rows);
  q.block_cols = static_cast<int>(s.block_cols / wide);
  q.blocks_packed = p.layout->nnz();
  const std::int64_t blocks = p.unpack ? s.heads * s.rows * s.cols : p.layout->nnz();
  q.total = p.batch * blocks * s.block_rows * (s.block_cols / wide);
  return q;
}

KernelSpec spec(bool unpack, std::int64_t unit_bytes, bool small) {
  const char* const unit = unit_bytes == 2   ? "fretwork::u16"
                           : unit_bytes == 4 ? "fretwork::u32"
                           : unit_bytes == 8 ? "fretwork::u64"
                                             : "fretwork::word_group<4>";
  return {"ops/block_pack/cuda/kernel.cuh", std::string("fretwork::block_pack_op::") + (unpack ? "unpack<" : "pack<") +
                                                unit + (small ? ", fretwork::u32>" : ", fretwork::i64>")};
}

}  // namespace

void run(const Problem& problem, Context& context) {
  const auto& s = problem.layout->sizes();
  if (problem.batch * s.heads * s.rows * s.cols == 0 || (!problem.unpack && problem.layout->nnz() == 0)) {
    return;
  }
  const fretwork::cuda::DeviceScope scope(context.device.index);
  const int wide = elements_per_unit(problem);
  const auto plan = plan_for(*problem.layout, context);
  const Params p = params(problem, *plan, wide);
  const bool small = p.total <= std::numeric_limits<std::uint32_t>::max();
  const Kernel& kernel = get_kernel(spec(problem.unpack, wide * problem.element_bytes, small), context.device.index);
  constexpr int kEach = kThreads * kUnits;
  kernel.launch((p.total + kEach - 1) / kEach, kThreads, 0, &p, context.stream);
}

namespace {

std::vector<KernelSpec> list(const std::string& /*arch*/) {
  std::vector<KernelSpec> specs;
  for (const bool unpack : {false, true}) {
    for (const std::int64_t bytes : {2, 4, 8, 16}) {
      for (const bool small : {false, true}) {
        specs.push_back(spec(unpack, bytes, small));
      }
    }
  }
  return specs;
}

const KernelList kernels("block_pack", list, kLeastArch);

}  // namespace

}  // namespace fretwork::block_pack_op::cuda
