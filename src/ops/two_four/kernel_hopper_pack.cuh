// What wgmma takes along k only, made so in workspace: 8-bit operands turned, fp32 ones turned and rounded to tf32.
#pragma once

#include "device/mma.cuh"
#include "device/types.cuh"
#include "ops/two_four/params_hopper.cuh"

namespace fretwork::two_four::hopper {

/// A CTA's tile: lines from `line`, positions along them from `at`.
struct PackTile {
  int line, at, batch;
};
template <int kSide>
__device__ __forceinline__ PackTile pack_tile(const PackParams& p) {
  const int index = static_cast<int>(blockIdx.x), rest = index / p.along_tiles;
  return {rest % p.line_tiles * kSide, index % p.along_tiles * kSide, rest / p.line_tiles};
}

/// Bytes, 64 × 64 at a time: a thread turns 4 × 4.
__global__ void __launch_bounds__(kPackThreads) pack_bytes(const __grid_constant__ PackParams p) {
  constexpr int kSide = 64;
  __shared__ u32 turned[kSide][kSide / 4 + 1];
  const PackTile t = pack_tile<kSide>(p);
  const int t_line = static_cast<int>(threadIdx.x % 16) * 4, t_at = static_cast<int>(threadIdx.x / 16) * 4;
  u32 r[4] = {0, 0, 0, 0};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int at = t.at + t_at + i, line = t.line + t_line;
    const u8* const from =
        static_cast<const u8*>(p.from) + t.batch * p.from_batch + at * p.from_along + line * p.from_line;
    if (at < p.along && line + 3 < p.lines && p.from_line == 1 && reinterpret_cast<u64>(from) % 4 == 0) {
      r[i] = *reinterpret_cast<const u32*>(from);
    } else {
      for (int j = 0; j < 4; ++j) {
        r[i] |= at < p.along && line + j < p.lines ? static_cast<u32>(from[j * p.from_line]) << 8 * j : 0u;
      }
    }
  }
  const u32 a = __byte_perm(r[0], r[1], 0x5140), b = __byte_perm(r[2], r[3], 0x5140);
  const u32 c = __byte_perm(r[0], r[1], 0x7362), d = __byte_perm(r[2], r[3], 0x7362);
  turned[t_line][t_at / 4] = __byte_perm(a, b, 0x5410);
  turned[t_line + 1][t_at / 4] = __byte_perm(a, b, 0x7632);
  turned[t_line + 2][t_at / 4] = __byte_perm(c, d, 0x5410);
  turned[t_line + 3][t_at / 4] = __byte_perm(c, d, 0x7632);
  __syncthreads();
  const int line = static_cast<int>(threadIdx.x / 4), unit = static_cast<int>(threadIdx.x % 4) * 4;
  if (t.line + line < p.lines && t.at + 4 * unit < p.along) {  // lines have room for whole units of 16 bytes
    const u32* const w = &turned[line][unit];
    u8* const to = static_cast<u8*>(p.to) + t.batch * p.to_batch + (t.line + line) * p.to_line + t.at + 4 * unit;
    *reinterpret_cast<uint4*>(to) = make_uint4(w[0], w[1], w[2], w[3]);
  }
}

/// fp32 to tf32, 32 × 32 at a time, read along whichever axis is contiguous.
__global__ void __launch_bounds__(kPackThreads) pack_tf32(const __grid_constant__ PackParams p) {
  constexpr int kSide = 32;
  __shared__ u32 turned[kSide][kSide + 1];
  const PackTile t = pack_tile<kSide>(p);
  const int fast = static_cast<int>(threadIdx.x % 32), slow = static_cast<int>(threadIdx.x / 32);
  const bool along = p.from_along == 1;
#pragma unroll
  for (int i = slow; i < kSide; i += kPackThreads / 32) {
    const int line = along ? i : fast, at = along ? fast : i;
    if (t.line + line < p.lines && t.at + at < p.along) {
      turned[line][at] = to_tf32(__float_as_uint(static_cast<const float*>(
          p.from)[t.batch * p.from_batch + (t.line + line) * p.from_line + (t.at + at) * p.from_along]));
    }
  }
  __syncthreads();
#pragma unroll
  for (int i = slow; i < kSide; i += kPackThreads / 32) {
    if (t.line + i < p.lines && t.at + fast < p.along) {
      static_cast<u32*>(p.to)[t.batch * p.to_batch + (t.line + i) * p.to_line + t.at + fast] = turned[i][fast];
    }
  }
}

}  // namespace fretwork::two_four::hopper
