// 2:4 products with few columns on a GPU, on each of the kernels for them, against float64 made from the nibbles
// alone. Skipped where there is none.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <memory>
#include <vector>

#include "ops/two_four/choose.h"
#include "ops/two_four/cuda/params.h"
#include "runtime/cuda_driver.h"
#include "support/device_tensor.h"
#include "two_four/product.h"

namespace fretwork::two_four {
namespace {

using GpuProduct = Product<MirroredTensor>;

/// A product as these kernels' tests ask for it.
struct SmallN {
  Index m, n, k, batch = 1;
  DType dtype = DType::bf16, out = DType::bf16;
  int word_bytes = 2;
  bool b_along_k = true, c_along_m = true;
  Index pad = 0;         ///< between lines: units of 16 bytes of values, words, elements of b and c
  bool shifted = false;  ///< b and c are aligned to their elements only
  bool bias = false, scales = false;
  Activation activation = Activation::none;
  bool spoil = false;  ///< the last of four is never kept, and NaN in b

  GpuProduct product() const {
    Case c{.m = m,
           .n = n,
           .k = k,
           .batch = batch,
           .dtype = dtype,
           .out = out,
           .word_bytes = word_bytes,
           .b_along_k = b_along_k,
           .c_along_m = c_along_m,
           .value_gap = 16 / static_cast<Index>(size_of(dtype)) * pad,
           .word_gap = pad,
           .b_gap = pad,
           .c_gap = pad,
           .batch_gap = pad,
           .bias = bias,
           .scale_s = scales ? 2 : 0,
           .scale_b = scales ? 2 : 0,
           .activation = activation,
           .seed = static_cast<unsigned>(m * 7 + n * 5 + k)};
    GpuProduct made(c);
    if (shifted) {
      made.b = shift(made.b);
      made.out = shift(made.out);
    }
    for (Index i = 0; i < m; ++i) {  // every nibble meets every place within six neighbouring rows
      for (Index g = 0; g < k / 4; ++g) {
        made.set_nibble(i, g, static_cast<std::uint64_t>((i + 5 * g + i / 6 * g) % (spoil ? 3 : 6)));
      }
    }
    for (Index row = 3; spoil && row < k; row += 4) {
      for (Index zj = 0; zj < batch * n; ++zj) {
        made.set_b(zj / n, row, zj % n, std::numeric_limits<double>::quiet_NaN());
      }
    }
    made.upload();
    return made;
  }

 private:
  /// The same numbers from an odd multiple of an element's size on; the sparse operand stays where it is.
  static MirroredTensor shift(const MirroredTensor& from) {
    MirroredTensor to(from.view.dtype, from.view.shape(),
                      std::span(from.view.strides).first(static_cast<std::size_t>(from.view.rank)),
                      size_of(from.view.dtype));
    for (Index n = 0; n < from.view.elements(); ++n) {
      std::copy_n(from.address(n), size_of(from.view.dtype), to.address(n));
    }
    return to;
  }
};

/// Of a family or a configuration.
template <typename Which>
void run_and_check(const SmallN& of, const Which& which) {
  GpuProduct product = of.product();
  Context context = Context::cuda(0);
  ASSERT_TRUE(cuda::run(product.problem(), which, context)) << product.c.text();
  product.out.download();
  product.check();
}
void try_case(const SmallN& of) { run_and_check(of, kSmallNCpAsync); }

/// A thousand runs give the same bits.
template <typename Which>
void repeat(const SmallN& of, const Which& which) {
  GpuProduct product = of.product();
  Context context = Context::cuda(0);
  std::vector<std::byte> first;
  for (int n = 0; n <= 1000; ++n) {
    ASSERT_TRUE(cuda::run(product.problem(), which, context));
    product.out.download();
    first = n == 0 ? product.out.storage() : first;
    ASSERT_TRUE(first == product.out.storage()) << n << ": " << product.c.text();
  }
}

class TwoFourSmallNCpAsync : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!fretwork::cuda::available()) {
      GTEST_SKIP() << "no GPU";
    }
    if (fretwork::cuda::device_info(0).arch < 80) {
      GTEST_SKIP() << "needs sm_80";
    }
    scope_ = std::make_unique<fretwork::cuda::DeviceScope>(0);
  }

 private:
  std::unique_ptr<fretwork::cuda::DeviceScope> scope_;  ///< copies to and from the device need one as well
};

