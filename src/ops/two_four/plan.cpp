// Whether a 2:4 product is worth its format.
#include "fretwork/two_four.h"

namespace fretwork {

namespace {

/// Columns up to which reading half the weights is what counts: beyond, a CPU and exact fp32 have no sparse units to
/// win with, and the dense product that they lose to also pays for the expansion.
constexpr std::int64_t kMemoryBound = 64;

}  // namespace

bool two_four_dense_wins(std::int64_t m, std::int64_t n, std::int64_t k, DType dtype, DeviceType device,
                         Precision precision) {
  if (m == 0 || n == 0 || k == 0) {
    return false;
  }
  const bool sparse_units = device == DeviceType::cuda && (dtype != DType::f32 || precision != Precision::ieee);
  if (sparse_units) {
    return k * static_cast<std::int64_t>(size_of(dtype)) % 32 != 0 && n > kMemoryBound;  // lines off 16-byte units
  }
  return n > kMemoryBound;
}

}  // namespace fretwork
