// `fretwork advise`: which structure pays for a linear layer of given sizes, measured here beside the best dense one.
#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <memory>
#include <optional>

#include "bench.h"
#include "commands.h"
#include "fretwork/error.h"
#include "layers.h"
#include "machine.h"
#include "page.h"
#include "terminal.h"
#include "tune.h"

namespace fretwork::cli {
namespace {

constexpr std::array kStructures = {"two_four", "block", "monarch"};

struct AdviseOptions {
  std::string sizes;
  std::int64_t rows = 16;
  std::vector<std::string> kinds = {kStructures.begin(), kStructures.end()};
  bool training = false, json = false;
  RunOptions run;
};

/// One layer that was measured.
struct AdviceRow {
  const Layer* layer;
  double ms;
};

/// "4096x14336".
LayerSizes read_sizes(const AdviseOptions& options) {
  LayerSizes sizes{0, 0, options.rows};
  const char *const begin = options.sizes.data(), *const end = begin + options.sizes.size();
  const auto [cross, first] = std::from_chars(begin, end, sizes.in);
  if (first == std::errc() && cross != end && *cross == 'x') {
    const auto [behind, second] = std::from_chars(cross + 1, end, sizes.out);
    constexpr std::int64_t kMost = 1 << 20;
    if (second == std::errc() && behind == end && std::clamp<std::int64_t>(sizes.in, 1, kMost) == sizes.in &&
        std::clamp<std::int64_t>(sizes.out, 1, kMost) == sizes.out) {
      return sizes;
    }
  }
  throw UsageError("advise: INxOUT: expected two sizes from 1 to 1048576, such as 4096x14336, got " + options.sizes);
}

void check_kinds(const AdviseOptions& options) {
  for (const std::string& kind : options.kinds) {
    if (std::ranges::find(kStructures, kind) == kStructures.end()) {
      throw UsageError("advise: --kinds: expected some of two_four, block, monarch, got " + kind);
    }
  }
}

/// All layers are there at once, about seven weights' worth, and their operands.
void check_memory(const LayerSizes& sizes, const Run& run, bool training) {
  const bool gpu = run.device().type == DeviceType::cuda;
  const double have = gpu ? static_cast<double>(cuda::device_info(run.device().index).memory) : memory_bytes();
  const auto in = static_cast<double>(sizes.in), out = static_cast<double>(sizes.out);
  const double weights = (training ? 10 : 7) * in * out;
  const double operands = (training ? 2 : 1) * static_cast<double>(sizes.rows) * (in + out);
  const double need = (weights + operands) * static_cast<double>(size_of(run.dtype()));
  if (need > have) {
    throw Error(fmt::format("advise: INxOUT: expected layers that fit into the {} of {}, got {}", bytes_text(have),
                            name_of(run.device()), bytes_text(need)));
  }
}

std::string in_a_sentence(const AdviceRow& row, double dense_ms) {
  const double speedup = dense_ms / row.ms;
  return row.layer->name + (speedup >= 1.05 ? fmt::format(" is {:.1f}× as fast as dense", speedup)
                                            : fmt::format(" is no faster ({:.2f}×)", speedup));
}

/// Rows of layers that were measured, the fastest first; of the dense ones the fastest alone.
class ProgramAdvice {
 public:
  ProgramAdvice(const LayerSizes& sizes, bool training, const Run& run, std::vector<AdviceRow> measured)
      : sizes_(sizes), training_(training), run_(run) {
    std::ranges::stable_sort(measured, {}, &AdviceRow::ms);
    for (const AdviceRow& row : measured) {
      const bool is_dense = row.layer->kind == "dense";
      if (is_dense && dense_.layer != nullptr) {
        continue;
      }
      dense_ = is_dense ? row : dense_;
      rows_.push_back(row);
    }
  }

