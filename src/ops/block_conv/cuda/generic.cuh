// The generic kernels of the convolution: FFMA in fp32, for every type, block and stride; and the copies that bring
// operands of the Hopper kernels into an order that TMA can read.
#pragma once

#include "device/types.cuh"
#include "ops/block_conv/cuda/params.h"

namespace fretwork::block_conv {

/// A tile is 16·kRows rows × 64 columns for 256 threads, kRows × 4 accumulators per thread; a stage is 16 of K.
inline constexpr int kDepth = 16, kWidth = 64;

/// Position (u, v) of image n of the result. `at` is the offset of the pixel of `image` that it reads at kernel
/// position (r, s); −1 outside the image.
struct Reader {
  int n, u, v;
  __device__ __forceinline__ i64 at(const ImageArg& image, const AxisArg& y, const AxisArg& x, int r, int s) const {
    const int row = u * y.mul + y.first + r * y.step, col = v * x.mul + x.first + s * x.step;
    const int h = row / y.div, w = col / x.div;
    const bool inside = row >= 0 && col >= 0 && h * y.div == row && w * x.div == col && h < image.height &&
                        w < image.width && n < image.count;
    return inside ? n * image.n + h * image.h + w * image.w : -1;
  }
};

__device__ __forceinline__ Reader reader_of(const ImageArg& out, i64 pixel) {
  const i64 per_image = static_cast<i64>(out.height) * out.width, n = pixel / per_image, rest = pixel - n * per_image;
  return {static_cast<int>(n), static_cast<int>(rest / out.width), static_cast<int>(rest % out.width)};
}

/// sums[i][j] += Σ_k left[k][16·i + y] · right[k][j·16 + x]
template <int kRows>
__device__ __forceinline__ void multiply_add(float (&sums)[kRows][4], const float (*left)[kRows * 16],
                                             const float (*right)[kWidth], int y, int x) {
#pragma unroll
  for (int k = 0; k < kDepth; ++k) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        sums[i][j] = fmaf(left[k][16 * i + y], right[k][16 * j + x], sums[i][j]);
      }
    }
  }
}

/// One CTA per (64 pixels, tile of rows of a block row).
template <typename T, int kRows>
__global__ void __launch_bounds__(256) product(const __grid_constant__ ProductParams p) {
  __shared__ float left[kDepth][kRows * 16], right[kDepth][kWidth];
  const int thread = static_cast<int>(threadIdx.x), y = thread / 16, x = thread % 16;
  const int tiles = p.line_count * p.row_tiles, tile = static_cast<int>(blockIdx.x % tiles);
  const i64 first = static_cast<i64>(blockIdx.x / tiles) * kWidth;
  const i64 pixels = static_cast<i64>(p.out.count) * p.out.height * p.out.width;
  const int line = tile / p.row_tiles, row = tile % p.row_tiles * (16 * kRows);
  const Reader reader = reader_of(p.out, first + thread % kWidth);
  const T* const in = static_cast<const T*>(p.in.data);
  float sums[kRows][4] = {};
  for (int e = p.lines[line]; e < p.lines[line + 1]; ++e) {
    const Entry entry = p.entries[e];
    const i64 from = reader.at(p.in, p.y, p.x, entry.r, entry.s);
    const T* const block = static_cast<const T*>(p.blocks.data) + entry.block * p.blocks.block;
    for (int depth = 0; depth < p.blocks.cols; depth += kDepth) {
      __syncthreads();
      for (int i = thread; i < kDepth * kRows * 16; i += 256) {
        const int k = i % kDepth, m = i / kDepth;
        const bool inside = row + m < p.blocks.rows && depth + k < p.blocks.cols;
        left[k][m] = inside ? widen(block[(row + m) * p.blocks.row + (depth + k) * p.blocks.col]) : 0.0f;
      }
      for (int k = thread / kWidth; k < kDepth; k += 256 / kWidth) {
        const bool inside = from >= 0 && depth + k < p.blocks.cols;
        const i64 channel = static_cast<i64>(entry.other) * p.blocks.cols + depth + k;
        right[k][thread % kWidth] = inside ? widen(in[from + channel * p.in.c]) : 0.0f;
      }
      __syncthreads();
      multiply_add<kRows>(sums, left, right, y, x);
    }
  }
  T* const out = static_cast<T*>(p.out.data);
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const i64 pixel = first + 16 * j + x;
    if (pixel >= pixels) {
      continue;
    }
    const Reader at = reader_of(p.out, pixel);
    T* const to = out + at.n * p.out.n + at.u * p.out.h + at.v * p.out.w;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int m = row + 16 * i + y;
      const i64 channel = static_cast<i64>(line) * p.blocks.rows + m;
      if (m < p.blocks.rows) {
        const float bias = p.bias == nullptr ? 0.0f : widen(static_cast<const T*>(p.bias)[channel * p.bias_stride]);
        to[channel * p.out.c] = narrow<T>(sums[i][j] + bias);
      }
    }
  }
}

