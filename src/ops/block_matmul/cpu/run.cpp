// The block-sparse products on the CPU: equal shares of work for the caller's threads, tiles from runtime/simd.
//
// Work is laid out on a line: batch, then slab (columns of the result that share one packed panel of the right
// operand), then unit (one tile: a strip of rows of one block-row, or of one block for sdd). Threads take equal
// stretches of it. A tile's sum is computed whole by one thread in a fixed order, so results do not depend on the
// number of threads.
#include <algorithm>
#include <cstdlib>
#include <iterator>
#include <span>
#include <utility>
#include <vector>

#include "ops/block_matmul/problem.h"
#include "runtime/simd/dots.h"
#include "runtime/simd/slabs.h"
#include "runtime/simd/strips.h"

namespace fretwork::block_matmul::cpu {
namespace {

using simd::Place;
using simd::Slab;
using simd::Slabs;
using simd::Tiles;

/// Depth of a panel of sdd: 2048 × 48 fp32 leave room in a second-level cache of 1 MB.
constexpr std::int64_t kDeepest = 2048;
/// Stretches per thread, and the least work worth one.
constexpr std::int64_t kStretches = 4;
constexpr double kLeastFlops = 2e6;
/// Results larger than this go past the caches, which they would only flush.
constexpr std::int64_t kStreamedBytes = 4 << 20;
/// Depth packed at once, if blocks allow: whole cache lines where the depth is contiguous.
constexpr std::int64_t kPackedTogether = 64;

/// Depth of a line up to which its tiles pack: a longer one asks memory for too much at once.
constexpr std::int64_t kPackedBehind = 384;

/// Whether bytes are whole cache lines.
bool lines(std::intptr_t bytes) { return bytes % 64 == 0; }

/// What a thread needs to work on tiles, kept between calls.
struct Buffers {
  simd::Scratch panel, strip, sums;
  std::vector<simd::Term> terms;
  std::vector<simd::DotsTerm> dots;
  std::vector<std::uint8_t> packed;
  /// Rows of the right operand that this line packs, and those of the line after: the first of each block.
  std::vector<const void*> raw, next_raw;
};

Buffers& thread_buffers() {
  thread_local Buffers buffers;
  return buffers;
}

/// What both kinds share: operands by batch, panels of the right one, and the products of a strip with them.
class Work {
 public:
  Work(const Problem& problem, const Tiles& tiles)
      : p_(problem),
        tiles_(tiles),
        size_(static_cast<std::int64_t>(size_of(problem.dtype))),
        none_(problem.z_sum * problem.h_sum == 0),
        h_sum_(std::max<std::int64_t>(1, problem.h_sum)),
        phases_(std::max<std::int64_t>(1, problem.z_sum) * h_sum_) {
    const BlockLayout& layout = *problem.layout;
    const std::int64_t block = layout.sizes().block_rows * layout.sizes().block_cols;
    stream_ =
        size_ * problem.z_out *
            (problem.kind == Kind::spmm ? problem.h_out * problem.out.rows * problem.out.cols : layout.nnz() * block) >
        kStreamedBytes;
  }

 protected:
  std::byte* at(void* data, std::int64_t element) const { return static_cast<std::byte*>(data) + element * size_; }
  Place place(const Matrix& m, std::int64_t z, std::int64_t h, std::int64_t row, std::int64_t col) const {
    return {at(m.data, z * m.z_stride + h * m.h_stride + row * m.row_stride + col * m.col_stride), m.row_stride,
            m.col_stride};
  }
  std::int64_t head(std::int64_t h) const { return p_.layout->heads() == 1 ? 0 : h; }
  std::int64_t depth_padded(std::int64_t depth) const { return simd::depth_padded(tiles_, depth); }
  std::size_t panel_bytes(std::int64_t depth, std::int64_t width) const {
    return simd::panel_bytes(tiles_, depth, width);
  }

