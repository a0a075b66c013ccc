// Nibbles of metadata as bytes, a run of one line at a time.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "ops/two_four/cpu/groups.h"
#include "ops/two_four/problem.h"

namespace fretwork::two_four::cpu {

/// Bytes of a dense line whose codes are held at a time.
inline constexpr std::int64_t kCodeBytes = 1024;

/// The codes of a run of one line, and their way into words and out of them.
class Codes {
 public:
  explicit Codes(const Format& f) : f_(f) {}
  std::uint8_t* data() { return codes_; }
  void write(std::int64_t line, std::int64_t group, std::int64_t groups) {
    const std::int64_t each = 2 * f_.word_bytes, words = (groups + each - 1) / each;
    std::fill(codes_ + groups, codes_ + words * each, std::uint8_t{4});
    std::uint8_t* const to = word(line, group / each);
    pack_codes(codes_, words * each, f_.words.along == 1 ? to : bytes_);
    for (std::int64_t w = 0; f_.words.along != 1 && w < words; ++w) {
      std::memcpy(to + w * f_.words.along * f_.word_bytes, bytes_ + w * f_.word_bytes, bytes());
    }
  }
  const std::uint8_t* read(std::int64_t line, std::int64_t group, std::int64_t groups) {
    const std::int64_t each = 2 * f_.word_bytes, words = (groups + each - 1) / each;
    unpack_codes(nibbles(line, group, groups), words * each, codes_);
    return codes_;
  }
  /// Values where they belong on a run of a line, zeros elsewhere; and what is kept of such a run.
  template <typename T>
  void place(const T* values, std::int64_t line, std::int64_t group, std::int64_t groups, T* dense) {
    if (const MaskKernels<T>* const masks = mask_kernels<T>(); masks != nullptr) {
      return masks->place(values, nibbles(line, group, groups), groups, dense);
    }
    group_kernels<T>(f_.dtype).place(values, read(line, group, groups), groups, dense);
  }
  template <typename T>
  void pick(const T* dense, std::int64_t line, std::int64_t group, std::int64_t groups, T* values) {
    if (const MaskKernels<T>* const masks = mask_kernels<T>(); masks != nullptr) {
      return masks->pick(dense, nibbles(line, group, groups), groups, values);
    }
    group_kernels<T>(f_.dtype).pick(dense, read(line, group, groups), groups, values);
  }

 private:
  /// Whole words from a word's first group on, one behind another.
  const std::uint8_t* nibbles(std::int64_t line, std::int64_t group, std::int64_t groups) {
    const std::int64_t each = 2 * f_.word_bytes, words = (groups + each - 1) / each;
    const std::uint8_t* const from = word(line, group / each);
    for (std::int64_t w = 0; f_.words.along != 1 && w < words; ++w) {
      std::memcpy(bytes_ + w * f_.word_bytes, from + w * f_.words.along * f_.word_bytes, bytes());
    }
    return f_.words.along == 1 ? from : bytes_;
  }
  std::size_t bytes() const { return static_cast<std::size_t>(f_.word_bytes); }
  std::uint8_t* word(std::int64_t line, std::int64_t at) const {
    return static_cast<std::uint8_t*>(f_.words.data) + (line * f_.words.line + at * f_.words.along) * f_.word_bytes;
  }
  const Format& f_;
  alignas(64) std::uint8_t codes_[kCodeBytes / 2 + 64];
  alignas(64) std::uint8_t bytes_[kCodeBytes / 4 + 64];
};

}  // namespace fretwork::two_four::cpu
