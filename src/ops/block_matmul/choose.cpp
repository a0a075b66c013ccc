// The products on a GPU: which kernels run a problem. The only place where that is chosen: each family that fits is a
// candidate with its cost in µs (runtime/cost.h), and the cheapest one runs.
#include "runtime/choose.h"

#include <algorithm>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "fretwork/error.h"
#include "ops/block_matmul/cuda/families.h"
#include "runtime/cuda_driver.h"

namespace fretwork::block_matmul {
namespace {

enum class Family { hopper, portable, generic };

struct Config {
  Family family = Family::generic;
  int tile = 0;  ///< portable: columns of a tile
};

std::vector<Candidate<Config>> candidates_for(const Problem& problem, const Context& context) {
  std::vector<Candidate<Config>> list;
  list.reserve(4);
  if (hopper::fits(problem, context)) {
    list.push_back({{Family::hopper}, hopper::cost(problem, context).microseconds()});
  }
  for (const int tile : portable::kTiles) {
    if (portable::fits(problem, context, tile)) {
      list.push_back({{Family::portable, tile}, portable::cost(problem, context, tile).microseconds()});
    }
  }
  list.push_back({{Family::generic}, generic::cost(problem, context).microseconds()});
  return list;
}

bool run(const Config& config, const Problem& problem, Context& context) {
  switch (config.family) {
    case Family::hopper:
      return hopper::launch(problem, context);
    case Family::portable:
      portable::launch(problem, context, config.tile);
      return true;
    case Family::generic:
      break;
  }
  generic::launch(problem, context);
  return true;
}

std::string text_of(const Config& config) {
  switch (config.family) {
    case Family::hopper:
      return "hopper";
    case Family::portable:
      return "portable, tiles of " + std::to_string(config.tile) + " columns";
    case Family::generic:
      break;
  }
  return "generic";
}

std::string text_of(const Problem& p) {
  const auto number = [](std::int64_t n) { return std::to_string(n); };
  const auto& s = p.layout->sizes();
  const std::int64_t free = p.kind == Kind::spmm ? p.out.cols : p.left.cols;
  return std::string(p.op) + ", " + number(s.rows * s.block_rows) + " × " + number(s.cols * s.block_cols) + " in " +
         number(p.layout->nnz()) + " blocks of " + number(s.block_rows) + " × " + number(s.block_cols) + ", " +
         (p.kind == Kind::spmm ? "dense side " : "depth ") + number(free) + ", batch " + number(p.z_out * p.z_sum) +
         ", heads " + number(p.h_out * p.h_sum) + ", " + name_of(p.dtype);
}

bool writes_over_operands(const Problem& p) {
  return p.kind == Kind::spmm ? writes_over({p.out.data}, {p.right.data, p.sparse.data})
                              : writes_over({p.sparse.data}, {p.left.data, p.right.data});
}

}  // namespace

double flops_of(const Problem& p) {
  const auto& s = p.layout->sizes();
  const std::int64_t free = p.kind == Kind::spmm ? p.out.cols : p.left.cols;
  const std::int64_t heads = p.layout->heads() == 1 ? p.h_out * p.h_sum : 1;
  return 2.0 * static_cast<double>(p.layout->nnz() * s.block_rows * s.block_cols) *
         static_cast<double>(free * heads * p.z_out * p.z_sum);
}

double operand_bytes(const Problem& p) {
  const auto& s = p.layout->sizes();
  const std::int64_t batches = p.z_out * p.z_sum, heads = p.h_out * p.h_sum;
  const std::int64_t blocks = p.layout->nnz() * s.block_rows * s.block_cols * batches;
  const auto of = [](const Matrix& m) { return m.rows * m.cols; };
  const std::int64_t dense = p.kind == Kind::spmm ? of(p.right) + of(p.out) : of(p.left) + of(p.right);
  return static_cast<double>(blocks + dense * batches * heads) * static_cast<double>(size_of(p.dtype));
}

void cuda::run(const Problem& problem, Context& context) {
  for (const Matrix& m : {problem.left, problem.right, problem.out}) {
    if (std::max(m.rows, m.cols) > std::numeric_limits<std::int32_t>::max()) {
      throw Error("block_matmul", "size", "at most 2147483647 rows and columns on a GPU",
                  std::to_string(std::max(m.rows, m.cols)));
    }
  }
  const fretwork::cuda::DeviceScope scope(context.device.index);
  std::vector<Candidate<Config>> candidates = candidates_for(problem, context);
  const auto run_one = [&](const Config& config) { return block_matmul::run(config, problem, context); };
  if (explains()) [[unlikely]] {
    return explain_cheapest(context, text_of(problem), candidates, run_one, writes_over_operands(problem));
  }
  run_cheapest(std::move(candidates), run_one);
}

}  // namespace fretwork::block_matmul
