// The parameters of the kernels that write a walk for attention's Hopper kernels. Shared by host and device.
#pragma once

#include "ops/attention/cuda/params.h"

namespace fretwork::dynamic_attention_op::hopper {

using attention_op::hopper::Item;
using attention_op::hopper::kRows;
using attention_op::hopper::Place;
using attention_op::hopper::RunOf;

/// What the pattern says of a row tile: it has elements in column tiles [first, last), and all of those in [whole,
/// whole_last). The others have a Part each, from `part` on.
struct Band {
  int first, whole, whole_last, last, part;
};

/// A column tile that a row tile has in part: where it is, and its mask (as RunOf's).
struct Part {
  int tile, kind, low, high, limit;
};

/// Row tiles are those of all lists: number list · tiles + t. Blocks are as long as row tiles.
struct WalkParams {
  const unsigned* words;  ///< of list l, row block r: words_row words from (l · row_blocks + r) · words_row on
  int words_row, row_blocks;
  int tiles;      ///< row tiles of a list
  int numbers;    ///< row tiles of all lists
  int per_block;  ///< column tiles of a block
  int tokens;     ///< rows of the problem
  int shift;      ///< as attention's Side: rows that the last tile lacks
  const Band* bands;
  const Part* parts;
  // What is written.
  int *run_count, *steps;  ///< of each row tile
  int* first;              ///< where its runs begin; one more
  RunOf* runs;
  Place* row_tiles;
  int* row_tokens;
};

/// More multiprocessors than any GPU has, and how many row tiles of one group are sorted by their steps.
inline constexpr int kMostCtas = 256, kMostSorted = 2048;

/// Deals row tiles out to CTAs. Pairs (batch, head) come in groups whose operands fit L2; in a group the longest tile
/// goes to the CTA with the least to do.
struct DealParams {
  const int* run_count;
  const int* steps;
  int* first;
  int numbers, tiles;
  int batch, heads;            ///< of the rows
  int list_batch, list_heads;  ///< lists that differ: 1 or `batch`; 1 or a divisor of `heads`
  int repeat;                  ///< query heads that a key head's tiles meet, one after the other
  int together;                ///< pairs of a group
  int ctas, rounds;            ///< rounds: tiles that a CTA may get
  Item* slots;                 ///< ctas × rounds
  Item* items;
  int* share;
};

}  // namespace fretwork::dynamic_attention_op::hopper
