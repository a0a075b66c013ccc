// dsd and dds in small tiles, on mma.sync and cp.async: for few columns, for problems with few tiles, and for dense
// operands whose rows are no multiples of 16 bytes. A tile lies in one block row, so blocks may have any sizes that are
// multiples of 16. Teams of warps share the K of a tile: each has its own ring of stages, and their sums are added at
// the end, in order.
#pragma once

#include "device/barrier.cuh"
#include "device/load.cuh"
#include "device/tile.cuh"
#include "ops/block_matmul/cuda/params.h"

namespace fretwork {

/// The numbers of a tile. A stage has 64 of K.
template <int kRows, int kCols>
struct SmallShape {
  static constexpr block_matmul::SmallTile kTile = block_matmul::small_tile(kRows, kCols);
  static constexpr int kWarpRows = kTile.warp_rows, kWarpCols = kTile.warp_cols, kAcross = kCols / kWarpCols;
  static constexpr int kTeamWarps = kTile.team_warps(), kTeams = kTile.teams(), kTeamThreads = 32 * kTeamWarps;
  static constexpr int kThreads = 32 * kTile.warps;
  static constexpr int kDepth = 64, kStages = kTile.stages, kBytes = kTile.stage_bytes();
  /// Sums are exchanged in shared memory, in lines with room between them.
  static constexpr int kSumLine = kCols + 4, kTurnedLine = kRows + 4;
  static_assert(4 * kRows * kSumLine <= kStages * kBytes && 4 * kCols * kTurnedLine <= kStages * kBytes);
};

/// One operand of a tile, as a thread of a team copies it: kAcross rows of the blocks, or columns of the dense operand,
/// by 64 of K, 16 bytes at a time along K (kAlongK) or across it. A *unit* is 16 of K, which lie in one block.
template <typename T, bool kAlongK, int kAcross, int kThreads>
struct SmallOperand {
  static constexpr int kChunks = kAlongK ? 8 : kAcross / 8, kStep = kThreads / kChunks;
  static constexpr int kLines = kAlongK ? kAcross : 64, kEach = kLines / kStep;
  static constexpr int kUnits = kAlongK ? 1 : kStep <= 16 ? 4 : kEach;  ///< in which a thread's chunks lie
  static_assert(kLines % kStep == 0 && (kStep <= 16 || kAlongK || kStep % 16 == 0));
  using Tile = shared_tile<kChunks * 16>;

  const T* base;           ///< at the thread's first chunk in a unit
  i64 across, k, entry;    ///< strides: across, along K, of what a block's entry in the table counts
  int line, chunk, first;  ///< of the thread: its first line, its chunk, the number of its first unit
  int left;                ///< rows or columns that are there

  __device__ __forceinline__ SmallOperand(const T* data, i64 across_stride, i64 k_stride, i64 entry_stride, int thread,
                                          int there)
      : across(across_stride),
        k(k_stride),
        entry(entry_stride),
        line(thread / kChunks),
        chunk(thread % kChunks),
        first(kAlongK ? chunk / 2 : line / 16),
        left(there) {
    base = data + (kAlongK ? line * across + chunk % 2 * 8 : line % 16 * k + chunk * 8);
  }

  /// Where a thread's units begin.
  struct Units {
    const T* from[kUnits];
    bool there[kUnits];
  };
  /// `entry_of(n)` is the table's entry for block n of the row.
  template <typename EntryOf>
  __device__ __forceinline__ Units find(int number, int all, const Divisor& per_block, EntryOf entry_of) const {
    Units units;
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      const int n = number + first + (kStep <= 16 ? u : u * (kStep / 16));
      const int block = per_block.quotient(n), inner = 16 * (n - block * static_cast<int>(per_block.divisor));
      units.there[u] = n < all;
      units.from[u] = base + (n < all ? entry_of(block) : 0) * entry + inner * k;
    }
    return units;
  }

