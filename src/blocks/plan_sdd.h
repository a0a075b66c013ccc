// The plan of an sdd on Hopper: its tiles in the order in which CTAs walk them. It depends only on the layout, the
// direction and a few numbers.
#pragma once

#include <vector>

#include "blocks/params.cuh"
#include "fretwork/pattern.h"

namespace fretwork::blocks {

struct SddPlan {
  std::vector<Strip> strips;         ///< those that load most first
  std::vector<int> columns, blocks;  ///< of their entries, as in SddParams
  int lines = 0;                     ///< per head
  int stage_bytes = 0;               ///< the largest tile, 64 of K
  int reach_bytes = 0;  ///< bytes of a stage that a product of 128 or 256 columns reads; may exceed stage_bytes
};

/// `transposed`: lines are rows of Sᵀ. `slot`: columns loaded at once. `times`: how often the tiles run (batches), on
/// `ctas` CTAs.
SddPlan make_sdd_plan(const BlockLayout& layout, bool transposed, int slot, int times, int ctas);

}  // namespace fretwork::blocks
