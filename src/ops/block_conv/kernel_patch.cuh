// Products over images on Hopper that fetch every pixel once for all kernel positions. All images lie in one line of
// places, margins included (`Line`), and a CTA has a tile of 256 neighbouring places × twice 64 rows. It fetches what
// the tile reads of 64 channels, its patch; a kernel position reads the same patch some places further, as a descriptor
// may begin at any row of a swizzled tile. Places are N. Each of two warpgroups has 64 rows of op(S) and walks its own
// blocks, which fill 64 rows side by side, with zeros where one is absent. Results of places that are no pixels are
// never written.
#pragma once

#include "blocks/kernel_wide.cuh"
#include "device/load.cuh"
#include "ops/block_conv/params_patch.cuh"

namespace fretwork::block_conv {

struct PatchBarriers {
  u64 full[2][kBlockStages], empty[2][kBlockStages];
  u64 patch_full[kMostPatches], patch_empty[kMostPatches];
  u64 turn_full[kTurnStages], turn_empty[kTurnStages];
  u32 words[2][kBlockStages][4];
};

/// A stage holds 64 of K of 64 rows: kSteps steps of a block's depth, each of kBlocks blocks.
template <int kBlock>
struct Patch {
  static constexpr int kSteps = 64 / kBlock, kBlocks = 64 / kBlock, kStride = 1 + kBlocks;
  static constexpr int kLine = 2 * kBlock;  ///< bytes of a swizzled row
  static constexpr u32 kStepBytes = 64 * kLine, kBlockBytes = kBlock * kLine;
};

/// Where the ring of patches stands; its length is the launch's.
struct PatchRing {
  u32 parity, stage = 0;
  __device__ __forceinline__ void next(const PatchParams& p) {
    if (++stage == static_cast<u32>(p.patch_count)) {
      stage = 0;
      parity ^= 1;
    }
  }
};

/// Place (u, v) of image n: of the result, if it has one there.
struct Place {
  int n, u, v;
};
__device__ __forceinline__ Place place_at(const Line& line, int place) {
  const int n = line.by_image.quotient(place), rest = place - n * line.image, u = line.by_row.quotient(rest);
  return {n, u, rest - u * line.row};
}
__device__ __forceinline__ int patch_places(const PatchParams& p) { return p.patch_columns * p.column_places; }
__device__ __forceinline__ int first_place(const PatchParams& p, int index) {
  return index / p.segment_count * kTilePlaces;
}

/// One thread fetches the patches of a tile.
__device__ __forceinline__ void fetch_patches(const PatchParams& p, int index, PatchBarriers& barriers, u32 base,
                                              PatchRing& ring) {
  const PatchSegment& s = p.segments[index % p.segment_count];
  for (int i = 0; i < s.patch_count; ++i, ring.next(p)) {
    const int channel = __ldg(p.channels + s.patches + i) * kPatchChannels;
    const u32 full = shared_address(&barriers.patch_full[ring.stage]);
    mbarrier::wait(shared_address(&barriers.patch_empty[ring.stage]), ring.parity);
    mbarrier::arrive_expect(full, patch_places(p) * 128);
    for (int column = 0; column < p.patch_columns; ++column) {
      const Place at = place_at(p.line, first_place(p, index) + column * p.column_places);
      tma::load_pixels(base + ring.stage * p.patch_stride + column * p.column_places * 128, &p.image, full, channel,
                       at.v + p.line.first_w, at.u + p.line.first_h, at.n, 0, 0);
    }
  }
}

/// The pixels of a patch that begins at a place, 64 neighbours of an image at a time: body(n, first of them).
template <typename Body>
__device__ __forceinline__ void for_pieces(const PatchParams& p, int first, Body body) {
  const Line& line = p.line;
  const int end = first + patch_places(p), last = min(line.by_image.quotient(end - 1), line.images - 1);
  const auto pixel_of = [&](int place) {  // the first one from a place of an image on
    const int row = line.by_row.quotient(place), h = row + line.first_h, w = place - row * line.row + line.first_w;
    return h < 0 ? 0 : min(h, p.in_height) * p.in_width + (h < p.in_height ? min(max(w, 0), p.in_width) : 0);
  };
  for (int n = line.by_image.quotient(first); n <= last; ++n) {
    const int to = pixel_of(min(end - n * line.image, line.image));
    for (int m = pixel_of(max(first - n * line.image, 0)) & ~7; m < to; m += 64) {
      body(n, m);
    }
  }
}

/// One thread fetches what is to be turned.
__device__ __forceinline__ void fetch_pieces(const PatchParams& p, int index, PatchBarriers& barriers, u32 pieces,
                                             Ring<kTurnStages>& ring) {
  const PatchSegment& s = p.segments[index % p.segment_count];
  for (int i = 0; i < s.patch_count; ++i) {
    const int channel = __ldg(p.channels + s.patches + i) * kPatchChannels;
    for_pieces(p, first_place(p, index), [&](int n, int m) {
      const u32 full = shared_address(&barriers.turn_full[ring.stage]);
      mbarrier::wait(shared_address(&barriers.turn_empty[ring.stage]), ring.parity);
      mbarrier::arrive_expect(full, kTurnBytes);
      tma::load(pieces + ring.stage * kTurnBytes, &p.image, full, m, channel, n, 0);
      ring.next();
    });
  }
}

/// Two warps make the patches of a tile from pieces, each of 32 of the 64 pixels of a piece. `table` has the rows of
/// the patch where a warp's pixels go; they are the same for all channels.
struct Turner {
  static constexpr u32 kNowhere = 0xffff;
  u32 base, pieces, nowhere, half;
  u16 (*table)[32];
  PatchRing ring{1};
  Ring<kTurnStages> turns{0};

