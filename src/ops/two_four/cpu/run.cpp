// 2:4 products on the CPU. A job is a block of lines of the sparse operand with a block of columns of the dense one. It
// adds up one piece of the depth after another, and finishes its sums: scales, bias, activation, rounding. A sum is
// computed by one thread in a fixed order, so results do not depend on the number of threads.
#include "ops/two_four/cpu/run.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <limits>
#include <type_traits>

#include "core/divide.h"
#include "core/element.h"
#include "core/float8.h"
#include "ops/two_four/problem.h"
#include "runtime/simd/finish.h"
#include "runtime/simd/tiles.h"

namespace fretwork::two_four::cpu {
namespace {

/// Lines of a job at most, and jobs per thread, if there are as many.
constexpr std::int64_t kLines = 512, kPieces = 2;
/// Bytes of a piece of the dense operand, which leave room in a second-level cache of 1 MB.
constexpr std::int64_t kRowsBytes = 96 << 10, kDotsBytes = 256 << 10;
/// Columns that are few. More go on lanes.
constexpr std::int64_t kFewCols = 12;
/// Vectors of columns in a job at most, of as many panels as its kernel wants.
constexpr std::int64_t kVectors = 4;
/// The depth is cut at multiples of this, so that nibbles are cut at whole words.
constexpr std::int64_t kCut = 64;
/// Lines fetched ahead of those being multiplied, a multiple of kMaxLines, and as many bytes of each.
constexpr std::int64_t kLinesAhead = 8, kFetchedBytes = 1024;
/// Rows of sums are whole vectors of the longest kind.
constexpr std::int64_t kSumLanes = 16;

struct Buffers {
  simd::Scratch panel, values, words, sums;
  static Buffers& of_thread() {
    thread_local Buffers buffers;
    return buffers;
  }
};

template <typename T>
T* need(simd::Scratch& scratch, std::int64_t count) {
  return reinterpret_cast<T*>(scratch.need(sizeof(T) * static_cast<std::size_t>(count)));
}

const std::byte* at(const void* data, std::int64_t bytes) { return static_cast<const std::byte*>(data) + bytes; }

/// bf16 as it lies in memory.
struct Bf16 {
  std::uint16_t bits;
};

template <typename T>
T as(float x) {
  if constexpr (std::is_same_v<T, Bf16>) {
    return {bf16_from_float(x)};
  } else {
    return static_cast<T>(x);
  }
}

/// All 256 floating numbers of 8 bits.
template <typename T>
const std::array<T, 256>& table_of_8(DType dtype) {
  static const auto tables = [] {
    std::array<std::array<T, 256>, 2> both{};
    for (unsigned n = 0; n < 256; ++n) {
      both[0][n] = as<T>(float_from_e5m2(static_cast<std::uint8_t>(n)));
      both[1][n] = as<T>(float_from_e4m3(static_cast<std::uint8_t>(n)));
    }
    return both;
  }();
  return tables[dtype == DType::f8_e4m3 ? 1 : 0];
}

/// out[n] = from[n·step], converted.
template <typename T>
void widen(const void* from, std::int64_t step, std::int64_t count, DType dtype, T* out) {
  const auto each = [&](const auto* data, const auto& wide) {
    if (step == 1) {
      for (std::int64_t n = 0; n < count; ++n) {
        out[n] = wide(data[n]);
      }
      return;
    }
    for (std::int64_t n = 0; n < count; ++n) {
      out[n] = wide(data[n * step]);
    }
  };
  if constexpr (std::is_integral_v<T>) {
    const auto wide = [](auto x) { return static_cast<T>(x); };
    dtype == DType::u8 ? each(static_cast<const std::uint8_t*>(from), wide)
                       : each(static_cast<const std::int8_t*>(from), wide);
  } else if (std::is_same_v<T, Bf16> && !is_floating(dtype) && step == 1) {
    widen_pairs(static_cast<const std::uint8_t*>(from), count, dtype, reinterpret_cast<std::uint16_t*>(out));
  } else if (!is_floating(dtype)) {
    const auto& table = table_of_8<T>(dtype);
    each(static_cast<const std::uint8_t*>(from), [&](std::uint8_t bits) { return table[bits]; });
  } else if constexpr (std::is_same_v<T, Bf16>) {
    each(static_cast<const Bf16*>(from), [](Bf16 x) { return x; });
  } else {
    simd::widened_tiles(dtype).pack({const_cast<void*>(from), 0, step}, 1, count, count, out, 0);
  }
}

/// What one job works on.
struct Job {
  std::int64_t batch, line, lines, col, cols;
  std::int64_t width() const { return ceil_div(cols, kSumLanes) * kSumLanes; }
};

/// A piece of each line of values or words: read where it is, if kernels can, or from a copy.
template <typename To>
struct Piece {
  const std::byte* first;    ///< of line 0
  std::int64_t line_stride;  ///< in bytes
  std::int64_t count, bytes;
  To* copies = nullptr;  ///< of kMaxLines lines

