// SPLAT's operators after all checks: what both backends receive. x holds a row's entries side by side, in ascending
// order of their columns.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "fretwork/context.h"
#include "fretwork/pattern.h"

namespace fretwork::regular_op {

/// The columns of each row, ascending: those of row i begin at first[i].
struct Rows {
  std::vector<std::int64_t> first;
  std::vector<std::int32_t> columns;
  std::int64_t count(std::int64_t i) const {
    return first[static_cast<std::size_t>(i) + 1] - first[static_cast<std::size_t>(i)];
  }
  std::span<const std::int32_t> row(std::int64_t i) const {
    return {columns.data() + first[static_cast<std::size_t>(i)], static_cast<std::size_t>(count(i))};
  }
  std::size_t bytes() const { return first.size() * 8 + columns.size() * 4; }
};

/// The entries of each column, by ascending row: those of column j begin at first[j].
struct Columns {
  struct Entry {
    std::int32_t row, place;  ///< x[row, place] stands for it
  };
  std::vector<std::int64_t> first;
  std::vector<Entry> entries;
  std::span<const Entry> column(std::int64_t j) const {
    const std::int64_t begin = first[static_cast<std::size_t>(j)], end = first[static_cast<std::size_t>(j) + 1];
    return {entries.data() + begin, static_cast<std::size_t>(end - begin)};
  }
  std::size_t bytes() const { return first.size() * 8 + entries.size() * sizeof(Entry); }
};

/// Remembered by the pattern's text.
std::shared_ptr<const Rows> rows_of(const RegularPattern& pattern);
std::shared_ptr<const Columns> columns_of(const RegularPattern& pattern);

/// (batch, head, row, column); strides in elements.
struct Operand {
  void* data = nullptr;
  std::int64_t batch = 0, head = 0, row = 0, col = 0;
};

/// Which of the three that x[i, t] = by_row[i] · by_col[j], j the column of entry t, ties together is computed from the
/// other two.
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

/// exp(scale·x − top), top the largest scale·x, is computed as exp(after·(before·x − top')), where scale = before·after
/// and |before| ≤ 1 ≤ after: neither factor overflows, so finite x never make a NaN.
struct SplitScale {
  double before, after;
  SplitScale(double scale, double largest)
      : before(std::clamp(scale, -1.0, 1.0)), after(std::clamp(std::abs(scale), 1.0, largest)) {}
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
