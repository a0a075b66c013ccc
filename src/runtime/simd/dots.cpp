// Products with a few rows of x: a matrix streams by once, against some rows of x. Compiled once per instruction set.
//
// Where depth is contiguous, a lane adds up every so many k of one l, and lanes of the same l are added in the end.
// Where outputs are, lanes are outputs, and elements of x are repeated.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "runtime/simd/dots.cpp"
#include <hwy/foreach_target.h>
// After foreach_target.h.
#include <hwy/highway.h>

#include <algorithm>
#include <numeric>

#include "runtime/simd/dots.h"
#include "runtime/simd/elements-inl.h"

HWY_BEFORE_NAMESPACE();
namespace fretwork::simd::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

template <typename T>
using Tag = hn::ScalableTag<T>;
template <typename T>
constexpr auto kLanes = static_cast<std::int64_t>(hn::MaxLanes(Tag<T>()));

/// to[l] = the sum of all lanes[m] with m mod period = l, of 2ⁿ periods.
template <typename T>
HWY_INLINE void AddPeriods(T* lanes, std::int64_t count, std::int64_t period, T* to) {
  for (std::int64_t half = count / 2; half >= period; half /= 2) {
    for (std::int64_t m = 0; m < half; ++m) {
      lanes[m] += lanes[m + half];
    }
  }
  std::copy_n(lanes, period, to);
}

/// The vectors of some rows and batch rows from `from` on, `step` elements apart, in all terms. The last vector of a
/// term may be a part of one.
template <typename In, typename T, int kRows, int kBatch>
HWY_INLINE void AddVectors(const Dots& p, std::int64_t row, std::int64_t first, std::int64_t from, std::int64_t step,
                           hn::Vec<Tag<T>> (&sum)[kBatch][kRows]) {
  const Tag<T> d;
  const std::int64_t end = p.depth * p.period;
#pragma GCC unroll 4
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
    for (int n = 0; n < kBatch; ++n) {
      sum[n][i] = hn::Zero(d);
    }
  }
  for (const DotsTerm& term : p.terms) {
    const In* const w = static_cast<const In*>(term.matrix) + row * p.stride;
    const T* const x = static_cast<const T*>(p.x) + first * p.x_stride + term.at;
    const auto add = [&](const auto& load, std::int64_t at) HWY_ATTR {
      hn::Vec<Tag<T>> of_x[kBatch];
#pragma GCC unroll 4
      for (int n = 0; n < kBatch; ++n) {
        of_x[n] = load(x + n * p.x_stride + at);
      }
#pragma GCC unroll 4
      for (int i = 0; i < kRows; ++i) {
        const auto weights = load(w + i * p.stride + at);
#pragma GCC unroll 4
        for (int n = 0; n < kBatch; ++n) {
          sum[n][i] = hn::MulAdd(weights, of_x[n], sum[n][i]);
        }
      }
    };
    std::int64_t at = from;
    for (; at + kLanes<T> <= end; at += step) {
      add([&](const auto* data) HWY_ATTR { return LoadAs(d, data); }, at);
    }
    if (at < end) {
      add([&](const auto* data) HWY_ATTR { return LoadSome(d, data, end - at); }, at);
    }
  }
}

/// Periods of a vector or more: lanes are neighbouring l, and those behind the last l are not stored.
template <typename In, typename T, int kRows, int kBatch>
void LongPeriod(const Dots& p, std::int64_t row, std::int64_t first) {
  const Tag<T> d;
  for (std::int64_t l = 0; l < p.period; l += kLanes<T>) {
    hn::Vec<Tag<T>> sum[kBatch][kRows];
    AddVectors<In, T, kRows, kBatch>(p, row, first, l, p.period, sum);
    const auto there = hn::FirstN(d, static_cast<std::size_t>(std::min(p.period - l, kLanes<T>)));
    for (int i = 0; i < kRows; ++i) {
      for (int n = 0; n < kBatch; ++n) {
        T* const to = static_cast<T*>(p.sums) + (first + n) * p.sum_stride + (row + i) * p.period + l;
        hn::BlendedStore(sum[n][i], there, d, to);
      }
    }
  }
}

