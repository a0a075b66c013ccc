// CPU kernels of 2:4 products on Highway: compiled once per instruction set, chosen at run time. A nibble selects what
// a kept value multiplies, by an address or by a blend: nothing is gathered, and nothing else is multiplied.
#include "ops/two_four/cpu/run.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/two_four/cpu/vectors.cpp"
#include <hwy/foreach_target.h>
// After foreach_target.h.
#include <hwy/highway.h>

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "runtime/simd/elements-inl.h"

HWY_BEFORE_NAMESPACE();
namespace fretwork::two_four::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

/// 32 of them, not 16.
constexpr bool kManyRegisters = HWY_TARGET == HWY_AVX3 || HWY_ARCH_ARM_A64;
/// Groups whose nibbles fill a word of 64 bits.
constexpr std::int64_t kInWord = 16;

/// The nibbles of up to 16 groups.
HWY_INLINE std::uint64_t Word(const std::uint8_t* nibbles, std::int64_t groups) {
  std::uint64_t word = 0;
  std::memcpy(&word, nibbles, groups >= kInWord ? sizeof word : static_cast<std::size_t>((groups + 1) / 2));
  return word;
}

/// The loops over sums are unrolled early, or GCC would pass the sums through memory.
template <typename T, int kGroup, int kLines, int kVectors>
void AddRows(const Lines& p, const T* panel) {
  const hn::ScalableTag<T> d;
  constexpr auto kLanes = static_cast<std::int64_t>(hn::MaxLanes(d));
  constexpr std::int64_t kRow = kVectors * kLanes;
  hn::Vec<decltype(d)> sum[kLines][kVectors];
  const T* values[kLines];
  T* const sums = static_cast<T*>(p.sums);
#pragma GCC unroll 8
  for (int i = 0; i < kLines; ++i) {
    values[i] = static_cast<const T*>(p.values[static_cast<std::size_t>(i)]);
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      sum[i][v] = p.add ? hn::LoadU(d, sums + i * p.sum_stride + v * kLanes) : hn::Zero(d);
    }
  }
  const auto add = [&](int i, T value, const T* row) HWY_ATTR {
    const auto a = hn::Set(d, value);
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      const auto b = hn::LoadU(d, row + v * kLanes);
      if constexpr (std::is_integral_v<T>) {
        sum[i][v] = hn::Add(sum[i][v], hn::Mul(a, b));
      } else {
        sum[i][v] = hn::MulAdd(a, b, sum[i][v]);
      }
    }
  };
  for (std::int64_t g = 0; g < p.groups; g += kInWord) {
    const std::int64_t count = std::min(kInWord, p.groups - g);
    std::uint64_t word[kLines];
#pragma GCC unroll 8
    for (int i = 0; i < kLines; ++i) {
      word[i] = Word(p.nibbles[static_cast<std::size_t>(i)] + g / 2, count);
    }
    for (std::int64_t n = 0; n < count; ++n, panel += kGroup * kRow) {
#pragma GCC unroll 8
      for (int i = 0; i < kLines; ++i) {
        const auto nibble = static_cast<std::int64_t>(word[i]);
        if constexpr (kGroup == 2) {
          add(i, *values[i], panel + (nibble >> 3 & 1) * kRow);
        } else {
          add(i, values[i][0], panel + (nibble & 3) * kRow);
          add(i, values[i][1], panel + (nibble >> 2 & 3) * kRow);
        }
        values[i] += kGroup / 2;
        word[i] >>= 4;
      }
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < kLines; ++i) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      hn::StoreU(sum[i][v], d, sums + i * p.sum_stride + v * kLanes);
    }
  }
}

/// As many lines as have room for their sums in registers.
template <typename T, int kGroup, int kVectors>
void AddSomeRows(Lines p, const T* panel) {
  constexpr int kBest = kVectors > 2 && !kManyRegisters ? 2 : kMaxLines;
  for (int taken; p.count > 0; p.drop<T>(taken)) {
    taken = p.count >= kBest ? kBest : 1;
    taken == kBest ? AddRows<T, kGroup, kBest, kVectors>(p, panel) : AddRows<T, kGroup, 1, kVectors>(p, panel);
  }
}

