// `fretwork tune kronecker`: the fastest way of each product, into a table that the op reads.
#include <fmt/core.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <optional>
#include <utility>

#include "bench.h"
#include "commands.h"
#include "fretwork/error.h"
#include "kronecker_case.h"
#include "kronecker_contest.h"
#include "kronecker_grid.h"
#include "terminal.h"
#include "tune.h"

namespace fretwork::cli {
namespace {

using kronecker::Config;

constexpr const char* kOp = "kronecker";

struct TuneOptions {
  std::optional<std::string> patterns, candidates;
  std::string precision = "ieee", out;
  std::int64_t batch = 0;
  bool brief = false, lengthy = false, bs_last = false, resume = false, show = false, compare = false;
  RunOptions run;
};

Patterns chosen_patterns(const TuneOptions& options) {
  if (!options.patterns) {
    return *named_grid(options.lengthy ? "paper" : "sample");
  }
  if (std::filesystem::exists(*options.patterns)) {
    return read_patterns(*options.patterns, "tune");
  }
  if (options.patterns->find(',') == std::string::npos) {
    throw UsageError("tune: --patterns: expected a file or a,b,c,d, got " + *options.patterns);
  }
  return parse_patterns(*options.patterns, "tune: --patterns");
}

/// "rows:64,rows:256" among those that some case has; empty when all are meant.
std::vector<Config> read_configs(const std::optional<std::string>& text, const std::vector<KroneckerCase>& cases,
                                 DType dtype, const Context& context) {
  std::vector<Config> list, known;
  for (const KroneckerCase& one : cases) {
    for (const Config& choice : configs_for(one, dtype, context)) {
      if (std::ranges::find(known, choice) == known.end()) {
        known.push_back(choice);
      }
    }
  }
  for (std::size_t begin = 0; text && begin <= text->size();) {
    const std::size_t end = std::min(text->find(',', begin), text->size());
    const std::string name = text->substr(begin, end - begin);
    const auto choice = std::ranges::find(known, name, [](const Config& one) { return kronecker::text_of(one); });
    if (choice == known.end()) {
      std::string names;
      for (const Config& one : known) {
        names += (names.empty() ? "" : ",") + kronecker::text_of(one);
      }
      throw UsageError("tune: --candidates: expected some of " + names + ", got '" + name + "'");
    }
    list.push_back(*choice);
    begin = end + 1;
  }
  return list;
}

/// How the table compares with doing without, over the problems so far.
class Gain {
 public:
  void add(const std::string& pattern, const TunedRow& row) {
    if (row.heuristic_ms == 0) {
      return;  // its result was wrong
    }
    const double gain = row.heuristic_ms / row.ms;
    mean_.add(gain);
    if (gain > largest_) {
      largest_ = gain;
      where_ = pattern;
    }
  }
  void print() const {
    if (mean_.count() > 0) {
      fmt::print("heuristic / table: geometric mean {:.3f} of {}, largest {:.2f} at {}\n", mean_.value(), mean_.count(),
                 largest_, where_);
    }
  }

 private:
  Mean mean_;
  double largest_ = 0;
  std::string where_;
};

/// Columns of the CSV: the kernel and its parameters, empty for those that it has not.
std::string configuration_of(const TunedRow& row) {
  // A row of a table that an older or a newer version wrote may name another.
  const auto choice = kronecker::parse_config(row.choice);
  const kronecker::Columns columns = choice ? kronecker::columns_of(*choice) : kronecker::Columns{row.choice};
  std::string text(columns.kernel);
  for (const int value : columns.parameters) {
    text += value > 0 ? fmt::format(",{}", value) : ",";
  }
  return text;
}

class TuneReport {
 public:
  /// `rates` are for floors; zeros where nothing shows them.
  TuneReport(Run& run, const TuneOptions& options, const Rates& rates) : run_(run), options_(options), rates_(rates) {}

  void header(std::int64_t batch, int rounds) {
    fmt::print("{}, {}{}, batch {} ({}), median of {} rounds\n", run_.machine(), name_of(run_.dtype()),
               precision().empty() ? "" : " " + precision(), batch, layout(), rounds);
    fmt::print("{:<20} {:<14} {:>10} {:>9} {:>9} {:>12} {:>6}\n", "pattern", "choice", "ms", "std", "mse",
               "heuristic ms", "/ms");
    std::fflush(stdout);
    run_.csv("batch_size,a,b,c,d,kernel," + fmt::format("{}", fmt::join(kronecker::kParameters, ",")) +
             ",ms,std,mse,heuristic_ms,layout,dtype,precision,device,configuration");
  }

