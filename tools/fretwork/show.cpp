// `fretwork show`: the facts of a pattern and a picture of it.
#include <fmt/core.h>
#include <fmt/format.h>

#include <algorithm>
#include <iostream>
#include <iterator>
#include <memory>
#include <nlohmann/json.hpp>
#include <span>

#include "commands.h"
#include "fretwork/error.h"
#include "fretwork/ops.h"
#include "fretwork/tensor.h"
#include "pattern/pattern_stats.h"
#include "pattern/picture.h"
#include "pattern/text.h"
#include "picture.h"
#include "terminal.h"
#include "two_four_matrix.h"

namespace fretwork::cli {
namespace {

/// What a chain's plan is shown for.
constexpr const char* kPlanned[] = {"sm_90a", "sm_80", "cpu"};

struct ShowOptions {
  std::vector<std::string> patterns;
  std::int64_t head = 0;
  int width = 0;
  std::string name, png, svg;
  bool json = false;
};

std::string shortened(const std::string& text, std::size_t most) {
  return text.size() <= most ? text
                             : fmt::format("{}… ({} characters)", text.substr(0, most), count_text(std::ssize(text)));
}

/// A text that is no pattern is the user's mistake. Standard input is for texts longer than an argument may be.
PatternPtr read_pattern(std::string text) {
  if (text == "-") {
    text.assign(std::istreambuf_iterator<char>(std::cin), {});
    text.erase(text.find_last_not_of(" \t\r\n") + 1);
  }
  if (text.find('(') == text.npos) {
    throw UsageError(
        fmt::format("show: PATTERN: expected one such as random_blocks((1,64,64),32,0.1,0), or - for standard input, "
                    "got '{}' (try: fretwork show --help)",
                    shortened(text, 60)));
  }
  try {
    return parse_pattern(text);
  } catch (const Error& error) {
    const std::string parser = "Pattern.parse: text: ";  // the library's name for the argument
    std::string why = error.what();
    why.erase(0, why.starts_with(parser) ? parser.size() : 0);
    if (why.starts_with("expected one of ")) {
      why.insert(why.find("one of"), "two_four or ");  // which is no pattern, but shown
    }
    throw UsageError(fmt::format("show: PATTERN: {} (try: fretwork show --help)", why));
  }
}

struct Units {
  const char* name;       ///< what nnz counts
  std::int64_t elements;  ///< in each
};

Units units_of(const Pattern& pattern) {
  if (const auto* layout = dynamic_cast<const BlockLayout*>(&pattern)) {
    return {"blocks", layout->sizes().block_rows * layout->sizes().block_cols};
  }
  return {"elements", 1};
}

/// The family's name; a regular pattern made of others is "regular".
std::string kind_of(const Pattern& pattern) {
  const std::string& text = pattern.text();
  const bool made = text::is_compound(text) || text.ends_with(".T") || text.ends_with(']');
  return made ? "regular" : text.substr(0, text.find('('));
}

std::string head_line(const HeadFacts& facts, const char* unit) {
  const auto empty =
      facts.empty_rows > 0 && facts.longest_row > 0 ? fmt::format(", {} empty", count_text(facts.empty_rows)) : "";
  return fmt::format("nnz {}; {} to {} {} in a row{}", count_text(facts.nnz), count_text(facts.shortest_row),
                     count_text(facts.longest_row), unit, empty);
}

void print_facts(const PatternPtr& shown, const PatternStats& stats) {
  const Pattern& pattern = *shown;
  constexpr std::int64_t kHeadsListed = 8;
  const auto [unit, elements] = units_of(pattern);
  const auto line = [](const char* name, const std::string& value) { fmt::print("{:<9}{}\n", name, value); };
  line("kind", kind_of(pattern));
  line("shape", shape_text(pattern.shape()));
  if (const auto* layout = dynamic_cast<const BlockLayout*>(&pattern)) {
    const auto& s = layout->sizes();
    line("blocks", fmt::format("{} x {} of {} x {}, {} head{}", s.rows, s.cols, s.block_rows, s.block_cols, s.heads,
                               s.heads == 1 ? "" : "s"));
  }
  const auto* kronecker = dynamic_cast<const KroneckerPattern*>(&pattern);
  if (kronecker != nullptr) {
    const auto& [a, b, c, d] = kronecker->sizes();
    line("factor", d == 1 ? fmt::format("{} of {} x {} on the diagonal", a, b, c)
                          : fmt::format("{} on the diagonal, each {} interleaved ones of {} x {}", a, d, b, c));
    line("rows", fmt::format("{} elements in each, {} apart", count_text(c), d));
  }
  const auto* regular = dynamic_cast<const RegularPattern*>(&pattern);
  if (regular != nullptr) {
    const auto each = [&](const char* name, const std::string& lines, std::size_t from) {
      for (std::size_t at = from; at < lines.size(); at = lines.find('\n', at) + 1) {
        line(name, lines.substr(at + 2, lines.find('\n', at) - at - 2));  // beyond the indent
      }
    };
    const std::string parts = regular->describe();
    each("parts", parts, parts.find('\n') + 1);
    each("cost", attention_cost(shown), 0);
  }
  const std::int64_t all = stats.heads() * stats.rows() * stats.cols() / elements;
  line("nnz", fmt::format("{} of {} {}", count_text(pattern.nnz()), count_text(all), unit));
  line("density", fmt::format("{:.4g} %", 100 * pattern.density()));
  const double stored = 2.0 * static_cast<double>(pattern.nnz()) * static_cast<double>(elements);
  const double dense =
      2.0 * static_cast<double>(stats.heads()) * static_cast<double>(stats.rows()) * static_cast<double>(stats.cols());
  if (regular == nullptr) {  // whose scores are not stored
    line("fp16", fmt::format("{} stored, {} if dense", bytes_text(stored), bytes_text(dense)));
  }
  for (std::int64_t h = 0; kronecker == nullptr && h < std::min(stats.heads(), kHeadsListed); ++h) {
    line(regular != nullptr ? "rows" : fmt::format("head {}", h).c_str(), head_line(stats.facts(h), unit));
  }
  if (stats.heads() > kHeadsListed) {
    line("", fmt::format("… and {} more (all of them with --json)", stats.heads() - kHeadsListed));
  }
  line("text", shortened(pattern.text(), 60));
}

void print_json(const Pattern& pattern, const PatternStats& stats) {
  const auto [unit, elements] = units_of(pattern);
  nlohmann::ordered_json json = {{"kind", kind_of(pattern)},
                                 {"shape", std::vector(pattern.shape().begin(), pattern.shape().end())},
                                 {"unit", unit},
                                 {"nnz", pattern.nnz()},
                                 {"density", pattern.density()},
                                 {"bytes_fp16", 2 * pattern.nnz() * elements},
                                 {"heads", nlohmann::ordered_json::array()},
                                 {"text", pattern.text()}};
  if (const auto* layout = dynamic_cast<const BlockLayout*>(&pattern)) {
    json["block"] = {layout->sizes().block_rows, layout->sizes().block_cols};
  }
  if (const auto* kronecker = dynamic_cast<const KroneckerPattern*>(&pattern)) {
    const auto& [a, b, c, d] = kronecker->sizes();
    json["weight_shape"] = {a, b, c, d};
  }
  for (std::int64_t h = 0; h < stats.heads(); ++h) {
    const HeadFacts facts = stats.facts(h);
    json["heads"].push_back({{"nnz", facts.nnz},
                             {"shortest_row", facts.shortest_row},
                             {"longest_row", facts.longest_row},
                             {"empty_rows", facts.empty_rows}});
  }
  fmt::print("{}\n", json.dump(2));
}

/// Several Kronecker factors, in order of application: what they make together, and how it would run.
void show_chain(const ShowOptions& options) {
  if (!options.png.empty() || !options.svg.empty()) {
    throw UsageError("show: PATTERN: expected one to draw, got several");
  }
  std::vector<KroneckerPtr> chain;
  std::int64_t nnz = 0;
  std::string factors;
  for (const std::string& text : options.patterns) {
    const auto factor = std::dynamic_pointer_cast<const KroneckerPattern>(read_pattern(text));
    if (factor == nullptr) {
      throw UsageError("show: PATTERN: expected several of Kronecker factors only, got " + shortened(text, 60));
    }
    chain.push_back(factor);
    nnz += factor->nnz();
    factors += (factors.empty() ? "" : ", then ") + factor->text();
  }
  std::vector<std::vector<std::string>> plans;
  try {
    for (const char* const arch : kPlanned) {
      plans.push_back(kronecker::plan(chain, arch));
    }
  } catch (const Error& error) {
    throw UsageError("show: PATTERN: " + std::string(error.what()));
  }
  const std::int64_t shape[] = {chain.back()->rows(), chain.front()->cols()};
  if (options.json) {
    nlohmann::ordered_json json = {{"kind", "chain"}, {"shape", shape}, {"weights", nnz}};
    for (std::size_t n = 0; n < plans.size(); ++n) {
      json["plan"][kPlanned[n]] = plans[n];
    }
    fmt::print("{}\n", json.dump(2));
    return;
  }
  const auto line = [](const char* name, const std::string& value) { fmt::print("{:<9}{}\n", name, value); };
  const double stored = static_cast<double>(nnz), dense = static_cast<double>(shape[0]) * static_cast<double>(shape[1]);
  line("kind", fmt::format("chain of {}", chain.size()));
  line("shape", shape_text(shape));
  line("factors", factors);
  line("fp16", fmt::format("{} stored, {} if dense", bytes_text(2 * stored), bytes_text(2 * dense)));
  for (std::size_t n = 0; n < plans.size(); ++n) {
    line(kPlanned[n], fmt::format("{}", fmt::join(plans[n], "; ")));
  }
}

/// The files that are asked for, of a grid of at most so many rows and columns.
template <typename Grid>
void write_pictures(const ShowOptions& options, bool empty, std::span<const std::int64_t> shape,
                    const std::string& title, std::int64_t most_png, std::int64_t most_svg, const Grid& grid) {
  if (empty && !(options.png.empty() && options.svg.empty())) {
    throw Error("show", "pattern", "at least one element to draw", shape_text(shape));
  }
  const auto written = [&](const std::string& file) {
    if (!options.json) {
      fmt::print("wrote {}\n", file);
    }
  };
  if (!options.png.empty()) {
    write_png(grid(most_png), options.png);
    written(options.png);
  }
  if (!options.svg.empty()) {
    write_svg(grid(most_svg), title, options.svg);
    written(options.svg);
  }
}

std::string names_of(const std::vector<TwoFourMatrix>& found) {
  std::string names;
  for (const TwoFourMatrix& matrix : found) {
    names += (names.empty() ? "" : ", ") + (matrix.name.empty() ? "''" : matrix.name);
  }
  return names;
}

bool is_two_four(const std::string& text) { return text.starts_with("two_four(") || text.ends_with(".safetensors"); }

/// A 2:4 matrix, from a file or random. Every part of it is half full: what is worth seeing is a corner, place by
/// place.
void show_two_four(const ShowOptions& options) {
  const std::string& text = options.patterns.front();
  const bool random = text.starts_with("two_four(");
  const std::vector<TwoFourMatrix> found =
      random ? std::vector{random_two_four(text)} : read_two_four(text, options.name, "show");
  const TwoFourMatrix& matrix = found.front();
  const auto shape = matrix.shape();
  const double dense = static_cast<double>(matrix.lines) * static_cast<double>(matrix.k);
  const bool empty = matrix.lines * matrix.k == 0;
  if (options.json) {
    const nlohmann::ordered_json json = {{"kind", "two_four"},
                                         {"name", matrix.name},
                                         {"shape", shape},
                                         {"dim", matrix.dim},
                                         {"dtype", name_of(matrix.dtype)},
                                         {"nnz", matrix.lines * (matrix.k / 2)},
                                         {"bytes", static_cast<std::int64_t>(matrix.stored())}};
    fmt::print("{}\n", json.dump(2));
  } else {
    const auto line = [](const char* name, const std::string& value) { fmt::print("{:<9}{}\n", name, value); };
    line("kind", matrix.name.empty() ? "two_four" : "two_four, " + matrix.name);
    line("shape", fmt::format("{}, compressed along dim {}", shape_text(shape), matrix.dim));
    line(name_of(matrix.dtype), fmt::format("{} stored, {} if dense", bytes_text(matrix.stored()),
                                            bytes_text(dense * static_cast<double>(size_of(matrix.dtype)))));
    const std::int64_t width = options.width > 0 ? options.width : terminal_width();
    const Occupancy grid = corner(matrix, 32, std::max<std::int64_t>(1, width - 2));
    if (!empty) {
      fmt::print("{}", terminal_picture(grid, wants_colour()));
    }
    if (grid.rows < shape[0] || grid.cols < shape[1]) {
      fmt::print("the first {} rows and {} columns\n", grid.rows, grid.cols);
    }
  }
  if (!options.json && found.size() > 1) {
    fmt::print("one of {} matrices in the file: {} (--name)\n", found.size(), names_of(found));
  }
  write_pictures(options, empty, shape, shortened(text, 120), 256, 64,
                 [&](std::int64_t most) { return corner(matrix, most, most); });
}

void check_head(const ShowOptions& options, std::int64_t heads) {
  if (options.head < 0 || options.head >= std::max<std::int64_t>(heads, 1)) {
    throw UsageError(fmt::format("show: --head: expected {}, got {}",
                                 heads > 1 ? fmt::format("0 to {}", heads - 1) : "0", options.head));
  }
}

void show(const ShowOptions& options) {
  if (!options.name.empty() && !options.patterns.front().ends_with(".safetensors")) {
    throw UsageError(fmt::format("show: --name: expected with a .safetensors file, got it with {}",
                                 shortened(options.patterns.front(), 60)));
  }
  if (!options.png.empty() && options.png == options.svg) {
    throw UsageError("show: --svg: expected another file than --png, got " + options.svg);
  }
  if (options.patterns.size() > 1 || is_two_four(options.patterns.front())) {
    check_head(options, 1);
  }
  if (options.patterns.size() > 1) {
    return show_chain(options);
  }
  if (is_two_four(options.patterns.front())) {
    return show_two_four(options);
  }
  const PatternPtr pattern = read_pattern(options.patterns.front());
  const PatternStats stats(*pattern);
  check_head(options, stats.heads());
  const bool empty = stats.heads() * stats.rows() * stats.cols() == 0;
  if (options.json) {
    print_json(*pattern, stats);
  } else {
    print_facts(pattern, stats);
    if (!empty) {
      const int width = options.width > 0 ? options.width : terminal_width();
      fmt::print("{}", draw(pattern, {options.head, width, wants_colour()}));
    }
  }
  write_pictures(options, empty, pattern->shape(), shortened(pattern->text(), 120), 1024, 256,
                 [&](std::int64_t most) { return stats.occupancy(options.head, most, most); });
}

}  // namespace

void add_show(CLI::App& app) {
  const auto options = std::make_shared<ShowOptions>();
  CLI::App* const command = app.add_subcommand("show", "Facts and a picture of a pattern");
  command
      ->add_option(
          "PATTERN", options->patterns,
          "The pattern's text, or - to read it from standard input; several for a chain, the first applied first")
      ->required();
  command->add_option("--head", options->head, "Which head to draw (0)");
  command->add_option("--name", options->name, "Which matrix of a file (the first)");
  command->add_option("--width", options->width, "Columns of the picture, 3 to 1000 (the terminal's)")
      ->check(CLI::Range(3, 1000).description(""));
  command->add_option("--png", options->png, "Write the picture to this file, too");
  command->add_option("--svg", options->svg, "The same as SVG");
  command->add_flag("--json", options->json, "Facts as JSON, no picture in the terminal");
  command->footer(
      "Patterns:\n"
      "  random_blocks((heads,rows,cols),block,density,seed)   a random block layout, the same for the same seed\n"
      "  block((heads,rows,cols),(r,c),~bits)                  a block layout as its .text has it\n"
      "  kronecker(a,b,c,d)                                    one Kronecker factor, I_a x 1_(b,c) x I_d\n"
      "  strided(S,stride), sliding_window(S,left,right), …    a regular pattern (docs/patterns.md), or several with | "
      "&\n"
      "  P[8:,:100], place(P,(R,C),at=(r,c)), diag([P,P]),     pieces of patterns, and patterns made of them\n"
      "  with_prefix(P,n)\n"
      "  two_four(rows,cols,seed), FILE.safetensors            a random 2:4 matrix, or one of fw.two_four.save\n"
      "Examples:\n"
      "  fretwork show 'random_blocks((1,64,64),32,0.1,0)'\n"
      "  fretwork show 'random_blocks((4,32,32),(16,64),0.25,7)' --head 3 --png layout.png\n"
      "  fretwork show 'kronecker(2,16,16,4)'\n"
      "  fretwork show 'strided(16384,128) | longformer(16384,512,[0,1])'\n"
      "  fretwork show 'with_prefix(neighborhood((24,24),7),1)[:100]'\n"
      "  fretwork show 'kronecker(64,64,64,1)' 'kronecker(1,64,64,64)'\n"
      "  fretwork show 'two_four(32,64,0)'\n"
      "  fretwork show - --json < layout.txt\n"
      "Colours need a terminal; setting NO_COLOR turns them off.");
  command->callback([options] { show(*options); });
}

}  // namespace fretwork::cli