  /// Rows [depth, depth + count) of the panels of a slab, which lie one after the other and are `deep` rows each.
  void pack_slab(const Slab& slab, const Place& right, std::int64_t depth, std::int64_t count, std::int64_t deep,
                 std::byte* packed) const {
    // Panels of one width together, as rows of `right` go on from one to the next.
    for (auto first = slab.panels.begin(), next = first; first != slab.panels.end(); first = next) {
      next = std::find_if(first, slab.panels.end(), [&](const auto& panel) { return panel.width != first->width; });
      const Place from{at(right.data, first->first * right.col_stride), right.row_stride, right.col_stride};
      const auto apart = static_cast<std::int64_t>(panel_bytes(deep, first->width));
      tiles_.pack(from, count, std::prev(next)->last - first->first, first->width,
                  packed + panel_bytes(depth, first->width), apart);
      packed += apart * (next - first);
    }
  }

  /// Fetches the columns of a panel that are packed next: of all rows a share that goes with one strip, so that memory
  /// works evenly behind the products. Inline, as GCC would otherwise find that it does nothing.
  [[gnu::always_inline]] void fetch(std::span<const void* const> raw, std::int64_t column, const simd::Product& product,
                                    std::int64_t row, std::int64_t rows) const {
    const std::int64_t depth = product.steps * tiles_.group;
    for (const void* const data : raw) {
      for (std::int64_t k = depth * row / rows; k < depth * std::min(row + tiles_.rows, rows) / rows; ++k) {
        __builtin_prefetch(static_cast<const std::byte*>(data) + (k * product.raw_stride + column) * size_, 0, 2);
      }
    }
  }

  /// `rows` rows of the result, in strips one below the other, against all panels of a slab, `deep` rows each. The
  /// left sides of a strip lie `shift` behind those of the strip above. Sums stay in `sums` over all phases, or when
  /// there is but one, until the columns of a panel are stored.
  void multiply(const Slab& slab, std::byte* packed, std::int64_t deep, simd::Product product, std::int64_t shift,
                std::int64_t rows, std::byte* sums, bool last, const Place& out, const Buffers& buffers) const {
    const bool one_phase = last && !product.add;
    product.out_stride = out.row_stride;
    for (const Slabs::Panel& panel : slab.panels) {
      const std::int64_t cols = panel.last - panel.first;
      const Place to{at(out.data, panel.first * out.col_stride), out.row_stride, out.col_stride};
      std::byte* const panel_sums = sums + (one_phase ? 0 : panel.first - slab.first) * tiles_.sum;
      product.sum_stride = one_phase ? panel.width : slab.width;
      const bool whole = last && out.col_stride == 1 && rows % tiles_.rows == 0 && cols == panel.width;
      product.stream = stream_ && lines(reinterpret_cast<std::intptr_t>(to.data)) && lines(out.row_stride * size_) &&
                       lines(panel.width * size_);
      product.right = packed;
      product.raw_shift = panel.first;
      const bool more = &panel != &slab.panels.back();
      for (std::int64_t row = 0; row < rows; row += tiles_.rows) {
        const std::int64_t strip = row / tiles_.rows;
        product.packs = strip == 0;
        // Where there are strips enough, the second and third fetch for the next panel, each one row of every pair.
        const bool behind = more && rows >= 3 * tiles_.rows;
        product.raw_soon = behind && (strip == 1 || strip == 2) ? panel.last + (strip - 1) * product.raw_stride : 0;
        if (!behind) {
          fetch(more ? buffers.raw : buffers.next_raw, more ? panel.last : slab.first, product, row, rows);
        }
        product.shift = strip * shift;
        product.sums = panel_sums + row * product.sum_stride * tiles_.sum;
        product.out = whole ? at(to.data, row * to.row_stride) : nullptr;
        tiles_.multiply[panel.vectors - 1](product);
      }
      if (last && !whole) {
        tiles_.store(panel_sums, product.sum_stride, rows, cols, to, stream_);
      }
      packed += panel_bytes(deep, panel.width);
    }
  }

