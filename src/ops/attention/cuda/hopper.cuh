// What the Hopper kernels share: loading tiles, applying masks, the products of a step.
#pragma once

#include "device/epilogue.cuh"
#include "device/load.cuh"
#include "device/math.cuh"
#include "device/mma.cuh"
#include "device/pipeline.cuh"
#include "device/tma.cuh"
#include "device/wgmma.cuh"
#include "ops/attention/cuda/params.h"

namespace fretwork::attention_op::hopper {

/// Loads of plan data, where they stand: those who fetch have few registers and read again rather than remember.
__device__ __forceinline__ int4 record(const void* from, int index) {
  int4 r;
  asm volatile("ld.global.nc.v4.s32 {%0, %1, %2, %3}, [%4];"
               : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w)
               : "l"(static_cast<const int4*>(from) + index));
  return r;
}
__device__ __forceinline__ int word(const int* from, int index) {
  int r;
  asm volatile("ld.global.nc.s32 %0, [%1];" : "=r"(r) : "l"(from + index));
  return r;
}

/// The mask of a run: kind, low, high, limit.
__device__ __forceinline__ int4 mask_of(const Walk& walk, int run) { return record(walk.runs, 2 * run + 1); }

// Those who fetch leave notes for the others. Of an item: steps (−1: nothing is left), batch, head, row tile. Of a
// step: kind, low, high and limit of its mask.

/// A note as lane 0 reads it, which is the lane that releases its place.
__device__ __forceinline__ int4 read_note(const int4& note) {
  int4 n = threadIdx.x % 32 == 0 ? note : int4{0, 0, 0, 0};
  n.x = __shfl_sync(0xffffffffu, n.x, 0);
  n.y = __shfl_sync(0xffffffffu, n.y, 0);
  n.z = __shfl_sync(0xffffffffu, n.z, 0);
  n.w = __shfl_sync(0xffffffffu, n.w, 0);
  return n;
}

/// The part that an item is, read likewise.
__device__ __forceinline__ int read_part(const int& part) {
  return __shfl_sync(0xffffffffu, threadIdx.x % 32 == 0 ? part : 0, 0);
}

/// A tile of kHalves × 64 columns to `to`, each half in `half` bytes; `full` counts them.
template <int kHalves>
__device__ __forceinline__ void fetch(const Source& source, u32 to, u32 half, u32 full, const int4& tile, int batch,
                                      int head) {
  const int at = batch * source.batch + head * source.head + tile.x * source.row;
#pragma unroll
  for (int h = 0; h < kHalves; ++h) {
    if (source.axes == 2) {
      tma::load(to + h * half, &source.map, full, 64 * h, tile.w, tile.z, at);
    } else {
      tma::load(to + h * half, &source.map, full, 64 * h, tile.w, tile.z, tile.y, at);
    }
  }
}

/// Zeros in the rows from `places` on of `count` tiles' halves that lie one after the other: the copy engine never
/// writes those. All threads of the CTA call it, and a barrier of the CTA must follow.
__device__ __forceinline__ void clear_unplaced(u32 tiles, int count, int rows, int places) {
  const int chunks = (rows - places) * 8;
  for (int n = static_cast<int>(threadIdx.x); n < count * chunks; n += static_cast<int>(blockDim.x)) {
    const u32 to = tiles + (n / chunks) * rows * 128 + places * 128 + n % chunks * 16;
    asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(to), "r"(0) : "memory");
  }
  if (chunks > 0) {
    fence_async_proxy();
  }
}

/// Zeros in the rows of a fetched tile that nothing in the pattern uses, or that are padding: they may hold NaN. The
/// threads of a warpgroup call it together, then join_cleared; the other warpgroup may do the same. A warp stores four
/// rows of 128 bytes at a time, which meets every bank once.
template <int kHalves, int kTileRows>
__device__ __forceinline__ void clear_unused(u32 tile, const u32* used) {
  constexpr u32 kOwn = kTileRows / 4;  // rows of a warp
  const u32 first = threadIdx.x / 32 % 4 * kOwn, lane = threadIdx.x % 32;
  const u32 rows = __ldg(used + first / 32) >> (first % 32 + lane / 8);
  const u32 to = tile + first * 128 + lane * 16;
#pragma unroll
  for (u32 n = 0; n < kHalves * kOwn / 4; ++n) {
    const u32 half = n / (kOwn / 4), row = n % (kOwn / 4) * 4;
    if ((rows >> row & 1) == 0) {
      asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(to + half * (kTileRows * 128) + row * 128), "r"(0)
                   : "memory");
    }
  }
}
__device__ __forceinline__ void join_cleared(u32 barrier) {
  fence_async_proxy();
  named_barrier(barrier, 128);
}

