// Parameters and sizes of the 2:4 kernels, shared by host and device: one struct for each kernel family.
#pragma once

#include "device/divide.cuh"
#include "device/tensor_map.cuh"

namespace fretwork::two_four {

/// The types of a result and of a bias.
enum class OutType : int { f32, f16, bf16, i32, i8, f8_e4m3, f8_e5m2 };

/// Lines of elements along k (or b's lines across it); strides in elements.
struct LinesArg {
  const void* data;
  long long line, along, batch;
};

/// Metadata as bytes: those of a word are neighbours, words lie `along` bytes and lines `line` bytes apart.
struct MetadataArg {
  const void* data;
  long long line, along;
  int word_shift;  ///< a word has 1 << word_shift bytes
};

/// One number for each line; stride 0: one for all; null: none.
struct VectorArg {
  const void* data;
  long long stride;
};

/// Problem as the kernels see it. b's lines are columns of b, whichever of its strides is 1.
struct ProductParams {
  LinesArg values, b;
  MetadataArg words;
  void* c;
  long long c_row, c_col, c_batch;
  VectorArg bias, scale_s, scale_b;
  long long m, n, k;
  long long row_tiles, col_tiles, band;  ///< tiles of c; `band` rows of them are done before the next
  const float* scale_out;                ///< or null
  OutType out, bias_type;
  int activation;  ///< as fretwork::Activation counts
  bool c_by_row;   ///< the nearest neighbours in c are those of a row
  bool c_vector;   ///< 16 bytes of c can be written at once along them
};

/// to[z][line][i] = from[z][line][i], where `to` has lines of `pitch` elements.
struct PackLinesParams {
  LinesArg from;
  void* to;
  long long lines, count, pitch;
  long long line_tiles, count_tiles;
};

/// Metadata as contiguous bytes, `pitch` (a multiple of 4) for each line; behind the line's groups valid nibbles.
struct PackMetadataParams {
  MetadataArg from;
  void* to;
  long long lines, groups, pitch;
};

namespace tma_gemm {

/// A CTA computes 128 rows × `width` columns, a multiple of 32 up to 256, at a time. Its first 128 threads fetch, the
/// others multiply.
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
/// Widths between the powers of two take linear layers of 16-bit types only: c along m, written by the copy engine.
constexpr bool for_linear(int width) { return (width & (width - 1)) != 0; }
/// Columns of a result that the copy engine writes at once.
constexpr int box_columns(int width) { return for_linear(width) ? 32 : 64; }
/// CTAs of a cluster that store a part of the tile whose depth they share: whole boxes.
constexpr int slices(int width) { return width > 64 && width % 64 == 0 ? 2 : 1; }
/// Whether there is room for the sums of `split` CTAs where the stages were.
constexpr bool can_split(int width, int split) {
  return kRows * width / slices(width) * 4 * (split - 1) <= stages(width) * stage_bytes(width);
}
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

}  // namespace tma_gemm

namespace small_n_tma {

/// A CTA has 64 rows for each of its warpgroups, 1 or 2, and one more warp that fetches; and up to 16, 32, 64, 96,
/// 128 or 192 columns.
constexpr int rows(int groups) { return 64 * groups; }
constexpr int threads(int groups) { return 128 * groups + 32; }

/// A step of the depth is 128 elements of b's columns and the 64 that are kept of them. Metadata comes in chunks of 64
/// bytes of each row, for four steps.
inline constexpr int kDepth = 128, kPerChunk = 4, kChunks = 3;
constexpr int stage_bytes(int columns, int groups) { return (rows(groups) + 2 * columns) * 128; }
constexpr int chunk_bytes(int groups) { return rows(groups) * 64; }

/// Up to so many CTAs, a cluster, share the depth of a tile. Each gets the sums of all for some units of 16 rows × 8
/// columns, of which it finishes them.
inline constexpr int kMostSplit = 8, kUnitBytes = 512;
constexpr int units(int columns, int groups) { return columns / 8 * 4 * groups; }
constexpr int sums_bytes(int columns, int groups) { return (units(columns, groups) + kMostSplit) * kUnitBytes; }
/// Sums of large tiles take the place of the stages, when all CTAs of a cluster are done with these. Others have a
/// place of their own, so that no CTA waits for another before it sends.
constexpr bool sums_over_stages(int columns, int groups) { return columns * groups > 128; }

/// Metadata, sums, and then the stages.
constexpr int bytes_before_stages(int columns, int groups) {
  return kChunks * chunk_bytes(groups) + (sums_over_stages(columns, groups) ? 0 : sums_bytes(columns, groups));
}
/// Stages of `ctas` CTAs that share an SM, of 228 KB of which 1 KB goes to the system for each.
constexpr int stages(int columns, int groups, int ctas) {
  return ((228 << 10) / ctas - 3072 - bytes_before_stages(columns, groups)) / stage_bytes(columns, groups);
}
inline constexpr int kMostStages = 18;
constexpr int shared_bytes(int columns, int groups, int stages) {
  return 1024 + bytes_before_stages(columns, groups) + stages * stage_bytes(columns, groups);
}

struct Params {
  Map values;  ///< along k × m
  Map words;   ///< bytes along k × m
  Map b;       ///< along k × n
  Map c;       ///< along m × n
  void* out;   ///< contiguous along m, in whole units of 16 bytes
  long long c_col;
  const void* bias;  ///< of the result's dtype, or null
  long long bias_stride;
  int activation;  ///< as fretwork::Activation counts
  int n;
  int columns;        ///< of a tile, a multiple of 8
  Divisor col_tiles;  ///< side by side
  int stages;
  int split;                                                   ///< CTAs of a cluster
  int slots;                                                   ///< most units that one of them finishes
  int first_step[kMostSplit + 1], first_unit[kMostSplit + 1];  ///< of each
};

}  // namespace small_n_tma

namespace small_n_registers {

/// A CTA has 16 rows; its warps take blocks of the depth in turn, 128 elements each.
inline constexpr int kRows = 16, kDepth = 128;
/// Up to so many warps, of which each has `blocks` in flight; more would not find registers.
constexpr int most_warps(int tiles, int blocks) { return tiles * blocks > 2 ? 8 : 16; }
/// Words from one column's sums to the next; four more than rows, so that banks differ.
inline constexpr int kPitch = kRows + 4;
constexpr int shared_bytes(int tiles, int warps) { return 4 * warps * 8 * tiles * kPitch; }

/// Strides of the operands are in bytes, others in elements.
struct Params {
  const void *values, *words, *b, *bias;  ///< bias of the result's dtype, or null
  void* c;
  long long values_line, words_line, b_col;
  long long c_row, c_col, bias_stride;
  int m, n, blocks;
  int activation;  ///< as fretwork::Activation counts
};

}  // namespace small_n_registers

namespace small_n_cp_async {

inline constexpr int kLogWarps = 3, kWarps = 1 << kLogWarps, kThreads = 32 * kWarps;
inline constexpr int kRows = 32;  ///< of the sparse operand that a warp multiplies
/// A run is the k of 16 bytes of values: 32 bytes of a column of b. A warp multiplies a block of 8 runs in a stage.
inline constexpr int kRunBytes = 32, kBlockRuns = 8, kValueBytes = kRows * kBlockRuns * 16;
inline constexpr int kMostColumns = 64;
inline constexpr int kMostStages = 5;

/// Warps of a CTA stand along the rows (fastest) and along k, in powers of two: those along k take neighbouring blocks.
constexpr int parts_of(int log_rows) { return kWarps >> log_rows; }
/// Words from one column's sums to the next where warps add theirs up; four more than rows, so that banks differ.
constexpr int pitch_of(int log_rows) { return (kRows << log_rows) + 4; }
/// Of shared memory: a stage's values, metadata (`run_words` bytes of a run) and b.
constexpr int stage_bytes(int columns, int log_rows, int run_words) {
  return kWarps * (kValueBytes + kRows * kBlockRuns * run_words) +
         parts_of(log_rows) * kBlockRuns * kRunBytes * columns;
}
/// Of the sums of all warps, which take the place of the stages.
constexpr int sums_bytes(int columns, int log_rows) { return parts_of(log_rows) * columns * pitch_of(log_rows) * 4; }

/// Strides of the operands are in bytes, others in elements. A column is j of n of a batch: columns = batch·n.
struct Params {
  const void *values, *words, *b, *bias;
  const float *scale_s, *scale_b, *scale_out;
  void* c;
  long long values_line, words_line;
  long long b_row, b_col, b_batch;
  long long c_row, c_col, c_batch, bias_stride, scale_s_stride, scale_b_stride;
  int m, n, columns;
  int runs;      ///< in k
  int log_rows;  ///< of the number of warps along the rows
  int split;     ///< CTAs of a cluster, which share the k of their rows
  int stages;    ///< of the ring in shared memory, 2 to kMostStages
  int activation;
  OutType out, bias_type;
  int words_step;    ///< bytes of metadata that can be read at once: 16, 4 or less
  long long b_wide;  ///< from column to column of b in bytes, if four of them can be read at once; else 0
  bool c_rows;       ///< neighbouring threads write neighbouring rows of c, not columns
  bool c_wide;       ///< and a thread four of them at once
};

}  // namespace small_n_cp_async

namespace format {

/// A matrix of `lines` lines; strides count elements.
struct Matrix {
  void* data;
  long long line, along;
  int wide;    ///< whole accesses of 16 bytes (8 for values): all is aligned, and no access is cut by an end
  int turned;  ///< neighbours in memory are of different lines: through shared memory
};

/// Values and metadata of a matrix; strides of words count words.
struct Packed {
  Matrix values;
  unsigned char* words;
  long long words_line, words_along;
  long long bytes;  ///< of metadata in a line, padding included
  int word_shift;   ///< a word has 1 << word_shift bytes
  int words_wide;   ///< bytes of a line are neighbours, and lines begin at multiples of 8
};

/// How the bits of an element become a magnitude.
enum class ElementType : int { f32, f16, bf16, f8_e4m3, f8_e5m2, i8, u8 };

struct Params {
  Matrix dense, out;
  Packed packed, cols;
  unsigned long long* bad;  ///< the least place of something wrong, all ones before; or null
  long long lines, k;
  unsigned tiles_k;
  int plain;       ///< whole tiles of matrices whose lines are aligned and lie along k, metadata for words of 4 bytes
  int transposed;  ///< places are k·lines + line
  unsigned magnitude;  ///< the bits of a word that say whether its elements are zero
  unsigned largest;    ///< of an element: no magnitude has more, so that NaNs are alike
  ElementType type;
  unsigned valid;  ///< of a look at metadata: bit n: nibble n is one
  int group, element_bytes, keep_valid;
};

/// A CTA's tile: kTileK elements of as many lines as make 128 bytes.
inline constexpr int kThreads = 256, kTileK = 256, kLineBytes = 128;
/// Metadata alone is looked at in tiles of 32 bytes × 64 lines.
inline constexpr int kCheckBytes = 32, kCheckLines = 64;

constexpr int tile_bytes() { return kTileK * kLineBytes; }

}  // namespace format

}  // namespace fretwork::two_four
