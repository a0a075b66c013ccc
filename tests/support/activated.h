// What the tests compare activated results with.
#pragma once

#include <cmath>

#include "fretwork/ops.h"

namespace fretwork {

inline double activated(Activation activation, double v) {
  switch (activation) {
    case Activation::relu:
      return v < 0 ? 0.0 : v;  // NaN stays
    case Activation::gelu:
      return 0.5 * v * std::erfc(-v / std::sqrt(2.0));  // 1 + erf would cancel in the tail
    case Activation::silu:
      return v / (1 + std::exp(-v));
    case Activation::none:
      break;
  }
  return v;
}

}  // namespace fretwork
