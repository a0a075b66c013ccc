// The products on mma.sync and cp.async (sm_80 and later), square blocks of 16 to 128. A CTA owns an output tile of 128
// rows; operands pass through a ring of stages in shared memory, each 128 bytes of K deep.
#pragma once

#include "ops/block_matmul/cuda/grid.cuh"
#include "ops/block_matmul/cuda/params.h"
#include "ops/block_matmul/cuda/tile.cuh"

namespace fretwork {

/// A partial tile holds sums in the order of threads' registers: written and read by the same places.
template <typename Warp>
__device__ __forceinline__ void store_partial(const warp_sums<Warp>& sums, float* partial) {
#pragma unroll
  for (int i = 0; i < Warp::kRows / 16; ++i) {
#pragma unroll
    for (int j = 0; j < Warp::kCols / 8; ++j) {
      const float(&s)[4] = sums.at[i][j];
      float4* to = reinterpret_cast<float4*>(partial) + (i * (Warp::kCols / 8) + j) * kTileThreads + threadIdx.x;
      *to = float4{s[0], s[1], s[2], s[3]};
    }
  }
}
template <typename Warp>
__device__ __forceinline__ void add_partial(warp_sums<Warp>& sums, const float* partial) {
#pragma unroll
  for (int i = 0; i < Warp::kRows / 16; ++i) {
#pragma unroll
    for (int j = 0; j < Warp::kCols / 8; ++j) {
      float(&s)[4] = sums.at[i][j];
      const float4 more =
          reinterpret_cast<const float4*>(partial)[(i * (Warp::kCols / 8) + j) * kTileThreads + threadIdx.x];
      s[0] += more.x, s[1] += more.y, s[2] += more.z, s[3] += more.w;
    }
  }
}

/// Where the entries of a chunk of the result go: the first `count` of them, `step` apart.
template <typename T>
struct Target {
  T* to;
  int count;
  i64 step;
};

template <typename T>
__device__ __forceinline__ void store_each(const Target<T>& place, const T* from) {
#pragma unroll 1
  for (int e = 0; e < place.count; ++e) {
    place.to[e * place.step] = from[e];
  }
}
/// At most two, at once where they lie in one word.
template <typename T>
__device__ __forceinline__ void store_pair(const Target<T>& place, const T* from) {
  if (sizeof(T) == 2 && place.count > 1 && place.step == 1 && reinterpret_cast<u64>(place.to) % 4 == 0) {
    *reinterpret_cast<u32*>(place.to) = *reinterpret_cast<const u32*>(from);
    return;
  }
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    if (e < place.count) {
      place.to[e * place.step] = from[e];
    }
  }
}

