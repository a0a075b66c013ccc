// What the tile kernels of SPLAT's operators move: operands in panels for wgmma, the walk through a tile's steps, and
// rows of x between memory and shared memory. Of each row, a step holds the columns that a mask names, and they stand
// side by side in x; so x is read and written in chunks of 16 bytes, whatever the alignment of its rows.
#pragma once

#include "device/barrier.cuh"
#include "device/copy_async.cuh"
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

}  // namespace fretwork
