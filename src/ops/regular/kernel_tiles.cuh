// SPLAT's operators on tensor cores. Lines with the same stride and remainder meet the same progression of partners,
// each a stretch of it: 64 such lines and 64 partners are a dense tile, and only where an entry stands in x tells that
// the matrix is sparse. What a tile has and the pattern has not is never read or written. Sums are fp32 in a fixed
// order.
#pragma once

#include "device/tile.cuh"
#include "ops/regular/kernel.cuh"

namespace fretwork {

inline constexpr int kRegularTile = 64, kRegularTileThreads = 128;

__device__ __forceinline__ int tile_steps(const RegularTile& tile) {
  return (tile.slots + kRegularTile - 1) / kRegularTile;
}
__device__ __forceinline__ i64 partner(const RegularTile& tile, int slot) {
  return tile.base + static_cast<i64>(slot) * tile.step;
}

/// Fetches up to 64 rows of an operand; rows from `count` on, and elements from `depth` on, are zero.
template <typename T, int kBytes, typename Row>
__device__ __forceinline__ void fetch_rows(shared_tile<kBytes> to, const T* from, i64 stride, int count, int depth,
                                           const Row& row) {
  constexpr int kChunks = kBytes / 16;
#pragma unroll 4
  for (int c = static_cast<int>(threadIdx.x); c < kRegularTile * kChunks; c += kRegularTileThreads) {
    const int r = c / kChunks, q = c % kChunks;
    const bool inside = r < count && q * chunk_of<T> < depth;
    copy_async_16(to.chunk(r, q), from + (inside ? row(r) * stride + q * chunk_of<T> : 0), inside);
  }
}

/// The partners of a tile in its step n.
template <typename T, int kBytes>
__device__ __forceinline__ void fetch_partners(shared_tile<kBytes> to, const T* from, i64 stride,
                                               const RegularTile& tile, int n, int depth) {
  const int first = n * kRegularTile;
  fetch_rows(to, from, stride, tile.slots - first, depth, [&](int r) { return partner(tile, first + r); });
}

/// Rows of the tile that this warp computes, 16 of them: where they lie, and where their entries begin and end.
struct regular_rows {
  int row, offset, count;  ///< of row lane % 16; entry t stands at slot offset + t; no entries beyond the tile's lines
  __device__ __forceinline__ regular_rows(const RegularTileParams& p, const RegularTile& tile) {
    const int m = static_cast<int>(threadIdx.x / 32 * 16 + threadIdx.x % 16);
    row = m < tile.lines ? p.order[tile.first + m] : -1;
    const RegularLine line = row >= 0 ? p.rows[row] : RegularLine{0, 1, 0};
    offset = line.count > 0 ? (line.start - tile.base) / tile.step : 0;
    count = line.count;
  }
  __device__ __forceinline__ int row_of(int r) const { return __shfl_sync(0xffffffffu, row, r); }
  __device__ __forceinline__ int offset_of(int r) const { return __shfl_sync(0xffffffffu, offset, r); }
  __device__ __forceinline__ int count_of(int r) const { return __shfl_sync(0xffffffffu, count, r); }
};

/// Zeros from `to` to `end`, by a warp.
template <typename T>
__device__ __forceinline__ void fill_zeros(T* to, T* end) {
  const int lane = threadIdx.x % 32;
  T* const whole = reinterpret_cast<T*>((reinterpret_cast<u64>(to) + 15) / 16 * 16);
  for (T* at = to + lane; at < end && at < whole; at += 32) {
    *at = T{0};
  }
  const u32 zeros[4] = {};
  T* at = whole + lane * chunk_of<T>;
  for (; at + chunk_of<T> <= end; at += 32 * chunk_of<T>) {
    store_words<4>(at, zeros);
  }
  for (; at < end; ++at) {  // one lane's, less than a chunk
    *at = T{0};
  }
}

/// x[i, t] = by_row[i] · by_col[column].
template <typename T, int kDepth>
__global__ void __launch_bounds__(kRegularTileThreads)
    regular_values_tiles(const __grid_constant__ RegularTileParams p) {
  extern __shared__ __align__(128) u8 shared[];
  using Tile = shared_tile<kDepth * 2>;
  constexpr int kTileBytes = kRegularTile * kDepth * 2;
  constexpr int kPitch = kRegularTile + 8;  // of results on their way out, where the left operand was
  constexpr int kLeftBytes = kTileBytes > kRegularTile * kPitch * 2 ? kTileBytes : kRegularTile * kPitch * 2;
  const Tile left{shared_address(shared)};
  const auto right = [&](int n) { return Tile{left.base + kLeftBytes + n % 2 * kTileBytes}; };
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  T* const staged = reinterpret_cast<T*>(shared) + warp * 16 * kPitch;

  const regular_task my(blockIdx.x, p.tile_count, 1, p.heads);
  const RegularTile tile = p.tiles[my.chunk];
  const T* const by_col = regular_line<const T>(p.by_col, my.batch, my.head / p.group, 0);
  const auto fetch = [&](int n) {
    fetch_partners(right(n), by_col, p.by_col.row, tile, n, p.depth);
    copy_async_commit();
  };
  const int steps = tile_steps(tile);
  if (steps > 0) {
    fetch_rows(left, regular_line<const T>(p.by_row, my.batch, my.head, 0), p.by_row.row, tile.lines, p.depth,
               [&](int r) { return static_cast<i64>(p.order[tile.first + r]); });
    fetch(0);
  }
  const regular_rows rows(p, tile);
  T* const values = regular_line<T>(p.values, my.batch, my.head, 0);

  u32 a[kDepth / 16][4];
  for (int n = 0; n < steps; ++n) {
    if (n + 1 < steps) {
      fetch(n + 1);
      copy_async_wait<1>();
    } else {
      copy_async_wait<0>();
    }
    __syncthreads();
    if (n == 0) {
#pragma unroll
      for (int k = 0; k < kDepth / 16; ++k) {
        load_left<T, true>(a[k], left, warp * 16, k * 16);
      }
    }
    float sums[kRegularTile / 8][4] = {};
#pragma unroll
    for (int k = 0; k < kDepth / 16; ++k) {
#pragma unroll
      for (int c = 0; c < kRegularTile / 16; ++c) {
        u32 b[4];
        load_right<T, true>(b, right(n), c * 16, k * 16);
        mma_sync<T>(sums[2 * c], a[k], b[0], b[1]);
        mma_sync<T>(sums[2 * c + 1], a[k], b[2], b[3]);
      }
    }
    __syncthreads();  // what was read here is overwritten from now on
#pragma unroll
    for (int c = 0; c < kRegularTile / 8; ++c) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        *reinterpret_cast<u32*>(staged + (lane / 4 + 8 * half) * kPitch + c * 8 + lane % 4 * 2) =
            narrow_pair<T>(sums[c][2 * half], sums[c][2 * half + 1]);
      }
    }
    __syncwarp();
#pragma unroll 4
    for (int r = 0; r < 16; ++r) {
      const i64 row = rows.row_of(r);
      const int first = n * kRegularTile - rows.offset_of(r), count = rows.count_of(r);
#pragma unroll
      for (int e = lane; e < kRegularTile; e += 32) {
        if (static_cast<u32>(first + e) < static_cast<u32>(count)) {
          values[row * p.values.row + first + e] = staged[r * kPitch + e];
        }
      }
    }
    __syncwarp();
  }
  for (int r = 0; r < 16; ++r) {
    const i64 row = rows.row_of(r);
    if (row >= 0) {
      T* const line = values + row * p.values.row;
      fill_zeros(line + rows.count_of(r), line + p.width);
    }
  }
}

