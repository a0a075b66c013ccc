// The product on the CPU. Batch first, lanes hold output features (j, l) as they lie in memory: a load repeats a run of
// x over l along the vector, so no δ is ever transposed. Batch last, lanes hold the batch.
//
// Weights are packed once, for all threads. A sum is computed by one thread in a fixed order, so results do not depend
// on the number of threads.
#include "ops/kronecker/cpu/run.h"

#include "core/large_pages.h"
#include "ops/kronecker/config.h"
#include "ops/kronecker/cpu/loops.h"

namespace fretwork::kronecker::cpu {
namespace {

/// Elements of a row of the left side that are multiplied at a time: 8 such rows leave room in a first-level cache.
constexpr std::int64_t kLeftRow = 1024;
/// Packed weights that a strip of x meets: they leave room in a second-level cache of 1 MB.
constexpr std::int64_t kBlockElements = 128 << 10;
/// Batch rows, and batch columns, that a thread works on at a time.
constexpr std::int64_t kBlockRows = 256, kBlockCols = 192;
/// Tiles of rows that are enough for a thread.
constexpr std::int64_t kOwnTiles = 2;
/// Rows of x up to so many elements are too short for the hardware prefetcher.
constexpr std::int64_t kShortRow = 128;
constexpr std::int64_t kLine = 64;
/// Depth of a panel of x at most.
constexpr std::int64_t kPanelDepth = 256;
/// Results of so many bytes or more ask for large pages.
constexpr std::int64_t kFreshBytes = 8 << 20;
/// A batch for which weights are not worth packing, if the CPU can read them where they are.
constexpr std::int64_t kSmallBatch = 256;
/// Features of a result that are turned together, and strips of outputs that x is worth turning for.
constexpr std::int64_t kTurnedRows = 128, kTurnedStrips = 4;
/// The longest runs of δ, and the deepest block, that are turned at all; the longest and batch · d if runs fill
/// vectors.
constexpr std::int64_t kTurnedRuns = 32, kTurnedDepth = 16384, kShortRun = 16, kTurnedElements = 1024;
/// Panels for which a strip of x is not worth packing.
constexpr std::int64_t kFewPanels = 4;
/// The least δ that weights are turned for, if they are not multiplied in pairs.
constexpr std::int64_t kTurnedDeltas = 2;
/// Weights of one δ that are turned at a time.
constexpr std::int64_t kTurnedTogether = 1024;
/// The least batch that is regrouped, and the least batch for pairs; bytes of x and y at a time, and rows at least.
constexpr std::int64_t kRegroupedFew = 2, kRegroupedRows = 32, kRegroupedBytes = 1 << 20, kRegroupedLeast = 256;

/// Rows are the batch; columns are output features, with their δ on neighbouring lanes.
class BatchFirst : Work {
 public:
  /// A thread takes up to `most` batch rows at a time.
  BatchFirst(const Problem& problem, Context& context, std::int64_t most = kBlockRows)
      : Work(problem, problem.sizes.d == 1 ? simd::tiles(problem.dtype) : simd::widened_tiles(problem.dtype), context),
        rows_{problem.batch, ceil_div(std::min(most, problem.batch), tiles_.rows) * tiles_.rows} {
    std::int64_t offset = 0;
    for (const Chunk& chunk : chunks(s_.d, tiles_.lanes)) {
      const Columns columns(s_.b, chunk.run(), tiles_);
      const Split depth = even(depth_, std::max<std::int64_t>(1, kLeftRow / chunk.run()), tiles_.group);
      parts_.push_back({chunk, columns, depth, offset});
      blocks_ = std::max(blocks_, ceil_div(columns.lanes() * depth.each, kBlockElements));
      panels_ = std::max(panels_, columns.panels());
      offset += depth_ * columns.lanes();
    }
    stride_ = offset;
    // Each thread has rows of its own, if they are enough: they stay in its caches from the copies before the product
    // to those behind it.
    if (const std::int64_t each = ceil_div(problem.batch, threads_); each >= kOwnTiles * tiles_.rows) {
      rows_.each = std::min(rows_.each, ceil_div(each, tiles_.rows) * tiles_.rows);
    }
    // Few diagonal blocks: more and smaller pieces, first of the batch, then of features.
    const auto few = [&] { return jobs() < wanted_; };
    while (few() && rows_.each > 4 * tiles_.rows) {
      rows_.each = ceil_div(rows_.each / 2, tiles_.rows) * tiles_.rows;
    }
    while (few() && blocks_ < panels_) {
      ++blocks_;
    }
  }

  std::size_t weight_bytes() const { return packing_.bytes(s_.a * stride_); }
  std::int64_t weight_jobs() const { return s_.a * count() * panels_; }
  void pack_weights(std::int64_t job, std::byte* packed) const {
    const std::int64_t i = job / panels_ / count();
    const Part& part = parts_[static_cast<std::size_t>(job / panels_ % count())];
    if (job % panels_ < part.columns.panels()) {
      const Columns::Panel panel = part.columns.panel(job % panels_);
      packing_.right(packing_.at(w(i), 0, panel.first, part.chunk.first), s_.c, part.chunk, panel,
                     packed + packing_.bytes(place(i, part, panel, 0)));
    }
  }

