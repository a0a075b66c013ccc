// 2:4 products with few columns, at the speed at which memory gives the sparse operand. A lane multiplies the 16 bytes
// of values that it loaded: which k an mma's slots stand for is free as long as values, nibbles and b agree. Of four
// neighbouring runs of k (64 of 16-bit types, 128 of 8-bit ones) lane t of a quad has run t, in four registers. The
// first mma takes registers 0 and 1 of the four lanes, the second 2 and 3. A lane's metadata then gathers what belongs
// to one register of each lane, and its part of b lies in two runs, 4 bytes of every 8: b waits in shared memory in the
// order that lanes want it in.
#pragma once

#include "device/activation.cuh"
#include "device/barrier.cuh"
#include "device/cluster.cuh"
#include "device/copy_async.cuh"
#include "device/load.cuh"
#include "device/mma.cuh"
#include "device/types.cuh"
#include "ops/two_four/params_few.cuh"

namespace fretwork::two_four::few {

inline constexpr int kSteps = kBlockRuns / 4;  ///< of four runs in a block
inline constexpr int kLines = 4;               ///< of the sparse operand that a lane reads: 8 apart
inline constexpr int kTileBytes = 1024;        ///< of b: eight columns of four runs

template <typename T>
inline constexpr bool is_byte = sizeof(T) == 1;
/// Registers of metadata that a lane reads for four runs of a line.
template <typename T>
inline constexpr int kWords = is_byte<T> ? 4 : 2;
/// Those that it gives to the two mma of four runs.
template <typename T>
inline constexpr int kFields = is_byte<T> ? 2 : 1;

template <typename T>
struct sum_of {
  using type = float;
};
template <>
struct sum_of<i8> {
  using type = int;
};
template <typename T>
using sum_t = typename sum_of<T>::type;

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

/// Sixteen bytes that nobody reads again, or anything. Takes no branch, so that loads follow each other closely.
__device__ __forceinline__ void load_values(u32 (&to)[4], const u8* from, bool there) {
  asm volatile(
      "{.reg .pred p;\n"
      "setp.ne.u32 p, %5, 0;\n"
      "@p ld.global.L1::no_allocate.L2::128B.v4.b32 {%0, %1, %2, %3}, [%4];}"
      : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
      : "l"(from), "r"(static_cast<u32>(there)));
}

/// The metadata of four runs of a line, in one access.
__device__ __forceinline__ void load_words(u32 (&to)[2], const u8* from) {
  asm volatile("ld.global.L1::no_allocate.v2.b32 {%0, %1}, [%2];" : "=r"(to[0]), "=r"(to[1]) : "l"(from));
}
__device__ __forceinline__ void load_words(u32 (&to)[4], const u8* from) {
  asm volatile("ld.global.L1::no_allocate.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "l"(from));
}
/// The same where only `there` of the runs exist; a valid nibble stands for what does not.
__device__ __forceinline__ void load_some_words(u32 (&to)[2], const u8* from, int there) {
  u32 word[4];
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    word[e] = e < there ? reinterpret_cast<const u16*>(from)[e] : 0x4444u;
  }
  to[0] = word[0] | word[1] << 16;
  to[1] = word[2] | word[3] << 16;
}
__device__ __forceinline__ void load_some_words(u32 (&to)[4], const u8* from, int there) {
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    to[e] = e < there ? reinterpret_cast<const u32*>(from)[e] : 0x44444444u;
  }
}

/// Lane t of a quad gets in entry s what lane s has in entry t.
__device__ __forceinline__ void transpose_quad(u32 (&x)[4]) {
#pragma unroll
  for (int bit = 1; bit <= 2; bit *= 2) {
    const bool upper = (threadIdx.x & bit) != 0;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if ((e & bit) == 0) {
        const u32 other = __shfl_xor_sync(0xffffffffu, upper ? x[e] : x[e | bit], bit);
        x[e] = upper ? other : x[e];
        x[e | bit] = upper ? x[e | bit] : other;
      }
    }
  }
}

/// Nibbles of four words of 16 bits: nibble 0 of each in the lower half of `even` and nibble 2 in the upper, 1 and 3 in
/// `odd`.
__device__ __forceinline__ void gather_nibbles(const u32 (&words)[2], u32& even, u32& odd) {
  u32 part[2][2];
#pragma unroll
  for (int x = 0; x < 2; ++x) {
#pragma unroll
    for (int o = 0; o < 2; ++o) {  // nibbles o and o + 2 of two words, in bytes 0 and 1
      const u32 nibbles = words[x] >> 4 * o & 0x0f0f0f0fu;
      part[o][x] = nibbles | nibbles >> 12;
    }
  }
  even = __byte_perm(part[0][0], part[0][1], 0x5140);
  odd = __byte_perm(part[1][0], part[1][1], 0x5140);
}

