// Copies that bring the elements of one δ together, so that a·d blocks with d = 1 remain.
#pragma once

#include <cstdint>

#include "ops/kronecker/problem.h"

namespace fretwork::kronecker::cpu {

/// simd::turn of elements of `size` bytes.
void turn(const void* from, std::int64_t from_pitch, std::int64_t rows, std::int64_t cols, void* to,
          std::int64_t to_pitch, std::size_t size);

/// Rows of features (i, k, l), k < `inner`, to contiguous rows of (i, l, k); and the way back. `from` and `to` have
/// feature == 1.
void take_apart(const Matrix& from, std::int64_t rows, const Sizes& s, std::int64_t inner, void* to, DType dtype,
                Context& context);
void put_together(const void* from, std::int64_t rows, const Sizes& s, std::int64_t inner, const Matrix& to,
                  DType dtype, Context& context);

/// Whether weights lie as (a, b, c, d) or (a, c, b, d) without gaps.
bool is_compact(const Weights& w, const Sizes& s);
/// Such weights to (a, d, b, c) or (a, d, c, b), as which the result shows them.
Weights take_apart(const Weights& w, const Sizes& s, void* to, DType dtype, Context& context);
/// From (a, d, b, c) to such weights (a, b, c, d).
void put_together(const void* from, const Weights& w, const Sizes& s, DType dtype, Context& context);

}  // namespace fretwork::kronecker::cpu
