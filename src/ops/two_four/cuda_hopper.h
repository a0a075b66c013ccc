// How the Hopper kernel of the 2:4 products is run, for those who try its forms: run_hopper chooses one itself.
#pragma once

#include <string>

#include "ops/two_four/problem.h"
#include "runtime/kernels.h"

namespace fretwork::two_four::hopper {

/// A form of the kernel. Those that run_hopper chooses differ in width and split.
struct Choice {
  int width = 256;  ///< columns of a tile: 128 or 256
  int split = 1;    ///< 2: pairs of CTAs share the depth of a tile
  int share = 16;   ///< tiles of rows that go through the columns together
  int parts = 2;    ///< 128 bytes of b's depth in a step: 1 or 2
  int flow = 1;     ///< as Flow counts in the kernel
  int pair = 1;     ///< 2: clusters of two CTAs, tiles of rows side by side, share what they fetch of b
  std::string text() const;
};
Choice choose(const Problem& problem, int multiprocessors);

/// The kernel of a choice; b_along_k: b is contiguous along k.
KernelSpec instance(DType dtype, bool b_along_k, const Choice& choice);

/// False where the kernel does not take the problem, or not with this choice.
bool run(const Problem& problem, Context& context, const Choice& choice);

}  // namespace fretwork::two_four::hopper
