// 2:4 products on the CPU. A job is a block of lines of the sparse operand with a block of columns of the dense one; it
// keeps its sums, adds to them a piece of the depth at a time, and finishes them: scales, bias, activation, rounding.
// A sum is computed whole by one thread in a fixed order, so results do not depend on the number of threads.
#include <algorithm>
#include <cstddef>
#include <cstring>
#include <type_traits>

#include "core/divide.h"
#include "core/element.h"
#include "core/float8.h"
#include "ops/two_four/problem.h"
#include "runtime/simd/finish.h"
#include "runtime/simd/tiles.h"

namespace fretwork::two_four::cpu {
namespace {

/// Columns and depth of a piece of the dense operand, which stays in a first-level cache.
constexpr std::int64_t kCols = 64, kDepth = 128;
/// Lines of a job at most, and jobs per thread, if there are as many.
constexpr std::int64_t kLines = 512, kPieces = 4;
/// Columns come in multiples of this, a vector of the longest kind.
constexpr std::int64_t kLanes = 16;

struct Buffers {
  simd::Scratch panel, values, words, sums;
  static Buffers& of_thread() {
    thread_local Buffers buffers;
    return buffers;
  }
};

const std::byte* at(const void* data, std::int64_t bytes) { return static_cast<const std::byte*>(data) + bytes; }

/// out[n] = from[n·step], converted.
template <typename T>
void widen(const void* from, std::int64_t step, std::int64_t count, DType dtype, T* out) {
  const auto each = [&](const auto* data, const auto& wide) {
    for (std::int64_t n = 0; n < count; ++n) {
      out[n] = static_cast<T>(wide(data[n * step]));
    }
  };
  const auto same = [](auto x) { return x; };
  switch (dtype) {
    case DType::f64:
      return each(static_cast<const double*>(from), same);
    case DType::f32:
      return each(static_cast<const float*>(from), same);
    case DType::f16:
      return each(static_cast<const std::uint16_t*>(from), float_from_f16);
    case DType::bf16:
      return each(static_cast<const std::uint16_t*>(from), float_from_bf16);
    case DType::i8:
      return each(static_cast<const std::int8_t*>(from), same);
    default: {
      const auto& table = floats_from_8(dtype == DType::f8_e4m3);
      return each(static_cast<const std::uint8_t*>(from), [&](std::uint8_t bits) { return table[bits]; });
    }
  }
}

/// What one job works on.
struct Job {
  std::int64_t batch, line, lines, col, cols;
  std::int64_t width() const { return ceil_div(cols, kLanes) * kLanes; }
};

template <typename T>
class Work {
 public:
  Work(const Problem& problem, Context& context)
      : p_(problem),
        group_(problem.dtype == DType::f32 ? 2 : 4),
        size_(static_cast<std::int64_t>(size_of(problem.dtype))) {
    col_blocks_ = ceil_div(p_.n, kCols);
    const std::int64_t wanted =
        ceil_div(kPieces * std::max(context.executor->concurrency(), 1), p_.batch * col_blocks_);
    lines_ = std::clamp(ceil_div(p_.m, wanted), std::int64_t{1}, kLines);
    line_blocks_ = ceil_div(p_.m, lines_);
  }

  std::int64_t jobs() const { return p_.batch * col_blocks_ * line_blocks_; }
  void run(std::int64_t n) const {
    const std::int64_t line = n % line_blocks_ * lines_, col = n / line_blocks_ % col_blocks_ * kCols;
    const Job job{n / line_blocks_ / col_blocks_, line, std::min(lines_, p_.m - line), col,
                  std::min(kCols, p_.n - col)};
    const std::int64_t width = job.width();
    Buffers& buffers = Buffers::of_thread();
    T* const sums = reinterpret_cast<T*>(buffers.sums.need(sizeof(T) * static_cast<std::size_t>(job.lines * width)));
    std::fill_n(sums, job.lines * width, T{0});
    T* const panel = reinterpret_cast<T*>(buffers.panel.need(sizeof(T) * static_cast<std::size_t>(kDepth * width)));
    for (std::int64_t k = 0; k < p_.k; k += kDepth) {
      const std::int64_t depth = std::min(kDepth, p_.k - k);
      pack(job, k, depth, panel);
      for (std::int64_t i = 0; i < job.lines; ++i) {
        add(job.line + i, k, depth, panel, width, sums + i * width);
      }
    }
    finish(job, sums);
  }

