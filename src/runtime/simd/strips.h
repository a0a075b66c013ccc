// The left side of products of tiles: read as it lies in memory where the multiplier can, else copied.
#pragma once

#include <vector>

#include "runtime/simd/tiles.h"

namespace fretwork::simd {

/// Depth in whole groups, and the bytes of a packed panel.
std::int64_t depth_padded(const Tiles& tiles, std::int64_t depth);
std::size_t panel_bytes(const Tiles& tiles, std::int64_t depth, std::int64_t width);

/// The left sides of the terms of some products: `rows` rows, in strips of a tile's rows one below the other, and
/// `depth` columns that lie like `place`.
struct Strips {
  Place place;
  std::int64_t rows, depth;
  bool near;  ///< columns of a strip lie close together, so that reading them as they lie costs little
};

/// Whether the multiplier cannot read them as they lie.
bool copied(const Tiles& tiles, const Strips& strips);

/// Points `terms`, which lie in memory, to a form that the multiplier reads, copied to `copies` if need be, and tells
/// `product` of them. Returns how far the left sides of the next strip lie behind those of the first.
std::int64_t set_left(const Tiles& tiles, DType dtype, const Strips& strips, std::vector<Term>& terms, Scratch& copies,
                      Product& product);

}  // namespace fretwork::simd
