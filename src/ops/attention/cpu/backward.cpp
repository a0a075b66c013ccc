// Attention on the CPU, backward. Where there are key heads enough, or little work for each, one thread takes a key
// head and computes all gradients from the same scores: five products. Else the gradient of queries uses the plan of
// the pattern, those of keys and values the plan of the transposed pattern, and both recompute the scores: seven
// products, whose tiles are shared by all threads. Which of the two does not depend on the number of threads, and one
// task sums a gradient in a fixed order, so results do not either.
#include <algorithm>
#include <cmath>
#include <deque>
#include <limits>
#include <optional>

#include "ops/attention/cpu/score_gradients.h"
#include "ops/attention/cpu/strips.h"

namespace fretwork::attention_op::cpu {
namespace {

/// The gradient of the bias while it is summed. Places of one task's rows are no other's: rows of queries, or, where
/// the bias is the same for all of them, rows of keys.
template <typename Acc>
class BiasSums {
 public:
  BiasSums(const BackwardProblem& b, Context& context)
      : b_(b),
        by_key_(b.bias_sizes[2] != b.forward.rows && b.bias_sizes[3] != 1),
        rows_(by_key_ ? 1 : std::max<std::int64_t>(b.forward.rows, 1)),  // one number has a place without queries too
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
        gradients_(problem, machine_, context) {
    if (b_.d_bias.data != nullptr) {
      bias_.emplace(b_, context);
    }
  }

  void run(Plans plans, Plans transposed) {
    gradients_.prepare(plans);
    if (b_.d_sinks.data != nullptr) {
      gradients_.store_sinks();
    }
    if (one_pass(plans)) {
      for (const PlanRange& range : batch_ranges(plans, p_.batch, p_.heads)) {
        all_gradients(range);
      }
      clear_padding(b_.d_k, p_.depth);
      clear_padding(b_.d_v, p_.value_depth);
      return;
    }
    if (b_.d_q.data != nullptr || (bias_ && !bias_->by_key())) {
      for (const PlanRange& range : batch_ranges(plans, p_.batch, p_.heads)) {
        run(range, false);
      }
    }
    if (b_.d_k.data != nullptr || b_.d_v.data != nullptr || (bias_ && bias_->by_key())) {
      const Acc *const lse = gradients_.lse(), *const end = lse + p_.batch * p_.heads * p_.rows;
      const bool blind = std::find(lse, end, std::numeric_limits<Acc>::infinity()) != end;
      for (const PlanRange& range : batch_ranges(transposed, p_.batch, p_.heads)) {
        run(range, true, blind ? lse : nullptr);
      }
      clear_padding(b_.d_k, p_.depth);
      clear_padding(b_.d_v, p_.value_depth);
    }
    if (bias_) {
      bias_->store(machine_.rows);
    }
  }

 private:
  using Pass = BackwardPass<Acc>;

  /// What one task sums up for a tile of rows.
  struct Unit {
    std::int64_t number;  ///< of a key head or of a query head, among those at hand; or of a group of the bias
    std::vector<Member> members;
  };
  /// The gradients of some rows, and what they have so far, if they have parts.
  struct Sums {
    const Operand& to;  ///< absent: not wanted
    const Split& split;
    Acc factor;
    Acc* so_far = nullptr;
    bool wanted() const { return to.data != nullptr; }
  };
  /// Of queries, or of keys (first) and values (second).
  struct Target {
    Sums first, second;
    bool adds = false;   ///< something was summed before
    bool stays = false;  ///< something is summed after
  };
  /// Heads that share a plan, with its components.
  struct Layers {
    PlanHeads set;
    std::deque<Layer<Acc>> layers;
    bool whole;  ///< the last holds every row
  };

  /// Products for each key head that one thread may do alone, and key heads that are enough for any number of threads.
  static constexpr std::int64_t kFewProducts = 1 << 25, kManySlices = 16;

