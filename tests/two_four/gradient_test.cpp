// The gradients of 2:4 products on the CPU against float64 made from the nibbles alone: every dtype, odd sizes, every
// layout; and the kernels that they expand and pick with.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <random>
#include <vector>

#include "fretwork/executor_tbb.h"
#include "fretwork/two_four.h"
#include "ops/two_four/cpu/groups.h"
#include "support/error_text.h"
#include "support/reference.h"
#include "two_four/product.h"

namespace fretwork::two_four {
namespace {

constexpr std::array kTypes{DType::f64, DType::f32, DType::f16, DType::bf16};

/// Rows × columns: contiguous, transposed, or with gaps.
Tensor matrix(DType dtype, Index rows, Index cols, Index layout) {
  MemoryLayout memory = layout == 1 ? MemoryLayout::transposed(2) : MemoryLayout{};
  if (layout == 2) {
    memory.step = 3, memory.gap = 2;
  }
  return Tensor(dtype, {rows, cols}, memory);
}

Dense dense(const Tensor& t) { return {t.view.data, t.view.stride(0), t.view.stride(1), 0}; }

struct Gradients {
  Product<Tensor> s;  ///< its values and words
  Index n;
  Tensor d_y, x, d_x, d_values;
  Gradients(const Case& c, Index rows, Index layout)
      : s(c),
        n(rows),
        d_y(matrix(c.dtype, rows, c.m, layout)),
        x(matrix(c.dtype, rows, c.k, layout)),
        d_x(matrix(c.dtype, rows, c.k, layout)),
        d_values(matrix(c.dtype, c.m, c.k / 2, layout)) {
    d_y.randomise(s.random, std::normal_distribution(0.0, 1.0));
    x.randomise(s.random, std::normal_distribution(0.0, 1.0));
  }

  void run(Executor& executor) {
    d_x.poison();
    d_values.poison();
    Context context = Context::cpu(executor);
    const Problem p = s.problem();
    GradientProblem g;
    g.n = n;
    g.s.lines = p.m, g.s.k = p.k, g.s.dtype = p.dtype;
    g.s.values = p.values, g.s.words = p.words, g.s.word_bytes = p.word_bytes;
    g.d_y = dense(d_y), g.x = dense(d_x);
    if (n > 0 && p.k > 0) {
      cpu::input_gradient(g, context);
    }
    g.x = dense(x);
    g.s.values = {d_values.view.data, d_values.view.stride(0), d_values.view.stride(1)};
    if (p.k > 0) {
      cpu::value_gradient(g, context);
    }
  }

