// Transposable pruning: keeps half of every row and column of each 4 × 4 square (f32: 2 × 2), with the largest sum of
// magnitudes. The result is a dense matrix or both compressions. A tile stays in shared memory, so each element is read
// once.
#pragma once

#include "ops/two_four/cuda/format.cuh"

namespace fretwork::two_four::format {

/// Squares of a tile: kRows × kColumns of them.
template <int kSize>
struct SquareSizes {
  static constexpr int kSide = TileSizes<kSize>::kGroup;
  static constexpr int kRows = TileSizes<kSize>::kLines / kSide, kColumns = kTileK / kSide;
};

inline constexpr float kLarge = 0x1.fffffep+119f, kSmall = 0x1p-103f;

/// An element's magnitude as a number of which 32 can be added: NaN above infinity above all others, and nothing but
/// zero is zero. Differences are never subnormal. The CPU's magnitude is the same.
template <int kSize>
__device__ __forceinline__ float magnitude_of(ElementType type, u32 bits) {
  float x;
  if constexpr (kSize == 4) {
    x = __uint_as_float(bits);
  } else if constexpr (kSize == 2) {
    x = type == ElementType::f16 ? widen(f16{static_cast<u16>(bits)}) : widen(bf16{static_cast<u16>(bits)});
  } else {
    x = type == ElementType::i8        ? static_cast<float>(static_cast<i8>(bits))
        : type == ElementType::u8      ? static_cast<float>(bits)
        : type == ElementType::f8_e4m3 ? widen(f8_e4m3{static_cast<u8>(bits)})
                                       : widen(f8_e5m2{static_cast<u8>(bits)});
  }
  const u32 size = __float_as_uint(x) & 0x7fffffffu;
  const float finite = fminf(fmaxf(__uint_as_float(size), kSmall), kLarge);
  return size == 0 ? 0.0f : size < 0x7f800000u ? finite : size == 0x7f800000u ? 2.0f * kLarge : 4.0f * kLarge;
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
struct Opposites {
  float size;
  u32 kept;
};
__device__ __forceinline__ Opposites best_opposites(const float (&x)[3]) {
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
    best = fmaxf(best, size);  // does not wait for the comparison
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
  const Opposites above = best_opposites(upper), below = best_opposites(lower);
  const float size = above.size + below.size;
  return size + size > best ? above.kept | below.kept << 8 : kept;
}

/// Whether a row or a column of a square has more than half; where none has, all stays. (Such a square need not be part
/// of any of the 90.)
__device__ __forceinline__ bool needs_pruning(u32 set) {
  const auto many = [](u32 a, u32 b, u32 c, u32 d) { return (a & b & (c | d)) | (c & d & (a | b)); };
  return ((many(set, set >> 1, set >> 2, set >> 3) & 0x1111u) | (many(set, set >> 4, set >> 8, set >> 12) & 0xfu)) != 0;
}

/// A square's rows in shared memory: kSize words of each (f32: two of a pair).
template <int kSize>
using SquareRow = word_group<kSize == 4 ? 2 : kSize>;

/// A square of elements: magnitudes, and which are not zero (bit side·row + column).
template <int kSize>
__device__ __forceinline__ u32 measure(const Params& p, const SquareRow<kSize>* rows,
                                       float (*x)[SquareSizes<kSize>::kSide]) {
  constexpr int kSide = SquareSizes<kSize>::kSide;
  u32 there = 0;
#pragma unroll
  for (int r = 0; r < kSide; ++r) {
    Unit unit = {};
#pragma unroll
    for (int w = 0; w < kSide * kSize / 4; ++w) {
      unit.words[w] = rows[r].words[w];
    }
    there |= group_set<kSize>(unit, 0, p.magnitude) << kSide * r;
#pragma unroll
    for (int c = 0; c < kSide; ++c) {
      x[r][c] = magnitude_of<kSize>(p.type, element_of<kSize>(unit, c));
    }
  }
  return there;
}

/// The same for 16-bit elements; few squares need the long way.
template <>
__device__ __forceinline__ u32 measure<2>(const Params& p, const SquareRow<2>* rows, float (*x)[4]) {
  if (p.type == ElementType::f16) {
#pragma unroll
    for (int e = 0; e < 16; ++e) {
      x[e / 4][e % 4] = fabsf(widen(f16{static_cast<u16>(rows[e / 4].words[e / 2 % 2] >> 16 * (e % 2))}));
    }
  } else {
#pragma unroll
    for (int e = 0; e < 16; ++e) {
      const u32 word = rows[e / 4].words[e / 2 % 2];
      x[e / 4][e % 4] = fabsf(__uint_as_float(e % 2 == 0 ? word << 16 : word & 0xffff0000u));
    }
  }
  float least[4], total[4];
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    least[r] = fminf(fminf(x[r][0], x[r][1]), fminf(x[r][2], x[r][3]));
    total[r] = (x[r][0] + x[r][1]) + (x[r][2] + x[r][3]);
  }
  u32 there = 0xffffu;
  if (!(fminf(fminf(least[0], least[1]), fminf(least[2], least[3])) >= kSmall &&
        (total[0] + total[1]) + (total[2] + total[3]) < kLarge)) {
    there = 0;
#pragma unroll
    for (int e = 0; e < 16; ++e) {
      const u32 bits = rows[e / 4].words[e / 2 % 2] >> 16 * (e % 2) & 0x7fffu;
      there |= (bits != 0 ? 1u : 0u) << e;
      x[e / 4][e % 4] = magnitude_of<2>(p.type, bits);
    }
  }
  return there;
}

/// The same for 8-bit elements, four at a time: a sum carries into the upper bit of a byte that is not zero, another
/// one where it is infinite or NaN, and only then the long way is taken.
template <>
__device__ __forceinline__ u32 measure<1>(const Params& p, const SquareRow<1>* rows, float (*x)[4]) {
  u32 there = 0, special = 0;
  const auto each_row = [&](u32 carry, const auto& magnitudes, const auto& widen_byte) {
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const u32 sizes = magnitudes(rows[r].words[0]);
      const u32 some = ((sizes & 0x7f7f7f7fu) + 0x7f7f7f7fu | sizes) & 0x80808080u;
      there |= some * 0x00204081u >> 28 << 4 * r;
      special |= carry != 0 ? sizes + carry : 0u;
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        x[r][c] = widen_byte(sizes, c);
      }
    }
  };
  const auto unsign = [](u32 word) { return word & 0x7f7f7f7fu; };
  if (p.type == ElementType::i8 || p.type == ElementType::u8) {  // a byte below the bits of 2^23 is added to it
    const u32 signs = p.type == ElementType::i8 ? 0x01010101u : 0u;
    each_row(
        0,
        [signs](u32 word) {
          const u32 minus = word >> 7 & signs;
          return (word ^ minus * 0xffu) + minus;
        },
        [](u32 sizes, int c) {
          return __uint_as_float(__byte_perm(sizes, 0x4b000000u, 0x7440u + static_cast<u32>(c))) - 0x1p23f;
        });
  } else if (p.type == ElementType::f8_e4m3) {
    each_row(0x01010101u, unsign,
             [](u32 sizes, int c) { return __uint_as_float((sizes >> 8 * c & 0x7fu) << 20) * 0x1p120f; });
  } else {
    each_row(0x04040404u, unsign,
             [](u32 sizes, int c) { return __uint_as_float((sizes >> 8 * c & 0x7fu) << 21) * 0x1p112f; });
  }
  if ((special & 0x80808080u) != 0) {
#pragma unroll
    for (int e = 0; e < 16; ++e) {
      x[e / 4][e % 4] = magnitude_of<1>(p.type, rows[e / 4].words[0] >> 8 * (e % 4) & 0xffu);
    }
  }
  return there;
}

