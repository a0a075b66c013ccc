// The operators. Each checks its arguments, throws Error on a bad one, and runs where the context says.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "fretwork/context.h"
#include "fretwork/pattern.h"
#include "fretwork/tensor.h"

namespace fretwork {

/// Options of the three block-sparse products.
struct MatmulOptions {
  bool trans_a = false, trans_b = false;
  /// Sum the result over Z or H, as the gradient of a broadcast operand needs.
  bool sum_z = false, sum_h = false;
};

/// Sparse = op(a)·op(b) at the blocks of `layout`. a, b (Z,H,·,·); out (Z,nnz,b,b).
void sdd(const TensorView& a, const TensorView& b, const BlockLayout& layout, const TensorView& out, Context& context,
         const MatmulOptions& options = {});
/// Dense = op(sparse)·op(b). values (Z,nnz,b,b) of `layout` as stored.
void dsd(const TensorView& values, const TensorView& b, const BlockLayout& layout, const TensorView& out,
         Context& context, const MatmulOptions& options = {});
/// Dense = op(a)·op(sparse).
void dds(const TensorView& a, const TensorView& values, const BlockLayout& layout, const TensorView& out,
         Context& context, const MatmulOptions& options = {});

/// The shapes that `out` must have, after all checks that need no data.
std::vector<std::int64_t> sdd_shape(const TensorView& a, const TensorView& b, const BlockLayout& layout,
                                    const MatmulOptions& options = {});
std::vector<std::int64_t> dsd_shape(const TensorView& values, const TensorView& b, const BlockLayout& layout,
                                    const MatmulOptions& options = {});
std::vector<std::int64_t> dds_shape(const TensorView& a, const TensorView& values, const BlockLayout& layout,
                                    const MatmulOptions& options = {});

/// "add" adds the mask; "mul" turns its zeros into −inf and leaves the rest.
enum class MaskMode : std::uint8_t { add, mul };

/// Options of block_softmax; a null pointer is an extra that is not there.
struct SoftmaxOptions {
  double scale = 1.0;
  const TensorView* rpe = nullptr;               ///< broadcasts to (Z,H,M,N)
  const TensorView* key_padding_mask = nullptr;  ///< (Z,N)
  const TensorView* attn_mask = nullptr;         ///< (M,N) or (H,M,N)
  MaskMode key_padding_mask_mode = MaskMode::add, attn_mask_mode = MaskMode::add;
};

/// out = softmax of values·scale + extras over the stored entries of each row. values, out ((Z,)nnz,b,b).
void block_softmax(const TensorView& values, const BlockLayout& layout, const TensorView& out, Context& context,
                   const SoftmaxOptions& options = {});
/// The gradient: d_values = scale·d, and d_rpe, where given, = d summed to rpe's shape, d = out·(d_out − Σ out·d_out).
void block_softmax_backward(const TensorView& out, const TensorView& d_out, const BlockLayout& layout, double scale,
                            const TensorView& d_values, const TensorView* d_rpe, Context& context);

/// Dense (Z,H,M,N) to packed (Z,nnz,b,b) and back; unpack writes `fill` where there is no block.
void block_pack(const TensorView& dense, const BlockLayout& layout, const TensorView& values, Context& context);
void block_unpack(const TensorView& values, const BlockLayout& layout, double fill, const TensorView& dense,
                  Context& context);

/// What a product applies to its sums; gelu is the exact one.
enum class Activation : std::uint8_t { none, relu, gelu, silu };

struct KsmmOptions {
  const TensorView* bias = nullptr;  ///< (out features)
  Activation activation = Activation::none;
};

/// out = activation(x·Kᵀ + bias) for the Kronecker factor K with weights w (a,b,c,d). x (batch, a·c·d), out (batch,
/// a·b·d), any strides: features that stand before the batch in memory are a transposed view. The gradient of x is the
/// same product with w.transpose(1, 2).
void ksmm(const TensorView& x, const TensorView& w, const TensorView& out, Context& context,
          const KsmmOptions& options = {});
/// The gradients of w and, where given, of bias: d_w[i,j,k,l] = Σ_n d_out[n,(i,j,l)]·x[n,(i,k,l)], d_bias = Σ_n d_out.
void ksmm_backward_weight(const TensorView& x, const TensorView& d_out, const TensorView& d_w, const TensorView* d_bias,
                          Context& context);
/// One factor after another, weights[0] first; bias and activation after the last.
void ksmm_chain(const TensorView& x, std::span<const TensorView> weights, const TensorView& out, Context& context,
                const KsmmOptions& options = {});
/// How ksmm_chain runs factors of these patterns, one line for each step: "0+1: fused, clusters of 8, 16 rows", "2:
/// strided". `arch` is "cpu", an architecture such as "sm_90a", of which none needs to be there, or a GPU, "cuda:0".
/// Operands are taken to be contiguous.
std::vector<std::string> ksmm_chain_plan(std::span<const KroneckerPattern::Sizes> patterns, const std::string& arch,
                                         DType dtype = DType::f16, bool last = false);

/// w (a,b,c,d) as a matrix (a·b·d, a·c·d), and back. from_dense gives the place (row·columns + column) of the first
/// non-zero that the pattern does not hold, or −1, in *outside: on a GPU, where it is device memory, when the stream
/// gets there.
void kronecker_to_dense(const TensorView& w, const TensorView& dense, Context& context);
void kronecker_from_dense(const TensorView& dense, const TensorView& w, std::int64_t* outside, Context& context);
/// The shapes of their results, after all checks that need no data.
std::vector<std::int64_t> kronecker_to_dense_shape(const TensorView& w);
std::vector<std::int64_t> kronecker_from_dense_shape(const TensorView& dense, const KroneckerPattern::Sizes& sizes);

/// The weights (f64, contiguous, on the CPU, in order of application) whose product is near `dense` (rows × cols,
/// row-major): the nearest for one and two factors, within √(L − 1) times the least error for L. The factors have equal
/// norms. Gives the relative error in the Frobenius norm, 0 for a zero matrix.
double kronecker_project(std::span<const double> dense, std::int64_t rows, std::int64_t cols,
                         std::span<const KroneckerPattern::Sizes> patterns, std::span<std::vector<double>> weights,
                         Executor& executor = serial_executor());

}  // namespace fretwork