  /// Lists the places of a tile's patch: pixels, and in `margin` which of every 64th place is none. How many pieces.
  __device__ __forceinline__ int list(const PatchParams& p, int first, u32& margin) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    int piece = 0;
    for_pieces(p, first, [&](int n, int m) {
      const int pixel = m + static_cast<int>(half) * 32 + lane, h = p.by_width.quotient(pixel);
      const int u = h - p.line.first_h, v = pixel - h * p.in_width - p.line.first_w;
      const int row = n * p.line.image + u * p.line.row + v - first;
      const bool inside = h < p.in_height && u >= 0 && v >= 0 && v < p.line.row && u * p.line.row < p.line.image &&
                          row >= 0 && row < patch_places(p);
      table[piece++][lane % 8 * 4 + lane / 8] = static_cast<u16>(inside ? row : kNowhere);
    });
    margin = 0;
    for (int i = 0, place = static_cast<int>(half) * 32 + lane; place < patch_places(p); ++i, place += 64) {
      const Place at = place_at(p.line, first + place);
      const int h = at.u + p.line.first_h, w = at.v + p.line.first_w;
      const bool pixel = at.n < p.line.images && h >= 0 && h < p.in_height && w >= 0 && w < p.in_width;
      margin |= (pixel ? 0u : 1u) << i;
    }
    __syncwarp();
    return piece;
  }
  /// Where the lane's rows of 16 bytes go: those of pixels lane % 8 + 8 · i.
  __device__ __forceinline__ void places(u32 (&to)[4], u32 patch, int piece) const {
    const u32 lane = threadIdx.x % 32;
    const uint2 rows = *reinterpret_cast<const uint2*>(table[piece] + lane % 8 * 4);
#pragma unroll
    for (u32 i = 0; i < 4; ++i) {
      const u32 row = (i < 2 ? rows.x : rows.y) >> i % 2 * 16 & 0xffff;
      to[i] = row == kNowhere ? nowhere + lane / 4 * 128 + lane % 4 * 16
                              : patch + tma::swizzled<128>(row * 128 + lane / 8 * 16);
    }
  }
  /// Lines of channels become lines of places.
  __device__ __forceinline__ void turn(u32 piece, const u32 (&to)[4]) const {
    const u32 lane = threadIdx.x % 32;
    u32 r[8][4];
#pragma unroll
    for (u32 n = 0; n < 8; ++n) {  // 8 pixels × 32 channels
      wgmma::load_pieces_transposed(r[n],
                                    piece + tma::swizzled<128>((n % 2 * 32 + lane) * 128 + (half * 4 + n / 2) * 16));
    }
#pragma unroll
    for (u32 n = 0; n < 8; ++n) {
      wgmma::store_pieces(to[n / 2] ^ n % 2 * 64, r[n][0], r[n][1], r[n][2], r[n][3]);
    }
  }
  __device__ __forceinline__ void run(const PatchParams& p, int index, PatchBarriers& barriers) {
    const PatchSegment& s = p.segments[index % p.segment_count];
    const int first = first_place(p, index);
    u32 margin;
    const int count = list(p, first, margin);
    for (int i = 0; i < s.patch_count; ++i, ring.next(p)) {
      const u32 patch = base + ring.stage * p.patch_stride;
      mbarrier::wait(shared_address(&barriers.patch_empty[ring.stage]), ring.parity);
      for (u32 left = margin; left != 0; left &= left - 1) {
        const u32 place = (__ffs(static_cast<int>(left)) - 1) * 64 + half * 32 + threadIdx.x % 32;
        for (u32 unit = 0; unit < 8; ++unit) {
          store_shared_128(patch + place * 128 + unit * 16, {0, 0, 0, 0});
        }
      }
      for (int piece = 0; piece < count; ++piece, turns.next()) {
        u32 to[4];
        places(to, patch, piece);
        mbarrier::wait(shared_address(&barriers.turn_full[turns.stage]), turns.parity);
        turn(pieces + turns.stage * kTurnBytes, to);
        release(shared_address(barriers.turn_empty), static_cast<int>(turns.stage));
      }
      fence_async_proxy();
      release(shared_address(barriers.patch_full), static_cast<int>(ring.stage));
    }
    __syncwarp();  // before the table changes
  }
};

