// Parameters and tile sizes of the Hopper kernels; shared by host and device.
#pragma once

#include "device/divide.cuh"
#include "device/tensor_map.cuh"

namespace fretwork::kronecker::hopper {

/// A CTA computes 128 rows × `width` columns (64, 128, 192 or 256) at a time, 128 bytes of the depth per stage of a
/// ring. Its first 128 threads fetch, the others multiply.
inline constexpr int kRows = 128, kThreads = 384;
inline constexpr int kStagingBytes = 32768;  ///< where results wait for the copy engine

constexpr int stage_bytes(int width) { return (kRows + width) * 128; }
/// As many as fit, for the memory's sake, but eight are enough.
constexpr int stages(int width) { return 196608 / stage_bytes(width) < 8 ? 196608 / stage_bytes(width) : 8; }
/// The ring begins at a multiple of 1024 bytes, after two barriers for each stage.
constexpr int shared_bytes(int width) { return stages(width) * (stage_bytes(width) - 16) + kStagingBytes + 1024; }

/// Of products, which have the number of a stage's tile beside its barriers.
constexpr int product_shared_bytes(int width) { return shared_bytes(width) - 4 * stages(width); }

/// Of gradients that add up `deltas` (2 or 4) products at once.
constexpr int interleaved_stage_bytes(int deltas) { return (kRows * deltas + 256) * 128; }
constexpr int interleaved_stages(int deltas) { return deltas == 4 ? 2 : 3; }
constexpr int interleaved_shared_bytes(int deltas) {
  return interleaved_stages(deltas) * interleaved_stage_bytes(deltas) + 1024;
}

/// Operands as they lie, for what threads move or read themselves: lines that the copy engine cannot follow, weights
/// that CTAs keep, and, where the d products of a block are multiplied as one dense matrix, what each is made of, for
/// sums that an infinity of another δ has spoilt through the zeros between them.
struct Strands {
  const void *x, *w;
  void* y;
  long long x_line, y_line;  ///< from one row to the next, or batch last from one feature
  long long w_i, w_j, w_k, w_l;
  int c;
  Divisor d;
};

/// Maps have four dimensions: the unit axis, the other axis of a matrix, l, i.
struct ProductParams {
  Map x;        ///< batch × k
  Map weights;  ///< j × k
  Map y;        ///< batch × j
  const void* bias;
  long long bias_stride;
  int activation;  ///< as fretwork::Activation counts
  int batch, b, steps, total;
  Divisor d, col_tiles;
  Divisor share, tail;  ///< this many tiles of the batch go through all weights together; the rest do at the end
  Divisor group;        ///< tiles of such a walk
  Strands strands;
  int* taken;       ///< what CTAs have taken after their first, from 0; or null, and they take turns
  int together;     ///< neighbouring tiles that are taken at once; 1 in turns
  bool behind;      ///< the weights are being packed by the kernel before, and CTAs take turns
  bool mapped;      ///< x and y have maps; else the batch is last, and threads store y
  bool neighbours;  ///< then: x has a map all the same, in which a block's d neighbouring lines are one, and tiles
                    ///< begin at a unit of 16 bytes in it; else threads fetch x, and CTAs take turns
};

/// Partial sums are matrices of b rows, `line` floats apart: c weights, then the row's sum of d_y.
struct GradientParams {
  Map d_y;  ///< j × batch
  Map x;    ///< k × batch
  float* partials;
  int b, c, d, line;
  int row_tiles, col_tiles, steps, total;
  int products;
  int steps_per_part;
  int with_sums;  ///< 1 where d_bias is wanted
  int add;        ///< 1 where `partials` has sums of earlier rows of the batch
};

/// Weights to matrices: to[i·d + l][p][q] = from[i, p, q, l], lines of q `line` elements apart. A CTA moves `wide` of
/// the p·q × `deep` of l. by_rows: neighbours in memory lie along p, and `wide` is whole lines.
struct PackParams {
  const void* from;
  void* to;
  long long stride_i, stride_p, stride_q, stride_l;
  int p, q, d, line;
  int wide, deep, wide_tiles, deep_tiles, by_rows;
};

/// Weights to dense blocks: to[i][p·d + l][q·d + l] = from[i, p, q, l], zeros between; lines `line` elements apart.
struct DensePackParams {
  const void* from;
  void* to;
  long long stride_i, stride_p, stride_q, stride_l;
  int q, line, total;  ///< total: i · p · units of 16 bytes in a line
  Divisor units, p, d;
};

/// The way back, adding `parts` of fp32 sums; column c of row j is the sum that goes to d_bias. A CTA has `slices` ·
/// wide · deep of them in shared memory.
struct UnpackParams {
  const float* from;
  void* to;
  void* bias;                                      ///< or null
  long long from_i, from_l, from_j, from_k, part;  ///< from one sum to the next, and from one part
  long long stride_i, stride_j, stride_k, stride_l, bias_stride;
  int bias_back;  ///< what from_l is too much for the column of the bias
  int b, c, d, parts;
  int wide_tiles, deep_tiles, slices;
  Divisor wide, deep, cols;
};

/// Rows of blocks of features, strided by d, beside the same with the features of one δ together.
struct RegroupParams {
  void *strided, *grouped;
  long long strided_row, strided_block;                 ///< from one row and one block to the next
  long long grouped_row, grouped_block, grouped_delta;  ///< and from one δ
  int d, total;
  Divisor groups, eights, a;  ///< of δ and of features in a block; blocks in a row
  bool tf32;                  ///< fp32 is rounded to it on the way to `grouped`
};
inline constexpr int kRegroupThreads = 256;

/// Elements of a CTA's share in packing and unpacking.
inline constexpr int kPackThreads = 256, kPackElements = 4096, kUnpackElements = 1024, kMostSlices = 8;
inline constexpr int kPackLine = 16;  ///< the least line that is packed by rows

}  // namespace fretwork::kronecker::hopper
