// Parameters and tile sizes of the kernels, a namespace for each family; shared by host and device.
#pragma once

#include "device/divide.cuh"
#include "device/tensor_map.cuh"

// ----------------------------------------------------------------------------------------------------
// Parameters of the simple, the portable and the exact fp32 kernels.

namespace fretwork::kronecker {

/// Strides in elements of an operand of a·d products: from one i, one l, one line and one entry of a line to the next.
/// `fast` is the innermost of its axes: 0 for l, 1 for line, 2 for entry.
struct ProductOperand {
  void* data;
  long long i, l, line, entry;
  int fast;
  int unit;  ///< bytes that can be moved at once along its lines, 16 at most
};

/// out[i,l][row, col] = activation(Σ_t left[i,l][row, t]·right[i,l][col, t] + bias[i,l][col]).
struct ProductParams {
  ProductOperand left, right, out;
  const void* bias;
  long long bias_i, bias_l, bias_col;
  long long rows, cols, depth, a, d;
  long long l_groups, row_tiles, col_tiles;
  long long pieces, piece;  ///< of the depth: their number, and the length of each
  long long out_piece;      ///< from the result of one piece to that of the next
  int activation;           ///< as fretwork::Activation counts
  bool vector;              ///< 16 bytes of the result can be written at once along its innermost axis
};

/// to[feature] = Σ_n from[n, feature], over a piece of the batch.
struct BatchSumParams {
  const void* from;
  long long batch_stride, feature_stride, batch, features;
  long long piece;
  void* to;  ///< pieces × features, in the type of sums
};

/// The pieces of d_w, and of d_bias where there are some, follow each other, in the type of sums. `sizes` are in the
/// order in which a piece of d_w lies, `strides` those of the result.
struct ReduceParams {
  const void *partials, *bias_partials;
  void *to, *bias;
  long long weights, features;  ///< of a piece
  long long sizes[4], strides[4], bias_stride;
  unsigned weight_ctas;  ///< those after add up the bias
  int pieces, slices, bias_pieces, bias_slices;
  bool contiguous;  ///< the result is, and aligned
};

}  // namespace fretwork::kronecker

// ----------------------------------------------------------------------------------------------------
// Parameters of the copies between weights and dense matrices.

namespace fretwork::kronecker {

/// Strides count elements.
struct ConvertParams {
  void* w;
  long long w_a, w_b, w_c, w_d;
  void* dense;
  long long dense_row, dense_col;
  unsigned long long* outside;  ///< from_dense: the least place of a non-zero outside the pattern; all ones before
  long long b, c, d;
  long long cols, total;  ///< of the dense matrix
};

inline constexpr int kConvertThreads = 256, kConvertElements = 4;  // of one thread, so that several reads are under way

}  // namespace fretwork::kronecker

// ----------------------------------------------------------------------------------------------------
// Parameters of the small-batch kernels for any strides.

namespace fretwork::kronecker::few {

inline constexpr int kThreads = 128;
inline constexpr int kRows = 8;              ///< of the batch in a CTA, at most
inline constexpr int kPitch = kThreads + 8;  ///< floats from one sum to the next where threads add theirs up

/// The axis along which a thread reads neighbouring weights.
enum Axis { kAlongL, kAlongK, kAlongJ };

/// Vectors of weights that a thread reads in one step, and the sums of it for a batch row.
constexpr int vectors_of(Axis axis, int v) { return axis == kAlongK ? 8 : 16 / v; }
constexpr int sums_of(Axis axis, int v) { return vectors_of(axis, v) * (axis == kAlongK ? 1 : v); }

/// On the tensor cores a CTA has sixteen rows of the batch at most, and a warp 16 × 16 weights of v neighbouring l.
inline constexpr int kTileRows = 16, kTileSide = 16, kTileThreads = 256, kWarps = kTileThreads / 32;
/// Of 16-bit elements: from x of one (row, k mod 4) to the next, four k to an l. Loads of 16 bytes meet no conflict.
constexpr int tile_pitch(int tile_l) { return 4 * tile_l + (tile_l == 2 ? 0 : 8); }
/// Of floats: from the sums of one row to those of the next, 2^log_cells of (j, l). Stores of a warp's lanes, which
/// stand two rows apart, meet in few banks.
constexpr int sums_pitch(int log_cells) { return (1 << log_cells) + 4; }
/// CTAs of a cluster that share the depth, at most.
inline constexpr int kMostSplit = 8;

/// Threads of a CTA stand along l (fastest), k and j, in powers of two; each takes `v` neighbours of its axis. On the
/// tensor cores warps do, and `split` CTAs of a cluster have `part` of the k each.
struct Params {
  const void *x, *w, *bias;
  void* y;
  long long x_batch, x_feature, y_batch, y_feature, w_a, w_b, w_c, w_d, bias_stride;
  int batch, b, c, d;
  int log_l, log_k, log_j;  ///< of the numbers of threads or warps
  int split, part;
  Divisor by_split, groups, j_tiles, l_tiles;
  int chunk, pitch;  ///< k that x is fetched for at once, and elements from one line of it to the next
  int activation;
  bool k_next;    ///< threads along k stand before those along j
  bool x_vector;  ///< four neighbouring features of x can be read at once
  bool x_pairs;   ///< or two, on the tensor cores
  bool x_rows;    ///< or four neighbouring rows, there
  int log_rows;   ///< of the rows of a CTA, rounded up; there
};

}  // namespace fretwork::kronecker::few