/// Where one warpgroup stands in its steps.
struct StepWalk {
  int turn = -1, at = 0, last = 0;

  /// Goes to the next tile if this one has no more; whether there is a step.
  __device__ __forceinline__ bool find(const PatchParams& p, int warpgroup) {
    while (at >= last) {
      if (++turn * static_cast<int>(gridDim.x) >= p.total) {
        return false;
      }
      if (const int index = blocks::turn_tile(turn); index < p.total) {
        const PatchSegment& s = p.segments[index % p.segment_count];
        at = warpgroup == 0 ? s.first[0] : s.first[1];
        last = warpgroup == 0 ? s.last[0] : s.last[1];
      }
    }
    return true;
  }
};

/// A warp fetches the blocks of all tiles, half of it those of one warpgroup, a lane for each block of a stage. The
/// halves go on independently. Where a block is absent the box lies outside the tensor, which gives zeros.
template <int kBlock>
__device__ __forceinline__ void fetch_blocks(const PatchParams& p, PatchBarriers& barriers, u32 blocks) {
  using P = Patch<kBlock>;
  const int warpgroup = static_cast<int>(threadIdx.x) % 32 / 16, lane = static_cast<int>(threadIdx.x) % 16;
  const int step = lane / P::kBlocks, row = lane % P::kBlocks;
  const bool used = lane < P::kSteps * P::kBlocks;
  Ring<kBlockStages> ring(1);
  StepWalk walk;
  bool more = walk.find(p, warpgroup);
  while (__any_sync(~0u, more)) {
    const bool mine = more && used && walk.at + step < walk.last;
    const int* const from = p.steps + static_cast<i64>(walk.at + step) * P::kStride;
    const int block = mine ? __ldg(from + 1 + row) : -1;
    const u32 where = mine ? static_cast<u32>(__ldg(from)) : ~0u;
    bool ready;
    do {
      ready = more && mbarrier::test(shared_address(&barriers.empty[warpgroup][ring.stage]), ring.parity);
      ready = __shfl_sync(~0u, static_cast<int>(ready), warpgroup * 16) != 0;
    } while (!__any_sync(~0u, ready));
    if (ready) {
      const u32 full = shared_address(&barriers.full[warpgroup][ring.stage]), half = 0xffffu << 16 * warpgroup;
      if (used && row == 0) {
        barriers.words[warpgroup][ring.stage][step] = where;
      }
      __syncwarp(half);
      if (lane == 0) {
        mbarrier::arrive_expect(full, min(P::kSteps, walk.last - walk.at) * P::kStepBytes);
      }
      __syncwarp(half);
      if (mine) {
        const u32 to = blocks + (warpgroup * kBlockStages + ring.stage) * kBlockStageBytes + step * P::kStepBytes +
                       row * P::kBlockBytes;
        tma::load(to, &p.sparse, full, 0, 0, block >= 0 ? block * p.sparse_block : p.block_count, 0);
      }
      walk.at += P::kSteps;
      ring.next();
      more = walk.find(p, warpgroup);
    }
    __syncwarp();
  }
}

