// Kronecker products in small tiles on mma.sync and cp.async, for small and middle batches: any number of δ, in one
// pass over operands as they lie. A tile has all δ of its outputs and batch rows, or eight neighbours of them, so that
// memory moves in whole runs, and lanes take the pairs of k of each δ from what they read. Teams of warps share the K
// of a tile: each has its own ring of stages, and their sums are added at the end, in order.
#pragma once

#include "device/activation.cuh"
#include "device/barrier.cuh"
#include "device/load.cuh"
#include "device/tile.cuh"
#include "ops/kronecker/cuda/params.h"

namespace fretwork::kronecker::small {

/// The k that a lane with `place` = lane % 4 holds as number `order` (0 … 3 of each mma of a step): both operands have
/// K in this order.
template <int kDeltas>
__device__ __forceinline__ int k_of(int place, int order) {
  constexpr int kUnit = unit_of(kDeltas);
  return order / kUnit * (4 * kUnit) + place * kUnit + order % kUnit;
}
/// Where ldmatrix must find a k of a stage, so that lanes get it in that order.
template <int kDeltas>
__device__ __forceinline__ int position_of(int k) {
  constexpr int kUnit = unit_of(kDeltas), kStep = step_of(kDeltas);
  const int within = k % kStep, place = within / kUnit % 4;
  const int order = within / (4 * kUnit) * kUnit + within % kUnit;
  return k / kStep * kStep + order / 4 * 16 + order / 2 % 2 * 8 + place * 2 + order % 2;
}

/// Strides of an operand, in elements: from one row (of outputs or of the batch), k and δ to the next.
struct Strides {
  i64 row, k, delta;
};

/// One operand of a tile, as a thread of a team copies it: kRows rows by a stage's K.
template <typename T, int kDeltas, Way kWay, int kRows, int kThreads>
struct Operand {
  static constexpr int kDepth = depth_of(kDeltas);
  static constexpr int kLines = kWay == kRuns ? kRows : kWay == kTurned ? kDepth : kDepth * kDeltas;
  static constexpr int kChunks = (kWay == kRuns     ? kDepth * kDeltas
                                  : kWay == kTurned ? kRows * kDeltas
                                                    : kRows) /
                                 8;  ///< of a line
  static constexpr int kAll = kLines * kChunks, kEach = (kAll + kThreads - 1) / kThreads;
  static constexpr int kPitch = kWay == kRuns ? pitch_of(kDeltas) : 2 * kRows * kDeltas + 16;
  static constexpr bool kPermuted = kWay == kRuns && 8 % kDeltas == 0;

  const T* base;
  Strides stride;
  int thread, left, depth;  ///< rows and k that are there
  int access;

  struct Source {
    const T* from;
    int count;  ///< elements that are there, of 8; may be more, or below 0
    u32 to;
  };
  __device__ __forceinline__ Source source(int k0, u32 stage, int i) const {
    // Where threads are a multiple of chunks, a thread's chunks are below each other.
    constexpr bool kBelow = kThreads % kChunks == 0;
    const u32 id = thread + (kBelow ? 0 : i * kThreads);
    const int line = static_cast<int>(id / kChunks) + (kBelow ? i * (kThreads / kChunks) : 0);
    const int chunk = static_cast<int>(id % kChunks);
    i64 offset = 0;
    Source s;
    if constexpr (kWay == kRuns) {
      offset =
          line * stride.row + (kDeltas == 8 ? (k0 + chunk) * stride.k : static_cast<i64>(k0 * kDeltas + chunk * 8));
      s.count = line < left ? (depth - k0) * kDeltas - chunk * 8 : 0;
      s.to = stage + line * kPitch + (kPermuted ? chunk ^ (line & 1) << 2 : chunk) * 16;
    } else if constexpr (kWay == kTurned) {
      offset = (k0 + line) * stride.k + chunk * 8;
      s.count = k0 + line < depth ? left * kDeltas - chunk * 8 : 0;
      s.to = stage + line * kPitch + chunk * 16;
    } else {
      const int k = line / kDeltas, delta = line % kDeltas;
      offset = (k0 + k) * stride.k + delta * stride.delta + chunk * 8;
      s.count = k0 + k < depth ? left - chunk * 8 : 0;
      s.to = shared_tile<2 * kRows>{stage}.chunk(delta * kDepth + position_of<kDeltas>(k), chunk);
    }
    s.from = base + (s.count > 0 ? offset : 0);  // aligned, where strides of what is not there are not
    return s;
  }
  /// Whether the thread has a chunk i, of those that it copies `kTogether` at a time.
  template <int kTogether = 1>
  __device__ __forceinline__ bool there(int i) const {
    return kAll % (kThreads * kTogether) == 0 || thread + i * kThreads < kAll;
  }

