// The block-sparse convolution and its gradients on the CPU against plain float64 loops over the definition.
#include <gtest/gtest.h>

#include <cmath>
#include <numeric>
#include <random>

#include "fretwork/fretwork.h"
#include "support/error_text.h"
#include "support/reference.h"
#include "support/seed.h"
#include "support/tensor.h"
#include "support/threads.h"

namespace fretwork {
namespace {

using Index = std::vector<std::int64_t>;

using Form = MemoryLayout;
const Form kPlain{}, kChannelsLast{{0, 2, 3, 1}};

enum class Op { forward, backward_x, backward_values };

struct Case {
  Op op = Op::forward;
  DType dtype = DType::f32;
  std::int64_t n = 2, h = 6, w = 7;
  std::int64_t rows = 2, cols = 3, block_rows = 16, block_cols = 16;
  double density = 0.5;
  ConvOptions options{{3, 3}, {1, 1}, {1, 1}, {1, 1}, {1, 1}, {}};
  bool bias = false, unread_nan = false;
  Form x, values, out;
  int threads = 1;
};

std::string text(const Case& c) {
  const auto& o = c.options;
  std::string t = std::string("op ") + std::to_string(static_cast<int>(c.op)) + " " + name_of(c.dtype);
  const auto add = [&](const char* name, const auto&... numbers) {
    t += std::string(" ") + name;
    ((t += " " + std::to_string(numbers)), ...);
  };
  add("x", c.n, c.h, c.w);
  add("blocks", c.rows, c.cols, c.block_rows, c.block_cols, c.density);
  add("kernel", o.kernel[0], o.kernel[1]);
  add("stride", o.stride[0], o.stride[1]);
  add("padding", o.padding[0], o.padding[1], o.padding_end[0], o.padding_end[1]);
  add("dilation", o.dilation[0], o.dilation[1]);
  add("bias", c.bias);
  add("threads", c.threads);
  for (const Form* form : {&c.x, &c.values, &c.out}) {
    t += " form " + testing::PrintToString(form->order);
    add("step", form->step, form->gap, form->backwards, form->expanded);
  }
  return t;
}

/// Elements lie at no more than their own alignment.
Tensor unaligned(DType dtype, const Index& sizes, Form form) {
  form.alignment = size_of(dtype);
  return Tensor(dtype, sizes, form);
}

/// One call and all that has to hold after it.
class Checker {
 public:
  Checker(const Case& c, std::uint64_t seed)
      : c_(c),
        random_(seed),
        layout_(random_blocks({c.options.kernel[0] * c.options.kernel[1], c.rows, c.cols, c.block_rows, c.block_cols},
                              c.density, seed)),
        x_(unaligned(c.dtype, {c.n, c.cols * c.block_cols, c.h, c.w}, c.x)),
        values_(unaligned(c.dtype, {layout_->nnz(), c.block_rows, c.block_cols}, c.values)),
        bias_(unaligned(c.dtype, {c.rows * c.block_rows}, {.step = 2})),
        out_(unaligned(c.dtype, block_conv2d_shape(x_.view, values_.view, layout_, c.options), c.out)) {
    if (c.bias && c.op == Op::forward) {
      c_.options.bias = bias_.view;
    }
    for (Tensor* tensor : {&x_, &values_, &bias_, &out_}) {
      if (tensor != &result()) {
        tensor->randomise(random_);
      }
    }
  }

  void check() {
    if (c_.unread_nan) {
      forget_unread();
    }
    const std::vector<ReferenceSum> wanted = reference();
    run(c_.threads);
    EXPECT_TRUE(result().intact_around()) << "bytes written outside the result";
    std::int64_t wrong = 0;
    for (std::size_t n = 0; n < wanted.size(); ++n) {
      const double got = result().get(static_cast<std::int64_t>(n));
      if (!(std::abs(got - wanted[n].value) <= wanted[n].tolerance(c_.dtype)) && wrong++ == 0) {
        ADD_FAILURE() << "got " << got << ", expected " << wanted[n].value << " at " << n << " of "
                      << testing::PrintToString(result().sizes());
      }
    }
    EXPECT_EQ(wrong, 0);
    const auto first = result().storage();
    result().poison();
    run(c_.threads + 2);
    EXPECT_EQ(first, result().storage()) << "depends on the number of threads";
  }

 private:
  Tensor& result() { return c_.op == Op::forward ? out_ : c_.op == Op::backward_x ? x_ : values_; }

