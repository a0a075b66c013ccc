// 2:4 products with few columns, at the speed at which memory gives the sparse operand. A lane multiplies the 16 bytes
// of values that it loaded: which k an mma's slots stand for is free as long as values, nibbles and b agree. Of 64
// neighbouring k lane t of a quad has 16t … 16t + 15: four groups, a register each. The first mma takes groups 0 and 1
// of the four lanes, the second groups 2 and 3. A lane's word of metadata then holds one nibble of each of four words,
// and a lane's part of b lies in two runs of 16 k, which waits in shared memory in the order that lanes want it in.
#pragma once

#include "device/activation.cuh"
#include "device/barrier.cuh"
#include "device/cluster.cuh"
#include "device/load.cuh"
#include "device/types.cuh"
#include "ops/two_four/params_few.cuh"

namespace fretwork::two_four::few {

inline constexpr int kSteps = 4;  ///< of 64 k in a block
inline constexpr int kLines = 4;  ///< of the sparse operand that a lane reads: 8 apart
inline constexpr int kMostPairs = kMostColumns * kBlock / 32 / kThreads;  ///< of runs of b that a thread brings

/// d += a·b: 16 × 8 with 32 k, of which a holds the kept half. Lanes 2·kSelector and 2·kSelector + 1 of each quad give
/// the metadata: of the first and second 16 k, row lane / 4 in the lower half and the eighth after it in the upper.
template <typename T, int kSelector>
__device__ __forceinline__ void mma_sparse(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, const u32 (&b)[4],
                                           u32 metadata) {
  if constexpr (is_same<T, f16>) {
    asm("mma.sp::ordered_metadata.sync.aligned.m16n8k32.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9,%10,%11}, {%0,%1,%2,%3}, %12, %13;"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b[0]), "r"(b[1]), "r"(b[2]), "r"(b[3]), "r"(metadata),
          "n"(kSelector));
  } else {
    static_assert(is_same<T, bf16>);
    asm("mma.sp::ordered_metadata.sync.aligned.m16n8k32.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9,%10,%11}, {%0,%1,%2,%3}, %12, %13;"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b[0]), "r"(b[1]), "r"(b[2]), "r"(b[3]), "r"(metadata),
          "n"(kSelector));
  }
}

/// Sixteen bytes that nobody reads again, or zeros. Takes no branch, so that loads follow each other closely.
__device__ __forceinline__ void load_values(u32 (&to)[4], const u8* from, bool there) {
  asm volatile(
      "{.reg .pred p;\n"
      "setp.ne.u32 p, %5, 0;\n"
      "mov.b32 %0, 0;\nmov.b32 %1, 0;\nmov.b32 %2, 0;\nmov.b32 %3, 0;\n"
      "@p ld.global.nc.L1::no_allocate.L2::128B.v4.b32 {%0, %1, %2, %3}, [%4];}"
      : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
      : "l"(from), "r"(static_cast<u32>(there)));
}

/// Four words of metadata, of which `there` exist; a valid nibble stands for what does not.
__device__ __forceinline__ void load_some_words(u32 (&to)[2], const u8* from, int there) {
  u32 word[4];
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    word[e] = e < there ? reinterpret_cast<const u16*>(from)[e] : 0x4444u;
  }
  to[0] = word[0] | word[1] << 16;
  to[1] = word[2] | word[3] << 16;
}
__device__ __forceinline__ void load_words(u32 (&to)[2], const u8* from) {
  asm volatile("ld.global.nc.L1::no_allocate.v2.b32 {%0, %1}, [%2];" : "=r"(to[0]), "=r"(to[1]) : "l"(from));
}

