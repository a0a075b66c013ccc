// Parameters and tile sizes of the kernels for neighbouring δ; shared by host and device.
#pragma once

#include "device/tensor_map.cuh"

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

/// The CTAs of a cluster's row share d_y, those of a column share x. In `weight` slabs and groups count clusters. Both
/// maps are (δ, n, j or k, i), or where d is 16 (4 columns · δ, n, j or k by four, i).
struct ClusterWeightParams {
  Map x, dy;
  WeightParams weight;
  int cluster_rows, cluster_columns;
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

struct FlatWeightParams {
  Map x, dy;  ///< (k or j · δ, i, n)
  WeightParams weight;
  bool skip;  ///< what lies outside is not multiplied
};

struct ReduceParams {
  const float* partials;
  const float* bias_partials;
  void* to;
  void* bias;
  long long weights, features;
  long long stride_a, stride_b, stride_c, stride_d, bias_stride;
  unsigned weight_ctas;  ///< those after add up the bias
  int pieces, slices, bias_pieces, bias_slices;
  int b, c, d;
  bool contiguous;  ///< d_w is, and aligned
};

}  // namespace fretwork::kronecker::strided