  std::int64_t jobs() const { return rows_.pieces() * s_.a * count() * blocks_; }
  void multiply(std::int64_t job, std::byte* packed) const {
    const std::int64_t block = job % blocks_, i = job / blocks_ / count() % s_.a;
    const Part& part = parts_[static_cast<std::size_t>(job / blocks_ % count())];
    const std::int64_t first_row = job / blocks_ / count() / s_.a * rows_.each;
    const std::int64_t panels = part.columns.panels();
    const std::int64_t first = panels * block / blocks_, last = panels * (block + 1) / blocks_;
    if (first == last) {
      return;
    }
    Share share{part, i, first_row, std::min(first_row + rows_.each, p_.batch), first, last};
    share.lane = part.columns.panel(first).first_vector * tiles_.lanes;
    share.lanes =
        part.columns.panel(last - 1).first_vector * tiles_.lanes + part.columns.panel(last - 1).width - share.lane;
    share.once = part.depth.pieces() == 1;
    share.prefetches = far_ && (s_.d > part.chunk.run() || part.depth.each * part.chunk.run() <= kShortRow);
    share.as_is = !tiles_.widens && s_.d == 1 && p_.x.feature == 1 && last - first <= kFewPanels;
    share.whole_runs = !tiles_.widens && part.chunk.full() && part.chunk.run() == tiles_.lanes && tiles_.lanes > 1 &&
                       p_.x.feature == 1 && !packing_.strip(x(i), part.depth.each, part.chunk).together;
    Buffers& buffers = Buffers::of_thread();
    share.left = buffers.left.need(packing_.bytes(tiles_.rows * part.depth.each * part.chunk.run()));
    // The bias, one tile's sums, and if they are computed piece by piece, all sums.
    share.bias = buffers.sums.need(tiles_.sum * static_cast<std::size_t>(share.lanes + tiles_.rows * share.lanes +
                                                                         (share.once ? 0 : rows_.each * share.lanes)));
    share.sums = sum_at(share.bias, share.lanes);
    for (std::int64_t n = first; n < last && p_.bias.data != nullptr; ++n) {
      const Columns::Panel panel = part.columns.panel(n);
      pack_bias(i, part.chunk, panel, sum_at(share.bias, panel.first_vector * tiles_.lanes - share.lane));
    }
    for (std::int64_t piece = 0; piece < part.depth.pieces(); ++piece) {
      for (std::int64_t row = first_row; row < share.last_row; row += tiles_.rows) {
        multiply_strip(share, piece, row, packed);
      }
    }
  }

