// The tiles in which a GPU multiplies: which lines share one, and where a tile's elements stand in x.
#pragma once

#include <cstdint>
#include <vector>

#include "ops/regular/cuda/params.h"
#include "ops/regular/problem.h"

namespace fretwork::regular_op {

/// Lines are the rows of the pattern, or its columns; partners are the others. No tiles where they would be mostly
/// empty.
struct Tiles {
  std::vector<RegularTile> tiles;      ///< those that share lines first, by rising waves, the longest of each first
  std::vector<RegularTileLine> lines;  ///< kRegularLines for each tile, those of a group ascending
  std::vector<RegularBits> bits;       ///< kRegularLines for each step
  std::vector<int> partners;           ///< 64 for each step, ascending
  std::vector<int> wave_tiles;         ///< how many tiles that share lines each wave has
  int sums = 0;                        ///< lines that several tiles have
};

Tiles make_tiles(const Rows& rows, std::int64_t cols);
Tiles make_tiles(const Columns& columns, std::int64_t rows);

}  // namespace fretwork::regular_op
