// Sinks on the CPU, as C++ callers give them: every dtype, views, rows without keys, several components.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "fretwork/fretwork.h"
#include "fretwork/patterns.h"
#include "support/attention_reference.h"
#include "support/error_text.h"
#include "support/reference.h"
#include "support/tensor.h"

namespace fretwork {
namespace {

using Index = std::int64_t;

struct Case {
  RegularPtr pattern;
  DType dtype = DType::f32, sinks = DType::f32;
  Index batch = 2, heads = 4, kv_heads = 2, depth = 24, value_depth = 40;
  MemoryLayout layout{};
};

/// In units of the largest magnitude.
void expect_close(const Tensor& got, const std::vector<double>& want, double tolerance, const char* what) {
  double most = 1e-3, error = 0;
  const std::vector<double> found = got.values();
  for (std::size_t n = 0; n < want.size(); ++n) {
    if (std::isinf(want[n])) {
      ASSERT_EQ(found[n], want[n]) << what;
      continue;
    }
    ASSERT_FALSE(std::isnan(found[n])) << what;
    most = std::max(most, std::abs(want[n]));
    error = std::max(error, std::abs(found[n] - want[n]));
  }
  EXPECT_LE(error, tolerance * most) << what;
  EXPECT_TRUE(got.intact_around()) << what;
}

double tolerance_of(DType dtype) {
  return dtype == DType::f64 ? 1e-12 : dtype == DType::f32 ? 2e-5 : dtype == DType::f16 ? 8e-3 : 6e-2;
}

void check(const Case& c, double shift = 0) {
  std::mt19937 engine(static_cast<unsigned>(c.pattern->rows() + 7 * c.heads));
  const Index rows = c.pattern->rows(), cols = c.pattern->cols();
  const auto make = [&](DType dtype, std::initializer_list<Index> sizes) {
    Tensor t(dtype, sizes, c.layout);
    t.randomise(engine);
    return t;
  };
  const DType wide = c.dtype == DType::f64 ? DType::f64 : DType::f32;
  Tensor q = make(c.dtype, {c.batch, c.heads, rows, c.depth}), k = make(c.dtype, {c.batch, c.kv_heads, cols, c.depth}),
         v = make(c.dtype, {c.batch, c.kv_heads, cols, c.value_depth}),
         d_o = make(c.dtype, {c.batch, c.heads, rows, c.value_depth}), d_lse = make(wide, {c.batch, c.heads, rows});
  Tensor sinks(c.sinks, {c.heads}, MemoryLayout{.step = 3});
  sinks.randomise(engine);
  for (Index h = 0; h < c.heads; ++h) {
    sinks.set(h, sinks.get(h) + shift);
  }
  AttentionInputs in;
  in.batch = c.batch, in.heads = c.heads, in.kv_heads = c.kv_heads, in.rows = rows, in.cols = cols;
  in.depth = c.depth, in.value_depth = c.value_depth, in.scale = 1 / std::sqrt(static_cast<double>(c.depth));
  in.there = [&](Index, Index, Index i, Index j) { return c.pattern->contains(i, j); };
  in.q = q.values(), in.k = k.values(), in.v = v.values(), in.sinks = sinks.values();
  in.d_o = d_o.values(), in.d_lse = d_lse.values();
  const AttentionReference want(in);

  Context context = Context::cpu();
  AttentionOptions options;
  options.sinks = sinks.view;
  Tensor o(c.dtype, d_o.sizes(), c.layout), lse(wide, d_lse.sizes());
  const PatternPtr pattern = c.pattern;
  attention(q.view, k.view, v.view, pattern, o.view, lse.view, context, options);
  expect_close(o, want.o, tolerance_of(c.dtype), "o");
  expect_close(lse, want.lse, tolerance_of(wide) * 50, "lse");
  Tensor d_q(c.dtype, q.sizes(), c.layout), d_k(c.dtype, k.sizes(), c.layout), d_v(c.dtype, v.sizes(), c.layout),
      d_sinks(c.sinks, {c.heads}, MemoryLayout{.step = 2});
  AttentionGradients gradients{.q = d_q.view, .k = d_k.view, .v = d_v.view, .bias = {}, .sinks = d_sinks.view};
  attention_backward(q.view, k.view, v.view, pattern, o.view, lse.view, d_o.view, d_lse.view, gradients, context,
                     options);
  const double loose = 2 * tolerance_of(c.dtype);
  expect_close(d_q, want.d_q, loose, "d_q");
  expect_close(d_k, want.d_k, loose, "d_k");
  expect_close(d_v, want.d_v, loose, "d_v");
  expect_close(d_sinks, want.d_sinks, std::max(loose, 2 * tolerance_of(c.sinks)), "d_sinks");
}

TEST(Sinks, OfEveryType) {
  for (const DType dtype : {DType::f64, DType::f32, DType::f16, DType::bf16}) {
    for (const DType sinks : {dtype, DType::f32}) {
      check({.pattern = patterns::causal({70, 90}), .dtype = dtype, .sinks = sinks});
      check({.pattern = patterns::strided({100, 100}, 9), .dtype = dtype, .sinks = sinks});
    }
  }
}

TEST(Sinks, WithoutKeys) {
  check({.pattern = patterns::causal({70, 30})});
  check({.pattern = patterns::sliding_window({60, 20}, 3, 0), .dtype = DType::f64, .sinks = DType::f64});
}

TEST(Sinks, OfOneQueryForEachHead) {
  for (const Index heads : {8, 6}) {
    check({.pattern = patterns::causal({1, 200}), .batch = 3, .heads = heads, .kv_heads = 2});
  }
}

TEST(Sinks, OnViews) {
  check({.pattern = patterns::causal({70, 90}), .layout = {.step = 2, .gap = 3}});
  check({.pattern = patterns::strided({70, 70}, 9), .dtype = DType::f16, .layout = {.gap = 5, .backwards = 4}});
}

TEST(Sinks, FarFromTheScores) {
  for (const double shift : {-1e4, 100.0, 1e4, -std::numeric_limits<double>::infinity()}) {
    check({.pattern = patterns::causal({70, 40})}, shift);
    check({.pattern = patterns::strided({70, 70}, 9), .dtype = DType::f64, .sinks = DType::f64}, shift);
  }
}

TEST(Sinks, BadOnesAreRefused) {
  Tensor q(DType::f32, {2, 4, 8, 8}), lse(DType::f32, {2, 4, 8}), few(DType::f32, {3}), half(DType::f16, {4}),
      right(DType::f32, {4}), wrong(DType::f64, {4});
  Context context = Context::cpu();
  const PatternPtr pattern = patterns::causal({8, 8});
  const auto call = [&](const Tensor& sinks) {
    return error_of([&] {
      attention(q.view, q.view, q.view, pattern, q.view, lse.view, context, {.scale = 1, .sinks = sinks.view});
    });
  };
  EXPECT_EQ(call(few), "attention: sinks: expected shape (4,), got (3,)");
  EXPECT_EQ(call(half), "attention: sinks: expected float32 like q, got float16");
  const auto gradient = [&](const std::optional<ConstTensorView>& sinks, const Tensor& d_sinks) {
    AttentionOptions options;
    options.sinks = sinks;
    return error_of([&] {
      attention_backward(q.view, q.view, q.view, pattern, q.view, lse.view, q.view, {},
                         {.q = {}, .k = {}, .v = {}, .bias = {}, .sinks = d_sinks.view}, context, options);
    });
  };
  EXPECT_EQ(gradient(std::nullopt, right),
            "attention_backward: d_sinks: expected the dtype of given sinks, got float32");
  EXPECT_EQ(gradient(right.view, wrong), "attention_backward: d_sinks: expected the dtype of given sinks, got float64");
}

}  // namespace
}  // namespace fretwork
