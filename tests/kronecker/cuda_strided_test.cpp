// Kronecker products of neighbouring δ on a GPU, against float64 on the host. Skipped where
// there is no GPU.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "kronecker/families.h"
#include "ops/kronecker/cuda/families.h"
#include "support/activated.h"
#include "support/device_tensor.h"
#include "support/gpu_fixture.h"

namespace fretwork::kronecker {
namespace {

namespace driver = fretwork::cuda;

struct Case {
  Sizes sizes{};
  std::int64_t batch = 0;
  DType dtype = DType::f16;
  Precision precision = Precision::tf32;
  Activation activation = Activation::none;
  bool bias = false;
  bool transposed = false;  ///< w is stored (a, c, b, d)
  std::int64_t gap = 0;     ///< NaN between the rows of x and y
};

std::string text(const Case& c) {
  const Sizes& s = c.sizes;
  return "(" + std::to_string(s.a) + "," + std::to_string(s.b) + "," + std::to_string(s.c) + "," + std::to_string(s.d) +
         ") batch " + std::to_string(c.batch) + " " + name_of(c.dtype) + " precision " +
         std::to_string(static_cast<int>(c.precision)) + " activation " +
         std::to_string(static_cast<int>(c.activation)) + (c.bias ? " bias" : "") +
         (c.transposed ? " transposed" : "") + " gap " + std::to_string(c.gap);
}

/// Of a sum of products with absolute sum `magnitude`, rounded to the type once.
double tolerance(const Case& c, double value, double magnitude) {
  const double product = c.dtype != DType::f32 ? 1e-6 : c.precision == Precision::tf32 ? 1.2e-3 : 4e-6;
  const double rounding = c.dtype == DType::f16 ? 0x1p-10 : c.dtype == DType::bf16 ? 0x1p-7 : 1e-6;
  return product * magnitude + rounding * std::abs(value) + 1e-6;
}

class Strided : public GpuTest {};

MirroredTensor random_tensor(MirroredTensor made, std::mt19937& random) {
  made.randomise(random, std::uniform_real_distribution(-1.0, 1.0));
  return made;
}
/// Rows of `features` elements with gaps between them.
MirroredTensor rows(const Case& c, std::int64_t features) {
  return {c.dtype, std::array{c.batch, features}, std::array{features + c.gap, std::int64_t{1}}, 256};
}
MirroredTensor weights(const Case& c) {
  const auto& [a, b, k, d] = c.sizes;
  const std::array sizes{a, b, k, d};
  return c.transposed ? MirroredTensor(c.dtype, sizes, std::array{b * k * d, d, b * d, std::int64_t{1}}, 256)
                      : MirroredTensor(c.dtype, sizes, std::array{b * k * d, k * d, d, std::int64_t{1}}, 256);
}
MirroredTensor vector(const Case& c) {
  return {c.dtype, {c.sizes.a * c.sizes.b * c.sizes.d}, MemoryLayout{.alignment = 256}};
}
Matrix uploaded_rows(MirroredTensor& tensor) {
  const TensorView& there = tensor.upload();
  return {there.data, there.strides[0], 1};
}
Weights uploaded_weights(MirroredTensor& tensor) {
  const TensorView& there = tensor.upload();
  return {there.data, there.strides[0], there.strides[1], there.strides[2], there.strides[3]};
}

void check_product(const Case& c, std::initializer_list<Family> families = {Family::strided, Family::cluster}) {
  const auto& [a, b, k_size, d] = c.sizes;
  std::mt19937 random(1);
  MirroredTensor x = random_tensor(rows(c, a * k_size * d), random), w = random_tensor(weights(c), random);
  MirroredTensor bias = random_tensor(vector(c), random), y = rows(c, a * b * d);
  Problem problem{c.sizes, c.batch, c.dtype, uploaded_rows(x), uploaded_rows(y), uploaded_weights(w), {}, c.activation};
  if (c.bias) {
    problem.bias = {bias.upload().data, 1};
  }
  Context context = Context::cuda(0);
  context.precision = c.precision;
  ASSERT_TRUE(run_on(problem, context, families)) << text(c);
  y.download();

  for (std::int64_t n = 0; n < c.batch; ++n) {
    for (std::int64_t i = 0; i < a; ++i) {
      for (std::int64_t j = 0; j < b; ++j) {
        for (std::int64_t l = 0; l < d; ++l) {
          double sum = 0, magnitude = 0;
          for (std::int64_t k = 0; k < k_size; ++k) {
            const double product = x.get({n, (i * k_size + k) * d + l}) * w.get({i, j, k, l});
            sum += product;
            magnitude += std::abs(product);
          }
          const std::int64_t feature = (i * b + j) * d + l;
          sum += c.bias ? bias.get(feature) : 0;
          const double want = activated(c.activation, sum);
          const double got = y.get({n, feature});
          ASSERT_NEAR(got, want, tolerance(c, want, magnitude))
              << text(c) << " at n " << n << " i " << i << " j " << j << " l " << l;
        }
      }
    }
  }
  ASSERT_TRUE(y.intact_around()) << text(c) << ": wrote beside the elements of y";
}

void check_gradient(const Case& c, std::initializer_list<Family> families = {Family::strided, Family::cluster}) {
  const auto& [a, b, k_size, d] = c.sizes;
  std::mt19937 random(1);
  MirroredTensor x = random_tensor(rows(c, a * k_size * d), random), dy = random_tensor(rows(c, a * b * d), random);
  MirroredTensor dw = weights(c), bias = vector(c);
  WeightProblem problem{c.sizes, c.batch, c.dtype, uploaded_rows(x), uploaded_rows(dy), uploaded_weights(dw), {}};
  if (c.bias) {
    problem.d_bias = {bias.upload().data, 1};
  }
  Context context = Context::cuda(0);
  context.precision = c.precision;
  ASSERT_TRUE(run_on(problem, context, families)) << text(c);
  dw.download();
  if (c.bias) {
    bias.download();
  }
  for (std::int64_t i = 0; i < a; ++i) {
    for (std::int64_t j = 0; j < b; ++j) {
      for (std::int64_t l = 0; l < d; ++l) {
        const std::int64_t feature = (i * b + j) * d + l;
        for (std::int64_t k = 0; k < k_size; ++k) {
          double sum = 0, magnitude = 0;
          for (std::int64_t n = 0; n < c.batch; ++n) {
            const double product = dy.get({n, feature}) * x.get({n, (i * k_size + k) * d + l});
            sum += product;
            magnitude += std::abs(product);
          }
          ASSERT_NEAR(dw.get({i, j, k, l}), sum, tolerance(c, sum, magnitude))
              << text(c) << " at i " << i << " j " << j << " k " << k << " l " << l;
        }
        if (c.bias) {
          double sum = 0, magnitude = 0;
          for (std::int64_t n = 0; n < c.batch; ++n) {
            sum += dy.get({n, feature});
            magnitude += std::abs(dy.get({n, feature}));
          }
          Case exact = c;
          exact.precision = Precision::tf32x3;  // no product, so no rounding to tf32
          ASSERT_NEAR(bias.get(feature), sum, tolerance(exact, sum, magnitude)) << text(c) << ", bias at " << feature;
        }
      }
    }
  }
}

TEST_F(Strided, EveryGroupOfNeighbours) {
  for (const DType dtype : {DType::f16, DType::bf16, DType::f32}) {
    for (const std::int64_t d : {2, 4, 6, 8, 12, 16, 24, 32}) {
      check_product({{2, 24, 20, d}, 37, dtype});
    }
  }
}

TEST_F(Strided, OddSizes) {
  for (const Sizes& s : {Sizes{1, 1, 1, 16}, Sizes{3, 5, 7, 4}, Sizes{3, 5, 7, 2}, Sizes{1, 65, 17, 16},
                         Sizes{1, 33, 33, 8}, Sizes{1, 130, 5, 4}, Sizes{2, 131, 9, 2}, Sizes{1, 48, 48, 64}}) {
    for (const std::int64_t batch : {1, 16, 65}) {
      check_product({s, batch, DType::f16});
    }
    check_product({s, 33, DType::f32});
  }
}

TEST_F(Strided, WeightsThatDoNotFitOnChip) {
  check_product({{1, 96, 400, 16}, 70, DType::f16});
  check_product({{1, 70, 700, 8}, 70, DType::bf16});
  check_product({{1, 260, 500, 4}, 70, DType::f16});
  check_product({{2, 300, 450, 2}, 130, DType::f16});
  check_product({{1, 100, 300, 8}, 70, DType::f32});
}

TEST_F(Strided, Clusters) {
  if (driver::kernel_arch(0) != "sm_90a") {
    GTEST_SKIP() << "clusters are for sm_90a";
  }
  const std::vector<Case> cases = {
      {{1, 64, 64, 64}, 700},
      {{1, 128, 128, 16}, 200},
      {{1, 256, 256, 16}, 300},
      {{2, 250, 203, 32}, 70, DType::bf16, Precision::tf32, Activation::gelu, true, true, 8},
      {{1, 300, 302, 4}, 333},
      {{3, 270, 300, 4}, 140, DType::f16, Precision::tf32, Activation::relu, true, true, 8},
      {{2, 257, 258, 4}, 1, DType::bf16, Precision::tf32, Activation::silu, true},
      {{1, 32, 512, 16}, 600},
      {{3, 5, 7, 16}, 65, DType::bf16, Precision::tf32, Activation::none, true},
      {{2, 33, 6, 4}, 129},
      {{1, 96, 96, 16}, 333},
      {{2, 48, 50, 16}, 70, DType::bf16, Precision::tf32, Activation::gelu, true, true, 8},
      {{1, 40, 33, 48}, 130},
      {{2, 96, 98, 4}, 140, DType::f16, Precision::tf32, Activation::none, true},
      {{1, 300, 304, 2}, 333},
      {{3, 272, 300, 2}, 140, DType::f16, Precision::tf32, Activation::relu, true, true, 8},
      {{2, 257, 260, 2}, 1, DType::bf16, Precision::tf32, Activation::silu, true},
      {{1, 8, 4, 2}, 65},
      {{1, 192, 20, 2}, 260},
  };
  for (const Case& c : cases) {
    check_product(c, {Family::cluster});
  }
}

/// A CTA's tiles have one or three pieces of eight columns, in turns through two buffers, and follow each other so fast
/// that a piece is still on its way out when the next tile's first is there.
TEST_F(Strided, OddPiecesOfManyTiles) {
  if (driver::kernel_arch(0) != "sm_90a") {
    GTEST_SKIP() << "clusters are for sm_90a";
  }
  for (const Case& c : {Case{{1, 23, 1, 16}, 100'000}, Case{{1, 8, 1, 16}, 100'000}, Case{{2, 439, 2, 16}, 748},
                        Case{{1, 72, 2, 32}, 6'000}}) {
    check_product(c, {Family::cluster});
  }
}

TEST_F(Strided, ActivationsAndBias) {
  for (const Activation activation : {Activation::none, Activation::relu, Activation::gelu, Activation::silu}) {
    for (const std::int64_t d : {2, 4, 8, 16}) {
      check_product({{2, 20, 24, d}, 19, DType::f16, Precision::tf32, activation, true});
    }
    check_product({{2, 20, 24, 8}, 19, DType::f32, Precision::tf32x3, activation, true});
    check_product({{2, 20, 24, 16}, 19, DType::bf16, Precision::tf32, activation, false});
  }
}

TEST_F(Strided, StridedWeightsAndRows) {
  for (const std::int64_t d : {2, 4, 8, 16}) {
    for (const std::int64_t gap : {0, 2, 8}) {
      check_product({{2, 40, 24, d}, 35, DType::f16, Precision::tf32, Activation::none, false, true, gap});
      check_product({{2, 40, 24, d}, 35, DType::f32, Precision::tf32x3, Activation::none, true, true, gap});
    }
  }
}

TEST_F(Strided, ThreeProductsAreNearlyExact) {
  for (const std::int64_t d : {2, 4, 8, 16}) {
    check_product({{1, 64, 64, d}, 64, DType::f32, Precision::tf32x3});
  }
}

TEST_F(Strided, GradientOfEveryGroup) {
  for (const DType dtype : {DType::f16, DType::bf16, DType::f32}) {
    for (const std::int64_t d : {2, 4, 6, 8, 12, 16, 24, 32}) {
      check_gradient({{2, 24, 20, d}, 150, dtype, Precision::tf32, Activation::none, true});
    }
  }
  for (const std::int64_t d : {2, 4, 8}) {
    check_gradient({{1, 33, 40, d}, 150, DType::f32, Precision::tf32x3, Activation::none, true});
  }
}

TEST_F(Strided, GradientOfOddSizes) {
  for (const Sizes& s : {Sizes{1, 1, 1, 16}, Sizes{3, 5, 7, 4}, Sizes{3, 5, 7, 2}, Sizes{1, 65, 70, 16},
                         Sizes{1, 70, 129, 4}, Sizes{2, 131, 9, 2}, Sizes{1, 20, 130, 2}, Sizes{1, 70, 65, 8}}) {
    for (const std::int64_t batch : {0, 1, 45}) {
      check_gradient({s, batch, DType::f16, Precision::tf32, Activation::none, true});
    }
    check_gradient({s, 33, DType::f32, Precision::tf32, Activation::none, false, true, 2});
    check_gradient({s, 33, DType::bf16, Precision::tf32, Activation::none, true, true, 8});
  }
}

TEST_F(Strided, GradientInClusters) {
  if (driver::kernel_arch(0) != "sm_90a") {
    GTEST_SKIP() << "clusters are for sm_90a";
  }
  const std::vector<Case> cases = {
      {{1, 64, 64, 16}, 300, DType::f16, Precision::tf32, Activation::none, true},
      {{1, 256, 128, 16}, 100, DType::bf16, Precision::tf32, Activation::none, true},
      {{2, 130, 70, 32}, 37, DType::f16, Precision::tf32, Activation::none, true, true, 8},
      {{1, 32, 256, 16}, 65, DType::f16},
      {{2, 96, 100, 16}, 70, DType::bf16, Precision::tf32, Activation::none, true, false, 8},
      {{1, 65, 70, 16}, 45, DType::f16, Precision::tf32, Activation::none, true},
      {{1, 40, 36, 48}, 130, DType::f16, Precision::tf32, Activation::none, true},
      {{1, 64, 64, 64}, 130, DType::bf16, Precision::tf32, Activation::none, true},
      {{1, 8, 16, 16}, 5000, DType::f16, Precision::tf32, Activation::none, true},  // many pieces
      {{3, 5, 7, 16}, 1, DType::bf16, Precision::tf32, Activation::none, true},
      // d = 2 and 4 read rows as they lie, without clusters.
      {{1, 130, 70, 4}, 333, DType::f16, Precision::tf32, Activation::none, true},
      {{3, 34, 36, 4}, 1, DType::bf16, Precision::tf32, Activation::none, true},
      {{2, 260, 66, 4}, 100, DType::f16, Precision::tf32, Activation::none, true, true, 8},
      {{1, 64, 128, 4}, 500, DType::f16, Precision::tf32, Activation::none, true},  // tiles with more columns than rows
      {{2, 180, 260, 4}, 100, DType::bf16, Precision::tf32, Activation::none, true, true, 8},
      {{2, 260, 132, 2}, 500, DType::bf16, Precision::tf32, Activation::none, true, true, 8},
      {{1, 8, 8, 2}, 31, DType::f16},
      {{1, 36, 300, 2}, 1000, DType::f16, Precision::tf32, Activation::none, true},
  };
  for (const Case& c : cases) {
    check_gradient(c, {Family::cluster});
  }
}

TEST_F(Strided, GradientRepeatsBitForBit) {
  std::mt19937 random(1);
  const Case c{{1, 20, 16, 16}, 3000, DType::bf16};
  MirroredTensor x = random_tensor(rows(c, 256), random), dy = random_tensor(rows(c, 320), random);
  WeightProblem problem{c.sizes, c.batch, c.dtype, uploaded_rows(x), uploaded_rows(dy), {}, {}};
  Context context = Context::cuda(0);
  std::vector<std::byte> first;
  for (int n = 0; n < 3; ++n) {
    MirroredTensor dw = weights(c);
    problem.d_w = uploaded_weights(dw);
    ASSERT_TRUE(run_on(problem, context, {Family::strided, Family::cluster}));
    dw.download();
    first = n == 0 ? dw.storage() : first;
    EXPECT_TRUE(dw.storage() == first);
  }
}

TEST_F(Strided, LeavesOthersToOthers) {
  const Case c{{1, 4, 4, 4}, 4, DType::f16};
  MirroredTensor x = rows(c, 16), y = rows(c, 16), w = weights(c);
  Problem problem{c.sizes, c.batch, c.dtype, uploaded_rows(x), uploaded_rows(y), uploaded_weights(w), {}, {}};
  Context context = Context::cuda(0);
  const auto taken = [&](auto change) {
    Problem changed = problem;
    change(changed);
    return run_on(changed, context, {Family::strided, Family::cluster});
  };
  EXPECT_TRUE(taken([](Problem&) {}));
  EXPECT_FALSE(taken([](Problem& p) { p.sizes.d = 1; }));
  EXPECT_FALSE(taken([](Problem& p) { p.sizes.d = 3; }));
  EXPECT_FALSE(taken([](Problem& p) { p.dtype = DType::f64; }));
  EXPECT_FALSE(taken([](Problem& p) { p.dtype = DType::f32; }));  // ieee
  EXPECT_FALSE(taken([](Problem& p) { p.x = {p.x.data, 1, 4}; }));
  EXPECT_FALSE(taken([](Problem& p) { p.y = {p.y.data, 17, 1}; }));
}

}  // namespace
}  // namespace fretwork::kronecker
