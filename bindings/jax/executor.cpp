// Helpers that come too late find no items left.
#include "executor.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <memory>
#include <mutex>

#include "fretwork/parallel_loop.h"

namespace fretwork {
namespace {

/// One parallel_for. Helpers share it, because one may be scheduled only after the call has returned; `body` lives as
/// long as the call, and is used only while some of its items are unfinished.
class Loop {
 public:
  Loop(std::int64_t count, std::int64_t grain, int threads, const ParallelLoop::Body& body)
      : count_(count), items_(count, grain, threads), body_(&body) {}

  std::int64_t workers() const { return items_.workers(); }

  void work() {
    items_.work(number_of_thread(), [&](std::int64_t begin, std::int64_t end) {
      try {
        (*body_)(begin, end);
      } catch (...) {
        const std::lock_guard lock(mutex_);
        thrown_ = std::current_exception();
      }
      if (finished_.fetch_add(end - begin) + end - begin == count_) {
        finished_.notify_all();
      }
    });
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
  /// The pool tells no thread from another, so each gets a number when it first works here.
  static std::int64_t number_of_thread() {
    static std::atomic<std::int64_t> numbers = 0;
    thread_local const std::int64_t number = numbers++;
    return number;
  }

  const std::int64_t count_;
  ParallelLoop items_;
  const ParallelLoop::Body* body_;
  std::atomic<std::int64_t> finished_ = 0;
  std::mutex mutex_;
  std::exception_ptr thrown_;
};

}  // namespace

XlaExecutor::XlaExecutor(xla::ffi::ThreadPool pool)
    : pool_(pool), threads_(static_cast<int>(std::max<std::int64_t>(pool.num_threads(), 1))) {}

void XlaExecutor::parallel_for(std::int64_t count, std::int64_t grain,
                               const std::function<void(std::int64_t, std::int64_t)>& body) {
  if (count <= grain || threads_ == 1) {
    if (count > 0) {
      body(0, count);
    }
    return;
  }
  const auto loop = std::make_shared<Loop>(count, grain, threads_, body);
  for (std::int64_t helper = 1; helper < loop->workers(); ++helper) {
    pool_.Schedule([loop] { loop->work(); });
  }
  loop->work();
  loop->wait();
}

}  // namespace fretwork
