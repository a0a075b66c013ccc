// What the host code of the kernels for neighbouring δ shares, for products and for gradients: which operands suit, how
// the batch is cut, tensor maps.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include "ops/kronecker/cuda/families.h"
#include "ops/kronecker/cuda/params.h"
#include "runtime/alignment.h"
#include "runtime/cost.h"
#include "runtime/cuda_driver.h"
#include "runtime/kernels.h"

namespace fretwork::kronecker::strided {

namespace driver = fretwork::cuda;

/// 3 for tf32x3, 1 for the other types with tensor cores here, else 0.
inline int products_of(DType dtype, Precision precision) {
  if (dtype == DType::f32) {
    return precision == Precision::tf32 ? 1 : precision == Precision::tf32x3 ? 3 : 0;
  }
  return dtype == DType::f16 || dtype == DType::bf16 ? 1 : 0;
}

inline bool small_enough(const Sizes& s) {
  constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max() / 64;
  return s.b * s.d <= kMost && s.c * s.d <= kMost && s.a * s.d * std::max(s.b, s.c) <= kMost * 16;
}

/// Whether rows and features lie so that `bytes` can be moved at once from every multiple of `bytes`.
inline bool moves(const Matrix& m, std::int64_t batch, int size, int bytes) {
  return m.feature == 1 && is_aligned(m.data, bytes) && (batch == 1 || m.batch * size % bytes == 0);
}

/// Whether the δ groups of `tile` can be moved: d holds whole groups, and they are aligned.
inline bool tile_fits(const Tile& tile, std::int64_t d, std::int64_t batch, const Matrix& one, const Matrix& other) {
  const int bytes = std::min(16, tile.v * tile.size);
  return d % tile.v == 0 && moves(one, batch, tile.size, bytes) && moves(other, batch, tile.size, bytes);
}

/// With fewer δ than a chunk holds: whether neighbouring columns of m can be moved together.
inline bool flat(const Tile& tile, const Sizes& s, std::int64_t columns, std::int64_t batch, const Matrix& m,
                 int bytes) {
  return s.d == tile.v && moves(m, batch, tile.size, bytes) && (s.a == 1 || columns * s.d * tile.size % bytes == 0);
}

/// L2 moves sectors of 32 bytes: how many times more than is asked for.
inline double sectors(const Tile& tile, std::int64_t d) {
  return d == tile.v ? 1.0 : std::max(1.0, 32.0 / (tile.v * tile.size));
}

/// Pieces of the batch: enough CTAs for the machine, whole waves where it matters. `before` is what a CTA moves before
/// its first tile.
inline std::int64_t pieces_of(std::int64_t groups, std::int64_t tiles, std::int64_t multiprocessors, double tile_bytes,
                              double before) {
  const std::int64_t most = std::min(tiles, std::max<std::int64_t>(1, 8 * multiprocessors / groups));
  std::int64_t best = 1;
  double least = std::numeric_limits<double>::max();
  for (std::int64_t pieces = 1; pieces <= most; ++pieces) {
    const double waves = double(ceil_div(groups * pieces, multiprocessors));
    const double cost = waves * (double(ceil_div(tiles, pieces)) * tile_bytes + before);
    if (cost < least) {
      least = cost;
      best = pieces;
    }
  }
  return best;
}

/// Whether the copy engine can fetch rows of both operands for clusters.
inline bool clusters_fit(DType dtype, std::int64_t batch, const Matrix& one, const Matrix& other,
                         const Machine& machine) {
  return size_of(dtype) == 2 && machine.arch == "sm_90a" && batch > 0 &&
         batch <= std::numeric_limits<std::int32_t>::max() / 2 && one.batch > 0 && other.batch > 0 &&
         moves(one, batch, 2, 16) && moves(other, batch, 2, 16);
}

inline Map encoded(const Matrix& m, std::span<const std::uint64_t> sizes, std::span<const std::uint64_t> strides,
                   std::initializer_list<std::uint32_t> box, driver::Swizzle swizzle) {
  return std::bit_cast<Map>(driver::make_tensor_map(m.data, 2, sizes, strides, {box.begin(), box.size()}, swizzle));
}

/// `inner` and then the batch.
inline Map make_map(const Matrix& m, std::int64_t batch, std::initializer_list<std::uint64_t> inner,
                    std::initializer_list<std::uint32_t> box, driver::Swizzle swizzle) {
  std::vector<std::uint64_t> sizes(inner), strides;
  std::uint64_t bytes = 2;
  for (const std::uint64_t size : inner) {
    bytes *= size;
    strides.push_back((bytes + 15) / 16 * 16);  // only a dimension of one factor is rounded
  }
  sizes.push_back(static_cast<std::uint64_t>(batch));
  strides.back() = batch == 1 ? strides.back() : static_cast<std::uint64_t>(m.batch) * 2;
  return encoded(m, sizes, strides, box, swizzle);
}

/// What every kernel here needs.
inline bool suits(const Sizes& s, DType dtype, const Machine& machine) {
  return machine.number >= 80 && products_of(dtype, machine.precision) > 0 && s.d > 1 && small_enough(s);
}

}  // namespace fretwork::kronecker::strided
