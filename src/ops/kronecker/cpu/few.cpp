// Products with a few batch rows, or a few outputs of a block, and gradients of weights of a few batch rows, or of
// small blocks whose batch is contiguous: the larger operand streams by once, as it lies in memory.
#include "ops/kronecker/cpu/loops.h"
#include "runtime/simd/dots.h"

namespace fretwork::kronecker::cpu {
namespace {

/// Outputs of a block that are few, and the least depth for which their sums are worth adding up over lanes.
constexpr std::int64_t kFewColumns = 8, kFewDepth = 32;
/// What a thread takes at a time: weights of a few rows or x of a few outputs; gradients of weights.
constexpr std::int64_t kFewElements = 32 << 10;
/// Gradients of small blocks have a batch of so many times b · c / (b + c), and so many products, for all threads.
/// Pairs pay for packing earlier.
constexpr std::int64_t kLongBatch = 8, kLongBatchOfPairs = 36, kManyProducts = 8;

/// Rows that are few: more where the other loops would turn x, or widen and pack weights.
std::int64_t most_rows(const Problem& p) {
  const Tiles& tiles = simd::widened_tiles(p.dtype);
  const bool turns = p.x.feature == 1 && p.sizes.d > 1;
  return simd::kFewRows * (turns && tiles.widens ? 4 : turns && p.sizes.d % tiles.lanes == 0 ? 2 : 1);
}

/// Whether weights of an output are contiguous; else those of a place in depth are.
bool along(const Problem& p) { return p.w.c == p.sizes.d; }

/// A loop that streams one operand by: no weights are packed, and a job has some rows of what streams.
class Streams : protected Work {
 public:
  std::size_t weight_bytes() const { return 0; }
  std::int64_t weight_jobs() const { return 0; }
  void pack_weights(std::int64_t /*job*/, std::byte* /*packed*/) const {}
  std::int64_t jobs() const { return s_.a * rows_.pieces(); }

 protected:
  /// `cols` sums of each row.
  Streams(const Problem& problem, Context& context, const Split& rows, std::int64_t cols)
      : Work(problem, simd::widened_tiles(problem.dtype), context),
        rows_(rows),
        lanes_(ceil_div(rows_.each * cols, tiles_.lanes) * tiles_.lanes) {}

  Split rows_;
  std::int64_t lanes_;  ///< of the sums of a job's rows, in whole vectors
};

/// A few batch rows: weights stream by once, as they lie in memory.
class FewRows : public Streams {
 public:
  FewRows(const Problem& problem, Context& context)
      : Streams(problem, context, outputs(problem.sizes), problem.sizes.d),
        across_(!along(problem)),
        as_is_(!tiles_.widens && problem.x.feature == 1) {}

  void multiply(std::int64_t job, std::byte* /*packed*/) const {
    const std::int64_t i = job / rows_.pieces(), j = job % rows_.pieces() * rows_.each;
    const std::int64_t rows = rows_.size(job % rows_.pieces()), cols = rows * s_.d, depth = s_.c * s_.d;
    Buffers& buffers = Buffers::of_thread();
    std::byte* const bias = buffers.sums.need(  // and a vector, of which the last run may be a part
        tiles_.sum * static_cast<std::size_t>(lanes_ * (1 + p_.batch) + tiles_.lanes));
    std::byte* const sums = sum_at(bias, lanes_);
    const simd::DotsTerm term{packing_.at(w(i), 0, j, 0).data, 0};
    simd::Dots dots{.terms = {&term, 1}, .rows = rows, .depth = s_.c, .period = s_.d};
    dots.across = across_;
    dots.stride = across_ ? p_.w.c : p_.w.b;
    dots.x = x(i).data;
    dots.x_stride = p_.x.batch;
    if (!as_is_) {
      dots.x = buffers.right.need(packing_.bytes(p_.batch * depth));
      dots.x_stride = depth;
      tiles_.pack({x(i).data, p_.x.batch, p_.x.feature}, p_.batch, depth, depth, const_cast<void*>(dots.x), 0);
    }
    dots.batch = p_.batch;
    dots.sums = sums;
    dots.sum_stride = lanes_;
    simd::dots(dots, p_.dtype);
    if (finishes_) {
      const bool biased = p_.bias.data != nullptr;
      if (biased) {
        tiles_.pack({packing_.at(p_.bias.data, (i * s_.b + j) * s_.d * p_.bias.stride), 0, p_.bias.stride}, 1, cols,
                    lanes_, bias, 0);
      }
      finish({sums, lanes_, p_.batch, ceil_div(cols, tiles_.lanes) * tiles_.lanes, nullptr, biased ? bias : nullptr,
              p_.activation},
             p_.dtype);
    }
    const Operand to = packing_.at(y(i), 0, j, 0);
    tiles_.store(sums, lanes_, p_.batch, cols, {to.data, to.row, to.delta}, false);
  }

 private:
  static Split outputs(const Sizes& s) {
    return even(s.b, std::clamp<std::int64_t>(kFewElements / (s.c * s.d), 4, std::max<std::int64_t>(s.b, 4)), 4);
  }

  bool across_;
  bool as_is_;  ///< x is read where it is
};

/// A few outputs of a block, with d = 1: x streams by once, as it lies in memory, in the place of the weights.
class FewOutputs : public Streams {
 public:
  FewOutputs(const Problem& problem, Context& context) : Streams(problem, context, rows_of(problem, context), 1) {}

