// An executor of as many threads as a test asks for, whatever the machine has.
#pragma once

#include <thread>
#include <vector>

#include "fretwork/context.h"

namespace fretwork {

/// Starts threads for every call and gives each an equal share.
class Threads final : public Executor {
 public:
  explicit Threads(int count) : count_(count) {}
  int concurrency() const override { return count_; }
  void parallel_for(std::int64_t count, std::int64_t,
                    const std::function<void(std::int64_t, std::int64_t)>& body) override {
    std::vector<std::thread> threads;
    for (std::int64_t t = 0; t < count_; ++t) {
      threads.emplace_back([&, t] {
        if (count * t / count_ < count * (t + 1) / count_) {
          body(count * t / count_, count * (t + 1) / count_);
        }
      });
    }
    for (auto& thread : threads) {
      thread.join();
    }
  }

 private:
  int count_;
};

}  // namespace fretwork
