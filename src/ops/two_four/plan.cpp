// Where a dense product is faster than a 2:4 one, by measurements (the rows `fallback` of bench/results).
#include "fretwork/two_four.h"
#include "ops/two_four/problem.h"
#include "runtime/cuda_driver.h"

namespace fretwork::two_four {

bool dense_wins(std::int64_t m, std::int64_t n, std::int64_t k, DType dtype, Precision precision, bool behind) {
  if (dtype == DType::f32) {
    // Exact fp32 has no sparse unit, and rounding to tf32 first takes longer than all but large products.
    return precision == Precision::ieee || behind || double(m) * double(n) * double(k) < double(1ll << 34);
  }
  // Few columns wait for the weight, of which half is not read; with more, mma.sp is slower than a dense wgmma. Large
  // weights take long to expand, and those whose lines begin anywhere longer than anything else.
  const bool in_units = k / 2 * static_cast<std::int64_t>(size_of(dtype)) % 16 == 0;
  return behind && in_units && n > 64 && (n > 256 || m * k < 1 << 25);
}

bool dense_wins(std::int64_t m, std::int64_t n, std::int64_t k, DType dtype, Device device, Precision precision) {
  if (device.type == DeviceType::cpu || m == 0 || n == 0 || k == 0) {
    return false;  // measured from 1 to 2048 columns, on a CPU with AVX-512 and without AMX
  }
  namespace driver = fretwork::cuda;
  const bool behind = driver::available() && device.index < driver::device_count() &&
                      driver::device_info(device.index).arch >= 90 && driver::kernel_arch(device.index) != "sm_90a";
  return dense_wins(m, n, k, dtype, precision, behind);
}

}  // namespace fretwork::two_four
