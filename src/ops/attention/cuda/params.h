// The parameters of attention's kernels. Shared by host and device: plain types, device pointers only.
#pragma once

#include "device/tensor_map.cuh"

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

/// A score for each query head that joins the sum of its rows and has no value. Absent when data is null.
struct SinksArg {
  const void* data;
  long long head, row;  ///< row: where heads are rows
  BiasType type;
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
  bool merge;      ///< o and sums hold what the components before gave
  bool again;      ///< lse is given: of rows where it is large, sums are written and nothing else is
  SinksArg sinks;  ///< which join where `merge` is false
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
  void* out;
  BiasType out_type;  ///< of its elements
  bool add;           ///< they are float and are added to; else each is written once
  bool pairs;         ///< two that follow each other from an even place on can be written at once, and are not added to
  bool follow;        ///< columns 2n and 2n + 1 of a tile do follow each other
  bool bias_pairs;    ///< 16-bit biases of keys 2n and 2n + 1 can be read at once, for any n
  long long out_batch, out_head, out_row, out_col;
  const int* heads;  ///< those with this pattern, or null for all
  int head_count;
  int first_batch, batch;  ///< the elements with this pattern
  int all, ratio, queries, keys, depth, value_depth;
  bool sum_batch, sum_heads;
  int splits;           ///< a row tile's steps are dealt out to so many CTAs of attention_bias_gradient
  long long out_split;  ///< between their sums, where columns are summed
  PaddingArg padding;   ///< of the rows, where they are keys
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
  SinksArg sinks;
  OutputArg sink_terms;  ///< of each row, what it adds to the gradient of its sink; absent when data is null
};

/// Rows before their first component: the sink alone.
struct SinkParams {
  SinksArg sinks;
  RowSum* sums;   ///< of each (batch, head, query); `unit` is what tops count
  OutputArg lse;  ///< absent when data is null
  float unit;
  long long rows, all_rows;  ///< of a head, of all
  int heads;
};

/// Element (a, b, c, d) of `from`, or `value` where that is null, to `to`.
struct CopyParams {
  const void* from;
  void* to;
  long long sizes[4], from_strides[4], to_strides[4];
  float value;
};
/// attention_sum has a thread for sums of up to so many elements, a CTA for others.
inline constexpr int kShortSum = 64;

/// A kernel's tile and what it takes to run it.
struct KernelShape {
  int rows, cols, warps, shared_bytes;
};
/// Bytes of a row of 16-bit entries in shared memory, as the permutation of its chunks wants them.
constexpr int line_bytes(int depth) { return (2 * depth + 127) / 128 * 128; }
/// Bytes of a tile of results on their way out, in float.
constexpr int staging_bytes(int rows, int depth) { return rows * 4 * (depth + 8); }
constexpr int larger(int a, int b) { return a > b ? a : b; }
/// Rows of more than 256 entries lie in two parts, one tile behind the other. Registers have room for the sums of one:
/// two warps have the same rows, both make their scores, and each sums one part.
constexpr int parts_of(int depth) { return depth > 256 ? 2 : 1; }
/// Up to 128 entries of a row a warp has 32 queries, so that it reads keys and values half as often; beyond, its sums
/// leave room for 16. Fewer rows than 128 take a warp for each 16. What extras do to each score is long: few scores at
/// a time. Above 256 entries tiles fit 99 KB.
constexpr KernelShape forward_shape(int depth, bool extras, int most_rows = 128) {
  const int rows = depth > 256 ? 32 : most_rows, cols = extras || depth > 256 ? 32 : 64;
  const int warps = rows == 128 && depth <= 128 && !extras ? 4 : rows / 16 * parts_of(depth);
  return {rows, cols, warps, larger((rows + 2 * cols) * line_bytes(depth), staging_bytes(rows, depth))};
}
/// Rows of more than 128 entries: both gradients of a key do not fit into registers, and are made one after the other.
/// Of more than 256: there is room for one stage of columns.
constexpr int backward_stages(int depth) { return depth > 256 ? 1 : 2; }
constexpr KernelShape backward_shape(int depth, bool extras, int most_rows = 128) {
  const int rows = depth > 256 ? 32 : depth > 128 && most_rows > 64 ? 64 : most_rows;
  const int cols = depth > 128 || extras ? 32 : 64;
  return {rows, cols, rows / 16 * parts_of(depth),
          larger((2 * rows + 2 * backward_stages(depth) * cols) * line_bytes(depth), staging_bytes(rows, depth))};
}
/// Of kernels for the gradient of a bias: two stages of two matrices for rows and columns.
constexpr KernelShape bias_shape(int depth) {
  const int rows = depth > 128 ? 64 : 128, cols = depth > 128 ? 32 : 64;
  return {rows, cols, rows / 16, 4 * (rows + cols) * line_bytes(depth)};
}
/// Of the kernels in float; `tiles` of them in shared memory. Lines are padded so that they begin in different banks.
/// With tf32, 64 columns of results pass through it as well. Rows of more than 256 entries come in slices.
inline constexpr int kResultLine = 68;
constexpr int simple_slice(int depth) { return depth > 256 ? 128 : depth; }
constexpr KernelShape simple_shape(int depth, int tiles, bool tf32 = false) {
  const int side = depth <= 128 ? 64 : 32;
  return {side, side, 8, 4 * side * (tiles * (simple_slice(depth) + 4) + side + 4 + (tf32 ? kResultLine : 0))};
}

}  // namespace fretwork::attention_op