/// Rows of sums of vectors whose lanes of the same l, every kPeriod-th, are to be added.
template <int kPeriod, typename T, int kRows>
HWY_INLINE void StorePeriods(const hn::Vec<Tag<T>> (&sum)[kRows], T* to) {
  const Tag<T> d;
  constexpr std::int64_t kPart = std::min<std::int64_t>(kLanes<T>, 16 / sizeof(T));
  if constexpr (kRows == 4 && sizeof(T) == 4 && kPeriod == 1) {
    StoreFour(d, sum[0], sum[1], sum[2], sum[3], to);
#if HWY_TARGET != HWY_SCALAR
  } else if constexpr (kRows == 4 && sizeof(T) == 4 && kPeriod == 2) {
    const hn::Repartition<double, decltype(d)> pairs;
#pragma GCC unroll 2
    for (int i = 0; i < 4; i += 2) {
      const auto a = hn::BitCast(pairs, sum[i]), b = hn::BitCast(pairs, sum[i + 1]);
      const auto both =
          hn::Add(hn::BitCast(d, hn::InterleaveLower(pairs, a, b)), hn::BitCast(d, hn::InterleaveUpper(pairs, a, b)));
      hn::StoreU(FoldedTo<kPart>(d, both), hn::CappedTag<T, kPart>(), to + i * kPeriod);
    }
#endif
  } else {
    constexpr std::int64_t kFolded = std::max<std::int64_t>(kPart, kPeriod);
#pragma GCC unroll 4
    for (int i = 0; i < kRows; ++i) {
      HWY_ALIGN T lanes[kFolded];
      T* const folded = kFolded == kPeriod ? to + i * kPeriod : lanes;
      hn::StoreU(FoldedTo<kFolded>(d, sum[i]), hn::CappedTag<T, kFolded>(), folded);
      if constexpr (kFolded != kPeriod) {
        AddPeriods(lanes, kFolded, kPeriod, to + i * kPeriod);
      }
    }
  }
}

/// Periods that fill a vector: sums of one vector each, lanes of the same l added.
template <typename In, typename T, int kRows, int kBatch, int kPeriod = 1>
void WholePeriods(const Dots& p, std::int64_t row, std::int64_t first) {
  if constexpr (2 * kPeriod <= kLanes<T>) {
    if (p.period > kPeriod) {
      return WholePeriods<In, T, kRows, kBatch, 2 * kPeriod>(p, row, first);
    }
  }
  hn::Vec<Tag<T>> sum[kBatch][kRows];
  AddVectors<In, T, kRows, kBatch>(p, row, first, 0, kLanes<T>, sum);
#pragma GCC unroll 4
  for (int n = 0; n < kBatch; ++n) {
    StorePeriods<kPeriod, T, kRows>(sum[n], static_cast<T*>(p.sums) + (first + n) * p.sum_stride + row * kPeriod);
  }
}

/// Shorter ones that do not: l has the same places again after `repeat` elements, some vectors.
template <typename In, typename T, int kRows, int kBatch>
void ShortPeriod(const Dots& p, std::int64_t row, std::int64_t first) {
  const Tag<T> d;
  const std::int64_t repeat = std::lcm(p.period, kLanes<T>);
  HWY_ALIGN T lanes[kRows][kBatch][kLanes<T> * kLanes<T>];
  for (std::int64_t at = 0; at < repeat; at += kLanes<T>) {
    hn::Vec<Tag<T>> sum[kBatch][kRows];
    AddVectors<In, T, kRows, kBatch>(p, row, first, at, repeat, sum);
    for (int i = 0; i < kRows; ++i) {
      for (int n = 0; n < kBatch; ++n) {
        hn::Store(sum[n][i], d, lanes[i][n] + at);
      }
    }
  }
  for (int i = 0; i < kRows; ++i) {
    for (int n = 0; n < kBatch; ++n) {
      AddPeriods(lanes[i][n], repeat, p.period,
                 static_cast<T*>(p.sums) + (first + n) * p.sum_stride + (row + i) * p.period);
    }
  }
}

template <typename In, typename T, int kRows, int kBatch>
void Along(const Dots& p, std::int64_t row, std::int64_t first) {
  if (kLanes<T> % p.period == 0) {
    WholePeriods<In, T, kRows, kBatch>(p, row, first);
  } else if (p.period > kLanes<T>) {
    LongPeriod<In, T, kRows, kBatch>(p, row, first);
  } else if constexpr (kLanes<T> > 1) {
    ShortPeriod<In, T, kRows, kBatch>(p, row, first);
  }
}

