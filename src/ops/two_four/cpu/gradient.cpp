// The gradients of 2:4 products on the CPU. Both are dense products in which the sparse matrix exists only a block at a
// time: its lines are expanded on their way into the panels of x's gradient, and of the gradient of all elements a
// block is kept while the values are picked from it.
//
// A sum is computed by one thread in a fixed order, so results do not depend on the number of threads.
#include <algorithm>
#include <cstddef>
#include <cstring>

#include "core/divide.h"
#include "ops/two_four/cpu/codes.h"
#include "ops/two_four/problem.h"
#include "runtime/simd/dots.h"
#include "runtime/simd/tiles.h"

namespace fretwork::two_four::cpu {
namespace {

using simd::Tiles;

/// Columns of a block of sums, at most and at least: whole words of metadata, and the codes of a line fit.
template <typename T>
constexpr std::int64_t kCols = kCodeBytes / static_cast<std::int64_t>(sizeof(T));
constexpr std::int64_t kLeastCols = 64;
/// Its rows (of the batch, or lines), and the least of them.
constexpr std::int64_t kRows = 128, kLeastRows = 32;
/// Depth of a panel: lines, or rows of the batch. Block and panels leave room in a second-level cache of 1 MB.
constexpr std::int64_t kDepth = 256;
/// Lines that are expanded together, which leave room in a first-level cache.
constexpr std::int64_t kExpanded = 16;
/// Depth up to which a tile of the left side is read where it is, whichever way it lies.
constexpr std::int64_t kShort = 16;
/// Blocks per thread, if there are as many.
constexpr std::int64_t kPieces = 2;

struct Buffers {
  simd::Scratch left, right, sums, lines, line;
  static Buffers& of_thread() {
    thread_local Buffers buffers;
    return buffers;
  }
};

std::byte* at(void* data, std::int64_t element, std::size_t size) {
  return static_cast<std::byte*>(data) + element * static_cast<std::int64_t>(size);
}

/// A run of one line of values: where it lies, if its elements are neighbours, else in `scratch`.
template <typename T>
class Run {
 public:
  Run(const Matrix& of, std::int64_t line, std::int64_t first, std::int64_t count, simd::Scratch& scratch)
      : there_(static_cast<T*>(of.data) + line * of.line + first * of.along), along_(of.along), count_(count) {
    here_ = along_ == 1 ? there_ : reinterpret_cast<T*>(scratch.need(sizeof(T) * static_cast<std::size_t>(count)));
  }
  const T* load() const {
    for (std::int64_t n = 0; along_ != 1 && n < count_; ++n) {
      here_[n] = there_[n * along_];
    }
    return here_;
  }
  T* open() const { return here_; }
  void store() const {
    for (std::int64_t n = 0; along_ != 1 && n < count_; ++n) {
      there_[n * along_] = here_[n];
    }
  }

 private:
  T *there_, *here_;
  std::int64_t along_, count_;
};

/// Columns of a block in panels of a few vectors, alike.
class Panels {
 public:
  Panels(std::int64_t cols, const Tiles& tiles)
      : cols_(cols),
        lanes_(tiles.lanes),
        vectors_(ceil_div(cols, tiles.lanes)),
        count_(ceil_div(vectors_, tiles.vectors)) {}
  std::int64_t count() const { return count_; }
  std::int64_t width() const { return vectors_ * lanes_; }
  std::int64_t first(std::int64_t panel) const { return vectors_ * panel / count_ * lanes_; }
  std::int64_t width(std::int64_t panel) const { return first(panel + 1) - first(panel); }
  std::int64_t cols(std::int64_t panel) const { return std::min(width(panel), cols_ - first(panel)); }

