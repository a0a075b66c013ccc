// Which kernels attention chooses on an H200, over the recording driver: both sides of each border.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "fretwork/ops.h"
#include "fretwork/patterns.h"
#include "support/recording_fixture.h"

namespace fretwork {
namespace {

using Index = std::int64_t;

struct Case {
  Index heads, kv_heads, queries, keys, depth;
  bool causal = false;
  DType dtype = DType::bf16;
  double softcap = 0;
  std::vector<Index> bias = {};  ///< its sizes, of bf16
  bool alibi = false, drops = false;
};

class AttentionChoice : public RecordedTest {
 protected:
  /// The kernels launched since `before`, without template arguments and namespaces.
  std::vector<std::string> kernels(std::size_t before) const {
    std::vector<std::string> names;
    for (const RecordedLaunch& launch : launches(before)) {
      std::string name = launch.kernel;
      name = name.substr(0, name.find('<'));
      names.push_back(name.substr(name.rfind(':') + 1));
    }
    return names;
  }

  /// Whether a pass launches the kernel.
  bool runs(const Case& c, const std::string& kernel, bool backward = false) {
    memory_.clear();
    const PatternPtr pattern =
        c.causal ? PatternPtr(patterns::causal({c.queries, c.keys})) : PatternPtr(patterns::full({c.queries, c.keys}));
    const TensorView q = tensor(c.dtype, {1, c.heads, c.queries, c.depth}),
                     k = tensor(c.dtype, {1, c.kv_heads, c.keys, c.depth}),
                     lse = tensor(DType::f32, {1, c.heads, c.queries});
    AttentionOptions options;
    options.softcap = c.softcap;
    if (!c.bias.empty()) {
      options.bias = tensor(DType::bf16, c.bias);
    }
    if (c.alibi) {
      options.slopes = tensor(DType::f32, {c.heads});
    }
    if (c.drops) {
      options.dropout = 0.1;
      options.dropout_seed = static_cast<const std::int64_t*>(tensor(DType::f32, {2}).data);
    }
    const std::size_t before = count();
    if (backward) {
      attention_backward(q, k, k, pattern, q, lse, q, {}, {q, k, k}, context_, options);
    } else {
      attention(q, k, k, pattern, q, lse, context_, options);
    }
    const auto names = kernels(before);
    return std::ranges::find(names, kernel) != names.end();
  }
};

TEST_F(AttentionChoice, Forward) {
  EXPECT_TRUE(runs({16, 16, 4096, 4096, 128}, "forward"));
  EXPECT_TRUE(runs({1, 1, 64, 64, 64}, "forward"));
  EXPECT_TRUE(runs({16, 16, 4096, 4096, 32}, "forward"));
  EXPECT_TRUE(runs({16, 16, 4096, 4096, 128, false, DType::f32}, "simple_forward"));
}

TEST_F(AttentionChoice, FewQueries) {
  EXPECT_TRUE(runs({64, 8, 1, 65536, 128}, "attention_decode"));
  EXPECT_TRUE(runs({64, 8, 1, 64, 128}, "attention_decode"));
  EXPECT_TRUE(runs({8, 8, 16, 4096, 128}, "attention_decode"));
  EXPECT_TRUE(runs({8, 8, 17, 4096, 128}, "forward"));
  EXPECT_TRUE(runs({64, 8, 3, 4096, 128}, "attention_decode"));  // 24 rows in a tile
  EXPECT_TRUE(runs({64, 8, 4, 4096, 128}, "forward"));           // 32 rows
  EXPECT_TRUE(runs({64, 8, 4, 64, 128}, "forward"));
  EXPECT_TRUE(runs({64, 8, 4, 4096, 128, false, DType::bf16, 30}, "attention_decode"));
  EXPECT_TRUE(runs({64, 8, 4, 4096, 128, false, DType::f32}, "simple_forward"));
}

TEST_F(AttentionChoice, Backward) {
  EXPECT_TRUE(runs({16, 16, 4096, 4096, 192}, "backward_head_dim_gt_128", true));
  EXPECT_TRUE(runs({16, 16, 4096, 4096, 128, false, DType::f32}, "simple_backward", true));
}

/// Full patterns: 1024 queries or more, and key tiles that fill ten elevenths of their waves on 132 SMs. Causal ones:
/// 4096 queries, 3.5 key tiles for each SM, no shared key heads.
TEST_F(AttentionChoice, FiveProducts) {
  const auto five = [&](const Case& c) {
    const bool is = runs(c, "backward_five_product", true);
    EXPECT_NE(is, runs(c, "backward_keys", true));
    return is;
  };
  EXPECT_TRUE(five({15, 15, 1024, 1024, 128}));         // 120 key tiles
  EXPECT_FALSE(five({7, 7, 2176, 2176, 128}));          // 119
  EXPECT_FALSE(five({17, 17, 960, 896, 128}));          // 119 of too few queries
  EXPECT_TRUE(five({30, 15, 1024, 1024, 64}));          // key heads are shared
  EXPECT_FALSE(five({15, 15, 1024, 1280, 128}));        // fewer queries than keys
  EXPECT_TRUE(five({14, 14, 4224, 4224, 128, true}));   // 462 key tiles, of 132
  EXPECT_FALSE(five({13, 13, 4480, 4480, 128, true}));  // 455
  EXPECT_FALSE(five({28, 14, 4224, 4224, 128, true}));  // key heads are shared
  EXPECT_FALSE(five({30, 30, 2048, 2048, 128, true}));  // 2048 queries
}

/// Options change no choice up to a head dim of 128, except that few queries decode.
TEST_F(AttentionChoice, Options) {
  const auto with = [](Case c, double softcap, std::vector<Index> bias, bool alibi, bool drops) {
    c.softcap = softcap, c.bias = std::move(bias), c.alibi = alibi, c.drops = drops;
    return c;
  };
  const Case causal{14, 14, 4224, 4224, 128, true}, shared{28, 14, 4224, 4224, 128, true};
  for (const auto& bias : {std::vector<Index>{}, {1, 14, 4224, 4224}, {1, 1, 1, 4224}}) {
    for (const bool alibi : {false, true}) {
      for (const double softcap : {0.0, 30.0}) {
        if ((bias.empty() && !alibi && softcap == 0) || (!bias.empty() && alibi)) {
          continue;
        }
        EXPECT_TRUE(runs(with(causal, softcap, bias, alibi, false), "scored_forward"));
        EXPECT_TRUE(runs(with(causal, softcap, bias, alibi, false), "scored_backward_five_product", true));
        EXPECT_FALSE(runs(with(causal, softcap, bias, alibi, false), "attention_backward", true));
      }
    }
  }
  EXPECT_TRUE(runs(with(shared, 30, {}, false, false), "scored_backward_keys", true));
  EXPECT_TRUE(runs(with(shared, 30, {}, false, false), "scored_backward_queries", true));
  EXPECT_TRUE(runs(with(causal, 0, {}, false, true), "scored_forward"));
  EXPECT_TRUE(runs(with(causal, 0, {}, false, true), "scored_backward_five_product", true));
  EXPECT_TRUE(runs(with(causal, 0, {1, 1, 4224, 1}, false, false), "scored_backward_keys", true));  // no neighbours
  EXPECT_TRUE(runs(with({14, 14, 4096, 4096, 192}, 30, {}, false, false), "attention_forward"));
  EXPECT_TRUE(runs(with({14, 14, 4096, 4096, 192}, 30, {}, false, false), "attention_backward", true));
  EXPECT_TRUE(runs(with({14, 14, 4096, 4096, 128}, 5000, {}, false, false), "attention_forward"));
  EXPECT_TRUE(runs(with({64, 8, 20, 4096, 128}, 30, {}, false, false), "scored_forward"));
  EXPECT_TRUE(runs(with({64, 8, 16, 4096, 128}, 30, {}, false, false), "attention_decode"));
}

TEST_F(AttentionChoice, LargeHeadDims) {
  EXPECT_TRUE(runs({8, 8, 4, 256, 264}, "attention_forward"));
  EXPECT_TRUE(runs({8, 8, 64, 256, 512}, "attention_backward", true));
  EXPECT_ANY_THROW(runs({8, 8, 4, 256, 520}, "attention_decode"));
  EXPECT_ANY_THROW(runs({8, 8, 64, 256, 520}, "attention_forward"));
}

}  // namespace
}  // namespace fretwork
