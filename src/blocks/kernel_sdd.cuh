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
/// the right operand is loaded from images by im2col, K is not its unit axis, and z counts pieces of K. With kLeftK the
/// left operand is then NCHW images, and every image begins with a stage of its own.
template <typename T, bool kLeftK, bool kRightK, bool kSwapped, bool kImage>
struct Sdd {
  static constexpr Roles kRoles{.consumers = 2, .producer_registers = 72, .consumer_registers = 216};
  static constexpr bool kImageLeft = kImage && kLeftK;
  const SddParams& p;
  Stages& stages;
  u32 base;

  /// Loads the stages of one tile. Each of four warps loads a quarter of the slots; the last one or two also load
  /// lines.
  __device__ __forceinline__ void fetch(const SddTile& t, Producer<0>& at, int warp) const {
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
      for (int k = begin; k < end; k += 64, at.next(p.stages)) {
        const int image = kImageLeft ? k / 64 / p.image_stages : 0, in_image = k - image * p.image_stages * 64;
        const Pixel pixel =
            kImage ? pixel_at(p.pixels, kImageLeft ? image * p.pixels.per_image + in_image : k) : Pixel{};
        const u32 full = stages.ring.acquire(at), to = base + at.stage * p.stage_bytes;
        mbarrier::arrive_expect(full, count * slot_bytes + (left ? kLineBytes : 0));
        if (left) {
          kImageLeft ? tma::load(to + left_at, &p.left, full, in_image, row, image, 0)
          : kLeftK   ? tma::load(to + left_at, &p.left, full, k, row, lh, lz)
                     : tma::load(to + left_at, &p.left, full, row, k, lh, lz);
        }
#pragma unroll
        for (int i = 0; i < kMine; ++i) {
          if (i < count) {
            const u32 slot = to + slots_at + 4 * i * slot_bytes;
            kImage ? load_pixels(slot, &p.right, full, p.pixels, pixel, channel_block(columns[i]) * p.slot, columns[i])
            : kRightK ? tma::load(slot, &p.right, full, k, columns[i], rh, rz)
                      : tma::load(slot, &p.right, full, columns[i], k, rh, rz);
          }
        }
      }
    }
  }

  /// Multiplies the stages of one tile. Columns past a warpgroup's slots go to accumulators that are never stored.
  /// `chunk` is the first stage's number within its image.
  template <int kN>
  __device__ __forceinline__ void multiply(float (&d)[128], int count, int chunk, Consumer<0>& at, u32 left_at,
                                           u32 right_at) const {
    using wgmma::Major;
    constexpr Major kA = kLeftK ? Major::k : Major::mn, kB = kRightK ? Major::k : Major::mn;
    const bool whole = kRightK || p.slot == 64;  // rows of 128 bytes, else of 64
    const u64 next = whole ? wgmma::kNextK<128, kB> : wgmma::kNextK<64, kB>;
    const auto multiply_stage = [&](u32 stage) {
      const u32 from = base + stage * p.stage_bytes, right = from + right_at;
      const u64 a = wgmma::descriptor<128>(from + left_at, 8192);
      const u64 b = whole ? wgmma::descriptor<128>(right, 8192) : wgmma::descriptor<64>(right, 4096);
      int steps = 4;
      if constexpr (kImageLeft) {  // the right operand of an image's last stage may end with pixels of the next one
        const bool last = chunk == p.image_stages - 1;
        steps = last ? p.last_steps : 4;
        chunk = last ? 0 : chunk + 1;
      }
      wgmma::fence();
#pragma unroll
      for (int q = 0; q < 4; ++q) {
        if (q < steps) {
          wgmma::multiply<T, kN, kA, kB>(d, a + q * wgmma::kNextK<128, kA>, b + q * next);
        }
      }
      return true;
    };
    multiply_stages(stages.ring, at, count, multiply_stage, p.stages);
  }

  __device__ __forceinline__ void produce() const {
    const int warp = uniform(threadIdx.x / 32);
    if (threadIdx.x % 32 == 0) {
      Producer<0> at;
      each_tile(p.total, [&](int index, int) { fetch(sdd_tile(p, index), at, warp); });
    }
  }
  __device__ __forceinline__ void consume() const {
    const bool second = uniform(threadIdx.x / 128) == 2;
    Consumer<0> at;
    each_tile(p.total, [&](int index, int) {
      const SddTile t = sdd_tile(p, index);
      const int depth = kImage ? min(p.span, p.depth - t.z * p.span) : p.depth;
      const int count = (depth + 63) / 64 * p.batches.z_sum * p.batches.h_sum;
      const int chunk = kImageLeft ? t.z * p.span / 64 % p.image_stages : 0;
      const int mine = second ? t.strip.counts[1] : t.strip.counts[0], before = second ? t.strip.counts[0] : 0;
      const u32 left_at = second ? (t.lines() - 1) * kLineBytes : 0;
      const u32 right_at = t.lines() * kLineBytes + (second ? before - t.strip.shared : 0) * p.slot * 128;
      float d[128];
      clear(d);
      if (mine * p.slot > 128) {
        multiply<256>(d, count, chunk, at, left_at, right_at);
      } else {
        multiply<128>(d, count, chunk, at, left_at, right_at);
      }
      const int line = second ? t.strip.lines[1] : t.strip.lines[0], first = t.strip.first + before;
      if constexpr (kImage) {
        sdd_store_sums(d, p, static_cast<float*>(p.out) + t.z * p.out_z, line, first, mine);
      } else {
        sdd_store<T, kSwapped>(d, p, static_cast<T*>(p.out) + t.z * p.out_z, line, first, mine);
      }
    });
  }
};

template <typename T, bool kLeftK, bool kRightK, bool kSwapped, bool kImage>
__global__ void __launch_bounds__(kThreads, 1) sdd(const __grid_constant__ SddParams p) {
  extern __shared__ u8 raw[];
  __shared__ Stages stages;
  init_barriers([&] { stages.ring.make(4, 8, p.stages); });
  run_warp_specialized(Sdd<T, kLeftK, kRightK, kSwapped, kImage>{p, stages, stages_in(raw)});
}

}  // namespace fretwork::blocks
