// Transposes a matrix of elements of any type.
#pragma once

#include <cstdint>

namespace fretwork::simd {

/// to(c, r) = from(r, c), lines `from_pitch` and `to_pitch` elements apart. T is an unsigned integer of the elements'
/// size.
template <typename T>
void turn(const T* from, std::int64_t from_pitch, std::int64_t rows, std::int64_t cols, T* to, std::int64_t to_pitch);

}  // namespace fretwork::simd
