// /proc/cpuinfo and Highway's choice.
#include "machine.h"

#include <hwy/targets.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <fstream>

namespace fretwork::cli {

std::string cpu_model() {
  std::ifstream info("/proc/cpuinfo");
  for (std::string line; std::getline(info, line);) {
    if (line.starts_with("model name")) {
      return line.substr(line.find(':') + 2);
    }
  }
  utsname system{};
  return uname(&system) == 0 ? system.machine : "unknown";
}

std::string simd_target() {
  const std::int64_t usable = hwy::SupportedTargets() & HWY_TARGETS;
  return hwy::TargetName(usable & -usable);  // the best has the lowest bit
}

double memory_bytes() {
  return static_cast<double>(sysconf(_SC_PHYS_PAGES)) * static_cast<double>(sysconf(_SC_PAGESIZE));
}

}  // namespace fretwork::cli
