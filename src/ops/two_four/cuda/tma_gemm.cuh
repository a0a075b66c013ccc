// tma_gemm: 2:4 products on Hopper's sparse tensor cores (wgmma.sp): one thread fetches values, metadata and b, two
// warpgroups multiply 64 rows each. Depths are counted in bytes, so one loop serves every type.
#pragma once

#include "device/activation.cuh"
#include "device/cluster.cuh"
#include "device/epilogue.cuh"
#include "device/pipeline.cuh"
#include "device/tma.cuh"
#include "device/wgmma.cuh"
#include "ops/two_four/cuda/elements.cuh"
#include "ops/two_four/cuda/params.h"

namespace fretwork::two_four::tma_gemm {

/// How a step of the depth is cut: 128 bytes of b.
template <typename T, int kWidth>
struct Shape {
  static constexpr u32 kStages = stages(kWidth), kBytes = stage_bytes(kWidth);
  static constexpr u32 kLeftRow = 64, kLeftBytes = kRows * kLeftRow;
  static constexpr int kDepth = 128 / static_cast<int>(sizeof(T));  ///< elements of b in a step
  static constexpr int kPerChunk = steps_of_chunk(sizeof(T));
  static constexpr int kWordBytes = kChunkRow / kPerChunk;   ///< of a row's metadata in a step
  static constexpr int kRegisters = sizeof(T) == 1 ? 2 : 1;  ///< of metadata, for the two products of a step
  RingBarriers<kStages> ring;
  RingBarriers<kChunks> chunks;  ///< of metadata
};

/// Rows from `row`, columns from `col`, steps of the depth from `first`, where a chunk begins, to `last`.
struct Tile {
  int row, col, batch, first, last;
};

/// `share` tiles of rows go through all columns before the next do: CTAs that run together share both operands in the
/// cache. The CTAs of a cluster have neighbouring tiles of rows (pair) or parts of the depth (split). Until it is known
/// nothing is fetched, so that real divisions would show.
template <int kWidth, bool kPair>
__device__ __forceinline__ Tile tile_at(const Params& p, int index, int rank) {
  const int each = static_cast<int>(p.tiles.divisor), size = static_cast<int>(p.set.divisor);
  const int batch = p.tiles.quotient(index), rest = index - batch * each;
  const int set = p.set.quotient(rest), in_set = rest - set * size;
  const Divisor& rows = (set + 1) * size <= each ? p.share : p.tail;
  const int col = rows.quotient(in_set), row = in_set - col * static_cast<int>(rows.divisor);
  const int part = kPair ? 0 : rank;
  Tile t{(set * static_cast<int>(p.share.divisor) + row) * kRows, col * kWidth, batch, p.first_step[part],
         p.first_step[part + 1]};
  if constexpr (kPair) {
    t.row = 2 * t.row + rank * kRows;
  }
  return t;
}

/// One thread fetches the steps of a tile: of b all, or half for both CTAs of a pair.
template <typename T, int kWidth, bool kRightK, bool kPair>
__device__ __forceinline__ void fetch(const Params& p, const Tile& t, Shape<T, kWidth>& s, u32 base, int rank,
                                      Producer<Shape<T, kWidth>::kStages>& at, Producer<kChunks>& chunk) {
  using S = Shape<T, kWidth>;
  constexpr int kColumns = kPair ? kWidth / 2 : kWidth;
  const int z = t.batch * p.b_batch, mine = kPair ? rank * kColumns : 0;
#pragma unroll 1
  for (int step = t.first; step < t.last; ++step, at.next()) {
    if (step % S::kPerChunk == 0) {
      const u32 full = s.chunks.acquire(chunk);
      mbarrier::arrive_expect(full, kChunkBytes);
      tma::load(base + S::kStages * S::kBytes + chunk.stage * kChunkBytes, &p.words, full, step * S::kWordBytes, t.row,
                0, 0);
      chunk.next();
    }
    const u32 full = s.ring.acquire(at), to = base + at.stage * S::kBytes;
    mbarrier::arrive_expect(full, S::kBytes);
    tma::load(to, &p.values, full, step * (S::kDepth / 2), t.row, 0, 0);
    const auto load = [&](int col, int x, int y) {
      const u32 place = to + S::kLeftBytes + col * 128;
      kPair ? tma::load_to_ranks(place, &p.b, full, 3, x, y, z, 0) : tma::load(place, &p.b, full, x, y, z, 0);
    };
    if constexpr (kRightK) {
      load(mine, step * S::kDepth, t.col + mine);
    } else {
#pragma unroll 1
      for (int col = mine; col < mine + kColumns; col += S::kDepth) {
        load(col, t.col + col, step * S::kDepth);
      }
    }
  }
}

/// Reads a lane's metadata of one step after another from chunks whose rows of 64 bytes the copy engine has swizzled.
template <typename T, int kWidth>
struct Words {
  using S = Shape<T, kWidth>;
  u32 base, offset, turned;  ///< of chunks; of a lane in them; what switches units of 16 bytes
  int row;                   ///< a lane's first
  Consumer<kChunks> chunk;

