// How full a square is becomes one of a few shades; every kind of picture draws shades.
#include "pattern/picture.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <vector>

#include "pattern/checks.h"

namespace fretwork {
namespace {

/// Shade 0 is empty and only that, the last is full and only that. The root keeps thin patterns visible.
int shade(double share, int shades) {
  if (share <= 0 || share >= 1) {
    return share > 0 ? shades - 1 : 0;
  }
  return 1 + std::min(shades - 3, static_cast<int>(std::sqrt(share) * (shades - 2)));
}

bool is_full_or_empty(const Occupancy& grid) {
  return std::all_of(grid.share.begin(), grid.share.end(), [](double s) { return s <= 0 || s >= 1; });
}

/// A square below the last row is no square: −1.
int shade_at(const Occupancy& grid, std::int64_t y, std::int64_t x, int shades) {
  return y < grid.rows ? shade(grid.at(y, x), shades) : -1;
}

std::string coloured_row(const Occupancy& grid, std::int64_t y) {
  constexpr std::array kPalette = {236, 23, 24, 31, 38, 45};
  constexpr int kShades = static_cast<int>(kPalette.size());
  std::string line;
  int last_upper = -2, last_lower = -2;
  for (std::int64_t x = 0; x < grid.cols; ++x) {
    const int upper = shade_at(grid, y, x, kShades), lower = shade_at(grid, y + 1, x, kShades);
    if (upper != last_upper || lower != last_lower) {
      const auto code = [&](int tone) { return std::to_string(kPalette[static_cast<std::size_t>(tone)]) + "m"; };
      line += "\033[38;5;" + code(upper);
      line += lower < 0 ? "\033[49m" : "\033[48;5;" + code(lower);
    }
    line += "▀";
    last_upper = upper;
    last_lower = lower;
  }
  return line + "\033[0m";
}

std::string plain_row(const Occupancy& grid, std::int64_t y) {
  constexpr std::array kHalves = {" ", "▄", "▀", "█"};
  std::string line;
  for (std::int64_t x = 0; x < grid.cols; ++x) {
    const int upper = shade_at(grid, y, x, 3) > 0, lower = shade_at(grid, y + 1, x, 3) > 0;
    line += kHalves[static_cast<std::size_t>(2 * upper + lower)];
  }
  return line;
}

std::string shaded_row(const Occupancy& grid, std::int64_t y) {
  constexpr std::array kShades = {" ", "░", "▒", "▓", "█"};
  std::string line;
  for (std::int64_t x = 0; x < grid.cols; ++x) {
    const double upper = grid.at(y, x), lower = y + 1 < grid.rows ? grid.at(y + 1, x) : upper;
    line += kShades[static_cast<std::size_t>(shade((upper + lower) / 2, static_cast<int>(kShades.size())))];
  }
  return line;
}

constexpr int kInks = 24;

Colour ink_of(int shade) {
  if (shade == 0) {
    return {0xf7, 0xf6, 0xf2};
  }
  const double depth = static_cast<double>(shade) / (kInks - 1);
  const auto mix = [&](int light, int dark) { return static_cast<std::uint8_t>(light + (dark - light) * depth); };
  return {mix(0xdc, 0x0b), mix(0xe8, 0x3c), mix(0xf0, 0x5d)};
}

std::string hex(Colour colour) {
  constexpr std::string_view kDigits = "0123456789abcdef";
  std::string text = "#";
  for (const std::uint8_t part : {colour.red, colour.green, colour.blue}) {
    text += kDigits[part >> 4];
    text += kDigits[part & 15];
  }
  return text;
}

std::string escaped(const std::string& text) {
  std::string safe;
  for (const char c : text) {
    safe += c == '&' ? "&amp;" : c == '<' ? "&lt;" : std::string(1, c);
  }
  return safe;
}

/// The squares of each shade as the outline of an SVG path.
std::vector<std::string> outlines(const Occupancy& grid) {
  std::vector<std::string> paths(kInks);
  for (std::int64_t y = 0; y < grid.rows; ++y) {
    for (std::int64_t x = 0, run = 1; x < grid.cols; x += run) {
      const int tone = shade(grid.at(y, x), kInks);
      for (run = 1; x + run < grid.cols && shade(grid.at(y, x + run), kInks) == tone; ++run) {
      }
      const std::string width = std::to_string(run);
      paths[static_cast<std::size_t>(tone)] +=
          "M" + std::to_string(x) + " " + std::to_string(y) + "h" + width + "v1h-" + width + "z";
    }
  }
  return paths;
}

}  // namespace

Colour ink(double share) { return ink_of(shade(share, kInks)); }

std::string terminal_picture(const Occupancy& grid, bool colour) {
  const bool plain = is_full_or_empty(grid);
  std::string edge;
  for (std::int64_t x = 0; x < grid.cols; ++x) {
    edge += "─";
  }
  std::string text = "┌" + edge + "┐\n";
  for (std::int64_t y = 0; y < grid.rows; y += 2) {
    text += "│" + (colour ? coloured_row(grid, y) : plain ? plain_row(grid, y) : shaded_row(grid, y)) + "│\n";
  }
  return text + "└" + edge + "┘\n";
}

std::string svg_picture(const Occupancy& grid, const std::string& title) {
  const auto sides = [&](std::int64_t zoom) {
    return "width=\"" + std::to_string(grid.cols * zoom) + "\" height=\"" + std::to_string(grid.rows * zoom) + "\"";
  };
  std::string text = "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 " + std::to_string(grid.cols) + " " +
                     std::to_string(grid.rows) + "\" " + sides(4) + " shape-rendering=\"crispEdges\">\n<title>" +
                     escaped(title) + "</title>\n<rect " + sides(1) + " fill=\"" + hex(ink_of(0)) + "\"/>\n";
  const std::vector<std::string> paths = outlines(grid);
  for (int tone = 1; tone < kInks; ++tone) {
    if (const std::string& path = paths[static_cast<std::size_t>(tone)]; !path.empty()) {
      text += "<path fill=\"" + hex(ink_of(tone)) + "\" d=\"" + path + "\"/>\n";
    }
  }
  return text + "</svg>\n";
}

std::string draw(const PatternPtr& pattern, const DrawOptions& options) {
  constexpr std::int64_t kMaxRows = 96;  // 48 lines
  const PatternStats stats(check_pattern("draw", "pattern", pattern));
  stats.check_head(options.head);
  const Occupancy grid = stats.occupancy(options.head, kMaxRows, std::max<std::int64_t>(1, options.width - 2));
  std::string text = terminal_picture(grid, options.colour);
  if (stats.heads() > 1) {
    text += "head " + std::to_string(options.head) + " of " + std::to_string(stats.heads()) + "\n";
  }
  const auto* layout = dynamic_cast<const BlockLayout*>(pattern.get());
  if (grid.cell > (layout != nullptr ? layout->sizes().block_rows : 1)) {
    const std::string side = std::to_string(grid.cell);
    text += "shades: how full each square of " + side + " x " + side + " elements is\n";
  }
  return text;
}

std::string draw_svg(const PatternPtr& pattern, std::int64_t head) {
  constexpr std::int64_t kMost = 256;  // squares to a side
  constexpr std::size_t kLongest = 120;
  const PatternStats stats(check_pattern("draw_svg", "pattern", pattern));
  stats.check_head(head);
  const std::string& text = pattern->text();
  return svg_picture(stats.occupancy(head, kMost, kMost),
                     text.size() > kLongest ? text.substr(0, kLongest) + "…" : text);
}

}  // namespace fretwork
