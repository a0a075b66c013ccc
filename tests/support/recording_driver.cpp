// A CUDA driver and an NVRTC for machines without a GPU. Tests load it in place of libcuda.so.1, so that the host side
// of an op runs as on an H200: device memory is memory of the host, nothing is compiled, kernels do nothing, and every
// launch is recorded.
#include "support/recording_driver.h"

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <mutex>
#include <string>
#include <vector>

namespace {

using Handle = void*;
using DevicePtr = unsigned long long;

std::mutex mutex;
std::vector<fretwork::RecordedLaunch> launches;
std::deque<std::string> names;  ///< of kernels; a function's handle points to one
thread_local std::vector<Handle> contexts;
bool capturing = false;  ///< whether streams answer that they are captured

Handle some(std::uintptr_t value) { return reinterpret_cast<Handle>(value); }
int allocate(DevicePtr* memory, std::size_t bytes) {
  *memory = reinterpret_cast<DevicePtr>(std::aligned_alloc(512, (bytes / 512 + 1) * 512));
  return *memory != 0 ? 0 : 2;
}
int release(DevicePtr memory) {
  std::free(reinterpret_cast<void*>(memory));
  return 0;
}
void record(Handle function, unsigned grid, unsigned threads, unsigned shared_bytes) {
  const std::lock_guard lock(mutex);
  launches.push_back({static_cast<std::string*>(function)->c_str(), grid, threads, shared_bytes});
}

/// As CUlaunchConfig begins.
struct LaunchConfig {
  std::uint32_t grid[3], block[3], shared_bytes;
};

struct Program {
  std::string instance;
};

}  // namespace

extern "C" {

std::size_t recorded_launches(const fretwork::RecordedLaunch** first) {
  *first = launches.data();
  return launches.size();
}

void record_capture(bool yes) { capturing = yes; }

int cuInit(unsigned) { return 0; }
int cuDriverGetVersion(int* version) { return *version = 13000, 0; }
int cuGetErrorName(int, const char** name) { return *name = "RECORDING", 0; }
int cuGetErrorString(int, const char** text) { return *text = "of the recording driver", 0; }

int cuDeviceGetCount(int* count) { return *count = 1, 0; }
int cuDeviceGet(int* device, int index) { return *device = index, 0; }
int cuDeviceGetName(char* name, int size, int) {
  std::snprintf(name, static_cast<std::size_t>(size), "recording driver");
  return 0;
}
int cuDeviceGetAttribute(int* value, int which, int) {
  switch (which) {
    case 16:  // multiprocessors
      *value = 132;
      break;
    case 38:  // bytes of L2
      *value = 50 << 20;
      break;
    case 75:  // compute capability 9.0
      *value = 9;
      break;
    case 97:  // bytes of shared memory for a CTA
      *value = 227 * 1024;
      break;
    default:
      *value = 0;
  }
  return 0;
}
int cuDeviceTotalMem_v2(std::size_t* bytes, int) { return *bytes = std::size_t{139} << 30, 0; }
int cuDevicePrimaryCtxRetain(Handle* context, int) { return *context = some(1), 0; }
int cuCtxGetCurrent(Handle* context) { return *context = contexts.empty() ? nullptr : contexts.back(), 0; }
int cuCtxSetCurrent(Handle context) { return contexts.assign(1, context), 0; }
int cuCtxPushCurrent_v2(Handle context) { return contexts.push_back(context), 0; }
int cuCtxPopCurrent_v2(Handle* context) {
  *context = contexts.back();
  contexts.pop_back();
  return 0;
}

int cuMemAlloc_v2(DevicePtr* memory, std::size_t bytes) { return allocate(memory, bytes); }
int cuMemFree_v2(DevicePtr memory) { return release(memory); }
int cuMemAllocAsync(DevicePtr* memory, std::size_t bytes, Handle) { return allocate(memory, bytes); }
int cuMemFreeAsync(DevicePtr memory, Handle) { return release(memory); }
int cuDeviceGetDefaultMemPool(Handle* pool, int) { return *pool = some(2), 0; }
int cuMemPoolGetAttribute(Handle, int, void* value) { return *static_cast<std::uint64_t*>(value) = 1, 0; }
int cuMemPoolSetAttribute(Handle, int, void*) { return 0; }
int cuMemcpyHtoDAsync_v2(DevicePtr to, const void* from, std::size_t bytes, Handle) {
  std::memcpy(reinterpret_cast<void*>(to), from, bytes);
  return 0;
}
int cuMemcpyDtoHAsync_v2(void* to, DevicePtr from, std::size_t bytes, Handle) {
  std::memcpy(to, reinterpret_cast<const void*>(from), bytes);
  return 0;
}
int cuMemcpyDtoDAsync_v2(DevicePtr to, DevicePtr from, std::size_t bytes, Handle) {
  std::memmove(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), bytes);
  return 0;
}
int cuMemsetD8Async(DevicePtr to, unsigned char value, std::size_t bytes, Handle) {
  std::memset(reinterpret_cast<void*>(to), value, bytes);
  return 0;
}