/// Rounds the sums into `Bytes` of shared memory, as many lines at a time as fit, and writes them 16 bytes at a time
/// along rows (or columns, RowsInner) where `vector` allows. `target(line, inner)` finds the place of the chunk that
/// begins at entry `inner` of a line. `whole`: all chunks count. The memory is free again for all threads.
template <typename T, int Cols, bool RowsInner, int Bytes, typename Warp, typename Find>
__device__ __forceinline__ void store_tile(const warp_sums<Warp>& sums, const Warp& warp, void* memory, bool vector,
                                           bool whole, const Find& target) {
  constexpr int kChunk = chunk_of<T>;
  constexpr int kInner = RowsInner ? kTileRows : Cols, kLines = RowsInner ? Cols : kTileRows;
  constexpr int kLine = kInner + kChunk, kLineBytes = kLine * static_cast<int>(sizeof(T));
  constexpr int kTogether = kLines * kLineBytes <= Bytes       ? kLines
                            : kLines / 2 * kLineBytes <= Bytes ? kLines / 2
                                                               : kLines / 4;
  static_assert(kTogether * kLineBytes <= Bytes && kTogether % 16 == 0);
  T* shared = static_cast<T*>(memory);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int m = warp.m + lane / 4, n = warp.n + lane % 4 * 2;
  T* mine = shared + (RowsInner ? n * kLine + m : m * kLine + n);
#pragma unroll 1
  for (int first = 0; first < kLines; first += kTogether, mine -= kTogether * kLine) {
#pragma unroll
    for (int i = 0; i < Warp::kRows / 16; ++i) {
#pragma unroll
      for (int j = 0; j < Warp::kCols / 8; ++j) {
        const u32 line = RowsInner ? warp.n + j * 8 : warp.m + i * 16;
        if (kTogether < kLines && line - first >= kTogether) {
          continue;
        }
#pragma unroll
        for (int e = 0; e < 4; e += 2) {
          const float low = sums.at[i][j][e], high = sums.at[i][j][e + 1];
          T* to = mine + (RowsInner ? j * 8 * kLine + i * 16 + e * 4 : (i * 16 + e * 4) * kLine + j * 8);
          if constexpr (RowsInner) {
            to[0] = narrow<T>(low);
            to[kLine] = narrow<T>(high);
          } else if constexpr (sizeof(T) == 2) {
            *reinterpret_cast<u32*>(to) = narrow_pair<T>(low, high);
          } else {
            *reinterpret_cast<float2*>(to) = float2{low, high};
          }
        }
      }
    }
    __syncthreads();
    constexpr int kChunks = kInner / kChunk, kStep = kTileThreads / kChunks;
    static_assert(kTileThreads % kChunks == 0 && kTogether % kStep == 0);
    const int inner = static_cast<int>(threadIdx.x) % kChunks * kChunk;
    const int line0 = static_cast<int>(threadIdx.x) / kChunks;
    if (vector && whole) {
#pragma unroll
      for (int line = 0; line < kTogether; line += kStep) {
        const T* from = shared + (line0 + line) * kLine + inner;
        *reinterpret_cast<Chunk*>(target(first + line0 + line, inner).to) = *reinterpret_cast<const Chunk*>(from);
      }
      __syncthreads();
      continue;
    }
    if (vector) {
#pragma unroll 1
      for (int line = line0; line < kTogether; line += kStep) {
        const Target<T> place = target(first + line, inner);
        if (place.count == kChunk) {
          *reinterpret_cast<Chunk*>(place.to) = *reinterpret_cast<const Chunk*>(shared + line * kLine + inner);
        } else {
          store_each(place, shared + line * kLine + inner);
        }
      }
    } else {  // neighbouring lanes store neighbours, so that memory sees whole sectors
#pragma unroll 1
      for (int n = static_cast<int>(threadIdx.x); n < kTogether * kInner / 2; n += kTileThreads) {
        const int line = n / (kInner / 2), pair = n % (kInner / 2) * 2;
        store_pair(target(first + line, pair), shared + line * kLine + pair);
      }
    }
    __syncthreads();
  }
}

/// A tile of spmm, or a part of the K of one.
template <typename T>
struct TileWork {
  const T *blocks, *dense;  // of its first batch; dense: from the tile's first column on
  int cols;                 // of the tile that are there
  int group, partial;       // as in Segment; of the reduction: the first partial tile
  int count;                // of partial tiles to add
  GridPlace place;
};

/// What a stage of spmm is about.
template <int Steps>
struct StageWork {
  int step[Steps];  // as in Grid::steps
  int part;         // of the step's K, in elements
  int z;            // batch, of those that are summed
  int tile;         // where its TileWork is
  int ends;         // 1: the tile's last stage; 2: the CTA's
};

