// The tiles of an sdd on Hopper in the order CTAs walk them. Depends on the layout, the direction and a few numbers
// only.
#pragma once

#include <vector>

#include "blocks/params.cuh"
#include "fretwork/pattern.h"

namespace fretwork::blocks {

struct SddPlan {
  std::vector<Strip> strips;         ///< those that move most first
  std::vector<int> columns, blocks;  ///< of their entries, as SddParams has them
  int lines = 0;                     ///< of a head
  int stage_bytes = 0;               ///< of what 64 of K of the largest tile take
  int reach_bytes = 0;               ///< how far into a stage a product of 128 or 256 columns reads
};

/// `transposed`: lines are those of Sᵀ. `slot`: columns fetched at once. `times`: tiles are there that often, for
/// `ctas` CTAs.
SddPlan make_sdd_plan(const BlockLayout& layout, bool transposed, int slot, int times, int ctas);

}  // namespace fretwork::blocks