/// The patches of a segment as one warpgroup goes through them. It waits for each, also for those it does not need: a
/// release must not count for an earlier use of the same place.
struct PatchWalk {
  int at = 0;
  bool here = false;  ///< patch `at` has arrived

  /// Releases patches up to `wanted`; no product that reads them may be under way.
  __device__ __forceinline__ void release_to(int wanted, const PatchParams& p, PatchBarriers& barriers,
                                             PatchRing& ring) {
    for (; at < wanted; ++at, ring.next(p)) {
      wait(barriers, ring);
      release(shared_address(barriers.patch_empty), static_cast<int>(ring.stage));
      here = false;
    }
  }
  __device__ __forceinline__ void wait(PatchBarriers& barriers, const PatchRing& ring) {
    if (!here) {
      mbarrier::wait(shared_address(&barriers.patch_full[ring.stage]), ring.parity);
      here = true;
    }
  }
};

/// Multiplies the steps of one warpgroup. A patch is released when all products that read it are done.
template <typename T, int kBlock, bool kSparseK>
__device__ __forceinline__ void patch_multiply(float (&d)[128], const PatchParams& p, const PatchSegment& s,
                                               PatchBarriers& barriers, u32 base, u32 blocks, Ring<kBlockStages>& ring,
                                               PatchRing& patches, int warpgroup) {
  using P = Patch<kBlock>;
  using wgmma::Major;
  constexpr Major kA = kSparseK ? Major::k : Major::mn;
  const int steps = warpgroup == 0 ? s.last[0] - s.first[0] : s.last[1] - s.first[1];
  const u32 empty = shared_address(barriers.empty[warpgroup]);
  int pending = -1;
  PatchWalk walk;
#pragma unroll 1
  for (int n = 0; n < steps; n += P::kSteps, ring.next()) {
    mbarrier::wait(shared_address(&barriers.full[warpgroup][ring.stage]), ring.parity);
    const u32 stage = ring.stage;
#pragma unroll
    for (int i = 0; i < P::kSteps; ++i) {
      // The lane that releases a stage is the one that reads what it holds.
      const u32 where = __shfl_sync(~0u, threadIdx.x % 32 == 0 ? barriers.words[warpgroup][stage][i] : 0u, 0);
      if (where == ~0u) {
        continue;
      }
      const int wanted = static_cast<int>(where >> (kShiftBits + kColumnBits));
      if (walk.at != wanted) {
        wgmma::commit();
        wgmma::wait<0>();
        walk.release_to(wanted, p, barriers, patches);
      }
      walk.wait(barriers, patches);
      const u32 row = where & ((1u << kShiftBits) - 1);
      const u32 column = where >> kShiftBits & ((1u << kColumnBits) - 1);
      const u64 a = wgmma::descriptor<P::kLine>(blocks + stage * kBlockStageBytes + i * P::kStepBytes, P::kBlockBytes);
      const u64 b = wgmma::descriptor<128>(base + patches.stage * p.patch_stride + row * 128 + column * P::kLine);
      wgmma::fence();
#pragma unroll
      for (int q = 0; q < kBlock / 16; ++q) {
        wgmma::multiply<T, 256, kA, Major::k>(d, a + q * wgmma::kNextK<P::kLine, kA>, b + q * 2);
      }
    }
    wgmma::commit();
    wgmma::wait<1>();
    release(empty, pending);
    pending = static_cast<int>(stage);
  }
  wgmma::wait<0>();
  release(empty, pending);
  walk.release_to(s.patch_count, p, barriers, patches);
}

