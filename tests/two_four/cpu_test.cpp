// The 2:4 products of the CPU against float64 made from the nibbles alone: every dtype, odd sizes, every layout.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "fretwork/executor_tbb.h"
#include "ops/two_four/cpu/run.h"
#include "two_four/product.h"

namespace fretwork::two_four {
namespace {

constexpr std::array kDTypes{DType::f64,     DType::f32,     DType::f16, DType::bf16,
                             DType::f8_e4m3, DType::f8_e5m2, DType::i8,  DType::u8};
constexpr std::array kFloating{DType::f64, DType::f32, DType::f16, DType::bf16, DType::f8_e4m3, DType::f8_e5m2};

/// As this CPU does it, and as one without products in pairs would.
void run_and_check(Product<Tensor>& product) {
  TbbExecutor executor{2};
  Context context = Context::cpu(executor);
  for (const auto run : {&cpu::run, &cpu::run_widened}) {
    product.out.poison();
    run(product.problem(), context);
    product.check();
  }
}

std::vector<DType> outs(DType dtype) {
  return {is_integer(dtype) ? DType::i32 : DType::f64,
          DType::f32,
          DType::f16,
          DType::bf16,
          DType::i8,
          DType::f8_e4m3,
          DType::f8_e5m2};
}

/// The CPU rounds no fp32 operand.
Case exact(Case c) {
  c.precision = Precision::ieee;
  return c;
}

/// All bits of an element of b: NaN in every floating type.
void spoil(Product<Tensor>& product, Index k, Index j) {
  std::memset(product.b.address(k * product.c.n + j), 0xff, size_of(product.c.dtype));
}

TEST(TwoFourCpu, RandomProblems) {
  std::mt19937 random(7);
  const auto pick = [&](std::initializer_list<Index> of) { return of.begin()[random() % of.size()]; };
  const auto coin = [&] { return random() % 2 == 0; };
  for (const DType dtype : kDTypes) {
    for (const DType out : outs(dtype)) {
      for (int n = 0; n < 16; ++n) {
        Case c = exact({.m = pick({1, 2, 3, 5, 8, 17, 70}),
                        .n = pick({1, 2, 3, 4, 7, 8, 9, 15, 16, 17, 33, 64, 100}),
                        .k = pick({0, 4, 8, 12, 60, 64, 100, 128, 132, 256, 516}),
                        .batch = pick({1, 1, 3}),
                        .dtype = dtype,
                        .out = out,
                        .word_bytes = static_cast<int>(pick({1, 2, 4})),
                        .b_along_k = coin(),
                        .c_along_m = coin(),
                        .sparse_along_m = random() % 5 == 0,
                        .value_gap = pick({0, 0, 5}),
                        .word_gap = pick({0, 0, 1}),
                        .b_gap = pick({0, 5}),
                        .c_gap = pick({0, 5}),
                        .batch_gap = pick({0, 7}),
                        .b_step = pick({1, 1, 3}),
                        .c_step = pick({1, 1, 3}),
                        .backwards = random() % 5 == 0,
                        .seed = static_cast<unsigned>(random())});
        c.alignment = size_of(dtype) * static_cast<std::size_t>(pick({1, 16}));
        if (out != DType::i32) {
          c.bias = coin();
          c.activation = static_cast<Activation>(random() % 4);
          c.scale_s = static_cast<int>(random() % 3), c.scale_b = static_cast<int>(random() % 3);
          c.scale_out = coin() ? 0.125f : 0.0f;
          c.bias_f32 = size_of(out) == 1 && coin();
        }
        Product<Tensor> product(c);
        run_and_check(product);
      }
    }
  }
}

/// Every nibble in every position that a vector may have, whichever path runs.
TEST(TwoFourCpu, EveryNibbleEverywhere) {
  for (const DType dtype : kDTypes) {
    for (const Index n : {1, 4, 16, 64}) {
      for (const bool along : {true, false}) {
        Product<Tensor> product(exact(
            {.m = 6, .n = n, .k = 256, .dtype = dtype, .out = outs(dtype)[0], .b_along_k = along, .c_along_m = along}));
        for (Index i = 0; i < 6; ++i) {
          for (Index g = 0; g < 256 / product.c.group(); ++g) {
            product.set_nibble(i, g, static_cast<std::uint64_t>(i + g));
          }
        }
        run_and_check(product);
      }
    }
  }
}

/// NaN in rows of b that no line keeps, and next to the numbers of every tensor, reach nothing.
TEST(TwoFourCpu, WhatIsNotKeptIsNotMultiplied) {
  for (const DType dtype : kFloating) {
    for (const Index n : {1, 3, 4, 8, 16, 40, 64}) {
      for (const bool along : {true, false}) {
        Product<Tensor> product(exact(
            {.m = 9, .n = n, .k = 132, .dtype = dtype, .out = outs(dtype)[0], .b_along_k = along, .c_along_m = along}));
        std::array<bool, 132> kept{};
        for (Index g = 0; g < 132 / product.c.group(); ++g) {
          for (Index i = 0; i < 9; ++i) {
            product.set_nibble(i, g, static_cast<std::uint64_t>(g));
          }
        }
        for (Index v = 0; v < 66; ++v) {
          kept[static_cast<std::size_t>(product.row(0, v))] = true;
        }
        for (Index k = 0; k < 132; ++k) {
          for (Index j = 0; j < n && !kept[static_cast<std::size_t>(k)]; ++j) {
            spoil(product, k, j);
          }
        }
        run_and_check(product);
        EXPECT_TRUE(std::ranges::none_of(product.out.values(), [](double x) { return std::isnan(x); }));
      }
    }
  }
}

TEST(TwoFourCpu, NaNThatIsKeptIsSeen) {
  for (const DType dtype : kFloating) {
    for (const Index n : {1, 5, 64}) {
      Product<Tensor> product(exact({.m = 5, .n = n, .k = 64, .dtype = dtype, .out = outs(dtype)[0]}));
      spoil(product, product.row(2, 31), n / 2);
      run_and_check(product);
      EXPECT_TRUE(std::isnan(product.out.get({0, 2, n / 2}))) << name_of(dtype);
    }
  }
}

/// Beyond what an fp32 sum can count.
TEST(TwoFourCpu, IntegersAreExact) {
  for (const Index n : {1, 4, 16, 64}) {
    for (const bool along : {true, false}) {
      Product<Tensor> product(
          {.m = 5, .n = n, .k = 8192, .dtype = DType::i8, .out = DType::i32, .b_along_k = along, .c_along_m = false});
      Index turn = 0;
      product.values.generate([&] { return ++turn % 97 == 0 ? -116.0 : -128.0; });
      product.b.generate([&] { return ++turn % 89 == 0 ? 120.0 : -128.0; });
      run_and_check(product);
      EXPECT_GT(product.out.get(0), 0x1p24);
    }
  }
}

/// Each number of 8 bits, times one.
TEST(TwoFourCpu, EveryFloatOf8Bits) {
  for (const DType dtype : {DType::f8_e4m3, DType::f8_e5m2}) {
    for (const Index n : {1, 16}) {
      Product<Tensor> product({.m = 256, .n = n, .k = 20, .dtype = dtype, .out = DType::f32});
      for (Index at = 0; at < 256 * 10; ++at) {
        *product.values.address(at) = static_cast<std::byte>(at % 10 == at / 10 % 10 ? at / 10 : 0);
      }
      product.b.generate([] { return 1.0; });
      run_and_check(product);
    }
  }
}

/// A batch whose columns lie one behind another.
TEST(TwoFourCpu, BatchesOfNeighbours) {
  for (const int scale_b : {0, 1, 2}) {
    for (const Index batch : {2, 5, 13}) {
      Product<Tensor> product(exact({.m = 9,
                                     .n = 3,
                                     .k = 68,
                                     .batch = batch,
                                     .dtype = DType::f32,
                                     .out = DType::f32,
                                     .bias = true,
                                     .scale_s = 2,
                                     .scale_b = scale_b}));
      const Problem p = product.problem();
      ASSERT_TRUE(p.b.batch == 3 * p.b.col && p.c.batch == 3 * p.c.col);
      run_and_check(product);
    }
  }
}

TEST(TwoFourCpu, ThreadsDoNotChangeSums) {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    for (const Index n : {1, 4, 16, 70}) {
      Product<Tensor> product(exact({.m = 600, .n = n, .k = 512, .dtype = dtype, .out = dtype}));
      Context context = Context::cpu();
      cpu::run(product.problem(), context);
      const std::vector<std::byte> alone = product.out.storage();
      TbbExecutor executor{3};
      context = Context::cpu(executor);
      cpu::run(product.problem(), context);
      EXPECT_EQ(alone, product.out.storage());
    }
  }
}

}  // namespace
}  // namespace fretwork::two_four
