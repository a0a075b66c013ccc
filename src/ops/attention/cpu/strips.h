// How the CPU walks a plan. The columns of a component are packed once, in tile order. A task multiplies a row tile
// with them strip by strip (a strip has as many rows as the tile multiplier) and visits only the columns that some row
// of the strip meets.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "core/divide.h"
#include "ops/attention/cpu/rows.h"
#include "ops/attention/plan.h"
#include "ops/attention/problem.h"
#include "runtime/simd/tiles.h"

namespace fretwork::attention_op::cpu {

/// One for all heads, one for each query head, or one for each (batch element, query head); equal ones are the same
/// object.
using Plans = std::span<const std::shared_ptr<const Plan>>;

/// Attention over given plans, so that tests can bring their own. `transposed` are the plans of the transposed
/// patterns.
void forward(const Problem& problem, Plans plans, Context& context);
void backward(const BackwardProblem& problem, Plans plans, Plans transposed, Context& context);

/// Columns whose scores a strip holds at a time: with eight rows of fp32 half of a first-level cache.
inline constexpr std::int64_t kMostColumns = 512;
/// What packed operands may take, unless one head alone takes more.
inline constexpr std::int64_t kPackedBytes = 256 << 20;

/// Workspace that is handed out piece by piece.
class Memory {
 public:
  Memory(void* data) : next_(static_cast<std::byte*>(data)) {}
  template <typename T>
  T* take(std::int64_t count) {
    T* const here = reinterpret_cast<T*>(next_);
    next_ += bytes<T>(count);
    return here;
  }
  /// What `count` elements take of it.
  template <typename T>
  static std::int64_t bytes(std::int64_t count) {
    return ceil_div(count * static_cast<std::int64_t>(sizeof(T)), 64) * 64;
  }

 private:
  std::byte* next_;
};

/// Calls body(first, last, context, memory) on ranges that cover [0, slices), each with `bytes` for each of its slices.
/// Slices are key heads of a batch. Where there are enough of them each thread takes some, one by one, so that what
/// belongs to a slice stays in its caches; else, or if `together`, all threads work on each range, and ranges do not
/// depend on the number of threads.
using SliceBody = std::function<void(std::int64_t first, std::int64_t last, Context& context, Memory memory)>;
void for_slices(std::int64_t slices, std::int64_t bytes, bool together, Context& context, const SliceBody& body);

using PlanHeads = HeadSet<Plan>;
using PlanRange = BatchRange<Plan>;

struct Head {
  std::int64_t batch, head;
  bool operator==(const Head&) const = default;
};

/// A query head, and which of some key heads it uses.
struct Query {
  Head head;
  std::int64_t slice;
};

/// The key heads [first, last) of all batches, and the query heads of a set that use them.
std::vector<Head> key_heads(const Problem& problem, std::int64_t first, std::int64_t last);
std::vector<Query> queries_of(const Problem& problem, const PlanHeads& set, std::int64_t first, std::int64_t last);
/// The key heads that `queries` of the slices from `first` on use; their numbers then count these alone.
std::vector<Head> used_slices(const Problem& problem, std::vector<Query>& queries, std::int64_t first);
/// The components of a plan, one that holds every row last, if there is one: its rows are then final.
std::vector<const Component*> in_order(const Plan& plan);
/// Whether the last of them holds every row.
inline bool ends_whole(const std::vector<const Component*>& components) {
  return !components.empty() && components.back()->covers_rows;
}

/// The tokens of a tile's places, −1 where they are outside or, if `used` is given, unused.
void tokens_of(const Order& order, const Tile& tile, std::int64_t side, const std::uint32_t* used,
               std::int64_t* tokens);

/// Rows of a tile up to the last that has a token, in whole strips.
std::int64_t rows_there(std::span<const std::int64_t> tokens, const simd::Tiles& tiles);

/// Columns [begin, end) of one column tile, whose scores stand from `at` on. Whole panels; those before `first` and
/// from `last` on are met by no row, and their scores may be anything until they are masked.
struct Piece {
  std::int64_t place, at, begin, end, first, last;
  std::int32_t mask;
};

/// Neighbouring columns that some row of a strip meets.
struct Span {
  std::int64_t place, at, length;
};

struct Strip {
  std::int64_t first, rows;  ///< places of the row tile
  std::vector<Piece> pieces;
  std::vector<Span> spans;
  std::int64_t length;  ///< of all pieces
};

/// Calls body(strip) for each strip of a row tile and each stretch of its columns, in order of columns. Strips whose
/// rows all have tokens < 0 are left out.
class Walk {
 public:
  /// `width` columns are a panel; scores are `columns` wide at most.
  Walk(const Plan& plan, std::int64_t strip_rows, std::int64_t width)
      : plan_(plan), strip_rows_(strip_rows), width_(width) {}
  static std::int64_t most_columns(const Plan& plan) {
    return std::max<std::int64_t>(kMostColumns / plan.shape.cols, 1) * plan.shape.cols;
  }
  void operator()(const Component& component, std::int64_t tile, std::span<const std::int64_t> tokens,
                  const std::function<void(const Strip&)>& body);

