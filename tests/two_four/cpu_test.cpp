// The 2:4 products of the CPU against float64 made from the nibbles alone: every dtype, odd sizes, every layout.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "core/element.h"
#include "fretwork/executor_tbb.h"
#include "ops/two_four/cpu/run.h"
#include "ops/two_four/problem.h"
#include "support/activated.h"
#include "support/result_types.h"

namespace fretwork::two_four {
namespace {

using Index = std::int64_t;
constexpr std::array<unsigned, 6> kNibbles{0x4, 0x8, 0x9, 0xc, 0xd, 0xe};
constexpr std::array kDTypes{DType::f64,     DType::f32,     DType::f16, DType::bf16,
                             DType::f8_e4m3, DType::f8_e5m2, DType::i8,  DType::u8};

/// Stores a number near x.
void write(void* data, DType dtype, Index at, double x) {
  if (dtype == DType::i8) {
    static_cast<std::int8_t*>(data)[at] = static_cast<std::int8_t>(std::clamp(std::round(40 * x), -128.0, 127.0));
  } else if (dtype == DType::u8) {
    static_cast<std::uint8_t*>(data)[at] = static_cast<std::uint8_t>(std::min(std::round(80 * std::abs(x)), 255.0));
  } else if (dtype == DType::f8_e5m2) {
    static_cast<std::uint8_t*>(data)[at] =
        static_cast<std::uint8_t>(f16_from_float(static_cast<float>(std::clamp(x, -1e4, 1e4))) >> 8);
  } else if (dtype == DType::f8_e4m3) {
    // As an f16 256 times smaller, cut off.
    const unsigned half = f16_from_float(static_cast<float>(std::clamp(x, -400.0, 400.0) / 256));
    static_cast<std::uint8_t*>(data)[at] = static_cast<std::uint8_t>((half >> 8 & 0x80) | (half >> 7 & 0x7f));
  } else {
    write_element(data, dtype, at, x);
  }
}

enum class Order { rows, cols, padded, backwards, apart };

/// A strided (batch, rows, cols) tensor in a buffer of bytes 0xff (NaN): reading or writing beside its elements shows.
struct Tensor {
  Tensor(DType type, Index batch, Index rows, Index cols, Order order) : dtype(type), sizes{batch, rows, cols} {
    const Index step = order == Order::apart ? 3 : 1, pad = order == Order::padded ? 5 : 0;
    const bool turned = order == Order::cols || order == Order::backwards;
    dense.col = turned ? rows + pad : step;
    dense.row = turned ? step : cols * step + pad;
    dense.batch = turned ? cols * dense.col + 7 : rows * dense.row + 7;
    Index first = kMargin;
    if (order == Order::backwards) {
      first += (rows - 1) * dense.row + (cols - 1) * dense.col;
      dense.row = -dense.row, dense.col = -dense.col;
    }
    bytes.assign(static_cast<std::size_t>(batch * dense.batch + 2 * kMargin) * size_of(dtype), 0xff);
    dense.data = bytes.data() + static_cast<std::size_t>(first) * size_of(dtype);
  }
  Index place(Index z, Index i, Index j) const { return z * dense.batch + i * dense.row + j * dense.col; }
  double get(Index z, Index i, Index j) const { return read_element<double>(dense.data, dtype, place(z, i, j)); }
  void set(Index z, Index i, Index j, double x) { write(dense.data, dtype, place(z, i, j), x); }
  template <typename F>
  void each(const F& f) const {
    for (Index z = 0; z < sizes[0]; ++z) {
      for (Index i = 0; i < sizes[1]; ++i) {
        for (Index j = 0; j < sizes[2]; ++j) {
          f(z, i, j);
        }
      }
    }
  }
  /// Whether something was written beside the elements.
  bool spoiled() const {
    std::vector<unsigned char> rest = bytes;
    const auto size = static_cast<Index>(size_of(dtype));
    each([&](Index z, Index i, Index j) {
      std::fill_n(rest.data() + (static_cast<unsigned char*>(dense.data) - bytes.data()) + place(z, i, j) * size, size,
                  0xff);
    });
    return std::ranges::any_of(rest, [](unsigned char byte) { return byte != 0xff; });
  }