// ------------------------------------------------------------------------------------------------------ decode

namespace fretwork::attention_op::decode {

inline constexpr int kRows = 16;  ///< of a tile: heads of a group × queries
inline constexpr int kKeys = 16;  ///< of a step, which one warp multiplies

/// What a row has from a part of its keys, beside the sum of values: the highest score, and the sum of
/// exp(unit·(score − highest)).
struct alignas(8) Share {
  float highest, sum;
};

/// Queries of all heads that share a key head, against a segment of the steps.
struct Params {
  InputArg q, k, v;
  OutputArg o, lse;  ///< lse: absent when its data is null
  ScoreArg score;
  float unit;         ///< what scores are worth when they are compared: the scale, or 1 where it is in them
  const int* tokens;  ///< kKeys of each step, −1 where there is none
  PaddingArg padding;
  const int* masks;            ///< of each step: −1 where every query has all of its keys, else which of `bits`
  const unsigned short* bits;  ///< of each mask and query: bit n says whether key n is there
  float* sums;                 ///< of each CTA: kRows lines of values; null where a CTA has all steps and writes o
  Share* shares;               ///< of each CTA and row
  int steps, segments, tiles;  ///< CTA = (pair·segments + segment)·tiles + tile
  int rows, heads, kv_heads, ratio, depth, value_depth;
  long long all_rows;  ///< of all heads and batches
  SinksArg sinks;
};

/// Warps each with a ring of stages of their own. All rings together leave room for two CTAs on a multiprocessor of
/// Hopper and one elsewhere.
struct Shape {
  int warps, stages;
};
constexpr Shape shape_of(int depth) { return {depth <= 128 ? 4 : 2, depth <= 64 ? 6 : 3}; }
constexpr int stage_bytes(int depth) { return 2 * kKeys * line_bytes(depth); }
constexpr int shared_bytes(int depth) { return shape_of(depth).warps * shape_of(depth).stages * stage_bytes(depth); }
inline constexpr int kMergeWarps = 4;

}  // namespace fretwork::attention_op::decode

// ------------------------------------------------------------------------------------------------------ Hopper

