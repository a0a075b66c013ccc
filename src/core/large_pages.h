// Large pages for fresh memory.
#pragma once

#include <cstddef>

namespace fretwork {

/// Fresh memory's pages are provided one by one as they are first written, which can take longer than the writing. Asks
/// for large ones instead, where the system has them; memory in use already stays as it is.
void ask_for_large_pages(const void* begin, std::size_t bytes);

}  // namespace fretwork
