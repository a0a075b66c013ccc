// Tensors of 8-bit, 16-bit and 32-bit elements as the copy engine sees them.
#pragma once

#include <array>
#include <cstdint>
#include <optional>

#include "device/tensor_map.cuh"

namespace fretwork {

/// 16-bit elements in the 16 bytes that strides and addresses must be a multiple of.
inline constexpr std::int64_t kMapUnit = 8;

/// Four dimensions, the one with stride 1 first; strides in elements.
struct TiledView {
  const void* data = nullptr;
  std::array<std::int64_t, 4> sizes{}, strides{};
  int element_bytes = 2;

  /// Stores are clipped to whole units of 16 bytes, so that a line must end with one; loads stop at the last element.
  bool can_be_written() const { return sizes[0] * element_bytes % 16 == 0; }

  /// With boxes of unit × other × third elements; rows of 128, 64 or 32 bytes are swizzled.
  Map map(std::uint32_t unit, std::uint32_t other, std::uint32_t third = 1) const;
};

/// The view, if the copy engine can move it. The strides of dimensions of size 1 do not matter.
std::optional<TiledView> make_tiled_view(const void* data, const std::array<std::int64_t, 4>& sizes,
                                         const std::array<std::int64_t, 4>& strides, int element_bytes = 2);

}  // namespace fretwork