/// Replaces the scores outside a band. A thread has rows `row` and `row` + 8 of the tile, as the accumulator lies.
template <int kSize>
__device__ __forceinline__ void cut_band(float (&s)[kSize], const int4& note, int row, float outside) {
  const int shift = static_cast<int>(threadIdx.x) % 4 * 2;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int low = note.y + row + 8 * h - shift, high = min(note.z + row + 8 * h, note.w - 1) - shift;
#pragma unroll
    for (int n = 0; n < kSize / 2; ++n) {
      const int col = n / 2 * 8 + n % 2, at = n / 2 * 4 + 2 * h + n % 2;
      s[at] = col < low || col > high ? outside : s[at];
    }
  }
}

/// Replaces the scores of columns that are not used, or not seen: of any rows.
template <int kSize>
__device__ __forceinline__ void cut_columns(float (&s)[kSize], const u32* used, float outside) {
#pragma unroll
  for (int w = 0; w < kSize / 16; ++w) {
    const u32 word = __ldg(used + w) >> threadIdx.x % 4 * 2;
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const bool there = (word & 1u << (n / 2 * 8 + n % 2)) != 0;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float& score = s[(w * 4 + n / 2) * 4 + 2 * h + n % 2];
        score = there ? score : outside;
      }
    }
  }
}

/// Where the `used` bits of a column tile begin, or −1. kSeen: columns are keys, which may be padding.
template <bool kSeen>
__device__ __forceinline__ int used_of(const Walk& walk, int batch, int tile) {
  return word(walk.col_used, (kSeen ? batch * walk.col_used_batch : 0) + tile);
}

/// The bit of a column tile and those of the 31 − tile % 32 after it: does a batch element see any key there?
__device__ __forceinline__ u32 seen_from(const SeenTiles& seen, int batch, int tile) {
  return static_cast<u32>(word(reinterpret_cast<const int*>(seen.words), batch * seen.batch + tile / 32)) >> tile % 32;
}
__device__ __forceinline__ bool sees_tile(const SeenTiles& seen, int batch, int tile) {
  return seen.words == nullptr || (seen_from(seen, batch, tile) & 1) != 0;
}
/// The steps of an item that begins `skip` tiles into run `run` and has `left` tiles: those with keys that are seen.
__device__ __forceinline__ int seen_steps(const Walk& walk, const SeenTiles& seen, int batch, int run, int skip,
                                          int left) {
  if (seen.words == nullptr) {
    return left;
  }
  int sum = 0;
#pragma unroll 1
  for (; left > 0; ++run, skip = 0) {
    const int4 tiles = record(walk.runs, 2 * run);
    const int end = tiles.x + min(tiles.y, skip + left);
#pragma unroll 1
    for (int tile = tiles.x + skip; tile < end;) {
      const int count = min(32 - tile % 32, end - tile);
      sum += __popc(seen_from(seen, batch, tile) & ~0u >> (32 - count));
      tile += count;
      left -= count;
    }
  }
  return sum;
}

/// Brings the bits of a thread's two rows near, for those who have no registers for them yet.
template <int kWords>
__device__ __forceinline__ void prefetch_bits(const u32* mask, int row) {
  asm volatile("prefetch.global.L1 [%0];" ::"l"(mask + row * kWords));
  asm volatile("prefetch.global.L1 [%0];" ::"l"(mask + (row + 8) * kWords));
}

/// The bits of a thread's two rows.
template <int kWords>
struct RowBits {
  u32 words[2][kWords];

  __device__ __forceinline__ void load(const u32* mask, int row) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const u32* from = mask + (row + 8 * h) * kWords;
      if constexpr (kWords == 4) {
        const int4 four = record(from, 0);
        words[h][0] = four.x, words[h][1] = four.y, words[h][2] = four.z, words[h][3] = four.w;
      } else {
        const int2 two = __ldg(reinterpret_cast<const int2*>(from));
        words[h][0] = two.x, words[h][1] = two.y;
      }
    }
  }
  __device__ __forceinline__ void cut(float (&s)[kWords * 16], float outside) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int w = 0; w < kWords; ++w) {
        const u32 word = words[h][w] >> threadIdx.x % 4 * 2;
#pragma unroll
        for (int n = 0; n < 8; ++n) {
          float& score = s[(w * 4 + n / 2) * 4 + 2 * h + n % 2];
          score = (word & 1u << (n / 2 * 8 + n % 2)) != 0 ? score : outside;
        }
      }
    }
  }
};

