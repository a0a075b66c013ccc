// Softmax and its gradient on the CPU: a row's runs are gathered into a scratch row in fp32 (fp64 for float64), worked
// on there with vectors, and put back. One source for every instruction set; the best is chosen once per call.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/block_softmax/cpu/run.cpp"
#include <hwy/foreach_target.h>  // compiles what follows once per instruction set
//
#include <hwy/aligned_allocator.h>
#include <hwy/contrib/math/math-inl.h>
#include <hwy/highway.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "ops/block_softmax/problem.h"
#include "runtime/simd/elements-inl.h"

#ifndef FRETWORK_OPS_BLOCK_SOFTMAX_CPU  // what needs no vectors, once
#define FRETWORK_OPS_BLOCK_SOFTMAX_CPU
namespace fretwork::block_softmax_op {
namespace {

using Blocks = std::span<const BlockIndex::Entry>;

/// One row inside a block row: batch, head, block row, row of the block.
struct Row {
  std::int64_t z, h, i, y;
};

/// Where the run of the row in packed block `block` begins.
std::int64_t start(const Packed& p, const Row& row, std::int64_t block) {
  return row.z * p.z + block * p.block + row.y * p.row;
}

/// Where the run of the row under block column `column` begins.
std::int64_t start(const Dense& d, const Row& row, const BlockLayout::Sizes& s, std::int64_t column) {
  return row.z * d.z + row.h * d.h + (row.i * s.block_rows + row.y) * d.row + column * s.block_cols * d.col;
}

/// How many groups of rows share a place of d_rpe, along each axis. Without rpe each block row is a group.
struct Groups {
  std::int64_t z, h, i;
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

/// Rows gathered at a time: many, so that memory is read in long pieces, but no more than the second cache holds.
std::int64_t rows_at_once(const BlockLayout::Sizes& s) {
  const std::int64_t width = std::max<std::int64_t>(s.cols * s.block_cols, 1);
  return std::clamp<std::int64_t>((std::int64_t{1} << 16) / width, 8, 32);
}

/// Lines that make a piece of work worth a thread.
std::int64_t grain(const BlockLayout& layout, std::int64_t tasks, std::int64_t batch) {
  const auto& s = layout.sizes();
  const std::int64_t elements = batch * layout.nnz() * s.block_rows * s.block_cols;
  return std::max<std::int64_t>(1, (std::int64_t{1} << 15) * tasks / std::max<std::int64_t>(elements, 1));
}

}  // namespace
}  // namespace fretwork::block_softmax_op
#endif

HWY_BEFORE_NAMESPACE();
namespace fretwork::block_softmax_op::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
namespace elements = fretwork::simd::HWY_NAMESPACE;

template <typename Acc>
using Tag = hn::ScalableTag<Acc>;

/// size_of, without a call for the types of most runs.
inline std::int64_t bytes_of(DType dtype) {
  const bool half = dtype == DType::f16 || dtype == DType::bf16;
  return half ? 2 : dtype == DType::f32 ? 4 : static_cast<std::int64_t>(size_of(dtype));
}

/// Converts a run into the scratch row.
template <typename Acc>
void widen(const void* data, DType dtype, std::int64_t at, std::int64_t step, std::int64_t count, Acc* to) {
  elements::WidenRow(static_cast<const std::byte*>(data) + at * bytes_of(dtype), dtype, step, count, Acc{1}, to);
}

/// Rounds a run of the scratch row and stores it.
template <typename Acc>
void narrow(const Acc* from, std::int64_t count, void* data, DType dtype, std::int64_t at, std::int64_t step) {
  elements::NarrowRow(from, count, Acc{1}, static_cast<std::byte*>(data) + at * bytes_of(dtype), dtype, step);
}

/// The first `rows` rows from `row` on; row y goes to to[y·stride]. Block by block, as they lie in memory.
template <typename Acc>
void gather(const Packed& p, DType dtype, Row row, std::int64_t rows, Blocks blocks, std::int64_t width, Acc* to,
            std::size_t stride) {
  for (const auto& entry : blocks) {
    const std::int64_t at = start(p, row, entry.block);
    for (std::int64_t y = 0; y < rows; ++y) {
      widen(p.data, dtype, at + y * p.row, p.col, width, to + static_cast<std::size_t>(y) * stride);
    }
    to += width;
  }
}

template <typename Acc>
void gather(const Dense& p, const Row& row, Blocks blocks, const BlockLayout::Sizes& s, Acc* to) {
  for (const auto& entry : blocks) {
    widen(p.data, p.dtype, start(p, row, s, entry.other), p.col, s.block_cols, to);
    to += s.block_cols;
  }
}

/// The reverse of gather.
template <typename Acc>
void scatter(const Acc* from, std::size_t stride, const Packed& p, DType dtype, Row row, std::int64_t rows,
             Blocks blocks, std::int64_t width) {
  for (const auto& entry : blocks) {
    const std::int64_t at = start(p, row, entry.block);
    for (std::int64_t y = 0; y < rows; ++y) {
      narrow(from + static_cast<std::size_t>(y) * stride, width, p.data, dtype, at + y * p.row, p.col);
    }
    from += width;
  }
}

/// Scratch rows, rounded up to whole vectors, so that passes over them have no tails.
template <typename Acc>
class Scratch {
 public:
  explicit Scratch(const BlockLayout::Sizes& s, std::int64_t rows = 1)
      : x_(hwy::AllocateAligned<Acc>(stride(static_cast<std::size_t>(s.cols * s.block_cols)) *
                                     static_cast<std::size_t>(rows))) {}
  Acc* data() { return x_.get(); }
  static std::size_t whole(std::size_t count) { return hwy::RoundUpTo(count, hn::Lanes(Tag<Acc>())); }
  /// From row to row: close together, and a vector more, as rows a power of two apart would share cache sets.
  static std::size_t stride(std::size_t count) { return whole(count) + hn::Lanes(Tag<Acc>()); }
  /// Sets what lies behind `count` up to a whole vector.
  static void pad(Acc* row, std::size_t count, Acc rest) { std::fill(row + count, row + whole(count), rest); }

