// 2:4 products of the portable and generic kernels on a GPU, against float64 made from the nibbles alone. Skipped where
// there is none.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <memory>
#include <random>
#include <vector>

#include "ops/two_four/choose.h"
#include "runtime/cuda_driver.h"
#include "runtime/nvrtc.h"
#include "support/device_tensor.h"
#include "two_four/product.h"

namespace fretwork::two_four {
namespace {

using GpuProduct = Product<MirroredTensor>;

class TwoFourCuda : public testing::Test {
 protected:
  void SetUp() override {
    if (!fretwork::cuda::available()) {
      GTEST_SKIP() << fretwork::cuda::unavailable_reason();
    }
    if (nvrtc::library().path.empty()) {
      GTEST_SKIP() << "no NVRTC: " << nvrtc::library().reason;
    }
    scope_ = std::make_unique<fretwork::cuda::DeviceScope>(0);
    context_ = Context::cuda(0);
  }
  /// On the portable kernel, or where that does not fit on the generic one.
  void run(const GpuProduct& product) {
    context_.precision = product.c.precision;
    const Problem problem = product.problem();
    ASSERT_TRUE(cuda::run(problem, kPortable, context_) || cuda::run(problem, kGeneric, context_));
  }
  void run_and_check(GpuProduct& product) {
    product.upload();
    run(product);
    product.out.download();
    product.check();
  }
  void run_and_check(const Case& c) {
    GpuProduct product(c);
    run_and_check(product);
  }
  std::unique_ptr<fretwork::cuda::DeviceScope> scope_;
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
  if (is_integer(c.dtype) && c.out != DType::i32) {  // sums are large numbers
    c.scale_s = std::max(c.scale_s, 1);
  }
  return c;
}

/// Every valid nibble at every place of a tile and of two stages.
TEST_F(TwoFourCuda, EveryNibbleEverywhere) {
  for (const Types& types : kAllTypes) {
    if (is_integer(types.dtype) && (types.out == DType::f16 || types.out == DType::i8)) {
      continue;  // sums are beyond it without a scale
    }
    const Index k = 64 * group(types.dtype);
    for (unsigned turn = 0; turn < (types.dtype == DType::f32 ? 2u : 6u); ++turn) {
      for (const bool along : {true, false}) {
        GpuProduct product({.m = 128,
                            .n = 128,
                            .k = k,
                            .dtype = types.dtype,
                            .out = types.out,
                            .b_along_k = along,
                            .c_along_m = false,
                            .precision = types.precision});
        std::mt19937 first(99);  // without a pattern, which a wrong place might share
        for (Index i = 0; i < 128; ++i) {
          for (Index g = 0; g < 64; ++g) {
            product.set_nibble(i, g, first() % 6 + turn);
          }
        }
        run_and_check(product);
        if (HasFailure()) {
          return;
        }
      }
    }
  }
}

/// Whole tiles, tails of all kinds, and both ways to lie of b and c.
TEST_F(TwoFourCuda, ShapesAndOrders) {
  constexpr std::array<Index, 3> kSizes[] = {{128, 128, 256}, {256, 384, 512}, {64, 96, 1024}, {136, 264, 320},
                                             {200, 72, 96},   {1, 128, 128},   {128, 1, 256},  {129, 131, 132},
                                             {300, 65, 1000}, {8, 8, 32},      {1, 1, 4},      {257, 130, 68}};
  for (const Types& types : kAllTypes) {
    for (const bool b : {true, false}) {
      for (const bool c : {true, false}) {
        for (const auto& [m, n, k] : kSizes) {
          run_and_check(with_types({.m = m, .n = n, .k = k, .b_along_k = b, .c_along_m = c, .bias = true}, types));
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
    run_and_check(with_types(
        {.m = 2304, .n = 520, .k = 4096, .b_along_k = types.out == DType::bf16, .c_along_m = types.out == DType::f32},
        types));
  }
}

TEST_F(TwoFourCuda, NoDepth) {
  for (const Types& types : kAllTypes) {
    run_and_check(with_types({.m = 70,
                              .n = 130,
                              .k = 0,
                              .batch = 2,
                              .b_along_k = false,
                              .c_along_m = false,
                              .bias = types.out != DType::i32,
                              .activation = Activation::silu},
                             types));
  }
}

TEST_F(TwoFourCuda, EpiloguesAndBatches) {
  using enum Activation;
  unsigned seed = 1;
  for (const Types& types : kAllTypes) {
    for (const Activation activation : {none, relu, gelu, silu}) {
      for (const int scale : {0, 1, 2}) {
        for (const bool along : {true, false}) {
          Case c = with_types({.m = 144,
                               .n = 136,
                               .k = 192,
                               .batch = 3,
                               .b_along_k = along,
                               .c_along_m = along,
                               .shared_b = seed % 3 == 0,
                               .bias = true,
                               .scale_s = scale,
                               .scale_b = seed % 2 == 0 ? scale : 2,
                               .activation = activation,
                               .seed = seed},
                              types);
          if (c.out == DType::i32 && (activation > relu || seed % 2 == 0)) {
            c.scale_s = c.scale_b = 0;
            c.activation = std::min(c.activation, relu);
          }
          ++seed;
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
  const auto pick = [&](std::initializer_list<Index> list) { return list.begin()[random() % list.size()]; };
  for (unsigned turn = 0; turn < 600 && !HasFailure(); ++turn) {
    const Types types = kAllTypes[random() % kAllTypes.size()];
    Case c{.m = pick({1, 2, 7, 16, 33, 64, 100, 128, 130, 257}),
           .n = pick({1, 3, 8, 17, 32, 65, 128, 129, 192, 260}),
           .k = pick({1, 2, 5, 16, 17, 32, 63, 64, 150}) * group(types.dtype),
           .batch = pick({1, 1, 4}),
           .word_bytes = static_cast<int>(pick({1, 2, 4})),
           .b_along_k = random() % 2 == 0,
           .c_along_m = random() % 2 == 0,
           .sparse_along_m = random() % 5 == 0,
           .b_step = pick({1, 1, 3}),
           .c_step = pick({1, 1, 3}),
           .shared_b = random() % 3 == 0,
           .bias = random() % 2 == 0,
           .scale_s = static_cast<int>(random() % 3),
           .scale_b = static_cast<int>(random() % 3),
           .activation = static_cast<Activation>(random() % 4),
           .seed = turn + 1};
    c.value_gap = c.word_gap = c.b_gap = c.c_gap = c.batch_gap = pick({0, 0, 1, 16});
    c = with_types(c, types);
    c.alignment = random() % 4 == 0 ? size_of(c.dtype) : 16;
    if (c.out == DType::i32) {
      c.scale_s = c.scale_b = 0;
      c.activation = std::min(c.activation, Activation::relu);
    }
    run_and_check(c);
  }
}

/// What no line keeps is not multiplied.
TEST_F(TwoFourCuda, NumbersThatAreNotKeptDoNotLeak) {
  constexpr double kNaN = std::numeric_limits<double>::quiet_NaN(), kInfinity = std::numeric_limits<double>::infinity();
  for (const Types& types : kAllTypes) {
    if (is_integer(types.dtype)) {
      continue;
    }
    const Index group = two_four::group(types.dtype);
    for (const bool later : {false, true}) {
      for (const bool along : {true, false}) {
        for (const Index k : {256, 100}) {
          GpuProduct product(with_types({.m = 130, .n = 136, .k = k, .b_along_k = along, .c_along_m = false}, types));
          for (Index i = 0; i < 130; ++i) {
            for (Index g = 0; g < k / group; ++g) {
              product.set_nibble(i, g, later ? 5 : 0);
            }
          }
          for (Index row = 0; row < k; ++row) {
            const bool kept = (row % group >= group / 2) == later;
            for (Index j = 0; j < 136 && !kept; ++j) {
              product.set_b(0, row, j, j % 2 == 0 || is_fp8(types.dtype) ? kNaN : kInfinity);
            }
          }
          run_and_check(product);
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
    GpuProduct product(with_types({.m = 128, .n = 128, .k = 128, .b_along_k = false, .c_along_m = false}, types));
    product.set_b(0, 64, 77, std::numeric_limits<double>::quiet_NaN());
    product.upload();
    run(product);
    product.out.download();
    for (Index i = 0; i < 128; ++i) {
      bool kept = false;
      for (Index v = 0; v < 64; ++v) {
        kept = kept || product.row(i, v) == 64;
      }
      for (Index j = 0; j < 128; ++j) {
        ASSERT_EQ(std::isnan(product.out.get({0, i, j})), kept && j == 77)
            << product.c.text() << ": c[" << i << ", " << j << "]";
      }
    }
  }
}

TEST_F(TwoFourCuda, LargeIntegersAreExact) {
  for (const bool along : {true, false}) {
    for (const Index k : {4096, 4100}) {
      GpuProduct product(
          {.m = 130, .n = 72, .k = k, .dtype = DType::i8, .out = DType::i32, .b_along_k = along, .c_along_m = along});
      product.values.randomise(product.random, std::uniform_int_distribution<int>(96, 127));
      product.b.randomise(product.random, std::uniform_int_distribution<int>(97, 127));
      run_and_check(product);
      EXPECT_GT(product.out.get(0), 1 << 24);
    }
  }
}

TEST_F(TwoFourCuda, LaunchesRepeatThemselves) {
  for (const Types& types : {kAllTypes[0], kAllTypes[1], kAllTypes[5], kAllTypes[7]}) {
    GpuProduct product(with_types({.m = 512, .n = 384, .k = 1024, .bias = true}, types));
    product.upload();
    std::vector<std::byte> first;
    for (int n = 0; n < 1000; ++n) {
      run(product);
      if (n % 20 == 0 || n == 999) {
        product.out.download();
        first = n == 0 ? product.out.storage() : first;
        ASSERT_TRUE(product.out.storage() == first) << product.c.text() << ": run " << n;
      }
    }
  }
}

}  // namespace
}  // namespace fretwork::two_four
