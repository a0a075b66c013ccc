#include "runtime/cublas.h"

#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <filesystem>
#include <limits>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>

#include "core/hash.h"
#include "fretwork/error.h"
#include "runtime/cuda_api.h"
#include "runtime/cuda_driver.h"
#include "runtime/nvrtc.h"
#include "runtime/plan_cache.h"

namespace fretwork::cublas {
namespace {

using Object = void*;  // a handle, a description, a layout, a preference
constexpr const char* kSonames[] = {"libcublasLt.so.13", "libcublasLt.so.12"};

// Values of the library's enumerations.
constexpr int kF32 = 0, kF16 = 2, kBf16 = 14, kCompute32 = 68;
enum Description { kLeftTransposed = 3, kRightTransposed = 4, kEpilogue = 7, kBias = 8 };
enum Layout { kBatches = 5, kBatchStride = 6 };
enum Preference { kWorkspace = 1, kReductions = 3, kAlignment = 5 };  // alignments of a, b, c and d follow
constexpr std::uint32_t kEpilogueBias = 4, kReduceInFloat = 2;
constexpr std::uint64_t kMostWorkspace = 32 << 20;
constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();

struct Algorithm {
  std::uint64_t opaque[8];
};
struct Found {
  Algorithm algorithm;
  std::size_t workspace;
  int status;
  float waves;
  int reserved[4];
};

/// The library's functions.
struct Api {
  int (*create)(Object*) = nullptr;
  int (*describe)(Object*, int, int) = nullptr;
  int (*set_description)(Object, int, const void*, std::size_t) = nullptr;
  int (*lay_out)(Object*, int, std::uint64_t, std::uint64_t, std::int64_t) = nullptr;
  int (*set_layout)(Object, int, const void*, std::size_t) = nullptr;
  int (*prefer)(Object*) = nullptr;
  int (*set_preference)(Object, int, const void*, std::size_t) = nullptr;
  int (*search)(Object, Object, Object, Object, Object, Object, Object, int, Found*, int*) = nullptr;
  int (*multiply)(Object, Object, const void*, const void*, Object, const void*, Object, const void*, const void*,
                  Object, void*, Object, const Algorithm*, void*, std::size_t, Object) = nullptr;
  int (*forget_description)(Object) = nullptr;
  int (*forget_layout)(Object) = nullptr;
  int (*forget_preference)(Object) = nullptr;
};

/// What another library has opened, what the loader finds, or what lies beside NVRTC.
void* open_library() {
  const char* const set = std::getenv("FRETWORK_CUBLAS");
  if (set != nullptr && std::string_view(set) == "0") {
    return nullptr;
  }
  const std::filesystem::path folder = std::filesystem::path(nvrtc::library().path).parent_path();
  void* handle = nullptr;
  for (const int flags : {RTLD_NOW | RTLD_NOLOAD, RTLD_NOW | RTLD_LOCAL}) {
    for (const char* const name : kSonames) {
      handle = handle != nullptr ? handle : dlopen(name, flags);
    }
  }
  for (const char* const name : kSonames) {
    handle = handle != nullptr ? handle : dlopen((folder / name).c_str(), RTLD_NOW | RTLD_LOCAL);
  }
  return handle;
}

const Api* api() {
  static const Api* const opened = []() -> const Api* {
    void* const handle = open_library();
    auto api = std::make_unique<Api>();
    const auto find = [&](const char* name, auto& function) {
      function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(handle, name));
      return function != nullptr;
    };
    const bool all =
        handle != nullptr && find("cublasLtCreate", api->create) && find("cublasLtMatmulDescCreate", api->describe) &&
        find("cublasLtMatmulDescSetAttribute", api->set_description) &&
        find("cublasLtMatrixLayoutCreate", api->lay_out) && find("cublasLtMatrixLayoutSetAttribute", api->set_layout) &&
        find("cublasLtMatmulPreferenceCreate", api->prefer) &&
        find("cublasLtMatmulPreferenceSetAttribute", api->set_preference) &&
        find("cublasLtMatmulAlgoGetHeuristic", api->search) && find("cublasLtMatmul", api->multiply) &&
        find("cublasLtMatmulDescDestroy", api->forget_description) &&
        find("cublasLtMatrixLayoutDestroy", api->forget_layout) &&
        find("cublasLtMatmulPreferenceDestroy", api->forget_preference);
    return all ? api.release() : nullptr;
  }();
  return opened;
}

void check(const char* call, int status) {
  if (status != 0) {
    throw Error("cublas", call, "success", "status " + std::to_string(status));
  }
}

/// One of the library's objects, forgotten at the end.
class Owned {
 public:
  Owned(Object object, int (*forget)(Object)) : object_(object, forget) {}
  Object get() const { return object_.get(); }

