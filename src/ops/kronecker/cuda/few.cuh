// Small batches of any strides: one pass over the weights where they lie, on FFMA or on the tensor cores.
#pragma once

#include "device/activation.cuh"
#include "device/cluster.cuh"
#include "device/load.cuh"
#include "device/mma.cuh"
#include "device/types.cuh"
#include "ops/kronecker/cuda/generic.cuh"
#include "ops/kronecker/cuda/params.h"

// ----------------------------------------------------------------------------------------------------
// Up to 32 batch rows, eight per CTA, on FFMA: one pass over the weights where they lie. Threads load neighbouring
// weights into registers one step ahead and multiply them by x in shared memory, with fp32 sums. At the end the sums
// over k are reduced in a fixed order.

namespace fretwork::kronecker::few {

/// Where a CTA works: block i, l from l0, j from j0, batch rows from n0.
struct Place {
  i64 i;
  int l0, j0, n0;
};

/// What CTA `index` has, in tiles of l, j and the batch.
__device__ __forceinline__ Place place_of(const Params& p, int index, int tile_l, int tile_j, int rows) {
  const auto split = [](int n, const Divisor& by, int& rest) {
    const int quotient = by.quotient(n);
    rest = n - quotient * static_cast<int>(by.divisor);
    return quotient;
  };
  int group, j, l;
  const int i = split(split(split(index, p.groups, group), p.j_tiles, j), p.l_tiles, l);
  return {i, l * tile_l, j * tile_j, group * rows};
}

/// How a CTA's threads are spread.
struct Lanes {
  int l, k, j;
  __device__ __forceinline__ Lanes(const Params& p, int thread) {
    const int rest = thread >> p.log_l;
    l = thread & ((1 << p.log_l) - 1);
    k = p.k_next ? rest & ((1 << p.log_k) - 1) : rest >> p.log_j;
    j = p.k_next ? rest >> p.log_k : rest & ((1 << p.log_j) - 1);
  }
  static __device__ __forceinline__ int thread(const Params& p, int l, int k, int j) {
    return l + ((p.k_next ? k + (j << p.log_k) : j + (k << p.log_j)) << p.log_l);
  }
};

/// V floats of shared memory, aligned to as many.
template <int V>
struct alignas(4 * V) Floats {
  float at[V];
};

constexpr int log2_of(int power) { return power == 1 ? 0 : 1 + log2_of(power / 2); }
/// Of the number of l that a CTA has.
template <Axis axis, int V>
__device__ __forceinline__ int log_tile_of(const Params& p) {
  return axis == kAlongL ? p.log_l + log2_of(V) : 0;
}

/// x[n, (i, k, l)] of N batch rows, `count` of k from k0 and 2^log_tile of l from l0, as floats [n][k][l]. What does
/// not exist is zero.
template <typename T, int N>
__device__ __forceinline__ void fetch_x(const Params& p, const Place& at, int log_tile, int k0, int count, float* to) {
  const int thread = static_cast<int>(threadIdx.x), rows = min(N, p.batch - at.n0), positions = count << log_tile;
  const T* const from = static_cast<const T*>(p.x) + at.n0 * p.x_batch + at.i * p.c * p.d * p.x_feature;
  const auto place = [&](int position, i64& offset) {
    const int k = k0 + (position >> log_tile), l = at.l0 + (position & ((1 << log_tile) - 1));
    offset = (static_cast<i64>(k) * p.d + l) * p.x_feature;
    return k < p.c && l < p.d;
  };
  if (p.x_vector) {
#pragma unroll 2
    for (int position = 4 * thread; position < positions; position += 4 * kThreads) {
      i64 offset;
      const bool there = place(position, offset);
#pragma unroll
      for (int n = 0; n < N; ++n) {
        Floats<4> wide{};
        if (there && n < rows) {
          const run<T, 4> four = load_run<T, 4>(from + n * p.x_batch + offset);
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            wide.at[e] = widen(four.at(e));
          }
        }
        *reinterpret_cast<Floats<4>*>(to + n * p.pitch + position) = wide;
      }
    }
  } else if (p.x_batch == 1) {  // rows are neighbours
#pragma unroll 4
    for (int e = thread; e < N * positions; e += kThreads) {
      const int n = e % N, position = e / N;
      i64 offset;
      const bool there = place(position, offset) && n < rows;
      to[n * p.pitch + position] = there ? widen(from[n + offset]) : 0.0f;
    }
  } else {
    for (int position = thread; position < positions; position += kThreads) {
      i64 offset;
      const bool there = place(position, offset);
#pragma unroll
      for (int n = 0; n < N; ++n) {
        to[n * p.pitch + position] = there && n < rows ? widen(from[n * p.x_batch + offset]) : 0.0f;
      }
    }
  }
}

