// Vector code of the CPU beside tiles: sums for the bias gradient, and the products of a few batch rows. Compiled once
// per instruction set.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/kronecker/cpu/vectors.cpp"
#include <hwy/foreach_target.h>
// After foreach_target.h.
#include <hwy/highway.h>

#include <algorithm>

#include "ops/kronecker/cpu/run.h"

HWY_BEFORE_NAMESPACE();
namespace fretwork::kronecker::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

template <typename T>
void AddUp(const T* from, std::int64_t rows, std::int64_t cols, bool along, T* to) {
  const hn::ScalableTag<T> d;
  constexpr auto kLanes = static_cast<std::int64_t>(hn::MaxLanes(d));
  const std::int64_t whole = cols - cols % kLanes;
  if (along) {
    for (std::int64_t i = 0; i < rows; ++i, from += cols) {
      auto sum = hn::Zero(d);
      for (std::int64_t j = 0; j < whole; j += kLanes) {
        sum = hn::Add(sum, hn::LoadU(d, from + j));
      }
      T rest = hn::GetLane(hn::SumOfLanes(d, sum));
      for (std::int64_t j = whole; j < cols; ++j) {
        rest += from[j];
      }
      to[i] += rest;
    }
    return;
  }
  for (std::int64_t j = 0; j < whole; j += kLanes) {
    auto sum = hn::Zero(d);  // not what is there already: small terms would be lost in a large sum
    for (std::int64_t i = 0; i < rows; ++i) {
      sum = hn::Add(sum, hn::LoadU(d, from + i * cols + j));
    }
    hn::StoreU(hn::Add(hn::LoadU(d, to + j), sum), d, to + j);
  }
  for (std::int64_t j = whole; j < cols; ++j) {
    T sum = 0;
    for (std::int64_t i = 0; i < rows; ++i) {
      sum += from[i * cols + j];
    }
    to[j] += sum;
  }
}

/// The sum of a vector's parts of 128 bits.
template <class D>
HWY_INLINE auto Folded(D d, hn::Vec<D> v) {
#if HWY_TARGET != HWY_SCALAR
  if constexpr (hn::MaxLanes(D()) * sizeof(hn::TFromD<D>) > 16) {
    const hn::Half<D> half;
    return Folded(half, hn::Add(hn::LowerHalf(half, v), hn::UpperHalf(half, v)));
  } else
#endif
  {
    (void)d;
    return v;
  }
}

/// to[i] = the sum of the lanes of sum[i], for four vectors of floats.
template <class D>
HWY_INLINE void StoreFour(D d, hn::Vec<D> a, hn::Vec<D> b, hn::Vec<D> c, hn::Vec<D> e, float* to) {
#if HWY_TARGET == HWY_SCALAR
  to[0] = hn::GetLane(a), to[1] = hn::GetLane(b), to[2] = hn::GetLane(c), to[3] = hn::GetLane(e);
  (void)d;
#else
  const hn::Repartition<double, D> wide;
  const auto ab = hn::BitCast(wide, hn::Add(hn::InterleaveLower(d, a, b), hn::InterleaveUpper(d, a, b)));
  const auto ce = hn::BitCast(wide, hn::Add(hn::InterleaveLower(d, c, e), hn::InterleaveUpper(d, c, e)));
  const auto all =
      hn::Add(hn::BitCast(d, hn::InterleaveLower(wide, ab, ce)), hn::BitCast(d, hn::InterleaveUpper(wide, ab, ce)));
  hn::StoreU(Folded(d, all), hn::CappedTag<float, 4>(), to);
#endif
}

/// Products that fill no vector: w[k] · x[k] for k from `at` to `end`.
template <typename T>
struct Rest {
  const T *w, *x;
  std::int64_t at, end;
};

/// to[l] = the sum of the lanes of δ l in a run of δ, and of the rest.
template <class D, typename T = hn::TFromD<D>>
HWY_INLINE void StoreRun(D d, hn::Vec<D> sum, const Rest<hn::TFromD<D>>& rest, std::int64_t run, T* to) {
  constexpr auto kLanes = static_cast<std::int64_t>(hn::MaxLanes(D()));
  if (run == kLanes) {
    hn::StoreU(sum, d, to);
    return;
  }
  HWY_ALIGN T lanes[kLanes];
  std::int64_t count = kLanes;
  if (rest.at == rest.end && run * static_cast<std::int64_t>(sizeof(T)) <= 16) {
    const auto folded = Folded(d, sum);
    hn::StoreU(folded, hn::DFromV<decltype(folded)>(), lanes);
    count = std::min(count, static_cast<std::int64_t>(16 / sizeof(T)));
  } else {
    hn::Store(sum, d, lanes);
  }
  for (std::int64_t k = rest.at; k < rest.end; ++k) {
    lanes[k - rest.at] += rest.w[k] * rest.x[k];
  }
  if constexpr (kLanes > 1) {
    for (std::int64_t half = count / 2; half >= run; half /= 2) {
      for (std::int64_t m = 0; m < half; ++m) {
        lanes[m] += lanes[m + half];
      }
    }
  }
  std::copy_n(lanes, run, to);
}

