// Expands and picks runs of 2:4 groups by masks, from nibbles as they lie in memory, on CPUs that expand and compress
// vectors of 16 bits (AVX512-VBMI2).
#include "ops/two_four/cpu/groups.h"

#if defined(__x86_64__)

// GCC 12 warns about its own intrinsics, which leave registers undefined on purpose.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>

#include <algorithm>
#include <array>
#include <cstring>

#define FRETWORK_TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi2,bmi2")))

namespace fretwork::two_four {
namespace {

std::uint32_t first(std::int64_t count) { return count >= 32 ? ~std::uint32_t{0} : (std::uint32_t{1} << count) - 1; }

/// Elements of 16 bits, in groups of four: eight groups in a vector.
namespace fours {

constexpr std::int64_t kGroups = 8, kChunk = 64;
using T = std::uint16_t;

/// For each nibble a bit for each element of its group, set where it is kept; shifted. A nibble that no group may have
/// counts as as many elements, so that those behind it stay in place.
constexpr std::array<std::uint8_t, 16> kept(int shift) {
  std::array<std::uint8_t, 16> table{};
  for (unsigned nibble = 0; nibble < 16; ++nibble) {
    const unsigned low = nibble & 3, high = nibble >> 2;
    table[nibble] = static_cast<std::uint8_t>((low == high ? 3 : 1u << low | 1u << high) << shift);
  }
  return table;
}

FRETWORK_TARGET inline __m256i twice(const std::array<std::uint8_t, 16>& table) {
  return _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table.data())));
}

/// The masks of a chunk of groups, of which `groups` exist.
struct Masks {
  alignas(32) std::uint32_t of[kChunk / kGroups];

  FRETWORK_TARGET Masks(const std::uint8_t* nibbles, std::int64_t groups) {
    static constexpr auto kLow = kept(0), kHigh = kept(4);
    const __m256i bytes = _mm256_maskz_loadu_epi8(first((groups + 1) / 2), nibbles), four = _mm256_set1_epi8(15);
    const __m256i low = _mm256_shuffle_epi8(twice(kLow), _mm256_and_si256(bytes, four));
    const __m256i high = _mm256_shuffle_epi8(twice(kHigh), _mm256_and_si256(_mm256_srli_epi16(bytes, 4), four));
    _mm256_store_si256(reinterpret_cast<__m256i*>(of), _mm256_or_si256(low, high));
  }
};

FRETWORK_TARGET void place(const T* values, const std::uint8_t* nibbles, std::int64_t groups, T* dense) {
  for (; groups > 0; groups -= kChunk, nibbles += kChunk / 2) {
    const Masks masks(nibbles, std::min(kChunk, groups));
    const std::uint32_t* mask = masks.of;
    std::int64_t left = std::min(kChunk, groups);
    for (; left >= kGroups; left -= kGroups, values += 2 * kGroups, dense += 4 * kGroups) {
      const __m256i kept = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(values));
      _mm512_storeu_si512(dense, _mm512_maskz_expand_epi16(*mask++, _mm512_castsi256_si512(kept)));
    }
    if (left > 0) {
      const __m512i kept = _mm512_maskz_loadu_epi16(first(2 * left), values);
      _mm512_mask_storeu_epi16(dense, first(4 * left), _mm512_maskz_expand_epi16(*mask, kept));
    }
  }
}

FRETWORK_TARGET void pick(const T* dense, const std::uint8_t* nibbles, std::int64_t groups, T* values) {
  for (; groups > 0; groups -= kChunk, nibbles += kChunk / 2) {
    const Masks masks(nibbles, std::min(kChunk, groups));
    const std::uint32_t* mask = masks.of;
    std::int64_t left = std::min(kChunk, groups);
    for (; left >= kGroups; left -= kGroups, values += 2 * kGroups, dense += 4 * kGroups) {
      const __m512i kept = _mm512_maskz_compress_epi16(*mask++, _mm512_loadu_si512(dense));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(values), _mm512_castsi512_si256(kept));
    }
    if (left > 0) {
      const __m512i all = _mm512_maskz_loadu_epi16(first(4 * left), dense);
      _mm512_mask_storeu_epi16(values, first(2 * left), _mm512_maskz_compress_epi16(*mask, all));
    }
  }
}

}  // namespace fours

