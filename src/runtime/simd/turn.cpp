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

/// One element after the other, in [first_row, rows) × [first_col, cols).
template <typename Bits>
HWY_INLINE void TurnElements(const Bits* from, std::int64_t from_pitch, std::int64_t first_row, std::int64_t rows,
                             std::int64_t first_col, std::int64_t cols, Bits* to, std::int64_t to_pitch) {
  for (std::int64_t r = first_row; r < rows; ++r) {
    for (std::int64_t c = first_col; c < cols; ++c) {
      to[c * to_pitch + r] = from[r * from_pitch + c];
    }
  }
}

#if HWY_TARGET != HWY_SCALAR
/// Elements on a square's side.
template <typename Bits>
constexpr int kSide = 16 / sizeof(Bits);

/// A square through registers, in rounds that interleave halves. Of a part of one, the last of `rows` stands for those
/// that are missing, and `cols` are stored, each in full.
template <bool kPart, typename Bits>
HWY_INLINE void TurnSquare(const Bits* from, std::int64_t from_pitch, Bits* to, std::int64_t to_pitch,
                           std::int64_t rows = kSide<Bits>, std::int64_t cols = kSide<Bits>) {
  constexpr int kAll = kSide<Bits>;
  using Tag = hn::CappedTag<Bits, static_cast<std::size_t>(kAll)>;
  const Tag d;
  hn::Vec<Tag> v[kAll], w[kAll];
  // Unrolled early, or GCC would pass the vectors through memory.
#pragma GCC unroll 16
  for (int n = 0; n < kAll; ++n) {
    v[n] = hn::LoadU(d, from + (kPart ? std::min<std::int64_t>(n, rows - 1) : n) * from_pitch);
  }
#pragma GCC unroll 4
  for (int round = 1; round < kAll; round *= 2) {
#pragma GCC unroll 16
    for (int n = 0; n < kAll / 2; ++n) {
      w[2 * n] = hn::InterleaveLower(d, v[n], v[n + kAll / 2]);
      w[2 * n + 1] = hn::InterleaveUpper(d, v[n], v[n + kAll / 2]);
    }
#pragma GCC unroll 16
    for (int n = 0; n < kAll; ++n) {
      v[n] = w[n];
    }
  }
#pragma GCC unroll 16
  for (int n = 0; n < kAll; ++n) {
    if (!kPart || n < cols) {
      hn::StoreU(v[n], d, to + n * to_pitch);
    }
  }
}

/// The squares of a matrix, along the longer lines, which are far apart in memory and may share cache sets.
template <typename Bits>
HWY_INLINE void TurnSquares(const Bits* from, std::int64_t from_pitch, std::int64_t rows, std::int64_t cols, Bits* to,
                            std::int64_t to_pitch) {
  constexpr int kAll = kSide<Bits>;
  const bool down = to_pitch > from_pitch;
  const std::int64_t wide = down ? cols : rows, length = down ? rows : cols;
  // A part of them at a time, whose short lines stay in the first-level cache.
  const std::int64_t line =
      static_cast<std::int64_t>(sizeof(Bits)) * std::max<std::int64_t>(1, std::min(from_pitch, to_pitch));
  const std::int64_t part = std::max<std::int64_t>(kCached / line / kAll, 1) * kAll;
  for (std::int64_t begin = 0; begin < length; begin += part) {
    for (std::int64_t i = 0; i < wide; i += kAll) {
      for (std::int64_t k = begin; k < std::min(begin + part, length); k += kAll) {
        const std::int64_t r = down ? k : i, c = down ? i : k;
        TurnSquare<false>(from + r * from_pitch + c, from_pitch, to + c * to_pitch + r, to_pitch);
      }
    }
  }
}
#endif

/// to(c, r) = from(r, c).
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
#if HWY_TARGET == HWY_SCALAR
  TurnElements(from, from_pitch, 0, rows, 0, cols, to, to_pitch);
#else
  constexpr int kAll = kSide<Bits>;
  const std::int64_t last_row = rows - rows % kAll, last_col = cols - cols % kAll;
  // A low last row of squares stores on into the next rows of a result without gaps, which are stored later.
  std::int64_t c = 0;
  for (; last_row < rows && rows > 1 && to_pitch == rows && (c + kAll - 1) * rows + last_row + kAll <= cols * rows;
       c += kAll) {
    TurnSquare<true>(from + last_row * from_pitch + c, from_pitch, to + c * to_pitch + last_row, to_pitch,
                     rows - last_row);
  }
  TurnSquares(from, from_pitch, last_row, last_col, to, to_pitch);
  // A narrow last column of squares reads on into the next rows.
  std::int64_t r = 0;
  for (; last_col < cols && cols > 1 && r < last_row &&
         (r + kAll - 1) * from_pitch + last_col + kAll <= (rows - 1) * from_pitch + cols;
       r += kAll) {
    TurnSquare<true>(from + r * from_pitch + last_col, from_pitch, to + last_col * to_pitch + r, to_pitch, kAll,
                     cols - last_col);
  }
  TurnElements(from, from_pitch, r, last_row, last_col, cols, to, to_pitch);
  TurnElements(from, from_pitch, last_row, rows, c, cols, to, to_pitch);
#endif
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
