// Pictures of an occupancy grid: text for a terminal, SVG, and the colours of both.
#pragma once

#include <string>

#include "pattern/pattern_stats.h"

namespace fretwork {

/// Framed, two squares to a character, one above the other. Without colours a grid that is not only full and empty
/// squares becomes shades, which take both squares together.
std::string terminal_picture(const Occupancy& grid, bool colour);
std::string svg_picture(const Occupancy& grid, const std::string& title);

struct Colour {
  std::uint8_t red, green, blue;
};
/// What a square is painted with, from paper to deep blue.
Colour ink(double share);

}  // namespace fretwork
