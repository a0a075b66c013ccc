// Files of 2:4 matrices, which are safetensors: eight bytes of length, a JSON of tensors, their bytes.
#include "two_four_matrix.h"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "commands.h"
#include "core/element.h"
#include "fretwork/error.h"
#include "fretwork/two_four.h"
#include "ops/two_four/problem.h"

namespace fretwork::cli {
namespace {

constexpr std::array<int, 6> kNibbles = {0x4, 0x8, 0x9, 0xC, 0xD, 0xE};
constexpr const char* kVersion = "1";

/// A file with the words for what is wrong with it.
class TensorFile {
 public:
  TensorFile(const std::filesystem::path& file, std::string command) : path_(file), command_(std::move(command)) {
    in_.open(file, std::ios::binary);
    if (!in_ || !std::filesystem::is_regular_file(file)) {
      const char* const why = std::filesystem::is_directory(file) ? "a folder" : "not a plain file";
      throw Error(fmt::format("{}: {}: cannot be read: {}", command_, file.string(), in_ ? why : std::strerror(errno)));
    }
    size_ = static_cast<std::int64_t>(std::filesystem::file_size(file));
    header_ = read_header();
  }

  [[noreturn]] void refuse(const std::string& expected, const std::string& got) const {
    throw Error(fmt::format("{}: {}: expected {}, got {}", command_, path_.string(), expected, got));
  }

  const std::filesystem::path& path() const { return path_; }
  const nlohmann::json& header() const { return header_; }

  struct Tensor {
    DType dtype;
    std::int64_t lines, length, at;
  };
  /// A matrix of one of the types, whose bytes are all there.
  template <std::size_t kCount>
  Tensor tensor(const std::string& key, const std::pair<const char*, DType> (&types)[kCount]) const {
    const auto found = header_.find(key);
    if (found == header_.end()) {
      refuse("a tensor '" + key + "'", "none");
    }
    try {
      const auto name = found->at("dtype").get<std::string>();
      const auto type = std::find_if(types, types + kCount, [&](const auto& one) { return name == one.first; });
      const auto shape = found->at("shape").get<std::vector<std::int64_t>>();
      const auto offsets = found->at("data_offsets").get<std::array<std::int64_t, 2>>();
      if (type == types + kCount) {
        std::string known;
        for (const auto& [one, dtype] : types) {
          known += (known.empty() ? "" : ", ") + std::string(one);
        }
        refuse("one of " + known + " for " + key, name);
      }
      constexpr std::int64_t kMost = std::int64_t{1} << 29;  // bytes fit in 64 bits
      if (shape.size() != 2 || shape[0] < 0 || shape[1] < 0 || shape[0] > kMost || shape[1] > kMost) {
        refuse("two sizes for " + key, found->at("shape").dump());
      }
      const std::int64_t bytes = shape[0] * shape[1] * static_cast<std::int64_t>(size_of(type->second));
      if (offsets[0] < 0 || offsets[1] - offsets[0] != bytes) {
        refuse(fmt::format("{} bytes for {}", bytes, key), found->at("data_offsets").dump());
      }
      if (offsets[0] > size_ - data_at_ - bytes) {
        refuse(fmt::format("{} bytes, which {} reaches", data_at_ + offsets[1], key), fmt::format("{}", size_));
      }
      return {type->second, shape[0], shape[1], data_at_ + offsets[0]};
    } catch (const nlohmann::json::exception&) {
      refuse("dtype, shape and data_offsets of " + key, found->dump());
    }
  }

  std::vector<std::uint8_t> bytes(std::int64_t at, std::int64_t count) {
    std::vector<std::uint8_t> read(static_cast<std::size_t>(count));
    in_.seekg(at);
    in_.read(reinterpret_cast<char*>(read.data()), count);
    if (!in_) {
      refuse(fmt::format("{} bytes at {}", count, at), fmt::format("{}", in_.gcount()));
    }
    return read;
  }

 private:
  nlohmann::json read_header() {
    constexpr std::int64_t kMost = 100'000'000;  // of safetensors itself
    if (size_ < 8) {
      refuse("a safetensors file", fmt::format("{} bytes", size_));
    }
    const std::vector<std::uint8_t> length = bytes(0, 8);
    std::uint64_t count = 0;
    for (std::size_t n = 0; n < 8; ++n) {
      count |= std::uint64_t{length[n]} << 8 * n;
    }
    if (count > static_cast<std::uint64_t>(std::min(kMost, size_ - 8))) {
      refuse("a safetensors file", fmt::format("{} bytes whose first eight promise {} of header", size_, count));
    }
    data_at_ = 8 + static_cast<std::int64_t>(count);
    const std::vector<std::uint8_t> text = bytes(8, static_cast<std::int64_t>(count));
    nlohmann::json header = nlohmann::json::parse(text.begin(), text.end(), nullptr, false);
    if (!header.is_object()) {
      refuse("a safetensors file", "a header that is no JSON");
    }
    return header;
  }