 private:
  struct Part {
    Chunk chunk;
    Columns columns;
    Split depth;
    std::int64_t offset;  ///< of its packed weights
  };
  /// One job: batch rows of a diagonal block by panels of a part.
  struct Share {
    const Part& part;
    std::int64_t i, first_row, last_row, first, last;  ///< block; batch rows; panels
    std::int64_t lane = 0, lanes = 0;                  ///< of these panels: the first, and their number
    bool once = false;                                 ///< the depth is one piece
    bool prefetches = false;
    bool as_is = false;       ///< so few panels meet a strip that it is read where it lies
    bool whole_runs = false;  ///< runs fill vectors: the first product of a strip packs it, and those of the strip
                              ///< before prefetch it
    std::byte *left = nullptr, *bias = nullptr, *sums = nullptr;
  };
  /// A tile of rows from `row` on by all panels of a share, over one piece of the depth.
  void multiply_strip(const Share& share, std::int64_t piece, std::int64_t row, std::byte* packed) const {
    const Part& part = share.part;
    const std::int64_t k = piece * part.depth.each, depth = part.depth.size(piece);
    const std::int64_t rows = std::min(tiles_.rows, share.last_row - row);
    const Operand from = packing_.at(x(share.i), row, k, part.chunk.first);
    const bool unpacked = share.whole_runs && rows == tiles_.rows;
    const bool as_is = !unpacked && share.as_is && rows == tiles_.rows && k + depth <= s_.c;
    const Packing::Strip strip = unpacked ? packing_.strip(from, depth, part.chunk)
                                 : as_is  ? Packing::Strip{false, from.row, tiles_.group}
                                         : packing_.left(from, rows, std::min(depth, s_.c - k), part.chunk, share.left);
    const void* const left = as_is ? from.data : share.left;
    simd::Term term{unpacked ? from.data : left, 0, nullptr};
    simd::Product product{.terms = &term, .count = 1, .steps = depth / tiles_.group};
    product.row_stride = unpacked ? from.row : strip.row;
    product.step_stride = unpacked ? from.col : strip.step;
    product.copy = unpacked ? share.left : nullptr;
    product.add = piece > 0;
    const Operand next = packing_.at(x(share.i), row + tiles_.rows, k, part.chunk.first);
    product.soon_stride = next.col * size_;
    product.soon_apart = next.row * size_;
    std::int64_t fetched = 0;  // rows of the next strip
    const bool follows = share.prefetches && row + 2 * tiles_.rows <= share.last_row;
    const bool whole = piece + 1 == part.depth.pieces();
    for (std::int64_t n = share.first; n < share.last; ++n) {
      const Columns::Panel panel = part.columns.panel(n);
      if (follows && !unpacked) {
        fetch(next, depth, part.chunk, n - share.first, share.last - share.first);
      }
      const bool soon = follows && unpacked && fetched < tiles_.rows;
      product.soon = soon ? packing_.at(next.data, fetched * next.row) : nullptr;
      fetched += panel.vectors;
      const std::int64_t lane = panel.first_vector * tiles_.lanes - share.lane;
      product.right = packed + packing_.bytes(place(share.i, part, panel, k));
      product.sum_stride = share.once ? panel.width : share.lanes;
      product.sums = sum_at(share.sums, share.once ? 0 : (row - share.first_row) * share.lanes + lane);
      const Operand to = packing_.at(y(share.i), row, panel.first, part.chunk.first);
      const bool stores = whole && !finishes_ && rows == tiles_.rows && to_memory(part.chunk, panel, to, product);
      product.out = stores ? to.data : nullptr;
      (tiles_.group > 1 ? tiles_.multiply : tiles_.multiply_runs[part.chunk.log])[panel.vectors - 1](product);
      term.left = left;
      product.row_stride = strip.row;
      product.step_stride = strip.step;
      product.copy = nullptr;
      if (whole && !stores) {
        store(product, rows, panel, part.chunk, sum_at(share.bias, lane), to);
      }
    }
  }
  /// Adds the bias, activates, and stores the sums of a tile.
  void store(const simd::Product& product, std::int64_t rows, const Columns::Panel& panel, const Chunk& chunk,
             const std::byte* bias, const Operand& to) const {
    if (finishes_) {
      const void* const col_bias = p_.bias.data != nullptr ? bias : nullptr;
      finish({product.sums, product.sum_stride, rows, panel.width, nullptr, col_bias, p_.activation}, p_.dtype);
    }
    packing_.store(static_cast<const std::byte*>(product.sums), product.sum_stride, rows, panel.count, chunk, to,
                   stream_);
  }
  std::int64_t count() const { return static_cast<std::int64_t>(parts_.size()); }
  std::int64_t place(std::int64_t i, const Part& part, const Columns::Panel& panel, std::int64_t k) const {
    return i * stride_ + part.offset + panel.first_vector * tiles_.lanes * depth_ + k * panel.width;
  }
  /// Fetches a share of the tile of x that is packed next. Inline, or GCC removes the call as one without effect.
  [[gnu::always_inline]] void fetch(const Operand& from, std::int64_t depth, const Chunk& chunk, std::int64_t share,
                                    std::int64_t shares) const {
    const bool along = from.col == chunk.run();
    const std::int64_t step = along ? kLine : from.col * size_;
    const std::int64_t steps = along ? ceil_div(depth * from.col * size_, kLine) : depth;
    for (std::int64_t i = 0; i < tiles_.rows; ++i) {
      const auto* const row = static_cast<const std::byte*>(from.data) + i * from.row * size_;
      for (std::int64_t n = steps * share / shares; n < steps * (share + 1) / shares; ++n) {
        __builtin_prefetch(row + n * step, 0, 2);
      }
    }
  }
  /// Whether a tile's vectors lie in memory as they do in registers; says how.
  bool to_memory(const Chunk& chunk, const Columns::Panel& panel, const Operand& to, simd::Product& product) const {
    const bool vector = chunk.run() == tiles_.lanes, neighbours = to.col == chunk.run();
    if (to.delta != 1 || !chunk.full() || panel.count * chunk.run() != panel.width || (!vector && !neighbours)) {
      return false;
    }
    const auto lines = [&](std::intptr_t bytes) { return bytes % 64 == 0; };
    product.out_stride = to.row;
    product.vector_stride = vector ? to.col : 0;
    product.stream = stream_ && lines(reinterpret_cast<std::intptr_t>(to.data)) && lines(to.row * size_) &&
                     lines(to.col * size_ * tiles_.lanes / chunk.run()) && lines(tiles_.lanes * size_);
    return true;
  }

