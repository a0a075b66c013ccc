// A tile of the portable kernels: its stages in shared memory, how they are copied, and how eight warps multiply them.
#pragma once

#include "device/tile.cuh"

namespace fretwork {

inline constexpr int kTileRows = 128, kTileThreads = 256, kWarps = kTileThreads / 32, kStageBytes = 128;

struct alignas(16) Chunk {
  u32 word[4];
};

/// A stage: the left operand's tile, then the right one's. Lines are along K (K inner) or across it.
template <typename T, int Cols, bool LeftKInner, bool RightKInner>
struct Stage {
  static constexpr int kDepth = kStageBytes / static_cast<int>(sizeof(T));
  static constexpr int kLeftLine = LeftKInner ? kStageBytes : kTileRows * static_cast<int>(sizeof(T));
  static constexpr int kRightLine = RightKInner ? kStageBytes : Cols * static_cast<int>(sizeof(T));
  static constexpr int kLeftBytes = kTileRows * kStageBytes, kBytes = kLeftBytes + Cols * kStageBytes;
  shared_tile<kLeftLine> left;
  shared_tile<kRightLine> right;
  __device__ __forceinline__ explicit Stage(u32 base) : left{base}, right{base + kLeftBytes} {}
};

/// A line of a tile that a thread copies: `first` (below Step) is the thread's, `more` (a multiple of Step) is known to
/// the compiler, so that most of an address is worked out once.
template <int Step>
struct Line {
  int first, more;
  template <int Size>
  __device__ __forceinline__ int quotient() const {
    return more / Size + (Size >= Step ? 0 : first / Size);
  }
  template <int Size>
  __device__ __forceinline__ int remainder() const {
    return more % Size + (Size >= Step ? first : first % Size);
  }
  __device__ __forceinline__ i64 times(int stride) const {
    return static_cast<i64>(first) * stride + static_cast<i64>(more) * stride;
  }
  __device__ __forceinline__ int value() const { return first + more; }
};

/// Where the 16 bytes of a chunk lie, and how many of them count.
struct Source {
  const u8* from;
  int bytes;
};

/// Copies a tile of 128 bytes of K for `Across` rows (or columns) of an operand. `source(line, inner)` finds the chunk
/// that begins at entry `inner` of a line. `Partial`: chunks may count in part; else wholly or not at all.
template <typename T, int Across, bool Partial, int Bytes, typename From>
__device__ __forceinline__ void copy_tile(shared_tile<Bytes> tile, const From& source) {
  constexpr int kChunks = Bytes / 16, kStep = kTileThreads / kChunks;
  constexpr int kEach = Across * kStageBytes / 16 / kTileThreads;
  static_assert(kStep % 8 == 0);
  const int first = static_cast<int>(threadIdx.x) / kChunks, chunk = static_cast<int>(threadIdx.x) % kChunks;
  Source s[kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    s[i] = source(Line<kStep>{first, i * kStep}, chunk * chunk_of<T>);
  }
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const u32 to = tile.chunk(i * kStep, first, chunk);
    if constexpr (Partial) {
      copy_async_part(to, s[i].from, s[i].bytes);
    } else {
      copy_async_16(to, s[i].from, s[i].bytes != 0);
    }
  }
}

/// A line's distance in bytes; the host sees to it that it fits.
template <typename T>
__device__ __forceinline__ int in_bytes(i64 stride) {
  return static_cast<int>(stride) * static_cast<int>(sizeof(T));
}

/// Bytes of a chunk that begins at `at` of `size` entries.
template <typename T>
__device__ __forceinline__ int bytes_inside(int at, int size) {
  const int left = (size - at) * static_cast<int>(sizeof(T));
  return left >= 16 ? 16 : left > 0 ? left : 0;
}

/// How eight warps share a tile: Rows × Cols each, a warp's place.
template <int Rows_, int Cols_, int TileCols>
struct WarpTile {
  static constexpr int kRows = Rows_, kCols = Cols_;
  static_assert(kTileRows / kRows * (TileCols / kCols) == kWarps && kRows % 16 == 0 && kCols % 16 == 0);
  int m, n;
  __device__ __forceinline__ WarpTile() {
    const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0);
    m = warp % (kTileRows / kRows) * kRows;
    n = warp / (kTileRows / kRows) * kCols;
  }
};

