// bf16 tiles for CPUs that multiply pairs of bf16 (AVX512-BF16): half the panel and twice the rate of widened fp32.
#include "runtime/simd/tiles.h"

#if defined(__x86_64__)

// GCC 12 warns about its own intrinsics, which leave registers undefined on purpose.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>

#include <algorithm>
#include <cstring>

#define FRETWORK_TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")))

namespace fretwork::simd {
namespace {

constexpr std::int64_t kRows = 8, kLanes = 16, kVectors = 2, kGroup = 2;
/// Pairs packed at a time, so that what is written scattered stays in the first-level cache.
constexpr std::int64_t kPackPairs = 32;
/// Rows of a result that are turned at a time when it is not contiguous along its columns.
constexpr std::int64_t kTurnedRows = 128;
using Bits = std::uint16_t;
using Pair = std::uint32_t;

/// Sums of paired products are never denormal, which this would flush.
FRETWORK_TARGET inline __m512i round32(__m512 low, __m512 high) { return (__m512i)_mm512_cvtne2ps_pbh(high, low); }
FRETWORK_TARGET inline __m256i round16(__m512 v) { return (__m256i)_mm512_cvtneps_pbh(v); }

template <int kWide>
FRETWORK_TARGET inline void write_row(const __m512* sum, Bits* to, bool stream) {
  if constexpr (kWide == 1) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), round16(sum[0]));
  } else {
    const __m512i bits = round32(sum[0], sum[1]);
    stream ? _mm512_stream_si512(reinterpret_cast<__m512i*>(to), bits) : _mm512_storeu_si512(to, bits);
  }
}

/// Takes words 0, 32, 1, 33, … of two vectors, or the other half of them.
FRETWORK_TARGET inline __m512i interleaved(__m512i upper, __m512i lower, int half) {
  const __m512i n = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  const __m512i from = _mm512_add_epi32(_mm512_or_si512(n, _mm512_slli_epi32(n, 16)),
                                        _mm512_set1_epi32((32 << 16) + half * (16 << 16 | 16)));
  return _mm512_permutex2var_epi16(upper, from, lower);
}

/// The pairs of two rows of a panel.
template <int kWide>
FRETWORK_TARGET inline void pair_up(const Bits* upper, const Bits* lower, __m512i* pairs) {
  if constexpr (kWide == 1) {
    const __m512i first = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(upper)));
    const __m512i second = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(lower)));
    pairs[0] = _mm512_or_si512(first, _mm512_slli_epi32(second, 16));
  } else {
    const __m512i first = _mm512_loadu_si512(upper), second = _mm512_loadu_si512(lower);
    pairs[0] = interleaved(first, second, 0);
    pairs[1] = interleaved(first, second, 1);
  }
}

/// Rows [0, 8) of the left side as two pointers and two distances: more would not fit the integer registers, and GCC
/// would keep the rest in vector registers, in the way of the products.
struct Left {
  const Bits *low, *high;
  Left(const Bits* first, std::int64_t row, std::int64_t row3) : low(first), high(first + row3) {
    asm("" : "+r"(high));
    high += row;
  }
  const Bits* at(int i, std::int64_t row, std::int64_t row3) const {
    const Bits* const half = i < kRows / 2 ? low : high;
    return i % 4 == 3 ? half + row3 : half + i % 4 * row;
  }
};

/// The sums that a product starts from. These loops and those of write_sums are unrolled early, or GCC would pass the
/// sums through memory.
template <int kWide>
FRETWORK_TARGET [[gnu::always_inline]] inline void load_sums(const Product& p, __m512 (&sum)[kRows][kWide]) {
  const auto* const sums = static_cast<const float*>(p.sums);
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 8
    for (int v = 0; v < kWide; ++v) {
      sum[i][v] = p.add ? _mm512_loadu_ps(sums + i * p.sum_stride + v * kLanes) : _mm512_setzero_ps();
    }
  }
}

/// To p.out, rounded, or to p.sums as they are.
template <int kWide>
FRETWORK_TARGET [[gnu::always_inline]] inline void write_sums(const __m512 (&sum)[kRows][kWide], const Product& p) {
  if (p.out != nullptr) {
    Bits* const out = static_cast<Bits*>(p.out);
    const std::int64_t out_stride = p.out_stride;
    const bool stream = p.stream;
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i) {
      write_row<kWide>(sum[i], out + i * out_stride, stream);
    }
    return;
  }
  auto* const sums = static_cast<float*>(p.sums);
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 8
    for (int v = 0; v < kWide; ++v) {
      _mm512_storeu_ps(sums + i * p.sum_stride + v * kLanes, sum[i][v]);
    }
  }
}

