// Chains of Kronecker factors: the planner's words everywhere; the fused kernel against float64 where there is a GPU
// that has it.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "ops/kronecker/cuda/families.h"
#include "support/activated.h"
#include "support/device_tensor.h"
#include "support/error_text.h"
#include "support/reference.h"

namespace fretwork::kronecker {
namespace {

namespace driver = fretwork::cuda;
using Lines = std::vector<std::string>;

/// The plan of factors of these sizes.
template <typename... More>
Lines plan(const std::vector<Sizes>& factors, More&&... more) {
  std::vector<KroneckerPtr> patterns;
  std::ranges::transform(factors, std::back_inserter(patterns), KroneckerPattern::make);
  return kronecker::plan(patterns, std::forward<More>(more)...);
}

TEST(ChainPlan, FusesMonarchs) {
  EXPECT_EQ(kronecker::plan(monarch(4096, 4096, 64, 64), "sm_90a"), Lines{"0+1: fused, clusters of 8, 16 rows"});
  EXPECT_EQ(kronecker::plan(monarch(1024, 1024, 32, 32), "sm_90a"), Lines{"0+1: fused, 16 rows"});
  EXPECT_EQ(kronecker::plan(monarch(2048, 2048, 32, 32), "sm_90a", DType::bf16),
            Lines{"0+1: fused, clusters of 4, 16 rows"});
}

TEST(ChainPlan, SaysWhatRunsAlone) {
  const std::vector<KroneckerPtr> square = monarch(4096, 4096, 64, 64);
  EXPECT_EQ(kronecker::plan(square, "sm_90a", DType::f32), (Lines{"0: fp32", "1: fp32"}));
  EXPECT_EQ(kronecker::plan(square, "sm_90a", DType::f16, true), (Lines{"0: cublas", "1: hopper"}));
  EXPECT_EQ(kronecker::plan(square, "sm_80"), (Lines{"0: cublas", "1: strided"}));
  EXPECT_EQ(kronecker::plan(square, "cpu"), (Lines{"0: cpu", "1: cpu"}));
  EXPECT_EQ(kronecker::plan(monarch(12, 20, 3, 5), "sm_90a"), (Lines{"0: cublas", "1: small"}));
  EXPECT_EQ(kronecker::plan(square, "sm_90a", DType::f64), (Lines{"0: simple", "1: simple"}));
  EXPECT_EQ(plan({{1, 64, 64, 3}}, "sm_90a"), Lines{"0: small"});
  EXPECT_EQ(plan({{1, 64, 64, 3}}, "sm_80"), Lines{"0: small"});
  EXPECT_EQ(plan({{1, 64, 64, 9}}, "sm_90a"), Lines{"0: simple"});
  EXPECT_EQ(plan({{2, 20, 20, 1}}, "sm_90a"), Lines{"0: cublas"});
  EXPECT_EQ(kronecker::plan({}, "cpu"), Lines{});
}

TEST(ChainPlan, LooksAtAFewRows) {
  const auto plan_one = [](Sizes s, std::int64_t batch) {
    return plan({s}, "sm_90a", DType::f16, false, batch).front();
  };
  EXPECT_EQ(plan_one({1, 64, 64, 4}, 16), "0: direct");
  EXPECT_EQ(plan_one({1, 64, 64, 6}, 16), "0: small");
  EXPECT_EQ(plan_one({1, 64, 64, 3}, 1), "0: small");
  EXPECT_EQ(plan_one({1, 64, 64, 3}, 33), "0: small");
  EXPECT_EQ(plan_one({1, 256, 256, 16}, 4096), "0: cluster");
  EXPECT_EQ(error_of([&] { plan_one({1, 64, 64, 4}, -1); }), "plan: batch: expected at least 0, got -1");
  EXPECT_EQ(error_of([&] { plan_one({1, 0, 64, 4}, 1); }), "KroneckerPattern: b: expected at least 1, got 0");
  EXPECT_EQ(error_of([&] { kronecker::plan({}, "cpu", DType::i8); }),
            "plan: dtype: expected float64, float32, float16 or bfloat16, got int8");
}

/// As the chain itself does: a few rows are bound by the weights, which each factor reads once.
TEST(ChainPlan, FusesNoFewRows) {
  const auto plan = [](std::int64_t batch) {
    return kronecker::plan(monarch(1024, 1024, 32, 32), "sm_90a", DType::f16, false, batch);
  };
  EXPECT_EQ(plan(1), (Lines{"0: direct", "1: direct"}));
  EXPECT_EQ(plan(32), (Lines{"0: direct", "1: direct"}));
  EXPECT_EQ(plan(33), Lines{"0+1: fused, 16 rows"});
}

TEST(ChainPlan, LooksAtEveryPair) {
  std::vector<KroneckerPtr> three = monarch(4096, 4096, 64, 64);
  three.insert(three.begin(), KroneckerPattern::make({1, 4096, 32, 1}));
  EXPECT_EQ(kronecker::plan(three, "sm_90a"), (Lines{"0: cublas", "1+2: fused, clusters of 8, 16 rows"}));
}

TEST(ChainPlan, RefusesUnknownTargets) {
  EXPECT_EQ(error_of([] { kronecker::plan({}, "tpu"); }),
            "plan: arch: expected cpu, a GPU such as cuda:0, or an architecture such as sm_90a, got tpu");
  for (const char* const old : {"sm_70", "sm_9", "sm_0"}) {
    EXPECT_EQ(error_of([&] { kronecker::plan({}, old); }),
              std::string("plan: arch: expected sm_75 or later, as NVRTC 13 compiles for no older GPU, got ") + old);
  }
  for (const char* const none : {"sm_", "sm_90ab", "sm_a", "cuda:", "cuda:x", "SM_90"}) {
    EXPECT_NE(error_of([&] { kronecker::plan({}, none); }).find("such as sm_90a, got"), std::string::npos) << none;
  }
  const std::vector<Sizes> apart = {{2, 3, 4, 1}, {1, 2, 5, 1}};
  EXPECT_EQ(error_of([&] { plan(apart, "cpu"); }),
            "plan: patterns[1]: expected 6 in features (a·c·d), as come before it, got 5");
  EXPECT_EQ(error_of([&] { kronecker::plan(std::vector<KroneckerPtr>{nullptr}, "cpu"); }),
            "plan: patterns[0]: expected a pattern, got none");
}

constexpr std::pair<int, int> kWarps[] = {{8, 8}, {4, 8}, {4, 4}};

/// Every way of dividing the work fits in shared memory and covers all of it.
TEST(ChainPlan, DividesTheWorkWhole) {
  int valid = 0;
  for (const int q : {16, 32, 48, 64, 96, 128}) {
    for (const int r : {16, 32, 64, 96, 128}) {
      for (const int s : {8, 16, 32, 48, 64, 128}) {
        for (const int p : {8, 16, 32, 40, 64, 128}) {
          auto m = chain::fuse({q, s, r, 1}, {1, p, q, s});
          if (!m) {
            continue;
          }
          for (const auto& [first, second] : kWarps) {
            m->first_warps = first;
            m->second_warps = second;
            if (m->valid()) {
              ++valid;
              EXPECT_LE(m->shared(), chain::Monarch::kShared);
              EXPECT_EQ(m->words() * 2, std::int64_t{q} * s * r + std::int64_t{p} * q * s) << q << " " << r << " " << s;
            }
          }
        }
      }
    }
  }
  EXPECT_GT(valid, 300);
}

// ------------------------------------------------------------------------------------------------------ on a GPU

using Extents = std::vector<std::int64_t>;

MirroredTensor tensor(DType dtype, const Extents& sizes, const Extents& strides) {
  return {dtype, sizes, strides, 256};
}

struct Case {
  std::int64_t q, r, s, p, batch;
  DType dtype = DType::f16;
  bool bias = false;
  Activation activation = Activation::none;
  std::int64_t gap = 0;  ///< elements between the rows of x and y
  bool transposed = false;
  chain::Arrangement arrangement = {};
};

std::string text(const Case& c) {
  return "q " + std::to_string(c.q) + " r " + std::to_string(c.r) + " s " + std::to_string(c.s) + " p " +
         std::to_string(c.p) + " batch " + std::to_string(c.batch) + " " + name_of(c.dtype) + " gap " +
         std::to_string(c.gap) + " exchange " + std::to_string(c.arrangement.exchange) + " warps " +
         std::to_string(c.arrangement.first_warps) + " " + std::to_string(c.arrangement.second_warps);
}

/// The operands of a case, uploaded.
struct Operands {
  std::int64_t in, out;
  MirroredTensor x, w1, w2, bias, y;
  Problem first, second;