  /// Starts the copies of the stage that begins at k0. `access` is what can be copied at a time: 16 bytes, 4, or 2.
  __device__ __forceinline__ void copy(int k0, u32 stage) const {
    if (access == 16) {
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        const Source s = source(k0, stage, i);
        copy_async_part_if(there(i), s.to, s.from, 2 * max(0, min(8, s.count)));
      }
    } else if (access == 4) {
#pragma unroll 1
      for (int i = 0; i < kEach; ++i) {
        const Source s = source(k0, stage, i);
        if (there(i)) {
#pragma unroll
          for (int w = 0; w < 4; ++w) {
            copy_async_small<4>(s.to + 4 * w, s.from + 2 * w, 2 * max(0, min(2, s.count - 2 * w)));
          }
        }
      }
    } else {
      constexpr int kTogether = kEach < 4 ? kEach : 4;
#pragma unroll 1
      for (int i = 0; i < kEach; i += kTogether) {
        shift<kTogether>(k0, stage, i);
      }
    }
  }
  /// Of 2 bytes, words are loaded to registers, and shifted to their place on the way to shared memory.
  template <int kTogether>
  __device__ __forceinline__ void shift(int k0, u32 stage, int first) const {
    u32 words[kTogether][5];
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      const Source s = source(k0, stage, first + i);
      const u64 address = reinterpret_cast<u64>(s.from);
      const u32* const from = reinterpret_cast<const u32*>(address & ~3ull);
      const bool inside = there<kTogether>(first + i) && s.count > 0;
      const int end = inside ? static_cast<int>(address & 2) + 2 * min(8, s.count) : 0;  // in bytes
#pragma unroll
      for (int w = 0; w < 5; ++w) {
        words[i][w] = 4 * w < end ? __ldg(from + w) : 0;
      }
    }
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      const Source s = source(k0, stage, first + i);
      const u32 by = static_cast<u32>(reinterpret_cast<u64>(s.from) & 2) * 8;
      u32 shifted[4];
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const u32 both = __funnelshift_r(words[i][w], words[i][w + 1], by);
        const int count = s.count - 2 * w;  // a last word may have a neighbour of the operand
        shifted[w] = count >= 2 ? both : count == 1 ? both & 0xffffu : 0u;
      }
      if (there<kTogether>(first + i)) {
        store_shared_128(s.to, shifted);
      }
    }
  }
};

/// Half `low` of the elements in `words` and half `high` as a pair.
__device__ __forceinline__ u32 pair_of(const u32* words, int low, int high) {
  return __byte_perm(words[low / 2], words[high / 2], (low % 2 != 0 ? 0x32 : 0x10) | (high % 2 != 0 ? 0x7600 : 0x5400));
}

/// What a lane holds of one row in a step: for each mma and δ two pairs of k.
template <int kDeltas>
struct Pairs {
  static constexpr int kMmas = step_of(kDeltas) / 16;
  u32 at[kMmas][kDeltas][2];

