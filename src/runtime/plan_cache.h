// What an op worked out for a problem, kept by content: bounded, thread-safe, least recently used goes first.
#pragma once

#include <list>
#include <memory>
#include <mutex>
#include <unordered_map>

#include "core/hash.h"

namespace fretwork {

/// Plans hold device memory, so a cache is made once per op and never destroyed (`static PlanCache<P>& cache =
/// *std::make_unique<PlanCache<P>>().release()`): a process that ends must not touch a dead CUDA context.
template <typename Plan>
class PlanCache {
 public:
  explicit PlanCache(std::size_t capacity = 256) : capacity_(capacity) {}

  /// The plan for `key`, made by `make()` if it is not there. Two threads may both make one; the first stays.
  template <typename Make>
  std::shared_ptr<const Plan> get(const Hash128& key, const Make& make) {
    {
      const std::lock_guard lock(mutex_);
      if (const auto found = index_.find(key); found != index_.end()) {
        order_.splice(order_.begin(), order_, found->second);
        return found->second->second;
      }
    }
    auto plan = std::make_shared<const Plan>(make());
    std::shared_ptr<const Plan> oldest;  // dies after the lock: freeing device memory waits for the device
    const std::lock_guard lock(mutex_);
    if (const auto found = index_.find(key); found != index_.end()) {
      return found->second->second;
    }
    order_.emplace_front(key, plan);
    index_.emplace(key, order_.begin());
    if (order_.size() > capacity_) {
      index_.erase(order_.back().first);
      oldest = std::move(order_.back().second);
      order_.pop_back();
    }
    return plan;
  }

  /// Keeps a plan for the life of the process: a captured graph refers to it.
  void pin(std::shared_ptr<const Plan> plan) {
    const std::lock_guard lock(mutex_);
    pinned_.emplace(plan.get(), std::move(plan));
  }

 private:
  using Order = std::list<std::pair<Hash128, std::shared_ptr<const Plan>>>;
  std::size_t capacity_;
  std::mutex mutex_;
  Order order_;
  std::unordered_map<Hash128, typename Order::iterator> index_;
  std::unordered_map<const Plan*, std::shared_ptr<const Plan>> pinned_;
};

}  // namespace fretwork
