// The functions of rows.h on Highway: compiled once per instruction set, chosen at run time.
#include "ops/attention/cpu/rows.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/attention/cpu/rows.cpp"
#include <hwy/foreach_target.h>
// After foreach_target.h.
#include <hwy/contrib/math/math-inl.h>
#include <hwy/highway.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "device/random.cuh"
#include "runtime/simd/elements-inl.h"

#ifndef FRETWORK_OPS_ATTENTION_CPU_ROWS
#define FRETWORK_OPS_ATTENTION_CPU_ROWS
namespace fretwork::attention_op::cpu {
namespace {

template <typename Acc>
constexpr Acc kNone = -std::numeric_limits<Acc>::infinity();

}  // namespace
}  // namespace fretwork::attention_op::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace fretwork::attention_op::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

template <typename Acc>
using Tag = hn::ScalableTag<Acc>;
template <typename Acc>
using V = hn::Vec<Tag<Acc>>;
template <typename Acc>
constexpr auto kLanes = static_cast<std::int64_t>(hn::MaxLanes(Tag<Acc>()));

template <typename Acc>
void Scale(Acc* x, std::int64_t count, Acc factor) {
  const Tag<Acc> d;
  const auto times = hn::Set(d, factor);
  for (std::int64_t n = 0; n < count; n += kLanes<Acc>) {
    hn::StoreU(hn::Mul(times, hn::LoadU(d, x + n)), d, x + n);
  }
}

template <typename Acc>
void Add(Acc* x, const Acc* y, std::int64_t count) {
  const Tag<Acc> d;
  for (std::int64_t n = 0; n < count; n += kLanes<Acc>) {
    hn::StoreU(hn::Add(hn::LoadU(d, x + n), hn::LoadU(d, y + n)), d, x + n);
  }
}

template <typename Acc>
void Multiply(Acc* x, const Acc* y, std::int64_t count) {
  const Tag<Acc> d;
  for (std::int64_t n = 0; n < count; n += kLanes<Acc>) {
    hn::StoreU(hn::Mul(hn::LoadU(d, x + n), hn::LoadU(d, y + n)), d, x + n);
  }
}

template <typename Acc>
void Select(Acc* x, const std::uint32_t* words, std::int64_t count) {
  const Tag<Acc> d;
  for (std::int64_t n = 0; n < count; n += kLanes<Acc>) {
    // As bytes with something behind them, which is what a mask is loaded from.
    const std::uint64_t bits = words[n / 32] >> n % 32;
    const auto there = hn::LoadMaskBits(d, reinterpret_cast<const std::uint8_t*>(&bits));
    hn::StoreU(hn::IfThenElse(there, hn::LoadU(d, x + n), hn::Set(d, kNone<Acc>)), d, x + n);
  }
}

template <typename Acc>
void Band(Acc* x, std::int64_t stride, std::int64_t rows, std::int64_t count, std::int64_t begin, std::int64_t end,
          std::int64_t limit) {
  const Tag<Acc> d;
  const auto none = hn::Set(d, kNone<Acc>);
  for (std::int64_t r = 0; r < rows; ++r, x += stride) {
    const std::int64_t first = std::clamp<std::int64_t>(begin + r, 0, count);
    const std::int64_t last = std::clamp(std::min(end + r, limit), first, count);
    std::int64_t n = 0;
    for (; n < first; n += kLanes<Acc>) {
      const auto before = hn::FirstN(d, static_cast<std::size_t>(first - n));
      hn::StoreU(hn::IfThenElse(before, none, hn::LoadU(d, x + n)), d, x + n);
    }
    for (n = last / kLanes<Acc> * kLanes<Acc>; n < count; n += kLanes<Acc>) {
      const auto inside = hn::FirstN(d, static_cast<std::size_t>(std::max<std::int64_t>(last - n, 0)));
      hn::StoreU(hn::IfThenElse(inside, hn::LoadU(d, x + n), none), d, x + n);
    }
  }
}

