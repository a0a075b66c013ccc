// What the CPU's gradients take of each row (lse, what rounding it lost, and delta), and the step from the scores of a
// strip to their gradients, for rows that are queries and for rows that are keys.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>

#include "core/element.h"
#include "ops/attention/cpu/strips.h"

namespace fretwork::attention_op::cpu {

/// Memory of a call for numbers of one type.
template <typename T>
class Array {
 public:
  Array(Context& context, std::int64_t count, bool zero = false)
      : memory_(context, static_cast<std::size_t>(count) * sizeof(T)) {
    if (zero) {
      const std::int64_t grain = std::int64_t{1} << 18;
      context.executor->parallel_for(
          count, grain, [&](std::int64_t begin, std::int64_t end) { std::fill(data() + begin, data() + end, T{0}); });
    }
  }
  T* data() const { return static_cast<T*>(memory_.data()); }

 private:
  Workspace memory_;
};

/// A query head as part of a unit of work: where its rows and its packed columns are.
struct Member {
  Head query, row;
  std::int64_t columns;
};

/// One component, with its columns packed.
template <typename Acc>
struct BackwardPass {
  bool transposed;
  const Layer<Acc>& layer;
  Packing<Acc>& packing;
  const Acc *turned, *turned_gradients;  ///< for the scores, and for the gradients of the probabilities
  const Acc *lse, *rest, *delta;         ///< by place, where rows are keys
  const unsigned* states;
};

/// The statistics of all rows, and what they make of a strip's scores. `machine` must outlive it.
template <typename Acc>
class ScoreGradients {
 public:
  ScoreGradients(const BackwardProblem& problem, const Machine<Acc>& machine, Context& context)
      : b_(problem),
        p_(problem.forward),
        context_(context),
        machine_(machine),
        lse_(context, p_.batch * p_.heads * p_.rows),
        delta_(context, p_.batch * p_.heads * p_.rows) {}

  /// Of all rows, once they are prepared. `rest` is null unless it counts.
  const Acc* lse() const { return lse_.data(); }
  const Acc* delta() const { return delta_.data(); }
  const Acc* rest() const { return rest_ ? rest_->data() : nullptr; }

  /// lse as it is subtracted, +inf for a row with no element, and delta = Σ d_o∘o − d_lse.
  void prepare(Plans plans) {
    const std::int64_t grain = std::max<std::int64_t>(1, (std::int64_t{1} << 15) / p_.value_depth);
    context_.executor->parallel_for(p_.batch * p_.heads * p_.rows, grain, [&](std::int64_t begin, std::int64_t end) {
      Acc* const o = need<Acc>(thread_buffers().left, 2 * p_.value_depth);
      Acc* const d_o = o + p_.value_depth;
      for (std::int64_t n = begin; n < end; ++n) {
        const std::int64_t row = n % p_.rows;
        const Head head{n / p_.rows / p_.heads, n / p_.rows % p_.heads};
        const auto of_row = [&](const Operand& x) {
          return static_cast<const Acc*>(x.data)[head.batch * x.batch + head.head * x.head + row * x.row];
        };
        constexpr Acc kInfinity = std::numeric_limits<Acc>::infinity();
        const Acc lse = of_row(p_.lse);
        lse_.data()[n] = lse == -kInfinity ? kInfinity : lse;
        delta_.data()[n] = 0;
        if (lse == -kInfinity) {
          continue;
        }
        machine_.gather(p_.o, p_.dtype, head, {&row, 1}, p_.value_depth, 1, o, 0);
        machine_.gather(b_.d_o, p_.dtype, head, {&row, 1}, p_.value_depth, 1, d_o, 0);
        delta_.data()[n] =
            machine_.rows.dot(o, d_o, p_.value_depth) - (b_.d_lse.data != nullptr ? of_row(b_.d_lse) : 0);
      }
    });
    find_rest(plans);
    if (p_.sinks.data != nullptr) {
      hide_rows_of_sinks(grain);
    }
  }

