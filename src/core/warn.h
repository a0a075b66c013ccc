// What a user should hear of but nothing has to stop for.
#pragma once

#include <string>

namespace fretwork {

/// One line on standard error, "fretwork: …", each only once per process.
void warn_once(const std::string& line);

}  // namespace fretwork
