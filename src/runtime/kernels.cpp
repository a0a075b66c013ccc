// Compiling, loading and launching kernels; the memory of loaded ones; the ops' lists.
#include "runtime/kernels.h"

#include <algorithm>
#include <charconv>
#include <chrono>
#include <limits>
#include <mutex>
#include <optional>
#include <system_error>
#include <thread>
#include <unordered_map>

#include "core/hash.h"
#include "fretwork/error.h"
#include "runtime/cuda_api.h"
#include "runtime/disk_cache.h"
#include "runtime/nvrtc.h"

namespace fretwork {
namespace {

/// Shared memory a block gets without asking.
constexpr int kSharedByDefault = 48 * 1024;

/// A kernel that was chosen for a GPU before sm_80 uses no instruction of sm_80, whatever it runs on.
bool before_sm80(const std::string& chosen) {
  const int number = cuda::arch_number(chosen);
  return number > 0 && number < 80;
}

std::vector<std::string> options_for(const std::string& arch, const std::string& chosen) {
  std::vector<std::string> options = {"--gpu-architecture=" + arch, "--std=c++20",
                                      "--device-as-default-execution-space", "--ptxas-options=-v"};
  if (before_sm80(chosen)) {
    options.push_back("--define-macro=FRETWORK_BEFORE_SM80");
  }
  return options;
}

/// Throws Error for a GPU that there are no kernels for.
void check_arch(const std::string& arch) {
  if (const int number = cuda::arch_number(arch); number > 0 && number < kLeastArch) {
    throw Error("cuda", "device", "a GPU from sm_75 on (NVRTC 13 compiles for no older one)", arch);
  }
}

std::string join(const std::vector<std::string>& words) {
  std::string line;
  for (const std::string& word : words) {
    line += (line.empty() ? "" : " ") + word;
  }
  return line;
}

/// Of every embedded source: a kernel may include any of them.
const std::string& embedded_digest() {
  static const std::string digest = [] {
    std::string all;
    for (const EmbeddedSource& source : embedded_sources()) {
      all += std::string(source.name) + '\0' + source.text + '\0';
    }
    return hash128(all).hex();
  }();
  return digest;
}

std::string program_of(const KernelSpec& spec) {
  if (spec.source.find('\n') != spec.source.npos) {
    return spec.source;
  }
  const auto& all = embedded_sources();
  if (std::none_of(all.begin(), all.end(), [&](const EmbeddedSource& s) { return spec.source == s.name; })) {
    throw Error("compile_kernel", "source", "an embedded device source", "'" + spec.source + "'");
  }
  return "#include \"" + spec.source + "\"\n";
}

std::string key_of(const std::string& program, const std::string& instance, const std::vector<std::string>& options) {
  return "nvrtc " + nvrtc::library().build + "\nheaders " + embedded_digest() + "\noptions " + join(options) +
         "\ninstance " + instance + "\nprogram\n" + program;
}

/// The number before `unit` in a line of ptxas' report, 0 when there is none.
int number_before(std::string_view text, std::string_view unit) {
  const std::size_t at = text.find(unit);
  if (at == text.npos) {
    return 0;
  }
  std::size_t begin = at;
  while (begin > 0 && text[begin - 1] >= '0' && text[begin - 1] <= '9') {
    --begin;
  }
  int number = 0;
  std::from_chars(text.data() + begin, text.data() + at, number);
  return number;
}

/// Reads what ptxas says of the entry `symbol`: the part of the log from its announcement to the next one's.
void read_report(const std::string& symbol, KernelReport& report) {
  constexpr std::string_view kEntry = "Compiling entry function '";
  std::string_view part = report.log;
  const std::size_t begin = part.find(std::string(kEntry) + symbol + "'");
  if (begin == part.npos) {
    return;
  }
  part = part.substr(begin);
  part = part.substr(0, part.find(kEntry, kEntry.size()));
  report.registers = number_before(part, " registers");
  report.spill_bytes = number_before(part, " bytes spill stores");
  report.stack_bytes = number_before(part, " bytes stack frame");
  report.static_shared_bytes = number_before(part, " bytes smem");
}

CompiledKernel compile_now(const KernelSpec& spec, const std::string& program,
                           const std::vector<std::string>& options) {
  const auto begin = std::chrono::steady_clock::now();
  nvrtc::Result result = nvrtc::compile(program, spec.instance, options, embedded_sources());
  if (!result.ok && result.log.find("requires .target sm_80") != std::string::npos) {
    throw Error("compile_kernel", spec.instance, "a GPU from sm_80 on, whose tensor cores or copies it needs",
                options.front().substr(options.front().find("sm_")) + " (docs/kernels.md says what runs there)");
  }
  if (!result.ok) {
    throw Error("compile_kernel", spec.instance, "a kernel that compiles with " + join(options),
                "NVRTC's log:\n" + result.log);
  }
  CompiledKernel kernel;
  kernel.cubin = std::move(result.cubin);
  kernel.symbol = std::move(result.symbol);
  kernel.report.log = std::move(result.log);
  kernel.report.compile_ms =
      std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count();
  read_report(kernel.symbol, kernel.report);
  return kernel;
}

/// Makes things once per key: different keys at the same time, threads with the same key wait for the first.
template <typename Thing>
class Once {
 public:
  struct Slot {
    std::mutex mutex;
    std::optional<Thing> thing;
  };

