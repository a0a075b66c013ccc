// Packing and unpacking against the layout's mask.
#include <gtest/gtest.h>

#include <limits>
#include <vector>

#include "core/half.h"
#include "fretwork/fretwork.h"
#include "support/error_text.h"

namespace fretwork {
namespace {

constexpr DType kFloating[] = {DType::f64, DType::f32, DType::f16, DType::bf16};

std::shared_ptr<const BlockLayout> some_layout(std::int64_t r, std::int64_t c) {
  const std::uint8_t mask[] = {1, 0, 1, 0, 0, 0, 0, 0, 1, 1, 1, 1};
  return BlockLayout::make({2, 3, 2, r, c}, mask);
}

/// Bytes with a strided tensor inside; what is not an element is a guard.
struct Buffer {
  /// `gap` 0 is contiguous; otherwise every stride leaves room.
  Buffer(DType dtype, std::vector<std::int64_t> sizes, std::int64_t gap) {
    std::vector<std::int64_t> strides(sizes.size());
    std::int64_t step = 1 + gap;
    for (std::size_t d = sizes.size(); d-- > 0;) {
      strides[d] = step;
      step = step * std::max<std::int64_t>(sizes[d], 1) + gap;
    }
    size = size_of(dtype);
    bytes.assign(static_cast<std::size_t>(step + 16) * size, 0xa5);
    view = TensorView(bytes.data() + 8 * size, dtype, sizes, strides, {});
  }
  unsigned char* element(std::int64_t n) {
    std::int64_t at = 0;
    for (int d = view.rank; d-- > 0; n /= view.sizes[static_cast<std::size_t>(d)]) {
      at += n % view.sizes[static_cast<std::size_t>(d)] * view.strides[static_cast<std::size_t>(d)];
    }
    return static_cast<unsigned char*>(view.data) + at * static_cast<std::int64_t>(size);
  }
  std::uint64_t get(std::int64_t n) {
    std::uint64_t bits = 0;
    std::copy_n(element(n), size, reinterpret_cast<unsigned char*>(&bits));
    return bits;
  }
  void set(std::int64_t n, std::uint64_t bits) {
    std::copy_n(reinterpret_cast<const unsigned char*>(&bits), size, element(n));
  }
  /// Every byte outside the elements is as it was.
  bool guarded() {
    std::vector<bool> inside(bytes.size());
    for (std::int64_t n = 0; n < view.elements(); ++n) {
      const auto at = static_cast<std::size_t>(element(n) - bytes.data());
      std::fill_n(inside.begin() + static_cast<std::ptrdiff_t>(at), size, true);
    }
    for (std::size_t b = 0; b < bytes.size(); ++b) {
      if (!inside[b] && bytes[b] != 0xa5) {
        return false;
      }
    }
    return true;
  }
  std::vector<unsigned char> bytes;
  std::size_t size;
  TensorView view;
};

/// Dense position of each packed element of one batch, in (head, block row, block column, y, x) order, from the mask.
std::vector<std::int64_t> places(const BlockLayout& layout) {
  const std::int64_t rows = layout.shape()[1], cols = layout.shape()[2];
  const auto& s = layout.sizes();
  std::vector<std::uint8_t> mask(static_cast<std::size_t>(s.heads * rows * cols));
  layout.mask(mask);
  std::vector<std::int64_t> all;
  for (std::int64_t h = 0; h < s.heads; ++h) {
    for (std::int64_t m = 0; m < rows; m += s.block_rows) {
      for (std::int64_t n = 0; n < cols; n += s.block_cols) {
        for (std::int64_t k = 0;
             mask[static_cast<std::size_t>((h * rows + m) * cols + n)] != 0 && k < s.block_rows * s.block_cols; ++k) {
          all.push_back((h * rows + m + k / s.block_cols) * cols + n + k % s.block_cols);
        }
      }
    }
  }
  return all;
}

void check(DType dtype, std::int64_t r, std::int64_t c, std::int64_t batch, bool has_z, std::int64_t gap) {
  const auto layout = some_layout(r, c);
  std::vector<std::int64_t> dense_shape = {batch, 2, 3 * r, 2 * c}, packed_shape = {batch, layout->nnz(), r, c};
  if (!has_z) {
    dense_shape.erase(dense_shape.begin()), packed_shape.erase(packed_shape.begin());
  }
  Context context = Context::cpu();
  Buffer dense(dtype, dense_shape, gap), values(dtype, packed_shape, gap), back(dtype, dense_shape, gap);
  for (std::int64_t n = 0; n < dense.view.elements(); ++n) {
    dense.set(n, static_cast<std::uint64_t>(n) * 2654435761u % 60013u);
  }
  block_pack(dense.view, layout, values.view, context);
  const auto place = places(*layout);
  const auto per_batch = static_cast<std::int64_t>(place.size()), all = 2 * 3 * r * 2 * c;
  for (std::int64_t n = 0; n < values.view.elements(); ++n) {
    ASSERT_EQ(values.get(n), dense.get(n / per_batch * all + place[static_cast<std::size_t>(n % per_batch)])) << n;
  }
  EXPECT_TRUE(values.guarded());
  block_unpack(values.view, layout, -2.5, back.view, context);
  std::vector<std::uint8_t> mask(static_cast<std::size_t>(all));
  layout->mask(mask);
  const std::uint64_t fill = dtype == DType::f64   ? 0xc004000000000000u
                             : dtype == DType::f32 ? 0xc0200000u
                             : dtype == DType::f16 ? 0xc100u
                                                   : 0xc020u;
  for (std::int64_t n = 0; n < back.view.elements(); ++n) {
    ASSERT_EQ(back.get(n), mask[static_cast<std::size_t>(n % all)] != 0 ? dense.get(n) : fill) << n;
  }
  EXPECT_TRUE(back.guarded());
}

TEST(BlockPack, ThereAndBack) {
  for (const DType dtype : kFloating) {
    for (const std::int64_t gap : {0, 3}) {
      check(dtype, 8, 8, 2, true, gap);
      check(dtype, 16, 32, 3, true, gap);
      check(dtype, 9, 11, 1, false, gap);
      check(dtype, 8, 8, 0, true, gap);
    }
  }
}

TEST(BlockPack, OneHeadMatrix) {
  const std::uint8_t mask[] = {0, 1};
  const auto layout = BlockLayout::make({1, 1, 2, 8, 8}, mask);
  Context context = Context::cpu();
  Buffer dense(DType::f32, {8, 16}, 0), values(DType::f32, {1, 8, 8}, 0);
  for (std::int64_t n = 0; n < 128; ++n) {
    dense.set(n, static_cast<std::uint64_t>(n));
  }
  block_pack(dense.view, layout, values.view, context);
  EXPECT_EQ(values.get(0), 8u);
  EXPECT_EQ(values.get(63), 127u);
  block_unpack(values.view, layout, 0.0, dense.view, context);
  EXPECT_EQ(dense.get(7), 0u);
  EXPECT_EQ(dense.get(127), 127u);
}

TEST(BlockPack, EmptyLayoutFills) {
  const std::uint8_t none[] = {0, 0};
  const auto layout = BlockLayout::make({1, 1, 2, 8, 8}, none);
  Context context = Context::cpu();
  Buffer dense(DType::bf16, {8, 16}, 0), values(DType::bf16, {0, 8, 8}, 0);
  block_pack(dense.view, layout, values.view, context);
  block_unpack(values.view, layout, std::numeric_limits<double>::infinity(), dense.view, context);
  EXPECT_EQ(dense.get(0), 0x7f80u);
  EXPECT_EQ(dense.get(127), 0x7f80u);
}

TEST(BlockPack, BadCalls) {
  const auto layout = some_layout(16, 16);  // (2, 48, 32), 6 blocks
  Context context = Context::cpu();
  const auto pack = [&](DType dtype, std::vector<std::int64_t> sizes) {
    Buffer dense(dtype, std::move(sizes), 0), values(DType::f32, {1, layout->nnz(), 16, 16}, 0);
    return error_of([&] { block_pack(dense.view, layout, values.view, context); });
  };
  const auto unpack = [&](std::vector<std::int64_t> sizes) {
    Buffer values(DType::f32, std::move(sizes), 0), dense(DType::f32, {1, 2, 48, 32}, 0);
    return error_of([&] { block_unpack(values.view, layout, 0.0, dense.view, context); });
  };
  EXPECT_EQ(pack(DType::f32, {1, 2, 32, 48}),
            "pack: dense: expected shape (2, 48, 32) or (Z, 2, 48, 32), got (1, 2, 32, 48)");
  for (const auto& sizes : std::vector<std::vector<std::int64_t>>{{1, 3, 48, 32}, {48}, {1, 2, 48, 31}, {48, 32}}) {
    EXPECT_EQ(pack(DType::f32, sizes).find("pack: dense: expected shape"), 0u) << shape_text(sizes);
  }
  EXPECT_EQ(pack(DType::i8, {1, 2, 48, 32}), "pack: dense: expected float64, float32, float16 or bfloat16, got int8");
  EXPECT_EQ(pack(DType::f16, {1, 2, 48, 32}), "pack: values: expected float16, got float32");
  EXPECT_EQ(pack(DType::f32, {3, 2, 48, 32}).find("pack: values: expected a batch of 3"), 0u);
  EXPECT_EQ(unpack({1, 2, 48, 32}),
            "unpack: values: expected packed blocks (6, 16, 16) or (Z, 6, 16, 16), got (1, 2, 48, 32)");
  EXPECT_EQ(unpack({6, 16, 8}).find("unpack: values: expected packed blocks"), 0u);
  EXPECT_EQ(pack(DType::f32, {1, 2, 48, 32}), "no error");
}

TEST(Half, EveryValueRoundTripsAndRoundsToEven) {
  for (std::uint32_t bits = 0; bits < 0x10000u; ++bits) {
    const auto b = static_cast<std::uint16_t>(bits);
    const float wide = float_from_f16(b);
    if (wide == wide) {
      ASSERT_EQ(f16_from_float(wide), b) << bits;
    }
    if ((bits & 0x7fffu) < 0x7bffu) {  // halfway to the next goes to the even one
      const float half = (wide + float_from_f16(static_cast<std::uint16_t>(b + 1))) / 2;
      ASSERT_EQ(f16_from_float(half), (b & 1u) != 0 ? b + 1 : b) << bits;
    }
    const float brain = float_from_bf16(b);
    if (brain == brain) {
      ASSERT_EQ(bf16_from_float(brain), b) << bits;
    }
  }
  EXPECT_EQ(f16_from_float(65520.0f), 0x7c00u);
  EXPECT_EQ(f16_from_float(65519.0f), 0x7bffu);
  EXPECT_NE(bf16_from_float(std::numeric_limits<float>::quiet_NaN()) & 0x7fu, 0u);
}

}  // namespace
}  // namespace fretwork