  /// Whether all gradients come from the same scores. Heads that share keys have one plan, with one component.
  bool one_pass(Plans plans) const {
    const auto one_component = [](const auto& plan) { return plan->components.size() == 1; };
    const std::int64_t products = p_.heads / p_.kv_heads * p_.rows * p_.cols * (p_.depth + p_.value_depth);
    return b_.d_q.data != nullptr && b_.d_k.data != nullptr && b_.d_v.data != nullptr && !bias_ &&
           (products <= kFewProducts || p_.batch * p_.kv_heads >= kManySlices) &&
           std::ranges::all_of(plans, one_component) &&
           std::ranges::all_of(plans, [&](const auto& plan) { return plan == plans[0]; }) &&
           plans[0]->components[0].covers_rows;
  }

  /// Strips of a tile whose columns begin at the same place, for one product of all their rows.
  struct StripGroup {
    struct Part {
      std::int64_t first, rows, begin, end;  ///< rows of the tile; columns of its scores
    };
    std::vector<Part> parts;
    std::int64_t shift = 0;  ///< from a column of the scores to its place
    std::int64_t begin = 0, end = 0;
    std::int64_t work = 0;  ///< rows · columns of the parts

    /// Whether a part goes with those that are there: the columns that it lacks are not many.
    bool takes(const Part& part, std::int64_t shift_of_part) const {
      const std::int64_t columns = std::max(end, part.end) - std::min(begin, part.begin);
      const std::int64_t rows = part.first + part.rows - parts.front().first;
      return shift_of_part == shift && rows * columns <= (work + part.rows * (part.end - part.begin)) * 3 / 2;
    }
    void add(const Part& part, std::int64_t shift_of_part) {
      begin = parts.empty() ? part.begin : std::min(begin, part.begin);
      end = parts.empty() ? part.end : std::max(end, part.end);
      work = (parts.empty() ? 0 : work) + part.rows * (part.end - part.begin);
      shift = shift_of_part;
      parts.push_back(part);
    }
  };

  /// One key head: its packed columns, and the sums of its gradients by place.
  struct Slice {
    const Pass& pass;
    std::int64_t number;
    Acc *d_keys, *d_values;
  };

  void all_gradients(const PlanRange& range) {
    const PlanHeads set = head_sets(range.things, p_.heads)[0];
    const Layer<Acc> layer(p_, *set.thing, set.thing->components[0], false, machine_);
    const std::int64_t places = layer.columns.places(), sums = places + machine_.tiles.rows;
    const std::int64_t features = keys_.padded() + values_.padded();
    const std::int64_t bytes = Memory::bytes<Acc>((2 * places + sums) * features) + kPieces * Memory::bytes<Acc>(1);
    const std::int64_t before = range.first * p_.kv_heads;
    for_slices(
        range.count * p_.kv_heads, bytes, false, context_,
        [&](std::int64_t first, std::int64_t last, Context& context, Memory memory) {
          const std::vector<Head> heads = key_heads(p_, before + first, before + last);
          const std::vector<Query> queries = queries_of(p_, set, before + first, before + last);
          const std::int64_t count = last - first;
          Acc* const turned_keys = memory.take<Acc>(count * places * p_.depth);
          Acc* const turned_values = memory.take<Acc>(count * places * p_.value_depth);
          Acc* const keys = layer.columns.in_place(p_.k, p_.dtype, keys_)
                                ? nullptr
                                : memory.take<Acc>(count * places * keys_.padded());
          Packing<Acc> packing(layer, machine_, p_.dtype, heads, {p_.k, keys_, turned_keys, keys},
                               {p_.v, values_, turned_values, nullptr}, context);
          const Pass pass{false, layer, packing, turned_keys, turned_values, nullptr, nullptr, nullptr, nullptr};
          Acc* const d_keys = memory.take<Acc>(count * sums * keys_.padded());
          Acc* const d_values = memory.take<Acc>(count * sums * values_.padded());
          context.executor->parallel_for(count, 1, [&](std::int64_t begin, std::int64_t end) {
            for (std::int64_t n = begin; n < end; ++n) {
              const Slice slice{pass, n, d_keys + n * sums * keys_.padded(), d_values + n * sums * values_.padded()};
              std::fill_n(slice.d_keys, sums * keys_.padded(), Acc{0});
              std::fill_n(slice.d_values, sums * values_.padded(), Acc{0});
              for (const Query& query : queries) {
                for (std::int64_t tile = 0; query.slice == n && tile < std::ssize(layer.component.row_tiles); ++tile) {
                  all_gradients(slice, query, tile);
                }
              }
              store_keys(slice, heads[static_cast<std::size_t>(n)]);
            }
          });
        });
  }

