// 2:4 products of the portable class on a real GPU, against float64 on the host made from the nibbles alone. Skipped
// where there is none. --gtest_also_run_disabled_tests prints how long large products take.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdio>
#include <limits>
#include <memory>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "core/half.h"
#include "ops/two_four/problem.h"
#include "runtime/cuda_driver.h"
#include "runtime/kernels.h"
#include "runtime/nvrtc.h"
#include "support/activated.h"
#include "support/result_types.h"

namespace fretwork {
namespace {

using Index = std::int64_t;

Index group_of(DType dtype) { return dtype == DType::f32 ? 2 : 4; }
bool is_fp8(DType dtype) { return dtype == DType::f8_e4m3 || dtype == DType::f8_e5m2; }

double from_fp8(std::uint8_t bits, DType dtype) {
  if (dtype == DType::f8_e5m2) {
    return float_from_f16(static_cast<std::uint16_t>(bits << 8));
  }
  const int exponent = bits >> 3 & 15, digits = bits & 7;
  const double size = exponent == 15 && digits == 7 ? std::numeric_limits<double>::quiet_NaN()
                      : exponent == 0               ? std::ldexp(digits, -9)
                                                    : std::ldexp(8 + digits, exponent - 10);
  return bits & 0x80 ? -size : size;
}

/// Memory on host and device: `offset` elements, `count` that are used, and a guard; all ones at first, which is NaN
/// in every type that has one.
struct Memory {
  static constexpr Index kGuard = 64;
  DType dtype;
  Index offset;
  std::vector<unsigned char> bytes;
  cuda::DeviceBuffer device;

  Memory(DType type, Index count, Index before = 0)
      : dtype(type), offset(before), bytes(static_cast<std::size_t>(before + count + kGuard) * size_of(type), 0xff) {}
  template <typename T>
  T& at(Index n) {
    return reinterpret_cast<T*>(bytes.data())[offset + n];
  }
  double get(Index n) {
    switch (dtype) {
      case DType::f32:
        return at<float>(n);
      case DType::f16:
        return float_from_f16(at<std::uint16_t>(n));
      case DType::bf16:
        return float_from_bf16(at<std::uint16_t>(n));
      case DType::i8:
        return at<std::int8_t>(n);
      case DType::u8:
        return at<std::uint8_t>(n);
      case DType::i32:
        return at<std::int32_t>(n);
      default:
        return from_fp8(at<std::uint8_t>(n), dtype);
    }
  }
  void set(Index n, double value) {
    switch (dtype) {
      case DType::f32:
        at<float>(n) = static_cast<float>(value);
        break;
      case DType::f16:
        at<std::uint16_t>(n) = f16_from_float(static_cast<float>(value));
        break;
      case DType::bf16:
        at<std::uint16_t>(n) = bf16_from_float(static_cast<float>(value));
        break;
      case DType::i8:
        at<std::int8_t>(n) = static_cast<std::int8_t>(value);
        break;
      default:
        at<std::int32_t>(n) = static_cast<std::int32_t>(value);
    }
  }
  /// A random number of about unit size, over the whole range for i8; `coarse`: that tf32 holds.
  void randomise(Index n, std::mt19937& random, bool coarse) {
    if (is_fp8(dtype)) {
      const unsigned digits = dtype == DType::f8_e4m3 ? 3 : 2, least = dtype == DType::f8_e4m3 ? 4 : 12;
      at<std::uint8_t>(n) =
          static_cast<std::uint8_t>(((least + random() % 5) << digits | random() % (1u << digits)) | random() % 2 << 7);
    } else if (dtype == DType::u8) {
      at<std::uint8_t>(n) = static_cast<std::uint8_t>(random());
    } else if (dtype == DType::i8) {
      set(n, static_cast<double>(random() % 256) - 128);
    } else {
      const float number = static_cast<float>(static_cast<double>(random()) / 2147483648.0 - 1.0);
      set(n, coarse ? float_from_f16(f16_from_float(number)) : number);
    }
  }
  void upload() { device = cuda::DeviceBuffer(0, bytes.data(), bytes.size()); }
  void download() {
    cuda::copy_to_host(bytes.data(), device.data(), bytes.size(), nullptr);
    cuda::synchronize(nullptr);
  }
  void* data() const {
    return static_cast<unsigned char*>(device.data()) + static_cast<std::size_t>(offset) * size_of(dtype);
  }
};

/// How a matrix lies: the axis whose elements are neighbours, or neither's.
enum class Order { first, second, neither };
/// A scale: none, one for all, or one for each line.
enum class Scale { none, one, each };

struct Case {
  Index m, n, k, batch = 1;
  DType dtype = DType::bf16, out = DType::bf16;
  Order b = Order::second, c = Order::second;  ///< of (k, n) and (m, n)
  Activation activation = Activation::none;
  bool bias = false;
  Scale scale_s = Scale::none, scale_b = Scale::none;
  Precision precision = Precision::tf32;
  int word_bytes = 2;
  Index pad = 0, offset = 0;   ///< elements between lines, and before the first
  bool words_along_m = false;  ///< metadata of neighbouring lines lies together, and values likewise
  bool shared_b = false;       ///< all batches have the same
  unsigned seed = 1;

