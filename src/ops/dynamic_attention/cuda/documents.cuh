// Documents as their starts on the device say.
#pragma once

#include "device/types.cuh"
#include "ops/dynamic_attention/cuda/params.h"

namespace fretwork::dynamic_attention_op {

/// Document n − 1; 0 and the last one are the rows before and behind all documents, which have no columns.
struct Document {
  int row, rows, col, cols;
};
__device__ __forceinline__ Document document_of(const Documents& p, int n) {
  const auto cu_row = [&](int d) { return min(max(p.cu_rows[d * p.cu_rows_stride], 0), p.rows); };
  const auto cu_col = [&](int d) { return min(max(p.cu_cols[d * p.cu_cols_stride], 0), p.cols); };
  const int begin = n == 0 ? 0 : cu_row(n - 1), end = n == p.documents + 1 ? p.rows : cu_row(n);
  if (n == 0 || n == p.documents + 1) {
    return {begin, max(end - begin, 0), 0, 0};
  }
  const int col = cu_col(n - 1);
  return {begin, max(end - begin, 0), col, max(cu_col(n) - col, 0)};
}

/// The last n < count whose first(n) ≤ x, of ascending numbers.
template <typename First>
__device__ __forceinline__ int last_at(int count, int x, const First& first) {
  int low = 0, high = count;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (first(middle) <= x ? low : high) = middle;
  }
  return low;
}

}  // namespace fretwork::dynamic_attention_op