  /// Adds what the strips of a group give to the gradients of keys and values; the group is empty then. x and g are the
  /// strips' probabilities and gradients, in rows `stride` apart.
  void add_group(StripGroup& group, const Slice& slice, Acc* x, Acc* g, std::int64_t stride, const Acc* left,
                 const Acc* more_left) const {
    const std::int64_t width = keys_.padded(), value_width = values_.padded();
    for (const auto& part : group.parts) {
      for (std::int64_t n = part.first; n < part.first + part.rows; ++n) {
        for (Acc* const row : {x + n * stride, g + n * stride}) {
          std::fill(row + group.begin, row + part.begin, Acc{0});
          std::fill(row + part.end, row + group.end, Acc{0});
        }
      }
    }
    if (!group.parts.empty()) {
      const std::int64_t first = group.parts.front().first, count = group.parts.back().first - first;
      const std::int64_t at = first * stride + group.begin, all = count + group.parts.back().rows;
      const std::int64_t columns = group.end - group.begin, place = group.begin + group.shift;
      machine_.multiply_columns(g + at, stride, all, columns, left + first * width, keys_,
                                slice.d_keys + place * width);
      machine_.multiply_columns(x + at, stride, all, columns, more_left + first * value_width, values_,
                                slice.d_values + place * value_width);
    }
    group.parts.clear();
  }

  /// Adds what a tile of queries gives to the gradients of keys and values, and stores that of the queries.
  void all_gradients(const Slice& slice, const Query& query, std::int64_t tile) const {
    Buffers& buffers = thread_buffers();
    const Pass& pass = slice.pass;
    const Plan& plan = pass.layer.plan;
    const Component& component = pass.layer.component;
    const std::int64_t side = plan.shape.rows;
    const std::int64_t stride = Walk::most_columns(plan) + machine_.tiles.lanes;
    const std::int64_t width = keys_.padded(), value_width = values_.padded(), places = pass.layer.columns.places();
    auto& tokens = buffers.tokens;
    tokens.assign(static_cast<std::size_t>(ceil_div(side, machine_.tiles.rows) * machine_.tiles.rows), -1);
    tokens_of(component.row_order, component.row_tiles[static_cast<std::size_t>(tile)], side, nullptr, tokens.data());
    const std::int64_t rows = rows_there(tokens, machine_.tiles);
    Acc* const left = need<Acc>(buffers.left, rows * width);
    Acc* const more_left = need<Acc>(buffers.more_left, rows * value_width);
    load_used_rows(query.head, std::span(tokens).first(static_cast<std::size_t>(rows)), left, more_left);
    Acc* const sums = need<Acc>(buffers.sums, rows * width);
    std::fill_n(sums, rows * width, Acc{0});
    Acc* const x = need<Acc>(buffers.scores, rows * stride);
    Acc* const g = need<Acc>(buffers.gradients, rows * stride);
    pass.packing.need(tile, slice.number);
    const auto lines = pass.packing.first_lines(slice.number);
    const Member member{query.head, query.head, slice.number};
    StripGroup group;
    const auto add = [&] { add_group(group, slice, x, g, stride, left, more_left); };
    Walk walk(plan, machine_.tiles.rows, machine_.width());
    walk(component, tile, std::span<const std::int64_t>(tokens).first(static_cast<std::size_t>(side)),
         [&](const Strip& s) {
           // Scores of earlier strips stay until their group is complete, which ends where rows begin again.
           if (!group.parts.empty() && s.first <= group.parts.back().first) {
             add();
           }
           Acc *const strip_x = x + s.first * stride, *const strip_g = g + s.first * stride;
           machine_.multiply_turned(s, left + s.first * width, width, p_.depth,
                                    pass.turned + slice.number * places * p_.depth, strip_x, stride);
           machine_.multiply_turned(s, more_left + s.first * value_width, value_width, p_.value_depth,
                                    pass.turned_gradients + slice.number * places * p_.value_depth, strip_g, stride);
           gradients_(pass, member, s, tokens.data() + s.first, strip_x, strip_g, stride, true);
           machine_.multiply_lines(s, strip_g, stride, lines, keys_, sums + s.first * width);
           for (const Span& span : s.spans) {
             const typename StripGroup::Part part{s.first, s.rows, span.at, span.at + span.length};
             if (!group.parts.empty() && (s.spans.size() > 1 || part.first == group.parts.back().first ||
                                          !group.takes(part, span.place - span.at))) {
               add();
             }
             group.add(part, span.place - span.at);
           }
         });
    add();
    for (std::int64_t n = 0; n < side; ++n) {
      if (const std::int64_t token = tokens[static_cast<std::size_t>(n)]; token >= 0) {
        machine_.rows.narrow(sums + n * width, p_.depth, static_cast<Acc>(p_.scale),
                             row_of(b_.d_q, p_.dtype, query.head, token), p_.dtype, b_.d_q.col);
      }
    }
  }

