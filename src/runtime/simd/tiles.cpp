// The tile multiplier on Highway: compiled once per instruction set, chosen at run time.
#include "runtime/simd/tiles.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <type_traits>
#include <utility>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "runtime/simd/tiles.cpp"
#include <hwy/foreach_target.h>
// After foreach_target.h.
#include <hwy/cache_control.h>
#include <hwy/highway.h>

#include "runtime/simd/elements-inl.h"

HWY_BEFORE_NAMESPACE();
namespace fretwork::simd::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

#if HWY_TARGET == HWY_AVX3 || HWY_ARCH_ARM_A64
constexpr int kRows = 8;  // 8 × 3 sums fill 24 of 32 registers
#else
constexpr int kRows = 4;  // 4 × 3 sums fill 12 of 16
#endif
/// Elements in 128 bits: the side of the squares that are transposed in registers.
template <typename T>
constexpr std::int64_t kSquare = HWY_TARGET == HWY_SCALAR ? 1 : 16 / sizeof(T);
/// Depth packed at a time, so that what is written scattered stays in the first-level cache.
constexpr std::int64_t kPackDepth = 64;

template <typename T, typename In>
T Widen(In value) {
  if constexpr (std::is_same_v<T, In>) {
    return value;
  } else {
    return value.wide();
  }
}

template <typename Out, typename T>
Out Narrow(T value) {
  if constexpr (std::is_same_v<T, Out>) {
    return value;
  } else {
    return Out::round(value);
  }
}

/// Reads a square whose lines lie `from_stride` apart and writes its transpose, lines `to_stride` apart.
template <typename T, typename In, typename Out>
HWY_INLINE void Transpose(const In* from, std::int64_t from_stride, Out* to, std::int64_t to_stride) {
  const hn::CappedTag<T, static_cast<std::size_t>(kSquare<T>)> d;
#if HWY_TARGET == HWY_SCALAR
  (void)from_stride, (void)to_stride;
  StoreAs(d, LoadAs(d, from), to);
#else
  const auto a = LoadAs(d, from), b = LoadAs(d, from + from_stride);
  if constexpr (kSquare<T> == 2) {
    StoreAs(d, hn::InterleaveLower(d, a, b), to);
    StoreAs(d, hn::InterleaveUpper(d, a, b), to + to_stride);
  } else {
    const auto c = LoadAs(d, from + 2 * from_stride), e = LoadAs(d, from + 3 * from_stride);
    const auto ab_low = hn::InterleaveLower(d, a, b), ab_high = hn::InterleaveUpper(d, a, b);
    const auto ce_low = hn::InterleaveLower(d, c, e), ce_high = hn::InterleaveUpper(d, c, e);
    StoreAs(d, hn::ConcatLowerLower(d, ce_low, ab_low), to);
    StoreAs(d, hn::ConcatUpperUpper(d, ce_low, ab_low), to + to_stride);
    StoreAs(d, hn::ConcatLowerLower(d, ce_high, ab_high), to + 2 * to_stride);
    StoreAs(d, hn::ConcatUpperUpper(d, ce_high, ab_high), to + 3 * to_stride);
  }
#endif
}

/// out[0, count) = from[0, count), converted.
template <typename T, typename In, typename Out>
HWY_INLINE void Copy(const In* from, std::int64_t count, Out* out) {
  const hn::ScalableTag<T> d;
  const hn::CappedTag<T, static_cast<std::size_t>(kSquare<T>)> small;
  constexpr auto kLanes = static_cast<std::int64_t>(hn::MaxLanes(d));
  std::int64_t n = 0;
  for (; n + kLanes <= count; n += kLanes) {
    StoreAs(d, LoadAs(d, from + n), out + n);
  }
  if constexpr (kLanes / 2 > kSquare<T>) {  // as rows of a strip are
    const hn::Half<decltype(d)> half;
    if (n + kLanes / 2 <= count) {
      StoreAs(half, LoadAs(half, from + n), out + n);
      n += kLanes / 2;
    }
  }
  for (; n + kSquare<T> <= count; n += kSquare<T>) {
    StoreAs(small, LoadAs(small, from + n), out + n);
  }
  for (; n < count; ++n) {
    out[n] = Narrow<Out>(Widen<T>(from[n]));
  }
}

