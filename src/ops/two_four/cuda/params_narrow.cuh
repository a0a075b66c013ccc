// Parameters and sizes of the kernel for up to 64 columns on Hopper; shared by host and device.
#pragma once

#include "device/tensor_map.cuh"

namespace fretwork::two_four::narrow {

/// A CTA has 64 rows for each of its warpgroups, 1 or 2, and one more warp that fetches.
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
constexpr int slots(int columns, int groups, int split) { return (units(columns, groups) + split - 1) / split; }
constexpr int sums_bytes(int columns, int groups) { return (units(columns, groups) + kMostSplit) * kUnitBytes; }

constexpr int bytes_but_stages(int columns, int groups) {
  return 1024 + kChunks * chunk_bytes(groups) + sums_bytes(columns, groups);
}
/// As many as fit.
constexpr int stages(int columns, int groups) {
  return ((226 << 10) - bytes_but_stages(columns, groups)) / stage_bytes(columns, groups);
}
constexpr int shared_bytes(int columns, int groups) {
  return bytes_but_stages(columns, groups) + stages(columns, groups) * stage_bytes(columns, groups);
}

struct Params {
  Map values;  ///< along k × m
  Map words;   ///< bytes along k × m
  Map b;       ///< along k × n
  void* out;   ///< contiguous along m
  long long c_col;
  const void* bias;  ///< of the result's dtype, or null
  long long bias_stride;
  int activation;  ///< as fretwork::Activation counts
  int n;
  int split;                                                   ///< CTAs of a cluster
  int slots;                                                   ///< most units that one of them finishes
  unsigned inverse;                                            ///< 2^31 / split, rounded up
  int first_step[kMostSplit + 1], first_unit[kMostSplit + 1];  ///< of each
};

}  // namespace fretwork::two_four::narrow