  void run(int threads) {
    Threads executor(threads);
    Context context = Context::cpu(executor);
    switch (c_.op) {
      case Op::forward:
        return block_conv2d(x_.view, values_.view, layout_, out_.view, context, c_.options);
      case Op::backward_x:
        return block_conv2d_backward_x(out_.view, values_.view, layout_, x_.view, context, c_.options);
      case Op::backward_values:
        return block_conv2d_backward_values(x_.view, out_.view, layout_, values_.view, context, c_.options);
    }
  }

  /// visit(element of x, of values, of out) for every product of the convolution.
  template <typename Visit>
  void each_product(const Visit& visit) const {
    const auto& o = c_.options;
    const std::int64_t height = out_.view.size(2), width = out_.view.size(3);
    const std::int64_t x_channels = c_.cols * c_.block_cols, channels = c_.rows * c_.block_rows;
    const std::vector<std::int64_t> blocks = packed_blocks(*layout_);
    for (std::int64_t n = 0; n < o.kernel[0] * o.kernel[1] * c_.rows * c_.cols; ++n) {
      const std::int64_t t = n / (c_.rows * c_.cols), row = n / c_.cols % c_.rows, col = n % c_.cols;
      const std::int64_t block = blocks[static_cast<std::size_t>(n)];
      if (block < 0) {
        continue;
      }
      for (std::int64_t p = 0; p < height; ++p) {
        const std::int64_t y = p * o.stride[0] - o.padding[0] + t / o.kernel[1] * o.dilation[0];
        for (std::int64_t q = 0; q < width; ++q) {
          const std::int64_t x = q * o.stride[1] - o.padding[1] + t % o.kernel[1] * o.dilation[1];
          if (y < 0 || y >= c_.h || x < 0 || x >= c_.w) {
            continue;
          }
          for (std::int64_t image = 0; image < c_.n; ++image) {
            for (std::int64_t a = 0; a < c_.block_rows; ++a) {
              for (std::int64_t b = 0; b < c_.block_cols; ++b) {
                visit(((image * x_channels + col * c_.block_cols + b) * c_.h + y) * c_.w + x,
                      (block * c_.block_rows + a) * c_.block_cols + b,
                      ((image * channels + row * c_.block_rows + a) * height + p) * width + q);
              }
            }
          }
        }
      }
    }
  }

  std::vector<ReferenceSum> reference() {
    const auto x = x_.values(), values = values_.values(), out = out_.values();
    std::vector<ReferenceSum> sums(static_cast<std::size_t>(result().view.elements()));
    const auto at = [](const std::vector<double>& tensor, std::int64_t n) {
      return tensor[static_cast<std::size_t>(n)];
    };
    if (c_.options.bias.has_value()) {
      const auto image = static_cast<std::size_t>(out_.view.size(2) * out_.view.size(3));
      for (std::size_t n = 0; n < sums.size(); ++n) {
        sums[n].add(bias_.get(static_cast<std::int64_t>(n / image) % out_.view.size(1)));
      }
    }
    each_product([&](std::int64_t i, std::int64_t v, std::int64_t o) {
      switch (c_.op) {
        case Op::forward:
          return sums[static_cast<std::size_t>(o)].add(at(x, i) * at(values, v));
        case Op::backward_x:
          return sums[static_cast<std::size_t>(i)].add(at(out, o) * at(values, v));
        case Op::backward_values:
          return sums[static_cast<std::size_t>(v)].add(at(out, o) * at(x, i));
      }
    });
    return sums;
  }

  /// NaN in every element of the images that no product asks for.
  void forget_unread() {
    std::vector<bool> x(static_cast<std::size_t>(x_.view.elements()));
    std::vector<bool> out(static_cast<std::size_t>(out_.view.elements()));
    each_product([&](std::int64_t i, std::int64_t, std::int64_t o) {
      x[static_cast<std::size_t>(i)] = out[static_cast<std::size_t>(o)] = true;
    });
    for (const auto& [tensor, read] : {std::pair(&x_, &x), std::pair(&out_, &out)}) {
      for (std::size_t n = 0; n < read->size() && tensor != &result(); ++n) {
        if (!(*read)[n]) {
          tensor->set(static_cast<std::int64_t>(n), NAN);
        }
      }
    }
  }

