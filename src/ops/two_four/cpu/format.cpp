// Makes and undoes the plain form on the CPU, in tiles of lines; scattered lines are gathered first.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <limits>
#include <vector>

#include "ops/two_four/cpu/codes.h"
#include "ops/two_four/cpu/groups.h"
#include "ops/two_four/problem.h"
#include "runtime/simd/turn.h"

namespace fretwork::two_four::cpu {
namespace {

/// Lines of a tile, and bytes of each; whole words of metadata either way.
constexpr std::int64_t kLines = 64, kBytes = kCodeBytes;

struct Tile {
  std::int64_t line, lines;  ///< first, count
  std::int64_t at, count;    ///< first position along the lines, count
};

/// Lines that are contiguous.
template <typename T>
struct Lines {
  T* data;
  std::int64_t pitch;
  T* operator[](std::int64_t line) const { return data + line * pitch; }
};

/// Tiles of a matrix as contiguous lines: in place where they are, else through memory of this object.
template <typename T>
class Window {
 public:
  explicit Window(const Matrix& m) : matrix_(m), pitch_(m.line) {
    if (m.along != 1) {
      pitch_ = (kBytes + 64) / static_cast<std::int64_t>(sizeof(T));  // no power of two: lines would share cache sets
      memory_.resize(static_cast<std::size_t>(kLines * pitch_));
    }
  }
  Lines<T> open(const Tile& t) { return {memory_.empty() ? data(t) : memory_.data(), pitch_}; }
  Lines<T> load(const Tile& t) {
    if (!memory_.empty() && matrix_.line == 1) {
      simd::turn(data(t), matrix_.along, t.count, t.lines, memory_.data(), pitch_);
    } else if (!memory_.empty()) {
      each(t, [](T& ours, const T& theirs) { ours = theirs; });
    }
    return open(t);
  }
  void store(const Tile& t) {
    if (!memory_.empty() && matrix_.line == 1) {
      simd::turn(memory_.data(), pitch_, t.lines, t.count, data(t), matrix_.along);
    } else if (!memory_.empty()) {
      each(t, [](const T& ours, T& theirs) { theirs = ours; });
    }
  }

 private:
  T* data(const Tile& t) const { return static_cast<T*>(matrix_.data) + t.line * matrix_.line + t.at * matrix_.along; }
  template <typename F>
  void each(const Tile& t, const F& copy) {
    for (std::int64_t l = 0; l < t.lines; ++l) {
      for (std::int64_t p = 0; p < t.count; ++p) {
        copy(memory_[static_cast<std::size_t>(l * pitch_ + p)], data(t)[l * matrix_.line + p * matrix_.along]);
      }
    }
  }
  Matrix matrix_;
  std::int64_t pitch_;
  std::vector<T> memory_;
};

/// The smallest place that was reported.
class First {
 public:
  void at(const Format& f, std::int64_t line, std::int64_t position) {
    const std::int64_t place = f.transposed ? position * f.lines + line : line * f.k + position;
    std::int64_t now = place_.load(std::memory_order_relaxed);
    while (place < now && !place_.compare_exchange_weak(now, place, std::memory_order_relaxed)) {
    }
  }
  std::int64_t place() const { return place_ == kNone ? -1 : place_.load(); }

