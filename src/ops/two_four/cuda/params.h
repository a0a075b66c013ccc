// Parameters of the portable and the simple kernels, and of the copies that prepare their operands; shared by host and
// device.
#pragma once

#include "ops/two_four/cuda/out_type.cuh"

namespace fretwork::two_four {

/// Lines of elements along k (or b's lines across it); strides in elements.
struct LinesArg {
  const void* data;
  long long line, along, batch;
};

/// Metadata as bytes: those of a word are neighbours, words lie `along` bytes and lines `line` bytes apart.
struct MetadataArg {
  const void* data;
  long long line, along;
  int word_shift;  ///< a word has 1 << word_shift bytes
};

/// One number for each line; stride 0: one for all; null: none.
struct VectorArg {
  const void* data;
  long long stride;
};

/// Problem as the kernels see it. b's lines are columns of b, whichever of its strides is 1.
struct ProductParams {
  LinesArg values, b;
  MetadataArg words;
  void* c;
  long long c_row, c_col, c_batch;
  VectorArg bias, scale_s, scale_b;
  long long m, n, k;
  long long row_tiles, col_tiles, band;  ///< tiles of c; `band` rows of them are done before the next
  const float* scale_out;                ///< or null
  OutType out, bias_type;
  int activation;  ///< as fretwork::Activation counts
  bool c_by_row;   ///< the nearest neighbours in c are those of a row
  bool c_vector;   ///< 16 bytes of c can be written at once along them
};

/// to[z][line][i] = from[z][line][i], where `to` has lines of `pitch` elements.
struct PackLinesParams {
  LinesArg from;
  void* to;
  long long lines, count, pitch;
  long long line_tiles, count_tiles;
};

/// Metadata as contiguous bytes, `pitch` (a multiple of 4) for each line; behind the line's groups valid nibbles.
struct PackMetadataParams {
  MetadataArg from;
  void* to;
  long long lines, groups, pitch;
};

}  // namespace fretwork::two_four
