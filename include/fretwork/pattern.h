// Patterns: immutable values that say what is non-zero. Every family derives from Pattern and joins the parser by name.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace fretwork {

class Pattern;
class BlockLayout;
class KroneckerPattern;
class RegularPattern;
/// How patterns are made, held and passed.
using PatternPtr = std::shared_ptr<const Pattern>;
using BlockLayoutPtr = std::shared_ptr<const BlockLayout>;
using KroneckerPtr = std::shared_ptr<const KroneckerPattern>;
using RegularPtr = std::shared_ptr<const RegularPattern>;

class Pattern {
 public:
  virtual ~Pattern() = default;

  /// Canonical, one line; equal patterns have equal texts, and parse_pattern(text()) gives an equal pattern.
  const std::string& text() const { return text_; }
  /// What crosses into framework ops: the text, or for a long one "name@digest", which this process can look up.
  const std::string& key() const { return key_; }
  /// Sizes in elements.
  std::span<const std::int64_t> shape() const { return shape_; }
  /// How many are stored, in the family's own unit (blocks for a block layout).
  std::int64_t nnz() const { return nnz_; }
  /// Share of the elements that are non-zero.
  virtual double density() const = 0;
  virtual PatternPtr transpose() const = 0;
  /// Writes 0 or 1 for each element, row-major over shape(). Throws Error unless `out` has that many.
  virtual void mask(std::span<std::uint8_t> out) const = 0;

 protected:
  /// Sets text and key; a constructor's last act.
  void name(std::string text);
  /// A mask's first act: one byte for each element, all 0.
  void clear(std::span<std::uint8_t> out) const;
  std::vector<std::int64_t> shape_;
  std::int64_t nnz_ = 0;

 private:
  std::string text_, key_;
};

/// The pattern that a text or key describes. Throws Error on a text that is not one. Recent ones are remembered.
PatternPtr parse_pattern(std::string_view text);
/// Several, one on each line.
std::vector<PatternPtr> parse_patterns(std::string_view lines);

/// The non-zero blocks of one direction: line l of head h holds entries [first[h·lines + l], first[h·lines + l + 1]).
struct BlockIndex {
  struct Entry {
    std::int64_t other;  ///< the block's place on the other axis
    std::int64_t block;  ///< its place in the packed values
  };
  std::vector<std::int64_t> first;
  std::vector<Entry> entries;

  std::span<const Entry> line(std::int64_t l) const {
    const auto begin = static_cast<std::size_t>(first[static_cast<std::size_t>(l)]);
    const auto end = static_cast<std::size_t>(first[static_cast<std::size_t>(l) + 1]);
    return {entries.data() + begin, end - begin};
  }
};

/// Whole blocks that are there or not, one layout per head. Packed values follow (head, row, column) order.
class BlockLayout final : public Pattern {
 public:
  struct Sizes {
    std::int64_t heads, rows, cols;       ///< in blocks
    std::int64_t block_rows, block_cols;  ///< elements in a block
    bool operator==(const Sizes&) const = default;
  };

  /// `mask` holds heads·rows·cols bytes, each 0 or 1. Throws Error otherwise.
  static BlockLayoutPtr make(const Sizes& sizes, std::span<const std::uint8_t> mask);
  /// The layout of a convolution's weight, from a mask (out blocks, in blocks, kh, kw): a head for each kernel position
  /// (r, s), r·kw + s; a block is (output channels, input channels).
  static BlockLayoutPtr for_conv2d(const std::array<std::int64_t, 4>& blocks, std::span<const std::uint8_t> mask,
                                   std::int64_t block_rows, std::int64_t block_cols);

  const Sizes& sizes() const { return sizes_; }
  std::int64_t heads() const { return sizes_.heads; }
  /// Blocks of head h: packed values [head_first(h), head_first(h + 1)).
  std::int64_t head_first(std::int64_t h) const { return by_row_.first[static_cast<std::size_t>(h * sizes_.rows)]; }
  /// Line = block row, entry.other = block column; and the reverse. Built once, so a transpose moves no values.
  const BlockIndex& by_row() const { return by_row_; }
  const BlockIndex& by_col() const { return by_col_; }

  double density() const override;
  PatternPtr transpose() const override;
  void mask(std::span<std::uint8_t> out) const override;