 private:
  struct Segment {
    std::int64_t tile;
    std::int32_t mask;
  };
  void fill(Strip& strip, std::span<const Segment> segments) const;

  const Plan& plan_;
  std::int64_t strip_rows_, width_;
  std::vector<Segment> segments_;
  Strip strip_;
};

/// Columns that the strips of a plan look at, all together: what walking it costs.
double columns_met(const Plan& plan);

/// Calls body(unit, row tile) for each of `units` units of work over a component, in stretches of similar work.
void share(const Component& component, std::int64_t units, double flops_per_pair, Context& context,
           const std::function<void(std::int64_t, std::int64_t)>& body);

/// Features in panels of a few vectors.
class Split {
 public:
  Split(std::int64_t depth, const simd::Tiles& tiles)
      : depth_(depth),
        lanes_(tiles.lanes),
        vectors_(ceil_div(depth, lanes_)),
        panels_(ceil_div(vectors_, tiles.vectors)) {}
  std::int64_t depth() const { return depth_; }
  std::int64_t padded() const { return vectors_ * lanes_; }
  std::int64_t panels() const { return panels_; }
  std::int64_t vectors(std::int64_t p) const { return vectors_ * (p + 1) / panels_ - vectors_ * p / panels_; }
  std::int64_t first(std::int64_t p) const { return vectors_ * p / panels_ * lanes_; }

 private:
  std::int64_t depth_, lanes_, vectors_, panels_;
};

/// Rows of features: packed in panels of a split, or where they are.
template <typename Acc>
struct Lines {
  const Acc* data;
  std::int64_t features;  ///< distance of neighbours among the first features of panels
  std::int64_t apart;     ///< of rows that are not packed, else 0
};

/// What the next tile of rows will touch: products fetch it on their way, two cache lines in each step.
class Ahead {
 public:
  void clear() { lines_.clear(); }
  /// `count` rows of `bytes` bytes, `apart` bytes from one to the next, for products of `steps` steps.
  void add(const void* rows, std::int64_t count, std::int64_t bytes, std::int64_t apart, std::int64_t steps);
  /// To a product of two vectors, if there is anything left.
  void give(simd::Product& product) {
    product.soon = lines_.empty() ? nullptr : lines_.back().data;
    if (!lines_.empty()) {
      product.soon_stride = lines_.back().apart;
      lines_.pop_back();
    }
  }

 private:
  struct Lines {
    const std::byte* data;
    std::int64_t apart;
  };
  std::vector<Lines> lines_;
};

/// The tables for one type of sums, and the products of strips.
template <typename Acc>
struct Machine {
  const simd::Tiles& tiles = simd::tiles(sizeof(Acc) == 8 ? DType::f64 : DType::f32);
  const Rows<Acc>& rows = row_functions<Acc>();

  /// Vectors in a turned panel: as few as keep enough sums in flight, since strips look at whole panels.
  std::int64_t vectors() const { return tiles.rows >= 8 ? 1 : 2; }
  std::int64_t width() const { return vectors() * tiles.lanes; }

  /// to[n] = factor · the row of token n, zeros where there is none; rows `stride` apart.
  void gather(const Operand& from, DType dtype, Head head, std::span<const std::int64_t> tokens, std::int64_t depth,
              Acc factor, Acc* to, std::int64_t stride) const;

