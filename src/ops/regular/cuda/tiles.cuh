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
#include "ops/regular/cuda/kernel.cuh"

namespace fretwork {

inline constexpr int kRegularTileThreads = 2 * kRegularLines;
inline constexpr u32 kRegularRow = kRegularPitch * 2;  ///< bytes of a row of x in shared memory
inline constexpr int kRegularStage = kRegularLines * kRegularPitch * 2;
/// CTAs of a multiprocessor that registers and shared memory are to be left for.
template <int kDepth, bool kWarpgroup>
inline constexpr int kRegularCtas = kDepth > 128 ? 1 : 2 + (kWarpgroup && kDepth == 64);

/// 64 rows of an operand in panels of 128 bytes; the chunks of a row are permuted as wgmma expects it.
template <int kDepth>
struct regular_panels {
  static constexpr int kPanel = kRegularBlock * 128, kBytes = kPanel * (kDepth / 64);
  u32 base;
  __device__ __forceinline__ u32 chunk(u32 row, u32 chunk) const {
    return base + chunk / 8 * kPanel + row * 128 + ((chunk % 8 ^ row % 8) << 4);
  }
};

/// Brings rows of an operand into panels. A thread has one chunk of each panel, of rows that are 32 apart.
template <int kDepth>
struct regular_fetcher {
  using Panels = regular_panels<kDepth>;
  static constexpr int kApart = kRegularTileThreads / 8;
  const u8* from;  ///< the thread's chunk of row 0
  u32 stride;      ///< bytes
  int depth;       ///< elements from the thread's first on
  template <typename T>
  __device__ __forceinline__ regular_fetcher(const T* operand, i64 row_stride, int all)
      : from(reinterpret_cast<const u8*>(operand) + threadIdx.x % 8 * 16),
        stride(static_cast<u32>(row_stride) * 2),
        depth(all - static_cast<int>(threadIdx.x % 8) * 8) {}
  /// Rows from −1, and elements from the depth on, are zero.
  template <typename Row>
  __device__ __forceinline__ void operator()(Panels to, const Row& row_of) const {
    const u32 first = threadIdx.x / 8, at = to.chunk(first, threadIdx.x % 8);
#pragma unroll
    for (int i = 0; i < kRegularBlock / kApart; ++i) {
      const int row = row_of(static_cast<int>(first) + i * kApart);
      const u8* const line = from + static_cast<u64>(static_cast<u32>(max(row, 0))) * stride;
#pragma unroll
      for (int panel = 0; panel < kDepth / 64; ++panel) {
        copy_async_16(at + i * kApart * 128 + panel * Panels::kPanel, line + panel * 128,
                      row >= 0 && panel * 64 < depth);
      }
    }
  }
};

/// A step as memory has it: what it holds of each row, and its partners.
struct regular_step {
  RegularBits bits[kRegularLines];
  int partners[kRegularBlock];
};

/// The steps of a tile, `rounds` times over: start(n, round, step) fetches what step n multiplies, work(n, step) has
/// it. One step is fetched while the one before is multiplied; its description comes a step earlier.
template <bool kWarpgroup, typename Start, typename Work>
__device__ __forceinline__ void regular_walk(const RegularTileParams& p, const RegularTile& tile, int rounds,
                                             regular_step* ring, const Start& start, const Work& work) {
  constexpr u32 kBits = sizeof(RegularBits) * kRegularLines, kPartners = 4 * kRegularBlock;
  const int total = tile.steps * rounds;
  const u32 at = threadIdx.x * 16, step_bytes = at < kBits ? kBits : kPartners;
  const u8* const described =
      at < kBits ? reinterpret_cast<const u8*>(p.bits) + static_cast<i64>(tile.first) * kBits + at
                 : reinterpret_cast<const u8*>(p.partners) + static_cast<i64>(tile.first) * kPartners + (at - kBits);
  const auto describe = [&](int n, int step) {
    if (at < kBits + kPartners) {
      copy_async_16(shared_address(ring + n % 3) + at,
                    described + static_cast<u64>(static_cast<u32>(step)) * step_bytes, true);
    }
  };
  const auto following = [&](int step) { return step + 1 == tile.steps ? 0 : step + 1; };
  int described_next = 0, round = 0, started = 0;
  for (int n = 0; n < 2 && n < total; ++n) {
    describe(n, described_next);
    described_next = following(described_next);
  }
  copy_async_commit();
  copy_async_wait<0>();
  __syncthreads();
  if (total > 0) {
    start(0, 0, ring[0]);
  }
  copy_async_commit();
  for (int n = 0; n < total; ++n) {
    copy_async_wait<0>();
    if constexpr (kWarpgroup) {
      fence_async_proxy();
    }
    __syncthreads();  // step n is there; what step n − 1 used is free
    if (n + 1 < total) {
      started = following(started);
      round += started == 0 ? 1 : 0;
      start(n + 1, round, ring[(n + 1) % 3]);
    }
    if (n + 2 < total) {
      describe(n + 2, described_next);
      described_next = following(described_next);
    }
    copy_async_commit();
    work(n, ring[n % 3]);
  }
}

/// What a step holds of a row, without the mask. In shared memory, slot s of the step (its partner s, of a run) stands
/// `lead` + s elements behind the beginning of the row, which is a 16-byte chunk of memory. Entry t of any mask stands
/// at lead + first + t.
struct regular_shape {
  int origin;
  u32 shape;
  __device__ __forceinline__ explicit regular_shape(const RegularBits& b) {
    const u64 both = *reinterpret_cast<const u64*>(&b.origin);
    origin = static_cast<int>(both);
    shape = static_cast<u32>(both >> 32);
  }
  __device__ __forceinline__ int first() const { return static_cast<int>(shape & 0xff); }
  __device__ __forceinline__ int end() const { return static_cast<int>(shape >> 8 & 0xff); }
  __device__ __forceinline__ bool any() const { return first() < kRegularBlock; }
  __device__ __forceinline__ bool run() const { return (shape & kRegularRun) != 0; }
  __device__ __forceinline__ bool full() const { return (shape & 0xffff) == kRegularBlock << 8; }
  __device__ __forceinline__ bool joins() const { return (shape & kRegularJoins) != 0; }
  __device__ __forceinline__ bool goes_on() const { return (shape & kRegularGoesOn) != 0; }
  /// All of the step, between others.
  __device__ __forceinline__ bool inner() const {
    return (shape & (kRegularJoins | kRegularGoesOn)) == (kRegularJoins | kRegularGoesOn);
  }
};

/// Rows of x in memory, which lanes name by their numbers: −1 is as good as any.
template <typename T>
struct regular_rows {
  T* values;
  u32 stride;
  __device__ __forceinline__ T* slots(int row, int origin) const {
    asm volatile("" : "+r"(row));  // a multiplication for each use, not registers for addresses from step to step
    return values + static_cast<u64>(static_cast<u32>(max(row, 0))) * stride + origin;
  }
};

/// Elements between a multiple of 16 bytes and slot 0 of a row; of the address, the lowest bits do.
__device__ __forceinline__ int lead_of(u32 slots) { return static_cast<int>(slots / 2 % 8); }
template <typename T>
__device__ __forceinline__ u32 low_bits(const T* p) {
  return static_cast<u32>(reinterpret_cast<u64>(p));
}
/// The chunk that has slot 0, or one behind it.
template <typename T>
__device__ __forceinline__ T* chunk_of(T* slots, int n) {
  return reinterpret_cast<T*>(reinterpret_cast<u64>(slots + n * 8) & ~u64{15});
}

/// A row's mask as two words. rank(bit) counts the columns below one.
struct regular_mask {
  u32 low, high;
  __device__ __forceinline__ explicit regular_mask(u64 mask)
      : low(static_cast<u32>(mask)), high(static_cast<u32>(mask >> 32)) {}
  /// Of the second word, bits count from 0 again.
  __device__ __forceinline__ u32 word(bool upper) const { return upper ? high : low; }
  __device__ __forceinline__ u32 rank(bool upper, int bit) const {
    return (upper ? __popc(low) : 0) + __popc(word(upper) & ((1u << bit) - 1));
  }
};

/// The rows of x that a warp writes, 16 of them: whole chunks as soon as they are there. What a row that goes on leaves
/// of its last chunk waits in the first chunk of its place in shared memory. Eight lanes serve a row, four rows at a
/// time.
template <typename T>
struct regular_writer {
  regular_rows<T> x;
  u32 staged;      ///< the warp's rows in shared memory
  int row[4];      ///< of x
  int waiting[4];  ///< where elements begin that wait

