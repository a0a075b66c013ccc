// 2:4 products with few columns, on mma.sp and on wgmma.sp, on a real GPU against float64 made from the nibbles alone
// on the host. Skipped where there is none. DISABLED_Speed prints how fast the sparse operand is read.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <limits>
#include <memory>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "core/divide.h"
#include "core/element.h"
#include "ops/two_four/cuda/direct.h"
#include "ops/two_four/cuda/narrow.h"
#include "ops/two_four/problem.h"
#include "runtime/cuda_driver.h"
#include "support/activated.h"
#include "support/result_types.h"

namespace fretwork::two_four {
namespace {

namespace driver = fretwork::cuda;
using Index = std::int64_t;

constexpr std::array<unsigned, 6> kNibbles = {0x4, 0x8, 0x9, 0xC, 0xD, 0xE};
constexpr std::uint8_t kUntouched = 0xA5;
Index size(DType dtype) { return static_cast<Index>(size_of(dtype)); }
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

struct Case {
  Index m, n, k, batch = 1;
  DType dtype = DType::bf16, out = DType::bf16;
  int word_bytes = 2;
  bool b_along_k = true, c_along_m = true;  ///< as in a linear layer
  Index pad = 0;                            ///< added to every pitch: eights of values, words, elements of b and c
  Index shift = 0;                          ///< elements before the first one of b and c
  bool bias = false, scales = false;
  Activation activation = Activation::none;
  bool spoil = false;  ///< the last of four is never kept, and NaN in b

  std::string text() const {
    std::ostringstream text;
    text << "m " << m << " n " << n << " k " << k << " batch " << batch << ' ' << name_of(dtype) << " to "
         << name_of(out) << " words of " << word_bytes << (b_along_k ? " b along k" : " b along n")
         << (c_along_m ? " c along m" : " c along n") << " pad " << pad << " shift " << shift << (bias ? " bias" : "")
         << (scales ? " scales" : "") << " activation " << static_cast<int>(activation) << (spoil ? " spoilt" : "");
    return text.str();
  }
};

/// Bytes on the host and on the device.
struct Bytes {
  std::vector<std::uint8_t> host;
  driver::DeviceBuffer device;

  explicit Bytes(Index count, std::uint8_t fill = kUntouched) : host(static_cast<std::size_t>(count), fill) {}
  void upload() { device = driver::DeviceBuffer(0, host.data(), host.size()); }
  void download() {
    driver::copy_to_host(host.data(), device.data(), host.size(), nullptr);
    driver::synchronize(nullptr);
  }
  void* at(Index byte) const { return static_cast<std::uint8_t*>(device.data()) + byte; }
};

double get(const Bytes& bytes, DType dtype, Index at) { return read_element<double>(bytes.host.data(), dtype, at); }
void set(Bytes& bytes, DType dtype, Index at, double x) {
  if (dtype == DType::u8) {
    bytes.host[static_cast<std::size_t>(at)] = static_cast<std::uint8_t>(std::abs(x));
  } else {
    write_element(bytes.host.data(), dtype, at, x);
  }
}

/// A dense operand's strides in a buffer of its own, batches one after the other.
struct Place {
  Index row = 0, col = 0, batch = 0, shift = 0;
  Place(Index rows, Index cols, bool along_rows, Index pad, Index first) : shift(first) {
    const Index pitch = (along_rows ? rows : cols) + pad;
    row = along_rows ? 1 : pitch;
    col = along_rows ? pitch : 1;
    batch = pitch * (along_rows ? cols : rows) + pad;
  }
  Index at(Index z, Index r, Index c) const { return shift + z * batch + r * row + c * col; }
  Index count(Index batches) const { return shift + batches * batch + 16; }
  Dense dense(const Bytes& bytes, DType dtype) const { return {bytes.at(shift * size(dtype)), row, col, batch}; }
};

class Trial {
 public:
  explicit Trial(const Case& c)
      : c_(c),
        value_pitch_(c.k / 2 + 16 / size(c.dtype) * c.pad),
        word_pitch_(ceil_div(c.k / 8, c.word_bytes) + c.pad),
        b_place_(c.k, c.n, c.b_along_k, c.pad, c.shift),
        c_place_(c.m, c.n, c.c_along_m, c.pad, c.shift),
        values_(c.m * value_pitch_ * size(c.dtype)),
        words_(c.m * word_pitch_ * c.word_bytes, 0xFF),  // no valid nibble where none belongs
        b_(b_place_.count(c.batch) * size(c.dtype)),
        out_(c_place_.count(c.batch) * size(c.out)),
        bias_(c.m * size(c.out)),
        scale_s_(c.m * 4),
        scale_b_(c.n * 4) {
    fill();
    for (Bytes* bytes : {&values_, &words_, &b_, &out_, &bias_, &scale_s_, &scale_b_}) {
      bytes->upload();
    }
  }

