// Attention and its gradients on a real GPU against float64 on the host, from the pattern's mask alone. Skipped where
// there is none.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "fretwork/error.h"
#include "fretwork/patterns.h"
#include "ops/attention/problem.h"
#include "runtime/kernels.h"
#include "support/attention_reference.h"
#include "support/device_tensor.h"
#include "support/reference.h"

namespace fretwork {
namespace {

using attention_op::BackwardProblem;
using attention_op::Operand;
using attention_op::Problem;
using Index = std::int64_t;
using Doubles = std::vector<double>;

constexpr double kInf = std::numeric_limits<double>::infinity(), kNan = std::numeric_limits<double>::quiet_NaN();

/// How a tensor lies in memory: plainly, with heads inside rows, or with strides and a start that suit no vector.
enum class Lay { plain, heads_inside, odd };

MirroredTensor tensor(DType dtype, const std::vector<Index>& sizes, Lay lay = Lay::plain) {
  switch (lay) {
    case Lay::heads_inside:
      return {dtype, sizes, MemoryLayout{.order = {0, 2, 1, 3}, .alignment = 128}};
    case Lay::odd:
      return {dtype, sizes, MemoryLayout{.step = 2, .gap = 3, .alignment = size_of(dtype)}};
    default:
      return {dtype, sizes, MemoryLayout{.alignment = 128}};
  }
}
MirroredTensor random_tensor(unsigned seed, DType dtype, const std::vector<Index>& sizes, Lay lay = Lay::plain) {
  std::mt19937 random(seed);
  MirroredTensor made = tensor(dtype, sizes, lay);
  made.randomise(random);
  return made;
}
/// Sends it to the device and says where it is.
Operand upload(MirroredTensor& t) {
  if (t.empty()) {
    return {};
  }
  const TensorView there = t.upload();
  return {there.data, there.strides[0], there.strides[1], there.strides[2], there.strides[3]};
}

struct Case {
  std::vector<RegularPtr> patterns;
  DType dtype = DType::bf16;
  Index batch = 1, heads = 2, kv_heads = 2, depth = 64, value_depth = 0;
  double scale = 0, softcap = 0, dropout = 0;
  bool slopes = false, d_lse = false, poison = false;
  std::vector<Index> bias{};  ///< sizes; none: no bias
  DType bias_dtype = DType::f32;
  Lay lay = Lay::plain;
};

/// What both sides compute from.
struct Inputs {
  MirroredTensor q, k, v, d_o, d_lse, bias, slopes;
  std::vector<std::uint8_t> mask;  ///< (head, row, col)
  Index rows, cols, value_depth;
  double scale;

  explicit Inputs(const Case& c) {
    rows = c.patterns[0]->rows();
    cols = c.patterns[0]->cols();
    value_depth = c.value_depth > 0 ? c.value_depth : c.depth;
    scale = c.scale != 0 ? c.scale : 1 / std::sqrt(static_cast<double>(c.depth));
    q = random_tensor(1, c.dtype, {c.batch, c.heads, rows, c.depth}, c.lay);
    k = random_tensor(2, c.dtype, {c.batch, c.kv_heads, cols, c.depth}, c.lay);
    v = random_tensor(3, c.dtype, {c.batch, c.kv_heads, cols, value_depth}, c.lay);
    d_o = random_tensor(4, c.dtype, {c.batch, c.heads, rows, value_depth}, c.lay);
    if (c.d_lse) {
      d_lse = random_tensor(5, DType::f32, {c.batch, c.heads, rows, 1});
    }
    if (!c.bias.empty()) {
      bias = random_tensor(6, c.bias_dtype, c.bias);
    }
    if (c.slopes) {
      slopes = tensor(DType::f32, {1, c.heads, 1, 1});
      for (Index h = 0; h < c.heads; ++h) {
        slopes.set(h, 0.1 / static_cast<double>(h + 1));
      }
    }
    mask.resize(static_cast<std::size_t>(c.heads * rows * cols));
    for (Index h = 0; h < c.heads; ++h) {
      const auto& pattern = c.patterns[c.patterns.size() == 1 ? 0 : static_cast<std::size_t>(h)];
      pattern->mask(
          std::span(mask).subspan(static_cast<std::size_t>(h * rows * cols), static_cast<std::size_t>(rows * cols)));
    }
    if (c.poison) {
      poison(c);
    }
  }

