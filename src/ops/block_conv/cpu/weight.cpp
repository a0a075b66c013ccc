// The gradient of a convolution's blocks on the CPU.
//
// Block (t, O, I) is Σ over pixels of dy[O]·xᵀ[I], x shifted by kernel position t. It is computed transposed. The left
// operand is packed rows of x, so a kernel position is a pointer offset. The right operand is dy, packed once for all
// kernel positions. Each row of pixels is a term. A thread owns some blocks and walks all pixels in chunks of a few
// rows, with the sums of its blocks in memory. So results do not depend on the number of threads.
#include <algorithm>

#include "ops/block_conv/cpu/run.h"
#include "runtime/simd/slabs.h"
#include "runtime/simd/strips.h"

namespace fretwork::block_conv::cpu {
namespace {

using simd::Slab;
using simd::Slabs;

/// Pixels per chunk. Smaller chunks keep dy of one block in cache while the strips of x use it; larger ones read and
/// write the sums of all blocks less often.
constexpr std::int64_t kChunk = 320;
/// Tasks per thread. One is enough: all blocks cost the same, and each task packs dy for itself.
constexpr std::int64_t kStretches = 1;

struct Buffers {
  simd::Scratch panels, sums;
  ImageRows::Packed rows;
  std::vector<std::int64_t> slots;  ///< by row of results and tap along y; −1 outside the image
  std::vector<std::uint8_t> packed;
  std::vector<simd::Term> terms;
};

Buffers& thread_buffers() {
  thread_local Buffers buffers;
  return buffers;
}

class Blocks {
 public:
  Blocks(const Problem& problem, const Tiles& tiles)
      : p_(problem),
        tiles_(tiles),
        y_(problem.y, problem.out.h, problem.in.h, 0),
        x_(problem.x, problem.out.w, problem.in.w, 0),
        rows_(problem, tiles, x_),
        size_(static_cast<std::int64_t>(size_of(problem.dtype))),
        panels_(Slabs(problem.block_rows(), problem.block_rows(), 1, tiles), 0),
        chunk_(std::max<std::int64_t>(1, kChunk / std::max<std::int64_t>(1, x_.count))) {
    const std::int64_t strips = ceil_div(problem.block_cols(), tiles.rows);
    sum_bytes_ = static_cast<std::size_t>(strips * tiles.rows * panels_.width) * tiles.sum;
    list();
  }

  std::int64_t count() const { return static_cast<std::int64_t>(blocks_.size()); }
  Blocks(const Blocks&) = delete;
  Blocks& operator=(const Blocks&) = delete;
  double flops() const {
    return 2.0 * static_cast<double>(p_.out.pixels()) * static_cast<double>(count()) *
           static_cast<double>(p_.block_rows() * p_.block_cols());
  }

  void run(std::int64_t begin, std::int64_t end) const {
    Buffers& buffers = thread_buffers();
    // `store` reads whole vectors, past the end of a row.
    const std::size_t bytes = static_cast<std::size_t>(end - begin) * sum_bytes_;
    std::byte* const sums = buffers.sums.need(bytes + 64);
    std::fill_n(sums, bytes, std::byte{0});
    const std::int64_t rows = p_.out.n * y_.count;
    for (std::int64_t row = 0; row < rows; row += chunk_) {
      const std::int64_t last = std::min(row + chunk_, rows);
      begin_chunk(row, last, buffers);
      for (std::int64_t n = begin; n < end; ++n) {
        add(blocks_[static_cast<std::size_t>(n)], row, last, buffers,
            sums + static_cast<std::size_t>(n - begin) * sum_bytes_);
      }
    }
    for (std::int64_t n = begin; n < end; ++n) {
      store(blocks_[static_cast<std::size_t>(n)], sums + static_cast<std::size_t>(n - begin) * sum_bytes_);
    }
  }

 private:
  /// y and x are indices of taps in their class, or −1 if the kernel position never reaches the image.
  struct Block {
    std::int64_t y, x, line, other, number;
  };
  /// Lists the blocks, those that read the same channels of x together.
  void list() {
    const auto& sizes = p_.layout->sizes();
    for (std::int64_t other = 0; other < sizes.cols; ++other) {
      for (std::int64_t t = 0; t < p_.taps(); ++t) {
        for (const auto& [line, number] : p_.layout->by_col().line(t * sizes.cols + other)) {
          blocks_.push_back({find(y_, t / p_.x.taps), find(x_, t % p_.x.taps), line, other, number});
        }
      }
    }
  }
  static std::int64_t find(const AxisClass& axis, std::int64_t number) {
    const auto found =
        std::find_if(axis.taps.begin(), axis.taps.end(), [&](const auto& tap) { return tap.number == number; });
    return found != axis.taps.end() ? found - axis.taps.begin() : -1;
  }

