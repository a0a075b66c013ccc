// Scalar conversions of the 8-bit floating types on the host. To them they saturate.
#pragma once

#include <bit>
#include <cstdint>
#include <limits>

#include "core/half.h"

namespace fretwork {

/// The upper half of an f16.
inline float float_from_e5m2(std::uint8_t bits) { return float_from_f16(static_cast<std::uint16_t>(bits << 8)); }

/// As an f16 whose exponent is too small by 8; all ones are NaN, and there is no infinity.
inline float float_from_e4m3(std::uint8_t bits) {
  const unsigned rest = bits & 0x7fu;
  const float size = rest == 0x7fu ? std::numeric_limits<float>::quiet_NaN()
                                   : float_from_f16(static_cast<std::uint16_t>(rest << 7)) * 256.0f;
  return (bits & 0x80u) != 0 ? -size : size;
}

/// The bits of the nearest number with kMantissa bits behind the point, of equally near ones the even one, and at most
/// kTop, the bits of the largest. kBias is its exponent's; NaN stays one.
template <int kMantissa, int kBias, std::uint8_t kTop>
std::uint8_t float8_from_float(float x) {
  constexpr int kCut = 23 - kMantissa;
  constexpr std::uint32_t kOffset = std::uint32_t{127 - kBias} << 23, kLeast = kOffset + (1u << 23);
  constexpr auto kLargest = static_cast<std::uint32_t>(kTop) << kCut;
  const auto bits = std::bit_cast<std::uint32_t>(x);
  const std::uint32_t sign = bits >> 24 & 0x80u, rest = bits & 0x7fffffffu;
  if (rest > 0x7f800000u) {
    return 0x7f;
  }
  if (rest >= kLargest + kOffset) {
    return static_cast<std::uint8_t>(sign | kTop);
  }
  if (rest <
      kLeast) {  // adding a number whose last bit is a step leaves the multiple of steps in the low bits, rounded
    constexpr std::uint32_t kStep = std::uint32_t{127 + 24 - kBias - kMantissa} << 23;
    const float added = std::bit_cast<float>(rest) + std::bit_cast<float>(kStep);
    return static_cast<std::uint8_t>(sign | (std::bit_cast<std::uint32_t>(added) - kStep));
  }
  return static_cast<std::uint8_t>(sign | ((rest + ((1u << (kCut - 1)) - 1) + (rest >> kCut & 1u)) - kOffset) >> kCut);
}

inline std::uint8_t e4m3_from_float(float x) { return float8_from_float<3, 7, 0x7e>(x); }
inline std::uint8_t e5m2_from_float(float x) { return float8_from_float<2, 15, 0x7b>(x); }

}  // namespace fretwork
