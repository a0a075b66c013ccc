// The CUDA driver, opened with dlopen when first needed. Minimal declarations; no CUDA header at build time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "fretwork/context.h"

namespace fretwork::cuda {

using Handle = void*;  // CUcontext, CUmodule, CUfunction, CUstream, CUevent
using DevicePtr = std::uint64_t;

/// A tensor map as the hardware wants it; passed by value inside a kernel's parameters.
struct alignas(64) TensorMap {
  std::uint64_t opaque[16];
};

/// Swizzle of the box in shared memory.
enum class Swizzle : std::uint32_t { none = 0, b32 = 1, b64 = 2, b128 = 3 };

/// True when libcuda.so.1 opens and reports at least one device. Never throws.
bool available();
/// Why not, in one line, when it is not.
std::string unavailable_reason();
int device_count();

/// What kernels are chosen by. Read once per device.
struct DeviceInfo {
  std::string name;
  int arch = 0;  ///< 10·major + minor, 90 for Hopper
  int multiprocessors = 0;
  int shared_per_block = 0;  ///< the opt-in limit
  std::size_t memory = 0, l2 = 0;
};
const DeviceInfo& device_info(int device);

/// The architecture that kernels are chosen by on this device: "sm_90a", "sm_80", …; FRETWORK_ARCH overrides.
std::string kernel_arch(int device);
/// Its number: 90, 80, 75. 0 where it has none.
int arch_number(const std::string& arch);
int arch_number(int device);
/// Shared memory that a block may ask for, on a device whose kernels are chosen by that architecture.
int shared_limit(int device);
/// What they are compiled for: the same, except that machine code of an older generation does not run on this one, so
/// FRETWORK_ARCH=sm_80 on Hopper gives "sm_90".
std::string binary_arch(int device);

/// Makes the device's primary context current for a scope, as the runtime API and the frameworks do.
class DeviceScope {
 public:
  explicit DeviceScope(int device);
  ~DeviceScope();
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;

 private:
  bool changed_ = false;
};

/// A tiled tensor map of up to 5 dimensions, innermost first. `strides` are in bytes, one fewer than `sizes`.
/// `element_bytes` is 1, 2 or 4 (the map only moves bits). Outside the tensor zeros are read and nothing is written.
TensorMap make_tensor_map(const void* data, int element_bytes, std::span<const std::uint64_t> sizes,
                          std::span<const std::uint64_t> strides, std::span<const std::uint32_t> box, Swizzle swizzle);

/// A map over images (C, W, H, N) of 16-bit channels that gathers columns of `pixels` pixels, `channels` of each.
/// `strides` in bytes, of W, H and N; `first`, `mul` and `count` are those of base pixels along W and H: the first
/// one's place, the distance to the next, how many there are.
struct PixelMap {
  const void* data;
  std::array<std::uint64_t, 4> sizes;
  std::array<std::uint64_t, 3> strides;
  std::array<std::int64_t, 2> first, mul, count;
};
/// Whether the copy engine can have such a map.
bool can_map_pixels(const PixelMap& map);
TensorMap make_pixel_map(const PixelMap& map, std::uint32_t channels, std::uint32_t pixels, Swizzle swizzle);

/// Device memory for the life of the object (plans). Uploads on a private stream, also while the caller captures.
class DeviceBuffer {
 public:
  DeviceBuffer() = default;
  /// Holds what `host` does, or anything when that is null.
  DeviceBuffer(int device, const void* host, std::size_t bytes);
  ~DeviceBuffer();
  DeviceBuffer(DeviceBuffer&& other) noexcept;
  DeviceBuffer& operator=(DeviceBuffer&& other) noexcept;
  void* data() const { return data_; }
  std::size_t bytes() const { return bytes_; }

 private:
  int device_ = 0;
  void* data_ = nullptr;
  std::size_t bytes_ = 0;
};

/// The six below work on the current device (DeviceScope).
void copy_to_device(void* device, const void* host, std::size_t bytes, Handle stream);
void copy_to_host(void* host, const void* device, std::size_t bytes, Handle stream);
void copy_on_device(void* to, const void* from, std::size_t bytes, Handle stream);
void fill_zero(void* device, std::size_t bytes, Handle stream);
void fill_ones(void* device, std::size_t bytes, Handle stream);  ///< every bit
void synchronize(Handle stream);
/// True while the stream is being captured into a graph: plans used then must outlive the graph.
bool is_capturing(Handle stream);

/// Milliseconds between two points of a stream.
class Timer {
 public:
  Timer();
  ~Timer();
  Timer(const Timer&) = delete;
  Timer& operator=(const Timer&) = delete;
  void start(Handle stream);
  float stop(Handle stream);  ///< waits for the stream

 private:
  Handle begin_ = nullptr, end_ = nullptr;
};

}  // namespace fretwork::cuda
