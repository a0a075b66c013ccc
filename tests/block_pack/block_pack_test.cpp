// Packing and unpacking against the layout's mask.
#include <gtest/gtest.h>

#include <cstring>
#include <limits>
#include <vector>

#include "core/half.h"
#include "fretwork/fretwork.h"
#include "support/error_text.h"
#include "support/reference.h"
#include "support/tensor.h"

namespace fretwork {
namespace {

constexpr DType kFloating[] = {DType::f64, DType::f32, DType::f16, DType::bf16};

std::shared_ptr<const BlockLayout> some_layout(std::int64_t r, std::int64_t c) {
  const std::uint8_t mask[] = {1, 0, 1, 0, 0, 0, 0, 0, 1, 1, 1, 1};
  return BlockLayout::make({2, 3, 2, r, c}, mask);
}

/// The bits of element n, in row-major order. Packing copies bits, so bits are compared.
std::uint64_t bits_of(const Tensor& tensor, std::int64_t n) {
  std::uint64_t bits = 0;
  std::memcpy(&bits, tensor.address(n), size_of(tensor.view.dtype));
  return bits;
}
void set_bits(Tensor& tensor, std::int64_t n, std::uint64_t bits) {
  std::memcpy(tensor.address(n), &bits, size_of(tensor.view.dtype));
}

/// `gap` 0 is contiguous; otherwise every stride leaves room.
Tensor with_gaps(DType dtype, const std::vector<std::int64_t>& sizes, std::int64_t gap) {
  return Tensor(dtype, sizes, MemoryLayout{.step = 1 + gap, .gap = gap});
}

void check(DType dtype, std::int64_t r, std::int64_t c, std::int64_t batch, bool has_z, std::int64_t gap) {
  const auto layout = some_layout(r, c);
  std::vector<std::int64_t> dense_shape = {batch, 2, 3 * r, 2 * c}, packed_shape = {batch, layout->nnz(), r, c};
  if (!has_z) {
    dense_shape.erase(dense_shape.begin()), packed_shape.erase(packed_shape.begin());
  }
  Context context = Context::cpu();
  Tensor dense = with_gaps(dtype, dense_shape, gap), values = with_gaps(dtype, packed_shape, gap);
  Tensor back = with_gaps(dtype, dense_shape, gap);
  for (std::int64_t n = 0; n < dense.view.elements(); ++n) {
    set_bits(dense, n, static_cast<std::uint64_t>(n) * 2654435761u % 60013u);
  }
  block_pack(dense.view, layout, values.view, context);
  const auto place = dense_places(*layout);
  const auto per_batch = static_cast<std::int64_t>(place.size()), all = 2 * 3 * r * 2 * c;
  for (std::int64_t n = 0; n < values.view.elements(); ++n) {
    ASSERT_EQ(
        bits_of(values, n),
        bits_of(dense, n / per_batch * all + static_cast<std::int64_t>(place[static_cast<std::size_t>(n % per_batch)])))
        << n;
  }
  EXPECT_TRUE(values.intact_around());
  block_unpack(values.view, layout, -2.5, back.view, context);
  const auto mask = mask_of(*layout);
  const std::uint64_t fill = dtype == DType::f64   ? 0xc004000000000000u
                             : dtype == DType::f32 ? 0xc0200000u
                             : dtype == DType::f16 ? 0xc100u
                                                   : 0xc020u;
  for (std::int64_t n = 0; n < back.view.elements(); ++n) {
    ASSERT_EQ(bits_of(back, n), mask[static_cast<std::size_t>(n % all)] != 0 ? bits_of(dense, n) : fill) << n;
  }
  EXPECT_TRUE(back.intact_around());
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
  Tensor dense(DType::f32, {8, 16}), values(DType::f32, {1, 8, 8});
  for (std::int64_t n = 0; n < 128; ++n) {
    set_bits(dense, n, static_cast<std::uint64_t>(n));
  }
  block_pack(dense.view, layout, values.view, context);
  EXPECT_EQ(bits_of(values, 0), 8u);
  EXPECT_EQ(bits_of(values, 63), 127u);
  block_unpack(values.view, layout, 0.0, dense.view, context);
  EXPECT_EQ(bits_of(dense, 7), 0u);
  EXPECT_EQ(bits_of(dense, 127), 127u);
}

TEST(BlockPack, EmptyLayoutFills) {
  const std::uint8_t none[] = {0, 0};
  const auto layout = BlockLayout::make({1, 1, 2, 8, 8}, none);
  Context context = Context::cpu();
  Tensor dense(DType::bf16, {8, 16}), values(DType::bf16, {0, 8, 8});
  block_pack(dense.view, layout, values.view, context);
  block_unpack(values.view, layout, std::numeric_limits<double>::infinity(), dense.view, context);
  EXPECT_EQ(bits_of(dense, 0), 0x7f80u);
  EXPECT_EQ(bits_of(dense, 127), 0x7f80u);
}

TEST(BlockPack, BadCalls) {
  const auto layout = some_layout(16, 16);  // (2, 48, 32), 6 blocks
  Context context = Context::cpu();
  const auto pack = [&](DType dtype, const std::vector<std::int64_t>& sizes) {
    Tensor dense(dtype, sizes), values(DType::f32, {1, layout->nnz(), 16, 16});
    return error_of([&] { block_pack(dense.view, layout, values.view, context); });
  };
  const auto unpack = [&](const std::vector<std::int64_t>& sizes) {
    Tensor values(DType::f32, sizes), dense(DType::f32, {1, 2, 48, 32});
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
