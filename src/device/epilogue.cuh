// The way of a warpgroup's sums out of registers: through shared memory, then by the copy engine.
#pragma once

#include "device/barrier.cuh"
#include "device/tf32.cuh"
#include "device/tma.cuh"
#include "device/wgmma.cuh"

namespace fretwork {

inline constexpr u32 kPieceBytes = 8192;

/// Sums of a warpgroup (kAt … kAt + 31 of a thread: 64 × 64) to 8 KB of shared memory as the copy engine swizzles rows
/// of 128 bytes: rows first, or columns first. The last of a tile may have 32 columns.
template <typename T, bool kTransposed, int kAt, int kSize>
__device__ __forceinline__ void store_piece(const float (&d)[kSize], u32 to) {
  constexpr int kEights = kSize - kAt < 32 ? (kSize - kAt) / 4 : 8;  // of columns
  const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
#pragma unroll
  for (int j = 0; j < kEights; j += 2) {
    const int at = kAt + 4 * j;
    const u32 a = narrow_pair<T>(d[at], d[at + 1]), b = narrow_pair<T>(d[at + 2], d[at + 3]);
    const u32 c = narrow_pair<T>(d[at + 4], d[at + 5]), e = narrow_pair<T>(d[at + 6], d[at + 7]);
    if constexpr (kTransposed) {
      const u32 row = 8 * (j + lane / 16) + lane % 8, unit = 2 * warp + lane / 8 % 2;
      wgmma::store_pieces_transposed(to + tma::swizzled<128>(row * 128 + unit * 16), a, b, c, e);
    } else {
      const u32 row = 16 * warp + lane / 8 % 2 * 8 + lane % 8, unit = j + lane / 16;
      wgmma::store_pieces(to + tma::swizzled<128>(row * 128 + unit * 16), a, b, c, e);
    }
  }
}

/// Calls `work(some, turn)` for 32 of a thread's sums at a time, or fewer, which then change places: unrolled for all
/// of them, an activation took the compiler a third of its time.
template <int kSize, typename Work>
__device__ __forceinline__ void in_turns(float (&d)[kSize], Work work) {
  constexpr int kEach = kSize % 32 == 0 ? 32 : kSize % 16 == 0 ? 16 : 8;
#pragma unroll 1
  for (int turn = 0; turn < kSize / kEach; ++turn) {
    float some[kEach];
#pragma unroll
    for (int n = 0; n < kEach; ++n) {
      some[n] = d[n];
    }
    work(some, turn);
#pragma unroll
    for (int n = 0; n < kSize; ++n) {
      d[n] = n < kSize - kEach ? d[n + kEach] : some[n - (kSize - kEach)];
    }
  }
}

/// A piece of a warpgroup's sums leaves through the buffer whose turn it is: all threads `write(buffer)`, then one
/// calls `store(buffer)`, which is still on its way when this returns.
template <int kBuffers, typename Write, typename Store>
__device__ __forceinline__ void store_in_turn(u32 turn, u32 buffers, u32 barrier, Write write, Store store) {
  const bool leader = threadIdx.x % 128 == 0;
  const u32 buffer = buffers + turn % kBuffers * kPieceBytes;
  if (leader) {
    tma::store_wait_read<kBuffers - 1>();
  }
  named_barrier(barrier, 128);
  write(buffer);
  fence_async_proxy();
  named_barrier(barrier, 128);
  if (leader) {
    store(buffer);
    tma::store_commit();
  }
}

/// The sums of a warpgroup are pieces of 64 columns (32 of fp32, whose rows are tf32's), this many.
template <typename T, int kSize>
inline constexpr int pieces_of = kSize* static_cast<int>(sizeof(T)) / 64;

/// One of them to shared memory, as store_piece does.
template <typename T, bool kTransposed, int kPiece, int kSize>
__device__ __forceinline__ void write_piece(const float (&d)[kSize], u32 to) {
  constexpr int kAt = kSize / pieces_of<T, kSize> * kPiece;
  if constexpr (is_same<T, float>) {
    tf32::store_piece<kTransposed, kAt>(d, to);
  } else {
    store_piece<T, kTransposed, kAt>(d, to);
  }
}

/// They leave through one buffer: all threads of the warpgroup call `store(piece, buffer)`.
template <typename T, bool kTransposed, int kPiece = 0, int kSize, typename Store>
__device__ __forceinline__ void store_tile_by_threads(const float (&d)[kSize], u32 buffer, u32 barrier, Store store) {
  if constexpr (kPiece < pieces_of<T, kSize>) {
    named_barrier(barrier, 128);
    write_piece<T, kTransposed, kPiece>(d, buffer);
    named_barrier(barrier, 128);
    store(kPiece, buffer);
    store_tile_by_threads<T, kTransposed, kPiece + 1>(d, buffer, barrier, store);
  }
}

/// They leave through kBuffers buffers, which take turns: `turn` counts the pieces of earlier tiles, and matters where
/// tiles are no multiple of kBuffers pieces. `store(piece, buffer)` is called by one thread. The last stores are still
/// on their way when this returns.
template <typename T, bool kTransposed, int kBuffers, int kPiece = 0, int kSize, typename Store>
__device__ __forceinline__ void store_tile(const float (&d)[kSize], u32 buffers, u32 barrier, Store store,
                                           u32 turn = 0) {
  if constexpr (kPiece < pieces_of<T, kSize>) {
    store_in_turn<kBuffers>(
        turn + kPiece, buffers, barrier, [&](u32 buffer) { write_piece<T, kTransposed, kPiece>(d, buffer); },
        [&](u32 buffer) { store(kPiece, buffer); });
    store_tile<T, kTransposed, kBuffers, kPiece + 1>(d, buffers, barrier, store, turn);
  }
}

}  // namespace fretwork
