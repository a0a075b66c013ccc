// Attention plans on the device: tiles as the copy engine finds them, and the schedules of their row tiles.
#pragma once

#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <vector>

#include "ops/attention/cuda/params_hopper.cuh"
#include "ops/attention/plan.h"
#include "ops/attention/schedule.h"
#include "runtime/cuda_driver.h"

namespace fretwork::attention_op::hopper {

inline constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();
inline constexpr std::int64_t kNoEdge = -kMost / 2;  ///< of DevicePlan

/// Tiles of one side: where the copy engine finds them. `shift` tokens before the operand is where it counts from, so
/// that a tile which is cut may start later on its axes and still never at a negative place.
struct Side {
  Order order;
  std::int64_t shift = 0;
  std::size_t tiles = 0, tokens = 0, used = 0;  ///< where they are in the plan's memory

  int places() const { return order.extent[0] * order.extent[1] * order.extent[2]; }
};

struct DeviceComponent {
  Side rows, cols;
  int col_count = 0;                ///< of column tiles
  std::size_t first = 0, runs = 0;  ///< where they are in the plan's memory
  std::vector<int> steps;           ///< of each row tile
  bool general = false;             ///< has masks of bits, or columns that nothing uses
  bool covers_rows = false;
};

struct DevicePlan {
  std::shared_ptr<const Plan> plan;  ///< kept, so that its address stays its own
  std::vector<DeviceComponent> components;
  std::size_t bits = 0, used = 0;
  std::optional<std::int64_t>
      edge;  ///< the least column − row, if that and whole tiles are all there is; kNoEdge: all elements
  fretwork::cuda::DeviceBuffer memory;

  std::size_t bytes() const { return memory.bytes(); }
};

struct Schedule {
  std::size_t items, pieces, share, splits;  ///< where they are in the memory of all schedules of a plan
  int grid;
  int split_count, parts;
  bool in_pieces;  ///< items may be pieces, or heads share tiles
  LoadsOf loads;   ///< as in Deal
};

/// A plan and the schedules of its components for some number of heads.
struct Prepared {
  std::shared_ptr<const DevicePlan> plan;
  std::vector<std::size_t> order;       ///< of the components; the first one reaches all rows where any does
  std::vector<Schedule> schedules;      ///< in that order
  bool fill = false;                    ///< rows may be reached by no component
  fretwork::cuda::DeviceBuffer memory;  ///< of the schedules
  std::shared_ptr<const Plan> beside;   ///< kept, as the plan is

  const DeviceComponent& component(std::size_t at) const { return plan->components[order[at]]; }
  std::size_t bytes() const { return memory.bytes(); }
};

/// The launch whose time another may fill: the one before it, with the loads it was dealt, or else the one after it.
struct Beside {
  std::shared_ptr<const Plan> plan = nullptr;
  Pairs pairs{};
  int repeat = 1;
  const LoadsOf* before = nullptr;
};

/// All that kernels count in 32 bits.
bool fits(const Plan& plan);

/// Both are cached.
std::shared_ptr<const DevicePlan> find_plan(const std::shared_ptr<const Plan>& plan, int device);
std::shared_ptr<const Prepared> prepare(const std::shared_ptr<const Plan>& plan, const Pairs& pairs, int repeat,
                                        int longest, const Beside& beside, const Context& context);

}  // namespace fretwork::attention_op::hopper
