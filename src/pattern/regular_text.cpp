// Reading, checking and writing the arguments of named patterns.
#include "pattern/regular_text.h"

#include "fretwork/tensor.h"

namespace fretwork::patterns {

Writer& Writer::put(const std::string& name, const std::string& value) {
  text_ += (first_ ? "" : ",") + (name.empty() ? value : name + "=" + value);
  first_ = false;
  return *this;
}

std::string Writer::tuple(std::span<const std::int64_t> values) {
  std::string text = "(";
  for (const std::int64_t value : values) {
    text += text.size() == 1 ? "" : ",";
    text += std::to_string(value);
  }
  return text += values.size() == 1 ? ",)" : ")";
}

Writer& Writer::add(const Seq& seq) {
  return seq.rows == seq.cols ? add(seq.rows) : add(std::vector{seq.rows, seq.cols});
}

Writer& Writer::keyword(const char* name, std::span<const std::int64_t> values, std::int64_t unless) {
  if (std::all_of(values.begin(), values.end(), [&](std::int64_t v) { return v == unless; })) {
    return *this;
  }
  return put(name, tuple(values));
}

Writer& Writer::offset(const Seq& seq) {
  return seq.offset ? keyword("offset", *seq.offset, seq.cols - seq.rows) : *this;
}

void check_sizes(const char* op, std::int64_t rows, std::int64_t cols, const char* argument) {
  for (const std::int64_t n : {rows, cols}) {
    if (n < 0 || n > kLargest) {
      throw Error(op, argument, "sizes from 0 to 2^48", std::to_string(n));
    }
  }
  if (std::int64_t all = 0; __builtin_mul_overflow(rows, cols, &all)) {
    throw Error(op, argument, "fewer than 2^63 elements", shape_text(std::vector{rows, cols}));
  }
}

std::int64_t checked_offset(const char* op, const Seq& seq) {
  check_sizes(op, seq.rows, seq.cols);
  const std::int64_t offset = seq.offset.value_or(seq.cols - seq.rows);
  if (offset < -kLargest || offset > kLargest) {
    throw Error(op, "offset", "-2^48 to 2^48", std::to_string(offset));
  }
  return offset;
}

void check_least(const char* op, const char* argument, std::int64_t value, std::int64_t least) {
  if (value < least) {
    throw Error(op, argument, "at least " + std::to_string(least), std::to_string(value));
  }
}

std::vector<std::int64_t> checked_set(const char* op, const char* argument, std::span<const std::int64_t> values,
                                      std::int64_t end) {
  std::vector<std::int64_t> sorted(values.begin(), values.end());
  std::sort(sorted.begin(), sorted.end());
  sorted.erase(std::unique(sorted.begin(), sorted.end()), sorted.end());
  for (const std::int64_t value : sorted) {
    if (value < 0 || value >= end) {
      throw Error(op, argument, "positions from 0 to " + std::to_string(end - 1), std::to_string(value));
    }
  }
  return sorted;
}

std::vector<PartGroup> clipped(const Seq& seq, const std::vector<Wanted>& wanted) {
  std::vector<PartGroup> groups;
  for (const Wanted& one : wanted) {
    PartGroup& group = groups.emplace_back(one.view, parts::clipped(one.view, one.parts, seq.rows, seq.cols));
    parts::fold(group, seq.rows, seq.cols);
  }
  return groups;
}

RegularPtr make(std::string text, const Seq& seq, const std::vector<Wanted>& wanted) {
  return RegularMaker::make(std::move(text), seq.rows, seq.cols, clipped(seq, wanted));
}

Seq read_seq(const text::Call& call, std::size_t offset_position) {
  const auto sizes = text::integers(call, 0, "seq");
  if (sizes.empty() || sizes.size() > 2) {
    throw Error(call.name, "seq", "S or (Sq, Sk)", std::to_string(sizes.size()) + " numbers");
  }
  return {sizes.front(), sizes.back(), read_optional(call, offset_position, "offset")};
}

Optional read_optional(const text::Call& call, std::size_t position, const char* argument) {
  return text::is_none(call, position) ? Optional{} : text::integer(call, position, argument);
}

std::int64_t read_or(const text::Call& call, std::size_t position, const char* argument, std::int64_t otherwise) {
  return read_optional(call, position, argument).value_or(otherwise);
}

bool read_flag(const text::Call& call, std::size_t position, const char* argument) {
  const auto flags = read_flags(call, position, argument);
  if (flags.size() != 1) {
    throw Error(call.name, argument, "True or False", "a tuple");
  }
  return flags.front() != 0;
}

std::vector<std::int64_t> read_flags(const text::Call& call, std::size_t position, const char* argument) {
  const auto flag = [&](const text::Value& value) -> std::int64_t {
    const auto* word = std::get_if<std::string>(&value.is);
    if (word == nullptr || (*word != "True" && *word != "False")) {
      throw Error(call.name, argument, "True or False", word != nullptr ? *word : "something else");
    }
    return *word == "True";
  };
  if (text::is_none(call, position)) {
    return {0};
  }
  const text::Value& value = call.arguments.at(position);
  std::vector<std::int64_t> flags;
  if (const auto* tuple = std::get_if<text::Tuple>(&value.is)) {
    std::transform(tuple->begin(), tuple->end(), std::back_inserter(flags), flag);
  } else {
    flags.push_back(flag(value));
  }
  return flags;
}

std::vector<std::int64_t> read_list(const text::Call& call, std::size_t position, const char* argument) {
  return text::integers(call, position, argument);
}

}  // namespace fretwork::patterns
