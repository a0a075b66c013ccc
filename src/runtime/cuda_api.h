// The driver's functions, found by name in libcuda.so.1. Only runtime/ includes this.
#pragma once

#include <dlfcn.h>

#include "runtime/cuda_driver.h"

namespace fretwork::cuda {

/// What Function::attempt returns when the driver has no function of that name.
inline constexpr int kMissing = -1;

/// Throws Error with the call's name and CUDA's own text.
[[noreturn]] void fail(const char* call, int code);

/// One function of the driver.
template <typename... Arguments>
class Function {
 public:
  Function(void* library, const char* name)
      : name_(name), call_(reinterpret_cast<int (*)(Arguments...)>(dlsym(library, name))) {}

  /// Calls it and throws Error when it fails.
  void operator()(Arguments... arguments) const {
    if (const int code = attempt(arguments...); code != 0) [[unlikely]] {
      fail(name_, code);
    }
  }
  /// Calls it and gives its status.
  int attempt(Arguments... arguments) const { return call_ != nullptr ? call_(arguments...) : kMissing; }

 private:
  const char* name_;
  int (*call_)(Arguments...);
};

/// A CUlaunchAttribute that holds cluster dimensions or, in x, a number; and a CUlaunchConfig.
struct LaunchAttribute {
  std::uint32_t id, pad;
  std::uint32_t x, y, z;
  std::uint32_t rest[13];
};
static_assert(sizeof(LaunchAttribute) == 72);
struct LaunchConfig {
  std::uint32_t grid[3], block[3], shared_bytes;
  Handle stream;
  LaunchAttribute* attributes;
  std::uint32_t attribute_count;
};
static_assert(sizeof(LaunchConfig) == 56);

/// The table. Names carry the versions that cuda.h maps the plain ones to.
struct Driver {
  void* library;
  Function<unsigned> init{library, "cuInit"};
  Function<int*> version{library, "cuDriverGetVersion"};
  Function<int, const char**> error_name{library, "cuGetErrorName"};
  Function<int, const char**> error_string{library, "cuGetErrorString"};

  Function<int*> device_count{library, "cuDeviceGetCount"};
  Function<int*, int> device_get{library, "cuDeviceGet"};
  Function<char*, int, int> device_name{library, "cuDeviceGetName"};
  Function<int*, int, int> device_attribute{library, "cuDeviceGetAttribute"};
  Function<std::size_t*, int> device_memory{library, "cuDeviceTotalMem_v2"};
  Function<Handle*, int> primary_retain{library, "cuDevicePrimaryCtxRetain"};
  Function<Handle*> ctx_current{library, "cuCtxGetCurrent"};
  Function<Handle> ctx_set{library, "cuCtxSetCurrent"};
  Function<Handle> ctx_push{library, "cuCtxPushCurrent_v2"};
  Function<Handle*> ctx_pop{library, "cuCtxPopCurrent_v2"};

  Function<DevicePtr*, std::size_t> mem_alloc{library, "cuMemAlloc_v2"};
  Function<DevicePtr> mem_free{library, "cuMemFree_v2"};
  Function<DevicePtr*, std::size_t, Handle> mem_alloc_async{library, "cuMemAllocAsync"};
  Function<DevicePtr, Handle> mem_free_async{library, "cuMemFreeAsync"};
  Function<Handle*, int> default_pool{library, "cuDeviceGetDefaultMemPool"};
  Function<Handle, int, void*> pool_get{library, "cuMemPoolGetAttribute"};
  Function<Handle, int, void*> pool_set{library, "cuMemPoolSetAttribute"};
  Function<DevicePtr, const void*, std::size_t, Handle> copy_to_device{library, "cuMemcpyHtoDAsync_v2"};
  Function<void*, DevicePtr, std::size_t, Handle> copy_to_host{library, "cuMemcpyDtoHAsync_v2"};
  Function<DevicePtr, DevicePtr, std::size_t, Handle> copy_on_device{library, "cuMemcpyDtoDAsync_v2"};
  Function<DevicePtr, unsigned char, std::size_t, Handle> fill{library, "cuMemsetD8Async"};

  Function<Handle*, unsigned> stream_create{library, "cuStreamCreate"};
  Function<Handle> stream_synchronize{library, "cuStreamSynchronize"};
  Function<Handle, int*> stream_is_capturing{library, "cuStreamIsCapturing"};
  Function<int*> exchange_capture_mode{library, "cuThreadExchangeStreamCaptureMode"};
  Function<Handle*, unsigned> event_create{library, "cuEventCreate"};
  Function<Handle> event_destroy{library, "cuEventDestroy_v2"};
  Function<Handle, Handle> event_record{library, "cuEventRecord"};
  Function<Handle> event_synchronize{library, "cuEventSynchronize"};
  Function<float*, Handle, Handle> event_elapsed{library, "cuEventElapsedTime"};

  Function<Handle*, const void*> module_load{library, "cuModuleLoadData"};
  Function<Handle*, Handle, const char*> module_function{library, "cuModuleGetFunction"};
  Function<Handle, int, int> function_set{library, "cuFuncSetAttribute"};
  Function<Handle, std::size_t, std::size_t*, std::size_t*> parameter{library, "cuFuncGetParamInfo"};  // CUDA 12.4
  Function<int*, Handle, int, std::size_t> occupancy{library, "cuOccupancyMaxActiveBlocksPerMultiprocessor"};
  Function<int*, Handle, const LaunchConfig*> active_clusters{library, "cuOccupancyMaxActiveClusters"};
  Function<Handle, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, Handle, void**, void**> launch{
      library, "cuLaunchKernel"};
  Function<const LaunchConfig*, Handle, void**, void**> launch_config{library, "cuLaunchKernelEx"};
  Function<TensorMap*, int, std::uint32_t, void*, const std::uint64_t*, const std::uint64_t*, const std::uint32_t*,
           const std::uint32_t*, int, int, int, int>
      tensor_map{library, "cuTensorMapEncodeTiled"};
  Function<TensorMap*, int, std::uint32_t, void*, const std::uint64_t*, const std::uint64_t*, const int*, const int*,
           std::uint32_t, std::uint32_t, const std::uint32_t*, int, int, int, int>
      pixel_map{library, "cuTensorMapEncodeIm2col"};
};

/// Opened on first use; throws Error, saying why, when there is no driver or no device.
const Driver& driver();

/// Lets this thread allocate, load and upload while it, or another thread, captures a stream.
class RelaxedCapture {
 public:
  RelaxedCapture() { driver().exchange_capture_mode(&mode_); }
  ~RelaxedCapture() { driver().exchange_capture_mode.attempt(&mode_); }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  int mode_ = 2;  // CU_STREAM_CAPTURE_MODE_RELAXED, then what it was before
};

}  // namespace fretwork::cuda
