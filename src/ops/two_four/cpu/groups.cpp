// Runs of 2:4 groups on Highway: compiled once per instruction set, chosen at run time. A vector holds the same element
// of neighbouring groups, so each lane decides for one group.
#include "ops/two_four/cpu/groups.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/two_four/cpu/groups.cpp"
#include <hwy/foreach_target.h>
// After foreach_target.h.
#include <hwy/highway.h>

#ifndef FRETWORK_OPS_TWO_FOUR_CPU_GROUPS  // what needs no vectors, once
#define FRETWORK_OPS_TWO_FOUR_CPU_GROUPS
namespace fretwork::two_four {

/// How the bits of an element tell its magnitude. As integers they order it, sign aside; as the bits of `Sum` shifted
/// left and scaled they are it. What is above kTop is NaN; kTop is infinity where the type has one.
template <typename B, typename S, B top, bool infinite, int shift, int exponent, bool integer = false>
struct Element {
  using Bits = B;
  using Sum = S;
  static constexpr B kMask = integer ? static_cast<B>(~B{0}) : static_cast<B>(static_cast<B>(~B{0}) >> 1);
  static constexpr B kTop = top;
  static constexpr bool kInfinite = infinite, kInteger = integer, kUnsigned = false;
  static constexpr int kShift = shift, kExponent = exponent;
};
using F64 = Element<std::uint64_t, double, 0x7ff0'0000'0000'0000, true, 0, 0>;
using F32 = Element<std::uint32_t, float, 0x7f80'0000, true, 0, 0>;
using F16 = Element<std::uint16_t, float, 0x7c00, true, 13, 112>;
using Bf16 = Element<std::uint16_t, float, 0x7f80, true, 16, 0>;
using F8E4m3 = Element<std::uint8_t, float, 0x7e, false, 20, 120>;
using F8E5m2 = Element<std::uint8_t, float, 0x7c, true, 21, 112>;
using I8 = Element<std::uint8_t, float, 0xff, false, 0, 0, true>;
/// Its bits are its magnitude, whose highest one lies where others have a sign.
struct U8 : I8 {
  static constexpr bool kUnsigned = true;
};

/// The three ways to halve four, as bits of the half with the first.
constexpr int kHalves[] = {0b0011, 0b0101, 0b1001};

}  // namespace fretwork::two_four
#endif

HWY_BEFORE_NAMESPACE();
namespace fretwork::two_four::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

/// Lanes are signed, as signed comparisons are the quick ones.
template <typename Bits>
using Lane = std::make_signed_t<Bits>;
template <typename Bits>
constexpr int kGroup = sizeof(Bits) == 4 ? 2 : 4;

/// f(tag, group) over vectors of groups, then over single ones.
template <typename T, typename F>
HWY_INLINE void Each(std::int64_t groups, const F& f) {
  const hn::ScalableTag<T> d;
  const hn::CappedTag<T, 1> one;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  std::int64_t n = 0;
  for (; n + lanes <= groups; n += lanes) {
    f(d, n);
  }
  for (; n < groups; ++n) {
    f(one, n);
  }
}

template <class D>
HWY_INLINE hn::Vec<D> LoadCodes(D d, const std::uint8_t* from) {
  using T = hn::TFromD<D>;
  if constexpr (hn::MaxLanes(D()) == 1) {
    return hn::Set(d, static_cast<T>(*from));
  } else if constexpr (sizeof(T) == 1) {
    return hn::BitCast(d, hn::LoadU(hn::Rebind<std::uint8_t, D>(), from));
  } else if constexpr (sizeof(T) == 8) {
    return hn::PromoteTo(d, LoadCodes(hn::Rebind<std::int32_t, D>(), from));
  } else {
    return hn::PromoteTo(d, hn::LoadU(hn::Rebind<std::uint8_t, D>(), from));
  }
}