  void check() {
    SCOPED_TRACE(s.c.text() + ", rows " + std::to_string(n));
    const Index m = s.c.m, k = s.c.k;
    const std::vector<double> values = s.values.values();
    std::vector<ReferenceSum> want(static_cast<std::size_t>(n * k));
    for (Index i = 0; i < m; ++i) {
      for (Index kept = 0; kept < k / 2; ++kept) {
        const Index column = s.row(i, kept);
        ReferenceSum sum;
        for (Index r = 0; r < n; ++r) {
          sum.add(d_y.get({r, i}) * x.get({r, column}));
          want[static_cast<std::size_t>(r * k + column)].add(d_y.get({r, i}) *
                                                             values[static_cast<std::size_t>(i * (k / 2) + kept)]);
        }
        ASSERT_NEAR(d_values.get({i, kept}), sum.value, sum.tolerance(s.c.dtype)) << "d_values " << i << ", " << kept;
      }
    }
    for (Index r = 0; r < n; ++r) {
      for (Index column = 0; column < k; ++column) {
        const ReferenceSum& sum = want[static_cast<std::size_t>(r * k + column)];
        ASSERT_NEAR(d_x.get({r, column}), sum.value, sum.tolerance(s.c.dtype)) << "d_x " << r << ", " << column;
      }
    }
    EXPECT_TRUE(d_x.intact_around() && d_values.intact_around());
  }
};

TEST(TwoFourGradient, RandomProblems) {
  std::mt19937 random(11);
  const auto pick = [&](std::initializer_list<Index> of) { return of.begin()[random() % of.size()]; };
  TbbExecutor two{2};
  for (const DType dtype : kTypes) {
    for (int n = 0; n < 60; ++n) {
      const Case c{.m = pick({1, 2, 3, 5, 8, 17, 70, 300}),
                   .n = 1,
                   .k = pick({0, 4, 8, 12, 36, 60, 64, 100, 128, 132, 260, 516, 1028}),
                   .dtype = dtype,
                   .out = dtype,
                   .word_bytes = static_cast<int>(pick({1, 2, 4})),
                   .sparse_along_m = random() % 4 == 0,
                   .value_gap = pick({0, 0, 5}),
                   .word_gap = pick({0, 0, 1}),
                   .precision = Precision::ieee,
                   .seed = static_cast<unsigned>(random())};
      Gradients g(c, pick({0, 1, 2, 3, 4, 5, 7, 8, 9, 16, 33, 70, 300}), pick({0, 0, 0, 1, 2}));
      g.run(two);
      g.check();
      const std::vector<double> d_x = g.d_x.values(), d_values = g.d_values.values();
      g.run(serial_executor());
      EXPECT_TRUE(d_x == g.d_x.values() && d_values == g.d_values.values()) << "threads change results";
    }
  }
}

template <typename T>
void compare_kernels(DType dtype) {
  const MaskKernels<T>* const masks = mask_kernels<T>();
  if (masks == nullptr) {
    GTEST_SKIP() << "this CPU has none";
  }
  std::mt19937 random(5);
  const GroupKernels<T>& plain = group_kernels<T>(dtype);
  const std::size_t group = static_cast<std::size_t>(two_four::group(dtype));
  constexpr std::array<std::uint8_t, 6> kNibbles{0x4, 0x8, 0x9, 0xc, 0xd, 0xe};
  for (std::size_t groups = 1; groups < 200; ++groups) {
    std::vector<std::uint8_t> codes(groups + groups % 2, 4), bytes(codes.size() / 2);
    for (std::size_t g = 0; g < groups; ++g) {
      codes[g] = kNibbles[group == 2 ? random() % 2 * 5 : random() % 6];
    }
    pack_codes(codes.data(), static_cast<Index>(codes.size()), bytes.data());
    std::vector<T> values(groups * group / 2), dense(groups * group);
    std::ranges::generate(values, [&] { return static_cast<T>(random()); });
    std::ranges::generate(dense, [&] { return static_cast<T>(random()); });
    const T mark = 77;
    std::vector<T> got(dense.size() + 1, mark), want(dense.size() + 1, mark);
    masks->place(values.data(), bytes.data(), static_cast<Index>(groups), got.data());
    plain.place(values.data(), codes.data(), static_cast<Index>(groups), want.data());
    EXPECT_EQ(got, want) << groups;
    got.assign(values.size() + 1, mark), want.assign(values.size() + 1, mark);
    masks->pick(dense.data(), bytes.data(), static_cast<Index>(groups), got.data());
    plain.pick(dense.data(), codes.data(), static_cast<Index>(groups), want.data());
    EXPECT_EQ(got, want) << groups;
  }
}

TEST(TwoFourGradient, MasksOf16BitsAgreeWithCodes) { compare_kernels<std::uint16_t>(DType::bf16); }
TEST(TwoFourGradient, MasksOf32BitsAgreeWithCodes) { compare_kernels<std::uint32_t>(DType::f32); }

TEST(TwoFourGradient, Errors) {
  std::vector<float> memory(4096);
  Context context = Context::cpu();
  const TensorView d_out(memory.data(), DType::f32, {3, 8}), x(memory.data(), DType::f32, {3, 16});
  const TensorView values(memory.data(), DType::f32, {8, 8}), words(memory.data(), DType::i16, {8, 2});
  const TensorView narrow(memory.data(), DType::f32, {3, 12}), half(memory.data(), DType::f16, {3, 16});
  EXPECT_EQ(error_of([&] {
              linear_backward_input(narrow, {values, words, 1}, x, context);
            }),
            "linear_backward_input: d_out: expected (rows, 8), got (3, 12)");
  EXPECT_EQ(error_of([&] {
              linear_backward_input(d_out, {values, words, 1}, narrow, context);
            }),
            "linear_backward_input: d_x: expected (3, 16), got (3, 12)");
  EXPECT_EQ(error_of([&] { linear_backward_values(half, d_out, words, values, context); }),
            "linear_backward_values: x: expected float32, got float16");
  EXPECT_EQ(error_of([&] {
              linear_backward_input(d_out, {values, words, 0}, x, context);
            }),
            "linear_backward_input: weight: expected (out, in) compressed along in, dim 1, got dim 0");
}

}  // namespace
}  // namespace fretwork::two_four