  /// Queries, scaled, and gradients of results, in rows of whole vectors. Those of a query that sees no key are zeros.
  void load_used_rows(Head head, std::span<const std::int64_t> tokens, Acc* left, Acc* more_left) const {
    const std::int64_t before = (head.batch * p_.heads + head.head) * p_.rows;
    std::vector<std::int64_t>& used = thread_buffers().used;
    used.assign(tokens.begin(), tokens.end());
    std::ranges::replace_if(
        used, [&](std::int64_t token) { return token >= 0 && std::isinf(gradients_.lse()[before + token]); }, -1);
    std::fill_n(left, std::ssize(tokens) * keys_.padded(), Acc{0});
    std::fill_n(more_left, std::ssize(tokens) * values_.padded(), Acc{0});
    machine_.gather(p_.q, p_.dtype, head, used, p_.depth, static_cast<Acc>(p_.scale), left, keys_.padded());
    machine_.gather(b_.d_o, p_.dtype, head, used, p_.value_depth, 1, more_left, values_.padded());
  }

  /// A key may have several places, where tiles of columns overlap, and one that no query sees may have none.
  void store_keys(const Slice& slice, Head head) const {
    const Columns<Acc>& columns = slice.pass.layer.columns;
    std::vector<std::int64_t>& places = thread_buffers().used;
    places.assign(static_cast<std::size_t>(p_.cols), columns.places());  // where sums stay zero
    for (std::int64_t place = 0; place < columns.places(); ++place) {
      const std::int64_t token = columns.tokens()[place];
      if (token < 0) {
        continue;
      }
      std::int64_t& first = places[static_cast<std::size_t>(token)];
      if (first == columns.places()) {
        first = place;
        continue;
      }
      machine_.rows.add(slice.d_keys + first * keys_.padded(), slice.d_keys + place * keys_.padded(), keys_.padded());
      machine_.rows.add(slice.d_values + first * values_.padded(), slice.d_values + place * values_.padded(),
                        values_.padded());
    }
    std::fill_n(slice.d_keys + columns.places() * keys_.padded(), keys_.padded(), Acc{0});
    std::fill_n(slice.d_values + columns.places() * values_.padded(), values_.padded(), Acc{0});
    for (std::int64_t token = 0; token < p_.cols; ++token) {
      const std::int64_t place = places[static_cast<std::size_t>(token)];
      machine_.rows.narrow(slice.d_keys + place * keys_.padded(), p_.depth, Acc{1},
                           row_of(b_.d_k, p_.dtype, head, token), p_.dtype, b_.d_k.col);
      machine_.rows.narrow(slice.d_values + place * values_.padded(), p_.value_depth, Acc{1},
                           row_of(b_.d_v, p_.dtype, head, token), p_.dtype, b_.d_v.col);
    }
  }

