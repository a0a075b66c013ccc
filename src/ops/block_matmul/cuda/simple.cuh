// The plain path: any block shape, strides and element type, on FFMA (DFMA) with register tiles. Also the copy kernel.
#pragma once

#include "device/types.cuh"
#include "ops/block_matmul/cuda/grid.cuh"
#include "ops/block_matmul/cuda/params.h"

namespace fretwork {

/// 128 threads, 8 × 16; a thread owns Rows × 8 of a tile of 8·Rows × 128.
template <typename T, int Rows>
struct SimpleTile {
  using Sum = accumulator_t<T>;
  static constexpr int kThreads = 128, kRows = 8 * Rows, kCols = 128;
  static constexpr int kDepth = 64 / sizeof(Sum);
  struct alignas(16) Shared {
    Sum left[2][kDepth][kRows + 16 / sizeof(Sum)];
    Sum right[2][kDepth][kCols + 16 / sizeof(Sum)];
    int place[kCols];  ///< column of the right operand, or −1
  };
};

/// A slice of the contraction: up to kDepth of K.
template <typename T>
struct SimpleSlice {
  const T* left;   ///< entry (0, 0) of the tile's rows × this slice
  const T* right;  ///< entry (0, 0) of this slice × the operand's columns
  int depth;       ///< entries of K, at most kDepth
};

struct SimpleStrides {
  i64 left_row, left_k, right_k, right_col;
  bool left_k_inner, right_k_inner;
  int rows;  ///< rows of the tile that exist
};

/// sum += Σ slices. Loads of the next slice are in flight while this one is multiplied.
template <typename T, int Rows, typename Walk>
__device__ __forceinline__ void simple_accumulate(typename SimpleTile<T, Rows>::Sum (&sum)[Rows][8],
                                                  typename SimpleTile<T, Rows>::Shared& shared, Walk& walk,
                                                  const SimpleStrides& s) {
  using Tile = SimpleTile<T, Rows>;
  using Sum = typename Tile::Sum;
  constexpr int kDepth = Tile::kDepth;
  constexpr int kLefts = (kDepth * Tile::kRows + Tile::kThreads - 1) / Tile::kThreads;
  const int thread = static_cast<int>(threadIdx.x);
  const int ty = thread / 16, tx = thread % 16;
  T left[kLefts], right[kDepth];
  // The first entry that this thread carries, and the distance to its next.
  const int row0 = s.left_k_inner ? thread / kDepth : thread % Tile::kRows;
  const int k0 = s.left_k_inner ? thread % kDepth : thread / Tile::kRows;
  const int row_step = s.left_k_inner ? Tile::kThreads / kDepth : 0;
  const int k_step = s.left_k_inner ? 0 : Tile::kThreads / Tile::kRows;
  const int right_k = thread % kDepth, right_col = thread / kDepth;
  const auto load = [&](const SimpleSlice<T>& slice) {
    const T* from = slice.left + row0 * s.left_row + k0 * s.left_k;
#pragma unroll
    for (int i = 0; i < kLefts; ++i) {
      left[i] = row0 + i * row_step < s.rows && k0 + i * k_step < slice.depth ? *from : T{};
      from += row_step * s.left_row + k_step * s.left_k;
    }
    if (s.right_k_inner) {
      from = slice.right + right_k * s.right_k;
#pragma unroll
      for (int i = 0; i < kDepth; ++i) {
        const int place = shared.place[right_col + i * (Tile::kThreads / kDepth)];
        right[i] = place >= 0 && right_k < slice.depth ? from[place * s.right_col] : T{};
      }
    } else {
      const int place = shared.place[thread];
      from = slice.right + place * s.right_col;
#pragma unroll
      for (int i = 0; i < kDepth; ++i) {
        right[i] = place >= 0 && i < slice.depth ? *from : T{};
        from += s.right_k;
      }
    }
  };
  const auto keep = [&](int buffer) {
#pragma unroll
    for (int i = 0; i < kLefts; ++i) {
      if (kLefts > 1 || (row0 < Tile::kRows && k0 < kDepth)) {
        shared.left[buffer][k0 + i * k_step][row0 + i * row_step] = widen(left[i]);
      }
    }
#pragma unroll
    for (int i = 0; i < kDepth; ++i) {
      const int k = s.right_k_inner ? right_k : i;
      const int col = s.right_k_inner ? right_col + i * (Tile::kThreads / kDepth) : thread;
      shared.right[buffer][k][col] = widen(right[i]);
    }
  };

  SimpleSlice<T> slice;
  if (!walk.next(slice)) {
    return;
  }
  load(slice);
  bool more = true;
  for (int buffer = 0; more; buffer ^= 1) {
    keep(buffer);
    __syncthreads();
    more = walk.next(slice);
    if (more) {
      load(slice);
    }
#pragma unroll 2
    for (int k = 0; k < kDepth; ++k) {
      Sum a[Rows], b[8];
#pragma unroll
      for (int r = 0; r < Rows; ++r) {
        a[r] = shared.left[buffer][k][ty * Rows + r];
      }
#pragma unroll
      for (int c = 0; c < 8; ++c) {
        b[c] = shared.right[buffer][k][tx * 4 + c % 4 + c / 4 * 64];
      }
#pragma unroll
      for (int r = 0; r < Rows; ++r) {
#pragma unroll
        for (int c = 0; c < 8; ++c) {
          sum[r][c] += a[r] * b[c];
        }
      }
    }
  }
}

template <typename T>
struct alignas(4 * sizeof(T) > 16 ? 16 : 4 * sizeof(T)) Four {
  T item[4];
};

/// Writes a thread's rows: four neighbours at once where `vector` says that they lie so. `column(n)` gives where the
/// tile's column n begins, or nullptr outside.
template <typename T, int Rows, typename Column>
__device__ __forceinline__ void simple_store(const accumulator_t<T> (&sum)[Rows][8], bool vector, int rows,
                                             i64 row_stride, const Column& column) {
  const int first = static_cast<int>(threadIdx.x) / 16 * Rows, tx = static_cast<int>(threadIdx.x) % 16;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int col = tx * 4 + half * 64;
    if (vector && column(col + 3) != nullptr) {
      T* to = column(col) + first * row_stride;
#pragma unroll
      for (int r = 0; r < Rows; ++r, to += row_stride) {
        const auto(&s)[8] = sum[r];
        if (first + r < rows) {
          *reinterpret_cast<Four<T>*>(to) = {narrow<T>(s[half * 4]), narrow<T>(s[half * 4 + 1]),
                                             narrow<T>(s[half * 4 + 2]), narrow<T>(s[half * 4 + 3])};
        }
      }
      continue;
    }
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      T* to = column(col + c);
      if (to == nullptr) {
        continue;
      }
      to += first * row_stride;
#pragma unroll
      for (int r = 0; r < Rows; ++r, to += row_stride) {
        if (first + r < rows) {
          *to = narrow<T>(sum[r][half * 4 + c]);
        }
      }
    }
  }
}