/// A sum becomes element (n, j, l) of the CTA's share of the result.
template <typename T>
__device__ __forceinline__ void finish(const Params& p, const Place& at, int n, int j, int l, float sum) {
  const i64 feature = (at.i * p.b + at.j0 + j) * p.d + at.l0 + l;
  if (p.bias != nullptr) {
    sum += widen(static_cast<const T*>(p.bias)[feature * p.bias_stride]);
  }
  static_cast<T*>(p.y)[(at.n0 + n) * p.y_batch + feature * p.y_feature] =
      narrow<T>(activate_exactly(sum, p.activation));
}

/// The sums of all threads, [n][sum][thread], become rows of the result: added up over k, bias, activation.
template <typename T, Axis axis, int V>
__device__ __forceinline__ void store_sums(const Params& p, const Place& at, int rows, const float* parts) {
  constexpr int kSums = sums_of(axis, V);
  const int log_tile = log_tile_of<axis, V>(p), log_each = log2_of(kSums * kThreads) - p.log_k;
  const bool rows_inner = p.y_batch == 1;
#pragma unroll 1
  for (int o = static_cast<int>(threadIdx.x); o < kRows << log_each; o += kThreads) {
    const int n = rows_inner ? o % kRows : o >> log_each, rest = rows_inner ? o / kRows : o & ((1 << log_each) - 1);
    const int l = rest & ((1 << log_tile) - 1), j = rest >> log_tile;
    // Entry v of vector q of the threads at (l, j) of their axes.
    const int v = axis == kAlongL ? l % V : axis == kAlongJ ? j % V : 0;
    const int vector = axis == kAlongJ ? j / V : j, q = vector >> p.log_j;
    const int sum = axis == kAlongK ? q : q * V + v;
    const int lane_l = axis == kAlongL ? l / V : 0, lane_j = vector & ((1 << p.log_j) - 1);
    if (n >= rows || at.j0 + j >= p.b || at.l0 + l >= p.d) {
      continue;
    }
    const float* const from = parts + (n * kSums + sum) * kPitch + Lanes::thread(p, lane_l, 0, lane_j);
    float total = 0.0f;
    const int between = 1 << (p.k_next ? p.log_l : p.log_l + p.log_j);
#pragma unroll 4
    for (int k = 0; k < 1 << p.log_k; ++k) {
      total += from[k * between];
    }
    finish<T>(p, at, n, j, l, total);
  }
}

