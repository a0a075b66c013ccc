// `fretwork two_four inspect`: what is in a file of 2:4 matrices, for people.
#include "fretwork/two_four.h"

#include <fmt/core.h>
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <memory>
#include <nlohmann/json.hpp>

#include "commands.h"
#include "fretwork/error.h"
#include "terminal.h"
#include "two_four_matrix.h"

namespace fretwork::cli {
namespace {

struct InspectOptions {
  std::string file, name;
  std::int64_t rows = 2, words = 4;
  bool json = false;
};

struct NibbleCounts {
  std::array<std::int64_t, 16> of{};
  std::int64_t bad = 0, bad_line = -1, bad_group = -1;  ///< invalid ones, and the first of them, line by line
};

NibbleCounts count_nibbles(const TwoFourMatrix& matrix) {
  NibbleCounts counts;
  for (std::int64_t line = 0; line < matrix.lines; ++line) {
    for (std::int64_t g = 0; g < matrix.groups(); ++g) {
      const int nibble = matrix.nibble(line, g);
      ++counts.of[static_cast<std::size_t>(nibble)];
      if (!matrix.valid(nibble) && counts.bad++ == 0) {
        counts.bad_line = line;
        counts.bad_group = g;
      }
    }
  }
  return counts;
}

/// "│ . 7 . 3 " with a dot where nothing is kept, or the nibble where it is none.
std::string group_text(const TwoFourMatrix& matrix, const std::vector<double>& values, std::int64_t line,
                       std::int64_t group) {
  const std::int64_t size = two_four::group(matrix.dtype), kept = size / 2;
  const int nibble = matrix.nibble(line, group);
  if (!matrix.valid(nibble)) {
    return fmt::format("│ {:x}? ", nibble);
  }
  std::string text = "│ ";
  std::int64_t next = group * kept;
  for (int at = 0; at < size; ++at) {
    const bool here = size == 2 ? at == (nibble == 0xE) : at == (nibble & 3) || at == nibble >> 2;
    text += here ? fmt::format("{:.4g} ", values[static_cast<std::size_t>(next++)]) : ". ";
  }
  return text;
}

/// The first words of a line: their bits, and what they make of the values.
void print_line(const TwoFourMatrix& matrix, std::int64_t line, std::int64_t words) {
  const auto bytes = static_cast<std::int64_t>(size_of(matrix.word));
  const std::vector<double> values = matrix.values(line);
  fmt::print("{} {}\n", matrix.dim == 1 ? "row" : "column", line);
  for (std::int64_t w = 0; w < std::min(words, matrix.words()); ++w) {
    std::string bits, groups;
    for (std::int64_t g = w * 2 * bytes; g < (w + 1) * 2 * bytes; ++g) {
      bits.insert(0, 1, "0123456789abcdef"[matrix.nibble(line, g)]);
      groups += g < matrix.groups() ? group_text(matrix, values, line, g) : "";
    }
    fmt::print("  word {:<3} 0x{} {}│\n", w, bits, groups);
  }
  if (words < matrix.words()) {
    fmt::print("  … {} more words (--words)\n", count_text(matrix.words() - words));
  }
}

/// "4: 0 1" and the rest, by share.
std::string nibbles_text(const TwoFourMatrix& matrix, const NibbleCounts& counts) {
  const double all = std::max(1.0, static_cast<double>(matrix.lines) * static_cast<double>(matrix.groups()));
  std::string text;
  for (int nibble = 0; nibble < 16; ++nibble) {
    const std::int64_t count = counts.of[static_cast<std::size_t>(nibble)];
    if (count == 0) {
      continue;
    }
    const bool pair = two_four::group(matrix.dtype) == 2;
    const std::string keeps = !matrix.valid(nibble) ? "invalid"
                              : pair                ? fmt::format("keeps {}", nibble == 0xE ? 1 : 0)
                                                    : fmt::format("keeps {} {}", nibble & 3, nibble >> 2);
    text += fmt::format("{}{:X} {} {:.1f} %", text.empty() ? "" : ", ", nibble, keeps,
                        100 * static_cast<double>(count) / all);
  }
  return text.empty() ? "none" : text;
}

void print_matrix(const TwoFourMatrix& matrix, const NibbleCounts& counts, const InspectOptions& options) {
  const auto line = [](const char* name, const std::string& value) { fmt::print("{:<10}{}\n", name, value); };
  const std::int64_t values[] = {matrix.lines, matrix.k / 2}, words[] = {matrix.lines, matrix.words()};
  if (!matrix.name.empty()) {
    line("matrix", matrix.name);
  }
  line("shape", fmt::format("{}, compressed along dim {}", shape_text(matrix.shape()), matrix.dim));
  line("values", fmt::format("{} of {}", shape_text(values), name_of(matrix.dtype)));
  line("metadata", fmt::format("{} words of {} bits", shape_text(words), 8 * size_of(matrix.word)));
  const double dense =
      static_cast<double>(matrix.lines) * static_cast<double>(matrix.k) * static_cast<double>(size_of(matrix.dtype));
  line("bytes", fmt::format("{} stored, {} if dense", bytes_text(matrix.stored()), bytes_text(dense)));
  line("nibbles", nibbles_text(matrix, counts));
  for (std::int64_t n = 0; n < std::min(options.rows, matrix.lines); ++n) {
    print_line(matrix, n, options.words);
  }
}

nlohmann::ordered_json json_of(const TwoFourMatrix& matrix, const NibbleCounts& counts) {
  nlohmann::ordered_json json = {{"name", matrix.name},
                                 {"shape", matrix.shape()},
                                 {"dtype", name_of(matrix.dtype)},
                                 {"dim", matrix.dim},
                                 {"word", name_of(matrix.word)},
                                 {"bytes", static_cast<std::int64_t>(matrix.stored())},
                                 {"nibbles", nlohmann::ordered_json::object()},
                                 {"invalid", counts.bad}};
  for (std::size_t n = 0; n < counts.of.size(); ++n) {
    if (counts.of[n] > 0) {
      json["nibbles"][fmt::format("{:X}", n)] = counts.of[n];
    }
  }
  return json;
}

void inspect(const InspectOptions& options) {
  const std::vector<TwoFourMatrix> found = read_two_four(options.file, options.name, "two_four inspect");
  nlohmann::ordered_json json = {{"file", options.file}, {"version", 1}, {"matrices", nlohmann::ordered_json::array()}};
  std::string wrong;
  if (!options.json) {
    const std::string count = fmt::format(", {} matri{}", found.size(), found.size() == 1 ? "x" : "ces");
    fmt::print("file      {}, version 1{}\n", options.file, options.name.empty() ? count : "");
  }
  for (const TwoFourMatrix& matrix : found) {
    const NibbleCounts counts = count_nibbles(matrix);
    options.json ? json["matrices"].push_back(json_of(matrix, counts)) : print_matrix(matrix, counts, options);
    if (counts.bad > 0 && wrong.empty()) {
      wrong =
          fmt::format("{}: {}metadata: expected valid nibbles, got {:X} for the group at {}{}", options.file,
                      matrix.name.empty() ? "" : matrix.name + ".", matrix.nibble(counts.bad_line, counts.bad_group),
                      matrix.place(counts.bad_line, counts.bad_group),
                      counts.bad > 1 ? fmt::format(" and {} more", count_text(counts.bad - 1)) : "");
    }
  }
  if (options.json) {
    fmt::print("{}\n", json.dump(2));
  }
  if (!wrong.empty()) {
    throw Error("two_four inspect: " + wrong);
  }
}

}  // namespace

void add_two_four(CLI::App& app) {
  const auto options = std::make_shared<InspectOptions>();
  CLI::App* const command = app.add_subcommand("two_four", "2:4 matrices in files");
  command->require_subcommand(1);
  command->footer("Example:\n  fretwork two_four inspect weights.safetensors");
  CLI::App* const one = command->add_subcommand("inspect", "Facts of a file, and its metadata decoded");
  one->add_option("FILE", options->file, "What fw.two_four.save wrote")->required();
  one->add_option("--name", options->name, "Only this matrix of the file");
  one->add_option("--rows", options->rows, "Lines to decode (2)")->check(CLI::Range(0, 1 << 20).description(""));
  one->add_option("--words", options->words, "Words of each (4)")->check(CLI::Range(1, 1 << 20).description(""));
  one->add_flag("--json", options->json, "Facts as JSON");
  one->footer(
      "A word is shown in hexadecimal, its first group lowest, beside the groups: numbers where one is kept, dots\n"
      "elsewhere. Exit code 1 where a nibble is invalid, and its place.\n"
      "Examples:\n"
      "  fretwork two_four inspect weights.safetensors\n"
      "  fretwork two_four inspect weights.safetensors --name up --rows 8 --words 16");
  one->callback([options] { inspect(*options); });
}

}  // namespace fretwork::cli