template <class D>
HWY_INLINE void StoreCodes(D d, hn::Vec<D> codes, std::uint8_t* to) {
  const hn::RebindToUnsigned<D> du;
  const hn::Rebind<std::uint8_t, D> d8;
  if constexpr (hn::MaxLanes(D()) == 1) {
    *to = static_cast<std::uint8_t>(hn::GetLane(codes));
  } else if constexpr (sizeof(hn::TFromD<D>) == 1) {
    hn::StoreU(hn::BitCast(du, codes), du, to);
  } else {
    hn::StoreU(hn::TruncateTo(d8, hn::BitCast(du, codes)), d8, to);
  }
  (void)d;
}

/// The elements of groups, first to last.
template <class D>
struct Four {
  hn::Vec<D> a, b, c, d;
};
template <class D>
HWY_INLINE Four<D> LoadFour(D d, const hn::TFromD<D>* from) {
  Four<D> v;
  hn::LoadInterleaved4(d, from, v.a, v.b, v.c, v.d);
  return v;
}

/// A group in each lane: groups that follow one another, or the same one of neighbouring lines, whose elements are a
/// pitch apart.
template <bool kAcross, class D>
HWY_INLINE Four<D> LoadGroups(D d, const hn::TFromD<D>* from, std::int64_t pitch, std::int64_t n) {
  using T = hn::TFromD<D>;
  if constexpr (kAcross) {
    const auto at = [=](int e) HWY_ATTR { return e < kGroup<T> ? hn::LoadU(d, from + e * pitch + n) : hn::Zero(d); };
    return {at(0), at(1), at(2), at(3)};
  } else if constexpr (kGroup<T> == 2) {
    Four<D> v{hn::Zero(d), hn::Zero(d), hn::Zero(d), hn::Zero(d)};
    hn::LoadInterleaved2(d, from + 2 * n, v.a, v.b);
    return v;
  } else {
    return LoadFour(d, from + 4 * n);
  }
}

/// The way back.
template <bool kAcross, class D>
HWY_INLINE void StoreGroups(D d, const Four<D>& v, hn::TFromD<D>* to, std::int64_t pitch, std::int64_t n) {
  using T = hn::TFromD<D>;
  if constexpr (!kAcross) {
    if constexpr (kGroup<T> == 2) {
      hn::StoreInterleaved2(v.a, v.b, d, to + 2 * n);
    } else {
      hn::StoreInterleaved4(v.a, v.b, v.c, v.d, d, to + 4 * n);
    }
  } else {
    hn::StoreU(v.a, d, to + n);
    hn::StoreU(v.b, d, to + pitch + n);
    if constexpr (kGroup<T> == 4) {
      hn::StoreU(v.c, d, to + 2 * pitch + n);
      hn::StoreU(v.d, d, to + 3 * pitch + n);
    }
  }
}

/// Whether more than two of four are true.
template <class M>
HWY_INLINE M TooMany(M a, M b, M c, M d) {
  return hn::Or(hn::And(hn::And(a, b), hn::Or(c, d)), hn::And(hn::And(c, d), hn::Or(a, b)));
}

/// Whether at least two of three are true.
template <class M>
HWY_INLINE M Most(M a, M b, M c) {
  return hn::Or(hn::And(a, b), hn::And(c, hn::Or(a, b)));
}

template <typename E, class D>
HWY_INLINE hn::Mask<D> IsNonZero(D d, hn::Vec<D> v) {
  return hn::Ne(hn::And(v, hn::Set(d, static_cast<hn::TFromD<D>>(E::kMask))), hn::Zero(d));
}