/// Lane s of a quad has the metadata of the s-th four runs of a block, of the rows `first` and `second`; lane t gets
/// what it gives to the mma of every step s: nibble t of the four words, of the first row in the lower half.
__device__ __forceinline__ void regroup(const u32 (&first)[2], const u32 (&second)[2], u32 (&to)[1][kSteps]) {
  u32 even[2], odd[2];
  gather_nibbles(first, even[0], odd[0]);
  gather_nibbles(second, even[1], odd[1]);
  to[0][0] = __byte_perm(even[0], even[1], 0x5410);
  to[0][1] = __byte_perm(odd[0], odd[1], 0x5410);
  to[0][2] = __byte_perm(even[0], even[1], 0x7632);
  to[0][3] = __byte_perm(odd[0], odd[1], 0x7632);
  transpose_quad(to[0]);
}
/// Of 8-bit types: for mma j, byte 2j + t / 2 of the four words, of the row that t % 2 names.
__device__ __forceinline__ void regroup(const u32 (&first)[4], const u32 (&second)[4], u32 (&to)[2][kSteps]) {
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    const u32(&w)[4] = row == 0 ? first : second;
#pragma unroll
    for (int j = 0; j < 2; ++j) {  // bytes 2j and 2j + 1 of all words
      const u32 low = __byte_perm(w[0], w[1], j == 0 ? 0x5140 : 0x7362);
      const u32 high = __byte_perm(w[2], w[3], j == 0 ? 0x5140 : 0x7362);
      to[j][row] = __byte_perm(low, high, 0x5410);
      to[j][row + 2] = __byte_perm(low, high, 0x7632);
    }
  }
  transpose_quad(to[0]);
  transpose_quad(to[1]);
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

  /// Without registers, where b lies along k: a warp copies four runs of a column at once.
  static __device__ __forceinline__ void copy(const Params& p, int first_block, u32 to) {
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
    const int run = lane / 8, word = lane % 8, t = run % 2 * 2 + word % 2;
#pragma unroll 2
    for (int o = warp; o < parts_of(p.log_rows) * kColumns; o += kWarps) {
      const int part = o / kColumns, column = o % kColumns, first = (first_block + part) * kBlockRuns;
      const u8* const from = static_cast<const u8*>(p.b) + static_cast<i64>(first) * kRunBytes + lane * 4 +
                             column_offset(p, column, p.b_col, p.b_batch);
      const u32 at = to + part * kPartBytes + column / 8 * kTileBytes + place(column % 8, t, word / 4) +
                     (word / 2 % 2 * 2 + run / 2) * 4;
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        const bool there = column < p.columns && first + step * 4 + run < p.runs;
        copy_async_4(at + step * kStepBytes, there ? from + step * (4 * kRunBytes) : static_cast<const u8*>(p.b),
                     there ? 4 : 0);
      }
    }
  }

  /// Any other b: a warp reads a word's elements of eight columns and four words of a lane, kAtOnce times before it
  /// joins and writes any, so that it waits seldom.
  static __device__ __forceinline__ void gather(const Params& p, int first_block, u8* to) {
    constexpr u32 kOfWord = 4 / sizeof(T), kAtOnce = 16 / kOfWord;
    const u32 n = threadIdx.x % 8, word = threadIdx.x / 8 % 4, count = parts_of(p.log_rows) * kTiles * kSteps * 8;
#pragma unroll 1
    for (u32 o = threadIdx.x / 32; o < count; o += kAtOnce * kWarps) {
      u32 found[kAtOnce][kOfWord];
#pragma unroll
      for (u32 u = 0; u < kAtOnce; ++u) {
        // From lower to higher bits: the lane of a quad, the mma, the step, the tile, the part.
        const u32 i = o + u * kWarps, t = i % 4, j = i / 4 % 2, step = i / 8 % kSteps;
        const int column = static_cast<int>(i / 8 / kSteps % kTiles * 8 + n);
        const int block = first_block + static_cast<int>(i / 8 / kSteps / kTiles);
        const int run = block * kBlockRuns + static_cast<int>(step * 4 + word % 2 * 2 + t / 2);
        const bool there = i < count && column < p.columns && run < p.runs;
        const i64 k = (static_cast<i64>(run) * 8 + (2 * j + word / 2) * 2 + t % 2) * kOfWord;
        const u8* const from = static_cast<const u8*>(p.b) + column_offset(p, column, p.b_col, p.b_batch) + k * p.b_row;
#pragma unroll
        for (u32 e = 0; e < kOfWord; ++e) {
          found[u][e] = 0;
          if (there) {
            found[u][e] = is_byte<T> ? from[e * p.b_row] : *reinterpret_cast<const u16*>(from + e * p.b_row);
          }
        }
      }
#pragma unroll
      for (u32 u = 0; u < kAtOnce; ++u) {
        const u32 i = o + u * kWarps;
        u32 joined = 0;
#pragma unroll
        for (u32 e = 0; e < kOfWord; ++e) {
          joined |= found[u][e] << 32 / kOfWord * e;
        }
        if (i < count) {
          const u32 at = i / 8 / kSteps / kTiles * kPartBytes + i / 8 % kSteps * kStepBytes +
                         i / 8 / kSteps % kTiles * kTileBytes + place(n, i % 4, i / 4 % 2) + word * 4;
          *reinterpret_cast<u32*>(to + at) = joined;
        }
      }
    }
  }
};

