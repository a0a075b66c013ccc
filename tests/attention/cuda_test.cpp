// Attention and its gradients on a real GPU against float64 on the host, from the pattern's mask alone. Skipped where
// there is none.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "core/half.h"
#include "device/random.cuh"
#include "fretwork/error.h"
#include "fretwork/patterns.h"
#include "ops/attention/problem.h"
#include "runtime/cuda_driver.h"
#include "runtime/kernels.h"

namespace fretwork {
namespace {

using attention_op::BackwardProblem;
using attention_op::Operand;
using attention_op::Problem;
using Index = std::int64_t;
using Doubles = std::vector<double>;

constexpr double kInf = std::numeric_limits<double>::infinity(), kNan = std::numeric_limits<double>::quiet_NaN();

double get(DType dtype, const void* data, std::size_t at) {
  return dtype == DType::f32   ? static_cast<const float*>(data)[at]
         : dtype == DType::f16 ? float_from_f16(static_cast<const std::uint16_t*>(data)[at])
                               : float_from_bf16(static_cast<const std::uint16_t*>(data)[at]);
}
void set(DType dtype, void* data, std::size_t at, double x) {
  if (dtype == DType::f32) {
    static_cast<float*>(data)[at] = static_cast<float>(x);
  } else {
    static_cast<std::uint16_t*>(data)[at] =
        dtype == DType::f16 ? f16_from_float(static_cast<float>(x)) : bf16_from_float(static_cast<float>(x));
  }
}

/// How a tensor lies in memory: plainly, with heads inside rows, or with strides and a start that suit no vector.
enum class Lay { plain, heads_inside, odd };

/// A (batch, head, row, col) tensor on the host and on the device, between guards of NaN.
class Tensor {
 public:
  Tensor() = default;
  Tensor(DType dtype, const std::array<Index, 4>& sizes, Lay lay = Lay::plain) : dtype_(dtype), sizes_(sizes) {
    const auto [b, h, r, c] = sizes;
    const Index col = lay == Lay::odd ? 2 : 1, line = lay == Lay::odd ? 2 * c + 3 : c;
    if (lay == Lay::heads_inside) {
      strides_ = {r * h * line, line, h * line, col};
    } else {
      strides_ = {h * r * line, r * line, line, col};
    }
    first_ = kGuard + (lay == Lay::odd ? 1 : 0);
    bytes_.resize(static_cast<std::size_t>(b * h * r * line + 2 * kGuard + 1) * size_of(dtype));
    for (std::size_t n = 0; n < bytes_.size() / size_of(dtype); ++n) {
      set(dtype, bytes_.data(), n, kNan);
    }
  }
  bool there() const { return !bytes_.empty(); }
  const std::array<Index, 4>& sizes() const { return sizes_; }
  DType dtype() const { return dtype_; }
  Index count() const { return sizes_[0] * sizes_[1] * sizes_[2] * sizes_[3]; }
  std::size_t place(Index n) const {
    Index at = first_;
    for (std::size_t d = 4; d-- > 0;) {
      at += n % sizes_[d] * strides_[d];
      n /= sizes_[d];
    }
    return static_cast<std::size_t>(at);
  }
  void put(Index n, double x) { set(dtype_, bytes_.data(), place(n), x); }
  Doubles values() const {
    Doubles x;
    for (Index n = 0; n < count(); ++n) {
      x.push_back(get(dtype_, bytes_.data(), place(n)));
    }
    return x;
  }
  void randomise(unsigned seed, double scale = 1) {
    std::mt19937 random(seed);
    std::normal_distribution<double> numbers;
    for (Index n = 0; n < count(); ++n) {
      put(n, scale * numbers(random));
    }
  }
  /// Sends it to the device and says where it is.
  Operand upload() {
    if (!there()) {
      return {};
    }
    device_ = cuda::DeviceBuffer(0, bytes_.data(), bytes_.size());
    return {static_cast<char*>(device_.data()) + static_cast<std::size_t>(first_) * size_of(dtype_), strides_[0],
            strides_[1], strides_[2], strides_[3]};
  }
  void download() {
    cuda::copy_to_host(bytes_.data(), device_.data(), bytes_.size(), nullptr);
    cuda::synchronize(nullptr);
  }
  /// Everything that is not an element is NaN still.
  bool guarded() const {
    std::vector<bool> element(bytes_.size() / size_of(dtype_));
    for (Index n = 0; n < count(); ++n) {
      element[place(n)] = true;
    }
    for (std::size_t n = 0; n < element.size(); ++n) {
      if (!element[n] && !std::isnan(get(dtype_, bytes_.data(), n))) {
        return false;
      }
    }
    return true;
  }
  const std::vector<unsigned char>& bytes() const { return bytes_; }

