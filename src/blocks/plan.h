// The work of an spmm in the order kernels walk it. Depends on the layout, the direction and two small numbers only.
#pragma once

#include <cstdint>
#include <vector>

#include "fretwork/pattern.h"

namespace fretwork::blocks {

/// A group is `group_rows` neighbouring block-rows of op(S) in one head. Its steps walk the union of their columns, so
/// that rows of a group share each strip of the dense operand. A segment is a run of steps of one group that one CTA
/// does for one tile of the free dimension; a group with far more steps than others has several segments, whose partial
/// sums are added in order afterwards (deterministic).
struct SpmmPlan {
  struct Segment {
    std::int32_t group;        ///< head · groups_per_head + place
    std::int32_t first, last;  ///< steps
    std::int32_t partial;      ///< −1: writes the result; else the index of its partial tile
  };
  /// Partial tiles [first, first + count) add up to the group's rows of the result.
  struct Split {
    std::int32_t group, first, count;
  };
  std::int32_t group_rows = 1, groups_per_head = 0, heads = 0;
  /// Steps: stride 1 + group_rows. [block column, packed block of row 0 or −1, of row 1 or −1, …]
  std::vector<std::int32_t> steps;
  std::vector<Segment> segments;  ///< most steps first; groups without steps are there too (they write zeros)
  std::vector<Split> splits;
  std::int32_t partials = 0;
};

/// Steps follow the columns, or go by `pairs`: those of columns 2n and 2n + 1 of a group that needs both lie together
/// at an even place of every segment, and the rest two by two among them. `longest`: a group with more steps than this
/// is cut into equal segments of about as many (0: never).
enum class StepOrder : std::uint8_t { columns, pairs };
SpmmPlan make_spmm_plan(const BlockLayout& layout, bool transposed, std::int32_t group_rows, std::int32_t longest,
                        StepOrder order = StepOrder::columns);

}  // namespace fretwork::blocks