// ----------------------------------------------------------------------------------------------------
// Parameters and tile sizes of the small-batch kernels that load straight into fragments.

namespace fretwork::kronecker::direct {

/// k of a step of a warp: lanes hold four neighbours of each δ, or eight where there is but one.
constexpr int depth_of(int v) { return v == 1 ? 32 : 16; }
/// Bytes of a warp's sums.
constexpr int sums_bytes(int v, int m, int n) { return v * m * n * 32 * 16; }
/// Registers that sums, loads and addresses need; threads of a CTA at most, and CTAs that an SM should have room for.
constexpr int registers_of(int v, int steps, int m, int n) {
  return 4 * v * m * n + steps * (v == 1 ? 4 : 2 * v) * (2 * m + n) + 30;
}
constexpr int most_threads(int v, int steps, int m, int n) {
  const int registers = registers_of(v, steps, m, n);
  return registers > 128 ? 256 : registers > 80 || registers <= 64 ? 512 : 384;
}
constexpr int least_ctas(int v, int steps, int m, int n) { return registers_of(v, steps, m, n) <= 80 ? 2 : 1; }

/// Batch last with d = 1, where a block of x is one piece of memory: its k at most, outputs of a CTA, its threads, and
/// bytes of shared memory, for the piece and what the last lines' tails read behind it, and for the results.
inline constexpr int kPieceDepth = 64, kPieceOutputs = 64, kPieceThreads = 512;
constexpr int piece_x_bytes(int c, int batch) { return c * batch * 2 + 64; }
constexpr int piece_bytes(int c, int batch) { return piece_x_bytes(c, batch) + kPieceOutputs * batch * 2; }

/// Tiles, batch first with d = 2: steps of a warp, rows at most and of those that have fewer, bytes from a row of x in
/// shared memory to the next, so that two of them meet different banks, warps and parts of the depth at most, and bytes
/// of shared memory, for the sums and x.
inline constexpr int kTileSteps = 4, kTileRows = 40, kTileFewer = 24, kTilePitch = kTileSteps * 64 + 64;
inline constexpr int kTileWarps = 16, kTileParts = 14;
constexpr long long tile_bytes(long long parts, long long own, long long rows) {
  return parts * (own * sums_bytes(2, 1, static_cast<int>(rows / 8)) + rows * kTilePitch);
}

/// Strides in elements; the unit axes of the weights are l, then k. Offsets within a block of x, the weights and y fit
/// into 31 bits. What every call needs comes first: each 64 bytes are a trip to memory.
struct Params {
  const void *x, *w;
  void* y;
  long long x_block, w_block;  ///< from one i to the next
  int x_batch, y_batch, w_b;
  int batch, b, c, d;
  Divisor groups, j_tiles;
  int rows;              ///< of a tile
  int log_own, along_k;  ///< warps of a CTA that have l or outputs of their own, a power of two; that share the depth
  bool plain;            ///< neither bias nor activation
  bool apart;            ///< warps load x for themselves
  bool more;             ///< than a few rows
  bool first, last;      ///< features of a row lie together, or rows of a feature, even in number; or neither
  bool piece;            ///< blocks of x are pieces of memory
  int x_feature, y_feature, bias_stride, activation;
  Divisor l_tiles;
  const void* bias;
};

}  // namespace fretwork::kronecker::direct

// ----------------------------------------------------------------------------------------------------
// Parameters and tile sizes of the small tiles for any δ.