  Problem problem() const {
    Problem p;
    p.m = c_.m;
    p.n = c_.n;
    p.k = c_.k;
    p.batch = c_.batch;
    p.dtype = c_.dtype;
    p.out = c_.out;
    p.values = {values_.device.data(), value_pitch_, 1};
    p.words = {words_.device.data(), word_pitch_, 1};
    p.word_bytes = c_.word_bytes;
    p.b = b_place_.dense(b_, c_.dtype);
    p.c = c_place_.dense(out_, c_.out);
    if (c_.bias) {
      p.bias = {bias_.device.data(), 1};
    }
    if (c_.scales) {
      p.scale_s = {scale_s_.device.data(), 1};
      p.scale_b = {scale_b_.device.data(), 1};
    }
    p.activation = c_.activation;
    return p;
  }

  bool run() const {
    Context context = Context::cuda(0);
    return cuda::run_few(problem(), context);
  }
  bool run(const narrow::Form& form) const {
    Context context = Context::cuda(0);
    return narrow::run(problem(), context, form);
  }
  bool run(const direct::Form& form) const {
    Context context = Context::cuda(0);
    return direct::run(problem(), context, form);
  }
  const std::vector<std::uint8_t>& result() {
    out_.download();
    return out_.host;
  }

  /// Every element is near what it should be, and nothing else was written.
  void check() {
    result();
    std::vector<bool> written(out_.host.size());
    int wrong = 0;
    for (Index z = 0; z < c_.batch; ++z) {
      for (Index i = 0; i < c_.m; ++i) {
        for (Index j = 0; j < c_.n; ++j) {
          const Index at = c_place_.at(z, i, j);
          std::fill_n(written.begin() + at * size(c_.out), size(c_.out), true);
          wrong += near(z, i, j, get(out_, c_.out, at), wrong) ? 0 : 1;
        }
      }
    }
    EXPECT_EQ(wrong, 0) << c_.text();
    Index touched = 0;
    for (std::size_t n = 0; n < written.size(); ++n) {
      touched += !written[n] && out_.host[n] != kUntouched ? 1 : 0;
    }
    EXPECT_EQ(touched, 0) << c_.text();
  }

 private:
  unsigned nibble(Index i, Index g) const {
    // Every nibble meets every place within six neighbouring rows.
    return kNibbles[static_cast<std::size_t>((i + 5 * g + i / 6 * g) % (c_.spoil ? 3 : 6))];
  }
  void fill() {
    std::mt19937 random(static_cast<unsigned>(c_.m * 7 + c_.n * 5 + c_.k));
    std::uniform_real_distribution<double> numbers(-1.0, 1.0);
    const bool whole = is_integer(c_.dtype);              // what lies between is then far from 0
    const double most = c_.out == DType::i32 ? 127 : 20;  // sums of 16 bits stay finite
    const auto operand = [&] { return whole ? std::round(most * numbers(random)) : numbers(random); };
    const auto set_all = [&](Bytes& bytes) {
      for (Index n = 0; n < static_cast<Index>(bytes.host.size()) / size(c_.dtype); ++n) {
        set(bytes, c_.dtype, n, whole ? 111 : kNan);
      }
    };
    set_all(values_);
    set_all(b_);
    for (Index i = 0; i < c_.m; ++i) {
      for (Index e = 0; e < c_.k / 2; ++e) {
        set(values_, c_.dtype, i * value_pitch_ + e, operand());
      }
      std::uint8_t* const line = words_.host.data() + i * word_pitch_ * c_.word_bytes;
      for (Index g = 0; g < c_.k / 4; g += 2) {
        line[g / 2] = static_cast<std::uint8_t>(nibble(i, g) | nibble(i, g + 1) << 4);
      }
      if (c_.out != DType::i32) {
        set(bias_, c_.out, i, numbers(random));
      }
      set(scale_s_, DType::f32, i, numbers(random));
    }
    for (Index j = 0; j < c_.n; ++j) {
      set(scale_b_, DType::f32, j, numbers(random));
    }
    for (Index z = 0; z < c_.batch; ++z) {
      for (Index x = 0; x < c_.k; ++x) {
        for (Index j = 0; j < c_.n; ++j) {
          const double number = operand();
          set(b_, c_.dtype, b_place_.at(z, x, j), c_.spoil && x % 4 == 3 ? kNan : number);
        }
      }
    }
  }

