// Copies of runs in whole vectors. Compiled once per instruction set.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "runtime/simd/runs.cpp"
#include <hwy/foreach_target.h>
// After foreach_target.h.
#include <hwy/highway.h>

#include <algorithm>

#include "runtime/simd/runs.h"
#include "runtime/simd/tiles.h"

HWY_BEFORE_NAMESPACE();
namespace fretwork::simd::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using D = hn::CappedTag<std::uint8_t, kRunSlack>;
constexpr auto kLanes = static_cast<std::int64_t>(hn::MaxLanes(D()));

/// A vector of a row: bytes [0, edge) of one run, and the rest of the next; each as if its run began with the vector.
struct Piece {
  Run low, high;
  std::int64_t edge;
};

/// The vectors of a row, where they are a panel's and each has two runs at most; otherwise 0.
int Pieces(std::span<const Run> runs, Piece* pieces) {
  int count = 0;
  std::int64_t filled = kLanes;  // of the last piece
  for (Run run : runs) {
    if (filled < kLanes) {
      Piece& last = pieces[count - 1];
      if (last.edge < kLanes) {
        return 0;
      }
      last.edge = filled;
      last.high = {run.from - filled, run.stride, 0};
      const std::int64_t taken = std::min(kLanes - filled, run.bytes);
      filled += taken;
      run.from += taken;
      run.bytes -= taken;
    }
    for (; run.bytes > 0; run.from += kLanes, run.bytes -= kLanes) {
      if (count == kMaxVectors) {
        return 0;
      }
      pieces[count++] = {run, run, kLanes};
      filled = std::min(kLanes, run.bytes);
    }
  }
  return filled == kLanes ? count : 0;
}

/// No branch and no store across cache lines: most rows have an edge that lies anywhere.
template <int kVectors>
void JoinPieces(const Piece* pieces, std::int64_t rows, std::uint8_t* to) {
  const D d;
  hn::Mask<D> first[kVectors];
#pragma GCC unroll 4
  for (int v = 0; v < kVectors; ++v) {
    first[v] = hn::FirstN(d, static_cast<std::size_t>(pieces[v].edge));
  }
  for (std::int64_t k = 0; k < rows; ++k, to += kVectors * kLanes) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      const auto read = [&](const Run& run) HWY_ATTR {
        return hn::LoadU(d, reinterpret_cast<const std::uint8_t*>(run.from) + k * run.stride);
      };
      hn::StoreU(hn::IfThenElse(first[v], read(pieces[v].low), read(pieces[v].high)), d, to + v * kLanes);
    }
  }
}

void JoinRuns(std::span<const Run> runs, std::int64_t rows, std::byte* to) {
  const D d;
  auto* out = reinterpret_cast<std::uint8_t*>(to);
  Piece pieces[kMaxVectors];
  switch (Pieces(runs, pieces)) {
    case 1:
      return JoinPieces<1>(pieces, rows, out);
    case 2:
      return JoinPieces<2>(pieces, rows, out);
    case 3:
      return JoinPieces<3>(pieces, rows, out);
    default:
      break;
  }
  // A run's last vector goes past its end, where the next run, or the next row, then writes.
  for (std::int64_t k = 0; k < rows; ++k) {
    for (const Run& run : runs) {
      const auto* const from = reinterpret_cast<const std::uint8_t*>(run.from + k * run.stride);
      for (std::int64_t n = 0; n < run.bytes; n += kLanes) {
        hn::StoreU(hn::LoadU(d, from + n), d, out + n);
      }
      out += run.bytes;
    }
  }
}

}  // namespace fretwork::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fretwork::simd {
HWY_EXPORT(JoinRuns);

void join_runs(std::span<const Run> runs, std::int64_t rows, std::byte* to) {
  HWY_DYNAMIC_DISPATCH(JoinRuns)(runs, rows, to);
}

}  // namespace fretwork::simd
#endif
