// The machine the program runs on.
#pragma once

#include <string>

namespace fretwork::cli {

/// The instruction set that Highway chooses here, "AVX3".
std::string simd_target();
/// Of main memory.
double memory_bytes();

}  // namespace fretwork::cli
