// The block-sparse products on the CPU: equal shares of work for the caller's threads, tiles from runtime/simd.
//
// Work is laid out on a line: batch, then slab (columns of the result that share one packed panel of the right
// operand), then unit (one tile: a strip of rows of one block-row, or of one block for sdd). Threads take equal
// stretches of it. A tile's sum is computed whole by one thread in a fixed order, so results do not depend on the
// number of threads.
#include <algorithm>
#include <vector>

#include "ops/block_matmul/problem.h"
#include "runtime/simd/tiles.h"

namespace fretwork::block_matmul::cpu {
namespace {

using simd::Place;
using simd::Tiles;

/// Depth of a panel of sdd: 2048 × 48 fp32 leave room in a second-level cache of 1 MB.
constexpr std::int64_t kDeepest = 2048;
/// Stretches per thread, and the least work worth one.
constexpr std::int64_t kStretches = 4;
constexpr double kLeastFlops = 2e6;

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

/// What a thread needs to work on tiles, kept between calls.
struct Buffers {
  simd::Scratch panel, strip, sums;
  std::vector<simd::Term> terms;
  std::vector<std::uint8_t> packed;
};

Buffers& thread_buffers() {
  thread_local Buffers buffers;
  return buffers;
}

/// Columns of a result, cut into slabs of 1 to kMaxVectors vectors, as even as they come.
struct Slabs {
  std::int64_t cols, lanes, vectors, count;
  Slabs(std::int64_t cols, std::int64_t lanes)
      : cols(cols), lanes(lanes), vectors(ceil_div(cols, lanes)), count(ceil_div(vectors, simd::kMaxVectors)) {}
  std::int64_t first_vector(std::int64_t slab) const { return vectors * slab / count; }
};

struct Slab {
  std::int64_t first, cols, vectors;
  Slab(const Slabs& all, std::int64_t slab)
      : first(all.first_vector(slab) * all.lanes),
        cols(std::min(all.first_vector(slab + 1) * all.lanes, all.cols) - first),
        vectors(all.first_vector(slab + 1) - all.first_vector(slab)) {}
};

/// What both kinds share: operands by batch, and a strip of the left operand in a form the multiplier reads.
class Work {
 public:
  Work(const Problem& problem, const Tiles& tiles)
      : p_(problem), tiles_(tiles), size_(static_cast<std::int64_t>(size_of(problem.dtype))) {}

 protected:
  std::byte* at(void* data, std::int64_t element) const { return static_cast<std::byte*>(data) + element * size_; }
  Place place(const Matrix& m, std::int64_t z, std::int64_t h, std::int64_t row, std::int64_t col) const {
    return {at(m.data, z * m.z_stride + h * m.h_stride + row * m.row_stride + col * m.col_stride), m.row_stride,
            m.col_stride};
  }
  std::int64_t head(std::int64_t h) const { return p_.layout->heads() == 1 ? 0 : h; }
  std::int64_t depth_padded(std::int64_t depth) const { return ceil_div(depth, tiles_.group) * tiles_.group; }
  std::size_t panel_bytes(std::int64_t depth, std::int64_t width) const {
    return static_cast<std::size_t>(depth_padded(depth) * width) * tiles_.element;
  }

  /// How the strips of one tile are read.
  enum class Strip : std::uint8_t { as_is, as_rows, as_panel };
  Strip strip_form(const Place& left, std::int64_t rows, std::int64_t depth, bool near) const {
    const bool full = rows == tiles_.rows, along = left.col_stride == 1 && depth % tiles_.group == 0;
    if (full && !tiles_.widens && (along || (tiles_.group == 1 && near))) {
      return Strip::as_is;
    }
    return full && along && tiles_.group == 1 ? Strip::as_rows : Strip::as_panel;
  }
  void set_strides(Strip form, const Place& left, std::int64_t depth, simd::Product& product) const {
    product.steps = depth_padded(depth) / tiles_.group;
    product.row_stride = form == Strip::as_is ? left.row_stride : form == Strip::as_rows ? depth : tiles_.group;
    product.step_stride = form == Strip::as_is     ? left.col_stride * tiles_.group
                          : form == Strip::as_rows ? 1
                                                   : tiles_.group * tiles_.rows;
  }
  /// The strip in that form; packed ones go to `to`.
  const void* strip(Strip form, const Place& left, std::int64_t rows, std::int64_t depth, std::byte* to) const {
    switch (form) {
      case Strip::as_is:
        return left.data;
      case Strip::as_rows:
        tiles_.pack(left, rows, depth, depth, to);
        return to;
      case Strip::as_panel:
        tiles_.pack({left.data, left.col_stride, left.row_stride}, depth, rows, tiles_.rows, to);
        return to;
    }
    return nullptr;
  }