  /// scores = left · turned: `left` is the first row of the strip, `apart` from the next. Fetches what is ahead, if
  /// given.
  void multiply_turned(const Strip& strip, const Acc* left, std::int64_t apart, std::int64_t depth, const Acc* turned,
                       Acc* scores, std::int64_t stride, Ahead* ahead = nullptr) const;
  /// sums += scores · lines.
  void multiply_lines(const Strip& strip, const Acc* scores, std::int64_t stride, const Lines<Acc>& lines,
                      const Split& split, Acc* sums) const;
  /// sums[j] += Σ_i scores[i][j] · lines[i] for some rows of scores, `stride` apart. Columns need not be whole tiles.
  void multiply_columns(const Acc* scores, std::int64_t stride, std::int64_t rows, std::int64_t columns,
                        const Acc* lines, const Split& split, Acc* sums) const;
};

/// Which columns of a component are keys that a batch element's queries see.
class SeenColumns {
 public:
  SeenColumns() = default;  ///< all
  SeenColumns(const Problem& problem, std::span<const std::int64_t> tokens, std::int64_t side);
  /// Whether there is any that is not seen.
  bool any() const { return any_; }
  bool any(std::int64_t batch, std::int64_t tile) const {
    return any_ && hidden_[static_cast<std::size_t>(batch * tiles_ + tile)] != 0;
  }
  /// A bit for each place of a tile, set where it is seen.
  const std::uint32_t* words(std::int64_t batch, std::int64_t tile) const {
    return words_.data() + (batch * tiles_ + tile) * side_ / 32;
  }

 private:
  std::int64_t side_ = 32, tiles_ = 0;
  bool any_ = false;
  std::vector<std::uint8_t> hidden_;  ///< of each (batch, tile)
  std::vector<std::uint32_t> words_;
};

/// The columns of a component: which tokens they are, and operands packed in their order. `transposed`: they are
/// queries.
template <typename Acc>
class Columns {
 public:
  /// `lse`, needed where columns are queries of which some see no key, is that of all rows, +inf for such a query: it
  /// is packed as zeros, whatever it holds, also where the plan has keys for it that padding hides.
  Columns(const Problem& problem, const Plan& plan, const Component& component, bool transposed, const Acc* lse);
  const SeenColumns& seen() const { return seen_; }
  std::int64_t places() const { return static_cast<std::int64_t>(tokens_.size()); }
  const std::int64_t* tokens() const { return tokens_.data(); }

  /// An operand to pack: `turned` (depth × places in panels of the machine's width), `lines` (places × depth in panels
  /// of the split); either may be null. Heads lie places·depth and places·padded apart.
  struct Packed {
    const Operand& from;
    const Split& split;
    Acc *turned, *lines;
  };
  /// Whether an operand's lines are read where they are: places follow one another at even distances and all are used,
  /// and their rows are whole vectors of the sums' type.
  bool in_place(const Operand& from, DType dtype, const Split& split) const {
    return !seen_.any() && lse_ == nullptr && step_ * from.row != 0 && from.col == 1 && size_of(dtype) == sizeof(Acc) &&
           split.padded() == split.depth();
  }
  Lines<Acc> lines(const Packed& packed, DType dtype, Head head, std::int64_t h) const;
  /// Packs the rows of one tile, which go to the h-th head's place.
  void pack(const Machine<Acc>& machine, DType dtype, Head head, std::int64_t tile, std::int64_t h,
            const Packed& packed) const;

 private:
  /// Whether a place of a tile has nothing to pack.
  bool hidden(Head head, std::int64_t tile, std::int64_t n) const;

  const Problem& p_;
  const Component& component_;
  std::int64_t side_;
  const Acc* lse_;         ///< or null
  std::int64_t step_ = 0;  ///< from the token of one place to that of the next, if it is the same for all
  std::vector<std::int64_t> tokens_;
  SeenColumns seen_;
};

/// What is done to scores before the softmax, and which are kept after it. `transposed`: rows are keys.
template <typename Acc>
class Scores {
 public:
  Scores(const Problem& problem, const Plan& plan, const Columns<Acc>& columns, bool transposed,
         const Machine<Acc>& machine);