 private:
  BlockLayout(const Sizes& sizes, std::span<const std::uint8_t> mask);
  Sizes sizes_;
  BlockIndex by_row_, by_col_;
};

/// A random layout with about `density` of its blocks, the same for the same seed everywhere.
BlockLayoutPtr random_blocks(const BlockLayout::Sizes& sizes, double density, std::uint64_t seed);

/// The support I_a ⊗ 1_{b×c} ⊗ I_d of one Kronecker factor: weight (i, j, k, l) stands at row (i·b + j)·d + l, column
/// (i·c + k)·d + l.
class KroneckerPattern final : public Pattern {
 public:
  struct Sizes {
    std::int64_t a, b, c, d;
    bool operator==(const Sizes&) const = default;
  };

  /// All sizes at least 1, and fewer than 2^63 elements; throws Error otherwise.
  static KroneckerPtr make(const Sizes& sizes);

  const Sizes& sizes() const { return sizes_; }
  std::int64_t rows() const { return sizes_.a * sizes_.b * sizes_.d; }
  std::int64_t cols() const { return sizes_.a * sizes_.c * sizes_.d; }

  double density() const override;
  PatternPtr transpose() const override;
  void mask(std::span<std::uint8_t> out) const override;

 private:
  explicit KroneckerPattern(const Sizes& sizes);
  Sizes sizes_;
};

namespace kronecker {

/// Whether left·right is a Kronecker pattern again whose every entry is one sum of the same length, so that a dense
/// matrix has a best approximation of that form; and that pattern. product throws Error where they do not chain.
bool chainable(const KroneckerPtr& left, const KroneckerPtr& right);
KroneckerPtr product(const KroneckerPtr& left, const KroneckerPtr& right);
/// The same pattern as whole blocks, the largest that fit. Throws Error unless d is 1 and b and c have divisors that
/// are sides of a block.
BlockLayoutPtr to_block_layout(const KroneckerPtr& pattern);
/// The patterns, in order of application, of a Monarch matrix and of a dyadic butterfly (n a power of two).
std::vector<KroneckerPtr> monarch(std::int64_t out_features, std::int64_t in_features, std::int64_t p, std::int64_t q);
std::vector<KroneckerPtr> butterfly(std::int64_t n);

}  // namespace kronecker

/// A framed picture in lines of at most `width` characters; colours are those of a terminal. The same as SVG. Of a long
/// pattern some rows of each square are looked at.
struct DrawOptions {
  std::int64_t head = 0;
  int width = 80;
  bool colour = false;
};
std::string draw(const PatternPtr& pattern, const DrawOptions& options = {});
std::string draw_svg(const PatternPtr& pattern, std::int64_t head = 0);

struct PartGroup;

/// Every row's columns are a few affine progressions: windows, strides, grids, documents, and unions and intersections
/// of them. Made by the functions of fretwork/patterns.h and by parse_pattern.
class RegularPattern final : public Pattern {
 public:
  /// What a row holds, as one progression: columns start + t·stride, 0 ≤ t < count.
  struct Progression {
    std::int64_t start, stride, count;
  };

  std::int64_t rows() const { return shape_[0]; }
  std::int64_t cols() const { return shape_[1]; }
  bool contains(std::int64_t row, std::int64_t col) const;
  /// One progression for each row. Throws Error that names the first row that is not one.
  std::vector<Progression> acsr() const;
  /// Every row's columns in ascending order, one row behind another: row i has columns[first[i]] to
  /// columns[first[i + 1] − 1]. Throws Error from 2^31 columns on.
  struct Entries {
    std::vector<std::int64_t> first;
    std::vector<std::int32_t> columns;
  };
  Entries entries() const;
  /// How many columns each row has; and the columns of one row, as ranges [begin, end) in order.
  std::vector<std::int64_t> row_lengths() const;
  std::vector<std::array<std::int64_t, 2>> row(std::int64_t row) const;
  /// What was recognised: a line for the whole, and one for each way of counting positions with what is in it.
  std::string describe() const;
  /// Disjoint parts whose union this is (pattern/regular.h).
  const std::vector<PartGroup>& groups() const { return groups_; }

  ~RegularPattern() override;
  double density() const override;
  PatternPtr transpose() const override;
  void mask(std::span<std::uint8_t> out) const override;

 private:
  friend struct RegularMaker;
  RegularPattern();
  std::vector<PartGroup> groups_;
};

}  // namespace fretwork
