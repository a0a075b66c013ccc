// dsd and dds in small tiles on a GPU, each tile against float64 on the host. Skipped where there is no GPU.
#include <gtest/gtest.h>

#include <array>
#include <iterator>
#include <random>
#include <string>
#include <tuple>

#include "ops/block_matmul/cuda/families.h"
#include "ops/block_matmul/cuda/params.h"
#include "support/device_tensor.h"
#include "support/gpu_fixture.h"
#include "support/reference.h"
#include "support/seed.h"

namespace fretwork::block_matmul {
namespace {

struct Case {
  BlockLayout::Sizes sizes{1, 3, 5, 64, 64};
  double density = 0.5;
  std::int64_t free = 37;
  DType dtype = DType::f16;
  bool transposed = false;     ///< op(S) = Sᵀ
  bool turned_blocks = false;  ///< blocks lie column by column
  bool dense_k = false;        ///< K is the dense operand's contiguous axis
  bool out_rows = false;       ///< rows are the result's
  std::int64_t gap = 0;        ///< between lines of dense operand and result
  std::int64_t z = 1, h = 1;
};

std::string text(const Case& c) {
  const auto& s = c.sizes;
  return testing::PrintToString(
             std::tuple(s.heads, s.rows, s.cols, s.block_rows, s.block_cols, c.density, c.free, name_of(c.dtype))) +
         testing::PrintToString(std::tuple(c.transposed, c.turned_blocks, c.dense_k, c.out_rows, c.gap, c.z, c.h));
}

class SmallTiles : public GpuTest {};

/// (z, h, rows, cols), with a gap behind each line; `turned`: columns are the lines.
MirroredTensor matrix(const Case& c, std::int64_t rows, std::int64_t cols, bool turned) {
  const std::int64_t line = (turned ? rows : cols) + c.gap, size = line * (turned ? cols : rows);
  return {c.dtype, std::array{c.z, c.h, rows, cols},
          std::array{c.h * size, size, turned ? std::int64_t{1} : line, turned ? line : std::int64_t{1}}, 256};
}
Matrix matrix_of(const TensorView& t) {
  return {t.data, t.sizes[2], t.sizes[3], t.strides[2], t.strides[3], t.strides[0], t.strides[1]};
}

constexpr int kAll = std::size(kSmallTiles);

/// Runs a problem with each tile that takes it; how many do.
int check(const Case& c) {
  SCOPED_TRACE(text(c));
  std::mt19937_64 random(fresh_seed());
  const auto layout = random_blocks(c.sizes, c.density, random());
  const auto& s = c.sizes;
  const std::int64_t height = s.rows * s.block_rows, width = s.cols * s.block_cols;
  const std::int64_t rows = c.transposed ? width : height, depth = c.transposed ? height : width;
  const std::int64_t block = s.block_rows * s.block_cols;
  MirroredTensor values(c.dtype, std::array{c.z, layout->nnz(), s.block_rows, s.block_cols},
                        std::array{layout->nnz() * block, block, c.turned_blocks ? std::int64_t{1} : s.block_cols,
                                   c.turned_blocks ? s.block_rows : std::int64_t{1}},
                        256);
  MirroredTensor dense = matrix(c, depth, c.free, c.dense_k), out = matrix(c, rows, c.free, c.out_rows);
  std::normal_distribution<double> normal;
  values.randomise(random, normal);
  dense.randomise(random, normal);
  out.poison();
  const TensorView& v = values.upload();
  Problem problem;
  problem.dtype = c.dtype;
  problem.layout = layout.get();
  problem.transposed = c.transposed;
  problem.z_out = c.z;
  problem.h_out = c.h;
  problem.sparse = {v.data, v.strides[0], v.strides[1], v.strides[2], v.strides[3]};
  problem.right = matrix_of(dense.upload());

  const auto place = packed_blocks(*layout);
  const auto expected = [&](std::int64_t z, std::int64_t h, std::int64_t i, std::int64_t j) {
    ReferenceSum sum;
    for (std::int64_t k = 0; k < depth; ++k) {
      const std::int64_t row = c.transposed ? k : i, col = c.transposed ? i : k;
      const std::int64_t at = ((s.heads == 1 ? 0 : h) * s.rows + row / s.block_rows) * s.cols + col / s.block_cols;
      if (const std::int64_t n = place[static_cast<std::size_t>(at)]; n >= 0) {
        sum.add(values.get({z, n, row % s.block_rows, col % s.block_cols}) * dense.get({z, h, k, j}));
      }
    }
    return sum;
  };
  Context context = Context::cuda(0);
  int ran = 0;
  problem.out = matrix_of(out.upload());  // candidates() looks at it
  for (const auto& [tile, microseconds] : small::candidates(problem, context)) {
    SCOPED_TRACE(tile);
    EXPECT_GT(microseconds, 0);
    out.poison();
    problem.out = matrix_of(out.upload());
    small::launch(problem, context, tile);
    out.download();
    const auto first = out.storage();
    EXPECT_TRUE(out.intact_around()) << "bytes written outside the result";
    int wrong = 0;
    out.each([&](const std::vector<std::int64_t>& index) {
      const ReferenceSum sum = expected(index[0], index[1], index[2], index[3]);
      const double got = out.get(index);
      if (!sum.accepts(got, c.dtype) && wrong++ == 0) {
        ADD_FAILURE() << "got " << got << ", expected " << sum.value << " at " << testing::PrintToString(index);
      }
    });
    small::launch(problem, context, tile);
    out.download();
    EXPECT_EQ(first, out.storage()) << "two runs differ";
    ++ran;
  }
  return ran;
}

TEST_F(SmallTiles, Columns) {
  for (const std::int64_t free : {1, 2, 4, 7, 8, 16, 17, 28, 40, 64, 65, 128, 130, 133, 196, 200}) {
    EXPECT_EQ(check({.free = free}), kAll);
    EXPECT_EQ(check({.free = free, .dense_k = true, .out_rows = true}), kAll);
  }
}

TEST_F(SmallTiles, Blocks) {
  for (const auto& [rows, cols] : {std::pair{16, 16}, {32, 32}, {48, 48}, {128, 128}, {16, 80}, {96, 16}, {64, 32}}) {
    for (const bool transposed : {false, true}) {
      for (const bool turned : {false, true}) {
        const BlockLayout::Sizes sizes{1, 4, 6, rows, cols};
        EXPECT_GT(check({.sizes = sizes, .free = 24, .transposed = transposed, .turned_blocks = turned}), 0);
        EXPECT_GT(check({.sizes = sizes, .free = 21, .transposed = transposed, .turned_blocks = turned}), 0);
      }
    }
  }
}

TEST_F(SmallTiles, BatchesAndHeads) {
  for (const std::int64_t heads : {1, 3}) {
    for (const std::int64_t free : {16, 31}) {
      EXPECT_GT(check({.sizes = {heads, 3, 4, 32, 32}, .free = free, .gap = 8, .z = 2, .h = 3}), 0);
      EXPECT_GT(
          check({.sizes = {heads, 3, 4, 32, 32}, .free = free, .dtype = DType::bf16, .dense_k = true, .z = 2, .h = 3}),
          0);
    }
  }
}

/// Lines that begin anywhere, results too.
TEST_F(SmallTiles, Gaps) {
  for (const std::int64_t gap : {1, 2, 3, 4, 8}) {
    EXPECT_EQ(check({.free = 40, .gap = gap}), kAll);
    EXPECT_EQ(check({.free = 40, .out_rows = true, .gap = gap}), kAll);
  }
  // Lines at multiples of 16, 8 and 4 bytes that end within 16, 8 or 4.
  for (const auto& [free, gap] : {std::pair{37, 3}, {37, 7}, {37, 1}, {38, 6}, {38, 4}}) {
    EXPECT_EQ(check({.free = free, .gap = gap}), kAll);
  }
}

TEST_F(SmallTiles, FewAndManyBlocks) {
  EXPECT_EQ(check({.sizes = {1, 4, 4, 64, 64}, .density = 0.05}), kAll);  // rows without blocks are zeros
  EXPECT_EQ(check({.sizes = {1, 1, 40, 64, 64}, .density = 0.9, .free = 20}), kAll);
  EXPECT_GT(check({.sizes = {1, 2, 70, 16, 16}, .density = 0.9, .free = 20}), 0);
}

}  // namespace
}  // namespace fretwork::block_matmul
