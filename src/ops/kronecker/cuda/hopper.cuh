// What the Hopper kernels share: a ring of stages, each 128 bytes of the depth of both operands, filled by one thread,
// the loop of wgmma over it, and copies of lines that TMA cannot address.
#pragma once

#include "device/copy_async.cuh"
#include "device/epilogue.cuh"
#include "device/mma.cuh"
#include "device/pipeline.cuh"
#include "device/tf32.cuh"
#include "device/tma.cuh"
#include "device/wgmma.cuh"
#include "ops/kronecker/cuda/params.h"

namespace fretwork::kronecker::hopper {

inline constexpr u32 kLeftBytes = kRows * 128, kTurningWarps = 3;

/// Elements of T in the 128 bytes of a line: the depth of a stage.
template <typename T>
inline constexpr int kLine = 128 / static_cast<int>(sizeof(T));

/// The stages of a CTA whose tiles are kWidth wide. kDeltas: operands have the lines of so many products.
template <int kWidth, int kDeltas = 1>
struct Stages : RingBarriers<stages(kWidth, kDeltas)> {
  static constexpr u32 kCount = stages(kWidth, kDeltas), kLeft = kDeltas * kLeftBytes;
  static constexpr u32 kBytes = stage_bytes(kWidth, kDeltas);
  using Ring = fretwork::Ring<kCount>;
};

/// A tile: rows from `row`, columns from `col`, depth in steps of 128 bytes from `first` to `last`.
struct Tile {
  int row, col, l, i, first, last;
};

/// kLines rows of an operand × a step of its depth. With K as the unit axis it is one box, else boxes of as many rows.
template <typename T, bool kK, int kLines>
__device__ __forceinline__ void fetch_operand(u32 to, const Map* map, u32 full, int row, int depth, const Tile& t) {
  if constexpr (kK) {
    tma::load(to, map, full, depth, row, t.l, t.i);
  } else {
#pragma unroll
    for (int at = 0; at < kLines; at += kLine<T>) {
      tma::load(to + at * 128, map, full, row + at, depth, t.l, t.i);
    }
  }
}

/// One thread fetches the stages of a tile, whose rows lie where `from` says.
template <typename T, int kWidth, bool kLeftK, bool kRightK, int kDeltas = 1>
__device__ __forceinline__ void fetch(const Map* left, const Map* right, const Tile& t, const Tile& from,
                                      Stages<kWidth, kDeltas>& stages, u32 base,
                                      typename Stages<kWidth, kDeltas>::Ring& ring) {
  using S = Stages<kWidth, kDeltas>;
  for (int step = t.first; step < t.last; ++step, ring.next()) {
    const u32 full = stages.acquire(ring), to = base + ring.stage * S::kBytes;
    mbarrier::arrive_expect(full, S::kBytes);
    fetch_operand<T, kLeftK, kRows * kDeltas>(to, left, full, from.row * kDeltas, step * kLine<T>, from);
    fetch_operand<T, kRightK, kWidth * kDeltas>(to + S::kLeft, right, full, t.col * kDeltas, step * kLine<T>, t);
  }
}

/// The row of a warpgroup's 64 that a lane's sums lie in, and the one of its other half.
template <typename T, bool kLeftK>
__device__ __forceinline__ int row_of(u32 half) {
  if constexpr (is_same<T, float>) {
    return static_cast<int>(tf32::row_of<kLeftK>(half));
  } else {
    return static_cast<int>(threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4 + 8 * half);
  }
}

/// A warpgroup multiplies the stages of a tile, 64 rows × kWidth, of 16-bit types. kSums: `sums` gets the rows' sums of
/// the left operand, multiplied by the 8 × 64 ones at `ones`.
template <typename T, int kWidth, bool kLeftK, bool kRightK, bool kSums>
__device__ __forceinline__ void multiply_16(float (&d)[kWidth / 2], float (&sums)[4], int steps, Stages<kWidth>& stages,
                                            u32 base, typename Stages<kWidth>::Ring& ring, u32 ones) {
  using wgmma::Major;
  constexpr Major kA = kLeftK ? Major::k : Major::mn, kB = kRightK ? Major::k : Major::mn;
  const u32 warpgroup = threadIdx.x / 128 - 1;
  const u64 one = wgmma::descriptor<128>(ones);
  multiply_stages(stages, ring, steps, [&](u32 stage) {
    const u32 at = base + stage * Stages<kWidth>::kBytes;
    const u64 a = wgmma::descriptor<128>(at + warpgroup * 8192, 8192);
    const u64 b = wgmma::descriptor<128>(at + kLeftBytes, 8192);
    wgmma::fence();
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      wgmma::multiply<T, kWidth, kA, kB>(d, a + q * wgmma::kNextK<128, kA>, b + q * wgmma::kNextK<128, kB>);
      if constexpr (kSums) {
        wgmma::multiply<T, 8, kA, Major::k>(sums, a + q * wgmma::kNextK<128, kA>, one);
      }
    }
    return true;
  });
}

