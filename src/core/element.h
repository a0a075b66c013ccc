// One element of a tensor on the host, whatever its type: read wide, written rounded once. For places that are asked
// one at a time; loops over many have the type outside.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

#include "core/float8.h"
#include "core/half.h"
#include "fretwork/tensor.h"

namespace fretwork {

/// Element `at` of data of any type; true is 1.
template <typename Wide>
Wide read_element(const void* data, DType dtype, std::int64_t at) {
  switch (dtype) {
    case DType::f64:
      return static_cast<Wide>(static_cast<const double*>(data)[at]);
    case DType::f32:
      return static_cast<Wide>(static_cast<const float*>(data)[at]);
    case DType::f16:
      return static_cast<Wide>(float_from_f16(static_cast<const std::uint16_t*>(data)[at]));
    case DType::bf16:
      return static_cast<Wide>(float_from_bf16(static_cast<const std::uint16_t*>(data)[at]));
    case DType::f8_e4m3:
      return static_cast<Wide>(float_from_e4m3(static_cast<const std::uint8_t*>(data)[at]));
    case DType::f8_e5m2:
      return static_cast<Wide>(float_from_e5m2(static_cast<const std::uint8_t*>(data)[at]));
    case DType::i8:
      return static_cast<Wide>(static_cast<const std::int8_t*>(data)[at]);
    case DType::i16:
      return static_cast<Wide>(static_cast<const std::int16_t*>(data)[at]);
    case DType::i32:
      return static_cast<Wide>(static_cast<const std::int32_t*>(data)[at]);
    case DType::u8:
      return static_cast<Wide>(static_cast<const std::uint8_t*>(data)[at]);
    case DType::u16:
      return static_cast<Wide>(static_cast<const std::uint16_t*>(data)[at]);
    case DType::u32:
      return static_cast<Wide>(static_cast<const std::uint32_t*>(data)[at]);
    default:
      return static_cast<const std::uint8_t*>(data)[at] != 0 ? Wide{1} : Wide{0};
  }
}

/// A float that every narrower type rounds as it would round x: the one of its two neighbours whose last bit is set.
inline float to_odd(double x) {
  const auto near = static_cast<float>(x);
  if (static_cast<double>(near) == x || !std::isfinite(near) || (std::bit_cast<std::uint32_t>(near) & 1u) != 0) {
    return near;
  }
  return std::nextafter(near, x > static_cast<double>(near) ? std::numeric_limits<float>::infinity()
                                                            : -std::numeric_limits<float>::infinity());
}
inline float to_odd(float x) { return x; }

/// The nearest integer of a type, of two the even one, and its range's end for what is outside; 0 for NaN.
template <typename Integer, typename Wide>
Integer nearest_integer(Wide x) {
  using Limits = std::numeric_limits<Integer>;
  const double nearest =
      std::clamp(std::nearbyint(static_cast<double>(x)), double{Limits::min()}, double{Limits::max()});
  return std::isnan(x) ? Integer{0} : static_cast<Integer>(nearest);
}

/// The same for writing floating data, i8, i32 and boolean ones: rounded once, to nearest even. 8-bit types and
/// integers are saturated; what is not 0 is true.
template <typename Wide>
void write_element(void* data, DType dtype, std::int64_t at, Wide x) {
  switch (dtype) {
    case DType::f64:
      static_cast<double*>(data)[at] = static_cast<double>(x);
      break;
    case DType::f32:
      static_cast<float*>(data)[at] = static_cast<float>(x);
      break;
    case DType::f16:
      static_cast<std::uint16_t*>(data)[at] = f16_from_float(to_odd(x));
      break;
    case DType::bf16:
      static_cast<std::uint16_t*>(data)[at] = bf16_from_float(to_odd(x));
      break;
    case DType::f8_e4m3:
      static_cast<std::uint8_t*>(data)[at] = e4m3_from_float(to_odd(x));
      break;
    case DType::f8_e5m2:
      static_cast<std::uint8_t*>(data)[at] = e5m2_from_float(to_odd(x));
      break;
    case DType::i8:
      static_cast<std::int8_t*>(data)[at] = nearest_integer<std::int8_t>(x);
      break;
    case DType::i32:
      static_cast<std::int32_t*>(data)[at] = nearest_integer<std::int32_t>(x);
      break;
    default:
      static_cast<std::uint8_t*>(data)[at] = x != Wide{0} ? 1 : 0;
  }
}

}  // namespace fretwork
