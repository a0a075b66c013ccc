// The convolution and the gradient of its input on the CPU: products of blocks with panels of pixels.
//
// Results form residue classes (one, except for the gradient of a strided convolution; see AxisClass). The pixels of a
// class are cut into panels of a few vectors, and panels are grouped into slabs. A slab packs the image rows that it
// reads once. For a few panels at a time, each column of the product (a kernel position and a block of channels) is
// assembled from contiguous runs of packed rows, once for all block rows. One thread computes a sum in a fixed order:
// bias, then kernel positions, then blocks. So results do not depend on the number of threads.
#include "ops/block_conv/cpu/run.h"

#include <algorithm>
#include <array>
#include <memory>
#include <span>

#include "core/element.h"
#include "runtime/simd/runs.h"
#include "runtime/simd/slabs.h"
#include "runtime/simd/strips.h"

namespace fretwork::block_conv::cpu {
namespace {

using simd::Slab;
using simd::Slabs;
using Panels = std::span<const Slabs::Panel>;

/// Panels per slab. Rows at the edge of two slabs are packed by both, so slabs should not be small.
constexpr std::int64_t kSlabPanels = 24;
/// Panels multiplied together. Two leave most of the L2 cache to the packed rows. If blocks are copied first, more
/// panels amortise the copy.
constexpr std::size_t kTogether = 2, kTogetherCopied = 8;

/// Tasks per thread.
constexpr std::int64_t kStretches = 4;
/// Results larger than this are stored past the caches.
constexpr std::int64_t kStreamedBytes = 4 << 20;

/// The source of runs of zeros: as long as the widest panel, with slack on both sides.
alignas(64) constexpr std::array<std::byte, 1024> kZeros{};

/// Whether a number of bytes is a multiple of a cache line.
bool lines(std::intptr_t bytes) { return bytes % 64 == 0; }

struct Buffers {
  simd::Scratch panels, strips, sums;
  ImageRows::Packed rows;
  std::int64_t first_row = 0;       ///< first row of the slab's results
  std::vector<std::int64_t> slots;  ///< by row of results and tap along y; −1 outside the image
  std::vector<std::uint8_t> packed;
  std::vector<simd::Term> terms;
  std::vector<simd::Run> runs;
};

Buffers& thread_buffers() {
  thread_local Buffers buffers;
  return buffers;
}

/// The results of one class.
class Results {
 public:
  Results(const Problem& problem, const Tiles& tiles, std::int64_t first_y, std::int64_t first_x,
          std::int64_t stretches)
      : p_(problem),
        tiles_(tiles),
        y_(problem.y, problem.out.h, problem.in.h, first_y),
        x_(problem.x, problem.out.w, problem.in.w, first_x),
        rows_(problem, tiles, x_),
        size_(static_cast<std::int64_t>(size_of(problem.dtype))),
        image_(y_.count * x_.count),
        depth_(problem.block_cols()),
        // join_runs writes past the last row.
        column_depth_(simd::depth_padded(tiles, depth_) + tiles.group),
        columns_(number_columns()),
        slabs_(problem.out.n * image_, kSlabPanels, stretches, tiles),
        parts_(std::clamp(ceil_div(stretches, slabs_.count()), std::int64_t{1}, problem.lines())) {
    together_ = simd::copied(tiles, strips()) ? kTogetherCopied : kTogether;
    h_stride_ = problem.out.h_stride * problem.y.div;
    w_stride_ = problem.out.w_stride * problem.x.div;
    const bool rows_join = y_.count == 1 || h_stride_ == x_.count * w_stride_;
    const bool images_join = rows_join && (problem.out.n == 1 || problem.out.n_stride == image_ * w_stride_);
    piece_ = images_join ? problem.out.n * image_ : rows_join ? image_ : x_.count;
    stream_ = size_ * problem.out.pixels() * problem.out.c > kStreamedBytes;
  }
  Results(const Results&) = delete;
  Results& operator=(const Results&) = delete;