template <typename Acc>
void Cap(Acc* x, std::int64_t count, Acc cap, Acc* slope) {
  const Tag<Acc> d;
  const auto inverse = hn::Set(d, 1 / cap), times = hn::Set(d, cap), one = hn::Set(d, Acc{1});
  for (std::int64_t n = 0; n < count; n += kLanes<Acc>) {
    const auto v = hn::Mul(hn::LoadU(d, x + n), inverse);
    const auto t = hn::IfThenElse(hn::IsNaN(v), v, hn::Tanh(d, v));
    hn::StoreU(hn::Mul(times, t), d, x + n);
    if (slope != nullptr) {
      hn::StoreU(hn::NegMulAdd(t, t, one), d, slope + n);
    }
  }
}

template <typename Acc>
void Alibi(Acc* x, std::int64_t count, const Acc* positions, Acc position, Acc slope) {
  const Tag<Acc> d;
  const auto at = hn::Set(d, position), times = hn::Set(d, slope);
  for (std::int64_t n = 0; n < count; n += kLanes<Acc>) {
    const auto distance = hn::Abs(hn::Sub(at, hn::LoadU(d, positions + n)));
    hn::StoreU(hn::NegMulAdd(times, distance, hn::LoadU(d, x + n)), d, x + n);
  }
}

template <typename Acc>
void KeepColumns(unsigned state, const std::int64_t* tokens, std::int64_t count, std::uint64_t threshold, Acc factor,
                 Acc* keep) {
  for (std::int64_t n = 0; n < count; ++n) {
    keep[n] = random_bits(state, tokens[n]) >= threshold ? factor : Acc{0};
  }
}

template <typename Acc>
void KeepRows(const unsigned* states, std::int64_t token, std::int64_t count, std::uint64_t threshold, Acc factor,
              Acc* keep) {
  for (std::int64_t n = 0; n < count; ++n) {
    keep[n] = random_bits(states[n], token) >= threshold ? factor : Acc{0};
  }
}

/// Vectors whose exponentials are taken side by side: one after another, the wait for each step would fill the CPU's
/// queues before it has found enough to do.
constexpr int kAbreast = HWY_TARGET == HWY_AVX3 || HWY_ARCH_ARM_A64 ? 4 : 2;

/// The greater and the lesser of a bound and x, which stays if it is NaN: so does the second operand of x86.
template <typename V>
HWY_INLINE V AtLeast(V bound, V x) {
  return HWY_TARGET == HWY_SCALAR ? hn::IfThenElse(hn::Lt(x, bound), bound, x) : hn::Max(bound, x);
}
template <typename V>
HWY_INLINE V AtMost(V bound, V x) {
  return HWY_TARGET == HWY_SCALAR ? hn::IfThenElse(hn::Gt(x, bound), bound, x) : hn::Min(bound, x);
}

/// x = eˣ for x ≤ 88, or, where kTwo and Acc is fp32, 2ˣ for x ≤ 127. A NaN stays one, as it does not with Highway's
/// alone. For fp32 it is 2ⁿ⁻¹·P(r), where the exponent of two is n + r; P is fitted to 2·2ʳ with a relative error of
/// 3e-9. Results below 2⁻¹²⁵ are zeros.
template <bool kTwo, int kCount, typename V>
HWY_INLINE void Exp(V (&x)[kCount]) {
  const hn::DFromV<V> d;
  const auto all = [&](auto&& step) HWY_ATTR {
#pragma GCC unroll 8
    for (int i = 0; i < kCount; ++i) {
      step(i);
    }
  };
  if constexpr (sizeof(hn::TFromD<decltype(d)>) == 8) {
    all([&](int i) HWY_ATTR { x[i] = hn::IfThenElse(hn::IsNaN(x[i]), x[i], hn::Exp(d, x[i])); });
  } else {
    const hn::RebindToSigned<decltype(d)> di;
    // Added to 1.5·2²³, a number is rounded to an integer, which the lowest bits then hold.
    const auto round = hn::Set(d, 12582912.0f), log2e = hn::Set(d, 1.44269504f);
    V n[kCount], r[kCount];
    // The least gives n = −126.
    all([&](int i) HWY_ATTR { x[i] = AtLeast(hn::Set(d, kTwo ? -126.0f : -87.4f), x[i]); });
    all([&](int i) HWY_ATTR { n[i] = kTwo ? hn::Add(x[i], round) : hn::MulAdd(x[i], log2e, round); });
    all([&](int i) HWY_ATTR { r[i] = hn::Sub(n[i], round); });
    all([&](int i) HWY_ATTR { r[i] = kTwo ? hn::Sub(x[i], r[i]) : hn::MulSub(x[i], log2e, r[i]); });
    constexpr float kFit[] = {0.0026781994f, 0.019237006f, 0.11100719f, 0.48045295f, 1.3862944f, 2.0f};
    all([&](int i) HWY_ATTR { x[i] = hn::Set(d, 0.00030655626f); });
#pragma GCC unroll 8
    for (const float c : kFit) {
      all([&](int i) HWY_ATTR { x[i] = hn::MulAdd(x[i], r[i], hn::Set(d, c)); });
    }
    // 2ⁿ⁻¹; for n = −126 it is zero, as a number and as bits.
    all([&](int i) HWY_ATTR {
      x[i] = hn::Mul(x[i], hn::BitCast(d, hn::ShiftLeft<23>(hn::Add(hn::BitCast(di, n[i]), hn::Set(di, 126)))));
    });
  }
}

