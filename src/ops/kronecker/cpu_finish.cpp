// Bias and activation of sums, and sums for a bias' gradient, on vectors in a cache; compiled once per instruction set.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/kronecker/cpu_finish.cpp"
#include <hwy/foreach_target.h>
// After foreach_target.h.
#include <hwy/contrib/math/math-inl.h>
#include <hwy/highway.h>

#include <cmath>

#include "ops/kronecker/cpu.h"

HWY_BEFORE_NAMESPACE();
namespace fretwork::kronecker::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

struct Same {
  template <class D, class V>
  HWY_INLINE V operator()(D, V v) const {
    return v;
  }
};

struct Relu {
  template <class D, class V>
  HWY_INLINE V operator()(D d, V v) const {
    return hn::IfThenZeroElse(hn::Le(v, hn::Zero(d)), v);
  }
};

struct Silu {
  template <class D, class V>
  HWY_INLINE V operator()(D d, V v) const {
    if constexpr (sizeof(hn::TFromD<D>) == 8) {
      return hn::Div(v, hn::Add(hn::Set(d, 1.0), hn::Exp(d, hn::Min(hn::Set(d, 706.0), hn::Neg(v)))));
    } else {
      // 104 is as far as Exp goes, and infinity by then. In this order the minimum of a NaN is one.
      return hn::Div(v, hn::Add(hn::Set(d, 1.0f), hn::Exp(d, hn::Min(hn::Set(d, 104.0f), hn::Neg(v)))));
    }
  }
};

/// v·Φ(v) with Φ(−√2·z) = erfc(z) / 2, and erfc(z) = exp(−z²)·t·P(t) for z ≥ 0 and t = 1 / (1 + 0.4·z). P is fitted to
/// a relative error of 6e-8 on [0, 10].
struct Gelu {
  template <class D, class V>
  HWY_INLINE V operator()(D d, V v) const {
    using T = hn::TFromD<D>;
    if constexpr (sizeof(T) == 8) {
      HWY_ALIGN T each[hn::MaxLanes(D())];
      hn::Store(v, d, each);
      for (T& x : each) {
        x = 0.5 * x * std::erfc(-x * 0.70710678118654752440);
      }
      return hn::Load(d, each);
    } else {
      constexpr float kFit[] = {-0.14031141f, 0.083972313f, 0.087980156f, 0.079746432f,
                                0.19339714f,  0.20188667f,  0.22644323f,  0.22563422f};
      const V one = hn::Set(d, 1.0f), z = hn::Mul(hn::Abs(v), hn::Set(d, 0.70710678f));
      const V t = hn::Div(one, hn::MulAdd(hn::Set(d, 0.4f), z, one));
      V sum = hn::Set(d, 0.041251308f);
      for (const float c : kFit) {
        sum = hn::MulAdd(sum, t, hn::Set(d, c));
      }
      const V half = hn::Mul(hn::Set(d, 0.5f), hn::Mul(hn::Mul(sum, t), hn::Exp(d, hn::Neg(hn::Mul(z, z)))));
      return hn::Mul(v, hn::IfThenElse(hn::Lt(v, hn::Zero(d)), half, hn::Sub(one, half)));
    }
  }
};

template <typename T, class F>
void Each(const Finish& w, F activated) {
  const hn::ScalableTag<T> d;
  constexpr auto kLanes = static_cast<std::int64_t>(hn::MaxLanes(d));
  for (std::int64_t i = 0; i < w.rows; ++i) {
    T* const row = static_cast<T*>(w.sums) + i * w.stride;
    const T* const bias = static_cast<const T*>(w.col_bias);
    const auto row_bias = hn::Set(d, w.row_bias != nullptr ? static_cast<const T*>(w.row_bias)[i] : T{0});
    for (std::int64_t j = 0; j < w.cols; j += kLanes) {
      const auto sum = hn::Add(hn::LoadU(d, row + j), bias != nullptr ? hn::LoadU(d, bias + j) : row_bias);
      hn::StoreU(activated(d, sum), d, row + j);
    }
  }
}

template <typename T>
void FinishAs(const Finish& what) {
  switch (what.activation) {
    case Activation::relu:
      return Each<T>(what, Relu());
    case Activation::gelu:
      return Each<T>(what, Gelu());
    case Activation::silu:
      return Each<T>(what, Silu());
    default:
      return Each<T>(what, Same());
  }
}

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
    auto sum = hn::LoadU(d, to + j);
    for (std::int64_t i = 0; i < rows; ++i) {
      sum = hn::Add(sum, hn::LoadU(d, from + i * cols + j));
    }
    hn::StoreU(sum, d, to + j);
  }
  for (std::int64_t j = whole; j < cols; ++j) {
    for (std::int64_t i = 0; i < rows; ++i) {
      to[j] += from[i * cols + j];
    }
  }
}

void AddUpFloat(const void* from, std::int64_t rows, std::int64_t cols, bool along, void* to) {
  AddUp(static_cast<const float*>(from), rows, cols, along, static_cast<float*>(to));
}
void AddUpDouble(const void* from, std::int64_t rows, std::int64_t cols, bool along, void* to) {
  AddUp(static_cast<const double*>(from), rows, cols, along, static_cast<double*>(to));
}

void FinishFloat(const Finish& what) { FinishAs<float>(what); }
void FinishDouble(const Finish& what) { FinishAs<double>(what); }

}  // namespace fretwork::kronecker::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fretwork::kronecker::cpu {
HWY_EXPORT(FinishFloat);
HWY_EXPORT(FinishDouble);
HWY_EXPORT(AddUpFloat);
HWY_EXPORT(AddUpDouble);

void finish(const Finish& what, DType dtype) {
  dtype == DType::f64 ? HWY_DYNAMIC_DISPATCH(FinishDouble)(what) : HWY_DYNAMIC_DISPATCH(FinishFloat)(what);
}

void add_up(const void* from, std::int64_t rows, std::int64_t cols, bool along, void* to, DType dtype) {
  dtype == DType::f64 ? HWY_DYNAMIC_DISPATCH(AddUpDouble)(from, rows, cols, along, to)
                      : HWY_DYNAMIC_DISPATCH(AddUpFloat)(from, rows, cols, along, to);
}

}  // namespace fretwork::kronecker::cpu
#endif
