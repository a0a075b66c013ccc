// Checks the metadata of a 2:4 matrix that others made, and makes it canonical.
#pragma once

#include "ops/two_four/cuda/format_tile.cuh"

namespace fretwork {

/// Whether what is kept of group g of a line is zero.
__device__ __forceinline__ bool keeps_nothing(const FormatParams& p, i64 line, i64 g) {
  const FormatMatrix& m = p.packed.values;
  const int kept = p.group / 2;
  u32 bits = 0;
  for (int e = 0; e < kept; ++e) {
    const i64 at = line * m.line + (g * kept + e) * m.along;
    bits |= p.element_bytes == 1   ? static_cast<const u8*>(m.data)[at]
            : p.element_bytes == 2 ? static_cast<const u16*>(m.data)[at]
                                   : static_cast<const u32*>(m.data)[at];
  }
  return (bits & p.magnitude) == 0;
}

/// Every nibble must be a valid one where its group keeps a number. `cols`, where it has words, gets nibbles of which
/// those of other groups are 4, with keep_valid only where they were not valid, and 4 behind the last group. p.tiles_k
/// counts tiles of bytes.
__global__ void __launch_bounds__(kFormatThreads) two_four_check_metadata(const __grid_constant__ FormatParams p) {
  constexpr int kEach = kFormatCheckBytes * kFormatCheckLines / kFormatThreads;
  const u32 row = blockIdx.x / p.tiles_k;
  const i64 top = static_cast<i64>(row) * kFormatCheckLines, groups = p.k / p.group;
  const i64 left = static_cast<i64>(blockIdx.x - row * p.tiles_k) * kFormatCheckBytes;
  const bool writes = p.cols.words != nullptr;
  u8 bytes[kEach];
  u64 first = ~0ull;
#pragma unroll
  for (int n = 0; n < kEach; ++n) {
    const int at = n * kFormatThreads + static_cast<int>(threadIdx.x);
    const i64 line = top + at / kFormatCheckBytes, b = left + at % kFormatCheckBytes;
    bytes[n] = line < p.lines && 2 * b < groups ? *meta_byte(p.packed, line, b) : 0x44;
  }
#pragma unroll 1
  for (int n = 0; n < kEach; ++n) {
    const int at = n * kFormatThreads + static_cast<int>(threadIdx.x);
    const i64 line = top + at / kFormatCheckBytes, b = left + at % kFormatCheckBytes;
    if (line >= p.lines || b >= p.packed.bytes) {
      continue;
    }
    u32 canonical = 0x44;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const i64 g = 2 * b + h;
      if (g >= groups) {
        continue;
      }
      const u32 nibble = bytes[n] >> 4 * h & 0xfu;
      const bool valid = (p.valid >> nibble & 1u) != 0;
      const bool empty = (!valid || (writes && p.keep_valid == 0)) && keeps_nothing(p, line, g);
      if (!valid && !empty) {
        const i64 begin = g * p.group;
        const u64 place = static_cast<u64>(p.transposed ? begin * p.lines + line : line * p.k + begin);
        first = place < first ? place : first;
      }
      canonical ^= empty ? 0u : (nibble ^ 4u) << 4 * h;
    }
    if (writes) {
      *meta_byte(p.cols, line, b) = static_cast<u8>(canonical);
    }
  }
  report_first(p, first);
}

}  // namespace fretwork
