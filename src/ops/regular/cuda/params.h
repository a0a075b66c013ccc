// What the kernels of SPLAT's operators are launched with; shared by host and device. Strides count elements.
#pragma once

namespace fretwork {

struct RegularOperand {
  void* data;
  long long batch, head, row, col;
};

/// The entry of a column: x[row, place].
struct RegularPlace {
  int row, place;
};

struct RegularParams {
  const long long* first;      ///< where the columns of each row begin
  const int* columns;          ///< ascending in each row
  const long long* col_first;  ///< where the entries of each column begin
  const RegularPlace* places;  ///< by ascending row
  RegularOperand values, by_row, by_col;
  unsigned tasks;    ///< lines, each as often as it has chunks
  int heads, group;  ///< of x; of them, how many share a head of by_col
  int row_count, col_count;
  int width, depth;
  int chunks;  ///< pieces of `depth`, a warp's share each
};

/// What a step holds of a row: the columns whose bits are set, side by side in x in ascending order. The first stands
/// at x[row, origin + its bit], so where all bits are neighbours (a run), each stands at origin + its bit.
struct alignas(16) RegularBits {
  unsigned long long mask;
  int origin;
  unsigned shape;  ///< the first bit, that and the number of bits << 8, and the flags below; without bits, 64 and 64
};

inline constexpr unsigned kRegularRun = 1u << 16;     ///< all bits are neighbours, or there is none
inline constexpr unsigned kRegularJoins = 1u << 17;   ///< the first bit is 0, and its place follows the step before
inline constexpr unsigned kRegularGoesOn = 1u << 18;  ///< the next step joins

/// The tile shapes. A tile is kRegularLines lines of the result, in kRegularGroups groups of 64; a step is 64 partners,
/// which all groups of the tile share.
inline constexpr int kRegularBlock = 64, kRegularGroups = 2, kRegularLines = kRegularGroups * kRegularBlock;
/// Elements of a row of x in shared memory: those of a step and up to seven in front, in whole chunks of 16 bytes.
inline constexpr int kRegularPitch = 72;

/// Lines of the result and the steps that are summed for them. Tiles of one wave share no lines.
struct RegularTile {
  int lines;         ///< where they stand, kRegularLines of them
  int first, steps;  ///< of the steps
  int wave;
  int shared;  ///< whether another tile has one of the lines, too
};

/// A line of a tile. Where several tiles have it, each adds to what the ones of earlier waves left.
struct RegularTileLine {
  int line;            ///< −1: none
  int sum;             ///< its place among the sums that wait in memory, or −1 where one tile has it all
  int earlier, later;  ///< whether tiles of earlier and of later waves have it too
};

struct RegularTileParams {
  const RegularTile* tiles;      ///< for each batch and head of the result; a tile waits for earlier ones alone
  const RegularTileLine* lines;  ///< rows, or columns where the result is by_col
  const RegularBits* bits;       ///< kRegularLines for each step: of a tile's rows, or of a step's rows in each group
  const int* partners;           ///< 64 for each step, −1: none
  const long long* first;        ///< where the columns of each row begin; for the zeros behind a row's end
  RegularOperand values, by_row, by_col;
  float* sums;            ///< (ring, sums of a head, depth)
  int* done;              ///< (batches and heads of the result, waves): finished tiles that share lines, zeros before
  int* taken;             ///< tiles that were taken so far, zero before
  const int* wave_tiles;  ///< those of each wave that share lines
  int tile_count, wave_count, sum_count;
  int ring;          ///< heads whose sums have room in memory at once
  int heads, group;  ///< as above
  int width, depth;
};

struct alignas(8) RegularSoftmaxRow {
  int row, count;
};

struct RegularSoftmaxParams {
  const RegularSoftmaxRow* rows;  ///< those that this launch computes
  RegularOperand in, d_out, out;
  const void *in_end, *d_out_end;  ///< behind the last element
  float before, after;             ///< scale = before·after, |before| ≤ 1 ≤ after
  float scale;
  unsigned tasks;  ///< rows of all batches and heads
  int heads, row_count, width;
};

}  // namespace fretwork