  __device__ __forceinline__ explicit Words(u32 chunks) : base(chunks) {
    const u32 lane = threadIdx.x % 32, in_tile = threadIdx.x / 32 % 4 * 16 + (threadIdx.x / 128 - 1) * 64 + lane / 4;
    turned = (lane / 8 % 4) << 4;
    if constexpr (sizeof(T) == 1) {
      row = static_cast<int>(in_tile + lane % 2 * 8);
      offset = row * kChunkRow + lane % 4 / 2 * 4;
    } else {
      row = static_cast<int>(in_tile);
      offset = row * kChunkRow + lane % 4 * 2;
    }
  }
  /// Byte `at` of a row's 64, a multiple of 8.
  __device__ __forceinline__ u32 address(int at) const {
    return base + chunk.stage * kChunkBytes + offset + (static_cast<u32>(at & 48) ^ turned) + static_cast<u32>(at & 8);
  }
  /// Groups that are not there become valid ones; what they keep is zero.
  __device__ __forceinline__ void mend(u32 (&e)[S::kRegisters], int step, int groups, int rows) const {
    const u32 t = threadIdx.x % 4;
#pragma unroll
    for (int n = 0; n < S::kRegisters; ++n) {
      const int first = (step * S::kRegisters + n) * 16 + static_cast<int>(sizeof(T) == 1 ? t / 2 * 8 : t * 4);
      const int there = min(max(groups - first, 0), sizeof(T) == 1 ? 8 : 4);
      const u32 keep = there == 8 ? ~0u : (1u << 4 * there) - 1;
      u32 mask = row < rows ? keep : 0u;
      if constexpr (sizeof(T) > 1) {
        mask |= row + 8 < rows ? keep << 16 : 0u;
      }
      e[n] = (e[n] & mask) | (0x44444444u & ~mask);
    }
  }
  /// Steps come in order.
  __device__ __forceinline__ void read(u32 (&e)[S::kRegisters], S& s, const Params& p, const Tile& t, int step) {
    const int in_chunk = step % S::kPerChunk;
    if (in_chunk == 0) {
      s.chunks.wait(chunk);
    }
#pragma unroll
    for (int n = 0; n < S::kRegisters; ++n) {
      const u32 from = address(in_chunk * S::kWordBytes + 8 * n);
      if constexpr (sizeof(T) == 1) {
        asm volatile("ld.shared.b32 %0, [%1];" : "=r"(e[n]) : "r"(from));
      } else {
        u16 low, high;
        asm volatile("ld.shared.b16 %0, [%1];" : "=h"(low) : "r"(from));
        asm volatile("ld.shared.b16 %0, [%1];" : "=h"(high) : "r"(from + 8 * kChunkRow));
        e[n] = static_cast<u32>(high) << 16 | low;
      }
    }
    if (in_chunk == S::kPerChunk - 1 || step + 1 == t.last) {
      s.chunks.release_lane(chunk.stage);
      chunk.next();
    }
    if (t.row + kRows > p.m || (step + 1) * (16 * S::kRegisters) > p.groups) {
      mend(e, step, p.groups, p.m - t.row);
    }
  }
};

/// Starts the two products of a step.
template <typename T, int kWidth, bool kRightK, typename Sum>
__device__ __forceinline__ void multiply_step(Sum (&d)[kWidth / 2], u32 at,
                                              const u32 (&e)[Shape<T, kWidth>::kRegisters]) {
  using S = Shape<T, kWidth>;
  using wgmma::Major;
  constexpr Major kRight = kRightK ? Major::k : Major::mn;
  constexpr int kNext = kRightK ? 4 : 32 * 8;  // 64 bytes or 32 rows of b, in units of 16 bytes
  const u64 left = wgmma::descriptor<S::kLeftRow>(at + (threadIdx.x / 128 - 1) * (64 * S::kLeftRow));
  const u64 right = wgmma::descriptor<128>(at + S::kLeftBytes, kRightK ? 16 : S::kDepth * 128);
  wgmma::fence();
  wgmma::multiply_sparse<T, kWidth, kRight, 0>(d, left, right, e[0]);
  wgmma::multiply_sparse<T, kWidth, kRight, sizeof(T) == 1 ? 0 : 1>(d, left + 2, right + kNext, e[S::kRegisters - 1]);
  wgmma::commit();
}

/// A warpgroup multiplies the steps of a tile, 64 rows × kWidth. A step begins while the one before it runs; only when
/// that has completed is its register of metadata read anew, which its products still look at. Branches lie where no
/// product runs: with one in between, ptxas lets every product wait for the one before.
template <typename T, int kWidth, bool kRightK, bool kPair, typename Sum>
__device__ __forceinline__ void multiply(Sum (&d)[kWidth / 2], const Params& p, const Tile& t, Shape<T, kWidth>& s,
                                         u32 base, Consumer<Shape<T, kWidth>::kStages>& at, Words<T, kWidth>& words) {
  using S = Shape<T, kWidth>;
  u32 e[2][S::kRegisters];
  u32 oldest = at.stage;  // that is not released
  const auto begin = [&](const u32(&metadata)[S::kRegisters]) {
    s.ring.wait(at);
    multiply_step<T, kWidth, kRightK>(d, base + at.stage * S::kBytes, metadata);
    at.next();
  };
  const auto release_oldest = [&] {
    if constexpr (kPair) {  // both CTAs fill it
      s.ring.release_to(oldest, 2, [](u32 lane) { return lane; });
    } else {
      s.ring.release(static_cast<int>(oldest));
    }
    oldest = oldest + 1 == S::kStages ? 0 : oldest + 1;
  };
  int step = t.first;
  if ((t.last - t.first) % 2 != 0) {
    words.read(e[0], s, p, t, step++);
    begin(e[0]);
    wgmma::wait<0>();
    wgmma::metadata_read(e[0]);
    release_oldest();
  }
  if (step == t.last) {
    return;
  }
  words.read(e[0], s, p, t, step);
  words.read(e[1], s, p, t, step + 1);
  begin(e[0]);
#pragma unroll 1
  for (step += 2; step < t.last; step += 2) {
#pragma unroll
    for (int turn = 0; turn < 2; ++turn) {
      begin(e[1 - turn]);
      wgmma::wait<1>();
      wgmma::metadata_read(e[turn]);
      release_oldest();
      words.read(e[turn], s, p, t, step + turn);
    }
  }
  begin(e[1]);
  wgmma::wait<0>();
  wgmma::metadata_read(e[0]);
  wgmma::metadata_read(e[1]);
  release_oldest();
  release_oldest();
}

// ------------------------------------------------------------------------------------------------------- results

/// Adds up what the CTAs of a cluster have of a tile, always in the same order: the first gets the first slice of its
/// columns, and if there are two slices the second the other, in the first sums of d. The rings are empty and
/// not filled again.
template <int kSlices, int kSize, typename Sum>
__device__ __forceinline__ void add_parts(Sum (&d)[kSize], u32 base, int rank, int split) {
  constexpr int kEach = kSize / kSlices, kPlace = kEach * 1024;  // bytes of a slice
  const u32 mine = base + (threadIdx.x - 128) * 16;
  cluster_sync();  // all have multiplied
#pragma unroll
  for (int slice = 0; slice < kSlices; ++slice) {
    if (slice != rank) {
      u32 there;
      asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
                   : "=r"(there)
                   : "r"(mine + (rank - (rank > slice ? 1 : 0)) * kPlace), "r"(slice));
#pragma unroll
      for (int n = 0; n < kEach; n += 4) {
        const Sum* const sent = d + slice * kEach + n;
        asm volatile("st.shared::cluster.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(there + n * 1024),
                     "r"(__builtin_bit_cast(u32, sent[0])), "r"(__builtin_bit_cast(u32, sent[1])),
                     "r"(__builtin_bit_cast(u32, sent[2])), "r"(__builtin_bit_cast(u32, sent[3]))
                     : "memory");
      }
    }
  }
  cluster_sync();
  if constexpr (kSlices == 2) {
#pragma unroll
    for (int n = 0; n < kEach; ++n) {
      d[n] = rank == 1 ? d[kEach + n] : d[n];
    }
  }
#pragma unroll 1
  for (int other = 0; other < split - 1 && rank < kSlices; ++other) {
#pragma unroll
    for (int n = 0; n < kEach; n += 4) {
      u32 got[4];
      asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(got[0]), "=r"(got[1]), "=r"(got[2]), "=r"(got[3])
                   : "r"(mine + other * kPlace + n * 1024)
                   : "memory");
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        d[n + i] += __builtin_bit_cast(Sum, got[i]);
      }
    }
  }
}

