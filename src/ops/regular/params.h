// What the kernels of SPLAT's operators are launched with; shared by host and device. Strides count elements.
#pragma once

namespace fretwork {

/// start + t·stride, 0 ≤ t < count.
struct RegularLine {
  int start, stride, count;
};

struct RegularOperand {
  void* data;
  long long batch, head, row, col;
};

struct RegularParams {
  const RegularLine* rows;     ///< the columns of each row
  const RegularLine* columns;  ///< the rows of each column, or places in the list of them
  const int* list;             ///< null where columns are progressions
  RegularOperand values, by_row, by_col;
  unsigned tasks;    ///< lines, each as often as it has chunks
  int heads, group;  ///< of x; of them, how many share a head of by_col
  int row_count, col_count;
  int width, depth;
  int chunks;  ///< pieces of `depth`, a warp's share each
};

struct RegularSoftmaxParams {
  const RegularLine* rows;
  RegularOperand in, d_out, out;
  float scale;
  int heads, row_count, width;
};

}  // namespace fretwork
