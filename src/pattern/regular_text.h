// What the named patterns share: reading a call's arguments, checking them, and writing the canonical text.
#pragma once

#include <span>
#include <string>
#include <string_view>

#include "fretwork/error.h"
#include "pattern/regular_maker.h"
#include "pattern/text.h"

namespace fretwork::patterns {

/// Sizes and shifts up to here leave room for every sum in 64 bits.
inline constexpr std::int64_t kLargest = std::int64_t{1} << 48;

/// Writes name(argument,…,keyword=argument). Arguments that hold their default are not written.
class Writer {
 public:
  explicit Writer(std::string_view name) : text_(std::string(name) + "(") {}
  Writer& add(std::int64_t value) { return put("", std::to_string(value)); }
  Writer& add(const Optional& value) { return put("", value ? std::to_string(*value) : "None"); }
  Writer& add(std::span<const std::int64_t> values) { return put("", tuple(values)); }
  Writer& add(const Seq& seq);
  Writer& add(const std::string& value) { return put("", value); }
  Writer& keyword(const char* name, std::int64_t value, std::int64_t unless) {
    return value == unless ? *this : put(name, std::to_string(value));
  }
  Writer& keyword(const char* name, bool value) { return value ? put(name, "True") : *this; }
  Writer& keyword(const char* name, const std::string& value) { return put(name, value); }
  Writer& keyword(const char* name, std::span<const std::int64_t> values, std::int64_t unless);
  /// The last: a sequence's offset, unless it is the usual one.
  Writer& offset(const Seq& seq);
  std::string done() { return text_ + ")"; }

 private:
  Writer& put(const std::string& name, const std::string& value);
  static std::string tuple(std::span<const std::int64_t> values);
  std::string text_;
  bool first_ = true;
};

/// Position of the first query, checked with the sizes.
std::int64_t checked_offset(const char* op, const Seq& seq);
void check_sizes(const char* op, std::int64_t rows, std::int64_t cols, const char* argument = "seq");
void check_least(const char* op, const char* argument, std::int64_t value, std::int64_t least);
/// Sorted and each once, all in [0, end).
std::vector<std::int64_t> checked_set(const char* op, const char* argument, std::span<const std::int64_t> values,
                                      std::int64_t end);
/// A window, stride or the like as far as it can matter.
inline std::int64_t bounded(std::int64_t value) { return std::clamp(value, -4 * kLargest, 4 * kLargest); }

/// Conditions in one view that no element satisfies twice.
struct Wanted {
  View view;
  std::vector<Part> parts;
};
/// What satisfies any of `wanted`, disjoint by their nature, inside the sequence; and the pattern of it.
std::vector<PartGroup> clipped(const Seq& seq, const std::vector<Wanted>& wanted);
RegularPtr make(std::string text, const Seq& seq, const std::vector<Wanted>& wanted);

/// Arguments of a call whose places were ordered.
Seq read_seq(const text::Call& call, std::size_t offset_position);
Optional read_optional(const text::Call& call, std::size_t position, const char* argument);
std::int64_t read_or(const text::Call& call, std::size_t position, const char* argument, std::int64_t otherwise);
bool read_flag(const text::Call& call, std::size_t position, const char* argument);
/// 0 and 1 for a flag, or for each of a tuple of them.
std::vector<std::int64_t> read_flags(const text::Call& call, std::size_t position, const char* argument);
std::vector<std::int64_t> read_list(const text::Call& call, std::size_t position, const char* argument);

}  // namespace fretwork::patterns