/// Scales, bias, activation and the result's scale of sums whose first row and column in the result are these.
template <int kSize>
__device__ __forceinline__ void finish(float (&d)[kSize], const Params& p, int row, int col) {
  row += static_cast<int>(threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4);
  col += static_cast<int>(threadIdx.x % 4 * 2);
  const int rows[2] = {min(row, p.m - 1), min(row + 8, p.m - 1)};  // what lies beyond is not stored
  if (p.scale_s != nullptr) {
    const float scale[2] = {__ldg(p.scale_s + rows[0] * p.scale_s_stride),
                            __ldg(p.scale_s + rows[1] * p.scale_s_stride)};
#pragma unroll
    for (int n = 0; n < kSize; ++n) {
      d[n] *= scale[n / 2 % 2];
    }
  }
  if (p.scale_b != nullptr) {
#pragma unroll
    for (int n = 0; n < kSize; n += 4) {
      const float first = __ldg(p.scale_b + min(col + 2 * n, p.n - 1) * p.scale_b_stride);
      const float second = __ldg(p.scale_b + min(col + 2 * n + 1, p.n - 1) * p.scale_b_stride);
      d[n] *= first;
      d[n + 1] *= second;
      d[n + 2] *= first;
      d[n + 3] *= second;
    }
  }
  if (p.bias != nullptr) {
    const float bias[2] = {as_number(p.bias, rows[0] * p.bias_stride, p.bias_type),
                           as_number(p.bias, rows[1] * p.bias_stride, p.bias_type)};
#pragma unroll
    for (int n = 0; n < kSize; ++n) {
      d[n] += bias[n / 2 % 2];
    }
  }
  if (p.activation != 0) {
    in_turns(d, [&](auto& some, int) { activate(some, p.activation); });
  }
  if (p.scale_out != nullptr) {
    const float scale = __ldg(p.scale_out);
#pragma unroll
    for (float& x : d) {
      x *= scale;
    }
  }
}