  Piece(const std::byte* data, const Matrix& of, std::int64_t size, std::int64_t elements, bool as_is,
        simd::Scratch& scratch)
      : first(data), line_stride(of.line * size), count(elements), bytes(elements * size) {
    if (!as_is || of.along != 1) {
      copies = need<To>(scratch, kMaxLines * count);
    }
  }
  /// The n-th of some lines.
  template <typename F>
  const To* line(std::int64_t i, std::int64_t n, const F& copy) const {
    const std::byte* const from = first + i * line_stride;
    if (copies == nullptr) {
      return reinterpret_cast<const To*>(from);
    }
    copy(from, copies + n * count);
    return copies + n * count;
  }
  /// Pieces of lines lie apart, which hardware does not foresee.
  void fetch(std::int64_t i) const {
    for (std::int64_t n = 0; n < std::min(bytes, kFetchedBytes); n += 64) {
      __builtin_prefetch(first + i * line_stride + n);
    }
  }
};

/// How a problem is cut into jobs, and how they begin and end. Sums are of type T; kernels read elements of type In.
template <typename T, typename In>
class Work {
 public:
  Work(const Problem& problem, Context& context, std::int64_t most_cols)
      : p_(problem),
        group_(two_four::group(problem.dtype)),
        size_(static_cast<std::int64_t>(size_of(problem.dtype))),
        cols_(std::min(most_cols, problem.n)),
        col_blocks_(ceil_div(p_.n, cols_)) {
    const std::int64_t wanted =
        ceil_div(kPieces * std::max(context.executor->concurrency(), 1), p_.batch * col_blocks_);
    lines_ = std::clamp(ceil_div(ceil_div(p_.m, wanted), kMaxLines) * kMaxLines, std::int64_t{kMaxLines}, kLines);
    line_blocks_ = ceil_div(p_.m, lines_);
  }

  std::int64_t jobs() const { return p_.batch * col_blocks_ * line_blocks_; }

 protected:
  static KernelType kernel_type(const Problem& problem) {
    return std::is_same_v<In, double>         ? KernelType::f64
           : std::is_same_v<In, std::int32_t> ? KernelType::i32
           : std::is_same_v<In, Bf16>         ? KernelType::bf16_pairs
           : std::is_same_v<In, std::int16_t> ? KernelType::i16_pairs
           : problem.dtype == DType::f32      ? KernelType::f32_of_two
                                              : KernelType::f32;
  }
  /// Whether elements are in memory as kernels read them.
  bool as_is() const {
    return p_.dtype == (std::is_same_v<In, Bf16> ? DType::bf16 : std::is_same_v<In, double> ? DType::f64 : DType::f32);
  }
  Job job(std::int64_t n) const {
    const std::int64_t line = n % line_blocks_ * lines_, col = n / line_blocks_ % col_blocks_ * cols_;
    return {n / line_blocks_ / col_blocks_, line, std::min(lines_, p_.m - line), col, std::min(cols_, p_.n - col)};
  }
  /// Of a job, zeros if there is nothing to add up.
  T* sums(const Job& job) const {
    T* const sums = need<T>(Buffers::of_thread().sums, job.lines * job.width());
    if (p_.k == 0) {
      std::fill_n(sums, job.lines * job.width(), T{0});
    }
    return sums;
  }
  const std::byte* b(std::int64_t batch, std::int64_t row, std::int64_t col) const {
    return at(p_.b.data, (batch * p_.b.batch + row * p_.b.row + col * p_.b.col) * size_);
  }