template <typename T, Axis axis, int V, int N>
__device__ __forceinline__ void multiply_rows(const Params& p, const Place& at, float* shared) {
  constexpr int kVectors = vectors_of(axis, V), kSums = sums_of(axis, V);
  constexpr int kStepK = axis == kAlongK ? V : 1, kStepJ = axis == kAlongJ ? V : 1;
  const Lanes lane(p, static_cast<int>(threadIdx.x));
  const int log_tile = log_tile_of<axis, V>(p);
  const int l = axis == kAlongL ? lane.l * V : 0, first_k = lane.k * kStepK, step = kStepK << p.log_k;
  const int first_j = at.j0 + lane.j * kStepJ, between_j = kStepJ << p.log_j;
  const T* const weights =
      static_cast<const T*>(p.w) + at.i * p.w_a + first_j * p.w_b + first_k * p.w_c + (at.l0 + l) * p.w_d;
  const bool l_there = at.l0 + l < p.d;

  run<T, V> now[kVectors], next[kVectors];
  const auto fetch = [&](run<T, V>(&to)[kVectors], int k0) {
    const bool k_there = l_there && k0 + first_k < p.c;
#pragma unroll
    for (int q = 0; q < kVectors; ++q) {
      to[q] = {};
      if (k_there && first_j + q * between_j < p.b) {
        to[q] = load_run<T, V>(weights + k0 * p.w_c + q * between_j * p.w_b);
      }
    }
  };
  float sums[kSums][N] = {};
  fetch(now, 0);
  for (int chunk = 0; chunk < p.c; chunk += p.chunk) {
    const int steps = (min(p.chunk, p.c - chunk) + step - 1) / step;
    __syncthreads();
    fetch_x<T, N>(p, at, log_tile, chunk, steps * step, shared);
    __syncthreads();
#pragma unroll 1
    for (int s = 0; s < steps; ++s) {
      fetch(next, chunk + (s + 1) * step);
      const float* const x = shared + ((s * step + first_k) << log_tile) + l;
#pragma unroll
      for (int n = 0; n < N; ++n) {
        constexpr int kOfX = axis == kAlongJ ? 1 : V;
        const Floats<kOfX> from = *reinterpret_cast<const Floats<kOfX>*>(x + n * p.pitch);
#pragma unroll
        for (int q = 0; q < kVectors; ++q) {
#pragma unroll
          for (int v = 0; v < V; ++v) {
            float& sum = sums[axis == kAlongK ? q : q * V + v][n];
            sum = fmaf(widen(now[q].at(v)), from.at[axis == kAlongJ ? 0 : v], sum);
          }
        }
      }
#pragma unroll
      for (int q = 0; q < kVectors; ++q) {
        now[q] = next[q];
      }
    }
  }
  __syncthreads();
#pragma unroll
  for (int n = 0; n < N; ++n) {
#pragma unroll
    for (int s = 0; s < kSums; ++s) {
      shared[(n * kSums + s) * kPitch + threadIdx.x] = sums[s][n];
    }
  }
}

/// One kernel for every batch: the CTA looks how many rows it has.
template <typename T, Axis axis, int V>
__global__ void __launch_bounds__(kThreads, 2) product(const __grid_constant__ Params p) {
  extern __shared__ __align__(16) float shared[];
  constexpr int kTileL = axis == kAlongL ? V : 1, kTileJ = vectors_of(axis, V) * (axis == kAlongJ ? V : 1);
  const Place at = place_of(p, static_cast<int>(blockIdx.x), kTileL << p.log_l, kTileJ << p.log_j, kRows);
  const int rows = p.batch - at.n0;
  if (rows == 1) {
    multiply_rows<T, axis, V, 1>(p, at, shared);
  } else if (rows <= 4) {
    multiply_rows<T, axis, V, 4>(p, at, shared);
  } else {
    multiply_rows<T, axis, V, kRows>(p, at, shared);
  }
  __syncthreads();
  store_sums<T, axis, V>(p, at, rows, shared);
}

}  // namespace fretwork::kronecker::few

// ----------------------------------------------------------------------------------------------------
// Small batches on the tensor cores, 16-bit types with d even: one pass over the weights where they lie. A lane loads V
// neighbouring l at the eight (j, k) that it owns in the left operand of an mma, one step ahead, and pairs halves with
// byte permutes: the fragments of V products at once. x lies in shared memory in the order of the right operand, so 16
// bytes are the fragments of two l. Where blocks are too few to fill the machine, a cluster of CTAs splits the depth
// and reduces at the end.

