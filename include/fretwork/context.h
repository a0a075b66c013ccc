// Where and how an op runs: device, stream, workspace, threads, precision. The caller owns all of them.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <new>

#include "fretwork/tensor.h"

namespace fretwork {

/// Threads, as the caller has them. The library starts none of its own (the C interface: as many as a call names).
class Executor {
 public:
  virtual ~Executor() = default;
  virtual int concurrency() const = 0;
  /// Calls body(begin, end) on disjoint ranges that together cover [0, count), in any order, on any threads, and
  /// returns when all are done. Ranges hold about `grain` items or more. Rethrows what a body throws.
  virtual void parallel_for(std::int64_t count, std::int64_t grain,
                            const std::function<void(std::int64_t, std::int64_t)>& body) = 0;
};

/// Runs everything on the calling thread.
Executor& serial_executor();

/// Workspace, as the caller has it. Under CUDA the memory is used in stream order.
class Allocator {
 public:
  virtual ~Allocator() = default;
  /// Throws where there is none; null stands for std::bad_alloc.
  virtual void* allocate(std::size_t bytes) = 0;
  virtual void release(void* memory, std::size_t bytes) noexcept = 0;
};

/// Cache-line aligned memory of this machine.
Allocator& host_allocator();

/// How fp32 products run on a GPU: exact, rounded to tf32, or in three tf32 products (nearly exact).
enum class Precision : std::uint8_t { ieee, tf32, tf32x3 };

struct Context {
  Device device{};
  void* stream = nullptr;  ///< a CUstream when device is CUDA
  Allocator* allocator = &host_allocator();
  Executor* executor = &serial_executor();
  Precision precision = Precision::ieee;

  static Context cpu(Executor& executor = serial_executor());
  /// Workspace from the stream-ordered pool of the device.
  static Context cuda(int device = 0, void* stream = nullptr);
};

/// GPUs that the CUDA driver shows; 0 without a driver.
int cuda_device_count();
/// Whether the calling thread has a current CUDA context; false without a driver.
bool has_cuda_context();
/// Makes a device's primary context the calling thread's, as the CUDA runtime does on first use. Ops leave a thread's
/// context as it was: a caller that goes on with a library that expects one calls this first, where there is none.
void set_cuda_context(int device);

/// Memory from a context's allocator for the length of a scope.
class Workspace {
 public:
  Workspace(Context& context, std::size_t bytes)
      : allocator_(context.allocator), bytes_(bytes), data_(bytes > 0 ? allocator_->allocate(bytes) : nullptr) {
    if (bytes > 0 && data_ == nullptr) {
      throw std::bad_alloc();
    }
  }
  ~Workspace() {
    if (data_ != nullptr) {
      allocator_->release(data_, bytes_);
    }
  }
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;
  void* data() const { return data_; }

 private:
  Allocator* allocator_;
  std::size_t bytes_;
  void* data_;
};

}  // namespace fretwork
