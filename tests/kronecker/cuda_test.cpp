// The Kronecker products on a real GPU against float64 on the host. Skipped where there is none.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <iterator>
#include <limits>
#include <memory>
#include <optional>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "core/half.h"
#include "device/divide.cuh"
#include "fretwork/error.h"
#include "kronecker/families.h"
#include "ops/kronecker/cuda/families.h"
#include "pattern/checks.h"
#include "runtime/kernels.h"
#include "runtime/nvrtc.h"
#include "support/activated.h"
#include "support/device_tensor.h"
#include "support/reference.h"

namespace fretwork {
namespace {

using kronecker::Family;
using kronecker::kHopper;
using kronecker::run_on;
using kronecker::Sizes;
using Index = std::int64_t;

/// `coarse`: with no more digits than tf32 holds.
void randomise(Tensor& tensor, unsigned seed, bool coarse = false) {
  std::mt19937 random(seed);
  std::uniform_real_distribution<float> numbers(-1.0f, 1.0f);
  tensor.generate([&] {
    const float number = numbers(random);
    return static_cast<double>(coarse ? float_from_f16(f16_from_float(number)) : number);
  });
}

/// How weights lie in memory.
enum class Order { plain, transposed, padded, matrices };

/// Whether fp32 is multiplied in tf32: numbers that this leaves as they are, or any.
enum class Tf32 { no, exact, rounding };

struct Case {
  Sizes sizes;
  Index batch;
  bool last;
  DType dtype = DType::f16;
  Activation activation = Activation::none;
  bool bias = false;
  Order order = Order::plain;
  Index pad = 0;  ///< added to the outer stride of x and y
  Tf32 tf32 = Tf32::no;

  bool coarse() const { return tf32 == Tf32::exact; }
  /// How far a product may be off, relative to its magnitude: sums are rounded, and perhaps factors, one of them by
  /// leaving digits out.
  double slack() const { return dtype == DType::f64 ? 1e-14 : tf32 == Tf32::rounding ? 1.5e-3 : 1e-6; }
  std::string text() const {
    std::ostringstream text;
    text << '(' << sizes.a << ',' << sizes.b << ',' << sizes.c << ',' << sizes.d << ") batch " << batch
         << (last ? " last " : " first ") << name_of(dtype) << " activation " << static_cast<int>(activation)
         << (bias ? " bias" : "") << " order " << static_cast<int>(order) << " pad " << pad << " tf32 "
         << static_cast<int>(tf32);
    return text.str();
  }
};

MirroredTensor tensor(DType dtype, const std::vector<Index>& sizes, const std::vector<Index>& strides) {
  return {dtype, sizes, strides, 256};
}
MirroredTensor matrix(const Case& c, Index features) {
  return tensor(c.dtype, {c.batch, features},
                c.last ? std::vector<Index>{1, c.batch + c.pad} : std::vector<Index>{features + c.pad, 1});
}
MirroredTensor weights(const Case& c) {
  const auto [a, b, k, d] = c.sizes;
  switch (c.order) {
    case Order::plain:
      return tensor(c.dtype, {a, b, k, d}, {b * k * d, k * d, d, 1});
    case Order::transposed:
      return tensor(c.dtype, {a, b, k, d}, {b * k * d, d, b * d, 1});
    case Order::matrices:
      return tensor(c.dtype, {a, b, k, d}, {d * b * k, k, 1, b * k});
    default:
      return tensor(c.dtype, {a, b, k, d}, {(b + 1) * (k * d * 2 + 3), k * d * 2 + 3, d * 2, 2});
  }
}
MirroredTensor vector(const Case& c) { return tensor(c.dtype, {c.sizes.a * c.sizes.b * c.sizes.d}, {1}); }

kronecker::Matrix matrix_of(const TensorView& v) {
  return {v.data, v.size(0) == 1 ? 1 : v.stride(0), v.size(1) == 1 ? 1 : v.stride(1)};
}
kronecker::Weights weights_of(const TensorView& v) {
  return {v.data, v.stride(0), v.stride(1), v.stride(2), v.stride(3)};
}
Sizes sizes_of(const TensorView& w) { return {w.size(0), w.size(1), w.size(2), w.size(3)}; }
kronecker::Vector vector_of(const std::optional<ConstTensorView>& v) {
  return v.has_value() ? kronecker::Vector{operand_data(*v), v->stride(0)} : kronecker::Vector{};
}
kronecker::Problem problem_of(const TensorView& x, const TensorView& w, const TensorView& y,
                              const KsmmOptions& options) {
  return {sizes_of(w),       x.size(0), x.dtype, matrix_of(x), matrix_of(y), weights_of(w), vector_of(options.bias),
          options.activation};
}
kronecker::WeightProblem problem_of(const TensorView& x, const TensorView& d_y, const TensorView& d_w,
                                    const std::optional<TensorView>& d_bias) {
  return {sizes_of(d_w), x.size(0), x.dtype, matrix_of(x), matrix_of(d_y), weights_of(d_w), vector_of(d_bias)};
}

/// x, w, bias and y of a case, and the comparison of what a run left in y.
struct Forward {
  Case c;
  MirroredTensor x, w, y, bias;

  explicit Forward(const Case& which)
      : c(which),
        x(matrix(c, c.sizes.a * c.sizes.c * c.sizes.d)),
        w(weights(c)),
        y(matrix(c, c.sizes.a * c.sizes.b * c.sizes.d)),
        bias(vector(c)) {
    randomise(x, 1, c.coarse());
    randomise(w, 2, c.coarse());
    randomise(bias, 3);
    upload();
  }
  void upload() {
    for (MirroredTensor* t : {&x, &w, &y, &bias}) {
      t->upload();
    }
  }
  void check_around() const { ASSERT_TRUE(y.intact_around()) << c.text() << ": wrote beside the elements of y"; }
  KsmmOptions options() const {
    return {c.bias ? std::optional<ConstTensorView>(bias.device_view) : std::nullopt, c.activation};
  }
  kronecker::Problem problem() const { return problem_of(x.device_view, w.device_view, y.device_view, options()); }
  void run_public(Context& context) const { ksmm(x.device_view, w.device_view, y.device_view, context, options()); }
  /// The sum before the activation, and what it may be off by.
  std::pair<double, double> sum(Index n, Index f) const {
    const Sizes& s = c.sizes;
    const Index i = f / (s.b * s.d), j = f / s.d % s.b, l = f % s.d;
    double total = c.bias ? bias.get(f) : 0.0, magnitude = std::abs(total);
    for (Index k = 0; k < s.c; ++k) {
      const double term = w.get({i, j, k, l}) * x.get({n, (i * s.c + k) * s.d + l});
      total += term;
      magnitude += std::abs(term);
    }
    return {total, magnitude * c.slack()};
  }
  /// Compares some rows of the batch, the first and the last among them; and no gap of y was written.
  void check() {
    y.download();
    const Index features = y.view.size(1), step = std::max<Index>(1, c.batch / 40);
    int wrong = 0;
    const auto row = [&](Index n) {
      for (Index f = 0; f < features && wrong < 5; ++f) {
        const auto [before, slack] = sum(n, f);
        const double want = activated(c.activation, before);
        const double got = y.get({n, f});
        const double applied = c.tf32 != Tf32::no ? 3e-5 : 0.0;  // activations are as good as 16-bit results need
        const double most = (1.01 * unit_roundoff(c.dtype) + applied) * std::abs(want) + 2 * slack + 1e-7;
        if (!(std::abs(got - want) <= most)) {
          ++wrong;
          ADD_FAILURE() << c.text() << ": y[" << n << ", " << f << "] is " << got << ", not " << want;
        }
      }
    };
    for (Index n = 0; n < c.batch && wrong < 5; n += step) {
      row(n);
    }
    row(c.batch - 1);
    EXPECT_TRUE(c.pad == 0 || y.intact_around()) << c.text() << ": a gap was written";
  }
};

/// Weights of a case and room for their matrices, with lines longer than they need to be.
struct Packing {
  Case c;
  bool along_k, tf32;
  Index lines, entries, pitch;
  MirroredTensor w, to;