namespace fretwork::kronecker::few {

/// Entry 2·q + e of an mma's depth, and 2·q + 8 + e, are k = q + 4·e and q + 8 + 4·e: neighbouring lanes then read
/// neighbouring k.
inline constexpr int kLanesK = 4;

struct alignas(16) Quad {
  u32 word[4];
};

/// The batch rows of a CTA: those there are, those that are fetched, and those that shared memory has room for, in
/// tiles of eight. What lies there for rows that are not fetched may be anything, as the tensor cores keep rows apart.
struct Rows {
  int count, log_fetched, room;
  __device__ __forceinline__ Rows(const Params& p, const Place& at)
      : count(min(kTileRows, p.batch - at.n0)),
        log_fetched(count <= 8 ? min(p.log_rows, 3) : p.log_rows),
        room(count <= 8 ? 8 : kTileRows) {}
};
__device__ __forceinline__ const u16* x_of(const Params& p, const Place& at) {
  return static_cast<const u16*>(p.x) + at.n0 * p.x_batch + at.i * p.c * p.d * p.x_feature;
}

/// The loads of several items before their stores, which wait for them. Item i of `total` is `load`(i, there), and
/// `there` is false for what is beyond.
template <int kAtOnce, typename Item, typename Load>
__device__ __forceinline__ void move_items(int total, const Load& load) {
#pragma unroll 1
  for (int first = static_cast<int>(threadIdx.x); first < total; first += kAtOnce * kTileThreads) {
    Item items[kAtOnce];
#pragma unroll
    for (int a = 0; a < kAtOnce; ++a) {
      const int item = first + a * kTileThreads;
      items[a] = load(item, item < total);
    }
#pragma unroll
    for (int a = 0; a < kAtOnce; ++a) {
      if (first + a * kTileThreads < total) {
        items[a].store();
      }
    }
  }
}

/// 2·kWords neighbouring l at four k of a row.
template <int kWords>
struct Run {
  u32 found[4][kWords];
  u16* to;
  __device__ __forceinline__ void store() const {
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      const Quad quad{pair_halves(found[0][w], found[1][w], 0), pair_halves(found[2][w], found[3][w], 0),
                      pair_halves(found[0][w], found[1][w], 1), pair_halves(found[2][w], found[3][w], 1)};
      *reinterpret_cast<Quad*>(to + 8 * w) = quad;
    }
  }
};

template <int kWords>
__device__ __forceinline__ void fetch_runs(const Params& p, const Place& at, const Rows& rows, int log_tile, int k0,
                                           int count, u16* to) {
  const int log_rows = rows.log_fetched;
  const int log_runs = log_tile - log2_of(2 * kWords), four = 4 * p.d;
  const u16* const from = x_of(p, at) + at.l0;
  move_items<4 / kWords, Run<kWords>>(count << (log_rows + 2 + log_runs), [&](int item, bool there) {
    const int l = (item & ((1 << log_runs) - 1)) * 2 * kWords, line = item >> log_runs;
    const int q = line % kLanesK, n = line / kLanesK & ((1 << log_rows) - 1), step = line >> (log_rows + 2);
    const int k = k0 + step * 16 + q;
    const u16* const x = from + n * p.x_batch + static_cast<i64>(k) * p.d + l;
    there = there && n < rows.count && at.l0 + l < p.d;
    Run<kWords> run;
    run.to = to + ((step * rows.room + n) * kLanesK + q) * p.pitch + l * 4;
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      word_group<kWords> group{};
      if (there && k + 4 * t < p.c) {
        group = *reinterpret_cast<const word_group<kWords>*>(x + t * four);
      }
#pragma unroll
      for (int w = 0; w < kWords; ++w) {
        run.found[t][w] = group.words[w];
      }
    }
    return run;
  });
}

