// Means of blocks; then the scores of eight query blocks at a time, and the best key blocks of each.
#pragma once

#include "device/load.cuh"
#include "device/reduce.cuh"
#include "device/types.cuh"
#include "ops/select_blocks/cuda/params.h"

namespace fretwork::select_blocks_op {

/// The mean of one block, over the heads that share it. kRun neighbours of a row are read at once.
template <typename T, int kRun>
__global__ void __launch_bounds__(kThreads) pool(const __grid_constant__ PoolParams p) {
  __shared__ float parts[kRun][kThreads];
  const bool of_keys = blockIdx.x >= p.first_of_keys;
  const PoolSide& s = p.side[of_keys ? 1 : 0];
  const i64 index = blockIdx.x - (of_keys ? p.first_of_keys : 0), pair = index / s.blocks;
  const int block = static_cast<int>(index - pair * s.blocks), begin = block * s.block;
  const int end = min(begin + s.block, s.length);
  const i64 batch = pair / p.kv_heads, head = (pair - batch * p.kv_heads) * s.heads;
  const T* const from = static_cast<const T*>(s.data) + batch * s.batch + head * s.head;
  const int lane = static_cast<int>(threadIdx.x) & (p.lanes - 1), line = static_cast<int>(threadIdx.x) / p.lanes;
  const int lines = kThreads / p.lanes;
  for (int first = 0; first < p.depth; first += p.lanes * kRun) {
    const int col = first + lane * kRun;
    float sum[kRun] = {};
    if (col < p.depth) {
      for (int h = 0; h < s.heads; ++h) {
        const T* const rows = from + h * s.head + col * s.col;
#pragma unroll 4
        for (int row = begin + line; row < end; row += lines) {
          const run<T, kRun> x = load_run<T, kRun>(rows + row * s.row);
#pragma unroll
          for (int e = 0; e < kRun; ++e) {
            sum[e] += widen(x.at(e));
          }
        }
      }
    }
    __syncthreads();  // earlier parts are read
#pragma unroll
    for (int e = 0; e < kRun; ++e) {
      parts[e][threadIdx.x] = sum[e];
    }
    __syncthreads();
    const float count = static_cast<float>(s.heads * (end - begin));
    for (int n = static_cast<int>(threadIdx.x); n < p.lanes * kRun; n += kThreads) {
      if (first + n < p.depth) {
        float all = 0.0f;
        for (int l = 0; l < lines; ++l) {
          all += parts[n % kRun][l * p.lanes + n / kRun];
        }
        s.means[pair * s.step_pair + block * s.step_block + (first + n) * s.step_col] = all / count;
      }
    }
  }
}

/// A number that is larger where the score is; NaN is below all, and blocks that must be taken are above.
__device__ __forceinline__ u32 key_of(float score) {
  const u32 bits = __float_as_uint(score + 0.0f);  // one zero
  return isnan(score) ? 0u : (bits >> 31) != 0 ? ~bits : bits | 0x80000000u;
}
inline constexpr u32 kMust = 0xffffffffu;

/// The key blocks of a query block: those below `may`; below `first` and from `last` to `own` they must be taken.
struct Places {
  int may, last, own;
  __device__ __forceinline__ Places(const SelectParams& p, int row_block) {
    const i64 position =
        min((static_cast<i64>(row_block) + 1) * p.block_rows, static_cast<i64>(p.rows)) - 1 + p.cols - p.rows;
    own = position < 0 ? -1 : static_cast<int>(position / p.block_cols);
    last = own - p.last + 1;
    may = p.causal ? own + 1 : p.col_blocks;
  }
};

/// The scores of a tile of query blocks, as keys. queries: kRows means for each column.
__device__ __forceinline__ void score(const SelectParams& p, int pair, int first, int most, const float* queries,
                                      u32* keys) {
  const float* const from = p.keys + static_cast<i64>(pair) * p.depth * p.col_blocks;
  for (int j = static_cast<int>(threadIdx.x); j < most; j += kThreads) {
    float sum[kRows] = {};
#pragma unroll 8
    for (int d = 0; d < p.depth; ++d) {
      const float x = from[static_cast<i64>(d) * p.col_blocks + j];
      const float4 low = *reinterpret_cast<const float4*>(queries + d * kRows);
      const float4 high = *reinterpret_cast<const float4*>(queries + d * kRows + 4);
      const float q[kRows] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        sum[r] += q[r] * x;
      }
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const Places at(p, first + r);
      const bool must = j < p.first || (j >= at.last && j <= at.own);
      keys[static_cast<i64>(r) * p.col_blocks + j] = must ? kMust : key_of(sum[r]);
    }
  }
}

