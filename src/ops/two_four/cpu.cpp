// 2:4 products on the CPU.
#include "fretwork/error.h"
#include "ops/two_four/problem.h"

namespace fretwork::two_four::cpu {

void run(const Problem&, Context&) { throw Error("two_four", "device", "a backend", "none yet"); }

}  // namespace fretwork::two_four::cpu
