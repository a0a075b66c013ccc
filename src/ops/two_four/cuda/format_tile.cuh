// Tiles of a dense matrix for the 2:4 conversions. A unit is 16 bytes of neighbours along a line. A matrix whose memory
// neighbours belong to different lines is transposed in shared memory.
#pragma once

#include "device/load.cuh"
#include "device/types.cuh"
#include "ops/two_four/cuda/params_format.cuh"

namespace fretwork {

template <int SIZE>
struct format_bits;
template <>
struct format_bits<1> {
  using type = u8;
};
template <>
struct format_bits<2> {
  using type = u16;
};
template <>
struct format_bits<4> {
  using type = u32;
};

using format_unit = word_group<4>;

template <int SIZE>
struct format_tile {
  using bits = typename format_bits<SIZE>::type;
  static constexpr int kElements = 16 / SIZE;              ///< of a unit
  static constexpr int kLines = kFormatLineBytes / SIZE;   ///< of a tile
  static constexpr int kUnits = kFormatTileK / kElements;  ///< of a line of a tile
  static constexpr int kGroup = SIZE == 4 ? 2 : 4;         ///< neighbours of which half are kept
  static constexpr int kGroups = kElements / kGroup;       ///< of a unit
  static constexpr int kMetaBytes = kGroups / 2;           ///< of a unit
  static constexpr int kPitch = kFormatTileK * SIZE;       ///< bytes of a line in shared memory
  static constexpr int kPerThread = kLines * kUnits / kFormatThreads;

  /// Byte `at` of a line in shared memory. Units change places with `line`, so that neither lanes that go along a line
  /// nor lanes that go from line to line in steps of kElements meet in a bank.
  static __device__ __forceinline__ int place(int line, int at) {
    return line * kPitch + ((at / 16 ^ (line / kElements & 7)) * 16 + at % 16);
  }
};

/// The first line and element of this CTA's tile.
struct FormatPlace {
  i64 line, k;
};
template <int SIZE>
__device__ __forceinline__ FormatPlace format_place(const FormatParams& p) {
  const u32 row = blockIdx.x / p.tiles_k;
  return {static_cast<i64>(row) * format_tile<SIZE>::kLines,
          static_cast<i64>(blockIdx.x - row * p.tiles_k) * kFormatTileK};
}

template <int SIZE>
__device__ __forceinline__ auto* format_element(const FormatMatrix& m, i64 line, i64 k) {
  return static_cast<typename format_tile<SIZE>::bits*>(m.data) + line * m.line + k * m.along;
}

/// Element e of the bits that begin with word 0.
template <int SIZE>
__device__ __forceinline__ void insert(u32* words, int e, u32 bits) {
  words[e * SIZE / 4] |= bits << 8 * (e * SIZE % 4);
}

/// Four of a thread's pieces of a tile, 16 or 8 bytes for each unit (of the dense matrix, of values); zeros outside the
/// matrix. How they are read is decided once, so that the wide reads follow each other closely.
template <int SIZE, int WORDS>
__device__ __forceinline__ void load_pieces(const FormatParams& p, const FormatMatrix& m, FormatPlace at, int first,
                                            word_group<WORDS> (&pieces)[4]) {
  using Tile = format_tile<SIZE>;
  constexpr int kShare = 4 / WORDS, kCount = 4 * WORDS / SIZE;  // elements of a line for one here; elements here
  const auto each = [&](const auto& load) {
#pragma unroll
    for (int u = 0; u < 4; ++u) {
      const int n = first + u * kFormatThreads;
      const i64 line = at.line + n / Tile::kUnits, k = at.k + n % Tile::kUnits * Tile::kElements;
      pieces[u] = {};
      if (line < p.lines && k < p.k) {
        load(pieces[u], line, k);
      }
    }
  };
  if (m.wide) {
    each([&](word_group<WORDS>& piece, i64 line, i64 k) {
      piece = *reinterpret_cast<const word_group<WORDS>*>(format_element<SIZE>(m, line, k / kShare));
    });
  } else {
    each([&](word_group<WORDS>& piece, i64 line, i64 k) {
#pragma unroll
      for (int e = 0; e < kCount; ++e) {
        if (k + kShare * e < p.k) {
          insert<SIZE>(piece.words, e, *format_element<SIZE>(m, line, k / kShare + e));
        }
      }
    });
  }
}

/// A unit to global memory, without what lies outside the matrix.
template <int SIZE>
__device__ __forceinline__ void store_unit(const FormatParams& p, const FormatMatrix& m, i64 line, i64 k,
                                           const format_unit& unit) {
  if (line < p.lines && k < p.k) {
    if (m.wide) {
      store_words<4>(format_element<SIZE>(m, line, k), unit.words);
    } else {
#pragma unroll
      for (int e = 0; e < 16 / SIZE; ++e) {
        if (k + e < p.k) {
          *format_element<SIZE>(m, line, k + e) =
              static_cast<typename format_tile<SIZE>::bits>(unit.words[e * SIZE / 4] >> 8 * (e * SIZE % 4));
        }
      }
    }
  }
}

template <int SIZE>
__device__ __forceinline__ format_unit& unit_of(unsigned char* tile, int line, int unit) {
  return *reinterpret_cast<format_unit*>(tile + format_tile<SIZE>::place(line, 16 * unit));
}

/// Four rows of kElements elements, one for each of as many lines, become four neighbours of each line; x[j] holds line
/// j's in its first SIZE words.
template <int SIZE>
__device__ __forceinline__ void turn_out_of_rows(const format_unit (&rows)[4], int j, u32 (&x)[SIZE]) {
  if constexpr (SIZE == 4) {
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      x[r] = rows[r].words[j];
    }
  } else if constexpr (SIZE == 2) {
    const u32 half = j % 2 == 0 ? 0x5410u : 0x7632u;
    x[0] = __byte_perm(rows[0].words[j / 2], rows[1].words[j / 2], half);
    x[1] = __byte_perm(rows[2].words[j / 2], rows[3].words[j / 2], half);
  } else {
    const u32 byte = static_cast<u32>(j % 4) * 0x11u + 0x40u;
    x[0] = __byte_perm(__byte_perm(rows[0].words[j / 4], rows[1].words[j / 4], byte),
                       __byte_perm(rows[2].words[j / 4], rows[3].words[j / 4], byte), 0x5410u);
  }
}