  bool coarse() const { return dtype == DType::f32 && precision == Precision::tf32; }
  std::string text() const {
    std::ostringstream text;
    text << m << 'x' << n << 'x' << k << " batch " << batch << ' ' << name_of(dtype) << " -> " << name_of(out) << " b "
         << static_cast<int>(b) << " c " << static_cast<int>(c) << " activation " << static_cast<int>(activation)
         << (bias ? " bias" : "") << " scales " << static_cast<int>(scale_s) << static_cast<int>(scale_b)
         << " precision " << static_cast<int>(precision) << " words " << word_bytes << " pad " << pad << " offset "
         << offset << (words_along_m ? " words along m" : "") << (shared_b ? " shared b" : "") << " seed " << seed;
    return text.str();
  }
};

/// Strides of a (rows, cols) matrix and what it takes.
struct Layout {
  Index row, col, extent;
  Layout(Index rows, Index cols, Order order, Index pad) {
    const Index between = order == Order::neither ? 3 : 1;
    if (order == Order::first) {
      row = 1, col = rows + pad;
    } else {
      col = between, row = cols * between + pad;
    }
    extent = (rows - 1) * row + (cols - 1) * col + 1;
  }
};

struct Product {
  Case c;
  std::mt19937 random;
  Index kept, words, b_batch, c_batch;
  Layout value_layout, word_layout, b_layout, c_layout;
  Memory values, metadata, b, out, bias, scale_s, scale_b;

  explicit Product(const Case& which)
      : c(which),
        random(c.seed),
        kept(c.k / 2),
        words((c.k / group_of(c.dtype) + 2 * c.word_bytes - 1) / (2 * c.word_bytes)),
        b_batch(0),
        c_batch(0),
        value_layout(c.m, std::max<Index>(kept, 1), c.words_along_m ? Order::first : Order::second, c.pad),
        word_layout(c.m, std::max<Index>(words, 1), c.words_along_m ? Order::first : Order::second, c.pad),
        b_layout(std::max<Index>(c.k, 1), c.n, c.b, c.pad),
        c_layout(c.m, c.n, c.c, c.pad),
        values(c.dtype, value_layout.extent, c.offset),
        metadata(c.word_bytes == 1   ? DType::i8
                 : c.word_bytes == 2 ? DType::i16
                                     : DType::i32,
                 word_layout.extent, c.offset),
        b(c.dtype, b_layout.extent * (c.shared_b ? 1 : c.batch) + c.pad * c.batch, c.offset),
        out(c.out, (c_layout.extent + c.pad) * c.batch, c.offset),
        bias(c.out, c.m),
        scale_s(DType::f32, c.m),
        scale_b(DType::f32, c.n) {
    b_batch = c.shared_b ? 0 : b_layout.extent + c.pad;
    c_batch = c_layout.extent + c.pad;
    for (Index i = 0; i < c.m; ++i) {
      for (Index v = 0; v < kept; ++v) {
        values.randomise(value_at(i, v), random, c.coarse());
      }
      for (Index g = 0; g < c.k / group_of(c.dtype); ++g) {
        set_nibble(i, g, valid()[random() % valid().size()]);
      }
      c.out == DType::i32 ? bias.set(i, static_cast<double>(random() % 2000001) - 1e6)
                          : bias.randomise(i, random, false);
      scale_s.set(i,
                  (0.25 + static_cast<double>(random() % 1000) / 500) * (two_four::is_integer(c.dtype) ? 1e-3 : 1.0));
    }
    for (Index j = 0; j < c.n; ++j) {
      scale_b.set(j, 0.25 + static_cast<double>(random() % 1000) / 500);
    }
    for (Index z = 0; z < (c.shared_b ? 1 : c.batch); ++z) {
      for (Index k = 0; k < c.k; ++k) {
        for (Index j = 0; j < c.n; ++j) {
          b.randomise(b_at(z, k, j), random, c.coarse());
        }
      }
    }
  }