  bool near(Index z, Index i, Index j, double got, int wrong) const {
    double sum = 0, magnitude = 0;
    for (Index g = 0; g < c_.k / 4; ++g) {
      for (Index e = 0; e < 2; ++e) {
        const Index x = 4 * g + (nibble(i, g) >> 2 * e & 3);
        const double product =
            get(values_, c_.dtype, i * value_pitch_ + 2 * g + e) * get(b_, c_.dtype, b_place_.at(z, x, j));
        sum += product;
        magnitude += std::abs(product);
      }
    }
    if (c_.scales) {
      const double scale = get(scale_s_, DType::f32, i) * get(scale_b_, DType::f32, j);
      sum *= scale;
      magnitude *= std::abs(scale);
    }
    if (c_.bias) {
      sum += get(bias_, c_.out, i);
    }
    const double want = saturated(c_.out, activated(c_.activation, sum));
    const auto [last, step] = rounding_of(c_.out);
    const double slack =
        c_.out == DType::i32 ? 0 : 4e-6 * magnitude + (1.01 * last + 2e-5) * std::abs(want) + step + 1e-6;
    const bool good = std::abs(got - want) <= slack;
    if (!good && wrong < 3) {
      ADD_FAILURE() << c_.text() << ": (" << z << ", " << i << ", " << j << ") is " << got << ", not " << want;
    }
    return good;
  }

  Case c_;
  Index value_pitch_, word_pitch_;
  Place b_place_, c_place_;
  Bytes values_, words_, b_, out_, bias_, scale_s_, scale_b_;
};

void try_case(const Case& c) {
  Trial trial(c);
  ASSERT_TRUE(trial.run()) << c.text();
  trial.check();
}

class TwoFourFewCuda : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!driver::available()) {
      GTEST_SKIP() << "no GPU";
    }
    if (driver::device_info(0).arch < 80) {
      GTEST_SKIP() << "needs sm_80";
    }
    scope_ = std::make_unique<driver::DeviceScope>(0);
  }

 private:
  std::unique_ptr<driver::DeviceScope> scope_;  ///< copies to and from the device need one as well
};

TEST_F(TwoFourFewCuda, EveryNumberOfColumns) {
  for (Index n = 1; n <= 64; ++n) {
    try_case({.m = 80,
              .n = n,
              .k = 1024,
              .dtype = n % 2 == 0 ? DType::bf16 : DType::f16,
              .out = n % 2 == 0 ? DType::bf16 : DType::f16});
  }
}

TEST_F(TwoFourFewCuda, RowsOfAnyNumber) {
  for (const Index m : {1, 2, 7, 8, 9, 15, 16, 17, 31, 33, 63, 100, 257, 1000}) {
    for (const Index n : {1, 9, 20, 64}) {
      try_case({.m = m, .n = n, .k = 512});
    }
  }
}

