// SPLAT's operators on the CPU: rows of scores and of operands are widened to fp32 (fp64 for float64) once, then worked
// on with vectors. One source for every instruction set; the best is chosen once per call.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/regular/cpu/run.cpp"
#include <hwy/foreach_target.h>  // compiles what follows once per instruction set
//
#include <hwy/aligned_allocator.h>
#include <hwy/contrib/math/math-inl.h>
#include <hwy/highway.h>

#include <algorithm>
#include <limits>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include "core/half.h"
#include "ops/regular/problem.h"

#ifndef FRETWORK_OPS_REGULAR_CPU  // what needs no vectors, once
#define FRETWORK_OPS_REGULAR_CPU
namespace fretwork::regular_op {
namespace {

/// Reads elements of `dtype` as Acc: calls f with a function from an index.
template <typename Acc, typename F>
void with_reader(const void* data, DType dtype, const F& f) {
  switch (dtype) {
    case DType::f64:
      return f([p = static_cast<const double*>(data)](std::int64_t at) { return static_cast<Acc>(p[at]); });
    case DType::f32:
      return f([p = static_cast<const float*>(data)](std::int64_t at) { return static_cast<Acc>(p[at]); });
    case DType::f16:
      return f([p = static_cast<const std::uint16_t*>(data)](std::int64_t at) {
        return static_cast<Acc>(float_from_f16(p[at]));
      });
    default:
      return f([p = static_cast<const std::uint16_t*>(data)](std::int64_t at) {
        return static_cast<Acc>(float_from_bf16(p[at]));
      });
  }
}

template <typename Acc>
void widen(const void* data, DType dtype, std::int64_t at, std::int64_t step, std::int64_t count, Acc* to) {
  with_reader<Acc>(data, dtype, [&](const auto& read) {
    for (std::int64_t n = 0; n < count; ++n) {
      to[n] = read(at + n * step);
    }
  });
}

template <typename Acc>
void narrow(const Acc* from, std::int64_t count, void* data, DType dtype, std::int64_t at, std::int64_t step) {
  const auto each = [&](auto* to, const auto& rounded) {
    for (std::int64_t n = 0; n < count; ++n) {
      to[at + n * step] = rounded(from[n]);
    }
  };
  switch (dtype) {
    case DType::f64:
      return each(static_cast<double*>(data), [](Acc x) { return static_cast<double>(x); });
    case DType::f32:
      return each(static_cast<float*>(data), [](Acc x) { return static_cast<float>(x); });
    case DType::f16:
      return each(static_cast<std::uint16_t*>(data), [](Acc x) { return f16_from_float(static_cast<float>(x)); });
    default:
      return each(static_cast<std::uint16_t*>(data), [](Acc x) { return bf16_from_float(static_cast<float>(x)); });
  }
}

std::int64_t start(const Operand& o, std::int64_t batch, std::int64_t head, std::int64_t row) {
  return batch * o.batch + head * o.head + row * o.row;
}

/// Lines that make a piece of work worth a thread.
std::int64_t grain(double work, std::int64_t tasks) {
  const double each = work / static_cast<double>(std::max<std::int64_t>(tasks, 1));
  return std::max<std::int64_t>(1, static_cast<std::int64_t>(32768 / std::max(each, 1.0)));
}

/// A whole operand as Acc with neighbouring columns: itself where it is that already, else a copy.
template <typename Acc>
struct Wide {
  Wide(const Operand& o, DType dtype, std::int64_t batch, std::int64_t heads, std::int64_t rows, std::int64_t cols,
       Context& context)
      : is_copy(dtype != (sizeof(Acc) == 8 ? DType::f64 : DType::f32) || (o.col != 1 && cols > 1)),
        memory(context, is_copy ? static_cast<std::size_t>(batch * heads * rows * cols) * sizeof(Acc) : 0) {
    if (!is_copy) {
      from = o;
      return;
    }
    from = {memory.data(), heads * rows * cols, rows * cols, cols, 1};
    context.executor->parallel_for(
        batch * heads * rows, grain(static_cast<double>(cols), 1), [&](std::int64_t begin, std::int64_t end) {
          for (std::int64_t n = begin; n < end; ++n) {
            const std::int64_t z = n / rows / heads, h = n / rows % heads, r = n % rows;
            widen(o.data, dtype, start(o, z, h, r), o.col, cols, static_cast<Acc*>(memory.data()) + n * cols);
          }
        });
  }
  const Acc* row(std::int64_t batch, std::int64_t head, std::int64_t row) const {
    return static_cast<const Acc*>(from.data) + start(from, batch, head, row);
  }
  bool is_copy;
  Workspace memory;
  Operand from;
};

}  // namespace
}  // namespace fretwork::regular_op
#endif