/// The sums of a warp over its blocks.
template <typename T, int kColumns>
struct Sums {
  sum_t<T> at[2][kColumns / 8][4] = {};  ///< [16 rows][8 columns]
};

/// Two mma for each 16 rows and 8 columns: four runs, whose b lies at `low_b` and `high_b`. `there`: all bits, or none
/// where this lane's run is past the end.
template <typename T, int kColumns>
__device__ __forceinline__ void multiply(Sums<T, kColumns>& sums, const u32 (&values)[kLines][4], u32 there,
                                         const u32 (&metadata)[2][kFields<T>][kSteps], int step, const u8* low_b,
                                         const u8* high_b) {
  u32 a[2][2][4];  // [16 rows][mma]
#pragma unroll
  for (int e = 0; e < 16; ++e) {
    a[e / 8][e / 4 % 2][e % 4] = values[e / 8 * 2 + e % 2][e / 2 % 4] & there;
  }
#pragma unroll
  for (int tile = 0; tile < kColumns / 8; ++tile) {
    const word_group<4> low = *reinterpret_cast<const word_group<4>*>(low_b + tile * kTileBytes);
    const word_group<4> high = *reinterpret_cast<const word_group<4>*>(high_b + tile * kTileBytes);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      mma_sparse<T, 0>(sums.at[h][tile], a[h][0], low.words, metadata[h][0][step]);
      mma_sparse<T, is_byte<T> ? 0 : 1>(sums.at[h][tile], a[h][1], high.words, metadata[h][kFields<T> - 1][step]);
    }
  }
}

/// Four words that lie at `address` in CTA `rank` of the cluster.
__device__ __forceinline__ void load_from_rank(u32 (&to)[4], u32 address, u32 rank) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{.reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %4, %5;\n"
      "ld.shared::cluster.v4.b32 {%0, %1, %2, %3}, [remote];}"
      : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
      : "r"(address), "r"(rank)
      : "memory");
#else
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(address)
               : "memory");
#endif
}

/// All CTAs that share the k of these rows; alone, all threads.
__device__ __forceinline__ void meet(const Params& p) {
#if __CUDA_ARCH__ >= 900
  if (p.split > 1) {
    cluster_sync();
    return;
  }
#endif
  __syncthreads();
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

/// Scales, bias and activation of four rows of a column.
template <typename Out, typename Sum>
__device__ __forceinline__ void finish(const Params& p, int row, int column, const Sum (&sums)[4]) {
  float v[4];
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
      v[e] += widen(static_cast<const Out*>(p.bias)[line * p.bias_stride]);
    }
  }
  if constexpr (!is_same<Out, float>) {
    activate(v, p.activation);
  } else if (p.activation != 0) {
#pragma unroll 1
    for (int e = 0; e < 4; ++e) {  // in turn through v[0]: this is much code
      const float first = activate_exactly(v[0], p.activation);
      v[0] = v[1];
      v[1] = v[2];
      v[2] = v[3];
      v[3] = first;
    }
  }
  store_rows<Out>(p, row, column, v);
}
template <typename T, typename Sum>
__device__ __forceinline__ void finish_as(const Params& p, int row, int column, const Sum (&sums)[4]) {
  if (p.out == kOutF32) {
    finish<float>(p, row, column, sums);
  } else if constexpr (!is_byte<T>) {
    finish<T>(p, row, column, sums);
  } else {
    if constexpr (is_same<T, i8>) {
      if (p.out == kOutI32) {
        store_rows<int>(p, row, column, sums);
        return;
      }
    }
    p.out == kOutF16 ? finish<f16>(p, row, column, sums) : finish<bf16>(p, row, column, sums);
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
  meet(p);
  const int log_fours = p.log_rows + 3, count = kColumns << log_fours, parts = parts_of(p.log_rows);
  for (int o = rank * kThreads + thread; o < count; o += p.split * kThreads) {
    const int column = p.c_rows ? o >> log_fours : o % kColumns;
    const int row = 4 * (p.c_rows ? o & ((1 << log_fours) - 1) : o / kColumns);
    if (column < p.columns && row0 + row < p.m) {
      sum_t<T> total[4] = {};
      const u32 from = shared_address(shared + column * pitch + row);
#pragma unroll 4
      for (int q = 0; q < p.split * parts; ++q) {
        u32 more[4];
        load_from_rank(more, from + q % parts * (kColumns * pitch * 4), q / parts);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          total[e] += from_bits<sum_t<T>>(more[e]);
        }
      }
      finish_as<T>(p, row0 + row, column, total);
    }
  }
#if __CUDA_ARCH__ >= 900
  if (p.split > 1) {  // nobody leaves while another may read from here; what was read needs no fence
    asm volatile("barrier.cluster.arrive.relaxed;\nbarrier.cluster.wait;" ::: "memory");
  }
#endif
}

