// Weights (a,b,c,d) to a·d matrices and back. Memory has l next to l and a matrix has neighbours of its own line next
// to each other, so a CTA turns a piece around in shared memory.
#pragma once

#include "device/barrier.cuh"
#include "device/types.cuh"
#include "ops/kronecker/params_hopper.cuh"

namespace fretwork::kronecker::hopper {

/// A CTA's piece: elements from `at` of the matrices' p·q, matrices from l of block i.
struct Piece {
  int at, l, i;
};

__device__ __forceinline__ Piece piece_of(int wide, int deep, int wide_tiles, int deep_tiles) {
  const int tile = static_cast<int>(blockIdx.x) % wide_tiles, rest = static_cast<int>(blockIdx.x) / wide_tiles;
  return {tile * wide, rest % deep_tiles * deep, rest / deep_tiles};
}

template <typename Bits>
__global__ void __launch_bounds__(kPackThreads) pack(const __grid_constant__ PackParams p) {
  __shared__ Bits turned[kPackElements + 2 * 32];
  const Piece piece = piece_of(p.wide, p.deep, p.wide_tiles, p.deep_tiles);
  const int wide = min(p.wide, p.p * p.q - piece.at), deep = min(p.deep, p.d - piece.l), pitch = p.wide + 2;
  let_next_kernel_start();
  const Bits* from = static_cast<const Bits*>(p.from) + piece.i * p.stride_i + piece.l * p.stride_l;
#pragma unroll 8
  for (int n = static_cast<int>(threadIdx.x); n < wide * deep; n += kPackThreads) {
    const int l = n % deep, at = piece.at + n / deep;
    turned[l * pitch + n / deep] = from[at / p.q * p.stride_p + at % p.q * p.stride_q + l * p.stride_l];
  }
  __syncthreads();
  Bits* to = static_cast<Bits*>(p.to) + (static_cast<i64>(piece.i) * p.d + piece.l) * p.p * p.line;
#pragma unroll 8
  for (int n = static_cast<int>(threadIdx.x); n < wide * deep; n += kPackThreads) {
    const int l = n / wide, at = piece.at + n % wide;
    to[(static_cast<i64>(l) * p.p + at / p.q) * p.line + at % p.q] = turned[l * pitch + n % wide];
  }
}

/// Adds the parts in their order. Columns are one more than c where the sums for the bias come along.
template <typename T>
__global__ void __launch_bounds__(kPackThreads) unpack(const __grid_constant__ UnpackParams p) {
  __shared__ float turned[kUnpackElements + 32];
  const Piece piece = piece_of(p.wide, p.deep, p.wide_tiles, p.deep_tiles);
  const int cols = p.c + (p.bias != nullptr ? 1 : 0);
  const int wide = min(p.wide, p.b * cols - piece.at), deep = min(p.deep, p.d - piece.l), pitch = p.wide + 1;
  const i64 matrix = static_cast<i64>(p.b) * p.line;
  const float* from = p.from + (static_cast<i64>(piece.i) * p.d + piece.l) * matrix;
#pragma unroll 4
  for (int n = static_cast<int>(threadIdx.x); n < wide * deep; n += kPackThreads) {
    const int l = n / wide, at = piece.at + n % wide;
    const float* part = from + l * matrix + static_cast<i64>(at / cols) * p.line + at % cols;
    float sum = 0.0f;
#pragma unroll 4
    for (int s = 0; s < p.parts; ++s) {
      sum += part[s * p.products * matrix];
    }
    turned[l * pitch + n % wide] = sum;
  }
  __syncthreads();
  for (int n = static_cast<int>(threadIdx.x); n < wide * deep; n += kPackThreads) {
    const int l = n % deep, at = piece.at + n / deep, j = at / cols, k = at % cols;
    const T sum = narrow<T>(turned[l * pitch + n / deep]);
    if (k < p.c) {
      static_cast<T*>(p.to)[piece.i * p.stride_i + j * p.stride_j + k * p.stride_k + (piece.l + l) * p.stride_l] = sum;
    } else {
      static_cast<T*>(p.bias)[((static_cast<i64>(piece.i) * p.b + j) * p.d + piece.l + l) * p.bias_stride] = sum;
    }
  }
}

}  // namespace fretwork::kronecker::hopper
