// `fretwork tune`: its suites, and merging their tables.
#include "tune.h"

#include <fmt/core.h>

#include <algorithm>
#include <cctype>
#include <csignal>
#include <memory>
#include <utility>

#include "commands.h"
#include "fretwork/error.h"

namespace fretwork::cli {
namespace {

std::atomic<bool> stopped = false;
static_assert(std::atomic<bool>::is_always_lock_free);

void stop(int signal) {
  stopped = true;
  std::signal(signal, SIG_DFL);
}

void merge(const std::vector<std::string>& files, const std::string& out) {
  TunedTable best;
  int rows = 0;
  for (const std::string& file : files) {
    if (!std::filesystem::exists(file)) {
      throw UsageError("tune: --best: expected tables, got " + file + ", which is not there");
    }
    rows += best.merge(TunedTable::read(file));
  }
  if (out.empty()) {
    fmt::print("{}", best.text());
    return;
  }
  best.write(out);
  for (const auto& [device, ops] : best.all()) {
    for (const auto& [op, of_op] : ops) {
      fmt::print("{}, {}: {} problems\n", device, op, of_op.size());
    }
  }
  fmt::print("wrote {}\n", out);
}

}  // namespace

std::filesystem::path usual_table(const std::string& op, const std::string& device) {
  const std::filesystem::path folder = tuned_folder();
  if (folder.empty()) {
    throw UsageError("tune: --out: expected a file, HOME and FRETWORK_TUNE_DIR being unset, got nothing");
  }
  std::string name;
  for (const char letter : device) {
    const bool plain = std::isalnum(static_cast<unsigned char>(letter)) != 0;
    name += plain ? static_cast<char>(std::tolower(static_cast<unsigned char>(letter))) : '-';
  }
  name.erase(std::unique(name.begin(), name.end(), [](char a, char b) { return a == '-' && b == '-'; }), name.end());
  return folder / (op + "." + name + ".json");
}

const std::atomic<bool>& stopped_by_user() {
  std::signal(SIGINT, stop);
  std::signal(SIGTERM, stop);
  return stopped;
}

TunedRow row_of(const std::string& problem, std::int64_t batch, const std::vector<Finish>& finishes,
                const Finish* winner) {
  TunedRow row;
  row.batch = batch;
  row.heuristic_ms = finishes.front().rounds.empty() ? 0 : finishes.front().times().ms;
  for (const Finish& one : finishes) {
    if (one.verdict.takes && !one.verdict.right) {
      fmt::print(
          stderr, "fretwork: tune: {}: {}: {}, left out\n", problem, one.name,
          one.error.empty() ? fmt::format("wrong result, mean squared error {:.3g}", one.verdict.mse) : one.error);
    }
    if (!one.rounds.empty()) {
      row.ms_of[one.name] = one.times().ms;
    }
  }
  if (winner == nullptr) {
    throw Error("tune: " + problem + ": expected a candidate with the right result, got none");
  }
  row.choice = winner->name;
  row.ms = winner->times().ms;
  row.std = winner->times().std;
  row.mse = winner->verdict.mse;
  return row;
}

void add_tune(CLI::App& app) {
  struct Options {
    std::vector<std::string> best;
    std::string out;
  };
  const auto options = std::make_shared<Options>();
  CLI::App* const tune = app.add_subcommand("tune", "Measure which way of an operator is fastest on this machine");
  tune->require_subcommand(0, 1);
  auto* const best = tune->add_option("--best", options->best, "Merge these tables: the fastest row of each problem");
  tune->add_option("--out", options->out, "Where the merged table goes (standard output)")->needs(best);
  tune->footer(
      "An operator looks a problem up in the tables of $FRETWORK_TUNE_DIR (~/.local/share/fretwork), then in those "
      "that\n"
      "came with the library, and else chooses by itself.\n"
      "Examples:\n"
      "  fretwork tune kronecker --short\n"
      "  fretwork tune --best monday.json tuesday.json --out best.json");
  add_tune_kronecker(*tune);
  tune->callback([tune, options] {
    const bool suite = !tune->get_subcommands().empty();
    if (suite && !options->best.empty()) {
      throw UsageError("tune: --best: expected without a suite, got both");
    }
    if (!suite && options->best.empty()) {
      throw UsageError("tune: expected kronecker or --best, got nothing (try: fretwork tune --help)");
    }
    if (!suite) {
      merge(options->best, options->out);
    }
  });
}

}  // namespace fretwork::cli
