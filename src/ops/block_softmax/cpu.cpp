// Softmax and its gradient on the CPU: a row's runs are gathered into a scratch row, worked on there, and put back.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "core/half.h"
#include "ops/block_softmax/problem.h"

namespace fretwork::block_softmax_op::cpu {
namespace {

/// One row inside a block row: batch, head, block row, row of the block.
struct Row {
  std::int64_t z, h, i, y;
};

template <typename Acc>
Acc load(const void* data, DType dtype, std::int64_t at) {
  switch (dtype) {
    case DType::f64:
      return static_cast<Acc>(static_cast<const double*>(data)[at]);
    case DType::f32:
      return static_cast<Acc>(static_cast<const float*>(data)[at]);
    case DType::f16:
      return static_cast<Acc>(float_from_f16(static_cast<const std::uint16_t*>(data)[at]));
    case DType::bf16:
      return static_cast<Acc>(float_from_bf16(static_cast<const std::uint16_t*>(data)[at]));
    default:
      return static_cast<const std::uint8_t*>(data)[at] != 0 ? Acc{1} : Acc{0};
  }
}

template <typename Acc>
void store(void* data, DType dtype, std::int64_t at, Acc x) {
  switch (dtype) {
    case DType::f64:
      static_cast<double*>(data)[at] = static_cast<double>(x);
      break;
    case DType::f32:
      static_cast<float*>(data)[at] = static_cast<float>(x);
      break;
    case DType::f16:
      static_cast<std::uint16_t*>(data)[at] = f16_from_float(static_cast<float>(x));
      break;
    default:
      static_cast<std::uint16_t*>(data)[at] = bf16_from_float(static_cast<float>(x));
      break;
  }
}

/// Where the run of row `y` of packed block `block` begins.
std::int64_t start(const Packed& p, const Row& row, std::int64_t block) {
  return row.z * p.z + block * p.block + row.y * p.row;
}

/// Where the run of the row under block column `column` begins.
std::int64_t start(const Dense& d, const Row& row, const BlockLayout::Sizes& s, std::int64_t column) {
  return row.z * d.z + row.h * d.h + (row.i * s.block_rows + row.y) * d.row + column * s.block_cols * d.col;
}

template <typename Acc>
void apply_mask(const Dense& mask, std::int64_t at, std::int64_t count, Acc* run) {
  for (std::int64_t x = 0; mask.data != nullptr && x < count; ++x) {
    const Acc m = load<Acc>(mask.data, mask.dtype, at + x * mask.col);
    if (mask.mode == MaskMode::add) {
      run[x] += m;
    } else if (m == Acc{0}) {
      run[x] = -std::numeric_limits<Acc>::infinity();
    }
  }
}

/// values·scale + extras of one row.
template <typename Acc>
void gather(const Problem& p, const Row& row, std::span<const BlockIndex::Entry> blocks, Acc* x) {
  const auto& s = p.layout->sizes();
  const auto scale = static_cast<Acc>(p.scale);
  for (const auto& entry : blocks) {
    const std::int64_t at = start(p.values, row, entry.block), rpe = start(p.rpe, row, s, entry.other);
    for (std::int64_t k = 0; k < s.block_cols; ++k) {
      x[k] = load<Acc>(p.values.data, p.dtype, at + k * p.values.col) * scale;
      if (p.rpe.data != nullptr) {
        x[k] += load<Acc>(p.rpe.data, p.rpe.dtype, rpe + k * p.rpe.col);
      }
    }
    // What takes entries out comes last, so that nothing added there counts.
    const bool key_last = p.key_padding.mode == MaskMode::mul;
    for (const Dense* mask : {key_last ? &p.attn : &p.key_padding, key_last ? &p.key_padding : &p.attn}) {
      apply_mask(*mask, start(*mask, row, s, entry.other), s.block_cols, x);
    }
    x += s.block_cols;
  }
}

/// In place; a row with nothing left becomes zeros.
template <typename Acc>
void softmax_row(std::span<Acc> x) {
  constexpr Acc kNone = -std::numeric_limits<Acc>::infinity();
  Acc top = kNone, sum = 0;
  for (const Acc v : x) {
    top = std::max(top, v);
  }
  // A row of −inf alone must not subtract it from itself; NaN still shows through the sum.
  top = top == kNone ? Acc{0} : top;
  for (Acc& v : x) {
    v = std::exp(v - top);
    sum += v;
  }
  const Acc factor = sum == Acc{0} ? Acc{0} : Acc{1} / sum;
  for (Acc& v : x) {
    v *= factor;
  }
}

template <typename Acc>
void scatter(const Packed& to, DType dtype, const Row& row, std::span<const BlockIndex::Entry> blocks,
             std::int64_t width, const Acc* x) {
  for (const auto& entry : blocks) {
    const std::int64_t at = start(to, row, entry.block);
    for (std::int64_t k = 0; k < width; ++k) {
      store(to.data, dtype, at + k * to.col, *x++);
    }
  }
}

template <typename Acc>
void forward_lines(const Problem& p, std::int64_t begin, std::int64_t end) {
  const auto& s = p.layout->sizes();
  const std::int64_t lines = s.heads * s.rows;
  std::vector<Acc> scratch(static_cast<std::size_t>(s.cols * s.block_cols));
  for (std::int64_t n = begin; n < end; ++n) {
    const std::int64_t line = n % lines;
    const auto blocks = p.layout->by_row().line(line);
    const std::span<Acc> x{scratch.data(), blocks.size() * static_cast<std::size_t>(s.block_cols)};
    for (std::int64_t y = 0; y < s.block_rows && !blocks.empty(); ++y) {
      const Row row{n / lines, line / s.rows, line % s.rows, y};
      gather(p, row, blocks, x.data());
      softmax_row(x);
      scatter(p.out, p.dtype, row, blocks, s.block_cols, x.data());
    }
  }
}

/// Scratch of one thread: a row of out, of d_out (then of d), and a row of d_rpe.
template <typename Acc>
struct BackwardScratch {
  std::vector<Acc> out, d, rpe;
};

/// Writes d_values of one row and adds its d into the row of d_rpe that it belongs to.
template <typename Acc>
void backward_row(const BackwardProblem& p, const Row& row, BackwardScratch<Acc>& scratch) {
  const auto& s = p.layout->sizes();
  const auto blocks = p.layout->by_row().line(row.h * s.rows + row.i);
  const std::size_t count = blocks.size() * static_cast<std::size_t>(s.block_cols);
  Acc dot = 0;
  std::size_t n = 0;
  for (const auto& entry : blocks) {
    for (std::int64_t k = 0; k < s.block_cols; ++k, ++n) {
      scratch.out[n] = load<Acc>(p.out.data, p.dtype, start(p.out, row, entry.block) + k * p.out.col);
      scratch.d[n] = load<Acc>(p.d_out.data, p.dtype, start(p.d_out, row, entry.block) + k * p.d_out.col);
      // Where nothing came out nothing counts, NaN upstream included.
      dot += scratch.out[n] != Acc{0} ? scratch.out[n] * scratch.d[n] : Acc{0};
    }
  }
  for (n = 0; n < count; ++n) {
    scratch.d[n] = scratch.out[n] != Acc{0} ? scratch.out[n] * (scratch.d[n] - dot) : Acc{0};
  }
  n = 0;
  for (const auto& entry : blocks) {
    for (std::int64_t k = 0; p.d_rpe.data != nullptr && k < s.block_cols; ++k) {
      scratch.rpe[p.rpe_sizes.cols == 1 ? 0 : static_cast<std::size_t>(entry.other * s.block_cols + k)] +=
          scratch.d[n++];
    }
  }
  for (n = 0; n < count; ++n) {
    scratch.d[n] *= static_cast<Acc>(p.scale);
  }
  scatter(p.d_values, p.dtype, row, blocks, s.block_cols, scratch.d.data());
}

/// The rows that share one place of d_rpe. Without rpe each block row is one such group.
struct Groups {
  std::int64_t z, h, i;  ///< groups along each axis
};

Groups groups(const BackwardProblem& p) {
  const auto& s = p.layout->sizes();
  if (p.d_rpe.data == nullptr) {
    return {p.batch, s.heads, s.rows};
  }
  return {p.rpe_sizes.z, p.rpe_sizes.h, p.rpe_sizes.rows == 1 ? 1 : s.rows};
}

/// Half-open range of an axis that group `g` of `count` covers: one place, or all of them.
std::pair<std::int64_t, std::int64_t> covered(std::int64_t g, std::int64_t count, std::int64_t size) {
  return count == size ? std::pair{g, g + 1} : std::pair{std::int64_t{0}, size};
}

template <typename Acc>
void backward_group(const BackwardProblem& p, const Groups& all, std::int64_t group, BackwardScratch<Acc>& scratch) {
  const auto& s = p.layout->sizes();
  const Row first{group / (all.h * all.i), group / all.i % all.h, group % all.i, 0};
  const auto [z0, z1] = covered(first.z, all.z, p.batch);
  const auto [h0, h1] = covered(first.h, all.h, s.heads);
  const auto [i0, i1] = covered(first.i, all.i, s.rows);
  const bool rows_share = p.d_rpe.data != nullptr && p.rpe_sizes.rows == 1;
  for (std::int64_t y = 0; y < (rows_share ? 1 : s.block_rows); ++y) {
    std::fill(scratch.rpe.begin(), scratch.rpe.end(), Acc{0});
    for (std::int64_t z = z0; z < z1; ++z) {
      for (std::int64_t h = h0; h < h1; ++h) {
        for (std::int64_t i = i0; i < i1; ++i) {
          for (std::int64_t yy = y; yy < (rows_share ? s.block_rows : y + 1); ++yy) {
            backward_row(p, {z, h, i, yy}, scratch);
          }
        }
      }
    }
    const std::int64_t at = start(p.d_rpe, {first.z, first.h, first.i, y}, s, 0);
    for (std::int64_t k = 0; p.d_rpe.data != nullptr && k < p.rpe_sizes.cols; ++k) {
      store(p.d_rpe.data, p.d_rpe.dtype, at + k * p.d_rpe.col, scratch.rpe[static_cast<std::size_t>(k)]);
    }
  }
}

template <typename Acc>
void backward_groups(const BackwardProblem& p, const Groups& all, std::int64_t begin, std::int64_t end) {
  const auto& s = p.layout->sizes();
  const auto width = static_cast<std::size_t>(s.cols * s.block_cols);
  BackwardScratch<Acc> scratch{std::vector<Acc>(width), std::vector<Acc>(width), std::vector<Acc>(width + 1)};
  for (std::int64_t group = begin; group < end; ++group) {
    backward_group(p, all, group, scratch);
  }
}

}  // namespace

void forward(const Problem& problem, Context& context) {
  const auto& s = problem.layout->sizes();
  context.executor->parallel_for(problem.batch * s.heads * s.rows, 1, [&](std::int64_t begin, std::int64_t end) {
    problem.dtype == DType::f64 ? forward_lines<double>(problem, begin, end)
                                : forward_lines<float>(problem, begin, end);
  });
}

void backward(const BackwardProblem& problem, Context& context) {
  const Groups all = groups(problem);
  context.executor->parallel_for(all.z * all.h * all.i, 1, [&](std::int64_t begin, std::int64_t end) {
    problem.dtype == DType::f64 ? backward_groups<double>(problem, all, begin, end)
                                : backward_groups<float>(problem, all, begin, end);
  });
}

}  // namespace fretwork::block_softmax_op::cpu
