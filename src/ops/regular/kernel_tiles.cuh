// SPLAT's operators on tensor cores. A tile is 128 lines in two groups of 64; a step multiplies them with 64 partners
// as a dense tile. That the matrix is sparse shows only where the tile meets x: of each row, a step holds the columns
// that a mask names, and they stand side by side in x. So x is read and written in chunks of 16 bytes, through shared
// memory, whatever the alignment of its rows. What a tile has and the pattern has not is never stored, and counts as
// zero. Sums are fp32 in a fixed order.
#pragma once

#include "device/barrier.cuh"
#include "device/copy_async.cuh"
#include "device/mma.cuh"
#include "device/wgmma.cuh"
#include "ops/regular/kernel.cuh"

namespace fretwork {

inline constexpr int kRegularTileThreads = 2 * kRegularLines;
/// Elements between rows of x in shared memory: 64, the seven by which a row may be off its chunks, and what puts eight
/// rows into different banks.
inline constexpr int kRegularPitch = 88;
inline constexpr int kRegularStage = kRegularLines * kRegularPitch * 2;

/// 64 rows of an operand in panels of 128 bytes; the chunks of a row are permuted as wgmma expects it.
template <int kDepth>
struct regular_panels {
  static constexpr int kPanel = kRegularBlock * 128, kBytes = kPanel * (kDepth / 64);
  u32 base;
  __device__ __forceinline__ u32 chunk(u32 row, u32 chunk) const {
    return base + chunk / 8 * kPanel + row * 128 + ((chunk % 8 ^ row % 8) << 4);
  }
  /// Rows from −1, and elements from `depth` on, are zero.
  template <typename T, typename Row>
  __device__ __forceinline__ void fetch(const T* from, i64 stride, int depth, const Row& row_of) const {
    constexpr int kChunks = kDepth / 8;
#pragma unroll 4
    for (int n = static_cast<int>(threadIdx.x); n < kRegularBlock * kChunks; n += kRegularTileThreads) {
      const int r = n / kChunks, c = n % kChunks, row = row_of(r);
      const bool inside = row >= 0 && c * 8 < depth;
      copy_async_16(chunk(r, c), from + (inside ? row * stride + c * 8 : 0), inside);
    }
  }
};

/// A step as memory has it: what it holds of each row, and its partners.
struct regular_step {
  RegularBits bits[kRegularLines];
  int partners[kRegularBlock];
};

/// The steps of a tile, `rounds` times over: start(n, step) fetches what step n multiplies, work(n, step) has it. One
/// step is fetched while the one before is multiplied; its description comes a step earlier.
template <bool kWarpgroup, typename Start, typename Work>
__device__ __forceinline__ void regular_walk(const RegularTileParams& p, const RegularTile& tile, int rounds,
                                             regular_step* ring, const Start& start, const Work& work) {
  const int total = tile.steps * rounds;
  const auto describe = [&](int n) {
    const i64 step = tile.first + n % tile.steps;
    regular_step& to = ring[n % 3];
    const int thread = static_cast<int>(threadIdx.x);
    if (thread < kRegularLines) {
      copy_async_16(shared_address(to.bits + thread), p.bits + step * kRegularLines + thread, true);
    } else if (thread < kRegularLines + kRegularBlock / 4) {
      const int first = (thread - kRegularLines) * 4;
      copy_async_16(shared_address(to.partners + first), p.partners + step * kRegularBlock + first, true);
    }
  };
  for (int n = 0; n < 2 && n < total; ++n) {
    describe(n);
  }
  copy_async_commit();
  copy_async_wait<0>();
  __syncthreads();
  if (total > 0) {
    start(0, ring[0]);
  }
  copy_async_commit();
  for (int n = 0; n < total; ++n) {
    copy_async_wait<0>();
    if constexpr (kWarpgroup) {
      fence_async_proxy();
    }
    __syncthreads();  // step n is there; what step n − 1 used is free
    if (n + 1 < total) {
      start(n + 1, ring[(n + 1) % 3]);
    }
    if (n + 2 < total) {
      describe(n + 2);
    }
    copy_async_commit();
    work(n, ring[n % 3]);
  }
}

/// Elements of a row in front of its stretch, in the same 16 bytes.
template <typename T>
__device__ __forceinline__ int lead_of(const T* values, i64 stride, int row, int place) {
  const u32 at = static_cast<u32>(reinterpret_cast<u64>(values) / sizeof(T)) +
                 static_cast<u32>(row) * static_cast<u32>(stride) + static_cast<u32>(place);
  return static_cast<int>(at % 8);
}

/// A row's mask as two words. rank(bit) counts the columns below one.
struct regular_mask {
  u32 low, high;
  __device__ __forceinline__ explicit regular_mask(u64 mask)
      : low(static_cast<u32>(mask)), high(static_cast<u32>(mask >> 32)) {}
  __device__ __forceinline__ bool full() const { return (low & high) == 0xffffffffu; }
  __device__ __forceinline__ int count() const { return __popc(low) + __popc(high); }
  /// kUpper: of the second word, whose bits count from 0 again.
  __device__ __forceinline__ u32 word(bool upper) const { return upper ? high : low; }
  __device__ __forceinline__ int rank(bool upper, int bit) const {
    return (upper ? __popc(low) : 0) + __popc(word(upper) & ((1u << bit) - 1));
  }
};

/// The rows of x that a warp writes, 16 of them: whole chunks as soon as they are there; the rest waits for the next
/// step in the first chunk of the row's place in shared memory. Eight lanes serve a row, four rows at a time.
template <typename T>
struct regular_writer {
  T* values;
  i64 stride;
  T* staged;                          ///< the warp's rows
  int waiting[4] = {}, next[4] = {};  ///< elements in front of place `next`