/// The channel of one of a warpgroup's 64 rows, whose block rows begin with those in `rows`. From kNoChannel on: none.
template <int kBlock>
__device__ __forceinline__ int channel_of(const int* rows, int row) {
  return __ldg(rows + row / kBlock) + row % kBlock;
}

/// Stores a warpgroup's sums where channels are neighbours, 128 places at a time, 16 bytes by each thread. `table` has
/// room for where the places lie. The copy engine cannot do it: it refuses boxes that begin before an image's row.
template <typename T, int kBlock, int kHalf = 0>
__device__ __forceinline__ void store_rows(const float (&d)[128], const PatchParams& p, u32 buffer, int* table,
                                           u32 barrier, const int* rows, int first) {
  const int thread = static_cast<int>(threadIdx.x) % 128;
  const Place at = place_at(p.line, first + kHalf * kHalfPlaces + thread);
  const bool pixel = at.n < p.line.images && at.u < p.height && at.v < p.width;
  named_barrier(barrier, 128);
  table[thread] = pixel ? at.n * p.unit_n + at.u * p.unit_h + at.v * p.unit_w : -1;
  write_piece<T, true, 2 * kHalf>(d, buffer);
  write_piece<T, true, 2 * kHalf + 1>(d, buffer + kPieceBytes);
  named_barrier(barrier, 128);
  const int unit = thread % 8, channel = channel_of<kBlock>(rows, unit * 8);
  constexpr int kTimes = kHalfPlaces / 16;
  int to[kTimes];
  u32 words[kTimes][4];
#pragma unroll
  for (int i = 0; i < kTimes; ++i) {
    const int place = thread / 8 + 16 * i;
    to[i] = table[place];
    load_shared_128(words[i], buffer + place / 64 * kPieceBytes + tma::swizzled<128>(place % 64 * 128 + unit * 16));
  }
#pragma unroll
  for (int i = 0; i < kTimes; ++i) {
    if (to[i] >= 0 && channel < p.rows) {
      store_words<4>(static_cast<T*>(p.out) + (static_cast<i64>(to[i]) * 8 + channel), words[i]);
    }
  }
  if constexpr (kHalf == 0) {
    store_rows<T, kBlock, 1>(d, p, buffer, table, barrier, rows, first);
  }
}

/// 128 places of a channel as they lie in memory, where the pixels of an image are neighbours: those of at most two
/// images, each from a slot on that lies as its first pixel does in 16 bytes.
struct PixelSlots {
  int n, first[2], last[2], second;  ///< pixels of images n and n + 1; the second image's slots begin there

