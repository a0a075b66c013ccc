// Attention of few queries: which keys its steps hold, against the pattern's mask; and on a real GPU against float64 on
// the host (skipped where there is none).
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "fretwork/patterns.h"
#include "ops/attention/cuda/families.h"
#include "support/attention_reference.h"
#include "support/device_tensor.h"
#include "support/reference.h"

namespace fretwork::attention_op {
namespace {

namespace driver = fretwork::cuda;
using Index = std::int64_t;
using Doubles = std::vector<double>;

constexpr double kInf = std::numeric_limits<double>::infinity(), kNan = std::numeric_limits<double>::quiet_NaN();

struct Named {
  std::string name;
  RegularPtr pattern;
};

std::vector<Named> some_patterns(Index rows, Index cols) {
  const Index vertical[] = {0, 3, 4, 17, cols / 2, cols - 40}, slash[] = {0, 1, 2, 50, 51, 200};
  std::vector<Named> list = {
      {"full", patterns::full({rows, cols})},
      {"causal", patterns::causal({rows, cols})},
      {"window", patterns::sliding_window({rows, cols}, 200, 0)},
      {"window both ways", patterns::sliding_window({rows, cols, cols / 3}, 77, 31)},
      {"sinks", patterns::sinks({rows, cols}, 4, 333)},
      {"vertical_slash", patterns::vertical_slash({rows, cols}, vertical, slash)},
      {"dilated", patterns::dilated({rows, cols}, 40, 5, true)},
      {"strided", patterns::strided({rows, cols}, 16)},
      {"random", patterns::from_mask(rows, cols, random_mask(rows * cols, 0.1, 7))},
      {"empty", patterns::band({rows, cols, 0}, cols + 5, 1, 1)},
  };
  return list;
}

/// The last document's queries against all keys.
RegularPtr documents(Index rows) {
  const Index lengths[] = {rows};
  return patterns::document(lengths, true);
}

// ---------------------------------------------------------------------------------------------------- steps

TEST(AttentionDecode, StepsHoldEachElementOnce) {
  for (const auto& [rows, cols] : {std::pair<Index, Index>{1, 700}, {3, 1001}, {16, 513}, {5, 16}, {2, 15}}) {
    auto all = some_patterns(rows, std::max<Index>(cols, 201));
    all.push_back({"document", documents(rows)});
    for (const auto& [name, pattern] : all) {
      const decode::Steps steps = decode::steps_of(*plan(*pattern, {32, 64}));
      const auto mask = mask_of(*pattern);
      std::vector<std::uint8_t> made(mask.size());
      Index used = 0;
      ASSERT_EQ(steps.tokens.size(), steps.masks.size() * decode::kKeys);
      for (std::size_t n = 0; n < steps.tokens.size(); ++n) {
        const int token = steps.tokens[n], which = steps.masks[n / decode::kKeys];
        used += token >= 0;
        for (Index row = 0; row < pattern->rows(); ++row) {
          const auto at = static_cast<std::size_t>(which * pattern->rows() + row);
          const bool there = which < 0 || (steps.bits[at] >> (n % decode::kKeys) & 1) != 0;
          ASSERT_FALSE(there && token < 0) << name;
          if (there) {
            ++made[static_cast<std::size_t>(row * pattern->cols() + token)];
          }
        }
      }
      EXPECT_EQ(made, mask) << name << " " << rows << " x " << cols;
      EXPECT_LE(steps.count(), used / decode::kKeys + 1) << name << ": steps that are not full";
    }
  }
}

TEST(AttentionDecode, StepsOfAMillionKeys) {
  const auto pattern = patterns::full({1, 1 << 20});
  EXPECT_EQ(decode::steps_of(*plan(*pattern, {32, 64})).count(), (1 << 20) / decode::kKeys);
}

// -------------------------------------------------------------------------------------------------- on a GPU

/// (batch, head, row, col), or (batch, row, head, col) in memory; rows are whole multiples of 8 elements.
MirroredTensor tensor(DType dtype, const std::array<Index, 4>& s, bool heads_inside) {
  const Index line = (s[3] + 7) / 8 * 8;
  const auto strides = heads_inside ? std::array{s[1] * s[2] * line, line, s[1] * line, Index{1}}
                                    : std::array{s[1] * s[2] * line, s[2] * line, line, Index{1}};
  return {dtype, s, strides, 128};
}
MirroredTensor random_tensor(unsigned seed, DType dtype, const std::array<Index, 4>& sizes, bool heads_inside) {
  std::mt19937 random(seed);
  MirroredTensor made = tensor(dtype, sizes, heads_inside);
  made.randomise(random);
  return made;
}
Operand upload(MirroredTensor& t) {
  const TensorView there = t.upload();
  return {there.data, there.strides[0], there.strides[1], there.strides[2], there.strides[3]};
}

struct Case {
  RegularPtr pattern;
  Index batch = 2, heads = 4, kv_heads = 2, depth = 64, value_depth = 0;
  DType dtype = DType::bf16;
  int segments = 0;  ///< 0: as the operator runs it
  bool heads_inside = false;
  double softcap = 0, dropout = 0;
  bool slopes = false, bias = false;
};

struct Trial {
  MirroredTensor q, k, v, o;
  std::vector<float> lse, bias, slopes;
  std::vector<std::uint8_t> mask;
  Index rows, cols;
  double scale;
  static constexpr Index kSeed = 1234;

