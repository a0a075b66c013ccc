// What the CPU products and gradients share: the layout of δ and columns on vector lanes, and packing of operands.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "ops/kronecker/problem.h"
#include "runtime/simd/finish.h"
#include "runtime/simd/tiles.h"

namespace fretwork::kronecker::cpu {

using simd::finish;
using simd::Place;
using simd::Tiles;

/// Results larger than this go past the caches, which they would only flush.
constexpr std::int64_t kStreamedBytes = 4 << 20;

/// [0, count) in pieces of equal size but the last.
struct Split {
  std::int64_t count, each;
  std::int64_t pieces() const { return ceil_div(count, each); }
  std::int64_t size(std::int64_t n) const { return std::min(each, count - n * each); }
};

/// `count` in pieces of at most `most`, alike, in multiples of `unit`.
inline Split even(std::int64_t count, std::int64_t most, std::int64_t unit) {
  return {count, ceil_div(ceil_div(count, ceil_div(count, most)), unit) * unit};
}

/// How many of `jobs` are worth a thread, if all of them take `operations`.
inline std::int64_t grain(std::int64_t jobs, double operations) {
  constexpr double kLeast = 1e6;
  return static_cast<std::int64_t>(std::clamp(static_cast<double>(jobs) * kLeast / operations, 1.0,
                                              static_cast<double>(std::max<std::int64_t>(jobs, 1))));
}

/// Calls f(job) for all `jobs`, which take `operations` together.
template <typename F>
void for_jobs(std::int64_t jobs, double operations, Context& context, const F& f) {
  context.executor->parallel_for(jobs, grain(jobs, operations), [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t job = begin; job < end; ++job) {
      f(job);
    }
  });
}

inline double weights_of(const Sizes& s) { return static_cast<double>(s.a * s.b * s.c) * static_cast<double>(s.d); }
/// A copy of an element into another order takes as long as so many operations.
constexpr double kCopy = 16;
/// Of a product or a gradient of weights. Its operands are packed, and its results stored.
inline double operations_of(const Sizes& s, std::int64_t batch) {
  const double features = static_cast<double>(s.a * (s.b + s.c)) * static_cast<double>(s.d);
  return (2 * weights_of(s) + kCopy * features) * static_cast<double>(std::max<std::int64_t>(batch, 8));
}

/// Neighbouring δ that share a vector: `count` of them in a run of 2ʳ lanes.
struct Chunk {
  std::int64_t first, count;
  int log;
  std::int64_t run() const { return std::int64_t{1} << log; }
  bool full() const { return count == run(); }
};

/// All δ in chunks of at most `longest` lanes, few of which stay empty.
inline std::vector<Chunk> chunks(std::int64_t d, std::int64_t longest) {
  std::vector<Chunk> all;
  for (std::int64_t first = 0; first < d;) {
    const std::int64_t left = std::min(d - first, longest);
    int log = 0;
    while (std::int64_t{1} << log < left) {
      ++log;
    }
    if (left * 10 < (std::int64_t{1} << log) * 7) {
      --log;
    }
    all.push_back({first, std::min(left, std::int64_t{1} << log), log});
    first += all.back().count;
  }
  return all;
}

/// Columns of a result, each a run of lanes, in vectors, and these in panels as wide as a tile.
class Columns {
 public:
  struct Panel {
    std::int64_t first, count;           ///< columns
    std::int64_t first_vector, vectors;  ///< and their place
    std::int64_t width;                  ///< in lanes
  };
  Columns(std::int64_t count, std::int64_t run, const Tiles& tiles)
      : count_(count),
        lanes_(tiles.lanes),
        in_vector_(tiles.lanes / run),
        vectors_(ceil_div(count, in_vector_)),
        panels_(ceil_div(vectors_, tiles.vectors)) {}
  std::int64_t panels() const { return panels_; }
  std::int64_t lanes() const { return vectors_ * lanes_; }
  Panel panel(std::int64_t n) const {
    const std::int64_t from = vectors_ * n / panels_, to = vectors_ * (n + 1) / panels_;
    return {from * in_vector_, std::min(to * in_vector_, count_) - from * in_vector_, from, to - from,
            (to - from) * lanes_};
  }