/// out(r, c) = from(r, c), converted, whichever way the two lie. `out` or `from` is contiguous in c.
template <typename T, typename In, typename Out>
void Convert(const In* from, std::int64_t from_row, std::int64_t from_col, std::int64_t rows, std::int64_t cols,
             Out* out, std::int64_t out_row, std::int64_t out_col) {
  if (from_col == 1 && out_col == 1) {
    for (std::int64_t r = 0; r < rows; ++r) {
      Copy<T>(from + r * from_row, cols, out + r * out_row);
    }
    return;
  }
  constexpr std::int64_t kSide = kSquare<T>;
  // Contiguous along rows on one side and along columns on the other: squares go through registers.
  const bool turn_in = from_row == 1 && out_col == 1, turn_out = from_col == 1 && out_row == 1;
  const std::int64_t square_rows = turn_in || turn_out ? rows - rows % kSide : 0;
  const std::int64_t square_cols = turn_in || turn_out ? cols - cols % kSide : 0;
  for (std::int64_t c = 0; c < square_cols; c += kSide) {
    for (std::int64_t r = 0; r < square_rows; r += kSide) {
      if (turn_in && r * static_cast<std::int64_t>(sizeof(In)) % 64 == 0) {
        for (std::int64_t n = 2 * kSide; n < 3 * kSide; ++n) {
          hwy::Prefetch(from + r * from_row + (c + n) * from_col);
        }
      }
      Transpose<T>(from + r * from_row + c * from_col, turn_in ? from_col : from_row, out + r * out_row + c * out_col,
                   turn_in ? out_row : out_col);
    }
  }
  for (std::int64_t r = 0; r < rows; ++r) {
    for (std::int64_t c = r < square_rows ? square_cols : 0; c < cols; ++c) {
      out[r * out_row + c * out_col] = Narrow<Out>(Widen<T>(from[r * from_row + c * from_col]));
    }
  }
}

template <typename In, typename T>
void PackRows(const Place& from, std::int64_t depth, std::int64_t cols, std::int64_t width, T* out,
              std::int64_t apart) {
  for (std::int64_t k = 0; k < depth; ++k, out += width) {
    const In* const row = static_cast<const In*>(from.data) + k * from.row_stride;
    T* panel = out;
    for (std::int64_t j = 0; j < cols; j += width, panel += apart) {
      const std::int64_t count = std::min(width, cols - j);
      for (std::int64_t n = 0; n < count; n += 64 / static_cast<std::int64_t>(sizeof(In))) {
        hwy::Prefetch(row + kRowsAhead * from.row_stride + j + n);
      }
      Copy<T>(row + j, count, panel);
      std::fill(panel + count, panel + width, T{0});
    }
  }
}

template <typename In, typename T>
void Pack(const Place& from, std::int64_t depth, std::int64_t cols, std::int64_t width, void* out, std::int64_t apart) {
  const std::int64_t elements_apart = apart / static_cast<std::int64_t>(sizeof(T));
  T* panel = static_cast<T*>(out);
  if (from.col_stride == 1) {
    PackRows<In>(from, depth, cols, width, panel, elements_apart);
    return;
  }
  for (std::int64_t j = 0; j < cols; j += width, panel += elements_apart) {
    const std::int64_t panel_cols = std::min(width, cols - j);
    for (std::int64_t k = 0; k < depth; k += kPackDepth) {
      const std::int64_t count = std::min(kPackDepth, depth - k);
      T* const to = panel + k * width;
      Convert<T>(static_cast<const In*>(from.data) + k * from.row_stride + j * from.col_stride, from.row_stride,
                 from.col_stride, count, panel_cols, to, width, 1);
      for (std::int64_t r = 0; panel_cols < width && r < count; ++r) {
        std::fill(to + r * width + panel_cols, to + (r + 1) * width, T{0});
      }
    }
  }
}

