// 2:4 products of tma_gemm, the wgmma.sp kernel, against float64 made from the nibbles alone. Skipped where there is no
// Hopper GPU.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "ops/two_four/choose.h"
#include "runtime/cuda_driver.h"
#include "runtime/nvrtc.h"
#include "support/device_tensor.h"
#include "two_four/product.h"

namespace fretwork::two_four {
namespace {

namespace driver = fretwork::cuda;
using GpuProduct = Product<MirroredTensor>;

bool is_hopper() { return driver::available() && driver::kernel_arch(0) == "sm_90a" && !nvrtc::library().path.empty(); }

Config width(int columns, int split = 1, int pair = 1) {
  return {.family = &kTmaGemm, .columns = columns, .split = split, .pair = pair};
}
const std::vector<Config> kConfigs = {width(256),    width(256, 2), width(256, 1, 2), width(128),  width(128, 2),
                                      width(128, 3), width(64),     width(64, 3),     width(64, 4)};
constexpr int kWidths[] = {256, 128, 64};

/// Lines as the copy engine reads them, `units` of 16 bytes apart; wgmma adds products of fp8 in fewer bits.
Case aligned(Case c, Index units = 0) {
  c.slack = is_fp8(c.dtype) ? 1.0 / 2048 : c.slack;
  return c.align_lines(units);
}

class TwoFourTmaGemm : public testing::Test {
 protected:
  void SetUp() override {
    if (!is_hopper()) {
      GTEST_SKIP() << "no Hopper GPU: " << driver::unavailable_reason();
    }
    scope.emplace(0);
    context = Context::cuda(0);
    context.precision = Precision::tf32;
  }
  void run(GpuProduct& product, const Config& config) {
    product.upload();
    ASSERT_TRUE(cuda::run(product.problem(), config, context)) << product.c.text() << ", " << config.text();
    product.out.download();
    SCOPED_TRACE(config.text());
    product.check();
  }
  void run(const Case& c, const Config& config, Index units = 0) {
    GpuProduct product(aligned(c, units));
    run(product, config);
  }
  std::optional<driver::DeviceScope> scope;
  Context context;
};

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

TEST_F(TwoFourTmaGemm, WholeTiles) {
  for (const Config& config : kConfigs) {
    for (const bool b : {true, false}) {
      for (const bool c : {true, false}) {
        run({.m = 256, .n = 512, .k = 2048, .b_along_k = b, .c_along_m = c}, config);
      }
    }
  }
}

TEST_F(TwoFourTmaGemm, Tails) {
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
          run(each, width(kWidths[(m + k / 4) % 3]));
        }
      }
    }
  }
}

TEST_F(TwoFourTmaGemm, LinesWithGaps) {
  for (const bool b : {true, false}) {
    for (const bool c : {true, false}) {
      for (const Index c_pad : {0, 8, 3}) {
        run({.m = 200, .n = 328, .k = 720, .b_along_k = b, .c_along_m = c, .c_gap = c_pad}, width(256), 2);
      }
    }
  }
}

TEST_F(TwoFourTmaGemm, WordsOfEverySize) {
  for (const int bytes : {1, 2, 4}) {
    run({.m = 130, .n = 264, .k = 1000, .word_bytes = bytes}, width(256));
    run({.m = 130, .n = 264, .k = 1000, .dtype = DType::i8, .out = DType::i32, .word_bytes = bytes}, width(256));
  }
}

TEST_F(TwoFourTmaGemm, Clusters) {
  for (const DType dtype : {DType::bf16, DType::i8, DType::f8_e4m3, DType::f32}) {
    for (const DType out : outs_of(dtype)) {
      for (const Config& config : kConfigs) {
        for (const bool c : {true, false}) {
          if (config.pair == 1 || size_of(dtype) == 2) {
            run({.m = 200, .n = 392, .k = 4300, .dtype = dtype, .out = out, .b_along_k = c, .c_along_m = c}, config);
          }
        }
      }
    }
  }
}

/// Parts of the depth that are not equal, down to one chunk of metadata each.
TEST_F(TwoFourTmaGemm, DepthsThatSplitUnevenly) {
  for (const Index k : {2048, 2100, 2560, 2564, 3076, 3584, 4608}) {
    for (const int columns : {128, 64}) {
      run({.m = 136, .n = 72, .k = k}, width(columns, 4));
      run({.m = 136, .n = 72, .k = 2 * k, .dtype = DType::i8, .out = DType::i32}, width(columns, 4));
    }
  }
}