/// The same in tf32: `Reader` reads fragments of the left operand, which are rounded in registers; `sums` adds them up
/// unrounded. Those of the next stage are read while products run, into other registers, as theirs must not change. A
/// stage holds the depth of kDeltas products at once, d[l] of each. kTurned: barriers at `turned` say when the right
/// operand of a stage has been turned around.
template <typename Reader, int kDeltas, int kWidth, bool kTurned, bool kSums>
__device__ __forceinline__ void multiply_tf32(float (&d)[kDeltas][kWidth / 2], float (&sums)[4], int steps,
                                              Stages<kWidth>& stages, u32 base, typename Stages<kWidth>::Ring& ring,
                                              u32 turned) {
  constexpr int kRow = 128 / kDeltas;  // bytes of a line of the right operand
  const u32 warpgroup = threadIdx.x / 128 - 1;
  const Reader reader;
  u32 a[2][4][4];
  int pending = -1;  // the stage that products in flight still read
#pragma unroll 1
  for (int n = 0; n < steps; n += 2) {
#pragma unroll
    for (int turn = 0; turn < 2; ++turn) {
      if (n + turn < steps) {
        stages.wait(ring);
        const u32 at = base + ring.stage * Stages<kWidth>::kBytes;
        reader.load(a[turn], at + warpgroup * 8192);
#pragma unroll
        for (u32 q = 0; q < 4; ++q) {
#pragma unroll
          for (u32 e = 0; e < 4; ++e) {
            if constexpr (kSums) {
              sums[e % 2 * 2] += __uint_as_float(a[turn][q][e]);
            }
            a[turn][q][e] = to_tf32(a[turn][q][e]);
          }
        }
        if constexpr (kTurned) {
          mbarrier::wait(turned + 8 * ring.stage, ring.parity);
        }
        wgmma::fence();
#pragma unroll
        for (u32 q = 0; q < 4; ++q) {
          const u64 b = wgmma::descriptor<kRow>(at + kLeftBytes + q % kDeltas * (kWidth * kRow));
          wgmma::multiply_tf32<kWidth>(d[q % kDeltas], a[turn][q],
                                       b + q / kDeltas * wgmma::kNextK<kRow, wgmma::Major::k>);
        }
        wgmma::commit();
        wgmma::wait<1>();
        stages.release(pending);
        pending = static_cast<int>(ring.stage);
        ring.next();
      }
    }
  }
  wgmma::wait<0>();
  stages.release(pending);
  if constexpr (kSums) {
#pragma unroll
    for (int e = 0; e < 4; e += 2) {
      sums[e] += __shfl_xor_sync(~0u, sums[e], 1);
      sums[e] += __shfl_xor_sync(~0u, sums[e], 2);
    }
  }
}

/// As the type has it; `extra` is `ones` or `turned`.
template <typename T, int kWidth, bool kLeftK, bool kRightK, bool kSums>
__device__ __forceinline__ void multiply(float (&d)[kWidth / 2], float (&sums)[4], int steps, Stages<kWidth>& stages,
                                         u32 base, typename Stages<kWidth>::Ring& ring, u32 extra) {
  if constexpr (is_same<T, float>) {
    multiply_tf32<tf32::LeftReader<kLeftK>, 1, kWidth, !kRightK, kSums>(reinterpret_cast<float(&)[1][kWidth / 2]>(d),
                                                                        sums, steps, stages, base, ring, extra);
  } else {
    multiply_16<T, kWidth, kLeftK, kRightK, kSums>(d, sums, steps, stages, base, ring, extra);
  }
}

}  // namespace fretwork::kronecker::hopper

