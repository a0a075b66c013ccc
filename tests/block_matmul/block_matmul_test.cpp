// sdd, dsd and dds on the CPU against a float64 reference that knows nothing but the layout's mask.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <map>
#include <numeric>
#include <random>
#include <tuple>

#include "blocks/plan.h"
#include "fretwork/fretwork.h"
#include "support/error_text.h"
#include "support/reference.h"
#include "support/seed.h"
#include "support/tensor.h"
#include "support/threads.h"

namespace fretwork {
namespace {

using Index = std::vector<std::int64_t>;
enum class Form { contiguous, turned, backwards, expanded };

/// turned: the last two dimensions swapped, with gaps; backwards: these two, with gaps; expanded: the first of four.
/// Large tensors begin at a cache line, because streaming stores write whole ones.
MemoryLayout layout_of(Form form, DType dtype, const Index& sizes) {
  const std::size_t rank = sizes.size();
  MemoryLayout layout;
  if (form == Form::turned) {
    layout = MemoryLayout::transposed(rank);
    layout.gap = 3;
  } else if (form == Form::backwards) {
    layout.step = 2, layout.gap = 5;
    layout.backwards = 3U << (rank - 2);
  } else if (form == Form::expanded) {
    layout.expanded = rank > 3 ? 1 : 0;
  }
  const std::int64_t count = std::accumulate(sizes.begin(), sizes.end(), std::int64_t{1}, std::multiplies<>());
  layout.alignment = static_cast<std::size_t>(count) * size_of(dtype) > std::size_t{1} << 19 ? 64 : 16;
  return layout;
}

enum class Mode { sdd, dsd, dds };

struct Case {
  Mode mode = Mode::dsd;
  DType dtype = DType::f32;
  BlockLayout::Sizes sizes{1, 3, 4, 16, 16};
  double density = 0.4;
  std::int64_t free = 37;         ///< or K for sdd
  Index left_batch, right_batch;  ///< leading sizes: a or values, b
  MatmulOptions options;
  Form left = Form::contiguous, right = Form::contiguous, out = Form::contiguous;
  double odd_share = 0;  ///< of elements that are NaN or Inf
  int threads = 1;
};

std::string text(const Case& c) {
  const auto& s = c.sizes;
  return testing::PrintToString(std::tuple(static_cast<int>(c.mode), name_of(c.dtype), s.heads, s.rows, s.cols,
                                           s.block_rows, s.block_cols, c.density, c.free)) +
         testing::PrintToString(std::tuple(c.left_batch, c.right_batch, c.options.trans_a, c.options.trans_b,
                                           c.options.sum_z, c.options.sum_h, static_cast<int>(c.left),
                                           static_cast<int>(c.right), static_cast<int>(c.out), c.odd_share, c.threads));
}

/// One call and all that has to hold after it.
class Checker {
 public:
  Checker(const Case& c, std::uint64_t seed) : c_(c), random_(seed), layout_(random_blocks(c.sizes, c.density, seed)) {
    const std::int64_t m = c.sizes.rows * c.sizes.block_rows, n = c.sizes.cols * c.sizes.block_cols;
    const Index packed{layout_->nnz(), c.sizes.block_rows, c.sizes.block_cols};
    const auto [ta, tb, sz, sh] = c.options;
    switch (c.mode) {
      case Mode::sdd:
        left_ = make(c.left_batch, ta ? Index{c.free, m} : Index{m, c.free}, c.left);
        right_ = make(c.right_batch, tb ? Index{n, c.free} : Index{c.free, n}, c.right);
        out_ = make({}, sdd_shape(left_.view, right_.view, layout_, c.options), c.out);
        break;
      case Mode::dsd:
        left_ = make(c.left_batch, packed, c.left);
        right_ = make(c.right_batch, tb ? Index{c.free, ta ? m : n} : Index{ta ? m : n, c.free}, c.right);
        out_ = make({}, dsd_shape(left_.view, right_.view, layout_, c.options), c.out);
        break;
      case Mode::dds:
        left_ = make(c.left_batch, ta ? Index{tb ? n : m, c.free} : Index{c.free, tb ? n : m}, c.left);
        right_ = make(c.right_batch, packed, c.right);
        out_ = make({}, dds_shape(left_.view, right_.view, layout_, c.options), c.out);
        break;
    }
    fill(left_);
    fill(right_);
    run(c.threads);
  }

  void check() {
    EXPECT_TRUE(out_.intact_around()) << "bytes written outside the result";
    c_.mode == Mode::sdd ? check_packed() : check_dense();
    const auto first = out_.storage();
    out_.poison();
    run(c_.threads + 2);
    EXPECT_EQ(first, out_.storage()) << "depends on the number of threads";
  }