/// A group of 128 / Block block-rows of op(S) times Cols of the free dimension. A stage holds as many steps as its K
/// has room for, or a part of one; a warp's rows lie in one block-row, and it multiplies where that row has the block.
/// CTAs are persistent and the ring runs on from tile to tile: the first stages of the next one arrive while this one
/// is multiplied and stored.
template <typename T, int Products, int Block, int Cols, int Stages, bool LeftKInner, bool RightKInner, bool RowsInner>
__global__ void __launch_bounds__(kTileThreads) spmm(const __grid_constant__ block_matmul::SpmmParams p) {
  using StageT = Stage<T, Cols, LeftKInner, RightKInner>;
  constexpr int kDepth = StageT::kDepth;
  constexpr int kSlices = Block < kDepth ? kDepth / Block : 1;  // steps in a stage
  constexpr int kParts = Block > kDepth ? Block / kDepth : 1;   // stages in a step
  constexpr int kSliceDepth = kDepth / kSlices;
  constexpr int kBlockRows = kTileRows / Block, kStep = 2 + kBlockRows;
  constexpr int kWarpRows = Block < 64 ? Block : 64;
  constexpr int kProducts = kDepth / mma_depth<T>;  // mma in the K of a stage
  constexpr int kSlots = 2 * Stages, kTiles = kSlots + 2;
  constexpr bool kAhead = kSlices == 1;  // operands are read from shared memory one product ahead, also across stages
  using Warp = WarpTile<kWarpRows, Cols / (kWarps / (kTileRows / kWarpRows)), Cols>;
  extern __shared__ __align__(1024) u8 ring[];
  __shared__ StageWork<kSlices * kStep> works[kSlots];
  __shared__ TileWork<T> tiles[kTiles];

  const int thread = static_cast<int>(threadIdx.x);
  const int block_bytes = in_bytes<T>(p.blocks.block);
  const int block_line = in_bytes<T>(LeftKInner ? p.blocks.row : p.blocks.col);
  const int dense_line = in_bytes<T>(RightKInner ? p.dense.col : p.dense.row);
  const auto around = [](int n, int size) { return n < size ? n : n - size; };

  // The first warp walks this CTA's tiles and says what each stage is about, well before its data is asked for. Odd
  // rounds go backwards, as tiles come longest first.
  u32 round = 0;
  int told_tile = 0, told_step = 0, told_part = 0, told_z = 0;
  block_matmul::Segment segment;
  const auto begin_tile = [&] {
    const u32 item = round * gridDim.x + (round % 2 == 0 ? blockIdx.x : gridDim.x - 1 - blockIdx.x);
    ++round;
    if (item >= p.items) {
      told_tile = -1;
      return;
    }
    const GridPlace place = grid_place(p.grid, p.reduce ? p.grid.split_count : p.grid.segment_count, item);
    tiles[told_tile].place = place;
    if (p.reduce) {
      const block_matmul::Split split = p.grid.splits[place.segment];
      segment = {split.group, 0, 0, split.first};
      tiles[told_tile].count = split.count;
    } else {
      segment = p.grid.segments[place.segment];  // needed a stage later
    }
    told_step = 0;
  };
  const auto describe_tile = [&](auto& tile) {
    const GridPlace place = tile.place;
    const int h = place.head + segment.group / p.grid.groups_per_head;
    const i64 first_col = static_cast<i64>(place.tile) * Cols;
    tile.blocks = static_cast<const T*>(p.blocks.data) + place.z * p.blocks.z;
    tile.dense = static_cast<const T*>(p.dense.data) + place.z * p.dense.z + h * p.dense.h + first_col * p.dense.col;
    tile.cols = p.free - first_col < Cols ? static_cast<int>(p.free - first_col) : Cols;
    tile.group = segment.group;
    tile.partial = segment.partial;
  };
  const auto tell = [&](auto& work) {
    if (thread >= 32) {
      return;
    }
    const bool none = told_tile < 0;  // what is asked for then are zeros: a branch would part copies and products
    if (!none && told_step == 0 && told_part == 0 && told_z == 0) {
      __syncwarp();
      describe_tile(tiles[told_tile]);
    }
    const int step = segment.first + told_step;
#pragma unroll
    for (int first = 0; first < kSlices * kStep; first += 32) {
      const int e = first + thread;
      if (e < kSlices * kStep) {
        const bool inside = !none && step + e / kStep < segment.last && p.z_sum > 0;
        copy_async_4(shared_address(&work.step[e]), p.grid.steps + (inside ? static_cast<i64>(step) * kStep + e : 0),
                     inside ? 4 : 0);
      }
    }
    work.part = told_part * kDepth;
    work.z = told_z;
    work.tile = none ? 0 : told_tile;
    if (none) {
      return;
    }
    int ends = 0;
    if (++told_part == kParts) {
      told_part = 0;
      told_step += kSlices;
      if (segment.first + told_step >= segment.last) {
        told_step = 0;
        if (++told_z >= p.z_sum) {
          told_z = 0;
          told_tile = around(told_tile + 1, kTiles);
          begin_tile();
          ends = told_tile < 0 ? 2 : 1;
        }
      }
    }
    work.ends = ends;
  };

  const auto ask = [&](const auto& work, int place_in_ring) {
    const StageT stage(shared_address(ring) + place_in_ring * StageT::kBytes);
    const auto& tile = tiles[work.tile];
    const T* blocks = tile.blocks + work.z * p.blocks.z;
    const int part = work.part;
    copy_tile<T, kTileRows, false>(stage.left, [&](const auto& line, int inner) {
      // The line is a row and the chunk lies along K, or the reverse.
      constexpr int kAcross = LeftKInner ? Block : kSliceDepth, kAlong = LeftKInner ? kSliceDepth : Block;
      const int y = line.template quotient<kAcross>(), x = inner / kAlong;
      const int block = work.step[(LeftKInner ? x : y) * kStep + 2 + (LeftKInner ? y : x)];
      const T* from = blocks + inner % kAlong + (LeftKInner ? part : 0);
      return Source{reinterpret_cast<const u8*>(from) + static_cast<i64>(block - 1) * block_bytes +
                        static_cast<i64>(line.template remainder<kAcross>() + (LeftKInner ? 0 : part)) * block_line,
                    block};
    });
    const T* dense = tile.dense + work.z * p.dense.z;
    const int cols = tile.cols;
    copy_tile<T, Cols, !RightKInner>(stage.right, [&](const auto& line, int inner) {
      const int* s = work.step + (RightKInner ? inner / kSliceDepth : line.template quotient<kSliceDepth>()) * kStep;
      const int k =
          (s[0] - 1) * Block + part + (RightKInner ? inner % kSliceDepth : line.template remainder<kSliceDepth>());
      const u8* from = reinterpret_cast<const u8*>(dense + s[1] * p.dense.h + (RightKInner ? k : inner));
      const int bytes = RightKInner ? (line.value() < cols ? 16 : 0) : bytes_inside<T>(inner, cols);
      return Source{from + (RightKInner ? line.times(dense_line) : static_cast<i64>(k) * dense_line),
                    s[0] != 0 ? bytes : 0};
    });
  };

  if (thread < 32) {
    begin_tile();
  }
  const Warp warp;
  warp_sums<Warp> sums = {};
  const auto stage_at = [&](int n) { return StageT(shared_address(ring) + n * StageT::kBytes); };
  const auto wanted = [&](const auto& work, int slice) {
    return Block == kTileRows || work.step[slice * kStep + 2 + warp.m / Block] != 0;
  };
  warp_operands<Warp> o[2];
  bool there = true;  // the warp's rows have the block of the stage
  // With fewer stages the branch would make registers spill: the zeros of absent blocks are read too.
  const auto load = [&](int at, int product) {
    if (Stages < 4 || there) {
      load_operands<T, LeftKInner, RightKInner>(o[product % 2], stage_at(at), warp, product * mma_depth<T>);
    }
  };
  // After this the next stage has come, and all are done with reading this one.
  const auto arrived = [&](int at, int slot) {
    copy_async_wait<Stages - 2>();
    __syncthreads();
    if constexpr (kAhead) {
      there = wanted(works[around(slot + 1, kSlots)], 0);
      load(around(at + 1, Stages), 0);
    }
  };
#pragma unroll 1
  for (int n = 0; n < kSlots - 2; ++n) {
    if (n >= Stages - 1) {
      ask(works[n - (Stages - 1)], n - (Stages - 1));
    }
    tell(works[n]);
    copy_async_commit();
    if (n == Stages - 2) {
      copy_async_wait<0>();
      __syncthreads();
    }
  }
  arrived(Stages - 1, kSlots - 1);
  int at = 0, slot = 0;  // where the stage is and what it is about
#pragma unroll 1
  for (;; at = around(at + 1, Stages), slot = around(slot + 1, kSlots)) {
    const auto& work = works[slot];
    // One mma of K with operands ahead, or the products of a slice.
    const auto product = [&](int k) {
      if constexpr (kAhead) {
        const bool here = there;
        if (k + 1 < kProducts) {
          load(at, k + 1);
        } else {
          arrived(at, slot);
        }
        if (here) {
          multiply_step<T, Products, Warp>(sums, o[k % 2]);
        }
      } else if (wanted(work, k)) {
        multiply_stage<T, Products, LeftKInner, RightKInner, kSliceDepth, true>(sums, stage_at(at), warp,
                                                                                k * kSliceDepth, ~0u);
      }
    };
    tell(works[around(slot + kSlots - 2, kSlots)]);
    // Without a branch from here to the last product, the compiler spreads the copies between products (block 128).
    product(0);
    ask(works[around(slot + Stages - 1, kSlots)], around(at + Stages - 1, Stages));
    copy_async_commit();
#pragma unroll
    for (int k = 1; k < (kAhead ? kProducts : kSlices); ++k) {
      product(k);
    }
    if constexpr (!kAhead) {
      arrived(at, slot);
    }
    const int ends = work.ends;
    if (ends != 0) {
      const auto& tile = tiles[work.tile];
      const auto partial = [&](int n) {
        return p.partials +
               ((tile.place.batch * p.partial_count + n) * p.grid.tiles + tile.place.tile) * (kTileRows * Cols);
      };
      if (p.reduce) {
#pragma unroll 1
        for (int n = 0; n < tile.count; ++n) {
          add_partial<Warp>(sums, partial(tile.partial + n));
        }
      }
      if (tile.partial >= 0 && !p.reduce) {
        store_partial<Warp>(sums, partial(tile.partial));
      } else {
        const i64 first_col = static_cast<i64>(tile.place.tile) * Cols;
        const int h = tile.place.head + tile.group / p.grid.groups_per_head;
        const int first_row = tile.group % p.grid.groups_per_head * kTileRows;
        T* out = static_cast<T*>(p.out.data) + tile.place.z * p.out.z + h * p.out.h + first_row * p.out.row +
                 first_col * p.out.col;
        const i64 line_step = RowsInner ? p.out.col : p.out.row, step = RowsInner ? p.out.row : p.out.col;
        const bool whole = first_row + kTileRows <= p.rows && tile.cols == Cols;
        store_tile<T, Cols, RowsInner, StageT::kBytes>(
            sums, warp, ring + at * StageT::kBytes, p.vector, whole, [&](int line, int inner) {
              const i64 m = first_row + (RowsInner ? inner : line), n = first_col + (RowsInner ? line : inner);
              const i64 left = m < p.rows && n < p.free ? (RowsInner ? p.rows - m : p.free - n) : 0;
              return Target<T>{out + line * line_step + inner * step,
                               static_cast<int>(left < chunk_of<T> ? left : chunk_of<T>), step};
            });
      }
      if (ends == 2) {
        copy_async_wait<0>();
        return;
      }
      clear<Warp>(sums);
    }
  }
}