  explicit Trial(const Case& c)
      : q(random_tensor(1, c.dtype, {c.batch, c.heads, c.pattern->rows(), c.depth}, c.heads_inside)),
        k(random_tensor(2, c.dtype, {c.batch, c.kv_heads, c.pattern->cols(), c.depth}, c.heads_inside)),
        v(random_tensor(3, c.dtype,
                        {c.batch, c.kv_heads, c.pattern->cols(), c.value_depth > 0 ? c.value_depth : c.depth},
                        c.heads_inside)),
        o(tensor(c.dtype, {c.batch, c.heads, c.pattern->rows(), v.size(3)}, c.heads_inside)),
        lse(static_cast<std::size_t>(c.batch * c.heads * c.pattern->rows()), 7.0f),
        mask(mask_of(*c.pattern)),
        rows(c.pattern->rows()),
        cols(c.pattern->cols()),
        scale(1 / std::sqrt(static_cast<double>(c.depth))) {
    poison();
    std::mt19937 random(4);
    std::normal_distribution<float> numbers;
    if (c.bias) {
      bias.resize(static_cast<std::size_t>(c.heads * rows * cols));
      std::generate(bias.begin(), bias.end(), [&] { return numbers(random); });
    }
    for (Index h = 0; c.slopes && h < c.heads; ++h) {
      slopes.push_back(0.05f / static_cast<float>(h + 1));
    }
  }

  /// NaN and infinity in unused keys.
  void poison() {
    for (Index j = 0; j < cols; ++j) {
      bool used = false;
      for (Index i = 0; i < rows; ++i) {
        used = used || mask[static_cast<std::size_t>(i * cols + j)] != 0;
      }
      for (Index n = 0; !used && n < k.size(0) * k.size(1); ++n) {
        for (Index d = 0; d < std::max(k.size(3), v.size(3)); ++d) {
          if (d < k.size(3)) {
            k.set({n / k.size(1), n % k.size(1), j, d}, kInf);
          }
          if (d < v.size(3)) {
            v.set({n / k.size(1), n % k.size(1), j, d}, kNan);
          }
        }
      }
    }
  }

