// Kronecker patterns: kronecker(a,b,c,d), what they are, and which of them chain.
#include <algorithm>
#include <bit>

#include "fretwork/error.h"
#include "fretwork/tensor.h"
#include "pattern/checks.h"
#include "pattern/text.h"

namespace fretwork {
namespace {

using Sizes = KroneckerPattern::Sizes;

std::string text_of(const Sizes& s) {
  std::string text;
  for (const std::int64_t n : {s.a, s.b, s.c, s.d}) {
    text += (text.empty() ? '(' : ',') + std::to_string(n);
  }
  return text + ')';
}

const text::Family kFamily{"kronecker", [](const text::Call& call) -> PatternPtr {
                             text::expect_arguments(call, 4, "a, b, c, d");
                             return KroneckerPattern::make({text::integer(call, 0, "a"), text::integer(call, 1, "b"),
                                                            text::integer(call, 2, "c"), text::integer(call, 3, "d")});
                           }};

}  // namespace

KroneckerPattern::KroneckerPattern(const Sizes& sizes) : sizes_(sizes) {
  shape_ = {rows(), cols()};
  nnz_ = sizes.a * sizes.b * sizes.c * sizes.d;
  name("kronecker" + text_of(sizes));
}

KroneckerPtr KroneckerPattern::make(const Sizes& s) {
  const std::int64_t all[] = {s.a, s.b, s.c, s.d};
  const char* const names[] = {"a", "b", "c", "d"};
  for (int n = 0; n < 4; ++n) {
    if (all[n] < 1) {
      throw Error("KroneckerPattern", names[n], "at least 1", std::to_string(all[n]));
    }
  }
  std::int64_t rows = 1, cols = 1, elements = 1;
  if (__builtin_mul_overflow(s.a, s.b, &rows) || __builtin_mul_overflow(rows, s.d, &rows) ||
      __builtin_mul_overflow(s.a, s.c, &cols) || __builtin_mul_overflow(cols, s.d, &cols) ||
      __builtin_mul_overflow(rows, cols, &elements)) {
    throw Error("KroneckerPattern", "sizes", "fewer than 2^63 elements", text_of(s));
  }
  return KroneckerPtr(new KroneckerPattern(s));
}

double KroneckerPattern::density() const {
  return 1.0 / (static_cast<double>(sizes_.a) * static_cast<double>(sizes_.d));
}

PatternPtr KroneckerPattern::transpose() const { return make({sizes_.a, sizes_.c, sizes_.b, sizes_.d}); }

void KroneckerPattern::mask(std::span<std::uint8_t> out) const {
  const auto& [a, b, c, d] = sizes_;
  clear(out);
  for (std::int64_t row = 0; row < rows(); ++row) {
    const std::int64_t first = row * cols() + row / (b * d) * c * d + row % d;
    for (std::int64_t k = 0; k < c; ++k) {
      out[static_cast<std::size_t>(first + k * d)] = 1;
    }
  }
}

namespace kronecker {

namespace {

bool chain(const Sizes& left, const Sizes& right) {
  return left.a * left.c * left.d == right.a * right.b * right.d && right.a % left.a == 0 && left.d % right.d == 0 &&
         left.a * left.c % right.a == 0 && right.b * right.d % left.d == 0;
}

}  // namespace

bool chainable(const KroneckerPtr& left, const KroneckerPtr& right) {
  return chain(check_pattern("chainable", "left", left).sizes(), check_pattern("chainable", "right", right).sizes());
}

KroneckerPtr product(const KroneckerPtr& one, const KroneckerPtr& other) {
  const Sizes& left = check_pattern("product", "left", one).sizes();
  const Sizes& right = check_pattern("product", "right", other).sizes();
  if (!chain(left, right)) {
    throw Error(
        "product", "patterns",
        "chainable ones: left a·c·d = right a·b·d, right a a multiple of left a that divides left a·c, left d a "
        "multiple of right d that divides right b·d",
        text_of(left) + " and " + text_of(right));
  }
  return KroneckerPattern::make({left.a, left.b * left.d / right.d, right.a * right.c / left.a, right.d});
}

BlockLayoutPtr to_block_layout(const KroneckerPtr& pattern) {
  constexpr std::int64_t kMostBlocks = std::int64_t{1} << 30;
  const Sizes& sizes = check_pattern("to_block_layout", "pattern", pattern).sizes();
  const auto& [a, b, c, d] = sizes;
  // The largest block side that divides n, or 0.
  const auto side = [](std::int64_t n) {
    constexpr std::int64_t kLeast = 8, kMost = 128;
    std::int64_t block = n < kMost ? n : kMost;
    while (block >= kLeast && n % block != 0) {
      --block;
    }
    return block >= kLeast ? block : 0;
  };
  const std::int64_t r = side(b), s = side(c);
  if (d != 1 || r == 0 || s == 0) {
    throw Error("to_block_layout", "pattern", "d = 1, and b and c with divisors from 8 to 128", text_of(sizes));
  }
  const std::int64_t rows = b / r, cols = c / s;
  std::int64_t blocks = 0;
  if (__builtin_mul_overflow(a * rows, a * cols, &blocks) || blocks > kMostBlocks) {
    throw Error("to_block_layout", "pattern", "at most 2^30 blocks", text_of(sizes));
  }
  std::vector<std::uint8_t> mask(static_cast<std::size_t>(blocks));
  for (std::int64_t line = 0; line < a * rows; ++line) {
    std::fill_n(mask.begin() + (line * a + line / rows) * cols, cols, std::uint8_t{1});
  }
  return BlockLayout::make({1, a * rows, a * cols, r, s}, mask);
}

std::vector<KroneckerPtr> monarch(std::int64_t out_features, std::int64_t in_features, std::int64_t p, std::int64_t q) {
  const auto check = [](const char* name, std::int64_t n, const char* of_name, std::int64_t of) {
    if (of < 1) {
      throw Error("monarch", of_name, "at least 1", std::to_string(of));
    }
    if (n < 1 || of % n != 0) {
      throw Error("monarch", name, std::string("a divisor of ") + of_name + " = " + std::to_string(of),
                  std::to_string(n));
    }
  };
  check("p", p, "out_features", out_features);
  check("q", q, "in_features", in_features);
  const std::int64_t between = out_features / p;
  return {KroneckerPattern::make({q, between, in_features / q, 1}), KroneckerPattern::make({1, p, q, between})};
}

std::vector<KroneckerPtr> butterfly(std::int64_t n) {
  if (n < 2 || !std::has_single_bit(static_cast<std::uint64_t>(n))) {
    throw Error("butterfly", "n", "a power of two from 2 on", std::to_string(n));
  }
  std::vector<KroneckerPtr> patterns;
  for (std::int64_t d = 1; d < n; d *= 2) {
    patterns.push_back(KroneckerPattern::make({n / (2 * d), 2, 2, d}));
  }
  return patterns;
}

}  // namespace kronecker
}  // namespace fretwork