 private:
  void pack(const Job& job, std::int64_t k, std::int64_t depth, T* panel) const {
    const std::int64_t width = job.width();
    for (std::int64_t r = 0; r < depth; ++r, panel += width) {
      widen(at(p_.b.data, (job.batch * p_.b.batch + (k + r) * p_.b.row + job.col * p_.b.col) * size_), p_.b.col,
            job.cols, p_.dtype, panel);
      std::fill(panel + job.cols, panel + width, T{0});
    }
  }

  /// The nibble of a group.
  unsigned nibble(std::int64_t line, std::int64_t g) const {
    const std::int64_t in_word = 2 * p_.word_bytes, word = line * p_.words.line + g / in_word * p_.words.along;
    const auto byte = static_cast<unsigned>(*at(p_.words.data, word * p_.word_bytes + g % in_word / 2));
    return byte >> 4 * (g % 2) & 15;
  }

  /// sums += what a line keeps of the depth · the rows of the panel that it is kept for.
  void add(std::int64_t line, std::int64_t k, std::int64_t depth, const T* panel, std::int64_t width, T* sums) const {
    T values[kDepth / 2];
    widen(at(p_.values.data, (line * p_.values.line + k / 2 * p_.values.along) * size_), p_.values.along, depth / 2,
          p_.dtype, values);
    const std::int64_t kept = group_ / 2;
    for (std::int64_t n = 0; n < depth / 2; ++n) {
      const std::int64_t g = k / group_ + n / kept;
      const unsigned index = nibble(line, g) >> 2 * (n % kept) & 3;
      // The two halves of a pair say the same: 0, 1 or 2, 3.
      const std::int64_t row = n / kept * group_ + (group_ == 2 ? index / 2 : index);
      for (std::int64_t j = 0; j < width; ++j) {
        sums[j] += values[n] * panel[row * width + j];
      }
    }
  }

  float scale(const Vector& of, std::int64_t n) const {
    return of.data != nullptr ? static_cast<const float*>(of.data)[n * of.stride] : 1.0f;
  }

  void finish(const Job& job, T* sums) const {
    if constexpr (std::is_same_v<T, std::int32_t>) {
      if (p_.out == DType::i32) {
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

  void store_integers(const Job& job, const std::int32_t* sums) const {
    auto* const to = static_cast<std::int32_t*>(p_.c.data) + job.batch * p_.c.batch;
    for (std::int64_t i = 0; i < job.lines; ++i) {
      for (std::int64_t j = 0; j < job.cols; ++j) {
        to[(job.line + i) * p_.c.row + (job.col + j) * p_.c.col] = sums[i * job.width() + j];
      }
    }
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
        bias[i] = biased ? read_element<F>(p_.bias.data, p_.out, (job.line + i) * p_.bias.stride) : F{0};
      }
      simd::finish({sums, width, job.lines, width, biased ? bias : nullptr, nullptr, p_.activation},
                   std::is_same_v<F, double> ? DType::f64 : DType::f32);
    }
    const std::int64_t first = job.batch * p_.c.batch + job.line * p_.c.row + job.col * p_.c.col;
    if (std::is_same_v<F, double> && p_.out == DType::f32) {
      for (std::int64_t i = 0; i < job.lines; ++i) {
        for (std::int64_t j = 0; j < job.cols; ++j) {
          write_element(p_.c.data, p_.out, first + i * p_.c.row + j * p_.c.col, sums[i * width + j]);
        }
      }
      return;
    }
    const simd::Place to{static_cast<std::byte*>(p_.c.data) + first * static_cast<std::int64_t>(size_of(p_.out)),
                         p_.c.row, p_.c.col};
    simd::widened_tiles(p_.out).store(sums, width, job.lines, job.cols, to, false);
  }

  const Problem& p_;
  std::int64_t group_, size_;
  std::int64_t col_blocks_, line_blocks_, lines_;
};

template <typename T>
void run_as(const Problem& problem, Context& context) {
  const Work<T> work(problem, context);
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

}  // namespace

void run(const Problem& problem, Context& context) {
  switch (problem.dtype) {
    case DType::f64:
      return run_as<double>(problem, context);
    case DType::i8:
      return run_as<std::int32_t>(problem, context);
    default:
      return run_as<float>(problem, context);
  }
}

}  // namespace fretwork::two_four::cpu
