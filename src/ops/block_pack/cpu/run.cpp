// Packing on the CPU, one row of a block at a time; memcpy if both sides are contiguous.
#include <algorithm>
#include <cstring>

#include "ops/block_pack/problem.h"

namespace fretwork::block_pack_op::cpu {
namespace {

template <typename T>
void copy_run(const T* from, std::int64_t from_step, T* to, std::int64_t to_step, std::int64_t count) {
  if (from_step == 1 && to_step == 1) {
    std::memcpy(to, from, static_cast<std::size_t>(count) * sizeof(T));
    return;
  }
  for (std::int64_t n = 0; n < count; ++n) {
    to[n * to_step] = from[n * from_step];
  }
}

template <typename T>
void fill_run(T* to, std::int64_t step, std::int64_t count, T value) {
  for (std::int64_t n = 0; n < count; ++n) {
    to[n * step] = value;
  }
}

/// Copies one block row of one head of one batch. Unpacking fills the gaps between blocks on the way.
template <typename T>
void copy_line(const Problem& p, std::int64_t z, std::int64_t line) {
  const auto& s = p.layout->sizes();
  for (std::int64_t y = 0; y < s.block_rows; ++y) {
    const std::int64_t row = line % s.rows * s.block_rows + y;
    T* const dense = static_cast<T*>(p.dense.data) + z * p.dense.z + line / s.rows * p.dense.h + row * p.dense.row;
    std::int64_t done = 0;
    const auto fill_to = [&](std::int64_t column) {
      if (p.unpack) {
        fill_run(dense + done * p.dense.col, p.dense.col, column - done, static_cast<T>(p.fill));
      }
    };
    for (const auto& entry : p.layout->by_row().line(line)) {
      T* const values =
          static_cast<T*>(p.values.data) + z * p.values.z + entry.block * p.values.block + y * p.values.row;
      const std::int64_t column = entry.other * s.block_cols;
      T* const part = dense + column * p.dense.col;
      fill_to(column);
      p.unpack ? copy_run<T>(values, p.values.col, part, p.dense.col, s.block_cols)
               : copy_run<T>(part, p.dense.col, values, p.values.col, s.block_cols);
      done = column + s.block_cols;
    }
    fill_to(s.cols * s.block_cols);
  }
}

template <typename T>
void run_as(const Problem& p, Context& context) {
  const std::int64_t lines = p.layout->heads() * p.layout->sizes().rows;
  context.executor->parallel_for(p.batch * lines, 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t n = begin; n < end; ++n) {
      copy_line<T>(p, n / lines, n % lines);
    }
  });
}

}  // namespace

void run(const Problem& problem, Context& context) {
  switch (problem.element_bytes) {
    case 2:
      return run_as<std::uint16_t>(problem, context);
    case 4:
      return run_as<std::uint32_t>(problem, context);
    default:
      return run_as<std::uint64_t>(problem, context);
  }
}

}  // namespace fretwork::block_pack_op::cpu
