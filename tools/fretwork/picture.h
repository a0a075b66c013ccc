// Pictures of an occupancy grid as files: PNG, SVG.
#pragma once

#include <filesystem>
#include <string>

#include "pattern/pattern_stats.h"

namespace fretwork::cli {

/// Both throw Error when the file cannot be written.
void write_png(const Occupancy& grid, const std::filesystem::path& file);
void write_svg(const Occupancy& grid, const std::string& title, const std::filesystem::path& file);

}  // namespace fretwork::cli
