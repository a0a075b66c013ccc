// The epilogue of the portable and generic kernels: a tile of sums goes through shared memory to c, with scales, bias,
// activation and one rounding, in the order of memory.
#pragma once

#include "device/activation.cuh"
#include "device/load.cuh"
#include "device/types.cuh"
#include "ops/two_four/cuda/elements.cuh"
#include "ops/two_four/cuda/params.h"

namespace fretwork::two_four {

inline constexpr int kRun = 8;  // neighbours in c that a thread finishes at once

template <typename Sum>
struct alignas(16) FourSums {
  Sum at[4];
};

/// Eight numbers of shared memory: four from `from`, which is aligned to 16 bytes, and four from `from` + kApart.
template <int kApart, typename Sum>
__device__ __forceinline__ void load_eight(Sum (&to)[8], const Sum* from) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const auto four = *reinterpret_cast<const FourSums<Sum>*>(from + h * kApart);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      to[4 * h + e] = four.at[e];
    }
  }
}

/// Neighbours in c, `step` apart, of which `count` exist.
template <typename Out>
__device__ __forceinline__ void store_some(void* c, i64 at, i64 step, const float (&v)[kRun], int count, bool vector) {
  Out* const to = static_cast<Out*>(c) + at;
  if (vector && count == kRun) {
    store_run<Out, kRun>(to, v);
  } else {
#pragma unroll
    for (int e = 0; e < kRun; ++e) {
      if (e < count) {
        to[e * step] = narrow<Out>(v[e]);
      }
    }
  }
}
__device__ __forceinline__ void store_integers(void* c, i64 at, i64 step, const int (&v)[kRun], int count,
                                               bool vector) {
  int* const to = static_cast<int*>(c) + at;
  if (vector && count == kRun) {
#pragma unroll
    for (int e = 0; e < kRun; e += 4) {
      const u32 words[4] = {static_cast<u32>(v[e]), static_cast<u32>(v[e + 1]), static_cast<u32>(v[e + 2]),
                            static_cast<u32>(v[e + 3])};
      store_words<4>(to + e, words);
    }
  } else {
#pragma unroll
    for (int e = 0; e < kRun; ++e) {
      if (e < count) {
        to[e * step] = v[e];
      }
    }
  }
}

/// A tile of kRows × kCols sums, from (row0, col0) of c of batch z on. Its lines follow c's memory, and their length
/// keeps writers from meeting in a bank: four lanes have columns 2t and 2t + 1 of each of eight rows.
template <typename Sum, int kRows, int kCols, int kThreads>
struct SumTile {
  static constexpr int kRowLine = kCols + 8, kColLine = kRows + 4;
  static constexpr int kRowSums = kRows * kRowLine, kColSums = kCols * kColLine;
  static constexpr int kSums = kRowSums < kColSums ? kColSums : kRowSums;

  Sum* sums;
  float *row_scale, *row_bias, *col_scale;  ///< of the tile
  i64 row0, col0, z;

  __device__ __forceinline__ SumTile(u8* shared, i64 first_row, i64 first_col, i64 batch)
      : sums(reinterpret_cast<Sum*>(shared)),
        row_scale(reinterpret_cast<float*>(shared) + kSums),
        row_bias(row_scale + kRows),
        col_scale(row_bias + kRows),
        row0(first_row),
        col0(first_col),
        z(batch) {}

  __device__ __forceinline__ void set(const ProductParams& p, int row, int col, Sum sum) const {
    sums[row * (p.c_by_row ? kRowLine : 1) + col * (p.c_by_row ? 1 : kColLine)] = sum;
  }
  /// After a barrier behind the last set; all threads.
  __device__ __forceinline__ void store(const ProductParams& p) const {
    load_vectors(p);
    __syncthreads();
    // One at a time where it takes many instructions; narrower results are activated on the way.
    const bool exactly = p.activation != 0 && !integers(p) && (p.out == OutType::f32 || p.out == OutType::i32);
    if (exactly) {
      activate_sums(p);
      __syncthreads();
    }
    p.c_by_row ? store_lines<true>(p, exactly) : store_lines<false>(p, exactly);
  }

