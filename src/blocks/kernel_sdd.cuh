// A·B at the blocks of a layout on Hopper. The left operand is loaded in lines of 64 rows. Of the right operand only
// the columns that some block of a line needs are loaded, in slots of 16, 32 or 64. A warpgroup multiplies a line by up
// to 256 such columns. The two warpgroups of a tile share the line, or the columns, or nothing: then they have the ends
// of two lines, which would be small tiles alone. Absent blocks that share a line and a slot with present ones are
// computed and not stored.
#pragma once

#include "blocks/kernel.cuh"

namespace fretwork::blocks {

/// A stage is 64 of K: the tile's line or two lines, then its slots.
inline constexpr u32 kLineBytes = 8192;
inline constexpr int kMostSlots = 32;

struct SddRing {
  u32 parity, stage = 0;
  __device__ __forceinline__ void next(const SddParams& p) {
    if (++stage == static_cast<u32>(p.stages)) {
      stage = 0;
      parity ^= 1;
    }
  }
};

struct SddTile {
  Strip strip;  ///< lines are those of head h
  int h, z;
  __device__ __forceinline__ int lines() const { return strip.lines[0] == strip.lines[1] ? 1 : 2; }
  __device__ __forceinline__ int slots() const { return strip.counts[0] + strip.counts[1] - strip.shared; }
};

__device__ __forceinline__ SddTile sdd_tile(const SddParams& p, int index) {
  SddTile t{p.strips[index % p.strip_count], 0, index / p.strip_count};
  t.h = t.strip.lines[0] / p.lines;
  t.strip.lines[0] -= t.h * p.lines;
  t.strip.lines[1] -= t.h * p.lines;
  return t;
}

/// Loads the stages of one tile. Each of four warps loads a quarter of the slots; the last one or two also load lines.
template <bool kLeftK, bool kRightK, bool kImage>
__device__ __forceinline__ void sdd_fetch(const SddParams& p, const SddTile& t, Barriers& barriers, u32 base,
                                          SddRing& ring, int warp) {
  constexpr int kMine = kMostSlots / 4;
  const int slot_bytes = p.slot * 128;
  const bool left = 3 - warp < t.lines();
  const int row = (warp == 3 ? t.strip.lines[0] : t.strip.lines[1]) * 64, count = (t.slots() + 3 - warp) / 4;
  const u32 left_at = warp == 3 ? 0 : kLineBytes, slots_at = t.lines() * kLineBytes + warp * slot_bytes;
  int columns[kMine];
#pragma unroll
  for (int i = 0; i < kMine; ++i) {
    const int slot = warp + 4 * i, entry = t.strip.first + slot + (slot < t.strip.counts[0] ? 0 : t.strip.shared);
    columns[i] = i < count ? __ldg(p.columns + entry) * (kImage ? 1 : p.slot) : 0;
  }
  for (int sum = 0; sum < p.batches.z_sum * p.batches.h_sum; ++sum) {
    const int z = t.z + sum / p.batches.h_sum, h = t.h + sum % p.batches.h_sum;
    const int lh = h * p.left_h, lz = z * p.left_z, rh = h * p.right_h, rz = z * p.right_z;
    const int begin = kImage ? t.z * p.span : 0, end = kImage ? min(begin + p.span, p.depth) : p.depth;
    for (int k = begin; k < end; k += 64, ring.next(p)) {
      const Pixel pixel = kImage ? pixel_at(p.pixels, k) : Pixel{};
      mbarrier::wait(shared_address(&barriers.empty[ring.stage]), ring.parity);
      const u32 full = shared_address(&barriers.full[ring.stage]), at = base + ring.stage * p.stage_bytes;
      mbarrier::arrive_expect(full, count * slot_bytes + (left ? kLineBytes : 0));
      if (left) {
        kLeftK ? tma::load(at + left_at, &p.left, full, k, row, lh, lz)
               : tma::load(at + left_at, &p.left, full, row, k, lh, lz);
      }
#pragma unroll
      for (int i = 0; i < kMine; ++i) {
        if (i < count) {
          const u32 to = at + slots_at + 4 * i * slot_bytes;
          kImage    ? load_pixels(to, &p.right, full, p.pixels, pixel, channel_block(columns[i]) * p.slot, columns[i])
          : kRightK ? tma::load(to, &p.right, full, k, columns[i], rh, rz)
                    : tma::load(to, &p.right, full, columns[i], k, rh, rz);
        }
      }
    }
  }
}

/// Multiplies the stages of one tile. Columns past a warpgroup's slots go to accumulators that are never stored.
template <typename T, bool kLeftK, bool kRightK, int kN>
__device__ __forceinline__ void sdd_multiply(float (&d)[128], int stages, const SddParams& p, Barriers& barriers,
                                             u32 base, SddRing& ring, u32 left_at, u32 right_at) {
  using wgmma::Major;
  constexpr Major kA = kLeftK ? Major::k : Major::mn, kB = kRightK ? Major::k : Major::mn;
  const bool whole = kRightK || p.slot == 64;  // rows of 128 bytes, else of 64
  const u64 next = whole ? wgmma::kNextK<128, kB> : wgmma::kNextK<64, kB>;
  const u32 empty = shared_address(barriers.empty);
  int pending = -1;
#pragma unroll 1  // unrolling gains nothing and costs two thirds of the compile time
  for (int n = 0; n < stages; ++n, ring.next(p)) {
    mbarrier::wait(shared_address(&barriers.full[ring.stage]), ring.parity);
    const u32 at = base + ring.stage * p.stage_bytes;
    const u64 a = wgmma::descriptor<128>(at + left_at, 8192);
    const u64 b = whole ? wgmma::descriptor<128>(at + right_at, 8192) : wgmma::descriptor<64>(at + right_at, 4096);
    wgmma::fence();
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      wgmma::multiply<T, kN, kA, kB>(d, a + q * wgmma::kNextK<128, kA>, b + q * next);
    }
    wgmma::commit();
    wgmma::wait<1>();
    release(empty, pending);
    pending = static_cast<int>(ring.stage);
  }
  wgmma::wait<0>();
  release(empty, pending);
}