  /// Calls add with some lines of a job at a time, from depth k on, and their sums.
  template <typename F>
  void each_lines(const Job& job, std::int64_t k, std::int64_t depth, T* sums, const F& add) const {
    Buffers& buffers = Buffers::of_thread();
    const Piece<In> values(at(p_.values.data, k / 2 * p_.values.along * size_), p_.values, size_, depth / 2, as_is(),
                           buffers.values);
    const std::int64_t bytes = p_.word_bytes, in_word = 2 * bytes;
    const Piece<std::uint8_t> words(at(p_.words.data, k / group_ / in_word * p_.words.along * bytes), p_.words, bytes,
                                    ceil_div(depth / group_, in_word) * bytes, true, buffers.words);
    const auto widened = [&](const std::byte* from, In* to) { widen(from, p_.values.along, depth / 2, p_.dtype, to); };
    const auto gathered = [&](const std::byte* from, std::uint8_t* to) {
      for (std::int64_t n = 0; n < words.count; n += bytes, from += p_.words.along * bytes) {
        std::memcpy(to + n, from, static_cast<std::size_t>(bytes));
      }
    };
    Lines lines{.groups = depth / group_, .add = k > 0, .sum_stride = job.width()};
    for (std::int64_t i = 0; i < job.lines; i += kMaxLines) {
      lines.count = static_cast<int>(std::min<std::int64_t>(kMaxLines, job.lines - i));
      for (int n = 0; n < lines.count; ++n) {
        lines.values[static_cast<std::size_t>(n)] = values.line(job.line + i + n, n, widened);
        lines.nibbles[static_cast<std::size_t>(n)] = words.line(job.line + i + n, n, gathered);
      }
      for (std::int64_t n = i + kLinesAhead; n < std::min(i + kLinesAhead + kMaxLines, job.lines); ++n) {
        values.fetch(job.line + n);
        words.fetch(job.line + n);
      }
      lines.sums = sums + i * job.width();
      add(lines);
    }
  }

  float scale(const Vector& of, std::int64_t n) const {
    return of.data != nullptr ? static_cast<const float*>(of.data)[n * of.stride] : 1.0f;
  }

  void finish(const Job& job, T* sums) const {
    if constexpr (std::is_same_v<T, std::int32_t>) {
      if (stays_whole()) {
        store_integers(job, sums);
        return;
      }
      // In place: a float is as large.
      auto* const floats = reinterpret_cast<float*>(sums);
      for (std::int64_t n = 0; n < job.lines * job.width(); ++n) {
        std::int32_t sum;
        std::memcpy(&sum, sums + n, sizeof sum);
        const auto wide = static_cast<float>(sum);
        std::memcpy(floats + n, &wide, sizeof wide);
      }
      finish_floating(job, floats);
    } else {
      finish_floating(job, sums);
    }
  }

  /// i32 results that need no fractions on the way are computed without.
  bool stays_whole() const {
    return p_.out == DType::i32 && p_.scale_s.data == nullptr && p_.scale_b.data == nullptr &&
           p_.scale_out == nullptr && (p_.activation == Activation::none || p_.activation == Activation::relu);
  }
  std::int32_t whole_bias(std::int64_t line) const {
    return p_.bias.data != nullptr ? static_cast<const std::int32_t*>(p_.bias.data)[line * p_.bias.stride] : 0;
  }

