// small_n_cp_async: 2:4 products with up to 64 columns, at the rate at which memory delivers the sparse operand.
// Everything comes through a ring of stages in shared memory, several ahead, by cp.async. Which k the slots of an mma
// stand for is free if values, nibbles and b agree, so a lane multiplies 16 bytes of values at once. Of four
// neighbouring runs of k (64 of 16-bit types, 128 of 8-bit ones) lane t of a quad has run t, in four registers. The
// first mma takes registers 0 and 1 of the four lanes, the second 2 and 3. A lane's metadata then gathers what belongs
// to one register of each lane. Its part of b lies in two runs, 4 bytes of every 8, so b is stored in the order in
// which lanes read it.
#pragma once

#include "device/activation.cuh"
#include "device/barrier.cuh"
#include "device/cluster.cuh"
#include "device/copy_async.cuh"
#include "device/load.cuh"
#include "device/mma.cuh"
#include "device/types.cuh"
#include "ops/two_four/cuda/elements.cuh"
#include "ops/two_four/cuda/params.h"

namespace fretwork::two_four::small_n_cp_async {

inline constexpr int kSteps = kBlockRuns / 4;  ///< of four runs in a block
inline constexpr int kLines = 4;               ///< of the sparse operand that a lane multiplies: 8 apart
inline constexpr int kTileBytes = 1024;        ///< of b: eight columns of four runs
inline constexpr int kStepValues = kRows * 64, kStepWords = kRows * 16;  ///< bytes of a warp's rows
static_assert(kSteps == 2 && kSteps * kStepValues == kValueBytes);

template <typename T>
inline constexpr bool is_byte = sizeof(T) == 1;
/// Bytes of metadata of a run.
template <typename T>
inline constexpr int kRunWords = is_byte<T> ? 4 : 2;
/// Registers of metadata that a lane gives to the two mma of four runs.
template <typename T>
inline constexpr int kFields = is_byte<T> ? 2 : 1;

__device__ __forceinline__ u32 bits_of(float x) { return __float_as_uint(x); }
__device__ __forceinline__ u32 bits_of(int x) { return static_cast<u32>(x); }
template <typename Sum>
__device__ __forceinline__ Sum from_bits(u32 x) {
  if constexpr (is_same<Sum, float>) {
    return __uint_as_float(x);
  } else {
    return static_cast<int>(x);
  }
}

/// Blocks of a warp's rows on their way to shared memory: what a lane reads next, and where its share lies. Rows that
/// are not there are read as the last one and not written.
template <typename T>
struct Sparse {
  const u8* values[kRows / 4];  ///< a lane's 16 of 128 bytes of every fourth row
  const u8* words;              ///< of the lane's row
  u32 value_place;

  __device__ __forceinline__ Sparse(const Params& p, int row0, int block, int lane) {
    const int chunk = lane % 8, step = chunk / 4;
    const u8* const first = static_cast<const u8*>(p.values) + static_cast<i64>(block) * (kBlockRuns * 16) + 16 * chunk;
#pragma unroll
    for (int i = 0; i < kRows / 4; ++i) {
      values[i] = first + min(row0 + 4 * i + lane / 8, p.m - 1) * p.values_line;
    }
    words = static_cast<const u8*>(p.words) +
            static_cast<i64>(block) * (kBlockRuns * kRunWords<T>)+min(row0 + lane, p.m - 1) * p.words_line;
    value_place = step * kStepValues + ((lane / 8 ^ step) * 4 + chunk % 4) * 16;
  }
  __device__ __forceinline__ void advance(int blocks) {
#pragma unroll
    for (int i = 0; i < kRows / 4; ++i) {
      values[i] += blocks * (kBlockRuns * 16);
    }
    words += blocks * (kBlockRuns * kRunWords<T>);
  }

  /// Values lie as [step][row][16 bytes of a run]. Rows of the second step are swapped in pairs: a row's 128 bytes, and
  /// what eight lanes read, then lie in different banks.
  __device__ __forceinline__ void copy_values(const Params& p, int block, u32 to, int lane) const {
    const bool there = block * kBlockRuns + lane % 8 < p.runs;
#pragma unroll
    for (int i = 0; i < kRows / 4; ++i) {
      copy_async_16(to + value_place + i * 256, values[i], there);
    }
  }

