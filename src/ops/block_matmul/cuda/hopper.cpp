// The host side of the Hopper kernels: does the problem suit them, its plan, its tensor maps, the launch.
#include "blocks/hopper.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ops/block_matmul/cuda/families.h"
#include "runtime/alignment.h"
#include "runtime/device_plan.h"

namespace fretwork::block_matmul::hopper {
namespace {

namespace driver = fretwork::cuda;
using namespace blocks;  // NOLINT: the host side that it shares with the convolution

constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();

// ---------------------------------------------------------------------------------------------- which kernel

std::vector<KernelSpec> list_kernels(const std::string& arch) {
  std::vector<KernelSpec> list;
  if (arch != "sm_90a") {
    return list;
  }
  for (const DType dtype : {DType::f16, DType::bf16}) {
    list.push_back(reduce_instance(dtype));
    for (int order = 0; order < 8; ++order) {
      const bool a = (order & 1) != 0, b = (order & 2) != 0, rows = (order & 4) != 0;
      for (const int size : {256, 128, 32, 16}) {
        list.push_back(spmm_instance(dtype, size, a, b, rows));
      }
      if (!rows) {
        list.push_back(sdd_instance(dtype, a, b));
      }
    }
  }
  return list;
}
const KernelList kKernels{"block_matmul", list_kernels};

constinit KernelTable<128> kernels;

const Kernel& spmm_kernel(DType dtype, int size, bool sparse_k, bool dense_k, bool rows, int device) {
  const unsigned type = dtype == DType::f16 ? 0 : 1, place = size == 256 ? 0 : size == 128 ? 1 : size == 32 ? 2 : 3;
  const unsigned which = type | place << 1 | unsigned{sparse_k} << 3 | unsigned{dense_k} << 4 | unsigned{rows} << 5;
  return kernels.get(which, device, [&] { return spmm_instance(dtype, size, sparse_k, dense_k, rows); });
}
const Kernel& sdd_kernel(DType dtype, bool left_k, bool right_k, int device) {
  const unsigned which = 64 | (dtype == DType::f16 ? 0u : 1u) | unsigned{left_k} << 1 | unsigned{right_k} << 2;
  return kernels.get(which, device, [&] { return sdd_instance(dtype, left_k, right_k); });
}
const Kernel& reduce_kernel(DType dtype, int device) {
  return kernels.get(dtype == DType::f16 ? 96 : 97, device, [&] { return reduce_instance(dtype); });
}

// --------------------------------------------------------------------------------------------- tensor maps

std::optional<View> matrix_view(const Matrix& m, std::int64_t z, std::int64_t h) {
  return make_view(m.data, m.rows, m.cols, m.row_stride, m.col_stride, {h, z}, {m.h_stride, m.z_stride});
}

/// Blocks of op(S): rows × K of each.
std::optional<View> blocks_view(const Problem& p) {
  const Values& v = p.sparse;
  const std::int64_t block = p.layout->sizes().block_rows;
  return make_view(v.data, block, block, p.transposed ? v.col_stride : v.row_stride,
                   p.transposed ? v.row_stride : v.col_stride, {p.layout->nnz(), p.z_out * p.z_sum},
                   {v.block_stride, v.z_stride});
}

// ------------------------------------------------------------------------------------------------------ plans

/// What a plan depends on beside the layout. For an sdd, `transposed` says that it computes Sᵀ; `parallel` is how
/// often the layout's work is there.
struct PlanKey {
  int kind, transposed, parallel, slot;
};

std::shared_ptr<const DevicePlan> find_plan(const Problem& problem, const PlanKey& key, const Context& context) {
  std::string bytes(sizeof key, '\0');
  std::memcpy(bytes.data(), &key, sizeof key);
  return find_device_plan<DevicePlan>("matmul " + bytes + problem.layout->key(), context, [&](int device) {
    if (problem.kind == Kind::spmm) {
      return DevicePlan(device, balanced_plan(*problem.layout, problem.transposed, key.parallel, device));
    }
    return DevicePlan(device, make_sdd_plan(*problem.layout, key.transposed != 0, key.slot, key.parallel,
                                            driver::device_info(device).multiprocessors));
  });
}

// --------------------------------------------------------------------------------------------------- launches

Batches batches_of(const Problem& p) {
  return {static_cast<int>(grid_heads(p)), static_cast<int>(p.z_sum), static_cast<int>(p.h_sum)};
}

/// How an spmm runs: its operands as TMA reads them, the shape of its tiles, the plan.
struct SpmmWork {
  View sparse, dense, out;
  SpmmShape shape;
  std::shared_ptr<const DevicePlan> plan;
};

std::optional<SpmmWork> spmm_work(const Problem& p, const Context& context, int width) {
  const auto sparse = blocks_view(p);
  const auto dense = matrix_view(p.right, p.z_out * p.z_sum, p.h_out * p.h_sum);
  const auto out = matrix_view(p.out, p.z_out, p.h_out);
  if (!sparse || !dense || !out || !out->can_be_written()) {
    return std::nullopt;
  }
  const SpmmShape shape(p.layout->sizes().block_rows, p.out.cols, p.z_out * grid_heads(p), width);
  const PlanKey key{static_cast<int>(p.kind), p.transposed ? 1 : 0, shape.bucket(), 0};
  SpmmWork work{*sparse, *dense, *out, shape, find_plan(p, key, context)};
  const std::int64_t tiles = shape.tiles * shape.batches;
  const bool countable = work.plan->segment_count * tiles <= kMost / 2 && work.plan->partial_count * tiles <= kMost;
  return countable ? std::optional(std::move(work)) : std::nullopt;
}

void launch_spmm(const Problem& p, Context& context, int width) {
  const auto [sparse, dense, out, shape, plan] = spmm_work(p, context, width).value();
  const auto block = static_cast<int>(p.layout->sizes().block_rows);
  const std::int64_t total = plan->segment_count * shape.tiles * shape.batches;
  const Workspace partials(context, shape.partial_bytes(*plan));
  const bool dense_k = !dense.last;
  const auto unit = static_cast<std::uint32_t>(shape.wide ? 64 : block),
             strip = static_cast<std::uint32_t>(shape.width);
  SpmmParams params = spmm_params(*plan, shape, *p.layout, partials.data());
  params.sparse = sparse.map(unit, unit);
  params.dense = dense_k ? dense.map(unit, strip) : dense.map(64, unit);
  if (!shape.wide) {
    params.pair = dense_k ? dense.map(2 * unit, strip) : dense.map(64, 2 * unit);
  }
  params.out = out.map(64, 64);
  params.free = static_cast<int>(p.out.cols);
  params.batches = batches_of(p);
  params.sparse_block = sparse.moves(2);
  params.sparse_z = sparse.moves(3);
  params.dense_h = dense.moves(2);
  params.dense_z = dense.moves(3);

  const int device = context.device.index;
  spmm_kernel(p.dtype, shape.wide ? shape.width : block, sparse.last, dense_k, !out.last, device)
      .launch(std::min<std::int64_t>(total, driver::device_info(device).multiprocessors), shape.consumers() + 128,
              shape.shared(), &params, context.stream);
  if (plan->split_count > 0) {
    ReduceParams reduce = reduce_params(*plan, shape, partials.data(), params.batches.heads);
    reduce.out = p.out.data;
    reduce.rows = p.out.rows;
    reduce.free = p.out.cols;
    reduce.row_stride = p.out.row_stride;
    reduce.free_stride = p.out.col_stride;
    reduce.h_stride = p.out.h_stride;
    reduce.z_stride = p.out.z_stride;
    reduce_kernel(p.dtype, device).launch(shape.reduce_ctas(*plan), shape.consumers(), 0, &reduce, context.stream);
  }
}

/// How an sdd runs: what is read along K, which operand is gathered, in rows of `slot`.
struct SddWork {
  View left, right;  ///< exchanged where Sᵀ is computed
  bool left_k, right_k;
  int slot;
  std::shared_ptr<const DevicePlan> plan;

