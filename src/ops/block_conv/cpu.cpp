// The convolution on the CPU.
#include "ops/block_conv/problem.h"
namespace fretwork::block_conv::cpu {
void run(const Problem&, Context&) {}
}  // namespace fretwork::block_conv::cpu
