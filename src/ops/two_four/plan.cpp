// Whether a 2:4 product is worth its format.
#include "fretwork/two_four.h"

namespace fretwork {

namespace {

/// Columns up to which reading half the weights is all that counts.
constexpr std::int64_t kMemoryBound = 64;

/// Whether the sparse tensor cores take the product: there are none for exact fp32, and the kernels that feed them copy
/// 16 bytes of a line at a time.
bool sparse_units(std::int64_t k, DType dtype, Precision precision) {
  const std::int64_t kept = k / 2 * static_cast<std::int64_t>(size_of(dtype));
  return kept % 16 == 0 && (dtype != DType::f32 || precision != Precision::ieee);
}

}  // namespace

bool two_four_dense_wins(std::int64_t m, std::int64_t n, std::int64_t k, DType dtype, DeviceType device,
                         Precision precision) {
  if (device == DeviceType::cpu) {
    return false;  // measured from 1 to 2048 columns, on a CPU with AVX-512 and without AMX
  }
  return m > 0 && n > kMemoryBound && !sparse_units(k, dtype, precision);
}

}  // namespace fretwork
