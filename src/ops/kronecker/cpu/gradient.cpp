// The gradients of weights and bias on the CPU: products whose depth is the batch. Rows are features j of d_y, columns
// features k of x; batch first, their δ stay together on lanes, as in the product.
//
// Where weights are few, the batch is cut into pieces whose sums are added in order. The number of pieces does not
// depend on the number of threads, so results do not either.
#include "ops/kronecker/cpu/run.h"

namespace fretwork::kronecker::cpu {
namespace {

/// Elements of a packed row of d_y, and of packed x: they leave room in a first- and a second-level cache.
constexpr std::int64_t kLeftRow = 1024, kBlockElements = 128 << 10;
/// Depth at a time at most, and at least if the batch is cut.
constexpr std::int64_t kDepth = 256, kLeastPiece = 512;
/// Sums of a block: rows and lanes.
constexpr std::int64_t kBlockRows = 128, kBlockLanes = 1024;
/// Blocks wanted of a call, so that all threads have work.
constexpr std::int64_t kBlocks = 64;

/// The batch in as many pieces as `jobs` of each leave wanting, in multiples of `unit`.
Split pieces_of(std::int64_t batch, std::int64_t jobs, std::int64_t unit) {
  const std::int64_t count = std::max<std::int64_t>(batch, 1);
  const std::int64_t pieces =
      std::clamp(kBlocks / jobs, std::int64_t{1}, std::max<std::int64_t>(batch / kLeastPiece, 1));
  return even(count, ceil_div(count, pieces), unit);
}

/// The least batch that is regrouped, and bytes of x and d_y at most.
constexpr std::int64_t kRegroupedRows = 8, kRegroupedBytes = 64 << 20;

/// Whether δ are computed each by itself, though they are neighbours: runs that leave lanes empty cost more.
bool apart(const Sizes& s, bool last, const Tiles& tiles) {
  return !last && s.d < tiles.lanes && (s.d & (s.d - 1)) != 0;
}

class WeightWork {
 public:
  /// For so many threads.
  WeightWork(const WeightProblem& problem, bool last, std::int64_t threads)
      : p_(problem),
        s_(problem.sizes),
        tiles_(last || s_.d == 1 ? simd::tiles(problem.dtype) : simd::widened_tiles(problem.dtype)),
        packing_(problem.dtype, tiles_),
        apart_(apart(s_, last, tiles_)),
        rows_(even(s_.b, kBlockRows, tiles_.rows)) {
    std::int64_t panels = 1;
    for (const Chunk& chunk : chunks(s_.d, last || apart_ ? 1 : tiles_.lanes)) {
      const Columns& columns = parts_.emplace_back(chunk, Columns(s_.c, chunk.run(), tiles_)).columns;
      blocks_ = std::max(blocks_, ceil_div(columns.lanes(), kBlockLanes));
      panels = std::max(panels, columns.panels());
    }
    batch_ = pieces_of(p_.batch, jobs(), tiles_.group);  // before the number of threads counts: sums depend on it
    // More blocks for threads without work.
    const auto cut_columns = [&] { return blocks_ < panels && (++blocks_, true); };
    const auto cut_rows = [&] {
      return rows_.each > tiles_.rows && (rows_ = even(s_.b, rows_.each / 2, tiles_.rows), true);
    };
    while (jobs() * pieces() < threads && (s_.b > s_.c ? cut_rows() || cut_columns() : cut_columns() || cut_rows())) {
    }
    lanes_ = ceil_div(panels, blocks_) * tiles_.vectors * tiles_.lanes;
  }

  /// Blocks of the result; and the pieces of the batch for each.
  std::int64_t jobs() const { return s_.a * static_cast<std::int64_t>(parts_.size()) * rows_.pieces() * blocks_; }
  std::int64_t pieces() const { return batch_.pieces(); }
  std::size_t bytes() const {
    return pieces() == 1 ? 0 : static_cast<std::size_t>(jobs() * pieces() * block_sums()) * tiles_.sum;
  }