 private:
  /// i32 results that need no fractions stay integers, and their bias too.
  static __device__ __forceinline__ bool integers(const ProductParams& p) {
    return is_same<Sum, int> && p.out == OutType::i32 && p.scale_s.data == nullptr && p.scale_b.data == nullptr &&
           p.scale_out == nullptr && p.activation <= 1;
  }

  __device__ __forceinline__ void load_vectors(const ProductParams& p) const {
    const bool whole = integers(p);
    const auto scale = [](const VectorArg& v, i64 at) {
      return v.data != nullptr ? static_cast<const float*>(v.data)[at * v.stride] : 1.0f;
    };
    for (int n = static_cast<int>(threadIdx.x); n < kRows && row0 + n < p.m; n += kThreads) {
      row_scale[n] = scale(p.scale_s, row0 + n);
      const i64 at = (row0 + n) * p.bias.stride;
      row_bias[n] = p.bias.data == nullptr ? 0.0f
                    : whole                ? __int_as_float(static_cast<const int*>(p.bias.data)[at])
                                           : as_number(p.bias.data, at, p.bias_type);
    }
    for (int n = static_cast<int>(threadIdx.x); n < kCols && col0 + n < p.n; n += kThreads) {
      col_scale[n] = scale(p.scale_b, col0 + n);
    }
  }

  __device__ __forceinline__ float scaled(Sum sum, int row, int col) const {
    return static_cast<float>(sum) * row_scale[row] * col_scale[col] + row_bias[row];
  }
  static __device__ __forceinline__ float bits_of(float x) { return x; }
  static __device__ __forceinline__ float bits_of(int x) { return __int_as_float(x); }

  /// Sums become what c gets, but not rounded yet.
  __device__ __forceinline__ void activate_sums(const ProductParams& p) const {
    const int rows = static_cast<int>(min(static_cast<i64>(kRows), p.m - row0));
    const int cols = static_cast<int>(min(static_cast<i64>(kCols), p.n - col0));
#pragma unroll 1
    for (int n = static_cast<int>(threadIdx.x); n < kRows * kCols; n += kThreads) {
      const int row = p.c_by_row ? n / kCols : n % kRows, col = p.c_by_row ? n % kCols : n / kRows;
      if (row < rows && col < cols) {
        Sum& sum = sums[p.c_by_row ? row * kRowLine + col : col * kColLine + row];
        reinterpret_cast<float&>(sum) = activate_exactly(scaled(sum, row, col), p.activation);
      }
    }
  }

  template <bool kByRow>
  __device__ __forceinline__ void store_lines(const ProductParams& p, bool activated) const {
    constexpr int kRuns = (kByRow ? kCols : kRows) / kRun, kLine = kByRow ? kRowLine : kColLine;
    const int rows = static_cast<int>(min(static_cast<i64>(kRows), p.m - row0));
    const int cols = static_cast<int>(min(static_cast<i64>(kCols), p.n - col0));
    const i64 first = z * p.c_batch + row0 * p.c_row + col0 * p.c_col, step = kByRow ? p.c_col : p.c_row;
    const bool whole = integers(p);
#pragma unroll 1
    for (int n = static_cast<int>(threadIdx.x); n < kRows * kCols / kRun; n += kThreads) {
      const int outer = n / kRuns, inner = n % kRuns * kRun;
      const int row = kByRow ? outer : inner, col = kByRow ? inner : outer;
      if (row >= rows || col >= cols) {
        continue;
      }
      const int count = min(kRun, kByRow ? cols - col : rows - row);
      const i64 at = first + row * p.c_row + col * p.c_col;
      Sum sum[kRun];
      load_eight<4>(sum, sums + outer * kLine + inner);
      if (whole) {
        store_whole<kByRow>(p, sum, row, at, step, count);
        continue;
      }
      float v[kRun];
      activated ? keep(v, sum) : scale_run<kByRow>(v, sum, row, col);
      finish(p, v, at, step, count);
    }
  }