/// 64 lines of a result, 16 of them and all of the depth in each warp: sums of x times rows of an operand.
template <typename T, int kDepth>
struct regular_tile_product {
  static constexpr int kLeftBytes = kRegularTile * kRegularTile * 2, kRightBytes = kRegularTile * kDepth * 2;
  float sums[kDepth / 8][4] = {};

  /// Adds `steps` of 64 partners each. fetch(n, tile) fetches their rows, take(n, x) loads the warp's 16 lines of x's
  /// tile, two of a lane's elements each: they wait in registers for the products of the step before. Those lines are
  /// lines of the result (kInner) or its partners.
  template <bool kInner, typename Fetch, typename Take>
  __device__ __forceinline__ void add(int steps, u32 shared, const Fetch& fetch, const Take& take) {
    const shared_tile<2 * kRegularTile> left{shared};
    const auto right = [&](int n) { return shared_tile<2 * kDepth>{shared + kLeftBytes + n % 2 * kRightBytes}; };
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    T x[32];
    const auto start = [&](int n) {
      fetch(n, right(n));
      copy_async_commit();
      take(n, x);
    };
    if (steps > 0) {
      start(0);
    }
    for (int n = 0; n < steps; ++n) {
#pragma unroll
      for (int e = 0; e < 32; ++e) {
        const u32 at = left.chunk(warp * 16 + e / 2, e % 2 * 4 + lane / 8) + lane % 8 * 2;
        asm volatile("st.shared.b16 [%0], %1;" ::"r"(at), "h"(x[e].bits) : "memory");
      }
      if (n + 1 < steps) {
        start(n + 1);
        copy_async_wait<1>();
      } else {
        copy_async_wait<0>();
      }
      __syncthreads();
#pragma unroll
      for (int k = 0; k < kRegularTile / 16; ++k) {
        u32 a[4];
        load_left<T, kInner>(a, left, warp * 16, k * 16);
#pragma unroll
        for (int c = 0; c < kDepth / 16; ++c) {
          u32 b[4];
          load_right<T, false>(b, right(n), c * 16, k * 16);
          mma_sync<T>(sums[2 * c], a, b[0], b[1]);
          mma_sync<T>(sums[2 * c + 1], a, b[2], b[3]);
        }
      }
      __syncthreads();
    }
  }

