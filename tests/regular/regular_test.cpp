// The C++ door of attention, and SPLAT's operators on the CPU (and a GPU, where there is one) against their definition.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <span>
#include <vector>

#include "fretwork/fretwork.h"
#include "fretwork/patterns.h"
#include "support/device_tensor.h"
#include "support/error_text.h"

namespace fretwork {
namespace {

using Sizes = std::vector<std::int64_t>;

/// A tensor of NaN, with `room` elements between its rows that must stay so.
MirroredTensor empty(DType dtype, const Sizes& sizes, std::int64_t room = 3) {
  const std::int64_t row = sizes[3] + room;
  return {dtype, sizes, Sizes{sizes[1] * sizes[2] * row, sizes[2] * row, row, 1}, 128};
}
/// The same with numbers between −1 and 1.
MirroredTensor numbers(DType dtype, const Sizes& sizes, unsigned seed, std::int64_t room = 3) {
  MirroredTensor tensor = empty(dtype, sizes, room);
  std::mt19937 random(seed);
  tensor.randomise(random, std::uniform_real_distribution(-1.0, 1.0));
  return tensor;
}
/// NaN in a row from its entry `from` on.
void poison(Tensor& tensor, std::int64_t b, std::int64_t h, std::int64_t r, std::int64_t from = 0) {
  for (std::int64_t c = from; c < tensor.size(3); ++c) {
    tensor.set({b, h, r, c}, std::numeric_limits<double>::quiet_NaN());
  }
}

/// Calls f with views of the tensors on a device, and brings back what it wrote.
template <typename F, typename... Tensors>
void on(Device device, const F& f, Tensors&... tensors) {
  if (device.type == DeviceType::cpu) {
    Context context = Context::cpu();
    f(context, tensors.view...);
  } else {
    const cuda::DeviceScope scope(device.index);
    Context context = Context::cuda(device.index);
    (tensors.upload(), ...);
    f(context, tensors.device_view...);
    (tensors.download(context.stream), ...);
  }
}

std::vector<Device> devices() {
  std::vector<Device> all = {{DeviceType::cpu, 0}};
  if (cuda::available()) {
    all.push_back({DeviceType::cuda, 0});
  }
  return all;
}

void expect_near(double got, double want, DType dtype) {
  const double tolerance = dtype == DType::f64 ? 1e-14 : dtype == DType::f32 ? 4e-6 : dtype == DType::f16 ? 6e-4 : 4e-3;
  ASSERT_NEAR(got, want, tolerance * std::max(std::abs(want), 8.0));  // sums of hundreds of terms that cancel
}

/// Rows, batch 2, heads 4 on 2, against the definition. What the pattern does not use is NaN.
void check_operators(const RegularPtr& p, DType dtype, std::int64_t depth, Device device, std::int64_t room = 3) {
  const auto entries = p->entries();
  const auto row_of = [&](std::int64_t i) {
    const auto n = static_cast<std::size_t>(i);
    return std::span(entries.columns)
        .subspan(static_cast<std::size_t>(entries.first[n]),
                 static_cast<std::size_t>(entries.first[n + 1] - entries.first[n]));
  };
  const auto count_of = [&](std::int64_t i) { return static_cast<std::int64_t>(row_of(i).size()); };
  const std::int64_t m = p->rows(), n = p->cols(), width = r_width(p);
  MirroredTensor q = numbers(dtype, {2, 4, m, depth}, 1, room), k = numbers(dtype, {2, 2, n, depth}, 2, room);
  MirroredTensor x = numbers(dtype, {2, 4, m, width}, 3), scores = empty(dtype, {2, 4, m, width});
  MirroredTensor out = empty(dtype, {2, 4, m, depth}, room), turned = empty(dtype, {2, 2, n, depth}, room);
  MirroredTensor weights = empty(dtype, {2, 4, m, width});
  std::vector<bool> used(static_cast<std::size_t>(n));
  for (const std::int32_t j : entries.columns) {
    used[static_cast<std::size_t>(j)] = true;
  }
  for (std::int64_t head = 0; head < 2 * 4; ++head) {
    for (std::int64_t i = 0; i < m; ++i) {
      poison(x, head / 4, head % 4, i, count_of(i));
      if (count_of(i) == 0) {
        poison(q, head / 4, head % 4, i);
      }
    }
    for (std::int64_t j = 0; j < n; ++j) {
      if (!used[static_cast<std::size_t>(j)]) {
        poison(k, head / 4, head % 2, j);
      }
    }
  }
  on(
      device,
      [&](Context& c, const TensorView& a, const TensorView& b, const TensorView& y) { r_sddmm(a, b, p, y, c); }, q, k,
      scores);
  on(
      device, [&](Context& c, const TensorView& a, const TensorView& b, const TensorView& y) { r_spmm(a, b, p, y, c); },
      x, k, out);
  on(
      device,
      [&](Context& c, const TensorView& a, const TensorView& b, const TensorView& y) {
        r_spmm_transposed(a, b, p, y, c);
      },
      x, q, turned);
  on(
      device, [&](Context& c, const TensorView& a, const TensorView& y) { r_softmax(a, p, 1.5, y, c); }, x, weights);
  std::vector<double> sums(static_cast<std::size_t>(2 * 2 * n * depth));
  for (std::int64_t b = 0; b < 2; ++b) {
    for (std::int64_t h = 0; h < 4; ++h) {
      for (std::int64_t i = 0; i < m; ++i) {
        const std::int64_t count = count_of(i);
        std::vector<double> row(static_cast<std::size_t>(depth));
        double total = 0;
        for (std::int64_t t = 0; t < count; ++t) {
          total += std::exp(1.5 * x.get({b, h, i, t}));
        }
        for (std::int64_t t = 0; t < width; ++t) {
          const bool there = t < count;
          const std::int64_t j = there ? row_of(i)[static_cast<std::size_t>(t)] : 0;
          double dot = 0;
          for (std::int64_t d = 0; there && d < depth; ++d) {
            dot += q.get({b, h, i, d}) * k.get({b, h / 2, j, d});
            row[static_cast<std::size_t>(d)] += x.get({b, h, i, t}) * k.get({b, h / 2, j, d});
            sums[static_cast<std::size_t>(((b * 2 + h / 2) * n + j) * depth + d)] +=
                x.get({b, h, i, t}) * q.get({b, h, i, d});
          }
          expect_near(scores.get({b, h, i, t}), dot, dtype);
          expect_near(weights.get({b, h, i, t}), there ? std::exp(1.5 * x.get({b, h, i, t})) / total : 0, dtype);
        }
        for (std::int64_t d = 0; d < depth; ++d) {
          expect_near(out.get({b, h, i, d}), row[static_cast<std::size_t>(d)], dtype);
        }
      }
    }
  }
  for (std::size_t e = 0; e < sums.size(); ++e) {
    expect_near(turned.get(static_cast<std::int64_t>(e)), sums[e], dtype);
  }
  EXPECT_TRUE(scores.intact_around() && out.intact_around() && turned.intact_around() && weights.intact_around());
}

TEST(RegularOps, FollowTheirDefinition) {
  const std::int64_t start[] = {3, 0, 9, 1, 2}, stride[] = {2, 1, 1, 4, 3}, count[] = {3, 0, 1, 3, 2};
  const RegularPtr all[] = {patterns::causal({37, 50}),
                            patterns::dilated({45, 45}, 3, 4),
                            patterns::acsr(start, stride, count, 10),
                            patterns::full({3, 90}),
                            patterns::sliding_window({40, 700}, {}, 0),
                            patterns::strided({40, 61}, 7),
                            patterns::unite(patterns::dilated({45, 45}, 2, 5), patterns::strided({45, 45}, 6))};
  for (const Device device : devices()) {
    for (const DType dtype : {DType::f64, DType::f32, DType::f16, DType::bf16}) {
      if (device.type == DeviceType::cuda && dtype == DType::f64) {
        continue;
      }
      for (const auto& pattern : all) {
        check_operators(pattern, dtype, 17, device);
        check_operators(pattern, dtype, pattern->cols() > 100 ? 8 : 150, device);
      }
    }
  }
}

/// Operands of whole 16-byte chunks, as tiles on tensor cores take them: more lines than one has, of several strides,
/// remainders and lengths, with gaps between them, and some without entries; lines that several tiles share.
TEST(RegularOps, InTiles) {
  std::vector<std::int64_t> start, stride, count, same;
  for (std::int64_t i = 0; i < 150; ++i) {
    start.push_back(i % 30 == 7 ? 400 : i * 5 % 97);
    stride.push_back(i % 3 + 1);
    same.push_back(3);
    count.push_back(i % 11 == 0 ? 0 : i % 13 * 7);
  }
  const RegularPtr all[] = {patterns::causal({150, 200}),
                            patterns::dilated({333, 333}, 20, 4),
                            patterns::acsr(start, stride, count, 700),
                            patterns::acsr(start, same, count, 700),
                            patterns::full({70, 130}),
                            patterns::sliding_window({200, 260}, 33, 0),
                            patterns::sliding_window({129, 129}, 0, 0),
                            patterns::full({5, 256}),
                            patterns::full({3, 1000}),
                            patterns::full({3, 2001}),
                            patterns::full({3, 2056}),
                            patterns::strided({300, 330}, 9),
                            patterns::strided({500, 500}, 16),
                            patterns::axial(12, 15)};
  for (const Device device : devices()) {
    for (const DType dtype : {DType::f16, DType::bf16}) {
      for (const auto& pattern : all) {
        check_operators(pattern, dtype, 24, device, 8);
      }
      if (device.type == DeviceType::cpu) {
        break;
      }
      check_operators(all[1], dtype, 128, device, 0);
      check_operators(all[3], dtype, 200, device, 8);
      check_operators(all[5], dtype, 64, device, 0);
    }
  }
}

/// What a call of attention takes, each of which a test may spoil.
struct Call {
  std::vector<float> memory = std::vector<float>(4096);
  TensorView q{memory.data(), DType::f32, {2, 4, 8, 16}}, k{memory.data(), DType::f32, {2, 2, 12, 16}},
      v{memory.data(), DType::f32, {2, 2, 12, 8}}, out{memory.data(), DType::f32, {2, 4, 8, 8}},
      lse{memory.data(), DType::f32, {2, 4, 8}};
  std::vector<PatternPtr> patterns = {patterns::causal({8, 12})};
  AttentionOptions options;
  std::string error() {
    return error_of([&] {
      Context context = Context::cpu();
      attention(q, k, v, patterns, out, lse, context, options);
    });
  }
};

TEST(Attention, RefusesBadCalls) {
  Call call;
  call.q = TensorView(nullptr, DType::f32, {4, 8, 16});
  EXPECT_EQ(call.error(), "attention: q: expected 4 dimensions (B, Hq, Sq, D), got (4, 8, 16)");
  call = {};
  call.k.dtype = DType::f16;
  EXPECT_EQ(call.error(), "attention: k: expected float32 like q, got float16");
  call = {};
  call.patterns.assign(3, call.patterns[0]);
  EXPECT_EQ(
      call.error(),
      "attention: pattern: expected 1, 4, one for each query head, or 8, for each element of the batch too, got 3");
  call.patterns.assign(8, call.patterns[0]);
  EXPECT_EQ(call.error(), "no error");
  call = {};
  call.patterns = {patterns::causal(8)};
  EXPECT_EQ(call.error(), "attention: pattern: expected shape (8, 12), queries and keys of (B, H, S, D), got (8, 8)");
  call = {};
  call.lse = TensorView(nullptr, DType::f64, {2, 4, 8});
  EXPECT_EQ(call.error(), "attention: lse: expected float32, got float64");
  call = {};
  call.options.dropout = 1.0;
  EXPECT_EQ(call.error(), "attention: dropout: expected 0 or more and less than 1, got 1");
  call = {};
  call.options.dropout = 0.5;
  EXPECT_EQ(call.error(), "attention: dropout_seed: expected a seed where there is dropout, got none");
  call = {};
  const TensorView slopes(nullptr, DType::f32, {3});
  call.options.slopes = slopes;
  EXPECT_EQ(call.error(), "attention: slopes: expected shape (4,), got (3,)");
  call = {};
  const TensorView padding(call.memory.data(), DType::boolean, {2, 8});
  call.options.key_padding = padding;
  EXPECT_EQ(call.error(), "attention: key_padding_mask: expected shape (2, 12), got (2, 8)");
  EXPECT_EQ(Call().error(), "no error");
}

TEST(Attention, NeedsNoLse) {
  MirroredTensor q = numbers(DType::f32, {2, 4, 30, 16}, 1, 0), k = numbers(DType::f32, {2, 2, 40, 16}, 2, 0);
  MirroredTensor v = numbers(DType::f32, {2, 2, 40, 8}, 3, 0);
  const auto pattern = patterns::strided({30, 40}, 6);
  for (const Device device : devices()) {
    MirroredTensor with = empty(DType::f32, {2, 4, 30, 8}, 0), without = empty(DType::f32, {2, 4, 30, 8}, 0);
    MirroredTensor lse = empty(DType::f32, {1, 2, 4, 30}, 0);
    on(
        device,
        [&](Context& c, const TensorView& a, const TensorView& b, const TensorView& d, const TensorView& x,
            const TensorView& y, const TensorView& l) {
          const TensorView rows(l.data, DType::f32, {2, 4, 30}, l.device);
          attention(a, b, d, pattern, x, rows, c);
          attention(a, b, d, pattern, y, {}, c);
        },
        q, k, v, with, without, lse);
    EXPECT_TRUE(with.same_bytes(without));
    EXPECT_FALSE(std::ranges::any_of(with.values(), [](double x) { return std::isnan(x); }));
  }
}

}  // namespace
}  // namespace fretwork