/// Packs the panel [right, end) from raw rows on the way: add(pairs) multiplies a step.
template <int kWide, typename Add>
FRETWORK_TARGET [[gnu::always_inline]] inline void add_raw(const Product& p, const Bits* upper, Pair* right, Pair* end,
                                                           const Add& add) {
  __m512i pairs[kWide];
  for (const std::int64_t stride = p.raw_stride; right != end; right += kWide * kLanes, upper += kGroup * stride) {
    pair_up<kWide>(upper, upper + stride, pairs);
#pragma GCC unroll 8
    for (int v = 0; v < kWide; ++v) {
      _mm512_storeu_si512(right + v * kLanes, pairs[v]);
    }
    add(pairs);
  }
}

/// The loops over sums are unrolled early, as above.
template <int kWide>
FRETWORK_TARGET void multiply(const Product& p) {
  constexpr std::int64_t kWidth = kWide * kLanes;
  __m512 sum[kRows][kWide];
  load_sums(p, sum);
  const std::int64_t row = p.row_stride, step = p.step_stride;
  std::int64_t row3 = 3 * row;
  asm("" : "+r"(row3));
  const Term* const last = p.terms + p.count;
  for (const Term* term = p.terms; term != last; ++term) {
    // Read what `p` holds again: kept, it would take vector registers too, and pass through the pipes of the products.
    asm volatile("" ::: "memory");
    Left left(static_cast<const Bits*>(term->left) + p.shift, row, row3);
    Pair* right = static_cast<Pair*>(p.right) + term->depth * (kWidth / kGroup);
    // Blocks lie apart: fetch the beginning of the next one's rows at once, and its part of the panel step by step.
    const Term& next = term[term + 1 != last ? 1 : 0];
    const Left next_left(static_cast<const Bits*>(next.left) + p.shift, row, row3);
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i) {
      _mm_prefetch(next_left.at(i, row, row3), _MM_HINT_T0);
    }
    const auto add = [&](const __m512i* pairs) FRETWORK_TARGET {
#pragma GCC unroll 8
      for (int i = 0; i < kRows; ++i) {
        int pair;
        std::memcpy(&pair, left.at(i, row, row3), sizeof pair);
        const __m512bh a = (__m512bh)_mm512_set1_epi32(pair);
#pragma GCC unroll 8
        for (int v = 0; v < kWide; ++v) {
          sum[i][v] = _mm512_dpbf16_ps(sum[i][v], a, (__m512bh)pairs[v]);
        }
      }
      left.low += step;
      left.high += step;
    };
    Pair* const end = right + p.steps * kWidth;
    __m512i pairs[kWide];
    if (p.packs && term->raw != nullptr) {
      add_raw<kWide>(p, static_cast<const Bits*>(term->raw) + p.raw_shift, right, end, add);
      continue;
    }
    const std::int64_t ahead = (next.depth - term->depth) * (kWidth / kGroup);
    const bool fetches = p.raw_soon != 0 && term->raw != nullptr;
    const Bits* soon = fetches ? static_cast<const Bits*>(term->raw) + p.raw_soon : left.low;
    const std::int64_t soon_step = fetches ? kGroup * p.raw_stride : 0;
    for (; right != end; right += kWidth, soon += soon_step) {
      _mm_prefetch(soon, _MM_HINT_T1);
#pragma GCC unroll 8
      for (int v = 0; v < kWide; ++v) {
        pairs[v] = _mm512_loadu_si512(right + v * kLanes);
        _mm_prefetch(right + ahead + v * kLanes, _MM_HINT_T0);
      }
      add(pairs);
    }
  }
  write_sums(sum, p);
}

/// out[j] = (upper[j], lower[j]) for j < cols, zeros up to width; `lower` may be null: zeros.
FRETWORK_TARGET void interleave(const Bits* upper, const Bits* lower, std::int64_t cols, std::int64_t width,
                                Pair* out) {
  const auto some = [](std::int64_t n) {
    return static_cast<__mmask16>((std::uint32_t{1} << std::clamp<std::int64_t>(n, 0, kLanes)) - 1);
  };
  for (std::int64_t j = 0; j < width; j += kLanes) {
    const __mmask16 read = some(cols - j);
    const __m512i first = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(read, upper + j));
    const __m512i second =
        lower == nullptr ? _mm512_setzero_si512() : _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(read, lower + j));
    _mm512_mask_storeu_epi32(out + j, some(width - j), _mm512_or_si512(first, _mm512_slli_epi32(second, 16)));
  }
}

