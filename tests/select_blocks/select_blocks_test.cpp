// The selection of key blocks on the CPU against a sort of scores in float64, with inputs and results of any strides.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

#include "fretwork/fretwork.h"
#include "support/error_text.h"
#include "support/tensor.h"

namespace fretwork {
namespace {

using Index = std::int64_t;

struct Case {
  DType dtype = DType::f32;
  Index batch = 2, heads = 4, kv_heads = 2, rows = 200, cols = 200, depth = 12, top_k = 4;
  SelectOptions options{};
  MemoryLayout layout{};
};

double dot_of_means(const Case& c, const Tensor& q, const Tensor& k, Index b, Index h, Index r, Index j) {
  const Index group = c.heads / c.kv_heads, q_end = std::min((r + 1) * c.options.block_q, c.rows);
  const Index k_end = std::min((j + 1) * c.options.block_k, c.cols);
  double score = 0;
  for (Index d = 0; d < c.depth; ++d) {
    double x = 0, y = 0;
    for (Index g = 0; g < group; ++g) {
      for (Index i = r * c.options.block_q; i < q_end; ++i) {
        x += q.get({b, h * group + g, i, d});
      }
    }
    for (Index i = j * c.options.block_k; i < k_end; ++i) {
      y += k.get({b, h, i, d});
    }
    score += x / static_cast<double>(group * (q_end - r * c.options.block_q)) * y /
             static_cast<double>(k_end - j * c.options.block_k);
  }
  return score;
}

/// Integers, so that every score is exact where the numbers of rows are powers of two; then ties count, too.
void check(const Case& c) {
  std::mt19937 engine(static_cast<unsigned>(c.rows + 3 * c.cols + c.top_k));
  Tensor q(c.dtype, {c.batch, c.heads, c.rows, c.depth}, c.layout),
      k(c.dtype, {c.batch, c.kv_heads, c.cols, c.depth}, c.layout);
  q.randomise(engine, std::uniform_int_distribution<int>(-1, 1));
  k.randomise(engine, std::uniform_int_distribution<int>(-1, 1));
  const Index row_blocks = (c.rows + c.options.block_q - 1) / c.options.block_q;
  const Index col_blocks = (c.cols + c.options.block_k - 1) / c.options.block_k;
  Tensor counts(DType::i32, {c.batch, c.kv_heads, row_blocks}, c.layout),
      indices(DType::i32, {c.batch, c.kv_heads, row_blocks, c.top_k}, c.layout);
  Context context = Context::cpu();
  select_blocks(q.view, k.view, c.top_k, counts.view, indices.view, context, c.options);
  EXPECT_TRUE(counts.intact_around() && indices.intact_around());
  counts.each([&](const std::vector<Index>& at) {
    const Index r = at[2];
    const Index position = std::min((r + 1) * c.options.block_q, c.rows) - 1 + c.cols - c.rows;
    const auto own =
        static_cast<Index>(std::floor(static_cast<double>(position) / static_cast<double>(c.options.block_k)));
    struct Candidate {
      bool must;
      double score;
      Index index;
    };
    std::vector<Candidate> all;
    for (Index j = 0; j < col_blocks; ++j) {
      if (!c.options.causal || j <= own) {
        const bool must = j < c.options.first || (j > own - c.options.last && j <= own);
        all.push_back({must, dot_of_means(c, q, k, at[0], at[1], r, j), j});
      }
    }
    std::ranges::stable_sort(all, [](const Candidate& a, const Candidate& b) {
      return a.must != b.must ? a.must : !a.must && a.score > b.score;
    });
    all.resize(std::min(all.size(), static_cast<std::size_t>(c.top_k)));
    std::ranges::sort(all, {}, &Candidate::index);
    ASSERT_EQ(counts.get(at), static_cast<double>(all.size()));
    for (Index n = 0; n < c.top_k; ++n) {
      const double want = n < std::ssize(all) ? static_cast<double>(all[static_cast<std::size_t>(n)].index) : -1;
      ASSERT_EQ(indices.get({at[0], at[1], r, n}), want) << "row " << r << ", entry " << n;
    }
  });
}

TEST(SelectBlocks, OfEveryType) {
  for (const DType dtype : {DType::f64, DType::f32, DType::f16, DType::bf16}) {
    check({.dtype = dtype, .rows = 256, .cols = 256, .options = {.block_q = 16, .block_k = 16}});
  }
}

TEST(SelectBlocks, OfEveryForm) {
  check({.rows = 64, .cols = 512, .options = {.block_q = 16, .block_k = 32}});
  check({.rows = 512, .cols = 64, .options = {.block_q = 64, .block_k = 16}});
  check({.rows = 512, .cols = 64, .top_k = 2, .options = {.block_q = 64, .block_k = 16, .causal = false}});
  check({.rows = 256, .cols = 256, .top_k = 6, .options = {.block_q = 16, .block_k = 16, .first = 2, .last = 3}});
  check({.rows = 256,
         .cols = 256,
         .top_k = 3,
         .options = {.block_q = 16, .block_k = 16, .causal = false, .first = 0, .last = 0}});
  check({.rows = 128, .cols = 128, .top_k = 100, .options = {.block_q = 16, .block_k = 32}});
  check({.rows = 1, .cols = 512, .options = {.block_q = 128, .block_k = 64}});
}

TEST(SelectBlocks, OnViews) {
  check({.rows = 128, .cols = 256, .options = {.block_q = 16, .block_k = 16}, .layout = {.step = 2, .gap = 3}});
  check({.rows = 128, .cols = 256, .options = {.block_q = 16, .block_k = 16}, .layout = {.gap = 1, .backwards = 5}});
}

TEST(SelectBlocks, BadCallsAreRefused) {
  Context context = Context::cpu();
  Tensor q(DType::f32, {1, 2, 64, 8}), k(DType::f32, {1, 2, 64, 8}), counts(DType::i32, {1, 2, 4}),
      indices(DType::i32, {1, 2, 4, 3}), other(DType::f32, {1, 2, 4});
  const auto call = [&](Index top_k, const SelectOptions& options, const Tensor& to) {
    return error_of([&] { select_blocks(q.view, k.view, top_k, to.view, indices.view, context, options); });
  };
  EXPECT_EQ(call(3, {.block_q = 16, .block_k = 16}, counts), "no error");
  EXPECT_EQ(call(3, {.block_q = 24}, counts), "select_blocks: block: expected 16, 32, 64 or 128, got 24");
  EXPECT_EQ(call(3, {.block_q = 16, .first = 3}, counts),
            "select_blocks: top_k: expected at least first + last, 3 + 1, got 3");
  EXPECT_EQ(call(3, {.block_q = 16}, other), "select_blocks: counts: expected int32, got float32");
  EXPECT_EQ(call(4, {.block_q = 16}, counts), "select_blocks: indices: expected shape (1, 2, 4, 4), got (1, 2, 4, 3)");
}

}  // namespace
}  // namespace fretwork