/// The way back: word w of row r from the lines that share it.
template <int SIZE>
__device__ __forceinline__ u32 turn_into_row(const u32 (&x)[16 / SIZE][SIZE], int r, int w) {
  if constexpr (SIZE == 4) {
    return x[w][r];
  } else if constexpr (SIZE == 2) {
    return __byte_perm(x[2 * w][r / 2], x[2 * w + 1][r / 2], r % 2 == 0 ? 0x5410u : 0x7632u);
  } else {
    const u32 byte = static_cast<u32>(r) * 0x11u + 0x40u;
    return __byte_perm(__byte_perm(x[4 * w][0], x[4 * w + 1][0], byte),
                       __byte_perm(x[4 * w + 2][0], x[4 * w + 3][0], byte), 0x5410u);
  }
}

/// Reads a tile whose neighbours in memory are of different lines. The caller joins the CTA.
template <int SIZE>
__device__ __forceinline__ void load_turned(const FormatParams& p, const FormatMatrix& m, FormatPlace at,
                                            unsigned char* tile) {
  using Tile = format_tile<SIZE>;
  constexpr int kE = Tile::kElements;
  if (m.wide) {  // 8 units of a row of 128 bytes × 64 fours of rows
    format_unit rows[2][4];
#pragma unroll
    for (int s = 0; s < 2; ++s) {
      const int piece = s * kFormatThreads + static_cast<int>(threadIdx.x), c = piece % 8, q = piece / 8;
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const i64 line = at.line + c * kE, k = at.k + 4 * q + r;
        rows[s][r] = {};
        if (line < p.lines && k < p.k) {
          rows[s][r] = *reinterpret_cast<const format_unit*>(format_element<SIZE>(m, line, k));
        }
      }
    }
#pragma unroll
    for (int s = 0; s < 2; ++s) {
      const int piece = s * kFormatThreads + static_cast<int>(threadIdx.x), c = piece % 8, q = piece / 8;
#pragma unroll
      for (int j = 0; j < kE; ++j) {
        word_group<SIZE> four;
        turn_out_of_rows<SIZE>(rows[s], j, four.words);
        *reinterpret_cast<word_group<SIZE>*>(tile + Tile::place(c * kE + j, 4 * SIZE * q)) = four;
      }
    }
  } else {
#pragma unroll 4
    for (int e = static_cast<int>(threadIdx.x); e < Tile::kLines * kFormatTileK; e += kFormatThreads) {
      const int y = e % Tile::kLines, x = e / Tile::kLines;
      typename Tile::bits bits = 0;
      if (at.line + y < p.lines && at.k + x < p.k) {
        bits = *format_element<SIZE>(m, at.line + y, at.k + x);
      }
      *reinterpret_cast<typename Tile::bits*>(tile + Tile::place(y, SIZE * x)) = bits;
    }
  }
}