/// Sums kAt … kAt + 15 of a thread (64 × 32 of a warpgroup) as 32-bit numbers to 8 KB of shared memory, as the copy
/// engine swizzles rows of 128 bytes: 64 rows of 32 columns, or (transposed) two boxes of 32 columns, 32 rows each.
template <int kAt, int kSize>
__device__ __forceinline__ void store_piece_32(const float (&d)[kSize], u32 to, bool transposed) {
  const u32 row = threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
  for (u32 j = 0; j < 4; ++j) {
    const u32 next = transposed ? j * 1024 : (8 * t ^ row % 8 << 4) ^ j << 5;
#pragma unroll
    for (u32 i = 0; i < 4; ++i) {
      const u32 r = row + 8 * (i / 2), line = 2 * t + i % 2;
      const u32 at = transposed ? r / 32 * 4096 + line * 128 + (r % 32 * 4 ^ line << 4) : r * 128 + i % 2 * 4;
      tf32::store_shared(to + at + next, d[kAt + 4 * j + i]);
    }
  }
}

/// Where a warpgroup's sums go.
struct Place {
  int row, col, batch;
  int columns;  ///< that it has
  u32 buffers, barrier;
};

/// All threads of a warpgroup copy a piece to a result that the copy engine cannot write.
template <typename U>
__device__ __forceinline__ void copy_piece(const Params& p, const Place& at, int col, u32 buffer) {
  constexpr int kUnit = 128 / static_cast<int>(sizeof(U));
  const int lines = p.transposed != 0 ? kUnit : 64;
#pragma unroll 1
  for (int n = static_cast<int>(threadIdx.x % 128); n < 64 * kUnit; n += 128) {
    const int unit = n % kUnit, line = n / kUnit % lines, box = n / kUnit / lines;
    const int i = at.row + (p.transposed != 0 ? box * kUnit + unit : line), j = col + (p.transposed != 0 ? line : unit);
    if (i < p.m && j < p.n) {
      const u32 from = buffer + box * (kUnit * 128) + tma::swizzled<128>(line * 128 + unit * sizeof(U));
      U* const to = static_cast<U*>(p.out) + at.batch * p.c_batch + i * p.c_row + j * p.c_col;
      if constexpr (sizeof(U) == 2) {
        asm volatile("ld.shared.b16 %0, [%1];" : "=h"(to->bits) : "r"(from) : "memory");
      } else {
        asm volatile("ld.shared.f32 %0, [%1];" : "=f"(*to) : "r"(from) : "memory");
      }
    }
  }
}

