// Parameters of the kernels for up to 32 batch rows of any strides; shared by host and device.
#pragma once

#include "device/divide.cuh"

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
