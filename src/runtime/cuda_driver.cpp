// Devices, contexts, memory and streams through the driver; and Context::cuda.
#include "runtime/cuda_driver.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <charconv>
#include <cstdlib>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "fretwork/error.h"
#include "runtime/alignment.h"
#include "runtime/cuda_api.h"

namespace fretwork::cuda {
namespace {

// Numbers of cuda.h.
constexpr int kMultiprocessorCount = 16, kL2CacheSize = 38, kMajor = 75, kMinor = 76, kSharedPerBlockOptin = 97;
constexpr unsigned kStreamNonBlocking = 1;
constexpr int kPoolReleaseThreshold = 4;
constexpr int kNotInCapture = 0;

/// What lives as long as the process for each device.
struct DeviceState {
  DeviceInfo info;
  int handle = 0;
  std::mutex mutex;                       // of making the two below
  std::atomic<Handle> context = nullptr;  // primary, retained
  std::atomic<Handle> uploads = nullptr;  // private stream of DeviceBuffer
  std::mutex retired_mutex;
  std::vector<DevicePtr> retired;  // of buffers that are gone, not freed yet
  std::size_t retired_bytes = 0;
};

struct Loaded {
  std::unique_ptr<Driver> driver;
  std::string reason;  // why driver is null
};

std::string describe(const Driver& driver, int code) {
  if (code == kMissing) {
    return "a driver without this function: too old";
  }
  const char* name = nullptr;
  const char* text = nullptr;
  driver.error_name.attempt(code, &name);
  driver.error_string.attempt(code, &text);
  return std::string(name != nullptr ? name : "error") + " (" + std::to_string(code) + ")" +
         (text != nullptr ? std::string(": ") + text : "");
}

std::unique_ptr<DeviceState> read_device(const Driver& driver, int index) {
  auto state = std::make_unique<DeviceState>();
  driver.device_get(&state->handle, index);
  const auto attribute = [&](int which) {
    int value = 0;
    driver.device_attribute(&value, which, state->handle);
    return value;
  };
  std::array<char, 256> name{};
  driver.device_name(name.data(), static_cast<int>(name.size()) - 1, state->handle);
  DeviceInfo& info = state->info;
  info.name = name.data();
  info.arch = 10 * attribute(kMajor) + attribute(kMinor);
  info.multiprocessors = attribute(kMultiprocessorCount);
  info.shared_per_block = attribute(kSharedPerBlockOptin);
  info.l2 = static_cast<std::size_t>(attribute(kL2CacheSize));
  driver.device_memory(&info.memory, state->handle);
  return state;
}

Loaded load() {
  Loaded loaded;
  void* const library = dlopen("libcuda.so.1", RTLD_NOW);
  if (library == nullptr) {
    loaded.reason = std::string("no CUDA driver: ") + dlerror();
    return loaded;
  }
  auto driver = std::make_unique<Driver>(Driver{library});
  if (const int code = driver->init.attempt(0); code != 0) {
    loaded.reason = "cuInit: " + describe(*driver, code);
    return loaded;
  }
  int count = 0;
  if (const int code = driver->device_count.attempt(&count); code != 0 || count == 0) {
    loaded.reason = code != 0 ? "cuDeviceGetCount: " + describe(*driver, code) : "a CUDA driver, but no device";
    return loaded;
  }
  loaded.driver = std::move(driver);
  return loaded;
}

Loaded& loaded_driver() {
  // Never destroyed: streams and buffers may be released while the process ends.
  static Loaded& the = *std::make_unique<Loaded>(load()).release();
  return the;
}

/// The devices, read once. Apart from loaded_driver because a failing call here throws through driver().
const std::vector<std::unique_ptr<DeviceState>>& devices() {
  driver();  // throws before the static: GCC's thread sanitizer leaves others waiting when an initialiser throws
  static const std::vector<std::unique_ptr<DeviceState>>& all = [&]() -> const auto& {
    int count = 0;
    driver().device_count(&count);
    std::vector<std::unique_ptr<DeviceState>> read;
    for (int index = 0; index < count; ++index) {
      read.push_back(read_device(driver(), index));
    }
    return *std::make_unique<std::vector<std::unique_ptr<DeviceState>>>(std::move(read)).release();
  }
  ();
  return all;
}

DeviceState& state_of(int device) {
  const auto& all = devices();
  if (device < 0 || static_cast<std::size_t>(device) >= all.size()) {
    throw Error("cuda", "device", "0 to " + std::to_string(all.size() - 1), std::to_string(device));
  }
  return *all[static_cast<std::size_t>(device)];
}

/// Workspace outlives a synchronisation only if the pool may keep it; its owner may have chosen already.
void keep_workspace(const DeviceState& state) {
  Handle pool = nullptr;
  std::uint64_t threshold = 0;
  if (driver().default_pool.attempt(&pool, state.handle) == 0 &&
      driver().pool_get.attempt(pool, kPoolReleaseThreshold, &threshold) == 0 && threshold == 0) {
    threshold = std::uint64_t{1} << 30;
    driver().pool_set.attempt(pool, kPoolReleaseThreshold, &threshold);
  }
}

Handle primary_context(int device) {
  DeviceState& state = state_of(device);
  if (const Handle known = state.context.load(std::memory_order_acquire)) [[likely]] {
    return known;
  }
  const std::lock_guard lock(state.mutex);
  if (state.context == nullptr) {
    Handle context = nullptr;
    driver().primary_retain(&context, state.handle);
    state.context.store(context, std::memory_order_release);
  }
  return state.context;
}

/// The device must be current.
Handle upload_stream(int device) {
  DeviceState& state = state_of(device);
  const std::lock_guard lock(state.mutex);
  if (state.uploads == nullptr) {
    Handle stream = nullptr;
    driver().stream_create(&stream, kStreamNonBlocking);
    state.uploads = stream;
  }
  return state.uploads;
}

/// Frees memory of buffers that are gone, many at once: freeing waits for the device, and plans go one by one while
/// others are made.
void retire(int device, DevicePtr memory, std::size_t bytes) {
  constexpr std::size_t kMostPieces = 256, kMostBytes = std::size_t{32} << 20;
  DeviceState& state = state_of(device);
  std::vector<DevicePtr> now;
  {
    const std::lock_guard lock(state.retired_mutex);
    state.retired.push_back(memory);
    state.retired_bytes += bytes;
    if (state.retired.size() < kMostPieces && state.retired_bytes < kMostBytes) {
      return;
    }
    now.swap(state.retired);
    state.retired_bytes = 0;
  }
  const DeviceScope scope(device);
  const RelaxedCapture relaxed;
  for (const DevicePtr piece : now) {
    driver().mem_free(piece);  // the first waits for kernels that still read any
  }
}

void* pointer(DevicePtr address) { return reinterpret_cast<void*>(address); }
DevicePtr address(const void* pointer) { return reinterpret_cast<DevicePtr>(pointer); }

/// Workspace from the device's default pool, in the order of one stream.
class StreamAllocator final : public Allocator {
 public:
  StreamAllocator(int device, Handle stream) : device_(device), stream_(stream) {}

