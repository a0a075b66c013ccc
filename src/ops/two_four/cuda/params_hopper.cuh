// Parameters and sizes of the wgmma.sp kernel; shared by host and device.
#pragma once

#include "device/divide.cuh"
#include "device/tensor_map.cuh"
#include "ops/two_four/cuda/out_type.cuh"

namespace fretwork::two_four::hopper {

/// A CTA computes 128 rows × `width` columns (64, 128 or 256) at a time. Its first 128 threads fetch, the others
/// multiply.
inline constexpr int kRows = 128, kThreads = 384;
/// Metadata comes in chunks of 64 bytes of each row, for several steps of the depth.
inline constexpr int kChunkRow = 64, kChunkBytes = kRows * kChunkRow, kChunks = 4;
/// Of elements of so many bytes. A step of the depth is 128 bytes of b.
constexpr int steps_of_chunk(int bytes) { return kChunkRow / (bytes == 1 ? 16 : 8); }
inline constexpr int kStagingBytes = 32768;  ///< where results wait for the copy engine
inline constexpr int kMostSplit = 4;         ///< CTAs, a cluster, that share the depth of a tile

/// A stage is 128 bytes of the depth of b and the 64 bytes that are kept of the sparse operand.
constexpr int stage_bytes(int width) { return kRows * 64 + width * 128; }
/// As many as fit into 160 KB.
constexpr int stages(int width) { return 163840 / stage_bytes(width); }
/// The ring begins at a multiple of 1024 bytes.
constexpr int shared_bytes(int width) {
  return stages(width) * stage_bytes(width) + kChunks * kChunkBytes + kStagingBytes + 1024;
}

/// Maps have four dimensions: the unit axis, the other axis, the batch, and one of size 1.
struct Params {
  Map values;  ///< along k × m
  Map words;   ///< bytes along k × m
  Map b;       ///< k × n or n × k
  Map c;       ///< n × m or, transposed, m × n
  void* out;
  long long c_row, c_col, c_batch;             ///< strides of `out` in elements
  const void* bias;                            ///< or null
  const float *scale_s, *scale_b, *scale_out;  ///< or null
  long long bias_stride, scale_s_stride, scale_b_stride;
  OutType out_type, bias_type;
  int activation;  ///< as fretwork::Activation counts
  int convert;     ///< 1: threads make results, of 16 or 8 bits, of sums as f32; the copy engine writes none of them
  int wide;        ///< 1: four of them at once
  int plain;       ///< 1: sums are results, without scales, bias and activation
  int m, n, groups, total;
  Divisor tiles;                   ///< of a batch
  Divisor set, share, tail;        ///< `share` tiles of rows, the last of them `tail`, go through the columns together
  int split;                       ///< CTAs of a cluster that share the depth
  int first_step[kMostSplit + 1];  ///< of each, and behind the last
  int b_batch;                     ///< 0 where all batches share b
  int transposed;                  ///< 1: m is the unit axis of the result
  int direct;                      ///< 1: the copy engine cannot write the result
};

}  // namespace fretwork::two_four::hopper
