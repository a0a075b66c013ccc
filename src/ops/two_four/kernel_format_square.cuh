// Transposable pruning: of each 4×4 square (f32: 2×2) the half of every row and column with the largest sum, written as
// a dense matrix or as both compressions. A tile stays in shared memory, so each element is read once.
#pragma once

#include "ops/two_four/kernel_format.cuh"

namespace fretwork {

/// Squares of a tile: kRows × kColumns of them.
template <int SIZE>
struct format_squares {
  static constexpr int kSide = format_tile<SIZE>::kGroup;
  static constexpr int kRows = format_tile<SIZE>::kLines / kSide, kColumns = kFormatTileK / kSide;
};

/// An element's magnitude as a number of which eight can be added: NaN above infinity above all others, and nothing but
/// zero is zero, whatever happens to subnormals. The CPU's magnitude is the same.
template <int SIZE>
__device__ __forceinline__ float magnitude_of(FormatKind kind, u32 bits) {
  constexpr float kLarge = 0x1.fffffep+121f, kSmall = 0x1p-126f;  // the largest number / 64, the least normal one
  float x;
  if constexpr (SIZE == 4) {
    x = __uint_as_float(bits);
  } else if constexpr (SIZE == 2) {
    x = kind == FormatKind::f16 ? widen(f16{static_cast<u16>(bits)}) : widen(bf16{static_cast<u16>(bits)});
  } else {
    x = kind == FormatKind::i8        ? static_cast<float>(static_cast<i8>(bits))
        : kind == FormatKind::f8_e4m3 ? widen(f8_e4m3{static_cast<u8>(bits)})
                                      : widen(f8_e5m2{static_cast<u8>(bits)});
  }
  const u32 size = __float_as_uint(x) & 0x7fffffffu;
  const float finite = fminf(fmaxf(__uint_as_float(size), kSmall), kLarge);
  return size == 0 ? 0.0f : size < 0x7f800000u ? finite : size == 0x7f800000u ? 2.0f * kLarge : 4.0f * kLarge;
}

/// The six ways to keep two of four, as bits; way 5 − n keeps what way n does not.
inline constexpr u32 kWays[6] = {0x3, 0x5, 0x9, 0x6, 0xa, 0xc};

/// The half of a square with the largest sum; of equal sums the first.
__device__ __forceinline__ u32 best_square(const float (&x)[2][2]) {
  return x[0][0] + x[1][1] >= x[0][1] + x[1][0] ? 0x9u : 0x6u;
}

/// A sum of magnitudes and the bits of what was added.
struct FormatChoice {
  float sum;
  u32 kept;
};
__device__ __forceinline__ FormatChoice better(const FormatChoice& a, const FormatChoice& b) {
  return {fmaxf(a.sum, b.sum), b.sum > a.sum ? b.kept : a.kept};
}
__device__ __forceinline__ FormatChoice both(const FormatChoice& a, const FormatChoice& b) {
  return {a.sum + b.sum, a.kept | b.kept};
}

/// Of the 90 masks that keep two of every row and column. Two rows that keep s and t leave what the complements of s
/// and t keep, in either order; any pair and its complement where t is that of s. What is compared with what, and in
/// which order, decides between equal sums: the CPU's BestMask does the same.
__device__ __forceinline__ u32 best_square(const float (&x)[4][4]) {
  float way[4][6];
#pragma unroll
  for (int r = 0; r < 4; ++r) {
#pragma unroll
    for (int n = 0; n < 6; ++n) {
      constexpr int kFirst[6] = {0, 0, 0, 1, 1, 2}, kSecond[6] = {1, 2, 3, 2, 3, 3};
      way[r][n] = x[r][kFirst[n]] + x[r][kSecond[n]];
    }
  }
  const auto upper = [&](int s, int t) { return FormatChoice{way[0][s] + way[1][t], kWays[s] | kWays[t] << 4}; };
  const auto lower = [&](int s, int t) { return FormatChoice{way[2][s] + way[3][t], kWays[s] << 8 | kWays[t] << 12}; };
  FormatChoice above = upper(0, 5), below = lower(0, 5);
#pragma unroll
  for (int s = 1; s < 6; ++s) {
    above = better(above, upper(s, 5 - s));
    below = better(below, lower(s, 5 - s));
  }
  FormatChoice best = both(above, below);
#pragma unroll
  for (int s = 0; s < 6; ++s) {
    best = better(best, both(upper(s, s), lower(5 - s, 5 - s)));
#pragma unroll
    for (int t = s + 1; t < 6; ++t) {
      if (t != 5 - s) {
        best = better(best, both(better(upper(s, t), upper(t, s)), better(lower(5 - s, 5 - t), lower(5 - t, 5 - s))));
      }
    }
  }
  return best.kept;
}

/// Whether a row or a column of a square has more than half; where none has, all stays. (Such a square need not be part
/// of any of the 90.)
__device__ __forceinline__ bool needs_pruning(u32 set) {
  const auto many = [](u32 a, u32 b, u32 c, u32 d) { return (a & b & (c | d)) | (c & d & (a | b)); };
  return ((many(set, set >> 1, set >> 2, set >> 3) & 0x1111u) | (many(set, set >> 4, set >> 8, set >> 12) & 0xfu)) != 0;
}

/// A square's rows in shared memory: SIZE words of each (f32: two of a pair).
template <int SIZE>
using format_square_row = word_group<SIZE == 4 ? 2 : SIZE>;

/// A square of elements: magnitudes, and which are not zero (bit side·row + column).
template <int SIZE>
__device__ __forceinline__ u32 measure(const FormatParams& p, const format_square_row<SIZE>* rows,
                                       float (*x)[format_squares<SIZE>::kSide]) {
  constexpr int kSide = format_squares<SIZE>::kSide;
  u32 there = 0;
#pragma unroll
  for (int r = 0; r < kSide; ++r) {
    format_unit unit = {};
#pragma unroll
    for (int w = 0; w < kSide * SIZE / 4; ++w) {
      unit.words[w] = rows[r].words[w];
    }
    there |= group_set<SIZE>(unit, 0, p.magnitude) << kSide * r;
#pragma unroll
    for (int c = 0; c < kSide; ++c) {
      x[r][c] = magnitude_of<SIZE>(p.kind, element_of<SIZE>(unit, c));
    }
  }
  return there;
}

/// The same for 16-bit elements, two at a time: sums carry into the upper bit of a half where it is not zero, where it
/// is a normal number of the wide type, and where it is too large to be added as it is. Few squares need the long way.
template <>
__device__ __forceinline__ u32 measure<2>(const FormatParams& p, const format_square_row<2>* rows, float (*x)[4]) {
  const bool half = p.kind == FormatKind::f16;
  const u32 normal = half ? 0x7fff7fffu : 0x7f807f80u, large = half ? 0x04000400u : 0x03800380u;
  u32 there = 0, special = 0;
#pragma unroll
  for (int w = 0; w < 8; ++w) {
    const u32 size = rows[w / 2].words[w % 2] & 0x7fff7fffu, more = size + 0x7fff7fffu;
    there |= (more & 0x80008000u) >> (15 - 4 * (w / 2) - 2 * (w % 2));
    special |= (more ^ (size + normal)) | (size + large);
    x[w / 2][w % 2 * 2] = half ? widen(f16{static_cast<u16>(size)}) : __uint_as_float(size << 16);
    x[w / 2][w % 2 * 2 + 1] = half ? widen(f16{static_cast<u16>(size >> 16)}) : __uint_as_float(size & 0xffff0000u);
  }
  if ((special & 0x80008000u) != 0) {
#pragma unroll
    for (int e = 0; e < 16; ++e) {
      x[e / 4][e % 4] = magnitude_of<2>(p.kind, rows[e / 4].words[e / 2 % 2] >> 16 * (e % 2) & 0xffffu);
    }
  }
  return (there | there >> 15) & 0xffffu;  // columns 1 and 3 were 15 bits too high
}

/// Leaves of a square only what is kept.
template <int SIZE>
__device__ __forceinline__ void clear_others(format_square_row<SIZE>* rows, u32 kept) {
  constexpr int kSide = format_squares<SIZE>::kSide;
#pragma unroll
  for (int r = 0; r < kSide; ++r) {
    if constexpr (SIZE == 2) {
#pragma unroll
      for (int w = 0; w < 2; ++w) {
        rows[r].words[w] &= ((kept | kept << 15) >> (4 * r + 2 * w) & 0x10001u) * 0xffffu;
      }
    } else {
      format_unit unit = {};
#pragma unroll
      for (int w = 0; w < kSide * SIZE / 4; ++w) {
        unit.words[w] = rows[r].words[w];
      }
      clear_others<SIZE>(unit, 0, kept >> kSide * r & ((1u << kSide) - 1u));
#pragma unroll
      for (int w = 0; w < kSide * SIZE / 4; ++w) {
        rows[r].words[w] = unit.words[w];
      }
    }
  }
}

/// Prunes the tile in shared memory, and says of each square which elements are kept and not zero. Outside the matrix
/// all is zero, and sets are empty, which stand for nibbles of 4.
template <int SIZE>
__device__ __forceinline__ void prune_squares(const FormatParams& p, unsigned char* tile, u16* sets) {
  using Squares = format_squares<SIZE>;
  using Row = format_square_row<SIZE>;
  constexpr int kSide = Squares::kSide;
#pragma unroll 1
  for (int n = static_cast<int>(threadIdx.x); n < Squares::kRows * Squares::kColumns; n += kFormatThreads) {
    const int y = n / Squares::kColumns * kSide, at = n % Squares::kColumns * kSide * SIZE;
    Row rows[kSide];
#pragma unroll
    for (int r = 0; r < kSide; ++r) {
      rows[r] = *reinterpret_cast<const Row*>(tile + format_tile<SIZE>::place(y + r, at));
    }
    float x[kSide][kSide];
    const u32 there = measure<SIZE>(p, rows, x);
    u32 kept = best_square(x);
    if (SIZE != 4 && !needs_pruning(there)) {
      kept = 0xffffu;
    }
    clear_others<SIZE>(rows, kept);
#pragma unroll
    for (int r = 0; r < kSide; ++r) {
      *reinterpret_cast<Row*>(tile + format_tile<SIZE>::place(y + r, at)) = rows[r];
    }
    sets[n] = static_cast<u16>(kept & there);
  }
}

/// Compresses the lines of a pruned tile.
template <int SIZE>
__device__ __forceinline__ void store_rows(const FormatParams& p, FormatPlace at, const unsigned char* tile,
                                           const u16* sets) {
  using Tile = format_tile<SIZE>;
  using Squares = format_squares<SIZE>;
  constexpr int kSide = Squares::kSide;
#pragma unroll 2
  for (int n = static_cast<int>(threadIdx.x); n < Tile::kLines * Tile::kUnits; n += kFormatThreads) {
    const int y = n / Tile::kUnits, x = n % Tile::kUnits;
    const format_unit unit = unit_of<SIZE>(const_cast<unsigned char*>(tile), y, x);
    format_half half = {};
    u32 nibbles = 0;
#pragma unroll
    for (int g = 0; g < Tile::kGroups; ++g) {
      const u32 square = sets[y / kSide * Squares::kColumns + x * Tile::kGroups + g];
      const u32 nibble = nibble_of<SIZE>(square >> kSide * (y % kSide) & ((1u << kSide) - 1u));
      nibbles |= nibble << 4 * g;
      keep<SIZE>(unit, g, nibble, half);
    }
    store_values<SIZE>(p, at.line + y, at.k + x * Tile::kElements, half);
    store_nibbles<SIZE>(p, at.line + y, at.k + x * Tile::kElements, nibbles);
  }
}

/// Compresses its columns: a thread takes one, 64 bytes of values and a nibble for each square that it crosses.
template <int SIZE>
__device__ __forceinline__ void store_cols(const FormatParams& p, FormatPlace at, const unsigned char* tile,
                                           const u16* sets) {
  using Tile = format_tile<SIZE>;
  using Squares = format_squares<SIZE>;
  using bits = typename Tile::bits;
  constexpr int kSide = Squares::kSide, kChunks = 4, kEach = Squares::kRows / kChunks;
  static_assert(kFormatThreads == kFormatTileK);
  const int x = static_cast<int>(threadIdx.x), c = x % kSide;
  const i64 column = at.k + x;
  if (column >= p.k) {
    return;
  }
  u32 nibbles[Squares::kRows / 8] = {};
#pragma unroll
  for (int chunk = 0; chunk < kChunks; ++chunk) {
    format_unit unit = {};
#pragma unroll
    for (int s = 0; s < kEach; ++s) {
      const int row = chunk * kEach + s;
      const u32 square = sets[row * Squares::kColumns + x / kSide];
      const unsigned char* const top = tile + Tile::place(row * kSide, x * SIZE);  // a square's rows are kPitch apart
      const auto element = [&](u32 r) {
        return static_cast<u32>(*reinterpret_cast<const bits*>(top + r * Tile::kPitch));
      };
      u32 set = 0;
#pragma unroll
      for (int r = 0; r < kSide; ++r) {
        set |= (square >> (kSide * r + c) & 1u) << r;
      }
      const u32 nibble = nibble_of<SIZE>(set);
      nibbles[row / 8] |= nibble << 4 * (row % 8);
      if constexpr (SIZE == 4) {
        unit.words[s] = element(nibble >> 1 & 1u);
      } else {
        const u32 pair = element(nibble & 3u) | element(nibble >> 2) << 8 * SIZE;
        unit.words[s * SIZE / 2] |= pair << 16 * SIZE * s % 32;
      }
    }
    const i64 line = at.line + chunk * kEach * kSide;
    const FormatMatrix& m = p.cols.values;
    if (m.wide) {
      if (line < p.lines) {
        store_words<4>(format_element<SIZE>(m, column, line / 2), unit.words);
      }
    } else {
#pragma unroll
      for (int e = 0; e < Tile::kElements; ++e) {
        if (line + 2 * e < p.lines) {
          *format_element<SIZE>(m, column, line / 2 + e) = static_cast<bits>(element_of<SIZE>(unit, e));
        }
      }
    }
  }
  const i64 b = at.line / (2 * kSide);
#pragma unroll
  for (int half = 0; half < Squares::kRows / 16; ++half) {
    if (p.cols.words_wide && b + 8 * half + 8 <= p.cols.bytes) {
      store_words<2>(meta_byte(p.cols, column, b + 8 * half), nibbles + 2 * half);
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if (b + 8 * half + i < p.cols.bytes) {
          *meta_byte(p.cols, column, b + 8 * half + i) = static_cast<u8>(nibbles[2 * half + i / 4] >> 8 * (i % 4));
        }
      }
    }
  }
}

