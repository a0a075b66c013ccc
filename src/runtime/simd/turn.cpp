// Transposes in squares of 128 bits' side. Compiled once per instruction set.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "runtime/simd/turn.cpp"
#include <hwy/foreach_target.h>
// After foreach_target.h.
#include <hwy/highway.h>

#include <algorithm>

#include "runtime/simd/turn.h"

HWY_BEFORE_NAMESPACE();
namespace fretwork::simd::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

/// Bytes that leave room in a first-level cache.
constexpr std::int64_t kCached = 16 << 10;

/// Lines of two, three or four elements without gaps, which one instruction or a few take apart; gives the lines done.
template <typename Bits>
std::int64_t TurnShortLines(const Bits* from, std::int64_t rows, std::int64_t cols, Bits* to, std::int64_t to_pitch) {
  std::int64_t r = 0;
#if HWY_TARGET != HWY_SCALAR
  const hn::ScalableTag<Bits> d;
  constexpr auto kLanes = static_cast<std::int64_t>(hn::MaxLanes(d));
  for (; r + kLanes <= rows; r += kLanes, from += kLanes * cols) {
    hn::Vec<decltype(d)> v[4];
    if (cols == 2) {
      hn::LoadInterleaved2(d, from, v[0], v[1]);
    } else if (cols == 3) {
      hn::LoadInterleaved3(d, from, v[0], v[1], v[2]);
    } else {
      hn::LoadInterleaved4(d, from, v[0], v[1], v[2], v[3]);
    }
    for (std::int64_t c = 0; c < cols; ++c) {
      hn::StoreU(v[c], d, to + c * to_pitch + r);
    }
  }
#else
  (void)from, (void)rows, (void)cols, (void)to, (void)to_pitch;
#endif
  return r;
}

/// The way back: two, three or four lines become columns without gaps; gives the columns done.
template <typename Bits>
std::int64_t TurnFewLines(const Bits* from, std::int64_t from_pitch, std::int64_t rows, std::int64_t cols, Bits* to) {
  std::int64_t c = 0;
#if HWY_TARGET != HWY_SCALAR
  const hn::ScalableTag<Bits> d;
  constexpr auto kLanes = static_cast<std::int64_t>(hn::MaxLanes(d));
  for (; c + kLanes <= cols; c += kLanes, from += kLanes, to += kLanes * rows) {
    const auto first = hn::LoadU(d, from), second = hn::LoadU(d, from + from_pitch);
    if (rows == 2) {
      hn::StoreInterleaved2(first, second, d, to);
    } else if (rows == 3) {
      hn::StoreInterleaved3(first, second, hn::LoadU(d, from + 2 * from_pitch), d, to);
    } else {
      hn::StoreInterleaved4(first, second, hn::LoadU(d, from + 2 * from_pitch), hn::LoadU(d, from + 3 * from_pitch), d,
                            to);
    }
  }
#else
  (void)from, (void)from_pitch, (void)rows, (void)cols, (void)to;
#endif
  return c;
}

/// What lies outside the squares: below their rows, and right of their columns.
template <typename Bits>
HWY_INLINE void TurnRest(const Bits* from, std::int64_t from_pitch, std::int64_t rows, std::int64_t cols,
                         std::int64_t whole_rows, std::int64_t whole_cols, Bits* to, std::int64_t to_pitch) {
  for (std::int64_t r = 0; r < rows; ++r) {
    for (std::int64_t c = r < whole_rows ? whole_cols : 0; c < cols; ++c) {
      to[c * to_pitch + r] = from[r * from_pitch + c];
    }
  }
}