 private:
  std::int64_t cols_, lanes_, vectors_, count_;
};

/// A result of rows × columns in blocks, of which each thread gets some.
class Blocks {
 public:
  struct Block {
    std::int64_t row, rows, col, cols;
  };
  Blocks(std::int64_t rows, std::int64_t cols, std::int64_t most_cols, const Context& context)
      : rows_(rows), cols_(cols), each_col_(most_cols) {
    const int threads = context.executor->concurrency();
    const std::int64_t wanted = threads > 1 ? kPieces * threads : 1;
    while (count() < wanted && each_col_ > kLeastCols) {
      each_col_ /= 2;
    }
    while (count() < wanted && each_row_ > kLeastRows) {
      each_row_ /= 2;
    }
  }
  std::int64_t count() const { return ceil_div(rows_, each_row_) * across(); }
  Block operator[](std::int64_t n) const {
    const std::int64_t row = n / across() * each_row_, col = n % across() * each_col_;
    return {row, std::min(each_row_, rows_ - row), col, std::min(each_col_, cols_ - col)};
  }

 private:
  std::int64_t across() const { return ceil_div(cols_, each_col_); }
  std::int64_t rows_, cols_, each_col_, each_row_ = kRows;
};

/// What both gradients share. T is an unsigned integer of the elements' size.
template <typename T>
class Work {
 public:
  Work(const GradientProblem& problem, const Tiles& tiles) : p_(problem), s_(problem.s), tiles_(tiles) {}

 protected:
  using Block = Blocks::Block;

  std::byte* sums_of(const Block& block) const {
    return Buffers::of_thread().sums.need(static_cast<std::size_t>(block.rows + tiles_.rows) *
                                          static_cast<std::size_t>(kCols<T> + kPadding) * tiles_.sum);
  }
  std::int64_t padded(std::int64_t depth) const { return ceil_div(depth, tiles_.group) * tiles_.group; }
  std::int64_t bytes(std::int64_t elements) const { return elements * static_cast<std::int64_t>(tiles_.element); }

  /// right[first + k][j] = from(k, j), panel by panel; `deep` rows in all.
  void pack_right(const simd::Place& from, std::int64_t first, std::int64_t depth, std::int64_t deep,
                  const Panels& panels, std::byte* right) const {
    for (std::int64_t n = 0; n < panels.count(); ++n) {
      const simd::Place part{at(from.data, panels.first(n) * from.col_stride, sizeof(T)), from.row_stride,
                             from.col_stride};
      std::byte* const to = right + bytes(panels.first(n) * padded(deep) + first * panels.width(n));
      tiles_.pack(part, depth, panels.cols(n), panels.width(n), to, 0);
    }
  }
  std::byte* right_of(std::int64_t depth, const Panels& panels) const {
    return Buffers::of_thread().right.need(static_cast<std::size_t>(bytes(padded(depth) * panels.width())));
  }

  /// One tile of rows of a product, and how it is multiplied.
  struct Strip {
    const simd::Place& left;  ///< of all rows
    std::int64_t row, rows;   ///< first, and how many exist
    std::int64_t depth;
    bool add;
    std::byte* sums;
    void* out = nullptr;  ///< if set, where rounded sums go instead
    /// If not 0, the right side is no panel: its rows lie so many elements apart.
    std::int64_t right_stride = 0;
  };

  /// sums[i][j] (+)= Σ_k left(i, k)·right[k][j].
  void multiply(const Strip& s, const Panels& panels, std::byte* right) const {
    const simd::Place left{at(s.left.data, s.row * s.left.row_stride, sizeof(T)), s.left.row_stride, s.left.col_stride};
    const std::int64_t deep = padded(s.depth);
    // Whole tiles are read where they lie: along the depth, or if it is short.
    const bool whole = !tiles_.widens && s.rows == tiles_.rows && deep == s.depth;
    const bool as_is = whole && (left.col_stride == 1 || (tiles_.group == 1 && s.depth <= kShort));
    simd::Term term{left.data, 0, nullptr};
    if (!as_is) {
      std::byte* const packed = Buffers::of_thread().left.need(static_cast<std::size_t>(bytes(tiles_.rows * deep)));
      tiles_.pack({left.data, left.col_stride, left.row_stride}, s.depth, s.rows, tiles_.rows, packed, 0);
      term.left = packed;
    }
    simd::Product product{.terms = &term, .count = 1, .steps = deep / tiles_.group};
    product.row_stride = as_is ? left.row_stride : tiles_.group;
    product.step_stride = tiles_.group * (as_is ? left.col_stride : tiles_.rows);
    product.add = s.add;
    product.sum_stride = panels.width();
    product.out_stride = panels.width();
    product.right_stride = s.right_stride;
    for (std::int64_t n = 0; n < panels.count(); ++n) {
      product.right = right + bytes(panels.first(n) * (s.right_stride != 0 ? 1 : deep));
      product.sums = s.sums + panels.first(n) * static_cast<std::int64_t>(tiles_.sum);
      product.out = s.out == nullptr ? nullptr : at(s.out, panels.first(n), sizeof(T));
      const std::int64_t vectors = panels.width(n) / tiles_.lanes;
      (s.right_stride != 0 ? tiles_.multiply_in_place[vectors - 1] : tiles_.multiply[vectors - 1])(product);
    }
  }
  std::byte* row_of(std::byte* sums, std::int64_t row, const Panels& panels) const {
    return sums + row * panels.width() * static_cast<std::int64_t>(tiles_.sum);
  }

