// A 2:4 product for tests: operands of any type and strides in the tests' tensors, and its results in float64, made
// from the nibbles alone.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "core/half.h"
#include "ops/two_four/problem.h"
#include "support/activated.h"
#include "support/reference.h"
#include "support/result_types.h"
#include "support/tensor.h"

namespace fretwork::two_four {

using Index = std::int64_t;

/// A product. Gaps are elements (of metadata: words) behind every line, and behind the last one of a batch.
struct Case {
  Index m, n, k, batch = 1;
  DType dtype = DType::bf16, out = DType::bf16;
  int word_bytes = 2;
  bool b_along_k = true, c_along_m = true;  ///< as in a linear layer; else along n
  bool sparse_along_m = false;              ///< values and metadata of neighbouring lines lie together
  Index value_gap = 0, word_gap = 0, b_gap = 0, c_gap = 0, batch_gap = 0;
  Index b_step = 1, c_step = 1;  ///< from one neighbour to the next
  bool backwards = false;        ///< b and c, along both dimensions
  std::size_t alignment = 16;    ///< of b and c, and of the sparse operand if that is less
  bool shared_b = false;         ///< all batches have the same
  bool bias = false, bias_f32 = false;
  int scale_s = 0, scale_b = 0;  ///< 0: none; 1: one for all; 2: one for each line
  float scale_out = 0;           ///< 0: none
  Activation activation = Activation::none;
  Precision precision = Precision::tf32;
  bool whole = false;   ///< small integers, whose sums are exact in every type
  double slack = 4e-6;  ///< how far products and sums may be off, relative to the magnitudes that are added
  unsigned seed = 1;

  Index group() const { return two_four::group(dtype); }
  Index words() const { return (k / group() + 2 * word_bytes - 1) / (2 * word_bytes); }
  /// Lines of values, metadata and b begin at multiples of 16 bytes, with `units` of 16 bytes between them.
  Case& align_lines(Index units = 0) {
    const Index unit = 16 / static_cast<Index>(size_of(dtype)), word_unit = 16 / word_bytes;
    const auto gap = [units](Index count, Index of) { return (of - count % of) % of + units * of; };
    value_gap = gap(k / 2, unit);
    word_gap = gap(words(), word_unit);
    b_gap = gap(b_along_k ? k : n, unit);
    return *this;
  }
  std::string text() const {
    std::ostringstream text;
    text << m << "×" << k << "×" << n << " batch " << batch << ' ' << name_of(dtype) << " to " << name_of(out)
         << (b_along_k ? ", b along k" : ", b along n") << (c_along_m ? ", c along m" : ", c along n") << ", steps "
         << b_step << ' ' << c_step << (sparse_along_m ? ", sparse along m" : "") << ", gaps " << value_gap << ' '
         << word_gap << ' ' << b_gap << ' ' << c_gap << ' ' << batch_gap << (backwards ? ", backwards" : "")
         << ", alignment " << alignment << ", words of " << word_bytes << (bias ? ", bias" : "") << ", scales "
         << scale_s << ' ' << scale_b << ' ' << scale_out << ", activation " << static_cast<int>(activation)
         << ", precision " << static_cast<int>(precision) << (shared_b ? ", shared b" : "") << (whole ? ", whole" : "")
         << ", seed " << seed;
    return text.str();
  }
};

/// The operands and the result of a case. `Memory` is Tensor, or MirroredTensor for the GPU.
template <typename Memory>
class Product {
 public:
  Case c;
  std::mt19937 random;
  Memory values, words, b, out, bias, scale_s, scale_b, scale_out;

  explicit Product(const Case& which)
      : c(which),
        random(c.seed),
        values(sparse(c.dtype, c.k / 2, c.value_gap)),
        words(sparse(c.word_bytes == 1   ? DType::i8
                     : c.word_bytes == 2 ? DType::i16
                                         : DType::i32,
                     c.words(), c.word_gap)),
        b(dense(c.dtype, {c.batch, c.k, c.n}, c.b_along_k, c.b_gap, c.b_step, c.shared_b)),
        out(dense(c.out, {c.batch, c.m, c.n}, c.c_along_m, c.c_gap, c.c_step, false)),
        bias(c.bias_f32 ? DType::f32 : c.out, {c.m}),
        scale_s(DType::f32, {c.m}),
        scale_b(DType::f32, {c.n}),
        scale_out(DType::f32, {1}) {
    for (Memory* operand : {&values, &b}) {
      for (Index n = 0; n < operand->view.elements(); ++n) {
        set(*operand, n, operand_number());
      }
    }
    bias.generate([&] { return c.out == DType::i32 ? std::round(1e6 * real()) : real(); });
    const double usual = is_integer(c.dtype) && !c.whole ? 1e-3 : 1.0;  // sums of integers are large
    scale_s.generate([&] { return usual * (1.0 + 0.75 * real()); });
    scale_b.generate([&] { return std::copysign(1.0 + 0.75 * real(), real()); });
    scale_out.set(0, c.scale_out);
    for (Index i = 0; i < c.m; ++i) {
      for (Index g = 0; g < c.k / c.group(); ++g) {
        set_nibble(i, g, random());
      }
    }
  }