  __device__ __forceinline__ PixelSlots(const PatchParams& p, int place) {
    const auto pixel_of = [&](int at) {
      const int u = p.line.by_row.quotient(at), v = at - u * p.line.row;
      return u < p.height ? u * p.width + min(v, p.width) : p.height * p.width;
    };
    n = p.line.by_image.quotient(place);
    const int at = place - n * p.line.image, left = at + kHalfPlaces - p.line.image;
    first[0] = pixel_of(at);
    last[0] = n < p.line.images ? (left > 0 ? p.height * p.width : pixel_of(at + kHalfPlaces)) : first[0];
    first[1] = 0;
    last[1] = left > 0 && n + 1 < p.line.images ? pixel_of(left) : 0;
    second = (last[0] - start() + 7) & ~7;
  }
  __device__ __forceinline__ int start() const { return first[0] & ~7; }
  /// Whether an image ends here, or nothing is left of them.
  __device__ __forceinline__ bool ends(const PatchParams& p) const { return last[0] == p.height * p.width; }
  __device__ __forceinline__ int slot(const PatchParams& p, int place) const {
    const Place at = place_at(p.line, place);
    const int pixel = at.u * p.width + at.v;
    return at.n >= p.line.images || at.u >= p.height || at.v >= p.width ? kNoSlot
           : at.n == n                                                  ? pixel - start()
                                                                        : second + pixel;
  }
};

/// Writes 64 rows that lie in shared memory in slots: whole units of 16 bytes, a warp a row at a time.
template <typename T, int kBlock>
__device__ __forceinline__ void store_units(const PatchParams& p, const PixelSlots& slots, u32 lines, const int* rows) {
  static_assert(kLineSlots / 8 <= 32 && kBlock % 16 == 0);
  const int slot = static_cast<int>(threadIdx.x) % 32 * 8, top = static_cast<int>(threadIdx.x) % 128 / 32;
  const int image = slot < slots.second ? 0 : 1, pixel = image == 0 ? slots.start() + slot : slot - slots.second;
  const int first = image == 0 ? slots.first[0] : 0, last = image == 0 ? slots.last[0] : slots.last[1];
  if (slot >= kLineSlots || pixel < first || pixel + 8 > last) {
    return;
  }
  T* const out = static_cast<T*>(p.out) + (slots.n + image) * p.out_n + pixel;
  const i64 next = 4 * p.out_c;
#pragma unroll 1
  for (int line = 0; line < 64; line += 16) {  // a warp has every fourth of them
    const u32 from = lines + (line + top) * kLineSlots * 2 + slot * 2;
    u32 words[4][4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      load_shared_128(words[i], from + 4 * i * kLineSlots * 2);
    }
    const int channel = channel_of<kBlock>(rows, line) + top;
    if (channel < p.rows) {  // which is a multiple of 16
      T* to = out + channel * p.out_c;
#pragma unroll
      for (int i = 0; i < 4; ++i, to += next) {
        store_words<4>(to, words[i]);
      }
    }
  }
}
/// Of the unit at a slot, pixels [first, last), which are not all of it; two threads for each row.
template <typename T, int kBlock>
__device__ __forceinline__ void store_part(const PatchParams& p, int n, u32 lines, const int* rows, int slot, int first,
                                           int last) {
  const int line = static_cast<int>(threadIdx.x) % 128 / 2, half = static_cast<int>(threadIdx.x) % 2 * 4;
  const int channel = channel_of<kBlock>(rows, line);
  if (first >= last || channel >= p.rows) {
    return;
  }
  const int pixel = (first & ~7) + half;
  T* const to = static_cast<T*>(p.out) + n * p.out_n + channel * p.out_c + pixel;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (pixel + i >= first && pixel + i < last) {
      to[i] =
          __builtin_bit_cast(T, static_cast<u16>(load_shared_16(lines + (line * kLineSlots + slot + half + i) * 2)));
    }
  }
}
template <typename T, int kBlock>
__device__ __forceinline__ void store_slots(const PatchParams& p, const PixelSlots& s, u32 lines, const int* rows) {
  store_units<T, kBlock>(p, s, lines, rows);
  const int inside = (s.first[0] + 7) & ~7, behind = s.last[0] & ~7;  // first and last end of a unit
  if (inside != s.first[0]) {
    store_part<T, kBlock>(p, s.n, lines, rows, 0, s.first[0], min(inside, s.last[0]));
  }
  if (behind >= inside && behind != s.last[0]) {
    store_part<T, kBlock>(p, s.n, lines, rows, behind - s.start(), behind, s.last[0]);
  }
  if (s.last[1] % 8 != 0) {
    const int behind_second = s.last[1] & ~7;
    store_part<T, kBlock>(p, s.n + 1, lines, rows, s.second + behind_second, behind_second, s.last[1]);
  }
}