/// to(c, r) = from(r, c). Squares of one vector's side go through registers, in rounds that interleave halves.
template <typename Bits>
void Turn(const Bits* from, std::int64_t from_pitch, std::int64_t rows, std::int64_t cols, Bits* to,
          std::int64_t to_pitch) {
  if (cols >= 2 && cols <= 4 && from_pitch == cols) {
    const std::int64_t done = TurnShortLines(from, rows, cols, to, to_pitch);
    from += done * cols, to += done, rows -= done;
  } else if (rows >= 2 && rows <= 4 && to_pitch == rows) {
    const std::int64_t done = TurnFewLines(from, from_pitch, rows, cols, to);
    from += done, to += done * rows, cols -= done;
  }
  constexpr int kSide = 16 / sizeof(Bits);
  constexpr bool kVectors = HWY_TARGET != HWY_SCALAR;
  const std::int64_t whole_rows = kVectors ? rows - rows % kSide : 0, whole_cols = kVectors ? cols - cols % kSide : 0;
#if HWY_TARGET != HWY_SCALAR
  using Tag = hn::CappedTag<Bits, static_cast<std::size_t>(kSide)>;
  const Tag d;
  // Along the longer lines, which are far apart in memory and may share cache sets.
  const bool down = to_pitch > from_pitch;
  const auto square = [&](std::int64_t r, std::int64_t c) HWY_ATTR {
    hn::Vec<Tag> v[kSide], w[kSide];
    // Unrolled early, or GCC would pass the vectors through memory.
#pragma GCC unroll 16
    for (int n = 0; n < kSide; ++n) {
      v[n] = hn::LoadU(d, from + (r + n) * from_pitch + c);
    }
#pragma GCC unroll 4
    for (int round = 1; round < kSide; round *= 2) {
#pragma GCC unroll 16
      for (int n = 0; n < kSide / 2; ++n) {
        w[2 * n] = hn::InterleaveLower(d, v[n], v[n + kSide / 2]);
        w[2 * n + 1] = hn::InterleaveUpper(d, v[n], v[n + kSide / 2]);
      }
#pragma GCC unroll 16
      for (int n = 0; n < kSide; ++n) {
        v[n] = w[n];
      }
    }
#pragma GCC unroll 16
    for (int n = 0; n < kSide; ++n) {
      hn::StoreU(v[n], d, to + (c + n) * to_pitch + r);
    }
  };
  const std::int64_t wide = down ? whole_cols : whole_rows, length = down ? whole_rows : whole_cols;
  // A part of them at a time, whose short lines stay in the first-level cache.
  const std::int64_t line =
      static_cast<std::int64_t>(sizeof(Bits)) * std::max<std::int64_t>(1, std::min(from_pitch, to_pitch));
  const std::int64_t part = std::max<std::int64_t>(kCached / line / kSide, 1) * kSide;
  for (std::int64_t begin = 0; begin < length; begin += part) {
    for (std::int64_t i = 0; i < wide; i += kSide) {
      for (std::int64_t k = begin; k < std::min(begin + part, length); k += kSide) {
        down ? square(k, i) : square(i, k);
      }
    }
  }
#endif
  TurnRest(from, from_pitch, rows, cols, whole_rows, whole_cols, to, to_pitch);
}

using std::int64_t, std::uint16_t, std::uint32_t, std::uint64_t, std::uint8_t;

void Turn8(const uint8_t* from, int64_t from_pitch, int64_t rows, int64_t cols, uint8_t* to, int64_t to_pitch) {
  Turn(from, from_pitch, rows, cols, to, to_pitch);
}
void Turn16(const uint16_t* from, int64_t from_pitch, int64_t rows, int64_t cols, uint16_t* to, int64_t to_pitch) {
  Turn(from, from_pitch, rows, cols, to, to_pitch);
}
void Turn32(const uint32_t* from, int64_t from_pitch, int64_t rows, int64_t cols, uint32_t* to, int64_t to_pitch) {
  Turn(from, from_pitch, rows, cols, to, to_pitch);
}
void Turn64(const uint64_t* from, int64_t from_pitch, int64_t rows, int64_t cols, uint64_t* to, int64_t to_pitch) {
  Turn(from, from_pitch, rows, cols, to, to_pitch);
}

}  // namespace fretwork::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fretwork::simd {
HWY_EXPORT(Turn8);
HWY_EXPORT(Turn16);
HWY_EXPORT(Turn32);
HWY_EXPORT(Turn64);

template <typename T>
void turn(const T* from, std::int64_t from_pitch, std::int64_t rows, std::int64_t cols, T* to, std::int64_t to_pitch) {
  if constexpr (sizeof(T) == 1) {
    HWY_DYNAMIC_DISPATCH(Turn8)(from, from_pitch, rows, cols, to, to_pitch);
  } else if constexpr (sizeof(T) == 2) {
    HWY_DYNAMIC_DISPATCH(Turn16)(from, from_pitch, rows, cols, to, to_pitch);
  } else if constexpr (sizeof(T) == 4) {
    HWY_DYNAMIC_DISPATCH(Turn32)(from, from_pitch, rows, cols, to, to_pitch);
  } else {
    HWY_DYNAMIC_DISPATCH(Turn64)(from, from_pitch, rows, cols, to, to_pitch);
  }
}

template void turn(const std::uint8_t*, std::int64_t, std::int64_t, std::int64_t, std::uint8_t*, std::int64_t);
template void turn(const std::uint16_t*, std::int64_t, std::int64_t, std::int64_t, std::uint16_t*, std::int64_t);
template void turn(const std::uint32_t*, std::int64_t, std::int64_t, std::int64_t, std::uint32_t*, std::int64_t);
template void turn(const std::uint64_t*, std::int64_t, std::int64_t, std::int64_t, std::uint64_t*, std::int64_t);

}  // namespace fretwork::simd
#endif