  void multiply(std::int64_t job, std::byte* /*packed*/) const {
    const std::int64_t i = job % s_.a, first = job / s_.a * rows_.each, rows = rows_.size(job / s_.a);
    Buffers& buffers = Buffers::of_thread();
    std::byte* const bias = buffers.sums.need(tiles_.sum * static_cast<std::size_t>(tiles_.lanes + lanes_ * s_.b));
    std::byte* const sums = sum_at(bias, tiles_.lanes);
    std::byte* const weights = buffers.right.need(packing_.bytes(s_.b * s_.c));
    tiles_.pack({w(i).data, p_.w.b, p_.w.c}, s_.b, s_.c, s_.c, weights, 0);
    const simd::DotsTerm term{packing_.at(x(i), first, 0, 0).data, 0};
    simd::Dots dots{.terms = {&term, 1}, .rows = rows, .depth = s_.c};
    dots.stride = p_.x.batch;
    dots.x = weights;
    dots.x_stride = s_.c;
    dots.batch = s_.b;
    dots.sums = sums;
    dots.sum_stride = lanes_;
    simd::dots(dots, p_.dtype);
    if (finishes_) {
      const bool biased = p_.bias.data != nullptr;
      if (biased) {
        tiles_.pack({packing_.at(p_.bias.data, i * s_.b * p_.bias.stride), 0, p_.bias.stride}, 1, s_.b, s_.b, bias, 0);
      }
      finish({sums, lanes_, s_.b, ceil_div(rows, tiles_.lanes) * tiles_.lanes, biased ? bias : nullptr, nullptr,
              p_.activation},
             p_.dtype);
    }
    const Operand to = packing_.at(y(i), first, 0, 0);
    tiles_.store(sums, lanes_, s_.b, rows, {to.data, to.col, to.row}, false);
  }

 private:
  /// Each thread has rows of its own, as in BatchFirst.
  static Split rows_of(const Problem& p, Context& context) {
    const std::int64_t own = ceil_div(p.batch, std::max<std::int64_t>(context.executor->concurrency(), 1));
    return even(p.batch, std::max<std::int64_t>(std::min(kFewElements / p.sizes.c, own), 16), 4);
  }
};

/// What both gradients know of their problem.
class StreamedGradient {
 public:
  explicit StreamedGradient(const WeightProblem& problem)
      : p_(problem), s_(problem.sizes), tiles_(simd::widened_tiles(problem.dtype)), packing_(problem.dtype, tiles_) {}

 protected:
  std::int64_t whole(std::int64_t lanes) const { return ceil_div(lanes, tiles_.lanes) * tiles_.lanes; }
  Operand x(std::int64_t i) const { return packing_.block(p_.x, i, s_.c, s_); }
  Operand d_y(std::int64_t i) const { return packing_.block(p_.d_y, i, s_.b, s_); }
  Operand d_w(std::int64_t i) const { return {packing_.at(p_.d_w.data, i * p_.d_w.a), p_.d_w.b, p_.d_w.c, p_.d_w.d}; }

  const WeightProblem& p_;
  const Sizes& s_;
  const Tiles& tiles_;
  Packing packing_;
};

/// A few batch rows: d_w[j][(k, l)] = Σ_n d_y[j][n, l] · x[n][(k, l)], where x streams by for four outputs at a time.
class FewRowsGradient : public StreamedGradient {
 public:
  explicit FewRowsGradient(const WeightProblem& problem)
      : StreamedGradient(problem), rows_(even(s_.b, std::max<std::int64_t>(kFewElements / (s_.c * s_.d), 4), 4)) {}

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
  for_jobs(gradient.jobs(), operations_of(p.sizes, p.batch), context, [&](std::int64_t job) { gradient.run(job); });
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

bool few_rows_fit(const Problem& p) {
  return p.batch <= most_rows(p) && (p.w.d == 1 || p.sizes.d == 1) && (along(p) || p.w.b == p.sizes.d);
}

bool runs_are_odd(const Problem& p) {
  const std::int64_t lanes = simd::widened_tiles(p.dtype).lanes;
  return p.sizes.d < lanes && lanes % p.sizes.d != 0;
}

bool few_rows_pay(const Problem& p) {
  const auto& [a, b, c, d] = p.sizes;
  const bool last = p.x.batch == 1 && p.batch > 1;
  if (runs_are_odd(p)) {
    return along(p) ? c * d * d >= p.batch * (last ? 300 : 600) : last || d > 4 || p.batch <= 2;
  }
  // Of five rows and more, products in pairs make up for packing.
  const bool pairs = d == 1 && p.batch > 4 && p.x.feature == 1 && simd::tiles(p.dtype).group > 1;
  return !along(p) || d >= simd::widened_tiles(p.dtype).lanes || c * d >= p.batch * (pairs ? 16 : 4);
}

void run_few_rows(const Problem& problem, Context& context) { run_as<FewRows>(problem, context); }

bool few_outputs_fit(const Problem& p) {
  return p.sizes.d == 1 && p.x.feature == 1 && p.sizes.b <= kFewColumns && p.sizes.c >= kFewDepth &&
         p.batch > 2 * p.sizes.b;
}

void run_few_outputs(const Problem& problem, Context& context) { run_as<FewOutputs>(problem, context); }

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
