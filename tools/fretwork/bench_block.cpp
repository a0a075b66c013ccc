// `fretwork bench block`: how fast the block-sparse operators are on this machine.
#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <map>
#include <memory>
#include <optional>

#include "bench.h"
#include "bench_case.h"
#include "commands.h"
#include "layers.h"
#include "terminal.h"

namespace fretwork::cli {
namespace {

struct BenchOptions {
  std::vector<std::int64_t> sizes = {2048}, rows, blocks = {16, 32, 64, 128};
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
          const bool one = options.rows.empty() || *known == BenchOp::softmax;  // which has no dense operand
          for (const std::int64_t rows : one ? std::vector{n} : options.rows) {
            cases.push_back({*known, n, rows, block, density});
          }
        }
      }
    }
  }
  return cases;
}

/// What a case is set against: the best dense product of its sizes, and for softmax the same with every block there.
Dense dense_of(const BenchCase& one, DType dtype, Stopwatch& clock) {
  if (one.op != BenchOp::softmax) {
    const bool is_sdd = one.op == BenchOp::sdd;
    return best_dense({is_sdd ? one.rows : one.n, one.n, is_sdd ? one.n : one.rows}, dtype, clock);
  }
  std::int64_t block = 128;
  while (one.n % block != 0) {
    --block;
  }
  return {measure({one.op, one.n, one.rows, std::max(block, one.block), 1.0}, dtype, clock).ms, "every block"};
}

/// Milliseconds of the FLOPs at the rate of the dense product, or of moving the operands once at the rate of a copy.
double floor_of(const BenchCase& one, const Measurement& measured, const Dense& dense, DType dtype, double copy_rate) {
  const auto n = static_cast<double>(one.n), rows = static_cast<double>(one.rows);
  const double entries = static_cast<double>(measured.nnz) * static_cast<double>(one.block * one.block);
  const bool softmax = one.op == BenchOp::softmax;
  const double moved = (softmax ? 2 * entries : entries + 2 * n * rows) * static_cast<double>(size_of(dtype));
  return std::max(moved / copy_rate, softmax ? 0 : dense.ms * entries / (n * n));
}

struct Row {
  BenchCase one;
  Measurement measured;
  Dense dense;
  double floor = 0;  ///< milliseconds
};

class BlockReport {
 public:
  explicit BlockReport(Run& run) : run_(run) {}

  void header() {
    fmt::print("{}, {}, median of {} rounds\n", run_.machine(), name_of(run_.dtype()), run_.rounds());
    fmt::print(
        "dense: the fastest dense product that this program has here, of softmax the same with every block;\n"
        "of dense: of its rate\n");
    fmt::print("{:<8} {:>6} {:>6} {:>5} {:>8} {:>8} {:>10} {:>17} {:>8} {:>10} {:>7}  {}\n", "op", "n", "rows", "block",
               "density", "blocks", "ms", "rate", "of dense", "dense ms", "speedup", "dense by");
    run_.csv(
        "device,dtype,threads,op,n,block,density,nnz,ms,rate,unit,dense_rate,share,rows,dense_ms,speedup,floor_ms,"
        "dense_by");
  }

  void add(const Row& row) {
    const auto& [one, measured, dense, floor] = row;
    const double all = static_cast<double>(one.n) * static_cast<double>(one.n);
    const double entries = static_cast<double>(measured.nnz) * static_cast<double>(one.block * one.block);
    const double speedup = dense.ms / measured.ms, share = speedup * entries / all;
    const double dense_rate = entries > 0 ? measured.rate / share : 0;
    fmt::print("{:<8} {:>6} {:>6} {:>5} {:>8.4g} {:>8} {:>10.3f} {:>9.1f} {:<7} {:>6.1f} % {:>10.3f} {:>6.2f}x  {}\n",
               name_of(one.op), one.n, one.rows, one.block, one.density, measured.nnz, measured.ms, measured.rate,
               unit_of(one.op), 100 * share, dense.ms, speedup, dense.name);
    std::fflush(stdout);
    run_.csv(fmt::format("{},{},{},{},{},{},{},{},{:.6g},{:.6g},{},{:.6g},{:.4f},{},{:.6g},{:.4f},{:.6g},{}",
                         name_of(run_.device()), name_of(run_.dtype()), run_.threads(), name_of(one.op), one.n,
                         one.block, one.density, measured.nnz, measured.ms, measured.rate, unit_of(one.op), dense_rate,
                         share, one.rows, dense.ms, speedup, floor, dense.name));
    rows_.push_back({{"op", name_of(one.op)},
                     {"n", one.n},
                     {"rows", one.rows},
                     {"block", one.block},
                     {"density", one.density},
                     {"nnz", measured.nnz},
                     {"ms", measured.ms},
                     {"rate", measured.rate},
                     {"unit", unit_of(one.op)},
                     {"dense_rate", dense_rate},
                     {"share", share},
                     {"dense_ms", dense.ms},
                     {"speedup", speedup},
                     {"floor_ms", floor},
                     {"dense_by", dense.name}});
  }