  const Problem& p_;
  const Tiles& tiles_;
  std::int64_t size_;
};

/// A unit is a strip of rows of one block-row; its terms are the blocks of the row.
class Spmm : Work {
 public:
  Spmm(const Problem& problem, const Tiles& tiles)
      : Work(problem, tiles),
        index_(problem.transposed ? problem.layout->by_col() : problem.layout->by_row()),
        slabs_(problem.out.cols, tiles.lanes) {
    const BlockLayout::Sizes& s = problem.layout->sizes();
    lines_ = problem.transposed ? s.cols : s.rows;
    line_rows_ = problem.transposed ? s.block_cols : s.block_rows;
    depth_ = problem.transposed ? s.block_rows : s.block_cols;
    others_ = problem.transposed ? s.rows : s.cols;
    row_stride_ = problem.transposed ? problem.sparse.col_stride : problem.sparse.row_stride;
    depth_stride_ = problem.transposed ? problem.sparse.row_stride : problem.sparse.col_stride;
    strips_ = ceil_div(line_rows_, tiles.rows);
    weigh();
  }

  std::int64_t total() const { return batch_first_.back(); }
  double flops_per_unit() const { return 2.0 * static_cast<double>(tiles_.rows * tiles_.lanes * depth_); }

  void run(std::int64_t begin, std::int64_t end) const {
    const std::int64_t last_batch = static_cast<std::int64_t>(batch_first_.size()) - 1;
    auto batch = std::upper_bound(batch_first_.begin(), batch_first_.end(), begin) - batch_first_.begin() - 1;
    for (; batch < last_batch && batch_first_[static_cast<std::size_t>(batch)] < end; ++batch) {
      const std::int64_t h = batch % p_.h_out, base = batch_first_[static_cast<std::size_t>(batch)];
      const std::int64_t column_cost = line_first(h, lines_) * strips_;
      for (std::int64_t s = 0; s < slabs_.count; ++s) {
        const std::int64_t first = base + column_cost * slabs_.first_vector(s);
        const std::int64_t last = base + column_cost * slabs_.first_vector(s + 1);
        if (last > begin && first < end) {
          const Slab slab(slabs_, s);
          work(batch / p_.h_out, h, slab, unit_at(h, ceil_div(std::max(begin - first, std::int64_t{0}), slab.vectors)),
               unit_at(h, ceil_div(std::min(end, last) - first, slab.vectors)));
        }
      }
    }
  }

 private:
  /// Cost of a line's strip: its blocks, and one more for the store.
  void weigh() {
    const std::int64_t different = p_.layout->heads() == 1 || p_.h_sum > 1 ? 1 : p_.h_out;
    for (std::int64_t h = 0; h < different; ++h) {
      line_first_.push_back(0);
      for (std::int64_t l = 0; l < lines_; ++l) {
        std::int64_t cost = 1;
        for (std::int64_t s = 0; s < p_.h_sum; ++s) {
          cost += p_.z_sum * static_cast<std::int64_t>(index_.line(head(h + s) * lines_ + l).size());
        }
        line_first_.push_back(line_first_.back() + cost);
      }
    }
    batch_first_.push_back(0);
    for (std::int64_t batch = 0; batch < p_.z_out * p_.h_out; ++batch) {
      batch_first_.push_back(batch_first_.back() + line_first(batch % p_.h_out, lines_) * strips_ * slabs_.vectors);
    }
  }
  const std::int64_t* lines_of(std::int64_t h) const {
    const bool same = static_cast<std::int64_t>(line_first_.size()) == lines_ + 1;
    return line_first_.data() + (same ? 0 : h * (lines_ + 1));
  }
  std::int64_t line_first(std::int64_t h, std::int64_t line) const { return lines_of(h)[line]; }

  /// The first unit of a slab that begins at `cost` or later.
  std::int64_t unit_at(std::int64_t h, std::int64_t cost) const {
    const std::int64_t* const first = lines_of(h);
    const std::int64_t line =
        std::min(std::upper_bound(first, first + lines_ + 1, cost / strips_) - first - 1, lines_ - 1);
    return line * strips_ + ceil_div(cost - first[line] * strips_, first[line + 1] - first[line]);
  }

