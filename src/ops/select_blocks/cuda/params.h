// The parameters of the selection's kernels. Shared by host and device: plain types, device pointers only.
#pragma once

namespace fretwork::select_blocks_op {

inline constexpr int kThreads = 256;
inline constexpr int kRows = 8;  ///< query blocks of a CTA that selects, a warp for each
inline constexpr int kBins = 256;

/// q or k, of which blocks are averaged. Strides in elements.
struct PoolSide {
  const void* data;
  long long batch, head, row, col;
  int heads;          ///< that share a mean
  int length, block;  ///< rows of a head, and of a block
  int blocks;         ///< of a head
  float* means;       ///< of (pair, block, column), a pair being a key head of a batch element
  long long step_block, step_col, step_pair;
};

struct PoolParams {
  PoolSide side[2];
  long long first_of_keys;  ///< CTAs before it have blocks of queries
  int kv_heads, depth;
  int lanes;  ///< threads that share a row, a power of two
};

struct OutArg {
  int* data;
  long long batch, head, row, col;
};

struct SelectParams {
  const float *queries, *keys;  ///< means: (pair, block, column) and (pair, column, block)
  OutArg counts, indices;
  unsigned* keys_of_rows;  ///< kRows lines of col_blocks for each CTA; null: in shared memory
  int items, pairs, kv_heads, row_blocks, col_blocks, depth;
  int rows, cols, block_rows, block_cols;
  int top_k, first, last;
  bool causal;
};

/// Bytes of shared memory before the scores.
constexpr int select_bytes(int depth) { return kRows * (depth * 4 + kBins * 4); }

}  // namespace fretwork::select_blocks_op
