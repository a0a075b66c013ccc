// A few batch rows on the tensor cores, 16-bit types with d even: still one pass over the weights as they lie. A lane
// loads V neighbouring l at the eight (j, k) that it owns in an mma's left operand, one step ahead, and pairs halves
// with byte permutes: the fragments of V products at once. x waits in shared memory in the order of the right operand,
// so that 16 bytes are the fragments of two l.
#pragma once

#include "device/mma.cuh"
#include "ops/kronecker/kernel_few.cuh"

namespace fretwork::kronecker::few {

/// Entry 2·q + e of an mma's depth, and 2·q + 8 + e, are k = q + 4·e and q + 8 + 4·e: neighbouring lanes then read
/// neighbouring k.
inline constexpr int kLanesK = 4;

/// Element e (0 or 1) of two words, as a word.
__device__ __forceinline__ u32 pair_of(u32 first, u32 second, int e) {
  return __byte_perm(first, second, e != 0 ? 0x7632 : 0x5410);
}

struct alignas(16) Quad {
  u32 word[4];
};

/// x of kRowsHere batch rows, `count` steps of 16 k from k0 and tile_l of l from l0, as [step][n][k mod 4][l][k div 4].
/// What does not exist is zero.
template <typename T, int kRowsHere>
__device__ __forceinline__ void fetch_tile_x(const Params& p, const Place& at, int log_tile, int k0, int count,
                                             u16* to) {
  const int thread = static_cast<int>(threadIdx.x), rows = min(kRowsHere, p.batch - at.n0);
  const u16* const from = static_cast<const u16*>(p.x) + at.n0 * p.x_batch + at.i * p.c * p.d * p.x_feature;
  if (p.x_vector) {  // four l at a time
    const int log_fours = log_tile - 2;
#pragma unroll 2
    for (int e = thread; e < (count * kRowsHere * kLanesK) << log_fours; e += kTileThreads) {
      const int l = (e & ((1 << log_fours) - 1)) * 4, line = e >> log_fours;
      const int q = line % kLanesK, n = line / kLanesK % kRowsHere, k = k0 + line / (kLanesK * kRowsHere) * 16 + q;
      u32 found[4][2] = {};
#pragma unroll
      for (int t = 0; t < 4; ++t) {
        if (n < rows && k + 4 * t < p.c && at.l0 + l < p.d) {
          const word_group<2> two = *reinterpret_cast<const word_group<2>*>(
              from + n * p.x_batch + static_cast<i64>(k + 4 * t) * p.d + at.l0 + l);
          found[t][0] = two.words[0];
          found[t][1] = two.words[1];
        }
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const Quad quad{pair_of(found[0][half], found[1][half], 0), pair_of(found[2][half], found[3][half], 0),
                        pair_of(found[0][half], found[1][half], 1), pair_of(found[2][half], found[3][half], 1)};
        *reinterpret_cast<Quad*>(to + line * p.pitch + (l + 2 * half) * 4) = quad;
      }
    }
    return;
  }
  if (p.x_rows) {  // four rows at a time, threads along l: what they write then meets in few banks
    constexpr int kFours = kRowsHere / 4;
#pragma unroll 2
    for (int e = thread; e < (count * kFours * kLanesK) << log_tile; e += kTileThreads) {
      const int l = e & ((1 << log_tile) - 1), other = e >> log_tile, n = other % kFours * 4;
      const int q = other / kFours % kLanesK, step = other / (kFours * kLanesK), k = k0 + step * 16 + q;
      word_group<2> found[4] = {};
#pragma unroll
      for (int t = 0; t < 4; ++t) {
        if (n < rows && k + 4 * t < p.c && at.l0 + l < p.d) {
          found[t] = *reinterpret_cast<const word_group<2>*>(
              from + n + (static_cast<i64>(k + 4 * t) * p.d + at.l0 + l) * p.x_feature);
        }
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const word_group<2> two{pair_of(found[0].words[i / 2], found[1].words[i / 2], i % 2),
                                pair_of(found[2].words[i / 2], found[3].words[i / 2], i % 2)};
        *reinterpret_cast<word_group<2>*>(to + ((step * kRowsHere + n + i) * kLanesK + q) * p.pitch + l * 4) = two;
      }
    }
    return;
  }
  const bool rows_inner = p.x_batch == 1;
#pragma unroll 2
  for (int e = thread; e < (count * kRowsHere * kLanesK) << log_tile; e += kTileThreads) {
    // Threads follow the batch or the features, whichever are neighbours.
    const int n = rows_inner ? e % kRowsHere : (e >> log_tile) / kLanesK % kRowsHere;
    const int other = rows_inner ? e / kRowsHere : e;
    const int l = other & ((1 << log_tile) - 1), q = (other >> log_tile) % kLanesK;
    const int step = rows_inner ? (other >> log_tile) / kLanesK : (e >> log_tile) / (kLanesK * kRowsHere);
    const int k = k0 + step * 16 + q;
    u32 found[4] = {};
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      if (n < rows && k + 4 * t < p.c && at.l0 + l < p.d) {
        found[t] = from[n * p.x_batch + (static_cast<i64>(k + 4 * t) * p.d + at.l0 + l) * p.x_feature];
      }
    }
    const word_group<2> two{found[0] | found[1] << 16, found[2] | found[3] << 16};
    *reinterpret_cast<word_group<2>*>(to + ((step * kRowsHere + n) * kLanesK + q) * p.pitch + l * 4) = two;
  }
}

