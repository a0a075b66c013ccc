// Tiles of a dense matrix for the 2:4 conversions. A unit is 16 bytes of neighbours along a line. A matrix whose memory
// neighbours belong to different lines is transposed in shared memory.
#pragma once

#include "device/load.cuh"
#include "device/types.cuh"
#include "ops/two_four/cuda/params.h"

namespace fretwork::two_four::format {

template <int kSize>
struct BitsOf;
template <>
struct BitsOf<1> {
  using type = u8;
};
template <>
struct BitsOf<2> {
  using type = u16;
};
template <>
struct BitsOf<4> {
  using type = u32;
};

using Unit = word_group<4>;

template <int kSize>
struct TileSizes {
  using bits = typename BitsOf<kSize>::type;
  static constexpr int kElements = 16 / kSize;        ///< of a unit
  static constexpr int kLines = kLineBytes / kSize;   ///< of a tile
  static constexpr int kUnits = kTileK / kElements;   ///< of a line of a tile
  static constexpr int kGroup = kSize == 4 ? 2 : 4;   ///< neighbours of which half are kept
  static constexpr int kGroups = kElements / kGroup;  ///< of a unit
  static constexpr int kMetaBytes = kGroups / 2;      ///< of a unit
  static constexpr int kPitch = kTileK * kSize;       ///< bytes of a line in shared memory
  static constexpr int kPerThread = kLines * kUnits / kThreads;