template <typename E>
bool Compress(const typename E::Bits* dense, std::int64_t groups, typename E::Bits* values, std::uint8_t* codes) {
  using T = Lane<typename E::Bits>;
  const auto* const from = reinterpret_cast<const T*>(dense);
  auto* const to = reinterpret_cast<T*>(values);
  bool bad = false;
  Each<T>(groups, [&](auto d, std::int64_t n) HWY_ATTR {
    const auto code = [d](int c) HWY_ATTR { return hn::Set(d, static_cast<T>(c)); };
    const auto v = LoadGroups<false>(d, from, 0, n);
    const auto a = IsNonZero<E>(d, v.a), b = IsNonZero<E>(d, v.b);
    if constexpr (kGroup<T> == 2) {
      bad |= !hn::AllFalse(d, hn::And(a, b));
      StoreCodes(d, hn::IfThenElse(b, code(0xE), code(4)), codes + n);
      hn::StoreU(hn::IfThenElse(b, v.b, v.a), d, to + n);
    } else {
      const auto c = IsNonZero<E>(d, v.c), e = IsNonZero<E>(d, v.d);
      bad |= !hn::AllFalse(d, TooMany(a, b, c, e));
      const auto ce = hn::And(c, e), bce = hn::And(b, hn::Or(c, e));
      const auto first = hn::IfThenElse(ce, code(2), hn::IfThenElseZero(bce, code(1)));
      const auto second = hn::IfThenElse(e, code(12), hn::IfThenElse(c, code(8), code(4)));
      StoreCodes(d, hn::Or(first, second), codes + n);
      hn::StoreInterleaved2(hn::IfThenElse(ce, v.c, hn::IfThenElse(bce, v.b, v.a)),
                            hn::IfThenElse(e, v.d, hn::IfThenElse(c, v.c, v.b)), d, to + 2 * n);
    }
  });
  return bad;
}

template <typename E, bool kAcross>
bool Look(const typename E::Bits* dense, std::int64_t pitch, std::int64_t groups) {
  using T = Lane<typename E::Bits>;
  const auto* const from = reinterpret_cast<const T*>(dense);
  bool bad = false;
  Each<T>(groups, [&](auto d, std::int64_t n) HWY_ATTR {
    const auto v = LoadGroups<kAcross>(d, from, pitch, n);
    const auto a = IsNonZero<E>(d, v.a), b = IsNonZero<E>(d, v.b);
    if constexpr (kGroup<T> == 2) {
      bad |= !hn::AllFalse(d, hn::And(a, b));
    } else {
      bad |= !hn::AllFalse(d, TooMany(a, b, IsNonZero<E>(d, v.c), IsNonZero<E>(d, v.d)));
    }
  });
  return bad;
}

/// Larger is larger in magnitude; all NaN are one.
template <typename E, class D>
HWY_INLINE hn::Vec<D> Key(D d, hn::Vec<D> v) {
  using T = hn::TFromD<D>;
  if constexpr (E::kUnsigned) {
    return hn::Xor(v, hn::Set(d, std::numeric_limits<T>::min()));
  } else if constexpr (E::kInteger) {  // −128 is its own negative, and 127 above all others after the subtraction
    return hn::Sub(hn::Abs(v), hn::Set(d, T{1}));
  } else {
    return hn::Min(hn::And(v, hn::Set(d, static_cast<T>(E::kMask))), hn::Set(d, static_cast<T>(E::kTop + 1)));
  }
}

template <typename E, bool kAcross>
void Prune(const typename E::Bits* dense, std::int64_t pitch, std::int64_t groups, typename E::Bits* out,
           std::int64_t out_pitch) {
  using T = Lane<typename E::Bits>;
  const auto* const from = reinterpret_cast<const T*>(dense);
  auto* const to = reinterpret_cast<T*>(out);
  Each<T>(groups, [&](auto d, std::int64_t n) HWY_ATTR {
    auto v = LoadGroups<kAcross>(d, from, pitch, n);
    const auto a = Key<E>(d, v.a), b = Key<E>(d, v.b);
    const auto ba = hn::Gt(b, a);  // a later one has to be larger to win
    if constexpr (kGroup<T> == 2) {
      v.a = hn::IfThenZeroElse(ba, v.a);
      v.b = hn::IfThenElseZero(ba, v.b);
    } else {  // one that loses to at most one other stays
      const auto c = Key<E>(d, v.c), e = Key<E>(d, v.d);
      const auto ca = hn::Gt(c, a), ea = hn::Gt(e, a), cb = hn::Gt(c, b), eb = hn::Gt(e, b), ec = hn::Gt(e, c);
      v.a = hn::IfThenZeroElse(Most(ba, ca, ea), v.a);
      v.b = hn::IfThenZeroElse(Most(hn::Not(ba), cb, eb), v.b);
      v.c = hn::IfThenZeroElse(Most(hn::Not(ca), hn::Not(cb), ec), v.c);
      v.d = hn::IfThenElseZero(Most(ea, eb, ec), v.d);
    }
    StoreGroups<kAcross>(d, v, to, out_pitch, n);
  });
}

