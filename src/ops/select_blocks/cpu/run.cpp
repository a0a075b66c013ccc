// The selection on the CPU: means of all blocks, then the scores and the best ones of one query block at a time.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <vector>

#include "core/half.h"
#include "ops/select_blocks/problem.h"

namespace fretwork::select_blocks_op::cpu {
namespace {

struct F16 {
  std::uint16_t bits;
};
struct BF16 {
  std::uint16_t bits;
};
float widen(double x) { return static_cast<float>(x); }
float widen(float x) { return x; }
float widen(F16 x) { return float_from_f16(x.bits); }
float widen(BF16 x) { return float_from_bf16(x.bits); }

/// The mean of some heads' rows [begin, end), from `head` on.
template <typename T>
void pool(const Operand& x, std::int64_t batch, std::int64_t head, std::int64_t heads, std::int64_t begin,
          std::int64_t end, std::int64_t depth, float* mean) {
  std::fill_n(mean, depth, 0.0f);
  for (std::int64_t h = head; h < head + heads; ++h) {
    for (std::int64_t row = begin; row < end; ++row) {
      const T* const from = static_cast<const T*>(x.data) + batch * x.batch + h * x.head + row * x.row;
      for (std::int64_t d = 0; d < depth; ++d) {
        mean[d] += widen(from[d * x.col]);
      }
    }
  }
  const auto count = static_cast<float>(heads * (end - begin));
  std::for_each_n(mean, depth, [&](float& sum) { sum /= count; });
}

/// The means of all blocks of one operand: (batch, key head, block, column).
template <typename T>
std::vector<float> means_of(const Problem& p, bool queries, Context& context) {
  const std::int64_t blocks = queries ? p.row_blocks() : p.col_blocks(), side = queries ? p.block_rows : p.block_cols;
  const std::int64_t length = queries ? p.rows : p.cols, heads = queries ? p.group() : 1;
  std::vector<float> means(static_cast<std::size_t>(p.batch * p.kv_heads * blocks * p.depth));
  context.executor->parallel_for(p.batch * p.kv_heads * blocks, 4, [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t n = first; n < last; ++n) {
      const std::int64_t pair = n / blocks, begin = n % blocks * side;
      pool<T>(queries ? p.q : p.k, pair / p.kv_heads, pair % p.kv_heads * heads, heads, begin,
              std::min(begin + side, length), p.depth, means.data() + n * p.depth);
    }
  });
  return means;
}

/// What blocks are compared by: NaN is below all numbers.
float score_of(const float* x, const float* y, std::int64_t depth) {
  const float score = std::inner_product(x, x + depth, y, 0.0f);
  return std::isnan(score) ? -std::numeric_limits<float>::infinity() : score;
}

/// The key blocks that a query block takes, ascending.
std::vector<std::int32_t> select(const Problem& p, const Places& at, const float* query, const float* keys) {
  std::vector<std::int32_t> order(static_cast<std::size_t>(std::max<std::int64_t>(at.may, 0)));
  std::iota(order.begin(), order.end(), 0);
  if (at.may <= p.top_k) {
    return order;
  }
  std::vector<float> scores(order.size());
  for (const std::int32_t j : order) {
    scores[static_cast<std::size_t>(j)] = score_of(query, keys + j * p.depth, p.depth);
  }
  const auto must = [&](std::int32_t j) { return j < at.first || (j >= at.last && j <= at.own); };
  const auto better = [&](std::int32_t a, std::int32_t b) {
    const float x = scores[static_cast<std::size_t>(a)], y = scores[static_cast<std::size_t>(b)];
    return must(a) != must(b) ? must(a) : must(a) || x == y ? a < b : x > y;
  };
  std::nth_element(order.begin(), order.begin() + (p.top_k - 1), order.end(), better);
  order.resize(static_cast<std::size_t>(p.top_k));
  std::ranges::sort(order);
  return order;
}

template <typename T>
void run_as(const Problem& p, Context& context) {
  const std::vector<float> queries = means_of<T>(p, true, context), keys = means_of<T>(p, false, context);
  const std::int64_t blocks = p.row_blocks();
  context.executor->parallel_for(p.batch * p.kv_heads * blocks, 4, [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t n = first; n < last; ++n) {
      const std::int64_t pair = n / blocks, r = n % blocks, batch = pair / p.kv_heads, head = pair % p.kv_heads;
      const std::vector<std::int32_t> taken =
          select(p, p.places(r), queries.data() + n * p.depth, keys.data() + pair * p.col_blocks() * p.depth);
      p.counts.data[batch * p.counts.batch + head * p.counts.head + r * p.counts.row] =
          static_cast<std::int32_t>(taken.size());
      std::int32_t* const to = p.indices.data + batch * p.indices.batch + head * p.indices.head + r * p.indices.row;
      for (std::int64_t i = 0; i < p.top_k; ++i) {
        to[i * p.indices.col] = i < std::ssize(taken) ? taken[static_cast<std::size_t>(i)] : -1;
      }
    }
  });
}

}  // namespace

void run(const Problem& problem, Context& context) {
  switch (problem.dtype) {
    case DType::f64:
      return run_as<double>(problem, context);
    case DType::f32:
      return run_as<float>(problem, context);
    case DType::f16:
      return run_as<F16>(problem, context);
    default:
      return run_as<BF16>(problem, context);
  }
}

}  // namespace fretwork::select_blocks_op::cpu