/// Replaces what a mask of this kind cuts off. The note and the bits are read only now: registers are short.
template <bool kGeneral, int kSize>
__device__ __forceinline__ void cut_masked(float (&s)[kSize], int kind, const int4& note, const u32* bits_of, int row,
                                           float outside) {
  if (kGeneral && kind >= 0) {
    RowBits<kSize / 16> bits;
    bits.load(bits_of + kind, row);
    bits.cut(s, outside);
  } else if (kind == kBand) {
    cut_band(s, read_note(note), row, outside);
  }
}

/// The same where the note and the bits were read before, and of columns that are not used or not seen: their bits
/// begin at `used` of `words`, unless it is −1.
template <bool kGeneral, int kSize>
__device__ __forceinline__ void cut_read(float (&s)[kSize], const int4& note, const RowBits<kSize / 16>& bits,
                                         const u32* words, int used, int row, float outside) {
  if (kGeneral && note.x >= 0) {
    bits.cut(s, outside);
  } else if (note.x == kBand) {
    cut_band(s, note, row, outside);
  }
  if (kGeneral && used >= 0) {
    cut_columns(s, words + used, outside);
  }
}

/// What a kernel does before it reads anything that another may have written.
__device__ __forceinline__ void begin_after_earlier_kernel() {
  wait_for_earlier_kernel();
  let_next_kernel_start();
}

/// Which of the warpgroups that multiply a thread is in.
template <int kTileRows>
__device__ __forceinline__ int own_warpgroup() {
  return kTileRows == 64 ? 0 : static_cast<int>(threadIdx.x) / 128 - 1;
}

/// The token of the row (lane % 16 of the warp's 16) that a lane answers for, or −1.
template <int kTileRows = kRows>
__device__ __forceinline__ int own_token(const Walk& walk, int tile, int warpgroup) {
  return __ldg(walk.row_tokens + tile * kTileRows + warpgroup * 64 + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 16);
}

/// Where registers have room for it, what a step needs first is asked for in the step before. The first step then finds
/// no products of an earlier one and the last asks for none: step<first, last>(), each a copy of its own, since the
/// compiler waits for every product where it is not certain which are under way.
template <typename Step>
__device__ __forceinline__ void each_step(int steps, Step& step) {
  if (steps == 1) {
    step.template operator()<true, true>();
    return;
  }
  step.template operator()<true, false>();
#pragma unroll 1
  for (int n = 2; n < steps; ++n) {
    step.template operator()<false, false>();
  }
  step.template operator()<false, true>();
}

/// What is the same for all lanes of a warp, so that the compiler knows it too: it keeps descriptors that are made of
/// it in uniform registers, and does not move them there in each step.
__device__ __forceinline__ u32 uniform(u32 x) { return __shfl_sync(0xffffffffu, x, 0); }

/// Elements [kFrom, kTo) become powers of two.
template <int kFrom, int kTo, int kSize>
__device__ __forceinline__ void exp2_of(float (&x)[kSize]) {
#pragma unroll
  for (int i = kFrom; i < kTo; ++i) {
    x[i] = exp2_fast(x[i]);
  }
}

/// s = left · rightᵀ: 64 rows of a tile and kCols rows of another, both with columns as their unit axis in halves of
/// 64. `left_half` and `right_half` bytes separate the halves.
template <typename T, int kDepth, int kCols>
__device__ __forceinline__ void multiply_scores(float (&s)[kCols / 2], u32 left, u32 left_half, u32 right,
                                                u32 right_half) {
  using wgmma::Major;
#pragma unroll
  for (int k = 0; k < kDepth / 16; ++k) {
    const u64 a = wgmma::descriptor<128>(left + k / 4 * left_half) + k % 4 * wgmma::kNextK<128, Major::k>;
    const u64 b = wgmma::descriptor<128>(right + k / 4 * right_half) + k % 4 * wgmma::kNextK<128, Major::k>;
    if (k == 0) {
      wgmma::multiply<T, kCols, Major::k, Major::k, 0, false>(s, a, b);
    } else {
      wgmma::multiply<T, kCols, Major::k, Major::k>(s, a, b);
    }
  }
}

/// A warp's 16 rows of a tile, `half` bytes between its halves of 64 columns, as left operands.
template <int kDepth>
__device__ __forceinline__ void hold_rows(u32 (&held)[kDepth / 16][4], u32 tile, u32 half) {
  const u32 row = threadIdx.x / 32 % 4 * 16 + threadIdx.x % 16;
#pragma unroll
  for (int k = 0; k < kDepth / 16; ++k) {
    const u32 at = row * 128 + (k % 4 * 2 + threadIdx.x % 32 / 16) * 16;
    wgmma::load_pieces(held[k], tile + k / 4 * half + tma::swizzled<128>(at));
  }
}
/// The same with `left` held in registers: m64n64 that finds both operands in shared memory keeps it busy all the time
/// that the tensor cores take, and it has tiles to receive, too.
template <typename T, int kDepth, int kCols>
__device__ __forceinline__ void multiply_scores(float (&s)[kCols / 2], const u32 (&left)[kDepth / 16][4], u32 right,
                                                u32 right_half) {
  using wgmma::Major;
#pragma unroll
  for (int k = 0; k < kDepth / 16; ++k) {
    const u64 b = wgmma::descriptor<128>(right + k / 4 * right_half) + k % 4 * wgmma::kNextK<128, Major::k>;
    if (k == 0) {
      wgmma::multiply<T, kCols, Major::k, 0, false>(s, left[k], b);
    } else {
      wgmma::multiply<T, kCols, Major::k>(s, left[k], b);
    }
  }
}

