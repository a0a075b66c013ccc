// Attention on the CPU, forward. A task holds a tile of queries, with the running maxima, sums and results of its rows,
// and streams the keys. If a pattern has several components, the state of a row is kept in workspace between them.
#include <algorithm>
#include <cmath>
#include <deque>
#include <limits>

#include "core/element.h"
#include "ops/attention/cpu/strips.h"

namespace fretwork::attention_op::cpu {
namespace {

template <typename Acc>
constexpr Acc kNone = -std::numeric_limits<Acc>::infinity();

/// Least scale that scores may get late: without it they must not overflow.
constexpr double kLeastLate = 1e-3;

/// What rows have so far: for each head a top and a sum for each row, and rows of padded results, which hold nothing
/// as long as the sum is zero.
template <typename Acc>
struct State {
  Acc *tops = nullptr, *sums = nullptr, *out = nullptr;
};

template <typename Acc>
class Forward {
 public:
  Forward(const Problem& problem, Context& context)
      : p_(problem),
        context_(context),
        keys_(problem.depth, machine_.tiles),
        values_(problem.value_depth, machine_.tiles),
        late_(problem.softcap == 0 && problem.bias.data == nullptr && problem.slopes.data == nullptr &&
              problem.scale >= kLeastLate && problem.scale <= 1),
        unit_(static_cast<Acc>(late_ ? problem.scale : 1)),
        factor_(static_cast<Acc>((late_ ? problem.scale : 1) / kSoftmaxUnit<Acc>)) {}

  void run(Plans plans) {
    for (const PlanRange& range : batch_ranges(plans, p_.batch, p_.heads)) {
      run(range);
    }
  }

 private:
  /// Heads that share a plan, with its components.
  struct Layers {
    PlanHeads set;
    std::deque<Layer<Acc>> layers;
    bool whole;  ///< the last holds every row
    bool waits() const { return layers.size() != 1 || !whole; }
  };

  void run(const PlanRange& range) {
    std::deque<Layers> all;
    std::int64_t bytes = 0;
    for (const PlanHeads& set : head_sets(range.things, p_.heads)) {
      const auto components = in_order(*set.thing);
      Layers& layers = all.emplace_back(set);
      layers.whole = ends_whole(components);
      std::int64_t places = 0;
      for (const Component* component : components) {
        layers.layers.emplace_back(p_, *set.thing, *component, false, machine_);
        places = std::max(places, layers.layers.back().columns.places());
      }
      const std::int64_t rows = layers.waits() ? p_.heads / p_.kv_heads * p_.rows : 0;
      bytes = std::max(bytes, Memory::bytes<Acc>(places * p_.depth) + Memory::bytes<Acc>(places * values_.padded()) +
                                  2 * Memory::bytes<Acc>(rows) + Memory::bytes<Acc>(rows * values_.padded()));
    }
    // Plans inside, slices outside: each thread's slices have work, also where heads have plans of their own.
    const std::int64_t before = range.first * p_.kv_heads;
    for_slices(range.count * p_.kv_heads, bytes, false, context_,
               [&](std::int64_t first, std::int64_t last, Context& context, Memory memory) {
                 for (const Layers& layers : all) {
                   run(layers, before + first, before + last, context, memory);
                 }
               });
  }

  struct Task {
    const Layer<Acc>& layer;
    Packing<Acc>& packing;
    const Acc* keys;
    const State<Acc>* before;  ///< what rows have from components before this one, if there were any
    const State<Acc>* after;   ///< where it waits for the next, unless this is the last
  };

  void run(const Layers& of, std::int64_t first, std::int64_t last, Context& context, Memory memory) const {
    std::vector<Query> queries = queries_of(p_, of.set, first, last);
    if (queries.empty()) {
      return;
    }
    const std::vector<Head> slices = used_slices(p_, queries, first);
    State<Acc> state;
    if (of.waits()) {
      const std::int64_t rows = std::ssize(queries) * p_.rows;
      state = {memory.take<Acc>(rows), memory.take<Acc>(rows), memory.take<Acc>(rows * values_.padded())};
      std::fill_n(state.tops, rows, kNone<Acc>);
      std::fill_n(state.sums, rows, Acc{0});
    }
    for (const Layer<Acc>& layer : of.layers) {
      Memory packed = memory;
      const std::int64_t places = std::ssize(slices) * layer.columns.places();
      Acc* const keys = packed.take<Acc>(places * p_.depth);
      Acc* const values =
          layer.columns.in_place(p_.v, p_.dtype, values_) ? nullptr : packed.take<Acc>(places * values_.padded());
      Packing<Acc> packing(layer, machine_, p_.dtype, slices, {p_.k, keys_, keys, nullptr},
                           {p_.v, values_, nullptr, values}, context);
      const bool final = of.whole && &layer == &of.layers.back();
      const Task task{layer, packing, keys, &layer != &of.layers.front() ? &state : nullptr, final ? nullptr : &state};
      const TileShape& shape = layer.plan.shape;
      const double flops =
          2.0 * static_cast<double>(shape.rows * shape.cols) * static_cast<double>(p_.depth + p_.value_depth);
      share(layer.component, std::ssize(queries), flops, context, [&](std::int64_t unit, std::int64_t tile) {
        run(task, queries[static_cast<std::size_t>(unit)], unit, tile);
      });
    }
    if (!of.whole) {
      finish(queries, state, context);
    }
  }