  __device__ __forceinline__ static int row_of(int q) { return q * 4 + static_cast<int>(threadIdx.x) % 32 / 8; }
  __device__ __forceinline__ static int chunk() { return static_cast<int>(threadIdx.x) % 8; }

  /// Writes what waits of a row.
  __device__ __forceinline__ void flush(int q, int row) {
    if (waiting[q] > 0) {
      const int lead = lead_of(values, stride, row, next[q]), c = chunk();
      if (c < lead && c >= lead - waiting[q]) {
        values[row * stride + next[q] - lead + c] = staged[row_of(q) * kRegularPitch + c];
      }
      waiting[q] = 0;
    }
  }
  /// Before a step's elements are staged: rows whose stretch does not go on where the last one ended.
  __device__ __forceinline__ void prepare(const RegularBits* bits) {
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      const RegularBits b = bits[row_of(q)];
      if (b.mask != 0 && b.base != next[q]) {
        flush(q, b.row);
      }
    }
    __syncwarp();
  }
  /// Where elements go; rank 0 first.
  __device__ __forceinline__ T* stretch(int r, const RegularBits& b) const {
    return staged + r * kRegularPitch + lead_of(values, stride, b.row, b.base);
  }
  /// After they are staged.
  __device__ __forceinline__ void write(const RegularBits* bits) {
    const int c = chunk();
    T carried[4];
    int left[4];
    __syncwarp();
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      const RegularBits b = bits[row_of(q)];
      const int count = regular_mask(b.mask).count(), lead = lead_of(values, stride, b.row, b.base);
      const T* const from = staged + row_of(q) * kRegularPitch;
      const int end = lead + count;
      left[q] = 0;
      if (count > 0 && end >= 8) {
        T* const to = values + b.row * stride + b.base - lead;
        if (c * 8 + 8 <= end && (c > 0 || lead == waiting[q])) {
          u32 words[4];
          load_shared_128(words, shared_address(from + c * 8));
          store_words<4>(to + c * 8, words);
        }
        if (lead != waiting[q] && c >= lead - waiting[q]) {
          to[c] = from[c];
        }
        left[q] = end % 8;
        carried[q] = from[end / 8 * 8 + c];
        waiting[q] = left[q];
      } else {
        waiting[q] += count;
      }
      next[q] = count > 0 ? b.base + count : next[q];
    }
    __syncwarp();
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      if (c < left[q]) {
        staged[row_of(q) * kRegularPitch + c] = carried[q];
      }
    }
    __syncwarp();
  }
};

