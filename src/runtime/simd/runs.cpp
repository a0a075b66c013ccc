// Copies of runs in whole vectors. Compiled once per instruction set.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "runtime/simd/runs.cpp"
#include <hwy/foreach_target.h>
// After foreach_target.h.
#include <hwy/highway.h>

#include "runtime/simd/runs.h"

HWY_BEFORE_NAMESPACE();
namespace fretwork::simd::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

/// A run's last vector goes past its end, where the next run, or the next row, then writes.
void JoinRuns(std::span<const Run> runs, std::int64_t rows, std::byte* to) {
  const hn::CappedTag<std::uint8_t, kRunSlack> d;
  constexpr auto kLanes = static_cast<std::int64_t>(hn::MaxLanes(d));
  for (std::int64_t k = 0; k < rows; ++k) {
    for (const Run& run : runs) {
      const auto* const from = reinterpret_cast<const std::uint8_t*>(run.from + k * run.stride);
      auto* const out = reinterpret_cast<std::uint8_t*>(to);
      for (std::int64_t n = 0; n < run.bytes; n += kLanes) {
        hn::StoreU(hn::LoadU(d, from + n), d, out + n);
      }
      to += run.bytes;
    }
  }
}

}  // namespace fretwork::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fretwork::simd {
HWY_EXPORT(JoinRuns);

void join_runs(std::span<const Run> runs, std::int64_t rows, std::byte* to) {
  HWY_DYNAMIC_DISPATCH(JoinRuns)(runs, rows, to);
}

}  // namespace fretwork::simd
#endif
