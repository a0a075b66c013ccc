// Writes walks: bits of blocks from masks and lists, their transpose, lists of tokens, documents as tiles. Integers
// only, each word by one thread or with an operation that knows no order.
#pragma once

#include "device/scan.cuh"
#include "device/types.cuh"
#include "ops/attention/cuda/walk.cuh"
#include "ops/dynamic_attention/cuda/bits.cuh"
#include "ops/dynamic_attention/cuda/documents.cuh"

namespace fretwork {

/// A warp for each line of blocks.
__global__ void __launch_bounds__(dynamic_attention_op::kThreads)
    write_bits(const __grid_constant__ dynamic_attention_op::BitsParams p) {
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    *p.zero = 0;
  }
  const i64 index = (static_cast<i64>(blockIdx.x) * dynamic_attention_op::kThreads + threadIdx.x) / 32;
  if (index < p.lines) {
    write_line(p, index, p.words + index * p.words_row);
  }
}

/// A warp for 32 × 32 bits.
__global__ void __launch_bounds__(dynamic_attention_op::kThreads)
    transpose_bits(const __grid_constant__ dynamic_attention_op::TransposeParams p) {
  const i64 index = (static_cast<i64>(blockIdx.x) * dynamic_attention_op::kThreads + threadIdx.x) / 32;
  if (index >= p.tiles) {
    return;
  }
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const i64 list = index / (p.row_tiles * p.col_tiles), within = index - list * p.row_tiles * p.col_tiles;
  const int row_tile = static_cast<int>(within / p.col_tiles), col_tile = static_cast<int>(within % p.col_tiles);
  const int row = 32 * row_tile + lane, col = 32 * col_tile + lane;
  const u32 word = row < p.rows ? p.from[(list * p.rows + row) * p.from_row + col_tile] : 0;
  u32 turned = 0;
#pragma unroll
  for (int n = 0; n < 32; ++n) {
    const u32 column = __ballot_sync(~0u, (word >> n & 1) != 0);
    turned = n == lane ? column : turned;
  }
  if (col < p.cols) {
    p.to[(list * p.cols + col) * p.to_row + row_tile] = turned;
  }
}

/// How many tokens each line has: a warp for each.
__global__ void __launch_bounds__(dynamic_attention_op::kThreads)
    count_tokens(const __grid_constant__ dynamic_attention_op::ListParams p) {
  const i64 index = (static_cast<i64>(blockIdx.x) * dynamic_attention_op::kThreads + threadIdx.x) / 32;
  if (index >= p.lists * p.lines) {
    return;
  }
  const int lane = static_cast<int>(threadIdx.x) % 32;
  int count = 0;
  for (int w = lane; w < p.words_row; w += 32) {
    count += __popc(p.words[index * p.words_row + w]);
  }
#pragma unroll
  for (int apart = 16; apart > 0; apart /= 2) {
    count += __shfl_xor_sync(~0u, count, apart);
  }
  if (lane == 0) {
    const i64 list = index / p.lines;
    p.first[list * (p.lines + 1) + index - list * p.lines + 1] = count;
  }
}

/// Sums of the counts before each, and the pieces of each row tile: a CTA for each list.
__global__ void __launch_bounds__(dynamic_attention_op::kScanThreads)
    scan_tokens(const __grid_constant__ dynamic_attention_op::ListParams p) {
  constexpr int kThreads = dynamic_attention_op::kScanThreads;
  int* const first = p.first + static_cast<i64>(blockIdx.x) * (p.lines + 1);
  scan_counts<kThreads>(first, p.lines, static_cast<int>(blockIdx.x * p.room), [&](int n) { return first[n + 1]; });
  __syncthreads();
  int* const pieces = p.first_piece + static_cast<i64>(blockIdx.x) * (p.tiles + 1);
  scan_counts<kThreads>(pieces, p.tiles, 0, [&](int tile) {
    const int line = tile / p.tiles_each;
    return max((first[line + 1] - first[line] + p.piece_tokens - 1) / p.piece_tokens, 1);
  });
  __syncthreads();
  const int before = static_cast<int>(blockIdx.x) * p.capacity;
  for (int tile = static_cast<int>(threadIdx.x); tile < p.tiles; tile += kThreads) {
    const int begin = pieces[tile], count = pieces[tile + 1] - begin;
    for (int n = 0; n < count; ++n) {
      p.pieces[before + begin + n] = {tile, n, count > 1 ? before + begin + n : -1};
    }
  }
  for (int n = pieces[p.tiles] + static_cast<int>(threadIdx.x); n < p.capacity; n += kThreads) {
    p.pieces[before + n] = {-1, 0, -1};
  }
}

