// What the softmax kernels are launched with; shared by host and device. Strides count elements.
#pragma once

namespace fretwork {

/// One block row of one head: blocks [first, first + count) of the packed order.
struct alignas(16) SoftmaxLine {
  int first, count, head, row;
};

struct SoftmaxPacked {
  void* data;
  long long z, block, row, col;
};

/// An extra; `vector` says that whole runs of it may be read at once.
struct SoftmaxDense {
  void* data;
  long long z, h, row, col;
  int vector;
};

/// n / by = n · multiplier >> shift for n < 2^31.
struct SoftmaxDivisor {
  unsigned by, multiplier, shift;
};

/// One task is a warp's rows of a line of a batch.
struct SoftmaxTasks {
  unsigned count;
  int block_rows;
  SoftmaxDivisor row_groups, batch;  ///< a block row's groups of rows
};

struct SoftmaxParams {
  const SoftmaxLine* lines;
  const int* columns;  ///< block column of each packed block
  SoftmaxPacked values, out;
  SoftmaxDense rpe, key_padding, attn;
  double scale;
  SoftmaxTasks tasks;
};

struct SoftmaxBackwardParams {
  const SoftmaxLine* lines;
  SoftmaxPacked out, d_out, d_values;
  void* dots;  ///< Σ out·d_out of each row of (Z,H,M), where rpe's gradient needs it
  double scale;
  long long heads, rows;  ///< rows in elements
  SoftmaxTasks tasks;
};

/// rpe's gradient: sizes of the result, and of what is summed into each of its elements.
struct SoftmaxRpeParams {
  const int* block_at;  ///< packed block of (head, block row, block column), or −1
  SoftmaxPacked out, d_out;
  const void* dots;
  SoftmaxDense d_rpe;
  long long sizes[4], summed[4];  ///< (z, h, row, column)
  long long heads, rows, cols;    ///< rows and columns in elements
  int block_rows, block_cols;
};

}  // namespace fretwork