/// Lane s of a quad has the words of 64 k for two rows (the s-th 64 of a block); lane t gets, for every s, nibble t of
/// each of the four words: of the first row in the lower half.
__device__ __forceinline__ void regroup(const u32 (&first)[2], const u32 (&second)[2], u32 (&to)[kSteps]) {
  const auto halves = [](const u32(&words)[2], u32& even, u32& odd) {
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
  };
  u32 even[2], odd[2];
  halves(first, even[0], odd[0]);
  halves(second, even[1], odd[1]);
  to[0] = __byte_perm(even[0], even[1], 0x5410);
  to[1] = __byte_perm(odd[0], odd[1], 0x5410);
  to[2] = __byte_perm(even[0], even[1], 0x7632);
  to[3] = __byte_perm(odd[0], odd[1], 0x7632);
  // A 4 × 4 transpose over the lanes of the quad.
#pragma unroll
  for (int bit = 1; bit <= 2; bit *= 2) {
    const bool upper = (threadIdx.x & bit) != 0;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if ((e & bit) == 0) {
        const u32 other = __shfl_xor_sync(0xffffffffu, upper ? to[e] : to[e | bit], bit);
        to[e] = upper ? other : to[e];
        to[e | bit] = upper ? to[e | bit] : other;
      }
    }
  }
}

/// Where a column begins in b or c.
__device__ __forceinline__ i64 column_offset(const Params& p, int column, i64 col, i64 batch) {
  const int z = p.columns == p.n ? 0 : column / p.n;
  return z * batch + (column - z * p.n) * col;
}

/// What a thread brings of b for a stage, in registers on the way: pairs of runs of 16 k of a column, 32 k apart, as a
/// lane's fragments come from both.
template <int kColumns>
struct Pairs {
  static constexpr int kTiles = kColumns / 8;
  u32 word[kMostPairs][2][8];  ///< of a run the elements 2w and 2w + 1

  /// Number u of this thread, from lower to higher bits: the run, the column mod 8, the 64 k, the tile, the part.
  static __device__ __forceinline__ int index(int u) { return static_cast<int>(threadIdx.x) + u * kThreads; }
  static __device__ __forceinline__ int step_of(int i) { return i >> 4 & 3; }
  static __device__ __forceinline__ int tile_of(int i) { return (i >> 6) % kTiles; }
  static __device__ __forceinline__ int part_of(int i) { return (i >> 6) / kTiles; }

  static __device__ __forceinline__ void fetch_run(u32 (&to)[8], const Params& p, const u16* column, int run) {
    if (p.b_wide) {
      const auto* const from = reinterpret_cast<const word_group<4>*>(column + run * 16);
      const word_group<4> low = from[0], high = from[1];
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        to[w] = low.words[w];
        to[w + 4] = high.words[w];
      }
    } else {
#pragma unroll
      for (int w = 0; w < 8; ++w) {
        const u16* const from = column + (run * 16 + 2 * w) * p.b_row;
        to[w] = from[0] | static_cast<u32>(from[p.b_row]) << 16;
      }
    }
  }

  __device__ __forceinline__ void fetch(const Params& p, int first_block) {
#pragma unroll
    for (int u = 0; u < kMostPairs; ++u) {
      const int i = index(u), column = tile_of(i) * 8 + (i >> 1 & 7), part = part_of(i);
      const bool there = part < parts_of(p.log_rows) && column < p.columns;
      const u16* const from = static_cast<const u16*>(p.b) + column_offset(p, column, p.b_col, p.b_batch);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int run = (first_block + part) * (kBlock / 16) + step_of(i) * 4 + 2 * r + (i & 1);
#pragma unroll
        for (int w = 0; w < 8; ++w) {
          word[u][r][w] = 0;
        }
        if (there && run * 16 < p.k) {
          fetch_run(word[u][r], p, from, run);
        }
      }
    }
  }

  /// As [part][64 k][tile][mma][lane], each what a lane gives an mma. Of a group the even lane has the first two k.
  __device__ __forceinline__ void store(const Params& p, u8* to) const {
#pragma unroll
    for (int u = 0; u < kMostPairs; ++u) {
      const int i = index(u);
      if (part_of(i) < parts_of(p.log_rows)) {
        u8* const at = to + ((part_of(i) * kSteps + step_of(i)) * kTiles + tile_of(i)) * 1024 + (i & 15) * 32;
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int w = e / 2 * 4 + e % 2;
          *reinterpret_cast<word_group<4>*>(at + e / 2 * 512 + e % 2 * 16) = {word[u][0][w], word[u][1][w],
                                                                              word[u][0][w + 2], word[u][1][w + 2]};
        }
      }
    }
  }
};

