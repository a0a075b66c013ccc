// Copies operands to the lines of whole chunks along k that the tensor-core kernels read. fp32 is rounded to tf32 for
// kernels that would truncate it; metadata for the portable kernel is padded to whole stages.
#pragma once

#include "device/mma.cuh"
#include "device/types.cuh"
#include "ops/two_four/cuda/elements.cuh"
#include "ops/two_four/cuda/params.h"

namespace fretwork::two_four {

inline constexpr int kPackTile = 64, kPackThreads = 256;

/// fp32 rounded to tf32, which wgmma would cut.
struct tf32_bits {
  u32 bits;
};

template <typename To, typename From>
__device__ __forceinline__ To converted(From x) {
  if constexpr (is_same<From, To>) {
    return x;
  } else if constexpr (is_same<To, tf32_bits>) {
    return {to_tf32(__float_as_uint(x))};
  } else {
    return narrow<To>(widen(x));
  }
}

/// A tile of lines through shared memory: read in the order of the source, written along the lines, wider where To is.
/// Behind a line's elements, up to its pitch, come zeros. Pitches are whole units of 16 bytes.
template <typename From, typename To>
__global__ void __launch_bounds__(kPackThreads) pack_lines(const __grid_constant__ PackLinesParams p) {
  constexpr int kPerWord = 4 / sizeof(To), kWords = kPackTile / kPerWord;  // of a line
  __shared__ alignas(4) To tile[kPackTile][kPackTile + kPerWord];
  const i64 tiles = p.line_tiles * p.count_tiles, index = blockIdx.x % tiles, z = blockIdx.x / tiles;
  const i64 line0 = index / p.count_tiles * kPackTile, first = index % p.count_tiles * kPackTile;
  const From* const from =
      static_cast<const From*>(p.from.data) + z * p.from.batch + line0 * p.from.line + first * p.from.along;
  const bool along =
      (p.from.along < 0 ? -p.from.along : p.from.along) <= (p.from.line < 0 ? -p.from.line : p.from.line);
#pragma unroll 4
  for (int n = static_cast<int>(threadIdx.x); n < kPackTile * kPackTile; n += kPackThreads) {
    const int line = along ? n / kPackTile : n % kPackTile, at = along ? n % kPackTile : n / kPackTile;
    const bool there = line0 + line < p.lines && first + at < p.count;
    tile[line][at] = there ? converted<To>(from[line * p.from.line + at * p.from.along]) : To{};
  }
  __syncthreads();
  To* const to = static_cast<To*>(p.to) + (z * p.lines + line0) * p.pitch + first;
#pragma unroll 4
  for (int n = static_cast<int>(threadIdx.x); n < kPackTile * kWords; n += kPackThreads) {
    const int line = n / kWords, at = n % kWords * kPerWord;
    if (line0 + line < p.lines && first + at < p.pitch) {
      *reinterpret_cast<u32*>(to + line * p.pitch + at) = *reinterpret_cast<const u32*>(&tile[line][at]);
    }
  }
}

template <int kThreads>
__global__ void __launch_bounds__(kThreads) pack_metadata(const __grid_constant__ PackMetadataParams p) {
  const i64 words = p.pitch / 4;
  for (i64 n = static_cast<i64>(blockIdx.x) * kThreads + threadIdx.x; n < p.lines * words;
       n += static_cast<i64>(gridDim.x) * kThreads) {
    const i64 line = n / words, byte = n % words * 4;
    u32 word = 0;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      word |= metadata_byte(p.from, line, byte + e, p.groups) << 8 * e;
    }
    static_cast<u32*>(p.to)[n] = word;
  }
}

}  // namespace fretwork::two_four
