// Copies between the weights of a Kronecker factor and its dense matrix. Threads follow the order of the matrix, which
// is the larger of the two.
#pragma once

#include "device/types.cuh"
#include "ops/kronecker/cuda/params_convert.cuh"

namespace fretwork {

/// Says that nothing is outside, before from_dense looks.
__global__ void kronecker_convert_begin(const __grid_constant__ KroneckerConvertParams p) { *p.outside = ~0ull; }

/// Index: u32 where the total allows, as long divisions would cost more than the copy.
template <typename Bits, typename Index, bool TO_DENSE>
__global__ void __launch_bounds__(kConvertThreads) kronecker_convert(const __grid_constant__ KroneckerConvertParams p) {
  const i64 first = static_cast<i64>(blockIdx.x) * kConvertThreads * kConvertElements + threadIdx.x;
  const auto cut = [](Index& rest, i64 size) {
    const Index part = rest % static_cast<Index>(size);
    rest /= static_cast<Index>(size);
    return part;
  };
#pragma unroll
  for (int e = 0; e < kConvertElements; ++e) {
    const i64 n = first + e * kConvertThreads;
    if (n < p.total) {
      Index row = static_cast<Index>(n), col = cut(row, p.cols);
      Bits* const dense = static_cast<Bits*>(p.dense) + row * p.dense_row + col * p.dense_col;
      const Index row_l = cut(row, p.d), j = cut(row, p.b), l = cut(col, p.d), k = cut(col, p.c);
      Bits* const w = static_cast<Bits*>(p.w) + row * p.w_a + j * p.w_b + k * p.w_c + l * p.w_d;
      const bool inside = row == col && row_l == l;  // what is left of either is its block
      if constexpr (TO_DENSE) {
        *dense = inside ? *w : Bits{0};
      } else {
        const Bits bits = *dense;
        if (inside) {
          *w = bits;
        } else if (static_cast<Bits>(bits << 1) != 0) {  // −0 is zero; NaN, infinities and subnormals are not
          atomicMin(p.outside, static_cast<u64>(n));
        }
      }
    }
  }
}

}  // namespace fretwork