template <typename Bits>
void Pick(const Bits* dense, const std::uint8_t* codes, std::int64_t groups, Bits* values) {
  using T = Lane<Bits>;
  const auto* const from = reinterpret_cast<const T*>(dense);
  auto* const to = reinterpret_cast<T*>(values);
  Each<T>(groups, [&](auto d, std::int64_t n) HWY_ATTR {
    const auto codes_here = LoadCodes(d, codes + n);
    const auto is = [&](int bits, int code) HWY_ATTR {
      return hn::Eq(hn::And(codes_here, hn::Set(d, static_cast<T>(bits))), hn::Set(d, static_cast<T>(code)));
    };
    if constexpr (kGroup<T> == 2) {
      hn::Vec<decltype(d)> x, y;
      hn::LoadInterleaved2(d, from + 2 * n, x, y);
      hn::StoreU(hn::IfThenElse(is(15, 0xE), y, x), d, to + n);
    } else {
      const auto v = LoadFour(d, from + 4 * n);
      const auto first = hn::IfThenElse(is(3, 0), v.a, hn::IfThenElse(is(3, 1), v.b, v.c));
      const auto second = hn::IfThenElse(is(12, 12), v.d, hn::IfThenElse(is(12, 8), v.c, v.b));
      hn::StoreInterleaved2(first, second, d, to + 2 * n);
    }
  });
}

template <typename Bits>
void Place(const Bits* values, const std::uint8_t* codes, std::int64_t groups, Bits* dense) {
  using T = Lane<Bits>;
  const auto* const from = reinterpret_cast<const T*>(values);
  auto* const to = reinterpret_cast<T*>(dense);
  Each<T>(groups, [&](auto d, std::int64_t n) HWY_ATTR {
    const auto codes_here = LoadCodes(d, codes + n);
    const auto is = [&](int bits, int code) HWY_ATTR {
      return hn::Eq(hn::And(codes_here, hn::Set(d, static_cast<T>(bits))), hn::Set(d, static_cast<T>(code)));
    };
    if constexpr (kGroup<T> == 2) {
      const auto v = hn::LoadU(d, from + n);
      const auto second = is(15, 0xE);
      hn::StoreInterleaved2(hn::IfThenZeroElse(second, v), hn::IfThenElseZero(second, v), d, to + 2 * n);
    } else {
      hn::Vec<decltype(d)> x, y;
      hn::LoadInterleaved2(d, from + 2 * n, x, y);
      hn::StoreInterleaved4(hn::IfThenElseZero(is(3, 0), x),
                            hn::IfThenElse(is(3, 1), x, hn::IfThenElseZero(is(12, 4), y)),
                            hn::IfThenElse(is(3, 2), x, hn::IfThenElseZero(is(12, 8), y)),
                            hn::IfThenElseZero(is(12, 12), y), d, to + 4 * n);
    }
  });
}

/// The size of an element as an integer, and as a number if it is one.
template <typename E, class D>
HWY_INLINE hn::Vec<hn::RebindToSigned<D>> SizeBits(D, hn::Vec<hn::Rebind<typename E::Bits, D>> v) {
  const hn::RebindToSigned<D> di;
  const hn::Rebind<typename E::Bits, D> db;
  if constexpr (E::kUnsigned) {
    return hn::PromoteTo(di, v);
  } else if constexpr (E::kInteger) {
    return hn::Abs(hn::PromoteTo(di, hn::BitCast(hn::RebindToSigned<decltype(db)>(), v)));
  } else if constexpr (sizeof(hn::TFromD<D>) == sizeof(typename E::Bits)) {
    return hn::BitCast(di, hn::And(v, hn::Set(db, E::kMask)));
  } else {
    return hn::PromoteTo(di, hn::And(v, hn::Set(db, E::kMask)));
  }
}
template <typename E, class D>
HWY_INLINE hn::Vec<D> Size(D d, hn::Vec<hn::RebindToSigned<D>> bits) {
  if constexpr (E::kInteger) {
    return hn::ConvertTo(d, bits);
  } else {
    const auto x = hn::BitCast(d, hn::ShiftLeft<E::kShift>(bits));
    return E::kExponent == 0 ? x : hn::Mul(x, hn::Set(d, static_cast<hn::TFromD<D>>(std::ldexp(1.0, E::kExponent))));
  }
}