/// Sums of the pieces of a row tile, in their order. A thread has four neighbours of a row; each tile of each list
/// has ctas_each CTAs for either gradient.
template <typename T>
__global__ void __launch_bounds__(dynamic_attention_op::kThreads)
    join_pieces(const __grid_constant__ dynamic_attention_op::JoinParams p) {
  const int which = static_cast<int>(blockIdx.x) % 2, cta = static_cast<int>(blockIdx.x) / 2;
  const int index = cta / p.ctas_each, list = index / p.tiles, tile = index - list * p.tiles;
  const int* const pieces = p.first_piece + static_cast<i64>(list) * (p.tiles + 1) + tile;
  const int count = pieces[1] - pieces[0], batch = list / p.list_heads, head = list - batch * p.list_heads;
  const int line = p.sum_line[which], groups = line / 4;
  const int n = (cta - index * p.ctas_each) * dynamic_attention_op::kThreads + static_cast<int>(threadIdx.x);
  const int at = n / groups, row = tile * p.side + at, col = n % groups * 4;
  const attention_op::OutputArg& out = p.out[which];
  if (count < 2 || out.data == nullptr || at >= p.side || row >= p.rows) {
    return;
  }
  const i64 apart = static_cast<i64>(p.side) * line;
  const float* const from = p.sums[which] + (static_cast<i64>(list) * p.capacity + pieces[0]) * apart + 4 * n;
  float sum[4] = {};
#pragma unroll 8
  for (int piece = 0; piece < count; ++piece) {
    const float4 x = *reinterpret_cast<const float4*>(from + piece * apart);
    sum[0] += x.x, sum[1] += x.y, sum[2] += x.z, sum[3] += x.w;
  }
  T* const to = static_cast<T*>(out.data) + batch * out.batch + head * out.head + row * out.row;
  store_some<T, 4>(to, out, col, p.depth[which], sum);
}

/// The tokens of each line in ascending order: a warp for each.
__global__ void __launch_bounds__(dynamic_attention_op::kThreads)
    write_tokens(const __grid_constant__ dynamic_attention_op::ListParams p) {
  const i64 index = (static_cast<i64>(blockIdx.x) * dynamic_attention_op::kThreads + threadIdx.x) / 32;
  if (index >= p.lists * p.lines) {
    return;
  }
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const i64 list = index / p.lines;
  int at = p.first[list * (p.lines + 1) + index - list * p.lines];
  for (int from = 0; from < p.words_row; from += 32) {
    u32 word = from + lane < p.words_row ? p.words[index * p.words_row + from + lane] : 0;
    const int own = __popc(word);
    int sum = own;
#pragma unroll
    for (int apart = 1; apart < 32; apart *= 2) {
      const int other = __shfl_up_sync(~0u, sum, static_cast<u32>(apart));
      sum += lane >= apart ? other : 0;
    }
    for (int to = at + sum - own; word != 0; word &= word - 1, ++to) {
      p.tokens[to] = 32 * (from + lane) + __ffs(static_cast<int>(word)) - 1;
    }
    at += __shfl_sync(~0u, sum, 31);
  }
}

