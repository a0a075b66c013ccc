// An upload arena: arrays that go to a device together, in one allocation and one copy.
#pragma once

#include <cstddef>
#include <cstring>
#include <vector>

#include "runtime/cuda_driver.h"

namespace fretwork::cuda {

/// Arrays one after the other, each aligned for the widest access.
class UploadArena {
 public:
  template <typename T>
  std::size_t add(const std::vector<T>& items) {
    const std::size_t at = (bytes_.size() + 15) / 16 * 16;
    bytes_.resize(at + items.size() * sizeof(T));
    if (!items.empty()) {
      std::memcpy(bytes_.data() + at, items.data(), items.size() * sizeof(T));
    }
    return at;
  }
  DeviceBuffer upload(int device) const { return {device, bytes_.data(), bytes_.size()}; }

 private:
  std::vector<char> bytes_;
};

/// The array at an offset that UploadArena::add gave.
template <typename T>
const T* uploaded(const DeviceBuffer& memory, std::size_t offset) {
  return reinterpret_cast<const T*>(static_cast<const char*>(memory.data()) + offset);
}

}  // namespace fretwork::cuda