template <typename Sum>
constexpr Sum kLargeSize = std::numeric_limits<Sum>::max() / 256;
template <typename Sum>
constexpr Sum kSmallSize = std::numeric_limits<Sum>::min() / std::numeric_limits<Sum>::epsilon();

/// Numbers of which 32 can be added: NaN above infinity above all others, and nothing but zero is zero. Their
/// differences are never subnormal, whatever the processor makes of those.
template <typename E, class D>
HWY_INLINE hn::Vec<D> Magnitude(D d, hn::Vec<hn::Rebind<typename E::Bits, D>> v) {
  using Sum = hn::TFromD<D>;
  const hn::RebindToSigned<D> di;
  const auto bits = SizeBits<E>(d, v);
  auto x = Size<E>(d, bits);
  if constexpr (!E::kInteger) {
    constexpr Sum kLarge = kLargeSize<Sum>;
    const auto top = hn::Set(di, static_cast<hn::TFromD<decltype(di)>>(E::kTop));
    x = hn::Min(hn::Max(x, hn::Set(d, kSmallSize<Sum>)), hn::Set(d, kLarge));
    if constexpr (E::kInfinite) {
      x = hn::IfThenElse(hn::RebindMask(d, hn::Eq(bits, top)), hn::Set(d, 2 * kLarge), x);
    }
    x = hn::IfThenElse(hn::RebindMask(d, hn::Gt(bits, top)), hn::Set(d, 4 * kLarge), x);
    x = hn::IfThenZeroElse(hn::RebindMask(d, hn::Eq(bits, hn::Zero(di))), x);
  }
  return x;
}

/// The sizes of squares of which no element is zero or needs anything else than its size; false if there is another.
template <typename E, class D, class V>
HWY_INLINE bool OrdinarySizes(D d, const V (&rows)[4], Four<D> (&sizes)[4]) {
  using Sum = hn::TFromD<D>;
  const hn::RebindToSigned<D> di;
  using Int = hn::TFromD<decltype(di)>;
  auto least = hn::Set(di, std::numeric_limits<Int>::max()), most = hn::Zero(di);  // of integers, as there may be NaN
  const auto size = [&](auto v) HWY_ATTR {
    const auto bits = SizeBits<E>(d, v);
    least = hn::Min(least, bits);
    most = hn::Max(most, bits);
    return Size<E>(d, bits);
  };
  for (int r = 0; r < 4; ++r) {
    sizes[r] = {size(rows[r].a), size(rows[r].b), size(rows[r].c), size(rows[r].d)};
  }
  const auto numbers = hn::Lt(most, hn::Set(di, static_cast<Int>(E::kTop + (E::kInfinite ? 0 : 1))));
  return hn::AllTrue(di, numbers) && hn::AllTrue(d, hn::And(hn::Ge(Size<E>(d, least), hn::Set(d, kSmallSize<Sum>)),
                                                            hn::Lt(Size<E>(d, most), hn::Set(d, kLargeSize<Sum>))));
}

/// By how much the first half of a row outweighs the second, for each way to halve it.
template <class D>
struct Contrasts {
  explicit HWY_INLINE Contrasts(const Four<D>& r) {
    const auto left = hn::Sub(r.a, r.b), right = hn::Sub(r.c, r.d);
    by[0] = hn::Sub(hn::Add(r.a, r.b), hn::Add(r.c, r.d));
    by[1] = hn::Add(left, right);
    by[2] = hn::Sub(left, right);
  }
  hn::Vec<D> by[3];
};