  std::vector<Part> parts_;
  Split rows_;
  std::int64_t blocks_ = 1, panels_ = 1, stride_ = 0;
};

/// Rows are output features of one δ; columns are the batch.
class BatchLast : Work {
 public:
  /// A thread takes up to `most` batch columns at a time.
  BatchLast(const Problem& problem, Context& context, std::int64_t most = kBlockCols)
      : Work(problem, simd::tiles(problem.dtype), context),
        strips_{ceil_div(s_.b, tiles_.rows), ceil_div(s_.b, tiles_.rows)},
        cols_{problem.batch,
              std::max(most / (tiles_.lanes * tiles_.vectors), std::int64_t{1}) * tiles_.lanes * tiles_.vectors},
        pieces_(even(depth_, kPanelDepth, tiles_.group)),
        turned_first_(can_be_turned(problem, tiles_)),
        along_(problem.w.c == s_.d),
        turned_(turned_first_ && (along_ || tiles_.group == 1) && whole_tiles(s_, tiles_)),
        as_is_(turned_ || (problem.batch <= kSmallBatch && can_be_left(problem, tiles_))) {
    const auto few = [&] { return jobs() < wanted_; };
    while (few() && cols_.each > tiles_.lanes * tiles_.vectors) {
      cols_.each -= tiles_.lanes * tiles_.vectors;
    }
    while (few() && strips_.each > 1) {
      strips_.each = ceil_div(strips_.each, 2);
    }
  }

  /// Whether weights can be read where they are.
  static bool can_be_left(const Problem& problem, const Tiles& tiles) {
    return problem.w.c == 1 && whole_tiles(problem.sizes, tiles);
  }

  std::size_t weight_bytes() const {
    return turned_ ? packing_.bytes(s_.a * s_.d * s_.b * s_.c) : as_is_ ? 0 : packing_.bytes(s_.a * s_.d * stride());
  }
  std::int64_t weight_jobs() const {
    return turned_ ? s_.a * turns().pieces() : as_is_ ? 0 : turned_first_ ? s_.a : s_.a * s_.d;
  }
  void pack_weights(std::int64_t job, std::byte* packed) const {
    if (turned_) {
      turn_weights(job / turns().pieces(), job % turns().pieces(), packed);
      return;
    }
    if (!turned_first_) {
      const Operand from = packing_.at(w(job / s_.d), 0, 0, job % s_.d);
      pack_strips({from.data, from.row, from.col}, job, packed);
      return;
    }
    const std::int64_t all = s_.b * s_.c;
    std::byte* const turned = Buffers::of_thread().left.need(packing_.bytes(all * s_.d));
    turn(w(job).data, s_.d, all, s_.d, turned, all, tiles_.element);
    for (std::int64_t l = 0; l < s_.d; ++l) {
      pack_strips({turned + packing_.bytes(l * all), along_ ? 1 : s_.b, along_ ? s_.c : 1}, job * s_.d + l, packed);
    }
  }

  std::int64_t jobs() const { return s_.a * s_.d * cols_.pieces() * strips_.pieces(); }
  void multiply(std::int64_t job, std::byte* packed) const {
    const std::int64_t group = job / strips_.pieces() / cols_.pieces();
    const std::int64_t first_col = job / strips_.pieces() % cols_.pieces() * cols_.each;
    const std::int64_t first_row = job % strips_.pieces() * strips_.each * tiles_.rows;
    Share share{group,
                group / s_.d,
                group % s_.d,
                first_col,
                first_row,
                std::min(strips_.each * tiles_.rows, s_.b - first_row),
                Columns(std::min(cols_.each, p_.batch - first_col), 1, tiles_)};
    const std::int64_t padded_rows = ceil_div(share.rows, tiles_.rows) * tiles_.rows;
    Buffers& buffers = Buffers::of_thread();
    share.bias = buffers.sums.need(tiles_.sum * static_cast<std::size_t>(padded_rows * (1 + share.columns.lanes())));
    share.sums = sum_at(share.bias, padded_rows);
    if (p_.bias.data != nullptr) {
      pack_bias(share.i, {share.l, 1, 0}, {first_row, share.rows, 0, 0, padded_rows}, share.bias);
    }
    share.right = buffers.right.need(packing_.bytes(pieces_.each * share.columns.lanes()));
    for (std::int64_t piece = 0; piece < pieces_.pieces(); ++piece) {
      if (!packs_while_multiplying()) {
        pack_panels(share, piece);
      }
      for (std::int64_t n = 0; n < share.columns.panels(); ++n) {
        multiply_panel(share, piece, share.columns.panel(n), packed);
      }
    }
  }

