// What the softmax kernels are launched with; shared by host and device. Strides count elements.
#pragma once

#include "device/divide.cuh"

namespace fretwork {

/// One block row of one head: blocks [first, first + count) of the packed order.
struct alignas(16) SoftmaxLine {
  int first, count, head, row;
};

struct SoftmaxPacked {
  void* data;
  long long z, block, row, col;
};

/// Element types that are told apart at run time.
enum class SoftmaxType { f64, f32, f16, bf16, boolean };

/// What is added or takes entries out, as a kernel is compiled for: nothing, tensors of the values' type, or of any.
enum class SoftmaxExtras { none, same, mixed };

/// An extra, or rpe's gradient.
struct SoftmaxDense {
  void* data;
  long long z, h, row, col;
  SoftmaxType type;
  bool multiplies;  ///< its zeros take entries out; else it is added
};

/// One task is a warp's rows of a line of a batch.
struct SoftmaxTasks {
  unsigned count;
  int block_rows, block_cols;
  int warp_bits;              ///< 2^warp_bits warps share a row
  Divisor row_groups, batch;  ///< a block row's groups of rows
};

struct SoftmaxParams {
  const SoftmaxLine* lines;
  const int* columns;  ///< block column of each packed block
  SoftmaxPacked values, out;
  SoftmaxDense extras[3];  ///< those that take entries out come last, so that nothing added there counts
  int extra_count;
  double scale;
  SoftmaxTasks tasks;
};

struct SoftmaxBackwardParams {
  const SoftmaxLine* lines;
  SoftmaxPacked out, d_out, d_values;
  void* dots;  ///< Σ out·d_out of each row of (Z,H,M), where rpe's gradient needs it, else null
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
