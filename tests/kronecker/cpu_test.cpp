// The Kronecker products of the CPU against float64, over odd sizes, every dtype, layout and activation.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "fretwork/executor_tbb.h"
#include "fretwork/fretwork.h"
#include "support/activated.h"
#include "support/error_text.h"
#include "support/reference.h"
#include "support/tensor.h"

namespace fretwork {
namespace {

using Index = std::int64_t;
using Sizes = KroneckerPattern::Sizes;

/// How the axes of a tensor lie in memory.
/// turned: as the transposed of a tensor of four axes that lies in order.
enum class Order { first, last, apart, backwards, turned };

Tensor tensor(DType dtype, const std::vector<Index>& sizes, Order order) {
  MemoryLayout layout;
  if (order == Order::last) {
    for (std::size_t d = sizes.size(); d-- > 0;) {
      layout.order.push_back(d);
    }
  } else if (order == Order::apart) {
    layout.step = 3, layout.gap = 2;
  } else if (order == Order::backwards) {
    layout.backwards = 1;
  } else if (order == Order::turned && sizes.size() == 4) {
    layout.order = {0, 2, 1, 3};
  }
  return Tensor(dtype, sizes, layout);
}
Tensor random_tensor(DType dtype, const std::vector<Index>& sizes, Order order, double scale = 1) {
  static std::mt19937 random(4);
  Tensor made = tensor(dtype, sizes, order);
  made.randomise(random, std::normal_distribution(0.0, scale));
  return made;
}

struct Case {
  Sizes s;
  Index batch;
  DType dtype;
  Order order;
  Order weights = Order::first;
  bool bias = false;
  Activation activation = Activation::none;
};

/// Of results whose terms are of magnitude 1.
double tolerance(DType dtype) { return 5 * relative_tolerance(dtype); }

std::string text(const Case& t) {
  const auto& [a, b, c, d] = t.s;
  return std::to_string(a) + "," + std::to_string(b) + "," + std::to_string(c) + "," + std::to_string(d) + " batch " +
         std::to_string(t.batch) + " " + std::string(name_of(t.dtype)) + " order " +
         std::to_string(static_cast<int>(t.order)) + std::to_string(static_cast<int>(t.weights)) + " activation " +
         std::to_string(static_cast<int>(t.activation));
}

void check_product(const Case& t, Executor& executor) {
  SCOPED_TRACE(text(t));
  const auto& [a, b, c, d] = t.s;
  const double scale = 1 / std::sqrt(static_cast<double>(c));
  const Tensor x = random_tensor(t.dtype, {t.batch, a * c * d}, t.order);
  const Tensor w = random_tensor(t.dtype, {a, b, c, d}, t.weights, scale);
  const Tensor bias = random_tensor(t.dtype, {a * b * d}, t.weights);
  const Tensor y = tensor(t.dtype, {t.batch, a * b * d}, t.order);
  Context context = Context::cpu(executor);
  KsmmOptions options;
  options.bias = t.bias ? std::optional<ConstTensorView>(bias.view) : std::nullopt;
  options.activation = t.activation;
  ksmm(x.view, w.view, y.view, context, options);
  double worst = 0;
  for (Index n = 0; n < t.batch; ++n) {
    for (Index f = 0; f < a * b * d; ++f) {
      const Index i = f / (b * d), j = f / d % b, l = f % d;
      double sum = t.bias ? bias.get({f}) : 0.0;
      for (Index k = 0; k < c; ++k) {
        sum += w.get({i, j, k, l}) * x.get({n, (i * c + k) * d + l});
      }
      const double error = std::abs(y.get({n, f}) - activated(t.activation, sum));
      worst = error <= worst ? worst : error;  // a NaN is the worst
    }
  }
  EXPECT_LE(worst, tolerance(t.dtype));
  EXPECT_TRUE(y.intact_around());
}

void check_gradient(const Case& t, Executor& executor) {
  SCOPED_TRACE(text(t));
  const auto& [a, b, c, d] = t.s;
  const double scale = 1 / std::sqrt(static_cast<double>(std::max<Index>(t.batch, 1)));
  const Tensor x = random_tensor(t.dtype, {t.batch, a * c * d}, t.order);
  const Tensor d_y = random_tensor(t.dtype, {t.batch, a * b * d}, t.order, scale);
  const Tensor d_w = tensor(t.dtype, {a, b, c, d}, t.weights), d_bias = tensor(t.dtype, {a * b * d}, t.weights);
  Context context = Context::cpu(executor);
  ksmm_backward_weight(x.view, d_y.view, d_w.view, t.bias ? std::optional(d_bias.view) : std::nullopt, context);
  double worst = 0;
  const auto note = [&](double got, double want) {
    const double error = std::abs(got - want);
    worst = error <= worst ? worst : error;
  };
  for (Index f = 0; f < a * b * d; ++f) {
    const Index i = f / (b * d), j = f / d % b, l = f % d;
    double total = 0;
    for (Index n = 0; n < t.batch; ++n) {
      total += d_y.get({n, f});
    }
    if (t.bias) {
      note(d_bias.get({f}), total);
    }
    for (Index k = 0; k < c; ++k) {
      double sum = 0;
      for (Index n = 0; n < t.batch; ++n) {
        sum += d_y.get({n, f}) * x.get({n, (i * c + k) * d + l});
      }
      note(d_w.get({i, j, k, l}), sum);
    }
  }
  EXPECT_LE(worst, tolerance(t.dtype));
  EXPECT_TRUE(d_w.intact_around() && d_bias.intact_around());
}

constexpr DType kTypes[] = {DType::f64, DType::f32, DType::f16, DType::bf16};
constexpr Order kOrders[] = {Order::first, Order::last, Order::apart, Order::backwards};
/// Runs of every length, whole and padded; panels and strips with rests; depths of one and several pieces.
constexpr Sizes kSizes[] = {
    {1, 1, 1, 1},  {2, 3, 4, 5},  {3, 17, 9, 1},  {1, 49, 33, 2},  {2, 25, 7, 3}, {1, 13, 21, 4}, {2, 9, 5, 6},
    {1, 7, 11, 7}, {1, 5, 3, 8},  {1, 3, 10, 9},  {1, 6, 5, 11},   {1, 4, 6, 12}, {1, 5, 70, 16}, {2, 3, 5, 24},
    {1, 4, 3, 35}, {1, 2, 2, 64}, {1, 8, 530, 2}, {1, 3, 1030, 1}, {2, 16, 6, 1}, {1, 6, 5, 32},  {1, 24, 300, 1}};

TEST(KroneckerCpu, ProductInEveryTypeAndLayout) {
  TbbExecutor threads;
  for (const Sizes& s : kSizes) {
    for (const DType dtype : kTypes) {
      for (const Order order : kOrders) {
        for (const Index batch : {1, 7, 37}) {
          check_product({s, batch, dtype, order}, threads);
        }
        check_product({s, 19, dtype, order, Order::apart, true, Activation::silu}, threads);
        check_product({s, 19, dtype, order, Order::last, true}, threads);
      }
    }
  }
}

/// Weights as they are, and as a gradient reads them; from one row to more than are few.
TEST(KroneckerCpu, FewRows) {
  TbbExecutor threads;
  for (const Sizes& s : {Sizes{2, 37, 40, 1},
                         {1, 49, 70, 2},
                         {2, 20, 260, 3},
                         {1, 12, 90, 8},
                         {1, 10, 60, 20},
                         {2, 9, 24, 64},
                         {3, 130, 5, 6}}) {
    for (const DType dtype : kTypes) {
      for (const Order weights : {Order::first, Order::turned}) {
        for (const Index batch : {1, 2, 3, 4, 6, 8, 9, 16, 33}) {
          check_product({s, batch, dtype, Order::first, weights, batch % 2 == 0, Activation::relu}, threads);
        }
        check_product({s, 5, dtype, Order::last, weights}, threads);
        check_product({s, 3, dtype, Order::apart, weights, true}, threads);
      }
    }
  }
}

TEST(KroneckerCpu, GradientInEveryTypeAndLayout) {
  TbbExecutor threads;
  for (const Sizes& s : kSizes) {
    for (const DType dtype : kTypes) {
      for (const Order order : kOrders) {
        for (const Index batch : {0, 1, 7, 37}) {
          check_gradient({s, batch, dtype, order, Order::first, true}, threads);
        }
        check_gradient({s, 19, dtype, order, Order::apart, true}, threads);
        check_gradient({s, 19, dtype, order, Order::last}, threads);
      }
    }
  }
}

/// A few rows, of more weights than are computed at a time; and small blocks with a long batch.
TEST(KroneckerCpu, GradientsOfOperandsAsTheyLie) {
  TbbExecutor threads;
  for (const DType dtype : kTypes) {
    for (const Sizes& s : {Sizes{1, 70, 190, 3}, {2, 31, 300, 5}, {1, 21, 90, 20}, {2, 19, 40, 32}, {1, 9, 300, 8}}) {
      for (const Index batch : {1, 2, 3, 4, 5, 16}) {
        check_gradient({s, batch, dtype, Order::first}, threads);
        check_gradient({s, batch, dtype, Order::last, Order::first, true}, threads);
      }
      check_gradient({s, 3, dtype, Order::apart, Order::first}, threads);
    }
    for (const Sizes& s : {Sizes{9, 4, 5, 1}, {3, 8, 9, 4}, {2, 1, 40, 7}, {1, 6, 3, 17}}) {
      for (const Index batch : {70, 331}) {
        check_gradient({s, batch, dtype, Order::last, Order::first, true}, threads);
        check_gradient({s, batch, dtype, Order::last, Order::apart}, threads);
      }
    }
  }
}

TEST(KroneckerCpu, LargerTilesAndBatches) {
  TbbExecutor threads;
  for (const Sizes& s :
       {Sizes{1, 24, 64, 16}, {1, 48, 64, 1}, {1, 96, 24, 4}, {1, 300, 10, 2}, {1, 64, 24, 3}, {2, 40, 30, 4}}) {
    for (const DType dtype : {DType::f32, DType::bf16}) {
      for (const Order order : {Order::first, Order::last}) {
        check_product({s, 530, dtype, order, Order::first, true, Activation::relu}, threads);
        check_product({s, 512, dtype, order}, threads);
        check_product({s, 40, dtype, order, Order::turned}, threads);
        check_gradient({s, 1500, dtype, order, Order::first, true}, threads);
      }
    }
  }
}

TEST(KroneckerCpu, ResultsPastTheCaches) {
  TbbExecutor threads;
  for (const Order order : {Order::first, Order::last}) {
    for (const Sizes& s : {Sizes{1, 16, 2, 64}, {256, 4, 2, 1}, {16, 16, 2, 4}, {5, 50, 2, 5}}) {
      check_product({s, 2200, DType::f32, order}, threads);
      check_product({s, 2200, DType::f16, order, Order::first, true}, threads);
    }
  }
}

TEST(KroneckerCpu, Activations) {
  for (const Activation activation : {Activation::relu, Activation::gelu, Activation::silu}) {
    for (const DType dtype : kTypes) {
      for (const Order order : {Order::first, Order::last}) {
        for (const bool bias : {false, true}) {
          check_product({{2, 9, 6, 4}, 21, dtype, order, Order::first, bias, activation}, serial_executor());
        }
      }
    }
  }
}

/// x through a factor of ones of size (1, 1, 1, values).
std::vector<float> through(const std::vector<float>& values, Activation activation) {
  const auto count = static_cast<Index>(values.size());
  Tensor x(DType::f32, {1, count}), y(DType::f32, {1, count}), w(DType::f32, {1, 1, 1, count});
  for (Index n = 0; n < count; ++n) {
    x.set({0, n}, values[static_cast<std::size_t>(n)]);
    w.set({0, 0, 0, n}, 1);
  }
  Context context = Context::cpu();
  KsmmOptions options;
  options.activation = activation;
  ksmm(x.view, w.view, y.view, context, options);
  std::vector<float> out;
  for (Index n = 0; n < count; ++n) {
    out.push_back(static_cast<float>(y.get({0, n})));
  }
  return out;
}

TEST(KroneckerCpu, ActivationsAreExactToRounding) {
  std::vector<float> values;
  for (float v = -12; v < 12; v += 0.0173f) {
    values.push_back(v);
  }
  for (const Activation activation : {Activation::relu, Activation::gelu, Activation::silu}) {
    const std::vector<float> got = through(values, activation);
    for (std::size_t n = 0; n < values.size(); ++n) {
      const double want = activated(activation, values[n]);
      EXPECT_NEAR(got[n], want, 2e-5 * std::abs(want) + 1e-30) << values[n];
      EXPECT_NEAR(got[n], want, 1e-6 * std::max(1.0, std::abs(want))) << values[n];
    }
  }
}

TEST(KroneckerCpu, ActivationsOfNoNumbers) {
  constexpr float kInf = std::numeric_limits<float>::infinity(), kNan = std::numeric_limits<float>::quiet_NaN();
  for (const Activation activation : {Activation::relu, Activation::gelu, Activation::silu}) {
    const std::vector<float> got = through({kInf, kNan, -1000, 1000, -0.0f}, activation);
    EXPECT_EQ(got[0], kInf);
    EXPECT_TRUE(std::isnan(got[1]));
    EXPECT_EQ(got[2], 0);
    EXPECT_EQ(got[3], 1000);
    EXPECT_EQ(got[4], 0);
  }
}

TEST(KroneckerCpu, SameBytesForAnyNumberOfThreads) {
  TbbExecutor many(7), two(2);
  for (const Sizes& s : {Sizes{1, 40, 24, 1}, {2, 24, 20, 5}, {1, 16, 24, 16}, {8, 4, 6, 2}, {1, 24, 700, 1}}) {
    for (const Order order : {Order::first, Order::last}) {
      const auto& [a, b, c, d] = s;
      const Index batch = 2100;
      const Tensor x = random_tensor(DType::f32, {batch, a * c * d}, order);
      const Tensor d_y = random_tensor(DType::f32, {batch, a * b * d}, order);
      const Tensor w = random_tensor(DType::f32, {a, b, c, d}, Order::first);
      const auto results = [&](Executor& executor) {
        Context context = Context::cpu(executor);
        std::vector<Tensor> all;
        all.push_back(tensor(DType::f32, {batch, a * b * d}, order));
        all.push_back(tensor(DType::f32, {a, b, c, d}, Order::first));
        all.push_back(tensor(DType::f32, {a * b * d}, Order::first));
        ksmm(x.view, w.view, all[0].view, context);
        ksmm_backward_weight(x.view, d_y.view, all[1].view, all[2].view, context);
        return all;
      };
      const std::vector<Tensor> expected = results(serial_executor());
      for (TbbExecutor* const threads : {&two, &many}) {
        const std::vector<Tensor> got = results(*threads);
        for (std::size_t n = 0; n < got.size(); ++n) {
          EXPECT_TRUE(got[n].same_bytes(expected[n])) << n;
        }
      }
    }
  }
}

TEST(KroneckerCpu, RefusesWhatIsNotThere) {
  std::vector<float> memory(4096);
  Context context = Context::cpu();
  const TensorView x(memory.data(), DType::f32, {3, 40}), w(memory.data(), DType::f32, {2, 3, 4, 5});
  const TensorView out(memory.data(), DType::f32, {3, 30}), end(memory.data(), DType::f32, {1, 7, 30, 1});
  const auto without = [](TensorView view) {
    view.data = nullptr;
    return view;
  };
  const TensorView bias = without({memory.data(), DType::f32, {30}});
  EXPECT_EQ(error_of([&] { ksmm(without(x), w, out, context); }), "ksmm: x: expected the address of (3, 40), got null");
  EXPECT_EQ(error_of([&] { ksmm(x, without(w), out, context); }),
            "ksmm: w: expected the address of (2, 3, 4, 5), got null");
  EXPECT_EQ(error_of([&] { ksmm(x, w, without(out), context); }),
            "ksmm: out: expected the address of (3, 30), got null");
  EXPECT_EQ(error_of([&] { ksmm(x, w, out, context, {.bias = bias}); }),
            "ksmm: bias: expected the address of (30,), got null");
  EXPECT_EQ(error_of([&] { ksmm_backward_weight(x, without(out), w, {}, context); }),
            "ksmm_backward_weight: d_out: expected the address of (3, 30), got null");
  EXPECT_EQ(error_of([&] { ksmm_backward_weight(x, out, w, bias, context); }),
            "ksmm_backward_weight: d_bias: expected the address of (30,), got null");
  const ConstTensorView chain[] = {w, without(end)};
  EXPECT_EQ(error_of([&] {
              ksmm_chain(x, chain, {memory.data(), DType::f32, {3, 7}}, context);
            }),
            "ksmm_chain: weights[1]: expected the address of (1, 7, 30, 1), got null");
  EXPECT_EQ(error_of([&] {
              ksmm({nullptr, DType::f32, {0, 40}}, w, {nullptr, DType::f32, {0, 30}}, context);
            }),
            "no error");
}

TEST(KroneckerCpu, RefusesWhatIsElsewhere) {
  std::vector<float> memory(4096);
  Context context = Context::cpu();
  const Device gpu{DeviceType::cuda, 0};
  const TensorView x(memory.data(), DType::f32, {3, 40}), w(memory.data(), DType::f32, {2, 3, 4, 5});
  const TensorView out(memory.data(), DType::f32, {3, 30});
  TensorView far = w;
  far.device = gpu;
  EXPECT_EQ(error_of([&] { ksmm(x, far, out, context); }), "ksmm: w: expected a tensor on cpu, got one on cuda:0");
  context.executor = nullptr;
  EXPECT_EQ(error_of([&] { ksmm(x, w, out, context); }), "ksmm: context.executor: expected an address, got null");
}

}  // namespace
}  // namespace fretwork
