// Runs of 2:4 groups on Highway: compiled once per instruction set, chosen at run time. Vectors hold the same element
// of neighbouring groups, so that what is decided for a group is decided in every lane at once.
#include "ops/two_four/cpu_groups.h"

#include <algorithm>
#include <array>
#include <bit>
#include <limits>
#include <type_traits>

// Arrays of vectors need types of a known size. The last two would add nothing here.
#define HWY_DISABLED_TARGETS (HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV | HWY_SSSE3 | HWY_AVX3_DL)
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/two_four/cpu_groups.cpp"
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
  static constexpr bool kInfinite = infinite, kInteger = integer;
  static constexpr int kShift = shift, kExponent = exponent;
};
using F64 = Element<std::uint64_t, double, 0x7ff0'0000'0000'0000, true, 0, 0>;
using F32 = Element<std::uint32_t, float, 0x7f80'0000, true, 0, 0>;
using F16 = Element<std::uint16_t, float, 0x7c00, true, 13, 112>;
using Bf16 = Element<std::uint16_t, float, 0x7f80, true, 16, 0>;
using F8E4m3 = Element<std::uint8_t, float, 0x7e, false, 20, 120>;
using F8E5m2 = Element<std::uint8_t, float, 0x7c, true, 21, 112>;
using I8 = Element<std::uint8_t, float, 0xff, false, 0, 0, true>;

/// A number of which eight can be added: NaN above infinity above all others, and nothing but zero is zero, whatever
/// the processor makes of subnormals.
template <typename E>
typename E::Sum magnitude(typename E::Bits bits) {
  using Sum = typename E::Sum;
  using Wide = std::conditional_t<sizeof(Sum) == 8, std::uint64_t, std::uint32_t>;
  if constexpr (E::kInteger) {
    return static_cast<Sum>(std::abs(static_cast<int>(static_cast<std::int8_t>(bits))));
  } else {
    constexpr Sum kLarge = std::numeric_limits<Sum>::max() / 64, kSmall = std::numeric_limits<Sum>::min();
    constexpr Sum kScale =
        std::bit_cast<Sum>(static_cast<Wide>(E::kExponent + std::numeric_limits<Sum>::max_exponent - 1)
                           << (std::numeric_limits<Sum>::digits - 1));
    const auto key = static_cast<Wide>(bits & E::kMask);
    const Sum x = std::bit_cast<Sum>(key << E::kShift) * kScale;
    const Sum finite = x > kLarge ? kLarge : x > kSmall ? x : kSmall;
    const Sum large = E::kInfinite && key == E::kTop ? 2 * kLarge : finite;
    return key == 0 ? Sum{0} : key > E::kTop ? 4 * kLarge : large;
  }
}

/// The six ways to keep two of four, as bits; way 5 − n keeps what way n does not.
constexpr std::array<std::uint8_t, 6> kPairs{0b0011, 0b0101, 0b1001, 0b0110, 0b1010, 0b1100};

/// Which way each row of a square goes, for the 90 masks that keep two of every row and every column.
constexpr auto kMasks = [] {
  std::array<std::array<std::uint8_t, 4>, 90> masks{};
  std::size_t count = 0;
  const auto twice = [](int n) {
    const std::uint8_t w[] = {kPairs[n % 6], kPairs[n / 6 % 6], kPairs[n / 36 % 6], kPairs[n / 216]};
    for (int c = 0; c < 4; ++c) {
      if ((w[0] >> c & 1) + (w[1] >> c & 1) + (w[2] >> c & 1) + (w[3] >> c & 1) != 2) {
        return false;
      }
    }
    return true;
  };
  for (int n = 0; n < 6 * 6 * 6 * 6; ++n) {
    if (twice(n)) {
      masks[count++] = {static_cast<std::uint8_t>(n % 6), static_cast<std::uint8_t>(n / 6 % 6),
                        static_cast<std::uint8_t>(n / 36 % 6), static_cast<std::uint8_t>(n / 216)};
    }
  }
  return masks;
}();

