// What a regular pattern is made of: boxes of affine bands on counted positions. Operators plan from these; nothing
// here grows with the square of a length.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "fretwork/pattern.h"

namespace fretwork {

inline constexpr int kMaxAxes = 6;

/// How positions are counted. Row i stands at position i + row_shift, column j at j + col_shift; a position x has the
/// digits ⌊x / strides[0]⌋ and ⌊(x mod strides[k−1]) / strides[k]⌋, with remainders never negative. The strides fall,
/// and the last is 1. One axis is plain order, (r, 1) are the residue classes modulo r, (width, 1) is a grid.
struct View {
  int axes = 1;
  std::array<std::int64_t, kMaxAxes> strides{1};
  std::int64_t row_shift = 0, col_shift = 0;
  bool operator==(const View&) const = default;
};

/// Which digits of one axis meet: row digits [row_begin, row_end), column digits [col_begin, col_end), where column −
/// row is in [low, high].
struct AxisRange {
  std::int64_t row_begin, row_end, col_begin, col_end;
  std::int64_t low, high;
  bool operator==(const AxisRange&) const = default;
};

/// The elements whose digits meet on every axis of a view; axes beyond the view's are not looked at. Ranges are tight:
/// each digit in them is one of a row (or column) of the matrix, and has at least one partner.
using Part = std::array<AxisRange, kMaxAxes>;

/// Parts that are counted in the same way.
struct PartGroup {
  View view;
  std::vector<Part> parts;
};

/// The same pattern as parts: itself, a block layout of one head, or a Kronecker pattern. Throws Error, naming `op`, on
/// others.
RegularPtr as_regular(const char* op, const PatternPtr& pattern);

}  // namespace fretwork