template <typename In, typename T, int kBatch>
void Along(const Dots& p, std::int64_t first) {
  std::int64_t row = 0;
  for (; row + 4 <= p.rows; row += 4) {
    Along<In, T, 4, kBatch>(p, row, first);
  }
  for (; row < p.rows; ++row) {
    Along<In, T, 1, kBatch>(p, row, first);
  }
}

/// In the place of a number of elements: runs that do not fill a vector, and longer ones that do not end with one.
constexpr int kOddRun = -1, kLongRun = -2;

/// Which elements of a run that does not fill a vector the lanes of neighbouring vectors read, until they read the same
/// again.
template <typename T>
struct OddRuns {
  using Place = hwy::MakeSigned<T>;
  std::int64_t vectors = 1;
  HWY_ALIGN Place places[kLanes<T> * kLanes<T>];

  explicit OddRuns(std::int64_t period) {
    if (period < kLanes<T> && kLanes<T> % period != 0) {
      vectors = std::lcm(period, kLanes<T>) / kLanes<T>;
      for (std::int64_t n = 0; n < vectors * kLanes<T>; ++n) {
        places[n] = static_cast<Place>(n % period);
      }
    }
  }
};

/// A vector of a run that begins again behind its end.
template <class D, typename T>
HWY_INLINE hn::Vec<D> LoadAround(D d, const T* run, std::int64_t from, std::int64_t period) {
  constexpr auto kWhole = static_cast<std::int64_t>(hn::MaxLanes(D()));
  const std::int64_t left = period - from;
  if (left >= kWhole) {
    return hn::LoadU(d, run + from);
  }
#if HWY_TARGET <= HWY_AVX2
  const auto before = hn::FirstN(d, static_cast<std::size_t>(left));
  return hn::IfThenElse(before, hn::MaskedLoad(before, d, run + from), hn::MaskedLoad(hn::Not(before), d, run - left));
#else
  HWY_ALIGN T both[kWhole];
  std::copy_n(run + from, left, both);
  std::copy_n(run, kWhole - left, both + left);
  return hn::Load(d, both);
#endif
}

/// What a vector of outputs reads of a run of x: it repeats runs of kRun elements, or picks those of an `odd` one,
/// which `whole` holds; or it reads a part of a long run from `place` on, a whole vector if kRun is 0.
template <int kRun, typename T, class V, class Odd>
HWY_INLINE V OfRun(const T* run, std::int64_t place, std::int64_t period, V whole, Odd odd) {
  const Tag<T> d;
  if constexpr (kRun == kOddRun) {
    return hn::TableLookupLanes(whole, odd);
  } else if constexpr (kRun == kLongRun) {
    return LoadAround(d, run, place, period);
  } else {
    constexpr int kLength = kRun == 0 ? int{kLanes<T>} : kRun;
    return Repeat<kLength>(d, run + place);
  }
}