  const Problem& p_;
  const Tiles& tiles_;
  std::int64_t size_;
  bool stream_;
  bool none_;            ///< no batch at all to sum: the result is zeros
  std::int64_t h_sum_;   ///< at least 1
  std::int64_t phases_;  ///< batches summed into a result, at least 1
};

/// A unit is a strip of rows of one block-row; its terms are the blocks of the row.
class Spmm : Work {
 public:
  Spmm(const Problem& problem, const Tiles& tiles, std::int64_t stretches)
      : Work(problem, tiles),
        index_(problem.transposed ? problem.layout->by_col() : problem.layout->by_row()),
        slabs_(problem.out.cols, simd::panels_that_fit(problem.right.rows, tiles),
               std::max<std::int64_t>(1, ceil_div(stretches, std::max<std::int64_t>(1, problem.z_out * problem.h_out))),
               tiles) {
    const BlockLayout::Sizes& s = problem.layout->sizes();
    lines_ = problem.transposed ? s.cols : s.rows;
    line_rows_ = problem.transposed ? s.block_cols : s.block_rows;
    depth_ = problem.transposed ? s.block_rows : s.block_cols;
    others_ = problem.transposed ? s.rows : s.cols;
    row_stride_ = problem.transposed ? problem.sparse.col_stride : problem.sparse.row_stride;
    depth_stride_ = problem.transposed ? problem.sparse.row_stride : problem.sparse.col_stride;
    strips_ = ceil_div(line_rows_, tiles.rows);
    together_ = depth_ % tiles.group == 0 ? std::max<std::int64_t>(1, kPackedTogether / depth_) : 1;
    weigh();
  }

  std::int64_t total() const { return batch_first_.back(); }
  double flops_per_unit() const { return 2.0 * static_cast<double>(tiles_.rows * tiles_.lanes * depth_); }

  /// `at`, or the edge of a slab close to it: two stretches in one slab both pack it.
  std::int64_t cut(std::int64_t at, std::int64_t stretch) const {
    if (at >= total()) {
      return total();
    }
    const auto batch = std::upper_bound(batch_first_.begin(), batch_first_.end(), at) - batch_first_.begin() - 1;
    const std::int64_t base = batch_first_[static_cast<std::size_t>(batch)];
    const std::int64_t column_cost = line_first(batch % p_.h_out, lines_) * strips_;
    for (std::int64_t s = 0; s < slabs_.count(); ++s) {
      const std::int64_t first = base + column_cost * slabs_.first_vector(slabs_.first_panel(s));
      const std::int64_t last = base + column_cost * slabs_.first_vector(slabs_.first_panel(s + 1));
      if (at < last) {
        const std::int64_t near = last - first <= stretch + stretch / 4 ? last - first : stretch / 8;
        const std::int64_t edge = at - first <= last - at ? first : last;
        return std::abs(edge - at) <= near ? edge : at;
      }
    }
    return at;
  }

