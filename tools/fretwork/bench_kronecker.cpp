// `fretwork bench kronecker`: how near to the machine's limits Kronecker-sparse products are.
#include <fmt/core.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <optional>
#include <utility>

#include "bench.h"
#include "commands.h"
#include "kronecker_case.h"
#include "kronecker_grid.h"
#include "layers.h"
#include "terminal.h"

namespace fretwork::cli {
namespace {

struct KroneckerOptions {
  std::optional<std::string> patterns;
  std::vector<std::string> chains;
  std::string grid = "facts", precision = "ieee", algos = "kernel";
  std::int64_t batch = 0;
  bool bs_last = false, backward = false, list = false;
  RunOptions run;
};

Patterns chosen_patterns(const KroneckerOptions& options) {
  if (options.patterns) {
    return parse_patterns(*options.patterns, "bench: --patterns");
  }
  if (const auto grid = named_grid(options.grid)) {
    return *grid;
  }
  if (!std::filesystem::exists(options.grid)) {
    throw UsageError("bench: --grid: expected facts, sample, paper or a file, got " + options.grid);
  }
  return read_patterns(options.grid, "bench");
}

/// What is timed of each pattern.
struct Algos {
  bool kernel = false, dense = false;
};

Algos read_algos(const KroneckerOptions& options) {
  Algos algos;
  const std::string& text = options.algos;
  for (std::size_t begin = 0; begin <= text.size();) {
    const std::size_t end = std::min(text.find(',', begin), text.size());
    const std::string name = text.substr(begin, end - begin);
    if (name != "kernel" && name != "dense") {
      throw UsageError(
          "bench: --algos: expected some of kernel,dense (torch's are in bench/compare_kronecker.py), got '" + name +
          "'");
    }
    (name == "kernel" ? algos.kernel : algos.dense) = true;
    begin = end + 1;
  }
  if (options.backward && !algos.kernel) {
    throw UsageError("bench: --backward: expected kernel among --algos, got " + text);
  }
  return algos;
}

/// The same layer without zeros left out, if that takes a bearable time.
std::optional<Dense> dense_of(const KroneckerCase& one, DType dtype, const Rates& rates, Stopwatch& clock) {
  const auto& [a, b, c, d] = one.pattern;
  constexpr std::int64_t kMost = std::int64_t{1} << 31;
  if (a * b * d > kMost / (a * c * d)) {
    return std::nullopt;
  }
  const KroneckerCase dense{{1, a * b * d, a * c * d, 1}, one.batch, one.bs_last, false};
  if (flops_of(dense) / rates.dense > 200) {
    return std::nullopt;
  }
  const Dense best = best_dense({a * c * d, a * b * d, one.batch}, dtype, clock);
  const double here = one.bs_last ? measure(dense, dtype, clock).forward.ms : best.ms;
  return here < best.ms ? Dense{here, "ksmm with one factor in this layout"} : best;
}

/// What was asked for, seen to fit before hours are spent.
std::vector<KroneckerCase> all_cases(const KroneckerOptions& options, const Patterns& patterns, const Run& run) {
  std::vector<KroneckerCase> cases;
  for (const auto& pattern : patterns) {
    cases.push_back(
        {pattern, options.batch > 0 ? options.batch : usual_batch(run.device()), options.bs_last, options.backward});
    check_fits(cases.back(), run.dtype(), run.device(), "bench");
  }
  return cases;
}

/// Columns of the CSV: mean, interquartile range, and every round.
std::string spread_of(const Times& times) {
  std::string all;
  for (const double ms : times.rounds) {
    all += fmt::format("{}{:.5g}", all.empty() ? "" : " ", ms);
  }
  return fmt::format("{:.6g},{:.3g},{}", times.mean, times.iqr, all);
}

class KroneckerReport {
 public:
  KroneckerReport(Run& run, const KroneckerOptions& options, const Algos& algos, const Rates& rates)
      : run_(run), options_(options), algos_(algos), rates_(rates) {}