  Packing(const Case& which, bool k, bool rounded)
      : c(which),
        along_k(k),
        tf32(rounded),
        lines(k ? c.sizes.b : c.sizes.c),
        entries(k ? c.sizes.c : c.sizes.b),
        pitch((entries + 7) / 8 * 8 + 8),
        w(weights(c)),
        to(tensor(c.dtype, {c.sizes.a * c.sizes.d, lines, entries}, {lines * pitch, pitch, 1})) {
    randomise(w, 6);
    w.upload();
    to.upload();
  }
  /// A rounded number keeps eleven digits, and is as near as they allow.
  bool right(double got, double want) const {
    const bool cut = !tf32 || (std::bit_cast<std::uint32_t>(static_cast<float>(got)) & 0x1fffu) == 0;
    return cut && std::abs(got - want) <= (tf32 ? std::abs(want) / 2048 : 0.0);
  }
  void check(Context& context) {
    kronecker::pack(weights_of(w.device_view), c.sizes, c.dtype, {along_k, pitch, tf32}, to.device_view.data, context);
    to.download();
    ASSERT_TRUE(to.intact_around()) << c.text() << ": wrote behind a line";
    to.each([&](const std::vector<Index>& at) {
      const Index product = at[0], line = at[1], entry = at[2], i = product / c.sizes.d, l = product % c.sizes.d;
      const double got = to.get(at), want = along_k ? w.get({i, line, entry, l}) : w.get({i, entry, line, l});
      ASSERT_TRUE(right(got, want)) << c.text() << (along_k ? " along k" : " along j") << (tf32 ? " tf32" : "") << ": ["
                                    << product << "][" << line << "][" << entry << "] is " << got << ", not " << want;
    });
  }
};

struct Backward {
  Case c;
  MirroredTensor x, d_y, d_w, d_bias;

