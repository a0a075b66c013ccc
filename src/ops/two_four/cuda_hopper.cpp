// 2:4 products on Hopper's sparse tensor cores.
#include "fretwork/error.h"
#include "ops/two_four/problem.h"

namespace fretwork::two_four::cuda {

bool run_hopper(const Problem&, Context&) { return false; }

}  // namespace fretwork::two_four::cuda