  struct Source {
    const T* from;
    int count;  ///< elements that are there
    u32 to;
  };
  __device__ __forceinline__ Source source(const Units& units, u32 stage, int i) const {
    const int u = kAlongK ? 0 : kStep <= 16 ? i * kStep / 16 : i;
    const int at = line + i * kStep;
    const i64 more = kAlongK ? i * kStep * across : i * kStep % 16 * k;
    const int count = kAlongK ? (at < left ? 8 : 0) : left - chunk * 8;
    return {units.from[u] + more, units.there[u] ? count : 0, Tile{stage}.chunk(at, chunk)};
  }
  /// Starts the copies of a stage, kPiece (16, 8 or 4) bytes at a time. A chunk of 16 is there whole or not at all.
  template <int kPiece>
  __device__ __forceinline__ void copy(const Units& units, u32 stage) const {
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const Source s = source(units, stage, i);
      if constexpr (kPiece == 16) {
        copy_async_16(s.to, s.from, s.count > 0);
      } else {
#pragma unroll
        for (int at = 0; at < 16; at += kPiece) {
          const int bytes = 2 * s.count - at;
          copy_async_small<kPiece>(s.to + at, s.from + at / 2, bytes <= 0 ? 0 : bytes < kPiece ? bytes : kPiece);
        }
      }
    }
  }
  /// Lines at odd elements: words are loaded to registers, and shifted to their place on the way to shared memory.
  struct Words {
    u32 word[kEach][5];
  };
  __device__ __forceinline__ void load(Words& words, const Units& units) const {
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const Source s = source(units, 0, i);
      const u64 address = reinterpret_cast<u64>(s.from);
      const u32* const from = reinterpret_cast<const u32*>(address & ~3ull);
      const int end = s.count > 0 ? static_cast<int>(address & 2) + 2 * (s.count < 8 ? s.count : 8) : 0;  // in bytes
#pragma unroll
      for (int w = 0; w < 5; ++w) {
        words.word[i][w] = 4 * w < end ? __ldg(from + w) : 0;
      }
    }
  }
  __device__ __forceinline__ void store(const Words& words, const Units& units, u32 stage) const {
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const Source s = source(units, stage, i);
      const u32 shift = static_cast<u32>(reinterpret_cast<u64>(s.from) & 2) * 8;
      u32 shifted[4];
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        shifted[w] = __funnelshift_r(words.word[i][w], words.word[i][w + 1], shift);
      }
      store_shared_128(s.to, shifted);
    }
  }
};

/// Adds the sums of all teams and stores the tile, along the result's unit axis. All threads call it; shared memory is
/// free.
template <typename T, typename Tile, int kRows, int kCols, typename Sums>
__device__ __forceinline__ void small_store(const Sums& sums, float* shared, const block_matmul::SmallParams& p, T* out,
                                            int cols) {
  const bool turned = p.turned;
  const int row_step = turned ? 1 : Tile::kSumLine, col_step = turned ? Tile::kTurnedLine : 1;
  const int team_step = turned ? kCols * Tile::kTurnedLine : kRows * Tile::kSumLine;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32;
  const int team = thread / Tile::kTeamThreads, warp = thread / 32 % Tile::kTeamWarps;
  float* const mine = shared + team * team_step + (warp / Tile::kAcross * Tile::kWarpRows + lane / 4) * row_step +
                      (warp % Tile::kAcross * Tile::kWarpCols + lane % 4 * 2) * col_step;
#pragma unroll
  for (int i = 0; i < Tile::kWarpRows / 16; ++i) {
#pragma unroll
    for (int j = 0; j < Tile::kWarpCols / 8; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        mine[(i * 16 + e / 2 * 8) * row_step + (j * 8 + e % 2) * col_step] = sums.at[i][j][e];
      }
    }
  }
  __syncthreads();
  // Lines of the result are rows, or columns.
  const int lines = turned ? cols : kRows, inner = turned ? kRows : cols, line_step = turned ? col_step : row_step;
  const int length = turned ? kRows : kCols;
  const i64 out_line = turned ? p.out.col : p.out.row, out_step = turned ? p.out.row : p.out.col;
  const auto store = [&]<int kRun>() {
    for (int id = thread; id < kRows * kCols / kRun; id += Tile::kThreads) {
      const int at = id % (length / kRun) * kRun, line = id / (length / kRun);
      if (line >= lines || at >= inner) {
        continue;
      }
      float sum[kRun] = {};
      for (int t = 0; t < Tile::kTeams; ++t) {
        const auto part = load_run<float, kRun>(shared + t * team_step + line * line_step + at);
#pragma unroll
        for (int e = 0; e < kRun; ++e) {
          sum[e] += part.at(e);
        }
      }
      store_run<T, kRun>(out + line * out_line + at * out_step, sum);
    }
  };
  switch (p.run) {
    case 8:
      return store.template operator()<8>();
    case 4:
      return store.template operator()<4>();
    case 2:
      return store.template operator()<2>();
    default:
      return store.template operator()<1>();
  }
}