template <typename T, int kGroup>
void AddAllRows(const Lines& p, const void* panel, int vectors) {
  const T* const from = static_cast<const T*>(panel);
  switch (vectors) {
    case 1:
      return AddSomeRows<T, kGroup, 1>(p, from);
    case 2:
      return AddSomeRows<T, kGroup, 2>(p, from);
    case 3:
      return AddSomeRows<T, kGroup, 3>(p, from);
    default:
      return AddSomeRows<T, kGroup, 4>(p, from);
  }
}

/// The nibbles of a step of as many groups as a vector of T has lanes, each in the low bits of the lane's 4-bit place.
template <class DU>
HWY_INLINE hn::Vec<DU> Nibbles(DU du, const std::uint8_t* nibbles, std::int64_t step) {
  constexpr std::size_t kLanes = hn::MaxLanes(DU());
  if constexpr (kLanes == 1) {
    return hn::Set(du, static_cast<hn::TFromD<DU>>(nibbles[step / 2] >> 4 * (step % 2)));
  } else if constexpr (kLanes <= 8) {
    std::uint32_t word = 0;
    std::memcpy(&word, nibbles + step * static_cast<std::int64_t>(kLanes / 2), kLanes / 2);
    return hn::Set(du, word);
  } else {
#if HWY_TARGET != HWY_SCALAR
    const hn::Half<DU> half;
    std::uint32_t words[2];
    std::memcpy(words, nibbles + step * static_cast<std::int64_t>(kLanes / 2), sizeof words);
    return hn::Combine(du, hn::Set(half, words[1]), hn::Set(half, words[0]));
#endif
  }
}

/// What a line has in a step: its values, and where each meets a column.
template <typename T, int kGroup>
struct Step;

template <typename T>
struct Step<T, 2> {
  using D = hn::ScalableTag<T>;
  using DU = hn::RebindToUnsigned<D>;
  hn::Vec<D> value;
  hn::Mask<D> second;

  HWY_INLINE void load(const T* values, const std::uint8_t* nibbles, std::int64_t step, hn::Vec<DU> ones) {
    const auto word = Nibbles(DU(), nibbles, step);
    value = hn::LoadU(D(), values);
    second = hn::RebindMask(D(), hn::TestBit(word, hn::ShiftLeft<3>(ones)));
  }
  HWY_INLINE hn::Vec<D> add(const hn::Vec<D>* x, hn::Vec<D> sum) const {
    return hn::MulAdd(value, hn::IfThenElse(second, x[1], x[0]), sum);
  }
};

/// Of two indices in order the first is 0, 1 or 2, and the second 1, 2 or 3.
template <typename T>
struct Step<T, 4> {
  using D = hn::ScalableTag<T>;
  using DU = hn::RebindToUnsigned<D>;
  hn::Vec<D> first, second;
  hn::Mask<D> first1, first2, second_odd, second3;

  HWY_INLINE void load(const T* values, const std::uint8_t* nibbles, std::int64_t step, hn::Vec<DU> ones) {
    const auto word = Nibbles(DU(), nibbles, step);
    hn::LoadInterleaved2(D(), values, first, second);
    first1 = hn::RebindMask(D(), hn::TestBit(word, ones));
    first2 = hn::RebindMask(D(), hn::TestBit(word, hn::ShiftLeft<1>(ones)));
    second_odd = hn::RebindMask(D(), hn::TestBit(word, hn::ShiftLeft<2>(ones)));
    second3 = hn::RebindMask(D(), hn::TestBit(word, hn::ShiftLeft<3>(ones)));
  }
  HWY_INLINE hn::Vec<D> add(const hn::Vec<D>* x, hn::Vec<D> sum) const {
    const auto a = hn::IfThenElse(first2, x[2], hn::IfThenElse(first1, x[1], x[0]));
    const auto b = hn::IfThenElse(second_odd, hn::IfThenElse(second3, x[3], x[1]), x[2]);
    return hn::MulAdd(second, b, hn::MulAdd(first, a, sum));
  }
};

/// Lane i has a one in the i-th place of four bits.
template <class DU>
HWY_INLINE hn::Vec<DU> Ones(DU du) {
  constexpr std::size_t kLanes = hn::MaxLanes(DU());
  HWY_ALIGN hn::TFromD<DU> ones[kLanes];
  for (std::size_t n = 0; n < kLanes; ++n) {
    ones[n] = static_cast<hn::TFromD<DU>>(std::uint32_t{1} << 4 * (n % 8));
  }
  return hn::Load(du, ones);
}

