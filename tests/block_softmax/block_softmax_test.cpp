// Block softmax against a float64 reference made from the layout's mask alone.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <set>
#include <vector>

#include "fretwork/fretwork.h"
#include "ops/block_softmax/problem.h"
#include "runtime/kernels.h"
#include "support/error_text.h"
#include "support/reference.h"
#include "support/tensor.h"

namespace fretwork {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity(), kNan = std::numeric_limits<double>::quiet_NaN();
constexpr DType kFloating[] = {DType::f64, DType::f32, DType::f16, DType::bf16};

/// Contiguous, with gaps in every dimension, or with the last two dimensions swapped.
enum class Lay { plain, gaps, turned };

Tensor tensor(DType dtype, const std::vector<std::int64_t>& sizes, Lay lay = Lay::plain) {
  return Tensor(dtype, sizes,
                lay == Lay::gaps     ? MemoryLayout{.step = 2, .gap = 3}
                : lay == Lay::turned ? MemoryLayout::transposed(sizes.size())
                                     : MemoryLayout{});
}

using Doubles = std::vector<double>;

/// Broadcast read of a dense extra at (z, h, m, n).
struct Extra {
  std::vector<std::int64_t> sizes;  ///< four of them, each 1 or full
  Doubles x;
  std::size_t at(std::int64_t z, std::int64_t h, std::int64_t m, std::int64_t n) const {
    const auto k = [&](std::size_t d, std::int64_t i) { return sizes[d] == 1 ? 0 : i; };
    return static_cast<std::size_t>(((k(0, z) * sizes[1] + k(1, h)) * sizes[2] + k(2, m)) * sizes[3] + k(3, n));
  }
};

/// The dense problem: shape, mask, and the place of each packed element.
struct Dense {
  explicit Dense(const BlockLayout& layout, std::int64_t batch)
      : z(batch),
        h(layout.shape()[0]),
        m(layout.shape()[1]),
        n(layout.shape()[2]),
        mask(mask_of(layout)),
        place(dense_places(layout)) {}
  Doubles spread(const Doubles& values, double fill) const {
    Doubles dense(static_cast<std::size_t>(z * h * m * n), fill);
    for (std::size_t k = 0; k < values.size(); ++k) {
      dense[k / place.size() * mask.size() + place[k % place.size()]] = values[k];
    }
    return dense;
  }
  Doubles collect(const Doubles& dense) const {
    Doubles values(static_cast<std::size_t>(z) * place.size());
    for (std::size_t k = 0; k < values.size(); ++k) {
      values[k] = dense[k / place.size() * mask.size() + place[k % place.size()]];
    }
    return values;
  }
  std::int64_t z, h, m, n;
  std::vector<std::uint8_t> mask;
  std::vector<std::size_t> place;
};

struct Mask {
  Extra extra;
  MaskMode mode;
};

Doubles reference(const Dense& d, const Doubles& values, double scale, const Extra* rpe,
                  const std::vector<Mask>& masks) {
  Doubles x = d.spread(values, kNan);
  for (std::int64_t row = 0; row < d.z * d.h * d.m; ++row) {
    const std::int64_t z = row / (d.h * d.m), h = row / d.m % d.h, m = row % d.m;
    double* const r = x.data() + row * d.n;
    double top = -kInf, sum = 0;
    for (std::int64_t n = 0; n < d.n; ++n) {
      r[n] = r[n] * scale + (rpe != nullptr ? rpe->x[rpe->at(z, h, m, n)] : 0.0);
      for (const auto& mask : masks) {
        const double e = mask.extra.x[mask.extra.at(z, h, m, n)];
        r[n] = mask.mode == MaskMode::add ? r[n] + e : e == 0 ? -kInf : r[n];
      }
      if (d.mask[static_cast<std::size_t>((h * d.m + m) * d.n + n)] == 0) {
        r[n] = -kInf;
      }
      top = std::max(top, r[n]);
    }
    for (std::int64_t n = 0; n < d.n; ++n) {
      sum += r[n] = top == -kInf ? 0.0 : std::exp(r[n] - top);
    }
    for (std::int64_t n = 0; n < d.n; ++n) {
      r[n] = sum == 0 ? 0.0 : r[n] / sum;
    }
  }
  return d.collect(x);
}

/// d of the header's formula, dense, zeros where no block is.
Doubles reference_gradient(const Dense& d, const Doubles& out, const Doubles& d_out) {
  Doubles p = d.spread(out, 0.0), g = d.spread(d_out, 0.0);
  for (std::int64_t row = 0; row < d.z * d.h * d.m; ++row) {
    double dot = 0;
    for (std::int64_t k = row * d.n; k < (row + 1) * d.n; ++k) {
      const auto at = static_cast<std::size_t>(k);
      dot += p[at] == 0 ? 0.0 : p[at] * g[at];
    }
    for (std::int64_t k = row * d.n; k < (row + 1) * d.n; ++k) {
      const auto at = static_cast<std::size_t>(k);
      p[at] = p[at] == 0 ? 0.0 : p[at] * (g[at] - dot);
    }
  }
  return p;
}

class Random {
 public:
  double normal() { return normal_(engine_); }
  Doubles normals(std::int64_t count) {
    Doubles x(static_cast<std::size_t>(count));
    for (auto& v : x) {
      v = normal();
    }
    return x;
  }
  bool chance(double p) { return std::uniform_real_distribution<>(0, 1)(engine_) < p; }