  std::shared_ptr<Slot> slot(const std::string& key) {
    const std::lock_guard lock(mutex_);
    auto& place = slots_[key];
    if (place == nullptr) {
      place = std::make_shared<Slot>();
    }
    return place;
  }

  /// Those who hold the slot keep it; the next to ask gets a fresh one.
  void forget(const std::string& key) {
    const std::lock_guard lock(mutex_);
    slots_.erase(key);
  }

 private:
  std::mutex mutex_;
  std::unordered_map<std::string, std::shared_ptr<Slot>> slots_;
};

struct Listed {
  std::string op;
  KernelList::Lister lister;
  int least_arch;
};
using Listers = std::vector<Listed>;

Listers& listers() {
  static Listers all;
  return all;
}

}  // namespace

const char* device_type(DType dtype) {
  switch (dtype) {
    case DType::f64:
      return "double";
    case DType::f32:
      return "float";
    case DType::f16:
      return "fretwork::f16";
    case DType::bf16:
      return "fretwork::bf16";
    case DType::f8_e4m3:
      return "fretwork::f8_e4m3";
    case DType::f8_e5m2:
      return "fretwork::f8_e5m2";
    case DType::i8:
      return "fretwork::i8";
    case DType::boolean:
      return "bool";
    case DType::i16:
      return "short";
    case DType::i32:
      return "int";
    case DType::u8:
      return "fretwork::u8";
    case DType::u16:
      return "fretwork::u16";
    case DType::u32:
      return "fretwork::u32";
  }
  throw Error("kernel", "dtype", "one that device code has", name_of(dtype));
}

CompiledKernel compile_kernel(const KernelSpec& spec, const std::string& arch, const std::string& chosen) {
  check_arch(chosen.empty() ? arch : chosen);
  const std::string program = program_of(spec);
  const std::vector<std::string> options = options_for(arch, chosen.empty() ? arch : chosen);
  const std::string key = key_of(program, spec.instance, options);
  static Once<CompiledKernel>& at_work = *std::make_unique<Once<CompiledKernel>>().release();
  const auto slot = at_work.slot(key);
  const std::lock_guard lock(slot->mutex);
  if (!slot->thing) {
    slot->thing = disk_cache::load(key);
    if (!slot->thing) {
      slot->thing = compile_now(spec, program, options);
      disk_cache::store(key, *slot->thing);
    }
    at_work.forget(key);
  }
  return *slot->thing;
}

Kernel::Kernel(const KernelSpec& spec, const CompiledKernel& compiled, int device)
    : report_(compiled.report),
      name_(spec.instance),
      shared_allowed_(kSharedByDefault - compiled.report.static_shared_bytes) {
  const cuda::DeviceScope scope(device);
  const cuda::RelaxedCapture relaxed;
  cuda::Handle module = nullptr;
  if (const int code = cuda::driver().module_load.attempt(&module, compiled.cubin.data()); code != 0) {
    cuda::fail(("cuModuleLoadData of " + name_ + ", compiled by " + nvrtc::library().path).c_str(), code);
  }
  cuda::driver().module_function(&function_, module, compiled.symbol.c_str());
}

void Kernel::allow_shared(int bytes) const {
  constexpr int kMaxDynamicShared = 8;  // CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
  if (bytes <= shared_allowed_.load(std::memory_order_acquire)) [[likely]] {
    return;
  }
  // Under a lock, so that of two threads the larger wish wins.
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  if (bytes > shared_allowed_.load(std::memory_order_relaxed)) {
    cuda::driver().function_set(function_, kMaxDynamicShared, bytes);
    shared_allowed_.store(bytes, std::memory_order_release);
  }
}

void Kernel::launch(std::int64_t grid, int threads, int shared_bytes, const void* params, cuda::Handle stream) const {
  launch_with({}, grid, threads, shared_bytes, params, stream);
}

namespace {
constexpr std::uint32_t kClusterDimension = 4;           // CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
constexpr std::uint32_t kProgrammaticSerialization = 6;  // CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION

/// Graphs know such launches since CUDA 12.3.
bool may_start_early(cuda::Handle stream) {
  static const bool in_graphs = [] {
    int version = 0;
    return cuda::driver().version.attempt(&version) == 0 && version >= 12030;
  }();
  return in_graphs || !cuda::is_capturing(stream);
}
}  // namespace

void Kernel::launch_clusters(std::int64_t grid, int cluster, int threads, int shared_bytes, const void* params,
                             cuda::Handle stream, bool behind) const {
  cuda::LaunchAttribute attributes[2];
  std::size_t count = 0;
  if (cluster > 1) {
    attributes[count++] = {kClusterDimension, 0, static_cast<std::uint32_t>(cluster), 1, 1, {}};
  }
  if (behind && may_start_early(stream)) {
    attributes[count++] = {kProgrammaticSerialization, 0, 1, 0, 0, {}};
  }
  launch_with({attributes, count}, grid, threads, shared_bytes, params, stream);
}

void Kernel::launch_behind(std::int64_t grid, int threads, int shared_bytes, const void* params,
                           cuda::Handle stream) const {
  launch_clusters(grid, 1, threads, shared_bytes, params, stream, true);
}

void Kernel::launch_with(std::span<cuda::LaunchAttribute> attributes, std::int64_t grid, int threads, int shared_bytes,
                         const void* params, cuda::Handle stream) const {
  if (grid == 0) {
    return;
  }
  if (grid < 0 || grid > std::numeric_limits<std::int32_t>::max()) {
    throw Error(name_, "grid", "at most 2147483647 blocks", std::to_string(grid));
  }
  allow_shared(shared_bytes);
  const auto blocks = static_cast<unsigned>(grid);
  const auto width = static_cast<unsigned>(threads);
  const auto shared = static_cast<unsigned>(shared_bytes);
  void* arguments[] = {const_cast<void*>(params)};
  if (attributes.empty()) {
    cuda::driver().launch(function_, blocks, 1, 1, width, 1, 1, shared, stream, arguments, nullptr);
    return;
  }
  const cuda::LaunchConfig config{{blocks, 1, 1}, {width, 1, 1},     shared,
                                  stream,         attributes.data(), static_cast<std::uint32_t>(attributes.size())};
  cuda::driver().launch_config(&config, function_, arguments, nullptr);
}

void Kernel::launch_arguments(const std::array<unsigned, 3>& grid, const std::array<unsigned, 3>& block,
                              int shared_bytes, std::span<void*> arguments, std::span<const std::size_t> sizes,
                              cuda::Handle stream) const {
  constexpr int kNoSuch = 1;  // CUDA_ERROR_INVALID_VALUE
  for (std::size_t n = 0; n <= arguments.size(); ++n) {
    std::size_t offset = 0, size = 0;
    const int code = cuda::driver().parameter.attempt(function_, n, &offset, &size);
    if ((code == 0) != (n < arguments.size()) && (code == 0 || code == kNoSuch)) {
      throw Error(name_, "arguments", code == 0 ? "more" : "at most " + std::to_string(n),
                  std::to_string(arguments.size()));
    }
    if (code == 0 && size != sizes[n]) {
      throw Error(name_, "argument " + std::to_string(n), std::to_string(size) + " bytes", std::to_string(sizes[n]));
    }
  }
  allow_shared(shared_bytes);
  cuda::driver().launch(function_, grid[0], grid[1], grid[2], block[0], block[1], block[2],
                        static_cast<unsigned>(shared_bytes), stream, arguments.data(), nullptr);
}

int Kernel::occupancy(int threads, int shared_bytes) const {
  allow_shared(shared_bytes);
  int blocks = 0;
  cuda::driver().occupancy(&blocks, function_, threads, static_cast<std::size_t>(shared_bytes));
  return blocks;
}

int Kernel::resident_clusters(int cluster, int threads, int shared_bytes) const {
  const std::lock_guard lock(clusters_mutex_);
  for (const auto& [size, width, shared, answer] : clusters_) {
    if (size == cluster && width == threads && shared == shared_bytes) {
      return answer;
    }
  }
  allow_shared(shared_bytes);
  cuda::LaunchAttribute attribute{kClusterDimension, 0, static_cast<std::uint32_t>(cluster), 1, 1, {}};
  const cuda::LaunchConfig config{{static_cast<unsigned>(cluster), 1, 1},
                                  {static_cast<unsigned>(threads), 1, 1},
                                  static_cast<unsigned>(shared_bytes),
                                  nullptr,
                                  &attribute,
                                  1};
  int clusters = 0;
  cuda::driver().active_clusters(&clusters, function_, &config);
  clusters_.push_back({cluster, threads, shared_bytes, std::max(1, clusters)});
  return clusters_.back()[3];
}

const Kernel& get_kernel(const KernelSpec& spec, int device) {
  const std::string arch = cuda::kernel_arch(device);
  // Never destroyed: modules go with the process.
  static Once<Kernel>& loaded = *std::make_unique<Once<Kernel>>().release();
  const auto slot = loaded.slot(std::to_string(device) + " " + arch + " " + spec.instance + " " + spec.source);
  const std::lock_guard lock(slot->mutex);
  if (!slot->thing) {
    slot->thing.emplace(spec, compile_kernel(spec, cuda::binary_arch(device), arch), device);
  }
  return *slot->thing;
}

void prepare_kernels(std::span<const KernelSpec> specs, int device) {
  const auto try_one = [device](const KernelSpec& spec) {
    try {
      get_kernel(spec, device);
    } catch (const std::exception&) {
      // It fails again for the one who needs it, and says why.
    }
  };
  std::vector<std::jthread> others;
  for (const KernelSpec& spec : specs.subspan(std::min<std::size_t>(1, specs.size()))) {
    try {
      others.emplace_back(try_one, spec);
    } catch (const std::system_error&) {
      break;  // no more threads: the rest will be compiled when it is asked for
    }
  }
  if (!specs.empty()) {
    try_one(specs.front());
  }
}

KernelList::KernelList(const char* op, Lister lister, int least_arch) { listers().push_back({op, lister, least_arch}); }

std::vector<ListedKernel> all_kernels(const std::string& arch) {
  std::vector<ListedKernel> all;
  for (const auto& [op, lister, least_arch] : listers()) {
    if (cuda::arch_number(arch) < least_arch) {
      continue;
    }
    for (KernelSpec& spec : lister(arch)) {
      all.push_back({op, std::move(spec)});
    }
  }
  return all;
}

}  // namespace fretwork