/// The groups behind the last whole step, with zeros behind them.
template <typename T, int kLines, std::int64_t kValues>
struct LastStep {
  T values[kLines][kValues] = {};
  std::uint8_t nibbles[kLines][sizeof(std::uint64_t)] = {};

  void take(const T** from, const std::uint8_t** from_nibbles, std::int64_t first, std::int64_t count, int kept) {
    for (int i = 0; i < kLines; ++i) {
      std::copy_n(from[i] + first * kept, count * kept, values[i]);
      std::copy_n(from_nibbles[i] + first / 2, (count + 1) / 2, nibbles[i]);
      from[i] = values[i];
      from_nibbles[i] = nibbles[i];
    }
  }
};

/// Adds up the lanes of sums, and stores the totals or adds them.
template <class D, int kLines, int kCols, typename T = hn::TFromD<D>>
HWY_INLINE void StoreTotals(D d, const Lines& p, const hn::Vec<D> (&sum)[kLines][kCols], T* sums) {
#pragma GCC unroll 8
  for (int j = 0; j < kCols; ++j) {
    T totals[kLines];
    if constexpr (kLines == 4 && std::is_same_v<T, float>) {
      simd::HWY_NAMESPACE::StoreFour(d, sum[0][j], sum[1][j], sum[2][j], sum[3][j], totals);
    } else {
#pragma GCC unroll 8
      for (int i = 0; i < kLines; ++i) {
        totals[i] = hn::GetLane(hn::SumOfLanes(d, sum[i][j]));
      }
    }
#pragma GCC unroll 8
    for (int i = 0; i < kLines; ++i) {
      T& sum_here = sums[i * p.sum_stride + j];
      sum_here = p.add ? sum_here + totals[i] : totals[i];
    }
  }
}

template <typename T, int kGroup, int kLines, int kCols>
void AddDots(const Lines& p, const T* panel, std::int64_t stride, T* sums) {
  const hn::ScalableTag<T> d;
  constexpr auto kLanes = static_cast<std::int64_t>(hn::MaxLanes(d));
  constexpr std::int64_t kKept = kGroup / 2;
  hn::Vec<decltype(d)> sum[kLines][kCols];
#pragma GCC unroll 8
  for (int i = 0; i < kLines; ++i) {
#pragma GCC unroll 8
    for (int j = 0; j < kCols; ++j) {
      sum[i][j] = hn::Zero(d);
    }
  }
  const auto ones = Ones(hn::RebindToUnsigned<decltype(d)>());
  const auto add = [&](const T* const* values, const std::uint8_t* const* nibbles, std::int64_t step) HWY_ATTR {
    Step<T, kGroup> line[kLines];
#pragma GCC unroll 8
    for (int i = 0; i < kLines; ++i) {
      line[i].load(values[i] + step * kLanes * kKept, nibbles[i], step, ones);
    }
#pragma GCC unroll 8
    for (int j = 0; j < kCols; ++j) {
      hn::Vec<decltype(d)> x[kGroup];
#pragma GCC unroll 8
      for (int v = 0; v < kGroup; ++v) {
        x[v] = hn::LoadU(d, panel + (j * kGroup + v) * kLanes);
      }
#pragma GCC unroll 8
      for (int i = 0; i < kLines; ++i) {
        sum[i][j] = line[i].add(x, sum[i][j]);
      }
    }
    panel += stride;
  };
  const T* values[kLines];
  const std::uint8_t* nibbles[kLines];
#pragma GCC unroll 8
  for (int i = 0; i < kLines; ++i) {
    values[i] = static_cast<const T*>(p.values[static_cast<std::size_t>(i)]);
    nibbles[i] = p.nibbles[static_cast<std::size_t>(i)];
  }
  const std::int64_t steps = p.groups / kLanes, rest = p.groups % kLanes;
  for (std::int64_t step = 0; step < steps; ++step) {
    add(values, nibbles, step);
  }
  if (rest > 0) {
    LastStep<T, kLines, kLanes * kKept> last;
    last.take(values, nibbles, steps * kLanes, rest, kKept);
    add(values, nibbles, 0);
  }
  StoreTotals(d, p, sum, sums);
}

