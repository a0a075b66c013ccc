// A·B at the blocks of a layout, blocks of 64 and 128, on Hopper. Columns of B are gathered for a tile: two blocks of
// 128 in a row, half the row for each warpgroup; four columns that two rows of 64 share, a row for each; or eight
// blocks of 64 in a row, four for each.
#pragma once

#include "ops/block_matmul/kernel_hopper.cuh"

namespace fretwork::block_matmul::hopper {

template <int kBlock>
struct Sdd {
  static constexpr u32 kStages = kBlock == 64 ? 3 : 4;
  static constexpr u32 kLeftBytes = kBlock * 128, kRightBytes = kBlock == 64 ? 65536 : 32768;
  static constexpr u32 kStageBytes = kLeftBytes + kRightBytes;
  static constexpr int kPieces = kBlock / 64;             ///< 64-wide pieces of a block
  static constexpr u32 kNextRow = kLeftBytes + 7 * 8192;  ///< a pair leaves this slot of the right operand free
  /// Columns of a strip that one warpgroup multiplies: all of them, or its half.
  __device__ static __forceinline__ int share(const Strip& s) {
    return kBlock == 64 && s.pair == 0 ? (s.count + 1) / 2 : s.count;
  }
};

struct SddTile {
  Strip strip;
  int row, h, z;
};

__device__ __forceinline__ SddTile sdd_tile(const SddParams& p, int index) {
  const int4 s = __ldg(reinterpret_cast<const int4*>(p.strips) + index % p.strip_count);
  const int batch = index / p.strip_count;
  return {{s.x, s.y, s.z, s.w}, s.x % p.rows, s.x / p.rows + batch % p.batches.heads, batch / p.batches.heads};
}

/// Fetches the stages of one tile. Each of four warps has a quarter of the right operand's 64-wide pieces, and the
/// first ones the pieces of the left.
template <int kBlock, bool kLeftK, bool kRightK>
__device__ __forceinline__ void sdd_fetch(const SddParams& p, const SddTile& t, Barriers& barriers, u32 base,
                                          Ring<Sdd<kBlock>::kStages>& ring) {
  using S = Sdd<kBlock>;
  constexpr int kMine = kBlock == 64 ? 2 : 1;
  const int warp = static_cast<int>(threadIdx.x) / 32, each = S::share(t.strip);
  const bool left = warp < S::kPieces + t.strip.pair;
  const int row = t.row * kBlock + warp * 64;
  const u32 left_at = kBlock == 64 && warp == 1 ? S::kNextRow : warp * 8192;
  int columns[kMine], slots[kMine], count = 0;
#pragma unroll
  for (int i = 0; i < kMine; ++i) {
    const int piece = warp + 4 * i, block = piece / S::kPieces;  // the i-th piece of every warp before the next
    const bool there = block < t.strip.count;
    columns[i] = there ? __ldg(p.columns + t.strip.first + block) * kBlock + piece % S::kPieces * 64 : 0;
    slots[i] = kBlock == 64 && block >= each ? piece - each + 4 : piece;
    count += there ? 1 : 0;
  }
  for (int sum = 0; sum < p.batches.z_sum * p.batches.h_sum; ++sum) {
    const int z = t.z + sum / p.batches.h_sum, h = t.h + sum % p.batches.h_sum;
    const int lh = h * p.left_h, lz = z * p.left_z, rh = h * p.right_h, rz = z * p.right_z;
    for (int k = 0; k < p.depth; k += 64, ring.next()) {
      mbarrier::wait(shared_address(&barriers.empty[ring.stage]), ring.parity);
      const u32 full = shared_address(&barriers.full[ring.stage]), at = base + ring.stage * S::kStageBytes;
      mbarrier::arrive_expect(full, (count + (left ? 1 : 0)) * 8192);
      if (left) {
        kLeftK ? tma::load(at + left_at, &p.left, full, k, row, lh, lz)
               : tma::load(at + left_at, &p.left, full, row, k, lh, lz);
      }
#pragma unroll
      for (int i = 0; i < kMine; ++i) {
        if (i < count) {
          const u32 to = at + S::kLeftBytes + slots[i] * 8192;
          kRightK ? tma::load(to, &p.right, full, k, columns[i], rh, rz)
                  : tma::load(to, &p.right, full, columns[i], k, rh, rz);
        }
      }
    }
  }
}

template <typename T, int kBlock, bool kLeftK, bool kRightK, int kN>
__device__ __forceinline__ void sdd_multiply(float (&d)[128], int stages, Barriers& barriers, u32 base,
                                             Ring<Sdd<kBlock>::kStages>& ring, u32 left_at, u32 right_at) {
  using S = Sdd<kBlock>;
  using wgmma::Major;
  constexpr Major kA = kLeftK ? Major::k : Major::mn, kB = kRightK ? Major::k : Major::mn;
  const u32 empty = shared_address(barriers.empty);
  int pending = -1;
  for (int n = 0; n < stages; ++n, ring.next()) {
    mbarrier::wait(shared_address(&barriers.full[ring.stage]), ring.parity);
    const u32 at = base + ring.stage * S::kStageBytes;
    const u64 a = wgmma::descriptor<128>(at + left_at, 8192), b = wgmma::descriptor<128>(at + right_at, 8192);
    wgmma::fence();
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      wgmma::multiply<T, kN, kA, kB>(d, a + q * wgmma::kNextK<128, kA>, b + q * wgmma::kNextK<128, kB>);
    }
    wgmma::commit();
    wgmma::wait<1>();
    release(empty, pending);
    pending = static_cast<int>(ring.stage);
  }
  wgmma::wait<0>();
  release(empty, pending);
}

