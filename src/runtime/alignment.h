// Whether an operand can be read or written several bytes at a time.
#pragma once

#include <algorithm>
#include <concepts>
#include <cstdint>
#include <initializer_list>

namespace fretwork {

/// Whether an address is a multiple of `bytes`.
bool is_aligned(const void* data, std::integral auto bytes) {
  return reinterpret_cast<std::uintptr_t>(data) % static_cast<std::uintptr_t>(bytes) == 0;
}

/// Whether an address is, and what strides of elements lead to from there.
inline bool is_aligned(const void* data, std::initializer_list<std::int64_t> strides, std::integral auto element_bytes,
                       std::integral auto bytes) {
  const auto whole = [&](std::int64_t stride) {
    return stride * static_cast<std::int64_t>(element_bytes) % static_cast<std::int64_t>(bytes) == 0;
  };
  return is_aligned(data, bytes) && std::ranges::all_of(strides, whole);
}

}  // namespace fretwork