  explicit Backward(const Case& which)
      : c(which),
        x(matrix(c, c.sizes.a * c.sizes.c * c.sizes.d)),
        d_y(matrix(c, c.sizes.a * c.sizes.b * c.sizes.d)),
        d_w(weights(c)),
        d_bias(vector(c)) {
    randomise(x, 4, c.coarse());
    randomise(d_y, 5, c.coarse());
    for (MirroredTensor* t : {&x, &d_y, &d_w, &d_bias}) {
      t->upload();
    }
  }
  std::optional<TensorView> sums() const { return c.bias ? std::optional(d_bias.device_view) : std::nullopt; }
  kronecker::WeightProblem problem() const {
    return problem_of(x.device_view, d_y.device_view, d_w.device_view, sums());
  }
  void run_public(Context& context) const {
    ksmm_backward_weight(x.device_view, d_y.device_view, d_w.device_view, sums(), context);
  }
  void check() {
    d_w.download();
    d_bias.download();
    const Sizes& s = c.sizes;
    const Index all = s.a * s.b * s.c * s.d, step = std::max<Index>(1, all * c.batch / 20'000'000) | 1;
    int wrong = 0;
    const auto close = [&](double got, double want, double slack, const char* what, Index at) {
      const double most = 1.01 * unit_roundoff(c.dtype) * std::abs(want) + 2 * slack + 1e-7;
      if (!(std::abs(got - want) <= most) && ++wrong < 5) {
        ADD_FAILURE() << c.text() << ": " << what << "[" << at << "] is " << got << ", not " << want;
      }
    };
    const auto out = [&](Index n, Index f) { return d_y.get({n, f}); };
    for (Index e = 0; e < all; e += step) {
      const Index l = e % s.d, k = e / s.d % s.c, j = e / (s.d * s.c) % s.b, i = e / (s.d * s.c * s.b);
      double sum = 0, magnitude = 0;
      for (Index n = 0; n < c.batch; ++n) {
        const double term = out(n, (i * s.b + j) * s.d + l) * x.get({n, (i * s.c + k) * s.d + l});
        sum += term;
        magnitude += std::abs(term);
      }
      close(d_w.get({i, j, k, l}), sum, magnitude * c.slack(), "d_w", e);
    }
    for (Index f = 0; c.bias && f < s.a * s.b * s.d; ++f) {
      double sum = 0, magnitude = 0;
      for (Index n = 0; n < c.batch; ++n) {
        sum += out(n, f);
        magnitude += std::abs(out(n, f));
      }
      close(d_bias.get(f), sum, magnitude * 1e-6, "d_bias", f);  // which no factor is rounded for
    }
  }
};

TEST(Divisor, DividesExactly) {
  constexpr int kMost = std::numeric_limits<int>::max();
  for (const int by : {1, 2, 3, 5, 7, 12, 64, 196, 641, 65535, 65536, 65537, 1 << 30, kMost - 1, kMost}) {
    const Divisor divisor(by);
    for (const std::int64_t around : {std::int64_t{0}, std::int64_t{by}, kMost / by / 2 * std::int64_t{by},
                                      kMost / by * std::int64_t{by}, std::int64_t{kMost}}) {
      for (std::int64_t n = std::max<std::int64_t>(around - 2, 0); n <= std::min<std::int64_t>(around + 2, kMost);
           ++n) {
        ASSERT_EQ(divisor.quotient(static_cast<int>(n)), n / by) << n << " / " << by;
      }
    }
  }
}

class KroneckerCuda : public testing::Test {
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
  bool hopper() const { return cuda::kernel_arch(0) == "sm_90a"; }
  /// In the case's precision.
  Context& context_for(const Case& c) {
    context_.precision = c.tf32 == Tf32::no ? Precision::ieee : Precision::tf32;
    return context_;
  }
  /// Right, nothing written beside it, and the same in every run.
  void check_direct(const Case& c) {
    Forward f(c);
    ASSERT_TRUE(run_on(f.problem(), context_, {Family::direct})) << c.text();
    f.check();
    f.check_around();
    const std::vector<std::byte> first = f.y.storage();
    for (int n = 0; n < 20; ++n) {
      ASSERT_TRUE(run_on(f.problem(), context_, {Family::direct}));
      f.y.download();
      ASSERT_EQ(f.y.storage() == first, true) << c.text() << ": run " << n;
    }
  }
  std::unique_ptr<cuda::DeviceScope> scope_;
  Context context_;
};

/// Problems that the Hopper kernels take: every width, tails of all sizes, both layouts and orders of weights.
std::vector<Case> hopper_cases() {
  using enum Activation;
  std::vector<Case> cases;
  for (const DType dtype : {DType::f16, DType::bf16, DType::f32}) {
    const std::size_t first = cases.size();
    for (const bool last : {false, true}) {
      const Index d = last ? 3 : 1;
      cases.insert(cases.end(), {
                                    {{1, 64, 64, 1}, 128, last, dtype},
                                    {{2, 64, 64, d}, 264, last, dtype, none, true},
                                    {{3, 48, 40, d}, 136, last, dtype, relu, true},
                                    {{2, 96, 72, d}, 200, last, dtype, gelu, true, Order::transposed},
                                    {{1, 192, 200, d}, 1000, last, dtype, silu, true, Order::padded},
                                    {{2, 256, 128, d}, 8, last, dtype, none, true, Order::transposed},
                                    {{1, 520, 1032, d}, 392, last, dtype, gelu, false},
                                    {{5, 16, 264, d}, 72, last, dtype, silu, true, Order::plain, 24},
                                    {{1, 1024, 64, d}, 4096, last, dtype, none, true, Order::padded, 8},
                                });
    }
    cases.push_back({{1, 128, 128, 16}, 1024, true, dtype, gelu, true});
    cases.push_back({{2, 33, 17, 5}, 64, true, dtype, relu, true, Order::padded});
    cases.push_back({{1, 31, 77, 40}, 1608, true, dtype, none, true, Order::transposed, 8});
    cases.push_back({{1, 41, 33, 1}, 5, false, dtype, none, true, Order::plain, 7});  // lines are 40 and 48 apart
    cases.push_back({{4, 384, 96, 2}, 25088, true, dtype});
    cases.push_back({{6, 64, 64, 1}, 25089, false, dtype, none, true});
    cases.push_back({{1, 64, 64, 1}, 1, false, dtype, relu, true});
    if (dtype == DType::f32) {
      for (const bool last : {false, true}) {
        cases.push_back({{3, 36, 44, 1}, 132, last, dtype, relu, true, Order::transposed, 4});
        cases.push_back({{1, 300, 1500, 1}, 260, last, dtype, none, true, Order::transposed});
        cases.push_back({{2, 200, 96, 1}, 1000, last, dtype, none, true});
      }
      cases.push_back({{2, 20, 36, 7}, 1004, true, dtype, silu, true, Order::transposed, 12});
    }
    // Batch first with blocks so large that regrouping pays.
    if (dtype == DType::f32) {
      cases.push_back({{1, 256, 256, 16}, 3000, false, dtype, gelu, true});
      cases.push_back({{2, 768, 512, 4}, 1500, false, dtype, none, true, Order::transposed});
      cases.push_back({{1, 512, 520, 2}, 4001, false, dtype, relu, true, Order::plain, 8});
    } else {
      cases.push_back({{1, 640, 640, 16}, 801, false, dtype, gelu, true, Order::plain, 8});
    }
    cases.push_back({{1, 256, 256, 24}, 2000, false, dtype, silu, true, Order::padded});
    if (dtype == DType::f32) {
      std::for_each(cases.begin() + static_cast<Index>(first), cases.end(), [](Case& c) { c.tf32 = Tf32::exact; });
      cases.push_back({{2, 96, 200, 1}, 520, false, dtype, none, true, Order::plain, 0, Tf32::rounding});
      cases.push_back({{2, 96, 200, 3}, 520, true, dtype, none, true, Order::plain, 0, Tf32::rounding});
    }
  }
  return cases;
}

TEST_F(KroneckerCuda, HopperProducts) {
  if (!hopper()) {
    GTEST_SKIP() << "not Hopper";
  }
  for (const Case& c : hopper_cases()) {
    Forward f(c);
    const Index lines = (c.last ? c.batch : c.sizes.b) * static_cast<Index>(size_of(c.dtype));
    const bool whole = c.last || lines % 16 == 0;  // of y
    ASSERT_EQ(run_on(f.problem(), context_for(c), kHopper), whole) << c.text();
    if (whole) {
      f.check();
    }
  }
}

/// Batch last with lines that begin anywhere, which threads store and, where the copy engine cannot take a block's
/// neighbouring lines as one, fetch: every width, and every place in 16 bytes.
TEST_F(KroneckerCuda, LinesThatBeginAnywhere) {
  if (!hopper()) {
    GTEST_SKIP() << "not Hopper";
  }
  using enum Activation;
  std::vector<Case> cases;
  for (const DType dtype : {DType::f16, DType::bf16, DType::f32}) {
    const Tf32 tf32 = dtype == DType::f32 ? Tf32::exact : Tf32::no;
    cases.insert(cases.end(), {
                                  {{1, 64, 64, 1}, 1, true, dtype, none, true, Order::plain, 0, tf32},
                                  {{2, 64, 64, 3}, 33, true, dtype, none, true, Order::plain, 0, tf32},
                                  {{3, 48, 40, 1}, 129, true, dtype, relu, true, Order::transposed, 0, tf32},
                                  {{2, 33, 17, 5}, 67, true, dtype, gelu, true, Order::padded, 0, tf32},
                                  {{2, 96, 72, 4}, 190, true, dtype, silu, true, Order::plain, 0, tf32},
                                  {{1, 264, 136, 2}, 401, true, dtype, gelu, true, Order::plain, 0, tf32},
                                  {{2, 72, 64, 16}, 331, true, dtype, silu, false, Order::plain, 0, tf32},
                                  {{1, 136, 520, 1}, 197, true, dtype, none, true, Order::plain, 4, tf32},
                                  {{2, 130, 100, 3}, 385, true, dtype, relu, true, Order::plain, 3, tf32},
                                  {{5, 16, 264, 2}, 71, true, dtype, none, true, Order::transposed, 1, tf32},
                                  {{1, 64, 66, 4}, 25089, true, dtype, none, true, Order::plain, 0, tf32},
                                  {{2, 72, 136, 8}, 333, true, dtype, gelu, true, Order::transposed, 2, tf32},
                                  {{1, 264, 200, 4}, 198, true, dtype, none, true, Order::plain, 4, tf32},
                                  {{3, 64, 40, 16}, 7, true, dtype, relu, true, Order::padded, 0, tf32},
                                  {{2, 72, 64, 4}, 25090, true, dtype, none, true, Order::plain, 0, tf32},
                              });
  }
  for (const Case& c : cases) {
    Forward f(c);
    const auto check = [&](int width) {
      f.y.poison();
      f.y.upload();
      if (!kronecker::cuda::run(f.problem(), context_for(c), {Family::hopper, width})) {
        return false;
      }
      f.check();
      f.check_around();
      const std::vector<std::byte> first = f.y.storage();
      for (int n = 0; n < 10; ++n) {
        kronecker::cuda::run(f.problem(), context_, {Family::hopper, width});
        f.y.download();
        EXPECT_EQ(f.y.storage() == first, true) << c.text() << " width " << width << ": run " << n;
      }
      return true;
    };
    for (const int width : kronecker::hopper::widths()) {
      ASSERT_TRUE(check(width)) << c.text() << " width " << width;
    }
  }
}

/// So many tiles that CTAs take the next ones instead of turns; batch last two at once, of which the last may be alone.
TEST_F(KroneckerCuda, ManyTiles) {
  if (!hopper()) {
    GTEST_SKIP() << "not Hopper";
  }
  for (const bool last : {false, true}) {
    for (const Case& c : {Case{{1024, 16, 16, 1}, 1672, last, DType::f16, Activation::relu, true},
                          {{1025, 16, 16, 1}, 1640, last, DType::f16, Activation::none, true},
                          {{1024, 16, 136, 1}, 1672, last, DType::bf16, Activation::none, true},
                          {{64, 16, 24, 16}, 1673, true, DType::f16, Activation::none, true}}) {
      Forward f(c);
      ASSERT_TRUE(run_on(f.problem(), context_for(c), kHopper)) << c.text();
      f.check();
    }
  }
}

/// tf32, batch first, d = 2 and 4.
std::vector<Case> interleaved_cases() {
  using enum Activation;
  std::vector<Case> cases = {
      {{1, 64, 64, 4}, 128, false},
      {{1, 64, 64, 2}, 1, false, DType::f32, none, true},
      {{3, 36, 44, 4}, 133, false, DType::f32, relu, true, Order::transposed, 4},
      {{2, 100, 20, 2}, 77, false, DType::f32, gelu, true, Order::padded},
      {{1, 302, 18, 2}, 1000, false, DType::f32, silu, true, Order::plain, 8},
      {{1, 5, 60, 4}, 9, false, DType::f32, none, true, Order::padded},
      {{2, 768, 192, 2}, 5000, false, DType::f32, silu, true},
      {{1, 40, 1033, 4}, 300, false, DType::f32, none, true, Order::transposed},
      {{5, 130, 68, 4}, 25089, false, DType::f32, none, true},
      {{1, 96, 200, 4}, 520, false, DType::f32, none, true},
  };
  for (Case& c : cases) {
    c.dtype = DType::f32;
    c.tf32 = Tf32::exact;
  }
  cases.back().tf32 = Tf32::rounding;
  return cases;
}

TEST_F(KroneckerCuda, InterleavedProducts) {
  if (!hopper()) {
    GTEST_SKIP() << "not Hopper";
  }
  for (const Case& c : interleaved_cases()) {
    Forward f(c);
    ASSERT_TRUE(run_on(f.problem(), context_for(c), {Family::interleaved})) << c.text();
    f.check();
  }
}

/// Batch first, a block's products as one dense matrix: every type and width, both orders of weights, tails.
std::vector<Case> dense_cases() {
  using enum Activation;
  std::vector<Case> cases;
  for (const DType dtype : {DType::f16, DType::bf16, DType::f32}) {
    for (const Case& c : {Case{{1, 192, 48, 2}, 1000, false, dtype, none, true},
                          {{1, 48, 192, 2}, 333, false, dtype, gelu, true, Order::transposed},
                          {{3, 36, 20, 4}, 129, false, dtype, relu, true, Order::padded, 8},
                          {{2, 24, 40, 3}, 77, false, dtype, silu, true, Order::transposed},
                          {{1, 13, 70, 8}, 300, false, dtype, none, false, Order::plain, 16},
                          {{2, 300, 24, 2}, 1, false, dtype, none, true}}) {
      cases.push_back(c);
      cases.back().tf32 = dtype == DType::f32 ? Tf32::exact : Tf32::no;
    }
  }
  return cases;
}

TEST_F(KroneckerCuda, DenseBlocks) {
  if (!hopper()) {
    GTEST_SKIP() << "not Hopper";
  }
  for (const Case& c : dense_cases()) {
    for (const int width : kronecker::hopper::widths()) {
      Forward f(c);
      ASSERT_TRUE(kronecker::cuda::run(f.problem(), context_for(c), {Family::dense, width}))
          << c.text() << " width " << width;
      f.check();
    }
  }
}

/// What an infinity or NaN of one δ would spoil through the zeros between is added up again.
TEST_F(KroneckerCuda, DenseBlocksKeepInfinitiesApart) {
  if (!hopper()) {
    GTEST_SKIP() << "not Hopper";
  }
  for (const Case& c : dense_cases()) {
    Forward f(c);
    const Index n = c.batch * 2 / 3, l = c.sizes.d - 1;  // of the last k of the last block
    f.x.set({n, f.x.size(1) - 1}, std::numeric_limits<double>::infinity());
    f.upload();
    ASSERT_TRUE(run_on(f.problem(), context_for(c), {Family::dense})) << c.text();
    f.y.download();
    const Index features = f.y.view.size(1), block = c.sizes.b * c.sizes.d;
    for (Index row = 0; row < c.batch; ++row) {
      for (Index feature = 0; feature < features; ++feature) {
        const bool hit = row == n && feature >= features - block && feature % c.sizes.d == l;
        const double got = f.y.get({row, feature});
        if (!hit || c.activation == Activation::none) {
          ASSERT_EQ(!std::isfinite(got), hit) << c.text() << ": y[" << row << ", " << feature << "] is " << got;
        }
        if (row == n && !hit) {
          const auto [before, slack] = f.sum(row, feature);
          const double want = activated(c.activation, before);
          ASSERT_NEAR(got, want, (1.01 * unit_roundoff(c.dtype) + 3e-5) * std::abs(want) + 2 * slack + 1e-6)
              << c.text();
        }
      }
    }
  }
}

TEST_F(KroneckerCuda, HopperWeightGradients) {
  if (!hopper()) {
    GTEST_SKIP() << "not Hopper";
  }
  for (Case c : hopper_cases()) {
    c.batch = c.batch > 5000 ? 5000 + (c.last ? 8 : 1) : c.batch;
    Backward b(c);
    ASSERT_TRUE(run_on(b.problem(), context_for(c), kHopper)) << c.text();
    b.check();
  }
}

TEST_F(KroneckerCuda, WeightGradientsOfPartsOfTheBatch) {
  if (!hopper()) {
    GTEST_SKIP() << "not Hopper";
  }
  std::vector<Case> cases = {{{2, 96, 136, 16}, 1000, false, DType::f16, Activation::none, true},
                             {{1, 128, 64, 64}, 333, false, DType::bf16, Activation::none, true, Order::padded, 8},
                             {{1, 200, 96, 2}, 700, false, DType::f16}};
  for (const Index d : {2, 4, 16}) {
    cases.push_back({{2, 136, 200, d}, 1000, false, DType::f32, Activation::none, true});
    cases.back().tf32 = Tf32::exact;
  }
  for (const Case& c : cases) {
    for (const Index rows : {64, 192, 448}) {
      Backward b(c);
      ASSERT_TRUE(kronecker::cuda::run(b.problem(), context_for(c), {Family::regroup, static_cast<int>(rows)}))
          << c.text();
      b.check();
    }
  }
}

TEST_F(KroneckerCuda, DenseWeightGradients) {
  if (!hopper()) {
    GTEST_SKIP() << "not Hopper";
  }
  std::vector<Case> cases{{{1, 192, 48, 2}, 9000, false, DType::f16, Activation::none, true},  // many parts
                          {{2, 48, 40, 3}, 700, false, DType::f16, Activation::none, true},
                          {{3, 40, 24, 5}, 333, false, DType::bf16, Activation::none, true, Order::padded, 8},
                          {{1, 64, 72, 6}, 500, false, DType::f16},
                          {{1, 24, 40, 7}, 65, false, DType::bf16, Activation::none, true},
                          {{1, 40, 24, 4}, 500, false, DType::f16, Activation::none, true},
                          {{1, 40, 24, 8}, 500, false, DType::bf16, Activation::none, true}};
  for (const Index d : {2, 3, 4, 5, 8}) {
    cases.push_back({{2, 40, 24, d}, 333, false, DType::f32, Activation::none, true});
    cases.back().tf32 = Tf32::exact;
  }
  for (const Case& c : cases) {
    Backward b(c);
    ASSERT_TRUE(run_on(b.problem(), context_for(c), {Family::dense})) << c.text();
    b.check();
  }
}

TEST_F(KroneckerCuda, InterleavedWeightGradients) {
  if (!hopper()) {
    GTEST_SKIP() << "not Hopper";
  }
  for (Case c : interleaved_cases()) {
    c.batch = std::min<Index>(c.batch, 5000);
    Backward b(c);
    ASSERT_TRUE(run_on(b.problem(), context_for(c), {Family::interleaved})) << c.text();
    b.check();
  }
}

TEST_F(KroneckerCuda, HopperLeavesWhatItCannotCopy) {
  if (!hopper()) {
    GTEST_SKIP() << "not Hopper";
  }
  for (const Case& c :
       std::initializer_list<Case>{{{2, 64, 60, 1}, 128, false},              // blocks that are no multiple of 16 bytes
                                   {{1, 64, 64, 16}, 128, false},             // batch first, many δ
                                   {{1, 64, 64, 1}, 128, false, DType::f32},  // ieee
                                   {{1, 64, 64, 1}, 128, true, DType::f32}}) {
    context_for(c);
    EXPECT_FALSE(run_on(Forward(c).problem(), context_, {Family::hopper, Family::dense, Family::interleaved}))
        << c.text();
    EXPECT_FALSE(run_on(Backward(c).problem(), context_, {Family::hopper, Family::dense, Family::interleaved}))
        << c.text();
  }
  EXPECT_FALSE(run_on(Backward({{1, 64, 64, 1}, 129, true}).problem(), context_,
                      {Family::hopper, Family::dense, Family::interleaved}));  // odd lines
}

TEST_F(KroneckerCuda, EmptyBatchHasZeroGradients) {
  if (!hopper()) {
    GTEST_SKIP() << "not Hopper";
  }
  for (const DType dtype : {DType::f16, DType::f32}) {
    const Case c{{2, 64, 48, 3}, 8, true, dtype, Activation::none, true, Order::plain, 0, Tf32::exact};
    Backward b(c);
    kronecker::WeightProblem problem = b.problem();
    problem.batch = 0;
    ASSERT_TRUE(run_on(problem, context_for(c), kHopper));
    for (MirroredTensor* t : {&b.d_w, &b.d_bias}) {
      t->download();
      EXPECT_TRUE(std::ranges::all_of(t->values(), [](double x) { return x == 0 && !std::signbit(x); }));
    }
  }
}

/// Every axis along which a few rows' weights are read, in vectors of each length, with tails of all kinds.
std::vector<Case> few_cases() {
  using enum Activation;
  std::vector<Case> cases;
  for (const DType dtype : {DType::f16, DType::bf16, DType::f32}) {
    for (const bool last : {false, true}) {
      for (const Index batch : {1, 2, 3, 7, 8, 9, 16, 31, 32}) {
        for (const Order order : {Order::plain, Order::transposed, Order::padded, Order::matrices}) {
          cases.push_back({{2, 33, 20, 4}, batch, last, dtype, relu, true, order, 4});
          cases.push_back({{1, 9, 65, 7}, batch, last, dtype, gelu, true, order, 3});
          cases.push_back({{3, 20, 36, 1}, batch, last, dtype, silu, true, order});
          cases.push_back({{1, 24, 40, 6}, batch, last, dtype, none, false, order, 1});
        }
        cases.push_back({{1, 7, 3000, 2}, batch, last, dtype, none, true});  // x in several pieces
        cases.push_back({{5, 1, 1, 3}, batch, last, dtype, relu, true});
        cases.push_back({{1, 1, 400, 1}, batch, last, dtype, none, true, Order::transposed});
        cases.push_back({{2, 260, 1, 1}, batch, last, dtype, none, false});
      }
      for (const Index batch : {1, 9, 31}) {  // with 2, 4 and 8 neighbouring l to a lane
        cases.push_back({{1, 64, 64, 64}, batch, last, dtype, none, true});
        cases.push_back({{10, 20, 40, 16}, batch, last, dtype, relu, false, Order::plain, 1});
        cases.push_back({{3, 130, 100, 24}, batch, last, dtype, none, true, Order::transposed, 4});
        cases.push_back({{1, 40, 24, 200}, batch, last, dtype, gelu, true, Order::transposed, 8});
        cases.push_back({{24, 64, 33, 64}, std::min<Index>(batch, 17), last, dtype, silu, true});
        cases.push_back({{128, 64, 16, 16}, batch, last, dtype, none, true, Order::transposed, 8});
      }
      cases.push_back({{16, 256, 256, 4}, 5, last, dtype, none, true});
      cases.push_back({{1, 768, 192, 2}, 16, last, dtype, gelu, true, Order::transposed});
    }
  }
  return cases;
}

/// On the tensor cores: clusters of several sizes that share the depth, the last with less of it; x in several pieces;
/// more rows than sixteen, the last group of them with eight or fewer.
std::vector<Case> few_tile_cases() {
  using enum Activation;
  std::vector<Case> cases;
  for (const DType dtype : {DType::f16, DType::bf16}) {
    for (const bool last : {false, true}) {
      for (const Index batch : {1, 5, 8, 16, 20}) {
        cases.push_back({{1, 96, 192, 2}, batch, last, dtype, gelu, true});
        cases.push_back({{1, 40, 1000, 4}, batch, last, dtype, none, true, Order::plain, 2});
        cases.push_back({{1, 512, 512, 4}, batch, last, dtype, none, true});
        cases.push_back({{3, 48, 700, 4}, batch, last, dtype, silu, true, Order::transposed, 1});
        cases.push_back({{1, 33, 330, 16}, batch, last, dtype, relu, false});
        cases.push_back({{1, 20, 5000, 6}, batch, last, dtype, none, true, Order::padded});
      }
      for (const Index batch : {33, 40, 47, 100, 196, 256}) {
        cases.push_back({{1, 192, 48, 2}, batch, last, dtype, none, true});
        cases.push_back({{2, 64, 96, 4}, batch, last, dtype, relu, true, Order::plain, 4});
        cases.push_back({{1, 100, 130, 16}, batch, last, dtype, gelu, true});
        cases.push_back({{3, 40, 24, 10}, batch, last, dtype, none, false, Order::transposed, 1});
      }
    }
  }
  return cases;
}

TEST_F(KroneckerCuda, FewRows) {
  for (const Case& c : few_cases()) {
    Forward f(c);
    ASSERT_TRUE(run_on(f.problem(), context_, {Family::few})) << c.text();
    f.check();
    f.check_around();
  }
}

TEST_F(KroneckerCuda, FewRowsInTiles) {
  for (const Case& c : few_tile_cases()) {
    Forward f(c);
    ASSERT_TRUE(run_on(f.problem(), context_, {Family::few})) << c.text();
    f.check();
    f.check_around();
  }
}

/// Straight into fragments: every number of l, x and y in either layout, with lines that allow no vectors, and CTAs
/// with and without warps that have l or outputs of their own, in one turn and in several, some with nothing to do.
TEST_F(KroneckerCuda, FewRowsDirectly) {
  using enum Activation;
  std::vector<Case> cases;
  for (const DType dtype : {DType::f16, DType::bf16}) {
    for (const bool last : {false, true}) {
      cases.push_back({{8, 200, 512, 4}, 70, last, dtype, none, true});
      for (const Index batch : {1, 2, 7, 8, 16, 30, 33, 196, 256}) {
        cases.push_back({{2, 70, 72, 1}, batch, last, dtype, gelu, true});
        cases.push_back({{1, 192, 48, 2}, batch, last, dtype, none, true});
        cases.push_back({{1, 48, 200, 2}, batch, last, dtype, relu, false});
        cases.push_back({{2, 33, 100, 2}, batch, last, dtype, silu, true, Order::plain, 8});
        cases.push_back({{1, 40, 516, 4}, batch, last, dtype, relu, true, Order::plain, 1});
        cases.push_back({{1, 60, 140, 4}, batch, last, dtype, none, true, Order::plain, 8});
        cases.push_back({{3, 20, 36, 24}, batch, last, dtype, none, false});
        cases.push_back({{1, 50, 516, 4}, batch, last, dtype, silu, true});
        cases.push_back({{1, 80, 72, 32}, batch, last, dtype, gelu, true});
        cases.push_back({{1, 17, 132, 8}, batch, last, dtype, none, true, Order::plain, 2});
      }
    }
  }
  for (const Case& c : cases) {
    Forward f(c);
    ASSERT_TRUE(run_on(f.problem(), context_, {Family::direct})) << c.text();
    f.check();
    f.check_around();
  }
}

/// As many tiles as fill an H200 once, so that wgmma multiplies them: one group of rows and several, the last of them
/// shorter, and blocks of every depth. Then CTAs that have a whole depth, rows of eight and others.
TEST_F(KroneckerCuda, DeepBlocks) {
  using enum Activation;
  for (const Case& c :
       std::initializer_list<Case>{{{1, 1024, 1024, 4}, 196, false, DType::f16},
                                   {{2, 512, 512, 4}, 170, false, DType::bf16, gelu, true},
                                   {{8, 256, 512, 4}, 57, false, DType::f16, relu, true, Order::plain, 8},
                                   {{13, 64, 768, 4}, 255, false, DType::bf16, silu, true},
                                   {{16, 256, 512, 4}, 33, false, DType::f16, none, true},
                                   {{1, 512, 512, 4}, 196, false, DType::f16, none, true},
                                   {{1, 512, 512, 4}, 33, false, DType::bf16, gelu, true, Order::plain, 8},
                                   {{2, 64, 512, 4}, 256, false, DType::f16},
                                   {{3, 192, 512, 4}, 121, false, DType::bf16, silu, true}}) {
    ASSERT_NO_FATAL_FAILURE(check_direct(c));
  }
}

/// d = 2 and so many rows that an H200 is filled by tiles, whose x goes through shared memory: one, two and four warps
/// with outputs of their own, rows, outputs and depths that are no multiples of theirs, and the deepest.
TEST_F(KroneckerCuda, TilesOfSomeRows) {
  using enum Activation;
  for (const Case& c :
       std::initializer_list<Case>{{{1, 768, 192, 2}, 196, false, DType::f16},
                                   {{1, 768, 192, 2}, 256, false, DType::bf16, gelu, true},
                                   {{1, 384, 384, 2}, 255, false, DType::f16, relu, true},
                                   {{2, 300, 196, 2}, 200, false, DType::bf16, silu, true},
                                   {{3, 128, 256, 2}, 250, false, DType::f16, none, true, Order::plain, 8},
                                   {{1, 520, 324, 2}, 229, false, DType::f16, none, true},
                                   {{1, 384, 768, 2}, 196, false, DType::bf16}}) {
    ASSERT_NO_FATAL_FAILURE(check_direct(c));
  }
}

/// Batch last, d = 1, an even number of rows but none that the copy engine takes: a block of x is one piece of memory.
/// Outputs that fill a CTA, several, or a part of one.
TEST_F(KroneckerCuda, BlocksInOnePiece) {
  using enum Activation;
  for (const Case& c : std::initializer_list<Case>{{{128, 64, 64, 1}, 196, true, DType::f16},
                                                   {{64, 80, 48, 1}, 250, true, DType::bf16, gelu, true},
                                                   {{64, 144, 64, 1}, 222, true, DType::f16, relu, true},
                                                   {{512, 64, 64, 1}, 34, true, DType::bf16, silu, true}}) {
    ASSERT_NO_FATAL_FAILURE(check_direct(c));
  }
}

TEST_F(KroneckerCuda, FewRowsDirectlyLeaveTheRest) {
  for (const Case& c :
       std::initializer_list<Case>{{{2, 8, 8, 4}, 257, false},
                                   {{2, 8, 8, 4}, 4, false, DType::f32},
                                   {{2, 8, 8, 6}, 4, false},
                                   {{2, 8, 9, 4}, 4, false},
                                   {{2, 8, 8, 4}, 4, false, DType::f16, Activation::none, false, Order::transposed}}) {
    EXPECT_FALSE(run_on(Forward(c).problem(), context_, {Family::direct})) << c.text();
  }
}

/// Rows that are not there, or are not numbers, are multiplied beside those that are.
TEST_F(KroneckerCuda, FewRowsKeepApart) {
  for (const bool last : {false, true}) {
    for (const Index batch : {3, 8, 13, 40, 196}) {
      const bool tiles = batch > 40;
      const Case c{
          tiles ? Sizes{1, 768, 192, 2} : Sizes{1, 48, 500, 4}, batch, last, DType::f16, Activation::none, true};
      Forward f(c);
      const Index n = batch - 2;
      for (Index feature = 0; feature < f.x.view.size(1); ++feature) {
        f.x.set({n, feature}, std::numeric_limits<double>::quiet_NaN());
      }
      f.upload();
      for (const bool directly : {tiles, true}) {
        ASSERT_TRUE(directly ? run_on(f.problem(), context_, {Family::direct})
                             : run_on(f.problem(), context_, {Family::few}))
            << c.text();
        f.y.download();
        for (Index at = 0, features = f.y.view.size(1); at < batch * features; ++at) {
          const Index row = at / features, feature = at % features;
          const double got = f.y.get({row, feature});
          ASSERT_EQ(std::isnan(got), row == n) << c.text() << ": y[" << row << ", " << feature << "]";
        }
      }
    }
  }
}

TEST_F(KroneckerCuda, FewRowsLeaveTheRest) {
  for (const Case& c : std::initializer_list<Case>{{{2, 8, 8, 4}, 257, false},
                                                   {{2, 8, 8, 4}, 33, false, DType::f32},
                                                   {{2, 8, 8, 1}, 33, false},
                                                   {{2, 8, 8, 4}, 4, false, DType::f64}}) {
    EXPECT_FALSE(run_on(Forward(c).problem(), context_, {Family::few})) << c.text();
  }
}

TEST_F(KroneckerCuda, FewRowsRepeatThemselves) {
  for (const bool last : {false, true}) {
    for (const Sizes& sizes : {Sizes{1, 96, 384, 16}, Sizes{1, 256, 512, 4}, Sizes{1, 192, 96, 2}}) {
      const Case c{sizes, 13, last, DType::bf16, Activation::gelu, true};
      Forward f(c);
      std::vector<std::byte> first;
      for (int n = 0; n < 200; ++n) {
        const bool directly = n >= 100;
        ASSERT_TRUE(directly ? run_on(f.problem(), context_, {Family::direct})
                             : run_on(f.problem(), context_, {Family::few}));
        f.y.download();
        first = n % 100 == 0 ? f.y.storage() : first;
        ASSERT_EQ(f.y.storage() == first, true) << c.text() << ": run " << n;
      }
    }
  }
}

/// Every way weights can lie, with and without what lets them be packed in registers.
TEST_F(KroneckerCuda, PackedWeights) {
  std::vector<Case> cases;
  for (const DType dtype : {DType::f16, DType::f32}) {
    for (const Order order : {Order::plain, Order::transposed, Order::padded, Order::matrices}) {
      for (const Index d : {1, 2, 3, 4, 8, 16, 20, 24, 64}) {
        cases.push_back({{3, 24, 40, d}, 1, false, dtype, Activation::none, false, order});
        cases.push_back({{2, 33, 16, d}, 1, false, dtype, Activation::none, false, order});
        cases.push_back({{1, 8, 1, d}, 1, false, dtype, Activation::none, false, order});
      }
    }
  }
  for (const Case& c : cases) {
    for (const bool along_k : {false, true}) {
      for (const bool tf32 : {false, true}) {
        if (!tf32 || c.dtype == DType::f32) {
          Packing(c, along_k, tf32).check(context_);
        }
      }
    }
  }
}

/// Through the public function, as it chooses: everything above, and what other ways take.
std::vector<Case> all_cases() {
  using enum Activation;
  std::vector<Case> cases = hopper_cases();
  std::ranges::copy(interleaved_cases(), std::back_inserter(cases));
  cases.push_back({{1, 4096, 512, 8}, 16, true, DType::f16, none, true});  // too many weights for the way of few rows
  for (const DType dtype : {DType::f16, DType::bf16, DType::f32}) {
    for (const bool last : {false, true}) {
      for (const Index batch : {34, 35, 36, 130, 132, 196, 200, 333}) {  // lines at multiples of 2, 4, 8 and 16 bytes
        cases.push_back({{2, 48, 80, 4}, batch, last, dtype, relu, true, Order::transposed});
        cases.push_back({{1, 132, 96, 16}, batch, last, dtype, gelu, true});
      }
      for (const Index batch : {1, 7, 16, 32, 33, 129, 196, 1024}) {
        cases.push_back({{2, 48, 64, 4}, batch, last, dtype, relu, true});
        cases.push_back({{1, 64, 64, 16}, batch, last, dtype, none, true, Order::transposed});
        cases.push_back({{1, 33, 65, 7}, batch, last, dtype, gelu, true, Order::padded, 3});
        cases.push_back({{8, 2, 2, 8}, batch, last, dtype, silu, false});
        cases.push_back({{3, 17, 5, 1}, batch, last, dtype, none, true});
      }
    }
  }
  return cases;
}

TEST_F(KroneckerCuda, PublicProducts) {
  for (const Case& c : all_cases()) {
    Forward f(c);
    f.run_public(context_for(c));
    f.check();
  }
}

TEST_F(KroneckerCuda, PublicWeightGradients) {
  for (Case c : all_cases()) {
    c.batch = std::min<Index>(c.batch, 5000);
    Backward b(c);
    b.run_public(context_for(c));
    b.check();
  }
}

/// Problems that the exact fp32 kernels take: every tile, tails of rows, columns and depth, lines that 16-byte copies
/// cannot follow, every number of neighbouring δ.
std::vector<Case> ieee_cases() {
  using enum Activation;
  constexpr DType f32 = DType::f32;
  std::vector<Case> cases;
  for (const bool last : {false, true}) {
    for (const Index d : {1, 2, 4, 8, 12, 24}) {
      cases.insert(cases.end(), {{{1, 128, 64, d}, 256, last, f32},
                                 {{2, 64, 66, d}, 300, last, f32, none, true, Order::transposed},
                                 {{2, 48, 40, d}, 517, last, f32, relu, true},
                                 {{3, 96, 34, d}, 129, last, f32, gelu, true, Order::padded},
                                 {{1, 130, 18, d}, 260, last, f32, none, true, Order::plain, 4},
                                 {{2, 192, 192, d}, 100, last, f32, silu, true, Order::padded, 8},
                                 {{1, 200, 258, d}, 1, last, f32, none, true}});
    }
    cases.push_back({{1, 256, 256, 1}, 300, last, f32});  // the largest tiles of the gradient
    cases.push_back({{1, 256, 192, 1}, 300, last, f32});
    for (const Index d : {Index{1}, last ? Index{5} : Index{1}}) {
      cases.insert(cases.end(), {{{3, 65, 33, d}, 131, last, f32, none, true},
                                 {{1, 7, 5, d}, 1000, last, f32, gelu, true, Order::padded, 3},
                                 {{2, 99, 1, d}, 77, last, f32, none, false, Order::transposed, 1},
                                 {{1, 1, 50, d}, 1030, last, f32, relu, true, Order::plain, 6}});
    }
  }
  return cases;
}

TEST_F(KroneckerCuda, IeeeProducts) {
  for (const Case& c : ieee_cases()) {
    Forward f(c);
    ASSERT_TRUE(run_on(f.problem(), context_, {Family::ieee})) << c.text();
    f.check();
  }
}

TEST_F(KroneckerCuda, IeeeRegrouped) {
  for (const Case& c : {Case{{1, 640, 512, 8}, 3001, false, DType::f32, Activation::gelu, true, Order::transposed, 8},
                        {{2, 520, 640, 24}, 1601, false, DType::f32, Activation::none, true},
                        {{1, 1024, 1032, 8}, 9000, false, DType::f32, Activation::none, true}}) {  // in two parts
    Forward f(c);
    ASSERT_TRUE(run_on(f.problem(), context_, {Family::ieee_regroup})) << c.text();
    f.check();
  }
}

TEST_F(KroneckerCuda, IeeeWeightGradients) {
  for (const Case& c : ieee_cases()) {
    Backward b(c);
    ASSERT_TRUE(run_on(b.problem(), context_, {Family::ieee})) << c.text();
    b.check();
  }
}

TEST_F(KroneckerCuda, IeeeGradientsInPiecesRepeat) {
  for (const Case& c : std::initializer_list<Case>{{{1, 64, 48, 1}, 9001, false, DType::f32},
                                                   {{1, 64, 48, 1}, 9001, true, DType::f32},
                                                   {{1, 48, 64, 8}, 9001, false, DType::f32}}) {
    Backward b(c);
    std::vector<std::byte> first;
    for (int n = 0; n < 20; ++n) {
      ASSERT_TRUE(run_on(b.problem(), context_, {Family::ieee}));
      b.d_w.download();
      first = n == 0 ? b.d_w.storage() : first;
      ASSERT_TRUE(b.d_w.storage() == first) << c.text() << ": run " << n;
    }
    b.check();
  }
}

TEST_F(KroneckerCuda, IeeeLeavesWhatItCannotCopy) {
  for (const Case& c : std::initializer_list<Case>{
           {{1, 64, 64, 3}, 128, false, DType::f32},  // δ in no run of 16 bytes
           {{1, 64, 64, 4}, 128, false, DType::f16},  // not fp32
           {{1, 64, 63, 2}, 128, false, DType::f32},  // odd blocks of two δ
           // Lines that begin between multiples of 16 bytes.
           {{1, 64, 64, 4}, 128, false, DType::f32, Activation::none, false, Order::plain, 2}}) {
    EXPECT_FALSE(run_on(Forward(c).problem(), context_, {Family::ieee})) << c.text();
    EXPECT_FALSE(run_on(Backward(c).problem(), context_, {Family::ieee})) << c.text();
  }
  context_.precision = Precision::tf32;
  const Case c{{1, 64, 64, 4}, 128, false, DType::f32};
  EXPECT_FALSE(run_on(Forward(c).problem(), context_, {Family::ieee}));
  EXPECT_FALSE(run_on(Backward(c).problem(), context_, {Family::ieee}));
}

TEST_F(KroneckerCuda, NanStaysWithItsOwn) {
  std::vector<Case> cases = {{{2, 64, 72, 3}, 200, true},
                             {{2, 64, 72, 1}, 200, false},
                             {{2, 64, 72, 3}, 11, true},
                             {{2, 64, 72, 4}, 11, false}};
  for (const auto& [d, last] : {std::pair{3, true}, {1, false}, {2, false}, {4, false}}) {
    cases.push_back({{2, 64, 72, d}, 200, last, DType::f32});
    cases.back().tf32 = Tf32::exact;
  }
  for (const auto& [depth, d] : {std::pair{72, 1}, {71, 1}, {74, 2}, {71, 4}, {73, 8}}) {
    cases.push_back({{2, 64, depth, d}, 200, false, DType::f32});
  }
  cases.push_back({{2, 64, 71, 3}, 200, true, DType::f32});
  for (const Case& c : cases) {
    Forward f(c);
    const Index n = c.batch * 2 / 3, k = 70, i = 0, l = c.sizes.d - 1;  // in the last, partial step of the depth
    f.x.set({n, (i * c.sizes.c + k) * c.sizes.d + l}, std::numeric_limits<double>::quiet_NaN());
    f.upload();
    if (c.batch < 100 || !hopper() || !run_on(f.problem(), context_for(c), kHopper)) {
      f.run_public(context_for(c));
    }
    f.y.download();
    for (Index at = 0, features = f.y.view.size(1); at < c.batch * features; ++at) {
      const Index row = at / features, feature = at % features;
      const bool hit = row == n && feature / (c.sizes.b * c.sizes.d) == i && feature % c.sizes.d == l;
      const double got = f.y.get({row, feature});
      ASSERT_EQ(std::isnan(got), hit) << c.text() << ": y[" << row << ", " << feature << "]";
    }
  }
}

TEST_F(KroneckerCuda, RepeatsItself) {
  if (!hopper()) {
    GTEST_SKIP() << "not Hopper";
  }
  // Several tiles to a CTA, with one and with three pieces to store, so that tiles meet in the buffers.
  for (const auto& [b, dtype] : {std::pair{64, DType::bf16}, {192, DType::bf16}, {64, DType::f32}, {160, DType::f32}}) {
    const Case c{{1, b, 128, 5},
                 20000,
                 true,
                 dtype,
                 Activation::gelu,
                 true,
                 Order::plain,
                 0,
                 dtype == DType::f32 ? Tf32::rounding : Tf32::no};
    Forward forward(c);
    Backward backward(c);
    std::vector<std::byte> first[3];
    for (int n = 0; n < (dtype == DType::f32 ? 30 : 100); ++n) {
      ASSERT_TRUE(run_on(forward.problem(), context_for(c), kHopper));
      ASSERT_TRUE(run_on(backward.problem(), context_for(c), kHopper));
      int at = 0;
      for (MirroredTensor* t : {&forward.y, &backward.d_w, &backward.d_bias}) {
        t->download();
        first[at] = n == 0 ? t->storage() : first[at];
        ASSERT_EQ(t->storage() == first[at], true) << c.text() << ": run " << n << ", result " << at;
        ++at;
      }
    }
  }
}

}  // namespace
}  // namespace fretwork
