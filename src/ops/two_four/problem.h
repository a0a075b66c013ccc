// The 2:4 operators after all checks, in one orientation: lines of the sparse matrix are its rows, compressed along k.
#pragma once

#include <cstdint>

#include "fretwork/context.h"
#include "fretwork/two_four.h"

namespace fretwork::two_four {

/// Lines × positions along them; strides in elements (words for metadata).
struct Matrix {
  void* data = nullptr;
  std::int64_t line = 0, along = 0;
};

/// `lines` rows of k elements: the dense matrix, what is kept of it, and which.
struct Format {
  std::int64_t lines = 0, k = 0;
  DType dtype = DType::f32;
  Matrix dense, values, words;
  int word_bytes = 2;
  bool transposed = false;  ///< the caller's matrix is (k, lines): places are k·lines + line
  std::int64_t group() const { return two_four::group(dtype); }
  std::int64_t groups() const { return k / group(); }
};

/// A bit for each nibble that a group may have.
constexpr unsigned valid_nibbles(std::int64_t group) { return group == 2 ? 0x4010 : 0x7310; }

/// One number for each line of something; stride 0: one for all.
struct Vector {
  void* data = nullptr;  ///< or null
  std::int64_t stride = 0;
};

/// A dense operand; strides in elements.
struct Dense {
  void* data = nullptr;
  std::int64_t row = 0, col = 0, batch = 0;
};

/// c[z, i, j] = activation(Σ_k s[i, k]·b[z, k, j]·scale_s[i]·scale_b[j] + bias[i])·scale_out: s (m × k) is the sparse
/// operand, b (k × n), c (m × n). A sparse right operand is this with b and c transposed by their strides. Nothing is
/// empty but perhaps k.
struct Problem {
  std::int64_t m = 0, n = 0, k = 0, batch = 1;
  DType dtype = DType::f32, out = DType::f32;
  Matrix values, words;
  int word_bytes = 2;
  Dense b, c;
  Vector bias;              ///< of dtype `out`
  bool bias_f32 = false;    ///< but of f32, where `out` has 8 bits
  Vector scale_s, scale_b;  ///< f32
  Activation activation = Activation::none;
  const float* scale_out = nullptr;  ///< or null

  DType bias_dtype() const { return bias_f32 ? DType::f32 : out; }
  /// Whether sums are results, but for rounding.
  bool is_plain() const {
    return bias.data == nullptr && scale_s.data == nullptr && scale_b.data == nullptr && scale_out == nullptr &&
           activation == Activation::none;
  }
};

/// A gradient of y = x·sᵀ, where s (m × k) is sparse and x (n × k) and y (n × m) are dense with floating elements: that
/// of x, d_y·s, or that of the values that s keeps, of d_yᵀ·x.
struct GradientProblem {
  std::int64_t n = 0;
  Format s;      ///< values and words, no dense matrix
  Dense d_y, x;  ///< rows are those of the batch; x is written, or read
};

/// Types whose sums are i32, and whose zero has no sign.
constexpr bool is_integer(DType dtype) { return dtype == DType::i8 || dtype == DType::u8; }
constexpr bool is_fp8(DType dtype) { return dtype == DType::f8_e4m3 || dtype == DType::f8_e5m2; }

namespace cpu {
void compress(const Format& f, std::int64_t* bad, Context& context);
void check(const Format& f, std::int64_t* bad, Context& context);  ///< reads dense
/// Reads words and values. `to`, unless it has no data, gets the canonical words; it may be f.words.
void check_metadata(const Format& f, const Matrix& to, bool keep_valid, std::int64_t* bad, Context& context);
void to_dense(const Format& f, Context& context);
void gather(const Format& f, Context& context);  ///< reads dense and words, writes values
/// From f.dense to `out`; transposable needs lines to be a multiple of the group.
void prune(const Format& f, const Matrix& out, bool transposable, Context& context);
/// rows and cols see the same dense matrix; cols.lines == rows.k.
void prune_both(const Format& rows, const Format& cols, Context& context);
void run(const Problem& problem, Context& context);
void input_gradient(const GradientProblem& problem, Context& context);  ///< writes x
void value_gradient(const GradientProblem& problem, Context& context);  ///< writes s.values
}  // namespace cpu

/// Whether a GPU expands the sparse operand and multiplies dense operands faster. `behind`: 2:4 products run on the
/// portable kernels where dense ones have instructions of the GPU's own.
bool dense_wins(std::int64_t m, std::int64_t n, std::int64_t k, DType dtype, Precision precision, bool behind);

namespace cuda {
void compress(const Format& f, std::int64_t* bad, Context& context);
void check(const Format& f, std::int64_t* bad, Context& context);
void check_metadata(const Format& f, const Matrix& to, bool keep_valid, std::int64_t* bad, Context& context);
void to_dense(const Format& f, Context& context);
void gather(const Format& f, Context& context);
void prune(const Format& f, const Matrix& out, bool transposable, Context& context);
void prune_both(const Format& rows, const Format& cols, Context& context);
void run(const Problem& problem, Context& context);
}  // namespace cuda

}  // namespace fretwork::two_four
