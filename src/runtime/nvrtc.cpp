// The search for libnvrtc, and one compilation.
#include "runtime/nvrtc.h"

#include <dlfcn.h>
#include <link.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>

#include "core/hash.h"
#include "fretwork/error.h"

namespace fretwork::nvrtc {
namespace {

namespace fs = std::filesystem;
using Program = void*;

constexpr const char* kSonames[] = {"libnvrtc.so.13", "libnvrtc.so.12"};
constexpr const char* kPipFolders[] = {"nvidia/cu13/lib", "nvidia/cuda_nvrtc/lib", "nvidia/cu12/lib"};
constexpr int kCompilationFailed = 6;

/// The library's functions.
struct Api {
  int (*version)(int*, int*) = nullptr;
  const char* (*error_string)(int) = nullptr;
  int (*create)(Program*, const char*, const char*, int, const char* const*, const char* const*) = nullptr;
  int (*destroy)(Program*) = nullptr;
  int (*add_name)(Program, const char*) = nullptr;
  int (*compile)(Program, int, const char* const*) = nullptr;
  int (*lowered_name)(Program, const char*, const char**) = nullptr;
  int (*log_size)(Program, std::size_t*) = nullptr;
  int (*log)(Program, char*) = nullptr;
  int (*cubin_size)(Program, std::size_t*) = nullptr;
  int (*cubin)(Program, char*) = nullptr;
};

template <typename Pointer>
bool find(void* handle, const char* name, Pointer& function) {
  function = reinterpret_cast<Pointer>(dlsym(handle, name));
  return function != nullptr;
}

bool find_all(void* handle, Api& api) {
  return find(handle, "nvrtcVersion", api.version) && find(handle, "nvrtcGetErrorString", api.error_string) &&
         find(handle, "nvrtcCreateProgram", api.create) && find(handle, "nvrtcDestroyProgram", api.destroy) &&
         find(handle, "nvrtcAddNameExpression", api.add_name) && find(handle, "nvrtcCompileProgram", api.compile) &&
         find(handle, "nvrtcGetLoweredName", api.lowered_name) &&
         find(handle, "nvrtcGetProgramLogSize", api.log_size) && find(handle, "nvrtcGetProgramLog", api.log) &&
         find(handle, "nvrtcGetCUBINSize", api.cubin_size) && find(handle, "nvrtcGetCUBIN", api.cubin);
}

std::string path_of(void* handle) {
  link_map* map = nullptr;
  return dlinfo(handle, RTLD_DI_LINKMAP, &map) == 0 && map->l_name != nullptr ? map->l_name : "";
}

/// Tries places in order; the first that has the file is taken.
class Search {
 public:
  Library library;

  Search() {
    if (const char* set = std::getenv("FRETWORK_NVRTC"); set != nullptr && *set != '\0') {
      // A setting that does not work is an error, not a hint: no other place is tried.
      if (!in_folder(set) && !take(set)) {
        library.reason = std::string("none at FRETWORK_NVRTC=") + set;
      }
    } else if (!beside_this_library() && !loaded() && !beside_torch() && !loader_path() && !cuda_folders()) {
      library.reason = "none in the pip package nvidia-cuda-nvrtc, torch, the loader's path or /usr/local/cuda";
    }
  }

 private:
  /// Takes a file if it is there. Its first page holds the build id, and its size changes with nearly every build.
  bool take(const fs::path& path) {
    std::ifstream file(path, std::ios::binary);
    std::string page(4096, '\0');
    if (!file.read(page.data(), static_cast<std::streamsize>(page.size()))) {
      return false;
    }
    std::error_code ignored;
    library.path = path;
    library.build = hash128(page).hex() + "-" + std::to_string(fs::file_size(path, ignored));
    return true;
  }

  bool in_folder(const fs::path& folder) {
    return std::any_of(std::begin(kSonames), std::end(kSonames), [&](const char* name) { return take(folder / name); });
  }

  bool in_site_packages(const fs::path& folder) {
    return std::any_of(std::begin(kPipFolders), std::end(kPipFolders),
                       [&](const char* inner) { return in_folder(folder / inner); });
  }

  /// Takes what the loader finds under a plain name.
  bool by_name(int flags) {
    return std::any_of(std::begin(kSonames), std::end(kSonames), [&](const char* name) {
      void* const handle = dlopen(name, flags);
      return handle != nullptr && take(path_of(handle));
    });
  }
  bool loaded() { return by_name(RTLD_NOW | RTLD_NOLOAD); }
  bool loader_path() { return by_name(RTLD_NOW); }