template <typename Acc>
Acc Dot(const Acc* x, const Acc* y, std::int64_t count) {
  const Tag<Acc> d;
  auto sum = hn::Zero(d);
  std::int64_t n = 0;
  for (; n + kLanes<Acc> <= count; n += kLanes<Acc>) {
    sum = hn::MulAdd(hn::LoadU(d, x + n), hn::LoadU(d, y + n), sum);
  }
  Acc rest = hn::GetLane(hn::SumOfLanes(d, sum));
  for (; n < count; ++n) {
    rest += x[n] * y[n];
  }
  return rest;
}

template <typename Acc>
HWY_INLINE Acc Highest(const Acc* x, std::int64_t count) {
  const Tag<Acc> d;
  // In this order the maximum of x86 passes over a NaN; where it does not, the row is NaN all the same.
  auto highest = hn::Set(d, kNone<Acc>), more = highest;
  std::int64_t n = 0;
  for (; n + 2 * kLanes<Acc> <= count; n += 2 * kLanes<Acc>) {
    highest = hn::Max(hn::LoadU(d, x + n), highest);
    more = hn::Max(hn::LoadU(d, x + n + kLanes<Acc>), more);
  }
  highest = hn::Max(n < count ? hn::Max(hn::LoadU(d, x + n), more) : more, highest);
  return hn::GetLane(hn::MaxOfLanes(d, highest));
}

/// Soften() for a few rows, once the new tops are in `factors`.
template <int kCount, typename Acc>
HWY_INLINE void SoftenRows(Acc* x, std::int64_t stride, std::int64_t count, Acc factor, Acc* tops, Acc* sums,
                           Acc* factors) {
  const Tag<Acc> d;
  const auto times = hn::Set(d, factor);
  V<Acc> base[kCount], sum[kCount];
#pragma GCC unroll 8
  for (int i = 0; i < kCount; ++i) {
    // A row of −inf alone must not subtract it from itself; NaN still shows through the sum.
    base[i] = hn::Set(d, factors[i] == kNone<Acc> ? Acc{0} : factors[i]);
    sum[i] = hn::Zero(d);
  }
  for (std::int64_t n = 0; n < count; n += kLanes<Acc>) {
    V<Acc> e[kCount];
#pragma GCC unroll 8
    for (int i = 0; i < kCount; ++i) {
      e[i] = hn::Mul(hn::Sub(hn::LoadU(d, x + i * stride + n), base[i]), times);
    }
    Exp<true>(e);
#pragma GCC unroll 8
    for (int i = 0; i < kCount; ++i) {
      sum[i] = hn::Add(sum[i], e[i]);
      hn::StoreU(e[i], d, x + i * stride + n);
    }
  }
  for (int i = 0; i < kCount; ++i) {
    const Acc top = factors[i];
    // Without earlier results there is nothing to multiply.
    const bool same = tops[i] == top || tops[i] == kNone<Acc>;
    factors[i] = same ? Acc{1} : std::exp((tops[i] - top) * (factor * static_cast<Acc>(kSoftmaxUnit<Acc>)));
    sums[i] = sums[i] * factors[i] + hn::GetLane(hn::SumOfLanes(d, sum[i]));
    tops[i] = top;
  }
}