/// Outputs from `col` on, kVectors vectors of them.
template <typename In, typename T, int kVectors, int kBatch, int kRun>
void AcrossVectors(const Dots& p, const OddRuns<T>& runs, std::int64_t first, std::int64_t col) {
  const Tag<T> d;
  hn::Vec<Tag<T>> sum[kBatch][kVectors];
  std::int64_t there[kVectors], place[kVectors];
  decltype(hn::SetTableIndices(d, runs.places)) odd[kVectors];
  T* const sums = static_cast<T*>(p.sums) + first * p.sum_stride + col;
#pragma GCC unroll 4
  for (int v = 0; v < kVectors; ++v) {
    const std::int64_t at = col + v * kLanes<T>;
    there[v] = std::clamp<std::int64_t>(p.rows * p.period - at, 0, kLanes<T>);
    place[v] = kRun == 0 || kRun == kLongRun ? at % p.period : 0;
    if constexpr (kRun == kOddRun) {
      odd[v] = hn::SetTableIndices(d, runs.places + at / kLanes<T> % runs.vectors * kLanes<T>);
    }
#pragma GCC unroll 4
    for (int n = 0; n < kBatch; ++n) {
      const T* const from = sums + n * p.sum_stride + v * kLanes<T>;
      sum[n][v] = p.add ? LoadSome(d, from, there[v]) : hn::Zero(d);
    }
  }
  for (const DotsTerm& term : p.terms) {
    const In* w = static_cast<const In*>(term.matrix) + col;
    const T* of_x = static_cast<const T*>(p.x) + first * p.x_stride + term.at;
    const auto add = [&](const auto& load) HWY_ATTR {
      for (std::int64_t k = 0; k < p.depth; ++k, w += p.stride, of_x += p.period) {
        hn::Vec<Tag<T>> weights[kVectors];
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) {
          weights[v] = load(v);
        }
#pragma GCC unroll 4
        for (int n = 0; n < kBatch; ++n) {
          const T* const run = of_x + n * p.x_stride;
          const auto whole = kRun == kOddRun ? LoadSome(d, run, p.period) : hn::Zero(d);
#pragma GCC unroll 4
          for (int v = 0; v < kVectors; ++v) {
            sum[n][v] = hn::MulAdd(weights[v], OfRun<kRun>(run, place[v], p.period, whole, odd[v]), sum[n][v]);
          }
        }
      }
    };
    if (there[kVectors - 1] == kLanes<T>) {
      add([&](int v) HWY_ATTR { return LoadAs(d, w + v * kLanes<T>); });
    } else {
      add([&](int v) HWY_ATTR { return LoadSome(d, w + v * kLanes<T>, there[v]); });
    }
  }
  for (int n = 0; n < kBatch; ++n) {
    for (int v = 0; v < kVectors; ++v) {
      hn::BlendedStore(sum[n][v], hn::FirstN(d, static_cast<std::size_t>(there[v])), d,
                       sums + n * p.sum_stride + v * kLanes<T>);
    }
  }
}

template <typename In, typename T, int kBatch, int kRun>
void AcrossRuns(const Dots& p, const OddRuns<T>& runs, std::int64_t first) {
  const std::int64_t cols = p.rows * p.period;
  std::int64_t col = 0;
  for (; col + 3 * kLanes<T> < cols; col += 4 * kLanes<T>) {
    AcrossVectors<In, T, 4, kBatch, kRun>(p, runs, first, col);
  }
  for (; col < cols; col += kLanes<T>) {
    AcrossVectors<In, T, 1, kBatch, kRun>(p, runs, first, col);
  }
}

template <typename In, typename T, int kBatch, int kRun = 1>
void Across(const Dots& p, const OddRuns<T>& runs, std::int64_t first) {
  if constexpr (kRun >= kLanes<T> && kRun > 1) {
    if (p.period < kLanes<T>) {
      AcrossRuns<In, T, kBatch, kOddRun>(p, runs, first);
    } else if (p.period % kLanes<T> != 0) {
      AcrossRuns<In, T, kBatch, kLongRun>(p, runs, first);
    } else {
      AcrossRuns<In, T, kBatch, 0>(p, runs, first);
    }
  } else if (p.period == kRun) {
    AcrossRuns<In, T, kBatch, kRun>(p, runs, first);
  } else {
    Across<In, T, kBatch, 2 * kRun>(p, runs, first);
  }
}

template <typename In, typename T>
void DotsOf(const Dots& p) {
  const OddRuns<T> runs(p.across ? p.period : 1);
  const auto some = [&]<int kBatch>(std::integral_constant<int, kBatch>, std::int64_t first) {
    p.across ? Across<In, T, kBatch>(p, runs, first) : Along<In, T, kBatch>(p, first);
  };
  std::int64_t n = 0;
  for (; n + 4 <= p.batch; n += 4) {
    some(std::integral_constant<int, 4>(), n);
  }
  for (; n + 2 <= p.batch; n += 2) {
    some(std::integral_constant<int, 2>(), n);
  }
  if (n < p.batch) {
    some(std::integral_constant<int, 1>(), n);
  }
}

void DotsFor(const Dots& p, DType dtype) {
  switch (dtype) {
    case DType::f64:
      return DotsOf<double, double>(p);
    case DType::f32:
      return DotsOf<float, float>(p);
    case DType::f16:
      return DotsOf<F16, float>(p);
    default:
      return DotsOf<Bf16, float>(p);
  }
}

}  // namespace fretwork::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fretwork::simd {
HWY_EXPORT(DotsFor);

void dots(const Dots& what, DType dtype) { HWY_DYNAMIC_DISPATCH(DotsFor)(what, dtype); }

}  // namespace fretwork::simd
#endif