/// Entries of d: registers 4c and 4c + 1 hold row lane / 4, columns 8c + lane % 4 · 2 and the next; 4c + 2 and 4c + 3
/// the row 8 below.
template <typename T>
__device__ __forceinline__ void stage_scores(const float (&d)[32], const regular_writer<T>& writer,
                                             const RegularBits* bits) {
  const int lane = static_cast<int>(threadIdx.x % 32);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int r = lane / 4 + 8 * half;
    const RegularBits b = bits[r];
    const regular_mask mask(b.mask);
    T* const to = writer.stretch(r, b);
    if (__all_sync(0xffffffffu, mask.full())) {
#pragma unroll
      for (int c = 0; c < 8; ++c) {
        const u32 pair = narrow_pair<T>(d[4 * c + 2 * half], d[4 * c + 2 * half + 1]);
        to[lane % 4 * 2 + c * 8] = T{static_cast<u16>(pair)};
        to[lane % 4 * 2 + c * 8 + 1] = T{static_cast<u16>(pair >> 16)};
      }
    } else {
#pragma unroll
      for (int c = 0; c < 8; ++c) {
        const u32 pair = narrow_pair<T>(d[4 * c + 2 * half], d[4 * c + 2 * half + 1]);
        const int bit = c % 4 * 8 + lane % 4 * 2, rank = mask.rank(c >= 4, bit);
        const u32 here = mask.word(c >= 4) >> bit;
        if (here & 1) {
          to[rank] = T{static_cast<u16>(pair)};
        }
        if (here & 2) {
          to[rank + static_cast<int>(here & 1)] = T{static_cast<u16>(pair >> 16)};
        }
      }
    }
  }
}

/// d = a · rightᵀ: 64 rows in registers, 64 partners.
template <typename T, int kDepth, bool kWarpgroup>
__device__ __forceinline__ void multiply_scores(float (&d)[32], const u32 (&a)[kDepth / 16][4],
                                                regular_panels<kDepth> right) {
  if constexpr (kWarpgroup) {
    using wgmma::Major;
    wgmma::fence();
#pragma unroll
    for (int k = 0; k < kDepth / 16; ++k) {
      const u64 b = wgmma::descriptor<128>(right.base + k / 4 * regular_panels<kDepth>::kPanel) +
                    k % 4 * wgmma::kNextK<128, Major::k>;
      if (k == 0) {
        wgmma::multiply<T, 64, Major::k, 0, false>(d, a[k], b);
      } else {
        wgmma::multiply<T, 64, Major::k>(d, a[k], b);
      }
    }
    wgmma::commit();
    wgmma::wait<0>();
  } else {
    const u32 lane = threadIdx.x % 32;
    float sums[8][4] = {};
#pragma unroll
    for (int k = 0; k < kDepth / 16; ++k) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        u32 b[4];
        ldmatrix(b, right.chunk(c * 16 + lane % 8 + lane / 16 * 8, k * 2 + lane / 8 % 2));
        mma_sync<T>(sums[2 * c], a[k], b[0], b[1]);
        mma_sync<T>(sums[2 * c + 1], a[k], b[2], b[3]);
      }
    }
#pragma unroll
    for (int e = 0; e < 32; ++e) {
      d[e] = sums[e / 4][e % 4];
    }
  }
}