/// One CTA per (piece of the pixels, block, tile of the block). K is the pixels of a piece.
template <typename T, int kRows>
__global__ void __launch_bounds__(256) weight(const __grid_constant__ WeightParams p) {
  __shared__ float left[kDepth][kRows * 16], right[kDepth][kWidth];
  const int thread = static_cast<int>(threadIdx.x), y = thread / 16, x = thread % 16;
  const int tiles = p.row_tiles * p.col_tiles, tile = static_cast<int>(blockIdx.x) % tiles;
  const int number = static_cast<int>(blockIdx.x) / tiles % p.blocks;
  const i64 piece = blockIdx.x / (static_cast<unsigned>(tiles) * p.blocks);
  const int row = tile / p.col_tiles * (16 * kRows), col = tile % p.col_tiles * kWidth;
  const Entry entry = p.entries[number];
  const i64 pixels = static_cast<i64>(p.out.count) * p.out.height * p.out.width;
  const i64 last = min((piece + 1) * p.span, pixels);
  const T* const in = static_cast<const T*>(p.in.data) + static_cast<i64>(entry.other) * p.cols * p.in.c;
  const T* const out = static_cast<const T*>(p.out.data) + static_cast<i64>(p.lines[number]) * p.rows * p.out.c;
  float sums[kRows][4] = {};
  for (i64 pixel = piece * p.span; pixel < last; pixel += kDepth) {
    const i64 mine = pixel + thread % kDepth;
    const Reader reader = reader_of(p.out, min(mine, pixels - 1));
    const i64 from = mine < last ? reader.at(p.in, p.y, p.x, entry.r, entry.s) : -1;
    const i64 to = reader.n * p.out.n + reader.u * p.out.h + reader.v * p.out.w;
    __syncthreads();
    for (int m = thread / kDepth; m < kRows * 16; m += 256 / kDepth) {
      const bool inside = from >= 0 && row + m < p.rows;
      left[thread % kDepth][m] = inside ? widen(out[to + (row + m) * p.out.c]) : 0.0f;
    }
    for (int n = thread / kDepth; n < kWidth; n += 256 / kDepth) {
      const bool inside = from >= 0 && col + n < p.cols;
      right[thread % kDepth][n] = inside ? widen(in[from + (col + n) * p.in.c]) : 0.0f;
    }
    __syncthreads();
    multiply_add<kRows>(sums, left, right, y, x);
  }
  float* const sum = p.sums + (piece * p.blocks + number) * (static_cast<i64>(p.rows) * p.cols);
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int m = row + 16 * i + y, n = col + 16 * j + x;
      if (m < p.rows && n < p.cols) {
        sum[static_cast<i64>(m) * p.cols + n] = sums[i][j];
      }
    }
  }
}