  void run(std::int64_t begin, std::int64_t end) const {
    const std::int64_t last_batch = static_cast<std::int64_t>(batch_first_.size()) - 1;
    auto batch = std::upper_bound(batch_first_.begin(), batch_first_.end(), begin) - batch_first_.begin() - 1;
    for (; batch < last_batch && batch_first_[static_cast<std::size_t>(batch)] < end; ++batch) {
      const std::int64_t h = batch % p_.h_out, base = batch_first_[static_cast<std::size_t>(batch)];
      const std::int64_t column_cost = line_first(h, lines_) * strips_;
      for (std::int64_t s = 0; s < slabs_.count(); ++s) {
        const std::int64_t from = slabs_.first_vector(slabs_.first_panel(s));
        const std::int64_t vectors = slabs_.first_vector(slabs_.first_panel(s + 1)) - from;
        const std::int64_t first = base + column_cost * from, last = first + column_cost * vectors;
        if (last > begin && first < end) {
          work(batch / p_.h_out, h, Slab(slabs_, s),
               unit_at(h, ceil_div(std::max(begin - first, std::int64_t{0}), vectors)),
               unit_at(h, ceil_div(std::min(end, last) - first, vectors)));
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
          cost += p_.z_sum * static_cast<std::int64_t>(entries_of(h + s, l).size());
        }
        line_first_.push_back(line_first_.back() + cost);
      }
    }
    batch_first_.push_back(0);
    for (std::int64_t batch = 0; batch < p_.z_out * p_.h_out; ++batch) {
      batch_first_.push_back(batch_first_.back() + line_first(batch % p_.h_out, lines_) * strips_ * slabs_.vectors());
    }
  }
  std::span<const BlockIndex::Entry> entries_of(std::int64_t h, std::int64_t line) const {
    return none_ ? std::span<const BlockIndex::Entry>{} : index_.line(head(h) * lines_ + line);
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
    const std::size_t strip_sums = static_cast<std::size_t>(tiles_.rows * slab.width) * tiles_.sum;
    const std::int64_t deep = others_ * depth_padded(depth_);
    std::byte* const packed = buffers.panel.need(panel_bytes(deep, slab.width));
    const bool can_pack = tiles_.packs && p_.right.col_stride == 1 && depth_ % tiles_.group == 0 && slab.whole();
    const auto packs = [&](std::span<const BlockIndex::Entry> entries) {
      return can_pack && std::ssize(entries) * depth_ <= kPackedBehind;
    };
    std::byte* const sums =
        buffers.sums.need(strip_sums * static_cast<std::size_t>(phases_ > 1 ? end - begin : strips_));
    for (std::int64_t phase = 0; phase < phases_; ++phase) {
      const std::int64_t zb = z + phase / h_sum_, hb = h + phase % h_sum_;
      buffers.packed.assign(static_cast<std::size_t>(others_), 0);
      for (std::int64_t unit = begin, next = 0; unit < end; unit = next) {
        const std::int64_t line = unit / strips_, first_row = unit % strips_ * tiles_.rows;
        next = std::min((line + 1) * strips_, end);
        const auto entries = entries_of(hb, line);
        if (!packs(entries)) {
          pack_rows(slab, entries, zb, hb, deep, buffers.packed, packed);
        }
        const std::int64_t rows = std::min((next - unit) * tiles_.rows, line_rows_ - first_row);
        simd::Product product;
        product.add = phase > 0;
        const std::int64_t shift = gather(buffers, entries, zb, first_row, rows, product);
        product.raw_stride = p_.right.row_stride;
        mark_raw(entries, zb, hb, buffers);
        const auto later = next < end ? entries_of(hb, line + 1) : entries;
        list_raw(packs(later) ? later : entries, zb, hb, buffers.packed, buffers.next_raw);
        multiply(slab, packed, deep, product, shift, rows,
                 sums + (phases_ > 1 ? strip_sums * static_cast<std::size_t>(unit - begin) : 0), phase == phases_ - 1,
                 place(p_.out, z, h, line * line_rows_ + first_row, 0), buffers);
      }
    }
    buffers.raw.clear();
    buffers.next_raw.clear();
  }

  /// Packs the rows that some blocks are the first to need, and their neighbours.
  void pack_rows(const Slab& slab, std::span<const BlockIndex::Entry> entries, std::int64_t z, std::int64_t h,
                 std::int64_t deep, std::vector<std::uint8_t>& done, std::byte* packed) const {
    for (const auto& entry : entries) {
      if (done[static_cast<std::size_t>(entry.other)] == 0) {
        const std::int64_t first = entry.other / together_ * together_, count = std::min(together_, others_ - first);
        pack_slab(slab, place(p_.right, z, h, first * depth_, 0), first * depth_padded(depth_), count * depth_, deep,
                  packed);
        std::fill_n(done.begin() + first, count, std::uint8_t{1});
      }
    }
  }

  /// Where the rows lie that some blocks are the first to need.
  void list_raw(std::span<const BlockIndex::Entry> entries, std::int64_t z, std::int64_t h,
                const std::vector<std::uint8_t>& done, std::vector<const void*>& raw) const {
    raw.clear();
    for (const auto& entry : entries) {
      if (done[static_cast<std::size_t>(entry.other)] == 0) {
        raw.push_back(place(p_.right, z, h, entry.other * depth_, 0).data);
      }
    }
  }

  /// Leaves the packing of what some blocks are the first to need to the tiles.
  void mark_raw(std::span<const BlockIndex::Entry> entries, std::int64_t z, std::int64_t h, Buffers& buffers) const {
    list_raw(entries, z, h, buffers.packed, buffers.raw);
    auto raw = buffers.raw.begin();
    for (std::size_t n = 0; n < entries.size(); ++n) {
      if (auto& done = buffers.packed[static_cast<std::size_t>(entries[n].other)]; done == 0) {
        buffers.terms[n].raw = *raw++;
        done = 1;
      }
    }
  }

