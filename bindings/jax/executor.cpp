// Ranges are handed out by a counter; helpers that come too late find none left.
#include "executor.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <memory>
#include <mutex>

namespace fretwork {
namespace {

/// One parallel_for. Helpers share it, because one may be scheduled only after the call has returned; `body` lives as
/// long as the call, and is used only while some of its items are unfinished.
class Loop {
 public:
  Loop(std::int64_t count, std::int64_t grain, const std::function<void(std::int64_t, std::int64_t)>& body)
      : count_(count), grain_(grain), body_(&body) {}

  void work() {
    for (std::int64_t begin = next_.fetch_add(grain_); begin < count_; begin = next_.fetch_add(grain_)) {
      const std::int64_t end = std::min(begin + grain_, count_);
      try {
        (*body_)(begin, end);
      } catch (...) {
        const std::lock_guard lock(mutex_);
        thrown_ = std::current_exception();
      }
      if (finished_.fetch_add(end - begin) + end - begin == count_) {
        finished_.notify_all();
      }
    }
  }

  void wait() {
    for (std::int64_t finished = finished_; finished != count_; finished = finished_) {
      finished_.wait(finished);
    }
    if (thrown_) {
      std::rethrow_exception(thrown_);
    }
  }

 private:
  const std::int64_t count_, grain_;
  const std::function<void(std::int64_t, std::int64_t)>* body_;
  std::atomic<std::int64_t> next_ = 0, finished_ = 0;
  std::mutex mutex_;
  std::exception_ptr thrown_;
};

}  // namespace

XlaExecutor::XlaExecutor(xla::ffi::ThreadPool pool)
    : pool_(pool), threads_(static_cast<int>(std::max<std::int64_t>(pool.num_threads(), 1))) {}

void XlaExecutor::parallel_for(std::int64_t count, std::int64_t grain,
                               const std::function<void(std::int64_t, std::int64_t)>& body) {
  grain = std::max<std::int64_t>(grain, 1);
  if (count <= 0) {
    return;
  }
  if (count <= grain || threads_ == 1) {
    body(0, count);
    return;
  }
  const auto loop = std::make_shared<Loop>(count, grain, body);
  const std::int64_t ranges = (count + grain - 1) / grain;
  for (std::int64_t helper = 1; helper < std::min<std::int64_t>(threads_, ranges); ++helper) {
    pool_.Schedule([loop] { loop->work(); });
  }
  loop->work();
  loop->wait();
}

}  // namespace fretwork