  /// Metadata lies as [row][16 bytes], of 8-bit types once for each step. A valid nibble stands for what does not
  /// exist.
  __device__ __forceinline__ void copy_words(const Params& p, int block, u8* to, int lane) const {
    constexpr int kBytes = kBlockRuns * kRunWords<T>;
    const int there = p.runs - block * kBlockRuns;
    const auto place = [&](int byte) { return to + byte / 16 * kStepWords + lane * 16 + byte % 16; };
    if (there >= kBlockRuns && p.words_step == 16) {
#pragma unroll
      for (int byte = 0; byte < kBytes; byte += 16) {
        copy_async_16(shared_address(place(byte)), words + byte, true);
      }
    } else if (there >= kBlockRuns && p.words_step == 4) {
#pragma unroll
      for (int byte = 0; byte < kBytes; byte += 4) {
        copy_async_4(shared_address(place(byte)), words + byte, 4);
      }
    } else {
#pragma unroll
      for (int run = 0; run < kBlockRuns; ++run) {
        if constexpr (is_byte<T>) {
          *reinterpret_cast<u32*>(place(4 * run)) =
              run < there ? reinterpret_cast<const u32*>(words)[run] : 0x44444444u;
        } else {
          *reinterpret_cast<u16*>(place(2 * run)) =
              run < there ? reinterpret_cast<const u16*>(words)[run] : static_cast<u16>(0x4444u);
        }
      }
    }
  }
};

/// What a lane gives to the mma of every step: of 16-bit types what mma_metadata says, of 8-bit types, for mma j, byte
/// 2j + t / 2 of four runs' words of the row that t % 2 names.
template <typename T>
__device__ __forceinline__ void read_words(const u8* from, int lane, u32 (&to)[kSteps][2][kFields<T>]) {
  const int t = lane % 4;
  const auto group = [&](int step, int row) {
    return *reinterpret_cast<const word_group<4>*>(from + step * kStepWords + row * 16);
  };
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = 16 * h + lane / 4;
    if constexpr (is_byte<T>) {
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        const word_group<4> w = group(step, row + t % 2 * 8);
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const u32 byte = 2 * j + t / 2, two = byte | (byte + 4) << 4;
          to[step][h][j] =
              __byte_perm(__byte_perm(w.words[0], w.words[1], two), __byte_perm(w.words[2], w.words[3], two), 0x5410);
        }
      }
    } else {
      const word_group<4> first = group(0, row), second = group(0, row + 8);
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        to[step][h][0] = mma_metadata(first.words + 2 * step, second.words + 2 * step, t);
      }
    }
  }
}

/// Where a column begins in b or c.
__device__ __forceinline__ i64 column_offset(const Params& p, int column, i64 col, i64 batch) {
  const int z = p.columns == p.n ? 0 : column / p.n;
  return z * batch + (column - z * p.n) * col;
}

/// b of a stage in shared memory: [part][step][tile][mma][lane] of 16 bytes, what a lane gives an mma. Of every 8 bytes
/// of a run the even lane has the first 4; its words 0 and 2 come from one run, 1 and 3 from the second after it.
template <typename T, int kColumns>
struct Stage {
  static constexpr int kTiles = kColumns / 8, kStepBytes = kTiles * kTileBytes, kPartBytes = kSteps * kStepBytes;

  /// Where lane `t` of column `n` (of eight) has its 16 bytes for mma `j`. Places are swapped so that neighbouring
  /// words of a column, the same words of eight columns, and what eight lanes read lie in different banks.
  static __device__ __forceinline__ int place(int n, int t, int j) {
    return j * (kTileBytes / 2) + ((n ^ j) * 4 + (t ^ n >> 1)) * 16;
  }