/// Of the ways to halve two rows, one and its opposite, the best: bits of both rows, where the first is to be larger.
template <class D>
struct Opposites {
  HWY_INLINE Opposites(D d, const hn::Vec<D> (&x)[3]) {
    const hn::RebindToSigned<D> di;
    using Int = hn::TFromD<decltype(di)>;
    const auto bits = [di](int n)
                          HWY_ATTR { return hn::Set(di, static_cast<Int>(kHalves[n] | (kHalves[n] ^ 15) << 4)); };
    size = hn::Abs(x[0]);
    auto sign = x[0];
    kept = bits(0);
    for (int n = 1; n < 3; ++n) {
      const auto more = hn::Gt(hn::Abs(x[n]), size);
      size = hn::IfThenElse(more, hn::Abs(x[n]), size);
      sign = hn::IfThenElse(more, x[n], sign);
      kept = hn::IfThenElse(hn::RebindMask(di, more), bits(n), kept);
    }
    kept = hn::Xor(kept, hn::And(hn::BroadcastSignBit(hn::BitCast(di, sign)), hn::Set(di, Int{0xff})));
    (void)d;
  }
  hn::Vec<D> size;
  hn::Vec<hn::RebindToSigned<D>> kept;
};

/// The best of the 90 masks that keep two of every row and column, four bits for each row. What a mask keeps less what
/// it drops is a sum of rows' contrasts, ± one each. Either both upper rows are halved in opposite ways, and both lower
/// ones; or the upper rows take ways m and n, in either order, and the lower ones the opposites, in either order: twice
/// the larger of two orders is their sum plus the size of their difference. Masks are compared in a fixed order.
template <class D>
HWY_INLINE hn::Vec<hn::RebindToSigned<D>> BestMask(D d, const Four<D> (&r)[4]) {
  const hn::RebindToSigned<D> di;
  using Int = hn::TFromD<decltype(di)>;
  const Contrasts<D> rows[4] = {Contrasts<D>(r[0]), Contrasts<D>(r[1]), Contrasts<D>(r[2]), Contrasts<D>(r[3])};
  hn::Vec<D> upper[3], lower[3], halves[3];  // row 0 less row 1, row 2 less row 3, the upper rows less the lower
  for (int n = 0; n < 3; ++n) {
    upper[n] = hn::Sub(rows[0].by[n], rows[1].by[n]);
    lower[n] = hn::Sub(rows[2].by[n], rows[3].by[n]);
    halves[n] = hn::Sub(hn::Add(rows[0].by[n], rows[1].by[n]), hn::Add(rows[2].by[n], rows[3].by[n]));
  }
  // Bits of both upper rows, above them of the same rows exchanged.
  const auto ways = [di](int m, int n)
                        HWY_ATTR { return hn::Set(di, static_cast<Int>((m | n << 4) * 257 ^ (m ^ n) * 0x1100)); };
  auto half = halves[0], up = upper[0], low = lower[0], best = hn::Add(hn::Abs(half), hn::Abs(half));
  auto kept = ways(kHalves[0], kHalves[0]);
  const auto consider = [&](auto h, auto u, auto l, auto size, auto bits) HWY_ATTR {
    const auto more = hn::Gt(size, best);
    best = hn::Max(best, size);
    half = hn::IfThenElse(more, h, half);
    up = hn::IfThenElse(more, u, up);
    low = hn::IfThenElse(more, l, low);
    kept = hn::IfThenElse(hn::RebindMask(di, more), bits, kept);
  };
  for (int n = 1; n < 3; ++n) {
    consider(halves[n], up, low, hn::Add(hn::Abs(halves[n]), hn::Abs(halves[n])), ways(kHalves[n], kHalves[n]));
  }
  for (int m = 0; m < 2; ++m) {
    for (int n = m + 1; n < 3; ++n) {
      const auto pair = [&](auto h, auto u, auto l, int other) HWY_ATTR {
        consider(h, u, l, hn::Add(hn::Abs(h), hn::Add(hn::Abs(u), hn::Abs(l))), ways(kHalves[m], other));
      };
      pair(hn::Add(halves[m], halves[n]), hn::Sub(upper[m], upper[n]), hn::Sub(lower[m], lower[n]), kHalves[n]);
      pair(hn::Sub(halves[m], halves[n]), hn::Add(upper[m], upper[n]), hn::Add(lower[m], lower[n]), kHalves[n] ^ 15);
    }
  }
  const auto bits = [di](int n) HWY_ATTR { return hn::Set(di, static_cast<Int>(n)); };
  const auto sign = hn::BitCast(di, half), other = hn::And(hn::Xor(kept, hn::ShiftRight<8>(kept)), bits(0xff));
  kept = hn::Xor(kept, hn::And(hn::BroadcastSignBit(hn::Xor(hn::BitCast(di, up), sign)), other));
  kept = hn::Xor(kept, hn::And(hn::BroadcastSignBit(hn::Xor(hn::BitCast(di, low), sign)), hn::ShiftLeft<8>(other)));
  kept = hn::Xor(kept, hn::Xor(hn::And(hn::BroadcastSignBit(sign), bits(0xffff)), bits(0xff00)));
  const Opposites<D> above(d, upper), below(d, lower);
  const auto size = hn::Add(above.size, below.size);
  return hn::IfThenElse(hn::RebindMask(di, hn::Gt(hn::Add(size, size), best)),
                        hn::Or(above.kept, hn::ShiftLeft<8>(below.kept)), kept);
}