TEST_F(TwoFourSmallNCpAsync, EveryNumberOfColumns) {
  for (Index n = 1; n <= 64; ++n) {
    try_case({.m = 80,
              .n = n,
              .k = 1024,
              .dtype = n % 2 == 0 ? DType::bf16 : DType::f16,
              .out = n % 2 == 0 ? DType::bf16 : DType::f16});
  }
}

TEST_F(TwoFourSmallNCpAsync, RowsOfAnyNumber) {
  for (const Index m : {1, 2, 7, 8, 9, 15, 16, 17, 31, 33, 63, 100, 257, 1000}) {
    for (const Index n : {1, 9, 20, 64}) {
      try_case({.m = m, .n = n, .k = 512});
    }
  }
}

TEST_F(TwoFourSmallNCpAsync, DepthsOfAnyNumber) {
  for (const Index k : {16, 32, 48, 64, 80, 128, 240, 256, 272, 320, 528, 1008, 2064, 4096, 4112, 6000, 14336}) {
    for (const Index n : {1, 16, 31, 64}) {
      try_case({.m = 70, .n = n, .k = k});
    }
  }
}

TEST_F(TwoFourSmallNCpAsync, WholeLayers) {
  try_case({.m = 4096, .n = 3, .k = 1024});
  try_case({.m = 8192, .n = 16, .k = 512});
  try_case({.m = 4096, .n = 64, .k = 2048});
  try_case({.m = 14336, .n = 33, .k = 256});
}

TEST_F(TwoFourSmallNCpAsync, OrdersOfMemory) {
  for (const bool b_along_k : {true, false}) {
    for (const bool c_along_m : {true, false}) {
      for (const Index pad : {0, 1, 4, 8}) {
        for (const bool shifted : {false, true}) {
          for (const Index n : {1, 13, 40}) {
            try_case({.m = 99,
                      .n = n,
                      .k = 592,
                      .b_along_k = b_along_k,
                      .c_along_m = c_along_m,
                      .pad = pad,
                      .shifted = shifted});
          }
        }
      }
    }
  }
}

TEST_F(TwoFourSmallNCpAsync, WordsOfAnySize) {
  for (const int bytes : {1, 2, 4}) {
    for (const Index k : {512, 1040}) {
      try_case({.m = 50, .n = 24, .k = k, .word_bytes = bytes});
      try_case({.m = 50, .n = 24, .k = k, .word_bytes = bytes, .pad = 2});
    }
  }
}

