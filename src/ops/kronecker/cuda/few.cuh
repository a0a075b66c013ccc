// Up to 32 batch rows, eight per CTA, on FFMA: one pass over the weights where they lie. Threads load neighbouring
// weights into registers one step ahead and multiply them by x in shared memory, with fp32 sums. At the end the sums
// over k are reduced in a fixed order.
#pragma once

#include "device/load.cuh"
#include "device/types.cuh"
#include "ops/kronecker/cuda/params_few.cuh"
#include "ops/kronecker/cuda/simple.cuh"

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
