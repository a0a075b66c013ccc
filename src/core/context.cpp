// CPU contexts, the serial executor and the host allocator. CUDA contexts are made in runtime/cuda_driver.cpp.
#include "fretwork/context.h"

#include <new>

namespace fretwork {
namespace {

class SerialExecutor final : public Executor {
 public:
  int concurrency() const override { return 1; }
  void parallel_for(std::int64_t count, std::int64_t /*grain*/,
                    const std::function<void(std::int64_t, std::int64_t)>& body) override {
    if (count > 0) {
      body(0, count);
    }
  }
};

class HostAllocator final : public Allocator {
 public:
  void* allocate(std::size_t bytes) override { return ::operator new(bytes, kAlign); }
  void release(void* memory, std::size_t /*bytes*/) noexcept override { ::operator delete(memory, kAlign); }

 private:
  static constexpr std::align_val_t kAlign{64};
};

}  // namespace

Executor& serial_executor() {
  static SerialExecutor executor;
  return executor;
}

Allocator& host_allocator() {
  static HostAllocator allocator;
  return allocator;
}

Context Context::cpu(Executor& executor) {
  Context context;
  context.executor = &executor;
  return context;
}

}  // namespace fretwork
