// How long a call should take on a GPU, in microseconds: the one model by which ops choose between kernels.
//
// A call costs its launches and then the slowest of three: device memory, L2 (which feeds shared memory), and the SM
// with most to do. What cannot overlap with these adds up. An op fills in `Work`, with the rates that its kernels
// reach; `Tiles` is the usual way to do so for a kernel whose CTAs compute tiles in waves, where a wave takes as long
// as one tile. The constants are an H200's; another GPU is taken for a larger or smaller H200, as only ratios matter to
// a choice. Those without another source were fitted to the times of some 30,000 random Kronecker products and
// gradients on every kernel that fits (bench/results/h200/kronecker_candidates.json): half of all predictions are
// within 8%, and nine of ten within 25%.
#pragma once

#include <algorithm>
#include <cmath>

namespace fretwork::cost {

inline constexpr double kLaunch = 4.3;  ///< µs of an empty call, from one event to the next
/// µs of each further kernel, which needs what the one before has written: the merge of split keys in attention.
inline constexpr double kNextLaunch = 2.0;
inline constexpr double kMultiprocessors = 132;
inline constexpr double kMemory = 3.5e6;  ///< bytes per µs of device memory that kernels reach
inline constexpr double kRamp = 2.0;  ///< µs until memory delivers so much, and after the last CTA has nothing to do
/// Bytes per µs from L2 where all SMs read the same again: 8 tiles of queries against 32,768 keys take 217 µs, one 55.
inline constexpr double kL2 = 5.5e6;
inline constexpr double kMostL2 = 1.1e5;  ///< bytes per µs that one SM can read from L2

/// What a call does, in µs. Copies and products of all CTAs overlap, so that the longest counts; the rest adds up.
struct Work {
  double launches = 1;  ///< a number, not µs: kernels that run one after the other
  double memory = 0;    ///< for bytes to and from device memory
  double l2 = 0;        ///< for bytes through L2
  double busiest = 0;   ///< of the SM with most to do, over all its waves: its port to L2, shared memory, arithmetic
  double serial = 0;    ///< what overlaps with nothing: a CTA's first bytes and its epilogue, reductions, other passes

  double without_launches() const { return std::max({memory, l2, busiest}) + serial; }
  double microseconds() const { return kLaunch + (launches - 1) * kNextLaunch + without_launches(); }
};

/// What a kernel reaches.
struct Rates {
  double start;             ///< µs of a tile before its first product and after its last
  double l2;                ///< bytes per µs from L2, all SMs together
  double ops;               ///< operations per µs of one SM; a multiply-add is two
  double step = 0;          ///< µs of a step at least
  double memory = kMemory;  ///< bytes per µs of device memory
};

/// A kernel that computes tiles, each in steps that fetch operands and multiply them.
struct Tiles {
  double count;       ///< of all
  double at_once;     ///< that the machine computes at the same time
  double steps;       ///< of a tile
  double bytes, ops;  ///< of a CTA in a step
  double out;         ///< bytes that a CTA writes for its tile
  double ctas = 1;    ///< of a tile
};

/// Without launches. `memory` is what the kernel moves to and from device memory, in bytes.
inline double microseconds(const Tiles& tiles, const Rates& rates, double memory, double multiprocessors) {
  const double scale = multiprocessors / kMultiprocessors;
  const double active = std::min(tiles.count, tiles.at_once) * tiles.ctas;
  const double l2 = std::min(rates.l2 * scale / active, kMostL2);
  const double fetch = tiles.bytes / l2, multiply = tiles.ops / rates.ops;
  // Fetching and multiplying overlap, but for a tenth.
  const double step = std::max(std::max(fetch, multiply) + 0.1 * std::min(fetch, multiply), rates.step);
  const double waves = std::ceil(tiles.count / tiles.at_once);
  const double moved = kRamp + memory / (rates.memory * scale);
  const double computed = waves * (rates.start + tiles.steps * step + tiles.out / l2);
  // So do tiles and device memory, but for a twentieth.
  const Work work{.memory = moved, .busiest = computed, .serial = 0.05 * std::min(moved, computed)};
  return work.without_launches();
}

/// One more pass over memory, in a launch of its own.
inline double pass(double start, double bytes, double rate, double multiprocessors) {
  return start + bytes / (rate * multiprocessors / kMultiprocessors);
}

}  // namespace fretwork::cost
