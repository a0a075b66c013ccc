// Packing on a GPU.
#include "fretwork/error.h"
#include "ops/block_pack/problem.h"

namespace fretwork::block_pack_op::cuda {

void run(const Problem& problem, Context& context) {
  throw Error(problem.unpack ? "unpack" : "pack", problem.unpack ? "values" : "dense", "a tensor on cpu",
              "one on " + name_of(context.device));
}

}  // namespace fretwork::block_pack_op::cuda