  void add(const KroneckerCase& one, const TunedRow& row) {
    const auto& [a, b, c, d] = one.pattern;
    fmt::print("{:<20} {:<14} {:>10.4f} {:>9.4f} {:>9.2g} {:>12.4f} {:>6.2f}\n", text_of(one.pattern), row.choice,
               row.ms, row.std, row.mse, row.heuristic_ms, row.heuristic_ms / row.ms);
    std::fflush(stdout);
    run_.csv(fmt::format("{},{},{},{},{},{},{:.6g},{:.3g},{:.3g},{:.6g},{},{},{},\"{}\",{}", row.batch, a, b, c, d,
                         configuration_of(row), row.ms, row.std, row.mse, row.heuristic_ms, layout(),
                         name_of(run_.dtype()), precision(), device_name(run_.device()), row.choice));
    rows_.push_back({{"pattern", {a, b, c, d}},
                     {"batch", row.batch},
                     {"choice", row.choice},
                     {"ms", row.ms},
                     {"std", row.std},
                     {"mse", row.mse},
                     {"heuristic_ms", row.heuristic_ms},
                     {"floor_ms", rates_.copy > 0 ? Json(floor_of(one, run_.dtype(), rates_)) : Json()}});
    gain_.add(text_of(one.pattern), row);
  }

  void finish() {
    gain_.print();
    Page page;
    page.title = options_.run.title;
    page.facts = {{"layout", layout()}, {"precision", precision()}};
    page.plots = {{.title = "Time of each pattern",
                   .labels = {"pattern", "batch"},
                   .series = {{"ms", "the table's kernel"}, {"heuristic_ms", "the heuristic's"}, {"floor_ms", "floor"}},
                   .note = kFloorNote}};
    page.rows = rows_;
    run_.write_page(std::move(page));
  }

 private:
  const char* layout() const { return options_.bs_last ? "last" : "first"; }
  std::string precision() const { return run_.dtype() == DType::f32 ? options_.precision : ""; }

  Run& run_;
  const TuneOptions& options_;
  Rates rates_;
  Gain gain_;
  Json rows_ = Json::array();
};

void show(const std::vector<KroneckerCase>& cases, DType dtype, const Context& context) {
  for (const KroneckerCase& one : cases) {
    const kronecker::Chosen found = chosen_for(one, dtype, context);
    fmt::print("{:<20} {:<14} {}\n", text_of(one.pattern), kronecker::text_of(found.choice), found.source);
  }
}

/// The heuristic's, and those of `choices` that were asked for or all of them.
std::vector<TuneCandidate> candidates_of(KroneckerContest& contest, const std::vector<Config>& choices,
                                         const std::vector<Config>& wanted) {
  std::vector<TuneCandidate> list;
  for (const Config& choice : choices) {
    const bool asked = wanted.empty() || std::ranges::find(wanted, choice) != wanted.end();
    if (asked || choice == Config{}) {
      list.push_back(contest.candidate(choice));
    }
  }
  return list;
}

/// What a call that the tables answer with `choice` runs as: the heuristic, which stands first, where it cannot.
const Finish* ran_as(const std::vector<Finish>& finishes, const Config& choice) {
  const auto named = std::ranges::find(finishes, kronecker::text_of(choice), &Finish::name);
  const Finish& one = named != finishes.end() && !named->rounds.empty() ? *named : finishes.front();
  return one.rounds.empty() ? nullptr : &one;
}

class Suite {
 public:
  explicit Suite(const TuneOptions& options)
      : options_(options),
        run_(options.run),
        race_{options.run.rounds > 0 ? options.run.rounds
              : options.lengthy      ? 15
                                     : 7,
              kronecker::text_of(Config{})},
        clock_(run_.device(), run_.executor(), race_.rounds, run_.precision(options.precision)) {
    for (const auto& pattern : chosen_patterns(options)) {
      cases_.push_back({pattern, options.batch > 0 ? options.batch : usual_batch(run_.device()), options.bs_last});
      check_fits(cases_.back(), run_.dtype(), run_.device(), "tune");
    }
    wanted_ = read_configs(options.candidates, cases_, run_.dtype(), clock_.context());
  }