  /// Keys that are not seen have zero gradients.
  void clear_padding(const Operand& gradient, std::int64_t depth) const {
    if (p_.padding.data == nullptr || gradient.data == nullptr) {
      return;
    }
    const std::vector<Acc> zeros(static_cast<std::size_t>(depth));
    for (std::int64_t n = 0; n < p_.batch * p_.kv_heads * p_.cols; ++n) {
      const Head head{n / p_.cols / p_.kv_heads, n / p_.cols % p_.kv_heads};
      if (const std::int64_t key = n % p_.cols; p_.padding(head.batch, key)) {
        machine_.rows.narrow(zeros.data(), depth, 1, row_of(gradient, p_.dtype, head, key), p_.dtype, gradient.col);
      }
    }
  }

  /// `lse`: of all queries, where some see no key and columns are queries.
  void run(const PlanRange& range, bool transposed, const Acc* lse = nullptr) {
    std::deque<Layers> all;
    std::int64_t places = 0;
    for (const PlanHeads& set : head_sets(range.things, p_.heads)) {
      const auto components = in_order(*set.thing);
      Layers& layers = all.emplace_back(set);
      layers.whole = ends_whole(components);
      for (const Component* component : components) {
        layers.layers.emplace_back(p_, *set.thing, *component, transposed, machine_, lse);
        places = std::max(places, layers.layers.back().columns.places());
      }
    }
    const std::int64_t heads = p_.heads / p_.kv_heads, features = keys_.padded() + values_.padded();
    const std::int64_t columns = transposed ? heads * places : places;
    const std::int64_t rows = transposed ? p_.cols : heads * p_.rows;
    const std::int64_t bytes = Memory::bytes<Acc>(columns * (2 * features + 4)) + Memory::bytes<Acc>(rows * features) +
                               kPieces * Memory::bytes<Acc>(1);
    const bool together = bias_ && bias_->by_key() == transposed;
    const std::int64_t before = range.first * p_.kv_heads;
    for_slices(range.count * p_.kv_heads, bytes, together, context_,
               [&](std::int64_t first, std::int64_t last, Context& context, Memory memory) {
                 transposed ? key_gradients(all, before + first, before + last, context, memory)
                            : query_gradients(all, before + first, before + last, context, memory);
               });
  }
  /// Most pieces that a range takes of its memory.
  static constexpr std::int64_t kPieces = 10;

  /// Rows' sums as they wait for the next component, zeros at first.
  void make_sums(Sums& sums, std::int64_t rows, Memory& memory) const {
    if (sums.wanted()) {
      sums.so_far = memory.take<Acc>(rows * sums.split.padded());
      std::fill_n(sums.so_far, rows * sums.split.padded(), Acc{0});
    }
  }

  void query_gradients(const std::deque<Layers>& all, std::int64_t first, std::int64_t last, Context& context,
                       Memory memory) {
    const std::vector<Head> slices = key_heads(p_, first, last);
    for (const Layers& layers : all) {
      std::vector<Unit> units;
      std::vector<Head> rows;
      for (const Query& query : queries_of(p_, layers.set, first, last)) {
        units.push_back({std::ssize(units), {{query.head, query.head, query.slice}}});
        rows.push_back(query.head);
      }
      Memory rest = memory;
      Target target{{b_.d_q, keys_, static_cast<Acc>(p_.scale)}, {kAbsent, values_, 1}};
      if (layers.layers.size() != 1 || !layers.whole) {
        make_sums(target.first, std::ssize(units) * p_.rows, rest);
      }
      for (const Layer<Acc>& layer : layers.layers) {
        target.adds = &layer != &layers.layers.front();
        target.stays = !layers.whole || &layer != &layers.layers.back();
        query_component(layer, slices, units, target, context, rest);
      }
      if (!layers.whole) {
        finish(target.first, rows, p_.rows, context);
      }
    }
  }

