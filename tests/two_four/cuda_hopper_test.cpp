// 2:4 products of the Hopper kernel against float64 on the host, made from the nibbles alone. Skipped where there is no
// Hopper GPU. A test that is disabled times the form that is chosen and those that come near it.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <optional>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "core/half.h"
#include "ops/two_four/cuda/hopper.h"
#include "ops/two_four/problem.h"
#include "runtime/cuda_driver.h"
#include "runtime/nvrtc.h"
#include "support/activated.h"
#include "support/result_types.h"

namespace fretwork::two_four {
namespace {

namespace driver = fretwork::cuda;
using Index = std::int64_t;
using hopper::Choice;

constexpr int kNibbles[] = {0x4, 0x8, 0x9, 0xC, 0xD, 0xE};
constexpr Index kGuard = 256;  // bytes before and behind what is written

bool is_hopper() { return driver::available() && driver::kernel_arch(0) == "sm_90a" && !nvrtc::library().path.empty(); }

// ----------------------------------------------------------------------------------------------------- elements

/// A finite fp8 number.
double from_f8(std::uint8_t bits, int mantissa, int bias) {
  const int exponent = (bits & 0x7f) >> mantissa, rest = bits & ((1 << mantissa) - 1);
  const double scale = std::ldexp(1.0, -mantissa);
  const double size =
      exponent == 0 ? std::ldexp(rest * scale, 1 - bias) : std::ldexp(1 + rest * scale, exponent - bias);
  return (bits & 0x80) != 0 ? -size : size;
}

/// Elements of a type on the host.
struct Elements {
  DType dtype;
  std::vector<unsigned char> bytes;

  /// All bits set: NaN, or −1.
  explicit Elements(DType type, Index count = 0)
      : dtype(type), bytes(static_cast<std::size_t>(count) * size_of(type), 0xff) {}
  template <typename T>
  T read(Index at) const {
    T value;
    std::memcpy(&value, bytes.data() + static_cast<std::size_t>(at) * sizeof(T), sizeof(T));
    return value;
  }
  template <typename T>
  void write(Index at, T value) {
    std::memcpy(bytes.data() + static_cast<std::size_t>(at) * sizeof(T), &value, sizeof(T));
  }
  double get(Index at) const {
    switch (dtype) {
      case DType::f32:
        return read<float>(at);
      case DType::f16:
        return float_from_f16(read<std::uint16_t>(at));
      case DType::bf16:
        return float_from_bf16(read<std::uint16_t>(at));
      case DType::i8:
        return read<std::int8_t>(at);
      case DType::u8:
        return read<std::uint8_t>(at);
      case DType::i32:
        return read<std::int32_t>(at);
      case DType::f8_e4m3:
        return from_f8(read<std::uint8_t>(at), 3, 7);
      default:
        return from_f8(read<std::uint8_t>(at), 2, 15);
    }
  }
  /// A small integer, exact in every type, or with `real` something about as large.
  void randomise(Index at, std::mt19937& random, bool real) {
    const int whole = std::uniform_int_distribution<int>(-3, 3)(random);
    const float number = real ? std::uniform_real_distribution<float>(-2.0f, 2.0f)(random) : static_cast<float>(whole);
    switch (dtype) {
      case DType::f32:
        return write(at, number);
      case DType::f16:
        return write(at, f16_from_float(number));
      case DType::bf16:
        return write(at, bf16_from_float(number));
      case DType::i8:
        return write(at,
                     static_cast<std::int8_t>(real ? std::uniform_int_distribution<int>(-128, 127)(random) : whole));
      case DType::u8:
        return write(
            at, static_cast<std::uint8_t>(real ? std::uniform_int_distribution<int>(0, 255)(random) : std::abs(whole)));
      default:
        return write(at, f8_near(number));
    }
  }

