// Attention on the CPU, forward. Each task holds a tile of queries with the running maxima, sums and results of its
// rows while the keys pass by. Where a pattern has several components, what a row has so far waits in a workspace.
#include <algorithm>
#include <cmath>
#include <limits>

#include "ops/attention/cpu_strips.h"

namespace fretwork::attention_op::cpu {
namespace {

template <typename Acc>
constexpr Acc kNone = -std::numeric_limits<Acc>::infinity();

/// What rows have so far. For each head of a batch: a top and a sum for each row, and rows of padded results.
template <typename Acc>
struct State {
  Acc *tops = nullptr, *sums = nullptr, *out = nullptr;
  std::int64_t rows = 0, width = 0;

  static std::size_t bytes(std::int64_t heads, std::int64_t rows, std::int64_t width) {
    return static_cast<std::size_t>(heads * rows * (width + 2)) * sizeof(Acc);
  }
  State(void* data, std::int64_t heads, std::int64_t all_rows, std::int64_t all_width)
      : tops(static_cast<Acc*>(data)),
        sums(tops + heads * all_rows),
        out(sums + heads * all_rows),
        rows(all_rows),
        width(all_width) {}
};

template <typename Acc>
class Forward {
 public:
  Forward(const Problem& problem, Context& context)
      : p_(problem),
        context_(context),
        keys_(problem.depth, machine_.tiles),
        values_(problem.value_depth, machine_.tiles) {}

  void run(Plans plans) {
    for (const HeadSet& set : head_sets(plans, p_.heads)) {
      const std::int64_t places = std::max<std::int64_t>(most_places(*set.plan), 1);
      const std::int64_t each = places * (keys_.depth() + values_.padded()) * static_cast<std::int64_t>(sizeof(Acc));
      const std::int64_t slices = p_.batch * p_.kv_heads, step = std::max<std::int64_t>(kPackedBytes / each, 1);
      for (std::int64_t first = 0; first < slices; first += step) {
        run(set, first, std::min(first + step, slices));
      }
    }
  }

 private:
  struct Task {
    const Plan& plan;
    const Component& component;
    const Columns<Acc>& columns;
    const Scores<Acc>& scores;
    const Acc *keys, *values;
    State<Acc>* state;
  };

  void run(const HeadSet& set, std::int64_t first, std::int64_t last) {
    const std::vector<Query> queries = queries_of(p_, set, first, last);
    const std::vector<Head> slices = key_heads(p_, first, last);
    const Plan& plan = *set.plan;
    const bool direct = plan.components.size() == 1 && plan.components[0].covers_rows;
    const auto count = std::ssize(queries);
    const Workspace memory(context_, direct ? 0 : State<Acc>::bytes(count, p_.rows, values_.padded()));
    State<Acc> state(memory.data(), count, p_.rows, values_.padded());
    if (!direct) {
      std::fill_n(state.tops, count * p_.rows, kNone<Acc>);
      std::fill_n(state.sums, count * p_.rows * (1 + values_.padded()), Acc{0});
    }
    for (const Component& component : plan.components) {
      walk(plan, component, queries, slices, direct ? nullptr : &state);
    }
    if (!direct) {
      finish(queries, state);
    }
  }

  void walk(const Plan& plan, const Component& component, std::span<const Query> queries, std::span<const Head> slices,
            State<Acc>* state) {
    const Columns<Acc> columns(plan, component);
    const Scores<Acc> scores(p_, plan, columns, false, machine_);
    const auto size = static_cast<std::int64_t>(sizeof(Acc)) * std::ssize(slices) * columns.places();
    const Workspace keys(context_, static_cast<std::size_t>(size * keys_.depth()));
    const Workspace values(context_, static_cast<std::size_t>(size * values_.padded()));
    columns.pack(machine_, p_.k, p_.dtype, slices, keys_, Acc{1}, static_cast<Acc*>(keys.data()), nullptr, context_);
    columns.pack(machine_, p_.v, p_.dtype, slices, values_, Acc{1}, nullptr, static_cast<Acc*>(values.data()),
                 context_);
    const Task task{
        plan, component, columns, scores, static_cast<const Acc*>(keys.data()), static_cast<const Acc*>(values.data()),
        state};
    const double flops =
        2.0 * static_cast<double>(plan.shape.rows * plan.shape.cols) * static_cast<double>(p_.depth + p_.value_depth);
    share(component, std::ssize(queries), flops, context_, [&](std::int64_t unit, std::int64_t tile) {
      run(task, queries[static_cast<std::size_t>(unit)], unit, tile);
    });
  }