  void query_component(const Layer<Acc>& layer, std::span<const Head> slices, const std::vector<Unit>& units,
                       const Target& target, Context& context, Memory memory) {
    const std::int64_t places = layer.columns.places() * std::ssize(slices);
    Acc* const turned_keys = memory.take<Acc>(places * p_.depth);
    Acc* const turned_values = memory.take<Acc>(places * p_.value_depth);
    Acc* const keys = target.first.wanted() && !layer.columns.in_place(p_.k, p_.dtype, keys_)
                          ? memory.take<Acc>(places * keys_.padded())
                          : nullptr;
    Packing<Acc> packing(layer, machine_, p_.dtype, slices, {p_.k, keys_, turned_keys, keys},
                         {p_.v, values_, turned_values, nullptr}, context);
    run({false, layer, packing, turned_keys, turned_values, nullptr, nullptr, nullptr, nullptr}, units, target,
        context);
  }

  void key_gradients(const std::deque<Layers>& all, std::int64_t first, std::int64_t last, Context& context,
                     Memory memory) {
    const std::vector<Head> slices = key_heads(p_, first, last);
    Target target{{b_.d_k, keys_, static_cast<Acc>(p_.scale)}, {b_.d_v, values_, 1}};
    const bool whole = all.size() == 1 && all.front().whole;
    if (!whole || all.front().layers.size() != 1) {
      make_sums(target.first, std::ssize(slices) * p_.cols, memory);
      make_sums(target.second, std::ssize(slices) * p_.cols, memory);
    }
    for (const Layers& layers : all) {
      std::vector<Unit> units;
      std::vector<Head> heads;
      for (const Query& query : queries_of(p_, layers.set, first, last)) {
        if (units.empty() || units.back().number != query.slice) {
          units.push_back({query.slice, {}});
        }
        units.back().members.push_back({query.head, slices[static_cast<std::size_t>(query.slice)], std::ssize(heads)});
        heads.push_back(query.head);
      }
      for (const Layer<Acc>& layer : layers.layers) {
        target.adds = target.first.so_far != nullptr || target.second.so_far != nullptr;
        target.stays = !whole || &layer != &layers.layers.back();
        key_component(layer, heads, units, target, context, memory);
      }
    }
    if (!whole) {
      finish(target.first, slices, p_.cols, context);
      finish(target.second, slices, p_.cols, context);
    }
  }

  void key_component(const Layer<Acc>& layer, std::span<const Head> heads, const std::vector<Unit>& units,
                     const Target& target, Context& context, Memory memory) {
    const std::int64_t places = layer.columns.places() * std::ssize(heads);
    Acc* const turned_queries = memory.take<Acc>(places * p_.depth);
    Acc* const turned_gradients = memory.take<Acc>(places * p_.value_depth);
    Acc* const queries = target.first.wanted() && !layer.columns.in_place(p_.q, p_.dtype, keys_)
                             ? memory.take<Acc>(places * keys_.padded())
                             : nullptr;
    Acc* const gradients = target.second.wanted() && !layer.columns.in_place(b_.d_o, p_.dtype, values_)
                               ? memory.take<Acc>(places * values_.padded())
                               : nullptr;
    Packing<Acc> packing(layer, machine_, p_.dtype, heads, {p_.q, keys_, turned_queries, queries},
                         {b_.d_o, values_, turned_gradients, gradients}, context);
    Acc* const lse = memory.take<Acc>(places);
    Acc* const rest = gradients_.rest() != nullptr ? memory.take<Acc>(places) : nullptr;
    Acc* const delta = memory.take<Acc>(places);
    unsigned* const states = layer.scores.dropped() ? memory.take<unsigned>(places) : nullptr;
    context.executor->parallel_for(places, 1 << 13, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t n = begin; n < end; ++n) {
        const Head head = heads[static_cast<std::size_t>(n / layer.columns.places())];
        const std::int64_t token = layer.columns.tokens()[n % layer.columns.places()];
        const std::int64_t at = (head.batch * p_.heads + head.head) * p_.rows + token;
        lse[n] = token < 0 ? std::numeric_limits<Acc>::infinity() : gradients_.lse()[at];
        delta[n] = token < 0 ? 0 : gradients_.delta()[at];
        if (rest != nullptr) {
          rest[n] = token < 0 ? 0 : gradients_.rest()[at];
        }
        if (states != nullptr) {
          states[n] = layer.scores.state(head, token);
        }
      }
    });
    run({true, layer, packing, turned_queries, turned_gradients, lse, rest, delta, states}, units, target, context);
  }

