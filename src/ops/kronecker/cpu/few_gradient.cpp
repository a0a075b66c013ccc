// Gradients of weights whose operands are read as they lie in memory: of a few batch rows, or of small blocks whose
// batch is contiguous. No δ is taken apart, and nothing is packed.
#include "ops/kronecker/cpu/regroup.h"
#include "ops/kronecker/cpu/run.h"
#include "runtime/simd/dots.h"

namespace fretwork::kronecker::cpu {
namespace {

/// Gradients that a job computes at a time.
constexpr std::int64_t kTogether = 32 << 10;
/// Small blocks have a batch of so many times b · c / (b + c), and so many products, for all threads. Pairs pay for
/// packing earlier.
constexpr std::int64_t kLongBatch = 8, kLongBatchOfPairs = 36, kManyProducts = 8;

class StreamedGradient {
 public:
  explicit StreamedGradient(const WeightProblem& problem)
      : p_(problem), s_(problem.sizes), tiles_(simd::widened_tiles(problem.dtype)), packing_(problem.dtype, tiles_) {}

 protected:
  std::int64_t whole(std::int64_t lanes) const { return ceil_div(lanes, tiles_.lanes) * tiles_.lanes; }
  Operand x(std::int64_t i) const { return features(p_.x, i, s_.c); }
  Operand d_y(std::int64_t i) const { return features(p_.d_y, i, s_.b); }
  Operand d_w(std::int64_t i) const { return {packing_.at(p_.d_w.data, i * p_.d_w.a), p_.d_w.b, p_.d_w.c, p_.d_w.d}; }

  const WeightProblem& p_;
  const Sizes& s_;
  const Tiles& tiles_;
  Packing packing_;

 private:
  /// Of diagonal block i, by (n, feature, l).
  Operand features(const Matrix& of, std::int64_t i, std::int64_t inner) const {
    return {packing_.at(of.data, i * inner * s_.d * of.feature), of.batch, s_.d * of.feature, of.feature};
  }
};

/// A few batch rows: d_w[j][(k, l)] = Σ_n d_y[j][n, l] · x[n][(k, l)], where x streams by for four outputs at a time.
class FewRowsGradient : public StreamedGradient {
 public:
  explicit FewRowsGradient(const WeightProblem& problem)
      : StreamedGradient(problem), rows_(even(s_.b, std::max<std::int64_t>(kTogether / (s_.c * s_.d), 4), 4)) {}

  std::int64_t jobs() const { return s_.a * rows_.pieces(); }
  void run(std::int64_t job) const {
    const std::int64_t i = job / rows_.pieces(), first = job % rows_.pieces() * rows_.each;
    const std::int64_t rows = rows_.size(job % rows_.pieces()), cols = s_.c * s_.d, run = p_.batch * s_.d;
    Buffers& buffers = Buffers::of_thread();
    std::byte* const outputs = buffers.right.need(packing_.bytes(rows * run));
    for (std::int64_t j = 0; j < rows; ++j) {
      const Operand from = packing_.at(d_y(i), 0, first + j, 0);
      tiles_.pack({from.data, from.row, from.delta}, p_.batch, s_.d, s_.d, outputs + packing_.bytes(j * run), 0);
    }
    const Operand features = x(i);
    simd::DotsTerm term{features.data, 0};
    simd::Dots dots{.terms = {&term, 1}, .rows = s_.c, .depth = p_.batch, .period = s_.d};
    dots.stride = features.row;
    if (features.delta != 1) {
      const std::size_t size = size_of(p_.dtype);
      std::byte* const turned = buffers.left.need(static_cast<std::size_t>(p_.batch * cols) * size);
      turn(features.data, features.delta, cols, p_.batch, turned, cols, size);
      term.matrix = turned;
      dots.stride = cols;
    }
    dots.across = true;
    dots.x = outputs;
    dots.x_stride = run;
    dots.batch = rows;
    dots.sum_stride = whole(cols);
    dots.sums = buffers.sums.need(tiles_.sum * static_cast<std::size_t>(rows * dots.sum_stride));
    simd::dots(dots, p_.dtype);
    const Operand to = packing_.at(d_w(i), first, 0, 0);
    tiles_.store(dots.sums, dots.sum_stride, rows, cols, {to.data, to.row, to.delta}, false);
  }

