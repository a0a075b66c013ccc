// The plain 2:4 form on the CPU against a reference that takes one group at a time: every type, word and stride.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <set>
#include <utility>
#include <vector>

#include "core/element.h"
#include "core/half.h"
#include "fretwork/executor_tbb.h"
#include "fretwork/fretwork.h"
#include "fretwork/two_four.h"
#include "ops/two_four/problem.h"
#include "support/error_text.h"
#include "support/tensor.h"

namespace fretwork {
namespace {

constexpr DType kTypes[] = {DType::f64, DType::f32, DType::f16,     DType::bf16,
                            DType::i8,  DType::u8,  DType::f8_e4m3, DType::f8_e5m2};
constexpr DType kWords[] = {DType::i8, DType::i16, DType::i32, DType::u8, DType::u16, DType::u32};

double value_of(std::uint64_t bits, DType dtype) { return read_element<double>(&bits, dtype, 0); }

/// What ranks it: NaN above all.
double size_of_value(std::uint64_t bits, DType dtype) {
  const double x = std::abs(value_of(bits, dtype));
  return std::isnan(x) ? std::numeric_limits<double>::max() : std::min(x, std::numeric_limits<double>::max() / 2);
}

/// How a matrix lies in memory.
enum class Lie { rows, columns, gaps, reversed };
constexpr Lie kLies[] = {Lie::rows, Lie::columns, Lie::gaps, Lie::reversed};

/// A matrix whose elements are bits.
struct Buffer : Tensor {
  Buffer(DType type, std::int64_t rows, std::int64_t cols, Lie lie = Lie::rows)
      : Tensor(type, {rows, cols}, layout_of(lie)), size(size_of(type)) {}
  std::uint64_t get(std::int64_t r, std::int64_t c) const {
    std::uint64_t bits = 0;
    std::memcpy(&bits, address(r * cols() + c), size);
    return bits;
  }
  void set(std::int64_t r, std::int64_t c, std::uint64_t bits) { std::memcpy(address(r * cols() + c), &bits, size); }
  std::int64_t rows() const { return view.size(0); }
  std::int64_t cols() const { return view.size(1); }
  static MemoryLayout layout_of(Lie lie) {
    MemoryLayout layout = lie == Lie::columns ? MemoryLayout::transposed(2) : MemoryLayout{};
    layout.step = lie == Lie::gaps ? 2 : 1;
    layout.gap = lie == Lie::columns ? 3 : lie == Lie::gaps ? 5 : 0;
    layout.backwards = lie == Lie::reversed ? 2 : 0;
    return layout;
  }
  std::size_t size;
};

/// A plain form with memory; dim 0 lies as the transpose of dim 1 does.
struct Plain {
  Plain(DType dtype, DType word, std::int64_t lines, std::int64_t k, int dim, Lie lie = Lie::rows)
      : values(dtype, lines, k / 2, lie), words(word, lines, two_four::words(k, dtype, word), lie) {
    form = TwoFour{values.view, words.view, 1};
    form = dim == 0 ? form.transpose() : form;
  }
  unsigned code(std::int64_t line, std::int64_t g) const {
    const auto each = static_cast<std::int64_t>(2 * words.size);
    return static_cast<unsigned>(words.get(line, g / each) >> (4 * (g % each)) & 15);
  }
  Buffer values, words;
  TwoFour form;
};

/// Seen as lines compressed along their length.
struct Along {
  const Buffer& matrix;
  int dim;
  std::int64_t lines() const { return dim == 0 ? matrix.cols() : matrix.rows(); }
  std::int64_t k() const { return dim == 0 ? matrix.rows() : matrix.cols(); }
  std::uint64_t get(std::int64_t line, std::int64_t p) const {
    return dim == 0 ? matrix.get(p, line) : matrix.get(line, p);
  }
  std::int64_t place(std::int64_t line, std::int64_t p) const {
    return dim == 0 ? p * matrix.cols() + line : line * matrix.cols() + p;
  }
};

using Random = std::mt19937_64;

std::uint64_t any_bits(DType dtype, Random& random) {
  const std::size_t bits = 8 * size_of(dtype);
  switch (random() % 12) {
    case 0:
      return 0;
    case 1:
      return dtype == DType::i8 ? 0x80 : std::uint64_t{1} << (bits - 1);  // −0.0, or −128
    case 2:
      return 1;
    case 3:
      return (std::uint64_t{1} << (bits - 1)) - 1;  // NaN
    default:
      return random() & (bits == 64 ? ~std::uint64_t{0} : (std::uint64_t{1} << bits) - 1);
  }
}

bool is_zero(std::uint64_t bits, DType dtype) { return value_of(bits, dtype) == 0; }

/// The same bits; −0.0 may have become 0.
bool same(std::uint64_t got, std::uint64_t want, DType dtype) {
  return got == want || (got == 0 && is_zero(want, dtype));
}

/// Any bits; `full`: no more non-zeros in a group than it may have along dim.
void fill(Buffer& m, int dim, bool full, Random& random) {
  const std::int64_t group = two_four::group(m.view.dtype), lines = dim == 0 ? m.cols() : m.rows();
  const std::int64_t k = dim == 0 ? m.rows() : m.cols();
  for (std::int64_t line = 0; line < lines; ++line) {
    for (std::int64_t g = 0; g < k; g += group) {
      std::int64_t left = full ? group : group / 2;
      for (std::int64_t n = 0; n < group; ++n) {
        // So that each place is as likely as any other.
        const bool take = full || static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(group - n)) < left;
        const std::uint64_t bits = take ? any_bits(m.view.dtype, random) : 0;
        left -= take ? 1 : 0;
        dim == 0 ? m.set(g + n, line, bits) : m.set(line, g + n, bits);
      }
    }
  }
}

/// Positions that a group keeps, by the rule: non-zeros, then the lowest free ones.
std::vector<std::int64_t> kept_of(const Along& m, std::int64_t line, std::int64_t from) {
  const std::int64_t group = two_four::group(m.matrix.view.dtype);
  std::vector<std::int64_t> kept;
  for (const bool zeros : {false, true}) {
    for (std::int64_t n = 0; n < group && static_cast<std::int64_t>(kept.size()) < group / 2; ++n) {
      if (is_zero(m.get(line, from + n), m.matrix.view.dtype) == zeros) {
        kept.push_back(n);
      }
    }
  }
  std::sort(kept.begin(), kept.end());
  return kept;
}

unsigned code_of(const std::vector<std::int64_t>& kept) {
  return kept.size() == 2 ? static_cast<unsigned>(kept[0] | kept[1] << 2) : kept[0] == 0 ? 4u : 0xEu;
}

void expect_canonical(const Plain& got, const Along& m) {
  const DType dtype = m.matrix.view.dtype;
  const std::int64_t group = two_four::group(dtype), half = group / 2;
  for (std::int64_t line = 0; line < m.lines(); ++line) {
    for (std::int64_t g = 0; g < m.k() / group; ++g) {
      const auto kept = kept_of(m, line, g * group);
      ASSERT_EQ(got.code(line, g), code_of(kept)) << "line " << line << " group " << g;
      for (std::int64_t n = 0; n < half; ++n) {
        ASSERT_EQ(got.values.get(line, g * half + n), m.get(line, g * group + kept[static_cast<std::size_t>(n)]));
      }
    }
    const auto all = got.words.cols() * static_cast<std::int64_t>(2 * got.words.size);
    for (std::int64_t g = m.k() / group; g < all; ++g) {
      ASSERT_EQ(got.code(line, g), 4u) << "padding";
    }
  }
  EXPECT_TRUE(got.values.intact_around() && got.words.intact_around());
}

template <typename F>
void for_all(const F& f) {
  Random random(7);
  TbbExecutor executor;
  Context context = Context::cpu(executor);
  for (const DType dtype : kTypes) {
    for (const Lie lie : kLies) {
      for (const int dim : {0, 1}) {
        SCOPED_TRACE(std::string(name_of(dtype)) + " lie " + std::to_string(static_cast<int>(lie)) + " dim " +
                     std::to_string(dim));
        f(dtype, lie, dim, random, context);
      }
    }
  }
}

struct Sizes {
  std::int64_t lines, k;
};
/// Less than a word, tails of vectors and of tiles, and more tiles than one both ways.
constexpr Sizes kSizes[] = {{1, 4}, {3, 12}, {5, 40}, {67, 124}, {2, 2100}, {130, 1028}};

Buffer matrix_of(DType dtype, const Sizes& s, int dim, Lie lie) {
  return dim == 0 ? Buffer(dtype, s.k, s.lines, lie) : Buffer(dtype, s.lines, s.k, lie);
}

TEST(TwoFourFormat, CompressesAndComesBack) {
  for_all([](DType dtype, Lie lie, int dim, Random& random, Context& context) {
    for (const Sizes& s : kSizes) {
      Buffer dense = matrix_of(dtype, s, dim, lie);
      fill(dense, dim, false, random);
      const DType word = kWords[random() % 3];
      Plain plain(dtype, word, s.lines, s.k, dim, kLies[random() % 4]);
      std::int64_t bad = 5;
      two_four::compress(dense.view, plain.form, &bad, context);
      ASSERT_EQ(bad, -1);
      expect_canonical(plain, {dense, dim});
      two_four::check(dense.view, dim, &bad, context);
      EXPECT_EQ(bad, -1);
      Buffer back = matrix_of(dtype, s, dim, kLies[random() % 4]);
      two_four::to_dense(plain.form, back.view, context);
      EXPECT_TRUE(back.intact_around());
      for (std::int64_t r = 0; r < dense.rows(); ++r) {
        for (std::int64_t c = 0; c < dense.cols(); ++c) {
          ASSERT_TRUE(same(back.get(r, c), dense.get(r, c), dtype));
        }
      }
    }
  });
}

TEST(TwoFourFormat, NamesTheFirstBadGroup) {
  for_all([](DType dtype, Lie lie, int dim, Random& random, Context& context) {
    const Sizes s{130, 1028};
    const std::int64_t group = two_four::group(dtype);
    Buffer dense = matrix_of(dtype, s, dim, lie);
    fill(dense, dim, false, random);
    Plain plain(dtype, DType::i16, s.lines, s.k, dim);
    const Along m{dense, dim};
    std::int64_t first = std::numeric_limits<std::int64_t>::max(), bad = 0;
    for (int n = 0; n < 4; ++n) {
      const auto line = static_cast<std::int64_t>(random() % 130), g = static_cast<std::int64_t>(random()) & 127;
      for (std::int64_t i = 0; i < group; ++i) {
        dim == 0 ? dense.set(g * group + i, line, 1) : dense.set(line, g * group + i, 1);
      }
      if (group == 4) {  // three are too many as well
        dim == 0 ? dense.set(g * group + n, line, 0) : dense.set(line, g * group + n, 0);
      }
      first = std::min(first, m.place(line, g * group));
      two_four::check(dense.view, dim, &bad, context);
      EXPECT_EQ(bad, first);
      bad = 0;
      two_four::compress(dense.view, plain.form, &bad, context);
      EXPECT_EQ(bad, first);
      two_four::compress(dense.view, plain.form, nullptr, context);
      two_four::check_metadata(plain.form, &bad, context);
      EXPECT_EQ(bad, -1) << "valid nibbles all the same";
    }
  });
}

TEST(TwoFourFormat, NamesTheFirstInvalidNibble) {
  Context context = Context::cpu();
  for (const DType dtype : {DType::f16, DType::f32}) {
    const std::set<unsigned> valid = dtype == DType::f32 ? std::set{4u, 0xEu} : std::set{4u, 8u, 9u, 0xCu, 0xDu, 0xEu};
    for (const DType word : kWords) {
      for (const int dim : {0, 1}) {
        for (unsigned nibble = 0; nibble < 16; ++nibble) {
          Plain plain(dtype, word, 3, 20 * two_four::group(dtype), dim);
          const auto each = static_cast<std::int64_t>(2 * plain.words.size);
          for (std::int64_t w = 0; w < 3 * plain.words.cols(); ++w) {
            plain.words.set(w / plain.words.cols(), w % plain.words.cols(), 0x44444444);
          }
          for (const std::int64_t g : {19, 13}) {
            const std::uint64_t was = plain.words.get(1, g / each), shift = static_cast<std::uint64_t>(4 * (g % each));
            plain.words.set(1, g / each, was ^ static_cast<std::uint64_t>(nibble ^ 4) << shift);
            std::int64_t bad = 0;
            two_four::check_metadata(plain.form, &bad, context);
            const std::int64_t p = g * two_four::group(dtype);
            const std::int64_t place = dim == 0 ? p * 3 + 1 : 20 * two_four::group(dtype) + p;
            EXPECT_EQ(bad, valid.contains(nibble) ? -1 : place) << nibble;
          }
        }
      }
    }
  }
}

/// Groups of zeros with any nibble become canonical, or stay where it was valid; a number beside an invalid one is bad.
TEST(TwoFourFormat, TakesInAnyNibbleBesideZeros) {
  for_all([](DType dtype, Lie lie, int dim, Random& random, Context& context) {
    const std::int64_t group = two_four::group(dtype), half = group / 2;
    const unsigned valid = group == 2 ? 0x4010 : 0x7310;
    for (const auto& [lines, groups] : {std::pair<std::int64_t, std::int64_t>{5, 11}, {67, 700}}) {
      const DType word = kWords[random() % 6];
      Plain plain(dtype, word, lines, groups * group, dim, lie), words(dtype, word, lines, groups * group, dim);
      std::int64_t first = -1;
      const auto each = static_cast<std::int64_t>(2 * plain.words.size);
      std::vector<unsigned> codes(static_cast<std::size_t>(lines * groups)), canonical = codes;
      const bool keep = random() % 2 == 0, spoil = random() % 2 == 0;
      for (std::int64_t line = 0; line < lines; ++line) {
        for (std::int64_t g = 0; g < groups; ++g) {
          const bool empty = random() % 2 == 0, bad = spoil && random() % 50 == 0;
          const std::uint64_t minus = two_four::is_integer(dtype) ? 0 : std::uint64_t{1} << (8 * size_of(dtype) - 1);
          for (std::int64_t n = 0; n < half; ++n) {
            plain.values.set(line, g * half + n, empty ? random() % 2 * minus : 3 + random() % 9);
          }
          unsigned code = static_cast<unsigned>(random() % 16);
          while (!empty && ((valid >> code & 1) == 0) != bad) {
            code = static_cast<unsigned>(random() % 16);
          }
          const auto at = static_cast<std::size_t>(line * groups + g);
          codes[at] = code;
          canonical[at] = empty && !(keep && (valid >> code & 1) != 0) ? 4 : code;
          const std::int64_t place = dim == 0 ? g * group * lines + line : (line * groups + g) * group;
          first = !empty && bad && (first < 0 || place < first) ? place : first;
        }
        for (std::int64_t w = 0; w < plain.words.cols(); ++w) {
          std::uint64_t bits = 0;
          for (std::int64_t g = w * each; g < (w + 1) * each; ++g) {
            bits |= std::uint64_t{g < groups ? codes[static_cast<std::size_t>(line * groups + g)] : 15}
                    << 4 * (g % each);
          }
          plain.words.set(line, w, bits);
        }
      }
      std::int64_t bad = 0;
      two_four::check_metadata(plain.form, &bad, context);
      EXPECT_EQ(bad, first);
      two_four::canonical(plain.form, words.form.metadata, keep, &bad, context);
      EXPECT_EQ(bad, first);
      for (std::int64_t n = 0; n < lines * groups; ++n) {
        ASSERT_EQ(plain.code(n / groups, n % groups), codes[static_cast<std::size_t>(n)]) << "what is given stays";
        ASSERT_EQ(words.code(n / groups, n % groups), canonical[static_cast<std::size_t>(n)]) << n;
      }
      for (std::int64_t g = groups; g < plain.words.cols() * each; ++g) {
        ASSERT_EQ(words.code(lines - 1, g), 4u) << "padding";
      }
      two_four::canonical(plain.form, plain.form.metadata, keep, &bad, context);  // in place
      for (std::int64_t n = 0; n < lines * groups; ++n) {
        ASSERT_EQ(plain.code(n / groups, n % groups), canonical[static_cast<std::size_t>(n)]) << n;
      }
      EXPECT_TRUE(plain.words.intact_around() && words.words.intact_around());
    }
  });
}

TEST(TwoFourFormat, GathersWhatIsKept) {
  for_all([](DType dtype, Lie lie, int dim, Random& random, Context& context) {
    const Sizes s{67, 1028};
    Buffer pattern = matrix_of(dtype, s, dim, Lie::rows), dense = matrix_of(dtype, s, dim, lie);
    fill(pattern, dim, false, random);
    fill(dense, dim, true, random);
    Plain plain(dtype, DType::i32, s.lines, s.k, dim, kLies[random() % 4]);
    two_four::compress(pattern.view, plain.form, nullptr, context);
    two_four::gather(dense.view, plain.form.metadata, plain.form.dim, plain.form.values, context);
    const Along m{dense, dim}, marks{pattern, dim};
    const std::int64_t group = two_four::group(dtype), half = group / 2;
    for (std::int64_t line = 0; line < s.lines; ++line) {
      for (std::int64_t v = 0; v < s.k / 2; ++v) {
        const std::int64_t from = v / half * group;
        const auto kept = kept_of(marks, line, from);
        ASSERT_EQ(plain.values.get(line, v), m.get(line, from + kept[static_cast<std::size_t>(v % half)]));
      }
    }
    EXPECT_TRUE(plain.values.intact_around());
  });
}

TEST(TwoFourFormat, PrunesTheSmallerHalf) {
  for_all([](DType dtype, Lie lie, int dim, Random& random, Context& context) {
    for (const Sizes& s : kSizes) {
      Buffer dense = matrix_of(dtype, s, dim, lie), out = matrix_of(dtype, s, dim, kLies[random() % 4]);
      fill(dense, dim, true, random);
      two_four::prune(dense.view, dim, false, out.view, context);
      const Along from{dense, dim}, to{out, dim};
      const std::int64_t group = two_four::group(dtype);
      for (std::int64_t line = 0; line < s.lines; ++line) {
        for (std::int64_t g = 0; g < s.k; g += group) {
          std::vector<std::int64_t> order{0, 1, 2, 3};
          order.resize(static_cast<std::size_t>(group));
          std::stable_sort(order.begin(), order.end(), [&](std::int64_t a, std::int64_t b) {
            return size_of_value(from.get(line, g + a), dtype) > size_of_value(from.get(line, g + b), dtype);
          });
          for (std::int64_t n = 0; n < group; ++n) {
            const std::int64_t p = g + order[static_cast<std::size_t>(n)];
            ASSERT_EQ(to.get(line, p), n < group / 2 ? from.get(line, p) : 0);
          }
        }
      }
      EXPECT_TRUE(out.intact_around());
    }
  });
}

/// The most that a square may keep, and what it keeps: by trying every mask.
double best_of(const Buffer& m, std::int64_t row, std::int64_t col, std::int64_t group) {
  double best = 0;
  for (unsigned mask = 0; mask < 1u << (group * group); ++mask) {
    bool right = true;
    for (std::int64_t n = 0; n < group && right; ++n) {
      int in_row = 0, in_col = 0;
      for (std::int64_t i = 0; i < group; ++i) {
        in_row += static_cast<int>(mask >> (n * group + i) & 1);
        in_col += static_cast<int>(mask >> (i * group + n) & 1);
      }
      right = in_row == group / 2 && in_col == group / 2;
    }
    double sum = 0;
    for (std::int64_t n = 0; n < group * group && right; ++n) {
      const std::uint64_t bits = m.get(row + n / group, col + n % group);
      sum += (mask >> n & 1) != 0 ? size_of_value(bits, m.view.dtype) : 0;
    }
    best = std::max(best, sum);
  }
  return best;
}

TEST(TwoFourFormat, PrunesSquaresBest) {
  Random random(3);
  Context context = Context::cpu();
  for (const DType dtype : kTypes) {
    const std::int64_t group = two_four::group(dtype), rows = 2 * group, cols = 19 * group;
    Buffer dense(dtype, rows, cols, Lie::columns), out(dtype, rows, cols, Lie::gaps);
    for (std::int64_t n = 0; n < rows * cols; ++n) {
      const double x = std::normal_distribution<double>()(random);
      const auto wide = static_cast<float>(x);
      const std::uint64_t bits = dtype == DType::f64    ? std::bit_cast<std::uint64_t>(x)
                                 : dtype == DType::f32  ? std::bit_cast<std::uint32_t>(wide)
                                 : dtype == DType::f16  ? f16_from_float(wide)
                                 : dtype == DType::bf16 ? bf16_from_float(wide)
                                                        : random() & 0x7b;  // finite in both fp8 types
      dense.set(n / cols, n % cols, bits);
    }
    two_four::prune(dense.view, 1, true, out.view, context);
    EXPECT_TRUE(out.intact_around());
    for (std::int64_t r = 0; r < rows; r += group) {
      for (std::int64_t c = 0; c < cols; c += group) {
        double sum = 0;
        for (std::int64_t n = 0; n < group * group; ++n) {
          sum += size_of_value(out.get(r + n / group, c + n % group), dtype);
        }
        const double best = best_of(dense, r, c, group);
        ASSERT_NEAR(sum, best, 1e-5 * best) << name_of(dtype) << " at " << r << ", " << c;
      }
    }
  }
}

TEST(TwoFourFormat, PrunedSquaresAreValidBothWaysAndStay) {
  for_all([](DType dtype, Lie lie, int dim, Random& random, Context& context) {
    for (const Sizes& s : {Sizes{4, 4}, Sizes{68, 20}, Sizes{132, 2052}}) {
      Buffer dense = matrix_of(dtype, s, dim, lie), out = matrix_of(dtype, s, dim, kLies[random() % 4]);
      fill(dense, dim, true, random);
      two_four::prune(dense.view, dim, true, out.view, context);
      EXPECT_TRUE(out.intact_around());
      for (const int along : {0, 1}) {
        std::int64_t bad = 0;
        two_four::check(out.view, along, &bad, context);
        ASSERT_EQ(bad, -1) << "along " << along;
      }
      Buffer again = matrix_of(dtype, s, dim, Lie::rows);
      two_four::prune(out.view, 1 - dim, true, again.view, context);
      Plain rows(dtype, DType::i32, dense.rows(), dense.cols(), 1, kLies[random() % 4]);
      Plain cols(dtype, DType::i8, dense.cols(), dense.rows(), 0, kLies[random() % 4]);
      two_four::prune_both(dense.view, rows.form, cols.form, context);
      expect_canonical(rows, {out, 1});
      expect_canonical(cols, {out, 0});
      for (std::int64_t r = 0; r < dense.rows(); ++r) {
        for (std::int64_t c = 0; c < dense.cols(); ++c) {
          ASSERT_TRUE(out.get(r, c) == dense.get(r, c) || out.get(r, c) == 0);
          ASSERT_EQ(again.get(r, c), out.get(r, c));
        }
      }
    }
  });
}

TEST(TwoFourFormat, SquaresKeepNanFirst) {
  Context context = Context::cpu();
  for (const DType dtype : {DType::f64, DType::f32, DType::f16, DType::bf16, DType::f8_e5m2}) {
    const std::uint64_t nan = (std::uint64_t{1} << (8 * size_of(dtype) - 1)) - 1;
    const std::int64_t group = two_four::group(dtype);
    Buffer dense(dtype, group, group), out(dtype, group, group);
    for (std::int64_t n = 0; n < group * group; ++n) {  // the largest finite numbers, about
      dense.set(n / group, n % group, nan / 8 * 7);
    }
    dense.set(0, 1, nan);
    dense.set(1, 0, nan);
    two_four::prune(dense.view, 1, true, out.view, context);
    EXPECT_TRUE(out.get(0, 1) == nan && out.get(1, 0) == nan) << name_of(dtype);
    for (std::int64_t place = 0; place < group * group; ++place) {  // one among small numbers
      for (std::int64_t n = 0; n < group * group; ++n) {
        dense.set(n / group, n % group, n == place ? nan : nan / 2);
      }
      two_four::prune(dense.view, 1, true, out.view, context);
      EXPECT_EQ(out.get(place / group, place % group), nan) << name_of(dtype) << " at " << place;
    }
  }
}

TEST(TwoFourFormat, WorkedExample) {
  std::uint16_t row[16];
  const float numbers[] = {0, 7, 0, 3, 1, 5, 0, 0, 0, 0, 2, 4, 9, 0, 9, 0};
  std::transform(numbers, numbers + 16, row, f16_from_float);
  std::uint16_t values[8];
  std::int16_t word = 0;
  Context context = Context::cpu();
  const TwoFour out{TensorView(values, DType::f16, {1, 8}), TensorView(&word, DType::i16, {1, 1}), 1};
  two_four::compress(TensorView(row, DType::f16, {1, 16}), out, nullptr, context);
  EXPECT_EQ(word, -29107);
  const float kept[] = {7, 3, 1, 5, 2, 4, 9, 9};
  EXPECT_TRUE(
      std::equal(kept, kept + 8, values, [](float x, std::uint16_t bits) { return f16_from_float(x) == bits; }));
}

TEST(TwoFourFormat, PartsAndTurns) {
  Random random(1);
  Context context = Context::cpu();
  Buffer dense(DType::bf16, 9, 32);
  fill(dense, 1, false, random);
  Plain plain(DType::bf16, DType::i16, 9, 32, 1);
  two_four::compress(dense.view, plain.form, nullptr, context);
  const TwoFour part = plain.form.transpose().lines(2, 7);
  EXPECT_EQ(part.shape(), (std::array<std::int64_t, 2>{32, 5}));
  EXPECT_EQ(part.dim, 0);
  Buffer out(DType::bf16, 32, 5);
  two_four::to_dense(part, out.view, context);
  for (std::int64_t n = 0; n < 5 * 32; ++n) {
    ASSERT_TRUE(same(out.get(n % 32, n / 32), dense.get(2 + n / 32, n % 32), DType::bf16));
  }
  EXPECT_EQ(error_of([&] { (void)plain.form.lines(3, 10); }),
            "TwoFour: lines: expected a range within [0, 9), got [3, 10)");
  const TwoFour lost{plain.form.values, plain.form.metadata, 9};
  constexpr const char* kAxis = "TwoFour: dim: expected -1, 0 or 1, got 9";
  EXPECT_EQ(error_of([&] { (void)lost.shape(); }), kAxis);
  EXPECT_EQ(error_of([&] { (void)lost.transpose(); }), kAxis);
  EXPECT_EQ(error_of([&] { (void)lost.lines(0, 1); }), kAxis);
}

TEST(TwoFourFormat, NothingIsNotBad) {
  Context context = Context::cpu();
  for (const auto& [rows, cols] : {std::pair{0, 16}, std::pair{5, 0}}) {
    Buffer dense(DType::f16, rows, cols);
    Plain plain(DType::f16, DType::i16, rows, cols, 1);
    for (int n = 0; n < 3; ++n) {
      std::int64_t bad = 9;
      n == 0   ? two_four::compress(dense.view, plain.form, &bad, context)
      : n == 1 ? two_four::check(dense.view, 1, &bad, context)
               : two_four::check_metadata(plain.form, &bad, context);
      EXPECT_EQ(bad, -1);
    }
    two_four::to_dense(plain.form, dense.view, context);
    two_four::prune(dense.view, 1, false, dense.view, context);
  }
}

/// Every byte of the plain form once, and as many as there are.
void expect_whole(std::vector<std::int64_t> order, std::int64_t bytes) {
  std::erase(order, -1);
  std::sort(order.begin(), order.end());
  ASSERT_EQ(static_cast<std::int64_t>(order.size()), bytes);
  for (std::int64_t n = 0; n < bytes; ++n) {
    ASSERT_EQ(order[static_cast<std::size_t>(n)], n);
  }
}

TEST(TwoFourOrder, OfTorch) {
  // Words of row r, pairs of columns c: what the published formula says for a few of them, 64 rows of 4 words.
  const auto order = two_four::order("export", "torch", 64, 64, DType::f16, 128);
  EXPECT_EQ(order, two_four::order("export", "cutlass_sm80", 64, 64, DType::bf16, 0));
  expect_whole(order, 64 * 8);
  const auto word_at = [&](std::size_t offset) { return std::pair{order[2 * offset] / 8, order[2 * offset] % 8 / 2}; };
  using Word = std::pair<std::int64_t, std::int64_t>;
  EXPECT_EQ(word_at(0), (Word{0, 0}));
  EXPECT_EQ(word_at(1), (Word{8, 0}));  // rows 0 and 8 are neighbours, and exchange their off-diagonal words
  EXPECT_EQ(word_at(2), (Word{0, 1}));
  EXPECT_EQ(word_at(3), (Word{8, 1}));
  EXPECT_EQ(word_at(4), (Word{16, 0}));
  EXPECT_EQ(word_at(8), (Word{1, 0}));
  EXPECT_EQ(word_at(64), (Word{32, 0}));
  EXPECT_EQ(word_at(128), (Word{0, 2}));
  const auto bytes = two_four::order("export", "torch", 32, 64, DType::i8, 128);
  expect_whole(bytes, 32 * 8);
  EXPECT_EQ(bytes[4], 8 * 8);  // words of 32 bits: row 8 comes after row 0 as well
  expect_whole(two_four::order("export", "torch", 32, 16, DType::f32, 128), 32 * 4);
}

TEST(TwoFourOrder, OfSm90) {
  for (const DType dtype : {DType::f16, DType::f32, DType::f8_e4m3}) {
    for (const std::int64_t tile : {32, 64, 128, 256}) {
      const std::int64_t per_byte = 2 * two_four::group(dtype), panel_k = std::min<std::int64_t>(tile, 128);
      const auto order = two_four::order("export", "cutlass_sm90", 72, 224, dtype, tile);
      expect_whole(order, 72 * 224 / per_byte);
      EXPECT_EQ(static_cast<std::int64_t>(order.size()), 128 * ((224 + panel_k - 1) / panel_k * panel_k) / per_byte);
    }
  }
  const auto order = two_four::order("export", "cutlass_sm90", 64, 128, DType::f16, 128);
  const std::int64_t first[] = {0, 1, 8 * 16, 8 * 16 + 1, 4, 5};  // k 0 and 8 of row 0, then of row 8, then k 32
  EXPECT_TRUE(std::equal(std::begin(first), std::end(first), order.begin()));
  EXPECT_EQ(order[16], 1 * 16);    // row 1
  EXPECT_EQ(order[128], 2);        // k 16
  EXPECT_EQ(order[256], 16 * 16);  // row 16
}

TEST(TwoFourOrder, RefusesInWords) {
  const auto order = [](const char* layout, std::int64_t lines, std::int64_t k, DType dtype, std::int64_t tile) {
    return error_of([&] { (void)two_four::order("export", layout, lines, k, dtype, tile); });
  };
  constexpr const char* kNeeds =
      "export: layout: expected a multiple of 32 rows and pairs of words (32 columns) for this order, got ";
  EXPECT_EQ(order("torch", 33, 64, DType::f16, 128), std::string(kNeeds) + "33 rows and 64 columns");
  EXPECT_EQ(order("cutlass_sm80", 32, 16, DType::f16, 128), std::string(kNeeds) + "32 rows and 16 columns");
  EXPECT_EQ(order("row_major", 32, 64, DType::f16, 128),
            "export: layout: expected torch, cutlass_sm80 or cutlass_sm90, got row_major");
  EXPECT_EQ(order("cutlass_sm90", 32, 64, DType::f16, 48),
            "export: tile_k: expected a multiple of 32, above 128 of 128, got 48");
  EXPECT_EQ(order("cutlass_sm90", 32, 4, DType::f16, 128),
            "export: layout: expected whole bytes of metadata: a multiple of 8 columns, got 4");
  constexpr std::int64_t kHuge = std::int64_t{1} << 40;
  EXPECT_EQ(order("torch", kHuge, kHuge, DType::f16, 128),
            "export: layout: expected a matrix that memory can hold, got (1099511627776, 1099511627776)");
  EXPECT_EQ(order("torch", -1, 64, DType::f16, 128),
            "export: layout: expected a matrix that memory can hold, got (-1, 64)");
  EXPECT_EQ(order("torch", 32, 64, DType::f64, 128),
            "export: dtype: expected float32, float16, bfloat16, int8, float8_e4m3fn or float8_e5m2 in this order, got "
            "float64");
}

TEST(TwoFourMatmul, TakesAnyLeadingDimensions) {
  using Order = std::vector<std::size_t>;  // dimensions from the outermost in memory
  const Order orders[] = {{0, 1, 2, 3}, {0, 1, 3, 2}, {1, 0, 2, 3}, {2, 0, 1, 3}, {0, 3, 1, 2}, {3, 2, 1, 0}};
  Random random(11);
  const std::uniform_int_distribution<int> small(-4, 4);
  Context context = Context::cpu();
  const std::int64_t m = 5, k = 12, z = 2, y = 3;
  Tensor wide(DType::f32, {m, k}), pruned(DType::f32, {m, k}), bias(DType::f32, {m});
  two_four::prune(wide.randomise(random, small).view, 1, false, pruned.view, context);
  Plain plain(DType::f32, DType::i16, m, k, 1);
  two_four::compress(pruned.view, plain.form, nullptr, context);
  bias.randomise(random, small);
  for (const bool left : {true, false}) {
    for (const std::int64_t n : {1, 4}) {
      Tensor scale(DType::f32, {n});
      scale.randomise(random, small);
      for (int c = 0; c < 72; ++c) {
        const bool scaled = c % 2 != 0;
        Tensor b(DType::f32, left ? std::vector{z, y, k, n} : std::vector{z, y, n, k}, {.order = orders[c / 2 % 6]});
        Tensor out(DType::f32, left ? std::vector{z, y, m, n} : std::vector{z, y, n, m}, {.order = orders[c / 12]});
        b.randomise(random, small);
        two_four::Options options{.bias = bias.view, .activation = Activation::relu};
        if (scaled) {
          (left ? options.scale_b : options.scale_a) = scale.view;
        }
        left ? two_four::matmul(plain.form, b.view, out.view, context, options)
             : two_four::matmul(b.view, plain.form.transpose(), out.view, context, options);
        for (std::int64_t at = 0; at < z * y * m * n; ++at) {
          const std::int64_t j = at % n, i = at / n % m, v = at / n / m % y, u = at / n / m / y;
          double sum = 0;
          for (std::int64_t p = 0; p < k; ++p) {
            sum += pruned.get({i, p}) * (left ? b.get({u, v, p, j}) : b.get({u, v, j, p}));
          }
          sum = sum * (scaled ? scale.get(j) : 1) + bias.get(i);
          ASSERT_EQ(left ? out.get({u, v, i, j}) : out.get({u, v, j, i}), std::max(sum, 0.0))
              << left << n << " case " << c;
        }
        EXPECT_TRUE(out.intact_around());
      }
    }
  }
}

/// y = x·Wᵀ + bias with one row and with many, as its caller writes them.
TEST(TwoFourLinear, IsALayersProduct) {
  Context context = Context::cpu();
  float weight[] = {1, 0, 0, 2, 3, 0, 0, -4, 0, 5, 6, 0};  // (3, 4), pairs
  float values[6], bias[] = {10, -100, 0}, x[] = {1, 2, 3, 4, -1, 0, 2, 1}, y[6];
  std::int8_t words[3];
  const TwoFour s{TensorView(values, DType::f32, {3, 2}), TensorView(words, DType::i8, {3, 1}), 1};
  two_four::compress(TensorView(weight, DType::f32, {3, 4}), s, nullptr, context);
  const TensorView bias_view(bias, DType::f32, {3});
  const two_four::Options options{.bias = bias_view, .activation = Activation::relu};
  two_four::linear(TensorView(x, DType::f32, {2, 1, 4}), s, TensorView(y, DType::f32, {2, 1, 3}), context, options);
  EXPECT_TRUE(std::ranges::equal(y, std::array{19.0f, 0.0f, 28.0f, 11.0f, 0.0f, 12.0f}));
  std::ranges::fill(y, -7.0f);
  two_four::linear(TensorView(x, DType::f32, {4}), s, TensorView(y, DType::f32, {3}), context);
  EXPECT_TRUE(std::ranges::equal(y, std::array{9.0f, -13.0f, 28.0f, -7.0f, -7.0f, -7.0f}));
}

TEST(TwoFourMatmul, SumsOfNothing) {
  Context context = Context::cpu();
  const TwoFour none{TensorView(nullptr, DType::f16, {3, 0}), TensorView(nullptr, DType::i16, {3, 0}), 1};
  std::uint16_t bias[] = {f16_from_float(-1), f16_from_float(2), f16_from_float(3)}, out[6] = {7, 7, 7, 7, 7, 7};
  const TensorView bias_view(bias, DType::f16, {3});
  two_four::matmul(none, TensorView(nullptr, DType::f16, {0, 2}), TensorView(out, DType::f16, {3, 2}), context,
                   {.bias = bias_view, .activation = Activation::relu});
  const std::uint16_t want[] = {0, 0, bias[1], bias[1], bias[2], bias[2]};
  EXPECT_TRUE(std::equal(out, out + 6, want));
  two_four::matmul(none, TensorView(nullptr, DType::f16, {4, 0, 0}), TensorView(nullptr, DType::f16, {4, 3, 0}),
                   context);
  two_four::matmul(none, TensorView(nullptr, DType::f16, {0, 0, 2}), TensorView(nullptr, DType::f16, {0, 3, 2}),
                   context);
}

/// Of views that are refused before anything is read.
alignas(64) std::byte somewhere[64];
void* const kSomewhere = somewhere;

TEST(TwoFourMatmul, RefusesInWords) {
  Context context = Context::cpu();
  const auto form = [](DType dtype, int dim) {
    const TwoFour m{TensorView(kSomewhere, dtype, {32, 24}), TensorView(kSomewhere, DType::i16, {32, 3}), 1};
    return dim == 0 ? m.transpose() : m;
  };
  const auto left = [&](const TwoFour& a, DType dtype, std::initializer_list<std::int64_t> b, DType out,
                        const two_four::Options& options = {}) {
    return error_of([&] {
      two_four::matmul(a, TensorView(kSomewhere, dtype, b), TensorView(kSomewhere, out, {32, 8}), context, options);
    });
  };
  constexpr DType kHalf = DType::f16;
  EXPECT_EQ(left(form(kHalf, 1), kHalf, {44, 8}, kHalf), "matmul: b: expected (…, 48, N), got (44, 8)");
  EXPECT_EQ(left(form(kHalf, 1), kHalf, {48}, kHalf), "matmul: b: expected (…, 48, N), got (48,)");
  EXPECT_EQ(left(form(kHalf, 1), DType::bf16, {48, 8}, kHalf), "matmul: b: expected float16, got bfloat16");
  EXPECT_EQ(left(form(kHalf, 0), kHalf, {32, 8}, kHalf),
            "matmul: a: expected a matrix compressed along the contracted axis, dim 1, got dim 0");
  EXPECT_EQ(left(form(kHalf, 1), kHalf, {48, 9}, kHalf), "matmul: out: expected (32, 9), got (32, 8)");
  const std::string others = "float32, float16, bfloat16, int8, float8_e4m3fn or float8_e5m2 for ";
  EXPECT_EQ(left(form(kHalf, 1), kHalf, {48, 8}, DType::i32),
            "matmul: out_dtype: expected float64, " + others + "float16, got int32");
  EXPECT_EQ(left(form(DType::i8, 1), DType::i8, {48, 8}, DType::u8),
            "matmul: out_dtype: expected int32, " + others + "int8, got uint8");
  EXPECT_EQ(left(form(DType::u8, 1), DType::u8, {48, 8}, DType::f64),
            "matmul: out_dtype: expected int32, " + others + "uint8, got float64");
  EXPECT_EQ(left(form(DType::f8_e4m3, 1), DType::f8_e4m3, {48, 8}, DType::boolean),
            "matmul: out_dtype: expected float64, " + others + "float8_e4m3fn, got bool");
  const TensorView eight(kSomewhere, kHalf, {8}), scale(kSomewhere, DType::f32, {31});
  EXPECT_EQ(left(form(kHalf, 1), kHalf, {48, 8}, kHalf, {.bias = eight}), "matmul: bias: expected (32,), got (8,)");
  EXPECT_EQ(left(form(kHalf, 1), kHalf, {48, 8}, kHalf, {.scale_a = scale}),
            "matmul: scale_a: expected () or (32,), got (31,)");
  EXPECT_EQ(left(form(kHalf, 1), kHalf, {48, 8}, kHalf, {.scale_b = scale}),
            "matmul: scale_b: expected () or (8,), got (31,)");
  EXPECT_EQ(left(form(kHalf, 1), kHalf, {48, 8}, kHalf, {.scale_out = scale}),
            "matmul: scale_out: expected one number (), got (31,)");
  const TensorView wide(kSomewhere, DType::f32, {32});
  EXPECT_EQ(left(form(kHalf, 1), kHalf, {48, 8}, kHalf, {.bias = wide}), "matmul: bias: expected float16, got float32");
  EXPECT_EQ(error_of([&] {
              two_four::matmul(TensorView(kSomewhere, kHalf, {9, 44}), form(kHalf, 0),
                               TensorView(kSomewhere, kHalf, {9, 32}), context);
            }),
            "matmul: a: expected (…, M, 48), got (9, 44)");
}

TEST(TwoFourLinear, RefusesInWords) {
  Context context = Context::cpu();
  constexpr DType kHalf = DType::f16;
  const TwoFour weight{TensorView(kSomewhere, kHalf, {32, 24}), TensorView(kSomewhere, DType::i16, {32, 3}), 1};
  const auto linear = [&](const TwoFour& s, DType dtype, std::initializer_list<std::int64_t> x,
                          const std::optional<ConstTensorView>& bias = {},
                          const std::optional<ConstTensorView>& scale = {}) {
    return error_of([&] {
      two_four::linear(TensorView(kSomewhere, dtype, x), s, TensorView(kSomewhere, kHalf, {9, 32}), context,
                       {.bias = bias, .scale_b = scale});
    });
  };
  const TensorView eight(kSomewhere, kHalf, {8}), wide(kSomewhere, DType::f32, {32});
  EXPECT_EQ(linear(weight, kHalf, {9, 44}), "linear: x: expected (…, 48), got (9, 44)");
  EXPECT_EQ(linear(weight, DType::bf16, {9, 48}), "linear: x: expected float16, got bfloat16");
  EXPECT_EQ(linear(weight.transpose(), kHalf, {9, 32}),
            "linear: s: expected (out, in) compressed along in, dim 1, got dim 0");
  EXPECT_EQ(linear(weight, kHalf, {9, 48}, eight), "linear: bias: expected (32,), got (8,)");
  EXPECT_EQ(linear(weight, kHalf, {9, 48}, wide), "linear: bias: expected float16, got float32");
  EXPECT_EQ(linear(weight, kHalf, {9, 48}, {}, eight), "linear: scale_b: expected () or (32,), got (8,)");
  EXPECT_EQ(linear(weight, kHalf, {8, 48}), "linear: out: expected (8, 32), got (9, 32)");
  const TwoFour nowhere{weight.values, TensorView(nullptr, DType::i16, {32, 3}), 1};
  EXPECT_EQ(linear(nowhere, kHalf, {9, 48}), "TwoFour: metadata: expected the address of (32, 3), got null");
}

/// What bench/compare_two_four.py measured on an H200 (`fallback`), with its own kernels and the portable ones.
TEST(TwoFourPlan, SaysWhenDenseWins) {
  struct Row {
    std::int64_t m, k, n;
    DType dtype;
    Precision precision;
    bool own, portable;  ///< whether dense won
  };
  using enum Precision;
  constexpr DType kHalf = DType::bf16, kFull = DType::f32;
  for (const Row& row : std::initializer_list<Row>{{512, 512, 1, kHalf, ieee, false, false},
                                                   {512, 512, 4096, kHalf, ieee, false, true},
                                                   {2048, 2048, 64, kHalf, ieee, false, false},
                                                   {2048, 2048, 128, kHalf, ieee, false, true},
                                                   {4096, 4096, 64, kHalf, ieee, false, false},
                                                   {4096, 4096, 128, kHalf, ieee, false, true},
                                                   {14336, 4096, 256, kHalf, ieee, false, false},
                                                   {14336, 4096, 1024, kHalf, ieee, false, true},
                                                   {4096, 4092, 4096, kHalf, ieee, false, false},
                                                   {1024, 1024, 4096, kFull, tf32, true, true},
                                                   {4096, 4096, 256, kFull, tf32, true, true},
                                                   {4096, 4096, 4096, kFull, tf32, false, true},
                                                   {1024, 1024, 1, kFull, ieee, true, true},
                                                   {4096, 4096, 4096, kFull, ieee, true, true}}) {
    for (const bool behind : {false, true}) {
      EXPECT_EQ(two_four::dense_wins(row.m, row.n, row.k, row.dtype, row.precision, behind),
                behind ? row.portable : row.own)
          << row.m << " × " << row.k << " × " << row.n << " " << name_of(row.dtype) << " behind " << behind;
    }
  }
  EXPECT_FALSE(two_four::dense_wins(4096, 4096, 4096, kFull, {DeviceType::cpu, 0}, ieee));
  EXPECT_FALSE(two_four::dense_wins(4096, 0, 4096, kFull, {DeviceType::cuda, 0}, ieee));
}

TEST(TwoFourFormat, RefusesInWords) {
  Context context = Context::cpu();
  std::int64_t bad = 0;
  const auto check = [&](DType dtype, std::initializer_list<std::int64_t> shape, int dim) {
    return error_of([&] { two_four::check(TensorView(kSomewhere, dtype, shape), dim, &bad, context); });
  };
  EXPECT_EQ(check(DType::f16, {8, 6}, 1), "check: A: expected a multiple of 4 along dim 1, got (8, 6)");
  EXPECT_EQ(check(DType::f16, {6, 8}, 0), "check: A: expected a multiple of 4 along dim 0, got (6, 8)");
  EXPECT_EQ(check(DType::f32, {8, 7}, -1), "check: A: expected a multiple of 2 along dim 1, got (8, 7)");
  EXPECT_EQ(check(DType::f32, {8}, 1), "check: A: expected a matrix, got (8,)");
  EXPECT_EQ(check(DType::f32, {8, 8}, 2), "check: dim: expected -1, 0 or 1, got 2");
  EXPECT_EQ(
      check(DType::i32, {8, 8}, 1),
      "check: A: expected float64, float32, float16, bfloat16, int8, uint8, float8_e4m3fn or float8_e5m2, got int32");
  const auto form = [&](DType dtype, std::initializer_list<std::int64_t> values, DType word,
                        std::initializer_list<std::int64_t> words, int dim) {
    const TwoFour m{TensorView(kSomewhere, dtype, values), TensorView(kSomewhere, word, words), dim};
    return error_of([&] { two_four::check_metadata(m, &bad, context); });
  };
  EXPECT_EQ(form(DType::f16, {4, 16}, DType::i16, {4, 3}, 1),
            "TwoFour: metadata: expected (4, 2) of int16 for values (4, 16), got (4, 3)");
  EXPECT_EQ(form(DType::f16, {4, 16}, DType::i16, {4, 2}, 0),
            "TwoFour: metadata: expected (1, 16) of int16 for values (4, 16), got (4, 2)");
  EXPECT_EQ(form(DType::f16, {4, 15}, DType::i16, {4, 2}, 1),
            "TwoFour: values: expected whole groups: a multiple of 2 along dim 1, got (4, 15)");
  EXPECT_EQ(form(DType::f16, {4, 16}, DType::f16, {4, 2}, 1),
            "TwoFour: metadata: expected int8, int16, int32 or the unsigned types of these sizes, got float16");
  EXPECT_EQ(form(DType::f16, {16}, DType::i16, {2}, 1), "TwoFour: values: expected a matrix, got (16,)");
  EXPECT_EQ(form(DType::f32, {4, 16}, DType::i16, {4, 2}, 1),
            "TwoFour: metadata: expected (4, 4) of int16 for values (4, 16), got (4, 2)");
  Buffer six(DType::f16, 6, 8);
  EXPECT_EQ(error_of([&] { two_four::prune(six.view, 1, true, six.view, context); }),
            "prune: A: expected multiples of 4 in both dimensions to be transposable, got (6, 8)");
}

}  // namespace
}  // namespace fretwork
