// `fretwork bench block`: how fast the block-sparse operators are on this machine.
#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <memory>
#include <optional>

#include "bench.h"
#include "bench_case.h"
#include "commands.h"
#include "terminal.h"

namespace fretwork::cli {
namespace {

struct BenchOptions {
  std::vector<std::int64_t> sizes = {2048}, blocks = {16, 32, 64, 128};
  std::vector<double> densities = {0.5, 0.25, 0.1, 0.05};
  std::vector<std::string> ops = {"dsd"};
  RunOptions run;
};

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
          if (std::isnan(density)) {  // which no range refuses
            throw UsageError("bench: --density: expected 0 to 1, got nan");
          }
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
  double dense = 0;  ///< the dense stand-in's rate
};

class BlockReport {
 public:
  explicit BlockReport(Run& run) : run_(run) {}

  void header() {
    fmt::print("{}, {}, median of {} rounds\n", run_.machine(), name_of(run_.dtype()), run_.rounds());
    fmt::print("of dense: of the rate of the same op with every block there (largest block), measured in this run\n");
    fmt::print("{:<8} {:>6} {:>5} {:>8} {:>8} {:>10} {:>17} {:>8}\n", "op", "n", "block", "density", "blocks", "ms",
               "rate", "of dense");
    run_.csv("device,dtype,threads,op,n,block,density,nnz,ms,rate,unit,dense_rate,share");
  }

  void add(const Row& row) {
    const auto& [one, measured, dense] = row;
    fmt::print("{:<8} {:>6} {:>5} {:>8.4g} {:>8} {:>10.3f} {:>9.1f} {:<7} {:>6.1f} %\n", name_of(one.op), one.n,
               one.block, one.density, measured.nnz, measured.ms, measured.rate, unit_of(one.op),
               100 * measured.rate / dense);
    std::fflush(stdout);
    run_.csv(fmt::format("{},{},{},{},{},{},{},{},{:.6g},{:.6g},{},{:.6g},{:.4f}", name_of(run_.device()),
                         name_of(run_.dtype()), run_.threads(), name_of(one.op), one.n, one.block, one.density,
                         measured.nnz, measured.ms, measured.rate, unit_of(one.op), dense, measured.rate / dense));
    rows_.push_back({{"op", name_of(one.op)},
                     {"n", one.n},
                     {"block", one.block},
                     {"density", one.density},
                     {"nnz", measured.nnz},
                     {"ms", measured.ms},
                     {"rate", measured.rate},
                     {"unit", unit_of(one.op)},
                     {"dense_rate", dense},
                     {"share", measured.rate / dense}});
  }

  void finish() { run_.finish(nlohmann::ordered_json::object(), rows_); }

 private:
  Run& run_;
  nlohmann::ordered_json rows_ = nlohmann::ordered_json::array();
};

void bench(const BenchOptions& options) {
  const std::vector<BenchCase> cases = all_cases(options);
  Run run(options.run);
  Stopwatch clock(run.device(), run.executor(), run.rounds());
  BlockReport report(run);
  report.header();
  Progress progress(static_cast<int>(cases.size()), run.explains());
  std::optional<BenchCase> stand_in;
  double dense = 0;
  for (const BenchCase& one : cases) {
    progress.show(fmt::format("{} n={} block={} density={:.4g}", name_of(one.op), one.n, one.block, one.density));
    if (!stand_in || stand_in->op != one.op || stand_in->n != one.n) {
      stand_in = dense_case(one);
      dense = measure(*stand_in, run.dtype(), clock).rate;
    }
    clock.explain(run.explains());
    const Measurement measured = measure(one, run.dtype(), clock);
    clock.explain(false);
    progress.hide();
    report.add({one, measured, dense});
    progress.advance();
  }
  report.finish();
}

}  // namespace

void add_bench_block(CLI::App& bench_command) {
  const auto options = std::make_shared<BenchOptions>();
  options->run.device = "cpu";
  CLI::App* const command = bench_command.add_subcommand("block", "Block-sparse products and softmax, n x n");
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
  add_run_options(*command, options->run, "cpu");
  add_explain_option(*command, options->run);
  command->footer(
      "Lists are written with commas. The rate counts non-zeros only: GFLOP/s of products, GB/s read and written of\n"
      "softmax. It is set against the same op with every block there, so 100 % means that zeros cost nothing.\n"
      "Softmax does not choose between kernels by their costs: --explain has nothing to say of it.\n"
      "Examples:\n"
      "  fretwork bench block\n"
      "  fretwork bench block --n 1024,4096 --block 64 --density 0.1 --op dsd,sdd --csv block.csv\n"
      "  fretwork bench block --device cuda:0 --n 8192 --dtype bfloat16\n"
      "  fretwork bench block --device cuda:0 --block 32 --density 0.1 --op dsd,sdd --explain");
  command->callback([options] { bench(*options); });
}

}  // namespace fretwork::cli
