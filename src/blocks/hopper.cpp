// Instances, TMA views, device plans and launch parameters of the Hopper block kernels.
#include "blocks/hopper.h"

#include <algorithm>
#include <bit>
#include <vector>

#include "core/divide.h"

namespace fretwork::blocks {
namespace {

KernelSpec instance(const std::string& file, const std::string& kernel, DType dtype, const std::string& rest,
                    int shared) {
  return {"blocks/kernel_" + file + ".cuh", "fretwork::blocks::" + kernel + "<" + device_type(dtype) + rest + ">",
          shared};
}
std::string flag(bool value) { return value ? ", true" : ", false"; }

template <typename Item>
cuda::DeviceBuffer upload(int device, const std::vector<Item>& items) {
  return cuda::DeviceBuffer(device, items.data(), items.size() * sizeof(Item));
}

}  // namespace

bool has_kernels(const BlockLayout::Sizes& sizes) {
  const std::int64_t block = sizes.block_rows;
  return block == sizes.block_cols && (block == 16 || block == 32 || block == 64 || block == 128);
}

KernelSpec spmm_instance(DType dtype, int size, bool sparse_k, bool dense_k, bool rows, bool image) {
  const bool wide = size >= 128;
  return instance(wide ? "wide" : "narrow", wide ? "spmm_wide" : "spmm_narrow", dtype,
                  ", " + std::to_string(size) + flag(sparse_k) + flag(dense_k) + flag(rows) + flag(image),
                  wide ? kWideShared : kNarrowShared);
}
KernelSpec sdd_instance(DType dtype, bool left_k, bool right_k, bool image) {
  const bool swaps = !image && sdd_swaps(left_k, right_k);
  return instance("sdd", "sdd", dtype,
                  flag(swaps ? right_k : left_k) + flag(swaps ? left_k : right_k) + flag(swaps) + flag(image),
                  KernelSpec::kBySize);
}
KernelSpec reduce_instance(DType dtype) { return instance("reduce", "spmm_reduce", dtype, "", 0); }
KernelSpec sum_pieces_instance(DType dtype) { return instance("sum", "sum_pieces", dtype, "", 0); }

std::optional<View> make_view(const void* data, std::int64_t rows, std::int64_t cols, std::int64_t row_stride,
                              std::int64_t col_stride, std::array<std::int64_t, 2> batch_sizes,
                              std::array<std::int64_t, 2> batch_strides) {
  const bool last = cols == 1 ? row_stride != 1 || rows == 1 : col_stride == 1;
  if (!last && row_stride != 1 && rows != 1) {
    return std::nullopt;
  }
  const auto size = [&](std::size_t d) { return batch_strides[d] != 0 ? batch_sizes[d] : 1; };
  const auto view = make_tiled_view(data, {last ? cols : rows, last ? rows : cols, size(0), size(1)},
                                    {1, last ? row_stride : col_stride, batch_strides[0], batch_strides[1]});
  return view ? std::optional(View{*view, last}) : std::nullopt;
}

DevicePlan::DevicePlan(int device, const SpmmPlan& plan)
    : steps(upload(device, plan.steps)),
      segments(upload(device, plan.segments)),
      splits(upload(device, plan.splits)),
      segment_count(static_cast<int>(plan.segments.size())),
      split_count(static_cast<int>(plan.splits.size())),
      partial_count(plan.partials),
      groups_per_head(plan.groups_per_head),
      stride(1 + plan.group_rows),
      step_count(static_cast<int>(plan.steps.size()) / (1 + plan.group_rows)),
      longest(plan.segments.front().last - plan.segments.front().first) {}

DevicePlan::DevicePlan(int device, const SddPlan& plan)
    : steps(upload(device, plan.columns)),
      segments(upload(device, plan.strips)),
      blocks(upload(device, plan.blocks)),
      segment_count(static_cast<int>(plan.strips.size())),
      groups_per_head(plan.lines),
      stage_bytes(plan.stage_bytes),
      reach_bytes(plan.reach_bytes) {}

// A product may read past the end of the last stage, but not past the end of shared memory.
int DevicePlan::sdd_stages() const {
  return std::min(kSddStages, (kSddShared - std::max(0, reach_bytes - stage_bytes)) / stage_bytes);
}
int DevicePlan::sdd_shared() const {
  return 1024 + sdd_stages() * stage_bytes + std::max(0, reach_bytes - stage_bytes);
}

SpmmPlan balanced_plan(const BlockLayout& layout, bool transposed, int parallel, int device) {
  const auto block = static_cast<int>(layout.sizes().block_rows);
  const int group_rows = (is_wide(block) ? kTileM : kNarrow) / block;
  const StepOrder order = is_wide(block) ? StepOrder::columns : StepOrder::pairs;
  SpmmPlan plan = make_spmm_plan(layout, transposed, group_rows, 0, order);
  const auto all = static_cast<std::int64_t>(plan.steps.size()) / (1 + group_rows);
  const std::int64_t fair = ceil_div(all * parallel, cuda::device_info(device).multiprocessors);
  const std::int64_t longest = std::max<std::int64_t>(fair, 1024 / block);
  const SpmmPlan::Segment& first = plan.segments.front();
  // A little more than a fair share costs less than adding partial sums.
  return first.last - first.first > longest + longest / 4
             ? make_spmm_plan(layout, transposed, group_rows, static_cast<std::int32_t>(longest), order)
             : plan;
}

int share_of(const BlockLayout& layout, int segments) {
  constexpr std::int64_t kCache = 16 << 20;
  const std::int64_t block = layout.sizes().block_rows;
  const std::int64_t bytes = std::max<std::int64_t>(1, layout.nnz() * block * block * 2 / segments);
  return static_cast<int>(std::clamp<std::int64_t>(kCache / bytes, 16, std::max(16, segments)));
}

SpmmShape::SpmmShape(std::int64_t block, std::int64_t free, std::int64_t batch_count, int chosen_width)
    : width(!is_wide(block)    ? kNarrow
            : chosen_width > 0 ? chosen_width
            : free > 128       ? 256
                               : 128),
      tiles(ceil_div(free, width)),
      batches(batch_count),
      wide(is_wide(block)) {}

int SpmmShape::bucket() const {
  return static_cast<int>(
      std::bit_ceil(static_cast<std::uint64_t>(std::clamp<std::int64_t>(tiles * batches, 1, 1024))));
}
std::size_t SpmmShape::partial_bytes(const DevicePlan& plan) const {
  return static_cast<std::size_t>(plan.partial_count * tiles * batches) *
         static_cast<std::size_t>(consumers() * width / 2) * sizeof(float);
}

SpmmParams spmm_params(const DevicePlan& plan, const SpmmShape& shape, const BlockLayout& layout, void* partials) {
  SpmmParams params{};
  params.steps = static_cast<const int*>(plan.steps.data());
  params.segments = static_cast<const Segment*>(plan.segments.data());
  params.partials = static_cast<float*>(partials);
  params.block = static_cast<int>(layout.sizes().block_rows);
  params.stride = plan.stride;
  params.groups_per_head = plan.groups_per_head;
  params.segment_count = plan.segment_count;
  params.share = share_of(layout, plan.segment_count);
  params.tiles = static_cast<int>(shape.tiles);
  params.total = static_cast<int>(plan.segment_count * shape.tiles * shape.batches);
  params.partial_count = plan.partial_count;
  return params;
}

ReduceParams reduce_params(const DevicePlan& plan, const SpmmShape& shape, const void* partials, int heads) {
  ReduceParams params{};
  params.partials = static_cast<const float*>(partials);
  params.splits = static_cast<const Split*>(plan.splits.data());
  params.groups_per_head = plan.groups_per_head;
  params.tiles = static_cast<int>(shape.tiles);
  params.heads = heads;
  params.partial_count = plan.partial_count;
  params.split_count = plan.split_count;
  params.rows_first = shape.wide ? 1 : 0;
  params.width = shape.width;
  return params;
}

}  // namespace fretwork::blocks