  std::vector<unsigned> valid() const {
    return c.dtype == DType::f32 ? std::vector<unsigned>{0x4, 0xE}
                                 : std::vector<unsigned>{0x4, 0x8, 0x9, 0xC, 0xD, 0xE};
  }
  Index value_at(Index i, Index v) const { return i * value_layout.row + v * value_layout.col; }
  Index b_at(Index z, Index k, Index j) const { return z * b_batch + k * b_layout.row + j * b_layout.col; }
  Index c_at(Index z, Index i, Index j) const { return z * c_batch + i * c_layout.row + j * c_layout.col; }
  unsigned char& nibble_byte(Index i, Index g) {
    const Index word = i * word_layout.row + g / (2 * c.word_bytes) * word_layout.col;
    return metadata.bytes[static_cast<std::size_t>((metadata.offset + word) * c.word_bytes + g / 2 % c.word_bytes)];
  }
  void set_nibble(Index i, Index g, unsigned nibble) {
    unsigned char& byte = nibble_byte(i, g);
    byte = static_cast<unsigned char>(g % 2 == 0 ? (byte & 0xf0u) | nibble : (byte & 0x0fu) | nibble << 4);
  }
  unsigned nibble(Index i, Index g) { return nibble_byte(i, g) >> (g % 2 * 4) & 15u; }

  void upload() {
    for (Memory* memory : {&values, &metadata, &b, &out, &bias, &scale_s, &scale_b}) {
      memory->upload();
    }
  }
  two_four::Problem problem() const {
    two_four::Problem p;
    p.m = c.m, p.n = c.n, p.k = c.k, p.batch = c.batch;
    p.dtype = c.dtype, p.out = c.out;
    p.values = {values.data(), value_layout.row, value_layout.col};
    p.words = {metadata.data(), word_layout.row, word_layout.col};
    p.word_bytes = c.word_bytes;
    p.b = {b.data(), b_layout.row, b_layout.col, b_batch};
    p.c = {out.data(), c_layout.row, c_layout.col, c_batch};
    if (c.bias) {
      p.bias = {bias.data(), 1};
    }
    if (c.scale_s != Scale::none) {
      p.scale_s = {scale_s.data(), c.scale_s == Scale::each ? 1 : 0};
    }
    if (c.scale_b != Scale::none) {
      p.scale_b = {scale_b.data(), c.scale_b == Scale::each ? 1 : 0};
    }
    p.activation = c.activation;
    return p;
  }
  void run(Context& context) {
    context.precision = c.precision;
    two_four::cuda::run_portable(problem(), context);
  }

