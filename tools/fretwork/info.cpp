// `fretwork info`: what this machine has and what the library will use of it.
#include <fmt/core.h>
#include <unistd.h>

#include <algorithm>
#include <memory>
#include <string_view>
#include <utility>
#include <vector>

#include "commands.h"
#include "fretwork/error.h"
#include "fretwork/executor_tbb.h"
#include "machine.h"
#include "page.h"
#include "runtime/kernels.h"
#include "runtime/nvrtc.h"
#include "runtime/tuned.h"
#include "terminal.h"

namespace fretwork::cli {
namespace {

/// The settings that change what the library does, as they stand.
std::vector<std::string> settings() {
  std::vector<std::string> found;
  for (char** variable = environ; *variable != nullptr; ++variable) {
    const std::string_view text(*variable);
    if (text.starts_with("FRETWORK_") || text.starts_with("CUDA_VISIBLE_DEVICES=") || text.starts_with("NO_COLOR=")) {
      found.emplace_back(text);
    }
  }
  std::sort(found.begin(), found.end());
  return found;
}

Json describe_cuda() {
  if (!cuda::available()) {
    return {{"available", false}, {"reason", cuda::unavailable_reason()}};
  }
  Json devices = Json::array();
  for (int n = 0; n < cuda::device_count(); ++n) {
    const cuda::DeviceInfo& info = cuda::device_info(n);
    devices.push_back({{"name", info.name},
                       {"kernels", cuda::kernel_arch(n)},
                       {"multiprocessors", info.multiprocessors},
                       {"memory", info.memory},
                       {"l2", info.l2}});
  }
  return {{"available", true}, {"devices", devices}};
}

Json describe_nvrtc() {
  const nvrtc::Library& library = nvrtc::library();
  try {
    if (!library.path.empty()) {
      return {{"available", true}, {"version", nvrtc::version()}, {"path", library.path}};
    }
  } catch (const Error& error) {  // it is there and does not open
    return {{"available", false}, {"reason", error.what()}};
  }
  return {{"available", false}, {"reason", library.reason}};
}

/// Of `fretwork tune`, as ops look them up.
std::vector<std::string> tables() {
  std::vector<std::string> names;
  for (const TunedSource& source : tuned_sources()) {
    names.push_back(source.name);
  }
  return names;
}

Json describe() {
  const disk_cache::State cache = disk_cache::state();
  return {{"version", FRETWORK_VERSION},
          {"cpu", {{"model", device_name({})}, {"threads", TbbExecutor().concurrency()}, {"simd", simd_target()}}},
          {"cuda", describe_cuda()},
          {"nvrtc", describe_nvrtc()},
          {"cache",
           {{"folder", cache.folder.string()}, {"files", cache.files}, {"bytes", cache.bytes}, {"limit", cache.limit}}},
          {"tables", tables()},
          {"environment", settings()}};
}

void print(const Json& info) {
  const auto line = [](std::string_view name, const std::string& value) { fmt::print("{:<10}{}\n", name, value); };
  const auto text = [](const Json& value) { return value.get<std::string>(); };
  const auto size = [](const Json& value) { return bytes_text(value.get<double>()); };
  line("fretwork", text(info["version"]));
  const Json& cpu = info["cpu"];
  line("CPU", fmt::format("{}, {} threads, {}", text(cpu["model"]), cpu["threads"].get<int>(), text(cpu["simd"])));
  if (info["cuda"]["available"].get<bool>()) {
    int n = 0;
    for (const Json& device : info["cuda"]["devices"]) {
      line(
          fmt::format("cuda:{}", n++),
          fmt::format("{}, {}, {} multiprocessors, L2 {}, kernels for {}", text(device["name"]), size(device["memory"]),
                      device["multiprocessors"].get<int>(), size(device["l2"]), text(device["kernels"])));
    }
  } else {
    line("CUDA", "not available: " + text(info["cuda"]["reason"]));
  }
  const Json& compiler = info["nvrtc"];
  line("NVRTC", compiler["available"].get<bool>()
                    ? fmt::format("{}, {}", text(compiler["version"]), text(compiler["path"]))
                    : fmt::format("not found: {}; pip install fretwork[cuda] brings it, or FRETWORK_NVRTC names it",
                                  text(compiler["reason"])));
  const Json& cache = info["cache"];
  const std::string folder = text(cache["folder"]);
  line("cache", folder.empty() ? "none: compiled kernels are not kept"
                               : fmt::format("{}: {} kernels, {} of at most {}", folder, cache["files"].get<int>(),
                                             size(cache["bytes"]), size(cache["limit"])));
  for (const auto& [title, list] : {std::pair("tables", "tables"), {"settings", "environment"}}) {
    std::string_view name = title;
    for (const Json& one : info[list]) {
      line(std::exchange(name, ""), text(one));
    }
  }
}

}  // namespace

void add_info(CLI::App& app) {
  const auto json = std::make_shared<bool>(false);
  CLI::App* const command = app.add_subcommand("info", "This machine, what is available, and the cache");
  command->add_flag("--json", *json, "As JSON");
  command->footer(
      "Settings:\n"
      "  FRETWORK_CACHE_DIR    where compiled kernels are kept\n"
      "  FRETWORK_CACHE_LIMIT  MiB of them to keep (512)\n"
      "  FRETWORK_TUNE_DIR     where tables of `fretwork tune` are kept\n"
      "  FRETWORK_NVRTC        the NVRTC library to use, or its folder\n"
      "  FRETWORK_ARCH         compile for this architecture (sm_80: the portable kernels, also on Hopper)\n"
      "Example:\n"
      "  fretwork info --json | jq .cpu");
  command->callback([json] {
    const Json info = describe();
    // A folder's name may be any bytes; JSON's are UTF-8.
    *json ? fmt::print("{}\n", info.dump(2, ' ', false, Json::error_handler_t::replace)) : print(info);
  });
}

}  // namespace fretwork::cli