  /// The sums of one block over one piece; stored if there is no other, else kept in `partial`.
  void multiply(std::int64_t job, std::int64_t piece, std::byte* partial) const {
    const Block block = block_of(job);
    if (block.lanes == 0) {
      return;
    }
    Buffers& buffers = Buffers::of_thread();
    const std::size_t size = static_cast<std::size_t>(block_sums()) * tiles_.sum;
    std::byte* const sums = partial == nullptr ? buffers.sums.need(size)
                                               : partial + static_cast<std::size_t>(job * pieces() + piece) * size;
    const Chunk& chunk = block.part->chunk;
    const std::int64_t first = piece * batch_.each, count = std::min(batch_.each, p_.batch - first);
    if (count <= 0) {
      std::memset(sums, 0, size);
    }
    const std::int64_t most = std::min({kDepth, kLeftRow / chunk.run(), kBlockElements / block.lanes});
    for (std::int64_t n = 0; n < count;) {
      const std::int64_t deep = std::min(even(count, most, tiles_.group).each, count - n);
      multiply(block, first + n, deep, n > 0, sums, buffers);
      n += deep;
    }
    if (partial == nullptr) {
      store(block, sums);
    }
  }

  /// Adds the pieces of a block, in their order, and stores it.
  void add_pieces(std::int64_t job, std::byte* partial) const {
    const Block block = block_of(job);
    if (block.lanes == 0) {
      return;
    }
    const std::int64_t all = block_sums(), used = rows_.each * block.lanes;
    std::byte* const sums = partial + static_cast<std::size_t>(job * pieces() * all) * tiles_.sum;
    for (std::int64_t piece = 1; piece < pieces(); ++piece) {
      add_up(sums + static_cast<std::size_t>(piece * all) * tiles_.sum, 1, used, false, sums, p_.dtype);
    }
    store(block, sums);
  }

 private:
  struct Part {
    Chunk chunk;
    Columns columns;
  };
  struct Block {
    const Part* part;
    std::int64_t i, first_row, rows, first_panel, last_panel, lane, lanes;
  };
  std::int64_t block_sums() const { return rows_.each * lanes_; }

  Block block_of(std::int64_t job) const {
    const std::int64_t row = job / blocks_ % rows_.pieces(), other = job / blocks_ / rows_.pieces();
    const auto count = static_cast<std::int64_t>(parts_.size());
    const Part& part = parts_[static_cast<std::size_t>(other % count)];
    const std::int64_t panels = part.columns.panels(), n = job % blocks_;
    Block block{
        &part, other / count, row * rows_.each, rows_.size(row), panels * n / blocks_, panels * (n + 1) / blocks_, 0,
        0};
    if (block.first_panel < block.last_panel) {
      const Columns::Panel last = part.columns.panel(block.last_panel - 1);
      block.lane = part.columns.panel(block.first_panel).first_vector * tiles_.lanes;
      block.lanes = last.first_vector * tiles_.lanes + last.width - block.lane;
    }
    return block;
  }

  /// Adds batch rows [first, first + count).
  void multiply(const Block& block, std::int64_t first, std::int64_t count, bool add, std::byte* sums,
                Buffers& buffers) const {
    const auto& [chunk, columns] = *block.part;
    const std::int64_t depth = packing_.padded(count);
    std::byte* const right = buffers.right.need(packing_.bytes(depth * block.lanes));
    std::byte* const left = buffers.left.need(packing_.bytes(depth * tiles_.rows * chunk.run()));
    const Operand x = packing_.at(packing_.block(p_.x, block.i, s_.c, s_), first, 0, chunk.first);
    for (std::int64_t n = block.first_panel; n < block.last_panel; ++n) {
      const Columns::Panel panel = columns.panel(n);
      packing_.right(packing_.at(x, 0, panel.first, 0), count, chunk, panel,
                     right + packing_.bytes((panel.first_vector * tiles_.lanes - block.lane) * depth));
    }
    Operand d_y = packing_.at(packing_.block(p_.d_y, block.i, s_.b, s_), first, block.first_row, chunk.first);
    std::swap(d_y.row, d_y.col);
    for (std::int64_t row = 0; row < block.rows; row += tiles_.rows) {
      const std::int64_t rows = std::min(tiles_.rows, block.rows - row);
      const Operand from = packing_.at(d_y, row, 0, 0);
      const bool as_is = apart_ && !tiles_.widens && rows == tiles_.rows;
      const Packing::Strip strip =
          as_is ? Packing::Strip{false, from.row, from.col} : packing_.left(from, rows, count, chunk, left);
      const simd::Term term{as_is ? from.data : left, 0, nullptr};
      simd::Product product{.terms = &term, .count = 1, .steps = depth / tiles_.group};
      product.row_stride = strip.row;
      product.step_stride = strip.step;
      product.add = add;
      product.sum_stride = block.lanes;
      for (std::int64_t n = block.first_panel; n < block.last_panel; ++n) {
        const Columns::Panel panel = columns.panel(n);
        const std::int64_t lane = panel.first_vector * tiles_.lanes - block.lane;
        product.right = right + packing_.bytes(lane * depth);
        product.sums = sums + static_cast<std::size_t>(row * block.lanes + lane) * tiles_.sum;
        (tiles_.group > 1 ? tiles_.multiply : tiles_.multiply_runs[chunk.log])[panel.vectors - 1](product);
      }
    }
  }

