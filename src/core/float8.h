// Scalar conversions of the 8-bit floating types on the host.
#pragma once

#include <array>
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

/// All 256 of a type, for loops.
inline const std::array<float, 256>& floats_from_8(bool e4m3) {
  static const auto tables = [] {
    std::array<std::array<float, 256>, 2> both{};
    for (unsigned n = 0; n < 256; ++n) {
      both[0][n] = float_from_e5m2(static_cast<std::uint8_t>(n));
      both[1][n] = float_from_e4m3(static_cast<std::uint8_t>(n));
    }
    return both;
  }();
  return tables[e4m3 ? 1 : 0];
}

}  // namespace fretwork
