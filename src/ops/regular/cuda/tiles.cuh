// SPLAT's operators on tensor cores. A tile is 128 lines in two groups of 64; a step multiplies them with 64 partners
// as a dense tile. That the matrix is sparse shows only where the tile meets x (tile_rows.cuh). What a tile has and the
// pattern has not is never stored, and counts as zero. Sums are fp32 in a fixed order.
#pragma once

#include "device/mma.cuh"
#include "device/wgmma.cuh"
#include "ops/regular/cuda/tile_rows.cuh"

namespace fretwork {

/// Puts a warp's 16 rows of d where its writer takes them from. Registers 4c and 4c + 1 hold row lane / 4, columns
/// 8c + lane % 4 · 2 and the next; 4c + 2 and 4c + 3 the row 8 below. `rows` has 16 bits of either's
/// address in memory.
template <typename T>
__device__ __forceinline__ void stage_scores(const float (&d)[32], u32 staged, u32 rows, const RegularBits* bits) {
  const u32 lane = threadIdx.x % 32;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const u32 r = lane / 4 + 8 * half;
    const regular_shape b(bits[r]);
    const u32 row = staged + r * kRegularRow + lead_of((rows >> 16 * half) + static_cast<u32>(b.origin) * 2) * 2;
    if (__all_sync(0xffffffffu, b.run())) {  // what is beside the run is never stored
      const u32 to = row + lane % 4 * 4;
#pragma unroll
      for (int c = 0; c < 8; ++c) {
        const u32 pair = narrow_pair<T>(d[4 * c + 2 * half], d[4 * c + 2 * half + 1]);
        store_shared_16(to + c * 16, static_cast<u16>(pair));
        store_shared_16(to + c * 16 + 2, static_cast<u16>(pair >> 16));
      }
    } else {
      const regular_mask mask(bits[r].mask);
      const u32 to = row + b.first() * 2;
#pragma unroll
      for (int c = 0; c < 8; ++c) {
        const u32 pair = narrow_pair<T>(d[4 * c + 2 * half], d[4 * c + 2 * half + 1]);
        const int bit = c % 4 * 8 + static_cast<int>(lane) % 4 * 2;
        const u32 here = mask.word(c >= 4) >> bit, at = to + mask.rank(c >= 4, bit) * 2;
        if (here & 1) {
          store_shared_16(at, static_cast<u16>(pair));
        }
        if (here & 2) {
          store_shared_16(at + (here & 1) * 2, static_cast<u16>(pair >> 16));
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
__global__ void __launch_bounds__(kRegularTileThreads, kRegularCtas<kDepth, kWarpgroup>)
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
  const regular_rows<T> x{regular_line<T>(p.values, my.batch, my.head, 0), static_cast<u32>(p.values.row)};
  const auto line_of = [&](int n) { return lines[warp * 16 + n].line; };
  const regular_fetcher<kDepth> by_col(regular_line<const T>(p.by_col, my.batch, my.head / p.group, 0), p.by_col.row,
                                       p.depth);
  if (tile.steps > 0) {
    const regular_fetcher<kDepth> by_row(regular_line<const T>(p.by_row, my.batch, my.head, 0), p.by_row.row, p.depth);
    for (int g = 0; g < kRegularGroups; ++g) {
      by_row(Panels{shared_address(held) + g * Panels::kBytes},
             [&](int r) { return lines[g * kRegularBlock + r].line; });
    }
  }
  regular_writer<T> writer{x, shared_address(held) + warp * 16 * kRegularRow, {}, {}};
#pragma unroll
  for (int q = 0; q < 4; ++q) {
    writer.row[q] = line_of(writer.row_of(q));
  }
  const u32 rows = low_bits(x.slots(line_of(lane / 4), 0)) % 65536 | low_bits(x.slots(line_of(lane / 4 + 8), 0)) << 16;
  u32 a[kDepth / 16][4];
  regular_walk<kWarpgroup>(
      p, tile, 1, reinterpret_cast<regular_step*>(held + kLeft),
      [&](int n, int, const regular_step& step) { by_col(right(n), [&](int r) { return step.partners[r]; }); },
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
        if (__any_sync(0xffffffffu, regular_shape(bits[lane % 16]).any())) {
          stage_scores<T>(d, writer.staged, rows, bits);
          __syncwarp();
          writer.write(bits);
        }
      });
  // Zeros behind the ends of rows, a row at a time: neighbouring stores, where there are many.
  const RegularTileLine own = lines[warp * 16 + lane % 16];
  const int entries =
      own.line >= 0 && own.earlier == 0 ? static_cast<int>(p.first[own.line + 1] - p.first[own.line]) : p.width;
  for (u32 left = __ballot_sync(~0u, entries < p.width) & 0xffff; left != 0; left &= left - 1) {
    const int r = __ffs(static_cast<int>(left)) - 1;
    T* const row = x.slots(__shfl_sync(~0u, own.line, r), 0);
    fill_zeros(row + __shfl_sync(~0u, entries, r), row + p.width);
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

/// Adds what earlier tiles left of a line to the lane's sums of it. Several loads are under way at once.
template <int kDepth>
__device__ __forceinline__ void add_earlier(float (&d)[kDepth / 2], int half, const float* sums, int depth) {
  constexpr int kTogether = 8;
#pragma unroll
  for (int first = 0; first < kDepth / 8; first += kTogether) {
    float x[kTogether], y[kTogether];
#pragma unroll
    for (int u = 0; u < kTogether; ++u) {
      x[u] = y[u] = 0;
      if ((first + u) * 8 < depth) {  // from L2: this multiprocessor may remember what another head left here
        asm volatile("ld.global.cg.v2.f32 {%0, %1}, [%2];"
                     : "=f"(x[u]), "=f"(y[u])
                     : "l"(sums + (first + u) * 8)
                     : "memory");
      }
    }
#pragma unroll
    for (int u = 0; u < kTogether; ++u) {
      d[4 * (first + u) + 2 * half] += x[u];
      d[4 * (first + u) + 2 * half + 1] += y[u];
    }
  }
}

/// Stores the sums of a tile: as the result, or for the tiles of later waves. `head` counts heads of all batches.
template <typename T, int kDepth>
__device__ __forceinline__ void store_sums(const RegularTileParams& p, const RegularTile& tile, int head,
                                           float (&d)[kDepth / 2], T* to, i64 stride) {
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
    if (line.earlier != 0) {
      add_earlier<kDepth>(d, half, sums, p.depth);
    }
#pragma unroll
    for (int c = 0; c < kDepth / 8; ++c) {
      if (c * 8 < p.depth) {
        const float first = d[4 * c + 2 * half], second = d[4 * c + 2 * half + 1];
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
template <int kDepth>
struct regular_memory {
  using Panels = regular_panels<kDepth>;
  u8* base;
  __device__ __forceinline__ Panels right(int n) const { return {shared_address(base) + n % 2 * Panels::kBytes}; }
  __device__ __forceinline__ u32 x(int n) const {
    return shared_address(base) + 2 * Panels::kBytes + n % 2 * kRegularStage;
  }
  __device__ __forceinline__ regular_step* steps() const {
    return reinterpret_cast<regular_step*>(base + 2 * (Panels::kBytes + kRegularStage));
  }
  /// Where slot 0 of each row stands, in bytes from x(n).
  __device__ __forceinline__ u32* starts(int n) const {
    return reinterpret_cast<u32*>(steps() + 3) + n % 2 * kRegularLines;
  }
  __device__ __forceinline__ u32* room() const { return starts(0) + 2 * kRegularLines; }
};

/// Which masks a warp meets in a step.
enum class regular_masks { none, full, runs, any };
__device__ __forceinline__ regular_masks masks_of(const regular_shape& first, const regular_shape& second) {
  if (__all_sync(0xffffffffu, first.full() && second.full())) {
    return regular_masks::full;
  }
  if (!__any_sync(0xffffffffu, first.any() || second.any())) {
    return regular_masks::none;
  }
  return __all_sync(0xffffffffu, first.run() && second.run()) ? regular_masks::runs : regular_masks::any;
}

/// Half words of all ones where the two lowest bits are set.
__device__ __forceinline__ u32 halves_of(u32 bits) { return (bits & 1) * 0xffffu + (bits & 2) * 0x7fff8000u; }

/// by_row[i] = Σ_t x[i, t]·by_col[column].
template <typename T, int kDepth, bool kWarpgroup>
__global__ void __launch_bounds__(kRegularTileThreads, kRegularCtas<kDepth, kWarpgroup>)
    regular_by_row_tiles(const __grid_constant__ RegularTileParams p) {
  extern __shared__ __align__(1024) u8 shared[];
  const regular_memory<kDepth> memory{shared};
  const int warp = static_cast<int>(threadIdx.x / 32), lane = static_cast<int>(threadIdx.x % 32);
  const regular_task my(take_tile(p, memory.room()), p.tile_count, 1, p.heads);
  const RegularTile tile = p.tiles[my.chunk];
  const regular_rows<const T> values{regular_line<const T>(p.values, my.batch, my.head, 0),
                                     static_cast<u32>(p.values.row)};
  const auto line_of = [&](int n) { return p.lines[tile.lines + warp * 16 + n].line; };
  int numbers[5] = {0, 0, 0, 0, line_of(lane % 16)};
#pragma unroll
  for (int q = 0; q < 4; ++q) {
    numbers[q] = line_of(q * 4 + lane / 8);
  }
  const u32 rows = low_bits(values.slots(line_of(lane / 4), 0)) % 65536 |
                   low_bits(values.slots(line_of(lane / 4 + 8), 0)) << 16;  // of the lane's two, in memory
  const regular_fetcher<kDepth> by_col(regular_line<const T>(p.by_col, my.batch, my.head / p.group, 0), p.by_col.row,
                                       p.depth);
  regular_sums<T, kDepth, kWarpgroup> sums;
  regular_walk<kWarpgroup>(
      p, tile, 1, memory.steps(),
      [&](int n, int, const regular_step& step) {
        const RegularBits* const bits = step.bits + warp * 16;
        const u32 to = memory.x(n) + warp * 16 * kRegularRow;
        const auto number = [&](int q) { return numbers[q]; };
        fetch_stretches(bits, to, values, number);
        by_col(memory.right(n), [&](int r) { return step.partners[r]; });
      },
      [&](int n, const regular_step& step) {
        const RegularBits* const bits = step.bits + warp * 16 + lane / 4;
        const regular_shape shapes[2] = {regular_shape(bits[0]), regular_shape(bits[8])};
        u32 a[4][4] = {}, x[2], words[2];  // slot 0 of the lane's rows, and the word of its first pair
        const auto collect = [&](const auto& pair) {
#pragma unroll
          for (int c = 0; c < 8; ++c) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
              a[c / 2][half + c % 2 * 2] = pair(half, c);
            }
          }
        };
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          x[half] = memory.x(n) + (warp * 16 + lane / 4 + 8 * half) * kRegularRow +
                    lead_of((rows >> 16 * half) + static_cast<u32>(shapes[half].origin) * 2) * 2;
          words[half] = (x[half] & ~3u) + lane % 4 * 4;
          asm volatile("" : "+r"(words[half]));  // once
        }
        const auto neighbours = [&](int half, int c) {
          const u32 at = words[half] + c * 16;
          return __funnelshift_r(load_shared_32(at), load_shared_32(at + 4), x[half] % 4 * 8);
        };
        const auto bit = [&](int c) { return c % 4 * 8 + lane % 4 * 2; };
        switch (masks_of(shapes[0], shapes[1])) {
          case regular_masks::none:
            break;
          case regular_masks::full:
            collect(neighbours);
            break;
          case regular_masks::runs:
            collect([&](int half, int c) {
              return neighbours(half, c) & halves_of(regular_mask(bits[8 * half].mask).word(c >= 4) >> bit(c));
            });
            break;
          case regular_masks::any:
            collect([&](int half, int c) {
              const regular_mask mask(bits[8 * half].mask);
              const u32 here = mask.word(c >= 4) >> bit(c);
              const u32 at = x[half] + (shapes[half].first() + mask.rank(c >= 4, bit(c))) * 2;
              return ((here & 1) ? load_shared_16(at) : 0) | ((here & 2) ? load_shared_16(at + (here & 1) * 2) : 0)
                                                                 << 16;
            });
        }
        sums.add(a, memory.right(n));
      });
  store_sums<T, kDepth>(p, tile, my.batch * p.heads + my.head, sums.d, regular_line<T>(p.by_row, my.batch, my.head, 0),
                        p.by_row.row);
}

/// by_col[j] = Σ x[i, t]·by_row[i] over the entries of column j and the heads that share it.
template <typename T, int kDepth, bool kWarpgroup>
__global__ void __launch_bounds__(kRegularTileThreads, kRegularCtas<kDepth, kWarpgroup>)
    regular_by_col_tiles(const __grid_constant__ RegularTileParams p) {
  extern __shared__ __align__(1024) u8 shared[];
  const regular_memory<kDepth> memory{shared};
  const int warp = static_cast<int>(threadIdx.x / 32), lane = static_cast<int>(threadIdx.x % 32);
  const int heads = p.heads / p.group;
  const regular_task my(take_tile(p, memory.room()), p.tile_count, 1, heads);
  const RegularTile tile = p.tiles[my.chunk];
  const bool upper = warp % 4 >= 2;             // the word of the masks that has this warp's 16 columns
  const int bit = warp % 2 * 16 + lane / 4;     // and the first of the lane's two
  const int column = warp % 4 * 16 + lane / 4;  // which is this of the group's
  const regular_rows<const T> values{regular_line<const T>(p.values, my.batch, my.head * p.group, 0),
                                     static_cast<u32>(p.values.row)};
  const regular_fetcher<kDepth> by_row(regular_line<const T>(p.by_row, my.batch, my.head * p.group, 0), p.by_row.row,
                                       p.depth);
  regular_sums<T, kDepth, kWarpgroup> sums;
  regular_walk<kWarpgroup>(
      p, tile, p.group, memory.steps(),
      [&](int n, int round, const regular_step& step) {
        const RegularBits* const bits = step.bits + warp * 16;
        const int* const partners = step.partners + warp % 4 * 16;
        const regular_rows<const T> x{values.values + round * p.values.head, values.stride};
        const u32 to = memory.x(n) + warp * 16 * kRegularRow;
        const auto number = [&](int q) { return partners[q < 4 ? q * 4 + lane / 8 : lane % 16]; };
        const int lead = fetch_stretches(bits, to, x, number);
        memory.starts(n)[warp * 16 + lane % 16] = (warp * 16 + lane % 16) * kRegularRow + lead * 2;
        regular_fetcher<kDepth> rows = by_row;
        rows.from += round * p.by_row.head * 2;
        rows(memory.right(n), [&](int r) { return step.partners[r]; });
      },
      [&](int n, const regular_step& step) {
        const RegularBits* const bits = step.bits + warp / 4 * kRegularBlock;
        const u32* const starts = memory.starts(n) + warp / 4 * kRegularBlock;
        const u32 x = memory.x(n);
        u32 a[4][4] = {};
        const auto collect = [&](const auto& found) {
#pragma unroll
          for (int c = 0; c < 8; ++c) {
            const int i = c * 8 + lane % 4 * 2;
            const u64 both = *reinterpret_cast<const u64*>(starts + i);
            u32 low[2], high[2];  // of two rows, in two columns
            found(low, i, x + static_cast<u32>(both));
            found(high, i + 1, x + static_cast<u32>(both >> 32));
            a[c / 2][c % 2 * 2] = __byte_perm(low[0], high[0], 0x5410);
            a[c / 2][c % 2 * 2 + 1] = __byte_perm(low[1], high[1], 0x5410);
          }
        };
        const auto neighbours = [&](u32(&two)[2], int, u32 row) {
          two[0] = load_shared_16(row + column * 2);
          two[1] = load_shared_16(row + column * 2 + 16);
        };
        switch (masks_of(regular_shape(bits[lane]), regular_shape(bits[lane + 32]))) {
          case regular_masks::none:
            break;
          case regular_masks::full:
            collect(neighbours);
            break;
          case regular_masks::runs:
            collect([&](u32(&two)[2], int i, u32 row) {
              const u32 here = reinterpret_cast<const u32*>(&bits[i].mask)[upper ? 1 : 0] >> bit;
              neighbours(two, i, row);
              two[0] = (here & 1) ? two[0] : 0;
              two[1] = (here & 0x100) ? two[1] : 0;
            });
            break;
          case regular_masks::any:
            collect([&](u32(&two)[2], int i, u32 row) {
              const regular_mask mask(bits[i].mask);
              const u32 here = mask.word(upper) >> bit, entries = row + regular_shape(bits[i]).first() * 2;
              two[0] = (here & 1) ? load_shared_16(entries + mask.rank(upper, bit) * 2) : 0;
              two[1] = (here & 0x100) ? load_shared_16(entries + mask.rank(upper, bit + 8) * 2) : 0;
            });
        }
        sums.add(a, memory.right(n));
      });
  store_sums<T, kDepth>(p, tile, my.batch * heads + my.head, sums.d, regular_line<T>(p.by_col, my.batch, my.head, 0),
                        p.by_col.row);
}

}  // namespace fretwork