/// Four neighbouring rows at four k of one l.
struct FourRows {
  word_group<2> found[4];
  u16* to;
  int pitch;
  __device__ __forceinline__ void store() const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const word_group<2> two{pair_halves(found[0].words[i / 2], found[1].words[i / 2], i % 2),
                              pair_halves(found[2].words[i / 2], found[3].words[i / 2], i % 2)};
      *reinterpret_cast<word_group<2>*>(to + i * kLanesK * pitch) = two;
    }
  }
};

/// Threads stand along l: what they write then meets in few banks.
__device__ __forceinline__ void fetch_rows(const Params& p, const Place& at, const Rows& rows, int log_tile, int k0,
                                           int count, u16* to) {
  const int log_fours = max(rows.log_fetched - 2, 0);
  const i64 four = 4 * p.d * p.x_feature;
  const u16* const from = x_of(p, at) + at.l0 * p.x_feature;
  move_items<2, FourRows>(count << (log_fours + 2 + log_tile), [&](int item, bool there) {
    const int l = item & ((1 << log_tile) - 1), other = item >> log_tile, n = (other & ((1 << log_fours) - 1)) * 4;
    const int q = other >> log_fours & 3, step = other >> (log_fours + 2), k = k0 + step * 16 + q;
    const u16* const x = from + n + (static_cast<i64>(k) * p.d + l) * p.x_feature;
    there = there && n < rows.count && at.l0 + l < p.d;
    FourRows found{{}, to + ((step * rows.room + n) * kLanesK + q) * p.pitch + l * 4, p.pitch};
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      if (there && k + 4 * t < p.c) {
        found.found[t] = *reinterpret_cast<const word_group<2>*>(x + t * four);
      }
    }
    return found;
  });
}

/// One (row, l) at four k.
struct Single {
  u32 found[4];
  u16* to;
  __device__ __forceinline__ void store() const {
    *reinterpret_cast<word_group<2>*>(to) = {found[0] | found[1] << 16, found[2] | found[3] << 16};
  }
};

__device__ __forceinline__ void fetch_singles(const Params& p, const Place& at, const Rows& rows, int log_tile, int k0,
                                              int count, u16* to) {
  const int log_rows = rows.log_fetched;
  const bool rows_inner = p.x_batch == 1;  // threads follow the batch or the features, whichever are neighbours
  const i64 four = 4 * p.d * p.x_feature;
  const u16* const from = x_of(p, at) + at.l0 * p.x_feature;
  move_items<2, Single>(count << (log_rows + 2 + log_tile), [&](int item, bool there) {
    const int other = rows_inner ? item >> log_rows : item, rest = other >> (log_tile + 2);
    const int l = other & ((1 << log_tile) - 1), q = other >> log_tile & 3;
    const int n = (rows_inner ? item : rest) & ((1 << log_rows) - 1), step = rows_inner ? rest : rest >> log_rows;
    const int k = k0 + step * 16 + q;
    const u16* const x = from + n * p.x_batch + (static_cast<i64>(k) * p.d + l) * p.x_feature;
    there = there && n < rows.count && at.l0 + l < p.d;
    Single found{{}, to + ((step * rows.room + n) * kLanesK + q) * p.pitch + l * 4};
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      if (there && k + 4 * t < p.c) {
        found.found[t] = x[t * four];
      }
    }
    return found;
  });
}

/// x of a CTA's batch rows, `count` steps of 16 k from k0 and tile_l of l from l0, as [step][n][k mod 4][l][k div 4].
/// Zero where k or l ends.
__device__ __forceinline__ void fetch_tile_x(const Params& p, const Place& at, const Rows& rows, int log_tile, int k0,
                                             int count, u16* to) {
  if (p.x_vector) {
    fetch_runs<2>(p, at, rows, log_tile, k0, count, to);
  } else if (p.x_pairs) {
    fetch_runs<1>(p, at, rows, log_tile, k0, count, to);
  } else if (p.x_rows) {
    fetch_rows(p, at, rows, log_tile, k0, count, to);
  } else {
    fetch_singles(p, at, rows, log_tile, k0, count, to);
  }
}

