// The problem that backends receive for a convolution and its two gradients, after all checks.
//
// A product gathers: position (u, v) of the result reads, at kernel position (r, s), the input's position
//   y = (u·mul + first + r·step) / div,  x likewise,
// if that is an integer inside the image. The forward pass has mul = stride, first = −padding, step = dilation and
// div = 1. The gradient of the input is the same sum with mul = 1, first = padding, step = −dilation and div = stride,
// and with transposed blocks.
#pragma once

#include <array>
#include <cstdint>

#include "core/divide.h"
#include "fretwork/context.h"
#include "fretwork/pattern.h"

namespace fretwork::block_conv {

/// A batch of images; strides in elements.
struct Image {
  void* data = nullptr;
  std::int64_t n = 0, c = 0, h = 0, w = 0;
  std::int64_t n_stride = 0, c_stride = 0, h_stride = 0, w_stride = 0;

  std::int64_t pixels() const { return n * h * w; }
};

/// Packed blocks as stored: entry (output channel y, input channel x) of block number n.
struct Values {
  void* data = nullptr;
  std::int64_t block_stride = 0, row_stride = 0, col_stride = 0;
};

/// Which position of the input a position of the result reads, along one axis. A tap is a kernel position.
struct Axis {
  std::int64_t taps = 1, mul = 1, div = 1, first = 0, step = 1;

  /// The position of the input for position `u` of the result and kernel position `r`, times `div`.
  std::int64_t at(std::int64_t u, std::int64_t r) const { return u * mul + first + r * step; }
};

enum class Kind : std::uint8_t {
  product,  ///< out = Σ op(S)·in (+ bias)
  weight,   ///< S = Σ over pixels of out·inᵀ at the blocks of the layout; `out` is read
};

struct Problem {
  Kind kind = Kind::product;
  DType dtype = DType::f32;
  const BlockLayout* layout = nullptr;  ///< one head per kernel position, r·kw + s
  bool transposed = false;              ///< product only: op(S) = Sᵀ
  Axis y, x;
  Values values;
  Image in, out;
  const void* bias = nullptr;  ///< product only, may be null; one element per channel of `out`
  std::int64_t bias_stride = 0;

  std::int64_t taps() const { return y.taps * x.taps; }
  /// Rows and columns of one block of op(S).
  std::int64_t block_rows() const { return transposed ? layout->sizes().block_cols : layout->sizes().block_rows; }
  std::int64_t block_cols() const { return transposed ? layout->sizes().block_rows : layout->sizes().block_cols; }
  /// Block rows and block columns of op(S) at one kernel position.
  std::int64_t lines() const { return transposed ? layout->sizes().cols : layout->sizes().rows; }
  std::int64_t others() const { return transposed ? layout->sizes().rows : layout->sizes().cols; }
  const BlockIndex& index() const { return transposed ? layout->by_col() : layout->by_row(); }
};

namespace cpu {
void run(const Problem& problem, Context& context);
}
namespace cuda {
void run(const Problem& problem, Context& context);
}

}  // namespace fretwork::block_conv