 private:
  std::int64_t count_, lanes_, in_vector_, vectors_, panels_;
};

/// An operand of one product per δ, as its caller has it: strides from one row, column and δ to the next.
struct Operand {
  void* data = nullptr;
  std::int64_t row = 0, col = 0, delta = 0;
};

/// What a thread needs to work on tiles, kept between calls.
struct Buffers {
  simd::Scratch left, right, sums;
  static Buffers& of_thread() {
    thread_local Buffers buffers;
    return buffers;
  }
};

/// Packs and stores for one element type.
class Packing {
 public:
  Packing(DType dtype, const Tiles& tiles) : tiles_(tiles), size_(static_cast<std::int64_t>(size_of(dtype))) {}

  void* at(void* data, std::int64_t element) const { return static_cast<std::byte*>(data) + element * size_; }
  Operand at(const Operand& o, std::int64_t row, std::int64_t col, std::int64_t delta) const {
    return {at(o.data, row * o.row + col * o.col + delta * o.delta), o.row, o.col, o.delta};
  }
  /// x, y or their gradients, of diagonal block i, by (n, feature, l): `inner` features of each.
  Operand block(const Matrix& of, std::int64_t i, std::int64_t inner, const Sizes& s) const {
    return {at(of.data, i * inner * s.d * of.feature), of.batch, s.d * of.feature, of.feature};
  }
  std::int64_t padded(std::int64_t depth) const { return ceil_div(depth, tiles_.group) * tiles_.group; }
  std::size_t bytes(std::int64_t elements) const { return static_cast<std::size_t>(elements) * tiles_.element; }

  /// out[k][j·run + l] = from(k, j, l): one panel of columns, with zeros where there are none.
  void right(const Operand& from, std::int64_t depth, const Chunk& chunk, const Columns::Panel& panel,
             std::byte* out) const;
  /// How a tile of rows of the left side is packed: row by row, or all rows of each place in depth together.
  struct Strip {
    bool together;
    std::int64_t row, step;  ///< elements from one row, and from one step, to the next
  };
  Strip strip(const Operand& from, std::int64_t depth, const Chunk& chunk) const {
    const std::int64_t run = chunk.run();
    const bool together = tiles_.group > 1 || (chunk.full() && from.row == run * from.delta);
    return together ? Strip{true, run * tiles_.group, run * tiles_.group * tiles_.rows}
                    : Strip{false, depth * run, run};
  }
  /// out(i, k, l) = from(i, k, l) for a tile of rows, of which `rows` exist.
  Strip left(const Operand& from, std::int64_t rows, std::int64_t depth, const Chunk& chunk, std::byte* out) const;
  /// to(i, j, l) = sums[i][j·run + l], rounded.
  void store(const std::byte* sums, std::int64_t sum_stride, std::int64_t rows, std::int64_t cols, const Chunk& chunk,
             const Operand& to, bool stream) const;

 private:
  const Tiles& tiles_;
  std::int64_t size_;
};

inline void Packing::right(const Operand& from, std::int64_t depth, const Chunk& chunk, const Columns::Panel& panel,
                           std::byte* out) const {
  if (chunk.run() == 1) {
    tiles_.pack({from.data, from.row, from.col}, depth, panel.count, panel.width, out, 0);
    return;
  }
  const std::int64_t used = panel.count * chunk.run();
  if (chunk.full() && from.col == chunk.run() * from.delta) {  // columns go on from one another
    tiles_.pack({from.data, from.row, from.delta}, depth, used, panel.width, out, 0);
    return;
  }
  for (std::int64_t k = 0; k < depth; ++k, out += bytes(panel.width)) {
    tiles_.pack({at(from.data, k * from.row), from.col, from.delta}, panel.count, chunk.count, chunk.run(), out, 0);
    std::memset(out + bytes(used), 0, bytes(panel.width - used));
  }
}