/// Rows of one block-row (cut into pieces of 8·Rows) times 128 of the free dimension.
template <typename T, int Rows>
__global__ void __launch_bounds__(128, sizeof(T) == 8 ? 2 : 3)
    simple_spmm(const __grid_constant__ block_matmul::SpmmParams p) {
  using Tile = SimpleTile<T, Rows>;
  __shared__ typename Tile::Shared shared;
  const GridPlace place = grid_place(p.grid);
  const block_matmul::Segment segment = p.grid.segments[place.segment];
  const int chunks = (p.block_rows + Tile::kRows - 1) / Tile::kRows;
  const int first_row = place.tile % chunks * Tile::kRows;
  const i64 first_col = static_cast<i64>(place.tile / chunks) * Tile::kCols;
  const int h = place.head + segment.group / p.grid.groups_per_head;
  const i64 block_row = segment.group % p.grid.groups_per_head;
  {
    const i64 col = first_col + threadIdx.x;
    shared.place[threadIdx.x] = col < p.free ? static_cast<int>(threadIdx.x) : -1;
  }
  __syncthreads();

  struct Walk {
    const block_matmul::SpmmParams& p;
    const T* blocks;
    const T* dense;
    int first, last, step, k, z;
    __device__ bool next(SimpleSlice<T>& slice) {
      if (k >= p.block_cols) {
        k = 0;
        ++step;
      }
      if (step == last) {
        step = first;
        ++z;
      }
      if (first == last || z == p.z_sum) {
        return false;
      }
      const int* s = p.grid.steps + 3ll * step;
      slice.left = blocks + z * p.blocks.z + (s[2] - 1) * p.blocks.block + k * p.blocks.col;
      slice.right =
          dense + z * p.dense.z + s[1] * p.dense.h + (static_cast<i64>(s[0] - 1) * p.block_cols + k) * p.dense.row;
      slice.depth = p.block_cols - k < Tile::kDepth ? p.block_cols - k : Tile::kDepth;
      k += Tile::kDepth;
      return true;
    }
  };
  Walk walk{p,
            static_cast<const T*>(p.blocks.data) + place.z * p.blocks.z + first_row * p.blocks.row,
            static_cast<const T*>(p.dense.data) + place.z * p.dense.z + h * p.dense.h + first_col * p.dense.col,
            segment.first,
            segment.last,
            segment.first,
            0,
            0};
  const int rows = p.block_rows - first_row < Tile::kRows ? p.block_rows - first_row : Tile::kRows;
  typename Tile::Sum sum[Rows][8] = {};
  simple_accumulate<T, Rows>(
      sum, shared, walk,
      {p.blocks.row, p.blocks.col, p.dense.row, p.dense.col, p.blocks_col_inner, !p.dense_free_inner, rows});
  T* out = static_cast<T*>(p.out.data) + place.z * p.out.z + h * p.out.h +
           (block_row * p.block_rows + first_row) * p.out.row + first_col * p.out.col;
  simple_store<T, Rows>(sum, p.vector, rows, p.out.row,
                        [&](int col) -> T* { return first_col + col < p.free ? out + col * p.out.col : nullptr; });
}