  bool capped() const { return p_.softcap != 0; }
  bool dropped() const { return p_.dropout.rate > 0; }
  /// Softcap, bias, ALiBi, then −inf where there is no element. `slopes`, if set, gets the cap's derivative. `tokens`
  /// are those of the strip's rows. `scratch` holds a row.
  void adjust(const Strip& strip, Head head, const std::int64_t* tokens, Acc* scores, std::int64_t stride, Acc* slopes,
              Acc* scratch) const;
  /// What each of the strip's columns is multiplied by in a row. `states`, needed where rows are keys, are random_row
  /// of each place.
  void keep(const Strip& strip, Head head, std::int64_t token, const unsigned* states, Acc* factors) const;
  unsigned state(Head head, std::int64_t row) const;

 private:
  void add_bias(const Strip& strip, Head head, std::int64_t token, Acc* row, Acc* scratch) const;
  void mask(const Strip& strip, Acc* scores, std::int64_t stride) const;
  /// Takes out what no bit is set for in the words of a tile.
  void select(const Piece& piece, const std::uint32_t* words, Acc* row) const;
  void hide(const Strip& strip, std::int64_t batch, Acc* scores, std::int64_t stride) const;

  const Problem& p_;
  const Plan& plan_;
  const Columns<Acc>& columns_;
  bool transposed_;
  const Machine<Acc>& machine_;
  std::vector<Acc> positions_;  ///< for ALiBi
};

/// One component with what is known about its columns.
template <typename Acc>
struct Layer {
  const Plan& plan;
  const Component& component;
  Columns<Acc> columns;
  Scores<Acc> scores;

  Layer(const Problem& problem, const Plan& of, const Component& this_one, bool transposed, const Machine<Acc>& machine,
        const Acc* lse = nullptr)
      : plan(of),
        component(this_one),
        columns(problem, of, this_one, transposed, lse),
        scores(problem, of, columns, transposed, machine) {}
  Layer(const Layer&) = delete;
};

/// The columns of some heads, packed from two operands: all at once where there are threads to share that, else each
/// tile when a tile of rows first needs it, so that it is still near.
template <typename Acc>
class Packing {
 public:
  using Packed = typename Columns<Acc>::Packed;
  Packing(const Layer<Acc>& layer, const Machine<Acc>& machine, DType dtype, std::span<const Head> heads,
          const Packed& first, const Packed& second, Context& context);
  /// Call it before the columns of head h are looked at from a tile of rows.
  void need(std::int64_t row_tile, std::int64_t h);
  /// Adds columns that a tile of rows needs and that are not packed: those of one tile.
  void foresee(std::int64_t row_tile, std::int64_t h, std::int64_t steps, Ahead& ahead) const;
  Lines<Acc> first_lines(std::int64_t h) const { return lines(first_, h); }
  Lines<Acc> second_lines(std::int64_t h) const { return lines(second_, h); }

 private:
  Lines<Acc> lines(const Packed& packed, std::int64_t h) const {
    return layer_.columns.lines(packed, dtype_, heads_[static_cast<std::size_t>(h)], h);
  }
  void pack(std::int64_t tile, std::int64_t h) const;
  /// The first tile of columns that a tile of rows needs and that is not packed, or −1.
  std::int64_t missing(std::int64_t row_tile, std::int64_t h) const;

  const Layer<Acc>& layer_;
  const Machine<Acc>& machine_;
  DType dtype_;
  std::span<const Head> heads_;
  Packed first_, second_;
  std::int64_t tiles_;
  std::vector<std::uint8_t> done_;  ///< empty if all are
};

/// Memory of one thread, kept between calls.
struct Buffers {
  simd::Scratch wide, left, more_left, scores, gradients, slopes, row, sums, more_sums, statistics;
  std::vector<std::int64_t> tokens, used;
  Ahead ahead;
};
Buffers& thread_buffers();

template <typename Acc>
Acc* need(simd::Scratch& scratch, std::int64_t count) {
  return reinterpret_cast<Acc*>(scratch.need(static_cast<std::size_t>(count) * sizeof(Acc)));
}

/// Where the row of a token begins.
inline void* row_of(const Operand& o, DType dtype, Head head, std::int64_t token) {
  return static_cast<std::byte*>(o.data) +
         (head.batch * o.batch + head.head * o.head + token * o.row) * static_cast<std::int64_t>(size_of(dtype));
}

/// Adds the rows of a tile to what is fetched, if they lie evenly.
void foresee(const Operand& operand, DType dtype, Head head, const Order& order, const Tile& tile, std::int64_t depth,
             std::int64_t steps, Ahead& ahead);

}  // namespace fretwork::attention_op::cpu