/// Four neighbouring lanes hold eight columns of a row four times over; after the exchange each has one of the four
/// runs of eight, 16 bytes to store at once.
__device__ __forceinline__ uint4 exchange(u32 a, u32 b, u32 c, u32 d) {
  const u32 lane = threadIdx.x % 4;
  const auto swap = [](u32& keep, u32& give, bool upper, int with) {
    const u32 sent = upper ? keep : give;
    const u32 got = __shfl_xor_sync(~0u, sent, with);
    (upper ? keep : give) = got;
  };
  swap(a, b, (lane & 1) != 0, 1);
  swap(c, d, (lane & 1) != 0, 1);
  swap(a, c, (lane & 2) != 0, 2);
  swap(b, d, (lane & 2) != 0, 2);
  return make_uint4(a, b, c, d);
}

/// Writes the 64 × 64 sums in registers kAt … kAt + 31; `to` is their first row, column 0.
template <typename T, int kAt>
__device__ __forceinline__ void sdd_store(const float (&d)[128], T* to, int row_stride) {
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32 % 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    T* row = to + static_cast<i64>(16 * warp + lane / 4 + 8 * half) * row_stride + lane % 4 * 8;
#pragma unroll
    for (int j = 0; j < 8; j += 4) {
      const auto pair = [&](int run) {
        return narrow_pair<T>(d[kAt + 4 * run + 2 * half], d[kAt + 4 * run + 2 * half + 1]);
      };
      *reinterpret_cast<uint4*>(row + 8 * j) = exchange(pair(j), pair(j + 1), pair(j + 2), pair(j + 3));
    }
  }
}

/// kLeftK, kRightK: K is the unit axis of that operand.
template <typename T, int kBlock, bool kLeftK, bool kRightK>
__global__ void __launch_bounds__(kThreads, 1) sdd(const __grid_constant__ SddParams p) {
  using S = Sdd<kBlock>;
  extern __shared__ u8 raw[];
  __shared__ Barriers barriers;
  const u32 base = (shared_address(raw) + 1023) & ~1023u;
  init_barriers(barriers, S::kStages, 4, 8);
  if (threadIdx.x < 128) {
    fewer_registers<40>();
    if (threadIdx.x % 32 == 0) {
      Ring<S::kStages> ring(1);
      for (int turn = 0; turn * static_cast<int>(gridDim.x) < p.total; ++turn) {
        if (const int index = turn_tile(turn); index < p.total) {
          sdd_fetch<kBlock, kLeftK, kRightK>(p, sdd_tile(p, index), barriers, base, ring);
        }
      }
    }
  } else {
    more_registers<232>();
    const int warpgroup = static_cast<int>(threadIdx.x) / 128 - 1;
    const int stages = (p.depth + 63) / 64 * p.batches.z_sum * p.batches.h_sum;
    Ring<S::kStages> ring(0);
    for (int turn = 0; turn * static_cast<int>(gridDim.x) < p.total; ++turn) {
      const int index = turn_tile(turn);
      if (index >= p.total) {
        continue;
      }
      const SddTile t = sdd_tile(p, index);
      const int each = S::share(t.strip);
      float d[128];
#pragma unroll
      for (float& sum : d) {
        sum = 0.0f;
      }
      const bool halves = kBlock == 64 && t.strip.pair == 0;  // each warpgroup has its own columns
      const u32 left_at = halves ? 0 : kBlock == 64 ? warpgroup * S::kNextRow : warpgroup * 8192;
      const u32 right_at = S::kLeftBytes + (halves ? warpgroup * 32768 : 0);
      if (each * S::kPieces > 2) {
        sdd_multiply<T, kBlock, kLeftK, kRightK, 256>(d, stages, barriers, base, ring, left_at, right_at);
      } else {
        sdd_multiply<T, kBlock, kLeftK, kRightK, 128>(d, stages, barriers, base, ring, left_at, right_at);
      }
      const int first = kBlock == 64 ? warpgroup * each : 0, mine = halves ? min(each, t.strip.count - first) : each;
      const int* blocks = p.blocks + t.strip.first + first;
      T* out = static_cast<T*>(p.out) + t.z * p.out_z;
      out += kBlock == 128 ? static_cast<i64>(warpgroup) * 64 * p.out_row : 0;
      const auto piece = [&]<int kPiece>() {
        if (kPiece / S::kPieces < mine) {
          T* block = out + __ldg(blocks + kPiece / S::kPieces) * p.out_block;
          sdd_store<T, 32 * kPiece>(d, block + kPiece % S::kPieces * 64, p.out_row);
        }
      };
      piece.template operator()<0>();
      piece.template operator()<1>();
      piece.template operator()<2>();
      piece.template operator()<3>();
    }
  }
}

}  // namespace fretwork::block_matmul::hopper
