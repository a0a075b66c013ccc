// The parameters of attention's kernels. Shared by host and device: plain types, device pointers only.
#pragma once

namespace fretwork::attention_op {

/// A matrix for each (batch, head) whose rows can be read 16 bytes at a time: batch and head in elements, row in bytes.
struct InputArg {
  const void* data;
  long long batch, head;
  int row;
};

/// A matrix for each (batch, head) that is written; strides in elements.
struct OutputArg {
  void* data;
  long long batch, head, row, col;
  bool vector;  ///< neighbours of a row can be written 16 bytes at a time
};

/// Bits that mark a coordinate as not beyond the count it was taken from.
inline constexpr unsigned kInside = 1u << 9 | 1u << 19 | 1u << 29;

/// A tile. `inside` packs count[k] + 511 in ten bits for each axis: minus a place's coordinates (packed the same way,
/// without the 511) it keeps all bits of kInside iff the place is in the sequence.
struct TileArg {
  int base;
  unsigned inside;
  int used;  ///< first word of its bits, or −1
  int pad;
};

struct RunArg {
  int first, count, mask;
};

struct MaskArg {
  int low, high, limit, bits;
};

struct OrderArg {
  int extent[3], stride[3];
};

/// One component of a plan (plan.h).
struct ComponentArg {
  OrderArg row_order, col_order;
  const TileArg *row_tiles, *col_tiles;
  const int* first;
  const RunArg* runs;
  const MaskArg* masks;
  const unsigned *bits, *used;
  const int* seen;  ///< where keys are padded, in place of TileArg::used for each (batch, column tile); or null
  int col_tile_count;
  const int* by_work;  ///< row tiles, those with the most work first
  int row_tile_count;
  int long_tiles;  ///< so many of by_work are far longer than the rest: they run before all others
};

/// Keys of each batch element that no query sees: those whose byte is not zero. Absent when data is null.
struct PaddingArg {
  const unsigned char* data;
  long long batch, col;
};

/// Which (batch, head) a CTA's row tile belongs to. Lists are null where all heads take part.
struct HeadsArg {
  const int* heads;        ///< query heads, `count` of them; with `groups`, all of their members one after the other
  const int* groups;       ///< key heads: {key head, first of its query heads in `heads`, how many} for each
  int count;               ///< query heads, or key heads where keys are the rows
  int first_batch, batch;  ///< the elements that take part
  int ratio;               ///< query heads of a key head
  int all;                 ///< query heads of the problem
};

enum class BiasType : int { f32, f16, bf16 };

/// What is done to a score after the product: scale, softcap, bias, ALiBi, dropout.
struct ScoreArg {
  float scale;
  float softcap;  ///< 0: none
  const void* bias;
  long long bias_batch, bias_head, bias_row, bias_col;
  BiasType bias_type;
  const float* slopes;
  long long slope_stride;
  int distance;     ///< keys minus queries
  int first_batch;  ///< of the whole call's elements: dropout counts from there
  const long long* seed;
  unsigned threshold;  ///< 0: no dropout
  float kept;          ///< what kept probabilities are multiplied by
};

/// A row's log-sum-exp in units of log 2 (+∞ for a row without elements) and the sum of dO∘O minus the log-sum-exp's
/// gradient.
struct RowStats {
  float lse, delta;
};

/// The same for kernels with more than a scale: the log-sum-exp as it is, and what is to be added to it in units of
/// log 2, because a large one has no room for it.
struct ScoreStats {
  float lse, delta, rest, pad;
};

/// A log-sum-exp of which nothing is rounded away: top + log(sum). Zeros where there is no element.
struct RowSum {
  float top, sum;
};

/// From here on what rounding a log-sum-exp leaves out counts in gradients: probabilities would be wrong by 6e-5.
inline constexpr float kLargeLse = 1024.0f;

struct ForwardParams {
  ComponentArg plan;
  HeadsArg heads;
  ScoreArg score;
  InputArg q, k, v;
  OutputArg o, lse;  ///< lse: absent when its data is null
  RowSum* sums;      ///< of each (batch, head, query): what components hand on. Null where there is only one
  int queries;
  int depth, value_depth;
  bool merge;  ///< o and sums hold what the components before gave
  bool again;  ///< lse is given: of rows where it is large, sums are written and nothing else is
};

/// Rows are queries, and the first gradient is theirs; or keys, and the gradients are the keys' and the values'.
/// `first` and `second` are what the rows read (Q and dO, or K and V), `other` what the columns do.
struct BackwardParams {
  ComponentArg plan;
  HeadsArg heads;
  ScoreArg score;
  InputArg first, second, other_first, other_second;
  OutputArg d_first, d_second;
  const void*
      stats;  ///< of each (batch, head, query): RowStats, or ScoreStats where more than a scale is done to scores
  int queries;
  int depth, value_depth;
  bool add;            ///< the gradients are float and are added to
  PaddingArg padding;  ///< of the rows, where they are keys
};

/// A gradient of the bias: of each element, or summed over a row of the plan.
struct BiasGradientParams {
  ComponentArg plan;
  ScoreArg score;
  InputArg first, second, other_first, other_second;
  const ScoreStats* stats;
  float* out;  ///< added to
  long long out_batch, out_head, out_row, out_col;
  const int* heads;  ///< those with this pattern, or null for all
  int head_count;
  int first_batch, batch;  ///< the elements with this pattern
  int all, ratio, queries, depth, value_depth;
  bool sum_batch, sum_heads;
  PaddingArg padding;  ///< of the rows, where they are keys
};

/// Which columns of a side's tiles the queries of each batch element see. Tiles are TileArg in an order, or tokens of
/// each place and where `used` bits begin.
struct SeenParams {
  OrderArg order;
  const TileArg* tiles;
  const int *tokens, *tile_used;
  const unsigned* used;
  PaddingArg padding;
  int side, tile_count;
  int* first;            ///< of each: where its words begin, or −1 where all of its columns are seen and used
  unsigned* words;       ///< of each: side / 32
  unsigned* tile_words;  ///< of each batch element: a bit for each tile, 1 where some column is seen and used
};
inline constexpr int kSeenTiles = 32;  ///< of a CTA, a warp for each

/// Zeros in the rows of keys that are not seen, of up to two tensors: data may be null.
struct ClearParams {
  OutputArg out[2];
  PaddingArg padding;
  long long all;  ///< keys of all batch elements and heads, each head's rounded up to 32
  int heads, keys;
  int depth[2];
};

/// Statistics of the rows for the gradients.
struct StatsParams {
  OutputArg o, d_o, lse, d_lse;  ///< d_lse: absent when its data is null
  void* stats;                   ///< RowStats or ScoreStats
  const RowSum* sums;            ///< of rows with a large lse, where ScoreStats are wanted; or null
  bool in_tiles;                 ///< of 64 rows, which are then those of a head: 64 × lse, 64 × delta
  long long rows, all_rows;      ///< of a head, of all
  int heads, value_depth;
};

/// Element (a, b, c, d) of `from`, or `value` where that is null, to `to`.
struct CopyParams {
  const void* from;
  void* to;
  long long sizes[4], from_strides[4], to_strides[4];
  float value;
};

/// A kernel's tile and what it takes to run it.
struct KernelShape {
  int rows, cols, warps, shared_bytes;
};
/// Bytes of a row of 16-bit entries in shared memory, as the permutation of its chunks wants them.
constexpr int line_bytes(int depth) { return (2 * depth + 127) / 128 * 128; }
/// Bytes of a tile of results on their way out, in float.
constexpr int staging_bytes(int rows, int depth) { return rows * 4 * (depth + 8); }
constexpr int larger(int a, int b) { return a > b ? a : b; }
/// Up to 128 entries of a row a warp has 32 queries, so that it reads keys and values half as often; beyond, its sums
/// leave room for 16. What extras do to each score is long: few scores at a time.
constexpr KernelShape forward_shape(int depth, bool extras) {
  const int cols = extras ? 32 : 64;
  return {128, cols, depth <= 128 && !extras ? 4 : 8,
          larger((128 + 2 * cols) * line_bytes(depth), staging_bytes(128, depth))};
}
/// Rows of more than 128 entries: both gradients of a key do not fit into registers, and are made one after the other.
constexpr KernelShape backward_shape(int depth, bool extras) {
  const int rows = depth > 128 ? 64 : 128, cols = depth > 128 || extras ? 32 : 64;
  return {rows, cols, rows / 16, larger((2 * rows + 4 * cols) * line_bytes(depth), staging_bytes(rows, depth))};
}
/// Of the kernels in float; `tiles` of them in shared memory. Lines are padded so that they begin in different banks.
/// With tf32, 64 columns of results pass through it as well.
inline constexpr int kResultLine = 68;
constexpr KernelShape simple_shape(int depth, int tiles, bool tf32 = false) {
  const int side = depth <= 128 ? 64 : 32;
  return {side, side, 8, 4 * side * (tiles * (depth + 4) + side + 4 + (tf32 ? kResultLine : 0))};
}

}  // namespace fretwork::attention_op
