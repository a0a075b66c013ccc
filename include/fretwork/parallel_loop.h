// The items of one parallel_for, dealt out to threads: for executors on threads that outlive a call.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <mutex>
#include <vector>

namespace fretwork {

/// Each worker has a part of the items. It takes these first, `grain` at a time, then what others have left. So uneven
/// work evens out, and a thread that is the same worker in each call mostly meets memory that is in its own caches.
class ParallelLoop {
 public:
  using Body = std::function<void(std::int64_t, std::int64_t)>;

  /// Of up to `threads` workers, if there are `grain` items for each.
  ParallelLoop(std::int64_t count, std::int64_t grain, int threads)
      : grain_(std::max<std::int64_t>(grain, 1)),
        parts_(static_cast<std::size_t>(
            std::clamp<std::int64_t>((count + grain_ - 1) / grain_, 1, std::max(threads, 1)))) {
    for (std::int64_t n = 0; n < workers(); ++n) {
      parts_[static_cast<std::size_t>(n)].next = count * n / workers();
      parts_[static_cast<std::size_t>(n)].end = count * (n + 1) / workers();
    }
  }

  std::int64_t workers() const { return static_cast<std::int64_t>(parts_.size()); }

  /// Calls the body until no items are left. The first exception is kept, and no items are handed out behind it.
  void work(std::int64_t worker, const Body& body) noexcept {
    try {
      for (std::int64_t n = 0; n < workers(); ++n) {
        Part& part = parts_[static_cast<std::size_t>((worker + n) % workers())];
        for (std::int64_t begin = 0; (begin = part.next.fetch_add(grain_)) < part.end;) {
          body(begin, std::min(begin + grain_, part.end));
        }
      }
    } catch (...) {
      std::ranges::for_each(parts_, [](Part& part) { part.next = part.end; });
      std::call_once(failed_, [&] { failure_ = std::current_exception(); });
    }
  }

  /// Throws what a body threw. All workers are done.
  void finish() const {
    if (failure_) {
      std::rethrow_exception(failure_);
    }
  }

 private:
  struct alignas(64) Part {  // a cache line for each
    std::atomic<std::int64_t> next = 0;
    std::int64_t end = 0;
  };

  std::int64_t grain_;
  std::vector<Part> parts_;
  std::once_flag failed_;
  std::exception_ptr failure_;
};

}  // namespace fretwork
