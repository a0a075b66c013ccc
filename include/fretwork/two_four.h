// 2:4 sparsity: of every four neighbours two are kept, of every two one for f32. The plain form, what makes and undoes
// it, and its products.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <type_traits>
#include <vector>

#include "fretwork/context.h"
#include "fretwork/ops.h"
#include "fretwork/tensor.h"

namespace fretwork {

/// A matrix compressed along one axis, as views that own nothing. Group g of a line (the elements g·group … of the
/// compressed axis) has a nibble idx0 | idx1 << 2, idx0 < idx1, at bit 4g of the line's words: the same bytes whether
/// words have 8, 16 or 32 bits. An f32 pair has 4 (the first is kept) or 0xE (the second).
/// `Void` is const void where the matrix is only read.
template <typename Void>
struct BasicTwoFour {
  BasicTensorView<Void> values;    ///< (M, K/2), or (K/2, N) where dim is 0
  BasicTensorView<Void> metadata;  ///< (M, words) or (words, N) of i8, i16, i32 or the unsigned types of these sizes
  int dim = 1;                     ///< the compressed axis: 0 or 1

  /// Of the matrix that this stands for.
  std::array<std::int64_t, 2> shape() const;
  /// Swaps shape and dim; copies nothing.
  BasicTwoFour transpose() const;
  /// Lines [begin, end) of the other axis; copies nothing.
  BasicTwoFour lines(std::int64_t begin, std::int64_t end) const;
  /// What may be written may be read.
  operator BasicTwoFour<const void>() const  // NOLINT: a TwoFour is a ConstTwoFour
      requires(!std::is_const_v<Void>) {
    return {values, metadata, dim};
  }
};

extern template struct BasicTwoFour<void>;
extern template struct BasicTwoFour<const void>;

/// What an op writes; and what it reads, to which the former converts.
using TwoFour = BasicTwoFour<void>;
using ConstTwoFour = BasicTwoFour<const void>;

namespace two_four {

/// Neighbours in a group: 2 for f32, 4 otherwise.
std::int64_t group(DType dtype);
/// Words for k elements of `dtype`.
std::int64_t words(std::int64_t k, DType dtype, DType word);

/// Places of what is wrong, for the ops below: row·columns + column of the first bad group's first element, in
/// row-major order of the matrix, or −1. On a GPU it is device memory and holds the answer when the stream gets there.
///
/// Groups with fewer non-zeros than they may have keep the lowest free indices. −0.0 counts as zero, NaN and Inf do
/// not. Where a group has more, *bad says so and what is written for it is undefined but valid; null: not looked for.
void compress(const ConstTensorView& dense, const TwoFour& out, std::int64_t* bad, Context& context);
/// Only looks.
void check(const ConstTensorView& dense, int dim, std::int64_t* bad, Context& context);
/// Whether every nibble that stands for a group with a number is a valid one: *bad is the place of the first that is
/// not. A group of zeros may have any.
void check_metadata(const ConstTwoFour& matrix, std::int64_t* bad, Context& context);
/// The same, and takes anyone's words in: `words`, which is like matrix.metadata or is it, gets what a kernel may read.
/// Groups of zeros get nibble 4; with keep_valid only those of them whose nibble is not valid.
void canonical(const ConstTwoFour& matrix, const TensorView& words, bool keep_valid, std::int64_t* bad,
               Context& context);
/// Zeros where nothing is kept.
void to_dense(const ConstTwoFour& matrix, const TensorView& dense, Context& context);
/// values = the elements of `dense` where `metadata`, of a matrix compressed along `dim`, keeps one: the gradient of
/// to_dense.
void gather(const ConstTensorView& dense, const ConstTensorView& metadata, int dim, const TensorView& values,
            Context& context);
/// Keeps half of each group, the largest magnitudes (ties: the lower index; NaN is larger than all). `transposable`:
/// of each 4×4 (f32: 2×2) square, half of every row and every column, near the largest sum of magnitudes there is.
void prune(const ConstTensorView& dense, int dim, bool transposable, const TensorView& out, Context& context);
/// Transposable pruning and both compressions in one pass: `rows` with dim 1 and `cols` with dim 0.
void prune_both(const ConstTensorView& dense, const TwoFour& rows, const TwoFour& cols, Context& context);

/// Foreign orders of the metadata: "torch" and "cutlass_sm80", which are one, and "cutlass_sm90" for a tile_k. For
/// each byte of the foreign buffer the byte of the plain one (line·bytes of a line + byte) that it holds, or −1 for
/// padding. A line has a byte for every two groups, as words of 8 bits leave it. Throws Error, naming `op`, where the
/// order has no place for such a matrix.
std::vector<std::int64_t> order(const char* op, std::string_view layout, std::int64_t lines, std::int64_t k,
                                DType dtype, std::int64_t tile_k);

/// Options of the products.
struct Options {
  /// One for each line of the sparse operand, of the dtype of the result, or f32 where that has 8 bits.
  std::optional<ConstTensorView> bias = {};
  Activation activation = Activation::none;
  std::optional<ConstTensorView> scale_a = {};    ///< f32, one number () or one for each row of a (M)
  std::optional<ConstTensorView> scale_b = {};    ///< f32, one number () or one for each column of b (N)
  std::optional<ConstTensorView> scale_out = {};  ///< f32, one number (), after the activation
};

/// out = activation(a·b·scale_a·scale_b + bias)·scale_out. b (…, K, N), out (…, M, N); any strides. The result has any
/// floating dtype, fp8 or i8, and of integers also i32. Rounded once, to nearest even; i8 and fp8 are saturated.
void matmul(const ConstTwoFour& a, const ConstTensorView& b, const TensorView& out, Context& context,
            const Options& options = {});
/// The same with the sparse operand on the right: a (…, M, K), b (K, N) with dim 0, out (…, M, N).
void matmul(const ConstTensorView& a, const ConstTwoFour& b, const TensorView& out, Context& context,
            const Options& options = {});

/// A layer's product: out = activation(x·weightᵀ·scales + bias). x (…, in) of one dimension or more, weight (out, in)
/// with dim 1, out (…, out).
void linear(const ConstTensorView& x, const ConstTwoFour& weight, const TensorView& out, Context& context,
            const Options& options = {});

/// Gradients of a layer's product without options: d_x = d_out·weight, and d_values = the elements of d_outᵀ·x that
/// `metadata`, of a weight (out, in) with dim 1, keeps. x and d_x are (rows, in), d_out is (rows, out); any strides,
/// one floating dtype. On a CPU, where nothing as large as the dense weight is written. A GPU's are dense products of
/// what to_dense writes, and gather.
void linear_backward_input(const ConstTensorView& d_out, const ConstTwoFour& weight, const TensorView& d_x,
                           Context& context);
void linear_backward_values(const ConstTensorView& x, const ConstTensorView& d_out, const ConstTensorView& metadata,
                            const TensorView& d_values, Context& context);

/// Whether expanding the sparse operand (m × k) and a dense product with n columns is likely to be quicker on `device`,
/// with the kernels that it has here.
bool dense_wins(std::int64_t m, std::int64_t n, std::int64_t k, DType dtype, Device device, Precision precision);

}  // namespace two_four
}  // namespace fretwork