/// The same from a piece of f32 to a result of 16 or 8 bits, four neighbours at a time.
__device__ __forceinline__ void convert_piece(const Params& p, const Place& at, int col, u32 buffer) {
  const bool turned = p.transposed != 0;
  const int lines = turned ? 32 : 64;
#pragma unroll 1
  for (int n = static_cast<int>(threadIdx.x % 128); n < 64 * 32 / 4; n += 128) {
    const int unit = n % 8 * 4, line = n / 8 % lines, box = n / 8 / lines;
    const int i = at.row + (turned ? box * 32 + unit : line), j = col + (turned ? line : unit);
    if (i < p.m && j < p.n) {
      float v[4];
      asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                   : "=f"(v[0]), "=f"(v[1]), "=f"(v[2]), "=f"(v[3])
                   : "r"(buffer + box * 4096 + tma::swizzled<128>(line * 128 + unit * 4))
                   : "memory");
      store_four(p.out, at.batch * p.c_batch + i * p.c_row + j * p.c_col, turned ? p.c_row : p.c_col, v,
                 turned ? p.m - i : p.n - j, p.out_type, p.wide != 0);
    }
  }
}

/// A tile's pieces are a multiple of these.
template <int kSize>
inline constexpr int kBuffers = kSize > 32 ? 2 : 1;