int cuStreamCreate(Handle* stream, unsigned) { return *stream = some(3), 0; }
int cuStreamSynchronize(Handle) { return 0; }
int cuStreamIsCapturing(Handle, int* yes) { return *yes = capturing ? 1 : 0, 0; }
int cuThreadExchangeStreamCaptureMode(int*) { return 0; }
int cuEventCreate(Handle* event, unsigned) { return *event = some(4), 0; }
int cuEventDestroy_v2(Handle) { return 0; }
int cuEventRecord(Handle, Handle) { return 0; }
int cuEventSynchronize(Handle) { return 0; }
int cuEventElapsedTime(float* ms, Handle, Handle) { return *ms = 1.0f, 0; }

int cuModuleLoadData(Handle* module, const void*) { return *module = some(5), 0; }
int cuModuleGetFunction(Handle* function, Handle, const char* name) {
  const std::lock_guard lock(mutex);
  *function = &names.emplace_back(name);
  return 0;
}
int cuFuncSetAttribute(Handle, int, int) { return 0; }
int cuOccupancyMaxActiveBlocksPerMultiprocessor(int* ctas, Handle, int threads, std::size_t shared_bytes) {
  *ctas = std::max(1, std::min(2048 / threads, static_cast<int>(233472 / (shared_bytes + 1024))));
  return 0;
}
int cuOccupancyMaxActiveClusters(int* clusters, Handle, const LaunchConfig*) { return *clusters = 16, 0; }
int cuLaunchKernel(Handle function, unsigned grid, unsigned, unsigned, unsigned threads, unsigned, unsigned,
                   unsigned shared_bytes, Handle, void**, void**) {
  return record(function, grid, threads, shared_bytes), 0;
}
int cuLaunchKernelEx(const LaunchConfig* config, Handle function, void**, void**) {
  return record(function, config->grid[0], config->block[0], config->shared_bytes), 0;
}
int cuTensorMapEncodeTiled(void* map, int, std::uint32_t, void*, const std::uint64_t*, const std::uint64_t*,
                           const std::uint32_t*, const std::uint32_t*, int, int, int, int) {
  return std::memset(map, 0, 128), 0;
}
int cuTensorMapEncodeIm2col(void* map, int, std::uint32_t, void*, const std::uint64_t*, const std::uint64_t*,
                            const int*, const int*, std::uint32_t, std::uint32_t, const std::uint32_t*, int, int, int,
                            int) {
  return std::memset(map, 0, 128), 0;
}

int nvrtcVersion(int* major, int* minor) { return *major = 13, *minor = 0, 0; }
const char* nvrtcGetErrorString(int) { return "of the recording driver"; }
int nvrtcCreateProgram(Handle* program, const char*, const char*, int, const char* const*, const char* const*) {
  return *program = new Program, 0;
}
int nvrtcDestroyProgram(Handle* program) { return delete static_cast<Program*>(*program), 0; }
int nvrtcAddNameExpression(Handle program, const char* name) {
  return static_cast<Program*>(program)->instance = name, 0;
}
int nvrtcCompileProgram(Handle, int, const char* const*) { return 0; }
int nvrtcGetLoweredName(Handle program, const char*, const char** name) {
  return *name = static_cast<Program*>(program)->instance.c_str(), 0;
}
int nvrtcGetProgramLogSize(Handle, std::size_t* bytes) { return *bytes = 1, 0; }
int nvrtcGetProgramLog(Handle, char* log) { return *log = '\0', 0; }
int nvrtcGetCUBINSize(Handle, std::size_t* bytes) { return *bytes = 16, 0; }
int nvrtcGetCUBIN(Handle, char* cubin) { return std::memcpy(cubin, "no machine code", 16), 0; }

}  // extern "C"
