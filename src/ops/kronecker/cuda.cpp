// The products on a GPU.
#include "fretwork/error.h"
#include "ops/kronecker/problem.h"

namespace fretwork::kronecker::cuda {

void run(const Problem& /*problem*/, Context& /*context*/) { throw Error("ksmm", "device", "cpu", "cuda"); }
void run(const WeightProblem& /*problem*/, Context& /*context*/) { throw Error("ksmm", "device", "cpu", "cuda"); }

}  // namespace fretwork::kronecker::cuda
