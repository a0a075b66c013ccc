// Conversions and projection of Kronecker factors, against references made index by index.
#include <gtest/gtest.h>

#include <Eigen/SVD>
#include <cmath>
#include <limits>
#include <map>
#include <random>
#include <set>
#include <vector>

#include "fretwork/executor_tbb.h"
#include "fretwork/fretwork.h"
#include "support/error_text.h"

namespace fretwork {
namespace {

using Sizes = KroneckerPattern::Sizes;
using Matrix = Eigen::MatrixXd;
using Weights = std::vector<std::vector<double>>;

std::int64_t count(const Sizes& s) { return s.a * s.b * s.c * s.d; }

struct Place {
  std::int64_t row, col;
};

/// Where weight n stands: the definition.
Place place(const Sizes& s, std::int64_t n) {
  const std::int64_t l = n % s.d, k = n / s.d % s.c, j = n / s.d / s.c % s.b, i = n / s.d / s.c / s.b;
  return {i * s.b * s.d + j * s.d + l, i * s.c * s.d + k * s.d + l};
}

Matrix dense_of(const Sizes& s, const std::vector<double>& w) {
  Matrix dense = Matrix::Zero(s.a * s.b * s.d, s.a * s.c * s.d);
  for (std::int64_t n = 0; n < count(s); ++n) {
    dense(place(s, n).row, place(s, n).col) = w[static_cast<std::size_t>(n)];
  }
  return dense;
}

Matrix dense_product(const std::vector<Sizes>& patterns, const Weights& weights) {
  Matrix whole = dense_of(patterns[0], weights[0]);
  for (std::size_t n = 1; n < patterns.size(); ++n) {
    whole = dense_of(patterns[n], weights[n]) * whole;
  }
  return whole;
}

// Conversions

/// A strided tensor of `bytes`-wide bits in a guarded buffer; strides leave room, and the first may be negative.
struct Bits {
  Bits(DType dtype, std::vector<std::int64_t> sizes, bool turned) : size(size_of(dtype)) {
    std::vector<std::int64_t> strides(sizes.size());
    std::int64_t step = 3;
    for (std::size_t d = 0; d < sizes.size(); ++d) {
      const std::size_t axis = turned ? d : sizes.size() - 1 - d;
      strides[axis] = step;
      step = step * sizes[axis] + 2;
    }
    const std::int64_t first = (sizes[0] - 1) * strides[0];
    strides[0] = -strides[0];
    bytes.assign(static_cast<std::size_t>(step + 8) * size, 0xa5);
    view = TensorView(bytes.data() + static_cast<std::size_t>(first + 4) * size, dtype, sizes, strides, {});
  }
  unsigned char* at(std::initializer_list<std::int64_t> index) {
    std::int64_t offset = 0;
    int d = 0;
    for (const std::int64_t n : index) {
      offset += n * view.strides[static_cast<std::size_t>(d++)];
    }
    return static_cast<unsigned char*>(view.data) + offset * static_cast<std::int64_t>(size);
  }
  std::uint64_t get(std::initializer_list<std::int64_t> index) {
    std::uint64_t bits = 0;
    std::copy_n(at(index), size, reinterpret_cast<unsigned char*>(&bits));
    return bits;
  }
  void set(std::initializer_list<std::int64_t> index, std::uint64_t bits) {
    std::copy_n(reinterpret_cast<const unsigned char*>(&bits), size, at(index));
  }
  /// Bytes that no element owns and that have changed.
  std::int64_t spoiled() {
    std::vector<bool> owned(bytes.size());
    for (std::int64_t n = 0; n < view.elements(); ++n) {
      std::int64_t offset = 0, rest = n;
      for (int d = view.rank; d-- > 0; rest /= view.size(d)) {
        offset += rest % view.size(d) * view.stride(d);
      }
      const auto* const element = static_cast<unsigned char*>(view.data) + offset * static_cast<std::int64_t>(size);
      std::fill_n(owned.begin() + (element - bytes.data()), size, true);
    }
    std::int64_t wrong = 0;
    for (std::size_t b = 0; b < bytes.size(); ++b) {
      wrong += !owned[b] && bytes[b] != 0xa5;
    }
    return wrong;
  }
  std::size_t size;
  std::vector<unsigned char> bytes;
  TensorView view;
};

constexpr DType kFloating[] = {DType::f64, DType::f32, DType::f16, DType::bf16};
constexpr Sizes kSome[] = {{1, 1, 1, 1}, {2, 3, 4, 5}, {3, 1, 2, 1}, {1, 4, 2, 6}, {4, 5, 1, 3}};

std::uint64_t some_bits(std::int64_t n, std::size_t size) {
  const std::uint64_t bits = (static_cast<std::uint64_t>(n) + 1) * 0x9e3779b97f4a7c15u;
  return size == 8 ? bits : bits & ((std::uint64_t{1} << 8 * size) - 1);
}

TEST(KroneckerConvert, ThereAndBackWithAnyStrides) {
  TbbExecutor threads;
  for (const DType dtype : kFloating) {
    for (const Sizes& s : kSome) {
      for (const bool turned : {false, true}) {
        Context context = turned ? Context::cpu(threads) : Context::cpu();
        const std::int64_t rows = s.a * s.b * s.d, cols = s.a * s.c * s.d;
        Bits w(dtype, {s.a, s.b, s.c, s.d}, turned), back(dtype, {s.a, s.b, s.c, s.d}, !turned),
            dense(dtype, {rows, cols}, turned);
        std::map<std::pair<std::int64_t, std::int64_t>, std::uint64_t> want;
        for (std::int64_t n = 0; n < count(s); ++n) {
          const std::uint64_t bits = some_bits(n, w.size);
          w.set({n / s.d / s.c / s.b, n / s.d / s.c % s.b, n / s.d % s.c, n % s.d}, bits);
          want[{place(s, n).row, place(s, n).col}] = bits;
        }
        kronecker::to_dense(w.view, dense.view, context);
        for (std::int64_t n = 0; n < rows * cols; ++n) {
          const auto found = want.find({n / cols, n % cols});
          ASSERT_EQ(dense.get({n / cols, n % cols}), found == want.end() ? 0 : found->second) << n;
        }
        std::int64_t outside = 77;
        kronecker::from_dense(dense.view, back.view, &outside, context);
        EXPECT_EQ(outside, -1);
        for (std::int64_t n = 0; n < count(s); ++n) {
          ASSERT_EQ(back.get({n / s.d / s.c / s.b, n / s.d / s.c % s.b, n / s.d % s.c, n % s.d}), some_bits(n, w.size));
        }
        EXPECT_EQ(w.spoiled() + back.spoiled() + dense.spoiled(), 0);
      }
    }
  }
}

TEST(KroneckerConvert, FindsTheFirstOutside) {
  const Sizes s{2, 3, 4, 5};
  Context context = Context::cpu();
  std::set<std::int64_t> inside;
  for (std::int64_t n = 0; n < count(s); ++n) {
    inside.insert(place(s, n).row * 40 + place(s, n).col);
  }
  for (const DType dtype : kFloating) {
    Bits w(dtype, {2, 3, 4, 5}, false), dense(dtype, {30, 40}, false);
    const std::uint64_t sign = std::uint64_t{1} << (8 * w.size - 1);
    for (std::int64_t n = 0; n < 30 * 40; ++n) {
      dense.set({n / 40, n % 40}, inside.contains(n) ? 1 : sign);  // −0 outside is zero
    }
    std::int64_t outside = 77;
    kronecker::from_dense(dense.view, w.view, &outside, context);
    EXPECT_EQ(outside, -1);
    for (std::int64_t n = 30 * 40 - 1; n >= 0; --n) {  // the least subnormal, at one more place each time
      if (!inside.contains(n)) {
        dense.set({n / 40, n % 40}, 1 | (n % 2 == 0 ? sign : 0));
        kronecker::from_dense(dense.view, w.view, &outside, context);
        ASSERT_EQ(outside, n);
      }
    }
  }
}

TEST(KroneckerConvert, BadCalls) {
  Context context = Context::cpu();
  const auto to_dense = [&](std::vector<std::int64_t> w, std::vector<std::int64_t> dense, DType a, DType b) {
    std::vector<double> memory(4096);
    return error_of([&] { kronecker::to_dense({memory.data(), a, w}, {memory.data(), b, dense}, context); });
  };
  EXPECT_EQ(to_dense({2, 3, 20}, {1, 1}, DType::f32, DType::f32),
            "to_dense: w: expected (a, b, c, d), each at least 1, got (2, 3, 20)");
  EXPECT_EQ(to_dense({2, 0, 4, 5}, {0, 40}, DType::f32, DType::f32),
            "to_dense: w: expected (a, b, c, d), each at least 1, got (2, 0, 4, 5)");
  EXPECT_EQ(to_dense({2, 3, 4, 5}, {40, 30}, DType::f32, DType::f32),
            "to_dense: dense: expected (30, 40) for kronecker(2,3,4,5), got (40, 30)");
  EXPECT_EQ(to_dense({2, 3, 4, 5}, {30, 40}, DType::i8, DType::i8),
            "to_dense: w: expected float64, float32, float16 or bfloat16, got int8");
  EXPECT_EQ(to_dense({2, 3, 4, 5}, {30, 40}, DType::f32, DType::f16), "to_dense: dense: expected float32, got float16");
  EXPECT_EQ(to_dense({2, 3, 4, 5}, {30, 40}, DType::f32, DType::f32), "no error");
  std::vector<double> memory(4096);
  EXPECT_EQ(error_of([&] {
              kronecker::from_dense_shape({memory.data(), DType::f32, {40, 30}}, KroneckerPattern::make({2, 3, 4, 5}));
            }),
            "from_dense: dense: expected (30, 40) for kronecker(2,3,4,5), got (40, 30)");
  const TensorView w(memory.data(), DType::f32, {2, 3, 4, 5}), dense(memory.data() + 100, DType::f32, {30, 40});
  EXPECT_EQ(error_of([&] {
              kronecker::to_dense(w, {nullptr, DType::f32, {30, 40}}, context);
            }),
            "to_dense: dense: expected the address of (30, 40), got null");
  EXPECT_EQ(error_of([&] { kronecker::from_dense(dense, w, nullptr, context); }),
            "from_dense: outside: expected an address, got null");
}

// Projection

Weights random_weights(const std::vector<Sizes>& patterns, std::mt19937& random, double spread = 0) {
  std::normal_distribution<double> normal;
  std::uniform_real_distribution<double> uniform(-spread, spread);
  Weights all;
  for (const Sizes& s : patterns) {
    auto& w = all.emplace_back(static_cast<std::size_t>(count(s)));
    for (double& v : w) {
      v = normal(random) * std::pow(10.0, uniform(random));
    }
  }
  return all;
}

Matrix random_matrix(Eigen::Index rows, Eigen::Index cols, std::mt19937& random) {
  std::normal_distribution<double> normal;
  return Matrix::NullaryExpr(rows, cols, [&] { return normal(random); });
}

struct Projection {
  Weights weights;
  double error;
};

Projection project(const Matrix& dense, const std::vector<Sizes>& patterns, Executor& executor = serial_executor()) {
  std::vector<double> elements;
  for (Eigen::Index row = 0; row < dense.rows(); ++row) {
    for (Eigen::Index col = 0; col < dense.cols(); ++col) {
      elements.push_back(dense(row, col));
    }
  }
  Projection p{Weights(patterns.size()), 0};
  std::vector<KroneckerPtr> factors;
  std::ranges::transform(patterns, std::back_inserter(factors), KroneckerPattern::make);
  p.error = kronecker::project(elements, dense.rows(), dense.cols(), factors, p.weights, executor);
  return p;
}

double error_of_product(const Matrix& dense, const std::vector<Sizes>& patterns, const Weights& weights) {
  return (dense - dense_product(patterns, weights)).norm() / dense.norm();
}

const std::vector<std::vector<Sizes>> kPairs = {{{5, 4, 4, 1}, {1, 3, 5, 4}}, {{4, 4, 5, 2}, {2, 3, 4, 4}},
                                                {{1, 6, 4, 1}, {1, 5, 6, 1}}, {{1, 2, 9, 1}, {1, 7, 2, 1}},
                                                {{2, 2, 2, 1}, {1, 2, 2, 2}}, {{6, 4, 30, 2}, {2, 40, 6, 4}}};
const std::vector<std::vector<Sizes>> kChains = {{{2, 3, 4, 5}},
                                                 {{6, 4, 3, 1}, {3, 3, 4, 2}, {1, 2, 3, 6}},
                                                 {{8, 2, 2, 1}, {4, 2, 2, 2}, {2, 2, 2, 4}, {1, 2, 2, 8}}};

/// Middle indices that touch the same rows and columns form one block, which is best kept by its largest singular
/// values.
double best_pair_error(const Matrix& dense, const Sizes& right, const Sizes& left) {
  const auto ones = [](const Sizes& s) {
    return dense_of(s, std::vector<double>(static_cast<std::size_t>(count(s)), 1.0));
  };
  const Matrix x = ones(left), y = ones(right);
  using Lines = std::vector<Eigen::Index>;
  std::map<std::pair<Lines, Lines>, Eigen::Index> ranks;
  for (Eigen::Index m = 0; m < x.cols(); ++m) {
    Lines rows, cols;
    for (Eigen::Index r = 0; r < x.rows(); ++r) {
      if (x(r, m) != 0) rows.push_back(r);
    }
    for (Eigen::Index c = 0; c < y.cols(); ++c) {
      if (y(m, c) != 0) cols.push_back(c);
    }
    ++ranks[{rows, cols}];
  }
  double kept = 0;
  for (const auto& [lines, rank] : ranks) {
    const Eigen::VectorXd values = Eigen::JacobiSVD<Matrix>(Matrix(dense(lines.first, lines.second))).singularValues();
    kept += values.head(std::min(rank, values.size())).squaredNorm();
  }
  return std::sqrt(std::max(0.0, dense.squaredNorm() - kept)) / dense.norm();
}

TEST(KroneckerProject, RecoversExactProducts) {
  std::mt19937 random(1);
  for (const auto& list : {kPairs, kChains}) {
    for (const auto& patterns : list) {
      const Matrix dense = dense_product(patterns, random_weights(patterns, random));
      const Projection p = project(dense, patterns);
      EXPECT_LT(p.error, 1e-13);
      EXPECT_LT(error_of_product(dense, patterns, p.weights), 1e-13);
    }
  }
}

TEST(KroneckerProject, IsTheNearestPair) {
  std::mt19937 random(2);
  TbbExecutor threads;
  for (const auto& patterns : kPairs) {
    const Sizes right = patterns[0], left = patterns[1];
    const Matrix dense = random_matrix(left.a * left.b * left.d, right.a * right.c * right.d, random);
    const Projection p = project(dense, patterns);
    EXPECT_NEAR(p.error, error_of_product(dense, patterns, p.weights), 1e-12);
    EXPECT_NEAR(p.error, best_pair_error(dense, right, left), 1e-12);
    EXPECT_EQ(project(dense, patterns, threads).weights, p.weights);
  }
}

TEST(KroneckerProject, LongChainsStayNearTheBest) {
  std::mt19937 random(3);
  for (const auto& patterns : kChains) {
    for (const double noise : {1e-6, 1e-2, 0.5}) {
      for (int round = 0; round < 20; ++round) {
        const Matrix exact = dense_product(patterns, random_weights(patterns, random, 2));
        const Matrix other = random_matrix(exact.rows(), exact.cols(), random);
        const Matrix dense = exact + noise * exact.norm() / other.norm() * other;
        const Projection p = project(dense, patterns);
        EXPECT_NEAR(p.error, error_of_product(dense, patterns, p.weights), 1e-12);
        const double factors = std::max(1.0, static_cast<double>(patterns.size()) - 1);
        EXPECT_LE(p.error, std::sqrt(factors) * (dense - exact).norm() / dense.norm() + 1e-12);
      }
    }
  }
}

TEST(KroneckerProject, FactorsHaveEqualNormsAtEveryScale) {
  std::mt19937 random(4);
  const auto& patterns = kChains[2];
  const Matrix one = dense_product(patterns, random_weights(patterns, random));
  for (const double scale : {1e-306, 1e-150, 1.0, 1e150, 1e304}) {
    const Matrix dense = one * scale;
    const Projection p = project(dense, patterns);
    EXPECT_LT(p.error, 1e-12);
    EXPECT_LT((dense_product(patterns, p.weights) / scale - one).norm() / one.norm(), 1e-10) << scale;
    const auto norm = [](const std::vector<double>& w) {
      return Eigen::Map<const Eigen::VectorXd>(w.data(), std::ssize(w)).stableNorm();
    };
    for (const auto& w : p.weights) {
      EXPECT_NEAR(norm(w) / norm(p.weights[0]), 1.0, 1e-9);
    }
  }
}

TEST(KroneckerProject, Edges) {
  const Sizes s{2, 3, 4, 5};
  std::mt19937 random(5);
  Matrix dense = random_matrix(30, 40, random);
  dense(0, 0) = 1e300;  // exactly the elements, also where others are tiny beside one
  dense(0, 5) = 1e-300;
  const Projection p = project(dense, {s});
  for (std::int64_t n = 0; n < count(s); ++n) {
    ASSERT_EQ(p.weights[0][static_cast<std::size_t>(n)], dense(place(s, n).row, place(s, n).col));
  }
  for (const auto& patterns : {kPairs[0], kChains[1]}) {
    const Sizes right = patterns.front(), left = patterns.back();
    const Projection zero = project(Matrix::Zero(left.a * left.b * left.d, right.a * right.c * right.d), patterns);
    EXPECT_EQ(zero.error, 0);
    for (std::size_t n = 0; n < patterns.size(); ++n) {
      EXPECT_EQ(zero.weights[n], std::vector<double>(static_cast<std::size_t>(count(patterns[n]))));
    }
  }
  const std::vector<Sizes> part = {{4, 4, 5, 2}, {2, 3, 4, 4}};  // two diagonal blocks of 12 × 20
  Matrix corner = Matrix::Zero(24, 40);
  corner(0, 39) = 3;
  const Projection none = project(corner, part);
  EXPECT_EQ(none.error, 1);
  EXPECT_TRUE(dense_product(part, none.weights).isZero(0));
}

TEST(KroneckerProject, BadCalls) {
  const Sizes s{2, 3, 4, 5};
  const Matrix dense = Matrix::Zero(30, 40);
  const auto error = [](const Matrix& m, const std::vector<Sizes>& p) { return error_of([&] { project(m, p); }); };
  EXPECT_EQ(error(dense, {}), "project: patterns: expected at least one, got none");
  EXPECT_EQ(error(Matrix::Zero(30, 41), {s}),
            "project: dense: expected (30, 40) as the patterns have it, got (30, 41)");
  EXPECT_TRUE(error(dense, {s, s}).starts_with("project: patterns[1]: expected one that chains"))
      << error(dense, {s, s});
  EXPECT_EQ(error(dense, {{0, 1, 1, 1}}), "KroneckerPattern: a: expected at least 1, got 0");
  Matrix bad = dense;
  bad(2, 3) = std::numeric_limits<double>::quiet_NaN();
  EXPECT_EQ(error(bad, {s}), "project: dense: expected finite elements, got nan at (2, 3)");
}

}  // namespace
}  // namespace fretwork