 private:
  std::uint8_t f8_near(float number) const {
    // The upper half of an f16, or the same with another exponent; −3 … 3 are exact.
    const std::uint16_t bits = f16_from_float(dtype == DType::f8_e5m2 ? number : number / 256);
    return static_cast<std::uint8_t>(dtype == DType::f8_e5m2 ? bits >> 8 : (bits >> 8 & 0x80) | (bits >> 7 & 0x7f));
  }
};

// -------------------------------------------------------------------------------------------------------- cases

struct Case {
  Index m, n, k;
  DType dtype = DType::bf16, out = DType::bf16;
  bool b_along_k = true, c_along_m = true;
  Index batch = 1;
  Index pad = 0;    ///< units of 16 bytes between lines
  Index c_pad = 0;  ///< elements between lines of the result
  bool bias = false;
  int scales = 0;  ///< 1: one for all; 2: one for each line
  Activation activation = Activation::none;
  int word_bytes = 2;
  bool real = true, one_b = false;  ///< one_b: batches share it

  Index group() const { return dtype == DType::f32 ? 2 : 4; }
  std::string text() const {
    std::ostringstream text;
    text << m << "×" << k << "×" << n << " " << name_of(dtype) << " to " << name_of(out)
         << (b_along_k ? " b k" : " b n") << (c_along_m ? " c m" : " c n") << " batch " << batch << " pad " << pad
         << "," << c_pad << (bias ? " bias" : "") << " scales " << scales << " activation "
         << static_cast<int>(activation) << " words " << word_bytes;
    return text.str();
  }
};

Index round_up(Index n, Index to) { return (n + to - 1) / to * to; }

/// Whether a result of type `out` is `want`, give or take `most`; beyond what f16 holds it is infinite.
bool is_near(DType out, double got, double want, double most) {
  constexpr double kOverflow = 65520;  // the least that rounds to infinity
  if (out == DType::f16 && std::isinf(got)) {
    return std::abs(want) + most >= kOverflow && std::signbit(got) == std::signbit(want);
  }
  return std::abs(got - want) <= most && (out != DType::f16 || std::abs(want) - most < kOverflow);
}

/// What a case multiplies, on the host and the GPU.
struct Data {
  Case c;
  Index value_line, word_line, b_line, c_line;  ///< in elements; bytes for words
  Elements values, b, result, bias;
  std::vector<unsigned char> words;
  std::vector<float> scale_s, scale_b;
  driver::DeviceBuffer on_device[7];

  explicit Data(const Case& which, unsigned seed = 1)
      : c(which), values(c.dtype), b(c.dtype), result(c.out), bias(c.out) {
    const auto size = static_cast<Index>(size_of(c.dtype));
    const Index unit = 16 / size;
    const Index bytes = (c.k / c.group() + 1) / 2;
    value_line = round_up(c.k / 2, unit) + c.pad * unit;
    word_line = round_up(bytes, 16) + c.pad * 16;
    b_line = round_up(c.b_along_k ? c.k : c.n, unit) + c.pad * unit;
    c_line = (c.c_along_m ? c.m : c.n) + c.c_pad;
    std::mt19937 random(seed);
    values = Elements(c.dtype, c.m * value_line);
    b = Elements(c.dtype, (c.one_b ? 1 : c.batch) * b_lines() * b_line);
    result = Elements(c.out, c.batch * c_lines() * c_line + 2 * kGuard / static_cast<Index>(size_of(c.out)));
    words.assign(static_cast<std::size_t>(c.m * word_line), 0);  // what is no nibble is invalid
    for (Index i = 0; i < c.m; ++i) {
      for (Index at = 0; at < c.k / 2; ++at) {
        values.randomise(i * value_line + at, random, c.real);
      }
      for (Index g = 0; g < c.k / c.group(); ++g) {
        set_nibble(i, g, kNibbles[c.group() == 2 ? random() % 2 * 5 : random() % 6]);
      }
    }
    for (Index z = 0; z < (c.one_b ? 1 : c.batch); ++z) {
      for (Index k = 0; k < c.k; ++k) {
        for (Index j = 0; j < c.n; ++j) {
          b.randomise(b_at(z, k, j), random, c.real);
        }
      }
    }
    bias = Elements(c.out == DType::i32 ? DType::f32 : c.out, c.m);
    for (Index i = 0; i < c.m; ++i) {
      bias.randomise(i, random, true);
    }
    scale_s.resize(static_cast<std::size_t>(c.m));
    scale_b.resize(static_cast<std::size_t>(c.n));
    for (auto* scales : {&scale_s, &scale_b}) {
      for (float& scale : *scales) {
        scale = std::uniform_real_distribution<float>(0.25f, 1.5f)(random);
      }
    }
  }
  Index b_lines() const { return c.b_along_k ? c.n : c.k; }
  Index c_lines() const { return c.c_along_m ? c.n : c.m; }
  Index b_at(Index z, Index k, Index j) const {
    return (c.one_b ? 0 : z) * b_lines() * b_line + (c.b_along_k ? j * b_line + k : k * b_line + j);
  }
  Index c_at(Index z, Index i, Index j) const {
    return kGuard / static_cast<Index>(size_of(c.out)) + z * c_lines() * c_line +
           (c.c_along_m ? j * c_line + i : i * c_line + j);
  }
  int nibble(Index i, Index g) const {
    return words[static_cast<std::size_t>(i * word_line + g / 2)] >> (4 * (g % 2)) & 0xf;
  }
  void set_nibble(Index i, Index g, int code) {
    auto& byte = words[static_cast<std::size_t>(i * word_line + g / 2)];
    byte = static_cast<unsigned char>((byte & (0xf0 >> 4 * (g % 2))) | code << 4 * (g % 2));
  }

