// Transposes of any size and pitch: nothing is read beyond the matrix, nothing written beside the result.
#include "runtime/simd/turn.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <random>
#include <vector>

namespace fretwork::simd {
namespace {

template <typename T>
class Turn : public testing::Test {};
using Types = testing::Types<std::uint8_t, std::uint16_t, std::uint32_t, std::uint64_t>;
TYPED_TEST_SUITE(Turn, Types);

TYPED_TEST(Turn, EachElementAndNoOther) {
  using T = TypeParam;
  std::mt19937 random(7);
  const auto pick = [&](std::int64_t most) { return std::uniform_int_distribution<std::int64_t>(0, most)(random); };
  for (int n = 0; n < 4000; ++n) {
    const std::int64_t most = n % 2 == 0 ? 20 : 70, rows = pick(most), cols = pick(most);
    const std::int64_t from_pitch = cols + (n % 3 == 0 ? pick(9) : 0), to_pitch = rows + (n % 5 == 0 ? pick(9) : 0);
    const auto size = [](std::int64_t lines, std::int64_t pitch, std::int64_t length) {
      return static_cast<std::size_t>(lines == 0 ? 0 : (lines - 1) * pitch + length);
    };
    std::vector<T> from(size(rows, from_pitch, cols)), to(size(cols, to_pitch, rows) + 16, T{0xA5});
    for (T& x : from) {
      x = static_cast<T>(random());
    }
    std::vector<T> expected = to;
    for (std::int64_t r = 0; r < rows; ++r) {
      for (std::int64_t c = 0; c < cols; ++c) {
        expected[static_cast<std::size_t>(c * to_pitch + r)] = from[static_cast<std::size_t>(r * from_pitch + c)];
      }
    }
    turn(from.data(), from_pitch, rows, cols, to.data(), to_pitch);
    ASSERT_EQ(to, expected) << rows << " × " << cols << ", pitches " << from_pitch << " and " << to_pitch;
  }
}

}  // namespace
}  // namespace fretwork::simd
