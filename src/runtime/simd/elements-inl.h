// Elements as they lie in memory, one at a time and in vectors of the type that they are summed in. For files that are
// compiled once per instruction set, after hwy/highway.h.
#ifndef FRETWORK_RUNTIME_SIMD_ELEMENTS_TYPES
#define FRETWORK_RUNTIME_SIMD_ELEMENTS_TYPES
#include <bit>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "core/element.h"

namespace fretwork::simd {

/// 16-bit elements as they lie in memory, and their conversions one at a time.
struct F16 {
  std::uint16_t bits;
  float wide() const { return static_cast<float>(std::bit_cast<_Float16>(bits)); }
  static F16 round(float value) { return {std::bit_cast<std::uint16_t>(static_cast<_Float16>(value))}; }
};
struct Bf16 {
  std::uint16_t bits;
  float wide() const { return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16); }
  static Bf16 round(float value) {
    const auto word = std::bit_cast<std::uint32_t>(value);
    const bool nan = (word & 0x7fffffff) > 0x7f800000;
    return {static_cast<std::uint16_t>(nan ? word >> 16 | 0x40 : (word + 0x7fff + (word >> 16 & 1)) >> 16)};
  }
};

}  // namespace fretwork::simd
#endif

#if defined(FRETWORK_RUNTIME_SIMD_ELEMENTS_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef FRETWORK_RUNTIME_SIMD_ELEMENTS_INL_H
#undef FRETWORK_RUNTIME_SIMD_ELEMENTS_INL_H
#else
#define FRETWORK_RUNTIME_SIMD_ELEMENTS_INL_H
#endif
#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace fretwork::simd::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Highway's own emulation of half conversions does not round to nearest even: those targets convert one by one.
constexpr bool kHasHalf = HWY_TARGET < HWY_SSE4 || HWY_ARCH_ARM_A64;

template <class D, typename In>
HWY_INLINE hn::Vec<D> LoadAs(D d, const In* from) {
  using T = hn::TFromD<D>;
  if constexpr (std::is_same_v<In, T>) {
    return hn::LoadU(d, from);
  } else if constexpr (std::is_same_v<In, Bf16>) {
    const hn::Rebind<std::uint32_t, D> du;
    const hn::Rebind<std::uint16_t, D> d16;
    return hn::BitCast(
        d, hn::ShiftLeft<16>(hn::PromoteTo(du, hn::LoadU(d16, reinterpret_cast<const std::uint16_t*>(from)))));
  } else if constexpr (kHasHalf) {
    const hn::Rebind<hwy::float16_t, D> d16;
    return hn::PromoteTo(d, hn::LoadU(d16, reinterpret_cast<const hwy::float16_t*>(from)));
  } else {
    HWY_ALIGN T wide[hn::MaxLanes(D())];
    for (std::size_t n = 0; n < hn::MaxLanes(D()); ++n) {
      wide[n] = from[n].wide();
    }
    return hn::Load(d, wide);
  }
}

/// The first `count` elements, less than a vector, and zeros.
template <class D, typename In>
HWY_INLINE hn::Vec<D> LoadSome(D d, const In* from, std::int64_t count) {
  const auto first = static_cast<std::size_t>(count);
  if constexpr (std::is_same_v<In, hn::TFromD<D>> && HWY_TARGET <= HWY_AVX2) {  // which faults at no masked element
    return hn::MaskedLoad(hn::FirstN(d, first), d, from);
  } else {
#if HWY_TARGET == HWY_AVX3
    const hn::Rebind<std::uint16_t, D> d16;
    const auto bits = hn::MaskedLoad(hn::FirstN(d16, first), d16, reinterpret_cast<const std::uint16_t*>(from));
    if constexpr (std::is_same_v<In, Bf16>) {
      return hn::BitCast(d, hn::ShiftLeft<16>(hn::PromoteTo(hn::Rebind<std::uint32_t, D>(), bits)));
    } else {
      return hn::PromoteTo(d, hn::BitCast(hn::Rebind<hwy::float16_t, D>(), bits));
    }
#else
    In some[hn::MaxLanes(D())] = {};
    std::memcpy(some, from, first * sizeof(In));
    return LoadAs(d, some);
#endif
  }
}

template <class D, typename V, typename T>
HWY_INLINE void Write(D d, V v, T* to, bool stream) {
  stream ? hn::Stream(v, d, to) : hn::StoreU(v, d, to);
}