  /// One sentence: the fastest of each kind against dense.
  std::string verdict() const {
    std::string told;
    std::vector<std::string> kinds = {"dense"};
    for (const AdviceRow& row : rows_) {
      if (std::ranges::find(kinds, row.layer->kind) == kinds.end()) {
        kinds.push_back(row.layer->kind);
        told += (told.empty() ? "" : ", ") + in_a_sentence(row, dense_.ms);
      }
    }
    return fmt::format("For {}: {}.", problem(), told.empty() ? "nothing else fits" : told);
  }

  Json json() const {
    Json all = run_.facts();
    all.update({{"in_features", sizes_.in}, {"out_features", sizes_.out}, {"batch_rows", sizes_.rows}});
    all.update({{"training", training_}, {"dense", dense_.layer->name}, {"verdict", verdict()}});
    all["rows"] = Json::array();
    for (const AdviceRow& row : rows_) {
      const Layer& layer = *row.layer;
      all["rows"].push_back({{"kind", layer.kind},
                             {"name", layer.kind == "dense" ? layer.kind : layer.name},
                             {"recipe", layer.recipe.empty() ? Json() : Json(layer.recipe)},
                             {"ms", row.ms},
                             {"dense_ms", dense_.ms},
                             {"speedup", dense_.ms / row.ms},
                             {"parameters", layer.parameters},
                             {"memory", layer.memory}});
    }
    return all;
  }

  void print() const {
    fmt::print("{}, {}, {} row{} of {} → {}, {}, median of {} rounds\n", run_.machine(), name_of(run_.dtype()),
               sizes_.rows, sizes_.rows == 1 ? "" : "s", sizes_.in, sizes_.out,
               training_ ? "forward and backward" : "forward", run_.rounds());
    fmt::print("dense: the fastest dense product that this program has here, {}\n", dense_.layer->name);
    fmt::print("{:<9} {:<32} {:>10} {:>9} {:>12} {:>12}\n", "kind", "recipe", "ms", "speedup", "parameters", "memory");
    for (const AdviceRow& row : rows_) {
      const Layer& layer = *row.layer;
      fmt::print("{:<9} {:<32} {:>10.4f} {:>8.2f}× {:>12} {:>12}\n", layer.kind,
                 layer.kind == "two_four" ? "TwoFour()" : layer.recipe, row.ms, dense_.ms / row.ms,
                 count_text(layer.parameters), bytes_text(static_cast<double>(layer.memory)));
    }
    fmt::print("{}\n", verdict());
  }

 private:
  std::string problem() const {
    return fmt::format("{} row{} of {} → {} in {} on {}, {}", sizes_.rows, sizes_.rows == 1 ? "" : "s", sizes_.in,
                       sizes_.out, name_of(run_.dtype()), run_.machine(),
                       training_ ? "forward and backward" : "forward");
  }

