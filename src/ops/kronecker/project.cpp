// Projection: the Kronecker factors whose product is nearest to a dense matrix, by singular value decompositions.
//
// A product left·right of two chainable factors with inner rank r consists of blocks: the rows of one (block of left,
// δ) and the columns of one block α of right. Each block may be any matrix of rank r, everything else is zero, and
// blocks do not overlap. So the nearest product has the truncated SVD of each block. A longer chain peels off its
// left-most factor repeatedly. Every finished factor keeps orthonormal columns U, so a later error to its right has the
// same norm in the whole product. The errors of all steps and what lies outside the pattern are orthogonal, and their
// squares add (arXiv 2411.04506).
#include <Eigen/QR>
#include <Eigen/SVD>
#include <algorithm>
#include <cmath>
#include <string>

#include "fretwork/error.h"
#include "fretwork/ops.h"
#include "fretwork/tensor.h"
#include "pattern/checks.h"

namespace fretwork::kronecker {
namespace {

using Sizes = KroneckerPattern::Sizes;
using Matrix = Eigen::MatrixXd;
constexpr const char* kOp = "project";

std::size_t count(const Sizes& s) { return static_cast<std::size_t>(s.a * s.b * s.c * s.d); }

std::int64_t place(const Sizes& s, std::int64_t i, std::int64_t j, std::int64_t k, std::int64_t l) {
  return ((i * s.b + j) * s.c + k) * s.d + l;
}

/// The patterns of the products patterns[n]·…·patterns[0].
std::vector<KroneckerPtr> products(std::span<const KroneckerPtr> patterns) {
  if (patterns.empty()) {
    throw Error(kOp, "patterns", "at least one", "none");
  }
  std::vector<KroneckerPtr> all;
  for (std::size_t n = 0; n < patterns.size(); ++n) {
    const std::string name = "patterns[" + std::to_string(n) + "]";
    const KroneckerPattern& pattern = check_pattern(kOp, name.c_str(), patterns[n]);
    if (n > 0 && !chainable(patterns[n], all.back())) {
      throw Error(kOp, name,
                  "one that chains with what is applied before it, " + all.back()->text() +
                      ": equal features between them, its a a divisor and its d a multiple of those, and its inner "
                      "rank whole",
                  pattern.text());
    }
    all.push_back(n > 0 ? product(patterns[n], all.back()) : patterns[n]);
  }
  return all;
}

void check_dense(std::span<const double> dense, std::int64_t rows, std::int64_t cols, const KroneckerPattern& whole) {
  const std::int64_t given[] = {rows, cols}, wanted[] = {whole.rows(), whole.cols()};
  if (rows != wanted[0] || cols != wanted[1]) {
    throw Error(kOp, "dense", shape_text(wanted) + " as the patterns have it", shape_text(given));
  }
  if (dense.size() != static_cast<std::size_t>(rows) * static_cast<std::size_t>(cols)) {
    throw Error(kOp, "dense", std::to_string(rows * cols) + " elements", std::to_string(dense.size()));
  }
  if (const auto bad = std::ranges::find_if_not(dense, [](double v) { return std::isfinite(v); }); bad != dense.end()) {
    const std::int64_t at = bad - dense.begin();
    throw Error(kOp, "dense", "finite elements",
                std::to_string(*bad) + " at (" + std::to_string(at / cols) + ", " + std::to_string(at % cols) + ")");
  }
}

/// The power of two that brings the largest element near 1, so that no square overflows; 0 for a zero matrix.
double scale_of(std::span<const double> dense) {
  double largest = 0;
  for (const double v : dense) {
    largest = std::max(largest, std::abs(v));
  }
  return largest > 0 ? std::ldexp(1.0, std::clamp(-std::ilogb(largest), -1000, 1000)) : 0.0;
}

/// What of scale·dense lies inside the pattern, as weights; `outside` gets the sum of squares of the rest.
std::vector<double> masked(std::span<const double> dense, const KroneckerPattern& pattern, double scale,
                           double& outside) {
  const Sizes& s = pattern.sizes();
  std::vector<double> w(count(s));
  const std::int64_t cols = pattern.cols();
  for (std::int64_t row = 0; row < pattern.rows(); ++row) {
    const std::int64_t i = row / (s.b * s.d), j = row / s.d % s.b, l = row % s.d, first = i * s.c * s.d;
    for (std::int64_t col = 0; col < cols; ++col) {
      const double v = scale * dense[static_cast<std::size_t>(row * cols + col)];
      if (col >= first && col < first + s.c * s.d && col % s.d == l) {
        w[static_cast<std::size_t>(place(s, i, j, (col - first) / s.d, l))] = v;
      } else {
        outside += v * v;
      }
    }
  }
  return w;
}

struct Singular {
  Matrix u, v;
  Eigen::VectorXd values;
};

Singular svd(const Matrix& t) {
  if (t.rows() < t.cols()) {
    Singular turned = svd(t.transpose());
    return {std::move(turned.v), std::move(turned.u), std::move(turned.values)};
  }
  if (t.rows() > 2 * t.cols()) {  // a thin block: of its triangle, which is small
    const Eigen::HouseholderQR<Matrix> qr(t);
    const Matrix triangle = qr.matrixQR().topRows(t.cols()).triangularView<Eigen::Upper>();
    Singular inner = svd(triangle);
    Matrix u = Matrix::Zero(t.rows(), t.cols());
    u.topRows(t.cols()) = inner.u;
    u.applyOnTheLeft(qr.householderQ());
    return {std::move(u), std::move(inner.v), std::move(inner.values)};
  }
  const Eigen::BDCSVD<Matrix> done(t, Eigen::ComputeThinU | Eigen::ComputeThinV);
  return {done.matrixU(), done.matrixV(), done.singularValues()};
}

/// `whole`, the weights of left·right, as the nearest such product; gives the square of the error. The singular values
/// go to `right`, or by their roots to both.
class Split {
 public:
  Split(const KroneckerPtr& left, const KroneckerPtr& right, const std::vector<double>& whole, bool share)
      : l_(left->sizes()), r_(right->sizes()), m_(product(left, right)->sizes()), whole_(whole), share_(share) {
    first.resize(count(l_));
    second.resize(count(r_));
  }