  /// From the elements of its k, in order, with all δ of each.
  __device__ __forceinline__ void take(const u32 (&words)[2 * kMmas * kDeltas]) {
#pragma unroll
    for (int n = 0; n < 2 * kMmas; ++n) {
#pragma unroll
      for (int delta = 0; delta < kDeltas; ++delta) {
        const int first = 2 * n * kDeltas + delta;
        at[n / 2][delta][n % 2] = kDeltas == 1 ? words[n] : pair_of(words, first, first + kDeltas);
      }
    }
  }
  /// `row` of a panel whose lines are rows; `panel` is at the step's first k.
  __device__ __forceinline__ void load_runs(u32 panel, u32 row, int step) {
    constexpr int kUnits = 4 * kMmas / unit_of(kDeltas), kBytes = 2 * unit_of(kDeltas) * kDeltas;
    const u32 place = threadIdx.x % 4, line = panel + row * pitch_of(kDeltas);
    u32 words[2 * kMmas * kDeltas];
#pragma unroll
    for (int v = 0; v < kUnits; ++v) {
      const int unit = step * kUnits + v;  // of four places
      if constexpr (kBytes == 16) {
        u32 four[4];
        load_shared_128(four, line + (unit / 2 * 128) + ((unit % 2 ^ row % 2) * 64) + place * 16);
#pragma unroll
        for (int w = 0; w < 4; ++w) {
          words[4 * v + w] = four[w];
        }
      } else {
#pragma unroll
        for (int n = 0; n < kBytes / 8; ++n) {
          u32* const to = words + (v * kBytes + n * 8) / 4;
          load_shared_64(to[0], to[1], line + (unit * 4 + place) * kBytes + n * 8);
        }
      }
    }
    take(words);
  }
  /// `row` of a panel whose lines are k.
  __device__ __forceinline__ void load_turned(u32 panel, int pitch, u32 row, int step) {
    const int place = static_cast<int>(threadIdx.x % 4);
#pragma unroll
    for (int n = 0; n < 2 * kMmas; ++n) {
      u32 words[kDeltas + 1];  // of two k, one after the other, each from a whole word
      constexpr int kHalf = (kDeltas + 1) / 2;
#pragma unroll
      for (int odd = 0; odd < 2; ++odd) {
        const u32 from =
            panel + (step * step_of(kDeltas) + k_of<kDeltas>(place, 2 * n + odd)) * pitch + row * 2 * kDeltas;
#pragma unroll
        for (int w = 0; w < kHalf; ++w) {
          if constexpr (kDeltas % 2 == 0) {
            words[odd * kHalf + w] = load_shared_32(from + 4 * w);
          } else {
            const u32 low = load_shared_16(from + 4 * w);
            words[odd * kHalf + w] = 2 * w + 1 < kDeltas ? low | load_shared_16(from + 4 * w + 2) << 16 : low;
          }
        }
      }
#pragma unroll
      for (int delta = 0; delta < kDeltas; ++delta) {
        at[n / 2][delta][n % 2] = pair_of(words, delta, 2 * kHalf + delta);
      }
    }
  }
};

/// The numbers of a kernel.
template <int kRows, int kCols, int kDeltas>
struct Shape {
  static constexpr Tile kTile{kRows, kCols, kDeltas};
  static constexpr int kWarpRows = kTile.warp_rows(), kWarpCols = kTile.warp_cols(), kAcross = kCols / kWarpCols;
  static constexpr int kTeams = kTile.teams(), kTeamWarps = kTile.team_warps(), kTeamThreads = 32 * kTeamWarps;
  static constexpr int kThreads = 32 * kTile.warps(), kStages = kTile.stages(), kBytes = kTile.stage_bytes();
  static constexpr int kMmas = step_of(kDeltas) / 16;
};

/// A warp's sums of all δ.
template <typename S, int kDeltas>
struct Sums {
  float at[kDeltas][S::kWarpRows / 16][S::kWarpCols / 8][4];
};

/// Adds the products of one step of a stage to a warp's sums: its rows from `m`, its columns from `n`.
template <typename T, typename S, int kRows, int kCols, int kDeltas, Way kWeights, Way kX>
__device__ __forceinline__ void multiply(Sums<S, kDeltas>& sums, u32 left, u32 right, int m, int n, int step) {
  constexpr int kTiles = S::kWarpRows / 16, kMmas = S::kMmas, kDepth = depth_of(kDeltas);
  const u32 row = threadIdx.x % 32 / 4;
  u32 a[kTiles][kMmas][kDeltas][4];
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
    if constexpr (kWeights == kColumns) {
#pragma unroll
      for (int o = 0; o < kMmas; ++o) {
        load_left<T, false>(a[i][o][0], shared_tile<2 * kRows>{left}, m + 16 * i, step * step_of(kDeltas) + 16 * o);
      }
    } else {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        Pairs<kDeltas> pairs;
        if constexpr (kWeights == kRuns) {
          pairs.load_runs(left, m + 16 * i + 8 * half + row, step);
        } else {
          pairs.load_turned(left, 2 * kRows * kDeltas + 16, m + 16 * i + 8 * half + row, step);
        }
#pragma unroll
        for (int o = 0; o < kMmas; ++o) {
#pragma unroll
          for (int delta = 0; delta < kDeltas; ++delta) {
            a[i][o][delta][half] = pairs.at[o][delta][0];
            a[i][o][delta][2 + half] = pairs.at[o][delta][1];
          }
        }
      }
    }
  }
