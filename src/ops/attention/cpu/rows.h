// Vector operations on rows of scores on the CPU. There is one table of functions for each accumulator type, for the
// best instruction set of this machine; a call fetches its table once.
#pragma once

#include <cstdint>
#include <numbers>

#include "fretwork/tensor.h"

namespace fretwork::attention_op::cpu {

/// Rows of scores turn into gradients. Counts are whole vectors.
template <typename Acc>
struct GradientRow {
  std::int64_t count = 0;
  Acc* scores = nullptr;      ///< in: scores; out: probabilities, dropped ones zero and kept ones scaled
  Acc* gradients = nullptr;   ///< in: gradients of those; out: gradients of the scores
  const Acc* lse = nullptr;   ///< one, or one for each column
  const Acc* rest = nullptr;  ///< if set, what is to be added to lse: the part that its rounding left out
  const Acc* delta = nullptr;
  bool by_column = false;
  const Acc* keep = nullptr;   ///< if set, zero or the factor of what is kept
  const Acc* slope = nullptr;  ///< if set, the derivative of the soft cap
};

/// The unit that the softmax counts scores in: fp32 in log 2, so that exponentials are powers of two.
template <typename Acc>
inline constexpr double kSoftmaxUnit = sizeof(Acc) == 8 ? 1 : std::numbers::ln2;

template <typename Acc>
struct Rows {
  /// to[n] = factor·data[n·step], any count.
  void (*widen)(const void* data, DType dtype, std::int64_t step, std::int64_t count, Acc factor, Acc* to);
  /// data[n·step] = factor·from[n], rounded once; any count.
  void (*narrow)(const Acc* from, std::int64_t count, Acc factor, void* data, DType dtype, std::int64_t step);
  Acc (*dot)(const Acc* x, const Acc* y, std::int64_t count);  ///< any count

  // The rest works on whole vectors.
  void (*scale)(Acc* x, std::int64_t count, Acc factor);
  void (*add)(Acc* x, const Acc* y, std::int64_t count);
  void (*multiply)(Acc* x, const Acc* y, std::int64_t count);
  /// x[n] = −inf where bit n of `words` is not set.
  void (*select)(Acc* x, const std::uint32_t* words, std::int64_t count);
  /// x = −inf outside of [begin + r, min(end + r, limit)) in row r of `rows`, which lie `stride` apart.
  void (*band)(Acc* x, std::int64_t stride, std::int64_t rows, std::int64_t count, std::int64_t begin, std::int64_t end,
               std::int64_t limit);
  /// x = cap·tanh(x / cap), and its derivative if `slope` is not null.
  void (*cap)(Acc* x, std::int64_t count, Acc cap, Acc* slope);
  /// x −= slope·|position − positions|.
  void (*alibi)(Acc* x, std::int64_t count, const Acc* positions, Acc position, Acc slope);
  /// keep[n] = factor where the element at (row, column) is kept, else 0: by columns of one row, by rows of one column.
  void (*keep_columns)(unsigned state, const std::int64_t* tokens, std::int64_t count, std::uint64_t threshold,
                       Acc factor, Acc* keep);
  void (*keep_rows)(const unsigned* states, std::int64_t token, std::int64_t count, std::uint64_t threshold, Acc factor,
                    Acc* keep);
  /// One step of the softmax of `rows` rows of scores, each worth factor·x in the softmax's unit: x becomes the
  /// exponential of factor·(x − the new top). tops has the highest x, sums the sum of the exponentials; factors is what
  /// earlier results are to be multiplied by. factor > 0. Differences come first: a large score times a factor would be
  /// rounded, or overflow.
  void (*soften)(Acc* x, std::int64_t stride, std::int64_t rows, std::int64_t count, Acc factor, Acc* tops, Acc* sums,
                 Acc* factors);
  void (*gradient)(const GradientRow<Acc>& row);
};

template <typename Acc>
const Rows<Acc>& row_functions();

}  // namespace fretwork::attention_op::cpu
