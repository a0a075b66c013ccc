// The metadata orders of other libraries: where torch and CUTLASS put each byte.
#include <algorithm>
#include <string>

#include "fretwork/error.h"
#include "fretwork/two_four.h"

namespace fretwork::two_four {
namespace {

/// A matrix of metadata bytes: two groups each.
struct Bytes {
  const char* op;
  std::int64_t lines, k, group;
  std::int64_t per_line() const { return k / (2 * group); }
};

/// torch and CUTLASS for sm_80: words of `word` bytes in columns of pairs. Rows that an instruction's lanes hold
/// together stand together, and of each 2×2 block of words the off-diagonal ones change places.
std::vector<std::int64_t> order_sm80(const Bytes& plain, std::int64_t word) {
  const std::int64_t rows = word == 2 ? 32 : 16;
  const std::int64_t elements = word * 2 * plain.group;
  if (plain.lines % rows != 0 || plain.k % (2 * elements) != 0) {
    throw Error(plain.op, "layout",
                "a multiple of " + std::to_string(rows) + " rows and pairs of words (" + std::to_string(2 * elements) +
                    " columns) for this order",
                std::to_string(plain.lines) + " rows and " + std::to_string(plain.k) + " columns");
  }
  std::vector<std::int64_t> order(static_cast<std::size_t>(plain.lines * plain.per_line()));
  for (std::int64_t r = 0; r < plain.lines; ++r) {
    const std::int64_t line = r / rows * rows + r % 8 * (rows / 8) + r % rows / 8;
    for (std::int64_t c = 0; c < plain.per_line() / word; ++c) {
      const bool crossed = (line + c) % 2 != 0;
      const std::int64_t to_row = crossed ? line ^ 1 : line, to_col = crossed ? c ^ 1 : c;
      const std::int64_t at = (to_col / 2 * 2 * plain.lines + 2 * to_row + to_col % 2) * word;
      for (std::int64_t byte = 0; byte < word; ++byte) {
        order[static_cast<std::size_t>(at + byte)] = r * plain.per_line() + c * word + byte;
      }
    }
  }
  return order;
}

/// CUTLASS for sm_90: panels of `tile` columns, rows padded to 64. Within a panel 8-bit data lies plainly; the wider
/// types have the two rows and two halves of 16 (f32: 8) columns of a lane's register side by side.
std::vector<std::int64_t> order_sm90(const Bytes& plain, std::int64_t tile_k, std::int64_t element) {
  if (tile_k < 32 || tile_k % (tile_k > 128 ? 128 : 32) != 0) {
    throw Error(plain.op, "tile_k", "a multiple of 32, above 128 of 128", std::to_string(tile_k));
  }
  const std::int64_t tile = std::min<std::int64_t>(tile_k, 128), rows = (plain.lines + 63) / 64 * 64;
  const std::int64_t per_byte = 2 * plain.group, unit = 2 * per_byte, n = tile / (2 * unit);
  const std::int64_t panel = rows * tile / per_byte;
  std::vector<std::int64_t> order(static_cast<std::size_t>((plain.k + tile - 1) / tile * panel), -1);
  for (std::int64_t m = 0; m < plain.lines; ++m) {
    for (std::int64_t byte = 0; byte < plain.per_line(); ++byte) {
      const std::int64_t k = byte * per_byte % tile;
      const std::int64_t at = element == 1 ? m * tile / per_byte + k / per_byte
                                           : k % unit / per_byte + 2 * (m / 8 % 2) + 4 * (k / (2 * unit)) +
                                                 4 * n * (m % 8) + 32 * n * (k / unit % 2) + 64 * n * (m / 16);
      order[static_cast<std::size_t>(byte * per_byte / tile * panel + at)] = m * plain.per_line() + byte;
    }
  }
  return order;
}

}  // namespace

std::vector<std::int64_t> order(const char* op, std::string_view layout, std::int64_t lines, std::int64_t k,
                                DType dtype, std::int64_t tile_k) {
  const bool sm80 = layout == "torch" || layout == "cutlass_sm80";
  if (!sm80 && layout != "cutlass_sm90") {
    throw Error(op, "layout", "torch, cutlass_sm80 or cutlass_sm90", layout);
  }
  const auto element = static_cast<std::int64_t>(size_of(dtype));
  if (element > 4 || (!is_floating(dtype) && element != 1) || dtype == DType::boolean) {
    throw Error(op, "dtype", "float32, float16, bfloat16, int8, float8_e4m3fn or float8_e5m2 in this order",
                name_of(dtype));
  }
  const Bytes plain{op, lines, k, two_four::group(dtype)};
  constexpr std::int64_t kMost = std::int64_t{1}
                                 << 48;  // elements: no memory holds more, and their bytes can be counted
  if (lines < 0 || k < 0 || (k > 0 && lines > kMost / k) || k > kMost) {
    const std::int64_t shape[] = {lines, k};
    throw Error(op, "layout", "a matrix that memory can hold", shape_text(shape));
  }
  if (k % (2 * plain.group) != 0) {
    throw Error(op, "layout", "whole bytes of metadata: a multiple of " + std::to_string(2 * plain.group) + " columns",
                std::to_string(k));
  }
  return sm80 ? order_sm80(plain, element == 1 ? 4 : 2) : order_sm90(plain, tile_k, element);
}

}  // namespace fretwork::two_four