/// The sums of 128 places to their slots, of which `table` has twice the number.
template <typename T, int kHalf>
__device__ __forceinline__ void write_slots(const float (&d)[128], u8* lines, const u16* table) {
  constexpr int kEightRows = 8 * kLineSlots * 2;
  const int thread = static_cast<int>(threadIdx.x) % 128, lane = thread % 32;
  u8* const rows = lines + (thread / 32 * 16 + lane / 4) * kLineSlots * 2;
  u32 pairs[16];  // all at once: the compiler cannot know that stores do not change the table
#pragma unroll
  for (int j = 0; j < 16; ++j) {
    pairs[j] = *reinterpret_cast<const u32*>(table + j * 8 + lane % 4 * 2);
  }
#pragma unroll
  for (int j = 0; j < 16; ++j) {
    u8 *const left = rows + (pairs[j] & 0xffff), *const right = rows + (pairs[j] >> 16);
    const float* const from = d + kHalf * 64 + 4 * j;
    const u32 a = narrow_pair<T>(from[0], from[1]), b = narrow_pair<T>(from[2], from[3]);
    if ((pairs[j] & 0xffff) != kNoSlot * 2) {
      *reinterpret_cast<u16*>(left) = static_cast<u16>(a);
      *reinterpret_cast<u16*>(left + kEightRows) = static_cast<u16>(b);
    }
    if (pairs[j] >> 16 != kNoSlot * 2) {
      *reinterpret_cast<u16*>(right) = static_cast<u16>(a >> 16);
      *reinterpret_cast<u16*>(right + kEightRows) = static_cast<u16>(b >> 16);
    }
  }
}

/// Stores a warpgroup's sums where pixels are neighbours, 128 places at a time. Pixels at the end of the first half
/// that do not fill 16 bytes wait for the second. `table` has room for slots.
template <typename T, int kBlock>
__device__ __forceinline__ void store_lines(const float (&d)[128], const PatchParams& p, u8* lines, u16* table,
                                            u32 barrier, const int* rows, int first) {
  const int thread = static_cast<int>(threadIdx.x) % 128;
  PixelSlots upper(p, first), lower(p, first + kHalfPlaces);
  named_barrier(barrier, 128);
  table[thread] = static_cast<u16>(upper.slot(p, first + thread) * 2);
  named_barrier(barrier, 128);
  write_slots<T, 0>(d, lines, table);
  named_barrier(barrier, 128);
  const bool whole = upper.last[1] == 0 && !upper.ends(p);
  const int from = lower.start() - upper.start();  // where the second half's first 16 bytes stand now
  if (whole) {
    upper.last[0] = max(lower.start(), upper.first[0]);
  }
  store_slots<T, kBlock>(p, upper, shared_address(lines), rows);
  table[thread] = static_cast<u16>(lower.slot(p, first + kHalfPlaces + thread) * 2);
  named_barrier(barrier, 128);
  if (whole) {
    if (thread < 64) {
      u32 words[4];
      load_shared_128(words, shared_address(lines) + thread * kLineSlots * 2 + from * 2);
      store_shared_128(shared_address(lines) + thread * kLineSlots * 2, words);
    }
    lower.first[0] = max(lower.start(), upper.first[0]);
    named_barrier(barrier, 128);
  }
  write_slots<T, 1>(d, lines, table);
  named_barrier(barrier, 128);
  store_slots<T, kBlock>(p, lower, shared_address(lines), rows);
}