/// Elements of 32 bits, in groups of two, sixteen groups at a time: bit 1 of a nibble says that the second is kept.
namespace pairs {

constexpr std::int64_t kGroups = 16;
using T = std::uint32_t;

FRETWORK_TARGET inline std::uint32_t seconds(const std::uint8_t* nibbles, std::int64_t groups) {
  std::uint64_t word = 0;
  std::memcpy(&word, nibbles, groups >= kGroups ? sizeof word : static_cast<std::size_t>((groups + 1) / 2));
  return static_cast<std::uint32_t>(_pext_u64(word, 0x2222'2222'2222'2222));
}

/// A value becomes the low or the high half of 64 bits.
FRETWORK_TARGET inline __m512i expanded(__m256i values, std::uint32_t seconds) {
  const __m512i wide = _mm512_cvtepu32_epi64(values);
  return _mm512_mask_slli_epi64(wide, static_cast<__mmask8>(seconds), wide, 32);
}

FRETWORK_TARGET void place(const T* values, const std::uint8_t* nibbles, std::int64_t groups, T* dense) {
  for (; groups >= kGroups; groups -= kGroups, nibbles += 8, values += kGroups, dense += 2 * kGroups) {
    const std::uint32_t mask = seconds(nibbles, kGroups);
    const auto* const from = reinterpret_cast<const __m256i*>(values);
    _mm512_storeu_si512(dense, expanded(_mm256_loadu_si256(from), mask));
    _mm512_storeu_si512(dense + kGroups, expanded(_mm256_loadu_si256(from + 1), mask >> 8));
  }
  if (groups > 0) {
    const std::uint32_t mask = seconds(nibbles, groups);
    const __m512i kept = _mm512_maskz_loadu_epi32(static_cast<__mmask16>(first(groups)), values);
    const std::uint32_t there = first(2 * groups);
    _mm512_mask_storeu_epi32(dense, static_cast<__mmask16>(there), expanded(_mm512_castsi512_si256(kept), mask));
    _mm512_mask_storeu_epi32(dense + kGroups, static_cast<__mmask16>(there >> 16),
                             expanded(_mm512_extracti64x4_epi64(kept, 1), mask >> 8));
  }
}

/// From two vectors of pairs.
FRETWORK_TARGET inline __m512i picked(__m512i low, __m512i high, std::uint32_t seconds) {
  const __m512i even = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
  const __m512i from = _mm512_mask_add_epi32(even, static_cast<__mmask16>(seconds), even, _mm512_set1_epi32(1));
  return _mm512_permutex2var_epi32(low, from, high);
}

FRETWORK_TARGET void pick(const T* dense, const std::uint8_t* nibbles, std::int64_t groups, T* values) {
  for (; groups >= kGroups; groups -= kGroups, nibbles += 8, values += kGroups, dense += 2 * kGroups) {
    const __m512i low = _mm512_loadu_si512(dense), high = _mm512_loadu_si512(dense + kGroups);
    _mm512_storeu_si512(values, picked(low, high, seconds(nibbles, kGroups)));
  }
  if (groups > 0) {
    const std::uint32_t there = first(2 * groups);
    const __m512i low = _mm512_maskz_loadu_epi32(static_cast<__mmask16>(there), dense);
    const __m512i high = _mm512_maskz_loadu_epi32(static_cast<__mmask16>(there >> 16), dense + kGroups);
    _mm512_mask_storeu_epi32(values, static_cast<__mmask16>(first(groups)),
                             picked(low, high, seconds(nibbles, groups)));
  }
}

FRETWORK_TARGET inline __m512 load(std::uint32_t there, const float* from) {
  return _mm512_maskz_loadu_ps(static_cast<__mmask16>(there), from);
}

/// The groups from `g` on, kHalves vectors of them, of which `groups` exist. Loops over sums are unrolled early, or GCC
/// would pass the sums through memory.
template <int kRows, int kHalves>
FRETWORK_TARGET void add_groups(const PackedLines<T>& s, std::int64_t g, std::int64_t groups, const float* d_y,
                                std::int64_t d_stride, float* sums, std::int64_t sum_stride) {
  __m512 sum[kRows][kHalves];
  const std::uint64_t there =
      groups >= kGroups * kHalves / 2 ? ~std::uint64_t{0} : (std::uint64_t{1} << 2 * groups) - 1;
#pragma GCC unroll 8
  for (int n = 0; n < kRows; ++n) {
#pragma GCC unroll 8
    for (int v = 0; v < kHalves; ++v) {
      sum[n][v] = load(static_cast<std::uint32_t>(there >> 16 * v), sums + n * sum_stride + 2 * g + 16 * v);
    }
  }
  const T* values = s.values + g;
  const std::uint8_t* nibbles = s.nibbles + g / 2;
  for (std::int64_t l = 0; l < s.lines; ++l, values += s.value_stride, nibbles += s.nibble_stride) {
    __m512 dense[kHalves];
#pragma GCC unroll 8
    for (int v = 0; v < kHalves; ++v) {
      const std::int64_t left = std::clamp<std::int64_t>(groups - 8 * v, 0, 8);
      const auto some = static_cast<__mmask8>(first(left));
      std::uint32_t word = 0;
      std::memcpy(&word, nibbles + 4 * v, left >= 8 ? 4 : static_cast<std::size_t>((left + 1) / 2));
      dense[v] = (__m512)expanded(_mm256_maskz_loadu_epi32(some, values + 8 * v), _pext_u32(word, 0x2222'2222));
    }
#pragma GCC unroll 8
    for (int n = 0; n < kRows; ++n) {
      const __m512 factor = _mm512_set1_ps(d_y[n * d_stride + l]);
#pragma GCC unroll 8
      for (int v = 0; v < kHalves; ++v) {
        sum[n][v] = _mm512_fmadd_ps(factor, dense[v], sum[n][v]);
      }
    }
  }
#pragma GCC unroll 8
  for (int n = 0; n < kRows; ++n) {
#pragma GCC unroll 8
    for (int v = 0; v < kHalves; ++v) {
      _mm512_mask_storeu_ps(sums + n * sum_stride + 2 * g + 16 * v, static_cast<__mmask16>(there >> 16 * v), sum[n][v]);
    }
  }
}

template <int kRows>
FRETWORK_TARGET void add_rows(const PackedLines<T>& s, const float* d_y, std::int64_t d_stride, float* sums,
                              std::int64_t sum_stride) {
  std::int64_t g = 0;
  for (; g + 2 * kGroups <= s.groups; g += 2 * kGroups) {
    add_groups<kRows, 4>(s, g, 2 * kGroups, d_y, d_stride, sums, sum_stride);
  }
  for (; g < s.groups; g += kGroups / 2) {
    add_groups<kRows, 1>(s, g, std::min(kGroups / 2, s.groups - g), d_y, d_stride, sums, sum_stride);
  }
}

FRETWORK_TARGET void add_lines(const PackedLines<T>& s, const FloatRows& d_y, float* sums, std::int64_t sum_stride) {
  std::int64_t n = 0;
  for (; n + 4 <= d_y.rows; n += 4) {
    add_rows<4>(s, d_y.data + n * d_y.stride, d_y.stride, sums + n * sum_stride, sum_stride);
  }
  for (; n + 2 <= d_y.rows; n += 2) {
    add_rows<2>(s, d_y.data + n * d_y.stride, d_y.stride, sums + n * sum_stride, sum_stride);
  }
  if (n < d_y.rows) {
    add_rows<1>(s, d_y.data + n * d_y.stride, d_y.stride, sums + n * sum_stride, sum_stride);
  }
}

/// Of kLines lines from `line` on.
template <int kLines>
FRETWORK_TARGET void pick_lines(const PackedLines<T>& s, std::int64_t line, const FloatRows& d_y, const FloatRows& x) {
  for (std::int64_t g = 0; g < s.groups; g += kGroups) {
    const std::int64_t groups = std::min(kGroups, s.groups - g);
    const std::uint32_t there = first(2 * groups);
    __m512 low[kLines], high[kLines];
#pragma GCC unroll 8
    for (int i = 0; i < kLines; ++i) {
      low[i] = high[i] = _mm512_setzero_ps();
    }
    for (std::int64_t n = 0; n < x.rows; ++n) {
      const float* const row = x.data + n * x.stride + 2 * g;
      const __m512 first_half = load(there, row), second_half = load(there >> 16, row + kGroups);
#pragma GCC unroll 8
      for (int i = 0; i < kLines; ++i) {
        const __m512 factor = _mm512_set1_ps(d_y.data[n * d_y.stride + line + i]);
        low[i] = _mm512_fmadd_ps(factor, first_half, low[i]);
        high[i] = _mm512_fmadd_ps(factor, second_half, high[i]);
      }
    }
#pragma GCC unroll 8
    for (int i = 0; i < kLines; ++i) {
      const std::uint32_t mask = seconds(s.nibbles + (line + i) * s.nibble_stride + g / 2, groups);
      T* const to = s.values + (line + i) * s.value_stride + g;
      const __m512i kept = picked((__m512i)low[i], (__m512i)high[i], mask);
      if (groups == kGroups) {
        _mm512_storeu_si512(to, kept);
      } else {
        _mm512_mask_storeu_epi32(to, static_cast<__mmask16>(first(groups)), kept);
      }
    }
  }
}

FRETWORK_TARGET void pick_products(const PackedLines<T>& s, const FloatRows& d_y, const FloatRows& x) {
  std::int64_t line = 0;
  for (; line + 4 <= s.lines; line += 4) {
    pick_lines<4>(s, line, d_y, x);
  }
  for (; line < s.lines; ++line) {
    pick_lines<1>(s, line, d_y, x);
  }
}

}  // namespace pairs

bool supported() {
  static const bool all = __builtin_cpu_supports("avx512vbmi2") != 0 && __builtin_cpu_supports("avx512bw") != 0 &&
                          __builtin_cpu_supports("avx512dq") != 0 && __builtin_cpu_supports("avx512vl") != 0 &&
                          __builtin_cpu_supports("bmi2") != 0;
  return all;
}

}  // namespace

template <>
const MaskKernels<std::uint16_t>* mask_kernels() {
  static constexpr MaskKernels<std::uint16_t> kernels{&fours::place, &fours::pick, nullptr, nullptr};
  return supported() ? &kernels : nullptr;
}
template <>
const MaskKernels<std::uint32_t>* mask_kernels() {
  static constexpr MaskKernels<std::uint32_t> kernels{&pairs::place, &pairs::pick, &pairs::add_lines,
                                                      &pairs::pick_products};
  return supported() ? &kernels : nullptr;
}

}  // namespace fretwork::two_four

#else

namespace fretwork::two_four {
template <>
const MaskKernels<std::uint16_t>* mask_kernels() {
  return nullptr;
}
template <>
const MaskKernels<std::uint32_t>* mask_kernels() {
  return nullptr;
}
}  // namespace fretwork::two_four

#endif

namespace fretwork::two_four {
template <>
const MaskKernels<std::uint8_t>* mask_kernels() {
  return nullptr;
}
template <>
const MaskKernels<std::uint64_t>* mask_kernels() {
  return nullptr;
}
}  // namespace fretwork::two_four