#pragma unroll
  for (int j = 0; j < S::kWarpCols / 8; j += kX == kRuns ? 1 : 2) {
    if constexpr (kX == kRuns) {
      Pairs<kDeltas> b;
      b.load_runs(right, n + 8 * j + row, step);
#pragma unroll
      for (int o = 0; o < kMmas; ++o) {
#pragma unroll
        for (int delta = 0; delta < kDeltas; ++delta) {
#pragma unroll
          for (int i = 0; i < kTiles; ++i) {
            mma_sync<T>(sums.at[delta][i][j], a[i][o][delta], b.at[o][delta][0], b.at[o][delta][1]);
          }
        }
      }
    } else {
#pragma unroll
      for (int o = 0; o < kMmas; ++o) {
#pragma unroll
        for (int delta = 0; delta < kDeltas; ++delta) {
          u32 b[4];
          load_right<T, false>(b, shared_tile<2 * kCols>{right}, n + 8 * j,
                               delta * kDepth + step * step_of(kDeltas) + 16 * o);
#pragma unroll
          for (int i = 0; i < kTiles; ++i) {
            mma_sync<T>(sums.at[delta][i][j], a[i][o][delta], b[0], b[1]);
            mma_sync<T>(sums.at[delta][i][j + 1], a[i][o][delta], b[2], b[3]);
          }
        }
      }
    }
  }
}

/// Adds the sums of all teams, the bias and the activation, and stores the tile along the result's unit axis. `feature`
/// is its first, `rows` and `cols` are those that are there. All threads call it; shared memory is free.
template <typename T, typename S, int kRows, int kCols, int kDeltas>
__device__ __forceinline__ void store(const Sums<S, kDeltas>& sums, float* shared, const Params& p, i64 feature,
                                      int first_row, int rows, int cols) {
  // Lines are rows of the batch, or features.
  const bool last = p.last;
  constexpr int kFeatures = kRows * kDeltas;
  const int feature_step = last ? kCols + 4 : 1, col_step = last ? 1 : kFeatures + 4;
  const int team_step = S::kTile.sums(false) > S::kTile.sums(true) ? S::kTile.sums(false) : S::kTile.sums(true);
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32;
  const int team = thread / S::kTeamThreads, warp = thread / 32 % S::kTeamWarps;
  float* const mine = shared + team * team_step +
                      (warp / S::kAcross * S::kWarpRows + lane / 4) * kDeltas * feature_step +
                      (warp % S::kAcross * S::kWarpCols + lane % 4 * 2) * col_step;
#pragma unroll
  for (int i = 0; i < S::kWarpRows / 16; ++i) {
#pragma unroll
    for (int j = 0; j < S::kWarpCols / 8; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
#pragma unroll
        for (int delta = 0; delta < kDeltas; ++delta) {
          mine[((i * 16 + e / 2 * 8) * kDeltas + delta) * feature_step + (j * 8 + e % 2) * col_step] =
              sums.at[delta][i][j][e];
        }
      }
    }
  }
  __syncthreads();
  // The place of a tile's feature in the result: slices of eight δ are d apart.
  const auto feature_of = [&](int at) {
    return feature + (kDeltas == 8 ? at / 8 * static_cast<i64>(p.d) + at % 8 : at);
  };
  const auto bias_of = [&](int at) {
    return p.bias == nullptr ? 0.0f : widen(static_cast<const T*>(p.bias)[feature_of(at) * p.bias_stride]);
  };
  T* const y = static_cast<T*>(p.y) + first_row * p.y_batch;
  const auto y_of = [&](int at, int col) { return y + feature_of(at) * p.y_feature + col * p.y_batch; };
  const int features = rows * kDeltas, length = last ? kCols : kFeatures, line_step = last ? feature_step : col_step;
  for (int id = thread; id < kFeatures * kCols / 8; id += S::kThreads) {
    const int at = id % (length / 8) * 8, line = id / (length / 8);
    const int there = last ? (line < features ? cols - at : 0) : line < cols ? features - at : 0;
    if (there <= 0) {
      continue;
    }
    float sum[8] = {};
    for (int t = 0; t < S::kTeams; ++t) {
      const float4* const from = reinterpret_cast<const float4*>(shared + t * team_step + line * line_step + at);
      const float4 low = from[0], high = from[1];
      sum[0] += low.x, sum[1] += low.y, sum[2] += low.z, sum[3] += low.w;
      sum[4] += high.x, sum[5] += high.y, sum[6] += high.z, sum[7] += high.w;
    }
    if (p.bias != nullptr) {
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        sum[e] += e < there ? bias_of(last ? line : at + e) : 0.0f;
      }
    }
    activate(sum, p.activation);
    if (p.vector && there >= 8) {
      store_run<T, 8>(last ? y_of(line, at) : y_of(at, line), sum);
      continue;
    }
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      if (e < there) {
        *(last ? y_of(line, at + e) : y_of(at + e, line)) = narrow<T>(sum[e]);
      }
    }
  }
}