 private:
  /// One job: strips of weights of one δ by panels of the batch.
  struct Share {
    std::int64_t group, i, l, first_col, first_row, rows;
    Columns columns;
    std::byte *bias = nullptr, *sums = nullptr, *right = nullptr;
  };
  /// The first strip of weights packs a panel that lies in rows, and the second prefetches the panel to its right.
  bool packs_while_multiplying() const { return !tiles_.widens && tiles_.group == 1 && p_.x.batch == 1; }
  /// Packs panels of one width together, so that rows of x are read in sequence.
  void pack_panels(const Share& share, std::int64_t piece) const {
    const Columns& columns = share.columns;
    const std::int64_t k = piece * pieces_.each, depth = pieces_.size(piece);
    const Operand from = packing_.at(x(share.i), share.first_col, k, share.l);
    for (std::int64_t n = 0, same = 1; n < columns.panels(); n += same) {
      const Columns::Panel panel = columns.panel(n);
      std::int64_t count = panel.count;
      for (same = 1; n + same < columns.panels() && columns.panel(n + same).width == panel.width; ++same) {
        count += columns.panel(n + same).count;
      }
      tiles_.pack({packing_.at(from.data, panel.first * from.row), from.col, from.row}, std::min(depth, s_.c - k),
                  count, panel.width, share.right + packing_.bytes(depth * panel.first_vector * tiles_.lanes),
                  static_cast<std::int64_t>(packing_.bytes(depth * panel.width)));
    }
  }
  /// All strips of a share by one panel, over one piece of the depth.
  void multiply_panel(const Share& share, std::int64_t piece, const Columns::Panel& panel, std::byte* packed) const {
    const std::int64_t k = piece * pieces_.each, depth = pieces_.size(piece);
    const std::int64_t lane = panel.first_vector * tiles_.lanes, lanes = share.columns.lanes();
    const bool once = pieces_.pieces() == 1, whole = piece + 1 == pieces_.pieces();
    const bool packs = packs_while_multiplying(), whole_panel = panel.count == panel.width;
    const Operand from = packing_.at(x(share.i), share.first_col + panel.first, k, share.l);
    std::byte* const right = packs ? share.right : share.right + packing_.bytes(depth * lane);
    if (packs && !whole_panel) {
      tiles_.pack({from.data, from.col, from.row}, depth, panel.count, panel.width, right, 0);
    }
    simd::Product product{.count = 1, .steps = depth / tiles_.group, .right = right};
    product.raw_stride = from.col;
    product.row_stride = turned_ ? (along_ ? s_.c : 1) : as_is_ ? p_.w.b : tiles_.group;
    product.step_stride = tiles_.group * (!as_is_ ? tiles_.rows : turned_ && !along_ ? s_.b : 1);
    product.add = piece > 0;
    product.sum_stride = once ? panel.width : lanes;
    product.soon_stride = from.col * size_;
    product.soon_apart = kLine;
    const Operand out = packing_.at(y(share.i), share.first_col + panel.first, 0, share.l);
    product.out_stride = out.col;
    const auto lines = [&](std::intptr_t bytes) { return bytes % 64 == 0; };
    for (std::int64_t row = 0; row < share.rows; row += tiles_.rows) {
      const std::int64_t height = std::min(tiles_.rows, share.rows - row);
      const simd::Term term{left(packed, share.group, share.first_row + row, k), 0, nullptr};
      product.terms = &term;
      product.raw = packs && whole_panel && row == 0 ? from.data : nullptr;
      const bool fetches = packs && row == tiles_.rows && share.first_col + panel.first + panel.width < p_.batch;
      product.soon = fetches ? packing_.at(from.data, panel.width) : nullptr;
      product.sums = sum_at(share.sums, once ? 0 : row * lanes + lane);
      const Place place{packing_.at(out.data, (share.first_row + row) * out.col), out.col, out.row};
      const bool stores = whole && !finishes_ && height == tiles_.rows && whole_panel && out.row == 1;
      product.out = stores ? place.data : nullptr;
      product.stream = stream_ && lines(reinterpret_cast<std::intptr_t>(place.data)) && lines(out.col * size_) &&
                       lines(panel.width * size_);
      tiles_.multiply[panel.vectors - 1](product);
      if (whole && !stores) {
        store(product, height, panel, sum_at(share.bias, row), place);
      }
    }
  }
  /// Adds the bias, activates, and stores the sums of a tile.
  void store(const simd::Product& product, std::int64_t height, const Columns::Panel& panel, const std::byte* bias,
             const Place& place) const {
    if (finishes_) {
      const void* const row_bias = p_.bias.data != nullptr ? bias : nullptr;
      finish({product.sums, product.sum_stride, height, panel.width, row_bias, nullptr, p_.activation}, p_.dtype);
    }
    tiles_.store(product.sums, product.sum_stride, height, panel.count, place, stream_);
  }
  /// Whether strips of weights need no padding, and no conversion.
  static bool whole_tiles(const Sizes& s, const Tiles& tiles) {
    return !tiles.widens && s.b % tiles.rows == 0 && s.c % tiles.group == 0;
  }
  void pack_strips(const Place& from, std::int64_t group, std::byte* packed) const {
    tiles_.pack(from, s_.c, s_.b, tiles_.rows, packed + packing_.bytes(group * stride()),
                static_cast<std::int64_t>(packing_.bytes(depth_ * tiles_.rows)));
  }
  /// Whether one transposition brings the weights of each δ together. Pairs have no quick way to be packed from weights
  /// that are apart; other elements have one for short runs.
  static bool can_be_turned(const Problem& p, const Tiles& tiles) {
    const std::int64_t least = tiles.group > 1 ? 2 : kTurnedDeltas;
    return !tiles.widens && p.sizes.d >= least && is_compact(p.w, p.sizes);
  }
  /// Weights (j, k) in pieces that are turned at a time.
  Split turns() const { return {s_.b * s_.c, kTurnedTogether}; }
  void turn_weights(std::int64_t i, std::int64_t piece, std::byte* packed) const {
    const std::int64_t first = piece * kTurnedTogether, count = turns().size(piece), all = s_.b * s_.c;
    turn(packing_.at(w(i).data, first * s_.d), s_.d, count, s_.d, packed + packing_.bytes(i * s_.d * all + first), all,
         tiles_.element);
  }
  std::int64_t stride() const { return strips_.count * tiles_.rows * depth_; }
  /// A strip of weights from depth k on.
  const void* left(std::byte* packed, std::int64_t group, std::int64_t row, std::int64_t k) const {
    if (turned_) {
      return packed + packing_.bytes(group * s_.b * s_.c + (along_ ? row * s_.c + k : k * s_.b + row));
    }
    return as_is_ ? packing_.at(w(group / s_.d), k, row, group % s_.d).data
                  : packed + packing_.bytes(group * stride() + row * depth_ + k * tiles_.rows);
  }