/// x[i, t] = by_row[i] · by_col[column].
template <typename T, int kDepth, bool kWarpgroup>
__global__ void __launch_bounds__(kRegularTileThreads, kDepth <= 128 ? 2 : 1)
    regular_values_tiles(const __grid_constant__ RegularTileParams p) {
  extern __shared__ __align__(1024) u8 shared[];
  using Panels = regular_panels<kDepth>;
  constexpr int kLeft = 2 * Panels::kBytes > kRegularStage ? 2 * Panels::kBytes : kRegularStage;
  u8* const held = shared + 2 * Panels::kBytes;  // the left operand, then x
  const auto right = [&](int n) { return Panels{shared_address(shared) + n % 2 * Panels::kBytes}; };
  const int warp = static_cast<int>(threadIdx.x / 32), lane = static_cast<int>(threadIdx.x % 32);

  const regular_task my(blockIdx.x, p.tile_count, 1, p.heads);
  const RegularTile tile = p.tiles[my.chunk];
  const RegularTileLine* const lines = p.lines + tile.lines;
  const T* const by_row = regular_line<const T>(p.by_row, my.batch, my.head, 0);
  const T* const by_col = regular_line<const T>(p.by_col, my.batch, my.head / p.group, 0);
  if (tile.steps > 0) {
    for (int g = 0; g < kRegularGroups; ++g) {
      Panels{shared_address(held) + g * Panels::kBytes}.fetch(by_row, p.by_row.row, p.depth,
                                                              [&](int r) { return lines[g * kRegularBlock + r].line; });
    }
  }
  regular_writer<T> writer{regular_line<T>(p.values, my.batch, my.head, 0), p.values.row,
                           reinterpret_cast<T*>(held) + warp * 16 * kRegularPitch};
  u32 a[kDepth / 16][4];
  regular_walk<kWarpgroup>(
      p, tile, 1, reinterpret_cast<regular_step*>(held + kLeft),
      [&](int n, const regular_step& step) {
        right(n).fetch(by_col, p.by_col.row, p.depth, [&](int r) { return step.partners[r]; });
      },
      [&](int n, const regular_step& step) {
        if (n == 0) {
          const Panels left{shared_address(held) + warp / 4 * Panels::kBytes};
#pragma unroll
          for (int k = 0; k < kDepth / 16; ++k) {
            ldmatrix(a[k], left.chunk(warp % 4 * 16 + lane % 16, k * 2 + lane / 16));
          }
          __syncthreads();  // from now on x is here
        }
        float d[32];
        multiply_scores<T, kDepth, kWarpgroup>(d, a, right(n));
        const RegularBits* const bits = step.bits + warp * 16;
        writer.prepare(bits);
        stage_scores(d, writer, bits);
        writer.write(bits);
      });
#pragma unroll
  for (int q = 0; q < 4; ++q) {
    writer.flush(q, lines[warp * 16 + writer.row_of(q)].line);
  }
  for (int r = 0; r < 16; ++r) {
    const RegularTileLine line = lines[warp * 16 + r];
    if (line.line >= 0 && line.earlier == 0) {
      T* const row = writer.values + line.line * writer.stride;
      fill_zeros(row + (p.first[line.line + 1] - p.first[line.line]), row + p.width);
    }
  }
}

/// The stretches of x that a step uses, on their way to shared memory; `starts` gets where each begins there.
template <typename T>
__device__ __forceinline__ void fetch_stretches(const RegularBits* bits, const T* values, i64 stride, T* to,
                                                int* starts) {
  const int c = static_cast<int>(threadIdx.x % 8);
#pragma unroll
  for (int q = 0; q < 4; ++q) {
    const int e = static_cast<int>(threadIdx.x / 32 * 16 + q * 4 + threadIdx.x % 32 / 8);
    const RegularBits b = bits[e];
    const int count = regular_mask(b.mask).count(), lead = lead_of(values, stride, b.row, b.base), end = lead + count;
    const T* const from = values + (count > 0 ? b.row * stride + b.base - lead : 0);
    const u32 at = shared_address(to + e * kRegularPitch);
    copy_async_part_if(count > 0 && c * 8 < end, at + c * 16, from + c * 8, min(16, (end - c * 8) * 2));
    if (c == 0) {
      copy_async_part_if(end > 64 && count > 0, at + 128, from + 64, (end - 64) * 2);
      starts[e] = e * kRegularPitch + lead;
    }
  }
}

