// Weights (a,b,c,d) to a·d matrices and back. Memory is contiguous along l, a matrix along its own lines, so a CTA
// transposes a piece in shared memory.
#pragma once

#include "device/barrier.cuh"
#include "device/load.cuh"
#include "device/mma.cuh"
#include "device/types.cuh"
#include "ops/kronecker/cuda/params_hopper.cuh"

namespace fretwork::kronecker::hopper {

/// A CTA's piece: elements from `at` of the matrices' p·q, matrices from l of block i.
struct Piece {
  int at, l, i;
};

__device__ __forceinline__ Piece piece_of(int wide, int deep, int wide_tiles, int deep_tiles) {
  const int tile = static_cast<int>(blockIdx.x) % wide_tiles, rest = static_cast<int>(blockIdx.x) / wide_tiles;
  return {tile * wide, rest % deep_tiles * deep, rest / deep_tiles};
}

/// fp32 weights are multiplied in tf32.
template <typename Bits>
__device__ __forceinline__ Bits rounded(Bits x) {
  if constexpr (is_same<Bits, float>) {
    return __uint_as_float(to_tf32(__float_as_uint(x)));
  } else {
    return x;
  }
}

template <typename Bits>
__global__ void __launch_bounds__(kPackThreads) pack(const __grid_constant__ PackParams p) {
  constexpr int kPad = 4 / sizeof(Bits);
  __shared__ Bits turned[kPackElements + kPackElements / kPackLine * kPad + kPad * 32];
  const Piece piece = piece_of(p.wide, p.deep, p.wide_tiles, p.deep_tiles);
  const int wide = min(p.wide, p.p * p.q - piece.at), deep = min(p.deep, p.d - piece.l);
  const int rows = p.by_rows != 0 ? wide / p.q : 1, pitch = p.wide + (p.by_rows != 0 ? p.wide / p.q : 1) * kPad;
  let_next_kernel_start();
  const Bits* from = static_cast<const Bits*>(p.from) + piece.i * p.stride_i + piece.l * p.stride_l;
#pragma unroll 8
  for (int n = static_cast<int>(threadIdx.x); n < wide * deep; n += kPackThreads) {
    const int l = n % deep, row = n / deep % rows, col = n / deep / rows, at = piece.at + row * p.q + col;
    turned[l * pitch + row * (p.q + kPad) + col] =
        rounded(from[at / p.q * p.stride_p + at % p.q * p.stride_q + l * p.stride_l]);
  }
  __syncthreads();
  Bits* to = static_cast<Bits*>(p.to) + (static_cast<i64>(piece.i) * p.d + piece.l) * p.p * p.line;
#pragma unroll 8
  for (int n = static_cast<int>(threadIdx.x); n < wide * deep; n += kPackThreads) {
    const int l = n / wide, at = piece.at + n % wide, pads = p.by_rows != 0 ? n % wide / p.q : 0;
    to[(static_cast<i64>(l) * p.p + at / p.q) * p.line + at % p.q] = turned[l * pitch + n % wide + pads * kPad];
  }
}

/// A thread makes 16 bytes of each of the d lines of one p.
template <typename Bits>
__global__ void __launch_bounds__(kPackThreads) pack_dense(const __grid_constant__ DensePackParams p) {
  constexpr int kUnit = 16 / sizeof(Bits), kPerWord = 4 / sizeof(Bits);
  let_next_kernel_start();
  const int index = static_cast<int>(blockIdx.x) * kPackThreads + static_cast<int>(threadIdx.x);
  if (index >= p.total) {
    return;
  }
  const int rest = p.units.quotient(index), first = (index - rest * static_cast<int>(p.units.divisor)) * kUnit;
  const int i = p.p.quotient(rest), row = rest - i * static_cast<int>(p.p.divisor), d = static_cast<int>(p.d.divisor);
  const Bits* const from = static_cast<const Bits*>(p.from) + i * p.stride_i + row * p.stride_p;
  u32 bits[kUnit];
  int own[kUnit];
#pragma unroll
  for (int e = 0; e < kUnit; ++e) {
    const int q = p.d.quotient(first + e), l = first + e - q * d;
    own[e] = l;
    bits[e] = 0;
    if (q < p.q) {
      const Bits value = rounded(from[q * p.stride_q + l * p.stride_l]);
      if constexpr (is_same<Bits, float>) {
        bits[e] = __float_as_uint(value);
      } else {
        bits[e] = static_cast<u32>(value) << 16 * (e % kPerWord);
      }
    }
  }
  Bits* to = static_cast<Bits*>(p.to) + static_cast<i64>(rest) * d * p.line + first;
  for (int l = 0; l < d; ++l, to += p.line) {
    u32 words[4] = {0, 0, 0, 0};
#pragma unroll
    for (int e = 0; e < kUnit; ++e) {
      words[e / kPerWord] |= own[e] == l ? bits[e] : 0;
    }
    store_words<4>(to, words);
  }
}

/// Adds the parts in a fixed order: `slices` of threads take every so many of them, and then each other's sums. Columns
/// are one more than c where the sums for the bias come along.
template <typename T>
__global__ void __launch_bounds__(kPackThreads) unpack(const __grid_constant__ UnpackParams p) {
  constexpr int kEach = kUnpackElements / kPackThreads;  // sums of a thread, which are under way together
  __shared__ float turned[kUnpackElements + kMostSlices * 32];
  wait_for_earlier_kernel();
  const int p_wide = static_cast<int>(p.wide.divisor), p_deep = static_cast<int>(p.deep.divisor);
  const int cols = static_cast<int>(p.cols.divisor), pitch = p_wide + 1;
  const Piece piece = piece_of(p_wide, p_deep, p.wide_tiles, p.deep_tiles);
  const int wide = min(p_wide, p.b * cols - piece.at), deep = min(p_deep, p.d - piece.l);
  const float* from[kEach];
  float sum[kEach];
  int place[kEach], left[kEach];  // parts
#pragma unroll
  for (int m = 0; m < kEach; ++m) {
    const int n = static_cast<int>(threadIdx.x) + m * kPackThreads;
    const int rest = p.wide.quotient(n), slice = p.deep.quotient(rest);
    const int l = rest - slice * p_deep, own = n - rest * p_wide, at = piece.at + own;
    const int j = p.cols.quotient(at), k = at - j * cols;
    from[m] = p.from + piece.i * p.from_i + (piece.l + l) * p.from_l + j * p.from_j + k * p.from_k + slice * p.part;
    from[m] -= k == p.c ? (piece.l + l) * p.bias_back : 0;
    place[m] = rest * pitch + own;
    left[m] = slice < p.slices && l < deep && own < wide ? p.parts - slice : 0;
    sum[m] = 0.0f;
  }
#pragma unroll 4
  for (int s = 0; s < p.parts; s += p.slices) {
#pragma unroll
    for (int m = 0; m < kEach; ++m) {
      sum[m] += s < left[m] ? *from[m] : 0.0f;
      from[m] += p.slices * p.part;
    }
  }
#pragma unroll
  for (int m = 0; m < kEach; ++m) {
    if (place[m] < p.slices * p_deep * pitch) {
      turned[place[m]] = sum[m];
    }
  }
  __syncthreads();
  for (int n = static_cast<int>(threadIdx.x); n < wide * p_deep; n += kPackThreads) {
    const int own = p.deep.quotient(n), l = n - own * p_deep, at = piece.at + own;
    const int j = p.cols.quotient(at), k = at - j * cols;
    float total = 0.0f;
    for (int slice = 0; slice < p.slices; ++slice) {
      total += turned[(slice * p_deep + l) * pitch + own];
    }
    const T sum = narrow<T>(total);
    if (l < deep && k < p.c) {
      static_cast<T*>(p.to)[piece.i * p.stride_i + j * p.stride_j + k * p.stride_k + (piece.l + l) * p.stride_l] = sum;
    } else if (l < deep) {
      static_cast<T*>(p.bias)[((static_cast<i64>(piece.i) * p.b + j) * p.d + piece.l + l) * p.bias_stride] = sum;
    }
  }
}

}  // namespace fretwork::kronecker::hopper