 private:
  std::unique_ptr<void, int (*)(Object)> object_;
};

constexpr std::size_t kDevices = 64;

/// A device's handle; null where the library does not start, as with a driver that is too old for it. The device's
/// primary context is current.
Object handle_of(int device) {
  static std::mutex mutex;
  static std::array<std::optional<Object>, kDevices> handles{};
  const std::lock_guard lock(mutex);
  std::optional<Object>& handle = handles.at(static_cast<std::size_t>(device));
  if (!handle) {
    Object made = nullptr;
    handle = api()->create(&made) == 0 ? made : nullptr;
  }
  return *handle;
}

int type_of(DType dtype) { return dtype == DType::f16 ? kF16 : kBf16; }

/// A product that is ready to run with other addresses.
class Plan {
 public:
  Plan(const Product& p, int device)
      : description_(describe(p)),
        left_(lay_out(p, p.left, p.rows, p.depth)),
        right_(lay_out(p, p.right, p.depth, p.cols)),
        out_(lay_out(p, p.out, p.rows, p.cols)) {
    search(p, device);
  }
  bool found() const { return found_; }

  void run(const Product& p, Context& context) const {
    const Workspace workspace(context, algorithm_.workspace);
    const float one = 1, zero = 0;
    if (p.bias != nullptr) {  // the description holds an address, so that calls with a bias have one of their own
      const Owned description = describe(p);
      multiply(description, p, one, zero, workspace, context);
    } else {
      multiply(description_, p, one, zero, workspace, context);
    }
  }

 private:
  static Owned describe(const Product& p) {
    Object made = nullptr;
    check("cublasLtMatmulDescCreate", api()->describe(&made, kCompute32, kF32));
    Owned description(made, api()->forget_description);
    const auto set = [&](int what, const auto& value) {
      check("cublasLtMatmulDescSetAttribute", api()->set_description(made, what, &value, sizeof(value)));
    };
    set(kLeftTransposed, std::int32_t{p.left.transposed});
    set(kRightTransposed, std::int32_t{p.right.transposed});
    if (p.bias != nullptr) {
      set(kEpilogue, kEpilogueBias);
      set(kBias, p.bias);
    }
    return description;
  }
  static Owned lay_out(const Product& p, const Matrix& m, std::int64_t rows, std::int64_t cols) {
    const auto [stored_rows, stored_cols] = m.transposed ? std::pair{cols, rows} : std::pair{rows, cols};
    Object made = nullptr;
    check("cublasLtMatrixLayoutCreate", api()->lay_out(&made, type_of(p.dtype), static_cast<std::uint64_t>(stored_rows),
                                                       static_cast<std::uint64_t>(stored_cols), m.lead));
    Owned layout(made, api()->forget_layout);
    const auto set = [&](int what, const auto& value) {
      check("cublasLtMatrixLayoutSetAttribute", api()->set_layout(made, what, &value, sizeof(value)));
    };
    set(kBatches, static_cast<std::int32_t>(p.batches));
    set(kBatchStride, m.batch);
    return layout;
  }

