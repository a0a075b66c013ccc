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
  std::string path;    ///< empty when there is none
  std::string build;   ///< tells one build from another, without the cost of opening it
  std::string reason;  ///< why there is none, and where it was looked for
};
/// Never throws.
const Library& library();
/// "13.0". Opens the library; throws Error when there is none or it does not open.
std::string version();

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
