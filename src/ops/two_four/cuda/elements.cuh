// What threads read and write one by one: metadata of any strides, as mma.sp takes it; a bias of any type as float;
// float as any result type.
#pragma once

#include "device/load.cuh"
#include "device/types.cuh"
#include "ops/two_four/cuda/params.h"

namespace fretwork::two_four {

__device__ __forceinline__ float as_number(const void* data, i64 at, OutType type) {
  switch (type) {
    case OutType::f16:
      return widen(static_cast<const f16*>(data)[at]);
    case OutType::bf16:
      return widen(static_cast<const bf16*>(data)[at]);
    case OutType::i32:
      return static_cast<float>(static_cast<const int*>(data)[at]);
    case OutType::i8:
      return static_cast<float>(static_cast<const i8*>(data)[at]);
    case OutType::f8_e4m3:
      return widen(static_cast<const f8_e4m3*>(data)[at]);
    case OutType::f8_e5m2:
      return widen(static_cast<const f8_e5m2*>(data)[at]);
    default:
      return static_cast<const float*>(data)[at];
  }
}

/// Four neighbours of a result of 8 bits, the first lowest.
__device__ __forceinline__ u32 four_bytes(const float* v, OutType type) {
  if (type == OutType::f8_e4m3) {
    return narrow_pair_8<f8_e4m3>(v[0], v[1]) | narrow_pair_8<f8_e4m3>(v[2], v[3]) << 16;
  }
  if (type == OutType::f8_e5m2) {
    return narrow_pair_8<f8_e5m2>(v[0], v[1]) | narrow_pair_8<f8_e5m2>(v[2], v[3]) << 16;
  }
  u32 four = 0;
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    four |= static_cast<u32>(static_cast<u8>(narrow<i8>(v[e]))) << 8 * e;
  }
  return four;
}

/// Rounds four neighbours of a result of 16 or 8 bits, `step` apart from element `at` on, of which `count` exist.
/// `wide`: all four can be written at once.
__device__ __forceinline__ void store_four(void* c, i64 at, i64 step, const float* v, int count, OutType type,
                                           bool wide) {
  if (type == OutType::f16 || type == OutType::bf16) {
    const bool f = type == OutType::f16;
    const u32 words[2] = {f ? narrow_pair<f16>(v[0], v[1]) : narrow_pair<bf16>(v[0], v[1]),
                          f ? narrow_pair<f16>(v[2], v[3]) : narrow_pair<bf16>(v[2], v[3])};
    u16* const to = static_cast<u16*>(c) + at;
    if (wide && count >= 4) {
      store_words<2>(to, words);
      return;
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if (e < count) {
        to[e * step] = static_cast<u16>(words[e / 2] >> 16 * (e % 2));
      }
    }
    return;
  }
  const u32 four = four_bytes(v, type);
  u8* const to = static_cast<u8*>(c) + at;
  if (wide && count >= 4) {
    *reinterpret_cast<u32*>(to) = four;
    return;
  }
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    if (e < count) {
      to[e * step] = static_cast<u8>(four >> 8 * e);
    }
  }
}

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
