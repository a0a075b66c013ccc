// Kernels that copy weights, and rows of x and y, into the orders that other kernels read, and back.
#pragma once

#include "device/barrier.cuh"
#include "device/load.cuh"
#include "device/mma.cuh"
#include "device/tile.cuh"
#include "device/types.cuh"
#include "ops/kronecker/cuda/params.h"

// ----------------------------------------------------------------------------------------------------
// Weights (a,b,c,d) to a·d matrices and back. Memory is contiguous along l, a matrix along its own lines, so a CTA
// transposes a piece in shared memory.

namespace fretwork::kronecker::hopper {

/// A CTA's piece: elements from `at` of the matrices' p·q, matrices from l of block i.
struct Piece {
  int at, l, i;
};

__device__ __forceinline__ Piece piece_of(int wide, int deep, int wide_tiles, int deep_tiles) {
  const int tile = static_cast<int>(blockIdx.x) % wide_tiles, rest = static_cast<int>(blockIdx.x) / wide_tiles;
  return {tile * wide, rest % deep_tiles * deep, rest / deep_tiles};
}

/// fp32 weights are multiplied in tf32.
template <typename Bits>
__device__ __forceinline__ Bits rounded(Bits x) {
  if constexpr (is_same<Bits, float>) {
    return __uint_as_float(to_tf32(__float_as_uint(x)));
  } else {
    return x;
  }
}

template <typename Bits>
__global__ void __launch_bounds__(kPackThreads) pack(const __grid_constant__ PackParams p) {
  constexpr int kPad = 4 / sizeof(Bits);
  __shared__ Bits turned[kPackElements + kPackElements / kPackLine * kPad + kPad * 32];
  const Piece piece = piece_of(p.wide, p.deep, p.wide_tiles, p.deep_tiles);
  const int wide = min(p.wide, p.p * p.q - piece.at), deep = min(p.deep, p.d - piece.l);
  const int rows = p.by_rows != 0 ? wide / p.q : 1, pitch = p.wide + (p.by_rows != 0 ? p.wide / p.q : 1) * kPad;
  let_next_kernel_start();
  const Bits* from = static_cast<const Bits*>(p.from) + piece.i * p.stride_i + piece.l * p.stride_l;
#pragma unroll 8
  for (int n = static_cast<int>(threadIdx.x); n < wide * deep; n += kPackThreads) {
    const int l = n % deep, row = n / deep % rows, col = n / deep / rows, at = piece.at + row * p.q + col;
    turned[l * pitch + row * (p.q + kPad) + col] =
        rounded(from[at / p.q * p.stride_p + at % p.q * p.stride_q + l * p.stride_l]);
  }
  __syncthreads();
  Bits* to = static_cast<Bits*>(p.to) + (static_cast<i64>(piece.i) * p.d + piece.l) * p.p * p.line;
#pragma unroll 8
  for (int n = static_cast<int>(threadIdx.x); n < wide * deep; n += kPackThreads) {
    const int l = n / wide, at = piece.at + n % wide, pads = p.by_rows != 0 ? n % wide / p.q : 0;
    to[(static_cast<i64>(l) * p.p + at / p.q) * p.line + at % p.q] = turned[l * pitch + n % wide + pads * kPad];
  }
}

/// A thread makes 16 bytes of each of the d lines of one p.
template <typename Bits>
__global__ void __launch_bounds__(kPackThreads) pack_dense(const __grid_constant__ DensePackParams p) {
  constexpr int kUnit = 16 / sizeof(Bits), kPerWord = 4 / sizeof(Bits);
  let_next_kernel_start();
  const int index = static_cast<int>(blockIdx.x) * kPackThreads + static_cast<int>(threadIdx.x);
  if (index >= p.total) {
    return;
  }
  const int rest = p.units.quotient(index), first = (index - rest * static_cast<int>(p.units.divisor)) * kUnit;
  const int i = p.p.quotient(rest), row = rest - i * static_cast<int>(p.p.divisor), d = static_cast<int>(p.d.divisor);
  const Bits* const from = static_cast<const Bits*>(p.from) + i * p.stride_i + row * p.stride_p;
  u32 bits[kUnit];
  int own[kUnit];
#pragma unroll
  for (int e = 0; e < kUnit; ++e) {
    const int q = p.d.quotient(first + e), l = first + e - q * d;
    own[e] = l;
    bits[e] = 0;
    if (q < p.q) {
      const Bits value = rounded(from[q * p.stride_q + l * p.stride_l]);
      if constexpr (is_same<Bits, float>) {
        bits[e] = __float_as_uint(value);
      } else {
        bits[e] = static_cast<u32>(value) << 16 * (e % kPerWord);
      }
    }
  }
  Bits* to = static_cast<Bits*>(p.to) + static_cast<i64>(rest) * d * p.line + first;
  for (int l = 0; l < d; ++l, to += p.line) {
    u32 words[4] = {0, 0, 0, 0};
#pragma unroll
    for (int e = 0; e < kUnit; ++e) {
      words[e / kPerWord] |= own[e] == l ? bits[e] : 0;
    }
    store_words<4>(to, words);
  }
}

/// Adds the parts in a fixed order: `slices` of threads take every so many of them, and then each other's sums. Columns
/// are one more than c where the sums for the bias come along.
template <typename T>
__global__ void __launch_bounds__(kPackThreads) unpack(const __grid_constant__ UnpackParams p) {
  constexpr int kEach = kUnpackElements / kPackThreads;  // sums of a thread, which are under way together
  __shared__ float turned[kUnpackElements + kMostSlices * 32];
  wait_for_earlier_kernel();
  const int p_wide = static_cast<int>(p.wide.divisor), p_deep = static_cast<int>(p.deep.divisor);
  const int cols = static_cast<int>(p.cols.divisor), pitch = p_wide + 1;
  const Piece piece = piece_of(p_wide, p_deep, p.wide_tiles, p.deep_tiles);
  const int wide = min(p_wide, p.b * cols - piece.at), deep = min(p_deep, p.d - piece.l);
  const float* from[kEach];
  float sum[kEach];
  int place[kEach], left[kEach];  // parts
#pragma unroll
  for (int m = 0; m < kEach; ++m) {
    const int n = static_cast<int>(threadIdx.x) + m * kPackThreads;
    const int rest = p.wide.quotient(n), slice = p.deep.quotient(rest);
    const int l = rest - slice * p_deep, own = n - rest * p_wide, at = piece.at + own;
    const int j = p.cols.quotient(at), k = at - j * cols;
    from[m] = p.from + piece.i * p.from_i + (piece.l + l) * p.from_l + j * p.from_j + k * p.from_k + slice * p.part;
    from[m] -= k == p.c ? (piece.l + l) * p.bias_back : 0;
    place[m] = rest * pitch + own;
    left[m] = slice < p.slices && l < deep && own < wide ? p.parts - slice : 0;
    sum[m] = 0.0f;
  }
#pragma unroll 4
  for (int s = 0; s < p.parts; s += p.slices) {
#pragma unroll
    for (int m = 0; m < kEach; ++m) {
      sum[m] += s < left[m] ? *from[m] : 0.0f;
      from[m] += p.slices * p.part;
    }
  }
#pragma unroll
  for (int m = 0; m < kEach; ++m) {
    if (place[m] < p.slices * p_deep * pitch) {
      turned[place[m]] = sum[m];
    }
  }
  __syncthreads();
  for (int n = static_cast<int>(threadIdx.x); n < wide * p_deep; n += kPackThreads) {
    const int own = p.deep.quotient(n), l = n - own * p_deep, at = piece.at + own;
    const int j = p.cols.quotient(at), k = at - j * cols;
    float total = 0.0f;
    for (int slice = 0; slice < p.slices; ++slice) {
      total += turned[(slice * p_deep + l) * pitch + own];
    }
    const T sum = narrow<T>(total);
    if (l < deep && k < p.c) {
      static_cast<T*>(p.to)[piece.i * p.stride_i + j * p.stride_j + k * p.stride_k + (piece.l + l) * p.stride_l] = sum;
    } else if (l < deep) {
      static_cast<T*>(p.bias)[((static_cast<i64>(piece.i) * p.b + j) * p.d + piece.l + l) * p.bias_stride] = sum;
    }
  }
}

}  // namespace fretwork::kronecker::hopper