template <typename Warp>
using warp_sums = register_sums<Warp::kRows / 16, Warp::kCols / 8>;
template <typename Warp>
using warp_operands = register_operands<Warp::kRows / 16, Warp::kCols / 16>;

template <typename T, bool LeftKInner, bool RightKInner, typename Warp, typename StageT>
__device__ __forceinline__ void load_operands(warp_operands<Warp>& o, const StageT& stage, const Warp& warp, int k) {
#pragma unroll
  for (int i = 0; i < Warp::kRows / 16; ++i) {
    load_left<T, LeftKInner>(o.left[i], stage.left, warp.m + i * 16, k);
  }
#pragma unroll
  for (int j = 0; j < Warp::kCols / 16; ++j) {
    load_right<T, RightKInner>(o.right[j], stage.right, warp.n + j * 16, k);
  }
}

/// sums += one mma of K, at all places of the warp.
template <typename T, int Products, typename Warp>
__device__ __forceinline__ void multiply_step(warp_sums<Warp>& sums, const warp_operands<Warp>& o) {
  using Operand = mma_operand<T, Products>;
  Operand right[Warp::kCols / 16];
#pragma unroll
  for (int j = 0; j < Warp::kCols / 16; ++j) {
    right[j].set(o.right[j]);
  }
#pragma unroll
  for (int i = 0; i < Warp::kRows / 16; ++i) {
    Operand left;
    left.set(o.left[i]);
#pragma unroll
    for (int j = 0; j < Warp::kCols / 16; ++j) {
      multiply(sums.at[i][2 * j], left, right[j], 0);
      multiply(sums.at[i][2 * j + 1], left, right[j], 2);
    }
  }
}

/// sums += [first, first + Depth) of the stage's K. `mask` has a bit for each 16×16 place of the warp: where it is 0
/// the sums stay as they are. `All`: every place is wanted.
template <typename T, int Products, bool LeftKInner, bool RightKInner, int Depth, bool All, typename Warp,
          typename StageT>
__device__ __forceinline__ void multiply_stage(warp_sums<Warp>& sums, const StageT& stage, const Warp& warp, int first,
                                               u32 mask) {
  constexpr int kSteps = Depth / mma_depth<T>, kAcross = Warp::kCols / 16;
  using Operand = mma_operand<T, Products>;
  warp_operands<Warp> o[2];
  load_operands<T, LeftKInner, RightKInner>(o[0], stage, warp, first);
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
    if (s + 1 < kSteps) {
      load_operands<T, LeftKInner, RightKInner>(o[(s + 1) % 2], stage, warp, first + (s + 1) * mma_depth<T>);
    }
    const auto& now = o[s % 2];
    if constexpr (All) {
      multiply_step<T, Products, Warp>(sums, now);
      continue;
    }
    // Operands are rounded as seldom as the places that are wanted allow.
#pragma unroll
    for (int i = 0; i < Warp::kRows / 16; ++i) {
      if (Operand::kRounds && (mask >> i * kAcross & ((1u << kAcross) - 1)) == 0) {
        continue;
      }
      Operand left;
      left.set(now.left[i]);
#pragma unroll
      for (int j = 0; j < kAcross; ++j) {
        if ((mask >> (i * kAcross + j) & 1) != 0) {
          Operand right;
          right.set(now.right[j]);
          multiply(sums.at[i][2 * j], left, right, 0);
          multiply(sums.at[i][2 * j + 1], left, right, 2);
        }
      }
    }
  }
}

template <typename Warp>
__device__ __forceinline__ void clear(warp_sums<Warp>& sums) {
#pragma unroll
  for (int i = 0; i < Warp::kRows / 16; ++i) {
#pragma unroll
    for (int j = 0; j < Warp::kCols / 8; ++j) {
#pragma unroll
      for (float& s : sums.at[i][j]) {
        s = 0.0f;
      }
    }
  }
}

}  // namespace fretwork
