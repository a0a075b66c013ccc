// The gradient of the weights on the CPU, plainly.
#include <cmath>

#include "core/half.h"
#include "ops/kronecker/problem.h"

namespace fretwork::kronecker::cpu {
namespace {

double read(const void* data, DType dtype, std::int64_t at) {
  switch (dtype) {
    case DType::f64:
      return static_cast<const double*>(data)[at];
    case DType::f32:
      return static_cast<const float*>(data)[at];
    case DType::f16:
      return float_from_f16(static_cast<const std::uint16_t*>(data)[at]);
    default:
      return float_from_bf16(static_cast<const std::uint16_t*>(data)[at]);
  }
}

void write(void* data, DType dtype, std::int64_t at, double value) {
  switch (dtype) {
    case DType::f64:
      static_cast<double*>(data)[at] = value;
      break;
    case DType::f32:
      static_cast<float*>(data)[at] = static_cast<float>(value);
      break;
    case DType::f16:
      static_cast<std::uint16_t*>(data)[at] = f16_from_float(static_cast<float>(value));
      break;
    default:
      static_cast<std::uint16_t*>(data)[at] = bf16_from_float(static_cast<float>(value));
  }
}

}  // namespace

void run(const WeightProblem& p, Context& context) {
  const auto s = p.sizes;
  context.executor->parallel_for(s.a * s.b, 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t ij = begin; ij < end; ++ij) {
      const std::int64_t i = ij / s.b, j = ij % s.b;
      for (std::int64_t l = 0; l < s.d; ++l) {
        const std::int64_t out = (i * s.b + j) * s.d + l;
        double total = 0;
        for (std::int64_t n = 0; n < p.batch; ++n) {
          total += read(p.d_y.data, p.dtype, n * p.d_y.batch + out * p.d_y.feature);
        }
        if (p.d_bias.data != nullptr) {
          write(p.d_bias.data, p.dtype, out * p.d_bias.stride, total);
        }
        for (std::int64_t k = 0; k < s.c; ++k) {
          double sum = 0;
          for (std::int64_t n = 0; n < p.batch; ++n) {
            sum += read(p.d_y.data, p.dtype, n * p.d_y.batch + out * p.d_y.feature) *
                   read(p.x.data, p.dtype, n * p.x.batch + ((i * s.c + k) * s.d + l) * p.x.feature);
          }
          write(p.d_w.data, p.dtype, i * p.d_w.a + j * p.d_w.b + k * p.d_w.c + l * p.d_w.d, sum);
        }
      }
    }
  });
}

}  // namespace fretwork::kronecker::cpu