  /// Element n in row-major order; 8-bit types without a sign too.
  static void set(Memory& tensor, Index n, double x) {
    if (tensor.view.dtype == DType::u8) {
      *tensor.address(n) = static_cast<std::byte>(std::min(std::abs(x), 255.0));
    } else {
      tensor.set(n, x);
    }
  }
  void set_b(Index z, Index k, Index j, double x) { set(b, (z * c.k + k) * c.n + j, x); }

  /// Any valid nibble, by number.
  void set_nibble(Index i, Index g, std::uint64_t number) {
    constexpr std::array<unsigned, 6> kNibbles{0x4, 0x8, 0x9, 0xc, 0xd, 0xe};
    const unsigned nibble = c.group() == 2 ? kNibbles[number % 2 * 5] : kNibbles[number % 6];
    std::byte& byte = *nibble_byte(i, g);
    byte =
        g % 2 == 0 ? (byte & std::byte{0xf0}) | std::byte(nibble) : (byte & std::byte{0x0f}) | std::byte(nibble << 4);
  }
  unsigned nibble(Index i, Index g) { return std::to_integer<unsigned>(*nibble_byte(i, g)) >> 4 * (g % 2) & 15u; }
  /// Which row of b a kept value meets.
  Index row(Index i, Index kept) {
    const Index g = kept / (c.group() / 2);
    const unsigned bits = nibble(i, g);
    return g * c.group() + (c.group() == 2 ? (bits == 0xe ? 1 : 0) : static_cast<Index>(bits >> 2 * (kept % 2) & 3));
  }

  /// On the GPU, if the tensors are there.
  Problem problem() const {
    Problem p;
    p.m = c.m, p.n = c.n, p.k = c.k, p.batch = c.batch;
    p.dtype = c.dtype, p.out = c.out;
    p.values = matrix(values), p.words = matrix(words);
    p.word_bytes = c.word_bytes;
    p.b = dense(b), p.c = dense(out);
    p.bias = {c.bias ? view_of(bias).data : nullptr, 1};
    p.bias_f32 = c.bias_f32;
    p.scale_s = {c.scale_s > 0 ? view_of(scale_s).data : nullptr, c.scale_s == 2 ? 1 : 0};
    p.scale_b = {c.scale_b > 0 ? view_of(scale_b).data : nullptr, c.scale_b == 2 ? 1 : 0};
    p.scale_out = c.scale_out != 0 ? static_cast<const float*>(view_of(scale_out).data) : nullptr;
    p.activation = c.activation;
    return p;
  }
  void upload() {
    for (Memory* memory : {&values, &words, &b, &out, &bias, &scale_s, &scale_b, &scale_out}) {
      memory->upload();
    }
  }

  /// Compares the result, of large products a part of it, the last row among it; and nothing else was written.
  void check() {
    SCOPED_TRACE(c.text());
    const std::vector<double> left = values.values(), right = b.values(), got = out.values();
    const Index skip = std::max<Index>(1, c.batch * c.m * c.n * std::max<Index>(c.k, 1) / 4'000'000) | 1;
    int wrong = 0;
    Index turn = 0;
    for (Index i = 0; i < c.m; ++i) {
      std::vector<Index> rows(static_cast<std::size_t>(c.k / 2));
      for (Index kept = 0; kept < c.k / 2; ++kept) {
        rows[static_cast<std::size_t>(kept)] = row(i, kept);
      }
      for (Index zj = 0; zj < c.batch * c.n && wrong < 5; ++zj, ++turn) {
        const Index z = zj / c.n, j = zj % c.n;
        if (turn % skip == 0 || i == c.m - 1) {
          ReferenceSum sum;
          for (Index kept = 0; kept < c.k / 2; ++kept) {
            sum.add(left[static_cast<std::size_t>(i * (c.k / 2) + kept)] *
                    right[static_cast<std::size_t>((z * c.k + rows[static_cast<std::size_t>(kept)]) * c.n + j)]);
          }
          const double result = got[static_cast<std::size_t>((z * c.m + i) * c.n + j)];
          if (const auto [want, most] = expected(sum, i, j); !is_near(result, want, most)) {
            ADD_FAILURE() << "c[" << z << ", " << i << ", " << j << "] is " << result << ", not " << want << " ± "
                          << most;
            ++wrong;
          }
        }
      }
    }
    EXPECT_TRUE(out.intact_around()) << "wrote beside c";
  }