  /// Without registers, where b lies along k: a warp copies four runs of a column at once, of every eight columns the
  /// one that is its turn. Columns beyond the last stay as they are: their sums are not stored.
  static __device__ __forceinline__ void copy(const Params& p, int first_block, u32 to) {
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
    const int run = lane / 8, word = lane % 8, t = run % 2 * 2 + word % 2;
#pragma unroll 1
    for (int part = 0; part < parts_of(p.log_rows); ++part) {
      const int n = (warp + part) % 8, first = (first_block + part) * kBlockRuns + run;
      const int low = first < p.runs ? 4 : 0, high = first + 4 < p.runs ? 4 : 0;
      const u8* from =
          static_cast<const u8*>(p.b) + n * p.b_wide + word * 4 + static_cast<i64>(low == 0 ? 0 : first) * kRunBytes;
      const int step = high == 0 ? 0 : 4 * kRunBytes;  // nothing is read where nothing is
      const u32 at = to + part * kPartBytes + place(n, t, word / 4) + (word / 2 % 2 * 2 + run / 2) * 4;
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        if (tile * 8 + n < p.columns) {
          copy_async_4(at + tile * kTileBytes, from, low);
          copy_async_4(at + tile * kTileBytes + kStepBytes, from + step, high);
        }
        from += 8 * p.b_wide;
      }
    }
  }

  /// Any other b goes through registers: a warp reads a word's elements of eight columns and four words of a lane,
  /// kAtOnce times before it joins and writes any. From lower to higher bits of the number of such a reading: the lane
  /// of a quad, the mma, the step, the tile, the part.
  static constexpr u32 kOfWord = 4 / sizeof(T), kAtOnce = 16 / kOfWord;
  struct Found {
    u32 elements[kAtOnce][kOfWord];
  };
  static __device__ __forceinline__ u32 readings(const Params& p) { return parts_of(p.log_rows) * kTiles * kSteps * 8; }

  static __device__ __forceinline__ void read(const Params& p, int first_block, u32 o, Found& found) {
    const u32 n = threadIdx.x % 8, word = threadIdx.x / 8 % 4;
#pragma unroll
    for (u32 u = 0; u < kAtOnce; ++u) {
      const u32 i = o + u * kWarps, t = i % 4, j = i / 4 % 2, step = i / 8 % kSteps;
      const int column = static_cast<int>(i / 8 / kSteps % kTiles * 8 + n);
      const int block = first_block + static_cast<int>(i / 8 / kSteps / kTiles);
      const int run = block * kBlockRuns + static_cast<int>(step * 4 + word % 2 * 2 + t / 2);
      const bool there = i < readings(p) && column < p.columns && run < p.runs;
      const i64 k = (static_cast<i64>(run) * 8 + (2 * j + word / 2) * 2 + t % 2) * kOfWord;
      const u8* const from = static_cast<const u8*>(p.b) + column_offset(p, column, p.b_col, p.b_batch) + k * p.b_row;
#pragma unroll
      for (u32 e = 0; e < kOfWord; ++e) {
        found.elements[u][e] = 0;
        if (there) {
          found.elements[u][e] = is_byte<T> ? from[e * p.b_row] : *reinterpret_cast<const u16*>(from + e * p.b_row);
        }
      }
    }
  }
  static __device__ __forceinline__ void write(const Params& p, u32 o, const Found& found, u8* to) {
    const u32 n = threadIdx.x % 8, word = threadIdx.x / 8 % 4;
#pragma unroll
    for (u32 u = 0; u < kAtOnce; ++u) {
      const u32 i = o + u * kWarps;
      u32 joined = 0;
#pragma unroll
      for (u32 e = 0; e < kOfWord; ++e) {
        joined |= found.elements[u][e] << 32 / kOfWord * e;
      }
      if (i < readings(p)) {
        const u32 at = i / 8 / kSteps / kTiles * kPartBytes + i / 8 % kSteps * kStepBytes +
                       i / 8 / kSteps % kTiles * kTileBytes + place(n, i % 4, i / 4 % 2) + word * 4;
        *reinterpret_cast<u32*>(to + at) = joined;
      }
    }
  }
  /// The rest of a stage, of which the first readings are `found`.
  static __device__ __forceinline__ void write_all(const Params& p, int first_block, Found& found, u8* to) {
    u32 o = threadIdx.x / 32;
    write(p, o, found, to);
#pragma unroll 1
    for (o += kAtOnce * kWarps; o < readings(p); o += kAtOnce * kWarps) {
      read(p, first_block, o, found);
      write(p, o, found, to);
    }
  }
};

