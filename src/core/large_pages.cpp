#include "core/large_pages.h"

#include <cstdint>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace fretwork {

void ask_for_large_pages([[maybe_unused]] const void* begin, [[maybe_unused]] std::size_t bytes) {
#if defined(__linux__)
  constexpr std::uintptr_t kPage = 4096, kLarge = 2 << 20;
  const auto first = reinterpret_cast<std::uintptr_t>(begin);
  const std::uintptr_t page = (first + kPage - 1) / kPage * kPage, last = first + bytes;
  if (page + kLarge <= last) {
    madvise(reinterpret_cast<void*>(page), last - page, MADV_HUGEPAGE);
  }
#endif
}

}  // namespace fretwork
