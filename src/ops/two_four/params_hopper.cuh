// What the Hopper kernel of the 2:4 products is launched with. Host and device share it: plain data.
#pragma once

#include "device/tensor_map.cuh"

namespace fretwork::two_four::hopper {

/// A CTA computes 128 rows × `width` columns (128 or 256) at a time. Its first 128 threads fetch, the others multiply.
inline constexpr int kRows = 128, kThreads = 384;
/// Metadata comes in chunks of 64 bytes of each row, for several steps of the depth.
inline constexpr int kChunkRow = 64, kChunkBytes = kRows * kChunkRow, kChunks = 2;
inline constexpr int kStagingBytes = 32768;  ///< where results wait for the copy engine

/// A stage is `parts` (1 or 2) times 128 bytes of the depth of b and the 64 bytes that are kept of the sparse operand.
constexpr int stage_bytes(int width, int parts) { return parts * (kRows * 64 + width * 128); }
/// As many as fit into 160 KB.
constexpr int stages(int width, int parts) { return 163840 / stage_bytes(width, parts); }
/// The ring begins at a multiple of 1024 bytes.
constexpr int shared_bytes(int width, int parts) {
  return stages(width, parts) * stage_bytes(width, parts) + kChunks * kChunkBytes + kStagingBytes + 1024;
}

/// How a thread rounds its sums.
enum class Out : int { f16, bf16, f32, i32 };

/// Maps have four dimensions: the unit axis, the other axis, the batch, and one of size 1.
struct Params {
  Map values;  ///< along k × m
  Map words;   ///< bytes along k × m
  Map b;       ///< k × n or n × k
  Map c;       ///< n × m or, transposed, m × n
  void* out;
  long long c_row, c_col, c_batch;  ///< strides of `out` in elements
  const void* bias;                 ///< of the result's dtype, or null
  const float *scale_s, *scale_b;   ///< or null
  long long bias_stride, scale_s_stride, scale_b_stride;
  Out kind;
  int activation;  ///< as fretwork::Activation counts
  int m, n, groups, steps;
  int row_tiles, col_tiles, total;
  int share;       ///< this many tiles of rows go through the columns together
  int b_batch;     ///< 0 where all batches share b
  int split;       ///< 2: pairs of CTAs, a cluster each, share the depth of a tile
  int transposed;  ///< 1: m is the unit axis of the result
  int direct;      ///< 1: the copy engine cannot write the result
};

/// to[z][line][at] = from[z, line, at]; lines of `to` are contiguous and begin at multiples of 16 bytes.
struct PackParams {
  const void* from;
  void* to;
  long long from_line, from_along, from_batch;  ///< strides in elements
  long long to_line, to_batch;
  int lines, along, line_tiles, along_tiles;
};
inline constexpr int kPackThreads = 256;

}  // namespace fretwork::two_four::hopper
