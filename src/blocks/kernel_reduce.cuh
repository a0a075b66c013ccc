// Adds the partial tiles of split groups, in the order of their segments, and stores the result.
#pragma once

#include "blocks/kernel.cuh"

namespace fretwork::blocks {

/// One CTA per (split, tile, batch) and kReduceSums of a thread's sums; as many threads as the product has consumers. A
/// thread adds the accumulators that one consumer thread of the product held.
template <typename T>
__global__ void __launch_bounds__(384) spmm_reduce(const __grid_constant__ ReduceParams p) {
  const int parts = p.width / 2 / kReduceSums, part = static_cast<int>(blockIdx.x) % parts;
  const int index = static_cast<int>(blockIdx.x) / parts;
  const int split_index = index % p.split_count, rest = index / p.split_count;
  const int tile = rest % p.tiles, batch = rest / p.tiles;
  const Split split = p.splits[split_index];
  const int place = split.group % p.groups_per_head, h = split.group / p.groups_per_head + batch % p.heads;
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int threads = static_cast<int>(blockDim.x), sums = p.width / 2;
  const float* from =
      p.partials + (static_cast<i64>(rest) * p.partial_count + split.first) * (sums * threads) + threadIdx.x;
  T* out = static_cast<T*>(p.out) + h * p.h_stride + batch / p.heads * p.z_stride;
#pragma unroll
  for (int j = 0; j < kReduceSums; ++j) {
    const int i = part * kReduceSums + j;
    const int m = 16 * warp + lane / 4 + i / 2 % 2 * 8, n = i / 4 * 8 + lane % 4 * 2 + i % 2;
    const i64 row = p.rows_first ? place * kTileM + m : place * kNarrow + n;
    const i64 free = p.rows_first ? tile * p.width + n : tile * kNarrow + m;
    if (row >= p.rows || free >= p.free) {
      continue;
    }
    float sum = 0.0f;
    for (int s = 0; s < split.count; ++s) {
      sum += from[static_cast<i64>(s) * (sums * threads) + i * threads];
    }
    if (p.pixels.count == 0) {
      out[row * p.row_stride + free * p.free_stride] = narrow<T>(sum);
      continue;
    }
    const Pixel at = pixel_at(p.pixels, static_cast<int>(free));
    const float bias = p.bias == nullptr ? 0.0f : widen(static_cast<const T*>(p.bias)[row * p.bias_stride]);
    out[at.n * p.image.n + row * p.image.c + at.u * p.image.h + at.v * p.image.w] = narrow<T>(sum + bias);
  }
}

}  // namespace fretwork::blocks