/// Four neighbouring sums of all warps along k, `between` floats apart, and CTAs that share them, in their order.
__device__ __forceinline__ void add_up(const Params& p, const float* parts, int between, float (&total)[4]) {
  const int along_k = 1 << p.log_k, count = p.split << p.log_k;
  if (p.split == 1) {
#pragma unroll 4
    for (int k = 0; k < along_k; ++k) {
      const Floats<4> more = *reinterpret_cast<const Floats<4>*>(parts + k * between);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        total[e] += more.at[e];
      }
    }
    return;
  }
  const u32 from = shared_address(parts);
#pragma unroll 8
  for (int t = 0; t < count; ++t) {
    u32 more[4];
    load_from_rank(more, from + (t & (along_k - 1)) * (between * 4), t >> p.log_k);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      total[e] += __uint_as_float(more[e]);
    }
  }
}

/// Sums of every warp along k, [k][n][j][l], become rows of the result; each CTA of a cluster makes its share.
template <typename T, int V>
__device__ __forceinline__ void store_tiles(const Params& p, const Place& at, const Rows& rows, int rank,
                                            const float* parts) {
  const int log_tile = p.log_l + log2_of(V), log_cells = log_tile + p.log_j + log2_of(kTileSide);
  const int pitch = sums_pitch(log_cells), log_rows = rows.log_fetched, log_fours = log_cells - 2;
  const int first = (static_cast<int>(at.i) * p.b + at.j0) * p.d + at.l0;
  const bool rows_inner = p.y_batch == 1;
#pragma unroll 1
  for (int o = rank * kTileThreads + static_cast<int>(threadIdx.x); o < 1 << (log_rows + log_fours);
       o += p.split * kTileThreads) {
    const int n = rows_inner ? o & ((1 << log_rows) - 1) : o >> log_fours;
    const int cell = 4 * (rows_inner ? o >> log_rows : o & ((1 << log_fours) - 1));
    if (n >= rows.count || at.j0 + (cell >> log_tile) >= p.b) {
      continue;
    }
    float total[4] = {};
    add_up(p, parts + n * pitch + cell, rows.room * pitch, total);
    int feature[4];
    bool there[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int j = (cell + e) >> log_tile, l = (cell + e) & ((1 << log_tile) - 1);
      feature[e] = first + j * p.d + l;
      there[e] = at.j0 + j < p.b && at.l0 + l < p.d;
      if (p.bias != nullptr && there[e]) {
        total[e] += widen(static_cast<const T*>(p.bias)[feature[e] * p.bias_stride]);
      }
    }
    activate(total, p.activation);
    T* const to = static_cast<T*>(p.y) + (at.n0 + n) * p.y_batch;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if (there[e]) {
        to[feature[e] * p.y_feature] = narrow<T>(total[e]);
      }
    }
  }
}

/// Nobody leaves while another may read from here; what was read needs no fence.
__device__ __forceinline__ void part_company(const Params& p) {
#if __CUDA_ARCH__ >= 900
  if (p.split > 1) {
    asm volatile("barrier.cluster.arrive.relaxed;\nbarrier.cluster.wait;" ::: "memory");
  }
#endif
}