  std::int64_t tasks() const { return slabs_.count() * parts_; }

  /// Task: one part of the block rows of one slab.
  void run(std::int64_t task) const {
    Buffers& buffers = thread_buffers();
    const Slab slab(slabs_, task / parts_);
    name_rows(slab, buffers);
    for (Panels rest = slab.panels; !rest.empty(); rest = rest.subspan(std::min(together_, rest.size()))) {
      const Panels panels = rest.first(std::min(together_, rest.size()));
      buffers.packed.assign(static_cast<std::size_t>(columns_), 0);
      buffers.panels.need(panels.size() * simd::panel_bytes(tiles_, deep(), panel_stride()) + simd::kRunSlack);
      for (std::int64_t line = cut(task % parts_); line < cut(task % parts_ + 1); ++line) {
        multiply(panels, line, buffers);
      }
    }
  }

 private:
  /// Numbers the columns of the product that some block reads, and sets the cost of each block row: its blocks, plus
  /// one for the store.
  std::int64_t number_columns() {
    std::int64_t count = 0;
    column_.assign(y_.taps.size() * x_.taps.size() * static_cast<std::size_t>(p_.others()), -1);
    cost_.assign(1, 0);
    for (std::int64_t line = 0; line < p_.lines(); ++line) {
      cost_.push_back(cost_.back() + 1);
      each_block(line, [&](std::size_t, std::size_t, std::size_t column, const BlockIndex::Entry&) {
        auto& number = column_[column];
        number = number < 0 ? static_cast<std::int32_t>(count++) : number;
        ++cost_.back();
      });
    }
    return count;
  }
  /// visit(tap along y, tap along x, column, entry) for the blocks of a block row, in the order of summation.
  template <typename Visit>
  void each_block(std::int64_t line, const Visit& visit) const {
    for (std::size_t r = 0; r < y_.taps.size(); ++r) {
      for (std::size_t s = 0; s < x_.taps.size(); ++s) {
        const std::int64_t head = y_.taps[r].number * p_.x.taps + x_.taps[s].number;
        const std::size_t first = (r * x_.taps.size() + s) * static_cast<std::size_t>(p_.others());
        for (const auto& entry : p_.index().line(head * p_.lines() + line)) {
          visit(r, s, first + static_cast<std::size_t>(entry.other), entry);
        }
      }
    }
  }
  /// The first block row of a part.
  std::int64_t cut(std::int64_t part) const {
    const std::int64_t cost = cost_.back() * part / parts_;
    return std::lower_bound(cost_.begin(), cost_.end(), cost) - cost_.begin();
  }
  std::int64_t deep() const { return columns_ * column_depth_; }

  void name_rows(const Slab& slab, Buffers& buffers) const {
    rows_.clear(buffers.rows);
    buffers.slots.clear();
    buffers.first_row = slab.first / x_.count;
    for (std::int64_t row = buffers.first_row; row <= (slab.panels.back().last - 1) / x_.count; ++row) {
      for (const auto& tap : y_.taps) {
        const std::int64_t y = y_.at(row % y_.count, tap);
        buffers.slots.push_back(y_.inside(y) ? rows_.slot(buffers.rows, row / y_.count, y) : -1);
      }
    }
    rows_.allocate(buffers.rows);
  }

  /// The packed columns of panel number `panel` of those multiplied together.
  std::byte* packed(Buffers& buffers, std::size_t panel) const {
    return buffers.panels.need(0) + panel * simd::panel_bytes(tiles_, deep(), panel_stride());
  }
  std::int64_t panel_stride() const { return tiles_.vectors * tiles_.lanes; }