/// Copy() past the caches: whole vectors between aligned ends.
template <typename T, typename Out>
void Stream(const T* from, std::int64_t count, Out* out) {
  const hn::ScalableTag<T> d;
  constexpr auto kLanes = static_cast<std::int64_t>(hn::MaxLanes(d));
  constexpr std::uintptr_t kLine = 64;
  const auto ahead = static_cast<std::int64_t>((-reinterpret_cast<std::uintptr_t>(out) % kLine) / sizeof(Out));
  const std::int64_t head = std::min(ahead, count);
  Copy<T>(from, head, out);
  std::int64_t n = head;
  for (; n + kLanes <= count; n += kLanes) {
    StoreAs<true>(d, hn::LoadU(d, from + n), out + n);
  }
  Copy<T>(from + n, count - n, out + n);
}

/// Rows of a result that are turned at a time when it is contiguous along them.
constexpr std::int64_t kTurnedRows = 128;

template <typename Out, typename T>
void Store(const void* sums, std::int64_t sum_stride, std::int64_t rows, std::int64_t cols, const Place& to,
           bool stream) {
  if (stream && to.col_stride == 1) {
    for (std::int64_t r = 0; r < rows; ++r) {
      Stream(static_cast<const T*>(sums) + r * sum_stride, cols, static_cast<Out*>(to.data) + r * to.row_stride);
    }
    return;
  }
  if (stream && to.row_stride == 1 && rows <= kTurnedRows) {
    HWY_ALIGN T turned[kSquare<T> * kTurnedRows];
    for (std::int64_t c = 0; c < cols; c += kSquare<T>) {
      const std::int64_t count = std::min(kSquare<T>, cols - c);
      Convert<T>(static_cast<const T*>(sums) + c, sum_stride, 1, rows, count, turned, 1, kTurnedRows);
      for (std::int64_t n = 0; n < count; ++n) {
        Stream(turned + n * kTurnedRows, rows, static_cast<Out*>(to.data) + (c + n) * to.col_stride);
      }
    }
    return;
  }
  Convert<T>(static_cast<const T*>(sums), sum_stride, 1, rows, cols, static_cast<Out*>(to.data), to.row_stride,
             to.col_stride);
}

/// Holds a run in a register: GCC would load it again for each product, more than a CPU can.
template <int kRun, class V>
HWY_INLINE void KeepLoaded(V& v) {
#if HWY_ARCH_X86 && HWY_TARGET != HWY_SCALAR
  if constexpr (kRun > 1) {
    asm("" : "+v"(v.raw));
  }
#else
  (void)v;
#endif
}

/// The sums that a product starts from. These loops and those of WriteSums are unrolled early, or GCC would pass the
/// sums through memory.
template <class D, class V, int kVectors>
HWY_INLINE void LoadSums(D d, const Product& p, V (&sum)[kRows][kVectors]) {
  const auto* const sums = static_cast<const hn::TFromD<D>*>(p.sums);
  constexpr auto kLanes = static_cast<std::int64_t>(hn::MaxLanes(D()));
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      sum[i][v] = p.add ? hn::LoadU(d, sums + i * p.sum_stride + v * kLanes) : hn::Zero(d);
    }
  }
}

template <bool kStream, typename Out, class D, class V, int kVectors>
HWY_INLINE void RoundSums(D d, const V (&sum)[kRows][kVectors], const Product& p, std::int64_t apart) {
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      StoreAs<kStream>(d, sum[i][v], static_cast<Out*>(p.out) + i * p.out_stride + v * apart);
    }
  }
}

/// To p.sums as they are, or to p.out, rounded.
template <typename Out, class D, class V, int kVectors>
HWY_INLINE void WriteSums(D d, const V (&sum)[kRows][kVectors], const Product& p) {
  constexpr auto kLanes = static_cast<std::int64_t>(hn::MaxLanes(D()));
  const std::int64_t apart = p.vector_stride != 0 ? p.vector_stride : kLanes;
  if (p.out == nullptr) {
    auto* const sums = static_cast<hn::TFromD<D>*>(p.sums);
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) {
        hn::StoreU(sum[i][v], d, sums + i * p.sum_stride + v * kLanes);
      }
    }
  } else if (p.stream) {
    RoundSums<true, Out>(d, sum, p, apart);
  } else {
    RoundSums<false, Out>(d, sum, p, apart);
  }
}

/// What a product packs on its way.
enum class Packs { nothing, left, right };