/// The sums of a warp over its blocks.
template <int kColumns>
struct Sums {
  float at[2][kColumns / 8][4] = {};  ///< [16 rows][8 columns]
};

/// Two mma for each 16 rows and 8 columns: 64 k, whose b lies at `b`.
template <typename T, int kColumns>
__device__ __forceinline__ void multiply(Sums<kColumns>& sums, const u32 (&values)[kLines][4], const u32 (&metadata)[2],
                                         const u8* b) {
#pragma unroll
  for (int tile = 0; tile < kColumns / 8; ++tile) {
    const word_group<4> low = *reinterpret_cast<const word_group<4>*>(b + tile * 1024);
    const word_group<4> high = *reinterpret_cast<const word_group<4>*>(b + tile * 1024 + 512);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const u32(&one)[4] = values[2 * h], (&two)[4] = values[2 * h + 1];
      mma_sparse<T, 0>(sums.at[h][tile], one[0], two[0], one[1], two[1], low.words, metadata[h]);
      mma_sparse<T, 1>(sums.at[h][tile], one[2], two[2], one[3], two[3], high.words, metadata[h]);
    }
  }
}

/// Four floats that lie at `address` in CTA `rank` of the cluster.
__device__ __forceinline__ void load_from_rank(float (&to)[4], u32 address, u32 rank) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{.reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %4, %5;\n"
      "ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [remote];}"
      : "=f"(to[0]), "=f"(to[1]), "=f"(to[2]), "=f"(to[3])
      : "r"(address), "r"(rank)
      : "memory");
#else
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(to[0]), "=f"(to[1]), "=f"(to[2]), "=f"(to[3])
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

/// Scales, bias and activation of four rows of a column, and their way to c.
template <typename Out>
__device__ __forceinline__ void finish(const Params& p, int row, int column, float (&v)[4]) {
  const int j = column % p.n, rows = min(4, p.m - row);
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    const int line = row + min(e, rows - 1);
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
  Out* const to = static_cast<Out*>(p.c) + column_offset(p, column, p.c_col, p.c_batch) + row * p.c_row;
  if (p.c_wide && rows == 4) {
    store_run<Out, 4>(to, v);
    return;
  }
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    if (e < rows) {
      to[e * p.c_row] = narrow<Out>(v[e]);
    }
  }
}

