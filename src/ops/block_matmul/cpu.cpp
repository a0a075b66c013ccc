// The block-sparse products on the CPU.
#include <algorithm>
#include <bit>
#include <cmath>
#include <vector>

#include "ops/block_matmul/problem.h"

namespace fretwork::block_matmul::cpu {
namespace {

struct Bf16 {
  std::uint16_t bits;
  explicit operator float() const { return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16); }
  static Bf16 from(float value) {
    const auto word = std::bit_cast<std::uint32_t>(value);
    if (std::isnan(value)) {
      return {static_cast<std::uint16_t>(word >> 16 | 0x40)};
    }
    return {static_cast<std::uint16_t>((word + 0x7fff + (word >> 16 & 1)) >> 16)};
  }
};

template <typename T>
T narrow(auto value) {
  if constexpr (std::is_same_v<T, Bf16>) {
    return Bf16::from(value);
  } else {
    return static_cast<T>(value);
  }
}

template <typename T, typename Sum>
class Plain {
 public:
  explicit Plain(const Problem& problem) : p_(problem), sizes_(problem.layout->sizes()) {}

  void spmm(std::int64_t z, std::int64_t h, std::int64_t line) const {
    const std::int64_t rows = p_.transposed ? sizes_.block_cols : sizes_.block_rows;
    const std::int64_t depth = p_.transposed ? sizes_.block_rows : sizes_.block_cols;
    const std::int64_t row_stride = p_.transposed ? p_.sparse.col_stride : p_.sparse.row_stride;
    const std::int64_t depth_stride = p_.transposed ? p_.sparse.row_stride : p_.sparse.col_stride;
    const BlockIndex& index = p_.transposed ? p_.layout->by_col() : p_.layout->by_row();
    const std::int64_t lines = p_.transposed ? sizes_.cols : sizes_.rows;
    std::vector<Sum> sums(static_cast<std::size_t>(p_.out.cols));
    for (std::int64_t y = 0; y < rows; ++y) {
      std::fill(sums.begin(), sums.end(), Sum{0});
      for (std::int64_t batch = 0; batch < p_.z_sum * p_.h_sum; ++batch) {
        const std::int64_t zb = z + batch / p_.h_sum, hb = h + batch % p_.h_sum;
        for (const auto& [column, block] : index.line((sizes_.heads == 1 ? 0 : hb) * lines + line)) {
          const T* s = static_cast<const T*>(p_.sparse.data) + zb * p_.sparse.z_stride +
                       block * p_.sparse.block_stride + y * row_stride;
          const T* b = at(p_.right, zb, hb, column * depth, 0);
          for (std::int64_t k = 0; k < depth; ++k) {
            const auto weight = static_cast<Sum>(s[k * depth_stride]);
            for (std::int64_t n = 0; n < p_.out.cols; ++n) {
              sums[static_cast<std::size_t>(n)] +=
                  weight * static_cast<Sum>(b[k * p_.right.row_stride + n * p_.right.col_stride]);
            }
          }
        }
      }
      T* out = at(p_.out, z, h, line * rows + y, 0);
      for (std::int64_t n = 0; n < p_.out.cols; ++n) {
        out[n * p_.out.col_stride] = narrow<T>(sums[static_cast<std::size_t>(n)]);
      }
    }
  }

  void sdd(std::int64_t z, std::int64_t h, std::int64_t line) const {
    for (const auto& [column, block] : p_.layout->by_row().line((sizes_.heads == 1 ? 0 : h) * sizes_.rows + line)) {
      for (std::int64_t y = 0; y < sizes_.block_rows; ++y) {
        for (std::int64_t x = 0; x < sizes_.block_cols; ++x) {
          Sum sum{0};
          for (std::int64_t batch = 0; batch < p_.z_sum * p_.h_sum; ++batch) {
            const std::int64_t zb = z + batch / p_.h_sum, hb = h + batch % p_.h_sum;
            const T* a = at(p_.left, zb, hb, line * sizes_.block_rows + y, 0);
            const T* b = at(p_.right, zb, hb, 0, column * sizes_.block_cols + x);
            for (std::int64_t k = 0; k < p_.left.cols; ++k) {
              sum += static_cast<Sum>(a[k * p_.left.col_stride]) * static_cast<Sum>(b[k * p_.right.row_stride]);
            }
          }
          static_cast<T*>(p_.sparse.data)[z * p_.sparse.z_stride + block * p_.sparse.block_stride +
                                          y * p_.sparse.row_stride + x * p_.sparse.col_stride] = narrow<T>(sum);
        }
      }
    }
  }

 private:
  static T* at(const Matrix& m, std::int64_t z, std::int64_t h, std::int64_t row, std::int64_t col) {
    return static_cast<T*>(m.data) + z * m.z_stride + h * m.h_stride + row * m.row_stride + col * m.col_stride;
  }
  const Problem& p_;
  const BlockLayout::Sizes& sizes_;
};

template <typename T, typename Sum>
void run_plain(const Problem& p, Context& context) {
  const Plain<T, Sum> plain(p);
  const bool spmm = p.kind == Kind::spmm;
  const std::int64_t lines = spmm && p.transposed ? p.layout->sizes().cols : p.layout->sizes().rows;
  context.executor->parallel_for(p.z_out * p.h_out * lines, 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t n = begin; n < end; ++n) {
      const std::int64_t line = n % lines, h = n / lines % p.h_out, z = n / lines / p.h_out;
      spmm ? plain.spmm(z, h, line) : plain.sdd(z, h, line);
    }
  });
}

}  // namespace

void run(const Problem& problem, Context& context) {
  switch (problem.dtype) {
    case DType::f64:
      return run_plain<double, double>(problem, context);
    case DType::f32:
      return run_plain<float, float>(problem, context);
    case DType::f16:
      return run_plain<_Float16, float>(problem, context);
    default:
      return run_plain<Bf16, float>(problem, context);
  }
}

}  // namespace fretwork::block_matmul::cpu
