// What the convolution and the gradient of its values share on the CPU: classes of positions, and packed image rows.
#pragma once

#include <algorithm>
#include <vector>

#include "ops/block_conv/problem.h"
#include "runtime/simd/tiles.h"

namespace fretwork::block_conv::cpu {

using simd::Tiles;

/// Results at first, first + div, … along one axis. There each kernel position reads whole positions of the input for
/// every result of the class, or for none; `taps` are those that do and that reach the image.
struct AxisClass {
  /// Result number u of the class reads position (u + shift)·mul + phase, 0 ≤ phase < mul.
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

/// Image rows as the products read them: for each block of channels a packed panel [channel][position along x], with
/// zeros where the kernel reaches over the image's edge. Where the stride is not 1, positions of one phase lie
/// together, so each kernel position reads neighbours. Rows are packed when they are first asked for, block by block.
class ImageRows {
 public:
  ImageRows(const Problem& problem, const Tiles& tiles, const AxisClass& x);

  /// A thread's packed rows.
  struct Packed {
    simd::Scratch memory;
    std::vector<std::int64_t> rows;     ///< that have a slot: image · height + y
    std::vector<std::int32_t> slot_of;  ///< by row; −1 is none
    std::vector<std::uint8_t> done;     ///< by slot, phase and block
  };
  /// First clear, then name all rows, then allocate, then read.
  void clear(Packed& packed) const;
  std::int64_t slot(Packed& packed, std::int64_t image, std::int64_t y) const;
  void allocate(Packed& packed) const;
  /// What result 0 reads at number `tap` of the class's taps, in the first channel of block `other`.
  const std::byte* at(Packed& packed, std::int64_t slot, std::size_t tap, std::int64_t other) const;

  std::int64_t width() const { return width_; }  ///< of a panel: from one channel (or group of them) to the next
  std::int64_t unit() const { return unit_; }    ///< bytes of a position in a panel

 private:
  void pack(Packed& packed, std::int64_t slot, std::size_t phase, std::int64_t other, std::byte* to) const;

  const Problem& p_;
  const Tiles& tiles_;
  const AxisClass& x_;
  std::vector<std::int64_t> phases_;    ///< that some kernel position reads
  std::vector<std::size_t> tap_phase_;  ///< of each tap, the place of its phase there
  std::int64_t low_ = 0, width_ = 0, unit_ = 0;
  std::size_t block_bytes_ = 0, phase_bytes_ = 0;
};

/// How many stretches of work `flops` are worth, at most so many for each thread.
std::int64_t stretches_for(double flops, std::int64_t per_thread, const Context& context);

void weight(const Problem& problem, Context& context);

}  // namespace fretwork::block_conv::cpu
