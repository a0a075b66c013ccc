// The named regular patterns. Query i stands at position p = i + offset; key j is allowed where a pattern's rule says
// so.
#pragma once

#include <optional>
#include <span>

#include "fretwork/pattern.h"

namespace fretwork::patterns {

using Optional = std::optional<std::int64_t>;

/// Sizes of a pattern: queries, keys, and the position of the first query; queries are the last ones unless given.
struct Seq {
  Seq(std::int64_t length) : rows(length), cols(length) {}  // NOLINT: an int is a sequence
  Seq(std::int64_t queries, std::int64_t keys, Optional first = {}) : rows(queries), cols(keys), offset(first) {}
  std::int64_t rows, cols;
  Optional offset;
};

/// All throw Error on arguments that are out of range.
RegularPtr full(const Seq& seq);
RegularPtr causal(const Seq& seq);                                         ///< j ≤ p
RegularPtr sliding_window(const Seq& seq, Optional left, Optional right);  ///< −left ≤ j − p ≤ right
/// |p − j| ≤ window·dilation, a multiple of dilation apart (and j ≤ p).
RegularPtr dilated(const Seq& seq, std::int64_t window, std::int64_t dilation, bool causal = false);
/// j ≤ p and (p − j < stride or a multiple of stride apart).
RegularPtr strided(const Seq& seq, std::int64_t stride);
/// j ≤ p and (the same block of `stride`, or j among the last `summary` of its block).
RegularPtr fixed(const Seq& seq, std::int64_t stride, std::int64_t summary);
/// |p − j| ≤ window or p ∈ globals or j ∈ globals.
RegularPtr longformer(const Seq& seq, std::int64_t window, std::span<const std::int64_t> globals);
/// On blocks P, J: |P − J| ≤ window or P < globals or J < globals or J drawn for P, `random` without replacement.
RegularPtr bigbird(const Seq& seq, std::int64_t block, std::int64_t window, std::int64_t globals, std::int64_t random,
                   std::uint64_t seed = 0);
/// 0 ≤ ⌊p/block⌋ − ⌊j/block⌋ ≤ previous.
RegularPtr block_local(const Seq& seq, std::int64_t block, std::int64_t previous = 0);
/// ⌊j/block⌋ ≤ ⌊p/block⌋.
RegularPtr block_causal(const Seq& seq, std::int64_t block);
/// For some (w, r) of segments and rates: ⌊p/w⌋ = ⌊j/w⌋ and p ≡ j ≡ head (mod r).
RegularPtr longnet(const Seq& seq, std::span<const std::int64_t> segments, std::span<const std::int64_t> rates,
                   std::int64_t head = 0);
RegularPtr prefix_lm(const Seq& seq, std::int64_t prefix);                  ///< j < prefix or j ≤ p
RegularPtr sinks(const Seq& seq, std::int64_t sinks, std::int64_t window);  ///< j ≤ p, j < sinks or p − j < window
/// j ≤ p and (j ∈ vertical or p − j ∈ slash).
RegularPtr vertical_slash(const Seq& seq, std::span<const std::int64_t> vertical, std::span<const std::int64_t> slash);
/// j = p + start + t·stride, 0 ≤ t < count.
RegularPtr band(const Seq& seq, std::int64_t start, std::int64_t stride, std::int64_t count);
/// The same document (and j ≤ p).
RegularPtr document(std::span<const std::int64_t> lengths, bool causal = false);

/// On grids, row-major; a span of one number stands for every axis.
using Axes = std::span<const std::int64_t>;
/// The same window after a cyclic shift by −shift, and the same side of the wrap.
RegularPtr swin(std::int64_t height, std::int64_t width, Axes window, Axes shift);
RegularPtr axial(std::int64_t height, std::int64_t width);  ///< the same row or column
/// Per axis the `window` positions of p's class modulo `dilation` around it, shifted to stay inside; on a causal axis
/// those that end at p, cut at the border. `stride` positions of a class share the window of the middle one, on a
/// causal axis of the last one. One to three axes; `causal` holds 0 and 1.
RegularPtr neighborhood(Axes shape, Axes window, Axes dilation, Axes causal,
                        Axes stride = std::array<std::int64_t, 1>{1});
/// A neighbourhood of `window` tiles.
RegularPtr sliding_tile(Axes shape, Axes tile, Axes window);

/// What stands in a matrix of rows × cols bytes, 0 or 1, row-major.
RegularPtr from_mask(std::int64_t rows, std::int64_t cols, std::span<const std::uint8_t> mask);
/// A query and keys [begin, end) that it sees.
struct Run {
  std::int64_t row, begin, end;
};
/// What runs in any order say together; such as the blocks of a mask that is full or empty elsewhere.
RegularPtr from_runs(std::int64_t rows, std::int64_t cols, std::span<const Run> runs);
/// j is p or one of its ancestors. parents[p] < p, or −1 for a root.
RegularPtr tree(std::span<const std::int64_t> parents);
/// One head of a layout.
RegularPtr from_layout(const BlockLayoutPtr& layout, std::int64_t head = 0);
/// The blocks that a pattern touches, as a layout of one head whose last blocks may reach beyond the pattern, and the
/// share of their elements that the pattern has not.
struct BlockCover {
  BlockLayoutPtr layout;
  double fill_in;
};
BlockCover block_cover(const PatternPtr& pattern, std::int64_t block_rows, std::int64_t block_cols);
/// A Kronecker pattern.
RegularPtr from_kronecker(const KroneckerPtr& pattern);
/// One progression for each row, inside the columns.
RegularPtr acsr(std::span<const std::int64_t> start, std::span<const std::int64_t> stride,
                std::span<const std::int64_t> count, std::int64_t cols);

/// Rows or columns [begin, end).
struct Span {
  std::int64_t begin, end;
  std::int64_t length() const { return end - begin; }
};
/// Pieces of patterns, and patterns in larger ones: their parts move, nothing becomes a mask. In a text a slice is
/// pattern[begin:end,begin:end].
RegularPtr slice(const PatternPtr& pattern, Span rows, Span cols);
/// The pattern's first element at (row, col) of an otherwise empty matrix; and patterns along the diagonal.
RegularPtr place(const PatternPtr& pattern, std::int64_t rows, std::int64_t cols, std::int64_t row = 0,
                 std::int64_t col = 0);
RegularPtr diag(std::span<const PatternPtr> patterns);
/// A square pattern with n tokens in front of it that see all and are seen by all.
RegularPtr with_prefix(const PatternPtr& pattern, std::int64_t n);

/// What is in either, and in both. The shapes must be equal; block layouts of one head and Kronecker patterns may join.
RegularPtr unite(const PatternPtr& a, const PatternPtr& b);
RegularPtr intersect(const PatternPtr& a, const PatternPtr& b);

}  // namespace fretwork::patterns