/// Loads eight pixels of a channel, from pixel `first` of an image; zeros past its end.
__device__ __forceinline__ void load_pixels_of(u32 (&words)[4], const TurnParams& p, const u16* line, int first) {
  const int end = p.from.height * p.from.width;
  words[0] = words[1] = words[2] = words[3] = 0;
  if (p.vector != 0 && first < end) {
    const uint4 chunk = __ldg(reinterpret_cast<const uint4*>(line + first));
    words[0] = chunk.x, words[1] = chunk.y, words[2] = chunk.z, words[3] = chunk.w;
    return;
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (const int at = first + i; at < end) {
      const int h = p.by_row.quotient(at), w = at - h * p.from.width;
      words[i / 2] |= static_cast<u32>(line[h * p.from.h + w * p.from.w]) << 16 * (i % 2);
    }
  }
}

/// Copies images of 16-bit elements to channels-last order. A CTA transposes 64 channels × 64 pixels in shared memory.
/// A thread loads eight pixels of two channels, eight threads 128 contiguous bytes of each, and stores both channels of
/// a pixel as one word. The 16-byte units of a line are permuted by the pixel, which avoids bank conflicts.
__global__ void __launch_bounds__(256) to_channels_last(const __grid_constant__ TurnParams p) {
  constexpr int kLine = kTurnSide / 2;
  __shared__ __align__(16) u32 tile[kTurnSide * kLine];
  const int index = static_cast<int>(blockIdx.x), run = p.by_groups.quotient(index), n = p.by_runs.quotient(run);
  const int channel = (index - run * static_cast<int>(p.by_groups.divisor)) * kTurnSide;
  const int pixel = (run - n * static_cast<int>(p.by_runs.divisor)) * kTurnSide;
  const int pair = static_cast<int>(threadIdx.x) / 8, eight = static_cast<int>(threadIdx.x) % 8;
  if (channel + 2 * pair < p.from.channels) {  // channels come in blocks of 16 or more
    const u16* const line = static_cast<const u16*>(p.from.data) + n * p.from.n + (channel + 2 * pair) * p.from.c;
    u32 upper[4], lower[4];
    load_pixels_of(upper, p, line, pixel + eight * 8);
    load_pixels_of(lower, p, line + p.from.c, pixel + eight * 8);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      tile[(eight * 8 + i) * kLine + (pair ^ eight * 4)] =
          __byte_perm(upper[i / 2], lower[i / 2], i % 2 == 0 ? 0x5410 : 0x7632);
    }
  }
  __syncthreads();
  const int per_image = p.from.height * p.from.width;
  u16* const to = static_cast<u16*>(p.to) + static_cast<i64>(n) * per_image * p.from.channels;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int at = half * kTurnSide / 2 + static_cast<int>(threadIdx.x) / 8, unit = static_cast<int>(threadIdx.x) % 8;
    if (pixel + at < per_image && channel + unit * 8 < p.from.channels) {
      *reinterpret_cast<uint4*>(to + static_cast<i64>(pixel + at) * p.from.channels + channel + unit * 8) =
          *reinterpret_cast<const uint4*>(tile + at * kLine + (unit ^ at / 8 % 8) * 4);
    }
  }
}

/// Copies blocks of any strides to contiguous ones; 16-bit elements.
__global__ void __launch_bounds__(256) pack_blocks(const __grid_constant__ PackParams p) {
  const i64 size = static_cast<i64>(p.from.rows) * p.from.cols, all = size * p.count;
  for (i64 i = static_cast<i64>(blockIdx.x) * 256 + threadIdx.x; i < all; i += static_cast<i64>(gridDim.x) * 256) {
    const i64 block = i / size, within = i - block * size;
    static_cast<u16*>(p.to)[i] = static_cast<const u16*>(
        p.from.data)[block * p.from.block + within / p.from.cols * p.from.row + within % p.from.cols * p.from.col];
  }
}

}  // namespace fretwork::block_conv
