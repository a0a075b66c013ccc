// The host side of the Hopper block kernels, shared by block_matmul and block_conv: kernel instances, TMA views, device
// plans, launch parameters.
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
/// Whether the Hopper kernels support the blocks: square, 16, 32, 64 or 128.
bool has_kernels(const BlockLayout::Sizes& sizes);

// ------------------------------------------------------------------------------------------------ instances

/// `size`: the width of a wide tile, or the block size of a narrow one. `image`: the dense operand is loaded from
/// images.
KernelSpec spmm_instance(DType dtype, int size, bool sparse_k, bool dense_k, bool rows, bool image = false);
/// The sdd kernel gathers columns of the right operand, which is fast only if K is its contiguous axis. If K is
/// contiguous only in the left operand, the kernel computes Sᵀ = Bᵀ·Aᵀ.
inline bool sdd_swaps(bool left_k, bool right_k) { return left_k && !right_k; }
KernelSpec sdd_instance(DType dtype, bool left_k, bool right_k, bool image = false);
KernelSpec reduce_instance(DType dtype);
KernelSpec sum_pieces_instance(DType dtype);

// ------------------------------------------------------------------------------------------------------ views

/// A TMA view of a matrix: the unit axis (the contiguous one), the other axis, and two batch dimensions.
struct View : TiledView {
  bool last = true;  ///< the unit axis is the columns

  int moves(int dimension) const { return sizes[static_cast<std::size_t>(dimension)] > 1 ? 1 : 0; }
};

/// A view of rows × cols × two batch dimensions, if TMA supports it. A batch stride of 0 broadcasts: the dimension has
/// size 1 in the view, and kernels multiply its index by `moves`.
std::optional<View> make_view(const void* data, std::int64_t rows, std::int64_t cols, std::int64_t row_stride,
                              std::int64_t col_stride, std::array<std::int64_t, 2> batch_sizes,
                              std::array<std::int64_t, 2> batch_strides);

// ------------------------------------------------------------------------------------------------------ plans

struct DevicePlan {
  cuda::DeviceBuffer steps, segments, splits;  ///< sdd: columns of slots, strips, empty
  cuda::DeviceBuffer blocks;                   ///< sdd only
  int segment_count = 0, split_count = 0, partial_count = 0, groups_per_head = 1, stride = 1;
  int step_count = 0, longest = 0;       ///< spmm only: all steps, and those of the longest segment
  int stage_bytes = 0, reach_bytes = 0;  ///< sdd only
  std::size_t bytes() const { return steps.bytes() + segments.bytes() + splits.bytes() + blocks.bytes(); }

  DevicePlan(int device, const SpmmPlan& plan);
  DevicePlan(int device, const SddPlan& plan);
  /// sdd only: stages of the ring, and the shared memory of a launch.
  int sdd_stages() const;
  int sdd_shared() const;
};

/// The plan of an spmm with op(layout). A group with far more steps than a fair share per multiprocessor is split, but
/// not below 1024 of K per segment. `parallel`: how often the layout's work runs (tiles × batches).
SpmmPlan balanced_plan(const BlockLayout& layout, bool transposed, int parallel, int device);

/// SpmmParams::share: as many segments as have blocks that stay in L2 while they walk the free dimension.
int share_of(const BlockLayout& layout, int segments);

// --------------------------------------------------------------------------------------------------- launches

/// The shape of a launch of `spmm_wide` or `spmm_narrow`.
struct SpmmShape {
  int width;             ///< of a tile, along the free dimension
  std::int64_t tiles;    ///< along the free dimension
  std::int64_t batches;  ///< how often the layout's work runs
  bool wide;

  /// Wide tiles have 256 columns, or 128: `width`, or what suits `free` if it is 0.
  SpmmShape(std::int64_t block, std::int64_t free, std::int64_t batches, int width = 0);
  int consumers() const { return (wide ? kThreads : kNarrowThreads) - 128; }
  int shared() const { return wide ? kWideShared : kNarrowShared; }
  /// tiles · batches rounded to a power of two: a plan depends on the batch only through this.
  int bucket() const;
  std::size_t partial_bytes(const DevicePlan& plan) const;
  /// Of spmm_reduce.
  std::int64_t reduce_ctas(const DevicePlan& plan) const {
    return plan.split_count * tiles * batches * (width / 2 / kReduceSums);
  }
};

/// Parameters that follow from the plan and the shape; the caller sets the operands.
SpmmParams spmm_params(const DevicePlan& plan, const SpmmShape& shape, const BlockLayout& layout, void* partials);
/// The same for spmm_reduce. `heads` as in Batches.
ReduceParams reduce_params(const DevicePlan& plan, const SpmmShape& shape, const void* partials, int heads);

}  // namespace fretwork::blocks