namespace fretwork::kronecker::small {

/// How an operand lies in memory and in a stage: lines are rows of the products and run along (k, δ); or lines are k
/// and run along (row, δ); or lines are (k, δ) and run along rows. Rows are outputs, or those of the batch.
enum Way { kRuns, kTurned, kColumns };

/// All δ of a problem are in a tile, so many, or eight neighbours of them.
inline constexpr int kDeltaCounts[] = {1, 2, 3, 4, 5, 6, 7, 8, 12};
/// Neighbouring k that a lane reads together, with all δ of the tile: 16 bytes, or else an odd multiple of 8.
constexpr int unit_of(int deltas) {
  return 8 % deltas == 0 ? 8 / deltas : deltas % 2 != 0 ? 4 : deltas % 4 != 0 ? 2 : 1;
}
/// k of a stage, and of what a lane's units make: one mma, or two.
constexpr int depth_of(int deltas) { return deltas == 1 ? 64 : deltas <= 3 ? 32 : 16; }
constexpr int step_of(int deltas) { return deltas == 1 ? 32 : 16; }
/// Bytes of a line that runs along (k, δ): lanes of a load meet different banks, by permuted chunks where a unit is 16
/// bytes, else by an odd number of 32 bytes.
constexpr int pitch_of(int deltas) {
  const int bytes = 2 * depth_of(deltas) * deltas;
  return 8 % deltas == 0 || bytes / 32 % 2 != 0 ? bytes : bytes + 32;
}
/// Bytes of `rows` rows of an operand in a stage.
constexpr int panel_bytes(Way way, int deltas, int rows) {
  const int depth = depth_of(deltas);
  return way == kRuns     ? rows * pitch_of(deltas)
         : way == kTurned ? depth * (2 * rows * deltas + 16)
                          : depth * deltas * 2 * rows;
}

/// `rows` outputs × `cols` rows of the batch, of all its δ. A warp has warp_rows() × warp_cols() of it, the warps that
/// cover it are a team, and teams share K.
struct Tile {
  int rows, cols, deltas;

  constexpr int warp_rows() const { return deltas <= 2 && rows >= 64 ? 32 : 16; }
  constexpr int warp_cols() const { return deltas <= 4 && cols >= 32 ? 32 : 16; }
  constexpr int team_warps() const { return rows / warp_rows() * (cols / warp_cols()); }
  constexpr int warps() const {
    const int wanted = rows * cols == 256 && deltas <= 8 ? 8 : 4;
    return wanted < team_warps() ? team_warps() : wanted;
  }
  constexpr int teams() const { return warps() / team_warps(); }
  constexpr int stage_bytes() const {
    return panel_bytes(kRuns, deltas, rows) + panel_bytes(kRuns, deltas, cols) + 16 * depth_of(deltas);
  }
  /// What hides the latency of memory where there are few CTAs.
  constexpr int stages() const {
    const int fit = 72 * 1024 / (teams() * stage_bytes());
    return fit < 3 ? 3 : fit < 6 ? fit : 6;
  }
  constexpr int ring_bytes() const { return teams() * stages() * stage_bytes(); }
  /// Floats of a team's sums, in lines with room between them.
  constexpr int sums(bool last) const { return last ? rows * deltas * (cols + 4) : cols * (rows * deltas + 4); }
  constexpr int shared_bytes() const {
    const int most = 4 * teams() * (sums(true) > sums(false) ? sums(true) : sums(false));
    return most > ring_bytes() ? most : ring_bytes();
  }
  /// CTAs on an SM with so much shared memory that registers are limited for.
  constexpr int ctas(int shared) const {
    const int sums = warp_rows() * warp_cols() / 32 * deltas;
    const int needed = sums <= 32 ? 120 : sums <= 64 ? 168 : 240;
    const int by_shared = shared / (shared_bytes() + 1024), by_registers = 65536 / (32 * warps() * needed);
    const int both = by_shared < by_registers ? by_shared : by_registers;
    return both < 1 ? 1 : both;
  }
};
struct TileSize {
  int rows, cols;
};
inline constexpr TileSize kTiles[] = {{16, 16}, {64, 16}, {16, 64}, {32, 32}, {64, 32}, {64, 64}};

struct Params {
  const void *x, *w, *bias;
  void* y;
  long long x_batch, x_feature, y_batch, y_feature, w_a, w_b, w_c, bias_stride;
  int batch, b, c, d;
  Divisor slices, n_tiles, j_tiles;  ///< of δ, of the batch, of outputs
  int w_access, x_access;            ///< bytes that can be copied at a time: 16, 4 or 2
  int activation;
  bool last;    ///< the result is stored along the batch
  bool vector;  ///< 16 bytes at a time
};

}  // namespace fretwork::kronecker::small

