// Attention on the CPU, backward. Rows of queries walk the plan for their own gradients, rows of keys walk the plan of
// the transposed pattern for theirs, and scores are computed again in both. A gradient is summed by one task in a fixed
// order, so that results do not depend on the number of threads.
#include <algorithm>
#include <limits>
#include <optional>

#include "ops/attention/cpu_strips.h"

namespace fretwork::attention_op::cpu {
namespace {

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

/// The gradient of the bias while it is summed. Places of one task's rows are no other's: rows of queries, or, where
/// the bias is the same for all of them, rows of keys.
template <typename Acc>
class BiasSums {
 public:
  BiasSums(const BackwardProblem& b, Context& context)
      : b_(b),
        by_key_(b.bias_sizes[2] != b.forward.rows && b.bias_sizes[3] != 1),
        rows_(by_key_ ? 1 : b.forward.rows),
        cols_(b.bias_sizes[3]),
        sums_(context, groups() * rows_ * cols_, true) {}

  bool by_key() const { return by_key_; }
  std::int64_t groups() const { return b_.bias_sizes[0] * b_.bias_sizes[1]; }
  std::int64_t group(Head head) const {
    return (b_.bias_sizes[0] == 1 ? 0 : head.batch) * b_.bias_sizes[1] + (b_.bias_sizes[1] == 1 ? 0 : head.head);
  }
  /// Adds a row of a strip: `token` is the row's, `tokens` are those of the places.
  void add(std::int64_t group, const Strip& strip, std::int64_t token, const std::int64_t* tokens,
           const Acc* row) const {
    Acc* const to = sums_.data() + (group * rows_ + (by_key_ ? 0 : token)) * cols_ + (by_key_ ? token : 0);
    const std::int64_t step = by_key_ || cols_ == 1 ? 0 : 1;
    for (const Piece& piece : strip.pieces) {
      for (std::int64_t n = 0; n < piece.end - piece.begin; ++n) {
        if (const std::int64_t column = tokens[piece.place + n]; column >= 0) {
          to[column * step] += row[piece.at + n];
        }
      }
    }
  }
  void store(const Rows<Acc>& rows) const {
    const Bias& d = b_.d_bias;
    const auto size = static_cast<std::int64_t>(size_of(d.dtype));
    for (std::int64_t g = 0; g < groups(); ++g) {
      std::byte* const to =
          static_cast<std::byte*>(d.data) + (g / b_.bias_sizes[1] * d.batch + g % b_.bias_sizes[1] * d.head) * size;
      Acc* const from = sums_.data() + g * rows_ * cols_;
      if (b_.bias_sizes[2] == 1) {
        for (std::int64_t n = 1; n < rows_; ++n) {  // then cols_ is 1, or rows_
          from[0] += from[n];
        }
      }
      for (std::int64_t i = 0; i < b_.bias_sizes[2]; ++i) {
        rows.narrow(from + i * cols_, cols_, Acc{1}, to + i * d.row * size, d.dtype, d.col);
      }
    }
  }

 private:
  const BackwardProblem& b_;
  bool by_key_;
  std::int64_t rows_, cols_;
  Array<Acc> sums_;
};

template <typename Acc>
class Backward {
 public:
  Backward(const BackwardProblem& problem, Context& context)
      : b_(problem),
        p_(problem.forward),
        context_(context),
        keys_(p_.depth, machine_.tiles),
        values_(p_.value_depth, machine_.tiles),
        lse_(context, p_.batch * p_.heads * p_.rows),
        delta_(context, p_.batch * p_.heads * p_.rows) {
    if (b_.d_bias.data != nullptr) {
      bias_.emplace(b_, context);
    }
  }

  void run(Plans plans, Plans transposed) {
    prepare();
    if (b_.d_q.data != nullptr || (bias_ && !bias_->by_key())) {
      run(head_sets(plans, p_.heads), false);
    }
    if (b_.d_k.data != nullptr || b_.d_v.data != nullptr || (bias_ && bias_->by_key())) {
      run(head_sets(transposed, p_.heads), true);
    }
    if (bias_) {
      bias_->store(machine_.rows);
    }
  }