  void* allocate(std::size_t bytes) override {
    const DeviceScope scope(device_);
    DevicePtr memory = 0;
    driver().mem_alloc_async(&memory, bytes, stream_);
    return pointer(memory);
  }

  void release(void* memory, std::size_t /*bytes*/) noexcept override {
    try {
      const DeviceScope scope(device_);
      driver().mem_free_async(address(memory), stream_);
    } catch (const Error&) {
      // A context that fails here is dead, and its memory with it.
    }
  }

 private:
  int device_;
  Handle stream_;
};

/// One per device and stream for the life of the process: contexts are values and point to it.
Allocator& stream_allocator(int device, Handle stream) {
  struct All {
    std::mutex mutex;
    std::map<std::pair<int, Handle>, StreamAllocator> allocators;
  };
  static All& all = *std::make_unique<All>().release();
  const DeviceState& state = state_of(device);
  const std::lock_guard lock(all.mutex);
  const auto [place, made] = all.allocators.try_emplace({device, stream}, device, stream);
  if (made) {
    const RelaxedCapture relaxed;  // asking about a pool breaks a capture otherwise
    keep_workspace(state);
  }
  return place->second;
}

}  // namespace

void fail(const char* call, int code) { throw Error("cuda", call, "success", describe(*loaded_driver().driver, code)); }

const Driver& driver() {
  const Loaded& loaded = loaded_driver();
  if (loaded.driver == nullptr) [[unlikely]] {
    throw Error("cuda", "device", "an NVIDIA GPU and its driver", loaded.reason);
  }
  return *loaded.driver;
}

bool available() { return loaded_driver().driver != nullptr; }

std::string unavailable_reason() { return loaded_driver().reason; }

int device_count() { return available() ? static_cast<int>(devices().size()) : 0; }

const DeviceInfo& device_info(int device) { return state_of(device).info; }

std::string kernel_arch(int device) {
  if (const char* forced = std::getenv("FRETWORK_ARCH"); forced != nullptr && *forced != '\0') {
    return forced;
  }
  const int arch = device_info(device).arch;
  return "sm_" + std::to_string(arch) + (arch == 90 ? "a" : "");
}

int arch_number(const std::string& arch) {
  int number = 0;
  const char* const digits = arch.data() + std::min(arch.find_first_of("0123456789"), arch.size());
  std::from_chars(digits, arch.data() + arch.size(), number);
  return number;
}

int arch_number(int device) {
  const char* const forced = std::getenv("FRETWORK_ARCH");
  const int number = forced != nullptr && *forced != '\0' ? arch_number(std::string(forced)) : 0;
  return number > 0 ? number : device_info(device).arch;
}

int shared_limit(int device) {
  constexpr int kTuring = 64 * 1024;
  const int limit = device_info(device).shared_per_block;
  return arch_number(device) < 80 ? std::min(limit, kTuring) : limit;
}

std::string binary_arch(int device) {
  const std::string chosen = kernel_arch(device);
  const int arch = device_info(device).arch, wanted = arch_number(chosen);
  return wanted > 0 && wanted / 10 < arch / 10 ? "sm_" + std::to_string(arch) : chosen;
}

DeviceScope::DeviceScope(int device) {
  const Handle wanted = primary_context(device);
  Handle current = nullptr;
  driver().ctx_current(&current);
  if (current != wanted) {
    driver().ctx_push(wanted);
    changed_ = true;
  }
}

DeviceScope::~DeviceScope() {
  if (changed_) {
    Handle popped = nullptr;
    driver().ctx_pop.attempt(&popped);
  }
}

TensorMap make_tensor_map(const void* data, int element_bytes, std::span<const std::uint64_t> sizes,
                          std::span<const std::uint64_t> strides, std::span<const std::uint32_t> box, Swizzle swizzle) {
  constexpr int kUint8 = 0, kUint16 = 1, kUint32 = 2, kNoInterleave = 0, kPromote256 = 3, kFillZeros = 0;
  constexpr std::array<std::uint32_t, 5> kEveryElement = {1, 1, 1, 1, 1};
  if (sizes.empty() || sizes.size() > 5 || strides.size() + 1 != sizes.size() || box.size() != sizes.size() ||
      (element_bytes != 1 && element_bytes != 2 && element_bytes != 4)) {
    throw Error("cuda", "tensor map", "1 to 5 dimensions of 1, 2 or 4 bytes",
                std::to_string(sizes.size()) + " sizes, " + std::to_string(strides.size()) + " strides, " +
                    std::to_string(box.size()) + " box sizes, " + std::to_string(element_bytes) + " bytes");
  }
  TensorMap map;
  const int type = element_bytes == 1 ? kUint8 : element_bytes == 2 ? kUint16 : kUint32;
  driver().tensor_map(&map, type, static_cast<std::uint32_t>(sizes.size()), const_cast<void*>(data), sizes.data(),
                      strides.data(), box.data(), kEveryElement.data(), kNoInterleave, static_cast<int>(swizzle),
                      kPromote256, kFillZeros);
  return map;
}

namespace {

/// What lies between the last base pixel and the end of the image, as the copy engine counts it.
std::int64_t upper_corner(const PixelMap& map, std::size_t axis) {
  return map.first[axis] + (map.count[axis] - 1) * map.mul[axis] + 1 - static_cast<std::int64_t>(map.sizes[axis + 1]);
}

}  // namespace

bool can_map_pixels(const PixelMap& map) {
  const auto corner = [](std::int64_t at) { return at >= -128 && at <= 127; };
  bool can = map.data != nullptr && is_aligned(map.data, 16);
  for (const std::uint64_t size : map.sizes) {
    can = can && size > 0 && size < (1ULL << 31);
  }
  for (const std::uint64_t stride : map.strides) {
    can = can && stride > 0 && stride % 16 == 0 && stride < (1ULL << 40);
  }
  for (std::size_t axis = 0; axis < 2; ++axis) {
    can =
        can && corner(map.first[axis]) && corner(upper_corner(map, axis)) && map.mul[axis] <= 8 && map.count[axis] > 0;
  }
  return can;
}

TensorMap make_pixel_map(const PixelMap& map, std::uint32_t channels, std::uint32_t pixels, Swizzle swizzle) {
  constexpr int kUint16 = 1, kNoInterleave = 0, kPromote256 = 3, kFillZeros = 0;
  const int lower[2] = {static_cast<int>(map.first[0]), static_cast<int>(map.first[1])};
  const int upper[2] = {static_cast<int>(upper_corner(map, 0)), static_cast<int>(upper_corner(map, 1))};
  const std::uint32_t steps[4] = {1, static_cast<std::uint32_t>(map.mul[0]), static_cast<std::uint32_t>(map.mul[1]), 1};
  TensorMap made;
  driver().pixel_map(&made, kUint16, 4, const_cast<void*>(map.data), map.sizes.data(), map.strides.data(), lower, upper,
                     channels, pixels, steps, kNoInterleave, static_cast<int>(swizzle), kPromote256, kFillZeros);
  return made;
}

DeviceBuffer::DeviceBuffer(int device, const void* host, std::size_t bytes) : device_(device), bytes_(bytes) {
  if (bytes == 0) {
    return;
  }
  const DeviceScope scope(device);
  const RelaxedCapture relaxed;
  const Handle stream = upload_stream(device);
  DevicePtr memory = 0;
  driver().mem_alloc(&memory, bytes);
  data_ = pointer(memory);
  if (host == nullptr) {
    return;
  }
  try {
    driver().copy_to_device(memory, host, bytes, stream);
    driver().stream_synchronize(stream);
  } catch (const Error&) {
    driver().mem_free.attempt(memory);
    throw;
  }
}

DeviceBuffer::~DeviceBuffer() {
  if (data_ == nullptr) {
    return;
  }
  try {
    retire(device_, address(data_), bytes_);
  } catch (const Error&) {
    // A context that fails here is dead, and its memory with it.
  }
}

DeviceBuffer::DeviceBuffer(DeviceBuffer&& other) noexcept
    : device_(other.device_), data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}

