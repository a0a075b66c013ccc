// `fretwork bench two_four`: from how many columns on a 2:4 product is no longer, or only then, faster than a dense
// one.
#include <fmt/core.h>

#include <algorithm>
#include <cstdio>
#include <memory>

#include "bench.h"
#include "commands.h"
#include "fretwork/ops.h"
#include "fretwork/two_four.h"
#include "layers.h"
#include "measure.h"
#include "terminal.h"

namespace fretwork::cli {
namespace {

struct TwoFourBenchOptions {
  std::vector<std::int64_t> rows = {4096}, depths = {4096}, columns;
  std::string precision = "ieee";
  RunOptions run;
};

struct TwoFourCase {
  std::int64_t m, k, n;
};

bool is_byte(DType dtype) { return size_of(dtype) == 1; }

/// y (n, m) = x (n, k) · Wᵀ, as a layer calls it, with W (m, k) 2:4.
double sparse_ms(const TwoFourCase& one, DType dtype, Stopwatch& clock) {
  Context context = clock.context();
  const Device device = clock.device();
  const Data dense(device, dtype, {one.m, one.k}), pruned(device, dtype, {one.m, one.k});
  const Data values(device, dtype, {one.m, one.k / 2});
  const Data metadata(device, DType::i16, {one.m, two_four::words(one.k, dtype, DType::i16)});
  const DType result = dtype == DType::i8 || dtype == DType::u8 ? DType::i32 : is_byte(dtype) ? DType::bf16 : dtype;
  const Data x(device, dtype, {one.n, one.k}), y(device, result, {one.n, one.m});
  const TwoFour weight{values.view(), metadata.view(), 1};
  two_four::prune(dense.view(), 1, false, pruned.view(), context);
  two_four::compress(pruned.view(), weight, nullptr, context);
  return clock.cold([&] { two_four::linear(x.view(), weight, y.view(), context); }).ms;
}

class TwoFourReport {
 public:
  /// `copy_rate`: bytes a millisecond, for the time below which no dense product can be.
  TwoFourReport(Run& run, Precision precision, double copy_rate)
      : run_(run), precision_(precision), copy_rate_(copy_rate) {}

  void header() {
    fmt::print("{}, {}, median of {} rounds\n", run_.machine(), name_of(run_.dtype()), run_.rounds());
    fmt::print(
        "dense: the fastest dense product that this program has here{}; read: the dense weight once, at the rate of a "
        "copy;\nplan: what fallback=\"dense\" would run\n",
        is_byte(run_.dtype()) ? ", in bfloat16" : "");
    fmt::print("{:>7} {:>7} {:>7} {:>10} {:>10} {:>8} {:>9} {:>10}  {:<5}  dense by\n", "m", "k", "n", "2:4 ms",
               "dense ms", "speedup", "read ms", "GFLOP/s", "plan");
    run_.csv("device,dtype,threads,m,k,n,ms,dense_ms,speedup,read_ms,gflop_per_s,plan,floor_ms,dense_by");
  }

  void add(const TwoFourCase& one, double ms, const Dense& by) {
    const double dense = by.ms, floor = floor_of(one, dense);
    const double weight = static_cast<double>(one.m) * static_cast<double>(one.k);
    const double rate = 2e-6 * weight * static_cast<double>(one.n) / ms;
    const double read = weight * static_cast<double>(size_of(run_.dtype())) / copy_rate_;
    const bool wins = two_four::dense_wins(one.m, one.n, one.k, run_.dtype(), run_.device(), precision_);
    const char* const plan = wins ? "dense" : "2:4";
    fmt::print("{:>7} {:>7} {:>7} {:>10.3f} {:>10.3f} {:>8.2f} {:>9.3f} {:>10.1f}  {:<5}  {}\n", one.m, one.k, one.n,
               ms, dense, dense / ms, read, rate, plan, by.name);
    std::fflush(stdout);
    run_.csv(fmt::format("{},{},{},{},{},{},{:.6g},{:.6g},{:.4f},{:.6g},{:.6g},{},{:.6g},{}", name_of(run_.device()),
                         name_of(run_.dtype()), run_.threads(), one.m, one.k, one.n, ms, dense, dense / ms, read, rate,
                         plan, floor, by.name));
    rows_.push_back({{"m", one.m},
                     {"k", one.k},
                     {"n", one.n},
                     {"ms", ms},
                     {"dense_ms", dense},
                     {"speedup", dense / ms},
                     {"read_ms", read},
                     {"gflop_per_s", rate},
                     {"plan", plan},
                     {"floor_ms", floor},
                     {"dense_by", by.name}});
  }