/// What each row of a square keeps; the last one is a square that has few enough non-zeros and keeps them all.
constexpr int kAll = 90;
constexpr auto kKept = [] {
  std::array<std::array<std::uint8_t, 4>, 91> kept{};
  for (std::size_t n = 0; n < kMasks.size(); ++n) {
    for (std::size_t r = 0; r < 4; ++r) {
      kept[n][r] = kPairs[kMasks[n][r]];
    }
  }
  kept[kAll] = {15, 15, 15, 15};
  return kept;
}();

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

template <typename E>
bool Encode(const typename E::Bits* dense, std::int64_t groups, std::uint8_t* codes) {
  using T = Lane<typename E::Bits>;
  const auto* const from = reinterpret_cast<const T*>(dense);
  bool bad = false;
  Each<T>(groups, [&](auto d, std::int64_t n) HWY_ATTR {
    const auto is = [d](auto v)
                        HWY_ATTR { return hn::Ne(hn::And(v, hn::Set(d, static_cast<T>(E::kMask))), hn::Zero(d)); };
    const auto code = [d](int c) HWY_ATTR { return hn::Set(d, static_cast<T>(c)); };
    if constexpr (kGroup<T> == 2) {
      hn::Vec<decltype(d)> x, y;
      hn::LoadInterleaved2(d, from + 2 * n, x, y);
      const auto a = is(x), b = is(y);
      bad |= !hn::AllFalse(d, hn::And(a, b));
      StoreCodes(d, hn::IfThenElse(b, code(0xE), code(4)), codes + n);
    } else {
      const auto v = LoadFour(d, from + 4 * n);
      const auto a = is(v.a), b = is(v.b), c = is(v.c), e = is(v.d);
      bad |= !hn::AllFalse(d, TooMany(a, b, c, e));
      const auto second = hn::IfThenElse(e, code(12), hn::IfThenElse(c, code(8), code(4)));
      const auto first = hn::IfThenElse(hn::And(c, e), code(2), hn::IfThenElseZero(hn::And(b, hn::Or(c, e)), code(1)));
      StoreCodes(d, hn::Or(first, second), codes + n);
    }
  });
  return bad;
}

/// Larger is larger in magnitude; all NaN are one.
template <typename E, class D>
HWY_INLINE hn::Vec<D> Key(D d, hn::Vec<D> v) {
  using T = hn::TFromD<D>;
  if constexpr (E::kInteger) {  // −128 is its own negative, and 127 above all others after the subtraction
    return hn::Sub(hn::Abs(v), hn::Set(d, T{1}));
  } else {
    return hn::Min(hn::And(v, hn::Set(d, static_cast<T>(E::kMask))), hn::Set(d, static_cast<T>(E::kTop + 1)));
  }
}