  void header(std::int64_t batch) {
    fmt::print("{}, {}{}, batch {} ({}), median of {} rounds\n", run_.machine(), name_of(run_.dtype()),
               precision().empty() ? "" : " " + precision(), batch, layout(), run_.rounds());
    fmt::print(
        "floor: x, w and y moved once at {:.0f} GB/s, or the FLOPs at {:.0f} GFLOP/s (copy and best dense\n"
        "product of this run), whichever takes longer\n",
        rates_.copy * 1e-6, rates_.dense * 1e-6);
    fmt::print("{:<20} {:>10} {:>9} {:>8} {:>9} {:>10} {:>7}", "pattern", "ms", "std", "GB/s", "GFLOP/s", "floor ms",
               "/floor");
    fmt::print("{}", options_.backward ? fmt::format(" {:>11} {:>9}", "backward ms", "/forward") : "");
    fmt::print("{}\n", algos_.dense ? fmt::format(" {:>10}", "dense ms") : "");
    std::fflush(stdout);
    run_.csv(
        "batch_size,a,b,c,d,layout,dtype,precision,median,std,gb_per_s,gflop_per_s,floor_ms,over_floor,backward_ms,"
        "backward_std,device,threads,dense_ms,mean,iqr,times");
  }

  /// Without `times` the kernel was not asked for.
  void add(const KroneckerCase& one, const KroneckerTimes* times, const std::optional<Dense>& dense) {
    const auto& [a, b, c, d] = one.pattern;
    const double floor = floor_of(one, run_.dtype(), rates_);
    Json row = {{"pattern", {a, b, c, d}}};
    std::string forward = ",,,", over, backward = ",";  // columns of the CSV
    if (times) {
      const double ms = times->forward.ms, std = times->forward.std;
      const double gbs = bytes_of(one, run_.dtype()) / ms * 1e-6, gflops = flops_of(one) / ms * 1e-6;
      fmt::print("{:<20} {:>10.4f} {:>9.4f} {:>8.1f} {:>9.1f} {:>10.4f} {:>7.2f}", text_of(one.pattern), ms, std, gbs,
                 gflops, floor, ms / floor);
      forward = fmt::format("{:.6g},{:.3g},{:.6g},{:.6g}", ms, std, gbs, gflops);
      over = fmt::format("{:.4f}", ms / floor);
      row.update({{"mean", times->forward.mean}, {"iqr", times->forward.iqr}, {"times", times->forward.rounds}});
      row.update({{"ms", ms}, {"std", std}, {"gb_per_s", gbs}, {"gflop_per_s", gflops}, {"over_floor", ms / floor}});
      (d > 1 ? strided_ : contiguous_).add(ms / floor);
      if (times->backward) {
        fmt::print(" {:>11.4f} {:>9.2f}", times->backward->ms, times->backward->ms / ms);
        backward = fmt::format("{:.6g},{:.3g}", times->backward->ms, times->backward->std);
        row.update({{"backward_ms", times->backward->ms}, {"backward_std", times->backward->std}});
        backward_.add(times->backward->ms / ms);
      }
    } else {
      fmt::print("{:<20} {:>10} {:>9} {:>8} {:>9} {:>10.4f} {:>7}", text_of(one.pattern), "-", "-", "-", "-", floor,
                 "-");
    }
    row["floor_ms"] = floor;
    if (algos_.dense) {
      fmt::print(" {:>10}", dense ? fmt::format("{:.4f}", dense->ms) : "too large");
      row["dense_ms"] = dense ? Json(dense->ms) : Json(nullptr);
      row["dense_by"] = dense ? Json(dense->name) : Json(nullptr);
    }
    fmt::print("\n");
    std::fflush(stdout);
    run_.csv(fmt::format("{},{},{},{},{},{},{},{},{},{:.6g},{},{},{},{},{},{}", one.batch, a, b, c, d, layout(),
                         name_of(run_.dtype()), precision(), forward, floor, over, backward, name_of(run_.device()),
                         run_.threads(), dense ? fmt::format("{:.6g}", dense->ms) : "",
                         times ? spread_of(times->forward) : ",,"));
    rows_.push_back(std::move(row));
  }

  void finish(std::int64_t batch) {
    for (const auto& [what, mean] : {std::pair("time / floor, d > 1", strided_),
                                     {"time / floor, d = 1", contiguous_},
                                     {"backward / forward", backward_}}) {
      if (mean.count() > 0) {
        fmt::print("{}: geometric mean {:.2f} of {}\n", what, mean.value(), mean.count());
      }
    }
    run_.finish(
        {{"batch", batch},
         {"layout", layout()},
         {"precision", precision()},
         {"copy_gb_per_s", rates_.copy * 1e-6},
         {"dense_gflop_per_s", rates_.dense * 1e-6}},
        rows_,
        {{.title = "Time of each pattern",
          .labels = {"pattern"},
          .series = {{"ms", "forward"}, {"dense_ms", "dense"}, {"floor_ms", "floor"}, {"backward_ms", "backward"}},
          .note = std::string(kDenseNote) + kFloorNote}});
  }