template <typename T, int kColumns>
__global__ void __launch_bounds__(kThreads, 1) product(const __grid_constant__ Params p) {
  extern __shared__ __align__(16) u8 few_shared[];
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32, t = lane % 4;
  const int parts = parts_of(p.log_rows), warp_part = warp >> p.log_rows;
  const int group = static_cast<int>(blockIdx.x) / p.split, rank = static_cast<int>(blockIdx.x) - group * p.split;
  const int row0 = group * (kRows << p.log_rows), stages = (p.runs + parts * kBlockRuns - 1) / (parts * kBlockRuns);
  using B = Stage<T, kColumns>;
  // Rows that are not there are read as the last one and not written.
  const int first_row = row0 + (warp & ((1 << p.log_rows) - 1)) * kRows + lane / 4, row = min(first_row, p.m - 1);
  const u8* const value_line = static_cast<const u8*>(p.values) + row * p.values_line + 16 * t;
  const u8* const word_line = static_cast<const u8*>(p.words) + row * p.words_line + 4 * kWords<T> * t;
  int below[kLines];  // rows from the lane's first to its others
#pragma unroll
  for (int l = 0; l < kLines; ++l) {
    below[l] = min(first_row + 8 * l, p.m - 1) - row;
  }
  u32 values[kSteps][kLines][4], words[kLines][kWords<T>];
  const auto fetch_values = [&](int step, int block) {
    const i64 offset = (static_cast<i64>(block) * kSteps + step) * 64;
#pragma unroll
    for (int l = 0; l < kLines; ++l) {
      load_values(values[step][l], value_line + offset + below[l] * p.values_line,
                  (block * kSteps + step) * 4 + t < p.runs);
    }
  };
  const auto fetch_words = [&](int block) {
    const int there = p.runs - (block * kSteps + t) * 4;
    const i64 offset = static_cast<i64>(block) * (16 * kWords<T>);
    if (p.words_wide && there >= 4) {
#pragma unroll
      for (int l = 0; l < kLines; ++l) {
        load_words(words[l], word_line + offset + below[l] * p.words_line);
      }
    } else {
#pragma unroll
      for (int l = 0; l < kLines; ++l) {
        load_some_words(words[l], word_line + offset + below[l] * p.words_line, there);
      }
    }
  };
#if __CUDA_ARCH__ >= 900
  wait_for_earlier_kernel();
#endif
  Sums<T, kColumns> sums;
  int turn = 1;
#pragma unroll 1
  for (int stage = rank - p.split; stage < stages; stage += p.split) {  // the first only fetches
    const int next = (stage + p.split) * parts;
    u8* const coming = few_shared + (turn ^ 1) * parts * B::kPartBytes;
    if (p.b_wide) {
      B::copy(p, next, shared_address(coming));
    }
    if (stage < 0) {
      fetch_words(next + warp_part);
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        fetch_values(step, next + warp_part);
      }
    } else {
      u32 metadata[2][kFields<T>][kSteps];
      regroup(words[0], words[1], metadata[0]);
      regroup(words[2], words[3], metadata[1]);
      fetch_words(next + warp_part);
      const u8* const here = few_shared + (turn * parts + warp_part) * B::kPartBytes;
      const u8 *const low = here + B::place(lane / 4, t, 0), *const high = here + B::place(lane / 4, t, 1);
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        // Past the end there is nothing, now or later. The branch also keeps each step's loads behind its products.
        const int run = ((stage * parts + warp_part) * kSteps + step) * 4;
        if (run >= p.runs) {
          break;
        }
        multiply<T>(sums, values[step], run + t < p.runs ? ~0u : 0u, metadata, step, low + step * B::kStepBytes,
                    high + step * B::kStepBytes);
        fetch_values(step, next + warp_part);
      }
    }
    if (!p.b_wide) {
      B::gather(p, next, coming);
    }
    turn ^= 1;
    copy_async_commit();
    copy_async_wait<0>();
    __syncthreads();  // the next stage's b is there, and nobody reads this one's
  }
  let_next_kernel_start();
  reduce<T>(p, sums, row0, rank, reinterpret_cast<u32*>(few_shared));
}

}  // namespace fretwork::two_four::few