  static constexpr Index kMargin = 16;
  DType dtype;
  std::array<Index, 3> sizes;
  Dense dense;
  std::vector<unsigned char> bytes;
};

struct Case {
  Index m, n, k;
  DType dtype, out;
  Order b = Order::rows, c = Order::rows, values = Order::rows;
  Index batch = 1;
  int word_bytes = 2;
  bool bias = false;
  Activation activation = Activation::none;
  int scale_s = 0, scale_b = 0;  ///< none, one for all, one for each
  bool bias_f32 = false;
  float scale_out = 0;  ///< none
};

/// A problem with what it reads and writes.
class Example {
 public:
  explicit Example(const Case& of, std::mt19937::result_type seed = 1)
      : t(of),
        group(of.dtype == DType::f32 ? 2 : 4),
        words(group_words()),
        values(of.dtype, 1, of.m, std::max<Index>(of.k / 2, 1), of.values),
        b(of.dtype, of.batch, std::max<Index>(of.k, 1), of.n, of.b),
        c(of.out, of.batch, of.m, of.n, of.c),
        bias(of.out == DType::i32 || of.bias_f32 ? DType::f32 : of.out, 1, of.m, 1, Order::apart),
        scale_s(DType::f32, 1, of.m, 1, Order::apart),
        scale_b(DType::f32, 1, of.n, 1, Order::rows),
        random(seed) {
    const double scale = size_of(of.dtype) == 1 ? 1 : 0.5;
    for (Tensor* tensor : {&values, &b, &bias, &scale_s, &scale_b}) {
      tensor->each([&](Index z, Index i, Index j) { tensor->set(z, i, j, scale * normal(random)); });
    }
    // The words of a line lie as its values do: side by side, or apart.
    along = of.values == Order::rows || of.values == Order::padded ? 1 : of.m + 1;
    line = along == 1 ? words + 1 : 1;
    metadata.assign(static_cast<std::size_t>((of.m * line + words * along + 8) * of.word_bytes), 0x44);
    for (Index i = 0; i < of.m; ++i) {
      for (Index g = 0; g < of.k / group; ++g) {
        set_nibble(i, g, random());
      }
    }
  }

  /// Any valid nibble, by number.
  void set_nibble(Index i, Index g, std::uint64_t n) {
    const unsigned nibble = group == 2 ? (n % 2 == 0 ? 0x4 : 0xe) : kNibbles[n % 6];
    unsigned char& byte = metadata[static_cast<std::size_t>(byte_of(i, g))];
    byte = static_cast<unsigned char>(g % 2 == 0 ? (byte & 0xf0) | nibble : (byte & 0x0f) | nibble << 4);
  }
  unsigned nibble(Index i, Index g) const {
    return metadata[static_cast<std::size_t>(byte_of(i, g))] >> 4 * (g % 2) & 15u;
  }
  /// Which row of b a kept value meets.
  Index row(Index i, Index kept) const {
    const Index each = group / 2, g = kept / each;
    const unsigned bits = nibble(i, g);
    return g * group + (group == 2 ? (bits == 0xe ? 1 : 0) : static_cast<Index>(bits >> 2 * (kept % 2) & 3));
  }

  Problem problem() {
    Problem p;
    p.m = t.m, p.n = t.n, p.k = t.k, p.batch = t.batch, p.dtype = t.dtype, p.out = t.out;
    p.values = {values.dense.data, values.dense.row, values.dense.col};
    p.words = {metadata.data(), line, along};
    p.word_bytes = t.word_bytes;
    p.b = b.dense, p.c = c.dense;
    p.bias = {t.bias ? bias.dense.data : nullptr, bias.dense.row};
    p.scale_s = {t.scale_s > 0 ? scale_s.dense.data : nullptr, t.scale_s == 2 ? scale_s.dense.row : 0};
    p.scale_b = {t.scale_b > 0 ? scale_b.dense.data : nullptr, t.scale_b == 2 ? scale_b.dense.row : 0};
    p.activation = t.activation;
    p.bias_f32 = t.bias_f32;
    p.scale_out = t.scale_out != 0 ? &t.scale_out : nullptr;
    return p;
  }