 private:
  const char* layout() const { return options_.bs_last ? "last" : "first"; }
  /// Only float32 has a choice.
  std::string precision() const { return run_.dtype() == DType::f32 ? options_.precision : ""; }

  Run& run_;
  const KroneckerOptions& options_;
  Algos algos_;
  Rates rates_;
  Mean strided_, contiguous_, backward_;
  Json rows_ = Json::array();
};

void bench(const KroneckerOptions& options) {
  const Patterns patterns = chosen_patterns(options);
  const Algos algos = read_algos(options);
  if (options.list) {
    for (const auto& [a, b, c, d] : patterns) {
      fmt::print("{},{},{},{}\n", a, b, c, d);
    }
    return;
  }
  Run run(options.run);
  Stopwatch clock(run.device(), run.executor(), run.rounds(), run.precision(options.precision));
  const std::vector<KroneckerCase> cases = all_cases(options, patterns, run);
  Progress progress(static_cast<int>(cases.size()), run.explains());
  progress.show("copy and dense product");
  const Rates rates = measure_rates(run.dtype(), clock);
  KroneckerReport report(run, options, algos, rates);
  progress.hide();
  report.header(cases.front().batch);
  for (const KroneckerCase& one : cases) {
    progress.show(text_of(one.pattern));
    clock.explain(run.explains());
    const KroneckerTimes times = algos.kernel ? measure(one, run.dtype(), clock) : KroneckerTimes{};
    clock.explain(false);
    const auto dense = algos.dense ? dense_of(one, run.dtype(), rates, clock) : std::nullopt;
    progress.hide();
    report.add(one, algos.kernel ? &times : nullptr, dense);
    progress.advance();
  }
  report.finish(cases.front().batch);
}

/// One chain: its patterns, and the sizes of its product.
struct Chain {
  std::string text;
  std::vector<KroneckerPtr> patterns;
  LayerSizes sizes;
};

Chain read_chain(const std::string& text, std::int64_t rows) {
  Chain chain{"", {}, {0, 0, rows}};
  for (const auto& sizes : parse_patterns(text, "bench: --chain")) {
    const auto pattern = KroneckerPattern::make(sizes);
    if (!chain.patterns.empty() && pattern->cols() != chain.sizes.out) {
      throw UsageError(fmt::format("bench: --chain: expected a factor of {} in features after {}, got {}",
                                   chain.sizes.out, chain.text, text_of(sizes)));
    }
    chain.text += (chain.text.empty() ? "" : " ") + text_of(sizes);
    chain.sizes.in = chain.patterns.empty() ? pattern->cols() : chain.sizes.in;
    chain.sizes.out = pattern->rows();
    chain.patterns.push_back(pattern);
  }
  return chain;
}

/// Chains beside the best dense product of their sizes. Floor: x, every w and y moved once, or the FLOPs.
void bench_chains(const KroneckerOptions& options) {
  Run run(options.run);
  std::vector<Chain> chains;
  for (const std::string& text : options.chains) {
    chains.push_back(read_chain(text, options.batch > 0 ? options.batch : usual_batch(run.device())));
  }
  Stopwatch clock(run.device(), run.executor(), run.rounds(), run.precision(options.precision));
  Progress progress(static_cast<int>(chains.size()), run.explains());
  const Rates rates = measure_rates(run.dtype(), clock);
  fmt::print("{}, {}, batch {}, median of {} rounds\n", run.machine(), name_of(run.dtype()), chains[0].sizes.rows,
             run.rounds());
  fmt::print("dense: the fastest dense product of the same sizes that this program has here\n");
  fmt::print("{:>10} {:>10} {:>7} {:>10} {:>8}  {:<33} {}\n", "ms", "floor ms", "/floor", "dense ms", "speedup",
             "dense by", "chain");
  run.csv("device,dtype,threads,chain,rows,in,out,parameters,ms,floor_ms,over_floor,dense_ms,speedup,dense_by");
  Json rows = Json::array();
  for (const auto& [text, patterns, sizes] : chains) {
    progress.show(text);
    const Dense dense = best_dense(sizes, run.dtype(), clock);
    LayerOperands operands(sizes, run.dtype(), run.device());
    const Layer layer = factor_layer(operands, patterns);
    Context context = clock.context();
    clock.explain(run.explains());
    const double ms = clock.cold([&] { layer.forward(context); }).ms;
    clock.explain(false);
    const double moved = static_cast<double>((sizes.in + sizes.out) * sizes.rows + layer.parameters);
    const double floor = std::max(moved * static_cast<double>(size_of(run.dtype())) / rates.copy,
                                  2 * static_cast<double>(layer.parameters * sizes.rows) / rates.dense);
    progress.hide();
    fmt::print("{:>10.4f} {:>10.4f} {:>7.2f} {:>10.4f} {:>7.2f}x  {:<33} {}\n", ms, floor, ms / floor, dense.ms,
               dense.ms / ms, dense.name, text);
    std::fflush(stdout);
    run.csv(fmt::format("{},{},{},\"{}\",{},{},{},{},{:.6g},{:.6g},{:.4f},{:.6g},{:.4f},{}", name_of(run.device()),
                        name_of(run.dtype()), run.threads(), text, sizes.rows, sizes.in, sizes.out, layer.parameters,
                        ms, floor, ms / floor, dense.ms, dense.ms / ms, dense.name));
    rows.push_back({{"chain", text},
                    {"rows", sizes.rows},
                    {"in", sizes.in},
                    {"out", sizes.out},
                    {"parameters", layer.parameters},
                    {"ms", ms},
                    {"floor_ms", floor},
                    {"over_floor", ms / floor},
                    {"dense_ms", dense.ms},
                    {"speedup", dense.ms / ms},
                    {"dense_by", dense.name}});
    progress.advance();
  }
  run.finish({{"copy_gb_per_s", rates.copy * 1e-6}, {"dense_gflop_per_s", rates.dense * 1e-6}}, rows,
             {{.title = "Time of each chain",
               .labels = {"chain"},
               .series = {{"ms", "this chain"}, {"dense_ms", "dense"}, {"floor_ms", "floor"}},
               .note = std::string(kDenseNote) + kFloorNote}});
}

}  // namespace

void add_bench_kronecker(CLI::App& bench_command) {
  const auto options = std::make_shared<KroneckerOptions>();
  CLI::App* const command =
      bench_command.add_subcommand("kronecker", "Kronecker-sparse products, patterns (a,b,c,d), and their gradients");
  auto* const grid = command->add_option("--grid", options->grid, "facts, sample, paper or a file of patterns (facts)");
  command->add_option("--patterns", options->patterns, "Patterns instead of a grid: \"1,64,64,64;6,64,64,1\"")
      ->excludes(grid);
  auto* const chains = command->add_option("--chain", options->chains,
                                           "A chain of factors in order of application, \"8,8,8,1;1,8,8,8\"; may be "
                                           "given several times");
  chains->excludes(grid)->excludes(command->get_option("--patterns"))->allow_extra_args(false);
  command->add_option("--batch,--rows", options->batch, "Rows of x (25088 on CUDA, 2048 on a CPU)")
      ->check(CLI::Range(std::int64_t{1}, std::int64_t{1} << 40).description(""));
  command->add_flag("--bs-last", options->bs_last, "Features before the batch in memory")->excludes(chains);
  command->add_flag("--backward", options->backward, "Time the gradients of x, w and bias too")->excludes(chains);
  command->add_option("--precision", options->precision, "Of float32 on CUDA: ieee, tf32, tf32x3 (ieee)");
  command->add_option("--algos", options->algos,
                      "kernel, dense or kernel,dense; dense is the best dense product of the same sizes");
  add_run_options(*command, options->run);
  add_explain_option(*command, options->run);
  command->add_flag("--list", options->list, "Print the patterns and measure nothing");
  command->footer(
      "facts: 10 patterns of different kinds. sample: these and 30 drawn evenly from the paper's. paper: all 376 of "
      "the\n"
      "KSMM paper's grid. A file has a pattern a line, a,b,c,d, or is a table with columns a, b, c and d, such as "
      "--csv\n"
      "writes. GB/s counts x, w and y once, GFLOP/s the non-zeros; on CUDA the L2 cache is flushed before each call.\n"
      "Rows reach the CSV as they are measured: a run that is interrupted keeps them. Its ms is the median, times has\n"
      "every round.\n"
      "Examples:\n"
      "  fretwork bench kronecker\n"
      "  fretwork bench kronecker --patterns '6,64,64,1;1,768,192,2' --batch 4096 --backward\n"
      "  fretwork bench kronecker --patterns 1,192,48,2 --device cuda:0 --explain\n"
      "  fretwork bench kronecker --chain '64,64,64,1;1,64,64,64' --rows 16 --dtype bf16\n"
      "  fretwork bench kronecker --grid paper --dtype bf16 --bs-last --csv paper.csv");
  command->callback([options] { options->chains.empty() ? bench(*options) : bench_chains(*options); });
}

}  // namespace fretwork::cli