// ----------------------------------------------------------------------------------------------------
// Parameters of the exact fp32 kernels.

namespace fretwork::kronecker::ieee {

/// Tiles of product_ieee: 64·warp_rows × 16·quads·warp_cols.
struct LineTile {
  int quads, warp_rows, warp_cols;
  constexpr int rows() const { return 64 * warp_rows; }
  constexpr int cols() const { return 16 * quads * warp_cols; }
  constexpr int threads() const { return 32 * warp_rows * warp_cols; }
};
inline constexpr int kLineStep = 16, kLineStages = 3;

/// Words of one operand in a stage: depth inner with a gap, so that 8 lines of 16 bytes fall into different banks.
constexpr int line_words(int lines, bool depth_inner) { return lines * (depth_inner ? kLineStep + 4 : kLineStep); }

/// Tiles of deltas_ieee: v neighbouring δ, e of them to a thread; 64·warps/v rows × 4·c·e columns.
struct DeltaTile {
  int v, e, c, warps;
  constexpr int rows() const { return 64 * warps / v; }
  constexpr int cols() const { return 4 * c * e; }
  constexpr int threads() const { return 32 * warps; }
};
inline constexpr int kDeltaStep = 8, kDeltaStages = 3;

/// Words of one operand in a stage: depth inner with a gap, so that neighbouring lines fall into different banks.
constexpr int delta_words(int lines, int v, bool depth_inner) {
  return lines * (kDeltaStep * v + (!depth_inner ? 0 : v == 8 ? 8 : 4));
}

}  // namespace fretwork::kronecker::ieee

// ----------------------------------------------------------------------------------------------------
// Parameters and tile sizes of the kernels for neighbouring δ.