TEST_F(TwoFourFewCuda, DepthsOfAnyNumber) {
  for (const Index k : {16, 32, 48, 64, 80, 128, 240, 256, 272, 320, 528, 1008, 2064, 4096, 4112, 6000, 14336}) {
    for (const Index n : {1, 16, 31, 64}) {
      try_case({.m = 70, .n = n, .k = k});
    }
  }
}

TEST_F(TwoFourFewCuda, WholeLayers) {
  try_case({.m = 4096, .n = 3, .k = 1024});
  try_case({.m = 8192, .n = 16, .k = 512});
  try_case({.m = 4096, .n = 64, .k = 2048});
  try_case({.m = 14336, .n = 33, .k = 256});
}

TEST_F(TwoFourFewCuda, OrdersOfMemory) {
  for (const bool b_along_k : {true, false}) {
    for (const bool c_along_m : {true, false}) {
      for (const Index pad : {0, 1, 4, 8}) {
        for (const Index shift : {0, 1, 8}) {
          for (const Index n : {1, 13, 40}) {
            try_case({.m = 99,
                      .n = n,
                      .k = 592,
                      .b_along_k = b_along_k,
                      .c_along_m = c_along_m,
                      .pad = pad,
                      .shift = shift});
          }
        }
      }
    }
  }
}

TEST_F(TwoFourFewCuda, WordsOfAnySize) {
  for (const int bytes : {1, 2, 4}) {
    for (const Index k : {512, 1040}) {
      try_case({.m = 50, .n = 24, .k = k, .word_bytes = bytes});
      try_case({.m = 50, .n = 24, .k = k, .word_bytes = bytes, .pad = 2});
    }
  }
}

TEST_F(TwoFourFewCuda, Epilogues) {
  for (const DType dtype : {DType::f16, DType::bf16}) {
    for (const DType out : {dtype, DType::f32}) {
      for (const Activation activation : {Activation::none, Activation::relu, Activation::gelu, Activation::silu}) {
        for (const int options : {0, 1, 2, 3}) {
          try_case({.m = 45,
                    .n = 12,
                    .k = 256,
                    .dtype = dtype,
                    .out = out,
                    .c_along_m = options != 1,
                    .bias = options % 2 == 1,
                    .scales = options / 2 == 1,
                    .activation = activation});
        }
      }
    }
  }
}

TEST_F(TwoFourFewCuda, BatchesAreColumns) {
  for (const bool along : {true, false}) {
    try_case({.m = 77, .n = 1, .k = 512, .batch = 16, .b_along_k = along, .c_along_m = along});
    try_case({.m = 77,
              .n = 5,
              .k = 512,
              .batch = 7,
              .b_along_k = along,
              .c_along_m = along,
              .pad = 8,
              .bias = true,
              .scales = true});
    try_case({.m = 77, .n = 32, .k = 512, .batch = 2, .b_along_k = along, .c_along_m = along});
  }
}

TEST_F(TwoFourFewCuda, WhatIsNotKeptIsNotMultiplied) {
  for (const Index n : {1, 8, 30, 64}) {
    try_case({.m = 130, .n = n, .k = 1040, .spoil = true});
    try_case({.m = 130, .n = n, .k = 1040, .dtype = DType::f16, .out = DType::f32, .b_along_k = false, .spoil = true});
  }
}

TEST_F(TwoFourFewCuda, Bytes) {
  for (const Index n : {1, 7, 16, 17, 50, 64}) {
    for (const Index k : {32, 96, 512, 544, 2080, 4096}) {
      try_case({.m = 70, .n = n, .k = k, .dtype = DType::i8, .out = DType::i32});
      try_case({.m = 70, .n = n, .k = k, .dtype = DType::u8, .out = DType::i32});
    }
  }
  for (const DType out : {DType::i32, DType::f32, DType::f16, DType::bf16, DType::i8, DType::f8_e4m3, DType::f8_e5m2}) {
    for (const bool along : {true, false}) {
      for (const Index pad : {0, 1, 4, 16}) {
        const bool more = out != DType::i32;
        try_case({.m = 133,
                  .n = 21,
                  .k = 544,
                  .dtype = along ? DType::i8 : DType::u8,
                  .out = out,
                  .word_bytes = 4,
                  .b_along_k = along,
                  .c_along_m = !along,
                  .pad = pad,
                  .bias = more,
                  .scales = more,
                  .activation = more ? Activation::silu : Activation::none});
      }
    }
  }
  try_case({.m = 4096, .n = 64, .k = 1024, .dtype = DType::i8, .out = DType::i32});
}