  std::filesystem::path path_;
  std::string command_;
  std::ifstream in_;
  std::int64_t size_ = 0, data_at_ = 0;
  nlohmann::json header_;
};

TwoFourMatrix read_one(TensorFile& file, const std::string& name, const std::string& dim) {
  static constexpr std::pair<const char*, DType> kTypes[] = {
      {"F64", DType::f64}, {"F32", DType::f32}, {"F16", DType::f16},         {"BF16", DType::bf16},
      {"I8", DType::i8},   {"U8", DType::u8},   {"F8_E4M3", DType::f8_e4m3}, {"F8_E5M2", DType::f8_e5m2}};
  static constexpr std::pair<const char*, DType> kWords[] = {{"I8", DType::i8},   {"I16", DType::i16},
                                                             {"I32", DType::i32}, {"U8", DType::u8},
                                                             {"U16", DType::u16}, {"U32", DType::u32}};
  const std::string prefix = name.empty() ? "" : name + ".";
  if (dim != "0" && dim != "1") {
    file.refuse("0 or 1 as " + prefix + "dim", dim);
  }
  const auto values = file.tensor(prefix + "values", kTypes), words = file.tensor(prefix + "metadata", kWords);
  TwoFourMatrix matrix{name, values.dtype, words.dtype, dim == "1", values.lines, 2 * values.length,
                       {},   file.path(),  values.at};
  if (matrix.k % two_four::group(matrix.dtype) != 0) {
    file.refuse("an even number of values in a line of " + prefix + "values", fmt::format("{}", values.length));
  }
  if (words.lines != matrix.lines || words.length != matrix.words()) {
    file.refuse(
        fmt::format("({}, {}) {} words of {}metadata", matrix.lines, matrix.words(), name_of(words.dtype), prefix),
        fmt::format("({}, {})", words.lines, words.length));
  }
  matrix.metadata = file.bytes(words.at, words.lines * words.length * static_cast<std::int64_t>(size_of(words.dtype)));
  return matrix;
}

}  // namespace

std::array<std::int64_t, 2> TwoFourMatrix::shape() const {
  return dim == 1 ? std::array{lines, k} : std::array{k, lines};
}

std::int64_t TwoFourMatrix::groups() const { return k / two_four::group(dtype); }

std::int64_t TwoFourMatrix::words() const { return two_four::words(k, dtype, word); }

int TwoFourMatrix::nibble(std::int64_t line, std::int64_t group) const {
  const std::int64_t byte = line * words() * static_cast<std::int64_t>(size_of(word)) + group / 2;
  return metadata[static_cast<std::size_t>(byte)] >> 4 * (group % 2) & 0xf;
}

bool TwoFourMatrix::valid(int nibble) const {
  return (two_four::valid_nibbles(two_four::group(dtype)) >> nibble & 1) != 0;
}

std::vector<double> TwoFourMatrix::values(std::int64_t line) const {
  const auto each = static_cast<std::int64_t>(size_of(dtype));
  std::vector<std::uint8_t> bytes(static_cast<std::size_t>(k / 2 * each));
  std::ifstream in(file, std::ios::binary);
  in.seekg(values_at + line * (k / 2) * each);
  in.read(reinterpret_cast<char*>(bytes.data()), std::ssize(bytes));
  if (!in) {
    throw Error(fmt::format("two_four: {}: cannot be read any more", file.string()));
  }
  std::vector<double> numbers(static_cast<std::size_t>(k / 2));
  for (std::size_t n = 0; n < numbers.size(); ++n) {
    numbers[n] = read_element<double>(bytes.data(), dtype, static_cast<std::int64_t>(n));
  }
  return numbers;
}

double TwoFourMatrix::stored() const {
  return static_cast<double>(metadata.size()) +
         static_cast<double>(lines) * static_cast<double>(k / 2) * static_cast<double>(size_of(dtype));
}

std::string TwoFourMatrix::place(std::int64_t line, std::int64_t group) const {
  const std::int64_t along = group * two_four::group(dtype);
  return dim == 1 ? fmt::format("({}, {})", line, along) : fmt::format("({}, {})", along, line);
}

std::vector<TwoFourMatrix> read_two_four(const std::filesystem::path& path, const std::string& name,
                                         const std::string& command) {
  TensorFile file(path, command);
  const nlohmann::json texts = file.header().value("__metadata__", nlohmann::json::object());
  const auto text = [&](const char* key) {
    const auto found = texts.is_object() ? texts.find(key) : texts.end();
    return found != texts.end() && found->is_string() ? found->get<std::string>() : "none";
  };
  if (text("format") != "fretwork.two_four") {
    file.refuse("a file of fretwork.two_four.save", "one without that mark");
  }
  if (text("version") != kVersion) {
    file.refuse(fmt::format("version {}", kVersion), text("version"));
  }
  std::vector<TwoFourMatrix> found;
  std::string names;
  for (const auto& [key, dim] : texts.items()) {
    if (key != "dim" && !key.ends_with(".dim")) {
      continue;
    }
    const std::string own = key == "dim" ? "" : key.substr(0, key.size() - 4);
    names += (names.empty() ? "" : ", ") + own;
    if (name.empty() || name == own) {
      found.push_back(read_one(file, own, dim.is_string() ? dim.get<std::string>() : dim.dump()));
    }
  }
  if (found.empty()) {
    name.empty() ? file.refuse("at least one matrix", "none") : file.refuse("one of " + names, name);
  }
  return found;
}

TwoFourMatrix random_two_four(const std::string& text) {
  constexpr std::int64_t kMost = 1 << 15;
  std::array<std::int64_t, 3> numbers{};
  const char* at = text.data() + std::string_view("two_four(").size();
  const char* const end = text.data() + text.size();
  bool right = text.starts_with("two_four(");
  for (std::size_t n = 0; right && n < 3; ++n) {
    at = std::find_if(at, end, [](char c) { return c != ' '; });
    const auto [next, error] = std::from_chars(at, end, numbers[n]);
    right = error == std::errc() && next != end && *next == (n < 2 ? ',' : ')');
    at = right ? next + 1 : next;
  }
  const auto& [rows, cols, seed] = numbers;
  if (!right || at != end || rows < 1 || cols < 4 || cols % 4 != 0 || rows > kMost || cols > kMost || seed < 0) {
    throw UsageError(
        fmt::format("show: PATTERN: expected two_four(rows,cols,seed), rows and cols up to {}, cols a "
                    "multiple of 4, got {}",
                    kMost, text));
  }
  TwoFourMatrix matrix{"", DType::f16, DType::i8, 1, rows, cols, {}, {}, 0};
  auto state = static_cast<std::uint64_t>(seed) * 2 + 1;
  const auto draw = [&] {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return kNibbles[(state >> 33) % kNibbles.size()];
  };
  matrix.metadata.resize(static_cast<std::size_t>(rows * matrix.words()));
  for (std::uint8_t& both : matrix.metadata) {
    const int low = draw();
    both = static_cast<std::uint8_t>(low | draw() << 4);
  }
  return matrix;
}

Occupancy corner(const TwoFourMatrix& matrix, std::int64_t max_rows, std::int64_t max_cols) {
  const auto [rows, cols] = matrix.shape();
  Occupancy grid{1, std::min(rows, max_rows), std::min(cols, max_cols), {}};
  grid.share.assign(static_cast<std::size_t>(grid.rows * grid.cols), 0.0);
  const std::int64_t lines = matrix.dim == 1 ? grid.rows : grid.cols, along = matrix.dim == 1 ? grid.cols : grid.rows;
  const std::int64_t group = two_four::group(matrix.dtype);
  for (std::int64_t line = 0; line < lines; ++line) {
    for (std::int64_t g = 0; g * group < along; ++g) {
      const int nibble = matrix.nibble(line, g);
      if (!matrix.valid(nibble)) {
        throw Error(fmt::format("show: metadata: expected valid nibbles, got {:x} for the group at {}", nibble,
                                matrix.place(line, g)));
      }
      for (const int kept : {nibble & 3, nibble >> 2}) {
        const std::int64_t at = g * group + (group == 2 ? kept / 2 : kept);
        if (at < along) {
          grid.share[static_cast<std::size_t>(matrix.dim == 1 ? line * grid.cols + at : at * grid.cols + line)] = 1;
        }
      }
    }
  }
  return grid;
}

}  // namespace fretwork::cli