/// Transposes four words among four neighbouring lanes. Before, each lane has two columns of each of four runs of eight
/// columns; after, it has all eight columns of one run, 16 bytes to store at once.
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

/// Stores the accumulators of a warpgroup: `slots` slots of line `line`, from entry `first` on. kSwapped: the
/// accumulators hold Sᵀ, and lines are columns of blocks.
template <typename T, bool kSwapped>
__device__ __forceinline__ void sdd_store(const float (&d)[128], const SddParams& p, T* out, int line, int first,
                                          int slots) {
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32 % 4;
  const int line_bits = max(6 - p.block_bits, 0), cell_bits = line_bits + max(p.slot_bits - p.block_bits, 0);
  const int cell = p.block < 64 ? 16 * warp >> p.block_bits : 0;  // block of this warp's 16 rows within the line
  const int within = (64 * line + 16 * warp) & (p.block - 1);     // their first row within the block
  const int* blocks = p.blocks + (static_cast<i64>(first) << cell_bits) + cell;
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const int column = kSwapped ? 16 * i + lane % 4 / 2 * 8 + lane / 4 : i / 2 * 32 + lane % 4 * 8;
    const int slot = column >> p.slot_bits, in_slot = (column & (p.slot - 1)) >> p.block_bits;
    const int block = slot < slots ? __ldg(blocks + (slot << cell_bits) + (in_slot << line_bits)) : -1;
    if (__any_sync(~0u, block >= 0) == 0) {
      continue;
    }
    const auto pair = [&](int at) { return narrow_pair<T>(d[at], d[at + 1]); };
    uint4 run;
    int row, col;
    if constexpr (kSwapped) {
      const auto turned = [&](int at) { return wgmma::transposed_piece(pair(at)); };
      run = exchange(turned(8 * i), turned(8 * i + 2), turned(8 * i + 4), turned(8 * i + 6));
      row = column & (p.block - 1);
      col = within + lane % 2 * 8;
    } else {
      const int at = i / 2 * 16 + i % 2 * 2;
      run = exchange(pair(at), pair(at + 4), pair(at + 8), pair(at + 12));
      row = within + lane / 4 + i % 2 * 8;
      col = column & (p.block - 1);
    }
    if (block >= 0) {
      *reinterpret_cast<uint4*>(out + block * p.out_block + static_cast<i64>(row) * p.out_row + col) = run;
    }
  }
}