TEST_F(TwoFourSmallNCpAsync, Epilogues) {
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

TEST_F(TwoFourSmallNCpAsync, BatchesAreColumns) {
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

TEST_F(TwoFourSmallNCpAsync, WhatIsNotKeptIsNotMultiplied) {
  for (const Index n : {1, 8, 30, 64}) {
    try_case({.m = 130, .n = n, .k = 1040, .spoil = true});
    try_case({.m = 130, .n = n, .k = 1040, .dtype = DType::f16, .out = DType::f32, .b_along_k = false, .spoil = true});
  }
}

TEST_F(TwoFourSmallNCpAsync, Bytes) {
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

TEST_F(TwoFourSmallNCpAsync, ManyRunsAreEqual) {
  repeat({.m = 600, .n = 64, .k = 4096}, kSmallNCpAsync);
  repeat({.m = 200, .n = 1, .k = 8192}, kSmallNCpAsync);
  repeat({.m = 1000, .n = 16, .k = 4112, .c_along_m = false}, kSmallNCpAsync);
}

/// Whether a kernel takes a product that `change` has changed.
template <typename Which, typename Change>
bool takes(const SmallN& of, const Which& which, const Change& change) {
  const GpuProduct product = of.product();
  Context context = Context::cuda(0);
  Problem p = product.problem();
  change(p);
  return cuda::run(p, which, context);
}

TEST_F(TwoFourSmallNCpAsync, LeavesTheRestToOthers) {
  const auto takes = [](const auto& change) {
    return two_four::takes({.m = 32, .n = 8, .k = 256}, kSmallNCpAsync, change);
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

// ------------------------------------------------------------------------------------------------- small_n_tma

/// Warpgroups of a CTA, with 64 rows each, CTAs that share the depth, and that share an SM.
Config tile(int columns, int groups, int split = 1, int ctas = 1) {
  return {.family = &kSmallNTma,
          .rows = 64 * groups,
          .columns = columns,
          .split = split,
          .stages = small_n_tma::stages(columns, groups, ctas)};
}
/// With the least width that has all columns.
Config split_config(int groups, int split, Index n) { return tile(n <= 16 ? 16 : n <= 32 ? 32 : 64, groups, split); }

class TwoFourSmallNTma : public TwoFourSmallNCpAsync {
 protected:
  void SetUp() override {
    TwoFourSmallNCpAsync::SetUp();
    if (!IsSkipped() && fretwork::cuda::kernel_arch(0) != "sm_90a") {
      GTEST_SKIP() << "needs sm_90a";
    }
  }
};

TEST_F(TwoFourSmallNTma, EveryConfig) {
  for (const int groups : {1, 2}) {
    for (int split = 1; split <= 8; ++split) {
      for (const Index n : {1, 16, 31, 64}) {
        const DType dtype = split % 2 == 0 ? DType::bf16 : DType::f16;
        run_and_check({.m = 256, .n = n, .k = 1152, .dtype = dtype, .out = dtype}, split_config(groups, split, n));
      }
    }
  }
}

TEST_F(TwoFourSmallNTma, EveryNumberOfColumns) {
  for (Index n = 1; n <= 64; ++n) {
    run_and_check({.m = 128, .n = n, .k = 640}, split_config(1 + static_cast<int>(n % 2), 2, n));
  }
}

TEST_F(TwoFourSmallNTma, Depths) {
  for (const Index k : {128, 256, 384, 512, 640, 1024, 2176, 4096, 14336}) {
    for (const int groups : {1, 2}) {
      run_and_check({.m = 128, .n = 40, .k = k}, split_config(groups, 1, 40));
      if (k >= 384) {
        run_and_check({.m = 128, .n = 12, .k = k}, split_config(groups, 3, 12));
      }
    }
  }
}

TEST_F(TwoFourSmallNTma, PitchesAndEpilogues) {
  for (const DType dtype : {DType::f16, DType::bf16}) {
    for (const Activation activation : {Activation::none, Activation::relu, Activation::gelu, Activation::silu}) {
      for (const bool bias : {false, true}) {
        run_and_check({.m = 384,
                       .n = 19,
                       .k = 1024,
                       .dtype = dtype,
                       .out = dtype,
                       .pad = 8,
                       .bias = bias,
                       .activation = activation},
                      split_config(2, 3, 19));
      }
    }
  }
  for (const int bytes : {1, 2, 4}) {
    run_and_check({.m = 64, .n = 64, .k = 1024, .word_bytes = bytes}, tile(64, 1, 2));
  }
}

/// Tiles side by side that share the columns evenly, more of them than there are SMs, and two CTAs to an SM.
TEST_F(TwoFourSmallNTma, TilesOfColumns) {
  for (const Index n : {65, 96, 100, 128, 129, 200, 255, 384, 391, 1000}) {
    for (const int columns : {64, 96, 128, 192}) {
      for (const int groups : {1, 2}) {
        const int split = 1 + static_cast<int>((n + columns / 32 + 3 * groups) % 8);
        const Config config = tile(columns, groups, split);
        const SmallN of{.m = 256,
                        .n = n,
                        .k = 1152,
                        .dtype = split % 3 == 0 ? DType::f16 : DType::bf16,
                        .out = split % 3 == 0 ? DType::f16 : DType::bf16,
                        .pad = n % 2 == 0 ? 8 : 0,
                        .bias = columns == 96 || n == 100,
                        .activation = n == 384 ? Activation::gelu : Activation::none};
        Problem p = of.product().problem();
        if (const auto all = candidates(p, {}); std::ranges::find(all, config, &Candidate::config) != all.end()) {
          run_and_check(of, config);
        }
      }
    }
  }
  run_and_check({.m = 4096, .n = 300, .k = 256}, tile(64, 1));
  run_and_check({.m = 4096, .n = 300, .k = 256}, tile(64, 1, 1, 2));
  run_and_check({.m = 2048, .n = 1000, .k = 512}, tile(96, 2));
}

TEST_F(TwoFourSmallNTma, WhatIsNotKeptIsNotMultiplied) {
  run_and_check({.m = 128, .n = 200, .k = 1024, .spoil = true}, tile(128, 2, 4));
  for (const Index n : {1, 30, 64}) {
    run_and_check({.m = 128, .n = n, .k = 1024, .spoil = true}, split_config(2, 4, n));
  }
}

TEST_F(TwoFourSmallNTma, ManyRunsAreEqual) {
  for (const Config& config : {tile(64, 1, 2), tile(96, 2, 3), tile(128, 2, 4), tile(192, 2, 2)}) {
    repeat({.m = 512, .n = 380, .k = 2048}, config);
  }
  for (const Index n : {64, 16}) {
    repeat({.m = 512, .n = n, .k = 4096}, split_config(2, 3, n));
  }
}

TEST_F(TwoFourSmallNTma, LeavesTheRestToOthers) {
  const auto takes = [](const auto& change, const Config& config = tile(16, 2)) {
    return two_four::takes({.m = 128, .n = 8, .k = 256}, config, change);
  };
  EXPECT_TRUE(takes([](Problem&) {}));
  EXPECT_FALSE(takes([](Problem&) {}, tile(16, 3)));
  EXPECT_FALSE(takes([](Problem&) {}, tile(16, 2, 3)));  // of two steps
  EXPECT_FALSE(takes([](Problem&) {}, tile(64, 2)));     // 16 are enough
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

// ------------------------------------------------------------------------------------------- small_n_registers

/// Warps of a CTA, which share the depth, and blocks of it that each has in flight.
Config warps_config(int warps, int blocks = 1) {
  return {.family = &kSmallNRegisters, .warps = warps, .stages = blocks};
}

using TwoFourSmallNRegisters = TwoFourSmallNTma;

TEST_F(TwoFourSmallNRegisters, EveryConfig) {
  for (const int warps : {4, 8, 16}) {
    for (const int blocks : {1, 2}) {
      for (const Index n : {1, 8, 13, 16}) {
        const DType dtype = blocks == 1 ? DType::bf16 : DType::f16;
        if (n <= 8 || blocks == 1 || warps < 16) {
          run_and_check({.m = 64, .n = n, .k = 1152, .dtype = dtype, .out = dtype}, warps_config(warps, blocks));
        }
      }
    }
  }
}

TEST_F(TwoFourSmallNRegisters, RowsColumnsAndDepthsOfAnyNumber) {
  for (Index n = 1; n <= 16; ++n) {
    run_and_check({.m = 5 * n, .n = n, .k = 384}, warps_config(4));
  }
  for (const Index k : {128, 256, 640, 2048, 4224}) {
    run_and_check({.m = 33, .n = 3, .k = k}, warps_config(8, 2));
    run_and_check({.m = 47, .n = 11, .k = k}, warps_config(16));
  }
}

TEST_F(TwoFourSmallNRegisters, PitchesAndEpilogues) {
  for (const DType dtype : {DType::f16, DType::bf16}) {
    for (const Activation activation : {Activation::none, Activation::relu, Activation::gelu, Activation::silu}) {
      for (const bool bias : {false, true}) {
        run_and_check({.m = 40,
                       .n = 9,
                       .k = 512,
                       .dtype = dtype,
                       .out = dtype,
                       .c_along_m = bias,
                       .pad = 8,
                       .bias = bias,
                       .activation = activation},
                      warps_config(8));
      }
    }
  }
  for (const int bytes : {1, 2, 4}) {
    run_and_check({.m = 64, .n = 4, .k = 1024, .word_bytes = bytes}, warps_config(8));
  }
}

TEST_F(TwoFourSmallNRegisters, WhatIsNotKeptIsNotMultiplied) {
  for (const Index n : {1, 16}) {
    run_and_check({.m = 64, .n = n, .k = 1024, .spoil = true}, warps_config(8));
  }
}

TEST_F(TwoFourSmallNRegisters, ManyRunsAreEqual) {
  for (const Index n : {16, 1}) {
    repeat({.m = 1024, .n = n, .k = 2048}, warps_config(8));
  }
}

TEST_F(TwoFourSmallNRegisters, LeavesTheRestToOthers) {
  const auto takes = [](const auto& change, const Config& config = warps_config(8)) {
    return two_four::takes({.m = 128, .n = 8, .k = 256}, config, change);
  };
  EXPECT_TRUE(takes([](Problem&) {}));
  EXPECT_FALSE(takes([](Problem&) {}, warps_config(5)));
  EXPECT_FALSE(takes([](Problem&) {}, warps_config(8, 3)));
  EXPECT_FALSE(takes([](Problem& p) { p.n = 16; }, warps_config(16, 2)));
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

}  // namespace
}  // namespace fretwork::two_four