  /// Byte `at` of a line in shared memory. Units change places with `line`, so that neither lanes that go along a line
  /// nor lanes that go from line to line in steps of kElements meet in a bank.
  static __device__ __forceinline__ int place(int line, int at) {
    return line * kPitch + ((at / 16 ^ (line / kElements & 7)) * 16 + at % 16);
  }
};

/// The first line and element of this CTA's tile.
struct Place {
  i64 line, k;
};
template <int kSize>
__device__ __forceinline__ Place tile_place(const Params& p) {
  const u32 row = blockIdx.x / p.tiles_k;
  return {static_cast<i64>(row) * TileSizes<kSize>::kLines, static_cast<i64>(blockIdx.x - row * p.tiles_k) * kTileK};
}

template <int kSize>
__device__ __forceinline__ auto* element_at(const Matrix& m, i64 line, i64 k) {
  return static_cast<typename TileSizes<kSize>::bits*>(m.data) + line * m.line + k * m.along;
}

/// Element e of the bits that begin with word 0.
template <int kSize>
__device__ __forceinline__ void insert(u32* words, int e, u32 bits) {
  words[e * kSize / 4] |= bits << 8 * (e * kSize % 4);
}

/// Four of a thread's pieces of a tile, 16 or 8 bytes for each unit (of the dense matrix, of values); zeros outside the
/// matrix. How they are read is decided once, so that the wide reads follow each other closely.
template <int kSize, int kWords>
__device__ __forceinline__ void load_pieces(const Params& p, const Matrix& m, Place at, int first,
                                            word_group<kWords> (&pieces)[4]) {
  using Tile = TileSizes<kSize>;
  constexpr int kShare = 4 / kWords, kCount = 4 * kWords / kSize;  // elements of a line for one here; elements here
  const auto each = [&](const auto& load) {
#pragma unroll
    for (int u = 0; u < 4; ++u) {
      const int n = first + u * kThreads;
      const i64 line = at.line + n / Tile::kUnits, k = at.k + n % Tile::kUnits * Tile::kElements;
      pieces[u] = {};
      if (line < p.lines && k < p.k) {
        load(pieces[u], line, k);
      }
    }
  };
  if (m.wide) {
    each([&](word_group<kWords>& piece, i64 line, i64 k) {
      piece = *reinterpret_cast<const word_group<kWords>*>(element_at<kSize>(m, line, k / kShare));
    });
  } else {
    each([&](word_group<kWords>& piece, i64 line, i64 k) {
#pragma unroll
      for (int e = 0; e < kCount; ++e) {
        if (k + kShare * e < p.k) {
          insert<kSize>(piece.words, e, *element_at<kSize>(m, line, k / kShare + e));
        }
      }
    });
  }
}

/// A piece to global memory, 16 or 8 bytes (of the dense matrix, of values), without what lies outside the matrix.
template <int kSize, int kWords>
__device__ __forceinline__ void store_piece(const Params& p, const Matrix& m, i64 line, i64 k,
                                            const word_group<kWords>& piece) {
  constexpr int kShare = 4 / kWords;  // elements of a line for one here
  if (line < p.lines && k < p.k) {
    if (m.wide) {
      store_words<kWords>(element_at<kSize>(m, line, k / kShare), piece.words);
    } else {
#pragma unroll
      for (int e = 0; e < 4 * kWords / kSize; ++e) {
        if (k + kShare * e < p.k) {
          *element_at<kSize>(m, line, k / kShare + e) =
              static_cast<typename TileSizes<kSize>::bits>(piece.words[e * kSize / 4] >> 8 * (e * kSize % 4));
        }
      }
    }
  }
}

template <int kSize>
__device__ __forceinline__ Unit& unit_of(unsigned char* tile, int line, int unit) {
  return *reinterpret_cast<Unit*>(tile + TileSizes<kSize>::place(line, 16 * unit));
}

/// Four rows of kElements elements, one for each of as many lines, become four neighbours of each line; x[j] holds line
/// j's in its first kSize words.
template <int kSize>
__device__ __forceinline__ void turn_out_of_rows(const Unit (&rows)[4], int j, u32 (&x)[kSize]) {
  if constexpr (kSize == 4) {
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      x[r] = rows[r].words[j];
    }
  } else if constexpr (kSize == 2) {
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
template <int kSize>
__device__ __forceinline__ u32 turn_into_row(const u32 (&x)[16 / kSize][kSize], int r, int w) {
  if constexpr (kSize == 4) {
    return x[w][r];
  } else if constexpr (kSize == 2) {
    return __byte_perm(x[2 * w][r / 2], x[2 * w + 1][r / 2], r % 2 == 0 ? 0x5410u : 0x7632u);
  } else {
    const u32 byte = static_cast<u32>(r) * 0x11u + 0x40u;
    return __byte_perm(__byte_perm(x[4 * w][0], x[4 * w + 1][0], byte),
                       __byte_perm(x[4 * w + 2][0], x[4 * w + 3][0], byte), 0x5410u);
  }
}

/// Reads a tile whose neighbours in memory are of different lines. The caller joins the CTA.
template <int kSize>
__device__ __forceinline__ void load_turned(const Params& p, const Matrix& m, Place at, unsigned char* tile) {
  using Tile = TileSizes<kSize>;
  constexpr int kE = Tile::kElements;
  if (m.wide) {  // 8 units of a row of 128 bytes × 64 fours of rows
    Unit rows[2][4];
#pragma unroll
    for (int s = 0; s < 2; ++s) {
      const int piece = s * kThreads + static_cast<int>(threadIdx.x), c = piece % 8, q = piece / 8;
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const i64 line = at.line + c * kE, k = at.k + 4 * q + r;
        rows[s][r] = {};
        if (line < p.lines && k < p.k) {
          rows[s][r] = *reinterpret_cast<const Unit*>(element_at<kSize>(m, line, k));
        }
      }
    }
#pragma unroll
    for (int s = 0; s < 2; ++s) {
      const int piece = s * kThreads + static_cast<int>(threadIdx.x), c = piece % 8, q = piece / 8;
#pragma unroll
      for (int j = 0; j < kE; ++j) {
        word_group<kSize> four;
        turn_out_of_rows<kSize>(rows[s], j, four.words);
        *reinterpret_cast<word_group<kSize>*>(tile + Tile::place(c * kE + j, 4 * kSize * q)) = four;
      }
    }
  } else {
#pragma unroll 4
    for (int e = static_cast<int>(threadIdx.x); e < Tile::kLines * kTileK; e += kThreads) {
      const int y = e % Tile::kLines, x = e / Tile::kLines;
      typename Tile::bits bits = 0;
      if (at.line + y < p.lines && at.k + x < p.k) {
        bits = *element_at<kSize>(m, at.line + y, at.k + x);
      }
      *reinterpret_cast<typename Tile::bits*>(tile + Tile::place(y, kSize * x)) = bits;
    }
  }
}

/// Writes such a tile. The caller has joined the CTA.
template <int kSize>
__device__ __forceinline__ void store_turned(const Params& p, const Matrix& m, Place at, const unsigned char* tile) {
  using Tile = TileSizes<kSize>;
  constexpr int kE = Tile::kElements;
  if (m.wide) {
#pragma unroll
    for (int s = 0; s < 2; ++s) {
      const int piece = s * kThreads + static_cast<int>(threadIdx.x), c = piece % 8, q = piece / 8;
      u32 x[kE][kSize];
#pragma unroll
      for (int j = 0; j < kE; ++j) {
        const auto four = *reinterpret_cast<const word_group<kSize>*>(tile + Tile::place(c * kE + j, 4 * kSize * q));
#pragma unroll
        for (int w = 0; w < kSize; ++w) {
          x[j][w] = four.words[w];
        }
      }
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const i64 line = at.line + c * kE, k = at.k + 4 * q + r;
        if (line < p.lines && k < p.k) {
          const u32 row[4] = {turn_into_row<kSize>(x, r, 0), turn_into_row<kSize>(x, r, 1),
                              turn_into_row<kSize>(x, r, 2), turn_into_row<kSize>(x, r, 3)};
          store_words<4>(element_at<kSize>(m, line, k), row);
        }
      }
    }
  } else {
#pragma unroll 4
    for (int e = static_cast<int>(threadIdx.x); e < Tile::kLines * kTileK; e += kThreads) {
      const int y = e % Tile::kLines, x = e / Tile::kLines;
      if (at.line + y < p.lines && at.k + x < p.k) {
        *element_at<kSize>(m, at.line + y, at.k + x) =
            *reinterpret_cast<const typename Tile::bits*>(tile + Tile::place(y, kSize * x));
      }
    }
  }
}