  /// The rows' gradients, and then those of the bias, if these rows sum it up.
  void run(const Pass& pass, const std::vector<Unit>& units, const Target& target, Context& context) {
    const TileShape& shape = pass.layer.plan.shape;
    const double flops =
        6.0 * static_cast<double>(shape.rows * shape.cols) * static_cast<double>(p_.depth + p_.value_depth);
    const auto go = [&](const std::vector<Unit>& of, const Target* to) {
      share(pass.layer.component, std::ssize(of), flops, context,
            [&](std::int64_t unit, std::int64_t tile) { run(pass, of[static_cast<std::size_t>(unit)], tile, to); });
    };
    if (target.first.wanted() || target.second.wanted()) {
      go(units, &target);
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
      go(groups, nullptr);
    }
  }

  /// Without a target it is the bias whose gradient is summed.
  void run(const Pass& pass, const Unit& unit, std::int64_t tile, const Target* target) const {
    Buffers& buffers = thread_buffers();
    const Plan& plan = pass.layer.plan;
    const Component& component = pass.layer.component;
    const simd::Tiles& tiles = machine_.tiles;
    const std::int64_t side = plan.shape.rows, rows = ceil_div(side, tiles.rows) * tiles.rows;
    const std::int64_t stride = Walk::most_columns(plan) + tiles.lanes;
    auto& tokens = buffers.tokens;
    tokens.assign(static_cast<std::size_t>(rows), -1);
    tokens_of(component.row_order, component.row_tiles[static_cast<std::size_t>(tile)], side, nullptr, tokens.data());
    Acc* const left = need<Acc>(buffers.left, rows * p_.depth);
    Acc* const more_left = need<Acc>(buffers.more_left, rows * p_.value_depth);
    Acc* const sums = need<Acc>(buffers.sums, rows * keys_.padded());
    Acc* const more_sums = need<Acc>(buffers.more_sums, rows * values_.padded());
    const bool first = target != nullptr && target->first.wanted(),
               second = target != nullptr && target->second.wanted();
    std::fill_n(sums, first ? rows * keys_.padded() : 0, Acc{0});
    std::fill_n(more_sums, second ? rows * values_.padded() : 0, Acc{0});
    Acc* const x = need<Acc>(buffers.scores, tiles.rows * stride);
    Acc* const g = need<Acc>(buffers.gradients, tiles.rows * stride);
    Walk walk(plan, tiles.rows, machine_.width());
    const Member* loaded = nullptr;
    for (const Member& member : unit.members) {
      if (loaded == nullptr || loaded->row != member.row) {
        load_rows(pass, member.row, tile, tokens, left, more_left);
        loaded = &member;
      }
      pass.packing.need(tile, member.columns);
      const auto lines = first ? pass.packing.first_lines(member.columns) : Lines<Acc>{};
      const auto gradient_lines = second ? pass.packing.second_lines(member.columns) : Lines<Acc>{};
      const std::int64_t places = pass.layer.columns.places(), before = member.columns * places;
      const auto row_tokens = std::span<const std::int64_t>(tokens).first(static_cast<std::size_t>(side));
      walk(component, tile, row_tokens, [&](const Strip& s) {
        machine_.multiply_turned(s, left + s.first * p_.depth, p_.depth, p_.depth, pass.turned + before * p_.depth, x,
                                 stride);
        machine_.multiply_turned(s, more_left + s.first * p_.value_depth, p_.value_depth, p_.value_depth,
                                 pass.turned_gradients + before * p_.value_depth, g, stride);
        gradients_(pass, member, s, tokens.data() + s.first, x, g, stride, target != nullptr);
        if (first) {
          machine_.multiply_lines(s, g, stride, lines, keys_, sums + s.first * keys_.padded());
        }
        if (second) {
          machine_.multiply_lines(s, x, stride, gradient_lines, values_, more_sums + s.first * values_.padded());
        }
        for (std::int64_t n = 0; target == nullptr && n < s.rows; ++n) {
          if (const std::int64_t token = tokens[static_cast<std::size_t>(s.first + n)]; token >= 0) {
            bias_->add(unit.number, s, token, pass.layer.columns.tokens(), g + n * stride);
          }
        }
      });
    }
    if (target != nullptr) {
      store_rows(*target, pass, unit, std::span<const std::int64_t>(tokens).first(static_cast<std::size_t>(side)), sums,
                 more_sums);
    }
  }