 private:
  double real() { return std::uniform_real_distribution<double>(-1.0, 1.0)(random); }
  double operand_number() {
    if (c.whole) {
      return std::uniform_int_distribution<int>(is_unsigned() ? 0 : -3, 3)(random);
    }
    if (is_integer(c.dtype)) {
      return std::uniform_int_distribution<int>(is_unsigned() ? 0 : -128, is_unsigned() ? 255 : 127)(random);
    }
    const double number = 2 * real();
    const bool rounded = c.dtype == DType::f32 && c.precision == Precision::tf32;  // to what tf32 holds
    return rounded ? static_cast<double>(float_from_f16(f16_from_float(static_cast<float>(number)))) : number;
  }
  bool is_unsigned() const { return c.dtype == DType::u8; }

  Memory sparse(DType dtype, Index count, Index gap) const {
    MemoryLayout layout = c.sparse_along_m ? MemoryLayout::transposed(2) : MemoryLayout{};
    layout.gap = gap;
    layout.alignment = std::min<std::size_t>(c.alignment, 16);
    return Memory(dtype, {c.m, count}, layout);
  }
  Memory dense(DType dtype, const std::array<Index, 3>& sizes, bool along_rows, Index gap, Index step,
               bool shared) const {
    const Index sign = c.backwards ? -1 : 1, near = step, count = along_rows ? sizes[1] : sizes[2];
    const Index line = std::max<Index>(count, 1) * step + gap;
    const Index batch = line * std::max<Index>(along_rows ? sizes[2] : sizes[1], 1) + c.batch_gap;
    const std::array<Index, 3> strides{shared ? 0 : batch, sign * (along_rows ? near : line),
                                       sign * (along_rows ? line : near)};
    return Memory(dtype, sizes, strides, std::max(c.alignment, size_of(dtype)));
  }
  static const TensorView& view_of(const Memory& tensor) {
    if constexpr (requires { tensor.device_view; }) {
      return tensor.device_view;
    } else {
      return tensor.view;
    }
  }
  static Matrix matrix(const Memory& tensor) {
    const TensorView& view = view_of(tensor);
    return {view.data, view.stride(0), view.stride(1)};
  }
  static Dense dense(const Memory& tensor) {
    const TensorView& view = view_of(tensor);
    return {view.data, view.stride(1), view.stride(2), view.stride(0)};
  }
  std::byte* nibble_byte(Index i, Index g) {
    const Index in_word = 2 * c.word_bytes;
    return words.address(i * c.words() + g / in_word) + g % in_word / 2;
  }

  /// What a result should be, and by how much it may be off.
  std::array<double, 2> expected(const ReferenceSum& sum, Index i, Index j) const {
    const double scale = (c.scale_s > 0 ? scale_s.get(c.scale_s == 2 ? i : 0) : 1.0) *
                         (c.scale_b > 0 ? scale_b.get(c.scale_b == 2 ? j : 0) : 1.0);
    const double added = c.bias ? bias.get(i) : 0.0, after = c.scale_out != 0 ? double{c.scale_out} : 1.0;
    const double want = saturated(c.out, activated(c.activation, sum.value * scale + added) * after);
    if (c.out == DType::i32 && c.scale_s == 0 && c.scale_b == 0 && c.scale_out == 0 &&
        c.activation <= Activation::relu) {
      return {want, 0.0};
    }
    const auto [last, step] = rounding_of(c.out);
    const bool wide = c.dtype == DType::f64 && c.out == DType::f64;
    const double sums = wide ? 1e-14 : is_integer(c.dtype) ? 0.0 : c.slack, rest = wide ? 1e-14 : 5e-7;
    const double applied = c.activation != Activation::none && c.out != DType::f32 && !wide ? 3e-5 : 0.0;
    const double most =
        sums * sum.magnitude * std::abs(scale) + rest * (std::abs(sum.value * scale) + std::abs(added) + 1.0);
    return {want, most * std::abs(after) + (1.02 * last + applied) * std::abs(want) + step +
                      (c.out == DType::i32 ? 0.51 : 0.0)};
  }
  /// Beyond what f16 holds a result is infinite.
  bool is_near(double got, double want, double most) const {
    constexpr double kOverflow = 65520;  // the least that rounds to infinity
    if (c.out == DType::f16 && std::isinf(got)) {
      return std::abs(want) + most >= kOverflow && std::signbit(got) == std::signbit(want);
    }
    return std::abs(got - want) <= most || (std::isnan(got) && std::isnan(want)) || got == want;
  }
};

}  // namespace fretwork::two_four
