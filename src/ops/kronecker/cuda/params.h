// Parameters of the simple, the portable and the exact fp32 kernels; shared by host and device.
#pragma once

namespace fretwork::kronecker {

/// Strides in elements of an operand of a·d products: from one i, one l, one line and one entry of a line to the next.
/// `fast` is the innermost of its axes: 0 for l, 1 for line, 2 for entry.
struct ProductOperand {
  void* data;
  long long i, l, line, entry;
  int fast;
  int unit;  ///< bytes that can be moved at once along its lines, 16 at most
};

/// out[i,l][row, col] = activation(Σ_t left[i,l][row, t]·right[i,l][col, t] + bias[i,l][col]).
struct ProductParams {
  ProductOperand left, right, out;
  const void* bias;
  long long bias_i, bias_l, bias_col;
  long long rows, cols, depth, a, d;
  long long l_groups, row_tiles, col_tiles;
  long long pieces, piece;  ///< of the depth: their number, and the length of each
  long long out_piece;      ///< from the result of one piece to that of the next
  int activation;           ///< as fretwork::Activation counts
  bool vector;              ///< 16 bytes of the result can be written at once along its innermost axis
};

/// to[feature] = Σ_n from[n, feature], over a piece of the batch.
struct BatchSumParams {
  const void* from;
  long long batch_stride, feature_stride, batch, features;
  long long piece;
  void* to;  ///< pieces × features, in the type of sums
};

/// to = Σ_p from[p], element by element; to has the shape (a, b, c, d) and any strides.
struct PieceSumParams {
  const void* from;
  long long pieces, count;
  void* to;
  long long sizes[4], strides[4];
};

}  // namespace fretwork::kronecker