/// CTA `rank` of a cluster has its part of the k.
template <typename T, int V>
__global__ void __launch_bounds__(kTileThreads, V == 8 ? 1 : 2) product_tiles(const __grid_constant__ Params p) {
  extern __shared__ __align__(16) u8 tile_shared[];
  constexpr int kTiles = kTileRows / 8;
  const int index = static_cast<int>(blockIdx.x), place = p.by_split.quotient(index), rank = index - place * p.split;
  const Place at = place_of(p, place, V << p.log_l, kTileSide << p.log_j, kTileRows);
  const Rows rows(p, at);
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32, r = lane / 4, q = lane % 4;
  const int warp_l = warp & ((1 << p.log_l) - 1), warp_k = warp >> p.log_l & ((1 << p.log_k) - 1);
  const int warp_j = warp >> (p.log_l + p.log_k), log_tile = p.log_l + log2_of(V);
  const int l = warp_l * V, j = warp_j * kTileSide + r, first_k = warp_k * 16 + q, step = 16 << p.log_k;
  const int begin = rank * p.part, end = min(p.c, begin + p.part);
  const T* const weights =
      static_cast<const T*>(p.w) + at.i * p.w_a + (at.j0 + j) * p.w_b + first_k * p.w_c + at.l0 + l;
  const i64 four = 4 * p.w_c, eight = 8 * p.w_b;
  const bool l_there = at.l0 + l < p.d, rows_there[2] = {l_there && at.j0 + j < p.b, l_there && at.j0 + j + 8 < p.b};

  run<T, V> now[2][4], next[2][4];  // rows j and j + 8, k of `first_k` + 4·t
  const auto fetch = [&](run<T, V>(&to)[2][4], int k0) {
    const T* const from = weights + k0 * p.w_c;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int t = 0; t < 4; ++t) {
        to[h][t] = {};
        if (rows_there[h] && k0 + first_k + 4 * t < end) {
          to[h][t] = load_run<T, V>(from + t * four + h * eight);
        }
      }
    }
  };
  float sums[V][kTiles][4] = {};
  u16* const x = reinterpret_cast<u16*>(tile_shared);
  fetch(now, begin);
  for (int chunk = begin; chunk < end; chunk += p.chunk) {
    const int steps = (min(p.chunk, end - chunk) + step - 1) >> (p.log_k + 4);
    if (chunk > begin) {
      __syncthreads();  // what lay there has been read
    }
    fetch_tile_x(p, at, rows, log_tile, chunk, steps << p.log_k, x);
    __syncthreads();
#pragma unroll 1
    for (int s = 0; s < steps; ++s) {
      fetch(next, chunk + (s + 1) * step);
      const u16* const here = x + ((((s << p.log_k) + warp_k) * rows.room + r) * kLanesK + q) * p.pitch + l * 4;
#pragma unroll
      for (int e = 0; e < V; e += 2) {
        u32 a[2][4];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            a[half][h] = pair_halves(now[h][0].words[e / 2], now[h][1].words[e / 2], half);
            a[half][h + 2] = pair_halves(now[h][2].words[e / 2], now[h][3].words[e / 2], half);
          }
        }
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
          if (8 * tile < rows.room) {
            const Quad b = *reinterpret_cast<const Quad*>(here + tile * 8 * kLanesK * p.pitch + e * 4);
            mma_sync<T>(sums[e][tile], a[0], b.word[0], b.word[1]);
            mma_sync<T>(sums[e + 1][tile], a[1], b.word[2], b.word[3]);
          }
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
  float* const parts = reinterpret_cast<float*>(tile_shared);
  const int pitch = sums_pitch(log_tile + p.log_j + log2_of(kTileSide));
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int n = 8 * tile + 2 * q + i % 2;
      float* const to = parts + (warp_k * rows.room + n) * pitch + ((j + i / 2 * 8) << log_tile) + l;
      constexpr int kWide = V < 4 ? V : 4;
#pragma unroll
      for (int e = 0; e < V; e += kWide) {
        Floats<kWide> wide;
#pragma unroll
        for (int v = 0; v < kWide; ++v) {
          wide.at[v] = sums[e + v][tile][i];
        }
        if (n < rows.count) {
          *reinterpret_cast<Floats<kWide>*>(to + e) = wide;
        }
      }
    }
  }
  meet(p.split);
  store_tiles<T, V>(p, at, rows, rank, parts);
  part_company(p);
}

}  // namespace fretwork::kronecker::few
