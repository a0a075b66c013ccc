// Dense products by cuBLASLt, opened with dlopen where it is installed. Minimal declarations; no CUDA header at build
// time.
#pragma once

#include <cstddef>
#include <cstdint>

#include "fretwork/context.h"

namespace fretwork::cublas {

/// Whether the library can be opened. FRETWORK_CUBLAS=0 keeps it closed.
bool available();

/// Column-major matrices of a strided batch. A transposed one is stored as cols × rows.
struct Matrix {
  void* data = nullptr;
  std::int64_t lead = 0;   ///< elements from a stored column to the next
  std::int64_t batch = 0;  ///< elements from a matrix to the next
  bool transposed = false;
};

/// out (rows × cols) = left (rows × depth) · right (depth × cols), for each of `batches`, of 16-bit types. Sums are
/// fp32 and rounded once. `out` is not transposed.
struct Product {
  DType dtype = DType::f16;
  std::int64_t rows = 0, cols = 0, depth = 0, batches = 1;
  Matrix left, right, out;
  const void* bias = nullptr;  ///< of each row, contiguous; or null
};

/// Whether the library has a kernel for it on this device.
bool fits(const Product& product, int device);
/// Runs what fits.
void run(const Product& product, Context& context);

}  // namespace fretwork::cublas