/// The largest key of which, with all above it, there are `wanted` among the first `count`; leaves in `wanted` how many
/// of that key itself belong to them. By a warp, eight bits at a time.
__device__ __forceinline__ u32 threshold(const u32* keys, int count, int& wanted, int* bins) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  u32 found = 0, known = 0;
#pragma unroll 1
  for (int shift = 24; shift >= 0; shift -= 8) {
    for (int n = lane; n < kBins; n += 32) {
      bins[n] = 0;
    }
    __syncwarp();
    for (int j = lane; j < count; j += 32) {
      const u32 key = keys[j];
      if (((key ^ found) & known) == 0) {
        atomicAdd(bins + (key >> shift & 0xffu), 1);
      }
    }
    __syncwarp();
    // Lane n has the bins 255 − 8n … 248 − 8n; `before` counts those of lower lanes, which are larger.
    int own = 0;
    for (int n = 0; n < 8; ++n) {
      own += bins[255 - 8 * lane - n];
    }
    int up_to = own;
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(~0u, up_to, step);
      up_to += lane >= step ? other : 0;
    }
    const int holder = __ffs(static_cast<int>(__ballot_sync(~0u, up_to >= wanted))) - 1;
    int bin = 255 - 8 * lane, left = wanted - (up_to - own);
    if (lane == holder) {
      while (bins[bin] < left) {
        left -= bins[bin--];
      }
    }
    found |= static_cast<u32>(__shfl_sync(~0u, bin, holder)) << shift;
    wanted = __shfl_sync(~0u, left, holder);
    known |= 0xffu << shift;
    __syncwarp();
  }
  return found;
}

/// Writes what one query block takes, ascending: by a warp.
__device__ __forceinline__ void take(const SelectParams& p, int pair, int row, const u32* keys, int* bins) {
  const int lane = static_cast<int>(threadIdx.x) % 32, batch = pair / p.kv_heads, head = pair - batch * p.kv_heads;
  const int may = Places(p, row).may, count = min(may, p.top_k);
  int* const to = p.indices.data + batch * p.indices.batch + head * p.indices.head + row * p.indices.row;
  int ties = p.top_k;
  const u32 least = may > p.top_k ? threshold(keys, may, ties, bins) : 0;
  int taken = 0, seen = 0;
  for (int first = 0; first < may; first += 32) {
    const int j = first + lane;
    const u32 key = may > p.top_k && j < may ? keys[j] : 0, below = (1u << lane) - 1;
    const u32 equal = __ballot_sync(~0u, j < may && key == least);
    const bool takes =
        j < may && (may <= p.top_k || key > least || (key == least && seen + __popc(equal & below) < ties));
    const u32 all = __ballot_sync(~0u, takes);
    if (takes) {
      to[(taken + __popc(all & below)) * p.indices.col] = j;
    }
    taken += __popc(all);
    seen += __popc(equal);
  }
  for (int n = count + lane; n < p.top_k; n += 32) {
    to[n * p.indices.col] = -1;
  }
  if (lane == 0) {
    p.counts.data[batch * p.counts.batch + head * p.counts.head + row * p.counts.row] = count;
  }
}

/// Eight neighbouring query blocks of a key head at a time, those with the most key blocks first.
__global__ void __launch_bounds__(kThreads) select(const __grid_constant__ SelectParams p) {
  extern __shared__ __align__(16) u8 memory[];
  float* const queries = reinterpret_cast<float*>(memory);
  int* const bins = reinterpret_cast<int*>(queries + kRows * p.depth);
  u32* const keys = p.keys_of_rows != nullptr ? p.keys_of_rows + static_cast<i64>(blockIdx.x) * kRows * p.col_blocks
                                              : reinterpret_cast<u32*>(bins + kRows * kBins);
  const int warp = static_cast<int>(threadIdx.x) / 32, tiles = p.items / p.pairs;
  for (int item = static_cast<int>(blockIdx.x); item < p.items; item += static_cast<int>(gridDim.x)) {
    const int tile = tiles - 1 - item / p.pairs, pair = item % p.pairs, first = tile * kRows;
    const int most = Places(p, min(first + kRows, p.row_blocks) - 1).may;
    if (most > p.top_k) {
      for (int n = static_cast<int>(threadIdx.x); n < kRows * p.depth; n += kThreads) {
        const int r = n / p.depth, d = n - r * p.depth;
        queries[d * kRows + r] = first + r < p.row_blocks
                                     ? p.queries[(static_cast<i64>(pair) * p.row_blocks + first + r) * p.depth + d]
                                     : 0.0f;
      }
      __syncthreads();
      score(p, pair, first, most, queries, keys);
      __syncthreads();
    }
    if (first + warp < p.row_blocks) {
      take(p, pair, first + warp, keys + static_cast<i64>(warp) * p.col_blocks, bins + warp * kBins);
    }
    __syncthreads();  // keys are read
  }
}

}  // namespace fretwork::select_blocks_op