  explicit Operands(const Case& c)
      : in(c.q * c.r),
        out(c.p * c.s),
        x(tensor(c.dtype, {c.batch, in}, {in + c.gap, 1})),
        w1(tensor(c.dtype, {c.q, c.s, c.r}, c.transposed ? Extents{c.s * c.r, 1, c.s} : Extents{c.s * c.r, c.r, 1})),
        w2(tensor(c.dtype, {c.p, c.q, c.s}, c.transposed ? Extents{c.s, c.s * c.p, 1} : Extents{c.q * c.s, c.s, 1})),
        bias(tensor(c.dtype, {out}, {1})),
        y(tensor(c.dtype, {c.batch, out}, {out + c.gap, 1})) {
    std::mt19937 random(7);
    for (MirroredTensor* t : {&x, &w1, &w2, &bias}) {
      t->randomise(random, std::uniform_real_distribution(-1.0, 1.0));
      t->upload();
    }
    y.upload();
    const auto &s1 = w1.view.strides, &s2 = w2.view.strides;
    first = {{c.q, c.s, c.r, 1},      c.batch, c.dtype, {x.device_view.data, in + c.gap, 1},
             {nullptr, c.q * c.s, 1}, {},      {},      {}};
    second = {
        {1, c.p, c.q, c.s}, c.batch, c.dtype, {nullptr, c.q * c.s, 1}, {y.device_view.data, out + c.gap, 1}, {}, {},
        c.activation};
    first.w = {w1.device_view.data, s1[0], s1[1], s1[2], 1};
    second.w = {w2.device_view.data, 0, s2[0], s2[1], s2[2]};
    if (c.bias) {
      second.bias = {bias.device_view.data, 1};
    }
  }
};

void check_row(const Case& c, const Operands& o, std::int64_t n) {
  std::vector<double> middle(static_cast<std::size_t>(c.q * c.s));
  for (std::int64_t i = 0; i < c.q; ++i) {
    for (std::int64_t j = 0; j < c.s; ++j) {
      double sum = 0;
      for (std::int64_t k = 0; k < c.r; ++k) {
        sum += o.w1.get({i, j, k}) * o.x.get({n, i * c.r + k});
      }
      middle[static_cast<std::size_t>(i * c.s + j)] = sum;
    }
  }
  for (std::int64_t j = 0; j < c.p; ++j) {
    for (std::int64_t l = 0; l < c.s; ++l) {
      double sum = 0, magnitude = 0;
      for (std::int64_t i = 0; i < c.q; ++i) {
        const double product = o.w2.get({j, i, l}) * middle[static_cast<std::size_t>(i * c.s + l)];
        sum += product;
        magnitude += std::abs(product);
      }
      const std::int64_t feature = j * c.s + l;
      sum += c.bias ? o.bias.get(feature) : 0;
      const double want = activated(c.activation, sum), got = o.y.get({n, feature});
      // The middle is rounded once, and so is the result; no activation is steeper than 1.13.
      ASSERT_NEAR(got, want, unit_roundoff(c.dtype) * (0.5 * magnitude + 2 * std::abs(want)) + 1e-4)
          << text(c) << " at n " << n << " j " << j << " l " << l;
    }
  }
}

class ChainFused : public testing::Test {
 protected:
  void SetUp() override {
    if (!driver::available()) {
      GTEST_SKIP() << driver::unavailable_reason();
    }
    if (driver::kernel_arch(0) != "sm_90a") {
      GTEST_SKIP() << "fused for sm_90a";
    }
    scope_ = std::make_unique<driver::DeviceScope>(0);
  }
  /// `rows`: of the batch that are checked, 0 for all.
  static void check(const Case& c, std::int64_t rows = 0) {
    Operands o(c);
    Context context = Context::cuda(0);
    ASSERT_TRUE(chain::fits(o.first, o.second, machine_of(context))) << text(c);
    chain::launch(o.first, o.second, context, c.arrangement);
    o.y.download();
    ASSERT_TRUE(o.y.intact_around()) << text(c) << ": wrote beside the elements of y";
    for (std::int64_t n = 0; n < c.batch; n += rows == 0 ? 1 : std::max<std::int64_t>(1, c.batch / rows)) {
      check_row(c, o, n);
      if (HasFatalFailure()) {
        return;
      }
    }
    check_row(c, o, c.batch - 1);
  }
  std::unique_ptr<driver::DeviceScope> scope_;
};

TEST_F(ChainFused, OneTile) { check({64, 64, 64, 64, 16}); }

TEST_F(ChainFused, EveryArrangement) {
  for (const auto& [first, second] : kWarps) {
    for (const int exchange : {1, 2, 4, 8}) {
      check({64, 64, 64, 64, 100, DType::f16, true, Activation::none, 0, false, {exchange, first, second}});
      check({32, 64, 64, 32, 100, DType::bf16, true, Activation::relu, 8, true, {exchange, first, second}}, 20);
    }
    check({32, 32, 32, 32, 100, DType::f16, true, Activation::none, 0, false, {1, first, second}});
  }
}

TEST_F(ChainFused, OddBatches) {
  for (const std::int64_t batch : {1, 7, 15, 17, 257, 600}) {
    check({64, 64, 64, 64, batch}, 20);
    check({32, 32, 32, 32, batch, DType::bf16}, 20);
  }
}

TEST_F(ChainFused, ManyTilesOfEveryCluster) {
  for (const int exchange : {1, 2, 4, 8}) {
    for (const auto& [first, second] : kWarps) {
      check({64, 64, 64, 64, 4001, DType::f16, false, Activation::none, 0, false, {exchange, first, second}}, 40);
    }
  }
  check({64, 64, 64, 64, 25089}, 40);
  check({32, 64, 64, 32, 25089, DType::bf16}, 40);
  check({32, 32, 32, 32, 25089}, 40);
}

TEST_F(ChainFused, BiasActivationsStridesAndTypes) {
  for (const DType dtype : {DType::f16, DType::bf16}) {
    for (const Activation activation : {Activation::none, Activation::relu, Activation::gelu, Activation::silu}) {
      check({64, 64, 64, 64, 70, dtype, true, activation, 8}, 20);
      check({32, 32, 32, 32, 70, dtype, true, activation, 24, true}, 20);
    }
    check({64, 64, 64, 64, 70, dtype, false, Activation::none, 0, true}, 20);
  }
}

/// Rectangles, and every size of cluster.
TEST_F(ChainFused, Shapes) {
  std::vector<bool> seen(9);
  for (const auto& [q, r, s, p] : {std::array<std::int64_t, 4>{16, 16, 16, 16},
                                   {16, 64, 16, 32},
                                   {32, 16, 32, 64},
                                   {32, 32, 64, 32},
                                   {32, 64, 32, 16},
                                   {64, 32, 64, 32},
                                   {64, 16, 64, 128},
                                   {64, 128, 32, 64},
                                   {128, 32, 64, 64},
                                   {64, 48, 64, 64},
                                   {128, 64, 32, 32}}) {
    const auto m = chain::fuse({q, s, r, 1}, {1, p, q, s});
    if (!m) {
      continue;
    }
    seen[static_cast<std::size_t>(m->ranks)] = true;
    check({q, r, s, p, 83, DType::f16, true}, 20);
  }
  for (const std::size_t ranks : {1, 2, 4, 8}) {
    EXPECT_TRUE(seen[ranks]) << "no cluster of " << ranks;
  }
}

TEST_F(ChainFused, RepeatsBitForBit) {
  const Case c{64, 64, 64, 64, 1000};
  Operands o(c);
  Context context = Context::cuda(0);
  chain::launch(o.first, o.second, context);
  o.y.download();
  const std::vector<std::byte> once = o.y.storage();
  const std::vector<std::uint16_t> poison(static_cast<std::size_t>(o.y.view.elements()), 0xffff);
  for (int n = 0; n < 1000; ++n) {
    if (n % 100 == 0) {  // what is not written then shows
      driver::copy_to_device(o.second.y.data, poison.data(), 2 * poison.size(), nullptr);
    }
    chain::launch(o.first, o.second, context);
    o.y.download();
    ASSERT_TRUE(once == o.y.storage()) << "launch " << n;
  }
}

/// As a user calls it: the same as one factor after another.
TEST_F(ChainFused, IsTheChain) {
  const Case c{64, 64, 64, 64, 333, DType::bf16, true, Activation::silu};
  Operands o(c);
  Context context = Context::cuda(0);
  const Device device{DeviceType::cuda, 0};
  const TensorView x(o.first.x.data, c.dtype, {c.batch, o.in}, device),
      y(o.second.y.data, c.dtype, {c.batch, o.out}, device);
  const ConstTensorView weights[] = {ConstTensorView(o.first.w.data, c.dtype, {64, 64, 64, 1}, device),
                                     ConstTensorView(o.second.w.data, c.dtype, {1, 64, 64, 64}, device)};
  const TensorView bias(o.second.bias.data, c.dtype, {o.out}, device);
  ksmm_chain(x, weights, y, context, {bias, c.activation});
  o.y.download();
  for (const std::int64_t n : {0, 100, 332}) {
    check_row(c, o, n);
  }
}

}  // namespace
}  // namespace fretwork::kronecker