TEST_F(TwoFourFewCuda, ManyRunsAreEqual) {
  for (const Case& c : {Case{.m = 600, .n = 64, .k = 4096}, Case{.m = 200, .n = 1, .k = 8192},
                        Case{.m = 1000, .n = 16, .k = 4112, .c_along_m = false}}) {
    Trial trial(c);
    ASSERT_TRUE(trial.run());
    const std::vector<std::uint8_t> first = trial.result();
    for (int n = 0; n < 1000; ++n) {
      ASSERT_TRUE(trial.run());
      ASSERT_EQ(first, trial.result()) << n << ": " << c.text();
    }
  }
}

TEST_F(TwoFourFewCuda, LeavesTheRestToOthers) {
  const Trial trial({.m = 32, .n = 8, .k = 256});
  Context context = Context::cuda(0);
  const auto takes = [&](const auto& change) {
    Problem p = trial.problem();
    change(p);
    return cuda::run_few(p, context);
  };
  EXPECT_TRUE(takes([](Problem&) {}));
  EXPECT_FALSE(takes([](Problem& p) { p.n = 65; }));
  EXPECT_FALSE(takes([](Problem& p) { p.batch = 9; }));
  EXPECT_FALSE(takes([](Problem& p) { p.k = 0; }));
  EXPECT_FALSE(takes([](Problem& p) { p.k = 248; }));
  EXPECT_FALSE(takes([](Problem& p) { p.dtype = p.out = DType::f32; }));
  EXPECT_FALSE(takes([](Problem& p) { p.dtype = DType::f8_e4m3; }));
  EXPECT_FALSE(takes([](Problem& p) { p.values.along = 2; }));
  EXPECT_FALSE(takes([](Problem& p) { p.values.line = 132; }));
  EXPECT_FALSE(takes([](Problem& p) { p.values.data = static_cast<char*>(p.values.data) + 2; }));
  EXPECT_FALSE(takes([](Problem& p) { p.words.along = 2; }));
}

// ------------------------------------------------------------------------------------------------- on Hopper

void try_form(const Case& c, const narrow::Form& form) {
  Trial trial(c);
  ASSERT_TRUE(trial.run(form)) << c.text();
  SCOPED_TRACE(std::to_string(form.groups) + " warpgroups, split " + std::to_string(form.split));
  trial.check();
}

class TwoFourNarrowCuda : public TwoFourFewCuda {
 protected:
  void SetUp() override {
    TwoFourFewCuda::SetUp();
    if (!IsSkipped() && driver::kernel_arch(0) != "sm_90a") {
      GTEST_SKIP() << "needs sm_90a";
    }
  }
};

TEST_F(TwoFourNarrowCuda, EveryForm) {
  for (const int groups : {1, 2}) {
    for (int split = 1; split <= 8; ++split) {
      for (const Index n : {1, 16, 31, 64}) {
        const DType dtype = split % 2 == 0 ? DType::bf16 : DType::f16;
        try_form({.m = 256, .n = n, .k = 1152, .dtype = dtype, .out = dtype}, {groups, split});
      }
    }
  }
}

TEST_F(TwoFourNarrowCuda, EveryNumberOfColumns) {
  for (Index n = 1; n <= 64; ++n) {
    try_form({.m = 128, .n = n, .k = 640}, {.groups = 1 + static_cast<int>(n % 2), .split = 2});
  }
}

TEST_F(TwoFourNarrowCuda, Depths) {
  for (const Index k : {128, 256, 384, 512, 640, 1024, 2176, 4096, 14336}) {
    for (const int groups : {1, 2}) {
      try_form({.m = 128, .n = 40, .k = k}, {.groups = groups});
      if (k >= 384) {
        try_form({.m = 128, .n = 12, .k = k}, {.groups = groups, .split = 3});
      }
    }
  }
}