/// Some rows of weights against some batch rows. Weights lie as (k, l), and so does x: where δ are fewer than lanes,
/// each lane adds up every so many k of one δ, and lanes of the same δ are added in the end.
template <typename T, int kRows, int kBatch>
void Dot(const Dots& p, std::int64_t row, std::int64_t first) {
  const hn::ScalableTag<T> d;
  constexpr auto kLanes = static_cast<std::int64_t>(hn::MaxLanes(d));
  const T* const w = static_cast<const T*>(p.w) + row * p.w_stride;
  const T* const x = static_cast<const T*>(p.x) + first * p.x_stride;
  const std::int64_t run = std::min(p.d, kLanes), step = std::max(p.d, kLanes), end = p.depth * p.d;
  for (std::int64_t l = 0; l < p.d; l += run) {
    hn::Vec<decltype(d)> sum[kRows][kBatch];
    for (auto& of_row : sum) {
      for (auto& v : of_row) {
        v = hn::Zero(d);
      }
    }
    std::int64_t at = l;
    for (; at + kLanes <= end; at += step) {
      for (int i = 0; i < kRows; ++i) {
        const auto weights = hn::LoadU(d, w + i * p.w_stride + at);
        for (int n = 0; n < kBatch; ++n) {
          sum[i][n] = hn::MulAdd(weights, hn::LoadU(d, x + n * p.x_stride + at), sum[i][n]);
        }
      }
    }
    if constexpr (kRows == 4 && sizeof(T) == 4) {
      if (p.d == 1 && at == end) {
        for (int n = 0; n < kBatch; ++n) {
          StoreFour(d, sum[0][n], sum[1][n], sum[2][n], sum[3][n],
                    static_cast<T*>(p.sums) + (first + n) * p.sum_stride + row);
        }
        return;
      }
    }
    for (int i = 0; i < kRows; ++i) {
      for (int n = 0; n < kBatch; ++n) {
        T* const to = static_cast<T*>(p.sums) + (first + n) * p.sum_stride + (row + i) * p.d + l;
        StoreRun(d, sum[i][n], {w + i * p.w_stride, x + n * p.x_stride, at, end}, run, to);
      }
    }
  }
}

template <typename T, int kBatch>
void DotRows(const Dots& p, std::int64_t first) {
  std::int64_t row = 0;
  for (; row + 4 <= p.rows; row += 4) {
    Dot<T, 4, kBatch>(p, row, first);
  }
  for (; row < p.rows; ++row) {
    Dot<T, 1, kBatch>(p, row, first);
  }
}

template <typename T>
void DotAll(const Dots& p) {
  std::int64_t n = 0;
  for (; n + 4 <= p.batch; n += 4) {
    DotRows<T, 4>(p, n);
  }
  for (; n + 2 <= p.batch; n += 2) {
    DotRows<T, 2>(p, n);
  }
  if (n < p.batch) {
    DotRows<T, 1>(p, n);
  }
}

void DotsFloat(const Dots& p) { DotAll<float>(p); }
void DotsDouble(const Dots& p) { DotAll<double>(p); }

void AddUpFloat(const void* from, std::int64_t rows, std::int64_t cols, bool along, void* to) {
  AddUp(static_cast<const float*>(from), rows, cols, along, static_cast<float*>(to));
}
void AddUpDouble(const void* from, std::int64_t rows, std::int64_t cols, bool along, void* to) {
  AddUp(static_cast<const double*>(from), rows, cols, along, static_cast<double*>(to));
}

}  // namespace fretwork::kronecker::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fretwork::kronecker::cpu {
HWY_EXPORT(DotsFloat);
HWY_EXPORT(DotsDouble);
HWY_EXPORT(AddUpFloat);
HWY_EXPORT(AddUpDouble);

void dots(const Dots& what, DType dtype) {
  dtype == DType::f64 ? HWY_DYNAMIC_DISPATCH(DotsDouble)(what) : HWY_DYNAMIC_DISPATCH(DotsFloat)(what);
}

void add_up(const void* from, std::int64_t rows, std::int64_t cols, bool along, void* to, DType dtype) {
  dtype == DType::f64 ? HWY_DYNAMIC_DISPATCH(AddUpDouble)(from, rows, cols, along, to)
                      : HWY_DYNAMIC_DISPATCH(AddUpFloat)(from, rows, cols, along, to);
}

}  // namespace fretwork::kronecker::cpu
#endif
