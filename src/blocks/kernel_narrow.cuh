// op(S)·dense for blocks of 16 and 32 on Hopper. The free dimension is M, so a block is the N side of one small wgmma
// and absent blocks cost nothing. A tile is 192 of the free dimension × 192 rows. The dense strip is loaded to
// registers once per column and multiplied by every block of that column.
#pragma once

#include "blocks/kernel.cuh"

namespace fretwork::blocks {

/// A stage holds kColumns block columns, 64 of K: strips of the dense operand (24 KB), then room for every block. The
/// strips of columns 2n and 2n + 1 are loaded in one box: TMA needs little more time for a row of 64 bytes than for one
/// of 32, and a dense operand along the free dimension takes half as many boxes. Three warpgroups multiply, which hides
/// the latency of the branches around absent blocks.
template <int kBlock>
struct Narrow {
  static constexpr int kRows = kNarrow / kBlock, kColumns = 64 / kBlock, kLine = 2 * kBlock;
  static constexpr u32 kPartBytes = 64 * kBlock * 2, kStripBytes = 3 * kPartBytes, kBlockBytes = kBlock * kBlock * 2;
  static constexpr u32 kStages = 4, kBlocksAt = 24576, kStageBytes = 49152;
  static constexpr u32 kPaired = 1u << 31;  ///< flag in a column's mask
};

/// Loads the 64 × kBlock part of a strip that a warpgroup multiplies, as fragments. `strips` has the strips of two
/// columns, in one box (`paired`) or in two. kSecond: which of the two.
template <int kBlock, bool kDenseK, int kSecond>
__device__ __forceinline__ void narrow_strip(u32 (&a)[kBlock / 16][4], u32 strips, bool paired, u32 warpgroup) {
  using N = Narrow<kBlock>;
  constexpr int kLine = N::kLine;
  const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
#pragma unroll
  for (int q = 0; q < kBlock / 16; ++q) {
    if constexpr (kDenseK) {
      const u32 row = 64 * warpgroup + 16 * warp + lane / 8 % 2 * 8 + lane % 8, unit = 2 * q + lane / 16;
      const u32 alone = kSecond * N::kStripBytes + tma::swizzled<kLine>(row * kLine + unit * 16);
      const u32 both = tma::swizzled<2 * kLine>(row * (2 * kLine) + kSecond * kLine + unit * 16);
      wgmma::load_pieces(a[q], strips + (paired ? both : alone));
    } else {
      const u32 row = 16 * q + lane / 16 * 8 + lane % 8, unit = 2 * warp + lane / 8 % 2;
      const u32 alone = kSecond * N::kStripBytes + warpgroup * N::kPartBytes;
      const u32 both = (2 * warpgroup + kSecond) * N::kPartBytes;
      wgmma::load_pieces_transposed(a[q], strips + (paired ? both : alone) + tma::swizzled<128>(row * 128 + unit * 16));
    }
  }
}

/// Multiplies a strip by a block, if present, into the block's own columns of the accumulators.
template <typename T, int kBlock, bool kSparseK, int kRow>
__device__ __forceinline__ void narrow_block(float (&d)[kNarrow / 2], const u32 (&a)[kBlock / 16][4], u32 mask,
                                             u64 blocks) {
  using N = Narrow<kBlock>;
  constexpr wgmma::Major kB = kSparseK ? wgmma::Major::k : wgmma::Major::mn;
  if ((mask >> kRow & 1) != 0) {
#pragma unroll
    for (int q = 0; q < kBlock / 16; ++q) {
      const u64 b = blocks + (kRow * N::kBlockBytes >> 4) + q * wgmma::kNextK<N::kLine, kB>;
      wgmma::multiply<T, kBlock, kB, kRow * kBlock / 2>(d, a[q], b);
    }
  }
}

/// Multiplies by all blocks of a column. Three absent blocks in a row are skipped with one branch.
template <typename T, int kBlock, bool kSparseK, int kRow = 0>
__device__ __forceinline__ void narrow_blocks(float (&d)[kNarrow / 2], const u32 (&a)[kBlock / 16][4], u32 mask,
                                              u64 blocks) {
  if constexpr (kRow < Narrow<kBlock>::kRows) {
    if ((mask >> kRow & 7) != 0) {
      narrow_block<T, kBlock, kSparseK, kRow>(d, a, mask, blocks);
      narrow_block<T, kBlock, kSparseK, kRow + 1>(d, a, mask, blocks);
      narrow_block<T, kBlock, kSparseK, kRow + 2>(d, a, mask, blocks);
    }
    narrow_blocks<T, kBlock, kSparseK, kRow + 3>(d, a, mask, blocks);
  }
}

/// See wide_add_bias. Here the rows of the result are the columns of the accumulators.
template <typename T>
__device__ __forceinline__ void narrow_add_bias(float (&d)[kNarrow / 2], const SpmmParams& p, int row) {
  int at = row + static_cast<int>(threadIdx.x) % 4 * 2;
#pragma unroll
  for (int i = 0; i < kNarrow / 2; i += 4, at += 8) {
    asm volatile("" ::: "memory");  // keeps the loads in order: all at once would spill
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const T* const from = static_cast<const T*>(p.bias) + (at + j) * p.bias_stride;
      const float bias = at + j < p.rows ? widen(*from) : 0.0f;
      d[i + j] += bias;
      d[i + j + 2] += bias;
    }
  }
}