 private:
  std::mt19937_64 engine_{std::random_device{}()};
  std::normal_distribution<> normal_;
};

std::int64_t product(const std::vector<std::int64_t>& sizes) {
  std::int64_t n = 1;
  for (const auto s : sizes) {
    n *= s;
  }
  return n;
}

/// A layout with a full head, an empty one and a mixed one with an empty row.
std::shared_ptr<const BlockLayout> some_layout(std::int64_t r, std::int64_t c) {
  const std::uint8_t mask[] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0,
                               0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 1, 0, 1, 0, 1, 0, 0};
  return BlockLayout::make({3, 4, 3, r, c}, mask);
}

struct Case {
  DType dtype = DType::f32, extra_dtype = DType::f32;
  std::vector<std::int64_t> rpe{};  ///< shape; empty is none
  int key = 0, attn = 0;            ///< 0 none, 1 add, 2 mul, 3 mul bool; attn + 10 is per head
  double scale = 1.0;
  Lay lay = Lay::plain;
  std::int64_t r = 16, c = 16, batch = 2;
  bool has_z = true;
  std::shared_ptr<const BlockLayout> layout{};  ///< some_layout(r, c) unless given
};

Doubles mask_values(Random& random, const std::vector<std::int64_t>& sizes, int kind) {
  Doubles x = random.normals(product(sizes));
  for (std::size_t k = 0; k < x.size(); ++k) {
    const bool dead_row = sizes.size() > 1 && sizes[sizes.size() - 2] > 5 &&
                          static_cast<std::int64_t>(k) / sizes.back() % sizes[sizes.size() - 2] == 5;
    const bool off = random.chance(0.3) || dead_row;
    x[k] = kind % 10 == 1 ? (off ? -kInf : x[k]) : off ? 0.0 : 1.5;
  }
  return x;
}

std::vector<std::int64_t> four(std::vector<std::int64_t> sizes) {
  sizes.insert(sizes.begin(), 4 - sizes.size(), 1);
  return sizes;
}