  /// The two operands of a tile's rows, of one head; rows of padding keys are left out.
  void load_rows(const Pass& pass, const Head& head, std::int64_t tile, std::vector<std::int64_t>& tokens, Acc* left,
                 Acc* more_left) const {
    if (pass.transposed && p_.padding.data != nullptr) {
      const Component& component = pass.layer.component;
      tokens_of(component.row_order, component.row_tiles[static_cast<std::size_t>(tile)], pass.layer.plan.shape.rows,
                nullptr, tokens.data());
      std::ranges::replace_if(
          tokens, [&](std::int64_t key) { return key >= 0 && p_.padding(head.batch, key); }, -1);
    }
    machine_.gather(pass.transposed ? p_.k : p_.q, p_.dtype, head, tokens, p_.depth, static_cast<Acc>(p_.scale), left,
                    p_.depth);
    machine_.gather(pass.transposed ? p_.v : b_.d_o, p_.dtype, head, tokens, p_.value_depth, 1, more_left,
                    p_.value_depth);
  }

  void store_rows(const Target& target, const Pass& pass, const Unit& unit, std::span<const std::int64_t> tokens,
                  Acc* sums, Acc* more_sums) const {
    const std::int64_t before = unit.number * (pass.transposed ? p_.cols : p_.rows);
    for (std::size_t n = 0; n < tokens.size(); ++n) {
      if (const std::int64_t token = tokens[n], row = static_cast<std::int64_t>(n); token >= 0) {
        store(target, target.first, before + token, unit.members[0].row, token, sums + row * keys_.padded());
        store(target, target.second, before + token, unit.members[0].row, token, more_sums + row * values_.padded());
      }
    }
  }

  void store(const Target& target, const Sums& to, std::int64_t row, Head head, std::int64_t token, Acc* sums) const {
    if (!to.wanted()) {
      return;
    }
    const std::int64_t width = to.split.padded();
    if (target.stays) {
      machine_.rows.add(to.so_far + row * width, sums, width);
      return;
    }
    if (target.adds) {
      machine_.rows.add(sums, to.so_far + row * width, width);
    }
    machine_.rows.narrow(sums, to.split.depth(), to.factor, row_of(to.to, p_.dtype, head, token), p_.dtype, to.to.col);
  }

  void finish(const Sums& sums, std::span<const Head> heads, std::int64_t rows, Context& context) const {
    if (!sums.wanted()) {
      return;
    }
    const std::int64_t width = sums.split.padded(), grain = std::max<std::int64_t>(1, (std::int64_t{1} << 16) / width);
    context.executor->parallel_for(std::ssize(heads) * rows, grain, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t n = begin; n < end; ++n) {
        machine_.rows.narrow(sums.so_far + n * width, sums.split.depth(), sums.factor,
                             row_of(sums.to, p_.dtype, heads[static_cast<std::size_t>(n / rows)], n % rows), p_.dtype,
                             sums.to.col);
      }
    });
  }

  static constexpr Operand kAbsent{};
  const BackwardProblem& b_;
  const Problem& p_;
  Context& context_;
  Machine<Acc> machine_;
  Split keys_, values_;
  ScoreGradients<Acc> gradients_;
  std::optional<BiasSums<Acc>> bias_;
};

}  // namespace

void backward(const BackwardProblem& problem, Plans plans, Plans transposed, Context& context) {
  problem.forward.dtype == DType::f64 ? Backward<double>(problem, context).run(plans, transposed)
                                      : Backward<float>(problem, context).run(plans, transposed);
}

}  // namespace fretwork::attention_op::cpu