 private:
  Tensor make(const Index& batch, const Index& sizes, Form form) const {
    Index all = batch;
    all.insert(all.end(), sizes.begin(), sizes.end());
    return Tensor(c_.dtype, all, layout_of(form, c_.dtype, all));
  }

  void run(int threads) const {
    Threads executor(threads);
    Context context = Context::cpu(executor);
    const auto op = c_.mode == Mode::sdd ? &sdd : c_.mode == Mode::dsd ? &dsd : &dds;
    op(left_.view, right_.view, layout_, out_.view, context, c_.options);
  }

  void fill(Tensor& tensor) {
    std::normal_distribution<double> normal;
    std::uniform_real_distribution<double> share;
    tensor.generate([&] {
      const bool odd = share(random_) < c_.odd_share;
      return odd ? (share(random_) < 0.5 ? NAN : INFINITY) : normal(random_);
    });
  }

  /// Packed place of the block at (h, row, column) in blocks, or −1.
  std::int64_t place(std::int64_t h, std::int64_t row, std::int64_t col) const {
    const auto& s = c_.sizes;
    return place_[static_cast<std::size_t>(((s.heads == 1 ? 0 : h) * s.rows + row) * s.cols + col)];
  }

  std::int64_t batches() const { return std::max(left_.view.size(-4), right_.view.size(-4)) * has_batches(); }
  std::int64_t has_batches() const { return left_.view.size(-4) != 0 && right_.view.size(-4) != 0 ? 1 : 0; }

  void compare(const Index& index, const ReferenceSum& sum) {
    const double got = out_.get(index);
    if (!sum.accepts(got, c_.dtype) && wrong_++ == 0) {
      ADD_FAILURE() << "got " << got << ", expected " << sum.value << " at " << testing::PrintToString(index);
    }
  }

  void check_packed() {
    const auto& s = c_.sizes;
    const std::int64_t heads = std::max({s.heads, left_.view.size(-3), right_.view.size(-3)});
    out_.each([&](const Index& index) {
      const std::int64_t z_out = index.size() == 4 ? index[0] : 0, block = index[index.size() - 3];
      const std::int64_t y = index[index.size() - 2], x = index[index.size() - 1];
      const auto found = std::find(place_.begin(), place_.end(), block) - place_.begin();
      const std::int64_t own = found / (s.rows * s.cols), row = found / s.cols % s.rows, col = found % s.cols;
      ReferenceSum sum;
      for (std::int64_t z = 0; z < batches(); ++z) {
        for (std::int64_t h = 0; h < heads; ++h) {
          if ((!c_.options.sum_z && z != z_out) || (!c_.options.sum_h && h != own)) {
            continue;
          }
          for (std::int64_t k = 0; k < c_.free; ++k) {
            const std::int64_t i = row * s.block_rows + y, j = col * s.block_cols + x;
            const bool ta = c_.options.trans_a, tb = c_.options.trans_b;
            sum.add(left_.broadcast({z, h, ta ? k : i, ta ? i : k}) * right_.broadcast({z, h, tb ? j : k, tb ? k : j}));
          }
        }
      }
      compare(index, sum);
    });
  }

  /// Entry (i, k) of op(S) if it is there.
  bool sparse(std::int64_t z, std::int64_t h, std::int64_t i, std::int64_t k, bool transposed, const Tensor& values,
              double& value) const {
    const auto& s = c_.sizes;
    const std::int64_t row = transposed ? k : i, col = transposed ? i : k;
    const std::int64_t block = place(h, row / s.block_rows, col / s.block_cols);
    value = block < 0 ? 0 : values.broadcast({z, block, row % s.block_rows, col % s.block_cols});
    return block >= 0;
  }

