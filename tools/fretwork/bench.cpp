// `fretwork bench block`: how fast the block-sparse operators are on this machine.
#include <fmt/core.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>

#include "bench_case.h"
#include "commands.h"
#include "fretwork/error.h"
#include "fretwork/executor_tbb.h"
#include "machine.h"
#include "runtime/cuda_driver.h"
#include "terminal.h"

namespace fretwork::cli {
namespace {

struct BenchOptions {
  std::vector<std::int64_t> sizes = {2048}, blocks = {16, 32, 64, 128};
  std::vector<double> densities = {0.5, 0.25, 0.1, 0.05};
  std::vector<std::string> ops = {"dsd"};
  std::string dtype, device = "cpu", csv, json;
  int threads = 0, rounds = 7;
};

Device read_device(const std::string& text) {
  if (text == "cpu") {
    return {};
  }
  int index = 0;
  const std::string number = text.starts_with("cuda:") ? text.substr(5) : text == "cuda" ? "0" : "";
  const bool fits = !number.empty() && number.size() < 4 && number.find_first_not_of("0123456789") == number.npos;
  if (!fits) {
    throw UsageError("bench: --device: expected cpu or cuda:N, got " + text);
  }
  index = std::stoi(number);
  if (!cuda::available()) {
    throw Error("bench: --device " + text + ": " + cuda::unavailable_reason());
  }
  if (index >= cuda::device_count()) {
    throw UsageError(
        fmt::format("bench: --device: expected cuda:0 to cuda:{}, got {}", cuda::device_count() - 1, text));
  }
  return {DeviceType::cuda, index};
}

DType read_dtype(const std::string& text, Device device) {
  if (text.empty()) {
    return device.type == DeviceType::cpu ? DType::f32 : DType::f16;
  }
  for (const DType dtype : {DType::f64, DType::f32, DType::f16, DType::bf16}) {
    if (text == name_of(dtype)) {
      return dtype;
    }
  }
  throw UsageError("bench: --dtype: expected float64, float32, float16 or bfloat16, got " + text);
}

/// What was asked for, checked, in the order it is measured.
std::vector<BenchCase> all_cases(const BenchOptions& options) {
  std::vector<BenchCase> cases;
  for (const std::string& op : options.ops) {
    const std::optional<BenchOp> known = bench_op(op);
    if (!known) {
      throw UsageError("bench: --op: expected dsd, dds, sdd or softmax, got " + op);
    }
    for (const std::int64_t n : options.sizes) {
      for (const std::int64_t block : options.blocks) {
        if (n % block != 0) {
          throw UsageError(
              fmt::format("bench: --n: expected a multiple of every block, got {} with block {}", n, block));
        }
        for (const double density : options.densities) {
          cases.push_back({*known, n, block, density});
        }
      }
    }
  }
  return cases;
}

/// The dense stand-in for a case: every block there, and blocks as large as fit.
BenchCase dense_case(const BenchCase& one) {
  std::int64_t block = 128;
  while (one.n % block != 0) {
    --block;
  }
  return {one.op, one.n, std::max(block, one.block), 1.0};
}

struct Row {
  BenchCase one;
  Measurement measured;
  double peak = 0;  ///< the dense stand-in's rate
};

/// Results go to files that are opened before the work starts.
std::ofstream open_file(const std::string& name) {
  std::ofstream file(name);
  if (!file) {
    throw Error("bench: " + name + ": cannot be written: " + std::strerror(errno));
  }
  return file;
}

void close_file(std::ofstream& file, const std::string& name) {
  file.close();
  if (!file) {
    throw Error("bench: " + name + ": cannot be written: " + std::strerror(errno));
  }
}

class Report {
 public:
  Report(const BenchOptions& options, Device device, DType dtype, int threads)
      : options_(options), device_(device), dtype_(dtype), threads_(threads) {
    if (!options.csv.empty()) {
      csv_ = open_file(options.csv);
    }
    if (!options.json.empty()) {
      json_ = open_file(options.json);
    }
  }

  void header() const {
    fmt::print("{}, {}, median of {} rounds\n", machine(), name_of(dtype_), options_.rounds);
    fmt::print("peak: the same op with every block there (density 1, largest block), measured in this run\n");
    fmt::print("{:<8} {:>6} {:>5} {:>8} {:>8} {:>10} {:>17} {:>8}\n", "op", "n", "block", "density", "blocks", "ms",
               "rate", "of peak");
  }

  void add(const Row& row) {
    const auto& [one, measured, peak] = row;
    fmt::print("{:<8} {:>6} {:>5} {:>8.4g} {:>8} {:>10.3f} {:>9.1f} {:<7} {:>6.1f} %\n", name_of(one.op), one.n,
               one.block, one.density, measured.nnz, measured.ms, measured.rate, unit_of(one.op),
               100 * measured.rate / peak);
    std::fflush(stdout);
    rows_.push_back(row);
  }