 private:
  Split rows_;
};

/// Small blocks: d_w[j][k] = Σ_n d_y[j][n] · x[k][n] for each l.
class SmallBlocksGradient : public StreamedGradient {
 public:
  using StreamedGradient::StreamedGradient;

  std::int64_t jobs() const { return s_.a * s_.d; }
  void run(std::int64_t job) const {
    const Operand features = packing_.at(x(job / s_.d), 0, 0, job % s_.d);
    const Operand outputs = packing_.at(d_y(job / s_.d), 0, 0, job % s_.d);
    const Operand to = packing_.at(d_w(job / s_.d), 0, 0, job % s_.d);
    Buffers& buffers = Buffers::of_thread();
    const simd::DotsTerm term{features.data, 0};
    simd::Dots dots{.terms = {&term, 1}, .rows = s_.c, .depth = p_.batch};
    dots.stride = features.col;
    dots.x = outputs.data;
    dots.x_stride = outputs.col;
    if (tiles_.widens) {
      dots.x = buffers.right.need(packing_.bytes(s_.b * p_.batch));
      dots.x_stride = p_.batch;
      tiles_.pack({outputs.data, outputs.col, 1}, s_.b, p_.batch, p_.batch, const_cast<void*>(dots.x), 0);
    }
    dots.batch = s_.b;
    dots.sum_stride = whole(s_.c);
    dots.sums = buffers.sums.need(tiles_.sum * static_cast<std::size_t>(s_.b * dots.sum_stride));
    simd::dots(dots, p_.dtype);
    tiles_.store(dots.sums, dots.sum_stride, s_.b, s_.c, {to.data, to.row, to.col}, false);
  }
};

template <typename Gradient>
void run_all(const WeightProblem& p, Context& context) {
  const Gradient gradient(p);
  const double weights = static_cast<double>(p.sizes.a * p.sizes.b * p.sizes.c) * static_cast<double>(p.sizes.d);
  const double operations = 2 * weights * static_cast<double>(std::max<std::int64_t>(p.batch, 8));
  context.executor->parallel_for(gradient.jobs(), grain(gradient.jobs(), operations),
                                 [&](std::int64_t begin, std::int64_t end) {
                                   for (std::int64_t job = begin; job < end; ++job) {
                                     gradient.run(job);
                                   }
                                 });
}

bool few_rows_pay(const WeightProblem& p, bool last) {
  const std::int64_t d = p.sizes.d, lanes = simd::widened_tiles(p.dtype).lanes;
  const bool pairs = simd::tiles(p.dtype).group > 1, one_vector = lanes % d == 0;
  const bool fit = p.d_w.c == d && p.d_w.d == 1 && (last || p.x.feature == 1);
  if (!fit || d == 1 || (one_vector && !last)) {
    return false;  // runs that fill a vector are quick to pack
  }
  return p.batch <= (!last && d % lanes == 0 && !pairs ? 16 : pairs && d < 4 ? 2 : 4);
}

bool small_blocks_pay(const WeightProblem& p, bool last) {
  const auto& [a, b, c, d] = p.sizes;
  const std::int64_t least = simd::tiles(p.dtype).group > 1 ? kLongBatchOfPairs : kLongBatch;
  return last && a * d >= kManyProducts && p.batch * (b + c) >= least * b * c;
}

}  // namespace

bool run_as_it_lies(const WeightProblem& p, bool last, Context& context) {
  if (few_rows_pay(p, last)) {
    run_all<FewRowsGradient>(p, context);
    return true;
  }
  if (small_blocks_pay(p, last)) {
    run_all<SmallBlocksGradient>(p, context);
    return true;
  }
  return false;
}

}  // namespace fretwork::kronecker::cpu