namespace fretwork::attention_op::hopper {

/// A CTA owns 128 rows at a time, 64 for each of the two warpgroups that multiply; a third one fetches. Or it owns 64
/// rows and one warpgroup multiplies; then a multiprocessor has two CTAs. Such kernels are for up to 128 columns.
inline constexpr int kRows = 128, kHalfRows = 64;
constexpr int threads_of(int rows) { return 128 * (rows / 64 + 1); }

/// Of forward kernels for so many columns of q and k, and of v, both multiples of 64: rows of k and v in a step, how
/// many q lie in shared memory (an item's rows leave through its q) and how many steps. All must fit 227 KB.
struct ForwardTiles {
  int cols, items, stages;
};
constexpr ForwardTiles forward_tiles(int depth, int values, int rows = kRows) {
  const int most = depth > values ? depth : values;
  if (rows < kRows) {
    return {64, 2, most == 64 ? 4 : 2};
  }
  const int cols = values <= 128 && most <= 192 ? 128 : 64;
  return {cols, most > 192 || (cols == 128 && most > 128) ? 1 : 2, most == 64 ? 4 : 2};
}

/// The same of kernels for gradients, whose columns come in tiles of 64.
struct BackwardTiles {
  int items, stages;
};
constexpr BackwardTiles backward_tiles(int most, int rows = kRows) {
  return most == 64 ? BackwardTiles{2, rows < kRows ? 4 : 6} : rows < kRows ? BackwardTiles{1, 2} : BackwardTiles{2, 3};
}

/// Of kernels for gradients of more than 128 columns, `most` of q, k and v: tiles of 64 rows that the two operands
/// which stream have room for. One operand of the rows is not needed for values' gradients; its place takes two more.
struct HeadDimGt128Stages {
  int first, second;
};
constexpr HeadDimGt128Stages head_dim_gt_128_stages(int most, bool values) {
  const int first = most > 192 ? 2 : 3;
  return {first, first - 1 + (values ? 2 : 0)};
}

/// An operand as the copy engine sees it: (column, last axis of a tile, middle axis[, first axis], place). The axes of
/// a tile are as long as the tile, and what is not inside the sequence is cut off by starting that much later on them.
/// The place counts units of memory: batch·batch + head·head + row·row of them.
struct Source {
  Map map;
  int batch, head, row;
  int axes;  ///< 2 or 3 axes of a tile
};

/// A tile's place for the copy engine: at a token, `skip` on each axis.
struct Place {
  int at, skip[3];
};

/// A run and its mask. kind: kWhole, kBand, or where the bits begin.
inline constexpr int kWhole = -1, kBand = -2;
struct RunOf {
  int first, count, unused[2];
  int kind, low, high, limit;
};

/// One thing to do for a CTA: a row tile of one head of one batch, `steps` pairs of tiles.
struct Item {
  int tile, batch, head, steps;
};

/// Where an item begins that may be a piece of its tile: `skip` tiles into run `run`, and where rows are keys with
/// query head `turn` of those that share them. `part` is where results go that are to be joined with those of other
/// items, −1 where the item is a whole tile.
struct PieceOf {
  int run, skip, part, turn;
};

/// A row tile whose results lie in parts [first, first + count).
struct Split {
  int tile, batch, head, first, count;
};

/// What a row has from a part of its columns, beside its sums: the highest score in units of log 2, and the sum of
/// exp2(score − highest).
struct Share {
  float highest, sum;
};

/// A plan's component and who does what. CTA c does items [share[c], share[c + 1]).
struct Walk {
  const Place *row_tiles, *col_tiles;
  const int *first, *last;  ///< of the runs of each row tile
  const RunOf* runs;
  const int *row_tokens, *col_tokens;  ///< of each place of each tile, −1 where there is none
  const int* col_used;                 ///< as in Tile; of each batch element, where keys are padded
  int col_used_batch;                  ///< tiles of an element there, else 0
  const unsigned *bits, *used;
  const Item* items;
  const int* share;
  int row_places, col_places;  ///< of a tile
};

/// Column tiles of which a batch element sees some key, a bit for each: the others are no steps. words null: all.
struct SeenTiles {
  const unsigned* words;
  int batch;  ///< words of an element
};

/// Rows in plain memory; strides in elements.
struct Lines {
  void* data;
  long long batch, head, row;
};

/// What follows `scale` is for kernels whose items may be pieces. There a tile's rows may also be those of 2^pack heads
/// that share keys, one head after the other, and item.head counts such heads.
struct ForwardParams {
  Source q, k, v;
  Walk walk;
  Lines o, lse;
  int group;        ///< query heads that share a key head
  int head0;        ///< the first head of o and lse, and where q begins
  int merge;        ///< 1: o and lse hold what earlier components gave
  int value_depth;  ///< columns of o; q, k and v have zeros beyond theirs
  float scale;      ///< times log2(e)
  SinksArg sinks;   ///< which join where `merge` is 0
  int pack;
  const PieceOf* pieces;  ///< of each item
  float* sums;            ///< of parts: kRows lines each
  Share* shares;          ///< of each of those lines
  SeenTiles seen;         ///< for kernels that know of columns which nothing uses
};

/// Gradients of keys and values (rows are keys, columns queries) or of queries (the other way round).
struct BackwardParams {
  Source rows[2];  ///< k and v, or q and d_o
  Source cols[2];  ///< q and d_o, or k and v
  Walk walk;
  Lines out[2];  ///< d_k and d_v, or d_q
  const RowStats* stats;
  int stats_batch, stats_head;
  int group;  ///< query heads that share a key head
  int add;    ///< 1: to what is there
  int early;  ///< 1: the kernel before waited for all that came before it, and its own results are not needed here
  int depth, value_depth;
  float scale, scale_2;   ///< the latter times log2(e)
  const PieceOf* pieces;  ///< of each item, for kernels whose items may be pieces
  float* sums[2];         ///< of parts: kRows lines each
  SeenTiles seen;         ///< where columns are keys, for kernels that know of columns which nothing uses
};

/// Of kernels that make all gradients at once, for so many columns: threads, and what shared memory has places for:
/// key tiles of items, tiles of q and of d_o, dSᵀ of a step; dq of a step has two.
struct FiveProductTiles {
  int threads, items, queries, outputs, scores;
};
constexpr FiveProductTiles five_product_tiles(int columns) {
  return columns == 64 ? FiveProductTiles{512, 2, 4, 4, 2} : FiveProductTiles{384, 1, 3, 2, 1};
}
/// Gradients of 128 columns with options fill shared memory to the last byte: static and dynamic, which begins at the
/// next multiple of 1024.
inline constexpr int kAllShared = 232448, kScoredStatic = 2560;
constexpr int five_product_shared(int columns, bool scored = false) {
  if (scored && columns == 128) {
    return kAllShared - kScoredStatic;
  }
  const FiveProductTiles tiles = five_product_tiles(columns);
  return 1024 + 2 * columns * (2 * kRows * tiles.items + 64 * (tiles.queries + tiles.outputs)) +
         2 * 64 * kRows * tiles.scores + 2 * 4 * 64 * columns;
}

/// All gradients of a pattern in which query i meets the keys up to i − low, in whole tiles; the first key tile meets
/// all query tiles.
struct FiveProductParams {
  Source k, v, q, d_o;
  Lines d_k, d_v, d_q;
  const RowStats* stats;     ///< of each (batch, head, query), in tiles
  float* sums;               ///< a tile for each (batch, head, query tile); as many again where `round` is 1
  int* turns;                ///< how many key tiles each of them has met, zeros before
  int* taken;                ///< how many items, a zero before
  int items;                 ///< key tiles of all key heads and batches
  int row_tiles, col_tiles;  ///< of keys, of queries
  int low;
  int round;            ///< 1: all meet all
  int pairs, together;  ///< of key heads and batches; so many run through their tiles together
  int tiles;            ///< query tiles of all heads and batches
  int kv_heads, group;
  int depth, value_depth;
  float scale, scale_2;  ///< the latter times log2(e)
  PaddingArg padding;
};

// Kernels with options read more. The structs begin as those without, which take as much of them as they know.

/// Options of a kernel, as bits: the type of the bias (BiasType + 1), or 0; ALiBi; softcap; dropout; whether the copy
/// engine brings tiles of the bias, which has 16 bits then.
inline constexpr unsigned kBiasBits = 3, kAlibi = 4, kSoftcap = 8, kDropout = 16, kBiasTiles = 32, kScoreCount = 64;

struct ScoreMore {
  ScoreArg score;
  float cap;           ///< what a product is multiplied by for exp2 to be e^(2·score / softcap)
  float cap_terms[5];  ///< Σ terms[n] · x^(2n + 1) is the capped score of a product x, if |x| ≤ cap_bound
  float cap_bound;
  int head0, heads;  ///< the launch's first query head, and the problem's
  int queries;
  int bias_row, bias_col;  ///< bytes
  int bias_pairs;          ///< 1: biases of keys 2n and 2n + 1 can be read at once, for any n
  int row_line, col_line;  ///< 1: a tile's rows or columns follow each other in the sequence
  RowSum* tops;            ///< forward: as portable ForwardParams::sums; null where there is one component
};
/// A bias as the copy engine sees it: (key, query, head, batch). Boxes are 64 × 64; the coordinates of a bias that is
/// shared by heads or batch elements are 0.
struct BiasSource {
  Map map;
  int head, batch;  ///< 1, or 0 where it is shared
};
struct ScoredForwardParams : ForwardParams {
  ScoreMore more;
  BiasSource bias;  ///< of kernels with kBiasTiles
};
struct ScoredBackwardParams : BackwardParams {  ///< stats are ScoreStats
  ScoreMore more;
};
struct ScoredFiveProductParams : FiveProductParams {  ///< stats are tiles of 64 × lse, delta, rest, nothing
  ScoreMore more;
  BiasSource bias;  ///< where `prefetch` is 1: what is on its way to L2 two steps ahead
  int prefetch;
};
template <unsigned kScore, typename Plain, typename Scored>
struct ParamsOf {
  using type = Scored;
};
template <typename Plain, typename Scored>
struct ParamsOf<0, Plain, Scored> {
  using type = Plain;
};
template <unsigned kScore>
using ForwardParamsOf = typename ParamsOf<kScore, ForwardParams, ScoredForwardParams>::type;
template <unsigned kScore>
using BackwardParamsOf = typename ParamsOf<kScore, BackwardParams, ScoredBackwardParams>::type;
template <unsigned kScore>
using FiveProductParamsOf = typename ParamsOf<kScore, FiveProductParams, ScoredFiveProductParams>::type;

inline constexpr int kJoinWarps = 4;

/// Joins the parts of rows and puts them where they belong: with `shares` by the log-sum-exp, else by adding up.
struct JoinParams {
  const Split* splits;
  int tiles;  ///< how many
  const int* row_tokens;
  const float* sums[2];  ///< of one or two results
  const Share* shares;
  Lines out[2], lse;
  int lines[2];    ///< columns that a line of sums has
  int depth[2];    ///< and those of the results
  int head0;       ///< the first head of results
  int pack;        ///< log2 of the heads in a tile
  int merge;       ///< 1: results hold what earlier components gave
  SinksArg sinks;  ///< which join where `merge` is 0
};

struct ScoredJoinParams : JoinParams {
  RowSum* tops;  ///< of results, as ScoreMore's
  int heads, queries;
};

/// Rows that no element reaches.
struct FillParams {
  Lines o, lse;    ///< lse may be null
  long long rows;  ///< of all heads and batches
  int per_head, heads, depth;
  SinksArg sinks;
};

}  // namespace fretwork::attention_op::hopper