// ----------------------------------------------------------------------------------------------------
// Batch last with lines that are not aligned to 16 bytes, which TMA cannot address. The producer warps copy the 16-byte
// units that a line lies in and shift it into place in shared memory; all threads of a warpgroup store results. Where
// the d neighbouring lines of a block, taken as one, are aligned, TMA does fetch: lines of one δ then begin at the same
// offset in a unit, and tiles begin at a unit boundary.

namespace fretwork::kronecker::hopper {

inline constexpr int kFetchers = 4;                   ///< warps
inline constexpr u32 kLineArrivals = 32 * kFetchers;  ///< in a stage: each lane speaks for what it wrote

/// A fetching warp's own lines of a stage, in units of 16 bytes: as many as a line fills there and one more, since it
/// begins within the first. That one lies at `ends`. A lane has one unit of every line (16-bit types: of every second).
template <typename T>
struct Lines {
  static constexpr int kBoxes = kRows / kLine<T>, kUnits = 8 * kBoxes, kAtOnce = 32 / kUnits;
  static constexpr int kOwn = kLine<T> / kFetchers, kTurns = kOwn / kAtOnce;
  static constexpr u32 kEnds = kLine<T> * 16;  ///< bytes of them in a stage
  static_assert(kOwn % 8 == 0 && kAtOnce * kTurns == kOwn);
  int own, line, unit;  ///< the warp's first line, the lane's first, and its unit
  u64 next;             ///< bytes from a line to the next

  __device__ __forceinline__ explicit Lines(const ProductParams& p) {
    const int lane = static_cast<int>(threadIdx.x % 32);
    own = static_cast<int>(threadIdx.x / 32) * kOwn;
    line = own + lane / kUnits;
    unit = lane % kUnits;
    next = static_cast<u64>(p.d.divisor * p.strands.x_line * static_cast<i64>(sizeof(T)));
  }
  /// The address of line 0 of a step of a tile.
  static __device__ __forceinline__ u64 first_of(const ProductParams& p, const Tile& t, int step) {
    const Strands& s = p.strands;
    const i64 feature = (static_cast<i64>(t.i) * s.c + step * kLine<T>)*p.d.divisor + t.l;
    return reinterpret_cast<u64>(static_cast<const T*>(s.x) + feature * s.x_line + t.row);
  }
  /// Where a unit of the lane's first line lies, and of the one in a later turn: bits that are switched know its
  /// number.
  __device__ __forceinline__ u32 place(int at) const {
    return at / 8 * (kLine<T> * 128) + tma::swizzled<128>(line * 128 + at % 8 * 16);
  }
  static __device__ __forceinline__ u32 in_turn(u32 place, int turn) {
    return (place ^ kAtOnce * turn % 8 * 16) + turn * (kAtOnce * 128);
  }

  /// `lines` and `bytes` of them exist, and are on their way; what does not is zero.
  __device__ __forceinline__ void copy(u64 first, int lines, int bytes, u32 stage, u32 ends) const {
    const auto copy_unit = [&](u64 line_at, bool there, int left, int at, u32 to) {
      const int within = static_cast<int>(line_at % 16);
      copy_async_part(to, reinterpret_cast<const void*>(line_at - within + 16 * at),
                      there ? min(max(left + within, 0), 16) : 0);
    };
    u64 from = first + line * next;
    const u32 to = place(unit);
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn, from += kAtOnce * next) {
      copy_unit(from, line + kAtOnce * turn < lines, bytes - 16 * unit, unit, stage + in_turn(to, turn));
    }
    if (const int last = own + static_cast<int>(threadIdx.x % 32); last < own + kOwn) {
      copy_unit(first + last * next, last < lines, bytes - 16 * kUnits, kUnits, ends + last * 16);
    }
  }