/// kSparseK: K is the unit (contiguous) axis of op(S)'s blocks; kDenseK: of the dense operand. kRows: rows are the unit
/// axis of the result. kImage: see WideSpmm.
template <typename T, int kBlock, bool kSparseK, bool kDenseK, bool kRows, bool kImage>
struct NarrowSpmm {
  using N = Narrow<kBlock>;
  static constexpr Roles kRoles{.consumers = 3, .producer_registers = 48, .consumer_registers = 152};
  const SpmmParams& p;
  Stages& stages;
  u32 base;

  /// Loads the stages of one tile. Issuing TMA loads takes time, so four warps share the work: a warp has one column
  /// (blocks of 16) or half the rows of one (32). Lane r reads the entry of block row r and loads that block; lane 0
  /// loads the strip.
  __device__ __forceinline__ void fetch(const SpmmTile& t, Producer<N::kStages>& at) const {
    constexpr int kPerColumn = 4 / N::kColumns, kBoxes = kDenseK ? 1 : 3;  // warps per column, boxes per strip
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int warp = uniform(threadIdx.x / 32);
    const int column = warp / kPerColumn, part = warp % kPerColumn;
    constexpr u32 kAll = (1u << N::kRows) - 1, kFirst = (1u << N::kRows / kPerColumn) - 1;
    const u32 mine = kFirst << part * (N::kRows / kPerColumn);
    const int free = t.tile * kNarrow;
    const Pixel pixel = kImage ? pixel_at(p.pixels, free) : Pixel{};
    const auto entry = [&](int first) {  // lane kRows reads the column, lane kRows + 1 that of the possible partner
      const int k = first + (lane == N::kRows + 1 ? column ^ 1 : column);
      const bool inside = k < t.segment.last && lane <= N::kRows + 1;
      return inside ? __ldg(p.steps + static_cast<i64>(k) * p.stride + (lane >= N::kRows ? 0 : lane + 1)) : -1;
    };
    for (int sum = 0; sum < p.batches.z_sum * p.batches.h_sum; ++sum) {
      const int z = t.z + sum / p.batches.h_sum, h = t.h + sum % p.batches.h_sum;
      const int sz = z * p.sparse_z, dz = z * p.dense_z, dh = h * p.dense_h;
      int ahead = entry(t.segment.first), later = entry(t.segment.first + N::kColumns);
      for (int k = t.segment.first; k < t.segment.last; k += N::kColumns, at.next()) {
        const int now = ahead;
        ahead = later;
        later = entry(k + 2 * N::kColumns);  // two stages ahead: a stage may take less time than this load
        const u32 mask = __ballot_sync(~0u, now >= 0) & kAll;
        const int own = __shfl_sync(~0u, now, N::kRows), other = __shfl_sync(~0u, now, N::kRows + 1);
        const int paired = mask != 0 && other >= 0 && other - own == 1 - 2 * (column & 1) ? 1 : 0;
        const u32 to = base + at.stage * N::kStageBytes;
        // The warps of a column, or of a pair of columns, share the boxes of the strip.
        const int log_sharers = kPerColumn / 2 + paired, sharers = 1 << log_sharers, turn = warp & (sharers - 1);
        const int first = paired != 0 ? min(own, other) : own, row = first * kBlock;
        const u32 strip = to + (column & ~paired) * N::kStripBytes, box_bytes = N::kStripBytes / kBoxes << paired;
        const int count = mask == 0 ? 0 : (kBoxes - 1 - turn + sharers) >> log_sharers;
        const u32 full = stages.ring.acquire(at);
        if (lane == 0) {
          stages.flags[at.stage][column] = mask | (paired != 0 ? N::kPaired : 0);
          mbarrier::arrive_expect(full, count * box_bytes + __popc(mask & mine) * N::kBlockBytes);
          const Map* const map = paired != 0 ? &p.pair : &p.dense;
#pragma unroll
          for (int i = 0; i < kBoxes; ++i) {
            if (mask != 0 && (i & (sharers - 1)) == turn) {
              kImage    ? load_pixels(strip, map, full, p.pixels, pixel, channel_block(first) * kBlock, first)
              : kDenseK ? tma::load(strip, map, full, row, free, dh, dz)
                        : tma::load(strip + i * box_bytes, map, full, free + i * 64, row, dh, dz);
            }
          }
        }
        __syncwarp();
        if (now >= 0 && (mine >> lane & 1) != 0) {
          const u32 block = to + N::kBlocksAt + (column * N::kRows + lane) * N::kBlockBytes;
          tma::load(block, &p.sparse, full, 0, 0, now * p.sparse_block, sz);
        }
      }
    }
  }