  void run(const Case& c) {
    Problem p;
    p.dtype = c.dtype;
    p.batch = c.batch;
    p.heads = c.heads;
    p.kv_heads = c.kv_heads;
    p.rows = rows;
    p.cols = cols;
    p.depth = c.depth;
    p.value_depth = v.size(3);
    p.patterns = {c.pattern};
    p.scale = scale;
    p.softcap = c.softcap;
    p.q = upload(q);
    p.k = upload(k);
    p.v = upload(v);
    p.o = upload(o);
    const driver::DeviceBuffer lse_at(0, lse.data(), lse.size() * 4), bias_at(0, bias.data(), bias.size() * 4),
        slopes_at(0, slopes.data(), slopes.size() * 4), seed_at(0, &kSeed, sizeof kSeed);
    p.lse = {lse_at.data(), c.heads * rows, rows, 1, 0};
    if (c.bias) {
      p.bias = {bias_at.data(), DType::f32, 0, rows * cols, cols, 1};
    }
    if (c.slopes) {
      p.slopes = {slopes_at.data(), 0, 1, 0, 0};
    }
    p.dropout = {c.dropout, static_cast<const std::int64_t*>(seed_at.data())};
    const driver::DeviceScope scope(0);
    Context context = Context::cuda(0);
    if (c.segments == 0) {
      cuda::forward(p, context);
    } else {
      ASSERT_TRUE(decode::fits(p));
      decode::launch(p, context, c.segments);
    }
    o.download();
    driver::copy_to_host(lse.data(), lse_at.data(), lse.size() * 4, nullptr);
    driver::synchronize(nullptr);
  }

  AttentionReference reference(const Case& c) const {
    AttentionInputs in{c.batch, c.heads, c.kv_heads, rows, cols, c.depth, v.size(3), {}, scale};
    in.there = [&](Index, Index, Index i, Index j) { return mask[static_cast<std::size_t>(i * cols + j)] != 0; };
    in.softcap = c.softcap, in.dropout = c.dropout, in.seed = kSeed;
    in.q = q.values(), in.k = k.values(), in.v = v.values();
    in.bias.assign(bias.begin(), bias.end());
    in.bias_sizes = {1, c.heads, rows, cols};
    in.slopes.assign(slopes.begin(), slopes.end());
    return AttentionReference(in);
  }
};

/// NaN where one is.
double larger(double a, double b) { return std::isnan(a) || a > b ? a : b; }

void check(const Case& c, const std::string& name) {
  SCOPED_TRACE(name);
  Trial run(c);
  run.run(c);
  const AttentionReference want = run.reference(c);
  double worst = 0, worst_lse = 0;
  const Doubles got = run.o.values();
  for (std::size_t n = 0; n < got.size(); ++n) {
    worst = larger(worst, std::abs(got[n] - want.o[n]));
  }
  for (std::size_t n = 0; n < run.lse.size(); ++n) {
    const double lse = run.lse[n];
    worst_lse = larger(worst_lse, lse == want.lse[n] ? 0 : std::abs(lse - want.lse[n]));  // infinities are equal
  }
  EXPECT_LE(worst, c.dtype == DType::bf16 ? 2e-2 : 4e-3);
  EXPECT_LE(worst_lse, 2e-3);
  const auto o = run.o.storage();
  const auto lse = run.lse;
  run.run(c);
  EXPECT_TRUE(o == run.o.storage()) << "another run gave another result";
  EXPECT_EQ(std::memcmp(lse.data(), run.lse.data(), lse.size() * 4), 0);
}

class OnGpu : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!driver::available()) {
      GTEST_SKIP() << "no GPU";
    }
    if (driver::device_info(0).arch < 80) {
      GTEST_SKIP() << "needs sm_80";
    }
  }
};
using AttentionDecodeCuda = OnGpu;

TEST_F(AttentionDecodeCuda, EveryPattern) {
  for (const auto& [rows, cols] : {std::pair<Index, Index>{1, 2049}, {3, 1001}, {16, 777}}) {
    for (const auto& [name, pattern] : some_patterns(rows, cols)) {
      check({.pattern = pattern}, name + " of " + std::to_string(rows));
    }
    check({.pattern = documents(rows)}, "document of " + std::to_string(rows));
  }
}

