// Which work is this CTA's.
#pragma once

#include "device/types.cuh"
#include "ops/block_matmul/cuda/params.h"

namespace fretwork {

struct GridPlace {
  int z, head, segment, tile;
  i64 batch;
};

/// Item `index` of batch · count · tiles; inside a batch: bands of tiles, in a band all segments, then its tiles.
__device__ __forceinline__ GridPlace grid_place(const block_matmul::Grid& grid, u32 count, u32 index) {
  const u32 each = count * static_cast<u32>(grid.tiles);
  const u32 batch = index / each, in_batch = index % each;
  const u32 full = count * static_cast<u32>(grid.band);
  const u32 band = in_batch / full, in_band = in_batch % full;
  const u32 first = band * static_cast<u32>(grid.band);
  const u32 left = static_cast<u32>(grid.tiles) - first;
  const u32 width = left < static_cast<u32>(grid.band) ? left : static_cast<u32>(grid.band);
  const u32 heads = static_cast<u32>(grid.heads);
  return {static_cast<int>(batch / heads), static_cast<int>(batch % heads), static_cast<int>(in_band / width),
          static_cast<int>(first + in_band % width), static_cast<i64>(batch)};
}
__device__ __forceinline__ GridPlace grid_place(const block_matmul::Grid& grid) {
  return grid_place(grid, static_cast<u32>(grid.segment_count), blockIdx.x);
}

}  // namespace fretwork
