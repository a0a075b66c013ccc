// How the left side of a product of tiles is read.
#include "runtime/simd/strips.h"

#include <utility>

#include "core/divide.h"

namespace fretwork::simd {
namespace {

enum class Form : std::uint8_t { as_is, as_rows, as_panel };

Form form_of(const Tiles& tiles, const Strips& s) {
  const bool full = s.rows % tiles.rows == 0, along = s.place.col_stride == 1 && s.depth % tiles.group == 0;
  if (full && !tiles.widens && (along || (tiles.group == 1 && s.near))) {
    return Form::as_is;
  }
  return full && along && tiles.group == 1 ? Form::as_rows : Form::as_panel;
}

void set_strides(const Tiles& tiles, const Strips& s, Form form, Product& product) {
  product.steps = depth_padded(tiles, s.depth) / tiles.group;
  product.row_stride = form == Form::as_is ? s.place.row_stride : form == Form::as_rows ? s.depth : tiles.group;
  product.step_stride = form == Form::as_is     ? s.place.col_stride * tiles.group
                        : form == Form::as_rows ? 1
                                                : tiles.group * tiles.rows;
}

}  // namespace

std::int64_t depth_padded(const Tiles& tiles, std::int64_t depth) { return ceil_div(depth, tiles.group) * tiles.group; }

std::size_t panel_bytes(const Tiles& tiles, std::int64_t depth, std::int64_t width) {
  return static_cast<std::size_t>(depth_padded(tiles, depth) * width) * tiles.element;
}

bool copied(const Tiles& tiles, const Strips& strips) { return form_of(tiles, strips) != Form::as_is; }

std::int64_t set_left(const Tiles& tiles, DType dtype, const Strips& s, std::vector<Term>& terms, Scratch& copies,
                      Product& product) {
  const Form form = form_of(tiles, s);
  set_strides(tiles, s, form, product);
  product.terms = terms.data();
  product.count = static_cast<std::int64_t>(terms.size());
  const auto [row_stride, col_stride] = std::pair(s.place.row_stride, s.place.col_stride);
  if (form == Form::as_is) {
    return tiles.rows * row_stride;
  }
  const std::size_t strip_bytes = panel_bytes(tiles, s.depth, tiles.rows);
  const std::size_t shift = strip_bytes * terms.size();
  std::byte* const to = copies.need(shift * static_cast<std::size_t>(ceil_div(s.rows, tiles.rows)));
  for (std::size_t n = 0; n < terms.size(); ++n) {
    std::byte* const strip = to + n * strip_bytes;
    auto* const data = static_cast<std::byte*>(const_cast<void*>(terms[n].left));
    terms[n].left = strip;
    if (form == Form::as_panel) {
      tiles.pack({data, col_stride, row_stride}, s.depth, s.rows, tiles.rows, strip, static_cast<std::int64_t>(shift));
      continue;
    }
    for (std::int64_t row = 0; row < s.rows; row += tiles.rows) {
      tiles.pack({data + row * row_stride * static_cast<std::int64_t>(size_of(dtype)), row_stride, col_stride},
                 tiles.rows, s.depth, s.depth, strip + static_cast<std::size_t>(row / tiles.rows) * shift, 0);
    }
  }
  return static_cast<std::int64_t>(shift / tiles.element);
}

}  // namespace fretwork::simd