// ----------------------------------------------------------------------------------------------------
// Transposes rows of x, y or weights from [k][l] to [l][k] and back, in registers; both sides move 16 bytes at a time.

namespace fretwork::kronecker::hopper {

/// Words in units of 16 bytes, which memory is aligned to.
template <int kWords>
__device__ __forceinline__ void load_units(u32* to, const void* from) {
#pragma unroll
  for (int q = 0; q < kWords / 4; ++q) {
    reinterpret_cast<word_group<4>*>(to)[q] = static_cast<const word_group<4>*>(from)[q];
  }
}
template <int kWords>
__device__ __forceinline__ void store_units(void* to, const u32* from) {
#pragma unroll
  for (int q = 0; q < kWords / 4; ++q) {
    store_words<4>(static_cast<u32*>(to) + 4 * q, from + 4 * q);
  }
}

template <int kRows, int kWords>
__device__ __forceinline__ void round_words(u32 (&rows)[kRows][kWords]) {
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      rows[r][w] = to_tf32(rows[r][w]);
    }
  }
}

/// `to`[column] = column of `from`, as arrays of Bits held in words.
template <typename Bits, int kRows, int kColumns>
__device__ __forceinline__ void turn(u32 (&to)[kColumns][kRows * sizeof(Bits) / 4],
                                     const u32 (&from)[kRows][kColumns * sizeof(Bits) / 4]) {
#pragma unroll
  for (int c = 0; c < kColumns; ++c) {
#pragma unroll
    for (int w = 0; w < static_cast<int>(kRows * sizeof(Bits) / 4); ++w) {
      if constexpr (sizeof(Bits) == 4) {
        to[c][w] = from[w][c];
      } else {
        to[c][w] = pair_halves(from[2 * w][c / 2], from[2 * w + 1][c / 2], c % 2);
      }
    }
  }
}