template <typename T, int kGroup, int kLines>
void AddColumns(const Lines& p, const T* panel, std::int64_t cols, std::int64_t stride) {
  constexpr auto kColumn = static_cast<std::int64_t>(kGroup * hn::MaxLanes(hn::ScalableTag<T>()));
  T* const sums = static_cast<T*>(p.sums);
  std::int64_t j = 0;
  for (; j + 4 <= cols; j += 4) {
    AddDots<T, kGroup, kLines, 4>(p, panel + j * kColumn, stride, sums + j);
  }
  for (; j + 2 <= cols; j += 2) {
    AddDots<T, kGroup, kLines, 2>(p, panel + j * kColumn, stride, sums + j);
  }
  if (j < cols) {
    AddDots<T, kGroup, kLines, 1>(p, panel + j * kColumn, stride, sums + j);
  }
}

template <typename T, int kGroup>
void AddAllDots(const Lines& lines, const void* panel, std::int64_t cols, std::int64_t stride) {
  const T* const from = static_cast<const T*>(panel);
  if (lines.count == kMaxLines) {
    return AddColumns<T, kGroup, kMaxLines>(lines, from, cols, stride);
  }
  for (Lines p = lines; p.count > 0; p.drop<T>(1)) {
    AddColumns<T, kGroup, 1>(p, from, cols, stride);
  }
}

template <typename T, int kGroup>
void PackDots(const void* column, std::int64_t steps, std::int64_t stride, void* panel) {
  const hn::ScalableTag<T> d;
  constexpr auto kLanes = static_cast<std::int64_t>(hn::MaxLanes(d));
  const T* from = static_cast<const T*>(column);
  T* to = static_cast<T*>(panel);
  for (std::int64_t n = 0; n < steps; ++n, from += kGroup * kLanes, to += stride) {
    hn::Vec<decltype(d)> x[kGroup];
    if constexpr (kGroup == 2) {
      hn::LoadInterleaved2(d, from, x[0], x[1]);
    } else {
      hn::LoadInterleaved4(d, from, x[0], x[1], x[2], x[3]);
    }
    for (int v = 0; v < kGroup; ++v) {
      hn::StoreU(x[v], d, to + v * kLanes);
    }
  }
}

template <typename T>
constexpr auto kLanesOf = static_cast<std::int64_t>(hn::MaxLanes(hn::ScalableTag<T>()));

template <typename T, int kGroup>
constexpr RowsKernel kRowsOf{kLanesOf<T>, 4, kGroup * sizeof(T), nullptr, &AddAllRows<T, kGroup>};

const RowsKernel* RowsFor(KernelType type) {
  static constexpr RowsKernel kernels[] = {kRowsOf<double, 4>, kRowsOf<float, 4>, kRowsOf<std::int32_t, 4>,
                                           kRowsOf<float, 2>};
  return &kernels[static_cast<int>(type)];
}

const DotsKernel* DotsFor(KernelType type) {
  static constexpr DotsKernel kernels[] = {{kLanesOf<double>, &PackDots<double, 4>, &AddAllDots<double, 4>},
                                           {kLanesOf<float>, &PackDots<float, 4>, &AddAllDots<float, 4>},
                                           {0, nullptr, nullptr},
                                           {kLanesOf<float>, &PackDots<float, 2>, &AddAllDots<float, 2>}};
  return &kernels[static_cast<int>(type)];
}

}  // namespace fretwork::two_four::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fretwork::two_four::cpu {
HWY_EXPORT(RowsFor);
HWY_EXPORT(DotsFor);

const RowsKernel& rows_kernel(KernelType type) {
  return type >= KernelType::bf16_pairs ? pairs_rows_kernel(type) : *HWY_DYNAMIC_DISPATCH(RowsFor)(type);
}
const DotsKernel& dots_kernel(KernelType type) {
  return type >= KernelType::bf16_pairs ? pairs_dots_kernel(type) : *HWY_DYNAMIC_DISPATCH(DotsFor)(type);
}

}  // namespace fretwork::two_four::cpu
#endif
