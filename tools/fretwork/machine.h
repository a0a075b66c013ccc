// The machine the program runs on, as a person would name it.
#pragma once

#include <string>

namespace fretwork::cli {

/// "AMD EPYC 9454 48-Core Processor".
std::string cpu_model();
/// The instruction set that Highway chooses here, "AVX3".
std::string simd_target();
/// Of main memory.
double memory_bytes();

}  // namespace fretwork::cli