  void work(std::int64_t z, std::int64_t h, const Slab& slab, std::int64_t begin, std::int64_t end) const {
    Buffers& buffers = thread_buffers();
    const std::int64_t width = slab.vectors * tiles_.lanes, phases = p_.z_sum * p_.h_sum;
    const std::size_t tile_bytes = static_cast<std::size_t>(tiles_.rows * width) * tiles_.sum;
    const std::size_t panel_bytes = Work::panel_bytes(depth_, width);
    std::byte* const panels = buffers.panel.need<std::byte>(panel_bytes * static_cast<std::size_t>(others_));
    std::byte* const sums =
        buffers.sums.need<std::byte>(tile_bytes * static_cast<std::size_t>(phases > 1 ? end - begin : 1));
    for (std::int64_t phase = 0; phase < phases; ++phase) {
      const std::int64_t zb = z + phase / p_.h_sum, hb = h + phase % p_.h_sum;
      buffers.packed.assign(static_cast<std::size_t>(others_), 0);
      for (std::int64_t unit = begin; unit < end; ++unit) {
        const std::int64_t line = unit / strips_, first_row = unit % strips_ * tiles_.rows;
        const std::int64_t rows = std::min(tiles_.rows, line_rows_ - first_row);
        const auto entries = index_.line(head(hb) * lines_ + line);
        for (const auto& entry : entries) {
          if (auto& done = buffers.packed[static_cast<std::size_t>(entry.other)]; done == 0) {
            tiles_.pack(place(p_.right, zb, hb, entry.other * depth_, slab.first), depth_, slab.cols, width,
                        panels + panel_bytes * static_cast<std::size_t>(entry.other));
            done = 1;
          }
        }
        simd::Product product;
        product.sums = sums + (phases > 1 ? tile_bytes * static_cast<std::size_t>(unit - begin) : 0);
        product.add = phase > 0;
        gather(buffers, entries, zb, first_row, rows, panels, panel_bytes, product);
        tiles_.multiply[slab.vectors - 1](product);
        if (phase == phases - 1) {
          tiles_.store(product.sums, width, rows, slab.cols,
                       place(p_.out, z, h, line * line_rows_ + first_row, slab.first));
        }
      }
    }
  }

  /// The terms of one tile.
  void gather(Buffers& buffers, std::span<const BlockIndex::Entry> entries, std::int64_t z, std::int64_t first_row,
              std::int64_t rows, const std::byte* panels, std::size_t panel_bytes, simd::Product& product) const {
    const Strip form = strip_form({nullptr, row_stride_, depth_stride_}, rows, depth_, true);
    const std::size_t strip_bytes = Work::panel_bytes(depth_, tiles_.rows);
    std::byte* const strips =
        form == Strip::as_is ? nullptr : buffers.strip.need<std::byte>(strip_bytes * entries.size());
    buffers.terms.resize(entries.size());
    for (std::size_t n = 0; n < entries.size(); ++n) {
      const Place left{at(p_.sparse.data,
                          z * p_.sparse.z_stride + entries[n].block * p_.sparse.block_stride + first_row * row_stride_),
                       row_stride_, depth_stride_};
      buffers.terms[n] = {strip(form, left, rows, depth_, strips + strip_bytes * n),
                          panels + panel_bytes * static_cast<std::size_t>(entries[n].other)};
    }
    product.terms = buffers.terms.data();
    product.count = static_cast<std::int64_t>(entries.size());
    set_strides(form, {nullptr, row_stride_, depth_stride_}, depth_, product);
  }

  const BlockIndex& index_;
  Slabs slabs_;
  std::int64_t lines_, line_rows_, depth_, others_, row_stride_, depth_stride_, strips_;
  std::vector<std::int64_t> line_first_;   ///< per different head: cost before each line
  std::vector<std::int64_t> batch_first_;  ///< cost before each batch
};

/// A slab is some columns of one block column; a unit is a strip of rows of one of its blocks.
class Sdd : Work {
 public:
  Sdd(const Problem& problem, const Tiles& tiles)
      : Work(problem, tiles),
        index_(problem.layout->by_col()),
        sizes_(problem.layout->sizes()),
        slabs_(sizes_.block_cols, tiles.lanes),
        strips_(ceil_div(sizes_.block_rows, tiles.rows)),
        pieces_(std::max<std::int64_t>(1, ceil_div(problem.left.cols, kDeepest))) {
    batch_first_.push_back(0);
    for (std::int64_t batch = 0; batch < problem.z_out * problem.h_out; ++batch) {
      const std::int64_t blocks = first_of(batch % problem.h_out, sizes_.cols) - first_of(batch % problem.h_out, 0);
      batch_first_.push_back(batch_first_.back() + blocks * column_units());
    }
  }

  std::int64_t total() const { return batch_first_.back(); }
  double flops_per_unit() const {
    return 2.0 * static_cast<double>(tiles_.rows * tiles_.lanes) * static_cast<double>(p_.left.cols) *
           static_cast<double>(p_.z_sum * p_.h_sum);
  }

