// Softmax and its gradient on a GPU.
#include "fretwork/error.h"
#include "ops/block_softmax/problem.h"

namespace fretwork::block_softmax_op::cuda {

void forward(const Problem& /*problem*/, Context& context) {
  throw Error("block_softmax", "values", "a tensor on cpu", "one on " + name_of(context.device));
}

void backward(const BackwardProblem& /*problem*/, Context& context) {
  throw Error("block_softmax_backward", "out", "a tensor on cpu", "one on " + name_of(context.device));
}

}  // namespace fretwork::block_softmax_op::cuda
