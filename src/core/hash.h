// A 128-bit content hash: cache keys, digests of patterns, checksums of files.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace fretwork {

struct Hash128 {
  std::uint64_t high = 0, low = 0;
  bool operator==(const Hash128&) const = default;
  /// 32 hexadecimal digits.
  std::string hex() const;
};

Hash128 hash128(std::string_view bytes);

}  // namespace fretwork

template <>
struct std::hash<fretwork::Hash128> {
  std::size_t operator()(const fretwork::Hash128& h) const noexcept { return static_cast<std::size_t>(h.low); }
};
