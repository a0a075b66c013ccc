// Compiled kernels on disk. Nothing here throws: a folder that cannot be used only costs the cache.
#pragma once

#include <optional>
#include <string>

#include "runtime/kernels.h"

namespace fretwork::disk_cache {

/// The kernel stored under exactly this key. A file that is broken, or that somebody else could have written, counts as
/// missing, with a warning on stderr.
std::optional<CompiledKernel> load(const std::string& key);

/// Stores it, and removes the least recently used ones beyond the limit.
void store(const std::string& key, const CompiledKernel& kernel);

}  // namespace fretwork::disk_cache
