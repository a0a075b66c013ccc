// How a GPU kernel is chosen: the candidates, their cost in microseconds, and what a kernel family tells of itself.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "ops/two_four/problem.h"
#include "runtime/choose.h"
#include "runtime/cost.h"

namespace fretwork::two_four {

/// Whether mma.sp takes fp8 as it is: on sm_89 and sm_12x. sm_80 has no fp8, and for sm_90 to sm_11x ptxas converts
/// operands before each mma.sp, which takes the registers that sums need.
bool has_fp8_mma_sp(const std::string& arch);

/// What kernels are chosen for; by default an H200.
struct Machine {
  int arch = 90, multiprocessors = 132, shared_bytes = 227 * 1024;
  bool hopper = true;       ///< kernels for sm_90a run
  bool fp8_mma_sp = false;  ///< mma.sp takes fp8 as it is
  Precision precision = Precision::ieee;
  /// Clusters of up to 8 CTAs, one to an SM, that run at once: fewer than there are SMs for, as a cluster stays within
  /// a part of the chip. Counted on an H200; another GPU is taken for a larger or smaller one.
  int clusters(int size) const;
  static Machine of(const Context& context);
};

struct KernelFamily;

/// One way to launch a kernel; what its family does not vary stays as it is here.
struct Config {
  const KernelFamily* family = nullptr;
  int rows = 0, columns = 0;  ///< of a CTA's tile
  int split = 1;              ///< CTAs of a cluster that share the depth of a tile
  int pair = 1;               ///< CTAs of a cluster that share what they fetch of b
  int warps = 0;              ///< of a CTA
  int stages = 0;             ///< of the depth that are in flight
  bool operator==(const Config&) const = default;
  std::string text() const;
};

using Candidate = fretwork::Candidate<Config>;

/// Bytes of values and metadata.
inline double sparse_bytes(const Problem& p) {
  const auto dense = static_cast<double>(p.m) * static_cast<double>(p.k);
  return dense / 2 * static_cast<double>(size_of(p.dtype)) + dense / static_cast<double>(2 * group(p.dtype));
}

/// How long the tiles of a kernel for Hopper take, in microseconds.
struct TileCost {
  int rows, columns;
  double start;       ///< of the kernel
  double step;        ///< 256 bytes of b's depth
  double tile;        ///< before its first step and after its last
  double meet, each;  ///< where CTAs share the depth of a tile: once, and for every CTA but one
  double memory, l2;  ///< of a megabyte of the sparse operand, and of all that CTAs fetch
  double wave;        ///< between a wave and the next
  double pair;        ///< where two CTAs share what they fetch of b

  double microseconds(const Problem& problem, const Config& config, const Machine& machine, int ctas = 1) const;
};

/// What a family of kernels tells; nothing else knows how it works.
struct KernelFamily {
  const char* name;
  bool (*fits)(const Problem& problem, const Machine& machine);
  /// The configurations of a problem that fits, with their cost. Needs no GPU and compiles nothing.
  void (*list)(const Problem& problem, const Machine& machine, std::vector<Candidate>& list);
  void (*launch)(const Problem& problem, const Config& config, const Machine& machine, Context& context);
};
extern const KernelFamily kSmallNRegisters, kSmallNTma, kSmallNCpAsync, kTmaGemm, kPortable, kGeneric;

/// The configuration that a call takes.
Config choose(const Problem& problem, const Machine& machine);
/// Every configuration of every family that fits, cheapest first.
std::vector<Candidate> candidates(const Problem& problem, const Machine& machine);

namespace cuda {
/// Runs a family in its cheapest configuration, or in the given one, for tests and benchmarks; false where that does
/// not fit.
bool run(const Problem& problem, const KernelFamily& family, Context& context);
bool run(const Problem& problem, const Config& config, Context& context);
}  // namespace cuda

}  // namespace fretwork::two_four
