// The C++ interface of attention over keys known only on the device: four ways to say one pattern, over poisoned
// outputs, and bad calls. Values against float64 are compared in test_dynamic_attention.py.
#include "fretwork/dynamic_attention.h"

#include <gtest/gtest.h>

#include <limits>
#include <random>

#include "fretwork/fretwork.h"
#include "support/error_text.h"
#include "support/tensor.h"

namespace fretwork {
namespace {

using Index = std::int64_t;

constexpr Index kLength = 64, kSide = 16, kHeads = 4, kKeyHeads = 2, kDepth = 8;

Tensor numbers(DType dtype, std::initializer_list<Index> sizes, std::mt19937& random) {
  Tensor made(dtype, sizes);
  std::normal_distribution<double> normal;
  for (Index n = 0; n < made.view.elements(); ++n) {
    made.set(n, normal(random));
  }
  return made;
}

/// A view's 32-bit integers, which the tests' tensor does not set.
struct Whole {
  std::vector<std::int32_t> data;
  std::vector<Index> sizes;
  ConstTensorView view() const { return {data.data(), DType::i32, sizes}; }
};

/// Documents of 16 tokens, each of which sees itself: as blocks, as a selection, as documents, as a pattern.
class SameDocuments : public testing::Test {
 protected:
  std::mt19937 random_{7};
  Context context_ = Context::cpu();
  Tensor q_ = numbers(DType::f32, {1, kHeads, kLength, kDepth}, random_);
  Tensor k_ = numbers(DType::f32, {1, kKeyHeads, kLength, kDepth}, random_);
  Tensor v_ = numbers(DType::f32, {1, kKeyHeads, kLength, kDepth}, random_);
  Tensor sinks_ = numbers(DType::f32, {kHeads}, random_);
  Whole counts_{{1, 1, 1, 1}, {1, 1, 4}}, lists_{{0, 7, 1, 7, 2, 7, 3, 7}, {1, 1, 4, 2}},
      starts_{{0, 16, 32, 48, 64}, {5}};
  Whole selected_{{}, {1, kKeyHeads, kLength, 2}};

  void SetUp() override {
    for (Index n = 0; n < kKeyHeads * kLength; ++n) {
      selected_.data.push_back(-1);
      selected_.data.push_back(static_cast<std::int32_t>(n % kLength / kSide));
    }
  }