namespace fretwork::kronecker::strided {

inline constexpr int kThreads = 256;

/// A CTA takes V neighbouring δ, 16·WM rows and up to 256/V·WN columns of each of their V products; WM·WN = 8 warps
/// hold 128 sums per lane. Sizes in elements of `size` bytes; memory moves in chunks of 16 bytes.
struct Tile {
  int size, v, wm;
  constexpr int chunk() const { return 16 / size; }       ///< elements of a chunk
  constexpr int depth() const { return 32 / size; }       ///< of K in one mma
  constexpr int columns() const { return 256 / v; }       ///< of a warp
  constexpr int unit() const { return v < 4 ? 32 : 16; }  ///< columns that are skipped or not
  constexpr int wn() const { return 8 / wm; }
  constexpr int rows() const { return 16 * wm; }
  constexpr int width() const { return columns() * wn(); }
  /// mma steps of K in a stage, which then holds 16 KB of x, or 32.
  constexpr int steps() const { return rows() * v <= 256 ? 2 : 1; }
  constexpr int line() const { return steps() * 2 * v; }  ///< chunks of x per row and stage
  constexpr int stage() const { return rows() * line() * 16; }
  /// The gradient of the weights: rows are j, columns k, and a stage is a few rows of the batch of both operands.
  constexpr int batch_rows() const { return v * size <= 8 ? 2 * depth() : depth(); }
  constexpr int batch_stage() const { return batch_rows() * (rows() + width()) * v * size; }
};

/// Weights in the order the product reads: [i][δ / V][slab][step of K][δ % V][column][32 bytes of K], the two chunks of
/// a column exchanged in every other four columns; zero outside b and c.
struct PackParams {
  const void* from;
  void* to;
  long long stride_a, stride_b, stride_c, stride_d;
  long long rows;  ///< i · δ groups · slabs · steps · slab: one per (…, step, column)
  int b, c, d;
  int slab, slabs, steps;
  bool vector;  ///< neighbouring δ can be loaded together
  bool turned;  ///< as the flat loads of clusters with V = 8 have k
};

struct ProductParams {
  const void* x;
  void* y;
  const void* w;     ///< packed
  const void* bias;  ///< or null
  long long batch, x_stride, y_stride;
  int bias_stride;  ///< any feature's offset fits 32 bits
  int b, c, d;
  int columns, slab, slabs;  ///< columns of a warp and of a CTA, and CTAs along b
  int stages;                ///< of K in a tile
  int groups, pieces;        ///< CTAs: groups (slab fastest, then δ, then i) · pieces of the batch
  int ring;                  ///< stages on chip: 2, 3 or 4
  int activation;
  bool resident;        ///< the CTA's weights stay on chip
  bool bias_vector;     ///< there is a bias, and its neighbouring δ can be loaded together
  bool x_flat, y_flat;  ///< with V < chunk: neighbours along K or j are moved together
};

/// Hopper: two warpgroups of 64 rows × `columns` × V δ. V = 8: they share rows and columns and take 8 δ each of 16;
/// V = 4 and 2: they share columns and δ, where d = V is all of a factor. 256/V columns, or three quarters of that.
struct ClusterTile {
  int v, columns;
  static constexpr int kThreads = 384, kStaging = 16384;
  constexpr int deltas() const { return v == 8 ? 16 : v; }
  constexpr int rows() const { return v == 8 ? 64 : 128; }
  constexpr int steps() const { return v == 8 ? 1 : 2; }  ///< of K, 16 each, in a stage
  constexpr int stage_x() const { return rows() * deltas() * steps() * 32; }
  constexpr int stage_w() const { return columns * deltas() * steps() * 32; }
  constexpr int ring() const { return v == 2 ? 6 : 4; }
  constexpr int shared() const { return 1024 + ring() * (stage_x() + stage_w()) + 2 * kStaging; }
};

/// A cluster of rows × columns CTAs: those of a row share x, those of a column share weights. In `product`, slabs
/// counts all CTAs along b, and groups the clusters that a set of rows takes.
struct ClusterParams {
  Map x;  ///< (δ, k, i, n), or where d is the δ of a CTA (k·δ, i, n)
  Map y;  ///< (δ, j, i, n), or where d is the δ of a CTA (and `staged` where V < 8) (j·δ, i, n)
  ProductParams product;
  long long items;  ///< groups · sets of rows
  int cluster_rows, cluster_columns;
  bool staged;  ///< V < 8: results leave by the copy engine
};

/// d_w: rows of the products are j, columns k, and K is the batch.
struct WeightParams {
  const void* x;
  const void* dy;
  float* partials;       ///< [piece][i][j][k][δ]
  float* bias_partials;  ///< [piece][share][i][j][δ], or null
  long long batch, x_stride, dy_stride;
  long long weights, features;  ///< a·b·c·d, a·b·d
  int b, c, d;
  int slabs_b, slabs_c;
  int groups, pieces;
  int bias_shares;  ///< so many of those that have the same j take turns in adding up the bias
  int ring;
  bool x_flat, dy_flat;
};

/// Hopper: a CTA sums 64 j × 32 k × 16 δ, or 32 j × 32 k × 32 δ, or 16 j × 32 k × 64 δ, `kDepth` rows of the batch at a
/// time.
struct ClusterGradientTile {
  int deltas;
  static constexpr int kColumns = 32, kDepth = 16;
  constexpr int rows() const { return 1024 / deltas; }
  constexpr int left() const { return rows() * kDepth * deltas * 2; }  ///< bytes of d_y in a stage
  constexpr int stage() const { return left() + kColumns * kDepth * deltas * 2; }
  constexpr int ring() const { return 196608 / stage(); }
  constexpr int shared() const { return 1024 + ring() * stage(); }
};

/// Hopper, d = V = 2 or 4: eight warps, four along j and two along k, sum 128 j × 256/V k × V δ; or, where V = 4,
/// `broad`: two and four, 64 j × 128 k, as many lines. Memory moves in lines of 128 bytes, 64/V columns of all δ,
/// `kDepth` rows of the batch at a time.
struct FlatTile {
  int v;
  bool broad = false;
  static constexpr int kThreads = 384, kDepth = 32, kLine = kDepth * 128;  ///< bytes of a line in a stage
  constexpr int left_lines() const { return v == 4 ? 2 : 1; }              ///< of a warp: 32 j
  constexpr int right_lines() const { return 2; }
  constexpr int across() const { return broad ? 4 : 2; }  ///< warps along k
  constexpr int all_left() const { return 8 / across() * left_lines(); }
  constexpr int all_right() const { return across() * right_lines(); }
  constexpr int rows() const { return all_left() * 64 / v; }
  constexpr int columns() const { return all_right() * 64 / v; }
  constexpr int warp_columns() const { return right_lines() * 64 / v; }
  constexpr int stage() const { return (all_left() + all_right()) * kLine; }
  constexpr int ring() const { return v == 4 ? 4 : 6; }
  constexpr int shared() const { return 1024 + ring() * stage(); }
};

/// The CTAs of a cluster's row share d_y, those of a column share x; FlatTile has no clusters. In `weight` slabs and
/// groups count clusters. Both maps are (δ, n, j or k, i), or where d is 16 (4 columns · δ, n, j or k by four, i), or
/// of a FlatTile (k or j · δ, i, n).
struct ClusterWeightParams {
  Map x, dy;
  WeightParams weight;
  int cluster_rows, cluster_columns;
  bool skip;  ///< FlatTile: what lies outside is not multiplied
};

}  // namespace fretwork::kronecker::strided