/// Of p.dense to p.out, or where that is not there to p.packed and p.cols.
template <int SIZE>
__global__ void __launch_bounds__(kFormatThreads, 3) two_four_squares(const __grid_constant__ FormatParams p) {
  using Tile = format_tile<SIZE>;
  __shared__ u16 sets[format_squares<SIZE>::kRows * format_squares<SIZE>::kColumns];
  const FormatPlace at = format_place<SIZE>(p);
  if (p.dense.turned) {
    load_turned<SIZE>(p, p.dense, at, format_shared);
  } else {
    format_unit units[4];
    for_units<SIZE>([&](int first) { load_pieces<SIZE, 4>(p, p.dense, at, first, units); },
                    [&](int slot, int y, int x) { unit_of<SIZE>(format_shared, y, x) = units[slot]; });
  }
  __syncthreads();
  prune_squares<SIZE>(p, format_shared, sets);
  __syncthreads();
  if (p.out.data == nullptr) {
    store_rows<SIZE>(p, at, format_shared, sets);
    store_cols<SIZE>(p, at, format_shared, sets);
  } else if (p.out.turned) {
    store_turned<SIZE>(p, p.out, at, format_shared);
  } else {
#pragma unroll 4
    for (int n = static_cast<int>(threadIdx.x); n < Tile::kLines * Tile::kUnits; n += kFormatThreads) {
      const int y = n / Tile::kUnits, x = n % Tile::kUnits;
      store_unit<SIZE>(p, p.out, at.line + y, at.k + x * Tile::kElements, unit_of<SIZE>(format_shared, y, x));
    }
  }
}

}  // namespace fretwork