/// The inner loop of every product of tiles: kRows × kVectors vectors of sums, to which each term (for dsd a block of
/// the sparse side) adds its rows times the packed panel of the dense side from the term's depth on (see Product).
template <typename Out, typename T, int kVectors, int kRun, Packs kPacks>
void MultiplyAs(const Product& p) {
  const hn::ScalableTag<T> d;
  using V = hn::Vec<decltype(d)>;
  constexpr auto kLanes = static_cast<std::int64_t>(hn::MaxLanes(d));
  constexpr std::int64_t kWidth = kVectors * kLanes;
  V sum[kRows][kVectors];
  LoadSums(d, p, sum);
  const std::int64_t row = p.row_stride, step = p.step_stride;
  for (const Term* term = p.terms; term != p.terms + p.count; ++term) {
    const T* left = static_cast<const T*>(term->left) + p.shift;
    const T* right = static_cast<const T*>(p.right) + term->depth * kWidth;
    // Blocks lie apart: fetch the beginning of the next one's rows at once, and its part of the panel step by step.
    const Term& next = term[term + 1 != p.terms + p.count ? 1 : 0];
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i) {
      hwy::Prefetch(static_cast<const T*>(next.left) + p.shift + i * row);
    }
    const bool told = p.soon != nullptr;
    const auto* soon = static_cast<const std::byte*>(
        told ? p.soon : static_cast<const void*>(right + (next.depth - term->depth) * kWidth));
    const std::int64_t soon_stride = told ? p.soon_stride : kWidth * std::int64_t{sizeof(T)};
    const std::int64_t soon_apart = told ? p.soon_apart : kLanes * std::int64_t{sizeof(T)};
    [[maybe_unused]] const T* raw = static_cast<const T*>(p.raw);
    [[maybe_unused]] T* copy = static_cast<T*>(p.copy);
    for (const T* const end = right + p.steps * kWidth; right != end; right += kWidth, left += step) {
      V b[kVectors];
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) {
        if constexpr (kPacks == Packs::right) {
          b[v] = hn::LoadU(d, raw + v * kLanes);
          hn::StoreU(b[v], d, const_cast<T*>(right) + v * kLanes);
        } else {
          b[v] = hn::LoadU(d, right + v * kLanes);
        }
        __builtin_prefetch(soon + v * soon_apart, 0, 2);
      }
      soon += soon_stride;
      if constexpr (kPacks == Packs::right) {
        raw += p.raw_stride;
      }
#pragma GCC unroll 8
      for (int i = 0; i < kRows; ++i) {
        V a = Repeat<kRun>(d, left + i * row);
        KeepLoaded<kRun>(a);
        if constexpr (kPacks == Packs::left) {
          hn::StoreU(a, d, copy + i * p.steps * kLanes);
        }
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) {
          sum[i][v] = hn::MulAdd(a, b[v], sum[i][v]);
        }
      }
      if constexpr (kPacks == Packs::left) {
        copy += kLanes;
      }
    }
  }
  WriteSums<Out>(d, sum, p);
}

/// Hides where a pointer comes from.
template <typename T>
HWY_INLINE void Forget(T*& pointer) {
#if HWY_ARCH_X86 || HWY_ARCH_ARM_A64
  asm("" : "+r"(pointer));
#endif
}

template <class D, int kVectors>
void MultiplyInPlace(const Product& p) {
  const D d;
  using T = hn::TFromD<D>;
  using V = hn::Vec<D>;
  constexpr auto kLanes = static_cast<std::int64_t>(hn::MaxLanes(d));
  constexpr std::int64_t kLine = 64;
  T* const sums = static_cast<T*>(p.sums);
  V sum[kRows][kVectors];
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      sum[i][v] = p.add ? hn::LoadU(d, sums + i * p.sum_stride + v * kLanes) : hn::Zero(d);
    }
  }
  const std::int64_t row = p.row_stride, step = p.step_stride, down = p.right_stride;
  const std::int64_t aside = p.right_apart != 0 ? p.right_apart : kLanes;
  const T* left = static_cast<const T*>(p.terms->left) + p.shift;
  const T* right = static_cast<const T*>(p.right) + p.terms->depth * down;
  // The lower rows have a pointer of their own: GCC would hold the distances of all, more than there are registers.
  const T* lower = left + kRows / 2 * row;
  Forget(lower);
  const auto* soon = static_cast<const std::byte*>(p.soon != nullptr ? p.soon : p.right);
  const std::int64_t soon_stride = p.soon != nullptr ? p.soon_stride : 0;
  for (const T* const end = right + p.steps * down; right != end; right += down, left += step, lower += step) {
    V b[kVectors];
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      b[v] = hn::LoadU(d, right + v * aside);
      __builtin_prefetch(soon + v * kLine, 0, 2);
    }
    soon += soon_stride;
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i) {
      const V a = hn::Set(d, i < kRows / 2 ? left[i * row] : lower[(i - kRows / 2) * row]);
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) {
        sum[i][v] = hn::MulAdd(a, b[v], sum[i][v]);
      }
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      hn::StoreU(sum[i][v], d, sums + i * p.sum_stride + v * kLanes);
    }
  }
}