// ----------------------------------------------------------------------------------------------------
// Parameters and tile sizes of the Hopper kernels.

namespace fretwork::kronecker::hopper {

/// A CTA computes 128 rows × `width` columns (64, 128, 192 or 256) at a time, 128 bytes of the depth per stage of a
/// ring. Its first 128 threads fetch, the others multiply.
inline constexpr int kRows = 128, kThreads = 384;
inline constexpr int kStagingBytes = 32768;  ///< where results wait for the copy engine

/// `deltas`: of gradients that add up so many products (2 or 4) at once, else 1.
constexpr int stage_bytes(int width, int deltas = 1) { return (kRows + width) * deltas * 128; }
/// As many as fit; eight hide the latency of memory.
constexpr int stages(int width, int deltas = 1) {
  const int fit = 196608 / stage_bytes(width, deltas);
  return fit < 8 ? fit : 8;
}
/// The ring begins at a multiple of 1024 bytes, after two barriers for each stage.
constexpr int shared_bytes(int width) { return stages(width) * (stage_bytes(width) - 16) + kStagingBytes + 1024; }

/// Of products, which have the number of a stage's tile beside its barriers.
constexpr int product_shared_bytes(int width) { return shared_bytes(width) - 4 * stages(width); }

/// Of gradients: those of one product at a time have ones behind the stages.
constexpr int gradient_shared_bytes(int width, int deltas) {
  return deltas == 1 ? shared_bytes(width) : stages(width, deltas) * stage_bytes(width, deltas) + 1024;
}

/// Operands in global memory, for threads that read or write them without the copy engine: lines that it cannot
/// address, and, where the d products of a block run as one dense matrix, sums that must be recomputed because an
/// infinity of another δ met the zeros between.
struct Strands {
  const void *x, *w;
  void* y;
  long long x_line, y_line;  ///< from one row to the next, or batch last from one feature
  long long w_i, w_j, w_k, w_l;
  int c;
  Divisor d;
};

/// Maps have four dimensions: the unit axis, the other axis of a matrix, l, i.
struct ProductParams {
  Map x;        ///< batch × k
  Map weights;  ///< j × k
  Map y;        ///< batch × j
  const void* bias;
  long long bias_stride;
  int activation;  ///< as fretwork::Activation counts
  int batch, b, steps, total;
  Divisor d, col_tiles;
  Divisor share, tail;  ///< this many tiles of the batch go through all weights together; the rest do at the end
  Divisor group;        ///< tiles of such a walk
  Strands strands;
  int* taken;       ///< what CTAs have taken after their first, from 0; or null, and they take turns
  int together;     ///< neighbouring tiles that are taken at once; 1 in turns
  bool behind;      ///< the weights are being packed by the kernel before, and CTAs take turns
  bool mapped;      ///< x and y have maps; else the batch is last, and threads store y
  bool neighbours;  ///< then: x has a map all the same, in which a block's d neighbouring lines are one, and tiles
                    ///< begin at a unit of 16 bytes in it; else threads fetch x, and CTAs take turns
};

/// Partial sums are matrices of b rows, `line` floats apart: c weights, then the row's sum of d_y.
struct GradientParams {
  Map d_y;  ///< j × batch
  Map x;    ///< k × batch
  float* partials;
  int b, c, d, line;
  int row_tiles, col_tiles, steps, total;
  int products;
  int steps_per_part;
  int with_sums;  ///< 1 where d_bias is wanted
  int add;        ///< 1 where `partials` has sums of earlier rows of the batch
};

/// Weights to matrices: to[i·d + l][p][q] = from[i, p, q, l], lines of q `line` elements apart. A CTA moves `wide` of
/// the p·q × `deep` of l. by_rows: neighbours in memory lie along p, and `wide` is whole lines.
struct PackParams {
  const void* from;
  void* to;
  long long stride_i, stride_p, stride_q, stride_l;
  int p, q, d, line;
  int wide, deep, wide_tiles, deep_tiles, by_rows;
};

/// Weights to dense blocks: to[i][p·d + l][q·d + l] = from[i, p, q, l], zeros between; lines `line` elements apart.
struct DensePackParams {
  const void* from;
  void* to;
  long long stride_i, stride_p, stride_q, stride_l;
  int q, line, total;  ///< total: i · p · units of 16 bytes in a line
  Divisor units, p, d;
};

/// The way back, adding `parts` of fp32 sums; column c of row j is the sum that goes to d_bias. A CTA has `slices` ·
/// wide · deep of them in shared memory.
struct UnpackParams {
  const float* from;
  void* to;
  void* bias;                                      ///< or null
  long long from_i, from_l, from_j, from_k, part;  ///< from one sum to the next, and from one part
  long long stride_i, stride_j, stride_k, stride_l, bias_stride;
  int bias_back;  ///< what from_l is too much for the column of the bias
  int b, c, d, parts;
  int wide_tiles, deep_tiles, slices;
  Divisor wide, deep, cols;
};

/// Rows of blocks of features, strided by d, beside the same with the features of one δ together.
struct RegroupParams {
  void *strided, *grouped;
  long long strided_row, strided_block;                 ///< from one row and one block to the next
  long long grouped_row, grouped_block, grouped_delta;  ///< and from one δ
  int d, total;
  Divisor groups, eights, a;  ///< of δ and of features in a block; blocks in a row
  bool tf32;                  ///< fp32 is rounded to it on the way to `grouped`
};
inline constexpr int kRegroupThreads = 256;

/// Elements of a CTA's share in packing and unpacking.
inline constexpr int kPackThreads = 256, kPackElements = 4096, kUnpackElements = 1024, kMostSlices = 8;
inline constexpr int kPackLine = 16;  ///< the least line that is packed by rows

}  // namespace fretwork::kronecker::hopper

