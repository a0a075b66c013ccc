// One element of a tensor on the host, whatever its type: read wide, written rounded once. For places that are asked
// one at a time; loops over many have the type outside.
#pragma once

#include <cstdint>

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
    default:
      return static_cast<const std::uint8_t*>(data)[at] != 0 ? Wide{1} : Wide{0};
  }
}

/// The same for writing f64, f32, f16, bf16 and boolean data; what is not 0 is true.
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
      static_cast<std::uint16_t*>(data)[at] = f16_from_float(static_cast<float>(x));
      break;
    case DType::bf16:
      static_cast<std::uint16_t*>(data)[at] = bf16_from_float(static_cast<float>(x));
      break;
    default:
      static_cast<std::uint8_t*>(data)[at] = x != Wide{0} ? 1 : 0;
  }
}

}  // namespace fretwork