  /// The gradient of the sinks, −Σ exp(sink − lse)·delta of each head's rows, in their order.
  void store_sinks() const {
    const Sinks &sinks = p_.sinks, &to = b_.d_sinks;
    context_.executor->parallel_for(p_.heads, 1, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t head = begin; head < end; ++head) {
        const Acc sink = read_element<Acc>(sinks.data, sinks.dtype, head * sinks.head);
        double sum = 0;
        for (std::int64_t batch = 0; batch < p_.batch; ++batch) {
          const std::int64_t first = (batch * p_.heads + head) * p_.rows;
          for (std::int64_t n = first; n < first + p_.rows; ++n) {
            const Acc below = std::isinf(lse()[n]) ? 0 : sink - lse()[n];  // the sink alone, or delta is 0
            sum -= static_cast<double>(std::exp(rest() != nullptr ? below - rest()[n] : below) * delta()[n]);
          }
        }
        write_element(to.data, to.dtype, head * to.head, sum);
      }
    });
  }

  /// Scores and gradients of probabilities become probabilities and gradients of scores.
  void operator()(const BackwardPass<Acc>& pass, const Member& member, const Strip& s, const std::int64_t* tokens,
                  Acc* x, Acc* g, std::int64_t stride, bool capped) const {
    Buffers& buffers = thread_buffers();
    const Scores<Acc>& scores = pass.layer.scores;
    Acc* const row = need<Acc>(buffers.row, stride);
    Acc* const slopes = capped && scores.capped() ? need<Acc>(buffers.slopes, machine_.tiles.rows * stride) : nullptr;
    scores.adjust(s, member.query, tokens, x, stride, slopes, row);
    constexpr Acc kInfinity = std::numeric_limits<Acc>::infinity(), kZero = 0;
    const std::int64_t rows_before = (member.query.batch * p_.heads + member.query.head) * p_.rows;
    const std::int64_t places_before = member.columns * pass.layer.columns.places();
    for (std::int64_t n = 0; n < s.rows; ++n) {
      GradientRow<Acc> gradient;
      gradient.count = s.length;
      gradient.scores = x + n * stride;
      gradient.gradients = g + n * stride;
      gradient.slope = slopes != nullptr ? slopes + n * stride : nullptr;
      if (scores.dropped()) {
        scores.keep(s, member.query, tokens[n], pass.transposed ? pass.states + places_before : nullptr, row);
        gradient.keep = row;
      }
      if (!pass.transposed) {
        gradient.lse = tokens[n] < 0 ? &kInfinity : lse_.data() + rows_before + tokens[n];
        gradient.rest = rest_ && tokens[n] >= 0 ? rest_->data() + rows_before + tokens[n] : nullptr;
        gradient.delta = tokens[n] < 0 ? &kZero : delta_.data() + rows_before + tokens[n];
        machine_.rows.gradient(gradient);
        continue;
      }
      gradient.by_column = true;
      for (std::size_t i = 0; i < s.pieces.size(); ++i) {
        const Piece& piece = s.pieces[i];
        GradientRow<Acc> part = gradient;
        part.count = piece.end - piece.begin;
        // Neighbours are one.
        for (; i + 1 < s.pieces.size() && s.pieces[i + 1].place == piece.place + part.count; ++i) {
          part.count += s.pieces[i + 1].end - s.pieces[i + 1].begin;
        }
        part.scores += piece.at;
        part.gradients += piece.at;
        part.slope = part.slope != nullptr ? part.slope + piece.at : nullptr;
        part.keep = part.keep != nullptr ? part.keep + piece.at : nullptr;
        part.lse = pass.lse + places_before + piece.place;
        part.rest = pass.rest != nullptr ? pass.rest + places_before + piece.place : nullptr;
        part.delta = pass.delta + places_before + piece.place;
        machine_.rows.gradient(part);
      }
    }
  }

 private:
  /// A row whose sum is its sink has no element, or none that counts: +inf as without sinks, so that its query, which
  /// may be NaN, reaches no key.
  void hide_rows_of_sinks(std::int64_t grain) {
    const Sinks& sinks = p_.sinks;
    context_.executor->parallel_for(p_.batch * p_.heads * p_.rows, grain, [&](std::int64_t begin, std::int64_t end) {
      Acc* const o = need<Acc>(thread_buffers().left, p_.value_depth);
      for (std::int64_t n = begin; n < end; ++n) {
        const std::int64_t row = n % p_.rows;
        const Head head{n / p_.rows / p_.heads, n / p_.rows % p_.heads};
        if (lse_.data()[n] == read_element<Acc>(sinks.data, sinks.dtype, head.head * sinks.head + row * sinks.row)) {
          machine_.gather(p_.o, p_.dtype, head, {&row, 1}, p_.value_depth, 1, o, 0);
          if (std::all_of(o, o + p_.value_depth, [](Acc x) { return x == 0; })) {
            lse_.data()[n] = std::numeric_limits<Acc>::infinity();
          }
        }
      }
    });
  }

  /// From here on what rounding a log-sum-exp leaves out counts: a probability would be wrong by 6e-5 in fp32.
  static constexpr Acc kLargeLse = 1024;

  /// What lse lost to rounding, if some row's is large. A bias or slopes make it so; it takes the forward again.
  void find_rest(Plans plans) {
    const std::int64_t rows = p_.batch * p_.heads * p_.rows;
    const auto large = [&](std::int64_t n) {
      return std::isfinite(lse_.data()[n]) && std::abs(lse_.data()[n]) > kLargeLse;
    };
    bool any = false;
    for (std::int64_t n = 0; n < rows && (p_.bias.data != nullptr || p_.slopes.data != nullptr) && !any; ++n) {
      any = large(n);
    }
    if (!any) {
      return;
    }
    rest_.emplace(context_, rows);
    const Workspace out(context_, static_cast<std::size_t>(rows * p_.value_depth) * size_of(p_.dtype));
    Problem again = p_;
    again.o = {out.data(), p_.heads * p_.rows * p_.value_depth, p_.rows * p_.value_depth, p_.value_depth, 1};
    again.lse = {lse_.data(), p_.heads * p_.rows, p_.rows, 1, 0};
    again.lse_rest = again.lse;
    again.lse_rest.data = rest_->data();
    forward(again, plans, context_);
    std::replace(lse_.data(), lse_.data() + rows, -std::numeric_limits<Acc>::infinity(),
                 std::numeric_limits<Acc>::infinity());
  }

  const BackwardProblem& b_;
  const Problem& p_;
  Context& context_;
  const Machine<Acc>& machine_;
  Array<Acc> lse_, delta_;
  std::optional<Array<Acc>> rest_;  ///< of lse, if it counts
};

}  // namespace fretwork::attention_op::cpu