 private:
  /// A query head as part of a unit of work: where its rows and its packed columns are.
  struct Member {
    Head query, row;
    std::int64_t columns;
  };
  /// What one task sums up for a tile of rows.
  struct Unit {
    std::int64_t number;  ///< of a key head or of a query head, among those at hand; or of a group of the bias
    std::vector<Member> members;
  };
  /// Rows' gradients: of queries, or of keys (first) and values (second); as sums if `sums` is set.
  struct Target {
    const Operand *first = nullptr, *second = nullptr;
    Acc factor = 1;
    Acc *first_sums = nullptr, *second_sums = nullptr;
    bool bias = false;
  };
  /// One component, with its columns packed.
  struct Pass {
    bool transposed;
    const Plan& plan;
    const Component& component;
    const Columns<Acc>& columns;
    const Scores<Acc>& scores;
    const Acc *turned, *turned_gradients;  ///< for the scores, and for the gradients of the probabilities
    const Acc *lines, *gradient_lines;     ///< for the first target, and for the second
    const Acc *lse, *delta;                ///< by place, where rows are keys
    const unsigned* states;
  };

  std::int64_t row_count(bool transposed) const { return transposed ? p_.cols : p_.rows; }

  /// lse as it is subtracted, +inf for a row with no element, and delta = Σ d_o∘o − d_lse.
  void prepare() {
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
        Acc sum = 0;
        for (std::int64_t d = 0; d < p_.value_depth; ++d) {
          sum += o[d] * d_o[d];
        }
        delta_.data()[n] = sum - (b_.d_lse.data != nullptr ? of_row(b_.d_lse) : 0);
      }
    });
  }

  void run(const std::vector<HeadSet>& sets, bool transposed) {
    std::int64_t places = 1;
    for (const HeadSet& set : sets) {
      places = std::max(places, most_places(*set.plan));
    }
    const std::int64_t heads = transposed ? p_.heads / p_.kv_heads : 1;
    const std::int64_t each =
        2 * heads * places * (keys_.padded() + values_.padded()) * static_cast<std::int64_t>(sizeof(Acc));
    const std::int64_t slices = p_.batch * p_.kv_heads, step = std::max<std::int64_t>(kPackedBytes / each, 1);
    for (std::int64_t first = 0; first < slices; first += step) {
      const std::int64_t last = std::min(first + step, slices);
      transposed ? key_gradients(sets, first, last) : query_gradients(sets, first, last);
    }
  }

  static bool direct(const Plan& plan) { return plan.components.size() == 1 && plan.components[0].covers_rows; }

  void query_gradients(const std::vector<HeadSet>& sets, std::int64_t first, std::int64_t last) {
    const std::vector<Head> slices = key_heads(p_, first, last);
    for (const HeadSet& set : sets) {
      std::vector<Unit> units;
      std::vector<Head> rows;
      for (const Query& query : queries_of(p_, set, first, last)) {
        units.push_back({std::ssize(units), {{query.head, query.head, query.slice}}});
        rows.push_back(query.head);
      }
      const bool sums = b_.d_q.data != nullptr && !direct(*set.plan);
      const Array<Acc> memory(context_, sums ? std::ssize(units) * p_.rows * keys_.padded() : 0, true);
      Target target;
      target.first = b_.d_q.data != nullptr ? &b_.d_q : nullptr;
      target.factor = static_cast<Acc>(p_.scale);
      target.first_sums = memory.data();
      for (const Component& component : set.plan->components) {
        query_component(*set.plan, component, slices, units, target);
      }
      if (sums) {
        finish(b_.d_q, rows, p_.rows, keys_, target.factor, target.first_sums);
      }
    }
  }

  void query_component(const Plan& plan, const Component& component, std::span<const Head> slices,
                       const std::vector<Unit>& units, const Target& target) {
    const Columns<Acc> columns(plan, component);
    const Scores<Acc> scores(p_, plan, columns, false, machine_);
    const std::int64_t places = columns.places() * std::ssize(slices);
    const Array<Acc> turned_keys(context_, places * p_.depth), turned_values(context_, places * p_.value_depth);
    const Array<Acc> keys(context_, target.first != nullptr ? places * keys_.padded() : 0);
    columns.pack(machine_, p_.k, p_.dtype, slices, keys_, 1, turned_keys.data(), keys.data(), context_);
    columns.pack(machine_, p_.v, p_.dtype, slices, values_, 1, turned_values.data(), nullptr, context_);
    const Pass pass{false,       plan,    component, columns, scores, turned_keys.data(), turned_values.data(),
                    keys.data(), nullptr, nullptr,   nullptr, nullptr};
    run(pass, units, target);
  }

  void key_gradients(const std::vector<HeadSet>& sets, std::int64_t first, std::int64_t last) {
    const std::vector<Head> slices = key_heads(p_, first, last);
    const bool sums = sets.size() != 1 || !direct(*sets[0].plan);
    const auto count = [&](const Operand& d, const Split& split) {
      return sums && d.data != nullptr ? std::ssize(slices) * p_.cols * split.padded() : 0;
    };
    const Array<Acc> key_sums(context_, count(b_.d_k, keys_), true);
    const Array<Acc> value_sums(context_, count(b_.d_v, values_), true);
    Target target;
    target.first = b_.d_k.data != nullptr ? &b_.d_k : nullptr;
    target.second = b_.d_v.data != nullptr ? &b_.d_v : nullptr;
    target.first_sums = key_sums.data();
    target.second_sums = value_sums.data();
    for (const HeadSet& set : sets) {
      std::vector<Unit> units;
      std::vector<Head> heads;
      for (const Query& query : queries_of(p_, set, first, last)) {
        if (units.empty() || units.back().number != query.slice) {
          units.push_back({query.slice, {}});
        }
        units.back().members.push_back({query.head, slices[static_cast<std::size_t>(query.slice)], std::ssize(heads)});
        heads.push_back(query.head);
      }
      for (const Component& component : set.plan->components) {
        key_component(*set.plan, component, heads, units, target);
      }
    }
    if (target.first_sums != nullptr) {
      finish(b_.d_k, slices, p_.cols, keys_, 1, target.first_sums);
    }
    if (target.second_sums != nullptr) {
      finish(b_.d_v, slices, p_.cols, values_, 1, target.second_sums);
    }
  }

  void key_component(const Plan& plan, const Component& component, std::span<const Head> heads,
                     const std::vector<Unit>& units, const Target& target) {
    const Columns<Acc> columns(plan, component);
    const Scores<Acc> scores(p_, plan, columns, true, machine_);
    const std::int64_t places = columns.places() * std::ssize(heads);
    const Array<Acc> turned_queries(context_, places * p_.depth), turned_gradients(context_, places * p_.value_depth);
    const Array<Acc> queries(context_, target.first != nullptr ? places * keys_.padded() : 0);
    const Array<Acc> gradients(context_, target.second != nullptr ? places * values_.padded() : 0);
    columns.pack(machine_, p_.q, p_.dtype, heads, keys_, static_cast<Acc>(p_.scale), turned_queries.data(),
                 queries.data(), context_);
    columns.pack(machine_, b_.d_o, p_.dtype, heads, values_, 1, turned_gradients.data(), gradients.data(), context_);
    const Array<Acc> lse(context_, places), delta(context_, places);
    const Array<unsigned> states(context_, scores.dropped() ? places : 0);
    context_.executor->parallel_for(places, 1 << 12, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t n = begin; n < end; ++n) {
        const Head head = heads[static_cast<std::size_t>(n / columns.places())];
        const std::int64_t token = columns.tokens()[n % columns.places()];
        const std::int64_t at = (head.batch * p_.heads + head.head) * p_.rows + token;
        lse.data()[n] = token < 0 ? std::numeric_limits<Acc>::infinity() : lse_.data()[at];
        delta.data()[n] = token < 0 ? 0 : delta_.data()[at];
        if (scores.dropped()) {
          states.data()[n] = scores.state(head, token);
        }
      }
    });
    const Pass pass{true,
                    plan,
                    component,
                    columns,
                    scores,
                    turned_queries.data(),
                    turned_gradients.data(),
                    queries.data(),
                    gradients.data(),
                    lse.data(),
                    delta.data(),
                    states.data()};
    run(pass, units, target);
  }

  /// The rows' gradients, and then those of the bias, if these rows sum it up.
  void run(const Pass& pass, const std::vector<Unit>& units, const Target& target) {
    const double flops = 6.0 * static_cast<double>(pass.plan.shape.rows * pass.plan.shape.cols) *
                         static_cast<double>(p_.depth + p_.value_depth);
    const auto go = [&](const std::vector<Unit>& of, const Target& to) {
      share(pass.component, std::ssize(of), flops, context_,
            [&](std::int64_t unit, std::int64_t tile) { run(pass, of[static_cast<std::size_t>(unit)], tile, to); });
    };
    if (target.first != nullptr || target.second != nullptr) {
      go(units, target);
    }
    if (bias_ && bias_->by_key() == pass.transposed) {
      std::vector<Unit> groups;
      for (const Unit& unit : units) {
        for (const Member& member : unit.members) {
          const std::int64_t number = bias_->group(member.query);
          auto group = std::ranges::find(groups, number, &Unit::number);
          if (group == groups.end()) {
            group = groups.insert(group, {number, {}});
          }
          group->members.push_back(member);
        }
      }
      Target bias;
      bias.bias = true;
      go(groups, bias);
    }
  }

  void run(const Pass& pass, const Unit& unit, std::int64_t tile, const Target& target) const {
    Buffers& buffers = thread_buffers();
    const simd::Tiles& tiles = machine_.tiles;
    const std::int64_t side = pass.plan.shape.rows, rows = ceil_div(side, tiles.rows) * tiles.rows;
    const std::int64_t places = pass.columns.places();
    const std::int64_t stride = Walk::most_columns(pass.plan) + tiles.lanes;
    auto& tokens = buffers.tokens;
    tokens.assign(static_cast<std::size_t>(rows), -1);
    tokens_of(pass.component.row_order, pass.component.row_tiles[static_cast<std::size_t>(tile)], side, nullptr,
              tokens.data());
    const Acc row_scale = pass.transposed ? Acc{1} : static_cast<Acc>(p_.scale);
    Acc* const left = need<Acc>(buffers.left, rows * p_.depth);
    Acc* const more_left = need<Acc>(buffers.more_left, rows * p_.value_depth);
    Acc* const sums = need<Acc>(buffers.sums, rows * keys_.padded());
    Acc* const more_sums = need<Acc>(buffers.more_sums, rows * values_.padded());
    std::fill_n(sums, rows * keys_.padded(), Acc{0});
    std::fill_n(more_sums, rows * values_.padded(), Acc{0});
    Acc* const x = need<Acc>(buffers.scores, tiles.rows * stride);
    Acc* const g = need<Acc>(buffers.gradients, tiles.rows * stride);
    Walk walk(pass.plan, tiles.rows, machine_.width());
    const Member* loaded = nullptr;
    for (const Member& member : unit.members) {
      if (loaded == nullptr || loaded->row != member.row) {
        machine_.gather(pass.transposed ? p_.k : p_.q, p_.dtype, member.row, tokens, p_.depth, row_scale, left,
                        p_.depth);
        machine_.gather(pass.transposed ? p_.v : b_.d_o, p_.dtype, member.row, tokens, p_.value_depth, 1, more_left,
                        p_.value_depth);
        loaded = &member;
      }
      const auto row_tokens = std::span<const std::int64_t>(tokens).first(static_cast<std::size_t>(side));
      walk(pass.component, tile, row_tokens, [&](const Strip& s) {
        machine_.multiply_turned(s, left + s.first * p_.depth, p_.depth,
                                 pass.turned + member.columns * places * p_.depth, x, stride);
        machine_.multiply_turned(s, more_left + s.first * p_.value_depth, p_.value_depth,
                                 pass.turned_gradients + member.columns * places * p_.value_depth, g, stride);
        gradients(pass, member, s, tokens.data() + s.first, x, g, stride, target.bias);
        if (target.bias) {
          for (std::int64_t n = 0; n < s.rows; ++n) {
            if (const std::int64_t token = tokens[static_cast<std::size_t>(s.first + n)]; token >= 0) {
              bias_->add(unit.number, s, token, pass.columns.tokens(), g + n * stride);
            }
          }
        }
        if (target.first != nullptr) {
          machine_.multiply_lines(s, g, stride, pass.lines + member.columns * places * keys_.padded(), places, keys_,
                                  sums + s.first * keys_.padded());
        }
        if (target.second != nullptr) {
          machine_.multiply_lines(s, x, stride, pass.gradient_lines + member.columns * places * values_.padded(),
                                  places, values_, more_sums + s.first * values_.padded());
        }
      });
    }
    if (target.bias) {
      return;
    }
    const Head head = unit.members[0].row;
    const std::int64_t count = row_count(pass.transposed);
    for (std::int64_t n = 0; n < side; ++n) {
      if (const std::int64_t token = tokens[static_cast<std::size_t>(n)]; token >= 0) {
        const std::int64_t row = unit.number * count + token;
        store(target.first, target.first_sums, row, head, token, keys_, target.factor, sums + n * keys_.padded());
        store(target.second, target.second_sums, row, head, token, values_, 1, more_sums + n * values_.padded());
      }
    }
  }

  /// Scores and gradients of probabilities become probabilities and gradients of scores.
  void gradients(const Pass& pass, const Member& member, const Strip& s, const std::int64_t* tokens, Acc* x, Acc* g,
                 std::int64_t stride, bool bias) const {
    Buffers& buffers = thread_buffers();
    Acc* const row = need<Acc>(buffers.row, stride);
    Acc* const slopes =
        pass.scores.capped() && !bias ? need<Acc>(buffers.slopes, machine_.tiles.rows * stride) : nullptr;
    pass.scores.adjust(s, member.query, tokens, x, stride, slopes, row);
    constexpr Acc kInfinity = std::numeric_limits<Acc>::infinity(), kZero = 0;
    const std::int64_t rows_before = (member.query.batch * p_.heads + member.query.head) * p_.rows;
    const std::int64_t places_before = member.columns * pass.columns.places();
    for (std::int64_t n = 0; n < s.rows; ++n) {
      GradientRow<Acc> gradient;
      gradient.count = s.length;
      gradient.scores = x + n * stride;
      gradient.gradients = g + n * stride;
      gradient.slope = slopes != nullptr ? slopes + n * stride : nullptr;
      if (pass.scores.dropped()) {
        pass.scores.keep(s, member.query, tokens[n], pass.transposed ? pass.states + places_before : nullptr, row);
        gradient.keep = row;
      }
      if (!pass.transposed) {
        gradient.lse = tokens[n] < 0 ? &kInfinity : lse_.data() + rows_before + tokens[n];
        gradient.delta = tokens[n] < 0 ? &kZero : delta_.data() + rows_before + tokens[n];
        machine_.rows.gradient(gradient);
        continue;
      }
      gradient.by_column = true;
      for (const Piece& piece : s.pieces) {
        GradientRow<Acc> part = gradient;
        part.count = piece.end - piece.begin;
        part.scores += piece.at;
        part.gradients += piece.at;
        part.slope = part.slope != nullptr ? part.slope + piece.at : nullptr;
        part.keep = part.keep != nullptr ? part.keep + piece.at : nullptr;
        part.lse = pass.lse + places_before + piece.place;
        part.delta = pass.delta + places_before + piece.place;
        machine_.rows.gradient(part);
      }
    }
  }

  void store(const Operand* to, Acc* all_sums, std::int64_t row, Head head, std::int64_t token, const Split& split,
             Acc factor, const Acc* sums) const {
    if (to == nullptr) {
      return;
    }
    if (all_sums != nullptr) {
      machine_.rows.add(all_sums + row * split.padded(), sums, split.padded());
    } else {
      machine_.rows.narrow(sums, split.depth(), factor, row_of(*to, p_.dtype, head, token), p_.dtype, to->col);
    }
  }

  void finish(const Operand& to, std::span<const Head> heads, std::int64_t rows, const Split& split, Acc factor,
              const Acc* sums) const {
    const std::int64_t grain = std::max<std::int64_t>(1, (std::int64_t{1} << 16) / split.padded());
    context_.executor->parallel_for(std::ssize(heads) * rows, grain, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t n = begin; n < end; ++n) {
        machine_.rows.narrow(sums + n * split.padded(), split.depth(), factor,
                             row_of(to, p_.dtype, heads[static_cast<std::size_t>(n / rows)], n % rows), p_.dtype,
                             to.col);
      }
    });
  }

  const BackwardProblem& b_;
  const Problem& p_;
  Context& context_;
  Machine<Acc> machine_;
  Split keys_, values_;
  Array<Acc> lse_, delta_;
  std::optional<BiasSums<Acc>> bias_;
};

}  // namespace

void backward(const BackwardProblem& problem, Plans plans, Plans transposed, Context& context) {
  problem.forward.dtype == DType::f64 ? Backward<double>(problem, context).run(plans, transposed)
                                      : Backward<float>(problem, context).run(plans, transposed);
}

}  // namespace fretwork::attention_op::cpu