  /// Assembles one column of the product for some panels.
  void pack_column(Panels panels, std::size_t r, std::size_t s, std::int64_t other, std::int64_t column,
                   Buffers& buffers) const {
    for (std::size_t n = 0; n < panels.size(); ++n) {
      const Slabs::Panel& panel = panels[n];
      list_runs(panel, r, s, other, buffers);
      simd::join_runs(buffers.runs, simd::depth_padded(tiles_, depth_) / tiles_.group,
                      packed(buffers, n) + simd::panel_bytes(tiles_, column * column_depth_, panel.width));
    }
  }
  /// Lists the runs of packed rows that make one column of a panel.
  void list_runs(const Slabs::Panel& panel, std::size_t r, std::size_t s, std::int64_t other, Buffers& buffers) const {
    buffers.runs.clear();
    const auto add = [&](const std::byte* from, std::int64_t stride, std::int64_t pixels) {
      buffers.runs.push_back({from, stride, pixels * rows_.unit()});
    };
    for (std::int64_t pixel = panel.first, next = 0; pixel < panel.last; pixel = next) {
      const std::int64_t row = pixel / x_.count, u = pixel % x_.count;
      next = std::min(pixel + x_.count - u, panel.last);
      const auto at = static_cast<std::size_t>(row - buffers.first_row) * y_.taps.size() + r;
      if (const std::int64_t slot = buffers.slots[at]; slot < 0) {
        add_zeros(next - pixel, add);
      } else {
        add(rows_.at(buffers.rows, slot, s, other) + u * rows_.unit(), rows_.width() * rows_.unit(), next - pixel);
      }
    }
    add_zeros(panel.first + panel.width - panel.last, add);
  }
  template <typename Add>
  void add_zeros(std::int64_t pixels, const Add& add) const {
    if (pixels > 0) {
      add(kZeros.data() + simd::kRunSlack, 0, pixels);
    }
  }

  /// The blocks as the left operand.
  simd::Strips strips() const {
    const Values& v = p_.values;
    const simd::Place block{v.data, p_.transposed ? v.col_stride : v.row_stride,
                            p_.transposed ? v.row_stride : v.col_stride};
    return {block, p_.block_rows(), depth_, true};
  }

  /// Computes one block row of the result for some panels.
  void multiply(Panels panels, std::int64_t line, Buffers& buffers) const {
    const Values& v = p_.values;
    buffers.terms.clear();
    each_block(line, [&](std::size_t r, std::size_t s, std::size_t at, const BlockIndex::Entry& entry) {
      const std::int64_t column = column_[at];
      if (auto& done = buffers.packed[static_cast<std::size_t>(column)]; done == 0) {
        pack_column(panels, r, s, entry.other, column, buffers);
        done = 1;
      }
      buffers.terms.push_back({element(v.data, entry.block * v.block_stride), column * column_depth_, nullptr});
    });
    simd::Product product;
    const std::int64_t shift = simd::set_left(tiles_, p_.dtype, strips(), buffers.terms, buffers.strips, product);
    product.add = p_.bias != nullptr;
    product.out_stride = p_.out.c_stride;
    for (std::size_t n = 0; n < panels.size(); ++n) {
      product.right = packed(buffers, n);
      multiply_panel(panels[n], line, product, shift, buffers);
    }
  }

