// Block layouts: block((heads,rows,cols),(r,c),~bits), bits row-major, six to a character.
#include <algorithm>

#include "fretwork/error.h"
#include "fretwork/tensor.h"
#include "pattern/text.h"

namespace fretwork {
namespace {

constexpr std::int64_t kMinBlock = 8, kMaxBlock = 128;
/// A short text must not ask for unbounded memory.
constexpr std::size_t kMostRandom = std::size_t{1} << 30;
constexpr std::int64_t kMostLines = std::int64_t{1} << 26;
constexpr const char* kName = "BlockLayout";

std::size_t checked_count(const BlockLayout::Sizes& s) {
  const std::int64_t lengths[] = {s.heads, s.rows, s.cols};
  const char* const names[] = {"heads", "rows", "columns"};
  for (int n = 0; n < 3; ++n) {
    if (lengths[n] < 0) {
      throw Error(kName, "mask", std::string("at least 0 ") + names[n], std::to_string(lengths[n]));
    }
  }
  // Also where no block is there, an index has a line per row and column.
  if (std::max({s.heads, s.rows, s.cols}) > kMostLines || s.heads * std::max(s.rows, s.cols) > kMostLines) {
    throw Error(kName, "mask", "at most 2^26 block rows and columns in all heads", shape_text(lengths) + " blocks");
  }
  for (const std::int64_t b : {s.block_rows, s.block_cols}) {
    if (b < kMinBlock || b > kMaxBlock) {
      throw Error(kName, "block", "8 to 128", std::to_string(b));
    }
  }
  std::int64_t count = 1, elements = 1;
  if (__builtin_mul_overflow(s.heads * s.rows, s.cols, &count) ||
      __builtin_mul_overflow(count, s.block_rows * s.block_cols, &elements)) {
    throw Error(kName, "mask", "fewer than 2^63 elements", shape_text(lengths) + " blocks");
  }
  return static_cast<std::size_t>(count);
}

BlockLayout::Sizes read_sizes(const text::Call& call) {
  const auto grid = text::integers(call, 0, "grid");
  const auto block = text::integers(call, 1, "block");
  if (grid.size() != 3) {
    throw Error(call.name, "grid", "(heads, rows, columns)", std::to_string(grid.size()) + " numbers");
  }
  if (block.empty() || block.size() > 2) {
    throw Error(call.name, "block", "one or two numbers", std::to_string(block.size()));
  }
  const BlockLayout::Sizes sizes{grid[0], grid[1], grid[2], block.front(), block.back()};
  checked_count(sizes);
  return sizes;
}

const text::Family kBlock{"block", [](const text::Call& call) -> PatternPtr {
                            text::expect_arguments(call, 3, "(heads,rows,cols), (r,c), ~bits");
                            const BlockLayout::Sizes sizes = read_sizes(call);
                            return BlockLayout::make(sizes, text::bits(call, 2, "bits", checked_count(sizes)));
                          }};

const text::Family kRandom{"random_blocks", [](const text::Call& call) -> PatternPtr {
                             text::expect_arguments(call, 4, "(heads,rows,cols), block, density, seed");
                             return random_blocks(read_sizes(call), text::number(call, 2, "density"),
                                                  static_cast<std::uint64_t>(text::integer(call, 3, "seed")));
                           }};

/// splitmix64: the same numbers on every machine.
std::uint64_t next_random(std::uint64_t& state) {
  std::uint64_t x = state += 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

}  // namespace

BlockLayout::BlockLayout(const Sizes& sizes, std::span<const std::uint8_t> mask) : sizes_(sizes) {
  const auto& [heads, rows, cols, r, c] = sizes;
  shape_ = {heads, rows * r, cols * c};
  by_row_.first.assign(static_cast<std::size_t>(heads * rows + 1), 0);
  by_col_.first.assign(static_cast<std::size_t>(heads * cols + 1), 0);
  const auto at = [&](std::int64_t h, std::int64_t i, std::int64_t j) {
    return mask[static_cast<std::size_t>((h * rows + i) * cols + j)] != 0;
  };
  for (std::int64_t h = 0; h < heads; ++h) {
    for (std::int64_t i = 0; i < rows; ++i) {
      for (std::int64_t j = 0; j < cols; ++j) {
        if (at(h, i, j)) {
          by_row_.entries.push_back({j, nnz_++});
          ++by_col_.first[static_cast<std::size_t>(h * cols + j + 1)];
        }
      }
      by_row_.first[static_cast<std::size_t>(h * rows + i + 1)] = nnz_;
    }
  }
  for (std::size_t n = 1; n < by_col_.first.size(); ++n) {
    by_col_.first[n] += by_col_.first[n - 1];
  }
  by_col_.entries.resize(static_cast<std::size_t>(nnz_));
  std::vector<std::int64_t> next(by_col_.first.begin(), by_col_.first.end() - 1);
  for (std::int64_t line = 0; line < heads * rows; ++line) {
    for (const auto& [j, block] : by_row_.line(line)) {
      auto& place = next[static_cast<std::size_t>(line / rows * cols + j)];
      by_col_.entries[static_cast<std::size_t>(place++)] = {line % rows, block};
    }
  }
  const auto n = [](std::int64_t v) { return std::to_string(v); };
  name("block((" + n(heads) + "," + n(rows) + "," + n(cols) + "),(" + n(r) + "," + n(c) + "),~" +
       text::pack_bits(mask) + ")");
}

std::shared_ptr<const BlockLayout> BlockLayout::make(const Sizes& sizes, std::span<const std::uint8_t> mask) {
  if (const std::size_t count = checked_count(sizes); mask.size() != count) {
    throw Error(kName, "mask", std::to_string(count) + " entries", std::to_string(mask.size()));
  }
  if (const auto bad = std::find_if(mask.begin(), mask.end(), [](std::uint8_t m) { return m > 1; });
      bad != mask.end()) {
    throw Error(kName, "mask", "0 or 1 everywhere", std::to_string(*bad));
  }
  return std::shared_ptr<const BlockLayout>(new BlockLayout(sizes, mask));
}

std::shared_ptr<const BlockLayout> BlockLayout::for_conv2d(const std::array<std::int64_t, 4>& blocks,
                                                           std::span<const std::uint8_t> mask, std::int64_t block_rows,
                                                           std::int64_t block_cols) {
  const auto [out, in, kh, kw] = blocks;
  for (const std::int64_t size : blocks) {
    if (size < 1) {
      throw Error("for_conv2d", "blocks", "(out blocks, in blocks, kh, kw) of at least 1", std::to_string(size));
    }
  }
  const Sizes sizes{kh * kw, out, in, block_rows, block_cols};
  if (const std::size_t count = checked_count(sizes); mask.size() != count) {
    throw Error("for_conv2d", "mask", std::to_string(count) + " entries", std::to_string(mask.size()));
  }
  std::vector<std::uint8_t> heads(mask.size());
  for (std::size_t n = 0, positions = static_cast<std::size_t>(kh * kw); n < mask.size(); ++n) {
    heads[n % positions * static_cast<std::size_t>(out * in) + n / positions] = mask[n];
  }
  return make(sizes, heads);
}

double BlockLayout::density() const {
  const double all = static_cast<double>(sizes_.heads) * static_cast<double>(sizes_.rows * sizes_.cols);
  return all > 0 ? static_cast<double>(nnz_) / all : 0.0;
}

PatternPtr BlockLayout::transpose() const {
  const auto& [heads, rows, cols, r, c] = sizes_;
  std::vector<std::uint8_t> turned(static_cast<std::size_t>(heads * rows * cols));
  for (std::int64_t line = 0; line < heads * cols; ++line) {
    for (const auto& entry : by_col_.line(line)) {
      turned[static_cast<std::size_t>(line * rows + entry.other)] = 1;
    }
  }
  return make({heads, cols, rows, c, r}, turned);
}

void BlockLayout::mask(std::span<std::uint8_t> out) const {
  const auto& [heads, rows, cols, r, c] = sizes_;
  const std::int64_t width = cols * c;
  clear(out);
  for (std::int64_t line = 0; line < heads * rows; ++line) {
    for (const auto& entry : by_row_.line(line)) {
      for (std::int64_t y = 0; y < r; ++y) {
        std::fill_n(out.begin() + (line * r + y) * width + entry.other * c, c, std::uint8_t{1});
      }
    }
  }
}

std::shared_ptr<const BlockLayout> random_blocks(const BlockLayout::Sizes& sizes, double density, std::uint64_t seed) {
  if (!(density >= 0.0 && density <= 1.0)) {
    throw Error("random_blocks", "density", "0 to 1", text::shortest(density));
  }
  const std::size_t count = checked_count(sizes);
  if (count > kMostRandom) {
    throw Error("random_blocks", "grid", "at most 2^30 blocks", std::to_string(count));
  }
  std::vector<std::uint8_t> mask(count);
  std::uint64_t state = seed;
  for (auto& m : mask) {
    m = static_cast<double>(next_random(state) >> 11) * 0x1.0p-53 < density;
  }
  return BlockLayout::make(sizes, mask);
}

}  // namespace fretwork
