// XLA's CPU thread pool as an executor.
#pragma once

#include "fretwork/context.h"
#include "xla/ffi/api/ffi.h"

namespace fretwork {

/// The calling thread works too and waits only for ranges that another thread is already running, so a call made from
/// a thread of the pool cannot wait for itself.
class XlaExecutor final : public Executor {
 public:
  explicit XlaExecutor(xla::ffi::ThreadPool pool);
  int concurrency() const override { return threads_; }
  void parallel_for(std::int64_t count, std::int64_t grain,
                    const std::function<void(std::int64_t, std::int64_t)>& body) override;

 private:
  xla::ffi::ThreadPool pool_;
  int threads_;
};

}  // namespace fretwork