/// Forward and backward of one case, checked against the reference; every buffer is guarded.
void check(const Case& c, Executor& executor = serial_executor()) {
  Random random;
  const auto layout = c.layout != nullptr ? c.layout : some_layout(c.r, c.c);
  const Dense d(*layout, c.batch);
  Context context = Context::cpu(executor);
  std::vector<std::int64_t> shape = {c.batch, layout->nnz(), c.r, c.c};
  if (!c.has_z) {
    shape.erase(shape.begin());
  }
  Tensor values = tensor(c.dtype, shape, c.lay), out = tensor(c.dtype, shape, c.lay);
  values.assign(random.normals(product(shape)));
  SoftmaxOptions options;
  options.scale = c.scale;
  Tensor rpe = tensor(c.extra_dtype, c.rpe, c.lay);
  const std::vector<std::int64_t> key_shape = {c.batch, d.n};
  const std::vector<std::int64_t> attn_shape = c.attn > 10 ? std::vector{d.h, d.m, d.n} : std::vector{d.m, d.n};
  const auto mask_dtype = [&](int kind) { return kind % 10 == 3 ? DType::boolean : c.extra_dtype; };
  Tensor key = tensor(mask_dtype(c.key), key_shape, c.lay), attn = tensor(mask_dtype(c.attn), attn_shape, c.lay);
  Extra rpe_extra;
  std::vector<Mask> masks;
  if (!c.rpe.empty()) {
    rpe.assign(random.normals(product(c.rpe)));
    options.rpe = rpe.view;
    rpe_extra = {four(c.rpe), rpe.values()};
  }
  if (c.key != 0) {
    key.assign(mask_values(random, key_shape, c.key));
    options.key_padding_mask = key.view;
    options.key_padding_mask_mode = c.key == 1 ? MaskMode::add : MaskMode::mul;
    masks.push_back({{{c.batch, 1, 1, d.n}, key.values()}, options.key_padding_mask_mode});
  }
  if (c.attn != 0) {
    attn.assign(mask_values(random, attn_shape, c.attn));
    options.attn_mask = attn.view;
    options.attn_mask_mode = c.attn % 10 == 1 ? MaskMode::add : MaskMode::mul;
    masks.push_back({{four(attn_shape), attn.values()}, options.attn_mask_mode});
  }
  const auto values_before = values.storage();
  block_softmax(values.view, layout, out.view, context, options);
  const Doubles want = reference(d, values.values(), c.scale, c.rpe.empty() ? nullptr : &rpe_extra, masks);
  expect_close(out.values(), want, relative_tolerance(c.dtype), "out");
  EXPECT_TRUE(out.intact_around() && values.storage() == values_before);

  Tensor d_out = tensor(c.dtype, shape, c.lay), d_values = tensor(c.dtype, shape, c.lay);
  Tensor d_rpe = tensor(c.extra_dtype, c.rpe, c.lay);
  Doubles upstream = random.normals(product(shape));
  const Doubles out_now = out.values();
  for (std::size_t k = 0; k < upstream.size(); ++k) {
    upstream[k] = out_now[k] == 0 ? kNan : upstream[k];  // where nothing came out, nothing may count
  }
  d_out.assign(upstream);
  const auto d_out_before = d_out.storage();
  block_softmax_backward(out.view, d_out.view, layout, c.scale, d_values.view,
                         c.rpe.empty() ? std::nullopt : std::optional(d_rpe.view), context);
  const Doubles gradient = reference_gradient(d, out_now, d_out.values());
  Doubles scaled = d.collect(gradient);
  for (double& g : scaled) {
    g *= c.scale;
  }
  expect_close(d_values.values(), scaled, relative_tolerance(c.dtype), "d_values");
  EXPECT_TRUE(d_values.intact_around() && d_rpe.intact_around() && d_out.storage() == d_out_before);
  if (!c.rpe.empty()) {
    Extra sum{four(c.rpe), Doubles(static_cast<std::size_t>(product(c.rpe)))};
    Doubles sizes_summed(sum.x.size());  // a sum over columns cancels to nothing, so errors are measured by its terms
    for (std::size_t k = 0; k < gradient.size(); ++k) {
      const auto n = static_cast<std::int64_t>(k);
      const std::size_t at = sum.at(n / (d.h * d.m * d.n), n / (d.m * d.n) % d.h, n / d.n % d.m, n % d.n);
      sum.x[at] += gradient[k];
      sizes_summed[at] += std::abs(gradient[k]);
    }
    expect_close(d_rpe.values(), sum.x, std::max(relative_tolerance(c.dtype), relative_tolerance(c.extra_dtype)),
                 "d_rpe", largest_magnitude(sizes_summed));
  }
}

TEST(BlockSoftmax, EveryBlockAndType) {
  const std::pair<int, int> blocks[] = {{8, 8}, {16, 16}, {32, 32}, {64, 64}, {16, 32}, {64, 8}, {9, 11}, {8, 128}};
  for (const auto& [r, c] : blocks) {
    for (const DType dtype : kFloating) {
      SCOPED_TRACE(std::string(name_of(dtype)) + " " + std::to_string(r) + "x" + std::to_string(c));
      check({.dtype = dtype, .extra_dtype = dtype, .rpe = {2, 3, 4 * r, 3 * c}, .scale = 0.5, .r = r, .c = c});
      check({.dtype = dtype, .r = r, .c = c});
    }
  }
}

