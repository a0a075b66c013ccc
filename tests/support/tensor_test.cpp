// The tests' own tensor: that it lies where its layout says, and sees what is written beside its elements.
#include "support/tensor.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <set>
#include <vector>

namespace fretwork {
namespace {

using Extents = std::vector<std::int64_t>;

Extents strides(const Tensor& t) { return {t.view.strides.begin(), t.view.strides.begin() + t.view.rank}; }

TEST(TestTensor, HasTheStridesOfItsLayout) {
  EXPECT_EQ(strides(Tensor(DType::f32, {2, 3, 4})), (Extents{12, 4, 1}));
  EXPECT_EQ(strides(Tensor(DType::f32, {2, 3, 4}, {.order = {0, 2, 1}})), (Extents{12, 1, 3}));
  EXPECT_EQ(strides(Tensor(DType::f32, {2, 3, 4}, {.step = 2, .gap = 5})), (Extents{3 * 13 + 5, 13, 2}));
  EXPECT_EQ(strides(Tensor(DType::f32, {2, 3, 4}, {.backwards = 0b100, .expanded = 0b001})), (Extents{0, 4, -1}));
}

TEST(TestTensor, KeepsElementsApart) {
  for (const DType dtype : {DType::f64, DType::f32, DType::f16, DType::bf16}) {
    Tensor t(dtype, {3, 2, 5}, {.order = {1, 2, 0}, .step = 2, .gap = 1, .backwards = 0b101});
    EXPECT_TRUE(std::isnan(t.get(0)));
    double next = 0;
    t.generate([&] { return next++; });
    EXPECT_EQ(t.get({2, 1, 3}), 2 * 10 + 5 + 3);
    EXPECT_EQ(t.broadcast({7, 2, 1, 3}), t.get(28));
    const std::vector<double> values = t.values();
    EXPECT_EQ(std::set<double>(values.begin(), values.end()).size(), 30U);
    EXPECT_TRUE(t.intact_around());
  }
}

TEST(TestTensor, SeesWhatIsWrittenBesideElements) {
  for (const std::int64_t beside : {-1, 4, 5, 14}) {  // before, between rows, behind
    Tensor t(DType::f16, {2, 4}, {.gap = 5});
    EXPECT_TRUE(t.intact_around());
    write_element(t.view.data, DType::f16, beside, 0.0);
    EXPECT_FALSE(t.intact_around()) << beside;
    t.poison();
    EXPECT_TRUE(t.intact_around());
  }
}

TEST(TestTensor, IsNoBetterAlignedThanAsked) {
  for (const std::size_t alignment : {2, 4, 16, 64, 128, 256}) {
    const Tensor t(DType::f16, {3, 4}, {.backwards = 0b10, .alignment = alignment});
    const auto lowest = reinterpret_cast<std::uintptr_t>(static_cast<std::uint16_t*>(t.view.data) - 3);
    EXPECT_EQ(lowest % (2 * alignment), alignment) << alignment;
  }
}

TEST(TestTensor, MayHaveNoElements) {
  const Tensor t(DType::f32, {3, 0, 2});
  EXPECT_TRUE(t.values().empty());
  EXPECT_TRUE(t.intact_around());
  EXPECT_TRUE(Tensor().empty());
}

}  // namespace
}  // namespace fretwork
