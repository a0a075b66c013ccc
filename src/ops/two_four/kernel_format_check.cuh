// Looks whether the metadata of a 2:4 matrix is valid.
#pragma once

#include "ops/two_four/kernel_format_tile.cuh"

namespace fretwork {

/// Looks whether every nibble of a group is a valid one. p.k and p.tiles_k count groups and tiles of them; `largest` is
/// the group.
__global__ void __launch_bounds__(kFormatThreads) two_four_check_metadata(const __grid_constant__ FormatParams p) {
  constexpr int kEach = kFormatCheckBytes * kFormatCheckLines / kFormatThreads;
  const u32 row = blockIdx.x / p.tiles_k;
  const i64 top = static_cast<i64>(row) * kFormatCheckLines;
  const i64 left = static_cast<i64>(blockIdx.x - row * p.tiles_k) * kFormatCheckBytes;
  u8 bytes[kEach];
  u64 first = ~0ull;
#pragma unroll
  for (int n = 0; n < kEach; ++n) {
    const int at = n * kFormatThreads + static_cast<int>(threadIdx.x);
    const i64 line = top + at / kFormatCheckBytes;
    const i64 b = left + at % kFormatCheckBytes;
    bytes[n] = line < p.lines && 2 * b < p.k ? *meta_byte(p.packed, line, b) : 0x44;
  }
#pragma unroll
  for (int n = 0; n < kEach; ++n) {
    const int at = n * kFormatThreads + static_cast<int>(threadIdx.x);
    const i64 line = top + at / kFormatCheckBytes;
    const i64 b = left + at % kFormatCheckBytes;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const i64 g = 2 * b + h;
      if (g < p.k && (p.valid >> (bytes[n] >> 4 * h & 0xf) & 1u) == 0) {
        const i64 begin = g * p.largest;
        const u64 place = static_cast<u64>(p.transposed ? begin * p.lines + line : line * (p.k * p.largest) + begin);
        first = place < first ? place : first;
      }
    }
  }
  report_first(p, first);
}

}  // namespace fretwork