TEST(BlockSoftmax, EveryExtra) {
  const std::vector<std::int64_t> rpes[] = {{},  {2, 3, 64, 48}, {64, 48}, {2, 1, 1, 48}, {3, 64, 1},
                                            {1}, {2, 1, 64, 48}};
  std::size_t turn = 0;
  for (const DType dtype : kFloating) {
    for (const auto& rpe : rpes) {
      for (const int key : {0, 1, 2, 3}) {
        for (const int attn : {0, 1, 2, 3, 11, 12, 13}) {
          const DType extra = kFloating[turn++ % 4];  // 4 and 7 have no common factor, so every pair comes
          SCOPED_TRACE(std::string(name_of(dtype)) + " " + name_of(extra) + " " + shape_text(rpe) + " " +
                       std::to_string(key) + " " + std::to_string(attn));
          check({.dtype = dtype, .extra_dtype = extra, .rpe = rpe, .key = key, .attn = attn, .scale = -0.3});
        }
      }
    }
  }
}

TEST(BlockSoftmax, AnyStrides) {
  for (const Lay lay : {Lay::gaps, Lay::turned}) {
    for (const DType dtype : kFloating) {
      SCOPED_TRACE(name_of(dtype));
      check({.dtype = dtype, .extra_dtype = dtype, .rpe = {2, 3, 64, 48}, .key = 1, .attn = 13, .lay = lay});
      check({.dtype = dtype, .extra_dtype = dtype, .rpe = {64, 1}, .key = 3, .attn = 1, .lay = lay});
    }
  }
}

TEST(BlockSoftmax, LongLines) {
  constexpr std::int64_t kCols = 200;
  std::vector<std::uint8_t> mask(4 * kCols);
  const std::int64_t lengths[] = {20, kCols, 1, 70};
  for (std::size_t i = 0; i < 4; ++i) {
    for (std::int64_t n = 0; n < lengths[i]; ++n) {
      mask[i * kCols + static_cast<std::size_t>(n * 3 % kCols)] = 1;  // 3 and 200 have no common factor
    }
  }
  for (const std::int64_t cols : {kCols, std::int64_t{40}}) {  // the second has lines of 20 and 40
    std::vector<std::uint8_t> part;
    for (std::size_t i = 0; i < 4; ++i) {
      part.insert(part.end(), mask.begin() + static_cast<std::ptrdiff_t>(i * kCols),
                  mask.begin() + static_cast<std::ptrdiff_t>(i * kCols) + cols);
    }
    const auto layout = BlockLayout::make({1, 4, cols, 8, 16}, part);
    for (const DType dtype : kFloating) {
      SCOPED_TRACE(name_of(dtype));
      check({.dtype = dtype, .scale = 3.0, .r = 8, .c = 16, .batch = 1, .layout = layout});
      check(
          {.dtype = dtype, .extra_dtype = dtype, .rpe = {32, 16 * cols}, .key = 2, .r = 8, .c = 16, .layout = layout});
    }
  }
}

TEST(BlockSoftmax, WithoutZ) { check({.rpe = {3, 64, 48}, .key = 1, .batch = 1, .has_z = false}); }

TEST(BlockSoftmax, ZeroSizes) {
  check({.rpe = {64, 48}, .key = 2, .attn = 1, .batch = 0});
  check({.rpe = {0, 3, 64, 48}, .batch = 0});
  const std::uint8_t none[] = {0, 0, 0, 0};
  const auto empty = BlockLayout::make({1, 2, 2, 8, 8}, none);
  Context context = Context::cpu();
  Tensor values(DType::f32, {2, 0, 8, 8}), d_rpe(DType::f32, {16, 16});
  block_softmax(values.view, empty, values.view, context);
  block_softmax_backward(values.view, values.view, empty, 1.0, values.view, d_rpe.view, context);
  EXPECT_EQ(d_rpe.values(), Doubles(256, 0.0));
  const auto nothing = BlockLayout::make({0, 2, 2, 8, 8}, {});
  Tensor d_one(DType::f32, {1, 16, 16});
  block_softmax_backward(values.view, values.view, nothing, 1.0, values.view, d_one.view, context);
  EXPECT_EQ(d_one.values(), Doubles(256, 0.0));
}