 private:
  hwy::AlignedFreeUniquePtr<Acc[]> x_;
};

template <typename Acc>
void apply(const Dense& mask, const Row& row, Blocks blocks, const BlockLayout::Sizes& s, Scratch<Acc>& extra, Acc* x) {
  if (mask.data == nullptr) {
    return;
  }
  const Tag<Acc> d;
  const std::size_t count = blocks.size() * static_cast<std::size_t>(s.block_cols);
  Acc* const m = extra.data();
  gather(mask, row, blocks, s, m);
  const auto gone = hn::Set(d, -std::numeric_limits<Acc>::infinity());
  for (std::size_t n = 0; n < Scratch<Acc>::whole(count); n += hn::Lanes(d)) {
    const auto v = hn::LoadU(d, x + n), e = hn::LoadU(d, m + n);
    const auto masked = mask.mode == MaskMode::add ? hn::Add(v, e) : hn::IfThenElse(hn::Eq(e, hn::Zero(d)), gone, v);
    hn::StoreU(masked, d, x + n);
  }
}

/// The softmax of factor·x, factor > 0, in place over whole vectors; a row with nothing left becomes zeros.
/// Differences come first: a large factor times x would overflow.
template <typename Acc>
void softmax_row(Acc* x, std::size_t count, Acc factor) {
  const Tag<Acc> d;
  constexpr Acc kNone = -std::numeric_limits<Acc>::infinity();
  auto tops = hn::Set(d, kNone);
  for (std::size_t n = 0; n < count; n += hn::Lanes(d)) {
    const auto v = hn::LoadU(d, x + n);
    tops = hn::IfThenElse(hn::Gt(v, tops), v, tops);  // NaN is never greater
  }
  const Acc highest = hn::GetLane(hn::MaxOfLanes(d, tops));
  // A row of −inf alone must not subtract it from itself; NaN still shows through the sum.
  const auto top = hn::Set(d, highest == kNone ? Acc{0} : highest), times = hn::Set(d, factor);
  auto sums = hn::Zero(d);
  for (std::size_t n = 0; n < count; n += hn::Lanes(d)) {
    const auto v = hn::Mul(hn::Sub(hn::LoadU(d, x + n), top), times);
    const auto e = hn::IfThenElse(hn::IsNaN(v), v, hn::Exp(d, v));  // Exp alone makes NaN a zero
    sums = hn::Add(sums, e);
    hn::StoreU(e, d, x + n);
  }
  const Acc sum = hn::GetLane(hn::SumOfLanes(d, sums));
  const auto share = hn::Set(d, sum == Acc{0} ? Acc{0} : Acc{1} / sum);
  for (std::size_t n = 0; n < count; n += hn::Lanes(d)) {
    hn::StoreU(hn::Mul(hn::LoadU(d, x + n), share), d, x + n);
  }
}

/// The row in `x`, gathered, becomes its softmax.
template <typename Acc>
void forward_row(const Problem& p, const Row& row, Blocks blocks, Acc* x, Scratch<Acc>& extra) {
  const Tag<Acc> d;
  const auto& s = p.layout->sizes();
  const std::size_t count = blocks.size() * static_cast<std::size_t>(s.block_cols);
  const std::size_t whole = Scratch<Acc>::whole(count);
  // Where nothing is added the size of the scale comes last, and only its sign now.
  const bool plain = p.rpe.data == nullptr && p.attn.data == nullptr && p.key_padding.data == nullptr && p.scale != 0;
  const auto factor = static_cast<Acc>(plain ? std::abs(p.scale) : 1);
  const auto scale = hn::Set(d, static_cast<Acc>(p.scale) / factor);
  for (std::size_t n = 0; n < whole; n += hn::Lanes(d)) {
    hn::StoreU(hn::Mul(hn::LoadU(d, x + n), scale), d, x + n);
  }
  apply(p.rpe, row, blocks, s, extra, x);
  // What takes entries out comes last, so that nothing added there counts.
  const bool key_last = p.key_padding.mode == MaskMode::mul;
  apply(key_last ? p.attn : p.key_padding, row, blocks, s, extra, x);
  apply(key_last ? p.key_padding : p.attn, row, blocks, s, extra, x);
  Scratch<Acc>::pad(x, count, -std::numeric_limits<Acc>::infinity());
  softmax_row(x, whole, factor);
}

template <typename Acc>
void forward_lines(const Problem& p, std::int64_t begin, std::int64_t end) {
  const auto& s = p.layout->sizes();
  const std::int64_t lines = s.heads * s.rows;
  const std::int64_t most = rows_at_once(s);
  Scratch<Acc> scratch(s, most), extra(s);
  for (std::int64_t n = begin; n < end; ++n) {
    const std::int64_t line = n % lines;
    const Blocks blocks = p.layout->by_row().line(line);
    const std::size_t stride = Scratch<Acc>::stride(blocks.size() * static_cast<std::size_t>(s.block_cols));
    Row row{n / lines, line / s.rows, line % s.rows, 0};
    for (; row.y < s.block_rows && !blocks.empty(); row.y += most) {
      const std::int64_t rows = std::min(most, s.block_rows - row.y);
      gather(p.values, p.dtype, row, rows, blocks, s.block_cols, scratch.data(), stride);
      for (std::int64_t y = 0; y < rows; ++y) {
        Acc* const x = scratch.data() + static_cast<std::size_t>(y) * stride;
        forward_row(p, {row.z, row.h, row.i, row.y + y}, blocks, x, extra);
      }
      scatter(scratch.data(), stride, p.out, p.dtype, row, rows, blocks, s.block_cols);
    }
  }
}

/// Scratch of one thread: rows of out, of d_out (then of d), and of d_rpe.
template <typename Acc>
struct BackwardScratch {
  explicit BackwardScratch(const BlockLayout::Sizes& s)
      : out(s, rows_at_once(s)), d(s, rows_at_once(s)), rpe(s, rows_at_once(s)) {}
  Scratch<Acc> out, d, rpe;
};

template <typename Acc>
Acc* rpe_row(BackwardScratch<Acc>& scratch, const BlockLayout::Sizes& s, std::int64_t y) {
  return scratch.rpe.data() +
         static_cast<std::size_t>(y) * Scratch<Acc>::stride(static_cast<std::size_t>(s.cols * s.block_cols));
}

/// d = out·(d_out − Σ out·d_out), in place of d_out. Where nothing came out nothing counts, NaN upstream included.
template <typename Acc>
void gradient_row(const Acc* out, Acc* d_out, std::size_t count) {
  const Tag<Acc> d;
  auto sums = hn::Zero(d);
  for (std::size_t n = 0; n < count; n += hn::Lanes(d)) {
    const auto o = hn::LoadU(d, out + n), g = hn::LoadU(d, d_out + n);
    sums = hn::Add(sums, hn::IfThenElseZero(hn::Ne(o, hn::Zero(d)), hn::Mul(o, g)));
  }
  const auto dot = hn::Set(d, hn::GetLane(hn::SumOfLanes(d, sums)));
  for (std::size_t n = 0; n < count; n += hn::Lanes(d)) {
    const auto o = hn::LoadU(d, out + n), g = hn::LoadU(d, d_out + n);
    hn::StoreU(hn::IfThenElseZero(hn::Ne(o, hn::Zero(d)), hn::Mul(o, hn::Sub(g, dot))), d, d_out + n);
  }
}

/// Adds a row's d into the row of d_rpe that it belongs to.
template <typename Acc>
void add_to_rpe(const Acc* d, Blocks blocks, std::int64_t width, bool one_column, Acc* rpe) {
  for (const auto& entry : blocks) {
    Acc* const to = rpe + (one_column ? 0 : entry.other * width);
    for (std::int64_t k = 0; k < width; ++k) {
      to[one_column ? 0 : k] += *d++;
    }
  }
}

/// Writes d_values of `rows` rows and adds their d into d_rpe's, each into its own or all into the first.
template <typename Acc>
void backward_rows(const BackwardProblem& p, const Row& row, std::int64_t rows, bool one_row,
                   BackwardScratch<Acc>& scratch) {
  const Tag<Acc> tag;
  const auto& s = p.layout->sizes();
  const Blocks blocks = p.layout->by_row().line(row.h * s.rows + row.i);
  const std::size_t count = blocks.size() * static_cast<std::size_t>(s.block_cols);
  const std::size_t stride = Scratch<Acc>::stride(count);
  gather(p.out, p.dtype, row, rows, blocks, s.block_cols, scratch.out.data(), stride);
  gather(p.d_out, p.dtype, row, rows, blocks, s.block_cols, scratch.d.data(), stride);
  const auto scale = hn::Set(tag, static_cast<Acc>(p.scale));
  for (std::int64_t y = 0; y < rows; ++y) {
    Acc* const out = scratch.out.data() + static_cast<std::size_t>(y) * stride;
    Acc* const d = scratch.d.data() + static_cast<std::size_t>(y) * stride;
    Scratch<Acc>::pad(out, count, Acc{0});
    gradient_row(out, d, Scratch<Acc>::whole(count));
    if (p.d_rpe.data != nullptr) {
      add_to_rpe(d, blocks, s.block_cols, p.rpe_sizes.cols == 1, rpe_row(scratch, s, one_row ? 0 : y));
    }
    for (std::size_t n = 0; n < count; n += hn::Lanes(tag)) {
      hn::StoreU(hn::Mul(hn::LoadU(tag, d + n), scale), tag, d + n);
    }
  }
  scatter(scratch.d.data(), stride, p.d_values, p.dtype, row, rows, blocks, s.block_cols);
}

/// One group of rows: all that sum into the same rows of d_rpe, in a fixed order.
template <typename Acc>
void backward_group(const BackwardProblem& p, const Groups& all, std::int64_t group, BackwardScratch<Acc>& scratch) {
  const auto& s = p.layout->sizes();
  const Row first{group / (all.h * all.i), group / all.i % all.h, group % all.i, 0};
  const auto [z0, z1] = covered(first.z, all.z, p.batch);
  const auto [h0, h1] = covered(first.h, all.h, s.heads);
  const auto [i0, i1] = covered(first.i, all.i, s.rows);
  const bool rpe = p.d_rpe.data != nullptr, one_row = rpe && p.rpe_sizes.rows == 1;
  const auto clear = [&](std::int64_t rows) { std::fill(rpe_row(scratch, s, 0), rpe_row(scratch, s, rows), Acc{0}); };
  const auto write = [&](std::int64_t y, std::int64_t rows) {
    for (std::int64_t k = 0; k < rows; ++k) {
      narrow(rpe_row(scratch, s, k), p.rpe_sizes.cols, p.d_rpe.data, p.d_rpe.dtype,
             start(p.d_rpe, {first.z, first.h, first.i, y + k}, s, 0), p.d_rpe.col);
    }
  };
  if (one_row) {
    clear(1);
  }
  const std::int64_t most = rows_at_once(s);
  for (std::int64_t y = 0; y < s.block_rows; y += most) {
    const std::int64_t rows = std::min(most, s.block_rows - y);
    if (rpe && !one_row) {
      clear(rows);
    }
    for (std::int64_t z = z0; z < z1; ++z) {
      for (std::int64_t h = h0; h < h1; ++h) {
        for (std::int64_t i = i0; i < i1; ++i) {
          backward_rows(p, {z, h, i, y}, rows, one_row, scratch);
        }
      }
    }
    if (rpe && !one_row) {
      write(y, rows);
    }
  }
  if (one_row) {
    write(0, 1);
  }
}

template <typename Acc>
void backward_groups(const BackwardProblem& p, const Groups& all, std::int64_t begin, std::int64_t end) {
  BackwardScratch<Acc> scratch(p.layout->sizes());
  for (std::int64_t group = begin; group < end; ++group) {
    backward_group(p, all, group, scratch);
  }
}

void forward_any(const Problem& problem, Context& context) {
  const auto& s = problem.layout->sizes();
  const std::int64_t tasks = problem.batch * s.heads * s.rows;
  const auto body = [&](std::int64_t begin, std::int64_t end) {
    problem.dtype == DType::f64 ? forward_lines<double>(problem, begin, end)
                                : forward_lines<float>(problem, begin, end);
  };
  context.executor->parallel_for(tasks, grain(*problem.layout, tasks, problem.batch), body);
}

void backward_any(const BackwardProblem& problem, Context& context) {
  const Groups all = groups(problem);
  const std::int64_t tasks = all.z * all.h * all.i;
  const auto body = [&](std::int64_t begin, std::int64_t end) {
    problem.dtype == DType::f64 ? backward_groups<double>(problem, all, begin, end)
                                : backward_groups<float>(problem, all, begin, end);
  };
  context.executor->parallel_for(tasks, grain(*problem.layout, tasks, problem.batch), body);
}

}  // namespace fretwork::block_softmax_op::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fretwork::block_softmax_op {

HWY_EXPORT(forward_any);
HWY_EXPORT(backward_any);

namespace cpu {

void forward(const Problem& problem, Context& context) { HWY_DYNAMIC_DISPATCH(forward_any)(problem, context); }

void backward(const BackwardProblem& problem, Context& context) {
  HWY_DYNAMIC_DISPATCH(backward_any)(problem, context);
}

}  // namespace cpu

}  // namespace fretwork::block_softmax_op
#endif