/// Where a square has more than two non-zeros in a row or a column.
template <class D>
HWY_INLINE hn::Mask<D> NeedsMask(D d, const Four<D> (&r)[4]) {
  const auto over = [d](auto a, auto b, auto c, auto e) HWY_ATTR {
    const auto zero = hn::Zero(d);
    return TooMany(hn::Gt(a, zero), hn::Gt(b, zero), hn::Gt(c, zero), hn::Gt(e, zero));
  };
  const auto columns = hn::Or(hn::Or(over(r[0].a, r[1].a, r[2].a, r[3].a), over(r[0].b, r[1].b, r[2].b, r[3].b)),
                              hn::Or(over(r[0].c, r[1].c, r[2].c, r[3].c), over(r[0].d, r[1].d, r[2].d, r[3].d)));
  const auto row = [&](int n) HWY_ATTR { return over(r[n].a, r[n].b, r[n].c, r[n].d); };
  return hn::Or(columns, hn::Or(hn::Or(row(0), row(1)), hn::Or(row(2), row(3))));
}

template <typename E>
void Squares(const typename E::Bits* dense, std::int64_t pitch, std::int64_t groups, typename E::Bits* out,
             std::int64_t out_pitch) {
  using Bits = typename E::Bits;
  Each<typename E::Sum>(groups, [&](auto d, std::int64_t n) HWY_ATTR {
    using Tag = hn::Rebind<Bits, decltype(d)>;
    const Tag db;
    if constexpr (kGroup<Bits> == 2) {
      hn::Vec<Tag> a, b, c, e;
      hn::LoadInterleaved2(db, dense + 2 * n, a, b);
      hn::LoadInterleaved2(db, dense + pitch + 2 * n, c, e);
      const auto size = [d](auto v) HWY_ATTR { return Magnitude<E>(d, v); };
      const auto other = hn::RebindMask(db, hn::Gt(hn::Add(size(b), size(c)), hn::Add(size(a), size(e))));
      hn::StoreInterleaved2(hn::IfThenZeroElse(other, a), hn::IfThenElseZero(other, b), db, out + 2 * n);
      hn::StoreInterleaved2(hn::IfThenElseZero(other, c), hn::IfThenZeroElse(other, e), db, out + out_pitch + 2 * n);
    } else {
      Four<Tag> rows[4];
      Four<decltype(d)> sizes[4];
      for (int r = 0; r < 4; ++r) {
        rows[r] = LoadFour(db, dense + r * pitch + 4 * n);
      }
      const hn::RebindToSigned<decltype(d)> di;
      auto needs = hn::Eq(hn::Zero(di), hn::Zero(di));
      if (!OrdinarySizes<E>(d, rows, sizes)) {
        for (int r = 0; r < 4; ++r) {
          sizes[r] = {Magnitude<E>(d, rows[r].a), Magnitude<E>(d, rows[r].b), Magnitude<E>(d, rows[r].c),
                      Magnitude<E>(d, rows[r].d)};
        }
        needs = hn::RebindMask(di, NeedsMask(d, sizes));
      }
      auto kept = hn::BitCast(hn::RebindToUnsigned<decltype(d)>(),
                              hn::IfThenElse(needs, BestMask(d, sizes), hn::Set(di, 0xffff)));
      for (int r = 0; r < 4; ++r) {
        hn::Vec<Tag> bits;
        if constexpr (sizeof(Bits) == sizeof(typename E::Sum)) {
          bits = kept;
        } else {
          bits = hn::TruncateTo(db, kept);
        }
        const auto only = [&](Bits bit, auto v)
                              HWY_ATTR { return hn::IfThenElseZero(hn::TestBit(bits, hn::Set(db, bit)), v); };
        hn::StoreInterleaved4(only(1, rows[r].a), only(2, rows[r].b), only(4, rows[r].c), only(8, rows[r].d), db,
                              out + r * out_pitch + 4 * n);
        kept = hn::ShiftRight<4>(kept);
      }
    }
  });
}