/// A thread transposes eight features of L neighbouring δ.
template <typename Bits, int L, bool Back>
__device__ __forceinline__ void regroup_by_threads(const RegroupParams& p) {
  constexpr int kRow = L * sizeof(Bits) / 4, kLine = 2 * sizeof(Bits);  // words
  const int index = static_cast<int>(blockIdx.x) * kRegroupThreads + static_cast<int>(threadIdx.x);
  if (index >= p.total) {
    return;
  }
  // δ fastest: what a warp reads and writes then lies together on both sides.
  const int rest = p.groups.quotient(index), l = (index - rest * static_cast<int>(p.groups.divisor)) * L;
  const int block = p.eights.quotient(rest), k = (rest - block * static_cast<int>(p.eights.divisor)) * 8;
  const int n = p.a.quotient(block), i = block - n * static_cast<int>(p.a.divisor);
  Bits* const strided =
      static_cast<Bits*>(p.strided) + n * p.strided_row + i * p.strided_block + static_cast<i64>(k) * p.d + l;
  Bits* const grouped =
      static_cast<Bits*>(p.grouped) + n * p.grouped_row + i * p.grouped_block + l * p.grouped_delta + k;
  alignas(16) u32 rows[8][kRow];    // of features
  alignas(16) u32 lines[L][kLine];  // of δ
  if constexpr (!Back) {
    if constexpr (kRow == 4) {
#pragma unroll
      for (int r = 0; r < 8; ++r) {
        load_units<kRow>(rows[r], strided + static_cast<i64>(r) * p.d);
      }
    } else {
      load_units<8 * kRow>(rows[0], strided);
    }
    if constexpr (sizeof(Bits) == 4) {
      if (p.tf32) {
        round_words(rows);
      }
    }
    turn<Bits, 8, L>(lines, rows);
#pragma unroll
    for (int e = 0; e < L; ++e) {
      store_units<kLine>(grouped + e * p.grouped_delta, lines[e]);
    }
  } else {
#pragma unroll
    for (int e = 0; e < L; ++e) {
      load_units<kLine>(lines[e], grouped + e * p.grouped_delta);
    }
    turn<Bits, L, 8>(rows, lines);
    if constexpr (kRow == 4) {
#pragma unroll
      for (int r = 0; r < 8; ++r) {
        store_units<kRow>(strided + static_cast<i64>(r) * p.d, rows[r]);
      }
    } else {
      store_units<8 * kRow>(strided, rows[0]);
    }
  }
}