/// Bytes of an SM.
#if __CUDA_ARCH__ >= 900
inline constexpr int kSharedMemory = 227 * 1024;
#else
inline constexpr int kSharedMemory = 163 * 1024;
#endif

/// kDeltas: d, or 8 where d is a multiple of it.
template <typename T, int kRows, int kCols, int kDeltas, Way kWeights, Way kX>
__global__ void __launch_bounds__(Shape<kRows, kCols, kDeltas>::kThreads,
                                  Tile{kRows, kCols, kDeltas}.ctas(kSharedMemory))
    product(const __grid_constant__ Params p) {
  using S = Shape<kRows, kCols, kDeltas>;
  static_assert(kWeights == kRuns || (kDeltas == 1 ? kWeights == kColumns : kWeights == kTurned && kDeltas != 8));
  extern __shared__ __align__(1024) u8 shared[];
  const int place = static_cast<int>(blockIdx.x), above = p.slices.quotient(place), higher = p.n_tiles.quotient(above);
  const int delta = (place - above * static_cast<int>(p.slices.divisor)) * kDeltas;
  const int n0 = (above - higher * static_cast<int>(p.n_tiles.divisor)) * kCols;
  const int block = p.j_tiles.quotient(higher), j0 = (higher - block * static_cast<int>(p.j_tiles.divisor)) * kRows;
  const int rows = min(kRows, p.b - j0), cols = min(kCols, p.batch - n0);

  const int team = uniform(threadIdx.x / S::kTeamThreads), thread = static_cast<int>(threadIdx.x) % S::kTeamThreads;
  const Operand<T, kDeltas, kWeights, kRows, S::kTeamThreads> weights{
      static_cast<const T*>(p.w) + block * p.w_a + j0 * p.w_b + delta,
      {p.w_b, p.w_c, 1},
      thread,
      rows,
      p.c,
      p.w_access};
  using X = Operand<T, kDeltas, kX, kCols, S::kTeamThreads>;
  const X x{static_cast<const T*>(p.x) + (block * static_cast<i64>(p.c) * p.d + delta) * p.x_feature + n0 * p.x_batch,
            {p.x_batch, p.d * p.x_feature, p.x_feature},
            thread,
            cols,
            p.c,
            p.x_access};
  // Stage n of a team begins at this k.
  const u32 ring = shared_address(shared) + team * (S::kStages * S::kBytes);
  const auto first = [&](int n) { return (n * S::kTeams + team) * depth_of(kDeltas); };
  const auto stage = [&](int n) { return ring + n % S::kStages * S::kBytes; };
  constexpr int kWeightBytes = panel_bytes(kWeights, kDeltas, kRows);
  const auto copy = [&](int n) {
    if (first(n) < p.c) {
      weights.copy(first(n), stage(n));
      x.copy(first(n), stage(n) + kWeightBytes);
    }
    copy_async_commit();
  };
#pragma unroll 1
  for (int n = 0; n < S::kStages - 1; ++n) {
    copy(n);
  }

  Sums<S, kDeltas> sums{};
  const int warp = uniform(thread / 32);
  const int m = warp / S::kAcross * S::kWarpRows, c = warp % S::kAcross * S::kWarpCols;
#pragma unroll 1
  for (int n = 0; n * (S::kTeams * depth_of(kDeltas)) < p.c; ++n) {
    copy_async_wait<S::kStages - 2>();
    if constexpr (S::kTeamWarps == 1) {
      __syncwarp();
    } else {
      __syncthreads();
    }
    copy(n + S::kStages - 1);
#pragma unroll
    for (int step = 0; step < depth_of(kDeltas) / step_of(kDeltas); ++step) {
      if (first(n) + step * step_of(kDeltas) >= p.c) {  // also where a team is through
        break;
      }
      multiply<T, S, kRows, kCols, kDeltas, kWeights, kX>(sums, stage(n), stage(n) + kWeightBytes, m, c, step);
    }
  }
  copy_async_wait<0>();
  __syncthreads();
  const i64 feature = (static_cast<i64>(block) * p.b + j0) * p.d + delta;
  store<T, S, kRows, kCols, kDeltas>(sums, reinterpret_cast<float*>(shared), p, feature, n0, rows, cols);
}

}  // namespace fretwork::kronecker::small