/// d += left · right, where `left` is 64 × kCols in registers as pairs and `right` kCols rows of kDepth columns.
template <typename T, int kDepth, int kCols>
__device__ __forceinline__ void multiply_values(float (&d)[kDepth / 2], const u32 (&left)[kCols / 16][4], u32 right,
                                                u32 right_half) {
  using wgmma::Major;
  const u64 b = wgmma::descriptor<128>(right, right_half);
#pragma unroll
  for (int k = 0; k < kCols / 16; ++k) {
    wgmma::multiply<T, kDepth, Major::mn>(d, left[k], b + k * wgmma::kNextK<128, Major::mn>);
  }
}

/// The accumulator's numbers as the left operand of the next product.
template <typename T, int kSize>
__device__ __forceinline__ void pack(u32 (&to)[kSize / 8][4], const float (&s)[kSize]) {
#pragma unroll
  for (int n = 0; n < kSize / 2; ++n) {
    to[n / 4][n % 4] = narrow_pair<T>(s[2 * n], s[2 * n + 1]);
  }
}

/// What pack made, as numbers again.
template <typename T, int kSize>
__device__ __forceinline__ void unpack(float (&s)[kSize], const u32 (&from)[kSize / 8][4]) {
#pragma unroll
  for (int n = 0; n < kSize / 2; ++n) {
    const u32 pair = from[n / 4][n % 4];
    s[2 * n] = widen(T{static_cast<u16>(pair)});
    s[2 * n + 1] = widen(T{static_cast<u16>(pair >> 16)});
  }
}

/// A warp's 16 rows of sums, rounded, to its rows of `buffer`: 64 rows of 128 bytes for each half, `half` bytes apart.
/// The rows must be free.
template <typename T, int kDepth, int kHalf = 0>
__device__ __forceinline__ void put_rows(const float (&d)[kDepth / 2], u32 buffer, u32 half) {
  store_piece<T, false, 32 * kHalf>(d, buffer + kHalf * half);
  if constexpr (kHalf + 1 < kDepth / 64) {
    put_rows<T, kDepth, kHalf + 1>(d, buffer, half);
  } else {
    __syncwarp();
  }
}

/// The first row that a thread has of a tile; the other is 8 below it.
__device__ __forceinline__ int tile_row(int warpgroup) {
  return warpgroup * 64 + static_cast<int>(threadIdx.x) / 32 % 4 * 16 + static_cast<int>(threadIdx.x) % 32 / 4;
}

/// A thread's sums of rows `row` and `row` + 8 times `factor`, to where parts lie.
template <int kDepth>
__device__ __forceinline__ void put_part(float* sums, int part, int row, const float (&d)[kDepth / 2], float factor) {
  float* const to = sums + (static_cast<i64>(part) * kRows + row) * kDepth + threadIdx.x % 4 * 2;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
#pragma unroll
    for (int j = 0; j < kDepth / 8; ++j) {
      *reinterpret_cast<float2*>(to + h * 8 * kDepth + 8 * j) =
          float2{d[4 * j + 2 * h] * factor, d[4 * j + 2 * h + 1] * factor};
    }
  }
}

/// What a lane takes of put_rows' rows, the n-th of kDepth / 16 times: 16 bytes, so that a warp sees whole lines.
struct Unit {
  int row, col;  ///< of the warp's rows
  u32 piece, unit;

  __device__ __forceinline__ explicit Unit(int n) : piece(n / 4), unit(threadIdx.x % 8) {
    row = n % 4 * 4 + static_cast<int>(threadIdx.x) % 32 / 8;
    col = static_cast<int>(piece * 64 + unit * 8);
  }
  __device__ __forceinline__ void take(u32 (&words)[4], u32 buffer, u32 half) const {
    const u32 at = (threadIdx.x / 32 % 4 * 16 + row) * 128 + unit * 16;
    load_shared_128(words, buffer + piece * half + tma::swizzled<128>(at));
  }
};

}  // namespace fretwork::attention_op::hopper