  __device__ __forceinline__ void store(const RegularTileParams& p, const RegularTile& tile, T* to, i64 stride) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int m = threadIdx.x / 32 * 16 + lane / 4 + 8 * half;
      if (m < tile.lines) {
        T* const row = to + p.order[tile.first + m] * stride;
#pragma unroll
        for (int c = 0; c < kDepth / 8; ++c) {
          if (c * 8 < p.depth) {
            *reinterpret_cast<u32*>(row + c * 8 + lane % 4 * 2) =
                narrow_pair<T>(sums[c][2 * half], sums[c][2 * half + 1]);
          }
        }
      }
    }
  }
};

/// by_row[i] = Σ_t x[i, t]·by_col[column].
template <typename T, int kDepth>
__global__ void __launch_bounds__(kRegularTileThreads)
    regular_by_row_tiles(const __grid_constant__ RegularTileParams p) {
  extern __shared__ __align__(128) u8 shared[];
  const int lane = threadIdx.x % 32;
  const regular_task my(blockIdx.x, p.tile_count, 1, p.heads);
  const RegularTile tile = p.tiles[my.chunk];
  const T* const by_col = regular_line<const T>(p.by_col, my.batch, my.head / p.group, 0);
  const T* const values = regular_line<const T>(p.values, my.batch, my.head, 0);
  const regular_rows rows(p, tile);
  const auto fetch = [&](int n, shared_tile<2 * kDepth> to) {
    fetch_partners(to, by_col, p.by_col.row, tile, n, p.depth);
  };
  const auto take = [&](int n, T(&x)[32]) {
#pragma unroll
    for (int r = 0; r < 16; ++r) {
      const i64 row = rows.row_of(r);
      const int first = n * kRegularTile - rows.offset_of(r), count = rows.count_of(r);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int t = first + half * 32 + lane;
        x[2 * r + half] = static_cast<u32>(t) < static_cast<u32>(count) ? values[row * p.values.row + t] : T{0};
      }
    }
  };
  regular_tile_product<T, kDepth> product;
  product.template add<true>(tile_steps(tile), shared_address(shared), fetch, take);
  product.store(p, tile, regular_line<T>(p.by_row, my.batch, my.head, 0), p.by_row.row);
}

/// by_col[j] = Σ x[i, t]·by_row[i] over the entries of column j and the heads that share it. All rows of more than one
/// entry have the stride kStride.
template <typename T, int kDepth, int kStride>
__global__ void __launch_bounds__(kRegularTileThreads)
    regular_by_col_tiles(const __grid_constant__ RegularTileParams p) {
  extern __shared__ __align__(128) u8 shared[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const regular_task my(blockIdx.x, p.tile_count, 1, p.heads / p.group);
  const RegularTile tile = p.tiles[my.chunk];
  const int steps = tile_steps(tile);
  const auto head_of = [&](int n) { return my.head * p.group + n / steps; };
  const auto fetch = [&](int n, shared_tile<2 * kDepth> to) {
    const T* const by_row = regular_line<const T>(p.by_row, my.batch, head_of(n), 0);
    fetch_partners(to, by_row, p.by_row.row, tile, n % steps, p.depth);
  };
  int columns[2];  // of this lane
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int m = half * 32 + lane;
    columns[half] = m < tile.lines ? p.order[tile.first + m] : -1;
  }
  const auto take = [&](int n, T(&x)[32]) {
    const T* const values = regular_line<const T>(p.values, my.batch, head_of(n), 0);
    const int slot = n % steps * kRegularTile + warp * 16;
    const bool there = slot + lane % 16 < tile.slots;
    const RegularLine line = there ? p.rows[partner(tile, slot + lane % 16)] : RegularLine{0, 1, 0};
#pragma unroll
    for (int r = 0; r < 16; ++r) {
      const int start = __shfl_sync(0xffffffffu, line.start, r), count = __shfl_sync(0xffffffffu, line.count, r);
      const T* const row = values + partner(tile, slot + r) * p.values.row;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const u32 distance = static_cast<u32>(columns[half] - start), t = distance / kStride;  // huge where negative
        const bool entry = t * kStride == distance && t < static_cast<u32>(count);
        x[2 * r + half] = entry ? row[t] : T{0};
      }
    }
  };
  regular_tile_product<T, kDepth> product;
  product.template add<false>(steps * p.group, shared_address(shared), fetch, take);
  product.store(p, tile, regular_line<T>(p.by_col, my.batch, my.head, 0), p.by_col.row);
}

}  // namespace fretwork
