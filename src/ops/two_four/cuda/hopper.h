// Runs the wgmma.sp kernel in a given configuration, for tests and benchmarks; run_hopper chooses one.
#pragma once

#include <functional>
#include <string>

#include "ops/two_four/problem.h"
#include "runtime/kernels.h"

namespace fretwork::two_four::hopper {

/// A form of the kernel.
struct Choice {
  int width = 256;  ///< columns of a tile: 64, 128 or 256
  int split = 1;    ///< 2, or 3 or 4 below a width of 256: clusters of as many CTAs share the depth of a tile
  int pair = 1;  ///< 2, at a width of 256: clusters of two CTAs, tiles of rows side by side, share what they fetch of b
  std::string text() const;
};
/// The quickest by reckoning. `clusters` says how many clusters of a size run at once with tiles of a width.
Choice choose(const Problem& problem, int multiprocessors, const std::function<int(int width, int size)>& clusters);
/// The same on this device.
Choice choose(const Problem& problem, int device);

/// The kernel for tiles of this width; b_along_k: b is contiguous along k; pair as in Choice.
KernelSpec instance(DType dtype, bool b_along_k, int width, int pair = 1);

/// False where the kernel does not take the problem, or not with this choice.
bool run(const Problem& problem, Context& context, const Choice& choice);

}  // namespace fretwork::two_four::hopper