template <typename E>
const GroupKernels<typename E::Bits>* Kernels() {
  using Bits = typename E::Bits;
  static constexpr GroupKernels<Bits> kernels{Compress<E>,    Look<E, false>, Look<E, true>, Prune<E, false>,
                                              Prune<E, true>, Pick<Bits>,     Place<Bits>,   Squares<E>};
  return &kernels;
}

const GroupKernels<std::uint8_t>* Bytes(DType dtype) {
  return dtype == DType::i8        ? Kernels<I8>()
         : dtype == DType::u8      ? Kernels<U8>()
         : dtype == DType::f8_e4m3 ? Kernels<F8E4m3>()
                                   : Kernels<F8E5m2>();
}
const GroupKernels<std::uint16_t>* Halves(DType dtype) {
  return dtype == DType::f16 ? Kernels<F16>() : Kernels<Bf16>();
}
const GroupKernels<std::uint32_t>* Words(DType) { return Kernels<F32>(); }
const GroupKernels<std::uint64_t>* Doubles(DType) { return Kernels<F64>(); }

void Pack(const std::uint8_t* codes, std::int64_t count, std::uint8_t* bytes) {
  for (std::int64_t n = 0; n < count / 2; ++n) {
    bytes[n] = static_cast<std::uint8_t>(codes[2 * n] | codes[2 * n + 1] << 4);
  }
}

void Unpack(const std::uint8_t* bytes, std::int64_t count, std::uint8_t* codes) {
  for (std::int64_t n = 0; n < count / 2; ++n) {
    codes[2 * n] = bytes[n] & 15;
    codes[2 * n + 1] = static_cast<std::uint8_t>(bytes[n] >> 4);
  }
}

}  // namespace fretwork::two_four::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fretwork::two_four {

HWY_EXPORT(Bytes);
HWY_EXPORT(Halves);
HWY_EXPORT(Words);
HWY_EXPORT(Doubles);
HWY_EXPORT(Pack);
HWY_EXPORT(Unpack);

template <typename T>
const GroupKernels<T>& group_kernels(DType dtype) {
  if constexpr (sizeof(T) == 1) {
    return *HWY_DYNAMIC_DISPATCH(Bytes)(dtype);
  } else if constexpr (sizeof(T) == 2) {
    return *HWY_DYNAMIC_DISPATCH(Halves)(dtype);
  } else if constexpr (sizeof(T) == 4) {
    return *HWY_DYNAMIC_DISPATCH(Words)(dtype);
  } else {
    return *HWY_DYNAMIC_DISPATCH(Doubles)(dtype);
  }
}
template const GroupKernels<std::uint8_t>& group_kernels(DType dtype);
template const GroupKernels<std::uint16_t>& group_kernels(DType dtype);
template const GroupKernels<std::uint32_t>& group_kernels(DType dtype);
template const GroupKernels<std::uint64_t>& group_kernels(DType dtype);

void pack_codes(const std::uint8_t* codes, std::int64_t count, std::uint8_t* bytes) {
  HWY_DYNAMIC_DISPATCH(Pack)(codes, count, bytes);
}
void unpack_codes(const std::uint8_t* bytes, std::int64_t count, std::uint8_t* codes) {
  HWY_DYNAMIC_DISPATCH(Unpack)(bytes, count, codes);
}

}  // namespace fretwork::two_four
#endif