  void upload() {
    const auto buffer = [](const auto& host) {
      return driver::DeviceBuffer(0, host.data(), host.size() * sizeof(host[0]));
    };
    on_device[0] = buffer(values.bytes);
    on_device[1] = buffer(words);
    on_device[2] = buffer(b.bytes);
    on_device[3] = buffer(result.bytes);
    on_device[4] = buffer(bias.bytes);
    on_device[5] = buffer(scale_s);
    on_device[6] = buffer(scale_b);
  }
  void download() {
    driver::copy_to_host(result.bytes.data(), on_device[3].data(), result.bytes.size(), nullptr);
    driver::synchronize(nullptr);
  }
  Problem problem() const {
    Problem p;
    p.m = c.m;
    p.n = c.n;
    p.k = c.k;
    p.batch = c.batch;
    p.dtype = c.dtype;
    p.out = c.out;
    p.word_bytes = c.word_bytes;
    p.values = {on_device[0].data(), value_line, 1};
    p.words = {on_device[1].data(), word_line / c.word_bytes, 1};
    p.b = {on_device[2].data(), c.b_along_k ? 1 : b_line, c.b_along_k ? b_line : 1, c.one_b ? 0 : b_lines() * b_line};
    p.c = {static_cast<unsigned char*>(on_device[3].data()) + kGuard, c.c_along_m ? 1 : c_line,
           c.c_along_m ? c_line : 1, c_lines() * c_line};
    if (c.bias) {
      p.bias = {on_device[4].data(), 1};
    }
    if (c.scales > 0) {
      p.scale_s = {on_device[5].data(), c.scales == 2 ? 1 : 0};
      p.scale_b = {on_device[6].data(), c.scales == 2 ? 1 : 0};
    }
    p.activation = c.activation;
    return p;
  }