TEST_F(AttentionDecodeCuda, Groups) {
  for (const Index ratio : {1, 4, 8, 16, 5}) {
    for (const Index rows : {1, 3, 16}) {
      check({.pattern = patterns::sinks({rows, 1500}, 4, 600), .heads = 2 * ratio},
            std::to_string(ratio) + " heads of a group, " + std::to_string(rows) + " queries");
    }
  }
}

TEST_F(AttentionDecodeCuda, Segments) {
  for (const int segments : {1, 2, 3, 7, 40}) {
    for (const Index rows : {1, 5}) {
      check({.pattern = patterns::sinks({rows, 3000}, 4, 1111), .heads = 16, .depth = 128, .segments = segments},
            std::to_string(segments) + " segments");
      check({.pattern = patterns::full({rows, 33}), .segments = segments},
            std::to_string(segments) + " segments of few keys");
    }
  }
}

TEST_F(AttentionDecodeCuda, DepthsAndTypes) {
  for (const DType dtype : {DType::f16, DType::bf16}) {
    for (const auto& [depth, value_depth] : {std::pair<Index, Index>{64, 64},
                                             {128, 128},
                                             {256, 256},
                                             {80, 80},
                                             {40, 72},
                                             {192, 128},
                                             {128, 256},
                                             {13, 7},
                                             {1, 1}}) {
      for (const int segments : {1, 4}) {
        check({.pattern = patterns::sliding_window({2, 901}, 500, 0),
               .depth = depth,
               .value_depth = value_depth,
               .dtype = dtype,
               .segments = segments,
               .heads_inside = segments == 1},
              std::to_string(depth) + ", " + std::to_string(value_depth));
      }
    }
  }
}

TEST_F(AttentionDecodeCuda, Features) {
  for (const Index rows : {1, 6}) {
    const auto pattern = patterns::sinks({rows, 801}, 4, 500);
    for (const Index depth : {64, 128, 256}) {
      check({.pattern = pattern, .depth = depth, .softcap = 2}, "softcap");
      check({.pattern = pattern, .depth = depth, .slopes = true}, "slopes");
      check({.pattern = pattern, .depth = depth, .bias = true}, "bias");
      check({.pattern = pattern, .depth = depth, .dropout = 0.3}, "dropout");
      check({.pattern = pattern, .depth = depth, .softcap = 3, .dropout = 0.2, .slopes = true, .bias = true}, "all");
    }
  }
}

TEST_F(AttentionDecodeCuda, ANaNQuerySpoilsItsOwnRowOnly) {
  for (const int segments : {1, 3}) {
    const Case c{.pattern = patterns::sinks({2, 600}, 4, 300), .segments = segments};
    Trial run(c);
    run.q.set({1, 2, 0, 5}, kNan);
    run.run(c);
    for (Index n = 0; n < c.batch * c.heads * 2; ++n) {
      const Index b = n / (2 * c.heads), h = n / 2 % c.heads, i = n % 2;
      const bool spoilt = b == 1 && h == 2 && i == 0;
      EXPECT_EQ(std::isnan(run.o.get({b, h, i, 0})), spoilt) << n;
      EXPECT_EQ(std::isnan(run.lse[static_cast<std::size_t>(n)]), spoilt) << n;
    }
  }
}

TEST_F(AttentionDecodeCuda, ManyRunsAreEqual) {
  const Case c{.pattern = patterns::sinks({1, 4097}, 4, 2000), .heads = 16, .depth = 128, .segments = 5};
  Trial run(c);
  run.run(c);
  const auto o = run.o.storage();
  for (int n = 0; n < 100; ++n) {
    run.run(c);
    ASSERT_TRUE(o == run.o.storage()) << n;
  }
}

}  // namespace
}  // namespace fretwork::attention_op
