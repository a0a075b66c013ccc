// The selection of key blocks after all checks: what both backends receive.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/divide.h"
#include "fretwork/context.h"

namespace fretwork::select_blocks_op {

/// q or k; strides in elements.
struct Operand {
  const void* data = nullptr;
  std::int64_t batch = 0, head = 0, row = 0, col = 0;
};

/// counts and indices; col is unused in counts.
struct Result {
  std::int32_t* data = nullptr;
  std::int64_t batch = 0, head = 0, row = 0, col = 0;
};

/// The key blocks that a query block may take are [0, may). Of these it must take [0, first) and [last, own].
struct Places {
  std::int64_t may, first, last, own;
};

struct Problem {
  DType dtype = DType::f32;
  std::int64_t batch = 0, heads = 0, kv_heads = 0, rows = 0, cols = 0, depth = 0;
  std::int64_t block_rows = 0, block_cols = 0;  ///< queries and keys of a block
  std::int64_t top_k = 0, first = 0, last = 0;
  bool causal = true;
  Operand q, k;
  Result counts, indices;

  std::int64_t group() const { return heads / kv_heads; }
  std::int64_t row_blocks() const { return ceil_div(rows, block_rows); }
  std::int64_t col_blocks() const { return ceil_div(cols, block_cols); }
  Places places(std::int64_t row_block) const {
    const std::int64_t position = std::min((row_block + 1) * block_rows, rows) - 1 + cols - rows;
    const std::int64_t own = position < 0 ? -1 : position / block_cols;  // nothing is told from below −1 blocks
    return {causal ? own + 1 : col_blocks(), first, own - last + 1, own};
  }
};

namespace cpu {
void run(const Problem& problem, Context& context);
}
namespace cuda {
void run(const Problem& problem, Context& context);
}

}  // namespace fretwork::select_blocks_op