template <typename Out, typename T, int kVectors, int kRun = 1>
void Multiply(const Product& p) {
  if constexpr (std::is_same_v<Out, T> && kRun == hn::MaxLanes(hn::ScalableTag<T>())) {
    if (p.copy != nullptr) {
      return MultiplyAs<Out, T, kVectors, kRun, Packs::left>(p);
    }
  }
  if constexpr (std::is_same_v<Out, T> && kRun == 1) {
    if (p.raw != nullptr) {
      return MultiplyAs<Out, T, kVectors, kRun, Packs::right>(p);
    }
  }
  MultiplyAs<Out, T, kVectors, kRun, Packs::nothing>(p);
}

using Multiplier = void (*)(const Product&);

template <typename In, typename T, int kVectors, int kRun>
constexpr Multiplier WithRuns() {
  if constexpr (kRun <= hn::MaxLanes(hn::ScalableTag<T>())) {
    return &Multiply<In, T, kVectors, kRun>;
  } else {
    return nullptr;
  }
}

template <typename T>
constexpr Multiplier HalfInPlace() {
  if constexpr (HWY_TARGET == HWY_AVX3) {
    return &MultiplyInPlace<hn::Half<hn::ScalableTag<T>>, 1>;
  } else {
    return nullptr;
  }
}

template <typename In, typename T>
constexpr Tiles Table() {
  using D = hn::ScalableTag<T>;
  Tiles table{kRows,
              static_cast<std::int64_t>(hn::MaxLanes(D())),
              kRows == 8 && sizeof(In) == 2 ? 2 : kMaxVectors,
              1,
              sizeof(T),
              sizeof(T),
              !std::is_same_v<In, T>,
              false,
              &Pack<In, T>,
              {&Multiply<In, T, 1>, &Multiply<In, T, 2>, &Multiply<In, T, 3>},
              {&MultiplyInPlace<D, 1>, &MultiplyInPlace<D, 2>, &MultiplyInPlace<D, 3>},
              HalfInPlace<T>(),
              {},
              &Store<In, T>};
  const auto fill = [&]<int... kLog>(std::integer_sequence<int, kLog...>) {
    ((table.multiply_runs[kLog][0] = WithRuns<In, T, 1, 1 << kLog>(),
      table.multiply_runs[kLog][1] = WithRuns<In, T, 2, 1 << kLog>(),
      table.multiply_runs[kLog][2] = WithRuns<In, T, 3, 1 << kLog>()),
     ...);
  };
  fill(std::make_integer_sequence<int, kRuns>());
  return table;
}

const Tiles* For(DType dtype) {
  static constexpr Tiles f64 = Table<double, double>(), f32 = Table<float, float>(), f16 = Table<F16, float>(),
                         bf16 = Table<Bf16, float>();
  return dtype == DType::f64 ? &f64 : dtype == DType::f32 ? &f32 : dtype == DType::f16 ? &f16 : &bf16;
}

}  // namespace fretwork::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fretwork::simd {
HWY_EXPORT(For);

void finish_streams() { hwy::FlushStream(); }

const Tiles& tiles(DType dtype) {
  if (dtype == DType::bf16) {
    if (const Tiles* paired = paired_bf16_tiles()) {
      return *paired;
    }
  }
  return widened_tiles(dtype);
}

const Tiles& widened_tiles(DType dtype) { return *HWY_DYNAMIC_DISPATCH(For)(dtype); }

}  // namespace fretwork::simd
#endif
