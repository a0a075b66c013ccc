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

inline constexpr float kFormatLarge = 0x1.fffffep+119f, kFormatSmall = 0x1p-103f;

/// An element's magnitude as a number of which 32 can be added: NaN above infinity above all others, and nothing but
/// zero is zero. Differences are never subnormal. The CPU's magnitude is the same.
template <int SIZE>
__device__ __forceinline__ float magnitude_of(FormatKind kind, u32 bits) {
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
  const float finite = fminf(fmaxf(__uint_as_float(size), kFormatSmall), kFormatLarge);
  return size == 0             ? 0.0f
         : size < 0x7f800000u  ? finite
         : size == 0x7f800000u ? 2.0f * kFormatLarge
                               : 4.0f * kFormatLarge;
}

/// The half of a square with the largest sum; of equal sums the first.
__device__ __forceinline__ u32 best_square(const float (&x)[2][2]) {
  return x[0][0] + x[1][1] >= x[0][1] + x[1][0] ? 0x9u : 0x6u;
}

/// The three ways to halve four, as bits of the half with the first.
inline constexpr u32 kHalves[3] = {0x3, 0x5, 0x9};

/// All ones where a number is below zero.
__device__ __forceinline__ u32 sign_of(u32 bits) { return static_cast<u32>(static_cast<int>(bits) >> 31); }

/// Two rows halved in opposite ways: the best way, and the bits of both rows.
struct FormatOpposites {
  float size;
  u32 kept;
};
__device__ __forceinline__ FormatOpposites best_opposites(const float (&x)[3]) {
  float best = x[0];
  u32 kept = 0xc3u;
#pragma unroll
  for (int n = 1; n < 3; ++n) {
    const bool more = fabsf(x[n]) > fabsf(best);
    best = more ? x[n] : best;
    kept = more ? kHalves[n] | (kHalves[n] ^ 15u) << 4 : kept;
  }
  return {fabsf(best), kept ^ (sign_of(__float_as_uint(best)) & 0xffu)};
}

/// Of the 90 masks that keep two of every row and column. What a mask keeps less what it drops is a sum of contrasts of
/// rows, one half less the other, ± one of each. Either both upper rows are halved in opposite ways, and both lower
/// ones; or the upper rows take ways m and n, in either order, and the lower ones the opposites, in either order: twice
/// the larger of two orders is their sum plus the size of their difference. What is computed and compared, and in which
/// order, decides between equal sums: the CPU's BestMask does the same.
__device__ __forceinline__ u32 best_square(const float (&x)[4][4]) {
  float by[4][3];
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    const float left = x[r][0] - x[r][1], right = x[r][2] - x[r][3];
    by[r][0] = (x[r][0] + x[r][1]) - (x[r][2] + x[r][3]);
    by[r][1] = left + right;
    by[r][2] = left - right;
  }
  float upper[3], lower[3], halves[3];  // row 0 less row 1, row 2 less row 3, the upper rows less the lower
#pragma unroll
  for (int n = 0; n < 3; ++n) {
    upper[n] = by[0][n] - by[1][n];
    lower[n] = by[2][n] - by[3][n];
    halves[n] = (by[0][n] + by[1][n]) - (by[2][n] + by[3][n]);
  }
  float half = halves[0], up = upper[0], low = lower[0], best = fabsf(half) + fabsf(half);
  u32 kept = 0x3333u;  // bits of both upper rows, above them of the same rows exchanged
  const auto consider = [&](float h, float u, float l, float size, u32 m, u32 n) {
    const bool more = size > best;
    best = more ? size : best;
    half = more ? h : half;
    up = more ? u : up;
    low = more ? l : low;
    kept = more ? m | n << 4 | n << 8 | m << 12 : kept;
  };
#pragma unroll
  for (int n = 1; n < 3; ++n) {
    consider(halves[n], up, low, fabsf(halves[n]) + fabsf(halves[n]), kHalves[n], kHalves[n]);
  }
#pragma unroll
  for (int m = 0; m < 2; ++m) {
#pragma unroll
    for (int n = m + 1; n < 3; ++n) {
      const auto pair = [&](float h, float u, float l, u32 other) {
        consider(h, u, l, fabsf(h) + (fabsf(u) + fabsf(l)), kHalves[m], other);
      };
      pair(halves[m] + halves[n], upper[m] - upper[n], lower[m] - lower[n], kHalves[n]);
      pair(halves[m] - halves[n], upper[m] + upper[n], lower[m] + lower[n], kHalves[n] ^ 15u);
    }
  }
  const u32 sign = __float_as_uint(half), other = (kept ^ kept >> 8) & 0xffu;
  kept ^= sign_of(__float_as_uint(up) ^ sign) & other;
  kept ^= sign_of(__float_as_uint(low) ^ sign) & other << 8;
  kept ^= (sign_of(sign) & 0xffffu) ^ 0xff00u;
  const FormatOpposites above = best_opposites(upper), below = best_opposites(lower);
  const float size = above.size + below.size;
  return size + size > best ? above.kept | below.kept << 8 : kept;
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