  void search(const Product& p, int device) {
    const Object handle = handle_of(device);
    if (handle == nullptr) {
      return;
    }
    Object made = nullptr;
    check("cublasLtMatmulPreferenceCreate", api()->prefer(&made));
    const Owned preference(made, api()->forget_preference);
    const auto set = [&](int what, const auto& value) {
      check("cublasLtMatmulPreferenceSetAttribute", api()->set_preference(made, what, &value, sizeof(value)));
    };
    set(kWorkspace, kMostWorkspace);
    set(kReductions, kReduceInFloat);
    const void* const addresses[] = {p.left.data, p.right.data, p.out.data, p.out.data};
    for (int n = 0; n < 4; ++n) {
      const auto address = reinterpret_cast<std::uintptr_t>(addresses[n]) | 16;
      set(kAlignment + n, static_cast<std::uint32_t>(address & (~address + 1)));
    }
    int count = 0;
    const int status = api()->search(handle, description_.get(), left_.get(), right_.get(), out_.get(), out_.get(),
                                     made, 1, &algorithm_, &count);
    found_ = status == 0 && count > 0 && algorithm_.status == 0;
  }

  void multiply(const Owned& description, const Product& p, const float& one, const float& zero,
                const Workspace& workspace, Context& context) const {
    check("cublasLtMatmul",
          api()->multiply(handle_of(context.device.index), description.get(), &one, p.left.data, left_.get(),
                          p.right.data, right_.get(), &zero, p.out.data, out_.get(), p.out.data, out_.get(),
                          &algorithm_.algorithm, workspace.data(), algorithm_.workspace, context.stream));
  }

  Owned description_, left_, right_, out_;
  Found algorithm_{};
  bool found_ = false;
};

std::shared_ptr<const Plan> plan_of(const Product& p, int device) {
  static PlanCache<Plan>& cache = *std::make_unique<PlanCache<Plan>>(1024).release();
  const auto place = [](const void* data) {
    return static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(data) % 16);
  };
  const std::int64_t key[] = {
      static_cast<std::int64_t>(p.dtype),
      device,
      p.rows,
      p.cols,
      p.depth,
      p.batches,
      p.left.lead,
      p.left.batch,
      p.left.transposed,
      p.right.lead,
      p.right.batch,
      p.right.transposed,
      p.out.lead,
      p.out.batch,
      place(p.left.data) | place(p.right.data) << 4 | place(p.out.data) << 8 | place(p.bias) << 12,
      p.bias != nullptr};
  return cache.get(hash128({reinterpret_cast<const char*>(key), sizeof(key)}), [&] {
    const cuda::RelaxedCapture relaxed;  // the library may allocate and load
    return Plan(p, device);
  });
}

/// Whether stored columns do not overlap.
bool is_apart(const Matrix& m, std::int64_t rows, std::int64_t cols) { return m.lead >= (m.transposed ? cols : rows); }

}  // namespace

bool available() { return api() != nullptr; }

bool fits(const Product& p, int device) {
  const bool type = p.dtype == DType::f16 || p.dtype == DType::bf16;
  const bool sizes = std::max({p.rows, p.cols, p.depth, p.batches, p.left.lead, p.right.lead, p.out.lead}) <= kMost &&
                     std::min({p.rows, p.cols, p.depth, p.batches}) > 0;
  const bool apart = is_apart(p.left, p.rows, p.depth) && is_apart(p.right, p.depth, p.cols) &&
                     is_apart(p.out, p.rows, p.cols) && !p.out.transposed;
  const bool known = device >= 0 && static_cast<std::size_t>(device) < kDevices;
  return type && sizes && apart && known && available() && plan_of(p, device)->found();
}

void run(const Product& p, Context& context) {
  const cuda::RelaxedCapture relaxed;  // the first call of a kernel loads it
  const auto plan = plan_of(p, context.device.index);
  if (!plan->found()) {
    throw Error("cublas", "product", "one that fits", "one without a kernel");
  }
  plan->run(p, context);
}

}  // namespace fretwork::cublas
