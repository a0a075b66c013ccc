// What rounding to a 2:4 product's result may do, for tests that compare with exact numbers.
#pragma once

#include <algorithm>

#include "fretwork/tensor.h"

namespace fretwork {

/// By how much a result may be off: relative to it, and that of numbers near zero (or everywhere, for i8).
struct Rounding {
  double last, step;
};
inline Rounding rounding_of(DType out) {
  switch (out) {
    case DType::f16:
      return {0x1p-11, 0x1p-24};
    case DType::bf16:
      return {0x1p-8, 0};
    case DType::f32:
      return {6e-8, 0};
    case DType::f8_e4m3:
      return {0x1p-4, 0x1p-10};
    case DType::f8_e5m2:
      return {0x1p-3, 0x1p-17};
    case DType::i8:
      return {0, 0.5};
    default:
      return {0, 0};
  }
}

/// What 8 bits hold of a number; others as they are.
inline double saturated(DType out, double x) {
  switch (out) {
    case DType::i8:
      return std::clamp(x, -128.0, 127.0);
    case DType::f8_e4m3:
      return std::clamp(x, -448.0, 448.0);
    case DType::f8_e5m2:
      return std::clamp(x, -57344.0, 57344.0);
    default:
      return x;
  }
}

}  // namespace fretwork