// ----------------------------------------------------------------------------------------------------
// Parameters of the fused kernels for two factors, and how they divide the work.

namespace fretwork::kronecker::chain {

/// A factor (q, s, r, 1), then a factor (1, p, q, s), by a cluster of `ranks` CTAs. A CTA keeps the weights of q /
/// ranks blocks of the first and of s / ranks δ of the second, and takes the rows of the batch 16 at a time. Groups of
/// `exchange` CTAs swap results, so that each stores wider pieces of fewer rows. 8 warps multiply
/// each factor, or 4 that hold twice the weights and read what they multiply half as often.
struct Monarch {
  int q, r, s, p, ranks, exchange;
  int first_warps = 8, second_warps = 8;

  static constexpr int kRows = 16;
  static constexpr int kMostWords = 8 * 64;  ///< of a factor's weights that are in a CTA's registers, by the lane
  static constexpr int kShared = 227 * 1024, kBarriers = 256;

  constexpr int blocks() const { return q / ranks; }
  constexpr int deltas() const { return s / ranks; }
  constexpr int features() const { return blocks() * r; }
  constexpr int threads() const { return 32 * (first_warps + second_warps); }

  /// Warps divide the pairs of a factor's products among themselves, and where these are few, also the columns.
  struct Share {
    int pairs, columns;  ///< of one warp
    int warps;           ///< that share a pair
    int most;            ///< tiles of 8 columns whose sums a warp has at once
    constexpr int tiles() const {
      int n = most;
      while (columns % (8 * n) != 0) {
        n /= 2;
      }
      return n;
    }
    constexpr int groups() const { return columns / 8 / tiles(); }
    constexpr int words(int depth) const { return pairs * 2 * (depth / 16) * (columns / 8) * 2; }
    constexpr int first_pair(int warp) const { return warp / warps * pairs; }
    constexpr int first_column(int warp) const { return warp % warps * columns; }
  };
  static constexpr Share share(int products, int columns, int warps) {
    const int pairs = products / 2, most = 32 / warps;
    return pairs >= warps ? Share{pairs / warps, columns, 1, most}
                          : Share{1, columns / (warps / pairs), warps / pairs, most};
  }
  static constexpr bool shares(int products, int columns, int warps) {
    const int pairs = products / 2;
    return pairs > 0 && (pairs % warps == 0 || (warps % pairs == 0 && columns % (8 * warps / pairs) == 0));
  }
  constexpr Share first() const { return share(blocks(), s, first_warps); }
  constexpr Share second() const { return share(deltas(), p, second_warps); }
  constexpr int first_words() const { return first().words(r); }
  constexpr int second_words() const { return second().words(q); }
  /// 32-bit words of packed weights.
  constexpr long long words() const {
    return 32LL * ranks * (first_warps * first_words() + second_warps * second_words());
  }

