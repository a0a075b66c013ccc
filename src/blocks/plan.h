// The plan of an spmm: its work in the order in which kernels walk it. It depends only on the layout, the direction and
// two small numbers.
#pragma once

#include <cstdint>
#include <vector>

#include "fretwork/pattern.h"

namespace fretwork::blocks {

/// A group is `group_rows` neighbouring block rows of op(S) in one head. Its steps walk the union of their columns, so
/// the rows of a group share each strip of the dense operand. A segment is a run of steps of one group that one CTA
/// computes for one tile of the free dimension. A group with far more steps than others is split into several segments,
/// whose partial sums are added in order afterwards (deterministic).
struct SpmmPlan {
  struct Segment {
    std::int32_t group;        ///< head · groups_per_head + index in the head
    std::int32_t first, last;  ///< steps
    std::int32_t partial;      ///< index of its partial tile; −1 if it stores the result
  };
  /// Partial tiles [first, first + count) add up to the group's rows of the result.
  struct Split {
    std::int32_t group, first, count;
  };
  std::int32_t group_rows = 1, groups_per_head = 0, heads = 0;
  /// Steps: stride 1 + group_rows. [block column, packed block of row 0 or −1, of row 1 or −1, …]
  std::vector<std::int32_t> steps;
  std::vector<Segment> segments;  ///< longest first; groups without steps are included, as they store zeros
  std::vector<Split> splits;
  std::int32_t partials = 0;
};

/// `columns`: steps are in the order of columns. `pairs`: if a group needs both columns 2n and 2n + 1, their steps are
/// adjacent and begin at an even index of a segment; other steps are paired among themselves. `longest`: a group with
/// more steps than this is split into equal segments of about this length (0: never).
enum class StepOrder : std::uint8_t { columns, pairs };
SpmmPlan make_spmm_plan(const BlockLayout& layout, bool transposed, std::int32_t group_rows, std::int32_t longest,
                        StepOrder order = StepOrder::columns);

}  // namespace fretwork::blocks