  void store(const Block& block, const std::byte* sums) const {
    const auto& [chunk, columns] = *block.part;
    const Weights& w = p_.d_w;
    const Columns::Panel last = columns.panel(block.last_panel - 1);
    const std::int64_t first = columns.panel(block.first_panel).first;
    const Operand to{packing_.at(w.data, block.i * w.a + block.first_row * w.b + first * w.c + chunk.first * w.d), w.b,
                     w.c, w.d};
    packing_.store(sums, block.lanes, block.rows, last.first + last.count - first, chunk, to, false);
  }

  const WeightProblem& p_;
  const Sizes& s_;
  const Tiles& tiles_;
  Packing packing_;
  bool apart_;
  Split rows_;
  std::vector<Part> parts_;
  std::int64_t blocks_ = 1, lanes_ = 0;
  Split batch_{1, 1};
};

/// Σ_n d_y[n], a panel of features and a piece of the batch at a time; pieces are added in their order.
void add_bias(const WeightProblem& p, bool last, Context& context) {
  const Tiles& tiles = simd::widened_tiles(p.dtype);
  const Packing packing(p.dtype, tiles);
  const std::int64_t features = p.sizes.a * p.sizes.b * p.sizes.d, width = 64, jobs = ceil_div(features, width);
  const Split batch = pieces_of(p.batch, jobs, 1);
  const std::int64_t pieces = batch.pieces();
  const std::size_t size = packing.bytes(width);
  const Workspace workspace(context, pieces == 1 ? 0 : static_cast<std::size_t>(jobs * pieces) * size);
  std::byte* const partial = static_cast<std::byte*>(workspace.data());
  const auto store = [&](std::int64_t job, std::byte* sums) {
    const std::int64_t f = job * width;
    tiles.store(sums, width, 1, std::min(width, features - f),
                {packing.at(p.d_bias.data, f * p.d_bias.stride), 0, p.d_bias.stride}, false);
  };
  const auto add_piece = [&](std::int64_t job, std::int64_t piece, std::byte* sums) {
    const std::int64_t f = job * width, count = std::min(width, features - f);
    const std::int64_t end = std::min((piece + 1) * batch.each, p.batch);
    std::byte* const packed = Buffers::of_thread().right.need(packing.bytes(kDepth * width));
    std::memset(sums, 0, size);
    for (std::int64_t n = piece * batch.each; n < end; n += kDepth) {
      const std::int64_t depth = std::min(kDepth, end - n);
      void* const from = packing.at(p.d_y.data, n * p.d_y.batch + f * p.d_y.feature);
      if (last) {
        tiles.pack({from, p.d_y.feature, p.d_y.batch}, count, depth, depth, packed, 0);
        add_up(packed, count, depth, true, sums, p.dtype);
      } else {
        tiles.pack({from, p.d_y.batch, p.d_y.feature}, depth, count, count, packed, 0);
        add_up(packed, depth, count, false, sums, p.dtype);
      }
    }
  };
  const double operations = 4 * static_cast<double>(features) * static_cast<double>(p.batch + 1);
  for_jobs(jobs * pieces, operations, context, [&](std::int64_t n) {
    std::byte* const sums =
        partial == nullptr ? Buffers::of_thread().sums.need(size) : partial + static_cast<std::size_t>(n) * size;
    add_piece(n / pieces, n % pieces, sums);
    if (partial == nullptr) {
      store(n, sums);
    }
  });
  for (std::int64_t job = 0; partial != nullptr && job < jobs; ++job) {
    std::byte* const sums = partial + static_cast<std::size_t>(job * pieces) * size;
    add_up(sums + size, pieces - 1, width, false, sums, p.dtype);
    store(job, sums);
  }
}

/// Whether weights lie as (a, b, c, d) without gaps.
bool lies_along(const WeightProblem& p) { return p.d_w.c == p.sizes.d && is_compact(p.d_w, p.sizes); }

/// Whether such δ would be stored one element after the other.
bool stored_apart(const WeightProblem& p, bool last) {
  return p.sizes.d > 1 && (last || apart(p.sizes, last, simd::widened_tiles(p.dtype))) && lies_along(p);
}

/// Whether products in pairs make up for copies of x and d_y that bring each δ together.
bool regroups(const WeightProblem& p, bool last) {
  const auto& [a, b, c, d] = p.sizes;
  const bool pairs = simd::tiles(p.dtype).group > 1 && d > 1 && !last && p.x.feature == 1 && p.d_y.feature == 1;
  const auto bytes = p.batch * a * (b + c) * d * static_cast<std::int64_t>(size_of(p.dtype));
  const bool large = is_broad(p.sizes) || (is_long(p.sizes) && apart(p.sizes, last, simd::widened_tiles(p.dtype)));
  return pairs && lies_along(p) && p.batch >= kRegroupedRows && large && bytes <= kRegroupedBytes;
}

/// The gradient with weights (a, d, b, c), which are put together then; x and d_y are copied if `copies`.
void run_apart(const WeightProblem& problem, bool copies, Context& context) {
  const Sizes& s = problem.sizes;
  const auto size = static_cast<std::int64_t>(size_of(problem.dtype));
  const std::int64_t in = s.a * s.c * s.d, out = s.a * s.b * s.d;
  const Workspace weights(context, static_cast<std::size_t>(s.a * s.b * s.c * s.d * size)),
      rows(context, copies ? static_cast<std::size_t>(problem.batch * (in + out) * size) : 0);
  WeightProblem apart = problem;
  apart.d_bias = {};
  apart.d_w = {weights.data(), s.d * s.b * s.c, s.c, 1, s.b * s.c};
  if (copies) {
    apart.sizes = {s.a * s.d, s.b, s.c, 1};
    apart.d_w = {weights.data(), s.b * s.c, s.c, 1, 1};
    apart.x = {rows.data(), in, 1};
    apart.d_y = {static_cast<std::byte*>(rows.data()) + problem.batch * in * size, out, 1};
    take_apart(problem.x, problem.batch, s, s.c, apart.x.data, false, problem.dtype, context);
    take_apart(problem.d_y, problem.batch, s, s.b, apart.d_y.data, false, problem.dtype, context);
  }
  run(apart, context);
  put_together(weights.data(), problem.d_w, s, problem.dtype, context);
}

/// The gradient in blocks, each over one piece of the batch after the other.
void run_packed(const WeightProblem& problem, bool last, Context& context) {
  const WeightWork work(problem, last, context.executor->concurrency());
  const std::int64_t jobs = work.jobs(), pieces = work.pieces();
  const Workspace workspace(context, work.bytes());
  std::byte* const partial = static_cast<std::byte*>(workspace.data());
  const Sizes& s = problem.sizes;
  for_jobs(jobs * pieces, operations_of(s, problem.batch), context,
           [&](std::int64_t n) { work.multiply(n / pieces, n % pieces, partial); });
  if (partial != nullptr) {
    for_jobs(jobs, weights_of(s) * static_cast<double>(pieces), context,
             [&](std::int64_t job) { work.add_pieces(job, partial); });
  }
}

}  // namespace

void run(const WeightProblem& problem, Context& context) {
  const bool last = problem.batch > 1 && problem.x.batch == 1 && problem.d_y.batch == 1;
  if (!run_as_it_lies(problem, last, context)) {
    const bool copies = regroups(problem, last);
    copies || stored_apart(problem, last) ? run_apart(problem, copies, context) : run_packed(problem, last, context);
  }
  if (problem.d_bias.data != nullptr) {
    add_bias(problem, last, context);
  }
}

}  // namespace fretwork::kronecker::cpu
