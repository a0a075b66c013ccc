// Attention over keys known only on the device, after all checks: attention's own problem, and which keys each query
// sees.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "fretwork/context.h"
#include "ops/attention/problem.h"

namespace fretwork::dynamic_attention_op {

/// Flags or 32-bit integers by (batch, head, row, column); a stride is 0 where the size is 1.
struct Table {
  const void* data = nullptr;
  std::int64_t batch = 0, head = 0, row = 0, col = 0;

  const std::uint8_t& flag(std::int64_t b, std::int64_t h, std::int64_t r, std::int64_t c) const {
    return static_cast<const std::uint8_t*>(data)[b * batch + h * head + r * row + c * col];
  }
  std::int32_t number(std::int64_t b, std::int64_t h, std::int64_t r, std::int64_t c) const {
    return static_cast<const std::int32_t*>(data)[b * batch + h * head + r * row + c * col];
  }
};

enum class Form { mask, lists, selected, documents };

/// Which keys a query sees, as the device has it. On a GPU the tables are device memory.
struct Keys {
  Form form = Form::mask;
  /// Of blocks: R × C of them; of a selection R is the number of queries.
  std::int64_t block_rows = 1, block_cols = 1, rows = 0, cols = 0;
  std::int64_t batch = 1, heads = 1;  ///< lists that differ: 1, or one for each batch element; 1, Hk or Hq
  Table mask, counts, indices;
  std::int64_t entries = 0;  ///< of a line of indices
  /// Of documents. left and right are −1 where there is no bound.
  Table cu_q, cu_k;
  std::int64_t documents = 0, left = -1, right = -1, max_q = 0, max_k = 0;
};

/// Columns [begin, end) that a row has.
struct Interval {
  std::int32_t begin, end;
};

/// Of each row and each column of a pattern in plain order.
struct Intervals {
  std::vector<Interval> rows, cols;
  std::size_t bytes() const { return (rows.size() + cols.size()) * sizeof(Interval); }
};

/// Remembered by the pattern. Throws Error where rows or columns are not intervals, or leave gaps between neighbours.
std::shared_ptr<const Intervals> intervals_of(const char* op, const RegularPattern& pattern);

struct Problem {
  attention_op::Problem attention;
  Keys keys;
};
struct BackwardProblem {
  attention_op::BackwardProblem attention;
  Keys keys;
};

namespace cpu {
void forward(const Problem& problem, Context& context);
void backward(const BackwardProblem& problem, Context& context);
}  // namespace cpu
namespace cuda {
void forward(const Problem& problem, Context& context);
void backward(const BackwardProblem& problem, Context& context);
}  // namespace cuda

}  // namespace fretwork::dynamic_attention_op