  void finish() {
    run_.finish(Json::object(), rows_,
                {{.title = "Time of each product",
                  .labels = {"op", "n", "rows", "block", "density"},
                  .series = {{"ms", "sparse"}, {"dense_ms", "dense"}, {"floor_ms", "floor"}},
                  .note = std::string(kDenseNote) + kFloorNote}});
  }

 private:
  Run& run_;
  Json rows_ = Json::array();
};

void bench(const BenchOptions& options) {
  const std::vector<BenchCase> cases = all_cases(options);
  Run run(options.run);
  Stopwatch clock(run.device(), run.executor(), run.rounds());
  BlockReport report(run);
  report.header();
  Progress progress(static_cast<int>(cases.size()), run.explains());
  const double copy_rate = clock.copy_rate();
  std::map<std::array<std::int64_t, 3>, Dense> known;
  for (const BenchCase& one : cases) {
    progress.show(fmt::format("{} n={} block={} density={:.4g}", name_of(one.op), one.n, one.block, one.density));
    Dense& dense = known[{static_cast<std::int64_t>(one.op), one.n, one.rows}];
    if (dense.name.empty()) {
      dense = dense_of(one, run.dtype(), clock);
    }
    clock.explain(run.explains());
    const Measurement measured = measure(one, run.dtype(), clock);
    clock.explain(false);
    progress.hide();
    report.add({one, measured, dense, floor_of(one, measured, dense, run.dtype(), copy_rate)});
    progress.advance();
  }
  report.finish();
}

}  // namespace

void add_bench_block(CLI::App& bench_command) {
  const auto options = std::make_shared<BenchOptions>();
  CLI::App* const command =
      bench_command.add_subcommand("block", "Block-sparse products and softmax beside dense ones");
  command->add_option("--n", options->sizes, "Sizes of the square matrices (2048)")
      ->delimiter(',')
      ->check(CLI::Range(8, 1 << 20).description(""));
  command->add_option("--rows", options->rows, "The other side of the dense operands (n)")
      ->delimiter(',')
      ->check(CLI::Range(1, 1 << 20).description(""));
  command->add_option("--block", options->blocks, "Blocks, 8 to 128 (16,32,64,128)")
      ->delimiter(',')
      ->check(CLI::Range(8, 128).description(""));
  command->add_option("--density", options->densities, "Shares of blocks that are there (0.5,0.25,0.1,0.05)")
      ->delimiter(',')
      ->check(CLI::Range(0.0, 1.0).description(""));
  command->add_option("--op", options->ops, "dsd, dds, sdd, softmax (dsd)")->delimiter(',');
  add_run_options(*command, options->run);
  add_explain_option(*command, options->run);
  command->footer(
      "Lists are written with commas. The rate counts non-zeros only: GFLOP/s of products, GB/s read and written of\n"
      "softmax. It is set against the fastest dense product that the program has (cuBLASLt where there is one), of\n"
      "softmax against the same with every block, so 100 % means that zeros cost nothing. Floor, in files: the FLOPs\n"
      "at the dense rate, or the bytes at the rate of a copy. On CUDA the L2 cache is flushed before each call.\n"
      "Softmax does not choose between kernels by their costs: --explain has nothing to say of it.\n"
      "Examples:\n"
      "  fretwork bench block\n"
      "  fretwork bench block --n 1024,4096 --block 64 --density 0.1 --op dsd,sdd --csv block.csv\n"
      "  fretwork bench block --n 8192 --rows 16,256 --dtype bfloat16 --html block.html\n"
      "  fretwork bench block --device cuda:0 --block 32 --density 0.1 --op dsd,sdd --explain");
  command->callback([options] { bench(*options); });
}

}  // namespace fretwork::cli