 private:
  static constexpr std::int64_t kNone = std::numeric_limits<std::int64_t>::max();
  std::atomic<std::int64_t> place_{kNone};
};

template <typename F>
void with_elements(DType dtype, const F& f) {
  switch (size_of(dtype)) {
    case 1:
      return f(std::uint8_t{});
    case 2:
      return f(std::uint16_t{});
    case 4:
      return f(std::uint32_t{});
    default:
      return f(std::uint64_t{});
  }
}

/// make() gives a function of a tile, with memory for one thread.
template <typename Make>
void for_tiles(const Format& f, std::int64_t lines, std::int64_t width, Context& context, const Make& make) {
  const std::int64_t across = (f.k + width - 1) / width, tiles = (f.lines + lines - 1) / lines * across;
  context.executor->parallel_for(tiles, 1, [&](std::int64_t begin, std::int64_t end) {
    auto each = make();
    for (std::int64_t n = begin; n < end; ++n) {
      const std::int64_t line = n / across * lines, at = n % across * width;
      each(Tile{line, std::min(lines, f.lines - line), at, std::min(width, f.k - at)});
    }
  });
}

template <typename Make>
void for_tiles(const Format& f, Context& context, const Make& make) {
  for_tiles(f, kLines, kBytes / static_cast<std::int64_t>(size_of(f.dtype)), context, make);
}

template <typename T>
bool is_zero(T bits, DType dtype) {
  return (is_integer(dtype) ? bits : static_cast<T>(bits << 1)) == 0;
}

template <typename T>
bool is_bad(const T* dense, std::int64_t step, DType dtype) {
  const std::int64_t group = two_four::group(dtype);
  std::int64_t zeros = 0;
  for (std::int64_t n = 0; n < group; ++n) {
    zeros += is_zero(dense[n * step], dtype) ? 1 : 0;
  }
  return zeros < group / 2;
}

/// Names the first group of a run that has too many non-zeros.
template <typename T>
void find_bad(const Format& f, const T* dense, const Tile& t, std::int64_t line, First& first) {
  for (std::int64_t p = 0; p < t.count; p += f.group()) {
    if (is_bad(dense + p, 1, f.dtype)) {
      first.at(f, line, t.at + p);
      return;
    }
  }
}

/// Neighbouring lines are neighbours in memory, as in a row-major matrix compressed along its columns.
bool lies_across(const Matrix& m) { return m.line == 1 && m.along != 1; }

/// Work on the same group of many lines at once, without bringing lines together: tiles that are long across them.
template <typename F>
void for_tiles_across(const Format& f, Context& context, const F& each) {
  for_tiles(f, 4096, 64, context, [&] { return each; });
}

Tile halved(const Tile& t) { return {t.line, t.lines, t.at / 2, t.count / 2}; }

/// Compresses lines that hold tile `t` of f. Reports a group with too many to `first`, unless that is null.
template <typename T>
void compress_tile(const Format& f, const Lines<T>& from, const Tile& t, Window<T>& values, Codes& codes,
                   First* first) {
  const GroupKernels<T>& kernels = group_kernels<T>(f.dtype);
  const auto to = values.open(halved(t));
  const std::int64_t groups = t.count / f.group();
  for (std::int64_t l = 0; l < t.lines; ++l) {
    if (kernels.compress(from[l], groups, to[l], codes.data()) && first != nullptr) {
      find_bad(f, from[l], t, t.line + l, *first);
    }
    codes.write(t.line + l, t.at / f.group(), groups);
  }
  values.store(halved(t));
}

/// Calls each(tile, dense, values, codes) for every tile, with windows on all three.
template <typename F>
void for_tiles_of_all(const Format& f, Context& context, const F& each) {
  with_elements(f.dtype, [&](auto zero) {
    using T = decltype(zero);
    for_tiles(f, context, [&] {
      return [&, dense = Window<T>(f.dense), values = Window<T>(f.values), codes = Codes(f)](const Tile& t) mutable {
        each(t, dense, values, codes);
      };
    });
  });
}

}  // namespace

void compress(const Format& f, std::int64_t* bad, Context& context) {
  First first;
  for_tiles_of_all(f, context, [&](const Tile& t, auto& dense, auto& values, Codes& codes) {
    compress_tile(f, dense.load(t), t, values, codes, bad != nullptr ? &first : nullptr);
  });
  if (bad != nullptr) {
    *bad = first.place();
  }
}

namespace {

template <typename T>
void check_across(const Format& f, const Tile& t, First& first) {
  for (std::int64_t p = t.at; p < t.at + t.count; p += f.group()) {
    const T* const row = static_cast<const T*>(f.dense.data) + p * f.dense.along + t.line;
    if (group_kernels<T>(f.dtype).look_across(row, f.dense.along, t.lines)) {
      for (std::int64_t l = 0; l < t.lines; ++l) {
        if (is_bad(row + l, f.dense.along, f.dtype)) {
          first.at(f, t.line + l, p);
        }
      }
    }
  }
}

}  // namespace

void check(const Format& f, std::int64_t* bad, Context& context) {
  First first;
  with_elements(f.dtype, [&](auto zero) {
    using T = decltype(zero);
    if (lies_across(f.dense)) {
      return for_tiles_across(f, context, [&](const Tile& t) { check_across<T>(f, t, first); });
    }
    const GroupKernels<T>& kernels = group_kernels<T>(f.dtype);
    for_tiles(f, context, [&] {
      return [&, dense = Window<T>(f.dense)](const Tile& t) mutable {
        const auto from = dense.load(t);
        for (std::int64_t l = 0; l < t.lines; ++l) {
          if (kernels.look(from[l], 0, t.count / f.group())) {
            find_bad(f, from[l], t, t.line + l, first);
          }
        }
      };
    });
  });
  *bad = first.place();
}

namespace {

/// Looks at a tile's codes, of which bit n of `valid` says whether n is one, and writes canonical ones unless `to` is
/// null.
template <typename T>
void check_codes(const Format& f, const Tile& t, unsigned valid, bool keep_valid, Window<T>& values, Codes& from,
                 Codes* to, First& first) {
  const std::int64_t groups = t.count / f.group(), kept = f.group() / 2;
  const auto lines = values.load(halved(t));
  for (std::int64_t l = 0; l < t.lines; ++l) {
    const std::uint8_t* const all = from.read(t.line + l, t.at / f.group(), groups);
    for (std::int64_t g = 0; g < groups; ++g) {
      const bool right = (valid >> all[g] & 1) != 0;
      const T* const pair = lines[l] + g * kept;
      const bool empty = (to != nullptr || !right) && is_zero(pair[0], f.dtype) && is_zero(pair[kept - 1], f.dtype);
      if (!right && !empty) {
        first.at(f, t.line + l, t.at + g * f.group());
      }
      if (to != nullptr) {
        to->data()[g] = empty && !(keep_valid && right) ? std::uint8_t{4} : all[g];
      }
    }
    if (to != nullptr) {
      to->write(t.line + l, t.at / f.group(), groups);
    }
  }
}

}  // namespace

void check_metadata(const Format& f, const Matrix& to, bool keep_valid, std::int64_t* bad, Context& context) {
  const unsigned valid = valid_nibbles(f.group());
  Format written = f;
  written.words = to;
  First first;
  with_elements(f.dtype, [&](auto zero) {
    using T = decltype(zero);
    for_tiles(f, context, [&] {
      return [&, values = Window<T>(f.values), from = Codes(f), codes = Codes(written)](const Tile& t) mutable {
        check_codes(f, t, valid, keep_valid, values, from, to.data != nullptr ? &codes : nullptr, first);
      };
    });
  });
  if (bad != nullptr) {
    *bad = first.place();
  }
}

void to_dense(const Format& f, Context& context) {
  for_tiles_of_all(f, context, [&](const Tile& t, auto& dense, auto& values, Codes& codes) {
    const auto from = values.load(halved(t)), to = dense.open(t);
    const std::int64_t groups = t.count / f.group();
    for (std::int64_t l = 0; l < t.lines; ++l) {
      codes.place(from[l], t.line + l, t.at / f.group(), groups, to[l]);
    }
    dense.store(t);
  });
}

void gather(const Format& f, Context& context) {
  for_tiles_of_all(f, context, [&](const Tile& t, auto& dense, auto& values, Codes& codes) {
    const auto from = dense.load(t), to = values.open(halved(t));
    const std::int64_t groups = t.count / f.group();
    for (std::int64_t l = 0; l < t.lines; ++l) {
      codes.pick(from[l], t.line + l, t.at / f.group(), groups, to[l]);
    }
    values.store(halved(t));
  });
}

namespace {

template <typename T>
void prune_across(const Format& f, const Matrix& out, const Tile& t) {
  const GroupKernels<T>& kernels = group_kernels<T>(f.dtype);
  for (std::int64_t p = t.at; p < t.at + t.count; p += f.group()) {
    kernels.prune_across(static_cast<const T*>(f.dense.data) + p * f.dense.along + t.line, f.dense.along, t.lines,
                         static_cast<T*>(out.data) + p * out.along + t.line, out.along);
  }
}

}  // namespace

void prune(const Format& f, const Matrix& out, bool transposable, Context& context) {
  with_elements(f.dtype, [&](auto zero) {
    using T = decltype(zero);
    const GroupKernels<T>& kernels = group_kernels<T>(f.dtype);
    if (!transposable && lies_across(f.dense) && lies_across(out)) {
      return for_tiles_across(f, context, [&](const Tile& t) { prune_across<T>(f, out, t); });
    }
    for_tiles(f, context, [&] {
      return [&, dense = Window<T>(f.dense), kept = Window<T>(out)](const Tile& t) mutable {
        const auto from = dense.load(t), to = kept.open(t);
        const std::int64_t groups = t.count / f.group();
        for (std::int64_t l = 0; l < t.lines; l += transposable ? f.group() : 1) {
          if (transposable) {
            kernels.squares(from[l], from.pitch, groups, to[l], to.pitch);
          } else {
            kernels.prune(from[l], 0, groups, to[l], 0);
          }
        }
        kept.store(t);
      };
    });
  });
}

void prune_both(const Format& rows, const Format& cols, Context& context) {
  with_elements(rows.dtype, [&](auto zero) {
    using T = decltype(zero);
    const GroupKernels<T>& kernels = group_kernels<T>(rows.dtype);
    // Square tiles, so that both ways have runs to fill vectors with.
    constexpr std::int64_t kSide = std::min<std::int64_t>(256, 512 / sizeof(T)), kPitch = kSide + 64 / sizeof(T);
    for_tiles(rows, kSide, kSide, context, [&] {
      return [&, dense = Window<T>(rows.dense), row_values = Window<T>(rows.values),
              col_values = Window<T>(cols.values), row_codes = Codes(rows), col_codes = Codes(cols),
              kept = std::vector<T>(kSide * kPitch), turned = std::vector<T>(kSide * kPitch)](const Tile& t) mutable {
        const Lines<T> pruned{kept.data(), kPitch};
        for (std::int64_t n = 0; n < t.lines; n += kLines) {  // a window holds so many lines
          const Tile part{t.line + n, std::min(kLines, t.lines - n), t.at, t.count};
          const auto from = dense.load(part);
          for (std::int64_t l = 0; l < part.lines; l += rows.group()) {
            kernels.squares(from[l], from.pitch, t.count / rows.group(), pruned[n + l], kPitch);
          }
          compress_tile(rows, Lines<T>{pruned[n], kPitch}, part, row_values, row_codes, nullptr);
        }
        simd::turn(kept.data(), kPitch, t.lines, t.count, turned.data(), kPitch);
        for (std::int64_t n = 0; n < t.count; n += kLines) {
          const Tile part{t.at + n, std::min(kLines, t.count - n), t.line, t.lines};
          compress_tile(cols, Lines<T>{turned.data() + n * kPitch, kPitch}, part, col_values, col_codes, nullptr);
        }
      };
    });
  });
}

}  // namespace fretwork::two_four::cpu
