// The families of GPU kernels, as choose.cpp sees them: whether one fits a problem, what it would cost, its launch.
#pragma once

#include "ops/block_matmul/problem.h"
#include "runtime/choose.h"
#include "runtime/cost.h"

namespace fretwork::block_matmul {

/// Of the blocks that are there.
double flops_of(const Problem& problem);
/// Of blocks and dense operands, each once.
double operand_bytes(const Problem& problem);
/// Batches that the grid covers beside the heads of the layout.
inline std::int64_t grid_heads(const Problem& problem) { return problem.layout->heads() == 1 ? problem.h_out : 1; }

/// TMA and wgmma: an sm_90a kernel architecture, a 16-bit type, square blocks of 16, 32, 64 or 128, operands that the
/// copy engine can read (one unit stride, the others multiples of 16 bytes, 16-byte aligned).
namespace hopper {
/// Those that fit, by the columns of their tiles, each with its cost. Blocks of 16 and 32, and an sdd, have tiles of
/// one width only. The device is current.
std::vector<Candidate<int>> candidates(const Problem& problem, const Context& context);
void launch(const Problem& problem, Context& context, int width);
}  // namespace hopper

/// mma.sync and cp.async in small tiles: sm_80 and later, a 16-bit type, an spmm, blocks whose sizes are multiples of
/// 16. The dense operand may lie anyhow, if one of its axes is contiguous.
namespace small {
/// Those that fit, by their number in kSmallTiles, each with its cost.
std::vector<Candidate<int>> candidates(const Problem& problem, const Context& context);
void launch(const Problem& problem, Context& context, int tile);
}  // namespace small

/// mma.sync and cp.async: sm_80 and later, square blocks from 16 on, 16-bit types, and fp32 where tf32 is allowed. A
/// tile of the result has 128 rows and `tile` columns.
namespace portable {
inline constexpr int kTiles[] = {256, 128};
bool fits(const Problem& problem, const Context& context, int tile);
cost::Work cost(const Problem& problem, const Context& context, int tile);
void launch(const Problem& problem, Context& context, int tile);
}  // namespace portable

/// Any block, any type, any GPU.
namespace generic {
cost::Work cost(const Problem& problem, const Context& context);
void launch(const Problem& problem, Context& context);
}  // namespace generic

}  // namespace fretwork::block_matmul