 private:
  /// NaN and infinity where no element of the pattern reads.
  void poison(const Case& c) {
    const Index ratio = c.heads / c.kv_heads;
    for (Index h = 0; h < c.heads; ++h) {
      for (Index i = 0; i < rows; ++i) {
        const auto* row = mask.data() + (h * rows + i) * cols;
        if (std::none_of(row, row + cols, [](auto m) { return m != 0; })) {
          fill(q, h, i, kNan);
          fill(d_o, h, i, kInf);
        }
      }
    }
    for (Index g = 0; g < c.kv_heads; ++g) {
      for (Index j = 0; j < cols; ++j) {
        bool used = false;
        for (Index n = 0; n < ratio * rows; ++n) {
          used = used || mask[static_cast<std::size_t>((g * ratio * rows + n) * cols + j)] != 0;
        }
        if (!used) {
          fill(k, g, j, kInf);
          fill(v, g, j, kNan);
        }
      }
    }
  }
  static void fill(Tensor& t, Index head, Index row, double x) {
    for (Index z = 0; z < t.size(0); ++z) {
      for (Index d = 0; d < t.size(3); ++d) {
        t.set({z, head, row, d}, x);
      }
    }
  }
};

AttentionReference reference(const Case& c, const Inputs& in, Index seed) {
  AttentionInputs x{c.batch, c.heads, c.kv_heads, in.rows, in.cols, c.depth, in.value_depth, {}, in.scale};
  x.there = [&](Index, Index h, Index i, Index j) {
    return in.mask[static_cast<std::size_t>((h * in.rows + i) * in.cols + j)] != 0;
  };
  x.softcap = c.softcap, x.dropout = c.dropout, x.seed = seed;
  x.q = in.q.values(), x.k = in.k.values(), x.v = in.v.values(), x.d_o = in.d_o.values();
  if (c.d_lse) {
    x.d_lse = in.d_lse.values();
  }
  if (!c.bias.empty()) {
    x.bias = in.bias.values();
    std::ranges::copy(c.bias, x.bias_sizes.begin());
  }
  if (c.slopes) {
    x.slopes = in.slopes.values();
  }
  return AttentionReference(x);
}

/// The problem on the device with its results, run forward and backward.
struct Outcome {
  MirroredTensor o, lse, d_q, d_k, d_v, d_bias;