  /// The terms of the first strip of some rows of one line; returns how far those of the next lie behind.
  std::int64_t gather(Buffers& buffers, std::span<const BlockIndex::Entry> entries, std::int64_t z,
                      std::int64_t first_row, std::int64_t rows, simd::Product& product) const {
    const Place block{at(p_.sparse.data, z * p_.sparse.z_stride + first_row * row_stride_), row_stride_, depth_stride_};
    buffers.terms.clear();
    for (const auto& [other, number] : entries) {
      buffers.terms.push_back({at(block.data, number * p_.sparse.block_stride), other * depth_padded(depth_), nullptr});
    }
    return simd::set_left(tiles_, p_.dtype, {block, rows, depth_, true}, buffers.terms, buffers.strip, product);
  }

  const BlockIndex& index_;
  Slabs slabs_;
  std::int64_t lines_, line_rows_, depth_, others_, row_stride_, depth_stride_, strips_;
  std::int64_t together_;                  ///< neighbouring block-rows of the right operand packed at once
  std::vector<std::int64_t> line_first_;   ///< per different head: cost before each line
  std::vector<std::int64_t> batch_first_;  ///< cost before each batch
};

/// A few columns of the right operand: blocks stream by once, as they lie in memory. A unit is one block-row.
class FewColumns {
 public:
  explicit FewColumns(const Problem& problem)
      : p_(problem),
        tiles_(simd::widened_tiles(problem.dtype)),
        index_(problem.transposed ? problem.layout->by_col() : problem.layout->by_row()),
        size_(static_cast<std::int64_t>(size_of(problem.dtype))),
        as_is_(!tiles_.widens && problem.right.row_stride == 1) {
    const BlockLayout::Sizes& s = problem.layout->sizes();
    const auto& [sparse, turned] = std::pair(problem.sparse, problem.transposed);
    lines_ = turned ? s.cols : s.rows;
    line_rows_ = turned ? s.block_cols : s.block_rows;
    depth_ = turned ? s.block_rows : s.block_cols;
    across_ = (turned ? sparse.row_stride : sparse.col_stride) != 1;
    stride_ = turned == across_ ? sparse.row_stride : sparse.col_stride;
  }

  static bool fits(const Problem& p) {
    const Values& s = p.sparse;
    const BlockLayout::Sizes& sizes = p.layout->sizes();
    const bool fills = (s.col_stride == 1 ? sizes.block_cols : sizes.block_rows) >= simd::tiles(p.dtype).lanes;
    return p.kind == Kind::spmm && p.out.cols <= simd::kFewRows / (fills ? 1 : 2) && p.z_sum * p.h_sum == 1 &&
           (s.row_stride == 1 || s.col_stride == 1);
  }

  std::int64_t total() const { return p_.z_out * p_.h_out * lines_; }
  double flops_per_unit() const {
    const auto blocks = static_cast<double>(p_.layout->nnz()) / static_cast<double>(lines_ * p_.layout->heads());
    return 2 * blocks * static_cast<double>(line_rows_ * depth_ * p_.out.cols);
  }
  std::int64_t cut(std::int64_t at, std::int64_t /*stretch*/) const { return at; }

  void run(std::int64_t begin, std::int64_t end) const {
    Buffers& buffers = thread_buffers();
    std::int64_t batch = -1;
    for (std::int64_t unit = begin; unit < end; ++unit) {
      if (unit / lines_ != batch) {
        batch = unit / lines_;
        buffers.packed.assign(static_cast<std::size_t>(p_.right.rows / depth_), 0);
      }
      work(batch / p_.h_out, batch % p_.h_out, unit % lines_, buffers);
    }
  }

