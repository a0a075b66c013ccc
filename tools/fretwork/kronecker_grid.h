// The patterns that Kronecker products are measured on: the grids by name, and those that a user writes.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "fretwork/pattern.h"

namespace fretwork::cli {

using Patterns = std::vector<KroneckerPattern::Sizes>;

/// "facts", "sample" or "paper"; nothing for another name.
std::optional<Patterns> named_grid(const std::string& name);
/// "1,64,64,64;4,64,64,4", or with each as its text, kronecker(1,64,64,64). `where` begins the UsageError that a bad
/// one throws, "bench: --patterns".
Patterns parse_patterns(const std::string& text, const char* where);
/// A pattern a line, its numbers apart by commas or blanks, or a table with columns a, b, c and d; each pattern once.
/// Throws Error when it cannot be read and UsageError, with the line, on what is no pattern; `command` begins both.
Patterns read_patterns(const std::string& file, const char* command);

}  // namespace fretwork::cli
