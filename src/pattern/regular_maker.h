// How regular patterns come into being: parts and a text, checked and counted once.
#pragma once

#include <string>
#include <vector>

#include "fretwork/patterns.h"
#include "pattern/parts.h"

namespace fretwork {

struct RegularMaker {
  /// `groups` are disjoint, tight and inside rows × cols; neighbours are merged, and what is empty is left out.
  static RegularPtr make(std::string text, std::int64_t rows, std::int64_t cols, std::vector<PartGroup> groups);
};

namespace parts {

/// What is in either, and in both, disjoint if the groups of each are.
std::vector<PartGroup> unite(const std::vector<PartGroup>& a, const std::vector<PartGroup>& b);
std::vector<PartGroup> intersect(const std::vector<PartGroup>& a, const std::vector<PartGroup>& b);

/// Elements as runs of a row, for where views do not agree; and how many of them there may be.
using patterns::Run;
inline constexpr std::size_t kMostRuns = std::size_t{1} << 25;
/// Flat parts of sorted, disjoint runs: rectangles, triangles and bands where neighbouring rows allow.
std::vector<Part> from_runs(const std::vector<Run>& runs);

}  // namespace parts
}  // namespace fretwork
