// The products on a GPU: which kernels run a problem. The only place where that is chosen: each family that fits is a
// candidate with its cost in µs (runtime/cost.h), and the cheapest one runs.
#include "runtime/choose.h"

#include <algorithm>
#include <array>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "core/hash.h"
#include "fretwork/error.h"
#include "ops/block_matmul/cuda/families.h"
#include "ops/block_matmul/cuda/params.h"
#include "runtime/cuda_driver.h"

namespace fretwork::block_matmul {
namespace {

enum class Family { hopper, small, portable, generic };

struct Config {
  Family family = Family::generic;
  int tile = 0;  ///< columns of a tile, or 0 if there is no choice; small: which of kSmallTiles
};

std::string text_of(const Config& config) {
  switch (config.family) {
    case Family::hopper:
      return config.tile == 0 ? "hopper" : "hopper, tiles of " + std::to_string(config.tile) + " columns";
    case Family::small: {
      const SmallTile& tile = kSmallTiles[static_cast<std::size_t>(config.tile)];
      return "small, tiles of " + std::to_string(tile.rows) + " × " + std::to_string(tile.cols);
    }
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

std::vector<Candidate<Config>> candidates_for(const Problem& problem, const Context& context) {
  std::vector<Candidate<Config>> list;
  const auto add = [&](Family family, const std::vector<Candidate<int>>& tiles) {
    for (const auto& [tile, microseconds] : tiles) {
      list.push_back({{family, tile}, microseconds});
    }
  };
  add(Family::hopper, hopper::candidates(problem, context));
  const bool hopper = !list.empty();  // and then the portable kernels were never faster
  add(Family::small, small::candidates(problem, context));
  for (const int tile : portable::kTiles) {
    if (!hopper && portable::fits(problem, context, tile)) {
      list.push_back({{Family::portable, tile}, portable::cost(problem, context, tile).microseconds()});
    }
  }
  list.push_back({{Family::generic}, generic::cost(problem, context).microseconds()});
  return list;
}

/// The key of a choice: everything that the families look at.
using Numbers = std::array<std::int64_t, 32>;
Numbers numbers_of(const Problem& p, const Context& context) {
  const Hash128 layout = hash128(p.layout->key());
  const Values& v = p.sparse;
  Numbers numbers{static_cast<std::int64_t>(layout.low),
                  static_cast<std::int64_t>(layout.high),
                  settings_of(p.dtype, context),
                  address_bits({p.left.data, p.right.data, p.out.data, v.data}),
                  static_cast<std::int64_t>(p.kind),
                  p.transposed,
                  p.z_out,
                  p.h_out,
                  p.z_sum,
                  p.h_sum,
                  v.z_stride,
                  v.block_stride,
                  v.row_stride,
                  v.col_stride};
  std::size_t at = 14;
  for (const Matrix& m : {p.left, p.right, p.out}) {
    for (const std::int64_t number : {m.rows, m.cols, m.row_stride, m.col_stride, m.z_stride, m.h_stride}) {
      numbers[at++] = number;
    }
  }
  return numbers;
}

const Config& chosen_lately(const Problem& problem, const Context& context) {
  thread_local Lately<std::tuple_size_v<Numbers>, Config> lately;
  return lately.get(numbers_of(problem, context),
                    [&] { return cheapest<Config>(candidates_for(problem, context)).config; });
}

void run(const Config& config, const Problem& problem, Context& context) {
  switch (config.family) {
    case Family::hopper:
      return hopper::launch(problem, context, config.tile);
    case Family::small:
      return small::launch(problem, context, config.tile);
    case Family::portable:
      return portable::launch(problem, context, config.tile);
    case Family::generic:
      return generic::launch(problem, context);
  }
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
  if (explains()) [[unlikely]] {
    const auto run_one = [&](const Config& config) {
      block_matmul::run(config, problem, context);
      return true;
    };
    return explain_cheapest(context, text_of(problem), candidates_for(problem, context), run_one,
                            writes_over_operands(problem));
  }
  block_matmul::run(chosen_lately(problem, context), problem, context);
}

}  // namespace fretwork::block_matmul
