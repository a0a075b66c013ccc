// NVIDIA's run-time compiler, found and opened when first needed. Works without a GPU.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "runtime/kernels.h"

namespace fretwork::nvrtc {

/// The library in use. Searched once: FRETWORK_NVRTC (a file or its folder), the pip package beside this library, one
/// already loaded, the pip package beside torch, the loader's path, CUDA's folders.
struct Library {
  bool found = false;
  std::string path;
  int major = 0, minor = 0;
  std::string reason;  ///< why not, and where it was looked for
};
/// Never throws.
const Library& library();

struct Result {
  bool ok = false;
  std::string cubin;
  std::string symbol;  ///< of the instance
  std::string log;
};

/// Compiles one instance of a program that may include `headers`. A program that does not compile gives ok = false and
/// the log; throws Error when there is no library or it fails otherwise. Threads may compile at the same time.
Result compile(const std::string& program, const std::string& instance, const std::vector<std::string>& options,
               std::span<const EmbeddedSource> headers);

}  // namespace fretwork::nvrtc
