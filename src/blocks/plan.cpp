// Makes the plan of an spmm: groups, the union of their columns, and segments.
#include "blocks/plan.h"

#include <algorithm>
#include <limits>
#include <optional>

#include "fretwork/error.h"

namespace fretwork::blocks {
namespace {

constexpr std::int32_t kAbsent = -1;

/// Appends the steps of the group of block rows [line, line + rows); lines count through all heads.
void append_steps(const BlockIndex& index, std::int64_t line, std::int64_t rows, std::int32_t stride,
                  std::vector<std::int32_t>& steps) {
  std::vector<std::span<const BlockIndex::Entry>> left;
  for (std::int64_t r = 0; r < rows; ++r) {
    left.push_back(index.line(line + r));
  }
  while (true) {
    std::int64_t column = std::numeric_limits<std::int64_t>::max();
    for (const auto& row : left) {
      column = row.empty() ? column : std::min(column, row.front().other);
    }
    if (column == std::numeric_limits<std::int64_t>::max()) {
      return;
    }
    const std::size_t at = steps.size();
    steps.resize(at + static_cast<std::size_t>(stride), kAbsent);
    steps[at] = static_cast<std::int32_t>(column);
    for (std::size_t r = 0; r < left.size(); ++r) {
      if (!left[r].empty() && left[r].front().other == column) {
        steps[at + 1 + r] = static_cast<std::int32_t>(left[r].front().block);
        left[r] = left[r].subspan(1);
      }
    }
  }
}

/// Reorders the steps from `first` on by pairs. A column without its partner is held back until the next such column,
/// so other steps move little.
void pair_steps(std::int32_t first, std::int32_t stride, std::vector<std::int32_t>& steps) {
  const auto begin = static_cast<std::size_t>(first) * static_cast<std::size_t>(stride);
  const auto width = static_cast<std::size_t>(stride);
  const std::vector<std::int32_t> from(steps.begin() + static_cast<std::ptrdiff_t>(begin), steps.end());
  std::size_t to = begin;
  const auto append = [&](std::size_t at) {
    std::copy_n(from.begin() + static_cast<std::ptrdiff_t>(at), width, steps.begin() + static_cast<std::ptrdiff_t>(to));
    to += width;
  };
  std::optional<std::size_t> waiting;
  for (std::size_t at = 0; at < from.size(); at += width) {
    const std::size_t next = at + width;
    if (from[at] % 2 == 0 && next < from.size() && from[next] == from[at] + 1) {
      append(at);
      append(next);
      at = next;
    } else if (waiting) {
      append(*waiting);
      append(at);
      waiting.reset();
    } else {
      waiting = at;
    }
  }
  if (waiting) {
    append(*waiting);
  }
}

}  // namespace

SpmmPlan make_spmm_plan(const BlockLayout& layout, bool transposed, std::int32_t group_rows, std::int32_t longest,
                        StepOrder order) {
  const BlockIndex& index = transposed ? layout.by_col() : layout.by_row();
  const std::int64_t lines = transposed ? layout.sizes().cols : layout.sizes().rows;
  if (layout.nnz() > std::numeric_limits<std::int32_t>::max() / (1 + group_rows) ||
      layout.heads() * lines > std::numeric_limits<std::int32_t>::max()) {
    throw Error("block_matmul", "layout", "fewer than 2^31 steps of work", std::to_string(layout.nnz()) + " blocks");
  }
  SpmmPlan plan;
  plan.group_rows = group_rows;
  plan.heads = static_cast<std::int32_t>(layout.heads());
  plan.groups_per_head = static_cast<std::int32_t>((lines + group_rows - 1) / group_rows);
  const std::int32_t stride = 1 + group_rows;
  for (std::int32_t group = 0; group < plan.heads * plan.groups_per_head; ++group) {
    const std::int64_t row = static_cast<std::int64_t>(group % plan.groups_per_head) * group_rows;
    const std::int64_t line = group / plan.groups_per_head * lines + row;
    const auto first = static_cast<std::int32_t>(plan.steps.size() / static_cast<std::size_t>(stride));
    append_steps(index, line, std::min<std::int64_t>(group_rows, lines - row), stride, plan.steps);
    const auto last = static_cast<std::int32_t>(plan.steps.size() / static_cast<std::size_t>(stride));
    if (order == StepOrder::pairs) {
      pair_steps(first, stride, plan.steps);
    }
    const std::int32_t count = last - first;
    const std::int32_t pieces = longest > 0 ? std::max(1, (count + longest - 1) / longest) : 1;
    if (pieces == 1) {
      plan.segments.push_back({group, first, last, kAbsent});
      continue;
    }
    plan.splits.push_back({group, plan.partials, pieces});
    for (std::int32_t p = 0; p < pieces; ++p) {
      const auto cut = [&](std::int32_t n) {
        const auto at = static_cast<std::int32_t>(static_cast<std::int64_t>(count) * n / pieces);
        return first + (order == StepOrder::pairs && n < pieces ? at / 2 * 2 : at);
      };
      plan.segments.push_back({group, cut(p), cut(p + 1), plan.partials++});
    }
  }
  std::stable_sort(plan.segments.begin(), plan.segments.end(),
                   [](const auto& a, const auto& b) { return a.last - a.first > b.last - b.first; });
  return plan;
}

}  // namespace fretwork::blocks