  void check_dense() {
    const bool first = c_.mode == Mode::dsd;
    const bool ta = c_.options.trans_a, tb = c_.options.trans_b, turned = first ? ta : tb;
    const Tensor& dense = first ? right_ : left_;
    const Tensor& values = first ? left_ : right_;
    const auto& s = c_.sizes;
    const std::int64_t height = s.rows * s.block_rows, width = s.cols * s.block_cols;
    const std::int64_t depth = turned == first ? height : width;
    const std::int64_t heads = s.heads == 1 ? dense.view.size(-3) : s.heads;
    out_.each([&](const Index& index) {
      const std::int64_t i = index[index.size() - 2], j = index[index.size() - 1];
      const std::int64_t h_out = index.size() > 2 ? index[index.size() - 3] : 0;
      const std::int64_t z_out = index.size() > 3 ? index[0] : 0;
      ReferenceSum sum;
      for (std::int64_t z = 0; z < batches(); ++z) {
        for (std::int64_t h = 0; h < heads; ++h) {
          if ((!c_.options.sum_z && z != z_out) || (!c_.options.sum_h && h != h_out)) {
            continue;
          }
          for (std::int64_t k = 0; k < depth; ++k) {
            double value = 0;
            if (first && sparse(z, h, i, k, ta, values, value)) {
              sum.add(value * dense.broadcast({z, h, tb ? j : k, tb ? k : j}));
            } else if (!first && sparse(z, h, k, j, tb, values, value)) {
              sum.add(dense.broadcast({z, h, ta ? k : i, ta ? i : k}) * value);
            }
          }
        }
      }
      compare(index, sum);
    });
  }