  struct Found {
    Tensor out{DType::f32, {1, kHeads, kLength, kDepth}}, lse{DType::f32, {1, kHeads, kLength}};
    Tensor d_q{DType::f32, {1, kHeads, kLength, kDepth}}, d_k{DType::f32, {1, kKeyHeads, kLength, kDepth}};
    Tensor d_v{DType::f32, {1, kKeyHeads, kLength, kDepth}}, d_sinks{DType::f32, {kHeads}};
    AttentionGradients gradients(const AttentionOptions& options) {
      AttentionGradients all{d_q.view, d_k.view, d_v.view};
      if (options.sinks.has_value()) {
        all.sinks = d_sinks.view;
      }
      return all;
    }
  };
  AttentionOptions with_sinks() const {
    AttentionOptions options;
    options.sinks = sinks_.view;
    return options;
  }
  Found run(const DeviceKeys& keys, const AttentionOptions& options = {}) {
    Found found;
    dynamic_attention(q_.view, k_.view, v_.view, nullptr, keys, found.out.view, found.lse.view, context_, options);
    dynamic_attention_backward(q_.view, k_.view, v_.view, nullptr, keys, found.out.view, found.lse.view, q_.view, {},
                               found.gradients(options), context_, options);
    return found;
  }
  Found expected(const AttentionOptions& options) {
    Found found;
    const Index lengths[] = {kSide, kSide, kSide, kSide};
    const PatternPtr pattern = patterns::document(lengths);
    attention(q_.view, k_.view, v_.view, pattern, found.out.view, found.lse.view, context_, options);
    attention_backward(q_.view, k_.view, v_.view, pattern, found.out.view, found.lse.view, q_.view, {},
                       found.gradients(options), context_, options);
    return found;
  }
  /// Against the pattern, without sinks and with them.
  void check(const DeviceKeys& keys) {
    compare(run(keys), expected({}), false);
    compare(run(keys, with_sinks()), expected(with_sinks()), true);
  }
  static void compare(const Found& got, const Found& want, bool sinks) {
    std::vector<std::pair<const Tensor*, const Tensor*>> all = {{&got.out, &want.out},
                                                                {&got.lse, &want.lse},
                                                                {&got.d_q, &want.d_q},
                                                                {&got.d_k, &want.d_k},
                                                                {&got.d_v, &want.d_v}};
    if (sinks) {
      all.emplace_back(&got.d_sinks, &want.d_sinks);
    }
    for (const auto& [x, y] : all) {
      for (Index n = 0; n < y->view.elements(); ++n) {
        ASSERT_NEAR(x->get(n), y->get(n), 1e-5) << "element " << n << " of tensor " << x - &got.out;
      }
    }
  }
};

TEST_F(SameDocuments, Lists) {
  DeviceKeys keys;
  keys.counts = counts_.view();
  keys.indices = lists_.view();
  keys.block_rows = keys.block_cols = kSide;
  check(keys);
}

TEST_F(SameDocuments, Mask) {
  const std::uint8_t mask[] = {1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1};
  DeviceKeys keys;
  keys.mask = ConstTensorView(mask, DType::boolean, {1, 1, 4, 4});
  keys.block_rows = keys.block_cols = kSide;
  check(keys);
}

TEST_F(SameDocuments, Selection) {
  DeviceKeys keys;
  keys.selected = selected_.view();
  keys.block_cols = kSide;
  check(keys);
}

TEST_F(SameDocuments, Starts) {
  DeviceKeys keys;
  keys.cu_q = keys.cu_k = starts_.view();
  check(keys);
}

TEST_F(SameDocuments, RowsOutside) {
  starts_.data = {16, 16, 32, 48, 48};
  DeviceKeys keys;
  keys.cu_q = keys.cu_k = starts_.view();
  for (const AttentionOptions& options : {AttentionOptions{}, with_sinks()}) {
    const Found found = run(keys, options);
    for (const Index row : {Index{0}, Index{15}, Index{48}, Index{63}}) {
      EXPECT_EQ(found.out.get({0, 1, row, 3}), 0);
      EXPECT_EQ(found.lse.get({0, 1, row}), -std::numeric_limits<double>::infinity());
      EXPECT_EQ(found.d_q.get({0, 1, row, 3}), 0);
      EXPECT_EQ(found.d_k.get({0, 1, row, 3}), 0);
    }
    EXPECT_NE(found.out.get({0, 1, 20, 3}), 0);
  }
}

TEST_F(SameDocuments, BadCalls) {
  DeviceKeys keys;
  EXPECT_EQ(error_of([&] { run(keys); }), "attention: blocks: expected a mask or lists, got none");
  keys.counts = counts_.view();
  keys.indices = lists_.view();
  keys.block_rows = 24;
  EXPECT_EQ(error_of([&] { run(keys); }), "attention: block: expected 16, 32, 64 or 128, got 24");
  keys.block_rows = 32;
  EXPECT_EQ(error_of([&] { run(keys); }).substr(0, 30), "attention: counts: expected (B");
  keys = {};
  keys.selected = lists_.view();
  keys.block_cols = kSide;
  EXPECT_EQ(error_of([&] { run(keys); }), "selected_attention: indices: expected (1, 2, 64, T), got (1, 1, 4, 2)");
  keys = {};
  keys.cu_q = starts_.view();
  keys.cu_k = counts_.view();
  EXPECT_EQ(error_of([&] { run(keys); }), "varlen_attention: cu_k: expected shape (5,) like cu_q, got (1, 1, 4)");
  keys.cu_k = keys.cu_q;
  keys.left = -2;
  EXPECT_EQ(error_of([&] { run(keys); }), "varlen_attention: window: expected 0 or more, got -2");
}

/// Nothing that is given may count for nothing.
TEST_F(SameDocuments, KeysAreNamedInOneWay) {
  DeviceKeys lists, documents;
  lists.counts = counts_.view();
  lists.indices = lists_.view();
  lists.block_rows = lists.block_cols = kSide;
  documents.cu_q = documents.cu_k = starts_.view();

  DeviceKeys keys = lists;
  keys.cu_q = starts_.view();
  EXPECT_EQ(error_of([&] { run(keys); }),
            "varlen_attention: keys: expected one of a mask, lists, a selection and documents, got 2 of them");
  keys = lists;
  keys.cu_k = starts_.view();
  EXPECT_EQ(error_of([&] { run(keys); }),
            "attention: keys: expected one of a mask, lists, a selection and documents, got 2 of them");
  keys = {};
  keys.cu_k = starts_.view();
  EXPECT_EQ(error_of([&] { run(keys); }).substr(0, 25), "attention: cu_q: expected");
  keys = lists;
  keys.causal = true;
  EXPECT_EQ(error_of([&] { run(keys); }), "attention: causal: expected a pattern that says so with blocks, got true");
  keys = lists;
  keys.left = 3;
  EXPECT_EQ(error_of([&] { run(keys); }), "attention: window: expected none but with documents, got one");
  Tensor out(DType::f32, {1, kHeads, kLength, kDepth});
  EXPECT_EQ(error_of([&] {
              dynamic_attention(q_.view, k_.view, v_.view, patterns::full(kLength), documents, out.view, {}, context_);
            }),
            "varlen_attention: pattern: expected none but with blocks, got one");
}

TEST(Intervals, PatternsWithOtherRowsAreRefused) {
  std::mt19937 random{3};
  Context context = Context::cpu();
  const Tensor x = numbers(DType::f32, {1, 1, 32, 8}, random), out(DType::f32, {1, 1, 32, 8});
  const std::uint8_t mask[] = {1, 1, 1, 1};
  DeviceKeys keys;
  keys.mask = ConstTensorView(mask, DType::boolean, {1, 1, 2, 2});
  keys.block_rows = keys.block_cols = 16;
  for (const PatternPtr& pattern : {PatternPtr(patterns::strided(32, 4)), PatternPtr(patterns::dilated(32, 2, 2))}) {
    const std::string text =
        error_of([&] { dynamic_attention(x.view, x.view, x.view, pattern, keys, out.view, {}, context); });
    EXPECT_EQ(text.substr(0, 56), "attention: pattern: expected rows and columns that are i") << text;
  }
}

}  // namespace
}  // namespace fretwork