/// Sums leave in pieces of 64 columns of 16 bits or 32 of 32 (U is float, whatever the bits mean), by the copy engine
/// or, with kByThreads, by threads where it cannot write; those of 16 bits only by threads.
template <typename U, bool kByThreads, int kPiece = 0, int kSize>
__device__ __forceinline__ void store_sums(const float (&d)[kSize], const Params& p, const Place& at) {
  constexpr int kColumns = 128 / static_cast<int>(sizeof(U)), kSums = kColumns / 2;
  if constexpr (kPiece < kSize / kSums) {
    const int col = at.col + kPiece * kColumns;
    if (kPiece * kColumns >= at.columns) {
      return;
    }
    const auto write = [&](u32 buffer) {
      if constexpr (sizeof(U) == 4) {
        store_piece_32<kPiece * kSums>(d, buffer, p.transposed != 0);
      } else if (p.transposed != 0) {
        store_piece<U, true, kPiece * kSums>(d, buffer);
      } else {
        store_piece<U, false, kPiece * kSums>(d, buffer);
      }
    };
    const auto store = [&](u32 buffer) {
      const bool turned = p.transposed != 0;
      if (sizeof(U) == 4 && p.direct == 0 && col < p.n && at.row < p.m) {
        tma::store(&p.c, buffer, turned ? at.row : col, turned ? col : at.row, at.batch, 0);
        if (turned && at.row + 32 < p.m) {  // the other 32 rows
          tma::store(&p.c, buffer + kPieceBytes / 2, at.row + 32, col, at.batch, 0);
        }
      }
    };
    store_in_turn<kBuffers<kSize>>(kPiece, at.buffers, at.barrier, write, store);
    if constexpr (kByThreads) {
      const u32 buffer = at.buffers + kPiece % kBuffers<kSize> * kPieceBytes;
      if (sizeof(U) == 4 && p.convert != 0) {
        convert_piece(p, at, col, buffer);
      } else if (p.direct != 0) {
        copy_piece<U>(p, at, col, buffer);
      }
    }
    store_sums<U, kByThreads, kPiece + 1>(d, p, at);
  }
}

/// Sums of 16 bits leave in pieces of 64 columns, straight on: where other kernels have displaced this code, it comes
/// from memory, and what branches off waits for that each time. kBox columns of a piece are a box of the result's map.
template <typename U, bool kTransposed, int kBox, int kPiece = 0, int kSize>
__device__ __forceinline__ void store_boxes(const float (&d)[kSize], const Params& p, const Place& at) {
  constexpr int kPieces = (kSize + 31) / 32;
  if constexpr (kPiece < kPieces) {
    if (kPiece * 64 >= at.columns) {
      return;
    }
    if (kPiece == 0 && kPieces % kBuffers<kSize> != 0 && threadIdx.x % 128 == 0) {
      tma::store_wait_read<0>();  // the last piece of the tile before had the first buffer too
    }
    const int col = at.col + kPiece * 64;
    store_in_turn<kBuffers<kSize>>(
        kPiece, at.buffers, at.barrier, [&](u32 buffer) { store_piece<U, kTransposed, kPiece * 32>(d, buffer); },
        [&](u32 buffer) {
#pragma unroll
          for (int box = 0; box < 64 && kPiece * 64 + box < 2 * kSize; box += kBox) {
            if (col + box < p.n && at.row < p.m && (box == 0 || kPiece * 64 + box < at.columns)) {
              tma::store(&p.c, buffer + box * 128, kTransposed ? at.row : col, kTransposed ? col + box : at.row,
                         at.batch, 0);
            }
          }
        });
    store_boxes<U, kTransposed, kBox, kPiece + 1>(d, p, at);
  }
}

/// 64 columns at a time, in few instructions for what is rare.
template <typename U, int kSize>
__device__ __forceinline__ void store_in_turns(float (&d)[kSize], const Params& p, const Place& at) {
  in_turns(d, [&](auto& some, int turn) {
    store_sums<U, true>(some, p,
                        {at.row, at.col + 64 * turn, at.batch, at.columns - 64 * turn, at.buffers, at.barrier});
  });
}

template <typename U, int kSize>
__device__ __forceinline__ void store_halves(float (&d)[kSize], const Params& p, const Place& at) {
  if constexpr (for_linear(2 * kSize)) {
    store_boxes<U, true, box_columns(2 * kSize)>(d, p, at);
  } else if (p.direct != 0) {
    store_in_turns<U>(d, p, at);
  } else if (p.transposed != 0) {
    store_boxes<U, true, 64>(d, p, at);
  } else {
    store_boxes<U, false, 64>(d, p, at);
  }
}

