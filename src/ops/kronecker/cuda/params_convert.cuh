// Parameters of the copies between weights and dense matrices; shared by host and device.
#pragma once

namespace fretwork {

/// Strides count elements.
struct KroneckerConvertParams {
  void* w;
  long long w_a, w_b, w_c, w_d;
  void* dense;
  long long dense_row, dense_col;
  unsigned long long* outside;  ///< from_dense: the least place of a non-zero outside the pattern; all ones before
  long long b, c, d;
  long long cols, total;  ///< of the dense matrix
};

inline constexpr int kConvertThreads = 256, kConvertElements = 4;  // of one thread, so that several reads are under way

}  // namespace fretwork
