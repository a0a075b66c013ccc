// Scalar conversions of the 8-bit floating types on the host.
#pragma once

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

}  // namespace fretwork