TEST(BlockSoftmax, NanThatDoesNotCount) {
  Random random;
  const auto layout = some_layout(16, 16);
  const Dense d(*layout, 1);
  Context context = Context::cpu();
  const std::vector<std::int64_t> shape = {1, layout->nnz(), 16, 16};
  for (const DType dtype : kFloating) {
    Tensor values(dtype, shape), out(dtype, shape), rpe(dtype, {3, 64, 48}), add(dtype, {3, 64, 48}),
        key(dtype, {1, 48});
    Doubles key_x(48), rpe_x = random.normals(3 * 64 * 48), add_x = random.normals(3 * 64 * 48);
    for (std::size_t k = 0; k < 48; ++k) {
      key_x[k] = random.chance(0.5);
    }
    for (std::size_t k = 0; k < rpe_x.size(); ++k) {
      if (d.mask[k] == 0) {
        rpe_x[k] = add_x[k] = kNan;
      } else if (key_x[k % 48] == 0) {
        add_x[k] = k % 2 == 0 ? kNan : kInf;
      }
    }
    Doubles x = random.normals(product(shape));
    for (std::size_t k = 0; k < x.size(); ++k) {
      x[k] = key_x[d.place[k] % 48] == 0 ? kNan : x[k];
    }
    values.assign(x), rpe.assign(rpe_x), add.assign(add_x), key.assign(key_x);
    SoftmaxOptions options{.rpe = rpe.view, .key_padding_mask = key.view, .attn_mask = add.view};
    options.key_padding_mask_mode = MaskMode::mul;
    block_softmax(values.view, layout, out.view, context, options);
    const Extra rpe_extra{{1, 3, 64, 48}, rpe.values()};
    const std::vector<Mask> masks = {{{{1, 3, 64, 48}, add.values()}, MaskMode::add},
                                     {{{1, 1, 1, 48}, key.values()}, MaskMode::mul}};
    expect_close(out.values(), reference(d, values.values(), 1.0, &rpe_extra, masks), relative_tolerance(dtype),
                 name_of(dtype));
  }
}

TEST(BlockSoftmax, InfiniteAndLargeValues) {
  const std::uint8_t mask[] = {1, 0, 1};
  const auto layout = BlockLayout::make({1, 1, 3, 8, 8}, mask);
  Context context = Context::cpu();
  for (const DType dtype : kFloating) {
    Tensor values(dtype, {2, 8, 8}), out(dtype, {2, 8, 8});
    Doubles x(128, 1024.0);
    for (std::size_t k = 0; k < 8; ++k) {
      x[k] = x[64 + k] = -kInf;              // row 0: nothing left
      x[16 + k] = k == 3 ? 1040.0 : 1024.0;  // row 2: times 64 is past float16's range
      x[24 + k] = k == 0 ? kNan : -kInf;     // row 3: a NaN that counts must show
      x[64 + 24 + k] = -kInf;
      x[32 + k] = x[64 + 32 + k] = -60000.0;  // row 4: all very low
    }
    values.assign(x);
    block_softmax(values.view, layout, out.view, context, {.scale = 64.0});
    const Doubles got = out.values();
    for (std::size_t k = 0; k < 8; ++k) {
      EXPECT_EQ(got[k], 0.0);
      EXPECT_NEAR(got[8 + k], 1.0 / 16, 1e-3);
      EXPECT_EQ(got[16 + k], k == 3 ? 1.0 : 0.0);
      EXPECT_TRUE(std::isnan(got[24 + k]));
      EXPECT_NEAR(got[32 + k], 1.0 / 16, 1e-3);
    }
  }
}