  __device__ __forceinline__ static int row_of(int q) { return q * 4 + static_cast<int>(threadIdx.x) % 32 / 8; }

  __device__ __forceinline__ void store_chunk(int q, T* to) const {
    u32 words[4];
    load_shared_128(words, staged + row_of(q) * kRegularRow + threadIdx.x % 8 * 16);
    store_words<4>(to, words);
  }
  /// A row whose first or last chunk is not whole, or is not there.
  __device__ __forceinline__ void write_edges(int q, const regular_shape& b) {
    const int c = static_cast<int>(threadIdx.x) % 8;
    T* const slots = x.slots(row[q], b.origin);
    const int lead = lead_of(low_bits(slots)), end = lead + b.end();
    const int begin = b.joins() ? waiting[q] : lead + b.first();
    if (begin <= c * 8 && c * 8 + 8 <= end) {
      store_chunk(q, slots - lead + c * 8);
    }
    const bool front = begin % 8 != 0, back = !b.goes_on() && end % 8 != 0;
    const int head = begin / 8 * 8 + c, tail = end / 8 * 8 + c;
    const u32 from = staged + row_of(q) * kRegularRow;
    if (front && head >= begin && head < end && !(b.goes_on() && head >= kRegularBlock)) {
      slots[head - lead] = T{static_cast<u16>(load_shared_16(from + head * 2))};
    }
    if (back && tail >= begin && tail < end && !(front && begin / 8 == end / 8)) {
      slots[tail - lead] = T{static_cast<u16>(load_shared_16(from + tail * 2))};
    }
    waiting[q] = max(begin - kRegularBlock, 0);
  }
  /// Stores what `bits` say of the staged rows.
  __device__ __forceinline__ void write(const RegularBits* bits) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const bool inner =
        regular_shape(bits[lane % 16]).inner() && (waiting[0] | waiting[1] | waiting[2] | waiting[3]) == 0;
    if (__all_sync(0xffffffffu, inner)) {
#pragma unroll
      for (int q = 0; q < 4; ++q) {
        store_chunk(q, chunk_of(x.slots(row[q], bits[row_of(q)].origin), lane % 8));
      }
    } else {
#pragma unroll
      for (int q = 0; q < 4; ++q) {
        write_edges(q, regular_shape(bits[row_of(q)]));
      }
    }
    __syncwarp();
    if (lane < 16) {
      u32 words[4];
      load_shared_128(words, staged + lane * kRegularRow + 2 * kRegularBlock);
      store_shared_128(staged + lane * kRegularRow, words);
    }
    __syncwarp();
  }
};

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