  void store_integers(const Job& job, const std::int32_t* sums) const {
    const std::int32_t least = p_.activation == Activation::relu ? 0 : std::numeric_limits<std::int32_t>::min();
    for (std::int64_t i = 0; i < job.lines; ++i) {
      const auto bias = static_cast<std::uint32_t>(whole_bias(job.line + i));
      for (std::int64_t j = 0; j < job.cols; ++j) {
        const auto sum = static_cast<std::uint32_t>(sums[i * job.width() + j]);  // which wraps, as on a GPU
        static_cast<std::int32_t*>(p_.c.data)[place(job, i, j)] =
            std::max(static_cast<std::int32_t>(sum + bias), least);
      }
    }
  }

  /// Where in c an element of a job is.
  std::int64_t place(const Job& job, std::int64_t i, std::int64_t j) const {
    return job.batch * p_.c.batch + (job.line + i) * p_.c.row + (job.col + j) * p_.c.col;
  }

  template <typename F>
  void finish_floating(const Job& job, F* sums) const {
    const std::int64_t width = job.width();
    const bool biased = p_.bias.data != nullptr;
    if (p_.scale_s.data != nullptr || p_.scale_b.data != nullptr) {
      for (std::int64_t i = 0; i < job.lines; ++i) {
        const float of_line = scale(p_.scale_s, job.line + i);
        for (std::int64_t j = 0; j < job.cols; ++j) {
          sums[i * width + j] *= static_cast<F>(of_line) * static_cast<F>(scale(p_.scale_b, job.col + j));
        }
      }
    }
    if (biased || p_.activation != Activation::none) {
      F bias[kLines];
      for (std::int64_t i = 0; i < job.lines; ++i) {
        bias[i] = biased ? read_element<F>(p_.bias.data, p_.bias_dtype(), (job.line + i) * p_.bias.stride) : F{0};
      }
      simd::finish({sums, width, job.lines, width, biased ? bias : nullptr, nullptr, p_.activation},
                   std::is_same_v<F, double> ? DType::f64 : DType::f32);
    }
    if (p_.scale_out != nullptr) {
      for (std::int64_t n = 0; n < job.lines * width; ++n) {
        sums[n] *= static_cast<F>(*p_.scale_out);
      }
    }
    store(job, sums);
  }

  /// Rounds, once.
  template <typename F>
  void store(const Job& job, const F* sums) const {
    if (!is_floating(p_.out) || (p_.out == DType::f64) != std::is_same_v<F, double>) {  // not of the tiles' types
      for (std::int64_t i = 0; i < job.lines; ++i) {
        for (std::int64_t j = 0; j < job.cols; ++j) {
          write_element(p_.c.data, p_.out, place(job, i, j), sums[i * job.width() + j]);
        }
      }
      return;
    }
    const std::int64_t first = place(job, 0, 0) * static_cast<std::int64_t>(size_of(p_.out));
    const simd::Place to{static_cast<std::byte*>(p_.c.data) + first, p_.c.row, p_.c.col};
    // Sums of pairs are never denormal, so that pairs may store them, which is quicker.
    const bool paired = std::is_same_v<In, Bf16> && p_.is_plain();
    (paired ? simd::tiles(p_.out) : simd::widened_tiles(p_.out))
        .store(sums, job.width(), job.lines, job.cols, to, false);
  }

  const Problem& p_;
  std::int64_t group_, size_;

 private:
  std::int64_t cols_, col_blocks_, line_blocks_, lines_;
};

/// Columns on lanes: each job packs its piece of the dense operand as it goes.
template <typename T, typename In>
class Rows : Work<T, In> {
  using Base = Work<T, In>;
  using Base::p_, Base::group_, Base::size_;

 public:
  Rows(const Problem& problem, Context& context)
      : Base(problem, context, kVectors * rows_kernel(Base::kernel_type(problem)).lanes),
        kernel_(rows_kernel(Base::kernel_type(problem))) {}