TEST_F(TwoFourNarrowCuda, PitchesAndEpilogues) {
  for (const DType dtype : {DType::f16, DType::bf16}) {
    for (const Activation activation : {Activation::none, Activation::relu, Activation::gelu, Activation::silu}) {
      for (const bool bias : {false, true}) {
        try_form({.m = 384,
                  .n = 19,
                  .k = 1024,
                  .dtype = dtype,
                  .out = dtype,
                  .pad = 8,
                  .shift = 8,
                  .bias = bias,
                  .activation = activation},
                 {.groups = 2, .split = 3});
      }
    }
  }
  for (const int bytes : {1, 2, 4}) {
    try_form({.m = 64, .n = 64, .k = 1024, .word_bytes = bytes}, {.groups = 1, .split = 2});
  }
}

TEST_F(TwoFourNarrowCuda, WhatIsNotKeptIsNotMultiplied) {
  for (const Index n : {1, 30, 64}) {
    try_form({.m = 128, .n = n, .k = 1024, .spoil = true}, {.groups = 2, .split = 4});
  }
}

TEST_F(TwoFourNarrowCuda, ManyRunsAreEqual) {
  for (const Index n : {64, 16}) {
    Trial trial({.m = 512, .n = n, .k = 4096});
    ASSERT_TRUE(trial.run({.groups = 2, .split = 3}));
    const std::vector<std::uint8_t> first = trial.result();
    for (int count = 0; count < 1000; ++count) {
      ASSERT_TRUE(trial.run({.groups = 2, .split = 3}));
      ASSERT_EQ(first, trial.result()) << count;
    }
  }
}

TEST_F(TwoFourNarrowCuda, LeavesTheRestToOthers) {
  const Trial trial({.m = 128, .n = 8, .k = 256});
  Context context = Context::cuda(0);
  const auto takes = [&](const auto& change, const narrow::Form& form = {}) {
    Problem p = trial.problem();
    change(p);
    return narrow::run(p, context, form);
  };
  EXPECT_TRUE(takes([](Problem&) {}));
  EXPECT_FALSE(takes([](Problem&) {}, {.groups = 3}));
  EXPECT_FALSE(takes([](Problem&) {}, {.split = 3}));  // of two steps
  EXPECT_FALSE(takes([](Problem& p) { p.n = 65; }));
  EXPECT_FALSE(takes([](Problem& p) { p.m = 64; }));
  EXPECT_FALSE(takes([](Problem& p) { p.k = 192; }));
  EXPECT_FALSE(takes([](Problem& p) { p.batch = 2; }));
  EXPECT_FALSE(takes([](Problem& p) { p.out = DType::f32; }));
  EXPECT_FALSE(takes([](Problem& p) { p.dtype = p.out = DType::i8; }));
  EXPECT_FALSE(takes([](Problem& p) { p.scale_b = {p.b.data, 1}; }));
  EXPECT_FALSE(takes([](Problem& p) { p.c.col = 129; }));
  EXPECT_FALSE(takes([](Problem& p) { p.c.row = 2; }));
  EXPECT_FALSE(takes([](Problem& p) { p.b.row = 2; }));
  EXPECT_FALSE(takes([](Problem& p) { p.values.line = 132; }));
  EXPECT_FALSE(takes([](Problem& p) { p.words.line = 17; }));
}

// --------------------------------------------------------------------------- few columns of small weights on Hopper

void try_direct(const Case& c, const direct::Form& form) {
  Trial trial(c);
  ASSERT_TRUE(trial.run(form)) << c.text();
  SCOPED_TRACE(std::to_string(form.warps) + " warps, " + std::to_string(form.blocks) + " blocks");
  trial.check();
}

using TwoFourDirectCuda = TwoFourNarrowCuda;

TEST_F(TwoFourDirectCuda, EveryForm) {
  for (const int warps : {4, 8, 16}) {
    for (const int blocks : {1, 2}) {
      for (const Index n : {1, 8, 13, 16}) {
        const DType dtype = blocks == 1 ? DType::bf16 : DType::f16;
        if (n <= 8 || blocks == 1 || warps < 16) {
          try_direct({.m = 64, .n = n, .k = 1152, .dtype = dtype, .out = dtype}, {warps, blocks});
        }
      }
    }
  }
}

