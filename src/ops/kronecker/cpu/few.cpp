// Products with a few batch rows, or a few outputs of a block: the other operand streams by once, as it lies in memory.
#include "ops/kronecker/cpu/loops.h"
#include "runtime/simd/dots.h"

namespace fretwork::kronecker::cpu {
namespace {

/// Outputs of a block that are few, and the least depth for which their sums are worth adding up over lanes.
constexpr std::int64_t kFewColumns = 8, kFewDepth = 32;
/// Weights that a thread takes at a time of a few rows, or x of a few outputs.
constexpr std::int64_t kFewElements = 32 << 10;

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
  FewOutputs(const Problem& problem, Context& context)
      : Streams(problem, context, even(problem.batch, std::max<std::int64_t>(kFewElements / problem.sizes.c, 16), 4),
                1) {}

  void multiply(std::int64_t job, std::byte* /*packed*/) const {
    const std::int64_t i = job / rows_.pieces(), first = job % rows_.pieces() * rows_.each;
    const std::int64_t rows = rows_.size(job % rows_.pieces());
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
};

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

}  // namespace fretwork::kronecker::cpu