 private:
  void work(std::int64_t z, std::int64_t h, std::int64_t line, Buffers& buffers) const {
    const Matrix &right = p_.right, &out = p_.out;
    std::byte* const x = at(right.data, z * right.z_stride + h * right.h_stride);
    std::byte* const packed =
        as_is_ ? x : buffers.panel.need(static_cast<std::size_t>(right.rows * right.cols) * tiles_.element);
    buffers.dots.clear();
    for (const auto& [other, number] : index_.line((p_.layout->heads() == 1 ? 0 : h) * lines_ + line)) {
      const std::int64_t place = other * depth_ * (as_is_ ? 1 : right.cols);
      buffers.dots.push_back({at(p_.sparse.data, z * p_.sparse.z_stride + number * p_.sparse.block_stride), place});
      if (auto& done = buffers.packed[static_cast<std::size_t>(other)]; !as_is_ && done == 0) {
        tiles_.pack({x + other * depth_ * right.row_stride * size_, right.col_stride, right.row_stride}, right.cols,
                    depth_, depth_, packed + static_cast<std::size_t>(place) * tiles_.element, 0);
        done = 1;
      }
    }
    simd::Dots dots{.terms = buffers.dots, .rows = line_rows_, .depth = depth_, .stride = stride_, .across = across_};
    dots.x = packed;
    dots.x_stride = as_is_ ? right.col_stride : depth_;
    dots.batch = right.cols;
    dots.sums = buffers.sums.need(static_cast<std::size_t>(line_rows_ * right.cols) * tiles_.sum);
    dots.sum_stride = line_rows_;
    simd::dots(dots, p_.dtype);
    const std::int64_t to = z * out.z_stride + h * out.h_stride + line * line_rows_ * out.row_stride;
    tiles_.store(dots.sums, line_rows_, right.cols, line_rows_, {at(out.data, to), out.col_stride, out.row_stride},
                 false);
  }
  std::byte* at(void* data, std::int64_t element) const { return static_cast<std::byte*>(data) + element * size_; }

  const Problem& p_;
  const Tiles& tiles_;
  const BlockIndex& index_;
  std::int64_t size_;
  bool as_is_;   ///< the right operand is read where it is
  bool across_;  ///< outputs of a block are contiguous, not its depth
  std::int64_t lines_, line_rows_, depth_;
  std::int64_t stride_;  ///< between such rows of a block
};

/// A slab is some columns of one block column; a unit is a strip of rows of one of its blocks.
class Sdd : Work {
 public:
  Sdd(const Problem& problem, const Tiles& tiles, std::int64_t /*stretches*/)
      : Work(problem, tiles),
        index_(problem.layout->by_col()),
        sizes_(problem.layout->sizes()),
        strips_(ceil_div(sizes_.block_rows, tiles.rows)),
        depth_(none_ ? 0 : problem.left.cols),
        pieces_(std::max<std::int64_t>(1, ceil_div(depth_, kDeepest))),
        slabs_(sizes_.block_cols, simd::panels_that_fit(std::min(depth_, kDeepest), tiles), 1, tiles) {
    batch_first_.push_back(0);
    for (std::int64_t batch = 0; batch < problem.z_out * problem.h_out; ++batch) {
      const std::int64_t blocks = first_of(batch % problem.h_out, sizes_.cols) - first_of(batch % problem.h_out, 0);
      batch_first_.push_back(batch_first_.back() + blocks * column_units());
    }
  }

  std::int64_t total() const { return batch_first_.back(); }
  double flops_per_unit() const {
    return 2.0 * static_cast<double>(tiles_.rows * tiles_.lanes) * static_cast<double>(depth_) *
           static_cast<double>(phases_);
  }

  std::int64_t cut(std::int64_t at, std::int64_t /*stretch*/) const { return at; }

  void run(std::int64_t begin, std::int64_t end) const {
    const std::int64_t last_batch = static_cast<std::int64_t>(batch_first_.size()) - 1;
    auto batch = std::upper_bound(batch_first_.begin(), batch_first_.end(), begin) - batch_first_.begin() - 1;
    for (; batch < last_batch && batch_first_[static_cast<std::size_t>(batch)] < end; ++batch) {
      const std::int64_t base = batch_first_[static_cast<std::size_t>(batch)], h = batch % p_.h_out;
      for (std::int64_t column = 0; column < sizes_.cols; ++column) {
        const std::int64_t blocks = first_of(h, column + 1) - first_of(h, column), units = blocks * strips_;
        std::int64_t first = base + (first_of(h, column) - first_of(h, 0)) * column_units();
        for (std::int64_t s = 0; s < slabs_.count(); ++s, first += units) {
          if (first + units > begin && first < end) {
            work(batch / p_.h_out, h, column, Slab(slabs_, s), std::max(begin - first, std::int64_t{0}),
                 std::min(end - first, units));
          }
        }
      }
    }
  }

