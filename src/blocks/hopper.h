// What block_matmul and block_conv share of the host side of the Hopper kernels: views, plans on the device, names.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>

#include "blocks/params.cuh"
#include "blocks/plan.h"
#include "blocks/plan_sdd.h"
#include "runtime/cuda_driver.h"
#include "runtime/kernels.h"
#include "runtime/tensor_map.h"

namespace fretwork::blocks {

static_assert(sizeof(Segment) == sizeof(SpmmPlan::Segment) && sizeof(Split) == sizeof(SpmmPlan::Split));

inline constexpr int kWideShared = 4 * 49152 + 32768 + 1024, kNarrowShared = 4 * 49152 + 24576 + 1024;
inline constexpr int kSddStages = 4, kSddShared = 225 * 1024;

inline bool is_wide(std::int64_t block) { return block >= 64; }
/// Square blocks of 16, 32, 64 or 128.
bool has_kernels(const BlockLayout::Sizes& sizes);

// ------------------------------------------------------------------------------------------------ instances

/// `size` is the width of a wide tile or the block of a narrow one. `image`: the dense operand is gathered from images.
KernelSpec spmm_instance(DType dtype, int size, bool sparse_k, bool dense_k, bool rows, bool image = false);
/// Columns of the right operand are gathered, which takes K as its unit axis to be fast. Where only the left one has
/// that, the kernel computes Sᵀ = Bᵀ·Aᵀ.
inline bool sdd_swaps(bool left_k, bool right_k) { return left_k && !right_k; }
KernelSpec sdd_instance(DType dtype, bool left_k, bool right_k, bool image = false);
KernelSpec reduce_instance(DType dtype);
KernelSpec sum_pieces_instance(DType dtype);

// ------------------------------------------------------------------------------------------------------ views

/// The unit axis, the other one, and two that are 1 where broadcast.
struct View : TiledView {
  bool last = true;  ///< the unit axis is the columns (or the K axis of a block)

  int moves(int dimension) const { return sizes[static_cast<std::size_t>(dimension)] > 1 ? 1 : 0; }
};

/// A view of rows × cols × two batch dimensions, if the copy engine can make one. A stride of 0 broadcasts: that
/// dimension has size 1 in the view, and kernels multiply its index by `moves`.
std::optional<View> make_view(const void* data, std::int64_t rows, std::int64_t cols, std::int64_t row_stride,
                              std::int64_t col_stride, std::array<std::int64_t, 2> batch_sizes,
                              std::array<std::int64_t, 2> batch_strides);

// ------------------------------------------------------------------------------------------------------ plans

struct DevicePlan {
  cuda::DeviceBuffer steps, segments, splits;  ///< sdd: columns of slots, strips, nothing
  cuda::DeviceBuffer blocks;                   ///< sdd only
  int segment_count = 0, split_count = 0, partial_count = 0, groups_per_head = 1, stride = 1;
  int stage_bytes = 0, reach_bytes = 0;  ///< sdd only
  std::size_t bytes() const { return steps.bytes() + segments.bytes() + splits.bytes() + blocks.bytes(); }

  DevicePlan(int device, const SpmmPlan& plan);
  DevicePlan(int device, const SddPlan& plan);
  /// Stages of the ring of an sdd, and the shared memory of a launch with them.
  int sdd_stages() const;
  int sdd_shared() const;
};

/// The steps of op(layout) for the Hopper kernels. A group longer than its fair share of a machine that would otherwise
/// idle is cut, but not below 1024 of K. `parallel`: how often the layout's work is there.
SpmmPlan balanced_plan(const BlockLayout& layout, bool transposed, int parallel, int device);

/// Segments that walk the free dimension together: as many as have blocks that stay in the cache meanwhile.
int share_of(const BlockLayout& layout, int segments);

// --------------------------------------------------------------------------------------------------- launches

/// The shape of a launch of `spmm_wide` or `spmm_narrow`.
struct SpmmShape {
  int width;             ///< of a tile along the free dimension
  std::int64_t tiles;    ///< along it
  std::int64_t batches;  ///< how often the layout's work is there
  bool wide;

  SpmmShape(std::int64_t block, std::int64_t free, std::int64_t batches);
  int consumers() const { return (wide ? kThreads : kNarrowThreads) - 128; }
  int shared() const { return wide ? kWideShared : kNarrowShared; }
  /// Batch sizes share a plan: only how full the machine is matters.
  int bucket() const;
  std::size_t partial_bytes(const DevicePlan& plan) const;
};

/// What a plan and a shape say; the operands are left to the caller.
SpmmParams spmm_params(const DevicePlan& plan, const SpmmShape& shape, const BlockLayout& layout, void* partials);
/// The same for the kernel that adds partial sums. `heads` as in Batches.
ReduceParams reduce_params(const DevicePlan& plan, const SpmmShape& shape, const void* partials, int heads);

}  // namespace fretwork::blocks
