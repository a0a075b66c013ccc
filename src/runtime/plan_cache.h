// What an op worked out for a problem, kept by content: bounded in number and memory, thread-safe, least recently used
// goes first.
#pragma once

#include <list>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "core/hash.h"

namespace fretwork {

/// Plans hold device memory, so a cache is made once per op and never destroyed (`static PlanCache<P>& cache =
/// *std::make_unique<PlanCache<P>>().release()`): a process that ends must not touch a dead CUDA context. A plan says
/// what it holds with `bytes()`; one without counts as nothing. The newest stays, however large.
template <typename Plan>
class PlanCache {
 public:
  explicit PlanCache(std::size_t capacity = 256, std::size_t most_bytes = std::size_t{256} << 20)
      : capacity_(capacity), most_bytes_(most_bytes) {}

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
    std::vector<std::shared_ptr<const Plan>> old;  // die after the lock: freeing device memory waits for the device
    const std::lock_guard lock(mutex_);
    if (const auto found = index_.find(key); found != index_.end()) {
      return found->second->second;
    }
    order_.emplace_front(key, plan);
    index_.emplace(key, order_.begin());
    bytes_ += size_of(*plan);
    while (order_.size() > 1 && (order_.size() > capacity_ || bytes_ > most_bytes_)) {
      bytes_ -= size_of(*order_.back().second);
      index_.erase(order_.back().first);
      old.push_back(std::move(order_.back().second));
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
  static std::size_t size_of(const Plan& plan) {
    if constexpr (requires { plan.bytes(); }) {
      return plan.bytes();
    }
    return 0;
  }
  std::size_t capacity_, most_bytes_, bytes_ = 0;
  std::mutex mutex_;
  Order order_;
  std::unordered_map<Hash128, typename Order::iterator> index_;
  std::unordered_map<const Plan*, std::shared_ptr<const Plan>> pinned_;
};

}  // namespace fretwork
