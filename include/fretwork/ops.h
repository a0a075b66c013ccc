// The operators. Each checks its arguments, throws Error on a bad one, and runs where the context says.
//
// An op has the name that it has in Python, families with several functions have a namespace: fretwork::attention,
// fretwork::kronecker::project, fretwork::two_four::matmul. Inputs are ConstTensorViews, outputs TensorViews; a tensor
// that may be missing is an optional. Patterns are passed as the shared pointers that their makers return.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
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
void sdd(const ConstTensorView& a, const ConstTensorView& b, const BlockLayoutPtr& layout, const TensorView& out,
         Context& context, const MatmulOptions& options = {});
/// Dense = op(sparse)·op(b). values (Z,nnz,b,b) of `layout` as stored.
void dsd(const ConstTensorView& values, const ConstTensorView& b, const BlockLayoutPtr& layout, const TensorView& out,
         Context& context, const MatmulOptions& options = {});
/// Dense = op(a)·op(sparse).
void dds(const ConstTensorView& a, const ConstTensorView& values, const BlockLayoutPtr& layout, const TensorView& out,
         Context& context, const MatmulOptions& options = {});

/// The shapes that `out` must have, after all checks that need no data.
std::vector<std::int64_t> sdd_shape(const ConstTensorView& a, const ConstTensorView& b, const BlockLayoutPtr& layout,
                                    const MatmulOptions& options = {});
std::vector<std::int64_t> dsd_shape(const ConstTensorView& values, const ConstTensorView& b,
                                    const BlockLayoutPtr& layout, const MatmulOptions& options = {});
std::vector<std::int64_t> dds_shape(const ConstTensorView& a, const ConstTensorView& values,
                                    const BlockLayoutPtr& layout, const MatmulOptions& options = {});

/// The geometry of a 2-D convolution, (height, width) each. `padding` is above and left, `padding_end` below and right.
struct ConvOptions {
  std::array<std::int64_t, 2> kernel{1, 1}, stride{1, 1}, padding{0, 0}, padding_end{0, 0}, dilation{1, 1};
  std::optional<ConstTensorView> bias = {};  ///< (out channels). The gradients do not read it.
};

/// A convolution whose weight holds whole blocks. `layout` has a head for each kernel position, row by row, of blocks
/// (output channels × input channels). x (N,C,H,W), values (nnz,b,b), out (N,K,P,Q), of any strides.
void block_conv2d(const ConstTensorView& x, const ConstTensorView& values, const BlockLayoutPtr& layout,
                  const TensorView& out, Context& context, const ConvOptions& options = {});
/// Its gradients to x and to values.
void block_conv2d_backward_x(const ConstTensorView& d_out, const ConstTensorView& values, const BlockLayoutPtr& layout,
                             const TensorView& d_x, Context& context, const ConvOptions& options = {});
void block_conv2d_backward_values(const ConstTensorView& x, const ConstTensorView& d_out, const BlockLayoutPtr& layout,
                                  const TensorView& d_values, Context& context, const ConvOptions& options = {});
/// The shape that `out` must have, after all checks that need no data.
std::vector<std::int64_t> block_conv2d_shape(const ConstTensorView& x, const ConstTensorView& values,
                                             const BlockLayoutPtr& layout, const ConvOptions& options = {});

/// "add" adds the mask; "mul" turns its zeros into −inf and leaves the rest.
enum class MaskMode : std::uint8_t { add, mul };

/// Options of block_softmax.
struct SoftmaxOptions {
  double scale = 1.0;
  std::optional<ConstTensorView> rpe = {};               ///< broadcasts to (Z,H,M,N)
  std::optional<ConstTensorView> key_padding_mask = {};  ///< (Z,N)
  std::optional<ConstTensorView> attn_mask = {};         ///< (M,N) or (H,M,N)
  MaskMode key_padding_mask_mode = MaskMode::add, attn_mask_mode = MaskMode::add;
};

/// out = softmax of values·scale + extras over the stored entries of each row. values, out ((Z,)nnz,b,b).
void block_softmax(const ConstTensorView& values, const BlockLayoutPtr& layout, const TensorView& out, Context& context,
                   const SoftmaxOptions& options = {});
/// The gradient: d_values = scale·d, and d_rpe, where given, = d summed to rpe's shape, d = out·(d_out − Σ out·d_out).
void block_softmax_backward(const ConstTensorView& out, const ConstTensorView& d_out, const BlockLayoutPtr& layout,
                            double scale, const TensorView& d_values, const std::optional<TensorView>& d_rpe,
                            Context& context);

/// Dense (Z,H,M,N) to packed (Z,nnz,b,b) and back; unpack writes `fill` where there is no block.
void block_pack(const ConstTensorView& dense, const BlockLayoutPtr& layout, const TensorView& values, Context& context);
void block_unpack(const ConstTensorView& values, const BlockLayoutPtr& layout, double fill, const TensorView& dense,
                  Context& context);

/// What a product applies to its sums; gelu is the exact one.
enum class Activation : std::uint8_t { none, relu, gelu, silu };