  Case c_;
  std::mt19937_64 random_;
  std::shared_ptr<const BlockLayout> layout_;
  Tensor x_, values_, bias_, out_;
};

class BlockConv : public testing::TestWithParam<std::tuple<Op, DType>> {
 protected:
  void check(Case c) {
    std::tie(c.op, c.dtype) = GetParam();
    if (c.op == Op::forward) {
      c.out.expanded = 0;
    } else if (c.op == Op::backward_x) {
      c.x.expanded = 0;
    } else {
      c.values.expanded = 0;
    }
    SCOPED_TRACE(text(c));
    Checker(c, fresh_seed() + count_++).check();
  }
  std::uint64_t count_ = 0;
};

TEST_P(BlockConv, BothMemoryFormatsOfEveryBlock) {
  const std::pair<std::int64_t, std::int64_t> blocks[] = {{8, 8},     {16, 16}, {24, 24}, {32, 32}, {64, 64},
                                                          {128, 128}, {16, 32}, {64, 8},  {13, 21}, {9, 15}};
  for (const auto& [rows, cols] : blocks) {
    for (const Form& form : {kPlain, kChannelsLast}) {
      Case c;
      c.n = rows == 128 ? 1 : 2;
      c.rows = rows > 32 ? 1 : 2;
      c.cols = cols > 32 ? 2 : 3;
      c.block_rows = rows, c.block_cols = cols;
      c.x = c.out = form;
      c.bias = true;
      check(c);
    }
  }
}

TEST_P(BlockConv, Geometry) {
  const ConvOptions all[] = {
      {{1, 1}, {1, 1}, {0, 0}, {0, 0}, {1, 1}, {}}, {{1, 1}, {2, 3}, {0, 0}, {0, 0}, {1, 1}, {}},
      {{3, 3}, {2, 2}, {1, 1}, {1, 1}, {1, 1}, {}}, {{3, 2}, {1, 2}, {2, 0}, {0, 1}, {2, 3}, {}},
      {{2, 2}, {3, 4}, {0, 1}, {1, 0}, {1, 1}, {}}, {{5, 1}, {1, 1}, {2, 0}, {2, 0}, {1, 1}, {}},
      {{3, 3}, {4, 1}, {3, 9}, {3, 9}, {3, 5}, {}}, {{2, 3}, {2, 1}, {8, 0}, {9, 4}, {2, 1}, {}},
  };
  for (const ConvOptions& options : all) {
    for (const Form& form : {kPlain, kChannelsLast}) {
      Case c;
      c.h = 9, c.w = 11;
      c.block_rows = c.block_cols = 8;
      c.options = options;
      c.x = c.out = form;
      check(c);
    }
  }
}

TEST_P(BlockConv, AnyStrides) {
  const Form forms[] = {kPlain,
                        kChannelsLast,
                        {{0, 1, 2, 3}, 2, 5},                 // sliced
                        {{3, 1, 0, 2}, 1, 1},                 // permuted
                        {{0, 2, 3, 1}, 1, 0, 0b1100},         // backwards
                        {{0, 1, 2, 3}, 1, 0, 0b0010, 0b1},    // expanded over images
                        {{0, 1, 2, 3}, 1, 0, 0, 0b1100},      // over pixels
                        {{0, 1, 2, 3}, 3, 0, 0b1010, 0b10}};  // over channels
  const Form packed[] = {kPlain, {{0, 2, 1}}, {{1, 0, 2}, 2}, {{2, 1, 0}, 1, 3, 0b111}, {{}, 1, 0, 0, 0b1}};
  int n = 0;
  for (const Form& x : forms) {
    for (const Form& out : forms) {
      Case c;
      c.x = x, c.out = out;
      c.values = packed[n++ % 5];
      c.block_rows = 8, c.block_cols = 16;
      c.options.stride = {1, 1 + n % 2};
      c.bias = n % 3 == 0;
      check(c);
    }
  }
}

TEST_P(BlockConv, WhatNoBlockReadsNeverLeaks) {
  for (const double density : {0.03, 0.1, 0.3}) {
    for (const std::int64_t stride : {1, 2, 5}) {
      for (const Form& form : {kPlain, kChannelsLast}) {
        Case c;
        c.density = density;
        c.block_rows = c.block_cols = 8;
        c.options.stride = {stride, stride};
        c.h = 13, c.w = 12;
        c.x = c.out = form;
        c.unread_nan = true;
        check(c);
      }
    }
  }
}

TEST_P(BlockConv, NothingAtAll) {
  for (const std::int64_t images : {0, 2}) {
    for (const double density : {0.0, 0.5}) {
      Case c;
      c.n = images;
      c.density = density;
      c.bias = true;
      check(c);
      c.rows = 0;
      check(c);
      c.rows = 2, c.cols = 0;
      check(c);
    }
  }
  Case c;  // images of padding alone
  c.h = 0, c.w = 0;
  c.options.padding = c.options.padding_end = {2, 2};
  c.bias = true;
  check(c);
}

TEST_P(BlockConv, ManyPixelsAndThreads) {
  for (const Form& form : {kPlain, kChannelsLast}) {
    Case c;
    c.n = 3, c.h = 23, c.w = 37;
    c.block_rows = c.block_cols = 8;
    c.density = 0.3;
    c.bias = true;
    c.threads = 5;
    c.x = c.out = form;
    check(c);
    c.n = 1, c.h = 3, c.w = 4;  // fewer panels than threads
    c.rows = c.cols = 8, c.block_rows = c.block_cols = 32;
    check(c);
  }
}

std::string case_name(const testing::TestParamInfo<std::tuple<Op, DType>>& tested) {
  const auto& [op, dtype] = tested.param;
  return std::string(op == Op::forward      ? "forward_"
                     : op == Op::backward_x ? "backward_x_"
                                            : "backward_values_") +
         name_of(dtype);
}

INSTANTIATE_TEST_SUITE_P(Cpu, BlockConv,
                         testing::Combine(testing::Values(Op::forward, Op::backward_x, Op::backward_values),
                                          testing::Values(DType::f64, DType::f32, DType::f16, DType::bf16)),
                         case_name);

/// Small ones of every kind.
TEST(BlockConvRandom, Anything) {
  std::mt19937_64 random(fresh_seed());
  const auto below = [&](std::int64_t n) {
    return static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(n));
  };
  const auto form = [&](std::size_t rank, bool may_expand) {
    Form f;
    if (below(3) == 0) {
      return rank == 4 && below(2) == 0 ? kChannelsLast : kPlain;
    }
    f.order.resize(rank);
    std::iota(f.order.begin(), f.order.end(), std::size_t{0});
    std::shuffle(f.order.begin(), f.order.end(), random);
    f.step = 1 + below(2), f.gap = below(4) * below(2);
    f.backwards = static_cast<unsigned>(below(2) * below(16));
    f.expanded = may_expand && below(4) == 0 ? 1U << below(static_cast<std::int64_t>(rank)) : 0;
    return f;
  };
  for (int n = 0; n < 600; ++n) {
    Case c;
    c.op = static_cast<Op>(below(3));
    c.dtype = std::array{DType::f64, DType::f32, DType::f16, DType::bf16}[random() % 4];
    c.options.bias.reset();
    for (std::size_t d = 0; d < 2; ++d) {
      c.options.kernel[d] = 1 + below(4), c.options.stride[d] = 1 + below(2) * below(4);
      c.options.dilation[d] = 1 + below(2) * below(3);
      c.options.padding[d] = below(4), c.options.padding_end[d] = below(4);
      const std::int64_t reach = (c.options.kernel[d] - 1) * c.options.dilation[d] + 1;
      const std::int64_t least = std::max<std::int64_t>(1, reach - c.options.padding[d] - c.options.padding_end[d]);
      (d == 0 ? c.h : c.w) = least + below(d == 0 ? 6 : 24);
    }
    c.n = 1 + below(3);
    c.rows = 1 + below(3), c.cols = 1 + below(3);
    c.block_rows = 8 + below(2) * below(20), c.block_cols = 8 + below(2) * below(20);
    c.density = static_cast<double>(below(11)) / 10;
    c.bias = below(2) == 0;
    c.x = form(4, c.op != Op::backward_x), c.out = form(4, c.op != Op::forward);
    c.values = form(3, c.op != Op::backward_values);
    c.unread_nan = below(2) == 0 && c.x.expanded == 0 && c.out.expanded == 0;
    c.threads = static_cast<int>(1 + below(3));
    SCOPED_TRACE(text(c));
    Checker(c, fresh_seed() + static_cast<std::uint64_t>(n)).check();
    if (testing::Test::HasFailure()) {
      return;
    }
  }
}

/// Results that go past the caches, in whole cache lines and not.
TEST(BlockConvLarge, PastTheCaches) {
  for (const std::int64_t width : {64, 61}) {
    for (const Form& form : {kPlain, kChannelsLast}) {
      Case c;
      c.n = 1, c.h = 150, c.w = width;
      c.rows = 4, c.cols = 1, c.block_rows = 32, c.block_cols = 8;
      c.options = {{1, 1}, {1, 1}, {0, 0}, {0, 0}, {1, 1}, {}};
      c.density = 0.75;
      c.x = c.out = form;
      c.bias = width == 64;
      c.threads = 2;
      SCOPED_TRACE(text(c));
      Checker(c, fresh_seed()).check();
    }
  }
}

TEST(BlockConvLayout, HasAHeadForEachKernelPosition) {
  const std::vector<std::uint8_t> mask = {1, 0, 0, 1, 1, 1, 0, 0, 0, 1, 0, 1};  // (3, 1, 2, 2)
  const auto layout = BlockLayout::for_conv2d({3, 1, 2, 2}, mask, 8, 16);
  const auto same = BlockLayout::make({4, 3, 1, 8, 16}, std::vector<std::uint8_t>{1, 1, 0, 0, 1, 1, 0, 0, 0, 1, 0, 1});
  EXPECT_EQ(layout->key(), same->key());
  EXPECT_EQ(error_of([&] {
              BlockLayout::for_conv2d({3, 1, 2, 3}, mask, 8, 16);
            }),
            "for_conv2d: mask: expected 18 entries, got 12");
  EXPECT_EQ(error_of([&] {
              BlockLayout::for_conv2d({3, 0, 2, 2}, {}, 8, 16);
            }),
            "for_conv2d: blocks: expected (out blocks, in blocks, kh, kw) of at least 1, got 0");
}

TEST(BlockConvErrors, NameTheArgument) {
  const auto layout = BlockLayout::make({2, 1, 1, 8, 8}, std::vector<std::uint8_t>{1, 1});
  std::vector<float> data(4096);
  const auto view = [&](const Index& sizes, DType dtype = DType::f32) { return TensorView(data.data(), dtype, sizes); };
  const TensorView x = view({1, 8, 3, 4}), values = view({2, 8, 8}), out = view({1, 8, 3, 3});
  ConvOptions options;
  options.kernel = {1, 2};
  Context context = Context::cpu();
  const auto forward = [&](const TensorView& a, const TensorView& b, const TensorView& c, const ConvOptions& o) {
    return error_of([&] { block_conv2d(a, b, layout, c, context, o); });
  };
  EXPECT_EQ(forward(x, values, out, options), "no error");
  const auto with = [&](const auto& change) {
    ConvOptions changed = options;
    change(changed);
    return changed;
  };
  EXPECT_EQ(forward(x, values, out, {}),
            "block_conv2d: kernel_size: expected as many positions as the layout has heads, 2, got (1, 1)");
  EXPECT_EQ(forward(x, values, out, with([](auto& o) {
                      o.stride = {1, 0};
                    })),
            "block_conv2d: stride: expected at least 1 along both axes, got (1, 0)");
  EXPECT_EQ(forward(x, values, out, with([](auto& o) {
                      o.padding_end = {-1, 0};
                    })),
            "block_conv2d: padding: expected at least 0 along both axes, got (-1, 0)");
  EXPECT_EQ(forward(x, values, out, with([](auto& o) {
                      o.dilation = {0, 1};
                    })),
            "block_conv2d: dilation: expected at least 1 along both axes, got (0, 1)");
  EXPECT_EQ(forward(x, values, out, with([](auto& o) {
                      o.dilation = {1, 4};
                    })),
            "block_conv2d: x: expected a padded width of at least 5, got (1, 8, 3, 4)");
  EXPECT_EQ(forward(view({1, 9, 3, 4}), values, out, options),
            "block_conv2d: x: expected (N, 8, H, W), got (1, 9, 3, 4)");
  EXPECT_TRUE(forward(x, view({3, 8, 8}), out, options).starts_with("block_conv2d: values: expected"));
  EXPECT_EQ(forward(x, view({1, 2, 8, 8}), out, options), "block_conv2d: values: expected (2, 8, 8), got (1, 2, 8, 8)");
  EXPECT_EQ(forward(x, view({2, 8, 8}, DType::f16), out, options),
            "block_conv2d: values: expected float32 like x, got float16");
  EXPECT_EQ(forward(x, values, view({1, 8, 3, 4}), options),
            "block_conv2d: out: expected (1, 8, 3, 3), got (1, 8, 3, 4)");
  const TensorView long_bias = view({9});
  EXPECT_TRUE(forward(x, values, out, with([&](auto& o) { o.bias = long_bias; }))
                  .starts_with("block_conv2d: bias: expected (8,), got (9,)"));
  EXPECT_EQ(error_of([&] { block_conv2d_backward_x(x, values, layout, x, context, options); }),
            "block_conv2d_backward_x: d_out: expected (1, 8, 3, 3), got (1, 8, 3, 4)");
  EXPECT_EQ(error_of([&] { block_conv2d_backward_values(x, out, layout, x, context, options); }),
            "block_conv2d_backward_values: values: expected (2, 8, 8), got (1, 8, 3, 4)");
  context.executor = nullptr;
  EXPECT_EQ(forward(x, values, out, options), "block_conv2d: context.executor: expected an address, got null");
}

}  // namespace
}  // namespace fretwork