/// Widths that take nothing but linear layers of 16-bit types.
TEST_F(TwoFourTmaGemm, WidthsOfLinearLayers) {
  for (const int columns : {224, 192, 160, 96}) {
    for (const DType dtype : {DType::bf16, DType::f16}) {
      for (const Index n : {8, 40, 96, 100, 192, 200, 384, 391}) {
        run({.m = 200, .n = n, .k = 324, .dtype = dtype, .out = dtype}, width(columns));
        run({.m = 256, .n = n, .k = 2176, .dtype = dtype, .out = dtype, .bias = true}, width(columns, 2));
        if (columns == 224) {
          run({.m = 392, .n = n, .k = 708, .dtype = dtype, .out = dtype}, width(columns, 1, 2));
        }
      }
      for (const Activation activation : {Activation::relu, Activation::gelu, Activation::silu}) {
        run({.m = 136,
             .n = 264,
             .k = 200,
             .batch = 2,
             .dtype = dtype,
             .out = dtype,
             .bias = true,
             .scale_s = 2,
             .scale_b = 2,
             .scale_out = 0.5f,
             .activation = activation},
            width(columns));
      }
    }
    run({.m = 1416, .n = 3080, .k = 264, .whole = true}, width(columns));  // several tiles of a CTA
  }
  for (const int split : {3, 4}) {
    run({.m = 200, .n = 392, .k = 4300}, width(192, split));
    run({.m = 200, .n = 392, .k = 4300}, width(96, split));
  }
  GpuProduct product(aligned({.m = 128, .n = 96, .k = 256, .c_along_m = false}));
  product.upload();
  EXPECT_FALSE(cuda::run(product.problem(), width(96), context));
}

TEST_F(TwoFourTmaGemm, Extras) {
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
               .scale_s = 1,
               .scale_b = 1,
               .activation = activation,
               .whole = dtype == DType::i8};
        run(c, width(256));
        c.scale_s = c.scale_b = 2;
        c.c_along_m = false;
        run(c, width(128));
        c.bias = false;
        run(c, width(64));
      }
    }
  }
}

TEST_F(TwoFourTmaGemm, Batches) {
  for (const bool shared_b : {false, true}) {
    for (const bool c : {true, false}) {
      run({.m = 136, .n = 264, .k = 520, .batch = 5, .c_along_m = c, .shared_b = shared_b}, width(256));
      run({.m = 136,
           .n = 131,
           .k = 520,
           .batch = 3,
           .b_along_k = false,
           .c_along_m = c,
           .shared_b = shared_b,
           .bias = true},
          width(128));
    }
  }
}

/// More tiles than CTAs, so that each has several.
TEST_F(TwoFourTmaGemm, ManyTiles) {
  run({.m = 1416, .n = 3080, .k = 264, .whole = true}, width(128));
  run({.m = 3080, .n = 4200, .k = 1032, .c_along_m = false, .whole = true}, width(256));
  run({.m = 3080, .n = 4200, .k = 520, .dtype = DType::i8, .out = DType::i32, .whole = true}, width(256));
  for (const bool along : {true, false}) {
    for (const Index c_gap : {0, 3}) {
      const Case c{.m = 2904,
                   .n = 3080,
                   .k = 264,
                   .out = along ? DType::bf16 : DType::f32,
                   .b_along_k = along,
                   .c_along_m = along,
                   .c_gap = c_gap,
                   .whole = true};
      run(c, width(256, 1, 2));
      run(c, width(64));
    }
  }
}