struct KsmmOptions {
  std::optional<ConstTensorView> bias = {};  ///< (out features)
  Activation activation = Activation::none;
};

/// out = activation(x·Kᵀ + bias) for the Kronecker factor K with weights w (a,b,c,d). x (batch, a·c·d), out (batch,
/// a·b·d), any strides: features that stand before the batch in memory are a transposed view. The gradient of x is the
/// same product with w.transpose(1, 2).
void ksmm(const ConstTensorView& x, const ConstTensorView& w, const TensorView& out, Context& context,
          const KsmmOptions& options = {});
/// The gradients of w and, where given, of bias: d_w[i,j,k,l] = Σ_n d_out[n,(i,j,l)]·x[n,(i,k,l)], d_bias = Σ_n d_out.
void ksmm_backward_weight(const ConstTensorView& x, const ConstTensorView& d_out, const TensorView& d_w,
                          const std::optional<TensorView>& d_bias, Context& context);
/// One factor after another, weights[0] first; bias and activation after the last.
void ksmm_chain(const ConstTensorView& x, std::span<const ConstTensorView> weights, const TensorView& out,
                Context& context, const KsmmOptions& options = {});
namespace kronecker {

/// How ksmm_chain runs factors of these patterns, one line for each step: "0+1: fused, clusters of 8, 16 rows", "2:
/// strided". `arch` is "cpu", an architecture from "sm_75" on, such as "sm_90a", of which none needs to be there, or a
/// GPU, "cuda:0". `batch` counts where rows are few; 0 stands for many. Operands are taken to be contiguous.
std::vector<std::string> plan(std::span<const KroneckerPtr> patterns, const std::string& arch, DType dtype = DType::f16,
                              bool last = false, std::int64_t batch = 0);

/// Whether a product with the dense matrix of the whole chain, if it is there, is expected to take clearly less time on
/// a GPU than ksmm_chain, by the cost model. False where the model knows nothing: on a CPU, and of 32 and 64 bits.
bool dense_wins(std::span<const KroneckerPtr> patterns, const std::string& arch, DType dtype, bool last,
                std::int64_t batch);

/// w (a,b,c,d) as a matrix (a·b·d, a·c·d), and back. from_dense gives the place (row·columns + column) of the first
/// non-zero that the pattern does not hold, or −1, in *outside: on a GPU, where it is device memory, when the stream
/// gets there.
void to_dense(const ConstTensorView& w, const TensorView& dense, Context& context);
void from_dense(const ConstTensorView& dense, const TensorView& w, std::int64_t* outside, Context& context);
/// The shapes of their results, after all checks that need no data.
std::vector<std::int64_t> to_dense_shape(const ConstTensorView& w);
std::vector<std::int64_t> from_dense_shape(const ConstTensorView& dense, const KroneckerPtr& pattern);

/// The weights (f64, contiguous, on the CPU, in order of application) whose product is near `dense` (rows × cols,
/// row-major): the nearest for one and two factors, within √(L − 1) times the least error for L. The factors have equal
/// norms. Gives the relative error in the Frobenius norm, 0 for a zero matrix.
double project(std::span<const double> dense, std::int64_t rows, std::int64_t cols,
               std::span<const KroneckerPtr> patterns, std::span<std::vector<double>> weights,
               Executor& executor = serial_executor());

}  // namespace kronecker

/// Options of attention.
struct AttentionOptions {
  std::optional<double> scale = {};            ///< of the scores; 1/√D unless given
  double softcap = 0;                          ///< c > 0 turns a score s into c·tanh(s/c)
  std::optional<ConstTensorView> bias = {};    ///< broadcasts to (B,Hq,Sq,Sk); added after scale and softcap
  std::optional<ConstTensorView> slopes = {};  ///< ALiBi (Hq) as lse: −slope·|p − j| is added, p = i + Sk − Sq
  double dropout = 0;                          ///< rate, 0 ≤ rate < 1; needs a seed. (Python gives zeros for 1.)
  const std::int64_t* dropout_seed = nullptr;  ///< one number on the context's device
  /// (B,Sk) bool: true where no query sees the key, whose k and v may hold NaN.
  std::optional<ConstTensorView> key_padding = {};
  std::optional<ConstTensorView> sinks = {};  ///< (Hq) of q's dtype or f32: exp(sinks[h]) joins the sum of each row
};

/// out = softmax(scale·q·kᵀ + …)·v over the keys that each query's pattern holds, and lse, its natural log-sum-exp. q
/// (B,Hq,Sq,D), k (B,Hk,Sk,D), v (B,Hk,Sk,Dv), Hq a multiple of Hk: query head h uses key head h / (Hq/Hk). `patterns`
/// is one for all heads, one for each query head, or one for each batch element and query head (Hq of the first
/// element, then of the next), regular or a block layout of one head or a Kronecker pattern. out (B,Hq,Sq,Dv); lse,
/// which may be left out, (B,Hq,Sq) of f32 (f64 for f64). A query without keys gives 0 and −inf, or its head's sink. A
/// sink is one more score of each query, without scale, cap, bias or dropout, whose value is zero; lse counts it.
void attention(const ConstTensorView& q, const ConstTensorView& k, const ConstTensorView& v,
               std::span<const PatternPtr> patterns, const TensorView& out, const std::optional<TensorView>& lse,
               Context& context, const AttentionOptions& options = {});