/// The sums of a warp over its blocks.
template <typename T, int kColumns>
struct Sums {
  accumulator_t<T> at[2][kColumns / 8][4] = {};  ///< [16 rows][8 columns]
};

/// Two mma for each 16 rows and 8 columns: four runs, whose values and b begin for this lane at `values`, `low_b` and
/// `high_b`. A sum's two mma are kept apart: each waits for the one before. `all`: ones that the compiler does not
/// know, lest it joins lines to fragments anew for every mma.
template <typename T, int kColumns>
__device__ __forceinline__ void multiply(Sums<T, kColumns>& sums, const u8* values,
                                         const u32 (&metadata)[2][kFields<T>], u32 all, const u8* low_b,
                                         const u8* high_b) {
  u32 a[2][2][4];  // [16 rows][mma]
#pragma unroll
  for (int l = 0; l < kLines; ++l) {
    const word_group<4> line = *reinterpret_cast<const word_group<4>*>(values + l * (8 * 64));
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      a[l / 2][e / 2][e % 2 * 2 + l % 2] = line.words[e] & all;
    }
  }
  constexpr int kTiles = kColumns / 8, kPair = kTiles < 2 ? kTiles : 2;
#pragma unroll
  for (int tile = 0; tile < kTiles; tile += kPair) {
    word_group<4> b[2][kPair];
#pragma unroll
    for (int i = 0; i < kPair; ++i) {
      b[0][i] = *reinterpret_cast<const word_group<4>*>(low_b + (tile + i) * kTileBytes);
      b[1][i] = *reinterpret_cast<const word_group<4>*>(high_b + (tile + i) * kTileBytes);
    }
#pragma unroll
    for (int o = 0; o < 2 * kPair; ++o) {
      mma_sparse<T, 0>(sums.at[o % 2][tile + o / 2], a[o % 2][0], b[0][o / 2].words, metadata[o % 2][0]);
    }
#pragma unroll
    for (int o = 0; o < 2 * kPair; ++o) {
      mma_sparse<T, is_byte<T> ? 0 : 1>(sums.at[o % 2][tile + o / 2], a[o % 2][1], b[1][o / 2].words,
                                        metadata[o % 2][kFields<T> - 1]);
    }
  }
}

/// All copies of this thread but those of its newest `left` stages are there.
__device__ __forceinline__ void wait_for_copies(int left) {
  switch (left) {
    case 0:
      return copy_async_wait<0>();
    case 1:
      return copy_async_wait<1>();
    case 2:
      return copy_async_wait<2>();
    default:
      static_assert(kMostStages == 5);
      return copy_async_wait<3>();
  }
}

/// Four rows of a column on their way to c.
template <typename Out, typename Sum>
__device__ __forceinline__ void store_rows(const Params& p, int row, int column, const Sum (&v)[4]) {
  Out* const to = static_cast<Out*>(p.c) + column_offset(p, column, p.c_col, p.c_batch) + row * p.c_row;
  if constexpr (!is_same<Out, int>) {
    if (p.c_wide && row + 4 <= p.m) {
      store_run<Out, 4>(to, v);
      return;
    }
  }
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    if (row + e < p.m) {
      to[e * p.c_row] = narrow<Out>(v[e]);
    }
  }
}

/// Sums of four rows of a column with their scales and a bias of type `bias`.
template <typename Sum>
__device__ __forceinline__ void scale_rows(const Params& p, int row, int column, OutType bias, const Sum (&sums)[4],
                                           float (&v)[4]) {
  const int j = column % p.n;
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    const int line = min(row + e, p.m - 1);
    v[e] = static_cast<float>(sums[e]);
    if (p.scale_s != nullptr) {
      v[e] *= p.scale_s[line * p.scale_s_stride];
    }
    if (p.scale_b != nullptr) {
      v[e] *= p.scale_b[j * p.scale_b_stride];
    }
    if (p.bias != nullptr) {
      v[e] += as_number(p.bias, line * p.bias_stride, bias);
    }
  }
}