  void run(const Task& task, const Query& query, std::int64_t unit, std::int64_t tile) const {
    Buffers& buffers = thread_buffers();
    const simd::Tiles& tiles = machine_.tiles;
    const std::int64_t side = task.plan.shape.rows, rows = ceil_div(side, tiles.rows) * tiles.rows;
    const std::int64_t width = values_.padded(), places = task.columns.places();
    const std::int64_t stride = Walk::most_columns(task.plan) + tiles.lanes;
    buffers.tokens.assign(static_cast<std::size_t>(rows), -1);
    tokens_of(task.component.row_order, task.component.row_tiles[static_cast<std::size_t>(tile)], side, nullptr,
              buffers.tokens.data());
    Acc* const left = need<Acc>(buffers.left, rows * p_.depth);
    machine_.gather(p_.q, p_.dtype, query.head, buffers.tokens, p_.depth, static_cast<Acc>(p_.scale), left, p_.depth);
    Acc* const tops = need<Acc>(buffers.statistics, 3 * rows);
    Acc *const sums = tops + rows, *const factors = sums + rows;
    Acc* const out = need<Acc>(buffers.sums, rows * width);
    begin(task, unit, buffers.tokens, tops, sums, out);
    Acc* const x = need<Acc>(buffers.scores, tiles.rows * stride);
    Acc* const row = need<Acc>(buffers.row, stride);
    const Acc* const keys = task.keys + query.slice * places * p_.depth;
    const Acc* const values = task.values + query.slice * places * width;
    Walk walk(task.plan, tiles.rows, machine_.width());
    walk(task.component, tile, std::span(buffers.tokens).first(static_cast<std::size_t>(side)), [&](const Strip& s) {
      machine_.multiply_turned(s, left + s.first * p_.depth, p_.depth, keys, x, stride);
      task.scores.adjust(s, query.head, buffers.tokens.data() + s.first, x, stride, nullptr, row);
      machine_.rows.soften(x, stride, s.rows, s.length, tops + s.first, sums + s.first, factors);
      for (std::int64_t n = 0; n < s.rows; ++n) {
        if (factors[n] != 1) {
          machine_.rows.scale(out + (s.first + n) * width, width, factors[n]);
        }
        if (task.scores.dropped()) {
          task.scores.keep(s, query.head, buffers.tokens[static_cast<std::size_t>(s.first + n)], nullptr, row);
          machine_.rows.multiply(x + n * stride, row, s.length);
        }
      }
      machine_.multiply_lines(s, x, stride, values, places, values_, out + s.first * width);
    });
    end(task, query, unit, buffers.tokens, tops, sums, out);
  }

  void begin(const Task& task, std::int64_t unit, std::span<const std::int64_t> tokens, Acc* tops, Acc* sums,
             Acc* out) const {
    const State<Acc>* const state = task.state;
    for (std::size_t n = 0; n < tokens.size(); ++n, out += values_.padded()) {
      tops[n] = kNone<Acc>;
      sums[n] = 0;
      if (state == nullptr || tokens[n] < 0) {
        std::fill_n(out, values_.padded(), Acc{0});
        continue;
      }
      const std::int64_t row = unit * state->rows + tokens[n];
      tops[n] = state->tops[row];
      sums[n] = state->sums[row];
      std::copy_n(state->out + row * state->width, state->width, out);
    }
  }

  void end(const Task& task, const Query& query, std::int64_t unit, std::span<const std::int64_t> tokens,
           const Acc* tops, const Acc* sums, Acc* out) const {
    State<Acc>* const state = task.state;
    for (std::size_t n = 0; n < tokens.size(); ++n, out += values_.padded()) {
      if (tokens[n] < 0) {
        continue;
      }
      if (state == nullptr) {
        store(query.head, tokens[n], tops[n], sums[n], out);
        continue;
      }
      const std::int64_t row = unit * state->rows + tokens[n];
      state->tops[row] = tops[n];
      state->sums[row] = sums[n];
      std::copy_n(out, state->width, state->out + row * state->width);
    }
  }

  void finish(std::span<const Query> queries, const State<Acc>& state) const {
    const std::int64_t grain = std::max<std::int64_t>(1, (std::int64_t{1} << 16) / state.width);
    context_.executor->parallel_for(std::ssize(queries) * p_.rows, grain, [&](std::int64_t first, std::int64_t last) {
      for (std::int64_t row = first; row < last; ++row) {
        store(queries[static_cast<std::size_t>(row / p_.rows)].head, row % p_.rows, state.tops[row], state.sums[row],
              state.out + row * state.width);
      }
    });
  }

  /// A row with no element is zeros, whatever the values of other rows were.
  void store(Head head, std::int64_t token, Acc top, Acc sum, Acc* out) const {
    if (sum == 0) {
      std::fill_n(out, p_.value_depth, Acc{0});
    }
    machine_.rows.narrow(out, p_.value_depth, sum == 0 ? Acc{0} : 1 / sum, row_of(p_.o, p_.dtype, head, token),
                         p_.dtype, p_.o.col);
    if (p_.lse.data != nullptr) {
      static_cast<Acc*>(p_.lse.data)[head.batch * p_.lse.batch + head.head * p_.lse.head + token * p_.lse.row] =
          sum == 0 ? kNone<Acc> : top + std::log(sum);
    }
  }

  const Problem& p_;
  Context& context_;
  Machine<Acc> machine_;
  Split keys_, values_;
};

}  // namespace

void forward(const Problem& problem, Plans plans, Context& context) {
  problem.dtype == DType::f64 ? Forward<double>(problem, context).run(plans)
                              : Forward<float>(problem, context).run(plans);
}

}  // namespace fretwork::attention_op::cpu
