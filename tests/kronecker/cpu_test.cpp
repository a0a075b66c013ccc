// The Kronecker products of the CPU against float64, over odd sizes, every dtype, layout and activation.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "core/element.h"
#include "fretwork/executor_tbb.h"
#include "fretwork/fretwork.h"
#include "support/activated.h"
#include "support/error_text.h"

namespace fretwork {
namespace {

using Index = std::int64_t;
using Sizes = KroneckerPattern::Sizes;

/// How the axes of a tensor lie in memory.
enum class Order { first, last, apart, backwards };

/// A strided tensor in a buffer of NaN: reading or writing beside its elements shows.
class Tensor {
 public:
  Tensor(DType dtype, std::vector<Index> sizes, Order order) {
    std::vector<Index> strides(sizes.size());
    Index step = order == Order::apart ? 3 : 1, first = kMargin;
    for (std::size_t n = 0; n < sizes.size(); ++n) {
      const std::size_t axis = order == Order::last ? n : sizes.size() - 1 - n;
      strides[axis] = step;
      step = step * sizes[axis] + (order == Order::apart ? 2 : 0);
    }
    if (order == Order::backwards) {
      first += (sizes[0] - 1) * strides[0];
      strides[0] = -strides[0];
    }
    bytes_.assign(static_cast<std::size_t>(step + 2 * kMargin) * size_of(dtype), 0xff);
    view = TensorView(bytes_.data() + static_cast<std::size_t>(first) * size_of(dtype), dtype, sizes, strides, {});
  }

  double get(std::initializer_list<Index> index) const { return read_element<double>(at(index), view.dtype, 0); }
  void set(std::initializer_list<Index> index, double value) { write_element(at(index), view.dtype, 0, value); }
  void randomise(double scale) {
    static std::mt19937 random(4);
    std::normal_distribution<double> numbers(0, scale);
    std::vector<Index> index(static_cast<std::size_t>(view.rank));
    for (Index n = 0; n < view.elements(); ++n) {
      Index rest = n;
      for (int d = view.rank; d-- > 0; rest /= view.size(d)) {
        index[static_cast<std::size_t>(d)] = rest % view.size(d);
      }
      view.rank == 4   ? set({index[0], index[1], index[2], index[3]}, numbers(random))
      : view.rank == 2 ? set({index[0], index[1]}, numbers(random))
                       : set({index[0]}, numbers(random));
    }
  }
  /// Whether something was written beside the elements.
  bool spoiled() const {
    std::vector<unsigned char> rest = bytes_;
    for (Index n = 0; n < view.elements(); ++n) {
      Index offset = 0, left = n;
      for (int d = view.rank; d-- > 0; left /= view.size(d)) {
        offset += left % view.size(d) * view.stride(d);
      }
      const auto size = static_cast<Index>(size_of(view.dtype));
      std::fill_n(rest.data() + (static_cast<unsigned char*>(view.data) - bytes_.data()) + offset * size, size, 0xff);
    }
    return std::ranges::any_of(rest, [](unsigned char byte) { return byte != 0xff; });
  }
  bool same_bytes(const Tensor& other) const { return bytes_ == other.bytes_; }

  TensorView view;
  Tensor(Tensor&&) = default;

 private:
  static constexpr Index kMargin = 8;
  void* at(std::initializer_list<Index> index) const {
    Index offset = 0;
    int d = 0;
    for (const Index n : index) {
      offset += n * view.stride(d++);
    }
    return static_cast<unsigned char*>(view.data) + offset * static_cast<Index>(size_of(view.dtype));
  }
  std::vector<unsigned char> bytes_;
};

struct Case {
  Sizes s;
  Index batch;
  DType dtype;
  Order order;
  Order weights = Order::first;
  bool bias = false;
  Activation activation = Activation::none;
};

double tolerance(DType dtype) {
  return dtype == DType::f64 ? 1e-12 : dtype == DType::f32 ? 4e-6 : dtype == DType::f16 ? 2e-3 : 1.6e-2;
}

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
  Tensor x(t.dtype, {t.batch, a * c * d}, t.order), y(t.dtype, {t.batch, a * b * d}, t.order);
  Tensor w(t.dtype, {a, b, c, d}, t.weights), bias(t.dtype, {a * b * d}, t.weights);
  x.randomise(1), w.randomise(1 / std::sqrt(static_cast<double>(c))), bias.randomise(1);
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
  EXPECT_LE(worst, tolerance(t.dtype) * 5);
  EXPECT_FALSE(y.spoiled());
}

void check_gradient(const Case& t, Executor& executor) {
  SCOPED_TRACE(text(t));
  const auto& [a, b, c, d] = t.s;
  Tensor x(t.dtype, {t.batch, a * c * d}, t.order), d_y(t.dtype, {t.batch, a * b * d}, t.order);
  Tensor d_w(t.dtype, {a, b, c, d}, t.weights), d_bias(t.dtype, {a * b * d}, t.weights);
  const double scale = 1 / std::sqrt(static_cast<double>(std::max<Index>(t.batch, 1)));
  x.randomise(1), d_y.randomise(scale);
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
  EXPECT_LE(worst, tolerance(t.dtype) * 5);
  EXPECT_FALSE(d_w.spoiled() || d_bias.spoiled());
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

TEST(KroneckerCpu, LargerTilesAndBatches) {
  TbbExecutor threads;
  for (const Sizes& s : {Sizes{1, 24, 64, 16}, {1, 48, 64, 1}, {1, 96, 24, 4}, {1, 300, 10, 2}, {1, 64, 24, 3}}) {
    for (const DType dtype : {DType::f32, DType::bf16}) {
      for (const Order order : {Order::first, Order::last}) {
        check_product({s, 530, dtype, order, Order::first, true, Activation::relu}, threads);
        check_product({s, 512, dtype, order}, threads);
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
  Tensor x(DType::f32, {1, count}, Order::first), y(DType::f32, {1, count}, Order::first);
  Tensor w(DType::f32, {1, 1, 1, count}, Order::first);
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
  for (const Sizes& s : {Sizes{1, 40, 24, 1}, {2, 24, 20, 5}, {1, 16, 24, 16}}) {
    for (const Order order : {Order::first, Order::last}) {
      const auto& [a, b, c, d] = s;
      const Index batch = 2100;
      Tensor x(DType::f32, {batch, a * c * d}, order), d_y(DType::f32, {batch, a * b * d}, order);
      Tensor w(DType::f32, {a, b, c, d}, Order::first);
      x.randomise(1), d_y.randomise(1), w.randomise(1);
      const auto results = [&](Executor& executor) {
        Context context = Context::cpu(executor);
        std::vector<Tensor> all;
        all.emplace_back(DType::f32, std::vector{batch, a * b * d}, order);
        all.emplace_back(DType::f32, std::vector{a, b, c, d}, Order::first);
        all.emplace_back(DType::f32, std::vector{a * b * d}, Order::first);
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