/// 64 lines of a result for each group, 16 of them and all of the depth in each warp: sums of x times partners.
template <typename T, int kDepth, bool kWarpgroup>
struct regular_sums {
  float d[kDepth / 2] = {};

  __device__ __forceinline__ void add(const u32 (&a)[4][4], regular_panels<kDepth> right) {
    if constexpr (kWarpgroup) {
      using wgmma::Major;
      wgmma::fence();
      const u64 b = wgmma::descriptor<128>(right.base, regular_panels<kDepth>::kPanel);
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        wgmma::multiply<T, kDepth, Major::mn>(d, a[k], b + k * wgmma::kNextK<128, Major::mn>);
      }
      wgmma::commit();
      wgmma::wait<0>();
    } else {
      const u32 lane = threadIdx.x % 32;
#pragma unroll
      for (int k = 0; k < 4; ++k) {
#pragma unroll
        for (int c = 0; c < kDepth / 16; ++c) {
          u32 b[4];
          ldmatrix_trans(b, right.chunk(k * 16 + lane % 16, c * 2 + lane / 16));
          mma_sync<T>(*reinterpret_cast<float(*)[4]>(d + 8 * c), a[k], b[0], b[1]);
          mma_sync<T>(*reinterpret_cast<float(*)[4]>(d + 8 * c + 4), a[k], b[2], b[3]);
        }
      }
    }
  }
};

/// Waits for the tiles of earlier waves, which leave sums to this one, and for all of the head whose place the sums of
/// this one take. A thread waits for a wave.
__device__ __forceinline__ void wait_for_waves(const RegularTileParams& p, const RegularTile& tile, int head) {
  const int waits = tile.wave + (head >= p.ring ? p.wave_count : 0);
  for (int n = static_cast<int>(threadIdx.x); n < waits; n += kRegularTileThreads) {
    const bool own = n < tile.wave;
    const int wave = own ? n : n - tile.wave;
    const int* const done = p.done + static_cast<i64>(own ? head : head - p.ring) * p.wave_count + wave;
    while (load_acquire(done) < p.wave_tiles[wave]) {
    }
  }
  __syncthreads();
}

/// The place of this CTA among all tiles. Where tiles wait for others, CTAs take theirs in the order in which they
/// start, so that a tile never waits for one that has not started.
__device__ __forceinline__ u32 take_tile(const RegularTileParams& p, u32* room) {
  if (p.wave_count <= 1) {
    return blockIdx.x;
  }
  if (threadIdx.x == 0) {
    *room = static_cast<u32>(atomicAdd(p.taken, 1));
  }
  __syncthreads();
  return *room;
}

/// Stores the sums of a tile: as the result, or for the tiles of later waves. `head` counts heads of all batches.
template <typename T, int kDepth>
__device__ __forceinline__ void store_sums(const RegularTileParams& p, const RegularTile& tile, int head,
                                           const float (&d)[kDepth / 2], T* to, i64 stride) {
  const bool shared = tile.shared != 0;
  if (shared) {
    wait_for_waves(p, tile, head);
  }
  const int lane = static_cast<int>(threadIdx.x % 32);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const RegularTileLine line = p.lines[tile.lines + static_cast<int>(threadIdx.x) / 32 * 16 + lane / 4 + 8 * half];
    if (line.line < 0) {
      continue;
    }
    T* const row = to + line.line * stride + lane % 4 * 2;
    float* const sums = p.sums + (static_cast<i64>(head % p.ring) * p.sum_count + line.sum) * p.depth + lane % 4 * 2;
#pragma unroll
    for (int c = 0; c < kDepth / 8; ++c) {
      if (c * 8 < p.depth) {
        float first = d[4 * c + 2 * half], second = d[4 * c + 2 * half + 1];
        if (line.earlier != 0) {
          float x, y;  // from L2: this multiprocessor may remember what another head left here
          asm volatile("ld.global.cg.v2.f32 {%0, %1}, [%2];" : "=f"(x), "=f"(y) : "l"(sums + c * 8) : "memory");
          first += x;
          second += y;
        }
        if (line.later != 0) {
          const u32 words[2] = {__float_as_uint(first), __float_as_uint(second)};
          store_words<2>(sums + c * 8, words);
        } else {
          *reinterpret_cast<u32*>(row + c * 8) = narrow_pair<T>(first, second);
        }
      }
    }
  }
  if (shared) {
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
      atomicAdd(p.done + static_cast<i64>(head) * p.wave_count + tile.wave, 1);
    }
  }
}