  /// Kernels for a few rows of floats that lie as these read them, or null.
  const MaskKernels<T>* direct() const {
    const MaskKernels<T>* const masks = mask_kernels<T>();
    const bool lie = s_.values.along == 1 && s_.words.along == 1 && p_.d_y.col == 1 && p_.x.col == 1;
    return s_.dtype == DType::f32 && lie && p_.n <= simd::kFewRows && masks != nullptr ? masks : nullptr;
  }
  /// Columns of a block of some lines.
  PackedLines<T> lines(std::int64_t line, std::int64_t count, const Block& block) const {
    const std::int64_t groups = block.cols / s_.group();
    return {static_cast<T*>(s_.values.data) + line * s_.values.line + block.col / 2,
            s_.values.line,
            static_cast<const std::uint8_t*>(s_.words.data) + line * s_.words.line * s_.word_bytes +
                block.col / s_.group() / 2,
            s_.words.line * s_.word_bytes,
            count,
            groups};
  }

  static simd::Place place(const Dense& of, std::int64_t row, std::int64_t col) {
    return {at(of.data, row * of.row + col * of.col, sizeof(T)), of.row, of.col};
  }

  static constexpr std::int64_t kPadding = 16;  ///< columns that fill a vector up
  const GradientProblem& p_;
  const Format& s_;
  const Tiles& tiles_;
};

/// d_x = d_y·s.
template <typename T>
class InputGradient : Work<T> {
  using Base = Work<T>;
  using Base::p_, Base::s_, Base::tiles_, Base::kPadding;

 public:
  InputGradient(const GradientProblem& problem, Context& context)
      : Base(problem, few(problem) ? simd::widened_tiles(problem.s.dtype) : simd::tiles(problem.s.dtype)),
        blocks_(problem.n, problem.s.k, kCols<T>, context) {}

  std::int64_t jobs() const { return blocks_.count(); }
  void run(std::int64_t job) const {
    const Blocks::Block block = blocks_[job];
    const Panels panels(block.cols, tiles_);
    std::byte* const sums = Base::sums_of(block);
    if (s_.lines == 0 || Base::direct() != nullptr) {
      std::memset(sums, 0, static_cast<std::size_t>(block.rows * panels.width()) * tiles_.sum);
    }
    if (const MaskKernels<T>* const masks = Base::direct(); masks != nullptr) {
      const simd::Place d_y = Base::place(p_.d_y, block.row, 0);
      masks->add_lines(Base::lines(0, s_.lines, block),
                       {static_cast<const float*>(d_y.data), d_y.row_stride, block.rows},
                       reinterpret_cast<float*>(sums), panels.width());
    } else {
      add_expanded(block, panels, sums);
    }
    tiles_.store(sums, panels.width(), block.rows, block.cols, Base::place(p_.x, block.row, block.col), false);
  }

