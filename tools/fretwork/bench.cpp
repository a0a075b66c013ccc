// `fretwork bench`: its suites, and how each of them begins and ends.
#include "bench.h"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <ctime>
#include <iterator>
#include <utility>

#include "commands.h"
#include "fretwork/error.h"
#include "machine.h"
#include "runtime/cublas.h"
#include "runtime/cuda_driver.h"
#include "runtime/nvrtc.h"
#include "runtime/tuned.h"
#include "terminal.h"

namespace fretwork::cli {
namespace {

/// Without a name, the first GPU if there is one.
Device read_device(const RunOptions& options) {
  const std::string& text = options.device;
  if (text.empty() && cuda::available()) {
    return {DeviceType::cuda, 0};
  }
  if (text.empty() || text == "cpu") {
    return {};
  }
  int index = 0;
  const std::string number = text.starts_with("cuda:") ? text.substr(5) : text == "cuda" ? "0" : "";
  const bool fits = !number.empty() && number.size() < 4 && number.find_first_not_of("0123456789") == number.npos;
  if (!fits) {
    throw UsageError(fmt::format("{}: --device: expected cpu or cuda:N, got {}", options.command, text));
  }
  index = std::stoi(number);
  if (!cuda::available()) {
    throw Error(fmt::format("{}: --device {}: {}", options.command, text, cuda::unavailable_reason()));
  }
  if (index >= cuda::device_count()) {
    throw UsageError(fmt::format("{}: --device: expected cuda:0 to cuda:{}, got {}", options.command,
                                 cuda::device_count() - 1, text));
  }
  return {DeviceType::cuda, index};
}

DType read_dtype(const RunOptions& options, Device device) {
  const std::string& text = options.dtype;
  if (text.empty()) {
    return device.type == DeviceType::cpu ? DType::f32 : DType::f16;
  }
  constexpr std::pair<const char*, DType> kShort[] = {
      {"fp64", DType::f64}, {"fp32", DType::f32}, {"fp16", DType::f16},    {"bf16", DType::bf16},
      {"int8", DType::i8},  {"uint8", DType::u8}, {"fp8", DType::f8_e4m3}, {"fp8_e5m2", DType::f8_e5m2},
  };
  for (const auto& [name, dtype] : kShort) {
    if ((text == name || text == name_of(dtype)) && (options.bytes || size_of(dtype) > 1)) {
      return dtype;
    }
  }
  const char* const expected = options.bytes ? "float64, float32, float16, bfloat16, int8, uint8, float8_e4m3fn or "
                                               "float8_e5m2 (fp64 … bf16, fp8, fp8_e5m2)"
                                             : "float64, float32, float16 or bfloat16 (fp64, fp32, fp16, bf16)";
  throw UsageError(fmt::format("{}: --dtype: expected {}, got {}", options.command, expected, text));
}

const RunOptions& checked(const RunOptions& options) {
  const auto refuse_same = [&](const char* name, const std::string& file, const char* other, const std::string& taken) {
    if (!file.empty() && file == taken) {
      throw UsageError(
          fmt::format("{}: {}: expected another file than {}, got {}", options.command, name, other, file));
    }
  };
  refuse_same("--json", options.json, "--csv", options.csv);
  refuse_same("--html", options.html, "--csv", options.csv);
  refuse_same("--html", options.html, "--json", options.json);
  return options;
}

Error cannot_write(const RunOptions& options, const std::string& name) {
  return Error(fmt::format("{}: {}: cannot be written: {}", options.command, name, std::strerror(errno)));
}

std::ofstream open_file(const RunOptions& options, const std::string& name) {
  std::ofstream file;
  if (!name.empty()) {
    file.open(name);
    if (!file) {
      throw cannot_write(options, name);
    }
  }
  return file;
}

void flush_file(std::ofstream& file, const RunOptions& options, const std::string& name) {
  file.flush();
  if (!file) {
    throw cannot_write(options, name);
  }
}

/// "2026-11-18 20:50 UTC".
std::string now_text() {
  const std::time_t now = std::time(nullptr);
  std::array<char, 32> text{};
  std::tm parts{};
  gmtime_r(&now, &parts);
  std::strftime(text.data(), text.size(), "%Y-%m-%d %H:%M UTC", &parts);
  return text.data();
}

}  // namespace

void add_machine_options(CLI::App& command, RunOptions& options, const char* rounds) {
  command.add_option("--dtype", options.dtype,
                     fmt::format("float64, float32, float16, bfloat16, or fp64 … bf16{} ({})",
                                 options.bytes ? ", int8, uint8, fp8, fp8_e5m2" : "",
                                 options.dtype.empty() ? "float32; on CUDA float16" : options.dtype));
  command.add_option("--device", options.device, "cpu or cuda:N (the first GPU, else the CPU)");
  command.add_option("--threads", options.threads, "Threads on the CPU (all)")
      ->check(CLI::Range(1, 4096).description(""));
  command.add_option("--rounds", options.rounds, fmt::format("Rounds, of which the median counts ({})", rounds))
      ->check(CLI::Range(1, 10000).description(""));
}

void add_html_option(CLI::App& command, RunOptions& options) {
  options.title = fmt::format("fretwork {} {}", options.command, command.get_name());
  command.add_option("--html", options.html, "Write a page with plots to this file");
}

void add_run_options(CLI::App& command, RunOptions& options) {
  add_machine_options(command, options);
  command.add_option("--csv", options.csv, "Write the rows to this file");
  command.add_option("--json", options.json, "Write the rows, with the machine, to this file");
  add_html_option(command, options);
}

void add_explain_option(CLI::App& command, RunOptions& options) {
  command.add_flag("--explain", options.explain,
                   "On CUDA: before each row is timed, print the kernels that could run it, their expected µs, the one "
                   "taken and what it took");
}

Run::Run(const RunOptions& options)
    : options_(checked(options)),
      device_(read_device(options)),
      dtype_(read_dtype(options, device_)),
      executor_(options.threads > 0 ? options.threads : tbb::task_arena::automatic),
      csv_(open_file(options, options.csv)),
      json_(open_file(options, options.json)),
      html_(open_file(options, options.html)) {
  if (options.explain && !explains()) {
    fmt::print(stderr, "{}: --explain: kernels are chosen on CUDA only, and this run is on the CPU\n", options.command);
  }
}

std::string Run::machine() const {
  return device_.type == DeviceType::cpu
             ? fmt::format("{}, {} thread{}, {}", device_name(device_), threads(), threads() == 1 ? "" : "s",
                           simd_target())
             : fmt::format("{} ({})", cuda::device_info(device_.index).name, cuda::kernel_arch(device_.index));
}

Precision Run::precision(const std::string& text) const {
  constexpr const char* kNames[] = {"ieee", "tf32", "tf32x3"};
  const auto found = std::find(std::begin(kNames), std::end(kNames), text);
  if (found == std::end(kNames)) {
    throw UsageError(fmt::format("{}: --precision: expected ieee, tf32 or tf32x3, got {}", options_.command, text));
  }
  const auto precision = static_cast<Precision>(found - kNames);
  const bool has_choice = dtype_ == DType::f32 && device_.type == DeviceType::cuda;
  if (precision != Precision::ieee && !has_choice) {
    throw UsageError(fmt::format("{}: --precision: expected ieee, {} being for float32 on CUDA, got {} for {} on {}",
                                 options_.command, text, text, name_of(dtype_), name_of(device_)));
  }
  return precision;
}

void Run::csv(const std::string& line) {
  if (!options_.csv.empty()) {
    csv_ << line << '\n';
    flush_file(csv_, options_, options_.csv);
  }
}

Json Run::facts() const {
  return {{"version", FRETWORK_VERSION}, {"device", name_of(device_)}, {"machine", machine()},
          {"dtype", name_of(dtype_)},    {"threads", threads()},       {"rounds", rounds()}};
}

void Run::finish(const Json& suite, const Json& rows, std::vector<Plot> plots) {
  if (!options_.json.empty()) {
    Json all = facts();
    all.update(suite);
    all["rows"] = rows;
    json_ << all.dump(2) << '\n';
    flush_file(json_, options_, options_.json);
  }
  write_page({.title = options_.title, .facts = suite, .plots = std::move(plots), .rows = rows});
}

void Run::write_page(Page page) {
  if (options_.html.empty()) {
    return;
  }
  Json all = {{"machine", machine()}, {"memory", bytes_text(memory_bytes())}};
  if (device_.type == DeviceType::cuda) {
    all["memory"] = bytes_text(static_cast<double>(cuda::device_info(device_.index).memory));
    all["NVRTC"] = nvrtc::library().path.empty() ? "none" : nvrtc::version();
    all["cuBLASLt"] = cublas::available();
  }
  all["dtype"] = name_of(dtype_);
  all["rounds"] = rounds();
  all["fretwork"] = FRETWORK_VERSION;
  all["measured"] = now_text();
  all.update(page.facts);
  page.facts = std::move(all);
  html_ << html_of(page);
  flush_file(html_, options_, options_.html);
}

void add_bench(CLI::App& app) {
  CLI::App* const bench = app.add_subcommand("bench", "Measure operators on this machine");
  bench->require_subcommand(1);
  bench->footer(
      "Examples:\n"
      "  fretwork bench attention --seq 4096 --pattern 'strided(4096,64)'\n"
      "  fretwork bench block --n 2048 --block 32,64\n"
      "  fretwork bench conv --layer 256x56 --block 64 --format nhwc\n"
      "  fretwork bench kronecker --grid facts\n"
      "  fretwork bench two_four --rows 1,64,4096 --html two_four.html\n"
      "  fretwork bench two_four --device cuda:0 --columns 16 --explain");
  add_bench_attention(*bench);
  add_bench_block(*bench);
  add_bench_conv(*bench);
  add_bench_kronecker(*bench);
  add_bench_two_four(*bench);
}

}  // namespace fretwork::cli
