// Files of pictures.
#include "picture.h"

#include <png.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>

#include "fretwork/error.h"
#include "pattern/picture.h"

namespace fretwork::cli {
namespace {

[[noreturn]] void cannot_write(const std::filesystem::path& file, const std::string& why) {
  throw Error("show: " + file.string() + ": cannot be written: " + why);
}

}  // namespace

void write_png(const Occupancy& grid, const std::filesystem::path& file) {
  constexpr std::int64_t kTarget = 1024;
  const std::int64_t zoom = std::max<std::int64_t>(1, kTarget / std::max({grid.rows, grid.cols, std::int64_t{1}}));
  const std::int64_t width = std::max<std::int64_t>(1, grid.cols * zoom),
                     height = std::max<std::int64_t>(1, grid.rows * zoom);
  std::vector<Colour> pixels(static_cast<std::size_t>(width * height), ink(0.0));
  for (std::int64_t y = 0; y < grid.rows * zoom; ++y) {
    for (std::int64_t x = 0; x < grid.cols * zoom; ++x) {
      pixels[static_cast<std::size_t>(y * width + x)] = ink(grid.at(y / zoom, x / zoom));
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
  std::ofstream out(file);
  out << svg_picture(grid, title);
  out.close();
  if (!out) {
    cannot_write(file, std::strerror(errno));
  }
}

}  // namespace fretwork::cli