  void finish() {
    run_.finish(Json::object(), rows_,
                {{.title = "Time of each product",
                  .labels = {"m", "k", "n"},
                  .series = {{"ms", "2:4"}, {"dense_ms", "dense"}, {"floor_ms", "floor"}},
                  .note = std::string(kDenseNote) + "Floor: half of dense, or the bytes that must move at the rate of "
                                                    "a copy; caches may hold part of them."}});
  }

 private:
  /// Half the dense product, or moving x, y, values and metadata once at the rate of a copy.
  double floor_of(const TwoFourCase& one, double dense) const {
    const auto m = static_cast<double>(one.m), k = static_cast<double>(one.k), n = static_cast<double>(one.n);
    const double metadata = m * k / static_cast<double>(2 * two_four::group(run_.dtype()));
    const double moved = (m * k / 2 + n * (k + m)) * static_cast<double>(size_of(run_.dtype())) + metadata;
    return std::max(dense / 2, moved / copy_rate_);
  }

  Run& run_;
  Precision precision_;
  double copy_rate_;
  Json rows_ = Json::array();
};

std::vector<TwoFourCase> two_four_cases(const TwoFourBenchOptions& options, Device device) {
  const bool gpu = device.type == DeviceType::cuda;
  const std::vector<std::int64_t> usual =
      gpu ? std::vector<std::int64_t>{1, 16, 64, 256, 1024, 4096} : std::vector<std::int64_t>{1, 4, 16, 64, 256};
  std::vector<TwoFourCase> cases;
  for (const std::int64_t m : options.rows) {
    for (const std::int64_t k : options.depths) {
      if (m % 8 != 0 || k % 8 != 0) {
        throw UsageError(fmt::format("bench: --m and --k: expected multiples of 8, got {} and {}", m, k));
      }
      for (const std::int64_t n : options.columns.empty() ? usual : options.columns) {
        cases.push_back({m, k, n});
      }
    }
  }
  return cases;
}

void bench_two_four(const TwoFourBenchOptions& options) {
  Run run(options.run);
  const Precision precision = run.precision(options.precision);
  const std::vector<TwoFourCase> cases = two_four_cases(options, run.device());
  Stopwatch clock(run.device(), run.executor(), run.rounds(), precision);
  TwoFourReport report(run, precision, clock.copy_rate());
  report.header();
  Progress progress(static_cast<int>(cases.size()), run.explains());
  for (const TwoFourCase& one : cases) {
    progress.show(fmt::format("m={} k={} n={}", one.m, one.k, one.n));
    clock.explain(run.explains());
    const double ms = sparse_ms(one, run.dtype(), clock);
    clock.explain(false);
    const Dense dense = best_dense({one.k, one.m, one.n}, run.dtype(), clock);
    progress.hide();
    report.add(one, ms, dense);
    progress.advance();
  }
  report.finish();
}

}  // namespace

void add_bench_two_four(CLI::App& bench_command) {
  const auto options = std::make_shared<TwoFourBenchOptions>();
  options->run.bytes = true;
  CLI::App* const command = bench_command.add_subcommand("two_four", "2:4 products beside dense ones");
  const auto range = [] { return CLI::Range(1, 1 << 20).description(""); };
  command->add_option("--m", options->rows, "Rows of the weight (4096)")->delimiter(',')->check(range());
  command->add_option("--k", options->depths, "Its columns (4096)")->delimiter(',')->check(range());
  command->add_option("--rows,--columns", options->columns, "Rows of x (1,4,16,64,256; on CUDA 1,16,64,256,1024,4096)")
      ->delimiter(',')
      ->check(range());
  command->add_option("--precision", options->precision, "For float32 on CUDA: ieee, tf32 or tf32x3 (ieee)");
  add_run_options(*command, options->run);
  add_explain_option(*command, options->run);
  command->footer(
      "Lists are written with commas. GFLOP/s count the dense product's FLOPs.\n"
      "Beside cuBLAS and cuSPARSELt: bench/compare_two_four.py.\n"
      "Examples:\n"
      "  fretwork bench two_four\n"
      "  fretwork bench two_four --m 14336 --k 4096 --rows 1,64,4096 --dtype bf16 --csv two_four.csv\n"
      "  fretwork bench two_four --device cuda:0 --rows 16 --explain");
  command->callback([options] { bench_two_four(*options); });
}

}  // namespace fretwork::cli
