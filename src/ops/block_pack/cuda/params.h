// Parameters of the packing kernels. Shared by host and device: plain data. A unit is what one access copies: an
// element, or 16 contiguous bytes. Sizes and strides count units.
#pragma once

namespace fretwork::block_pack_op {

inline constexpr int kThreads = 256, kUnits = 4;  // of a CTA; units per thread, so that several loads are in flight

/// The position of a block, in blocks.
struct Block {
  int head, row, column;
};

struct Params {
  void* dense;
  long long dense_z, dense_h, dense_row, dense_col;
  void* values;
  long long values_z, values_block, values_row, values_col;
  const Block* blocks;      ///< pack: position of each packed block
  const int* block_at;      ///< unpack: packed block of (head, block row, block column), or −1
  unsigned long long fill;  ///< eight bytes of repeated elements
  long long total;          ///< units to write
  int heads, rows, cols;    ///< in blocks
  int block_rows, block_cols;
  long long blocks_packed;
};

}  // namespace fretwork::block_pack_op