/// Blocks of one block-row, as many as fit 128 columns: an output tile of their rows (in pieces of 8·Rows).
template <typename T, int Rows>
__global__ void __launch_bounds__(128, sizeof(T) == 8 ? 2 : 3)
    simple_sdd(const __grid_constant__ block_matmul::SddParams p) {
  using Tile = SimpleTile<T, Rows>;
  __shared__ typename Tile::Shared shared;
  const GridPlace place = grid_place(p.grid);
  const block_matmul::Segment segment = p.grid.segments[place.segment];
  const int first_row = place.tile * Tile::kRows;
  const int h = place.head + segment.group / p.grid.groups_per_head;
  const i64 block_row = segment.group % p.grid.groups_per_head;
  const int count = segment.last - segment.first;
  const auto step = [&](int col) { return p.grid.steps + 3ll * (segment.first + col / p.block_cols); };
  {
    const int col = static_cast<int>(threadIdx.x);
    shared.place[col] = col / p.block_cols < count ? (step(col)[0] - 1) * p.block_cols + col % p.block_cols : -1;
  }
  __syncthreads();

  struct Walk {
    const block_matmul::SddParams& p;
    const T* left;
    const T* right;
    i64 k;
    int z, h;
    __device__ bool next(SimpleSlice<T>& slice) {
      if (k >= p.depth) {
        k = 0;
        ++h;
      }
      if (h == p.h_sum) {
        h = 0;
        ++z;
      }
      if (p.depth == 0 || p.h_sum == 0 || z == p.z_sum) {
        return false;
      }
      slice.left = left + z * p.left.z + h * p.left.h + k * p.left.col;
      slice.right = right + z * p.right.z + h * p.right.h + k * p.right.row;
      slice.depth = p.depth - k < Tile::kDepth ? static_cast<int>(p.depth - k) : Tile::kDepth;
      k += Tile::kDepth;
      return true;
    }
  };
  Walk walk{p,
            static_cast<const T*>(p.left.data) + place.z * p.left.z + h * p.left.h +
                (block_row * p.block_rows + first_row) * p.left.row,
            static_cast<const T*>(p.right.data) + place.z * p.right.z + h * p.right.h,
            0,
            0,
            0};
  const int rows = p.block_rows - first_row < Tile::kRows ? p.block_rows - first_row : Tile::kRows;
  typename Tile::Sum sum[Rows][8] = {};
  simple_accumulate<T, Rows>(sum, shared, walk,
                             {p.left.row, p.left.col, p.right.row, p.right.col, p.left_k_inner, p.right_k_inner, rows});
  T* out = static_cast<T*>(p.blocks.data) + place.z * p.blocks.z + first_row * p.blocks.row;
  simple_store<T, Rows>(sum, p.vector, rows, p.blocks.row, [&](int col) -> T* {
    return col / p.block_cols < count ? out + (step(col)[2] - 1) * p.blocks.block + col % p.block_cols * p.blocks.col
                                      : nullptr;
  });
}

/// Element by element, so any strides; what it writes is what the tensor-core kernels can read 16 bytes at a time.
template <typename Bits>
__global__ void __launch_bounds__(256) copy_aligned(const __grid_constant__ block_matmul::CopyParams p) {
  const i64 count = p.sizes[0] * p.sizes[1] * p.sizes[2] * p.sizes[3];
  for (i64 n = blockIdx.x * 256ll + threadIdx.x; n < count; n += gridDim.x * 256ll) {
    const i64 x = n % p.sizes[3], line = n / p.sizes[3];
    const i64 y = line % p.sizes[2], batch = line / p.sizes[2];
    const i64 from =
        batch / p.sizes[1] * p.strides[0] + batch % p.sizes[1] * p.strides[1] + y * p.strides[2] + x * p.strides[3];
    static_cast<Bits*>(p.to)[line * p.line + x] = static_cast<const Bits*>(p.from)[from];
  }
}

}  // namespace fretwork
