// Packs panels and strips and stores results of the CPU products, for operands of any strides.
#include "ops/kronecker/cpu/run.h"

namespace fretwork::kronecker::cpu {

void Packing::right(const Operand& from, std::int64_t depth, const Chunk& chunk, const Columns::Panel& panel,
                    std::byte* out) const {
  if (chunk.run() == 1) {
    tiles_.pack({from.data, from.row, from.col}, depth, panel.count, panel.width, out, 0);
    return;
  }
  const std::int64_t used = panel.count * chunk.run();
  if (chunk.full() && from.col == chunk.run() * from.delta) {  // columns go on from one another
    tiles_.pack({from.data, from.row, from.delta}, depth, used, panel.width, out, 0);
    return;
  }
  for (std::int64_t k = 0; k < depth; ++k, out += bytes(panel.width)) {
    tiles_.pack({at(from.data, k * from.row), from.col, from.delta}, panel.count, chunk.count, chunk.run(), out, 0);
    std::memset(out + bytes(used), 0, bytes(panel.width - used));
  }
}

Packing::Strip Packing::left(const Operand& from, std::int64_t rows, std::int64_t depth, const Chunk& chunk,
                             std::byte* out) const {
  const Strip form = strip(from, depth, chunk);
  const std::int64_t run = chunk.run();
  if (form.together) {
    const bool pairs = tiles_.group > 1;
    tiles_.pack({from.data, from.col, pairs ? from.row : from.delta}, depth, rows * run, tiles_.rows * run, out, 0);
    return form;
  }
  const std::size_t row_bytes = bytes(form.row);
  if (chunk.full() && from.col == run * from.delta) {
    tiles_.pack({from.data, from.row, from.delta}, rows, form.row, form.row, out, 0);
  } else if (run == 1) {
    tiles_.pack({from.data, from.row, from.col}, rows, depth, form.row, out, 0);
  } else {
    for (std::int64_t i = 0; i < rows; ++i) {
      tiles_.pack({at(from.data, i * from.row), from.col, from.delta}, depth, chunk.count, run,
                  out + static_cast<std::size_t>(i) * row_bytes, 0);
    }
  }
  std::memset(out + static_cast<std::size_t>(rows) * row_bytes, 0,
              static_cast<std::size_t>(tiles_.rows - rows) * row_bytes);
  return form;
}

void Packing::store(const std::byte* sums, std::int64_t sum_stride, std::int64_t rows, std::int64_t cols,
                    const Chunk& chunk, const Operand& to, bool stream) const {
  const std::int64_t run = chunk.run();
  if (chunk.full() && to.col == run * to.delta) {
    tiles_.store(sums, sum_stride, rows, cols * run, {to.data, to.row, to.delta}, stream);
    return;
  }
  if (run == 1) {
    tiles_.store(sums, sum_stride, rows, cols, {to.data, to.row, to.col}, stream);
    return;
  }
  for (std::int64_t j = 0; j < cols; ++j) {
    tiles_.store(sums + static_cast<std::size_t>(j * run) * tiles_.sum, sum_stride, rows, chunk.count,
                 {at(to.data, j * to.col), to.row, to.delta}, stream && chunk.full());
  }
}

}  // namespace fretwork::kronecker::cpu