 private:
  std::int64_t column_units() const { return slabs_.count() * strips_; }
  std::int64_t first_of(std::int64_t h, std::int64_t column) const {
    return index_.first[static_cast<std::size_t>(head(h) * sizes_.cols + column)];
  }

  void work(std::int64_t z, std::int64_t h, std::int64_t column, const Slab& slab, std::int64_t begin,
            std::int64_t end) const {
    Buffers& buffers = thread_buffers();
    const auto entries = index_.line(head(h) * sizes_.cols + column);
    const std::int64_t phases = phases_ * pieces_;
    const std::size_t strip_sums = static_cast<std::size_t>(tiles_.rows * slab.width) * tiles_.sum;
    std::byte* const sums =
        buffers.sums.need(strip_sums * static_cast<std::size_t>(phases > 1 ? end - begin : strips_));
    for (std::int64_t phase = 0; phase < phases; ++phase) {
      const std::int64_t batch = phase / pieces_, piece = phase % pieces_;
      const std::int64_t zb = z + batch / h_sum_, hb = h + batch % h_sum_;
      const std::int64_t k = depth_ * piece / pieces_, depth = depth_ * (piece + 1) / pieces_ - k;
      std::byte* const packed = buffers.panel.need(panel_bytes(depth, slab.width));
      pack_slab(slab, place(p_.right, zb, hb, k, column * sizes_.block_cols), 0, depth, depth, packed);
      for (std::int64_t unit = begin, next = 0; unit < end; unit = next) {
        const auto& [line, block] = entries[static_cast<std::size_t>(unit / strips_)];
        const std::int64_t first_row = unit % strips_ * tiles_.rows;
        next = std::min((unit / strips_ + 1) * strips_, end);
        const std::int64_t rows = std::min((next - unit) * tiles_.rows, sizes_.block_rows - first_row);
        simd::Product product;
        product.add = phase > 0;
        const Place left = place(p_.left, zb, hb, line * sizes_.block_rows + first_row, k);
        buffers.terms.assign(1, {left.data, 0, nullptr});
        const std::int64_t shift =
            simd::set_left(tiles_, p_.dtype, {left, rows, depth, false}, buffers.terms, buffers.strip, product);
        const Values& s = p_.sparse;
        multiply(slab, packed, depth, product, shift, rows,
                 sums + (phases > 1 ? strip_sums * static_cast<std::size_t>(unit - begin) : 0), phase == phases - 1,
                 {at(s.data, z * s.z_stride + block * s.block_stride + first_row * s.row_stride), s.row_stride,
                  s.col_stride},
                 buffers);
      }
    }
  }

  const BlockIndex& index_;
  const BlockLayout::Sizes& sizes_;
  std::int64_t strips_, depth_, pieces_;
  Slabs slabs_;
  std::vector<std::int64_t> batch_first_;
};

std::int64_t most_stretches(const Context& context) {
  return kStretches * std::max(context.executor->concurrency(), 1);
}

template <typename Kind>
void share(const Kind& work, Context& context) {
  const std::int64_t total = work.total();
  if (total == 0) {
    return;
  }
  const double worth = static_cast<double>(total) * work.flops_per_unit() / kLeastFlops;
  const auto count =
      std::min(total, static_cast<std::int64_t>(std::clamp(worth, 1.0, static_cast<double>(most_stretches(context)))));
  context.executor->parallel_for(count, 1, [&](std::int64_t begin, std::int64_t end) {
    const auto cut = [&](std::int64_t n) {
      return work.cut(total / count * n + total % count * n / count, total / count);
    };
    work.run(cut(begin), cut(end));
    simd::finish_streams();
  });
}

}  // namespace

void run(const Problem& problem, Context& context) {
  if (FewColumns::fits(problem)) {
    share(FewColumns(problem), context);
    return;
  }
  const Tiles& tiles = simd::tiles(problem.dtype);
  const std::int64_t stretches = most_stretches(context);
  problem.kind == Kind::spmm ? share(Spmm(problem, tiles, stretches), context)
                             : share(Sdd(problem, tiles, stretches), context);
}

}  // namespace fretwork::block_matmul::cpu
