// Vector functions on contiguous runs of 2:4 groups, for the CPU. A code is a group's nibble in a byte.
#pragma once

#include <cstdint>

#include "fretwork/tensor.h"

namespace fretwork::two_four {

/// T is an unsigned integer of the elements' size; groups are pairs for 32 bits, else fours.
template <typename T>
struct GroupKernels {
  /// The non-zeros and their codes; gives whether a group has too many, whose code is then any valid one.
  bool (*compress)(const T* dense, std::int64_t groups, T* values, std::uint8_t* codes);
  /// Only looks: at groups that follow one another (any pitch), or `across`, at the same one of neighbouring lines,
  /// whose elements are `pitch` apart.
  bool (*look)(const T* dense, std::int64_t pitch, std::int64_t groups);
  bool (*look_across)(const T* dense, std::int64_t pitch, std::int64_t lines);
  /// The largest magnitudes stay where they are, zeros elsewhere.
  void (*prune)(const T* dense, std::int64_t pitch, std::int64_t groups, T* out, std::int64_t out_pitch);
  void (*prune_across)(const T* dense, std::int64_t pitch, std::int64_t lines, T* out, std::int64_t out_pitch);
  /// Elements that are kept, one after the other.
  void (*pick)(const T* dense, const std::uint8_t* codes, std::int64_t groups, T* values);
  /// Values where they belong, zeros elsewhere.
  void (*place)(const T* values, const std::uint8_t* codes, std::int64_t groups, T* dense);
  /// Transposable pruning of a row of squares, lines `pitch` and `out_pitch` apart.
  void (*squares)(const T* dense, std::int64_t pitch, std::int64_t groups, T* out, std::int64_t out_pitch);
};

template <typename T>
const GroupKernels<T>& group_kernels(DType dtype);

/// Some lines as they lie in memory, from a byte's first group on.
template <typename T>
struct PackedLines {
  T* values;
  std::int64_t value_stride;
  const std::uint8_t* nibbles;
  std::int64_t nibble_stride;
  std::int64_t lines, groups;
};

/// A dense operand of some rows, whose elements are neighbours.
struct FloatRows {
  const float* data;
  std::int64_t stride, rows;
};

/// `place` and `pick` with nibbles as they lie in memory, two in a byte.
template <typename T>
struct MaskKernels {
  void (*place)(const T* values, const std::uint8_t* nibbles, std::int64_t groups, T* dense);
  void (*pick)(const T* dense, const std::uint8_t* nibbles, std::int64_t groups, T* values);
  /// Gradients for a few rows of floats, in which no line is ever expanded in memory; null for other types.
  /// sums[n][j] += Σ_l d_y[n][l]·s[l][j].
  void (*add_lines)(const PackedLines<T>& s, const FloatRows& d_y, float* sums, std::int64_t sum_stride);
  /// What is kept of Σ_n d_y[n][l]·x[n][j].
  void (*pick_products)(const PackedLines<T>& s, const FloatRows& d_y, const FloatRows& x);
};

/// Null where this CPU has none, or the elements' size.
template <typename T>
const MaskKernels<T>* mask_kernels();
template <>
const MaskKernels<std::uint8_t>* mask_kernels();
template <>
const MaskKernels<std::uint16_t>* mask_kernels();
template <>
const MaskKernels<std::uint32_t>* mask_kernels();
template <>
const MaskKernels<std::uint64_t>* mask_kernels();

/// Two codes in a byte and back; `count` codes, an even number.
void pack_codes(const std::uint8_t* codes, std::int64_t count, std::uint8_t* bytes);
void unpack_codes(const std::uint8_t* bytes, std::int64_t count, std::uint8_t* codes);

}  // namespace fretwork::two_four
