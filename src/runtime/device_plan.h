// Plans in device memory: made once for a device, kept by content.
#pragma once

#include <memory>
#include <string>

#include "fretwork/context.h"
#include "runtime/cuda_driver.h"
#include "runtime/plan_cache.h"

namespace fretwork {

/// The plan that `key` names on the context's device, made by `make(device)` if it is not there. It is kept for good
/// once a captured graph refers to it. Keys of ops that share a type of plan must differ.
template <typename Plan, typename Make>
std::shared_ptr<const Plan> find_device_plan(std::string key, const Context& context, const Make& make) {
  static PlanCache<Plan>& cache = *std::make_unique<PlanCache<Plan>>().release();
  const int device = context.device.index;
  key += "@" + std::to_string(device);
  auto plan = cache.get(hash128(key), [&] { return make(device); });
  if (cuda::is_capturing(context.stream)) {
    cache.pin(plan);
  }
  return plan;
}

}  // namespace fretwork
