// The host side of the GPU ops on a machine without one, over the recording driver: random problems reach a launch, of
// a kernel that is listed, with a grid, a CTA and shared memory that an H200 has.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "fretwork/dynamic_attention.h"
#include "fretwork/ops.h"
#include "fretwork/patterns.h"
#include "runtime/kernels.h"
#include "support/recording_fixture.h"

namespace fretwork {
namespace {

using Index = std::int64_t;

class RecordedOps : public RecordedTest {
 protected:
  void SetUp() override {
    RecordedTest::SetUp();
    before_ = IsSkipped() ? 0 : count();
  }
  void TearDown() override {
    if (launches_ == nullptr) {
      return;
    }
    const auto plain = [](std::string name) {
      std::erase(name, ' ');
      return name;
    };
    std::set<std::string> listed;
    for (const ListedKernel& kernel : all_kernels("sm_90a")) {
      listed.insert(plain(kernel.spec.instance));
    }
    EXPECT_FALSE(launches(before_).empty());
    for (const RecordedLaunch& launch : launches(before_)) {
      EXPECT_TRUE(listed.contains(plain(launch.kernel))) << launch.kernel << " is not listed";
      EXPECT_TRUE(launch.grid > 0 && launch.threads > 0 && launch.threads <= 1024 && launch.threads % 32 == 0 &&
                  launch.shared_bytes <= 227 * 1024)
          << launch.kernel << ": grid " << launch.grid << ", threads " << launch.threads << ", shared memory "
          << launch.shared_bytes;
    }
  }

  Index pick(std::initializer_list<Index> of) { return of.begin()[random_() % of.size()]; }
  bool coin() { return random_() % 2 != 0; }
  DType type() { return pick({0, 1, 2}) == 0 ? DType::f32 : coin() ? DType::f16 : DType::bf16; }
  std::shared_ptr<const BlockLayout> layout(Index heads, Index rows, Index cols, Index block) {
    std::vector<std::uint8_t> mask(static_cast<std::size_t>(heads * rows * cols));
    const auto share = static_cast<std::uint32_t>(pick({5, 25, 60}));
    std::ranges::generate(mask, [&] { return random_() % 100 < share ? 1 : 0; });
    mask.front() = 1;
    return BlockLayout::make({heads, rows, cols, block, block}, mask);
  }
  /// NCHW, or with its channels last.
  TensorView image(DType dtype, std::vector<Index> sizes) {
    TensorView view = tensor(dtype, sizes);
    if (coin()) {
      view.strides = {sizes[1] * sizes[2] * sizes[3], 1, sizes[3] * sizes[1], sizes[1]};
    }
    return view;
  }

