// Warnings, and the memory of those that were given.
#include "core/warn.h"

#include <cstdio>
#include <memory>
#include <mutex>
#include <set>

namespace fretwork {

void warn_once(const std::string& line) {
  static std::mutex& mutex = *std::make_unique<std::mutex>().release();  // a process that ends may still warn
  static auto& said = *std::make_unique<std::set<std::string>>().release();
  const std::lock_guard lock(mutex);
  if (said.insert(line).second) {
    std::fprintf(stderr, "fretwork: %s\n", line.c_str());
  }
}

}  // namespace fretwork