  void run(const Task& task, const Query& query, std::int64_t unit, std::int64_t tile) const {
    const Plan& plan = task.layer.plan;
    const Component& component = task.layer.component;
    const Scores<Acc>& scores = task.layer.scores;
    Buffers& buffers = thread_buffers();
    const simd::Tiles& tiles = machine_.tiles;
    const std::int64_t side = plan.shape.rows;
    const std::int64_t width = values_.padded(), places = task.layer.columns.places();
    const std::int64_t stride = Walk::most_columns(plan) + tiles.lanes;
    buffers.tokens.assign(static_cast<std::size_t>(ceil_div(side, tiles.rows) * tiles.rows), -1);
    tokens_of(component.row_order, component.row_tiles[static_cast<std::size_t>(tile)], side, nullptr,
              buffers.tokens.data());
    const std::int64_t rows = rows_there(buffers.tokens, tiles);
    const auto tokens = std::span<const std::int64_t>(buffers.tokens).first(static_cast<std::size_t>(rows));
    const Lefts left = queries(query.head, component, tile, rows, buffers);
    Acc* const tops = need<Acc>(buffers.statistics, 3 * rows);
    Acc *const sums = tops + rows, *const factors = sums + rows;
    Acc* const out = need<Acc>(buffers.sums, rows * width);
    begin(task, unit, tokens, tops, sums, out);
    Acc* const x = need<Acc>(buffers.scores, tiles.rows * stride);
    Acc* const row = need<Acc>(buffers.row, stride);
    const Acc* const keys = task.keys + query.slice * places * p_.depth;
    const Lines<Acc> values = task.packing.second_lines(query.slice);
    task.packing.need(tile, query.slice);
    foresee(task, query, tile + 1, buffers.ahead);
    Walk walk(plan, tiles.rows, machine_.width());
    walk(component, tile, std::span(buffers.tokens).first(static_cast<std::size_t>(side)), [&](const Strip& s) {
      machine_.multiply_turned(s, left.data + s.first * left.apart, left.apart, p_.depth, keys, x, stride,
                               &buffers.ahead);
      scores.adjust(s, query.head, buffers.tokens.data() + s.first, x, stride, nullptr, row);
      machine_.rows.soften(x, stride, s.rows, s.length, factor_, tops + s.first, sums + s.first, factors);
      for (std::int64_t n = 0; n < s.rows; ++n) {
        if (factors[n] != 1) {
          machine_.rows.scale(out + (s.first + n) * width, width, factors[n]);
        }
        if (scores.dropped()) {
          scores.keep(s, query.head, buffers.tokens[static_cast<std::size_t>(s.first + n)], nullptr, row);
          machine_.rows.multiply(x + n * stride, row, s.length);
        }
      }
      machine_.multiply_lines(s, x, stride, values, values_, out + s.first * width);
    });
    end(task, query, unit, tokens, tops, sums, out);
  }

  struct Lefts {
    const Acc* data;
    std::int64_t apart;
  };

  /// The queries of a tile, in `rows` rows: where they are, if they need no scale and lie evenly and near each other
  /// (far apart, they would meet in a few places of the cache), else gathered.
  Lefts queries(Head head, const Component& component, std::int64_t tile, std::int64_t rows, Buffers& buffers) const {
    constexpr std::int64_t kNear = 1024;
    const Tile& of = component.row_tiles[static_cast<std::size_t>(tile)];
    const std::int64_t apart = component.row_order.stride[2] * p_.q.row;
    if (late_ && p_.q.col == 1 && size_of(p_.dtype) == sizeof(Acc) && of.count[0] * of.count[1] == 1 &&
        of.count[2] == rows && apart > 0 && apart * static_cast<std::int64_t>(sizeof(Acc)) <= kNear) {
      return {static_cast<const Acc*>(row_of(p_.q, p_.dtype, head, of.base)), apart};
    }
    Acc* const left = need<Acc>(buffers.left, rows * p_.depth);
    machine_.gather(p_.q, p_.dtype, head, std::span(buffers.tokens).first(static_cast<std::size_t>(rows)), p_.depth,
                    late_ ? Acc{1} : static_cast<Acc>(p_.scale), left, p_.depth);
    return {left, p_.depth};
  }

