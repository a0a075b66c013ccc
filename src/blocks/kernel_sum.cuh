// Adds the partial sums of blocks whose K was split into pieces, in order.
#pragma once

#include "blocks/params.cuh"
#include "device/types.cuh"

namespace fretwork::blocks {

template <typename T>
__global__ void __launch_bounds__(256) sum_pieces(const __grid_constant__ SumParams p) {
  const i64 size = static_cast<i64>(p.rows) * p.cols, all = size * p.blocks;
  for (i64 i = static_cast<i64>(blockIdx.x) * 256 + threadIdx.x; i < all; i += static_cast<i64>(gridDim.x) * 256) {
    float sum = 0.0f;
    for (int piece = 0; piece < p.pieces; ++piece) {
      sum += p.from[piece * all + i];
    }
    const i64 block = i / size, within = i - block * size;
    T* const to = static_cast<T*>(p.to) + block * p.block_stride;
    to[within / p.cols * p.row_stride + within % p.cols * p.col_stride] = narrow<T>(sum);
  }
}

}  // namespace fretwork::blocks