/// The columns of a document's row i.
__device__ __forceinline__ dynamic_attention_op::IntervalArg interval_of(const dynamic_attention_op::Documents& p,
                                                                         const dynamic_attention_op::Document& of,
                                                                         int i) {
  const int at = i + of.cols - of.rows;
  const int begin = p.left >= 0 ? max(at - min(p.left, 1 << 30), 0) : 0;
  const int end = p.right >= 0 ? min(at + min(p.right, 1 << 30) + 1, of.cols) : of.cols;
  return begin < end ? dynamic_attention_op::IntervalArg{of.col + begin, of.col + end}
                     : dynamic_attention_op::IntervalArg{0, 0};
}

/// A thread for each row of each head.
__global__ void __launch_bounds__(dynamic_attention_op::kThreads)
    clear_outside(const __grid_constant__ dynamic_attention_op::OutsideParams p) {
  const i64 index = static_cast<i64>(blockIdx.x) * dynamic_attention_op::kThreads + threadIdx.x;
  const int head = static_cast<int>(index / p.rows), row = static_cast<int>(index - static_cast<i64>(head) * p.rows);
  const int first = document_of(p, 0).rows, last = document_of(p, p.documents + 1).row;
  if (head < p.heads && (row < first || row >= last)) {
    static_cast<float*>(p.lse.data)[head * p.lse.head + row * p.lse.row] = -infinity();
  }
}

/// Where the row tiles of each document begin: one CTA.
__global__ void __launch_bounds__(dynamic_attention_op::kScanThreads)
    scan_documents(const __grid_constant__ dynamic_attention_op::DocumentParams p) {
  scan_counts<dynamic_attention_op::kScanThreads>(
      p.first, p.documents + 2, 0, [&](int n) { return (document_of(p, n).rows + p.side - 1) / p.side; });
}

/// The tiles and their reach, and the interval of each row: a thread for each.
__global__ void __launch_bounds__(dynamic_attention_op::kThreads)
    write_documents(const __grid_constant__ dynamic_attention_op::DocumentParams p) {
  const i64 index = static_cast<i64>(blockIdx.x) * dynamic_attention_op::kThreads + threadIdx.x;
  const int all = p.documents + 2;
  if (index < p.capacity) {
    const int tile = static_cast<int>(index);
    attention_op::TileArg made{0, 512u | 512u << 10 | 511u << 20, -1, 0};
    dynamic_attention_op::Reach reach{0, 0, 0, 0};
    if (tile < p.first[all]) {
      const int n = dynamic_attention_op::last_at(all, tile, [&](int d) { return p.first[d]; });
      const dynamic_attention_op::Document of = document_of(p, n);
      const int row = (tile - p.first[n]) * p.side, count = min(p.side, of.rows - row);
      made.base = of.row + row;
      made.inside = 512u | 512u << 10 | static_cast<u32>(count + 511) << 20;
      // Rows without columns come first: those before position −right.
      const int empty = p.right < 0 ? 0 : min(max(-min(p.right, 1 << 30) - (of.cols - of.rows), 0), of.rows);
      const auto low = interval_of(p, of, max(row, empty < row + count ? empty : row));
      const auto last = interval_of(p, of, row + count - 1), first = interval_of(p, of, row);
      reach = {low.begin, last.end, last.begin, first.end};
    }
    p.tiles[tile] = made;
    p.reach[tile] = reach;
  }
  if (index < p.rows) {
    const int row = static_cast<int>(index);
    const int n = dynamic_attention_op::last_at(all, row, [&](int d) { return d == 0 ? 0 : document_of(p, d).row; });
    const dynamic_attention_op::Document of = document_of(p, n);
    p.intervals[row] =
        row - of.row < of.rows ? interval_of(p, of, row - of.row) : dynamic_attention_op::IntervalArg{0, 0};
  } else if (index < p.rows + 128) {
    p.intervals[index] = {0, 0};
  }
}

}  // namespace fretwork