 private:
  /// Adds up all lines, some of which are expanded at a time.
  void add_expanded(const Blocks::Block& block, const Panels& panels, std::byte* sums) const {
    if (few(p_)) {
      add_few(block, panels, sums);
      return;
    }
    // Elements that are multiplied as they are need no panel. Lines do not share cache sets.
    const bool in_place = tiles_.group == 1 && !tiles_.widens;
    const std::int64_t stride = in_place ? panels.width() + kPadding : block.cols;
    T* const lines = lines_of(in_place ? kDepth : kExpanded, stride);
    Codes codes(s_);
    for (std::int64_t line = 0; line < s_.lines; line += kDepth) {
      const std::int64_t depth = std::min(kDepth, s_.lines - line);
      std::byte* right = reinterpret_cast<std::byte*>(lines);
      if (in_place) {
        expand(line, depth, block, codes, lines, stride);
      } else {
        right = Base::right_of(depth, panels);
        for (std::int64_t n = 0; n < depth; n += kExpanded) {
          const std::int64_t some = std::min(kExpanded, depth - n);
          expand(line + n, some, block, codes, lines, stride);
          Base::pack_right({lines, stride, 1}, n, some, depth, panels, right);
        }
      }
      const simd::Place d_y = Base::place(p_.d_y, block.row, line);
      for (std::int64_t row = 0; row < block.rows; row += tiles_.rows) {
        const std::int64_t rows = std::min(tiles_.rows, block.rows - row);
        Base::multiply(
            {d_y, row, rows, depth, line > 0, Base::row_of(sums, row, panels), nullptr, in_place ? stride : 0}, panels,
            right);
      }
    }
  }

  /// The same with a few rows: lines stream by once.
  void add_few(const Blocks::Block& block, const Panels& panels, std::byte* sums) const {
    T* const lines = lines_of(kExpanded, block.cols);
    Codes codes(s_);
    for (std::int64_t line = 0; line < s_.lines; line += kExpanded) {
      const std::int64_t some = std::min(kExpanded, s_.lines - line);
      expand(line, some, block, codes, lines, block.cols);
      add_rows(Base::place(p_.d_y, block.row, line), block, some, panels, lines, line > 0, sums);
    }
  }

  static T* lines_of(std::int64_t count, std::int64_t stride) {
    return reinterpret_cast<T*>(Buffers::of_thread().lines.need(sizeof(T) * static_cast<std::size_t>(count * stride)));
  }

  /// Rows for which a panel is not worth packing; of five and more, products in pairs make up for it.
  static bool few(const GradientProblem& p) {
    return p.n <= simd::kFewRows / (simd::tiles(p.s.dtype).group > 1 ? 2 : 1);
  }

  /// Columns of a block of some lines, with zeros where nothing is kept.
  void expand(std::int64_t line, std::int64_t count, const Blocks::Block& block, Codes& codes, T* out,
              std::int64_t stride) const {
    const std::int64_t group = s_.group(), groups = block.cols / group;
    for (std::int64_t l = 0; l < count; ++l, out += stride) {
      const Run<T> values(s_.values, line + l, block.col / 2, block.cols / 2, Buffers::of_thread().line);
      codes.place(values.load(), line + l, block.col / group, groups, out);
    }
  }

  /// The expanded lines stream by once.
  void add_rows(const simd::Place& d_y, const Blocks::Block& block, std::int64_t depth, const Panels& panels,
                const T* lines, bool add, std::byte* sums) const {
    std::byte* const left = Buffers::of_thread().left.need(static_cast<std::size_t>(Base::bytes(block.rows * depth)));
    tiles_.pack(d_y, block.rows, depth, depth, left, 0);
    const simd::DotsTerm term{lines, 0};
    simd::Dots dots{.terms = {&term, 1}, .rows = block.cols, .depth = depth};
    dots.stride = block.cols;
    dots.across = true;
    dots.x = left;
    dots.x_stride = depth;
    dots.batch = block.rows;
    dots.sums = sums;
    dots.sum_stride = panels.width();
    dots.add = add;
    simd::dots(dots, s_.dtype);
  }