  /// What the next tile of rows will read and write.
  void foresee(const Task& task, const Query& query, std::int64_t tile, Ahead& ahead) const {
    const Component& component = task.layer.component;
    ahead.clear();
    if (tile == std::ssize(component.row_tiles)) {
      return;
    }
    task.packing.foresee(tile, query.slice, p_.depth, ahead);
    const Tile& rows = component.row_tiles[static_cast<std::size_t>(tile)];
    cpu::foresee(p_.q, p_.dtype, query.head, component.row_order, rows, p_.depth, p_.depth, ahead);
    cpu::foresee(p_.o, p_.dtype, query.head, component.row_order, rows, p_.value_depth, p_.depth, ahead);
  }

  void begin(const Task& task, std::int64_t unit, std::span<const std::int64_t> tokens, Acc* tops, Acc* sums,
             Acc* out) const {
    const std::int64_t width = values_.padded();
    for (std::size_t n = 0; n < tokens.size(); ++n, out += width) {
      const std::int64_t row = unit * p_.rows + tokens[n];
      const bool more = task.before != nullptr && tokens[n] >= 0 && task.before->sums[row] != 0;
      tops[n] = more ? task.before->tops[row] : kNone<Acc>;
      sums[n] = more ? task.before->sums[row] : 0;
      if (more) {
        std::copy_n(task.before->out + row * width, width, out);
      } else {
        std::fill_n(out, width, Acc{0});
      }
    }
  }

  void end(const Task& task, const Query& query, std::int64_t unit, std::span<const std::int64_t> tokens,
           const Acc* tops, const Acc* sums, Acc* out) const {
    const std::int64_t width = values_.padded();
    for (std::size_t n = 0; n < tokens.size(); ++n, out += width) {
      if (tokens[n] < 0) {
        continue;
      }
      if (task.after == nullptr) {
        store(query.head, tokens[n], tops[n], sums[n], out);
        continue;
      }
      const std::int64_t row = unit * p_.rows + tokens[n];
      task.after->tops[row] = tops[n];
      task.after->sums[row] = sums[n];
      std::copy_n(out, width, task.after->out + row * width);
    }
  }

  void finish(std::span<const Query> queries, const State<Acc>& state, Context& context) const {
    const std::int64_t width = values_.padded(), grain = std::max<std::int64_t>(1, (std::int64_t{1} << 16) / width);
    context.executor->parallel_for(std::ssize(queries) * p_.rows, grain, [&](std::int64_t first, std::int64_t last) {
      for (std::int64_t row = first; row < last; ++row) {
        store(queries[static_cast<std::size_t>(row / p_.rows)].head, row % p_.rows, state.tops[row], state.sums[row],
              state.out + row * width);
      }
    });
  }

  /// One more score joins a row's sum; `share` is what the other ones keep. −inf is no score.
  void join_sink(Head head, std::int64_t token, Acc& top, Acc& sum, Acc& share) const {
    const Acc sink = read_element<Acc>(p_.sinks.data, p_.sinks.dtype, head.head * p_.sinks.head + token * p_.sinks.row);
    if (sink == kNone<Acc>) {
      return;
    }
    const Acc most = sum == 0 ? sink : std::max(top, sink);
    share = sum == 0 ? Acc{0} : std::exp(top - most);
    sum = sum * share + std::exp(sink - most);
    top = most;
  }

  /// A row with no element is zeros, whatever the values of other rows were. `top` is a score as the softmax has it.
  void store(Head head, std::int64_t token, Acc top, Acc sum, Acc* out) const {
    if (sum == 0) {
      std::fill_n(out, p_.value_depth, Acc{0});
    }
    top *= unit_;
    Acc share = 1;
    if (p_.sinks.data != nullptr) {
      join_sink(head, token, top, sum, share);
    }
    machine_.rows.narrow(out, p_.value_depth, sum == 0 ? Acc{0} : share / sum, row_of(p_.o, p_.dtype, head, token),
                         p_.dtype, p_.o.col);
    const auto put = [&](const Operand& to, Acc value) {
      if (to.data != nullptr) {
        static_cast<Acc*>(to.data)[head.batch * to.batch + head.head * to.head + token * to.row] = value;
      }
    };
    if (sum == 0) {
      put(p_.lse, kNone<Acc>);
      put(p_.lse_rest, 0);
      return;
    }
    if (p_.lse.data == nullptr && p_.lse_rest.data == nullptr) {
      return;
    }
    const Acc high = top, low = std::log(sum), both = high + low, of_low = both - high;
    put(p_.lse, both);
    put(p_.lse_rest, (high - (both - of_low)) + (low - of_low));  // exact, whichever of the two is larger
  }

  const Problem& p_;
  Context& context_;
  Machine<Acc> machine_;
  Split keys_, values_;
  bool late_;   ///< scores get their scale in the softmax, not through the queries
  Acc unit_;    ///< what a score is worth there
  Acc factor_;  ///< the same in the softmax's unit
};

}  // namespace

void forward(const Problem& problem, Plans plans, Context& context) {
  problem.dtype == DType::f64 ? Forward<double>(problem, context).run(plans)
                              : Forward<float>(problem, context).run(plans);
}

}  // namespace fretwork::attention_op::cpu