/// Stores the partial sums of one piece of K as floats, straight from the accumulators.
__device__ __forceinline__ void sdd_store_sums(const float (&d)[128], const SddParams& p, float* out, int line,
                                               int first, int slots) {
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32 % 4;
  const int line_bits = max(6 - p.block_bits, 0), cell_bits = line_bits + max(p.slot_bits - p.block_bits, 0);
  const int cell = p.block < 64 ? 16 * warp >> p.block_bits : 0;
  const int row = ((64 * line + 16 * warp) & (p.block - 1)) + lane / 4;
  const int* blocks = p.blocks + (static_cast<i64>(first) << cell_bits) + cell;
#pragma unroll
  for (int j = 0; j < 32; ++j) {
    asm volatile("" ::: "memory");  // keeps the loads in order: all at once would spill
    const int column = 8 * j + lane % 4 * 2, slot = column >> p.slot_bits;
    const int in_slot = (column & (p.slot - 1)) >> p.block_bits;
    const int block = slot < slots ? __ldg(blocks + (slot << cell_bits) + (in_slot << line_bits)) : -1;
    if (block >= 0) {
      float* const to = out + block * p.out_block + static_cast<i64>(row) * p.out_row + (column & (p.block - 1));
      *reinterpret_cast<float2*>(to) = make_float2(d[4 * j], d[4 * j + 1]);
      *reinterpret_cast<float2*>(to + 8 * p.out_row) = make_float2(d[4 * j + 2], d[4 * j + 3]);
    }
  }
}

/// kLeftK, kRightK: K is the unit (contiguous) axis of that operand. kSwapped: the kernel computes Sᵀ = Bᵀ·Aᵀ. kImage:
/// the right operand is loaded from images by im2col; neither operand has K as its unit axis, and z counts pieces of K.
template <typename T, bool kLeftK, bool kRightK, bool kSwapped, bool kImage>
__global__ void __launch_bounds__(kThreads, 1) sdd(const __grid_constant__ SddParams p) {
  extern __shared__ u8 raw[];
  __shared__ Barriers barriers;
  const u32 base = (shared_address(raw) + 1023) & ~1023u;
  init_barriers(barriers, p.stages, 4, 8);
  if (threadIdx.x < 128) {
    fewer_registers<72>();  // 128 · 72 + 256 · 216 are all registers of the CTA; more would hang
    const int warp = uniform(threadIdx.x / 32);
    if (threadIdx.x % 32 == 0) {
      SddRing ring{1};
      for (int turn = 0; turn * static_cast<int>(gridDim.x) < p.total; ++turn) {
        if (const int index = turn_tile(turn); index < p.total) {
          sdd_fetch<kLeftK, kRightK, kImage>(p, sdd_tile(p, index), barriers, base, ring, warp);
        }
      }
    }
  } else {
    more_registers<216>();
    const bool second = uniform(threadIdx.x / 128) == 2;
    SddRing ring{0};
    for (int turn = 0; turn * static_cast<int>(gridDim.x) < p.total; ++turn) {
      const int index = turn_tile(turn);
      if (index >= p.total) {
        continue;
      }
      const SddTile t = sdd_tile(p, index);
      const int depth = kImage ? min(p.span, p.depth - t.z * p.span) : p.depth;
      const int stages = (depth + 63) / 64 * p.batches.z_sum * p.batches.h_sum;
      const int mine = second ? t.strip.counts[1] : t.strip.counts[0], before = second ? t.strip.counts[0] : 0;
      float d[128];
#pragma unroll
      for (float& sum : d) {
        sum = 0.0f;
      }
      const u32 left_at = second ? (t.lines() - 1) * kLineBytes : 0;
      const u32 right_at = t.lines() * kLineBytes + (second ? before - t.strip.shared : 0) * p.slot * 128;
      if (mine * p.slot > 128) {
        sdd_multiply<T, kLeftK, kRightK, 256>(d, stages, p, barriers, base, ring, left_at, right_at);
      } else {
        sdd_multiply<T, kLeftK, kRightK, 128>(d, stages, p, barriers, base, ring, left_at, right_at);
      }
      const int line = second ? t.strip.lines[1] : t.strip.lines[0], first = t.strip.first + before;
      if constexpr (kImage) {
        sdd_store_sums(d, p, static_cast<float*>(p.out) + t.z * p.out_z, line, first, mine);
      } else {
        sdd_store<T, kSwapped>(d, p, static_cast<T*>(p.out) + t.z * p.out_z, line, first, mine);
      }
    }
  }
}

}  // namespace fretwork::blocks