template <typename Sum>
__device__ __forceinline__ void finish_f32(const Params& p, int row, int column, const Sum (&sums)[4]) {
  float v[4];
  scale_rows(p, row, column, OutType::f32, sums, v);
  if (p.activation != 0) {
#pragma unroll 1
    for (int e = 0; e < 4; ++e) {  // in turn through v[0]: this is much code
      const float first = activate_exactly(v[0], p.activation);
      v[0] = v[1];
      v[1] = v[2];
      v[2] = v[3];
      v[3] = first;
    }
  }
  store_rows<float>(p, row, column, v);
}

/// A result of 16 bits, like the operands.
template <typename Out, typename Sum>
__device__ __forceinline__ void finish_16(const Params& p, int row, int column, const Sum (&sums)[4]) {
  float v[4];
  scale_rows(p, row, column, is_same<Out, f16> ? OutType::f16 : OutType::bf16, sums, v);
  activate(v, p.activation);
  store_rows<Out>(p, row, column, v);
}

/// Of 8-bit operands any result of 16 or 8 bits.
template <typename Sum>
__device__ __forceinline__ void finish_narrow(const Params& p, int row, int column, const Sum (&sums)[4]) {
  float v[4];
  scale_rows(p, row, column, p.bias_type, sums, v);
  activate(v, p.activation);
  if (p.scale_out != nullptr) {
    const float scale = *p.scale_out;
#pragma unroll
    for (float& x : v) {
      x *= scale;
    }
  }
  store_four(p.c, column_offset(p, column, p.c_col, p.c_batch) + row * p.c_row, p.c_row, v, p.m - row, p.out, p.c_wide);
}

template <typename T, typename Sum>
__device__ __forceinline__ void finish(const Params& p, int row, int column, const Sum (&sums)[4]) {
  if (p.out == OutType::f32) {
    finish_f32(p, row, column, sums);
  } else if constexpr (!is_byte<T>) {
    finish_16<T>(p, row, column, sums);
  } else if (p.out == OutType::i32) {
    store_rows<int>(p, row, column, sums);
  } else {
    finish_narrow(p, row, column, sums);
  }
}

/// Adds up what the warps and CTAs that share these rows have, in a fixed order, each CTA its part of the results.
template <typename T, int kColumns>
__device__ __forceinline__ void reduce(const Params& p, const Sums<T, kColumns>& sums, int row0, int rank,
                                       u32* shared) {
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  const int warp_row = warp & ((1 << p.log_rows) - 1), warp_part = warp >> p.log_rows, pitch = pitch_of(p.log_rows);
  u32* const mine = shared + (warp_part * kColumns + 2 * (lane % 4)) * pitch + warp_row * kRows + lane / 4;
#pragma unroll
  for (int tile = 0; tile < kColumns / 8; ++tile) {
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      mine[(8 * tile + e % 2) * pitch + e / 2 * 8] = bits_of(sums.at[e / 4][tile][e % 4]);
    }
  }
  meet(p.split);
  const int log_fours = p.log_rows + 3, count = kColumns << log_fours;
  const int log_parts = kLogWarps - p.log_rows, parts = 1 << log_parts;
  for (int o = rank * kThreads + thread; o < count; o += p.split * kThreads) {
    const int column = p.c_rows ? o >> log_fours : o % kColumns;
    const int row = 4 * (p.c_rows ? o & ((1 << log_fours) - 1) : o / kColumns);
    if (column < p.columns && row0 + row < p.m) {
      accumulator_t<T> total[4] = {};
      const u32 from = shared_address(shared + column * pitch + row);
#pragma unroll 4
      for (int q = 0; q < p.split * parts; ++q) {
        u32 more[4];
        load_from_rank(more, from + (q & (parts - 1)) * (kColumns * pitch * 4), q >> log_parts);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          total[e] += from_bits<accumulator_t<T>>(more[e]);
        }
      }
      finish<T>(p, row0 + row, column, total);
    }
  }
