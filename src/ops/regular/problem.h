// SPLAT's operators after all checks: what both backends receive. x holds a row's entries side by side, entry t of row
// i standing for column start[i] + t·stride[i].
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "fretwork/context.h"
#include "fretwork/pattern.h"

namespace fretwork::regular_op {

using Progression = RegularPattern::Progression;

/// Which columns each row holds. A row of one entry or none has stride 1.
struct Rows {
  std::vector<Progression> lines;
  std::int64_t width = 0;  ///< entries of the longest
  std::size_t bytes() const { return lines.size() * sizeof(Progression); }
};

/// Which rows hold each column, rising: start + s·stride, 0 ≤ s < count, or where columns are no progressions
/// list[start + s·stride].
struct Columns {
  std::vector<Progression> lines;
  std::vector<std::int64_t> list;
  std::size_t bytes() const { return lines.size() * sizeof(Progression) + list.size() * sizeof(std::int64_t); }
};

/// Remembered by the pattern's text. rows_of throws Error where a row is no progression.
std::shared_ptr<const Rows> rows_of(const RegularPattern& pattern);
std::shared_ptr<const Columns> columns_of(const RegularPattern& pattern);

/// (batch, head, row, column); strides in elements.
struct Operand {
  void* data = nullptr;
  std::int64_t batch = 0, head = 0, row = 0, col = 0;
};

/// Which of the three that x[i, t] = by_row[i] · by_col[column(i, t)] ties together is computed from the other two.
enum class Result : std::uint8_t { values, by_row, by_col };

struct Product {
  Result result = Result::values;
  DType dtype = DType::f32;
  const RegularPattern* pattern = nullptr;
  std::int64_t batch = 0, heads = 0,
               kv_heads = 0;  ///< head h of x and by_row uses head h / (heads / kv_heads) of by_col
  std::int64_t rows = 0, cols = 0, depth = 0, width = 0;
  Operand values;          ///< (batch, heads, rows, width)
  Operand by_row, by_col;  ///< (batch, heads, rows, depth), (batch, kv_heads, cols, depth)
};

/// out = softmax of scale·in over each row's entries; or, where d_out is there, the gradient of `in` from `in`, which
/// then is the softmax, and d_out.
struct Softmax {
  DType dtype = DType::f32;
  const RegularPattern* pattern = nullptr;
  std::int64_t batch = 0, heads = 0, rows = 0, width = 0;
  double scale = 1;
  Operand in, d_out, out;
};

namespace cpu {
void run(const Product& product, Context& context);
void run(const Softmax& softmax, Context& context);
}  // namespace cpu
namespace cuda {
void run(const Product& product, Context& context);
void run(const Softmax& softmax, Context& context);
}  // namespace cuda

}  // namespace fretwork::regular_op