/// Shared memory of the two below.
template <typename T, int kDepth>
struct regular_memory {
  using Panels = regular_panels<kDepth>;
  u8* base;
  __device__ __forceinline__ Panels right(int n) const { return {shared_address(base) + n % 2 * Panels::kBytes}; }
  __device__ __forceinline__ T* x(int n) const {
    return reinterpret_cast<T*>(base + 2 * Panels::kBytes + n % 2 * kRegularStage);
  }
  __device__ __forceinline__ regular_step* steps() const {
    return reinterpret_cast<regular_step*>(base + 2 * (Panels::kBytes + kRegularStage));
  }
  __device__ __forceinline__ int* starts(int n) const {
    return reinterpret_cast<int*>(steps() + 3) + n % 2 * kRegularLines;
  }
  __device__ __forceinline__ u32* room() const { return reinterpret_cast<u32*>(starts(0) + 2 * kRegularLines); }
};

/// Two neighbours for an operand of a product.
template <typename T>
__device__ __forceinline__ u32 pair_of(T low, T high) {
  return low.bits | static_cast<u32>(high.bits) << 16;
}

/// by_row[i] = Σ_t x[i, t]·by_col[column].
template <typename T, int kDepth, bool kWarpgroup>
__global__ void __launch_bounds__(kRegularTileThreads, kDepth <= 128 ? 2 : 1)
    regular_by_row_tiles(const __grid_constant__ RegularTileParams p) {
  extern __shared__ __align__(1024) u8 shared[];
  const regular_memory<T, kDepth> memory{shared};
  const int warp = static_cast<int>(threadIdx.x / 32), lane = static_cast<int>(threadIdx.x % 32);
  const regular_task my(take_tile(p, memory.room()), p.tile_count, 1, p.heads);
  const RegularTile tile = p.tiles[my.chunk];
  const T* const values = regular_line<const T>(p.values, my.batch, my.head, 0);
  const T* const by_col = regular_line<const T>(p.by_col, my.batch, my.head / p.group, 0);
  regular_sums<T, kDepth, kWarpgroup> sums;
  regular_walk<kWarpgroup>(
      p, tile, 1, memory.steps(),
      [&](int n, const regular_step& step) {
        fetch_stretches(step.bits, values, p.values.row, memory.x(n), memory.starts(n));
        memory.right(n).fetch(by_col, p.by_col.row, p.depth, [&](int r) { return step.partners[r]; });
      },
      [&](int n, const regular_step& step) {
        u32 a[4][4];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int e = warp * 16 + lane / 4 + 8 * half;
          const regular_mask mask(step.bits[e].mask);
          const T* const x = memory.x(n) + memory.starts(n)[e];
          if (__all_sync(0xffffffffu, mask.full())) {
#pragma unroll
            for (int c = 0; c < 8; ++c) {
              a[c / 2][half + c % 2 * 2] = pair_of(x[c * 8 + lane % 4 * 2], x[c * 8 + lane % 4 * 2 + 1]);
            }
          } else {
#pragma unroll
            for (int c = 0; c < 8; ++c) {
              const int bit = c % 4 * 8 + lane % 4 * 2, rank = mask.rank(c >= 4, bit);
              const u32 here = mask.word(c >= 4) >> bit;
              a[c / 2][half + c % 2 * 2] =
                  pair_of((here & 1) ? x[rank] : T{}, (here & 2) ? x[rank + static_cast<int>(here & 1)] : T{});
            }
          }
        }
        sums.add(a, memory.right(n));
      });
  store_sums<T, kDepth>(p, tile, my.batch * p.heads + my.head, sums.d, regular_line<T>(p.by_row, my.batch, my.head, 0),
                        p.by_row.row);
}