DeviceBuffer& DeviceBuffer::operator=(DeviceBuffer&& other) noexcept {
  std::swap(device_, other.device_);
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

void copy_to_device(void* device, const void* host, std::size_t bytes, Handle stream) {
  driver().copy_to_device(address(device), host, bytes, stream);
}

void copy_to_host(void* host, const void* device, std::size_t bytes, Handle stream) {
  driver().copy_to_host(host, address(device), bytes, stream);
}

void copy_on_device(void* to, const void* from, std::size_t bytes, Handle stream) {
  driver().copy_on_device(address(to), address(from), bytes, stream);
}

void fill_zero(void* device, std::size_t bytes, Handle stream) { driver().fill(address(device), 0, bytes, stream); }
void fill_ones(void* device, std::size_t bytes, Handle stream) { driver().fill(address(device), 0xff, bytes, stream); }

void synchronize(Handle stream) { driver().stream_synchronize(stream); }

bool is_capturing(Handle stream) {
  if (stream == nullptr) {
    return false;  // the legacy stream cannot be captured, and asking about it while another is breaks that capture
  }
  int status = kNotInCapture;
  driver().stream_is_capturing(stream, &status);
  return status != kNotInCapture;
}

Timer::Timer() {
  driver().event_create(&begin_, 0);
  driver().event_create(&end_, 0);
}

Timer::~Timer() {
  driver().event_destroy.attempt(begin_);
  driver().event_destroy.attempt(end_);
}

void Timer::start(Handle stream) { driver().event_record(begin_, stream); }

float Timer::stop(Handle stream) {
  driver().event_record(end_, stream);
  driver().event_synchronize(end_);
  float milliseconds = 0;
  driver().event_elapsed(&milliseconds, begin_, end_);
  return milliseconds;
}

}  // namespace fretwork::cuda

namespace fretwork {

Context Context::cuda(int device, void* stream) {
  Context context;
  context.allocator = &cuda::stream_allocator(device, stream);
  context.device = {DeviceType::cuda, device};
  context.stream = stream;
  context.executor = &serial_executor();
  return context;
}

int cuda_device_count() { return cuda::device_count(); }

bool has_cuda_context() {
  cuda::Handle current = nullptr;
  return cuda::available() && cuda::driver().ctx_current.attempt(&current) == 0 && current != nullptr;
}

void set_cuda_context(int device) { cuda::driver().ctx_set(cuda::primary_context(device)); }

}  // namespace fretwork