/// Writes such a tile. The caller has joined the CTA.
template <int SIZE>
__device__ __forceinline__ void store_turned(const FormatParams& p, const FormatMatrix& m, FormatPlace at,
                                             const unsigned char* tile) {
  using Tile = format_tile<SIZE>;
  constexpr int kE = Tile::kElements;
  if (m.wide) {
#pragma unroll
    for (int s = 0; s < 2; ++s) {
      const int piece = s * kFormatThreads + static_cast<int>(threadIdx.x), c = piece % 8, q = piece / 8;
      u32 x[kE][SIZE];
#pragma unroll
      for (int j = 0; j < kE; ++j) {
        const auto four = *reinterpret_cast<const word_group<SIZE>*>(tile + Tile::place(c * kE + j, 4 * SIZE * q));
#pragma unroll
        for (int w = 0; w < SIZE; ++w) {
          x[j][w] = four.words[w];
        }
      }
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const i64 line = at.line + c * kE, k = at.k + 4 * q + r;
        if (line < p.lines && k < p.k) {
          const u32 row[4] = {turn_into_row<SIZE>(x, r, 0), turn_into_row<SIZE>(x, r, 1), turn_into_row<SIZE>(x, r, 2),
                              turn_into_row<SIZE>(x, r, 3)};
          store_words<4>(format_element<SIZE>(m, line, k), row);
        }
      }
    }
  } else {
#pragma unroll 4
    for (int e = static_cast<int>(threadIdx.x); e < Tile::kLines * kFormatTileK; e += kFormatThreads) {
      const int y = e % Tile::kLines, x = e / Tile::kLines;
      if (at.line + y < p.lines && at.k + x < p.k) {
        *format_element<SIZE>(m, at.line + y, at.k + x) =
            *reinterpret_cast<const typename Tile::bits*>(tile + Tile::place(y, SIZE * x));
      }
    }
  }
}

/// Byte b of a line's metadata.
__device__ __forceinline__ u8* meta_byte(const FormatPacked& m, i64 line, i64 b) {
  return m.words + ((line * m.words_line + (b >> m.word_shift) * m.words_along) << m.word_shift) +
         (b & ((i64{1} << m.word_shift) - 1));
}

/// The metadata of a unit; fours, which keep the first two, outside the matrix.
template <int SIZE>
__device__ __forceinline__ u32 load_nibbles(const FormatParams& p, i64 line, i64 k) {
  constexpr int kBytes = format_tile<SIZE>::kMetaBytes;
  const i64 b = k / (2 * format_tile<SIZE>::kGroup);
  u32 nibbles = 0x4444u;
  if (line < p.lines && b < p.packed.bytes) {
    if (kBytes == 2 && p.packed.word_shift > 0) {
      nibbles = *reinterpret_cast<const u16*>(meta_byte(p.packed, line, b));
    } else {
      nibbles = *meta_byte(p.packed, line, b);
      if (kBytes == 2) {
        nibbles |= b + 1 < p.packed.bytes ? *meta_byte(p.packed, line, b + 1) << 8 : 0x4400u;
      }
    }
  }
  return nibbles;
}

template <int SIZE>
__device__ __forceinline__ void store_nibbles(const FormatParams& p, i64 line, i64 k, u32 nibbles) {
  constexpr int kBytes = format_tile<SIZE>::kMetaBytes;
  const i64 b = k / (2 * format_tile<SIZE>::kGroup);
  if (line < p.lines && b < p.packed.bytes) {
    if (kBytes == 2 && p.packed.word_shift > 0) {
      *reinterpret_cast<u16*>(meta_byte(p.packed, line, b)) = static_cast<u16>(nibbles);
    } else {
      *meta_byte(p.packed, line, b) = static_cast<u8>(nibbles);
      if (kBytes == 2 && b + 1 < p.packed.bytes) {
        *meta_byte(p.packed, line, b + 1) = static_cast<u8>(nibbles >> 8);
      }
    }
  }
}

/// What is kept of a unit: 8 bytes.
using format_half = word_group<2>;

template <int SIZE>
__device__ __forceinline__ void store_values(const FormatParams& p, i64 line, i64 k, const format_half& half) {
  const FormatMatrix& m = p.packed.values;
  if (line < p.lines && k < p.k) {
    if (m.wide) {
      store_words<2>(format_element<SIZE>(m, line, k / 2), half.words);
    } else {
#pragma unroll
      for (int e = 0; e < 8 / SIZE; ++e) {
        if (k + 2 * e < p.k) {
          *format_element<SIZE>(m, line, k / 2 + e) =
              static_cast<typename format_tile<SIZE>::bits>(half.words[e * SIZE / 4] >> 8 * (e * SIZE % 4));
        }
      }
    }
  }
}

/// Makes *bad the least of all `first`, one of each thread; all ones are none.
__device__ __forceinline__ void report_first(const FormatParams& p, u64 first) {
  if (p.bad != nullptr && __any_sync(~0u, first != ~0ull)) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
      const u64 other = __shfl_xor_sync(~0u, first, step);
      first = other < first ? other : first;
    }
    if (threadIdx.x % 32 == 0) {
      atomicMin(p.bad, first);
    }
  }
}

}  // namespace fretwork