  std::mt19937 random_{5};
  std::size_t before_ = 0;
};

TEST_F(RecordedOps, Blocks) {
  for (int n = 0; n < 200; ++n, memory_.clear()) {
    const DType dtype = type();
    const Index block = pick({8, 16, 32, 64, 128}), heads = pick({1, 2}), z = pick({1, 3});
    const Index rows = pick({1, 3, 16}), cols = pick({1, 2, 9}), free = pick({1, 40, 64, 130, 512});
    const auto blocks = layout(heads, rows, cols, block);
    const TensorView values = tensor(dtype, {z, blocks->nnz(), block, block});
    const TensorView tall = tensor(dtype, {z, heads, rows * block, free});
    const TensorView wide = tensor(dtype, {z, heads, cols * block, free});
    sdd(tall, wide, blocks, values, context_, {false, true});
    dsd(values, wide, blocks, tall, context_);
    dsd(values, tall, blocks, wide, context_, {true, false});
    block_softmax(values, blocks, values, context_);
    const TensorView dense = tensor(dtype, {z, heads, rows * block, cols * block});
    block_pack(dense, blocks, values, context_);
    block_unpack(values, blocks, 0.0, dense, context_);
  }
}

TEST_F(RecordedOps, Convolutions) {
  for (int n = 0; n < 150; ++n, memory_.clear()) {
    const DType dtype = type();
    const Index block = pick({8, 16, 32, 64, 128}), side = pick({1, 3, 3, 5}), pad = pick({0, 1, 2});
    const Index rows = pick({1, 4, 8}), cols = pick({1, 2, 5}), height = pick({14, 28, 56}), width = pick({16, 28, 57});
    const auto blocks = layout(side * side, rows, cols, block);
    ConvOptions options;
    options.kernel = {side, side};
    options.stride = {pick({1, 1, 2}), pick({1, 1, 2})};
    options.padding = options.padding_end = {pad, pad};
    const TensorView x = image(dtype, {pick({1, 8, 64}), cols * block, height, width});
    const TensorView values = tensor(dtype, {blocks->nnz(), block, block});
    const TensorView y = image(dtype, block_conv2d_shape(x, values, blocks, options));
    block_conv2d(x, values, blocks, y, context_, options);
    block_conv2d_backward_x(y, values, blocks, x, context_, options);
    block_conv2d_backward_values(x, y, blocks, values, context_, options);
  }
}

TEST_F(RecordedOps, Attention) {
  for (int n = 0; n < 60; ++n, memory_.clear()) {
    const DType dtype = type();
    const Index batch = pick({1, 2}), heads = pick({4, 8}), kv_heads = pick({1, 4}), length = pick({64, 300, 1024});
    const Index queries = coin() ? length : pick({1, 7, 16}), depth = pick({40, 64, 80, 128, 256});
    const PatternPtr pattern = coin() ? PatternPtr(patterns::sliding_window({queries, length}, 64, 0))
                                      : PatternPtr(patterns::strided({queries, length}, 16));
    const TensorView q = tensor(dtype, {batch, heads, queries, depth}),
                     k = tensor(dtype, {batch, kv_heads, length, depth});
    const TensorView out = tensor(dtype, {batch, heads, queries, depth}),
                     lse = tensor(DType::f32, {batch, heads, queries});
    AttentionOptions options;
    AttentionGradients gradients;
    if (coin()) {
      options.sinks = tensor(coin() ? dtype : DType::f32, {heads});
      gradients.sinks = tensor(options.sinks->dtype, {heads});
    }
    attention(q, k, k, pattern, out, lse, context_, options);
    const TensorView d_q = tensor(dtype, {batch, heads, queries, depth}),
                     d_k = tensor(dtype, {batch, kv_heads, length, depth}),
                     d_v = tensor(dtype, {batch, kv_heads, length, depth});
    gradients.q = d_q;
    gradients.k = d_k;
    gradients.v = d_v;
    attention_backward(q, k, k, pattern, out, lse, out, {}, gradients, context_, options);
  }
}

TEST_F(RecordedOps, SelectBlocks) {
  for (int n = 0; n < 60; ++n, memory_.clear()) {
    const DType dtype = type();
    const Index batch = pick({1, 3}), heads = pick({4, 8}), kv_heads = pick({1, 4}), depth = pick({33, 64, 128, 1024});
    const Index queries = pick({1, 300, 5000}), keys = pick({1, 700, 9000, 200000});
    SelectOptions options;
    options.block_q = pick({16, 64, 128});
    options.block_k = pick({16, 32, 128});
    options.causal = coin();
    const Index top_k = pick({2, 16, 500}), rows = (queries + options.block_q - 1) / options.block_q;
    select_blocks(tensor(dtype, {batch, heads, queries, depth}), tensor(dtype, {batch, kv_heads, keys, depth}), top_k,
                  tensor(DType::i32, {batch, kv_heads, rows}), tensor(DType::i32, {batch, kv_heads, rows, top_k}),
                  context_, options);
  }
}

TEST_F(RecordedOps, DynamicAttention) {
  for (int n = 0; n < 60; ++n, memory_.clear()) {
    const DType dtype = type();
    const Index form = pick({0, 1, 2, 3}), batch = form == 3 ? 1 : pick({1, 2}), heads = pick({4, 8, 40}),
                kv_heads = pick({1, 4}), rows = pick({64, 300}), cols = pick({64, 300}),
                depth = pick({32, 40, 80, 128, 192, 256}), side = pick({16, 32, 64, 128});
    DeviceKeys keys;
    keys.block_rows = pick({16, 32, 64, 128});
    keys.block_cols = side;
    keys.causal = form > 1 && coin();
    const Index lines = (rows + keys.block_rows - 1) / keys.block_rows, width = (cols + side - 1) / side;
    if (form == 0) {
      keys.mask = tensor(DType::boolean, {1, heads, lines, width});
    } else if (form == 1) {
      keys.counts = tensor(DType::i32, {batch, 1, lines});
      keys.indices = tensor(DType::i32, {batch, 1, lines, 3});
    } else if (form == 2) {
      keys.selected = tensor(DType::i32, {batch, kv_heads, rows, 4});
    } else {
      keys.cu_q = keys.cu_k = tensor(DType::i32, {5});
    }
    const TensorView q = tensor(dtype, {batch, heads, rows, depth}), k = tensor(dtype, {batch, kv_heads, cols, depth});
    const TensorView out = tensor(dtype, {batch, heads, rows, depth}), lse = tensor(DType::f32, {batch, heads, rows});
    AttentionOptions options;
    AttentionGradients gradients{tensor(dtype, {batch, heads, rows, depth}),
                                 tensor(dtype, {batch, kv_heads, cols, depth}),
                                 tensor(dtype, {batch, kv_heads, cols, depth})};
    if (form < 2 && coin()) {
      const Index sizes[] = {pick({1, rows}), pick({1, cols})};
      options.bias = tensor(dtype, {heads, sizes[0], sizes[1]});
      gradients.bias = tensor(dtype, {heads, sizes[0], sizes[1]});
    }
    const PatternPtr pattern = form > 1 || coin() ? nullptr : PatternPtr(patterns::causal({rows, cols}));
    dynamic_attention(q, k, k, pattern, keys, out, lse, context_, options);
    dynamic_attention_backward(q, k, k, pattern, keys, out, lse, out, {}, gradients, context_, options);
  }
}

TEST_F(RecordedOps, KroneckerProducts) {
  for (int n = 0; n < 150; ++n, memory_.clear()) {
    const DType dtype = type();
    const Index a = pick({1, 2, 6}), b = pick({7, 32, 64, 128}), c = pick({5, 48, 64}), d = pick({1, 2, 4, 16, 64});
    const Index batch = pick({1, 16, 196, 2048});
    const TensorView x = tensor(dtype, {batch, a * c * d}), y = tensor(dtype, {batch, a * b * d});
    const TensorView w = tensor(dtype, {a, b, c, d});
    ksmm(x, w, y, context_);
    ksmm_backward_weight(x, y, w, {}, context_);
  }
}

}  // namespace
}  // namespace fretwork
