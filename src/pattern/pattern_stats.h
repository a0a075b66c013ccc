// What can be seen of any pattern without its data: the lengths of its rows, and how full each part of it is.
#pragma once

#include <cstdint>
#include <vector>

#include "fretwork/pattern.h"

namespace fretwork {

/// One matrix of the pattern, in the family's unit (blocks for a block layout, elements otherwise).
struct HeadFacts {
  std::int64_t nnz = 0, shortest_row = 0, longest_row = 0, empty_rows = 0;
};

/// How full the squares of `cell`×`cell` elements are that cover one head's matrix.
struct Occupancy {
  std::int64_t cell = 1, rows = 0, cols = 0;
  std::vector<double> share;  ///< row-major, 0 to 1; a square at the border counts only what is inside
  double at(std::int64_t y, std::int64_t x) const { return share[static_cast<std::size_t>(y * cols + x)]; }
};

class PatternStats {
 public:
  /// Block layouts are read from their index, Kronecker and long regular patterns row by row; others through mask(),
  /// which throws Error above 2³⁰ elements.
  explicit PatternStats(const Pattern& pattern);

  std::int64_t heads() const { return heads_; }
  /// Elements of one head's matrix.
  std::int64_t rows() const { return rows_; }
  std::int64_t cols() const { return cols_; }
  /// Throws Error unless there is such a head.
  void check_head(std::int64_t head) const;
  HeadFacts facts(std::int64_t head) const;
  /// The finest grid of at most max_rows×max_cols squares; a square of a block layout is a block or several,
  /// and the blocks of a Kronecker factor begin with a square where that costs little. Of a long pattern some rows of
  /// each square are looked at.
  Occupancy occupancy(std::int64_t head, std::int64_t max_rows, std::int64_t max_cols) const;

 private:
  void add_rows(Occupancy& grid) const;
  const BlockLayout* blocks_ = nullptr;
  const KroneckerPattern* kronecker_ = nullptr;
  const RegularPattern* regular_ = nullptr;  ///< one that is too long for a mask
  bool long_ = false;
  std::int64_t heads_ = 1, rows_ = 1, cols_ = 1;
  std::vector<std::uint8_t> mask_;
};

}  // namespace fretwork