  Split strips_, cols_, pieces_;
  bool turned_first_;  ///< weights are transposed first
  bool along_;         ///< weights of an output are contiguous for each δ then; else those of a place in depth are
  bool turned_;        ///< strips are then read as they lie
  bool as_is_;         ///< strips of weights are read from where they are, or from there
};

/// Batch first, with the batch on lanes: x is turned as it lies, all δ of a panel of batch rows at once, so that one δ
/// is every d-th row of the panel. Sums of all δ lie together too, and are turned back in whole runs of features.
class Turned : Work {
 public:
  /// A thread takes up to `most` batch rows at a time.
  Turned(const Problem& problem, Context& context, std::int64_t most = kBlockCols)
      : Work(problem, simd::widened_tiles(problem.dtype), context),
        strips_{ceil_div(s_.b, tiles_.rows), ceil_div(s_.b, tiles_.rows)},
        cols_(even(problem.batch, std::max(most, tiles_.lanes), tiles_.lanes)),
        stored_(std::max<std::int64_t>(1, kTurnedRows / (s_.d * tiles_.rows)) * tiles_.rows),
        as_is_(!tiles_.widens && s_.b % tiles_.rows == 0) {
    const auto few = [&] { return jobs() < wanted_; };
    while (few() && cols_.each > tiles_.lanes * tiles_.vectors) {
      cols_.each -= tiles_.lanes;
    }
    while (few() && strips_.each >= 2 * kTurnedStrips) {  // each turns x for itself
      strips_.each = ceil_div(strips_.each, 2);
    }
  }

  static bool fits(const Problem& p) {
    const auto& s = p.sizes;
    return s.d <= kTurnedRuns && s.c * s.d <= kTurnedDepth && p.x.feature == 1 && p.y.feature == 1;
  }

  std::size_t weight_bytes() const { return as_is_ ? 0 : packing_.bytes(s_.a * s_.d * stride()); }
  std::int64_t weight_jobs() const { return as_is_ ? 0 : s_.a * s_.d; }
  void pack_weights(std::int64_t job, std::byte* packed) const {
    const Operand from = packing_.at(w(job / s_.d), 0, 0, job % s_.d);
    tiles_.pack({from.data, from.row, from.col}, s_.c, s_.b, tiles_.rows, packed + packing_.bytes(job * stride()),
                static_cast<std::int64_t>(packing_.bytes(s_.c * tiles_.rows)));
  }

  std::int64_t jobs() const { return s_.a * cols_.pieces() * strips_.pieces(); }
  void multiply(std::int64_t job, std::byte* packed) const {
    const std::int64_t i = job / strips_.pieces() / cols_.pieces();
    const std::int64_t first_col = job / strips_.pieces() % cols_.pieces() * cols_.each;
    const std::int64_t first_row = job % strips_.pieces() * strips_.each * tiles_.rows;
    const std::int64_t rows = std::min(strips_.each * tiles_.rows, s_.b - first_row);
    const Columns columns(std::min(cols_.each, p_.batch - first_col), 1, tiles_);
    Buffers& buffers = Buffers::of_thread();
    const std::int64_t widest = tiles_.lanes * tiles_.vectors,
                       features = ceil_div(rows, tiles_.rows) * tiles_.rows * s_.d;
    std::byte* const right = buffers.right.need(packing_.bytes(s_.c * s_.d * widest));
    std::byte* const bias =
        buffers.sums.need(tiles_.sum * static_cast<std::size_t>(features + stored_ * s_.d * widest));
    std::byte* const sums = sum_at(bias, features);
    if (p_.bias.data != nullptr) {
      const std::int64_t first = (i * s_.b + first_row) * s_.d;
      tiles_.pack({packing_.at(p_.bias.data, first * p_.bias.stride), 0, p_.bias.stride}, 1, rows * s_.d, features,
                  bias, 0);
    }
    for (std::int64_t n = 0; n < columns.panels(); ++n) {
      const Columns::Panel panel = columns.panel(n);
      const Operand from = packing_.at(x(i), first_col + panel.first, 0, 0);
      tiles_.pack({from.data, from.delta, from.row}, s_.c * s_.d, panel.count, panel.width, right, 0);
      for (std::int64_t row = 0; row < rows; row += stored_) {
        const std::int64_t height = std::min(stored_, rows - row);
        fill_sums(i, first_row + row, height, panel, packed, right, sums);
        if (finishes_) {
          const void* const row_bias = p_.bias.data != nullptr ? sum_at(bias, row * s_.d) : nullptr;
          finish({sums, panel.width, height * s_.d, panel.width, row_bias, nullptr, p_.activation}, p_.dtype);
        }
        const Operand out = packing_.at(y(i), first_col + panel.first, first_row + row, 0);
        tiles_.store(sums, panel.width, height * s_.d, panel.count, {out.data, out.delta, out.row}, stream_);
      }
    }
  }