TEST_F(TwoFourTmaGemm, RandomProblems) {
  constexpr DType kTypes[] = {DType::bf16,    DType::f16,     DType::i8, DType::u8,
                              DType::f8_e4m3, DType::f8_e5m2, DType::f32};
  std::mt19937 random(7);
  const auto below = [&](Index n) { return static_cast<Index>(random() % static_cast<unsigned>(n)); };
  for (unsigned n = 0; n < 200 && !HasFailure(); ++n) {
    Case c{.m = 1 + below(400), .n = 1 + below(600), .k = 4 * (1 + below(200)), .batch = 1 + below(3)};
    c.dtype = kTypes[below(7)];
    const std::vector<DType> outs = outs_of(c.dtype);
    c.out = outs[static_cast<std::size_t>(below(static_cast<Index>(outs.size())))];
    c.b_along_k = below(2) == 0;
    c.c_along_m = below(2) == 0;
    c.c_gap = below(3) * 4;
    c.word_bytes = 1 << below(3);
    c.shared_b = below(4) == 0;
    if (c.out != DType::i32) {
      c.bias = below(2) == 0;
      c.scale_s = c.scale_b = static_cast<int>(below(3));
      c.activation = static_cast<Activation>(below(c.out == DType::f32 ? 2 : 4));
    }
    c.whole = is_integer(c.dtype) && c.out != DType::i32;
    c.seed = n + 1;
    if (below(3) == 0) {  // whole units, as most are
      c.m += (16 - c.m % 16) % 16;
      c.n += (16 - c.n % 16) % 16;
    }
    const bool pairs = size_of(c.dtype) == 2;
    run(c, below(4) == 0 && pairs ? width(256, 1, 2) : width(kWidths[below(3)]), below(2));
  }
}

TEST_F(TwoFourTmaGemm, EveryNibbleEverywhere) {
  for (const DType dtype : {DType::bf16, DType::f16, DType::i8, DType::f8_e4m3, DType::f8_e5m2}) {
    const Index k = size_of(dtype) == 1 ? 512 : 256, groups = k / 4;
    GpuProduct product(aligned({.m = 6 * groups, .n = 128, .k = k, .dtype = dtype, .out = DType::f32, .whole = true}));
    for (Index i = 0; i < 6 * groups; ++i) {
      for (Index g = 0; g < groups; ++g) {
        product.set_nibble(i, g, static_cast<std::uint64_t>(g == i / 6 ? i : i + g));
      }
    }
    for (const int columns : kWidths) {
      run(product, width(columns));
    }
  }
}

TEST_F(TwoFourTmaGemm, EveryPairEverywhere) {
  GpuProduct product(aligned({.m = 128, .n = 128, .k = 128, .dtype = DType::f32, .out = DType::f32, .whole = true}));
  for (Index i = 0; i < 128; ++i) {
    for (Index g = 0; g < 64; ++g) {
      product.set_nibble(i, g, (i / 2 == g) == (i % 2 == 0) ? 1 : 0);
    }
  }
  run(product, width(128));
}

/// Operands that workspace turns or rounds, with strides that nothing else would take: every third element, and none
/// where it would be aligned.
TEST_F(TwoFourTmaGemm, OddStrides) {
  for (const DType dtype : {DType::i8, DType::f8_e5m2, DType::f32}) {
    Case c = aligned({.m = 136,
                      .n = 77,
                      .k = 332,
                      .batch = 2,
                      .dtype = dtype,
                      .out = dtype == DType::i8 ? DType::i32 : DType::f32,
                      .b_along_k = false,
                      .c_along_m = false});
    GpuProduct product(c);
    const std::array<Index, 3> strides{332 * 231, 231, 3};
    MirroredTensor spread(dtype, product.b.view.shape(), strides, size_of(dtype));
    for (Index n = 0; n < spread.view.elements(); ++n) {
      spread.set(n, product.b.get(n));
    }
    product.b = std::move(spread);
    run(product, width(256));
  }
}

/// What a line does not keep is not multiplied.
TEST_F(TwoFourTmaGemm, InfinitiesThatNobodyKeeps) {
  GpuProduct product(aligned({.m = 128, .n = 256, .k = 256, .whole = true}));
  for (Index k = 0; k < 256; ++k) {
    for (Index i = 0; i < 128; ++i) {
      product.set_nibble(i, k / 4, 1);  // keeps 0 and 2
    }
    for (Index j = 0; j < 256 && k % 2 == 1; ++j) {
      product.set_b(0, k, j,
                    j % 2 == 0 ? std::numeric_limits<double>::infinity() : std::numeric_limits<double>::quiet_NaN());
    }
  }
  run(product, width(256));
}

/// The bytes that a kernel family leaves, or nothing where the problem is not for it.
std::vector<std::byte> bytes_of(const Case& c, const KernelFamily& family, Context& context) {
  GpuProduct product(aligned(c));
  product.upload();
  if (!cuda::run(product.problem(), family, context)) {
    return {};
  }
  product.out.download();
  return product.out.storage();
}

