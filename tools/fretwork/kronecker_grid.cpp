// The grids, and the reader of patterns.
#include "kronecker_grid.h"

#include <fmt/core.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <fstream>
#include <string_view>
#include <utility>

#include "commands.h"
#include "fretwork/error.h"

namespace fretwork::cli {
namespace {

using Sizes = KroneckerPattern::Sizes;

/// Ten that differ in kind: layers of a ViT, one large block, many small ones, small and large strides.
const Patterns kFacts = {{1, 768, 192, 2}, {6, 64, 64, 1},   {1, 192, 48, 2},    {4, 64, 64, 4},    {1, 128, 128, 16},
                         {1, 64, 64, 64},  {128, 64, 64, 1}, {1, 1024, 1024, 4}, {16, 256, 256, 4}, {4, 64, 64, 16}};

/// Drawn evenly from the paper's grid, once, with seed 4 (bench/compare_kronecker.py): rows stay comparable.
const Patterns kDrawn = {
    {3, 384, 96, 64},  {4, 256, 256, 4},    {2, 64, 64, 16},  {128, 128, 128, 4}, {6, 512, 512, 16}, {12, 64, 64, 4},
    {2, 384, 384, 64}, {2, 48, 48, 16},     {1, 512, 512, 4}, {1, 96, 96, 64},    {6, 768, 768, 4},  {16, 128, 128, 4},
    {4, 192, 48, 16},  {1, 384, 96, 64},    {3, 192, 768, 4}, {12, 512, 512, 4},  {16, 48, 192, 16}, {6, 128, 128, 4},
    {4, 96, 96, 64},   {2, 1024, 1024, 16}, {2, 96, 96, 4},   {4, 48, 48, 64},    {3, 192, 48, 64},  {1, 96, 384, 64},
    {32, 192, 48, 4},  {4, 48, 48, 16},     {4, 96, 96, 4},   {3, 96, 96, 16},    {2, 768, 192, 16}, {4, 384, 96, 4}};

/// Every pattern of the KSMM paper, less those that exceed 31 bits at its batch.
Patterns paper() {
  constexpr std::int64_t kBatch = 25088, kMost = (std::int64_t{1} << 31) - 1;
  constexpr std::int64_t kA[] = {1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128}, kD[] = {4, 16, 64};
  constexpr std::int64_t kBlocks[][2] = {{48, 48},   {48, 192},  {64, 64},   {96, 96},    {96, 384}, {128, 128},
                                         {192, 48},  {192, 192}, {192, 768}, {256, 256},  {384, 96}, {384, 384},
                                         {512, 512}, {768, 192}, {768, 768}, {1024, 1024}};
  Patterns patterns;
  for (const std::int64_t a : kA) {
    for (const auto& [b, c] : kBlocks) {
      for (const std::int64_t d : kD) {
        if (kBatch * a * std::max(b, c) * d < kMost && a * b * c * d < kMost) {
          patterns.push_back({a, b, c, d});
        }
      }
    }
  }
  return patterns;
}

/// The cells of a line: between commas where there are any, else between blanks.
std::vector<std::string> cells(std::string line) {
  line.erase(std::min(line.find('#'), line.size()));
  const bool commas = line.find(',') != line.npos;
  std::vector<std::string> found;
  std::string cell;
  const auto end_cell = [&](bool keep_empty) {
    if (keep_empty || !cell.empty()) {
      found.push_back(cell);
    }
    cell.clear();
  };
  for (const char letter : line) {
    const bool blank = std::strchr(" \t\r", letter) != nullptr;
    if (commas ? letter == ',' : blank) {
      end_cell(commas);
    } else if (!blank) {
      cell += letter;
    }
  }
  end_cell(commas);
  return found;
}

std::optional<std::int64_t> whole_number(const std::string& text) {
  std::int64_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  return error == std::errc() && end == text.data() + text.size() ? std::optional(number) : std::nullopt;
}

/// `where` names the place in messages, `text` is what stands there, `columns` says which cells are a, b, c and d.
Sizes sizes_of(const std::vector<std::string>& found, const std::vector<std::size_t>& columns, const std::string& where,
               const std::string& text) {
  std::int64_t numbers[4] = {};
  for (std::size_t n = 0; n < 4; ++n) {
    const auto number = columns[n] < found.size() ? whole_number(found[columns[n]]) : std::nullopt;
    if (!number) {
      throw UsageError(fmt::format("{}: expected a,b,c,d, four whole numbers, got '{}'", where, text));
    }
    numbers[n] = *number;
  }
  const Sizes sizes = {numbers[0], numbers[1], numbers[2], numbers[3]};
  try {
    KroneckerPattern::make(sizes);
  } catch (const Error& error) {
    throw UsageError(fmt::format("{}: {}", where, error.what()));
  }
  return sizes;
}

/// "1,64,64,64" of "kronecker(1,64,64,64)", the pattern's text; anything else stays.
std::string without_name(const std::string& text) {
  constexpr std::string_view kBlanks = " \t\r", kName = "kronecker(";
  const std::string line = text.substr(0, text.find('#'));
  const std::size_t begin = line.find_first_not_of(kBlanks), last = line.find_last_not_of(kBlanks);
  if (begin == std::string::npos || line.compare(begin, kName.size(), kName) != 0 || line[last] != ')') {
    return text;
  }
  return line.substr(begin + kName.size(), last - begin - kName.size());
}

/// Four numbers and nothing more.
Sizes plain_sizes(const std::string& text, const std::string& where) {
  const auto found = cells(without_name(text));
  return sizes_of(found.size() == 4 ? found : std::vector<std::string>{}, {0, 1, 2, 3}, where, text);
}

/// The places of a, b, c and d among the names of a table's columns; empty when they are not all there.
std::vector<std::size_t> named_columns(const std::vector<std::string>& names) {
  std::vector<std::size_t> columns;
  for (const char* name : {"a", "b", "c", "d"}) {
    const auto found = std::find(names.begin(), names.end(), name);
    if (found == names.end()) {
      return {};
    }
    columns.push_back(static_cast<std::size_t>(found - names.begin()));
  }
  return columns;
}

}  // namespace

std::optional<Patterns> named_grid(const std::string& name) {
  if (name == "facts") {
    return kFacts;
  }
  if (name == "sample") {
    Patterns sample = kFacts;
    sample.insert(sample.end(), kDrawn.begin(), kDrawn.end());
    return sample;
  }
  return name == "paper" ? std::optional(paper()) : std::nullopt;
}

Patterns parse_patterns(const std::string& text, const char* where) {
  Patterns patterns;
  for (std::size_t begin = 0; begin <= text.size();) {
    const std::size_t end = std::min(text.find(';', begin), text.size());
    const std::string one = text.substr(begin, end - begin);
    begin = end + 1;
    if (!cells(one).empty() || patterns.empty()) {  // a last semicolon is no mistake
      patterns.push_back(plain_sizes(one, where));
    }
  }
  return patterns;
}

Patterns read_patterns(const std::string& file, const char* command) {
  std::ifstream lines(file);
  Patterns patterns;
  std::vector<std::size_t> columns;
  int number = 0;
  bool first = true;
  for (std::string line; std::getline(lines, line);) {
    const std::string where = fmt::format("{}: {}:{}", command, file, ++number);
    const auto found = cells(line);
    if (found.empty()) {
      continue;
    }
    if (std::exchange(first, false)) {
      columns = named_columns(found);
      if (!columns.empty()) {
        continue;
      }
    }
    const Sizes sizes = columns.empty() ? plain_sizes(line, where) : sizes_of(found, columns, where, line);
    if (std::find(patterns.begin(), patterns.end(), sizes) == patterns.end()) {
      patterns.push_back(sizes);
    }
  }
  if (!lines.eof() || lines.bad()) {
    throw Error(fmt::format("{}: {}: cannot be read: {}", command, file, std::strerror(errno)));
  }
  if (patterns.empty()) {
    throw UsageError(fmt::format("{}: {}: expected at least one pattern, got none", command, file));
  }
  return patterns;
}

}  // namespace fretwork::cli