  /// A line as places along k and values.
  std::vector<std::pair<Index, double>> line(Index i) {
    std::vector<std::pair<Index, double>> found;
    const Index group = group_of(c.dtype);
    for (Index g = 0; g < c.k / group; ++g) {
      const unsigned code = nibble(i, g);
      if (group == 2) {
        found.emplace_back(2 * g + (code == 0xE ? 1 : 0), values.get(value_at(i, g)));
      } else {
        found.emplace_back(4 * g + (code & 3), values.get(value_at(i, 2 * g)));
        found.emplace_back(4 * g + (code >> 2), values.get(value_at(i, 2 * g + 1)));
      }
    }
    return found;
  }
  /// How far products and sums may be off, relative to the magnitudes that are added.
  double slack() const { return two_four::is_integer(c.dtype) ? 0.0 : 2e-6; }

  void check_element(Index z, Index i, Index j, const std::vector<std::pair<Index, double>>& row, int& wrong) {
    double sum = 0, magnitude = 0;
    for (const auto& [k, value] : row) {
      const double term = value * b.get(b_at(z, k, j));
      sum += term;
      magnitude += std::abs(term);
    }
    const double scale = (c.scale_s == Scale::none ? 1.0 : scale_s.get(c.scale_s == Scale::each ? i : 0)) *
                         (c.scale_b == Scale::none ? 1.0 : scale_b.get(c.scale_b == Scale::each ? j : 0));
    const double added = c.bias ? bias.get(i) : 0.0, before = sum * scale + added;
    double want = saturated(c.out, activated(c.activation, before));
    const bool integers =
        c.out == DType::i32 && c.scale_s == Scale::none && c.scale_b == Scale::none && c.activation <= Activation::relu;
    double most = 0;
    if (!integers) {
      const auto [last, step] = rounding_of(c.out);
      const double applied = c.out != DType::f32 && c.activation != Activation::none ? 3e-5 : 0.0;
      most = step + (1.01 * last + applied) * std::abs(want) + 1.2 * magnitude * scale * slack() +
             5e-7 * (std::abs(sum * scale) + std::abs(added)) + 1e-7 + (c.out == DType::i32 ? 0.51 : 0.0);
      if (c.out == DType::f16) {
        most += 3e-8;
        want = std::abs(want) > 65504 ? std::copysign(std::numeric_limits<double>::infinity(), want) : want;
      }
    }
    const double got = out.get(c_at(z, i, j));
    if (!(std::abs(got - want) <= most) && got != want && ++wrong <= 5) {
      ADD_FAILURE() << c.text() << ": c[" << z << ", " << i << ", " << j << "] is " << got << ", not " << want;
    }
  }
  /// Compares c, of large products a part: the first and last rows and columns among it; and nothing else was written.
  void check() {
    out.download();
    const Index work = c.batch * c.m * c.n * std::max<Index>(c.k, 1);
    const Index skip = std::max<Index>(1, work / 30'000'000) | 1;
    int wrong = 0;
    Index turn = 0;
    for (Index i = 0; i < c.m && wrong <= 5; ++i) {
      const auto row = line(i);
      for (Index z = 0; z < c.batch; ++z) {
        for (Index j = 0; j < c.n && wrong <= 5; ++j, ++turn) {
          if (turn % skip == 0 || (i == c.m - 1 && j >= c.n - 2)) {
            check_element(z, i, j, row, wrong);
          }
        }
      }
    }
    check_rest();
  }
  void check_rest() {
    std::vector<bool> used(out.bytes.size() / size_of(c.out));
    for (Index z = 0; z < c.batch; ++z) {
      for (Index i = 0; i < c.m; ++i) {
        for (Index j = 0; j < c.n; ++j) {
          used[static_cast<std::size_t>(out.offset + c_at(z, i, j))] = true;
        }
      }
    }
    for (std::size_t n = 0; n < out.bytes.size(); ++n) {
      if (!used[n / size_of(c.out)] && out.bytes[n] != 0xff) {
        FAIL() << c.text() << ": wrote at element " << n / size_of(c.out) << ", which is not of c";
      }
    }
  }
};

class TwoFourCuda : public testing::Test {
 protected:
  void SetUp() override {
    if (!cuda::available()) {
      GTEST_SKIP() << cuda::unavailable_reason();
    }
    if (nvrtc::library().path.empty()) {
      GTEST_SKIP() << "no NVRTC: " << nvrtc::library().reason;
    }
    scope_ = std::make_unique<cuda::DeviceScope>(0);
    context_ = Context::cuda(0);
  }
  void run_and_check(const Case& c) {
    Product product(c);
    product.upload();
    product.run(context_);
    product.check();
  }
  std::unique_ptr<cuda::DeviceScope> scope_;
  Context context_;
};

struct Types {
  DType dtype, out;
  Precision precision = Precision::ieee;
};
constexpr std::array kAllTypes = {
    Types{DType::f32, DType::f32, Precision::ieee},
    Types{DType::f32, DType::f32, Precision::tf32},
    Types{DType::f32, DType::f32, Precision::tf32x3},
    Types{DType::f16, DType::f16},
    Types{DType::f16, DType::f32},
    Types{DType::bf16, DType::bf16},
    Types{DType::bf16, DType::f32},
    Types{DType::i8, DType::i32},
    Types{DType::i8, DType::f32},
    Types{DType::i8, DType::f16},
    Types{DType::i8, DType::bf16},
    Types{DType::f8_e4m3, DType::bf16},
    Types{DType::f8_e4m3, DType::f16},
    Types{DType::f8_e4m3, DType::f32},
    Types{DType::f8_e5m2, DType::bf16},
    Types{DType::f8_e5m2, DType::f16},
    Types{DType::f8_e5m2, DType::f32},
    Types{DType::u8, DType::i32},
    Types{DType::u8, DType::i8},
    Types{DType::i8, DType::i8},
    Types{DType::f8_e4m3, DType::f8_e4m3},
    Types{DType::f8_e5m2, DType::f8_e5m2},
    Types{DType::f16, DType::bf16},
    Types{DType::f32, DType::f8_e4m3, Precision::tf32},
};

Case with_types(Case c, const Types& types) {
  c.dtype = types.dtype;
  c.out = types.out;
  c.precision = types.precision;
  if (two_four::is_integer(c.dtype) && c.out != DType::i32) {  // sums are large numbers
    c.scale_s = c.scale_s == Scale::none ? Scale::one : c.scale_s;
  }
  return c;
}

/// Every valid nibble at every place of a tile and of two stages.
TEST_F(TwoFourCuda, EveryNibbleEverywhere) {
  for (const Types& types : kAllTypes) {
    if (two_four::is_integer(types.dtype) && (types.out == DType::f16 || types.out == DType::i8)) {
      continue;  // sums are beyond it without a scale
    }
    const Index group = group_of(types.dtype), k = 64 * group;
    for (unsigned turn = 0; turn < (group == 2 ? 2u : 6u); ++turn) {
      for (const Order order : {Order::first, Order::second}) {
        Case c{128, 128, k};
        c.dtype = types.dtype, c.out = types.out, c.precision = types.precision;
        c.b = order;
        Product p(c);
        std::mt19937 first(99);  // without a pattern, which a wrong place might share
        for (Index i = 0; i < c.m; ++i) {
          for (Index g = 0; g < k / group; ++g) {
            p.set_nibble(i, g, p.valid()[(first() % 6 + turn) % p.valid().size()]);
          }
        }
        p.upload();
        p.run(context_);
        p.check();
        if (HasFailure()) {
          return;
        }
      }
    }
  }
}

/// Whole tiles, tails of all kinds, and both ways to lie of b and c.
TEST_F(TwoFourCuda, ShapesAndOrders) {
  for (const Types& types : kAllTypes) {
    for (const Order b : {Order::first, Order::second}) {
      for (const Order c : {Order::first, Order::second}) {
        for (const auto& [m, n, k] : std::initializer_list<std::array<Index, 3>>{{128, 128, 256},
                                                                                 {256, 384, 512},
                                                                                 {64, 96, 1024},
                                                                                 {136, 264, 320},
                                                                                 {200, 72, 96},
                                                                                 {1, 128, 128},
                                                                                 {128, 1, 256},
                                                                                 {129, 131, 132},
                                                                                 {300, 65, 1000},
                                                                                 {8, 8, 32},
                                                                                 {1, 1, 4},
                                                                                 {257, 130, 68}}) {
          run_and_check(with_types({m, n, k, 1, DType::bf16, DType::bf16, b, c, Activation::none, true}, types));
          if (HasFailure()) {
            return;
          }
        }
      }
    }
  }
}

TEST_F(TwoFourCuda, ManyStagesAndTiles) {
  for (const Types& types : kAllTypes) {
    Case c = with_types({2304, 520, 4096}, types);
    c.c = types.out == DType::f32 ? Order::first : Order::second;
    c.b = types.out == DType::bf16 ? Order::first : Order::second;
    run_and_check(c);
  }
}

TEST_F(TwoFourCuda, NoDepth) {
  for (const Types& types : kAllTypes) {
    run_and_check(with_types({70, 130, 0, 2, DType::bf16, DType::bf16, Order::second, Order::second, Activation::silu,
                              types.out != DType::i32},
                             types));
  }
}

TEST_F(TwoFourCuda, EpiloguesAndBatches) {
  using enum Activation;
  unsigned seed = 1;
  for (const Types& types : kAllTypes) {
    for (const Activation activation : {none, relu, gelu, silu}) {
      for (const Scale scale : {Scale::none, Scale::one, Scale::each}) {
        for (const Order order : {Order::first, Order::second}) {
          Case c = with_types({144, 136, 192, 3, DType::bf16, DType::bf16, order, order, activation, true, scale,
                               seed % 2 == 0 ? scale : Scale::each},
                              types);
          if (c.out == DType::i32 && (activation > relu || seed % 2 == 0)) {
            c.scale_s = c.scale_b = Scale::none;
            c.activation = std::min(c.activation, relu);
          }
          c.shared_b = seed % 3 == 0;
          c.seed = seed++;
          run_and_check(c);
          if (HasFailure()) {
            return;
          }
        }
      }
    }
  }
}

TEST_F(TwoFourCuda, RandomProblems) {
  std::mt19937 random(7);
  const auto one_of = [&](const auto& list) { return *(std::begin(list) + random() % std::size(list)); };
  for (unsigned turn = 0; turn < 600 && !HasFailure(); ++turn) {
    const Types types = one_of(kAllTypes);
    Case c{one_of(std::array<Index, 10>{1, 2, 7, 16, 33, 64, 100, 128, 130, 257}),
           one_of(std::array<Index, 10>{1, 3, 8, 17, 32, 65, 128, 129, 192, 260}),
           one_of(std::array<Index, 9>{1, 2, 5, 16, 17, 32, 63, 64, 150}) * group_of(types.dtype),
           one_of(std::array<Index, 3>{1, 1, 4})};
    c.b = static_cast<Order>(random() % 3);
    c.c = static_cast<Order>(random() % 3);
    c.activation = static_cast<Activation>(random() % 4);
    c.bias = random() % 2 == 0;
    c.scale_s = static_cast<Scale>(random() % 3);
    c.scale_b = static_cast<Scale>(random() % 3);
    c.word_bytes = 1 << random() % 3;
    c.pad = one_of(std::array<Index, 4>{0, 0, 1, 16});
    c.offset = one_of(std::array<Index, 4>{0, 0, 1, 16});
    c.words_along_m = random() % 5 == 0;
    c.shared_b = random() % 3 == 0;
    c.seed = turn + 1;
    c = with_types(c, types);
    if (c.out == DType::i32) {
      c.scale_s = c.scale_b = Scale::none;
      c.activation = std::min(c.activation, Activation::relu);
    }
    run_and_check(c);
  }
}

/// What no line keeps is not multiplied.
TEST_F(TwoFourCuda, NumbersThatAreNotKeptDoNotLeak) {
  for (const Types& types : kAllTypes) {
    if (two_four::is_integer(types.dtype)) {
      continue;
    }
    const Index group = group_of(types.dtype);
    for (const bool later : {false, true}) {
      for (const Order order : {Order::first, Order::second}) {
        for (const Index k : {256, 100}) {
          Case c = with_types({130, 136, k}, types);
          c.b = order;
          Product p(c);
          for (Index i = 0; i < c.m; ++i) {
            for (Index g = 0; g < k / group; ++g) {
              p.set_nibble(i, g, later ? 0xE : 0x4);
            }
          }
          for (Index row = 0; row < k; ++row) {
            const bool kept = (row % group >= group / 2) == later;
            for (Index j = 0; j < c.n && !kept; ++j) {
              if (is_fp8(c.dtype)) {
                p.b.at<std::uint8_t>(p.b_at(0, row, j)) = 0x7f;  // NaN in both
              } else {
                p.b.set(p.b_at(0, row, j), j % 2 == 0 ? std::numeric_limits<double>::quiet_NaN()
                                                      : std::numeric_limits<double>::infinity());
              }
            }
          }
          p.upload();
          p.run(context_);
          p.check();
        }
      }
    }
  }
}

/// ... and what is kept is, where it is multiplied by zero too.
TEST_F(TwoFourCuda, NumbersThatAreKeptStay) {
  for (const Types& types : kAllTypes) {
    if (size_of(types.dtype) == 1) {
      continue;
    }
    Case c = with_types({128, 128, 128}, types);
    Product p(c);
    p.b.set(p.b_at(0, 64, 77), std::numeric_limits<double>::quiet_NaN());
    p.upload();
    p.run(context_);
    p.out.download();
    const Index group = group_of(c.dtype);
    for (Index i = 0; i < c.m; ++i) {
      const auto row = p.line(i);
      const bool kept = std::any_of(row.begin(), row.end(), [](const auto& place) { return place.first == 64; });
      for (Index j = 0; j < c.n; ++j) {
        ASSERT_EQ(std::isnan(p.out.get(p.c_at(0, i, j))), kept && j == 77)
            << c.text() << ": c[" << i << ", " << j << "] of groups of " << group;
      }
    }
  }
}

TEST_F(TwoFourCuda, LargeIntegersAreExact) {
  for (const Order order : {Order::first, Order::second}) {
    for (const Index k : {4096, 4100}) {
      Case c{130, 72, k, 1, DType::i8, DType::i32};
      c.b = c.c = order;
      Product p(c);
      for (Index i = 0; i < c.m; ++i) {
        for (Index v = 0; v < p.kept; ++v) {
          p.values.set(p.value_at(i, v), 96 + static_cast<double>(p.random() % 32));
        }
      }
      for (Index row = 0; row < k; ++row) {
        for (Index j = 0; j < c.n; ++j) {
          p.b.set(p.b_at(0, row, j), 97 + static_cast<double>(p.random() % 31));
        }
      }
      p.upload();
      p.run(context_);
      p.check();
      EXPECT_GT(p.out.get(0), 1 << 24);
    }
  }
}

TEST_F(TwoFourCuda, LaunchesRepeatThemselves) {
  for (const Types& types : {kAllTypes[0], kAllTypes[1], kAllTypes[5], kAllTypes[7]}) {
    Case c = with_types(
        {512, 384, 1024, 1, DType::bf16, DType::bf16, Order::first, Order::first, Activation::none, true}, types);
    Product p(c);
    p.upload();
    std::vector<unsigned char> first;
    for (int n = 0; n < 1000; ++n) {
      p.run(context_);
      if (n % 20 == 0 || n == 999) {
        p.out.download();
        first = n == 0 ? p.out.bytes : first;
        ASSERT_TRUE(p.out.bytes == first) << c.text() << ": run " << n;
      }
    }
  }
}

}  // namespace
}  // namespace fretwork
