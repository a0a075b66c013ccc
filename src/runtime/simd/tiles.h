// The tile multiplier of the CPU backend: pack operands into panels, multiply, store sums. One table of functions per
// element type, for the best instruction set of this machine; an op fetches its table once per call.
//
// A tile is `rows` × (vectors·lanes) sums, all of which live in registers while any number of terms are added:
//   sums[i][j] += Σ_k left[i][k] · right[k][j].
// The left side is read one element at a time, so it may lie anywhere; the right side is a packed panel.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>

#include "fretwork/tensor.h"

namespace fretwork::simd {

/// A matrix to read or write; strides in elements.
struct Place {
  void* data = nullptr;
  std::int64_t row_stride = 0, col_stride = 0;
};

struct Term {
  const void* left;   ///< rows × depth
  const void* right;  ///< a panel of depth × width
};

struct Product {
  const Term* terms = nullptr;
  std::int64_t count = 0;  ///< of terms
  std::int64_t steps = 0;  ///< depth of each term, in groups
  /// Distances on the left, in packed elements, from one row and from one step to the next.
  std::int64_t row_stride = 0, step_stride = 0;
  void* sums = nullptr;         ///< rows × width
  std::int64_t sum_stride = 0;  ///< from one row of them to the next
  bool add = false;             ///< start from what `sums` holds, not from zero
};

inline constexpr int kMaxVectors = 3;

struct Tiles {
  std::int64_t rows;    ///< of a tile
  std::int64_t lanes;   ///< columns in a vector; a panel is 1 to kMaxVectors of them wide
  std::int64_t group;   ///< neighbours in depth that lie together in a panel: 1, or 2 where products come in pairs
  std::size_t element;  ///< bytes of a packed element
  std::size_t sum;      ///< bytes of a sum
  bool widens;          ///< packed elements are wider than those in memory, so the left side must be packed too

  /// out[k / group][j][k % group] = from(k, j) for k < depth, j < cols; zeros up to a whole group and up to `width`.
  void (*pack)(const Place& from, std::int64_t depth, std::int64_t cols, std::int64_t width, void* out);
  /// By number of vectors, less one.
  void (*multiply[kMaxVectors])(const Product& product);
  /// Rounds the first rows × cols sums to the element type, once, to nearest even.
  void (*store)(const void* sums, std::int64_t sum_stride, std::int64_t rows, std::int64_t cols, const Place& to,
                bool stream);
};

/// For f64, f32, f16 and bf16. Sums are f64 for f64 and f32 for the rest.
const Tiles& tiles(DType dtype);

/// bf16 products in pairs where the CPU has them (AVX512-BF16), else null. tiles() asks.
const Tiles* paired_bf16_tiles();

/// Memory that grows and is never copied.
class Scratch {
 public:
  std::byte* need(std::size_t bytes) {
    if (bytes > size_) {
      size_ = bytes + bytes / 4;
      memory_.reset(static_cast<std::byte*>(::operator new(size_, kAlign)));
    }
    return memory_.get();
  }

 private:
  static constexpr std::align_val_t kAlign{64};
  struct Free {
    void operator()(std::byte* p) const { ::operator delete(p, kAlign); }
  };
  std::unique_ptr<std::byte, Free> memory_;
  std::size_t size_ = 0;
};

}  // namespace fretwork::simd