  Outcome(const Case& c, Inputs& in, Index seed) {
    o = tensor(c.dtype, in.d_o.sizes(), c.lay);
    lse = tensor(DType::f32, {c.batch, c.heads, in.rows, 1});
    d_q = tensor(c.dtype, in.q.sizes(), c.lay);
    d_k = tensor(c.dtype, in.k.sizes(), c.lay);
    d_v = tensor(c.dtype, in.v.sizes(), c.lay);
    const cuda::DeviceBuffer seed_at(0, &seed, sizeof seed);
    BackwardProblem b;
    Problem& p = b.forward;
    p.dtype = c.dtype;
    p.batch = c.batch;
    p.heads = c.heads;
    p.kv_heads = c.kv_heads;
    p.rows = in.rows;
    p.cols = in.cols;
    p.depth = c.depth;
    p.value_depth = in.value_depth;
    for (const RegularPtr& pattern : c.patterns) {
      p.patterns.push_back(pattern);
    }
    p.scale = in.scale;
    p.softcap = c.softcap;
    p.q = upload(in.q);
    p.k = upload(in.k);
    p.v = upload(in.v);
    p.o = upload(o);
    p.lse = upload(lse);
    p.slopes = upload(in.slopes);
    p.dropout = {c.dropout, static_cast<const std::int64_t*>(seed_at.data())};
    const auto broadcast = [&](MirroredTensor& t) {
      const TensorView at = t.upload();
      return attention_op::Bias{at.data, at.dtype, at.stride(0), at.stride(1), at.stride(2), at.stride(3)};
    };
    if (!in.bias.empty()) {
      d_bias = tensor(c.bias_dtype, in.bias.sizes());
      p.bias = broadcast(in.bias);
      b.d_bias = broadcast(d_bias);
      std::copy(c.bias.begin(), c.bias.end(), b.bias_sizes);
    }
    b.d_o = upload(in.d_o);
    b.d_lse = upload(in.d_lse);
    b.d_q = upload(d_q);
    b.d_k = upload(d_k);
    b.d_v = upload(d_v);
    Context context = Context::cuda(0);
    attention_op::cuda::forward(p, context);
    attention_op::cuda::backward(b, context);
    cuda::synchronize(nullptr);
    for (MirroredTensor* t : {&o, &lse, &d_q, &d_k, &d_v, &d_bias}) {
      if (!t->empty()) {
        t->download();
      }
    }
  }
};

/// Against the largest number there is, or 1 if that is more: sums of many terms may cancel.
void expect_near(const char* what, const Tensor& got, const Doubles& want, double tolerance) {
  EXPECT_TRUE(got.intact_around()) << what << " was written outside of itself";
  expect_close(got.values(), want, tolerance, what, 1.0);
}

void check(const Case& c, const std::string& name) {
  SCOPED_TRACE(name + " " + name_of(c.dtype) + " depth " + std::to_string(c.depth));
  const Index seed = 0x1234567890abcdef;
  Inputs in(c);
  const AttentionReference want = reference(c, in, seed);
  const Outcome got(c, in, seed);
  const double tolerance = c.dtype == DType::f32 ? 2e-5 : c.dtype == DType::f16 ? 4e-3 : 2.5e-2;
  expect_near("o", got.o, want.o, tolerance);
  expect_near("lse", got.lse, want.lse, c.dtype == DType::f32 ? 1e-5 : 1e-4);
  expect_near("d_q", got.d_q, want.d_q, tolerance);
  expect_near("d_k", got.d_k, want.d_k, tolerance);
  expect_near("d_v", got.d_v, want.d_v, tolerance);
  if (!in.bias.empty()) {
    // A bias that all keys of a row share has no gradient: what is left is the rounding of o, row by row.
    const double rows =
        c.bias[3] > 1 ? 0
                      : static_cast<double>(want.lse.size()) / static_cast<double>(c.bias[0] * c.bias[1] * c.bias[2]);
    expect_near("d_bias", got.d_bias, want.d_bias,
                std::max(tolerance, c.bias_dtype == DType::f32 ? 0 : 1e-2) * (1 + std::sqrt(rows)));
  }
}

constexpr DType kTypes[] = {DType::f32, DType::f16, DType::bf16};

class AttentionCuda : public testing::Test {
 protected:
  void SetUp() override {
    if (!cuda::available()) {
      GTEST_SKIP() << cuda::unavailable_reason();
    }
    scope_.emplace(0);
  }
  std::optional<cuda::DeviceScope> scope_;
};

struct Named {
  const char* name;
  RegularPtr pattern;
};

/// One of every kind, with sizes that no tile divides.
std::vector<Named> zoo() {
  const auto mask = [](Index rows, Index cols, double density) {
    return patterns::from_mask(rows, cols, random_mask(rows * cols, density, 7));
  };
  using patterns::Seq;
  const Index globals[] = {0, 77, 150}, lengths[] = {70, 1, 129, 33}, segments[] = {64, 128}, rates[] = {1, 2};
  const Index vertical[] = {3, 40, 100}, slash[] = {0, 1, 17, 64}, shape[] = {12, 17}, window[] = {5, 3}, one[] = {1},
              zero[] = {0}, two[] = {2};
  return {{"full", patterns::full(Seq(200, 333))},
          {"causal", patterns::causal(Seq(257, 257))},
          {"causal of few", patterns::causal(Seq(5, 300))},
          {"window", patterns::sliding_window(Seq(300, 300), 40, 9)},
          {"window that misses", patterns::sliding_window(Seq(200, 120, 0), 16, 8)},
          {"dilated", patterns::dilated(Seq(260), 20, 3)},
          {"strided", patterns::strided(Seq(300), 16)},
          {"fixed", patterns::fixed(Seq(200), 32, 4)},
          {"longformer", patterns::longformer(Seq(300), 12, globals)},
          {"block local", patterns::block_local(Seq(270), 48, 1)},
          {"longnet", patterns::longnet(Seq(256), segments, rates, 1)},
          {"documents", patterns::document(lengths, true)},
          {"sinks", patterns::sinks(Seq(290), 4, 50)},
          {"vertical slash", patterns::vertical_slash(Seq(200), vertical, slash)},
          {"axial", patterns::axial(13, 19)},
          {"neighbourhood", patterns::neighborhood(shape, window, one, zero)},
          {"dilated neighbourhood", patterns::neighborhood(shape, window, two, zero)},
          {"random", mask(190, 211, 0.1)},
          {"dense random", mask(100, 260, 0.9)}};
}

TEST_F(AttentionCuda, Patterns) {
  for (const auto& [name, pattern] : zoo()) {
    for (const DType dtype : kTypes) {
      check({.patterns = {pattern}, .dtype = dtype, .poison = true}, name);
    }
  }
}

TEST_F(AttentionCuda, Depths) {
  const RegularPtr pattern = patterns::sliding_window(patterns::Seq(150, 170), 60, 20);
  for (const DType dtype : kTypes) {
    for (const Index depth : {1, 8, 20, 33, 40, 64, 80, 96, 128, 160, 192, 256, 264, 330, 384, 512}) {
      check({.patterns = {pattern}, .dtype = dtype, .depth = depth}, "window");
    }
    for (const auto& [depth, wide] :
         {std::pair<Index, Index>{192, 128}, {64, 128}, {256, 64}, {40, 7}, {320, 512}, {512, 64}, {64, 300}}) {
      check({.patterns = {pattern}, .dtype = dtype, .depth = depth, .value_depth = wide}, "two depths");
    }
  }
}

TEST_F(AttentionCuda, Heads) {
  const patterns::Seq seq(140);
  const RegularPtr a = patterns::causal(seq), b = patterns::strided(seq, 16), c = patterns::sliding_window(seq, 3, 70);
  for (const DType dtype : kTypes) {
    check({.patterns = {a}, .dtype = dtype, .batch = 2, .heads = 6, .kv_heads = 2}, "groups");
    check({.patterns = {b}, .dtype = dtype, .batch = 2, .heads = 4, .kv_heads = 1}, "one key head");
    check({.patterns = {a, b, a, c}, .dtype = dtype, .batch = 2, .heads = 4, .kv_heads = 4}, "a pattern each");
    check({.patterns = {a, b, a, c}, .dtype = dtype, .batch = 2, .heads = 4, .kv_heads = 2, .poison = true},
          "a pattern each, groups");
    check({.patterns = {a, c, a, c}, .dtype = dtype, .heads = 4, .kv_heads = 2, .depth = 192}, "the same, deep");
    check(
        {.patterns = {a, b, a, c}, .dtype = dtype, .batch = 2, .heads = 4, .kv_heads = 2, .depth = 320, .poison = true},
        "the same, deeper");
  }
}

TEST_F(AttentionCuda, Extras) {
  const patterns::Seq seq(130, 150);
  for (const RegularPtr& pattern : {patterns::causal(seq), patterns::strided(seq, 8)}) {
    for (const DType dtype : kTypes) {
      Case c{.patterns = {pattern}, .dtype = dtype, .batch = 2, .heads = 4, .kv_heads = 2};
      const auto with = [&](const char* name, auto change) {
        Case changed = c;
        change(changed);
        check(changed, name);
      };
      with("scale", [](Case& x) { x.scale = 0.3; });
      with("negative scale", [](Case& x) { x.scale = -0.2; });
      with("softcap", [](Case& x) { x.softcap = 2; });
      with("alibi", [](Case& x) { x.slopes = true; });
      with("dropout", [](Case& x) { x.dropout = 0.3; });
      with("d_lse", [](Case& x) { x.d_lse = true; });
      with("all", [](Case& x) {
        x.softcap = 3;
        x.slopes = x.d_lse = true;
        x.dropout = 0.1;
        x.bias = {2, 4, 130, 150};
      });
      for (const Index depth : {160, 300}) {
        with("all, deep", [&](Case& x) {
          x.softcap = 3;
          x.slopes = x.d_lse = true;
          x.dropout = 0.1;
          x.bias = {2, 4, 130, 150};
          x.depth = depth;
        });
      }
    }
  }
}

TEST_F(AttentionCuda, Bias) {
  const patterns::Seq seq(100, 90);
  const RegularPtr a = patterns::sliding_window(seq, 30, 45), b = patterns::strided(seq, 8);
  const std::vector<Index> shapes[] = {{2, 4, 100, 90}, {1, 4, 100, 90}, {2, 1, 100, 90}, {1, 1, 100, 90},
                                       {1, 1, 1, 90},   {2, 4, 1, 90},   {1, 4, 100, 1},  {2, 1, 100, 1},
                                       {1, 4, 1, 1},    {1, 1, 1, 1}};
  for (const auto& sizes : shapes) {
    for (const DType dtype : kTypes) {
      for (const DType bias : {DType::f32, dtype}) {
        Case c{.patterns = {a}, .dtype = dtype, .batch = 2, .heads = 4, .kv_heads = 2, .bias = sizes};
        c.bias_dtype = bias;
        check(c, "bias " + shape_text(sizes));
      }
    }
    check({.patterns = {a, b, b, a}, .batch = 2, .heads = 4, .kv_heads = 2, .bias = sizes},
          "patterns, bias " + shape_text(sizes));
  }
}

TEST_F(AttentionCuda, Strides) {
  const RegularPtr pattern = patterns::strided(patterns::Seq(150), 16);
  for (const Lay lay : {Lay::heads_inside, Lay::odd}) {
    for (const DType dtype : kTypes) {
      for (const Index depth : {64, 36, 300}) {
        check({.patterns = {pattern}, .dtype = dtype, .batch = 2, .depth = depth, .lay = lay}, "strides");
      }
    }
  }
}

TEST_F(AttentionCuda, IsTheSameEveryTime) {
  Case c{.patterns = {patterns::longformer(patterns::Seq(500), 40, std::vector<Index>{0, 100})}, .heads = 8};
  c.kv_heads = 2;
  Inputs in(c);
  const Outcome first(c, in, 1);
  for (int n = 0; n < 20; ++n) {
    const Outcome again(c, in, 1);
    EXPECT_TRUE(first.o.same_bytes(again.o));
    EXPECT_TRUE(first.lse.same_bytes(again.lse));
    EXPECT_TRUE(first.d_q.same_bytes(again.d_q));
    EXPECT_TRUE(first.d_k.same_bytes(again.d_k));
    EXPECT_TRUE(first.d_v.same_bytes(again.d_v));
  }
}

TEST_F(AttentionCuda, RefusesFloat64) {
  Problem p;
  p.dtype = DType::f64;
  Context context = Context::cuda(0);
  EXPECT_THROW(attention_op::cuda::forward(p, context), Error);
}

}  // namespace
}  // namespace fretwork