  void write_files() {
    if (!options_.csv.empty()) {
      csv_ << "device,dtype,threads,op,n,block,density,nnz,ms,rate,unit,peak,share\n";
      for (const auto& [one, measured, peak] : rows_) {
        csv_ << fmt::format("{},{},{},{},{},{},{},{},{:.6g},{:.6g},{},{:.6g},{:.4f}\n", name_of(device_),
                            name_of(dtype_), threads_, name_of(one.op), one.n, one.block, one.density, measured.nnz,
                            measured.ms, measured.rate, unit_of(one.op), peak, measured.rate / peak);
      }
      close_file(csv_, options_.csv);
    }
    if (!options_.json.empty()) {
      json_ << as_json().dump(2) << '\n';
      close_file(json_, options_.json);
    }
  }

 private:
  std::string machine() const {
    return device_.type == DeviceType::cpu
               ? fmt::format("{}, {} thread{}, {}", cpu_model(), threads_, threads_ == 1 ? "" : "s", simd_target())
               : fmt::format("{} ({})", cuda::device_info(device_.index).name, cuda::kernel_arch(device_.index));
  }

  nlohmann::ordered_json as_json() const {
    auto rows = nlohmann::ordered_json::array();
    for (const auto& [one, measured, peak] : rows_) {
      rows.push_back({{"op", name_of(one.op)},
                      {"n", one.n},
                      {"block", one.block},
                      {"density", one.density},
                      {"nnz", measured.nnz},
                      {"ms", measured.ms},
                      {"rate", measured.rate},
                      {"unit", unit_of(one.op)},
                      {"peak", peak},
                      {"share", measured.rate / peak}});
    }
    return {
        {"version", FRETWORK_VERSION}, {"device", name_of(device_)}, {"machine", machine()}, {"dtype", name_of(dtype_)},
        {"threads", threads_},         {"rounds", options_.rounds},  {"rows", rows}};
  }

  const BenchOptions& options_;
  Device device_;
  DType dtype_;
  int threads_;
  std::ofstream csv_, json_;
  std::vector<Row> rows_;
};

void bench(const BenchOptions& options) {
  const std::vector<BenchCase> cases = all_cases(options);
  const Device device = read_device(options.device);
  const DType dtype = read_dtype(options.dtype, device);
  TbbExecutor executor(options.threads > 0 ? options.threads : tbb::task_arena::automatic);
  Bench runner(device, dtype, executor, options.rounds);
  Report report(options, device, dtype, device.type == DeviceType::cpu ? executor.concurrency() : 0);
  report.header();
  Progress progress(static_cast<int>(cases.size()));
  std::optional<BenchCase> dense;
  double peak = 0;
  for (const BenchCase& one : cases) {
    progress.show(fmt::format("{} n={} block={} density={:.4g}", name_of(one.op), one.n, one.block, one.density));
    if (!dense || dense->op != one.op || dense->n != one.n) {
      dense = dense_case(one);
      peak = runner.measure(*dense).rate;
    }
    const Measurement measured = runner.measure(one);
    progress.hide();
    report.add({one, measured, peak});
    progress.advance();
  }
  report.write_files();
}

}  // namespace

void add_bench(CLI::App& app) {
  const auto options = std::make_shared<BenchOptions>();
  CLI::App* const bench_command = app.add_subcommand("bench", "Measure operators on this machine");
  bench_command->require_subcommand(1);
  bench_command->footer("Example:\n  fretwork bench block --n 2048 --block 32,64");
  CLI::App* const command = bench_command->add_subcommand("block", "Block-sparse products and softmax, n x n");
  command->add_option("--n", options->sizes, "Sizes of the square matrices (2048)")
      ->delimiter(',')
      ->check(CLI::Range(8, 1 << 20).description(""));
  command->add_option("--block", options->blocks, "Blocks, 8 to 128 (16,32,64,128)")
      ->delimiter(',')
      ->check(CLI::Range(8, 128).description(""));
  command->add_option("--density", options->densities, "Shares of blocks that are there (0.5,0.25,0.1,0.05)")
      ->delimiter(',')
      ->check(CLI::Range(0.0, 1.0).description(""));
  command->add_option("--op", options->ops, "dsd, dds, sdd, softmax (dsd)")->delimiter(',');
  command->add_option("--dtype", options->dtype, "float64, float32, float16, bfloat16 (float32; on CUDA float16)");
  command->add_option("--device", options->device, "cpu or cuda:N (cpu)");
  command->add_option("--threads", options->threads, "Threads on the CPU (all)")
      ->check(CLI::Range(1, 4096).description(""));
  command->add_option("--rounds", options->rounds, "Rounds, of which the median counts (7)")
      ->check(CLI::Range(1, 10000).description(""));
  command->add_option("--csv", options->csv, "Write the rows to this file");
  command->add_option("--json", options->json, "Write the rows, with the machine, to this file");
  command->footer(
      "Lists are written with commas. The rate counts non-zeros only: GFLOP/s of products, GB/s read and written of\n"
      "softmax. It is set against the same op with every block there, so 100 % means that zeros cost nothing.\n"
      "Examples:\n"
      "  fretwork bench block\n"
      "  fretwork bench block --n 1024,4096 --block 64 --density 0.1 --op dsd,sdd --csv block.csv\n"
      "  fretwork bench block --device cuda:0 --n 8192 --dtype bfloat16");
  command->callback([options] { bench(*options); });
}

}  // namespace fretwork::cli