/// Lane q of four gets element q of each of the four.
__device__ __forceinline__ void turn_four(u32 (&v)[4]) {
#pragma unroll
  for (int apart = 1; apart <= 2; apart *= 2) {
    const bool upper = (threadIdx.x & apart) != 0;
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      if ((n & apart) == 0) {
        const u32 other = __shfl_xor_sync(~0u, upper ? v[n] : v[n + apart], apart);
        v[n] = upper ? other : v[n];
        v[n + apart] = upper ? v[n + apart] : other;
      }
    }
  }
}

/// The same of fp32 with d = 4, where a feature is 16 bytes: a lane moves one, and four lanes turn four around, so that
/// neighbouring lanes have neighbours in memory on both sides.
template <bool Back>
__device__ __forceinline__ void regroup_by_lanes(const RegroupParams& p) {
  const i64 first = static_cast<i64>(blockIdx.x) * (kRegroupThreads * 8) + threadIdx.x;
  const int q = static_cast<int>(threadIdx.x % 4);
  u32 v[8][4];
  u32 *strided[8], *grouped[8];
#pragma unroll
  for (int r = 0; r < 8; ++r) {
    const i64 feature = first + r * kRegroupThreads;  // eight of an index
    const int index = static_cast<int>(feature / 8);
    const int block = p.eights.quotient(index),
              k = (index - block * static_cast<int>(p.eights.divisor)) * 8 + feature % 8;
    const int n = p.a.quotient(block), i = block - n * static_cast<int>(p.a.divisor);
    strided[r] =
        index < p.total ? static_cast<u32*>(p.strided) + n * p.strided_row + i * p.strided_block + 4 * k : nullptr;
    grouped[r] = static_cast<u32*>(p.grouped) + n * p.grouped_row + i * p.grouped_block + q * p.grouped_delta + (k - q);
    if (strided[r] != nullptr) {
      load_units<4>(v[r], Back ? grouped[r] : strided[r]);
    }
  }
#pragma unroll
  for (int r = 0; r < 8; ++r) {
    if (!Back && p.tf32) {
#pragma unroll
      for (u32& word : v[r]) {
        word = to_tf32(word);
      }
    }
    turn_four(v[r]);
    if (strided[r] != nullptr) {
      store_units<4>(Back ? strided[r] : grouped[r], v[r]);
    }
  }
}

/// L: the δ of 16 bytes, or d where that is less. Strided features are `d` elements apart; grouped ones are neighbours.
/// kWhole: fp32 with d = 4.
template <typename Bits, int L, bool Back, bool kWhole>
__global__ void __launch_bounds__(kRegroupThreads) regroup(const __grid_constant__ RegroupParams p) {
  let_next_kernel_start();
  if constexpr (kWhole) {
    regroup_by_lanes<Back>(p);
  } else {
    regroup_by_threads<Bits, L, Back>(p);
  }
}

}  // namespace fretwork::kronecker::hopper

// ----------------------------------------------------------------------------------------------------
// Packs weights of any strides in the order in which strided.cuh reads them.