  /// The wheel puts this library a level or more below site-packages.
  bool beside_this_library() {
    Dl_info info{};
    if (dladdr(reinterpret_cast<const void*>(&nvrtc::library), &info) == 0 || info.dli_fname == nullptr) {
      return false;
    }
    std::error_code ignored;
    fs::path folder = fs::weakly_canonical(info.dli_fname, ignored).parent_path();
    for (int level = 0; level < 4 && folder.has_relative_path(); ++level, folder = folder.parent_path()) {
      if (in_site_packages(folder)) {
        return true;
      }
    }
    return false;
  }

  /// torch lies in site-packages/torch/lib.
  bool beside_torch() {
    void* const torch = dlopen("libtorch_cpu.so", RTLD_NOW | RTLD_NOLOAD);
    if (torch == nullptr) {
      return false;
    }
    const fs::path folder = fs::path(path_of(torch)).parent_path();
    return in_folder(folder) || in_site_packages(folder.parent_path().parent_path());
  }

  bool cuda_folders() {
    std::vector<fs::path> roots;
    for (const char* variable : {"CUDA_HOME", "CUDA_PATH"}) {
      if (const char* root = std::getenv(variable); root != nullptr && *root != '\0') {
        roots.emplace_back(root);
      }
    }
    roots.emplace_back("/usr/local/cuda");
    return std::any_of(roots.begin(), roots.end(), [&](const fs::path& root) {
      return in_folder(root / "lib64") || in_folder(root / "targets/x86_64-linux/lib") ||
             in_folder(root / "targets/sbsa-linux/lib");
    });
  }
};

/// NVRTC opens its builtins by name and does not look beside itself, so they must be there already.
void open_builtins(const fs::path& folder) {
  std::error_code ignored;
  for (const auto& entry : fs::directory_iterator(folder, ignored)) {
    if (entry.path().filename().string().starts_with("libnvrtc-builtins.so")) {
      dlopen(entry.path().c_str(), RTLD_NOW | RTLD_GLOBAL);
    }
  }
}

Api open_library() {
  const Library& found = library();
  const auto need = [](const std::string& got) {
    return Error("nvrtc", "library", "libnvrtc.so.13 or .12: pip install nvidia-cuda-nvrtc, or set FRETWORK_NVRTC",
                 got);
  };
  if (found.path.empty()) {
    throw need(found.reason);
  }
  open_builtins(fs::path(found.path).parent_path());
  void* const handle = dlopen(found.path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    throw need(dlerror());
  }
  Api api;
  if (!find_all(handle, api)) {
    throw need(found.path + ", which has not the functions of NVRTC");
  }
  return api;
}

const Api& ready_api() {
  static const Api api = open_library();
  return api;
}

void check(const Api& api, const char* call, int code) {
  if (code != 0) {
    throw Error("nvrtc", call, "success", api.error_string(code));
  }
}

/// Text of a size that the library tells first; the terminating zero, where it counts one, stays out.
std::string read_text(Program program, int (*size)(Program, std::size_t*), int (*read)(Program, char*)) {
  std::size_t bytes = 0;
  std::string text;
  if (size(program, &bytes) == 0) {
    text.resize(bytes);
    read(program, text.data());
  }
  return text;
}

}  // namespace

const Library& library() {
  static const Search search;
  return search.library;
}

std::string version() {
  const Api& api = ready_api();
  int major = 0, minor = 0;
  check(api, "nvrtcVersion", api.version(&major, &minor));
  return std::to_string(major) + "." + std::to_string(minor);
}

Result compile(const std::string& program, const std::string& instance, const std::vector<std::string>& options,
               std::span<const EmbeddedSource> headers) {
  const Api& api = ready_api();
  std::vector<const char*> names, texts, flags;
  for (const EmbeddedSource& header : headers) {
    names.push_back(header.name);
    texts.push_back(header.text);
  }
  for (const std::string& option : options) {
    flags.push_back(option.c_str());
  }
  Program handle = nullptr;
  check(api, "nvrtcCreateProgram",
        api.create(&handle, program.c_str(), "kernel.cu", static_cast<int>(names.size()), texts.data(), names.data()));
  const auto destroy = [&api](Program* p) { api.destroy(p); };
  const std::unique_ptr<Program, decltype(destroy)> owner(&handle, destroy);
  check(api, "nvrtcAddNameExpression", api.add_name(handle, instance.c_str()));

  Result result;
  const int code = api.compile(handle, static_cast<int>(flags.size()), flags.data());
  result.log = read_text(handle, api.log_size, api.log).c_str();
  if (code != 0) {
    if (code != kCompilationFailed) {
      result.log = std::string(api.error_string(code)) + "\n" + result.log;
    }
    return result;
  }
  const char* symbol = nullptr;
  check(api, "nvrtcGetLoweredName", api.lowered_name(handle, instance.c_str(), &symbol));
  result.symbol = symbol;
  result.cubin = read_text(handle, api.cubin_size, api.cubin);
  result.ok = true;
  return result;
}

}  // namespace fretwork::nvrtc
