// How long a call should take on a GPU, in microseconds: the one model by which ops choose between kernels.
//
// A call costs its launches and then the slowest of three: device memory, L2 (which feeds shared memory), and the SM
// with most to do. What cannot overlap with these adds up. An op fills in `Work`, with the rates that its kernels
// reach; `Tiles` is the usual way to do so for a kernel whose CTAs, one to an SM, compute tiles in waves, where a wave
// takes as long as one tile, its bytes through L2 included. The constants are an H200's; another GPU is taken for a
// larger or smaller H200, as only ratios matter to a choice. Constants whose comment names no measurement were fitted
// to the times of some 30,000 random Kronecker products and gradients on every kernel that fits
// (bench/results/h200/kronecker_candidates.json has a sample): half of all predictions are within 12%, and nine of ten
// within 40%.
#pragma once

#include <algorithm>
#include <cmath>

namespace fretwork::cost {

inline constexpr double kLaunch = 4.3;  ///< µs between two events with an empty kernel between them
/// µs of each further kernel that waits for the one before, such as attention's merge of split keys.
inline constexpr double kNextLaunch = 2.0;
inline constexpr double kMultiprocessors = 132;
inline constexpr double kMemory =
    3.5e6;                            ///< bytes per µs of device memory; a kernel that reaches less has its own rate
inline constexpr double kRamp = 2.0;  ///< µs lost at both ends of a kernel, while memory traffic rises and falls
/// Bytes per µs from L2 when all SMs read the same bytes again. From decoding: 8 tiles of queries against 32,768 keys
/// take 217 µs, one takes 55.
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
  double step = 0;          ///< the least that a step takes, µs
  double memory = kMemory;  ///< bytes per µs of device memory
};

/// A kernel that computes tiles, each in steps that fetch operands and multiply them.
struct Tiles {
  double count;       ///< number of tiles
  double at_once;     ///< tiles in flight on the machine
  double steps;       ///< steps per tile
  double bytes, ops;  ///< per CTA and step
  double out;         ///< bytes that a CTA writes for its tile
  double ctas = 1;    ///< CTAs that share a tile
};

/// Without launches. `memory` is what the kernel moves to and from device memory, in bytes.
inline double microseconds(const Tiles& tiles, const Rates& rates, double memory, double multiprocessors) {
  const double scale = multiprocessors / kMultiprocessors;
  const double active = std::min(tiles.count, tiles.at_once) * tiles.ctas;
  const double l2 = std::min(rates.l2 * scale / active, kMostL2);
  const double fetch = tiles.bytes / l2, multiply = tiles.ops / rates.ops;
  // Fetching and multiplying overlap; the shorter one adds a tenth of its time.
  const double step = std::max(std::max(fetch, multiply) + 0.1 * std::min(fetch, multiply), rates.step);
  const double waves = std::ceil(tiles.count / tiles.at_once);
  const double moved = kRamp + memory / (rates.memory * scale);
  const double computed = waves * (rates.start + tiles.steps * step + tiles.out / l2);
  // So do tiles and device memory; the shorter one adds a twentieth.
  const Work work{.memory = moved, .busiest = computed, .serial = 0.05 * std::min(moved, computed)};
  return work.without_launches();
}

/// One more pass over memory, in a launch of its own, which `start` includes.
inline double pass(double start, double bytes, double rate, double multiprocessors) {
  return start + bytes / (rate * multiprocessors / kMultiprocessors);
}

/// µs of cuBLAS's product of dense 16-bit matrices, m × k by k × n: the best of its usual tiles and splits of k. Fitted
/// to 4,711 products of random layers, such as `dense` in bench/results/h200/sweep.json: 11% off in the mean.
inline double dense_product(double m, double n, double k, double multiprocessors) {
  constexpr double kStart = 1.4;       // of a tile before its first product and after its last
  constexpr double kStep = 0.31;       // of 128 × 128 results and 64 of k
  constexpr double kFetch = 0.78;      // of such a step, its share that is due to fetching operands
  constexpr double kLeastDepth = 512;  // of a piece of k
  constexpr double kReduce = 1.5;      // the pass that adds the pieces
  constexpr double kRate = 3.0e6;      // bytes per µs of device memory
  constexpr double kTiles[][2] = {{64, 64}, {64, 128}, {128, 64}, {128, 128}, {128, 256}, {256, 128}};
  double computed = HUGE_VAL;
  for (const auto& [rows, cols] : kTiles) {
    const double tiles = std::ceil(m / rows) * std::ceil(n / cols);
    const double step = kStep * std::max(rows * cols / (128 * 128), kFetch * (rows + cols) / 256);
    for (double split = 1; split <= 8 && (split == 1 || k / split >= kLeastDepth); split *= 2) {
      const double waves = std::ceil(tiles * split / multiprocessors);
      const double reduce = split > 1 ? kReduce + 8 * split * m * n / kL2 : 0;
      computed = std::min(computed, waves * (kStart + step * std::ceil(k / split / 64)) + reduce);
    }
  }
  const double moved = 2 * (m * k + k * n + m * n) / (kRate * multiprocessors / kMultiprocessors);
  return kLaunch + std::max(computed, moved) + 0.1 * std::min(computed, moved);
}

}  // namespace fretwork::cost
