// Plans on a device, for the portable and the fp32 kernels. The Hopper kernels have a format of their own
// (cuda/hopper.cpp).
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "ops/attention/cuda/params.h"
#include "ops/attention/plan.h"
#include "runtime/cuda_driver.h"

namespace fretwork::attention_op {

struct DevicePlan {
  fretwork::cuda::DeviceBuffer memory;
  std::vector<ComponentArg> components;
  bool covers_rows = false;  ///< the first component has every row
  std::size_t bytes() const { return memory.bytes(); }
};

/// The plan of the pattern, or of its transpose, on the context's device. Remembered; kept for good while a graph is
/// captured.
std::shared_ptr<const DevicePlan> device_plan(const RegularPattern& pattern, const TileShape& shape, bool transposed,
                                              const Context& context);

/// Numbers on the context's device, remembered in the same way.
struct DeviceNumbers {
  fretwork::cuda::DeviceBuffer memory;
  std::size_t bytes() const { return memory.bytes(); }
  const int* data() const { return static_cast<const int*>(memory.data()); }
};
std::shared_ptr<const DeviceNumbers> device_numbers(std::span<const int> numbers, const Context& context);

}  // namespace fretwork::attention_op