  /// What it should be, and what it may be off by.
  std::pair<double, double> expected(Index z, Index i, Index j) const {
    double sum = 0, magnitude = 0;
    for (Index g = 0; g < c.k / c.group(); ++g) {
      const int code = nibble(i, g);
      for (Index e = 0; e < c.group() / 2; ++e) {
        const Index within = c.group() == 2 ? code / 0xE : code >> 2 * e & 3;
        const double term =
            values.get(i * value_line + g * (c.group() / 2) + e) * b.get(b_at(z, g * c.group() + within, j));
        sum += term;
        magnitude += std::abs(term);
      }
    }
    const bool f8 = c.dtype == DType::f8_e4m3 || c.dtype == DType::f8_e5m2;
    const bool tf32 = c.dtype == DType::f32 && c.real;
    double slack = magnitude * (is_integer(c.dtype) ? 0.0 : f8 ? 1.0 / 4096 : tf32 ? 5e-4 : 1e-6);
    if (c.scales > 0) {
      const double scale = double(scale_s[c.scales == 2 ? static_cast<std::size_t>(i) : 0]) *
                           double(scale_b[c.scales == 2 ? static_cast<std::size_t>(j) : 0]);
      sum *= scale;
      slack *= scale;
    }
    if (c.bias) {
      sum += bias.get(i);
    }
    const auto [last, step] = rounding_of(c.out);
    const double want = saturated(c.out, activated(c.activation, sum)),
                 unit = std::max(last, c.out == DType::f32 ? 3e-7 : 0);
    return {want, 1.05 * unit * std::abs(want) + step + 2 * slack + (c.out == DType::i32 ? 0.0 : 1e-6)};
  }
  /// All results, or for large ones every so many, and that nothing else was written.
  void check() {
    download();
    std::vector<bool> used(result.bytes.size() / size_of(c.out));
    const Index all = c.batch * c.m * c.n, step = std::max<Index>(1, all * c.k / 2000000) | 1;
    int wrong = 0;
    for (Index at = 0; at < all; ++at) {
      const Index z = at / (c.m * c.n), i = at / c.n % c.m, j = at % c.n, place = c_at(z, i, j);
      used[static_cast<std::size_t>(place)] = true;
      if (at % step == 0 || i + 1 == c.m) {
        const auto [want, most] = expected(z, i, j);
        const double got = result.get(place);
        if (!is_near(c.out, got, want, most) && ++wrong <= 4) {
          ADD_FAILURE() << c.text() << ": c[" << z << ", " << i << ", " << j << "] is " << got << ", not " << want;
        }
      }
    }
    EXPECT_EQ(wrong, 0);
    for (std::size_t at = 0; at < used.size() && wrong < 8; ++at) {
      const unsigned char* const bytes = result.bytes.data() + at * size_of(c.out);
      if (!used[at] && std::any_of(bytes, bytes + size_of(c.out), [](unsigned char byte) { return byte != 0xff; })) {
        ++wrong;
        ADD_FAILURE() << c.text() << ": element " << at << ", which is no result, was written";
      }
    }
  }
};

class TwoFourHopper : public testing::Test {
 protected:
  void SetUp() override {
    if (!is_hopper()) {
      GTEST_SKIP() << "no Hopper GPU: " << driver::unavailable_reason();
    }
    scope.emplace(0);
    context = Context::cuda(0);
    context.precision = Precision::tf32;
  }
  void run(const Case& c, const Choice& choice) {
    Data data(c);
    data.upload();
    ASSERT_TRUE(hopper::run(data.problem(), context, choice)) << c.text() << ", " << choice.text();
    data.check();
    if (HasFailure()) {
      ADD_FAILURE() << "with " << choice.text();
    }
  }
  std::optional<driver::DeviceScope> scope;
  Context context;
};

const std::vector<Choice> kForms = {{.width = 256}, {.width = 256, .split = 2}, {.width = 256, .pair = 2},
                                    {.width = 128}, {.width = 128, .split = 2}, {.width = 128, .split = 3},
                                    {.width = 64},  {.width = 64, .split = 3},  {.width = 64, .split = 4}};
constexpr int kWidths[] = {256, 128, 64};

/// Of a type: what leaves as it is, its own and f32, or what 8-bit types give; then what threads convert.
std::vector<DType> outs_of(DType dtype, bool converted = true) {
  std::vector<DType> outs = {DType::f32};
  const bool byte = size_of(dtype) == 1;
  for (const DType out : {DType::f16, DType::bf16, DType::i8, DType::f8_e4m3, DType::f8_e5m2}) {
    const bool half = size_of(out) == 2;
    if (converted || (half && (byte || dtype == out))) {
      outs.push_back(out);
    }
  }
  if (is_integer(dtype)) {
    outs.push_back(DType::i32);
  }
  return outs;
}

// -------------------------------------------------------------------------------------------------------- tests

TEST_F(TwoFourHopper, WholeTiles) {
  for (const Choice& choice : kForms) {
    for (const bool b : {true, false}) {
      for (const bool c : {true, false}) {
        run({.m = 256, .n = 512, .k = 2048, .b_along_k = b, .c_along_m = c}, choice);
      }
    }
  }
}

TEST_F(TwoFourHopper, Tails) {
  const std::array<Index, 3> sizes[] = {{1, 1, 4},       {8, 8, 8},        {64, 72, 12},   {72, 64, 128},
                                        {120, 200, 132}, {128, 256, 252},  {136, 264, 20}, {200, 136, 516},
                                        {129, 257, 260}, {250, 130, 1020}, {384, 40, 640}, {40, 520, 384},
                                        {7, 300, 2060}};
  for (const auto& [m, n, k] : sizes) {
    for (const DType dtype :
         {DType::bf16, DType::f16, DType::i8, DType::u8, DType::f8_e4m3, DType::f8_e5m2, DType::f32}) {
      const bool converted = (m + n + static_cast<Index>(dtype)) % 2 == 0;
      for (const DType out : outs_of(dtype, converted)) {
        for (const bool c : {true, false}) {
          const bool b = (m + n + k / 4 + (c ? 1 : 0)) % 2 == 0;
          const Case each{.m = m, .n = n, .k = k, .dtype = dtype, .out = out, .b_along_k = b, .c_along_m = c};
          run(each, {.width = kWidths[(m + k / 4) % 3]});
        }
      }
    }
  }
}

TEST_F(TwoFourHopper, LinesWithGaps) {
  for (const bool b : {true, false}) {
    for (const bool c : {true, false}) {
      for (const Index c_pad : {0, 8, 3}) {
        run({.m = 200, .n = 328, .k = 720, .b_along_k = b, .c_along_m = c, .pad = 2, .c_pad = c_pad}, {});
      }
    }
  }
}

TEST_F(TwoFourHopper, WordsOfEverySize) {
  for (const int bytes : {1, 2, 4}) {
    run({.m = 130, .n = 264, .k = 1000, .word_bytes = bytes}, {});
    run({.m = 130, .n = 264, .k = 1000, .dtype = DType::i8, .out = DType::i32, .word_bytes = bytes}, {});
  }
}

TEST_F(TwoFourHopper, Clusters) {
  for (const DType dtype : {DType::bf16, DType::i8, DType::f8_e4m3, DType::f32}) {
    for (const DType out : outs_of(dtype)) {
      for (const Choice& choice : kForms) {
        for (const bool c : {true, false}) {
          run({.m = 200, .n = 392, .k = 4300, .dtype = dtype, .out = out, .b_along_k = c, .c_along_m = c}, choice);
        }
      }
    }
  }
}

/// Parts of the depth that are not equal, down to one chunk of metadata each.
TEST_F(TwoFourHopper, DepthsThatSplitUnevenly) {
  for (const Index k : {2048, 2100, 2560, 2564, 3076, 3584, 4608}) {
    for (const int width : {128, 64}) {
      run({.m = 136, .n = 72, .k = k}, {.width = width, .split = 4});
      run({.m = 136, .n = 72, .k = 2 * k, .dtype = DType::i8, .out = DType::i32}, {.width = width, .split = 4});
    }
  }
}

TEST_F(TwoFourHopper, Extras) {
  for (const DType dtype : {DType::f16, DType::bf16, DType::i8, DType::f8_e5m2}) {
    for (const DType out : outs_of(dtype)) {
      if (out == DType::i32) {
        continue;
      }
      for (const Activation activation : {Activation::none, Activation::relu, Activation::gelu, Activation::silu}) {
        const bool exact = activation == Activation::gelu || activation == Activation::silu;
        if (out == DType::f32 && exact) {
          continue;
        }
        Case c{.m = 200,
               .n = 264,
               .k = 200,
               .dtype = dtype,
               .out = out,
               .bias = true,
               .scales = 1,
               .activation = activation,
               .real = dtype != DType::i8};
        run(c, {});
        c.scales = 2;
        c.c_along_m = false;
        run(c, {.width = 128});
        c.bias = false;
        run(c, {.width = 64});
      }
    }
  }
}

TEST_F(TwoFourHopper, Batches) {
  for (const bool one_b : {false, true}) {
    for (const bool c : {true, false}) {
      run({.m = 136, .n = 264, .k = 520, .c_along_m = c, .batch = 5, .one_b = one_b}, {});
      run({.m = 136, .n = 131, .k = 520, .b_along_k = false, .c_along_m = c, .batch = 3, .bias = true, .one_b = one_b},
          {.width = 128});
    }
  }
}

/// More tiles than CTAs, so that each has several.
TEST_F(TwoFourHopper, ManyTiles) {
  run({.m = 1416, .n = 3080, .k = 264, .real = false}, {.width = 128});
  run({.m = 3080, .n = 4200, .k = 1032, .c_along_m = false, .real = false}, {});
  run({.m = 3080, .n = 4200, .k = 520, .dtype = DType::i8, .out = DType::i32, .real = false}, {});
  for (const bool along : {true, false}) {
    for (const Index c_pad : {0, 3}) {
      const Case c{.m = 2904,
                   .n = 3080,
                   .k = 264,
                   .out = along ? DType::bf16 : DType::f32,
                   .b_along_k = along,
                   .c_along_m = along,
                   .c_pad = c_pad,
                   .real = false};
      run(c, {.pair = 2});
      run(c, {.width = 64});
    }
  }
}

TEST_F(TwoFourHopper, RandomProblems) {
  constexpr DType kTypes[] = {DType::bf16,    DType::f16,     DType::i8, DType::u8,
                              DType::f8_e4m3, DType::f8_e5m2, DType::f32};
  std::mt19937 random(7);
  const auto below = [&](Index n) { return static_cast<Index>(random() % static_cast<unsigned>(n)); };
  for (int n = 0; n < 200 && !HasFailure(); ++n) {
    Case c{.m = 1 + below(400), .n = 1 + below(600), .k = 4 * (1 + below(200))};
    c.dtype = kTypes[below(7)];
    const std::vector<DType> outs = outs_of(c.dtype);
    c.out = outs[static_cast<std::size_t>(below(static_cast<Index>(outs.size())))];
    c.b_along_k = below(2) == 0;
    c.c_along_m = below(2) == 0;
    c.batch = 1 + below(3);
    c.pad = below(2);
    c.c_pad = below(3) * 4;
    c.word_bytes = 1 << below(3);
    c.one_b = below(4) == 0;
    if (c.out != DType::i32) {
      c.bias = below(2) == 0;
      c.scales = static_cast<int>(below(3));
      c.activation = static_cast<Activation>(below(c.out == DType::f32 ? 2 : 4));
    }
    c.real = !is_integer(c.dtype) || c.out == DType::i32;
    if (below(3) == 0) {  // whole units, as most are
      c.m = round_up(c.m, 16);
      c.n = round_up(c.n, 16);
    }
    Choice choice = kForms[static_cast<std::size_t>(below(static_cast<Index>(kForms.size())))];
    choice.split = 1;  // most are not deep enough
    run(c, choice);
  }
}

TEST_F(TwoFourHopper, EveryNibbleEverywhere) {
  for (const DType dtype : {DType::bf16, DType::f16, DType::i8, DType::f8_e4m3, DType::f8_e5m2}) {
    const Index k = size_of(dtype) == 1 ? 512 : 256, groups = k / 4;
    Data data({.m = 6 * groups, .n = 128, .k = k, .dtype = dtype, .out = DType::f32, .real = false});
    for (Index i = 0; i < data.c.m; ++i) {
      for (Index g = 0; g < groups; ++g) {
        data.set_nibble(i, g, kNibbles[g == i / 6 ? i % 6 : (i + g) % 6]);
      }
    }
    data.upload();
    for (const int width : kWidths) {
      ASSERT_TRUE(hopper::run(data.problem(), context, {.width = width}));
      data.check();
    }
  }
}

TEST_F(TwoFourHopper, EveryPairEverywhere) {
  Data data({.m = 128, .n = 128, .k = 128, .dtype = DType::f32, .out = DType::f32, .real = false});
  for (Index i = 0; i < 128; ++i) {
    for (Index g = 0; g < 64; ++g) {
      data.set_nibble(i, g, (i / 2 == g) == (i % 2 == 0) ? 0xE : 0x4);
    }
  }
  data.upload();
  ASSERT_TRUE(hopper::run(data.problem(), context, {.width = 128}));
  data.check();
}

/// Operands that workspace turns or rounds, with strides that nothing else would take.
TEST_F(TwoFourHopper, OddStrides) {
  for (const DType dtype : {DType::i8, DType::f8_e5m2, DType::f32}) {
    const DType out = dtype == DType::i8 ? DType::i32 : DType::f32;
    Data data(
        {.m = 136, .n = 77, .k = 332, .dtype = dtype, .out = out, .b_along_k = false, .c_along_m = false, .batch = 2});
    const Index size = static_cast<Index>(size_of(dtype));
    Elements b(dtype, 2 * 332 * 3 * 77 + 1);  // every third element, and none where it would be aligned
    for (Index z = 0; z < 2; ++z) {
      for (Index k = 0; k < 332; ++k) {
        for (Index j = 0; j < 77; ++j) {
          std::memcpy(b.bytes.data() + (((z * 332 + k) * 77 + j) * 3 + 1) * size,
                      data.b.bytes.data() + data.b_at(z, k, j) * size, size_of(dtype));
        }
      }
    }
    data.upload();
    const driver::DeviceBuffer spread(0, b.bytes.data(), b.bytes.size());
    Problem p = data.problem();
    p.b = {static_cast<char*>(spread.data()) + size, 231, 3, 332 * 231};
    ASSERT_TRUE(hopper::run(p, context, {}));
    data.check();
  }
}

/// What a line does not keep is not multiplied.
TEST_F(TwoFourHopper, InfinitiesThatNobodyKeeps) {
  Data data({.m = 128, .n = 256, .k = 256, .real = false});
  for (Index k = 0; k < 256; ++k) {
    for (Index i = 0; i < 128; ++i) {
      data.set_nibble(i, k / 4, 0x8);  // 0 and 2
    }
    for (Index j = 0; j < 256; ++j) {
      if (k % 2 == 1) {
        data.b.write<std::uint16_t>(data.b_at(0, k, j), j % 2 == 0 ? 0x7f80 : 0x7fc0);
      }
    }
  }
  data.upload();
  ASSERT_TRUE(hopper::run(data.problem(), context, {}));
  data.check();
}

/// The bytes that a class of kernels leaves, or nothing where the problem is not for it.
template <typename Run>
std::vector<unsigned char> bytes_of(const Case& c, const Run& run) {
  Data data(c);
  data.upload();
  if (!run(data.problem())) {
    return {};
  }
  data.download();
  return data.result.bytes;
}

/// Sums of whole numbers have no error, so that every class must give the same bits.
TEST_F(TwoFourHopper, IsThePortableClassBitForBit) {
  for (const auto& [m, n, k] :
       {std::array<Index, 3>{256, 512, 2048}, {130, 264, 1000}, {128, 64, 1024}, {72, 16, 1024}}) {
    for (const DType dtype : {DType::bf16, DType::f16, DType::i8, DType::f8_e4m3, DType::f8_e5m2, DType::f32}) {
      for (const DType out : outs_of(dtype)) {
        for (const bool b : {true, false}) {
          const Case c{.m = m, .n = n, .k = k, .dtype = dtype, .out = out, .b_along_k = b, .scales = 0, .real = false};
          const auto portable = bytes_of(c, [&](const Problem& p) { return cuda::run_portable(p, context), true; });
          EXPECT_TRUE(bytes_of(c, [&](const Problem& p) { return cuda::run_hopper(p, context); }) == portable)
              << c.text();
          const auto narrow = bytes_of(c, [&](const Problem& p) { return cuda::run_narrow(p, context); });
          EXPECT_EQ(narrow.empty(), n > 64 || m % 64 != 0 || size_of(dtype) != 2 || out != dtype || !b) << c.text();
          EXPECT_TRUE(narrow.empty() || narrow == portable) << c.text();
          const auto direct = bytes_of(c, [&](const Problem& p) { return cuda::run_direct(p, context); });
          EXPECT_EQ(direct.empty(), n > 16 || size_of(dtype) != 2 || out != dtype || !b) << c.text();
          EXPECT_TRUE(direct.empty() || direct == portable) << c.text();
          const auto few = bytes_of(c, [&](const Problem& p) { return cuda::run_few(p, context); });
          EXPECT_TRUE(few.empty() || few == portable) << c.text();
        }
      }
    }
  }
}

/// A metadata register that changes too early gives wrong sums now and then.
void repeat(const Choice& choice, DType dtype, int times, Context& context) {
  Data data({.m = 384,
             .n = 512,
             .k = 16384,
             .dtype = dtype,
             .out = dtype == DType::i8 ? DType::i32 : DType::f32,
             .real = false});
  data.upload();
  ASSERT_TRUE(hopper::run(data.problem(), context, choice));
  data.check();
  const std::vector<unsigned char> first = data.result.bytes;
  for (int n = 0; n < times; ++n) {
    ASSERT_TRUE(hopper::run(data.problem(), context, choice));
    data.download();
    ASSERT_TRUE(first == data.result.bytes) << "run " << n << ", " << choice.text();
  }
}

TEST_F(TwoFourHopper, ThousandRunsAreEqual) {
  for (const Choice& choice : kForms) {
    repeat(choice, DType::bf16, 500, context);
  }
  repeat({}, DType::i8, 1000, context);
}

TEST_F(TwoFourHopper, RefusesWhatItCannotFetch) {
  Data data({.m = 128, .n = 256, .k = 256});
  data.upload();
  const Problem right = data.problem();
  const auto refused = [&](const auto& change) {
    Problem p = right;
    change(p);
    return !cuda::run_hopper(p, context);
  };
  EXPECT_FALSE(refused([](Problem&) {}));
  EXPECT_TRUE(refused([](Problem& p) { p.values.along = 2; }));
  EXPECT_TRUE(refused([](Problem& p) { p.words.along = 2; }));
  EXPECT_TRUE(refused([](Problem& p) { p.values.line = 132; }));
  EXPECT_TRUE(refused([](Problem& p) { p.words.line = 20; }));
  EXPECT_TRUE(refused([](Problem& p) { p.b = {p.b.data, 2, 512, 0}; }));
  EXPECT_TRUE(refused([](Problem& p) { p.b.data = static_cast<char*>(p.b.data) + 2; }));
  EXPECT_TRUE(refused([](Problem& p) { p.out = DType::f16; }));
  EXPECT_TRUE(refused([](Problem& p) {
    p.out = DType::f32;
    p.activation = Activation::gelu;
  }));
  EXPECT_TRUE(refused([](Problem& p) { p.k = 0; }));
  context.precision = Precision::ieee;
  EXPECT_TRUE(refused([](Problem& p) { p.dtype = p.out = DType::f32; }));
}

/// Which form where, as measured: no GPU is needed to ask.
TEST(TwoFourHopperChoice, IsWhatWasFastest) {
  const auto chosen = [](Index m, Index k, Index n, bool b_along_k) {
    Problem p;
    p.m = m;
    p.k = k;
    p.n = n;
    p.dtype = p.out = DType::bf16;
    p.b = {nullptr, b_along_k ? 1 : n, b_along_k ? k : 1, 0};
    const auto clusters = [](int, int size) { return size == 4 ? 30 : 132 / size; };  // of 4 some parts have one less
    return hopper::choose(p, 132, clusters).text();
  };
  for (const bool b : {true, false}) {
    const Choice large{.pair = b ? 1 : 2};
    EXPECT_EQ(chosen(8192, 8192, 8192, b), large.text());
    EXPECT_EQ(chosen(4096, 14336, 4096, b), large.text());
    EXPECT_EQ(chosen(14336, 4096, 4096, b), large.text());
    EXPECT_EQ(chosen(14336, 4096, 512, b), Choice{.pair = 2}.text());
    EXPECT_EQ(chosen(2048, 2048, 2048, b), Choice{}.text());
    EXPECT_EQ(chosen(4096, 14336, 512, b), Choice{.split = 2}.text());
    EXPECT_EQ(chosen(14336, 4096, 64, b), Choice{.width = 64}.text());
    EXPECT_EQ(chosen(8192, 8192, 64, b), (Choice{.width = 64, .split = 2}.text()));
    EXPECT_EQ(chosen(4096, 14336, 64, b), (Choice{.width = 64, .split = 3}.text()));
    EXPECT_EQ(chosen(4096, 14336, 128, b), (Choice{.width = 64, .split = 2}.text()));
  }
}

// -------------------------------------------------------------------------------------------------------- times

}  // namespace
}  // namespace fretwork::two_four
