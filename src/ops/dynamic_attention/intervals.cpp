// Patterns whose rows and columns are intervals.
#include <algorithm>
#include <string>

#include "core/hash.h"
#include "fretwork/error.h"
#include "ops/dynamic_attention/problem.h"
#include "runtime/plan_cache.h"

namespace fretwork::dynamic_attention_op {
namespace {

/// The interval of each row; empty ones are 0, 0.
std::vector<Interval> lines_of(const char* op, const RegularPattern& pattern) {
  const auto refuse = [&](const std::string& got) {
    throw Error(op, "pattern",
                "rows and columns that are intervals with blocks: full, causal, sliding_window, document, prefix_lm, "
                "block_local, block_causal or an intersection of them",
                got + " of " + pattern.text().substr(0, 80));
  };
  std::vector<RegularPattern::Progression> found;
  try {
    found = pattern.acsr();
  } catch (const Error&) {
    refuse("a line");
  }
  std::vector<Interval> lines;
  lines.reserve(found.size());
  std::int64_t begin = 0, end = -1;  // of the lines so far
  for (const auto& [start, stride, count] : found) {
    if (count > 1 && stride != 1) {
      refuse("row " + std::to_string(lines.size()));
    }
    if (count > 0) {
      if (end >= 0 && (start > end || start + count < begin)) {  // tiles would hold columns that no row has
        refuse("a gap before row " + std::to_string(lines.size()));
      }
      begin = end < 0 ? start : std::min(begin, start);
      end = std::max(end, start + count);
    }
    lines.push_back(count > 0 ? Interval{static_cast<std::int32_t>(start), static_cast<std::int32_t>(start + count)}
                              : Interval{0, 0});
  }
  return lines;
}

}  // namespace

std::shared_ptr<const Intervals> intervals_of(const char* op, const RegularPattern& pattern) {
  static PlanCache<Intervals>& cache = *std::make_unique<PlanCache<Intervals>>().release();
  return cache.get(hash128("intervals " + pattern.key()), [&] {
    const PatternPtr transposed = pattern.transpose();
    return Intervals{lines_of(op, pattern), lines_of(op, dynamic_cast<const RegularPattern&>(*transposed))};
  });
}

}  // namespace fretwork::dynamic_attention_op
