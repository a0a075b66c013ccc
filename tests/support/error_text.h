// What the tests of bad calls compare: the text of the Error that a call throws.
#pragma once

#include <string>

#include "fretwork/error.h"

namespace fretwork {

/// The error's text, or "no error".
template <typename Body>
std::string error_of(const Body& body) {
  try {
    body();
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

}  // namespace fretwork
