// Kernels that make and undo the 2:4 format, line by line: compress, gather, to_dense, prune, check_metadata. A thread
// takes units of 16 bytes of a line, several at once.
#pragma once

#include "ops/two_four/cuda/format_tile.cuh"

namespace fretwork::two_four::format {

extern __shared__ __align__(16) unsigned char tile_memory[];

/// Which elements of group g are not zero, a bit each.
template <int kSize>
__device__ __forceinline__ u32 group_set(const Unit& unit, int g, u32 magnitude) {
  if constexpr (kSize == 4) {
    return ((unit.words[2 * g] & magnitude) != 0 ? 1u : 0u) | ((unit.words[2 * g + 1] & magnitude) != 0 ? 2u : 0u);
  } else if constexpr (kSize == 2) {
    // A half of at most 0x7fff becomes one with its highest bit set, unless it is 0.
    const u32 a = (unit.words[2 * g] & magnitude) + 0x7fff7fffu, b = (unit.words[2 * g + 1] & magnitude) + 0x7fff7fffu;
    const u32 set = (a >> 15 & 0x10001u) | (b >> 13 & 0x40004u);
    return (set | set >> 15) & 0xfu;
  } else {
    const u32 a = unit.words[g] & magnitude;
    return ((a & 0xffu) != 0 ? 1u : 0u) | ((a & 0xff00u) != 0 ? 2u : 0u) | ((a & 0xff0000u) != 0 ? 4u : 0u) |
           (a >> 24 != 0 ? 8u : 0u);
  }
}

template <int kSize>
__device__ __forceinline__ bool too_many(u32 set) {
  return kSize == 4 ? set == 3u : __popc(set) > 2;
}

/// The nibble that keeps a set; of fewer than may be kept, with the lowest free indices; of more, any valid one.
template <int kSize>
__device__ __forceinline__ u32 nibble_of(u32 set) {
  if constexpr (kSize == 4) {
    return set == 2u ? 0xeu : 0x4u;
  } else {  // sets 15 … 8, then 7 … 0
    return ((set & 8u) != 0 ? 0x498e4dccu : 0x49884444u) >> 4 * (set & 7u) & 0xfu;
  }
}

/// Adds what `nibble` keeps of group g to the kept half of a unit.
template <int kSize>
__device__ __forceinline__ void keep(const Unit& unit, int g, u32 nibble, Half& half) {
  const u32 first = nibble & 3u, second = nibble >> 2 & 3u;
  if constexpr (kSize == 4) {
    half.words[g] = (nibble & 2u) != 0 ? unit.words[2 * g + 1] : unit.words[2 * g];
  } else if constexpr (kSize == 2) {
    half.words[g] = __byte_perm(unit.words[2 * g], unit.words[2 * g + 1], first * 0x22u + second * 0x2200u + 0x1010u);
  } else {  // bytes 4 … 7 of the permutation are zeros
    half.words[g / 2] |= __byte_perm(unit.words[g], 0u, first | second << 4 | 0x4400u) << 16 * (g % 2);
  }
}

/// Spreads group g's half; zeros where nothing is kept.
template <int kSize>
__device__ __forceinline__ void spread(const Half& half, int g, u32 nibble, Unit& unit) {
  const u32 first = nibble & 3u, second = nibble >> 2 & 3u;
  if constexpr (kSize == 4) {
    unit.words[2 * g] = (nibble & 2u) != 0 ? 0u : half.words[g];
    unit.words[2 * g + 1] = (nibble & 2u) != 0 ? half.words[g] : 0u;
  } else if constexpr (kSize == 2) {  // for each element the bytes it takes: 4 is a zero
    const u32 take = 0x44444444u ^ 0x54u << 8 * first ^ 0x76u << 8 * second;
    unit.words[2 * g] = __byte_perm(half.words[g], 0u, take & 0xffffu);
    unit.words[2 * g + 1] = __byte_perm(half.words[g], 0u, take >> 16);
  } else {
    const u32 take = 0x4444u ^ 4u << 4 * first ^ 5u << 4 * second;
    unit.words[g] = __byte_perm(half.words[g / 2] >> 16 * (g % 2), 0u, take);
  }
}

/// Leaves of group g only the elements of a set.
template <int kSize>
__device__ __forceinline__ void clear_others(Unit& unit, int g, u32 set) {
  if constexpr (kSize == 1) {
    unit.words[g] &=
        (set & 1u) * 0xffu | (set >> 1 & 1u) * 0xff00u | (set >> 2 & 1u) * 0xff0000u | (set >> 3) * 0xff000000u;
  } else {
    constexpr u32 kOnes = kSize == 2 ? 0xffffu : 0xffffffffu;
#pragma unroll
    for (int w = 0; w < 2; ++w) {
      unit.words[2 * g + w] &= kSize == 2 ? (set >> 2 * w & 1u) * kOnes | (set >> (2 * w + 1) & 1u) * (kOnes << 16)
                                          : (set >> w & 1u) * kOnes;
    }
  }
}

template <int kSize>
__device__ __forceinline__ u32 element_of(const Unit& unit, int e) {
  constexpr u32 kOnes = kSize == 4 ? 0xffffffffu : (1u << 8 * (kSize % 4)) - 1u;
  return unit.words[e * kSize / 4] >> 8 * (e * kSize % 4) & kOnes;
}

/// An element's magnitude as a number that orders; NaNs are alike and above all.
template <int kSize>
__device__ __forceinline__ u32 order_of(const Params& p, u32 bits) {
  if (kSize == 1 && p.type == ElementType::i8) {
    const int x = static_cast<i8>(bits);
    return static_cast<u32>(x < 0 ? -x : x);
  }
  const u32 size = bits & p.magnitude;
  return size < p.largest ? size : p.largest;
}

/// The half of group g with the largest magnitudes; of equal ones the lower index wins.
template <int kSize>
__device__ __forceinline__ u32 largest_set(const Params& p, const Unit& unit, int g) {
  constexpr int kGroup = TileSizes<kSize>::kGroup;
  u32 x[kGroup];
#pragma unroll
  for (int e = 0; e < kGroup; ++e) {
    x[e] = order_of<kSize>(p, element_of<kSize>(unit, g * kGroup + e));
  }
  if constexpr (kGroup == 2) {
    return x[0] >= x[1] ? 1u : 2u;
  } else {
    u32 beaten[4] = {};  // by how many of the others
#pragma unroll
    for (int a = 0; a < 4; ++a) {
#pragma unroll
      for (int b = a + 1; b < 4; ++b) {
        const bool lower = x[a] >= x[b];
        beaten[a] += lower ? 0u : 1u;
        beaten[b] += lower ? 1u : 0u;
      }
    }
    return (beaten[0] < 2u ? 1u : 0u) | (beaten[1] < 2u ? 2u : 0u) | (beaten[2] < 2u ? 4u : 0u) |
           (beaten[3] < 2u ? 8u : 0u);
  }
}

/// Calls read(first) for four of this thread's units, kThreads apart, then use(slot, line, unit) for each, until
/// all of the tile's units have been used: the reads of four are under way together. Lines and units are the tile's.
template <int kSize, typename Read, typename Use>
__device__ __forceinline__ void for_units(const Read& read, const Use& use) {
  using Tile = TileSizes<kSize>;
#pragma unroll 1
  for (int first = static_cast<int>(threadIdx.x); first < Tile::kLines * Tile::kUnits; first += 4 * kThreads) {
    read(first);
#pragma unroll
    for (int u = 0; u < 4; ++u) {
      const int n = first + u * kThreads;
      use(u, n / Tile::kUnits, n % Tile::kUnits);
    }
  }
}

/// A dense matrix's units, whichever way it lies: use(line, unit, what it holds).
template <int kSize, typename Use>
__device__ __forceinline__ void for_dense_units(const Params& p, Place at, const Use& use) {
  using Tile = TileSizes<kSize>;
  if (p.dense.turned) {
    load_turned<kSize>(p, p.dense, at, tile_memory);
    __syncthreads();
  }
  Unit units[4];
  for_units<kSize>(
      [&](int first) {
        if (p.dense.turned) {
#pragma unroll
          for (int u = 0; u < 4; ++u) {
            const int n = first + u * kThreads;
            units[u] = unit_of<kSize>(tile_memory, n / Tile::kUnits, n % Tile::kUnits);
          }
        } else {
          load_pieces<kSize, 4>(p, p.dense, at, first, units);
        }
      },
      [&](int slot, int line, int unit) { use(line, unit, units[slot]); });
}

/// Writes a unit of a dense matrix, which lies either way; finish_units follows.
template <int kSize>
__device__ __forceinline__ void put_unit(const Params& p, const Matrix& m, Place at, int line, int unit,
                                         const Unit& what) {
  if (m.turned) {
    unit_of<kSize>(tile_memory, line, unit) = what;
  } else {
    store_piece<kSize, 4>(p, m, at.line + line, at.k + unit * TileSizes<kSize>::kElements, what);
  }
}
template <int kSize>
__device__ __forceinline__ void finish_units(const Params& p, const Matrix& m, Place at) {
  if (m.turned) {
    __syncthreads();
    store_turned<kSize>(p, m, at, tile_memory);
  }
}

/// Four bytes of each of four neighbouring lanes, byte j for line j, become those of line lane % 4, lane by lane.
__device__ __forceinline__ u32 turn_bytes(u32 mine) {
  const u32 lane = threadIdx.x % 4;
  const u32 other = __shfl_xor_sync(~0u, mine, 2);
  // Lanes 0 and 1 take lines 0 and 1, lanes 2 and 3 the others: two bytes of an own and of another lane.
  const u32 halves = lane < 2 ? __byte_perm(mine, other, 0x5410u) : __byte_perm(other, mine, 0x7632u);
  const u32 near = __shfl_xor_sync(~0u, halves, 1);
  return lane % 2 == 0 ? __byte_perm(halves, near, 0x6240u) : __byte_perm(near, halves, 0x7351u);
}

/// Compress where nothing is cut or turned: all of a thread's units are under way at once, its lines at equal
/// distances.
template <int kSize>
__device__ __forceinline__ void compress_plain(const Params& p, Place at) {
  using Tile = TileSizes<kSize>;
  constexpr int kRows = kThreads / Tile::kUnits, kCount = Tile::kPerThread;
  const int x = static_cast<int>(threadIdx.x) % Tile::kUnits;
  const i64 line = at.line + threadIdx.x / Tile::kUnits, k = at.k + x * Tile::kElements;
  Unit units[kCount];
  {
    const char* from = reinterpret_cast<const char*>(element_at<kSize>(p.dense, line, k));
    const i64 step = p.dense.line * (kSize * kRows);
#pragma unroll
    for (int n = 0; n < kCount; ++n) {
      units[n] = *reinterpret_cast<const Unit*>(from + n * step);
    }
  }
  u64 first = ~0ull;
  u32 nibbles[kCount];
  char* to = reinterpret_cast<char*>(element_at<kSize>(p.packed.values, line, k / 2));
  const i64 step = p.packed.values.line * (kSize * kRows);
#pragma unroll
  for (int n = 0; n < kCount; ++n) {
    Half half = {};
    nibbles[n] = 0;
    bool bad = false;
#pragma unroll
    for (int g = 0; g < Tile::kGroups; ++g) {
      const u32 set = group_set<kSize>(units[n], g, p.magnitude), nibble = nibble_of<kSize>(set);
      nibbles[n] |= nibble << 4 * g;
      keep<kSize>(units[n], g, nibble, half);
      bad = bad || too_many<kSize>(set);
    }
    if (bad) [[unlikely]] {
#pragma unroll
      for (int g = Tile::kGroups - 1; g >= 0; --g) {
        if (too_many<kSize>(group_set<kSize>(units[n], g, p.magnitude))) {
          note_bad(p, line + n * kRows, k + g * Tile::kGroup, first);
        }
      }
    }
    if (p.packed.words != nullptr) {
      store_words<2>(to + n * step, half.words);
    }
  }
  if (p.packed.words != nullptr) {
    u8* words = meta_byte(p.packed, line, k / (2 * Tile::kGroup));
    const i64 words_step = (p.packed.words_line << p.packed.word_shift) * kRows;
    if constexpr (Tile::kMetaBytes == 2) {
#pragma unroll
      for (int n = 0; n < kCount; ++n) {
        *reinterpret_cast<u16*>(words + n * words_step) = static_cast<u16>(nibbles[n]);
      }
    } else {  // four lanes exchange what they have of four lines
      words += threadIdx.x % 4 * (words_step - 1);
#pragma unroll
      for (int n = 0; n < kCount; n += 4) {
        const u32 four = turn_bytes(nibbles[n] | nibbles[n + 1] << 8 | nibbles[n + 2] << 16 | nibbles[n + 3] << 24);
        *reinterpret_cast<u32*>(words + n * words_step) = four;
      }
    }
  }
  report_first(p, first);
}

/// Without values it only looks.
template <int kSize>
__global__ void __launch_bounds__(kThreads) compress(const __grid_constant__ Params p) {
  using Tile = TileSizes<kSize>;
  const Place at = tile_place<kSize>(p);
  if (p.plain != 0) {
    compress_plain<kSize>(p, at);
    return;
  }
  u64 first = ~0ull;
  for_dense_units<kSize>(p, at, [&](int y, int x, const Unit& unit) {
    const i64 line = at.line + y, k = at.k + x * Tile::kElements;
    Half half = {};
    u32 nibbles = 0;
#pragma unroll
    for (int g = 0; g < Tile::kGroups; ++g) {
      const u32 set = group_set<kSize>(unit, g, p.magnitude), nibble = nibble_of<kSize>(set);
      nibbles |= nibble << 4 * g;
      keep<kSize>(unit, g, nibble, half);
      if (too_many<kSize>(set)) {
        note_bad(p, line, k + g * Tile::kGroup, first);
      }
    }
    if (p.packed.words != nullptr) {
      store_piece<kSize, 2>(p, p.packed.values, line, k, half);
      store_nibbles<kSize>(p, line, k, nibbles);
    }
  });
  report_first(p, first);
}

template <int kSize>
__global__ void __launch_bounds__(kThreads) gather(const __grid_constant__ Params p) {
  using Tile = TileSizes<kSize>;
  const Place at = tile_place<kSize>(p);
  for_dense_units<kSize>(p, at, [&](int y, int x, const Unit& unit) {
    const i64 line = at.line + y, k = at.k + x * Tile::kElements;
    const u32 nibbles = load_nibbles<kSize>(p, line, k);
    Half half = {};
#pragma unroll
    for (int g = 0; g < Tile::kGroups; ++g) {
      keep<kSize>(unit, g, nibbles >> 4 * g & 0xfu, half);
    }
    store_piece<kSize, 2>(p, p.packed.values, line, k, half);
  });
}

template <int kSize>
__global__ void __launch_bounds__(kThreads) to_dense(const __grid_constant__ Params p) {
  using Tile = TileSizes<kSize>;
  const Place at = tile_place<kSize>(p);
  Half halves[4];
  u32 nibbles[4];
  for_units<kSize>(
      [&](int first) {
        load_pieces<kSize, 2>(p, p.packed.values, at, first, halves);
#pragma unroll
        for (int u = 0; u < 4; ++u) {
          const int n = first + u * kThreads;
          nibbles[u] = load_nibbles<kSize>(p, at.line + n / Tile::kUnits, at.k + n % Tile::kUnits * Tile::kElements);
        }
      },
      [&](int slot, int y, int x) {
        Unit unit;
#pragma unroll
        for (int g = 0; g < Tile::kGroups; ++g) {
          spread<kSize>(halves[slot], g, nibbles[slot] >> 4 * g & 0xfu, unit);
        }
        put_unit<kSize>(p, p.dense, at, y, x, unit);
      });
  finish_units<kSize>(p, p.dense, at);
}

/// By magnitude, from dense to out, which may be the same. A thread reads and writes the same units, so one tile in
/// shared memory serves both.
template <int kSize>
__global__ void __launch_bounds__(kThreads) prune(const __grid_constant__ Params p) {
  const Place at = tile_place<kSize>(p);
  for_dense_units<kSize>(p, at, [&](int y, int x, const Unit& unit) {
    Unit rest = unit;
#pragma unroll
    for (int g = 0; g < TileSizes<kSize>::kGroups; ++g) {
      clear_others<kSize>(rest, g, largest_set<kSize>(p, unit, g));
    }
    put_unit<kSize>(p, p.out, at, y, x, rest);
  });
  finish_units<kSize>(p, p.out, at);
}

/// Whether what is kept of group g of a line is zero.
__device__ __forceinline__ bool keeps_nothing(const Params& p, i64 line, i64 g) {
  const Matrix& m = p.packed.values;
  const int kept = p.group / 2;
  u32 bits = 0;
  for (int e = 0; e < kept; ++e) {
    const i64 at = line * m.line + (g * kept + e) * m.along;
    bits |= p.element_bytes == 1   ? static_cast<const u8*>(m.data)[at]
            : p.element_bytes == 2 ? static_cast<const u16*>(m.data)[at]
                                   : static_cast<const u32*>(m.data)[at];
  }
  return (bits & p.magnitude) == 0;
}

/// Every nibble must be a valid one where its group keeps a number. `cols`, where it has words, gets nibbles of which
/// those of other groups are 4, with keep_valid only where they were not valid, and 4 behind the last group. p.tiles_k
/// counts tiles of bytes.
template <int kCtaThreads>
__global__ void __launch_bounds__(kCtaThreads) check_metadata(const __grid_constant__ Params p) {
  constexpr int kEach = kCheckBytes * kCheckLines / kCtaThreads;
  const u32 row = blockIdx.x / p.tiles_k;
  const i64 top = static_cast<i64>(row) * kCheckLines, groups = p.k / p.group;
  const i64 left = static_cast<i64>(blockIdx.x - row * p.tiles_k) * kCheckBytes;
  const bool writes = p.cols.words != nullptr;
  u8 bytes[kEach];
  u64 first = ~0ull;
#pragma unroll
  for (int n = 0; n < kEach; ++n) {
    const int at = n * kCtaThreads + static_cast<int>(threadIdx.x);
    const i64 line = top + at / kCheckBytes, b = left + at % kCheckBytes;
    bytes[n] = line < p.lines && 2 * b < groups ? *meta_byte(p.packed, line, b) : 0x44;
  }
#pragma unroll 1
  for (int n = 0; n < kEach; ++n) {
    const int at = n * kCtaThreads + static_cast<int>(threadIdx.x);
    const i64 line = top + at / kCheckBytes, b = left + at % kCheckBytes;
    if (line >= p.lines || b >= p.packed.bytes) {
      continue;
    }
    u32 canonical = 0x44;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const i64 g = 2 * b + h;
      if (g >= groups) {
        continue;
      }
      const u32 nibble = bytes[n] >> 4 * h & 0xfu;
      const bool valid = (p.valid >> nibble & 1u) != 0;
      const bool empty = (!valid || (writes && p.keep_valid == 0)) && keeps_nothing(p, line, g);
      if (!valid && !empty) {
        note_bad(p, line, g * p.group, first);
      }
      canonical ^= empty ? 0u : (nibble ^ 4u) << 4 * h;
    }
    if (writes) {
      *meta_byte(p.cols, line, b) = static_cast<u8>(canonical);
    }
  }
  report_first(p, first);
}

}  // namespace fretwork::two_four::format