TEST(BlockSoftmax, EveryKernelIsListed) {
  std::set<std::string> listed;
  for (const ListedKernel& kernel : all_kernels("sm_80")) {
    listed.insert(kernel.spec.instance);
  }
  using namespace block_softmax_op;
  std::mt19937 random(7);
  const auto one_of = [&](std::int64_t first, std::int64_t last) {
    return std::uniform_int_distribution(first, last)(random);
  };
  // Only types, strides and whether data is aligned matter; nothing is read.
  const auto at = [&] { return reinterpret_cast<void*>(one_of(0, 7) == 0 ? 0x1002 : 0x1000); };
  for (int n = 0; n < 3000; ++n) {
    const auto size = [&] { return one_of(0, 1) == 0 ? std::int64_t{8} << one_of(0, 4) : one_of(8, 128); };
    const auto layout = random_blocks({1, 1, 1, size(), size()}, 1.0, 1);
    const std::int64_t cols = layout->sizes().block_cols, rows = layout->sizes().block_rows;
    const auto packed = [&]() -> Packed { return {at(), rows * cols, rows * cols, cols, 1}; };
    const auto extra = [&](MaskMode mode) -> block_softmax_op::Dense {
      const bool boolean = mode == MaskMode::mul && one_of(0, 1) == 0;
      return {
          one_of(0, 1) == 0 ? nullptr : at(), boolean ? DType::boolean : kFloating[one_of(0, 3)], 0, 0, cols, 1, mode};
    };
    Problem problem{kFloating[one_of(0, 3)], layout.get(), 1, 1.0, packed(), packed(), extra(MaskMode::add), {}, {}};
    problem.key_padding = extra(one_of(0, 1) == 0 ? MaskMode::add : MaskMode::mul);
    problem.attn = extra(one_of(0, 1) == 0 ? MaskMode::add : MaskMode::mul);
    const BackwardProblem backward{problem.dtype, layout.get(), 1, 1.0, packed(), packed(), packed(), {}, {}};
    const int length = static_cast<int>(std::exp2(static_cast<double>(one_of(0, 1400)) / 100));
    const auto kernel = [&](const auto& any) { return block_softmax_op::cuda::kernel_name(any, length); };
    for (const std::string& name : {kernel(problem), kernel(backward)}) {
      EXPECT_TRUE(listed.contains(name)) << name;
    }
  }
}

TEST(BlockSoftmax, BadCalls) {
  const auto layout = some_layout(16, 16);  // 17 blocks, (3, 64, 48)
  Context context = Context::cpu();
  const std::int64_t nnz = layout->nnz();
  const std::string n = std::to_string(nnz);
  Tensor values(DType::f32, {1, nnz, 16, 16}), out(DType::f32, {1, nnz, 16, 16});
  const auto call = [&](const TensorView& v, const SoftmaxOptions& options = {}) {
    return error_of([&] { block_softmax(v, layout, out.view, context, options); });
  };
  Tensor dense(DType::f32, {1, 3, 64, 48}), more(DType::f32, {1, nnz + 1, 16, 16}), whole(DType::i8, {1, nnz, 16, 16});
  EXPECT_EQ(call(dense.view), "block_softmax: values: expected packed blocks (" + n + ", 16, 16) or (Z, " + n +
                                  ", 16, 16), got (1, 3, 64, 48)");
  EXPECT_NE(call(more.view).find("block_softmax: values: expected packed blocks"), std::string::npos);
  EXPECT_EQ(call(whole.view), "block_softmax: values: expected float64, float32, float16 or bfloat16, got int8");
  Tensor bad_rpe(DType::f32, {1, 3, 48, 64}), bad_heads(DType::f32, {2, 64, 48}), whole_rpe(DType::i8, {64, 48});
  EXPECT_EQ(call(values.view, {.rpe = bad_rpe.view}),
            "block_softmax: rpe: expected a shape that broadcasts to (1, 3, 64, 48), got (1, 3, 48, 64)");
  EXPECT_NE(call(values.view, {.rpe = bad_heads.view}).find("block_softmax: rpe"), std::string::npos);
  EXPECT_NE(call(values.view, {.rpe = whole_rpe.view}).find("got int8"), std::string::npos);
  Tensor bad_key(DType::f32, {2, 48});
  EXPECT_EQ(call(values.view, {.key_padding_mask = bad_key.view}),
            "block_softmax: key_padding_mask: expected shape (1, 48), got (2, 48)");
  EXPECT_EQ(call(values.view, {.attn_mask = bad_heads.view}),
            "block_softmax: attn_mask: expected shape (64, 48) or (3, 64, 48), got (2, 64, 48)");
  TensorView elsewhere = values.view;
  elsewhere.device = {DeviceType::cuda, 1};
  EXPECT_EQ(call(elsewhere), "block_softmax: values: expected a tensor on cpu, got one on cuda:1");
  Tensor half(DType::f16, {1, nnz, 16, 16});
  EXPECT_EQ(error_of([&] { block_softmax_backward(values.view, half.view, layout, 1.0, out.view, {}, context); }),
            "block_softmax_backward: d_out: expected float32, got float16");
}

}  // namespace
}  // namespace fretwork