  void run() {
    if (options_.show) {
      return show(cases_, run_.dtype(), clock_.context());
    }
    std::filesystem::path file = options_.out;
    std::optional<TuningFile> table;
    if (!options_.compare) {
      const std::string device = device_name(run_.device());
      file = options_.out.empty() ? usual_table(kOp, device) : file;
      table.emplace(file, device, kOp);
    }
    const std::atomic<bool>& stopped = stopped_by_user();
    TuneReport report(run_, options_, options_.run.html.empty() ? Rates{} : measure_rates(run_.dtype(), clock_));
    report.header(cases_.front().batch, race_.rounds);
    Progress progress(static_cast<int>(cases_.size()));
    int done = 0;
    for (const KroneckerCase& one : cases_) {
      progress.show(text_of(one.pattern));
      const std::optional<TunedRow> row = row_for(one, table, stopped);
      progress.hide();
      if (!row) {
        throw Interrupted(fmt::format("tune: interrupted: {} of {} are done{}", done, cases_.size(),
                                      table ? " and in " + file.string() + "; --resume goes on from there" : ""));
      }
      report.add(one, *row);
      progress.advance();
      ++done;
    }
    report.finish();
    if (table) {
      fmt::print("wrote {}\n", file.string());
    }
  }

 private:
  /// From the table where that will do, else measured. Nothing when the user stops it.
  std::optional<TunedRow> row_for(const KroneckerCase& one, std::optional<TuningFile>& table,
                                  const std::atomic<bool>& stopped) {
    const Context context = clock_.context();
    const std::string problem = tuned_problem(one, run_.dtype(), context);
    if (const TunedRow* const known = table && options_.resume ? table->find(problem) : nullptr) {
      return *known;
    }
    KroneckerContest contest(one, run_.dtype(), clock_);
    const Config now = options_.compare ? chosen_for(one, run_.dtype(), context).choice : Config{};
    const auto finishes = race(
        candidates_of(contest, configs_for(one, run_.dtype(), context), options_.compare ? std::vector{now} : wanted_),
        race_, stopped);
    if (!finishes) {
      return std::nullopt;
    }
    const TunedRow row =
        row_of(problem, one.batch, *finishes, options_.compare ? ran_as(*finishes, now) : winner_of(*finishes, race_));
    if (table) {
      table->add(problem, row);
    }
    return row;
  }

  const TuneOptions& options_;
  Run run_;
  RaceOptions race_;
  Stopwatch clock_;
  std::vector<Config> wanted_;
  std::vector<KroneckerCase> cases_;
};

}  // namespace

void add_tune_kronecker(CLI::App& tune) {
  const auto options = std::make_shared<TuneOptions>();
  options->run.command = "tune";
  options->run.rounds = 0;
  CLI::App* const command = tune.add_subcommand(kOp, "Kronecker-sparse products, patterns (a,b,c,d)");
  auto* const brief = command->add_flag("--short", options->brief, "40 patterns, 7 rounds (unless --long)");
  auto* const lengthy = command->add_flag("--long", options->lengthy, "The 376 patterns of the KSMM paper, 15 rounds");
  lengthy->excludes(brief);
  command->add_option("--patterns", options->patterns, "A file of patterns, or \"1,64,64,64;6,64,64,1\"")
      ->excludes(brief)
      ->excludes(lengthy);
  command->add_option("--batch,--rows", options->batch, "Rows of x (25088 on CUDA, 2048 on a CPU)")
      ->check(CLI::Range(std::int64_t{1}, std::int64_t{1} << 40).description(""));
  command->add_flag("--bs-last", options->bs_last, "Features before the batch in memory");
  command->add_option("--precision", options->precision, "Of float32 on CUDA: ieee, tf32, tf32x3 (ieee)");
  add_machine_options(*command, options->run, "7, or 15 with --long");
  add_html_option(*command, options->run);
  command->add_option("--candidates", options->candidates, "Only these, beside the heuristic's: rows:64,lanes:192");
  auto* const out = command->add_option("--out", options->out, "The table to add to (the user's, which the op reads)");
  auto* const resume = command->add_flag("--resume", options->resume, "Keep the rows that the table has already");
  auto* const csv = command->add_option("--csv", options->run.csv, "Write the rows to this file too");
  auto* const look = command->add_flag("--show", options->show, "Measure nothing: print what a call takes, and why");
  look->excludes(out)->excludes(resume)->excludes(csv)->excludes(command->get_option("--html"));
  command->add_flag("--compare", options->compare, "Measure what the tables say against the heuristic; write no table")
      ->excludes(out)
      ->excludes(resume)
      ->excludes(look);
  command->footer(
      "Every candidate's result is checked before it is timed. The heuristic's choice, \"best\", stays unless another\n"
      "is 2 % faster, and faster by more than the rounds of either differ. A row counts for batches between the same\n"
      "two powers of two. The table is written after every problem: a run may be interrupted or killed, and --resume\n"
      "goes on.\n"
      "Examples:\n"
      "  fretwork tune kronecker --dtype fp16 --bs-last\n"
      "  fretwork tune kronecker --patterns '1,768,192,2' --batch 4096 --show\n"
      "  fretwork tune kronecker --long --resume --csv tuned.csv");
  command->callback([options] { Suite(*options).run(); });
}

}  // namespace fretwork::cli