  __device__ __forceinline__ void multiply(float (&d)[kNarrow / 2], const SpmmTile& t, Consumer<N::kStages>& at,
                                           u32 warpgroup) const {
    const int steps = t.segment.last - t.segment.first;
    const int count = (steps + N::kColumns - 1) / N::kColumns * p.batches.z_sum * p.batches.h_sum;
    for (int n = 0; n < count; ++n, at.next()) {
      stages.ring.wait(at);
      const uint4 flags = *reinterpret_cast<const uint4*>(stages.flags[at.stage]);
      const u32 masks[4] = {flags.x, flags.y, flags.z, flags.w};
      const u32 from = base + at.stage * N::kStageBytes;
      u32 a[N::kColumns][kBlock / 16][4];
#pragma unroll
      for (int c = 0; c < N::kColumns; c += 2) {
        const bool paired = (masks[c] & N::kPaired) != 0;
        const u32 strips = from + c * N::kStripBytes;
        narrow_strip<kBlock, kDenseK, 0>(a[c], strips, paired, warpgroup);
        narrow_strip<kBlock, kDenseK, 1>(a[c + 1], strips, paired, warpgroup);
      }
      wgmma::fence();
#pragma unroll
      for (int c = 0; c < N::kColumns; ++c) {
        const u64 blocks = wgmma::descriptor<N::kLine>(from + N::kBlocksAt + c * N::kRows * N::kBlockBytes);
        narrow_blocks<T, kBlock, kSparseK>(d, a[c], masks[c], blocks);
      }
      wgmma::commit();
      wgmma::wait<0>();
      stages.ring.release_lane(at.stage);  // every lane has read the flags
    }
  }

  __device__ __forceinline__ void store(float (&d)[kNarrow / 2], const SpmmTile& t, u32 warpgroup) const {
    const u32 buffers = base + N::kStages * N::kStageBytes + warpgroup * kPieceBytes;
    if (t.segment.partial >= 0) {
      store_partial<kNarrowThreads - 128>(d, p.partials, t.partial);
      return;
    }
    const int free = t.tile * kNarrow + static_cast<int>(warpgroup) * 64;
    if (kImage && p.bias != nullptr) {
      narrow_add_bias<T>(d, p, t.place * kNarrow);
    }
    if constexpr (kImage && !kRows) {
      store_nchw<T, true, 1>(d, p, buffers, 1 + warpgroup,
                             [&](int piece) { return make_int2(t.place * kNarrow + piece * 64, free); });
    } else if (kImage && p.image.data != nullptr) {
      store_tile_by_threads<T, !kRows>(d, buffers, 1 + warpgroup, [&](int piece, u32 buffer) {
        store_image<T, kRows>(p, buffer, t.place * kNarrow + piece * 64, free);
      });
    } else {
      store_tile<T, !kRows, 1>(d, buffers, 1 + warpgroup, [&](int piece, u32 buffer) {
        const int row = t.place * kNarrow + piece * 64;
        if (free < p.free) {
          kRows ? tma::store(&p.out, buffer, row, free, t.h, t.z) : tma::store(&p.out, buffer, free, row, t.h, t.z);
        }
      });
    }
  }

  __device__ __forceinline__ void produce() const {
    Producer<N::kStages> at;
    each_tile(p.total, [&](int index, int) { fetch(spmm_tile(p, index), at); });
  }
  __device__ __forceinline__ void consume() const {
    const u32 warpgroup = threadIdx.x / 128 - 1;
    Consumer<N::kStages> at;
    each_tile(p.total, [&](int index, int) {
      const SpmmTile t = spmm_tile(p, index);
      float d[kNarrow / 2];
      clear(d);
      multiply(d, t, at, warpgroup);
      store(d, t, warpgroup);
    });
    finish_stores();
  }
};

template <typename T, int kBlock, bool kSparseK, bool kDenseK, bool kRows, bool kImage>
__global__ void __launch_bounds__(kNarrowThreads, 1) spmm_narrow(const __grid_constant__ SpmmParams p) {
  extern __shared__ u8 raw[];
  __shared__ __align__(16) Stages stages;
  init_barriers([&] { stages.ring.make(4, 12 * 32, Narrow<kBlock>::kStages); });
  run_warp_specialized(NarrowSpmm<T, kBlock, kSparseK, kDenseK, kRows, kImage>{p, stages, stages_in(raw)});
}

}  // namespace fretwork::blocks
