// Pictures of an occupancy grid: text for a terminal, PNG, SVG.
#pragma once

#include <filesystem>
#include <string>

#include "survey.h"

namespace fretwork::cli {

/// Framed, two squares to a character, one above the other. Without colours a grid that is not only full and empty
/// squares becomes shades, which take both squares together.
std::string terminal_picture(const Occupancy& grid, bool colour);

/// Both throw Error when the file cannot be written.
void write_png(const Occupancy& grid, const std::filesystem::path& file);
void write_svg(const Occupancy& grid, const std::string& title, const std::filesystem::path& file);

}  // namespace fretwork::cli