/// Sums become results.
template <typename T, int kSize, typename Sum>
__device__ __forceinline__ void store(const Sum (&d)[kSize], const Params& p, const Place& at) {
  float f[kSize];
#pragma unroll
  for (int n = 0; n < kSize; ++n) {
    if constexpr (is_same<Sum, int>) {
      f[n] = p.out_type == OutType::i32 ? __int_as_float(d[n]) : static_cast<float>(d[n]);
    } else {
      f[n] = d[n];
    }
  }
  if (p.plain == 0) {
    finish(f, p, at.row, at.col);
  }
  if constexpr (for_linear(2 * kSize)) {
    store_halves<T>(f, p, at);
  } else if (p.out_type == OutType::f32 || p.out_type == OutType::i32 || p.convert != 0) {
    if constexpr (is_same<T, float> || is_same<Sum, int>) {
      p.direct != 0 ? store_in_turns<float>(f, p, at) : store_sums<float, false>(f, p, at);
    } else {
      store_in_turns<float>(f, p, at);
    }
  } else if constexpr (sizeof(T) == 2) {
    store_halves<T>(f, p, at);
  } else if constexpr (sizeof(T) == 1) {
    p.out_type == OutType::f16 ? store_halves<f16>(f, p, at) : store_halves<bf16>(f, p, at);
  }
}

/// kRightK: k is the unit axis of b, else n, which only 16-bit types have an instruction for. kPair: pairs of CTAs, a
/// cluster, have tiles of rows side by side and share what they fetch of b; asked for at run time, it cost 5%, used or
/// not.
template <typename T, int kWidth, bool kRightK, bool kPair>
struct Product {
  using S = Shape<T, kWidth>;
  static constexpr Roles kRoles{.consumers = 2, .producer_registers = 40, .consumer_registers = 232, .cluster = kPair};
  const Params& p;
  S& s;
  u32 base;
  int rank = static_cast<int>(cluster_rank());

  template <typename Body>
  __device__ __forceinline__ void each_tile(Body body) const {
    const int begin = static_cast<int>(cluster_index()), next = static_cast<int>(cluster_count());
    for (int index = begin; index < p.total; index += next) {
      body(tile_at<kWidth, kPair>(p, index, rank));
    }
  }

  __device__ __forceinline__ void produce() const {
    if (threadIdx.x == 0) {
      tma::prefetch(&p.values);
      tma::prefetch(&p.words);
      tma::prefetch(&p.b);
      if (p.direct == 0) {
        tma::prefetch(&p.c);
      }
      Producer<S::kStages> at;
      Producer<kChunks> chunk;
      each_tile([&](const Tile& t) { fetch<T, kWidth, kRightK, kPair>(p, t, s, base, rank, at, chunk); });
    }
    if (p.split > 1) {  // as the others meet
      cluster_sync();
      cluster_sync();
    }
  }

  __device__ __forceinline__ void consume() const {
    using Sum = accumulator_t<T>;
    const u32 warpgroup = threadIdx.x / 128 - 1, chunks = base + S::kStages * S::kBytes;
    const u32 buffers = chunks + kChunks * kChunkBytes + warpgroup * 2 * kPieceBytes;
    Consumer<S::kStages> at;
    Words<T, kWidth> words(chunks);
    each_tile([&](const Tile& t) {
      Sum d[kWidth / 2];
      clear(d);
      multiply<T, kWidth, kRightK, kPair>(d, p, t, s, base, at, words);
      Place to{t.row + static_cast<int>(warpgroup) * 64, t.col, t.batch, kWidth, buffers, 1 + warpgroup};
      if (p.split > 1) {  // one tile for each cluster
        constexpr int kSlices = slices(kWidth);
        add_parts<kSlices>(d, base, rank, p.split);
        to.columns = rank < kSlices ? kWidth / kSlices : 0;
        to.col += rank * to.columns;
      }
      if (to.columns > 0) {
        store<T>(d, p, to);
      }
    });
    finish_stores();
  }
};

template <typename T, int kWidth, bool kRightK, bool kPair>
__global__ void __launch_bounds__(kThreads, 1) product(const __grid_constant__ Params p) {
  extern __shared__ u8 raw[];
  __shared__ Shape<T, kWidth> s;
  init_barriers([&] {
    s.chunks.make(1, kThreads - 128);
    s.ring.make(1, kPair ? 16 : 8);
  });
  run_warp_specialized(Product<T, kWidth, kRightK, kPair>{p, s, stages_in(raw)});
}

}  // namespace fretwork::two_four::tma_gemm
