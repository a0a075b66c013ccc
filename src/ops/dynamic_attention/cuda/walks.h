// Walks on the device: what is written there before attention's kernels run. Nothing of it reaches the host.
#pragma once

#include <memory>

#include "ops/attention/cuda/operands.h"
#include "ops/dynamic_attention/cuda/params.h"
#include "ops/dynamic_attention/problem.h"
#include "runtime/cuda_driver.h"

namespace fretwork::dynamic_attention_op {

/// Row tiles of a pattern in plain order and the intervals of its rows; remembered.
struct DeviceTiles {
  fretwork::cuda::DeviceBuffer memory;
  const attention_op::TileArg* tiles = nullptr;
  const Reach* reach = nullptr;
  const IntervalArg* intervals = nullptr;
  int count = 0;
  std::size_t bytes() const { return memory.bytes(); }
};
/// Tiles of `side` rows. `transposed`: rows are keys.
std::shared_ptr<const DeviceTiles> device_tiles(const RegularPattern& pattern, int side, bool transposed,
                                                const Context& context);

/// Where the blocks of all lists are named; `words` is left open.
BitsParams bits_of(const Keys& keys);

/// The blocks of all lists, a bit for each; and the same with rows and columns exchanged.
class BlockBits {
  static constexpr int kCounters = 1;  ///< in front of the words

 public:
  BlockBits(const Keys& keys, bool transposed, Context& context);
  const unsigned* words() const { return static_cast<const unsigned*>(words_.data()) + kCounters; }
  const unsigned* transposed() const { return static_cast<const unsigned*>(transposed_.data()); }
  /// Words of a line of each.
  int words_row() const { return words_row_; }
  int transposed_row() const { return transposed_row_; }
  /// A zero that kernels which read transposed words may count from.
  int* counter() const { return static_cast<int*>(words_.data()); }

 private:
  int words_row_, transposed_row_;
  Workspace words_, transposed_;
};

/// For each key block of a selection the queries that have it. Row tiles of `side` keys whose list is long are split
/// into pieces, so that no CTA has much more to do than others: nearly all queries may have the same block.
class QueryLists {
 public:
  QueryLists(const Problem& problem, const BlockBits& bits, int side, Context& context);
  /// Sets what a walk needs of them, with room for the sums of pieces.
  void set(GatherArg& walk) const;
  /// After the gradients' kernels: adds up pieces.
  void join(const attention_op::BackwardProblem& problem, Context& context) const;

 private:
  float* sums(int which) const;

  int list_heads_, side_, tiles_, piece_tokens_, sum_line_[2];
  std::int64_t lists_, room_;  ///< room: tokens of a list
  int tiles_each_, capacity_;  ///< row tiles of a block; pieces of a list
  Workspace first_, tokens_, first_piece_, pieces_, sums_;
};

/// Documents as kernels see them. `transposed`: rows are keys.
Documents documents_of(const Problem& problem, bool transposed);

/// After the forward pass with sinks: rows outside of all documents have none.
void clear_outside(const Problem& problem, Context& context);

/// Documents as row tiles of `side` rows.
class DocumentTiles {
 public:
  DocumentTiles(const Problem& problem, int side, bool transposed, Context& context);
  /// Sets what a walk needs of them.
  void set(WalkArg& walk) const;

 private:
  int count_;
  Workspace first_, tiles_, reach_, intervals_;
};

}  // namespace fretwork::dynamic_attention_op