/// Sums of whole numbers have no error, so that every family must give the same bits.
TEST_F(TwoFourTmaGemm, IsThePortableKernelBitForBit) {
  for (const auto& [m, n, k] :
       {std::array<Index, 3>{256, 512, 2048}, {130, 264, 1000}, {128, 64, 1024}, {72, 16, 1024}}) {
    for (const DType dtype : {DType::bf16, DType::f16, DType::i8, DType::f8_e4m3, DType::f8_e5m2, DType::f32}) {
      for (const DType out : outs_of(dtype)) {
        for (const bool b : {true, false}) {
          const Case c{.m = m, .n = n, .k = k, .dtype = dtype, .out = out, .b_along_k = b, .whole = true};
          const auto portable = bytes_of(c, kPortable, context);
          ASSERT_FALSE(portable.empty()) << c.text();
          EXPECT_TRUE(bytes_of(c, kTmaGemm, context) == portable) << c.text();
          const auto tma = bytes_of(c, kSmallNTma, context);
          EXPECT_EQ(tma.empty(), k % 128 != 0 || m % 64 != 0 || size_of(dtype) != 2 || out != dtype || !b) << c.text();
          EXPECT_TRUE(tma.empty() || tma == portable) << c.text();
          const auto registers = bytes_of(c, kSmallNRegisters, context);
          EXPECT_EQ(registers.empty(), n > 16 || size_of(dtype) != 2 || out != dtype || !b) << c.text();
          EXPECT_TRUE(registers.empty() || registers == portable) << c.text();
          const auto cp_async = bytes_of(c, kSmallNCpAsync, context);
          EXPECT_TRUE(cp_async.empty() || cp_async == portable) << c.text();
        }
      }
    }
  }
}

/// A metadata register that changes too early gives wrong sums now and then.
void repeat(const Config& config, DType dtype, int times, Context& context, DType out = DType::f32) {
  GpuProduct product(aligned(
      {.m = 384, .n = 512, .k = 16384, .dtype = dtype, .out = dtype == DType::i8 ? DType::i32 : out, .whole = true}));
  product.upload();
  std::vector<std::byte> first;
  for (int n = 0; n <= times; ++n) {
    ASSERT_TRUE(cuda::run(product.problem(), config, context));
    product.out.download();
    if (n == 0) {
      product.check();
      first = product.out.storage();
    }
    ASSERT_TRUE(first == product.out.storage()) << "run " << n << ", " << config.text();
  }
}

TEST_F(TwoFourTmaGemm, ThousandRunsAreEqual) {
  for (const Config& config : {width(224), width(192, 2), width(160), width(96, 3), width(224, 1, 2)}) {
    repeat(config, DType::bf16, 200, context, DType::bf16);
  }
  for (const Config& config : kConfigs) {
    repeat(config, DType::bf16, 500, context);
  }
  repeat(width(256), DType::i8, 1000, context);
}

TEST_F(TwoFourTmaGemm, RefusesWhatItCannotFetch) {
  GpuProduct product(aligned({.m = 128, .n = 256, .k = 256}));
  product.upload();
  const auto refused = [&](const auto& change) {
    Problem p = product.problem();
    change(p);
    return !cuda::run(p, kTmaGemm, context);
  };
  EXPECT_FALSE(refused([](Problem&) {}));
  EXPECT_TRUE(refused([](Problem& p) { p.values.along = 2; }));
  EXPECT_TRUE(refused([](Problem& p) { p.words.along = 2; }));
  EXPECT_TRUE(refused([](Problem& p) { p.values.line = 132; }));
  EXPECT_TRUE(refused([](Problem& p) { p.words.line = 20; }));
  EXPECT_TRUE(refused([](Problem& p) { p.b = {p.b.data, 2, 512, 0}; }));
  EXPECT_TRUE(refused([](Problem& p) { p.b.data = static_cast<char*>(p.b.data) + 2; }));
  EXPECT_TRUE(refused([](Problem& p) {
    p.out = DType::f32;
    p.activation = Activation::gelu;
  }));
  EXPECT_TRUE(refused([](Problem& p) { p.k = 0; }));
  context.precision = Precision::ieee;
  EXPECT_TRUE(refused([](Problem& p) { p.dtype = p.out = DType::f32; }));
}

}  // namespace
}  // namespace fretwork::two_four
