// Element types and conversions. Device code includes no CUDA header: 16-bit types are bits, conversions are PTX.
#pragma once

namespace fretwork {

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i8 = signed char;
using i64 = long long;

struct f16 {
  u16 bits;
};
struct bf16 {
  u16 bits;
};
struct f8_e4m3 {
  u8 bits;
};
struct f8_e5m2 {
  u8 bits;
};

template <typename A, typename B>
inline constexpr bool is_same = false;
template <typename A>
inline constexpr bool is_same<A, A> = true;

/// What products of T accumulate in.
template <typename T>
struct accumulator {
  using type = float;
};
template <>
struct accumulator<double> {
  using type = double;
};
template <>
struct accumulator<i8> {
  using type = int;
};
template <>
struct accumulator<u8> {
  using type = int;
};
template <typename T>
using accumulator_t = typename accumulator<T>::type;

__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ double widen(double x) { return x; }
__device__ __forceinline__ float widen(bool x) { return x ? 1.0f : 0.0f; }
__device__ __forceinline__ float widen(f16 x) {
  float wide;
  asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(x.bits));
  return wide;
}
__device__ __forceinline__ float widen(bf16 x) { return __uint_as_float(static_cast<u32>(x.bits) << 16); }

/// The upper half of an f16.
__device__ __forceinline__ float widen(f8_e5m2 x) { return widen(f16{static_cast<u16>(x.bits << 8)}); }
/// As an f16 whose exponent is too small by 8; all ones are NaN, and there is no infinity.
__device__ __forceinline__ float widen(f8_e4m3 x) {
  const u32 rest = x.bits & 0x7fu;
  const float size = rest == 0x7fu ? __uint_as_float(0x7fc00000u) : widen(f16{static_cast<u16>(rest << 7)}) * 256.0f;
  return x.bits & 0x80u ? -size : size;
}

/// FRETWORK_BEFORE_SM80 is defined where kernels are chosen for a GPU before sm_80: its instructions are then done
/// without.
#ifdef FRETWORK_BEFORE_SM80
__device__ __forceinline__ u16 bf16_bits(float x) {
  const u32 bits = __float_as_uint(x);
  return x != x ? u16{0x7fff} : static_cast<u16>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}
#else
__device__ __forceinline__ u16 bf16_bits(float x) {
  u16 bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
  return bits;
}
#endif

/// Two neighbours in 16 bits, `low` first in memory: f8_e4m3 or f8_e5m2, rounded to nearest even and saturated.
template <typename T>
__device__ __forceinline__ u32 narrow_pair_8(float low, float high) {
  constexpr bool kE4m3 = is_same<T, f8_e4m3>;
#if __CUDA_ARCH__ >= 890
  u16 pair;
  if constexpr (kE4m3) {
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  }
  return pair;
#else
  constexpr int kMantissa = kE4m3 ? 3 : 2, kBias = kE4m3 ? 7 : 15, kCut = 23 - kMantissa;
  constexpr u32 kTop = kE4m3 ? 0x7e : 0x7b, kOffset = (127u - kBias) << 23, kLeast = kOffset + (1u << 23);
  constexpr u32 kStep = (127u + 24 - kBias - kMantissa) << 23;  // a number whose last bit is a subnormal's
  u32 pair = 0;
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    const u32 bits = __float_as_uint(n == 0 ? low : high), rest = bits & 0x7fffffffu;
    const u32 small = __float_as_uint(__uint_as_float(rest) + __uint_as_float(kStep)) - kStep;
    const u32 normal = (rest + ((1u << (kCut - 1)) - 1u) + (rest >> kCut & 1u) - kOffset) >> kCut;
    const u32 size = rest >= (kTop << kCut) + kOffset ? kTop : rest < kLeast ? small : normal;
    pair |= (rest > 0x7f800000u ? 0x7fu : size | (bits >> 24 & 0x80u)) << 8 * n;
  }
  return pair;
#endif
}

/// Rounds to nearest even; integers of 8 bits and fp8 are saturated.
template <typename T, typename From>
__device__ __forceinline__ T narrow(From x) {
  if constexpr (is_same<T, f16>) {
    f16 r;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(r.bits) : "f"(static_cast<float>(x)));
    return r;
  } else if constexpr (is_same<T, bf16>) {
    return bf16{bf16_bits(static_cast<float>(x))};
  } else if constexpr (is_same<T, f8_e4m3> || is_same<T, f8_e5m2>) {
    return {static_cast<u8>(narrow_pair_8<T>(static_cast<float>(x), 0.0f))};
  } else if constexpr (is_same<T, i8>) {
    return static_cast<i8>(max(-128, min(127, __float2int_rn(static_cast<float>(x)))));
  } else {
    return static_cast<T>(x);
  }
}

__device__ __forceinline__ u32 shared_address(const void* p) { return static_cast<u32>(__cvta_generic_to_shared(p)); }

/// Two neighbours in one register, `low` first in memory.
template <typename T>
__device__ __forceinline__ u32 narrow_pair(float low, float high) {
#ifdef FRETWORK_BEFORE_SM80
  return static_cast<u32>(narrow<T>(high).bits) << 16 | narrow<T>(low).bits;
#else
  u32 pair;
  if constexpr (is_same<T, f16>) {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  }
  return pair;
#endif
}

}  // namespace fretwork