 private:
  std::int64_t stride() const { return strips_.count * tiles_.rows * s_.c; }
  /// sums[(j, l)][n] for the outputs j from `first` on.
  void fill_sums(std::int64_t i, std::int64_t first, std::int64_t rows, const Columns::Panel& panel, std::byte* packed,
                 std::byte* right, std::byte* sums) const {
    simd::Product product{.count = 1, .steps = s_.c};
    product.right_stride = s_.d * panel.width;
    product.sum_stride = s_.d * panel.width;
    product.row_stride = as_is_ ? p_.w.b : 1;
    product.step_stride = as_is_ ? p_.w.c : tiles_.rows;
    for (std::int64_t row = 0; row < rows; row += tiles_.rows) {
      for (std::int64_t l = 0; l < s_.d; ++l) {
        const simd::Term term{as_is_ ? packing_.at(w(i), 0, first + row, l).data
                                     : packed + packing_.bytes((i * s_.d + l) * stride() + (first + row) * s_.c),
                              0, nullptr};
        product.terms = &term;
        product.right = right + packing_.bytes(l * panel.width);
        product.sums = sum_at(sums, (row * s_.d + l) * panel.width);
        tiles_.multiply_in_place[panel.vectors - 1](product);
      }
    }
  }

  Split strips_, cols_;
  std::int64_t stored_;  ///< outputs of a panel that are stored together
  bool as_is_;           ///< weights are read where they are
};

/// A large result often lies in fresh memory, whose pages would take longer than the product.
void ask_for_large_pages(const Problem& p) {
  const auto extent = [](std::int64_t count, std::int64_t stride) { return (count - 1) * stride; };
  const std::int64_t rows = extent(p.batch, p.y.batch), cols = extent(p.sizes.a * p.sizes.b * p.sizes.d, p.y.feature);
  const auto size = static_cast<std::int64_t>(size_of(p.dtype));
  const std::int64_t first = (std::min<std::int64_t>(rows, 0) + std::min<std::int64_t>(cols, 0)) * size;
  const std::int64_t last = (std::max<std::int64_t>(rows, 0) + std::max<std::int64_t>(cols, 0) + 1) * size;
  if (last - first >= kFreshBytes) {
    fretwork::ask_for_large_pages(static_cast<const std::byte*>(p.y.data) + first,
                                  static_cast<std::size_t>(last - first));
  }
}

/// Whether the batch goes on lanes: where it is contiguous, and where turning x and y is less work than turning w.
bool batch_on_lanes(const Problem& p) {
  const auto& s = p.sizes;
  const bool last = p.batch > 1 && p.x.batch == 1 && p.y.batch == 1;
  const Tiles& tiles = simd::tiles(p.dtype);
  const std::int64_t less = s.b * s.c / (s.b + s.c);
  const bool small = p.batch <= (tiles.group > 1 ? less / 4 : std::max<std::int64_t>(8, less));
  return last || (s.d == 1 && small && p.batch <= kSmallBatch && BatchLast::can_be_left(p, tiles));
}

/// Whether turning x and y is less work than packing w for runs of δ: where these do not fill vectors (as 3 of 4 lanes,
/// or 8 outputs of 16), and for small batches. Fitted to times with and without AVX512-BF16's pairs, which turn
/// nothing.
bool turns(const Problem& p) {
  const auto& s = p.sizes;
  if (!Turned::fits(p)) {
    return false;
  }
  if (s.d == 1) {
    const Tiles& tiles = simd::tiles(p.dtype);
    if (tiles.group > 1) {
      return s.b < tiles.lanes && s.c < 2 * tiles.lanes;
    }
    return s.b < 2 * tiles.lanes || (p.batch <= kSmallBatch && !tiles.widens);
  }
  const bool fills = (s.d & (s.d - 1)) == 0 || s.d % simd::widened_tiles(p.dtype).lanes == 0;
  return !fills || (s.d <= kShortRun && s.b % 8 == 0 && p.batch * s.d <= kTurnedElements);
}

/// Whether copies of x, w and y that bring each δ together pay. Products in pairs make up for them where blocks are
/// large and rows are many: pairs have no runs of δ, and the other loops widen elements. And a few rows meet runs that
/// do not fill vectors.
bool regroups(const Problem& p) {
  const auto& s = p.sizes;
  if (s.d == 1 || p.x.feature != 1 || p.y.feature != 1 || p.batch < kRegroupedFew || !is_compact(p.w, s)) {
    return false;
  }
  const bool large = is_broad(s) || is_long(s);
  const bool few = simd::widened_tiles(p.dtype).widens && few_rows_fit(p) && runs_are_odd(p) && !few_rows_pay(p);
  return (simd::tiles(p.dtype).group > 1 && p.batch >= kRegroupedRows && large) || few;
}

/// A part of the batch at a time, so that its copies stay in the caches.
void run_regrouped(const Problem& problem, Context& context) {
  const Sizes& s = problem.sizes;
  const std::int64_t in = s.a * s.c * s.d, out = s.a * s.b * s.d;
  const auto size = static_cast<std::int64_t>(size_of(problem.dtype));
  const Split rows =
      even(problem.batch, std::max<std::int64_t>(kRegroupedBytes / ((in + out) * size), kRegroupedLeast), 8);
  const Workspace weights(context, static_cast<std::size_t>(s.a * s.b * s.c * s.d * size)),
      copies(context, static_cast<std::size_t>((rows.each * (in + out) + out) * size));
  const auto at = [&](const void* data, std::int64_t element) {
    return static_cast<std::byte*>(const_cast<void*>(data)) + element * size;
  };
  Problem part = problem;
  part.sizes = {s.a * s.d, s.b, s.c, 1};
  part.w = take_apart(problem.w, s, weights.data(), problem.dtype, context);
  part.x = {copies.data(), in, 1};
  part.y = {at(part.x.data, rows.each * in), out, 1};
  if (problem.bias.data != nullptr) {
    part.bias = {at(part.y.data, rows.each * out), 1};
    for (std::int64_t i = 0; i < s.a; ++i) {
      const Operand from{at(problem.bias.data, i * s.b * s.d * problem.bias.stride)};
      for (std::int64_t l = 0; l < s.d; ++l) {
        for (std::int64_t j = 0; j < s.b; ++j) {
          std::memcpy(at(part.bias.data, (i * s.d + l) * s.b + j), at(from.data, (j * s.d + l) * problem.bias.stride),
                      static_cast<std::size_t>(size));
        }
      }
    }
  }
  for (std::int64_t n = 0; n < rows.pieces(); ++n) {
    const std::int64_t first = n * rows.each;
    part.batch = rows.size(n);
    const Matrix x{at(problem.x.data, first * problem.x.batch), problem.x.batch, 1};
    const Matrix y{at(problem.y.data, first * problem.y.batch), problem.y.batch, 1};
    take_apart(x, part.batch, s, s.c, part.x.data, true, problem.dtype, context);
    run(part, context);
    put_together(part.y.data, part.batch, s, s.b, y, problem.dtype, context);
  }
}

}  // namespace

void run(const Problem& problem, Context& context) {
  ask_for_large_pages(problem);
  if (regroups(problem)) {
    run_regrouped(problem, context);
    return;
  }
  if (few_rows_fit(problem) && few_rows_pay(problem)) {
    run_few_rows(problem, context);
    return;
  }
  if (few_outputs_fit(problem)) {
    run_few_outputs(problem, context);
    return;
  }
  if (turns(problem)) {
    run_as<Turned>(problem, context);
    return;
  }
  batch_on_lanes(problem) ? run_as<BatchLast>(problem, context) : run_as<BatchFirst>(problem, context);
}

bool run(const Problem& problem, Context& context, const Config& config) {
  switch (config.family) {
    case Family::rows:
      ask_for_large_pages(problem);
      run_as<BatchFirst>(problem, context, config.first);
      return true;
    case Family::lanes:
      ask_for_large_pages(problem);
      Turned::fits(problem) ? run_as<Turned>(problem, context, config.first)
                            : run_as<BatchLast>(problem, context, config.first);
      return true;
    case Family::few:
      return few_rows_fit(problem) && (run_few_rows(problem, context), true);
    default:
      return false;
  }
}

std::vector<Config> candidates(const Problem& problem) {
  std::vector<Config> list;
  for (const int factor : {1, 2, 4, 8}) {
    list.push_back({Family::rows, static_cast<int>(kBlockRows) * factor / 4});
    list.push_back({Family::lanes, static_cast<int>(kBlockCols) * factor / 2});
  }
  if (few_rows_fit(problem)) {
    list.push_back({Family::few});
  }
  return list;
}

}  // namespace fretwork::kronecker::cpu