inline void attention(const ConstTensorView& q, const ConstTensorView& k, const ConstTensorView& v,
                      const PatternPtr& pattern, const TensorView& out, const std::optional<TensorView>& lse,
                      Context& context, const AttentionOptions& options = {}) {
  attention(q, k, v, std::span(&pattern, 1), out, lse, context, options);
}

/// Where attention's gradients go; one that is not given is not computed. Each has the shape and dtype of what it is
/// the gradient of.
struct AttentionGradients {
  std::optional<TensorView> q = {}, k = {}, v = {}, bias = {}, sinks = {};
};

/// The gradients, from those of out and lse (not given: zero). Patterns and options are the forward's, as are out and
/// lse.
void attention_backward(const ConstTensorView& q, const ConstTensorView& k, const ConstTensorView& v,
                        std::span<const PatternPtr> patterns, const ConstTensorView& out, const ConstTensorView& lse,
                        const ConstTensorView& d_out, const std::optional<ConstTensorView>& d_lse,
                        const AttentionGradients& gradients, Context& context, const AttentionOptions& options = {});
inline void attention_backward(const ConstTensorView& q, const ConstTensorView& k, const ConstTensorView& v,
                               const PatternPtr& pattern, const ConstTensorView& out, const ConstTensorView& lse,
                               const ConstTensorView& d_out, const std::optional<ConstTensorView>& d_lse,
                               const AttentionGradients& gradients, Context& context,
                               const AttentionOptions& options = {}) {
  attention_backward(q, k, v, std::span(&pattern, 1), out, lse, d_out, d_lse, gradients, context, options);
}

/// What attention over a pattern costs on a GPU, in words: a line for each order of its tiles, and how many times its
/// elements they multiply. Empty where there are no elements, and beyond four million positions.
std::string attention_cost(const PatternPtr& pattern);

struct SelectOptions {
  std::int64_t block_q = 128, block_k = 128;  ///< queries and keys of a block: 16, 32, 64 or 128
  bool causal = true;                         ///< key blocks after the query block's last position are out
  std::int64_t first = 1, last = 1;           ///< so many first blocks, and last ones up to the query's own, are in
};

/// The `top_k` key blocks with the best scores for each query block: the mean of its queries, over the query heads that
/// share a key head as well, times the mean of the block's keys, in f32; ties go to the lower index. The position of
/// query i is i + Sk − Sq, and a query block's own key block is that of its last position. Where there are fewer blocks
/// than top_k, all are listed. q (B,Hq,Sq,D), k (B,Hk,Sk,D); counts (B,Hk,R) and indices (B,Hk,R,top_k) of i32, R =
/// ⌈Sq/block_q⌉; indices ascend, and are −1 from the count on. top_k is at least first + last. Nothing of the result is
/// known to the host.
void select_blocks(const ConstTensorView& q, const ConstTensorView& k, std::int64_t top_k, const TensorView& counts,
                   const TensorView& indices, Context& context, const SelectOptions& options = {});

/// SPLAT's operators. Scores are stored side by side, (B,H,Sq,W), W the entries of the longest row: the entries of a
/// row are its keys in ascending order (RegularPattern::entries). What lies behind a row's end is written as zero and
/// never used. Heads of k and v are shared as in attention.
///
/// W. An error names `op`.
std::int64_t r_width(const PatternPtr& pattern, const char* op = "r_width");
/// out = q·kᵀ at the entries. q (B,Hq,Sq,D), k (B,Hk,Sk,D), out (B,Hq,Sq,W).
void r_sddmm(const ConstTensorView& q, const ConstTensorView& k, const PatternPtr& pattern, const TensorView& out,
             Context& context);
/// out = x·v. x (B,Hq,Sq,W), v (B,Hk,Sk,D), out (B,Hq,Sq,D). The gradient of q in r_sddmm is r_spmm of that of its
/// result and k; the gradient of x here is r_sddmm of that of the result and v.
void r_spmm(const ConstTensorView& x, const ConstTensorView& v, const PatternPtr& pattern, const TensorView& out,
            Context& context);
/// out = xᵀ·y, summed over the query heads that share one of out's. x (B,Hq,Sq,W), y (B,Hq,Sq,D), out (B,Hk,Sk,D): the
/// gradient of k and v in the two above.
void r_spmm_transposed(const ConstTensorView& x, const ConstTensorView& y, const PatternPtr& pattern,
                       const TensorView& out, Context& context);
/// out = softmax of scale·x over the entries of each row; and its gradient, d_x = scale·out·(d_out − Σ out·d_out).
void r_softmax(const ConstTensorView& x, const PatternPtr& pattern, double scale, const TensorView& out,
               Context& context);
void r_softmax_backward(const ConstTensorView& out, const ConstTensorView& d_out, const PatternPtr& pattern,
                        double scale, const TensorView& d_x, Context& context);

}  // namespace fretwork