  double run(Executor& executor) {
    // Sums in the order of the blocks: the same whichever threads ran them.
    std::vector<double> dropped(static_cast<std::size_t>(r_.a * l_.d));
    executor.parallel_for(r_.a * l_.d, 1, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t n = begin; n < end; ++n) {
        dropped[static_cast<std::size_t>(n)] = block(n / l_.d, n % l_.d);
      }
    });
    double sum = 0;
    for (const double d : dropped) {
      sum += d;
    }
    return sum;
  }

  std::vector<double> first, second;

 private:
  double block(std::int64_t alpha, std::int64_t delta) {
    const std::int64_t group = r_.a / l_.a, rank = l_.a * l_.c / r_.a, inner = l_.d / r_.d;
    const std::int64_t i = alpha / group, part = alpha % group, at = delta / r_.d, l = delta % r_.d;
    Matrix t(l_.b, r_.c);
    for (std::int64_t row = 0; row < l_.b; ++row) {
      for (std::int64_t col = 0; col < r_.c; ++col) {
        t(row, col) = whole_[static_cast<std::size_t>(place(m_, i, row * inner + at, part * r_.c + col, l))];
      }
    }
    const Singular s = svd(t);
    const std::int64_t kept = std::min<std::int64_t>(rank, s.values.size());  // what is beyond stays zero
    for (std::int64_t n = 0; n < kept; ++n) {
      const double to_left = share_ ? std::sqrt(s.values[n]) : 1.0, to_right = share_ ? to_left : s.values[n];
      for (std::int64_t row = 0; row < l_.b; ++row) {
        first[static_cast<std::size_t>(place(l_, i, row, part * rank + n, delta))] = to_left * s.u(row, n);
      }
      for (std::int64_t col = 0; col < r_.c; ++col) {
        second[static_cast<std::size_t>(place(r_, alpha, n * inner + at, col, l))] = to_right * s.v(col, n);
      }
    }
    return s.values.tail(s.values.size() - kept).squaredNorm();
  }

  Sizes l_, r_, m_;
  const std::vector<double>& whole_;
  bool share_;
};

double norm(const std::vector<double>& w) {
  return Eigen::Map<const Eigen::VectorXd>(w.data(), static_cast<Eigen::Index>(w.size())).norm();
}

/// Divides the product by `scale` and gives every factor the same norm: none overflows where another is tiny.
void balance(std::span<std::vector<double>> weights, double scale) {
  double exponent = -std::log2(scale);
  for (const auto& w : weights) {
    const double n = norm(w);
    if (n <= 0) {
      return;  // nothing of the matrix lies inside the pattern
    }
    exponent += std::log2(n);
  }
  const double each = std::exp2(exponent / static_cast<double>(weights.size()));
  for (auto& w : weights) {
    const double factor = each / norm(w);
    std::ranges::for_each(w, [&](double& v) { v *= factor; });
  }
}

}  // namespace

double project(std::span<const double> dense, std::int64_t rows, std::int64_t cols,
               std::span<const KroneckerPtr> patterns, std::span<std::vector<double>> weights, Executor& executor) {
  const std::vector<KroneckerPtr> whole = products(patterns);
  check_dense(dense, rows, cols, *whole.back());
  if (weights.size() != patterns.size()) {
    throw Error(kOp, "weights", std::to_string(patterns.size()), std::to_string(weights.size()));
  }
  for (std::size_t n = 0; n < patterns.size(); ++n) {
    weights[n].assign(count(patterns[n]->sizes()), 0.0);
  }
  const double scale = scale_of(dense);
  if (scale <= 0) {
    return 0.0;
  }
  double error = 0;
  std::vector<double> rest = masked(dense, *whole.back(), scale, error);
  const double total = error + Eigen::Map<const Eigen::VectorXd>(rest.data(), std::ssize(rest)).squaredNorm();
  for (std::size_t n = patterns.size(); --n > 0;) {
    Split split(patterns[n], whole[n - 1], rest, n == 1);
    error += split.run(executor);
    weights[n] = std::move(split.first);
    rest = std::move(split.second);
  }
  if (patterns.size() > 1) {
    weights[0] = std::move(rest);
    balance(weights, scale);
  } else {
    double unused = 0;
    weights[0] = masked(dense, *whole.back(), 1.0, unused);  // exactly the elements, whatever scaling does to tiny ones
  }
  return std::sqrt(error / total);
}

}  // namespace fretwork::kronecker