template <typename Acc>
void Soften(Acc* x, std::int64_t stride, std::int64_t rows, std::int64_t count, Acc factor, Acc* tops, Acc* sums,
            Acc* factors) {
  for (std::int64_t r = 0; r < rows; ++r) {
    factors[r] = std::max(tops[r], Highest(x + r * stride, count));
  }
  std::int64_t r = 0;
  for (; r + kAbreast <= rows; r += kAbreast) {
    SoftenRows<kAbreast>(x + r * stride, stride, count, factor, tops + r, sums + r, factors + r);
  }
  for (; r < rows; ++r) {
    SoftenRows<1>(x + r * stride, stride, count, factor, tops + r, sums + r, factors + r);
  }
}

/// The vectors from column n on.
template <bool kByColumn, int kCount, typename Acc>
HWY_INLINE void GradientFrom(const GradientRow<Acc>& row, std::int64_t n) {
  const Tag<Acc> d;
  V<Acc> p[kCount];
#pragma GCC unroll 8
  for (int i = 0; i < kCount; ++i) {
    const std::int64_t at = n + i * kLanes<Acc>;
    const auto lse = kByColumn ? hn::LoadU(d, row.lse + at) : hn::Set(d, *row.lse);
    p[i] = hn::Sub(hn::LoadU(d, row.scores + at), lse);
    if (row.rest != nullptr) {
      p[i] = hn::Sub(p[i], kByColumn ? hn::LoadU(d, row.rest + at) : hn::Set(d, *row.rest));
    }
    p[i] = AtMost(hn::Set(d, Acc{88}), p[i]);
  }
  Exp<false>(p);
#pragma GCC unroll 8
  for (int i = 0; i < kCount; ++i) {
    const std::int64_t at = n + i * kLanes<Acc>;
    const auto delta = kByColumn ? hn::LoadU(d, row.delta + at) : hn::Set(d, *row.delta);
    auto g = hn::LoadU(d, row.gradients + at);
    const auto nothing = hn::Eq(p[i], hn::Zero(d));
    if (row.keep != nullptr) {
      g = hn::Mul(g, hn::LoadU(d, row.keep + at));
    }
    g = hn::Mul(p[i], hn::Sub(g, delta));
    if (row.slope != nullptr) {
      g = hn::Mul(g, hn::LoadU(d, row.slope + at));
    }
    if (row.keep != nullptr) {
      p[i] = hn::Mul(p[i], hn::LoadU(d, row.keep + at));
    }
    hn::StoreU(p[i], d, row.scores + at);
    // Where nothing came out nothing counts, NaN upstream included.
    hn::StoreU(hn::IfThenZeroElse(nothing, g), d, row.gradients + at);
  }
}

template <bool kByColumn, typename Acc>
void GradientOf(const GradientRow<Acc>& row) {
  std::int64_t n = 0;
  for (; n + kAbreast * kLanes<Acc> <= row.count; n += kAbreast * kLanes<Acc>) {
    GradientFrom<kByColumn, kAbreast>(row, n);
  }
  for (; n < row.count; n += kLanes<Acc>) {
    GradientFrom<kByColumn, 1>(row, n);
  }
}

template <typename Acc>
void Gradient(const GradientRow<Acc>& row) {
  row.by_column ? GradientOf<true>(row) : GradientOf<false>(row);
}

template <typename Acc>
constexpr Rows<Acc> kTable{&simd::HWY_NAMESPACE::WidenRow<Acc>,
                           &simd::HWY_NAMESPACE::NarrowRow<Acc>,
                           &Dot<Acc>,
                           &Scale<Acc>,
                           &Add<Acc>,
                           &Multiply<Acc>,
                           &Select<Acc>,
                           &Band<Acc>,
                           &Cap<Acc>,
                           &Alibi<Acc>,
                           &KeepColumns<Acc>,
                           &KeepRows<Acc>,
                           &Soften<Acc>,
                           &Gradient<Acc>};

const Rows<float>* Floats() { return &kTable<float>; }
const Rows<double>* Doubles() { return &kTable<double>; }

}  // namespace fretwork::attention_op::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fretwork::attention_op::cpu {
HWY_EXPORT(Floats);
HWY_EXPORT(Doubles);

template <>
const Rows<float>& row_functions<float>() {
  return *HWY_DYNAMIC_DISPATCH(Floats)();
}

template <>
const Rows<double>& row_functions<double>() {
  return *HWY_DYNAMIC_DISPATCH(Doubles)();
}

}  // namespace fretwork::attention_op::cpu
#endif
