// Walks for attention's Hopper kernels that the device writes: row tiles and column tiles are ranges of neighbours.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "core/divide.h"
#include "ops/attention/cuda/hopper_launch.h"
#include "ops/dynamic_attention/cuda/params_hopper.cuh"
#include "ops/dynamic_attention/cuda/walks.h"

namespace fretwork::dynamic_attention_op::hopper {

/// Tokens in tiles of neighbours.
struct Axis {
  std::int64_t tokens;
  int side;
  /// How far before the operand the copy engine counts from: a tile that lacks tokens starts so much earlier.
  int shift;

  /// Tiles lie one behind the other from the first token on.
  static Axis of_blocks(std::int64_t tokens, int side) {
    return {tokens, side, static_cast<int>(ceil_div(tokens, side) * side - tokens)};
  }
  /// Tiles begin anywhere.
  static Axis of_documents(std::int64_t tokens, int side) { return {tokens, side, side - 1}; }

  int tiles() const { return static_cast<int>(ceil_div(tokens, side)); }
  int count(int tile) const {
    return static_cast<int>(std::min<std::int64_t>(side, tokens - std::int64_t{tile} * side));
  }
  attention_op::hopper::Side on_device() const {
    attention_op::hopper::Side made{{{1, 1, side}, {0, 0, 1}}};
    made.shift = shift;
    return made;
  }
  Place place(int tile) const {
    const int lacks = side - count(tile);
    return {tile * side - lacks + shift, {0, 0, lacks}};
  }
};

inline constexpr std::int64_t kMostTokens = 1 << 28;

/// Runs that a walk of blocks has room for: each pair of tiles in a block that may be there.
std::int64_t most_runs(const Keys& keys, int row_side, int col_side);

/// Whether walks read bits of the blocks; else they read masks or lists themselves. `transposed`: in either direction.
bool needs_bits(const Keys& keys, bool transposed);

/// What the pattern says of all row tiles, on the device.
struct Bands;
class Arrays;

/// What the device writes for one direction of a problem, and the memory of it for the length of a call.
class DeviceWalk {
 public:
  /// `keys`: rows are keys. bits: needed where rows are keys of blocks, or long lines of blocks.
  DeviceWalk(const Problem& problem, const BlockBits* bits, const Axis& rows, const Axis& cols, bool keys,
             Context& context);

  const attention_op::hopper::Walk& walk() const { return walk_; }
  int grid() const;
  /// Masks of bits, or columns that no row of a tile uses.
  bool general() const;

 private:
  void write_blocks(const Problem& problem, const BlockBits* bits, Context& context);
  void write_documents(const Problem& problem, Context& context);
  OrderParams order(const Problem& problem, const int* tile_count) const;
  void launch_order(const OrderParams& params, Context& context) const;
  /// Whether CTAs have several items, which are sorted; else each has one at most.
  bool deals() const { return most_items_ > most_ctas_; }
  void add_items(Arrays& arrays);

  Axis rows_, cols_;
  bool of_keys_;
  std::int64_t heads_;
  int tiles_;  ///< row tiles of a list, at most
  std::int64_t most_items_, most_ctas_;
  std::shared_ptr<const Bands> bands_;
  std::unique_ptr<Workspace> memory_;
  RowTiles made_{};
  Item* items_ = nullptr;
  int* share_ = nullptr;
  attention_op::hopper::Walk walk_{};
};

}  // namespace fretwork::dynamic_attention_op::hopper