  static __device__ __forceinline__ void keep(float (&v)[kRun], const Sum (&sum)[kRun]) {
#pragma unroll
    for (int e = 0; e < kRun; ++e) {
      v[e] = bits_of(sum[e]);
    }
  }
  /// Neighbours share a row, or a column.
  template <bool kByRow>
  __device__ __forceinline__ void scale_run(float (&v)[kRun], const Sum (&sum)[kRun], int row, int col) const {
    if constexpr (kByRow) {
      const float scale = row_scale[row], bias = row_bias[row];
      float scales[kRun];
      load_eight<4>(scales, col_scale + col);
#pragma unroll
      for (int e = 0; e < kRun; ++e) {
        v[e] = static_cast<float>(sum[e]) * scale * scales[e] + bias;
      }
    } else {
      const float scale = col_scale[col];
      float scales[kRun], bias[kRun];
      load_eight<4>(scales, row_scale + row);
      load_eight<4>(bias, row_bias + row);
#pragma unroll
      for (int e = 0; e < kRun; ++e) {
        v[e] = static_cast<float>(sum[e]) * scales[e] * scale + bias[e];
      }
    }
  }

  template <bool kByRow>
  __device__ __forceinline__ void store_whole(const ProductParams& p, const Sum (&sum)[kRun], int row, i64 at, i64 step,
                                              int count) const {
    int v[kRun];
#pragma unroll
    for (int e = 0; e < kRun; ++e) {
      v[e] = static_cast<int>(sum[e]) + __float_as_int(row_bias[kByRow ? row : row + e]);
      v[e] = p.activation == 1 ? max(v[e], 0) : v[e];
    }
    store_integers(p.c, at, step, v, count, p.c_vector);
  }

  static __device__ __forceinline__ void finish(const ProductParams& p, float (&v)[kRun], i64 at, i64 step, int count) {
    if (p.out != OutType::f32 && p.out != OutType::i32) {
      activate(v, p.activation);
    }
    if (p.scale_out != nullptr) {
      const float scale = *p.scale_out;
#pragma unroll
      for (float& x : v) {
        x *= scale;
      }
    }
    switch (p.out) {
      case OutType::f32:
        store_some<float>(p.c, at, step, v, count, p.c_vector);
        break;
      case OutType::f16:
        store_some<f16>(p.c, at, step, v, count, p.c_vector);
        break;
      case OutType::bf16:
        store_some<bf16>(p.c, at, step, v, count, p.c_vector);
        break;
      case OutType::i32: {
        int rounded[kRun];
#pragma unroll
        for (int e = 0; e < kRun; ++e) {
          rounded[e] = __float2int_rn(v[e]);
        }
        store_integers(p.c, at, step, rounded, count, p.c_vector);
        break;
      }
      default:
#pragma unroll
        for (int e = 0; e < kRun; e += 4) {
          store_four(p.c, at + e * step, step, v + e, count - e, p.out, p.c_vector);
        }
    }
  }
};

/// Which tile of c a CTA makes: `band` rows of tiles are walked column by column, so that neighbours share operands.
struct TileOf {
  i64 row, col, z;
  __device__ __forceinline__ explicit TileOf(const ProductParams& p) {
    const i64 tiles = p.row_tiles * p.col_tiles, index = blockIdx.x % tiles, whole = p.band * p.col_tiles;
    const i64 above = index / whole * p.band, inside = index % whole, rows = min(p.band, p.row_tiles - above);
    row = above + inside % rows;
    col = inside / rows;
    z = blockIdx.x / tiles;
  }
};

}  // namespace fretwork::two_four