  /// The result, and a bound of what rounding may do to it.
  std::array<double, 2> expected(Index z, Index i, Index j) const {
    double sum = 0, size = 0;
    for (Index kept = 0; kept < t.k / 2; ++kept) {
      const double product = values.get(0, i, kept) * b.get(z, row(i, kept), j);
      sum += product, size += std::abs(product);
    }
    const double scale = (t.scale_s > 0 ? scale_s.get(0, t.scale_s == 2 ? i : 0, 0) : 1) *
                         (t.scale_b > 0 ? scale_b.get(0, t.scale_b == 2 ? j : 0, 0) : 1);
    sum *= scale, size *= std::abs(scale);
    if (t.bias) {
      sum += bias.get(0, i, 0), size += std::abs(bias.get(0, i, 0));
    }
    const bool wide = t.dtype == DType::f64;
    const double rounding = t.out == DType::i32 ? 0 : wide && t.out == DType::f64 ? 1e-14 : 2e-6;
    const double after = t.scale_out != 0 ? t.scale_out : 1;
    const double result = activated(t.activation, sum) * after;
    const auto [last, step] = rounding_of(t.out);
    return {result, rounding * (size + 1e-3) * std::abs(after) + last * std::abs(result) + step};
  }

  void check() const {
    SCOPED_TRACE(text());
    c.each([&](Index z, Index i, Index j) {
      const auto [exact, bound] = expected(z, i, j);
      const double wanted = saturated(t.out, exact), got = c.get(z, i, j);
      if (t.out == DType::f16 && std::abs(wanted) > 65472) {  // what rounds to infinity, or nearly
        EXPECT_GE(std::copysign(1.0, wanted) * got, 65440) << wanted;
        return;
      }
      if (!(std::abs(got - wanted) <= bound) && !(std::isnan(got) && std::isnan(wanted)) && got != wanted) {
        ADD_FAILURE() << z << "," << i << "," << j << ": expected " << wanted << ", got " << got;
      }
    });
    EXPECT_FALSE(c.spoiled());
  }
  /// As this CPU does it, and as one without products in pairs would.
  void run_and_check() {
    Context context = Context::cpu(executor);
    for (const auto run : {&cpu::run, &cpu::run_widened}) {
      std::ranges::fill(c.bytes, 0xff);
      run(problem(), context);
      check();
    }
  }

  std::string text() const {
    return std::to_string(t.m) + "x" + std::to_string(t.n) + "x" + std::to_string(t.k) + " batch " +
           std::to_string(t.batch) + " " + name_of(t.dtype) + " to " + name_of(t.out) + " orders " +
           std::to_string(static_cast<int>(t.b)) + std::to_string(static_cast<int>(t.c)) +
           std::to_string(static_cast<int>(t.values)) + " words " + std::to_string(t.word_bytes) + " activation " +
           std::to_string(static_cast<int>(t.activation));
  }

  Case t;
  Index group, words, along = 1, line = 0;
  Tensor values, b, c, bias, scale_s, scale_b;
  std::vector<unsigned char> metadata;
  std::mt19937 random;
  std::normal_distribution<double> normal;
  TbbExecutor executor{2};