template <typename E>
void Prune(const typename E::Bits* dense, std::int64_t groups, typename E::Bits* out) {
  using T = Lane<typename E::Bits>;
  const auto* const from = reinterpret_cast<const T*>(dense);
  auto* const to = reinterpret_cast<T*>(out);
  Each<T>(groups, [&](auto d, std::int64_t n) HWY_ATTR {
    if constexpr (kGroup<T> == 2) {
      hn::Vec<decltype(d)> x, y;
      hn::LoadInterleaved2(d, from + 2 * n, x, y);
      const auto second = hn::Gt(Key<E>(d, y), Key<E>(d, x));
      hn::StoreInterleaved2(hn::IfThenZeroElse(second, x), hn::IfThenElseZero(second, y), d, to + 2 * n);
    } else {
      const auto v = LoadFour(d, from + 4 * n);
      const auto a = Key<E>(d, v.a), b = Key<E>(d, v.b), c = Key<E>(d, v.c), e = Key<E>(d, v.d);
      // One that loses to at most one other stays; a later one has to be larger to win.
      const auto ba = hn::Gt(b, a), ca = hn::Gt(c, a), ea = hn::Gt(e, a);
      const auto cb = hn::Gt(c, b), eb = hn::Gt(e, b), ec = hn::Gt(e, c);
      hn::StoreInterleaved4(hn::IfThenZeroElse(Most(ba, ca, ea), v.a),
                            hn::IfThenZeroElse(Most(hn::Not(ba), cb, eb), v.b),
                            hn::IfThenZeroElse(Most(hn::Not(ca), hn::Not(cb), ec), v.c),
                            hn::IfThenElseZero(Most(ea, eb, ec), v.d), d, to + 4 * n);
    }
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

/// What `kept` has a bit for stays, the rest becomes zero.
template <typename Bits>
void Keep(const Bits* dense, const std::uint8_t* kept, std::int64_t groups, Bits* out) {
  using T = Lane<Bits>;
  const auto* const from = reinterpret_cast<const T*>(dense);
  auto* const to = reinterpret_cast<T*>(out);
  Each<T>(groups, [&](auto d, std::int64_t n) HWY_ATTR {
    const auto bits = LoadCodes(d, kept + n);
    const auto only = [&](int bit, auto v) HWY_ATTR {
      return hn::IfThenElseZero(hn::TestBit(bits, hn::Set(d, static_cast<T>(bit))), v);
    };
    if constexpr (kGroup<T> == 2) {
      hn::Vec<decltype(d)> x, y;
      hn::LoadInterleaved2(d, from + 2 * n, x, y);
      hn::StoreInterleaved2(only(1, x), only(2, y), d, to + 2 * n);
    } else {
      const auto v = LoadFour(d, from + 4 * n);
      hn::StoreInterleaved4(only(1, v.a), only(2, v.b), only(4, v.c), only(8, v.d), d, to + 4 * n);
    }
  });
}

/// The best of the 90 masks for each square of a vector, rows `pitch` numbers apart; kAll where none is needed.
template <class D>
HWY_INLINE void BestMasks(D d, const hn::TFromD<D>* rows, std::int64_t pitch, hwy::MakeSigned<hn::TFromD<D>>* which) {
  const hn::RebindToSigned<D> di;
  using V = hn::Vec<D>;
  Four<D> r[4];
  V pairs[4][6], upper[36], lower[36];
  for (int n = 0; n < 4; ++n) {
    r[n] = LoadFour(d, rows + n * pitch);
    const auto& [a, b, c, e] = r[n];
    pairs[n][0] = hn::Add(a, b);
    pairs[n][1] = hn::Add(a, c);
    pairs[n][2] = hn::Add(a, e);
    pairs[n][3] = hn::Add(b, c);
    pairs[n][4] = hn::Add(b, e);
    pairs[n][5] = hn::Add(c, e);
  }
  for (int n = 0; n < 36; ++n) {
    upper[n] = hn::Add(pairs[0][n / 6], pairs[1][n % 6]);
    lower[n] = hn::Add(pairs[2][n / 6], pairs[3][n % 6]);
  }
  V best = hn::Set(d, -1);
  auto index = hn::Zero(di);
  for (int n = 0; n < 90; ++n) {
    const auto& mask = kMasks[static_cast<std::size_t>(n)];
    const V sum = hn::Add(upper[mask[0] * 6 + mask[1]], lower[mask[2] * 6 + mask[3]]);
    const auto better = hn::Gt(sum, best);
    best = hn::Max(sum, best);
    index = hn::IfThenElse(hn::RebindMask(di, better), hn::Set(di, static_cast<hn::TFromD<decltype(di)>>(n)), index);
  }
  const auto is = [&](V v) HWY_ATTR { return hn::Gt(v, hn::Zero(d)); };
  const auto over = [&](V a, V b, V c, V e) HWY_ATTR { return TooMany(is(a), is(b), is(c), is(e)); };
  auto any = hn::Or(over(r[0].a, r[1].a, r[2].a, r[3].a), over(r[0].b, r[1].b, r[2].b, r[3].b));
  any = hn::Or(any, hn::Or(over(r[0].c, r[1].c, r[2].c, r[3].c), over(r[0].d, r[1].d, r[2].d, r[3].d)));
  for (const auto& [a, b, c, e] : r) {
    any = hn::Or(any, over(a, b, c, e));
  }
  hn::StoreU(hn::IfThenElse(hn::RebindMask(di, any), index, hn::Set(di, kAll)), di, which);
}

template <typename E>
void Squares(const typename E::Bits* dense, std::int64_t pitch, std::int64_t groups, typename E::Bits* out,
             std::int64_t out_pitch) {
  using Sum = typename E::Sum;
  constexpr std::int64_t kSide = kGroup<typename E::Bits>, kRun = 64;
  const hn::ScalableTag<Sum> d;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  HWY_ALIGN Sum sizes[kSide * kSide * kRun];
  HWY_ALIGN hwy::MakeSigned<Sum> which[kRun];
  std::uint8_t kept[kSide][kRun];
  for (std::int64_t begin = 0; begin < groups; begin += kRun) {
    const std::int64_t run = std::min(kRun, groups - begin);
    for (std::int64_t r = 0; r < kSide; ++r) {
      const auto* const from = dense + r * pitch + begin * kSide;
      Sum* const to = sizes + r * kSide * kRun;
      for (std::int64_t n = 0; n < run * kSide; ++n) {
        to[n] = magnitude<E>(from[n]);
      }
      std::fill(to + run * kSide, to + kSide * kRun, Sum{0});
    }
    if constexpr (kSide == 2) {
      for (std::int64_t n = 0; n < run; ++n) {
        const Sum *const x = sizes + 2 * n, *const y = x + kSide * kRun;
        kept[0][n] = x[0] + y[1] >= x[1] + y[0] ? 1 : 2;
        kept[1][n] = static_cast<std::uint8_t>(3 - kept[0][n]);
      }
    } else {
      for (std::int64_t n = 0; n < run; n += lanes) {
        BestMasks(d, sizes + n * kSide, kSide * kRun, which + n);
      }
      for (std::int64_t n = 0; n < run; ++n) {
        for (std::int64_t r = 0; r < kSide; ++r) {
          kept[r][n] = kKept[static_cast<std::size_t>(which[n])][static_cast<std::size_t>(r)];
        }
      }
    }
    for (std::int64_t r = 0; r < kSide; ++r) {
      Keep(dense + r * pitch + begin * kSide, kept[r], run, out + r * out_pitch + begin * kSide);
    }
  }
}

template <typename E>
const GroupKernels<typename E::Bits>* Kernels() {
  using Bits = typename E::Bits;
  static constexpr GroupKernels<Bits> kernels{Encode<E>, Prune<E>, Pick<Bits>, Place<Bits>, Squares<E>};
  return &kernels;
}

const GroupKernels<std::uint8_t>* Bytes(DType dtype) {
  return dtype == DType::i8 ? Kernels<I8>() : dtype == DType::f8_e4m3 ? Kernels<F8E4m3>() : Kernels<F8E5m2>();
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

template <>
const GroupKernels<std::uint8_t>& group_kernels(DType dtype) {
  return *HWY_DYNAMIC_DISPATCH(Bytes)(dtype);
}
template <>
const GroupKernels<std::uint16_t>& group_kernels(DType dtype) {
  return *HWY_DYNAMIC_DISPATCH(Halves)(dtype);
}
template <>
const GroupKernels<std::uint32_t>& group_kernels(DType dtype) {
  return *HWY_DYNAMIC_DISPATCH(Words)(dtype);
}
template <>
const GroupKernels<std::uint64_t>& group_kernels(DType dtype) {
  return *HWY_DYNAMIC_DISPATCH(Doubles)(dtype);
}

void pack_codes(const std::uint8_t* codes, std::int64_t count, std::uint8_t* bytes) {
  HWY_DYNAMIC_DISPATCH(Pack)(codes, count, bytes);
}
void unpack_codes(const std::uint8_t* bytes, std::int64_t count, std::uint8_t* codes) {
  HWY_DYNAMIC_DISPATCH(Unpack)(bytes, count, codes);
}

}  // namespace fretwork::two_four
#endif
