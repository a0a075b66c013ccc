// Metadata of any strides, a byte of a line at a time.
#pragma once

#include "device/types.cuh"
#include "ops/two_four/params.h"

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

}  // namespace fretwork::two_four
