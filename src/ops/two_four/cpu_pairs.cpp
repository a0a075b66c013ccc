// The kernels of the CPU's 2:4 products in pairs, for CPUs with AVX512-BF16: a group's two kept values are one word,
// and one instruction multiplies both and adds. bf16 with sums of fp32, and int16 with sums of int32.
#include "ops/two_four/cpu.h"

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
/// Pairs of places that a group of four may keep.
constexpr std::int64_t kChoices = 6;

/// Which choice a nibble stands for: 01, 02, 12, 03, 13, 23.
constexpr std::int64_t choice(unsigned nibble) {
  const std::int64_t second = nibble >> 2, first = nibble & 3;
  return first < second ? second * (second - 1) / 2 + first : 0;
}

struct Bf16Pairs {
  using Sum = float;
  FRETWORK_TARGET static __m512i add(__m512i sum, __m512i a, __m512i b) {
    return (__m512i)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
  }
  FRETWORK_TARGET static float total(__m512i sum) { return _mm512_reduce_add_ps((__m512)sum); }
};

struct I16Pairs {
  using Sum = std::int32_t;
  FRETWORK_TARGET static __m512i add(__m512i sum, __m512i a, __m512i b) {
    return _mm512_add_epi32(sum, _mm512_madd_epi16(a, b));
  }
  FRETWORK_TARGET static std::int32_t total(__m512i sum) { return _mm512_reduce_add_epi32(sum); }
};

/// Bytes from a group's first row in a panel to the row of a nibble's choice.
template <int kVectors>
struct Offsets {
  std::array<std::uint32_t, 16> of{};
  constexpr Offsets() {
    for (unsigned nibble = 0; nibble < 16; ++nibble) {
      of[nibble] = static_cast<std::uint32_t>(choice(nibble) * kVectors * kLanes * std::int64_t{sizeof(Pair)});
    }
  }
};
template <int kVectors>
constexpr Offsets<kVectors> kOffsets;

/// The loops over sums are unrolled early, or GCC would pass the sums through memory.
template <typename Op, int kLines, int kVectors>
FRETWORK_TARGET void add_rows(const Lines& p, const std::byte* panel) {
  using Sum = typename Op::Sum;
  constexpr std::int64_t kGroupBytes = kChoices * kVectors * kLanes * std::int64_t{sizeof(Pair)};
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
      sum[i][v] = _mm512_loadu_si512(sums + i * p.sum_stride + v * kLanes);
    }
  }
  const auto add = [&](int i, std::int64_t g, unsigned nibble, const std::byte* group) FRETWORK_TARGET {
    int pair;
    std::memcpy(&pair, values[i] + g * std::int64_t{sizeof(Pair)}, sizeof pair);
    const __m512i a = _mm512_set1_epi32(pair);
    const std::byte* const row = group + kOffsets<kVectors>.of[nibble];
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      sum[i][v] = Op::add(sum[i][v], a, _mm512_loadu_si512(row + v * sizeof(__m512i)));
    }
  };
  std::int64_t g = 0;
  for (; g + 2 <= p.groups; g += 2, panel += 2 * kGroupBytes) {
#pragma GCC unroll 8
    for (int i = 0; i < kLines; ++i) {
      const unsigned both = nibbles[i][g / 2];
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
  switch (vectors) {
    case 1:
      return add_some_rows<Op, 1>(p, from);
    case 2:
      return add_some_rows<Op, 2>(p, from);
    case 3:
      return add_some_rows<Op, 3>(p, from);
    default:
      return add_some_rows<Op, 4>(p, from);
  }
}

/// From rows of pairs (0, 1) and (2, 3) of each group to rows of all choices.
FRETWORK_TARGET void expand(const void* pairs, std::int64_t groups, std::int64_t width, void* panel) {
  const Pair* from = static_cast<const Pair*>(pairs);
  Pair* to = static_cast<Pair*>(panel);
  const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
  for (std::int64_t g = 0; g < groups; ++g, from += 2 * width, to += kChoices * width) {
    for (std::int64_t j = 0; j < width; j += kLanes) {
      const __m512i p01 = _mm512_loadu_si512(from + j), p23 = _mm512_loadu_si512(from + width + j);
      const __m512i low0 = _mm512_andnot_si512(upper, p01), low1 = _mm512_srli_epi32(p01, 16);
      const __m512i high2 = _mm512_slli_epi32(p23, 16), high3 = _mm512_and_si512(upper, p23);
      const __m512i all[kChoices] = {p01,
                                     _mm512_or_si512(low0, high2),
                                     _mm512_or_si512(low1, high2),
                                     _mm512_or_si512(low0, high3),
                                     _mm512_or_si512(low1, high3),
                                     p23};
#pragma GCC unroll 8
      for (int n = 0; n < kChoices; ++n) {
        _mm512_storeu_si512(to + n * width + j, all[n]);
      }
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
#pragma GCC unroll 8
  for (int i = 0; i < kLines; ++i) {
#pragma GCC unroll 8
    for (int j = 0; j < kCols; ++j) {
      sums[i * p.sum_stride + j] += Op::total(sum[i][j]);
    }
  }
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

}  // namespace

bool has_pairs() {
  static const bool supported = __builtin_cpu_supports("avx512bf16") != 0 && __builtin_cpu_supports("avx512bw") != 0 &&
                                __builtin_cpu_supports("avx512dq") != 0 && __builtin_cpu_supports("avx512vl") != 0;
  return supported;
}

const RowsKernel& pairs_rows_kernel(Kind kind) {
  static constexpr std::int64_t kBytes = kChoices * std::int64_t{sizeof(Pair)};
  static constexpr RowsKernel bf16{kLanes, kBytes, &expand, &add_all_rows<Bf16Pairs>},
      i16{kLanes, kBytes, &expand, &add_all_rows<I16Pairs>};
  return kind == Kind::bf16_pairs ? bf16 : i16;
}

const DotsKernel& pairs_dots_kernel(Kind kind) {
  static constexpr DotsKernel bf16{kLanes, &pack, &add_all_dots<Bf16Pairs>},
      i16{kLanes, &pack, &add_all_dots<I16Pairs>};
  return kind == Kind::bf16_pairs ? bf16 : i16;
}

}  // namespace fretwork::two_four::cpu

#else

namespace fretwork::two_four::cpu {
bool has_pairs() { return false; }
const RowsKernel& pairs_rows_kernel(Kind kind) { return rows_kernel(kind); }
const DotsKernel& pairs_dots_kernel(Kind kind) { return dots_kernel(kind); }
}  // namespace fretwork::two_four::cpu

#endif
