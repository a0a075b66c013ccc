// Copies that bring the elements of one δ together, and back.
#include "ops/kronecker/cpu/run.h"
#include "runtime/simd/turn.h"

namespace fretwork::kronecker::cpu {
namespace {

/// Elements that are copied at a time, of weights.
constexpr std::int64_t kTogether = 16 << 10;

std::byte* at(const void* data, std::int64_t element, std::size_t size) {
  return static_cast<std::byte*>(const_cast<void*>(data)) + element * static_cast<std::int64_t>(size);
}

/// Calls f(first, count) for the pieces of the weights of a block.
template <typename F>
void for_weights(const Sizes& s, Context& context, const F& f) {
  const Split parts{s.b * s.c, std::max<std::int64_t>(kTogether / s.d, 64)};
  for_jobs(s.a * parts.pieces(), kCopy * weights_of(s), context, [&](std::int64_t job) {
    f(job / parts.pieces(), job % parts.pieces() * parts.each, parts.size(job % parts.pieces()));
  });
}

}  // namespace

void turn(const void* from, std::int64_t from_pitch, std::int64_t rows, std::int64_t cols, void* to,
          std::int64_t to_pitch, std::size_t size) {
  const auto as = [&](auto zero) {
    using T = decltype(zero);
    simd::turn(static_cast<const T*>(from), from_pitch, rows, cols, static_cast<T*>(to), to_pitch);
  };
  size == 2 ? as(std::uint16_t{}) : size == 4 ? as(std::uint32_t{}) : as(std::uint64_t{});
}

void take_apart(const Matrix& from, std::int64_t rows, const Sizes& s, std::int64_t inner, void* to, bool by_rows,
                DType dtype, Context& context) {
  const std::size_t size = size_of(dtype);
  const std::int64_t block = inner * s.d, row = s.a * block;
  for_jobs(rows * s.a, kCopy * static_cast<double>(rows * row), context, [&](std::int64_t job) {
    const std::int64_t n = by_rows ? job / s.a : job % rows, i = by_rows ? job % s.a : job / rows;
    turn(at(from.data, n * from.batch + i * block, size), s.d, inner, s.d, at(to, n * row + i * block, size), inner,
         size);
  });
}

void put_together(const void* from, std::int64_t rows, const Sizes& s, std::int64_t inner, const Matrix& to,
                  DType dtype, Context& context) {
  const std::size_t size = size_of(dtype);
  const std::int64_t block = inner * s.d, row = s.a * block;
  for_jobs(rows, kCopy * static_cast<double>(rows * row), context, [&](std::int64_t n) {
    for (std::int64_t i = 0; i < s.a; ++i) {
      turn(at(from, n * row + i * block, size), inner, s.d, inner, at(to.data, n * to.batch + i * block, size), s.d,
           size);
    }
  });
}

bool is_compact(const Weights& w, const Sizes& s) {
  const bool along = w.c == s.d && w.b == s.c * s.d, across = w.b == s.d && w.c == s.b * s.d;
  return w.d == 1 && (along || across) && (s.a == 1 || w.a == s.b * s.c * s.d);
}

Weights take_apart(const Weights& w, const Sizes& s, void* to, DType dtype, Context& context) {
  const std::size_t size = size_of(dtype);
  const std::int64_t all = s.b * s.c;
  for_weights(s, context, [&](std::int64_t i, std::int64_t first, std::int64_t count) {
    turn(at(w.data, i * w.a + first * s.d, size), s.d, count, s.d, at(to, i * s.d * all + first, size), all, size);
  });
  return {to, all, w.b / s.d, w.c / s.d, 1};
}

void put_together(const void* from, const Weights& w, const Sizes& s, DType dtype, Context& context) {
  const std::size_t size = size_of(dtype);
  const std::int64_t all = s.b * s.c;
  for_weights(s, context, [&](std::int64_t i, std::int64_t first, std::int64_t count) {
    turn(at(from, i * s.d * all + first, size), all, s.d, count, at(w.data, i * w.a + first * s.d, size), s.d, size);
  });
}

}  // namespace fretwork::kronecker::cpu