/// Sums of every warp along k, [k][n][j][l], become rows of the result.
template <typename T, int V, int kRowsHere>
__device__ __forceinline__ void store_tiles(const Params& p, const Place& at, const float* parts) {
  const int log_l = p.log_l + log2_of(V), log_j = p.log_j + log2_of(kTileSide);
  const int rows = min(kRowsHere, p.batch - at.n0), count = kRowsHere << (log_l + log_j);
  const bool rows_inner = p.y_batch == 1;
#pragma unroll 1
  for (int o = static_cast<int>(threadIdx.x); o < count; o += kTileThreads) {
    const int n = rows_inner ? o % kRowsHere : o >> (log_l + log_j);
    const int rest = rows_inner ? o / kRowsHere : o & ((1 << (log_l + log_j)) - 1);
    const int l = rest & ((1 << log_l) - 1), j = rest >> log_l;
    if (n < rows && at.j0 + j < p.b && at.l0 + l < p.d) {
      float total = 0.0f;
      for (int k = 0; k < 1 << p.log_k; ++k) {
        total += parts[k * count + (n << (log_l + log_j)) + rest];
      }
      finish<T>(p, at, n, j, l, total);
    }
  }
}

/// Tiles: of eight batch rows.
template <typename T, int V, int Tiles>
__device__ __forceinline__ void multiply_tiles(const Params& p, const Place& at, u8* shared) {
  constexpr int kRowsHere = 8 * Tiles;
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32, r = lane / 4, q = lane % 4;
  const int warp_l = warp & ((1 << p.log_l) - 1), warp_k = warp >> p.log_l & ((1 << p.log_k) - 1);
  const int warp_j = warp >> (p.log_l + p.log_k), log_tile = p.log_l + log2_of(V);
  const int l = warp_l * V, j = warp_j * kTileSide + r, first_k = warp_k * 16 + q, step = 16 << p.log_k;
  const T* const weights =
      static_cast<const T*>(p.w) + at.i * p.w_a + (at.j0 + j) * p.w_b + first_k * p.w_c + at.l0 + l;
  const bool l_there = at.l0 + l < p.d;

  run<T, V> now[2][4], next[2][4];  // rows j and j + 8, k of `first_k` + 4·t
  const auto fetch = [&](run<T, V>(&to)[2][4], int k0) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int t = 0; t < 4; ++t) {
        to[h][t] = {};
        if (l_there && at.j0 + j + 8 * h < p.b && k0 + first_k + 4 * t < p.c) {
          to[h][t] = load_run<T, V>(weights + (k0 + 4 * t) * p.w_c + 8 * h * p.w_b);
        }
      }
    }
  };
  float sums[V][Tiles][4] = {};
  u16* const x = reinterpret_cast<u16*>(shared);
  fetch(now, 0);
  for (int chunk = 0; chunk < p.c; chunk += p.chunk) {
    const int steps = (min(p.chunk, p.c - chunk) + step - 1) / step;
    __syncthreads();
    fetch_tile_x<T, kRowsHere>(p, at, log_tile, chunk, steps << p.log_k, x);
    __syncthreads();
#pragma unroll 1
    for (int s = 0; s < steps; ++s) {
      fetch(next, chunk + (s + 1) * step);
      const u16* const here = x + ((((s << p.log_k) + warp_k) * kRowsHere + r) * kLanesK + q) * p.pitch + l * 4;
#pragma unroll
      for (int e = 0; e < V; e += 2) {
        u32 a[2][4];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            a[half][h] = pair_of(now[h][0].words[e / 2], now[h][1].words[e / 2], half);
            a[half][h + 2] = pair_of(now[h][2].words[e / 2], now[h][3].words[e / 2], half);
          }
        }
#pragma unroll
        for (int tile = 0; tile < Tiles; ++tile) {
          const Quad b = *reinterpret_cast<const Quad*>(here + tile * 8 * kLanesK * p.pitch + e * 4);
          mma_sync<T>(sums[e][tile], a[0], b.word[0], b.word[1]);
          mma_sync<T>(sums[e + 1][tile], a[1], b.word[2], b.word[3]);
        }
      }
#pragma unroll
      for (int h = 0; h < 2; ++h) {
#pragma unroll
        for (int t = 0; t < 4; ++t) {
          now[h][t] = next[h][t];
        }
      }
    }
  }
  __syncthreads();
  float* const parts = reinterpret_cast<float*>(shared);
  const int log_j = p.log_j + log2_of(kTileSide);
#pragma unroll
  for (int tile = 0; tile < Tiles; ++tile) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int n = 8 * tile + 2 * q + i % 2, row = warp_k * kRowsHere + n;
#pragma unroll
      for (int e = 0; e < V; ++e) {
        parts[(((row << log_j) + j + i / 2 * 8) << log_tile) + l + e] = sums[e][tile][i];
      }
    }
  }
  __syncthreads();
  store_tiles<T, V, kRowsHere>(p, at, parts);
}

template <typename T, int V>
__global__ void __launch_bounds__(kTileThreads, V == 8 ? 1 : 2) product_tiles(const __grid_constant__ Params p) {
  extern __shared__ __align__(16) u8 tile_shared[];
  const int index = static_cast<int>(blockIdx.x), group = index % p.groups, rest = index / p.groups;
  const int j_tile = rest % p.j_tiles, l_tile = rest / p.j_tiles % p.l_tiles;
  const Place at{rest / p.j_tiles / p.l_tiles, (l_tile * V) << p.log_l, (j_tile * kTileSide) << p.log_j,
                 group * kTileRows};
  if (p.batch - at.n0 <= 8) {
    multiply_tiles<T, V, 1>(p, at, tile_shared);
  } else {
    multiply_tiles<T, V, 2>(p, at, tile_shared);
  }
}

}  // namespace fretwork::kronecker::few
