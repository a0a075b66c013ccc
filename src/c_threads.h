// Threads for calls of the C interface, whose callers bring none.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

#include "fretwork/context.h"
#include "fretwork/parallel_loop.h"

namespace fretwork {

/// Starts `threads` − 1 threads for each loop and ends them with it: for work that takes much longer than that.
class ShortThreads final : public Executor {
 public:
  explicit ShortThreads(int threads) : threads_(std::max(threads, 1)) {}

  int concurrency() const override { return threads_; }

  void parallel_for(std::int64_t count, std::int64_t grain,
                    const std::function<void(std::int64_t, std::int64_t)>& body) override {
    ParallelLoop loop(count, grain, threads_);
    {
      std::vector<std::jthread> others;
      for (std::int64_t n = 1; n < loop.workers(); ++n) {
        others.emplace_back([&, n] { loop.work(n, body); });
      }
      loop.work(0, body);
    }
    loop.finish();
  }

 private:
  int threads_;
};

}  // namespace fretwork