  using Base::jobs;
  void run(std::int64_t n) const {
    const Job job = Base::job(n);
    T* const sums = Base::sums(job);
    const std::int64_t widest = std::min(ceil_div(job.cols, kernel_.lanes), kernel_.vectors) * kernel_.lanes;
    const std::int64_t fit = kRowsBytes / (widest * kernel_.group_bytes) * group_;
    const std::int64_t most = std::min(std::max(fit / kCut * kCut, kCut), ceil_div(p_.k, kCut) * kCut);
    std::byte* const panel =
        Buffers::of_thread().panel.need(static_cast<std::size_t>(most / group_ * widest * kernel_.group_bytes));
    for (std::int64_t k = 0; k < p_.k; k += most) {
      const std::int64_t depth = std::min(most, p_.k - k);
      for (std::int64_t j = 0; j < job.cols; j += widest) {
        const std::int64_t cols = std::min(widest, job.cols - j), vectors = ceil_div(cols, kernel_.lanes);
        pack(Base::b(job.batch, k, job.col + j), depth, cols, vectors * kernel_.lanes, panel);
        Base::each_lines(job, k, depth, sums + j,
                         [&](const Lines& lines) { kernel_.add(lines, panel, static_cast<int>(vectors)); });
      }
    }
    Base::finish(job, sums);
  }

 private:
  void pack(const std::byte* b, std::int64_t depth, std::int64_t cols, std::int64_t width, std::byte* panel) const {
    simd::Place from{const_cast<std::byte*>(b), p_.b.row, p_.b.col};
    if constexpr (sizeof(In) == 2) {
      Buffers& buffers = Buffers::of_thread();
      if (!Base::as_is()) {
        // In the direction in which it lies.
        In* const wide = need<In>(buffers.words, depth * cols);
        const bool turned = p_.b.row == 1;
        turned ? widen_lines(b, {p_.b.col, 1}, cols, depth, depth, wide)
               : widen_lines(b, {p_.b.row, p_.b.col}, depth, cols, cols, wide);
        from = turned ? simd::Place{wide, 1, depth} : simd::Place{wide, cols, 1};
      }
      // Bits are moved in pairs, whatever they mean.
      std::byte* const pairs = buffers.values.need(sizeof(In) * static_cast<std::size_t>(depth * width));
      simd::paired_bf16_tiles()->pack(from, depth, cols, width, pairs, 0);
      kernel_.expand(pairs, depth / group_, width, panel);
    } else if (is_floating(p_.dtype)) {
      simd::widened_tiles(p_.dtype).pack(from, depth, cols, width, panel, 0);
    } else {
      widen_lines(b, {p_.b.row, p_.b.col}, depth, cols, width, reinterpret_cast<In*>(panel));
    }
  }
  /// Lines of a piece, filled up with zeros.
  struct Steps {
    std::int64_t line, along;
  };
  void widen_lines(const std::byte* b, Steps steps, std::int64_t lines, std::int64_t count, std::int64_t width,
                   In* out) const {
    for (std::int64_t n = 0; n < lines; ++n, out += width) {
      widen(b + n * steps.line * size_, steps.along, count, p_.dtype, out);
      std::fill(out + count, out + width, In{});
    }
  }

  const RowsKernel& kernel_;
};

/// Few columns: groups on lanes. The dense operand is packed once, for all jobs.
template <typename T, typename In>
class Dots : Work<T, In> {
  using Base = Work<T, In>;
  using Base::p_, Base::group_;

 public:
  Dots(const Problem& problem, Context& context)
      : Base(problem, context, problem.n),
        kernel_(dots_kernel(Base::kernel_type(problem))),
        column_(kernel_.lanes * group_),
        steps_(ceil_div(p_.k, column_)),
        packed_(context, sizeof(In) * static_cast<std::size_t>(p_.batch * p_.n * steps_ * column_)) {
    context.executor->parallel_for(p_.batch * p_.n, ceil_div(1 << 16, p_.k + 1),
                                   [&](std::int64_t begin, std::int64_t end) {
                                     for (std::int64_t n = begin; n < end; ++n) {
                                       pack(n / p_.n, n % p_.n);
                                     }
                                   });
  }

