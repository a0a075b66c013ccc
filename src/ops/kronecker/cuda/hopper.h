// What the host code of the TMA and wgmma kernels for products and for gradients shares: views of operands.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>

#include "ops/kronecker/cuda/families.h"
#include "ops/kronecker/cuda/params.h"
#include "runtime/cost.h"
#include "runtime/cuda_driver.h"
#include "runtime/kernels.h"
#include "runtime/tensor_map.h"

namespace fretwork::kronecker::hopper {

namespace driver = fretwork::cuda;

inline constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max() / 2;
inline constexpr int kWidths[] = {64, 128, 192, 256};

/// Of the types that there are kernels for.
inline std::size_t type_index(DType dtype) { return dtype == DType::f16 ? 0 : dtype == DType::bf16 ? 1 : 2; }

/// Elements in the 128 bytes of a line of shared memory: the depth of a step.
inline std::int64_t line_of(DType dtype) { return 128 / bytes_of(dtype); }

/// The batch and `features` of each (i, l), with the batch or the features as the unit axis.
inline std::optional<TiledView> matrix_view(const Matrix& m, bool last, std::int64_t batch, std::int64_t features,
                                            const Sizes& s, int bytes) {
  const std::int64_t next = s.d * m.feature, block = features * next;
  return last ? make_tiled_view(m.data, {batch, features, s.d, s.a}, {m.batch, next, m.feature, block}, bytes)
              : make_tiled_view(m.data, {features, batch, s.d, s.a}, {next, m.batch, m.feature, block}, bytes);
}

/// With boxes that make `rows` lines of an operand: one box where the unit axis is the depth.
inline Map operand_map(const TiledView& view, bool unit_is_depth, int rows) {
  const int line = 128 / view.element_bytes;
  return view.map(static_cast<std::uint32_t>(line), static_cast<std::uint32_t>(unit_is_depth ? rows : line));
}

/// Batch first: rows of a block's neighbours (feature, l), as they lie in memory.
inline std::optional<TiledView> row_view(const Matrix& m, std::int64_t batch, std::int64_t features, const Sizes& s) {
  const std::int64_t width = features * s.d;
  return make_tiled_view(m.data, {width, batch, 1, s.a}, {m.feature, m.batch, 0, width}, bytes_of(DType::f32));
}

/// x and y (or d_y), if they are in the same layout and it is one of ours.
struct Layout {
  bool last;
  TiledView x, y;
  bool by_threads = false;  ///< batch last, and y is nothing that the copy engine can store; x has a view of
                            ///< neighbours, or is nothing that it can fetch

  bool neighbours() const { return by_threads && x.data != nullptr; }
  /// Tiles that hold so many rows, though the first may begin up to a unit of 16 bytes early.
  std::int64_t row_tiles(std::int64_t batch) const {
    return ceil_div(batch + (neighbours() ? 16 / x.element_bytes - 1 : 0), kRows);
  }
};
inline std::optional<Layout> shared_layout(const Matrix& x, const Matrix& y, std::int64_t batch, const Sizes& s,
                                           DType dtype) {
  for (const bool last : {false, true}) {
    const int bytes = bytes_of(dtype);
    const auto from = matrix_view(x, last, batch, s.c, s, bytes), to = matrix_view(y, last, batch, s.b, s, bytes);
    if (from && to) {
      return Layout{last, *from, *to};
    }
  }
  return std::nullopt;
}

/// tf32, batch first with d = 2 or 4: rows that hold the δ of a block interleaved.
inline std::optional<Layout> interleaved_layout(const Matrix& x, const Matrix& y, std::int64_t batch, const Sizes& s,
                                                DType dtype) {
  const auto from = row_view(x, batch, s.c, s), to = row_view(y, batch, s.b, s);
  const bool fit = dtype == DType::f32 && (s.d == 2 || s.d == 4) && from && to;
  return fit ? std::optional(Layout{false, *from, *to}) : std::nullopt;
}

/// Batch first, the d products of a block as one dense matrix, for up to 8 δ.
inline Sizes dense_sizes(const Sizes& s) { return {s.a, s.b * s.d, s.c * s.d, 1}; }
inline std::optional<Layout> dense_layout(const Matrix& x, const Matrix& y, std::int64_t batch, const Sizes& s,
                                          DType dtype) {
  constexpr std::int64_t kMostDeltas = 8;
  const auto layout = s.d == 1 || s.d > kMostDeltas ? std::nullopt : shared_layout(x, y, batch, dense_sizes(s), dtype);
  return layout && !layout->last ? layout : std::nullopt;
}

/// What both problems need.
inline bool suits(const Sizes& s, std::int64_t batch, DType dtype, const Machine& machine) {
  const bool type =
      dtype == DType::f16 || dtype == DType::bf16 || (dtype == DType::f32 && machine.precision == Precision::tf32);
  const bool sizes = s.b < kMost / s.c && batch < kMost && s.a < kMost / s.d;
  return type && sizes && machine.arch == "sm_90a";
}

/// Regrouped rows: `width` features of each (i, l), contiguous.
inline std::optional<TiledView> grouped_view(void* data, std::int64_t width, std::int64_t batch, const Sizes& s,
                                             int bytes) {
  return make_tiled_view(data, {width, batch, s.d, s.a}, {1, s.a * s.d * width, width, s.d * width}, bytes);
}

/// What `product` and `gradient` reach (runtime/cost.h), of 16-bit types and in tf32.
inline constexpr cost::Rates kRates16 = {1.05, 14.6e6, 6.37e6}, kRatesTf32 = {1.49, 11.2e6, 3.04e6};

}  // namespace fretwork::kronecker::hopper