HWY_BEFORE_NAMESPACE();
namespace fretwork::regular_op::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

template <typename Acc>
using Tag = hn::ScalableTag<Acc>;

constexpr int kAtOnce = 4;  // rows that a pass over an operand takes, as one would wait for memory

/// out[n] = left · right[columns[n]·step]. Lengths are `depth`.
template <typename Acc>
void dots(const Acc* left, const Acc* right, std::int64_t step, std::span<const std::int32_t> columns,
          std::int64_t depth, Acc* out) {
  const Tag<Acc> d;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d)), count = static_cast<std::int64_t>(columns.size());
  for (std::int64_t n = 0; n < count; n += kAtOnce) {
    const Acc* r[kAtOnce];
    for (int u = 0; u < kAtOnce; ++u) {
      r[u] = right + columns[static_cast<std::size_t>(std::min<std::int64_t>(n + u, count - 1))] * step;
    }
    auto s0 = hn::Zero(d), s1 = hn::Zero(d), s2 = hn::Zero(d), s3 = hn::Zero(d);
    std::int64_t e = 0;
    for (; e + lanes <= depth; e += lanes) {
      const auto l = hn::LoadU(d, left + e);
      s0 = hn::MulAdd(l, hn::LoadU(d, r[0] + e), s0);
      s1 = hn::MulAdd(l, hn::LoadU(d, r[1] + e), s1);
      s2 = hn::MulAdd(l, hn::LoadU(d, r[2] + e), s2);
      s3 = hn::MulAdd(l, hn::LoadU(d, r[3] + e), s3);
    }
    Acc sums[kAtOnce] = {hn::GetLane(hn::SumOfLanes(d, s0)), hn::GetLane(hn::SumOfLanes(d, s1)),
                         hn::GetLane(hn::SumOfLanes(d, s2)), hn::GetLane(hn::SumOfLanes(d, s3))};
    for (; e < depth; ++e) {
      for (int u = 0; u < kAtOnce; ++u) {
        sums[u] += left[e] * r[u][e];
      }
    }
    std::copy_n(sums, std::min<std::int64_t>(kAtOnce, count - n), out + n);
  }
}

/// A sum of scaled rows, collected a few at a time.
template <typename Acc>
class RowSum {
 public:
  explicit RowSum(std::int64_t depth) : sums_(static_cast<std::size_t>(depth)) {}

  void clear() { std::fill(sums_.begin(), sums_.end(), Acc{0}); }
  void add(Acc factor, const Acc* row) {
    factors_[held_] = factor;
    rows_[held_++] = row;
    if (held_ == kAtOnce) {
      flush(std::integral_constant<int, kAtOnce>());
    }
  }
  const Acc* finish() {
    const int left = std::exchange(held_, 0);
    for (int u = 0; u < left; ++u) {
      factors_[0] = factors_[u];
      rows_[0] = rows_[u];
      flush(std::integral_constant<int, 1>());
    }
    return sums_.data();
  }

 private:
  template <int kCount>
  void flush(std::integral_constant<int, kCount>) {
    const Tag<Acc> d;
    const std::size_t lanes = hn::Lanes(d), depth = sums_.size();
    std::size_t e = 0;
    for (; e + lanes <= depth; e += lanes) {
      auto sum = hn::LoadU(d, sums_.data() + e);
      for (int u = 0; u < kCount; ++u) {
        sum = hn::MulAdd(hn::Set(d, factors_[u]), hn::LoadU(d, rows_[u] + e), sum);
      }
      hn::StoreU(sum, d, sums_.data() + e);
    }
    for (; e < depth; ++e) {
      for (int u = 0; u < kCount; ++u) {
        sums_[e] += factors_[u] * rows_[u][e];
      }
    }
    held_ = 0;
  }
  std::vector<Acc> sums_;
  Acc factors_[kAtOnce];
  const Acc* rows_[kAtOnce];
  int held_ = 0;
};