 private:
  static constexpr Index kGuard = 64;
  DType dtype_ = DType::f32;
  std::array<Index, 4> sizes_{}, strides_{};
  Index first_ = 0;
  std::vector<unsigned char> bytes_;
  cuda::DeviceBuffer device_;
};

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
  Tensor q, k, v, d_o, d_lse, bias, slopes;
  std::vector<std::uint8_t> mask;  ///< (head, row, col)
  Index rows, cols, value_depth;
  double scale;

  explicit Inputs(const Case& c) {
    rows = c.patterns[0]->rows();
    cols = c.patterns[0]->cols();
    value_depth = c.value_depth > 0 ? c.value_depth : c.depth;
    scale = c.scale != 0 ? c.scale : 1 / std::sqrt(static_cast<double>(c.depth));
    q = Tensor(c.dtype, {c.batch, c.heads, rows, c.depth}, c.lay);
    k = Tensor(c.dtype, {c.batch, c.kv_heads, cols, c.depth}, c.lay);
    v = Tensor(c.dtype, {c.batch, c.kv_heads, cols, value_depth}, c.lay);
    d_o = Tensor(c.dtype, {c.batch, c.heads, rows, value_depth}, c.lay);
    q.randomise(1);
    k.randomise(2);
    v.randomise(3);
    d_o.randomise(4);
    if (c.d_lse) {
      d_lse = Tensor(DType::f32, {c.batch, c.heads, rows, 1});
      d_lse.randomise(5);
    }
    if (!c.bias.empty()) {
      bias = Tensor(c.bias_dtype, {c.bias[0], c.bias[1], c.bias[2], c.bias[3]});
      bias.randomise(6);
    }
    if (c.slopes) {
      slopes = Tensor(DType::f32, {1, c.heads, 1, 1});
      for (Index h = 0; h < c.heads; ++h) {
        slopes.put(h, 0.1 / static_cast<double>(h + 1));
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
    const auto [b, h, r, cols] = t.sizes();
    for (Index z = 0; z < b; ++z) {
      for (Index d = 0; d < cols; ++d) {
        t.put(((z * h + head) * r + row) * cols + d, x);
      }
    }
  }
};

struct Results {
  Doubles o, lse, d_q, d_k, d_v, d_bias;
};

/// Keeps what is asked about often: bias's element for (batch, head, row, col).
std::size_t bias_place(const std::vector<Index>& s, Index b, Index h, Index i, Index j) {
  return static_cast<std::size_t>(
      (((s[0] == 1 ? 0 : b) * s[1] + (s[1] == 1 ? 0 : h)) * s[2] + (s[2] == 1 ? 0 : i)) * s[3] + (s[3] == 1 ? 0 : j));
}

Results reference(const Case& c, const Inputs& in, Index seed) {
  const Doubles q = in.q.values(), k = in.k.values(), v = in.v.values(), d_o = in.d_o.values();
  const Doubles bias = in.bias.there() ? in.bias.values() : Doubles{},
                slopes = c.slopes ? in.slopes.values() : Doubles{};
  const Doubles d_lse = c.d_lse ? in.d_lse.values() : Doubles{};
  const Index rows = in.rows, cols = in.cols, depth = c.depth, wide = in.value_depth, ratio = c.heads / c.kv_heads;
  Results r{Doubles(d_o.size()), Doubles(static_cast<std::size_t>(c.batch * c.heads * rows)),
            Doubles(q.size()),   Doubles(k.size()),
            Doubles(v.size()),   Doubles(bias.size())};
  const auto threshold = static_cast<unsigned>(std::floor(c.dropout * 0x1p32));
  Doubles p(static_cast<std::size_t>(cols)), ds(static_cast<std::size_t>(cols)), slope(static_cast<std::size_t>(cols));
  for (Index b = 0; b < c.batch; ++b) {
    for (Index h = 0; h < c.heads; ++h) {
      for (Index i = 0; i < rows; ++i) {
        const Index row = (b * c.heads + h) * rows + i;
        const double *qi = q.data() + row * depth, *doi = d_o.data() + row * wide;
        const auto* there = in.mask.data() + (h * rows + i) * cols;
        const auto key = [&](Index j) { return (b * c.kv_heads + h / ratio) * cols + j; };
        double top = -kInf, total = 0;
        for (Index j = 0; j < cols; ++j) {
          if (there[j] == 0) {
            continue;
          }
          double s = 0;
          for (Index d = 0; d < depth; ++d) {
            s += qi[d] * k[static_cast<std::size_t>(key(j) * depth + d)];
          }
          s *= in.scale;
          slope[static_cast<std::size_t>(j)] = 1;
          if (c.softcap > 0) {
            const double t = std::tanh(s / c.softcap);
            s = c.softcap * t;
            slope[static_cast<std::size_t>(j)] = 1 - t * t;
          }
          if (!bias.empty()) {
            s += bias[bias_place(c.bias, b, h, i, j)];
          }
          if (c.slopes) {
            s -= slopes[static_cast<std::size_t>(h)] * std::abs(static_cast<double>(i + cols - rows - j));
          }
          p[static_cast<std::size_t>(j)] = s;
          top = std::max(top, s);
        }
        for (Index j = 0; j < cols; ++j) {
          if (there[j] != 0) {
            total += std::exp(p[static_cast<std::size_t>(j)] - top);
          }
        }
        const double lse = total > 0 ? top + std::log(total) : -kInf;
        r.lse[static_cast<std::size_t>(row)] = lse;
        const unsigned state = random_row(seed, b * c.heads + h, i);
        double delta = c.d_lse ? -d_lse[static_cast<std::size_t>(row)] : 0;
        const auto kept = [&](Index j) {
          return threshold == 0 ? 1.0 : random_bits(state, j) >= threshold ? 1 / (1 - c.dropout) : 0.0;
        };
        for (Index j = 0; j < cols; ++j) {
          if (there[j] == 0) {
            continue;
          }
          double& pj = p[static_cast<std::size_t>(j)];
          pj = std::exp(pj - lse);
          double dp = 0;
          for (Index d = 0; d < wide; ++d) {
            const double vj = v[static_cast<std::size_t>(key(j) * wide + d)];
            r.o[static_cast<std::size_t>(row * wide + d)] += pj * kept(j) * vj;
            dp += doi[d] * vj;
          }
          ds[static_cast<std::size_t>(j)] = dp * kept(j);
          delta += pj * dp * kept(j);
        }
        for (Index j = 0; j < cols; ++j) {
          if (there[j] == 0) {
            continue;
          }
          const double pj = p[static_cast<std::size_t>(j)], g = pj * (ds[static_cast<std::size_t>(j)] - delta);
          if (!bias.empty()) {
            r.d_bias[bias_place(c.bias, b, h, i, j)] += g;
          }
          const double gs = g * slope[static_cast<std::size_t>(j)] * in.scale;
          for (Index d = 0; d < depth; ++d) {
            r.d_q[static_cast<std::size_t>(row * depth + d)] += gs * k[static_cast<std::size_t>(key(j) * depth + d)];
            r.d_k[static_cast<std::size_t>(key(j) * depth + d)] += gs * qi[d];
          }
          for (Index d = 0; d < wide; ++d) {
            r.d_v[static_cast<std::size_t>(key(j) * wide + d)] += pj * kept(j) * doi[d];
          }
        }
      }
    }
  }
  return r;
}

/// The problem on the device with its results, run forward and backward.
struct Outcome {
  Tensor o, lse, d_q, d_k, d_v, d_bias;

  Outcome(const Case& c, Inputs& in, Index seed) {
    o = Tensor(c.dtype, in.d_o.sizes(), c.lay);
    lse = Tensor(DType::f32, {c.batch, c.heads, in.rows, 1});
    d_q = Tensor(c.dtype, in.q.sizes(), c.lay);
    d_k = Tensor(c.dtype, in.k.sizes(), c.lay);
    d_v = Tensor(c.dtype, in.v.sizes(), c.lay);
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
    p.q = in.q.upload();
    p.k = in.k.upload();
    p.v = in.v.upload();
    p.o = o.upload();
    p.lse = lse.upload();
    p.slopes = in.slopes.upload();
    p.dropout = {c.dropout, static_cast<const std::int64_t*>(seed_at.data())};
    const auto broadcast = [&](Tensor& t) {
      const Operand at = t.upload();
      const auto& s = t.sizes();
      return attention_op::Bias{at.data,
                                t.dtype(),
                                s[0] == 1 ? 0 : at.batch,
                                s[1] == 1 ? 0 : at.head,
                                s[2] == 1 ? 0 : at.row,
                                s[3] == 1 ? 0 : at.col};
    };
    if (in.bias.there()) {
      d_bias = Tensor(c.bias_dtype, in.bias.sizes());
      p.bias = broadcast(in.bias);
      b.d_bias = broadcast(d_bias);
      std::copy(c.bias.begin(), c.bias.end(), b.bias_sizes);
    }
    b.d_o = in.d_o.upload();
    b.d_lse = in.d_lse.upload();
    b.d_q = d_q.upload();
    b.d_k = d_k.upload();
    b.d_v = d_v.upload();
    Context context = Context::cuda(0);
    attention_op::cuda::forward(p, context);
    attention_op::cuda::backward(b, context);
    cuda::synchronize(nullptr);
    for (Tensor* t : {&o, &lse, &d_q, &d_k, &d_v, &d_bias}) {
      if (t->there()) {
        t->download();
      }
    }
  }
};

/// The largest difference, against the largest number there is.
void expect_near(const char* what, const Tensor& got, const Doubles& want, double tolerance) {
  EXPECT_TRUE(got.guarded()) << what << " was written outside of itself";
  const Doubles x = got.values();
  ASSERT_EQ(x.size(), want.size());
  double largest = 1, worst = 0;  // sums of many terms may cancel
  std::size_t at = 0;
  for (std::size_t n = 0; n < x.size(); ++n) {
    if (want[n] == x[n]) {
      continue;  // infinities
    }
    largest = std::max(largest, std::abs(want[n]));
    const double difference = std::abs(x[n] - want[n]);
    if (!(difference <= worst)) {
      worst = difference;
      at = n;
    }
    if (std::isnan(x[n])) {
      break;
    }
  }
  EXPECT_LE(worst, tolerance * largest) << what << " differs at " << at << " of " << x.size() << ": " << x[at]
                                        << ", expected " << want[at];
}

void check(const Case& c, const std::string& name) {
  SCOPED_TRACE(name + " " + name_of(c.dtype) + " depth " + std::to_string(c.depth));
  const Index seed = 0x1234567890abcdef;
  Inputs in(c);
  const Results want = reference(c, in, seed);
  const Outcome got(c, in, seed);
  const double tolerance = c.dtype == DType::f32 ? 2e-5 : c.dtype == DType::f16 ? 4e-3 : 2.5e-2;
  expect_near("o", got.o, want.o, tolerance);
  expect_near("lse", got.lse, want.lse, c.dtype == DType::f32 ? 1e-5 : 1e-4);
  expect_near("d_q", got.d_q, want.d_q, tolerance);
  expect_near("d_k", got.d_k, want.d_k, tolerance);
  expect_near("d_v", got.d_v, want.d_v, tolerance);
  if (in.bias.there()) {
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
    std::mt19937 random(7);
    std::bernoulli_distribution coin(density);
    std::vector<std::uint8_t> bits(static_cast<std::size_t>(rows * cols));
    for (auto& bit : bits) {
      bit = coin(random);
    }
    return patterns::from_mask(rows, cols, bits);
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
    for (const Index depth : {1, 8, 20, 33, 40, 64, 80, 96, 128, 160, 192, 256}) {
      check({.patterns = {pattern}, .dtype = dtype, .depth = depth}, "window");
    }
    for (const auto& [depth, wide] : {std::pair<Index, Index>{192, 128}, {64, 128}, {256, 64}, {40, 7}}) {
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
      with("all, deep", [](Case& x) {
        x.softcap = 3;
        x.slopes = x.d_lse = true;
        x.dropout = 0.1;
        x.bias = {2, 4, 130, 150};
        x.depth = 160;
      });
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
      for (const Index depth : {64, 36}) {
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
    EXPECT_EQ(first.o.bytes(), again.o.bytes());
    EXPECT_EQ(first.lse.bytes(), again.lse.bytes());
    EXPECT_EQ(first.d_q.bytes(), again.d_q.bytes());
    EXPECT_EQ(first.d_k.bytes(), again.d_k.bytes());
    EXPECT_EQ(first.d_v.bytes(), again.d_v.bytes());
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