 private:
  Index group_words() const { return std::max<Index>((t.k / group + 2 * t.word_bytes - 1) / (2 * t.word_bytes), 1); }
  Index byte_of(Index i, Index g) const {
    const Index in_word = 2 * t.word_bytes;
    return (i * line + g / in_word * along) * t.word_bytes + g % in_word / 2;
  }
};

std::vector<DType> outs(DType dtype) {
  return {is_integer(dtype) ? DType::i32 : DType::f64,
          DType::f32,
          DType::f16,
          DType::bf16,
          DType::i8,
          DType::f8_e4m3,
          DType::f8_e5m2};
}

TEST(TwoFourCpu, RandomProblems) {
  std::mt19937 random(7);
  const auto pick = [&](std::initializer_list<Index> of) { return of.begin()[random() % of.size()]; };
  for (const DType dtype : kDTypes) {
    for (const DType out : outs(dtype)) {
      for (int n = 0; n < 16; ++n) {
        Case t{.m = pick({1, 2, 3, 5, 8, 17, 70}),
               .n = pick({1, 2, 3, 4, 7, 8, 9, 15, 16, 17, 33, 64, 100}),
               .k = pick({0, 4, 8, 12, 60, 64, 100, 128, 132, 256, 516}),
               .dtype = dtype,
               .out = out};
        t.b = static_cast<Order>(random() % 5), t.c = static_cast<Order>(random() % 5);
        t.values = static_cast<Order>(random() % 3 == 0 ? random() % 5 : 0);
        t.batch = pick({1, 1, 3});
        t.word_bytes = static_cast<int>(pick({1, 2, 4}));
        if (out != DType::i32) {
          t.bias = random() % 2 == 0;
          t.activation = static_cast<Activation>(random() % 4);
          t.scale_s = static_cast<int>(random() % 3), t.scale_b = static_cast<int>(random() % 3);
          t.scale_out = random() % 2 == 0 ? 0.125f : 0.0f;
          t.bias_f32 = size_of(out) == 1 && random() % 2 == 0;
        }
        Example(t, random()).run_and_check();
      }
    }
  }
}

/// Every nibble in every position that a vector may have, whichever path runs.
TEST(TwoFourCpu, EveryNibbleEverywhere) {
  for (const DType dtype : kDTypes) {
    for (const Index n : {1, 4, 16, 64}) {
      for (const Order order : {Order::rows, Order::cols}) {
        Example example({.m = 6, .n = n, .k = 256, .dtype = dtype, .out = outs(dtype)[0], .b = order, .c = order});
        for (Index i = 0; i < 6; ++i) {
          for (Index g = 0; g < 256 / example.group; ++g) {
            example.set_nibble(i, g, static_cast<std::uint64_t>(i + g));
          }
        }
        example.run_and_check();
      }
    }
  }
}

/// NaN in rows of b that no line keeps, and next to the numbers of every tensor, reach nothing.
TEST(TwoFourCpu, WhatIsNotKeptIsNotMultiplied) {
  for (const DType dtype : {DType::f64, DType::f32, DType::f16, DType::bf16, DType::f8_e4m3, DType::f8_e5m2}) {
    for (const Index n : {1, 3, 4, 8, 16, 40, 64}) {
      for (const Order order : {Order::rows, Order::cols}) {
        Example example({.m = 9, .n = n, .k = 132, .dtype = dtype, .out = outs(dtype)[0], .b = order, .c = order});
        for (Index g = 0; g < 132 / example.group; ++g) {
          for (Index i = 0; i < 9; ++i) {
            example.set_nibble(i, g, static_cast<std::uint64_t>(g));
          }
        }
        std::vector<bool> kept(132, false);
        for (Index v = 0; v < 66; ++v) {
          kept[static_cast<std::size_t>(example.row(0, v))] = true;
        }
        const auto size = static_cast<Index>(size_of(dtype));
        for (Index k = 0; k < 132; ++k) {
          for (Index j = 0; j < n && !kept[static_cast<std::size_t>(k)]; ++j) {
            std::memset(static_cast<std::byte*>(example.b.dense.data) + example.b.place(0, k, j) * size,
                        k % 2 == 0 ? 0xff : 0x7f, static_cast<std::size_t>(size));
          }
        }
        example.run_and_check();
        example.c.each([&](Index z, Index i, Index j) { EXPECT_FALSE(std::isnan(example.c.get(z, i, j))); });
      }
    }
  }
}

TEST(TwoFourCpu, NaNThatIsKeptIsSeen) {
  for (const DType dtype : {DType::f64, DType::f32, DType::f16, DType::bf16, DType::f8_e4m3, DType::f8_e5m2}) {
    for (const Index n : {1, 5, 64}) {
      Example example({.m = 5, .n = n, .k = 64, .dtype = dtype, .out = outs(dtype)[0], .b = Order::cols});
      const auto size = static_cast<Index>(size_of(dtype));
      std::memset(static_cast<std::byte*>(example.b.dense.data) + example.b.place(0, example.row(2, 31), n / 2) * size,
                  0xff, static_cast<std::size_t>(size));
      example.run_and_check();
      EXPECT_TRUE(std::isnan(example.c.get(0, 2, n / 2))) << name_of(dtype);
    }
  }
}

/// Beyond what an fp32 sum can count.
TEST(TwoFourCpu, IntegersAreExact) {
  for (const Index n : {1, 4, 16, 64}) {
    for (const Order order : {Order::rows, Order::cols}) {
      Example example({.m = 5, .n = n, .k = 8192, .dtype = DType::i8, .out = DType::i32, .b = order, .c = Order::rows});
      example.values.each([&](Index, Index i, Index j) { example.values.set(0, i, j, (i + j) % 97 == 0 ? -2.9 : -4); });
      example.b.each([&](Index, Index i, Index j) { example.b.set(0, i, j, (i + j) % 89 == 0 ? 3.0 : -4); });
      example.run_and_check();
      EXPECT_GT(example.c.get(0, 0, 0), 0x1p24);
    }
  }
}

/// Each number of 8 bits, times one.
TEST(TwoFourCpu, EveryFloatOf8Bits) {
  for (const DType dtype : {DType::f8_e4m3, DType::f8_e5m2}) {
    for (const Index n : {1, 16}) {
      Example example({.m = 256, .n = n, .k = 20, .dtype = dtype, .out = DType::f32});
      example.values.each([&](Index z, Index i, Index j) {
        static_cast<std::uint8_t*>(example.values.dense.data)[example.values.place(z, i, j)] =
            static_cast<std::uint8_t>(j == i % 10 ? i : 0);
      });
      example.b.each([&](Index z, Index i, Index j) { example.b.set(z, i, j, 1); });
      example.run_and_check();
    }
  }
}

/// A batch whose columns lie one behind another.
TEST(TwoFourCpu, BatchesOfNeighbours) {
  for (const int scale_b : {0, 1, 2}) {
    for (const Index batch : {2, 5, 13}) {
      Example example({.m = 9,
                       .n = 3,
                       .k = 68,
                       .dtype = DType::f32,
                       .out = DType::f32,
                       .b = Order::cols,
                       .c = Order::cols,
                       .batch = batch,
                       .bias = true,
                       .scale_s = 2,
                       .scale_b = scale_b});
      example.b.dense.batch = 3 * example.b.dense.col, example.c.dense.batch = 3 * example.c.dense.col;
      example.b.each(
          [&](Index z, Index i, Index j) { example.b.set(z, i, j, static_cast<double>((z + i + j) % 7) - 3); });
      example.run_and_check();
    }
  }
}

TEST(TwoFourCpu, ThreadsDoNotChangeSums) {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    for (const Index n : {1, 4, 16, 70}) {
      Example example({.m = 600, .n = n, .k = 512, .dtype = dtype, .out = dtype, .b = Order::cols, .c = Order::cols});
      Context context = Context::cpu();
      cpu::run(example.problem(), context);
      const std::vector<unsigned char> alone = example.c.bytes;
      TbbExecutor executor{3};
      context = Context::cpu(executor);
      cpu::run(example.problem(), context);
      EXPECT_EQ(alone, example.c.bytes);
    }
  }
}

}  // namespace
}  // namespace fretwork::two_four