/// Byte b of a line's metadata.
__device__ __forceinline__ u8* meta_byte(const Packed& m, i64 line, i64 b) {
  return m.words + ((line * m.words_line + (b >> m.word_shift) * m.words_along) << m.word_shift) +
         (b & ((i64{1} << m.word_shift) - 1));
}

/// The metadata of a unit; fours, which keep the first two, outside the matrix.
template <int kSize>
__device__ __forceinline__ u32 load_nibbles(const Params& p, i64 line, i64 k) {
  constexpr int kBytes = TileSizes<kSize>::kMetaBytes;
  const i64 b = k / (2 * TileSizes<kSize>::kGroup);
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

template <int kSize>
__device__ __forceinline__ void store_nibbles(const Params& p, i64 line, i64 k, u32 nibbles) {
  constexpr int kBytes = TileSizes<kSize>::kMetaBytes;
  const i64 b = k / (2 * TileSizes<kSize>::kGroup);
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
using Half = word_group<2>;

/// `first` becomes the place of a bad group, if that is less.
__device__ __forceinline__ void note_bad(const Params& p, i64 line, i64 k, u64& first) {
  const u64 place = static_cast<u64>(p.transposed ? k * p.lines + line : line * p.k + k);
  first = place < first ? place : first;
}

/// Makes *bad the least of all `first`, one of each thread; all ones are none.
__device__ __forceinline__ void report_first(const Params& p, u64 first) {
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

}  // namespace fretwork::two_four::format