inline Packing::Strip Packing::left(const Operand& from, std::int64_t rows, std::int64_t depth, const Chunk& chunk,
                                    std::byte* out) const {
  const Strip form = strip(from, depth, chunk);
  const std::int64_t run = chunk.run();
  if (form.together) {
    const bool pairs = tiles_.group > 1;
    tiles_.pack({from.data, from.col, pairs ? from.row : from.delta}, depth, rows * run, tiles_.rows * run, out, 0);
    return form;
  }
  const std::size_t row_bytes = bytes(form.row);
  if (chunk.full() && from.col == run * from.delta) {
    tiles_.pack({from.data, from.row, from.delta}, rows, form.row, form.row, out, 0);
  } else if (run == 1) {
    tiles_.pack({from.data, from.row, from.col}, rows, depth, form.row, out, 0);
  } else {
    for (std::int64_t i = 0; i < rows; ++i) {
      tiles_.pack({at(from.data, i * from.row), from.col, from.delta}, depth, chunk.count, run,
                  out + static_cast<std::size_t>(i) * row_bytes, 0);
    }
  }
  std::memset(out + static_cast<std::size_t>(rows) * row_bytes, 0,
              static_cast<std::size_t>(tiles_.rows - rows) * row_bytes);
  return form;
}

inline void Packing::store(const std::byte* sums, std::int64_t sum_stride, std::int64_t rows, std::int64_t cols,
                           const Chunk& chunk, const Operand& to, bool stream) const {
  const std::int64_t run = chunk.run();
  if (chunk.full() && to.col == run * to.delta) {
    tiles_.store(sums, sum_stride, rows, cols * run, {to.data, to.row, to.delta}, stream);
    return;
  }
  if (run == 1) {
    tiles_.store(sums, sum_stride, rows, cols, {to.data, to.row, to.col}, stream);
    return;
  }
  for (std::int64_t j = 0; j < cols; ++j) {
    tiles_.store(sums + static_cast<std::size_t>(j * run) * tiles_.sum, sum_stride, rows, chunk.count,
                 {at(to.data, j * to.col), to.row, to.delta}, stream && chunk.full());
  }
}

/// to[j] += Σ_i from[i][j], or to[i] += Σ_j from[i][j] if `along`; all of the type of sums.
void add_up(const void* from, std::int64_t rows, std::int64_t cols, bool along, void* to, DType dtype);

/// The gradient of weights of a few batch rows or of small blocks (`few.cpp`); false where others are faster.
bool run_as_it_lies(const WeightProblem& problem, bool last, Context& context);

// Copies that bring the elements of one δ together, so that a·d blocks with d = 1 remain (`regroup.cpp`).

/// simd::turn of elements of `size` bytes.
void turn(const void* from, std::int64_t from_pitch, std::int64_t rows, std::int64_t cols, void* to,
          std::int64_t to_pitch, std::size_t size);

/// Rows of features (i, k, l), k < `inner`, to contiguous rows of (i, l, k); and the way back. `from` and `to` have
/// feature == 1. Threads have rows of their own, or if not `by_rows` blocks i, as those have that read them next.
void take_apart(const Matrix& from, std::int64_t rows, const Sizes& s, std::int64_t inner, void* to, bool by_rows,
                DType dtype, Context& context);
void put_together(const void* from, std::int64_t rows, const Sizes& s, std::int64_t inner, const Matrix& to,
                  DType dtype, Context& context);

/// Blocks for which copies can pay where pairs are multiplied: of many outputs and inputs, or of many of either.
inline bool is_broad(const Sizes& s) { return s.b * s.c >= 16 * (s.b + s.c); }
inline bool is_long(const Sizes& s) { return std::max(s.b, s.c) >= 64; }
/// Whether weights lie as (a, b, c, d) or (a, c, b, d) without gaps.
bool is_compact(const Weights& w, const Sizes& s);
/// Such weights to (a, d, b, c) or (a, d, c, b), as which the result shows them.
Weights take_apart(const Weights& w, const Sizes& s, void* to, DType dtype, Context& context);
/// From (a, d, b, c) to such weights (a, b, c, d).
void put_together(const void* from, const Weights& w, const Sizes& s, DType dtype, Context& context);

}  // namespace fretwork::kronecker::cpu
