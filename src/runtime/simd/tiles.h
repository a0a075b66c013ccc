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
  const void* left;    ///< rows × depth
  std::int64_t depth;  ///< where it begins in the panel
  /// If set, that part of the panel is not packed yet: its first row as it lies in memory.
  const void* raw = nullptr;
};

struct Product {
  const Term* terms = nullptr;
  std::int64_t count = 0;  ///< of terms
  std::int64_t steps = 0;  ///< depth of each term, in groups
  void* right = nullptr;   ///< the panel
  /// For multiply_in_place: distances of the right side's rows, and of a row's vectors where they are not neighbours.
  std::int64_t right_stride = 0, right_apart = 0;
  bool packs = false;  ///< raw terms are packed while they are multiplied; otherwise they were
  /// From one raw row to the next, and from its beginning to the columns of this panel, which are contiguous.
  std::int64_t raw_stride = 0, raw_shift = 0;
  /// If not 0 and nothing is packed: from the beginning of a raw term to where one row of each group is fetched, step
  /// by step.
  std::int64_t raw_soon = 0;
  /// Distances on the left, in packed elements, from one row and from one step to the next.
  std::int64_t row_stride = 0, step_stride = 0;
  std::int64_t shift = 0;  ///< to be added to `left` of each term
  /// If set, the left side lies as its owner has it, and is copied here row by row on the way, for later products: of
  /// one term that is not widened, with runs of a whole vector.
  void* copy = nullptr;
  /// If set, the panel is packed from here on the way, from whole rows that lie `raw_stride` apart: of one term that is
  /// not widened, without runs.
  const void* raw = nullptr;
  /// If set, what will be needed soon: a cache line for each vector is fetched in each step. Distances in bytes, from
  /// one step and from one vector to the next.
  const void* soon = nullptr;
  std::int64_t soon_stride = 0, soon_apart = 0;
  void* sums = nullptr;         ///< rows × width
  std::int64_t sum_stride = 0;  ///< from one row of them to the next
  bool add = false;             ///< start from what `sums` holds, not from zero
  /// If set, the sums go here instead: rounded once, in whole rows, `out_stride` elements apart; past the caches if
  /// `stream`, and then rows begin at cache lines.
  void* out = nullptr;
  std::int64_t out_stride = 0;
  std::int64_t vector_stride = 0;  ///< from one vector of such a row to the next, where they are not neighbours
  bool stream = false;
};

inline constexpr int kMaxVectors = 3;
/// Runs on the left have 1, 2, 4, … elements, at most a vector.
inline constexpr int kRuns = 5;

struct Tiles {
  std::int64_t rows;     ///< of a tile
  std::int64_t lanes;    ///< columns in a vector
  std::int64_t vectors;  ///< in the widest panel: kMaxVectors, or 2 if a row of a result is then whole cache lines
  std::int64_t group;    ///< neighbours in depth that lie together in a panel: 1, or 2 where products come in pairs
  std::size_t element;   ///< bytes of a packed element
  std::size_t sum;       ///< bytes of a sum
  bool widens;           ///< packed elements are wider than those in memory, so the left side must be packed too
  bool packs;            ///< `multiply` knows raw terms

  /// out[k / group][j][k % group] = from(k, j) for k < depth, j < width; zeros up to a whole group and where j ≥ cols.
  /// Columns from `width` on go to further panels, each `apart` bytes behind the one before.
  void (*pack)(const Place& from, std::int64_t depth, std::int64_t cols, std::int64_t width, void* out,
               std::int64_t apart);
  /// By number of vectors, less one.
  void (*multiply[kMaxVectors])(const Product& product);
  /// The same with a right side whose rows lie `right_stride` apart, in packed elements: of one term, into sums. `half`
  /// is for half a vector of columns, null where that takes as long as a whole one.
  void (*multiply_in_place[kMaxVectors])(const Product& product);
  void (*multiply_half_in_place)(const Product& product);
  /// The same where each place on the left holds a run of 2ʳ neighbours, used for the columns with the same j mod 2ʳ:
  ///   sums[i][j] += Σ_k left[i][k][j mod 2ʳ] · right[k][j].
  /// By r; null where a run is longer than a vector, and where products come in pairs.
  void (*multiply_runs[kRuns][kMaxVectors])(const Product& product);
  /// Rounds the first rows × cols sums to the element type, once, to nearest even.
  void (*store)(const void* sums, std::int64_t sum_stride, std::int64_t rows, std::int64_t cols, const Place& to,
                bool stream);
};

/// For f64, f32, f16 and bf16. Sums are f64 for f64 and f32 for the rest.
const Tiles& tiles(DType dtype);
/// The same, but never in pairs: packed elements are like sums.
const Tiles& widened_tiles(DType dtype);

/// Rows fetched ahead of those being packed: each may lie on a page of its own, which hardware does not foresee.
inline constexpr std::int64_t kRowsAhead = 8;

/// Makes what this thread stored past the caches visible before anything it does later.
void finish_streams();

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