  /// Lines that are there come to begin where a box has them; line 0 began `start` bytes within a unit.
  __device__ __forceinline__ void shift(u32 start, u32 stage, u32 ends) const {
    constexpr int kTogether = 2;
    const bool last = unit == kUnits - 1;
    const u32 to = place(unit), more = place(unit + 1);
    u32 within = start + line * static_cast<u32>(next);
#pragma unroll
    for (int turn = 0; turn < kTurns; turn += kTogether) {
      u32 words[kTogether][4], behind[kTogether][4];
#pragma unroll
      for (int n = 0; n < kTogether; ++n) {
        load_shared_128(words[n], stage + in_turn(to, turn + n));
        load_shared_128(behind[n], last ? ends + (line + kAtOnce * (turn + n)) * 16 : stage + in_turn(more, turn + n));
      }
      __syncwarp();
#pragma unroll
      for (int n = 0; n < kTogether; ++n, within += kAtOnce * static_cast<u32>(next)) {
        u32 shifted[8] = {words[n][0],  words[n][1],  words[n][2],  words[n][3],
                          behind[n][0], behind[n][1], behind[n][2], behind[n][3]};
#pragma unroll
        for (int w = 0; w < 6; ++w) {
          shifted[w] = within & 8 ? shifted[w + 2] : shifted[w];
        }
#pragma unroll
        for (int w = 0; w < 5; ++w) {
          shifted[w] = within & 4 ? shifted[w + 1] : shifted[w];
        }
#pragma unroll
        for (int w = 0; w < 4; ++w) {
          words[n][w] = sizeof(T) < 4 ? __funnelshift_r(shifted[w], shifted[w + 1], (within & 2) * 8) : shifted[w];
        }
        store_shared_128(stage + in_turn(to, turn + n), words[n]);
      }
    }
  }
};

/// Results stored by threads leave one of a warpgroup's two buffers free.
__device__ __forceinline__ u32 line_ends(u32 staging) { return staging + kPieceBytes; }

/// The fetching warps fill the stages of `turns` tiles, tile_of(turn). `right(stage, tile, step)` is called by one
/// thread, whose copies of the other operand the stage's barrier counts as well.
template <typename T, typename S, typename TileOf, typename Right>
__device__ __forceinline__ void fetch_lines(const ProductParams& p, S& stages, u32 base, u32 ends, int turns,
                                            TileOf tile_of, Right right) {
  constexpr u32 kAhead = S::kCount - 2;
  static_assert(S::kCount * Lines<T>::kEnds <= kPieceBytes && S::kCount <= 8);
  const Lines<T> lines(p);
  const u32 all = turns * p.steps;
  u32 starts = 0;  // of each stage, four bits
  Tile t = tile_of(0);
  int turn = 0, step = 0;
#pragma unroll 1
  for (u32 n = 0; n < all + kAhead; ++n) {
    if (n < all) {
      const u32 stage = n % S::kCount;
      mbarrier::wait(shared_address(&stages.empty[stage]), (n / S::kCount + 1) % 2);
      if (threadIdx.x == 0) {
        right(stage, t, step);
      }
      const u64 first = Lines<T>::first_of(p, t, step);
      lines.copy(first, p.strands.c - step * kLine<T>, min(p.batch - t.row, kRows) * static_cast<int>(sizeof(T)),
                 base + stage * S::kBytes, ends + stage * Lines<T>::kEnds);
      starts = (starts & ~(15u << 4 * stage)) | static_cast<u32>(first % 16) << 4 * stage;
      if (++step == p.steps) {
        step = 0;
        t = tile_of(++turn);
      }
    }
    copy_async_commit();
    if (n >= kAhead) {
      const u32 stage = (n - kAhead) % S::kCount;
      copy_async_wait<kAhead>();
      __syncwarp();  // a warp's lanes have what all of them copied
      lines.shift(starts >> 4 * stage & 15, base + stage * S::kBytes, ends + stage * Lines<T>::kEnds);
      fence_async_proxy();  // wgmma reads what was written here
      mbarrier::arrive(shared_address(&stages.full[stage]));
    }
  }
}