  using Base::jobs;
  void run(std::int64_t n) const {
    const Job job = Base::job(n);
    T* const sums = Base::sums(job);
    const std::int64_t fit = kDotsBytes / static_cast<std::int64_t>(sizeof(In)) / p_.n;
    const std::int64_t most = std::max(fit / kCut * kCut, kCut);
    for (std::int64_t k = 0; k < p_.k; k += most) {
      const In* const from = panel(job.batch) + k * p_.n;
      Base::each_lines(job, k, std::min(most, p_.k - k), sums,
                       [&](const Lines& lines) { kernel_.add(lines, from, p_.n, p_.n * column_); });
    }
    Base::finish(job, sums);
  }

 private:
  In* panel(std::int64_t batch) const { return static_cast<In*>(packed_.data()) + batch * p_.n * steps_ * column_; }
  void pack(std::int64_t batch, std::int64_t col) const {
    In* const line = need<In>(Buffers::of_thread().values, steps_ * column_);
    widen(Base::b(batch, 0, col), p_.b.row, p_.k, p_.dtype, line);
    std::fill(line + p_.k, line + steps_ * column_, In{});
    kernel_.pack(line, steps_, p_.n * column_, panel(batch) + col * column_);
  }

  const DotsKernel& kernel_;
  std::int64_t column_, steps_;  ///< elements of a column in a step, and how many there are
  Workspace packed_;
};

template <typename Jobs>
void run_as(const Problem& problem, Context& context) {
  const Jobs work(problem, context);
  const std::int64_t jobs = work.jobs();
  const double operations = static_cast<double>(problem.batch * problem.m) * static_cast<double>(problem.n) *
                            static_cast<double>(problem.k + 64);
  constexpr double kLeast = 1e6;  // worth a thread
  const auto grain = static_cast<std::int64_t>(
      std::clamp(static_cast<double>(jobs) * kLeast / operations, 1.0, static_cast<double>(jobs)));
  context.executor->parallel_for(jobs, grain, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t job = begin; job < end; ++job) {
      work.run(job);
    }
  });
}

template <typename T, typename In>
void run_with(const Problem& problem, Context& context) {
  if constexpr (!std::is_same_v<In, std::int32_t>) {
    if (problem.n <= kFewCols) {
      return run_as<Dots<T, In>>(problem, context);
    }
  }
  run_as<Rows<T, In>>(problem, context);
}

/// Columns of a batch that lie one behind another are one operand's.
Problem merged(const Problem& problem) {
  Problem p = problem;
  if (p.batch > 1 && p.b.batch == p.n * p.b.col && p.c.batch == p.n * p.c.col &&
      (p.scale_b.data == nullptr || p.scale_b.stride == 0)) {
    p.n *= p.batch;
    p.batch = 1;
  }
  return p;
}

}  // namespace

void run_widened(const Problem& problem, Context& context) {
  switch (problem.dtype) {
    case DType::f64:
      return run_with<double, double>(problem, context);
    case DType::i8:
    case DType::u8:
      return run_with<std::int32_t, std::int32_t>(problem, context);
    default:
      return run_with<float, float>(problem, context);
  }
}

void run(const Problem& problem, Context& context) {
  const Problem p = merged(problem);
  switch (p.dtype) {
    case DType::bf16:
    case DType::f8_e4m3:
    case DType::f8_e5m2:
      return has_pairs() ? run_with<float, Bf16>(p, context) : run_widened(p, context);
    case DType::i8:
    case DType::u8:
      return has_pairs() ? run_with<std::int32_t, std::int16_t>(p, context) : run_widened(p, context);
    default:
      return run_widened(p, context);
  }
}

}  // namespace fretwork::two_four::cpu