/// kSparseK: K is the unit axis of op(S)'s blocks. kTurned: the pixels of x are neighbours, not its channels. kRows:
/// the channels of the result are.
template <typename T, int kBlock, bool kSparseK, bool kTurned, bool kRows>
__global__ void __launch_bounds__(blocks::kThreads, 1) patch(const __grid_constant__ PatchParams p) {
  extern __shared__ u8 raw[];
  __shared__ __align__(16) PatchBarriers barriers;
  __shared__ __align__(16) u16 slots[kRows ? 1 : 2][kHalfPlaces];
  __shared__ int places[kRows ? 2 : 1][kHalfPlaces];
  __shared__ __align__(16) u16 table[kTurned ? 2 : 1][kTurned ? kMostPieces : 1][32];
  __shared__ __align__(128) u8 nowhere[kTurned ? 2048 : 16];
  const u32 base = (shared_address(raw) + 1023) & ~1023u;
  const u32 blocks_at = base + p.patch_count * p.patch_stride, pieces = blocks_at + 2 * kBlockStages * kBlockStageBytes;
  const u32 results = pieces + (kTurned ? kTurnStages * kTurnBytes : 0);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kMostPatches; ++i) {
      mbarrier::init(shared_address(&barriers.patch_full[i]), kTurned ? 2 : 1);
      mbarrier::init(shared_address(&barriers.patch_empty[i]), 8);
    }
    for (int i = 0; i < kTurnStages; ++i) {
      mbarrier::init(shared_address(&barriers.turn_full[i]), 1);
      mbarrier::init(shared_address(&barriers.turn_empty[i]), 2);
    }
  }
  init_ring(&barriers.full[0][0], &barriers.empty[0][0], 2 * kBlockStages, 1, 4);
  const auto for_tiles = [&](auto body) {
    for (int turn = 0; turn * static_cast<int>(gridDim.x) < p.total; ++turn) {
      if (const int index = blocks::turn_tile(turn); index < p.total) {
        body(index);
      }
    }
  };
  if (threadIdx.x < 128) {
    fewer_registers<72>();
    const int warp = uniform(threadIdx.x / 32);
    if (threadIdx.x == 0) {
      PatchRing ring{1};
      Ring<kTurnStages> turns(1);
      for_tiles([&](int index) {
        kTurned ? fetch_pieces(p, index, barriers, pieces, turns) : fetch_patches(p, index, barriers, base, ring);
      });
    } else if (warp == 1) {
      fetch_blocks<kBlock>(p, barriers, blocks_at);
    } else if (kTurned && warp >= 2) {
      const u32 half = static_cast<u32>(warp) - 2;
      Turner turner{base, pieces, shared_address(nowhere) + half * 1024, half, table[kTurned ? half : 0]};
      for_tiles([&](int index) { turner.run(p, index, barriers); });
    }
  } else {
    more_registers<216>();
    const int warpgroup = uniform(threadIdx.x / 128) - 1;
    const u32 own = blocks_at + warpgroup * kBlockStages * kBlockStageBytes;
    const u32 buffer = results + warpgroup * (kRows ? 2 * kPieceBytes : 64 * kLineSlots * 2);
    Ring<kBlockStages> ring(0);
    PatchRing patches{0};
    for_tiles([&](int index) {
      const PatchSegment& s = p.segments[index % p.segment_count];
      const int first = first_place(p, index);
      float d[128];
#pragma unroll
      for (float& sum : d) {
        sum = 0.0f;
      }
      patch_multiply<T, kBlock, kSparseK>(d, p, s, barriers, base, own, ring, patches, warpgroup);
      if (p.bias != nullptr) {
        const int warp_row = static_cast<int>(threadIdx.x) / 32 % 4 * 16;
        blocks::wide_add_bias<T>(d, p, channel_of<kBlock>(s.rows[warpgroup], warp_row) - warp_row);
      }
      if constexpr (kRows) {
        store_rows<T, kBlock>(d, p, buffer, places[warpgroup], 1 + warpgroup, s.rows[warpgroup], first);
      } else {
        store_lines<T, kBlock>(d, p, raw + (buffer - shared_address(raw)), slots[warpgroup], 1 + warpgroup,
                               s.rows[warpgroup], first);
      }
    });
  }
}

}  // namespace fretwork::block_conv
