// A pattern in the order in which kernels process it: row tiles, each with the column tiles it meets. Every element of
// the pattern is in exactly one tile pair of one component, and masks exclude everything else. Gradients of keys and
// values use the plan of the transposed pattern, which has its own tile shape.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "fretwork/pattern.h"

namespace fretwork::attention_op {

/// Rows and columns of a tile; columns a multiple of 32, below 256.
struct TileShape {
  int rows = 128, cols = 128;
  bool operator==(const TileShape&) const = default;
};

inline constexpr int kTileAxes = 3;

/// How a tile's places lie in the sequence. Place n has the coordinates u0, u1, u2 with n = (u0·extent[1] +
/// u1)·extent[2]
/// + u2, and is token base + Σ u_k·stride[k]; axes that are not needed have extent 1 and come first. The extents'
/// product is at most the side of a tile; places beyond it are unused. Plain order is {1, 1, side}, {·, ·, 1}; a
/// residue class modulo r {1, 1, side}, {·, ·, r}; a patch of a grid {1, height, width}, {·, grid width, 1}.
struct Order {
  std::array<int, kTileAxes> extent{1, 1, 1};
  std::array<std::int64_t, kTileAxes> stride{0, 0, 0};
};

/// One tile. Coordinate u_k is inside the sequence iff u_k < count[k] (count[k] ≤ extent[k]); `used` < 0 says that
/// every inside place has an element somewhere in the pattern, else the bit of place n is bit n % 32 of word used + n /
/// 32 in Plan::used.
struct Tile {
  std::int64_t base;
  std::array<int, kTileAxes> count;
  int used;
};

/// `count` column tiles from `first` on, all under the same mask: an index of Plan::masks, or −1 where each element of
/// the tile pair is there (then the column tiles are whole: all of the side's places are inside).
struct Run {
  std::int32_t first, count, mask;
};

/// Which elements (m, n) of a tile pair are there: low ≤ n − m ≤ high and n < limit; or, where rows ≥ 0, those of
/// interval rows + m in Plan::intervals; or, where bits ≥ 0, those whose bit is set: bit n % 32 of word bits + (m·cols
/// + n) / 32 in Plan::bits. Places that are not inside never have theirs set (rows that are not inside may satisfy low
/// ≤ n − m ≤ high: they are never stored).
struct Mask {
  std::int32_t low, high, limit;
  std::int32_t bits = -1, rows = -1;
};

/// The columns [begin, end) of a row; none are 0, 0.
struct Interval {
  std::uint8_t begin, end;
  bool operator==(const Interval&) const = default;
};

/// Tiles in one order. Components share no elements; what a row gets from each is merged by the log-sum-exp.
struct Component {
  Order row_order, col_order;
  std::vector<Tile> row_tiles, col_tiles;
  std::vector<std::int64_t>
      first;  ///< row tile t has runs [first[t], first[t + 1]): masked ones first, then whole ones
  std::vector<Run> runs;
  bool covers_rows = false;  ///< every row of the pattern is inside one of the row tiles, runs or not
  std::int64_t pairs = 0;    ///< tile pairs, all runs together
};

struct Plan {
  TileShape shape;
  std::int64_t rows = 0, cols = 0;    ///< of the pattern
  std::vector<Component> components;  ///< the one with the most pairs first
  std::vector<Mask> masks;            ///< each once
  std::vector<Interval> intervals;    ///< shape.rows for each different mask of intervals
  std::vector<std::uint32_t> bits;    ///< shape.rows × shape.cols / 32 words for each different mask of bits
  std::vector<std::uint32_t> used;    ///< max(rows, cols) / 32 words for each tile that has some
  bool all_rows_used = false, all_cols_used = false;  ///< no tile of that side has `used` ≥ 0

  std::size_t bytes() const;
  /// For who knows no intervals: `bits`, with the masks of intervals drawn behind them; and where a mask's bits begin
  /// there, −1 for a band.
  std::vector<std::uint32_t> all_bits() const;
  std::int32_t bits_of(const Mask& mask) const;
};

/// The plan, remembered by the pattern's text and the shape.
std::shared_ptr<const Plan> plan(const RegularPattern& pattern, const TileShape& shape);
/// The same for the transposed pattern: rows are keys, columns queries.
std::shared_ptr<const Plan> transposed_plan(const RegularPattern& pattern, const TileShape& shape);

}  // namespace fretwork::attention_op