template <bool kStream = false, class D, typename Out>
HWY_INLINE void StoreAs(D d, hn::Vec<D> v, Out* to) {
  using T = hn::TFromD<D>;
  if constexpr (std::is_same_v<Out, T>) {
    Write(d, v, to, kStream);
  } else if constexpr (std::is_same_v<Out, Bf16>) {
    const hn::Rebind<std::uint32_t, D> du;
    const hn::Rebind<std::int32_t, D> di;
    const hn::Rebind<std::uint16_t, D> d16;
    const auto word = hn::BitCast(du, v);
    const auto high = hn::ShiftRight<16>(word);
    const auto odd = hn::And(high, hn::Set(du, 1u));
    const auto rounded = hn::ShiftRight<16>(hn::Add(word, hn::Add(odd, hn::Set(du, 0x7fffu))));
    const auto quiet = hn::Or(high, hn::Set(du, 0x40u));
    const auto bits = hn::IfThenElse(hn::RebindMask(du, hn::Ne(v, v)), quiet, rounded);
    Write(d16, hn::DemoteTo(d16, hn::BitCast(di, bits)), reinterpret_cast<std::uint16_t*>(to), kStream);
  } else if constexpr (kHasHalf) {
    const hn::Rebind<hwy::float16_t, D> d16;
    Write(d16, hn::DemoteTo(d16, v), reinterpret_cast<hwy::float16_t*>(to), kStream);
  } else {
    HWY_ALIGN T wide[hn::MaxLanes(D())];
    hn::Store(v, d, wide);
    for (std::size_t n = 0; n < hn::MaxLanes(D()); ++n) {
      to[n] = Out::round(wide[n]);
    }
  }
}

/// Calls f with an element of the type that data of `dtype` has, where vectors of T are loaded and stored as such.
template <typename T, class F>
HWY_INLINE void WithElement(DType dtype, const F& f) {
  if (dtype == (sizeof(T) == 8 ? DType::f64 : DType::f32)) {
    f(T());
  } else if constexpr (sizeof(T) == 4) {
    dtype == DType::bf16 ? f(Bf16()) : dtype == DType::f16 ? f(F16()) : void();
  }
}

/// to[n] = factor · element n of data, which lie `step` apart.
template <typename T>
void WidenRow(const void* data, DType dtype, std::int64_t step, std::int64_t count, T factor, T* to) {
  const hn::ScalableTag<T> d;
  constexpr auto kLanes = static_cast<std::int64_t>(hn::MaxLanes(d));
  const auto times = hn::Set(d, factor);
  std::int64_t n = 0;
  const auto vectors = [&](auto element) HWY_ATTR {
    const auto* const from = static_cast<const decltype(element)*>(data);
    for (; n + kLanes <= count; n += kLanes) {
      hn::StoreU(hn::Mul(times, LoadAs(d, from + n)), d, to + n);
    }
  };
  if (step == 1) {
    WithElement<T>(dtype, vectors);
  }
  for (; n < count; ++n) {
    to[n] = factor * read_element<T>(data, dtype, n * step);
  }
}

/// Element n of data = factor · from[n], rounded.
template <typename T>
void NarrowRow(const T* from, std::int64_t count, T factor, void* data, DType dtype, std::int64_t step) {
  const hn::ScalableTag<T> d;
  constexpr auto kLanes = static_cast<std::int64_t>(hn::MaxLanes(d));
  const auto times = hn::Set(d, factor);
  std::int64_t n = 0;
  const auto vectors = [&](auto element) HWY_ATTR {
    auto* const to = static_cast<decltype(element)*>(data);
    for (; n + kLanes <= count; n += kLanes) {
      StoreAs(d, hn::Mul(times, hn::LoadU(d, from + n)), to + n);
    }
  };
  if (step == 1) {
    WithElement<T>(dtype, vectors);
  }
  for (; n < count; ++n) {
    write_element(data, dtype, n * step, factor * from[n]);
  }
}

/// A vector of copies of a run of elements: as a rule one instruction of the load unit.
template <int kRun, class D, typename T>
HWY_INLINE hn::Vec<D> Repeat(D d, const T* run) {
  if constexpr (kRun == 1) {
    return hn::Set(d, *run);
  } else if constexpr (kRun == hn::MaxLanes(D())) {
    return hn::LoadU(d, run);
  } else if constexpr (kRun * sizeof(T) == 16) {
    return hn::LoadDup128(d, run);
  } else if constexpr (kRun * sizeof(T) == 8) {
    double both;
    std::memcpy(&both, run, sizeof both);
    return hn::BitCast(d, hn::Set(hn::Repartition<double, D>(), both));
  } else {
#if HWY_TARGET == HWY_AVX3
    if constexpr (sizeof(T) == 4) {
      return hn::Vec<D>{_mm512_broadcast_f32x8(_mm256_loadu_ps(run))};
    } else {
      return hn::Vec<D>{_mm512_broadcast_f64x4(_mm256_loadu_pd(run))};
    }
#endif
  }
}

/// The sum of a vector's parts of kCount lanes, at least 128 bits.
template <int kCount, class D>
HWY_INLINE auto FoldedTo(D d, hn::Vec<D> v) {
#if HWY_TARGET != HWY_SCALAR
  if constexpr (hn::MaxLanes(D()) > kCount) {
    const hn::Half<D> half;
    return FoldedTo<kCount>(half, hn::Add(hn::LowerHalf(half, v), hn::UpperHalf(half, v)));
  } else
#endif
  {
    (void)d;
    return v;
  }
}

/// to[i] = the sum of the lanes of the i-th of four vectors of floats.
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
  hn::StoreU(FoldedTo<4>(d, all), hn::CappedTag<float, 4>(), to);
#endif
}

}  // namespace fretwork::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif
