// CPU kernels of 2:4 products on AVX512-BF16: a group's two kept values are one word, and one instruction multiplies
// and adds both. bf16 with fp32 sums, and int16 with int32 sums.
#include "ops/two_four/cpu/run.h"
#include "runtime/simd/tiles.h"

#if defined(__x86_64__)

// GCC 12 warns about its own intrinsics, which leave registers undefined on purpose.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#include <immintrin.h>

#include <algorithm>
#include <cstring>

#define FRETWORK_TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")))

namespace fretwork::two_four::cpu {
namespace {

using Pair = std::uint32_t;
constexpr std::int64_t kLanes = 16;
/// A group of four keeps one of six pairs of places. Its row in a panel is found by its nibble, from the least valid
/// one on: rows in between stay empty, and no cache line of theirs is ever touched.
constexpr std::int64_t kFirst = 0x4, kSlots = 0xe - kFirst + 1;

struct Bf16Pairs {
  using Sum = float;
  FRETWORK_TARGET static __m512i add(__m512i sum, __m512i a, __m512i b) {
    return (__m512i)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
  }
  FRETWORK_TARGET static float total(__m512i sum) { return _mm512_reduce_add_ps((__m512)sum); }
  FRETWORK_TARGET static __m512i plus(__m512i a, __m512i b) { return (__m512i)_mm512_add_ps((__m512)a, (__m512)b); }
};

struct I16Pairs {
  using Sum = std::int32_t;
  FRETWORK_TARGET static __m512i add(__m512i sum, __m512i a, __m512i b) {
    return _mm512_add_epi32(sum, _mm512_madd_epi16(a, b));
  }
  FRETWORK_TARGET static std::int32_t total(__m512i sum) { return _mm512_reduce_add_epi32(sum); }
  FRETWORK_TARGET static __m512i plus(__m512i a, __m512i b) { return _mm512_add_epi32(a, b); }
};

/// The totals of four sums.
template <typename Op>
FRETWORK_TARGET [[gnu::always_inline]] inline __m128i totals(__m512i a, __m512i b, __m512i c, __m512i d) {
  const __m512i ab = Op::plus(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
  const __m512i cd = Op::plus(_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
  __m512i all = Op::plus(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
  all = Op::plus(all, _mm512_shuffle_i64x2(all, all, 0x4e));
  return _mm512_castsi512_si128(Op::plus(all, _mm512_shuffle_i64x2(all, all, 0xb1)));
}

/// The loops over sums are unrolled early, or GCC would pass the sums through memory.
template <typename Op, int kLines, int kVectors>
FRETWORK_TARGET void add_rows(const Lines& p, const std::byte* panel) {
  using Sum = typename Op::Sum;
  constexpr std::int64_t kRowBytes = kVectors * kLanes * std::int64_t{sizeof(Pair)}, kGroupBytes = kSlots * kRowBytes;
  __m512i sum[kLines][kVectors];
  const std::byte* values[kLines];
  const std::uint8_t* nibbles[kLines];
  Sum* const sums = static_cast<Sum*>(p.sums);
#pragma GCC unroll 8
  for (int i = 0; i < kLines; ++i) {
    values[i] = static_cast<const std::byte*>(p.values[static_cast<std::size_t>(i)]);
    nibbles[i] = p.nibbles[static_cast<std::size_t>(i)];
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      sum[i][v] = p.add ? _mm512_loadu_si512(sums + i * p.sum_stride + v * kLanes) : _mm512_setzero_si512();
    }
  }
  const auto add = [&](int i, std::int64_t g, std::int64_t nibble, const std::byte* group) FRETWORK_TARGET {
    int pair;
    std::memcpy(&pair, values[i] + g * std::int64_t{sizeof(Pair)}, sizeof pair);
    const __m512i a = _mm512_set1_epi32(pair);
    const std::byte* const row = group + (nibble - kFirst) * kRowBytes;
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      sum[i][v] = Op::add(sum[i][v], a, _mm512_loadu_si512(row + v * sizeof(__m512i)));
    }
  };
  std::int64_t g = 0;
  for (; g + 2 <= p.groups; g += 2, panel += 2 * kGroupBytes) {
#pragma GCC unroll 8
    for (int i = 0; i < kLines; ++i) {
      const std::int64_t both = nibbles[i][g / 2];
      add(i, g, both & 15, panel);
      add(i, g + 1, both >> 4, panel + kGroupBytes);
    }
  }
  if (g < p.groups) {
#pragma GCC unroll 8
    for (int i = 0; i < kLines; ++i) {
      add(i, g, nibbles[i][g / 2] & 15, panel);
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < kLines; ++i) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      _mm512_storeu_si512(sums + i * p.sum_stride + v * kLanes, sum[i][v]);
    }
  }
}

template <typename Op, int kVectors>
void add_some_rows(const Lines& lines, const std::byte* panel) {
  if (lines.count == kMaxLines) {
    return add_rows<Op, kMaxLines, kVectors>(lines, panel);
  }
  for (Lines p = lines; p.count > 0; p.drop<typename Op::Sum>(1)) {
    add_rows<Op, 1, kVectors>(p, panel);
  }
}

template <typename Op>
void add_all_rows(const Lines& p, const void* panel, int vectors) {
  const auto* const from = static_cast<const std::byte*>(panel);
  vectors == 1 ? add_some_rows<Op, 1>(p, from) : add_some_rows<Op, 2>(p, from);
}

/// From rows of pairs (0, 1) and (2, 3) of each group to rows of all choices.
FRETWORK_TARGET void expand(const void* pairs, std::int64_t groups, std::int64_t width, void* panel) {
  const Pair* from = static_cast<const Pair*>(pairs);
  Pair* to = static_cast<Pair*>(panel);
  const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
  for (std::int64_t g = 0; g < groups; ++g, from += 2 * width, to += kSlots * width) {
    for (std::int64_t j = 0; j < width; j += kLanes) {
      const __m512i p01 = _mm512_loadu_si512(from + j), p23 = _mm512_loadu_si512(from + width + j);
      const __m512i low0 = _mm512_andnot_si512(upper, p01), low1 = _mm512_srli_epi32(p01, 16);
      const __m512i high2 = _mm512_slli_epi32(p23, 16), high3 = _mm512_and_si512(upper, p23);
      const auto store = [&](std::int64_t nibble, __m512i row)
                             FRETWORK_TARGET { _mm512_storeu_si512(to + (nibble - kFirst) * width + j, row); };
      store(0x4, p01);
      store(0x8, _mm512_or_si512(low0, high2));
      store(0x9, _mm512_or_si512(low1, high2));
      store(0xc, _mm512_or_si512(low0, high3));
      store(0xd, _mm512_or_si512(low1, high3));
      store(0xe, p23);
    }
  }
}

/// Words of a step: those of 16 groups of a column.
constexpr std::int64_t kStep = 4 * kLanes;

/// Where each kept value of 16 groups meets a column: 4·group + index.
FRETWORK_TARGET inline __m512i places(std::uint64_t word) {
  // Each lane of 16 bits takes the bits of 8 groups' halves that hold its own, and shifts them down.
  alignas(64) static constexpr auto kTables = [] {
    std::array<std::array<std::uint16_t, 32>, 3> all{};
    for (unsigned n = 0; n < 32; ++n) {
      const unsigned part = n / 8 * 2;
      all[0][n] = static_cast<std::uint16_t>(part | (part + 1) << 8);
      all[1][n] = static_cast<std::uint16_t>(2 * (n % 8));
      all[2][n] = static_cast<std::uint16_t>(n / 2 * 4);
    }
    return all;
  }();
  const __m512i bits =
      _mm512_shuffle_epi8(_mm512_set1_epi64(static_cast<long long>(word)), _mm512_load_si512(kTables[0].data()));
  const __m512i index = _mm512_srlv_epi16(bits, _mm512_load_si512(kTables[1].data()));
  // (index & 3) | base
  return _mm512_ternarylogic_epi64(index, _mm512_set1_epi16(3), _mm512_load_si512(kTables[2].data()), 0xea);
}

/// Adds up the lanes of sums, and stores the totals or adds them.
template <typename Op, int kLines, int kCols>
FRETWORK_TARGET [[gnu::always_inline]] inline void store_totals(const Lines& p, const __m512i (&sum)[kLines][kCols],
                                                                typename Op::Sum* sums) {
#pragma GCC unroll 8
  for (int j = 0; j < kCols; ++j) {
    typename Op::Sum total[kLines];
    if constexpr (kLines == 4) {
      _mm_storeu_si128(reinterpret_cast<__m128i*>(total), totals<Op>(sum[0][j], sum[1][j], sum[2][j], sum[3][j]));
    } else {
#pragma GCC unroll 8
      for (int i = 0; i < kLines; ++i) {
        total[i] = Op::total(sum[i][j]);
      }
    }
#pragma GCC unroll 8
    for (int i = 0; i < kLines; ++i) {
      typename Op::Sum& sum_here = sums[i * p.sum_stride + j];
      sum_here = p.add ? sum_here + total[i] : total[i];
    }
  }
}

template <typename Op, int kLines, int kCols>
FRETWORK_TARGET void add_dots(const Lines& p, const std::uint16_t* panel, std::int64_t stride, typename Op::Sum* sums) {
  __m512i sum[kLines][kCols];
#pragma GCC unroll 8
  for (int i = 0; i < kLines; ++i) {
#pragma GCC unroll 8
    for (int j = 0; j < kCols; ++j) {
      sum[i][j] = _mm512_setzero_si512();
    }
  }
  const auto add = [&](const __m512i* values, const std::uint64_t* words,
                       const std::uint16_t* columns) FRETWORK_TARGET {
    __m512i place[kLines];
#pragma GCC unroll 8
    for (int i = 0; i < kLines; ++i) {
      place[i] = places(words[i]);
    }
#pragma GCC unroll 8
    for (int j = 0; j < kCols; ++j) {
      const __m512i low = _mm512_loadu_si512(columns + j * kStep), high = _mm512_loadu_si512(columns + j * kStep + 32);
#pragma GCC unroll 8
      for (int i = 0; i < kLines; ++i) {
        sum[i][j] = Op::add(sum[i][j], values[i], _mm512_permutex2var_epi16(low, place[i], high));
      }
    }
  };
  __m512i values[kLines];
  std::uint64_t words[kLines];
  const std::int64_t steps = p.groups / kLanes, rest = p.groups % kLanes;
  for (std::int64_t step = 0; step < steps; ++step) {
#pragma GCC unroll 8
    for (int i = 0; i < kLines; ++i) {
      const auto line = static_cast<std::size_t>(i);
      values[i] = _mm512_loadu_si512(static_cast<const Pair*>(p.values[line]) + step * kLanes);
      std::memcpy(&words[i], p.nibbles[line] + step * kLanes / 2, sizeof words[i]);
    }
    add(values, words, panel + step * stride);
  }
  if (rest > 0) {
#pragma GCC unroll 8
    for (int i = 0; i < kLines; ++i) {
      const auto line = static_cast<std::size_t>(i);
      const auto some = static_cast<__mmask16>((1u << rest) - 1);
      values[i] = _mm512_maskz_loadu_epi32(some, static_cast<const Pair*>(p.values[line]) + steps * kLanes);
      words[i] = 0;
      std::memcpy(&words[i], p.nibbles[line] + steps * kLanes / 2, static_cast<std::size_t>((rest + 1) / 2));
    }
    add(values, words, panel + steps * stride);
  }
  store_totals<Op>(p, sum, sums);
}

template <typename Op, int kLines>
void add_columns(const Lines& p, const std::uint16_t* panel, std::int64_t cols, std::int64_t stride) {
  auto* const sums = static_cast<typename Op::Sum*>(p.sums);
  std::int64_t j = 0;
  for (; j + 4 <= cols; j += 4) {
    add_dots<Op, kLines, 4>(p, panel + j * kStep, stride, sums + j);
  }
  for (; j + 2 <= cols; j += 2) {
    add_dots<Op, kLines, 2>(p, panel + j * kStep, stride, sums + j);
  }
  if (j < cols) {
    add_dots<Op, kLines, 1>(p, panel + j * kStep, stride, sums + j);
  }
}

template <typename Op>
void add_all_dots(const Lines& lines, const void* panel, std::int64_t cols, std::int64_t stride) {
  const auto* const from = static_cast<const std::uint16_t*>(panel);
  if (lines.count == kMaxLines) {
    return add_columns<Op, kMaxLines>(lines, from, cols, stride);
  }
  for (Lines p = lines; p.count > 0; p.drop<typename Op::Sum>(1)) {
    add_columns<Op, 1>(p, from, cols, stride);
  }
}

/// Columns stay as they are.
void pack(const void* column, std::int64_t steps, std::int64_t stride, void* panel) {
  const auto* const from = static_cast<const std::uint16_t*>(column);
  for (std::int64_t n = 0; n < steps; ++n) {
    std::copy_n(from + n * kStep, kStep, static_cast<std::uint16_t*>(panel) + n * stride);
  }
}

/// Through f16, which holds every number of 8 bits, e4m3 256 times smaller. bf16 holds them too: nothing is rounded.
template <bool kE4m3>
FRETWORK_TARGET void widen_8(const std::uint8_t* from, std::int64_t count, std::uint16_t* out) {
  for (std::int64_t n = 0; n < count; n += kLanes) {
    const auto some = static_cast<__mmask16>((1u << std::min(kLanes, count - n)) - 1);
    const __m256i bits = _mm256_cvtepu8_epi16(_mm_maskz_loadu_epi8(some, from + n));
    __m256i half = _mm256_slli_epi16(bits, 8);
    if constexpr (kE4m3) {
      const __m256i rest = _mm256_and_si256(bits, _mm256_set1_epi16(0x7f));
      half = _mm256_or_si256(_mm256_and_si256(half, _mm256_set1_epi16(static_cast<short>(0x8000))),
                             _mm256_slli_epi16(rest, 7));
      // There is no infinity: all ones are NaN.
      half = _mm256_mask_mov_epi16(half, _mm256_cmpeq_epi16_mask(rest, _mm256_set1_epi16(0x7f)),
                                   _mm256_set1_epi16(0x7e00));
    }
    const __m512 wide = _mm512_mul_ps(_mm512_cvtph_ps(half), _mm512_set1_ps(kE4m3 ? 256.0f : 1.0f));
    _mm256_mask_storeu_epi16(out + n, some, _mm512_cvtepi32_epi16(_mm512_srli_epi32((__m512i)wide, 16)));
  }
}

}  // namespace

void widen_pairs(const std::uint8_t* from, std::int64_t count, DType dtype, std::uint16_t* out) {
  dtype == DType::f8_e4m3 ? widen_8<true>(from, count, out) : widen_8<false>(from, count, out);
}

/// The tiles need what is needed here, and bring the order of packed pairs.
bool has_pairs() { return simd::paired_bf16_tiles() != nullptr; }

const RowsKernel& pairs_rows_kernel(KernelType type) {
  static constexpr std::int64_t kBytes = kSlots * std::int64_t{sizeof(Pair)};
  static constexpr RowsKernel bf16{kLanes, 2, kBytes, &expand, &add_all_rows<Bf16Pairs>},
      i16{kLanes, 2, kBytes, &expand, &add_all_rows<I16Pairs>};
  return type == KernelType::bf16_pairs ? bf16 : i16;
}

const DotsKernel& pairs_dots_kernel(KernelType type) {
  static constexpr DotsKernel bf16{kLanes, &pack, &add_all_dots<Bf16Pairs>},
      i16{kLanes, &pack, &add_all_dots<I16Pairs>};
  return type == KernelType::bf16_pairs ? bf16 : i16;
}

}  // namespace fretwork::two_four::cpu

#else

namespace fretwork::two_four::cpu {
bool has_pairs() { return false; }
void widen_pairs(const std::uint8_t*, std::int64_t, DType, std::uint16_t*) {}
const RowsKernel& pairs_rows_kernel(KernelType type) { return rows_kernel(type); }
const DotsKernel& pairs_dots_kernel(KernelType type) { return dots_kernel(type); }
}  // namespace fretwork::two_four::cpu

#endif
