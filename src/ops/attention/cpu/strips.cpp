// Walking a plan, packing operands, and the products of strips: see strips.h. What is done to scores is in scores.cpp.
#include "ops/attention/cpu/strips.h"

#include <algorithm>
#include <array>
#include <bit>
#include <limits>

namespace fretwork::attention_op::cpu {
namespace {

/// Stretches per thread, and the least work worth one.
constexpr std::int64_t kStretches = 4;
constexpr double kLeastFlops = 2e6;
/// Rows fetched ahead of those being gathered.
constexpr std::size_t kRowsAhead = 6;
/// What a strip's look at a tile costs beside its columns.
constexpr std::int64_t kPieceCost = 8;
/// What a tile of rows costs beside its pairs, in quarters of a pair.
constexpr std::int64_t kPairCost = 4;
/// Packed operands of key heads that a thread works on together: they leave room in a second-level cache of 1 MB.
constexpr std::int64_t kTogetherBytes = 128 << 10;

struct Range {
  std::int64_t begin, end;
};

/// The columns of a tile pair that some of the rows [first, first + rows) meet.
Range met(const Plan& plan, std::int32_t index, std::int64_t first, std::int64_t rows) {
  const std::int64_t cols = plan.shape.cols;
  if (index < 0) {
    return {0, cols};
  }
  const Mask& mask = plan.masks[static_cast<std::size_t>(index)];
  rows = std::min(rows, plan.shape.rows - first);
  Range range{cols, 0};
  if (mask.rows >= 0) {
    for (const Interval& row :
         std::span(plan.intervals)
             .subspan(static_cast<std::size_t>(mask.rows + first), static_cast<std::size_t>(rows))) {
      if (row.begin < row.end) {
        range.begin = std::min<std::int64_t>(range.begin, row.begin);
        range.end = std::max<std::int64_t>(range.end, row.end);
      }
    }
    return range;
  }
  if (mask.bits < 0) {
    return {std::max<std::int64_t>(first + mask.low, 0),
            std::min<std::int64_t>({first + rows + mask.high, mask.limit, cols})};
  }
  const std::uint32_t* words = plan.bits.data() + mask.bits + first * cols / 32;
  for (std::int64_t r = 0; r < rows; ++r) {
    for (std::int64_t n = 0; n < cols; n += 32) {
      if (const std::uint32_t word = *words++; word != 0) {
        range.begin = std::min<std::int64_t>(range.begin, n + std::countr_zero(word));
        range.end = std::max<std::int64_t>(range.end, n + 32 - std::countl_zero(word));
      }
    }
  }
  return range;
}

}  // namespace

std::vector<Head> key_heads(const Problem& problem, std::int64_t first, std::int64_t last) {
  std::vector<Head> heads;
  for (std::int64_t slice = first; slice < last; ++slice) {
    heads.push_back({slice / problem.kv_heads, slice % problem.kv_heads});
  }
  return heads;
}

std::vector<Query> queries_of(const Problem& problem, const PlanHeads& set, std::int64_t first, std::int64_t last) {
  std::vector<Query> queries;
  const std::int64_t group = problem.heads / problem.kv_heads;
  for (std::int64_t slice = first; slice < last; ++slice) {
    const std::int64_t before = slice % problem.kv_heads * group;
    for (auto h = std::ranges::lower_bound(set.heads, before); h != set.heads.end() && *h < before + group; ++h) {
      queries.push_back({{slice / problem.kv_heads, *h}, slice - first});
    }
  }
  return queries;
}

std::vector<Head> used_slices(const Problem& problem, std::vector<Query>& queries, std::int64_t first) {
  std::vector<Head> used;
  std::int64_t last = -1;
  for (Query& query : queries) {  // in the order of their slices
    if (query.slice != last) {
      last = query.slice;
      used.push_back({(first + last) / problem.kv_heads, (first + last) % problem.kv_heads});
    }
    query.slice = std::ssize(used) - 1;
  }
  return used;
}

std::vector<const Component*> in_order(const Plan& plan) {
  std::vector<const Component*> components;
  for (const Component& component : plan.components) {
    components.push_back(&component);
  }
  const auto whole = std::ranges::find_if(components, [](const Component* c) { return c->covers_rows; });
  if (whole != components.end()) {
    std::rotate(whole, whole + 1, components.end());
  }
  return components;
}

void for_slices(std::int64_t slices, std::int64_t bytes, bool together, Context& context, const SliceBody& body) {
  if (slices == 0) {
    return;
  }
  const std::int64_t threads = std::max(context.executor->concurrency(), 1);
  const std::int64_t teams = slices % threads == 0 ? threads : std::min(slices, kStretches * threads);
  const bool enough = slices % threads == 0 || slices >= kStretches * threads;
  if (together || !enough || teams * bytes > kPackedBytes) {
    const std::int64_t step = std::clamp<std::int64_t>(kPackedBytes / std::max<std::int64_t>(bytes, 1), 1, slices);
    const Workspace memory(context, static_cast<std::size_t>(step * bytes));
    for (std::int64_t first = 0; first < slices; first += step) {
      body(first, std::min(first + step, slices), context, memory.data());
    }
    return;
  }
  // Small ones some at a time, for what a body does before it begins.
  const std::int64_t step =
      std::clamp(kTogetherBytes / std::max<std::int64_t>(bytes, 1), std::int64_t{1}, ceil_div(slices, teams));
  const Workspace memory(context, static_cast<std::size_t>(teams * step * bytes));
  context.executor->parallel_for(teams, 1, [&](std::int64_t begin, std::int64_t end) {
    Context alone = context;
    alone.executor = &serial_executor();
    const std::int64_t last = slices * end / teams;
    for (std::int64_t slice = slices * begin / teams; slice < last; slice += step) {
      body(slice, std::min(slice + step, last), alone, static_cast<std::byte*>(memory.data()) + begin * step * bytes);
    }
  });
}

void tokens_of(const Order& order, const Tile& tile, std::int64_t side, const std::uint32_t* used,
               std::int64_t* tokens) {
  std::fill_n(tokens, side, std::int64_t{-1});
  for (std::int64_t u0 = 0; u0 < tile.count[0]; ++u0) {
    for (std::int64_t u1 = 0; u1 < tile.count[1]; ++u1) {
      for (std::int64_t u2 = 0; u2 < tile.count[2]; ++u2) {
        const std::int64_t n = (u0 * order.extent[1] + u1) * order.extent[2] + u2;
        if (used == nullptr || (used[n / 32] >> n % 32 & 1u) != 0) {
          tokens[n] = tile.base + u0 * order.stride[0] + u1 * order.stride[1] + u2 * order.stride[2];
        }
      }
    }
  }
}

void Walk::fill(Strip& strip, std::span<const Segment> segments) const {
  strip.pieces.clear();
  strip.spans.clear();
  strip.length = 0;
  for (const Segment& segment : segments) {
    const Range range = met(plan_, segment.mask, strip.first, strip.rows);
    if (range.begin >= range.end) {
      continue;
    }
    const std::int64_t begin = range.begin / width_ * width_, end = ceil_div(range.end, width_) * width_;
    const std::int64_t place = segment.tile * plan_.shape.cols;
    strip.pieces.push_back({place + begin, strip.length, begin, end, range.begin, range.end, segment.mask});
    const Span span{place + range.begin, strip.length + range.begin - begin, range.end - range.begin};
    strip.length += end - begin;
    if (!strip.spans.empty()) {
      Span& last = strip.spans.back();
      if (last.place + last.length == span.place && last.at + last.length == span.at) {
        last.length += span.length;
        continue;
      }
    }
    strip.spans.push_back(span);
  }
}

void Walk::operator()(const Component& component, std::int64_t tile, std::span<const std::int64_t> tokens,
                      const std::function<void(const Strip&)>& body) {
  segments_.clear();
  const auto first = component.first.begin() + tile;
  for (std::int64_t r = first[0]; r < first[1]; ++r) {
    const Run& run = component.runs[static_cast<std::size_t>(r)];
    for (std::int32_t n = 0; n < run.count; ++n) {
      segments_.push_back({run.first + n, run.mask});
    }
  }
  // In order of columns, so that neighbours make one span.
  if (!std::ranges::is_sorted(segments_, {}, &Segment::tile)) {
    std::ranges::stable_sort(segments_, {}, &Segment::tile);
  }
  const std::int64_t together = most_columns(plan_) / plan_.shape.cols, count = std::ssize(segments_);
  for (std::int64_t from = 0; from < count; from += together) {
    const auto segments = std::span(segments_).subspan(static_cast<std::size_t>(from),
                                                       static_cast<std::size_t>(std::min(together, count - from)));
    for (std::int64_t row = 0; row < plan_.shape.rows; row += strip_rows_) {
      strip_.first = row;
      strip_.rows = std::min<std::int64_t>(strip_rows_, plan_.shape.rows - row);
      const auto inside = tokens.subspan(static_cast<std::size_t>(row), static_cast<std::size_t>(strip_.rows));
      if (std::ranges::all_of(inside, [](std::int64_t token) { return token < 0; })) {
        continue;
      }
      fill(strip_, segments);
      if (strip_.length > 0) {
        body(strip_);
      }
    }
  }
}

std::int64_t rows_there(std::span<const std::int64_t> tokens, const simd::Tiles& tiles) {
  std::int64_t rows = std::ssize(tokens);
  while (rows > 0 && tokens[static_cast<std::size_t>(rows - 1)] < 0) {
    --rows;
  }
  return ceil_div(rows, tiles.rows) * tiles.rows;
}

double columns_met(const Plan& plan) {
  const simd::Tiles& tiles = simd::tiles(DType::f32);
  const auto pair = [&](std::int32_t mask) {
    std::int64_t sum = 0;
    for (std::int64_t first = 0; first < plan.shape.rows; first += tiles.rows) {
      const Range range = met(plan, mask, first, tiles.rows);
      if (range.begin < range.end) {
        const std::int64_t begin = range.begin / tiles.lanes, end = ceil_div(range.end, tiles.lanes);
        sum += kPieceCost + (end - begin) * tiles.lanes + range.end - range.begin;
      }
    }
    return sum;
  };
  std::vector<std::int64_t> masked;
  for (std::size_t n = 0; n < plan.masks.size(); ++n) {
    masked.push_back(pair(static_cast<std::int32_t>(n)));
  }
  const std::int64_t whole = pair(-1);
  double sum = 0;
  for (const Component& component : plan.components) {
    sum += static_cast<double>(component.row_tiles.size()) * kPieceCost;
    for (const Run& run : component.runs) {
      sum += static_cast<double>(run.count) *
             static_cast<double>(run.mask < 0 ? whole : masked[static_cast<std::size_t>(run.mask)]);
    }
  }
  return sum;
}

void share(const Component& component, std::int64_t units, double flops_per_pair, Context& context,
           const std::function<void(std::int64_t, std::int64_t)>& body) {
  const std::int64_t tiles = std::ssize(component.row_tiles);
  std::vector<std::int64_t> before{0};
  for (std::int64_t t = 0; t < tiles; ++t) {
    std::int64_t cost = 1;
    for (std::int64_t r = component.first[static_cast<std::size_t>(t)];
         r < component.first[static_cast<std::size_t>(t) + 1]; ++r) {
      cost += kPairCost * component.runs[static_cast<std::size_t>(r)].count;
    }
    before.push_back(before.back() + cost);
  }
  const std::int64_t each = before.back(), total = each * units;
  if (total == 0) {
    return;
  }
  const double worth = static_cast<double>(total) / kPairCost * flops_per_pair / kLeastFlops;
  const auto most = static_cast<double>(kStretches * std::max(context.executor->concurrency(), 1));
  const auto count = static_cast<std::int64_t>(std::clamp(worth, 1.0, most));
  // The first task that begins at or behind a place of the line.
  const auto task = [&](std::int64_t at) {
    const auto tile = std::lower_bound(before.begin(), before.end(), at % each) - before.begin();
    return at / each * tiles + tile;
  };
  context.executor->parallel_for(count, 1, [&](std::int64_t begin, std::int64_t end) {
    const auto cut = [&](std::int64_t n) { return total / count * n + total % count * n / count; };
    for (std::int64_t t = task(cut(begin)); t < task(cut(end)); ++t) {
      body(t / tiles, t % tiles);
    }
  });
}

Buffers& thread_buffers() {
  thread_local Buffers buffers;
  return buffers;
}

void Ahead::add(const void* rows, std::int64_t count, std::int64_t bytes, std::int64_t apart, std::int64_t steps) {
  constexpr std::int64_t kAtOnce = 128;
  const auto* const data = static_cast<const std::byte*>(rows);
  if (apart == bytes) {  // one piece of memory
    for (std::int64_t at = 0; at < count * bytes; at += steps * kAtOnce) {
      lines_.push_back({data + at, kAtOnce});
    }
    return;
  }
  for (std::int64_t at = 0; at < bytes; at += kAtOnce) {
    lines_.push_back({data + at, apart});
  }
}

void foresee(const Operand& operand, DType dtype, Head head, const Order& order, const Tile& tile, std::int64_t depth,
             std::int64_t steps, Ahead& ahead) {
  const auto size = static_cast<std::int64_t>(size_of(dtype));
  if (operand.col == 1 && tile.count[0] * tile.count[1] == 1) {
    ahead.add(row_of(operand, dtype, head, tile.base), tile.count[2], depth * size,
              order.stride[2] * operand.row * size, steps);
  }
}

template <typename Acc>
void Machine<Acc>::gather(const Operand& from, DType dtype, Head head, std::span<const std::int64_t> tokens,
                          std::int64_t depth, Acc factor, Acc* to, std::int64_t stride) const {
  const auto bytes = depth * static_cast<std::int64_t>(size_of(dtype));
  const bool dense = from.col == 1 && from.row == depth && stride == depth;
  for (std::size_t n = 0, count = 1; n < tokens.size(); n += count, to += static_cast<std::int64_t>(count) * stride) {
    // Neighbours on both sides are one row.
    count = 1;
    while (dense && tokens[n] >= 0 && n + count < tokens.size() && tokens[n + count] == tokens[n + count - 1] + 1) {
      ++count;
    }
    // Rows of a class lie apart, each perhaps on a page of its own.
    if (from.col == 1 && count == 1 && n + kRowsAhead < tokens.size() && tokens[n + kRowsAhead] >= 0) {
      const auto* const ahead = static_cast<const std::byte*>(row_of(from, dtype, head, tokens[n + kRowsAhead]));
      for (std::int64_t at = 0; at < bytes; at += 64) {
        __builtin_prefetch(ahead + at);
      }
    }
    if (tokens[n] < 0) {
      std::fill_n(to, depth, Acc{0});
    } else {
      rows.widen(row_of(from, dtype, head, tokens[n]), dtype, from.col, static_cast<std::int64_t>(count) * depth,
                 factor, to);
    }
  }
}

template <typename Acc>
void Machine<Acc>::multiply_turned(const Strip& strip, const Acc* left, std::int64_t apart, std::int64_t depth,
                                   const Acc* turned, Acc* scores, std::int64_t stride, Ahead* ahead) const {
  const simd::Term term{left, 0, nullptr};
  simd::Product product;
  product.terms = &term;
  product.count = 1;
  product.steps = depth;
  product.row_stride = apart;
  product.step_stride = 1;
  product.sum_stride = stride;
  product.right_stride = width();
  product.right_apart = vectors() == 1 ? width() * depth : 0;
  const std::int64_t panel = width(), half = panel / 2;
  auto* const multiply_half = vectors() == 1 ? tiles.multiply_half_in_place : tiles.multiply_in_place[0];
  // Calls a multiplier on columns of the panel that begins at n.
  const auto multiply = [&](auto* multiplier, const Piece& piece, std::int64_t n, std::int64_t within = 0) {
    product.right = const_cast<Acc*>(turned + (piece.place + n) * depth + within);
    product.sums = scores + piece.at + n + within;
    multiplier(product);
  };
  for (const Piece& piece : strip.pieces) {
    std::int64_t n = 0, count = piece.end - piece.begin;
    // Half a panel that no row meets is left out, and neighbours are taken together.
    if (multiply_half != nullptr && piece.first - piece.begin >= half) {
      multiply(multiply_half, piece, 0, half);
      n = panel;
    }
    const bool less = multiply_half != nullptr && n < count && piece.end - piece.last >= half;
    count -= less ? panel : 0;
    for (; vectors() == 1 && n + 2 * panel <= count; n += 2 * panel) {
      if (ahead != nullptr) {
        ahead->give(product);
      }
      multiply(tiles.multiply_in_place[1], piece, n);
    }
    product.soon = nullptr;
    for (; n < count; n += panel) {
      multiply(tiles.multiply_in_place[vectors() - 1], piece, n);
    }
    if (less) {
      multiply(multiply_half, piece, n);
    }
  }
}

template <typename Acc>
void Machine<Acc>::multiply_lines(const Strip& strip, const Acc* scores, std::int64_t stride, const Lines<Acc>& lines,
                                  const Split& split, Acc* sums) const {
  simd::Product product;
  product.count = 1;
  product.row_stride = stride;
  product.step_stride = 1;
  product.sum_stride = split.padded();
  product.add = true;
  product.right_stride = lines.apart;
  for (const Span& span : strip.spans) {
    const simd::Term term{scores + span.at, span.place, nullptr};
    product.terms = &term;
    product.steps = span.length;
    for (std::int64_t p = 0; p < split.panels(); ++p) {
      product.right = const_cast<Acc*>(lines.data + lines.features * split.first(p));
      product.sums = sums + split.first(p);
      const std::int64_t vectors = split.vectors(p);
      (lines.apart != 0 ? tiles.multiply_in_place[vectors - 1] : tiles.multiply[vectors - 1])(product);
    }
  }
}

template <typename Acc>
void Machine<Acc>::multiply_columns(const Acc* scores, std::int64_t stride, std::int64_t count, std::int64_t columns,
                                    const Acc* lines, const Split& split, Acc* sums) const {
  Acc* const rest = need<Acc>(thread_buffers().row, tiles.rows * split.padded());
  simd::Product product;
  product.count = 1;
  product.steps = count;
  product.row_stride = 1;
  product.step_stride = stride;
  product.right_stride = split.padded();
  product.sum_stride = split.padded();
  for (std::int64_t column = 0; column < columns; column += tiles.rows, sums += tiles.rows * split.padded()) {
    const simd::Term term{scores + column, 0, nullptr};
    const bool whole = column + tiles.rows <= columns;  // else a tile has columns too many, whose sums are dropped
    product.terms = &term;
    product.add = whole;
    for (std::int64_t p = 0; p < split.panels(); ++p) {
      product.right = const_cast<Acc*>(lines + split.first(p));
      product.sums = (whole ? sums : rest) + split.first(p);
      tiles.multiply_in_place[split.vectors(p) - 1](product);
    }
    if (!whole) {
      rows.add(sums, rest, (columns - column) * split.padded());
    }
  }
}

SeenColumns::SeenColumns(const Problem& problem, std::span<const std::int64_t> tokens, std::int64_t side)
    : side_(side), tiles_(std::ssize(tokens) / side) {
  hidden_.resize(static_cast<std::size_t>(problem.batch * tiles_));
  words_.assign(static_cast<std::size_t>(problem.batch * tiles_ * side / 32), 0);
  for (std::int64_t b = 0; b < problem.batch; ++b) {
    for (std::size_t n = 0; n < tokens.size(); ++n) {
      const std::size_t at = static_cast<std::size_t>(b) * tokens.size() + n;
      if (tokens[n] >= 0 && problem.padding(b, tokens[n])) {
        hidden_[at / static_cast<std::size_t>(side)] = 1;
        any_ = true;
      } else {
        words_[at / 32] |= 1u << at % 32;
      }
    }
  }
}

template <typename Acc>
Columns<Acc>::Columns(const Problem& problem, const Plan& plan, const Component& component, bool transposed,
                      const Acc* lse)
    : p_(problem),
      component_(component),
      side_(plan.shape.cols),
      lse_(lse),
      tokens_(component.col_tiles.size() * static_cast<std::size_t>(side_)) {
  const auto& tiles = component.col_tiles;
  const std::int64_t step = component.col_order.stride[2];
  bool even = !tiles.empty();
  for (std::size_t t = 0; t < tiles.size(); ++t) {
    const Tile& tile = tiles[t];
    even = even && tile.used < 0 && tile.count[0] * tile.count[1] == 1 &&
           tile.base == tiles[0].base + static_cast<std::int64_t>(t) * side_ * step;
    tokens_of(component.col_order, tile, side_, tile.used < 0 ? nullptr : plan.used.data() + tile.used,
              tokens_.data() + t * static_cast<std::size_t>(side_));
  }
  step_ = even ? step : 0;
  if (problem.padding.data != nullptr && !transposed) {
    seen_ = SeenColumns(problem, tokens_, side_);
  }
}

template <typename Acc>
bool Columns<Acc>::hidden(Head head, std::int64_t tile, std::int64_t n) const {
  if (seen_.any(head.batch, tile) && (seen_.words(head.batch, tile)[n / 32] >> n % 32 & 1) == 0) {
    return true;
  }
  const std::int64_t token = tokens_[static_cast<std::size_t>(tile * side_ + n)];
  return lse_ != nullptr && token >= 0 &&
         lse_[(head.batch * p_.heads + head.head) * p_.rows + token] == std::numeric_limits<Acc>::infinity();
}

template <typename Acc>
Lines<Acc> Columns<Acc>::lines(const Packed& packed, DType dtype, Head head, std::int64_t h) const {
  if (packed.lines != nullptr || component_.col_tiles.empty()) {
    return {packed.lines + h * places() * packed.split.padded(), places(), 0};
  }
  const void* const first = row_of(packed.from, dtype, head, component_.col_tiles.front().base);
  return {static_cast<const Acc*>(first), 1, step_ * packed.from.row};
}

template <typename Acc>
void Columns<Acc>::pack(const Machine<Acc>& machine, DType dtype, Head head, std::int64_t tile, std::int64_t h,
                        const Packed& packed) const {
  const Operand& from = packed.from;
  const Split& split = packed.split;
  const std::int64_t depth = split.depth(), width = machine.width(), first = tile * side_;
  const Order& order = component_.col_order;
  const Tile& of = component_.col_tiles[static_cast<std::size_t>(tile)];
  // Rows at even distances are read where they are. Nobody looks at places that are not inside.
  simd::Place place{row_of(from, dtype, head, of.base), order.stride[2] * from.row, from.col};
  std::int64_t count = of.count[2];
  bool hides = seen_.any(head.batch, tile);
  for (std::int64_t n = 0; lse_ != nullptr && !hides && n < side_; ++n) {
    hides = hidden(head, tile, n);
  }
  if (hides || of.used >= 0 || of.count[0] * of.count[1] != 1 || size_of(dtype) != sizeof(Acc)) {
    Acc* const wide = need<Acc>(thread_buffers().wide, side_ * depth);
    std::span<const std::int64_t> tokens(tokens_.data() + first, static_cast<std::size_t>(side_));
    std::array<std::int64_t, 256> some;
    if (hides) {
      for (std::size_t n = 0; n < tokens.size(); ++n) {
        some[n] = hidden(head, tile, static_cast<std::int64_t>(n)) ? -1 : tokens[n];
      }
      tokens = std::span(some).first(tokens.size());
    }
    machine.gather(from, dtype, head, tokens, depth, 1, wide, depth);
    place = {wide, depth, 1};
    count = side_;
  }
  if (packed.turned != nullptr) {
    machine.tiles.pack({place.data, place.col_stride, place.row_stride}, depth, count, width,
                       packed.turned + (h * places() + first) * depth,
                       depth * width * static_cast<std::int64_t>(sizeof(Acc)));
  }
  for (std::int64_t p = 0; packed.lines != nullptr && p < split.panels(); ++p) {
    const std::int64_t lanes = split.vectors(p) * machine.tiles.lanes;
    machine.tiles.pack(
        {static_cast<Acc*>(place.data) + split.first(p) * place.col_stride, place.row_stride, place.col_stride}, count,
        std::min(lanes, depth - split.first(p)), lanes,
        packed.lines + places() * (h * split.padded() + split.first(p)) + first * lanes, 0);
  }
}

template <typename Acc>
Packing<Acc>::Packing(const Layer<Acc>& layer, const Machine<Acc>& machine, DType dtype, std::span<const Head> heads,
                      const Packed& first, const Packed& second, Context& context)
    : layer_(layer),
      machine_(machine),
      dtype_(dtype),
      heads_(heads),
      first_(first),
      second_(second),
      tiles_(std::ssize(layer.component.col_tiles)) {
  const std::int64_t count = std::ssize(heads) * tiles_;
  if (context.executor->concurrency() <= 1) {
    done_.resize(static_cast<std::size_t>(count));
    return;
  }
  const std::int64_t size = layer.plan.shape.cols * (first.split.depth() + second.split.depth());
  context.executor->parallel_for(count, std::max<std::int64_t>(1, (std::int64_t{1} << 16) / size),
                                 [&](std::int64_t begin, std::int64_t end) {
                                   for (std::int64_t n = begin; n < end; ++n) {
                                     pack(n % tiles_, n / tiles_);
                                   }
                                 });
}

template <typename Acc>
void Packing<Acc>::pack(std::int64_t tile, std::int64_t h) const {
  const Head head = heads_[static_cast<std::size_t>(h)];
  layer_.columns.pack(machine_, dtype_, head, tile, h, first_);
  layer_.columns.pack(machine_, dtype_, head, tile, h, second_);
}

template <typename Acc>
std::int64_t Packing<Acc>::missing(std::int64_t row_tile, std::int64_t h) const {
  const auto first = layer_.component.first.begin() + row_tile;
  for (std::int64_t r = first[0]; r < first[1] && !done_.empty(); ++r) {
    const Run& run = layer_.component.runs[static_cast<std::size_t>(r)];
    for (std::int64_t tile = run.first; tile < run.first + run.count; ++tile) {
      if (done_[static_cast<std::size_t>(h * tiles_ + tile)] == 0) {
        return tile;
      }
    }
  }
  return -1;
}

template <typename Acc>
void Packing<Acc>::need(std::int64_t row_tile, std::int64_t h) {
  for (std::int64_t tile = missing(row_tile, h); tile >= 0; tile = missing(row_tile, h)) {
    pack(tile, h);
    done_[static_cast<std::size_t>(h * tiles_ + tile)] = 1;
  }
}

template <typename Acc>
void Packing<Acc>::foresee(std::int64_t row_tile, std::int64_t h, std::int64_t steps, Ahead& ahead) const {
  const std::int64_t tile = missing(row_tile, h);
  for (const Packed* packed : {&first_, &second_}) {
    if (tile < 0) {
      return;
    }
    const std::int64_t depth = packed->split.depth();
    cpu::foresee(packed->from, dtype_, heads_[static_cast<std::size_t>(h)], layer_.component.col_order,
                 layer_.component.col_tiles[static_cast<std::size_t>(tile)], depth, steps, ahead);
    if (packed->turned != nullptr) {
      const std::int64_t cols = layer_.plan.shape.cols, bytes = depth * static_cast<std::int64_t>(sizeof(Acc));
      ahead.add(packed->turned + (h * layer_.columns.places() + tile * cols) * depth, cols, bytes, bytes, steps);
    }
  }
}

template struct Machine<float>;
template struct Machine<double>;
template class Columns<float>;
template class Columns<double>;
template class Packing<float>;
template class Packing<double>;

}  // namespace fretwork::attention_op::cpu
