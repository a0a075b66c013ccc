// Reads metadata of any strides, one byte of a line at a time, and arranges it as mma.sp takes it from lanes that have
// a run each.
#pragma once

#include "device/types.cuh"
#include "ops/two_four/cuda/params.h"

namespace fretwork::two_four {

/// A byte of a line's metadata, where nibbles of groups that do not exist are valid ones.
__device__ __forceinline__ u32 metadata_byte(const MetadataArg& m, i64 line, i64 byte, i64 groups) {
  const i64 left = groups - 2 * byte;
  if (left <= 0) {
    return 0x44;
  }
  const i64 word = byte >> m.word_shift, inside = byte & ((1 << m.word_shift) - 1);
  const u32 found = static_cast<const u8*>(m.data)[line * m.line + word * m.along + inside];
  return left == 1 ? (found & 0xfu) | 0x40u : found;
}

/// Nibble t of each of four words of 16 bits, in the lower half.
__device__ __forceinline__ u32 gather_nibbles(u32 low, u32 high, int t) {
  const u32 apart = (low >> 4 * t & 0x000f000fu) | (high >> 4 * t & 0x000f000fu) << 8;  // of words 0, 2, 1, 3
  return apart | apart >> 12;
}
/// What lane t of a quad gives to the two mma of four runs of 16-bit types: nibble t of the runs' words, of the first
/// of its rows in the lower half and of the one 8 below in the upper.
__device__ __forceinline__ u32 mma_metadata(const u32* first, const u32* second, int t) {
  return __byte_perm(gather_nibbles(first[0], first[1], t), gather_nibbles(second[0], second[1], t), 0x5410);
}

}  // namespace fretwork::two_four