namespace fretwork::kronecker::strided {

/// Which k of a step the fragments' place `slot` means: with few δ a lane's chunk holds several k, and they all serve
/// the lane that loaded them.
template <typename T, int V>
__device__ __forceinline__ int slot_k(int slot, bool turned) {
  if (turned) {
    const int t = slot % 8 / 2;
    return 4 * t + ((slot / 8 * 2 + slot % 2) ^ t);
  }
  if constexpr (sizeof(T) == 2 && V < chunk_of<T>) {
    return slot % 8 / 2 * 4 + slot / 8 * 2 + slot % 2;  // slots 2t, 2t+1, 2t+8, 2t+9 are 4t … 4t+3
  } else if constexpr (sizeof(T) == 4 && 2 * V == chunk_of<T>) {
    return slot % 4 * 2 + slot / 4;  // tf32: slots t, t+4 are 2t, 2t+1
  } else {
    return slot;
  }
}

/// Which column of eight stands at place `f` of a fragment: with whole chunks of δ the four lanes of a row store
/// neighbours.
template <typename T, int V>
__device__ __forceinline__ int column(int f) {
  return V >= chunk_of<T> ? f % 2 * 4 + f / 2 : f;
}

/// A thread writes one chunk (half the K of a step, one column) for each of V δ. Chunks are fastest, then columns.
template <typename T, int V>
__global__ void __launch_bounds__(256) pack(const __grid_constant__ PackParams p) {
  constexpr int kChunk = chunk_of<T>;
  let_next_kernel_start();
  const i64 item = static_cast<i64>(blockIdx.x) * 256 + threadIdx.x;
  if (item >= 2 * p.rows) {
    return;
  }
  const int half = static_cast<int>(item % 2);
  const i64 row = item / 2;
  const int place = static_cast<int>(row % p.slab);
  const i64 above = row / p.slab;
  const int step = static_cast<int>(above % p.steps);
  const i64 group = above / p.steps;
  const int slab = static_cast<int>(group % p.slabs);
  const i64 block = group / p.slabs;  // i · δ groups
  const int deltas = p.d / V;
  const int l = static_cast<int>(block % deltas) * V;
  const i64 i = block / deltas;
  const int j = slab * p.slab + place / 8 * 8 + column<T, V>(place % 8);
  const T* from = static_cast<const T*>(p.from) + i * p.stride_a + j * p.stride_b + l * p.stride_d;

  T values[V][kChunk];
#pragma unroll
  for (int s = 0; s < kChunk; ++s) {
    const int k = step * 2 * kChunk + slot_k<T, V>(half * kChunk + s, p.turned);
    const bool inside = j < p.b && k < p.c;
    const T* here = from + k * p.stride_c;
    constexpr int kMany = V < kChunk ? V : kChunk;
#pragma unroll
    for (int e = 0; e < V; e += kMany) {
      if (inside && p.vector) {
        const auto many = load_run<T, kMany>(here + e);
#pragma unroll
        for (int m = 0; m < kMany; ++m) {
          values[e + m][s] = many.at(m);
        }
      } else {
#pragma unroll
        for (int m = 0; m < kMany; ++m) {
          values[e + m][s] = inside ? here[(e + m) * p.stride_d] : T{};
        }
      }
    }
  }
  u8* to = static_cast<u8*>(p.to) + ((above * V) * p.slab + place) * 32 + (half ^ (place >> 2 & 1)) * 16;
#pragma unroll
  for (int e = 0; e < V; ++e) {
    u32 words[4];
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      if constexpr (sizeof(T) == 2) {
        words[w] = values[e][2 * w].bits | static_cast<u32>(values[e][2 * w + 1].bits) << 16;
      } else {
        words[w] = __float_as_uint(values[e][w]);
      }
    }
    store_words<4>(to + static_cast<i64>(e) * p.slab * 32, words);
  }
}

}  // namespace fretwork::kronecker::strided

// ----------------------------------------------------------------------------------------------------
// Packs the weights of two factors in the orders in which the threads of chain.cuh and chain_wide.cuh hold them.

namespace fretwork::kronecker::chain {

/// A word of packed weights holds k and k + 1 of a line of a product, of the first factor or of the second.
struct Entry {
  bool second;
  int product, line, k;
};

/// The order of chain.cuh: [factor][rank][warp][words / 4][lane][4]. A register of a fragment holds columns 2t, 2t + 1
/// (+ 8) of K, line g of a product.
template <int kQ, int kR, int kS, int kP, int kRanks, int kFirstWarps, int kSecondWarps>
struct FusedOrder {
  static constexpr Monarch kMonarch{kQ, kR, kS, kP, kRanks, 1, kFirstWarps, kSecondWarps};
  static constexpr int kFirst = 32 * kFirstWarps * kRanks * kMonarch.first_words();
  static constexpr i64 kWords = kMonarch.words();