/// Four neighbouring pairs of each of four columns, to four rows of pairs.
FRETWORK_TARGET void transpose_pairs(const Bits* from, std::int64_t col_stride, Pair* out, std::int64_t width) {
  const auto load = [&](std::int64_t j) FRETWORK_TARGET {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + j * col_stride));
  };
  const auto store = [&](std::int64_t k, __m128i v)
                         FRETWORK_TARGET { _mm_storeu_si128(reinterpret_cast<__m128i*>(out + k * width), v); };
  const __m128i a = load(0), b = load(1), c = load(2), d = load(3);
  const __m128i ab_low = _mm_unpacklo_epi32(a, b), ab_high = _mm_unpackhi_epi32(a, b);
  const __m128i cd_low = _mm_unpacklo_epi32(c, d), cd_high = _mm_unpackhi_epi32(c, d);
  store(0, _mm_unpacklo_epi64(ab_low, cd_low));
  store(1, _mm_unpackhi_epi64(ab_low, cd_low));
  store(2, _mm_unpacklo_epi64(ab_high, cd_high));
  store(3, _mm_unpackhi_epi64(ab_high, cd_high));
}

/// Rows of pairs [0, pairs) when memory is contiguous along the depth, or not at all (then squares is 0).
FRETWORK_TARGET void pack_columns(const Bits* from, const Place& place, std::int64_t depth, std::int64_t cols,
                                  std::int64_t width, Pair* out) {
  const std::int64_t pairs = (depth + 1) / kGroup;
  const std::int64_t square_pairs = place.row_stride == 1 ? depth / (4 * kGroup) * 4 : 0;
  const std::int64_t square_cols = square_pairs > 0 ? cols / 4 * 4 : 0;
  for (std::int64_t j = 0; j < square_cols; j += 4) {
    for (std::int64_t k = 0; k < square_pairs; k += 4) {
      transpose_pairs(from + k * kGroup + j * place.col_stride, place.col_stride, out + k * width + j, width);
    }
  }
  for (std::int64_t k = 0; k < pairs; ++k) {
    const bool whole = k * kGroup + 1 < depth;
    for (std::int64_t j = k < square_pairs ? square_cols : 0; j < width; ++j) {
      const Bits* const at = from + k * kGroup * place.row_stride + j * place.col_stride;
      const Pair first = j < cols ? at[0] : 0, second = j < cols && whole ? at[place.row_stride] : 0;
      out[k * width + j] = first | second << 16;
    }
  }
}

FRETWORK_TARGET void pack_rows(const Place& from, std::int64_t depth, std::int64_t cols, std::int64_t width, Pair* out,
                               std::int64_t apart) {
  constexpr std::int64_t kWhole = 2 * kLanes;
  const std::int64_t ahead = kRowsAhead * from.row_stride;
  for (std::int64_t k = 0; k < depth; k += kGroup, out += width) {
    const Bits* const upper = static_cast<const Bits*>(from.data) + k * from.row_stride;
    const Bits* const lower = k + 1 < depth ? upper + from.row_stride : nullptr;
    Pair* panel = out;
    std::int64_t j = 0;
    for (; j + kWhole <= cols && width == kWhole && lower != nullptr; j += kWhole, panel += apart) {
      __builtin_prefetch(upper + ahead + j);
      __builtin_prefetch(lower + ahead + j);
      const __m512i first = _mm512_loadu_si512(upper + j), second = _mm512_loadu_si512(lower + j);
      _mm512_storeu_si512(panel, interleaved(first, second, 0));
      _mm512_storeu_si512(panel + kLanes, interleaved(first, second, 1));
    }
    for (; j + kRows <= cols && width == kRows && lower != nullptr; j += kRows, panel += apart) {
      const __m128i first = _mm_loadu_si128(reinterpret_cast<const __m128i*>(upper + j));
      const __m128i second = _mm_loadu_si128(reinterpret_cast<const __m128i*>(lower + j));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(panel), _mm_unpacklo_epi16(first, second));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(panel + 4), _mm_unpackhi_epi16(first, second));
    }
    for (; j < cols; j += width, panel += apart) {
      interleave(upper + j, lower != nullptr ? lower + j : nullptr, std::min(width, cols - j), width, panel);
    }
  }
}

FRETWORK_TARGET void pack(const Place& from, std::int64_t depth, std::int64_t cols, std::int64_t width, void* out,
                          std::int64_t apart) {
  const std::int64_t pairs_apart = apart / static_cast<std::int64_t>(sizeof(Pair));
  Pair* panel = static_cast<Pair*>(out);
  if (from.col_stride == 1) {
    pack_rows(from, depth, cols, width, panel, pairs_apart);
    return;
  }
  for (std::int64_t j = 0; j < cols; j += width, panel += pairs_apart) {
    for (std::int64_t k = 0; k < depth; k += kPackPairs * kGroup) {
      pack_columns(static_cast<const Bits*>(from.data) + k * from.row_stride + j * from.col_stride, from,
                   std::min(kPackPairs * kGroup, depth - k), std::min(width, cols - j), width,
                   panel + k / kGroup * width);
    }
  }
}

