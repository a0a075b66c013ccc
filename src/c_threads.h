// Threads for calls of the C interface, whose callers bring none.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "fretwork/context.h"

namespace fretwork {

/// Starts `threads` − 1 threads for each loop and ends them with it: for work that takes much longer than that.
class ShortThreads final : public Executor {
 public:
  explicit ShortThreads(int threads) : threads_(std::max(threads, 1)) {}

  int concurrency() const override { return threads_; }

  void parallel_for(std::int64_t count, std::int64_t grain,
                    const std::function<void(std::int64_t, std::int64_t)>& body) override {
    grain = std::max<std::int64_t>(grain, 1);
    std::atomic<std::int64_t> next = 0;
    std::once_flag failed;
    std::exception_ptr failure;
    const auto work = [&] {
      try {
        for (std::int64_t begin = 0; (begin = next.fetch_add(grain)) < count;) {
          body(begin, std::min(begin + grain, count));
        }
      } catch (...) {
        next.store(count);
        std::call_once(failed, [&] { failure = std::current_exception(); });
      }
    };
    const std::int64_t workers = std::min<std::int64_t>(threads_, (count + grain - 1) / grain);
    {
      std::vector<std::jthread> others;
      for (std::int64_t n = 1; n < workers; ++n) {
        others.emplace_back(work);
      }
      work();
    }
    if (failure) {
      std::rethrow_exception(failure);
    }
  }

 private:
  int threads_;
};

}  // namespace fretwork