  Case c_;
  std::mt19937_64 random_;
  std::shared_ptr<const BlockLayout> layout_;
  Tensor left_, right_, out_;
  std::vector<std::int64_t> place_ = packed_blocks(*layout_);
  std::int64_t wrong_ = 0;
};

constexpr DType kTypes[] = {DType::f64, DType::f32, DType::f16, DType::bf16};
constexpr Mode kModes[] = {Mode::sdd, Mode::dsd, Mode::dds};

class BlockMatmul : public testing::TestWithParam<std::tuple<Mode, DType>> {
 protected:
  void check(Case c) {
    std::tie(c.mode, c.dtype) = GetParam();
    SCOPED_TRACE(text(c));
    Checker(c, fresh_seed() + count_++).check();
  }
  bool is_sdd() const { return std::get<0>(GetParam()) == Mode::sdd; }
  std::uint64_t count_ = 0;
};

TEST_P(BlockMatmul, EveryTransposeOfEveryBlock) {
  const std::pair<std::int64_t, std::int64_t> blocks[] = {{8, 8},     {16, 16}, {24, 24}, {32, 32}, {64, 64},
                                                          {128, 128}, {16, 32}, {64, 8},  {13, 21}};
  for (const auto& [rows, cols] : blocks) {
    for (const int transposes : {0, 1, 2, 3}) {
      Case c;
      c.sizes = {1, 2, 3, rows, cols};
      c.free = 5 + 16 * transposes;
      c.density = 0.6;
      c.options = {(transposes & 1) != 0, (transposes & 2) != 0, false, false};
      check(c);
    }
  }
}

TEST_P(BlockMatmul, FreeSizes) {
  for (const std::int64_t free : {1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33, 47, 48, 49, 96, 97, 100, 145, 300}) {
    Case c;
    c.free = free;
    c.sizes = {1, 3, 4, 8, 16};
    c.options.trans_b = free % 2 == 0;
    check(c);
  }
}

TEST_P(BlockMatmul, BatchesAndHeads) {
  for (const std::int64_t layout_heads : {1, 3}) {
    for (const std::int64_t heads : {1, 3}) {
      for (const auto& [left, right] : {std::pair<std::int64_t, std::int64_t>{2, 2}, {1, 2}, {2, 1}}) {
        for (const int sums : {0, 1, 2, 3}) {
          Case c;
          c.sizes = {layout_heads, 3, 2, 16, 8};
          c.free = 19;
          c.options.sum_z = (sums & 1) != 0;
          c.options.sum_h = (sums & 2) != 0;
          if (is_sdd() &&
              ((layout_heads == 1 && heads > 1 && !c.options.sum_h) || (layout_heads > 1 && c.options.sum_h))) {
            continue;  // has no packed result
          }
          const Mode mode = std::get<0>(GetParam());
          c.left_batch = mode == Mode::dsd ? Index{left} : Index{left, heads};
          c.right_batch = mode == Mode::dds ? Index{right} : Index{right, heads};
          check(c);
        }
      }
    }
  }
}

TEST_P(BlockMatmul, AnyStrides) {
  const Form forms[] = {Form::contiguous, Form::turned, Form::backwards, Form::expanded};
  for (const Form left : forms) {
    for (const Form right : forms) {
      for (const Form out : {Form::contiguous, Form::turned, Form::backwards}) {
        Case c;
        c.left = left, c.right = right, c.out = out;
        c.sizes = {1, 2, 3, 16, 24};
        c.left_batch = c.right_batch = Index{2};
        if (std::get<0>(GetParam()) != Mode::dsd) {
          c.left_batch.push_back(1);
        }
        if (std::get<0>(GetParam()) != Mode::dds) {
          c.right_batch.push_back(1);
        }
        for (const std::int64_t free : {50, 3}) {
          c.free = free;
          check(c);
        }
      }
    }
  }
}

TEST_P(BlockMatmul, EmptyRowsAndLayouts) {
  for (const double density : {0.0, 0.05, 1.0}) {
    for (const BlockLayout::Sizes sizes :
         {BlockLayout::Sizes{2, 6, 5, 16, 16}, {1, 1, 9, 32, 8}, {1, 9, 1, 8, 32}, {1, 0, 3, 8, 8}, {1, 3, 0, 8, 8}}) {
      Case c;
      c.sizes = sizes;
      c.density = density;
      for (const std::int64_t free : {37, 1, 6}) {
        c.free = free;
        check(c);
      }
    }
  }
}

TEST_P(BlockMatmul, ZeroSizes) {
  Case c;
  c.free = 0;
  check(c);
  for (const bool sum : {false, true}) {
    c.free = 20;
    c.options.sum_z = sum;
    c.left_batch = std::get<0>(GetParam()) == Mode::dsd ? Index{0} : Index{0, 1};
    c.right_batch = std::get<0>(GetParam()) == Mode::dds ? Index{0} : Index{0, 1};
    check(c);
  }
}

TEST_P(BlockMatmul, WhatNoBlockTouchesNeverLeaks) {
  for (const std::int64_t block : {8, 13, 16, 32}) {
    Case c;
    c.sizes = {1, 6, 6, block, block};
    c.density = 0.15;
    c.odd_share = is_sdd() ? 0.002 : 0.01;
    check(c);
    for (const int transposes : {0, 1, 2, 3}) {  // and a few columns
      c.free = 1 + 2 * transposes;
      c.options = {(transposes & 1) != 0, (transposes & 2) != 0, false, false};
      check(c);
    }
  }
}

TEST_P(BlockMatmul, DeepAndManyThreads) {
  Case c;
  c.sizes = {1, 4, 3, 16, 16};
  c.free = is_sdd() ? 4500 : 1700;  // several pieces of depth; several slabs
  c.threads = 5;
  check(c);
}

TEST_P(BlockMatmul, ResultsThatGoPastTheCaches) {
  Case c;
  c.sizes = is_sdd() ? BlockLayout::Sizes{1, 12, 12, 128, 128} : BlockLayout::Sizes{1, 8, 1, 128, 8};
  if (std::get<0>(GetParam()) == Mode::dds) {
    c.options.trans_b = true;
  }
  c.density = 0.99;
  c.free = is_sdd() ? 3 : 2203;
  check(c);
  c.free = is_sdd() ? 4 : 2208;  // rows of whole cache lines
  check(c);
}

TEST_P(BlockMatmul, Anything) {
  std::mt19937_64 random(fresh_seed());
  const auto below = [&](std::int64_t n) {
    return static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(n));
  };
  for (int n = 0; n < 40; ++n) {
    Case c;
    const std::int64_t heads = 1 + below(2);
    c.sizes = {heads, 1 + below(5), 1 + below(5), 8 + below(40), 8 + below(40)};
    c.density = static_cast<double>(below(11)) / 10;
    c.free = 1 + below(120);
    c.options = {below(2) == 1, below(2) == 1, below(2) == 1, !is_sdd() && below(2) == 1};
    c.left = static_cast<Form>(below(4)), c.right = static_cast<Form>(below(4)), c.out = static_cast<Form>(below(3));
    c.threads = static_cast<int>(1 + below(4));
    const std::int64_t z = 1 + below(3);
    const Mode mode = std::get<0>(GetParam());
    c.left_batch = mode == Mode::dsd ? Index{z} : Index{z, heads};
    c.right_batch = mode == Mode::dds ? Index{z} : Index{z, heads};
    check(c);
  }
}

std::string case_name(const testing::TestParamInfo<std::tuple<Mode, DType>>& tested) {
  const auto& [mode, dtype] = tested.param;
  return std::string(mode == Mode::sdd ? "sdd_" : mode == Mode::dsd ? "dsd_" : "dds_") + name_of(dtype);
}

INSTANTIATE_TEST_SUITE_P(Cpu, BlockMatmul, testing::Combine(testing::ValuesIn(kModes), testing::ValuesIn(kTypes)),
                         case_name);

TEST(BlockMatmul, MemoryThatIsNotThere) {
  const auto layout = BlockLayout::make({1, 1, 1, 8, 8}, std::vector<std::uint8_t>{1});
  std::vector<float> data(64);
  const TensorView values(data.data(), DType::f32, {1, 8, 8}), dense(data.data(), DType::f32, {8, 8});
  const TensorView no_values(nullptr, DType::f32, {1, 8, 8}), no_dense(nullptr, DType::f32, {8, 8});
  Context context = Context::cpu();
  EXPECT_EQ(error_of([&] { dsd(no_values, dense, layout, dense, context); }),
            "dsd: values: expected the address of (1, 8, 8), got null");
  EXPECT_EQ(error_of([&] { dds(no_dense, values, layout, dense, context); }),
            "dds: a: expected the address of (8, 8), got null");
  EXPECT_EQ(error_of([&] { sdd(dense, dense, layout, no_values, context); }),
            "sdd: out: expected the address of (1, 8, 8), got null");
  EXPECT_EQ(error_of([&] { block_softmax(no_values, layout, values, context); }),
            "block_softmax: values: expected the address of (1, 8, 8), got null");
  EXPECT_EQ(error_of([&] { block_pack(no_dense, layout, values, context); }),
            "pack: dense: expected the address of (8, 8), got null");
  context.executor = nullptr;
  EXPECT_EQ(error_of([&] { dsd(values, dense, layout, dense, context); }),
            "dsd: context.executor: expected an address, got null");
  EXPECT_EQ(error_of([&] { block_softmax(values, layout, values, context); }),
            "block_softmax: context.executor: expected an address, got null");
  context = Context::cpu();
  context.allocator = nullptr;
  EXPECT_EQ(error_of([&] { sdd(dense, dense, layout, values, context); }),
            "sdd: context.allocator: expected an address, got null");
}

TEST(BlockMatmulRounding, OnceToNearestEven) {
  // One block of ones times columns that sum to 1 + 2^-8 and 1 + 3·2^-8 in bf16, both halfway between neighbours.
  const auto layout = BlockLayout::make({1, 1, 1, 8, 8}, std::vector<std::uint8_t>{1});
  Tensor values(DType::bf16, {1, 8, 8}), dense(DType::bf16, {8, 2}), out(DType::bf16, {8, 2});
  values.generate([] { return 1.0; });
  dense.each([&](const Index& index) {
    const double rest = index[1] == 0 ? 0x1p-8 : 0x3p-8;
    dense.set(index, index[0] == 0 ? 1 : index[0] == 1 ? rest : 0);
  });
  Context context = Context::cpu();
  dsd(values.view, dense.view, layout, out.view, context);
  EXPECT_EQ(out.get({3, 0}), 1.0);
  EXPECT_EQ(out.get({3, 1}), 1.0 + 0x1p-6);
}

/// Every block is in one step, and two columns 2n and 2n + 1 that a group needs are one pair of its segment.
TEST(BlockMatmulPlan, PairsStayTogether) {
  using blocks::SpmmPlan;
  constexpr std::int64_t kLines = 29, kColumns = 37;
  constexpr std::int32_t kGroup = 3;
  for (const double density : {0.02, 0.2, 0.5, 1.0}) {
    const std::vector<std::uint8_t> mask = random_mask(kLines * kColumns, density, 5);
    const auto layout = BlockLayout::make({1, kLines, kColumns, 16, 16}, mask);
    for (const std::int32_t longest : {0, 7}) {
      const SpmmPlan plan = blocks::make_spmm_plan(*layout, false, kGroup, longest, blocks::StepOrder::pairs);
      std::map<std::pair<int, int>, std::pair<const SpmmPlan::Segment*, int>> places;  // of a group's columns
      std::int64_t blocks = 0;
      for (const auto& segment : plan.segments) {
        for (std::int32_t k = segment.first; k < segment.last; ++k) {
          const std::int32_t* step = &plan.steps[static_cast<std::size_t>(k * (1 + kGroup))];
          EXPECT_TRUE(places.insert({{segment.group, step[0]}, {&segment, k - segment.first}}).second);
          for (std::int32_t r = 0; r < kGroup; ++r) {
            const std::int64_t line = segment.group * kGroup + r;
            const bool there = line < kLines && mask[static_cast<std::size_t>(line * kColumns + step[0])] != 0;
            EXPECT_EQ(step[1 + r] >= 0, there);
            blocks += there ? 1 : 0;
          }
        }
      }
      EXPECT_EQ(blocks, layout->nnz());
      for (const auto& [what, place] : places) {
        const auto partner = places.find({what.first, what.second ^ 1});
        if (partner != places.end()) {
          EXPECT_EQ(partner->second.first, place.first);
          EXPECT_EQ(partner->second.second, place.second ^ 1);
        }
      }
    }
  }
}

}  // namespace
}  // namespace fretwork