/// Four columns of `rows` sums, each to a row of its own. Reads whole vectors: sums come in multiples of kLanes.
FRETWORK_TARGET void turn(const float* from, std::int64_t stride, std::int64_t rows, float* out) {
  std::int64_t i = 0;
  for (; i + 4 <= rows; i += 4) {
    __m128 a = _mm_loadu_ps(from + i * stride), b = _mm_loadu_ps(from + (i + 1) * stride);
    __m128 c = _mm_loadu_ps(from + (i + 2) * stride), d = _mm_loadu_ps(from + (i + 3) * stride);
    _MM_TRANSPOSE4_PS(a, b, c, d);
    _mm_store_ps(out + i, a);
    _mm_store_ps(out + kTurnedRows + i, b);
    _mm_store_ps(out + 2 * kTurnedRows + i, c);
    _mm_store_ps(out + 3 * kTurnedRows + i, d);
  }
  for (; i < rows; ++i) {
    for (std::int64_t j = 0; j < 4; ++j) {
      out[j * kTurnedRows + i] = from[i * stride + j];
    }
  }
}

/// No masked stores: they are slow with narrowing on some CPUs.
FRETWORK_TARGET void store_row(const float* from, std::int64_t cols, Bits* out, bool stream) {
  const bool aligned = reinterpret_cast<std::uintptr_t>(out) % sizeof(__m256i) == 0;
  std::int64_t j = 0;
  for (; j + kLanes <= cols; j += kLanes) {
    const __m256i bits = round16(_mm512_loadu_ps(from + j));
    __m256i* const to = reinterpret_cast<__m256i*>(out + j);
    stream&& aligned ? _mm256_stream_si256(to, bits) : _mm256_storeu_si256(to, bits);
  }
  if (j < cols) {
    alignas(32) Bits tail[kLanes];
    _mm256_store_si256(reinterpret_cast<__m256i*>(tail), round16(_mm512_loadu_ps(from + j)));
    std::copy_n(tail, cols - j, out + j);
  }
}

FRETWORK_TARGET void store(const void* sums, std::int64_t sum_stride, std::int64_t rows, std::int64_t cols,
                           const Place& to, bool stream) {
  Bits* const out = static_cast<Bits*>(to.data);
  const float* const from = static_cast<const float*>(sums);
  if (to.col_stride == 1) {
    for (std::int64_t i = 0; i < rows; ++i) {
      store_row(from + i * sum_stride, cols, out + i * to.row_stride, stream);
    }
    return;
  }
  alignas(64) float turned[4 * kTurnedRows];
  for (std::int64_t i = 0; i < rows; i += kTurnedRows) {
    const std::int64_t height = std::min(kTurnedRows, rows - i);
    for (std::int64_t j = 0; j < cols; j += 4) {
      turn(from + i * sum_stride + j, sum_stride, height, turned);
      for (std::int64_t n = 0; n < std::min<std::int64_t>(4, cols - j); ++n) {
        Bits* const column = out + i * to.row_stride + (j + n) * to.col_stride;
        if (to.row_stride == 1) {
          store_row(turned + n * kTurnedRows, height, column, stream && height % 32 == 0);
          continue;
        }
        alignas(64) Bits rounded[kTurnedRows];
        store_row(turned + n * kTurnedRows, height, rounded, false);
        for (std::int64_t r = 0; r < height; ++r) {
          column[r * to.row_stride] = rounded[r];
        }
      }
    }
  }
}

}  // namespace

const Tiles* paired_bf16_tiles() {
  static constexpr Tiles table{
      kRows, kLanes,  kVectors, kGroup, sizeof(Bits), sizeof(float), false, true, &pack, {&multiply<1>, &multiply<2>},
      {},    nullptr, {},       &store};
  static const bool supported = __builtin_cpu_supports("avx512bf16") != 0 && __builtin_cpu_supports("avx512bw") != 0 &&
                                __builtin_cpu_supports("avx512dq") != 0 && __builtin_cpu_supports("avx512vl") != 0;
  return supported ? &table : nullptr;
}

}  // namespace fretwork::simd

#else

namespace fretwork::simd {
const Tiles* paired_bf16_tiles() { return nullptr; }
}  // namespace fretwork::simd

#endif