/// The same for 16-bit elements, two at a time. A sum that carries into the upper bit of every half says that none is
/// zero or too small to be added as it is; few squares need the long way.
template <>
__device__ __forceinline__ u32 measure<2>(const FormatParams& p, const format_square_row<2>* rows, float (*x)[4]) {
  u32 ordinary = 0x80008000u;
  float total = 0;
  const auto widen_all = [&](u32 carry, const auto& low, const auto& high) {
#pragma unroll
    for (int w = 0; w < 8; ++w) {
      const u32 size = rows[w / 2].words[w % 2] & 0x7fff7fffu;
      ordinary &= size + carry;
      x[w / 2][w % 2 * 2] = low(size);
      x[w / 2][w % 2 * 2 + 1] = high(size);
      total += x[w / 2][w % 2 * 2] + x[w / 2][w % 2 * 2 + 1];
    }
  };
  if (p.kind == FormatKind::f16) {
    widen_all(
        0x7fff7fffu, [](u32 size) { return widen(f16{static_cast<u16>(size)}); },
        [](u32 size) { return widen(f16{static_cast<u16>(size >> 16)}); });
  } else {
    widen_all(
        0x74007400u, [](u32 size) { return __uint_as_float(size << 16); },
        [](u32 size) { return __uint_as_float(size & 0xffff0000u); });
  }
  u32 there = 0xffffu;
  if (ordinary != 0x80008000u || !(total < kFormatLarge)) {
    there = 0;
#pragma unroll
    for (int e = 0; e < 16; ++e) {
      const u32 bits = rows[e / 4].words[e / 2 % 2] >> 16 * (e % 2) & 0x7fffu;
      there |= (bits != 0 ? 1u : 0u) << e;
      x[e / 4][e % 4] = magnitude_of<2>(p.kind, bits);
    }
  }
  return there;
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

/// Rows and columns of a set of 4 × 4 changed about.
__device__ __forceinline__ u32 turn_set(u32 set) {
  u32 moved = (set ^ set >> 3) & 0x0a0au;
  set ^= moved ^ moved << 3;
  moved = (set ^ set >> 6) & 0x00ccu;
  return set ^ moved ^ moved << 6;
}

/// The nibbles that keep a square's set: of its rows from bit 0, of its columns from bit 16.
template <int SIZE>
__device__ __forceinline__ u32 square_nibbles(u32 set) {
  if constexpr (SIZE == 4) {
    return nibble_of<4>(set & 3u) | nibble_of<4>(set >> 2) << 4 | nibble_of<4>((set & 1u) | (set >> 1 & 2u)) << 16 |
           nibble_of<4>((set >> 1 & 1u) | (set >> 2 & 2u)) << 20;
  } else {  // as nibble_of, eight at once
    const u32 a = set | turn_set(set) << 16, b = a >> 1, c = a >> 2, d = a >> 3;
    constexpr u32 kOnes = 0x11111111u;
    return (b & (c | d) & kOnes) | (c & d & kOnes) << 1 | ((d | ~c) & kOnes) << 2 | ((c | d) & kOnes) << 3;
  }
}

/// Column c of a square, as a row.
template <int SIZE>
__device__ __forceinline__ format_square_row<SIZE> square_column(const format_square_row<SIZE>* rows, int c) {
  if constexpr (SIZE == 4) {
    return {rows[0].words[c], rows[1].words[c]};
  } else if constexpr (SIZE == 2) {
    const u32 half = c % 2 == 0 ? 0x5410u : 0x7632u;
    return {__byte_perm(rows[0].words[c / 2], rows[1].words[c / 2], half),
            __byte_perm(rows[2].words[c / 2], rows[3].words[c / 2], half)};
  } else {
    const u32 byte = static_cast<u32>(c) * 0x11u + 0x40u;
    return {__byte_perm(__byte_perm(rows[0].words[0], rows[1].words[0], byte),
                        __byte_perm(rows[2].words[0], rows[3].words[0], byte), 0x5410u)};
  }
}

/// What a nibble keeps of a row, half as many bytes.
template <int SIZE>
__device__ __forceinline__ u32 half_row(const format_square_row<SIZE>& row, u32 nibble) {
  format_unit unit = {};
#pragma unroll
  for (int w = 0; w < format_squares<SIZE>::kSide * SIZE / 4; ++w) {
    unit.words[w] = row.words[w];
  }
  format_half half = {};
  keep<SIZE>(unit, 0, nibble, half);
  return half.words[0];
}

/// What is kept of each row, and after it what is kept of the column of the same number: a square in its own place.
template <int SIZE>
__device__ __forceinline__ void pack_square(format_square_row<SIZE>* rows, u32 nibbles) {
  constexpr int kSide = format_squares<SIZE>::kSide;
  format_square_row<SIZE> packed[kSide];
#pragma unroll
  for (int r = 0; r < kSide; ++r) {
    const u32 along = half_row<SIZE>(rows[r], nibbles >> 4 * r & 0xfu);
    const u32 across = half_row<SIZE>(square_column<SIZE>(rows, r), nibbles >> (16 + 4 * r) & 0xfu);
    if constexpr (SIZE == 1) {
      packed[r].words[0] = along | across << 16;
    } else {
      packed[r].words[0] = along;
      packed[r].words[1] = across;
    }
  }
#pragma unroll
  for (int r = 0; r < kSide; ++r) {
    rows[r] = packed[r];
  }
}

/// Prunes the tile in shared memory. Without nibbles it stays as it is but for zeros; else squares are packed and their
/// nibbles written. Outside the matrix all is zero, whose nibbles are 4.
template <int SIZE>
__device__ __forceinline__ void prune_squares(const FormatParams& p, unsigned char* tile, u32* nibbles) {
  using Squares = format_squares<SIZE>;
  using Row = format_square_row<SIZE>;
  constexpr int kSide = Squares::kSide;
#pragma unroll 1
  for (int n = static_cast<int>(threadIdx.x); n < Squares::kRows * Squares::kColumns; n += kFormatThreads) {
    const int y = n / Squares::kColumns * kSide, at = n % Squares::kColumns * kSide * SIZE;
    unsigned char* const top = tile + format_tile<SIZE>::place(y, at);  // a square's rows are kPitch apart
    Row rows[kSide];
#pragma unroll
    for (int r = 0; r < kSide; ++r) {
      rows[r] = *reinterpret_cast<const Row*>(top + r * format_tile<SIZE>::kPitch);
    }
    float x[kSide][kSide];
    const u32 there = measure<SIZE>(p, rows, x);
    u32 kept = best_square(x);
    if (SIZE != 4 && there != 0xffffu && !needs_pruning(there)) {
      kept = 0xffffu;
    }
    if (p.out.data == nullptr) {
      const u32 both = square_nibbles<SIZE>(kept & there);
      pack_square<SIZE>(rows, both);
      nibbles[n] = both;
    } else {
      clear_others<SIZE>(rows, kept);
    }
#pragma unroll
    for (int r = 0; r < kSide; ++r) {
      *reinterpret_cast<Row*>(top + r * format_tile<SIZE>::kPitch) = rows[r];
    }
  }
}

/// 16 bytes of a line's values, of which there are `count`, from value `first` on.
template <int SIZE>
__device__ __forceinline__ void store_piece(const FormatMatrix& m, i64 line, i64 first, i64 count,
                                            const format_unit& piece) {
  using Tile = format_tile<SIZE>;
  if (m.wide) {
    if (first < count) {
      store_words<4>(format_element<SIZE>(m, line, first), piece.words);
    }
  } else {
#pragma unroll
    for (int e = 0; e < Tile::kElements; ++e) {
      if (first + e < count) {
        *format_element<SIZE>(m, line, first + e) = static_cast<typename Tile::bits>(element_of<SIZE>(piece, e));
      }
    }
  }
}

/// WORDS words of a line's metadata, from byte b on.
template <int WORDS>
__device__ __forceinline__ void store_meta(const FormatPacked& m, i64 line, i64 b, const u32* words) {
  if (m.words_wide && b + 4 * WORDS <= m.bytes) {
    store_words<WORDS>(meta_byte(m, line, b), words);
  } else {
#pragma unroll
    for (int i = 0; i < 4 * WORDS; ++i) {
      if (b + i < m.bytes) {
        *meta_byte(m, line, b + i) = static_cast<u8>(words[i / 4] >> 8 * (i % 4));
      }
    }
  }
}

/// Writes what a packed tile keeps of its lines.
template <int SIZE>
__device__ __forceinline__ void store_rows(const FormatParams& p, FormatPlace at, unsigned char* tile,
                                           const u32* nibbles) {
  using Tile = format_tile<SIZE>;
  using Squares = format_squares<SIZE>;
  constexpr int kSide = Squares::kSide, kPieces = Tile::kUnits / 2, kWords = Squares::kColumns / 8;
#pragma unroll 2
  for (int n = static_cast<int>(threadIdx.x); n < Tile::kLines * kPieces; n += kFormatThreads) {
    const int y = n / kPieces, x = n % kPieces;
    const format_unit a = unit_of<SIZE>(tile, y, 2 * x), b = unit_of<SIZE>(tile, y, 2 * x + 1);
    const format_unit piece =
        SIZE == 1
            ? format_unit{__byte_perm(a.words[0], a.words[1], 0x5410u), __byte_perm(a.words[2], a.words[3], 0x5410u),
                          __byte_perm(b.words[0], b.words[1], 0x5410u), __byte_perm(b.words[2], b.words[3], 0x5410u)}
            : format_unit{a.words[0], a.words[2], b.words[0], b.words[2]};
    if (at.line + y < p.lines) {
      store_piece<SIZE>(p.packed.values, at.line + y, at.k / 2 + x * Tile::kElements, p.k / 2, piece);
    }
  }
#pragma unroll 1
  for (int n = static_cast<int>(threadIdx.x); n < Tile::kLines * kWords; n += kFormatThreads) {
    const int y = n / kWords, x = n % kWords;
    const auto* const from = reinterpret_cast<const format_unit*>(nibbles + y / kSide * Squares::kColumns + 8 * x);
    const format_unit squares[2] = {from[0], from[1]};
    u32 word = 0;
#pragma unroll
    for (int g = 0; g < 8; ++g) {
      word |= (squares[g / 4].words[g % 4] >> 4 * (y % kSide) & 0xfu) << 4 * g;
    }
    if (at.line + y < p.lines) {
      store_meta<1>(p.packed, at.line + y, at.k / (2 * kSide) + 4 * x, &word);
    }
  }
}

/// And of its columns. Four lanes write 64 neighbouring bytes; eight such fours take columns of different squares,
/// which lie in different banks.
template <int SIZE>
__device__ __forceinline__ void store_cols(const FormatParams& p, FormatPlace at, const unsigned char* tile,
                                           const u32* nibbles) {
  using Tile = format_tile<SIZE>;
  using Squares = format_squares<SIZE>;
  constexpr int kSide = Squares::kSide, kChunks = 4, kEach = Squares::kRows / kChunks, kSpan = 8 * kSide;
  static_assert(kFormatThreads == kFormatTileK);
#pragma unroll 2
  for (int n = static_cast<int>(threadIdx.x); n < kChunks * kFormatTileK; n += kFormatThreads) {
    const int chunk = n % kChunks, j = n / kChunks;
    const int x = j / kSpan * kSpan + j % 8 * kSide + j / 8 % kSide;
    format_unit piece = {};
#pragma unroll
    for (int s = 0; s < kEach; ++s) {
      const int line = (chunk * kEach + s) * kSide + x % kSide;
      const unsigned char* const from = tile + Tile::place(line, x / kSide * kSide * SIZE + kSide * SIZE / 2);
      if constexpr (SIZE == 1) {
        piece.words[s / 2] |= static_cast<u32>(*reinterpret_cast<const u16*>(from)) << 16 * (s % 2);
      } else {
        piece.words[s] = *reinterpret_cast<const u32*>(from);
      }
    }
    if (at.k + x < p.k) {
      store_piece<SIZE>(p.cols.values, at.k + x, at.line / 2 + chunk * Tile::kElements, p.lines / 2, piece);
    }
  }
  const int x = static_cast<int>(threadIdx.x);
  if (at.k + x < p.k) {
    u32 words[Squares::kRows / 8] = {};
#pragma unroll
    for (int row = 0; row < Squares::kRows; ++row) {
      const u32 square = nibbles[row * Squares::kColumns + x / kSide];
      words[row / 8] |= (square >> (16 + 4 * (x % kSide)) & 0xfu) << 4 * (row % 8);
    }
#pragma unroll
    for (int half = 0; half < Squares::kRows / 16; ++half) {
      store_meta<2>(p.cols, at.k + x, at.line / (2 * kSide) + 8 * half, words + 2 * half);
    }
  }
}

/// Of p.dense to p.out, or where that is not there to p.packed and p.cols.
template <int SIZE>
__global__ void __launch_bounds__(kFormatThreads, 4) two_four_squares(const __grid_constant__ FormatParams p) {
  using Tile = format_tile<SIZE>;
  __shared__ __align__(16) u32 nibbles[format_squares<SIZE>::kRows * format_squares<SIZE>::kColumns];
  const FormatPlace at = format_place<SIZE>(p);
  if (p.dense.turned) {
    load_turned<SIZE>(p, p.dense, at, format_shared);
  } else {
    format_unit units[4];
    for_units<SIZE>([&](int first) { load_pieces<SIZE, 4>(p, p.dense, at, first, units); },
                    [&](int slot, int y, int x) { unit_of<SIZE>(format_shared, y, x) = units[slot]; });
  }
  __syncthreads();
  prune_squares<SIZE>(p, format_shared, nibbles);
  __syncthreads();
  if (p.out.data == nullptr) {
    store_rows<SIZE>(p, at, format_shared, nibbles);
    store_cols<SIZE>(p, at, format_shared, nibbles);
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
