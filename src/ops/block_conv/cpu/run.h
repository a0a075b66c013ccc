// What products and the gradient of the blocks share on the CPU: residue classes of positions, and packed image rows.
#pragma once

#include <algorithm>
#include <vector>

#include "ops/block_conv/problem.h"
#include "runtime/simd/tiles.h"

namespace fretwork::block_conv::cpu {

using simd::Tiles;

/// A residue class of results along one axis: first, first + div, … A kernel position reads integer input positions for
/// all results of the class or for none. `taps` are those that do and that reach the image.
struct AxisClass {
  /// Result u of the class reads position (u + shift)·mul + phase, 0 ≤ phase < mul.
  struct Tap {
    std::int64_t number, shift, phase;
  };
  std::int64_t first, count, mul, size;  ///< size: of the input
  std::vector<Tap> taps;

  AxisClass(const Axis& axis, std::int64_t results, std::int64_t in_size, std::int64_t first_result);
  std::int64_t at(std::int64_t u, const Tap& tap) const { return (u + tap.shift) * mul + tap.phase; }
  /// The results [first, last) for which a tap reads inside the image.
  std::int64_t first_inside(const Tap& tap) const { return std::clamp(-tap.shift, std::int64_t{0}, count); }
  std::int64_t last_inside(const Tap& tap) const {
    return std::clamp(ceil_div(size - tap.phase, mul) - tap.shift, std::int64_t{0}, count);
  }
  bool inside(std::int64_t position) const { return position >= 0 && position < size; }
};

/// Packed image rows: for each block of channels a panel [channel][position along x], with zeros for the padding. With
/// a stride, positions of one phase are stored together, so each kernel position reads contiguous ones. Rows are packed
/// on first use, block by block.
class ImageRows {
 public:
  ImageRows(const Problem& problem, const Tiles& tiles, const AxisClass& x);

  /// A thread's packed rows.
  struct Packed {
    simd::Scratch memory;
    std::vector<std::int64_t> rows;     ///< image · height + y of each slot
    std::vector<std::int32_t> slot_of;  ///< by row; −1 for none
    std::vector<std::uint8_t> done;     ///< whether it is packed, by slot, phase and block
  };
  /// Order of calls: clear, slot for each row, allocate, then at.
  void clear(Packed& packed) const;
  std::int64_t slot(Packed& packed, std::int64_t image, std::int64_t y) const;
  void allocate(Packed& packed) const;
  /// The packed position that result 0 reads at kernel position x.taps[tap], in the first channel of block `other`.
  const std::byte* at(Packed& packed, std::int64_t slot, std::size_t tap, std::int64_t other) const;

  std::int64_t width() const {
    return width_;
  }  ///< of a panel: distance between channels (or groups of them), in positions
  std::int64_t unit() const { return unit_; }  ///< bytes of a position in a panel

 private:
  void pack(Packed& packed, std::int64_t slot, std::size_t phase, std::int64_t other, std::byte* to) const;

  const Problem& p_;
  const Tiles& tiles_;
  const AxisClass& x_;
  std::vector<std::int64_t> phases_;    ///< those that some kernel position reads
  std::vector<std::size_t> tap_phase_;  ///< of each tap, the index of its phase
  std::int64_t low_ = 0, width_ = 0, unit_ = 0;
  std::size_t block_bytes_ = 0, phase_bytes_ = 0;
};

/// Into how many tasks to split work of `flops`, at most `per_thread` for each thread.
std::int64_t stretches_for(double flops, std::int64_t per_thread, const Context& context);

void weight(const Problem& problem, Context& context);

}  // namespace fretwork::block_conv::cpu