  void multiply_panel(const Slabs::Panel& panel, std::int64_t line, simd::Product& product, std::int64_t shift,
                      Buffers& buffers) const {
    const std::int64_t rows = p_.block_rows(), padded = ceil_div(rows, tiles_.rows) * tiles_.rows;
    const auto sum = static_cast<std::int64_t>(tiles_.sum);
    std::byte* const sums = buffers.sums.need(static_cast<std::size_t>(padded * panel.width * sum + simd::kRunSlack));
    if (p_.bias != nullptr) {
      p_.dtype == DType::f64 ? fill<double>(sums, line, panel.width) : fill<float>(sums, line, panel.width);
    }
    std::byte* const out = pixel(line, panel.first);
    const bool whole = rows == padded && w_stride_ == 1 && panel.last - panel.first == panel.width &&
                       panel.first % piece_ + panel.width <= piece_;
    product.sum_stride = panel.width;
    product.stream = stream_ && lines(reinterpret_cast<std::intptr_t>(out)) && lines(product.out_stride * size_) &&
                     lines(panel.width * size_);
    for (std::int64_t row = 0; row < rows; row += tiles_.rows) {
      product.shift = row / tiles_.rows * shift;
      product.sums = sums + row * panel.width * sum;
      product.out = whole ? out + row * product.out_stride * size_ : nullptr;
      tiles_.multiply[panel.vectors - 1](product);
    }
    for (std::int64_t at = panel.first, next = 0; at < panel.last && !whole; at = next) {
      next = std::min((at / piece_ + 1) * piece_, panel.last);
      tiles_.store(sums + (at - panel.first) * sum, panel.width, rows, next - at,
                   {pixel(line, at), p_.out.c_stride, w_stride_}, stream_);
    }
  }
  /// Sums that begin with the bias.
  template <typename T>
  void fill(std::byte* sums, std::int64_t line, std::int64_t width) const {
    for (std::int64_t row = 0; row < p_.block_rows(); ++row) {
      const T bias = read_element<T>(p_.bias, p_.dtype, (line * p_.block_rows() + row) * p_.bias_stride);
      std::fill_n(reinterpret_cast<T*>(sums) + row * width, width, bias);
    }
  }

  std::byte* element(void* data, std::int64_t at) const { return static_cast<std::byte*>(data) + at * size_; }
  /// The address of pixel `at` of the class in the first channel of a block row.
  std::byte* pixel(std::int64_t line, std::int64_t at) const {
    const std::int64_t row = at / x_.count;
    return element(p_.out.data, line * p_.block_rows() * p_.out.c_stride + row / y_.count * p_.out.n_stride +
                                    y_.first * p_.out.h_stride + row % y_.count * h_stride_ +
                                    x_.first * p_.out.w_stride + at % x_.count * w_stride_);
  }

  const Problem& p_;
  const Tiles& tiles_;
  AxisClass y_, x_;
  ImageRows rows_;
  std::int64_t size_, image_, depth_, column_depth_;
  std::vector<std::int32_t> column_;  ///< number of each (kernel position, block of channels), or −1
  std::vector<std::int64_t> cost_;    ///< prefix sums over block rows
  std::int64_t columns_;
  Slabs slabs_;
  std::int64_t parts_;        ///< into which the block rows of a slab are split
  std::size_t together_ = 0;  ///< panels multiplied together
  std::int64_t h_stride_, w_stride_;
  std::int64_t piece_;  ///< consecutive pixels with stride `w_stride_`: all of them, an image or a row
  bool stream_;
};

void product(const Problem& problem, Context& context) {
  const Tiles& tiles = simd::tiles(problem.dtype);
  const double flops = 2.0 * static_cast<double>(problem.out.pixels()) / static_cast<double>(problem.y.div) /
                       static_cast<double>(problem.x.div) * static_cast<double>(problem.layout->nnz()) *
                       static_cast<double>(problem.block_rows() * problem.block_cols());
  const std::int64_t y_classes = std::min(problem.y.div, problem.out.h),
                     classes = y_classes * std::min(problem.x.div, problem.out.w);
  const std::int64_t stretches = ceil_div(stretches_for(flops, kStretches, context), classes);
  std::vector<std::unique_ptr<Results>> all;
  std::vector<std::int64_t> first{0};
  for (std::int64_t n = 0; n < classes; ++n) {
    all.push_back(std::make_unique<Results>(problem, tiles, n % y_classes, n / y_classes, stretches));
    first.push_back(first.back() + all.back()->tasks());
  }
  context.executor->parallel_for(first.back(), 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t task = begin; task < end; ++task) {
      const auto n = static_cast<std::size_t>(std::upper_bound(first.begin(), first.end(), task) - first.begin() - 1);
      all[n]->run(task - first[n]);
    }
    simd::finish_streams();
  });
}

}  // namespace

void run(const Problem& problem, Context& context) {
  problem.kind == Kind::product ? product(problem, context) : weight(problem, context);
}

}  // namespace fretwork::block_conv::cpu
