// Key padding on a GPU: the bits of visible columns that kernels read, and zero gradients for padding keys.
#pragma once

#include <cstdint>

#include "ops/attention/cuda/params.h"
#include "ops/attention/problem.h"

namespace fretwork::attention_op {

PaddingArg padding_arg(const Problem& problem);

/// Which columns of tiles are seen, for each batch element, as bits that take the place of a plan's `used` ones: tiles
/// without padding have none, and kernels go through them as if there were none anywhere.
class SeenColumns {
 public:
  /// `tiles` says which: order and tiles, or tokens and tile_used; used, side, tile_count. Launches the kernel that
  /// writes them.
  SeenColumns(const Problem& problem, SeenParams tiles, Context& context);
  /// Of each (batch, tile): the first of its words, or −1.
  const int* first() const { return static_cast<const int*>(memory_.data()); }
  const unsigned* words() const { return reinterpret_cast<const unsigned*>(first() + count_); }
  /// Of each batch element, group_count() words: a bit for each tile, 1 where some of its columns are seen.
  const unsigned* tile_words() const { return words() + count_ * side_words_; }
  int group_count() const { return static_cast<int>(groups_); }

 private:
  std::int64_t count_, side_words_, groups_;
  Workspace memory_;
};

/// After the gradients of keys and values are made: zeros for those that are not seen. Absent ones are left alone.
void clear_padding(const BackwardProblem& problem, Context& context);

}  // namespace fretwork::attention_op
