// Kronecker products in small tiles, every tile, and by cuBLAS, against float64 on the host. Skipped where there is no
// GPU.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "kronecker/families.h"
#include "ops/kronecker/cuda/families.h"
#include "runtime/cublas.h"
#include "support/activated.h"
#include "support/device_tensor.h"
#include "support/gpu_fixture.h"

namespace fretwork::kronecker {
namespace {

namespace driver = fretwork::cuda;

struct Case {
  Sizes sizes{};
  std::int64_t batch = 0;
  bool last = false;
  DType dtype = DType::f16;
  Activation activation = Activation::none;
  bool bias = false;
  bool transposed = false;     ///< w is stored (a, c, b, d)
  std::int64_t gap = 0;        ///< NaN between the lines of x, y and w
  std::size_t alignment = 16;  ///< bytes
  bool y_turned = false;       ///< y has the other layout than x
};

std::string text(const Case& c) {
  const Sizes& s = c.sizes;
  return "(" + std::to_string(s.a) + "," + std::to_string(s.b) + "," + std::to_string(s.c) + "," + std::to_string(s.d) +
         ") batch " + std::to_string(c.batch) + (c.last ? " last " : " first ") + name_of(c.dtype) + " activation " +
         std::to_string(static_cast<int>(c.activation)) + (c.bias ? " bias" : "") +
         (c.transposed ? " transposed" : "") + " gap " + std::to_string(c.gap) + " alignment " +
         std::to_string(c.alignment) + (c.y_turned ? " y turned" : "");
}

/// cuBLAS where d is 1.
constexpr std::initializer_list<Family> kTested = {Family::small, Family::cublas};

class Small : public GpuTest {};

/// Tensors of a case, on the GPU.
struct Made {
  MirroredTensor x, w, bias, y;
  Problem problem;

  explicit Made(const Case& c) {
    const auto& [a, b, k, d] = c.sizes;
    std::mt19937 random(static_cast<unsigned>(a + 3 * b + 7 * k + 11 * d + 13 * c.batch));
    const std::uniform_real_distribution numbers(-1.0, 1.0);
    const auto matrix = [&](std::int64_t features, bool last) {
      const std::array strides{last ? 1 : features + c.gap, last ? c.batch + c.gap : 1};
      return MirroredTensor(c.dtype, std::array{c.batch, features}, strides, c.alignment);
    };
    const std::int64_t line = (c.transposed ? b : k) * d + c.gap;
    const std::array strides{line * (c.transposed ? k : b), c.transposed ? d : line, c.transposed ? line : d,
                             std::int64_t{1}};
    x = matrix(a * k * d, c.last);
    y = matrix(a * b * d, c.last != c.y_turned);
    w = MirroredTensor(c.dtype, std::array{a, b, k, d}, strides, c.alignment);
    bias = MirroredTensor(c.dtype, {a * b * d});
    for (MirroredTensor* const tensor : {&x, &w, &bias}) {
      tensor->randomise(random, numbers);
    }
    problem.sizes = c.sizes;
    problem.batch = c.batch;
    problem.dtype = c.dtype;
    problem.activation = c.activation;
    problem.last = c.last;
    upload(c);
  }
  void upload(const Case& c) {
    const auto matrix = [](MirroredTensor& tensor) {
      const TensorView& there = tensor.upload();
      return Matrix{there.data, there.strides[0], there.strides[1]};
    };
    const TensorView& weights = w.upload();
    problem.x = matrix(x);
    problem.y = matrix(y);
    problem.w = {weights.data, weights.strides[0], weights.strides[1], weights.strides[2], weights.strides[3]};
    problem.bias = c.bias ? Vector{bias.upload().data, 1} : Vector{};
  }
  void poison() { problem.y.data = (y.poison(), y.upload().data); }
};

/// What the result should be, and the sum of the products' sizes, by row and feature.
struct Expected {
  std::vector<double> values, magnitudes;

