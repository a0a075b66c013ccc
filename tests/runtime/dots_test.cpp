// Products with a few rows, in every type, period and layout, against float64. What lies beside the operands is NaN.
#include "runtime/simd/dots.h"

#include <gtest/gtest.h>

#include <random>
#include <string>
#include <vector>

#include "support/reference.h"
#include "support/seed.h"
#include "support/tensor.h"

namespace fretwork::simd {
namespace {

struct Case {
  DType dtype = DType::f32;
  std::int64_t terms = 1, rows = 1, depth = 1, period = 1, batch = 1;
  bool across = false;
};

std::string text(const Case& c) {
  return std::string(name_of(c.dtype)) + " terms " + std::to_string(c.terms) + " rows " + std::to_string(c.rows) +
         " depth " + std::to_string(c.depth) + " period " + std::to_string(c.period) + " batch " +
         std::to_string(c.batch) + (c.across ? " across" : "");
}

void check(const Case& c, std::mt19937& random) {
  SCOPED_TRACE(text(c));
  const DType sum_type = c.dtype == DType::f64 ? DType::f64 : DType::f32;
  const std::normal_distribution<double> normal;
  // Matrices as (term, line, place in it), with NaN between lines. Lines are outputs, or places in depth.
  const std::int64_t lines = c.across ? c.depth : c.rows, length = (c.across ? c.rows : c.depth) * c.period;
  const std::int64_t sizes[] = {c.terms, lines, length}, strides[] = {lines * (length + 3), length + 3, 1};
  Tensor w(c.dtype, sizes, strides), x(sum_type, {c.batch, c.terms * c.depth * c.period});
  w.randomise(random, normal);
  x.randomise(random, normal);
  const Tensor sums(sum_type, {c.batch, c.rows * c.period});
  std::vector<DotsTerm> terms;
  for (std::int64_t t = 0; t < c.terms; ++t) {
    terms.push_back({static_cast<const std::byte*>(w.view.data) +
                         t * w.view.strides[0] * static_cast<std::int64_t>(size_of(c.dtype)),
                     (c.terms - 1 - t) * c.depth * c.period});
  }
  Dots dots{.terms = terms, .rows = c.rows, .depth = c.depth, .period = c.period, .stride = w.view.strides[1]};
  dots.across = c.across;
  dots.x = x.view.data;
  dots.x_stride = x.view.strides[0];
  dots.batch = c.batch;
  dots.sums = sums.view.data;
  dots.sum_stride = sums.view.strides[0];
  simd::dots(dots, c.dtype);
  for (std::int64_t n = 0; n < c.batch; ++n) {
    for (std::int64_t f = 0; f < c.rows * c.period; ++f) {
      const std::int64_t j = f / c.period, l = f % c.period;
      double sum = 0, magnitude = 1e-30;
      for (std::int64_t t = 0; t < c.terms; ++t) {
        for (std::int64_t k = 0; k < c.depth; ++k) {
          const double product = w.get({t, c.across ? k : j, (c.across ? j : k) * c.period + l}) *
                                 x.get({n, (c.terms - 1 - t) * c.depth * c.period + k * c.period + l});
          sum += product;
          magnitude += std::abs(product);
        }
      }
      // Not less, but not: NaN is an error too.
      const double allowed = magnitude * static_cast<double>(c.terms * c.depth + 2) * unit_roundoff(sum_type);
      ASSERT_TRUE(std::abs(sums.get({n, f}) - sum) <= allowed) << "row " << n << ", output " << f;
    }
  }
  EXPECT_TRUE(sums.intact_around());
}

constexpr DType kTypes[] = {DType::f64, DType::f32, DType::f16, DType::bf16};

TEST(Dots, EveryPeriodAndBatch) {
  std::mt19937 random(static_cast<unsigned>(fresh_seed()));
  for (const DType dtype : kTypes) {
    for (const bool across : {false, true}) {
      for (const std::int64_t period : {1, 2, 3, 4, 5, 7, 8, 12, 15, 16, 17, 24, 32, 40, 64}) {
        for (std::int64_t batch = 1; batch <= 9; ++batch) {
          const std::int64_t rows = 1 + static_cast<std::int64_t>(random() % 11);
          check({dtype, 1, rows, 1 + static_cast<std::int64_t>(random() % 40), period, batch, across}, random);
        }
      }
    }
  }
}

TEST(Dots, EveryNumberOfRowsAndDepth) {
  std::mt19937 random(static_cast<unsigned>(fresh_seed()) + 1);
  for (const DType dtype : kTypes) {
    for (const bool across : {false, true}) {
      for (std::int64_t n = 1; n <= 70; ++n) {
        check({dtype, 1, n, 1 + static_cast<std::int64_t>(random() % 70), 1, 3, across}, random);
        check({dtype, 1, 1 + static_cast<std::int64_t>(random() % 70), n, 1, 2, across}, random);
      }
    }
  }
}

TEST(Dots, SeveralTermsAndNone) {
  std::mt19937 random(static_cast<unsigned>(fresh_seed()) + 2);
  for (const DType dtype : kTypes) {
    for (const bool across : {false, true}) {
      for (const std::int64_t terms : {0, 2, 5}) {
        for (const std::int64_t depth : {8, 13, 16, 32}) {
          check({dtype, terms, 4 + depth, depth, 1, 1 + depth % 8, across}, random);
        }
      }
    }
  }
}

}  // namespace
}  // namespace fretwork::simd