  Blocks blocks_;
};

/// The values that are kept of d_yᵀ·x.
template <typename T>
class ValueGradient : Work<T> {
  using Base = Work<T>;
  using Base::p_, Base::s_, Base::tiles_;

 public:
  ValueGradient(const GradientProblem& problem, Context& context)
      : Base(problem, simd::tiles(problem.s.dtype)), blocks_(problem.s.lines, problem.s.k, kCols<T>, context) {}

  std::int64_t jobs() const { return blocks_.count(); }
  void run(std::int64_t job) const {
    const Blocks::Block block = blocks_[job];
    if (const MaskKernels<T>* const masks = Base::direct(); masks != nullptr) {
      const simd::Place d_y = Base::place(p_.d_y, 0, block.row), x = Base::place(p_.x, 0, block.col);
      masks->pick_products(Base::lines(block.row, block.rows, block),
                           {static_cast<const float*>(d_y.data), d_y.row_stride, p_.n},
                           {static_cast<const float*>(x.data), x.row_stride, p_.n});
      return;
    }
    const Panels panels(block.cols, tiles_);
    std::byte* const sums = Base::sums_of(block);
    T* const rounded = reinterpret_cast<T*>(
        Buffers::of_thread().lines.need(sizeof(T) * static_cast<std::size_t>(tiles_.rows * panels.width())));
    Codes codes(s_);
    std::int64_t n = 0;
    do {  // once if there are no rows, whose sums are zeros
      const std::int64_t depth = std::min(kDepth, p_.n - n);
      std::byte* const right = Base::right_of(depth, panels);
      Base::pack_right(Base::place(p_.x, n, block.col), 0, depth, depth, panels, right);
      simd::Place d_y = Base::place(p_.d_y, n, block.row);
      std::swap(d_y.row_stride, d_y.col_stride);
      const bool last = n + depth == p_.n;
      for (std::int64_t row = 0; row < block.rows; row += tiles_.rows) {
        const std::int64_t rows = std::min(tiles_.rows, block.rows - row);
        Base::multiply({d_y, row, rows, depth, n > 0, Base::row_of(sums, row, panels), last ? rounded : nullptr},
                       panels, right);
        if (last) {
          pick(block, row, rows, rounded, panels.width(), codes);
        }
      }
      n += depth;
    } while (n < p_.n);
  }

 private:
  /// Of a tile of lines.
  void pick(const Blocks::Block& block, std::int64_t row, std::int64_t rows, const T* from, std::int64_t stride,
            Codes& codes) const {
    const std::int64_t group = s_.group(), groups = block.cols / group;
    for (std::int64_t line = block.row + row; line < block.row + row + rows; ++line, from += stride) {
      const Run<T> values(s_.values, line, block.col / 2, block.cols / 2, Buffers::of_thread().line);
      codes.pick(from, line, block.col / group, groups, values.open());
      values.store();
    }
  }

  Blocks blocks_;
};

template <template <typename> typename Jobs>
void run_as(const GradientProblem& p, Context& context) {
  const auto run = [&](auto zero) {
    const Jobs<decltype(zero)> work(p, context);
    const std::int64_t jobs = work.jobs();
    const double operations =
        static_cast<double>(p.n + 8) * static_cast<double>(p.s.lines + 8) * static_cast<double>(p.s.k);
    constexpr double kLeast = 1e6;  // worth a thread
    const auto grain = static_cast<std::int64_t>(
        std::clamp(static_cast<double>(jobs) * kLeast / operations, 1.0, static_cast<double>(jobs)));
    context.executor->parallel_for(jobs, grain, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t job = begin; job < end; ++job) {
        work.run(job);
      }
    });
  };
  switch (size_of(p.s.dtype)) {
    case 2:
      return run(std::uint16_t{});
    case 4:
      return run(std::uint32_t{});
    default:
      return run(std::uint64_t{});
  }
}

}  // namespace

void input_gradient(const GradientProblem& problem, Context& context) { run_as<InputGradient>(problem, context); }
void value_gradient(const GradientProblem& problem, Context& context) { run_as<ValueGradient>(problem, context); }

}  // namespace fretwork::two_four::cpu
