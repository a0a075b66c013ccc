// An executor on oneTBB, for programs that bring no threads of their own: TbbExecutor threads; Context::cpu(threads).
// In CMake find_package(TBB), and link TBB::tbb beside fretwork::fretwork.
#pragma once

#include <tbb/blocked_range.h>
#include <tbb/parallel_for.h>
#include <tbb/task_arena.h>

#include <algorithm>

#include "fretwork/context.h"

namespace fretwork {

class TbbExecutor final : public Executor {
 public:
  /// All hardware threads unless told.
  explicit TbbExecutor(int threads = tbb::task_arena::automatic) : arena_(threads) {}

  int concurrency() const override { return const_cast<tbb::task_arena&>(arena_).max_concurrency(); }

  void parallel_for(std::int64_t count, std::int64_t grain,
                    const std::function<void(std::int64_t, std::int64_t)>& body) override {
    arena_.execute([&] {
      tbb::parallel_for(
          tbb::blocked_range<std::int64_t>(0, count, static_cast<std::size_t>(std::max<std::int64_t>(grain, 1))),
          [&](const auto& range) { body(range.begin(), range.end()); }, tbb::simple_partitioner{});
    });
  }

 private:
  tbb::task_arena arena_;
};

}  // namespace fretwork
