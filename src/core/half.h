// Scalar conversions of the 16-bit types on the host, rounding to nearest even. Vectors have their own in each op.
#pragma once

#include <bit>
#include <cstdint>

namespace fretwork {

inline float float_from_bf16(std::uint16_t bits) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
}

inline std::uint16_t bf16_from_float(float x) {
  const auto bits = std::bit_cast<std::uint32_t>(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) {
    return static_cast<std::uint16_t>(bits >> 16 | 0x40u);  // a NaN stays one
  }
  return static_cast<std::uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

inline float float_from_f16(std::uint16_t bits) {
  const std::uint32_t sign = static_cast<std::uint32_t>(bits & 0x8000u) << 16;
  const std::uint32_t rest = bits & 0x7fffu;
  if (rest >= 0x7c00u) {
    return std::bit_cast<float>(sign | 0x7f800000u | (rest & 0x3ffu) << 13);
  }
  // The exponent's bias moves from 15 to 127. Subnormals are multiples of 2^-24: no fp32 subnormal is met on the way,
  // which a process that flushes them to zero would lose.
  const std::uint32_t size =
      rest < 0x400u ? std::bit_cast<std::uint32_t>(static_cast<float>(rest) * 0x1.0p-24f) : (rest << 13) + (112u << 23);
  return std::bit_cast<float>(size | sign);
}

inline std::uint16_t f16_from_float(float x) {
  const auto bits = std::bit_cast<std::uint32_t>(x);
  const auto sign = static_cast<std::uint16_t>(bits >> 16 & 0x8000u);
  const std::uint32_t rest = bits & 0x7fffffffu;
  if (rest > 0x7f800000u) {
    return static_cast<std::uint16_t>(sign | 0x7e00u);
  }
  if (rest >= 0x477ff000u) {  // 65520 and above round to infinity
    return static_cast<std::uint16_t>(sign | 0x7c00u);
  }
  if (rest < 0x38800000u) {  // below 2^-14: adding 0.5 leaves the multiple of 2^-24 in the low bits, rounded
    return static_cast<std::uint16_t>(sign |
                                      (std::bit_cast<std::uint32_t>(std::bit_cast<float>(rest) + 0.5f) - 0x3f000000u));
  }
  return static_cast<std::uint16_t>(sign | ((rest + 0xfffu + (rest >> 13 & 1u)) - 0x38000000u) >> 13);
}

}  // namespace fretwork
