// Bias and activation on vectors. Compiled once per instruction set.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "runtime/simd/finish.cpp"
#include <hwy/foreach_target.h>
// After foreach_target.h.
#include <hwy/contrib/math/math-inl.h>
#include <hwy/highway.h>

#include <cmath>

#include "runtime/simd/finish.h"

HWY_BEFORE_NAMESPACE();
namespace fretwork::simd::HWY_NAMESPACE {
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
      // As far as Exp goes; beyond it −0, or NaN of −inf.
      const V least = hn::Set(d, -706.0);
      const V kept = hn::Div(v, hn::Add(hn::Set(d, 1.0), hn::Exp(d, hn::Neg(hn::Max(least, v)))));
      return hn::IfThenElse(hn::Lt(v, least), hn::Mul(v, hn::Zero(d)), kept);
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

void FinishFloat(const Finish& what) { FinishAs<float>(what); }
void FinishDouble(const Finish& what) { FinishAs<double>(what); }

}  // namespace fretwork::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fretwork::simd {
HWY_EXPORT(FinishFloat);
HWY_EXPORT(FinishDouble);

void finish(const Finish& what, DType dtype) {
  dtype == DType::f64 ? HWY_DYNAMIC_DISPATCH(FinishDouble)(what) : HWY_DYNAMIC_DISPATCH(FinishFloat)(what);
}

}  // namespace fretwork::simd
#endif