/// The stretches of x that a warp's 16 rows use in a step, on their way to shared memory, `to` being the first one's
/// place there: eight lanes on a row, four rows at a time, and then a lane for what is left of each row. kFull: all
/// masks are. number(q) says which row of x has the warp's row q · 4 + lane / 8, and, for 4, lane % 16. Returns the
/// lead of row lane % 16.
template <bool kFull, typename T, typename Number>
__device__ __forceinline__ int copy_stretches(const RegularBits* bits, u32 to, const regular_rows<T>& x,
                                              const Number& number) {
  const int lane = static_cast<int>(threadIdx.x % 32), c = lane % 8;
  const T* from[4];
  int bytes[4];
  bool there[4];
#pragma unroll
  for (int q = 0; q < 4; ++q) {
    const regular_shape b(bits[q * 4 + lane / 8]);
    const T* const slots = x.slots(number(q), b.origin);
    const int behind = c * 8 - lead_of(low_bits(slots));  // the first of the chunk, as a slot
    from[q] = chunk_of(slots, c);
    bytes[q] = kFull ? 16 : min(16, (b.end() - behind) * 2);
    there[q] = kFull || (b.first() < behind + 8 && behind < b.end());
  }
#pragma unroll
  for (int q = 0; q < 4; ++q) {  // together: each group of copies has some cost of its own
    copy_async_part_if(there[q], to + (q * 4 + lane / 8) * kRegularRow + c * 16, from[q], bytes[q]);
  }
  const regular_shape b(bits[lane % 16]);
  const T* const slots = x.slots(number(4), b.origin);
  const int lead = lead_of(low_bits(slots)), left = lead + b.end() - kRegularBlock;
  copy_async_part_if(lane < 16 && left > 0 && b.any(), to + lane % 16 * kRegularRow + 2 * kRegularBlock,
                     chunk_of(slots, 8), left * 2);
  return lead;
}

/// The same, whatever the masks are; nothing, and 0, where there are none.
template <typename T, typename Number>
__device__ __forceinline__ int fetch_stretches(const RegularBits* bits, u32 to, const regular_rows<T>& x,
                                               const Number& number) {
  const regular_shape own(bits[threadIdx.x % 16]);
  if (__all_sync(0xffffffffu, own.full())) {
    return copy_stretches<true>(bits, to, x, number);
  }
  return __any_sync(0xffffffffu, own.any()) ? copy_stretches<false>(bits, to, x, number) : 0;
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