/// A warpgroup stores its 64 rows of a piece at `from`, kLine<T> columns from `col`: a line of a column at a time, in
/// words where these are whole in memory.
template <typename T>
__device__ __forceinline__ void store_line_piece(const ProductParams& p, const Tile& t, int row, int col, u32 from) {
  constexpr int kBoxes = 64 / kLine<T>, kAtOnce = 8, kWide = 4 / static_cast<int>(sizeof(T)), kOwn = kLine<T> / 4;
  const Strands& s = p.strands;
  const int lane = static_cast<int>(threadIdx.x % 32), own = static_cast<int>(threadIdx.x / 32 % 4) * kOwn;
  const int rows = min(p.batch - row, 64), cols = p.b - col - own;
  const i64 feature = (static_cast<i64>(t.i) * p.b + col + own) * p.d.divisor + t.l;
  T* to = static_cast<T*>(s.y) + feature * s.y_line + row + lane * kWide;
#pragma unroll 1
  for (int n = 0; n < kOwn; n += kAtOnce) {
    u32 words[kAtOnce][kBoxes];
#pragma unroll
    for (int a = 0; a < kAtOnce; ++a) {
#pragma unroll
      for (int box = 0; box < kBoxes; ++box) {
        words[a][box] = load_shared_32(from + box * (kLine<T> * 128) + (own + n + a) * 128 + (lane * 4 ^ a * 16));
      }
    }
#pragma unroll
    for (int a = 0; a < kAtOnce; ++a, to += p.d.divisor * s.y_line) {
      const int there = n + a < cols ? rows : 0;
      const int odd = sizeof(T) < 4 && reinterpret_cast<u64>(to) % 4 != 0 ? 1 : 0;  // words begin with the next row
      if (odd != 0 && lane == 0 && there > 0) {
        *reinterpret_cast<u16*>(to) = static_cast<u16>(words[a][0]);
      }
#pragma unroll
      for (int box = 0; box < kBoxes; ++box) {
        const u32 next = __shfl_down_sync(~0u, words[a][box], 1);
        const u32 word = odd != 0 ? __funnelshift_r(words[a][box], next, 16) : words[a][box];
        const int first = box * kLine<T> + lane * kWide + odd;
        if (first + kWide <= there) {
          *reinterpret_cast<u32*>(to + box * kLine<T> + odd) = word;
        } else if (kWide > 1 && first < there) {
          *reinterpret_cast<u16*>(to + box * kLine<T> + odd) = static_cast<u16>(word);
        }
      }
    }
  }
}

/// The same of neighbours: rows from `row` begin at a unit of 16 bytes in y as well. Units of which only a part is of
/// the batch leave by elements.
template <typename T>
__device__ __forceinline__ void store_unit_piece(const ProductParams& p, const Tile& t, int row, int col, u32 from) {
  constexpr int kUnit = 16 / static_cast<int>(sizeof(T)), kUnits = 64 / kUnit, kLines = 128 / kUnits;
  const Strands& s = p.strands;
  const int thread = static_cast<int>(threadIdx.x % 128), unit = thread % kUnits, line = thread / kUnits;
  const int first = row + unit * kUnit;
  const i64 feature = (static_cast<i64>(t.i) * p.b + col + line) * p.d.divisor + t.l;
  T* to = static_cast<T*>(s.y) + feature * s.y_line + first;
  from += unit / 8 * (kLine<T> * 128);
#pragma unroll 1
  for (int n = line; n < min(kLine<T>, p.b - col); n += kLines, to += kLines * p.d.divisor * s.y_line) {
    const u32 at = from + tma::swizzled<128>(n * 128 + unit % 8 * 16);
    if (first >= 0 && first + kUnit <= p.batch) {
      u32 words[4];
      load_shared_128(words, at);
      *reinterpret_cast<uint4*>(to) = make_uint4(words[0], words[1], words[2], words[3]);
    } else {
#pragma unroll 1
      for (int e = max(-first, 0); e < min(kUnit, p.batch - first); ++e) {
        if constexpr (sizeof(T) < 4) {
          reinterpret_cast<u16*>(to)[e] = static_cast<u16>(load_shared_16(at + e * 2));
        } else {
          reinterpret_cast<u32*>(to)[e] = load_shared_32(at + e * 4);
        }
      }
    }
  }
}

/// The same of all sums of a warpgroup, by turns through two buffers.
template <typename T, int kPiece = 0, int kSize>
__device__ __forceinline__ void store_units(const ProductParams& p, const Tile& t, int row, const float (&d)[kSize],
                                            u32 buffers, u32 barrier) {
  if constexpr (kPiece < pieces_of<T, kSize>) {
    const u32 buffer = buffers + kPiece % 2 * kPieceBytes;
    if constexpr (kPiece == 0) {
      named_barrier(barrier, 128);  // the tile before has left
    }
    write_piece<T, true, kPiece>(d, buffer);
    named_barrier(barrier, 128);
    store_unit_piece<T>(p, t, row, t.col + kPiece * kLine<T>, buffer);
    store_units<T, kPiece + 1>(p, t, row, d, buffers, barrier);
  }
}

}  // namespace fretwork::kronecker::hopper