  bool gathered_k() const { return left_k || right_k; }
};

std::optional<SddWork> sdd_work(const Problem& p, const Context& context) {
  auto left = matrix_view(p.left, p.z_out * p.z_sum, p.h_out * p.h_sum);
  auto right = matrix_view(p.right, p.z_out * p.z_sum, p.h_out * p.h_sum);
  const Values& v = p.sparse;
  const bool out = v.data != nullptr && v.col_stride == 1 && v.row_stride > 0 && v.row_stride <= kMost &&
                   is_aligned(v.data, {v.row_stride, v.block_stride, v.z_stride}, 2, 16);
  if (!left || !right || !out || grid_heads(p) != 1) {
    return std::nullopt;
  }
  const bool left_k = left->last, right_k = !right->last, swaps = sdd_swaps(left_k, right_k);
  if (swaps) {
    std::swap(left, right);
  }
  // The copy engine is slow with rows of less than 64 bytes.
  const int slot = std::clamp(static_cast<int>(p.layout->sizes().block_rows), left_k || right_k ? 16 : 32, 64);
  const auto bucket = std::bit_ceil(static_cast<std::uint64_t>(std::clamp<std::int64_t>(p.z_out, 1, 16)));
  const PlanKey key{static_cast<int>(p.kind), swaps ? 1 : 0, static_cast<int>(bucket), slot};
  return SddWork{*left, *right, left_k, right_k, slot, find_plan(p, key, context)};
}

void launch_sdd(const Problem& p, Context& context) {
  const SddWork work = sdd_work(p, context).value();
  const auto& [left, right, left_k, right_k, slot, plan] = work;
  const bool gathered_k = work.gathered_k();
  const auto block = static_cast<int>(p.layout->sizes().block_rows);
  const Values& v = p.sparse;
  const std::int64_t total = plan->segment_count * p.z_out;
  const int device = context.device.index, multiprocessors = driver::device_info(device).multiprocessors;
  const auto box = static_cast<std::uint32_t>(slot);
  SddParams params{};
  params.left = left.map(64, 64);
  params.right = gathered_k ? right.map(64, box) : right.map(box, 64);
  params.out = v.data;
  params.out_z = v.z_stride;
  params.out_block = v.block_stride;
  params.strips = static_cast<const Strip*>(plan->segments.data());
  params.columns = static_cast<const int*>(plan->steps.data());
  params.blocks = static_cast<const int*>(plan->blocks.data());
  params.strip_count = plan->segment_count;
  params.lines = plan->groups_per_head;
  params.total = static_cast<int>(total);
  params.out_row = static_cast<int>(v.row_stride);
  params.depth = static_cast<int>(p.left.cols);
  params.block = block;
  params.slot = slot;
  params.block_bits = std::countr_zero(static_cast<unsigned>(block));
  params.slot_bits = std::countr_zero(box);
  params.stages = plan->sdd_stages();
  params.stage_bytes = plan->stage_bytes;
  params.batches = batches_of(p);
  params.left_h = left.moves(2);
  params.left_z = left.moves(3);
  params.right_h = right.moves(2);
  params.right_z = right.moves(3);
  sdd_kernel(p.dtype, left_k, right_k, device)
      .launch(std::min<std::int64_t>(total, multiprocessors), kThreads, plan->sdd_shared(), &params, context.stream);
}

// ------------------------------------------------------------------------------------------------------- costs

bool fits(const Problem& p, const Context& context) {
  const bool type = p.dtype == DType::f16 || p.dtype == DType::bf16;
  const bool work = p.layout->nnz() > 0 && p.z_out > 0 && p.h_out > 0 && p.z_sum > 0 && p.h_sum > 0 &&
                    p.z_out * p.z_sum * p.h_out * p.h_sum <= kMost;
  // Heads of a layout that add up would need steps of several heads in one tile.
  const bool heads = p.layout->heads() == 1 || p.h_sum == 1;
  return has_kernels(p.layout->sizes()) && type && work && heads &&
         driver::kernel_arch(context.device.index) == "sm_90a";
}

/// µs, fitted to some thousand random products (bench/results/h200/block_candidates.json): until a CTA's first product
/// and after its last; for 64 of K of a tile; for each further tile of a CTA.
struct SpmmRates {
  double start, stage, tile;
};
SpmmRates rates_of(std::int64_t block, int width) {
  if (block < 64) {
    return block == 16 ? SpmmRates{1.25, 0.71, 3.1} : SpmmRates{1.6, 0.43, 3.4};
  }
  if (width == 128) {
    return block == 64 ? SpmmRates{1.2, 0.37, 1.6} : SpmmRates{1.6, 0.41, 1.7};
  }
  return block == 64 ? SpmmRates{1.75, 0.43, 3.6} : SpmmRates{2.2, 0.65, 3.0};
}

cost::Work spmm_cost(const Problem& p, const SpmmWork& work, const Context& context) {
  constexpr double kReduce = 5, kPartials = 1.4e6;  // µs of the second kernel, bytes per µs to it and back
  const double multiprocessors = driver::device_info(context.device.index).multiprocessors;
  const auto& [start, stage, tile] = rates_of(p.layout->sizes().block_rows, work.shape.width);
  const double often = static_cast<double>(work.shape.tiles * work.shape.batches);
  const double sums = static_cast<double>(p.z_sum * p.h_sum);
  const double segments = work.plan->segment_count, all = work.plan->step_count;
  const double waves = std::ceil(segments * often / multiprocessors);
  // Steps of the busiest CTA.
  const double steps =
      std::max({static_cast<double>(work.plan->longest), all * often / multiprocessors, all / segments * waves});
  const double stages = steps * sums * static_cast<double>(p.layout->sizes().block_rows) / 64;
  const double reduce =
      work.plan->split_count > 0 ? kReduce + static_cast<double>(work.shape.partial_bytes(*work.plan)) / kPartials : 0;
  return {.memory = operand_bytes(p) / cost::kMemory,
          .busiest = start + stages * stage + (waves - 1) * tile,
          .serial = reduce};
}

/// An sdd with few tiles and K of 2048 or more does not fit: it would leave most of the SMs idle, and the portable
/// kernel splits K.
bool fits_sdd(const Problem& p, const Context& context) {
  const auto work = sdd_work(p, context);
  return work && work->plan->segment_count * p.z_out <= kMost / 2 &&
         (p.left.cols * p.z_sum * p.h_sum < 2048 ||
          work->plan->segment_count * p.z_out * 4 > driver::device_info(context.device.index).multiprocessors);
}

cost::Work sdd_cost(const Problem& p, const Context& context) {
  // Flops in a µs on all SMs of an H200, of dsd at a density of 0.1 (bench/results/h200/block.json).
  const std::int64_t block = p.layout->sizes().block_rows;
  const double rate = block == 16 ? 111e6 : block == 32 ? 275e6 : block == 64 ? 442e6 : 559e6;
  const double multiprocessors = driver::device_info(context.device.index).multiprocessors;
  return {.memory = operand_bytes(p) / cost::kMemory,
          .busiest = flops_of(p) / rate * cost::kMultiprocessors / multiprocessors};
}

}  // namespace

std::vector<Candidate<int>> candidates(const Problem& p, const Context& context) {
  std::vector<Candidate<int>> list;
  if (!fits(p, context)) {
    return list;
  }
  if (p.kind == Kind::sdd) {
    if (fits_sdd(p, context)) {
      list.push_back({0, sdd_cost(p, context).microseconds()});
    }
    return list;
  }
  const bool wide = is_wide(p.layout->sizes().block_rows);
  for (const int width : wide ? std::vector{256, 128} : std::vector{0}) {
    if (const auto work = spmm_work(p, context, width)) {
      list.push_back({width, spmm_cost(p, *work, context).microseconds()});
    }
  }
  return list;
}

void launch(const Problem& problem, Context& context, int width) {
  problem.kind == Kind::spmm ? launch_spmm(problem, context, width) : launch_sdd(problem, context);
}

}  // namespace fretwork::block_matmul::hopper