/// Blocks of 128 / Block block-rows, at up to Cols / Block of the union of their columns: A's rows and B's columns are
/// read once for all of them; a warp multiplies the blocks that are there.
template <typename T, int Products, int Block, int Cols, int Stages, bool LeftKInner, bool RightKInner>
__global__ void __launch_bounds__(kTileThreads) sdd(const __grid_constant__ block_matmul::SddParams p) {
  using StageT = Stage<T, Cols, LeftKInner, RightKInner>;
  using Warp = WarpTile<64, Cols / 4, Cols>;
  constexpr int kDepth = StageT::kDepth;
  constexpr int kBlockRows = kTileRows / Block, kBlockCols = Cols / Block, kStep = 2 + kBlockRows;
  extern __shared__ __align__(1024) u8 ring[];
  __shared__ int columns[kBlockCols];              // block column + 1
  __shared__ int blocks[kBlockRows * kBlockCols];  // packed block + 1

  const GridPlace place = grid_place(p.grid);
  const block_matmul::Segment segment = p.grid.segments[place.segment];
  const int thread = static_cast<int>(threadIdx.x);
  const int h = place.head + segment.group / p.grid.groups_per_head;
  const int first_row = segment.group % p.grid.groups_per_head * kTileRows;
  if (thread < kBlockCols) {
    const int* step = p.grid.steps + static_cast<i64>(segment.first + thread) * kStep;
    const bool inside = segment.first + thread < segment.last;
    columns[thread] = inside ? step[0] : 0;
    for (int r = 0; r < kBlockRows; ++r) {
      blocks[r * kBlockCols + thread] = inside ? step[2 + r] : 0;
    }
  }
  __syncthreads();
  const Warp warp;
  warp_sums<Warp> sums = {};
  const auto partial = [&](int piece) {
    return p.partials + ((place.batch * p.grid.segment_count + place.segment) * p.pieces + piece) * (kTileRows * Cols);
  };

  if (p.reduce) {
#pragma unroll 1
    for (int piece = 0; piece < p.pieces; ++piece) {
      add_partial<Warp>(sums, partial(piece));
    }
  } else {
    // The warp's blocks, one bit for each 16×16 place (or one for all where they lie in one block).
    constexpr bool kOneBlock = Block >= 64 && Block >= Warp::kCols;
    u32 mask = 0;
#pragma unroll
    for (int i = 0; i < Warp::kRows / 16; ++i) {
#pragma unroll
      for (int j = 0; j < Warp::kCols / 16; ++j) {
        const int block = blocks[(warp.m + i * 16) / Block * kBlockCols + (warp.n + j * 16) / Block];
        mask |= (block != 0 ? 1u : 0u) << (i * (Warp::kCols / 16) + j);
      }
    }
    const int depth_stages = static_cast<int>((p.depth + kDepth - 1) / kDepth);
    const i64 all = static_cast<i64>(depth_stages) * p.h_sum * p.z_sum;
    const int piece = place.tile;
    const i64 begin = all * piece / p.pieces;
    const int total = static_cast<int>(all * (piece + 1) / p.pieces - begin);
    const T* left_base =
        static_cast<const T*>(p.left.data) + place.z * p.left.z + h * p.left.h + first_row * p.left.row;
    const T* right_base = static_cast<const T*>(p.right.data) + place.z * p.right.z + h * p.right.h;
    const int left_line = in_bytes<T>(LeftKInner ? p.left.row : p.left.col);
    const int right_line = in_bytes<T>(RightKInner ? p.right.col : p.right.row);
    const int rows = p.rows - first_row;

    // Stage `begin` + n covers K from `at`·kDepth of head `head` and batch `z`, all counted inside the sums.
    int at = total > 0 ? static_cast<int>(begin % depth_stages) : 0;
    int head = total > 0 ? static_cast<int>(begin / depth_stages % p.h_sum) : 0;
    int z = total > 0 ? static_cast<int>(begin / depth_stages / p.h_sum) : 0;
    const auto ask = [&](int n, int place_in_ring) {
      if (n < total) {
        const StageT stage(shared_address(ring) + place_in_ring * StageT::kBytes);
        const i64 depth = static_cast<i64>(at) * kDepth;
        const T* left = left_base + z * p.left.z + head * p.left.h + depth * p.left.col;
        const T* right = right_base + z * p.right.z + head * p.right.h + depth * p.right.row;
        const int k_left = at + 1 < depth_stages ? kDepth : static_cast<int>(p.depth - depth);
        copy_tile<T, kTileRows, LeftKInner>(stage.left, [&](const auto& line, int inner) {
          const bool inside = LeftKInner ? line.value() < rows : inner < rows && line.value() < k_left;
          return Source{reinterpret_cast<const u8*>(left + inner) + line.times(left_line),
                        inside ? (LeftKInner ? bytes_inside<T>(inner, k_left) : 16) : 0};
        });
        copy_tile<T, Cols, RightKInner>(stage.right, [&](const auto& line, int inner) {
          const int column = columns[RightKInner ? line.template quotient<Block>() : inner / Block];
          const int n = (column - 1) * Block + (RightKInner ? line.template remainder<Block>() : inner % Block);
          const u8* from = reinterpret_cast<const u8*>(right + (RightKInner ? inner : n));
          const bool inside = column != 0 && (RightKInner || line.value() < k_left);
          return Source{from + (RightKInner ? static_cast<i64>(n) * right_line : line.times(right_line)),
                        inside ? (RightKInner ? bytes_inside<T>(inner, k_left) : 16) : 0};
        });
      }
      if (++at == depth_stages) {
        at = 0;
        if (++head == p.h_sum) {
          head = 0;
          ++z;
        }
      }
    };

    int stage = 0;  // where stage n + Stages - 1 goes
#pragma unroll 1
    for (int n = 1 - Stages; n < total; ++n) {
      if (n >= 0) {
        copy_async_wait<Stages - 2>();
        __syncthreads();
      }
      const int next = stage + 1 == Stages ? 0 : stage + 1;  // the ring's next place holds stage n
      const StageT now(shared_address(ring) + next * StageT::kBytes);
      const auto multiply_half = [&](int half) {
        multiply_stage<T, Products, LeftKInner, RightKInner, kDepth / 2, kOneBlock>(sums, now, warp,
                                                                                    half * (kDepth / 2), mask);
      };
      if (n >= 0 && mask != 0) {
        multiply_half(0);
      }
      ask(n + Stages - 1, stage);
      copy_async_commit();
      stage = next;
      if (n >= 0 && mask != 0) {
        multiply_half(1);
      }
    }
    if (p.pieces > 1) {
      store_partial<Warp>(sums, partial(piece));
      return;
    }
    copy_async_wait<0>();
    __syncthreads();
  }

  T* out = static_cast<T*>(p.blocks.data) + place.z * p.blocks.z;
  store_tile<T, Cols, false, Stages * StageT::kBytes>(sums, warp, ring, p.vector, false, [&](int m, int n) {
    const int block = blocks[m / Block * kBlockCols + n / Block];
    return Target<T>{out + (block - 1) * p.blocks.block + m % Block * p.blocks.row + n % Block * p.blocks.col,
                     block != 0 ? chunk_of<T> : 0, p.blocks.col};
  });
}

}  // namespace fretwork
