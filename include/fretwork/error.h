// The one exception type of the library. Its text is always "op: argument: expected …, got …".
#pragma once

#include <stdexcept>
#include <string>
#include <string_view>

namespace fretwork {

/// What every failed check throws.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;

  Error(std::string_view op, std::string_view argument, std::string_view expected, std::string_view got)
      : std::runtime_error(std::string(op) + ": " + std::string(argument) + ": expected " + std::string(expected) +
                           ", got " + std::string(got)) {}
};

}  // namespace fretwork
