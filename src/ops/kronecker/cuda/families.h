// The kernel families of the Kronecker products on a GPU, which choose.cpp lists and compares, and what they share.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "ops/kronecker/config.h"
#include "ops/kronecker/cuda/params.h"
#include "runtime/choose.h"
#include "runtime/kernels.h"

namespace fretwork::kronecker {

constexpr int narrowed(std::int64_t value) { return static_cast<int>(value); }
inline int bytes_of(DType dtype) { return static_cast<int>(size_of(dtype)); }

/// A template argument as text.
inline std::string argument(DType dtype) { return device_type(dtype); }
inline std::string argument(bool flag) { return flag ? "true" : "false"; }
inline std::string argument(int number) { return std::to_string(number); }
inline std::string argument(const std::string& name) { return name; }
inline std::string argument(const char* name) { return name; }
/// "name<fretwork::f16, 64, true>" in fretwork::kronecker.
template <typename... Arguments>
std::string instance(const std::string& name, const Arguments&... arguments) {
  std::string text;
  ((text += (text.empty() ? "" : ", ") + argument(arguments)), ...);
  return "fretwork::kronecker::" + name + "<" + text + ">";
}
/// A kernel of the file `file`.cuh, with so many bytes of dynamic shared memory.
template <typename... Arguments>
KernelSpec kernel_spec(const char* file, int shared, const std::string& name, const Arguments&... arguments) {
  return {std::string("ops/kronecker/cuda/") + file + ".cuh", instance(name, arguments...), shared};
}

/// Whether the tensor cores of an architecture multiply a 16-bit type.
inline bool has_mma(DType dtype, int arch) {
  return dtype == DType::f16 ? arch >= 75 : dtype == DType::bf16 && arch >= 80;
}

/// Up to so many batch rows are "a few": memory's latency counts, and weights are read once.
inline constexpr std::int64_t kFewRows = 32;

/// What a family is, for products or for gradients: whether a config fits, what it takes, in microseconds without the
/// launch that every call has, and running one that fits. A gradient's launch computes the bias gradient too.
template <typename Any>
struct Functions {
  bool (*fits)(const Any&, const Config&, const Machine&);
  double (*cost)(const Any&, const Config&, const Machine&);
  void (*launch)(const Any&, const Config&, Context&);
};

/// TMA and wgmma on sm_90a, 16-bit types and tf32. Operands as they lie (`hopper`), rows brought into groups of one δ
/// (`regroup`), the d products of a block as one dense matrix (`dense`), all δ of a row at once (`interleaved`, tf32).
/// `first` is the number of columns of a tile, one of widths().
namespace hopper {
std::span<const int> widths();
extern const Functions<Problem> kProduct;
extern const Functions<WeightProblem> kGradient;
}  // namespace hopper

/// Tensor cores on sm_80 and later, batch first with d > 1: neighbouring δ stay together from memory to fragments. CTAs
/// on their own (`strided`: `first` neighbouring δ, `second` warps along the batch), or clusters of them (`cluster`,
/// sm_90a, 16-bit types).
namespace strided {
std::vector<Config> configs(DType dtype, Precision precision);
extern const Functions<Problem> kProduct;
extern const Functions<WeightProblem> kGradient;
}  // namespace strided

/// Up to 32 batch rows, any strides: one pass over the weights as they lie; 16-bit types with d even up to 256, reading
/// them again for every 16.
namespace few {
inline constexpr std::int64_t kMostRows = kFewRows, kMostTileRows = 256;
extern const Functions<Problem> kProduct;
}  // namespace few

/// Up to 256 batch rows of 16-bit types with d = 1, 2, 4 or a multiple of 8, weights as they lie: loads go straight to
/// the fragments of an mma.
namespace direct {
inline constexpr std::int64_t kMostRows = 256;
extern const Functions<Problem> kProduct;
}  // namespace direct

/// Small and middle batches of 16-bit types, on tensor cores of sm_80 and later: all δ of a problem, up to 8 or 12, or
/// any multiple of 8, in small tiles of operands as they lie, in one pass. `first` outputs × `second` batch rows of a
/// tile.
namespace small {
std::vector<Config> configs();
extern const Functions<Problem> kProduct;
}  // namespace small

/// 16-bit types with d = 1, where cuBLASLt is installed: a batch of dense products, as the operands lie. A bias only
/// with one block, batch first.
namespace cublas {
extern const Functions<Problem> kProduct;
}  // namespace cublas

/// Exact fp32 in large tiles on FFMA (sm_80 and later): operands as they lie, or regrouped (`ieee_regroup`).
namespace ieee {
extern const Functions<Problem> kProduct;
extern const Functions<WeightProblem> kGradient;
}  // namespace ieee

/// Any type, stride and architecture: `portable` on the tensor cores, `simple` on FFMA. A gradient takes the one that
/// fits.
namespace generic {
extern const Functions<Problem> kProduct;
extern const Functions<WeightProblem> kGradient;
}  // namespace generic

/// Two neighbouring factors of a chain as one kernel, if they are a Monarch matrix (sm_90a, 16-bit types, batch first).
/// The intermediate never exists in memory.
namespace chain {
/// How the fused kernel divides two factors, with the fewest CTAs in a cluster; nothing where it cannot take them.
std::optional<Monarch> fuse(const Sizes& first, const Sizes& second);
/// Whether `second`, which reads what `first` writes, can run with it.
bool fits(const Problem& first, const Problem& second, const Machine& machine);
/// Of the fused kernel's work, as a Monarch has it; 0 takes what was the fastest, and all of them 0 the faster kernel
/// of two.
struct Arrangement {
  int exchange = 0, first_warps = 0, second_warps = 0;
};
void launch(const Problem& first, const Problem& second, Context& context, const Arrangement& arrangement = {});
}  // namespace chain

/// Bytes of x and y (or d_y), and of the weights, for costs.
inline double batch_bytes(const Sizes& s, std::int64_t batch, DType dtype) {
  return double(batch * s.a * s.d * (s.b + s.c)) * double(size_of(dtype));
}
inline double weight_bytes(const Sizes& s, DType dtype) {
  return double(s.a * s.b * s.c * s.d) * double(size_of(dtype));
}
inline double moved_bytes(const Problem& p) {
  return batch_bytes(p.sizes, p.batch, p.dtype) + weight_bytes(p.sizes, p.dtype);
}

/// Where the operands of a product lie, its sizes and its activation, as `few` and `small` are told.
template <typename Params>
void fill_operands(const Problem& p, Params& params) {
  params.x = p.x.data;
  params.w = p.w.data;
  params.bias = p.bias.data;
  params.y = p.y.data;
  params.x_batch = p.x.batch;
  params.x_feature = p.x.feature;
  params.y_batch = p.y.batch;
  params.y_feature = p.y.feature;
  params.w_a = p.w.a;
  params.w_b = p.w.b;
  params.w_c = p.w.c;
  params.bias_stride = p.bias.stride;
  params.batch = narrowed(p.batch);
  params.b = narrowed(p.sizes.b);
  params.c = narrowed(p.sizes.c);
  params.d = narrowed(p.sizes.d);
  params.activation = static_cast<int>(p.activation);
}

/// What the generic and the exact fp32 kernels are told of a product, but for where its operands lie.
ProductParams product_params(const Problem& problem);

/// Pieces of a gradient in the type of sums (fp32, or fp64), one after the other.
struct PartialSums {
  const void* weights;
  std::int64_t pieces;
  bool matrices;     ///< in the order (a,d,b,c), else (a,b,c,d)
  const void* bias;  ///< or null
  std::int64_t bias_pieces;
};
/// Adds them into d_w and d_bias, in a fixed order.
void reduce(const WeightProblem& problem, const PartialSums& sums, Context& context);

/// Sums of d_y over pieces of the batch, if the bias gradient is wanted, in a pass of their own.
struct BatchSums {
  std::int64_t pieces;
  Workspace space;
  BatchSums(const WeightProblem& problem, Context& context);
};

// ----------------------------------------------------------------------------------------------------
// Copies into the orders that kernels read (pack.cpp).

/// How the a·d matrices of packed weights lie: entries of a line are k, else j, and lines are `pitch` elements apart.
struct Lines {
  bool along_k = true;
  std::int64_t pitch = 0;  ///< a multiple of 16 bytes, or the entries of a line
  bool tf32 = false;       ///< fp32 is rounded to it
};

/// to[i·d + l][line][entry]; what lies between lines is not written. `to` is aligned to 16 bytes. The next kernel may
/// be launched behind this.
void pack(const Weights& w, const Sizes& s, DType dtype, const Lines& lines, void* to, const Context& context);

/// The d products of a block as one dense matrix, with zeros between: to[i][line·d + l][entry·d + l].
void pack_dense(const Weights& w, const Sizes& s, DType dtype, const Lines& lines, void* to, const Context& context);

/// In the order of strided::PackParams, in groups of `deltas` δ.
void pack_strided(const Problem& problem, int deltas, int slab, int slabs, int steps, bool turned, void* to,
                  const Context& context);

/// Launches `regroup` (pack.cuh) for elements of `bytes`.
void regroup(const hopper::RegroupParams& params, int bytes, bool back, const Context& context);

/// Batch first with d > 1: whether rows of `width` features of each (i, l) can be brought into a form with the features
/// of one δ together, where the products of d = 1 take them, and back. Three passes over memory instead of one, which
/// pays for large blocks.
bool regroups(const Matrix& m, std::int64_t width, std::int64_t batch, const Sizes& s, int bytes);
/// µs of regrouping x on the way in and y on the way out: two launches, and each byte is read and written.
double regroup_cost(const Sizes& s, std::int64_t batch, DType dtype, double multiprocessors);
/// Regroups; rows of `grouped` are contiguous.
void regroup(const Matrix& m, void* grouped, std::int64_t width, std::int64_t batch, const Sizes& s, int bytes,
             bool back, const Context& context);

}  // namespace fretwork::kronecker