/// kBlocksK, kDenseK: K is the unit axis of op(S)'s blocks, of the dense operand. kPiece: bytes of the dense operand
/// that can be copied at a time, 16, 8 or 4, or 2 where its lines begin at odd elements.
template <typename T, int kRows, int kCols, bool kBlocksK, bool kDenseK, int kPiece>
__global__ void __launch_bounds__(SmallShape<kRows, kCols>::kThreads, block_matmul::small_ctas(kRows, kCols, kPiece))
    spmm_small(const __grid_constant__ block_matmul::SmallParams p) {
  using Tile = SmallShape<kRows, kCols>;
  constexpr bool kShifted = kPiece == 2;
  extern __shared__ __align__(1024) u8 shared[];
  int2* const table = reinterpret_cast<int2*>(shared + Tile::kTeams * Tile::kStages * Tile::kBytes);

  const int tile = static_cast<int>(blockIdx.x) % p.tiles, above = static_cast<int>(blockIdx.x) / p.tiles;
  const int piece = above % p.pieces, rest = above / p.pieces;
  const int batch = rest / p.row_count;
  const int2* const entries = reinterpret_cast<const int2*>(p.rows) + static_cast<i64>(rest % p.row_count) * p.stride;
  for (int i = static_cast<int>(threadIdx.x); i < p.stride; i += Tile::kThreads) {
    table[i] = __ldg(entries + i);
  }
  __syncthreads();
  const int group = table[0].x, blocks = table[0].y;
  const int h = group / p.groups_per_head + batch % p.heads, z = batch / p.heads;
  const int row = piece * kRows, col = tile * kCols, cols = p.free - col < kCols ? p.free - col : kCols;
  const int units = blocks * static_cast<int>(p.per_block.divisor);

  const int team = static_cast<int>(threadIdx.x) / Tile::kTeamThreads;
  const int thread = static_cast<int>(threadIdx.x) % Tile::kTeamThreads, warp = uniform(thread / 32);
  const SmallOperand<T, kBlocksK, kRows, Tile::kTeamThreads> sparse(
      static_cast<const T*>(p.blocks.data) + z * p.blocks.z + row * p.blocks.row, p.blocks.row, p.blocks.col,
      p.blocks.block, thread, kRows);
  using Dense = SmallOperand<T, kDenseK, kCols, Tile::kTeamThreads>;
  const Dense dense(static_cast<const T*>(p.dense.data) + z * p.dense.z + h * p.dense.h + col * p.dense.col,
                    p.dense.col, p.dense.row, p.block_cols * p.dense.row, thread, cols);
  // Stage n of a team: the four units from `first` on.
  const u32 ring = shared_address(shared) + team * (Tile::kStages * Tile::kBytes);
  const auto first = [&](int n) { return 4 * (n * Tile::kTeams + team); };
  const auto stage = [&](int n) { return ring + n % Tile::kStages * Tile::kBytes; };
  const auto find_sparse = [&](int n) {
    return sparse.find(first(n), units, p.per_block, [&](int block) { return table[1 + block].y; });
  };
  const auto find_dense = [&](int n) {
    return dense.find(first(n), units, p.per_block, [&](int block) { return table[1 + block].x; });
  };
  constexpr int kBlocksBytes = 2 * Tile::kDepth * kRows;
  const auto copy = [&](int n, const auto& sparse_units, const auto& dense_units) {
    if (first(n) < units) {
      sparse.template copy<16>(sparse_units, stage(n));
      if constexpr (!kShifted) {
        dense.template copy<kPiece>(dense_units, stage(n) + kBlocksBytes);
      }
    }
    copy_async_commit();
  };
  typename Dense::Words words;
#pragma unroll
  for (int n = 0; n < Tile::kStages - 1; ++n) {
    const auto dense_units = find_dense(n);
    copy(n, find_sparse(n), dense_units);
    if constexpr (kShifted) {
      if (n < 2 && first(n) < units) {
        dense.load(words, dense_units);
        dense.store(words, dense_units, stage(n) + kBlocksBytes);
      }
    }
  }

  register_sums<Tile::kWarpRows / 16, Tile::kWarpCols / 8> sums{};
  const int m = warp / Tile::kAcross * Tile::kWarpRows, c = warp % Tile::kAcross * Tile::kWarpCols;
  // Where the next copies begin is worked out one stage ahead, while products run.
  auto sparse_next = find_sparse(Tile::kStages - 1);
  auto dense_next = find_dense(kShifted ? 2 : Tile::kStages - 1);
#pragma unroll 1
  for (int n = 0; n * (4 * Tile::kTeams) < units; ++n) {
    copy_async_wait<Tile::kStages - 2>();
    if constexpr (Tile::kTeamWarps == 1) {
      __syncwarp();
    } else {
      __syncthreads();
    }
    copy(n + Tile::kStages - 1, sparse_next, dense_next);
    sparse_next = find_sparse(n + Tile::kStages);
    const bool more = kShifted && first(n + 2) < units;
    if constexpr (!kShifted) {
      dense_next = find_dense(n + Tile::kStages);
    } else if (more) {
      dense.load(words, dense_next);
    }
    const shared_tile<kBlocksK ? 128 : 2 * kRows> left{stage(n)};
    const shared_tile<kDenseK ? 128 : 2 * kCols> right{stage(n) + kBlocksBytes};
    const int depth = Tile::kTeams == 1 || first(n) < units ? Tile::kDepth : 0;  // a team may be through
#pragma unroll
    for (int k = 0; k < Tile::kDepth; k += 16) {
      if (k >= depth) {
        break;
      }
      u32 a[Tile::kWarpRows / 16][4];
#pragma unroll
      for (int i = 0; i < Tile::kWarpRows / 16; ++i) {
        load_left<T, kBlocksK>(a[i], left, m + 16 * i, k);
      }
#pragma unroll
      for (int j = 0; j < Tile::kWarpCols / 16; ++j) {
        u32 b[4];
        load_right<T, kDenseK>(b, right, c + 16 * j, k);
#pragma unroll
        for (int i = 0; i < Tile::kWarpRows / 16; ++i) {
          mma_sync<T>(sums.at[i][2 * j], a[i], b[0], b[1]);
          mma_sync<T>(sums.at[i][2 * j + 1], a[i], b[2], b[3]);
        }
      }
    }
    if constexpr (kShifted) {
      if (more) {
        dense.store(words, dense_next, stage(n + 2) + kBlocksBytes);
      }
      dense_next = find_dense(n + 3);
    }
  }
  copy_async_wait<0>();
  __syncthreads();
  T* const out = static_cast<T*>(p.out.data) + z * p.out.z + h * p.out.h + col * p.out.col +
                 (static_cast<i64>(group % p.groups_per_head) * p.block_rows + row) * p.out.row;
  small_store<T, Tile, kRows, kCols>(sums, reinterpret_cast<float*>(shared), p, out, cols);
}

}  // namespace fretwork