/// Adds up what the warps and CTAs that share these rows have, in a fixed order, each CTA its part of the results.
template <typename T, int kColumns>
__device__ __forceinline__ void reduce(const Params& p, const Sums<kColumns>& sums, int row0, int rank, float* shared) {
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  const int warp_row = warp & ((1 << p.log_rows) - 1), warp_part = warp >> p.log_rows, pitch = pitch_of(p.log_rows);
  float* const mine = shared + (warp_part * kColumns + 2 * (lane % 4)) * pitch + warp_row * kRows + lane / 4;
#pragma unroll
  for (int tile = 0; tile < kColumns / 8; ++tile) {
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      mine[(8 * tile + e % 2) * pitch + e / 2 * 8] = sums.at[e / 4][tile][e % 4];
    }
  }
  meet(p);
  const int log_fours = p.log_rows + 3, count = kColumns << log_fours, parts = parts_of(p.log_rows);
  for (int o = rank * kThreads + thread; o < count; o += p.split * kThreads) {
    const int column = p.c_rows ? o >> log_fours : o % kColumns;
    const int row = 4 * (p.c_rows ? o & ((1 << log_fours) - 1) : o / kColumns);
    if (column < p.columns && row0 + row < p.m) {
      float total[4] = {};
      const u32 from = shared_address(shared + column * pitch + row);
#pragma unroll 4
      for (int q = 0; q < p.split * parts; ++q) {
        float more[4];
        load_from_rank(more, from + q % parts * (kColumns * pitch * 4), q / parts);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          total[e] += more[e];
        }
      }
      p.out_wide ? finish<float>(p, row0 + row, column, total) : finish<T>(p, row0 + row, column, total);
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
  const int row0 = group * (kRows << p.log_rows), runs = p.k / 16;
  const int stages = (p.k + parts * kBlock - 1) / (parts * kBlock), stage_bytes = parts * kBlock * kColumns * 2;
  // Rows that are not there are read as the last one and not written.
  const int first_row = row0 + (warp & ((1 << p.log_rows) - 1)) * kRows + lane / 4, row = min(first_row, p.m - 1);
  const u8* const value_line = static_cast<const u8*>(p.values) + row * p.values_line + 16 * t;
  const u8* const word_line = static_cast<const u8*>(p.words) + row * p.words_line + 8 * t;
  int below[kLines];  // rows from the lane's first to its others
#pragma unroll
  for (int l = 0; l < kLines; ++l) {
    below[l] = min(first_row + 8 * l, p.m - 1) - row;
  }
  u32 values[kSteps][kLines][4], words[kLines][2];
  const auto fetch_values = [&](int step, int block) {
#pragma unroll
    for (int l = 0; l < kLines; ++l) {
      load_values(values[step][l],
                  value_line + (static_cast<i64>(block) * kSteps + step) * 64 + below[l] * p.values_line,
                  (block * kSteps + step) * 4 + t < runs);
    }
  };
  const auto fetch_words = [&](int block) {
    const int there = runs - (block * kSteps + t) * 4;
    const i64 offset = static_cast<i64>(block) * (kBlock / 8);
    if (p.words_wide && there >= 4) {
#pragma unroll
      for (int l = 0; l < kLines; ++l) {
        load_words(words[l], word_line + below[l] * p.words_line + offset);
      }
    } else {
#pragma unroll
      for (int l = 0; l < kLines; ++l) {
        load_some_words(words[l], word_line + below[l] * p.words_line + offset, there);
      }
    }
  };
#if __CUDA_ARCH__ >= 900
  wait_for_earlier_kernel();
#endif
  Pairs<kColumns> b;
  Sums<kColumns> sums;
  int turn = 1;
#pragma unroll 1
  for (int stage = rank - p.split; stage < stages; stage += p.split) {  // the first only fetches
    const int next = (stage + p.split) * parts;
    b.fetch(p, next);
    if (stage < 0) {
      fetch_words(next + warp_part);
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        fetch_values(step, next + warp_part);
      }
    } else {
      u32 metadata[2][kSteps];
      regroup(words[0], words[1], metadata[0]);
      regroup(words[2], words[3], metadata[1]);
      fetch_words(next + warp_part);
      const u8* const here = few_shared + turn * stage_bytes + warp_part * (kBlock * kColumns * 2) + lane * 16;
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        // Past the end there is nothing, now or later. The branch also keeps each step's loads behind its products.
        if (((stage * parts + warp_part) * kSteps + step) * 4 >= runs) {
          break;
        }
        multiply<T>(sums, values[step], {metadata[0][step], metadata[1][step]}, here + step * (kColumns * 128));
        fetch_values(step, next + warp_part);
      }
    }
    turn ^= 1;
    b.store(p, few_shared + turn * stage_bytes);
    __syncthreads();  // the next stage's b is there, and nobody reads this one's
  }
  let_next_kernel_start();
  reduce<T>(p, sums, row0, rank, reinterpret_cast<float*>(few_shared));
}

}  // namespace fretwork::two_four::few
