// Highway's choice, and what the system says.
#include "machine.h"

#include <hwy/targets.h>
#include <unistd.h>

namespace fretwork::cli {

std::string simd_target() {
  const std::int64_t usable = hwy::SupportedTargets() & HWY_TARGETS;
  return hwy::TargetName(usable & -usable);  // the best has the lowest bit
}

double memory_bytes() {
  return static_cast<double>(sysconf(_SC_PHYS_PAGES)) * static_cast<double>(sysconf(_SC_PAGESIZE));
}

}  // namespace fretwork::cli
