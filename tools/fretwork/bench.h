// What the suites of `fretwork bench` and `tune` share: options, the machine they run on, and the files of their rows.
#pragma once

#include <CLI/CLI.hpp>
#include <fstream>
#include <string>
#include <vector>

#include "fretwork/context.h"
#include "fretwork/executor_tbb.h"
#include "fretwork/tensor.h"
#include "page.h"

namespace fretwork::cli {

struct RunOptions {
  const char* command = "bench";  ///< as messages name it
  std::string title;              ///< of the page
  std::string dtype, device, csv, json, html;
  int threads = 0, rounds = 7;
  bool bytes = false;    ///< whether the suite has types of 8 bits
  bool explain = false;  ///< --explain
};
/// `rounds` says in the help what is used when none is given.
void add_machine_options(CLI::App& command, RunOptions& options, const char* rounds = "7");
void add_html_option(CLI::App& command, RunOptions& options);
/// These, and the files.
void add_run_options(CLI::App& command, RunOptions& options);
/// --explain, for suites of ops that choose between kernels by their costs.
void add_explain_option(CLI::App& command, RunOptions& options);

/// What plots call floor and dense.
inline constexpr const char* kFloorNote =
    "Floor: the FLOPs at the rate of the dense product, or the bytes that must move at the rate of a copy, as this run "
    "measured them; caches may hold part of them.";
inline constexpr const char* kDenseNote = "Dense: the fastest dense product that the program has here. ";

/// One run of a suite. Files are opened before the work starts.
class Run {
 public:
  /// Throws UsageError on a bad option.
  explicit Run(const RunOptions& options);

  Device device() const { return device_; }
  DType dtype() const { return dtype_; }
  int rounds() const { return options_.rounds; }
  /// Whether rows are explained. Never on a CPU, where no kernels are chosen.
  bool explains() const { return options_.explain && device_.type == DeviceType::cuda; }
  Executor& executor() { return executor_; }
  /// 0 on a GPU.
  int threads() const { return device_.type == DeviceType::cpu ? executor_.concurrency() : 0; }
  /// As a person would name it.
  std::string machine() const;
  /// Of --precision. Throws UsageError on one that this type and device have not.
  Precision precision(const std::string& text) const;

  /// Writes a line of the CSV at once, so that a run that is stopped leaves what it has measured.
  void csv(const std::string& line);
  /// Version, device, machine, dtype, threads and rounds.
  Json facts() const;
  /// Writes the JSON and the page: the machine, what the suite adds, and the rows.
  void finish(const Json& suite, const Json& rows, std::vector<Plot> plots);
  /// Writes the page where one was asked for, with the machine among its facts.
  void write_page(Page page);

 private:
  RunOptions options_;
  Device device_;
  DType dtype_;
  TbbExecutor executor_;
  std::ofstream csv_, json_, html_;
};

void add_bench_attention(CLI::App& bench);
void add_bench_block(CLI::App& bench);
void add_bench_conv(CLI::App& bench);
void add_bench_kronecker(CLI::App& bench);
void add_bench_two_four(CLI::App& bench);

}  // namespace fretwork::cli