  /// `at` counts words of one factor.
  static __device__ __forceinline__ Entry entry_of(Monarch::Share share, int warps, int depth, int products, int at) {
    const int words = share.words(depth), lane = at / 4 % 32, word = at / 128 % (words / 4) * 4 + at % 4;
    const int warp = at / (32 * words) % warps, rank = at / (32 * words * warps);
    const int half = word % 2, tile = word / 2 % share.tiles(), step = word / 2 / share.tiles() % (depth / 16);
    const int rest = word / 2 / share.tiles() / (depth / 16), group = rest / 2 % share.groups();
    const int pair = share.first_pair(warp) + rest / 2 / share.groups();
    const int line = share.first_column(warp) + (group * share.tiles() + tile) * 8 + lane / 4;
    return {false, rank * products + 2 * pair + rest % 2, line, 16 * step + 8 * half + 2 * (lane % 4)};
  }
  static __device__ __forceinline__ Entry entry(int at) {
    if (at < kFirst) {
      return entry_of(kMonarch.first(), kFirstWarps, kR, kMonarch.blocks(), at);
    }
    // Pairs of i stand in an order that depends on l, which keeps the stores of the middle apart.
    const Entry e = entry_of(kMonarch.second(), kSecondWarps, kQ, kMonarch.deltas(), at - kFirst);
    return {true, e.product, e.line, e.k ^ (e.product / 2 % 4 * 2)};
  }
};

/// The order of chain_wide.cuh: [rank][factor][warp][product][step][lane][4].
struct WideOrder {
  static constexpr i64 kWords = Wide::kWords;

  static __device__ __forceinline__ Entry entry(int index) {
    const u32 at = static_cast<u32>(index);
    const u32 part = at % 4, lane = at / 4 % 32, step = at / 128 % 4, e = at / 512 % 8, warp = at / 4096 % 4;
    const u32 product = 8 * (at / 32768) + e, line = 16 * warp + lane / 4 + part % 2 * 8;
    const u32 k = 16 * step + lane % 4 * 2 + part / 2 * 8;
    return {at / 16384 % 2 != 0, static_cast<int>(product), static_cast<int>(line), static_cast<int>(k)};
  }
};

/// One word each thread.
template <typename Order>
__global__ void __launch_bounds__(kPackThreads) pack(const __grid_constant__ PackParams p) {
  let_next_kernel_start();
  const int at = static_cast<int>(blockIdx.x * kPackThreads + threadIdx.x);
  if (at >= Order::kWords) {
    return;
  }
  const Entry e = Order::entry(at);
  const i64 next = e.second ? p.second_c : p.first_c;
  const u16* const from =
      e.second ? static_cast<const u16*>(p.second) + e.product * p.second_d + e.line * p.second_b + e.k * next
               : static_cast<const u16*>(p.first) + e.product * p.first_a + e.line * p.first_b + e.k * next;
  static_cast<u32*>(p.to)[at] = from[0] | static_cast<u32>(from[next]) << 16;
}

}  // namespace fretwork::kronecker::chain

// ----------------------------------------------------------------------------------------------------
// Copies between the weights of a Kronecker factor and its dense matrix. Threads follow the order of the matrix, which
// is the larger of the two.

namespace fretwork::kronecker {

/// Index: u32 where the total allows, as long divisions would cost more than the copy.
template <typename Bits, typename Index, bool TO_DENSE>
__global__ void __launch_bounds__(kConvertThreads) convert(const __grid_constant__ ConvertParams p) {
  const i64 first = static_cast<i64>(blockIdx.x) * kConvertThreads * kConvertElements + threadIdx.x;
  const auto cut = [](Index& rest, i64 size) {
    const Index part = rest % static_cast<Index>(size);
    rest /= static_cast<Index>(size);
    return part;
  };
#pragma unroll
  for (int e = 0; e < kConvertElements; ++e) {
    const i64 n = first + e * kConvertThreads;
    if (n < p.total) {
      Index row = static_cast<Index>(n), col = cut(row, p.cols);
      Bits* const dense = static_cast<Bits*>(p.dense) + row * p.dense_row + col * p.dense_col;
      const Index row_l = cut(row, p.d), j = cut(row, p.b), l = cut(col, p.d), k = cut(col, p.c);
      Bits* const w = static_cast<Bits*>(p.w) + row * p.w_a + j * p.w_b + k * p.w_c + l * p.w_d;
      const bool inside = row == col && row_l == l;  // what is left of either is its block
      if constexpr (TO_DENSE) {
        *dense = inside ? *w : Bits{0};
      } else {
        const Bits bits = *dense;
        if (inside) {
          *w = bits;
        } else if (static_cast<Bits>(bits << 1) != 0) {  // −0 is zero; NaN, infinities and subnormals are not
          atomicMin(p.outside, static_cast<u64>(n));
        }
      }
    }
  }
}

}  // namespace fretwork::kronecker