/// x[i, t] = by_row[i] · by_col[column].
template <typename Acc>
void values(const Product& p, Context& context) {
  const auto rows = rows_of(*p.pattern);
  const Wide<Acc> left(p.by_row, p.dtype, p.batch, p.heads, p.rows, p.depth, context);
  const Wide<Acc> right(p.by_col, p.dtype, p.batch, p.kv_heads, p.cols, p.depth, context);
  const std::int64_t tasks = p.batch * p.heads * p.rows, group = p.heads / std::max<std::int64_t>(p.kv_heads, 1);
  const double work = static_cast<double>(p.pattern->nnz()) * static_cast<double>(p.batch * p.heads * (p.depth + 4));
  context.executor->parallel_for(tasks, grain(work, tasks), [&](std::int64_t begin, std::int64_t end) {
    std::vector<Acc> found(static_cast<std::size_t>(p.width));
    for (std::int64_t n = begin; n < end; ++n) {
      const std::int64_t z = n / p.rows / p.heads, h = n / p.rows % p.heads, i = n % p.rows;
      dots(left.row(z, h, i), right.row(z, h / group, 0), right.from.row, rows->row(i), p.depth, found.data());
      std::fill(found.begin() + rows->count(i), found.end(), Acc{0});
      narrow(found.data(), p.width, p.values.data, p.dtype, start(p.values, z, h, i), p.values.col);
    }
  });
}

/// by_row[i] = Σ_t x[i, t]·by_col[column].
template <typename Acc>
void by_row(const Product& p, Context& context) {
  const auto rows = rows_of(*p.pattern);
  const Wide<Acc> right(p.by_col, p.dtype, p.batch, p.kv_heads, p.cols, p.depth, context);
  const std::int64_t tasks = p.batch * p.heads * p.rows, group = p.heads / std::max<std::int64_t>(p.kv_heads, 1);
  const double work = static_cast<double>(p.pattern->nnz()) * static_cast<double>(p.batch * p.heads * (p.depth + 4));
  context.executor->parallel_for(tasks, grain(work, tasks), [&](std::int64_t begin, std::int64_t end) {
    std::vector<Acc> x(static_cast<std::size_t>(p.width));
    RowSum<Acc> sum(p.depth);
    for (std::int64_t n = begin; n < end; ++n) {
      const std::int64_t z = n / p.rows / p.heads, h = n / p.rows % p.heads, i = n % p.rows;
      const auto columns = rows->row(i);
      widen(p.values.data, p.dtype, start(p.values, z, h, i), p.values.col, rows->count(i), x.data());
      sum.clear();
      for (std::size_t t = 0; t < columns.size(); ++t) {
        sum.add(x[t], right.row(z, h / group, columns[t]));
      }
      narrow(sum.finish(), p.depth, p.by_row.data, p.dtype, start(p.by_row, z, h, i), p.by_row.col);
    }
  });
}

/// by_col[j] = Σ x[i, t]·by_row[i] over the entries of column j and the heads that share it.
template <typename Acc>
void by_col(const Product& p, Context& context) {
  const auto columns = columns_of(*p.pattern);
  const Wide<Acc> left(p.by_row, p.dtype, p.batch, p.heads, p.rows, p.depth, context);
  const std::int64_t tasks = p.batch * p.kv_heads * p.cols, group = p.heads / std::max<std::int64_t>(p.kv_heads, 1);
  const double work = static_cast<double>(p.pattern->nnz()) * static_cast<double>(p.batch * p.heads * (p.depth + 4));
  with_reader<Acc>(p.values.data, p.dtype, [&](const auto& read) {
    context.executor->parallel_for(tasks, grain(work, tasks), [&](std::int64_t begin, std::int64_t end) {
      RowSum<Acc> sum(p.depth);
      for (std::int64_t n = begin; n < end; ++n) {
        const std::int64_t z = n / p.cols / p.kv_heads, head = n / p.cols % p.kv_heads, j = n % p.cols;
        sum.clear();
        for (std::int64_t h = head * group; h < (head + 1) * group; ++h) {
          for (const Columns::Entry& entry : columns->column(j)) {
            sum.add(read(start(p.values, z, h, entry.row) + entry.place * p.values.col), left.row(z, h, entry.row));
          }
        }
        narrow(sum.finish(), p.depth, p.by_col.data, p.dtype, start(p.by_col, z, head, j), p.by_col.col);
      }
    });
  });
}

