// How full a square is becomes one of a few shades; every kind of picture draws shades.
#include "picture.h"

#include <fmt/core.h>
#include <png.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <fstream>

#include "fretwork/error.h"

namespace fretwork::cli {
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
      line += fmt::format("\033[38;5;{}m", kPalette[static_cast<std::size_t>(upper)]);
      line += lower < 0 ? "\033[49m" : fmt::format("\033[48;5;{}m", kPalette[static_cast<std::size_t>(lower)]);
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

struct Colour {
  std::uint8_t red, green, blue;
};

constexpr int kInks = 24;

/// From paper to deep blue.
Colour ink(int shade) {
  if (shade == 0) {
    return {0xf7, 0xf6, 0xf2};
  }
  const double depth = static_cast<double>(shade) / (kInks - 1);
  const auto mix = [&](int light, int dark) { return static_cast<std::uint8_t>(light + (dark - light) * depth); };
  return {mix(0xdc, 0x0b), mix(0xe8, 0x3c), mix(0xf0, 0x5d)};
}

[[noreturn]] void cannot_write(const std::filesystem::path& file, const std::string& why) {
  throw Error("show: " + file.string() + ": cannot be written: " + why);
}

std::string escaped(const std::string& text) {
  std::string safe;
  for (const char c : text) {
    safe += c == '&' ? "&amp;" : c == '<' ? "&lt;" : std::string(1, c);
  }
  return safe;
}

}  // namespace

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

void write_png(const Occupancy& grid, const std::filesystem::path& file) {
  constexpr std::int64_t kTarget = 1024;
  const std::int64_t zoom = std::max<std::int64_t>(1, kTarget / std::max({grid.rows, grid.cols, std::int64_t{1}}));
  const std::int64_t width = std::max<std::int64_t>(1, grid.cols * zoom),
                     height = std::max<std::int64_t>(1, grid.rows * zoom);
  std::vector<Colour> pixels(static_cast<std::size_t>(width * height), ink(0));
  for (std::int64_t y = 0; y < grid.rows * zoom; ++y) {
    for (std::int64_t x = 0; x < grid.cols * zoom; ++x) {
      pixels[static_cast<std::size_t>(y * width + x)] = ink(shade(grid.at(y / zoom, x / zoom), kInks));
    }
  }
  png_image image{};
  image.version = PNG_IMAGE_VERSION;
  image.width = static_cast<png_uint_32>(width);
  image.height = static_cast<png_uint_32>(height);
  image.format = PNG_FORMAT_RGB;
  // Through a stream of our own: png_image_write_to_file removes what stands at the path when it fails.
  std::FILE* const out = std::fopen(file.c_str(), "wb");
  if (out == nullptr) {
    cannot_write(file, std::strerror(errno));
  }
  const bool written = png_image_write_to_stdio(&image, out, 0, pixels.data(), 0, nullptr) != 0;
  if (std::fclose(out) != 0 || !written) {
    cannot_write(file, written ? std::strerror(errno) : image.message);
  }
}

void write_svg(const Occupancy& grid, const std::string& title, const std::filesystem::path& file) {
  std::vector<std::string> paths(kInks);
  for (std::int64_t y = 0; y < grid.rows; ++y) {
    for (std::int64_t x = 0, run = 1; x < grid.cols; x += run) {
      const int tone = shade(grid.at(y, x), kInks);
      for (run = 1; x + run < grid.cols && shade(grid.at(y, x + run), kInks) == tone; ++run) {
      }
      paths[static_cast<std::size_t>(tone)] += fmt::format("M{} {}h{}v1h-{}z", x, y, run, run);
    }
  }
  const auto hex = [](Colour c) { return fmt::format("#{:02x}{:02x}{:02x}", c.red, c.green, c.blue); };
  std::ofstream out(file);
  out << fmt::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {0} {1}\" width=\"{2}\" height=\"{3}\" "
      "shape-rendering=\"crispEdges\">\n<title>{4}</title>\n<rect width=\"{0}\" height=\"{1}\" fill=\"{5}\"/>\n",
      grid.cols, grid.rows, grid.cols * 4, grid.rows * 4, escaped(title), hex(ink(0)));
  for (int tone = 1; tone < kInks; ++tone) {
    if (const std::string& path = paths[static_cast<std::size_t>(tone)]; !path.empty()) {
      out << fmt::format("<path fill=\"{}\" d=\"{}\"/>\n", hex(ink(tone)), path);
    }
  }
  out << "</svg>\n";
  out.close();
  if (!out) {
    cannot_write(file, std::strerror(errno));
  }
}

}  // namespace fretwork::cli