/// by_col[j] = Σ x[i, t]·by_row[i] over the entries of column j and the heads that share it.
template <typename T, int kDepth, bool kWarpgroup>
__global__ void __launch_bounds__(kRegularTileThreads, kDepth <= 128 ? 2 : 1)
    regular_by_col_tiles(const __grid_constant__ RegularTileParams p) {
  extern __shared__ __align__(1024) u8 shared[];
  const regular_memory<T, kDepth> memory{shared};
  const int warp = static_cast<int>(threadIdx.x / 32), lane = static_cast<int>(threadIdx.x % 32);
  const int heads = p.heads / p.group;
  const regular_task my(take_tile(p, memory.room()), p.tile_count, 1, heads);
  const RegularTile tile = p.tiles[my.chunk];
  const auto head_of = [&](int n) { return my.head * p.group + n / tile.steps; };
  const bool upper = warp % 4 >= 2;             // the word of the masks that has this warp's 16 columns
  const int bit = warp % 2 * 16 + lane / 4;     // and the first of the lane's two
  const int column = warp % 4 * 16 + lane / 4;  // which is this of the group's
  regular_sums<T, kDepth, kWarpgroup> sums;
  regular_walk<kWarpgroup>(
      p, tile, p.group, memory.steps(),
      [&](int n, const regular_step& step) {
        const int head = head_of(n);
        fetch_stretches(step.bits, regular_line<const T>(p.values, my.batch, head, 0), p.values.row, memory.x(n),
                        memory.starts(n));
        memory.right(n).fetch(regular_line<const T>(p.by_row, my.batch, head, 0), p.by_row.row, p.depth,
                              [&](int r) { return step.partners[r]; });
      },
      [&](int n, const regular_step& step) {
        const RegularBits* const bits = step.bits + warp / 4 * kRegularBlock;
        const int* const starts = memory.starts(n) + warp / 4 * kRegularBlock;
        const T* const x = memory.x(n);
        const bool full =
            __all_sync(0xffffffffu, regular_mask(bits[lane].mask).full() && regular_mask(bits[lane + 32].mask).full());
        u32 a[4][4];
#pragma unroll
        for (int c = 0; c < 8; ++c) {
          T found[2][2];  // of two rows, in two columns
#pragma unroll
          for (int u = 0; u < 2; ++u) {
            const int i = c * 8 + lane % 4 * 2 + u;
            const T* const row = x + starts[i];
            if (full) {
              found[0][u] = row[column];
              found[1][u] = row[column + 8];
            } else {
              const regular_mask mask(bits[i].mask);
              const u32 here = mask.word(upper) >> bit;
              found[0][u] = (here & 1) ? row[mask.rank(upper, bit)] : T{};
              found[1][u] = (here & 0x100) ? row[mask.rank(upper, bit + 8)] : T{};
            }
          }
          a[c / 2][c % 2 * 2] = pair_of(found[0][0], found[0][1]);
          a[c / 2][c % 2 * 2 + 1] = pair_of(found[1][0], found[1][1]);
        }
        sums.add(a, memory.right(n));
      });
  store_sums<T, kDepth>(p, tile, my.batch * heads + my.head, sums.d, regular_line<T>(p.by_col, my.batch, my.head, 0),
                        p.by_col.row);
}

}  // namespace fretwork
