// Parameters and tile sizes of the small-batch kernels that load straight into fragments; shared by host and device.
#pragma once

#include "device/divide.cuh"

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