  // A slot of each ring. Where the cluster is one CTA the middle needs no sending, and likewise the result.
  constexpr int x_bytes() const { return 2 * kRows * features(); }
  constexpr int middle_bytes() const { return 2 * kRows * q * deltas(); }
  constexpr int y_bytes() const { return 2 * kRows * p * deltas(); }
  constexpr int bias_bytes() const { return 2 * p * deltas(); }
  constexpr int middle_slot() const { return (ranks > 1 ? 2 : 1) * middle_bytes(); }
  constexpr int y_slots_bytes() const { return (exchange > 1 ? 4 : 2) * y_bytes(); }
  constexpr int room() const { return kShared - kBarriers - bias_bytes() - y_slots_bytes(); }
  constexpr int middle_slots() const { return room() >= 3 * middle_slot() + 3 * x_bytes() ? 3 : 2; }
  constexpr int x_slots() const {
    const int fit = (room() - middle_slots() * middle_slot()) / x_bytes();
    return fit < 8 ? fit : 8;
  }
  constexpr int shared() const {
    return x_slots() * x_bytes() + middle_slots() * middle_slot() + y_slots_bytes() + bias_bytes() + kBarriers;
  }

  /// Whether the kernel can be made like this. The copy engine takes 64 features at a time, 8 neighbouring i or l are
  /// the 16 bytes that matrices load by.
  constexpr bool valid() const {
    return q % (8 * ranks) == 0 && s % (8 * ranks) == 0 && q % 16 == 0 && r % 16 == 0 && p % 8 == 0 &&
           features() % 64 == 0 && features() / 64 <= 256 && p * deltas() % 64 == 0 &&
           shares(blocks(), s, first_warps) && shares(deltas(), p, second_warps) &&
           first_words() * first_warps <= kMostWords && second_words() * second_warps <= kMostWords && x_slots() >= 2 &&
           ranks % exchange == 0 && kRows % exchange == 0;
  }
};

struct FusedParams {
  Map x;  ///< (64 features, batch, pieces of 64 features)
  const void* weights;
  void* y;
  const void* bias;  ///< or null
  long long batch, y_stride, bias_stride;
  int activation;  ///< as fretwork::Activation counts
};

/// 64 products of 64 × 64 in each factor, by a cluster of eight CTAs with wgmma. Pairs of CTAs swap results, so that
/// each stores 32 bytes at a time.
struct Wide {
  static constexpr int kRanks = 8, kRows = 16, kThreads = 384, kBarriers = 256;
  static constexpr long long kWords = 1 << 18;  ///< 32-bit words of packed weights

  // Bytes: of a slot of x or y; of 16 rows of one l and eight i, apart so that stores meet all banks; of what one CTA
  // sends another; of a slot of the middle, which is there twice, as it is sent and as it arrives.
  static constexpr int kSlot = 2 * kRows * 512, kLine = 272, kPiece = 8 * kLine, kMiddleBytes = kRanks * kPiece;
  static constexpr int kXSlots = 4, kMiddleSlots = 3, kYSlots = 2, kReceivedSlots = 2;
  static constexpr int kBias = 64 * 8 * 4;
  static constexpr int kShared =
      (kXSlots + kYSlots) * kSlot + kMiddleSlots * 2 * kMiddleBytes + kReceivedSlots * kSlot / 2 + kBias + kBarriers;
};

struct WideParams {
  Map x;  ///< (64 features, batch, pieces of 64 features)
  Map y;  ///< (l, batch, j)
  const void* weights;
  const void* bias;  ///< or null
  long long batch, bias_stride;
  int activation;  ///< as fretwork::Activation counts
};

/// Weights in the order in which the kernel's threads hold them: [rank][warp][words / 4][lane][4], first factor, then
/// second.
struct PackParams {
  const void *first, *second;
  void* to;
  long long first_a, first_b, first_c, second_b, second_c, second_d;
};
inline constexpr int kPackThreads = 256;

}  // namespace fretwork::kronecker::chain