  LayerSizes sizes_;
  bool training_;
  const Run& run_;
  std::vector<AdviceRow> rows_;
  AdviceRow dense_{nullptr, 0};
};

TuneCandidate candidate_of(const Layer& layer, LayerOperands& operands, Stopwatch& clock) {
  const auto context = std::make_shared<Context>(clock.context());
  const auto call = [&layer, &operands, context] {
    layer.forward(*context);
    if (operands.training) {
      layer.backward(*context);
    }
  };
  const auto verify = [&layer, &operands, context] { return check(layer, operands, *context); };
  const auto round = [call, &clock, calls = 0]() mutable {
    calls = calls > 0 ? calls : clock.calls_for(call);
    call();  // what ran before has left the caches to itself
    return clock.cold_round(call, calls);
  };
  return {layer.recipe.empty() ? layer.name : layer.recipe, verify, round};
}

/// Each verified, then all in turn, round by round.
std::vector<AdviceRow> measured_layers(const std::vector<Layer>& layers, LayerOperands& operands, Stopwatch& clock,
                                       int rounds) {
  std::vector<TuneCandidate> candidates;
  Progress progress(static_cast<int>(layers.size()) * (rounds + 1));
  for (const Layer& layer : layers) {
    candidates.push_back(candidate_of(layer, operands, clock));
    const TuneCandidate one = candidates.back();
    candidates.back().round = [&progress, one] {
      progress.show(one.name);
      const double ms = one.round();
      progress.advance();
      return ms;
    };
    candidates.back().verify = [&progress, one] {
      progress.show(one.name);
      const Verdict verdict = one.verify();
      progress.advance();
      return verdict;
    };
  }
  const auto finishes = race(candidates, {.rounds = rounds, .favourite = "", .drops = false}, stopped_by_user());
  progress.hide();
  if (!finishes) {
    throw Interrupted("advise: interrupted");
  }
  std::vector<AdviceRow> rows;
  for (std::size_t n = 0; n < layers.size(); ++n) {
    const Finish& finish = (*finishes)[n];
    if (!finish.verdict.right) {
      throw Error(fmt::format("advise: {}: expected the product with its dense matrix, got {}", finish.name,
                              finish.error.empty() ? "another result" : finish.error));
    }
    rows.push_back({&layers[n], finish.times().ms});
  }
  return rows;
}

void advise(const AdviseOptions& options) {
  const LayerSizes sizes = read_sizes(options);
  check_kinds(options);
  Run run(options.run);
  check_memory(sizes, run, options.training);
  Stopwatch clock(run.device(), run.executor(), run.rounds());
  LayerOperands operands(sizes, run.dtype(), run.device(), options.training);
  std::vector<Layer> layers = dense_layers(operands);
  std::ranges::move(sparse_layers(operands, options.kinds), std::back_inserter(layers));
  const ProgramAdvice advice(sizes, options.training, run, measured_layers(layers, operands, clock, run.rounds()));
  const Json all = advice.json();
  if (options.json) {
    fmt::print("{}\n", all.dump(2));
  } else {
    advice.print();
  }
  run.write_page(
      {.title = fmt::format("fretwork advise {} --rows {}", options.sizes, sizes.rows),
       .summary = advice.verdict(),
       .facts = {{"dense by", all["dense"]}, {"pass", options.training ? "forward and backward" : "forward"}},
       .plots = {{.title = "Time",
                  .labels = {"name"},
                  .series = {{"ms", "this layer"}, {"dense_ms", "dense"}},
                  .note = kDenseNote}},
       .rows = all["rows"]});
}

}  // namespace

void add_advise(CLI::App& app) {
  const auto options = std::make_shared<AdviseOptions>();
  options->run.command = "advise";
  options->run.dtype = "bfloat16";  // fw.advise has the same defaults
  CLI::App* const command = app.add_subcommand("advise", "Which structure pays for a linear layer, measured here");
  command->add_option("INxOUT", options->sizes, "Input and output features, 4096x14336")->required();
  command->add_option("--rows", options->rows, "Rows of the input, as batch times positions (16)")
      ->check(CLI::Range(std::int64_t{1}, std::int64_t{1} << 24).description(""));
  command->add_option("--kinds", options->kinds, "Some of two_four, block, monarch (all)")->delimiter(',');
  command->add_flag("--training", options->training, "Measure forward and backward");
  command->add_flag("--json", options->json, "Print JSON");
  add_machine_options(*command, options->run);
  add_html_option(*command, options->run);
  command->footer(
      "Measures a dense layer and every structure that fits: 2:4, blocks of 32 to 128 at densities of 0.5 to 0.1 as\n"
      "far as whole blocks make them, Monarch of several sizes. Each result is checked against float64 first, then\n"
      "all run in turn. Dense is the fastest dense product that the program has, cuBLASLt where there is one;\n"
      "fw.advise in Python compares with torch's. On CUDA the L2 cache is flushed before each call. Memory is that of\n"
      "the weight with its indices.\n"
      "Examples:\n"
      "  fretwork advise 4096x14336 --rows 16 --dtype bf16\n"
      "  fretwork advise 1024x1024 --rows 4096 --training --json");
  command->callback([options] { advise(*options); });
}

}  // namespace fretwork::cli