#if __CUDA_ARCH__ >= 900
  if (p.split > 1) {  // no CTA exits while another may read its shared memory; reads need no fence
    asm volatile("barrier.cluster.arrive.relaxed;\nbarrier.cluster.wait;" ::: "memory");
  }
#endif
}

template <typename T, int kColumns>
__global__ void __launch_bounds__(kThreads, 1) product(const __grid_constant__ Params p) {
  extern __shared__ __align__(16) u8 stage_memory[];
  using B = Stage<T, kColumns>;
  constexpr int kWordBytes = kBlockRuns * kRunWords<T> * kRows;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32, t = lane % 4;
  const int parts = parts_of(p.log_rows), warp_part = warp >> p.log_rows;
  const int group = static_cast<int>(blockIdx.x) / p.split, rank = static_cast<int>(blockIdx.x) - group * p.split;
  const int row0 = group * (kRows << p.log_rows), blocks = (p.runs + kBlockRuns - 1) / kBlockRuns;
  const u32 all = p.runs > 0 ? ~0u : 0u;
  const int late = warp / 4;  // of two warps that share a scheduler one multiplies while the other fetches
  // A stage: the values of all warps, their metadata, b.
  const int b_place = kWarps * (kValueBytes + kWordBytes), stage_bytes = b_place + parts * B::kPartBytes;
  const int end = p.stages * stage_bytes;
  const int stride = p.split * parts;  // blocks from one stage to the next
  int next = rank * parts;             // of the stage that is fetched next
  Sparse<T> sparse(p, row0 + (warp & ((1 << p.log_rows) - 1)) * kRows, next + warp_part, lane);
  typename B::Found found;
  const auto fetch = [&](u8* to) {
    if (next < blocks) {
      sparse.copy_values(p, next + warp_part, shared_address(to + warp * kValueBytes), lane);
      sparse.copy_words(p, next + warp_part, to + kWarps * kValueBytes + warp * kWordBytes, lane);
      if (p.b_wide != 0) {
        B::copy(p, next, shared_address(to + b_place));
      } else {
        B::read(p, next, warp, found);  // and written when a stage was multiplied meanwhile
      }
    }
    copy_async_commit();  // even nothing, so that groups count stages
  };
  const auto advance = [&](u8* to) {
    if (p.b_wide == 0 && next < blocks) {
      B::write_all(p, next, found, to + b_place);
    }
    next += stride;
    sparse.advance(stride);
  };
#if __CUDA_ARCH__ >= 900
  wait_for_earlier_kernel();
#endif
  for (int s = 0; s < p.stages - 1; ++s) {
    fetch(stage_memory + s * stage_bytes);
    advance(stage_memory + s * stage_bytes);
  }
  Sums<T, kColumns> sums;
  int here = 0, free = end - stage_bytes;
#pragma unroll 1
  for (int first = rank * parts; first < blocks; first += stride) {
    wait_for_copies(p.stages - 2);
    __syncthreads();  // this stage has arrived, and the one before, which is filled next, is no longer read
    const u8* const stage = stage_memory + here;
#pragma unroll 1
    for (int turn = 0; turn < 2; ++turn) {
      if (turn == late) {
        fetch(stage_memory + free);
      } else if (first + warp_part < blocks) {
        u32 metadata[kSteps][2][kFields<T>];
        read_words<T>(stage + kWarps * kValueBytes + warp * kWordBytes, lane, metadata);
        const u8* const b = stage + b_place + warp_part * B::kPartBytes;
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
          multiply<T>(sums, stage + warp * kValueBytes + step * kStepValues + (lane ^ 4 * step) * 16, metadata[step],
                      all, b + step * B::kStepBytes + B::place(lane / 4, t, 0),
                      b + step * B::kStepBytes + B::place(lane / 4, t, 1));
        }
      }
    }
    advance(stage_memory + free);
    free = here;
    here = here + stage_bytes == end ? 0 : here + stage_bytes;
  }
  let_next_kernel_start();
  copy_async_wait<0>();
  __syncthreads();  // the sums overwrite the stages
  reduce<T>(p, sums, row0, rank, reinterpret_cast<u32*>(stage_memory));
}

}  // namespace fretwork::two_four::small_n_cp_async