/// In place; a row with nothing left becomes zeros.
template <typename Acc>
void softmax_row(Acc* x, std::size_t count, Acc before, Acc after) {
  constexpr Acc kNone = -std::numeric_limits<Acc>::infinity();
  const Tag<Acc> d;
  const std::size_t lanes = hn::Lanes(d);
  Acc top = kNone;
  for (std::size_t n = 0; n < count; ++n) {
    x[n] *= before;
    top = x[n] > top ? x[n] : top;  // NaN is never greater
  }
  // A row of −inf alone must not subtract it from itself; NaN still shows through the sum.
  const auto base = hn::Set(d, top == kNone ? Acc{0} : top), factor = hn::Set(d, after);
  auto sums = hn::Zero(d);
  for (std::size_t n = 0; n < count; n += lanes) {  // the scratch row ends with a whole vector
    const auto there = hn::FirstN(d, count - n);
    const auto v = hn::Mul(factor, hn::Sub(hn::LoadU(d, x + n), base));
    const auto power = hn::IfThenElse(hn::IsNaN(v), v, hn::Exp(d, v));  // Exp alone makes NaN a zero
    const auto e = hn::IfThenElseZero(there, power);
    sums = hn::Add(sums, e);
    hn::StoreU(e, d, x + n);
  }
  const Acc sum = hn::GetLane(hn::SumOfLanes(d, sums));
  const Acc share = sum == Acc{0} ? Acc{0} : Acc{1} / sum;
  for (std::size_t n = 0; n < count; ++n) {
    x[n] *= share;
  }
}

/// d_x = scale·out·(d_out − Σ out·d_out), in place of d_out. Where nothing came out nothing counts.
template <typename Acc>
void gradient_row(const Acc* out, Acc* d_out, std::size_t count, Acc scale) {
  Acc dot = 0;
  for (std::size_t n = 0; n < count; ++n) {
    dot += out[n] != Acc{0} ? out[n] * d_out[n] : Acc{0};
  }
  for (std::size_t n = 0; n < count; ++n) {
    d_out[n] = out[n] != Acc{0} ? scale * (out[n] * (d_out[n] - dot)) : Acc{0};
  }
}

template <typename Acc>
void softmax(const Softmax& s, Context& context) {
  const auto rows = rows_of(*s.pattern);
  constexpr double kLargest = std::numeric_limits<Acc>::max();
  const SplitScale split(s.scale, kLargest);
  const auto before = static_cast<Acc>(split.before), after = static_cast<Acc>(split.after);
  const auto scale = static_cast<Acc>(std::clamp(s.scale, -kLargest, kLargest));
  const std::int64_t tasks = s.batch * s.heads * s.rows;
  const std::size_t width = static_cast<std::size_t>(s.width) + hn::Lanes(Tag<Acc>());
  context.executor->parallel_for(
      tasks, grain(static_cast<double>(s.width) * 8, 1), [&](std::int64_t begin, std::int64_t end) {
        std::vector<Acc> x(width), d(s.d_out.data == nullptr ? 0 : width);
        for (std::int64_t n = begin; n < end; ++n) {
          const std::int64_t z = n / s.rows / s.heads, h = n / s.rows % s.heads, i = n % s.rows;
          const std::int64_t count = rows->count(i);
          widen(s.in.data, s.dtype, start(s.in, z, h, i), s.in.col, count, x.data());
          std::vector<Acc>& result = d.empty() ? x : d;
          if (d.empty()) {
            softmax_row(x.data(), static_cast<std::size_t>(count), before, after);
          } else {
            widen(s.d_out.data, s.dtype, start(s.d_out, z, h, i), s.d_out.col, count, d.data());
            gradient_row(x.data(), d.data(), static_cast<std::size_t>(count), scale);
          }
          std::fill(result.begin() + count, result.begin() + s.width, Acc{0});
          narrow(result.data(), s.width, s.out.data, s.dtype, start(s.out, z, h, i), s.out.col);
        }
      });
}

template <typename Acc>
void product_as(const Product& p, Context& context) {
  p.result == Result::values   ? values<Acc>(p, context)
  : p.result == Result::by_row ? by_row<Acc>(p, context)
                               : by_col<Acc>(p, context);
}

void run_product(const Product& p, Context& context) {
  p.dtype == DType::f64 ? product_as<double>(p, context) : product_as<float>(p, context);
}
void run_softmax(const Softmax& s, Context& context) {
  s.dtype == DType::f64 ? softmax<double>(s, context) : softmax<float>(s, context);
}

}  // namespace fretwork::regular_op::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fretwork::regular_op {

HWY_EXPORT(run_product);
HWY_EXPORT(run_softmax);

namespace cpu {
void run(const Product& product, Context& context) { HWY_DYNAMIC_DISPATCH(run_product)(product, context); }
void run(const Softmax& softmax, Context& context) { HWY_DYNAMIC_DISPATCH(run_softmax)(softmax, context); }
}  // namespace cpu

}  // namespace fretwork::regular_op
#endif
