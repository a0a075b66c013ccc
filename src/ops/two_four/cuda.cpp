// 2:4 products on the GPU: which class of kernel runs, and the portable one.
#include "fretwork/error.h"
#include "ops/two_four/problem.h"

namespace fretwork::two_four::cuda {

void run_portable(const Problem&, Context&) { throw Error("two_four", "device", "a backend", "none yet"); }

void run(const Problem& problem, Context& context) {
  if (!run_few(problem, context) && !run_hopper(problem, context)) {
    run_portable(problem, context);
  }
}

}  // namespace fretwork::two_four::cuda
