// Division by a number that the host knows before the launch. Host and device share it.
#pragma once

namespace fretwork {

/// Divides numbers below 2^31 by a multiplication and a shift.
struct Divisor {
  unsigned divisor = 1, magic = 1u << 31, shift = 31;

  constexpr Divisor() = default;
  constexpr explicit Divisor(long long by) : divisor(static_cast<unsigned>(by)) {
    // magic·by exceeds a power of two by less than by ≤ 2^bits: too little to matter below 2^31.
    unsigned bits = 0;
    while (1ull << bits < divisor) {
      ++bits;
    }
    shift = 31 + bits;
    magic = static_cast<unsigned>(((1ull << shift) + divisor - 1) / divisor);
  }
  constexpr int quotient(int n) const {
    return static_cast<int>(static_cast<unsigned long long>(static_cast<unsigned>(n)) * magic >> shift);
  }
};

}  // namespace fretwork