  void run(std::int64_t begin, std::int64_t end) const {
    const std::int64_t last_batch = static_cast<std::int64_t>(batch_first_.size()) - 1;
    auto batch = std::upper_bound(batch_first_.begin(), batch_first_.end(), begin) - batch_first_.begin() - 1;
    for (; batch < last_batch && batch_first_[static_cast<std::size_t>(batch)] < end; ++batch) {
      const std::int64_t base = batch_first_[static_cast<std::size_t>(batch)], h = batch % p_.h_out;
      for (std::int64_t column = 0; column < sizes_.cols; ++column) {
        const std::int64_t blocks = first_of(h, column + 1) - first_of(h, column), units = blocks * strips_;
        std::int64_t first = base + (first_of(h, column) - first_of(h, 0)) * column_units();
        for (std::int64_t s = 0; s < slabs_.count; ++s, first += units) {
          if (first + units > begin && first < end) {
            work(batch / p_.h_out, h, column, Slab(slabs_, s), std::max(begin - first, std::int64_t{0}),
                 std::min(end - first, units));
          }
        }
      }
    }
  }

 private:
  std::int64_t column_units() const { return slabs_.count * strips_; }
  std::int64_t first_of(std::int64_t h, std::int64_t column) const {
    return index_.first[static_cast<std::size_t>(head(h) * sizes_.cols + column)];
  }

  void work(std::int64_t z, std::int64_t h, std::int64_t column, const Slab& slab, std::int64_t begin,
            std::int64_t end) const {
    Buffers& buffers = thread_buffers();
    const auto entries = index_.line(head(h) * sizes_.cols + column);
    const std::int64_t width = slab.vectors * tiles_.lanes, phases = p_.z_sum * p_.h_sum * pieces_;
    const std::size_t tile_bytes = static_cast<std::size_t>(tiles_.rows * width) * tiles_.sum;
    std::byte* const sums =
        buffers.sums.need<std::byte>(tile_bytes * static_cast<std::size_t>(phases > 1 ? end - begin : 1));
    for (std::int64_t phase = 0; phase < phases; ++phase) {
      const std::int64_t batch = phase / pieces_, piece = phase % pieces_;
      const std::int64_t zb = z + batch / p_.h_sum, hb = h + batch % p_.h_sum;
      const std::int64_t k = p_.left.cols * piece / pieces_, depth = p_.left.cols * (piece + 1) / pieces_ - k;
      std::byte* const panel = buffers.panel.need<std::byte>(panel_bytes(depth, width));
      tiles_.pack(place(p_.right, zb, hb, k, column * sizes_.block_cols + slab.first), depth, slab.cols, width, panel);
      for (std::int64_t unit = begin; unit < end; ++unit) {
        const auto& [line, block] = entries[static_cast<std::size_t>(unit / strips_)];
        const std::int64_t first_row = unit % strips_ * tiles_.rows;
        const std::int64_t rows = std::min(tiles_.rows, sizes_.block_rows - first_row);
        const Place left = place(p_.left, zb, hb, line * sizes_.block_rows + first_row, k);
        const Strip form = strip_form(left, rows, depth, false);
        std::byte* const to = buffers.strip.need<std::byte>(panel_bytes(depth, tiles_.rows));
        const simd::Term term{strip(form, left, rows, depth, to), panel};
        simd::Product product;
        product.terms = &term;
        product.count = 1;
        product.sums = sums + (phases > 1 ? tile_bytes * static_cast<std::size_t>(unit - begin) : 0);
        product.add = phase > 0;
        set_strides(form, left, depth, product);
        tiles_.multiply[slab.vectors - 1](product);
        if (phase == phases - 1) {
          const Values& s = p_.sparse;
          tiles_.store(product.sums, width, rows, slab.cols,
                       {at(s.data, z * s.z_stride + block * s.block_stride + first_row * s.row_stride +
                                       slab.first * s.col_stride),
                        s.row_stride, s.col_stride});
        }
      }
    }
  }

  const BlockIndex& index_;
  const BlockLayout::Sizes& sizes_;
  Slabs slabs_;
  std::int64_t strips_, pieces_;
  std::vector<std::int64_t> batch_first_;
};

template <typename Kind>
void share(const Kind& work, Context& context) {
  const std::int64_t total = work.total();
  if (total == 0) {
    return;
  }
  const double worth = static_cast<double>(total) * work.flops_per_unit() / kLeastFlops;
  const auto most = static_cast<double>(kStretches * std::max(context.executor->concurrency(), 1));
  const auto count = std::min(total, static_cast<std::int64_t>(std::clamp(worth, 1.0, most)));
  context.executor->parallel_for(count, 1, [&](std::int64_t begin, std::int64_t end) {
    work.run(total / count * begin + total % count * begin / count, total / count * end + total % count * end / count);
  });
}

}  // namespace

void run(const Problem& problem, Context& context) {
  const Tiles& tiles = simd::tiles(problem.dtype);
  problem.kind == Kind::spmm ? share(Spmm(problem, tiles), context) : share(Sdd(problem, tiles), context);
}

}  // namespace fretwork::block_matmul::cpu