  void begin_chunk(std::int64_t first, std::int64_t last, Buffers& buffers) const {
    rows_.clear(buffers.rows);
    buffers.slots.clear();
    for (std::int64_t row = first; row < last; ++row) {
      for (const auto& tap : y_.taps) {
        const std::int64_t y = y_.at(row % y_.count, tap);
        buffers.slots.push_back(y_.inside(y) ? rows_.slot(buffers.rows, row / y_.count, y) : -1);
      }
    }
    rows_.allocate(buffers.rows);
    buffers.packed.assign(static_cast<std::size_t>(p_.lines()), 0);
    buffers.panels.need(line_bytes() * static_cast<std::size_t>(p_.lines()));
  }
  std::size_t line_bytes() const { return simd::panel_bytes(tiles_, chunk_ * x_.count, panels_.width); }

  /// The packed panels of one block of dy's channels: rows of pixels, one after the other.
  std::byte* panels(std::int64_t line, std::int64_t first, std::int64_t last, Buffers& buffers) const {
    std::byte* const panels = buffers.panels.need(0) + static_cast<std::size_t>(line) * line_bytes();
    if (auto& packed = buffers.packed[static_cast<std::size_t>(line)]; packed == 0) {
      packed = 1;
      std::byte* to = panels;
      for (const Slabs::Panel& panel : panels_.panels) {
        for (std::int64_t row = first; row < last; ++row) {
          const std::int64_t at = row / y_.count * p_.out.n_stride + row % y_.count * p_.out.h_stride +
                                  (line * p_.block_rows() + panel.first) * p_.out.c_stride;
          tiles_.pack({static_cast<std::byte*>(p_.out.data) + at * size_, p_.out.w_stride, p_.out.c_stride}, x_.count,
                      panel.last - panel.first, panel.width,
                      to + simd::panel_bytes(tiles_, (row - first) * x_.count, panel.width), 0);
        }
        to += simd::panel_bytes(tiles_, chunk_ * x_.count, panel.width);
      }
    }
    return panels;
  }

  /// Adds a chunk's contribution to one block.
  void add(const Block& block, std::int64_t first, std::int64_t last, Buffers& buffers, std::byte* sums) const {
    if (block.y < 0 || block.x < 0) {
      return;
    }
    // Skip pixels of dy whose x lies in the padding: an infinity or NaN of dy times zero would be NaN.
    const auto& tap = x_.taps[static_cast<std::size_t>(block.x)];
    const std::int64_t from = x_.first_inside(tap), steps = x_.last_inside(tap) - from;
    buffers.terms.clear();
    for (std::int64_t row = first; row < last; ++row) {
      const auto at = static_cast<std::size_t>(row - first) * y_.taps.size() + static_cast<std::size_t>(block.y);
      if (const std::int64_t slot = buffers.slots[at]; slot >= 0 && steps > 0) {
        buffers.terms.push_back(
            {rows_.at(buffers.rows, slot, static_cast<std::size_t>(block.x), block.other) + from * rows_.unit(),
             (row - first) * x_.count + from, nullptr});
      }
    }
    simd::Product product;
    product.terms = buffers.terms.data();
    product.count = static_cast<std::int64_t>(buffers.terms.size());
    product.steps = steps;
    product.row_stride = rows_.width();
    product.step_stride = 1;
    product.add = true;
    std::byte* right = panels(block.line, first, last, buffers);
    for (const Slabs::Panel& panel : panels_.panels) {
      product.right = right;
      product.sum_stride = panels_.width;
      for (std::int64_t row = 0; row < p_.block_cols(); row += tiles_.rows) {
        product.shift = row * product.row_stride;
        product.sums = sums + static_cast<std::size_t>(row * panels_.width + panel.first) * tiles_.sum;
        tiles_.multiply[panel.vectors - 1](product);
      }
      right += simd::panel_bytes(tiles_, chunk_ * x_.count, panel.width);
    }
  }

  void store(const Block& block, const std::byte* sums) const {
    const Values& v = p_.values;
    tiles_.store(sums, panels_.width, p_.block_cols(), p_.block_rows(),
                 {static_cast<std::byte*>(v.data) + block.number * v.block_stride * size_, v.col_stride, v.row_stride},
                 false);
  }

  const Problem& p_;
  const Tiles& tiles_;
  AxisClass y_, x_;
  ImageRows rows_;
  std::int64_t size_;
  Slab panels_;         ///< of a block's output channels
  std::int64_t chunk_;  ///< rows of pixels
  std::size_t sum_bytes_ = 0;
  std::vector<Block> blocks_;
};

}  // namespace

void weight(const Problem& problem, Context& context) {
  // No packed 16-bit pairs: a pair would be two pixels, and a kernel position may shift x by one.
  const Blocks blocks(problem, simd::widened_tiles(problem.dtype));
  const std::int64_t count = std::min(blocks.count(), stretches_for(blocks.flops(), kStretches, context));
  context.executor->parallel_for(count, 1, [&](std::int64_t begin, std::int64_t end) {
    blocks.run(blocks.count() * begin / count, blocks.count() * end / count);
  });
}

}  // namespace fretwork::block_conv::cpu