TEST_F(TwoFourDirectCuda, RowsColumnsAndDepthsOfAnyNumber) {
  for (Index n = 1; n <= 16; ++n) {
    try_direct({.m = 5 * n, .n = n, .k = 384}, {.warps = 4});
  }
  for (const Index k : {128, 256, 640, 2048, 4224}) {
    try_direct({.m = 33, .n = 3, .k = k}, {.warps = 8, .blocks = 2});
    try_direct({.m = 47, .n = 11, .k = k}, {.warps = 16});
  }
}

TEST_F(TwoFourDirectCuda, PitchesAndEpilogues) {
  for (const DType dtype : {DType::f16, DType::bf16}) {
    for (const Activation activation : {Activation::none, Activation::relu, Activation::gelu, Activation::silu}) {
      for (const bool bias : {false, true}) {
        try_direct({.m = 40,
                    .n = 9,
                    .k = 512,
                    .dtype = dtype,
                    .out = dtype,
                    .c_along_m = bias,
                    .pad = 8,
                    .shift = 8,
                    .bias = bias,
                    .activation = activation},
                   {});
      }
    }
  }
  for (const int bytes : {1, 2, 4}) {
    try_direct({.m = 64, .n = 4, .k = 1024, .word_bytes = bytes}, {});
  }
}

TEST_F(TwoFourDirectCuda, WhatIsNotKeptIsNotMultiplied) {
  for (const Index n : {1, 16}) {
    try_direct({.m = 64, .n = n, .k = 1024, .spoil = true}, {});
  }
}

TEST_F(TwoFourDirectCuda, ManyRunsAreEqual) {
  for (const Index n : {16, 1}) {
    Trial trial({.m = 1024, .n = n, .k = 2048});
    ASSERT_TRUE(trial.run(direct::Form{}));
    const std::vector<std::uint8_t> first = trial.result();
    for (int count = 0; count < 1000; ++count) {
      ASSERT_TRUE(trial.run(direct::Form{}));
      ASSERT_EQ(first, trial.result()) << count;
    }
  }
}

TEST_F(TwoFourDirectCuda, LeavesTheRestToOthers) {
  const Trial trial({.m = 128, .n = 8, .k = 256});
  Context context = Context::cuda(0);
  const auto takes = [&](const auto& change, const direct::Form& form = {}) {
    Problem p = trial.problem();
    change(p);
    return direct::run(p, context, form);
  };
  EXPECT_TRUE(takes([](Problem&) {}));
  EXPECT_FALSE(takes([](Problem&) {}, {.warps = 5}));
  EXPECT_FALSE(takes([](Problem&) {}, {.blocks = 3}));
  EXPECT_FALSE(takes([](Problem& p) { p.n = 16; }, {.warps = 16, .blocks = 2}));
  EXPECT_FALSE(takes([](Problem& p) { p.n = 17; }));
  EXPECT_FALSE(takes([](Problem& p) { p.k = 192; }));
  EXPECT_FALSE(takes([](Problem& p) { p.batch = 2; }));
  EXPECT_FALSE(takes([](Problem& p) { p.out = DType::f32; }));
  EXPECT_FALSE(takes([](Problem& p) { p.dtype = p.out = DType::i8; }));
  EXPECT_FALSE(takes([](Problem& p) { p.scale_b = {p.b.data, 1}; }));
  EXPECT_FALSE(takes([](Problem& p) { p.b.row = 2; }));
  EXPECT_FALSE(takes([](Problem& p) { p.b.col = 257; }));
  EXPECT_FALSE(takes([](Problem& p) { p.values.line = 132; }));
  EXPECT_FALSE(takes([](Problem& p) { p.words.line = 17; }));
  EXPECT_FALSE(takes([](Problem& p) { p.words.along = 2; }));
}

// ----------------------------------------------------------------------------------------------------- speed

}  // namespace
}  // namespace fretwork::two_four
