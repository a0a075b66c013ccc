// Checks views and makes their tensor maps.
#include "runtime/tensor_map.h"

#include <bit>
#include <limits>

#include "runtime/alignment.h"
#include "runtime/cuda_driver.h"

namespace fretwork {

static_assert(sizeof(Map) == sizeof(cuda::TensorMap));

Map TiledView::map(std::uint32_t unit, std::uint32_t other, std::uint32_t third) const {
  const std::uint32_t box[] = {unit, other, third, 1};
  std::uint64_t lengths[4], steps[3];
  for (std::size_t d = 0; d < 4; ++d) {
    lengths[d] = static_cast<std::uint64_t>(sizes[d]);
  }
  for (std::size_t d = 0; d < 3; ++d) {
    steps[d] = static_cast<std::uint64_t>(strides[d + 1] * element_bytes);
  }
  const std::uint32_t row = unit * static_cast<std::uint32_t>(element_bytes);
  const auto swizzle = row == 128 ? cuda::Swizzle::b128 : row == 64 ? cuda::Swizzle::b64 : cuda::Swizzle::b32;
  return std::bit_cast<Map>(cuda::make_tensor_map(data, element_bytes, lengths, steps, box, swizzle));
}

std::optional<TiledView> make_tiled_view(const void* data, const std::array<std::int64_t, 4>& sizes,
                                         const std::array<std::int64_t, 4>& strides, int element_bytes) {
  constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max() - 512;
  const std::int64_t whole = 16 / element_bytes;
  TiledView view{data, sizes, strides, element_bytes};
  for (std::size_t d = 0; d < 4; ++d) {
    if (view.sizes[d] == 1) {
      view.strides[d] = d == 0 ? 1 : whole;  // never used, but it must be a valid one
    }
    const std::int64_t stride = view.strides[d];
    const bool valid = d == 0 ? stride == 1 : stride > 0 && stride % whole == 0 && stride < (1LL << 39) / element_bytes;
    if (view.sizes[d] < 1 || view.sizes[d] > kMost || !valid) {
      return std::nullopt;
    }
  }
  return data != nullptr && is_aligned(data, 16) ? std::optional(view) : std::nullopt;
}

}  // namespace fretwork