  Expected(const Case& c, const Made& made) {
    const auto& [a, b, k_size, d] = c.sizes;
    const auto numbers = [](const MirroredTensor& tensor, std::int64_t count) {
      std::vector<double> list;
      for (std::int64_t n = 0; n < count; ++n) {
        list.push_back(tensor.get(n));
      }
      return list;
    };
    const std::vector<double> x = numbers(made.x, c.batch * a * k_size * d), w = numbers(made.w, a * b * k_size * d);
    for (std::int64_t n = 0; n < c.batch; ++n) {
      for (std::int64_t feature = 0; feature < a * b * d; ++feature) {
        const std::int64_t i = feature / (b * d), j = feature / d % b, l = feature % d;
        double sum = 0, magnitude = 0;
        for (std::int64_t k = 0; k < k_size; ++k) {
          const double product = x[static_cast<std::size_t>(((n * a + i) * k_size + k) * d + l)] *
                                 w[static_cast<std::size_t>(((i * b + j) * k_size + k) * d + l)];
          sum += product;
          magnitude += std::abs(product);
        }
        values.push_back(activated(c.activation, sum + (c.bias ? made.bias.get(feature) : 0)));
        magnitudes.push_back(magnitude);
      }
    }
  }
};

void check_result(const Case& c, const Made& made, const Expected& expected, const std::string& what) {
  const double rounding = c.dtype == DType::f16 ? 0x1p-10 : 0x1p-7;
  for (std::size_t at = 0; at < expected.values.size(); ++at) {
    const double want = expected.values[at];
    ASSERT_NEAR(made.y.get(static_cast<std::int64_t>(at)), want,
                1e-6 * expected.magnitudes[at] + rounding * std::abs(want) + 1e-5)
        << what << " at element " << at;
  }
  ASSERT_TRUE(made.y.intact_around()) << what << ": wrote beside the elements of y";
}

/// On every config of these; gives their number.
std::size_t check(const Case& c) {
  Made made(c);
  const Expected expected(c, made);
  Context context = Context::cuda(0);
  const std::vector<Config> configs = configs_of(made.problem, context, kTested);
  EXPECT_FALSE(configs.empty()) << text(c);
  for (const Config& config : configs) {
    const std::string what = text(c) + " " + text_of(config);
    made.poison();
    EXPECT_TRUE(cuda::run(made.problem, context, config)) << what;
    made.y.download();
    check_result(c, made, expected, what);
    if (testing::Test::HasFatalFailure()) {
      break;
    }
  }
  return configs.size();
}

constexpr std::int64_t kDeltas[] = {1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 32, 64};

TEST_F(Small, EveryTileOfEveryDelta) {
  for (const std::int64_t d : kDeltas) {
    for (const bool last : {false, true}) {
      const std::size_t tiles = check({{1, 72, 80, d}, 72, last});
      if (driver::device_info(0).arch == 90) {
        const std::size_t library = d == 1 && fretwork::cublas::available() ? 1 : 0;
        EXPECT_EQ(tiles, (d <= 4 ? 6u : 4u) + library);
      }
      check({{1, 24, 136, d}, 24, last, DType::bf16});
    }
  }
}

TEST_F(Small, OddSizes) {
  for (const std::int64_t d : kDeltas) {
    for (const bool last : {false, true}) {
      for (const std::int64_t batch : {1, 3, 33}) {
        check({{3, 5, 7, d}, batch, last});
        check({{2, 1, 17, d}, batch, last});
        check({{1, 19, 1, d}, batch, last});
      }
      check({{2, 67, d <= 8 ? 131 : 21, d}, 50, last});
    }
  }
}

TEST_F(Small, DepthsThatTeamsShareUnevenly) {
  for (const std::int64_t c : {16, 64, 72, 200, 520, 1000}) {
    for (const std::int64_t d : {1, 2, 3, 8}) {
      check({{1, 16, c, d}, 8});
      check({{1, 16, c, d}, 8, true});
    }
  }
}

TEST_F(Small, GapsAndMisalignedOperands) {
  for (const std::int64_t d : {1, 2, 3, 4, 7, 8, 12, 16}) {
    for (const bool last : {false, true}) {
      for (const std::size_t alignment : {2, 4, 16}) {
        for (const std::int64_t gap : {0, 1, 2, 8}) {
          check({{2, 24, 40, d}, 40, last, DType::f16, Activation::none, false, false, gap, alignment});
        }
      }
    }
  }
}

TEST_F(Small, TransposedWeights) {
  for (const std::int64_t d : kDeltas) {
    for (const bool last : {false, true}) {
      for (const std::int64_t gap : {0, 1, 8}) {
        check({{2, 40, 56, d}, 35, last, DType::f16, Activation::none, false, true, gap});
      }
      check({{2, 33, 21, d}, 35, last, DType::bf16, Activation::none, true, true});
    }
  }
}

TEST_F(Small, ActivationsAndBias) {
  for (const Activation activation : {Activation::none, Activation::relu, Activation::gelu, Activation::silu}) {
    for (const std::int64_t d : {1, 3, 4, 16}) {
      for (const bool last : {false, true}) {
        check({{2, 20, 24, d}, 19, last, DType::f16, activation, true});
        check({{2, 20, 24, d}, 24, last, DType::bf16, activation, false});
        check({{1, 20, 24, d}, 24, last, DType::bf16, activation, true});
      }
    }
  }
}

TEST_F(Small, ResultsOfTheOtherLayout) {
  for (const std::int64_t d : {1, 3, 4, 16}) {
    for (const bool last : {false, true}) {
      check({{2, 24, 24, d}, 40, last, DType::f16, Activation::none, true, false, 0, 16, true});
    }
  }
}

/// What is not there is zero in both operands, so that an infinity or NaN of another row, block or δ stays there.
TEST_F(Small, InfinitiesStayInTheirRows) {
  for (const std::int64_t d : kDeltas) {
    for (const bool last : {false, true}) {
      Case c{{2, 20, 21, d}, 18, last};
      Made made(c);
      const double infinity = std::numeric_limits<double>::infinity();
      made.x.set({3, (1 * 21 + 20) * d + d - 1}, infinity);
      made.upload(c);
      Context context = Context::cuda(0);
      for (const Config& config : configs_of(made.problem, context, kTested)) {
        made.poison();
        ASSERT_TRUE(cuda::run(made.problem, context, config));
        made.y.download();
        for (std::int64_t n = 0; n < c.batch; ++n) {
          for (std::int64_t feature = 0; feature < 2 * 20 * d; ++feature) {
            const bool meets = n == 3 && feature >= 20 * d && feature % d == d - 1;
            ASSERT_EQ(std::isfinite(made.y.get({n, feature})), !meets)
                << text(c) << " " << text_of(config) << " at n " << n << " feature " << feature;
          }
        }
      }
    }
  }
}

TEST_F(Small, RepeatsBitForBit) {
  for (const std::int64_t d : {1, 3, 4, 8}) {
    Case c{{2, 72, 520, d}, 40};
    Made made(c);
    Context context = Context::cuda(0);
    for (const Config& config : configs_of(made.problem, context, kTested)) {
      std::vector<std::byte> first;
      for (int n = 0; n < 4; ++n) {
        made.poison();
        ASSERT_TRUE(cuda::run(made.problem, context, config));
        made.y.download();
        ASSERT_TRUE(std::isfinite(made.y.get(0)));
        first = n == 0 ? made.y.storage() : first;
        EXPECT_TRUE(made.y.storage() == first) << text(c) << " " << text_of(config);
      }
    }
  }
}

TEST_F(Small, WhatDoesNotFitIsRefused) {
  Context context = Context::cuda(0);
  const auto fits = [&](const Problem& problem, int rows, int cols) {
    return cuda::run(problem, context, {Family::small, rows, cols});
  };
  EXPECT_FALSE(fits(Made({{1, 16, 16, 4}, 8}).problem, 48, 16));
  EXPECT_FALSE(fits(Made({{1, 16, 16, 9}, 8}).problem, 16, 16));
  EXPECT_FALSE(fits(Made({{1, 16, 16, 4}, 8, false, DType::f32}).problem, 16, 16));
  Made strided({{1, 16, 16, 4}, 8});
  strided.problem.w.d = 2;
  EXPECT_FALSE(fits(strided.problem, 16, 16));
}

}  // namespace
}  // namespace fretwork::kronecker