/// Leaves of a square only what is kept.
template <int kSize>
__device__ __forceinline__ void clear_others(SquareRow<kSize>* rows, u32 kept) {
  constexpr int kSide = SquareSizes<kSize>::kSide;
#pragma unroll
  for (int r = 0; r < kSide; ++r) {
    if constexpr (kSize == 2) {
#pragma unroll
      for (int w = 0; w < 2; ++w) {
        rows[r].words[w] &= ((kept | kept << 15) >> (4 * r + 2 * w) & 0x10001u) * 0xffffu;
      }
    } else {
      Unit unit = {};
#pragma unroll
      for (int w = 0; w < kSide * kSize / 4; ++w) {
        unit.words[w] = rows[r].words[w];
      }
      clear_others<kSize>(unit, 0, kept >> kSide * r & ((1u << kSide) - 1u));
#pragma unroll
      for (int w = 0; w < kSide * kSize / 4; ++w) {
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
template <int kSize>
__device__ __forceinline__ u32 square_nibbles(u32 set) {
  if constexpr (kSize == 4) {
    return nibble_of<4>(set & 3u) | nibble_of<4>(set >> 2) << 4 | nibble_of<4>((set & 1u) | (set >> 1 & 2u)) << 16 |
           nibble_of<4>((set >> 1 & 1u) | (set >> 2 & 2u)) << 20;
  } else {  // as nibble_of, eight at once
    const u32 a = set | turn_set(set) << 16, b = a >> 1, c = a >> 2, d = a >> 3;
    constexpr u32 kOnes = 0x11111111u;
    return (b & (c | d) & kOnes) | (c & d & kOnes) << 1 | ((d | ~c) & kOnes) << 2 | ((c | d) & kOnes) << 3;
  }
}

/// Column c of a square, as a row.
template <int kSize>
__device__ __forceinline__ SquareRow<kSize> square_column(const SquareRow<kSize>* rows, int c) {
  if constexpr (kSize == 4) {
    return {rows[0].words[c], rows[1].words[c]};
  } else if constexpr (kSize == 2) {
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
template <int kSize>
__device__ __forceinline__ u32 half_row(const SquareRow<kSize>& row, u32 nibble) {
  Unit unit = {};
#pragma unroll
  for (int w = 0; w < SquareSizes<kSize>::kSide * kSize / 4; ++w) {
    unit.words[w] = row.words[w];
  }
  Half half = {};
  keep<kSize>(unit, 0, nibble, half);
  return half.words[0];
}

/// What is kept of each row, and after it what is kept of the column of the same number: a square in its own place.
template <int kSize>
__device__ __forceinline__ void pack_square(SquareRow<kSize>* rows, u32 nibbles) {
  constexpr int kSide = SquareSizes<kSize>::kSide;
  SquareRow<kSize> packed[kSide];
#pragma unroll
  for (int r = 0; r < kSide; ++r) {
    const SquareRow<kSize> column = square_column<kSize>(rows, r);
    if constexpr (kSize == 2) {  // what a permutation takes of the row, above it of the column, made as in keep()
      const u32 two = nibbles >> 4 * r & 0x000f000fu, take = (two * 65u & 0x03030303u) * 0x22u + 0x10101010u;
      packed[r].words[0] = __byte_perm(rows[r].words[0], rows[r].words[1], take);
      packed[r].words[1] = __byte_perm(column.words[0], column.words[1], take >> 16);
    } else {
      const u32 along = half_row<kSize>(rows[r], nibbles >> 4 * r & 0xfu);
      const u32 across = half_row<kSize>(column, nibbles >> (16 + 4 * r) & 0xfu);
      if constexpr (kSize == 1) {
        packed[r].words[0] = along | across << 16;
      } else {
        packed[r].words[0] = along;
        packed[r].words[1] = across;
      }
    }
  }
#pragma unroll
  for (int r = 0; r < kSide; ++r) {
    rows[r] = packed[r];
  }
}

/// Metadata of a tile's lines and columns, in bytes. Columns of the same number in their squares are neighbours.
template <int kSize>
struct SquareMetadata {
  using Squares = SquareSizes<kSize>;
  u8 rows[TileSizes<kSize>::kLines][Squares::kColumns / 2];
  u8 cols[Squares::kSide][Squares::kColumns][Squares::kRows / 2];
};

/// A thread's square, and the next lane's: a byte for each row.
template <int kSize>
__device__ __forceinline__ void put_row_nibbles(SquareMetadata<kSize>& meta, int y, int column, u32 nibbles) {
  u32 own = nibbles & 0xffffu;
  own = (own | own << 8) & 0x00ff00ffu;
  own = (own | own << 4) & 0x0f0f0f0fu;
  const u32 next = __shfl_xor_sync(~0u, own, 1);
  const bool odd = column % 2 != 0;
  const u32 bytes = odd ? next | own << 4 : own | next << 4;
  constexpr int kEach = SquareSizes<kSize>::kSide / 2;
  const int first = odd ? kEach : 0;
#pragma unroll
  for (int r = 0; r < kEach; ++r) {
    meta.rows[y + first + r][column / 2] = static_cast<u8>(bytes >> 8 * (first + r));
  }
}

/// Of four squares below each other, 16 bits each: two bytes for each column.
template <int kSize>
__device__ __forceinline__ void put_col_nibbles(SquareMetadata<kSize>& meta, int row, int column, u64 nibbles) {
  u64 moved = (nibbles ^ nibbles >> 12) & 0x0000f0f00000f0f0ull;
  nibbles ^= moved ^ moved << 12;
  moved = (nibbles ^ nibbles >> 24) & 0x00000000ff00ff00ull;
  nibbles ^= moved ^ moved << 24;
#pragma unroll
  for (int c = 0; c < SquareSizes<kSize>::kSide; ++c) {
    *reinterpret_cast<u16*>(&meta.cols[c][column][row / 2]) = static_cast<u16>(nibbles >> 16 * c);
  }
}

/// Prunes a square in shared memory. Where there is a dense result, the square stays as it is but for zeros; else it is
/// packed. Gives the nibbles. Outside the matrix all is zero, whose nibbles are 4.
template <int kSize>
__device__ __forceinline__ u32 prune_square(const Params& p, unsigned char* top) {
  using Row = SquareRow<kSize>;
  constexpr int kSide = SquareSizes<kSize>::kSide, kPitch = TileSizes<kSize>::kPitch;
  Row rows[kSide];
#pragma unroll
  for (int r = 0; r < kSide; ++r) {
    rows[r] = *reinterpret_cast<const Row*>(top + r * kPitch);
  }
  float x[kSide][kSide];
  const u32 there = measure<kSize>(p, rows, x);
  u32 kept = best_square(x), nibbles = 0;
  const bool full = there == (kSize == 4 ? 0xfu : 0xffffu);
  if (kSize != 4 && !full && !needs_pruning(there)) {
    kept = 0xffffu;
  }
  if (p.out.data == nullptr) {
    if (!full) {  // a nibble may then stand for elements that are not kept
      clear_others<kSize>(rows, kept);
    }
    nibbles = square_nibbles<kSize>(kept & there);
    pack_square<kSize>(rows, nibbles);
  } else {
    clear_others<kSize>(rows, kept);
  }
#pragma unroll
  for (int r = 0; r < kSide; ++r) {
    *reinterpret_cast<Row*>(top + r * kPitch) = rows[r];
  }
  return nibbles;
}

/// Prunes the tile in shared memory; a thread takes squares below each other.
template <int kSize>
__device__ __forceinline__ void prune_squares(const Params& p, unsigned char* tile, SquareMetadata<kSize>& meta) {
  using Squares = SquareSizes<kSize>;
  constexpr int kSide = Squares::kSide, kEach = Squares::kRows * Squares::kColumns / kThreads;
  const int column = static_cast<int>(threadIdx.x) % Squares::kColumns;
  const int first = static_cast<int>(threadIdx.x) / Squares::kColumns * kEach;
  u64 below = 0;
#pragma unroll 1
  for (int row = first; row < first + kEach; ++row) {
    const u32 nibbles = prune_square<kSize>(
        p, tile + TileSizes<kSize>::place(row * kSide, column * kSide * kSize));  // rows: a pitch apart
    if (p.out.data == nullptr) {
      put_row_nibbles<kSize>(meta, row * kSide, column, nibbles);
      below = below >> 16 | static_cast<u64>(nibbles >> 16) << 48;
      if (row % 4 == 3) {
        put_col_nibbles<kSize>(meta, row - 3, column, below);
      }
    }
  }
}

/// Writes pieces of 16 bytes of values: `count` for each thread, `step` lines apart from `line` on, from value `first`
/// on, of piece(n). `lines` and `values` say where the matrix ends.
template <int kSize, typename Piece>
__device__ __forceinline__ void store_pieces(const Matrix& m, i64 line, i64 step, i64 first, i64 lines, i64 values,
                                             const Piece& piece) {
  using Tile = TileSizes<kSize>;
  if (m.wide && first < values && line + 3 * step < lines) {
    auto* to = element_at<kSize>(m, line, first);
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      store_words<4>(to, piece(n).words);
      to += step * m.line;
    }
  } else {
#pragma unroll 1
    for (int n = 0; n < 4; ++n, line += step) {
      const Unit unit = piece(n);
#pragma unroll
      for (int e = 0; e < Tile::kElements; ++e) {
        if (line < lines && first + e < values) {
          *element_at<kSize>(m, line, first + e) = static_cast<typename Tile::bits>(element_of<kSize>(unit, e));
        }
      }
    }
  }
}

/// Eight bytes of a line's metadata, from byte b on.
__device__ __forceinline__ void store_meta(const Packed& m, i64 line, i64 b, const u8* from) {
  const auto eight = *reinterpret_cast<const word_group<2>*>(from);
  if (m.words_wide && b + 8 <= m.bytes) {
    store_words<2>(meta_byte(m, line, b), eight.words);
  } else {
#pragma unroll 1
    for (int i = 0; i < 8 && b + i < m.bytes; ++i) {
      *meta_byte(m, line, b + i) = from[i];
    }
  }
}

/// Writes what a packed tile keeps of its lines.
template <int kSize>
__device__ __forceinline__ void store_rows(const Params& p, Place at, unsigned char* tile,
                                           const SquareMetadata<kSize>& meta) {
  using Tile = TileSizes<kSize>;
  constexpr int kSide = Tile::kGroup, kPieces = Tile::kUnits / 2, kStep = kThreads / kPieces;
  static_assert(4 * kStep == Tile::kLines);
  const int t = static_cast<int>(threadIdx.x), y = t / kPieces, x = t % kPieces;
  store_pieces<kSize>(
      p.packed.values, at.line + y, kStep, at.k / 2 + x * Tile::kElements, p.lines, p.k / 2, [&](int n) -> Unit {
        const Unit a = unit_of<kSize>(tile, y + n * kStep, 2 * x);
        const Unit b = unit_of<kSize>(tile, y + n * kStep, 2 * x + 1);
        if constexpr (kSize == 1) {
          return {__byte_perm(a.words[0], a.words[1], 0x5410u), __byte_perm(a.words[2], a.words[3], 0x5410u),
                  __byte_perm(b.words[0], b.words[1], 0x5410u), __byte_perm(b.words[2], b.words[3], 0x5410u)};
        } else {
          return {a.words[0], a.words[2], b.words[0], b.words[2]};
        }
      });
  constexpr int kEights = SquareSizes<kSize>::kColumns / 16;
  for (int n = t; n < Tile::kLines * kEights; n += kThreads) {
    const int line = n / kEights, b = n % kEights * 8;
    if (at.line + line < p.lines) {
      store_meta(p.packed, at.line + line, at.k / (2 * kSide) + b, &meta.rows[line][b]);
    }
  }
}

/// And of its columns. Four lanes write 64 neighbouring bytes; eight such fours take columns of different squares,
/// which lie in different banks.
template <int kSize>
__device__ __forceinline__ void store_cols(const Params& p, Place at, const unsigned char* tile,
                                           const SquareMetadata<kSize>& meta) {
  using Tile = TileSizes<kSize>;
  using Squares = SquareSizes<kSize>;
  constexpr int kSide = Squares::kSide, kChunks = 4, kEach = Squares::kRows / kChunks, kSpan = 8 * kSide;
  constexpr int kStep = kThreads / kChunks;
  static_assert(4 * kStep == kTileK && kStep % kSpan == 0);
  const int t = static_cast<int>(threadIdx.x), chunk = t % kChunks, j = t / kChunks;
  const int x = j / kSpan * kSpan + j % 8 * kSide + j / 8 % kSide;
  store_pieces<kSize>(
      p.cols.values, at.k + x, kStep, at.line / 2 + chunk * Tile::kElements, p.k, p.lines / 2, [&](int n) {
        Unit piece = {};
        constexpr bool kAgain = kStep * kSize % 128 == 0;  // units change places in the same way
        const int here = kAgain ? x : x + n * kStep;
#pragma unroll
        for (int s = 0; s < kEach; ++s) {
          const int line = (chunk * kEach + s) * kSide + x % kSide;
          const auto* const from = tile + Tile::place(line, here / kSide * kSide * kSize + kSide * kSize / 2) +
                                   (kAgain ? n * kStep * kSize : 0);
          if constexpr (kSize == 1) {
            piece.words[s / 2] |= static_cast<u32>(*reinterpret_cast<const u16*>(from)) << 16 * (s % 2);
          } else {
            piece.words[s] = *reinterpret_cast<const u32*>(from);
          }
        }
        return piece;
      });
  constexpr int kEights = Squares::kRows / 16;
  for (int n = t; n < kTileK * kEights; n += kThreads) {
    const int column = n / kEights, b = n % kEights * 8;
    if (at.k + column < p.k) {
      store_meta(p.cols, at.k + column, at.line / (2 * kSide) + b, &meta.cols[column % kSide][column / kSide][b]);
    }
  }
}

/// Calls use(n, element, unit) with pointers to each of a thread's units of a whole tile, in memory and in shared
/// memory.
template <int kSize, typename Use>
__device__ __forceinline__ void for_whole_units(const Matrix& m, Place at, unsigned char* tile, const Use& use) {
  using Tile = TileSizes<kSize>;
  constexpr int kStep = kThreads / Tile::kUnits;
  static_assert(kStep == Tile::kElements && Tile::kPerThread == 8);  // so that units change places with u alone
  const int y = static_cast<int>(threadIdx.x) / Tile::kUnits, x = static_cast<int>(threadIdx.x) % Tile::kUnits;
  auto* element = element_at<kSize>(m, at.line + y, at.k + x * Tile::kElements);
#pragma unroll
  for (int u = 0; u < 8; ++u) {
    use(u, element, tile + (y + u * kStep) * Tile::kPitch + (x ^ u) * 16);
    element += kStep * m.line;
  }
}

/// Whether a tile can be read or written in that way.
template <int kSize>
__device__ __forceinline__ bool is_whole(const Params& p, const Matrix& m, Place at) {
  return m.wide && at.line + TileSizes<kSize>::kLines <= p.lines && at.k + kTileK <= p.k;
}

/// All of a thread's reads are under way together.
template <int kSize>
__device__ __forceinline__ void load_whole(const Matrix& m, Place at, unsigned char* tile) {
  Unit units[8];
  for_whole_units<kSize>(m, at, tile,
                         [&](int u, const void* from, unsigned char*) { units[u] = *static_cast<const Unit*>(from); });
  for_whole_units<kSize>(m, at, tile,
                         [&](int u, const void*, unsigned char* to) { *reinterpret_cast<Unit*>(to) = units[u]; });
}

/// Of p.dense to p.out, or where that is not there to p.packed and p.cols.
template <int kSize>
__global__ void __launch_bounds__(kThreads, 4) squares(const __grid_constant__ Params p) {
  using Tile = TileSizes<kSize>;
  __shared__ __align__(16) SquareMetadata<kSize> meta;
  const Place at = tile_place<kSize>(p);
  if (p.dense.turned) {
    load_turned<kSize>(p, p.dense, at, tile_memory);
  } else if (is_whole<kSize>(p, p.dense, at)) {
    load_whole<kSize>(p.dense, at, tile_memory);
  } else {
    Unit units[4];
    for_units<kSize>([&](int first) { load_pieces<kSize, 4>(p, p.dense, at, first, units); },
                     [&](int slot, int y, int x) { unit_of<kSize>(tile_memory, y, x) = units[slot]; });
  }
  __syncthreads();
  prune_squares<kSize>(p, tile_memory, meta);
  __syncthreads();
  if (p.out.data == nullptr) {
    store_rows<kSize>(p, at, tile_memory, meta);
    store_cols<kSize>(p, at, tile_memory, meta);
  } else if (p.out.turned) {
    store_turned<kSize>(p, p.out, at, tile_memory);
  } else if (is_whole<kSize>(p, p.out, at)) {
    for_whole_units<kSize>(p.out, at, tile_memory, [](int, void* to, const unsigned char* from) {
      store_words<4>(to, reinterpret_cast<const Unit*>(from)->words);
    });
  } else {
#pragma unroll 1
    for (int n = static_cast<int>(threadIdx.x); n < Tile::kLines * Tile::kUnits; n += kThreads) {
      const int y = n / Tile::kUnits, x = n % Tile::kUnits;
      store_piece<kSize, 4>(p, p.out, at.line + y, at.k + x * Tile::kElements, unit_of<kSize>(tile_memory, y, x));
    }
  }
}

}  // namespace fretwork::two_four::format
