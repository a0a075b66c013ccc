// Kernels on demand: (source, instantiation, architecture) → memory, else the disk cache, else NVRTC.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/cuda_driver.h"

namespace fretwork {

namespace cuda {
struct LaunchAttribute;
}

/// One kernel: the embedded file that defines it and the name expression that instantiates it, such as
/// {"ops/block_matmul/cuda/portable.cuh", "fretwork::spmm<fretwork::f16, 128, 128>"}.
struct KernelSpec {
  static constexpr int kBySize = -1;
  std::string source;  ///< or a whole program, generated: anything with a line break is one
  std::string instance;
  int dynamic_shared = 0;  ///< bytes that a launch asks for, or kBySize: the problem decides; for the listing alone
  bool operator==(const KernelSpec&) const = default;
};

/// The type that stands for `dtype` in a kernel's template arguments.
const char* device_type(DType dtype);

/// What the compiler says of a kernel.
struct KernelReport {
  int registers = 0, spill_bytes = 0, stack_bytes = 0, static_shared_bytes = 0;
  double compile_ms = 0;
  std::string log;
};

/// Machine code, not loaded. Compiles without a GPU.
struct CompiledKernel {
  std::string cubin;
  std::string symbol;  ///< the lowered name
  KernelReport report;
  bool from_disk = false;
};

/// From the disk cache, else compiled and stored. Throws Error with the kernel's name, options and NVRTC's log when it
/// does not compile, or where to get NVRTC when there is none. Threads and processes that want the same kernel at once
/// compile it once per process at most. `chosen` is the architecture that the kernel was chosen by, where that is an
/// older one: it then uses no newer instruction.
CompiledKernel compile_kernel(const KernelSpec& spec, const std::string& arch, const std::string& chosen = "");

/// A kernel loaded on a device. Lives as long as the process.
class Kernel {
 public:
  /// Loads it; get_kernel does so once per device.
  Kernel(const KernelSpec& spec, const CompiledKernel& compiled, int device);
  Kernel(const Kernel&) = delete;
  Kernel& operator=(const Kernel&) = delete;

  /// One parameter block, passed by value (const __grid_constant__ Params). Asynchronous on `stream`.
  void launch(std::int64_t grid, int threads, int shared_bytes, const void* params, cuda::Handle stream) const;
  /// Same with clusters of CTAs; `behind` as launch_behind has it.
  void launch_clusters(std::int64_t grid, int cluster, int threads, int shared_bytes, const void* params,
                       cuda::Handle stream, bool behind = false) const;
  /// Same, but the kernel may start while the one before it on the stream ends: before it reads what that one wrote, it
  /// waits itself (wait_for_earlier_kernel). sm_90 and later. Plain where an old driver captures the stream.
  void launch_behind(std::int64_t grid, int threads, int shared_bytes, const void* params, cuda::Handle stream) const;
  /// One with arguments of its own, each behind a pointer and of a size, in up to three dimensions. Throws Error where
  /// the kernel has others, if the driver can say so.
  void launch_arguments(const std::array<unsigned, 3>& grid, const std::array<unsigned, 3>& block, int shared_bytes,
                        std::span<void*> arguments, std::span<const std::size_t> sizes, cuda::Handle stream) const;
  const KernelReport& report() const { return report_; }
  /// Resident CTAs per multiprocessor at these sizes.
  int occupancy(int threads, int shared_bytes) const;
  /// Clusters that run at once on the whole device at these sizes, at least 1: fewer than there are multiprocessors
  /// for, as a cluster stays within a part of the chip. Asked for once.
  int resident_clusters(int cluster, int threads, int shared_bytes) const;

 private:
  void allow_shared(int bytes) const;
  void launch_with(std::span<cuda::LaunchAttribute> attributes, std::int64_t grid, int threads, int shared_bytes,
                   const void* params, cuda::Handle stream) const;
  cuda::Handle function_ = nullptr;
  KernelReport report_;
  std::string name_;
  mutable std::atomic<int> shared_allowed_;  ///< dynamic shared memory that may be asked for so far
  mutable std::mutex clusters_mutex_;
  mutable std::vector<std::array<int, 4>> clusters_;  ///< what was asked for, and the answer
};

/// The kernel for this device; thread-safe; the reference stays valid.
const Kernel& get_kernel(const KernelSpec& spec, int device);

/// Has them all ready, each on a thread of its own: a call that needs several kernels waits for the slowest to compile,
/// not for one after the other. What fails is left for get_kernel to say.
void prepare_kernels(std::span<const KernelSpec> specs, int device);

/// The kernels of an op by numbers below kCount of its own choosing: a call that finds its kernel here builds no names.
template <std::size_t kCount>
class KernelTable {
 public:
  template <typename Spec>
  const Kernel& get(std::size_t which, int device, const Spec& spec) {
    if (static_cast<std::size_t>(device) >= known_.size()) {
      return get_kernel(spec(), device);
    }
    std::atomic<const Kernel*>& place = known_[static_cast<std::size_t>(device)][which];
    const Kernel* found = place.load(std::memory_order_acquire);
    if (found == nullptr) {
      found = &get_kernel(spec(), device);
      place.store(found, std::memory_order_release);
    }
    return *found;
  }

  /// Has those that are not here yet ready at once. Each of `wanted` has a number() and a spec().
  template <typename Wanted>
  void prepare(std::span<const Wanted> wanted, int device) {
    std::vector<KernelSpec> missing;
    for (const Wanted& w : wanted) {
      if (!has(w.number(), device)) {
        missing.push_back(w.spec());
      }
    }
    if (missing.size() > 1) {
      prepare_kernels(missing, device);
    }
  }

 private:
  bool has(std::size_t which, int device) const {
    return static_cast<std::size_t>(device) < known_.size() &&
           known_[static_cast<std::size_t>(device)][which].load(std::memory_order_acquire) != nullptr;
  }
  std::array<std::array<std::atomic<const Kernel*>, kCount>, 16> known_{};
};

/// The embedded device sources, "device/mma.cuh" and so on; generated by the build from the folders' listing.
struct EmbeddedSource {
  const char* name;
  const char* text;
};
const std::vector<EmbeddedSource>& embedded_sources();

/// Every instantiation that an op can ask for on an architecture, so that `fretwork compile` and the tests can make
/// them all. Ops register theirs at namespace scope. Before `least_arch` none of the list is chosen.
struct KernelList {
  using Lister = std::vector<KernelSpec> (*)(const std::string& arch);
  KernelList(const char* op, Lister lister, int least_arch = 80);
};
/// The first that NVRTC compiles for, and that any kernel is for.
inline constexpr int kLeastArch = 75;
struct ListedKernel {
  std::string op;
  KernelSpec spec;
};
std::vector<ListedKernel> all_kernels(const std::string& arch);

/// The folder of compiled kernels.
namespace disk_cache {
struct State {
  std::filesystem::path folder;  ///< empty when there is none to use
  std::int64_t files = 0;
  std::uint64_t bytes = 0, limit = 0;
};
State state();
/// Removes every cached kernel; gives their number.
std::int64_t clear();
}  // namespace disk_cache

}  // namespace fretwork
